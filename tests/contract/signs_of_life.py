"""Replicas' signs of life as they should be, beside the rows of the statements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

# Limits how long a replica counts as alive after its last sign of life.
ALIVE_FOR = timedelta(seconds=90)

SIGNS = """
    SELECT replica_id, started_at, seen_at, stopped_at, tasks FROM task_lock_replica
    ORDER BY replica_id COLLATE "C"
"""


@dataclass(frozen=True)
class Sign:
    """The row of a replica."""

    replica_id: str
    started_at: datetime
    seen_at: datetime
    stopped_at: datetime | None
    tasks: Sequence[str]

    def is_alive(self, now: datetime) -> bool:
        return self.stopped_at is None and self.seen_at > now - ALIVE_FOR


@dataclass
class Fleet:
    """The rows of all replicas."""

    signs: dict[str, Sign] = field(default_factory=dict)

    @property
    def columns(self) -> list[dict[str, Any]]:
        return [vars(self.signs[name]) for name in sorted(self.signs)]

    def alive(self, now: datetime) -> list[Sign]:
        return [sign for sign in self.signs.values() if sign.is_alive(now)]

    def has(self, task: str, now: datetime) -> bool:
        """Return whether a live replica has a task."""
        return any(task in sign.tasks for sign in self.alive(now))

    def report(
        self, name: str, tasks: Sequence[str], started_at: datetime | None, now: datetime
    ) -> tuple[datetime, int]:
        """Note a sign of life; return the replica's start, and how many were alive before it.

        :param started_at: ``None``: a new process has the name
        """
        live, known = len(self.alive(now)), self.signs.get(name)
        if started_at is None or known is None:
            known = Sign(name, started_at or now, now, None, tasks)
        # A stop may have overtaken a sign of life, so that does not undo it.
        self.signs[name] = replace(known, seen_at=now, tasks=tasks)
        return known.started_at, live

    def stop(self, name: str, now: datetime) -> None:
        known = self.signs.get(name)
        if known is not None:
            self.signs[name] = replace(known, seen_at=now, stopped_at=known.stopped_at or now)

    def remove(self, age: float, now: datetime) -> None:
        oldest = now - timedelta(seconds=age)
        self.signs = {name: sign for name, sign in self.signs.items() if sign.seen_at >= oldest}

    def retired(
        self, successor_of: Sequence[str], dropped: Sequence[str], now: datetime
    ) -> set[str]:
        """Return the tasks that were removed: dropped, or those of a predecessor that stopped."""
        removed = set(dropped)
        for sign in self.signs.values():
            if sign.stopped_at is not None and not set(sign.tasks).isdisjoint(successor_of):
                removed |= set(sign.tasks)
        return removed.difference(*(sign.tasks for sign in self.alive(now)))
