"""A run of an executor: its claim, its lock and its release."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from datetime import datetime
from functools import partial
from math import inf
from typing import Any
from uuid import UUID
from weakref import ref

from apscheduler_tasklock._application import call_application
from apscheduler_tasklock._database.sqlstates import NoThreadError, NotSentError, RowLockedError
from apscheduler_tasklock._lock.claim_attempts import AnyAttempt, AnyRequest
from apscheduler_tasklock._lock.held_locks import HeldLocks
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock._lock.protocol_messages import (
    ClaimRequest,
    Refusal,
)
from apscheduler_tasklock._lock.releases import Release, Released
from apscheduler_tasklock._lock.tracebacks import Section
from apscheduler_tasklock._runs.claim_request import request_of
from apscheduler_tasklock._runs.driven_queue import DrivenQueue
from apscheduler_tasklock._runs.leadership import FollowerRun
from apscheduler_tasklock._runs.reports import Notifier, ReportedRun, telemetry_of
from apscheduler_tasklock._runs.run import SCHEDULED, QueuedRun, Token
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import (
    LONGEST_RETRY_DELAY,
    TaskLockError,
    TaskLockGiveUp,
    TaskLockOptionError,
    TaskLockRetry,
    retry_delay,
)
from apscheduler_tasklock.lock import HeldLock, holding

logger = logger_of(__name__)

# The least share of a lease that must be left when a job begins. If less is left, the lease
# is renewed first.
LEAST_OF_LEASE = 1 / 3


class ExecutorRun(ReportedRun, QueuedRun):
    """One run of a submission, on this replica: for its queue, its claim, its lock, its release.

    The run is claimed before a worker gets it, and its release begins when its job has ended. Only
    ``stands``, ``stands_async`` and the reports of a shutdown wait for the database.

    :param claim_id: the claim's id
    :param notifier: reports the run's events
    :param queue: the queue of the run
    :param is_inline: whether the wrapped executor runs jobs inside ``submit_job``
    :ivar run_time: the run time. When a takeover is granted, it becomes the dead run's run time.
    :ivar context: the context variables of the thread that submitted the run
    :ivar claim: the claim; ``None``: no claim was made yet
    :ivar failure: the error that the job's trigger raised, so that no claim could be made
    :ivar refusal: why a scheduled run time was refused
    :ivar deferred_by: the refusal because of which this run, or an earlier run of its backlog, is
        deferred
    :ivar follower: says what becomes of the run of a follower; see ``leadership``
    :ivar decided: set when the run is to be given, is deferred, or is over. A thread inside
        ``submit_job`` waits for that; ``None``: none does.
    :ivar is_to_be_given: whether the run is to be given to the wrapped executor
    :ivar begins_until: when the run is handed over if it has not begun; on the monotonic clock
    :ivar give_once: the right to give the run to the wrapped executor. A thread inside
        ``submit_job``, the application's thread or the giving thread takes it, or who withdraws the
        run.
    :ivar giving: further data of a run that was given to a pool of processes
    :ivar runs_job: whether the job is run; ``False``: the run was withdrawn, or its lock was lost
        before the job began; ``None``: no worker has begun the run
    :ivar running: whether the job runs under its lock now
    :ivar has_job_ended: whether the job has run and ended, so that its thread releases the claim
    :ivar was_awaited: whether the job's coroutine has begun. An executor may never await a
        coroutine.
    :ivar cancelled_on_loss: whether the job was cancelled because its lock was lost
    :ivar is_cancelled: whether the coroutine was cancelled from outside, or may have been
    :ivar took: seconds that the job took
    :ivar release: the release of the claim, once it was sent
    :ivar is_reported: whether the wrapped executor has reported the run
    """

    following: ExecutorRun | None

    def __init__(
        self,
        submission: Submission,
        run_time: datetime,
        claim_id: UUID,
        locks: HeldLocks,
        notifier: Notifier,
        queue: DrivenQueue,
        *,
        is_inline: bool = False,
    ) -> None:
        kind, due, came = submission.kind, submission.due, submission.submitted_at
        due_at = time.monotonic() - (time.time() - run_time.timestamp())
        if due is not None:
            due_at, came = due.due_at, due.came
        failed, retry_at = submission.failed_run, inf
        if failed is not None and failed.retry_at is not None:
            retry_at = came - (failed.database_time - failed.retry_at).total_seconds()
        super().__init__(
            kind,
            submission.task_name,
            submission.key,
            due_at,
            came,
            submission.job.misfire_grace_time if kind in SCHEDULED else None,
            claims=submission.options is not None,
            retry_at=retry_at,
        )
        self.run_time = run_time
        self.locks = locks
        self.notifier = notifier
        self.queue = queue
        self.context = copy_context()
        self.claim: AnyAttempt | None = None
        self.failure: Exception | None = None
        self.held: HeldLock | None = None
        self.follower: FollowerRun | None = None
        self.decided = threading.Event() if is_inline else None
        self.is_to_be_given = False
        self.begins_until = inf
        self.give_once = Token()
        self.giving: Any = None
        self.runs_job: bool | None = None
        self.running = False
        self.was_awaited = False
        self.cancelled_on_loss = False
        self.is_cancelled = False
        self.took = 0.0
        self.release: Release | None = None
        self.loss_to_report = Token()
        self.is_reported = False
        self._runs_despite: TaskLockError | None = None
        # One of two threads releases the claim: the worker's, or that of a shutdown that cuts the
        # run. And one of them reports the release, under the lock.
        self._release_once = Token()
        self._release_lock = threading.Lock()
        self._outcome: RunOutcome | None = None
        self._is_release_reported = False
        self._reported_event: threading.Event | None = None
        self.has_job_ended = False
        self._cut = False
        # Only the run of a coroutine has these two attributes.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asyncio_task: ref[asyncio.Task[Any]] | None = None
        self.renew(submission, claim_id)

    def renew(self, submission: Submission, claim_id: UUID) -> None:
        """Prepare the run for a new claim, for a submission with the job as it is now."""
        self.submission = submission
        self.refusal: Refusal | None = None
        self.deferred_by: Refusal | None = None
        self._claim_id = claim_id
        self._asked: AnyRequest | None = None
        self.telemetry = telemetry_of(submission)

    def note_decided(self) -> None:
        """Wake the thread that waits for the decision, if one does."""
        if self.decided is not None:
            self.decided.set()

    def request(self) -> AnyRequest:
        """Return the request of the claim. Calls the trigger, which may be application code."""
        if self._asked is None:
            self._asked = request_of(self.submission, self.run_time, self._claim_id)
        return self._asked

    def take_in(self, claimed: HeldLock | Refusal | TaskLockError | None, wanted_at: float) -> bool:
        """Note the outcome of the claim, and return whether the job is to run.

        :param claimed: the lock, the refusal, the error, or ``None`` if the task has no row
        :param wanted_at: when the claim was first asked for, on the monotonic clock
        """
        if isinstance(claimed, TaskLockError):
            self._runs_despite = self._note_claim_failed(claimed, wanted_at)
            return self._runs_despite is not None
        if isinstance(claimed, HeldLock):
            self.held = claimed  # first of all, so that the window is handed over after an error
        self.telemetry.claimed(wanted_at, claimed)
        if isinstance(claimed, HeldLock):
            self._note_run_time(claimed)
            return True
        if claimed is not None:
            self._refused(claimed)
        return False

    def report_granted(self) -> None:
        """Report that the claim was granted, or that the job runs without a lock.

        Called in the worker, right before the job.
        """
        if self.held is not None:
            self.report_lock()
        elif self._runs_despite is not None:
            self.report_claim_failed(self._runs_despite, runs=True)

    def report_not_claimed(self) -> None:
        """Report that the run was not claimed, because the scheduler is shut down."""
        logger.debug(
            "Task %r: not claimed, since the scheduler is shut down", self.submission.task_name
        )
        self.telemetry.skipped("shutdown")

    def report_run_by_another(self, refusal: Refusal) -> None:
        """Report a follower's run time, of which a look has found that another replica has run it.

        :param refusal: the refusal that a claim would have got. It gives rise to the same warnings,
            such as that of another function under this task's name.
        """
        assert isinstance(self._asked, ClaimRequest)
        self.report_warnings(self._asked, refusal)
        self.report_refused(refusal)

    def begin_hand_over(self) -> Release | None:
        """Begin to hand over the window of a job that does not run here."""
        outcome = self._cut_short(begun=False)
        return self._send_release(outcome) if self._is_first_to_release() else None

    def begin_hand_over_late(self) -> Release | None:
        """Report a run that has not begun in time, and begin to hand over its window."""
        self.report_not_begun_in_time()
        return self.begin_hand_over()

    def begin_hand_over_lost(self) -> Release | None:
        """Report a lock that was lost before its job began, and begin to hand the window over."""
        if not self._cut:
            self.report_lost(begun=False)
        return self.begin_hand_over()

    def begin_lease_end(self) -> Release | None:
        """Begin to end the lease of a run, because its worker process died, maybe during the run.

        :return: the release; ``None`` if the claim was released before
        """
        if not self._is_first_to_release():
            return None
        assert self.held is not None
        # In the application's thread, because the SDK may send the span right where it ends.
        call_application(partial(self.telemetry.ended, RunOutcome(outcome="died")))
        return self.locks.begin_lease_end(self.held)

    def report_lease_end(self, release: Release) -> None:
        """Report the death of the worker process, or that the run's lease could not be ended.

        :param release: the release that ends the lease. It has arrived or failed.
        """
        try:
            release.future.result()
        except TaskLockError as error:
            self.report_not_released(error)
        else:
            self.report_died()

    def begin_release(
        self,
        raised: BaseException | None,
        *,
        cut: bool = False,
        in_worker: Sequence[Section] = (),
    ) -> Release | None:
        """Begin to release the claim, after the job has ended.

        :param raised: the exception that the job has raised
        :param cut: whether the job was cancelled from outside
        :param in_worker: the exception's traceback, as its worker process has made it
        :return: the release, which a shutdown may have begun before; ``None``: there is none
        """
        outcome = self._cut_short(begun=True) if cut else None
        if not self._is_first_to_release():
            return self.release
        return self._send_release(outcome or self._outcome_of(raised, in_worker))

    def is_cut(self, raised: BaseException | None, asyncio_task: asyncio.Task[Any] | None) -> bool:
        """Return whether a coroutine was cancelled from outside, and not by its own code.

        :param raised: the exception that the coroutine has raised
        :param asyncio_task: the asyncio task in which the coroutine runs
        """
        if isinstance(raised, GeneratorExit):
            return _is_closed(asyncio_task)  # closed, for example together with its event loop
        return isinstance(raised, asyncio.CancelledError) and (
            self.cancelled_on_loss
            or self.locks.closed
            or is_being_cancelled(if_unknown=self.submission.failover)
        )

    @property
    def lost(self) -> bool:
        """Whether the lock is lost, so that another replica may run the task."""
        return self.held is not None and not self.held.inherited and self.held.lost

    def stands(self) -> bool:
        """Return whether the job may begin. Renews the lease first if little of it is left.

        Little of the lease is left if this process was suspended after the claim, for example by
        SIGSTOP. Another replica may have taken the run over meanwhile, which the renewal finds out.
        The process may also be suspended between the renewal and its answer, so the lease is
        checked again after the renewal.
        """
        aged = self._aged
        if self.lost or aged is None:
            return not self.lost
        return self.locks.renew_now(aged) and self._aged is None

    async def stands_async(self) -> bool:
        """Return whether the job may begin, as :meth:`stands`, without blocking the event loop."""
        aged = self._aged
        if self.lost or aged is None:
            return not self.lost
        return await self.locks.renew_now_async(aged) and self._aged is None

    @property
    def _aged(self) -> HeldLock | None:
        """The lock, if little of its lease is left; else ``None``.

        A renewal gives no more than is left of the maximum lock. That may be little for a takeover,
        which nobody would ever begin if that counted.
        """
        held = self.held
        if held is None or held.inherited or held.lease is None:
            return None
        lease = min(held.lease, held.seconds_left)
        return held if held.lease_left < lease * LEAST_OF_LEASE else None

    def runs_in(
        self, loop: asyncio.AbstractEventLoop, asyncio_task: asyncio.Task[Any] | None
    ) -> None:
        """Note the event loop and the asyncio task that run the job's coroutine."""
        self._loop = loop
        # Weak, so that this object does not keep a coroutine alive whose event loop has ended. When
        # the coroutine is collected, its lock is released.
        self._asyncio_task = None if asyncio_task is None else ref(asyncio_task)
        if self.held is not None:
            self.held.runs_on(loop)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Make the held lock the current lock during the block, in which the job runs."""
        if self.held is None:
            yield
            return
        self.running = True
        self.held.on_lost(self._lose)
        try:
            run_time = self.run_time.timestamp()
            with holding(self.held), self.telemetry.running(self.held, run_time):
                yield
        finally:
            self.running = False
            self.has_job_ended = True

    def begin_cut(self) -> Release | None:
        """Begin to release the claim of a coroutine that a shutdown cancels.

        :return: the release; ``None`` if the coroutine has ended or its claim was released
        """
        outcome = self._cut_short(begun=self.running)
        if self.has_job_ended or not self._is_first_to_release():
            return None
        return self._send_release(outcome)

    def _is_first_to_report(self) -> bool:
        """Return whether the caller is the first thread to report the release."""
        with self._release_lock:
            is_first, self._is_release_reported = not self._is_release_reported, True
        if self._reported_event is not None:
            self._reported_event.set()
        return is_first

    def _note_claim_failed(self, error: TaskLockError, wanted_at: float) -> TaskLockError | None:
        """Note a claim that was neither granted nor refused.

        :return: the error if the job is to run without a lock; ``None`` if it is not to run, and
            the error was reported
        """
        if self.locks.closed:
            self.report_not_begun()
            return None
        self.telemetry.claim_failed(wanted_at)
        # With `run_unlocked` the job runs without a lock, except in four cases:
        # - A look has submitted the run, such as a takeover. Another replica may run it.
        # - The task's row is locked. The session that has locked the row may have claimed the task.
        # - No thread can be started that would renew the lease. The granted claim is handed over.
        # - The claim could not be sent although there is no outage. Another replica may run it.
        unlocked = (
            self.submission.run_unlocked
            and self.kind in SCHEDULED
            and not isinstance(error, (RowLockedError, NoThreadError))
            and not self._had_no_turn(error)
        )
        if unlocked:
            return error
        if self.submission.dead_run is not None or self.submission.failed_run is not None:
            self.report_not_run_again(error)
        else:
            self.report_claim_failed(error, runs=False)
        return None

    def _had_no_turn(self, error: TaskLockError) -> bool:
        """Return whether the claim was not sent in time although there is no outage."""
        return isinstance(error, NotSentError) and self.locks.replica.outage.reason is None

    def _refused(self, refusal: Refusal) -> None:
        if self.submission.request_id is not None:
            logger.debug(
                "Task %r: the manual run is not begun here, because its claim was refused (%s); "
                "the last claim is of replica %r",
                self.submission.task_name,
                refusal.reason,
                refusal.holder,
            )
            return
        if self.submission.dead_run is not None or self.submission.failed_run is not None:
            logger.debug(
                "Task %r: %s is not run again here, because its claim was refused (%s); the last "
                "claim is of replica %r",
                self.submission.task_name,
                self.in_words,
                refusal.reason,
                refusal.holder,
            )
            return
        due = self.submission.due
        if due is not None:
            due.refused = refusal.reason
        if refusal.reason == "withdrawn":
            logger.debug(
                "Task %r: not run here: another replica has claimed it, or its job was changed",
                self.submission.task_name,
            )
            return
        assert isinstance(self._asked, ClaimRequest)
        self.report_warnings(self._asked, refusal)
        # The run of a stored job is not deferred, because the job store reads the job again.
        if due is None:
            self.refusal = refusal
        if self.refusal is not None and refusal.blocked:
            self.report_deferred(refusal)
        else:
            self.report_refused(refusal)

    def _note_run_time(self, held: HeldLock) -> None:
        submission = self.submission
        is_again = held.is_takeover or submission.failed_run is not None
        if not is_again or held.run_time is None:
            # Without jitter, as in the row, so that takeovers and retries have the same run time.
            asked = self._asked
            exact = asked.run_time if isinstance(asked, ClaimRequest) and asked.exact else None
            held.run_time = (exact or self.run_time).astimezone(self.run_time.tzinfo)
            return
        if submission.is_stored or submission.run_time_is_shared(held.window_start):
            held.run_time = held.window_start
        held.run_time = held.run_time.astimezone(self.run_time.tzinfo)
        self.run_time = held.run_time

    def _lose(self) -> None:
        """Report a lock that was lost while the job runs.

        With ``cancel_on_lost``, also cancel the job.
        """
        self.report_lost()
        options = self.submission.options
        if self._loop is not None and options is not None and options.cancel_on_lost:
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        asyncio_task = None if self._asyncio_task is None else self._asyncio_task()
        if asyncio_task is not None and self.running:
            self.cancelled_on_loss = True
            asyncio_task.cancel()

    def _outcome_of(
        self, exception: BaseException | None, in_worker: Sequence[Section]
    ) -> RunOutcome:
        """Return the outcome of a run.

        :param exception: the exception that the job has raised; ``None``: none
        :param in_worker: the exception's traceback, as its worker process has made it
        """
        options = self.submission.options
        opens = (
            exception is not None
            and options is not None
            and options.on_failure == "release"
            and not self.submission.is_manual  # because the row's window is that of another run
        )
        # Traces get the exception only if `redact` is the default, because a trace has the whole
        # traceback, which `redact` cannot change.
        if exception is not None and self.locks.settings.redact is str:
            self.telemetry.raised(exception)
        outcome = RunOutcome.of(
            exception,
            WindowAfter.OPEN if opens else WindowAfter.KEEP,
            self.locks.settings.redact,
            overran=self.held is not None and self.held.seconds_left == 0,
            tracebacks=self.locks.settings.tracebacks,
            in_worker=in_worker,
        )
        outcome = replace(outcome, retry_in=self._retry_in(exception))
        return self._with_next_run(outcome)

    def _retry_in(self, exception: BaseException | None) -> float | None:
        """Return the seconds until the job is run again; ``None``: it is not."""
        held, options = self.held, self.submission.options
        # A mistake in a call of the library would be the same in each attempt.
        is_failure = isinstance(exception, Exception) and not isinstance(
            exception, (TaskLockGiveUp, TaskLockOptionError)
        )
        is_scheduled = not self.submission.is_manual  # a manual run belongs to no run time
        if not is_failure or not is_scheduled or held is None or held.lost or options is None:
            return None
        delay = options.delay_after(held.attempt)
        if delay is not None and isinstance(exception, TaskLockRetry):
            # If a subclass has set an impossible delay, that of the options stands. An error here
            # would keep the run from being released.
            with suppress(Exception):
                delay = delay if exception.after is None else retry_delay(exception.after)
        # With jitter, so that jobs that have failed together do not all run again together.
        return None if delay is None else min(delay * random.uniform(1, 1.1), LONGEST_RETRY_DELAY)  # noqa: S311  # no secret

    def _with_next_run(self, outcome: RunOutcome) -> RunOutcome:
        """Add the task's next due time to an outcome, unless the row's due time is still right."""
        if self.submission.due is not None or self.submission.is_stored:
            # If the stored job came due during the run, it could not be claimed before this
            # release. So the row gets the time of this release as the due time.
            return replace(outcome, next_in=0.0)
        if self.submission.is_manual:
            if outcome.outcome != "ok":
                return outcome
        elif self._is_before_next_run():
            return outcome
        next_in, is_last = self.submission.next_from(self.run_time, time.time())
        return replace(outcome, next_in=next_in, is_last=is_last)

    def _is_before_next_run(self) -> bool:
        """Return whether the next run time, as the claim wrote it, is still to come."""
        asked = self._asked
        if not isinstance(asked, ClaimRequest) or asked.next_in is None or asked.is_last:
            return False
        assert asked.run_time is not None
        return time.time() < asked.run_time.timestamp() + asked.next_in

    def _cut_short(self, *, begun: bool) -> RunOutcome:
        """Note that the run was cut or has not begun, and return its outcome.

        The window of a run that has begun is handed over only with failover, because without
        failover no window is begun twice.
        """
        if self.held is not None:
            self._cut = True
            self.held.cut()
        again = self.submission.failover or not begun
        window = WindowAfter.HAND_OVER if again else WindowAfter.KEEP
        if not begun:
            return RunOutcome(window)
        if not self.cancelled_on_loss:
            return RunOutcome(window, "cancelled", cut=True)
        if self.held is not None and self.held.seconds_left == 0:
            return RunOutcome(window, "overran")
        return RunOutcome(window, "cancelled")

    def _is_first_to_release(self) -> bool:
        """Return whether a lock is held, and the caller is the first to release its claim."""
        held = self.held
        return held is not None and not held.inherited and self._release_once.take()

    def _send_release(self, outcome: RunOutcome) -> Release:
        assert self.held is not None
        self._outcome = outcome
        self.release = self.locks.begin_release(self.held, outcome, self._report_late)
        return self.release

    def _report_late(self, released: Released | None) -> None:
        """Report a release that has arrived after it was reported as failed."""
        assert self._outcome is not None
        if released is not None:
            call_application(partial(self.report_released, released, self._outcome))

    def report_at_stop(self, seconds: float) -> None:
        """In a shutdown, report the release of a coroutine that has ended.

        The shutdown may block the event loop that would report the release. If the release has not
        begun, another thread is about to begin and report it, so this method waits for that report.

        :param seconds: limits the wait
        """
        if self.release is not None:
            self.report_release(self.release, seconds)
            return
        with self._release_lock:
            event = self._reported_event = self._reported_event or threading.Event()
            if self._is_release_reported:
                return
        event.wait(seconds)

    def report_release(self, release: Release, seconds: float | None = None) -> None:
        """Wait for a release, and report it.

        :param seconds: limits the wait; ``None``: the release has arrived or failed
        """
        try:
            released = self.locks.wait_for_release(release, seconds)
        except TaskLockError as error:
            self._report_not_released(error)
        else:
            self._report(released)

    def _report_not_released(self, error: TaskLockError) -> None:
        assert self._outcome is not None
        if self._is_first_to_report():
            self.telemetry.ended(self._outcome)
            self.report_not_released(error)

    def _report(self, released: Released | None) -> None:
        assert self._outcome is not None
        if not self._is_first_to_report():
            return
        self.telemetry.ended(self._outcome)
        if released is not None:
            self.report_released(released, self._outcome)
        elif not self._cut:
            self.report_lost()


def is_being_cancelled(*, if_unknown: bool) -> bool:
    """Return whether the current asyncio task was cancelled from outside, and not by its own code.

    :param if_unknown: what to return in Python 3.10, where asyncio cannot tell the two apart
    """
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return if_unknown if cancelling is None else cancelling() > 0


def may_be_cancelled(raised: BaseException | None) -> bool:
    """Return whether the current asyncio task was cancelled from outside, or may have been.

    :param raised: the exception that the task's coroutine has raised
    """
    return isinstance(raised, asyncio.CancelledError) and is_being_cancelled(if_unknown=True)


def _is_closed(task: asyncio.Task[Any] | None) -> bool:
    """Return whether a call of ``close()`` runs a coroutine now, and not its asyncio task."""
    try:
        return asyncio.current_task() is not task
    except RuntimeError:  # no loop runs
        return True
