"""Manual runs: when a manual run may begin, and its claim."""

from __future__ import annotations

from apscheduler_tasklock._lock.statements.columns import (
    DECIDED_GRANTED,
    RETURNED,
    columns_made,
    made_or_found,
)
from apscheduler_tasklock._lock.statements.conditions import (
    IS_PAUSED_IN_ANY_WAY,
    IS_WANTED,
    NEXT_TOKEN,
    SAFELY,
    SHORTEST_WAIT,
    STANDS,
    all_pauses,
)
from apscheduler_tasklock._lock.statements.deaths import NOTES_DEATH
from apscheduler_tasklock._lock.statements.history import History, death_entry
from apscheduler_tasklock._lock.statements.takeovers import TAKE_OVER


def claim_manual(table: str, history: History | None = None) -> str:
    """Return the statement that claims a manual run.

    A granted claim clears the operator's request, so that only one claim is granted. The claim
    changes neither the window nor the due time. A manual run may begin in a pause. While a run goes
    on, no manual run is granted. If a dead run is to be run again, the manual run waits for the
    takeover.

    In two cases the manual run does not wait: if the task is paused, or if the operator's request
    and the end of the lease are both longer ago than a takeover needs. In the second case it is
    possible that no replica can run the dead run any more, for example after a deployment.
    """
    nobody_does = f"""({IS_PAUSED_IN_ANY_WAY} OR
                       GREATEST(lock.requested_at, lock.locked_until) + {SHORTEST_WAIT} <= now())"""
    may_run = f"""(
        lock.request_id = %(request_id)s::uuid AND lock.request_until > now()
        AND (lock.finished_at IS NOT NULL OR (
            lock.locked_until <= now() AND %(stable)s::boolean
            AND (lock.run_until <= now() OR NOT (lock.failover OR lock.handed_over)
                 OR {nobody_does})))
    )"""
    max_lock = "%(max_lock)s::float8 * interval '1 second'"
    own = "lock.claim_id = %(claim_id)s::uuid"
    found = {
        **TAKE_OVER.found,
        "granted": f"({own} AND {STANDS})",
        # If another statement has changed the row while this statement waited for it, this column
        # is true although the claim is not granted, and the answer looks free.
        "new_window": f"COALESCE({may_run}, false)",
        "waits": "false",
        "paused": "false",
    }
    made = {
        **DECIDED_GRANTED,
        **columns_made("%(claim_id)s::uuid"),
        "manual": "true",
    }
    return f"""
        WITH {all_pauses(table)}, claimed AS (
            UPDATE {table} AS lock SET
                started_at = now(),
                locked_until = now()
                    + LEAST(%(lease)s::float8 * interval '1 second', {max_lock}),
                run_until = now() + {max_lock},
                overrun_at = now()
                    + LEAST(%(max_runtime)s::float8 * interval '1 second', {max_lock}),
                locked_by = %(replica_id)s, claim_id = %(claim_id)s::uuid, token = {NEXT_TOKEN},
                {NOTES_DEATH}, handovers = 0, handed_over = false,
                failover = %(failover)s::boolean, runs = %(runs)s::text, finished_at = NULL,
                kind = 'manual', attempt = 1, request_id = NULL, requested_by = NULL,
                requested_at = NULL, request_until = NULL
            WHERE lock.task_name = %(task_name)s AND {may_run} AND {IS_WANTED} AND {SAFELY}
            RETURNING {RETURNED}
        ){death_entry(history, table)}
        SELECT {made_or_found(made, found)}
        FROM {table} AS lock LEFT JOIN claimed ON true WHERE lock.task_name = %(task_name)s
    """
