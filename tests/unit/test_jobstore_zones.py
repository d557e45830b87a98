"""Stored jobs in every time zone that a user can write: they come back meaning the same.

What is compared is what a zone means, which are run times and moments, and not how it is called. A
job is stored here as its row has it: as JSON.
"""

from __future__ import annotations

import json
import time as time_module
from collections.abc import Callable, Iterator
from datetime import datetime, time, timedelta, timezone, tzinfo
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import pytz
import tzlocal
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger
from dateutil import tz
from hypothesis import given, settings
from hypothesis import strategies as st

from apscheduler_tasklock import TaskLockOptionError
from apscheduler_tasklock.jobstore.definition import Definition, JobCodec
from apscheduler_tasklock.jobstore.stored_values import UnreadableError
from apscheduler_tasklock.jobstore.trust import AllowedFunctions
from tests.support.stored_jobs import note
from tests.support.zones import (
    HOSTILE,
    MOMENTS,
    TIMES,
    UNKNOWN,
    ZONES,
    Speechless,
    in_zone,
    run_times,
    times_in,
    triggers_in,
)

CODEC = JobCodec(AllowedFunctions(["tests."]))


def definition_of(trigger: Any, *, args: Any, **options: Any) -> Definition:
    """Return what the row of a job has."""
    scheduler = BackgroundScheduler(timezone="UTC")
    scheduler.start(paused=True)
    try:
        options = {"id": "job", "next_run_time": TIMES[0], **options}
        return CODEC.encode(scheduler.add_job(note, trigger, args=args, **options))
    finally:
        scheduler.shutdown()


def read(text: str) -> Any:
    """Return a job of a definition as text."""
    return SimpleNamespace(**CODEC.decode(Definition(**json.loads(text))))


def stored(trigger: Any = "date", *more: Any, args: Any = ("key",), **options: Any) -> Any:
    """Store a job, and return it as another replica gets it."""
    definition = definition_of(trigger, args=[*args, *more], **options)
    return read(json.dumps(definition.columns))


@pytest.mark.parametrize("zone", ZONES.values(), ids=ZONES)
class TestEveryZone:
    def test_triggers_come_back_with_their_run_times(self, zone: Any) -> None:
        for name, trigger in triggers_in(zone).items():
            again = stored(trigger).trigger
            assert type(again) is type(trigger)
            assert run_times(again, times_in(zone)) == run_times(trigger, times_in(zone)), name

    def test_moments_among_the_arguments_come_back(self, zone: Any) -> None:
        hours = [first + timedelta(hours=hour) for first in TIMES for hour in range(5)]
        moments = [in_zone(moment, zone) for moment in hours]
        again = stored("date", [moments, {"at": moments[0]}]).args[1]
        assert [moment.isoformat() for moment in again[0]] == [
            moment.isoformat() for moment in moments
        ]
        assert [moment.timestamp() for moment in again[0]] == [
            moment.timestamp() for moment in moments
        ]
        assert again[1] == {"at": moments[0]}


@pytest.mark.parametrize("zone", list(ZONES.values())[::8], ids=list(ZONES)[::8])
def test_triggers_with_jitter_come_back(zone: Any) -> None:
    for trigger in triggers_in(zone).values():
        if hasattr(trigger, "jitter"):
            trigger.jitter = 9
            again = stored(trigger).trigger
            assert again.jitter == 9
            again.jitter = trigger.jitter = None
            assert run_times(again, times_in(zone)) == run_times(trigger, times_in(zone))


@pytest.mark.parametrize("make_zone", UNKNOWN.values(), ids=UNKNOWN)
class TestZonesThatNobodyElseKnows:
    def test_a_trigger_is_rejected_and_says_what_to_pass(
        self, make_zone: Callable[[], tzinfo]
    ) -> None:
        for name, trigger in triggers_in(make_zone()).items():
            if "date" in name or name == "now":
                continue
            with pytest.raises(TaskLockOptionError) as raised:
                stored(trigger, args=["key"], id="job")
            assert "job 'job': the trigger cannot be stored: its time zone " in str(raised.value)
            assert "pass timezone='Europe/Berlin', or another name, to the" in str(raised.value)

    def test_an_argument_is_rejected_and_says_what_to_pass(
        self, make_zone: Callable[[], tzinfo]
    ) -> None:
        at = datetime(2027, 7, 1, 12, tzinfo=make_zone())
        for value in (at, at.timetz()):
            with pytest.raises(TaskLockOptionError) as raised:
                stored(args=["key", {"at": [value]}], id="job")
            assert "args[1]['at'][0] cannot be stored: its time zone " in str(raised.value)
            assert "pass one of zoneinfo.ZoneInfo by its name, or of datetime.timezone" in str(
                raised.value
            )

    def test_a_date_is_a_moment_all_the_same(self, make_zone: Callable[[], tzinfo]) -> None:
        at = datetime(2027, 7, 1, 12, tzinfo=make_zone())
        run_date = stored("date", run_date=at).trigger.run_date
        assert run_date == at
        assert run_date.isoformat() == at.isoformat()


def test_a_zone_that_has_no_answers_is_rejected() -> None:
    at = datetime(2027, 7, 1, 12, tzinfo=Speechless())
    with pytest.raises(TaskLockOptionError, match="args\\[1\\] cannot be stored: its time zone"):
        stored("date", run_date=TIMES[0], args=["key", at])


def test_an_offset_of_a_fraction_of_a_second_is_rejected_among_the_arguments() -> None:
    """Python's own ``fromisoformat`` loses it."""
    zone = timezone(timedelta(microseconds=-1))
    with pytest.raises(TaskLockOptionError, match="pass one of whole seconds"):
        stored("date", datetime(2027, 7, 1, tzinfo=zone))
    cron = CronTrigger(hour=3, timezone=zone)
    assert run_times(stored(cron).trigger) == run_times(cron)


