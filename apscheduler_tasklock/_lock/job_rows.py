"""The rows of the job store: statements that read due jobs, move jobs on, and change jobs.

To *move a job on* is to set its ``next_run_time`` to a later run time. Each statement is a
transaction of its own, and all times are the database's. The claim of a run time is among the
lock's own statements; see :func:`~apscheduler_tasklock._lock.statements.claim_and_move`.

A row is changed in two ways. *Runs* move the job on. *Users* change the job's definition, which
raises its ``version`` and gives it another ``changed_id``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.types.range import Range
from sqlalchemy import Table

from apscheduler_tasklock._database.outage import as_unavailable
from apscheduler_tasklock._database.rejections import RUN_HISTORY, Rejections
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.wire import class_row, dict_row
from apscheduler_tasklock._lock.database_clock import storable
from apscheduler_tasklock._lock.parameters import many
from apscheduler_tasklock._lock.protocol import (
    HISTORY,
    LOCK_TIMEOUT,
    history_beside,
    note_rejected_history,
)
from apscheduler_tasklock._lock.protocol_messages import JobMove
from apscheduler_tasklock._lock.statements import (
    CHANGE_ID,
    IS_FIRST,
    IS_RETRY_PENDING,
    MAY_BE_CLAIMED,
    History,
    Statement,
    again,
    for_template,
    move_on,
)
from apscheduler_tasklock._lock.statements.conditions import (
    BRIEFLY,
    listed_pauses,
    paused_with_all,
    pauses_of_all,
)
from apscheduler_tasklock._values import LONGEST_NAME
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.schema.table import job_table, literal

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


# JSON comes as text and is parsed row by row, so that a row that Python cannot read does not keep
# the others from being read. A name that is too long is cut right after the limit, which is enough
# to see that it is too long.
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
    """Return the query of the jobs' place: database, schema, table and the table's comment.

    The signature of a row covers the place. Only the table's owner can change the place. The
    schema's upgrade has written an id into the comment, and a backup keeps the comment.
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
# Only jobs with short ids are read. A long id cannot be cut, because a job is looked up by its
# whole id. The length in bytes is checked first, because PostgreSQL knows it without reading a long
# text.
_HAS_SHORT_ID = f"octet_length(job.id) <= {4 * LONGEST_NAME} AND length(job.id) <= {LONGEST_NAME}"
# The limit of a task's name counts bytes.
_HAS_SHORT_NAMES = f"octet_length(task_name) <= {LONGEST_NAME} AND {_HAS_SHORT_ID}"
# Whether a job's task is paused with all tasks, and in which times the task is or was paused. A
# job's row has no task's name before a replica has written it. Until then only a pause without a
# namespace is for the job.
_TASK_NAME = "COALESCE(job.task_name, '')"
_PAUSED_WITH_ALL = paused_with_all(_TASK_NAME)
_PAUSES = f"""(SELECT pg_catalog.range_agg(pg_catalog.tstzrange(since, until)) FROM (
        SELECT lock.paused_at, lock.paused_until WHERE lock.paused_at IS NOT NULL
        UNION ALL SELECT listed_pauses.since, listed_pauses.until FROM listed_pauses
        WHERE starts_with({_TASK_NAME}, listed_pauses.namespace)
    ) AS pause (since, until) WHERE COALESCE(since <= until, true))"""
# Limits the recurring jobs whose tasks are listed, because a replica keeps their names in memory
# and reads their rows with each look, and the table may have any number of rows.
MOST_RECURRING = 10_000
# Limits the attempts of a user's change if other users change the same job at the same time.
MOST_CHANGES = 20
# The error of a user's change of a job whose row stays locked.
LOCKED_JOB = (
    "another session has a row of task_lock_job locked, and has not ended its transaction in time; "
    "pg_stat_activity and pg_blocking_pids() show which session"
)
# Limit a page of due rows: the number of rows, and the bytes of their JSON.
_PAGE, _PAGE_SIZE = 100, 1_000_000
# The columns of a due row besides the job's own.
_DUE = ("change_id", "changed_at", "pauses", "ran_since", "ran_until", "runs_again")
# A user's change notifies in its transaction, so that listening replicas read the changed row.
_NOTIFIES = "pg_notify(%(channel)s, '') IS NOT NULL"
# Whether the run history got an entry of a user's change.
_IS_NOTED = "EXISTS (SELECT FROM acted)"


