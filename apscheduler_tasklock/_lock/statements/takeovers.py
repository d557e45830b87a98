"""What becomes of runs whose holders died, and runs that were asked for by hand."""

from __future__ import annotations

from collections.abc import Mapping

from apscheduler_tasklock._lock.statements.answers import (
    DECIDED_GRANTED,
    RETURNED,
    ROW_FOUND,
    columns_made,
    made_or_found,
)
from apscheduler_tasklock._lock.statements.history import History, death_entry
from apscheduler_tasklock._lock.statements.parts import (
    ENDED_UNSEEN,
    IS_PAUSED,
    IS_WANTED,
    NOT_RUNNING,
    NOTES_DEATH,
    SAFELY,
    SHORTEST_WAIT,
    STANDS,
    asked_columns,
    json_rows,
)

# What a takeover asks for, and the types.
_TAKEOVER_TYPES = {
    "task_name": "text",
    "claim_id": "uuid",
    "dead_claim_id": "uuid",
    "lease": "float8",
    "failover": "boolean",
}


# Rows cannot be believed yet: its holder may be alive, and had no answer to its renewals either.
_IS_DOUBTED = "(lock.finished_at IS NULL AND NOT (lock.handed_over OR %(stable)s::boolean))"


class _Takeover:
    """The parts of a takeover's statement. Its window and maximum lock stay what they were.

    What runs a manual run again is one itself: it has no window, and no run time of the schedule's.

    :param asked: what is asked for, by name
    """

    def __init__(self, asked: Mapping[str, str]) -> None:
        self.may_take_over = f"""(
            lock.claim_id = {asked["dead_claim_id"]} AND lock.finished_at IS NULL
            AND lock.locked_until <= now() AND lock.run_until > now() AND NOT {IS_PAUSED}
            AND NOT {_IS_DOUBTED} AND {IS_WANTED}
        )"""
        self.changes = f"""
            started_at = now(),
            locked_until = LEAST(
                now() + {asked["lease"]} * interval '1 second', lock.run_until),
            locked_by = %(replica_id)s,
            claim_id = {asked["claim_id"]},
            token = lock.token + 1,
            kind = CASE WHEN lock.kind = 'manual' THEN 'manual' ELSE 'takeover' END,
            overrun_at = LEAST(now() + (lock.overrun_at - lock.started_at), lock.run_until),
            {NOTES_DEATH},
            handovers = lock.handovers + CASE WHEN lock.handed_over THEN 1 ELSE 0 END,
            handed_over = false,
            failover = {asked["failover"]}
        """
        self.found = {
            "granted": f"(lock.claim_id = {asked['claim_id']} AND {STANDS})",
            "running": f"NOT {NOT_RUNNING}",
            "new_window": "false",
            "unfinished": "lock.finished_at IS NULL",
            "waits": _IS_DOUBTED,
            "paused": IS_PAUSED,
            "came_first": "false",
            **ROW_FOUND,
        }
        made = {**DECIDED_GRANTED, **columns_made(asked["claim_id"])}
        made["manual"] = ROW_FOUND["manual"]  # if the run that died was
        self.made_or_found = made_or_found(made, self.found)


_TAKE_OVER = _Takeover(asked_columns(_TAKEOVER_TYPES))


def take_over_many(table: str, history: History | None = None) -> str:
    """Return the statement that takes over many claims, in the order of their tasks' names.

    A row that somebody else has locked is passed over: its answer is the row as it was before.
    """
    return f"""
        WITH asked AS (SELECT * FROM {json_rows(_TAKEOVER_TYPES)}), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name)
            WHERE {_TAKE_OVER.may_take_over}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), claimed AS (
            UPDATE {table} AS lock SET {_TAKE_OVER.changes}
            FROM asked JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name AND {SAFELY}
            RETURNING {RETURNED}
        ){death_entry(history, table)}
        SELECT asked.claim_id AS asked_claim_id, {_TAKE_OVER.made_or_found}
        FROM asked JOIN {table} AS lock USING (task_name) LEFT JOIN claimed USING (task_name)
    """