def test_an_end_that_is_no_time_in_utc_is_rejected() -> None:
    end = datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))
    with pytest.raises(TaskLockOptionError, match="before the year 1 or after"):
        stored("interval", hours=1, end_date=end, args=["key"])


def test_an_offset_of_an_applications_own_class_is_an_offset() -> None:
    class Offset(tzinfo):
        def utcoffset(self, _moment: datetime | None) -> timedelta:
            return timedelta(hours=2)

        def dst(self, _moment: datetime | None) -> timedelta:
            return timedelta(0)

        def tzname(self, _moment: datetime | None) -> str:
            return "Offset"

    at = datetime(2027, 7, 1, 12, tzinfo=Offset())
    job = stored(CronTrigger(hour=3, timezone=Offset()), at)
    assert run_times(job.trigger) == run_times(CronTrigger(hour=1, timezone="UTC"))
    assert job.args[1].isoformat() == at.isoformat()


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_a_moment_that_a_clock_shows_twice_or_never_comes_back(moment: datetime) -> None:
    again = stored("date", moment, run_date=TIMES[0]).args[1]
    assert again.isoformat() == moment.isoformat()
    assert again.utcoffset() == moment.utcoffset()
    if timedelta(days=2) < moment.replace(tzinfo=None) - datetime.min < timedelta(days=3_000_000):
        job = stored("date", run_date=moment)
        assert job.trigger.run_date.timestamp() == moment.timestamp()


@pytest.mark.parametrize("is_dst", [True, False])
def test_a_moment_of_pytz_that_a_clock_shows_twice_keeps_its_zone(is_dst: bool) -> None:
    """Else a day later, or at another time of the year, it is off by an hour."""
    twice = datetime(2027, 10, 31, 2, 30)
    moment = pytz.timezone("Europe/Berlin").localize(twice, is_dst=is_dst)
    again = stored("date", moment, run_date=TIMES[0]).args[1]
    assert again.tzinfo is ZoneInfo("Europe/Berlin")
    assert again.timestamp() == moment.timestamp()


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the machine be in Berlin."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Europe/Berlin")
        time_module.tzset()
        tzlocal.reload_localzone()
        yield
    time_module.tzset()
    tzlocal.reload_localzone()


@pytest.mark.skipif(not hasattr(time_module, "tzset"), reason="Windows has no TZ")
@pytest.mark.usefixtures("in_berlin")
def test_the_zone_of_the_machine_is_stored_by_its_name() -> None:
    """dateutil's has none, and another replica's machine may be elsewhere."""
    moment = datetime(2027, 7, 1, 12, tzinfo=tz.tzlocal())
    again = stored("date", moment, run_date=TIMES[0]).args[1]
    assert again.tzinfo is ZoneInfo("Europe/Berlin")
    assert again.isoformat() == "2027-07-01T12:00:00+02:00"


TIMES_OF_DAY = {
    "ZoneInfo": time(3, 30, tzinfo=ZoneInfo("Europe/Berlin")),
    "pytz": time(3, 30, tzinfo=pytz.timezone("Europe/Berlin")),
    "dateutil": time(3, 30, tzinfo=tz.gettz("Europe/Berlin")),
}


@pytest.mark.parametrize("value", TIMES_OF_DAY.values(), ids=TIMES_OF_DAY)
def test_a_time_of_day_keeps_its_zone(value: time) -> None:
    again = stored("date", value, run_date=TIMES[0]).args[1]
    day = datetime(2027, 7, 1)
    assert again.replace(tzinfo=None) == value.replace(tzinfo=None)
    assert datetime.combine(day, again).utcoffset() == timedelta(hours=2)


@given(
    zone=st.sampled_from(
        [
            *(zone for zone in ZONES.values() if "interval" in triggers_in(zone)),
            *map(pytz.timezone, pytz.common_timezones),
        ]
    ),
    moment=st.datetimes(
        datetime(2026, 1, 1), datetime(2030, 1, 1), timezones=st.just(timezone.utc)
    ),
    hours=st.sampled_from(["*", "0-4", "*/3", "2"]),
    minutes=st.sampled_from(["0", "*/20", "30"]),
    length=st.timedeltas(timedelta(seconds=1), timedelta(days=40)),
)
@settings(max_examples=60)
def test_the_next_run_times_are_those_before(
    zone: Any,
    moment: datetime,
    hours: str,
    minutes: str,
    length: timedelta,
) -> None:
    start = in_zone(moment, zone)
    for trigger in (
        CronTrigger(hour=hours, minute=minutes, timezone=zone),
        IntervalTrigger(seconds=length.total_seconds(), start_date=start),
        IntervalTrigger(seconds=length.total_seconds(), start_date=start, timezone="Europe/Paris"),
    ):
        again = stored(trigger).trigger
        for now in (moment, moment + timedelta(days=100)):
            before = after = None
            for _ in range(10):
                before = trigger.get_next_fire_time(before, before or now)
                after = again.get_next_fire_time(after, after or now)
                assert before.timestamp() == after.timestamp()


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", ["trigger", "part", "argument"])
def test_a_row_with_no_zone_is_unreadable(name: str, place: str) -> None:
    at = datetime(2026, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo"))
    cron = CronTrigger(hour=3, timezone="Asia/Tokyo")
    definition = definition_of(OrTrigger([cron]) if place == "part" else cron, args=["key", at])
    column = "arguments" if place == "argument" else "trigger"
    text = json.dumps(getattr(definition, column))
    assert "Asia/Tokyo" in text
    columns = {**definition.columns, column: json.loads(text.replace("Asia/Tokyo", name))}
    with pytest.raises(UnreadableError):
        read(json.dumps(columns))
