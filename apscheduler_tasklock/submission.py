"""What APScheduler submitted, and the job as its ``run_job`` is to see it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from apscheduler.util import iscoroutinefunction_partial

from apscheduler_tasklock.messages import RunState
from apscheduler_tasklock.options import RESERVED_KEY, LockOptions
from apscheduler_tasklock.period import period_after

logger = logging.getLogger(__name__)

# A grace time that every run time exceeds.
ALWAYS_MISSED = -timedelta(days=36500).total_seconds()


@dataclass(frozen=True)
class Submission:
    """A job and the run times that are due, as APScheduler submitted them.

    :ivar trigger: the job's trigger at that moment; ``reschedule()`` gives the job another
    :ivar options: the job's lock options, or ``None`` if it runs on every replica
    :ivar run_unlocked: whether it runs all the same if the database stays away
    :ivar logger_name: logger of the executor
    :ivar last: whether no run time follows, so that the scheduler has dropped the job
    :ivar taken_over: the run that died, if the run times are submitted again on its account
    """

    job: Any
    jobstore: str
    trigger: Any
    run_times: Sequence[datetime]
    task_name: str
    options: LockOptions | None
    run_unlocked: bool
    logger_name: str
    last: bool = False
    taken_over: RunState | None = None

    @property
    def failover(self) -> float | None:
        """Seconds after which a holder without a renewal counts as dead, if the job wants that."""
        return (self.options.failover or None) if self.options is not None else None

    @property
    def awaited(self) -> bool:
        """Whether the job is a coroutine, for an event loop to await."""
        return bool(iscoroutinefunction_partial(self.job.func))

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


@dataclass(frozen=True)
class Watch:
    """A run of another replica that stood against a submission, to be watched until it ends.

    :ivar submission: with the run time that was refused
    :ivar window_start: start of that run's window, in database time
    :ivar seconds_left: until its lock ends, if it is not renewed
    """

    submission: Submission
    window_start: datetime
    seconds_left: float


class JobView:
    """The job as APScheduler's ``run_job`` gets it from here.

    It has another grace time, since whether the job is late was decided before the claim, and its
    kwargs lack the reserved key.
    """

    def __init__(self, job: Any, misfire_grace_time: float | None) -> None:
        self._job = job
        self.id = job.id
        self.func = job.func
        self.args = job.args
        self.kwargs = {key: value for key, value in job.kwargs.items() if key != RESERVED_KEY}
        self.misfire_grace_time = misfire_grace_time

    def __str__(self) -> str:
        return str(self._job)


def misfired(job: Any, run_time: datetime) -> bool:
    """Tell whether APScheduler would call this run time of the job missed."""
    if job.misfire_grace_time is None:
        return False
    late = datetime.now(timezone.utc) - run_time
    return late > timedelta(seconds=job.misfire_grace_time)
