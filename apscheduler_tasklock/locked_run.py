"""A submitted job under its lock: for each run time the claim, APScheduler's run, the release."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR
from apscheduler.executors.base import run_job

from apscheduler_tasklock.context import HeldLock, holding
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.events import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockEvent,
)
from apscheduler_tasklock.locks import Refusal, TaskLocks
from apscheduler_tasklock.options import RESERVED_KEY, LockOptions
from apscheduler_tasklock.period import nominal_time, period_after

logger = logging.getLogger(__name__)

Dispatch = Callable[[Any], None]

# A grace time that every run time exceeds.
_ALWAYS_MISSED = -timedelta(days=36500).total_seconds()


@dataclass(frozen=True)
class Submission:
    """A job and the run times that are due, as APScheduler submitted them.

    :ivar trigger: the job's trigger at that moment; ``reschedule()`` gives the job another
    :ivar options: the job's lock options, or ``None`` if it runs on every replica
    :ivar run_unlocked: whether it runs all the same if the database stays away
    :ivar logger_name: logger of the executor
    """

    job: Any
    jobstore: str
    trigger: Any
    run_times: Sequence[datetime]
    task_name: str
    options: LockOptions | None
    run_unlocked: bool
    logger_name: str

    def event(self, code: int, run_time: datetime, **details: Any) -> TaskLockEvent:
        """Return an event about one run time."""
        return TaskLockEvent(code, self.job.id, self.jobstore, self.task_name, run_time, **details)

    def lock_times(self, nominal: datetime) -> tuple[float, float]:
        """Return the minimum and maximum lock for a nominal run time, in seconds."""
        assert self.options is not None
        try:
            period = period_after(self.trigger, nominal)
        except Exception:  # a custom trigger's own code may raise anything
            logger.warning(
                "Task %r: the trigger %s cannot tell its next run time; the lock times come from "
                "the option 'period'",
                self.task_name,
                self.trigger,
                exc_info=True,
            )
            period = None
        return self.options.lock_times(period or self.options.period or 0)


class _JobView:
    """The job as ``run_job`` sees it: with another grace time, and without the reserved key."""

    def __init__(self, job: Any, misfire_grace_time: float | None) -> None:
        self._job = job
        self.id = job.id
        self.func = job.func
        self.args = job.args
        self.kwargs = {key: value for key, value in job.kwargs.items() if key != RESERVED_KEY}
        self.misfire_grace_time = misfire_grace_time

    def __str__(self) -> str:
        return str(self._job)


def run_locked(submission: Submission, locks: TaskLocks, dispatch: Dispatch) -> list[Any]:
    """Run a submitted job for each of its run times that this replica is granted.

    :param dispatch: gets the lock events as they happen
    :return: APScheduler's own events of the runs
    """
    events: list[Any] = []
    for run_time in submission.run_times:
        if _misfired(submission.job, run_time):
            events += _run(submission, run_time, _ALWAYS_MISSED)
        elif submission.options is None:
            events += _run(submission, run_time, None)
        else:
            events += _run_if_granted(submission, run_time, locks, dispatch)
    return events


def _misfired(job: Any, run_time: datetime) -> bool:
    """Tell whether APScheduler would call this run time missed."""
    if job.misfire_grace_time is None:
        return False
    late = datetime.now(timezone.utc) - run_time
    return late > timedelta(seconds=job.misfire_grace_time)


def _run(submission: Submission, run_time: datetime, grace_time: float | None) -> Any:
    """Have APScheduler run the job, or log that it was missed, in its own words."""
    view = _JobView(submission.job, grace_time)
    return run_job(view, submission.jobstore, [run_time], submission.logger_name)


def _run_if_granted(
    submission: Submission, run_time: datetime, locks: TaskLocks, dispatch: Dispatch
) -> Any:
    try:
        claimed = _claim(submission, run_time, locks)
    except TaskLockError as error:
        dispatch(submission.event(EVENT_TASK_LOCK_ERROR, run_time, exception=error))
        _log_failed_claim(submission, run_time, error)
        return _run(submission, run_time, None) if submission.run_unlocked else ()
    if claimed is None:
        return ()
    if isinstance(claimed, Refusal):
        _tell_refused(submission, run_time, claimed, dispatch)
        return ()
    dispatch(
        submission.event(
            EVENT_TASK_LOCK_GRANTED,
            run_time,
            holder=locks.replica_id,
            locked_until=claimed.locked_until,
            token=claimed.token,
        )
    )
    failed = True
    try:
        with holding(claimed):
            events = _run(submission, run_time, None)
        failed = any(event.code == EVENT_JOB_ERROR for event in events)
    finally:
        _release(submission, run_time, claimed, locks, dispatch, failed=failed)
    return events


def _claim(
    submission: Submission, run_time: datetime, locks: TaskLocks
) -> HeldLock | Refusal | None:
    """Claim a run time; ``None`` if the scheduler has been shut down meanwhile."""
    if locks.closed:
        logger.debug("Task %r: not claimed, the scheduler is shut down", submission.task_name)
        return None
    nominal = nominal_time(submission.trigger, run_time)
    min_lock, max_lock = submission.lock_times(nominal)
    claimed = locks.claim(
        submission.task_name,
        nominal,
        min_lock=min_lock,
        max_lock=max_lock,
        keep_unanswered=submission.run_unlocked,
    )
    if isinstance(claimed, HeldLock):
        claimed.run_time = run_time
    return claimed


def _release(
    submission: Submission,
    run_time: datetime,
    held: HeldLock,
    locks: TaskLocks,
    dispatch: Dispatch,
    *,
    failed: bool,
) -> None:
    assert submission.options is not None
    keep_window = not (failed and submission.options.on_failure == "release")
    details = {"holder": locks.replica_id, "token": held.token}
    try:
        released = locks.release(held, keep_window=keep_window)
    except TaskLockError as error:
        dispatch(submission.event(EVENT_TASK_LOCK_ERROR, run_time, exception=error, **details))
        if not isinstance(error, TaskLockDatabaseError):
            logger.error("Task %r: its lock could not be released: %s", held.name, error)
        return
    if released is None:
        dispatch(submission.event(EVENT_TASK_LOCK_LOST, run_time, **details))
        logger.warning(
            "Task %r: the run scheduled at %s outlived its lock, and another replica has claimed "
            "the task since; raise max_factor or max_lock above what the job takes",
            held.name,
            run_time,
        )
        return
    details["locked_until"] = released.locked_until
    dispatch(submission.event(EVENT_TASK_LOCK_RELEASED, run_time, **details))


def _tell_refused(
    submission: Submission, run_time: datetime, refusal: Refusal, dispatch: Dispatch
) -> None:
    dispatch(submission.event(EVENT_TASK_LOCK_REFUSED, run_time, **vars(refusal)))
    logger.debug(
        "Task %r: refused for the run time %s (%s, held by %s until %s)",
        submission.task_name,
        run_time,
        refusal.reason,
        refusal.holder,
        refusal.locked_until,
    )


def _log_failed_claim(submission: Submission, run_time: datetime, error: TaskLockError) -> None:
    # That the database is away has been said once, as a warning; a wrong set-up stays an error.
    away = isinstance(error, TaskLockDatabaseError)
    logger.log(
        logging.INFO if away else logging.ERROR,
        "Task %r: %s for the run time %s: %s",
        submission.task_name,
        "run without its lock" if submission.run_unlocked else "not run",
        run_time,
        error,
    )
