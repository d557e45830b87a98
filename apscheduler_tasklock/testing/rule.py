"""The rule in Python: which claim is granted, and how it changes the task's row.

A function that decides on a request takes the task's row, the request and the time. It returns a
``Ruling``: the changed row, the answer, and the runs that are over now. There are no threads, no
clock and no SQL here. The statements in ``_lock/statements`` follow the same rule. Tests in
``tests/contract`` make random requests to both, and compare the rows column by column.

This module leaves out transactions, locked rows, the write-ahead log, and the claims of stored
jobs. Of the operations for operators it has ``pause``, ``resume`` and ``request_run``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any, Generic, TypeVar
from uuid import UUID

from apscheduler_tasklock._lock.database_clock import later
from apscheduler_tasklock._lock.outcomes import END_TEXTS, RunOutcome, WindowAfter, texts_of
from apscheduler_tasklock._lock.protocol_messages import (
    ClaimAnswer,
    ClaimRequest,
    ClaimTimes,
    ClosedDeadRun,
    EndLease,
    Extend,
    GiveUp,
    Lead,
    LockEnds,
    Registered,
    Registration,
    ReleaseAnswer,
    ReleaseRequest,
    Renewal,
    RerunRequest,
    Resign,
    TaskRow,
    is_wanted,
)
from apscheduler_tasklock.options import LONGEST_LEADER_LEASE
from apscheduler_tasklock.status import Run

Answer_co = TypeVar("Answer_co", covariant=True)

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# The value of the times in the row of a task that has never run.
NEVER = EPOCH

# Limits the distance between an exact run time and the run time that results from the claim's lag.
TOLERANCE = timedelta(minutes=5)
# A release that opens the window again sets the window's end before its start, by half the length
# of the window. These times limit this distance from above and from below.
LONGEST_BEFORE = timedelta(seconds=1)
SHORTEST_BEFORE = timedelta(microseconds=1)
# The shortest time that replicas have to find a dead run or a due task: two poll intervals, because
# replicas look for them only once in each poll interval.
SHORTEST_WAIT = timedelta(seconds=10)
# If a one-off job's run was handed over before it began, it can still begin for this time, or for
# its maximum lock if that is longer.
KEPT_TO_BEGIN = timedelta(hours=1)
# A retry that has not begun so long after its time never begins.
LATEST_RETRY = timedelta(days=1)


@dataclass(frozen=True)
class Row:
    """The row of a task. Its attributes are the columns of the task lock table."""

    task_name: str
    started_at: datetime
    locked_until: datetime
    window_start: datetime
    window_until: datetime
    locked_by: str
    claim_id: UUID
    token: int
    finished_at: datetime | None
    run_until: datetime
    failover: bool = False
    deaths: int = 0
    handovers: int = 0
    handed_over: bool = False
    runs: str = ""
    one_off: bool = False
    kind: str | None = None
    schedule: str | None = None
    due_at: datetime | None = None
    overdue_at: datetime | None = None
    overrun_at: datetime | None = None
    recorded: int = 0
    recorded_failures: int = 0
    recorded_actions: int = 0
    recorded_misses: int = 0
    missed_at: datetime | None = None
    succeeded_at: datetime | None = None
    failed_at: datetime | None = None
    failures: int = 0
    error_type: str | None = None
    paused_at: datetime | None = None
    paused_until: datetime | None = None
    pauses: Any = None
    request_id: UUID | None = None
    requested_by: str | None = None
    requested_at: datetime | None = None
    request_until: datetime | None = None
    acknowledged_at: datetime | None = None
    last_outcome: str | None = None
    overran: bool = False
    is_last: bool = False
    window_schedule: str | None = None
    schedule_since: datetime | None = None
    details: str | None = None
    attempt: int = 1
    retry_at: datetime | None = None
    retry_of: UUID | None = None

    @property
    def schedule_of_window(self) -> str | None:
        """The schedule of the last claim. Replicas may have registered another schedule since."""
        return self.window_schedule or self.schedule

    @property
    def finished(self) -> bool:
        """Whether the last run is finished: released or given up."""
        return self.finished_at is not None

    def is_running(self, now: datetime) -> bool:
        """Return whether the task is running. An unfinished run is running until its lease ends."""
        return not self.finished and self.locked_until > now

    def is_dead(self, now: datetime) -> bool:
        """Return whether the last run is unfinished although its lease has ended."""
        return not self.finished and self.locked_until <= now

    def stands(self, now: datetime) -> bool:
        """Return whether the last claim stands, although its lease may have ended.

        The claim stands until it is released or handed over, or its maximum lock ends.
        """
        return not (self.finished or self.handed_over) and self.run_until > now

    def is_granted(self, claim_id: UUID, now: datetime) -> bool:
        """Return whether this claim is the row's last claim and stands."""
        return self.claim_id == claim_id and self.stands(now)

    def is_paused(self, now: datetime) -> bool:
        """Return whether the task is paused. A pause without an end lasts until a resume."""
        if self.paused_until is None:
            return self.paused_at is not None
        return self.paused_until > now

    def is_requested(self, now: datetime) -> bool:
        """Return whether a manual run was asked for, has not begun, and may still begin."""
        return self.request_until is not None and self.request_until > now

    @property
    def due_in_pause(self) -> bool:
        """Whether the due time fell into a pause. Such a run time is never run."""
        return self.due_at is not None and self.falls_into_pause(self.due_at)

    def falls_into_pause(self, moment: datetime) -> bool:
        """Return whether the task was paused at that moment, by what is known of its last pause."""
        if self.paused_at is None or moment < self.paused_at:
            return False
        return self.paused_until is None or moment < self.paused_until

    def is_due(self, now: datetime) -> bool:
        """Return whether the due time has passed and the task is not paused."""
        return self.due_at is not None and self.due_at < now and not self.is_paused(now)

    def is_overdue(self, now: datetime) -> bool:
        """Return whether the grace time has passed, and no run has begun since the due time."""
        return (
            self.finished
            and self.is_due(now)
            and self.due_at is not None
            and self.window_start < self.due_at
            and self.overdue_at is not None
            and self.overdue_at < now
            and not self.due_in_pause
        )

    def is_retry_pending(self, now: datetime) -> bool:
        """Return whether the last run has failed, and is to be run again."""
        if not self.finished or self.retry_of != self.claim_id or self.retry_at is None:
            return False
        is_before_next = self.due_at is None or now < self.due_at
        return is_before_next and now < self.retry_at + LATEST_RETRY

    def is_retry_due(self, now: datetime) -> bool:
        """Return whether the retry of the last run can begin now."""
        is_time = self.retry_at is not None and self.retry_at <= now
        return is_time and self.is_retry_pending(now) and not self.is_paused(now)

    @property
    def is_first_failure(self) -> bool:
        """Whether a failure of the last run is the first one of its run time."""
        is_counted = (
            self.kind == "takeover"
            and self.deaths > 0
            and self.failed_at is not None
            and self.failed_at >= self.window_start
        )
        return self.attempt == 1 and not is_counted

    @property
    def times(self) -> tuple[datetime, ...]:
        """The ends of the last run, of its window, and of its maximum lock."""
        return (self.finished_at or NEVER, self.window_until, self.run_until)


