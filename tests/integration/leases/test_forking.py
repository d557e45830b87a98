"""Processes that fork while they hold locks: what is whose."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_RELEASED,
    HeldLock,
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockExecutor,
    TaskLocks,
    current_lock,
)
from apscheduler_tasklock._database.timings import Timings
from tests.support.claims import RENEWS_OFTEN, held, row
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.schedulers import Replica

MakeTaskLocks = Callable[..., TaskLocks]
Connection = psycopg.Connection[Any]

# A leader that looks often, so that a test need not wait for long.
PROMPT_LEADER: dict[str, Any] = {
    "poll_interval": 0.3,
    "timings": Timings(head_start=0.1, recovery_grace=0.1),
}
TIMES: dict[str, Any] = {"min_lock": 0, "max_lock": 3600, "lease": 600}

# What Python 3.12 and later say of a fork beside threads, which is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def status_of_child(do: Callable[[], object]) -> int:
    """Call a function in a forked child; return 0 if it returned, and 1 if it raised."""
    child = os.fork()
    if child == 0:  # nothing of pytest's may run here
        faulthandler.dump_traceback_later(10, file=2)  # so that a child that hangs shows where
        try:
            do()
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is told
            os.write(2, f"in the child: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    try:
        _, status = eventually(lambda: _ended(child))
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


def mutexes(owner: object) -> list[Any]:
    """Return what threads take turns by in an object of the library, and in all that it has."""
    found, seen, objects = [], {id(owner)}, [owner]
    kinds = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
    for each in objects:
        for value in vars(each).values():
            if isinstance(value, kinds):
                found.append(value)
            elif (
                type(value).__module__.startswith("apscheduler_tasklock.") and id(value) not in seen
            ):
                seen.add(id(value))
                objects.append(value)
    return found


@contextmanager
def taken(mutexes: Sequence[Any]) -> Iterator[None]:
    """Let another thread have all of these, as it may have any at the moment of a fork."""
    got, let_go = threading.Event(), threading.Event()

    def take() -> None:
        with ExitStack() as stack:
            for mutex in mutexes:
                stack.enter_context(mutex)
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


@pytest.fixture
def executor(database_url: str) -> Iterator[TaskLockExecutor]:
    """An executor that no scheduler has started; its locks can be used all the same."""
    executor = TaskLockExecutor(database_url, replica_id="forking")
    yield executor
    executor.shutdown()


@pytest.mark.nightly
def test_what_a_thread_of_the_locks_had_taken_at_the_fork_does_not_stop_the_child(
    make_task_locks: MakeTaskLocks,
) -> None:
    locks = make_task_locks()
    hold(locks)

    def use() -> None:
        hold(locks)
        asyncio.run(hold_async(locks))
        locks.close()

    found = mutexes(locks)
    assert len(found) >= 5
    with taken(found):
        assert status_of_child(use) == 0


def test_what_a_thread_of_an_executor_had_taken_at_the_fork_does_not_stop_the_child(
    executor: TaskLockExecutor,
) -> None:
    executor.user.locks.release(held(executor.user.locks, **TIMES))

    def use() -> None:
        locks = executor.user.locks
        lock = held(locks, **TIMES)
        locks.replica.outage.begin(TaskLockDatabaseError("as if it were"))
        locks.release(lock)
        executor.shutdown()

    found = mutexes(executor)
    assert len(found) >= 5
    with taken(found):
        assert status_of_child(use) == 0


def test_a_first_connection_that_a_thread_was_making_at_the_fork_does_not_stop_the_child(
    make_task_locks: MakeTaskLocks, proxy: Proxy
) -> None:
    locks = make_task_locks(proxy.url, claim_timeout=180)
    begun, go_on = threading.Event(), threading.Event()

    def hold_up_the_first(data: bytes) -> bytes:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(60)
        return data

    proxy.to_client = hold_up_the_first
    thread = threading.Thread(target=hold, args=(locks, "parents"))
    thread.start()
    assert begun.wait(60)
    try:
        assert status_of_child(lambda: hold(locks)) == 0
    finally:
        go_on.set()
        thread.join()


def test_a_child_has_threads_of_its_own_for_coroutines(make_task_locks: MakeTaskLocks) -> None:
    locks = make_task_locks()
    asyncio.run(hold_async(locks))
    assert status_of_child(lambda: asyncio.run(hold_async(locks))) == 0
    asyncio.run(hold_async(locks))


def test_a_childs_copy_of_its_parents_locks_claims_nothing(executor: TaskLockExecutor) -> None:
    """As where a job has kept them. It would use its parent's connection."""
    parents = executor.user.locks
    parents.release(held(parents, **TIMES))

    def claim() -> None:
        with pytest.raises(TaskLockError, match="these locks are closed"):
            held(parents, **TIMES)

    assert status_of_child(claim) == 0
    parents.release(held(parents, **TIMES))


def test_locks_that_a_parent_has_closed_stay_closed_in_its_child(
    make_task_locks: MakeTaskLocks,
) -> None:
    locks = make_task_locks()
    locks.close()

    def claim() -> None:
        with pytest.raises(TaskLockError, match="these locks are closed"):
            hold(locks)

    assert status_of_child(claim) == 0


def test_a_child_that_closes_its_locks_does_not_close_its_parents_connections(
    executor: TaskLockExecutor, connection: Connection
) -> None:
    lock = held(executor.user.locks, min_lock=0, max_lock=600, lease=180)

    def backends() -> list[Any]:
        lock.extend(1)
        ours = "SELECT pid FROM pg_stat_activity WHERE application_name = 'tasklock forking'"
        return connection.execute(f"{ours} ORDER BY 1").fetchall()

    def close() -> None:
        executor.user.close()
        gc.collect()

    parents = backends()
    assert len(parents) == 1
    assert status_of_child(close) == 0
    assert backends() == parents
    executor.user.locks.release(lock)


