"""What is asked of the lock protocol, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import NamedTuple
from uuid import UUID, uuid4

from apscheduler_tasklock._lock.clock import storable
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# How many characters of an exception's message the run history keeps.
LONGEST_ERROR = 500

# How often a window is handed over until it is given up: a fleet that keeps on stopping would hand
# it over for ever.
MOST_HANDOVERS = 10


class Ending(Enum):
    """How a claim is ended."""

    KEEP = "released, its window taken"
    OPEN = "released, its window open again"
    HAND_OVER = "handed over: its window is run again by another replica"


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: what becomes of its window, and what the row and the run history tell of it.

    :ivar ending: what becomes of its window
    :ivar outcome: ``"ok"``, ``"error"``, ``"cancelled"`` or ``"overran"``; ``""`` if it never began
    :ivar error_type: the exception's class
    :ivar error: what it says, made fit to be stored
    :ivar next_in: seconds until the next run time, if that of the claim has passed
    :ivar is_last: whether no run time follows
    :ivar cut: whether a stop has cancelled it, and not its own code
    """

    ending: Ending = Ending.KEEP
    outcome: str = ""
    error_type: str | None = None
    error: str | None = None
    next_in: float | None = None
    is_last: bool = False
    cut: bool = False

    @property
    def last_outcome(self) -> str | None:
        """What the task's row says of it; ``None`` of one that never began."""
        return "cut" if self.cut else self.outcome or None

    @classmethod
    def of(
        cls,
        exception: BaseException | None,
        ending: Ending = Ending.KEEP,
        redact: Callable[[BaseException], str | None] = str,
        *,
        overran: bool = False,
    ) -> RunEnd:
        """Return the end of a run that this exception has left, or none.

        :param redact: returns what is stored of the exception's message
        :param overran: whether its maximum lock was over when it ended, which is a failure, too
        """
        if exception is None:
            return cls(ending, "overran" if overran else "ok")
        if isinstance(exception, (asyncio.CancelledError, GeneratorExit)):
            return cls(ending, "cancelled")
        return cls(ending, "error", _class_of(exception), _message_of(exception, redact))


# Of a claim whose run never began.
NOT_BEGUN = RunEnd()


@dataclass(frozen=True)
class ReleaseRequest:
    """A claim that is to be ended.

    :ivar task_name: the task's name
    :ivar claim_id: the claim; no other is ended
    :ivar end: how its run ended
    :ivar token: of the claim, if it is known
    """

    task_name: str
    claim_id: UUID
    end: RunEnd = NOT_BEGUN
    token: int | None = None

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of its statement."""
        end = self.end
        return {
            "task_name": self.task_name,
            "claim_id": self.claim_id,
            "keep_window": end.ending is Ending.KEEP,
            "hand_over": end.ending is Ending.HAND_OVER,
            "token": self.token,
            "outcome": end.outcome,
            "error_type": end.error_type,
            "error": end.error,
            "last_outcome": end.last_outcome,
            "next_in": end.next_in,
            "is_last": end.is_last,
        }


@dataclass(frozen=True)
class HandOut:
    """A run time of a job of the job store, handed out to this replica for a short time.

    :ivar job_id: the job
    :ivar handed_id: of this hand-out, which is the fence of all that is done with it
    :ivar run_time: the run time, with a time zone
    :ivar following: the run time after it; ``None`` if there is none
    :ivar due_at: when it was due, on the monotonic clock, by the database's clock
    :ivar is_late_by_nature: whether it is late, and yet no misfire: it was handed out in time
        before, to a replica that has not run it; or it came due while its task ran by hand
    """

    job_id: str
    handed_id: UUID
    run_time: datetime
    following: datetime | None
    due_at: float
    is_late_by_nature: bool = False

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of a statement that moves its job on."""
        return {
            "job_id": self.job_id,
            "handed_id": self.handed_id,
            "following": storable(self.following),
        }


