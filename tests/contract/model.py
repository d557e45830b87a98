"""The decision of the lock protocol in plain Python, to compare the statements with.

A task's row is a value, a claim makes another one of it, and times are seconds on the database's
clock. A claim is granted if nobody runs the task, its window is new, and no dead run is to be run
again first. What ends a run is its release, its end as a dead one, or the next claim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from uuid import UUID

# How far a run time may be from what the clocks make of it, to be believed.
TOLERANCE = 300.0


@dataclass(frozen=True)
class Row:
    started_at: float
    locked_until: float
    window_start: float
    window_until: float
    locked_by: str
    claim_id: UUID
    token: int
    finished_at: float | None
    run_until: float
    failover: bool
    deaths: int
    handovers: int
    handed_over: bool
    runs: str
    one_off: bool
    paused_until: float | None = None

    def paused(self, now: float) -> bool:
        return self.paused_until is not None and now < self.paused_until

    def running(self, now: float) -> bool:
        return self.finished_at is None and now < self.locked_until

    def dead(self, now: float) -> bool:
        return self.finished_at is None and now >= self.locked_until

    def stands(self, now: float) -> bool:
        """Tell whether its holder may go on, also after the lease."""
        return self.finished_at is None and not self.handed_over and now < self.run_until

    def over_since(self) -> float:
        return max(self.finished_at or -inf, self.window_until, self.run_until)


@dataclass(frozen=True)
class Ask:
    """A claim as it is asked.

    :ivar reckoned: its run time on the database's clock, as the replica's clock has it
    :ivar run_time: its run time, where every replica computes the same one
    """

    replica: str
    claim_id: UUID
    reckoned: float
    run_time: float | None
    min_lock: float
    max_lock: float
    lease: float | None
    runs: str
    one_off: bool
    failover: bool
    stable: bool

    @property
    def fired(self) -> float:
        if self.run_time is None:
            return self.reckoned
        return min(max(self.run_time, self.reckoned - TOLERANCE), self.reckoned + TOLERANCE)

    def is_new_after(self, row: Row) -> bool:
        limits = [row.window_until]
        if row.runs and self.runs:  # neither of them is a hold
            limits.append(row.window_start + self.min_lock)
        opened = row.window_until < row.window_start
        repeats = self.run_time is not None and not opened and self.fired <= row.window_start
        return self.fired >= min(limits) and not repeats

    def is_paused(self, row: Row, now: float) -> bool:
        """Tell whether the task is paused, or was when the run time was due."""
        return row.paused(now) or (row.paused_until is not None and self.fired < row.paused_until)

    def waits_for(self, row: Row, now: float) -> bool:
        """Tell whether a run that was dead would stand against it."""
        if row.finished_at is not None:
            return False
        if row.handed_over:
            return self.comes_after(row, now)
        if not self.stable and now < row.run_until:
            return True
        return row.failover and self.failover and self.comes_after(row, now)

    def comes_after(self, row: Row, now: float) -> bool:
        return bool(row.runs) and row.runs == self.runs and now < row.run_until


@dataclass(frozen=True)
class Takeover:
    """A takeover as it is asked."""

    replica: str
    claim_id: UUID
    dead_claim_id: UUID
    lease: float | None
    failover: bool


def claim(row: Row | None, ask: Ask, now: float, now_ms: int) -> Row:
    """Return the row after a claim: the same object, if nothing is written."""
    token, deaths = now_ms, 0
    if row is not None:
        if row.running(now) or row.claim_id == ask.claim_id:
            return row
        if not ask.is_new_after(row) or ask.waits_for(row, now) or ask.is_paused(row, now):
            return row
        token, deaths = row.token + 1, row.deaths
        if row.finished_at is None and not row.handed_over:
            deaths += 1
    return Row(
        started_at=now,
        locked_until=now + min(ask.max_lock, ask.lease or inf),
        window_start=ask.fired,
        window_until=ask.fired + ask.min_lock,
        locked_by=ask.replica,
        claim_id=ask.claim_id,
        token=token,
        finished_at=None,
        run_until=now + ask.max_lock,
        failover=ask.failover,
        deaths=deaths,
        handovers=0,
        handed_over=False,
        runs=ask.runs,
        one_off=ask.one_off,
        paused_until=None if row is None else row.paused_until,
    )


def take_over(row: Row | None, ask: Takeover, now: float) -> Row | None:
    """Return the row after a takeover: the same object, if nothing is written."""
    if row is None or row.claim_id != ask.dead_claim_id:
        return row
    if not row.dead(now) or now >= row.run_until or row.paused(now):
        return row
    return replace(
        row,
        started_at=now,
        locked_until=min(row.run_until, now + (ask.lease or inf)),
        locked_by=ask.replica,
        claim_id=ask.claim_id,
        token=row.token + 1,
        deaths=row.deaths + (not row.handed_over),
        handovers=row.handovers + row.handed_over,
        handed_over=False,
        failover=ask.failover,
    )


def granted(row: Row, claim_id: UUID, now: float) -> bool:
    return row.claim_id == claim_id and row.stands(now)


def release(row: Row | None, claim_id: UUID, now: float, *, keep_window: bool) -> Row | None:
    if row is None or row.claim_id != claim_id:
        return None
    until, finished_at = row.window_until, row.finished_at
    if finished_at is None:
        finished_at = now
        if not keep_window:
            half = (row.window_until - row.window_start) / 2
            until = round(row.window_start - max(0.000001, min(1.0, half)), 6)
    return replace(
        row,
        window_until=until,
        locked_until=max(now, until),
        finished_at=finished_at,
        deaths=0,
        handovers=0,
        handed_over=False,
    )


def end_lease(
    row: Row | None, claim_id: UUID, now: float, *, handed_over: bool, holders: list[str] | None
) -> Row | None:
    if row is None or row.claim_id != claim_id or row.finished_at is not None:
        return None
    if holders is not None and row.locked_by not in holders:
        return None
    return replace(
        row,
        locked_until=min(row.locked_until, now),
        handed_over=row.handed_over or handed_over,
    )


def give_up(row: Row | None, claim_id: UUID, now: float) -> Row | None:
    if row is None or row.claim_id != claim_id or not row.dead(now):
        return None
    return replace(
        row,
        finished_at=now,
        locked_until=max(now, row.window_until),
        deaths=row.deaths + 1,
        handed_over=False,
    )


def renew(row: Row | None, claim_id: UUID, now: float, *, lease: float) -> Row | None:
    if row is None or row.claim_id != claim_id or not row.stands(now):
        return None
    return replace(row, locked_until=max(row.locked_until, min(now + lease, row.run_until)))


def extend(
    row: Row | None, claim_id: UUID, now: float, *, by: float, lease: float | None
) -> Row | None:
    if row is None or row.claim_id != claim_id or not row.stands(now):
        return None
    run_until = row.run_until + by
    until = max(row.locked_until, min(run_until, now + (lease or inf)))
    return replace(row, run_until=run_until, locked_until=until)


def is_pruned(row: Row, now: float, age: float) -> bool:
    return row.one_off and row.over_since() < now - age
