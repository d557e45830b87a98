"""The database's side: what waits to be sent, in which order it goes, and what is sent again.

It only decides. Time, answers and chance come in as arguments, so that it can be driven on a clock
of any kind; the thread around it is in :mod:`apscheduler_tasklock._database.thread`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from apscheduler_tasklock._database.errors import NotSentError, RowLockedError
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock.errors import TaskLockDatabaseError

Answer = TypeVar("Answer")

# How many requests travel together at most.
MOST_TOGETHER = 256
# Pauses between attempts, in seconds; the last one repeats: while the database is unavailable, and
# while a row is locked, as a rule by another replica's claim that is being committed.
BACKOFF = (0.05, 0.1, 0.25, 0.5, 1.0)
LOCKED_BACKOFF = (0.01, 0.02, 0.04, 0.1, 0.25)
# Seconds before its end at which a release is sent once more that could not be sent.
LAST_TRY = 0.1


class EndsAt(Protocol):
    """When nothing is waited for any more, which may come closer."""

    @property
    def over_at(self) -> float:
        """That time, on the monotonic clock."""


class Ticket(Generic[Answer]):
    """A request on its way. Times are on the monotonic clock.

    :param deadline: when nothing is waited for any more
    :param came: when it came; the oldest goes first
    :param turn_until: by when its turn has to come
    :param tried_until: until when it is sent again while the database is unavailable; it is sent
        once in any case
    :param answer_within: seconds within which its answer has to come, if that is less than for all
    :ivar by: its place among those that wait
    :ivar not_before: when it may be sent again
    :ivar sent_at: when it was sent last
    """

    # Pauses after which it is sent again while the database is unavailable, in seconds.
    backoff: Sequence[float] = BACKOFF
    # The same while a row is locked; none: then it is not sent again.
    locked_backoff: Sequence[float] = LOCKED_BACKOFF
    # The same if the database rejects it.
    rejected_backoff: Sequence[float] = ()
    # Whether it is not sent again once claiming was stopped.
    ends_with_claiming = True
    # Whether one of the same task that waits after a failure goes before this one.
    follows_releases = False
    # Whether it is one that goes before others of its task.
    is_release = False

    def __init__(
        self,
        request: Request[Answer],
        deadline: EndsAt,
        *,
        came: float,
        turn_until: float = inf,
        tried_until: float = -inf,
        answer_within: float = inf,
    ) -> None:
        self.request = request
        self.deadline = deadline
        self.came = self.by = self.not_before = came
        self.turn_until = turn_until
        self.tried_until = tried_until
        self.answer_within = answer_within
        self.failures = 0
        self.sent_at = -inf
        self.error: Exception | None = None
        self.together: object = None  # it travels with those that have the same

    @property
    def is_unwanted(self) -> bool:
        """Whether nobody waits for it any more."""
        return False

    @property
    def is_stopped(self) -> bool:
        """Whether whoever has sent it has stopped claiming."""
        return False

    def stays(self, _outcome: Outcome[Answer], _now: float) -> bool:
        """Tell whether it is sent once more although it was answered, at ``not_before``."""
        return False

    def taken(self) -> None:
        """Hear that it has come to the database's side. Must not wait."""

    def finish(self, outcome: Outcome[Answer]) -> None:
        """Hear what became of it. Must not wait."""

    def give_up(self, error: Exception) -> None:
        """Hear that telling of it has failed."""

    def fail(self, outcome: Outcome[Answer]) -> None:
        """Hear that it has failed, and is sent again later. Must not wait."""


@dataclass
class Step:
    """What is to be done now.

    :ivar batch: what is to be sent, in one statement
    :ivar done: what has ended, and how
    :ivar failed: what has failed, and is sent again later
    :ivar wakes_at: when to look again, if nothing comes before; on the monotonic clock
    """

    batch: list[Ticket[Any]] = field(default_factory=list)
    done: list[tuple[Ticket[Any], Outcome[Any]]] = field(default_factory=list)
    failed: list[tuple[Ticket[Any], Outcome[Any]]] = field(default_factory=list)
    wakes_at: float = inf


