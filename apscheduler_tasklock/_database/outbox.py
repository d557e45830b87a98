"""The database's side: which tickets wait, in which order they are sent, and which are sent again.

This module only decides. It gets the time, the answers and the jitter as arguments, so that a
simulation can drive it. The thread that carries out the decisions is in
:mod:`apscheduler_tasklock._database.thread`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from apscheduler_tasklock._database.jitter import BACKOFF, LAST_TRY, LOCKED_BACKOFF
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock._database.sqlstates import NotSentError, RowLockedError
from apscheduler_tasklock.errors import TaskLockDatabaseError

Answer = TypeVar("Answer")

# Limits how many requests one statement has.
MOST_TOGETHER = 256


class EndsAt(Protocol):
    """A deadline, which may move closer, for example when claiming is stopped."""

    @property
    def over_at(self) -> float:
        """When the waits end, on the monotonic clock."""


class Ticket(Generic[Answer]):
    """A request that waits to be sent, or for its answer. Times are on the monotonic clock.

    :param deadline: when the ticket's waits end
    :param came: when the ticket came; the ticket that came first is sent first
    :param turn_until: limits the wait for the ticket's turn on the connection
    :param tried_until: limits how long the ticket is sent again after failures; its first attempt
        is made in any case
    :param answer_within: limits the wait for the answer, in seconds, if that is less than the
        connection's limit
    :ivar by: the ticket's place among the waiting tickets. The ticket with the lowest place is sent
        first
    :ivar not_before: the time before which the ticket is not sent
    :ivar sent_at: when the ticket was sent last
    """

    # The pauses before a ticket is sent again while the database is unavailable, in seconds.
    backoff: Sequence[float] = BACKOFF
    # The same pauses while a row is locked; empty: the ticket is not sent again.
    locked_backoff: Sequence[float] = LOCKED_BACKOFF
    # The same pauses after the database has rejected the ticket.
    rejected_backoff: Sequence[float] = ()
    # Whether a failed ticket is not sent again once claiming is stopped.
    ends_with_claiming = True
    # Whether this ticket is sent after a release of its task, also if that release has failed and
    # waits to be sent again.
    follows_releases = False
    # Whether the ticket is a release, which is sent before the claims of its task.
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
        self.together: object = None  # only tickets with the same mark can be in one batch

    @property
    def is_unwanted(self) -> bool:
        """Whether nobody waits for the result any more."""
        return False

    @property
    def is_stopped(self) -> bool:
        """Whether the client that sends the ticket has stopped claiming."""
        return False

    def stays(self, _outcome: Outcome[Answer], _now: float) -> bool:
        """Return whether an answered ticket is to be sent once more, at its ``not_before``."""
        return False

    def taken(self) -> None:
        """Note that the database's side has taken the ticket. Must not wait."""

    def finish(self, outcome: Outcome[Answer]) -> None:
        """Take the outcome, after which the ticket is not sent again. Must not wait."""

    def abandon(self, error: Exception) -> None:
        """Take the error that :meth:`finish` or :meth:`fail` has raised."""

    def fail(self, outcome: Outcome[Answer]) -> None:
        """Take the outcome of an attempt, after which the ticket is sent again. Must not wait."""


@dataclass
class ToSend:
    """What one step of the outbox has decided.

    :ivar batch: the tickets to send now, in one statement
    :ivar done: the tickets that are not sent again, with their outcomes
    :ivar failed: the tickets that are sent again after a pause, with the outcomes of their last
        attempts
    :ivar wakes_at: when the next step is due, if no message comes before; on the monotonic clock
    """

    batch: list[Ticket[Any]] = field(default_factory=list)
    done: list[tuple[Ticket[Any], Outcome[Any]]] = field(default_factory=list)
    failed: list[tuple[Ticket[Any], Outcome[Any]]] = field(default_factory=list)
    wakes_at: float = inf