@dataclass(frozen=True)
class Ruling(Generic[Answer_co]):
    """The outcome of a request.

    :ivar row: the task's changed row; the same object if nothing is written; ``None`` if the task
        has no row
    :ivar answer: the answer to the replica
    :ivar ended: runs that are over now, for the run history
    """

    row: Row | None
    answer: Answer_co
    ended: tuple[Run, ...] = ()


@dataclass(frozen=True)
class DatedClaim:
    """A claim, with everything on which its decision depends besides the task's row.

    :ivar request: the request
    :ivar reckoned: the run time by the clock of the rows: the current time minus the claim's lag
    :ivar now: the current time
    :ivar stable: whether the rows can be believed
    :ivar wanted: whether somebody still waits for the claim
    """

    request: ClaimRequest
    reckoned: datetime
    now: datetime
    stable: bool
    wanted: bool

    @classmethod
    def of(cls, request: ClaimRequest, times: ClaimTimes, now: datetime) -> DatedClaim:
        """Return a claim as it is decided now.

        :param times: the times that the replica has read right before it sent the claim
        """
        latest = now if times.latest is None else min(now, times.latest)
        wanted = is_wanted(times.not_after, now)
        return cls(request, later(latest, -times.lag), now, times.stable, wanted)

    @property
    def fired(self) -> datetime:
        """The run time by the clock of the rows.

        An exact run time replaces the reckoned run time, but differs from it by the tolerance at
        most.
        """
        if self.request.exact_time is None:
            return self.reckoned
        run_time = self.request.exact_time.astimezone(timezone.utc)
        return max(self.reckoned - TOLERANCE, min(self.reckoned + TOLERANCE, run_time))

    @property
    def schedule_since(self) -> datetime | None:
        """When the replica got its schedule, by the clock of the rows."""
        if self.request.schedule_for is None:
            return None
        return later(self.reckoned, -self.request.schedule_for)

    def is_new_after(self, row: Row) -> bool:
        """Return whether the claim's window is a new one, after the window of the last claim."""
        end = row.window_until
        # If this claim's minimum lock is shorter than the last claim's, the shorter one decides, so
        # that changed options take effect at once. If one of the two claims is a hold, the last
        # claim's minimum lock decides.
        if row.runs and self.request.runs:
            end = min(end, later(row.window_start, self._min_lock_after(row)))
        if self.fired < end:
            return False
        was_opened = row.window_until < row.window_start
        # An exact run time must be after the last claim's run time, so that each run time is run
        # once, even with a minimum lock of 0. A window that was opened again is an exception.
        return not self.request.exact or self.fired > row.window_start or was_opened

    def schedule_since_after(self, row: Row) -> datetime | None:
        """Return when the claim's schedule began.

        If the last claim has the same schedule, the later time of the two claims is returned.
        """
        since, of_window = self.schedule_since, row.schedule_of_window
        if since is None or row.schedule_since is None or of_window is None:
            return since
        return max(since, row.schedule_since) if of_window == self.request.schedule else since

    def has_newer_schedule(self, row: Row) -> bool:
        """Return whether this claim has another schedule than the last claim, and a newer one."""
        of_window, since = row.schedule_of_window, self.schedule_since
        if of_window is None or since is None or row.schedule_since is None:
            return False
        is_another = self.request.schedule not in (None, of_window)
        return is_another and since > row.schedule_since

    def _min_lock_after(self, row: Row) -> float:
        """Return the minimum lock to compare with the window of the last claim."""
        least_gap = self.request.least_gap
        if self.request.exact and least_gap is not None and self.has_newer_schedule(row):
            return least_gap
        return self.request.min_lock

    def waits_for(self, row: Row) -> bool:
        """Return whether an unfinished run blocks the claim, also after the end of its lease.

        The run blocks the claim until the end of its maximum lock in two cases: if the run is to be
        taken over, or if it may be alive because the rows are not believed.
        """
        if row.finished or row.run_until <= self.now:
            return False
        if not (row.handed_over or self.stable):
            return True
        is_same = row.runs != "" and row.runs == self.request.runs
        return is_same and (row.handed_over or (row.failover and self.request.failover))

    def is_paused(self, row: Row) -> bool:
        """Return whether the task is paused, or was paused when the run time was due."""
        return row.is_paused(self.now) or row.falls_into_pause(self.fired)

    def is_granted(self, row: Row) -> bool:
        """Return whether the claim is granted now."""
        return (
            not row.is_running(self.now)
            and row.claim_id != self.request.claim_id
            and self.is_new_after(row)
            and not self.waits_for(row)
            and not self.is_paused(row)
            and self.wanted
        )

    def found(self, row: Row) -> ClaimAnswer:
        """Return the answer to a claim that does not change the row."""
        granted, running = row.is_granted(self.request.claim_id, self.now), row.is_running(self.now)
        return _answer(row, self.now)._replace(
            granted=granted,
            running=running,
            new_window=self.is_new_after(row) and not granted,
            waits=not running and self.waits_for(row),
            paused=self.is_paused(row),
            came_first=row.started_at <= self.fired,
        )


