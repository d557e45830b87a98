"""Names of tasks that are made of a job's parts, and the canonical form of these parts.

The task of a job without an id of its own gets such a name.
"""

from __future__ import annotations

import hashlib
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

from apscheduler_tasklock._lock.json_columns import LONGEST_JSON, canonical_json
from apscheduler_tasklock._runs.job_functions import function_reference, identity_of, unwrapped
from apscheduler_tasklock._runs.trigger_times import time_of_day, zone_of
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.options import RESERVED_KEY
from apscheduler_tasklock.schema.table import LONGEST_TEXT

try:
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
except ImportError:  # APScheduler 3.10 has none
    CalendarIntervalTrigger = None


# A job that was added without an id gets a random UUID in hex as its id from APScheduler. If the
# application itself gives a job an id of this form, the id also counts as random.
_RANDOM_ID = re.compile(r"[0-9a-fA-F]{32}")

# The version of the canonical form. The version is hashed with the form, and must be raised if the
# form changes.
_CANONICAL_FORM = 1

# Limits the depth of arguments with a canonical form, because a list may contain itself. Python's
# own recursion limit will not do, because it also counts the caller's frames, so that an argument
# could have a canonical form on one replica only.
_DEEPEST = 50


def is_unnamed(job: Any, jobstore: Any) -> bool:
    """Return whether a job's id may be random, so that the job has another id on each replica.

    A job in a persistent job store is never unnamed, because the store keeps its id. A job in a
    memory job store gets a new random id at every start.
    """
    return isinstance(jobstore, MemoryJobStore) and _RANDOM_ID.fullmatch(job.id) is not None


@dataclass(frozen=True)
class UnnamedTask:
    """The task of a job without an id. Its name is made of parts that all replicas have in common.

    :ivar name: the function's reference and a hash; ``""`` if ``own_because`` is set
    :ivar has_arguments: whether the hash is made of the arguments, too; ``False`` if some arguments
        have no canonical form
    :ivar is_one_off: whether the job runs once, at a date
    :ivar own_because: why no other replica can have this one-off job: the job has a part that
        differs between replicas or cannot be compared. ``None`` if another replica can have it.
    """

    name: str
    has_arguments: bool
    is_one_off: bool
    own_because: str | None = None

    @classmethod
    def of(cls, job: Any) -> UnnamedTask:
        """Return the task of a job without an id."""
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
        # `surrogatepass`, because the texts among the arguments may have lone surrogates.
        digest = hashlib.sha256(canonical_json(form).encode("utf-8", "surrogatepass")).hexdigest()
        name = f"{function_reference(job)}-{digest[:16]}"
        return cls(name, arguments is not None, is_one_off)


def _why_own(trigger: Any, function: Any, arguments: Any) -> str | None:
    """Return why no other replica can have the same one-off job; ``None`` if one can have it."""
    if type(trigger) is not DateTrigger:
        return f"its trigger is of the class {type(trigger).__qualname__}"
    if trigger.run_date.microsecond:
        return "its date has fractions of a second"
    if function is None:
        return "its function belongs to an object, or carries values that cannot be compared"
    return "its arguments cannot be compared" if arguments is None else None


def _canonical_function(function: Any, numbers: dict[int, int]) -> Any:
    """Return JSON-like data that identifies a function.

    :param numbers: a number for each function met so far, by its ``id()``. A function may carry
        itself as a captured variable, so a function that is met again is written as its number.
    :raises _NoCanonicalFormError: the function cannot be compared between replicas
    """
    if id(function) in numbers:
        return {"function": numbers[id(function)]}
    numbers[id(function)] = len(numbers)
    try:
        identity = identity_of(function)
    except Exception:  # noqa: BLE001  # whatever an application's own object raises
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
    """Reject a recurring job without an id whose task has the name of another job's task.

    Both jobs would have one lock, so that a run of one job would keep the other job from running.

    :param other: the other job, of the same scheduler
    :param task: the task of both jobs
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
    """Return the parts of a trigger that all replicas have in common, as JSON-like data.

    These parts are left out, because they may differ between replicas:

    - moments with microseconds. The default start of an interval and the default date of a date
      trigger are such moments, because they are the time at which the trigger was made. Users do
      not write microseconds.
    - the start date of a calendar interval. Its default is today, which looks like a date that a
      user has given.
    - time zones. The default is that of the machine.

    If these parts were in the name of a task, each replica would have another task for the same
    job, and the job would run on every replica. Without them, two jobs that differ only in these
    parts get one name, and the second job is rejected with a message.

    Of a custom trigger only the class is compared.
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
            "parts": sorted(map(canonical_trigger, trigger.triggers), key=canonical_json),
            "jitter": _jitter(trigger),
        }
    return {"class": f"{kind.__module__}:{kind.__qualname__}"}


