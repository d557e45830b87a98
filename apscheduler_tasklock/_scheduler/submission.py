"""What APScheduler submitted, and the job as its ``run_job`` is to see it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any
from uuid import UUID, uuid4

from apscheduler.util import iscoroutinefunction_partial

from apscheduler_tasklock._lock.messages import HandOut, RunState
from apscheduler_tasklock._scheduler.lateness import SchedulerPass
from apscheduler_tasklock._scheduler.triggers import (
    ends_after,
    has_next_run,
    is_shared,
    next_after,
    period_after,
    total_jitter,
)
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.options import LONGEST_SECONDS, RESERVED_KEY, LockOptions

logger = logger_of(__name__)

# A job's id, and the alias of its store.
JobKey = tuple[str, str]

# How late a run is until it counts as overdue, where no option says otherwise: this share of the
# period, but so many seconds at least, and at most.
GRACE_SHARE = 0.1
SHORTEST_GRACE = 60.0
LONGEST_GRACE = 600.0

# A grace time that every run time exceeds.
ALWAYS_MISSED = -timedelta(days=36500).total_seconds()


def hand_out_of(job: Any) -> HandOut | None:
    """Return the hand-out of a job of the job store; ``None`` of any other job."""
    hand_out: HandOut | None = getattr(job, "hand_out", None)
    return hand_out


def as_handed_out(job: Any) -> Any:
    """Return the job that the job store has handed out, in place of one that a plugin made of it.

    Such a plugin replaces what the store returns, as apscheduler-di does. Only the job that was
    handed out can be claimed: the other one lacks its lock's options and its run time.
    """
    return getattr(job.trigger, "handed_out", None) or job


def trigger_of(job: Any) -> Any:
    """Return a job's trigger. One that was handed out shows its scheduler another one."""
    return getattr(job, "own_trigger", None) or job.trigger


def new_claim_ids(run_times: Sequence[datetime]) -> Sequence[UUID]:
    """Return the ids of the claims of these run times."""
    return tuple(uuid4() for _ in run_times)


@dataclass(eq=False)
class Gaps:
    """How close two run times of a schedule may be, as far as it is known by now.

    :ivar shortest: the shorter of two that follow each other, in seconds: the long one before a
        weekend, or after the last run time of a day, is none that counts
    """

    shortest: float | None = None


