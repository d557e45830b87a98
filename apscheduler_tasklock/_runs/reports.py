"""Reports: the log lines and events about the lock of a run, and events for the scheduler.

The scheduler itself reports neither stored jobs nor a run time that could not be claimed.

A log line is written before its event is dispatched, because listeners are code of the application,
which may take long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone, tzinfo
from functools import partial
from typing import Any

from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_SUBMITTED,
    JobExecutionEvent,
    JobSubmissionEvent,
)
from apscheduler.executors.base import run_job

from apscheduler_tasklock._application import call_where_allowed
from apscheduler_tasklock._database.sqlstates import RowLockedError
from apscheduler_tasklock._lock.held_locks import HeldLocks
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock._lock.protocol_messages import ClaimRequest, ClosedDeadRun, Refusal
from apscheduler_tasklock._lock.releases import Released
from apscheduler_tasklock._runs.blocked_tasks import BlockedTasks, BlockedTaskWarnings
from apscheduler_tasklock._runs.given_job import JobView
from apscheduler_tasklock._runs.misfires import ALWAYS_MISSED
from apscheduler_tasklock._runs.run import JobKey, Token
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._runs.telemetry import RunTelemetry
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.events import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockEvent,
)
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.status import MissCause

logger = logger_of(__name__)

_NOTHING = RunTelemetry()


def _measure_nothing(_submission: Submission) -> RunTelemetry:
    return _NOTHING


# Returns the telemetry of a run of a submission. The function is chosen when this module is
# imported.
telemetry_of: Callable[[Submission], RunTelemetry] = _measure_nothing
with suppress(ImportError):  # the extra `otel` is not installed
    from apscheduler_tasklock._runs import otel

    telemetry_of = otel.telemetry_of

Dispatch = Callable[[Any], None]

LOCKED_ROW = (
    ". Another session has the task's row locked in an open transaction; pg_stat_activity and "
    "pg_blocking_pids() show which session"
)

LOST = (
    "Task %r: the lock of the run scheduled at %s is lost (token %s), and another replica may run "
    "the task. The lock was not renewed for longer than its lease, or somebody freed the task, or "
    "the run outlived its maximum lock; in the last case, raise max_factor or max_lock above the "
    "time that the run takes"
)
NOT_BEGUN_IN_TIME = (
    "Task %r: the run scheduled at %s did not begin before its lease or its maximum lock ended "
    "(token %s), because an event loop or a worker kept it waiting, or this process was suspended. "
    "The run is handed over, unless the task was claimed again meanwhile"
)


@dataclass(frozen=True)
class Notifier:
    """What the reports of an executor's runs have in common.

    :ivar dispatch: dispatches an event to the listeners
    :ivar blocked: which warnings of blocked tasks were logged
    :ivar has_listener: returns whether a listener wants events of a code
    :ivar note_missed: notes for the run history that a run time is not run, and why
    """

    dispatch: Dispatch
    blocked: BlockedTasks
    has_listener: Callable[[int], bool]
    note_missed: Callable[[ClaimRequest, MissCause, str], object]


class ReportedRun:
    """The log lines and events of a run: base class of ``ExecutorRun``, which has the attributes.

    :ivar submission: the submission of the run
    :ivar run_time: the run time
    :ivar locks: claims the run's lock, and releases it
    :ivar notifier: dispatches the events
    :ivar telemetry: measures the run
    :ivar held: the lock of the claim; ``None`` if the claim was not granted
    :ivar loss_to_report: the right to report that the lock is lost. The replica's thread and the
        worker may notice the loss at the same moment, and it is reported once.
    """

    submission: Submission
    run_time: datetime
    locks: HeldLocks
    notifier: Notifier
    telemetry: RunTelemetry
    held: HeldLock | None
    loss_to_report: Token

    @property
    def in_words(self) -> str:
        """The run in words, for log lines: the window, or the manual run."""
        if self.submission.is_manual:
            return "the manual run"
        return f"the window of {self.run_time}"

    def report_lock(self) -> None:
        """Report a claim that was granted; for a takeover also why the window is run again."""
        held, dead_run = self.held, self.submission.dead_run
        assert held is not None
        if dead_run is not None:
            why = (
                "handed it over"
                if dead_run.handed_over
                else "neither renewed nor released its lock"
            )
            logger.info(
                "Task %r: runs %s again (token %s), since its holder %r (token %s) %s",
                self.submission.task_name,
                self.in_words,
                held.token,
                held.dead_holder,
                dead_run.token,
                why,
            )
        reason = "takeover" if held.is_takeover else None
        if self.submission.failed_run is not None:
            reason = "retry"
            logger.info(
                "Task %r: runs %s again (attempt %d, token %s), since its run on %r has failed",
                self.submission.task_name,
                self.in_words,
                held.attempt,
                held.token,
                self.submission.failed_run.holder,
            )
        if self.submission.request_id is not None:
            reason = "manual"
            logger.info("Task %r: manual run (token %s)", self.submission.task_name, held.token)
        self._dispatch_of_lock(
            EVENT_TASK_LOCK_GRANTED,
            locked_until=held.locked_until,
            reason=reason,
            attempt=held.attempt,
        )

    def report_warnings(self, request: ClaimRequest, refusal: Refusal) -> None:
        """Log the warnings that a refusal gives rise to; see :class:`BlockedTaskWarnings`.

        Also note a refused run time that the application has set, which nobody else can know of.
        """
        blocked = self.notifier.blocked
        warnings = BlockedTaskWarnings(self.submission, self.run_time, self.locks, blocked)
        warnings.warn(request, refusal)
        reason = warnings.warn_of_set_time(request, refusal)
        if reason is not None:
            self.notifier.note_missed(request, MissCause.REFUSED, reason)

    def report_deferred(self, refusal: Refusal) -> None:
        """Report a run time that was refused, and is claimed again when the run in its way is over.

        There is no event, because the run time may still be run.
        """
        logger.debug(
            "Task %r: the run time %s waits for the run of %r (token %s)",
            self.submission.task_name,
            self.run_time,
            refusal.holder,
            refusal.token,
        )

    def report_refused(self, refusal: Refusal) -> None:
        """Report a run time that was refused for good."""
        logger.debug(
            "Task %r: refused for the run time %s (%s, held by %r until %s)",
            self.submission.task_name,
            self.run_time,
            refusal.reason,
            refusal.holder,
            refusal.locked_until,
        )
        self._dispatch(
            EVENT_TASK_LOCK_REFUSED,
            holder=refusal.holder,
            token=refusal.token,
            locked_until=refusal.locked_until,
            reason=refusal.reason,
        )

    def report_claim_failed(self, error: TaskLockError, *, runs: bool) -> None:
        """Report a claim that was neither granted nor refused.

        :param runs: whether the job runs without its lock
        """
        # An outage is a WARNING. Any other cause needs somebody to act, and is an ERROR.
        is_outage = isinstance(error, TaskLockDatabaseError) and not isinstance(
            error, RowLockedError
        )
        logger.log(
            logging.WARNING if is_outage else logging.ERROR,
            "Task %r: %s for the run time %s: %s%s",
            self.submission.task_name,
            "run without its lock" if runs else "not run",
            self.run_time,
            error,
            LOCKED_ROW if isinstance(error, RowLockedError) else "",
        )
        if not runs:
            self.telemetry.skipped("error")
        self._dispatch(EVENT_TASK_LOCK_ERROR, exception=error)

    def report_not_begun(self) -> None:
        """Report a run time that is not run here, because this replica shuts down."""
        report_not_begun(self.submission, self.run_time, self.telemetry)

    def report_job_error(self, error: Exception) -> None:
        """Report a run time that could not be claimed, as APScheduler reports a failed job."""
        submission = self.submission
        scheduler_log = logging.getLogger(submission.logger_name)
        call_where_allowed(
            partial(scheduler_log.error, "Error running job %s", submission.job.id, exc_info=error)
        )
        self.notifier.dispatch(
            JobExecutionEvent(
                EVENT_JOB_ERROR,
                submission.job.id,
                submission.jobstore,
                self.run_time,
                exception=error,
            )
        )

    def report_not_run_again(self, error: TaskLockError) -> None:
        """Report a takeover or a retry whose claim failed, and which is tried again.

        Logged once for each dead or failed run.
        """
        run = self.submission.dead_run or self.submission.failed_run
        assert run is not None
        if self.notifier.blocked.is_first(f"repetition of {run.token}", run.task_name):
            logger.warning(
                "Task %r: %s, %s, could not be run again; trying again: %s",
                self.submission.task_name,
                self.in_words,
                "whose holder died" if self.submission.dead_run else "which has failed",
                error,
            )
        self._dispatch(EVENT_TASK_LOCK_ERROR, exception=error)

    def report_released(self, released: Released, outcome: RunOutcome) -> None:
        """Report a release that has arrived."""
        held = self.held
        assert held is not None
        handed_over = outcome.window is WindowAfter.HAND_OVER
        if handed_over:
            logger.info(
                "Task %r: %s is handed over to another replica (token %s)",
                self.submission.task_name,
                self.in_words,
                held.token,
            )
        if released.retry_at is not None:
            logger.info(
                "Task %r: attempt %d at the run time %s has failed (%s); it is run again at %s",
                self.submission.task_name,
                held.attempt,
                self.run_time,
                outcome.error_type,
                released.retry_at,
            )
        self._dispatch_of_lock(
            EVENT_TASK_LOCK_RELEASED,
            locked_until=released.locked_until,
            reason="handed over" if handed_over else None,
            attempt=held.attempt,
            retry_at=released.retry_at,
            outcome=outcome.outcome or None,
            error=outcome.error_in_words,
            took=released.took if outcome.outcome else None,
        )

    def report_not_released(self, error: TaskLockError) -> None:
        """Report a release that failed."""
        if not isinstance(error, TaskLockDatabaseError):
            logger.error(
                "Task %r: its lock could not be released; the release is tried again until the "
                "lock ends by itself: %s",
                self.submission.task_name,
                error,
            )
        self._dispatch_of_lock(EVENT_TASK_LOCK_ERROR, exception=error)

    def report_died(self) -> None:
        """Report that the worker process of a run died."""
        logger.warning(
            "Task %r: the worker process that ran it is dead; its lock is free",
            self.submission.task_name,
        )
        self._dispatch_of_lock(EVENT_TASK_LOCK_LOST, reason="died")

    def report_not_begun_in_time(self) -> None:
        """Report a run that has not begun although its maximum lock is about to end."""
        self._warn_of_lock(NOT_BEGUN_IN_TIME)

    def report_lost(self, *, begun: bool = True) -> None:
        """Report, once, a lock that was lost before its run ended.

        :param begun: whether the run had begun
        """
        if self.loss_to_report.take():
            self._warn_of_lock(LOST if begun else NOT_BEGUN_IN_TIME)
            self.telemetry.lost()
            self._dispatch_of_lock(EVENT_TASK_LOCK_LOST)

    def _warn_of_lock(self, words: str) -> None:
        assert self.held is not None
        logger.warning(words, self.submission.task_name, self.run_time, self.held.token)

    def _dispatch_of_lock(self, code: int, **details: Any) -> None:
        assert self.held is not None
        holder = self.locks.settings.replica_id
        self._dispatch(code, holder=holder, token=self.held.token, **details)

    def _dispatch(self, code: int, **details: Any) -> None:
        if not self.notifier.has_listener(code):
            return
        submission = self.submission
        self.notifier.dispatch(
            TaskLockEvent(
                code,
                submission.job.id,
                submission.jobstore,
                submission.task_name,
                self.run_time,
                **details,
            )
        )


def report_not_begun(submission: Submission, run_time: datetime, telemetry: RunTelemetry) -> None:
    """Report a run time that is not run here, because this replica shuts down."""
    telemetry.skipped("shutdown")
    logger.info(
        "Task %r: the run time %s is not run here, since this replica is shutting down",
        submission.task_name,
        run_time,
    )


def report_submitted(submission: Submission, notifier: Notifier) -> None:
    """Report a stored job as submitted. Other jobs are reported by the scheduler itself."""
    if notifier.has_listener(EVENT_JOB_SUBMITTED):
        run_times = list(submission.run_times)
        notifier.dispatch(
            JobSubmissionEvent(
                EVENT_JOB_SUBMITTED, submission.job.id, submission.jobstore, run_times
            )
        )


def report_missed(submission: Submission, notifier: Notifier) -> None:
    """Let APScheduler's ``run_job`` report a stored job's missed run time, in this thread."""
    if submission.due is not None and submission.due.move.following is None:
        logger.warning(
            "Job %r: its last run time %s is missed, so the job is removed without this run. "
            "With a longer misfire_grace_time, or None, the job would run late",
            submission.job.id,
            submission.run_times[0],
        )
    report_submitted(submission, notifier)
    events = run_job(
        JobView(submission.job, ALWAYS_MISSED),
        submission.jobstore,
        list(submission.run_times),
        submission.logger_name,
    )
    for event in events:
        notifier.dispatch(event)


def report_closed(submission: Submission, notifier: Notifier, closed: ClosedDeadRun) -> None:
    """Report the end of a dead run, because a claim of the submission has closed its row.

    The dead run's own replica cannot report it.
    """
    if notifier.has_listener(EVENT_TASK_LOCK_RELEASED):
        key, tz = submission.key, submission.run_times[0].tzinfo
        notifier.dispatch(event_of_closed(closed, submission.task_name, key, tz))


def event_of_closed(
    closed: ClosedDeadRun, task_name: str, key: JobKey, tz: tzinfo | None = timezone.utc
) -> TaskLockEvent:
    """Return the event of a dead run whose row this replica has closed.

    :param key: the job of the task on this replica
    """
    job_id, jobstore = key
    return TaskLockEvent(
        EVENT_TASK_LOCK_RELEASED,
        job_id,
        jobstore,
        task_name,
        datetime.fromtimestamp(closed.run_time, tz),
        holder=closed.holder,
        token=closed.token,
        attempt=closed.attempt,
        outcome=closed.outcome,
        took=closed.took,
    )
