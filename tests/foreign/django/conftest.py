"""What django-apscheduler's tests expect of their conftest.py, which its release does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import pytz
from apscheduler.executors.debug import DebugExecutor
from apscheduler.job import Job
from apscheduler.schedulers.base import BaseScheduler
from apscheduler.schedulers.blocking import BlockingScheduler
from django import db
from django_apscheduler.jobstores import DjangoJobStore


class DummyScheduler(BaseScheduler):
    """A scheduler that nothing wakes up."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.wakeup = MagicMock()

    def shutdown(self, wait: bool = True) -> None:
        super().shutdown(wait)

    def wakeup(self) -> None: ...


def dummy_job() -> None: ...


def raise_db_operational_error(*_args: Any, **_options: Any) -> None:
    raise db.OperationalError("Some DB-related error")


@pytest.fixture
def timezone(monkeypatch: pytest.MonkeyPatch) -> Any:
    timezone = pytz.timezone("Europe/Berlin")
    monkeypatch.setattr("apscheduler.schedulers.base.get_localzone", Mock(return_value=timezone))
    return timezone


@pytest.fixture
def scheduler() -> BaseScheduler:
    scheduler = DummyScheduler(timezone=pytz.utc)
    scheduler.add_jobstore(DjangoJobStore())
    scheduler.add_executor(DebugExecutor())
    return scheduler


@pytest.fixture
def jobstore(timezone: Any) -> Iterator[DjangoJobStore]:
    # The tests count how often an open connection is closed. SQLite's always is open.
    db.connection.ensure_connection()
    store = DjangoJobStore()
    store.start(DummyScheduler(timezone=timezone), "default")
    yield store
    store.shutdown()


@pytest.fixture
def create_job(timezone: Any) -> Callable[..., Job]:
    def create(trigger: str, trigger_args: dict[str, Any], **given: Any) -> Job:
        made = BlockingScheduler()._create_trigger(trigger, {"timezone": timezone, **trigger_args})
        options = {
            "scheduler": Mock(BaseScheduler, timezone=timezone),
            "executor": "default",
            "args": (),
            "kwargs": {},
            "id": "job",
            "name": "job",
            "misfire_grace_time": 1,
            "coalesce": False,
            "max_instances": 1,
            "next_run_time": None,
        }
        return Job(trigger=made, **{**options, **given})

    return create


@pytest.fixture
def create_add_job(timezone: Any, create_job: Callable[..., Job]) -> Callable[..., Job]:
    def create(
        jobstore: DjangoJobStore | None,
        func: Callable[..., Any] = dummy_job,
        run_date: datetime = datetime(2999, 1, 1),  # a constant
        id: str | None = None,  # noqa: A002  # the tests' name
        paused: bool = False,
        **options: Any,
    ) -> Job:
        run_date = timezone.localize(run_date)
        job = create_job(
            "date",
            {"run_date": run_date},
            func=func,
            id=id or f"{func.__name__}-{run_date:%Y%m%d%H%M%S%f}",
            next_run_time=None if paused else run_date,
            **options,
        )
        if jobstore is not None:
            jobstore.add_job(job)
            job._jobstore_alias = "default"
        return job

    return create


@pytest.fixture
def use_seconds_format(settings: Any) -> str:
    settings.APSCHEDULER_DATETIME_FORMAT = "N j, Y, f:s"
    return settings.APSCHEDULER_DATETIME_FORMAT


@pytest.fixture
def use_hour_format(settings: Any) -> str:
    settings.APSCHEDULER_DATETIME_FORMAT = "H"
    return settings.APSCHEDULER_DATETIME_FORMAT


@pytest.fixture
def use_tz(use_hour_format: str, settings: Any) -> None:
    settings.USE_TZ = True
