"""A fire: one run time of a job on this replica, from the claim to the release."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR

from apscheduler_tasklock.context import HeldLock, Refusal, holding
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.events import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockEvent,
)
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.period import nominal_time
from apscheduler_tasklock.submission import ALWAYS_MISSED, JobView, Submission, misfired

logger = logging.getLogger(__name__)

Dispatch = Callable[[Any], None]


class Fire:
    """One run time of a submission, on this replica.

    ``begin`` and ``end`` wait for the database. Between them the job runs, in a thread or on an
    event loop; this class does not care.

    :param dispatch: gets the lock events as they happen
    """

    def __init__(
        self, submission: Submission, run_time: datetime, locks: TaskLocks, dispatch: Dispatch
    ) -> None:
        self.run_time = run_time
        self._submission = submission
        self._locks = locks
        self._dispatch = dispatch
        self._wanted_at = time.monotonic()
        self._missed: bool | None = None
        self._held: HeldLock | None = None

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

    def holding(self) -> AbstractContextManager[None]:
        """Make the held lock the current one while the job runs."""
        return nullcontext() if self._held is None else holding(self._held)

    def end(self, events: Sequence[Any] | None) -> None:
        """Release what was claimed.

        :param events: what ``run_job`` returned; ``None`` if the job was not run to its end
        """
        if self._held is None:
            return
        failed = events is None or any(event.code == EVENT_JOB_ERROR for event in events)
        options = self._submission.options
        opens = failed and options is not None and options.on_failure == "release"
        self._release(self._held, keep_window=not opens)

    def give_back(self) -> None:
        """Release what was claimed for a job that will not run; its window is open again."""
        if self._held is not None:
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
            self._tell_failed(error)
            return self._submission.run_unlocked
        if isinstance(claimed, Refusal):
            self._tell_refused(claimed)
            return False
        self._held = claimed
        self._tell(
            EVENT_TASK_LOCK_GRANTED,
            holder=self._locks.replica_id,
            token=claimed.token,
            locked_until=claimed.locked_until,
        )
        return True

    def _claim(self) -> HeldLock | Refusal:
        nominal = nominal_time(self._submission.trigger, self.run_time)
        min_lock, max_lock = self._submission.lock_times(nominal)
        claimed = self._locks.claim(
            self._submission.task_name,
            nominal,
            min_lock=min_lock,
            max_lock=max_lock,
            keep_unanswered=self._submission.run_unlocked,
            since=self._wanted_at,
        )
        if isinstance(claimed, HeldLock):
            claimed.run_time = self.run_time
        return claimed

    def _release(self, held: HeldLock, *, keep_window: bool) -> None:
        holder = {"holder": self._locks.replica_id, "token": held.token}
        try:
            released = self._locks.release(held, keep_window=keep_window)
        except TaskLockError as error:
            self._tell(EVENT_TASK_LOCK_ERROR, exception=error, **holder)
            if not isinstance(error, TaskLockDatabaseError):
                logger.error("Task %r: its lock could not be released: %s", held.name, error)
            return
        if released is None:
            self._tell_lost(held, holder)
        else:
            self._tell(EVENT_TASK_LOCK_RELEASED, locked_until=released.locked_until, **holder)

    def _tell(self, code: int, **details: Any) -> None:
        submission = self._submission
        self._dispatch(
            TaskLockEvent(
                code,
                submission.job.id,
                submission.jobstore,
                submission.task_name,
                self.run_time,
                **details,
            )
        )

    def _tell_refused(self, refusal: Refusal) -> None:
        self._tell(
            EVENT_TASK_LOCK_REFUSED,
            holder=refusal.holder,
            token=refusal.token,
            locked_until=refusal.locked_until,
            reason=refusal.reason,
        )
        logger.debug(
            "Task %r: refused for the run time %s (%s, held by %s until %s)",
            self._submission.task_name,
            self.run_time,
            refusal.reason,
            refusal.holder,
            refusal.locked_until,
        )
        if refusal.blocked and self._locks.is_news(self._submission.task_name, refusal.token):
            logger.warning(
                "Task %r: the run time %s is skipped, because %s still runs the task (token %s), "
                "locked until %s. If that process is gone, the task is stuck until then; the "
                "README says how to free it",
                self._submission.task_name,
                self.run_time,
                refusal.holder,
                refusal.token,
                refusal.locked_until,
            )

    def _tell_failed(self, error: TaskLockError) -> None:
        self._tell(EVENT_TASK_LOCK_ERROR, exception=error)
        # That the database is away has been said once, as a warning; a wrong set-up is an error.
        away = isinstance(error, TaskLockDatabaseError)
        logger.log(
            logging.INFO if away else logging.ERROR,
            "Task %r: %s for the run time %s: %s",
            self._submission.task_name,
            "run without its lock" if self._submission.run_unlocked else "not run",
            self.run_time,
            error,
        )

    def _tell_lost(self, held: HeldLock, holder: dict[str, Any]) -> None:
        self._tell(EVENT_TASK_LOCK_LOST, **holder)
        logger.warning(
            "Task %r: the run scheduled at %s outlived its lock, and another replica has claimed "
            "the task since; raise max_factor or max_lock above what the job takes",
            held.name,
            self.run_time,
        )
