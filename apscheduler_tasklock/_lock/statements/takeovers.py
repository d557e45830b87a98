"""Takeovers of dead runs."""

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
from apscheduler_tasklock._lock.statements.deaths import NOT_RUNNING, NOTES_DEATH
from apscheduler_tasklock._lock.statements.history import History, death_entry

# The values of a takeover's request, and their types.
_TAKEOVER_TYPES = {
    "task_name": "text",
    "claim_id": "uuid",
    "dead_claim_id": "uuid",
    "lease": "float8",
    "failover": "boolean",
}


# Whether a handed-over run had begun. The hand-over of a run that never began is not counted,
# because such a run costs nothing.
HANDED_OVER_BEGUN = "lock.handed_over AND lock.last_outcome IS NOT NULL"
# Whether the holder is still assumed to be alive. After a start or an outage, holders get time to
# renew before a replica believes that they are dead.
_IS_DOUBTED = "(lock.finished_at IS NULL AND NOT (lock.handed_over OR %(stable)s::boolean))"


class _Takeover:
    """The parts of the statement that takes a run over.

    The window and the maximum lock do not change.

    A takeover of a manual run is a manual run, too, because a manual run has no window of its own.

    :param asked: the SQL of the request's values, by name
    """

    def __init__(self, asked: Mapping[str, str]) -> None:
        self.may_take_over = f"""(
            lock.claim_id = {asked["dead_claim_id"]} AND lock.finished_at IS NULL
            AND lock.locked_until <= now() AND lock.run_until > now() AND NOT {IS_PAUSED_IN_ANY_WAY}
            AND NOT {_IS_DOUBTED} AND {IS_WANTED}
        )"""
        self.changes = f"""
            started_at = now(),
            locked_until = LEAST(
                now() + {asked["lease"]} * interval '1 second', lock.run_until),
            locked_by = %(replica_id)s,
            claim_id = {asked["claim_id"]},
            token = {NEXT_TOKEN},
            kind = CASE WHEN lock.kind = 'manual' THEN 'manual' ELSE 'takeover' END,
            overrun_at = LEAST(now() + (lock.overrun_at - lock.started_at), lock.run_until),
            {NOTES_DEATH},
            handovers = lock.handovers + CASE WHEN {HANDED_OVER_BEGUN} THEN 1 ELSE 0 END,
            handed_over = false,
            failover = {asked["failover"]}
        """
        self.found = {
            "granted": f"(lock.claim_id = {asked['claim_id']} AND {STANDS})",
            "running": f"NOT {NOT_RUNNING}",
            "new_window": "false",
            "unfinished": "lock.finished_at IS NULL",
            "waits": _IS_DOUBTED,
            "paused": IS_PAUSED_IN_ANY_WAY,
            "came_first": "false",
            **ROW_FOUND,
        }
        made = {**DECIDED_GRANTED, **columns_made(asked["claim_id"])}
        made["manual"] = ROW_FOUND["manual"]  # the takeover of a manual run is a manual run
        made["attempt"] = ROW_FOUND["attempt"]  # a takeover is no further attempt
        self.made_or_found = made_or_found(made, self.found)


TAKE_OVER = _Takeover(asked_columns(_TAKEOVER_TYPES))


def take_over_many(table: str, history: History | None = None) -> str:
    """Return the statement that takes over many dead runs, in the order of their tasks' names.

    A row that another session has locked is passed over: the statement returns it unchanged.
    """
    return f"""
        WITH {all_pauses(table)}, asked AS (
            SELECT * FROM {json_rows(_TAKEOVER_TYPES)}
        ), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name)
            WHERE {TAKE_OVER.may_take_over}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), claimed AS (
            UPDATE {table} AS lock SET {TAKE_OVER.changes}
            FROM asked JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name AND {SAFELY}
            RETURNING {RETURNED}
        ){death_entry(history, table)}
        SELECT asked.claim_id AS asked_claim_id, {TAKE_OVER.made_or_found}
        FROM asked JOIN {table} AS lock USING (task_name) LEFT JOIN claimed USING (task_name)
    """
