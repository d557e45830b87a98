"""The decision of the lock protocol in plain Python, to compare the statements with.

A task's row is a value, a claim makes another one of it, and times are seconds on the database's
clock. A claim is granted if nobody runs the task and its window is new; what changes that
is a dead holder, and having been granted before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from uuid import UUID

from apscheduler_tasklock.messages import DeadRun, takeover_id


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

    def running(self, now: float) -> bool:
        return self.finished_at is None and now < self.locked_until

    def dead(self, now: float) -> bool:
        return self.finished_at is None and now >= self.locked_until


@dataclass(frozen=True)
class Ask:
    """A claim as it is asked.

    :ivar fired: its run time on the database's clock
    :ivar lock: seconds for which it stands
    """

    replica: str
    claim_id: UUID
    fired: float
    min_lock: float
    lock: float
    dead_run: DeadRun

    @property
    def ids(self) -> tuple[UUID, UUID]:
        return self.claim_id, takeover_id(self.claim_id)

    def is_new_after(self, row: Row) -> bool:
        return self.fired >= min(row.window_until, row.window_start + self.min_lock)


def claim(row: Row | None, ask: Ask, now: float) -> Row:
    """Return the row after a claim: the same object, if nothing is written."""
    window = (ask.fired, ask.fired + ask.min_lock)
    if row is None:
        return Row(now, now + ask.lock, *window, ask.replica, ask.claim_id, 1, None)
    if row.running(now) or row.claim_id in ask.ids:
        return row
    if row.dead(now) and ask.dead_run == "leave":
        return row
    claim_id = ask.claim_id
    if row.dead(now) and ask.dead_run == "take over":
        window, claim_id = (row.window_start, row.window_until), takeover_id(ask.claim_id)
    elif not ask.is_new_after(row):
        return row
    return Row(now, now + ask.lock, *window, ask.replica, claim_id, row.token + 1, None)


def granted(row: Row, ask: Ask, now: float) -> bool:
    return row.running(now) and row.claim_id in ask.ids


def release(row: Row | None, claim_id: UUID, now: float, *, keep_window: bool) -> Row | None:
    if row is None or row.claim_id != claim_id:
        return None
    opened = row.window_start - (row.window_until - row.window_start) / 2
    ends_open = row.finished_at is None and not keep_window
    until = opened if ends_open else row.window_until
    finished_at = now if row.finished_at is None else row.finished_at
    return replace(row, window_until=until, locked_until=max(now, until), finished_at=finished_at)


def renew(
    row: Row | None, claim_id: UUID, now: float, *, lease: float = inf, max_lock: float = inf
) -> Row | None:
    if row is None or row.claim_id != claim_id or not row.running(now):
        return None
    until = min(now + lease, row.started_at + max_lock)
    return replace(row, locked_until=max(row.locked_until, until))


def extend(row: Row | None, claim_id: UUID, now: float, by: float) -> Row | None:
    if row is None or row.claim_id != claim_id or not row.running(now):
        return None
    return replace(row, locked_until=row.locked_until + by)