def claim(
    row: Row | None, request: ClaimRequest, times: ClaimTimes, replica_id: str, now: datetime
) -> Ruling[ClaimAnswer]:
    """Decide on a claim of one run time."""
    asked = DatedClaim.of(request, times, now)
    ended: tuple[Run, ...] = ()
    if row is None:
        if not asked.wanted:
            return Ruling(None, _missing(now))
        row = _first_row(request.task_name, request.claim_id, now, now)
        ran, was_due_at = request.runs, None
    elif not asked.is_granted(row):
        return Ruling(row, asked.found(row))
    else:
        ran, was_due_at = row.runs, row.due_at
        row, ended = _followed(row, now)
    fired, run_until = asked.fired, later(now, request.max_lock)
    due_at = None if request.is_last else _due(fired, request.next_in)
    graced = fired if due_at is None and request.one_off else due_at
    row = replace(
        row,
        started_at=now,
        run_until=run_until,
        locked_until=_leased(now, request.lease, run_until),
        window_start=fired,
        window_until=later(fired, request.min_lock),
        locked_by=replica_id,
        claim_id=request.claim_id,
        handovers=0,
        handed_over=False,
        failover=request.failover,
        runs=request.runs,
        one_off=request.one_off,
        finished_at=None,
        attempt=1,
        kind="schedule" if request.runs else "hold",
        schedule=request.schedule,
        window_schedule=None,
        schedule_since=asked.schedule_since_after(row),
        due_at=due_at,
        overdue_at=None if graced is None else later(graced, request.grace),
        is_last=request.is_last,
        overrun_at=_leased(now, request.max_runtime, run_until),
    )
    return Ruling(row, _granted(row, now, ended)._replace(runs=ran, due_at=was_due_at), ended)


