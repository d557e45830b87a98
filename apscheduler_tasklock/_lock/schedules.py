"""A task's schedule in words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timedelta, timezone
from typing import Any

from apscheduler_tasklock._lock.json_columns import canonical_json, read_json
from apscheduler_tasklock._lock.words import printable, seconds_in_words
from apscheduler_tasklock.status import TaskStatus

# From coarse to fine, because people read times in this order.
_CRON_FIELDS = ("year", "month", "day", "week", "day_of_week", "hour", "minute", "second")

# APScheduler's defaults of the fields that are finer than all given fields. The default of any
# other field is `*`.
_CRON_DEFAULTS = {"month": "1", "day": "1", "hour": "0", "minute": "0", "second": "0"}

# The errors that a form with a wrong type, name or size causes. These errors are caught, because
# anybody may have written the row.
NO_FORM = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)

# Which name of UTC a trigger has depends on its machine.
_NAMES_OF_UTC = ("Etc/UTC", "Etc/UCT", "Etc/Universal", "Etc/Zulu", "UCT", "Universal", "Zulu")

_CALENDAR_UNITS = ("year", "month", "week", "day")


def schedule_of(task: TaskStatus) -> str:
    """Return a task's schedule in words, with its time zone; ``-`` if the row has none."""
    if task.schedule is None:
        return "hold" if task.kind == "hold" else "-"
    return schedule_in_words(task.schedule, task.zone)


def with_exact_times(schedule: Any, details: Any) -> Any:
    """Return a trigger's canonical form with the times and zones that the form leaves out.

    :param details: the row's ``details``. A replica that claims by a changed schedule writes the
        schedule before the details, so the details may belong to the schedule before.
    """
    try:
        exact = details["schedule"]
        return exact if _without_exact_times(exact) == schedule else schedule
    except NO_FORM:
        return schedule