@dataclass(frozen=True)
class ClaimRequest:
    """What a job or ``hold`` asks for: one run time of one task.

    :ivar task_name: the task's name
    :ivar min_lock: seconds from the run time until which its window lasts
    :ivar max_lock: seconds after which the run has to have ended
    :ivar run_time: the nominal run time, with a time zone; ``None`` for now
    :ivar exact: whether every replica computes the same run time
    :ivar lease: seconds after which a holder that does not renew counts as dead; ``None``: the
        maximum lock
    :ivar failover: whether the window is to be run again if its holder dies
    :ivar runs: what is run, so that nobody runs something else in its place: the function and, of
        a one-off job, its run date; ``""`` for ``hold``
    :ivar one_off: whether no other run time follows, so that the row can be deleted one day
    :ivar schedule: the trigger in canonical form; ``None`` for ``hold``
    :ivar schedule_for: seconds before the run time since which this replica has had the schedule;
        ``None`` where a schedule cannot change, as of a one-off job
    :ivar least_gap: the minimum lock that counts against a window of an older schedule, in
        seconds; ``None``: its own
    :ivar next_in: seconds from the run time to the next one; ``None`` if nobody knows
    :ivar is_last: whether no run time follows
    :ivar grace: seconds after the next run time after which it counts as overdue
    :ivar max_runtime: seconds after which the run takes too long; ``None``: the maximum lock
    :ivar claim_id: made for this request; asking twice with it claims once
    :ivar keep_window_if_in_doubt: whether the window stays taken if the claim was sent and never
        answered, although the database may have granted it
    :ivar hand_out: of a job of the job store, which the claim moves to its next run time
    """

    task_name: str
    min_lock: float
    max_lock: float
    run_time: datetime | None = None
    exact: bool = False
    lease: float | None = None
    failover: bool = False
    runs: str = ""
    one_off: bool = False
    schedule: str | None = None
    schedule_for: float | None = None
    least_gap: float | None = None
    next_in: float | None = None
    is_last: bool = False
    grace: float = 60.0
    max_runtime: float | None = None
    claim_id: UUID = field(default_factory=uuid4)
    keep_window_if_in_doubt: bool = False
    hand_out: HandOut | None = None

    @property
    def ending_in_doubt(self) -> Ending:
        """How the claim is ended if it was sent and never answered."""
        if self.keep_window_if_in_doubt:
            return Ending.KEEP
        # Nobody takes a hold over: there is no job to run.
        return Ending.HAND_OVER if self.runs else Ending.OPEN

    def parameters(self, lag: float) -> dict[str, object]:
        """Return the parameters of its statement.

        :param lag: seconds since the run time, by the replica's clock; never below 0
        """
        parameters = self.window_parameters(lag)
        parameters |= {
            "max_lock": float(self.max_lock),
            "lease": None if self.lease is None else float(self.lease),
            "one_off": self.one_off,
            "next_in": None if self.next_in is None else float(self.next_in),
            "is_last": self.is_last,
            "grace": float(self.grace),
            "max_runtime": None if self.max_runtime is None else float(self.max_runtime),
        }
        return parameters

    def window_parameters(self, lag: float) -> dict[str, object]:
        """Return those parameters that say whether its window is taken; see :meth:`parameters`."""
        return {
            "task_name": self.task_name,
            "claim_id": self.claim_id,
            "lag": lag,
            "run_time": self.run_time if self.exact else None,
            # psycopg prepares a statement anew for integers of each size.
            "min_lock": float(self.min_lock),
            "least_gap": float(self.min_lock if self.least_gap is None else self.least_gap),
            "schedule": self.schedule,
            "schedule_for": None if self.schedule_for is None else float(self.schedule_for),
            "failover": self.failover,
            "runs": self.runs,
        }


