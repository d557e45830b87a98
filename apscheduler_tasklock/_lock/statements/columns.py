"""The columns of the answers to claims and takeovers, from the task's row."""

from __future__ import annotations

from collections.abc import Mapping

from apscheduler_tasklock._lock.statements.conditions import NEVER

# The columns that an UPDATE returns of a claimed row. The last two tell of a dead run that the
# claim follows.
RETURNED = """lock.task_name, lock.window_start AS new_start, lock.token AS new_token,
               lock.locked_until AS new_locked_until, lock.run_until AS new_run_until,
               lock.last_outcome AS new_outcome, lock.recorded_failures AS new_recorded"""


def closed_here(row: str) -> str:
    """Return whether the granted claim has closed a dead run, whose row was as ``row`` is.

    The row is as it was before the statement began. The claim has closed that run only if the run
    was still unfinished when the claim changed the row, because only then the claim has noted an
    outcome, and only if the claim followed this run. If another claim has followed it meanwhile,
    that claim has counted the run's entry, so that the counts differ by more than one.
    """
    return f"""claimed.new_outcome IS NOT NULL
               AND {row}.finished_at IS NULL AND NOT {row}.handed_over
               AND claimed.new_recorded - {row}.recorded_failures = 1"""


def closed_run(row: str, outcome: str, ended_at: str) -> str:
    """Return the values of a ``ClosedDeadRun`` as JSON."""
    return f"""pg_catalog.json_build_object(
        'outcome', {outcome}, 'token', {row}.token, 'holder', {row}.locked_by,
        'attempt', {row}.attempt,
        'run_time', extract(epoch FROM CASE WHEN {row}.kind IN ('hold', 'manual')
            THEN {row}.started_at ELSE {row}.window_start END)::float8,
        'took', extract(epoch FROM {ended_at} - {row}.started_at)::float8)"""


_CLOSED = closed_run("lock", "claimed.new_outcome", "lock.locked_until")
# The decision's columns in the answer to a granted claim.
DECIDED_GRANTED = {
    "granted": "true",
    "running": "true",
    "new_window": "false",
    "unfinished": "true",
    "waits": "false",
    "paused": "false",
    "came_first": "false",
}
# The decision's columns in an answer that looks free.
DECIDED_FREE = {
    **dict.fromkeys(DECIDED_GRANTED, "false"),
    "new_window": "true",
}
# The row's columns in an answer, as the statement found the row.
ROW_FOUND = {
    "window_start": "lock.window_start",
    "holder": "lock.locked_by",
    "token": "lock.token",
    "locked_until": "lock.locked_until",
    "run_until": "lock.run_until",
    "database_time": "now()",
    "claim_id": "lock.claim_id",
    "manual": "COALESCE(lock.kind, '') = 'manual'",
    "runs": "lock.runs",
    "due_at": "lock.due_at",
    "attempt": "lock.attempt",
    "closed": "NULL::json",
}
# The row's columns in an answer if the statement has inserted the row.
ROW_INSERTED = {**ROW_FOUND, "due_at": "NULL::timestamptz"}
# The row's columns in an answer if the statement found no row.
NO_ROW = {
    "window_start": NEVER,
    "holder": "''",
    "token": "0::bigint",
    "locked_until": NEVER,
    "run_until": NEVER,
    "database_time": "now()",
    "claim_id": "uuid '00000000-0000-0000-0000-000000000000'",
    "manual": "false",
    "runs": "''",
    "due_at": "NULL::timestamptz",
    "attempt": "1",
    "closed": "NULL::json",
}


def columns_made(claim_id: str) -> dict[str, str]:
    """Return the columns of the row as a granted claim made it."""
    return {
        "window_start": "claimed.new_start",
        "holder": "%(replica_id)s",
        "token": "claimed.new_token",
        "locked_until": "claimed.new_locked_until",
        "run_until": "claimed.new_run_until",
        "database_time": "now()",
        "claim_id": claim_id,
        "manual": "false",
        "runs": ROW_FOUND["runs"],  # the function of the run before the claim
        "due_at": ROW_FOUND["due_at"],  # as it was before the claim
        "attempt": "1",
        "closed": f"CASE WHEN {closed_here('lock')} THEN {_CLOSED} END",
    }


def select_list(columns: Mapping[str, str]) -> str:
    """Return the columns as a list for SELECT or RETURNING."""
    return ", ".join(f"{expression} AS {name}" for name, expression in columns.items())


def made_or_found(made: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Return an answer's columns: the row as a granted claim made it, else as it was found."""

    def either(name: str) -> str:
        if made[name] == found[name]:
            return found[name]
        if made[name] == "true":
            return f"claimed.new_token IS NOT NULL OR {found[name]}"
        if made[name] == "false":
            return f"claimed.new_token IS NULL AND {found[name]}"
        if made[name].startswith("claimed."):
            return f"COALESCE({made[name]}, {found[name]})"
        return f"CASE WHEN claimed.new_token IS NULL THEN {found[name]} ELSE {made[name]} END"

    return select_list({name: either(name) for name in found})


def made_or_missing(made: str, missing: Mapping[str, str]) -> str:
    """Return an answer's columns: the row as a granted claim inserted it, else ``missing``.

    :param made: the name of the query that inserted the rows
    :param missing: the columns of a row that was not inserted
    """
    return select_list({name: f"COALESCE({made}.{name}, {missing[name]})" for name in missing})
