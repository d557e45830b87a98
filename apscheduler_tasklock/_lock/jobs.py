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
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row, dict_row
from sqlalchemy import Table

from apscheduler_tasklock._lock.protocol import (
    HISTORY,
    LOCK_TIMEOUT,
    HandOut,
    HistorySettings,
    Statement,
    for_template,
)
from apscheduler_tasklock._lock.statements import NOT_RUNNING, SAFELY, settle_last
from apscheduler_tasklock.schema.table import LONGEST_IDENTIFIER, job_table

logger = logging.getLogger(__name__)

# Seconds for which a job is handed out, if that is not renewed.
HAND_OUT = 5.0
# Seconds after the end of a hand-out for which its replica counts as one that died on the way: what
# it was to run is late by nature. Later than that, nobody was there, and it is a misfire.
LATE_BY_NATURE = 60.0

_DEFINITION = ("func", "trigger", "options", "arguments", "executor", "signature")
_COLUMNS = ", ".join(
    f"job.{name}"
    for name in (
        "id",
        *_DEFINITION,
        "version",
        "next_run_time",
        "last_run_time",
        "ended",
        "task_name",
    )
)
_NOT_HANDED_OUT = "handed_id = NULL, handed_to = NULL, handed_until = NULL"
# Neither waits long for a row that somebody has locked. See statements.py.
_BRIEFLY = "set_config('lock_timeout', %(lock_timeout)s, true) IS NOT NULL"
# In the transaction of a user's change, so that whoever listens sees what was changed.
_TOLD = "pg_notify(%(channel)s, '') IS NOT NULL"


@dataclass(frozen=True)
class JobRow:
    """A job, as its row has it.

    :ivar id: its id
    :ivar func: reference of its function
    :ivar trigger: its trigger, as JSON-like data, and so what follows
    :ivar options: its name, grace time and the like
    :ivar arguments: what its function is called with
    :ivar executor: alias of its executor
    :ivar signature: of all these; ``None`` if rows are not signed
    :ivar version: grows with each change that a user makes
    :ivar next_run_time: when it is due next; ``None`` if it is paused or has ended
    :ivar last_run_time: the run time that was claimed last
    :ivar ended: whether no run time follows the last one; the row is kept until that run is over
    :ivar task_name: the task that it is, if a replica has told it
    """

    id: str
    func: str
    trigger: Any
    options: Any
    arguments: Any
    executor: str
    signature: str | None
    version: int
    next_run_time: datetime | None
    last_run_time: datetime | None
    ended: bool
    task_name: str | None


@dataclass(frozen=True)
class HandedOutRow:
    """A job that was handed out.

    :ivar row: the job
    :ivar handed_id: of this hand-out
    :ivar is_late_by_nature: whether it is late, and yet no misfire: it had been handed out in time,
        and that has ended; or it came due while its task ran by hand
    :ivar paused_until: until when its task was paused last
    """

    row: JobRow
    handed_id: UUID
    is_late_by_nature: bool
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
class StoredTask:
    """A job of the store that is a task.

    :ivar job_id: the job
    :ivar executor: alias of its executor
    :ivar task_name: its task
    """

    job_id: str
    executor: str
    task_name: str