@dataclass(frozen=True)
class TakeoverRequest:
    """A dead holder's run that is to be run again.

    :ivar task_name: the task's name
    :ivar dead_claim_id: the claim of the dead holder; no other is taken over
    :ivar dead_holder: shown in logs
    :ivar lease: seconds after which a holder that does not renew counts as dead; ``None``: the end
        of the maximum lock of the run that died, which a takeover keeps
    :ivar failover: whether the window is to be run again if this holder dies as well
    :ivar claim_id: made for this request; asking twice with it claims once
    """

    task_name: str
    dead_claim_id: UUID
    dead_holder: str
    lease: float | None = None
    failover: bool = True
    claim_id: UUID = field(default_factory=uuid4)

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of its statement."""
        return {
            "task_name": self.task_name,
            "claim_id": self.claim_id,
            "dead_claim_id": self.dead_claim_id,
            "lease": None if self.lease is None else float(self.lease),
            "failover": self.failover,
        }


@dataclass(frozen=True)
class ReadTimes:
    """What a claim is decided on besides its request, read right before it is sent.

    :ivar lag: seconds since the run time, by the replica's clock; never below 0
    :ivar latest: the latest time that the database's clock can have had then
    :ivar stable: whether the rows can be believed. If not, as after an outage, a run whose lease
        has ended may be going on, and stands against the claim.
    :ivar not_after: the database's time after which nobody waits for the claim any more; ``None``:
        nobody knows
    """

    lag: float = 0.0
    latest: datetime | None = None
    stable: bool = True
    not_after: datetime | None = None

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of a statement, but for the lag, which each request has its own."""
        return {"latest": self.latest, "stable": self.stable, "not_after": self.not_after}


def is_wanted(not_after: datetime | None, at: datetime) -> bool:
    """Tell whether somebody still waits for a claim at a time of the database's clock.

    :param not_after: as of :class:`ReadTimes`
    """
    return not_after is None or at <= not_after


# Of a run time that is due just now, where nothing is known against the clocks or the rows.
IN_TIME = ReadTimes()


class ClaimAnswer(NamedTuple):
    """The task's row after a claim.

    :ivar granted: whether the claim stands and the job may run
    :ivar running: whether a run is going on, granted or not
    :ivar new_window: whether the window asked for was new, and was not granted
    :ivar unfinished: whether the last claim was never released: it is running, or its holder died
    :ivar waits: whether a dead run stands against the claim: its window is run again first, or the
        rows cannot be believed yet
    :ivar paused: whether the task is paused, or was when the run time was due
    :ivar came_first: whether the last run began before the run time that was asked for was due
    :ivar window_start: start of the last claim's window
    :ivar holder: replica of the last claim
    :ivar token: fencing token of the last claim
    :ivar locked_until: database time until which the last claim holds the task
    :ivar run_until: database time at which its maximum lock ends
    :ivar database_time: when this was decided
    :ivar claim_id: what a release of the last claim has to match on
    :ivar manual: whether the last run was asked for by hand, or runs one again that was
    :ivar runs: what the last run ran; the one before, if this claim was granted in a row that was
        there
    :ivar withdrawn: of a run time that was handed out, whether it is so no more
    """

    granted: bool
    running: bool
    new_window: bool
    unfinished: bool
    waits: bool
    paused: bool
    came_first: bool
    window_start: datetime
    holder: str
    token: int
    locked_until: datetime
    run_until: datetime
    database_time: datetime
    claim_id: UUID
    manual: bool = False
    runs: str = ""
    withdrawn: bool = False

    @property
    def looks_free(self) -> bool:
        """Whether nothing stands against the claim that was not granted.

        Then another claim has won while the statement was on its way, or has the row locked, and
        this is the row as it was before; or nobody waited for the claim any more.
        """
        stands_against = self.running or self.granted or self.waits or self.paused
        return self.new_window and not (stands_against or self.withdrawn)

    def stays_refused(self, request: ClaimRequest, times: ReadTimes) -> bool:
        """Tell whether the claim is refused, although nothing stands against it.

        It was granted before, and is over; or nobody waits for it any more.
        """
        return self.claim_id == request.claim_id or not self.is_in_time(times.not_after)

    def is_in_time(self, not_after: datetime | None) -> bool:
        """Tell whether somebody still waited for the claim when it was decided on."""
        return is_wanted(not_after, self.database_time)

    def looks_dead(self, claim_id: UUID) -> bool:
        """Tell whether this claim is still the last one, and could be taken over.

        Then another replica is about to take it over, or has the row locked, and this is the row as
        it was before; or nobody waited for the takeover any more.
        """
        stands_against = self.granted or self.running or self.waits or self.paused
        is_dead = self.unfinished and not stands_against
        return is_dead and self.claim_id == claim_id and self.database_time < self.run_until


