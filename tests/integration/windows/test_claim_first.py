"""A run is claimed first, and given to a worker of the pool that is free: what holds on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest
from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_JOB_SUBMITTED,
)
from apscheduler.executors.debug import DebugExecutor
from apscheduler.executors.pool import ThreadPoolExecutor as PoolExecutor
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockExecutor,
    current_lock,
)
from tests.support.foreign_executors import DirectExecutor, ForkingExecutor
from tests.support.internals import pool_of, wait_until_decided, waiting_in_pool
from tests.support.interrupting import hearing_ctrl_c, press_ctrl_c
from tests.support.polling import eventually
from tests.support.pool_jobs import wait_for
from tests.support.schedulers import Replica

MakeReplica = Callable[..., Replica]
Connection = psycopg.Connection[Any]

RUN = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def claimed(connection: Connection) -> list[str]:
    """Return the tasks of which a run was claimed."""
    found = connection.execute("SELECT task_name FROM task_lock WHERE kind IS NOT NULL ORDER BY 1")
    return [name for (name,) in found]


def submit(replica: Replica, job_id: str) -> None:
    """Let a job come due, and wait until it is asked for, if it is now."""
    replica.run_once(lambda: None, job_id=job_id)
    eventually(
        lambda: any(
            event.code == EVENT_JOB_SUBMITTED and event.job_id == job_id
            for event in list(replica.events)
        )
    )
    wait_until_decided(replica.executor)


def test_events_come_in_their_order_and_with_plain_ids(make_replica: MakeReplica) -> None:
    replica = make_replica()
    replica.run_once(lambda: None)
    replica.run_once(lambda: 1 / 0, job_id="fails")
    replica.one(EVENT_JOB_ERROR, "fails")
    replica.one(EVENT_JOB_EXECUTED)
    replica.idle()
    assert [event.code for event in replica.of()] == RUN
    ends = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_ERROR, EVENT_TASK_LOCK_RELEASED]
    assert [event.code for event in replica.of("fails")] == ends
    assert {type(event.job_id) for event in replica.of()} == {str}


class QueuesAndRaises(PoolExecutor):  # type: ignore[misc]  # APScheduler has no types
    """Its pool takes a job, and raises all the same, as where threads are limited."""

    def _do_submit_job(self, job: Any, run_times: Any) -> None:
        super()._do_submit_job(job, run_times)
        if job.id == "job":
            raise RuntimeError("can't start new thread")


def test_a_job_that_a_pool_has_queued_although_it_raised_is_run_at_most_once(
    make_replica: MakeReplica, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[Any] = []
    replica = make_replica(executor=QueuesAndRaises(max_workers=2))
    replica.run_once(lambda: ran.append(current_lock()))
    eventually(lambda: "Error submitting job" in caplog.text or ran)
    replica.idle()
    over = "SELECT FROM task_lock WHERE locked_until <= now() OR finished_at IS NOT NULL"
    eventually(lambda: connection.execute(over).rowcount == 1)
    assert len(ran) == replica.codes().count(EVENT_JOB_EXECUTED) <= 1
    replica.run_once(ran.clear, job_id="next")
    replica.one(EVENT_JOB_EXECUTED, "next")


@pytest.fixture
def busy_pool(make_replica: MakeReplica, go_on: threading.Event) -> Replica:
    """Return a replica whose only worker has work of the application's, and one job behind it."""
    replica = make_replica(max_workers=1)
    pool: ThreadPoolExecutor = pool_of(replica.executor)
    pool.submit(go_on.wait, 60)
    replica.run_once(lambda: None)
    return replica


def test_while_something_given_has_not_begun_nothing_more_is_claimed(
    busy_pool: Replica, connection: Connection, go_on: threading.Event
) -> None:
    eventually(lambda: claimed(connection) == ["job"])
    submit(busy_pool, "next")
    assert claimed(connection) == ["job"]
    go_on.set()
    busy_pool.one(EVENT_JOB_EXECUTED, "next")
    busy_pool.idle()
    assert busy_pool.codes() == busy_pool.codes("next") == RUN