def rerun(
    row: Row | None, request: RerunRequest, times: ClaimTimes, replica_id: str, now: datetime
) -> Ruling[ClaimAnswer | None]:
    """Decide on a takeover, a retry or a manual run.

    The row keeps its window and its next due time.
    """
    if row is None:
        return Ruling(None, None)
    kind, is_takeover = request.kind, request.kind == "takeover"
    # After an outage the holder may be alive although its lease has ended, because its renewals
    # failed in the outage, too.
    is_doubted = is_takeover and not (row.finished or row.handed_over or times.stable)
    if is_takeover:
        may_run = (
            row.claim_id == request.cause
            and row.is_dead(now)
            and row.run_until > now
            and not (row.is_paused(now) or is_doubted)
        )
    elif kind == "retry":
        may_run = row.claim_id == request.cause and row.is_retry_due(now)
    else:
        is_asked_for = row.request_id == request.cause and row.is_requested(now)
        may_run = is_asked_for and (row.finished or _gives_way(row, now, stable=times.stable))
    if not (may_run and is_wanted(times.not_after, now)):
        found = _answer(row, now)._replace(
            granted=row.is_granted(request.claim_id, now),
            new_window=may_run,
            waits=is_doubted,
            paused=kind != "manual" and row.is_paused(now),
        )
        return Ruling(row, found)
    before, (row, ended) = row, _followed(row, now)
    run_until = before.run_until if is_takeover else later(now, request.max_lock)
    row = replace(
        row,
        started_at=now,
        run_until=run_until,
        locked_until=_leased(now, request.lease, run_until),
        overrun_at=_leased(now, request.max_runtime, run_until),
        locked_by=replica_id,
        claim_id=request.claim_id,
        kind=kind,
        handovers=0,
        handed_over=False,
        failover=request.failover,
        finished_at=None,
    )
    if is_takeover:
        row = _taken_over(row, before, now)
    elif kind == "retry":
        row = replace(row, attempt=row.attempt + 1)
    else:
        row = replace(
            row,
            runs=request.runs,
            attempt=1,
            request_id=None,
            requested_by=None,
            requested_at=None,
            request_until=None,
        )
    return Ruling(row, _granted(row, now, ended)._replace(runs=before.runs), ended)


def _taken_over(row: Row, dead: Row, now: datetime) -> Row:
    """Return the row after a takeover with what it keeps of the dead run."""
    overrun_at = None
    if dead.overrun_at is not None:
        overrun_at = min(now + (dead.overrun_at - dead.started_at), dead.run_until)
    return replace(
        row,
        # A takeover of a manual run counts as a manual run, because a manual run has no window of
        # the schedule.
        kind="manual" if dead.kind == "manual" else "takeover",
        overrun_at=overrun_at,
        # A hand-over of a run that never began is not counted.
        handovers=dead.handovers + (dead.handed_over and dead.last_outcome is not None),
    )


def _gives_way(row: Row, now: datetime, *, stable: bool) -> bool:
    """Return whether a manual run may replace an unfinished run.

    A takeover of a dead run goes first, so the manual run waits for the takeover, except in two
    cases. First, nobody will take the dead run over: its maximum lock has ended, it has no failover
    and was not handed over, or the task is paused. Second, replicas have had the time to find the
    dead run since its lease ended and the manual run was asked for.
    """
    if row.is_running(now) or not stable:
        return False
    if row.run_until <= now or not (row.failover or row.handed_over) or row.is_paused(now):
        return True
    stood_since = max(row.requested_at or NEVER, row.locked_until)
    return stood_since + SHORTEST_WAIT <= now


def release(
    row: Row | None, request: ReleaseRequest, now: datetime
) -> Ruling[ReleaseAnswer | None]:
    """Release a claim, or hand its window over.

    The answer is ``None`` if the claim no longer stands, unless its run is retried since: then an
    earlier try has released it.
    """
    hands_over = request.end.window is WindowAfter.HAND_OVER
    if row is not None and row.claim_id != request.claim_id == row.retry_of and not hands_over:
        until = max(now, row.window_until)
        return Ruling(row, ReleaseAnswer(until, now, row.retry_at))
    if row is None or row.claim_id != request.claim_id or (hands_over and row.finished):
        return Ruling(row, None)
    end, ended_at = (_hand_over if hands_over else _finish), _end_of(row.started_at, request, now)
    row, ended = end(row, request.end, now, ended_at)
    retry_at = row.retry_at if row.retry_of == row.claim_id else None
    is_late = row.finished_at not in (None, ended_at)
    return Ruling(row, ReleaseAnswer(row.locked_until, now, retry_at, is_late), ended)


def _end_of(started_at: datetime, request: ReleaseRequest, now: datetime) -> datetime:
    """Return when a run ended, whose release may arrive much later."""
    return max(started_at, min(now, request.ended_at or now))


def _hand_over(
    row: Row, end: RunOutcome, now: datetime, ended_at: datetime
) -> tuple[Row, tuple[Run, ...]]:
    """End the lease of a run and mark the run, so that another replica runs its window."""
    ended: tuple[Run, ...] = ()
    if not row.handed_over:
        row, ended = _recorded(row, end, ended_at)
        if end.outcome == "overran":
            failures = row.failures + row.is_first_failure
            row = replace(row, failures=failures, failed_at=now, error_type=None)
        # The maximum lock of a run that never began counts anew.
        if not end.outcome:
            max_lock = row.run_until - row.started_at
            run_until = now + (max(max_lock, KEPT_TO_BEGIN) if row.one_off else max_lock)
            row = replace(row, run_until=run_until)
    row = replace(
        row,
        locked_until=min(row.locked_until, now),
        last_outcome=end.last_outcome,
        handed_over=True,
    )
    return row, ended


