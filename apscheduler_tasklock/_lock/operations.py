"""What operators see and steer: reads of the rows, and changes of single tasks.

These are for people and for what watches, and not on the way of a run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

from psycopg.errors import InsufficientPrivilege, UndefinedTable
from psycopg.rows import class_row, dict_row
from sqlalchemy import Table

from apscheduler_tasklock._database.errors import one_line
from apscheduler_tasklock._database.rejections import REPLICAS, Rejections
from apscheduler_tasklock._lock.jobs import channel_of
from apscheduler_tasklock._lock.readable import IS_RUN, RUNS_TOLD, read_json, texts
from apscheduler_tasklock._lock.statements import (
    DUE_IN_PAUSE,
    IS_ALIVE,
    IS_HEARD,
    IS_PAUSED,
    JUST_BEFORE,
    NEVER,
    SHORTEST_WAIT,
    Statement,
    for_template,
)
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
    TaskState,
    TaskStatus,
)

# A replica that lives tells after a pause when the task is due. If none does, it is due about a
# period after the end of the pause.
_DUE = f"""
    CASE WHEN NOT {DUE_IN_PAUSE} THEN lock.due_at
         WHEN lock.paused_until <= now() AND lock.started_at <> {NEVER}
         THEN lock.paused_until + GREATEST(lock.due_at - lock.window_start, '0') END
"""
_DUE_AND_GRACE = f"({_DUE} + (lock.overdue_at - lock.due_at))"
# As it is reckoned, it might be a time that Python lacks.
_OVERDUE = f"""
    CASE WHEN {_DUE_AND_GRACE} IS NOT NULL
         THEN LEAST(GREATEST({_DUE_AND_GRACE}, {EARLIEST}), {LATEST}) END
"""
# It was removed, and its row is left: replicas live, none of them has it, and nobody waits for it.
_GONE = """(lock.due_at IS NULL AND NOT lock.is_last AND EXISTS (SELECT FROM alive)
            AND known.task_name IS NULL AND COALESCE(lock.kind, '') <> 'hold'
            AND NOT lock.one_off)"""
# It has outlived its maximum lock, and goes on, unless its replica is gone by now.
_OVERRUNS = """(lock.finished_at IS NULL AND NOT lock.handed_over AND lock.overran
                AND NOT EXISTS (SELECT FROM unheard WHERE replica_id = lock.locked_by))"""
# A run that its replica still has, although its lock is lost and its time is over.
_IS_STUCK = """((lost.token < lock.token OR lock.finished_at IS NULL
                 OR lock.last_outcome IN ('died', 'overran', 'freed'))
                AND lost.since + COALESCE(lock.overrun_at - lock.started_at, '0') < now())"""
# When a stop cut it, if nobody has run its window. One that was handed over is looked for first.
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

# Its run was found dead, in the task's row or in the history, and it has said nothing since. One of
# whose worker processes has died says at once that it lives.
_REPLICA_STATE = """
    CASE WHEN stopped_at IS NOT NULL AND NOT heard THEN 'stopped'
         WHEN died_at > seen_at OR EXISTS (
             SELECT FROM {table} AS lock
             WHERE locked_by = replica_id AND finished_at IS NULL AND NOT handed_over
                   AND NOT overran AND locked_until <= now() AND locked_until > seen_at)
             THEN 'died'
         WHEN heard THEN 'alive' ELSE 'silent' END
"""
# What a replica told when it was heard last, of runs whose locks were lost.
_LOST = f"""
    SELECT run ->> 'task'::text AS task,
           CASE WHEN {IS_RUN} THEN (run ->> 'token'::text)::numeric::bigint END AS token,
           CASE WHEN {IS_RUN} THEN to_timestamp((run ->> 'since'::text)::float8) END AS since,
           replica_id
    FROM replicas, {RUNS_TOLD} AS run
    WHERE heard AND {IS_RUN} AND run -> 'lost'::text = 'true'
"""
# In place of the replicas, where they cannot be read.
_NO_REPLICAS = """
    SELECT '' AS replica_id, NULL::text[] AS tasks, '[]'::jsonb AS running, false AS alive,
           false AS heard WHERE false
"""

_JOB_STATE = """
    CASE WHEN job.ended THEN 'ended' WHEN job.handed_until > now() THEN 'handed out'
         WHEN job.next_run_time IS NULL THEN 'paused' WHEN job.next_run_time <= now() THEN 'due'
         ELSE 'waiting' END
