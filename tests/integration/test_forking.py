"""Processes that fork while they hold locks: what is whose."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import EVENT_TASK_LOCK_RELEASED, HeldLock, TaskLocks, current_lock
from apscheduler_tasklock._database.connection import _is_direct
from apscheduler_tasklock._lock.releases import Ending
from tests.support.claims import row
from tests.support.polling import eventually
from tests.support.schedulers import Replica

MakeLocks = Callable[..., TaskLocks]
Connection = psycopg.Connection[Any]

TIMES: dict[str, Any] = {"min_lock": 0, "max_lock": 60, "lease": 1}

# What Python 3.12 and later say of a fork beside threads, which is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def status_of_child(do: Callable[[], object]) -> int:
    """Call a function in a forked child; return 0 if it returned, and 1 if it raised."""
    child = os.fork()
    if child == 0:  # nothing of pytest's may run here
        try:
            do()
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is told
            os.write(2, f"in the child: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    try:
        _, status = eventually(lambda: _ended(child), 20)
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return os.waitstatus_to_exitcode(status)


def _ended(child: int) -> tuple[int, int] | None:
    ended = os.waitpid(child, os.WNOHANG)
    return ended if ended[0] else None


def hold(locks: TaskLocks, name: str = "childs") -> None:
    with locks.hold(name, **TIMES):
        pass


async def hold_async(locks: TaskLocks) -> None:
    async with locks.hold("async", **TIMES):
        pass


@contextmanager
def taken(lock: Any) -> Iterator[None]:
    """Let another thread have a lock, as it may at the moment of a fork."""
    got, let_go = threading.Event(), threading.Event()

    def take() -> None:
        with lock:
            got.set()
            let_go.wait(60)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        assert got.wait(60)
        yield
    finally:
        let_go.set()
        thread.join()


@pytest.mark.parametrize(
    "lock",
    [
        "_claims.owed._changed",
        "_claims._leases._changed",
        "_clock._lock",
        "_attempts.outage._lock",
        "in_use._lock",
    ],
)
def test_a_lock_that_a_thread_had_at_the_fork_does_not_stop_the_child(
    make_locks: MakeLocks, lock: str
) -> None:
    locks = make_locks()
    hold(locks)

    def use() -> None:
        with locks.hold("childs", **TIMES) as held:
            locks._claims.owed.add(held.name, held.claim_id, Ending.KEEP, seconds=60)
        locks._attempts.outage._since = 0.0  # as if the database had been away
        hold(locks)
        locks.close()

    with taken(attrgetter(lock)(locks)):
        assert status_of_child(use) == 0


def test_a_search_for_dead_runs_that_a_thread_was_changing_at_the_fork_does_not_stop_the_child(
    database_url: str,
) -> None:
    failover = Replica(database_url).executor._failover
    with taken(failover._changed):
        assert status_of_child(failover.close) == 0


def test_a_first_connection_that_a_thread_was_making_at_the_fork_does_not_stop_the_child(
    make_locks: MakeLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = make_locks()
    begun, go_on = threading.Event(), threading.Event()

    def hold_up(opened: Any) -> bool:
        """Take long, as with a slow server."""
        begun.set()
        assert go_on.wait(60)
        return _is_direct(opened)

    def use() -> None:
        go_on.set()
        hold(locks)

    monkeypatch.setattr("apscheduler_tasklock._database.connection._is_direct", hold_up)
    thread = threading.Thread(target=hold, args=(locks, "parents"))
    thread.start()
    assert begun.wait(60)
    try:
        assert status_of_child(use) == 0
    finally:
        go_on.set()
        thread.join()


def test_a_child_has_threads_of_its_own_for_coroutines(make_locks: MakeLocks) -> None:
    locks = make_locks()
    asyncio.run(hold_async(locks))
    assert status_of_child(lambda: asyncio.run(hold_async(locks))) == 0
    asyncio.run(hold_async(locks))


@pytest.mark.direct("it compares server processes, which pgbouncer lends in turn")
def test_a_child_that_closes_its_locks_does_not_close_its_parents_connections(
    make_locks: MakeLocks,
) -> None:
    locks = make_locks()
    backend = "SELECT pg_backend_pid()"

    def backends() -> list[Any]:
        databases = [locks._database, locks._claims._renewing._database]
        found = []
        for database in databases:
            with database.cursor() as cursor:
                found.append(cursor.execute(backend).fetchone())
        return found

    parents = backends()
    assert status_of_child(locks.close) == 0
    assert backends() == parents
    locks._claims._renewing.rest()


def test_a_childs_renewals_leave_its_own_idle_connection_alone(make_locks: MakeLocks) -> None:
    locks = make_locks()
    hold(locks)

    def use() -> None:
        with locks._database.cursor() as cursor:
            before = cursor.connection
        with locks.hold("childs", **TIMES) as held:
            held.extend(1)  # renews, on the connection for that
        with locks._database.cursor() as cursor:
            assert cursor.connection is before

    assert status_of_child(use) == 0


@pytest.mark.parametrize("leaves", ["with", "async with"])
def test_a_child_that_leaves_its_parents_hold_releases_nothing(
    make_locks: MakeLocks, connection: Connection, leaves: str
) -> None:
    locks = make_locks()
    entered = locks.hold("parents", **TIMES)
    held = entered.__enter__()

    def leave() -> None:
        if leaves == "with":
            entered.__exit__(SystemExit, None, None)
        else:
            asyncio.run(entered.__aexit__())

    assert status_of_child(leave) == 0
    assert row(connection, "parents")["finished_at"] is None
    first = held.locked_until
    eventually(lambda: held.locked_until > first + timedelta(seconds=2))
    entered.__exit__()
    assert row(connection, "parents")["finished_at"] is not None


def test_a_child_that_a_job_forks_has_locks_of_its_own_and_the_parent_keeps_its_own(
    database_url: str, connection: Connection
) -> None:
    replica = Replica(database_url, lease=1)
    locks = replica.executor.locks

    def live() -> None:
        """Live for longer than a lease, and hold a lock for longer than one, too."""
        with locks.hold("childs", **TIMES) as held:
            first = held.locked_until
            eventually(lambda: held.locked_until > first + timedelta(seconds=2))
            threads = sorted(thread.name for thread in threading.enumerate())
            assert [name for name in threads if name.startswith("tasklock")] == [
                "tasklock-renewals"
            ]
            assert not held.lost
        locks.close()

    def job() -> tuple[int, HeldLock | None, bool]:
        status = status_of_child(live)
        held = current_lock()
        return status, held, held is None or held.lost

    replica.start()
    replica.run_once(job)
    status, held, lost = replica.one(EVENT_JOB_EXECUTED).retval
    replica.shutdown()
    assert (status, lost) == (0, False)
    replica.one(EVENT_TASK_LOCK_RELEASED)
    mine, childs = row(connection, "job"), row(connection, "childs")
    assert (mine["token"], mine["claim_id"]) == (held.token, held.claim_id)
    assert mine["started_at"] < childs["started_at"] < childs["finished_at"] < mine["finished_at"]