def _finish(
    row: Row, end: RunOutcome, now: datetime, ended_at: datetime
) -> tuple[Row, tuple[Run, ...]]:
    """Finish a run. The outcome of a finished run stays, unless the run was given up as dead."""
    ended: tuple[Run, ...] = ()
    due = _due_after_run(row, end, now, ended_at)
    retry_at = _retry_at(row, due, end, now)
    # An earlier release of this claim may have noted the retry.
    is_retried = retry_at is not None or (row.finished and row.retry_of == row.claim_id)
    if not row.finished:
        noted = row.retry_at if row.retry_of == row.claim_id else None
        row, ended = _recorded(row, end, ended_at, retry_at or noted)
        if end.outcome == "ok":
            row = replace(row, succeeded_at=ended_at, failures=0)
        elif end.outcome in ("error", "overran"):
            failures = row.failures + row.is_first_failure
            row = replace(row, failed_at=ended_at, failures=failures)
        if end.outcome in ("ok", "error", "overran"):
            row = replace(row, error_type=end.error_type)
        row = replace(row, last_outcome=end.last_outcome)
        if end.window is WindowAfter.OPEN and retry_at is None:
            half = (row.window_until - row.window_start) / 2
            before = max(SHORTEST_BEFORE, min(LONGEST_BEFORE, half))
            row = replace(row, window_until=row.window_start - before)
    elif row.last_outcome == "died":
        row = replace(row, last_outcome=end.last_outcome)
    row = replace(
        row,
        due_at=due.due_at,
        overdue_at=due.overdue_at,
        is_last=due.is_last,
        finished_at=row.finished_at or ended_at,
        locked_until=max(now, row.window_until),
        deaths=row.deaths if is_retried else 0,
        retry_at=retry_at or row.retry_at,
        retry_of=row.retry_of if retry_at is None else row.claim_id,
        handovers=0,
        handed_over=False,
    )
    return row, ended


def _retry_at(row: Row, due: Row, end: RunOutcome, now: datetime) -> datetime | None:
    """Return when the failed run is run again; ``None`` if that is not before the next run time.

    :param due: the row with its next due time after the run
    """
    if row.finished or end.retry_in is None:
        return None
    retry_at = later(now, end.retry_in)
    return retry_at if due.due_at is None or retry_at < due.due_at else None


def _due_after_run(row: Row, end: RunOutcome, now: datetime, ended_at: datetime) -> Row:
    """Return the row with its next due time, which can change only if it has passed."""
    due_at, overdue_at = row.due_at, row.overdue_at
    if due_at is None or overdue_at is None or due_at > now:
        return row
    grace, is_manual = overdue_at - due_at, row.kind == "manual"
    # A run time that came while a manual run or a retry went on is due at the end of that run. But
    # a run time that was overdue before that run, or fell into a pause, keeps its due time.
    is_beside = (is_manual or row.attempt > 1) and not row.finished
    follows = is_beside and overdue_at > row.started_at
    if follows and not row.due_in_pause:
        return replace(row, due_at=now, overdue_at=now + max(grace, SHORTEST_WAIT))
    # A manual run moves the due time only if it makes up for the overdue run time: the task was
    # overdue when the manual run began, and the manual run succeeded.
    makes_up = overdue_at <= row.started_at and end.outcome == "ok"
    if not makes_up and is_manual:
        return row
    if end.is_last:
        return replace(row, due_at=None, overdue_at=None, is_last=True)
    if end.next_in is None:
        return row
    due_at = later(ended_at, end.next_in)
    return replace(row, due_at=due_at, overdue_at=later(due_at, grace.total_seconds()))


def end_lease(row: Row | None, asked: EndLease, now: datetime) -> Ruling[ReleaseAnswer | None]:
    """End the lease of a run if its holder is among those that are known to be dead."""
    is_dead = row is not None and row.locked_by in asked.holders
    if row is None or row.claim_id != asked.claim_id or row.finished or not is_dead:
        return Ruling(row, None)
    row = replace(row, locked_until=min(row.locked_until, now))
    return Ruling(row, ReleaseAnswer(row.locked_until, now))


def give_up(row: Row | None, asked: GiveUp, now: datetime) -> Ruling[ClosedDeadRun | None]:
    """Give up the window of a dead run: finish the run, so that the window is not run again."""
    if row is None or row.claim_id != asked.claim_id or not row.is_dead(now):
        return Ruling(row, None)
    died, ended = _died(row)
    closed = _closed(ended[0])
    if row.handed_over:
        closed, ended = replace(closed, outcome=None), ()
        row = replace(row, deaths=row.deaths + (not row.overran))
    else:
        row = died
    row = replace(row, finished_at=now, locked_until=max(now, row.window_until), handed_over=False)
    return Ruling(row, closed, ended)


def extend(row: Row | None, asked: Extend, now: datetime) -> Ruling[LockEnds | None]:
    """Extend a claim's maximum lock; the answer is ``None`` if the claim no longer stands."""
    if row is None or not row.is_granted(asked.claim_id, now):
        return Ruling(row, None)
    run_until = later(row.run_until, asked.by)
    locked_until = max(row.locked_until, _leased(now, asked.lease, run_until))
    row = replace(row, run_until=run_until, locked_until=locked_until, overran=False)
    return Ruling(row, LockEnds(locked_until, run_until, now))


