"""Replicas: their signs of life, the registrations of their tasks, and removed tasks."""

from __future__ import annotations

from apscheduler_tasklock._lock.protocol_messages import Registration, ScheduleNote
from apscheduler_tasklock._lock.statements.conditions import (
    BRIEFLY,
    DUE_IN_ANY_PAUSE,
    MILLISECONDS,
    NEVER,
    ROW_COLUMNS,
    SAFELY,
    WINDOW_SCHEDULE,
    json_rows,
    pauses_of_all,
)
from apscheduler_tasklock._lock.statements.history import History
from apscheduler_tasklock.schema.table import EARLIEST, LATEST

# Limits the entries of changed schedules that each task gets in a day.
MOST_RESCHEDULED = 5
# Limits how long a replica counts as alive after its last sign of life, in seconds: three times the
# interval between signs of life.
ALIVE_FOR = 90.0
IS_ALIVE = f"(stopped_at IS NULL AND seen_at > now() - {ALIVE_FOR}::float8 * interval '1 second')"


# Limits how long operators see a replica as alive after its last sign of life, in seconds. After
# one missed sign the replica is silent.
SILENT_AFTER = 45.0
# Whether a replica has stopped. Until then it reports the runs for which its shutdown waits.
HAS_STOPPED = "(stopped_at IS NOT NULL AND running = '[]'::jsonb)"
# Whether a replica sends signs of life. A stopping replica sends them as long as it has runs.
IS_HEARD = f"""(NOT {HAS_STOPPED}
                AND seen_at > now() - {SILENT_AFTER}::float8 * interval '1 second')"""


