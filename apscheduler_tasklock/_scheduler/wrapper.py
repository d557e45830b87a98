"""What the inner executor gets in place of a job, and what its worker then runs."""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from uuid import UUID

from apscheduler.executors.base import run_job

from apscheduler_tasklock._lock.releases import OwedRelease
from apscheduler_tasklock._scheduler.attempt import Fire, is_being_cancelled
from apscheduler_tasklock._scheduler.lateness import Turn, WorkerQueue
from apscheduler_tasklock._scheduler.notify import BlockedTasks, Notifier
from apscheduler_tasklock._scheduler.submission import Blocked, JobView, Submission
from apscheduler_tasklock._scheduler.workers import deferred_signals, hear_of_shutdown, worker_id
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.locks import LockSettings, TaskLocks

try:
    from apscheduler.executors.base import run_coroutine_job
except ImportError:  # APScheduler 3.10
    from apscheduler.executors.base_py3 import run_coroutine_job

logger = logging.getLogger(__name__)

# APScheduler's run_job logs the start and end of what it runs, which here is the carrier. Its
# lines go to this logger, in worker processes too. A filter, because a logging configuration
# resets a logger's level, handlers and propagation, but not its filters.
QUIET_LOGGER = "apscheduler_tasklock._scheduler.wrapper.quiet"
logging.getLogger(QUIET_LOGGER).addFilter(lambda _record: False)


class JobEvents(list[Any]):
    """The events of the real job, as the carrier's return value.

    :ivar claim_ids: those of the submission
    :ivar blocked: run times that were refused because of runs that may turn out to be dead
    :ivar owed: releases that a worker process could not send
    """

    def __init__(self, claim_ids: Sequence[UUID]) -> None:
        super().__init__()
        self.claim_ids = claim_ids
        self.blocked: list[Blocked] = []
        self.owed: list[OwedRelease] = []


class Carrier:
    """Looks like a job to the inner executor; its function claims, runs the job, and releases.

    It carries all run times of a submission and is submitted with one, so that the inner executor
    calls it once. It has no grace time: whether the job is late is decided before the claim. Its
    function is a coroutine function if the job's is, which executors look at.

    :param workers: reckons when fires would have begun if the lock took no time
    :param coroutines: the coroutine jobs that hold a claim, or are about to
    """

    args = ()
    misfire_grace_time = None

    def __init__(
        self,
        submission: Submission,
        locks: TaskLocks,
        notifier: Notifier,
        workers: WorkerQueue,
        coroutines: set[Fire],
    ) -> None:
        job = submission.job
        self._job = job
        self.kwargs: dict[str, Any] = {}
        self._jobstore_alias = submission.jobstore
        locked = LockedRun(submission, locks, notifier, workers, coroutines)
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

    def __init__(
        self,
        submission: Submission,
        locks: TaskLocks,
        notifier: Notifier,
        workers: WorkerQueue,
        coroutines: set[Fire],
    ) -> None:
        self._submission = submission
        self._locks = locks
        self._notifier = notifier
        self._workers = workers
        self._coroutines = coroutines

    def run(self) -> JobEvents:
        """Run the submission in this process."""
        turn = self._workers.begin(self._submission.submitted_at)
        return run(self._submission, self._locks, self._notifier, turn)

    async def run_coroutine(self) -> JobEvents:
        """Run the submission, whose job is a coroutine, on this event loop."""
        return await run_coroutine(self._submission, self._locks, self._notifier, self._coroutines)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._submission.awaited:
            raise TaskLockOptionError(
                f"job {self._submission.job.id!r}: its function is a coroutine, which a process "
                "pool does not await; use an AsyncIOScheduler, or a plain function"
            )
        # A process pool pickles what it runs when a worker is about to be free for it.
        if self._locks.closed:
            return NothingToRun, (self._submission.claim_ids,)
        return PooledRun, (self._submission, self._locks.settings, self._locks.stable)


class PooledRun:
    """A submission in a worker process: claims on a connection of that process.

    Lock events travel back with the job's own, since the scheduler's listeners are not there. So do
    releases that could not be sent: the worker may end right after this.

    :param stable: whether the parent believes that holders died whose leases have ended
    """

    def __init__(self, submission: Submission, settings: LockSettings, stable: bool) -> None:
        self._submission = submission
        self._settings = settings
        self._stable = stable

    def run(self) -> JobEvents:
        """Run the submission in the worker process."""
        locks = process_locks(replace(self._settings, replica_id=worker_id(self._settings)))
        if self._stable:
            locks.believe()
        else:
            locks.doubt()
        hear_of_shutdown(locks)
        events = JobEvents(self._submission.claim_ids)
        with deferred_signals():
            turn = _workers.begin(self._submission.submitted_at, time.monotonic())
            own = run(self._submission, locks, Notifier(events.append, _blocked), turn)
            events.extend(own)
            events.blocked.extend(own.blocked)
            events.owed.extend(locks.take_pending())
        return events


class NothingToRun:
    """What waited for a worker process when the scheduler was shut down."""

    def __init__(self, claim_ids: Sequence[UUID]) -> None:
        self._claim_ids = claim_ids

    def run(self) -> JobEvents:
        """Claim nothing and run nothing."""
        return JobEvents(self._claim_ids)


