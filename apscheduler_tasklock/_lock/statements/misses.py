"""Misses: the entries of run times that no replica has run, in the run history.

A replica that has missed run times writes these entries at a later look. Claims and releases write
none.
"""

from __future__ import annotations

from apscheduler_tasklock._lock.outcomes import in_sql
from apscheduler_tasklock._lock.protocol_messages import MissNote
from apscheduler_tasklock._lock.statements.conditions import (
    BRIEFLY,
    MILLISECONDS,
    NEVER,
    ROW_COLUMNS,
    SAFELY,
    json_rows,
    listed_pauses,
)
from apscheduler_tasklock._lock.statements.history import History
from apscheduler_tasklock.schema.table import LONGEST_TEXT
from apscheduler_tasklock.status import MissCause

# Limits the entries of the run times that each task has missed.
MISSES = 20
# What follows from a cause, besides its place in ``MissCause``. Expected misses do not count as
# regular ones. A note, or an entry, has run times of one reason where that names a run, a change or
# who has paused the task. Other entries grow over those of other causes, because replicas may
# differ in what they tell. And some causes are told although there was a pause.
EXPECTED = (MissCause.PAUSED, MissCause.MOVED, MissCause.REFUSED)
NOTED_APART = (MissCause.RUNNING, MissCause.MOVED)
_KEPT_APART = (MissCause.PAUSED, MissCause.MOVED)
_GROWING = (MissCause.PAUSED, MissCause.DATABASE, MissCause.REFUSED)
_BEYOND_PAUSES = (MissCause.PAUSED, MissCause.REFUSED)
# Limits the seconds between the dates of two one-off jobs of one task that count as one job. Two
# replicas that add the same job at their starts may give it slightly different dates.
TOGETHER = 5.0


def missed_entry(history: History, rows: str, **columns: str) -> str:
    """Return the INSERT of entries of missed run times.

    :param rows: a FROM clause, where ``run`` is the task's row, which has counted the entry
    :param columns: the SQL of further columns
    """
    return history.entry(
        rows,
        **{
            "ring": "'misses'",
            "slot": f"(run.recorded_misses - 1) % {MISSES}",
            "token": "NULL",
            "kind": "'schedule'",
            "outcome": "'missed'",
            "attempt": "NULL",
            "release": "NULL",
            **columns,
        },
    )


def _was_run(started: str) -> str:
    """Return whether a run with the run time ``started`` counts for the run time ``given.at``.

    A run also counts for the run times in the ``covers`` seconds after its own, and with
    ``any_later`` for all run times before its own.
    """
    return f"""({started} = given.at
                OR ({started} > given.at - asked.covers * interval '1 second'
                    AND ({started} < given.at OR asked.any_later)))"""


def add_one_offs(table: str) -> str:
    """Return the statement that adds the rows of one-off jobs that were missed and never ran.

    A one-off job is not registered, so its task has no row before its first claim. Such a row is
    deleted after some days, like the rows of one-off jobs that ran.
    """
    return f"""
        WITH asked AS (SELECT * FROM {json_rows(MissNote)})
        INSERT INTO {table} AS lock ({ROW_COLUMNS}, finished_at)
        SELECT asked.task_name, {NEVER}, {NEVER}, {NEVER}, {NEVER}, {NEVER}, '', gen_random_uuid(),
               {MILLISECONDS}, 0, 0, false, false, asked.runs, true,
               NULL, asked.schedule, NULL, true, NULL, NULL, NULL, now()
        FROM asked
        WHERE asked.one_off AND {BRIEFLY}
              AND NOT EXISTS (SELECT FROM {table} WHERE task_name = asked.task_name)
        ORDER BY asked.task_name ON CONFLICT DO NOTHING
    """


def _pauses_of(task_name: str, history: History) -> str:
    """Return the query of a task's pauses and of those of all tasks, also of those that are over.

    The statement has the query :func:`listed_pauses`.
    """
    return f"""
        SELECT '' AS what, action.by, action.reason AS why, action.started_at AS since,
               LEAST(action.until, (
                   SELECT min(resumed.started_at) FROM {history.table} AS resumed
                   WHERE resumed.task_name = {task_name} AND resumed.ring = 'actions'
                         AND resumed.outcome = 'resumed'
                         AND (resumed.by = action.by OR resumed.reason IS NOT NULL)
                         AND resumed.started_at >= action.started_at)) AS until
        FROM {history.table} AS action
        WHERE action.task_name = {task_name} AND action.ring = 'actions'
              AND action.outcome = 'paused'
        UNION ALL SELECT 'with all tasks '
            || CASE WHEN namespace <> '' THEN 'of ' || namespace || ' ' ELSE '' END,
            by, why, since, until FROM listed_pauses
        WHERE starts_with({task_name}, namespace)
    """


