"""Retention: which rows are deleted, and how long they stay."""

from __future__ import annotations

from apscheduler_tasklock._lock.statements.conditions import (
    BRIEFLY,
)
from apscheduler_tasklock._lock.statements.history import History
from apscheduler_tasklock._lock.statements.replicas import IS_ALIVE
from apscheduler_tasklock.options import LONGEST_SECONDS

# Limits the time between two deletions of rows of one-off jobs, in seconds.
PRUNE_INTERVAL = 3600.0
# Limits how long the row of a replica stays after its last sign of life, in seconds.
REPLICA_RETENTION = 3600.0


def remove_replicas(replicas: str) -> str:
    """Return the statement that deletes replicas without a sign of life for ``age`` seconds."""
    return f"""
        DELETE FROM {replicas}
        WHERE seen_at < now() - %(age)s * interval '1 second' AND {BRIEFLY}
    """


def shorten_history(history: History) -> str:
    """Return the statement that deletes entries that are more than the history keeps now."""
    return f"""
        DELETE FROM {history.table}
        WHERE task_name = ANY (%(task_names)s) AND ring IN ('runs', 'failures')
              AND slot >= {history.slots} AND {BRIEFLY}
    """


def prune(table: str, history: History | None = None, *, replicas: str) -> str:
    """Return the statement that deletes old rows of one-off jobs, with their history.

    A row stays for the longest ``keep_one_offs`` of the live replicas, and at least for its maximum
    lock and its job's grace, because until then a replica may still ask for its run time.
    """
    runs = ""
    if history is not None:
        runs = f""", runs AS (
            DELETE FROM {history.table}
            WHERE task_name IN (SELECT task_name FROM pruned) AND {BRIEFLY}
        )"""
    return f"""
        WITH kept AS (
            SELECT LEAST({LONGEST_SECONDS}, GREATEST(%(age)s, max(keep_one_offs)))
                   * interval '1 second' AS age
            FROM {replicas} WHERE {IS_ALIVE}
        ), pruned AS (
            DELETE FROM {table} WHERE task_name IN (
                SELECT task_name FROM {table}
                WHERE one_off AND GREATEST(finished_at, window_until, run_until, missed_at)
                                  < now() - (SELECT age FROM kept)
                      AND COALESCE(finished_at, run_until) + (run_until - started_at)
                          + COALESCE(overdue_at - window_start, interval '0') < now()
                LIMIT 1000 FOR UPDATE SKIP LOCKED
            ) RETURNING task_name
        ){runs}
        SELECT task_name FROM pruned
    """
