"""Pending releases: which claims leave one, and when and how often it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Engine

from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.outcomes import RunOutcome
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockSchemaError
from apscheduler_tasklock.lock import HeldLock
from tests.support.claims import claim, held
from tests.support.faults import RELEASE
from tests.support.internals import waiting_in
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.roles import role
from tests.support.waist import LockClient, Refusal, retry_of

MakeLocks = Callable[..., LockClient]

TIMES = {"min_lock": 0.0, "max_lock": 5000.0}
FAILED = RunOutcome(outcome="error", error_type="Error", retry_in=0.0)
# Pending releases are left to the next claim and to close: the background never gets to them.
NO_RETRIES = Timings(release_interval=3600.0)
# Close, too, waits for longer than a slow machine stops; with `unhurried_stop`.
UNHURRIED = replace(NO_RETRIES, closing_timeout=600.0)


def leave_pending(locks: LockClient, proxy: Proxy, lock: HeldLock) -> None:
    """Release a lock while the database is unavailable; it is back afterwards."""
    proxy.accepting = False
    proxy.cut_all()
    with pytest.raises(TaskLockDatabaseError):
        locks.release(lock)
    proxy.accepting = True


def released(connection: psycopg.Connection[Any]) -> list[str]:
    """Return the tasks whose release has arrived."""
    statement = "SELECT task_name FROM task_lock WHERE finished_at IS NOT NULL ORDER BY 1"
    return [name for (name,) in connection.execute(statement)]


@pytest.mark.direct("pgbouncer's connections are older than the setting")
@pytest.mark.parametrize(
    ("locks_it", "limit"),
    [
        ("SELECT FROM task_lock FOR UPDATE", "lock_timeout"),
        # For a table that is locked, a statement waits before it sets a limit of its own.
        ("LOCK TABLE task_lock IN EXCLUSIVE MODE", "lock_timeout"),
        ("LOCK TABLE task_lock IN EXCLUSIVE MODE", "statement_timeout"),
    ],
)
def test_a_claim_that_the_server_undid_leaves_none(
    engine: Engine,
    make_locks: MakeLocks,
    database_url: str,
    connection: psycopg.Connection[Any],
    locks_it: str,
    limit: str,
) -> None:
    finished = make_locks()
    finished.release(held(finished, **TIMES))
    with psycopg.connect(database_url) as blocker:
        blocker.execute(locks_it)
        database = sql.Identifier(connection.info.dbname)
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET {} = '100ms'").format(database, sql.SQL(limit))
        )
        # An application's engine: its connections have the server's limit.
        locks = make_locks(engine, claim_timeout=6)
        with pytest.raises(TaskLockDatabaseError, match=f"due to {limit.replace('_', ' ')}"):
            held(locks, **TIMES)
        # It could not have been sent by now.
        assert not waiting_in(locks.thread)


def test_one_that_a_claim_has_sent_is_not_sent_again(make_locks: MakeLocks, proxy: Proxy) -> None:
    locks = make_locks(proxy.url, timings=NO_RETRIES)
    lock = held(locks, **TIMES)
    leave_pending(locks, proxy, lock)
    sent: list[bytes] = []

    def record(data: bytes) -> bytes:
        sent.append(data)
        return data

    proxy.to_server = record
    held(locks, **TIMES)
    locks.close()  # sends what is pending
    of_the_first = [data for data in sent if _names(data, lock)]
    assert len(of_the_first) == 1


@pytest.mark.nightly
@pytest.mark.direct("the pooler keeps connections for a role, and has no login for it")
def test_one_that_is_rejected_is_sent_when_it_is_permitted_again(
    make_locks: MakeLocks,
    database_url: str,
    connection: psycopg.Connection[Any],
) -> None:
    """Else the run, whose lease ends meanwhile, would be taken for dead and run again."""
    with role(database_url) as (name, url):
        user = sql.Identifier(name)
        connection.execute(sql.SQL("GRANT SELECT, INSERT, UPDATE ON task_lock TO {}").format(user))
        locks = make_locks(url)
        lock = held(locks, **TIMES)
        connection.execute(sql.SQL("REVOKE UPDATE ON task_lock FROM {}").format(user))
        with pytest.raises(TaskLockSchemaError, match="may not use"):
            locks.release(lock)
        assert released(connection) == []
        connection.execute(sql.SQL("GRANT UPDATE ON task_lock TO {}").format(user))
        eventually(lambda: released(connection) == ["task"])
        locks.close()


@pytest.mark.usefixtures("unhurried_stop")
def test_where_no_thread_starts_any_more_close_sends_them(
    make_locks: MakeLocks,
    proxy: Proxy,
    connection: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As while the interpreter ends, from Python 3.12 on. Not all Pythons here are so new."""
    start = threading.Thread.start

    def start_no_other(thread: threading.Thread) -> None:
        if thread.name == "tasklock-releases":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_no_other)
    locks = make_locks(proxy.url, timings=UNHURRIED)
    leave_pending(locks, proxy, held(locks, **TIMES))
    assert released(connection) == []
    locks.close()
    assert released(connection) == ["task"]


@pytest.mark.usefixtures("unhurried_stop")
def test_close_sends_them(
    make_locks: MakeLocks, proxy: Proxy, connection: psycopg.Connection[Any]
) -> None:
    locks = make_locks(proxy.url, timings=UNHURRIED)
    leave_pending(locks, proxy, held(locks, **TIMES))
    assert released(connection) == []
    locks.close()
    assert released(connection) == ["task"]


