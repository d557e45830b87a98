"""Writes the arguments of jobs as JSON, and reads them back unchanged.

A value that would be read as a different value is an error: for example a tuple, because it would
come back as a list, and the key 1, because it would come back as the key "1". The error names the
value's place. A value of a type that JSON lacks is written as an object, whose key ``$`` has the
name of the type.

A time zone of any library is written by its name in the time zone database, or by its offset from
UTC. It is read as a time zone of Python's standard library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from tzlocal import get_localzone

from apscheduler_tasklock._values import cut, shown
from apscheduler_tasklock.errors import TaskLockOptionError

# A value of a type that JSON lacks is written as an object, in which this key has the type's name.
TYPE_KEY = "$"

# Limits how deep lists and dicts are nested, so that a list that contains itself is an error.
_DEEPEST = 50
# Limits the digits of an integer, so that both jsonb and Python can read it.
_MOST_DIGITS = 4000
_LARGEST_INTEGER = 10**_MOST_DIGITS

# Two time zones are compared at these distances from now: every two weeks for two years. No change
# of clocks is missed, because daylight saving time lasts longer than two weeks.
_COMPARED = [timedelta(weeks=weeks) for weeks in range(0, 104, 2)]
# meaning_of_zone() returns the offsets in so many hours from the start of this year: in two years.
_MEANT_HOURS = 2 * 366 * 24
_WEEK = 7 * 24  # in hours


class UnstorableError(TaskLockOptionError):
    """A value cannot be stored, or would come back different. The message names its place."""


class UnreadableError(TaskLockOptionError):
    """A row cannot be read, because another version wrote it or somebody changed it."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message))


def encode(value: Any, where: str) -> Any:
    """Return a value as JSON-like data.

    :param where: the value's place for messages, such as ``args[0]``
    :raises UnstorableError: the value cannot be stored, or would come back different
    """
    return _encode(value, where, 0)


def decode(data: Any) -> Any:
    """Return the value that was encoded as this JSON-like data.

    :raises UnreadableError: the data is no encoded value, or its value cannot be stored
    """
    return _decode(data, 0)


def _decode(data: Any, depth: int) -> Any:
    if type(data) is int and abs(data) >= _LARGEST_INTEGER:
        raise UnreadableError(f"it has a number of more than {_MOST_DIGITS} digits")
    if not isinstance(data, (list, dict)):
        return data
    if isinstance(data, dict) and data.get(TYPE_KEY, "dict") != "dict":
        return _decode_typed(data)
    if depth == _DEEPEST:
        raise UnreadableError(f"it has values that are nested more than {_DEEPEST} deep")
    if isinstance(data, list):
        return [_decode(part, depth + 1) for part in data]
    parts = data.get("value") if TYPE_KEY in data else data
    if not isinstance(parts, dict):
        raise UnreadableError("it has a dict that cannot be read: its value is no object")
    return {key: _decode(part, depth + 1) for key, part in parts.items()}


def _decode_typed(data: Mapping[str, Any]) -> Any:
    kind = data[TYPE_KEY]
    if not isinstance(kind, str) or kind not in _DECODERS:
        raise UnreadableError(f"it has a value of an unknown type, {shown(kind)}")
    try:
        return _DECODERS[kind](data)
    except UnreadableError:
        raise
    except Exception as error:  # such as OSError for the time zone "Europe", which is a folder
        raise UnreadableError(f"it has a {kind} that cannot be read: {shown(data)}") from error


