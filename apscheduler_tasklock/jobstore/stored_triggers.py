"""Writes APScheduler's own triggers as JSON, and reads them back unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta, timezone, tzinfo
from typing import Any

from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from apscheduler.util import astimezone

from apscheduler_tasklock._runs.trigger_times import time_of_day
from apscheduler_tasklock._values import LONGEST_VALUE, cut, shown
from apscheduler_tasklock.jobstore.stored_values import (
    UnreadableError,
    UnstorableError,
    decode_zone,
    encode_zone,
    is_of_pytz,
    meaning_of_zone,
)
from apscheduler_tasklock.options import LONGEST_SECONDS

try:
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
except ImportError:  # APScheduler 3.10 has none
    CalendarIntervalTrigger = None

_STORED = "cron, interval, date, calendarinterval, and, or"

# Whether APScheduler turns names into time zones of pytz, as version 3.10 does. In a time zone of
# pytz, APScheduler's triggers count elapsed time. In any other time zone, they count local time in
# the zone of the start. So a time zone of pytz is stored as one of pytz. Later versions of
# APScheduler turn names into Python's own time zones.
_HAS_PYTZ = is_of_pytz(astimezone("UTC"))

# Limits how deep combined triggers are nested, so that a trigger that contains itself is an error.
_DEEPEST = 10
# Limits the parts of a trigger. The trigger itself is a part, and so is each trigger that it
# combines, and each value of a cron field after the field's first value.
_MOST_PARTS = 1000
_CRON_FIELDS = frozenset(CronTrigger.FIELD_NAMES)
# Limits the characters of a cron field.
_LONGEST_FIELD = 1000
# Limits the length of an interval and the jitter.
_LONGEST = timedelta(seconds=LONGEST_SECONDS)
# Limits the year in which a calendar interval may start; see `_runs/trigger_times.py`.
_LAST_YEAR = 9000


def encode_trigger(trigger: Any) -> dict[str, Any]:
    """Return a trigger as JSON-like data.

    :raises UnstorableError: the trigger is not one of APScheduler's own, would come back different,
        or has too many parts
    """
    encoded = _encode(trigger, _Parts(UnstorableError, "the trigger cannot be stored: it has "))
    try:
        decoded = decode_trigger(encoded)
    except UnreadableError as error:
        raise UnstorableError(f"the trigger cannot be stored: {error}") from error
    again = _encode(decoded, _Parts(UnstorableError, "the trigger cannot be stored: it has "))
    if again != encoded:
        raise UnstorableError(
            f"the trigger {trigger} cannot be stored: it would come back different "
            f"({encoded} as {again})"
        )
    return encoded


def decode_trigger(data: Any) -> Any:
    """Return the trigger that was encoded as this JSON-like data.

    :raises UnreadableError: the data is no encoded trigger, or has too many parts
    """
    return _decode(data, _Parts(UnreadableError, "it has a trigger of "))


class _Parts:
    """Counts the parts of a trigger and their depth while the trigger is encoded or decoded.

    :param error: the error to raise if there are too many parts
    :param says: the beginning of the error's message
    """

    def __init__(self, error: type[Exception], says: str) -> None:
        self._error = error
        self._says = says
        self._count = 0
        self.depth = 0

    def add(self, count: int = 1) -> None:
        """Count parts, and raise the error if there are too many."""
        self._count += count
        if self._count > _MOST_PARTS:
            raise self._error(f"{self._says}more than {_MOST_PARTS} parts")
        if self.depth > _DEEPEST:
            raise self._error(f"{self._says}parts that are nested more than {_DEEPEST} deep")

    def each(self, parts: Any, convert: Callable[[Any, _Parts], Any]) -> list[Any]:
        """Encode or decode the parts of a combination."""
        self.depth += 1
        converted = [convert(part, self) for part in parts]
        self.depth -= 1
        return converted


def _encode(trigger: Any, parts: _Parts) -> dict[str, Any]:
    kind = type(trigger)
    if kind not in _ENCODERS or kind is type(None):
        raise UnstorableError(
            f"the trigger cannot be stored: it is a {kind.__module__}.{kind.__qualname__}, and "
            f"only APScheduler's own triggers can be stored: {_STORED}"
        )
    parts.add()
    return _ENCODERS[kind](trigger, parts)


def _decode(data: Any, parts: _Parts) -> Any:
    kind = data.get("type") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _DECODERS:
        raise UnreadableError(f"it has a trigger of an unknown type, {shown(kind)}")
    parts.add()
    try:
        return _DECODERS[kind](data, parts)
    except UnreadableError:
        raise
    except Exception as error:  # such as OSError for the time zone "Europe", which is a folder
        raise UnreadableError(
            f"it has a {kind} trigger that cannot be read: {cut(error, LONGEST_VALUE)}"
        ) from error


def declared_schedule(data: Mapping[str, Any]) -> Any:
    """Return the part of an encoded trigger that is the same on all replicas that declare it.

    The default start of an interval or calendar interval is left out, because it depends on when
    the replica made the trigger. The time zone's name is replaced by the time zone's offsets. The
    time zone of an interval or a date is left out, because either means the same in all time zones.
    """
    kind = data.get("type")
    if kind in ("and", "or"):
        return {**data, "triggers": [declared_schedule(part) for part in data["triggers"]]}
    left_out = {"pytz", "timezone"} | ({"start_date"} if has_default_start(data) else set())
    declared = {key: value for key, value in data.items() if key not in left_out}
    if kind in ("cron", "calendarinterval"):
        declared["timezone"] = meaning_of_zone(data.get("timezone"))
    return declared


def has_default_start(data: Mapping[str, Any]) -> bool:
    """Return whether an encoded interval or calendar interval has a default start.

    An interval's start with microseconds counts as a default, because starts that people write have
    no microseconds. Any start of a calendar interval counts as a default.
    """
    if data.get("type") == "calendarinterval":
        return True
    start = data.get("start_date") if data.get("type") == "interval" else None
    return start is not None and bool(datetime.fromisoformat(start).microsecond)


def starts_from_now(trigger: Any) -> bool:
    """Return whether an interval trigger has a default start: one interval after it was made."""
    return bool(trigger.start_date.microsecond)


def _zone(zone: tzinfo) -> dict[str, Any]:
    if _HAS_PYTZ and is_of_pytz(zone) and zone.utcoffset(None) is None:
        return {"timezone": str(zone), "pytz": True}
    remedy = (
        "pass timezone='Europe/Berlin', or another name, to the trigger or the scheduler, or set "
        "the environment variable TZ to such a name"
    )
    return {"timezone": encode_zone(zone, "the trigger", remedy)}


def _read_zone(data: Mapping[str, Any]) -> tzinfo:
    if _HAS_PYTZ and data.get("pytz"):
        zone: tzinfo = astimezone(data["timezone"])
        return zone
    return decode_zone(data["timezone"])


def _moment(moment: datetime | None) -> str | None:
    try:
        return None if moment is None else moment.astimezone(timezone.utc).isoformat()
    except OverflowError:
        raise UnstorableError(
            f"the trigger cannot be stored: in UTC, {moment} is before the year 1 or after the "
            "year 9999; pass a time within these years, or None"
        ) from None


def _read_moment(written: str | None, zone: tzinfo) -> datetime | None:
    return None if written is None else datetime.fromisoformat(written).astimezone(zone)


def _date(day: date | None) -> str | None:
    return None if day is None else day.isoformat()


def _read_date(written: str | None) -> date | None:
    return None if written is None else date.fromisoformat(written)


def _encode_cron(trigger: Any, _parts: _Parts) -> dict[str, Any]:
    return {
        "type": "cron",
        "fields": {field.name: str(field) for field in trigger.fields if not field.is_default},
        **_limits(trigger),
    }


def _read_cron(data: Mapping[str, Any], parts: _Parts) -> Any:
    fields = data["fields"]
    for name, text in fields.items():
        if not isinstance(text, str) or len(text) > _LONGEST_FIELD or name not in _CRON_FIELDS:
            raise UnreadableError(
                f"it has a cron trigger whose fields are no texts of up to {_LONGEST_FIELD} "
                "characters"
            )
        parts.add(text.count(","))
    return CronTrigger(**fields, **_read_limits(data))


def _limits(trigger: Any) -> dict[str, Any]:
    zone = trigger.timezone
    if _HAS_PYTZ and type(trigger) is IntervalTrigger:
        zone = trigger.start_date.tzinfo
    return {
        "start_date": _moment(trigger.start_date),
        "end_date": _moment(trigger.end_date),
        **_zone(zone),
        "jitter": trigger.jitter,
    }


def _read_limits(data: Mapping[str, Any]) -> dict[str, Any]:
    zone = _read_zone(data)
    return {
        "start_date": _read_moment(data["start_date"], zone),
        "end_date": _read_moment(data["end_date"], zone),
        "timezone": zone,
        "jitter": _read_jitter(data),
    }


def _read_jitter(data: Mapping[str, Any]) -> Any:
    jitter: Any = data["jitter"]
    is_number = type(jitter) in (int, float) and 0 <= jitter <= LONGEST_SECONDS
    if jitter is not None and not is_number:
        raise UnreadableError(
            "it has a trigger whose jitter is neither None nor a number of seconds from 0 to "
            f"{LONGEST_SECONDS:.0f}"
        )
    return jitter


def _whole_numbers(values: Any, count: int) -> list[int]:
    """Return a list of ``count`` whole numbers as it is.

    :raises ValueError: the values are something else
    """
    if not isinstance(values, list) or [type(value) for value in values] != [int] * count:
        raise ValueError(f"{count} whole numbers belong there")
    return values


def _encode_interval(trigger: Any, _parts: _Parts) -> dict[str, Any]:
    length = trigger.interval
    return {
        "type": "interval",
        "length": [length.days, length.seconds, length.microseconds],
        **_limits(trigger),
    }


def _read_interval(data: Mapping[str, Any], _parts: _Parts) -> Any:
    days, seconds, microseconds = _whole_numbers(data["length"], 3)
    if not timedelta() < timedelta(days, seconds, microseconds) <= _LONGEST:
        raise ValueError(f"its length is not above 0 and up to {_LONGEST.days} days")
    length = seconds + microseconds / 1_000_000
    return IntervalTrigger(days=days, seconds=length, **_read_limits(data))


def _encode_date(trigger: Any, _parts: _Parts) -> dict[str, Any]:
    moment = trigger.run_date
    try:
        zone = _zone(moment.tzinfo)
    except UnstorableError:  # the offset is enough for one moment
        zone = _zone(timezone(moment.utcoffset()))
    return {"type": "date", "run_date": _moment(moment), **zone}


def _read_date_trigger(data: Mapping[str, Any], _parts: _Parts) -> Any:
    return DateTrigger(_read_moment(data["run_date"], _read_zone(data)))


def _encode_calendar(trigger: Any, _parts: _Parts) -> dict[str, Any]:
    return {
        "type": "calendarinterval",
        "length": [trigger.years, trigger.months, trigger.weeks, trigger.days],
        "time": time_of_day(trigger),
        "start_date": _date(trigger.start_date),
        "end_date": _date(trigger.end_date),
        **_zone(trigger.timezone),
        "jitter": trigger.jitter,
    }


def _read_calendar(data: Mapping[str, Any], _parts: _Parts) -> Any:
    length = _whole_numbers(data["length"], 4)
    hour, minute, second = _whole_numbers(data["time"], 3)
    start_date = _read_date(data["start_date"])
    days_of_each = zip((365, 30, 7, 1), length, strict=True)
    if min(length) < 0 or any(days * count > _LONGEST.days for days, count in days_of_each):
        raise ValueError(f"its length is not from 0 to {_LONGEST.days} days")
    if start_date is not None and start_date.year > _LAST_YEAR:
        raise ValueError(f"it starts after the year {_LAST_YEAR}")
    zone = _read_zone(data)
    if (zone.utcoffset(None) or timedelta()).microseconds:  # the trigger would loop for ever
        raise ValueError("its time zone is off by a fraction of a second")
    years, months, weeks, days = length
    return CalendarIntervalTrigger(
        years=years,
        months=months,
        weeks=weeks,
        days=days,
        hour=hour,
        minute=minute,
        second=second,
        start_date=start_date,
        end_date=_read_date(data["end_date"]),
        timezone=zone,
        jitter=_read_jitter(data),
    )


def _combined(kind: str) -> Callable[[Any, _Parts], dict[str, Any]]:
    return lambda trigger, parts: {
        "type": kind,
        "triggers": parts.each(trigger.triggers, _encode),
        "jitter": trigger.jitter,
    }


def _read_combined(kind: type) -> Callable[[Mapping[str, Any], _Parts], Any]:
    def read(data: Mapping[str, Any], parts: _Parts) -> Any:
        if not isinstance(data["triggers"], list):
            raise UnreadableError(f"it has an {data['type']} trigger whose triggers are no list")
        return kind(parts.each(data["triggers"], _decode), jitter=_read_jitter(data))

    return read


_ENCODERS: dict[Any, Callable[[Any, _Parts], dict[str, Any]]] = {
    CronTrigger: _encode_cron,
    IntervalTrigger: _encode_interval,
    DateTrigger: _encode_date,
    CalendarIntervalTrigger: _encode_calendar,
    AndTrigger: _combined("and"),
    OrTrigger: _combined("or"),
}
_DECODERS: dict[str, Callable[[Mapping[str, Any], _Parts], Any]] = {
    "cron": _read_cron,
    "interval": _read_interval,
    "date": _read_date_trigger,
    "calendarinterval": _read_calendar,
    "and": _read_combined(AndTrigger),
    "or": _read_combined(OrTrigger),
}