def claim_requested(table: str, history: History | None = None) -> str:
    """Return the statement that claims a run that was asked for by hand.

    It clears the request, so one claim is granted for it. The window stays what it is, and when the
    next run is due. It goes before a pause, and behind a run that goes on or is to be run again.
    Where nobody runs that again, it takes its place: while the task is paused; and once the request
    has stood, and the lease has been over, for longer than a takeover takes. Else a dead run that
    no replica can run any more, as after a deployment, would keep an operator waiting.
    """
    nobody_does = f"""({IS_PAUSED} OR
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
        **_TAKE_OVER.found,
        "granted": f"({own} AND {STANDS})",
        # It looks free to a statement that waited for a row which another one has changed.
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
        WITH claimed AS (
            UPDATE {table} AS lock SET
                started_at = now(),
                locked_until = now()
                    + LEAST(%(lease)s::float8 * interval '1 second', {max_lock}),
                run_until = now() + {max_lock},
                overrun_at = now()
                    + LEAST(%(max_runtime)s::float8 * interval '1 second', {max_lock}),
                locked_by = %(replica_id)s, claim_id = %(claim_id)s::uuid, token = lock.token + 1,
                {NOTES_DEATH}, handovers = 0, handed_over = false,
                failover = %(failover)s::boolean, runs = %(runs)s::text, finished_at = NULL,
                kind = 'manual', request_id = NULL, requested_by = NULL, requested_at = NULL,
                request_until = NULL
            WHERE lock.task_name = %(task_name)s AND {may_run} AND {IS_WANTED} AND {SAFELY}
            RETURNING {RETURNED}
        ){death_entry(history, table)}
        SELECT {made_or_found(made, found)}
        FROM {table} AS lock LEFT JOIN claimed ON true WHERE lock.task_name = %(task_name)s
    """


def end_lease(table: str) -> str:
    """Return the statement that ends the lease of a run whose holder is known to be dead."""
    return f"""
        UPDATE {table} AS lock SET locked_until = LEAST(lock.locked_until, now())
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND finished_at IS NULL
          AND locked_by = ANY(%(holders)s::text[]) AND {SAFELY}
        RETURNING locked_until, now() AS database_time
    """


def give_up(table: str, history: History | None = None) -> str:
    """Return the statement that finishes a dead run which is not run again; one replica's does.

    A run that is handed over while this statement waits for its row is left to the next look.
    """
    dead = "NOT lock.handed_over"
    died = "closed AS run WHERE run.died"
    outcome = "run.last_outcome"
    entry = history.entry(died, ended_at="run.ended_at", outcome=outcome) if history else ""
    return f"""
        WITH dead AS (
            SELECT task_name, locked_until AS ended_at, {dead} AS died FROM {table} AS lock
            WHERE task_name = %(task_name)s
        ), closed AS (
            UPDATE {table} AS lock SET
                finished_at = now(), locked_until = GREATEST(now(), window_until),
                handed_over = false, deaths = deaths + CASE WHEN overran THEN 0 ELSE 1 END,
                last_outcome = CASE WHEN {dead} THEN {ENDED_UNSEEN} ELSE lock.last_outcome END,
                recorded = recorded + CASE WHEN {dead} THEN 1 ELSE 0 END,
                failures = failures + CASE WHEN {dead} THEN 1 ELSE 0 END,
                failed_at = CASE WHEN {dead} THEN lock.locked_until ELSE failed_at END,
                error_type = CASE WHEN {dead} THEN NULL ELSE error_type END
            FROM dead
            WHERE lock.task_name = dead.task_name AND claim_id = %(claim_id)s::uuid
              AND finished_at IS NULL AND locked_until <= now() AND ({dead}) = died AND {SAFELY}
            RETURNING lock.task_name, token, window_start, started_at, locked_by, kind, recorded,
                      last_outcome, dead.ended_at, dead.died
        ){f", entry AS ({entry})" if entry else ""}
        SELECT token FROM closed
    """
