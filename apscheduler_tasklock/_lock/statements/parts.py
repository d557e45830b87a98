"""Conditions and parameters that several statements have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

# What a task's times say that has never run.
NEVER = "timestamptz 'epoch'"

# For so long at least something is waited for that is found by the replicas' polls: two intervals.
SHORTEST_WAIT = "interval '10 seconds'"

# Point 1 of the decision: nobody is running the task. A run that never finished counts until its
# lease has ended.
NOT_RUNNING = "(lock.finished_at IS NOT NULL OR lock.locked_until <= now())"

# A claim that its holder may go on with: also after its lease, as long as nobody has taken it over.
STANDS = "(lock.finished_at IS NULL AND NOT lock.handed_over AND lock.run_until > now())"

# The schedule of the last claim's window: replicas may have told another one since.
WINDOW_SCHEDULE = "COALESCE(lock.window_schedule, lock.schedule)"

# A release that opens the window again puts its end this far before its start: early enough for
# every run time of the same window, whose `fired` differ by the clocks' noise, and too late for one
# of the window before. It is half the window, or a second, whichever is shorter.
JUST_BEFORE = """GREATEST(interval '1 microsecond', LEAST(interval '1 second',
    (lock.window_until - lock.window_start) / 2::float8))"""

# What the server crashes on must not be a claim that was answered: its token would be given to
# somebody else. It holds for this statement's transaction only. True, and asked last.
DURABLY = """CASE WHEN current_setting('synchronous_commit') = 'off'
    THEN set_config('synchronous_commit', 'local', true) IS NOT NULL ELSE true END"""

# A row that somebody has locked is not waited for for long, in none of the tables, because others
# want the connection. It holds for this statement's transaction only. True, and asked last.
BRIEFLY = "set_config('lock_timeout', %(lock_timeout)s, true) IS NOT NULL"

SAFELY = f"({DURABLY} AND {BRIEFLY})"

# A claim that was held up on its way is not granted when nobody waits for it any more. Each answer
# has the database's time, so that a claim with a wrong `not_after` is sent again.
IS_WANTED = "COALESCE(now() <= %(not_after)s::timestamptz, true)"

# What a job's row says once its run time is run, missed or changed.
HANDED_OUT_TO_NOBODY = (
    "handed_id = NULL, handed_to = NULL, handed_until = NULL, first_handed_at = NULL"
)

# Nobody is granted a paused task; and no run time of a pause is made up for after it. A pause
# without an end lasts until somebody resumes the task.
IS_PAUSED = "COALESCE(lock.paused_until > now(), lock.paused_at IS NOT NULL)"

# A due time in a pause is void: nobody makes up for it. One from before it is not.
DUE_IN_PAUSE = """COALESCE(lock.due_at >= lock.paused_at
    AND (lock.paused_until IS NULL OR lock.due_at < lock.paused_until), false)"""

# The claim that is made here follows a run whose holder died.
FOLLOWS_DEATH = "lock.finished_at IS NULL AND NOT lock.handed_over"
# A run that its living holder renewed up to its maximum lock has overrun: a failure, but no death.
ENDED_UNSEEN = "CASE WHEN lock.overran THEN 'overran' ELSE 'died' END"
NOTES_DEATH = f"""
    deaths = lock.deaths + CASE WHEN {FOLLOWS_DEATH} AND NOT lock.overran THEN 1 ELSE 0 END,
    last_outcome = CASE WHEN {FOLLOWS_DEATH} THEN {ENDED_UNSEEN} END,
    overran = false,
    recorded = lock.recorded + CASE WHEN {FOLLOWS_DEATH} THEN 1 ELSE 0 END,
    failures = lock.failures + CASE WHEN {FOLLOWS_DEATH} THEN 1 ELSE 0 END,
    failed_at = CASE WHEN {FOLLOWS_DEATH} THEN lock.locked_until ELSE lock.failed_at END,
    error_type = CASE WHEN {FOLLOWS_DEATH} THEN NULL ELSE lock.error_type END
"""


def due_after(asked: Mapping[str, str], since: str) -> str:
    """Return when the next run time is due; null if none follows, or nobody knows."""
    following = f"{since} + {asked['next_in']} * interval '1 second'"
    return f"CASE WHEN NOT {asked['is_last']} THEN {following} END"


def asked_parameters(types: Mapping[str, str]) -> dict[str, str]:
    """Return what is asked for as parameters of a statement."""
    return {name: f"%({name})s::{type_}" for name, type_ in types.items()}


def asked_columns(types: Mapping[str, str]) -> dict[str, str]:
    """Return what is asked for as columns of ``asked``."""
    return {name: f"asked.{name}" for name in types}


def json_rows(types: Mapping[str, str]) -> str:
    """Return the rows that the parameter of :func:`many` holds."""
    columns = ", ".join(f"{name} {type_}" for name, type_ in types.items())
    return f"json_to_recordset(%(many)s::json) AS request ({columns})"


def many(requests: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """Return the parameter of a statement for many from the parameters of the single requests.

    It is one JSON document, with an object for each request: psycopg takes far longer to send an
    array for each column. Characters are not escaped, since a database in another encoding
    than UTF-8 may not take the escapes.
    """
    return {"many": json.dumps(list(requests), default=str, ensure_ascii=False)}


# The columns of a row that is inserted.
ROW_COLUMNS = """task_name, started_at, locked_until, run_until, window_start, window_until,
                 locked_by, claim_id, token, deaths, handovers, handed_over, failover, runs,
                 one_off, kind, schedule, due_at, is_last, overdue_at, overrun_at, schedule_since"""
