"""The lock protocol: the decision of who runs a window, and the statements that carry it out.

Each statement is a transaction of its own and one round trip. All times are the database's.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Table

from apscheduler_tasklock.errors import TaskLockDatabaseError
from apscheduler_tasklock.messages import (
    ClaimAnswer,
    ClaimRequest,
    ReleaseAnswer,
    Renewal,
    RunState,
    takeover_id,
)
from apscheduler_tasklock.table import quoted_name

# Point 1 of the decision: nobody is running the task. A run that never finished counts until its
# lease, or its maximum lock, has passed.
NOT_RUNNING = "(finished_at IS NOT NULL OR locked_until <= now())"

# The run time in database time. The replica says how late it is by its own clock, so that the
# offset between the clocks cancels out; `latest` caps the database's time at what it can have
# been when the replica said so (see clock.py). LEAST passes over a null.
FIRED = "(LEAST(now(), %(latest)s::timestamptz) - %(lag)s::float8 * interval '1 second')"

MIN_LOCK = "(%(min_lock)s::float8 * interval '1 second')"
# LEAST passes over a null: a claim without a lease.
LOCK = "(LEAST(%(max_lock)s::float8, %(lease)s::float8) * interval '1 second')"

# Point 2: the window is new. The claimer's own minimum lock counts if it is the shorter one, so
# that an interval shortened by a deployment takes effect at once.
NEW_WINDOW = f"({FIRED} >= LEAST(window_until, window_start + {MIN_LOCK}))"

# What the claimer wants with a run whose holder died. Its window is taken over before the
# claimer's own, however new that is; else it would be lost.
LEAVES_DEAD = "(%(dead_run)s::text = 'leave' AND finished_at IS NULL)"
TAKES_OVER = "(%(dead_run)s::text = 'take over' AND finished_at IS NULL)"

# A claim whose answer was lost finds one of its ids in the row: it was granted the first time, and
# the id tells which window. If that is its own one, it is not left to be claimed, however short.
OWN = "claim_id IN (%(claim_id)s::uuid, %(takeover_id)s::uuid)"
GRANTED_BEFORE = f"({OWN} AND NOT {NOT_RUNNING})"
TOOK_OVER = f"(claim_id = %(takeover_id)s::uuid AND NOT {NOT_RUNNING})"

# A release can open the window again. It ends then half a window before its start: early enough
# for every fire of the same window, whose `fired` differ by the clocks' noise, and too late for a
# fire of the window before. A release that is sent twice opens once.
RELEASED_WINDOW = (
    "CASE WHEN %(keep_window)s::boolean OR finished_at IS NOT NULL THEN window_until"
    " ELSE window_start - (window_until - window_start) / 2 END"
)


class TaskLockProtocol:
    """The statements for one task lock table, run on a psycopg cursor in autocommit mode."""

    def __init__(self, table: Table) -> None:
        # Quoted for PostgreSQL by SQLAlchemy. Its Core is not used to send the statements: that
        # adds about as much time again as a whole refused claim takes.
        name = quoted_name(table).replace("%", "%%")  # psycopg's placeholders begin with it
        self._claim = _claim_statement(name)
        look = _answer_before(NEW_WINDOW)
        self._look = f"SELECT {look} FROM {name} WHERE task_name = %(task_name)s"
        self._release = _release_statement(name)
        self._extend = _extend_statement(name)
        self._renew = _renew_statement(name)
        self._read = _read_statement(name)

    def claim(self, cursor: Any, request: ClaimRequest) -> ClaimAnswer:
        """Try to take the task for one run time. A refused claim writes nothing."""
        parameters = {**vars(request), "takeover_id": takeover_id(request.claim_id)}
        row = None
        while row is None:
            row = cursor.execute(self._claim, parameters).fetchone()
            if row is None or _looks_free(row, takes_over=request.dead_run == "take over"):
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

    def renew(
        self, cursor: Any, renewals: Sequence[Renewal]
    ) -> dict[UUID, tuple[datetime, datetime]]:
        """Let claims stand for another lease each.

        :return: when each of them ends now, and the database's time, by claim id. One that is
            missing stands no more.
        """
        rows = cursor.execute(
            self._renew,
            {
                "task_names": [renewal.task_name for renewal in renewals],
                "claim_ids": [renewal.claim_id for renewal in renewals],
                "leases": [renewal.lease for renewal in renewals],
                "max_locks": [renewal.max_lock for renewal in renewals],
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


def _claim_statement(table: str) -> str:
    """Return the statement that claims, or says why it may not.

    An UPDATE whose condition is false takes no row lock, no transaction id and no WAL; an
    INSERT .. ON CONFLICT DO UPDATE would take all three to be refused.

    A claim that was granted once is not granted again: a statement that was held up on its way may
    arrive after the release, and nobody would know of what it got.
    """
    seen = f"FROM seen WHERE {TAKES_OVER}"
    taken_over = (f"EXISTS (SELECT {seen} AND new_window)", f"(SELECT locked_by {seen})")
    return f"""
        WITH seen AS (
            SELECT *, {NEW_WINDOW} AS new_window
            FROM {table} WHERE task_name = %(task_name)s
        ), updated AS (
            UPDATE {table} SET
                started_at = now(),
                locked_until = now() + {LOCK},
                window_start = CASE WHEN {TAKES_OVER} THEN window_start ELSE {FIRED} END,
                window_until = CASE WHEN {TAKES_OVER} THEN window_until
                                    ELSE {FIRED} + {MIN_LOCK} END,
                locked_by = %(replica_id)s,
                claim_id = CASE WHEN {TAKES_OVER} THEN %(takeover_id)s::uuid
                                ELSE %(claim_id)s::uuid END,
                token = {table}.token + 1,
                finished_at = NULL
            WHERE task_name = %(task_name)s AND {NOT_RUNNING} AND NOT {LEAVES_DEAD}
              AND ({NEW_WINDOW} OR {TAKES_OVER}) AND NOT {OWN}
            RETURNING *
        ), inserted AS (
            INSERT INTO {table} (task_name, started_at, locked_until, window_start, window_until,
                                 locked_by, claim_id, token)
            SELECT %(task_name)s, now(), now() + {LOCK}, {FIRED}, {FIRED} + {MIN_LOCK},
                   %(replica_id)s, %(claim_id)s::uuid, 1
            WHERE NOT EXISTS (SELECT FROM seen)
            ON CONFLICT DO NOTHING
            RETURNING *
        )
        SELECT {_answer("true", *taken_over)} FROM updated
        UNION ALL SELECT {_answer("true", "false", "NULL")} FROM inserted
        UNION ALL SELECT {_answer_before("new_window")}
                  FROM seen WHERE NOT EXISTS (SELECT FROM updated)
    """


def _answer_before(new_window: str) -> str:
    """Return the columns of a ``ClaimAnswer`` that grants nothing but what was granted before."""
    left = f"({new_window} AND (NOT {GRANTED_BEFORE} OR {TOOK_OVER}))"
    return _answer(GRANTED_BEFORE, left, f"CASE WHEN {TOOK_OVER} THEN 'unknown' END")


def _answer(granted: str, new_window: str, dead_holder: str) -> str:
    """Return the columns of a ``ClaimAnswer``."""
    return (
        f"{granted}, NOT {NOT_RUNNING}, {new_window}, finished_at IS NULL, window_start,"
        f" {dead_holder}, locked_by, token, locked_until, now(), claim_id"
    )


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


def _renew_statement(table: str) -> str:
    """Return the statement that renews all that a replica holds.

    A claim whose lease has ended stays so, even if nobody has taken it over: its holder has been
    told that it is lost.
    """
    return f"""
        UPDATE {table} AS claim SET
            locked_until = GREATEST(locked_until, LEAST(
                now() + renewal.lease * interval '1 second',
                started_at + renewal.max_lock * interval '1 second'
            ))
        FROM unnest(%(task_names)s::text[], %(claim_ids)s::uuid[], %(leases)s::float8[],
                    %(max_locks)s::float8[])
             AS renewal (task_name, claim_id, lease, max_lock)
        WHERE claim.task_name = renewal.task_name AND claim.claim_id = renewal.claim_id
          AND NOT {NOT_RUNNING}
        RETURNING claim.claim_id, locked_until, now()
    """


def _read_statement(table: str) -> str:
    return f"""
        SELECT task_name, finished_at IS NOT NULL, finished_at IS NULL AND locked_until <= now(),
               window_start, locked_by, locked_until, now(), read_only
        FROM (SELECT current_setting('transaction_read_only')::boolean AS read_only) AS server
        LEFT JOIN {table} ON task_name = ANY(%(task_names)s::text[])
    """
