"""The lock protocol: the decision of who runs a window, and the statements that carry it out.

Each statement is a transaction of its own and one round trip. All times are the database's.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Table

from apscheduler_tasklock.table import quoted_name

# Point 1 of the decision: nobody is running the task. A run that never finished counts until its
# maximum lock has passed.
NOT_RUNNING = "(finished_at IS NOT NULL OR locked_until <= now())"

# The run time in database time. The replica says how late it is by its own clock, so that the
# offset between the clocks cancels out; `latest` caps the database's time at what it can have
# been when the replica said so (see clock.py). LEAST passes over a null.
FIRED = "(LEAST(now(), %(latest)s::timestamptz) - %(lag)s::float8 * interval '1 second')"

MIN_LOCK = "(%(min_lock)s::float8 * interval '1 second')"
MAX_LOCK = "(%(max_lock)s::float8 * interval '1 second')"

# Point 2: the window is new. The claimer's own minimum lock counts if it is the shorter one, so
# that an interval shortened by a deployment takes effect at once.
NEW_WINDOW = f"({FIRED} >= LEAST(window_until, window_start + {MIN_LOCK}))"

# A release can open the window again. It ends then half a window before its start: early enough
# for every fire of the same window, whose `fired` differ by the clocks' noise, and too late for a
# fire of the window before. A release that is sent twice opens once.
RELEASED_WINDOW = (
    "CASE WHEN %(keep_window)s::boolean OR finished_at IS NOT NULL THEN window_until"
    " ELSE window_start - (window_until - window_start) / 2 END"
)


@dataclass(frozen=True)
class ClaimRequest:
    """What a replica asks for: one run time of one task.

    :ivar task_name: the task's name
    :ivar lag: seconds since the run time, by the replica's clock; never below 0
    :ivar latest: the latest time the database's clock can have had when ``lag`` was read
    :ivar min_lock: seconds from the run time until which its window lasts
    :ivar max_lock: seconds after which a claim without a release counts as dead
    :ivar replica_id: who asks, for people
    :ivar claim_id: made for this request; asking twice with it claims once
    """

    task_name: str
    lag: float
    latest: datetime | None
    min_lock: float
    max_lock: float
    replica_id: str
    claim_id: UUID


@dataclass(frozen=True)
class ClaimAnswer:
    """The task's row after a claim.

    :ivar granted: whether the claim stands and the job may run
    :ivar running: whether a run is going on, granted or not
    :ivar new_window: whether the window of a refused claim was new, so that only the run that is
        going on stands against it
    :ivar holder: replica of the last claim
    :ivar token: fencing token of the last claim
    :ivar locked_until: database time until which the last claim holds the task
    :ivar database_time: when this was decided
    """

    granted: bool
    running: bool
    new_window: bool
    holder: str
    token: int
    locked_until: datetime
    database_time: datetime


@dataclass(frozen=True)
class ReleaseAnswer:
    """The task's row after a release that found its claim.

    :ivar locked_until: database time at which the task's window ends
    :ivar database_time: when it was released
    """

    locked_until: datetime
    database_time: datetime


class TaskLockProtocol:
    """The statements for one task lock table, run on a psycopg cursor in autocommit mode."""

    def __init__(self, table: Table) -> None:
        # Quoted for PostgreSQL by SQLAlchemy. Its Core is not used to send the statements: that
        # adds about as much time again as a whole refused claim takes.
        name = quoted_name(table).replace("%", "%%")  # psycopg's placeholders begin with it
        self._claim = _claim_statement(name)
        self._look = _look_statement(name)
        self._release = _release_statement(name)
        self._extend = _extend_statement(name)

    def claim(self, cursor: Any, request: ClaimRequest) -> ClaimAnswer:
        """Try to take the task for one run time. A refused claim writes nothing."""
        parameters = vars(request)
        row = None
        while row is None:
            row = cursor.execute(self._claim, parameters).fetchone()
            if row is None or _looks_free(row):
                # Another claim won while this statement waited for it, and the row in this
                # statement's snapshot is the one from before. Look at what that claim made of it.
                row = cursor.execute(self._look, parameters).fetchone()
        return ClaimAnswer(*row)

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


def _looks_free(row: tuple[Any, ...]) -> bool:
    granted, running, new_window, *_ = row
    return bool(new_window and not running and not granted)


def _claim_statement(table: str) -> str:
    """Return the statement that claims, or says why it may not.

    An UPDATE whose condition is false takes no row lock, no transaction id and no WAL; an
    INSERT .. ON CONFLICT DO UPDATE would take all three to be refused.

    A claim that was granted once is not granted again: a statement that was held up on its way may
    arrive after the release, and nobody would know of what it got.
    """
    answer = f"NOT {NOT_RUNNING}, false, locked_by, token, locked_until, now()"
    return f"""
        WITH seen AS (
            SELECT *, {NEW_WINDOW} AS new_window
            FROM {table} WHERE task_name = %(task_name)s
        ), updated AS (
            UPDATE {table} SET
                started_at = now(),
                locked_until = now() + {MAX_LOCK},
                window_start = {FIRED},
                window_until = {FIRED} + {MIN_LOCK},
                locked_by = %(replica_id)s,
                claim_id = %(claim_id)s::uuid,
                token = {table}.token + 1,
                finished_at = NULL
            WHERE task_name = %(task_name)s AND {NOT_RUNNING} AND {NEW_WINDOW}
              AND claim_id <> %(claim_id)s::uuid
            RETURNING true, {answer}
        ), inserted AS (
            INSERT INTO {table} (task_name, started_at, locked_until, window_start, window_until,
                                 locked_by, claim_id, token)
            SELECT %(task_name)s, now(), now() + {MAX_LOCK}, {FIRED}, {FIRED} + {MIN_LOCK},
                   %(replica_id)s, %(claim_id)s::uuid, 1
            WHERE NOT EXISTS (SELECT FROM seen)
            ON CONFLICT DO NOTHING
            RETURNING true, {answer}
        )
        SELECT * FROM updated
        UNION ALL SELECT * FROM inserted
        UNION ALL SELECT {_row(new_window="new_window")}
                  FROM seen WHERE NOT EXISTS (SELECT FROM updated)
    """


def _look_statement(table: str) -> str:
    return f"SELECT {_row(new_window=NEW_WINDOW)} FROM {table} WHERE task_name = %(task_name)s"


def _row(*, new_window: str) -> str:
    """Return the columns of an answer read from the row, not written to it.

    A claim whose answer was lost finds its own id there: it was granted the first time.
    """
    granted = f"(claim_id = %(claim_id)s::uuid AND NOT {NOT_RUNNING})"
    return f"{granted}, NOT {NOT_RUNNING}, {new_window}, locked_by, token, locked_until, now()"


def _release_statement(table: str) -> str:
    return f"""
        UPDATE {table} SET
            finished_at = COALESCE(finished_at, now()),
            window_until = {RELEASED_WINDOW},
            locked_until = GREATEST(now(), {RELEASED_WINDOW})
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid
        RETURNING locked_until, now()
    """


def _extend_statement(table: str) -> str:
    return f"""
        UPDATE {table} SET locked_until = locked_until + %(by)s::float8 * interval '1 second'
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND NOT {NOT_RUNNING}
        RETURNING locked_until
    """
