"""What a task and a replica are called."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._lock.readable import LONGEST_JSON
from apscheduler_tasklock._scheduler.functions import function_reference, identity_of, unwrapped
from apscheduler_tasklock._scheduler.triggers import time_of_day
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.options import RESERVED_KEY

try:
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
except ImportError:  # APScheduler 3.10 has none
    CalendarIntervalTrigger = None


# What APScheduler gives a job that was added without an id is a UUID in hex. Applications give
# such ids too, of other versions, and nothing tells whether they are the same on each replica.
_RANDOM_ID = re.compile(r"[0-9a-fA-F]{32}")

# Part of what is hashed: a change of the canonical form is a change of this number.
_CANONICAL_FORM = 1

# Arguments nested deeper than this have no canonical form, such as a list that is in itself.
# Python's own limit would depend on how deep the stack is already.
_DEEPEST = 50


def is_unnamed(job: Any, jobstore: Any) -> bool:
    """Tell whether a job's id may be random, and so another one on each replica.

    Persistent job stores keep the id; a memory job store gets a new one at every start.
    """
    return isinstance(jobstore, MemoryJobStore) and _RANDOM_ID.fullmatch(job.id) is not None


@dataclass(frozen=True)
class UnnamedTask:
    """The name of a job's task that is made of what is the same on every replica.

    :ivar name: function reference and hash; ``""`` of a one-off job that is its replica's own
    :ivar has_arguments: whether the arguments are in the hash; some have no canonical form
    :ivar is_one_off: whether it runs once, at a date
    :ivar own_because: why a one-off job is its replica's own: what no other replica can compare
    """

    name: str
    has_arguments: bool
    is_one_off: bool
    own_because: str | None = None

    @classmethod
    def of(cls, job: Any) -> UnnamedTask:
        """Return the name that a job without an id gets."""
        arguments = canonical_arguments(job)
        form = {
            "version": _CANONICAL_FORM,
            "trigger": canonical_trigger(job.trigger),
            "arguments": arguments,
        }
        is_one_off = isinstance(job.trigger, DateTrigger)
        if is_one_off:
            try:
                form["function"] = _canonical_function(unwrapped(job.func), {})
            except _NoCanonicalFormError:
                form["function"] = None
            own_because = _why_own(job.trigger, form["function"], arguments)
            if own_because is not None:
                return cls("", arguments is not None, is_one_off, own_because)
        # Text may have lone surrogates, which UTF-8 proper has not.
        digest = hashlib.sha256(_as_json(form).encode("utf-8", "surrogatepass")).hexdigest()
        name = f"{function_reference(job)}-{digest[:16]}"
        return cls(name, arguments is not None, is_one_off)


def _why_own(trigger: Any, function: Any, arguments: Any) -> str | None:
    """Return why no other replica can have the same one-off job; ``None`` if it may."""
    if type(trigger) is not DateTrigger:
        return f"its trigger is of the class {type(trigger).__qualname__}"
    if trigger.run_date.microsecond:
        return "its date has fractions of a second"
    if function is None:
        return "its function belongs to an object, or carries values that cannot be compared"
    return "its arguments cannot be compared" if arguments is None else None


def _canonical_function(function: Any, numbers: dict[int, int]) -> Any:
    """Return what tells a function from others, as JSON-like data.

    :param numbers: the functions that were met so far, by identity: a function may carry itself
    :raises _NoCanonicalFormError: no other replica can compare it
    """
    if id(function) in numbers:
        return {"function": numbers[id(function)]}
    numbers[id(function)] = len(numbers)
    try:
        identity = identity_of(function)
    except Exception:  # noqa: BLE001  # whatever an application's own object raises, as a proxy
        identity = None
    if identity is None or len(numbers) > _DEEPEST:
        raise _NoCanonicalFormError
    values = []
    for value in identity.values:
        try:
            is_function = callable(value)
            values.append(
                _canonical_function(value, numbers) if is_function else _canonical(value, 0)
            )
        except _NoCanonicalFormError:
            if not identity.has_name:
                raise
            values.append({})
    return {"function": identity.form, "values": values}


def reject_duplicate_unnamed(job: Any, other: Any, task: UnnamedTask) -> None:
    """Reject two recurring jobs of one scheduler whose tasks got the same name, without ids.

    Each would run in place of the other.

    :param other: another job whose task has this name
    :param task: the task of both
    :raises TaskLockOptionError: always
    """
    alike = "trigger and arguments"
    if not task.has_arguments:
        alike = "trigger, and their arguments are of types that cannot be put into a task's name"
    raise TaskLockOptionError(
        f"jobs {job.id} and {other.id} were added without an id (32 hexadecimal digits count as "
        f"none) and both call {function_reference(job)} with the same {alike}, so that no replica "
        "can tell them apart; give each an id in add_job(..., id=...), or the option 'name'"
    )


def canonical_trigger(trigger: Any) -> Any:
    """Return what of a trigger is the same on every replica, as JSON-like data.

    Each replica makes up the default start of an interval and the "now" of a date trigger itself:
    moments with microseconds, which nobody writes down, so any such moment is left out. The
    default start of a calendar interval is today, which nothing tells from a date that was given;
    so that start is always left out. Time zones are left out, because the default is the
    machine's. Two jobs that differ only in what is left out get one name, which is rejected with a
    message; a replica's own choice in the name would run the job on each replica without one.

    Of a custom trigger nothing but its class is known.
    """
    kind = type(trigger)
    if kind is CronTrigger:
        return {
            "type": "cron",
            "fields": {field.name: str(field) for field in trigger.fields},
            "start": _instant(trigger.start_date),
            "end": _instant(trigger.end_date),
            "jitter": _jitter(trigger),
        }
    if kind is IntervalTrigger:
        return {
            "type": "interval",
            "length": _elapsed(trigger.interval),
            "start": _instant(trigger.start_date),
            "end": _instant(trigger.end_date),
            "jitter": _jitter(trigger),
        }
    if kind is DateTrigger:
        return {"type": "date", "run": _instant(trigger.run_date)}
    if kind is CalendarIntervalTrigger:
        return {
            "type": "calendarinterval",
            "length": [trigger.years, trigger.months, trigger.weeks, trigger.days],
            "time": time_of_day(trigger),
            "end": trigger.end_date and trigger.end_date.isoformat(),
            "jitter": _jitter(trigger),
        }
    if kind in (AndTrigger, OrTrigger):
        return {
            "type": "and" if kind is AndTrigger else "or",
            "parts": sorted(map(canonical_trigger, trigger.triggers), key=_as_json),
            "jitter": _jitter(trigger),
        }
    return {"class": f"{kind.__module__}:{kind.__qualname__}"}


def canonical_schedule(trigger: Any) -> str:
    """Return a trigger in canonical form as text, for the task's row.

    One of thousands of parts is too long for a row. Its class and a digest tell whether it changed.
    """
    text = _as_json(canonical_trigger(trigger))
    if len(text) <= LONGEST_JSON:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    kind = type(trigger)
    return _as_json({"class": f"{kind.__module__}:{kind.__qualname__}", "digest": digest})


def canonical_arguments(job: Any) -> Any:
    """Return a job's arguments as JSON-like data, or ``None`` if some have no canonical form.

    Arguments bound by functools.partial count. The reserved task_lock kwarg does not.
    """
    args, kwargs = job.args, job.kwargs
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, Mapping):
        return None
    function = job.func
    while isinstance(function, partial):
        args = [*function.args, *args]
        kwargs = {**function.keywords, **kwargs}
        function = function.func
    named = {key: value for key, value in kwargs.items() if key != RESERVED_KEY}
    try:
        return [_canonical(list(args), 0), _canonical(named, 0)]
    except _NoCanonicalFormError:
        return None


class _NoCanonicalFormError(Exception):
    """An argument is of a type that another replica may write differently."""


def _canonical(value: Any, depth: int) -> Any:
    """Return an argument as JSON-like data that keeps different values different.

    Types are compared exactly: a subclass may be equal to what its instances are not.

    :param depth: how many containers it is in
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind in _SCALARS:
        return {kind.__name__: _SCALARS[kind](value)}
    if depth == _DEEPEST:
        raise _NoCanonicalFormError
    if kind in (list, tuple):
        return [_canonical(part, depth + 1) for part in value]
    if kind in (set, frozenset):
        return {"set": sorted((_canonical(part, depth + 1) for part in value), key=_as_json)}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _canonical(part, depth + 1) for key, part in value.items()}}
    raise _NoCanonicalFormError


