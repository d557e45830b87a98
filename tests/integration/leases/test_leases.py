"""Leases: claims that are renewed for as long as their holder lives, and lost if they are not."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from psycopg import sql
from sqlalchemy import create_engine

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_RELEASED,
    HeldLock,
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockExecutor,
    TaskLocks,
    current_lock,
)
from apscheduler_tasklock._database.url import parse_url
from tests.support import claims, pool_jobs
from tests.support.claims import RENEWS_OFTEN, end_lease, row
from tests.support.hosts import AsyncIO, Host
from tests.support.internals import look_interval
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.roles import PASSWORD, role
from tests.support.schedulers import Replica
from tests.support.waist import LockClient, Renewals, held_locks, met

MakeReplica = Callable[..., Replica]
MakeLocks = Callable[..., LockClient]
MakeTaskLocks = Callable[..., TaskLocks]
Connection = psycopg.Connection[Any]

RUN = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]


def test_a_new_replica_looks_some_times_in_a_lease_also_for_stored_jobs(database_url: str) -> None:
    """It knows their leases from its own options: their rows are not read for that."""
    looks = {}
    for failover in (True, False):
        executor = TaskLockExecutor(database_url, failover=failover, lease=1.5)
        looks[failover] = look_interval(executor)
        executor.shutdown()
    assert looks == {True: 0.5, False: 5.0}


def locked_until(connection: Connection, task: str = "job") -> datetime:
    row = connection.execute("SELECT locked_until FROM task_lock WHERE task_name = %s", [task])
    found = row.fetchone()
    assert found is not None
    until: datetime = found[0]
    return until


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def renewing_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "tasklock"]


def hold(locks: LockClient, task: str = "job", **times: float) -> HeldLock:
    return claims.held(locks, task, **{"min_lock": 60, "max_lock": 3600, "lease": 600, **times})


def test_all_that_is_held_is_renewed_by_one_thread_with_one_statement(
    make_locks: MakeLocks, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = make_locks(timings=RENEWS_OFTEN)
    renewed: list[int] = []

    def count(renewals: Renewals, carry_out: Callable[[], Any]) -> Any:
        renewed.append(len(renewals.requests))
        return carry_out()

    monkeypatch.setattr(*met(Renewals, count))
    assert renewing_threads() == []
    held = [hold(locks, f"task {number}") for number in range(3)]
    first = [locked_until(connection, lock.name) for lock in held]
    eventually(
        lambda: all(
            lock.locked_until > f + timedelta(seconds=2)
            for lock, f in zip(held, first, strict=True)
        )
    )
    assert len(renewing_threads()) == 1
    # One each half second; a late one only makes them fewer.
    assert 3 in renewed
    number = len(renewed)
    took = max(lock.locked_until for lock in held) - min(first)
    assert number <= took / timedelta(seconds=0.9 * 0.5) + 5
    for lock in held:
        # A renewal may be under way.
        eventually(lambda lock=lock: locked_until(connection, lock.name) == lock.locked_until)
        assert not lock.lost
        locks.release(lock)


def test_a_lease_is_no_longer_than_the_maximum_lock(
    make_locks: MakeLocks, connection: Connection
) -> None:
    locks = make_locks()
    held = hold(locks, lease=600, max_lock=60)
    claimed = row(connection)
    locks.release(held)
    assert claimed["locked_until"] - claimed["started_at"] == timedelta(seconds=60)


def test_the_next_lease_is_renewed_after_no_thread_could_be_started(
    make_locks: MakeLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = make_locks(timings=RENEWS_OFTEN)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(TaskLockError, match="no thread can be started"):
        hold(locks, "one", lease=60)
    monkeypatch.undo()
    held = hold(locks)
    first = held.locked_until
    eventually(lambda: held.lost or held.locked_until > first)
    lost = held.lost
    locks.release(held)
    assert not lost


@pytest.mark.parametrize("job", [True, False], ids=["job", "hold"])
def test_a_claim_that_nothing_can_renew_is_left_to_others_at_once(
    make_locks: MakeLocks,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    job: bool,
) -> None:
    """A job's window is handed over, and that of a hold is open again."""
    start = threading.Thread.start

    def unless_it_renews(thread: threading.Thread) -> None:
        no_thread(thread) if thread.name == "tasklock" else start(thread)

    monkeypatch.setattr(threading.Thread, "start", unless_it_renews)
    locks = make_locks()
    with pytest.raises(TaskLockError, match="no thread can be started"):
        hold(locks, lease=60, runs="a job" if job else "")
    eventually(lambda: row(connection)["handed_over"] or row(connection)["finished_at"])
    left = row(connection)
    assert left["over"]
    assert left["handed_over"] is job
    assert (left["finished_at"] is None) is job
    assert (left["window_until"] > left["window_start"]) is job


