"""Rows as replicas write them, and what is read of them, for tests of their readers.

The values of rows are SQL expressions. What is read of rows are dataclasses, for readers that are
functions of rows and a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
from psycopg import sql

from apscheduler_tasklock.status import (
    JobState,
    JobStatus,
    Pause,
    PauseChange,
    ReplicaState,
    ReplicaStatus,
    Run,
    TaskState,
    TaskStatus,
)

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
# Such a row is judged alike at each time of a test, however slow the machine is.
STAYS_OK = {"due_at": "now() + interval '4 h'", "overdue_at": "now() + interval '5 h'"}
STAYS_RUNNING = {**STAYS_OK, "finished_at": "NULL", "locked_until": "now() + interval '4 h'"}
STAYS_TOO_LONG = {**STAYS_RUNNING, "overrun_at": "now() - interval '1 s'"}
STAYS_ALIVE = {"seen_at": "now() + interval '4 h'"}
STAYS_LATE = {"due_at": "now() - interval '50 s'", "overdue_at": "now() + interval '4 h'"}
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
# An overrun whose holder was stopped since.
GIVEN_UP = {**OVERRUNS, "finished_at": "now() - interval '58 s'", "last_outcome": "'overran'"}
NO_NEXT = {"due_at": "NULL", "overdue_at": "NULL", "is_last": "true"}
MISSED = {
    "one_off": "true",
    "missed_at": "now() - interval '10 s'",
    "due_at": "NULL",
    "overdue_at": "NULL",
    "window_until": "now() - interval '50 s'",
}


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


def tasks_of(changes: Sequence[PauseChange]) -> list[str]:
    """Return the tasks that a pause or a resume was about."""
    return [change.task for change in changes]


def resumed(changes: Sequence[PauseChange]) -> list[str]:
    """Return the tasks that a resume has resumed."""
    return [change.task for change in changes if change.is_resumed]


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


# The time of the statuses below. Their times are told from then on, as `timedelta`.
NOW = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)

_EVERY_5_MIN = {
    "type": "interval",
    "length": [0, 300, 0],
    "start": None,
    "end": None,
    "jitter": 0.0,
}


def seconds(number: float) -> timedelta:
    """Return so many seconds from now on; before now, if they are below 0."""
    return timedelta(seconds=number)


# What the read of tasks returns of the row above.
_TASK_READ: dict[str, Any] = {
    "state": TaskState.OK,
    "schedule": _EVERY_5_MIN,
    "kind": "schedule",
    "token": 7,
    "holder": "one",
    "scheduled_at": seconds(-100),
    "started_at": seconds(-60),
    "finished_at": seconds(-58),
    "window_until": seconds(200),
    "locked_until": seconds(-58),
    "run_until": seconds(1200),
    "due_at": seconds(240),
    "overdue_at": seconds(300),
    "late_by": None,
    "took": 2.0,
    "outcome": None,
    "cut_for": None,
    "acknowledged": False,
    "stuck": (),
    "succeeded_at": seconds(-58),
    "failed_at": None,
    "failures": 0,
    "error_type": None,
    "paused": False,
    "paused_until": None,
    "pauses": (),
    "requested_by": None,
    "requested_at": None,
    "gone": False,
    "failover": False,
    "function": "job",
}

_RUN_READ: dict[str, Any] = {
    "task": "sync",
    "token": 1,
    "scheduled_at": seconds(-60),
    "started_at": seconds(-60),
    "ended_at": seconds(-58),
    "replica": "one",
    "kind": "schedule",
    "outcome": "ok",
    "error_type": None,
    "error": None,
}

_ACTION_READ: dict[str, Any] = {
    "token": None,
    "scheduled_at": None,
    "started_at": seconds(-3600),
    "ended_at": seconds(-3600),
    "replica": "",
    "kind": "operator",
    "outcome": "paused",
    "by": "ann@ops",
    "until": seconds(3600),
    "reason": "the shop is closed",
}

_MISS_READ: dict[str, Any] = {
    "token": None,
    "scheduled_at": seconds(-3600),
    "started_at": seconds(-3000),
    "ended_at": seconds(-3000),
    "outcome": "missed",
    "cause": "paused",
    "reason": "the task was paused",
    "run_times": 1,
}

_REPLICA_READ: dict[str, Any] = {
    "host": "host",
    "version": "1.0",
    "started_at": seconds(-3600),
    "seen_at": seconds(0),
    "state": ReplicaState.ALIVE,
    "tasks": (),
    "running": (),
}

_JOB_READ: dict[str, Any] = {
    "state": JobState.WAITING,
    "name": "note",
    "function": "tests.support.stored_jobs:note",
    "trigger": json.loads(TRIGGER),
    "executor": "default",
    "next_run_time": seconds(600),
    "last_run_time": None,
    "task": None,
    "holder": None,
    "task_paused": False,
    "task_paused_until": None,
    "argument_names": ("args[0]",),
}


def task_status(name: str = "sync", now: datetime = NOW, **changes: Any) -> TaskStatus:
    """Return a task as it is read from a row of :func:`add_task`.

    :param now: the time of the read. A ``timedelta`` stands for a time from then on
    """
    return TaskStatus(name=name, **_at(now, {**_TASK_READ, **changes}))


def run_read(now: datetime = NOW, **changes: Any) -> Run:
    """Return an entry of the history as it is read from a row of :func:`add_run`."""
    return Run(**_at(now, {**_RUN_READ, **changes}))


def action_read(now: datetime = NOW, **changes: Any) -> Run:
    """Return what an operator did, as it is read from a row of :func:`add_action`."""
    return run_read(now, **{**_ACTION_READ, **changes})


def miss_read(now: datetime = NOW, **changes: Any) -> Run:
    """Return a missed run time as it is read from a row of :func:`add_miss`."""
    at = changes.get("scheduled_at", _MISS_READ["scheduled_at"])
    return run_read(now, **{**_MISS_READ, "last_scheduled_at": at, **changes})


def replica_status(replica_id: str = "one", now: datetime = NOW, **changes: Any) -> ReplicaStatus:
    """Return a replica as it is read from a row of :func:`add_replica`."""
    return ReplicaStatus(replica_id, **_at(now, {**_REPLICA_READ, **changes}))


def job_status(job_id: str = "job", now: datetime = NOW, **changes: Any) -> JobStatus:
    """Return a stored job as it is read from a row of :func:`add_job`."""
    return JobStatus(job_id, **_at(now, {**_JOB_READ, **changes}))


def _at(now: datetime, values: dict[str, Any]) -> dict[str, Any]:
    return {name: _moved(now, value) for name, value in values.items()}


def _moved(now: datetime, value: Any) -> Any:
    if isinstance(value, timedelta):
        return now + value
    if isinstance(value, tuple):
        return tuple(_moved(now, each) for each in value)
    return replace(value, **_at(now, vars(value))) if is_dataclass(value) else value


# Rows by name, for tests of who reads them.
ROWS: dict[str, dict[str, str]] = {
    "ok": {},
    "new": NEW,
    "running": RUNNING,
    "holder silent": {**RUNNING, "locked_by": "'two'"},
    "dead": DEAD,
    "just dead": {**DEAD, "locked_until": "now() - interval '1 s'"},
    "barely late": BARELY_LATE,
    "late": LATE,
    "overdue": OVERDUE,
    "overdue, running": {**OVERDUE, **RUNNING},
    "overdue, dead": {**OVERDUE, **DEAD},
    "overdue, too long": {**OVERDUE, **TOO_LONG},
    "overdue, overruns": {**OVERDUE, **OVERRUNS},
    "failing": FAILING,
    "failing, running": {**FAILING, **RUNNING},
    "failing, barely late": {**FAILING, **BARELY_LATE},
    "failing, cancelled": {**CUT, **FAILING, "last_outcome": "'cancelled'"},
    "failing, paused": {**FAILING, **PAUSED},
    "failing, running, paused": {**FAILING, **RUNNING, **PAUSED},
    "retrying": RETRYING,
    "cut": CUT,
    "just cut": {**CUT, "finished_at": "now() - interval '40 s'"},
    "cut, running": {**CUT, **RUNNING},
    "cut, paused": {**CUT, **PAUSED},
    "handed over": HANDED_OVER,
    "just handed over": {**HANDED_OVER, "locked_until": "now() - interval '9 s'"},
    "too long": TOO_LONG,
    "too long, paused": {**TOO_LONG, **PAUSED},
    "overruns": OVERRUNS,
    "overran": OVERRAN,
    "died": DIED,
    "died, running": {**DIED, **RUNNING},
    "died, cut": {**DIED, "last_outcome": "'cut'"},
    "given up": GIVEN_UP,
    "freed": {"last_outcome": "'freed'"},
    "cancelled": {"last_outcome": "'cancelled'"},
    "missed": MISSED,
    "paused": PAUSED,
    "paused for a day": paused(until="now() + interval '1 day'"),
    "paused by nobody": {"paused_at": "now()"},
    "overdue, paused": {**OVERDUE, **PAUSED},
    "first by hand": FIRST_BY_HAND,
    "first by hand, running": {**FIRST_BY_HAND, **RUNNING, "last_outcome": "NULL"},
    "first by hand, dead": {**FIRST_BY_HAND, **DEAD, "last_outcome": "NULL"},
    "the last": NO_NEXT,
    "the last, cut": {**CUT, **NO_NEXT},
    "no due time": {"due_at": "NULL", "overdue_at": "NULL"},
    "a hold": {"kind": "'hold'", "runs": "''", "schedule": "NULL", "due_at": "NULL"},
    "window shortened": {"window_until": "now() - interval '100 s' - interval '1 us'"},
    "window of no time": {"window_until": "'epoch'"},
    "unreadable": {"schedule": "'no JSON'"},
}

_RUNS: dict[str, Any] = {
    "state": TaskState.RUNNING,
    "finished_at": None,
    "locked_until": seconds(60),
    "took": 60.0,
}
_IS_DEAD: dict[str, Any] = {"state": TaskState.DEAD, "finished_at": None, "outcome": "died"}
_IS_BARELY_LATE: dict[str, Any] = {
    "state": TaskState.LATE,
    "due_at": seconds(-10),
    "overdue_at": seconds(50),
    "late_by": 10.0,
}
_IS_OVERDUE: dict[str, Any] = {
    "state": TaskState.OVERDUE,
    "due_at": seconds(-95),
    "overdue_at": seconds(-35),
    "late_by": 95.0,
}
_WAS_OVERDUE: dict[str, Any] = {**_IS_OVERDUE, "late_by": None}
_HAS_FAILED: dict[str, Any] = {
    "failures": 3,
    "failure": "error",
    "error_type": "ValueError",
    "failed_at": seconds(0),
}
_IS_FAILING: dict[str, Any] = {"state": TaskState.FAILING, **_HAS_FAILED}
_HAS_DIED: dict[str, Any] = {"failures": 2, "failure": "died", "failed_at": seconds(0)}
_IS_CUT: dict[str, Any] = {
    "state": TaskState.CUT,
    "outcome": "cut",
    "cut_for": 58.0,
    "overdue_at": seconds(350),
    "succeeded_at": None,
}
_IS_HANDED_OVER: dict[str, Any] = {**_IS_CUT, "finished_at": None, "failover": True}
_RUNS_TOO_LONG: dict[str, Any] = {**_RUNS, "state": TaskState.TOO_LONG}
_OVERRUNS: dict[str, Any] = {
    "state": TaskState.TOO_LONG,
    "finished_at": None,
    "run_until": seconds(-58),
    "took": 60.0,
}
_HAS_NO_NEXT: dict[str, Any] = {"due_at": None, "overdue_at": None}
_PAUSE: Any = Pause("me@here", seconds(0), None, "closed")
_HAS_PAUSE: dict[str, Any] = {"paused": True, "pauses": (_PAUSE,)}
_IS_PAUSED: dict[str, Any] = {"state": TaskState.PAUSED, **_HAS_PAUSE, **_HAS_NO_NEXT}
_BY_HAND: dict[str, Any] = {"kind": "manual", "scheduled_at": None, "window_until": None}

# What is read of these rows; `test_reads_of_rows` holds the two together.
READ: dict[str, dict[str, Any]] = {
    "ok": {},
    "new": {
        "state": TaskState.NEW,
        "token": 0,
        **dict.fromkeys(("started_at", "finished_at", "took", "succeeded_at")),
    },
    "running": _RUNS,
    "holder silent": {**_RUNS, "state": TaskState.HOLDER_SILENT, "holder": "two"},
    "dead": _IS_DEAD,
    "just dead": {**_IS_DEAD, "locked_until": seconds(-1), "took": 59.0},
    "barely late": _IS_BARELY_LATE,
    "late": {
        **_IS_BARELY_LATE,
        "due_at": seconds(-50),
        "overdue_at": seconds(10),
        "late_by": 50.0,
    },
    "overdue": _IS_OVERDUE,
    "overdue, running": {**_WAS_OVERDUE, **_RUNS},
    "overdue, dead": {**_WAS_OVERDUE, **_IS_DEAD},
    "overdue, too long": {**_WAS_OVERDUE, **_RUNS_TOO_LONG},
    "overdue, overruns": {**_WAS_OVERDUE, **_OVERRUNS},
    "failing": _IS_FAILING,
    "failing, running": {**_HAS_FAILED, **_RUNS},
    "failing, barely late": {**_HAS_FAILED, **_IS_BARELY_LATE},
    "failing, cancelled": {
        **_IS_CUT,
        **_IS_FAILING,
        "outcome": "cancelled",
        "cut_for": None,
    },
    "failing, paused": {**_HAS_FAILED, **_IS_PAUSED},
    "failing, running, paused": {**_HAS_FAILED, **_RUNS, **_HAS_PAUSE, **_HAS_NO_NEXT},
    "retrying": {
        **_HAS_FAILED,
        "state": TaskState.RETRYING,
        "failures": 0,
        "failure": None,
        "outcome": "error",
        "attempt": 2,
        "retry_at": seconds(120),
    },
    "cut": _IS_CUT,
    "just cut": {**_IS_CUT, "finished_at": seconds(-40), "took": 20.0, "cut_for": 40.0},
    "cut, running": {**_IS_CUT, **_RUNS, "outcome": None, "cut_for": None},
    "cut, paused": {**_IS_CUT, **_IS_PAUSED},
    "handed over": _IS_HANDED_OVER,
    "just handed over": {
        **_IS_HANDED_OVER,
        "state": TaskState.OK,
        "locked_until": seconds(-9),
        "took": 51.0,
        "cut_for": None,
    },
    "too long": _RUNS_TOO_LONG,
    "too long, paused": {**_RUNS_TOO_LONG, **_HAS_PAUSE, **_HAS_NO_NEXT},
    "overruns": _OVERRUNS,
    "overran": {
        **_HAS_DIED,
        "state": TaskState.FAILING,
        "failures": 1,
        "failure": "overran",
        "outcome": "overran",
    },
    "died": {**_HAS_DIED, "state": TaskState.FAILING, "outcome": "died"},
    "died, running": {**_HAS_DIED, **_RUNS},
    "died, cut": {
        **_HAS_DIED,
        "state": TaskState.CUT,
        "failure": None,
        "outcome": "cut",
        "cut_for": 58.0,
    },
    "given up": {"run_until": seconds(-58), "outcome": "overran"},
    "freed": {"outcome": "freed"},
    "cancelled": {"outcome": "cancelled"},
    "missed": {
        "state": TaskState.MISSED,
        "window_until": seconds(-50),
        "missed_at": seconds(-10),
        **_HAS_NO_NEXT,
    },
    "paused": _IS_PAUSED,
    "paused for a day": {
        **_IS_PAUSED,
        "paused_until": seconds(86400),
        "pauses": (replace(_PAUSE, until=seconds(86400)),),
    },
    "paused by nobody": {**_IS_PAUSED, "pauses": ()},
    "overdue, paused": {**_WAS_OVERDUE, "state": TaskState.PAUSED, **_HAS_PAUSE},
    "first by hand": {**_BY_HAND, "outcome": "ok"},
    "first by hand, running": {**_BY_HAND, **_RUNS},
    "first by hand, dead": {**_BY_HAND, **_IS_DEAD},
    "the last": _HAS_NO_NEXT,
    "the last, cut": {**_IS_CUT, **_HAS_NO_NEXT},
    "no due time": _HAS_NO_NEXT,
    "a hold": {**_HAS_NO_NEXT, "kind": "hold", "function": None, "schedule": None},
    "window shortened": {"window_until": seconds(-100)},
    "window of no time": {"window_until": seconds(-100)},
    "unreadable": {
        "state": TaskState.UNREADABLE,
        "schedule": None,
        "unreadable": ("schedule",),
    },
}
