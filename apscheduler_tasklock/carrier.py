"""What the inner executor gets in place of a job, and what its worker then runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache, partial
from typing import Any

from apscheduler.executors.base import run_job
from apscheduler.util import iscoroutinefunction_partial

from apscheduler_tasklock.active_runs import ActiveRuns
from apscheduler_tasklock.fire import Dispatch, Fire
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.settings import LockSettings
from apscheduler_tasklock.submission import JobView, Submission

try:
    from apscheduler.executors.base import run_coroutine_job
except ImportError:  # APScheduler 3.10
    from apscheduler.executors.base_py3 import run_coroutine_job

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
    calls it once. It has no grace time: whether the job is late is decided before the claim. Its
    function is a coroutine function if the job's is, which executors look at.
    """

    args = ()
    misfire_grace_time = None

    def __init__(
        self, submission: Submission, locks: TaskLocks, runs: ActiveRuns, dispatch: Dispatch
    ) -> None:
        job = submission.job
        self.id = job.id
        self.name = job.name
        self.max_instances = job.max_instances
        self.kwargs: dict[str, Any] = {}
        self._jobstore_alias = submission.jobstore
        self.func: Callable[[], Any]
        if iscoroutinefunction_partial(job.func):
            self.func = partial(run_coroutine, submission, locks, runs, dispatch)
        else:
            self.func = LockedRun(submission, locks, runs, dispatch)

    def __str__(self) -> str:
        return str(self.name)


class LockedRun:
    """A submission bound to this replica's locks. Pickled, it becomes a :class:`PooledRun`."""

    def __init__(
        self, submission: Submission, locks: TaskLocks, runs: ActiveRuns, dispatch: Dispatch
    ) -> None:
        self._submission = submission
        self._locks = locks
        self._runs = runs
        self._dispatch = dispatch

    def __call__(self) -> JobEvents:
        """Run the submission in this process."""
        with self._runs:
            return run(self._submission, self._locks, self._dispatch)

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
        job_events = run(self._submission, process_locks(self._settings), events.append)
        events.extend(job_events)
        return events


@cache
def process_locks(settings: LockSettings) -> TaskLocks:
    """Return the one :class:`TaskLocks` of a worker process."""
    return TaskLocks.from_settings(settings)


def run(submission: Submission, locks: TaskLocks, dispatch: Dispatch) -> JobEvents:
    """Run a submitted job for each of its run times that this replica is granted.

    :param dispatch: gets the lock events as they happen
    :return: APScheduler's own events of the runs
    """
    events = JobEvents()
    for fire in _fires(submission, locks, dispatch):
        job = fire.begin()
        if job is None:
            continue
        told = None
        try:
            with fire.holding():
                told = run_job(job, submission.jobstore, [fire.run_time], submission.logger_name)
        finally:
            fire.end(told)
        events.extend(told)
    return events


async def run_coroutine(
    submission: Submission, locks: TaskLocks, runs: ActiveRuns, dispatch: Dispatch
) -> JobEvents:
    """Do the same for a coroutine job; its event loop never waits for the database."""
    events = JobEvents()
    with runs:
        for fire in _fires(submission, locks, dispatch):
            job = await _begun(fire, runs)
            if job is None:
                continue
            told = None
            try:
                with fire.holding():
                    told = await run_coroutine_job(
                        job, submission.jobstore, [fire.run_time], submission.logger_name
                    )
            finally:
                await _finished(runs.releases.submit(fire.end, told))
            events.extend(told)
    return events


def _fires(submission: Submission, locks: TaskLocks, dispatch: Dispatch) -> Iterator[Fire]:
    for run_time in submission.run_times:
        yield Fire(submission, run_time, locks, dispatch)


async def _begun(fire: Fire, runs: ActiveRuns) -> JobView | None:
    """Wait for the claim. If the job is cancelled meanwhile, release what is granted too late."""
    # Now, and not when a thread is free: waiting for one does not make a job late.
    fire.decide_missed()
    beginning = runs.claims.submit(fire.begin)
    try:
        job: JobView | None = await _finished(beginning)
    except asyncio.CancelledError:

        def end() -> None:
            beginning.result()
            fire.end(None)

        await _finished(runs.releases.submit(end))
        raise
    return job


async def _finished(call: Future[Any]) -> Any:
    """Wait for a call in a thread, which goes on if the one who waits is cancelled."""
    return await asyncio.shield(asyncio.wrap_future(call))
