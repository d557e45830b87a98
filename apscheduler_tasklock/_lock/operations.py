"""Operators' statements: reads of all rows, and changes of single tasks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
from psycopg.errors import InsufficientPrivilege, UndefinedTable
from psycopg.rows import class_row, dict_row
from sqlalchemy import Table

from apscheduler_tasklock._database.outage import as_unavailable
from apscheduler_tasklock._database.rejections import REPLICAS, Rejections
from apscheduler_tasklock._database.sqlstates import one_line
from apscheduler_tasklock._lock.job_rows import channel_of
from apscheduler_tasklock._lock.json_columns import IS_RUN, REPORTED_RUNS, read_json, texts
from apscheduler_tasklock._lock.protocol import HISTORY, history_beside
from apscheduler_tasklock._lock.statements import (
    DUE_IN_PAUSE,
    IS_ALIVE,
    IS_HEARD,
    IS_PAUSED,
    JUST_BEFORE,
    NEVER,
    SHORTEST_WAIT,
    History,
    RecordingStatement,
    Statement,
    for_template,
)
from apscheduler_tasklock._lock.stories import story_of
from apscheduler_tasklock.errors import TaskLockNotFoundError, TaskLockStateError
from apscheduler_tasklock.schema.table import (
    EARLIEST,
    LATEST,
    job_table,
    replica_table,
    run_table,
)
from apscheduler_tasklock.status import (
    JobState,
    JobStatus,
    ReplicaState,
    ReplicaStatus,
    Run,
    RunningRun,
    RunRequest,
    Story,
    TaskState,
    TaskStatus,
)

# When a task is due. After a pause, a live replica registers the next due time. Without a live
# replica, the task counts as due about a period after the pause's end.
_DUE = f"""
    CASE WHEN NOT {DUE_IN_PAUSE} THEN lock.due_at
         WHEN lock.paused_until <= now() AND lock.started_at <> {NEVER}
         THEN lock.paused_until + GREATEST(lock.due_at - lock.window_start, '0') END
"""
_DUE_AND_GRACE = f"({_DUE} + (lock.overdue_at - lock.due_at))"
# When a task counts as overdue. The sum is limited to the times that Python has, because it may be
# a time that only PostgreSQL has.
_OVERDUE = f"""
    CASE WHEN {_DUE_AND_GRACE} IS NOT NULL
         THEN LEAST(GREATEST({_DUE_AND_GRACE}, {EARLIEST}), {LATEST}) END
"""
# A removed task whose row is left: there are live replicas, none of them has the task, and it has
# no due time.
_GONE = """(lock.due_at IS NULL AND NOT lock.is_last AND EXISTS (SELECT FROM alive)
            AND known.task_name IS NULL AND COALESCE(lock.kind, '') <> 'hold'
            AND NOT lock.one_off)"""
# A run that goes on beyond its maximum lock, on a replica that still gives signs of life.
_OVERRUNS = """(lock.finished_at IS NULL AND NOT lock.handed_over AND lock.overran
                AND NOT EXISTS (SELECT FROM unheard WHERE replica_id = lock.locked_by))"""
# A run that goes on although its lock is lost, and takes longer than it may.
_IS_STUCK = """((lost.token < lock.token OR lock.finished_at IS NULL
                 OR lock.last_outcome IN ('died', 'overran', 'freed'))
                AND lost.since + COALESCE(lock.overrun_at - lock.started_at, '0') < now())"""
# When a shutdown has cut the run, if no replica has run the window again. A handed-over run counts
# as cut only after the time that a takeover needs.
_CUT_AT = f"""
    CASE WHEN lock.finished_at IS NOT NULL AND lock.last_outcome = 'cut' THEN lock.finished_at
         WHEN lock.finished_at IS NULL AND lock.handed_over
              AND lock.last_outcome IS DISTINCT FROM 'overran'
              AND lock.locked_until + {SHORTEST_WAIT} <= now() THEN lock.locked_until END
"""
_OUTCOME = f"""
    CASE WHEN lock.finished_at IS NOT NULL THEN lock.last_outcome
         WHEN lock.handed_over THEN COALESCE(lock.last_outcome, 'cut')
         WHEN lock.locked_until > now() OR {_OVERRUNS} THEN NULL
         WHEN lock.overran THEN 'overran' ELSE 'died' END