@dataclass(frozen=True)
class JobChange:
    """What users make of a job: all that its row says of it.

    :ivar columns: the definition, by column; ``trigger``, ``options`` and ``arguments`` as
        JSON-like data
    :ivar next_run_time: when it is due next
    :ivar task_name: its task, if this replica knows
    """

    columns: Mapping[str, Any]
    next_run_time: datetime | None
    task_name: str | None

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of its statement."""
        as_json = {
            name: json.dumps(self.columns[name], ensure_ascii=False)
            for name in ("trigger", "options", "arguments")
        }
        return {
            **self.columns,
            **as_json,
            "next_run_time": self.next_run_time,
            "task_name": self.task_name,
        }


class JobRows:
    """The statements for the jobs' table, run on a cursor as of ``raw_cursor``.

    :param table: the task lock table
    :param replica_id: to whom jobs are handed out, shown to operators
    :param history: which runs the run history keeps
    :ivar channel: on which users' changes are told
    """

    def __init__(self, table: Table, replica_id: str, history: HistorySettings = HISTORY) -> None:
        jobs, lock = for_template(job_table(table)), for_template(table)
        # Which has no more bytes than any name of PostgreSQL's.
        name = job_table(table).fullname.encode()[:LONGEST_IDENTIFIER]
        self.channel = name.decode(errors="ignore")
        self._own: dict[str, object] = {
            "replica_id": replica_id,
            "channel": self.channel,
            "lock_timeout": f"{round(LOCK_TIMEOUT * 1000)}ms",
        }
        self._fetch = Statement(_fetch(jobs, lock))
        self._renew = Statement(f"""
            UPDATE {jobs} SET handed_until = now() + interval '{HAND_OUT} seconds'
            WHERE handed_id = ANY(%(handed_ids)s::uuid[]) AND {_BRIEFLY}
            RETURNING handed_id
        """)
        self._settle = Statement(f"""
            UPDATE {jobs} SET
                next_run_time = %(following)s::timestamptz,
                ended = %(following)s::timestamptz IS NULL,
                last_run_time = CASE WHEN %(runs)s::boolean THEN %(run_time)s::timestamptz
                                     ELSE last_run_time END,
                {_NOT_HANDED_OUT}
            WHERE id = %(job_id)s AND handed_id = %(handed_id)s::uuid AND {SAFELY}
            RETURNING id
        """)
        runs = history.of(table)
        self._settle_last: Statement | None = None
        if runs is not None:
            self._settle_last = Statement(settle_last(lock, runs, jobs=jobs))
        self._give_back = Statement(f"""
            UPDATE {jobs} SET handed_id = NULL, handed_to = NULL,
                handed_until = CASE WHEN %(is_late)s::boolean THEN now() END
            WHERE handed_id = ANY(%(handed_ids)s::uuid[]) AND {_BRIEFLY}
        """)
        self._sweep = Statement(f"""
            DELETE FROM {jobs} AS job WHERE ended AND NOT EXISTS (
                SELECT FROM {lock} AS lock
                WHERE task_name = job.task_name AND finished_at IS NULL AND run_until > now())
        """)
        self._dead_runs = Statement(f"""
            SELECT job.id AS job_id, job.executor, task_name
            FROM {lock} AS lock JOIN {jobs} AS job USING (task_name)
            WHERE lock.finished_at IS NULL AND lock.locked_until <= now()
                  AND (lock.failover OR lock.handed_over)
        """)
        self._read = Statement(f"""
            SELECT {_COLUMNS} FROM {jobs} AS job
            WHERE (%(job_id)s::text IS NULL OR id = %(job_id)s::text) AND ended = %(ended)s::boolean
            ORDER BY next_run_time NULLS LAST, id
        """)
        self._recurring = Statement(f"""
            SELECT id AS job_id, executor, task_name FROM {jobs}
            WHERE NOT ended AND task_name IS NOT NULL AND trigger->>'type' <> 'date'
        """)
        self._add = Statement(_add(jobs))
        self._added_id = Statement(f"SELECT added_id FROM {jobs} WHERE id = %(job_id)s")
        self._change = Statement(_change(jobs))
        self._remove = Statement(_remove(jobs, "id = %(job_id)s"))
        self._remove_all = Statement(_remove(jobs, "true"))

    def fetch(
        self,
        cursor: Any,
        free: Mapping[str, int],
        *,
        not_here: Sequence[str] = (),
        not_these: Sequence[str] = (),
    ) -> Fetched:
        """Hand out jobs that are due, whose tasks are neither running nor paused.

        :param free: the executors that there are, by alias, and how many workers each has free
        :param not_here: references of functions that cannot be imported here
        :param not_these: ids of jobs that are not wanted here now, as they run already
        """
        executors = [{"executor": alias, "free": count} for alias, count in free.items()]
        parameters = {
            "executors": json.dumps(executors, ensure_ascii=False),
            "not_here": list(not_here),
            "not_these": list(not_these),
        }
        rows = self._rows(cursor, self._fetch, parameters)
        next_in, database_time = rows[0]["next_in"], rows[0]["database_time"]
        jobs = [_handed_out(row) for row in rows if row["id"] is not None]
        return Fetched(jobs, next_in, database_time)

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
        if hand_out.following is not None or self._settle_last is None:
            return self.settle(cursor, hand_out)
        parameters = {
            **hand_out.parameters,
            "run_time": hand_out.run_time,
            "task_name": task_name,
        }
        try:
            return bool(self._execute(cursor, self._settle_last, parameters).rowcount)
        except psycopg.ProgrammingError as error:  # the history depends on a grant; jobs do not
            logger.info("The run history lacks what was missed, as PostgreSQL says: %s", error)
            self._settle_last = None
            return self.settle(cursor, hand_out)

    def give_back(self, cursor: Any, handed_ids: Sequence[UUID], *, is_late: bool = False) -> None:
        """End hand-outs, so that the run times are handed out again.

        :param is_late: whether the replica has made them late, so that they are no misfires
        """
        parameters = {"handed_ids": list(handed_ids), "is_late": is_late}
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
        """Return the tasks of all jobs that come again, whichever replica has added them."""
        cursor.row_factory = class_row(StoredTask)
        found: list[StoredTask] = self._execute(cursor, self._recurring, {}).fetchall()
        return found

    def read(self, cursor: Any, job_id: str, *, ended: bool = False) -> JobRow | None:
        """Return a job.

        :param ended: whether one is wanted that has ended, or else one that has not
        """
        cursor.row_factory = class_row(JobRow)
        parameters = {"job_id": job_id, "ended": ended}
        row: JobRow | None = self._execute(cursor, self._read, parameters).fetchone()
        return row

    def read_all(self, cursor: Any) -> list[JobRow]:
        """Return all jobs that have not ended, by their next run times; paused ones last."""
        cursor.row_factory = class_row(JobRow)
        parameters = {"job_id": None, "ended": False}
        rows: list[JobRow] = self._execute(cursor, self._read, parameters).fetchall()
        return rows

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
        self, cursor: Any, job_id: str, version: int, change: JobChange, *, moves: bool
    ) -> bool:
        """Change a job that has this version; tell whether it had. It ends a hand-out.

        :param moves: whether the next run time is changed
        """
        parameters = {**change.parameters, "job_id": job_id, "version": version, "moves": moves}
        return bool(self._execute(cursor, self._change, parameters).rowcount)

    def remove(self, cursor: Any, job_id: str) -> bool:
        """Remove a job; tell whether there was one."""
        return bool(self._execute(cursor, self._remove, {"job_id": job_id}).rowcount)

    def remove_all(self, cursor: Any) -> int:
        """Remove all jobs, of all replicas; return how many there were."""
        return int(self._execute(cursor, self._remove_all, {}).rowcount)

    def _execute(self, cursor: Any, statement: Statement, parameters: Mapping[str, object]) -> Any:
        return cursor.execute(statement.text, statement.arguments({**self._own, **parameters}))

    def _rows(
        self, cursor: Any, statement: Statement, parameters: Mapping[str, object]
    ) -> list[dict[str, Any]]:
        cursor.row_factory = dict_row
        rows: list[dict[str, Any]] = self._execute(cursor, statement, parameters).fetchall()
        return rows


def _handed_out(row: dict[str, Any]) -> HandedOutRow:
    job = {name: row[name] for name in JobRow.__dataclass_fields__}
    names = ("handed_id", "is_late_by_nature", "paused_until")
    return HandedOutRow(JobRow(**job), **{name: row[name] for name in names})


def _fetch(jobs: str, lock: str) -> str:
    """Return the statement that hands out due jobs. With nothing due it writes nothing."""
    recently = f"> now() - interval '{LATE_BY_NATURE} seconds'"
    late = f"""COALESCE(job.handed_until {recently}, false)
               OR COALESCE(lock.kind = 'manual' AND lock.finished_at {recently}
                           AND job.next_run_time BETWEEN lock.started_at AND lock.finished_at,
                           false)"""
    may_run = f"""lock.task_name IS NULL OR (
        {NOT_RUNNING} AND COALESCE(lock.paused_until <= now(), true))"""
    return f"""
        WITH here AS (
            SELECT * FROM json_to_recordset(%(executors)s::json) AS _ (executor text, free integer)
        ), due AS (
            SELECT due.* FROM here, LATERAL (
                SELECT job.id, lock.paused_until,
                       {late} AS is_late_by_nature
                FROM {jobs} AS job LEFT JOIN {lock} AS lock USING (task_name)
                WHERE job.executor = here.executor AND job.next_run_time <= now()
                      AND (job.handed_until IS NULL OR job.handed_until <= now())
                      AND NOT job.func = ANY(%(not_here)s::text[])
                      AND NOT job.id = ANY(%(not_these)s::text[]) AND ({may_run})
                ORDER BY job.next_run_time LIMIT here.free
                FOR NO KEY UPDATE OF job SKIP LOCKED
            ) AS due
        ), handed AS (
            UPDATE {jobs} AS job SET
                handed_id = gen_random_uuid(), handed_to = %(replica_id)s,
                handed_until = now() + interval '{HAND_OUT} seconds'
            FROM due WHERE job.id = due.id
            RETURNING {_COLUMNS}, job.handed_id, due.paused_until, due.is_late_by_nature
        ), next AS (
            SELECT min(first.next_run_time) AS run_time FROM here, LATERAL (
                SELECT next_run_time FROM {jobs} AS job
                WHERE job.executor = here.executor AND next_run_time > now()
                ORDER BY next_run_time LIMIT 1
            ) AS first
        )
        SELECT now() AS database_time,
               extract(epoch FROM next.run_time - now())::float8 AS next_in, handed.*
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
        "signature": "%(signature)s::text",
        "version": "1",
        "added_id": "%(added_id)s::uuid",
        "next_run_time": "%(next_run_time)s::timestamptz",
        "ended": "false",
        "task_name": "%(task_name)s::text",
    }
    replaced = {name: f"excluded.{name}" for name in values if name != "id"}
    replaced |= {"version": "job.version + 1", "last_run_time": "NULL"}
    return f"""
        WITH added AS (
            INSERT INTO {jobs} AS job ({", ".join(values)}) VALUES ({", ".join(values.values())})
            ON CONFLICT (id) DO UPDATE SET
                {", ".join(f"{name} = {value}" for name, value in replaced.items())}
            WHERE job.ended
            RETURNING id
        )
        SELECT id FROM added WHERE {_TOLD}
    """


def _change(jobs: str) -> str:
    """Return the statement that changes a job of a version."""
    return f"""
        WITH changed AS (
            UPDATE {jobs} SET
                func = %(func)s::text, trigger = %(trigger)s::jsonb, options = %(options)s::jsonb,
                arguments = %(arguments)s::jsonb, executor = %(executor)s::text,
                signature = %(signature)s::text, version = version + 1,
                task_name = COALESCE(%(task_name)s::text, task_name),
                next_run_time = CASE WHEN %(moves)s::boolean THEN %(next_run_time)s::timestamptz
                                     ELSE next_run_time END,
                {_NOT_HANDED_OUT}
            WHERE id = %(job_id)s AND version = %(version)s::bigint AND NOT ended
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