def canonical_schedule(trigger: Any) -> str:
    """Return a trigger in canonical form as text, for the task's row.

    A trigger of a hundred parts is too long for a row. So its class and a digest are returned,
    which still show whether the trigger has changed.
    """
    text = canonical_json(canonical_trigger(trigger))
    if len(text) <= LONGEST_TEXT:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    kind = type(trigger)
    return canonical_json({"class": f"{kind.__module__}:{kind.__qualname__}", "digest": digest})


def exact_schedule(trigger: Any) -> Any:
    """Return a trigger in canonical form with what that form leaves out, for operators.

    These are dates and ends with microseconds, the start of a calendar interval, and the time zones
    of the parts of a combination in several time zones. ``None`` is returned if the canonical form
    and the trigger's time zone tell the same, or if the form is too long for a row.
    """
    if type(trigger) is DateTrigger:
        return None
    form = _exact(trigger, with_zone=zone_of(trigger) is None)
    text = canonical_json(form)
    # Half of the limit, because the row's column has the job's options, too.
    if text == canonical_json(canonical_trigger(trigger)) or len(text) > LONGEST_JSON // 2:
        return None
    return form


def _exact(trigger: Any, *, with_zone: bool) -> Any:
    form = canonical_trigger(trigger)
    if "parts" in form:
        parts = [_exact(part, with_zone=with_zone) for part in trigger.triggers]
        return {**form, "parts": sorted(parts, key=canonical_json)}
    for name, attribute in (("end", "end_date"), ("run", "run_date")):
        moment = getattr(trigger, attribute, None)
        if name in form and isinstance(moment, datetime):
            form[name] = _canonical_datetime(moment)
    if form.get("type") == "calendarinterval":
        form["start"] = trigger.start_date.isoformat()
    if with_zone and "class" not in form:
        form["zone"] = zone_of(trigger)
    return form


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
    """An argument or a function has no canonical form."""


def _canonical(value: Any, depth: int) -> Any:
    """Return an argument as JSON-like data, which differ if the values differ.

    A value of a subclass, for example of ``int``, has no canonical form, because the subclass
    decides which values it equals.

    :param depth: in how many containers the argument is
    :raises _NoCanonicalFormError: the argument has no canonical form
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
        return {"set": sorted((_canonical(part, depth + 1) for part in value), key=canonical_json)}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _canonical(part, depth + 1) for key, part in value.items()}}
    raise _NoCanonicalFormError


def _canonical_datetime(moment: datetime) -> str:
    """Return a moment as text; in UTC if it has a zone, because machines have different zones."""
    if moment.utcoffset() is None:
        return moment.isoformat()
    try:
        return moment.astimezone(timezone.utc).isoformat()
    except OverflowError:  # in UTC the moment is before the year 1, or after the year 9999
        return moment.isoformat()


def _elapsed(length: timedelta) -> list[int]:
    return [length.days, length.seconds, length.microseconds]


# The canonical forms of values that are no containers. Integers are written in hex, because Python
# limits the number of digits of an integer that is written in decimal.
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
    """Return a trigger's moment as text; ``None`` if it has microseconds.

    A moment with microseconds is left out, as :func:`canonical_trigger` says.
    """
    return None if moment is None or moment.microsecond else _canonical_datetime(moment)


def _jitter(trigger: Any) -> float:
    """Return the maximum jitter of a trigger, in seconds."""
    jitter = trigger.jitter
    return float(jitter) if isinstance(jitter, (int, float)) else 0.0
