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
    ReleaseAnswer,
    Renewal,
    RunState,
    takeover_id,
)
from apscheduler_tasklock.table import quoted_name

# How often a claim looks for its row, which others may insert and delete meanwhile.
ROUNDS = 10


class TaskLockProtocol:
    """The statements for one task lock table, run on a psycopg cursor in autocommit mode."""

    def __init__(self, table: Table) -> None:
        # Quoted for PostgreSQL by SQLAlchemy. Its Core is not used to send the statements: that
        # adds about as much time again as a whole refused claim takes.
        name = quoted_name(table).replace("%", "%%")  # psycopg's placeholders begin with it
        self._claim = statements.claim(name)
        self._claim_first = statements.first_claim(name)
        self._look = statements.look(name)
        self._release = statements.release(name)
        self._extend = statements.extend(name)
        self._renew = {waits: statements.renew(name, waits=waits) for waits in (False, True)}
        self._read = statements.read(name)

    def claim(self, cursor: Any, request: ClaimRequest) -> ClaimAnswer:
        """Try to take the task for one run time. A refused claim writes nothing.

        :raises TaskLockError: the task's row can be neither read nor inserted
        """
        parameters = {**vars(request), "takeover_id": takeover_id(request.claim_id)}
        for _ in range(ROUNDS):
            row = cursor.execute(self._claim, parameters).fetchone()
            if row is None:
                # There is no row yet; or there is one since, and the claim goes on with that.
                row = cursor.execute(self._claim_first, parameters).fetchone()
            elif _looks_free(row, takes_over=request.dead_run == "take over"):
                # Another claim won while this statement waited for it, and the row in this
                # statement's snapshot is the one from before. Look at what that claim made of it.
                row = cursor.execute(self._look, parameters).fetchone()
            if row is not None:
                return ClaimAnswer(*row)
        raise TaskLockError(
            f"task {request.task_name!r}: its row can be neither read nor inserted, although "
            "PostgreSQL reports no error; is there a policy or a trigger on the task lock table?"
        )

    def release(
        self, cursor: Any, task_name: str, claim_id: UUID, *, keep_window: bool
    ) -> ReleaseAnswer | None:
        """End a claim. ``None`` means that it no longer stood, and that nothing was changed."""
        row = cursor.execute(
            self._release,
            {"task_name": task_name, "claim_id": claim_id, "keep_window": keep_window},
        ).fetchone()
        return None if row is None else ReleaseAnswer(*row)

    def extend(self, cursor: Any, task_name: str, claim_id: UUID, by: float) -> datetime | None:
        """Move the end of a running claim by seconds; return it, or ``None`` if it is over."""
        row = cursor.execute(
            self._extend, {"task_name": task_name, "claim_id": claim_id, "by": by}
        ).fetchone()
        return None if row is None else row[0]

    def renew(
        self, cursor: Any, renewals: Sequence[Renewal], *, waits: bool = False
    ) -> dict[UUID, tuple[datetime | None, datetime]]:
        """Let claims stand for another lease each.

        :param waits: whether it waits for rows that somebody has locked
        :return: when each of them ends now, and the database's time, by claim id. One that is
            missing stands no more; one whose row somebody has locked stands, and has ``None`` in
            place of its end, since it could not be renewed.
        """
        rows = cursor.execute(
            self._renew[waits],
            {
                "task_names": [renewal.task_name for renewal in renewals],
                "claim_ids": [renewal.claim_id for renewal in renewals],
                # psycopg refuses a list of integers and floats.
                "leases": [float(renewal.lease) for renewal in renewals],
                "max_locks": [float(renewal.max_lock) for renewal in renewals],
            },
        ).fetchall()
        return {claim_id: (locked_until, now) for claim_id, locked_until, now in rows}

    def read(self, cursor: Any, task_names: Sequence[str]) -> list[RunState]:
        """Return the last run of each of these tasks.

        :raises TaskLockDatabaseError: the server is read-only. While nobody can renew or release,
            a run that looks dead need not be; and what a standby shows may be old.
        """
        rows = cursor.execute(self._read, {"task_names": list(task_names)}).fetchall()
        if any(read_only for *_, read_only in rows):
            raise TaskLockDatabaseError("the server is read-only")
        return [RunState(*row) for *row, _ in rows if row[0] is not None]


def _looks_free(row: tuple[Any, ...], *, takes_over: bool) -> bool:
    granted, running, new_window, unfinished, *_ = row
    wanted = new_window or (takes_over and unfinished)
    return bool(wanted and not running and not granted)
