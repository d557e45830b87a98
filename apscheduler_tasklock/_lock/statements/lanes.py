"""Lanes: what the run history has of a span of time, a lane for each task or each replica."""

from __future__ import annotations

from apscheduler_tasklock._lock.outcomes import FAILED, UNRELEASED, in_sql
from apscheduler_tasklock._lock.statements.conditions import ALL_TASKS, IS_TASK
from apscheduler_tasklock._lock.statements.history import run_columns

# Limits the characters of an entry's texts, because thousands of entries are read at once.
_LONGEST = 300

# The columns of an entry that stands alone.
_ENTRY = run_columns(
    error=f"left(run.error, {_LONGEST})",
    traceback="NULL::text",
    reason=f"left(run.reason, {_LONGEST})",
)

_SINCE, _UNTIL = "%(since)s::timestamptz", "%(until)s::timestamptz"
_MOST = "%(most)s::bigint"
_PARTS = "%(parts)s::bigint"
_PART = "%(part)s::interval"

# The beginning of the part of the span that an entry begins in, and whether the entry is shorter
# than a part. Computed with times alone, because numbers of seconds take four times as long.
_WHICH_PART = f"date_bin({_PART}, GREATEST(began, {_SINCE}), {_SINCE})"
_IS_SHORT = f"(LEAST(ended, {_UNTIL}) - GREATEST(began, {_SINCE}) < {_PART})"

_IS_RUN = "run.ring IN ('runs', 'failures')"
_IS_IN_SPAN = f"(run.ended_at >= {_SINCE} AND run.started_at < {_UNTIL})"
_HAS_FAILED = f"outcome IN {in_sql(FAILED)}"


def _matches(name: str) -> str:
    return f"(%(like)s::text[] IS NULL OR {name} LIKE ANY (%(like)s::text[]))"


def _kept(time: str) -> str:
    """Return the columns that tell how many entries each ring has, and the first ``time`` of them.

    A single grouping, because there may be hundreds of thousands of tasks with an entry each.
    """
    of_rings = ", ".join(
        f"""count(*) FILTER (WHERE run.ring = '{ring}') AS {ring}_kept,
            min({time}) FILTER (WHERE run.ring = '{ring}') AS {ring}_from"""
        for ring in ("runs", "failures", "misses")
    )
    return f"{of_rings}, max(run.ended_at) FILTER (WHERE run.outcome = 'ok') AS newest_run"


# Since when all runs of a task are kept; null if none was overwritten. A ring that has fewer
# entries than the row has counted begins with its oldest one. By the ring, because an entry of the
# ring `failures` may tell of a run that ended well: that of a run that was taken for dead.
_RUNS_SINCE = """GREATEST(
    CASE WHEN runs_kept < recorded THEN runs_from END,
    CASE WHEN failures_kept < recorded_failures THEN failures_from END,
    CASE WHEN succeeded_at > COALESCE(newest_run, '-infinity') + interval '1 second'
         THEN succeeded_at END)"""


def runs_kept_since(table: str, runs: str) -> str:
    """Return the statement that reads the run time since which all runs of a task are kept.

    The time is null if no run was overwritten.
    """
    return f"""
        SELECT {_RUNS_SINCE} AS kept_since FROM {table} AS lock CROSS JOIN (
            SELECT {_kept("COALESCE(run.scheduled_at, run.started_at)")}
            FROM {runs} AS run WHERE run.task_name = %(task)s AND run.ring <> 'actions'
        ) AS kept WHERE lock.task_name = %(task)s
    """


