"""What a shutdown begins, waits for and leaves: of several executors, and from listeners."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_SUBMITTED
from apscheduler.executors.pool import ThreadPoolExecutor as PoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import EVENT_TASK_LOCK_GRANTED, TaskLockExecutor
from tests.support.internals import executors_of
from tests.support.polling import eventually
from tests.support.schedulers import Replica

MakeReplica = Callable[..., Replica]
Connection = psycopg.Connection[Any]


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def several(database_url: str, go_on: threading.Event) -> Iterator[BackgroundScheduler]:
    """Return a scheduler with two executors of one worker each, which runs."""
    names = ("default", "other")
    executors = {name: TaskLockExecutor(database_url, max_workers=1) for name in names}
    scheduler = BackgroundScheduler(executors=executors, timezone=timezone.utc)
    scheduler.start()
    with ExitStack() as ending:
        ending.callback(lambda: scheduler.running and scheduler.shutdown())
        ending.callback(go_on.set)
        yield scheduler


def run_now(scheduler: Any, job_id: str, function: Callable[[], object], executor: str) -> None:
    scheduler.add_job(
        function,
        "interval",
        hours=1,
        id=job_id,
        executor=executor,
        next_run_time=datetime.now(timezone.utc),
        misfire_grace_time=None,
    )


def unreleased(connection: Connection) -> list[str]:
    found = connection.execute(
        "SELECT task_name FROM task_lock WHERE finished_at IS NULL AND NOT handed_over ORDER BY 1"
    )
    return [name for (name,) in found]


def test_while_one_executor_is_waited_for_the_others_begin_nothing(
    several: BackgroundScheduler, connection: Connection, go_on: threading.Event
) -> None:
    ran: list[str] = []
    began, other_goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        other_goes_on.wait(60)

    run_now(several, "long", lambda: go_on.wait(60), "default")
    run_now(several, "short", wait, "other")
    assert began.wait(60)
    eventually(lambda: unreleased(connection) == ["long", "short"])
    submitted: list[str] = []
    several.add_listener(lambda event: submitted.append(event.job_id), EVENT_JOB_SUBMITTED)
    run_now(several, "waits", lambda: ran.append("waits"), "other")
    eventually(lambda: "waits" in submitted)  # that of "short" may be late
    stopping = threading.Thread(target=several.shutdown)
    stopping.start()
    # The scheduler stops running before it tells its executors.
    eventually(lambda: executors_of(several)["other"].user.closed)
    other_goes_on.set()
    eventually(lambda: unreleased(connection) == ["long"])  # its worker is free, and goes on
    go_on.set()
    stopping.join(60)
    assert ran == []
    eventually(lambda: unreleased(connection) == [])  # it may be late for the shutdown


class ToldPool(PoolExecutor):
    """An executor that tells when its jobs are waited for."""

    def __init__(self, max_workers: int) -> None:
        super().__init__(max_workers)
        self.is_waited_for = threading.Event()

    def shutdown(self, wait: bool = True) -> None:
        self.is_waited_for.set()
        super().shutdown(wait)


def test_a_shutdown_that_waited_for_a_job_for_a_minute_tells_that_the_job_has_ended(
    make_replica: MakeReplica,
    database_url: str,
    connection: Connection,
    go_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait is no time of the shutdown, which would have none left to tell it."""
    pool = ToldPool(10)
    replica = make_replica(database_url, pool, lease=600)
    replica.run_once(lambda: go_on.wait(60))
    query = "SELECT stopped_at IS NOT NULL, running #>> '{0,task}' FROM task_lock_replica"

    def told() -> tuple[bool, str | None] | None:
        return connection.execute(query).fetchone()

    eventually(lambda: told() is not None and unreleased(connection) == ["job"])
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stopping = threading.Thread(target=replica.scheduler.shutdown)
    stopping.start()
    assert pool.is_waited_for.wait(60)
    eventually(lambda: told() == (True, "job"))
    now[0] += 60
    go_on.set()
    stopping.join(60)
    eventually(lambda: told() == (True, None), instead=told)