"""
_STATE = f"""
    CASE WHEN stuck.tokens IS NOT NULL THEN 'too long'
         WHEN lock.finished_at IS NULL AND lock.locked_until > now() AND NOT lock.handed_over
              THEN CASE WHEN lock.overrun_at BETWEEN lock.started_at AND now()
                        THEN 'too long' ELSE 'running' END
         WHEN {_OVERRUNS} THEN 'too long'
         WHEN {IS_PAUSED} THEN 'paused'
         WHEN lock.finished_at IS NULL AND NOT lock.handed_over THEN 'dead'
         WHEN lock.window_start < {_DUE} AND {_OVERDUE} < now() THEN 'overdue'
         WHEN lock.window_start < {_DUE} AND {_DUE} < now() THEN 'late'
         WHEN {_CUT_AT} IS NOT NULL THEN 'cut'
         WHEN lock.failures > 0 THEN 'failing'
         WHEN lock.started_at = {NEVER} THEN 'new'
         ELSE 'ok' END
"""

# A replica has died if one of its runs was found dead, in the task's row or in the history, and the
# replica has given no sign of life since the run's end. A replica of which only a worker process
# has died gives a sign of life at once, so it does not count as dead.
_REPLICA_STATE = """
    CASE WHEN stopped_at IS NOT NULL AND NOT heard THEN 'stopped'
         WHEN died_at > seen_at OR EXISTS (
             SELECT FROM {table} AS lock
             WHERE locked_by = replica_id AND finished_at IS NULL AND NOT handed_over
                   AND NOT overran AND locked_until <= now() AND locked_until > seen_at)
             THEN 'died'
         WHEN heard THEN 'alive' ELSE 'silent' END
"""
# The runs with lost locks that a replica has reported with its last sign of life.
_LOST = f"""
    SELECT run ->> 'task'::text AS task,
           CASE WHEN {IS_RUN} THEN (run ->> 'token'::text)::numeric::bigint END AS token,
           CASE WHEN {IS_RUN} THEN to_timestamp((run ->> 'since'::text)::float8) END AS since,
           replica_id
    FROM replicas, {REPORTED_RUNS} AS run
    WHERE heard AND {IS_RUN} AND run -> 'lost'::text = 'true'
"""
# An empty table, which is used if the replicas' table cannot be read.
_NO_REPLICAS = """
    SELECT '' AS replica_id, NULL::text[] AS tasks, '[]'::jsonb AS running, false AS alive,
           false AS heard WHERE false
"""

_JOB_STATE = """
    CASE WHEN job.ended THEN 'ended' WHEN job.next_run_time IS NULL THEN 'paused'
         WHEN job.next_run_time <= now() THEN 'due' ELSE 'waiting' END