@pytest.mark.usefixtures("unhurried_stop")
def test_what_was_given_and_has_not_begun_is_handed_over_at_a_stop(
    busy_pool: Replica, go_on: threading.Event
) -> None:
    eventually(lambda: waiting_in_pool(busy_pool.executor))
    busy_pool.scheduler.shutdown(wait=False)
    go_on.set()
    pool_of(busy_pool.executor).shutdown(wait=True)
    eventually(lambda: busy_pool.codes() == [EVENT_TASK_LOCK_RELEASED])
    assert busy_pool.of()[0].reason == "handed over"


def test_what_was_given_and_cannot_begin_before_its_lock_ends_is_handed_over(
    make_replica: MakeReplica,
    go_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # At once, and not when 90 % of its maximum lock are over.
    monkeypatch.setattr("apscheduler_tasklock._runs.executor_runs.WAITS_AT_MOST", 0.0)
    replica = make_replica(max_workers=1)
    pool_of(replica.executor).submit(go_on.wait, 60)
    replica.run_once(lambda: None)
    assert replica.one(EVENT_TASK_LOCK_RELEASED).reason == "handed over"
    assert "did not begin before its lease or its maximum lock ended" in caplog.text


@pytest.mark.nightly
def test_a_slow_listener_of_a_refusal_holds_up_no_start(
    make_replica: MakeReplica, go_on: threading.Event
) -> None:
    make_replica().run_once(lambda: None)
    replica = make_replica()
    heard = threading.Event()

    def block(_event: Any) -> None:
        heard.set()
        go_on.wait(60)

    replica.scheduler.add_listener(block, EVENT_TASK_LOCK_REFUSED)
    eventually(lambda: replica.run_once(lambda: None, replace_existing=True) and heard.wait(0.5))
    replica.run_once(lambda: None, job_id="next")
    replica.one(EVENT_JOB_EXECUTED, "next")


class DoneWhenSubmitted(PoolExecutor):  # type: ignore[misc]  # APScheduler has no types
    """Its jobs are over before its pool's callbacks are set, as jobs that take no time may be."""

    def _do_submit_job(self, job: Any, run_times: Any) -> None:
        submit = self._pool.submit

        def submit_and_wait(*arguments: Any) -> Any:
            future = submit(*arguments)
            wait([future])
            return future

        self._pool.submit = submit_and_wait
        super()._do_submit_job(job, run_times)
        self._pool.submit = submit


def test_a_slow_listener_of_the_end_of_a_job_that_took_no_time_holds_up_no_start(
    make_replica: MakeReplica, go_on: threading.Event
) -> None:
    replica = make_replica(executor=DoneWhenSubmitted(max_workers=2))
    heard = threading.Event()

    def block(_event: Any) -> None:
        heard.set()
        go_on.wait(60)

    replica.scheduler.add_listener(block, EVENT_JOB_EXECUTED)
    replica.run_once(lambda: None)
    assert heard.wait(60)
    ran = threading.Event()
    replica.run_once(ran.set, job_id="next")
    assert ran.wait(60)
    go_on.set()
    replica.one(EVENT_TASK_LOCK_RELEASED, "next")


def test_while_a_listener_hears_of_the_end_of_a_run_its_lock_is_free_and_its_worker_is_not(
    make_replica: MakeReplica, connection: Connection, go_on: threading.Event
) -> None:
    replica = make_replica(max_workers=1)
    heard = threading.Event()

    def block(_event: Any) -> None:
        heard.set()
        go_on.wait(60)

    replica.scheduler.add_listener(block, EVENT_JOB_EXECUTED)
    replica.run_once(lambda: None, job_id="first")
    assert heard.wait(60)
    released = "SELECT FROM task_lock WHERE task_name = 'first' AND finished_at IS NOT NULL"
    eventually(lambda: connection.execute(released).rowcount == 1)
    submit(replica, "second")
    assert claimed(connection) == ["first"]
    go_on.set()
    replica.one(EVENT_JOB_EXECUTED, "second")


def test_an_executor_that_runs_a_job_inside_its_submission_runs_it_in_the_schedulers_thread(
    make_replica: MakeReplica,
) -> None:
    """And not in the thread that decides on all runs, which a long job would hold up."""
    replica = make_replica(executor=DebugExecutor())
    replica.run_once(lambda: threading.current_thread().name)
    assert replica.one(EVENT_JOB_EXECUTED).retval == "APScheduler"


class WaitingExecutor(PoolExecutor):  # type: ignore[misc]  # APScheduler has no types
    """One of a third party, which waits in ``submit_job``."""

    def __init__(self) -> None:
        super().__init__(4)
        self.go_on = threading.Event()
        self.threads: list[str] = []

    def submit_job(self, job: Any, run_times: list[datetime]) -> None:
        self.threads.append(threading.current_thread().name)
        assert self.go_on.wait(60)
        super().submit_job(job, run_times)


def test_an_executor_that_waits_gets_its_jobs_in_a_thread_of_its_own(
    make_replica: MakeReplica, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And the thread of the replica goes on: it decides on the runs of other executors."""
    waiting = WaitingExecutor()
    replica = make_replica(executor=waiting)
    replica.scheduler.add_executor(TaskLockExecutor(database_url), "other")
    replica.run_once(lambda: None, job_id="first")
    eventually(lambda: waiting.threads)
    replica.run_once(lambda: None, job_id="second", executor="other")
    replica.one(EVENT_JOB_EXECUTED, "second")
    assert EVENT_JOB_EXECUTED not in replica.codes("first")
    waiting.go_on.set()
    replica.run_once(lambda: None, job_id="third")
    for job_id in ("first", "third"):
        replica.one(EVENT_JOB_EXECUTED, job_id)
    replica.idle()
    assert waiting.threads == ["tasklock-giving"] * 2
    assert "WaitingExecutor" not in "".join(
        r.getMessage() for r in caplog.records if r.levelno > 20
    )


@pytest.mark.nightly
def test_what_an_executor_runs_in_a_process_of_its_own_is_run_once(
    make_replica: MakeReplica, connection: Connection
) -> None:
    replicas = [make_replica(executor=ForkingExecutor(2)) for _ in range(2)]
    replicas[0].run_once(os.getpid)
    executed = replicas[0].one(EVENT_JOB_EXECUTED)
    assert executed.retval != os.getpid()
    replicas[0].run_once(int, args=["x"], job_id="fails")
    replicas[0].one(EVENT_JOB_ERROR, "fails")
    for replica in replicas:
        replica.idle()
    runs = "SELECT task_name, outcome FROM task_lock_run ORDER BY 1"
    assert connection.execute(runs).fetchall() == [("fails", "error"), ("job", "ok")]


@pytest.mark.usefixtures("unhurried_stop")
def test_what_runs_in_a_process_of_an_executors_own_is_not_handed_over_at_a_shutdown(
    make_replica: MakeReplica, connection: Connection, tmp_path: Path
) -> None:
    """And nothing else waits until it ends, although nobody hears that it has begun."""
    go_on = tmp_path / "go on"
    replica = make_replica(executor=ForkingExecutor(4), failover=True)
    begun = [tmp_path / job_id for job_id in ("one", "two")]
    for each in begun:
        replica.run_once(wait_for, args=[str(go_on), str(each)], job_id=each.name)
    eventually(lambda: all(each.exists() for each in begun))
    stopping = threading.Thread(target=replica.scheduler.shutdown)
    stopping.start()
    eventually(lambda: replica.executor.user.closed)
    handed_over = "SELECT FROM task_lock WHERE handed_over OR finished_at IS NOT NULL"
    assert connection.execute(handed_over).rowcount == 0
    go_on.touch()
    stopping.join(60)
    runs = "SELECT task_name, outcome FROM task_lock_run ORDER BY 1"
    assert connection.execute(runs).fetchall() == [("one", "ok"), ("two", "ok")]


def test_what_an_executor_calls_itself_has_its_lock_and_is_called_once(
    make_replica: MakeReplica, connection: Connection
) -> None:
    ran: list[Any] = []
    replica = make_replica(executor=DirectExecutor(2))
    replica.run_once(lambda: ran.append(current_lock()))
    eventually(lambda: EVENT_TASK_LOCK_RELEASED in replica.codes())
    replica.idle()
    assert [lock.name for lock in ran] == ["job"]
    assert replica.codes() == [EVENT_TASK_LOCK_GRANTED, EVENT_TASK_LOCK_RELEASED]


@pytest.mark.nightly
def test_the_child_of_a_job_that_forks_begins_nothing_that_waits_for_its_worker(
    make_replica: MakeReplica, tmp_path: Path
) -> None:
    """It goes on as a copy of the pool's worker, with a copy of the pool's queue."""
    ran = tmp_path / "ran"
    children: list[int] = []
    is_asked_for, busy = threading.Event(), threading.Event()
    replica = make_replica(max_workers=2)

    def note() -> None:
        with ran.open("a") as file:
            file.write(f"{os.getpid()}\n")

    def fork() -> None:
        is_asked_for.set()
        eventually(lambda: waiting_in_pool(replica.executor))
        if child := os.fork():
            children.append(child)
        else:
            threading.Timer(2.0, os._exit, [0]).start()

    replica.run_once(fork)
    assert is_asked_for.wait(60)
    # With what is the application's own, there is no worker for the second one.
    pool_of(replica.executor).submit(busy.wait, 60)
    replica.run_once(note, job_id="second")
    replica.one(EVENT_JOB_EXECUTED)
    busy.set()
    replica.one(EVENT_JOB_EXECUTED, "second")
    os.waitpid(children[0], 0)
    assert ran.read_text().split() == [str(os.getpid())]


class OwnTrigger(IntervalTrigger):  # type: ignore[misc]  # APScheduler has no types
    """The application's own, whatever its code does."""


def test_a_slow_listener_holds_up_no_job_whose_trigger_is_the_applications_own(
    make_replica: MakeReplica, go_on: threading.Event
) -> None:
    replica = make_replica()
    entered, ran = threading.Event(), threading.Event()

    def block(_event: Any) -> None:
        entered.set()
        go_on.wait(60)

    replica.scheduler.add_listener(block, EVENT_TASK_LOCK_RELEASED)
    replica.run_once(lambda: None)
    assert entered.wait(60)
    replica.run_once(ran.set, job_id="own", trigger=OwnTrigger(hours=1))
    assert ran.wait(60)


def test_a_job_whose_submission_was_interrupted_is_not_left_to_nobody(
    make_replica: MakeReplica, connection: Connection, direct_url: str
) -> None:
    """By Ctrl-C, where the executor runs it inside of the submission, and APScheduler goes on."""
    ran = threading.Event()
    replica = make_replica(executor=DebugExecutor(), claim_timeout=180)
    run_time = datetime.now(timezone.utc)
    job = replica.run_once(ran.set, next_run_time=run_time + timedelta(hours=1))

    def press_when_the_claim_waits() -> None:
        waiting = "SELECT FROM pg_locks WHERE NOT granted AND relation = 'task_lock'::regclass"
        with psycopg.connect(direct_url, autocommit=True) as other:
            eventually(lambda: other.execute(waiting).rowcount)
        press_ctrl_c()

    with connection.transaction():
        connection.execute("LOCK TABLE task_lock")
        pressing = threading.Thread(target=press_when_the_claim_waits)
        pressing.start()
        with hearing_ctrl_c(), pytest.raises(KeyboardInterrupt):
            replica.executor.submit_job(job, [run_time])
        pressing.join(60)
        assert not ran.is_set()
    assert ran.wait(60)
    replica.one(EVENT_TASK_LOCK_RELEASED)
    replica.idle()
