"""Values as JSON that come back as they were: the arguments of jobs.

What would come back different is rejected, with its place: a tuple would be a list, the key 1 the
key "1". Types that JSON does not have are objects with the key ``$``, which says the type.

A time zone is stored by what it means, whichever library has made it: by its name in the time zone
database, or by its offset from UTC. It comes back as one of Python's own.
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

# The key of an object that stands for a value of another type.
TYPE_KEY = "$"

# Containers nested deeper than this are rejected, such as a list that is in itself.
_DEEPEST = 50
# PostgreSQL's jsonb and Python both read integers of so many digits.
_MOST_DIGITS = 4000
_LARGEST_INTEGER = 10**_MOST_DIGITS

# At which times two zones are compared that ought to be the same: every two weeks of two years, as
# daylight saving time lasts longer than that.
_COMPARED = [timedelta(weeks=weeks) for weeks in range(0, 104, 2)]
# For how many hours what a zone means is told exactly: those of two years.
_TOLD_HOURS = 2 * 366 * 24
_WEEK = 7 * 24


class UnstorableError(TaskLockOptionError):
    """A value cannot be stored, or would come back as another one; the message says where."""


class UnreadableError(TaskLockOptionError):
    """What is stored cannot be read: another version has written it, or somebody has changed it."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message))


def encode(value: Any, where: str) -> Any:
    """Return a value as JSON-like data.

    :param where: names it in messages, as in ``args[0]``
    :raises UnstorableError: it cannot be stored, or would come back different
    """
    return _encode(value, where, 0)


def decode(data: Any) -> Any:
    """Return the value that JSON-like data stands for.

    :raises UnreadableError: it stands for none, or for one that :func:`encode` rejects
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
    except Exception as error:  # such as OSError, of the time zone "Europe", which is a folder
        raise UnreadableError(f"it has a {kind} that cannot be read: {shown(data)}") from error


def encode_zone(zone: tzinfo, where: str, remedy: str) -> str:
    """Return the text that stands for a time zone: one text for zones that are the same by name.

    A zone without clock changes is written as its offset in microseconds, and UTC as ``"UTC"``.

    :param where: whose zone it is, for messages
    :param remedy: what to pass instead, for messages
    :raises UnstorableError: it has neither a name that this machine knows, nor one offset
    """
    plain = _plain_zone(zone, where, remedy)
    if isinstance(plain, ZoneInfo):
        return plain.key
    offset = plain.utcoffset(None)
    return str(offset // timedelta(microseconds=1)) if offset else "UTC"


def decode_zone(written: str) -> tzinfo:
    """Return the time zone that a text stands for.

    :raises Exception: it stands for none; whatever the time zone database raises
    """
    if written == "UTC":
        return timezone.utc
    if written.lstrip("-").isdigit():
        return timezone(timedelta(microseconds=int(written)))
    return ZoneInfo(written)


def meaning_of_zone(written: Any) -> Any:
    """Return what is the same for zones that mean the same, as of ``Europe/Kiev`` and its new name.

    These are the offsets of this year and the next; the text itself, if it stands for no zone.
    """
    try:
        return _offsets(written, datetime.now(timezone.utc).year)
    except Exception:  # noqa: BLE001  # whatever the time zone database raises
        return written


@lru_cache(maxsize=1000)
def _offsets(written: str, year: int) -> tuple[tuple[int, timedelta | None], ...]:
    """Return the offset at the start of a year, and each other one with the hour of its begin.

    Two changes within a week are told as one.
    """
    zone, start = decode_zone(written), datetime(year, 1, 1, tzinfo=timezone.utc)
    always = zone.utcoffset(None)  # None of a zone with clock changes
    if always is not None:
        return ((0, always),)

    def offset_at(hour: int) -> timedelta | None:
        return (start + timedelta(hours=hour)).astimezone(zone).utcoffset()

    changes = [(0, offset_at(0))]
    for week_ends in range(_WEEK, _TOLD_HOURS, _WEEK):
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
    """Tell whether a time zone is one of pytz, which need not be installed."""
    return type(zone).__module__.partition(".")[0] == "pytz"


def _plain_zone(zone: tzinfo, where: str, remedy: str) -> timezone | ZoneInfo:
    """Return the time zone of Python's own that means the same; see :func:`encode_zone`."""
    if type(zone) is timezone:
        return zone
    for name in _names(zone):
        named = _named(name)
        # The data of pytz may be older, or newer, than the machine's.
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
    """Return the offset of a zone that has one only, as a zone."""
    try:
        offset = zone.utcoffset(None)
        fixed = None if offset is None else timezone(offset)
    except Exception:  # noqa: BLE001  # a zone of an application's own may need a datetime
        return None
    return fixed if fixed is not None and _agree(fixed, zone) else None


def _names(zone: tzinfo) -> Iterator[str]:
    """Give the names that a time zone may have."""
    # Of zoneinfo, of pytz, and of dateutil. That of pytz is asked for second: what warns of its use
    # in other libraries has both.
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
        except Exception:  # noqa: BLE001  # TZ, or the machine's configuration, makes no sense
            return


def _named(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name)
    except Exception:  # noqa: BLE001  # whatever the time zone database raises
        return None


def _agree(one: tzinfo, other: tzinfo) -> bool:
    """Tell whether two zones have the same offsets from now on, as far as they are compared."""
    now = datetime.now(timezone.utc)
    try:
        return all(
            (now + later).astimezone(one).utcoffset() == (now + later).astimezone(other).utcoffset()
            for later in _COMPARED
        )
    except Exception:  # noqa: BLE001  # whatever a zone of an application's own raises
        return False


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
    written: dict[str, Any] = {TYPE_KEY: type(value).__name__}
    value = _in_plain_zone(value, where)
    if isinstance(value.tzinfo, ZoneInfo):
        written |= {
            "value": value.replace(tzinfo=None).isoformat(),
            "zone": value.tzinfo.key,
        }
    else:
        offset = value.utcoffset()
        if offset is not None and offset.microseconds:  # which fromisoformat loses
            raise UnstorableError(
                f"{where} cannot be stored: its time zone is off by a fraction of a second; pass "
                "one of whole seconds"
            )
        written["value"] = value.isoformat()
    return written | ({"fold": 1} if value.fold else {})


def _in_plain_zone(value: datetime | time, where: str) -> datetime | time:
    """Return the same moment, as the same clock shows it, in a time zone of Python's own."""
    zone = value.tzinfo
    if zone is None or type(zone) is timezone:
        return value
    if type(zone) is ZoneInfo and _named(zone.key) is zone:
        return value
    plain = _plain_zone(
        zone, where, "pass one of zoneinfo.ZoneInfo by its name, or of datetime.timezone"
    )
    offset = value.utcoffset()
    # pytz tells the two hours of a clock that is set back apart by the zone, and not by the fold.
    for fold in (value.fold, 1 - value.fold):
        again = value.replace(tzinfo=plain, fold=fold)
        if again.utcoffset() == offset:
            return again
    # A moment of pytz that was reckoned with, or made without its localize(), has an offset that
    # its zone does not have then.
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
