"""Operators' reads of all rows: tasks, runs, lanes, replicas and stored jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from psycopg.errors import (
    InsufficientPrivilege,
    QueryCanceled,
    UndefinedTable,
)
from sqlalchemy import Table

from apscheduler_tasklock._database.rejections import REPLICAS, Rejections
from apscheduler_tasklock._database.sqlstates import SlowReadError, one_line
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.wire import class_row, dict_row
from apscheduler_tasklock._lock.job_rows import channel_of
from apscheduler_tasklock._lock.json_columns import (
    IS_PAUSE,
    IS_RUN,
    REPORTED_RUNS,
    json_elements_of,
    moment_of,
    read_json,
    strings_of,
)
from apscheduler_tasklock._lock.outcomes import FAILED, UNRELEASED, in_sql
from apscheduler_tasklock._lock.patterns import (
    escaped,
    is_pattern,
    like_of,
    names_of_all,
    shown_name,
)
from apscheduler_tasklock._lock.schedules import with_exact_times
from apscheduler_tasklock._lock.statements import (
    DUE_IN_ANY_PAUSE,
    HAS_STOPPED,
    IS_ALIVE,
    IS_HEARD,
    IS_LEADER,
    IS_PAUSED,
    IS_PAUSED_IN_ANY_WAY,
    IS_RETRY_PENDING,
    IS_TASK,
    LEADER_NAMESPACE,
    LEADS,
    MAY_BE_CLAIMED,
    NEVER,
    SHORTEST_WAIT,
    SILENT_AFTER,
    Statement,
    for_template,
    lanes,
    listed_pauses,
    pauses_of_all,
    runs_kept_since,
)
from apscheduler_tasklock._lock.statements.history import run_columns
from apscheduler_tasklock._lock.statements.misses import EXPECTED
from apscheduler_tasklock._values import LONGEST_MESSAGE
from apscheduler_tasklock.errors import (
    TaskLockNotFoundError,
    TaskLockOptionError,
    TaskLockStateError,
)
from apscheduler_tasklock.options import DEFAULT_LEASE, RESERVED_KEY
from apscheduler_tasklock.schema.table import (
    EARLIEST,
    LATEST,
    job_table,
    replica_table,
    run_table,
)
from apscheduler_tasklock.status import (
    URGENCY,
    Durations,
    JobState,
    JobStatus,
    Lane,
    LaneEntry,
    Lanes,
    Misses,
    OptionSource,
    Overview,
    Pause,
    ReplicaState,
    ReplicaStatus,
    Run,
    RunningRun,
    Silence,
    Spread,
    TaskState,
    TaskStatus,
)

# When the last pause of a task ends or has ended. Pauses without an end are left out, so it is null
# if all are without an end, or if there is none.
_LAST_PAUSE_UNTIL = """GREATEST(lock.paused_until, (
    SELECT max(listed_pauses.until) FROM listed_pauses
    WHERE starts_with(lock.task_name, listed_pauses.namespace)))"""
# Whether a task is paused, and whether its due time falls into a pause. Each is computed once for a
# row, because the pauses of all tasks are searched for it, which takes long.
_IN_PAUSE = f"""(SELECT {IS_PAUSED_IN_ANY_WAY} AS now, {DUE_IN_ANY_PAUSE} AS due OFFSET 0)"""
# When a task is due. After a pause, a live replica registers the next due time. Without a live
# replica, the task counts as due about a period after the pause's end.
_DUE = f"""
    (SELECT CASE WHEN NOT in_pause.due THEN lock.due_at
                 WHEN NOT in_pause.now AND lock.started_at <> {NEVER}
                 THEN {_LAST_PAUSE_UNTIL} + GREATEST(lock.due_at - lock.window_start, '0')
            END AS at OFFSET 0)
"""
_DUE_AND_GRACE = "(due.at + (lock.overdue_at - lock.due_at))"
# When a task counts as overdue. The sum is limited to the times that Python has, because it may be
# a time that only PostgreSQL has.
_OVERDUE = f"""
    CASE WHEN {_DUE_AND_GRACE} IS NOT NULL
         THEN LEAST(GREATEST({_DUE_AND_GRACE}, {EARLIEST}), {LATEST}) END
"""
# A removed task whose row is left: there are live replicas, none of them has the task, and it has
# no due time.
_GONE = """(lock.due_at IS NULL AND NOT lock.is_last AND EXISTS (SELECT FROM alive)
            AND COALESCE(lock.kind, '') <> 'hold' AND NOT lock.one_off
            AND lock.task_name NOT IN (SELECT task_name FROM known))"""
# Whether the holder of a task has died or is silent, as operators see it.
_IS_HOLDER_SILENT = "EXISTS (SELECT FROM unheard WHERE replica_id = lock.locked_by)"
# A run that goes on beyond its maximum lock, on a replica that still gives signs of life.
_OVERRUNS = f"""(lock.finished_at IS NULL AND NOT lock.handed_over AND lock.overran
                AND NOT {_IS_HOLDER_SILENT})"""
# A run that goes on although its lock is lost, and takes longer than it may.
_IS_STUCK = f"""((lost.token < lock.token OR lock.finished_at IS NULL
                 OR lock.last_outcome IN {in_sql(UNRELEASED)})
                AND lost.since + COALESCE(lock.overrun_at - lock.started_at, '0') < now())"""
# When a shutdown has cut the run, if no replica has run the window again. A handed-over run counts
# as cut only after the time that a takeover needs.
_CUT_AT = f"""
    CASE WHEN lock.finished_at IS NOT NULL AND lock.last_outcome = 'cut' THEN lock.finished_at
         WHEN lock.finished_at IS NULL AND lock.handed_over
              AND lock.last_outcome IS DISTINCT FROM 'overran'
              AND lock.locked_until + {SHORTEST_WAIT} <= now() THEN lock.locked_until END
"""
# The run time of a one-off job, if no replica has run it or a later one. Misses of a recurring job
# do not alarm, because the job has a next run time.
_MISSED_AT = """
    CASE WHEN lock.one_off AND lock.missed_at > lock.window_start
              AND lock.missed_at >= lock.window_until THEN lock.missed_at END
"""
# When it was noted, if the job has never run. The run time may be much earlier.
_MISSED_SINCE = f"""
    CASE WHEN {_MISSED_AT} IS NOT NULL THEN GREATEST(
        lock.missed_at, CASE WHEN lock.started_at = {NEVER} THEN lock.finished_at END) END
"""
# Whether the last run time has failed, and its retry is to come or goes on. If the retry does not
# begin within the task's grace time, or an earlier run time has failed as well, the task counts as
# failing. In a pause, the retry waits for the pause's end.
_IS_RETRIED = f"""(lock.failures = 1 AND (
    (lock.finished_at IS NULL AND lock.attempt > 1
     AND (lock.locked_until > now() OR lock.failover OR lock.handed_over))
    OR ({IS_RETRY_PENDING} AND (
        now() < GREATEST(lock.retry_at, {_LAST_PAUSE_UNTIL})
            + COALESCE(lock.overdue_at - lock.due_at, interval '1 minute')
        OR {IS_PAUSED_IN_ANY_WAY}))))"""
# The time of the failure, the cut or the miss for which a monitor alarms; null if there is none.
ALARMS_SINCE = f"""GREATEST(
    CASE WHEN lock.failures > 0 AND {_IS_RETRIED} IS NOT TRUE THEN lock.failed_at END,
    {_CUT_AT}, {_MISSED_SINCE})"""
# Whether an operator has acknowledged this failure, cut or miss. `acknowledged_at` is the time of
# the acknowledged one, so that a later one alarms again.
_IS_ACKNOWLEDGED = f"COALESCE({ALARMS_SINCE} <= lock.acknowledged_at, false)"
# A one-off job has no next run that could end the alarm, so time ends it.
NO_LONGER_ALARMS = f"""({_IS_ACKNOWLEDGED}
    OR COALESCE(lock.one_off AND {ALARMS_SINCE} < now() - interval '1 day', false))"""
_OUTCOME = f"""
    CASE WHEN lock.finished_at IS NOT NULL THEN lock.last_outcome
         WHEN lock.handed_over THEN COALESCE(lock.last_outcome, 'cut')
         WHEN lock.locked_until > now() OR {_OVERRUNS} THEN NULL
         WHEN lock.overran THEN 'overran' ELSE 'died' END
"""
# How long the last run took, or has taken so far, in seconds.
# A run may have begun after the time of the read, which is that of its transaction's begin.
_TOOK = f"""GREATEST(0::float8, extract(epoch FROM CASE
        WHEN lock.finished_at IS NOT NULL THEN lock.finished_at
        WHEN {_OVERRUNS} THEN now() ELSE LEAST(now(), lock.locked_until) END
    - lock.started_at)::float8)"""
_FAILURES = f"CASE WHEN {_IS_RETRIED} THEN 0 ELSE lock.failures END"
# How the last failure came about. It stands beside the next run until that one is over.
_FAILURE = f"""
    CASE WHEN {_FAILURES} > 0 THEN
        CASE WHEN lock.error_type IS NOT NULL THEN 'error'
             WHEN lock.last_outcome IN {in_sql(UNRELEASED)} THEN lock.last_outcome END
    END
"""
_STATE = f"""
    CASE WHEN stuck.tokens IS NOT NULL THEN 'too long'
         WHEN lock.finished_at IS NULL AND lock.locked_until > now() AND NOT lock.handed_over
              THEN CASE WHEN lock.overrun_at BETWEEN lock.started_at AND now()
                        THEN 'too long' WHEN {_IS_HOLDER_SILENT} THEN 'holder silent'
                        ELSE 'running' END
         WHEN {_OVERRUNS} THEN 'too long'
         WHEN in_pause.now THEN 'paused'
         WHEN lock.finished_at IS NULL AND NOT lock.handed_over THEN 'dead'
         WHEN job.paused_since IS NOT NULL THEN 'paused'
         WHEN lock.window_start < due.at AND {_OVERDUE} < now() THEN 'overdue'
         WHEN lock.window_start < due.at AND due.at < now() THEN 'late'
         WHEN {_MISSED_AT} IS NOT NULL THEN 'missed'
         WHEN {_CUT_AT} IS NOT NULL THEN 'cut'
         WHEN {_IS_RETRIED} THEN 'retrying'
         WHEN lock.failures > 0 THEN 'failing'
         WHEN {_GONE} THEN 'gone'
         WHEN lock.started_at = {NEVER} THEN 'new'
         ELSE 'ok' END