def test_a_childs_renewals_leave_its_own_idle_connection_alone(executor: TaskLockExecutor) -> None:
    executor.user.locks.release(held(executor.user.locks, **TIMES))

    def use() -> None:
        locks = executor.user.locks
        before = locks.database.ask(attrgetter("connection"))
        lock = held(locks, **TIMES)
        lock.extend(1)
        locks.release(lock)
        assert locks.database.ask(attrgetter("connection")) is before

    assert status_of_child(use) == 0


@pytest.mark.parametrize("leaves", ["with", pytest.param("async with", marks=pytest.mark.nightly)])
def test_a_child_that_leaves_its_parents_hold_releases_nothing(
    make_task_locks: MakeTaskLocks, connection: Connection, leaves: str
) -> None:
    entered = make_task_locks(given=RENEWS_OFTEN).hold("parents", **TIMES)
    lock = entered.__enter__()

    def leave() -> None:
        if leaves == "with":
            entered.__exit__(SystemExit, None, None)
        else:
            asyncio.run(entered.__aexit__())

    assert status_of_child(leave) == 0
    assert row(connection, "parents")["finished_at"] is None
    first = lock.locked_until
    eventually(lambda: lock.locked_until > first + timedelta(seconds=2))
    entered.__exit__()
    assert row(connection, "parents")["finished_at"] is not None


def test_a_child_cannot_extend_its_parents_lock(
    make_task_locks: MakeTaskLocks, connection: Connection
) -> None:
    with make_task_locks().hold("parents", **TIMES) as lock:
        before = row(connection, "parents")["run_until"]

        def extend() -> None:
            with pytest.raises(TaskLockError, match="in a forked child"):
                lock.extend(60)

        assert status_of_child(extend) == 0
        assert row(connection, "parents")["run_until"] == before
        lock.extend(60)
        assert row(connection, "parents")["run_until"] > before


@pytest.mark.nightly
def test_a_child_that_a_job_forks_has_locks_of_its_own_and_the_parent_keeps_its_own(
    database_url: str, connection: Connection
) -> None:
    replica = Replica(database_url, lease=600, timings=RENEWS_OFTEN)

    def live() -> None:
        """Hold a lock until it was renewed some times."""
        user = replica.executor.user
        lock = held(user.locks, "childs", **TIMES)
        first = lock.locked_until
        eventually(lambda: lock.locked_until > first + timedelta(seconds=2))
        threads = sorted(thread.name for thread in threading.enumerate())
        assert [name for name in threads if name.startswith("tasklock")] == ["tasklock"]
        assert not lock.lost
        user.locks.release(lock)
        user.close()

    def job() -> tuple[int, HeldLock | None, bool]:
        status = status_of_child(live)
        lock = current_lock()
        return status, lock, lock is None or lock.lost

    replica.start()
    replica.run_once(job)
    status, lock, lost = replica.one(EVENT_JOB_EXECUTED).retval
    replica.shutdown()
    assert (status, lost) == (0, False)
    replica.one(EVENT_TASK_LOCK_RELEASED)
    mine, childs = row(connection, "job"), row(connection, "childs")
    assert (mine["token"], mine["claim_id"]) == (lock.token, lock.claim_id)
    assert mine["started_at"] < childs["started_at"] < childs["finished_at"] < mine["finished_at"]


def test_each_child_is_a_replica_of_its_own(executor: TaskLockExecutor) -> None:
    parents = executor.user.replica_id

    def check() -> None:
        assert executor.user.replica_id == f"{parents} child {os.getpid()}"

    assert status_of_child(check) == 0
    assert executor.user.replica_id == parents


def test_a_childs_task_locks_claim_as_a_replica_of_their_own_and_leave_the_parents_alone(
    make_task_locks: MakeTaskLocks, connection: Connection
) -> None:
    locks = make_task_locks(replica_id="parent")
    with locks.hold("parents", **TIMES) as lock:

        def use() -> None:
            assert locks.replica_id == f"parent child {os.getpid()}"
            hold(locks)
            locks.close()

        assert status_of_child(use) == 0
        assert row(connection, "childs")["locked_by"].startswith("parent child ")
        lock.extend(60)


@pytest.mark.usefixtures("unhurried_stop")  # the parent resigns, or leads for its lease
def test_a_childs_copy_of_a_scheduler_that_led_leads_under_an_id_of_its_own(
    database_url: str, connection: Connection
) -> None:
    """Else two processes would lead under one id, and each would think that it leads alone."""
    replica = Replica(
        database_url, replica_id="parent", leader=True, leader_lease=600, **PROMPT_LEADER
    )
    replica.scheduler.add_job(print, "interval", hours=1, id="job")
    replica.start()
    eventually(lambda: replica.executor.is_leader)
    has_resigned, to_child = os.pipe()

    def lead() -> None:
        os.read(has_resigned, 1)
        replica.scheduler.shutdown(wait=False)
        replica.scheduler.start()
        replica.scheduler.add_job(print, "interval", hours=1, id="job")
        eventually(lambda: replica.executor.is_leader)
        leader = replica.executor.user.database.ask(
            lambda cursor: cursor.execute(
                "SELECT locked_by FROM task_lock WHERE task_name LIKE '%leader:'"
            ).fetchone()
        )
        assert leader == (f"parent child {os.getpid()}",)

    child = threading.Thread(target=lambda: statuses.append(status_of_child(lead)))
    statuses: list[int] = []
    child.start()
    try:
        replica.shutdown()
    finally:
        os.write(to_child, b"x")
        child.join()
        os.close(to_child)
        os.close(has_resigned)
    assert statuses == [0]