"""

# Whether a replica has a task. The schema of ``@>`` is given, so that PostgreSQL does not find
# another ``@>`` for text[] first.
_HAS_TASK = "tasks OPERATOR(pg_catalog.@>) ARRAY[%(task)s::text]"

# Limits the entries of one task that are read at once. A task has fewer, with any option `history`.
LONGEST_HISTORY = 100_000

# Whether an operator has asked for a manual run that has not begun.
_IS_OPEN = "lock.request_id IS NOT NULL AND lock.request_until > now()"


class Operations:
    """The statements of operators for one task lock table, run on a cursor of ``raw_cursor``.

    :param table: the task lock table
    :param rejections: notes a rejected read of the replicas, which can be left out
    :param history: how many runs of each task the run history keeps; 0: none
    """

    def __init__(
        self, table: Table, rejections: Rejections | None = None, history: int = HISTORY
    ) -> None:
        self._rejections = rejections or Rejections()
        name = for_template(table)
        self._name = name
        self._jobs_name = for_template(job_table(table))
        self._channel = channel_of(table)
        self._runs = for_template(run_table(table))
        self._replicas = for_template(replica_table(table))
        # In `known`, the inner DISTINCT drops equal lists of tasks before `unnest`, because all
        # replicas of a deployment have the same list.
        replicas = f"""SELECT *, {IS_ALIVE} AS alive, {IS_HEARD} AS heard
                       FROM {self._replicas} AS replica"""
        tasks = f"""
            WITH replicas AS ({replicas}),
                 alive AS (SELECT tasks FROM replicas WHERE alive),
                 unheard AS (SELECT replica_id FROM replicas WHERE NOT heard),
                 lost AS ({_LOST}),
                 known AS (SELECT DISTINCT pg_catalog.unnest(tasks) AS task_name
                           FROM (SELECT DISTINCT tasks FROM alive) AS list)
            SELECT lock.task_name AS name, {_STATE} AS state, lock.schedule, lock.kind, lock.token,
                   lock.locked_by AS holder, lock.window_start AS scheduled_at, lock.started_at,
                   lock.finished_at, lock.locked_until, lock.run_until, {_DUE} AS due_at,
                   GREATEST(lock.window_until, lock.window_start) AS window_until,
                   lock.window_start = {NEVER} AS has_no_window,
                   {_OVERDUE} AS overdue_at,
                   extract(epoch FROM now() - {_DUE})::float8 AS late_by,
                   extract(epoch FROM CASE WHEN lock.finished_at IS NOT NULL THEN lock.finished_at
                                           WHEN {_OVERRUNS} THEN now()
                                           ELSE LEAST(now(), lock.locked_until) END
                                      - lock.started_at)::float8 AS took,
                   {_OUTCOME} AS outcome,
                   extract(epoch FROM now() - {_CUT_AT})::float8 AS cut_for,
                   stuck.tokens AS stuck_tokens, stuck.replica_ids AS stuck_on,
                   stuck.since AS stuck_since,
                   lock.succeeded_at, lock.failed_at, lock.failures, lock.error_type,
                   {IS_PAUSED} AS paused,
                   CASE WHEN lock.paused_until > now() THEN lock.paused_until END AS paused_until,
                   lock.paused_by, lock.pause_reason,
                   CASE WHEN lock.request_until > now() THEN lock.requested_by END AS requested_by,
                   CASE WHEN lock.request_until > now() THEN lock.requested_at END AS requested_at,
                   {_GONE} AS gone, lock.failover,
                   lock.started_at = {NEVER} AS is_new
            FROM {name} AS lock LEFT JOIN known USING (task_name), LATERAL (
                SELECT pg_catalog.array_agg(token ORDER BY lost.token) AS tokens,
                       pg_catalog.array_agg(replica_id ORDER BY lost.token) AS replica_ids,
                       pg_catalog.array_agg(since ORDER BY lost.token) AS since
                FROM lost WHERE lost.task = lock.task_name AND {_IS_STUCK}
            ) AS stuck
            WHERE %(like)s::text[] IS NULL OR lock.task_name LIKE ANY (%(like)s::text[])
            ORDER BY lock.task_name LIMIT %(limit)s
        """
        self._tasks = Statement(tasks)
        self._tasks_without_replicas = Statement(tasks.replace(replicas, _NO_REPLICAS))
        columns = """run.task_name AS task, run.token, run.scheduled_at, run.started_at,
                     run.ended_at, run.replica, run.kind, run.outcome, run.error_type, run.error,
                     run.by, run.until, run.reason, run.cause, run.last_scheduled_at,
                     run.run_times"""
        # A replica may run a run time after another replica has noted it as missed.
        not_run = f"""NOT (run.ring = 'misses' AND run.run_times = 1 AND (
            EXISTS (SELECT FROM {name} AS lock WHERE lock.task_name = run.task_name
                    AND lock.window_start = run.scheduled_at)
            OR EXISTS (SELECT FROM {self._runs} AS later WHERE later.task_name = run.task_name
                       AND later.ring IN ('runs', 'failures')
                       AND later.scheduled_at = run.scheduled_at)))"""
        # The statement reads the whole history, which is limited for each task. There is no index
        # by time, because each release would have to write to it. Sorting all runs would take most
        # of the time, so a hundredth of the history is read first. If that hundredth has as many
        # matching runs as are asked for, all runs that are older than these are not sorted.
        matches = f"""(%(like)s::text[] IS NULL OR run.task_name LIKE ANY (%(like)s::text[]))
                     AND (%(outcome)s::text IS NULL OR run.outcome = %(outcome)s)
                     AND (%(kind)s::text IS NULL OR run.kind = %(kind)s)
                     AND (%(since)s::timestamptz IS NULL OR run.started_at >= %(since)s)
                     AND (%(until)s::timestamptz IS NULL OR run.started_at < %(until)s)
                     AND {not_run}"""
        self._matching_runs = Statement(f"""
            SELECT {columns} FROM {self._runs} AS run
            WHERE {matches} AND run.started_at >= COALESCE((
                SELECT run.started_at FROM {self._runs} AS run TABLESAMPLE SYSTEM (1)
                WHERE {matches}
                ORDER BY run.started_at DESC OFFSET GREATEST(%(limit)s::bigint - 1, 0) LIMIT 1
            ), '-infinity')
            ORDER BY run.started_at DESC, run.token DESC LIMIT %(limit)s::bigint
        """)
        self._runs_of_task = Statement(f"""
            SELECT {columns} FROM {self._runs} AS run
            WHERE run.task_name = %(task)s
              AND (%(outcome)s::text IS NULL OR run.outcome = %(outcome)s)
              AND (%(kind)s::text IS NULL OR run.kind = %(kind)s)
              AND (%(since)s::timestamptz IS NULL OR run.started_at >= %(since)s)
              AND (%(until)s::timestamptz IS NULL OR run.started_at < %(until)s)
              AND {not_run}
            ORDER BY run.started_at DESC, run.token DESC LIMIT %(limit)s
        """)
        found_dead = f"""
            SELECT replica AS replica_id, max(ended_at) AS died_at
            FROM {self._runs} WHERE outcome = 'died' GROUP BY 1
        """
        list_replicas = f"""
            WITH replicas AS ({replicas}), dead AS ({found_dead})
            SELECT replica_id, host, version, started_at, seen_at, tasks, rejected,
                   jsonb_typeof(running) = 'array' AND NOT EXISTS (
                       SELECT FROM {REPORTED_RUNS} AS run WHERE NOT {IS_RUN}) AS tells_runs,
                   {_REPLICA_STATE.format(table=name)} AS state
            FROM replicas LEFT JOIN dead USING (replica_id) ORDER BY started_at, replica_id
        """
        self._list_replicas = Statement(list_replicas)
        self._list_replicas_without_runs = Statement(
            list_replicas.replace(
                found_dead,
                "SELECT '' AS replica_id, NULL::timestamptz AS died_at WHERE false",
            )
        )
        self._list_running = Statement(f"""
            WITH replicas AS ({replicas}), lost AS ({_LOST})
            SELECT lock.task_name AS task, lock.token, replica_id AS replica,
                   lock.started_at AS since, lock.locked_until <= now() AS lost
            FROM {name} AS lock JOIN replicas ON locked_by = replica_id
            WHERE finished_at IS NULL AND NOT handed_over
                  AND (locked_until > now() OR (overran AND heard))
            UNION ALL
            SELECT task, lost.token, replica_id, since, true
            FROM lost LEFT JOIN {name} AS lock ON lock.task_name = lost.task
            WHERE lock.task_name IS NULL OR lost.token < lock.token
                  OR lock.last_outcome IN ('died', 'overran', 'freed')
            ORDER BY task, token
        """)
        self._jobs = Statement(f"""
            SELECT job.id, {_JOB_STATE} AS state, job.options ->> 'name'::text AS name,
                   job.func AS function, job.trigger::text AS trigger, job.executor,
                   job.next_run_time, job.last_run_time,
                   job.task_name AS task,
                   CASE WHEN lock.finished_at IS NULL AND lock.locked_until > now()
                             AND NOT lock.handed_over THEN lock.locked_by END AS holder,
                   lock.task_name IS NOT NULL AND {IS_PAUSED} AS task_paused,
                   CASE WHEN lock.paused_until > now() THEN lock.paused_until END
                       AS task_paused_until
            FROM {self._jobs_name} AS job LEFT JOIN {name} AS lock USING (task_name)
            WHERE %(like)s::text[] IS NULL OR job.id LIKE ANY (%(like)s::text[])
            ORDER BY job.next_run_time NULLS LAST, job.id LIMIT %(limit)s
        """)
        self._missing = Statement(f"""
            SELECT wanted FROM pg_catalog.unnest(%(names)s::text[]) AS wanted
            WHERE NOT EXISTS (SELECT FROM {name} WHERE task_name = wanted) ORDER BY 1
        """)
        runs = history_beside(table, history)
        self._pause = RecordingStatement(_pause, name, runs)
        self._resume = RecordingStatement(_resume, name, runs)
        ask = partial(_request_run, replicas=self._replicas)
        self._request_run = RecordingStatement(ask, name, runs)
        self._free = RecordingStatement(_free, name, runs)
        free_and_move = partial(_free, jobs=self._jobs_name)
        self._free_and_move = RecordingStatement(free_and_move, name, runs)
        self._forget = Statement(f"""
            WITH forgotten AS (
                DELETE FROM {name} WHERE task_name = %(task)s
                    AND (finished_at IS NOT NULL OR locked_until <= now())
                    AND NOT EXISTS (SELECT FROM {self._replicas}
                                    WHERE {IS_ALIVE} AND {_HAS_TASK})
                RETURNING task_name
            ), runs AS (
                DELETE FROM {self._runs} WHERE task_name IN (SELECT task_name FROM forgotten)
            )
            SELECT task_name FROM forgotten
        """)

    def tasks(
        self, cursor: Any, like: Sequence[str] | None = None, limit: int | None = None
    ) -> list[TaskStatus]:
        """Return tasks in the order of their names.

        :param like: patterns of names, as for SQL's ``LIKE``; ``None`` for all
        """
        cursor.row_factory = dict_row
        wanted = {"like": _list(like), "limit": limit}
        return [_task_status(row) for row in self._task_rows(cursor, wanted)]

    def _task_rows(self, cursor: Any, wanted: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of tasks, also if the replicas cannot be read."""
        if not self._rejections.is_left_out(REPLICAS):
            try:
                rows = self._all(cursor, self._tasks, **wanted)
            except (UndefinedTable, InsufficientPrivilege) as error:
                rows = self._all(cursor, self._tasks_without_replicas, **wanted)
                self._rejections.begin(
                    REPLICAS,
                    "the replicas cannot be read, so it is not known which tasks no live replica "
                    f"has: {one_line(error)}",
                    quiet=True,
                )
            else:
                self._rejections.end(REPLICAS)
            return rows
        return self._all(cursor, self._tasks_without_replicas, **wanted)

    def runs(
        self,
        cursor: Any,
        task: str | None = None,
        *,
        like: Sequence[str] | None = None,
        outcome: str | None = None,
        kind: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
    ) -> list[Run]:
        """Return finished runs and what operators did, the newest first."""
        cursor.row_factory = dict_row
        times = {"since": since, "until": until}
        wanted = {"outcome": outcome, "kind": kind, **times, "limit": limit}
        if task is not None:
            rows = self._all(cursor, self._runs_of_task, task=task, **wanted)
        else:
            rows = self._all(cursor, self._matching_runs, like=_list(like), **wanted)
        return [Run(**row) for row in rows]

    def why(self, cursor: Any, task: str, at: datetime | None) -> Story:
        """Return what is known of a task around a moment.

        :param at: the moment; ``None``: now
        :raises TaskLockNotFoundError: the task has no row
        """
        found = self.tasks(cursor, [escaped(task)], 1)
        if not found:
            raise TaskLockNotFoundError([task])
        entries = self.runs(cursor, task, limit=LONGEST_HISTORY)
        if at is None:
            [at] = (row["now"] for row in self._all(cursor, Statement("SELECT now() AS now")))
        return story_of(found[0], entries, self.replicas(cursor), at)

    def replicas(self, cursor: Any) -> list[ReplicaStatus]:
        """Return the replicas, in the order of their starts."""
        cursor.row_factory = dict_row
        try:
            rows = self._all(cursor, self._list_replicas)
        except (UndefinedTable, InsufficientPrivilege):
            # Read without the history. If another table was the reason, this read raises, too.
            rows = self._all(cursor, self._list_replicas_without_runs)
        running: dict[str, dict[tuple[str, int], RunningRun]] = {}
        for found in self._all(cursor, self._list_running):
            run = RunningRun(**found)
            running.setdefault(run.replica, {}).setdefault((run.task, run.token), run)
        return [
            _replica_status(row, tuple(running.get(row["replica_id"], {}).values())) for row in rows
        ]

    def jobs(
        self, cursor: Any, like: Sequence[str] | None = None, limit: int | None = None
    ) -> list[JobStatus]:
        """Return jobs of the job store by their next run times; jobs without one come last.

        :param like: patterns of ids, as for SQL's ``LIKE``; ``None`` for all
        """
        cursor.row_factory = dict_row
        rows = self._run(cursor, self._jobs, like=_list(like), limit=limit).fetchall()
        return [_job_status(row) for row in rows]

    def pause(
        self,
        cursor: Any,
        patterns: Sequence[str],
        seconds: float | None,
        by: str,
        reason: str | None,
    ) -> list[str]:
        """Pause tasks. When the call returns, the tasks are paused.

        :param patterns: names, or globs if no task has exactly that name
        :return: the names of the paused tasks
        :raises TaskLockNotFoundError: a pattern matches no task; in that case no task is paused
        """
        wanted = {"seconds": seconds, "by": by, "reason": reason}
        return [row["name"] for row in self._change_many(cursor, self._pause, patterns, wanted)]

    def resume(self, cursor: Any, patterns: Sequence[str], by: str) -> list[str]:
        """End the pause of tasks.

        :param patterns: names, or globs if no task has exactly that name
        :return: the names of the tasks that were paused
        :raises TaskLockNotFoundError: a pattern matches no task; in that case no task is resumed
        """
        rows = self._change_many(cursor, self._resume, patterns, {"by": by})
        return [row["name"] for row in rows if row["was_paused"]]

    def request_run(self, cursor: Any, task: str, by: str, seconds: float) -> RunRequest:
        """Ask for a manual run, unless one was asked for and has not begun; return the request.

        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: no live replica has the task, or only ``hold`` uses it
        """
        cursor.row_factory = class_row(RunRequest)
        wanted = {"task": task, "by": by, "seconds": seconds, "request_id": uuid4()}
        found = self._run_recording(cursor, self._request_run, **wanted)
        request: RunRequest | None = found.fetchone()
        if request is None:
            self._check_there(cursor, [task])
            raise TaskLockStateError(
                f"task {task!r} cannot have a manual run: no live replica has it (a task that only "
                "`hold` uses has no replica); see `apscheduler-tasklock replicas`"
            )
        return request

    def free(
        self, cursor: Any, task: str, token: int, by: str, *, force: bool, run_again: bool
    ) -> None:
        """Finish a run in place of its holder.

        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: the task's last run has another token, is finished, or may be
            alive and ``force`` is not set; or ``run_again`` is set, and the run is a manual run
        """
        cursor.row_factory = dict_row
        wanted = {
            "task": task,
            "token": token,
            "by": by,
            "force": force,
            "run_again": run_again,
            "channel": self._channel,
        }
        moves_job = run_again and self._has_jobs(cursor)
        statement = self._free_and_move if moves_job else self._free
        if self._run_recording(cursor, statement, **wanted).fetchone() is None:
            self._check_there(cursor, [task])
            [now] = self.tasks(cursor, [escaped(task)], 1)
            raise TaskLockStateError(_why_not_freed(now, token, run_again=run_again))

    def _has_jobs(self, cursor: Any) -> bool:
        """Return whether there is a table of stored jobs."""
        there = Statement("SELECT to_regclass(%(jobs)s) IS NOT NULL AS there")
        [row] = self._all(cursor, there, jobs=self._jobs_name.replace("%%", "%"))
        return bool(row["there"])

    def forget(self, cursor: Any, task: str) -> None:
        """Delete a task's row and its history.

        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: the task runs, or a live replica has it
        """
        if self._run(cursor, self._forget, task=task).fetchone() is None:
            self._check_there(cursor, [task])
            raise TaskLockStateError(
                f"task {task!r} is not forgotten: it is running, or a replica that is alive has it"
            )

    def _change_many(
        self,
        cursor: Any,
        statement: RecordingStatement,
        patterns: Sequence[str],
        wanted: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Change the tasks that match patterns; return their rows, in the order of their names."""
        cursor.row_factory = dict_row
        # A name without * and ? matches only itself.
        likes = [like_of(each) if set("*?") & set(each) else None for each in patterns]
        chosen = {"patterns": list(patterns), "likes": likes}
        rows = self._run_recording(cursor, statement, **chosen, **wanted).fetchall()
        missing = [row["name"] for row in rows if not row["is_there"]]
        if missing or (patterns and not rows):  # without rows: the tasks were deleted meanwhile
            raise TaskLockNotFoundError(missing or patterns)
        return sorted(rows, key=lambda row: str(row["name"]))

    def _check_there(self, cursor: Any, names: Sequence[str]) -> None:
        cursor.row_factory = dict_row
        missing = self._run(cursor, self._missing, names=list(names)).fetchall()
        if missing:
            raise TaskLockNotFoundError([row["wanted"] for row in missing])

    def _all(self, cursor: Any, statement: Statement, **wanted: object) -> list[Any]:
        found: list[Any] = self._run(cursor, statement, **wanted).fetchall()
        return found

    def _run_recording(self, cursor: Any, statement: RecordingStatement, **wanted: object) -> Any:
        """Run a statement with its entries in the run history, or without them if rejected."""
        if statement.recording is not None:
            try:
                return self._run(cursor, statement.recording, **wanted)
            except psycopg.DatabaseError as error:
                if as_unavailable(error) is not None:
                    raise
        return self._run(cursor, statement, **wanted)

    @staticmethod
    def _run(cursor: Any, statement: Statement, **wanted: object) -> Any:
        return cursor.execute(statement.query, statement.arguments(wanted))


def _pause(name: str, history: History | None = None) -> str:
    """Return the statement that pauses tasks."""
    assignments = f"""
        paused_by = %(by)s, pause_reason = %(reason)s,
        paused_at = COALESCE(CASE WHEN {IS_PAUSED} THEN paused_at END, now()),
        paused_until = now() + %(seconds)s::float8 * interval '1 second',
        recorded_actions = recorded_actions + {int(history is not None)}
    """
    end = {"until": "run.paused_until", "reason": "%(reason)s::text"}
    entry = history.action("paused", "changed AS run", **end) if history else ""
    return _change_of_many(name, assignments, entry)


def _resume(name: str, history: History | None = None) -> str:
    """Return the statement that ends the pauses of tasks.

    The pause ends now and is kept in the row, so that no run makes up for the run times in it.
    """
    entries = f"CASE WHEN {IS_PAUSED} THEN {int(history is not None)} ELSE 0 END"
    assignments = f"""
        paused_by = NULL, pause_reason = NULL,
        paused_until = CASE WHEN {IS_PAUSED} THEN now() ELSE paused_until END,
        recorded_actions = recorded_actions + {entries}
    """
    rows = "changed AS run WHERE run.was_paused"
    entry = history.action("resumed", rows) if history else ""
    return _change_of_many(name, assignments, entry)


def _request_run(name: str, history: History | None = None, *, replicas: str) -> str:
    """Return the statement that asks for a manual run.

    :param replicas: the quoted name of the replicas' table, for a template
    """
    entry, entries = "", int(history is not None)
    if history is not None:
        asked = "requested AS run WHERE run.request_id = %(request_id)s"
        entry = f", entry AS ({history.action('run', asked, until='run.request_until')})"
    return f"""
        WITH requested AS (
            UPDATE {name} AS lock SET
                request_id = CASE WHEN {_IS_OPEN} THEN lock.request_id ELSE %(request_id)s END,
                requested_by = CASE WHEN {_IS_OPEN} THEN lock.requested_by ELSE %(by)s END,
                requested_at = CASE WHEN {_IS_OPEN} THEN lock.requested_at ELSE now() END,
                request_until = CASE WHEN {_IS_OPEN} THEN lock.request_until
                    ELSE now() + %(seconds)s::float8 * interval '1 second' END,
                recorded_actions = recorded_actions
                    + CASE WHEN {_IS_OPEN} THEN 0 ELSE {entries} END
            WHERE task_name = %(task)s AND runs <> '' AND EXISTS (
                SELECT FROM {replicas} WHERE {IS_ALIVE} AND {_HAS_TASK})
            RETURNING *
        ){entry}
        SELECT request_id, task_name AS task, token, requested_by, requested_at,
               request_until AS until
        FROM requested
    """


def _free(name: str, history: History | None = None, *, jobs: str | None = None) -> str:
    """Return the statement that finishes a run in place of its holder.

    :param jobs: the quoted name of the jobs' table, for a template, if the run's stored job becomes
        due again at the same run time
    """
    more, entries = [], int(history is not None)
    if history is not None:
        freed = history.entry("freed AS run", outcome="'freed'")
        more += [f"entry AS ({freed})", f"action AS ({history.action('freed', 'freed AS run')})"]
    if jobs is not None:
        # The job gets a new `changed_id`, so that a replica that has read the job before cannot
        # claim it. A paused job stays paused.
        more.append(f"""moved AS (
            UPDATE {jobs} AS job SET
                next_run_time = last_run_time, ended = false, version = version + 1,
                changed_id = gen_random_uuid()
            FROM freed
            WHERE job.task_name = freed.task_name AND last_run_time = freed.window_start
                  AND (ended OR next_run_time IS NOT NULL)
        )""")
    return f"""
        WITH freed AS (
            UPDATE {name} AS lock SET
                finished_at = now(), claim_id = gen_random_uuid(), handed_over = false,
                last_outcome = 'freed', locked_until = now(),
                recorded_failures = recorded_failures + {entries},
                recorded_actions = recorded_actions + {entries},
                deaths = 0, handovers = 0,
                window_until = CASE WHEN %(run_again)s::boolean
                                    THEN window_start - {JUST_BEFORE} ELSE window_until END
            WHERE task_name = %(task)s AND token = %(token)s AND finished_at IS NULL
                  AND (locked_until <= now() OR %(force)s::boolean)
                  AND NOT (%(run_again)s::boolean AND kind IS NOT DISTINCT FROM 'manual')
            RETURNING *
        ){"".join(f", {part}" for part in more)}
        SELECT task_name{", pg_notify(%(channel)s, '')" if jobs else ""} FROM freed
    """


def _change_of_many(name: str, assignments: str, entry: str) -> str:
    """Return a statement that changes all tasks that match patterns, or none.

    If a task has exactly the name that a pattern spells, the pattern matches only that task. A
    pattern that matches no task may be mistyped, so the statement changes nothing, and returns that
    pattern as missing.

    :param name: the quoted name of the task lock table, for a template
    :param assignments: the assignments of the UPDATE
    :param entry: the INSERT of the entries of ``changed`` in the run history; ``""``: none
    """
    return f"""
        WITH given AS (
            SELECT DISTINCT pattern, alike
            FROM unnest(%(patterns)s::text[], %(likes)s::text[]) AS given (pattern, alike)
        ), chosen AS (
            SELECT given.pattern, lock.task_name FROM given JOIN {name} AS lock
            ON lock.task_name = given.pattern
               OR (lock.task_name LIKE given.alike
                   AND NOT EXISTS (SELECT FROM {name} AS exact
                                   WHERE exact.task_name = given.pattern))
        ), missing AS (
            SELECT pattern FROM given WHERE pattern NOT IN (SELECT pattern FROM chosen)
        ), locked AS (
            SELECT lock.task_name, {IS_PAUSED} AS was_paused
            FROM {name} AS lock
            WHERE task_name IN (SELECT task_name FROM chosen)
                  AND NOT EXISTS (SELECT FROM missing)
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock
        ), changed AS (
            UPDATE {name} AS lock SET {assignments}
            FROM locked WHERE lock.task_name = locked.task_name
            RETURNING lock.*, locked.was_paused
        ){f", entry AS ({entry})" if entry else ""}
        SELECT task_name AS name, was_paused, true AS is_there FROM changed
        UNION ALL SELECT pattern, false, false FROM missing
    """


def like_of(pattern: str) -> str:
    """Return the ``LIKE`` pattern of a glob with ``*`` and ``?``."""
    return escaped(pattern).replace("*", "%").replace("?", "_")


def escaped(name: str) -> str:
    """Return the ``LIKE`` pattern that only this name matches."""
    return "".join(f"\\{character}" if character in "\\%_" else character for character in name)


def _list(like: Sequence[str] | None) -> list[str] | None:
    return None if like is None else list(like)


def _task_status(row: dict[str, Any]) -> TaskStatus:
    is_new, state = row.pop("is_new"), TaskState(row["state"])
    is_due = state in (TaskState.LATE, TaskState.OVERDUE)
    unknown = ["started_at", "finished_at", "took"] if is_new else []
    if row.pop("has_no_window"):  # never claimed for a run time, at most for a manual run
        unknown += ["scheduled_at", "window_until"]
    bad: list[str] = []
    schedule = _from_json(row, "schedule", bad)
    columns = [row.pop(name) or () for name in ("stuck_tokens", "stuck_on", "stuck_since")]
    return TaskStatus(
        **{
            **row,
            **dict.fromkeys(unknown),
            "stuck": tuple(
                RunningRun(row["name"], token, replica, since, lost=True)
                for token, replica, since in zip(*columns, strict=True)
            ),
            "state": TaskState.UNREADABLE if bad else state,
            "schedule": schedule,
            "late_by": row["late_by"] if is_due else None,
            "unreadable": tuple(bad),
        }
    )


def _replica_status(row: dict[str, Any], running: tuple[RunningRun, ...]) -> ReplicaStatus:
    lists = {name: texts(row[name]) for name in ("tasks", "rejected")}
    bad = [name for name, found in lists.items() if len(found) < len(row[name])]
    if not row.pop("tells_runs"):
        bad.append("running")
    state = ReplicaState.UNREADABLE if bad else ReplicaState(row["state"])
    more = {"state": state, "running": running, "unreadable": tuple(bad)}
    return ReplicaStatus(**{**row, **lists, **more})


def _job_status(row: dict[str, Any]) -> JobStatus:
    bad: list[str] = []
    trigger = _from_json(row, "trigger", bad)
    state = JobState.UNREADABLE if bad else JobState(row["state"])
    more = {"trigger": trigger, "state": state, "unreadable": tuple(bad)}
    return JobStatus(**{**row, **more})


def _from_json(row: dict[str, Any], name: str, unreadable: list[str]) -> Any:
    """Return the value of a JSON column; ``None`` if it is null or cannot be read.

    :param unreadable: the list to which the name of a column that cannot be read is added
    """
    try:
        return None if row[name] is None else read_json(row[name])
    except ValueError:
        unreadable.append(name)
        return None


def _why_not_freed(task: TaskStatus, token: int, *, run_again: bool) -> str:
    if task.token != token:
        why = f"its last run has the token {task.token}"
    elif task.finished_at is not None:
        why = "its run has ended"
    elif run_again and task.kind == "manual":
        why = (
            "its run is a manual run, which has no window to open again; free the task without "
            "--run-again (`run_again=True`), and then ask for another manual run with "
            "`apscheduler-tasklock run`"
        )
    else:
        why = (
            f"its holder {task.holder!r} may be alive, and has the lock until "
            f"{task.locked_until:%Y-%m-%d %H:%M:%S %Z}; if its run hangs, use --force "
            "(`force=True`)"
        )
    return f"task {task.name!r} (token {token}) is not freed: {why}"
