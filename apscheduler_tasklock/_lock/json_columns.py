"""JSON columns: how they are read, whatever values the rows have.

PostgreSQL's JSON can have values that Python cannot read. Such a value makes only its own row
unreadable, so operators still see all other rows. No row has a time that Python cannot read; see
``schema/table.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import isfinite
from typing import Any

# Limit the depth of JSON, and its characters. There is room for the details of a trigger of
# hundreds of parts, which have tens of thousands of characters.
_DEEPEST = 50
LONGEST_JSON = 200_000

# Whether a JSON value has the form of ``RunningRun.reported``. The types of its parts are checked
# first, because the cast of a part that is no number would fail.
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
# Whether a JSON value is a pause: by whom, since when, until when, and why. The times are seconds
# since 1970. Without ``until`` the pause lasts until an operator resumes the task.
IS_PAUSE = """
    (CASE WHEN jsonb_typeof(pause -> 'by'::text) = 'string'
               AND jsonb_typeof(pause -> 'since'::text) = 'number'
               AND COALESCE(jsonb_typeof(pause -> 'until'::text), 'null') IN ('number', 'null')
               AND COALESCE(jsonb_typeof(pause -> 'why'::text), 'null') IN ('string', 'null')
          THEN (pause ->> 'since'::text)::numeric BETWEEN '-62135510400'::numeric
                                                      AND '253402128000'::numeric
               AND COALESCE((pause ->> 'until'::text)::numeric, '0'::numeric)
                   BETWEEN '-62135510400'::numeric AND '253402128000'::numeric
          ELSE false END)
"""


def moment_of(value: str) -> str:
    """Return the SQL of the time of a JSON number of seconds since 1970; null for a null."""
    return f"to_timestamp(({value})::float8)"


def json_elements_of(column: str) -> str:
    """Return the FROM item with a row for each element of a JSON list; no row if it is no list."""
    return f"""jsonb_array_elements(
        CASE WHEN jsonb_typeof({column}) = 'array' THEN {column} ELSE '[]' END)"""


# The FROM item with the runs that a replica has reported.
REPORTED_RUNS = json_elements_of("running")


def read_json(text: str) -> Any:
    """Return the value of a JSON text.

    :raises ValueError: the text is no JSON, is too long or too deep, or has a number that Python
        cannot read
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


def canonical_json(value: Any) -> str:
    """Return a value as the JSON text that all replicas write of it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def strings_of(values: Iterable[Any]) -> tuple[str, ...]:
    """Return the texts of an array, which may also have nulls and further dimensions."""
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
