"""TaskLockExecutor around the thread pool, in real schedulers on a real server."""

from __future__ import annotations

import gc
import logging
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_JOB_MAX_INSTANCES,
    EVENT_JOB_MISSED,
    EVENT_JOB_SUBMITTED,
)
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.blocking import BlockingScheduler
from sqlalchemy import Engine, create_engine

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ALL,
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    HeldLock,
    TaskLockDatabaseError,
    TaskLockEvent,
    TaskLockExecutor,
    current_lock,
    task_lock,
)
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._runs.task_names import UnnamedTask
from tests.support import claims
from tests.support.claims import AHEAD, end_maximum_lock
from tests.support.commands import run_pasted
from tests.support.faults import CLAIM
from tests.support.internals import deferred_run_times, instances
from tests.support.outages import UNAVAILABLE, Job, refuse, restore, why_unavailable
from tests.support.polling import eventually
from tests.support.proxy import Gate, Proxy
from tests.support.schedulers import ForgetfulStore, Replica

MakeReplica = Callable[..., Replica]

RUN = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]
RAISED = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_ERROR, EVENT_TASK_LOCK_RELEASED]


def rows(connection: psycopg.Connection[Any]) -> dict[str, dict[str, Any]]:
    """Return what the rows have of their locks, by task."""
    cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
    columns = (
        "task_name, started_at, locked_until, run_until, window_start, window_until, locked_by, "
        "token, finished_at, handed_over, runs"
    )
    found = cursor.execute(f"SELECT {columns} FROM task_lock").fetchall()
    return {row["task_name"]: row for row in found}


def now() -> dict[str, Any]:
    """Return options of a job that is due at once, however late it is."""
    return {"next_run_time": datetime.now(timezone.utc), "misfire_grace_time": None}


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_listener_is_told_from_when_it_was_added_until_it_is_removed(
    make_replica: MakeReplica,
) -> None:
    """No event is made that nobody listens to; who comes later is told all the same."""
    heard: list[tuple[int, str]] = []

    def hear(event: TaskLockEvent) -> None:
        heard.append((event.code, event.job_id))

    replica = make_replica()
    replica.record_nothing()
    ended = threading.Semaphore(0)
    replica.scheduler.add_listener(lambda _: ended.release(), EVENT_JOB_EXECUTED)
    for job_id in ("before", "while", "after"):
        if job_id == "while":
            replica.scheduler.add_listener(hear, EVENT_TASK_LOCK_GRANTED)
        if job_id == "after":
            replica.scheduler.remove_listener(hear)
        replica.run_once(int, job_id=job_id)
        assert ended.acquire(timeout=60)
    assert heard == [(EVENT_TASK_LOCK_GRANTED, "while")]


class Instrumented(BackgroundScheduler):  # type: ignore[misc]  # APScheduler has no types
    """Sees all events where they are given to listeners, as instrumentation does."""

    def __init__(self, **options: Any) -> None:
        self.seen: list[int] = []
        super().__init__(**options)

    def _dispatch_event(self, event: Any) -> None:
        self.seen.append(event.code)
        super()._dispatch_event(event)


def test_a_scheduler_that_overrides_how_events_are_given_is_told_without_listeners(
    database_url: str,
) -> None:
    scheduler = Instrumented(executors={"default": TaskLockExecutor(database_url)})
    scheduler.start()
    try:
        now = datetime.now(timezone.utc)
        once = {"next_run_time": now, "misfire_grace_time": None}
        scheduler.add_job(int, "interval", hours=1, id="job", **once)
        eventually(lambda: EVENT_TASK_LOCK_RELEASED in scheduler.seen)
    finally:
        scheduler.shutdown()
    assert [code for code in scheduler.seen if code in RUN] == RUN


