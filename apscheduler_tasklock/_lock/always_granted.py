"""Task locks that grant each claim, for the tests of an application."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import count
from types import NoneType
from typing import Any
from uuid import UUID

from apscheduler_tasklock._lock.database_clock import later
from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock._lock.protocol_messages import (
    Answer,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Claims,
    ClaimTimes,
    EndLease,
    Extend,
    GiveUp,
    Lead,
    LockEnds,
    Message,
    MissNotes,
    PruneOneOffs,
    ReadTasks,
    Registrations,
    ReleaseAnswer,
    ReleaseRequest,
    Releases,
    RemoveReplicas,
    Renewals,
    Reruns,
    Resign,
    Retire,
    ScheduleNotes,
    ShortenHistory,
    SignOfLife,
    Stop,
    TaskRow,
)

# The moment at which the monotonic clock was 0. `monotonic_now` adds the monotonic clock to this
# moment, and never reads the wall clock again, because a step of the wall clock would look like a
# step of the database's clock.
_STARTED = datetime.now(timezone.utc) - timedelta(seconds=time.monotonic())


def monotonic_now() -> datetime:
    """Return the time by a clock that never steps."""
    return _STARTED + timedelta(seconds=time.monotonic())


@dataclass
class _Grant:
    """A granted claim that is not released."""

    token: int
    window_start: datetime
    window_until: datetime
    locked_until: datetime
    run_until: datetime


class Unlocked:
    """Grants each claim, with a growing token. A task may run many times at once."""

    def __init__(self) -> None:
        self._replace_in_child()
        self._tokens = count(1)
        self._grants: dict[UUID, _Grant] = {}
        replace_in_each_child(self)

    def _replace_in_child(self) -> None:
        """Replace the lock, which a thread of the parent may have."""
        self.lock = threading.Lock()

    def protocol(self, replica_id: str) -> UnlockedProtocol:
        """Return the protocol of a replica."""
        return UnlockedProtocol(self, replica_id)

    def grant(self, request: ClaimRequest, lag: float) -> _Grant:
        """Grant a claim, but only once for each claim id; return the grant."""
        now = monotonic_now()
        start = request.exact_time or now - timedelta(seconds=lag)
        lease = request.max_lock if request.lease is None else request.lease
        with self.lock:
            if request.claim_id not in self._grants:
                self._grants[request.claim_id] = _Grant(
                    next(self._tokens),
                    start,
                    later(start, request.min_lock),
                    later(now, min(request.max_lock, lease)),
                    later(now, request.max_lock),
                )
            return self._grants[request.claim_id]

    def find(self, claim_id: UUID) -> _Grant | None:
        """Return the grant of a claim; ``None`` if there is none, or it is released."""
        with self.lock:
            return self._grants.get(claim_id)

    def end(self, claim_id: UUID) -> _Grant | None:
        """Remove the grant of a claim, and return it."""
        with self.lock:
            return self._grants.pop(claim_id, None)


class UnlockedProtocol:
    """A ``LockProtocol`` that grants each claim."""

    def __init__(self, unlocked: Unlocked, replica_id: str) -> None:
        self._unlocked = unlocked
        self._replica_id = replica_id

    def execute(self, cursor: Any, message: Message[Answer]) -> Answer:
        """Carry out a message, and return its answer."""
        how = _HOW.get(type(message))
        answer: Answer = how(self, message) if how else empty_answer(cursor, message)
        return answer

    def _claim(self, message: Claim) -> ClaimAnswer:
        request = message.request
        grant = self._unlocked.grant(request, message.times.lag)
        return ClaimAnswer(
            granted=True,
            running=True,
            new_window=False,
            unfinished=True,
            waits=False,
            paused=False,
            came_first=False,
            window_start=grant.window_start,
            holder=self._replica_id,
            token=grant.token,
            locked_until=grant.locked_until,
            run_until=grant.run_until,
            database_time=monotonic_now(),
            claim_id=request.claim_id,
            runs=request.runs,
        )

    def _claim_many(self, message: Claims) -> dict[UUID, ClaimAnswer]:
        asked = list(zip(message.requests, message.lags, strict=True))[: message.most]
        return {each.claim_id: self._claim(Claim(each, ClaimTimes(lag))) for each, lag in asked}

    def _release(self, request: ReleaseRequest) -> ReleaseAnswer | None:
        grant, now = self._unlocked.end(request.claim_id), monotonic_now()
        if grant is None:
            return None
        return ReleaseAnswer(max(now, grant.window_until) if request.end.keep_window else now, now)

    def _release_many(self, message: Releases) -> dict[UUID, ReleaseAnswer | None]:
        answers = {request.claim_id: self._release(request) for request in message.requests}
        return {claim_id: answer for claim_id, answer in answers.items() if answer is not None}

    def _end_lease(self, message: EndLease) -> None:
        self._unlocked.end(message.claim_id)

    def _extend(self, message: Extend) -> LockEnds | None:
        grant = self._unlocked.find(message.claim_id)
        if grant is None:
            return None
        grant.run_until = later(grant.run_until, message.by)
        return _renewed(grant, message.lease)

    def _renew(self, message: Renewals) -> dict[UUID, LockEnds]:
        found = ((each, self._unlocked.find(each.claim_id)) for each in message.requests)
        return {each.claim_id: _renewed(grant, each.lease) for each, grant in found if grant}

    def _read(self, _message: ReadTasks) -> tuple[list[TaskRow], datetime]:
        return [], monotonic_now()

    def _report_replica(self, message: SignOfLife) -> tuple[datetime, int]:
        return message.started_at or monotonic_now(), 1

    def _lead(self, _message: Lead) -> int:
        return 1


_HOW: dict[type[Message[Any]], Callable[[UnlockedProtocol, Any], Any]] = {
    Claim: UnlockedProtocol._claim,
    Claims: UnlockedProtocol._claim_many,
    ReleaseRequest: UnlockedProtocol._release,
    Releases: UnlockedProtocol._release_many,
    EndLease: UnlockedProtocol._end_lease,
    Extend: UnlockedProtocol._extend,
    Renewals: UnlockedProtocol._renew,
    ReadTasks: UnlockedProtocol._read,
    SignOfLife: UnlockedProtocol._report_replica,
    Lead: UnlockedProtocol._lead,
}
# The empty answers to messages that mean nothing where a stand-in has no rows for them, each as the
# class that makes it.
_EMPTY: dict[type[Message[Any]], Callable[[], Any]] = {
    **dict.fromkeys((PruneOneOffs, RemoveReplicas, Resign, Retire, ShortenHistory, Stop), int),
    **dict.fromkeys((MissNotes, ScheduleNotes), set),
    Registrations: list,
    Reruns: dict,
    GiveUp: NoneType,
}


def empty_answer(cursor: Any, message: Message[Any]) -> Any:
    """Return the empty answer to a message that means nothing to a stand-in.

    :param cursor: raises the error of a message that needs the database
    :raises TaskLockError: the message needs the database, because it is for stored jobs
    """
    empty = _EMPTY.get(type(message), partial(cursor.execute, message))
    return empty()


def _renewed(grant: _Grant, lease: float | None) -> LockEnds:
    now = monotonic_now()
    wanted = grant.run_until if lease is None else min(grant.run_until, later(now, lease))
    grant.locked_until = max(grant.locked_until, wanted)
    return LockEnds(grant.locked_until, grant.run_until, now)
