"""Rows as Python can read them, whatever somebody has written into their columns.

PostgreSQL has JSON and numbers that Python has not. Operators' reads go through these: one such
value makes its own row unreadable, and the others are told. Times that Python lacks are in no row:
see ``schema/table.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import isfinite
from typing import Any

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