def register(table: str) -> str:
    """Return the statement that registers the tasks of a replica.

    A task without a row gets a row. A row that has the same schedule is not changed, unless the job
    has changed, or the row's due time is unknown or falls into a pause. A new schedule does not
    change the window, because each claim decides by its own schedule. The details are for
    operators, so that new ones change nothing else. A retry that was void because the row's due
    time has passed stays void.

    A row that was claimed since the registration's job was read is not changed, because the claim
    has written the due time that follows the one that was read.

    The statement returns for each task whether it is to be registered again, because another
    session has the row locked, or the row was claimed since. If it has changed the schedule, it
    returns the old schedule, too, and when the task was due by it, unless that run time fell into a
    pause.
    """
    due = "now() + asked.next_in * interval '1 second'"
    # When the row's window ends for a claim with the registered schedule. A window that belongs to
    # another schedule may end earlier for such a claim.
    window_until = f"""CASE WHEN {WINDOW_SCHEDULE} <> asked.schedule AND lock.runs <> ''
                            THEN LEAST(lock.window_until, lock.window_start
                                       + asked.least_gap * interval '1 second')
                            ELSE lock.window_until END"""
    # A run time inside the window would be refused, so the run time after it is due.
    next_due = f"""CASE WHEN {due} < {window_until}
                        THEN GREATEST({due} + asked.period * interval '1 second', {window_until})
                        ELSE {due} END"""
    grace = "asked.grace * interval '1 second'"
    says_more = f"""(lock.schedule IS DISTINCT FROM asked.schedule OR asked.moved
                     OR (lock.due_at IS NULL AND NOT lock.is_last AND asked.next_in IS NOT NULL)
                     OR {DUE_IN_ANY_PAUSE})"""
    is_as_read = f"""(asked.token IS NULL OR lock.started_at = {NEVER}
                      OR lock.token = asked.token)"""
    has_other_details = """(lock.details IS DISTINCT FROM asked.details
                            AND asked.details IS NOT NULL)"""
    return f"""
        WITH {pauses_of_all(table)}, asked AS (
            SELECT * FROM {json_rows(Registration)}
        ), changed AS (
            SELECT lock.task_name, lock.schedule AS was_schedule,
                   CASE WHEN NOT {DUE_IN_ANY_PAUSE} THEN {_readable("lock.due_at")} END
                       AS was_due_at
            FROM {table} AS lock JOIN asked USING (task_name)
            WHERE {says_more} AND {is_as_read}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), rewritten AS (
            UPDATE {table} AS lock SET
                schedule = asked.schedule, due_at = {next_due}, overdue_at = {next_due} + {grace},
                is_last = false, one_off = false, details = COALESCE(asked.details, lock.details),
                window_schedule = NULLIF({WINDOW_SCHEDULE}, asked.schedule),
                retry_of = CASE WHEN lock.due_at > now() THEN lock.retry_of END
            FROM asked JOIN changed USING (task_name)
            WHERE lock.task_name = changed.task_name
            RETURNING lock.task_name, changed.was_schedule <> asked.schedule AS has_new_schedule,
                      changed.was_schedule, changed.was_due_at, lock.due_at
        ), described AS (
            UPDATE {table} AS lock SET details = asked.details
            FROM asked JOIN (
                SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name)
                WHERE {has_other_details} AND {says_more} IS NOT TRUE
                ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
            ) AS other USING (task_name)
            WHERE lock.task_name = other.task_name
            RETURNING lock.task_name
        ), inserted AS (
        INSERT INTO {table} AS lock ({ROW_COLUMNS}, finished_at, details)
        SELECT asked.task_name, {NEVER}, {NEVER}, {NEVER}, {NEVER}, {NEVER}, '', gen_random_uuid(),
               {MILLISECONDS}, 0, 0, false, false, asked.runs, false,
               NULL, asked.schedule, {due}, false, {due} + {grace}, NULL, NULL, {NEVER},
               asked.details
        FROM asked
        WHERE NOT EXISTS (SELECT FROM {table} WHERE task_name = asked.task_name) AND {BRIEFLY}
        ORDER BY asked.task_name ON CONFLICT DO NOTHING
        RETURNING lock.task_name
        )
        SELECT task_name, false AS again,
               CASE WHEN has_new_schedule THEN was_schedule END AS was_schedule,
               CASE WHEN has_new_schedule THEN was_due_at END AS was_due_at,
               CASE WHEN has_new_schedule THEN {_readable("due_at")} END AS due_at
        FROM rewritten
        UNION ALL SELECT task_name, false, NULL, NULL, NULL FROM inserted
        UNION ALL
        SELECT task_name, {says_more} IS TRUE OR (described.task_name IS NULL
                                                  AND {has_other_details}), NULL, NULL, NULL
        FROM {table} AS lock JOIN asked USING (task_name) LEFT JOIN described USING (task_name)
        WHERE NOT EXISTS (SELECT FROM changed WHERE changed.task_name = lock.task_name)
    """


def note_reschedulings(table: str, history: History) -> str:
    """Return the statement that writes entries of changed schedules into the run history.

    The entries are among those of what operators did. Replicas of two versions may change a
    schedule back and forth. So an entry is not written if there is one of the same change from the
    last day. A job may change its schedule often, so a task gets few of these entries a day,
    because they would overwrite those of what operators did. The statement returns the tasks whose
    notes are to be sent again, because another session has their rows locked.
    """
    of_last_day = f"""{history.table} AS run
                WHERE run.task_name = asked.task_name AND run.ring = 'actions'
                      AND run.outcome = 'rescheduled'
                      AND run.started_at > now() - interval '1 day'"""
    entry = history.action(
        "rescheduled",
        "noted AS run",
        reason="run.words",
        by="%(replica_id)s::text",
        action_id="NULL",
    )
    return f"""
        WITH known AS (
            SELECT lock.task_name, asked.reason
            FROM (SELECT * FROM {json_rows(ScheduleNote)}) AS asked
                JOIN {table} AS lock USING (task_name)
            WHERE lock.schedule = asked.schedule
                  AND NOT EXISTS (SELECT FROM {of_last_day} AND run.reason = asked.reason)
                  AND (SELECT count(*) FROM {of_last_day}) < {MOST_RESCHEDULED}
        ), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN known USING (task_name)
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), noted AS (
            UPDATE {table} AS lock SET recorded_actions = lock.recorded_actions + 1
            FROM known JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name AND {SAFELY}
            RETURNING lock.*, known.reason AS words
        ), entry AS ({entry})
        SELECT task_name FROM known WHERE NOT EXISTS (
            SELECT FROM noted WHERE noted.task_name = known.task_name)
    """