def renew(row: Row | None, renewal: Renewal, now: datetime) -> Ruling[LockEnds | None]:
    """Renew a claim; the answer is ``None`` if the claim no longer stands."""
    if row is None or not row.is_granted(renewal.claim_id, now):
        return Ruling(row, None)
    locked_until = max(row.locked_until, _leased(now, renewal.lease, row.run_until))
    row = replace(row, locked_until=locked_until, overran=renewal.is_last)
    return Ruling(row, LockEnds(locked_until, row.run_until, now))


def register(
    row: Row | None, task: Registration, claim_id: UUID, now: datetime
) -> Ruling[Registered]:
    """Register a task of a replica: its schedule and its due time.

    :param claim_id: the claim id of a new row
    """
    if row is None:
        due_at = _due(now, task.next_in)
        row = replace(
            _first_row(task.task_name, claim_id, NEVER, now),
            finished_at=NEVER,
            runs=task.runs,
            schedule=task.schedule,
            due_at=due_at,
            overdue_at=None if due_at is None else later(due_at, task.grace),
        )
    elif (
        row.schedule != task.schedule
        or task.moved
        or (row.due_at is None and not row.is_last and task.next_in is not None)
        or row.due_in_pause
    ):
        if task.token not in (None, row.token) and row.started_at != NEVER:
            # The claim has written the due time that follows the one in the registration.
            return Ruling(row, Registered(task.task_name, again=True))
        new = replace(_rescheduled(row, task, now), details=task.details or row.details)
        if row.schedule in (None, task.schedule):
            return Ruling(new, Registered(task.task_name))
        was_due_at = None if row.due_in_pause else row.due_at
        answer = Registered(
            task.task_name,
            was_schedule=row.schedule,
            was_due_at=was_due_at,
            due_at=new.due_at,
        )
        return Ruling(new, answer)
    row = replace(row, details=task.details or row.details)
    return Ruling(row, Registered(task.task_name))


def _rescheduled(row: Row, task: Registration, now: datetime) -> Row:
    """Return the row with another schedule or due time. The window of the last claim stays."""
    due_at, window_until = _due(now, task.next_in), row.window_until
    of_window = row.schedule_of_window
    if of_window not in (None, task.schedule) and row.runs:
        # A claim under the new schedule is refused only until the schedule's least gap is over.
        window_until = min(window_until, later(row.window_start, task.least_gap))
    if due_at is not None and due_at < window_until:
        # A run time inside the window would be refused, so the following run time is due.
        following = window_until if task.period is None else later(due_at, task.period)
        due_at = max(following, window_until)
    return replace(
        row,
        schedule=task.schedule,
        one_off=False,
        window_schedule=None if of_window == task.schedule else of_window,
        due_at=due_at,
        overdue_at=None if due_at is None else later(due_at, task.grace),
        is_last=False,
        # A retry that was void because the due time has passed stays void.
        retry_of=row.retry_of if row.due_at is not None and row.due_at > now else None,
    )


def retire(row: Row) -> Row:
    """Clear the due time of a task that no replica has any more."""
    if not row.finished or row.one_off:
        return row
    # The retry of a job's last run time stands, because the scheduler has dropped the job.
    retry_of = row.retry_of if row.due_at is None else None
    return replace(row, due_at=None, overdue_at=None, is_last=False, retry_of=retry_of)


def lead(row: Row | None, asked: Lead, now: datetime) -> Ruling[int]:
    """Make a replica the leader, unless another replica leads; the answer is 1 if it leads.

    :param row: the leader's row, which is no task's
    """
    replica_id = asked.leader_id
    if row is None:
        row = Row(asked.task_name, now, now, NEVER, NEVER, replica_id, UUID(int=0), 0, None, now)
    leads = row.is_running(now) and row.locked_until <= later(now, LONGEST_LEADER_LEASE)
    if leads and row.locked_by != replica_id:
        return Ruling(row, 0)
    until = later(now, asked.lease)
    row = replace(
        row,
        started_at=row.started_at if leads else now,
        locked_by=replica_id,
        locked_until=until,
        run_until=until,
        finished_at=None,
    )
    return Ruling(row, 1)


def resign(row: Row | None, asked: Resign, now: datetime) -> Ruling[int]:
    """Give the leadership up, if the replica leads; the answer is 1 if it led."""
    if row is None or row.finished or row.locked_by != asked.leader_id:
        return Ruling(row, 0)
    row = replace(row, finished_at=now, locked_until=min(row.locked_until, now))
    return Ruling(row, 1)


def is_over(row: Row, age: float, now: datetime) -> bool:
    """Return whether the row is of a one-off job, and has been over for long enough.

    :param age: how long it is to be over, in seconds. From the end of its run, it stays at least
        for its maximum lock and its grace.
    """
    grace = timedelta(0) if row.overdue_at is None else row.overdue_at - row.window_start
    least = (row.finished_at or row.run_until) + (row.run_until - row.started_at) + grace
    return row.one_off and max(row.times) < later(now, -age) and least < now


