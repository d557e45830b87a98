"""A run: one run time of one job, on its way from the scheduler to a worker."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

# A job's id, and the alias of its store.
JobKey = tuple[str, str]


class Kind(enum.Enum):
    """Why a run is due."""

    SCHEDULE = "schedule"
    TAKEOVER = "takeover"  # of the window of a dead run
    MANUAL = "manual"  # somebody has asked for it
    STANDBY = "standby"  # in the place of a replica that should have run it
    STORED = "stored"  # of a job in the store that all replicas share

    @property
    def goes_first(self) -> bool:
        """Whether somebody waits for it, so that it goes before those that have just come due."""
        return self in (Kind.TAKEOVER, Kind.MANUAL)


class State(enum.Enum):
    """Where a run is."""

    WAITING = "waiting"  # for a worker, a run before it, or a locked row
    ASKED = "asked"  # the database is asked for its lock
    KEPT = "kept"  # it was refused because of a run that is not over, and is asked again after it
    GIVEN = "given"  # to the wrapped executor, which has not begun it
    BEGUN = "begun"
    OVER = "over"


class Verdict(enum.Enum):
    """What the database has answered."""

    GRANTED = "granted"
    REFUSED = "refused"
    KEPT = "kept"  # refused, but its own window is still to be run
    LOCKED = "locked"  # somebody has locked its row at the moment
    BEYOND = "beyond"  # as many were granted as there are workers
    UNLOCKED = "unlocked"  # there was no answer, and it is to be run all the same
    FAILED = "failed"  # there was no answer, or the database rejects it


class Token:
    """The right to begin a run that was given to a worker, or to withdraw it: whoever takes it.

    A message that it has begun would come too late: a pool whose ``submit`` raises may have queued
    the item all the same.
    """

    def __init__(self) -> None:
        self._left = [True]

    def take(self) -> bool:
        """Take it; return whether it was there. Is atomic, in a signal handler, too."""
        with suppress(IndexError):
            self._left.pop()
            return True
        return False


@dataclass(eq=False)
class Run:
    """One run time of one job. Times are seconds on the monotonic clock.

    :ivar kind: why it is due
    :ivar task_name: its task
    :ivar job: whose run it is
    :ivar due_at: its run time
    :ivar came: when it was submitted; the run time of a stored job
    :ivar grace: seconds for which it may be late; ``None``: it is never late
    :ivar claims: whether it needs the task's lock
    :ivar following: the next run time of the same submission, which goes when this one is over
    :ivar what: what the executor knows of it, and this package does not
    :ivar number: its place among those that came at the same time, which its backlog has, too
    :ivar not_before: when it may be asked for again
    :ivar locked: how often in a row its row was locked
    :ivar kept_at: since when it has been kept
    :ivar excused: seconds for which it was kept, which are no lateness
    :ivar began_at: when it began; ``inf``: not yet
    :ivar at: when it would have begun if claims took no time
    :ivar earliest: when the run before it would have been over
    :ivar goes_on: whether a worker would go on with it that has run the one before it
    :ivar is_missed: whether it is given only so that APScheduler says that it was missed
    """

    kind: Kind
    task_name: str
    job: JobKey
    due_at: float
    came: float
    grace: float | None = None
    claims: bool = True
    following: Run | None = None
    what: Any = None
    state: State = State.WAITING
    token: Token = field(default_factory=Token)
    number: int = 0
    not_before: float = -inf
    locked: int = 0
    kept_at: float = 0.0
    excused: float = 0.0
    began_at: float = inf
    at: float = -inf
    earliest: float = -inf
    goes_on: bool = False
    is_missed: bool = False

    @property
    def backlog(self) -> Iterator[Run]:
        """It, and those of its submission that go after it."""
        run: Run | None = self
        while run is not None:
            yield run
            run = run.following

    def may_go(self, now: float) -> bool:
        """Tell whether it can be asked for now, if a worker is free."""
        return self.state is State.WAITING and self.not_before <= now

    def is_late(self, at: float) -> bool:
        """Tell whether APScheduler would call it missed if it began at this time."""
        return self.grace is not None and at - self.excused - self.due_at > self.grace