def encode_zone(zone: tzinfo, where: str, remedy: str) -> str:
    """Return the text of a time zone: its name, or its offset in microseconds, or ``"UTC"``.

    A time zone whose clocks never change is written as its offset, any other one as its name.

    :param where: the owner of the time zone, for messages
    :param remedy: what to pass instead, for messages
    :raises UnstorableError: the clocks of the time zone change, and this machine does not know its
        name
    """
    plain = _plain_zone(zone, where, remedy)
    if isinstance(plain, ZoneInfo):
        return plain.key
    offset = plain.utcoffset(None)
    return str(offset // timedelta(microseconds=1)) if offset else "UTC"


def decode_zone(written: str) -> tzinfo:
    """Return the time zone that :func:`encode_zone` has written.

    :raises Exception: the text names no time zone; the time zone database can raise anything
    """
    if written == "UTC":
        return timezone.utc
    if written.lstrip("-").isdigit():
        return timezone(timedelta(microseconds=int(written)))
    return ZoneInfo(written)


def meaning_of_zone(written: Any) -> Any:
    """Return the offsets of a time zone in this year and the next.

    The offsets are equal for ``Europe/Kiev`` and its new name, ``Europe/Kyiv``. A text that names
    no time zone is returned as it is.
    """
    try:
        return _offsets(written, datetime.now(timezone.utc).year)
    except Exception:  # noqa: BLE001  # the time zone database can raise anything
        return written


@lru_cache(maxsize=1000)
def _offsets(written: str, year: int) -> tuple[tuple[int, timedelta | None], ...]:
    """Return a time zone's offsets from UTC in the two years from the start of a year.

    Each offset is returned with the hour in which it begins, counted from that start. A change that
    is undone within a week may not be seen, because offsets are compared week by week.
    """
    zone, start = decode_zone(written), datetime(year, 1, 1, tzinfo=timezone.utc)
    always = zone.utcoffset(None)  # None if clocks change in the time zone
    if always is not None:
        return ((0, always),)

    def offset_at(hour: int) -> timedelta | None:
        return (start + timedelta(hours=hour)).astimezone(zone).utcoffset()

    changes = [(0, offset_at(0))]
    for week_ends in range(_WEEK, _MEANT_HOURS, _WEEK):
        offset = offset_at(week_ends)
        if offset != changes[-1][1]:
            before, after = week_ends - _WEEK, week_ends
            while after - before > 1:
                middle = (before + after) // 2
                if offset_at(middle) == offset:
                    after = middle
                else:
                    before = middle
            changes.append((after, offset))
    return tuple(changes)


def is_of_pytz(zone: tzinfo) -> bool:
    """Return whether a time zone is one of pytz, which need not be installed."""
    return type(zone).__module__.partition(".")[0] == "pytz"


def _plain_zone(zone: tzinfo, where: str, remedy: str) -> timezone | ZoneInfo:
    """Return a time zone of Python's own with the same meaning; see :func:`encode_zone`."""
    if type(zone) is timezone:
        return zone
    for name in _names(zone):
        named = _named(name)
        # A zone of pytz is not compared, because its data may be older or newer than the machine's.
        if named is not None and (named is zone or is_of_pytz(zone) or _agree(named, zone)):
            offset = named.utcoffset(None)
            return named if offset is None else timezone(offset)
    fixed = _fixed(zone)
    if fixed is None:
        raise UnstorableError(
            f"{where} cannot be stored: its time zone {zone!r} (a {type(zone).__module__}."
            f"{type(zone).__qualname__}) has no name that the time zone database of this machine "
            f"knows; {remedy}"
        )
    return fixed


def _fixed(zone: tzinfo) -> timezone | None:
    """Return the only offset of a time zone; ``None`` if its clocks change."""
    try:
        offset = zone.utcoffset(None)
        fixed = None if offset is None else timezone(offset)
    except Exception:  # noqa: BLE001  # an application's time zone may need a datetime
        return None
    return fixed if fixed is not None and _agree(fixed, zone) else None


def _names(zone: tzinfo) -> Iterator[str]:
    """Yield the names that a time zone may have."""
    # The attributes in which zoneinfo, pytz and dateutil keep the name. "zone" is read only if
    # there is no "key", because pytz_deprecation_shim has both, and warns when "zone" is read.
    for attribute in ("key", "zone", "_filename"):
        name = getattr(zone, attribute, None)
        if isinstance(name, str):
            yield name.rpartition("zoneinfo/")[2]
            break
    else:
        name = ""
    if "local" in f"{type(zone).__name__} {name}".lower():  # dateutil's tzlocal(), /etc/localtime
        try:
            yield str(get_localzone())
        except Exception:  # noqa: BLE001  # TZ or the machine's configuration is invalid
            return


def _named(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name)
    except Exception:  # noqa: BLE001  # the time zone database can raise anything
        return None


def _agree(one: tzinfo, other: tzinfo) -> bool:
    """Return whether two time zones have the same offsets at all compared moments."""
    now = datetime.now(timezone.utc)
    try:
        return all(
            (now + later).astimezone(one).utcoffset() == (now + later).astimezone(other).utcoffset()
            for later in _COMPARED
        )
    except Exception:  # noqa: BLE001  # an application's time zone can raise anything
        return False


def _encode(value: Any, where: str, depth: int) -> Any:
    # Types are compared exactly, because an instance of a subclass would come back as its base.
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
        return "JSON has no bytes; pass a text, for example in base64"
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
    # jsonb turns 1e+20 into an integer, and lacks -0.0, NaN and the infinities.
    if "e" in written or not math.isfinite(value) or written == "-0.0":
        return {TYPE_KEY: "float", "value": written}
    return value


def _moment(value: datetime | time, where: str) -> Any:
    """Return a datetime or time as JSON, its time zone by name or by offset."""
    written: dict[str, Any] = {TYPE_KEY: type(value).__name__}
    value = _in_plain_zone(value, where)
    if isinstance(value.tzinfo, ZoneInfo):
        written |= {
            "value": value.replace(tzinfo=None).isoformat(),
            "zone": value.tzinfo.key,
        }
    else:
        offset = value.utcoffset()
        if offset is not None and offset.microseconds:  # fromisoformat() would lose these
            raise UnstorableError(
                f"{where} cannot be stored: its time zone is off by a fraction of a second; pass "
                "one of whole seconds"
            )
        written["value"] = value.isoformat()
    return written | ({"fold": 1} if value.fold else {})


def _in_plain_zone(value: datetime | time, where: str) -> datetime | time:
    """Return the same moment and local time in a time zone of Python's own."""
    zone = value.tzinfo
    if zone is None or type(zone) is timezone:
        return value
    if type(zone) is ZoneInfo and _named(zone.key) is zone:
        return value
    plain = _plain_zone(
        zone, where, "pass one of zoneinfo.ZoneInfo by its name, or of datetime.timezone"
    )
    offset = value.utcoffset()
    # Try both folds, because in a repeated hour pytz has two tzinfo objects where Python's own
    # zones have two folds.
    for fold in (value.fold, 1 - value.fold):
        again = value.replace(tzinfo=plain, fold=fold)
        if again.utcoffset() == offset:
            return again
    # A datetime of pytz that was made without localize() or normalize() has an offset that its time
    # zone does not have at that moment, so only the offset is kept.
    return value.replace(tzinfo=timezone(offset) if offset is not None else plain)


def _read_moment(kind: type[datetime] | type[time]) -> Callable[[Mapping[str, Any]], Any]:
    def read(data: Mapping[str, Any]) -> Any:
        value: Any = kind.fromisoformat(data["value"])
        if "zone" in data:
            value = value.replace(tzinfo=ZoneInfo(data["zone"]))
        offset = value.utcoffset()
        if offset is not None and offset.microseconds:
            raise ValueError("its time zone is off by a fraction of a second")
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
    "float": lambda data: float(data["value"]),
    "datetime": _read_moment(datetime),
    "time": _read_moment(time),
    "date": lambda data: date.fromisoformat(data["value"]),
    "timedelta": lambda data: timedelta(*data["value"]),
    "UUID": lambda data: UUID(data["value"]),
    "Decimal": lambda data: Decimal(data["value"]),
}