def test_a_row_that_somebody_has_locked_costs_no_lease(
    make_locks: MakeLocks, connection: Connection, database_url: str
) -> None:
    """The others are renewed meanwhile, and its own is revived afterwards."""
    locks = make_locks(timings=RENEWS_OFTEN)
    locked, other = hold(locks, "locked"), hold(locks, "other")
    with psycopg.connect(database_url) as session:
        end_lease(session, "locked")  # and the session keeps the row locked
        first = locked_until(connection, "other")
        eventually(lambda: locked_until(connection, "other") > first + timedelta(seconds=1))
    eventually(lambda: not row(connection, "locked")["over"])
    assert not locked.lost
    assert not other.lost
    for held in (locked, other):
        locks.release(held)


@pytest.mark.nightly
def test_extend_moves_the_maximum_lock_of_a_lease(
    make_locks: MakeLocks, connection: Connection
) -> None:
    locks = make_locks()
    held = hold(locks, max_lock=2, lease=1)
    held.extend(3)
    eventually(lambda: held.lost)
    row = connection.execute("SELECT locked_until - started_at FROM task_lock").fetchone()
    assert row == (timedelta(seconds=5),)
    with pytest.raises(TaskLockError, match="cannot be extended"):
        held.extend(3)
    locks.release(held)


@pytest.mark.parametrize("lease", [None, 60])
def test_extend_does_not_wait_for_the_pool_that_its_job_has_used_up(
    make_locks: MakeLocks, database_url: str, connection: Connection, lease: float | None
) -> None:
    engine = create_engine(parse_url(database_url), pool_size=1, max_overflow=0, pool_timeout=3600)
    connections = "SELECT FROM pg_stat_activity WHERE datname = current_database()"
    locks = make_locks(engine)
    held = hold(locks, lease=lease)
    before = held.run_until
    with engine.connect():
        asyncio.run(held.extend_async(30))
    assert held.run_until - before == timedelta(seconds=30)
    locks.release(held)
    locks.close()
    engine.dispose()
    eventually(lambda: connection.execute(connections).rowcount == 1)  # this one


def test_what_a_coroutine_held_whose_loop_was_closed_is_renewed_no_longer(
    make_task_locks: MakeTaskLocks, caplog: pytest.LogCaptureFixture
) -> None:
    locks = make_task_locks(given=RENEWS_OFTEN)
    entered = locks.hold("job", min_lock=0, max_lock=3600, lease=600)
    loop = asyncio.new_event_loop()
    held = loop.run_until_complete(entered.__aenter__())
    first = held.locked_until
    eventually(lambda: held.locked_until > first)
    loop.close()
    eventually(lambda: "Task 'job': its event loop was closed while the task ran" in caplog.text)
    entered.__exit__(None, None, None)


def test_extend_that_failed_in_an_outage_and_is_asked_again_extends_once(
    make_locks: MakeLocks, proxy: Proxy
) -> None:
    locks = make_locks(proxy.url)
    held = hold(locks, lease=60, max_lock=600)
    proxy.accepting = False
    proxy.cut_all()
    with pytest.raises(TaskLockDatabaseError):
        held.extend(30)
    proxy.accepting = True
    first = held.run_until
    held.extend(30)
    extended = held.run_until - first
    locks.release(held)
    assert extended == timedelta(seconds=30)