def _readable(moment: str) -> str:
    """Return a time; null if Python has no such time."""
    return f"CASE WHEN {moment} BETWEEN {EARLIEST} AND {LATEST} THEN {moment} END"


def report_replica(replicas: str) -> str:
    """Return the statement that reports a replica as alive, with its tasks and rejected work.

    The first report has no ``started_at``, and overwrites the whole row, because the row may be
    that of an earlier process with the same id. A later report does not undo a stop, because the
    stop may have overtaken the report. The statement returns the row's ``started_at``, and how many
    replicas are alive.
    """
    return f"""
        INSERT INTO {replicas} AS replica (replica_id, host, version, started_at, seen_at, tasks,
                                           rejected, running, leader_namespace, release,
                                           keep_one_offs)
        SELECT %(replica_id)s, %(host)s, %(version)s,
               COALESCE(%(started_at)s, now()), now(), %(tasks)s,
               %(rejected)s, %(running)s, %(leader_namespace)s,
               %(release)s::text, %(keep_one_offs)s::bigint
        WHERE {BRIEFLY}
        ON CONFLICT (replica_id) DO UPDATE SET
            host = excluded.host, version = excluded.version, seen_at = now(),
            stopped_at = CASE WHEN %(started_at)s IS NOT NULL
                              THEN replica.stopped_at END,
            running = excluded.running,
            started_at = CASE WHEN %(started_at)s IS NULL THEN now()
                              ELSE replica.started_at END,
            tasks = CASE WHEN replica.tasks OPERATOR(pg_catalog.=) excluded.tasks THEN replica.tasks
                         ELSE excluded.tasks END,
            rejected = excluded.rejected, leader_namespace = excluded.leader_namespace,
            release = excluded.release, keep_one_offs = excluded.keep_one_offs
        RETURNING started_at, (SELECT count(*) FROM {replicas} WHERE {IS_ALIVE}) AS live
    """


def stop_replica(replicas: str) -> str:
    """Return the statement that reports a replica's stop, and which of its runs still go on."""
    return f"""
        UPDATE {replicas} SET stopped_at = COALESCE(stopped_at, now()), seen_at = now(),
                              running = %(running)s
        WHERE replica_id = %(replica_id)s AND {BRIEFLY}
    """


def retire(table: str, replicas: str) -> str:
    """Return the statement that retires removed tasks, so that they are not overdue.

    Removed tasks are the tasks whose jobs were removed on this replica, and the tasks of stopped
    replicas that share a task with this replica, as after a deployment. A task that a live replica
    has is not retired. The tasks of a replica that was killed, or that shares no task with this
    replica, are not retired either, because operators have to see that these tasks do not run.

    A retry ends with the task's due time. Otherwise one that is void, because that time has passed,
    would come back with the job. The retry of a job's last run time has no due time, and stands.
    """
    return f"""
        UPDATE {table} AS lock SET due_at = NULL, overdue_at = NULL, is_last = false,
                                   retry_of = CASE WHEN due_at IS NULL THEN retry_of END
        WHERE (due_at IS NOT NULL OR is_last) AND finished_at IS NOT NULL AND NOT one_off
              AND task_name IN (
                  SELECT task_name FROM {table}
                  WHERE (due_at IS NOT NULL OR is_last) AND finished_at IS NOT NULL AND NOT one_off
                        AND task_name IN (
                  SELECT pg_catalog.unnest(%(dropped)s)
                  UNION
                  SELECT pg_catalog.unnest(tasks) FROM {replicas}
                  WHERE stopped_at IS NOT NULL AND tasks OPERATOR(pg_catalog.&&) %(tasks)s
                  EXCEPT
                  SELECT pg_catalog.unnest(tasks) FROM {replicas} WHERE {IS_ALIVE})
                  ORDER BY task_name FOR NO KEY UPDATE SKIP LOCKED)
    """
