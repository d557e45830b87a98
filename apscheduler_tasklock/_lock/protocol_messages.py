"""The requests and answers of the lock protocol: what a replica says to the database."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Generic, NamedTuple, Protocol, TypeVar
from uuid import UUID, uuid4

from apscheduler_tasklock._lock.database_clock import storable
from apscheduler_tasklock._lock.outcomes import MOST_HANDOVERS, NOT_BEGUN, RunOutcome, WindowAfter
from apscheduler_tasklock._lock.parameters import Parameters, Unsent, sent
from apscheduler_tasklock.status import MissCause, RunningRun

Answer = TypeVar("Answer")


class Message(Parameters, Generic[Answer]):
    """What a replica says to the database. Its answer is that of ``LockProtocol.execute``."""


class LockProtocol(Protocol):
    """Carries out a replica's messages: in the database, or in a stand-in's memory."""

    def execute(self, cursor: Any, message: Message[Answer]) -> Answer:
        """Carry out a message, and return its answer.

        :param cursor: a cursor of a ``Wire``; to a stand-in, one that executes nothing
        """


@dataclass(frozen=True)
class ReleaseRequest(Message["ReleaseAnswer | None"]):
    """A request to release a claim. The answer is ``None`` if the claim no longer stood.

    In that case the task's row does not change. If the run was noted as dead or freed, its entry in
    the run history is corrected by a second statement.

    :ivar task_name: the task's name
    :ivar claim_id: the claim's id
    :ivar end: the outcome of the claim's run
    :ivar token: the claim's fencing token, if it is known
    :ivar ended_at: when the run ended, in database time; ``None``: when the statement is sent
    :ivar ended_ago: returns how many seconds ago the run ended. A late release is compared with
        another claim, whose time may be that of a server whose clock differs from the one that
        ``ended_at`` was computed from. ``None``: ``ended_at`` tells
    """

    task_name: str
    claim_id: UUID
    end: RunOutcome = NOT_BEGUN
    token: int | None = None
    ended_at: datetime | None = None
    ended_ago: Unsent[Callable[[], float] | None] = field(default=None, compare=False)


@dataclass(frozen=True)
class Releases(Message[dict[UUID, "ReleaseAnswer | None"]]):
    """Releases of several claims, each of another task.

    The answers are those of the claims that stood, by claim id. ``None``: another session has the
    row locked, and the release is to be sent again.
    """

    requests: Unsent[Sequence[ReleaseRequest]]


@dataclass(frozen=True)
class JobMove(Parameters):
    """A stored job's move from one run time to the next.

    :ivar job_id: the job's id
    :ivar change_id: the id of the user's last change when the job was read
    :ivar found: the next run time when the job was read. The job is moved only if its row still has
        this next run time and ``change_id``.
    :ivar run_time: the run time that is run or missed; later than ``found`` if run times are
        coalesced
    :ivar following: the next run time after the move; ``None`` if there is none
    """

    job_id: str
    change_id: UUID
    found: datetime
    run_time: datetime
    following: datetime | None

    def __post_init__(self) -> None:
        """Make the time one that a row can have."""
        object.__setattr__(self, "following", storable(self.following))


@dataclass(frozen=True)
class ClaimRequest(Parameters):
    """A job's or a hold's request to claim a task for one run time.

    :ivar task_name: the task's name
    :ivar min_lock: the length of the window, in seconds from the run time on
    :ivar max_lock: the maximum lock, in seconds from the claim on
    :ivar run_time: the nominal run time, with a time zone; ``None``: now
    :ivar exact: whether all replicas compute exactly the same run time
    :ivar lease: seconds after which a holder that does not renew counts as dead; ``None``: the
        maximum lock
    :ivar failover: whether the window is run again if the run's holder dies
    :ivar runs: the function and, for a one-off job, the run date, so that a takeover runs nothing
        else; ``""`` for ``hold``
    :ivar one_off: whether the task has no other run time, so that its row can be deleted some time
        after the run
    :ivar schedule: the trigger in canonical form; ``None`` for ``hold``
    :ivar schedule_for: for how many seconds before the run time this replica has had the schedule;
        ``None`` if the schedule cannot change, such as that of a one-off job
    :ivar least_gap: the minimum lock that is used instead of ``min_lock`` if the last window
        belongs to an older schedule, in seconds; ``None``: ``min_lock``
    :ivar next_in: seconds from this run time to the next one; ``None`` if the next one is unknown
    :ivar is_last: whether no run time follows
    :ivar grace: seconds from the next run time until the task counts as overdue
    :ivar max_runtime: seconds after which the run takes too long; ``None``: the maximum lock
    :ivar claim_id: the claim's id; a request that is sent twice with one id claims once
    :ivar keep_window_if_in_doubt: whether the window stays taken if the claim remains in doubt
    :ivar move: the move to the job's next run time, which the claim of a stored job makes, too
    """

    task_name: str
    min_lock: float
    max_lock: float
    run_time: Unsent[datetime | None] = None
    exact: Unsent[bool] = False
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
    keep_window_if_in_doubt: Unsent[bool] = False
    move: Unsent[JobMove | None] = None

    @sent
    def exact_time(self) -> datetime | None:
        """The run time, if all replicas compute exactly the same one."""
        return self.run_time if self.exact else None

    @property
    def window_in_doubt(self) -> WindowAfter:
        """What becomes of the window if the claim remains in doubt."""
        if self.keep_window_if_in_doubt:
            return WindowAfter.KEEP
        # A hold is not handed over, because no replica has a job for the hold's task.
        return WindowAfter.HAND_OVER if self.runs else WindowAfter.OPEN


@dataclass(frozen=True)
class RerunRequest(Parameters):
    """A request to claim the run that a task's row shows, if the row still shows it.

    Other attributes are as in :class:`ClaimRequest`.

    :ivar kind: ``"takeover"``: a dead run is run again; ``"retry"``: a failed run is run again;
        ``"manual"``: an operator has asked for a run
    :ivar cause: the id of the dead or failed run's claim, or of the operator's request
    :ivar max_lock: as in :class:`ClaimRequest`; a takeover keeps the maximum lock of the dead run
    :ivar runs: the function of a manual run; takeovers and retries run the function of the row
    :ivar dead_holder: the dead run's holder, shown in logs; ``None`` if this is no takeover
    :ivar handed_over: whether the dead run's holder has handed the run over, so that it is
        certainly not alive
    """

    kind: Unsent[str]
    task_name: str
    cause: UUID
    max_lock: float
    lease: float | None = None
    failover: bool = False
    runs: str = ""
    max_runtime: float | None = None
    claim_id: UUID = field(default_factory=uuid4)
    dead_holder: Unsent[str | None] = None
    handed_over: Unsent[bool] = False

    @property
    def window_in_doubt(self) -> WindowAfter:
        """What becomes of the window if the claim remains in doubt.

        A manual run has no window of its own, so it is not handed over.
        """
        return WindowAfter.KEEP if self.kind == "manual" else WindowAfter.HAND_OVER


@dataclass(frozen=True)
class ClaimTimes(Parameters):
    """The times on which a claim is decided, read right before the claim is sent.

    :ivar lag: seconds since the run time, by the replica's clock; never below 0
    :ivar latest: the latest time that the database's clock can have had when the claim was sent;
        ``None``: unknown
    :ivar stable: whether the rows are *believed*: whether a run whose lease has ended counts as
        dead. After a start or an outage the rows are not believed for a while, so that holders have
        time to renew. Meanwhile such a run blocks claims.
    :ivar not_after: the database's time after which nobody waits for the claim any more; ``None``:
        unknown
    """

    lag: float = 0.0
    latest: datetime | None = None
    stable: bool = True
    not_after: datetime | None = None


def is_wanted(not_after: datetime | None, at: datetime) -> bool:
    """Return whether somebody still waits for a claim at a time of the database's clock.

    :param not_after: as in :class:`ClaimTimes`
    :param at: that time
    """
    return not_after is None or at <= not_after


# The times of a claim that is not late, with an unknown bound and believed rows.
IN_TIME = ClaimTimes()


@dataclass(frozen=True)
class Claim(Message["ClaimAnswer"]):
    """A claim of one run time. A refused claim writes nothing.

    The answer is the task's row, or an empty one if the task still has no row. If the row looks
    free although the claim is not granted, the claim is to be sent again: other replicas claim the
    task over and over, or the claim came after its ``not_after``.

    :raises TaskLockError: the task's row can be neither read nor inserted
    """

    request: ClaimRequest
    times: ClaimTimes = IN_TIME


@dataclass(frozen=True)
class Claims(Message[dict[UUID, "ClaimAnswer"]]):
    """Claims of several tasks, each for one run time and each only once.

    The answers are by the claim ids of the requests. If a row looks free, the claim is to be sent
    again: another session has the row locked, the claim came after its ``not_after``, or earlier
    claims have reached the limit.

    :ivar lags: the lag of each request, in place of the one in ``times``
    :ivar most: limits how many claims are granted, in this order; ``None``: no limit
    :ivar are_first: whether the tasks have no rows yet. Otherwise a claim of a task without a row
        has no answer
    """

    requests: Unsent[Sequence[ClaimRequest]]
    lags: Unsent[Sequence[float]]
    times: ClaimTimes
    most: int | None = None
    are_first: Unsent[bool] = False


@dataclass(frozen=True)
class StoredClaims(Message[dict[UUID, "ClaimAnswer"]]):
    """Claims of stored jobs' tasks, each only once, which move the jobs to later run times.

    The answers are as those to :class:`Claims`. If a row looks free, another session may also have
    the job locked.

    :ivar requests: the requests, each with its ``move``
    :ivar most: limits how many claims are granted, in this order
    """

    requests: Unsent[Sequence[ClaimRequest]]
    times: ClaimTimes
    most: int

    @sent
    def count(self) -> int:
        """How many claims they are."""
        return len(self.requests)


@dataclass(frozen=True)
class Reruns(Message[dict[UUID, "ClaimAnswer"]]):
    """Claims of takeovers, or of retries, or of manual runs, each of another task.

    The answers are by the claim ids of the requests. A task without a row has no answer. If a row
    looks free, the claim is to be sent again: another session has the row locked, or the claim came
    after its ``not_after``.
    """

    requests: Unsent[Sequence[RerunRequest]]
    times: ClaimTimes = IN_TIME


class ClaimAnswer(NamedTuple):
    """The task's row after a claim.

    :ivar granted: whether the claim stands and the job may run
    :ivar running: whether a run goes on, of this claim or of another claim
    :ivar new_window: whether the requested window was new, and was not granted
    :ivar unfinished: whether the last claim is not released: its run goes on, or is dead
    :ivar waits: whether a dead run blocks the claim, because the dead run's window is run
        again first, or because the rows are not believed yet
    :ivar paused: whether the task is paused, or was when the run time was due
    :ivar came_first: whether the last run began before the requested run time was due
    :ivar window_start: the start of the last claim's window
    :ivar holder: the replica of the last claim
    :ivar token: the fencing token of the last claim
    :ivar locked_until: the database time until which the task is taken
    :ivar run_until: the database time at which the last claim's maximum lock ends
    :ivar database_time: the database time of the decision
    :ivar claim_id: the id of the last claim
    :ivar manual: whether the last run is a manual run
    :ivar runs: the function of the last run, as in :class:`ClaimRequest`. If this claim was granted
        in an existing row, it is the function of the run before this claim.
    :ivar due_at: when the task was due before this claim; ``None`` if that was not known
    :ivar attempt: which attempt at its run time the last run is: 1, or more for a retry
    :ivar closed: the dead run that this claim has closed, as a :class:`ClosedDeadRun`'s values;
        ``None`` if there is none
    :ivar withdrawn: whether the stored job has changed or moved on since it was read. Only claims
        of stored jobs have this column, so it is the last one; see ``Statement``.
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
    due_at: datetime | None = None
    attempt: int = 1
    closed: Mapping[str, Any] | None = None
    withdrawn: bool = False

    @property
    def looks_free(self) -> bool:
        """Whether the claim was not granted although nothing in this row blocks it.

        There are three possible reasons. Another claim was granted while the statement waited, and
        this is the row from before that claim. Another session has the row locked. Or the claim
        came after its ``not_after``.
        """
        stands_against = self.running or self.granted or self.waits or self.paused
        return self.new_window and not (stands_against or self.withdrawn)

    def stays_refused(self, request: ClaimRequest, times: ClaimTimes) -> bool:
        """Return whether all further tries of the claim would fail, too.

        This is so if the claim was granted before and is over, or if its ``not_after`` has passed.
        """
        return self.claim_id == request.claim_id or not self.is_in_time(times.not_after)

    def is_in_time(self, not_after: datetime | None) -> bool:
        """Return whether somebody still waited for the claim when it was decided."""
        return is_wanted(not_after, self.database_time)