class Outbox:
    """The tickets that wait for the database.

    The oldest ready ticket is sent first. Other ready tickets of its kind, each for another task,
    are sent in the same batch. A failed ticket keeps its place, and is sent again after a pause.

    :param jitter: returns a pause near the given one, so that replicas do not all try again at the
        same moment
    """

    def __init__(self, jitter: Callable[[float], float]) -> None:
        self._jitter = jitter
        self._waiting: list[Ticket[Any]] = []  # sorted by place

    @property
    def waiting(self) -> Sequence[Ticket[Any]]:
        """The waiting tickets, in the order of their places."""
        return self._waiting

    def has_ready(self, now: float) -> bool:
        """Return whether a ticket can be sent now."""
        return any(ticket.not_before <= now for ticket in self._waiting)

    def hurry_releases(self, now: float) -> None:
        """Let the releases that wait after a failure be sent now."""
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
    ) -> ToSend:
        """Take new tickets and the outcomes of the last batch, and decide what is sent next.

        :param now: on the monotonic clock
        :param came: the new tickets
        :param answered: the tickets of the last batch, with their outcomes
        :param stopped: whether claiming is stopped
        :param sends: whether a batch may be sent now
        """
        step = ToSend()
        for ticket in came:
            insort(self._waiting, ticket, key=_place)
        for ticket, outcome in answered:
            self._take_in(step, now, ticket, outcome, stopped=stopped)
        if not self._waiting:
            return step
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

    def fail_all(self, now: float, outcome: Outcome[Any], *, stopped: bool = False) -> ToSend:
        """Let all tickets fail that are ready to be sent. Called if there is no connection."""
        ready = [ticket for ticket in self._waiting if ticket.not_before <= now]
        self._waiting = [ticket for ticket in self._waiting if ticket.not_before > now]
        step = ToSend()
        for ticket in ready:
            self._take_in(step, now, ticket, outcome, stopped=stopped)
        return step

    def split(self, rejected: Sequence[Ticket[Any]]) -> None:
        """Let a rejected batch be sent again in halves, so that in the end one ticket fails alone.

        The other tickets then succeed.
        """
        half = len(rejected) // 2
        for part in (rejected[:half], rejected[half:]):
            mark = object()
            for ticket in part:
                ticket.together = mark
                insort(self._waiting, ticket, key=_place)

    def _take_in(
        self, step: ToSend, now: float, ticket: Ticket[Any], outcome: Outcome[Any], *, stopped: bool
    ) -> None:
        """Take the outcome of a sent ticket, and decide whether it is sent again."""
        if ticket.stays(outcome, now):
            insort(self._waiting, ticket, key=_place)
            return
        pause = None
        if outcome.error is not None:
            pause = self._pause_after(ticket, outcome.error, stopped=stopped)
        last_try = ticket.tried_until - LAST_TRY
        if pause is not None and ticket.is_release and now < last_try:
            pause = min(pause, last_try - now)
        is_over = ticket.is_unwanted or now >= min(ticket.turn_until, ticket.deadline.over_at)
        if pause is None or is_over or now + pause > ticket.tried_until:
            step.done.append((ticket, outcome))
            return
        ticket.failures += 1
        ticket.error = outcome.error
        ticket.together = None
        ticket.not_before = now + pause
        insort(self._waiting, ticket, key=_place)
        step.failed.append((ticket, outcome))

    def _pause_after(self, ticket: Ticket[Any], error: Exception, *, stopped: bool) -> float | None:
        """Return the seconds after which a failed ticket is sent again; ``None``: never."""
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

    def _drop_late(self, step: ToSend, now: float, *, stopped: bool) -> None:
        """End the tickets that nobody waits for any more, or whose time is over."""
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
        if ticket.error is not None:  # the ticket was sent, and has failed
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
        """Return the next batch: the oldest ready ticket, and other tickets of its kind."""
        self._let_releases_go_first(now)
        batch: list[Ticket[Any]] = []
        tasks: set[str] = set()  # of the ready tickets so far; later requests for them have to wait
        for ticket in self._waiting:
            request = ticket.request
            if ticket.not_before > now:
                continue
            if not batch:
                batch.append(ticket)
                if request.goes_alone:
                    break
            elif (
                request.kind == batch[0].request.kind
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
        """Let releases that wait after a failure be sent before a claim of their task.

        Otherwise the claim could be refused because of this replica's own last run. Each release is
        sent once before the claim. A release that fails again does not delay the claim any more.
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
        """Return when a waiting ticket is to be sent or dropped."""
        over_at = min(ticket.turn_until, ticket.deadline.over_at)
        # `tried_until` is not needed here, because a failed ticket's `not_before` is never after
        # it, see `_take_in`.
        return min(over_at, max(now, ticket.not_before))


def _place(ticket: Ticket[Any]) -> float:
    return ticket.by
