"""The rows of the job store: what is due is handed out, and users change it. For psycopg.

Each statement is a transaction of its own, and all times are the database's. The claim of a run
time that was handed out is among the lock's own statements: see
:func:`~apscheduler_tasklock._lock.statements.claim_handed_out`.

Three kinds of changes meet in a row. *Hand-outs* set ``handed_id``, under which alone a job can be
moved on. *Runs* move ``next_run_time``. *Users* change what the job is, which makes its
``version`` grow and ends a hand-out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row, dict_row
from sqlalchemy import Table

from apscheduler_tasklock._database.errors import as_unavailable
from apscheduler_tasklock._database.rejections import RUN_HISTORY, Rejections
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.clock import storable
from apscheduler_tasklock._lock.messages import HandOut, JobMove
from apscheduler_tasklock._lock.protocol import (
    HISTORY,
    LOCK_TIMEOUT,
    history_beside,
    note_rejected_history,
)
from apscheduler_tasklock._lock.statements import (
    BRIEFLY,
    CHANGE_ID,
    HANDED_OUT_TO_NOBODY,
    IS_PAUSED,
    MAY_BE_CLAIMED,
    NOT_RUNNING,
    SAFELY,
    Statement,
    for_template,
    many,
    move_on,
    settle_last,
)
from apscheduler_tasklock._values import LONGEST_NAME
from apscheduler_tasklock.schema.table import job_table, literal

# Seconds for which a job is handed out, if that is not renewed.
HAND_OUT = 5.0
# Seconds from one hand-out of a run time to the next, at most, for which it counts as handed out
# all the time. After more than that nobody was there, and it is as late as it is.
LONGEST_BREAK = 90.0

_DEFINITION = {
    "func": "text",
    "trigger": "jsonb",
    "options": "jsonb",
    "arguments": "jsonb",
    "executor": "text",
    "definition_id": "uuid",
    "signature": "text",
}
_AS_TEXT = ("trigger", "options", "arguments")
_TIMES = ("next_run_time", "last_run_time")
_NAMES = ("func", "executor", "signature", "task_name")


def _start(name: str) -> str:
    return f"left({name}, {LONGEST_NAME + 1})"


# One row that Python cannot read must not keep the others from being read: JSON comes as text,
# which is parsed row by row. Of a name that is too long, no more is read than tells that it is.
def _columns(jobs: str) -> str:
    columns = [
        f"job.{name}::text"
        if name in _AS_TEXT
        else f"{_start('job.' + name)} AS {name}"
        if name in _NAMES
        else f"job.{name}"
        for name in ("id", *_DEFINITION, "version", *_TIMES, "ended", "task_name")
    ]
    return ", ".join([*columns, f"({_place(jobs)}) AS place"])


def _place(jobs: str) -> str:
    """Return the query of where the jobs are, which only the tables' owner can change.

    The upgrade has written an id into the table's comment, which a backup keeps.
    """
    return f"""
        SELECT pg_catalog.concat_ws(', ',
                   pg_catalog.quote_literal(pg_catalog.current_database()),
                   pg_catalog.quote_literal(namespace.nspname),
                   pg_catalog.quote_literal(ours.relname),
                   pg_catalog.quote_nullable(comment.description))
        FROM pg_catalog.pg_class AS ours
        JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = ours.relnamespace
        LEFT JOIN pg_catalog.pg_description AS comment
            ON comment.objoid = ours.oid AND comment.objsubid = 0
               AND comment.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid
        WHERE ours.oid = {literal(jobs)}::pg_catalog.regclass::pg_catalog.oid
    """


_EXECUTOR = _start("job.executor")
_RECURS = "trigger ->> 'type'::text IS DISTINCT FROM 'date'"
# An id is looked up by what was read, so it is read whole or not at all. In bytes, which PostgreSQL
# tells without reading a long text.
_HAS_SHORT_ID = f"octet_length(job.id) <= {4 * LONGEST_NAME} AND length(job.id) <= {LONGEST_NAME}"
# A task's name is no longer than this in bytes.
_HAS_SHORT_NAMES = f"octet_length(task_name) <= {LONGEST_NAME} AND {_HAS_SHORT_ID}"
# Of how many recurring jobs the tasks are listed. Whoever can write the table can write any number,
# and a replica has their names in memory, and reads their rows with each look.
MOST_RECURRING = 10_000
# How many due rows are read at a time that are not handed out, and how many bytes of them.
_PAGE, _PAGE_SIZE = 100, 1_000_000
# In the transaction of a user's change, so that whoever listens sees what was changed.
_TOLD = "pg_notify(%(channel)s, '') IS NOT NULL"


@dataclass(frozen=True)
class JobRow:
    """A job, as its row has it.

    :ivar id: its id
    :ivar func: reference of its function
    :ivar trigger: its trigger, as JSON-like data, and so what follows; ``None`` if Python cannot
        read it
    :ivar options: its name, grace time and the like
    :ivar arguments: what its function is called with
    :ivar executor: alias of its executor
    :ivar definition_id: made for the change that wrote all these
    :ivar signature: of all these; ``None`` if rows are not signed
    :ivar version: grows with each change that a user makes
    :ivar next_run_time: when it is due next; ``None`` if it is paused or has ended
    :ivar last_run_time: the run time that was claimed last
    :ivar ended: whether no run time follows the last one; the row is kept until that run is over
    :ivar task_name: the task that it is, if a replica has told it
    :ivar place: where it lies, as PostgreSQL says: database, schema, table, and the table's comment
    """

    id: str
    func: str
    trigger: Any
    options: Any
    arguments: Any
    executor: str
    definition_id: UUID | None
    signature: str | None
    version: int
    next_run_time: datetime | None
    last_run_time: datetime | None
    ended: bool
    task_name: str | None
    place: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> JobRow:
        """Return what was read with the columns of :func:`_columns`."""
        values = {name: row[name] for name in cls.__dataclass_fields__}
        return cls(**values | {name: _parsed(row[name]) for name in _AS_TEXT})


@dataclass(frozen=True)
class HandedOutRow:
    """A job that was handed out.

    :ivar row: the job
    :ivar handed_id: of this hand-out
    :ivar first_late_by: seconds after its run time at which it was first handed out, if that was
        before; if it came due while its task ran by hand, 0
    :ivar paused_until: until when its task was paused last
    """

    row: JobRow
    handed_id: UUID
    first_late_by: float | None
    paused_until: datetime | None


@dataclass(frozen=True)
class Fetched:
    """What a look for due jobs has found.

    :ivar jobs: those that were handed out
    :ivar next_in: seconds until the next job is due; ``None`` if there is none
    :ivar database_time: when it was looked
    """

    jobs: Sequence[HandedOutRow]
    next_in: float | None
    database_time: datetime


@dataclass(frozen=True)
class DueRow:
    """A job that is due and may be claimed.

    :ivar row: the job
    :ivar change_id: of the user's last change; with ``next_run_time`` the fence of its claim
    :ivar paused_until: until when its task was paused last
    """

    row: JobRow
    change_id: UUID
    paused_until: datetime | None


@dataclass(frozen=True)
class DueRows:
    """What a read of due jobs has found.

    :ivar jobs: those that may be claimed, by their run times
    :ivar next_in: seconds until the next job is due; ``None`` if there is none
    :ivar database_time: when it was read
    """

    jobs: Sequence[DueRow]
    next_in: float | None
    database_time: datetime


@dataclass(frozen=True)
class StoredTask:
    """A job of the store that is a task.

    :ivar job_id: the job
    :ivar executor: alias of its executor
    :ivar task_name: its task
    :ivar is_stale: whether the task's row does not know when the job is due, or knows it as due
        although it is paused or was put off
    """

    job_id: str
    executor: str
    task_name: str
    is_stale: bool = False


@dataclass(frozen=True)
class JobChange:
    """What users make of a job: all that its row says of it.

    :ivar columns: the definition, by column; ``trigger``, ``options`` and ``arguments`` as
        JSON-like data
    :ivar next_run_time: when it is due next
    :ivar task_name: its task, if this replica knows
    :ivar defines: whether the columns are written; else nothing of the definition is
    """

    columns: Mapping[str, Any]
    next_run_time: datetime | None
    task_name: str | None
    defines: bool = True

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of its statement."""
        columns: dict[str, object] = dict.fromkeys(_DEFINITION)
        if self.defines:
            columns.update(self.columns)
            for name in _AS_TEXT:
                columns[name] = json.dumps(columns[name], ensure_ascii=False)
        return {
            **columns,
            "next_run_time": storable(self.next_run_time),
            "task_name": self.task_name,
            "defines": self.defines,
        }


