"""The next run times of a task that the command ``show`` computes from the task's row."""

from __future__ import annotations

import json
import sys
from datetime import date, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._runs.task_names import canonical_schedule
from apscheduler_tasklock._runs.trigger_times import following_run_time, zone_of
from apscheduler_tasklock.cli.next_run_times import next_run_times
from apscheduler_tasklock.status import TaskStatus

BERLIN = ZoneInfo("Europe/Berlin")
# The first run times after this one cross a change of the clocks.
NOW = datetime(2099, 3, 28, 12, tzinfo=BERLIN)
OFFSET = timezone(-timedelta(hours=3, minutes=30))


def task(trigger: Any, due_at: datetime | None, zone: str | None = None) -> TaskStatus:
    """Return a task as its row tells it after a replica has registered a job with a trigger."""
    found = TaskStatus.__new__(TaskStatus)
    values = {
        "due_at": due_at and due_at.astimezone(timezone.utc),
        "schedule": json.loads(canonical_schedule(trigger)),
        "zone": zone or zone_of(trigger),
    }
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


def cron(zone: tzinfo = BERLIN, **fields: Any) -> CronTrigger:
    return CronTrigger(**fields, timezone=zone)


TRIGGERS = {
    "cron": cron(hour=4, minute=30),
    "cron at an offset": cron(OFFSET, day="last", hour="9-17/4"),
    "cron in UTC": cron(timezone.utc, minute="*/7", second=3),
    "interval": IntervalTrigger(hours=5, seconds=0.25, start_date=NOW, timezone=BERLIN),
    "calendar": CalendarIntervalTrigger(
        months=1, hour=4, minute=30, start_date=date(2099, 1, 5), timezone=BERLIN
    ),
    "or": OrTrigger([cron(hour=4, minute=30), cron(day_of_week="mon", hour=4)]),
    "and": AndTrigger([cron(hour="4,5", minute=30), cron(day_of_week="mon", hour="*", minute=30)]),
    "cron with an end": CronTrigger(hour=3, end_date=NOW + timedelta(days=3), timezone=BERLIN),
    "interval with an end": IntervalTrigger(
        hours=20, start_date=NOW, end_date=NOW + timedelta(days=3), timezone=BERLIN
    ),
}


@pytest.mark.parametrize("trigger", TRIGGERS.values(), ids=TRIGGERS)
def test_are_those_that_apscheduler_computes(trigger: Any) -> None:
    first = trigger.get_next_fire_time(None, NOW)
    expected = [first]
    while len(expected) < 5:
        following = following_run_time(trigger, expected[-1], expected[-1])
        if following is None:
            break
        expected.append(following)
    found = next_run_times(task(trigger, first))
    assert found == expected
    assert [each.utcoffset() for each in found] == [each.utcoffset() for each in expected]


def test_jitter_is_left_out() -> None:
    plain = TRIGGERS["cron"]
    jittered = CronTrigger(hour=4, minute=30, jitter=600, timezone=BERLIN)
    first = plain.get_next_fire_time(None, NOW)
    assert next_run_times(task(jittered, first)) == next_run_times(task(plain, first))


def test_a_due_time_that_is_not_exact_leaves_no_run_time_out() -> None:
    first = TRIGGERS["cron"].get_next_fire_time(None, NOW)
    exact = next_run_times(task(TRIGGERS["cron"], first))
    for late in (-0.02, 0.02):
        assert next_run_times(task(TRIGGERS["cron"], first + timedelta(seconds=late))) == exact


def test_of_a_task_that_is_late_they_are_still_to_come() -> None:
    every = IntervalTrigger(hours=1, timezone=timezone.utc)
    due_at = datetime.now(timezone.utc) - timedelta(minutes=90)
    found = next_run_times(task(every, due_at))
    assert found == [due_at + timedelta(hours=hours) for hours in range(2, 7)]


def test_of_a_one_off_job_there_is_one() -> None:
    assert next_run_times(task(DateTrigger(NOW), NOW, "UTC")) == [NOW]


@pytest.mark.parametrize(
    "unknown",
    [
        task(TRIGGERS["cron"], None),
        task(TRIGGERS["cron"], NOW, "Europe"),
        task(TRIGGERS["cron"], NOW, "../../etc/passwd"),
        task(TRIGGERS["cron"], NOW, "UTC+99:00"),
        task(OrTrigger([cron(hour=1), cron(timezone.utc, hour=1)]), NOW),
        task(OrTrigger([cron(hour=1), IntervalTrigger(hours=1, timezone=BERLIN)]), NOW),
        task(AndTrigger([cron(hour=1), cron(hour=2)]), NOW),
    ],
    ids=["due", "a folder", "a path", "an offset", "zones", "an interval in it", "never agrees"],
)
def test_if_they_are_not_known_there_are_none(unknown: TaskStatus) -> None:
    assert next_run_times(unknown) == []


@pytest.mark.parametrize(
    "schedule",
    [
        *(None, [], {}, {"class": "myapp:Own"}, {"type": "moonrise", "end": None}),
        {"type": "cron"},
        {"type": "cron", "end": "soon", "fields": {"hour": "1"}},
        {"type": "cron", "end": None, "fields": {"hour": "99"}},
        {"type": "interval", "end": None, "length": [0, 10**30, 0]},
    ],
)
def test_of_a_schedule_that_no_replica_writes_there_are_none(schedule: Any) -> None:
    odd = task(TRIGGERS["cron"], NOW)
    object.__setattr__(odd, "schedule", schedule)
    assert next_run_times(odd) == []


def test_without_apscheduler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "apscheduler_tasklock._runs.trigger_times")
    monkeypatch.setitem(sys.modules, "apscheduler.triggers.combining", None)
    assert next_run_times(task(TRIGGERS["cron"], NOW)) == []
