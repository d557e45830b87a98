"""Retries: a failed run is run again after a pause, before the next run time is due."""

from __future__ import annotations

from collections.abc import Mapping

from apscheduler_tasklock._lock.statements.columns import (
    DECIDED_GRANTED,
    RETURNED,
    ROW_FOUND,
    columns_made,
    made_or_found,
)
from apscheduler_tasklock._lock.statements.conditions import (
    IS_PAUSED_IN_ANY_WAY,
    IS_WANTED,
    NEXT_TOKEN,
    SAFELY,
    STANDS,
    all_pauses,
    asked_columns,
    json_rows,
)
from apscheduler_tasklock._lock.statements.deaths import NOT_RUNNING

# The values of a retry's request, and their types.
_RETRY_TYPES = {
    "task_name": "text",
    "claim_id": "uuid",
    "failed_claim_id": "uuid",
    "max_lock": "float8",
    "lease": "float8",
    "failover": "boolean",
    "max_runtime": "float8",
}

# Limits how long after its time a retry can begin.
LATEST_RETRY = "interval '1 day'"
# Whether the last run is to be retried. Each later claim of the task has another claim id, so that
# it ends this without a write.
IS_RETRY_PENDING = f"""(lock.finished_at IS NOT NULL AND lock.retry_of = lock.claim_id
    AND now() < lock.retry_at + {LATEST_RETRY} AND COALESCE(now() < lock.due_at, true))"""
# Whether the retry can begin now.
IS_RETRY_DUE = f"""({IS_RETRY_PENDING} AND lock.retry_at <= now()
    AND NOT {IS_PAUSED_IN_ANY_WAY})"""


class _Retry:
    """The parts of the statement that runs a failed run again.

    The window, the run time and the next due time do not change. The lease and the maximum lock are
    new.

    :param asked: the SQL of the request's values, by name
    """

    def __init__(self, asked: Mapping[str, str]) -> None:
        max_lock = f"({asked['max_lock']} * interval '1 second')"
        lease = f"({asked['lease']} * interval '1 second')"
        # The claim id decides, and not the number of the attempt, because the next run time may
        # have failed as often.
        self.may_retry = f"""(lock.claim_id = {asked["failed_claim_id"]} AND {IS_RETRY_DUE}
                              AND {IS_WANTED})"""
        self.changes = f"""
            started_at = now(),
            locked_until = now() + LEAST({max_lock}, {lease}),
            run_until = now() + {max_lock},
            overrun_at = now() + LEAST({asked["max_runtime"]}, {asked["max_lock"]})
                * interval '1 second',
            locked_by = %(replica_id)s,
            claim_id = {asked["claim_id"]},
            token = {NEXT_TOKEN},
            kind = 'retry',
            attempt = lock.attempt + 1,
            finished_at = NULL,
            last_outcome = NULL,
            overran = false,
            handovers = 0,
            handed_over = false,
            failover = {asked["failover"]}
        """
        self.found = {
            "granted": f"(lock.claim_id = {asked['claim_id']} AND {STANDS})",
            "running": f"NOT {NOT_RUNNING}",
            # Whether the claim is to be sent again, because another session has the row locked, or
            # because the claim came after its `not_after`.
            "new_window": f"""COALESCE(lock.claim_id = {asked["failed_claim_id"]}
                                       AND {IS_RETRY_DUE}, false)""",
            "unfinished": "lock.finished_at IS NULL",
            "waits": "false",
            "paused": IS_PAUSED_IN_ANY_WAY,
            "came_first": "false",
            **ROW_FOUND,
        }
        made = {**DECIDED_GRANTED, **columns_made(asked["claim_id"])}
        made["attempt"] = "lock.attempt + 1"
        made["closed"] = ROW_FOUND["closed"]  # because the run before a retry is finished
        self.made_or_found = made_or_found(made, self.found)


_RETRY = _Retry(asked_columns(_RETRY_TYPES))


def retry_many(table: str) -> str:
    """Return the statement that runs many failed runs again, in the order of their tasks' names.

    A row that another session has locked is passed over: the statement returns it unchanged.
    """
    return f"""
        WITH {all_pauses(table)}, asked AS (
            SELECT * FROM {json_rows(_RETRY_TYPES)}
        ), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name)
            WHERE {_RETRY.may_retry}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), claimed AS (
            UPDATE {table} AS lock SET {_RETRY.changes}
            FROM asked JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name AND {SAFELY}
            RETURNING {RETURNED}
        )
        SELECT asked.claim_id AS asked_claim_id, {_RETRY.made_or_found}
        FROM asked JOIN {table} AS lock USING (task_name) LEFT JOIN claimed USING (task_name)
    """
