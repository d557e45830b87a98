"""Schedulers under test, and the events that they reported."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from apscheduler.events import EVENT_ALL, JobExecutionEvent
from apscheduler.executors.base import BaseExecutor
from apscheduler.jobstores.memory import MemoryJobStore

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ALL,
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockEvent,
    TaskLockExecutor,
)
from apscheduler_tasklock._database.timings import Timings
from tests.support.hosts import Host
from tests.support.internals import (
    finish_pass,
    has_stored_runs,
    instances,
    instances_lock,
)
from tests.support.polling import eventually

# The database of replicas whose claims are decided in memory. Its host has no address.
NO_DATABASE = "postgresql://app@nowhere.invalid:1/app"

_OF_RELEASES = (EVENT_TASK_LOCK_RELEASED, EVENT_TASK_LOCK_ERROR, EVENT_TASK_LOCK_LOST)

# Cron fields of daily jobs that do not come due in a test: hours far from now.
DAILY, DAILY_LATER = ({"hour": (datetime.now().hour + hours) % 24} for hours in (11, 12))


class _ReportsUnderWay:
    """Counts the runs whose end APScheduler is reporting.

    APScheduler counts an instance out before it dispatches the events, so that the events of a run
    may still be missing when its instance is gone.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def counted(self, report: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(report)
        def counting(*arguments: Any, **named: Any) -> None:
            with self._lock:
                self.count += 1
            try:
                report(*arguments, **named)
            finally:
                with self._lock:
                    self.count -= 1

        return counting


_reports = _ReportsUnderWay()
BaseExecutor._run_job_success = _reports.counted(BaseExecutor._run_job_success)
BaseExecutor._run_job_error = _reports.counted(BaseExecutor._run_job_error)


def executor_class(given: Timings | None) -> type[TaskLockExecutor]:
    """Return a class of task lock executors with these timings, or with those of the library."""
    if given is None:
        return TaskLockExecutor

    class WithTimings(TaskLockExecutor):
        timings = given

    return WithTimings


def _run_of(event: Any) -> tuple[str, int]:
    return event.task_name, event.token


class Replica:
    """A scheduler with a task lock executor, recording every event about a job.

    :param host: runs the scheduler; by default a background scheduler
    :param timings: of the executor; by default those of the library
    :param job_defaults: of the scheduler; by default those of APScheduler
    """

    def __init__(
        self,
        database: Any,
        *arguments: Any,
        host: Host | None = None,
        timings: Timings | None = None,
        job_defaults: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._host = host or Host()
        self.executor = executor_class(timings)(database, *arguments, **options)
        self.scheduler = self._host.make_scheduler(
            executors={"default": self.executor}, job_defaults=job_defaults or {}
        )
        self.events: list[Any] = []
        self._lock = threading.Lock()
        self.scheduler.add_listener(self._record, EVENT_ALL | EVENT_TASK_LOCK_ALL)

    def start(self) -> None:
        self._host.start(self.scheduler)

    def shutdown(self) -> None:
        """Shut the scheduler down if it is running, and wait for its last job."""
        if self.scheduler.running:
            self.finish_pass()
            self._host.shutdown(self.scheduler, wait=True)
        self.idle()

    def finish_pass(self) -> None:
        """Wait until the scheduler has finished its pass."""
        finish_pass(self.scheduler)

    def _record(self, event: Any) -> None:
        with self._lock:
            self.events.append(event)

    def record_nothing(self) -> None:
        """Remove the listener, so that the replica has none."""
        self.scheduler.remove_listener(self._record)

    def codes(self, job_id: str = "job") -> list[int]:
        """Return the codes of a job's execution and lock events, in order."""
        return [event.code for event in self.of(job_id)]

    def of(self, job_id: str = "job") -> list[Any]:
        return [
            event
            for event in list(self.events)
            if isinstance(event, (JobExecutionEvent, TaskLockEvent)) and event.job_id == job_id
        ]

    def one(self, code: int, job_id: str = "job") -> Any:
        """Wait for an event of this kind, and return it."""
        found = eventually(lambda: [e for e in self.of(job_id) if e.code == code])
        assert len(found) == 1, found
        return found[0]

    def idle(self) -> None:
        """Wait until no run goes on, and all runs and releases are reported."""
        eventually(lambda: not self._runs() and not _reports.count and not self._unreleased())

    def _unreleased(self) -> set[tuple[str, int]]:
        """Return the runs, by task and token, whose releases are not reported yet."""
        told = [event for event in list(self.events) if isinstance(event, TaskLockEvent)]
        granted = {_run_of(event) for event in told if event.code == EVENT_TASK_LOCK_GRANTED}
        return granted - {_run_of(event) for event in told if event.code in _OF_RELEASES}

    def _runs(self) -> bool:
        if self.executor.inner is None:  # it was never started
            return False
        # Under the lock, because a submitted job is counted as an instance within it.
        with instances_lock(self.executor):
            is_running = any(instances(self.executor).values())
        return is_running or has_stored_runs(self.executor)

    def run_once(self, function: Callable[..., Any], *, job_id: str = "job", **job: Any) -> Any:
        """Add a job that is due now, and again in an hour."""
        now = datetime.now(timezone.utc)
        defaults = {"trigger": "interval", "hours": 1, "next_run_time": now}
        defaults["misfire_grace_time"] = None
        return self.scheduler.add_job(function, id=job_id, **{**defaults, **job})


class ForgetfulStore(MemoryJobStore):  # type: ignore[misc]  # APScheduler has no types
    """Does not give its alias to the jobs that it returns, as some custom stores do not."""

    def get_due_jobs(self, now: datetime) -> list[Any]:
        return [self._anew(job) for job in super().get_due_jobs(now)]

    def lookup_job(self, job_id: str) -> Any:
        job = super().lookup_job(job_id)
        return job and self._anew(job)

    def _anew(self, job: Any) -> Any:
        made = pickle.loads(pickle.dumps(job))  # noqa: S301  # of this process
        made._scheduler, made._jobstore_alias = self._scheduler, None
        return made
