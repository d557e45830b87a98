"""Values as JSON that come back as they were: the arguments of jobs.

What would come back different is rejected, with its place: a tuple would be a list, the key 1 the
key "1". Types that JSON does not have are objects with the key ``$``, which says the type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from apscheduler_tasklock.errors import TaskLockOptionError

# The key of an object that stands for a value of another type.
TYPE_KEY = "$"

# Containers nested deeper than this are rejected, such as a list that is in itself.
_DEEPEST = 50
# PostgreSQL's jsonb and Python both read integers of so many digits.
_MOST_DIGITS = 4000
_LARGEST_INTEGER = 10**_MOST_DIGITS


class UnstorableError(TaskLockOptionError):
    """A value cannot be stored, or would come back as another one; the message says where."""


class UnreadableError(TaskLockOptionError):
    """What is stored cannot be read: another version has written it, or somebody has changed it."""


def encode(value: Any, where: str) -> Any:
    """Return a value as JSON-like data.

    :param where: names it in messages, as in ``args[0]``
    :raises UnstorableError: it cannot be stored, or would come back different
    """
    return _encode(value, where, 0)


def decode(data: Any) -> Any:
    """Return the value that JSON-like data stands for.

    :raises UnreadableError: it stands for none
    """
    if isinstance(data, list):
        return [decode(part) for part in data]
    if not isinstance(data, dict):
        return data
    if TYPE_KEY not in data:
        return {key: decode(part) for key, part in data.items()}
    kind = data[TYPE_KEY]
    if not isinstance(kind, str) or kind not in _DECODERS:
        raise UnreadableError(f"it has a value of an unknown type, {kind!r}")
    try:
        return _DECODERS[kind](data)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UnreadableError(f"it has a {kind} that cannot be read: {data!r}") from error


def _encode(value: Any, where: str, depth: int) -> Any:
    # Types are compared exactly: an instance of a subclass would come back as one of its base.
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _text(value, where)
    if kind in _ENCODERS:
        return _ENCODERS[kind](value, where)
    if depth == _DEEPEST:
        raise UnstorableError(f"{where} is nested more than {_DEEPEST} deep, or in itself")
    if kind is list:
        return [_encode(part, f"{where}[{n}]", depth + 1) for n, part in enumerate(value)]
    if kind is dict:
        return _encode_dict(value, where, depth)
    raise UnstorableError(f"{where} cannot be stored: {_why(kind)}")


def _why(kind: type) -> str:
    if kind is tuple:
        return "a tuple would come back as a list; pass a list"
    if kind in (set, frozenset):
        return "JSON has no sets; pass a sorted list"
    if kind in (bytes, bytearray):
        return "JSON has no bytes; pass a text, as of base64"
    stored = (
        "None, bool, int, float, str, list, dict, datetime, date, time, timedelta, UUID, Decimal"
    )
    for base in (bool, int, float, str, list, dict, datetime, date, time, tuple):
        if issubclass(kind, base):
            return (
                f"a {kind.__module__}.{kind.__qualname__} would come back as a plain "
                f"{base.__name__}; pass {base.__name__}(...)"
            )
    return f"it is a {kind.__module__}.{kind.__qualname__}. What can be stored: {stored}"


def _encode_dict(value: dict[Any, Any], where: str, depth: int) -> Any:
    encoded = {}
    for key, part in value.items():
        if type(key) is not str:
            raise UnstorableError(
                f"{where} cannot be stored: its key {key!r} would come back as a text; keys of a "
                "dict must be texts"
            )
        encoded[_text(key, f"a key of {where}")] = _encode(part, f"{where}[{key!r}]", depth + 1)
    return {TYPE_KEY: "dict", "value": encoded} if TYPE_KEY in encoded else encoded


def _text(value: str, where: str) -> str:
    if "\0" in value:
        raise UnstorableError(f"{where} cannot be stored: PostgreSQL has no text with a NUL in it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UnstorableError(f"{where} cannot be stored: it has a lone surrogate") from None
    return value


def _integer(value: int, where: str) -> int:
    if abs(value) >= _LARGEST_INTEGER:
        raise UnstorableError(f"{where} cannot be stored: it has more than {_MOST_DIGITS} digits")
    return value


def _float(value: float, _where: str) -> Any:
    written = repr(value)
    # jsonb would make an integer of 1e+20, has no -0.0, and none of the last three.
    if "e" in written or not math.isfinite(value) or written == "-0.0":
        return {TYPE_KEY: "float", "value": written}
    return value


def _moment(value: datetime | time, where: str) -> Any:
    """Return a date with time, or a time, with its time zone by name if it has one of a name."""
    zone, kind = value.tzinfo, type(value).__name__
    written: dict[str, Any] = {TYPE_KEY: kind}
    if zone is None or type(zone) is timezone:
        written["value"] = value.isoformat()
    elif type(zone) is ZoneInfo and zone.key:
        written |= {"value": value.replace(tzinfo=None).isoformat(), "zone": zone.key}
    else:
        raise UnstorableError(
            f"{where} cannot be stored: its time zone is a {type(zone).__module__}."
            f"{type(zone).__qualname__}; pass one of datetime.timezone or zoneinfo.ZoneInfo"
        )
    return written | ({"fold": 1} if value.fold else {})


def _read_moment(kind: type[datetime] | type[time]) -> Callable[[Mapping[str, Any]], Any]:
    def read(data: Mapping[str, Any]) -> Any:
        value: Any = kind.fromisoformat(data["value"])
        if "zone" in data:
            value = value.replace(tzinfo=ZoneInfo(data["zone"]))
        return value.replace(fold=1) if data.get("fold") else value

    return read


def _typed(write: Callable[[Any], Any]) -> Callable[[Any, str], Any]:
    return lambda value, _where: {TYPE_KEY: type(value).__name__, "value": write(value)}


_ENCODERS: Mapping[type, Callable[[Any, str], Any]] = {
    int: _integer,
    float: _float,
    datetime: _moment,
    time: _moment,
    date: _typed(date.isoformat),
    timedelta: _typed(lambda value: [value.days, value.seconds, value.microseconds]),
    UUID: _typed(str),
    Decimal: _typed(str),
}
_DECODERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "dict": lambda data: {key: decode(part) for key, part in data["value"].items()},
    "float": lambda data: float(data["value"]),
    "datetime": _read_moment(datetime),
    "time": _read_moment(time),
    "date": lambda data: date.fromisoformat(data["value"]),
    "timedelta": lambda data: timedelta(*data["value"]),
    "UUID": lambda data: UUID(data["value"]),
    "Decimal": lambda data: Decimal(data["value"]),
}
