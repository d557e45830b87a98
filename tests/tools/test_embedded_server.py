"""The embedded server of tests, demo and benchmarks."""

from __future__ import annotations

import os
import shlex
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from apscheduler_tasklock.demo import server as server_module
from apscheduler_tasklock.demo.server import EmbeddedServer, free_port

pytestmark = pytest.mark.own_server


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that each user may enter, as the one that the server runs as."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        yield Path(name)


def test_its_data_may_be_in_a_folder_of_ones_own_and_go_with_it(folder: Path) -> None:
    with EmbeddedServer(data_in=folder):
        [own] = folder.iterdir()
        assert (own / "data" / "PG_VERSION").exists()
    assert not list(folder.iterdir())


def test_by_default_only_its_own_user_can_reach_it() -> None:
    """It asks for no password: the folder of its socket keeps other users of the machine out."""
    with EmbeddedServer() as server, psycopg.connect(server.url) as connection:
        shown = connection.execute("SHOW listen_addresses").fetchone()
        [folder] = connection.execute("SHOW unix_socket_directories").fetchone() or ()
        assert shown == ("",)
        assert shlex.quote(server.url) == server.url  # people paste it
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", server.port)) != 0


def test_its_socket_has_a_path_that_is_short_enough(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = folder / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with EmbeddedServer() as server:
        psycopg.connect(server.url).close()


def test_with_loopback_it_is_reached_through_tcp() -> None:
    with EmbeddedServer(loopback=True) as server, psycopg.connect(server.url) as connection:
        assert connection.info.host == "127.0.0.1"


def test_if_another_server_takes_its_port_it_starts_on_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the other server would answer in its place, until that one is stopped."""
    with EmbeddedServer(loopback=True) as first:
        ports = [first.port]
        monkeypatch.setattr(
            server_module, "free_port", lambda: ports.pop() if ports else free_port()
        )
        with EmbeddedServer(loopback=True) as second, psycopg.connect(second.url) as connection:
            [pid] = (
                connection.execute(
                    "SELECT split_part(pg_read_file('postmaster.pid'), chr(10), 1)::int"
                ).fetchone()
                or ()
            )
            assert not ports
            assert pid == second.pid