def test_extend_waits_for_a_row_that_somebody_has_locked(
    make_locks: MakeLocks,
    connection: Connection,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_locks, "EXTEND_TIMEOUT", 60.0)
    locks = make_locks(claim_timeout=180)
    held = hold(locks, lease=180, max_lock=600)
    first = held.run_until
    with psycopg.connect(database_url) as session, ThreadPoolExecutor() as pool:
        session.execute("SELECT FROM task_lock FOR UPDATE")
        extending = pool.submit(held.extend, 30)
        waiting = (
            "SELECT FROM pg_stat_activity"
            " WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        eventually(lambda: connection.execute(waiting).rowcount)
        session.rollback()
        extending.result(60)
    extended = held.run_until - first
    locks.release(held)
    assert extended == timedelta(seconds=30)


@pytest.mark.nightly  # in simulated time: tests/simulation/test_side_rules.py::TestExtensions
def test_extend_says_if_the_row_stays_locked(make_locks: MakeLocks, database_url: str) -> None:
    # So that a slow server's own error comes before the wait for its answer is over.
    locks = make_locks(claim_timeout=2)
    held = hold(locks, lease=60)
    first = held.run_until
    with psycopg.connect(database_url) as session:
        session.execute("SELECT FROM task_lock FOR UPDATE")
        with pytest.raises(TaskLockDatabaseError, match="lock timeout"):
            held.extend(30)
    extended = held.run_until - first
    locks.release(held)
    assert extended == timedelta(0)


def test_it_is_renewed_while_the_event_loop_is_blocked(
    database_url: str, connection: Connection
) -> None:
    host = AsyncIO()
    replica = Replica(database_url, host=host, lease=600, timings=RENEWS_OFTEN)

    async def block() -> bool:
        until = locked_until(connection) + timedelta(seconds=2)
        eventually(lambda: locked_until(connection) > until)  # blocks the loop
        lock = current_lock()
        assert lock is not None
        return lock.lost

    try:
        replica.start()
        replica.run_once(block)
        assert replica.one(EVENT_JOB_EXECUTED).retval is False
        replica.one(EVENT_TASK_LOCK_RELEASED)
        assert replica.codes() == RUN
    finally:
        replica.shutdown()
        host.close()


@pytest.mark.direct("the pooler keeps connections for a role, and has no login for it")
def test_it_is_renewed_on_a_server_that_is_full(
    make_locks: MakeLocks, database_url: str, connection: Connection
) -> None:
    with role(database_url, f"LOGIN PASSWORD '{PASSWORD}' CONNECTION LIMIT 1") as (name, url):
        grant = sql.SQL("GRANT SELECT, INSERT, UPDATE ON task_lock TO {}")
        connection.execute(grant.format(sql.Identifier(name)))
        locks = make_locks(url, timings=RENEWS_OFTEN)
        held = hold(locks)
        first = held.locked_until
        eventually(lambda: held.locked_until > first + timedelta(seconds=2))
        locks.release(held)
        locks.close()


@pytest.mark.nightly
def test_it_is_renewed_in_a_worker_process(
    make_replica: MakeReplica, connection: Connection, tmp_path: Any
) -> None:
    go_on = tmp_path / "go on"
    replica = make_replica(lease=3, executor="processpool", max_workers=1)
    replica.run_once(pool_jobs.wait_for, args=[str(go_on)])
    eventually(lambda: connection.execute("SELECT FROM task_lock WHERE kind IS NOT NULL").rowcount)
    until = locked_until(connection) + timedelta(seconds=3)
    eventually(lambda: locked_until(connection) > until)
    go_on.touch()
    replica.one(EVENT_TASK_LOCK_RELEASED)
    assert replica.codes() == RUN


def test_a_lost_lock_is_told_once_and_its_release_touches_nothing(
    make_replica: MakeReplica, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica(lease=600, timings=RENEWS_OFTEN)
    taken = "UPDATE task_lock SET claim_id = gen_random_uuid(), token = 9, locked_by = 'other'"
    # A registration may come in between, and changes none of these.
    read = "SELECT claim_id, locked_by, locked_until, window_until, finished_at FROM task_lock"
    rows: list[Any] = []

    def work() -> bool:
        lock = current_lock()
        assert lock is not None
        connection.execute(taken)
        replica.one(EVENT_TASK_LOCK_LOST)
        rows.extend(connection.execute(read).fetchall())
        return lock.lost

    replica.run_once(work)
    assert replica.one(EVENT_JOB_EXECUTED).retval is True
    assert replica.codes() == [EVENT_TASK_LOCK_GRANTED, EVENT_TASK_LOCK_LOST, EVENT_JOB_EXECUTED]
    assert connection.execute(read).fetchall() == rows
    assert caplog.text.count("the lock of the run scheduled at") == 1


@pytest.fixture(params=[Host, AsyncIO])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    host = request.param()
    yield host
    host.close()


def test_a_job_whose_lock_is_lost_before_it_begins_does_not_run(
    database_url: str, connection: Connection, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a process that was stopped in between: another replica is running the window."""
    replica = Replica(database_url, host=host, lease=600, timings=RENEWS_OFTEN)
    ran: list[str] = []
    rows: list[Any] = []
    found_out = threading.Event()
    lose = HeldLock.lose
    # What a release or a hand-over would change. A registration may come in between.
    columns = "claim_id, locked_by, locked_until, window_start, window_until, finished_at, token"

    def note(held: HeldLock) -> None:
        lose(held)
        found_out.set()

    monkeypatch.setattr(HeldLock, "lose", note)

    def overtake(_granted: Any) -> None:
        taken = "UPDATE task_lock SET claim_id = gen_random_uuid(), locked_by = 'other'"
        rows.extend(connection.execute(f"{taken} RETURNING {columns}").fetchall())
        assert found_out.wait(60)  # by the next renewal

    def work() -> None:
        ran.append("a function")

    async def work_on_the_loop() -> None:
        ran.append("a coroutine")

    # The worker, or the loop, waits for it between the grant and the job.
    replica.scheduler.add_listener(overtake, EVENT_TASK_LOCK_GRANTED)
    try:
        replica.start()
        replica.run_once(work_on_the_loop if host.coroutines else work)
        replica.one(EVENT_TASK_LOCK_LOST)
        replica.idle()
        assert replica.codes() == [EVENT_TASK_LOCK_GRANTED, EVENT_TASK_LOCK_LOST]
        assert ran == []
        assert connection.execute(f"SELECT {columns} FROM task_lock").fetchall() == rows
    finally:
        replica.shutdown()


def test_a_lease_that_ended_in_an_outage_is_revived_by_the_next_renewal(
    make_locks: MakeLocks, proxy: Proxy, connection: Connection
) -> None:
    locks = make_locks(proxy.url, timings=RENEWS_OFTEN)
    held = hold(locks)
    told = threading.Event()
    held.on_lost(told.set)
    proxy.to_server = lambda _: b""  # swallowed
    end_lease(connection)
    assert not held.lost
    proxy.to_server = lambda data: data
    eventually(lambda: not row(connection)["over"])
    first = held.locked_until
    eventually(lambda: held.locked_until > first)
    locks.release(held)
    assert not told.is_set()


@pytest.mark.nightly
def test_it_is_told_lost_also_when_renewals_are_refused(
    make_locks: MakeLocks, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a grant is revoked. The thread goes on, for other claims and better times."""
    locks = make_locks()
    other, held = hold(locks, "other", lease=6), hold(locks, max_lock=4)
    told = threading.Event()
    held.on_lost(told.set)
    connection.execute("ALTER TABLE task_lock RENAME TO elsewhere")
    eventually(told.is_set)
    [refusal] = [r for r in caplog.records if "renewals: " in r.getMessage()]
    assert "tried again: renewals: the table task_lock does not exist" in refusal.getMessage()
    assert refusal.levelno == logging.WARNING
    assert refusal.exc_info is None
    assert not other.lost
    connection.execute("ALTER TABLE elsewhere RENAME TO task_lock")
    first = other.locked_until
    eventually(lambda: other.locked_until > first)
    for lock in (held, other):
        locks.release(lock)


@pytest.mark.parametrize("cancels", [True, False])
def test_a_coroutine_can_be_cancelled_when_its_lock_is_lost(
    database_url: str, connection: Connection, cancels: bool
) -> None:
    host = AsyncIO()
    replica = Replica(database_url, host=host, lease=600, timings=RENEWS_OFTEN)

    async def work(**_: Any) -> str:
        connection.execute("UPDATE task_lock SET claim_id = gen_random_uuid()")
        lock = current_lock()
        assert lock is not None
        deadline = time.monotonic() + 60
        while not lock.lost:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        # It is told in a thread of its own, after the lock is known to be lost.
        if cancels:
            await asyncio.sleep(3600)
        return "ended"

    try:
        replica.start()
        replica.run_once(work, kwargs={"task_lock": {"cancel_on_lost": cancels}})
        if cancels:
            error = replica.one(EVENT_JOB_ERROR)
            assert isinstance(error.exception, asyncio.CancelledError)
        else:
            assert replica.one(EVENT_JOB_EXECUTED).retval == "ended"
        assert connection.execute("SELECT finished_at FROM task_lock").fetchone() == (None,)
    finally:
        replica.shutdown()
        host.close()


def test_a_hold_with_a_lease_is_renewed(
    make_task_locks: MakeTaskLocks, connection: Connection
) -> None:
    locks = make_task_locks(given=RENEWS_OFTEN)
    with locks.hold("job", min_lock=0, max_lock=3600, lease=600) as lock:
        until = lock.locked_until + timedelta(seconds=2)
        eventually(lambda: locked_until(connection) > until)
        assert not lock.lost