@dataclass(frozen=True)
class ClosedDeadRun:
    """A dead run whose row another replica's statement has closed.

    :ivar outcome: ``"died"``, or ``"overran"`` if its holder was alive right before its maximum
        lock ended; ``None`` if it was handed over, which its holder has reported
    :ivar token: its fencing token
    :ivar holder: its replica
    :ivar attempt: which attempt at its run time it was
    :ivar run_time: the start of its window, and of a manual run when it began, in seconds since
        1970 in database time
    :ivar took: seconds from its grant until its lease ended
    """

    outcome: str | None
    token: int
    holder: str
    attempt: int
    run_time: float
    took: float


@dataclass(frozen=True)
class Refusal:
    """A refused claim, and the last run, which blocked it.

    :ivar holder: the replica of the last claim
    :ivar token: the fencing token of the last claim
    :ivar locked_until: the database time until which the task is taken
    :ivar reason: ``"paused"``, ``"running"``, ``"window"``, or ``"withdrawn"`` for a stored
        job that has changed or moved on since it was read
    :ivar renewed: whether the last claim has a lease that is renewed, so that its holder was alive
        less than a lease ago
    :ivar blocked: whether the requested window is new, and is only refused because of a run that
        goes on or is dead
    :ivar unfinished: whether the last run goes on or is dead
    :ivar waits: whether a run whose lease has ended blocks the claim, because that run's
        window is run again first, or because the rows are not believed yet
    :ivar window_start: the start of the last run's window, in database time
    :ivar came_first: whether the last run began before the requested run time was due, and is
        neither a manual run nor a retry. The requested run time then stays refused when the last
        run is released.
    :ivar runs: the function of the last run, as in ``ClaimRequest``; ``""`` for a hold
    :ivar is_manual: whether the last run is a manual run
    :ivar locked_for: seconds from the decision until ``locked_until``
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
    came_first: bool = False
    runs: str = ""
    is_manual: bool = False
    locked_for: float = 0.0

    @classmethod
    def of(cls, answer: ClaimAnswer) -> Refusal:
        """Return the refusal of an answer that grants nothing."""
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
            came_first=answer.came_first and not (answer.manual or answer.attempt > 1),
            runs=answer.runs,
            is_manual=answer.manual,
            locked_for=(answer.locked_until - answer.database_time).total_seconds(),
        )


class ReleaseAnswer(NamedTuple):
    """The task's row after a release that found its claim.

    :ivar locked_until: the database time at which the task's window ends
    :ivar database_time: the database time of the release
    :ivar retry_at: when the failed run is run again, in database time; ``None``: it is not
    :ivar is_late: whether the run was finished before: another replica has given it up as dead, or
        an earlier try of the release has finished it
    """

    locked_until: datetime
    database_time: datetime
    retry_at: datetime | None = None
    is_late: bool = False


@dataclass(frozen=True)
class EndLease(Message[ReleaseAnswer | None]):
    """A request to end the lease of a run that is known to be dead.

    The answer is the task's row; ``None`` if the claim no longer stood.

    :ivar holders: the replicas that may have claimed the run
    """

    task_name: str
    claim_id: UUID
    holders: Annotated[Sequence[str], "text[]"]


@dataclass(frozen=True)
class GiveUp(Message[ClosedDeadRun | None]):
    """A request to give up a dead run. The answer is the run; ``None``: it is not finished by this.

    If the run is handed over meanwhile, the next look at the row decides what becomes of it.
    """

    task_name: str
    claim_id: UUID


@dataclass(frozen=True)
class Renewal(Parameters):
    """A request to renew a claim.

    :ivar lease: the lease in seconds, from the renewal on; ``None``: until the maximum lock's end
    :ivar is_last: whether this is the last renewal before the maximum lock ends; such a renewal
        notes in the row that the run overruns
    """

    task_name: str
    claim_id: UUID
    lease: float | None
    is_last: bool = False


@dataclass(frozen=True)
class Renewals(Message[dict[UUID, "LockEnds"]]):
    """Renewals of claims. The answers are by claim id; a missing claim no longer stands."""

    requests: Unsent[Sequence[Renewal]]


@dataclass(frozen=True)
class Extend(Message["LockEnds | None"]):
    """A request to move the end of a maximum lock; ``None``: the claim no longer stands.

    :ivar by: by how many seconds to move it
    :ivar lease: as in :class:`Renewal`
    """

    task_name: str
    claim_id: UUID
    by: float
    lease: float | None


class LockEnds(NamedTuple):
    """The ends of a claim after it was renewed or extended.

    :ivar locked_until: the database time at which the lease ends; ``None`` if the claim was not
        renewed, because another session has the row locked
    :ivar run_until: the database time at which the maximum lock ends
    :ivar database_time: the database time of the renewal
    """

    locked_until: datetime | None
    run_until: datetime
    database_time: datetime


@dataclass(frozen=True)
class ReadTasks(Message[tuple[list["TaskRow"], datetime]]):
    """A request for the rows of tasks that need an action, such as a takeover.

    The answer has the database's time, too. A task's row is left out if PostgreSQL cannot compute
    with it.

    :ivar always: the tasks whose rows are returned in any case
    :raises TaskLockDatabaseError: the server is read-only. Its rows are not used, because holders
        cannot renew their leases there, and a standby's rows may be old
    """

    task_names: Annotated[Sequence[str], "text[]"]
    always: Annotated[Sequence[str], "text[]"] = ()


@dataclass(frozen=True)
class TaskRow:
    """A task's row, as a look reads it: the last run, and the state of the task.

    :ivar finished: whether the run is finished
    :ivar dead: whether the run is unfinished, and its lease has ended
    :ivar expired: whether the run's maximum lock has ended
    :ivar failover: whether the run's claim had failover
    :ivar deaths: how many holders have died since a run of the task finished
    :ivar handovers: how many holders have begun this window and handed it over
    :ivar handed_over: whether the run is handed over, so that it can be taken over at once
    :ivar runs: the run's function, as in :class:`ClaimRequest`
    :ivar window_start: the start of the window
    :ivar holder: the replica of the run
    :ivar database_time: the database time of the read
    :ivar manual: whether the run is a manual run, so that the window belongs to an earlier run
    :ivar request_id: the id of a manual run that an operator asked for, and that has not begun
    :ivar schedule: the task's trigger in canonical form, if a replica has written it
    :ivar due_at: when the task was due; ``None`` if it is not due yet, runs or is paused
    :ivar overdue: whether the grace time has passed, too
    :ivar paused: whether the task is paused
    :ivar due_in_pause: whether the due time falls into a pause. The next due time is then unknown
    :ivar window_until: the end of the window; before its start if the window was opened again
    :ivar window_schedule: the schedule of the window's claim; ``None``: not known, or none
    :ivar locked_until: the database time until which the task is taken
    :ivar finished_at: when the run ended; ``None``: it goes on, or is dead
    :ivar attempt: which attempt at its run time the run is: 1, or more for a retry
    :ivar retry_pending: whether the run has failed, and is to be run again
    :ivar retry_at: the time of the run's retry, if the retry can begin now; ``None``: it cannot
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
    window_until: datetime | None = None
    window_schedule: str | None = None
    locked_until: datetime | None = None
    finished_at: datetime | None = None
    attempt: int = 1
    retry_pending: bool = False
    retry_at: datetime | None = None

    def is_run_again(self, *, failover: bool) -> bool:
        """Return whether this run's window is run again if the run is dead.

        :param failover: whether the task has failover on the replica that would take the run over
        """
        return bool(self.runs) and (self.handed_over or (self.failover and failover))

    def reason_to_give_up(self, max_takeovers: int | None) -> str | None:
        """Return why a dead run is given up; ``None``: the run is taken over.

        :param max_takeovers: limits how many deaths in a row are followed by a takeover; ``None``:
            no limit
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


# Limits the missed run times that are counted one by one, because each takes a trigger some 50 µs.
MOST_COUNTED = 10_000


@dataclass(frozen=True)
class MissedTimes:
    """Missed run times of a stored job that follow each other.

    :ivar first: the first one
    :ivar last: the last one
    :ivar count: how many they are; above ``MOST_COUNTED``: more than that
    :ivar cause: why they were missed
    :ivar reason: why they were missed, in words for operators
    """

    first: datetime
    last: datetime
    count: int
    cause: MissCause
    reason: str


@dataclass(frozen=True)
class MissNote(Parameters):
    """A note of run times of a task that this replica has missed, for the run history.

    :ivar task_name: the task's name
    :ivar schedule: the task's trigger in canonical form. If the task has another trigger by now,
        the run history gets no entry.
    :ivar run_times: the run times, in order; one or more
    :ivar more: how many further run times were missed between these
    :ivar exact: whether all replicas compute exactly the same run times
    :ivar min_lock: the minimum lock of these run times, in seconds
    :ivar covers: for how many seconds after its own run time a run counts as the run of these run
        times, too
    :ivar cause: why they were missed, in one word for programs
    :ivar reason: why they were missed, in words for operators
    :ivar any_later: whether each run of a later run time counts as a run of these
    :ivar one_off: whether the task is that of a one-off job. Its row may have the date of an
        earlier job, and if it has no row, it gets one.
    :ivar runs: the job's function, as in :class:`ClaimRequest`
    :ivar is_witness: whether this replica lived at the first of the run times. If it started later,
        it concludes what has happened, and the entry does not name it.
    """

    task_name: str
    schedule: str
    run_times: Annotated[tuple[datetime, ...], "timestamptz[]"]
    exact: bool
    min_lock: float
    covers: float
    cause: str
    reason: str
    more: int = 0
    any_later: bool = False
    one_off: bool = False
    runs: str = ""
    is_witness: bool = True


@dataclass(frozen=True)
class MissNotes(Message[set[str]]):
    """Notes of run times that no replica has run, each of another task.

    The answer has the tasks whose notes are to be sent again, because another session has changed
    or locked their rows, or because a note has run times before and after a run.

    :ivar sent_at: the current time by this replica's clock; ``None``: when it is sent
    """

    notes: Unsent[Sequence[MissNote]]
    sent_at: datetime | None = None


@dataclass(frozen=True)
class ScheduleNote(Parameters):
    """A note of a changed schedule, for the run history.

    :ivar task_name: the task's name
    :ivar schedule: the new trigger in canonical form. A task that has another one by now gets no
        entry.
    :ivar reason: the change in words
    """

    task_name: str
    schedule: str
    reason: str


@dataclass(frozen=True)
class ScheduleNotes(Message[set[str]]):
    """Notes of changed schedules, each of another task.

    The answer has the tasks whose notes are to be sent again, because another session has their
    rows locked.
    """

    notes: Unsent[Sequence[ScheduleNote]]


@dataclass(frozen=True)
class ShortenHistory(Message[int]):
    """A request to delete these tasks' entries that the run history keeps no longer."""

    task_names: Annotated[Sequence[str], "text[]"]


