"""Triggers as JSON that come back as they were: those of APScheduler itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime, timezone, tzinfo
from typing import Any

from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from apscheduler.util import astimezone

from apscheduler_tasklock._scheduler.triggers import time_of_day
from apscheduler_tasklock._values import LONGEST_VALUE, cut, shown
from apscheduler_tasklock.jobstore.values import (
    UnreadableError,
    UnstorableError,
    decode_zone,
    encode_zone,
    is_of_pytz,
    meaning_of_zone,
)

try:
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
except ImportError:  # APScheduler 3.10 has none
    CalendarIntervalTrigger = None

_STORED = "cron, interval, date, calendarinterval, and, or"

# APScheduler 3.10 makes zones of pytz of names. With these its triggers reckon in elapsed time, and
# with others by the clock, from the start's own zone. Later versions have zones of Python's own.
_HAS_PYTZ = is_of_pytz(astimezone("UTC"))


def encode_trigger(trigger: Any) -> dict[str, Any]:
    """Return a trigger as JSON-like data.

    :raises UnstorableError: it is none of APScheduler's own, or would come back different
    """
    kind = type(trigger)
    if kind not in _ENCODERS or kind is type(None):
        raise UnstorableError(
            f"the trigger cannot be stored: it is a {kind.__module__}.{kind.__qualname__}, and "
            f"what can be stored are APScheduler's own: {_STORED}"
        )
    encoded = _ENCODERS[kind](trigger)
    try:
        again = _ENCODERS[kind](decode_trigger(encoded))
    except UnreadableError as error:
        raise UnstorableError(f"the trigger {trigger} cannot be stored: {error}") from error
    if again != encoded:
        raise UnstorableError(
            f"the trigger {trigger} cannot be stored: it would come back different "
            f"({encoded} as {again})"
        )
    return encoded


def decode_trigger(data: Any) -> Any:
    """Return the trigger that JSON-like data stands for.

    :raises UnreadableError: it stands for none
    """
    kind = data.get("type") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _DECODERS:
        raise UnreadableError(f"it has a trigger of an unknown type, {shown(kind)}")
    try:
        return _DECODERS[kind](data)
    except UnreadableError:
        raise
    except Exception as error:  # such as OSError, of the time zone "Europe", which is a folder
        raise UnreadableError(
            f"it has a {kind} trigger that cannot be read: {cut(error, LONGEST_VALUE)}"
        ) from error


def declared_schedule(data: Mapping[str, Any]) -> Any:
    """Return what of an encoded trigger whoever declared it has chosen.

    Without the default start of an interval, which is the moment of its making, and that of a
    calendar interval, which is the day: each replica that declares the job makes up another one.
    A time zone is what it means, not how it is called; intervals and dates mean the same in all.
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
    """Tell whether nobody has chosen the start of an encoded interval, as far as one can tell.

    A start that somebody writes down has no microseconds.
    """
    if data.get("type") == "calendarinterval":
        return True
    start = data.get("start_date") if data.get("type") == "interval" else None
    return start is not None and bool(datetime.fromisoformat(start).microsecond)


def starts_from_now(trigger: Any) -> bool:
    """Tell the same of an interval trigger itself: it starts an interval after it was made."""
    return bool(trigger.start_date.microsecond)


def _zone(zone: tzinfo) -> dict[str, Any]:
    if _HAS_PYTZ and is_of_pytz(zone) and zone.utcoffset(None) is None:
        return {"timezone": str(zone), "pytz": True}
    remedy = (
        "pass timezone='Europe/Berlin', or another name, to the trigger or the scheduler, or set "
        "the environment variable TZ to it"
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
            f"the trigger cannot be stored: {moment} is no time in UTC; pass an earlier or later "
            "one, or None"
        ) from None


def _read_moment(written: str | None, zone: tzinfo) -> datetime | None:
    return None if written is None else datetime.fromisoformat(written).astimezone(zone)


def _date(day: date | None) -> str | None:
    return None if day is None else day.isoformat()


def _read_date(written: str | None) -> date | None:
    return None if written is None else date.fromisoformat(written)


def _encode_cron(trigger: Any) -> dict[str, Any]:
    return {
        "type": "cron",
        "fields": {field.name: str(field) for field in trigger.fields if not field.is_default},
        **_limits(trigger),
    }


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
        "jitter": data["jitter"],
    }


def _encode_interval(trigger: Any) -> dict[str, Any]:
    length = trigger.interval
    return {
        "type": "interval",
        "length": [length.days, length.seconds, length.microseconds],
        **_limits(trigger),
    }


def _read_interval(data: Mapping[str, Any]) -> Any:
    days, seconds, microseconds = data["length"]
    length = seconds + microseconds / 1_000_000
    return IntervalTrigger(days=days, seconds=length, **_read_limits(data))


def _encode_date(trigger: Any) -> dict[str, Any]:
    moment = trigger.run_date
    try:
        zone = _zone(moment.tzinfo)
    except UnstorableError:  # a moment is the same in any zone, and keeps its clock's time
        zone = _zone(timezone(moment.utcoffset()))
    return {"type": "date", "run_date": _moment(moment), **zone}


def _read_date_trigger(data: Mapping[str, Any]) -> Any:
    return DateTrigger(_read_moment(data["run_date"], _read_zone(data)))


def _encode_calendar(trigger: Any) -> dict[str, Any]:
    return {
        "type": "calendarinterval",
        "length": [trigger.years, trigger.months, trigger.weeks, trigger.days],
        "time": time_of_day(trigger),
        "start_date": _date(trigger.start_date),
        "end_date": _date(trigger.end_date),
        **_zone(trigger.timezone),
        "jitter": trigger.jitter,
    }


def _read_calendar(data: Mapping[str, Any]) -> Any:
    years, months, weeks, days = data["length"]
    hour, minute, second = data["time"]
    return CalendarIntervalTrigger(
        years=years,
        months=months,
        weeks=weeks,
        days=days,
        hour=hour,
        minute=minute,
        second=second,
        start_date=_read_date(data["start_date"]),
        end_date=_read_date(data["end_date"]),
        timezone=_read_zone(data),
        jitter=data["jitter"],
    )


def _combined(kind: str) -> Callable[[Any], dict[str, Any]]:
    return lambda trigger: {
        "type": kind,
        "triggers": [encode_trigger(part) for part in trigger.triggers],
        "jitter": trigger.jitter,
    }


def _read_combined(kind: type) -> Callable[[Mapping[str, Any]], Any]:
    return lambda data: kind(
        [decode_trigger(part) for part in data["triggers"]], jitter=data["jitter"]
    )


_ENCODERS: dict[Any, Callable[[Any], dict[str, Any]]] = {
    CronTrigger: _encode_cron,
    IntervalTrigger: _encode_interval,
    DateTrigger: _encode_date,
    CalendarIntervalTrigger: _encode_calendar,
    AndTrigger: _combined("and"),
    OrTrigger: _combined("or"),
}
_DECODERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "cron": lambda data: CronTrigger(**data["fields"], **_read_limits(data)),
    "interval": _read_interval,
    "date": _read_date_trigger,
    "calendarinterval": _read_calendar,
    "and": _read_combined(AndTrigger),
    "or": _read_combined(OrTrigger),
}
