"""A run attempt: one run time of a job on this replica, from the claim to the release."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID
from weakref import ref

from apscheduler_tasklock._database.errors import NoThreadError, NotSentError, RowLockedError
from apscheduler_tasklock._lock.claim import AnyRequest
from apscheduler_tasklock._lock.client import LockClient, Released
from apscheduler_tasklock._lock.messages import ClaimRequest, Ending, HandOut, Refusal, RunEnd
from apscheduler_tasklock._lock.releases import ReleaseTicket
from apscheduler_tasklock._scheduler.notify import Notifier, Reports
from apscheduler_tasklock._scheduler.request import request_of
from apscheduler_tasklock._scheduler.submission import Blocked, Submission
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.lock import HeldLock, holding

logger = logger_of(__name__)

# The share of a lease that has to be left when a job begins; else it is renewed first.
LEAST_OF_LEASE = 1 / 3


class RunAttempt:
    """One run time of a submission, on this replica.

    It is claimed before a worker has it, and its release is begun when its job has ended. Nothing
    here waits for the database but ``stands``, and what a shutdown reports.

    :param claim_id: the claim's id
    :param notifier: gets the lock events as they happen
    :ivar run_time: the run time of the window that is run
    :ivar running: whether the job runs, under its lock
    :ivar blocked: what stood against it, if that may turn out to be dead
    :ivar cancelled_on_loss: whether its job was cancelled since its lock was lost
    """

    def __init__(
        self,
        submission: Submission,
        run_time: datetime,
        claim_id: UUID,
        locks: LockClient,
        notifier: Notifier,
    ) -> None:
        self.run_time = run_time
        self.running = False
        self.blocked: Blocked | None = None
        self.cancelled_on_loss = False
        self._submission = submission
        self._claim_id = claim_id
        self._locks = locks
        self._reports = Reports(submission, run_time, locks, notifier)
        self._telemetry = self._reports.telemetry
        self._wanted_at = time.monotonic()
        self._runs_after: TaskLockError | None = None
        self._asked: AnyRequest | None = None
        self._held: HeldLock | None = None
        # Who ends the claim: the worker, or a shutdown that cuts the run.
        self._end_lock = threading.Lock()
        self._ended = False
        self._end: RunEnd | None = None
        self._release: ReleaseTicket | None = None
        self._is_released = False
        self._wants_release: threading.Event | None = None
        self._job_ended = False
        self._cut = False
        # Of a coroutine.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asyncio_task: ref[asyncio.Task[Any]] | None = None

    def request(self) -> AnyRequest:
        """Return what is claimed. It asks the job's trigger, which may be the application's own."""
        if self._asked is None:
            self._asked = request_of(self._submission, self.run_time, self._claim_id)
        return self._asked

    def take_in(self, claimed: HeldLock | Refusal | TaskLockError | None, wanted_at: float) -> bool:
        """Note what became of the claim, and return whether the job runs.

        :param wanted_at: since when it was asked for, on the monotonic clock
        """
        self._wanted_at = wanted_at
        if isinstance(claimed, TaskLockError):
            self._runs_after = self._claimed_in_vain(claimed)
            return self._runs_after is not None
        self._telemetry.claimed(wanted_at, claimed)
        if isinstance(claimed, HeldLock):
            self._held = claimed
            self._note_run_time(claimed)
            return True
        if claimed is not None:
            self._refused(claimed)
        return False

    def tell_granted(self) -> None:
        """Tell that the claim was granted. Called in the worker, right before the job.

        Or that the job runs all the same.
        """
        if self._held is not None:
            self._reports.granted(self._held)
        elif self._runs_after is not None:
            self._reports.failed(self._runs_after, runs=True)

    def tell_not_claimed(self) -> None:
        """Tell that the run was not claimed, since the scheduler is shut down."""
        logger.debug(
            "Task %r: not claimed, since the scheduler is shut down", self._submission.task_name
        )
        self._telemetry.skipped("shutdown")

    def tell_missed(self) -> None:
        """Count a misfire, which APScheduler tells of."""
        self._telemetry.skipped("misfire")

    def tell_not_begun(self) -> None:
        """Tell of a run time that a shutdown came before."""
        self._reports.not_begun()

    def settled(self, outcome: bool | TaskLockError) -> bool:
        """Note what became of moving a job past a run time that is missed.

        :return: whether it was still handed out
        """
        if isinstance(outcome, TaskLockError):
            return self._not_settled(outcome)
        hand_out = self._submission.hand_out
        assert hand_out is not None
        return self._settled(hand_out, settled=outcome)

    def begin_give_back(self) -> ReleaseTicket | None:
        """Begin to hand over what was claimed for a job that does not run here."""
        end = self._cut_short(begun=False)
        return self._begin_release(end) if self._take_end() else None

    def begin_give_up_lost(self) -> ReleaseTicket | None:
        """Begin to give up a lock that was lost before its job began."""
        self._tell_lost()
        return self.begin_give_back()

    def begin_end_of_lease(self) -> ReleaseTicket | None:
        """Begin to end the lease of a run whose worker process is dead; it may have run in part."""
        if not self._take_end():
            return None
        assert self._held is not None
        self._telemetry.ended(RunEnd(outcome="died"))
        return self._locks.begin_end_of_lease(self._held)

    def report_end_of_lease(self, ticket: ReleaseTicket) -> None:
        """Tell that the worker process died, when the lease has ended or that has failed."""
        assert self._held is not None
        try:
            ticket.future.result()
        except TaskLockError as error:
            self._reports.not_released(self._held, error)
        else:
            self._reports.died(self._held)

    def begin_end_of(
        self, raised: BaseException | None, *, cut: bool = False
    ) -> ReleaseTicket | None:
        """Begin to release what was claimed, when the job has ended.

        :param raised: what the job has raised
        :param cut: whether somebody else than the job has ended it
        :return: the release; that of a shutdown which has ended it before
        """
        end = self._cut_short(begun=True) if cut else None
        if not self._take_end():
            return self._release
        return self._begin_release(end or self._end_of(raised))

    def is_cut(self, raised: BaseException | None, asyncio_task: asyncio.Task[Any] | None) -> bool:
        """Tell whether somebody else than the coroutine itself has ended it.

        :param raised: what it has raised
        :param asyncio_task: that it runs in
        """
        if isinstance(raised, GeneratorExit):
            return _is_closed(asyncio_task)  # as with its event loop
        return isinstance(raised, asyncio.CancelledError) and (
            self.cancelled_on_loss
            or self._locks.closed
            or is_being_cancelled(if_unknown=self._submission.failover)
        )

    def _not_settled(self, error: TaskLockError) -> bool:
        # It is handed out again.
        logger.debug("Task %r: not settled: %s", self._submission.task_name, error)
        return False

    def _settled(self, hand_out: HandOut, *, settled: bool) -> bool:
        if settled and hand_out.following is None:
            logger.warning(
                "Job %r: its last run time %s is missed, so that it is removed without having run "
                "then. A longer misfire_grace_time, or None, would let it run late",
                hand_out.job_id,
                self.run_time,
            )
        return settled

    @property
    def held(self) -> HeldLock | None:
        """The lock that was granted, if one was."""
        return self._held

    @property
    def lost(self) -> bool:
        """Whether its lock was lost on the way to the job's start: it may be running elsewhere."""
        return self._held is not None and not self._held.inherited and self._held.lost

    def stands(self) -> bool:
        """Tell whether its job may begin. Waits for the database if little of its lease is left.

        This process may have been stopped since the claim, and another replica have taken over; or
        before it saw that the lease is renewed, which may have ended again since.
        """
        aged = self._aged
        if self.lost or aged is None:
            return not self.lost
        return self._locks.renew_now(aged) and self._aged is None

    async def stands_async(self) -> bool:
        """Do the same in a coroutine."""
        aged = self._aged
        if self.lost or aged is None:
            return not self.lost
        return await self._locks.renew_now_async(aged) and self._aged is None

    @property
    def _aged(self) -> HeldLock | None:
        """The lock, if little of its lease is left."""
        held = self._held
        if held is None or held.inherited or held.lease is None:
            return None
        return held if held.lease_left < held.lease * LEAST_OF_LEASE else None

    def _tell_lost(self) -> None:
        assert self._held is not None
        if not self._cut:
            self._reports.lost(self._held)

    def runs_in(
        self, loop: asyncio.AbstractEventLoop, asyncio_task: asyncio.Task[Any] | None
    ) -> None:
        """Note that its job is a coroutine, which this task of asyncio runs on this event loop."""
        self._loop = loop
        # Weak: if its loop has ended, nothing else must keep the coroutine, which ends its lock.
        self._asyncio_task = None if asyncio_task is None else ref(asyncio_task)
        if self._held is not None:
            self._held.runs_on(loop)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Make the held lock the current one while the job runs."""
        if self._held is None:
            yield
            return
        self.running = True
        self._held.on_lost(partial(self._lose, self._held))
        try:
            run_time = self.run_time.timestamp()
            with holding(self._held), self._telemetry.running(self._held, run_time):
                yield
        finally:
            self.running = False
            self._job_ended = True

    def begin_cut(self) -> ReleaseTicket | None:
        """Begin to end the claim of a coroutine which a shutdown cancels."""
        end = self._cut_short(begun=self.running)
        if self.is_being_released or not self._take_end():
            return None
        return self._begin_release(end)

    @property
    def is_being_released(self) -> bool:
        """Whether its job has ended, so that its release is on the way."""
        return self._job_ended

    def _take_report(self) -> bool:
        """Take it on to tell of the release; return ``False`` if somebody else has."""
        with self._end_lock:
            is_first, self._is_released = not self._is_released, True
        if self._wants_release is not None:
            self._wants_release.set()
        return is_first

    def _claimed_in_vain(self, error: TaskLockError) -> TaskLockError | None:
        """Note why the claim was not decided; return that if the job runs all the same.

        Else that was told.
        """
        if self._locks.closed:
            self._reports.not_begun()
            return None
        self._telemetry.claim_failed(self._wanted_at)
        # A dead window is run again under a lock, or by another replica. A row that somebody has
        # locked is no outage: who locked it may be running the task.
        unlocked = (
            self._submission.run_unlocked
            and not self._is_extra
            and not isinstance(error, (RowLockedError, NoThreadError))
            and not self._had_no_turn(error)
        )
        if unlocked:
            return error
        if self._submission.dead_run is not None:
            self._reports.not_taken_over(error)
        else:
            self._reports.failed(error, runs=False)
        return None

    def _had_no_turn(self, error: TaskLockError) -> bool:
        """Tell whether its turn did not come, although the database answers."""
        return isinstance(error, NotSentError) and self._locks.outage.reason is None

    @property
    def _is_extra(self) -> bool:
        """Whether this is no run time of the schedule's: another replica may run it as well."""
        submission = self._submission
        is_asked_for = submission.request_id is not None
        return submission.dead_run is not None or is_asked_for or submission.is_standby

    def _refused(self, refusal: Refusal) -> None:
        if self._submission.request_id is not None:
            logger.debug(
                "Task %r: the run that was asked for is not begun here: %r has it",
                self._submission.task_name,
                refusal.holder,
            )
            return
        if self._submission.dead_run is not None:
            logger.debug(
                "Task %r: %s is not run again here: %r has it",
                self._submission.task_name,
                self._reports.what,
                refusal.holder,
            )
            return
        if self._submission.hand_out is not None and refusal.reason == "withdrawn":
            logger.debug(
                "Task %r: not run here: its job was changed, or handed out to another replica",
                self._submission.task_name,
            )
            return
        assert isinstance(self._asked, ClaimRequest)
        self._reports.refused(self._asked, refusal)
        if self._submission.hand_out is not None:
            # Its job has not moved on, and is handed out again when that run is over.
            self._locks.give_back(self._submission.hand_out)
            return
        if refusal.unfinished:
            submission = replace(self._submission, run_times=(self.run_time,), claim_ids=())
            self.blocked = Blocked(
                submission,
                refusal.token,
                refusal.blocked,
                refusal.waits,
                follows=refusal.manual and refusal.blocked,
            )

    def _note_run_time(self, held: HeldLock) -> None:
        if not held.is_takeover or held.run_time is None:
            held.run_time = self.run_time
            return
        submission = self._submission
        if submission.is_stored or submission.run_time_is_shared(held.window_start):
            held.run_time = held.window_start
        held.run_time = held.run_time.astimezone(self.run_time.tzinfo)
        self.run_time = self._reports.run_time = held.run_time

    def _lose(self, held: HeldLock) -> None:
        """Tell that the lock was lost while the job runs, and cancel the job if it wants that."""
        self._reports.lost(held)
        options = self._submission.options
        if self._loop is not None and options is not None and options.cancel_on_lost:
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        asyncio_task = None if self._asyncio_task is None else self._asyncio_task()
        if asyncio_task is not None and self.running:
            self.cancelled_on_loss = True
            asyncio_task.cancel()

    def _end_of(self, exception: BaseException | None) -> RunEnd:
        """Return how a run ended whose job has raised this, or nothing."""
        options = self._submission.options
        opens = (
            exception is not None
            and options is not None
            and options.on_failure == "release"
            and not self._submission.is_manual  # whose window is another run's
        )
        if exception is not None and self._locks.settings.redact is str:
            self._telemetry.raised(exception)  # its traceback has what nobody has redacted
        end = RunEnd.of(
            exception,
            Ending.OPEN if opens else Ending.KEEP,
            self._locks.settings.redact,
            overran=self._held is not None and self._held.seconds_left == 0,
        )
        return self._with_next_run(end)

    def _with_next_run(self, end: RunEnd) -> RunEnd:
        """Add when the next run time is due, if that of the claim has passed meanwhile."""
        if self._submission.hand_out is not None or self._submission.is_stored:
            # What came due while it ran has waited in its row for this end, and is due now.
            return replace(end, next_in=0.0)
        if self._submission.is_manual:
            if end.outcome != "ok":
                return end
        elif self._is_before_next_run():
            return end
        next_in, is_last = self._submission.next_from(self.run_time, time.time())
        return replace(end, next_in=next_in, is_last=is_last)

    def _is_before_next_run(self) -> bool:
        """Tell whether the run time that the claim has told as the next one is still to come."""
        asked = self._asked
        if not isinstance(asked, ClaimRequest) or asked.next_in is None or asked.is_last:
            return False
        assert asked.run_time is not None
        return time.time() < asked.run_time.timestamp() + asked.next_in

    def _cut_short(self, *, begun: bool) -> RunEnd:
        """Note that the run is cut short, and return how its claim is to be ended.

        What was begun is run again only with failover: without, a window is started once.
        """
        if self._held is not None:
            self._cut = True
            self._held.cut()
        again = self._submission.failover or not begun
        ending = Ending.HAND_OVER if again else Ending.KEEP
        if not begun:
            return RunEnd(ending)
        if not self.cancelled_on_loss:
            return RunEnd(ending, "cancelled", cut=True)
        if self._held is not None and self._held.seconds_left == 0:
            return RunEnd(ending, "overran")
        return RunEnd(ending, "cancelled")

    def _take_end(self) -> bool:
        """Take it on to end the claim; return ``False`` if another one has, or none is held."""
        with self._end_lock:
            if self._ended or self._held is None or self._held.inherited:
                return False
            self._ended = True
        return True

    def _begin_release(self, end: RunEnd) -> ReleaseTicket:
        assert self._held is not None
        self._end = end
        self._release = self._locks.begin_release(self._held, end)
        return self._release

    def report_at_stop(self, seconds: float) -> None:
        """Wait until the release is told, for so long at most; or tell of it in its place.

        The loop may not go on before the shutdown is over.
        """
        if self._release is not None:
            self.report_end(self._release, seconds)
            return
        with self._end_lock:
            released = self._wants_release = self._wants_release or threading.Event()
            if self._is_released:
                return
        released.wait(seconds)

    def report_end(self, ticket: ReleaseTicket, seconds: float | None = None) -> None:
        """Wait for a release that was begun, for so long at most, and tell of it."""
        assert self._held is not None
        try:
            released = self._locks.released(self._held, ticket, seconds)
        except TaskLockError as error:
            self._report_failure(error)
        else:
            self._report(released)

    def _report_failure(self, error: TaskLockError) -> None:
        assert self._held is not None
        assert self._end is not None
        if self._take_report():
            self._telemetry.ended(self._end)
            self._reports.not_released(self._held, error)

    def _report(self, released: Released | None) -> None:
        assert self._held is not None
        assert self._end is not None
        if not self._take_report():
            return
        self._telemetry.ended(self._end)
        if released is not None:
            self._reports.released(self._held, released.locked_until, self._end.ending)
        elif not self._cut:
            self._reports.lost(self._held)


def is_being_cancelled(*, if_unknown: bool) -> bool:
    """Tell whether somebody has cancelled the current asyncio task, rather than its own code.

    :param if_unknown: what to say where Python does not tell, before 3.11
    """
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return if_unknown if cancelling is None else cancelling() > 0


def _is_closed(task: asyncio.Task[Any] | None) -> bool:
    """Tell whether a coroutine of this task runs since it is closed, and not as the task."""
    try:
        return asyncio.current_task() is not task
    except RuntimeError:  # no loop runs
        return True
