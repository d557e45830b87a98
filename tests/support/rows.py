"""Rows as replicas write them, for tests of their readers. Values are SQL expressions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

Connection = psycopg.Connection[Any]

# A job every 5 minutes, which ran for 2 s a minute ago, and is due in 4 minutes.
_TASK = {
    "started_at": "now() - interval '60 s'",
    "locked_until": "now() - interval '58 s'",
    "window_start": "now() - interval '100 s'",
    "window_until": "now() + interval '200 s'",
    "locked_by": "'one'",
    "claim_id": "gen_random_uuid()",
    "token": "7",
    "finished_at": "now() - interval '58 s'",
    "run_until": "now() + interval '20 min'",
    "failover": "false",
    "deaths": "0",
    "handovers": "0",
    "handed_over": "false",
    "runs": "'job'",
    "one_off": "false",
    "kind": "'schedule'",
    "schedule": """'{"end":null,"jitter":0.0,"length":[0,300,0],"start":null,"type":"interval"}'""",
    "due_at": "now() + interval '4 min'",
    "overdue_at": "now() + interval '5 min'",
    "succeeded_at": "now() - interval '58 s'",
}

_RUN = {
    "scheduled_at": "now() - interval '60 s'",
    "started_at": "now() - interval '60 s'",
    "ended_at": "now() - interval '58 s'",
    "replica": "'one'",
    "kind": "'schedule'",
    "outcome": "'ok'",
}

# The stored trigger of an hourly job.
TRIGGER = """{"type": "interval", "length": [0, 3600, 0], "start_date": "2026-01-01T00:00:00+00:00",
              "end_date": null, "timezone": "UTC", "jitter": null}"""

_JOB = {
    "func": "'tests.support.stored_jobs:note'",
    "trigger": f"'{TRIGGER}'::jsonb",
    "options": """'{"name": "note", "misfire_grace_time": 60, "coalesce": true,
                    "max_instances": 1}'::jsonb""",
    "executor": "'default'",
    "version": "1",
    "added_id": "gen_random_uuid()",
    "next_run_time": "now() + interval '10 min'",
    "ended": "false",
}

RUNNING = {"finished_at": "NULL", "locked_until": "now() + interval '1 min'"}
DEAD = {"finished_at": "NULL"}
LATE = {"due_at": "now() - interval '50 s'", "overdue_at": "now() + interval '10 s'"}
BARELY_LATE = {"due_at": "now() - interval '10 s'", "overdue_at": "now() + interval '50 s'"}
OVERDUE = {"due_at": "now() - interval '95 s'", "overdue_at": "now() - interval '35 s'"}
FAILING = {"failures": "3", "error_type": "'ValueError'", "failed_at": "now()"}
RETRYING = {
    **FAILING,
    "failures": "1",
    "last_outcome": "'error'",
    "attempt": "2",
    "claim_id": "'a7ed9d1c-5c5c-4a3e-8a67-2f2a2f1c7a11'",
    "retry_of": "'a7ed9d1c-5c5c-4a3e-8a67-2f2a2f1c7a11'",
    "retry_at": "now() + interval '2 min'",
}
CUT = {
    "last_outcome": "'cut'",
    "overdue_at": "now() + interval '5 min' + interval '50 s'",  # half of the grace time: 55 s
    "succeeded_at": "NULL",
}
HANDED_OVER = {**CUT, **DEAD, "handed_over": "true", "failover": "true"}
# A run whose live holder renewed it until its maximum lock ended.
OVERRUNS = {**DEAD, "overran": "true", "run_until": _TASK["locked_until"]}
FIRST_BY_HAND = {
    "kind": "'manual'",
    "window_start": "'epoch'",
    "window_until": "'epoch'",
    "last_outcome": "'ok'",
}
TOO_LONG = {**RUNNING, "overrun_at": "now() - interval '1 s'"}
OVERRAN = {"failures": "1", "failed_at": "now()", "last_outcome": "'overran'"}
DIED = {"failures": "2", "failed_at": "now()", "last_outcome": "'died'"}