"""
# A replica has died if the history has the death of one of its runs, and the replica has given no
# sign of life since the run's end. A lease that has ended tells of no death: in an outage, no
# replica can renew one. A replica of which only a worker process has died gives a sign of life at
# once.
_REPLICA_STATE = f"""
    CASE WHEN {HAS_STOPPED} THEN 'stopped' WHEN died_at > seen_at THEN 'died'
         WHEN heard THEN 'alive' ELSE 'silent' END
"""
# A task's lease: by its registered options, or else the longest that it has by default. It is null
# if its claims have none. Only whole seconds are read, because a cast of another text may fail.
_LEASE = f"""(NULLIF(COALESCE(substring(lock.details FROM '"lease": [[]([0-9]{{1,9}}|null)'),
                              '{DEFAULT_LEASE}'), 'null')::float8 * interval '1 second')"""
# When a run that goes on was renewed last, or earlier.
_RENEWED_AT = f"(lock.locked_until - {_LEASE})"
# Limits how long a lease counts as a sign of life after its renewal, so that a long one does not
# hide that no replica is alive.
_LEASE_OF_LIFE = "interval '60 s'"
# The runs with lost locks that a replica has reported with its last sign of life.
_LOST = f"""
    SELECT run ->> 'task'::text AS task,
           CASE WHEN {IS_RUN} THEN (run ->> 'token'::text)::numeric::bigint END AS token,
           CASE WHEN {IS_RUN} THEN to_timestamp((run ->> 'since'::text)::float8) END AS since,
           replica_id
    FROM replicas, {REPORTED_RUNS} AS run
    WHERE heard AND {IS_RUN} AND run -> 'lost'::text = 'true'
"""
# No stored jobs, where their table cannot be read.
_NO_PAUSED_JOBS = """SELECT NULL::text AS task_name, NULL::text AS job_id,
                            NULL::timestamptz AS paused_since WHERE false"""
# An empty table, which is used if the replicas' table cannot be read.
_NO_REPLICAS = """
    SELECT '' AS replica_id, NULL::text[] AS tasks, '[]'::jsonb AS running, false AS alive,
           false AS heard, NULL::timestamptz AS stopped_at, NULL::timestamptz AS seen_at WHERE false
"""
# Whether a replica begins runs, as operators see it.
_BEGINS_RUNS = "(heard AND stopped_at IS NULL)"
# The pauses of all tasks that concern a stored job. Before its first claim, its namespace may be
# unknown, so each pause concerns it.
_PAUSES_OF_JOB = """listed_pauses
    WHERE (job.task_name IS NULL OR starts_with(job.task_name, listed_pauses.namespace))"""
# Whether nothing that is known keeps a due job from being claimed.
_CAN_BE_CLAIMED = f"""((lock.task_name IS NULL OR {MAY_BE_CLAIMED})
    AND NOT EXISTS (SELECT FROM {_PAUSES_OF_JOB} AND COALESCE(until > now(), true))
    AND {IS_RETRY_PENDING} IS NOT TRUE)"""
# The job's own grace time in seconds; null if it has none, or in a form that no replica writes.
_MISFIRE_GRACE = """CASE WHEN jsonb_typeof(job.options -> 'misfire_grace_time'::text) = 'number'
    THEN LEAST((job.options ->> 'misfire_grace_time'::text)::numeric, 1e9)::float8 END"""
# The grace time of a due job.
_JOB_GRACE = f"""GREATEST(lock.overdue_at - lock.due_at, {_MISFIRE_GRACE} * interval '1 second',
                          interval '1 minute')"""
# From when on a due job could be claimed, if no pause had been in the way: not before a user's last
# change, and the end of its task's last run.
_CLAIMABLE_FROM = """GREATEST(job.next_run_time, job.changed_at,
                              COALESCE(lock.finished_at, lock.locked_until))"""
# Whether a due job could have been claimed for longer than its grace time. It could not before the
# end of the last pause, if there was a pause within its grace time. A later pause does not end the
# alarm for a further grace time, because nobody had claimed the job without it either.
_IS_OVERDUE_JOB = f"""({_CAN_BE_CLAIMED}
    AND now() - GREATEST(
            {_CLAIMABLE_FROM},
            CASE WHEN lock.paused_at <= {_CLAIMABLE_FROM} + {_JOB_GRACE} THEN lock.paused_until END,
            (SELECT max(until) FROM {_PAUSES_OF_JOB}
             HAVING pg_catalog.bool_or(since <= {_CLAIMABLE_FROM} + {_JOB_GRACE}
                                       AND until > {_CLAIMABLE_FROM})))
        > {_JOB_GRACE})"""
_JOB_STATE = f"""
    CASE WHEN job.ended AND {IS_RETRY_PENDING} THEN 'retrying'
         WHEN job.ended THEN 'ended' WHEN job.next_run_time IS NULL THEN 'paused'
         WHEN job.next_run_time > now() THEN 'waiting'
         WHEN {_IS_OVERDUE_JOB} THEN 'overdue' ELSE 'due' END
"""
# The arguments of a stored job, if they are stored as JSON. The store writes a dict that has the
# key `$` as the value of an object whose key `$` is "dict".
_ARGS = "(job.arguments -> 'args'::text)"
_KWARGS = """(CASE WHEN job.arguments -> 'kwargs'::text ->> '$'::text = 'dict'
                   THEN job.arguments -> 'kwargs'::text -> 'value'::text
                   ELSE job.arguments -> 'kwargs'::text END)"""
# How many positional arguments it has, and the object of its keyword arguments.
_POSITIONAL = f"""(CASE WHEN jsonb_typeof({_ARGS}) = 'array'
                        THEN pg_catalog.jsonb_array_length({_ARGS}) ELSE 0 END)"""
_NAMED = f"(CASE WHEN jsonb_typeof({_KWARGS}) = 'object' THEN {_KWARGS} ELSE '{{}}' END)"
# Limits the replicas that are returned as having a task.
_MOST_HAVING = 5
# The pauses of a task's row that have not ended, in the order in which they were made.
PAUSE_SINCE = moment_of("pause ->> 'since'::text")
PAUSE_UNTIL = moment_of("pause ->> 'until'::text")
PAUSES = f"""{json_elements_of("lock.pauses")} WITH ORDINALITY AS each (pause, place)
              WHERE CASE WHEN {IS_PAUSE} THEN COALESCE({PAUSE_UNTIL} > now(), true)
                         ELSE false END"""
# Pauses as columns of arrays, those of the task before those of all tasks.
PAUSE_COLUMNS = ("by", "since", "until", "why", "namespace")
_TOTALS = (
    *("now", "states", "numbers", "gone_count", "longest_late", "watched_count", "unmatched"),
    "all_paused",
    *(f"of_all_{name}" for name in (*PAUSE_COLUMNS, "concerned")),
)
_IN_ORDER = ", ".join(
    f"pg_catalog.array_agg({name} ORDER BY namespace NULLS FIRST, place) AS {name}"
    for name in PAUSE_COLUMNS
)


def _cut(text: str) -> str:
    """Return the SQL of a text, cut to what replicas and operators write at most."""
    return f"pg_catalog.left({text}, {LONGEST_MESSAGE})"


# Limits the bytes of a row's pauses that are looked at, and of its details that are read. Replicas
# and operators write fewer.
_LARGEST_PAUSES, _LARGEST_DETAILS = 200_000, 40_000
LISTED_PAUSES = f"""LATERAL (
    SELECT {_IN_ORDER}
    FROM (SELECT NULL AS namespace, {_cut("pause ->> 'by'::text")} AS by, {PAUSE_SINCE} AS since,
                 {PAUSE_UNTIL} AS until, {_cut("pause ->> 'why'::text")} AS why, place
          FROM {PAUSES} AND pg_catalog.pg_column_size(lock.pauses) <= {_LARGEST_PAUSES}
          UNION ALL
          SELECT namespace, by, since, until, why, place FROM listed_pauses
          WHERE COALESCE(until > now(), true) AND lock.runs <> ''
                AND starts_with(lock.task_name, namespace)) AS pause
) AS pauses"""
_HAS_BAD_PAUSES = f"""(lock.pauses IS NOT NULL AND (
    CASE WHEN pg_catalog.pg_column_size(lock.pauses) > {_LARGEST_PAUSES} THEN true
         WHEN jsonb_typeof(lock.pauses) <> 'array' THEN true
         ELSE EXISTS (SELECT FROM {json_elements_of("lock.pauses")} AS pause WHERE NOT {IS_PAUSE})
    END))"""
# Whether a row is that of a one-off job that has ended well, and waits to be deleted. There may
# be hundreds of thousands of them. Their states are known without all else that decides on one.
_IS_SETTLED = """(lock.one_off AND lock.finished_at IS NOT NULL AND lock.last_outcome = 'ok'
    AND lock.due_at IS NULL AND lock.failures = 0 AND lock.missed_at IS NULL
    AND lock.paused_at IS NULL AND lock.paused_until IS NULL AND lock.pauses IS NULL
    AND lock.schedule LIKE '{%%}' AND lock.task_name NOT IN (SELECT task FROM lost))"""
_IS_SETTLED_PAUSED = f"""(EXISTS (SELECT FROM pauses_of_all) AND {IS_PAUSED_IN_ANY_WAY})"""
_STATE_OF_SETTLED = f"CASE WHEN {_IS_SETTLED_PAUSED} THEN 'paused' ELSE 'ok' END"
# Whether a row has a value that no replica writes, as far as SQL can tell. PostgreSQL 14 cannot
# check a text for being JSON, so a schedule counts as readable if it looks like a JSON object.
_LOOKS_UNREADABLE = f"""({_HAS_BAD_PAUSES} OR COALESCE(lock.schedule NOT LIKE '{{%%}}', false))"""
# The place of a task's state in the order of urgency.
_PLACE_BY_URGENCY = f"""pg_catalog.array_position(
    ARRAY[{", ".join(f"'{state.value}'" for state in URGENCY)}], state)"""
# The order in which tasks are listed. A CASE is null for all tasks unless its order is asked for.
_ORDER = f"""
    CASE WHEN %(order)s::text = 'urgency' THEN {_PLACE_BY_URGENCY} END,
    CASE WHEN %(order)s::text = 'due' THEN due_at END NULLS LAST,
    CASE WHEN %(order)s::text = 'started' THEN started_at END DESC NULLS LAST,
    CASE WHEN %(order)s::text = 'duration' THEN took END DESC NULLS LAST,
    CASE WHEN %(order)s::text = 'failures' THEN failures END DESC, task_name
