"""The next run times of a task, from its row: when it is due, its schedule and its time zone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from apscheduler_tasklock._lock.schedules import NO_FORM
from apscheduler_tasklock.status import TaskStatus

# How many run times are shown.
COUNT = 5

# An offset from UTC, as Python spells the zones that have no name.
_OFFSET = re.compile(r"UTC(?:([+-])(\d\d):(\d\d))?")

# A due time that a replica has registered is later than the run time by what its statement took.
_SLACK = timedelta(seconds=0.5)

# Triggers have no run times after this time; see `_runs/trigger_times.py`.
_END = datetime(9000, 1, 1, tzinfo=timezone.utc)


def next_run_times(task: TaskStatus) -> list[datetime]:
    """Return a task's next run times without jitter, in the time zone of its schedule.

    There are none if it is not known when the task is due, if the schedule is not one of
    APScheduler's own triggers, if its time zone is not known here, or if APScheduler is not
    installed.
    """
    if task.due_at is None or not isinstance(task.schedule, Mapping):
        return []
    try:
        from apscheduler_tasklock._runs.trigger_times import run_times_between
    except ImportError:
        return []
    try:
        zone = _zone(task.zone)
        now = datetime.now(timezone.utc)
        since = now if task.due_at < now else task.due_at - _SLACK
        trigger = _trigger(task.schedule, zone, task.due_at.astimezone(zone))
        found = run_times_between(trigger, since.astimezone(zone), _END, COUNT)
    except (*NO_FORM, OSError):  # such as OSError for the time zone "Europe", which is a folder
        return []
    return list(found)


def _zone(name: str | None) -> tzinfo:
    """Return a time zone by the name that a replica has written.

    :raises ValueError: there is none
    """
    offset = _OFFSET.fullmatch(name or "")
    if offset is None:
        return ZoneInfo(name or "")
    sign, hours, minutes = offset.groups()
    if sign is None:
        return timezone.utc
    length = timedelta(hours=int(hours), minutes=int(minutes))
    return timezone(-length if sign == "-" else length)


def _trigger(form: Mapping[str, Any], zone: tzinfo, due_at: datetime) -> Any:
    """Return the trigger that has this canonical form, and is due at a time.

    :raises Exception: there is none; see ``NO_FORM``
    """
    from apscheduler.triggers.combining import AndTrigger, OrTrigger
    from apscheduler.triggers.cron import CronTrigger
    from apscheduler.triggers.date import DateTrigger
    from apscheduler.triggers.interval import IntervalTrigger

    kind = form["type"]
    if kind in ("and", "or"):
        if any(part["type"] == "interval" for part in form["parts"]):
            raise ValueError("it is not known since when an interval in a combination counts")
        combine = AndTrigger if kind == "and" else OrTrigger
        return combine([_trigger(part, zone, due_at) for part in form["parts"]])
    if kind == "date":
        return DateTrigger(due_at)
    end = form["end"] and datetime.fromisoformat(form["end"])
    if kind == "interval":
        days, seconds, microseconds = form["length"]
        length = timedelta(days=days, seconds=seconds, microseconds=microseconds)
        exact = length.total_seconds()
        return IntervalTrigger(seconds=exact, start_date=due_at, end_date=end, timezone=zone)
    if kind == "cron":
        return CronTrigger(**form["fields"], end_date=end, timezone=zone)
    if kind != "calendarinterval":
        raise ValueError(f"unknown trigger {kind!r}")
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger

    lengths = dict(zip(("years", "months", "weeks", "days"), form["length"], strict=True))
    times = dict(zip(("hour", "minute", "second"), form["time"], strict=True))
    return CalendarIntervalTrigger(
        **lengths,
        **times,
        start_date=due_at.date(),
        end_date=form["end"] and date.fromisoformat(form["end"]),
        timezone=zone,
    )