def paused(
    by: str = "'me@here'", reason: str = "'closed'", until: str = "NULL::timestamptz"
) -> dict[str, str]:
    """Return the columns of a task with one pause; the arguments are SQL."""
    pause = f"""jsonb_build_object('id', gen_random_uuid(), 'by', {by}, 'why', {reason},
        'since', extract(epoch FROM now()), 'until', extract(epoch FROM {until}))"""
    return {
        "paused_at": "now()",
        "paused_until": until,
        "pauses": f"jsonb_build_array({pause})",
    }


PAUSED = paused()
NEW = {"token": "0", "started_at": "'epoch'", "finished_at": "'epoch'", "succeeded_at": "NULL"}


def add_task(connection: Connection, name: str, **changes: str) -> None:
    """Add a task's row."""
    _insert(connection, "task_lock", {"task_name": _literal(name), **_TASK, **changes})


def add_run(connection: Connection, task: str, token: int, **changes: str) -> None:
    """Add an entry of the run history."""
    ring = "'runs'" if changes.get("outcome", "'ok'") == "'ok'" else "'failures'"
    key = {"task_name": _literal(task), "ring": ring, "slot": str(token)}
    values = {**_RUN, **key, "token": str(token)}
    _insert(connection, "task_lock_run", {**values, **changes})


def add_action(connection: Connection, task: str, slot: int, **changes: str) -> None:
    """Add an entry of what an operator did: a pause an hour ago, for two hours."""
    values = {
        "task_name": _literal(task),
        "ring": "'actions'",
        "slot": str(slot),
        "started_at": "now() - interval '1 h'",
        "ended_at": "now() - interval '1 h'",
        "replica": "''",
        "kind": "'operator'",
        "outcome": "'paused'",
        "by": "'ann@ops'",
        "until": "now() + interval '1 h'",
        "reason": "'the shop is closed'",
    }
    _insert(connection, "task_lock_run", {**values, **changes})


def add_miss(connection: Connection, task: str, slot: int, **changes: str) -> None:
    """Add an entry of a missed run time: an hour ago, in a pause."""
    values = {
        "task_name": _literal(task),
        "ring": "'misses'",
        "slot": str(slot),
        "scheduled_at": "now() - interval '1 h'",
        "started_at": "now() - interval '50 min'",
        "ended_at": "now() - interval '50 min'",
        "replica": "'one'",
        "kind": "'schedule'",
        "outcome": "'missed'",
        "cause": "'paused'",
        "reason": "'the task was paused'",
        "last_scheduled_at": changes.get("scheduled_at", "now() - interval '1 h'"),
        "run_times": "1",
    }
    _insert(connection, "task_lock_run", {**values, **changes})


def add_replica(
    connection: Connection, replica_id: str, tasks: Sequence[str] = (), **changes: str
) -> None:
    """Add a replica with tasks."""
    values = {
        "replica_id": _literal(replica_id),
        "host": "'host'",
        "version": "'1.0'",
        "started_at": "now() - interval '1 h'",
        "seen_at": "now()",
        "tasks": f"ARRAY[{', '.join(map(_literal, tasks))}]::text[]",
    }
    _insert(connection, "task_lock_replica", {**values, **changes})


def add_job(connection: Connection, job_id: str, **changes: str) -> None:
    """Add a job of the job store, whose function notes its runs."""
    arguments = json.dumps({"args": [job_id], "kwargs": {}})
    values = {"id": _literal(job_id), **_JOB, "arguments": f"{_literal(arguments)}::jsonb"}
    _insert(connection, "task_lock_job", {**values, **changes})


def _insert(connection: Connection, table: str, values: dict[str, str]) -> None:
    columns = ", ".join(values)
    connection.execute(f"INSERT INTO {table} ({columns}) SELECT {', '.join(values.values())}")


def _literal(text: str) -> str:
    return sql.Literal(text).as_string(None)
