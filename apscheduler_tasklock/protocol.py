"""The lock protocol: what a replica asks of the database, and what it makes of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Table

from apscheduler_tasklock import statements
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.messages import (
    ClaimAnswer,
    ClaimRequest,
    LockTimes,
    ReleaseAnswer,
    Renewal,
    RunState,
    TakeoverRequest,
)
from apscheduler_tasklock.table import quoted_name

# How often a claim looks for its row, which others may insert and delete meanwhile.
ROUNDS = 10


class TaskLockProtocol:
    """The statements for one task lock table, run on a psycopg cursor in autocommit mode.

    :param lock_timeout: seconds that a claim waits in the server for a row that somebody has locked
    """

    def __init__(self, table: Table, lock_timeout: float = 10.0) -> None:
        # Quoted for PostgreSQL by SQLAlchemy. Its Core is not used to send the statements: that
        # adds about as much time again as a whole refused claim takes.
        self._table = table
        name = quoted_name(table).replace("%", "%%")  # psycopg's placeholders begin with it
        self._lock_timeout = f"{max(1, round(lock_timeout * 1000))}ms"
        self._claim = statements.claim(name)
        self._claim_first = statements.first_claim(name)
        self._look = statements.look(name)
        self._take_over = statements.take_over(name)
        self._look_after_takeover = statements.look_after_takeover(name)
        self._release = statements.release(name)
        self._end_lease = statements.end_lease(name)
        self._give_up = statements.give_up(name)
        self._extend = statements.extend(name)
        self._renew = statements.renew(name)
        self._read = statements.read(name)
        self._prune = statements.prune(name)

    def with_lock_timeout(self, seconds: float) -> TaskLockProtocol:
        """Return one that waits for so long in the server for a row that somebody has locked."""
        return TaskLockProtocol(self._table, seconds)

    def claim(self, cursor: Any, request: ClaimRequest) -> ClaimAnswer:
        """Try to take the task for one run time. A refused claim writes nothing.

        :raises TaskLockError: the task's row can be neither read nor inserted
        """
        parameters = {**vars(request), "lock_timeout": self._lock_timeout}
        for _ in range(ROUNDS):
            row = cursor.execute(self._claim, parameters).fetchone()
            if row is None:
                # There is no row yet; or there is one since, and the claim goes on with that.
                row = cursor.execute(self._claim_first, parameters).fetchone()
            elif _looks_free(ClaimAnswer(*row)):
                # Another claim won while this statement waited for it, and the row in this
                # statement's snapshot is the one from before. Look at what that claim made of it.
                row = cursor.execute(self._look, parameters).fetchone()
            if row is not None:
                return ClaimAnswer(*row)
        raise TaskLockError(
            f"task {request.task_name!r}: its row can be neither read nor inserted, although "
            "PostgreSQL reports no error; is there a policy or a trigger on the task lock table?"
        )

    def take_over(self, cursor: Any, request: TakeoverRequest) -> ClaimAnswer | None:
        """Try to take over the claim of a dead holder. ``None``: the task has no row any more."""
        parameters = {**vars(request), "lock_timeout": self._lock_timeout}
        row = cursor.execute(self._take_over, parameters).fetchone()
        if row is not None and not row[0]:
            # Maybe as it was before another replica took it over; see claim().
            row = cursor.execute(self._look_after_takeover, parameters).fetchone()
        return None if row is None else ClaimAnswer(*row)

    def release(
        self, cursor: Any, task_name: str, claim_id: UUID, *, keep_window: bool
    ) -> ReleaseAnswer | None:
        """End a claim. ``None`` means that it no longer stood, and that nothing was changed."""
        row = cursor.execute(
            self._release,
            {
                "task_name": task_name,
                "claim_id": claim_id,
                "keep_window": keep_window,
                "lock_timeout": self._lock_timeout,
            },
        ).fetchone()
        return None if row is None else ReleaseAnswer(*row)

    def end_lease(
        self,
        cursor: Any,
        task_name: str,
        claim_id: UUID,
        *,
        handed_over: bool,
        holders: Sequence[str] | None = None,
    ) -> ReleaseAnswer | None:
        """End the lease of a run that did not end, and will not.

        :param handed_over: whether its holder hands it over; else it counts as dead
        :param holders: only if one of these holds it
        :return: the task's row, or ``None`` if the claim no longer stood
        """
        row = cursor.execute(
            self._end_lease,
            {
                "task_name": task_name,
                "claim_id": claim_id,
                "handed_over": handed_over,
                "holders": None if holders is None else list(holders),
                "lock_timeout": self._lock_timeout,
            },
        ).fetchone()
        return None if row is None else ReleaseAnswer(*row)

    def give_up(self, cursor: Any, task_name: str, claim_id: UUID) -> bool:
        """Finish a dead run that is not to be run again; tell whether this replica did."""
        parameters = {
            "task_name": task_name,
            "claim_id": claim_id,
            "lock_timeout": self._lock_timeout,
        }
        return cursor.execute(self._give_up, parameters).fetchone() is not None

    def extend(
        self, cursor: Any, task_name: str, claim_id: UUID, by: float, lease: float | None
    ) -> LockTimes | None:
        """Move the end of a claim's maximum lock by seconds. ``None``: it stands no more."""
        row = cursor.execute(
            self._extend,
            {
                "task_name": task_name,
                "claim_id": claim_id,
                "by": by,
                "lease": lease,
                "lock_timeout": self._lock_timeout,
            },
        ).fetchone()
        return None if row is None else LockTimes(*row)

    def renew(self, cursor: Any, renewals: Sequence[Renewal]) -> dict[UUID, LockTimes]:
        """Let claims stand for another lease each.

        :return: when each of them ends now, by claim id. One that is missing stands no more.
        """
        rows = cursor.execute(
            self._renew,
            {
                "task_names": [renewal.task_name for renewal in renewals],
                "claim_ids": [renewal.claim_id for renewal in renewals],
                # psycopg refuses a list of integers and floats.
                "leases": [float(renewal.lease) for renewal in renewals],
            },
        ).fetchall()
        return {claim_id: LockTimes(*times) for claim_id, *times in rows}

    def read(
        self, cursor: Any, task_names: Sequence[str], always: Sequence[str] = ()
    ) -> tuple[list[RunState], datetime]:
        """Return which of these tasks have a dead run, and the database's time.

        :param always: tasks whose last run is returned whatever its state
        :raises TaskLockDatabaseError: the server is read-only. While nobody can renew or release,
            a run that looks dead need not be; and what a standby shows may be old.
        """
        rows = cursor.execute(
            self._read, {"task_names": list(task_names), "always": list(always)}
        ).fetchall()
        if any(read_only for *_, read_only in rows):
            raise TaskLockDatabaseError("the server is read-only")
        database_time = rows[0][-2]
        return [RunState(*row) for *row, _ in rows if row[0] is not None], database_time

    def prune(self, cursor: Any, age: float) -> int:
        """Delete rows of one-off jobs that were over so many seconds ago; return how many."""
        return int(cursor.execute(self._prune, {"age": age}).rowcount)


def _looks_free(answer: ClaimAnswer) -> bool:
    return answer.new_window and not (answer.running or answer.granted or answer.waits)
