"""A server that crashes and forgets what it had not written to its disk yet."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from apscheduler_tasklock import TaskLocks, upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer

pytestmark = pytest.mark.own_server


@pytest.fixture
def crashing() -> Iterator[EmbeddedServer]:
    """A server whose role does not wait for its commits, which are written after 10 s."""
    with EmbeddedServer({"wal_writer_delay": "10s"}) as server:
        upgrade(server.url)
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("ALTER ROLE postgres SET synchronous_commit = off")
        yield server


def crash(server: EmbeddedServer) -> None:
    server.stop(signal.SIGQUIT)  # at once, without a checkpoint
    server.start()


@pytest.mark.nightly
def test_a_claim_that_a_crash_followed_gives_its_token_to_nobody_else(
    crashing: EmbeddedServer,
) -> None:
    with closing(TaskLocks(crashing.url, replica_id="holder")) as locks:
        with locks.hold("job", min_lock=0, max_lock=3600) as before:
            pass
        with psycopg.connect(crashing.url, autocommit=True) as connection:
            connection.execute("CHECKPOINT")  # the row itself is safe
        with locks.hold("job", min_lock=0, max_lock=3600) as lost:
            crash(crashing)
    with (
        closing(TaskLocks(crashing.url, replica_id="next")) as locks,
        locks.hold("job", min_lock=0, max_lock=3600) as following,
    ):
        assert before.token < lost.token < following.token


@pytest.mark.nightly
def test_a_commit_that_nobody_waited_for_is_lost_in_the_crash(crashing: EmbeddedServer) -> None:
    """Without which the test above would prove nothing."""
    with psycopg.connect(crashing.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE number AS SELECT 0 AS n")
        connection.execute("CHECKPOINT")
        connection.execute("UPDATE number SET n = 1")
    crash(crashing)
    with psycopg.connect(crashing.url) as connection:
        assert connection.execute("SELECT n FROM number").fetchone() == (0,)