@dataclass(frozen=True)
class Refusal:
    """A claim that another replica's claim, or an earlier run of the window, stood against.

    :ivar holder: replica of the last claim
    :ivar token: its fencing token
    :ivar locked_until: database time until which the task is held
    :ivar reason: ``"paused"``, ``"running"``, ``"window"``, or ``"withdrawn"`` for a run time that
        is handed out no more
    :ivar renewed: whether its holder renews the claim, and so was alive less than a lease ago
    :ivar blocked: whether a run that is still going on, or whose holder died, stands against a
        window that is new
    :ivar unfinished: whether the last run was not released: it is going on, or its holder died
    :ivar waits: whether it is a run whose lease has ended: its window is run again first, or it
        is not yet sure that its holder died
    :ivar window_start: start of that run's window, in database time
    :ivar manual: whether it was asked for by hand
    :ivar taken: whether the window was claimed before, and not opened again
    :ivar came_first: whether that run is one of the schedule, and began before the run time that
        was asked for was due: then it stands rightly against that
    :ivar runs: what that run runs, as of ``ClaimRequest``; ``""`` of a hold
    """

    holder: str
    token: int
    locked_until: datetime
    reason: str
    renewed: bool
    blocked: bool
    unfinished: bool
    waits: bool
    window_start: datetime
    manual: bool = False
    taken: bool = False
    came_first: bool = False
    runs: str = ""

    @classmethod
    def of(cls, answer: ClaimAnswer) -> Refusal:
        """Return what an answer says that grants nothing."""
        standing = answer.running or answer.waits
        reason = "paused" if answer.paused else "running" if standing else "window"
        if answer.withdrawn:
            reason = "withdrawn"
        return cls(
            holder=answer.holder,
            token=answer.token,
            locked_until=answer.locked_until,
            reason=reason,
            renewed=answer.running and answer.locked_until < answer.run_until,
            blocked=standing and answer.new_window and not answer.paused,
            unfinished=answer.unfinished,
            waits=answer.waits,
            window_start=answer.window_start,
            manual=answer.running and answer.manual,
            taken=not (answer.new_window or answer.withdrawn),
            came_first=answer.came_first and not answer.manual,
            runs=answer.runs,
        )


class ReleaseAnswer(NamedTuple):
    """The task's row after a release that found its claim.

    :ivar locked_until: database time at which the task's window ends
    :ivar database_time: when it was released
    """

    locked_until: datetime
    database_time: datetime


@dataclass(frozen=True)
class Renewal:
    """A claim that is to stand for another lease.

    :ivar lease: seconds, from the renewal on; ``None``: until the maximum lock
    :ivar is_last: whether the maximum lock is about to end, so that the run overruns it
    """

    task_name: str
    claim_id: UUID
    lease: float | None
    is_last: bool = False


@dataclass(frozen=True)
class LockTimes:
    """When a claim ends, after it was renewed or extended.

    :ivar locked_until: database time at which its lease ends; ``None`` if it could not be renewed,
        since somebody has locked the row
    :ivar run_until: database time at which its maximum lock ends
    :ivar database_time: when this was decided
    """

    locked_until: datetime | None
    run_until: datetime
    database_time: datetime