@pytest.mark.usefixtures("unhurried_stop")
def test_close_sends_them_again_while_the_database_restarts(
    make_locks: MakeLocks, proxy: Proxy, connection: psycopg.Connection[Any]
) -> None:
    """A deployment that shuts replicas down may meet a restart of the server."""
    locks = make_locks(proxy.url, timings=UNHURRIED)
    leave_pending(locks, proxy, held(locks, **TIMES))
    proxy.accepting, refused = False, proxy.refused
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(locks.close)
        eventually(lambda: proxy.refused > refused + 1)
        proxy.accepting = True
        closing.result(60)
    assert released(connection) == ["task"]


@pytest.mark.usefixtures("unhurried_stop")
@pytest.mark.parametrize("arrives", [True, False])
def test_one_that_is_added_while_close_sends_the_others_is_sent_or_warned_about(
    make_locks: MakeLocks,
    proxy: Proxy,
    connection: psycopg.Connection[Any],
    caplog: pytest.LogCaptureFixture,
    arrives: bool,
) -> None:
    timings = UNHURRIED if arrives else NO_RETRIES
    locks = make_locks(proxy.url, claim_timeout=60, timings=timings)
    first, second = held(locks, "first", **TIMES), held(locks, "second", **TIMES)
    leave_pending(locks, proxy, first)
    caplog.clear()
    sending, go_on = threading.Event(), threading.Event()

    def hold_up(data: bytes) -> bytes | None:
        sending.set()
        return data if go_on.wait(60) and arrives else None

    proxy.to_server = hold_up
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(locks.close)
        assert sending.wait(60)
        locks.begin_release(second)
        go_on.set()
        closing.result(60)

    def given_up() -> list[Any]:
        # In whatever order: the two may fail together, or one after the other.
        return sorted(r.args for r in caplog.records if "was not released" in r.getMessage())

    assert released(connection) == (["first", "second"] if arrives else [])
    # Where the machine stands still, the close may be over before the answer's limit.
    warned = [] if arrives else [("first",), ("second",)]
    eventually(lambda: given_up() == warned, instead=given_up)


def test_one_is_given_up_by_close_also_if_the_databases_thread_stood_still_meanwhile(
    make_locks: MakeLocks, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine that freezes. It would be tried for hours, and keep the thread."""
    locks = make_locks(proxy.url, timings=Timings(closing_timeout=0.1))
    lock = held(locks, **TIMES)
    proxy.accepting = False
    proxy.cut_all()
    with pytest.raises(TaskLockDatabaseError):
        locks.release(lock)
    begun, is_closed = threading.Event(), threading.Event()

    def stand_still() -> None:
        begun.set()
        is_closed.wait(60)

    locks.replica.thread.call(stand_still)
    assert begun.wait(60)
    locks.close(blocking=True)
    is_closed.set()
    eventually(lambda: "was not released, or the answer was lost" in caplog.text)


def test_one_that_comes_after_close_is_sent_in_the_background(
    make_locks: MakeLocks, proxy: Proxy, connection: psycopg.Connection[Any]
) -> None:
    """As by a job that a shutdown did not wait for."""
    locks = make_locks(proxy.url)
    lock = held(locks, **TIMES)
    locks.close()
    leave_pending(locks, proxy, lock)
    eventually(lambda: released(connection) == ["task"])


def _names(data: bytes, lock: HeldLock) -> bool:
    """Tell whether a message holds a claim's id, in either format of its parameters."""
    return lock.claim_id.bytes in data or lock.claim_id.hex.encode() in data.replace(b"-", b"")


def _granted(locks: LockClient) -> HeldLock | None:
    """Claim the task, unless the claim counts as one from before the end of the last window."""
    claimed = claim(locks, **TIMES)
    return claimed if isinstance(claimed, HeldLock) else None


@pytest.mark.parametrize("lease", [600.0, 1.0])
def test_one_whose_answer_was_lost_is_no_lost_lock_while_its_lease_lasts(
    make_locks: MakeLocks, proxy: Proxy, lease: float
) -> None:
    """It arrived, and somebody else has claimed the task when it is sent again."""
    one = make_locks(proxy.url, replica_id="one", timings=Timings(release_timeout=60))
    other = make_locks(replica_id="other")
    lock = held(one, **TIMES, lease=lease)
    taken: list[HeldLock] = []

    def lose(data: bytes) -> bytes | None:
        if taken:
            return data
        taken.append(eventually(lambda: _granted(other)))
        eventually(lambda: lease > 1 or lock.lease_left == 0)
        return None

    proxy.to_client = lose
    released = one.release(lock)
    assert (released and released.locked_until, released is None) == (None, lease == 1)
    other.release(taken[0])


def test_one_whose_answer_was_lost_tells_of_the_retry_that_it_has_noted(
    make_locks: MakeLocks, proxy: Proxy, connection: psycopg.Connection[Any]
) -> None:
    """When it is sent again, its lease is over, and the claim of the retry stands."""
    one = make_locks(proxy.url, replica_id="one", timings=Timings(release_timeout=60))
    other = make_locks(replica_id="other")
    lock = held(one, **TIMES, lease=1.0)
    retries: list[HeldLock | Refusal | None] = []
    is_sent = threading.Event()

    def note(data: bytes) -> bytes:
        if RELEASE in data:
            is_sent.set()
        return data

    def lose(data: bytes) -> bytes | None:
        if retries or not is_sent.is_set():  # the answer to a renewal
            return data
        retries.append(other.claim(retry_of("task", lock.claim_id, 5000.0)))
        eventually(lambda: lock.lease_left == 0)
        return None

    proxy.to_server, proxy.to_client = note, lose
    released = one.release(lock, FAILED)

    [retry] = retries
    assert isinstance(retry, HeldLock)
    assert released is not None
    noted = connection.execute("SELECT retry_at FROM task_lock").fetchone()
    assert (released.retry_at,) == noted
    other.release(retry)
