"""The pooler of the tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import psycopg
import pytest

from tests.support import pgbouncer
from tests.support.pgbouncer import PgBouncer
from tests.support.postgres import Server
from tests.support.programs import UnavailableError, skip_or_fail


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture(autouse=True)
def _needs_pgbouncer() -> None:
    try:
        pgbouncer.find_program()
    except UnavailableError as unavailable:
        skip_or_fail(unavailable)


def test_a_port_that_another_program_has_taken_meanwhile_is_given_up(
    server: Server, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([taken_port, taken_port, pgbouncer.free_port()])
    monkeypatch.setattr(pgbouncer, "free_port", lambda: next(ports))
    with PgBouncer(server.url, 0) as pooler:
        assert pooler.port != taken_port
        with psycopg.connect(pooler.url, connect_timeout=10) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_pooler_that_does_not_start_is_an_error_with_its_log(server: Server) -> None:
    with (
        pytest.raises(AssertionError, match="unknown parameter"),
        PgBouncer(server.url, 0, {"no_such_setting": "1"}),
    ):
        pass