@dataclass(frozen=True)
class RunState:
    """The last run of a task, as its row tells of it.

    :ivar finished: whether it was released
    :ivar dead: whether it was not, and its lease has ended
    :ivar expired: whether its maximum lock has ended
    :ivar failover: whether its holder wanted it to be run again
    :ivar deaths: how many holders died since a run of the task ended
    :ivar handovers: how many holders handed this window over
    :ivar handed_over: whether its holder has handed it over, so that nobody need wait
    :ivar runs: what it runs, as of :class:`ClaimRequest`
    :ivar window_start: start of its window
    :ivar holder: who runs it, or ran it
    :ivar database_time: when this was read
    :ivar manual: whether it was asked for by hand, so that its window is another run's
    :ivar request_id: of a run that was asked for by hand, and has not begun
    :ivar schedule: its trigger in canonical form, if somebody has told it
    :ivar due_at: when it was due, if that has passed and it neither runs nor is paused
    :ivar overdue: whether its grace time has passed as well
    :ivar paused: whether it is paused
    :ivar due_in_pause: whether it was due in a pause, and so nobody knows when it is
    """

    task_name: str
    claim_id: UUID
    token: int
    finished: bool
    dead: bool
    expired: bool
    failover: bool
    deaths: int
    handovers: int
    handed_over: bool
    runs: str
    window_start: datetime
    holder: str
    database_time: datetime
    manual: bool = False
    request_id: UUID | None = None
    schedule: str | None = None
    due_at: datetime | None = None
    overdue: bool = False
    paused: bool = False
    due_in_pause: bool = False

    def is_run_again(self, *, failover: bool) -> bool:
        """Tell whether this run's window is run again if the run is dead.

        :param failover: of the replica that would do it
        """
        return bool(self.runs) and (self.handed_over or (self.failover and failover))

    def reason_to_give_up(self, max_takeovers: int | None) -> str | None:
        """Return why a dead run that would be run again is not, if it is not any more.

        :param max_takeovers: how many deaths in a row are followed by a takeover; ``None``: all
        """
        if self.expired:
            return "its maximum lock has ended"
        if self.handed_over:
            if self.handovers < MOST_HANDOVERS:
                return None
            return f"it was handed over {self.handovers} times"
        if max_takeovers is None or self.deaths < max_takeovers:
            return None
        return f"{self.deaths + 1} runs of the task in a row have died with their holders"


@dataclass(frozen=True)
class ManualRequest:
    """A run that was asked for by hand, as a replica claims it.

    :ivar task_name: the task's name
    :ivar request_id: which was read in its row
    :ivar max_lock: seconds after which the run has to have ended
    :ivar lease: as of :class:`ClaimRequest`, like what follows
    """

    task_name: str
    request_id: UUID
    max_lock: float
    lease: float | None = None
    failover: bool = False
    runs: str = ""
    max_runtime: float | None = None
    claim_id: UUID = field(default_factory=uuid4)

    def parameters(self, *, stable: bool) -> dict[str, object]:
        """Return the parameters of its statement."""
        return {**vars(self), "stable": stable}


@dataclass(frozen=True)
class Registration:
    """A task that a replica has, as its scheduler knows it.

    :ivar task_name: the task's name
    :ivar schedule: its trigger in canonical form
    :ivar next_in: seconds until its next run time; ``None`` if it is paused in its scheduler
    :ivar grace: seconds after that after which it counts as overdue
    :ivar moved: whether the job has changed while its scheduler ran, so that it is due anew
    :ivar least_gap: as of :class:`ClaimRequest`
    :ivar runs: what it runs, as of :class:`ClaimRequest`
    :ivar period: seconds from its next run time to the one after it; ``None`` if nobody knows
    """

    task_name: str
    schedule: str
    next_in: float | None
    grace: float
    least_gap: float
    runs: str
    moved: bool = False
    period: float | None = None


@dataclass(frozen=True)
class Registered:
    """What became of a registration.

    :ivar task_name: the task's name
    :ivar again: whether it is to be told again, since somebody has the row locked
    """

    task_name: str
    again: bool = False


def _class_of(exception: BaseException) -> str:
    kind = type(exception)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return _fit(module + kind.__qualname__)


def _message_of(
    exception: BaseException, redact: Callable[[BaseException], str | None]
) -> str | None:
    try:
        text = redact(exception)
        return None if text is None else _fit(str(text))
    except BaseException:  # an application's own code, which may exit; the release must not fail
        logger.exception("What %s says is not in the run history", _class_of(exception))
        return None


def _fit(text: str) -> str:
    """Return a text as PostgreSQL can store it: without NUL and surrogates, and not too long."""
    return text[:LONGEST_ERROR].replace("\0", "\ufffd").encode("utf-8", "replace").decode()
