"""Claims without a scheduler, and holders that die."""

from __future__ import annotations

import time
from typing import Any

import psycopg

from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.status import Run
from tests.support.waist import ClaimRequest, HeldLocks, LockClient, Refusal

# Renews a lease of 600 s each half second. No machine is so slow that it ends meanwhile.
RENEWS_OFTEN = Timings(renewals_per_lease=1200)

# A token that no clock reaches, so that each later claim of the task raises it by one, and a test
# can count the claims.
AHEAD = 2**62


class LaterThan:
    """Equals each token that was given after another one, also in a table of what is expected."""

    def __init__(self, token: int) -> None:
        self._token = token

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > self._token

    __hash__ = None  # type: ignore[assignment]  # it equals many numbers

    def __repr__(self) -> str:
        return f"<later than {self._token}>"


def claim(locks: LockClient | HeldLocks, task: str = "task", **wanted: Any) -> HeldLock | Refusal:
    """Claim a task as a job does. The default run time is now."""
    request = ClaimRequest(task, **{"min_lock": 9.0, "max_lock": 600.0, **wanted})
    claimed = locks.claim(request)
    assert claimed is not None
    return claimed


def held(locks: LockClient | HeldLocks, task: str = "task", **wanted: Any) -> HeldLock:
    """Claim a task, and fail if the claim is refused."""
    claimed = claim(locks, task, **wanted)
    assert isinstance(claimed, HeldLock), claimed
    return claimed


def die(locks: LockClient, lock: HeldLock) -> None:
    """Stop renewing a claim, and never release it, like a killed process."""
    locks.thread.call(lambda: locks.replica.heartbeat.remove(lock))
    locks.locks._running.pop(lock.claim_id, None)
    lock.end()


def end_lease(connection: psycopg.Connection[Any], task: str | None = None) -> None:
    """End the lease of a task by hand, or those of all tasks; their holders do not know."""
    connection.execute(
        "UPDATE task_lock SET locked_until = now() WHERE task_name = coalesce(%s, task_name)",
        [task],
    )


def end_maximum_lock(connection: psycopg.Connection[Any], lock: HeldLock) -> None:
    """End a run's maximum lock by hand as time does: in the row, where it has overrun, and here.

    No renewal may be on its way, since its answer would move the end of the lock here again.
    """
    connection.execute(
        "UPDATE task_lock SET locked_until = now(), run_until = now(), overran = true"
        " WHERE task_name = %s",
        [lock.name],
    )
    end_maximum_lock_here(lock)


def end_maximum_lock_here(lock: HeldLock) -> None:
    """Let a run's maximum lock be over by its holder's clock."""
    lock.note_renewal(lock.locked_until, lock.run_until, time.monotonic())


def row(connection: psycopg.Connection[Any], task: str = "job") -> dict[str, Any]:
    """Return the row of a task; its key "over" says whether the lease has ended."""
    cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
    query = "SELECT *, locked_until <= now() AS over FROM task_lock WHERE task_name = %s"
    found = cursor.execute(query, [task]).fetchone()
    assert found is not None
    return found


def ended_runs(locks: TaskLocks, task: str = "job") -> list[Run]:
    """Return the entries of a task's runs, the newest first, without what operators did."""
    return [run for run in locks.runs(task) if run.kind != "operator"]


def pids(connection: psycopg.Connection[Any]) -> set[int]:
    """Return the server processes of the library's connections."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'tasklock %'"
    return {pid for (pid,) in connection.execute(query)}
