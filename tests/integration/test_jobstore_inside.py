"""What the job store relies on of APScheduler's inside; a new version that changes it fails here.

See ``jobstore/inside.py``, which has all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from threading import Event
from typing import Any

import pytest
from apscheduler.executors.base import BaseExecutor
from apscheduler.executors.pool import ProcessPoolExecutor, ThreadPoolExecutor
from apscheduler.job import Job
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock import TaskLockExecutor
from apscheduler_tasklock.jobstore.inside import (
    UNLIMITED_WORKERS,
    HandedOutJob,
    SchedulerInside,
    free_workers,
    running_jobs,
)
from tests.support.internals import one_pass
from tests.support.polling import eventually
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


class RecordedTrigger(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """A trigger that records when it is asked."""

    calls: list[str]

    def get_next_fire_time(self, _previous_fire_time: Any, now: datetime) -> datetime:
        self.calls.append("trigger.get_next_fire_time")
        return now + timedelta(days=1)


class RecordedExecutor(BaseExecutor):  # type: ignore[misc]  # APScheduler has no types
    """An executor that records what is submitted to it."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def submit_job(self, job: Any, run_times: list[datetime]) -> None:
        self.calls.append(f"submit_job at {[str(time) for time in run_times]}")

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        raise NotImplementedError


class RecordedStore(MemoryJobStore):  # type: ignore[misc]  # APScheduler has no types
    """A job store that has one handed-out job, and records what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.due: list[HandedOutJob] = []

    def get_due_jobs(self, now: datetime) -> list[Any]:
        self.calls.append("get_due_jobs")
        return self.due

    def get_next_run_time(self) -> None:
        self.calls.append("get_next_run_time")

    def update_job(self, job: Any) -> None:
        self.calls.append("update_job" if isinstance(job, HandedOutJob) else "a user's update_job")

    def remove_job(self, job_id: str) -> None:
        self.calls.append("remove_job")


@pytest.fixture
def store() -> RecordedStore:
    return RecordedStore()


@pytest.fixture
def scheduler(store: RecordedStore) -> Iterator[BackgroundScheduler]:
    """A scheduler that only passes over its jobs when it is told to."""
    scheduler = BackgroundScheduler(
        jobstores={"default": store},
        executors={"default": RecordedExecutor(store.calls)},
        timezone="UTC",
    )
    scheduler.start(paused=True)
    yield scheduler
    scheduler.shutdown()


def test_a_pass_calls_in_this_order_and_never_removes_what_is_late_by_nature(
    scheduler: BackgroundScheduler, store: RecordedStore
) -> None:
    inside = SchedulerInside(scheduler, "default")
    trigger = RecordedTrigger()
    trigger.calls = store.calls
    job = inside.make_handed_out(
        {**ATTRIBUTES, "trigger": CronTrigger(hour=3, timezone="UTC")},
        NOW,
        None,
        lambda: None,
    )
    job.trigger = trigger
    store.due = [job]
    scheduler.state = 1  # as if it ran
    one_pass(scheduler)
    scheduler.state = 2
    assert store.calls == [
        "get_due_jobs",
        "submit_job at ['2026-01-01 00:00:00+00:00']",
        "trigger.get_next_fire_time",
        "update_job",
        "get_next_run_time",
    ]


def test_what_is_late_by_nature_is_updated_and_not_removed_also_without_a_following_run_time(
    scheduler: BackgroundScheduler, store: RecordedStore
) -> None:
    inside = SchedulerInside(scheduler, "default")
    past = CronTrigger(year=2020, timezone="UTC")
    store.due = [inside.make_handed_out({**ATTRIBUTES, "trigger": past}, NOW, None, lambda: None)]
    scheduler.state = 1
    one_pass(scheduler)
    scheduler.state = 2
    assert "update_job" in store.calls
    assert "remove_job" not in store.calls


def test_it_is_called_by_its_own_trigger_and_run_time(scheduler: BackgroundScheduler) -> None:
    trigger = CronTrigger(hour=3, timezone="UTC")
    job = SchedulerInside(scheduler, "default").make_handed_out(
        {**ATTRIBUTES, "name": "report", "trigger": trigger}, NOW, None, lambda: None
    )
    assert str(job) == f"report (trigger: cron[hour='3'], run time: {NOW})"


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


class TestWorkers:
    @pytest.mark.parametrize("kind", [ThreadPoolExecutor, ProcessPoolExecutor])
    def test_of_a_pool_are_counted(self, kind: Any) -> None:
        executor = kind(3)
        assert free_workers(executor) == 3
        executor.shutdown()

    def test_that_run_something_are_not_free(self) -> None:
        executor = ThreadPoolExecutor(3)
        scheduler = BackgroundScheduler(executors={"default": executor})
        begun, go_on = Event(), Event()

        def work() -> None:
            begun.set()
            assert go_on.wait(60)

        scheduler.start()
        try:
            scheduler.add_job(work, id="job")
            assert begun.wait(60)
            # Which is counted a moment after the job was submitted.
            eventually(lambda: (free_workers(executor), running_jobs(executor)) == (2, {"job"}))
            go_on.set()
            eventually(lambda: free_workers(executor) == 3)
            assert running_jobs(executor) == set()
        finally:
            go_on.set()
            scheduler.shutdown()

    def test_of_a_wrapped_pool_are_counted(self, database_url: str) -> None:
        executor = TaskLockExecutor(database_url, max_workers=4)
        scheduler = BackgroundScheduler(executors={"default": executor})
        scheduler.start()
        assert free_workers(executor) == 4
        scheduler.shutdown()

    def test_of_an_event_loop_are_not_limited(self) -> None:
        from apscheduler.executors.asyncio import AsyncIOExecutor

        assert free_workers(AsyncIOExecutor()) == UNLIMITED_WORKERS
