"""A submission: a job and its due run times, which are to be claimed and run.

The scheduler, a look, or the shared job store makes submissions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol
from uuid import UUID, uuid4

from apscheduler.util import iscoroutinefunction_partial

from apscheduler_tasklock._lock.protocol_messages import JobMove, MissedTimes, TaskRow
from apscheduler_tasklock._runs.run import JobKey, RunKind
from apscheduler_tasklock._runs.trigger_times import (
    ends_after,
    has_next_run,
    is_shared,
    next_after,
    period_after,
    total_jitter,
)
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockSchemaError
from apscheduler_tasklock.options import (
    GRACE_SHARE,
    LONGEST_GRACE,
    LONGEST_SECONDS,
    SHORTEST_GRACE,
    LockOptions,
)
from apscheduler_tasklock.status import MissCause

logger = logger_of(__name__)

# The value of `DueRun.refused` if the claim was not refused but failed.
FAILED = "failed"


def new_claim_ids(run_times: Sequence[datetime]) -> Sequence[UUID]:
    """Return a new id for the claim of each run time."""
    return tuple(uuid4() for _ in run_times)


@dataclass(eq=False)
class Schedule:
    """The schedule of a job. All submissions of the schedule share this object.

    :ivar trigger: the trigger
    :ivar text: the trigger in canonical form
    :ivar since: since when this replica has this schedule, in seconds since 1970 by the replica's
        own clock; ``None`` for a one-off job
    :ivar shortest_gap: the shorter of two successive gaps between run times, in seconds; ``None``:
        not known yet. Of two gaps, because one may be a long gap over a night or a weekend.
    """

    trigger: Any = None
    text: str | None = None
    since: float | None = None
    shortest_gap: float | None = None


class DueReader(Protocol):
    """The part of a job store that reads due jobs. Any thread may call it, and no method waits."""

    def is_wanted(self, due: DueRun) -> bool:
        """Return whether a due run is still to be claimed here."""

    def note_over(self, due: DueRun) -> None:
        """Note that a due run is over on this replica, whether it was run, refused or withdrawn."""


@dataclass(eq=False)
class DueRun:
    """A run time of a stored job that was read as due, and is to be claimed.

    :ivar reader: the reader that has read the job as due
    :ivar executor: alias of the job's executor
    :ivar move: how the claim moves the job's next run time on
    :ivar due_at: the time from which the run's lateness counts, on the monotonic clock
    :ivar came: the earliest time at which a free worker could have begun the run, on the monotonic
        clock
    :ivar again_at: when the job is due again, on the monotonic clock; ``inf``: never
    :ivar passed: counts the run times before this one that the move passes over, and returns them
        in their order; ``None`` if there are none. Called in the application's thread, because it
        asks the job's trigger for each.
    :ivar misfires_from: the first of the run times that are misfires if this one is one
    :ivar refused: the reason for which its claim was refused, or ``FAILED`` if the claim failed;
        ``None``: neither
    :ivar rejected: the error if the database rejects its claim, for example for a missing right
    """

    reader: DueReader
    executor: str
    move: JobMove
    due_at: float
    came: float
    again_at: float
    misfires_from: datetime
    passed: Callable[[], tuple[MissedTimes, ...]] | None = None
    refused: str | None = None
    rejected: TaskLockSchemaError | None = None

    def missed(self, cause: MissCause, reason: Callable[[datetime], str]) -> list[MissedTimes]:
        """Return the run times that nobody runs if this run time is missed, too.

        The run times before it are missed for the same reason, except those in a pause, or during
        a run. Called in the application's thread, as ``passed``.

        :param reason: returns the reason by the first of the run times that are missed for it
        """
        of_same = MissCause.PAUSED if cause is MissCause.PAUSED else MissCause.UNASKED
        passed = self.passed() if self.passed else ()
        same = [each for each in passed if each.cause is of_same]
        first = same[0].first if same else self.move.run_time
        count = sum(each.count for each in same) + 1
        missed = MissedTimes(first, self.move.run_time, count, cause, reason(first))
        return [*(each for each in passed if each not in same), missed]


@dataclass(frozen=True)
class Submission:
    """A job and its due run times.

    A submission for a takeover, a retry, a manual run, a standby or a stored job has one run time.

    :ivar trigger: the trigger that the job had when the submission was made. A later
        ``reschedule()`` gives the job another trigger.
    :ivar options: the job's lock options, or ``None`` if it runs on every replica
    :ivar run_unlocked: whether the job runs without a lock if the database stays unavailable
    :ivar logger_name: name of the executor's logger
    :ivar runs: the function, and for a one-off job its date; see ``ClaimRequest.runs``
    :ivar one_off: whether the job has one run time only
    :ivar schedule: the schedule, which all of its submissions share
    :ivar failed_run: the failed run that is run again, if this is a retry
    :ivar dead_run: the dead run that is taken over, if this is a takeover
    :ivar request_id: the id of the manual run, if this is a manual run. Its run time is the time at
        which the submission was made.
    :ivar previous: the trigger and the last run time of the submission before this one; ``None``:
        the scheduler has submitted no run time of the job here since it was added
    :ivar is_standby: whether the job is run in the place of another replica; see ``standby``
    :ivar claim_ids: the ids of the claims, one for each run time
    :ivar due: the due run, if a shared job store has read the job as due
    :ivar is_stored: whether this is a takeover or a retry for a stored job, so that the task's row
        has the exact run time
    :ivar submitted_at: when the pass of the scheduler began in which it was submitted, on the
        monotonic clock; see ``SchedulerPasses``
    """

    job: Any
    jobstore: str
    trigger: Any
    run_times: Sequence[datetime]
    task_name: str
    options: LockOptions | None
    run_unlocked: bool
    logger_name: str
    runs: str = ""
    one_off: bool = False
    schedule: Schedule = field(default_factory=Schedule)
    failed_run: TaskRow | None = None
    dead_run: TaskRow | None = None
    request_id: UUID | None = None
    previous: tuple[Any, datetime] | None = None
    is_standby: bool = False
    claim_ids: Sequence[UUID] = ()
    due: DueRun | None = None
    is_stored: bool = False
    submitted_at: float = 0.0

    @property
    def failover(self) -> bool:
        """Whether a run's window is run again if the run dies."""
        return self.options is not None and bool(self.options.failover)

    @property
    def may_be_retried(self) -> bool:
        """Whether the job has retries."""
        return self.options is not None and bool(self.options.retries)

    def may_retry_after(self, attempt: int) -> bool:
        """Return whether the job has a retry left, after so many attempts at a run time."""
        return self.options is not None and attempt <= (self.options.retries or 0)

    @property
    def is_manual(self) -> bool:
        """Whether this is a manual run, or the takeover of a manual run."""
        return self.request_id is not None or (self.dead_run is not None and self.dead_run.manual)

    @property
    def is_instance(self) -> bool:
        """Whether the submission counts as an instance of its job, for ``max_instances``.

        Manual runs, retries and standby runs do not count, so that APScheduler skips no scheduled
        run because of them. The claim of a scheduled run that comes meanwhile is refused, and the
        run is deferred. Runs of stored jobs do not count, because the lock lets one run go on at a
        time.
        """
        is_beside = self.is_manual or self.is_standby or self.failed_run is not None
        return not (is_beside or self.due is not None)

    @property
    def key(self) -> JobKey:
        """The job's id, and the alias of its store."""
        return self.job.id, self.jobstore

    @property
    def kind(self) -> RunKind:
        """Why the run is due."""
        if self.dead_run is not None:
            return RunKind.TAKEOVER
        if self.failed_run is not None:
            return RunKind.RETRY
        if self.request_id is not None:
            return RunKind.MANUAL
        if self.due is not None:
            return RunKind.STORED
        return RunKind.STANDBY if self.is_standby else RunKind.SCHEDULE

    @property
    def cause(self) -> UUID | None:
        """The id of the claim or the request because of which a look has made this submission."""
        if self.dead_run is not None:
            return self.dead_run.claim_id
        return self.request_id if self.failed_run is None else self.failed_run.claim_id

    def anew(self, submitted_at: float) -> Submission:
        """Return this submission with new claims."""
        return replace(self, submitted_at=submitted_at, claim_ids=new_claim_ids(self.run_times))

    @cached_property
    def awaited(self) -> bool:
        """Whether the job's function is a coroutine function, for an event loop to await."""
        return bool(iscoroutinefunction_partial(self.job.func))

    @property
    def is_last(self) -> bool:
        """Whether no run time follows the last run time, so that the scheduler drops the job."""
        return self.one_off or not has_next_run(self.trigger, self.run_times[-1])

    def period(self, nominal: datetime) -> float | None:
        """Return the seconds from a nominal run time to the next one; ``None``: not known."""
        try:
            return period_after(self.trigger, nominal)
        except Exception:  # a custom trigger's own code may raise anything
            logger.warning(
                "Task %r: the trigger %s cannot tell its next run time; the lock times come from "
                "the option 'period'",
                self.task_name,
                self.trigger,
                exc_info=True,
            )
            return None

    def period_of_moment(self, moment: datetime) -> float | None:
        """Return the period of a run at a moment that is no run time, such as a manual run.

        The result is the longer of two periods: from the moment to the next run time, and from the
        next run time to the one after it. The first period may be as short as a second, but the
        run's maximum lock is to be as long as the maximum lock of other runs.
        """
        period = self.period(moment)
        if period is None:
            return None
        return max(period, self._period_after(moment, period) or 0.0)

    def lock_times(self, period: float | None) -> tuple[float, float]:
        """Return the minimum and maximum lock of a run time with this period, in seconds."""
        assert self.options is not None
        return self.options.lock_times(period or self.options.period or 0, one_off=self.one_off)

    def least_gap(self, nominal: datetime, period: float | None) -> float:
        """Return for how many seconds the last window of an older schedule blocks a claim.

        The first run time of a new schedule may follow closely after the last run time of the old
        schedule, and is to be run. So the old window does not block the claim for the whole minimum
        lock, but only for the period less the minimum lock, if this is shorter. With a period of
        300 s and a minimum lock of 270 s, it blocks the claim for 30 s. A minimum lock of a period
        or more blocks in full, because it keeps run times apart on purpose.

        :param period: seconds from the nominal run time to the next one; ``None``: not known
        """
        if period is None:
            return self.lock_times(None)[0]
        shortest = self.schedule.shortest_gap
        if shortest is None:
            shortest = self.schedule.shortest_gap = self._shortest_gap(nominal, period)
        period = min(period, shortest)
        min_lock, _ = self.lock_times(period)
        return min(min_lock, period - min_lock) if min_lock < period else min_lock

    def _shortest_gap(self, moment: datetime, period: float) -> float:
        """Return the shorter of the first two gaps between run times after a moment.

        :param moment: a run time, or a moment that is no run time
        :param period: seconds from the moment to the next run time
        """
        first = self._period_after(moment, period) or period
        return min(first, self._period_after(moment, period + first) or first)

    def _period_after(self, moment: datetime, seconds: float) -> float | None:
        """Return the period of the run time that is so many seconds after a moment.

        ``None`` if no run time follows it, or its period is not known.
        """
        try:
            following = datetime.fromtimestamp(moment.timestamp() + seconds, moment.tzinfo)
        except (ValueError, OverflowError):  # beyond the years that Python knows
            return None
        return self.period(following)

    def is_last_run(self, nominal: datetime, period: float | None) -> bool:
        """Return whether no run time follows a nominal one, for example because of an end date."""
        return self.one_off or (period is not None and ends_after(self.trigger, nominal, period))

    def next_from(self, run_time: datetime, now: float) -> tuple[float | None, bool]:
        """Return the seconds from now to the next run time, and whether no run time follows.

        :param run_time: a run time that has passed
        :param now: seconds since 1970
        """
        if self.one_off:
            return None, True
        try:
            following = next_after(self.trigger, run_time, now)
        except Exception:  # noqa: BLE001  # a custom trigger's own code; period() logs the error
            return None, False
        return (None, True) if following is None else (min(following - now, LONGEST_SECONDS), False)

    def grace(self, period: float | None) -> float:
        """Return the seconds after which a due run time counts as overdue.

        The default is at least the job's ``misfire_grace_time``, so that no run time counts as
        overdue before it is a misfire.
        """
        assert self.options is not None
        if self.options.grace is not None:
            return self.options.grace
        share = min(LONGEST_GRACE, (period or 0) * GRACE_SHARE)
        own = self.job.misfire_grace_time or 0.0
        longest = max(SHORTEST_GRACE, share, own) + total_jitter(self.trigger)
        return float(min(longest, LONGEST_SECONDS))

    def run_time_is_shared(self, nominal: datetime) -> bool:
        """Return whether every replica computes exactly this nominal run time."""
        try:
            return is_shared(self.trigger, nominal)
        except Exception:  # noqa: BLE001  # a custom trigger's own code; period() logs the error
            return False