"""

# Of a replica. The operator is that of any array, and one for text[] alone would come before it.
_HAS_TASK = "tasks OPERATOR(pg_catalog.@>) ARRAY[%(task)s::text]"

# A request for a run that nobody has begun yet.
_IS_OPEN = "lock.request_id IS NOT NULL AND lock.request_until > now()"


class Operations:
    """The statements of operators for one task lock table, run on a cursor as of ``raw_cursor``.

    :param table: the task lock table
    :param rejections: is told if the database rejects what can be left out
    """

    def __init__(self, table: Table, rejections: Rejections | None = None) -> None:
        self._rejections = rejections or Rejections()
        name = for_template(table)
        self._name = name
        self._jobs_name = for_template(job_table(table))
        self._channel = channel_of(table)
        self._runs = for_template(run_table(table))
        self._replicas = for_template(replica_table(table))
        # Replicas of one deployment have the same tasks, and say so in the same order.
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
                     run.ended_at, run.replica, run.kind, run.outcome, run.error_type, run.error"""
        # It reads the whole history, which is limited for each task. An index by time would make
        # every release write to the indexes as well. Nor does a task's row say when its newest
        # entry is from: the last run may have none, or be going on. Most of the time would go into
        # sorting. Where a hundredth of the history already has so many runs that match, none is
        # wanted that is older than those.
        matches = """(%(like)s::text[] IS NULL OR run.task_name LIKE ANY (%(like)s::text[]))
                     AND (%(outcome)s::text IS NULL OR run.outcome = %(outcome)s)
                     AND (%(since)s::timestamptz IS NULL OR run.started_at >= %(since)s)
                     AND (%(until)s::timestamptz IS NULL OR run.started_at < %(until)s)"""
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
              AND (%(since)s::timestamptz IS NULL OR run.started_at >= %(since)s)
              AND (%(until)s::timestamptz IS NULL OR run.started_at < %(until)s)
            ORDER BY run.token DESC LIMIT %(limit)s
        """)
        found_dead = f"""
            SELECT replica AS replica_id, max(ended_at) AS died_at
            FROM {self._runs} WHERE outcome = 'died' GROUP BY 1
        """
        list_replicas = f"""
            WITH replicas AS ({replicas}), dead AS ({found_dead})
            SELECT replica_id, host, version, started_at, seen_at, tasks, rejected,
                   jsonb_typeof(running) = 'array' AND NOT EXISTS (
                       SELECT FROM {RUNS_TOLD} AS run WHERE NOT {IS_RUN}) AS tells_runs,
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
                   CASE WHEN job.handed_until > now() THEN job.handed_to END AS handed_to,
                   CASE WHEN job.handed_until > now() THEN job.handed_until END AS handed_until,
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
        self._pause = _change_of_many(
            name,
            f"""paused_by = %(by)s, pause_reason = %(reason)s,
               paused_at = COALESCE(CASE WHEN {IS_PAUSED} THEN paused_at END, now()),
               paused_until = now() + %(seconds)s::float8 * interval '1 second'""",
        )
        # The run times of the pause stay behind the end of it: nobody makes up for them.
        self._resume = _change_of_many(
            name,
            f"""paused_by = NULL, pause_reason = NULL, paused_until =
               CASE WHEN {IS_PAUSED} THEN now() ELSE paused_until END""",
        )
        self._request_run = Statement(f"""
            UPDATE {name} AS lock SET
                request_id = CASE WHEN {_IS_OPEN} THEN lock.request_id ELSE %(request_id)s END,
                requested_by = CASE WHEN {_IS_OPEN} THEN lock.requested_by ELSE %(by)s END,
                requested_at = CASE WHEN {_IS_OPEN} THEN lock.requested_at ELSE now() END,
                request_until = CASE WHEN {_IS_OPEN} THEN lock.request_until
                    ELSE now() + %(seconds)s::float8 * interval '1 second' END
            WHERE task_name = %(task)s AND runs <> '' AND EXISTS (
                SELECT FROM {self._replicas} WHERE {IS_ALIVE} AND {_HAS_TASK})
            RETURNING request_id, task_name AS task, token, requested_by, requested_at,
                      request_until AS until
        """)
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
        """Return the rows of tasks, also where the replicas, a convenience, cannot be read."""
        if not self._rejections.is_left_out(REPLICAS):
            try:
                rows = self._all(cursor, self._tasks, **wanted)
            except (UndefinedTable, InsufficientPrivilege) as error:
                rows = self._all(cursor, self._tasks_without_replicas, **wanted)
                self._rejections.begin(
                    REPLICAS,
                    "the replicas cannot be read, so that it is not known which tasks none of them "
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
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
    ) -> list[Run]:
        """Return runs that are over, the newest first."""
        cursor.row_factory = dict_row
        wanted = {"outcome": outcome, "since": since, "until": until, "limit": limit}
        if task is not None:
            rows = self._all(cursor, self._runs_of_task, task=task, **wanted)
        else:
            rows = self._all(cursor, self._matching_runs, like=_list(like), **wanted)
        return [Run(**row) for row in rows]

    def replicas(self, cursor: Any) -> list[ReplicaStatus]:
        """Return the replicas, those that started first before the others."""
        cursor.row_factory = dict_row
        try:
            rows = self._all(cursor, self._list_replicas)
        except (UndefinedTable, InsufficientPrivilege):  # of the history, or else this says so, too
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
        """Return jobs of the job store by their next run times; those without one last.

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
        """Pause tasks; once this has returned, nobody is granted them.

        :param patterns: names, or globs where no task has exactly that name
        :return: the names of the tasks
        :raises TaskLockNotFoundError: no task matches one of the patterns; then none is paused
        """
        wanted = {"seconds": seconds, "by": by, "reason": reason}
        return [row["name"] for row in self._change_many(cursor, self._pause, patterns, wanted)]

    def resume(self, cursor: Any, patterns: Sequence[str]) -> list[str]:
        """End the pause of tasks.

        :param patterns: names, or globs where no task has exactly that name
        :return: the names of those that were paused
        :raises TaskLockNotFoundError: no task matches one of the patterns; then none is resumed
        """
        rows = self._change_many(cursor, self._resume, patterns, {})
        return [row["name"] for row in rows if row["was_paused"]]

    def request_run(self, cursor: Any, task: str, by: str, seconds: float) -> RunRequest:
        """Ask for a run; while a request is open, return that one.

        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: no replica that lives has it, or it is a ``hold``
        """
        cursor.row_factory = class_row(RunRequest)
        wanted = {"task": task, "by": by, "seconds": seconds, "request_id": uuid4()}
        request: RunRequest | None = self._run(cursor, self._request_run, **wanted).fetchone()
        if request is None:
            self._check_there(cursor, [task])
            raise TaskLockStateError(
                f"task {task!r} cannot be run by hand: no replica that is alive has it (a task "
                "that only `hold` uses is in none); see `apscheduler-tasklock replicas`"
            )
        return request

    def free(
        self, cursor: Any, task: str, token: int, *, force: bool, run_again: bool, slots: int
    ) -> None:
        """End a claim in the place of its holder.

        :param slots: how many runs of each task the history keeps
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: its last run has another token, or has ended, or is alive; or it
            is to be run again, and was asked for by hand
        """
        cursor.row_factory = dict_row
        wanted = {
            "task": task,
            "token": token,
            "force": force,
            "run_again": run_again,
            "slots": slots,
            "channel": self._channel,
        }
        moves_job = run_again and self._has_jobs(cursor)
        try:
            statement = self._free(recorded=True, moves_job=moves_job)
            freed = self._run(cursor, statement, **wanted).fetchone()
        except (UndefinedTable, InsufficientPrivilege):  # of the history, which is a convenience
            statement = self._free(recorded=False, moves_job=moves_job)
            freed = self._run(cursor, statement, **wanted).fetchone()
        if freed is None:
            self._check_there(cursor, [task])
            [now] = self.tasks(cursor, [escaped(task)], 1)
            raise TaskLockStateError(_why_not_freed(now, token, run_again=run_again))

    def _has_jobs(self, cursor: Any) -> bool:
        """Tell whether there is a table of stored jobs."""
        there = Statement("SELECT to_regclass(%(jobs)s) IS NOT NULL AS there")
        [row] = self._all(cursor, there, jobs=self._jobs_name.replace("%%", "%"))
        return bool(row["there"])

    def _free(self, *, recorded: bool, moves_job: bool) -> Statement:
        """Return the statement that ends a claim.

        :param recorded: whether it has an entry in the run history
        :param moves_job: whether a stored job is due again at the run time that it ran
        """
        entry = f"""
            INSERT INTO {self._runs} (task_name, slot, token, scheduled_at, started_at,
                                      ended_at, replica, kind, outcome)
            SELECT task_name, (recorded - 1) %% %(slots)s::int, token,
                   CASE WHEN kind IN ('hold', 'manual') THEN NULL ELSE window_start END,
                   started_at,
                   now(), locked_by, COALESCE(kind, 'schedule'), 'freed' FROM freed
            WHERE %(slots)s::int > 0
            ON CONFLICT (task_name, slot) DO UPDATE SET
                token = excluded.token, scheduled_at = excluded.scheduled_at,
                started_at = excluded.started_at, ended_at = excluded.ended_at,
                replica = excluded.replica, kind = excluded.kind, outcome = excluded.outcome,
                error_type = NULL, error = NULL
        """
        # As if it had been handed out in time, so that it is no misfire. One that its users have
        # paused stays so.
        moved = f"""
            UPDATE {self._jobs_name} AS job SET
                next_run_time = last_run_time, ended = false, version = version + 1,
                handed_id = NULL, handed_to = NULL, handed_until = NULL,
                first_handed_at = last_run_time
            FROM freed
            WHERE job.task_name = freed.task_name AND last_run_time = freed.window_start
                  AND (ended OR next_run_time IS NOT NULL)
        """
        more = [f"entry AS ({entry})"] * recorded + [f"moved AS ({moved})"] * moves_job
        return Statement(f"""
            WITH freed AS (
                UPDATE {self._name} AS lock SET
                    finished_at = now(), claim_id = gen_random_uuid(), handed_over = false,
                    last_outcome = 'freed', locked_until = now(), recorded = recorded + 1,
                    deaths = 0, handovers = 0,
                    window_until = CASE WHEN %(run_again)s::boolean
                                        THEN window_start - {JUST_BEFORE} ELSE window_until END
                WHERE task_name = %(task)s AND token = %(token)s AND finished_at IS NULL
                      AND (locked_until <= now() OR %(force)s::boolean)
                      AND NOT (%(run_again)s::boolean AND kind IS NOT DISTINCT FROM 'manual')
                RETURNING *
            ){"".join(f", {part}" for part in more)}
            SELECT task_name{", pg_notify(%(channel)s, '')" * moves_job} FROM freed
        """)

    def forget(self, cursor: Any, task: str) -> None:
        """Delete a task's row and its history.

        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: it runs, or a replica that lives has it
        """
        if self._run(cursor, self._forget, task=task).fetchone() is None:
            self._check_there(cursor, [task])
            raise TaskLockStateError(
                f"task {task!r} is not forgotten: it is running, or a replica that is alive has it"
            )

    def _change_many(
        self,
        cursor: Any,
        statement: Statement,
        patterns: Sequence[str],
        wanted: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Return the rows of the tasks that a change was made of, in the order of their names."""
        cursor.row_factory = dict_row
        # One that is no pattern matches what has exactly its name.
        likes = [like_of(each) if set("*?") & set(each) else None for each in patterns]
        chosen = {"patterns": list(patterns), "likes": likes}
        rows = self._all(cursor, statement, **chosen, **wanted)
        missing = [row["name"] for row in rows if not row["is_there"]]
        if missing or (patterns and not rows):  # or they were forgotten meanwhile
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

    @staticmethod
    def _run(cursor: Any, statement: Statement, **wanted: object) -> Any:
        return cursor.execute(statement.query, statement.arguments(wanted))


