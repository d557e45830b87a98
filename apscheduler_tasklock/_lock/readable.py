"""Rows as Python can read them, whatever somebody has written into their columns.

PostgreSQL has times, JSON and numbers that Python has not. Operators' reads go through these: one
such value makes its own row unreadable, and the others are told.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import isfinite
from typing import Any

from sqlalchemy import DateTime, Table

from apscheduler_tasklock._lock.statements import for_template

# Between these all times can be reckoned with, in each zone, here and in PostgreSQL.
EARLIEST = "timestamptz '0001-01-02Z'"
LATEST = "timestamptz '9999-12-30Z'"

# The columns that may have infinite times, and say something by them: no run follows, a pause
# lasts until somebody ends it, a window was opened by hand or has no end.
_INFINITE = {
    "due_at": ("infinity",),
    "overdue_at": ("infinity",),
    "paused_until": ("infinity",),
    "locked_until": ("infinity",),
    "window_until": ("infinity", "-infinity"),
}
# Of these, the ones that nothing is reckoned with while they are infinite.
_STAYS_INFINITE = set(_INFINITE) - {"overdue_at"}

# How deep JSON may be, and how many characters it may have. A trigger of hundreds of parts has
# tens of thousands.
_DEEPEST = 50
LONGEST_JSON = 200_000

# What a replica says of a run: as of ``RunningRun.reported``. Only then its values are cast.
IS_RUN = """
    (CASE WHEN jsonb_typeof(run -> 'task'::text) = 'string'
               AND jsonb_typeof(run -> 'lost'::text) = 'boolean'
               AND jsonb_typeof(run -> 'token'::text) = 'number'
               AND jsonb_typeof(run -> 'since'::text) = 'number'
          THEN (run ->> 'token'::text)::numeric BETWEEN '-9223372036854775808'::numeric
                                                    AND '9223372036854775807'::numeric
               AND (run ->> 'token'::text)::numeric = trunc((run ->> 'token'::text)::numeric)
               AND (run ->> 'since'::text)::numeric BETWEEN '0'::numeric
                                                        AND '253402128000'::numeric
          ELSE false END)
"""
# What a replica runs; nothing of one that does not tell it as a list.
RUNS_TOLD = """
    jsonb_array_elements(CASE WHEN jsonb_typeof(running) = 'array' THEN running ELSE '[]' END)
"""


def readable(table: Table) -> str:
    """Return a table for a FROM clause whose times are such as Python has.

    Others come as the nearest of these. A further column, ``unreadable``, has the names of the
    columns that have such times.
    """
    times = [column.name for column in table.columns if isinstance(column.type, DateTime)]
    columns = [
        f"{_nearest(column.name)} AS {column.name}" if column.name in times else column.name
        for column in table.columns
    ]
    columns.append(f"{unreadable(times)} AS unreadable")
    return f"(SELECT {', '.join(columns)} FROM {for_template(table)})"  # noqa: S608  # our own names


def unreadable(times: Iterable[str]) -> str:
    """Return an array of the names of those of these columns that have times which Python lacks."""
    odd = (
        f"CASE WHEN {_is_odd(name, _INFINITE.get(name, ()))} THEN '{name}' END" for name in times
    )
    return f"pg_catalog.array_remove(ARRAY[{', '.join(odd)}], NULL)"


def _nearest(name: str) -> str:
    stays = _INFINITE[name] if name in _STAYS_INFINITE else ()
    return f"""CASE WHEN NOT {_is_odd(name, stays)} THEN {name}
                    ELSE LEAST(GREATEST({name}, {EARLIEST}), {LATEST}) END"""


def _is_odd(name: str, allowed: Iterable[str]) -> str:
    """Return whether a time is none that Python has, and none that is allowed; false for null."""
    odd = " AND ".join(
        [f"{name} NOT BETWEEN {EARLIEST} AND {LATEST}", *(f"{name} <> '{a}'" for a in allowed)]
    )
    return f"COALESCE({odd}, false)"


def read_json(text: str) -> Any:
    """Return what a text of a row says in JSON.

    :raises ValueError: it is no JSON, or such that Python cannot read, write or go through it
    """
    if len(text) > LONGEST_JSON:
        raise ValueError(f"{len(text)} characters are too many")
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if text.count("[") + text.count("{") > _DEEPEST and _depth(value) > _DEEPEST:
        raise ValueError("it is nested too deeply")
    return value


def texts(values: Iterable[Any]) -> tuple[str, ...]:
    """Return those of an array's values that are texts: one can have nulls, and more dimensions."""
    return tuple(value for value in values if isinstance(value, str))


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if depth > _DEEPEST:
            break
    return depth


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if isfinite(number) else _no_number(digits)


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)
