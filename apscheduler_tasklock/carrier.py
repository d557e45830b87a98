"""What the inner executor gets in place of a job, and what its worker then runs."""

from __future__ import annotations

import asyncio
import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from apscheduler.executors.base import run_job

from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.fire import Fire
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.reports import Dispatch
from apscheduler_tasklock.settings import LockSettings
from apscheduler_tasklock.submission import JobView, Submission, Watch

try:
    from apscheduler.executors.base import run_coroutine_job
except ImportError:  # APScheduler 3.10
    from apscheduler.executors.base_py3 import run_coroutine_job

logger = logging.getLogger(__name__)

# APScheduler's run_job logs the start and end of what it runs, which here is the carrier. Its
# lines go to this logger, in worker processes too. A filter, because a logging configuration
# resets a logger's level, handlers and propagation, but not its filters.
QUIET_LOGGER = "apscheduler_tasklock.carrier.quiet"
logging.getLogger(QUIET_LOGGER).addFilter(lambda _record: False)


class JobEvents(list[Any]):
    """The events of the real job, as the carrier's return value.

    :ivar watches: runs of other replicas that stood against it, and are to be watched
    """

    def __init__(self) -> None:
        super().__init__()
        self.watches: list[Watch] = []


class Carrier:
    """Looks like a job to the inner executor; its function claims, runs the job, and releases.

    It carries all run times of a submission and is submitted with one, so that the inner executor
    calls it once. It has no grace time: whether the job is late is decided before the claim. Its
    function is a coroutine function if the job's is, which executors look at.
    """

    args = ()
    misfire_grace_time = None

    def __init__(self, submission: Submission, locks: TaskLocks, dispatch: Dispatch) -> None:
        job = submission.job
        self._job = job
        self.kwargs: dict[str, Any] = {}
        self._jobstore_alias = submission.jobstore
        locked = LockedRun(submission, locks, dispatch)
        self.func: Callable[[], Any] = locked.run_coroutine if submission.awaited else locked.run

    def __getattr__(self, name: str) -> Any:
        """Return the job's own ``id``, ``name``, ``max_instances``, or what else is asked for."""
        if name.startswith("__") or "_job" not in vars(self):  # as pickle asks
            raise AttributeError(name)
        return getattr(self._job, name)

    def __str__(self) -> str:
        return str(self.name)


class LockedRun:
    """A submission bound to this replica's locks. Pickled, it becomes a :class:`PooledRun`."""

    def __init__(self, submission: Submission, locks: TaskLocks, dispatch: Dispatch) -> None:
        self._submission = submission
        self._locks = locks
        self._dispatch = dispatch

    def run(self) -> JobEvents:
        """Run the submission in this process."""
        return run(self._submission, self._locks, self._dispatch)

    async def run_coroutine(self) -> JobEvents:
        """Run the submission, whose job is a coroutine, on this event loop."""
        return await run_coroutine(self._submission, self._locks, self._dispatch)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._submission.awaited:
            raise TaskLockOptionError(
                f"job {self._submission.job.id!r}: its function is a coroutine, which a process "
                "pool does not await; use an AsyncIOScheduler, or a plain function"
            )
        # A process pool pickles what it runs when a worker is about to be free for it.
        if self._locks.closed:
            return NothingToRun, ()
        return PooledRun, (self._submission, self._locks.settings)


class PooledRun:
    """A submission in a worker process: claims on a connection of that process.

    Lock events travel back with the job's own, since the scheduler's listeners are not there.
    """

    def __init__(self, submission: Submission, settings: LockSettings) -> None:
        self._submission = submission
        self._settings = settings

    def run(self) -> JobEvents:
        """Run the submission in the worker process."""
        events = JobEvents()
        own = run(self._submission, process_locks(self._settings), events.append)
        events.extend(own)
        events.watches.extend(own.watches)
        return events


class NothingToRun:
    """What waited for a worker process when the scheduler was shut down."""

    def run(self) -> JobEvents:
        """Claim nothing and run nothing."""
        return JobEvents()


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
    for fire in _fires(submission, locks, dispatch, events):
        job = fire.begin()
        if job is None:
            continue
        if fire.lost:
            fire.forgo()
            continue
        told = None
        try:
            with fire.holding():
                told = run_job(job, submission.jobstore, [fire.run_time], submission.logger_name)
        finally:
            fire.end(told)
        events.extend(told)
    return events


async def run_coroutine(submission: Submission, locks: TaskLocks, dispatch: Dispatch) -> JobEvents:
    """Do the same for a coroutine job; its event loop never waits for the database."""
    events = JobEvents()
    with locks.in_use:
        for fire in _fires(submission, locks, dispatch, events):
            try:
                job = await _begun(fire, locks)
                if job is None:
                    continue
                if fire.lost:
                    await locks.offload.release(fire.forgo)()
                    continue
                told, whole = await _run_to_its_end(fire, job, submission, locks)
            except CancelledError:
                logger.debug("Task %r: cancelled before it ran", submission.task_name)
                break
            events.extend(told)
            if not whole:
                break
    return events


def _fires(
    submission: Submission, locks: TaskLocks, dispatch: Dispatch, events: JobEvents
) -> Iterator[Fire]:
    """Yield a fire for each run time, and note what it found to be watched."""
    for run_time in submission.run_times:
        again, late = True, submission.taken_over is not None
        while again:
            fire = Fire(submission, run_time, locks, dispatch, late_by_nature=late)
            yield fire
            # It may have been granted the window of a dead holder in place of its own, which was
            # in time and is not missed because that run took long.
            again = late = fire.again
            if fire.watch is not None:
                events.watches.append(fire.watch)


async def _begun(fire: Fire, locks: TaskLocks) -> JobView | None:
    """Wait for the claim. If the job is cancelled meanwhile, what is granted is given back."""
    # Now, and not when a thread is free: waiting for one does not make a job late.
    if not fire.must_claim() or locks.closed:
        return fire.begin()
    return await locks.offload.claim(fire.begin, lambda _job: fire.give_back())


async def _run_to_its_end(
    fire: Fire, job: JobView, submission: Submission, locks: TaskLocks
) -> tuple[list[Any], bool]:
    """Run the job and release; return its events, and whether nobody cancelled it."""
    told: list[Any] | None = None
    cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, _cancel_of(fire))
    try:
        with fire.holding(cancel):
            told = await run_coroutine_job(
                job, submission.jobstore, [fire.run_time], submission.logger_name
            )
    finally:
        ended = locks.offload.release(partial(fire.end, told))
    assert told is not None
    # APScheduler tells of these like of any exception of the job.
    cuts = [e for e in map(_exception, told) if isinstance(e, (CancelledError, GeneratorExit))]
    if any(isinstance(cut, GeneratorExit) for cut in cuts):
        return told, False  # it is being closed, as with its event loop, and cannot wait
    try:
        await ended()
    except CancelledError:
        return told, False
    return told, not cuts


def _cancel_of(fire: Fire) -> Callable[[], None]:
    """Return what cancels the current task, as long as it runs this fire's job."""
    task = asyncio.current_task()

    def cancel() -> None:
        if task is not None and fire.running:
            task.cancel()

    return cancel


def _exception(event: Any) -> BaseException | None:
    exception: BaseException | None = getattr(event, "exception", None)
    return exception
