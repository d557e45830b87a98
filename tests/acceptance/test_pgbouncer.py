"""Behind pgbouncer in transaction mode, which gives each transaction any connection it has."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import HeldLock
from apscheduler_tasklock._lock.replica import LockSettings
from tests.support.claims import claim, held
from tests.support.commands import PATIENT
from tests.support.pgbouncer import PgBouncer, TooOldError
from tests.support.postgres import Server
from tests.support.programs import UnavailableError, skip_or_fail
from tests.support.waist import LockClient, Refusal

Start = Callable[..., PgBouncer]


@pytest.fixture
def start_pgbouncer(server: Server) -> Iterator[Start]:
    """Start a pgbouncer in front of the server; it is ended after the test."""
    with ExitStack() as ending:

        def start(prepared: int, **settings: str) -> PgBouncer:
            try:
                return ending.enter_context(PgBouncer(server.url, prepared, settings))
            except UnavailableError as unavailable:
                skip_or_fail(unavailable)
            except TooOldError as too_old:
                # `make test-pgbouncer` builds a later one.
                pytest.skip(str(too_old))

        yield start


def patient_locks(url: str, name: str) -> LockClient:
    """Return the locks of a replica that warns of no outage, however slow its connection is."""
    return LockClient(LockSettings(url, name, claim_timeout=180, timings=PATIENT))


LONG = {"min_lock": 0.0, "max_lock": 600.0}


@pytest.mark.parametrize("prepared", [0, 200])
def test_replicas_that_share_its_connections_claim_and_release(
    start_pgbouncer: Start,
    direct_url: str,
    connection: psycopg.Connection[Any],
    caplog: pytest.LogCaptureFixture,
    prepared: int,
) -> None:
    """Each task by one of two replicas that both want it; none by both, and none by neither."""
    url = start_pgbouncer(prepared, default_pool_size="3").spread(direct_url)
    caplog.set_level(logging.WARNING, "apscheduler_tasklock")

    def race(task: str) -> int:
        claims: list[HeldLock | Refusal] = [claim(locks, task, **LONG) for locks in (one, other)]
        locks = [lock for lock in claims if isinstance(lock, HeldLock)]
        for lock in locks:
            assert (one if claims[0] is lock else other).release(lock) is not None
        return len(locks)

    with (
        closing(patient_locks(url, "one")) as one,
        closing(patient_locks(url, "other")) as other,
        ThreadPoolExecutor(8) as pool,
    ):
        assert list(pool.map(race, [f"task {number}" for number in range(200)])) == [1] * 200
    counts = "SELECT count(*), count(finished_at) FROM task_lock"
    assert connection.execute(counts).fetchone() == (200, 200)
    if prepared:
        assert not caplog.records


@pytest.mark.parametrize("prepared", [0, 200])
def test_an_applications_prepared_statement_is_not_run_by_a_release(
    start_pgbouncer: Start,
    direct_url: str,
    connection: psycopg.Connection[Any],
    prepared: int,
) -> None:
    """The application's statement happens to have the number and types of a release's values."""
    # The connection that was given back last is given out first, as by default.
    url = start_pgbouncer(prepared, server_round_robin="0").url_of(direct_url)
    connection.execute("CREATE TABLE audit (good boolean, note text, id uuid)")
    with (
        psycopg.connect(url, autocommit=True) as application,
        closing(patient_locks(url, "replica")) as locks,
    ):
        insert = "INSERT INTO audit VALUES (%s, %s, %s) RETURNING now(), now()"
        application.execute(insert, [True, "mine", uuid.uuid4()], prepare=True)
        with application.transaction():  # it has its connection, and the library gets another
            application.execute("SELECT")
            for number in range(8):  # psycopg prepares what it has seen five times
                locks.release(held(locks, f"task {number}", **LONG))
            last = held(locks, "last", **LONG)
        locks.release(last)
    assert connection.execute("SELECT note FROM audit").fetchall() == [("mine",)]
    finished = "SELECT finished_at IS NOT NULL FROM task_lock WHERE task_name = 'last'"
    assert connection.execute(finished).fetchone() == (True,)