class DatabaseSide:
    """What waits for the database.

    The oldest goes first, and with it all of its kind that are ready, each for another task. What
    failed keeps its place, and goes again after a pause.

    :param jitter: returns a pause near the one that it is given: replicas must not all come back
        at the same moment
    """

    def __init__(self, jitter: Callable[[float], float]) -> None:
        self._jitter = jitter
        self._waiting: list[Ticket[Any]] = []  # by their places

    @property
    def waiting(self) -> Sequence[Ticket[Any]]:
        """What waits to be sent, the oldest first."""
        return self._waiting

    def has_ready(self, now: float) -> bool:
        """Tell whether something can be sent now."""
        return any(ticket.not_before <= now for ticket in self._waiting)

    def hurry_releases(self, now: float) -> None:
        """Let the releases that wait after a failure go now."""
        for ticket in self._waiting:
            if ticket.is_release:
                ticket.not_before = min(ticket.not_before, now)

    def step(
        self,
        now: float,
        came: Sequence[Ticket[Any]],
        answered: Sequence[tuple[Ticket[Any], Outcome[Any]]] = (),
        *,
        stopped: bool = False,
        sends: bool = True,
    ) -> Step:
        """Take in what has come, and return what to do.

        :param now: on the monotonic clock
        :param came: what is to be sent
        :param answered: what became of the last batch
        :param stopped: whether claiming was stopped
        :param sends: whether something may be sent now
        """
        step = Step()
        for ticket in came:
            insort(self._waiting, ticket, key=_place)
        for ticket, outcome in answered:
            self._take_in(step, now, ticket, outcome, stopped=stopped)
        self._drop_late(step, now, stopped=stopped)
        if sends:
            step.batch = self._next_batch(now)
        if step.batch:
            batch = set(step.batch)
            self._waiting = [ticket for ticket in self._waiting if ticket not in batch]
            for ticket in step.batch:
                ticket.sent_at = now
        step.wakes_at = min((self._look_at(ticket, now) for ticket in self._waiting), default=inf)
        return step

    def fail_all(self, now: float, outcome: Outcome[Any], *, stopped: bool = False) -> Step:
        """Let all that could be sent now fail, as where there is no connection."""
        ready = [ticket for ticket in self._waiting if ticket.not_before <= now]
        self._waiting = [ticket for ticket in self._waiting if ticket.not_before > now]
        step = Step()
        for ticket in ready:
            self._take_in(step, now, ticket, outcome, stopped=stopped)
        return step

    def split(self, rejected: Sequence[Ticket[Any]]) -> None:
        """Let what was rejected together go in halves: one task's mistake is its own."""
        half = len(rejected) // 2
        for part in (rejected[:half], rejected[half:]):
            mark = object()
            for ticket in part:
                ticket.together = mark
                insort(self._waiting, ticket, key=_place)

    def _take_in(
        self, step: Step, now: float, ticket: Ticket[Any], outcome: Outcome[Any], *, stopped: bool
    ) -> None:
        """Note what became of one that was sent, and whether it is sent again."""
        if ticket.stays(outcome, now):
            insort(self._waiting, ticket, key=_place)
            return
        pause = None
        if outcome.error is not None:
            pause = self._pause_after(ticket, outcome.error, stopped=stopped)
        last_try = ticket.tried_until - LAST_TRY
        if pause is not None and ticket.is_release and now < last_try:
            pause = min(pause, last_try - now)
        if pause is None or now + pause > ticket.tried_until or ticket.is_unwanted:
            step.done.append((ticket, outcome))
            return
        ticket.failures += 1
        ticket.error = outcome.error
        ticket.together = None
        ticket.not_before = now + pause
        insort(self._waiting, ticket, key=_place)
        step.failed.append((ticket, outcome))

    def _pause_after(self, ticket: Ticket[Any], error: Exception, *, stopped: bool) -> float | None:
        """Return after how many seconds one is sent again that has failed; ``None`` if it isn't."""
        if (stopped or ticket.is_stopped) and ticket.ends_with_claiming:
            return None
        if isinstance(error, RowLockedError):
            backoff = ticket.locked_backoff
        elif isinstance(error, TaskLockDatabaseError):
            backoff = ticket.backoff
        else:
            backoff = ticket.rejected_backoff
        if not backoff:
            return None
        return self._jitter(backoff[min(ticket.failures, len(backoff) - 1)])

    def _drop_late(self, step: Step, now: float, *, stopped: bool) -> None:
        """End what nobody waits for any more, or whose time is over."""
        left = []
        for ticket in self._waiting:
            error = self._why_dropped(ticket, now, stopped=stopped)
            if error is None:
                left.append(ticket)
            else:
                step.done.append((ticket, Outcome(error=error)))
        self._waiting = left

    def _why_dropped(self, ticket: Ticket[Any], now: float, *, stopped: bool) -> Exception | None:
        is_over = now >= min(ticket.turn_until, ticket.deadline.over_at)
        if ticket.error is not None:  # it was sent
            is_over = is_over or now >= ticket.tried_until
            is_stopped = stopped or ticket.is_stopped
            is_over = is_over or (is_stopped and ticket.ends_with_claiming)
        if not (is_over or ticket.is_unwanted):
            return None
        waited = now - ticket.came
        return ticket.error or NotSentError(
            f"its turn on the connection did not come within {waited:.1f} sec"
        )

    def _next_batch(self, now: float) -> list[Ticket[Any]]:
        """Return what goes next: the oldest, and what travels with it."""
        self._let_releases_go_first(now)
        batch: list[Ticket[Any]] = []
        tasks: set[str] = set()  # of those before one in the queue, which are decided first
        for ticket in self._waiting:
            request = ticket.request
            if ticket.not_before > now:
                continue
            if not batch:
                batch.append(ticket)
                if request.goes_alone:
                    break
            elif (
                request.kind is batch[0].request.kind
                and request.sender is batch[0].request.sender
                and ticket.together is batch[0].together
                and request.task_name not in tasks
                and not request.goes_alone
            ):
                batch.append(ticket)
                if len(batch) == MOST_TOGETHER:
                    break
            tasks.update(request.task_names)
        return batch

    def _let_releases_go_first(self, now: float) -> None:
        """Let releases that wait after a failure go before a claim of their task.

        Else it could be refused on account of this replica's own last run. Each goes once before
        it, whatever becomes of it.
        """
        claims = {
            task_name: ticket
            for ticket in reversed(self._waiting)
            if ticket.follows_releases and ticket.not_before <= now
            for task_name in ticket.request.task_names
        }
        if not claims:
            return
        for ticket in self._waiting:
            claim = claims.get(ticket.request.task_name) if ticket.is_release else None
            if claim is not None and ticket.sent_at < max(claim.came, claim.not_before):
                ticket.not_before = min(ticket.not_before, now)

    @staticmethod
    def _look_at(ticket: Ticket[Any], now: float) -> float:
        """Return when something is to be done about one that waits, if nothing comes before."""
        over_at = min(ticket.turn_until, ticket.deadline.over_at)
        return min(over_at, max(now, ticket.not_before))  # by `tried_until`, if it has failed


def _place(ticket: Ticket[Any]) -> float:
    return ticket.by
