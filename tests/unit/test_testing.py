"""``apscheduler_tasklock.testing``: what an application's tests have in place of a database."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    HeldLock,
    TaskLockError,
    TaskLockJobStore,
    TaskLockOptionError,
    TaskLockRefusedError,
    TaskLocks,
    TaskLockStateError,
    current_lock,
    task_lock,
)
from apscheduler_tasklock.testing import held_lock, in_memory_locks, unlocked
from tests.support import pool_jobs
from tests.support.hosts import AsyncIO, Host
from tests.support.polling import eventually
from tests.support.schedulers import NO_DATABASE, Replica
from tests.support.waist import MemoryTaskLocks, Unlocked, use_stand_in

RUN_TIME = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)

Make = Callable[..., Replica]


class TestHeldLock:
    def test_it_is_the_current_one_within(self) -> None:
        assert current_lock() is None
        with held_lock("report", token=7, run_time=RUN_TIME) as lock:
            assert current_lock() is lock
            assert isinstance(lock, HeldLock)
            assert (lock.name, lock.token, lock.run_time) == ("report", 7, RUN_TIME)
            assert (lock.lost, lock.is_takeover) == (False, False)
        assert current_lock() is None
        assert lock.lost

    def test_it_can_be_lost_from_the_beginning_or_later(self) -> None:
        with held_lock(lost=True) as lock:
            assert lock.lost
        with held_lock() as lock:
            lock.lose()
            assert lock.lost

    def test_a_takeover_names_who_died(self) -> None:
        with held_lock(is_takeover=True) as lock:
            assert lock.is_takeover
            assert lock.dead_holder is not None

    def test_it_is_extended_unless_it_is_lost(self) -> None:
        with held_lock(max_lock=timedelta(minutes=1)) as lock:
            until, left = lock.run_until, lock.seconds_left
            lock.extend(timedelta(hours=1))
            assert lock.run_until == lock.locked_until == until + timedelta(hours=1)
            assert lock.seconds_left > left + 3500
            asyncio.run(lock.extend_async(60))
            assert lock.run_until == until + timedelta(seconds=3660)
            lock.lose()
            with pytest.raises(TaskLockError, match="has ended and cannot be extended"):
                lock.extend(1)

    def test_it_is_lost_when_its_maximum_lock_ends(self) -> None:
        with held_lock(max_lock=0.01) as lock:
            eventually(lambda: lock.lost)

    def test_an_impossible_maximum_lock_is_an_error(self) -> None:
        with pytest.raises(TaskLockOptionError, match="max_lock"), held_lock(max_lock=0):
            pass

    def test_it_decorates_a_test(self) -> None:
        @held_lock("report", token=3)
        def token() -> int | None:
            lock = current_lock()
            return None if lock is None else lock.token

        assert [token(), token()] == [3, 3]

    def test_coroutines_and_threads_with_its_context_have_it(self) -> None:
        async def names() -> list[str | None]:
            return [name(), await asyncio.to_thread(name), await asyncio.create_task(later())]

        async def later() -> str | None:
            return name()

        def name() -> str | None:
            lock = current_lock()
            return None if lock is None else lock.name

        with held_lock("report"):
            assert asyncio.run(names()) == ["report"] * 3
            found: list[str | None] = []
            context = contextvars.copy_context()
            thread = threading.Thread(target=lambda: found.append(context.run(name)))
            thread.start()
            thread.join()
            assert found == ["report"]


def report(**kwargs: Any) -> tuple[str, int, bool, dict[str, Any]]:
    lock = current_lock()
    assert lock is not None
    lock.extend(60)
    return lock.name, lock.token, lock.lost, kwargs


async def report_async(**kwargs: Any) -> tuple[str, int, bool, dict[str, Any]]:
    lock = current_lock()
    assert lock is not None
    await lock.extend_async(60)
    return lock.name, lock.token, lock.lost, kwargs


def fail() -> None:
    raise ValueError("no")


@task_lock(failover=True, lease=5)
def decorated() -> bool:
    return current_lock() is not None


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as closing:

        def start(host: Host | None = None, **options: Any) -> Replica:
            replica = Replica(NO_DATABASE, host=host, **options)
            replica.start()
            closing.callback(replica.shutdown)
            return replica

        yield start


def finished(replica: Replica, job_id: str = "job") -> Any:
    """Wait for the release, and return what the job returned."""
    result = replica.one(EVENT_JOB_EXECUTED, job_id).retval
    replica.one(EVENT_TASK_LOCK_RELEASED, job_id)
    return result


class TestUnlocked:
    def test_a_job_is_granted_and_released_with_its_events(self, make: Make) -> None:
        with unlocked():
            replica = make()
            options = {"task_lock": {"max_factor": 2, "failover": True}}
            replica.run_once(report, kwargs={"a": 1, **options})
            assert finished(replica) == ("job", 1, False, {"a": 1})
            granted = replica.one(EVENT_TASK_LOCK_GRANTED)
            assert (granted.task_name, granted.token) == ("job", 1)
            assert granted.holder == replica.executor.user.replica_id

    def test_each_replica_is_granted_the_same_run_time(self, make: Make) -> None:
        with unlocked():
            replicas = [make(), make()]
            now = datetime.now(timezone.utc)
            for replica in replicas:
                replica.run_once(report, next_run_time=now)
            assert sorted(finished(replica)[1] for replica in replicas) == [1, 2]

    def test_options_are_checked_as_always(self, make: Make, caplog: Any) -> None:
        with unlocked():
            replica = make(jobs={"other": {"max_factor": 2}})
            replica.run_once(report, kwargs={"task_lock": {"max_facto": 2}})
            replica.run_once(decorated, job_id="decorated")
            assert finished(replica, "decorated") is True
            assert "max_facto" in caplog.text
            assert EVENT_TASK_LOCK_GRANTED not in replica.codes()

    def test_a_coroutine_is_granted_too(self, make: Make) -> None:
        host = AsyncIO()
        with unlocked():
            replica = make(host)
            replica.run_once(report_async, kwargs={"a": 1})
            assert finished(replica) == ("job", 1, False, {"a": 1})
            replica.shutdown()
        host.close()

    def test_an_executor_of_worker_processes_is_unlocked_too(self, make: Make) -> None:
        with unlocked():
            replica = make(executor="processpool", max_workers=1)
            replica.run_once(report, kwargs={"a": 1})
            assert finished(replica) == ("job", 1, False, {"a": 1})
            replica.run_once(report, job_id="second")
            assert finished(replica, "second") == ("second", 2, False, {})
            replica.shutdown()

    def test_an_executor_that_was_made_before_is_unlocked_from_its_start(self) -> None:
        replica = Replica(NO_DATABASE)
        with unlocked():
            replica.start()
            assert replica.executor.health().live
            replica.run_once(report)
            assert finished(replica)[0] == "job"
            eventually(lambda: replica.executor.health().ready)
        # It stays so until it is shut down, as where a fixture shuts it down later.
        replica.run_once(report, job_id="later")
        assert finished(replica, "later")[:2] == ("later", 2)
        replica.shutdown()

    def test_one_that_ran_before_is_granted_its_claims(self, caplog: Any) -> None:
        replica = Replica(NO_DATABASE, claim_timeout=0.3)
        replica.start()  # its database is unavailable, which keeps no scheduler from starting
        with unlocked():
            replica.run_once(report)
            assert finished(replica)[0] == "job"
        replica.shutdown()

    def test_holds_are_granted_sync_async_and_as_decorators(self) -> None:
        locks = TaskLocks(NO_DATABASE)
        hold = {"min_lock": 60, "max_lock": 300}

        @locks.hold("decorated", **hold)
        def name() -> str:
            lock = current_lock()
            assert lock is not None
            return lock.name

        async def hold_async() -> int:
            async with locks.hold("task", **hold) as lock:
                return lock.token

        with unlocked():
            locks.check()
            with locks.hold("task", **hold) as first, locks.hold("task", **hold) as second:
                assert current_lock() is second
                assert second.token > first.token
                first.extend(60)
                assert not first.lost
            assert first.lost
            assert asyncio.run(hold_async()) > second.token
            assert name() == "decorated"
        locks.close()

    def test_a_hold_that_is_left_afterwards_is_released_where_it_was_granted(
        self, caplog: Any
    ) -> None:
        locks = TaskLocks(NO_DATABASE)
        held = locks.hold("task", min_lock=0, max_lock=300)
        with unlocked():
            held.__enter__()
        held.__exit__()
        locks.close()
        assert not caplog.records

    def test_what_only_a_database_has_says_so(self) -> None:
        locks = TaskLocks(NO_DATABASE)
        with unlocked(), pytest.raises(TaskLockError, match="this call needs the database"):
            locks.tasks()
        with unlocked(), pytest.raises(TaskLockError, match="this call needs the database"):
            locks.doctor()
        with unlocked(), pytest.raises(TaskLockError, match="this call needs the database"):
            locks.pause_all(duration=60)
        locks.close()

    def test_a_job_store_says_so_too_and_connects_to_nothing(self) -> None:
        scheduler = BackgroundScheduler()
        with unlocked():
            store = TaskLockJobStore(NO_DATABASE, functions=["tests."])
            scheduler.add_jobstore(store)
            with pytest.raises(TaskLockStateError, match="memory store"):
                scheduler.start()
            assert store.user.outage.reason is None

    def test_nothing_stands_in_afterwards(self) -> None:
        locks = TaskLocks(NO_DATABASE, claim_timeout=0.1)
        with unlocked():
            pass
        with (
            pytest.raises(TaskLockError, match="could not be used"),
            locks.hold("task", min_lock=0, max_lock=60),
        ):
            pass
        locks.close()

    def test_an_error_of_the_job_is_its_own(self, make: Make) -> None:
        with unlocked():
            replica = make()
            replica.run_once(fail)
            replica.one(EVENT_TASK_LOCK_RELEASED)
            assert EVENT_JOB_EXECUTED not in replica.codes()


class TestInMemoryLocks:
    def test_one_of_two_replicas_runs_a_window(self, make: Make) -> None:
        with in_memory_locks():
            replicas = [make(), make()]
            now = datetime.now(timezone.utc)
            for replica in replicas:
                replica.scheduler.add_job(
                    report, "date", run_date=now, id="job", misfire_grace_time=None
                )
            ended = {EVENT_TASK_LOCK_RELEASED, EVENT_TASK_LOCK_REFUSED}
            codes = eventually(
                lambda: (
                    told
                    if len(told := [c for r in replicas for c in r.codes() if c in ended]) == 2
                    else None
                )
            )
            assert set(codes) == ended

    def test_a_hold_is_refused_while_another_goes_on_and_in_its_minimum_lock(self) -> None:
        one = TaskLocks(NO_DATABASE, replica_id="one")
        other = TaskLocks(NO_DATABASE, replica_id="other")
        with in_memory_locks():
            with (
                one.hold("task", min_lock=60, max_lock=300) as lock,
                pytest.raises(TaskLockRefusedError) as refused,
                other.hold("task", min_lock=60, max_lock=300),
            ):
                pass
            assert (refused.value.holder, refused.value.reason) == ("one", "running")
            assert lock.token > 10**12
            with (
                pytest.raises(TaskLockRefusedError) as refused,
                other.hold("task", min_lock=60, max_lock=300),
            ):
                pass
            assert refused.value.reason == "window"
        with in_memory_locks(), other.hold("task", min_lock=0, max_lock=300):
            pass  # nothing is left of the block before
        one.close()
        other.close()

    def test_the_run_of_a_replica_that_was_stopped_is_taken_over(self, make: Make) -> None:
        started = threading.Event()

        async def long() -> None:
            started.set()
            await asyncio.sleep(300)

        hosts = AsyncIO(), AsyncIO()
        with in_memory_locks():
            one, other = (make(host, failover=True) for host in hosts)
            now = datetime.now(timezone.utc)
            one.run_once(long, next_run_time=now)
            assert started.wait(60)
            started.clear()
            other.run_once(long, next_run_time=now + timedelta(hours=1))
            hosts[0].shutdown(one.scheduler, wait=False)
            taken_over = other.one(EVENT_TASK_LOCK_GRANTED)
            assert taken_over.reason == "takeover"
            assert started.wait(60)
            other.shutdown()
        for host in hosts:
            host.close()

    def test_they_serve_an_executor_of_worker_processes(self, make: Make) -> None:
        """Which claims here, and not there."""
        with in_memory_locks():
            one, other = (make(executor="processpool", max_workers=1) for _ in range(2))
            one.run_once(pool_jobs.decorated, args=[1])
            assert one.one(EVENT_JOB_EXECUTED).retval == 1
            other.run_once(pool_jobs.decorated, args=[1])
            other.one(EVENT_TASK_LOCK_REFUSED)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
# The parent has threads, and the child does little.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("stand_in", [Unlocked(), MemoryTaskLocks()])
def test_a_child_that_is_forked_while_another_thread_decides_on_a_claim_claims(
    stand_in: Unlocked | MemoryTaskLocks,
) -> None:
    # The test's thread stands for the other one: the child has its locks and not that thread.
    with use_stand_in(stand_in), stand_in.lock:
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            with TaskLocks(NO_DATABASE).hold("task", min_lock=0, max_lock=60):
                os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# What a script begins with that finds none of these, as where libpq is missing.
WITHOUT_DEPENDENCIES = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("psycopg", "sqlalchemy", "alembic", "pytest"):
            raise ImportError(f"{name} is blocked")
        return None

sys.meta_path.insert(0, Blocked())
"""

HOLDS = """
from apscheduler_tasklock import current_lock, task_lock, TaskLockError
from apscheduler_tasklock.testing import held_lock

@task_lock(max_factor=2)
def job():
    lock = current_lock()
    lock.extend(5)
    return lock.name, lock.token

with held_lock("report", token=7):
    print(*job())
"""


def run_without_dependencies(script: str, checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_DEPENDENCIES + script],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_lock_is_held_where_nothing_but_apscheduler_is_installed(checkout: Path) -> None:
    finished = run_without_dependencies(HOLDS, checkout)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["report", "7"]


def test_what_needs_the_dependencies_says_so_without_them(checkout: Path) -> None:
    """Else the test above would block nothing."""
    script = "import apscheduler_tasklock.testing as testing\ntesting.unlocked"
    finished = run_without_dependencies(script, checkout)
    assert finished.returncode == 1
    assert "is blocked" in finished.stderr.splitlines()[-1]