class JobRows:
    """The statements for the jobs' table, run on a cursor as of ``raw_cursor``.

    :param table: the task lock table
    :param replica_id: to whom jobs are handed out, shown to operators
    :param history: how many runs of each task the run history keeps; 0: none
    :param timings: has how long a job that has ended is kept
    :param rejections: is told if PostgreSQL rejects the history
    :ivar channel: on which users' changes are told
    """

    def __init__(
        self,
        table: Table,
        replica_id: str,
        history: int = HISTORY,
        timings: Timings | None = None,
        rejections: Rejections | None = None,
    ) -> None:
        self._rejections = rejections or Rejections()
        self._table = table
        ended_kept = (timings or Timings()).ended_kept
        jobs, lock = for_template(job_table(table)), for_template(table)
        self.channel = channel_of(table)
        self._own: dict[str, object] = {
            "replica_id": replica_id,
            "channel": self.channel,
            "lock_timeout": f"{round(LOCK_TIMEOUT * 1000)}ms",
        }
        self._fetch = Statement(_fetch(jobs, lock))
        self._read_due = Statement(_read_due(jobs, lock))
        runs = history_beside(table, history)
        self._move_on = Statement(move_on(lock, jobs=jobs))
        self._move_on_noted = None if runs is None else Statement(move_on(lock, runs, jobs=jobs))
        self._due = Statement(_due(jobs, lock))
        self._renew = Statement(f"""
            UPDATE {jobs} SET handed_until = now() + interval '{HAND_OUT} seconds'
            WHERE handed_id = ANY(%(handed_ids)s::uuid[]) AND {BRIEFLY}
            RETURNING handed_id
        """)
        self._settle = Statement(f"""
            UPDATE {jobs} SET
                next_run_time = %(following)s::timestamptz,
                ended = %(following)s::timestamptz IS NULL,
                last_run_time = CASE WHEN %(runs)s::boolean THEN %(run_time)s::timestamptz
                                     ELSE last_run_time END,
                {HANDED_OUT_TO_NOBODY}
            WHERE id = %(job_id)s AND handed_id = %(handed_id)s::uuid AND {SAFELY}
            RETURNING id
        """)
        self._settle_last: Statement | None = None
        if runs is not None:
            self._settle_last = Statement(settle_last(lock, runs, jobs=jobs))
        self._give_back = Statement(f"""
            UPDATE {jobs} SET handed_id = NULL, handed_to = NULL, handed_until = now(),
                first_handed_at = CASE WHEN NOT %(waits)s::boolean THEN first_handed_at END
            WHERE handed_id = ANY(%(handed_ids)s::uuid[]) AND {BRIEFLY}
        """)
        self._sweep = Statement(f"""
            DELETE FROM {jobs} AS job
            WHERE ended AND changed_at < now() - interval '{ended_kept} seconds' AND NOT EXISTS (
                SELECT FROM {lock} AS lock
                WHERE task_name = job.task_name AND finished_at IS NULL AND run_until > now())
        """)
        # By way of the jobs: the tasks of jobs that ran once are kept for days, with their history.
        self._dead_runs = Statement(f"""
            WITH begun AS MATERIALIZED (
                SELECT id AS job_id, {_EXECUTOR} AS executor, task_name FROM {jobs} AS job
                WHERE {_HAS_SHORT_NAMES} AND (last_run_time IS NOT NULL OR {_RECURS})
            )
            SELECT begun.* FROM begun, LATERAL (
                SELECT FROM {lock} AS lock
                WHERE lock.task_name = begun.task_name AND lock.finished_at IS NULL
                      AND lock.locked_until <= now() AND (lock.failover OR lock.handed_over)
                OFFSET 0
            ) AS dead
        """)
        self._place = Statement(f"SELECT ({_place(jobs)}) AS place")
        self._read = Statement(f"""
            SELECT {_columns(jobs)} FROM {jobs} AS job
            WHERE (%(job_id)s::text IS NULL OR id = %(job_id)s::text) AND ended = %(ended)s::boolean
            ORDER BY next_run_time NULLS LAST, id
        """)
        self._now = Statement("SELECT now() AS database_time")
        shortly_before_due = "lock.due_at - interval '1 minute'"
        # What a user has put off is stale; what was missed is overdue.
        self._recurring = Statement(f"""
            SELECT job.id AS job_id, {_EXECUTOR} AS executor, task_name,
                   CASE WHEN lock.task_name IS NULL THEN true
                        WHEN lock.finished_at IS NULL THEN false
                        WHEN job.next_run_time IS NULL THEN lock.due_at IS NOT NULL
                        WHEN lock.due_at IS NULL THEN true
                        ELSE job.next_run_time > lock.overdue_at
                             AND (lock.due_at > now()
                                  OR job.changed_at > {shortly_before_due}
                                  OR (job.changed_at > lock.started_at
                                      AND lock.finished_at > {shortly_before_due}))
                   END AS is_stale
            FROM (
                SELECT * FROM {jobs} AS job
                WHERE NOT ended AND {_HAS_SHORT_NAMES} AND {_RECURS}
                ORDER BY next_run_time NULLS LAST, id LIMIT {MOST_RECURRING + 1}
            ) AS job LEFT JOIN {lock} AS lock USING (task_name)
        """)
        self._add = Statement(_add(jobs))
        self._added_id = Statement(f"SELECT added_id FROM {jobs} WHERE id = %(job_id)s")
        self._change = Statement(_change(jobs))
        self._changed_id = Statement(f"SELECT changed_id FROM {jobs} WHERE id = %(job_id)s")
        self._remove = Statement(_remove(jobs, "id = %(job_id)s"))
        self._remove_all = Statement(_remove(jobs, "true"))

    def fetch(
        self,
        cursor: Any,
        free: Mapping[str, int],
        *,
        not_here: Sequence[str] = (),
        not_these: Sequence[str] = (),
        since: datetime | None = None,
        among: Sequence[str] = (),
    ) -> Fetched:
        """Hand out jobs that are due, whose tasks are neither running nor paused.

        :param free: the executors that there are, by alias, and how many workers each has free
        :param not_here: references of functions that cannot be imported here
        :param not_these: ids of jobs that are not wanted here now, as they run already
        :param since: after which they have come due; ``None``: whenever
        :param among: ids of jobs that are wanted although they have come due before
        """
        executors = [{"executor": alias, "free": count} for alias, count in free.items()]
        parameters = {
            "executors": json.dumps(executors, ensure_ascii=False),
            "not_here": list(not_here),
            "not_these": list(not_these),
            "since": since,
            "among": list(among),
        }
        rows = self._rows(cursor, self._fetch, parameters)
        next_in, database_time = rows[0]["next_in"], rows[0]["database_time"]
        jobs = [_handed_out(row) for row in rows if row["id"] is not None]
        return Fetched(jobs, next_in, database_time)

    def due(
        self,
        cursor: Any,
        executors: Sequence[str],
        until: datetime,
        after: tuple[datetime, str] | None,
        *,
        not_here: Sequence[str] = (),
    ) -> list[JobRow]:
        """Return some jobs that could be handed out, and are not; the oldest first.

        :param until: when they have come due at the latest
        :param after: next run time and id of the one before them; ``None``: from the first one on
        :param not_here: as of :meth:`fetch`
        """
        after_time, after_id = after or (None, None)
        parameters = {
            "aliases": list(executors),
            "not_here": list(not_here),
            "until": until,
            "after_time": after_time,
            "after_id": after_id,
        }
        return [JobRow.of(row) for row in self._rows(cursor, self._due, parameters)]

    def read_due(
        self,
        cursor: Any,
        most: Mapping[str, int],
        *,
        stable: bool = True,
        not_here: Sequence[str] = (),
        not_these: Sequence[str] = (),
    ) -> DueRows:
        """Read jobs that are due and may be claimed. It locks and writes nothing.

        :param most: the executors that there are, by alias, and how many jobs are wanted of each
        :param stable: whether the rows can be believed, as of ``ReadTimes``
        :param not_here: references of functions that cannot be imported here
        :param not_these: ids of jobs that are not wanted here now
        """
        executors = [{"executor": alias, "most": count} for alias, count in most.items()]
        parameters = {
            "executors": json.dumps(executors, ensure_ascii=False),
            "stable": stable,
            "not_here": list(not_here),
            "not_these": list(not_these),
        }
        rows = self._rows(cursor, self._read_due, parameters)
        jobs = [
            DueRow(JobRow.of(row), row["change_id"], row["paused_until"])
            for row in rows
            if row["id"] is not None
        ]
        return DueRows(jobs, rows[0]["next_in"], rows[0]["database_time"])

    def move_on(self, cursor: Any, moves: Mapping[JobMove, str], *, run: bool = False) -> set[str]:
        """Move jobs on without a claim; return the ids of those that were as they were read.

        :param moves: each with the name of its task
        :param run: whether the run times are about to run, without a lock; else they were missed,
            or fell into a pause. What is missed as the last one has an entry in the run history.
        """
        asked = many(
            {**move.parameters, "task_name": name, "runs": run} for move, name in moves.items()
        )
        statement = self._move_on_noted
        if statement is None or run or self._rejections.is_left_out(RUN_HISTORY):
            return self._moved(cursor, self._move_on, asked)
        try:
            moved = self._moved(cursor, statement, asked)
        except psycopg.DatabaseError as error:  # the history depends on a grant; jobs do not
            if as_unavailable(error) is not None:
                raise
            moved = self._moved(cursor, self._move_on, asked)
            note_rejected_history(cursor, self._table, self._rejections, RUN_HISTORY, error)
            return moved
        self._rejections.end(RUN_HISTORY)
        return moved

    def _moved(self, cursor: Any, statement: Statement, asked: Mapping[str, object]) -> set[str]:
        return {row["job_id"] for row in self._rows(cursor, statement, asked)}

    def renew(self, cursor: Any, handed_ids: Sequence[UUID]) -> set[UUID]:
        """Let hand-outs stand for some seconds more; return those that still stood."""
        rows = self._rows(cursor, self._renew, {"handed_ids": list(handed_ids)})
        return {row["handed_id"] for row in rows}

    def settle(self, cursor: Any, hand_out: HandOut, *, runs: bool = False) -> bool:
        """Move a job on without a claim; tell whether it was still handed out.

        :param runs: whether it is about to run, without a lock; else it was missed
        """
        parameters = {**hand_out.parameters, "run_time": hand_out.run_time, "runs": runs}
        return bool(self._execute(cursor, self._settle, parameters).rowcount)

    def settle_missed(self, cursor: Any, hand_out: HandOut, task_name: str) -> bool:
        """Move a job on whose run time was missed; tell whether it was still handed out.

        If that was its last one, it has an entry in the run history.
        """
        if (
            hand_out.following is not None
            or self._settle_last is None
            or self._rejections.is_left_out(RUN_HISTORY)
        ):
            return self.settle(cursor, hand_out)
        parameters = {
            **hand_out.parameters,
            "run_time": hand_out.run_time,
            "task_name": task_name,
        }
        try:
            settled = bool(self._execute(cursor, self._settle_last, parameters).rowcount)
        except psycopg.DatabaseError as error:  # the history depends on a grant; jobs do not
            if as_unavailable(error) is not None:
                raise
            settled = self.settle(cursor, hand_out)
            note_rejected_history(cursor, self._table, self._rejections, RUN_HISTORY, error)
            return settled
        self._rejections.end(RUN_HISTORY)
        return settled

    def give_back(self, cursor: Any, handed_ids: Sequence[UUID], *, waits: bool = False) -> None:
        """End hand-outs, so that the run times are handed out again.

        :param waits: whether they wait for the end of a run: how late they are then is counted from
            the run time. Else it is no misfire if the first hand-out came in time.
        """
        parameters = {"handed_ids": list(handed_ids), "waits": waits}
        self._execute(cursor, self._give_back, parameters)

    def sweep(self, cursor: Any) -> int:
        """Delete jobs that have ended and whose last run is over; return how many."""
        return int(self._execute(cursor, self._sweep, {}).rowcount)

    def dead_runs(self, cursor: Any) -> list[StoredTask]:
        """Return the runs that died or were handed over, and are to be run again."""
        cursor.row_factory = class_row(StoredTask)
        found: list[StoredTask] = self._execute(cursor, self._dead_runs, {}).fetchall()
        return found

    def recurring(self, cursor: Any) -> list[StoredTask]:
        """Return the tasks of jobs that come again, whichever replica has added them.

        They are those of the jobs that are due next, and one more than ``MOST_RECURRING`` if there
        are more than that.
        """
        cursor.row_factory = class_row(StoredTask)
        found: list[StoredTask] = self._execute(cursor, self._recurring, {}).fetchall()
        return found

    def now(self, cursor: Any) -> datetime:
        """Return the database's time."""
        database_time: datetime = self._rows(cursor, self._now, {})[0]["database_time"]
        return database_time

    def place(self, cursor: Any) -> str:
        """Return where the jobs are; see :class:`JobRow`."""
        place: str = self._rows(cursor, self._place, {})[0]["place"]
        return place

    def read(self, cursor: Any, job_id: str, *, ended: bool = False) -> JobRow | None:
        """Return a job.

        :param ended: whether one is wanted that has ended, or else one that has not
        """
        rows = self._rows(cursor, self._read, {"job_id": job_id, "ended": ended})
        return JobRow.of(rows[0]) if rows else None

    def read_all(self, cursor: Any) -> list[JobRow]:
        """Return all jobs that have not ended, by their next run times; paused ones last."""
        rows = self._rows(cursor, self._read, {"job_id": None, "ended": False})
        return [JobRow.of(row) for row in rows]

    def add(self, cursor: Any, job_id: str, change: JobChange, added_id: UUID) -> bool:
        """Add a job; tell whether its id was free.

        :param added_id: made for this call: asking again with it, since the answer was lost, is no
            conflict with what the first one added
        """
        parameters = {**change.parameters, "job_id": job_id, "added_id": added_id}
        if self._execute(cursor, self._add, parameters).rowcount:
            return True
        found = self._rows(cursor, self._added_id, {"job_id": job_id})
        return bool(found) and found[0]["added_id"] == added_id

    def change(
        self,
        cursor: Any,
        job_id: str,
        version: int,
        change: JobChange,
        changed_id: UUID,
        *,
        moves: bool,
        found: JobRow | None = None,
    ) -> bool:
        """Change a job that has this version; tell whether it had. It ends a hand-out.

        :param changed_id: made for this call: asking again with it, since the answer was lost,
            changes nothing a second time
        :param moves: whether the next run time is changed
        :param found: the row from which the next run time was computed, if it was: a job that has
            been moved on since is not changed
        """
        parameters = {
            **change.parameters,
            "job_id": job_id,
            "version": version,
            "changed_id": changed_id,
            "moves": moves,
            "is_computed": found is not None,
            "found_time": found and found.next_run_time,
        }
        if self._execute(cursor, self._change, parameters).rowcount:
            return True
        rows = self._rows(cursor, self._changed_id, {"job_id": job_id})
        return bool(rows) and rows[0]["changed_id"] == changed_id

    def remove(self, cursor: Any, job_id: str) -> bool:
        """Remove a job; tell whether there was one."""
        return bool(self._execute(cursor, self._remove, {"job_id": job_id}).rowcount)

    def remove_all(self, cursor: Any) -> int:
        """Remove all jobs, of all replicas; return how many there were."""
        return int(self._execute(cursor, self._remove_all, {}).rowcount)

    def _execute(self, cursor: Any, statement: Statement, parameters: Mapping[str, object]) -> Any:
        return cursor.execute(statement.query, statement.arguments({**self._own, **parameters}))

    def _rows(
        self, cursor: Any, statement: Statement, parameters: Mapping[str, object]
    ) -> list[dict[str, Any]]:
        cursor.row_factory = dict_row
        rows: list[dict[str, Any]] = self._execute(cursor, statement, parameters).fetchall()
        return rows


