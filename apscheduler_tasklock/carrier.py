"""What the inner executor gets in place of a job."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from apscheduler_tasklock.locked_run import Dispatch, Submission, run_locked
from apscheduler_tasklock.locks import LockSettings, TaskLocks

# APScheduler's run_job logs the start and end of what it runs, which here is the carrier. Its
# lines go to this logger, in worker processes too. A filter, because a logging configuration
# resets a logger's level, handlers and propagation, but not its filters.
QUIET_LOGGER = "apscheduler_tasklock.carrier.quiet"
logging.getLogger(QUIET_LOGGER).addFilter(lambda _record: False)


class JobEvents(list[Any]):
    """The events of the real job, as the carrier's return value."""


class Carrier:
    """Looks like a job to the inner executor; its function claims, runs the job, and releases.

    It carries all run times of a submission and is submitted with one, so that the inner executor
    calls it once. It has no grace time: whether the job is late is decided before the claim.
    """

    args = ()
    misfire_grace_time = None

    def __init__(self, submission: Submission, locks: TaskLocks, dispatch: Dispatch) -> None:
        job = submission.job
        self.id = job.id
        self.name = job.name
        self.max_instances = job.max_instances
        self.kwargs: dict[str, Any] = {}
        self._jobstore_alias = submission.jobstore
        self.func = LockedRun(submission, locks, dispatch)

    def __str__(self) -> str:
        return str(self.name)


class LockedRun:
    """A submission bound to this replica's locks. Pickled, it becomes a :class:`PooledRun`."""

    def __init__(self, submission: Submission, locks: TaskLocks, dispatch: Dispatch) -> None:
        self._submission = submission
        self._locks = locks
        self._dispatch = dispatch

    def __call__(self) -> JobEvents:
        """Run the submission in this process."""
        try:
            return JobEvents(run_locked(self._submission, self._locks, self._dispatch))
        finally:
            if self._locks.closed:
                # The scheduler did not wait for this run; leave no connection behind it.
                self._locks.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return PooledRun, (self._submission, self._locks.settings)


class PooledRun:
    """A submission in a worker process: claims on a connection of that process.

    Lock events travel back with the job's own, since the scheduler's listeners are not there.
    """

    def __init__(self, submission: Submission, settings: LockSettings) -> None:
        self._submission = submission
        self._settings = settings

    def __call__(self) -> JobEvents:
        """Run the submission in the worker process."""
        events = JobEvents()
        job_events = run_locked(self._submission, process_locks(self._settings), events.append)
        events.extend(job_events)
        return events


@cache
def process_locks(settings: LockSettings) -> TaskLocks:
    """Return the one :class:`TaskLocks` of a worker process."""
    return TaskLocks.from_settings(settings)
