"""Every way in which an application configures its executors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from configparser import ConfigParser
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.executors.pool import ProcessPoolExecutor, ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from sqlalchemy import Engine

from apscheduler_tasklock import TaskLockExecutor, TaskLockOptionError
from apscheduler_tasklock._runs.adapter import intercept_reports
from tests.support.hosts import ThreadPerJobExecutor
from tests.support.internals import executors_of, pool_of, pool_size
from tests.support.polling import eventually

Connection = psycopg.Connection[Any]
Started = Callable[[Any], Any]


def noop(**_: Any) -> None: ...


@pytest.fixture
def started() -> Iterator[Started]:
    """Start a configured scheduler with one job; return its default executor once that ran."""
    schedulers = []

    def start(scheduler: Any) -> Any:
        schedulers.append(scheduler)
        now = datetime.now(timezone.utc)
        scheduler.add_job(
            noop, "interval", hours=1, id="job", next_run_time=now, misfire_grace_time=None
        )
        scheduler.start()
        return executors_of(scheduler)["default"]

    yield start
    for scheduler in schedulers:
        scheduler.shutdown()


def ran(connection: Connection) -> tuple[timedelta, timedelta]:
    """Wait until the job has run; return its minimum lock, and when it was released."""
    query = """SELECT window_until - window_start, finished_at FROM task_lock
               WHERE task_name = 'job' AND kind = 'schedule'"""

    def row() -> Any:
        found = connection.execute(query).fetchone()
        return found if found and found[1] else None

    found: tuple[timedelta, timedelta] = eventually(row)
    return found


def test_a_configuration_dict(started: Started, database_url: str, connection: Connection) -> None:
    config = {
        "type": "tasklock",
        "database": database_url,
        "min_factor": "0.5",
        "max_workers": "3",
    }
    executor = started(BackgroundScheduler(executors={"default": config}))
    assert ran(connection)[0] == timedelta(minutes=30)
    assert pool_size(executor) == 3


def test_the_class_by_its_reference(
    started: Started, database_url: str, connection: Connection
) -> None:
    config = {"class": "apscheduler_tasklock:TaskLockExecutor", "database": database_url}
    started(BackgroundScheduler(executors={"default": config}))
    ran(connection)


@pytest.mark.nightly
def test_dotted_keys_with_a_nested_executor(
    started: Started, database_url: str, connection: Connection
) -> None:
    executor = started(
        BackgroundScheduler(
            {
                "apscheduler.executors.default.type": "tasklock",
                "apscheduler.executors.default.database": database_url,
                "apscheduler.executors.default.executor.type": "processpool",
                "apscheduler.executors.default.executor.max_workers": "1",
                "apscheduler.executors.default.jobs.job.min_factor": "0.25",
            }
        )
    )
    assert ran(connection)[0] == timedelta(minutes=15)
    assert isinstance(executor.inner, ProcessPoolExecutor)
    assert pool_size(executor) == 1


def test_an_ini_file(started: Started, database_url: str, connection: Connection) -> None:
    parser = ConfigParser(interpolation=None)
    parser.read_string(f"""
        [scheduler]
        apscheduler.executors.default.type = tasklock
        apscheduler.executors.default.database = {database_url}
        apscheduler.executors.default.schema =
        apscheduler.executors.default.claim_timeout = 7.5
        apscheduler.executors.default.period = 600
        apscheduler.executors.default.min_factor = .5
    """)
    executor = started(BackgroundScheduler(dict(parser["scheduler"])))
    assert ran(connection)[0] == timedelta(minutes=30)
    assert executor.user.settings.claim_timeout == 7.5


def test_flask_apschedulers_settings(
    started: Started, database_url: str, connection: Connection
) -> None:
    from flask import Flask
    from flask_apscheduler import APScheduler

    application = Flask(__name__)
    application.config["SCHEDULER_EXECUTORS"] = {
        "default": {"type": "tasklock", "database": database_url, "max_workers": 2}
    }
    extension = APScheduler()
    extension.init_app(application)
    executor = started(extension.scheduler)
    ran(connection)
    assert isinstance(executor, TaskLockExecutor)
    assert pool_size(executor) == 2


def test_an_instance_of_the_inner_executor_and_an_engine(
    engine: Engine, started: Started, connection: Connection
) -> None:
    inner = ThreadPoolExecutor(2)
    executor = started(BackgroundScheduler(executors={"default": TaskLockExecutor(engine, inner)}))
    ran(connection)
    assert executor.inner is inner


@pytest.mark.parametrize(
    ("executor", "says"),
    [
        ("treadpool", 'No executor by the name "treadpool" was found'),
        ({"max_workers": 2}, "neither 'type' nor 'class'"),
        ({"type": "threadpool", "workers": 2}, "unexpected keyword argument 'workers'"),
    ],
)
def test_an_inner_executor_that_cannot_be_made_is_an_error_at_start(
    database_url: str, executor: Any, says: str
) -> None:
    scheduler = BackgroundScheduler(executors={"default": TaskLockExecutor(database_url, executor)})
    with pytest.raises(TaskLockOptionError, match=says):
        scheduler.start()


def test_an_executor_that_looks_at_the_job_sees_it(
    started: Started, database_url: str, connection: Connection
) -> None:
    inner = ThreadPerJobExecutor()
    executor = TaskLockExecutor(database_url, inner)
    started(BackgroundScheduler(executors={"default": executor}))
    ran(connection)
    ((reference, trigger),) = inner.submitted
    assert (reference, trigger.interval) == (f"{__name__}:noop", timedelta(hours=1))


def test_a_hook_on_the_instance_gets_the_jobs_events(started: Started, database_url: str) -> None:
    """As instrumentation puts there; also after a restart, and once."""
    inner = ThreadPoolExecutor()
    report, seen = inner._run_job_success, []

    def hook(job_id: str, events: list[Any]) -> None:
        seen.extend((job_id, event.code) for event in events)
        report(job_id, events)

    inner._run_job_success = hook
    executor = TaskLockExecutor(database_url, inner)
    scheduler = BackgroundScheduler(executors={"default": executor})
    started(scheduler)
    eventually(lambda: seen == [("job", EVENT_JOB_EXECUTED)])
    inner.start(scheduler, "default")
    intercept_reports(inner, None)
    inner._run_job_success("again", [])
    assert seen == [("job", EVENT_JOB_EXECUTED)]


def test_a_task_lock_executor_does_not_wrap_another(database_url: str) -> None:
    executor = TaskLockExecutor(database_url, TaskLockExecutor(database_url))
    scheduler = BackgroundScheduler(executors={"default": executor})
    with pytest.raises(TaskLockOptionError, match="the executor to wrap is a TaskLockExecutor"):
        scheduler.start()


def test_the_executor_of_another_running_scheduler_is_refused(database_url: str) -> None:
    """Until that is shut down."""
    executor = TaskLockExecutor(database_url)
    first, second = (BackgroundScheduler(executors={"default": executor}) for _ in range(2))
    first.start()
    with pytest.raises(TaskLockOptionError, match="the executor of another running scheduler"):
        second.start()
    first.remove_executor("default")
    second.start()
    second.shutdown()
    first.shutdown()


def test_an_executor_that_another_one_wraps_is_refused(database_url: str) -> None:
    """The first one would hear no more of its jobs."""
    pool = ThreadPoolExecutor()
    first, second = TaskLockExecutor(database_url, pool), TaskLockExecutor(database_url, pool)
    scheduler = BackgroundScheduler(executors={"default": first})
    scheduler.start()
    with pytest.raises(TaskLockOptionError, match="is wrapped by another executor already"):
        scheduler.add_executor(second, "second")
    scheduler.remove_executor("second")  # APScheduler has kept it; its shutdown ends nothing
    assert pool_of(first).submit(int).result() == 0
    scheduler.shutdown()
