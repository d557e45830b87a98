"""Reruns: takeovers, retries and manual runs, which claim the run that a task's row shows."""

from __future__ import annotations

from apscheduler_tasklock._lock.protocol_messages import RerunRequest
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
    json_rows,
    pauses_of_all,
)
from apscheduler_tasklock._lock.statements.deaths import NOT_RUNNING, NOTES_DEATH
from apscheduler_tasklock._lock.statements.history import History, death_entry
from apscheduler_tasklock._lock.statements.manual_runs import MAY_RUN_MANUALLY
from apscheduler_tasklock._lock.statements.retries import MAY_RETRY
from apscheduler_tasklock._lock.statements.takeovers import (
    HANDED_OVER_BEGUN,
    IS_DOUBTED,
    MAY_TAKE_OVER,
)

_MAY_RUN = {"takeover": MAY_TAKE_OVER, "retry": MAY_RETRY, "manual": MAY_RUN_MANUALLY}

# What each rerun changes. No rerun changes the window or the due time.
_CHANGES = f"""
    started_at = now(),
    locked_by = %(replica_id)s,
    claim_id = asked.claim_id,
    token = {NEXT_TOKEN},
    {NOTES_DEATH},
    handed_over = false,
    failover = asked.failover,
    finished_at = NULL
"""
_MAX_LOCK = "(asked.max_lock * interval '1 second')"
_LEASE = "(asked.lease * interval '1 second')"
_ANEW = {
    "run_until": f"now() + {_MAX_LOCK}",
    "locked_until": f"now() + LEAST({_MAX_LOCK}, {_LEASE})",
    "overrun_at": f"now() + LEAST(asked.max_runtime * interval '1 second', {_MAX_LOCK})",
    "handovers": "0",
}
# What the reruns of one kind change, too.
_CHANGES_OF_KIND = {
    # The maximum lock does not change. A takeover is no further attempt. A takeover of a manual run
    # is a manual run, too, because a manual run has no window of its own.
    "takeover": {
        "locked_until": f"LEAST(now() + {_LEASE}, lock.run_until)",
        "overrun_at": "LEAST(now() + (lock.overrun_at - lock.started_at), lock.run_until)",
        "handovers": f"lock.handovers + CASE WHEN {HANDED_OVER_BEGUN} THEN 1 ELSE 0 END",
        "kind": "CASE WHEN lock.kind = 'manual' THEN 'manual' ELSE 'takeover' END",
    },
    "retry": {**_ANEW, "kind": "'retry'", "attempt": "lock.attempt + 1"},
    # The operator's request is cleared, so that only one claim of it is granted.
    "manual": {
        **_ANEW,
        "kind": "'manual'",
        "attempt": "1",
        "runs": "asked.runs",
        "request_id": "NULL",
        "requested_by": "NULL",
        "requested_at": "NULL",
        "request_until": "NULL",
    },
}
_MADE = {
    **DECIDED_GRANTED,
    **columns_made("asked.claim_id"),
    "manual": "claimed.new_kind = 'manual'",
    "attempt": "claimed.new_attempt",
}


def rerun(table: str, history: History | None = None, *, kind: str) -> str:
    """Return the statement that claims many reruns of a kind, in the order of their tasks' names.

    A row that another session has locked is passed over: the statement returns it unchanged.

    :param kind: as in ``RerunRequest``
    """
    found = {
        "granted": f"(lock.claim_id = asked.claim_id AND {STANDS})",
        "running": f"NOT {NOT_RUNNING}",
        # Whether the claim is to be sent again, because another session has the row locked, or
        # because the claim came after its `not_after`.
        "new_window": f"COALESCE({_MAY_RUN[kind]}, false)",
        "unfinished": "lock.finished_at IS NULL",
        "waits": IS_DOUBTED if kind == "takeover" else "false",
        "paused": "false" if kind == "manual" else IS_PAUSED_IN_ANY_WAY,
        "came_first": "false",
        **ROW_FOUND,
    }
    changes = "".join(f", {name} = {value}" for name, value in _CHANGES_OF_KIND[kind].items())
    return f"""
        WITH {pauses_of_all(table)}, asked AS (
            SELECT * FROM {json_rows(RerunRequest)}
        ), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name)
            WHERE {_MAY_RUN[kind]} AND {IS_WANTED}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), claimed AS (
            UPDATE {table} AS lock SET {_CHANGES} {changes}
            FROM asked JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name AND {SAFELY}
            RETURNING {RETURNED}, lock.kind AS new_kind, lock.attempt AS new_attempt
        ){death_entry(history, table)}
        SELECT asked.claim_id AS asked_claim_id, {made_or_found(_MADE, found)}
        FROM asked JOIN {table} AS lock USING (task_name) LEFT JOIN claimed USING (task_name)
    """
