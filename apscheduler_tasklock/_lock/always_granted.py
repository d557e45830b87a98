"""Task locks that grant each claim, for the tests of an application."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import count
from typing import Any
from uuid import UUID

from apscheduler_tasklock._lock.database_clock import later
from apscheduler_tasklock._lock.outcomes import WindowAfter
from apscheduler_tasklock._lock.protocol_messages import (
    ClaimAnswer,
    ClaimRequest,
    ClosedRun,
    LockTimes,
    MissNote,
    ReadTimes,
    Registered,
    Registration,
    ReleaseAnswer,
    ReleaseRequest,
    Renewal,
    RerunRequest,
    RunState,
    ScheduleNote,
)
from apscheduler_tasklock.status import RunningRun

_AT_ONCE = ReadTimes()

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

    task_name: str
    window_start: datetime
    window_until: datetime
    locked_until: datetime
    run_until: datetime


class Unlocked:
    """Grants each claim, with a growing token. A task may run many times at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = count(1)
        self._grants: dict[UUID, tuple[_Grant, int]] = {}

    def protocol(self, replica_id: str) -> UnlockedProtocol:
        """Return the protocol of a replica."""
        return UnlockedProtocol(self, replica_id)

    def grant(self, request: ClaimRequest, lag: float) -> tuple[_Grant, int]:
        """Grant a claim, but only once for each claim id; return the grant with its token."""
        now = monotonic_now()
        start = request.run_time if request.exact else None
        if start is None:
            start = now - timedelta(seconds=lag)
        lease = request.max_lock if request.lease is None else request.lease
        with self._lock:
            if request.claim_id not in self._grants:
                grant = _Grant(
                    request.task_name,
                    start,
                    later(start, request.min_lock),
                    later(now, min(request.max_lock, lease)),
                    later(now, request.max_lock),
                )
                self._grants[request.claim_id] = grant, next(self._tokens)
            return self._grants[request.claim_id]

    def find(self, claim_id: UUID) -> _Grant | None:
        """Return the grant of a claim; ``None`` if there is none, or it is released."""
        with self._lock:
            found = self._grants.get(claim_id)
        return None if found is None else found[0]

    def end(self, claim_id: UUID) -> _Grant | None:
        """Remove the grant of a claim, and return it."""
        with self._lock:
            found = self._grants.pop(claim_id, None)
        return None if found is None else found[0]