class SlowPool(PoolExecutor):
    """An executor that takes a job only when its scheduler is shut down."""

    def __init__(self) -> None:
        super().__init__(1)
        self.is_given, self.is_stopping, self.is_shut = (threading.Event() for _ in range(3))

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        self.is_given.set()
        assert self.is_stopping.wait(60)
        self.is_shut.wait(0.05)
        super()._do_submit_job(job, run_times)

    def shutdown(self, wait: bool = True) -> None:
        self.is_shut.set()
        super().shutdown(wait)


def test_a_run_that_needs_no_lock_reaches_the_executor_before_a_shutdown_does(
    make_replica: MakeReplica, database_url: str
) -> None:
    """As without a task lock, the shutdown waits for this run, and does not lose it."""
    ran: list[str] = []
    pool = SlowPool()
    replica = make_replica(database_url, pool, lock="marked")
    replica.run_once(lambda: ran.append("job"))
    assert pool.is_given.wait(60)
    pool.is_stopping.set()
    replica.scheduler.shutdown()
    assert ran == ["job"]


class HangingPool(PoolExecutor):
    """An executor that takes no job until it may go on.

    :ivar is_given: set when it is given a job
    """

    def __init__(self, go_on: threading.Event) -> None:
        super().__init__(2)
        self._go_on = go_on
        self.is_given = threading.Event()

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        self.is_given.set()
        self._go_on.wait(60)
        super()._do_submit_job(job, run_times)


def test_a_run_that_waits_behind_one_that_the_executor_does_not_take_is_handed_over(
    make_replica: MakeReplica, database_url: str, connection: Connection, go_on: threading.Event
) -> None:
    pool = HangingPool(go_on)
    replica = make_replica(database_url, pool)
    both: list[str] = []
    replica.scheduler.add_listener(lambda event: both.append(event.job_id), EVENT_JOB_SUBMITTED)
    # The replica's thread waits until both are submitted, so that one ask has both.
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        eventually(lambda: both[1:])

    executors_of(replica.scheduler)["default"].user.thread.call(wait)
    assert waits.wait(60)
    for name in ("first", "second"):
        run_now(replica.scheduler, name, print, "default")
    eventually(lambda: unreleased(connection) == ["first", "second"])
    assert pool.is_given.wait(60)
    replica.scheduler.shutdown(wait=False)
    eventually(lambda: len(unreleased(connection)) == 1)  # it may be late for the shutdown


def test_where_a_worker_shuts_its_own_pool_down_nothing_of_ours_is_left(
    make_replica: MakeReplica, connection: Connection, go_on: threading.Event
) -> None:
    """It cannot wait for itself, so the pool raises in the middle of the shutdown."""
    replica = make_replica()
    raised: list[BaseException] = []

    def shut_down(event: Any) -> None:
        if event.job_id != "job":
            return
        try:
            replica.scheduler.shutdown(wait=True)
        except RuntimeError as error:
            raised.append(error)
        go_on.set()

    replica.scheduler.add_listener(shut_down, EVENT_JOB_EXECUTED)
    # The job ends only once the thread that submits jobs has submitted another one. Else that
    # thread could still be in the submission of the job, and would report its end itself.
    was_submitted = threading.Event()
    replica.run_once(lambda: was_submitted.wait(60))
    eventually(lambda: replica.codes() == [EVENT_TASK_LOCK_GRANTED])
    replica.run_once(was_submitted.set, job_id="other")
    assert go_on.wait(60)
    assert [str(error) for error in raised] == ["cannot join current thread"]
    eventually(lambda: unreleased(connection) == [])
    query = "SELECT FROM pg_stat_activity WHERE application_name LIKE 'tasklock %'"
    eventually(lambda: connection.execute(query).rowcount == 0)


def test_a_listener_of_a_grant_may_drain_and_its_own_run_goes_on(
    make_replica: MakeReplica, go_on: threading.Event
) -> None:
    replica = make_replica()
    drained: list[bool] = []

    def drain(_event: Any) -> None:
        drained.append(replica.executor.drain(0.05))
        go_on.set()

    replica.scheduler.add_listener(drain, EVENT_TASK_LOCK_GRANTED)
    ran = threading.Event()
    replica.run_once(ran.set)
    assert go_on.wait(60)
    assert drained == [False]
    eventually(lambda: replica.executor.drain(60))
    assert not ran.is_set()
