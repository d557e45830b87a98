"""The next run times of a task that the command ``show`` computes from the task's row."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import date, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._lock.schedules import schedule_of, with_exact_times
from apscheduler_tasklock._runs.task_names import canonical_schedule, exact_schedule
from apscheduler_tasklock._runs.trigger_times import following_run_time, zone_of
from apscheduler_tasklock._words import next_run_times as words
from apscheduler_tasklock._words.next_run_times import end_of
from apscheduler_tasklock.cli.output import PlainOutput
from apscheduler_tasklock.cli.status import TaskHistory, print_task
from apscheduler_tasklock.status import TaskStatus
from tests.support.rows import task_status

try:
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
except ImportError:  # APScheduler 3.10 has no calendar interval trigger
    CalendarIntervalTrigger = None

BERLIN, TOKYO = ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Tokyo")
# The first run times after this one cross a change of the clocks.
NOW = datetime(2099, 3, 28, 12, tzinfo=BERLIN)
# The rows are read before all run times.
READ_AT = datetime(2098, 12, 31, tzinfo=timezone.utc)
# As of a trigger's end that counts from the time at which a replica has made the trigger.
FRACTION = timedelta(microseconds=250)
OFFSET = timezone(-timedelta(hours=3, minutes=30))


def next_run_times(task: TaskStatus) -> list[datetime]:
    return words.next_run_times(task, READ_AT)


def task(trigger: Any, due_at: datetime | None, zone: str | None = None) -> TaskStatus:
    """Return a task as its row tells it after a replica has registered a job with a trigger."""
    found = TaskStatus.__new__(TaskStatus)
    details = {"schedule": exact_schedule(trigger)}
    values = {
        "due_at": due_at and due_at.astimezone(timezone.utc),
        "schedule": with_exact_times(json.loads(canonical_schedule(trigger)), details),
        "zone": zone or zone_of(trigger),
    }
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


def in_utc(moments: Sequence[datetime]) -> list[datetime]:
    """Return times in UTC, since times of one zone are compared as clocks show them."""
    return [each.astimezone(timezone.utc) for each in moments]


def trigger_zone(trigger: Any) -> tzinfo:
    found: tzinfo = getattr(trigger, "timezone", BERLIN)
    return found


def cron(zone: tzinfo = BERLIN, **fields: Any) -> CronTrigger:
    return CronTrigger(**fields, timezone=zone)


TRIGGERS = {
    "cron": cron(hour=4, minute=30),
    "cron at an offset": cron(OFFSET, day="last", hour="9-17/4"),
    "cron in UTC": cron(timezone.utc, minute="*/7", second=3),
    "interval": IntervalTrigger(hours=5, seconds=0.25, start_date=NOW, timezone=BERLIN),
    "or": OrTrigger([cron(hour=4, minute=30), cron(day_of_week="mon", hour=4)]),
    "and": AndTrigger([cron(hour="4,5", minute=30), cron(day_of_week="mon", hour="*", minute=30)]),
    "cron with an end": CronTrigger(hour=3, end_date=NOW + timedelta(days=3), timezone=BERLIN),
    "interval with an end": IntervalTrigger(
        hours=20, start_date=NOW, end_date=NOW + timedelta(days=3), timezone=BERLIN
    ),
    "cron with an end with a fraction": CronTrigger(
        hour=3, end_date=NOW + timedelta(days=3) + FRACTION, timezone=BERLIN
    ),
    "interval with an end with a fraction": IntervalTrigger(
        hours=20, start_date=NOW, end_date=NOW + timedelta(days=3) + FRACTION, timezone=BERLIN
    ),
    "or with a part that ends first": OrTrigger(
        [
            cron(hour=4, minute=30),
            CronTrigger(hour=5, end_date=NOW + timedelta(days=2) + FRACTION, timezone=BERLIN),
        ]
    ),
    "or in two zones": OrTrigger([cron(hour=4, minute=30), cron(TOKYO, hour=4)]),
    "or of two that differ in their zones": OrTrigger([cron(hour=4), cron(TOKYO, hour=4)]),
    "or with a date": OrTrigger([DateTrigger(NOW + timedelta(days=1) + FRACTION), cron(hour=4)]),
    "cron in the hour that clocks skip": cron(hour=2, minute=30),
    "cron in and after the hour that clocks skip": cron(hour="2,4", minute="*/30"),
}
if CalendarIntervalTrigger is not None:
    TRIGGERS["calendar"] = CalendarIntervalTrigger(
        months=1, hour=4, minute=30, start_date=date(2099, 1, 5), timezone=BERLIN
    )
    TRIGGERS["calendar with an end"] = CalendarIntervalTrigger(
        days=1, hour=4, end_date=date(2099, 3, 30), start_date=date(2099, 1, 5), timezone=BERLIN
    )


@pytest.mark.parametrize("trigger", TRIGGERS.values(), ids=TRIGGERS)
def test_are_those_that_apscheduler_computes(trigger: Any) -> None:
    if isinstance(trigger, IntervalTrigger) and CalendarIntervalTrigger is None:
        pytest.skip("APScheduler 3.10 counts an interval by the wall clock across a clock change")
    first = trigger.get_next_fire_time(None, NOW)
    expected = [first]
    while len(expected) < 5:
        following = following_run_time(trigger, expected[-1], expected[-1])
        if following is None:
            break
        expected.append(following)
    found = next_run_times(task(trigger, first))
    assert in_utc(found) == in_utc(expected)
    zone = task(trigger, first).zone
    if zone is None:
        assert {each.utcoffset() for each in found} == {timedelta(0)}
    else:
        there = [each.astimezone(trigger_zone(trigger)) for each in in_utc(expected)]
        assert [str(each) for each in found] == [str(each) for each in there]


def test_a_run_time_that_clocks_have_moved_is_not_left_out() -> None:
    trigger = cron(hour=2, minute=30)
    moved = datetime(2099, 3, 29, 3, 30, tzinfo=BERLIN)
    assert in_utc([trigger.get_next_fire_time(None, NOW)]) == in_utc([moved])
    for late in (-0.02, 0, 0.02):
        found = next_run_times(task(trigger, moved + timedelta(seconds=late)))
        assert found[:2] == [moved, datetime(2099, 3, 30, 2, 30, tzinfo=BERLIN)]


JITTERED = {
    "cron": CronTrigger(hour=4, minute=30, jitter=600, timezone=BERLIN),
    "or": OrTrigger([cron(hour=4, minute=30), cron(day_of_week="mon", hour=4)], jitter=600),
}

if CalendarIntervalTrigger is not None:
    JITTERED["calendar"] = CalendarIntervalTrigger(
        months=1, hour=4, minute=30, start_date=date(2099, 1, 5), timezone=BERLIN, jitter=600
    )


@pytest.mark.parametrize("late", [0, 7, 420, 599])
@pytest.mark.parametrize("kind", JITTERED)
def test_jitter_is_left_out_and_the_due_run_is_not(kind: str, late: float) -> None:
    first = TRIGGERS[kind].get_next_fire_time(None, NOW)
    exact = next_run_times(task(TRIGGERS[kind], first))
    due_at = first + timedelta(seconds=late)
    assert exact[0] == first
    assert next_run_times(task(JITTERED[kind], due_at)) == exact


def test_a_job_that_was_moved_is_next_due_at_its_next_run_time() -> None:
    moved = datetime(2099, 4, 1, 5, tzinfo=BERLIN)
    found = next_run_times(task(TRIGGERS["cron"], moved))
    assert found[0] == datetime(2099, 4, 2, 4, 30, tzinfo=BERLIN)


def test_of_a_schedule_that_has_ended_there_are_none() -> None:
    ended = CronTrigger(hour=3, end_date=NOW - timedelta(days=9), timezone=BERLIN)
    assert next_run_times(task(ended, NOW)) == []


@pytest.mark.parametrize(
    ("trigger", "end"),
    [
        (TRIGGERS["cron"], None),
        (TRIGGERS["cron with an end"], NOW + timedelta(days=3)),
        (TRIGGERS["interval with an end with a fraction"], NOW + timedelta(days=3) + FRACTION),
        (TRIGGERS["or with a part that ends first"], None),
        (
            OrTrigger([TRIGGERS["cron with an end"], TRIGGERS["cron with an end with a fraction"]]),
            NOW + timedelta(days=3) + FRACTION,
        ),
        (AndTrigger([TRIGGERS["cron with an end"], cron(hour=3)]), NOW + timedelta(days=3)),
        (DateTrigger(NOW), None),
    ],
)
def test_the_end_of_a_schedule_is_known(trigger: Any, end: date | None) -> None:
    assert end_of(task(trigger, NOW).schedule) == end


@pytest.mark.skipif(CalendarIntervalTrigger is None, reason="APScheduler 3.10 has none")
def test_the_end_of_a_calendar_interval_is_a_day() -> None:
    assert end_of(task(TRIGGERS["calendar with an end"], NOW).schedule) == date(2099, 3, 30)


@pytest.mark.parametrize("schedule", [None, 5, {"type": "cron", "end": "2020-01-01T00:00:00"}])
def test_the_end_of_a_schedule_that_no_replica_writes_is_not_known(schedule: Any) -> None:
    assert end_of(schedule) is None


def test_the_words_of_a_schedule_with_several_zones_name_them() -> None:
    words = schedule_of(task(TRIGGERS["or of two that differ in their zones"], NOW))
    assert words == "(cron hour=4 minute=0 Asia/Tokyo) or (cron hour=4 minute=0 Europe/Berlin)"


@pytest.mark.parametrize(
    ("trigger", "zone", "words"),
    [
        (cron(hour=4), "Europe/Berlin", "cron hour=4 minute=0 Europe/Berlin"),
        (cron(hour=4), "Etc/UTC", "cron hour=4 minute=0 UTC"),
        (
            OrTrigger([cron(hour=4), IntervalTrigger(hours=5)]),
            "Europe/Berlin",
            "(cron hour=4 minute=0 Europe/Berlin) or (every 5 h)",
        ),
        (TRIGGERS["interval"], "Europe/Berlin", "every 5 h 0.25 s"),
    ],
)
def test_the_words_of_a_schedule_name_its_zone_if_its_times_depend_on_it(
    trigger: Any, zone: str, words: str
) -> None:
    assert schedule_of(task(trigger, NOW, zone)) == words


def test_the_words_of_a_schedule_whose_zone_is_not_known_name_none() -> None:
    row = task_status(schedule=json.loads(canonical_schedule(cron(hour=4))))
    assert schedule_of(row) == "cron hour=4 minute=0"


def test_details_of_a_schedule_before_do_not_count() -> None:
    schedule = json.loads(canonical_schedule(cron(hour=4)))
    details = {"schedule": exact_schedule(TRIGGERS["cron with an end with a fraction"])}
    assert with_exact_times(schedule, details) == schedule


def test_exact_times_that_are_too_long_for_a_row_are_left_out() -> None:
    parts = [cron(hour=4, minute=minute % 60) for minute in range(999)]
    assert exact_schedule(OrTrigger([*parts, cron(TOKYO, hour=4)])) is None


@pytest.mark.parametrize(
    "details", [None, [], 5, {}, *({"schedule": odd} for odd in (5, None, [], {"end": 5}))]
)
def test_details_that_no_replica_writes_are_left_out(details: Any) -> None:
    schedule = json.loads(canonical_schedule(cron(hour=4)))
    assert with_exact_times(schedule, details) == schedule


def test_a_due_time_that_is_not_exact_leaves_no_run_time_out() -> None:
    first = TRIGGERS["cron"].get_next_fire_time(None, NOW)
    exact = next_run_times(task(TRIGGERS["cron"], first))
    for late in (-0.02, 0.02):
        assert next_run_times(task(TRIGGERS["cron"], first + timedelta(seconds=late))) == exact


def test_of_a_task_that_is_late_they_are_still_to_come() -> None:
    every = IntervalTrigger(hours=1, timezone=timezone.utc)
    due_at = READ_AT - timedelta(minutes=90)
    found = next_run_times(task(every, due_at))
    assert found == [due_at + timedelta(hours=hours) for hours in range(2, 7)]


def test_one_that_is_due_when_clocks_skip_an_hour_is_not_left_out() -> None:
    skip = datetime(2099, 3, 29, 1, tzinfo=timezone.utc)
    every = IntervalTrigger(minutes=30, start_date=NOW, timezone=BERLIN)
    found = in_utc(next_run_times(task(every, skip)))
    assert found == [skip + number * timedelta(minutes=30) for number in range(5)]


def test_of_a_one_off_job_there_is_one() -> None:
    assert next_run_times(task(DateTrigger(NOW), NOW, "UTC")) == [NOW]


@pytest.mark.parametrize(
    "unknown",
    [
        task(TRIGGERS["cron"], None),
        task(TRIGGERS["cron"], NOW, "Europe"),
        task(TRIGGERS["cron"], NOW, "../../etc/passwd"),
        task(TRIGGERS["cron"], NOW, "UTC+99:00"),
        task(OrTrigger([cron(hour=1), IntervalTrigger(hours=1, timezone=BERLIN)]), NOW),
        task(AndTrigger([cron(hour=1), cron(hour=2)]), NOW),
    ],
    ids=[
        "due",
        "a folder",
        "a path",
        "an offset",
        "an interval in it",
        "never agrees",
    ],
)
def test_if_they_are_not_known_there_are_none(unknown: TaskStatus) -> None:
    assert next_run_times(unknown) == []


@pytest.mark.skipif(CalendarIntervalTrigger is None, reason="APScheduler 3.10 has none")
def test_with_a_calendar_interval_in_it_they_are_not_known() -> None:
    assert next_run_times(task(OrTrigger([cron(hour=1), TRIGGERS["calendar"]]), NOW)) == []


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


def shown(trigger: Any, due_at: datetime, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what ``show`` prints of a task."""
    found = task(trigger, due_at)
    row = task_status(schedule=found.schedule, zone=found.zone, due_at=found.due_at)
    print_task(row, TaskHistory(), [], READ_AT, PlainOutput(), None, "task_lock")
    return capsys.readouterr().out


def test_no_run_time_after_the_end_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Such an end is not the same on all replicas, so the row's schedule does not have it."""
    end = datetime(2099, 3, 28, 13, tzinfo=timezone.utc) + FRACTION
    every = IntervalTrigger(hours=6, start_date=NOW, end_date=end, timezone=timezone.utc)
    told = shown(every, NOW, capsys)
    assert "next runs    2099-03-28 11:00:00 UTC\n" in told
    assert "schedule     every 6 h until 2099-03-28T13:00:00Z\n" in told


def test_those_of_a_schedule_with_several_zones_are_shown_in_utc(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = [CronTrigger(hour=3, timezone=zone) for zone in ("Asia/Tokyo", "Africa/Lagos")]
    told = shown(OrTrigger(parts), datetime(2099, 3, 28, 18, tzinfo=timezone.utc), capsys)
    assert "next runs    2099-03-28 18:00:00, 2099-03-29 02:00:00, 2099-03-29 18:00:00, " in told
    assert "(cron hour=3 minute=0 Africa/Lagos) or (cron hour=3 minute=0 Asia/Tokyo)" in told
