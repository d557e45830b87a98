"""What an application reads when its start fails, and which database it uses if it names none."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from apscheduler.schedulers.background import BackgroundScheduler
from flask import Flask

import apscheduler_tasklock
from apscheduler_tasklock import (
    TaskLockError,
    TaskLockExecutor,
    TaskLockJobStore,
    TaskLockOptionError,
    TaskLocks,
    TaskLockSchemaError,
    task_lock,
)
from apscheduler_tasklock.checkins import CheckIns
from apscheduler_tasklock.flask import TaskLockScheduler
from apscheduler_tasklock.starlette import scheduler_lifespan
from tests.support.commands import PatientTaskLocks
from tests.support.polling import eventually

PACKAGE = str(Path(apscheduler_tasklock.__file__).parent)

Start = Callable[[str], object]


def job(**_: Any) -> None: ...


def started(url: str, **options: Any) -> None:
    scheduler = BackgroundScheduler(executors={"default": TaskLockExecutor(url, **options)})
    scheduler.start()


def started_with_job(url: str, options: dict[str, Any]) -> None:
    scheduler = BackgroundScheduler(executors={"default": TaskLockExecutor(url)})
    scheduler.add_job(job, "interval", hours=1, id="one", kwargs={"task_lock": options})
    scheduler.start()


def stored(url: str, **job_options: Any) -> None:
    scheduler = BackgroundScheduler(
        executors={"default": TaskLockExecutor(url)},
        jobstores={"default": TaskLockJobStore(url, functions=["myapp."])},
    )
    scheduler.start()
    try:
        scheduler.add_job(job, "interval", hours=1, id="one", **job_options)
    finally:
        scheduler.shutdown()


def checked(url: str, **options: Any) -> None:
    with PatientTaskLocks(url, **options) as locks:
        locks.check()


def of_flask(url: str, **config: Any) -> None:
    app = Flask("application")
    app.config.update({"TASKLOCK_DATABASE_URL": url, **config})
    TaskLockScheduler(app)


MISTAKES: dict[str, tuple[Start, type[TaskLockError], str]] = {
    "no such table": (
        lambda url: started(url, table="nowhere"),
        TaskLockSchemaError,
        "apscheduler-tasklock upgrade --table nowhere",
    ),
    "a job's factor": (
        lambda url: started_with_job(url, {"max_factor": -1}),
        TaskLockOptionError,
        "job 'one'.*max_factor must be a number above 0, not -1",
    ),
    "an option that the pool does not know": (
        lambda url: started(url, facto=3),
        TaskLockOptionError,
        "does not know facto",
    ),
    "another database": (
        lambda _: TaskLockExecutor("mysql://db/app"),
        TaskLockOptionError,
        "is a mysql URL",
    ),
    "which jobs have a lock": (
        lambda url: TaskLockExecutor(url, lock="some"),  # type: ignore[arg-type]  # the mistake
        TaskLockOptionError,
        "lock must be 'all' or 'marked', not 'some'",
    ),
    "an option of one job": (
        lambda url: TaskLockExecutor(url, jobs={"one": {"max_factor": -1}}),
        TaskLockOptionError,
        r"jobs\['one'\]: max_factor must be",
    ),
    "a decorator's option": (
        lambda _: task_lock(max_factor=-1)(job),
        TaskLockOptionError,
        "@task_lock on job: max_factor must be",
    ),
    "a job store's table": (
        lambda url: BackgroundScheduler(
            jobstores={"default": TaskLockJobStore(url, functions=["a."], table="nowhere")}
        ).start(),
        TaskLockSchemaError,
        "nowhere_job",
    ),
    "a job store's secret": (
        lambda url: TaskLockJobStore(url, secret="short"),
        TaskLockOptionError,
        "secret",
    ),
    "a function that a stored job may not call": (stored, TaskLockOptionError, "is not allowed"),
    "a hold's option": (
        lambda url: TaskLocks(url).hold("x", min_lock=-1, max_lock=600),
        TaskLockOptionError,
        "min_lock must be",
    ),
    "a check of the tables": (
        lambda url: checked(url, table="nowhere"),
        TaskLockSchemaError,
        "nowhere_run",
    ),
    "Flask's configuration": (
        lambda url: of_flask(url, TASKLOCK_FAILOVER=30),
        TaskLockOptionError,
        "failover must be",
    ),
    "a lifespan's option": (
        lambda _: scheduler_lifespan(BackgroundScheduler, drain_timeout="x"),  # type: ignore[arg-type]  # the mistake
        TaskLockOptionError,
        "drain_timeout must be",
    ),
    "a URL for check-ins": (
        lambda _: CheckIns(ping="ftp://x"),
        TaskLockOptionError,
        "begins with neither",
    ),
}


@pytest.mark.parametrize(("start", "kind", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_start_that_fails_ends_with_one_line_of_the_library(
    start: Start, kind: type[TaskLockError], said: str, database_url: str
) -> None:
    with pytest.raises(kind, match=said) as raised:
        start(database_url)
    files = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert [file.startswith(PACKAGE) for file in files[-2:]] == [False, True]
    printed = "".join(traceback.format_exception(raised.value))
    assert printed.count("Traceback") == 1


class TestTheDatabaseOfTheEnvironment:
    def test_it_is_taken_where_an_application_gives_none(
        self, database_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TASKLOCK_DATABASE_URL", database_url)
        assert not apscheduler_tasklock.upgrade()
        scheduler = BackgroundScheduler(
            executors={"default": {"type": "tasklock"}},
            jobstores={"default": {"type": "tasklock", "functions": ["myapp."]}},
        )
        scheduler.start()
        try:
            with TaskLocks() as locks:
                eventually(lambda: [replica for replica in locks.replicas() if replica.alive])
        finally:
            scheduler.shutdown()

    def test_flask_takes_it_last(self, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TASKLOCK_DATABASE_URL", database_url)
        app = Flask("application")
        assert TaskLockScheduler(app).executor.user.where == TaskLockExecutor().user.where
        app = Flask("another")
        app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql://elsewhere/app"
        assert "elsewhere" in TaskLockScheduler(app).executor.user.where

    @pytest.mark.parametrize("database", [None, ""])
    def test_without_it_the_error_names_it(
        self, database: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TASKLOCK_DATABASE_URL", raising=False)
        for make in (
            TaskLockExecutor,
            TaskLocks,
            lambda database: TaskLockJobStore(database, functions=["a."]),
            apscheduler_tasklock.upgrade,
        ):
            with pytest.raises(TaskLockOptionError, match=r"which database.*TASKLOCK_DATABASE_URL"):
                make(database)

    def test_no_database_is_needed_where_locks_are_off(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TASKLOCK_DATABASE_URL", raising=False)
        scheduler = BackgroundScheduler(executors={"default": TaskLockExecutor(enabled=False)})
        scheduler.start()
        scheduler.shutdown()