@dataclass(frozen=True)
class Submission:
    """A job and the run times that are due, as APScheduler submitted them.

    :ivar trigger: the job's trigger at that moment; ``reschedule()`` gives the job another
    :ivar options: the job's lock options, or ``None`` if it runs on every replica
    :ivar run_unlocked: whether it runs all the same if the database stays unavailable
    :ivar logger_name: logger of the executor
    :ivar runs: what is run, as of ``ClaimRequest``
    :ivar one_off: whether the job has one run time only
    :ivar schedule: the trigger in canonical form
    :ivar schedule_since: since when this replica has it, in seconds since 1970 by its clock;
        ``None`` of a single date
    :ivar gaps: how close its run times may be; all submissions of the schedule share it
    :ivar exempt_from_misfire: whether the run times are not late, however late they are: they
        had to wait for another replica's run
    :ivar dead_run: the run that died, if its window is to be run again; there is one run time then
    :ivar request_id: of the run that was asked for by hand, if this is one; there is one run time
        then, which is now
    :ivar is_standby: whether it is run in another replica's place, as of its due time
    :ivar claim_ids: the claims' ids, one per run time
    :ivar hand_out: of a job of the job store, whose run time was handed out to this replica; there
        is one run time then
    :ivar is_stored: whether the row of the dead run has its very run time, by the database's clock,
        as the job store writes it
    :ivar scheduler_pass: the pass of the scheduler in which it was submitted; ``None`` if it was
        not the scheduler that did
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
    schedule: str | None = None
    schedule_since: float | None = None
    gaps: Gaps = field(default_factory=Gaps)
    exempt_from_misfire: bool = False
    dead_run: RunState | None = None
    request_id: UUID | None = None
    is_standby: bool = False
    claim_ids: Sequence[UUID] = ()
    hand_out: HandOut | None = None
    is_stored: bool = False
    scheduler_pass: SchedulerPass | None = None

    @property
    def failover(self) -> bool:
        """Whether a dead holder's window is run again."""
        return self.options is not None and bool(self.options.failover)

    @property
    def is_manual(self) -> bool:
        """Whether it was asked for by hand, or runs one again that was and that died."""
        return self.request_id is not None or (self.dead_run is not None and self.dead_run.manual)

    @property
    def key(self) -> JobKey:
        """The job's id, and the alias of its store."""
        return self.job.id, self.jobstore

    def for_dead_run(self, dead: RunState, *, is_stored: bool = False) -> Submission:
        """Return the same for the window of a run that died; it is late by nature."""
        return replace(self, dead_run=dead, exempt_from_misfire=True, is_stored=is_stored)

    def anew(self, scheduler_pass: SchedulerPass) -> Submission:
        """Return the same with claims of its own, to be submitted by itself.

        :param scheduler_pass: one of its own, as ``SchedulerPasses.alone`` makes
        """
        claim_ids = new_claim_ids(self.run_times)
        return replace(self, scheduler_pass=scheduler_pass, claim_ids=claim_ids)

    @cached_property
    def awaited(self) -> bool:
        """Whether the job is a coroutine, for an event loop to await."""
        return bool(iscoroutinefunction_partial(self.job.func))

    @property
    def submitted_at(self) -> float:
        """When the scheduler began to submit it, on the monotonic clock."""
        return self.scheduler_pass.began_at if self.scheduler_pass else 0.0

    @property
    def is_last(self) -> bool:
        """Whether no run time follows, so that the scheduler has dropped the job."""
        return self.one_off or not has_next_run(self.trigger, self.run_times[-1])

    def period(self, nominal: datetime) -> float | None:
        """Return the seconds from a nominal run time to the next one, if the trigger can tell."""
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
        """Return the period of a run at a moment that is not one of the trigger's run times.

        As of one that was asked for by hand. The next run time may be a second away, and its
        maximum lock is to be that of other runs: so it is the period of that one, if it is longer.
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
        """Return the minimum lock that counts against a window of an older schedule, in seconds.

        The first run time of a new schedule may be as close to the last one of the old schedule as
        two of its own may be, by as much as a window is shorter than the period. A minimum lock of
        a period or more keeps run times apart on purpose.

        :param period: seconds from the nominal run time to the next one
        """
        if period is None:
            return self.lock_times(None)[0]
        if self.gaps.shortest is None:
            self.gaps.shortest = self._shortest_gap(nominal, period)
        period = min(period, self.gaps.shortest)
        min_lock, _ = self.lock_times(period)
        return min(min_lock, period - min_lock) if min_lock < period else min_lock

    def _shortest_gap(self, moment: datetime, period: float) -> float:
        """Return the shorter of the first two gaps after a moment, which may be no run time."""
        first = self._period_after(moment, period) or period
        return min(first, self._period_after(moment, period + first) or first)

    def _period_after(self, moment: datetime, seconds: float) -> float | None:
        """Return the period of the run time so many seconds later, if there is one."""
        try:
            following = datetime.fromtimestamp(moment.timestamp() + seconds, moment.tzinfo)
        except (ValueError, OverflowError):  # beyond the years that Python knows
            return None
        return self.period(following)

    def is_last_run(self, nominal: datetime, period: float | None) -> bool:
        """Tell whether no run time follows a nominal one, as after an end date."""
        return self.one_off or (period is not None and ends_after(self.trigger, nominal, period))

    def next_from(self, run_time: datetime, now: float) -> tuple[float | None, bool]:
        """Return the seconds from now to the next run time, and whether there is none.

        :param run_time: one that has passed
        :param now: seconds since 1970
        """
        if self.one_off:
            return None, True
        try:
            following = next_after(self.trigger, run_time, now)
        except Exception:  # noqa: BLE001  # a custom trigger's own code; period() tells of it
            return None, False
        return (None, True) if following is None else (min(following - now, LONGEST_SECONDS), False)

    def grace(self, period: float | None) -> float:
        """Return the seconds after which a run time that is due counts as overdue.

        Without the option, a run time that would still be no misfire is not overdue.
        """
        assert self.options is not None
        if self.options.grace is not None:
            return self.options.grace
        share = min(LONGEST_GRACE, (period or 0) * GRACE_SHARE)
        own = self.job.misfire_grace_time or 0.0
        longest = max(SHORTEST_GRACE, share, own) + total_jitter(self.trigger)
        return float(min(longest, LONGEST_SECONDS))

    def run_time_is_shared(self, nominal: datetime) -> bool:
        """Tell whether every replica computes this very run time."""
        try:
            return is_shared(self.trigger, nominal)
        except Exception:  # noqa: BLE001  # a custom trigger's own code; period() tells of it
            return False


@dataclass(frozen=True)
class Blocked:
    """A run time that was refused because of a run that had not ended.

    :ivar submission: with this run time only
    :ivar token: of the run that stood against it
    :ivar is_new: whether its window is new, so that it is to be run if that run died
    :ivar waits: whether the lease of that run has ended, so that its holder may be dead
    :ivar follows: whether it is run after that run, which was asked for by hand
    """

    submission: Submission
    token: int
    is_new: bool
    waits: bool
    follows: bool = False


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


class GivenJob(JobView):
    """The job as the wrapped executor gets it for one run, which it runs as any job.

    How many instances may run was decided before.

    :param job_id: which knows the run
    :param function: runs the job's own, under its lock
    """

    max_instances = sys.maxsize

    def __init__(
        self,
        submission: Submission,
        job_id: str,
        function: Callable[..., Any],
        misfire_grace_time: float | None,
    ) -> None:
        super().__init__(submission.job, misfire_grace_time)
        self.id = job_id
        self.func = function
        self._jobstore_alias = submission.jobstore

    def __getattr__(self, name: str) -> Any:
        """Return what else is asked for of the job."""
        if name.startswith("__") or "_job" not in vars(self):  # as copy asks
            raise AttributeError(name)
        return getattr(self._job, name)


class RunTimes(list[datetime]):
    """The run time of a given job, which its worker goes through when it begins.

    :param begin: called then; tells whether the run is to go on. Else it is as if there were no
        run time, and nobody is told of one.
    """

    def __init__(self, run_time: datetime, begin: Callable[[], bool]) -> None:
        super().__init__([run_time])
        self._begin = begin

    def __iter__(self) -> Iterator[datetime]:
        """Begin the run, if it is not withdrawn by now."""
        return super().__iter__() if self._begin() else iter(())