@dataclass(frozen=True)
class PruneOneOffs(Message[int]):
    """A request to delete the rows of one-off jobs that ended long ago; how many were deleted.

    :ivar age: a row is deleted only if its job ended at least so many seconds ago; a live replica,
        the row's maximum lock and its job's grace may ask for more
    """

    age: float


@dataclass(frozen=True)
class Registration(Parameters):
    """The registration of a replica's task.

    :ivar task_name: the task's name
    :ivar schedule: the task's trigger in canonical form
    :ivar next_in: seconds until the next run time; ``None`` if the job is paused in the scheduler
    :ivar grace: seconds from the next run time until the task counts as overdue
    :ivar moved: whether the job has changed while its scheduler ran, so that its due time is new
    :ivar least_gap: as in :class:`ClaimRequest`
    :ivar runs: the job's function, as in :class:`ClaimRequest`
    :ivar period: seconds from the next run time to the one after it; ``None`` if that is unknown
    :ivar details: the job's options and its trigger's time zone as JSON, for operators, and what
        ``schedule`` leaves out of the trigger
    :ivar token: of a stored job, the token in the task's row when the job was read; 0 if there was
        no row; ``None``: unknown. A claim with another token has written a newer due time.
    """

    task_name: str
    schedule: str
    next_in: float | None
    grace: float
    least_gap: float
    runs: str
    moved: bool = False
    period: float | None = None
    details: str | None = None
    token: int | None = None