def channel_of(table: Table) -> str:
    """Return the channel on which changes of jobs are told, by their task lock table.

    It lacks the schema, which some replicas may spell out, and others not.
    """
    return str(job_table(table).name)


def _handed_out(row: dict[str, Any]) -> HandedOutRow:
    names = ("handed_id", "first_late_by", "paused_until")
    return HandedOutRow(JobRow.of(row), **{name: row[name] for name in names})


def _parsed(text: str) -> Any:
    """Return what JSON says; ``None`` if Python cannot read what PostgreSQL can."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # such as a number of 5,000 digits
        return None


# Whether a job that is due may be handed out.
_IS_FREE = f"""
    (job.handed_until IS NULL OR job.handed_until <= now())
    AND NOT job.func = ANY(%(not_here)s::text[]) AND {_HAS_SHORT_ID}
    AND (lock.task_name IS NULL
         OR ({NOT_RUNNING} AND NOT {IS_PAUSED}))"""


def _due(jobs: str, lock: str) -> str:
    """Return the statement that reads a page of what is due. It writes nothing."""
    order = "next_run_time, id ROWS UNBOUNDED PRECEDING"
    return f"""
        WITH due AS (
            SELECT job.*,
                   pg_catalog.octet_length(trigger::text) + pg_catalog.octet_length(options::text)
                       + pg_catalog.octet_length(arguments::text) AS size
            FROM {jobs} AS job LEFT JOIN {lock} AS lock USING (task_name)
            WHERE job.executor = ANY(%(aliases)s::text[])
                  AND job.next_run_time <= %(until)s::timestamptz AND {_IS_FREE}
                  AND (%(after_time)s::timestamptz IS NULL
                       OR (next_run_time, id) > (%(after_time)s::timestamptz, %(after_id)s::text))
            ORDER BY next_run_time, id LIMIT {_PAGE}
        ), page AS (
            SELECT due.*, sum(size) OVER (ORDER BY {order}) - size AS size_before FROM due
        )
        SELECT {_columns(jobs)} FROM page AS job WHERE size_before < {_PAGE_SIZE}
        ORDER BY next_run_time, id
    """


def _read_due(jobs: str, lock: str) -> str:
    """Return the statement that reads due jobs that may be claimed, in the order of their index.

    It reads no more bytes of large rows than of a page.
    """
    order = "next_run_time, id ROWS UNBOUNDED PRECEDING"
    return f"""
        WITH here AS (
            SELECT * FROM json_to_recordset(%(executors)s::json) AS _ (executor text, most integer)
        ), due AS (
            SELECT due.* FROM here, LATERAL (
                SELECT job.*, {CHANGE_ID} AS change_id, lock.paused_until,
                       pg_catalog.octet_length(trigger::text)
                           + pg_catalog.octet_length(options::text)
                           + pg_catalog.octet_length(arguments::text) AS size
                FROM {jobs} AS job LEFT JOIN {lock} AS lock ON lock.task_name = job.task_name
                WHERE job.executor = here.executor AND job.next_run_time <= now()
                      AND NOT job.func = ANY(%(not_here)s::text[])
                      AND NOT job.id = ANY(%(not_these)s::text[]) AND {_HAS_SHORT_ID}
                      AND (lock.task_name IS NULL OR {MAY_BE_CLAIMED})
                ORDER BY job.next_run_time, job.id LIMIT here.most
            ) AS due
        ), page AS (
            SELECT due.*, sum(size) OVER (ORDER BY {order}) - size AS size_before FROM due
        ), next AS (
            SELECT min(first.next_run_time) AS run_time FROM here, LATERAL (
                SELECT next_run_time FROM {jobs} AS job
                WHERE job.executor = here.executor AND next_run_time > now()
                ORDER BY next_run_time LIMIT 1
            ) AS first
        )
        SELECT now() AS database_time,
               extract(epoch FROM next.run_time - now())::float8 AS next_in,
               {_columns(jobs)}, job.change_id, job.paused_until
        FROM next LEFT JOIN page AS job ON size_before < {_PAGE_SIZE}
        ORDER BY job.next_run_time, job.id
    """


def _fetch(jobs: str, lock: str) -> str:
    """Return the statement that hands out due jobs. With nothing due it writes nothing."""
    recently = f"> now() - interval '{LONGEST_BREAK} seconds'"
    first_handed_at = f"""
        CASE WHEN COALESCE(job.handed_until {recently}, true) THEN job.first_handed_at END"""
    stood_against_manual_run = f"""
        lock.kind = 'manual' AND lock.finished_at {recently}
        AND job.next_run_time BETWEEN lock.started_at AND lock.finished_at"""
    return f"""
        WITH here AS (
            SELECT * FROM json_to_recordset(%(executors)s::json) AS _ (executor text, free integer)
        ), due AS (
            SELECT due.* FROM here, LATERAL (
                SELECT job.id, lock.paused_until,
                       {first_handed_at} AS first_handed_at,
                       CASE WHEN {stood_against_manual_run} THEN 0 ELSE
                            extract(epoch FROM {first_handed_at} - job.next_run_time) END::float8
                           AS first_late_by
                FROM {jobs} AS job LEFT JOIN {lock} AS lock USING (task_name)
                WHERE job.executor = here.executor AND job.next_run_time <= now()
                      AND (%(since)s::timestamptz IS NULL
                           OR job.next_run_time > %(since)s::timestamptz
                           OR job.id = ANY(%(among)s::text[]))
                      AND NOT job.id = ANY(%(not_these)s::text[]) AND {_IS_FREE}
                ORDER BY job.next_run_time LIMIT here.free
                FOR NO KEY UPDATE OF job SKIP LOCKED
            ) AS due
        ), handed AS (
            UPDATE {jobs} AS job SET
                handed_id = gen_random_uuid(), handed_to = %(replica_id)s,
                handed_until = now() + interval '{HAND_OUT} seconds',
                first_handed_at = COALESCE(due.first_handed_at, now())
            FROM due WHERE job.id = due.id
            RETURNING {_columns(jobs)}, job.handed_id, due.paused_until, due.first_late_by
        ), next AS (
            SELECT min(first.next_run_time) AS run_time FROM here, LATERAL (
                SELECT next_run_time FROM {jobs} AS job
                WHERE job.executor = here.executor AND next_run_time > now()
                ORDER BY next_run_time LIMIT 1
            ) AS first
        )
        SELECT now() AS database_time,
               extract(epoch FROM next.run_time - now())::float8 AS next_in,
               handed.*
        FROM next LEFT JOIN handed ON true ORDER BY handed.next_run_time
    """


def _add(jobs: str) -> str:
    """Return the statement that adds a job, also in place of one that has ended."""
    values = {
        "id": "%(job_id)s::text",
        "func": "%(func)s::text",
        "trigger": "%(trigger)s::jsonb",
        "options": "%(options)s::jsonb",
        "arguments": "%(arguments)s::jsonb",
        "executor": "%(executor)s::text",
        "definition_id": "%(definition_id)s::uuid",
        "signature": "%(signature)s::text",
        "version": "1",
        "added_id": "%(added_id)s::uuid",
        "changed_at": "now()",
        "next_run_time": "%(next_run_time)s::timestamptz",
        "ended": "false",
        "task_name": "%(task_name)s::text",
    }
    replaced = {name: f"excluded.{name}" for name in values if name != "id"}
    replaced |= {"version": "job.version + 1", "last_run_time": "NULL", "changed_id": "NULL"}
    return f"""
        WITH added AS (
            INSERT INTO {jobs} AS job ({", ".join(values)}) VALUES ({", ".join(values.values())})
            ON CONFLICT (id) DO UPDATE SET
                {", ".join(f"{name} = {value}" for name, value in replaced.items())}
            WHERE job.ended AND job.added_id <> excluded.added_id
            RETURNING id
        )
        SELECT id FROM added WHERE {_TOLD}
    """


def _change(jobs: str) -> str:
    """Return the statement that changes a job of a version."""
    defined = ", ".join(
        f"""{name} = CASE WHEN %(defines)s::boolean
                          THEN %({name})s::{kind} ELSE {name} END"""
        for name, kind in _DEFINITION.items()
    )
    return f"""
        WITH changed AS (
            UPDATE {jobs} SET {defined}, version = version + 1,
                task_name = COALESCE(%(task_name)s::text, task_name),
                changed_id = %(changed_id)s::uuid, changed_at = now(),
                next_run_time = CASE WHEN %(moves)s::boolean THEN %(next_run_time)s::timestamptz
                                     ELSE next_run_time END,
                handed_id = NULL, handed_to = NULL,
                handed_until = CASE WHEN handed_until > now() THEN now() ELSE handed_until END,
                first_handed_at = CASE WHEN NOT %(moves)s::boolean THEN first_handed_at END
            WHERE id = %(job_id)s AND version = %(version)s::bigint AND NOT ended
                  AND (NOT %(is_computed)s::boolean
                       OR next_run_time IS NOT DISTINCT FROM %(found_time)s::timestamptz)
            RETURNING id
        )
        SELECT id FROM changed WHERE {_TOLD}
    """


def _remove(jobs: str, which: str) -> str:
    """Return the statement that removes jobs. One that has ended is none for users."""
    return f"""
        WITH removed AS (DELETE FROM {jobs} WHERE {which} AND NOT ended RETURNING id)
        SELECT id FROM removed WHERE {_TOLD}
    """