def _missed_in_words(history: History) -> str:
    """Return the query of the missed run times of ``missed``, with why in ``words``.

    For run times in a pause, the words tell who has paused the task, since when, and why, from the
    operators' entries and from the pauses of all tasks, the query :func:`listed_pauses`. If no
    single pause has held from the first to the last of the run times, the words tell of each pause
    that has held over some of them. For other run times, and if no entry tells of the pause, the
    words are the ``reason``.

    A pause that its operator has made longer is one pause, although each change has an entry.
    """
    return f"""
        SELECT missed.*,
               pg_catalog.left(COALESCE(pause.words, missed.reason), {LONGEST_TEXT}) AS words
        FROM missed LEFT JOIN LATERAL (
            WITH one AS MATERIALIZED (
                SELECT what, by, why, lower(held) AS since, upper(held) AS until,
                       lower(held) <= missed.first_at
                           AND COALESCE(upper(held) > missed.last_at, true) AS holds
                FROM (
                    SELECT what, by, why, unnest(pg_catalog.range_agg(
                               pg_catalog.tstzrange(since, until))) AS held
                    FROM ({_pauses_of("missed.task_name", history)}) AS told
                    WHERE COALESCE(since <= until, true)
                    GROUP BY what, by, why
                ) AS held_by
                WHERE COALESCE(upper(held) > missed.first_at, true)
            ), best AS (
                SELECT * FROM one
                ORDER BY since <= missed.first_at DESC, until DESC NULLS FIRST,
                         since DESC LIMIT 1
            )
            SELECT 'paused ' || string_agg(
                what || 'by ' || COALESCE(by, 'nobody') || ' since '
                || to_char(since AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
                || COALESCE(': ' || why, ''), ', then ' ORDER BY since) AS words
            FROM (TABLE best
                  UNION SELECT one.* FROM one
                  WHERE since <= missed.last_at AND NOT (SELECT holds FROM best)) AS named
            WHERE missed.cause = 'paused'
        ) AS pause ON true
    """