def pause(
    row: Row,
    seconds: float | None,
    now: datetime,
    by: str,
    reason: str | None = None,
    pause_id: str = "",
) -> Row:
    """Pause a task for ``seconds``; with ``None``, until a resume. No pause becomes shorter."""
    pauses = _lasting(row, now)
    if any(each["id"] == pause_id for each in pauses):  # it was sent twice
        return row
    own = [each for each in pauses if (each["by"], each["why"]) == (by, reason)]
    ends = [None if seconds is None else later(now, seconds).timestamp()]
    ends += [each["until"] for each in own]
    new = {
        "id": pause_id,
        "by": by,
        "why": reason,
        "since": min([now.timestamp(), *(each["since"] for each in own)]),
        "until": _latest(ends),
    }
    pauses = [each for each in pauses if each not in own] + [new]
    goes_on = row.is_paused(now)
    until = _latest([each["until"] for each in pauses])
    if goes_on and row.paused_until is None:
        until = None
    return replace(
        row,
        pauses=pauses,
        # Keep the begin of a pause that has ended while the due time is in it, so that this due
        # time stays void.
        paused_at=(row.paused_at if goes_on or row.due_in_pause else None) or now,
        paused_until=_as_time(until),
        recorded_actions=row.recorded_actions + 1,
    )


def resume(row: Row, now: datetime, by: str, *, force: bool = False) -> Row:
    """Take the operator's pauses out. Run times that fell into a pause are not run.

    :param force: whether the pauses of all others are taken out, too
    """
    before = _lasting(row, now)
    pauses = [] if force else [each for each in before if each["by"] != by]
    takes_out = row.is_paused(now) and (len(pauses) < len(before) or not pauses)
    row = replace(row, pauses=pauses or None)
    if not takes_out:
        return row
    until = _as_time(_latest([each["until"] for each in pauses])) if pauses else now
    return replace(row, paused_until=until, recorded_actions=row.recorded_actions + 1)


def _lasting(row: Row, now: datetime) -> list[dict[str, Any]]:
    """Return the pauses that have not ended."""
    ends = ((each, _as_time(each["until"])) for each in row.pauses or ())
    return [each for each, end in ends if end is None or end > now]


def _latest(ends: Sequence[float | None]) -> float | None:
    """Return the latest end in seconds since 1970; ``None`` if a pause has no end."""
    known = [end for end in ends if end is not None]
    return max(known) if len(known) == len(ends) else None


def _as_time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)


def request_run(row: Row, request_id: UUID, by: str, seconds: float, now: datetime) -> Row:
    """Ask for a manual run within ``seconds``, unless a manual run is asked for already."""
    if row.is_requested(now) or not row.runs:
        return row
    return replace(
        row,
        request_id=request_id,
        requested_by=by,
        requested_at=now,
        request_until=later(now, seconds),
        recorded_actions=row.recorded_actions + 1,
    )


def calls_for_something(row: Row, now: datetime) -> bool:
    """Return whether a replica has to act: on a dead run, a due task, a retry or a manual run."""
    is_to_run = (row.finished and row.is_due(now)) or row.is_retry_due(now)
    return row.is_dead(now) or is_to_run or row.is_requested(now)


def state_of(row: Row, now: datetime) -> TaskRow:
    """Return the state of a task, as a replica reads it from the row."""
    # A dead run without failover does not block the next run, so the task can be due.
    died = row.locked_until <= now and not (row.failover or row.handed_over)
    return TaskRow(
        task_name=row.task_name,
        claim_id=row.claim_id,
        token=row.token,
        finished=row.finished,
        dead=row.is_dead(now),
        expired=row.run_until <= now,
        failover=row.failover,
        deaths=row.deaths,
        handovers=row.handovers,
        handed_over=row.handed_over,
        runs=row.runs,
        window_start=row.window_start,
        holder=row.locked_by,
        database_time=now,
        manual=row.kind == "manual",
        request_id=row.request_id if row.is_requested(now) else None,
        schedule=row.schedule,
        due_at=row.due_at if (row.finished or died) and row.is_due(now) else None,
        overdue=row.is_overdue(now),
        paused=row.is_paused(now),
        due_in_pause=row.due_in_pause,
        window_until=row.window_until,
        window_schedule=row.schedule_of_window,
        locked_until=row.locked_until,
        finished_at=row.finished_at,
        attempt=row.attempt,
        retry_pending=row.is_retry_pending(now),
        retry_at=row.retry_at if row.is_retry_due(now) else None,
    )


def correction(
    row: Row | None, runs: Sequence[Run], request: ReleaseRequest, now: datetime
) -> Callable[[Run], Run]:
    """Return what corrects an entry of a task's history after a release that came too late.

    The history has the run as dead or freed, but its replica lived, and tells how the run ended.

    :param runs: the task's history
    """
    token, end, ended_at = request.token or 0, request.end, request.ended_at or now
    if request.ended_ago is not None:
        ended_at = later(now, -request.ended_ago())
    began = [run.started_at for run in runs if run.token is not None and run.token > token]
    if row is not None and row.token > token:
        began.append(row.started_at)

    def correct(run: Run) -> Run:
        if run.token != request.token or run.outcome not in ("died", "freed"):
            return run
        over_at = run.ended_at if run.outcome == "freed" else min(began, default=None)
        run = replace(run, ended_at=max(run.started_at, min(now, ended_at)))
        if not end.outcome:
            return replace(run, outcome="cancelled")  # because the run never began
        if over_at is not None and ended_at >= over_at:
            return replace(run, outcome="overtaken")
        return replace(run, outcome=end.outcome, **dict(zip(END_TEXTS, texts_of(end), strict=True)))

    return correct