class Registered(NamedTuple):
    """The answer to a registration.

    :ivar task_name: the task's name
    :ivar again: whether the task is to be registered again, because another session has the row
        locked, or a claim was granted since the job was read
    :ivar was_schedule: the task's schedule before, if the registration has changed it
    :ivar was_due_at: when the task was due by that schedule; ``None`` if that is unknown, or falls
        into a pause
    :ivar due_at: when the task is due by the new schedule
    """

    task_name: str
    again: bool = False
    was_schedule: str | None = None
    was_due_at: datetime | None = None
    due_at: datetime | None = None


@dataclass(frozen=True)
class Registrations(Message[list[Registered]]):
    """Registrations of the tasks of a replica, each once. The answers are in their order.

    A task whose name cannot be stored has no answer, and an error is logged.
    """

    tasks: Unsent[Sequence[Registration]]


@dataclass(frozen=True)
class SignOfLife(Message[tuple[datetime, int]]):
    """A replica's report that it is alive, with its tasks and runs.

    The answer is when the replica started, and how many replicas are alive.

    :ivar started_at: the start that the first answer had; ``None`` in the first report
    :ivar rejected: the replica's rejected work, with the remedies
    :ivar runs: the replica's runs that go on
    :ivar leader_namespace: the namespace in which the replica leads or follows; ``None``: it is not
        in leader mode
    """

    host: str
    version: str
    tasks: Annotated[Sequence[str], "text[]"]
    started_at: datetime | None = None
    rejected: Annotated[Sequence[str], "text[]"] = ()
    runs: Unsent[Sequence[RunningRun]] = ()
    leader_namespace: str | None = None

    @sent
    def running(self) -> Annotated[str, "jsonb"]:
        """The runs as JSON."""
        return _reported(self.runs)


