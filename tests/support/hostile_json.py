"""Random JSON for the rows of jobs: stored values in which parts were overwritten."""

from __future__ import annotations

import copy
import random
from datetime import datetime, timedelta, timezone
from typing import Any

BERLIN = "Europe/Berlin"
MOMENT = "2026-01-01T00:00:00+00:00"
TRIGGERS: list[dict[str, Any]] = [
    {
        "type": "cron",
        "fields": {"hour": "3", "minute": "*/7", "day": "last sun"},
        "start_date": None,
        "end_date": None,
        "timezone": BERLIN,
        "jitter": None,
    },
    {
        "type": "interval",
        "length": [0, 3600, 5],
        "start_date": MOMENT,
        "end_date": None,
        "timezone": "UTC",
        "jitter": 3,
    },
    {"type": "date", "run_date": MOMENT, "timezone": "-10800000000"},
    {
        "type": "calendarinterval",
        "length": [0, 1, 0, 2],
        "time": [2, 30, 0],
        "start_date": "2026-01-31",
        "end_date": None,
        "timezone": BERLIN,
        "jitter": None,
    },
]
OPTIONS = {"name": "job", "misfire_grace_time": 60, "coalesce": True, "max_instances": 1}
VALUES: list[Any] = [
    None,
    True,
    1.5,
    "text",
    ["list", 1],
    {"key": [1]},
    {"$": "dict", "value": {"$": "x"}},
    {"$": "float", "value": "1e+20"},
    {"$": "datetime", "value": "2026-01-01T00:00:00", "zone": BERLIN, "fold": 1},
    {"$": "time", "value": "10:00:00+01:00"},
    {"$": "date", "value": "2026-01-01"},
    {"$": "timedelta", "value": [1, 2, 3]},
    {"$": "UUID", "value": "00000000-0000-0000-0000-000000000001"},
    {"$": "Decimal", "value": "1.50"},
]
# Values that overwrite parts.
NASTY: list[Any] = [
    *VALUES,
    *("Europe", "x" * 300, "../etc/passwd", "", "9" * 30, "posixrules", "Zulu", "$", "-1", "0"),
    *("9999-12-31", "0001-01-01", "9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+14:00"),
    *("yesterday", "2026-01-01", "nan", "-inf", "1e999", "*", "*/0", "53", "29", "31", "last", "2"),
    *("1-31", "5th mon", "last sat", "2050", "9999", "0-59", ",", " " * 900, "*," * 499 + "*"),
    *(-1, 0, 1, 2, 53, 100, 8000, 36500, 10**6, 10**9, 10**18, 10**400, -(10**18)),
    *(0.1, -0.5, 1e-9, 1e300, float("inf"), float("nan"), False, [], {}, [[]], {"$": None}),
]
KEYS = [
    *("type", "fields", "length", "time", "start_date", "end_date", "timezone", "jitter", "pytz"),
    *("run_date", "triggers", "$", "value", "zone", "fold", "year", "month", "day", "week"),
    *("day_of_week", "second", "name", "coalesce", "args", "kwargs", "pickle", "task_lock"),
]
FIELDS = ["year", "month", "day", "week", "day_of_week", "hour", "minute", "second"]
FIELD_VALUES = ["*", "2", "29", "30", "31", "*/7", "1-31", "53", "last", "last sun", "mon", "2030"]


def hostile_trigger(rng: random.Random, depth: int = 0) -> Any:
    """Return a trigger, mostly with an overwritten part."""
    if depth < 12 and rng.random() < 0.35:
        kind = rng.choice(["and", "or"])
        count = rng.choice([0, 1, 2, 2, 3, 60]) if depth < 2 else rng.choice([1, 1, 2])
        parts = [hostile_trigger(rng, depth + 1) for _ in range(count)]
        data: Any = {"type": kind, "triggers": parts, "jitter": None}
    else:
        data = copy.deepcopy(rng.choice(TRIGGERS))
        if data["type"] == "cron" and rng.random() < 0.7:
            fields = rng.sample(FIELDS, rng.randrange(1, 9))
            data["fields"] = {name: rng.choice(FIELD_VALUES) for name in fields}
    return mutated(rng, data) if rng.random() < 0.4 else data


def hostile_value(rng: random.Random, depth: int = 0) -> Any:
    """Return a value of a job's arguments, mostly with an overwritten part."""
    if rng.random() < 0.3:
        return copy.deepcopy(rng.choice(NASTY))
    data = copy.deepcopy(rng.choice(VALUES))
    if depth < 60 and rng.random() < 0.6:
        inner = hostile_value(rng, depth + 1)
        data = rng.choice([[inner], {"a": inner}, {"$": "dict", "value": {"a": inner}}])
    return mutated(rng, data) if rng.random() < 0.3 else data


def hostile_columns(rng: random.Random) -> dict[str, Any]:
    """Return the JSON columns of a job's row."""
    arguments = {
        "args": [hostile_value(rng) for _ in range(rng.randrange(3))],
        "kwargs": {rng.choice(KEYS): hostile_value(rng) for _ in range(rng.randrange(2))},
    }
    options: Any = copy.deepcopy(OPTIONS)
    return {
        "trigger": hostile_trigger(rng),
        "options": mutated(rng, options) if rng.random() < 0.3 else options,
        "arguments": mutated(rng, arguments) if rng.random() < 0.2 else arguments,
    }


def mutated(rng: random.Random, data: Any) -> Any:
    """Return JSON in which a part is overwritten, removed or added."""
    if not isinstance(data, (dict, list)) or not data or rng.random() < 0.05:
        return copy.deepcopy(rng.choice(NASTY))
    key: Any = rng.choice(list(data)) if isinstance(data, dict) else rng.randrange(len(data))
    choice = rng.random()
    if choice < 0.1:
        del data[key]
    elif choice < 0.2 and isinstance(data, dict):
        data[rng.choice(KEYS)] = copy.deepcopy(rng.choice(NASTY))
    else:
        data[key] = mutated(rng, data[key])
    return data


def random_moment(rng: random.Random) -> datetime:
    """Return a time in the next years, or far from now."""
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    days = rng.choice([rng.randrange(2000), rng.randrange(-20_000, 2_900_000)])
    return start + timedelta(days=days, seconds=rng.randrange(86_400))