@dataclass(frozen=True)
class JobRow:
    """The row of a stored job.

    :ivar id: the job's id
    :ivar func: the reference of its function
    :ivar trigger: its trigger, as JSON-like data; ``None`` if Python cannot read it
    :ivar options: its name, grace time and other options, in the form of ``trigger``
    :ivar arguments: the arguments of its function, in the form of ``trigger``
    :ivar executor: the alias of its executor
    :ivar definition_id: the id of the change that wrote the columns above
    :ivar signature: the signature of the columns above; ``None`` if rows are not signed
    :ivar version: grows with each change that a user makes
    :ivar next_run_time: when the job is due next; ``None`` if the job is paused or has ended
    :ivar last_run_time: the run time that was claimed last
    :ivar ended: whether no run time follows the last one; the row is kept until that run is over
    :ivar task_name: the job's task, if a replica has written it
    :ivar place: the row's place according to PostgreSQL: database, schema, table, and the table's
        comment
    :ivar token: the token in the task's row when the job was read; 0 if there was no row; ``None``
        if the task is not known, or the job was read because it is due
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
    token: int | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> JobRow:
        """Return the job of a row with the columns of :func:`_columns`, and perhaps the token."""
        values = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        return cls(**values | {name: _parsed(row[name]) for name in _AS_TEXT})


@dataclass(frozen=True)
class DueRow:
    """A job that is due and may be claimed.

    :ivar row: the job
    :ivar change_id: the id of the user's last change. The job is claimed only if this id and
        ``next_run_time`` are still in the row.
    :ivar changed_at: when the user's last change was made
    :ivar pauses: the pauses of its task that are known, each from its begin to its end
    :ivar ran_since: when the last run of its task began; ``None`` if there was none
    :ivar ran_until: when that run or its lease ended; ``None`` if there was no run
    :ivar runs_again: whether the job is due again for the run time of the task's last run, because
        an operator has freed the task with ``run_again``
    """

    row: JobRow
    change_id: UUID
    changed_at: datetime
    pauses: Sequence[Range[datetime]]
    ran_since: datetime | None
    ran_until: datetime | None
    runs_again: bool


@dataclass(frozen=True)
class DueRows:
    """The result of a read of due jobs.

    :ivar jobs: the due jobs that may be claimed, in the order of their run times
    :ivar next_in: seconds until the next job is due; ``None`` if there is none
    :ivar database_time: the database's time of the read
    """

    jobs: Sequence[DueRow]
    next_in: float | None
    database_time: datetime


@dataclass(frozen=True)
class StoredTask:
    """A stored job and its task.

    :ivar job_id: the job's id
    :ivar executor: the alias of its executor
    :ivar task_name: its task
    :ivar is_stale: whether the due time in the task's row is missing, or is wrong because a user
        has paused the job or put it off
    """

    job_id: str
    executor: str
    task_name: str
    is_stale: bool = False


@dataclass(frozen=True)
class JobAction:
    """What an operator does to a job, for the run history.

    :ivar outcome: what it is; one of ``OUTCOMES``
    :ivar by: the operator's name
    :ivar action_id: the id under which it is sent
    :ivar reason: more about it, in words for operators
    """

    outcome: str
    by: str
    action_id: UUID
    reason: str | None = None

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of the statement."""
        return vars(self)