class UnlockedProtocol:
    """A ``LockProtocol`` that grants each claim."""

    def __init__(self, unlocked: Unlocked, replica_id: str) -> None:
        self._unlocked = unlocked
        self._replica_id = replica_id

    def claim(
        self,
        cursor: Any,
        request: ClaimRequest,
        times: ReadTimes = _AT_ONCE,
    ) -> ClaimAnswer:
        """Grant a claim."""
        grant, token = self._unlocked.grant(request, times.lag)
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
            token=token,
            locked_until=grant.locked_until,
            run_until=grant.run_until,
            database_time=monotonic_now(),
            claim_id=request.claim_id,
            runs=request.runs,
        )

    def claim_and_move(
        self, cursor: Any, requests: Sequence[ClaimRequest], times: ReadTimes, most: int
    ) -> dict[UUID, ClaimAnswer]:
        """Raise an error, because there is no job store without a database."""
        cursor.execute(f"claim {len(requests)} run times of stored jobs ({times}, {most=})")
        return {}

    def claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        most: int | None = None,
    ) -> dict[UUID, ClaimAnswer]:
        """Grant the first ``most`` claims."""
        asked = list(zip(requests, lags, strict=True))[:most]
        return {
            request.claim_id: self.claim(cursor, request, ReadTimes(lag)) for request, lag in asked
        }

    def first_claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        most: int | None = None,
    ) -> dict[UUID, ClaimAnswer]:
        """Grant the first ``most`` claims."""
        return self.claim_many(cursor, requests, lags, times, most)

    def rerun(
        self, cursor: Any, requests: Sequence[RerunRequest], times: ReadTimes = _AT_ONCE
    ) -> dict[UUID, ClaimAnswer]:
        """Return nothing, because there are no rows with dead, failed or manual runs."""
        return {}

    def release(self, cursor: Any, request: ReleaseRequest) -> ReleaseAnswer | None:
        """Release a claim."""
        grant, now = self._unlocked.end(request.claim_id), monotonic_now()
        if grant is None:
            return None
        keeps_window = request.end.window is WindowAfter.KEEP
        return ReleaseAnswer(max(now, grant.window_until) if keeps_window else now, now)

    def release_many(
        self, cursor: Any, requests: Sequence[ReleaseRequest]
    ) -> dict[UUID, ReleaseAnswer | None]:
        """Release many claims."""
        answers = {request.claim_id: self.release(cursor, request) for request in requests}
        return {claim_id: answer for claim_id, answer in answers.items() if answer is not None}

    def end_lease(
        self, cursor: Any, task_name: str, claim_id: UUID, holders: Sequence[str]
    ) -> ReleaseAnswer | None:
        """Remove the claim of a run whose worker process has died."""
        self._unlocked.end(claim_id)
        return None

    def give_up(self, cursor: Any, task_name: str, claim_id: UUID) -> ClosedRun | None:
        """Return ``None``, because there are no dead windows."""
        return None

    def extend(
        self, cursor: Any, task_name: str, claim_id: UUID, by: float, lease: float | None
    ) -> LockTimes | None:
        """Move the end of a claim's maximum lock."""
        grant = self._unlocked.find(claim_id)
        if grant is None:
            return None
        grant.run_until = later(grant.run_until, by)
        return _renewed(grant, lease)

    def renew(self, cursor: Any, renewals: Sequence[Renewal]) -> dict[UUID, LockTimes]:
        """Renew claims."""
        found = ((each, self._unlocked.find(each.claim_id)) for each in renewals)
        return {each.claim_id: _renewed(grant, each.lease) for each, grant in found if grant}

    def read(
        self, cursor: Any, task_names: Sequence[str], always: Sequence[str] = ()
    ) -> tuple[list[RunState], datetime]:
        """Return no tasks."""
        return [], monotonic_now()

    def register(self, cursor: Any, tasks: Sequence[Registration]) -> list[Registered]:
        """Return nothing, because no task has a row."""
        return []

    def report_replica(
        self,
        cursor: Any,
        host: str,
        version: str,
        tasks: Sequence[str],
        started_at: datetime | None = None,
        rejected: Sequence[str] = (),
        running: Sequence[RunningRun] = (),
        leader_namespace: str | None = None,
    ) -> tuple[datetime, int]:
        """Return when the replica started, and that it is the only one."""
        return started_at or monotonic_now(), 1

    def retire(self, cursor: Any, successor_of: Sequence[str], dropped: Sequence[str]) -> None:
        """Do nothing."""

    def lead(self, cursor: Any, row: str, leader_id: str, lease: float) -> bool:
        """Return ``True``, because there are no other replicas."""
        return True

    def resign(self, cursor: Any, row: str, leader_id: str) -> None:
        """Do nothing."""

    def stop_replica(self, cursor: Any, running: Sequence[RunningRun] = ()) -> None:
        """Do nothing."""

    def remove_replicas(self, cursor: Any, age: float) -> None:
        """Do nothing."""

    def shorten_history(self, cursor: Any, task_names: Sequence[str]) -> None:
        """Do nothing."""

    def note_misses(self, cursor: Any, notes: Sequence[MissNote], sent_at: datetime) -> set[str]:
        """Write nothing, because there is no history."""
        return set()

    def note_reschedulings(self, cursor: Any, notes: Sequence[ScheduleNote]) -> set[str]:
        """Write nothing, because there is no history."""
        return set()

    def prune(self, cursor: Any, age: float) -> int:
        """Return that no row was deleted."""
        return 0


def _renewed(grant: _Grant, lease: float | None) -> LockTimes:
    now = monotonic_now()
    wanted = grant.run_until if lease is None else min(grant.run_until, later(now, lease))
    grant.locked_until = max(grant.locked_until, wanted)
    return LockTimes(grant.locked_until, grant.run_until, now)
