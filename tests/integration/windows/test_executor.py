"""TaskLockExecutor around the thread pool, in real schedulers on a real server."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
)
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.blocking import BlockingScheduler
from sqlalchemy import Engine, create_engine

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockExecutor,
    current_lock,
)
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock._runs.task_names import UnnamedTask
from tests.support.claims import AHEAD
from tests.support.commands import run_pasted
from tests.support.faults import CLAIM
from tests.support.internals import deferred_run_times, instances
from tests.support.outages import UNAVAILABLE, Job, refuse, restore, why_unavailable
from tests.support.polling import eventually
from tests.support.proxy import Gate, Proxy
from tests.support.schedulers import Replica

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


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


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

    @pytest.mark.usefixtures("_no_collector")
    def test_leaves_no_work_for_the_garbage_collector(self, make_replica: MakeReplica) -> None:
        held: list[Any] = []
        replica = make_replica()
        replica.run_once(lambda: held.append(weakref.ref(current_lock())))
        replica.one(EVENT_JOB_EXECUTED)
        replica.idle()
        eventually(lambda: held[0]() is None)

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

    # When it is told is in `tests/simulation/test_windows.py`.
    @pytest.mark.nightly
    def test_that_blocks_its_task_is_told_with_a_command_that_frees_it(
        self, make_replica: MakeReplica, caplog: pytest.LogCaptureFixture, database_url: str
    ) -> None:
        go_on, name = threading.Event(), "the job's\n\x1b[31m"
        one, other = (make_replica(replica_id=each, lease=None) for each in ("one", "other"))
        for replica in (one, other):
            replica.run_once(_wait_for(go_on), kwargs={"task_lock": {"min_lock": 0, "name": name}})
            eventually(one.codes)
        eventually(lambda: deferred_run_times(other.executor))
        [warning] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert "freed" in run_pasted(warning.partition("free the task: ")[2], database_url)
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


class TestJobsWithoutAnId:
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


@pytest.fixture
def engine_of_one(database_url: str) -> Iterator[Engine]:
    """An application's own engine with one connection, for which one waits for long.

    Named before what uses it, it outlives that: what is checked in after ``dispose`` stays open.
    """
    engine = create_engine(parse_url(database_url), pool_size=1, max_overflow=0, pool_timeout=600)
    yield engine
    engine.dispose()


class TestUnavailableDatabase:
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
        eventually(lambda: replica.executor.user.closed)
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
        eventually(lambda: replica.executor.user.closed)
        gate.open()
        stopping.join(60)
        replica.idle()
        assert replica.codes() == []
        row = rows(connection)["job"]
        assert row["handed_over"]
        assert row["finished_at"] is None

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
