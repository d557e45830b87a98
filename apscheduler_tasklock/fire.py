"""A fire: one run time of a job on this replica, from the claim to the release."""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR

from apscheduler_tasklock.context import HeldLock, Refusal, holding
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.period import nominal_time
from apscheduler_tasklock.reports import Dispatch, Reports
from apscheduler_tasklock.submission import ALWAYS_MISSED, JobView, Submission, Watch, misfired

logger = logging.getLogger(__name__)


class Fire:
    """One run time of a submission, on this replica.

    ``begin`` and ``end`` wait for the database. Between them the job runs, in a thread or on an
    event loop; this class does not care.

    :param dispatch: gets the lock events as they happen
    :param late_by_nature: whether it is never a misfire, since it had to wait for a dead run
    :ivar run_time: the run time of the window that is run
    :ivar running: whether the job runs, under its lock
    :ivar watch: the run that stood against this one, if it is to be watched
    """

    def __init__(
        self,
        submission: Submission,
        run_time: datetime,
        locks: TaskLocks,
        dispatch: Dispatch,
        *,
        late_by_nature: bool = False,
    ) -> None:
        self.run_time = run_time
        self.running = False
        self.watch: Watch | None = None
        self._submission = submission
        self._locks = locks
        self._reports = Reports(submission, run_time, locks, dispatch)
        self._wanted_at = time.monotonic()
        self._missed: bool | None = False if late_by_nature else None
        self._held: HeldLock | None = None
        self._cancelled = False

    def must_claim(self) -> bool:
        """Decide whether this is a misfire, and tell whether ``begin`` will ask the database."""
        if self._missed is None:
            self._missed = misfired(self._submission.job, self.run_time)
        return not self._missed and self._submission.options is not None

    def begin(self) -> JobView | None:
        """Return what APScheduler is to run, or ``None`` if nothing is to run here.

        A misfire claims nothing. It is returned for APScheduler to say in its own words.
        """
        if self.must_claim() and not self._may_run():
            return None
        return JobView(self._submission.job, ALWAYS_MISSED if self._missed else None)

    @property
    def lost(self) -> bool:
        """Whether its lock was lost on the way to the job's start: it may be running elsewhere."""
        return self._held is not None and not self._held.inherited and self._held.lost

    def forgo(self) -> None:
        """Give up a lock that was lost before its job began. Waits for the database.

        With a lease, the window is run again, here if nowhere else. Without, it is open again.
        """
        held = self._held
        assert held is not None
        self._reports.lost(held)
        if held.lease is None:
            self.give_back()
        else:
            self._locks.abandon(held)
            self.watch = self._watch(held.window_start, 0.0)

    @property
    def again(self) -> bool:
        """Whether the window asked for is still to be claimed, after that of a dead holder."""
        return self._held is not None and self._held.window_left

    @contextmanager
    def holding(self, cancel: Callable[[], object] | None = None) -> Iterator[None]:
        """Make the held lock the current one while the job runs.

        :param cancel: called in another thread if the lock is lost and the job wants that
        """
        if self._held is None:
            yield
            return
        self.running = True
        self._held.when_lost(partial(self._lose, self._held, cancel))
        try:
            with holding(self._held):
                yield
        finally:
            self.running = False

    def end(self, events: Sequence[Any] | None) -> None:
        """Release what was claimed.

        :param events: what ``run_job`` returned; ``None`` if the job was not run to its end
        """
        if self._held is None or self._held.inherited:
            return
        if self._cancelled and (events is None or _was_cancelled(events)):
            # It has not run to its end; whoever takes the lock over runs it again.
            self._locks.abandon(self._held)
            return
        failed = events is None or any(event.code == EVENT_JOB_ERROR for event in events)
        options = self._submission.options
        opens = failed and options is not None and options.on_failure == "release"
        self._release(self._held, keep_window=not opens)

    def give_back(self) -> None:
        """Release what was claimed for a job that will not run; its window is open again."""
        if self._held is not None and not self._held.inherited:
            self._release(self._held, keep_window=False)

    def _may_run(self) -> bool:
        """Claim the run time, and tell what became of it."""
        task_name = self._submission.task_name
        if self._locks.closed:
            logger.debug("Task %r: not claimed, since the scheduler is shut down", task_name)
            return False
        try:
            claimed = self._claim()
        except TaskLockError as error:
            if self._locks.closed:
                logger.info("Task %r: not run, since the scheduler is shut down", task_name)
                return False
            self._reports.failed(error)
            died = self._submission.taken_over
            if self._submission.run_unlocked:
                return True
            if died is not None and isinstance(error, TaskLockDatabaseError):
                self.watch = self._watch(died.window_start, 0.0)
            return False
        if isinstance(claimed, Refusal):
            self._reports.refused(claimed)
            if claimed.unfinished and self._submission.failover is not None:
                self.watch = self._watch(claimed.window_start, claimed.seconds_left)
            return False
        self._held = claimed
        self._reports.granted(claimed)
        return True

    def _claim(self) -> HeldLock | Refusal:
        nominal = nominal_time(self._submission.trigger, self.run_time)
        min_lock, max_lock = self._submission.lock_times(nominal)
        claimed = self._locks.claim(
            self._submission.task_name,
            nominal,
            min_lock=min_lock,
            max_lock=max_lock,
            failover=self._submission.failover,
            takes_over=self._submission.failover is not None,
            keep_unanswered=self._submission.run_unlocked,
            since=self._wanted_at,
        )
        if isinstance(claimed, HeldLock):
            if claimed.window_left and claimed.run_time is not None:
                self.run_time = self._reports.run_time = claimed.run_time
            claimed.run_time = self.run_time
        return claimed

    def _watch(self, window_start: datetime, seconds_left: float) -> Watch:
        submission = replace(self._submission, run_times=(self.run_time,), taken_over=None)
        return Watch(submission, window_start, seconds_left)

    def _lose(self, held: HeldLock, cancel: Callable[[], object] | None) -> None:
        """Tell that the lock was lost while the job runs, and cancel the job if it wants that."""
        self._reports.lost(held)
        options = self._submission.options
        if cancel is not None and options is not None and options.cancel_on_lost:
            self._cancelled = True
            cancel()

    def _release(self, held: HeldLock, *, keep_window: bool) -> None:
        try:
            released = self._locks.release(held, keep_window=keep_window)
        except TaskLockError as error:
            self._reports.not_released(held, error)
            return
        if released is None:
            self._reports.lost(held)
        else:
            self._reports.released(held, released.locked_until)


def _was_cancelled(events: Sequence[Any]) -> bool:
    return any(isinstance(getattr(event, "exception", None), CancelledError) for event in events)
