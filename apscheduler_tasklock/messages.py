"""What the statements of the lock protocol are asked, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID


@dataclass(frozen=True)
class ClaimRequest:
    """What a replica asks for: one run time of one task.

    :ivar task_name: the task's name
    :ivar lag: seconds since the run time, by the replica's clock; never below 0
    :ivar latest: the latest time the database's clock can have had when ``lag`` was read
    :ivar min_lock: seconds from the run time until which its window lasts
    :ivar max_lock: seconds after which a run has to have ended
    :ivar replica_id: who asks, shown in logs
    :ivar claim_id: made for this request; asking twice with it claims once
    :ivar lease: seconds after which a holder that does not renew counts as dead; ``None``: the
        maximum lock
    :ivar run_time: the run time itself, where every replica computes the same one; else ``None``
    :ivar runs: what is run, so that nobody runs something else in its place: the function and, of
        a one-off job, its run date; ``""`` for ``hold``
    :ivar one_off: whether no other run time follows, so that the row can be deleted one day
    :ivar failover: whether the window is to be run again if its holder dies
    :ivar stable: whether the rows can be believed. If not, as after an outage, a run whose lease
        has ended may be going on, and stands against the claim.
    """

    task_name: str
    lag: float
    latest: datetime | None
    min_lock: float
    max_lock: float
    replica_id: str
    claim_id: UUID
    lease: float | None = None
    run_time: datetime | None = None
    runs: str = ""
    one_off: bool = False
    failover: bool = False
    stable: bool = True


@dataclass(frozen=True)
class TakeoverRequest:
    """What a replica asks for that runs the window of a dead holder again.

    :ivar task_name: the task's name
    :ivar dead_claim_id: the claim of the dead holder; no other is taken over
    :ivar replica_id: who asks, shown in logs
    :ivar claim_id: made for this request; asking twice with it claims once
    :ivar lease: seconds after which a holder that does not renew counts as dead; ``None``: the end
        of the maximum lock of the run that died, which a takeover keeps
    :ivar failover: whether the window is to be run again if this holder dies as well
    """

    task_name: str
    dead_claim_id: UUID
    replica_id: str
    claim_id: UUID
    lease: float | None = None
    failover: bool = True


@dataclass(frozen=True)
class ClaimAnswer:
    """The task's row after a claim.

    :ivar granted: whether the claim stands and the job may run
    :ivar running: whether a run is going on, granted or not
    :ivar new_window: whether the window asked for was new, and was not granted
    :ivar unfinished: whether the last claim was never released: it is running, or its holder died
    :ivar waits: whether a dead run stands against the claim: its window is run again first, or the
        rows cannot be believed yet
    :ivar window_start: start of the last claim's window
    :ivar holder: replica of the last claim
    :ivar token: fencing token of the last claim
    :ivar locked_until: database time until which the last claim holds the task
    :ivar run_until: database time at which its maximum lock ends
    :ivar database_time: when this was decided
    :ivar claim_id: what a release of the last claim has to match on
    """

    granted: bool
    running: bool
    new_window: bool
    unfinished: bool
    waits: bool
    window_start: datetime
    holder: str
    token: int
    locked_until: datetime
    run_until: datetime
    database_time: datetime
    claim_id: UUID


@dataclass(frozen=True)
class ReleaseAnswer:
    """The task's row after a release that found its claim.

    :ivar locked_until: database time at which the task's window ends
    :ivar database_time: when it was released
    """

    locked_until: datetime
    database_time: datetime


@dataclass(frozen=True)
class Renewal:
    """A claim that is to stand for another lease.

    :ivar lease: seconds, from the renewal on
    """

    task_name: str
    claim_id: UUID
    lease: float


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