def _followed(row: Row, now: datetime) -> tuple[Row, tuple[Run, ...]]:
    """Return the row for the next claim, with the next token.

    The last run has died if it is unfinished and was not handed over.
    """
    ended: tuple[Run, ...] = ()
    if row.finished or row.handed_over:
        row = replace(row, last_outcome=None)
    else:
        row, ended = _died(row)
    # The token grows with the clock, so that it is larger than all earlier ones also if the row is
    # an older one again, as after the restore of a backup.
    return replace(row, token=max(row.token + 1, _milliseconds(now)), overran=False), ended


def _died(row: Row) -> tuple[Row, tuple[Run, ...]]:
    """Note that the holder of the last run died, or that the run overran its maximum lock."""
    outcome = "overran" if row.overran else "died"
    row, ended = _recorded(row, RunOutcome(outcome=outcome), row.locked_until)
    row = replace(
        row,
        last_outcome=outcome,
        deaths=row.deaths + (not row.overran),
        failures=row.failures + row.is_first_failure,
        failed_at=row.locked_until,
        error_type=None,
    )
    return row, ended


def _closed(run: Run) -> ClosedDeadRun:
    """Return a dead run as the replica hears of it that has closed it."""
    assert run.token is not None
    assert run.attempt is not None
    begins = (run.scheduled_at or run.started_at).timestamp()
    return ClosedDeadRun(run.outcome, run.token, run.replica, run.attempt, begins, run.took)


def _recorded(
    row: Row, end: RunOutcome, ended_at: datetime, retry_at: datetime | None = None
) -> tuple[Row, tuple[Run, ...]]:
    """Count the last run, and return its history entry. A run that never began has no entry."""
    if not end.outcome:
        return row, ()
    kind = row.kind or "schedule"
    run = Run(
        task=row.task_name,
        token=row.token,
        scheduled_at=None if kind in ("hold", "manual") else row.window_start,
        started_at=row.started_at,
        ended_at=ended_at,
        replica=row.locked_by,
        kind=kind,
        outcome=end.outcome,
        attempt=row.attempt,
        retry_at=retry_at,
        **dict(zip(END_TEXTS, texts_of(end), strict=True)),
    )
    if ended_well(run):
        return replace(row, recorded=row.recorded + 1), (run,)
    return replace(row, recorded_failures=row.recorded_failures + 1), (run,)


def ended_well(run: Run) -> bool:
    """Return whether a run ended well. The history keeps the others in slots of their own."""
    return run.outcome == "ok"


def _first_row(task_name: str, claim_id: UUID, then: datetime, now: datetime) -> Row:
    # The first token is the time in milliseconds, so that a row that was deleted and inserted again
    # gets larger tokens.
    token = _milliseconds(now)
    return Row(task_name, then, then, then, then, "", claim_id, token, None, then)


def _milliseconds(now: datetime) -> int:
    """Return the time in milliseconds since 1970, rounded as PostgreSQL rounds it."""
    return ((now - EPOCH) // timedelta(microseconds=1) + 500) // 1000


def _answer(row: Row, now: datetime) -> ClaimAnswer:
    """Return an answer with the last claim's columns. The caller sets the outcome."""
    return ClaimAnswer(
        granted=False,
        running=row.is_running(now),
        new_window=False,
        unfinished=not row.finished,
        waits=False,
        paused=False,
        came_first=False,
        window_start=row.window_start,
        holder=row.locked_by,
        token=row.token,
        locked_until=row.locked_until,
        run_until=row.run_until,
        database_time=now,
        claim_id=row.claim_id,
        manual=row.kind == "manual",
        runs=row.runs,
        due_at=row.due_at,
        attempt=row.attempt,
    )


def _missing(now: datetime) -> ClaimAnswer:
    """Return the answer to an expired claim of a task that has no row."""
    no_row = replace(_first_row("", UUID(int=0), NEVER, now), token=0, finished_at=NEVER)
    return _answer(no_row, now)._replace(new_window=True)


def _granted(row: Row, now: datetime, ended: Sequence[Run] = ()) -> ClaimAnswer:
    closed = asdict(_closed(ended[0])) if ended else None
    return _answer(row, now)._replace(granted=True, running=True, closed=closed)


def _leased(now: datetime, seconds: float | None, most: datetime) -> datetime:
    """Return the end of a lease, limited by the end of the maximum lock."""
    return most if seconds is None else min(later(now, seconds), most)


def _due(since: datetime, next_in: float | None) -> datetime | None:
    """Return when the next run time is due; ``None`` if it is unknown."""
    return None if next_in is None else later(since, next_in)
