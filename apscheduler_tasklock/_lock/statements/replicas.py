"""What replicas tell of themselves and their tasks, and what is tidied up."""

from __future__ import annotations

from apscheduler_tasklock._lock.statements.history import History
from apscheduler_tasklock._lock.statements.parts import (
    BRIEFLY,
    DUE_IN_PAUSE,
    NEVER,
    ROW_COLUMNS,
    WINDOW_SCHEDULE,
    json_rows,
)

# What a replica tells of a task, and the types.
_REGISTRATION_TYPES = {
    "task_name": "text",
    "schedule": "text",
    "next_in": "float8",
    "grace": "float8",
    "least_gap": "float8",
    "period": "float8",
    "runs": "text",
    "moved": "boolean",
}

# Seconds after its last sign for which a replica may be alive: three of its intervals.
ALIVE_FOR = 90.0
IS_ALIVE = f"(stopped_at IS NULL AND seen_at > now() - {ALIVE_FOR}::float8 * interval '1 second')"


# Seconds after its last sign of life after which operators see it as silent: one was missed.
SILENT_AFTER = 45.0
# One whose stop waits for its runs goes on telling of them.
IS_HEARD = f"""((stopped_at IS NULL OR running <> '[]'::jsonb)
                AND seen_at > now() - {SILENT_AFTER}::float8 * interval '1 second')"""


def register(table: str) -> str:
    """Return the statement by which a replica tells of the tasks that it has.

    A task that has never run gets a row. A row that says the same is left alone, unless nobody
    knows when its next run is due. Another schedule changes no window: whose claims are granted is
    decided when they are made.

    It returns of each task whether it was passed over, since somebody has its row locked.
    """
    due = "now() + asked.next_in * interval '1 second'"
    # When the window of another schedule ends for a claim under this one.
    window_until = f"""CASE WHEN {WINDOW_SCHEDULE} <> asked.schedule AND lock.runs <> ''
                            THEN LEAST(lock.window_until, lock.window_start
                                       + asked.least_gap * interval '1 second')
                            ELSE lock.window_until END"""
    # A run time inside the window is refused: the one after it is due.
    next_due = f"""CASE WHEN {due} < {window_until}
                        THEN GREATEST({due} + asked.period * interval '1 second', {window_until})
                        ELSE {due} END"""
    grace = "asked.grace * interval '1 second'"
    says_more = f"""(lock.schedule IS DISTINCT FROM asked.schedule OR asked.moved
                     OR (lock.due_at IS NULL AND NOT lock.is_last AND asked.next_in IS NOT NULL)
                     OR {DUE_IN_PAUSE})"""
    return f"""
        WITH asked AS (SELECT * FROM {json_rows(_REGISTRATION_TYPES)}), changed AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name)
            WHERE {says_more}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), rewritten AS (
            UPDATE {table} AS lock SET
                schedule = asked.schedule, due_at = {next_due}, overdue_at = {next_due} + {grace},
                is_last = false,
                window_schedule = NULLIF({WINDOW_SCHEDULE}, asked.schedule)
            FROM asked JOIN changed USING (task_name)
            WHERE lock.task_name = changed.task_name
            RETURNING lock.task_name
        ), inserted AS (
        INSERT INTO {table} AS lock ({ROW_COLUMNS}, finished_at)
        SELECT asked.task_name, {NEVER}, {NEVER}, {NEVER}, {NEVER}, {NEVER}, '', gen_random_uuid(),
               (extract(epoch FROM now()) * 1000.0)::bigint, 0, 0, false, false, asked.runs, false,
               NULL, asked.schedule, {due}, false, {due} + {grace}, NULL, NULL, {NEVER}
        FROM asked
        WHERE NOT EXISTS (SELECT FROM {table} WHERE task_name = asked.task_name) AND {BRIEFLY}
        ORDER BY asked.task_name ON CONFLICT DO NOTHING
        RETURNING lock.task_name
        )
        SELECT task_name, false AS again FROM rewritten
        UNION ALL SELECT task_name, false FROM inserted
        UNION ALL
        SELECT task_name, {says_more} IS TRUE
        FROM {table} AS lock JOIN asked USING (task_name)
        WHERE NOT EXISTS (SELECT FROM changed WHERE changed.task_name = lock.task_name)
    """


