"""Claims of replicas without a scheduler, and holders that die."""

from __future__ import annotations

from typing import Any

import psycopg

from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.messages import ClaimRequest, Refusal
from apscheduler_tasklock.lock import HeldLock


def claim(
    locks: LockClient, task: str = "task", *, since: float | None = None, **wanted: Any
) -> HeldLock | Refusal:
    """Claim a task as a job does, for now if no run time is given.

    :param since: when it was wanted, on the monotonic clock, if that was not now
    """
    request = ClaimRequest(task, **{"min_lock": 9.0, "max_lock": 50.0, **wanted})
    claimed = locks.claim(request, since)
    assert claimed is not None
    return claimed


def held(locks: LockClient, task: str = "task", **wanted: Any) -> HeldLock:
    """Claim a task, which has to be free."""
    claimed = claim(locks, task, **wanted)
    assert isinstance(claimed, HeldLock), claimed
    return claimed


def die(locks: LockClient, lock: HeldLock) -> None:
    """Renew a claim no more, and never release it, as a process that was killed."""
    locks.abandon(lock)


def row(connection: psycopg.Connection[Any], task: str = "job") -> dict[str, Any]:
    """Return the row of a task, and as "over" whether its lease has ended."""
    cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
    query = "SELECT *, locked_until <= now() AS over FROM task_lock WHERE task_name = %s"
    found = cursor.execute(query, [task]).fetchone()
    assert found is not None
    return found


def pids(connection: psycopg.Connection[Any]) -> set[int]:
    """Return the server processes of the library's connections."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'tasklock %'"
    return {pid for (pid,) in connection.execute(query)}