class TestARun:
    def test_is_granted_run_and_released(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        replica = make_replica(replica_id="me")
        job = replica.run_once(lambda: 42)
        executed = replica.one(EVENT_JOB_EXECUTED)
        replica.idle()

        assert replica.codes() == RUN
        assert executed.retval == 42
        granted, _, released = replica.of()
        assert granted.task_name == released.task_name == "job"
        assert granted.holder == released.holder == "me"
        assert granted.token == released.token == rows(connection)["job"]["token"]
        assert granted.scheduled_run_time == executed.scheduled_run_time
        assert executed.jobstore == granted.jobstore == "default"
        row = rows(connection)["job"]
        assert row["locked_until"] == released.locked_until == row["window_until"]
        assert job.next_run_time - granted.scheduled_run_time == timedelta(hours=1)

    @pytest.mark.parametrize("listened", [EVENT_TASK_LOCK_ALL, EVENT_JOB_EXECUTED])
    def test_a_listener_that_fails_changes_nothing(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any], listened: int
    ) -> None:
        told = []

        def fail(event: Any) -> None:
            told.append(event.code)
            raise ZeroDivisionError

        one, other = make_replica(), make_replica()
        for replica in (one, other):
            replica.scheduler.add_listener(fail, listened)
        one.run_once(lambda: None)
        one.one(EVENT_JOB_EXECUTED)
        one.idle()
        other.run_once(lambda: None)
        other.one(EVENT_TASK_LOCK_REFUSED)
        other.idle()

        assert one.codes() == RUN
        assert rows(connection)["job"]["finished_at"]
        assert told == [code for code in [*RUN, EVENT_TASK_LOCK_REFUSED] if code & listened]

    def test_has_lock_times_from_the_jobs_interval(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        replica = make_replica()
        replica.run_once(lambda: None)
        replica.one(EVENT_JOB_EXECUTED)
        row = rows(connection)["job"]
        assert row["window_until"] - row["window_start"] == timedelta(hours=0.9)
        assert row["run_until"] - row["started_at"] == timedelta(hours=5)

    @pytest.mark.usefixtures("_no_collector")
    def test_leaves_no_work_for_the_garbage_collector(self, make_replica: MakeReplica) -> None:
        held: list[Any] = []
        replica = make_replica()
        replica.run_once(lambda: held.append(weakref.ref(current_lock())))
        replica.one(EVENT_JOB_EXECUTED)
        replica.idle()
        eventually(lambda: held[0]() is None)

    def test_has_an_end_by_apschedulers_events_and_a_refused_run_time_has_none(
        self, make_replica: MakeReplica, make_locks: Callable[..., LockClient]
    ) -> None:
        """What docs/metrics.md says of metrics that take the time between these events."""
        begun: dict[str, list[str]] = {"first kept": [], "granted": []}
        measured: list[tuple[list[str], list[str]]] = []

        def hear(event: Any) -> None:
            run_time = str(getattr(event, "scheduled_run_times", [None])[0])
            if event.code == EVENT_JOB_SUBMITTED:
                begun["first kept"] = begun["first kept"] or [run_time]
            elif event.code == EVENT_TASK_LOCK_GRANTED:
                begun["granted"] = [str(event.scheduled_run_time)]
            else:
                measured.append((begun["first kept"], begun["granted"]))

        locks, replica = make_locks(), make_replica()
        replica.scheduler.add_listener(
            hear,
            EVENT_JOB_SUBMITTED | EVENT_JOB_EXECUTED | EVENT_JOB_ERROR | EVENT_TASK_LOCK_GRANTED,
        )
        other = claims.held(locks, "job", min_lock=0.0)
        replica.run_once(int)
        eventually(lambda: begun["first kept"] and deferred_run_times(replica.executor))
        locks.release(other)
        refused = replica.one(EVENT_TASK_LOCK_REFUSED).scheduled_run_time
        replica.scheduler.modify_job("job", next_run_time=datetime.now(timezone.utc))
        granted = replica.one(EVENT_TASK_LOCK_GRANTED).scheduled_run_time
        replica.one(EVENT_JOB_EXECUTED)
        assert eventually(lambda: measured) == [([str(refused)], [str(granted)])]
        assert refused < granted

    def test_is_refused_on_the_other_replica_and_leaves_no_trace_of_having_run(
        self, make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        one, other = make_replica(replica_id="one"), make_replica(replica_id="other")
        one.run_once(lambda: None)
        token = one.one(EVENT_TASK_LOCK_GRANTED).token
        one.one(EVENT_JOB_EXECUTED)
        one.idle()
        caplog.clear()

        other.run_once(lambda: None)
        refused = other.one(EVENT_TASK_LOCK_REFUSED)
        other.idle()

        assert other.codes() == [EVENT_TASK_LOCK_REFUSED]
        assert (refused.holder, refused.reason, refused.token) == ("one", "window", token)
        told = [record for record in caplog.records if record.name.startswith("apscheduler")]
        told = [record for record in told if not record.name.startswith("apscheduler.scheduler")]
        assert [(record.levelname, record.name) for record in told] == [
            ("DEBUG", "apscheduler_tasklock._runs.reports")
        ]
        assert "held by 'one'" in told[0].getMessage()

    def test_logs_what_apscheduler_logs_and_nothing_of_its_carrier(
        self, make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "apscheduler.executors.default")
        replica = make_replica()
        replica.run_once(_named)
        replica.one(EVENT_JOB_EXECUTED)
        replica.idle()
        told = [r for r in caplog.records if r.name == "apscheduler.executors.default"]
        assert [record.getMessage().split(" (")[0] for record in told] == [
            'Running job "_named',
            'Job "_named',
        ]
        assert told[1].getMessage().endswith("executed successfully")

    @pytest.mark.parametrize("exception", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
    def test_that_raises_is_released_and_keeps_its_window(
        self,
        make_replica: MakeReplica,
        exception: BaseException,
        connection: psycopg.Connection[Any],
    ) -> None:
        def fail() -> None:
            raise exception

        one, other = make_replica(), make_replica()
        one.run_once(fail)
        error = one.one(EVENT_JOB_ERROR)
        one.idle()
        assert one.codes() == RAISED
        assert error.exception is exception
        assert "in fail" in error.traceback
        assert rows(connection)["job"]["finished_at"] is not None

        other.run_once(fail)
        assert other.one(EVENT_TASK_LOCK_REFUSED).reason == "window"

    def test_that_calls_sys_exit_is_released(self, make_replica: MakeReplica) -> None:
        replica = make_replica()
        replica.run_once(sys.exit, args=[1])
        replica.one(EVENT_JOB_ERROR)
        replica.idle()
        assert replica.codes() == RAISED

    def test_that_raises_opens_its_window_with_on_failure_release(
        self, make_replica: MakeReplica
    ) -> None:
        def fail(**_: Any) -> None:
            raise ValueError

        one, other = make_replica(), make_replica()
        one.run_once(fail, kwargs={"task_lock": {"on_failure": "release"}})
        one.one(EVENT_TASK_LOCK_RELEASED)  # because until then the window is taken
        other.run_once(lambda: "instead")
        assert other.one(EVENT_JOB_EXECUTED).retval == "instead"

    def test_that_outlives_its_lock_is_told_and_frees_nobody_elses(
        self,
        make_replica: MakeReplica,
        connection: psycopg.Connection[Any],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        go_on = threading.Event()
        begun: Future[HeldLock] = Future()
        seen: list[bool] = []

        def outlive(**_: Any) -> None:
            lock = current_lock()
            assert lock is not None
            begun.set_result(lock)
            assert go_on.wait(60)
            seen.append(lock.lost)

        options = {"min_lock": 0.05, "max_lock": 600, "lease": None}
        one, other = make_replica(replica_id="one"), make_replica(replica_id="other")
        one.run_once(outlive, kwargs={"task_lock": options})
        end_maximum_lock(connection, begun.result(60))
        window_is_over = "SELECT FROM task_lock WHERE window_until < now()"
        eventually(lambda: connection.execute(window_is_over).rowcount)
        other.executor.locks.outage.believe()
        other.run_once(_wait_for(go_on), kwargs={"task_lock": {"min_lock": 0.05, "max_lock": 60}})
        other.one(EVENT_TASK_LOCK_GRANTED)
        held = rows(connection)["job"]
        go_on.set()

        one.one(EVENT_TASK_LOCK_LOST)
        one.idle()
        assert seen == [True]
        assert held["locked_by"] == "other"
        assert held["finished_at"] is None
        assert "the run outlived its maximum lock" in caplog.text

    @pytest.mark.nightly
    @pytest.mark.parametrize("failover", [False, True], ids=["", "failover"])
    @pytest.mark.parametrize(("lease", "patience"), [(None, 1), (60, 3)])
    def test_that_is_blocked_by_an_older_one_is_a_warning_once(
        self,
        make_replica: MakeReplica,
        caplog: pytest.LogCaptureFixture,
        database_url: str,
        lease: float | None,
        patience: int,
        failover: bool,
    ) -> None:
        """A run that hangs would otherwise silence its task; one that is renewed may be long."""
        go_on, name = threading.Event(), "the job's\n\x1b[31m"
        one = make_replica(replica_id="one\n\x1b[31m", lease=lease, failover=failover)
        other = make_replica(replica_id="other", lease=lease, failover=failover)
        one.run_once(_wait_for(go_on), kwargs={"task_lock": {"min_lock": 0, "name": name}})
        token = one.one(EVENT_TASK_LOCK_GRANTED).token
        for number in range(1, patience + 2):
            other.run_once(
                _wait_for(go_on), replace_existing=True, kwargs={"task_lock": {"name": name}}
            )
            eventually(lambda number=number: len(other.codes()) == number - 1)  # the ones before
            eventually(lambda: deferred_run_times(other.executor))
            other.idle()
            warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
            assert len(warnings) == (number >= patience)
        assert f"because 'one\\n\\x1b[31m' still runs the task (token {token})" in warnings[0]
        assert warnings[0].isprintable()
        command = warnings[0].partition("free the task: ")[2]
        assert "freed" in run_pasted(command, database_url)
        go_on.set()
        one.one(EVENT_TASK_LOCK_LOST)

    def test_that_comes_due_in_the_moment_of_a_shutdown_is_told_in_a_line(
        self, make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
    ) -> None:
        """APScheduler would print a traceback at every such deployment."""
        caplog.set_level(logging.INFO)
        replica = make_replica()
        run_time = datetime.now(timezone.utc)
        job = replica.run_once(lambda: None, next_run_time=run_time + timedelta(hours=1))
        replica.executor.shutdown()
        replica.executor.submit_job(job, [run_time])
        assert f"{run_time} is not run here, since this replica is shutting down" in caplog.text
        assert replica.codes() == []


class TestLateness:
    def test_a_misfire_claims_nothing(
        self,
        make_replica: MakeReplica,
        connection: psycopg.Connection[Any],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        replica = make_replica(start=False)
        now = datetime.now(timezone.utc)
        replica.scheduler.add_job(
            lambda: None,
            "interval",
            hours=1,
            id="job",
            next_run_time=now - timedelta(minutes=5),
            misfire_grace_time=60,
        )
        replica.scheduler.start()
        replica.one(EVENT_JOB_MISSED)
        replica.idle()
        assert replica.codes() == [EVENT_JOB_MISSED]
        # The task itself may be registered by then.
        claimed = "SELECT FROM task_lock WHERE kind IS NOT NULL"
        assert connection.execute(claimed).rowcount == 0
        assert "was missed by 0:05:0" in caplog.text

    @pytest.mark.nightly
    def test_a_granted_run_is_not_dropped_because_the_claim_took_long(
        self, make_replica: MakeReplica, proxy: Proxy
    ) -> None:
        timings = Timings(longest_answer=20.0)  # longer than the claim is held up
        replica = make_replica(proxy.url, claim_timeout=60, timings=timings)
        run_time = datetime.now(timezone.utc)
        too_late = run_time + timedelta(seconds=4.2)

        def hold_up(data: bytes) -> bytes:
            eventually(lambda: datetime.now(timezone.utc) > too_late)
            return data

        proxy.to_client = hold_up
        replica.scheduler.add_job(
            lambda: None,
            "interval",
            hours=1,
            id="job",
            next_run_time=run_time,
            misfire_grace_time=4,  # on a busy machine the job is submitted within it as well
        )
        replica.one(EVENT_TASK_LOCK_RELEASED)
        assert replica.codes() == RUN

    def test_a_backlog_runs_each_of_its_windows_once_across_replicas(
        self, make_replica: MakeReplica
    ) -> None:
        start = datetime.now(timezone.utc) - timedelta(seconds=95)
        runs: list[datetime] = []

        def record() -> None:
            lock = current_lock()
            assert lock is not None
            assert lock.run_time is not None
            runs.append(lock.run_time)

        for _ in range(2):
            replica = make_replica(start=False)
            replica.scheduler.add_job(
                record,
                "interval",
                seconds=10,
                start_date=start,
                id="job",
                next_run_time=start,
                misfire_grace_time=None,
                coalesce=False,
            )
            replica.scheduler.start()
            eventually(lambda replica=replica: replica.of())
            replica.idle()
            replica.scheduler.pause()
        expected = [start + timedelta(seconds=10 * number) for number in range(10)]
        assert [time for time in runs if time in expected] == expected

    @pytest.mark.nightly
    @pytest.mark.parametrize("failover", [False, True], ids=["", "failover"])
    def test_backlogs_on_three_replicas_at_once_run_each_window_once(
        self, make_replica: MakeReplica, failover: bool
    ) -> None:
        """Whoever runs one is in the way of the others' next ones, which wait for that."""
        period, windows, jobs = timedelta(hours=1), 8, 5
        start = datetime.now(timezone.utc) - period * (windows - 0.5)
        runs: list[tuple[str, datetime]] = []

        def record(job_id: str) -> None:
            lock = current_lock()
            assert lock is not None
            assert lock.run_time is not None
            runs.append((job_id, lock.run_time))
            time.sleep(0.02 * int(job_id[-1]))  # is the work

        replicas = [make_replica(start=False, failover=failover) for _ in range(3)]
        for replica in replicas:
            for number in range(jobs):
                replica.scheduler.add_job(
                    record,
                    "interval",
                    args=[f"job {number}"],
                    seconds=period.total_seconds(),
                    start_date=start,
                    id=f"job {number}",
                    next_run_time=start,
                    misfire_grace_time=None,
                    coalesce=False,
                )
        for replica in replicas:
            replica.scheduler.start()
        jobs_of = [job for replica in replicas for job in replica.scheduler.get_jobs()]
        eventually(lambda: all(job.next_run_time > datetime.now(timezone.utc) for job in jobs_of))
        executors = [replica.executor for replica in replicas]
        eventually(
            lambda: not any(instances(each) or deferred_run_times(each) for each in executors)
        )
        expected = {
            (f"job {number}", start + period * window)
            for number in range(jobs)
            for window in range(windows)
        }
        assert Counter(runs) == Counter(expected)

    @pytest.mark.nightly
    def test_a_starved_replica_never_repeats_a_run_time(self, make_replica: MakeReplica) -> None:
        """Its only worker is busy for several windows; what it submitted meanwhile comes late."""
        busy, go_on = threading.Event(), threading.Event()
        runs: list[datetime] = []

        def occupy() -> None:
            busy.set()
            assert go_on.wait(60)

        def record() -> None:
            lock = current_lock()
            assert lock is not None
            assert lock.run_time is not None
            runs.append(lock.run_time)

        starved = make_replica(max_workers=1, jobs={"occupy": False})
        starved.run_once(occupy, job_id="occupy")
        assert busy.wait(60)
        healthy = make_replica()
        for replica in (starved, healthy):
            replica.scheduler.add_job(
                record,
                "cron",
                second="*",
                id="job",
                misfire_grace_time=None,
                max_instances=100,
            )

        def submitted(replica: Replica) -> set[datetime]:
            """Without those that APScheduler has coalesced, because its thread was held up."""
            events = [e for e in list(replica.events) if e.code == EVENT_JOB_SUBMITTED]
            return {e.scheduled_run_times[-1] for e in events if e.job_id == "job"}

        eventually(lambda: instances(starved.executor).get("job", 0) >= 3)
        eventually(lambda: len(runs) >= 3)
        go_on.set()
        eventually(lambda: starved.codes().count(EVENT_TASK_LOCK_REFUSED) >= 3)
        for replica in (starved, healthy):
            replica.scheduler.remove_job("job")
            replica.idle()

        assert max(Counter(runs).values()) == 1
        # Nor is one lost: of those that both have submitted, none is missing between the others.
        both = submitted(starved) & submitted(healthy)
        assert {each for each in both if min(runs) <= each <= max(runs)} <= set(runs)
        assert both


class TestJobOptions:
    def test_reach_a_function_with_kwargs_without_the_reserved_key(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        def job(**kwargs: Any) -> dict[str, Any]:
            return kwargs

        replica = make_replica()
        options = {"name": "another name", "min_factor": 0.5, "max_factor": "2"}
        replica.run_once(job, kwargs={"a": 1, "task_lock": options})
        assert replica.one(EVENT_JOB_EXECUTED).retval == {"a": 1}
        row = rows(connection)["another name"]
        assert row["window_until"] - row["window_start"] == timedelta(minutes=30)
        assert row["run_until"] - row["started_at"] == timedelta(hours=2)

    def test_reach_a_decorated_function(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        @task_lock(min_lock=60, max_factor=3)
        def job(number: int) -> int:
            return number

        replica = make_replica()
        replica.run_once(job, args=[7], kwargs={"task_lock": {"max_lock": 90}})
        assert replica.one(EVENT_JOB_EXECUTED).retval == 7
        row = rows(connection)["job"]
        assert row["window_until"] - row["window_start"] == timedelta(seconds=60)
        assert row["run_until"] - row["started_at"] == timedelta(seconds=90)

    def test_of_a_job_id_in_the_executor_are_weaker_than_its_kwargs(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        def job(**_: Any) -> None: ...

        replica = make_replica(
            jobs={"job": {"min_factor": 0.5, "name": "from jobs"}}, namespace="app."
        )
        replica.run_once(job, kwargs={"task_lock": {"min_factor": 0.25}})
        replica.one(EVENT_JOB_EXECUTED)
        row = rows(connection)["app.from jobs"]
        assert row["window_until"] - row["window_start"] == timedelta(minutes=15)

    def test_false_runs_the_job_on_every_replica_without_a_lock(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        def job(**kwargs: Any) -> tuple[Any, HeldLock | None]:
            return kwargs, current_lock()

        for _ in range(2):
            replica = make_replica()
            replica.run_once(job, kwargs={"task_lock": False})
            assert replica.one(EVENT_JOB_EXECUTED).retval == ({}, None)
            assert replica.codes() == [EVENT_JOB_EXECUTED]
        assert rows(connection) == {}


class TestJobsWithoutAnId:
    def test_a_recurring_one_is_named_after_function_trigger_and_arguments_with_a_warning(
        self,
        make_replica: MakeReplica,
        connection: psycopg.Connection[Any],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        for _ in range(2):
            replica = make_replica(namespace="app/")
            job = replica.scheduler.add_job(_named, "interval", hours=1, **now())
            eventually(lambda replica=replica, job=job: replica.of(job.id))
            replica.idle()
        assert replica.codes(job.id) == [EVENT_TASK_LOCK_REFUSED]
        [name] = rows(connection)
        assert re.fullmatch(rf"app/{__name__}:_named-[0-9a-f]{{16}}", name)
        warnings = [m for m in caplog.messages if "without an id" in m]
        assert len(warnings) == 2  # one on each replica
        assert all(name in warning and "add_job(..., id=...)" in warning for warning in warnings)

    def test_a_decorated_one_runs_on_one_replica(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        for _ in range(2):
            replica = make_replica(start=False)

            @replica.scheduler.scheduled_job("interval", hours=1, **now())
            def clean_up() -> None: ...

            replica.scheduler.start()
            [job] = replica.scheduler.get_jobs()
            eventually(lambda replica=replica, job=job: replica.of(job.id))
            replica.idle()
        assert replica.codes(job.id) == [EVENT_TASK_LOCK_REFUSED]
        [name] = rows(connection)
        assert name.startswith(f"{__name__}:")
        assert ".clean_up-" in name

    @pytest.mark.nightly
    def test_one_that_was_rescheduled_into_its_last_window_is_told_of(
        self, make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
    ) -> None:
        one, other = make_replica(), make_replica()
        soon = datetime.now(timezone.utc).replace(microsecond=0)
        daily = {"trigger": "interval", "days": 1, "start_date": soon - timedelta(days=2)}
        one.run_once(_takes, args=[0], **{**daily, "hours": 0, "next_run_time": soon})
        one.one(EVENT_JOB_EXECUTED)
        later = {"trigger": "interval", "days": 1, "start_date": soon + timedelta(seconds=1)}
        other.run_once(
            _takes, args=[0], **{**later, "hours": 0, "next_run_time": later["start_date"]}
        )
        other.one(EVENT_TASK_LOCK_REFUSED)
        [warning] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert "modified or rescheduled" in warning

    def test_interval_jobs_of_two_tenants_both_run_on_one_replica(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        tenants = [uuid4().hex, uuid4().hex]
        replicas = [make_replica(), make_replica()]
        for replica in replicas:
            for tenant in tenants:
                once = {"id": tenant, "kwargs": {"tenant": tenant}, **now()}
                replica.scheduler.add_job(_takes, "interval", hours=1, **once)
        for tenant in tenants:
            for replica in replicas:
                eventually(lambda replica=replica, tenant=tenant: replica.of(tenant))
                replica.idle()
            codes = [code for replica in replicas for code in replica.codes(tenant)]
            assert codes.count(EVENT_JOB_EXECUTED) == 1
            assert codes.count(EVENT_TASK_LOCK_REFUSED) == 1
        assert len(rows(connection)) == 2

    @pytest.mark.parametrize(
        "functions",
        [
            pytest.param((lambda: 1, lambda: 2), id="lambdas"),
            pytest.param((partial(max, 1, 2), partial(max, 1, 2)), id="partials"),
            pytest.param((partial(max, {1: object()}), partial(max, object())), id="objects"),
        ],
    )
    @pytest.mark.parametrize(
        "trigger", [("interval", {"hours": 1}), ("cron", {"hour": 3})], ids=lambda given: given[0]
    )
    def test_recurring_ones_that_nothing_tells_apart_do_not_run(
        self,
        make_replica: MakeReplica,
        connection: psycopg.Connection[Any],
        caplog: pytest.LogCaptureFixture,
        functions: tuple[Any, Any],
        trigger: tuple[str, dict[str, Any]],
    ) -> None:
        replica = make_replica()
        replica.scheduler.pause()
        jobs = [
            replica.scheduler.add_job(function, trigger[0], id=uuid4().hex, **trigger[1], **now())
            for function in functions
        ]
        assert f"Job {jobs[1].id!r} will not run" in caplog.text
        replica.scheduler.resume()
        for job in jobs:
            error = str(replica.one(EVENT_TASK_LOCK_ERROR, job.id).exception)
            assert "give each an id" in error
            assert all(part.id in error for part in jobs)
        assert rows(connection) == {}

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda other: other.remove(), id="removed"),
            pytest.param(lambda other: other.modify(args=[1]), id="modified"),
            pytest.param(lambda other: other.modify(kwargs={"task_lock": False}), id="unlocked"),
            pytest.param(lambda other: other.modify(executor="plain"), id="of-another-executor"),
        ],
    )
    def test_one_of_two_that_nothing_tells_apart_runs_once_the_other_is_changed_or_gone(
        self, make_replica: MakeReplica, change: Callable[[Any], None]
    ) -> None:
        replica = make_replica()
        replica.scheduler.pause()
        job, other = (
            replica.scheduler.add_job(_takes, "interval", hours=1, **now()) for _ in range(2)
        )
        replica.scheduler.add_executor("threadpool", "plain")
        change(other)
        replica.scheduler.resume()
        replica.one(EVENT_JOB_EXECUTED, job.id)

    def test_one_without_a_lock_or_with_a_name_does_not_count(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        replica = make_replica()
        replica.scheduler.pause()
        jobs = [
            replica.scheduler.add_job(_takes, "interval", hours=1, kwargs=kwargs, **now())
            for kwargs in ({}, {"task_lock": False}, {"task_lock": {"name": "other"}})
        ]
        replica.scheduler.resume()
        for job in jobs:
            replica.one(EVENT_JOB_EXECUTED, job.id)
        assert len(rows(connection)) == 2

    def test_a_modified_one_is_named_anew(
        self,
        make_replica: MakeReplica,
        connection: psycopg.Connection[Any],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        replica = make_replica()
        replica.scheduler.pause()
        job = replica.scheduler.add_job(_takes, "interval", hours=1, args=[1])
        other = replica.scheduler.add_job(_takes, "interval", hours=1, args=[2])
        job.modify(args=[2])
        assert f"Job {job.id!r} will not run" in caplog.text
        job.reschedule("interval", hours=2)
        for each in (job, other):
            each.modify(next_run_time=datetime.now(timezone.utc), misfire_grace_time=None)
        replica.scheduler.resume()
        for each in (job, other):
            replica.one(EVENT_JOB_EXECUTED, each.id)
        assert len(rows(connection)) == 2
        warnings = [m for m in caplog.messages if "without an id" in m and "will not" not in m]
        assert len(set(warnings)) == len(warnings) == 3

    def test_the_same_id_in_two_job_stores_is_two_tasks(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        replica = make_replica(start=False, namespace="app/")
        replica.scheduler.add_jobstore("memory", "second")
        replica.scheduler.start()
        for job_id in ("clean-up", uuid4().hex):
            for jobstore in ("default", "second"):
                once = {"id": job_id, "jobstore": jobstore, **now()}
                replica.events.clear()
                replica.scheduler.add_job(_named, "interval", hours=1, **once)
                replica.one(EVENT_JOB_EXECUTED, job_id)
                # APScheduler counts running instances by the id alone.
                replica.idle()
        names = {re.sub("-[0-9a-f]{16}$", "", name) for name in rows(connection)}
        reference = f"{__name__}:_named"
        assert names == {
            "app/clean-up",
            "app/second:clean-up",
            f"app/{reference}",
            f"app/second:{reference}",
        }

    def test_a_job_that_does_not_know_its_custom_store_is_named_after_the_store_all_the_same(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        replica = make_replica(start=False)
        replica.scheduler.add_jobstore(ForgetfulStore(), "second")
        replica.scheduler.start()
        replica.scheduler.add_job(int, "interval", hours=1, id="job")
        replica.run_once(_named, job_id="job", jobstore="second")
        replica.one(EVENT_JOB_EXECUTED)
        eventually(lambda: "second:job" in rows(connection))
        assert rows(connection).keys() <= {"job", "second:job"}

    def test_a_name_option_stands_alone_in_any_job_store(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        replica = make_replica(start=False, jobs={"job": {"name": "tidy"}})
        replica.scheduler.add_jobstore("memory", "second")
        replica.scheduler.start()
        replica.run_once(_named, jobstore="second")
        replica.one(EVENT_JOB_EXECUTED)
        assert list(rows(connection)) == ["tidy"]

    def test_a_removed_or_modified_one_is_not_kept(self, make_replica: MakeReplica) -> None:
        class Argument:
            pass

        replica = make_replica()
        replica.scheduler.pause()
        argument = Argument()
        modified = replica.scheduler.add_job(_takes, "interval", hours=1, args=[argument])
        kept = [weakref.ref(argument)]
        del argument
        modified.modify(args=[1])
        for hours in range(2, 12):
            removed = replica.scheduler.add_job(_takes, "interval", hours=hours, args=[Argument()])
            kept += [weakref.ref(removed), weakref.ref(removed.args[0])]
            removed.remove()
            del removed

        def are_gone() -> bool:
            gc.collect()
            return all(each() is None for each in kept)

        eventually(are_gone)
        modified.modify(args=[2])  # the names of those that are gone are forgotten by now
        gc.collect()
        tasks = [found for found in gc.get_objects() if type(found) is UnnamedTask]
        # Other tests of this process may have left some of their jobs.
        assert len([task for task in tasks if f"{__name__}:_takes" in task.name]) == 1


class TestCurrentLock:
    def test_is_the_held_lock_inside_the_job_and_none_outside(
        self, make_replica: MakeReplica
    ) -> None:
        seen: dict[str, Any] = {}

        def job() -> None:
            lock = current_lock()
            assert lock is not None
            seen.update(name=lock.name, token=lock.token, lost=lock.lost, run_time=lock.run_time)
            seen.update(until=lock.locked_until)
            end = lock.run_until
            lock.extend(timedelta(hours=1))
            seen.update(extended=lock.run_until - end)

        replica = make_replica()
        replica.run_once(job)
        event = replica.one(EVENT_JOB_EXECUTED)
        granted = replica.one(EVENT_TASK_LOCK_GRANTED)
        assert seen == {
            "name": "job",
            "token": granted.token,
            "lost": False,
            "run_time": event.scheduled_run_time,
            "until": granted.locked_until,
            "extended": timedelta(hours=1),
        }
        assert current_lock() is None


@pytest.fixture
def engine_of_one(database_url: str) -> Iterator[Engine]:
    """An application's own engine with one connection, for which one waits for long.

    Named before what uses it, it outlives that: what is checked in after ``dispose`` stays open.
    """
    engine = create_engine(parse_url(database_url), pool_size=1, max_overflow=0, pool_timeout=600)
    yield engine
    engine.dispose()


class TestUnavailableDatabase:
    def test_a_job_is_skipped_with_one_event_and_the_scheduler_lives_on(
        self, make_replica: MakeReplica, proxy: Proxy
    ) -> None:
        replica = make_replica(proxy.url, claim_timeout=0.2)
        refuse(proxy)
        replica.run_once(lambda: None)
        error = replica.one(EVENT_TASK_LOCK_ERROR)
        replica.idle()
        assert isinstance(error.exception, TaskLockDatabaseError)
        assert replica.codes() == [EVENT_TASK_LOCK_ERROR]

        restore(proxy)
        # On a slow machine some of its claims may fail, too.
        replica.run_once(lambda: None, job_id="next", hours=0, seconds=1)
        eventually(lambda: EVENT_JOB_EXECUTED in replica.codes("next"))

    def test_a_job_runs_without_a_lock_with_on_database_error_run(
        self, make_replica: MakeReplica, proxy: Proxy
    ) -> None:
        replica = make_replica(proxy.url, claim_timeout=0.2, on_database_error="run")
        refuse(proxy)
        replica.run_once(current_lock)
        assert replica.one(EVENT_JOB_EXECUTED).retval is None
        assert replica.codes() == [EVENT_TASK_LOCK_ERROR, EVENT_JOB_EXECUTED]

    def test_an_applications_pool_that_is_used_up_holds_nothing_up(
        self, engine_of_one: Engine, make_replica: MakeReplica
    ) -> None:
        replica = make_replica(engine_of_one)
        with engine_of_one.connect():
            replica.run_once(lambda: None)
            replica.one(EVENT_JOB_EXECUTED)
        assert EVENT_TASK_LOCK_ERROR not in replica.codes()
        replica.idle()

    def test_a_row_that_somebody_has_locked_is_no_outage(
        self,
        make_replica: MakeReplica,
        direct_url: str,
        known_task: Callable[[str], None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Who has locked it may be running the task: ``on_database_error="run"`` does not hold."""
        known_task("job")
        # For longer than the slow machine stops. Opening a connection may take as long there.
        replica = make_replica(
            claim_timeout=6, on_database_error="run", timings=Timings(longest_answer=60.0)
        )
        replica.run_once(lambda: None, job_id="before")
        replica.one(EVENT_JOB_EXECUTED, "before")
        replica.idle()
        caplog.clear()  # of a connection that took long
        with psycopg.connect(direct_url) as session:
            session.execute("SELECT FROM task_lock FOR UPDATE")
            replica.run_once(lambda: None)
            error = replica.one(EVENT_TASK_LOCK_ERROR)
            replica.idle()
        assert "row locked" in str(error.exception)
        assert replica.codes() == [EVENT_TASK_LOCK_ERROR]
        [told] = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert (told.levelname, "not run" in told.getMessage()) == ("ERROR", True)

    @pytest.mark.nightly
    def test_a_row_that_several_replicas_wait_for_is_none_either(
        self,
        make_replica: MakeReplica,
        direct_url: str,
        known_task: Callable[[str], None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """All but one of them wait for their turn first, and only then for who has locked it."""
        known_task("job")
        replicas = [make_replica(claim_timeout=3, on_database_error="run") for _ in range(3)]
        with psycopg.connect(direct_url) as session:
            session.execute("SELECT FROM task_lock FOR UPDATE")
            for replica in replicas:
                replica.run_once(lambda: None)
            errors = [replica.one(EVENT_TASK_LOCK_ERROR) for replica in replicas]
        for replica, error in zip(replicas, errors, strict=True):
            replica.idle()
            assert "row locked" in str(error.exception)
            assert replica.codes() == [EVENT_TASK_LOCK_ERROR]
        assert UNAVAILABLE not in caplog.text

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("on_database_error", "told_by_the_other"),
        [("run", [EVENT_TASK_LOCK_REFUSED]), ("skip", [EVENT_TASK_LOCK_REFUSED, *RUN])],
    )
    def test_an_unanswered_claim_keeps_its_window_if_its_job_runs_all_the_same_or_is_handed_over(
        self,
        make_replica: MakeReplica,
        proxy: Proxy,
        connection: psycopg.Connection[Any],
        known_task: Callable[[str], None],
        on_database_error: str,
        told_by_the_other: list[int],
    ) -> None:
        known_task("job")
        options = {"on_database_error": on_database_error, "poll_interval": 600}
        replica = make_replica(proxy.url, claim_timeout=0.5, **options)
        claimed = threading.Event()

        def lose_the_answers_from_the_claim_on(
            _number: int, to_server: bool, data: bytes
        ) -> bytes | None:
            if to_server and CLAIM in data:
                claimed.set()
            return None if claimed.is_set() and not to_server else data

        proxy.tap = lose_the_answers_from_the_claim_on
        replica.run_once(lambda: None)
        replica.one(EVENT_TASK_LOCK_ERROR)
        replica.idle()
        assert (EVENT_JOB_EXECUTED in replica.codes()) is (on_database_error == "run")
        proxy.tap = None
        eventually(lambda: rows(connection)["job"]["token"] == AHEAD + 1)
        ended = "finished_at" if on_database_error == "run" else "handed_over"
        eventually(lambda: rows(connection)["job"][ended])

        other = make_replica()
        other.run_once(lambda: None)
        eventually(lambda: len(other.codes()) == len(told_by_the_other))
        other.idle()
        assert other.codes() == told_by_the_other

    def test_a_shutdown_in_an_outage_runs_nothing_without_a_lock(
        self, make_replica: MakeReplica, proxy: Proxy
    ) -> None:
        replica = make_replica(proxy.url, claim_timeout=3600, on_database_error="run")
        refuse(proxy)
        replica.run_once(lambda: None)
        eventually(lambda: why_unavailable(replica))
        replica.scheduler.shutdown()
        assert replica.codes() == []

    def test_a_failing_release_does_not_replace_the_jobs_exception_and_is_sent_again(
        self, make_replica: MakeReplica, proxy: Proxy, connection: psycopg.Connection[Any]
    ) -> None:
        def fail() -> None:
            refuse(proxy)
            raise ValueError("the job's own")

        replica = make_replica(proxy.url)
        replica.run_once(fail)
        error = replica.one(EVENT_JOB_ERROR)
        replica.idle()
        assert str(error.exception) == "the job's own"
        assert replica.codes() == [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_ERROR, EVENT_TASK_LOCK_ERROR]
        assert rows(connection)["job"]["finished_at"] is None

        restore(proxy)
        eventually(lambda: rows(connection)["job"]["finished_at"])

    def test_a_scheduler_starts_while_its_database_is_unavailable(
        self, make_replica: MakeReplica, proxy: Proxy
    ) -> None:
        refuse(proxy)
        replica = make_replica(proxy.url, claim_timeout=180)
        replica.run_once(lambda: None)
        restore(proxy)
        replica.one(EVENT_JOB_EXECUTED)


class TestScheduler:
    def test_max_instances_means_what_it_did(self, make_replica: MakeReplica) -> None:
        go_on = threading.Event()
        replica = make_replica()
        every_second = {"second": "*", "misfire_grace_time": None}
        replica.scheduler.add_job(go_on.wait, "cron", args=[60], id="job", **every_second)
        eventually(lambda: [e for e in replica.events if e.code == EVENT_JOB_MAX_INSTANCES])
        replica.scheduler.remove_job("job")
        go_on.set()
        replica.idle()
        assert replica.codes()[:3] == RUN

    @pytest.mark.usefixtures("unhurried_stop")
    @pytest.mark.direct("it counts the library's connections in the server")
    def test_shutdown_lets_a_running_job_end_and_releases_it(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any], job: Job
    ) -> None:
        replica = make_replica(max_workers=1)
        replica.run_once(job.run)
        # At the event of the grant it has not begun, and would be handed over.
        assert job.begun.wait(60)
        replica.run_once(lambda: None, job_id="queued")
        eventually(lambda: instances(replica.executor).get("queued"))
        stopping = threading.Thread(target=replica.scheduler.shutdown)
        stopping.start()
        eventually(lambda: replica.executor.locks.closed)
        job.go_on.set()
        stopping.join(60)

        assert rows(connection)["job"]["finished_at"] is not None
        # Nothing new is claimed. The task itself may be registered by then.
        claimed = "SELECT FROM task_lock WHERE task_name = 'queued' AND kind IS NOT NULL"
        assert connection.execute(claimed).rowcount == 0
        eventually(lambda: _connections(connection) == 0)

    @pytest.mark.usefixtures("unhurried_stop")
    @pytest.mark.direct("it counts the library's connections in the server")
    def test_shutdown_without_waiting_still_releases_and_leaves_no_connection(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any], job: Job
    ) -> None:
        replica = make_replica()
        replica.run_once(job.run)
        assert job.begun.wait(60)  # at the event of the grant it has not begun yet
        replica.scheduler.shutdown(wait=False)
        job.go_on.set()
        eventually(lambda: rows(connection)["job"]["finished_at"])
        eventually(lambda: _connections(connection) == 0)

    @pytest.mark.parametrize("wait", [True, False])
    @pytest.mark.usefixtures("unhurried_stop")
    def test_a_claim_under_way_at_the_shutdown_is_handed_over(
        self,
        make_replica: MakeReplica,
        proxy: Proxy,
        gate: Gate,
        connection: psycopg.Connection[Any],
        wait: bool,
    ) -> None:
        """Its job has not begun; so another replica runs the window, also without failover."""
        timings = Timings(longest_answer=20.0)  # longer than the claim is held up
        replica = make_replica(proxy.url, claim_timeout=60, timings=timings)

        def shut_the_gate_at_the_claim(_number: int, to_server: bool, data: bytes) -> bytes:
            if to_server and CLAIM in data:
                gate.shut()
            return data

        proxy.tap = shut_the_gate_at_the_claim
        replica.run_once(lambda: None)
        assert gate.reached.wait(60)
        stopping = threading.Thread(target=replica.scheduler.shutdown, args=[wait])
        stopping.start()
        eventually(lambda: replica.executor.locks.closed)
        gate.open()
        stopping.join(60)
        replica.idle()
        assert replica.codes() == []
        row = rows(connection)["job"]
        assert row["handed_over"]
        assert row["finished_at"] is None

    def test_a_scheduler_can_be_started_again(self, make_replica: MakeReplica) -> None:
        replica = make_replica()
        replica.scheduler.shutdown()
        replica.scheduler.start()
        replica.run_once(lambda: None)
        replica.one(EVENT_JOB_EXECUTED)

    def test_an_added_job_is_checked_once_also_after_a_restart(
        self, make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
    ) -> None:
        replica = make_replica()
        replica.scheduler.shutdown()
        replica.scheduler.start()
        replica.scheduler.add_job(
            lambda **_: None, "interval", hours=1, id="job", kwargs={"task_lock": {"unknown": 1}}
        )
        errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        assert len(errors) == 1, errors
        assert "Job 'job' will not run" in errors[0]

    @pytest.mark.usefixtures("unhurried_stop")
    def test_the_blocking_scheduler_runs_locked_jobs(
        self, database_url: str, connection: psycopg.Connection[Any]
    ) -> None:
        scheduler = BlockingScheduler(executors={"default": TaskLockExecutor(database_url)})

        def job() -> str:
            threading.Thread(target=scheduler.shutdown).start()
            return "ran"

        now = datetime.now(timezone.utc)
        once = {"next_run_time": now, "misfire_grace_time": None}
        scheduler.add_job(job, "interval", hours=1, id="job", **once)
        scheduler.start()
        assert eventually(lambda: rows(connection)["job"]["finished_at"])

    def test_the_plugin_alias_takes_strings_for_numbers(self, database_url: str) -> None:
        replica = Replica(database_url)
        replica.scheduler.add_executor(
            "tasklock",
            "configured",
            database=database_url,
            min_factor="0.5",
            claim_timeout="180",
            max_workers="2",
        )
        replica.scheduler.start()
        replica.run_once(lambda: "ran", executor="configured")
        assert replica.one(EVENT_JOB_EXECUTED).retval == "ran"
        replica.scheduler.shutdown()


def _takes(*_args: Any, **_kwargs: Any) -> None: ...


def _named() -> None:
    """Do nothing, under a name."""


def _wait_for(event: threading.Event) -> Callable[..., None]:
    def wait(**_: Any) -> None:
        assert event.wait(60)

    return wait


def _connections(connection: psycopg.Connection[Any]) -> int:
    found = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'tasklock %'"
    ).fetchone()
    assert found is not None
    return int(found[0])
