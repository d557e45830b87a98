"""What the statements of the lock protocol are asked, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

DeadRun = Literal["forget", "take over", "leave"]


@dataclass(frozen=True)
class ClaimRequest:
    """What a replica asks for: one run time of one task.

    :ivar task_name: the task's name
    :ivar lag: seconds since the run time, by the replica's clock; never below 0
    :ivar latest: the latest time the database's clock can have had when ``lag`` was read
    :ivar min_lock: seconds from the run time until which its window lasts
    :ivar max_lock: seconds after which a claim without a release counts as dead
    :ivar replica_id: who asks, for people
    :ivar claim_id: made for this request; asking twice with it claims once
    :ivar lease: seconds after which a claim without a renewal counts as dead, if that is sooner
    :ivar dead_run: what is to become of a run whose holder died: ``"forget"`` it, ``"take over"``
        its window and run that again, or ``"leave"`` it for now, and be refused
    """

    task_name: str
    lag: float
    latest: datetime | None
    min_lock: float
    max_lock: float
    replica_id: str
    claim_id: UUID
    lease: float | None = None
    dead_run: DeadRun = "forget"


def takeover_id(claim_id: UUID) -> UUID:
    """Return the id that a claim gets if it is granted the window of a dead holder.

    Another one, so that the row tells which of the two windows was granted when the first answer
    was lost. It differs in the last bit.
    """
    return UUID(int=claim_id.int ^ 1)


@dataclass(frozen=True)
class ClaimAnswer:
    """The task's row after a claim.

    :ivar granted: whether the claim stands and the job may run
    :ivar running: whether a run is going on, granted or not
    :ivar new_window: whether the window asked for was new, and was not granted: because of the run
        that is going on, or because the window of a dead holder was granted in its place
    :ivar unfinished: whether the last claim was never released: it is running, or its holder died
    :ivar window_start: start of the last claim's window
    :ivar dead_holder: whom a granted claim took the window over from, or ``None``; ``"unknown"``
        if it did so the first time it was asked, and that answer was lost
    :ivar holder: replica of the last claim
    :ivar token: fencing token of the last claim
    :ivar locked_until: database time until which the last claim holds the task
    :ivar database_time: when this was decided
    :ivar claim_id: what a release of the last claim has to match on
    """

    granted: bool
    running: bool
    new_window: bool
    unfinished: bool
    window_start: datetime
    dead_holder: str | None
    holder: str
    token: int
    locked_until: datetime
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
    :ivar max_lock: seconds since it was granted, which no renewal exceeds
    """

    task_name: str
    claim_id: UUID
    lease: float
    max_lock: float


@dataclass(frozen=True)
class RunState:
    """The last run of a task, as its row tells of it.

    :ivar finished: whether it was released
    :ivar dead: whether it was not, and its time is over
    :ivar window_start: start of its window
    :ivar holder: who runs it, or ran it
    :ivar locked_until: database time until which the task is held
    :ivar database_time: when this was read
    """

    task_name: str
    finished: bool
    dead: bool
    window_start: datetime
    holder: str
    locked_until: datetime
    database_time: datetime
