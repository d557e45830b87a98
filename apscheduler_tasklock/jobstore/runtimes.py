"""Which run time of a job is due, and which one follows: each once per hand-out, and in bounds."""

from __future__ import annotations

from datetime import datetime, timezone
from math import floor
from typing import Any

from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._scheduler.triggers import OutOfStepsError, Steps, following_run_time

# The most steps in which run times are walked that are due together. The rest is for the next time.
MOST_STEPS = 10_000


def due_run_time(
    trigger: Any,
    first: datetime,
    now: datetime,
    *,
    coalesce: bool,
    missed_before: datetime | None = None,
) -> tuple[datetime, datetime | None]:
    """Return the run time that is to be run, and the one that follows it, if there is one.

    :param first: the job's next run time, which is due
    :param now: the database's time
    :param coalesce: whether the last run time that is due stands for all of them; else it is the
        first, and the one that follows may be due as well
    :param missed_before: run times before it are not run. The last of them stands for all of them.
    :raises EndlessTriggerError: the next run time cannot be found within bounds
    :raises Exception: whatever a custom trigger raises
    """
    latest = now if coalesce else missed_before
    if latest is None or latest.timestamp() <= first.timestamp():
        return first, following_run_time(trigger, first, now)
    run_time = first
    if type(trigger) is IntervalTrigger and not trigger.jitter:
        run_time = _last_of_interval(trigger, first, latest)
    following, steps = following_run_time(trigger, run_time, now), Steps(MOST_STEPS)
    while following is not None and following.timestamp() <= latest.timestamp():
        try:
            later = following_run_time(trigger, following, now, steps)
        except OutOfStepsError:  # the rest is for the next time
            break
        run_time, following = following, later
    return run_time, following


def _last_of_interval(trigger: Any, first: datetime, latest: datetime) -> datetime:
    """Return the last run time of an interval up to a time, without a walk."""
    if trigger.end_date is not None and trigger.end_date.timestamp() < latest.timestamp():
        latest = trigger.end_date
    passed = floor((latest.timestamp() - first.timestamp()) / trigger.interval_length)
    if passed < 1:
        return first
    # In elapsed time: local times skip or repeat an hour twice a year.
    last: datetime = first.astimezone(timezone.utc) + passed * trigger.interval
    return last.astimezone(first.tzinfo)
