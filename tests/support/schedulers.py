"""Schedulers under test, and what they reported."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

from apscheduler.events import EVENT_ALL, EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, JobExecutionEvent
from apscheduler.executors.base import BaseExecutor

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
    inner_of,
    instances,
    instances_lock,
    is_claimed_first,
)
from tests.support.polling import eventually

_OF_ENDS = (EVENT_JOB_EXECUTED, EVENT_JOB_ERROR)
_OF_RELEASES = (EVENT_TASK_LOCK_RELEASED, EVENT_TASK_LOCK_ERROR, EVENT_TASK_LOCK_LOST)

# Of jobs that come once a day and do not come due in a test: hours that are far from now.
DAILY, DAILY_LATER = ({"hour": (datetime.now().hour + hours) % 24} for hours in (11, 12))


class _ReportsUnderWay:
    """Counts the runs that APScheduler reports just now.

    It counts an instance out first and dispatches its events then, so that a run whose instance is
    gone may not have told its end yet.
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
    """

    def __init__(
        self,
        database: Any,
        *arguments: Any,
        host: Host | None = None,
        timings: Timings | None = None,
        **options: Any,
    ) -> None:
        self._host = host or Host()
        self.executor = executor_class(timings)(database, *arguments, **options)
        self.scheduler = self._host.make_scheduler(executors={"default": self.executor})
        self.events: list[Any] = []
        self._lock = threading.Lock()
        self.scheduler.add_listener(self._record, EVENT_ALL | EVENT_TASK_LOCK_ALL)

    def start(self) -> None:
        self._host.start(self.scheduler)

    def shutdown(self) -> None:
        """Shut down, if it is running, and wait until its last job has ended."""
        if self.scheduler.running:
            self.finish_pass()
            self._host.shutdown(self.scheduler, wait=True)
        self.idle()

    def finish_pass(self) -> None:
        """Wait until the scheduler is through with what is due.

        APScheduler's thread ends with an error if a shutdown comes before it removes a one-off job.
        """
        with self.scheduler._jobstores_lock:
            pass

    def _record(self, event: Any) -> None:
        with self._lock:
            self.events.append(event)

    def record_nothing(self) -> None:
        """Listen to nothing any more, as a replica without listeners."""
        self.scheduler.remove_listener(self._record)

    def codes(self, job_id: str = "job") -> list[int]:
        """Return the codes of the executions and lock events of a job, in their order.

        A release comes after the job's own event, or right before it where the worker claims.
        """
        codes = [event.code for event in self.of(job_id)]
        for n, (code, following) in enumerate(list(pairwise(codes))):
            if code == EVENT_TASK_LOCK_RELEASED and following in _OF_ENDS:
                codes[n : n + 2] = following, code
        return codes

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
        """Wait until nothing runs, and what ran and was released is reported."""
        eventually(lambda: not self._runs() and not _reports.count and not self._unreleased())

    def _unreleased(self) -> set[tuple[str, int]]:
        """Return the runs, by task and token, whose releases are to be told of yet."""
        if not is_claimed_first(self.executor):
            return set()
        told = [event for event in list(self.events) if isinstance(event, TaskLockEvent)]
        granted = {_run_of(event) for event in told if event.code == EVENT_TASK_LOCK_GRANTED}
        return granted - {_run_of(event) for event in told if event.code in _OF_RELEASES}

    def _runs(self) -> bool:
        if inner_of(self.executor) is None:  # it was never started
            return False
        # An instance is counted in it, after the job was submitted.
        with instances_lock(self.executor):
            return any(instances(self.executor).values())

    def run_once(self, function: Callable[..., Any], *, job_id: str = "job", **job: Any) -> Any:
        """Add a job that fires now, and not again for an hour."""
        now = datetime.now(timezone.utc)
        defaults = {"trigger": "interval", "hours": 1, "next_run_time": now}
        defaults["misfire_grace_time"] = None
        return self.scheduler.add_job(function, id=job_id, **{**defaults, **job})