def lanes(table: str, runs: str, by: str, *, queries: str, overruns: str, is_last_run: str) -> str:
    """Return the statement that reads the lanes of a span, and what lies on them.

    The whole history is read, because there is no index by time, but it is not sorted. Entries that
    are shorter than a part of the span are counted for each part, so that the answer is short,
    however many there are. All others are returned one by one: of each lane the last ``most`` that
    ended well, and the last ``most`` that did not. What is beyond that is left out if it ended
    well, and told of as a number; all else is counted for each part.

    :param by: ``"task"`` or ``"replica"``
    :param queries: the queries ``replicas``, ``unheard`` and ``lost``
    :param overruns: whether a run goes on beyond its maximum lock
    :param is_last_run: whether a missed run time is that of its task's last run
    """
    is_by_task = by == "task"
    lane, other = ("task_name", "replica") if is_by_task else ("replica", "task_name")
    lane_of_miss = "task_name" if is_by_task else "''"
    # A row that is unfinished is not in the history yet.
    goes_on = f"(lock.locked_until > now() OR {overruns})"
    only_one = f"""CASE WHEN min({other} COLLATE "C") = max({other} COLLATE "C")
                        THEN min({other} COLLATE "C") END"""
    run_columns = f"""run.{lane} AS lane, run.task_name, run.replica, run.ring, run.slot, run.kind,
                      run.outcome, run.cause, 1 AS run_times, run.started_at AS began,
                      run.ended_at AS ended"""
    miss_columns = f"""{lane_of_miss} AS lane, task_name, replica, ring, slot, kind, outcome,
                       cause, COALESCE(run_times, 1) AS run_times, scheduled_at AS began,
                       last_scheduled_at AS ended"""
    # With a lane for each task, only the entries of the chosen lanes are read closely.
    those = "run.task_name IN (SELECT lane FROM chosen) AND" if is_by_task else ""
    those_misses = "WHERE task_name IN (SELECT lane FROM chosen)" if is_by_task else ""
    # A run that goes on without its lock is in the history already, but it is not over.
    # As one query of runs and misses, because PostgreSQL would sort the runs alone to group them.
    entries = f"""(
        SELECT {run_columns} FROM {runs} AS run
        WHERE {those} {_IS_RUN} AND {_IS_IN_SPAN} AND {_matches("run.task_name")}
              AND NOT EXISTS (SELECT FROM running WHERE running.task_name = run.task_name
                                                        AND running.token = run.token)
        UNION ALL
        SELECT {miss_columns} FROM misses {those_misses}) AS entry"""
    spanned = f"""
        short AS MATERIALIZED (
            SELECT lane, {_WHICH_PART} AS part, kind, outcome, cause, sum(run_times) AS number,
                   count(*) AS entries, {only_one} AS other, min(ring COLLATE "C") AS ring,
                   min(slot) AS slot, min(began) AS began, max(ended) AS ended
            FROM {entries} WHERE {_IS_SHORT} GROUP BY 1, 2, 3, 4, 5
        ), long AS MATERIALIZED (
            SELECT *, outcome = 'ok' AS is_well, pg_catalog.row_number() OVER (
                PARTITION BY lane, outcome = 'ok'
                ORDER BY ended DESC, began DESC, task_name, ring, slot) AS nth
            FROM {entries} WHERE NOT {_IS_SHORT}
        )
    """
    trouble = f"""CASE WHEN {_HAS_FAILED} THEN 2
                       WHEN outcome = 'missed' AND cause IS DISTINCT FROM 'paused' THEN 1
                       ELSE 0 END"""
    running = f"""
            SELECT {lane} AS lane, CASE WHEN outcome = 'running' THEN 0 ELSE 3 END AS trouble,
                   1 AS entries
            FROM running
    """
    if is_by_task:
        of_lanes = f"""{running}
            UNION ALL
            SELECT task_name, CASE WHEN has_failed THEN 2 ELSE 0 END, in_span
            FROM kept WHERE in_span > 0
            UNION ALL
            SELECT task_name, max({trouble}), count(*) FROM misses GROUP BY 1
            UNION ALL
            SELECT task_name, -1, 0 FROM reached
            WHERE GREATEST(runs_since, misses_since) > {_SINCE}
        """
    else:
        of_lanes = f"""{running}
            UNION ALL
            SELECT lane, {trouble}, 1 FROM short
            UNION ALL
            SELECT lane, {trouble}, 1 FROM long
        """
    chosen = f"""
        placed AS MATERIALIZED (
            SELECT lane, sum(entries) AS entries,
                   pg_catalog.row_number() OVER (
                       ORDER BY max(trouble) DESC, lane = '', lane) AS place
            FROM ({of_lanes}) AS each GROUP BY lane
        ), chosen AS MATERIALIZED (
            SELECT lane, place FROM (
                SELECT lane, place, sum(entries) OVER (ORDER BY place) AS all_entries
                FROM (SELECT lane, place, LEAST(entries, {_MOST} + {_PARTS}) AS entries
                      FROM placed ORDER BY place
                      LIMIT %(limit)s::bigint OFFSET %(offset)s::bigint) AS page) AS page
            WHERE place = %(offset)s::bigint + 1 OR all_entries <= %(shapes)s::numeric
        )
    """
    namespace = f"substr(run.task_name, length({ALL_TASKS}) + 1)"
    concerns = (
        f"""CASE WHEN starts_with(run.task_name, {ALL_TASKS})
                 THEN EXISTS (SELECT FROM chosen WHERE starts_with(lane, {namespace}))
                 ELSE run.task_name IN (SELECT lane FROM chosen) END"""
        if is_by_task
        else f"run.task_name = {ALL_TASKS}"
    )
    task, replica = ("lane", "other") if is_by_task else ("other", "lane")
    return f"""
        WITH {queries}, kept AS (
            SELECT run.task_name, {_kept("run.ended_at")},
                   count(*) FILTER (WHERE {_IS_RUN} AND {_IS_IN_SPAN}) AS in_span,
                   COALESCE(pg_catalog.bool_or({_HAS_FAILED} AND {_IS_IN_SPAN}), false)
                       AS has_failed
            FROM {runs} AS run
            WHERE run.ring <> 'actions' AND {_matches("run.task_name")}
            GROUP BY 1
        ), misses AS MATERIALIZED (
            SELECT run.task_name, run.replica, run.ring, run.slot, run.kind, run.outcome, run.cause,
                   run.run_times, run.scheduled_at, run.last_scheduled_at
            FROM {runs} AS run
            WHERE run.ring = 'misses' AND {_matches("run.task_name")}
                  AND run.scheduled_at < {_UNTIL} AND run.last_scheduled_at >= {_SINCE}
                  AND NOT (run.run_times = 1 AND (
                      {is_last_run}
                      OR EXISTS (SELECT FROM {runs} AS later
                                 WHERE later.task_name = run.task_name
                                       AND later.ring IN ('runs', 'failures')
                                       AND later.scheduled_at = run.scheduled_at)))
        ), running AS MATERIALIZED (
            SELECT lock.task_name, lock.token, lock.locked_by AS replica,
                   COALESCE(lock.kind, 'schedule') AS kind,
                   CASE WHEN NOT {goes_on} THEN CASE WHEN lock.overran THEN 'overran'
                                                     ELSE 'died' END
                        WHEN lock.overrun_at BETWEEN lock.started_at AND now() OR {overruns}
                        THEN 'too long'
                        WHEN EXISTS (SELECT FROM unheard WHERE replica_id = lock.locked_by)
                        THEN 'holder silent' ELSE 'running' END AS outcome,
                   lock.started_at AS began,
                   CASE WHEN NOT {goes_on} THEN lock.locked_until END AS ended
            FROM {table} AS lock
            WHERE {IS_TASK} AND {_matches("lock.task_name")} AND lock.finished_at IS NULL
                  AND NOT lock.handed_over AND lock.started_at < {_UNTIL}
                  AND (lock.locked_until >= {_SINCE} OR {overruns})
            UNION ALL
            SELECT lost.task, lost.token, lost.replica_id, 'schedule', 'too long', lost.since, NULL
            FROM lost LEFT JOIN {table} AS lock ON lock.task_name = lost.task
            WHERE {_matches("lost.task")} AND lost.since < {_UNTIL}
                  AND (lock.task_name IS NULL OR lost.token < lock.token
                       OR (lock.finished_at IS NOT NULL
                           AND lock.last_outcome IN {in_sql(UNRELEASED)}))
        ), reached AS MATERIALIZED (
            SELECT * FROM (
                SELECT task_name,
                       {_RUNS_SINCE} AS runs_since,
                       CASE WHEN misses_kept < recorded_misses THEN misses_from END AS misses_since
                FROM {table} AS lock LEFT JOIN kept USING (task_name)
                WHERE {IS_TASK} AND {_matches("lock.task_name")}
            ) AS each
            WHERE runs_since IS NOT NULL OR misses_since IS NOT NULL
        ), {", ".join((chosen, spanned) if is_by_task else (spanned, chosen))}, pieces AS (
            SELECT 'total' AS piece, 0::bigint AS place, NULL AS lane,
                   (SELECT count(*) FROM placed) AS number, 0::bigint AS entries, NULL AS of_task,
                   NULL AS on_replica, NULL AS of_kind, NULL AS how,
                   (SELECT max(runs_since) FROM reached) AS began,
                   (SELECT max(misses_since) FROM reached) AS ended, NULL AS ring, 0 AS slot
            UNION ALL
            SELECT 'lane', place, lane, COALESCE(left_out, 0), 0, NULL, NULL, NULL, NULL,
                   {"GREATEST(runs_since, misses_since)" if is_by_task else "NULL"}, left_until,
                   NULL, 0
            FROM chosen
                 LEFT JOIN (SELECT lane, count(*) AS left_out, max(ended) AS left_until FROM long
                            WHERE nth > {_MOST} AND is_well GROUP BY lane) AS beyond USING (lane)
                 {"LEFT JOIN reached ON task_name = lane" if is_by_task else ""}
            UNION ALL
            SELECT 'entry', place, lane, number, entries, {task}, NULLIF({replica}, ''), kind,
                   outcome, began, ended, ring, slot
            FROM short JOIN chosen USING (lane)
            UNION ALL
            SELECT 'entry', place, lane, sum(run_times), count(*),
                   {"lane" if is_by_task else only_one}, {only_one if is_by_task else "lane"}, kind,
                   outcome, min(began), max(ended), min(ring COLLATE "C"), min(slot)
            FROM long JOIN chosen USING (lane) WHERE nth > {_MOST} AND NOT is_well
            GROUP BY place, lane, {_WHICH_PART}, kind, outcome
            UNION ALL
            SELECT 'entry', place, lane, run_times, 1, task_name, replica, kind, outcome, began,
                   ended, ring, slot
            FROM long JOIN chosen USING (lane) WHERE nth <= {_MOST}
            UNION ALL
            SELECT 'entry', place, lane, 1, 0, task_name, replica, kind, outcome, began, ended,
                   NULL, 0
            FROM running JOIN chosen ON lane = {lane}
            UNION ALL
            SELECT 'outage', 0, NULL, 0, 0, NULL, NULL, NULL, NULL, min(scheduled_at),
                   max(last_scheduled_at), NULL, 0
            FROM misses WHERE cause = 'database'
            GROUP BY date_bin({_PART}, scheduled_at, {_SINCE})
            UNION ALL
            SELECT 'pause', 0, NULL, 0, 1, run.task_name, NULL, NULL, NULL, run.started_at, NULL,
                   run.ring, run.slot
            FROM {runs} AS run
            WHERE run.ring = 'actions' AND run.outcome IN ('paused', 'resumed')
                  AND run.started_at < {_UNTIL} AND {concerns}
        )
        SELECT pieces.piece, pieces.lane, pieces.number, pieces.of_task, pieces.on_replica,
               pieces.of_kind, pieces.how, pieces.began, pieces.ended, now() AS now, alone.*
        FROM pieces LEFT JOIN LATERAL (
            SELECT {_ENTRY} FROM {runs} AS run
            WHERE pieces.entries = 1 AND run.slot = pieces.slot
                  AND run.task_name = pieces.of_task COLLATE "default"
                  AND run.ring = pieces.ring COLLATE "default"
            OFFSET 0
        ) AS alone ON true
        ORDER BY pieces.place, pieces.piece DESC, pieces.began, pieces.of_task, pieces.how,
                 pieces.slot
    """