def _change_of_many(name: str, assignments: str) -> Statement:
    """Return a statement that changes all tasks that patterns choose, or none.

    A pattern chooses the task of exactly that name alone. If one chooses no task, somebody has
    mistyped it: then it comes back as not there, and nothing is changed.

    :param name: the quoted name of the task lock table, for a template
    :param assignments: what is set
    """
    return Statement(f"""
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
            RETURNING lock.task_name, locked.was_paused
        )
        SELECT task_name AS name, was_paused, true AS is_there FROM changed
        UNION ALL SELECT pattern, false, false FROM missing
    """)


def like_of(pattern: str) -> str:
    """Return the ``LIKE`` pattern of a glob, in which ``*`` and ``?`` stand for characters."""
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
    if row.pop("has_no_window"):  # it was never claimed for a run time; maybe by hand
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
    """Return what a column says in JSON; ``None`` if it is null, or unreadable, which is noted."""
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
            "its run was asked for by hand and has no window that could be opened; free it without "
            "--run-again (`run_again=True`), and then ask for another with `apscheduler-tasklock "
            "run`"
        )
    else:
        why = (
            f"{task.holder!r} has it until {task.locked_until:%Y-%m-%d %H:%M:%S %Z} and may be "
            "alive; if its run hangs, force it"
        )
    return f"task {task.name!r} (token {token}) is not freed: {why}"