def _without_exact_times(exact: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("zone", "start") if exact.get("type") == "calendarinterval" else ("zone",)
    form = {name: value for name, value in exact.items() if name not in left_out}
    for name in ("end", "run"):
        if "." in (form.get(name) or ""):  # a fraction of a second
            form[name] = None
    if "parts" in form:
        parts = [_without_exact_times(part) for part in exact["parts"]]
        form["parts"] = sorted(parts, key=canonical_json)
    return form


def schedule_in_words(schedule: Any, zone: str | None = None) -> str:
    """Return a trigger's canonical form in words.

    :param schedule: a ``TaskStatus.schedule``. A form that this version does not know is returned
        as JSON.
    :param zone: the name of its time zone; ``None``: it is not known, or each part has its own
    """
    try:
        return printable(_words(_in_zone(schedule, zone)))
    except NO_FORM:
        return printable(json.dumps(schedule))


def _in_zone(form: Mapping[str, Any], zone: str | None) -> Mapping[str, Any]:
    """Return a form whose parts have a time zone, if they have none of their own."""
    if "parts" in form:
        return {**form, "parts": [_in_zone(part, zone) for part in form["parts"]]}
    return {"zone": zone, **form}


def schedule_text_in_words(text: str) -> str:
    """Return a trigger's canonical form in words.

    :param text: the form as text, as in the task's row
    """
    try:
        return schedule_in_words(read_json(text))
    except ValueError:
        return printable(text)


def stored_trigger_in_words(trigger: Any) -> str:
    """Return a trigger of the job store in words.

    :param trigger: a ``JobStatus.trigger``. A form that this version does not know is returned as
        JSON.
    """
    try:
        return printable(_words(_canonical(trigger)))
    except NO_FORM:
        is_pickled = isinstance(trigger, dict) and "pickle" in trigger
        return "pickled" if is_pickled else printable(json.dumps(trigger))


def _canonical(trigger: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a stored trigger in the form that tasks' rows have, with its time zone."""
    form = {**trigger, "end": trigger.get("end_date"), "zone": trigger.get("timezone")}
    if trigger["type"] == "cron":
        return {**form, "fields": _all_fields(trigger["fields"])}
    if trigger["type"] == "date":
        return {**form, "run": trigger["run_date"]}
    if trigger["type"] in ("and", "or"):
        return {**form, "parts": [_canonical(part) for part in trigger["triggers"]]}
    return form


def _all_fields(given: Mapping[str, str]) -> dict[str, str]:
    """Return a cron trigger's given fields, and APScheduler's defaults of all finer fields."""
    finest = max((_CRON_FIELDS.index(name) for name in given), default=len(_CRON_FIELDS))
    defaults = {name: _CRON_DEFAULTS.get(name, "*") for name in _CRON_FIELDS[finest + 1 :]}
    return {**defaults, **given}


def _words(form: Mapping[str, Any]) -> str:
    if "class" in form:
        return f"custom trigger {form['class'].partition(':')[2]}"
    return _KINDS[form["type"]](form) + _end(form) + _jitter(form)


def _interval(form: Mapping[str, Any]) -> str:
    days, seconds, microseconds = form["length"]
    return f"every {_exactly(days * 86400 + seconds + microseconds / 1e6)}"


def _exactly(seconds: float) -> str:
    """Return a duration with all its units, because a period must not be rounded."""
    words, left = [], seconds
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        count, left = divmod(left, size)
        if count:
            words.append(f"{count:.0f} {unit}")
    if left or not words:
        words.append(f"{round(left, 6):.10g} s")
    return " ".join(words)


def _cron(form: Mapping[str, Any]) -> str:
    fields = form["fields"]
    shown = {name: fields[name] for name in _CRON_FIELDS if fields.get(name, "*") != "*"}
    if shown.get("second") == "0":
        del shown["second"]
        # Readers take fields finer than the last shown field for 0, so show a minute of `*`.
        if fields.get("minute", "*") == "*":
            shown["minute"] = "*"
    if not shown:
        shown["second"] = "*"
    return " ".join(["cron", *(f"{name}={value}" for name, value in shown.items())]) + _zone(form)


def _date(form: Mapping[str, Any]) -> str:
    return f"once at {_moment(form['run'])}" if form["run"] else "once"


def _calendar_interval(form: Mapping[str, Any]) -> str:
    lengths = zip(form["length"], _CALENDAR_UNITS, strict=True)
    words = [f"{count} {unit}{'s' * (count > 1)}" for count, unit in lengths if count]
    hour, minute, second = form["time"]
    seconds = f":{second:02}" if second else ""
    return f"every {' '.join(words)} at {hour:02}:{minute:02}{seconds}" + _zone(form)


def _combined(form: Mapping[str, Any]) -> str:
    between = f" {form['type']} "
    parts = (_words(part) for part in form["parts"])
    return between.join(f"({part})" for part in parts)


def _zone(form: Mapping[str, Any]) -> str:
    """Return the time zone of a trigger whose run times depend on it; ``""`` if it has none."""
    zone = form.get("zone")
    if not zone:
        return ""
    if zone.lstrip("-").isdigit():  # an offset, in microseconds
        zone = str(timezone(timedelta(microseconds=int(zone))))
    return f" {shown_zone(zone)}"


def shown_zone(zone: str) -> str:
    """Return the name of a time zone as it is shown: one name for UTC, which has several."""
    return "UTC" if zone in _NAMES_OF_UTC else zone


def _end(form: Mapping[str, Any]) -> str:
    return f" until {_moment(form['end'])}" if form.get("end") else ""


def _jitter(form: Mapping[str, Any]) -> str:
    jitter = form.get("jitter")
    return f" + up to {seconds_in_words(jitter)}" if jitter else ""


def _moment(moment: str) -> str:
    """Return a time of a trigger without the fraction of its second."""
    return re.sub(r"\.[0-9]+", "", moment).replace("+00:00", "Z")


_KINDS = {
    "interval": _interval,
    "cron": _cron,
    "date": _date,
    "calendarinterval": _calendar_interval,
    "and": _combined,
    "or": _combined,
}
