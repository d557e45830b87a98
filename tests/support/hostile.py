"""Hostile rows: rows that no replica writes, but somebody who can write the tables can.

This is a table of cases. Each case changes one good row, whose name is the case's name, so that a
test can check whether a reader reports it. The tests run each case against every reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import DateTime

from apscheduler_tasklock.schema.table import (
    LARGEST_DEFINITION,
    LARGEST_VALUE,
    LONGEST_TEXT,
    LONGEST_TEXTS,
    tables_of,
    task_lock_table,
)
from tests.support import rows

Connection = psycopg.Connection[Any]

TASKS, RUNS = "task_lock", "task_lock_run"
REPLICAS, JOBS = "task_lock_replica", "task_lock_job"

# The column with the name of a row, by table.
KEYS = {TASKS: "task_name", RUNS: "task_name", REPLICAS: "replica_id", JOBS: "id"}

# The rows beside the hostile ones, by table.
GOOD = {TASKS: "good task", RUNS: "good task", REPLICAS: "good replica", JOBS: "good job"}

# The limits of times in the tables. PostgreSQL's arithmetic with them leaves Python's range.
EXTREME_TIMES = ("0001-01-02Z", "9999-12-30Z")

# Times that the tables reject, because Python lacks them in some time zone. The first and the last
# are PostgreSQL's own limits, at which its arithmetic fails, too.
NO_TIMES = (
    "4714-11-24 00:00:00+00 BC",
    "0044-03-15 BC",
    "0001-01-01 23:59:59Z",
    "9999-12-30 00:00:01Z",
    "20000-01-01",
    "294276-12-31 23:59:59+00",
    "-infinity",
    "infinity",
)


def _paused(**pause: str) -> str:
    """Return the SET clause of a task with one pause; the arguments are SQL."""
    return ", ".join(f"{column} = {value}" for column, value in rows.paused(**pause).items())


@dataclass(frozen=True)
class Hostile:
    """A hostile row.

    :ivar name: the name of the case, and of the row unless the changes set another one
    :ivar table: the row's table
    :ivar changes: the SET clause of the UPDATE of a good row
    :ivar unreadable: whether readers must report the row as unreadable; other rows are merely odd
    :ivar named: the name that the changes set, as SQL, or ``None``
    """

    name: str
    table: str
    changes: str
    unreadable: bool = False
    named: str | None = None

    def insert(self, connection: Connection) -> str:
        """Insert the row, and return its name."""
        _insert(connection, self.table, self.name)
        set_, key = self.changes, KEYS[self.table]
        if self.named is not None:
            set_ = f"{key} = {self.named}" + (f", {set_}" if set_ else "")
        which = f"{key} = {literal(self.name)}"
        query = f"UPDATE {self.table} SET {set_} WHERE {which} RETURNING {key}"
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return str(row[0])

    def __str__(self) -> str:
        return f"{self.table}: {self.name}"


def insert_good(connection: Connection) -> None:
    """Insert a good row into each table."""
    for table, name in GOOD.items():
        _insert(connection, table, name)


def _insert(connection: Connection, table: str, name: str) -> None:
    if table == TASKS:
        rows.add_task(connection, name)
    elif table == RUNS:
        rows.add_run(connection, name, 1)
    elif table == REPLICAS:
        rows.add_replica(connection, name, [GOOD[TASKS]])
    else:
        rows.add_job(connection, name)


def literal(value: str) -> str:
    return sql.Literal(value).as_string(None)


def _times() -> Iterable[Hostile]:
    """Yield each time column with each extreme time."""
    for table in tables_of(task_lock_table()):
        for column in table.columns:
            for time in EXTREME_TIMES if isinstance(column.type, DateTime) else ():
                name = column.name
                yield Hostile(f"{name} {time}", table.name, f"{name} = '{time}'")


def nested(levels: int, kind: str = "or", parts: str = "parts") -> str:
    """Return a combined trigger as JSON, so many levels deep."""
    leaf = '{"type": "date", "run": null}'
    return f'{{"type": "{kind}", "{parts}": [' * levels + leaf + "]}" * levels


_BRACKETS = "[" * 5000 + "]" * 5000
_CONTROLS = "E'\\x1b[2J\\x1b]0;owned\\x07\\r\\n\\x7f\\u202e\\u0085'"
# Values of nearly the largest sizes that the tables accept.
_LARGE = f"repeat('x', {LARGEST_DEFINITION - 100_000})"
_LONG = f"repeat('x', {LONGEST_TEXT})"
_LONGEST = f"repeat('x', {LARGEST_VALUE})"
_ERROR, _TRACEBACK = LONGEST_TEXTS["error"], LONGEST_TEXTS["traceback"]

# Schedules that Python cannot read, or that are nested too deeply for it.
_BAD_SCHEDULES = {
    "is no JSON": "every day",
    "is empty": "",
    "is cut off": '{"type": "interval", "length": [0,',
    "has 5,000 brackets": _BRACKETS,
    "is nested 300 levels deep": nested(300),
    "is nested 100 levels deep": nested(100),
    "has a number of 5,000 digits": "9" * 5000,
    "is not a number": "NaN",
    "has an infinite number": '{"type": "interval", "length": [0, 1e999, 0]}',
}
# Schedules that are valid JSON but no schedules.
_ODD_SCHEDULES = {
    "is a number": "5",
    "is null": "null",
    "is a list": "[1, 2]",
    "is a text": '"every day"',
    "is an empty object": "{}",
    "has an unknown type": '{"type": "moon", "phase": "full"}',
    "has a type that is a list": '{"type": []}',
    "has a class that is a number": '{"class": 5}',
    "has a length that is a text": '{"type": "interval", "length": "x"}',
    "has a huge length": '{"type": "interval", "length": [1' + "0" * 400 + ", 0, 0]}",
    "has a long length": '{"type": "interval", "length": [1e308, 1e308, 0]}',
    "has a jitter that is a text": '{"type": "interval", "length": [0, 300, 0], "jitter": "x"}',
    "has fields that are a list": '{"type": "cron", "fields": [1]}',
    "has an impossible zone": '{"type": "cron", "fields": {}, "zone": "' + "9" * 30 + '"}',
    "has a zone that is a list": '{"type": "cron", "fields": {}, "zone": []}',
    "has parts that are null": '{"type": "or", "parts": null}',
    "has control characters": json.dumps({"type": "interval\x1b[2J\u202e\n"}),
    "has a time that is a number": '{"type": "calendarinterval", "length": [1], "time": 5}',
    "has half a character": '{"type": "\\ud800"}',
}


def _tasks() -> Iterable[Hostile]:
    for name, text in _BAD_SCHEDULES.items():
        yield Hostile(f"schedule {name}", TASKS, f"schedule = {literal(text)}", unreadable=True)
    for name, text in _ODD_SCHEDULES.items():
        yield Hostile(f"schedule {name}", TASKS, f"schedule = {literal(text)}")
    long = f"schedule = '\"' || repeat('x', {LONGEST_TEXT - 2}) || '\"'"
    yield Hostile("schedule as long as it may be", TASKS, long)
    for name, pauses in {
        "in no list": '{"by": "me"}',
        "by a list": '[{"by": ["me"], "since": 1}]',
        "since a text": '[{"by": "me", "since": "now"}]',
        "until no year": '[{"by": "me", "since": 1, "until": 1e30}]',
        "for a number": '[{"by": "me", "since": 1, "why": 7}]',
    }.items():
        changes = f"pauses = '{pauses}', paused_at = now()"
        yield Hostile(f"paused {name}", TASKS, changes, unreadable=True)
    running = "finished_at = NULL, locked_until = now() + interval '1 min'"
    for name, changes in {
        "failures -1": "failures = -1",
        "failures huge": "failures = 2147483647",
        "token negative": "token = -9223372036854775808",
        "token huge": "token = 9223372036854775807",
        "recorded negative": "recorded = -9223372036854775808",
        "recorded huge": ", ".join(
            f"{column} = 9223372036854775807"
            for column in (
                "recorded",
                "recorded_failures",
                "recorded_actions",
                "recorded_misses",
            )
        ),
        "deaths huge, dead": "deaths = 2147483647, finished_at = NULL, failover = true",
        "deaths negative": "deaths = -2147483648",
        "handovers huge": "handovers = 2147483647, handed_over = true, finished_at = NULL",
        "kind unknown": "kind = 'magic'",
        "kind null": "kind = NULL",
        "kind as long as it may be": f"kind = {_LONG}",
        "outcome unknown": "last_outcome = 'exploded'",
        "outcome with control characters": f"last_outcome = {_CONTROLS}",
        "runs as long as it may be": f"runs = {_LONG}",
        "holder as long as it may be": f"locked_by = {_LONG}",
        "holder with control characters": f"locked_by = {_CONTROLS}",
        "holder empty, running": f"locked_by = '', {running}",
        "error type as long as it may be": f"error_type = {_LONG}, failures = 1",
        "error type with control characters": f"error_type = {_CONTROLS}, failures = 1",
        "paused for a reason of 1 MB": _paused(reason=f"right({_LONGEST}, 990000)"),
        "details of 1 MB": f"details = '\"' || right({_LONGEST}, 999998) || '\"'",
        "paused by control characters": _paused(by=_CONTROLS),
        "paused by 30,000 operators": """paused_at = now(), pauses = (
            SELECT jsonb_agg(jsonb_build_object('by', '', 'since', 1))
            FROM generate_series(1, 30000))""",
        "paused until, since nobody knows": "paused_until = now() + interval '1 h'",
        "paused after its end": "paused_at = now() + interval '1 h', paused_until = now()",
        "requested by a text as long as it may be": f"""requested_by = {_LONG},
            request_until = now() + interval '1 h'""",
        "requested without an id": "request_until = now() + interval '1 h'",
        "overdue without being due": "due_at = NULL, overdue_at = now() - interval '1 h'",
        "due without being overdue": "due_at = now() - interval '1 h', overdue_at = NULL",
        "overdue before it is due": "due_at = now(), overdue_at = now() - interval '1000 years'",
        "no schedule": "schedule = NULL, kind = NULL, due_at = NULL, overdue_at = NULL",
        "running, overrun long ago": f"overrun_at = '0001-01-03', {running}",
        "finished before it began": "finished_at = started_at - interval '100 years'",
        "everything null": """kind = NULL, schedule = NULL, due_at = NULL, overdue_at = NULL,
            finished_at = NULL, succeeded_at = NULL, failed_at = NULL, overrun_at = NULL""",
        "due long ago, overdue at last": "due_at = '0001-01-02Z', overdue_at = '9999-12-30Z'",
        "due in a pause, after the end of which it is due in no year": """paused_at = '0001-01-02Z',
            paused_until = '0001-01-04Z', due_at = '0001-01-03Z', window_start = '9999-12-30Z'""",
        "due in a pause, after the end of which it is overdue in no year": """overdue_at =
            '9999-12-30Z', paused_at = now() - interval '3 h', due_at = now() - interval '2 h',
            paused_until = now() - interval '1 h', window_start = '0001-01-02Z'""",
        "the last and due": "due_at = now() - interval '1 h', is_last = true",
    }.items():
        yield Hostile(name, TASKS, changes)
    for name, named in {
        "name empty": "''",
        "name of spaces": "'  a  b  '",
        "name with control characters": _CONTROLS,
        "name with a newline": "E'two\\nlines'",
        "name with wildcards": "E'100%_\\\\*?'",
        "name with quotes": "E'it''s \"quoted\" | {} <b>&amp;</b> [red]'",
        "name as long as it may be": _LONG,
    }.items():
        yield Hostile(name, TASKS, "", named=named)


def _runs() -> Iterable[Hostile]:
    for name, changes in {
        "run's outcome unknown": "outcome = 'exploded'",
        "run's outcome empty": "outcome = ''",
        "run's kind with control characters": f"kind = {_CONTROLS}",
        "run's error as long as it may be": f"error = left({_LONG}, {_ERROR}), outcome = 'error'",
        "run's error with control characters": f"error = {_CONTROLS}, error_type = {_CONTROLS}",
        "run's traceback as long as it may be": f"traceback = left({_LONG}, {_TRACEBACK})",
        "run's traceback with control characters": f"traceback = {_CONTROLS}",
        "run's replica as long as it may be": f"replica = {_LONG}",
        "run's replica is a worker of nobody": "replica = ' worker '",
        "run's slot negative": "slot = -2147483648",
        "run's ring unknown": "ring = 'wedding'",
        "run without a token": "token = NULL",
        "operator with control characters": f"kind = 'operator', by = {_CONTROLS}, "
        f"reason = {_CONTROLS}, until = '9900-01-01', token = NULL, outcome = 'paused'",
        "operator's outcome unknown": "kind = 'operator', outcome = 'exploded', by = NULL",
        "run's token huge": "token = 9223372036854775807",
        "run ended before it began": "ended_at = started_at - interval '100 years'",
        "run died in the future": "ended_at = now() + interval '1000 years', outcome = 'died'",
        "run took 9,000 years": "started_at = '0900-01-01', ended_at = '9900-01-01'",
    }.items():
        yield Hostile(name, RUNS, changes)


def _running(entry: object) -> str:
    return f"running = {literal(json.dumps([entry]))}"


def _replicas() -> Iterable[Hostile]:
    run = {"task": GOOD[TASKS], "token": 3, "since": 1767225600.5, "lost": True}
    for name, changes in {
        "runs an object": "running = '{}'",
        "runs a number": "running = '5'",
        "runs null": "running = 'null'",
        "runs numbers": "running = '[5, null, \"x\", [], true]'",
        "runs 4,000 brackets": f"running = '{'[' * 4000}{']' * 4000}'",
        "runs something without a task": _running({**run, "task": None}),
        "runs something with a task that is an object": _running({**run, "task": {}}),
        "runs something with a token that is a text": _running({**run, "token": "x"}),
        "runs something with a huge token": _running({**run, "token": 10**30}),
        "runs something with a broken token": _running({**run, "token": 1.5}),
        "runs something since nobody knows": _running({**run, "since": None}),
        "runs something since no time": _running({**run, "since": "yesterday noon"}),
        "runs something since February 30": _running({**run, "since": "2026-02-30T00:00:00"}),
        "runs something since -infinity": _running({**run, "since": "-infinity"}),
        "runs something since year 20000": _running({**run, "since": "20000-01-01T00:00:00"}),
        "runs something since a list": _running({**run, "since": []}),
        "runs something since a number": _running({**run, "since": 1e300}),
        "runs something lost or not": _running({**run, "lost": "perhaps"}),
        "has a task that is null": "tasks = ARRAY[NULL, 'good task']",
        "has tasks in two dimensions": "tasks = '{{a, b}, {c, d}}'",
        "has a rejection that is null": "rejected = ARRAY[NULL]::text[]",
        "has rejections in two dimensions": "rejected = '{{a, b}, {c, d}}'",
    }.items():
        yield Hostile(name, REPLICAS, changes, unreadable=True)
    for name, changes in {
        "has tasks from 5 on": "tasks = '[5:6]={a, b}'",
        "has a task of 1 MB": f"tasks = ARRAY[{_LONGEST}]",
        "has 20,000 tasks": "tasks = (SELECT array_agg('t' || n) FROM generate_series(1, 20000) n)",
        "rejects without a reason": "rejected = ARRAY['', 'history']",
        "rejects 1 MB": f"rejected = ARRAY[{_LONGEST}]",
        "host as long as it may be": f"host = {_LONG}",
        "host with control characters": f"host = {_CONTROLS}",
        "version empty": "version = ''",
        "version with control characters": f"version = {_CONTROLS}",
    }.items():
        yield Hostile(name, REPLICAS, changes)
    yield Hostile("replica's name empty", REPLICAS, "", named="''")
    yield Hostile("replica's name with control characters", REPLICAS, "", named=_CONTROLS)


_INTERVAL = json.loads(rows.TRIGGER)


def _cron(second: int) -> dict[str, Any]:
    fields = {"second": str(second)}
    zone = {"start_date": None, "end_date": None, "timezone": "UTC", "jitter": None}
    return {"type": "cron", "fields": fields, **zone}


def _all_of(triggers: list[Any]) -> dict[str, Any]:
    return {"type": "and", "triggers": triggers, "jitter": None}


def _any_of(triggers: list[Any]) -> dict[str, Any]:
    return {"type": "or", "triggers": triggers, "jitter": None}


def _inside(kind: str, levels: int) -> dict[str, Any]:
    trigger = _INTERVAL
    for _ in range(levels):
        trigger = {"type": kind, "triggers": [trigger], "jitter": None}
    return trigger


def _argument(zone: Any) -> str:
    moment = {"$": "datetime", "value": "2026-01-01T00:00:00", "zone": zone}
    return f"arguments = {literal(json.dumps({'args': [moment], 'kwargs': {}}))}"


def _jobs() -> Iterable[Hostile]:
    for name, text in {
        "trigger has 4,000 brackets": "[" * 4000 + "]" * 4000,
        "trigger is nested 100 levels deep": nested(100, parts="triggers"),
        "trigger has a number of 5,000 digits": "9" * 5000,
    }.items():
        yield Hostile(name, JOBS, f"trigger = {literal(text)}", unreadable=True)
    for name, trigger in {
        "trigger is null": None,
        "trigger is a number": 5,
        "trigger is a list": [1],
        "trigger is a text": "x",
        "trigger is an empty object": {},
        "trigger has an unknown type": {"type": "moon"},
        "trigger has a type that is a list": {"type": []},
        "trigger has fields that are a number": {"type": "cron", "fields": 5},
        "trigger has an unknown field": {"type": "cron", "fields": {"eon": "1"}},
        "trigger has a jitter that is a text": {**_INTERVAL, "jitter": "x"},
        "trigger has a length of texts": {**_INTERVAL, "length": ["x", "y", "z"]},
        "trigger has a huge length": {**_INTERVAL, "length": [10**400, 0, 0]},
        "trigger has a negative length": {**_INTERVAL, "length": [0, -300, 0]},
        "trigger has an unknown zone": {**_INTERVAL, "timezone": "Mars/Olympus"},
        "trigger has a zone that is a list": {**_INTERVAL, "timezone": []},
        "trigger has a zone that is a folder": {**_INTERVAL, "timezone": "Europe"},
        "trigger has a zone of 300 characters": {**_INTERVAL, "timezone": "x" * 300},
        "trigger has a zone outside": {**_INTERVAL, "timezone": "../../etc/passwd"},
        "trigger is pickled": {"pickle": "gASVBQAAAAAAAACMAXiULg=="},
        "trigger starts in no year": {**_INTERVAL, "start_date": "20000-01-01"},
    }.items():
        yield Hostile(name, JOBS, f"trigger = {literal(json.dumps(trigger))}")
    for name, trigger in {
        "trigger is nested 20 levels deep": _inside("or", 20),
        "trigger never fires, and has 500 parts": _all_of([_cron(n % 60) for n in range(500)]),
        "trigger never fires, in 100 parts": _any_of(
            [_all_of([_cron(0), _cron(n % 59 + 1)]) for n in range(100)]
        ),
    }.items():
        changes = f"trigger = {literal(json.dumps(trigger))}"
        yield Hostile(name, JOBS, changes)
    for name, changes in {
        "options are null": "options = 'null'",
        "options are a list": "options = '[]'",
        "options are a number": "options = '5'",
        "options lack all": "options = '{}'",
        "options have a name that is a number": "options = options || '{\"name\": 5}'",
        "options have a name of 400 KB": "options = jsonb_set(options, '{name}', "
        f"to_jsonb({_LARGE}))",
        "options have 4,000 brackets": f"options = '{'[' * 4000}{']' * 4000}'",
        "options have a grace time that is a list": "options = options ||"
        " '{\"misfire_grace_time\": []}'",
        "arguments are null": "arguments = 'null'",
        "arguments have 4,000 brackets": f"arguments = '{'[' * 4000}{']' * 4000}'",
        "arguments have a number of 5,000 digits": f"arguments = '{'9' * 5000}'",
        "arguments of 400 KB": "arguments = jsonb_set(arguments, '{args}', "
        f"jsonb_build_array({_LARGE}))",
        "arguments with an unknown value": 'arguments = \'{"args": [{"$": "x"}], "kwargs": {}}\'',
        "argument in a zone that is a folder": _argument("Europe"),
        "argument in a zone of 300 characters": _argument("x" * 300),
        "argument in a zone that is a list": _argument([]),
        "function empty": "func = ''",
        "function without a module": "func = ':'",
        "function of the system": "func = 'os:system'",
        "function with control characters": f"func = {_CONTROLS}",
        "executor empty": "executor = ''",
        "executor with control characters": f"executor = {_CONTROLS}",
        "signature of 1 MB": f"signature = {_LONGEST}",
        "version huge": "version = 9223372036854775807",
        "version negative": "version = -1",
        "ended though due": "ended = true, next_run_time = now()",
        "task of another": f"task_name = '{GOOD[TASKS]}'",
        "task of 1 MB": f"task_name = {_LONGEST}",
        "due first of all": "next_run_time = '0001-01-02Z'",
        "due last of all": "next_run_time = '9999-12-30Z'",
        "changed first of all, and due": "next_run_time = now(), changed_at = '0001-01-02Z'",
        "changed last of all, and due": "next_run_time = now(), changed_at = '9999-12-30Z'",
    }.items():
        yield Hostile(name, JOBS, changes)
    yield Hostile("function of 1 MB", JOBS, f"func = {_LONGEST}")
    yield Hostile("job's name empty", JOBS, "", named="''")
    yield Hostile("job's name with control characters", JOBS, "", named=_CONTROLS)
    yield Hostile("job's name of 200 KB", JOBS, "", named=f"left({_LONGEST}, 200000)")


CASES: Sequence[Hostile] = (*_times(), *_tasks(), *_runs(), *_replicas(), *_jobs())


def of(*tables: str) -> list[Hostile]:
    """Return the cases of some tables, or of all."""
    return [case for case in CASES if not tables or case.table in tables]