@dataclass(frozen=True)
class JobChange:
    """A user's change of a job.

    :ivar columns: the definition, by column; ``trigger``, ``options`` and ``arguments`` as
        JSON-like data
    :ivar next_run_time: when the job is due next
    :ivar task_name: its task, if this replica knows it
    :ivar defines: whether the change writes the definition
    """

    columns: Mapping[str, Any]
    next_run_time: datetime | None
    task_name: str | None
    defines: bool = True

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of the statement."""
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
    """The statements for the jobs' table, run on a cursor of a ``Wire``.

    :param table: the task lock table
    :param replica_id: the replica in the run history's entries of missed run times
    :param history: how many runs of each task the run history keeps; 0: none
    :param timings: has how long an ended job is kept
    :param rejections: notes a rejected run history
    :ivar channel: the channel on which users' changes are notified
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
        self._read_due = {
            newest_first: Statement(_read_due(jobs, lock, "DESC" if newest_first else "ASC"))
            for newest_first in (False, True)
        }
        runs = history_beside(table, history)
        self._move_on = Statement(move_on(jobs=jobs))
        self._due = Statement(_due(jobs, lock))
        self._sweep = Statement(f"""
            DELETE FROM {jobs} WHERE id IN (
                SELECT id FROM {jobs} AS job
                WHERE ended AND changed_at < now() - interval '{ended_kept} seconds'
                  AND NOT EXISTS (
                    SELECT FROM {lock} AS lock
                    WHERE task_name = job.task_name
                          AND ((finished_at IS NULL AND run_until > now()) OR {IS_RETRY_PENDING}))
                FOR UPDATE SKIP LOCKED)
        """)
        # The query begins with the jobs, because the tasks of one-off jobs are kept for days after
        # the jobs, so there are more tasks than jobs.
        self._dead_runs = Statement(f"""
            WITH begun AS MATERIALIZED (
                SELECT id AS job_id, {_EXECUTOR} AS executor, task_name FROM {jobs} AS job
                WHERE {_HAS_SHORT_NAMES} AND (last_run_time IS NOT NULL OR {_RECURS})
            )
            SELECT begun.* FROM begun, LATERAL (
                SELECT FROM {lock} AS lock
                WHERE lock.task_name = begun.task_name AND (
                    (lock.finished_at IS NULL AND lock.locked_until <= now()
                     AND (lock.failover OR lock.handed_over))
                    OR ({IS_RETRY_PENDING} AND lock.retry_at <= now()))
                OFFSET 0
            ) AS dead
        """)
        self._place = Statement(f"SELECT ({_place(jobs)}) AS place")
        self._read = Statement(f"""
            SELECT {_columns(jobs)},
                   CASE WHEN job.task_name IS NOT NULL THEN COALESCE(lock.token, 0) END AS token
            FROM {jobs} AS job LEFT JOIN {lock} AS lock USING (task_name)
            WHERE (%(job_id)s::text IS NULL OR id = %(job_id)s::text) AND ended = %(ended)s::boolean
            ORDER BY next_run_time NULLS LAST, id
        """)
        self._now = Statement("SELECT now() AS database_time")
        shortly_before_due = "lock.due_at - interval '1 minute'"
        # The job's next run time can be after the task's overdue time for two reasons. If a user
        # has put the job off, the task's due time is stale. If run times were missed, the due time
        # is right, because the task is overdue.
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
        # The row of a call that is sent again is written anew, so that its commit is confirmed.
        self._was_added = Statement(
            f"UPDATE {jobs} SET added_id = added_id"
            " WHERE id = %(job_id)s AND added_id = %(added_id)s RETURNING id"
        )
        self._change = Statement(_change(jobs))
        which = "id = %(job_id)s"
        self._remove = Statement(_remove(jobs, lock, which))
        # The entries of what operators do.
        self._change_noted = self._remove_noted = None
        if runs is not None:
            entry = _action(lock, runs)
            of_job = f"= (SELECT task_name FROM {jobs} WHERE id = %(job_id)s)"
            before = again(runs, of_job)
            self._change_noted = Statement(_change(jobs, entry, before))
            before = again(runs, "= %(task_name)s::text")
            self._remove_noted = Statement(_remove(jobs, lock, which, entry, before))
        self._was_changed = Statement(
            f"UPDATE {jobs} SET changed_id = changed_id"
            " WHERE id = %(job_id)s AND changed_id = %(changed_id)s RETURNING id"
        )
        self._remove_all = Statement(_remove(jobs, lock, "true"))

    def due(
        self,
        cursor: Any,
        executors: Sequence[str],
        until: datetime,
        after: tuple[datetime, str] | None,
        *,
        stable: bool = True,
        not_here: Sequence[str] = (),
    ) -> list[JobRow]:
        """Return a page of due jobs that may be claimed, the oldest first.

        :param until: the latest next run time
        :param after: next run time and id of the job before the page; ``None``: the first page
        :param stable: as in :meth:`read_due`
        :param not_here: as in :meth:`read_due`
        """
        after_time, after_id = after or (None, None)
        parameters = {
            "aliases": list(executors),
            "stable": stable,
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
        since: datetime | None = None,
        among: Sequence[str] = (),
        newest_first: bool = False,
    ) -> DueRows:
        """Read due jobs that may be claimed. The read locks nothing, and writes nothing.

        :param most: limits the jobs of each executor, by the executor's alias
        :param stable: whether the rows are believed, as in ``ClaimTimes``
        :param not_here: the references of functions that cannot be imported here
        :param not_these: the ids of jobs that are left out
        :param since: only jobs that became due after this time; ``None``: all
        :param among: the ids of jobs that are read although they became due before ``since``
        :param newest_first: whether to begin with the jobs that became due last. Otherwise the read
            begins with those that became due first.
        """
        executors = [{"executor": alias, "most": count} for alias, count in most.items()]
        parameters = {
            "executors": json.dumps(executors, ensure_ascii=False),
            "stable": stable,
            "not_here": list(not_here),
            "not_these": list(not_these),
            "since": since,
            "among": list(among),
        }
        rows = self._rows(cursor, self._read_due[newest_first], parameters)
        jobs = [_due_row(row) for row in rows if row["id"] is not None]
        return DueRows(jobs, rows[0]["next_in"], rows[0]["database_time"])

    def move_on(
        self,
        cursor: Any,
        moves: Iterable[JobMove],
        *,
        run: bool = False,
    ) -> set[str]:
        """Move jobs on without a claim; return the ids of the jobs that were moved on.

        A job that was changed or moved on since it was read is not moved on.

        :param run: whether the run times are about to run without a lock. Otherwise they were
            missed, or fell into a pause.
        """
        asked = many({**move.parameters, "runs": run} for move in moves)
        return {row["job_id"] for row in self._rows(cursor, self._move_on, asked)}

    def _noting(
        self,
        cursor: Any,
        statement: Statement,
        noted: Statement | None,
        parameters: Mapping[str, object],
    ) -> list[dict[str, Any]]:
        """Run a statement with its entries in the run history, or without them if rejected.

        :param noted: the statement with the entries; ``None``: there are none
        """
        if noted is None or self._rejections.is_left_out(RUN_HISTORY):
            return self._rows(cursor, statement, parameters)
        try:
            rows = self._rows(cursor, noted, parameters)
        except psycopg.DatabaseError as error:  # jobs change also without a right on the history
            if as_unavailable(error) is not None:
                raise
            rows = self._rows(cursor, statement, parameters)
            note_rejected_history(cursor, self._table, self._rejections, RUN_HISTORY, error)
            return rows
        # A task without a row has no entry, so that its success says nothing.
        if any(row["is_noted"] for row in rows):
            self._rejections.end(RUN_HISTORY)
        return rows

    def sweep(self, cursor: Any) -> int:
        """Delete ended jobs whose last run is over; return how many."""
        return int(self._execute(cursor, self._sweep, {}).rowcount)

    def dead_runs(self, cursor: Any) -> list[StoredTask]:
        """Return the jobs whose last runs are to be run again: dead, handed over, or failed."""
        cursor.row_factory = class_row(StoredTask)
        found: list[StoredTask] = self._execute(cursor, self._dead_runs, {}).fetchall()
        return found

    def recurring(self, cursor: Any) -> list[StoredTask]:
        """Return the tasks of recurring jobs, whichever replica has added them.

        The tasks that are due first are returned, ``MOST_RECURRING + 1`` at most. If the caller
        gets that many, the limit ``MOST_RECURRING`` is exceeded.
        """
        cursor.row_factory = class_row(StoredTask)
        found: list[StoredTask] = self._execute(cursor, self._recurring, {}).fetchall()
        return found

    def now(self, cursor: Any) -> datetime:
        """Return the database's time."""
        database_time: datetime = self._rows(cursor, self._now, {})[0]["database_time"]
        return database_time

    def place(self, cursor: Any) -> str:
        """Return the jobs' place; see :class:`JobRow`."""
        place: str = self._rows(cursor, self._place, {})[0]["place"]
        return place

    def read(self, cursor: Any, job_id: str, *, ended: bool = False) -> JobRow | None:
        """Return a job.

        :param ended: whether to return a job that has ended, or one that has not
        """
        rows = self._rows(cursor, self._read, {"job_id": job_id, "ended": ended})
        return JobRow.of(rows[0]) if rows else None

    def read_all(self, cursor: Any) -> list[JobRow]:
        """Return all jobs that have not ended, by their next run times; paused ones last."""
        rows = self._rows(cursor, self._read, {"job_id": None, "ended": False})
        return [JobRow.of(row) for row in rows]

    def add(self, cursor: Any, job_id: str, change: JobChange, added_id: UUID) -> bool:
        """Add a job; return whether its id was free.

        :param added_id: the id of this call, so that a repeated call, whose first answer was lost,
            finds its own job and no conflict
        """
        parameters = {**change.parameters, "job_id": job_id, "added_id": added_id}
        if self._execute(cursor, self._add, parameters).rowcount:
            return True
        return bool(self._rows(cursor, self._was_added, parameters))

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
        action: JobAction | None = None,
    ) -> bool:
        """Change a job; return whether it still had this version.

        :param changed_id: the id of this call, so that a repeated call, whose first answer was
            lost, changes nothing again
        :param moves: whether the next run time is changed
        :param found: the row from which the next run time was computed. If the job was moved on
            since that row was read, it is not changed. ``None``: the next run time was not computed
            from a row
        :param action: what an operator does with this change; ``None``: the change is not an
            operator's
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
        noted = None
        if action is not None:
            noted, parameters = self._change_noted, {**parameters, **action.parameters}
        if self._noting(cursor, self._change, noted, parameters):
            return True
        return bool(self._rows(cursor, self._was_changed, parameters))

    def remove(
        self,
        cursor: Any,
        job_id: str,
        action: JobAction | None = None,
        task_name: str | None = None,
    ) -> bool:
        """Remove a job; return whether there was one.

        :param action: as in :meth:`change`
        :param task_name: the job's task, whose history tells whether the action was done before
        """
        wanted: dict[str, object] = {"job_id": job_id, "task_name": task_name}
        if action is None:
            return bool(self._rows(cursor, self._remove, wanted))
        wanted.update(action.parameters)
        return bool(self._noting(cursor, self._remove, self._remove_noted, wanted))

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


def unsaved(job_id: str) -> TaskLockError:
    """Return the error of a user's change that others' changes have kept from being written."""
    return TaskLockError(
        f"job {job_id!r} was not saved, because others changed it at the same time in "
        f"{MOST_CHANGES} attempts; try again"
    )


def remove_job(ask: Callable[[Callable[[Any], bool]], bool], jobs: JobRows, job_id: str) -> bool:
    """Remove a job; return whether there was one.

    :param ask: sends a statement, perhaps several times, because an answer can be lost
    """
    attempts = 0

    def remove(cursor: Any) -> bool:
        nonlocal attempts
        attempts += 1
        return jobs.remove(cursor, job_id)

    # No row has an id with NUL, because PostgreSQL's texts have no NUL. If the row is missing after
    # a second attempt, the first attempt may have removed the row although its answer was lost.
    return "\0" not in job_id and (ask(remove) or attempts > 1)


def next_version(version: str) -> str:
    """Return the SQL of the version after a change, for a template; after the largest bigint 1."""
    return f"{version} %% 9223372036854775807 + 1"


def channel_of(table: Table) -> str:
    """Return the channel on which changes of the jobs of a task lock table are notified.

    The channel's name lacks the schema, because some replicas may be given the schema's name, and
    others may find the schema by their ``search_path``.
    """
    return str(job_table(table).name)


def _due_row(row: dict[str, Any]) -> DueRow:
    known = {name: row[name] for name in _DUE}
    return DueRow(JobRow.of(row), **known | {"pauses": known["pauses"] or ()})


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; ``None`` if Python cannot read it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # such as a number of 5,000 digits
        return None


def _due(jobs: str, lock: str) -> str:
    """Return the statement that reads a page of due jobs. The statement writes nothing."""
    order = "next_run_time, id ROWS UNBOUNDED PRECEDING"
    return f"""
        WITH {pauses_of_all(lock)}, due AS (
            SELECT job.*,
                   pg_catalog.octet_length(trigger::text) + pg_catalog.octet_length(options::text)
                       + pg_catalog.octet_length(arguments::text) AS size
            FROM {jobs} AS job LEFT JOIN {lock} AS lock USING (task_name)
            WHERE job.executor = ANY(%(aliases)s::text[])
                  AND job.next_run_time <= %(until)s::timestamptz
                  AND NOT job.func = ANY(%(not_here)s::text[]) AND {_HAS_SHORT_ID}
                  AND (lock.task_name IS NULL OR {MAY_BE_CLAIMED}) AND NOT {_PAUSED_WITH_ALL}
                  AND (%(after_time)s::timestamptz IS NULL
                       OR (next_run_time, id) > (%(after_time)s::timestamptz, %(after_id)s::text))
            ORDER BY next_run_time, id LIMIT {_PAGE}
        ), page AS (
            SELECT due.*, sum(size) OVER (ORDER BY {order}) - size AS size_before FROM due
        )
        SELECT {_columns(jobs)} FROM page AS job WHERE size_before < {_PAGE_SIZE}
        ORDER BY next_run_time, id
    """


def _read_due(jobs: str, lock: str, direction: str) -> str:
    """Return the statement that reads due jobs that may be claimed, in the order of their index.

    The statement returns at most ``_PAGE_SIZE`` bytes of JSON, and one row more.

    :param direction: ``ASC`` or ``DESC``
    """
    order = f"job.next_run_time {direction}, job.id {direction}"
    return f"""
        WITH here AS (
            SELECT * FROM json_to_recordset(%(executors)s::json) AS _ (executor text, most integer)
        ), {pauses_of_all(lock)}, {listed_pauses(lock)}, due AS (
            SELECT due.* FROM here, LATERAL (
                SELECT job.*, {CHANGE_ID} AS change_id,
                       {_PAUSES} AS pauses,
                       lock.started_at AS ran_since,
                       CASE WHEN lock.started_at IS NOT NULL
                            THEN LEAST(COALESCE(lock.finished_at, lock.locked_until), now())
                            END AS ran_until,
                       lock.window_start IS NOT DISTINCT FROM job.next_run_time AS runs_again,
                       pg_catalog.octet_length(trigger::text)
                           + pg_catalog.octet_length(options::text)
                           + pg_catalog.octet_length(arguments::text) AS size
                FROM {jobs} AS job LEFT JOIN {lock} AS lock ON lock.task_name = job.task_name
                WHERE job.executor = here.executor AND job.next_run_time <= now()
                      AND NOT job.func = ANY(%(not_here)s::text[])
                      AND NOT job.id = ANY(%(not_these)s::text[]) AND {_HAS_SHORT_ID}
                      AND (%(since)s::timestamptz IS NULL
                           OR job.next_run_time > %(since)s::timestamptz
                           OR job.id = ANY(%(among)s::text[]))
                      AND (lock.task_name IS NULL OR {MAY_BE_CLAIMED}) AND NOT {_PAUSED_WITH_ALL}
                ORDER BY {order} LIMIT here.most
            ) AS due
        ), page AS (
            SELECT job.*,
                   sum(size) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) - size AS size_before
            FROM due AS job
        ), next AS (
            SELECT min(first.next_run_time) AS run_time FROM here, LATERAL (
                SELECT next_run_time FROM {jobs} AS job
                WHERE job.executor = here.executor AND next_run_time > now()
                ORDER BY next_run_time LIMIT 1
            ) AS first
        )
        SELECT now() AS database_time,
               extract(epoch FROM next.run_time - now())::float8 AS next_in,
               {_columns(jobs)}, {", ".join(f"job.{name}" for name in _DUE)}
        FROM next LEFT JOIN page AS job ON size_before < {_PAGE_SIZE}
        ORDER BY {order}
    """


def _add(jobs: str) -> str:
    """Return the statement that adds a job, or replaces an ended one."""
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
    replaced |= {
        "version": next_version("job.version"),
        "last_run_time": "NULL",
        "changed_id": "NULL",
    }
    return f"""
        WITH added AS (
            INSERT INTO {jobs} AS job ({", ".join(values)})
            SELECT {", ".join(values.values())} WHERE {BRIEFLY}
            ON CONFLICT (id) DO UPDATE SET
                {", ".join(f"{name} = {value}" for name, value in replaced.items())}
            WHERE job.ended AND job.added_id <> excluded.added_id
            RETURNING id
        )
        SELECT id FROM added WHERE {_NOTIFIES}
    """


def _action(lock: str, history: History) -> str:
    """Return the part of a WITH clause that notes what an operator does to the jobs of ``done``.

    The task of a job that is paused or removed is not due any more, also if no replica is there to
    register that. A retry ends with the due time. Otherwise one that is void, because that time has
    passed, would begin when the job is resumed.

    A task without a row gets no entry. A task whose row another session has locked gets none,
    either, so that nothing keeps an operator from pausing a job.
    """
    entry = history.action(
        "", "acted AS run", outcome="%(outcome)s::text", reason="%(reason)s::text"
    )
    ends = "%(outcome)s::text IN ('job-paused', 'job-removed')"
    return f""", free AS (
            SELECT lock.task_name FROM {lock} AS lock
            WHERE lock.task_name IN (SELECT task_name FROM done)
            FOR NO KEY UPDATE SKIP LOCKED
        ), acted AS (
            UPDATE {lock} AS lock SET
                recorded_actions = recorded_actions + 1,
                due_at = CASE WHEN NOT {ends} THEN lock.due_at END,
                overdue_at = CASE WHEN NOT {ends} THEN lock.overdue_at END,
                retry_of = CASE WHEN NOT {ends} THEN lock.retry_of END
            FROM free WHERE lock.task_name = free.task_name
            RETURNING lock.*
        ), entry AS ({entry})"""


def _change(jobs: str, action: str = "", before: str = "") -> str:
    """Return the statement that changes a job if the job still has the given version.

    :param action: notes what an operator does; from :func:`_action`
    :param before: finds the entry of an action that was done before; from ``again``
    """
    defined = ", ".join(
        f"""{name} = CASE WHEN %(defines)s::boolean
                          THEN %({name})s::{kind} ELSE {name} END"""
        for name, kind in _DEFINITION.items()
    )
    return f"""
        WITH {before}{", " if before else ""}done AS (
            UPDATE {jobs} SET {defined}, version = {next_version("version")},
                task_name = COALESCE(%(task_name)s::text, task_name),
                changed_id = %(changed_id)s::uuid, changed_at = now(),
                next_run_time = CASE WHEN %(moves)s::boolean THEN %(next_run_time)s::timestamptz
                                     ELSE next_run_time END
            WHERE id = %(job_id)s AND version = %(version)s::bigint AND NOT ended
                  AND (NOT %(is_computed)s::boolean
                       OR next_run_time IS NOT DISTINCT FROM %(found_time)s::timestamptz)
                  AND {BRIEFLY}{f" AND {IS_FIRST}" if before else ""}
            RETURNING id, task_name
        ){action}
        {_what_is_done(action, before)}
    """


def _what_is_done(action: str, before: str) -> str:
    """Return the query of the jobs that are changed, or were when the action was sent before."""
    done = f"SELECT id, {_IS_NOTED if action else 'false'} AS is_noted FROM done WHERE {_NOTIFIES}"
    return f"{done} UNION ALL SELECT %(job_id)s::text, true FROM again" if before else done


def _remove(jobs: str, lock: str, which: str, action: str = "", before: str = "") -> str:
    """Return the statement that removes jobs.

    Ended jobs stay until their last run is over. A job whose last run is to be retried is removed,
    so that no replica finds the job for the retry.

    :param action: as in :func:`_change`
    :param before: as in :func:`_change`
    """
    is_retried = f"""EXISTS (SELECT FROM {lock} AS lock
                             WHERE lock.task_name = job.task_name AND {IS_RETRY_PENDING})"""
    return f"""
        WITH {before}{", " if before else ""}done AS (
            DELETE FROM {jobs} AS job
            WHERE {which} AND (NOT ended OR {is_retried}) AND {BRIEFLY}
                  {f"AND {IS_FIRST}" if before else ""}
            RETURNING id, task_name
        ){action}
        {_what_is_done(action, before)}
    """