"""
# What only these orders need of each row. A run that hangs is listed in place of newer ones.
_ORDERED_BY = f"""
    COALESCE(extract(epoch FROM now() - stuck.since[1])::float8,
             CASE WHEN lock.started_at <> {NEVER} THEN {_TOOK} END) AS took,
    {_FAILURES} AS failures,"""
# When an entry of the history is listed, and until when it lasts: missed run times are at the first
# of them, not at the time at which they were noted.
_WHEN = "COALESCE(CASE WHEN run.ring = 'misses' THEN run.scheduled_at END, run.started_at)"
_LAST = "COALESCE(CASE WHEN run.ring = 'misses' THEN run.last_scheduled_at END, run.started_at)"
# The orders of entries of the history, each with the value that comes first, whether the larger one
# does, and how two values compare then.
_RUN_ORDERS = {
    "newest": (_WHEN, "DESC", ">="),
    "name": ("run.task_name", "ASC", "<="),
    # Only runs have a token, and take any time.
    "duration": (
        "CASE WHEN run.token IS NULL THEN interval '-1 s' ELSE run.ended_at - run.started_at END",
        "DESC",
        ">=",
    ),
}
# The tasks that a finding can be about. What is left out is well, known to an operator, or history,
# so that few rows are read although there may be hundreds of thousands.
_IS_WATCHED = """CASE WHEN state = 'paused' THEN false
    WHEN state IN ('unreadable', 'too long') THEN true
    WHEN gone OR paused THEN false
    WHEN state IN ('dead', 'overdue', 'late') THEN true
    ELSE has_ended_badly AND NOT acknowledged END"""
# Limits the tasks that are read to be judged, in case that most are not well.
MOST_WATCHED = 2_000
# The lists of an overview: which tasks each list has, and in which order. That of watched tasks has
# its own limit, and what may be critical first.
_LISTS = {
    "watched": (
        _IS_WATCHED,
        f"state NOT IN ('too long', 'dead', 'overdue'), {_PLACE_BY_URGENCY}, task_name",
    ),
    "running": ("state IN ('running', 'holder silent', 'too long')", "begun_at, task_name"),
    "due_next": ("due_at > now() AND NOT paused AND state <> 'paused'", "due_at, task_name"),
    # Tasks with own pauses come first, because a pause of all tasks may apply to thousands.
    "paused": (
        "paused OR has_paused_job",
        "NOT is_paused_itself AND NOT has_paused_job, task_name",
    ),
}
# Whether a pause of a task has no end: one of its own, or one of all tasks.
_HAS_ENDLESS_PAUSE = f"""((lock.paused_until IS NULL AND {IS_PAUSED}) OR (
    SELECT count(*) > 0 FROM listed_pauses
    WHERE until IS NULL AND starts_with(lock.task_name, namespace)))"""
# Limits the entries of one task that are read at once. A task has fewer, whatever `history` is.
MOST_ENTRIES = 100_000
# Limit the entries of a lane that are told one by one: those that ended well, and those that did
# not; and what all lanes that are read at once may have, so that a page of them is not too large.
MOST_ALONE = 120
MOST_SHAPES = 8_000


@dataclass(frozen=True)
class OverviewRead:
    """What one statement reads of all tasks.

    :ivar overview: what an operator sees at a glance, without findings and replicas
    :ivar watched: the tasks that a finding can be about
    :ivar more: how many more of these there are
    :ivar unmatched: the patterns, as for SQL's ``LIKE``, that no task matches
    :ivar pauses_of_all: the pauses of all tasks that concern some of the tasks
    :ivar all_paused: whether there are tasks, and all of them are paused
    """

    overview: Overview
    watched: Sequence[TaskStatus]
    more: int
    unmatched: Sequence[str]
    pauses_of_all: Sequence[Pause]
    all_paused: bool


class Reads:
    """The statements that read the rows of one task lock table, run on a cursor of a ``Wire``.

    :param table: the task lock table
    :param rejections: notes that the database rejects the read of the replicas. The answer then
        leaves out what only they could tell
    :param read_limit: limits the seconds of a read in the server
    """

    def __init__(
        self,
        table: Table,
        rejections: Rejections | None = None,
        read_limit: float = Timings.longest_answer,
    ) -> None:
        # The server ends a read before its answer is given up, so that a slow read is no outage.
        self._read_limit = 0.9 * read_limit
        self._rejections = rejections or Rejections()
        self._table = table
        name = for_template(table)
        self._name = name
        self._jobs_name = for_template(job_table(table))
        self._channel = channel_of(table)
        self._runs = for_template(run_table(table))
        self._replicas = for_template(replica_table(table))
        replicas = f"""SELECT *, {IS_ALIVE} AS alive, {IS_HEARD} AS heard
                       FROM {self._replicas} AS replica"""
        matching = f"""{IS_TASK} AND (%(like)s::text[] IS NULL
                                      OR lock.task_name LIKE ANY (%(like)s::text[]))"""
        # The tasks whose stored jobs are all paused, with one of these, and with the time of its
        # last change, which is when it was paused unless somebody has changed it since.
        self._paused_jobs = f"""
            SELECT task_name, min(id) AS job_id, max(changed_at) AS paused_since
            FROM {self._jobs_name} WHERE NOT ended AND task_name IS NOT NULL
            GROUP BY task_name HAVING pg_catalog.bool_and(next_run_time IS NULL)"""

        def found_dead(since: str) -> str:
            """Return the query of replicas of which a run was found dead, and when that was last.

            :param since: the SQL of a time; only tasks that have failed since then are read
            """
            return f"""
                SELECT run.replica AS replica_id, max(run.ended_at) AS died_at
                FROM {name} AS lock JOIN {self._runs} AS run USING (task_name)
                WHERE lock.failed_at > {since}
                      AND run.ring = 'failures' AND run.outcome = 'died'
                GROUP BY 1"""

        # The replicas that have died or are silent. One that is heard has died if the death of a
        # run of it was noted since its last sign of life, so few entries are read.
        silent_for = f"{SILENT_AFTER}::float8 * interval '1 second'"
        self._found_dead = f"""
            UNION ALL
            SELECT replica_id FROM ({found_dead(f"now() - {silent_for}")}) AS dead
                JOIN replicas USING (replica_id)
            WHERE heard AND died_at > seen_at"""
        self._unheard = f"SELECT replica_id FROM replicas WHERE NOT heard{self._found_dead}"
        self._job_pausers = Statement(f"""
            SELECT task_name AS task, started_at AS since, by FROM {self._runs}
            WHERE task_name = ANY (%(names)s::text[]) AND ring = 'actions'
                  AND outcome = 'job-paused'
        """)
        self._prepare_tasks(name, replicas, matching)
        self._prepare_runs(name, replicas)
        # Only of tasks that have failed since a replica was last seen, so few are read.
        all_dead = found_dead(f"(SELECT min(seen_at) FROM replicas WHERE NOT {HAS_STOPPED})")
        none_dead = "SELECT '' AS replica_id, NULL::timestamptz AS died_at WHERE false"
        # One task tells that there are some that are asked for. It is the first of a list that is
        # sorted, so that replicas of one application tell the same one, unless its first task is
        # new. The task that most lists have would take minutes of many long lists. A namespace is
        # left out if no task that is asked for is in it.
        of_fleet = (
            f"""ARRAY(SELECT lock.task_name FROM pg_catalog.unnest(tasks)
                      AS lock (task_name) WHERE {matching} LIMIT 1)""",
            f"""CASE WHEN leader_namespace IN (
                SELECT namespace
                FROM (SELECT DISTINCT leader_namespace AS namespace FROM replicas
                      WHERE leader_namespace IS NOT NULL) AS each
                WHERE EXISTS (SELECT FROM {name} AS lock
                              WHERE {matching} AND starts_with(task_name, namespace)))
                THEN leader_namespace END""",
        )
        # Each list, and its form for a role that cannot read the history.
        self._list_replicas, self._list_fleet = (
            (
                Statement(_list_replicas(name, replicas, all_dead, *columns)),
                Statement(_list_replicas(name, replicas, none_dead, *columns)),
            )
            for columns in (("tasks", "leader_namespace"), of_fleet)
        )
        # A namespace is told by what a replica registered of its tasks, as a text of JSON. Equal
        # lists of tasks are looked at once, because all replicas of a deployment have the same.
        self._silences = Statement(f"""
            WITH {pauses_of_all(name)}, replicas AS ({replicas}),
            named AS MATERIALIZED (
                SELECT lock.task_name,
                       COALESCE(substring(
                           pg_catalog.left(lock.details, {_LARGEST_DETAILS})
                           FROM '"namespace": ("[^"]*")'), '""')
                           AS namespace,
                       lock.due_at IS NOT NULL AND {matching}
                           AND NOT {IS_PAUSED_IN_ANY_WAY} AS needs_one,
                       GREATEST(
                           lock.started_at,
                           CASE WHEN lock.last_outcome IS DISTINCT FROM 'freed'
                                THEN lock.finished_at END,
                           CASE WHEN lock.finished_at IS NOT NULL OR lock.handed_over THEN NULL
                                WHEN {_RENEWED_AT} + LEAST({_LEASE}, {_LEASE_OF_LIFE}) > now()
                                THEN now() ELSE {_RENEWED_AT} END) AS sign_at
                FROM {name} AS lock
                WHERE {IS_TASK} AND NOT lock.one_off
                      AND lock.runs <> '' AND COALESCE(lock.kind, '') <> 'hold'
            ), lists AS (
                SELECT tasks, pg_catalog.bool_or(alive) AS alive, max(seen_at) AS seen_at,
                       (pg_catalog.array_agg(replica_id ORDER BY seen_at DESC, replica_id))[1]
                           AS replica,
                       (pg_catalog.array_agg({HAS_STOPPED}
                                             ORDER BY seen_at DESC, replica_id))[1] AS is_stopped
                FROM replicas GROUP BY tasks
            ), held AS (
                SELECT DISTINCT named.namespace, lists.alive, lists.seen_at, lists.replica,
                       lists.is_stopped
                FROM (SELECT lists.*, pg_catalog.unnest(tasks) AS task_name FROM lists) AS lists
                     JOIN named USING (task_name)
            )
            SELECT namespace, max(seen_at) AS seen_at,
                   (pg_catalog.array_agg(replica ORDER BY seen_at DESC, replica))[1] AS replica,
                   (pg_catalog.array_agg(is_stopped ORDER BY seen_at DESC, replica))[1]
                       AS is_stopped,
                   (SELECT max(sign_at) FROM named
                    WHERE named.namespace = held.namespace) AS sign_at
            FROM held
            WHERE namespace IN (SELECT namespace FROM named WHERE needs_one)
            GROUP BY namespace HAVING NOT pg_catalog.bool_or(alive)
            ORDER BY namespace
        """)
        self._misses = Statement(_misses(name, self._runs, matching))
        self._list_running = Statement(f"""
            WITH replicas AS ({replicas}), lost AS ({_LOST})
            SELECT lock.task_name AS task, lock.token, replica_id AS replica,
                   lock.started_at AS since,
                   lock.locked_until <= now() AND overran AND heard AS lost,
                   locked_until > now() OR (overran AND heard) AS goes_on
            FROM {name} AS lock JOIN replicas ON locked_by = replica_id
            WHERE {IS_TASK} AND finished_at IS NULL AND NOT handed_over
            UNION ALL
            SELECT task, lost.token, replica_id, since, true, true
            FROM lost LEFT JOIN {name} AS lock ON lock.task_name = lost.task
            WHERE lock.task_name IS NULL OR lost.token < lock.token
                  OR lock.last_outcome IN {in_sql(UNRELEASED)}
            ORDER BY task, token
        """)
        # Whether a live replica has the job's task, which says that it can import the function.
        has_replica = "job.task_name IN (SELECT pg_catalog.unnest(tasks) FROM lists)"
        jobs = f"""
            WITH {pauses_of_all(name)}, {listed_pauses(name)}, replicas AS ({replicas}),
            lists AS (SELECT DISTINCT tasks FROM replicas WHERE {_BEGINS_RUNS})
            SELECT job.id, {_JOB_STATE} AS state, job.options ->> 'name'::text AS name,
                   job.func AS function, job.trigger::text AS trigger, job.executor,
                   job.next_run_time, job.last_run_time,
                   job.task_name AS task, {_POSITIONAL} AS positional,
                   ARRAY(SELECT pg_catalog.jsonb_object_keys({_NAMED})) AS named,
                   CASE WHEN lock.finished_at IS NULL AND lock.locked_until > now()
                             AND NOT lock.handed_over THEN lock.locked_by END AS holder,
                   lock.task_name IS NOT NULL AND {IS_PAUSED_IN_ANY_WAY} AS task_paused,
                   CASE WHEN {_LAST_PAUSE_UNTIL} > now() AND NOT {_HAS_ENDLESS_PAUSE}
                        THEN {_LAST_PAUSE_UNTIL} END AS task_paused_until,
                   {has_replica} AS has_replica, lock.task_name IS NOT NULL AS has_task,
                   CASE WHEN job.next_run_time IS NULL AND NOT job.ended
                        THEN job.changed_at END AS paused_since
            FROM {self._jobs_name} AS job LEFT JOIN {name} AS lock USING (task_name)
            WHERE (%(like)s::text[] IS NULL OR job.id LIKE ANY (%(like)s::text[]))
                  AND NOT (%(overdue)s::boolean AND {_JOB_STATE} <> 'overdue')
            ORDER BY CASE WHEN %(order)s::text = 'due' THEN job.next_run_time END NULLS LAST,
                     job.id
            LIMIT %(limit)s OFFSET %(offset)s
        """
        without_replicas = jobs.replace(replicas, _NO_REPLICAS).replace(has_replica, "NULL")
        self._jobs = Statement(jobs), Statement(without_replicas)
        self._job_arguments = Statement(f"""
            SELECT job.arguments::text AS arguments,
                   jsonb_typeof({_ARGS}) = 'array' AND jsonb_typeof({_KWARGS}) = 'object'
                       AS are_json
            FROM {self._jobs_name} AS job WHERE job.id = %(id)s
        """)
        self._missing = Statement(f"""
            SELECT wanted FROM pg_catalog.unnest(%(names)s::text[]) AS wanted
            WHERE NOT EXISTS (SELECT FROM {name} WHERE task_name = wanted) ORDER BY 1
        """)
        self._pauses_of_all = Statement(f"""
            WITH {listed_pauses(name)}
            SELECT by, since, until, why AS reason, namespace FROM listed_pauses
            WHERE COALESCE(until > now(), true) ORDER BY namespace, place
        """)
        self._having = Statement(f"""
            SELECT asked.task, ARRAY(
                SELECT replica_id FROM ({replicas}) AS replica
                WHERE {_BEGINS_RUNS} AND tasks OPERATOR(pg_catalog.@>) ARRAY[asked.task]
                ORDER BY replica_id LIMIT {_MOST_HAVING}) AS replicas
            FROM pg_catalog.unnest(%(tasks)s::text[]) AS asked (task)
        """)

    def _prepare_tasks(self, name: str, replicas: str, matching: str) -> None:
        """Prepare the statements that read tasks.

        :param name: the quoted name of the task lock table, for a template
        :param replicas: the query of the replicas
        :param matching: whether a row is that of a task that is asked for
        """
        # In `known`, DISTINCT drops equal lists of tasks before `unnest`, because all replicas of a
        # deployment have the same list. It is not joined, because PostgreSQL expects few names in
        # it, and would compare each with each.
        queries = f"""
            replicas AS ({replicas}), {pauses_of_all(name)}, {listed_pauses(name)},
            alive AS (SELECT tasks FROM replicas WHERE alive),
            unheard AS ({self._unheard}),
            lost AS ({_LOST}),
            paused_jobs AS ({self._paused_jobs}),
            known AS (SELECT task_name FROM (
                          SELECT pg_catalog.unnest(tasks) AS task_name
                          FROM (SELECT DISTINCT tasks FROM alive) AS list) AS each_task
                      WHERE task_name IS NOT NULL)
        """
        task_columns = f"""
            lock.task_name AS name, {_STATE} AS state, lock.schedule,
            {_cut("lock.kind")} AS kind, lock.token,
            {_cut("lock.locked_by")} AS holder, lock.window_start AS scheduled_at, lock.started_at,
            lock.finished_at, lock.locked_until, lock.run_until, due.at AS due_at,
            GREATEST(lock.window_until, lock.window_start) AS window_until,
            lock.window_start = {NEVER} AS has_no_window,
            {_OVERDUE} AS overdue_at,
            extract(epoch FROM now() - due.at)::float8 AS late_by,
            {_TOOK} AS took,
            {_cut(_OUTCOME)} AS outcome,
            extract(epoch FROM now() - {_CUT_AT})::float8 AS cut_for,
            {_MISSED_AT} AS missed_at, {NO_LONGER_ALARMS} AS acknowledged,
            CASE WHEN lock.acknowledged_at > now() THEN lock.acknowledged_at END AS silent_until,
            stuck.tokens AS stuck_tokens, stuck.replica_ids AS stuck_on,
            stuck.since AS stuck_since,
            lock.succeeded_at, lock.failed_at, {_cut("lock.error_type")} AS error_type,
            {_FAILURES} AS failures, {_FAILURE} AS failure,
            lock.attempt,
            CASE WHEN {IS_RETRY_PENDING} THEN lock.retry_at END AS retry_at,
            in_pause.now AS paused,
            CASE WHEN lock.paused_until > now() THEN lock.paused_until END
                AS own_paused_until,
            {IS_PAUSED} AS is_paused_itself,
            pauses.by AS pauses_by, pauses.since AS pauses_since,
            pauses.until AS pauses_until, pauses.why AS pauses_why,
            pauses.namespace AS pauses_namespace,
            {_HAS_BAD_PAUSES} AS has_bad_pauses,
            CASE WHEN lock.request_until > now() THEN {_cut("lock.requested_by")} END
                AS requested_by,
            CASE WHEN lock.request_until > now() THEN lock.requested_at END AS requested_at,
            {_GONE} AS gone, lock.failover,
            {_cut("NULLIF(lock.runs, '')")} AS function,
            CASE WHEN pg_catalog.octet_length(lock.details) <= {_LARGEST_DETAILS}
                 THEN lock.details END AS details,
            lock.started_at = {NEVER} AS is_new,
            job.job_id AS paused_job, job.paused_since AS job_paused_since
        """
        paused_job = "LEFT JOIN paused_jobs AS job USING (task_name)"
        judgement = f"""
            LATERAL {_IN_PAUSE} AS in_pause, LATERAL {_DUE} AS due, LATERAL (
                SELECT pg_catalog.array_agg(token ORDER BY lost.token) AS tokens,
                       pg_catalog.array_agg(replica_id ORDER BY lost.token) AS replica_ids,
                       pg_catalog.array_agg(since ORDER BY lost.token) AS since
                FROM lost WHERE lost.task = lock.task_name AND {_IS_STUCK}
            ) AS stuck
        """
        listed = f"{judgement}, {LISTED_PAUSES}"
        self._tasks = self._with_what_can_be_read(
            f"""WITH {queries}
                SELECT {task_columns}
                FROM {name} AS lock {paused_job}, {listed}
                WHERE {matching} AND (%(one_offs)s::boolean OR NOT lock.one_off)
                ORDER BY lock.task_name LIMIT %(limit)s OFFSET %(offset)s""",
            replicas,
        )
        # The state of each row is computed once. All else is computed for the rows that are listed.
        judged = f"""
            SELECT lock.task_name,{_ORDERED_BY}
                   CASE WHEN {_LOOKS_UNREADABLE} THEN 'unreadable' ELSE {_STATE} END AS state,
                   due.at AS due_at, in_pause.now AS paused, {IS_PAUSED} AS is_paused_itself,
                   job.paused_since IS NOT NULL AS has_paused_job,
                   NULLIF(lock.started_at, {NEVER}) AS started_at,
                   LEAST(lock.started_at, stuck.since[1]) AS begun_at,
                   {NO_LONGER_ALARMS} AS acknowledged, {_GONE} AS gone,
                   COALESCE(lock.failures > 0 OR {_CUT_AT} IS NOT NULL
                            OR {_MISSED_AT} IS NOT NULL, false) AS has_ended_badly,
                   lock.one_off
            FROM {name} AS lock {paused_job}, {judgement}
            WHERE {matching} AND NOT {_IS_SETTLED}"""
        settled = f"""
            SELECT lock.task_name, extract(epoch FROM lock.finished_at - lock.started_at)::float8,
                   0, {_STATE_OF_SETTLED}, NULL, {_IS_SETTLED_PAUSED}, false, false,
                   lock.started_at, lock.started_at, false, false, false, true
            FROM {name} AS lock
            WHERE {matching} AND {_IS_SETTLED} AND %(one_offs)s::boolean
                  AND COALESCE(%(states)s::text[] OPERATOR(pg_catalog.&&) ARRAY['ok', 'paused'],
                               true)"""
        rows = f"""picked AS MATERIALIZED (
            SELECT chosen.list, chosen.place, lock.*
            FROM chosen JOIN {name} AS lock USING (task_name)
        ), listing AS (
            SELECT lock.list, lock.place, {task_columns}
            FROM picked AS lock {paused_job}, {listed}
        )"""
        self._ordered_tasks = self._with_what_can_be_read(
            f"""WITH {queries}, judged AS ({judged} UNION ALL {settled}), chosen AS (
                    SELECT '' AS list, task_name,
                           pg_catalog.row_number() OVER (ORDER BY {_ORDER}) AS place
                    FROM (SELECT * FROM judged
                          WHERE (%(states)s::text[] IS NULL OR state = ANY (%(states)s::text[]))
                                AND (%(one_offs)s::boolean OR NOT one_off)
                          ORDER BY {_ORDER} LIMIT %(limit)s OFFSET %(offset)s) AS page
                ), {rows}
                SELECT * FROM listing ORDER BY place""",
            replicas,
        )
        limits = {"watched": str(MOST_WATCHED)}
        lists = " UNION ALL ".join(
            f"""SELECT '{list_name}' AS list, task_name,
                       pg_catalog.row_number() OVER (ORDER BY {order}) AS place
                FROM (SELECT * FROM judged WHERE {which}
                      ORDER BY {order} LIMIT {limits.get(list_name, "%(limit)s")}) AS first"""
            for list_name, (which, order) in _LISTS.items()
        )
        of_all = ", ".join(
            f"pg_catalog.array_agg({each} ORDER BY namespace, place) AS of_all_{each}"
            for each in PAUSE_COLUMNS
        )
        # The first row has what is told of all tasks together.
        self._overview = self._with_what_can_be_read(
            f"""WITH {queries}, judged AS MATERIALIZED ({judged.replace(_ORDERED_BY, "")}),
                chosen AS ({lists}), {rows},
                settled AS (
                    SELECT count(*) - (SELECT count(*) FROM judged) AS number,
                           CASE WHEN EXISTS (SELECT FROM pauses_of_all) THEN (
                               SELECT count(*) FROM {name} AS lock
                               WHERE {matching} AND {_IS_SETTLED} AND {IS_PAUSED_IN_ANY_WAY})
                           ELSE 0 END AS paused
                    FROM {name} AS lock WHERE {matching}
                ), each AS (
                    SELECT 1 AS tasks, state, due_at, paused, has_paused_job, gone, acknowledged,
                           has_ended_badly
                    FROM judged
                    UNION ALL
                    SELECT tasks, state, NULL, state = 'paused', false, false, false, false
                    FROM settled, LATERAL (
                        VALUES ('ok', settled.number - settled.paused), ('paused', settled.paused)
                    ) AS of_state (state, tasks) WHERE tasks > 0
                ), counted AS (
                    SELECT pg_catalog.array_agg(state) AS states,
                           pg_catalog.array_agg(number) AS numbers,
                           COALESCE(sum(gone_number), 0)::bigint AS gone_count,
                           max(longest_late) AS longest_late,
                           COALESCE(sum(watched_number), 0)::bigint AS watched_count,
                           pg_catalog.bool_and(are_paused) AS all_paused
                    FROM (SELECT state, sum(tasks)::bigint AS number,
                                 pg_catalog.bool_and(paused OR has_paused_job) AS are_paused,
                                 count(*) FILTER (WHERE gone) AS gone_number,
                                 count(*) FILTER (WHERE {_IS_WATCHED}) AS watched_number,
                                 max(extract(epoch FROM now() - due_at)::float8) FILTER (
                                     WHERE state IN ('late', 'overdue') AND NOT gone)
                                     AS longest_late
                          FROM each GROUP BY 1) AS each_state
                ), missing AS (
                    SELECT pg_catalog.array_agg(pattern) AS unmatched
                    FROM pg_catalog.unnest(%(like)s::text[]) AS pattern
                    WHERE NOT EXISTS (SELECT FROM {name} AS lock
                                      WHERE {IS_TASK} AND lock.task_name LIKE pattern)
                ), paused_with_all AS (
                    SELECT {of_all}, pg_catalog.array_agg(EXISTS (
                               SELECT FROM {name} AS lock
                               WHERE {matching} AND starts_with(lock.task_name, namespace))
                           ORDER BY namespace, place) AS of_all_concerned
                    FROM listed_pauses WHERE COALESCE(until > now(), true)
                ), totals AS (
                    SELECT '' AS list, 0::bigint AS place, now() AS now, counted.*, missing.*,
                           paused_with_all.*
                    FROM counted, missing, paused_with_all
                )
                SELECT * FROM totals FULL JOIN listing USING (list, place)
                ORDER BY list, place""",
            replicas,
        )

    def _prepare_runs(self, name: str, replicas: str) -> None:
        """Prepare the statements that read the run history.

        :param name: the quoted name of the task lock table, for a template
        :param replicas: the query of the replicas
        """
        columns = run_columns()
        # A replica may run a run time after another replica has noted it as missed. The run date of
        # a one-off job may differ between replicas, if its schedule has none.
        is_last_run = f"""EXISTS (
            SELECT FROM {name} AS lock WHERE lock.task_name = run.task_name
            AND (lock.window_start = run.scheduled_at
                 OR (lock.window_start > run.scheduled_at AND lock.one_off
                     AND lock.schedule = '{{"run":null,"type":"date"}}')))"""
        not_run = f"""NOT (run.ring = 'misses' AND run.run_times = 1 AND (
            {is_last_run}
            OR EXISTS (SELECT FROM {self._runs} AS later WHERE later.task_name = run.task_name
                       AND later.ring IN ('runs', 'failures')
                       AND later.scheduled_at = run.scheduled_at)))"""
        # The key comes last, so that the order of runs that began at the same time is always the
        # same. Otherwise two pages could have the same run, and none could have another one.
        by_time = f"{_WHEN} DESC, run.token DESC, run.task_name, run.ring, run.slot"
        newest_first = f"ORDER BY {by_time}"
        # The statement reads the whole history, which is limited for each task. There is no index
        # by time, because each release would have to write to it. Sorting all runs would take most
        # of the time, so a hundredth of the history is read first. If that hundredth has as many
        # matching runs as the page and those before it, the runs that come after these need not be
        # sorted.
        # That an operator has freed a task is no outcome of a run, which has an entry of its own.
        is_wanted = f"""(%(outcomes)s::text[] IS NULL OR (run.outcome = ANY (%(outcomes)s)
                   AND (%(kind)s::text IS NOT NULL OR run.ring <> 'actions'
                        OR run.outcome NOT IN {in_sql(FAILED)})))
              AND (%(replica)s::text IS NULL OR run.replica = %(replica)s)
              AND (%(kind)s::text IS NULL OR run.kind = %(kind)s)
              AND (%(since)s::timestamptz IS NULL OR {_LAST} >= %(since)s)
              AND (%(until)s::timestamptz IS NULL OR {_WHEN} < %(until)s)
              AND (%(error)s::text IS NULL OR strpos(
                  lower(pg_catalog.concat_ws(': ', run.error_type, run.error)),
                  lower(%(error)s)) > 0)"""
        matches = f"""(%(like)s::text[] IS NULL OR run.task_name LIKE ANY (%(like)s::text[]))
              AND {is_wanted}"""
        # OFFSET 0 keeps the subqueries as they are. So whether a missed run time was run after all,
        # which takes long, is looked up only for the entries that come first.
        # The value has a name, because PostgreSQL would sort by an expression once more.
        self._matching_runs = {
            order: Statement(f"""
            SELECT {columns} FROM (
                SELECT run.*, {value} AS place FROM {self._runs} AS run
                WHERE {matches} AND COALESCE({value} {comes_before} (
                    SELECT run.place FROM (
                        SELECT run.*, {value} AS place
                        FROM {self._runs} AS run TABLESAMPLE SYSTEM (1)
                        WHERE {matches} ORDER BY {value} {direction} OFFSET 0
                    ) AS run WHERE {not_run} ORDER BY run.place {direction}
                    OFFSET GREATEST(%(limit)s::bigint + %(offset)s::bigint - 1, 0) LIMIT 1
                ), true)
                ORDER BY {value} {direction}, {by_time} OFFSET 0
            ) AS run WHERE {not_run} ORDER BY run.place {direction}, {by_time}
            LIMIT %(limit)s::bigint OFFSET %(offset)s::bigint
            """)
            for order, (value, direction, comes_before) in _RUN_ORDERS.items()
        }
        self._runs_of_task = {
            order: Statement(f"""
            SELECT {columns} FROM {self._runs} AS run
            WHERE run.task_name = ANY (%(names)s::text[]) AND {is_wanted} AND {not_run}
            ORDER BY {value} {direction}, {by_time} LIMIT %(limit)s OFFSET %(offset)s
            """)
            for order, (value, direction, _) in _RUN_ORDERS.items()
        }
        # LIMIT keeps the subquery as it is, so that it reads the entries of each name by the key.
        self._recent_runs = Statement(f"""
            SELECT run.* FROM pg_catalog.unnest(%(names)s::text[]) AS wanted (name), LATERAL (
                SELECT {columns} FROM {self._runs} AS run
                WHERE run.task_name = wanted.name AND run.ring <> 'actions' AND {not_run}
                {newest_first} LIMIT %(limit)s
            ) AS run
        """)
        queries = f"""replicas AS ({replicas}), lost AS ({_LOST}),
                      unheard AS ({self._unheard})"""
        self._lanes = {}
        for by in ("task", "replica"):
            told = lanes(
                name,
                self._runs,
                by,
                queries=queries,
                overruns=_OVERRUNS,
                is_last_run=is_last_run,
            )
            without_replicas = told.replace(replicas, _NO_REPLICAS)
            self._lanes[by] = Statement(told), Statement(without_replicas)
        self._runs_kept_since = Statement(runs_kept_since(name, self._runs))
        self._usual_durations = Statement(
            _usual_durations(
                self._runs, "%(like)s::text[] IS NULL OR run.task_name LIKE ANY (%(like)s::text[])"
            )
        )
        # Names are looked up in the primary key, because a whole history may have a million runs.
        self._usual_durations_of = Statement(
            _usual_durations(self._runs, "run.task_name = ANY (%(names)s::text[])")
        )

        took = "extract(epoch FROM run.ended_at - run.started_at)::float8"
        spreads = ", ".join(
            f"""count(*) FILTER (WHERE {when}) AS {span}_runs,
                pg_catalog.percentile_cont(ARRAY[0.5, 0.95]::float8[]) WITHIN GROUP (
                    ORDER BY {took}) FILTER (WHERE {when}) AS {span}"""
            for span, when in (
                ("last_day", "run.started_at > now() - interval '1 day'"),
                (
                    "week_before",
                    """run.started_at > now() - interval '8 days'
                       AND run.started_at <= now() - interval '1 day'""",
                ),
            )
        )
        self._durations = Statement(f"""
            SELECT {spreads}, min(run.started_at) AS kept_since FROM {self._runs} AS run
            WHERE run.task_name = %(task)s AND run.ring = 'runs' AND run.outcome = 'ok'
        """)

    def _with_what_can_be_read(self, template: str, replicas: str) -> tuple[Statement, ...]:
        """Return a statement, and its forms for roles that cannot read the tables beside it.

        :param replicas: the query of the replicas in the template
        :return: the statement; without the stored jobs; without the history, too; and without the
            replicas, too
        """
        without_jobs = template.replace(self._paused_jobs, _NO_PAUSED_JOBS)
        without_runs = without_jobs.replace(self._found_dead, "")
        without_replicas = without_runs.replace(replicas, _NO_REPLICAS)
        forms = template, without_jobs, without_runs, without_replicas
        return tuple(map(Statement, forms))

    def tasks(
        self,
        cursor: Any,
        like: Sequence[str] | None = None,
        limit: int | None = None,
        *,
        states: Sequence[str] | None = None,
        order: str = "name",
        offset: int = 0,
        one_offs: bool = True,
    ) -> list[TaskStatus]:
        """Return tasks in the order of their names, or in another order.

        :param like: patterns of names, as for SQL's ``LIKE``; ``None`` for all
        :param states: the states of the tasks; ``None`` for all
        :param order: one of ``status.ORDERS``
        :param one_offs: whether one-off jobs are returned, too
        """
        cursor.row_factory = dict_row
        wanted: dict[str, Any] = {
            "like": _list(like),
            "limit": limit,
            "offset": offset,
            "one_offs": one_offs,
        }
        if states is None and order == "name":
            return [_task_status(row) for row in self._task_rows(cursor, self._tasks, wanted)]
        wanted |= {"states": _list(states), "order": order}
        rows = self._task_rows(cursor, self._ordered_tasks, wanted)
        return [_listed_task(row) for row in rows]

    def overview(self, cursor: Any, like: Sequence[str] | None, limit: int) -> OverviewRead:
        """Return what an operator sees at a glance, without findings and replicas.

        :param like: patterns of names, as for SQL's ``LIKE``; ``None`` for all
        :param limit: how many tasks each list has, at most
        """
        cursor.row_factory = dict_row
        wanted = {"like": _list(like), "limit": limit}
        totals, *rows = self._task_rows(cursor, self._overview, wanted)
        states = [TaskState(state) for state in totals["states"] or ()]
        pauses = [
            Pause(*each)
            for each in zip(
                *(totals[f"of_all_{name}"] or () for name in PAUSE_COLUMNS), strict=True
            )
        ]
        lists: dict[str, list[TaskStatus]] = {name: [] for name in _LISTS}
        for row in rows:
            lists[row["list"]].append(_listed_task(row, totals=_TOTALS))
        watched = lists.pop("watched")
        overview = Overview(
            now=totals["now"],
            counts=dict.fromkeys(TaskState, 0)
            | dict(zip(states, totals["numbers"] or (), strict=True)),
            gone=totals["gone_count"],
            late_by=totals["longest_late"] or 0.0,
            findings=(),
            **{name: tuple(tasks) for name, tasks in lists.items()},
            pauses_of_all=tuple(pauses),
            alive=None,
            silent=None,
        )
        return OverviewRead(
            overview,
            watched,
            totals["watched_count"] - len(watched),
            totals["unmatched"] or [],
            [
                pause
                for pause, is_one in zip(pauses, totals["of_all_concerned"] or (), strict=True)
                if is_one
            ],
            bool(totals["all_paused"]),
        )

    def _task_rows(
        self, cursor: Any, statements: tuple[Statement, ...], wanted: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the rows of tasks, with those who have paused their stored jobs.

        A monitor's role may lack the right on the stored jobs, and then no job's pause is told.
        """
        rows = self._readable_rows(cursor, statements, wanted)
        paused = [row for row in rows if row["paused_job"] is not None]
        pausers = self._pausers(cursor, [row["name"] for row in paused])
        for row in paused:
            row["job_paused_by"] = pausers.get((row["name"], row["job_paused_since"]), "")
        return rows

    def _readable_rows(
        self, cursor: Any, statements: tuple[Statement, ...], wanted: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the rows of a statement, or of the first of its forms that the role may read.

        :param statements: a statement, and its forms without other tables
        """
        *with_replicas, without_replicas = statements
        if not self._rejections.is_left_out(REPLICAS):
            why = ""
            for statement in with_replicas:
                try:
                    with part_of_transaction(cursor):
                        rows = self._all(cursor, statement, **wanted)
                except (UndefinedTable, InsufficientPrivilege) as error:
                    why = one_line(error)
                else:
                    self._rejections.end(REPLICAS)
                    return rows
            rows = self._all(cursor, without_replicas, **wanted)
            self._rejections.begin(
                REPLICAS,
                "the replicas cannot be read, so it is not known which tasks no live replica "
                f"has: {why}",
                quiet=True,
            )
            return rows
        return self._all(cursor, without_replicas, **wanted)

    def _pausers(self, cursor: Any, names: Sequence[str]) -> dict[tuple[str, datetime], str]:
        """Return who has paused stored jobs, by the names of their tasks, and by when.

        A job that an application has paused has no entry in the history.
        """
        if not names:
            return {}
        with suppress(UndefinedTable, InsufficientPrivilege), part_of_transaction(cursor):
            rows = self._all(cursor, self._job_pausers, names=list(names))
            return {(row["task"], row["since"]): row["by"] for row in rows}
        return {}

    def runs(
        self,
        cursor: Any,
        task: str | None = None,
        *,
        also: Sequence[str] = (),
        like: Sequence[str] | None = None,
        outcomes: Collection[str] | None = None,
        kind: str | None = None,
        replica: str | None = None,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        order: str = "newest",
        limit: int = 100,
        offset: int = 0,
    ) -> list[Run]:
        """Return finished runs and what operators did.

        :param also: with a task, further names under which its entries are
        :param order: one of ``status.RUN_ORDERS``
        """
        cursor.row_factory = dict_row
        wanted: dict[str, Any] = {
            "outcomes": None if outcomes is None else list(outcomes),
            "replica": replica,
            "kind": kind,
            "error": error,
            "since": since,
            "until": until,
            "limit": limit,
            "offset": offset,
        }
        if task is not None:
            rows = self._all(cursor, self._runs_of_task[order], names=[task, *also], **wanted)
        else:
            rows = self._all(cursor, self._matching_runs[order], like=_list(like), **wanted)
        return [_run_of(row) for row in rows]

    def recent_runs(self, cursor: Any, names: Sequence[str], limit: int) -> dict[str, list[Run]]:
        """Return the newest runs and missed run times of some tasks, by their names."""
        cursor.row_factory = dict_row
        found: dict[str, list[Run]] = {name: [] for name in names}
        for row in self._all(cursor, self._recent_runs, names=list(found), limit=limit):
            found[row["task"]].append(_run_of(row))
        return found

    def lanes(
        self,
        cursor: Any,
        like: Sequence[str] | None,
        since: datetime,
        until: datetime,
        *,
        by: str,
        parts: int,
        limit: int,
        offset: int = 0,
    ) -> Lanes:
        """Return what the run history has of a span of time, a lane for each task or replica.

        :param like: patterns of names, as for SQL's ``LIKE``; ``None`` for all
        """
        cursor.row_factory = dict_row
        wanted: dict[str, Any] = {
            "like": _list(like),
            "since": since,
            "until": until,
            "parts": parts,
            "part": (until - since) / parts,
            "limit": limit,
            "offset": offset,
            "most": MOST_ALONE,
            "shapes": MOST_SHAPES,
        }
        rows = self._readable_rows(cursor, self._lanes[by], wanted)
        return _lanes_of(rows, by)

    def usual_durations(self, cursor: Any, patterns: Sequence[str]) -> dict[str, float]:
        """Return the median duration of each task's runs that ended well, in seconds.

        :param patterns: names or globs; empty: all tasks
        """
        cursor.row_factory = dict_row
        if patterns and not any(map(is_pattern, patterns)):
            rows = self._all(cursor, self._usual_durations_of, names=list(patterns))
        else:
            like = [like_of(pattern) for pattern in patterns] or None
            rows = self._all(cursor, self._usual_durations, like=like)
        return {row["task"]: row["seconds"] for row in rows}

    def durations(self, cursor: Any, task: str) -> Durations:
        """Return how long a task's runs took that ended well, as far as the history reaches."""
        cursor.row_factory = dict_row
        [row] = self._all(cursor, self._durations, task=task)
        spreads = {
            span: Spread(row[f"{span}_runs"], *row[span]) if row[span] else None
            for span in ("last_day", "week_before")
        }
        return Durations(**spreads, kept_since=row["kept_since"])

    def why(
        self, cursor: Any, task: str, at: datetime | None
    ) -> tuple[TaskStatus, list[Run], list[ReplicaStatus], datetime, datetime, datetime | None]:
        """Return what a task's story is made of, in the order of the arguments of ``story_of``.

        :param at: the moment; ``None``: now
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockOptionError: the moment is in the future
        """
        # First of all, so that a run that has begun by then is in the row.
        now = self.database_time(cursor)
        at = at or now
        if at > now:
            raise TaskLockOptionError(f"why: {at} is in the future; it is {now}")
        found = self.tasks(cursor, [escaped(task)], 1)
        if not found:
            raise TaskLockNotFoundError([task])
        entries = self.runs(cursor, task, also=names_of_all(task), limit=MOST_ENTRIES)
        # After the entries, because further ones may be overwritten between the two reads.
        kept = self._all(cursor, self._runs_kept_since, task=task)
        kept_since = kept[0]["kept_since"] if kept else None
        replicas: list[ReplicaStatus] = []
        # Without this right, the read of the task has reported that the replicas cannot be read.
        with suppress(UndefinedTable, InsufficientPrivilege):
            replicas = self.replicas(cursor)
        return found[0], entries, replicas, at, now, kept_since

    def replicas(self, cursor: Any) -> list[ReplicaStatus]:
        """Return the replicas, in the order of their starts."""
        cursor.row_factory = dict_row
        rows = self._replica_rows(cursor, self._list_replicas)
        return self._with_running(cursor, rows)

    def fleet(self, cursor: Any, like: Sequence[str] | None) -> list[ReplicaStatus]:
        """Return the replicas with what findings are made of: without most of their tasks.

        :param like: patterns of tasks, as for SQL's ``LIKE``; ``None`` for all. If none of these
            tasks is in the namespace in which a replica leads or follows, it is left out.
        """
        cursor.row_factory = dict_row
        rows = self._replica_rows(cursor, self._list_fleet, like=_list(like))
        # The runs are read only if a replica stops, because only then a finding tells of them.
        if any(row["stopping_since"] for row in rows):
            return self._with_running(cursor, rows)
        return [_replica_status(row) for row in rows]

    def _replica_rows(
        self, cursor: Any, statements: tuple[Statement, Statement], **wanted: object
    ) -> list[dict[str, Any]]:
        """Return the rows of replicas.

        :param statements: a statement, and its form for a role that cannot read the history
        """
        complete, without_runs = statements
        try:
            with part_of_transaction(cursor):
                return self._all(cursor, complete, **wanted)
        except (UndefinedTable, InsufficientPrivilege):
            # If another table was the reason, this read raises, too.
            return self._all(cursor, without_runs, **wanted)

    def database_time(self, cursor: Any) -> datetime:
        """Return the database's time."""
        cursor.row_factory = dict_row
        [now] = (row["now"] for row in self._all(cursor, Statement("SELECT now() AS now")))
        assert isinstance(now, datetime)
        return now

    def having(self, cursor: Any, tasks: Sequence[str]) -> dict[str, list[str]]:
        """Return some of the live replicas that list each of these tasks, by task."""
        cursor.row_factory = dict_row
        rows = self._all(cursor, self._having, tasks=list(tasks))
        return {row["task"]: row["replicas"] for row in rows}

    def silences(self, cursor: Any, like: Sequence[str] | None) -> list[Silence]:
        """Return the namespaces that had a replica, need one, and have no live one.

        :param like: patterns of the tasks that need one, as for SQL's ``LIKE``; ``None`` for all
        """
        cursor.row_factory = dict_row
        found = []
        for row in self._all(cursor, self._silences, like=_list(like)):
            namespace = _from_json(row, "namespace", [])
            found.append(Silence(**{**row, "namespace": str(namespace or "")}))
        return found

    def misses(self, cursor: Any, like: Sequence[str] | None) -> list[Misses]:
        """Return the missed run times of recurring tasks that missed 3 of the last 10 or more.

        Tasks that are paused, and misses that an operator has acknowledged, are left out.

        :param like: patterns of the tasks, as for SQL's ``LIKE``; ``None`` for all
        """
        cursor.row_factory = dict_row
        return [Misses(**row) for row in self._all(cursor, self._misses, like=_list(like))]

    def _with_running(self, cursor: Any, rows: Sequence[dict[str, Any]]) -> list[ReplicaStatus]:
        running: dict[str, dict[tuple[str, int], RunningRun]] = {}
        unfinished: dict[str, list[RunningRun]] = {}
        for found in self._all(cursor, self._list_running):
            goes_on = found.pop("goes_on")
            run = RunningRun(**found)
            if goes_on:
                running.setdefault(run.replica, {}).setdefault((run.task, run.token), run)
            else:
                unfinished.setdefault(run.replica, []).append(run)
        return [
            _replica_status(
                row,
                tuple(running.get(row["replica_id"], {}).values()),
                tuple(unfinished.get(row["replica_id"], ())),
            )
            for row in rows
        ]

    def jobs(
        self,
        cursor: Any,
        like: Sequence[str] | None = None,
        limit: int | None = None,
        *,
        overdue: bool = False,
        order: str = "due",
        offset: int = 0,
    ) -> list[JobStatus]:
        """Return jobs of the job store by their next run times; jobs without one come last.

        :param like: patterns of ids, as for SQL's ``LIKE``; ``None`` for all
        :param overdue: whether to return only the overdue jobs
        :param order: one of ``status.JOB_ORDERS``
        """
        cursor.row_factory = dict_row
        asked = {"like": _list(like), "limit": limit, "offset": offset, "order": order}
        # As for a database that has answered for a while, so that a dead run is in the way.
        asked |= {"overdue": overdue, "stable": True}
        rows = self._readable_rows(cursor, self._jobs, asked)
        names = [row["task"] for row in rows if row["paused_since"] and row["task"]]
        pausers = self._pausers(cursor, names)
        for row in rows:
            row["paused_by"] = pausers.get((row["task"], row["paused_since"]))
        return [_job_status(row) for row in rows]

    def job_arguments(self, cursor: Any, job_id: str) -> dict[str, Any]:
        """Return the arguments of a job of the job store by their names, as they are stored.

        :raises TaskLockNotFoundError: there is no such job
        :raises TaskLockStateError: the arguments are pickled, or cannot be read
        """
        cursor.row_factory = dict_row
        rows = self._all(cursor, self._job_arguments, id=job_id)
        if not rows:
            raise TaskLockNotFoundError([job_id], "job")
        [row] = rows
        bad: list[str] = []
        arguments = _from_json(row, "arguments", bad) if row["are_json"] else {}
        if bad or not row["are_json"]:
            raise TaskLockStateError(
                f"the arguments of job {job_id!r} cannot be shown: its row has them pickled, or in "
                "a form that no replica writes; only a replica with the store's secret reads "
                "pickled ones"
            )
        args, kwargs = arguments["args"], arguments["kwargs"]
        if kwargs.get("$") == "dict":
            kwargs = kwargs["value"]
        named = {name: kwargs[name] for name in sorted(kwargs) if name != RESERVED_KEY}
        return {**{f"args[{place}]": value for place, value in enumerate(args)}, **named}

    def pauses_of_all(self, cursor: Any) -> list[Pause]:
        """Return the pauses of all tasks that have not ended."""
        cursor.row_factory = class_row(Pause)
        found: list[Pause] = self._all(cursor, self._pauses_of_all)
        return found

    def _check_there(self, cursor: Any, names: Sequence[str]) -> None:
        cursor.row_factory = dict_row
        missing = self._all(cursor, self._missing, names=list(names))
        if missing:
            raise TaskLockNotFoundError([row["wanted"] for row in missing])

    def _all(self, cursor: Any, statement: Statement, **wanted: object) -> list[Any]:
        """Return the rows of a read, which the server ends if it takes too long.

        The limit holds for one transaction, because a pooler gives the session to others.

        :raises SlowReadError: the read has taken too long
        """
        wire = cursor.wire
        if wire is None or not wire.is_idle:
            return self._found(cursor, statement, wanted)
        milliseconds = max(1, round(1000 * self._read_limit))
        wire.script(f"BEGIN; SET LOCAL statement_timeout = {milliseconds}")
        try:
            return self._found(cursor, statement, wanted)
        except QueryCanceled as error:
            raise SlowReadError(
                f"the read is too slow: the server has ended it after {self._read_limit:.1f} s; "
                "ask for fewer tasks, by their names, or see what else the server does"
            ) from error
        finally:
            wire.undo()

    def _found(self, cursor: Any, statement: Statement, wanted: dict[str, object]) -> list[Any]:
        found: list[Any] = self._run(cursor, statement, **wanted).fetchall()
        return found

    @staticmethod
    def _run(cursor: Any, statement: Statement, **wanted: object) -> Any:
        return cursor.execute(statement.query, statement.arguments(wanted))


def _list_replicas(name: str, replicas: str, dead: str, tasks: str, namespace: str) -> str:
    """Return the query of the replicas.

    :param replicas: the query of their rows
    :param dead: the query of those of which the history knows that a run died
    :param tasks: the tasks that are returned
    :param namespace: the namespace in which a replica leads or follows
    """
    return f"""
        WITH replicas AS ({replicas}), dead AS ({dead}), leaders AS ({_leaders(name)})
        SELECT replica_id, host, version, release, started_at, seen_at, {tasks} AS tasks, rejected,
               jsonb_typeof(running) = 'array' AND NOT EXISTS (
                   SELECT FROM {REPORTED_RUNS} AS run WHERE NOT {IS_RUN}) AS tells_runs,
               {_REPLICA_STATE} AS state,
               {namespace} AS leader_namespace,
               CASE WHEN NOT {HAS_STOPPED} THEN stopped_at END AS stopping_since,
               COALESCE(is_led AND locked_by = replica_id, false) AS leads,
               CASE WHEN leader_namespace IS NOT NULL AND is_led IS NOT TRUE
                    THEN extract(epoch FROM now() - GREATEST(led_until, started_at))::float8
               END AS leaderless_for
        FROM replicas LEFT JOIN dead USING (replica_id)
             LEFT JOIN leaders USING (leader_namespace) ORDER BY started_at, replica_id
    """


def _usual_durations(runs: str, which: str) -> str:
    """Return the statement that reads the median durations of the tasks whose runs are ``which``.

    :param runs: the quoted name of the run history's table, for a template
    """
    return f"""
        SELECT run.task_name AS task,
               pg_catalog.percentile_cont(0.5::float8) WITHIN GROUP (
                   ORDER BY extract(epoch FROM run.ended_at - run.started_at)::float8
               ) AS seconds
        FROM {runs} AS run WHERE run.ring = 'runs' AND run.outcome = 'ok' AND ({which})
        GROUP BY run.task_name
    """


def _misses(name: str, runs: str, matching: str) -> str:
    """Return the query of the recurring tasks that missed several of their last ten run times.

    The history is read of tasks with a miss only. An entry may be of many run times, between which
    there was no run.

    :param runs: the quoted name of the run history's table, for a template
    :param matching: whether a row is that of a task that is asked for
    """
    of_task = f"{runs} AS run WHERE run.task_name = missing.task_name"
    # Misses that were among the last ten run times long ago are left out before the history is
    # read: 30 periods, and 2 days because a schedule may have few run times at night.
    is_recent = f"""lock.missed_at > now() - GREATEST(
        interval '2 days', 30::float8 * (lock.due_at - GREATEST(lock.window_start, {NEVER})))"""
    return f"""
        WITH {pauses_of_all(name)}, missing AS MATERIALIZED (
            SELECT lock.task_name, lock.acknowledged_at,
                   CASE WHEN COALESCE(lock.kind, '') NOT IN ('manual', 'hold')
                        THEN lock.window_start END AS window_start
            FROM {name} AS lock
            WHERE lock.missed_at > COALESCE(lock.acknowledged_at, {NEVER}) AND NOT lock.one_off
                  AND lock.due_at IS NOT NULL AND {is_recent} AND {matching}
                  AND NOT {IS_PAUSED_IN_ANY_WAY}
        ), counted AS (
            SELECT missing.task_name, missing.acknowledged_at, each.*
            FROM missing, LATERAL (
                SELECT pg_catalog.array_agg(run.scheduled_at) AS run_times
                FROM {of_task} AND run.ring IN ('runs', 'failures')
            ) AS begun, LATERAL (
                SELECT COALESCE(sum(number) FILTER (WHERE is_missed AND runs_since = 0), 0)::bigint
                           AS in_a_row,
                       sum(LEAST(number, 10 - since)) FILTER (WHERE is_missed AND since < 10)
                           ::bigint AS of_ten,
                       min(first_at) FILTER (WHERE is_missed AND runs_since = 0) AS first_at,
                       max(last_at) FILTER (WHERE is_missed) AS last_at,
                       (pg_catalog.array_agg(reason ORDER BY last_at DESC)
                           FILTER (WHERE is_missed))[1] AS reason
                FROM (
                    SELECT told.*,
                           COALESCE(sum(number) OVER earlier, 0)::bigint AS since,
                           count(*) FILTER (WHERE NOT is_missed) OVER earlier AS runs_since
                    FROM (
                        SELECT scheduled_at AS first_at,
                               COALESCE(last_scheduled_at, scheduled_at) AS last_at,
                               COALESCE(miss.run_times, 1)::bigint AS number,
                               true AS is_missed, reason
                        FROM (SELECT run.* FROM {of_task} AND run.ring = 'misses') AS miss
                        WHERE scheduled_at IS NOT NULL
                              AND COALESCE(cause, '') NOT IN {in_sql(EXPECTED)}
                              AND NOT (COALESCE(miss.run_times, 1) = 1
                                       AND COALESCE(scheduled_at = ANY (begun.run_times), false))
                        UNION ALL
                        SELECT at, at, 1, false, NULL
                        FROM (SELECT DISTINCT at
                              FROM pg_catalog.unnest(
                                  begun.run_times OPERATOR(pg_catalog.||) missing.window_start)
                                  AS each_run (at)
                              WHERE at > {NEVER} ORDER BY at DESC LIMIT 10) AS newest
                    ) AS told
                    WINDOW earlier AS (ORDER BY last_at DESC, is_missed
                                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
                ) AS placed
            ) AS each
        )
        SELECT task_name AS task, in_a_row, of_ten, COALESCE(first_at, last_at) AS since, last_at,
               reason
        FROM counted
        WHERE of_ten >= 3 AND last_at > COALESCE(acknowledged_at, {NEVER})
        ORDER BY task_name LIMIT {MOST_WATCHED}
    """


def _leaders(name: str) -> str:
    """Return the query of who leads, or has led last, in each namespace with leader mode."""
    return f"""
        SELECT {LEADER_NAMESPACE} AS leader_namespace, locked_by, {LEADS} AS is_led,
               LEAST(locked_until, finished_at, now()) AS led_until
        FROM {name} AS lock WHERE {IS_LEADER}
    """


@contextmanager
def part_of_transaction(cursor: Any) -> Iterator[None]:
    """Let an error in the context leave the transaction usable, if one has begun."""
    wire = cursor.wire  # none where there is no database
    if wire is None or wire.is_idle:
        yield
        return
    with wire.transaction():
        yield


def _list(like: Sequence[str] | None) -> list[str] | None:
    return None if like is None else list(like)


_RUN_FIELDS = tuple(each.name for each in fields(Run))


def _run_of(row: dict[str, Any]) -> Run:
    return Run(**{**row, "task": shown_name(row["task"])})


def _lanes_of(rows: Sequence[dict[str, Any]], by: str) -> Lanes:
    """Return the lanes of the rows of their statement."""
    total, *rest = rows
    names: dict[str, dict[str, Any]] = {}
    entries: dict[str, list[LaneEntry]] = {}
    pauses, outages = [], []
    for row in rest:
        piece, name = row["piece"], row["lane"]
        run = _run_of({key: row[key] for key in _RUN_FIELDS}) if row["task"] is not None else None
        if piece == "lane":
            names[name] = row
            entries[name] = []
        elif piece == "entry":
            times = row["began"], row["ended"]
            replica = run.replica if run is not None else row["on_replica"]
            about = row["of_task"], replica, row["of_kind"], row["how"]
            entries[name].append(LaneEntry(*about, *times, int(row["number"]), run))
        elif piece == "outage":
            outages.append((row["began"], row["ended"]))
        elif run is not None:
            pauses.append(run)

    def known_since(name: str) -> Any:
        return names[name]["began"] if by == "task" else total["began" if name else "ended"]

    return Lanes(
        total["now"],
        tuple(
            Lane(name, known_since(name), int(row["number"]), row["ended"], tuple(entries[name]))
            for name, row in names.items()
        ),
        int(total["number"]),
        total["began"],
        tuple(pauses[::-1]),
        tuple(outages),
    )


def _listed_task(row: dict[str, Any], totals: Sequence[str] = ()) -> TaskStatus:
    """Return the task of a row that has further columns.

    :param totals: the columns of what is told of all tasks together
    """
    for column in ("list", "place", *totals):
        del row[column]
    return _task_status(row)


def _task_status(row: dict[str, Any]) -> TaskStatus:
    is_new, state = row.pop("is_new"), TaskState(row["state"])
    is_due = state in (TaskState.LATE, TaskState.OVERDUE)
    unknown = ["started_at", "finished_at", "took"] if is_new else []
    if row.pop("has_no_window"):  # never claimed for a run time, at most for a manual run
        unknown += ["scheduled_at", "window_until"]
    bad = ["pauses"] if row.pop("has_bad_pauses") else []
    own_end = row.pop("own_paused_until")
    ends = [own_end] if row.pop("is_paused_itself") else []
    schedule = _from_json(row, "schedule", bad)
    details = _from_json(row, "details", [])
    options, zone = _details(details)
    del row["details"]
    pauses = [row.pop(f"pauses_{name}") or () for name in PAUSE_COLUMNS]
    columns = [row.pop(name) or () for name in ("stuck_tokens", "stuck_on", "stuck_since")]
    found = tuple(Pause(*each) for each in zip(*pauses, strict=True))
    ends += [pause.until for pause in found if pause.namespace is not None]
    job, since, by = (
        row.pop("paused_job"),
        row.pop("job_paused_since"),
        row.pop("job_paused_by", ""),
    )
    if job is not None:
        found += (Pause(by, since, None, None, job=job),)
    return TaskStatus(
        **{
            **row,
            **dict.fromkeys(unknown),
            "stuck": tuple(
                RunningRun(row["name"], token, replica, since, lost=True)
                for token, replica, since in zip(*columns, strict=True)
            ),
            "pauses": found,
            "paused_until": None if None in ends else max(ends, default=None),
            "state": TaskState.UNREADABLE if bad else state,
            "schedule": with_exact_times(schedule, details),
            "late_by": row["late_by"] if is_due else None,
            "unreadable": tuple(bad),
            "options": options,
            "zone": zone,
        }
    )


def _details(details: Any) -> tuple[dict[str, OptionSource], str | None]:
    """Return a task's options and its time zone; what has another form is left out."""
    try:
        options = {
            str(name): OptionSource(value, str(place))
            for name, (value, place) in details["options"].items()
        }
        zone = details["zone"]
    except (AttributeError, LookupError, TypeError, ValueError):
        return {}, None
    return options, zone if isinstance(zone, str) else None


def _replica_status(
    row: dict[str, Any],
    running: tuple[RunningRun, ...] = (),
    unfinished: tuple[RunningRun, ...] = (),
) -> ReplicaStatus:
    lists = {name: strings_of(row[name]) for name in ("tasks", "rejected")}
    bad = [name for name, found in lists.items() if len(found) < len(row[name])]
    if not row.pop("tells_runs"):
        bad.append("running")
    state = ReplicaState.UNREADABLE if bad else ReplicaState(row["state"])
    more = {"state": state, "running": running, "unreadable": tuple(bad)}
    more["unfinished"] = unfinished
    return ReplicaStatus(**{**row, **lists, **more})


def _job_status(row: dict[str, Any]) -> JobStatus:
    bad: list[str] = []
    trigger = _from_json(row, "trigger", bad)
    state = JobState.UNREADABLE if bad else JobState(row["state"])
    names = [f"args[{place}]" for place in range(row.pop("positional"))]
    names += sorted(name for name in row.pop("named") if name != RESERVED_KEY)
    more = {
        "trigger": trigger,
        "state": state,
        "unreadable": tuple(bad),
        "argument_names": tuple(names),
    }
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
