"""Deaths: which runs count as dead, and how the rows note them."""

from __future__ import annotations

from apscheduler_tasklock._lock.statements.columns import closed_run
from apscheduler_tasklock._lock.statements.conditions import SAFELY
from apscheduler_tasklock._lock.statements.history import History

# Whether a run is dead: unfinished although its lease has ended.
IS_DEAD = "(finished_at IS NULL AND locked_until <= now())"

# Condition 1 of the decision: the task does not run. An unfinished run counts as running until its
# lease has ended.
NOT_RUNNING = "(lock.finished_at IS NOT NULL OR lock.locked_until <= now())"

# Whether the granted claim follows a dead run. A handed-over run does not count as dead.
FOLLOWS_DEATH = "lock.finished_at IS NULL AND NOT lock.handed_over"

# Whether the run is the first attempt at its run time. A takeover is no further attempt.
IS_FIRST_ATTEMPT = "lock.attempt = 1"
# Whether a failure of the run is the first one of its run time. A run time counts as one failure,
# so that the failures of its retries are not counted, nor that of a takeover if the run that it has
# taken over died. A death before the window belongs to an earlier run time.
IS_FIRST_FAILURE = f"""({IS_FIRST_ATTEMPT} AND NOT (
    lock.kind IS NOT DISTINCT FROM 'takeover' AND lock.deaths > 0
    AND COALESCE(lock.failed_at >= lock.window_start, false)))"""

# The outcome of a dead run. If its holder still renewed it right before the maximum lock ended, the
# run has overrun its maximum lock, which is a failure, but no death.
ENDED_UNSEEN = "CASE WHEN lock.overran THEN 'overran' ELSE 'died' END"

NOTES_DEATH = f"""
    deaths = lock.deaths + CASE WHEN {FOLLOWS_DEATH} AND NOT lock.overran THEN 1 ELSE 0 END,
    last_outcome = CASE WHEN {FOLLOWS_DEATH} THEN {ENDED_UNSEEN} END,
    overran = false,
    recorded_failures = lock.recorded_failures + CASE WHEN {FOLLOWS_DEATH} THEN 1 ELSE 0 END,
    failures = lock.failures + CASE WHEN {FOLLOWS_DEATH} AND {IS_FIRST_FAILURE} THEN 1 ELSE 0 END,
    failed_at = CASE WHEN {FOLLOWS_DEATH} THEN lock.locked_until ELSE lock.failed_at END,
    error_type = CASE WHEN {FOLLOWS_DEATH} THEN NULL ELSE lock.error_type END
"""


def end_lease(table: str) -> str:
    """Return the statement that ends the lease of a run which is known to be dead."""
    return f"""
        UPDATE {table} AS lock SET locked_until = LEAST(lock.locked_until, now())
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s AND finished_at IS NULL
          AND locked_by = ANY(%(holders)s) AND {SAFELY}
        RETURNING locked_until, now() AS database_time
    """


def give_up(table: str, history: History | None = None) -> str:
    """Return the statement that gives up a dead run. Only one replica's statement finishes the run.

    If the run is handed over while the statement waits for the row, the statement finishes nothing.
    The next look at the tasks' rows then decides what becomes of the run. The statement returns the
    values of a ``ClosedDeadRun``.
    """
    dead = "NOT lock.handed_over"
    died = "closed AS run WHERE run.died"
    outcome = "run.last_outcome"
    columns = {"recorded": "run.recorded_failures", "ended_at": "run.ended_at", "outcome": outcome}
    entry = history.entry(died, **columns) if history else ""
    return f"""
        WITH dead AS (
            SELECT task_name, locked_until AS ended_at, {dead} AS died FROM {table} AS lock
            WHERE task_name = %(task_name)s
        ), closed AS (
            UPDATE {table} AS lock SET
                finished_at = now(), locked_until = GREATEST(now(), window_until),
                handed_over = false, deaths = deaths + CASE WHEN overran THEN 0 ELSE 1 END,
                last_outcome = CASE WHEN {dead} THEN {ENDED_UNSEEN} ELSE lock.last_outcome END,
                recorded_failures = recorded_failures + CASE WHEN {dead} THEN 1 ELSE 0 END,
                failures = failures
                    + CASE WHEN {dead} AND {IS_FIRST_FAILURE} THEN 1 ELSE 0 END,
                failed_at = CASE WHEN {dead} THEN lock.locked_until ELSE failed_at END,
                error_type = CASE WHEN {dead} THEN NULL ELSE error_type END
            FROM dead
            WHERE lock.task_name = dead.task_name AND claim_id = %(claim_id)s
              AND finished_at IS NULL AND locked_until <= now() AND ({dead}) = died AND {SAFELY}
            RETURNING lock.task_name, token, window_start, started_at, locked_by, kind, attempt,
                      recorded_failures, last_outcome, dead.ended_at, dead.died
        ){f", entry AS ({entry})" if entry else ""}
        SELECT {closed_run("run", "CASE WHEN run.died THEN run.last_outcome END", "run.ended_at")}
               AS closed
        FROM closed AS run
    """
