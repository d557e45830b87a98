"""What the inner executor gets in place of a job, and what its worker then runs."""

from __future__ import annotations

import asyncio
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from apscheduler.executors.base import run_job

from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.messages import ClaimRequest
from apscheduler_tasklock._scheduler.attempt import RunAttempt, is_being_cancelled
from apscheduler_tasklock._scheduler.functions import events_of_what_ran
from apscheduler_tasklock._scheduler.lateness import WorkerQueue
from apscheduler_tasklock._scheduler.notify import Notifier
from apscheduler_tasklock._scheduler.queued import QueuedRuns
from apscheduler_tasklock._scheduler.submission import JobView, RunResult, Submission
from apscheduler_tasklock._values import logger_of

try:
    from apscheduler.executors.base import run_coroutine_job
except ImportError:  # APScheduler 3.10
    from apscheduler.executors.base_py3 import run_coroutine_job

logger = logger_of(__name__)


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _ignore(_submission: Submission) -> None:
    pass


@dataclass(frozen=True)
class RunContext:
    """What all submissions of one executor share in one process.

    :ivar locks: this replica's locks
    :ivar notifier: gets the lock events as they happen
    :ivar workers: reckons when run times would have begun if the lock took no time
    :ivar coroutines: the coroutine jobs that hold a claim, or are about to
    :ivar queued: the run times that wait for a worker
    :ivar wrap_function: returns what is called in place of a job's function
    :ivar note_begun: called when a submission waits for a worker no longer
    """

    locks: LockClient
    notifier: Notifier
    workers: WorkerQueue
    coroutines: set[RunAttempt]
    queued: QueuedRuns
    wrap_function: Callable[[Callable[..., Any]], Callable[..., Any]] = _unchanged
    note_begun: Callable[[Submission], None] = _ignore


class JobWrapper:
    """Looks like a job to the inner executor; its function claims, runs the job, and releases.

    It stands for all run times of a submission and is submitted with one, so that the inner
    executor calls it once. It has no grace time: whether the job is late is decided before the
    claim. Its function is a coroutine function if the job's is, which executors look at.
    """

    args = ()
    misfire_grace_time = None

    def __init__(self, submission: Submission, context: RunContext) -> None:
        job = submission.job
        self._job = job
        # What every executor asks for, some of it several times.
        self.id, self.name, self.max_instances = job.id, job.name, job.max_instances
        self.kwargs: dict[str, Any] = {}
        self._jobstore_alias = submission.jobstore
        locked = LockedRun(submission, context)
        self.func: Callable[[], Any] = locked.run_coroutine if submission.awaited else locked.run

    def __getattr__(self, name: str) -> Any:
        """Return what else is asked for of the job."""
        if name.startswith("__") or "_job" not in vars(self):  # as pickle asks
            raise AttributeError(name)
        return getattr(self._job, name)

    def __str__(self) -> str:
        return str(self.name)