@dataclass(frozen=True)
class Stop(Message[int]):
    """A replica's report that it stops, and which of its runs still go on."""

    runs: Unsent[Sequence[RunningRun]] = ()

    @sent
    def running(self) -> Annotated[str, "jsonb"]:
        """The runs as JSON."""
        return _reported(self.runs)


def _reported(runs: Sequence[RunningRun]) -> str:
    # Not escaped, because a database in SQL_ASCII rejects the escapes.
    return json.dumps([run.reported for run in runs], ensure_ascii=False)


@dataclass(frozen=True)
class Retire(Message[int]):
    """A request to retire removed tasks that no live replica has, so that they are not overdue.

    :ivar tasks: this replica's tasks; empty until this replica has all of its jobs. If a stopped
        replica had one of these tasks, this replica counts as its successor: those of the stopped
        replica's tasks that no live replica has were removed.
    :ivar dropped: the tasks whose jobs were removed on this replica
    """

    tasks: Annotated[Sequence[str], "text[]"]
    dropped: Annotated[Sequence[str], "text[]"]


@dataclass(frozen=True)
class RemoveReplicas(Message[int]):
    """A request to delete replicas without a sign of life for ``age`` seconds."""

    age: float


@dataclass(frozen=True)
class Lead(Message[int]):
    """A request to lead the replicas of a namespace, unless another replica leads; 1: it leads.

    :ivar task_name: the name of the leader's row
    :ivar leader_id: the id with which this replica leads
    :ivar lease: seconds after which another replica may lead
    """

    task_name: str
    leader_id: str
    lease: float


@dataclass(frozen=True)
class Resign(Message[int]):
    """A request to give the leadership up, if this replica leads."""

    task_name: str
    leader_id: str