def note_misses(table: str, history: History) -> str:
    """Return the statement that writes entries of run times that no replica has run.

    The statement gets a note for each task, which lists the task's missed run times. A run time is
    left out if a replica has run it, or if ``missed_at`` in the task's row shows that another
    replica has written its entry. A task gets no entry if none of its run times is left, or if it
    has another schedule by now. A refused run time of the application is never left out, and is not
    noted in ``missed_at``: it falls into the window of a run, and one replica alone has it.

    A pause explains a run time for all replicas, whatever cause one of them tells: a run time of a
    recurring job that fell into a pause is noted with the cause ``paused``.

    If a run time between them was run, only those before that run get an entry, and the note is to
    be sent again for the others.

    If the task has an entry of the same cause, and no run time between that entry and the first of
    these run times was run, the run times are added to that entry. So a pause over many run times
    is one entry, also if the last of them are noted when the task runs again. Entries of pauses and
    of outages grow over entries of other causes, because replicas may differ in what they tell.

    An entry names the replica that has told of its first run time; none if that replica started
    later than this run time.

    The statement returns the tasks whose notes are to be sent again, for that reason or because
    another session has changed or locked their rows.
    """
    window = """(given.at >= lock.window_start
                 AND given.at < LEAST(lock.window_until,
                                      lock.window_start + asked.min_lock * interval '1 second'))"""
    of_task = f"{history.table} AS run WHERE run.task_name = asked.task_name"
    # A full ring may have lost entries of runs, so run times before its oldest entry are left out.
    known = " AND ".join(
        f"""(lock.{count} <= {history.slots} OR given.at > (
                 SELECT min(run.started_at) FROM {of_task} AND run.ring = '{ring}'))"""
        for ring, count in (("runs", "recorded"), ("failures", "recorded_failures"))
    )
    entry = missed_entry(
        history,
        "noted AS run",
        slot=f"COALESCE(run.grows_slot, (run.recorded_misses - 1) % {MISSES})",
        scheduled_at="run.first_at",
        started_at="run.noted_at",
        ended_at="now()",
        replica="run.told_by",
        cause="run.cause",
        reason="run.reason",
        last_scheduled_at="run.last_at",
        run_times="run.run_times",
    )
    # The last run before a missed run time. If some run times are only counted, it is not known
    # between which runs these were.
    run_before = f"""CASE WHEN asked.more = 0 THEN GREATEST(
        CASE WHEN lock.window_start < given.at THEN lock.window_start END,
        (SELECT max(run.scheduled_at) FROM {of_task} AND run.ring IN ('runs', 'failures')
         AND run.scheduled_at < given.at)) END"""
    was_run_between = f"""(
        (explained.window_start > entry.last_scheduled_at
         AND explained.window_start < explained.first_at)
        OR EXISTS (SELECT FROM {history.table} AS run
                   WHERE run.task_name = explained.task_name AND run.ring IN ('runs', 'failures')
                         AND run.scheduled_at > entry.last_scheduled_at
                         AND run.scheduled_at < explained.first_at))"""
    return f"""
        WITH {listed_pauses(table)}, asked AS (SELECT * FROM {json_rows(MissNote)}), parts AS (
            SELECT asked.task_name, lock.schedule, asked.reason, asked.is_witness,
                   CASE WHEN pause.holds THEN 'paused' ELSE asked.cause END AS cause,
                   lock.token, lock.missed_at, lock.window_start, lock.recorded_misses,
                   min(given.at) AS first_at, max(given.at) AS last_at,
                   count(*) + asked.more AS run_times
            FROM asked JOIN {table} AS lock USING (task_name), LATERAL (
                SELECT CASE WHEN asked.exact THEN run_time
                            ELSE now() - (%(sent_at)s - run_time) END AS at
                FROM unnest(asked.run_times) AS listed (run_time)
            ) AS given, LATERAL (SELECT {run_before} AS at) AS run_before, LATERAL (
                SELECT pg_catalog.bool_or(COALESCE(given.at < until, true)) AS holds,
                       max(CASE WHEN until <= given.at THEN until ELSE since END) AS began
                FROM ({_pauses_of("asked.task_name", history)}) AS each
                WHERE since <= given.at AND asked.more = 0 AND NOT asked.one_off
                      AND asked.cause NOT IN {in_sql(_BEYOND_PAUSES)}
            ) AS pause
            WHERE (lock.schedule = asked.schedule OR (asked.one_off AND lock.one_off))
                  AND (asked.cause = 'refused' OR NOT {window}
                  AND (lock.missed_at IS NULL OR given.at > lock.missed_at
                       + CASE WHEN asked.one_off THEN {TOGETHER} WHEN asked.exact THEN 0.0
                              ELSE asked.min_lock END * interval '1 second')
                  AND NOT {_was_run("lock.window_start")} AND {known}
                  AND NOT EXISTS (SELECT FROM {of_task} AND run.ring IN ('runs', 'failures')
                                  AND {_was_run("run.scheduled_at")}))
            GROUP BY asked.task_name, lock.schedule, asked.cause, asked.reason, asked.more,
                     asked.is_witness, lock.token, lock.missed_at, lock.window_start,
                     lock.recorded_misses, run_before.at, pause.holds, pause.began
        ), missed AS (
            SELECT DISTINCT ON (task_name) parts.*,
                   count(*) OVER (PARTITION BY task_name) > 1 AS has_more
            FROM parts ORDER BY task_name, first_at
        ), explained AS (
            {_missed_in_words(history)}
        ), told AS (
            SELECT explained.*, entry.scheduled_at AS grows_from, entry.run_times AS grows_by,
                   entry.started_at AS noted_at, entry.slot AS grows_slot,
                   COALESCE(entry.replica, CASE WHEN explained.is_witness THEN %(replica_id)s
                                                ELSE '' END) AS told_by
            FROM explained LEFT JOIN LATERAL (
                SELECT run.* FROM {history.table} AS run
                WHERE run.task_name = explained.task_name AND run.ring = 'misses'
                      AND run.cause = explained.cause
                      AND (run.cause NOT IN {in_sql(_KEPT_APART)} OR run.reason = explained.words)
                      AND (run.cause IN {in_sql(_GROWING)}
                           OR run.last_scheduled_at = explained.missed_at)
                      AND run.last_scheduled_at < explained.first_at
                ORDER BY run.last_scheduled_at DESC LIMIT 1
            ) AS entry ON NOT {was_run_between}
        ), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN told USING (task_name)
            WHERE lock.token = told.token
                  AND lock.schedule IS NOT DISTINCT FROM told.schedule
                  AND lock.missed_at IS NOT DISTINCT FROM told.missed_at
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), noted AS (
            UPDATE {table} AS lock SET
                missed_at = CASE WHEN told.cause = 'refused' THEN lock.missed_at
                                 ELSE told.last_at END,
                finished_at = CASE WHEN lock.one_off AND lock.started_at = {NEVER} THEN now()
                                   ELSE lock.finished_at END,
                recorded_misses = lock.recorded_misses
                    + CASE WHEN told.grows_from IS NULL THEN 1 ELSE 0 END
            FROM told JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name AND {SAFELY}
            RETURNING lock.task_name, lock.recorded_misses, told.last_at, told.cause,
                      told.words AS reason, COALESCE(told.grows_from, told.first_at) AS first_at,
                      COALESCE(told.noted_at, now()) AS noted_at, told.grows_slot, told.told_by,
                      LEAST(told.run_times + COALESCE(told.grows_by, 0), 2147483647)::int
                          AS run_times
        ), entry AS ({entry})
        SELECT task_name FROM told WHERE has_more OR NOT EXISTS (
            SELECT FROM noted WHERE noted.task_name = told.task_name)
    """
