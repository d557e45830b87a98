"""What may block for as long as it likes, and delays no renewal of what its replica holds.

Each of these waits until it has seen two renewals in the row. The first one may have been under way
when it began to wait, and the second one was sent meanwhile.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.executors.pool import ThreadPoolExecutor as PoolExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockDatabaseError,
    TaskLocks,
)
from tests.support import pool_jobs
from tests.support.claims import RENEWS_OFTEN
from tests.support.outages import Job
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxy_to
from tests.support.schedulers import Replica, executor_class
from tests.support.stored_jobs import note, store_replicas
from tests.support.tls import with_tls

MakeReplica = Callable[..., Replica]

TIMES: dict[str, Any] = {"min_lock": 0, "max_lock": 3600, "lease": 600}
HELD = "held"


class Blocking:
    """Blocks its callers until the lease of what is held was renewed twice, as its row shows.

    :ivar passed: the names of the threads that have seen both renewals
    :ivar failed: the names of those that have not
    """

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url
        self._lock = threading.Lock()
        self._seen: set[Any] = set()
        self.passed: list[str] = []
        self.failed: list[str] = []

    def __call__(self, *_: object) -> None:
        """Block."""
        name = threading.current_thread().name
        with psycopg.connect(self._database_url, autocommit=True) as connection:
            renewed = {locked_until(connection)}

            def is_renewed_twice() -> bool:
                renewed.add(locked_until(connection))
                return len(renewed) > 2

            try:
                eventually(is_renewed_twice)
            except AssertionError:
                self.failed.append(name)
                raise
        self.passed.append(name)

    def check(self, count: int = 1) -> None:
        """Wait until so many calls, at least, have seen both renewals; fail if one has not."""
        eventually(lambda: len(self.passed + self.failed) >= count)
        assert not self.failed

    def once_for(self, key: object) -> None:
        """Block the first call with each key."""
        with self._lock:
            is_first = key not in self._seen
            self._seen.add(key)
        if is_first:
            self()

    def once_in_each_thread(self) -> None:
        """Block the first call in each thread."""
        self.once_for(threading.get_ident())


def locked_until(connection: psycopg.Connection[Any]) -> datetime:
    # The name of a task may begin with the name of its job store.
    query = "SELECT locked_until FROM task_lock WHERE task_name LIKE %s"
    found = connection.execute(query, [f"%{HELD}"]).fetchone()
    assert found is not None
    until: datetime = found[0]
    return until


@pytest.fixture
def blocking(direct_url: str) -> Blocking:
    return Blocking(direct_url)


@pytest.fixture
def hold(job: Job, blocking: Blocking) -> Iterator[Callable[..., None]]:
    """Let a replica run a job under a lease, for as long as the test goes on.

    Its lock must not be lost, and nothing may have waited for its renewal in vain.
    """
    holders: list[Replica] = []

    def hold(replica: Replica, **options: Any) -> None:
        replica.run_once(job.run, job_id=HELD, **options)
        assert job.begun.wait(60)
        holders.append(replica)

    yield hold
    job.go_on.set()
    for replica in holders:
        eventually(lambda replica=replica: EVENT_TASK_LOCK_RELEASED in replica.codes(HELD))
        assert replica.codes(HELD) == [
            EVENT_TASK_LOCK_GRANTED,
            EVENT_JOB_EXECUTED,
            EVENT_TASK_LOCK_RELEASED,
        ]
    assert not blocking.failed
    assert blocking.passed


@pytest.fixture
def holding(make_replica: MakeReplica, hold: Callable[..., None]) -> MakeReplica:
    """Make a replica that runs such a job."""

    def make(**options: Any) -> Replica:
        replica = make_replica(lease=600, timings=RENEWS_OFTEN, **options)
        hold(replica)
        return replica

    return make


def add_executor(replica: Replica, database_url: str, *arguments: Any, **options: Any) -> None:
    """Give a replica a second executor, which shares its connection: "other"."""
    other = executor_class(RENEWS_OFTEN)(database_url, *arguments, lease=600, **options)
    replica.scheduler.add_executor(other, "other")


def add_slow_pool(
    replica: Replica,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    before_each: Callable[[], object],
) -> None:
    """Give a replica a second executor, whose pool does something before it starts a thread."""
    prefix, start = "slow to start", threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        if thread.name.startswith(prefix):
            before_each()
        start(thread)

    # No pool of threads has a hook that its own starts of threads wait for.
    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    kwargs = {"thread_name_prefix": prefix}
    add_executor(replica, database_url, max_workers=100, pool_kwargs=kwargs)


class TestGiving:
    """A run is given to an executor, or its pool, that takes long to take it."""

    def test_processes_of_a_pool_that_take_long_to_start(
        self, holding: MakeReplica, blocking: Blocking, database_url: str
    ) -> None:
        class Process(ForkProcess):
            def start(self) -> None:
                blocking.once_in_each_thread()
                super().start()

        class Context(ForkContext):
            pass

        Context.Process = Process  # type: ignore[misc,assignment]  # as each context has its own
        replica = holding()
        add_executor(
            replica,
            database_url,
            executor="processpool",
            max_workers=2,
            pool_kwargs={"mp_context": Context()},
        )
        replica.run_once(pool_jobs.decorated, args=[1], executor="other")
        blocking.check()
        replica.one(EVENT_TASK_LOCK_RELEASED)

    def test_threads_of_a_pool_that_take_long_to_start(
        self,
        holding: MakeReplica,
        blocking: Blocking,
        database_url: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """As beside threads that burn the CPU: a pool waits for each thread that it starts."""
        replica = holding()
        add_slow_pool(replica, database_url, monkeypatch, blocking.once_in_each_thread)
        for number in range(20):
            replica.run_once(lambda: None, job_id=f"job {number}", executor="other")
        blocking.check()
        for number in range(20):
            replica.one(EVENT_TASK_LOCK_RELEASED, f"job {number}")

    def test_a_pool_beside_another_one_whose_thread_takes_long_to_start(
        self,
        holding: MakeReplica,
        blocking: Blocking,
        database_url: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """All pools of a process share the lock that one has while it starts a thread."""
        is_starting, goes_on = threading.Event(), threading.Event()

        def block() -> None:
            is_starting.set()
            assert goes_on.wait(60)
            blocking()

        replica = holding()
        third = executor_class(RENEWS_OFTEN)(database_url, lease=600)
        replica.scheduler.add_executor(third, "third")
        replica.run_once(lambda: None, job_id="first", executor="third")  # starts its thread
        replica.one(EVENT_TASK_LOCK_RELEASED, "first")
        add_slow_pool(replica, database_url, monkeypatch, block)
        replica.run_once(lambda: None, job_id="slow", executor="other")
        assert is_starting.wait(60)
        replica.run_once(lambda: None, job_id="second", executor="third")
        goes_on.set()
        blocking.check()
        replica.one(EVENT_TASK_LOCK_RELEASED, "second")

    @pytest.mark.parametrize("method", ["submit_job", "_do_submit_job"])
    def test_an_executor_of_the_applications_own_that_waits(
        self, holding: MakeReplica, blocking: Blocking, database_url: str, method: str
    ) -> None:
        def submit(executor: Any, *arguments: Any) -> None:
            blocking()
            getattr(PoolExecutor, method)(executor, *arguments)

        waiting = type("WaitingExecutor", (PoolExecutor,), {method: submit})
        replica = holding()
        add_executor(replica, database_url, executor=waiting(2))
        for number in range(2):  # the second one may be given by another thread
            replica.run_once(lambda: None, job_id=f"job {number}", executor="other")
            replica.one(EVENT_TASK_LOCK_RELEASED, f"job {number}")
        blocking.check(2)


EACH_HOUR = CronTrigger(minute=30, timezone="UTC")
# APScheduler's own triggers that are walked. Those that take seconds agree seldom or never.
WALKED = {
    "and": AndTrigger([EACH_HOUR, CronTrigger(minute="0,30", timezone="UTC")]),
    "or": OrTrigger([EACH_HOUR, CronTrigger(minute=0, timezone="UTC")]),
    "and of or": AndTrigger(
        [OrTrigger([CronTrigger(minute=n, timezone="UTC") for n in range(40)]), EACH_HOUR]
    ),
}


def submit(replica: Replica, trigger: Any) -> None:
    """Submit a job as the scheduler does, which itself would never get done with some triggers."""
    now = datetime.now(timezone.utc)
    later = now + timedelta(hours=1)
    job = replica.run_once(lambda: None, trigger=trigger, next_run_time=later)
    replica.executor.submit_job(job, [now])


class TestApplicationsCode:
    """Code of the application's that is called on the way of a run."""

    @pytest.mark.parametrize("walked", WALKED)
    def test_a_trigger_of_many_parts(
        self,
        holding: MakeReplica,
        blocking: Blocking,
        monkeypatch: pytest.MonkeyPatch,
        walked: str,
    ) -> None:
        """It is APScheduler's own, and needs seconds for an answer."""
        ask = CronTrigger.get_next_fire_time

        def ask_slowly(trigger: Any, *arguments: Any) -> Any:
            blocking.once_in_each_thread()
            return ask(trigger, *arguments)

        replica = holding()
        # One that needs seconds of the CPU would need more of them on a slow machine.
        monkeypatch.setattr(CronTrigger, "get_next_fire_time", ask_slowly)
        submit(replica, WALKED[walked])
        blocking.check()
        replica.one(EVENT_TASK_LOCK_RELEASED)

    def test_a_trigger_of_the_applications_own(
        self, holding: MakeReplica, blocking: Blocking
    ) -> None:
        class OwnTrigger(IntervalTrigger):  # type: ignore[misc]  # APScheduler has no types
            def get_next_fire_time(self, *arguments: Any) -> Any:
                blocking.once_in_each_thread()
                return super().get_next_fire_time(*arguments)

        replica = holding()
        submit(replica, OwnTrigger(hours=1))
        blocking.check()
        replica.one(EVENT_TASK_LOCK_RELEASED)

    def test_a_listener(self, holding: MakeReplica, blocking: Blocking) -> None:
        def block(event: Any) -> None:
            if event.job_id != HELD:
                blocking.once_for(event.code)

        replica = holding()
        replica.scheduler.add_listener(
            block,
            EVENT_JOB_EXECUTED
            | EVENT_TASK_LOCK_GRANTED
            | EVENT_TASK_LOCK_REFUSED
            | EVENT_TASK_LOCK_RELEASED,
        )
        replica.run_once(lambda: None)
        replica.one(EVENT_TASK_LOCK_RELEASED)
        # In the window of the first one, which may still be an instance.
        replica.run_once(lambda: None, replace_existing=True, max_instances=2)
        replica.one(EVENT_TASK_LOCK_REFUSED)
        blocking.check(4)

    def test_what_redacts_errors(self, holding: MakeReplica, blocking: Blocking) -> None:
        def redact(error: BaseException) -> str:
            blocking()
            return str(error)

        replica = holding(redact=redact)
        replica.run_once(lambda: 1 / 0)
        blocking.check()
        replica.one(EVENT_JOB_ERROR)
        replica.one(EVENT_TASK_LOCK_RELEASED)

    def test_a_job_store(
        self, make_replica: MakeReplica, hold: Callable[..., None], job: Job, blocking: Blocking
    ) -> None:
        class SlowStore(MemoryJobStore):  # type: ignore[misc]  # APScheduler has no types
            def get_all_jobs(self) -> list[Any]:
                if not job.begun.is_set():
                    raise ValueError("not yet")  # so that the next look asks again
                blocking.once_in_each_thread()
                return list(super().get_all_jobs())

        replica = make_replica(start=False, lease=600, timings=RENEWS_OFTEN, poll_interval=0.2)
        replica.scheduler.add_jobstore(SlowStore(), "slow")
        replica.start()
        hold(replica)
        blocking.check()

    def test_a_module_that_takes_long_to_import(
        self,
        database_url: str,
        hold: Callable[..., None],
        job: Job,
        blocking: Blocking,
        connection: psycopg.Connection[Any],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        key = f"job-{uuid4().hex[:8]}"
        module = key.replace("-", "_")

        class Finder:
            @staticmethod
            def find_spec(name: str, *_: Any) -> None:
                if name == module:
                    blocking.once_in_each_thread()

        (tmp_path / f"{module}.py").write_text(
            "from tests.support import stored_jobs as jobs\ndef note(key): jobs.note(key)\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
        options = {"lease": 600, "timings": replace(RENEWS_OFTEN, call_timeout=120.0)}
        with store_replicas(database_url) as make:
            replica = make(store={"functions": ["tests.", module]}, **options)
            replica.scheduler.add_jobstore("memory", "memory")
            hold(replica, jobstore="memory")
            replica.scheduler.pause()
            replica.run_at(note, key)
            update = "UPDATE task_lock_job SET func = %s WHERE id = %s"
            connection.execute(update, [f"{module}:note", key])
            replica.scheduler.resume()
            blocking.check()
            replica.runs(key)
            job.go_on.set()


class TestConnection:
    """The connection itself is what blocks, so that a renewal needs another one."""

    def test_an_engine_that_takes_long_to_connect(
        self, make_task_locks: Callable[..., TaskLocks], proxy: Proxy, blocking: Blocking
    ) -> None:
        is_cut = threading.Event()

        def connect() -> psycopg.Connection[Any]:
            if is_cut.is_set():
                blocking.once_for("the first one after the cut")
            return psycopg.connect(proxy.url)

        engine = create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool)
        locks = make_task_locks(engine, given=RENEWS_OFTEN)
        with locks.hold(HELD, **TIMES) as held:
            is_cut.set()
            proxy.cut_all()
            blocking.check()
            assert not held.lost
        assert not blocking.failed

    @pytest.mark.direct("it has a session for each connection of the proxy")
    @pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "TLS"])
    def test_an_answer_of_10_mb_that_comes_byte_by_byte(
        self,
        make_task_locks: Callable[..., TaskLocks],
        database_url: str,
        connection: psycopg.Connection[Any],
        blocking: Blocking,
        has_tls: bool,
    ) -> None:
        connection.execute(
            "INSERT INTO task_lock_run (task_name, ring, slot, token, started_at, ended_at,"
            " replica, kind, outcome, traceback)"
            " SELECT 'large', 'ok', n, n, now(), now(), 'replica', 'run', 'ok', repeat('x', 8000)"
            " FROM generate_series(1, 1300) AS n"
        )
        is_slow, is_renewed = threading.Event(), threading.Event()

        def byte_by_byte(data: bytes) -> Iterator[bytes]:
            is_slow.set()
            for sent in range(len(data)):
                if is_renewed.wait(0.01):
                    yield data[sent:]
                    return
                yield data[sent : sent + 1]

        def slow_down(data: bytes) -> bytes | Iterator[bytes]:
            # No other answer is that large.
            return data if len(data) < 4_000 else byte_by_byte(data)

        with ExitStack() as stack:
            if has_tls:
                database_url = stack.enter_context(with_tls(database_url))
            proxy = stack.enter_context(proxy_to(database_url))
            stack.callback(is_renewed.set)
            url = proxy.url + ("?sslmode=require" if has_tls else "")
            locks = make_task_locks(url, given=RENEWS_OFTEN)
            stack.callback(locks.close)

            def read() -> None:
                with suppress(TaskLockDatabaseError):  # it may be given up
                    locks.runs("large", limit=2000)

            with locks.hold(HELD, **TIMES) as held:
                proxy.to_client = slow_down
                reading = threading.Thread(target=read)
                reading.start()
                assert is_slow.wait(60)
                blocking()
                is_renewed.set()
                reading.join(60)
                assert not held.lost