# What a worker process knows of itself.
_workers = WorkerQueue()
_blocked = BlockedTasks()


@cache
def process_locks(settings: LockSettings) -> TaskLocks:
    """Return the one :class:`TaskLocks` of a worker process."""
    return TaskLocks.from_settings(settings)


def run(submission: Submission, locks: TaskLocks, notifier: Notifier, turn: Turn) -> JobEvents:
    """Run a submitted job for each of its run times that this replica is granted.

    :param notifier: gets the lock events as they happen
    :param turn: its turn on this worker
    :return: APScheduler's own events of the runs
    """
    events = JobEvents(submission.claim_ids)
    try:
        for fire in _fires(submission, locks, notifier, events):
            fire.check_lateness(turn.at)
            job = fire.begin()
            if job is None:
                continue
            if fire.lost:
                fire.give_up_lost()
                continue
            told = None
            try:
                with turn.job(), fire.holding():
                    told = run_job(
                        job, submission.jobstore, [fire.run_time], submission.logger_name
                    )
            finally:
                fire.end(told)
            events.extend(told)
    finally:
        turn.end()
    return events


async def run_coroutine(
    submission: Submission, locks: TaskLocks, notifier: Notifier, coroutines: set[Fire]
) -> JobEvents:
    """Do the same for a coroutine job; its event loop never waits for the database."""
    events = JobEvents(submission.claim_ids)
    began_at = time.monotonic()
    if submission.scheduler_pass is not None:
        began_at = submission.scheduler_pass.begin_coroutine()
    busy = 0.0  # seconds that the jobs have taken
    with locks.in_use:
        for fire in _fires(submission, locks, notifier, events):
            fire.check_lateness(began_at + busy)
            coroutines.add(fire)
            try:
                job = await _begun(fire, locks)
                if job is None:
                    continue
                if fire.lost:
                    await locks.offload.release(fire.give_up_lost)()
                    continue
                started = time.monotonic()
                told, whole = await _run_to_its_end(fire, job, submission, locks)
                busy += time.monotonic() - started
            except CancelledError:
                logger.debug("Task %r: cancelled before it ran", submission.task_name)
                break
            finally:
                coroutines.discard(fire)
            events.extend(told)
            if not whole:
                break
    return events


def _fires(
    submission: Submission, locks: TaskLocks, notifier: Notifier, events: JobEvents
) -> Iterator[Fire]:
    """Yield a fire for each run time, and note what stood against it."""
    for run_time, claim_id in zip(submission.run_times, submission.claim_ids, strict=True):
        fire = Fire(submission, run_time, claim_id, locks, notifier)
        yield fire
        if fire.blocked is not None:
            events.blocked.append(fire.blocked)


async def _begun(fire: Fire, locks: TaskLocks) -> JobView | None:
    """Wait for the claim. If the job is cancelled meanwhile, what is granted is given back."""
    if not fire.must_claim or locks.closed:
        return fire.begin()
    return await locks.offload.claim(fire.begin, lambda _job: fire.give_back())


async def _run_to_its_end(
    fire: Fire, job: JobView, submission: Submission, locks: TaskLocks
) -> tuple[list[Any], bool]:
    """Run the job and release; return its events, and whether nobody cancelled it."""
    told: list[Any] | None = None
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    fire.runs_on(loop)
    cancel, cancelled_on_loss = _cancel_of(fire)
    try:
        with fire.holding(partial(loop.call_soon_threadsafe, cancel)):
            told = await run_coroutine_job(
                job, submission.jobstore, [fire.run_time], submission.logger_name
            )
    finally:
        # APScheduler tells of a cancellation like of any exception of the job.
        raised = [exception for event in told or () if (exception := _exception(event))]
        cancelled = any(isinstance(exception, CancelledError) for exception in raised)
        # Being closed, as with its event loop, it cannot wait.
        closed = told is None or (
            any(isinstance(exception, GeneratorExit) for exception in raised) and _is_closed(task)
        )
        cut = closed or (
            cancelled
            and (
                cancelled_on_loss()
                or locks.closed
                or is_being_cancelled(if_unknown=submission.failover)
            )
        )
        ended = locks.offload.release(partial(fire.end, told, cut=cut))
    assert told is not None
    if closed:
        return told, False
    try:
        await ended()
    except CancelledError:
        return told, False
    return told, not cancelled


def _cancel_of(fire: Fire) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Return what cancels the current task while it runs this fire's job; and whether it did."""
    task = asyncio.current_task()
    cancelled = []

    def cancel() -> None:
        if task is not None and fire.running:
            cancelled.append(True)
            task.cancel()

    return cancel, lambda: bool(cancelled)


def _is_closed(task: asyncio.Task[Any] | None) -> bool:
    """Tell whether a coroutine of this task runs since it is closed, and not as the task."""
    try:
        return asyncio.current_task() is not task
    except RuntimeError:  # no loop runs
        return True


def _exception(event: Any) -> BaseException | None:
    exception: BaseException | None = getattr(event, "exception", None)
    return exception
