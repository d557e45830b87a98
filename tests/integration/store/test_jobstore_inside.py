"""What the job store relies on of APScheduler's inside; a new version that changes it fails here.

See ``jobstore/scheduler_inside.py``, which has all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from apscheduler.job import Job
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock.jobstore.scheduler_inside import SchedulerInside
from tests.support.internals import one_pass
from tests.support.stored_jobs import note

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
ATTRIBUTES = {
    "id": "job",
    "func": note,
    "func_ref": "tests.support.stored_jobs:note",
    "args": ("key",),
    "kwargs": {},
    "name": "a job",
    "executor": "default",
    "misfire_grace_time": None,
    "coalesce": True,
    "max_instances": 1,
}


class RecordedStore(MemoryJobStore):  # type: ignore[misc]  # APScheduler has no types
    """A job store that has no due jobs, and records what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def get_due_jobs(self, now: datetime) -> list[Any]:
        self.calls.append("get_due_jobs")
        return []

    def get_next_run_time(self) -> None:
        self.calls.append("get_next_run_time")


@pytest.fixture
def store() -> RecordedStore:
    return RecordedStore()


@pytest.fixture
def scheduler(store: RecordedStore) -> Iterator[BackgroundScheduler]:
    """A scheduler that only passes over its jobs when it is told to."""
    scheduler = BackgroundScheduler(
        jobstores={"default": store},
        timezone="UTC",
    )
    scheduler.start(paused=True)
    yield scheduler
    scheduler.shutdown()


def test_a_pass_asks_in_this_order_and_changes_nothing(
    scheduler: BackgroundScheduler, store: RecordedStore
) -> None:
    scheduler.state = 1  # as if it ran
    wait = one_pass(scheduler)
    scheduler.state = 2
    assert store.calls == ["get_due_jobs", "get_next_run_time"]
    assert wait is None  # until it is woken


def test_a_job_is_called_by_its_own_trigger_and_run_time(scheduler: BackgroundScheduler) -> None:
    trigger = CronTrigger(hour=3, timezone="UTC")
    attributes = {**ATTRIBUTES, "name": "report", "trigger": trigger}
    job = SchedulerInside(scheduler, "default").make_due(attributes, NOW)
    assert str(job) == "report (trigger: cron[hour='3'], next run at: 2026-01-01 00:00:00 UTC)"


def test_a_job_has_the_attributes_that_are_set_and_no_others() -> None:
    known = {*ATTRIBUTES, "trigger", "next_run_time", "_scheduler", "_jobstore_alias"}
    assert set(Job.__slots__) - {"__weakref__"} == known


def test_a_job_is_added_by_a_method_that_can_be_replaced_before_and_after_the_start() -> None:
    scheduler = BackgroundScheduler(timezone="UTC")
    explicit: dict[str, bool] = {}

    class Store(MemoryJobStore):  # type: ignore[misc]  # APScheduler has no types
        def start(self, scheduler: Any, alias: str) -> None:
            super().start(scheduler, alias)
            self.inside = SchedulerInside(scheduler, alias)

        def add_job(self, job: Any) -> None:
            explicit[job.id] = self.inside.has_explicit_time(job)
            assert job.next_run_time is None or job.next_run_time > NOW
            super().add_job(job)

    store = Store()
    scheduler.add_jobstore(store)
    scheduler.add_job(note, "cron", hour=3, args=["a"], id="before")
    scheduler.add_job(note, "cron", hour=3, args=["a"], id="before None", next_run_time=None)
    scheduler.start(paused=True)
    try:
        scheduler.add_job(note, "cron", hour=3, args=["a"], id="after")
        scheduler.add_job(note, "cron", hour=3, args=["a"], id="after None", next_run_time=None)
        store.inside.leave()
        scheduler.add_job(note, "cron", hour=3, args=["a"], id="left", next_run_time=None)
    finally:
        scheduler.shutdown()
    assert explicit == {
        "before": False,
        "before None": True,
        "after": False,
        "after None": True,
        "left": False,
    }


def test_what_computes_a_next_run_time_can_be_replaced(scheduler: BackgroundScheduler) -> None:
    computed: list[bool] = []
    inside = SchedulerInside(scheduler, "default")

    class Store(MemoryJobStore):  # type: ignore[misc]  # APScheduler has no types
        def update_job(self, job: Any) -> None:
            computed.append(inside.has_computed_time(job))
            super().update_job(job)

    scheduler.add_jobstore(Store(), "other")
    job = scheduler.add_job(note, "cron", hour=3, args=["a"], id="a", jobstore="other")
    job.pause()
    job.resume()
    job.modify(name="b")
    job.reschedule("cron", hour=4)
    inside.leave()
    job.reschedule("cron", hour=5)
    assert computed == [False, True, False, True, False]
