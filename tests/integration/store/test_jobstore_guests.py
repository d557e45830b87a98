"""What other libraries, and code of APScheduler's, do with the jobs of the shared store.

They know `Job` as APScheduler has it: its attributes by their names, a job that is made anew of
another one's state, and a job store that is called by itself.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.job import Job
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, TaskLockOptionError
from tests.support.stored_jobs import (
    PATIENT,
    StoreReplica,
    note,
    ran,
    store_class,
    store_replicas,
)

Make = Callable[..., StoreReplica]


def now() -> datetime:
    return datetime.now(timezone.utc)


@pytest.fixture
def key() -> str:
    """An id that no other test uses."""
    return f"job-{uuid4().hex[:8]}"


@pytest.fixture
def make(database_url: str) -> Iterator[Make]:
    """Make and start a replica with the job store; it is shut down after the test."""
    with store_replicas(database_url) as make:
        yield make


def make_job(scheduler: Any, function: Callable[..., Any], job_id: str, **given: Any) -> Job:
    """Return a daily job of APScheduler that was not added."""
    attributes = {
        "trigger": CronTrigger(hour=3, timezone="UTC"),
        "executor": "default",
        "func": function,
        "args": [job_id],
        "kwargs": {},
        "name": "a job",
        "misfire_grace_time": None,
        "coalesce": True,
        "max_instances": 1,
        "next_run_time": None,
    }
    return Job(scheduler, job_id, **{**attributes, **given})


class TestAttributes:
    def test_a_job_tells_apschedulers_attributes_by_name(self, make: Make, key: str) -> None:
        """As apscheduler-webui shows a job: whatever ``__slots__`` names."""
        replica = make()
        replica.run_at(note, key, after=3600)
        job = replica.scheduler.get_job(key)
        shown = {name: getattr(job, name) for name in job.__slots__}
        assert shown.keys() == set(Job.__slots__)
        assert (shown["id"], shown["args"]) == (key, (key,))


class TestUpdates:
    def test_of_a_job_that_is_not_there_it_is_an_error(self, make: Make, key: str) -> None:
        replica = make()
        job = make_job(replica.scheduler, note, key)
        with pytest.raises(JobLookupError, match=key):
            replica.store.update_job(job)
        assert replica.scheduler.get_job(key) is None

    def test_of_a_job_that_somebody_else_removed_it_is_one_too(self, make: Make, key: str) -> None:
        replica, other = make(), make()
        replica.run_at(note, key, after=3600)
        job = replica.scheduler.get_job(key)
        other.scheduler.remove_job(key)
        with pytest.raises(JobLookupError, match=key):
            replica.store.update_job(job)
        assert replica.scheduler.get_job(key) is None

    def test_a_job_that_was_made_anew_is_saved_as_it_is(self, make: Make, key: str) -> None:
        replica = make()
        replica.run_at(note, key, after=3600)
        later = now().replace(microsecond=0) + timedelta(hours=2)
        job = make_job(replica.scheduler, note, key, name="another name", next_run_time=later)
        replica.store.update_job(job)
        found = replica.scheduler.get_job(key)
        assert (found.name, found.next_run_time) == ("another name", later)

    def test_a_job_that_is_declared_is_added_if_it_went_meanwhile(
        self, make: Make, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replica = make()
        replica.run_at(note, key, after=3600)
        update = replica.store.update_job

        def remove_and_update(job: Any) -> None:
            replica.store.remove_job(key)
            update(job)

        monkeypatch.setattr(replica.store, "update_job", remove_and_update)
        replica.run_at(note, key, after=7200, replace_existing=True)
        assert replica.scheduler.get_job(key) is not None


class Rebuilt(Job):  # type: ignore[misc]  # APScheduler has no types
    """A job that is made of another one's state, as apscheduler-di's ``SharedJob``."""

    def __init__(self, scheduler: Any, state: dict[str, Any]) -> None:
        state.pop("version")
        super().__init__(scheduler, **state)


def rebuild_due_jobs(replica: StoreReplica) -> list[Any]:
    """Let a scheduler get its due jobs made anew, as apscheduler-di does; return them."""
    rebuilt: list[Any] = []

    def get_due_jobs(store: TaskLockJobStore, now: datetime) -> list[Any]:
        jobs = type(store).get_due_jobs(store, now)
        jobs = [Rebuilt(replica.scheduler, job.__getstate__()) for job in jobs]
        rebuilt.extend(jobs)
        return jobs

    replica.store.get_due_jobs = types.MethodType(get_due_jobs, replica.store)
    return rebuilt


class TestRebuiltJobs:
    def test_there_are_none_and_jobs_run_under_their_locks(self, make: Make, key: str) -> None:
        """What is due is claimed beside the scheduler's loop, so a plugin cannot end that."""
        replica = make()
        rebuilt = rebuild_due_jobs(replica)
        first, again = f"{key}-first", f"{key}-again"
        replica.run_at(note, first)
        replica.runs(first)
        replica.scheduler.add_job(
            note, "interval", seconds=1, args=[again], id=again, next_run_time=now()
        )
        runs = replica.runs(again, 3)
        assert len(ran[first]) == 1
        assert None not in [token for _, token, _ in [*ran[first], *runs]]
        assert replica.one(EVENT_JOB_EXECUTED, first).jobstore == "default"
        assert rebuilt == []


class TestInstances:
    @pytest.fixture
    def scheduler(self, database_url: str) -> Iterator[BackgroundScheduler]:
        """A scheduler by whose defaults three instances of a job may run at a time."""
        scheduler = BackgroundScheduler(
            jobstores={"default": store_class(PATIENT)(database_url, functions=["tests."])},
            executors={"default": TaskLockExecutor(database_url)},
            job_defaults={"max_instances": 3},
        )
        yield scheduler
        scheduler.shutdown()

    def test_above_1_as_the_schedulers_default_count_as_1_with_one_warning(
        self, scheduler: BackgroundScheduler, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        given = {"args": [key], "id": key, "replace_existing": True}
        scheduler.add_job(note, "cron", hour=3, **given)
        scheduler.start()
        scheduler.add_job(note, "cron", hour=4, **given)
        scheduler.add_job(note, "cron", hour=4, args=[key], id=f"{key}-other")
        assert [job.max_instances for job in scheduler.get_jobs()] == [1, 1]
        assert caplog.text.count("max_instances=3 of the scheduler's job defaults") == 1

    def test_above_1_of_a_job_are_an_error(self, scheduler: BackgroundScheduler, key: str) -> None:
        scheduler.start()
        given = {"args": [key], "id": key}
        with pytest.raises(TaskLockOptionError, match="max_instances=3 makes no sense"):
            scheduler.add_job(note, "cron", hour=3, max_instances=3, **given)
        scheduler.add_job(note, "cron", hour=3, **given)
        with pytest.raises(TaskLockOptionError, match="max_instances=2 makes no sense"):
            scheduler.modify_job(key, max_instances=2)
