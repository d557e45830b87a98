"""The run times of a task, from its row: when it is due, its schedule and its time zone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from apscheduler_tasklock._lock.schedules import NO_FORM
from apscheduler_tasklock.status import TaskState, TaskStatus

# How many run times are shown.
COUNT = 5

# An offset from UTC, as Python spells the zones that have no name.
_OFFSET = re.compile(r"UTC(?:([+-])(\d\d):(\d\d))?")

# A due time that a replica has registered is later than the run time by what its statement took.
_SLACK = timedelta(seconds=0.5)

# Triggers have no run times after this time; see `_runs/trigger_times.py`.
_END = datetime(9000, 1, 1, tzinfo=timezone.utc)


def next_run_times(task: TaskStatus, now: datetime) -> list[datetime]:
    """Return a task's next run times without jitter, in the time zone of its schedule.

    There are none if it is not known when the task is due, if the schedule has ended or is not one
    of APScheduler's own triggers, if its time zone is not known here, or if APScheduler is not
    installed. The times of a schedule with several time zones are in UTC.

    :param now: the time by the database's clock
    """
    if task.due_at is None or not isinstance(task.schedule, Mapping):
        return []
    try:
        from apscheduler_tasklock._runs.trigger_times import EndlessTriggerError
    except ImportError:
        return []
    try:
        has_several = task.zone is None and "parts" in task.schedule
        zone = timezone.utc if has_several else _zone(task.zone)
        trigger = _trigger(task.schedule, None if has_several else zone, task.due_at)
        found = _times_of(trigger, task.due_at.astimezone(zone), now)
    except (*NO_FORM, OSError, EndlessTriggerError):  # OSError: a time zone "Europe" is a folder
        return []
    # By way of UTC, because a run time in an hour that clocks skip is a later one.
    return [each.astimezone(timezone.utc).astimezone(zone) for each in found]


def due_of(task: TaskStatus, now: datetime) -> datetime | None:
    """Return when a task is due, as it is told.

    A due time in a pause, or for which a run was in the way, is run by nobody. So the next run time
    is told in place of it, if it is known.

    :param now: the time by the database's clock
    """
    due_at = task.due_at
    if due_at is None or due_at > now:
        return due_at
    is_taken = task.finished_at is None and due_at < task.locked_until
    is_taken |= task.paused or task.state is TaskState.PAUSED
    return next(iter(next_run_times(task, now)), None) if is_taken else due_at


def _times_of(trigger: Any, due_at: datetime, now: datetime) -> Sequence[datetime]:
    """Return a trigger's next run times, and first of all that of the run that is due.

    :raises EndlessTriggerError: they take too long to compute
    """
    from apscheduler.triggers.interval import IntervalTrigger

    from apscheduler_tasklock._runs.trigger_times import (
        nominal_time_due,
        run_times_after,
        run_times_between,
    )

    if due_at < now:
        return run_times_between(trigger, now.astimezone(due_at.tzinfo), _END, COUNT)
    if not isinstance(trigger, IntervalTrigger):
        first = nominal_time_due(trigger, due_at, _SLACK)
        if first is not None:
            return [first, *run_times_after(trigger, first, _END, COUNT - 1)]
    # By way of UTC, because that moment may be in an hour that clocks skip.
    since = (due_at.astimezone(timezone.utc) - _SLACK).astimezone(due_at.tzinfo)
    return run_times_between(trigger, since, _END, COUNT)


def run_times_between(
    task: TaskStatus, since: datetime, until: datetime, most: int
) -> list[datetime] | None:
    """Return a task's nominal run times from ``since`` on and until ``until``, in UTC.

    ``None`` if they are not exactly known: as of :func:`next_run_times`, of an interval whose start
    each replica has for itself, and of an interval with jitter.

    :param most: limits how many are returned; one more is returned if there are more
    """
    try:
        from apscheduler_tasklock._runs.trigger_times import (
            EndlessTriggerError,
            StepBudget,
            following_run_time,
        )
        from apscheduler_tasklock._runs.trigger_times import run_times_between as between
    except ImportError:
        return None
    try:
        form = task.schedule
        has_several = task.zone is None and "parts" in form
        zone = timezone.utc if has_several else _zone(task.zone)
        if form["type"] == "interval" and form["jitter"]:
            return None
        trigger = _trigger(
            _without_jitter(form), None if has_several else zone, _start(form, task.due_at, zone)
        )
        end = until + timedelta(microseconds=1)
        first = between(trigger, since.astimezone(zone), end, 1)
        found, steps = list(first), StepBudget()
        while found and len(found) <= most:
            following = following_run_time(trigger, found[-1], found[-1], steps)
            if following is None or following.timestamp() > until.timestamp():
                break
            found.append(following)
    except (*NO_FORM, OSError, EndlessTriggerError):
        return None
    return [each.astimezone(timezone.utc) for each in found]


def _start(form: Mapping[str, Any], due_at: datetime | None, zone: tzinfo) -> datetime:
    """Return a time from which a schedule's run times can be computed.

    :raises ValueError: it is not known
    """
    start: datetime | None = datetime(1970, 1, 1, tzinfo=timezone.utc)  # of a cron trigger
    if form["type"] == "date":
        start = _moment(form["run"]) or due_at
    elif form["type"] == "interval":
        start = _moment(form["start"])
    elif form["type"] == "calendarinterval":
        start = datetime.combine(date.fromisoformat(form["start"]), time(12), zone)
    if start is None:
        raise ValueError("each replica has a start of its own")
    return start


def _without_jitter(form: Mapping[str, Any]) -> dict[str, Any]:
    plain = {**form, "jitter": None}
    if "parts" in form:
        plain["parts"] = [_without_jitter(part) for part in form["parts"]]
    return plain


def end_of(schedule: Any) -> datetime | date | None:
    """Return the end of a schedule, after which it has no run time; ``None`` if it has none.

    :param schedule: a ``TaskStatus.schedule``
    """
    try:
        if schedule["type"] in ("and", "or"):
            return _end_of_parts(schedule)
        if schedule["type"] == "calendarinterval":
            return schedule["end"] and date.fromisoformat(schedule["end"])
        return _moment(schedule["end"])
    except NO_FORM:
        return None


def _end_of_parts(schedule: Mapping[str, Any]) -> datetime | date | None:
    ends = [end_of(part) for part in schedule["parts"]]
    known = [end for end in ends if isinstance(end, datetime)]
    if schedule["type"] == "and":
        return min(known, default=None)
    return max(known) if len(known) == len(ends) else None


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return moment


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


def _trigger(
    form: Mapping[str, Any], zone: tzinfo | None, start: datetime, *, is_part: bool = False
) -> Any:
    """Return the trigger that has this canonical form, and has a run at a time.

    :param zone: its time zone; ``None``: each part of it has its own
    :param start: a run time of an interval and of a date; a time on a day of a calendar interval
    :param is_part: whether it is a part of a combination, and another part may be due
    :raises Exception: there is none; see ``NO_FORM``
    """
    from apscheduler.triggers.combining import AndTrigger, OrTrigger
    from apscheduler.triggers.cron import CronTrigger
    from apscheduler.triggers.date import DateTrigger
    from apscheduler.triggers.interval import IntervalTrigger

    kind = form["type"]
    if kind in ("and", "or"):
        combine = AndTrigger if kind == "and" else OrTrigger
        parts = [_trigger(part, zone, start, is_part=True) for part in form["parts"]]
        return combine(parts, jitter=form["jitter"])
    if kind == "date":
        run = _moment(form["run"]) if is_part else start
        if run is None:  # APScheduler would take the time now
            raise ValueError("the date of a part is not known")
        return DateTrigger(run)
    if is_part and kind != "cron":
        raise ValueError("it is not known since when an interval in a combination counts")
    zone = _zone(form["zone"]) if zone is None else zone
    end = None if kind == "calendarinterval" else _moment(form["end"])
    if kind == "interval":
        days, seconds, microseconds = form["length"]
        length = timedelta(days=days, seconds=seconds, microseconds=microseconds)
        exact = length.total_seconds()
        return IntervalTrigger(seconds=exact, start_date=start, end_date=end, timezone=zone)
    if kind == "cron":
        fields, jitter = form["fields"], form["jitter"]
        return CronTrigger(**fields, end_date=end, timezone=zone, jitter=jitter)
    if kind != "calendarinterval":
        raise ValueError(f"unknown trigger {kind!r}")
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger

    lengths = dict(zip(("years", "months", "weeks", "days"), form["length"], strict=True))
    times = dict(zip(("hour", "minute", "second"), form["time"], strict=True))
    return CalendarIntervalTrigger(
        **lengths,
        **times,
        start_date=start.astimezone(zone).date(),
        end_date=form["end"] and date.fromisoformat(form["end"]),
        timezone=zone,
        jitter=form["jitter"],
    )