class LockedRun:
    """A submission with this replica's locks."""

    def __init__(self, submission: Submission, context: RunContext) -> None:
        self._submission = submission
        self._context = context

    def run(self) -> RunResult:
        """Run the job for each of its run times that this replica is granted.

        :return: APScheduler's own events of the runs
        """
        submission = self._submission
        result = RunResult(submission.claim_ids)
        turn = self._context.workers.begin(submission.submitted_at)
        try:
            known = self._context.queued.take(submission)
            self._context.note_begun(submission)
            for attempt in self._attempts(result, known.request):
                attempt.check_lateness(turn.at)
                began_at = time.monotonic()
                job = attempt.begin(known.refused)
                if job is None:
                    if attempt.found_taken and known.refused is None:
                        self._context.queued.ask(self._context.locks, began_at)
                    continue
                if attempt.held is not None:
                    self._context.queued.note_granted()
                if not attempt.stands():
                    attempt.give_up_lost()
                    continue
                events = None
                try:
                    job.func = self._context.wrap_function(job.func)
                    with turn.job(), attempt.holding():
                        told = run_job(
                            job, submission.jobstore, [attempt.run_time], submission.logger_name
                        )
                    events = events_of_what_ran(told, submission.logger_name)
                finally:
                    attempt.end(events)
                result.extend(events)
        finally:
            turn.end()
        return result

    async def run_coroutine(self) -> RunResult:
        """Do the same for a coroutine job; its event loop never waits for the database."""
        submission = self._submission
        result = RunResult(submission.claim_ids)
        self._context.note_begun(submission)
        began_at = time.monotonic()
        if submission.scheduler_pass is not None:
            began_at = submission.scheduler_pass.begin_coroutine()
        busy = 0.0  # seconds that the jobs have taken
        for attempt in self._attempts(result):
            attempt.check_lateness(began_at + busy)
            self._context.coroutines.add(attempt)
            try:
                job = await attempt.begin_async()
                if job is None:
                    continue
                if not await attempt.stands_async():
                    await attempt.give_up_lost_async()
                    continue
                started = time.monotonic()
                events, was_cancelled = await _run_to_its_end(
                    attempt, job, submission, self._context
                )
                busy += time.monotonic() - started
            except CancelledError:
                logger.debug("Task %r: cancelled before it ran", submission.task_name)
                break
            finally:
                self._context.coroutines.discard(attempt)
            result.extend(events)
            if was_cancelled:
                break
        return result

    def _attempts(
        self, result: RunResult, request: ClaimRequest | None = None
    ) -> Iterator[RunAttempt]:
        """Yield an attempt for each run time, and note what stood against it.

        :param request: the claim of the only run time, if it was made already
        """
        submission, context = self._submission, self._context
        for run_time, claim_id in zip(submission.run_times, submission.claim_ids, strict=True):
            attempt = RunAttempt(
                submission, run_time, claim_id, context.locks, context.notifier, request
            )
            yield attempt
            if attempt.blocked is not None:
                result.blocked.append(attempt.blocked)


async def _run_to_its_end(
    attempt: RunAttempt, job: JobView, submission: Submission, context: RunContext
) -> tuple[list[Any], bool]:
    """Run the job and release; return its events, and whether somebody cancelled it."""
    events: list[Any] | None = None
    locks = context.locks
    task = asyncio.current_task()
    attempt.runs_in(asyncio.get_running_loop(), task)
    try:
        job.func = context.wrap_function(job.func)
        with attempt.holding():
            told = await run_coroutine_job(
                job, submission.jobstore, [attempt.run_time], submission.logger_name
            )
        events = events_of_what_ran(told, submission.logger_name)
    finally:
        # APScheduler tells of a cancellation like of any exception of the job.
        raised = [exception for event in events or () if (exception := _exception(event))]
        cancelled = any(isinstance(exception, CancelledError) for exception in raised)
        # Being closed, as with its event loop, it cannot wait.
        closed = events is None or (
            any(isinstance(exception, GeneratorExit) for exception in raised) and _is_closed(task)
        )
        cut = closed or (
            cancelled
            and (
                attempt.cancelled_on_loss
                or locks.closed
                or is_being_cancelled(if_unknown=submission.failover)
            )
        )
        ticket = attempt.begin_end(events, cut=cut)
    assert events is not None
    if closed:
        return events, True
    try:
        if ticket is not None:
            await attempt.report_end_async(ticket)
    except CancelledError:
        return events, True
    return events, cancelled


def _is_closed(task: asyncio.Task[Any] | None) -> bool:
    """Tell whether a coroutine of this task runs since it is closed, and not as the task."""
    try:
        return asyncio.current_task() is not task
    except RuntimeError:  # no loop runs
        return True


def _exception(event: Any) -> BaseException | None:
    exception: BaseException | None = getattr(event, "exception", None)
    return exception