def report_replica(replicas: str) -> str:
    """Return the statement by which a replica says that it is alive, and what there is to tell.

    That is which tasks it has, and what the database rejects of its work.

    The first time it does, ``started_at`` is null, and all of the row becomes its own: the id may
    be that of a process before it. Later it does not undo a stop, which may have overtaken it. It
    returns the ``started_at`` that stands, and how many replicas are alive.
    """
    return f"""
        INSERT INTO {replicas} AS replica (replica_id, host, version, started_at, seen_at, tasks,
                                           rejected, running)
        SELECT %(replica_id)s, %(host)s, %(version)s,
               COALESCE(%(started_at)s::timestamptz, now()), now(), %(tasks)s::text[],
               %(rejected)s::text[], %(running)s::jsonb
        WHERE {BRIEFLY}
        ON CONFLICT (replica_id) DO UPDATE SET
            host = excluded.host, version = excluded.version, seen_at = now(),
            stopped_at = CASE WHEN %(started_at)s::timestamptz IS NOT NULL
                              THEN replica.stopped_at END,
            running = excluded.running,
            started_at = CASE WHEN %(started_at)s::timestamptz IS NULL THEN now()
                              ELSE replica.started_at END,
            tasks = CASE WHEN replica.tasks OPERATOR(pg_catalog.=) excluded.tasks THEN replica.tasks
                         ELSE excluded.tasks END,
            rejected = excluded.rejected
        RETURNING started_at, (SELECT count(*) FROM {replicas} WHERE {IS_ALIVE}) AS live
    """


def stop_replica(replicas: str) -> str:
    """Return the statement by which a replica says that it stops, and what it still runs."""
    return f"""
        UPDATE {replicas} SET stopped_at = COALESCE(stopped_at, now()), seen_at = now(),
                              running = %(running)s::jsonb
        WHERE replica_id = %(replica_id)s AND {BRIEFLY}
    """


def retire(table: str, replicas: str) -> str:
    """Return the statement after which nobody waits for tasks that were removed.

    These are the ones that this replica has dropped, and, as after a deployment, the ones that a
    replica had that has stopped and whose other tasks this one has. Not if its holder was killed,
    or its application has no other replica: then somebody has to be told that they do not run.
    """
    return f"""
        UPDATE {table} AS lock SET due_at = NULL, overdue_at = NULL, is_last = false
        WHERE (due_at IS NOT NULL OR is_last) AND finished_at IS NOT NULL AND NOT one_off
              AND task_name IN (
                  SELECT task_name FROM {table}
                  WHERE (due_at IS NOT NULL OR is_last) AND finished_at IS NOT NULL AND NOT one_off
                        AND task_name IN (
                  SELECT pg_catalog.unnest(%(dropped)s::text[])
                  UNION
                  SELECT pg_catalog.unnest(tasks) FROM {replicas}
                  WHERE stopped_at IS NOT NULL AND tasks OPERATOR(pg_catalog.&&) %(tasks)s::text[]
                  EXCEPT
                  SELECT pg_catalog.unnest(tasks) FROM {replicas} WHERE {IS_ALIVE})
                  ORDER BY task_name FOR NO KEY UPDATE SKIP LOCKED)
    """


def remove_replicas(replicas: str) -> str:
    """Return the statement that removes replicas that nobody has seen for long."""
    return f"""
        DELETE FROM {replicas}
        WHERE seen_at < now() - %(age)s::float8 * interval '1 second' AND {BRIEFLY}
    """


def shorten_history(history: History) -> str:
    """Return the statement that deletes what a longer history has left of these tasks."""
    return f"""
        DELETE FROM {history.table}
        WHERE task_name = ANY (%(names)s::text[]) AND slot >= {history.slots} AND {BRIEFLY}
    """


def prune(table: str, history: History | None = None) -> str:
    """Return the statement that deletes rows of one-off jobs that were over long ago.

    Their history goes with them.
    """
    runs = ""
    if history is not None:
        runs = f""", runs AS (
            DELETE FROM {history.table}
            WHERE task_name IN (SELECT task_name FROM pruned) AND {BRIEFLY}
        )"""
    return f"""
        WITH pruned AS (
            DELETE FROM {table} WHERE task_name IN (
                SELECT task_name FROM {table}
                WHERE one_off AND GREATEST(finished_at, window_until, run_until)
                                  < now() - %(age)s::float8 * interval '1 second'
                LIMIT 1000 FOR UPDATE SKIP LOCKED
            ) RETURNING task_name
        ){runs}
        SELECT task_name FROM pruned
    """