def _canonical_datetime(moment: datetime) -> str:
    """Return a moment: an instant if it has a time zone, which may be the machine's own."""
    if moment.utcoffset() is None:
        return moment.isoformat()
    try:
        return moment.astimezone(timezone.utc).isoformat()
    except OverflowError:  # in the first or last hours that there are
        return moment.isoformat()


def _elapsed(length: timedelta) -> list[int]:
    return [length.days, length.seconds, length.microseconds]


# How values are written that are no containers. Integers are written in hex, as decimal ones have
# a limit of digits.
_SCALARS: Mapping[type, Any] = {
    int: hex,
    float: repr,
    datetime: _canonical_datetime,
    date: date.isoformat,
    time: time.isoformat,
    timedelta: _elapsed,
    UUID: str,
    Decimal: str,
}


def _instant(moment: datetime | None) -> str | None:
    """Return a moment of a trigger, or ``None`` if the replica has made it up itself."""
    return None if moment is None or moment.microsecond else _canonical_datetime(moment)


def _jitter(trigger: Any) -> float:
    """Return the most seconds that a trigger adds; what it draws is not in it."""
    jitter = trigger.jitter
    return float(jitter) if isinstance(jitter, (int, float)) else 0.0


def _as_json(form: Any) -> str:
    return json.dumps(form, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
