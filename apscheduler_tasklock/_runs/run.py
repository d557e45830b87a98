"""A run: one run time of one job, on its way from the scheduler to a worker, as its queue sees it.

Whoever carries out the decisions of the queue has runs of a class of its own, with further data.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

# A job's id, and the alias of its store.
JobKey = tuple[str, str]
AnyRun = TypeVar("AnyRun", bound="QueuedRun")


class RunKind(enum.Enum):
    """Why a run is due."""

    SCHEDULE = "schedule"
    TAKEOVER = "takeover"  # the window of a dead run is run again
    RETRY = "retry"  # the job has failed, and is run again
    MANUAL = "manual"  # an operator has asked for the run
    STANDBY = "standby"  # another replica was to run it, and has not run it
    STORED = "stored"  # a run time of a job in the job store that all replicas share

    @property
    def goes_first(self) -> bool:
        """Whether the run goes first: a takeover is late, and somebody waits for a manual run."""
        return self in (RunKind.TAKEOVER, RunKind.MANUAL)

    @property
    def has_limit(self) -> bool:
        """Whether the statement that claims such runs can limit how many of them are granted."""
        return self in (RunKind.SCHEDULE, RunKind.STANDBY, RunKind.STORED)


# The kinds of run times of a schedule, which may be misfires. Any other run had to wait for another
# replica or for its time, or has no run time of its schedule.
SCHEDULED = (RunKind.SCHEDULE, RunKind.STORED)


class State(enum.Enum):
    """The state of a run."""

    WAITING = "waiting"  # for a worker, for the run before it, or until its task's row is unlocked
    ASKED = "asked"  # its claim is on the way to the database
    DEFERRED = "deferred"  # refused because of an unfinished run; claimed when that run is over
    GIVEN = "given"  # given to the wrapped executor, and not begun
    BEGUN = "begun"
    OVER = "over"


class Token:
    """A right that can be taken once.

    A run has one to begin it, or to withdraw it. The worker takes the token before it begins the
    run. Any other code takes the token before it withdraws the run. So only one of the two happens.
    A message from the worker that it has begun the run would not do, because it could come too
    late: a pool may have queued the run although the pool's ``submit`` has raised an error, and a
    worker may begin the run at any time.
    """

    def __init__(self) -> None:
        self._left = [True]

    def take(self) -> bool:
        """Take the token; return whether it was there. Atomic, also in a signal handler."""
        try:
            self._left.pop()
        except IndexError:
            return False
        return True


@dataclass(eq=False)
class QueuedRun:
    """One run time of one job. Times are seconds on the monotonic clock.

    :ivar kind: why the run is due
    :ivar task_name: the task's name
    :ivar job: the job
    :ivar due_at: the run time; for a stored job as in ``DueRun``
    :ivar came: when the run was submitted; for a stored job as in ``DueRun``
    :ivar grace: limits the seconds of lateness; ``None``: the run is never a misfire
    :ivar claims: whether the run needs the task's lock
    :ivar retry_at: for a retry, the time from which it can begin. It stands in the queue by this
        time, because a look finds it later; ``inf``: the run stands there by ``came``
    :ivar following: the run of the next run time in the same submission, which is put into the
        queue when this run is over
    :ivar number: orders runs with the same ``came``. All runs of a submission have one number.
    :ivar not_before: the run is not claimed before this time, because its task's row was locked
    :ivar locked: how many claims of the run have found the task's row locked
    :ivar is_unanswered: whether the run's last claim had no answer, so that it may be granted
    :ivar deferred_at: when the state of the run became ``DEFERRED``
    :ivar looked_at: for a deferred run, when the last look began that has read its task's row
    :ivar is_held: whether the run is not claimed until a look has read the row of an earlier,
        deferred run of its job
    :ivar excused: seconds for which the run was deferred, which do not count as lateness
    :ivar given_at: when the run was given to the executor; ``inf``: it was not given
    :ivar began_at: when the run began; ``inf``: it has not begun
    :ivar at: when the run would have begun if claims took no time
    :ivar earliest: when the run before it in its submission would have been over if claims took no
        time
    :ivar goes_on: whether the run before it in its submission was run, so that this run gets the
        virtual worker of that run; see ``WorkerModel``
    :ivar overtakes: whether the run needs no claim, and was given before runs that came earlier and
        are being claimed
    :ivar is_missed: whether the run is given only so that APScheduler reports it as missed
    :ivar late_by: its lateness in seconds, as it was judged last
    """

    kind: RunKind
    task_name: str
    job: JobKey
    due_at: float
    came: float
    grace: float | None = None
    claims: bool = True
    retry_at: float = inf
    following: QueuedRun | None = None
    state: State = State.WAITING
    token: Token = field(default_factory=Token)
    number: int = 0
    not_before: float = -inf
    locked: int = 0
    is_unanswered: bool = False
    deferred_at: float = 0.0
    looked_at: float = -inf
    is_held: bool = False
    excused: float = 0.0
    given_at: float = inf
    began_at: float = inf
    at: float = -inf
    earliest: float = -inf
    goes_on: bool = False
    overtakes: bool = False
    is_missed: bool = False
    late_by: float = 0.0

    @property
    def backlog(self: AnyRun) -> Iterator[AnyRun]:
        """The run itself, and all later runs of its submission."""
        run: AnyRun | None = self
        while run is not None:
            yield run
            run = run.following  # type: ignore[assignment]  # of the same class
