"""The outbox: which requests wait, in which order they are sent, and which are sent again.

This module only decides. It gets the time, the answers and the jitter as arguments, so that a
simulation can drive it. The thread that carries out the decisions is in
:mod:`apscheduler_tasklock._database.thread`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from apscheduler_tasklock._database.jitter import LAST_TRY
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock._database.sqlstates import NotSentError, RowLockedError
from apscheduler_tasklock.errors import TaskLockDatabaseError

# Limits how many requests one statement has.
MOST_TOGETHER = 256


@dataclass
class ToSend:
    """What one step of the outbox has decided.

    :ivar batch: the requests to send now, in one statement
    :ivar done: the requests that are not sent again, with their outcomes
    :ivar failed: the requests that are sent again after a pause, with the outcomes of their last
        attempts
    :ivar wakes_at: when the next step is due, if no message comes before; on the monotonic clock
    """

    batch: list[Request[Any]] = field(default_factory=list)
    done: list[tuple[Request[Any], Outcome[Any]]] = field(default_factory=list)
    failed: list[tuple[Request[Any], Outcome[Any]]] = field(default_factory=list)
    wakes_at: float = inf


class Outbox:
    """The requests that wait for the database.

    The oldest ready request is sent first. Other ready requests of its kind, each for another task,
    are sent in the same batch. A failed request keeps its place, and is sent again after a pause.

    :param jitter: returns a pause near the given one, so that replicas do not all try again at the
        same moment
    :ivar ending: whether the interpreter ends, so that only failed releases are sent again
    """

    def __init__(self, jitter: Callable[[float], float]) -> None:
        self._jitter = jitter
        self.ending = False
        self._waiting: list[Request[Any]] = []  # sorted by place

    @property
    def waiting(self) -> Sequence[Request[Any]]:
        """The waiting requests, in the order of their places."""
        return self._waiting

    def has_ready(self, now: float) -> bool:
        """Return whether a request can be sent now."""
        return any(request.not_before <= now for request in self._waiting)

    def hurry_releases(self, now: float) -> None:
        """Let the releases that wait after a failure be sent now."""
        for request in self._waiting:
            if request.is_release:
                request.not_before = min(request.not_before, now)

    def step(
        self,
        now: float,
        came: Sequence[Request[Any]],
        answered: Sequence[tuple[Request[Any], Outcome[Any]]] = (),
        *,
        sends: bool = True,
    ) -> ToSend:
        """Take new requests and the outcomes of the last batch, and decide what is sent next.

        :param now: on the monotonic clock
        :param came: the new requests
        :param answered: the requests of the last batch, with their outcomes
        :param sends: whether a batch may be sent now
        """
        step = ToSend()
        for request in came:
            insort(self._waiting, request, key=_place)
        for request, outcome in answered:
            self._take_in(step, now, request, outcome)
        if not self._waiting:
            return step
        self._drop_late(step, now)
        if sends:
            step.batch = self._next_batch(now)
        if step.batch:
            batch = set(step.batch)
            self._waiting = [request for request in self._waiting if request not in batch]
            for request in step.batch:
                request.sent_at = now
        step.wakes_at = min((self._look_at(request, now) for request in self._waiting), default=inf)
        return step

    def fail_all(self, now: float, outcome: Outcome[Any]) -> ToSend:
        """Let all requests fail that are ready to be sent. Called if there is no connection."""
        ready = [request for request in self._waiting if request.not_before <= now]
        self._waiting = [request for request in self._waiting if request.not_before > now]
        step = ToSend()
        for request in ready:
            self._take_in(step, now, request, outcome)
        return step

    def split(self, rejected: Sequence[Request[Any]]) -> None:
        """Let a rejected batch be sent again in halves, so that in the end one request fails alone.

        The other requests then succeed.
        """
        half = len(rejected) // 2
        for part in (rejected[:half], rejected[half:]):
            mark = object()
            for request in part:
                request.together = mark
                insort(self._waiting, request, key=_place)

    def _take_in(
        self, step: ToSend, now: float, request: Request[Any], outcome: Outcome[Any]
    ) -> None:
        """Take the outcome of a sent request, and decide whether it is sent again."""
        if request.stays(outcome, now):
            insort(self._waiting, request, key=_place)
            return
        pause = None
        if outcome.error is not None:
            pause = self._pause_after(request, outcome.error)
        last_try = request.tried_until - LAST_TRY
        if pause is not None and request.is_release and now < last_try:
            pause = min(pause, last_try - now)
        is_over = request.is_unwanted or now >= min(request.turn_until, request.over_at)
        if pause is None or is_over or now + pause > request.tried_until:
            step.done.append((request, outcome))
            return
        request.failures += 1
        request.error = outcome.error
        request.together = None
        request.not_before = now + pause
        insort(self._waiting, request, key=_place)
        step.failed.append((request, outcome))

    def _ends(self, request: Request[Any]) -> bool:
        """Return whether a request is not sent again after a failure, because of a stop."""
        return (self.ending or request.closing.stopped) and not request.is_release

    def _pause_after(self, request: Request[Any], error: Exception) -> float | None:
        """Return the seconds after which a failed request is sent again; ``None``: never."""
        if self._ends(request):
            return None
        if isinstance(error, RowLockedError):
            backoff = request.locked_backoff
        elif isinstance(error, TaskLockDatabaseError):
            backoff = request.backoff
        else:
            backoff = request.rejected_backoff
        if not backoff:
            return None
        return self._jitter(backoff[min(request.failures, len(backoff) - 1)])

    def _drop_late(self, step: ToSend, now: float) -> None:
        """End the requests that nobody waits for any more, or whose time is over."""
        left = []
        for request in self._waiting:
            error = self._why_dropped(request, now)
            if error is None:
                left.append(request)
            else:
                step.done.append((request, Outcome(error=error)))
        self._waiting = left

    def _why_dropped(self, request: Request[Any], now: float) -> Exception | None:
        is_over = now >= min(request.turn_until, request.over_at)
        if request.error is not None:  # the request was sent, and has failed
            is_over = is_over or now >= request.tried_until or self._ends(request)
        if not (is_over or request.is_unwanted):
            return None
        waited = now - request.came
        return request.error or NotSentError(
            f"its turn on the connection did not come within {waited:.1f} sec"
        )

    def _next_batch(self, now: float) -> list[Request[Any]]:
        """Return the next batch: the oldest ready request, and other requests of its kind."""
        self._let_releases_go_first(now)
        batch: list[Request[Any]] = []
        tasks: set[str] = set()  # of the ready requests so far; later ones for them have to wait
        for request in self._waiting:
            if request.not_before > now:
                continue
            if not batch:
                batch.append(request)
                if request.goes_alone:
                    break
            elif (
                request.kind == batch[0].kind
                and request.sender is batch[0].sender
                and request.together is batch[0].together
                and request.task_name not in tasks
                and not request.goes_alone
            ):
                batch.append(request)
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
            task_name: request
            for request in reversed(self._waiting)
            if request.follows_releases and request.not_before <= now
            for task_name in request.task_names
        }
        if not claims:
            return
        for request in self._waiting:
            claim = claims.get(request.task_name) if request.is_release else None
            if claim is not None and request.sent_at < max(claim.came, claim.not_before):
                request.not_before = min(request.not_before, now)

    @staticmethod
    def _look_at(request: Request[Any], now: float) -> float:
        """Return when a waiting request is to be sent or dropped."""
        over_at = min(request.turn_until, request.over_at)
        # `tried_until` is not needed here, because a failed request's `not_before` is never after
        # it, see `_take_in`.
        return min(over_at, max(now, request.not_before))


def _place(request: Request[Any]) -> float:
    return request.by
