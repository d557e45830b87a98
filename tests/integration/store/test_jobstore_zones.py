"""Stored jobs in every time zone that a user can write: they come back meaning the same.

What is compared is what a zone means, which are run times and moments, and not how it is called.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, time, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import psycopg
import pytest
import pytz
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from dateutil import tz
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tzlocal import get_localzone

from apscheduler_tasklock import TaskLockOptionError
from apscheduler_tasklock._lock.database_clock import LATEST
from tests.support.commands import COMMAND, ROOT, environment
from tests.support.postgres import Server
from tests.support.stored_jobs import StoreReplica, note

Connection = psycopg.Connection[Any]

SPELLINGS_OF_UTC: dict[str, Any] = {
    "text": "UTC",
    "Etc/UTC": "Etc/UTC",
    "timezone.utc": timezone.utc,
    "ZoneInfo": ZoneInfo("UTC"),
    "ZoneInfo of Zulu": ZoneInfo("Zulu"),
    "pytz.utc": pytz.utc,
    "pytz of Etc/UTC": pytz.timezone("Etc/UTC"),
    "pytz.FixedOffset": pytz.FixedOffset(0),
    "dateutil.tz.UTC": tz.UTC,
    "dateutil gettz": tz.gettz("UTC"),
    "dateutil tzoffset": tz.tzoffset("Z", 0),
    "an offset": timezone(timedelta(0), "GMT"),
}
SPELLINGS_OF_BERLIN: dict[str, Any] = {
    "text": "Europe/Berlin",
    "ZoneInfo": ZoneInfo("Europe/Berlin"),
    "ZoneInfo that is not kept": ZoneInfo.no_cache("Europe/Berlin"),
    "pytz": pytz.timezone("Europe/Berlin"),
    "dateutil gettz": tz.gettz("Europe/Berlin"),
    "dateutil of a file": tz.tzfile("/usr/share/zoneinfo/Europe/Berlin"),
}
SPELLINGS_OF_AN_OFFSET: dict[str, Any] = {
    "timezone": timezone(timedelta(hours=-3)),
    "timezone with a name": timezone(timedelta(hours=-3), "BRT"),
    "ZoneInfo": ZoneInfo("Etc/GMT+3"),
    "pytz.FixedOffset": pytz.FixedOffset(-180),
    "pytz": pytz.timezone("Etc/GMT+3"),
    "dateutil tzoffset": tz.tzoffset(None, -10800),
    "dateutil gettz": tz.gettz("Etc/GMT+3"),
}
OTHERS: dict[str, Any] = {
    "the machine's": get_localzone(),
    "dateutil tzlocal": tz.tzlocal(),
    "dateutil gettz of nothing": tz.gettz(),
    "seconds": timezone(timedelta(hours=5, seconds=-7)),
    "half an hour of daylight saving time": pytz.timezone("Australia/Lord_Howe"),
    "the old name": pytz.timezone("US/Eastern"),
}
ZONES = {
    f"{name}: {spelling}": zone
    for name, spellings in {
        "UTC": SPELLINGS_OF_UTC,
        "Berlin": SPELLINGS_OF_BERLIN,
        "-03": SPELLINGS_OF_AN_OFFSET,
        "other": OTHERS,
    }.items()
    for spelling, zone in spellings.items()
}
# APScheduler 3.10 has none.
HAS_CALENDAR_INTERVALS = bool(importlib.util.find_spec("apscheduler.triggers.calendarinterval"))
BERLIN = ZoneInfo("Europe/Berlin")
# Right before the clocks of Europe are set forward, and back.
TIMES = [
    datetime(2027, 3, 27, 23, 10, 7, tzinfo=timezone.utc),
    datetime(2027, 10, 30, 22, 10, 7, tzinfo=timezone.utc),
]


def in_zone(moment: datetime, zone: Any) -> datetime:
    """Return a moment in a time zone that may be a name."""
    return moment.astimezone(ZoneInfo(zone) if isinstance(zone, str) else zone)


def has_triggers_in(zone: Any) -> bool:
    """Tell whether APScheduler itself has triggers in a time zone."""
    try:
        CronTrigger(hour=3, timezone=zone)
    except AttributeError:  # of pytz.FixedOffset, which 3.11 takes for another class
        return False
    return True


def triggers_in(zone: Any) -> dict[str, Any]:
    """Return a trigger of each kind."""
    start, end = in_zone(TIMES[0], zone), in_zone(TIMES[0] + timedelta(days=900), zone)
    if not has_triggers_in(zone):
        return {"date": DateTrigger(start)}
    triggers = {
        "interval": IntervalTrigger(minutes=37, timezone=zone),
        "interval from a start": IntervalTrigger(days=1, start_date=start, end_date=end),
        "interval from a naive start": IntervalTrigger(
            hours=5, start_date="2027-03-01 03:00:00", timezone=zone
        ),
        "cron": CronTrigger(hour="*/2", minute=30, timezone=zone),
        "cron at night": CronTrigger(hour=2, minute=30, start_date=start, end_date=end),
        "crontab": CronTrigger.from_crontab("*/50 1-4 * * *", timezone=zone),
        "date": DateTrigger(start),
        "date of a naive time": DateTrigger("2027-03-28 03:30:00", timezone=zone),
        "now": DateTrigger(timezone=zone),
        "and": AndTrigger(
            [CronTrigger(hour="12-17", timezone=zone), CronTrigger(minute="*/30", timezone=zone)]
        ),
        "or": OrTrigger(
            [CronTrigger(hour=3, timezone=zone), AndTrigger([CronTrigger(hour=2, timezone=zone)])]
        ),
    }
    if HAS_CALENDAR_INTERVALS:
        from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger

        triggers["calendar interval"] = CalendarIntervalTrigger(
            weeks=1, hour=2, minute=30, start_date="2027-03-21", timezone=zone
        )
    return triggers


def times_in(zone: Any) -> list[datetime]:
    """Return when run times are compared."""
    skipped = datetime(2027, 3, 28, 2, 30)
    here, ours = (skipped.replace(tzinfo=zone) for zone in (tz.gettz("Europe/Berlin"), BERLIN))
    # A time that no clock shows is another moment for dateutil before 4.0.
    differs = isinstance(zone, tz.tzfile) and here.timestamp() != ours.timestamp()
    return TIMES[1:] if differs else TIMES


def run_times(trigger: Any, times: list[datetime] = TIMES, count: int = 25) -> list[float]:
    """Return run times around both changes of the clock, as timestamps."""
    found = []
    for moment in times:
        previous = None
        now = moment.astimezone(getattr(trigger, "timezone", timezone.utc))
        for _ in range(count):
            if isinstance(trigger, AndTrigger):  # never comes back if it is told the previous one
                now = previous + timedelta(seconds=1) if previous else now
                previous = trigger.get_next_fire_time(None, now)
            else:
                previous = trigger.get_next_fire_time(previous, previous or now)
            if previous is None:
                break
            found.append(previous.timestamp())
    return found


@pytest.fixture
def paused(database_url: str) -> Iterator[StoreReplica]:
    """A replica with the job store that runs nothing."""
    replica = StoreReplica(database_url)
    replica.scheduler.start(paused=True)
    yield replica
    replica.scheduler.remove_all_jobs()  # else those that are due would be run by the shutdown
    replica.shutdown()


def stored(replica: StoreReplica, trigger: Any, *args: Any, **options: Any) -> Any:
    """Add a job, and return it as another replica gets it."""
    job_id = uuid4().hex
    replica.scheduler.add_job(note, trigger, args=["key", *args], id=job_id, **options)
    return replica.scheduler.get_job(job_id)


@pytest.fixture(scope="module")
def shared(server: Server, template: str) -> Iterator[StoreReplica]:
    """One such replica for many tests, whose jobs have names that no other test uses."""
    with server.database(template) as url:
        replica = StoreReplica(url)
        replica.scheduler.start(paused=True)
        yield replica
        replica.scheduler.remove_all_jobs()
        replica.shutdown()


@pytest.mark.parametrize("zone", ZONES.values(), ids=ZONES)
class TestEveryZone:
    @pytest.fixture
    def paused(self, shared: StoreReplica) -> StoreReplica:
        return shared

    def test_triggers_come_back_with_their_run_times(self, paused: StoreReplica, zone: Any) -> None:
        for name, trigger in triggers_in(zone).items():
            again = stored(paused, trigger).trigger
            assert type(again) is type(trigger)
            assert run_times(again, times_in(zone)) == run_times(trigger, times_in(zone)), name

    def test_triggers_with_jitter_come_back(self, paused: StoreReplica, zone: Any) -> None:
        for trigger in triggers_in(zone).values():
            if hasattr(trigger, "jitter"):
                trigger.jitter = 9
                again = stored(paused, trigger).trigger
                assert again.jitter == 9
                again.jitter = trigger.jitter = None
                assert run_times(again, times_in(zone)) == run_times(trigger, times_in(zone))

    def test_what_a_user_passes_to_add_job_is_the_next_run_time(
        self, paused: StoreReplica, zone: Any
    ) -> None:
        when = in_zone(TIMES[0], zone)
        named = {"timezone": zone} if has_triggers_in(zone) else {}
        by_time = stored(paused, "interval", hours=1, next_run_time=when, **named)
        by_date = stored(paused, "date", run_date=when)
        assert [by_time.next_run_time, by_date.next_run_time] == [when, when]
        again = paused.scheduler.modify_job(by_time.id, next_run_time=in_zone(TIMES[1], zone))
        assert again.next_run_time == TIMES[1]
        moved = paused.scheduler.reschedule_job(by_time.id, trigger="date", run_date=when)
        assert moved.next_run_time == when

    def test_moments_among_the_arguments_come_back(self, paused: StoreReplica, zone: Any) -> None:
        hours = [first + timedelta(hours=hour) for first in TIMES for hour in range(5)]
        moments = [in_zone(moment, zone) for moment in hours]
        again = stored(paused, "date", [moments, {"at": moments[0]}]).args[1]
        assert [moment.isoformat() for moment in again[0]] == [
            moment.isoformat() for moment in moments
        ]
        assert [moment.timestamp() for moment in again[0]] == [
            moment.timestamp() for moment in moments
        ]
        assert again[1] == {"at": moments[0]}


def row_of(connection: Connection, job_id: str) -> Any:
    """Return all that the table has of a job."""
    read = "SELECT to_jsonb(job) FROM task_lock_job AS job WHERE id = %s"
    found = connection.execute(read, [job_id]).fetchone()
    return found and found[0]


SAME_ZONES = {
    "UTC": SPELLINGS_OF_UTC,
    "Berlin": SPELLINGS_OF_BERLIN,
    "-03": SPELLINGS_OF_AN_OFFSET,
    "renamed": {"old": "Asia/Calcutta", "new": ZoneInfo("Asia/Kolkata")},
}


class TestDeclaredInAnotherSpelling:
    """``replace_existing=True``, where replicas write a time zone differently."""

    @pytest.mark.parametrize("spellings", SAME_ZONES.values(), ids=SAME_ZONES)
    def test_a_job_stays_as_it_is(
        self, paused: StoreReplica, connection: Connection, spellings: dict[str, Any]
    ) -> None:
        first, *others = spellings.values()
        for name, trigger in triggers_in(first).items():
            options = {"id": name, "args": [name], "replace_existing": True}
            paused.scheduler.add_job(note, trigger, **options)
            if name == "date":
                paused.scheduler.pause_job(name)
            elif name != "now":  # that it is another moment is another schedule
                paused.scheduler.modify_job(name, next_run_time=TIMES[0] + timedelta(minutes=1))
            before = row_of(connection, name)
            for other in map(triggers_in, others if name != "now" else []):
                if name in other:
                    paused.scheduler.add_job(note, other[name], **options)
                    assert row_of(connection, name) == before

    def test_an_intervals_zone_changes_nothing(
        self, paused: StoreReplica, connection: Connection
    ) -> None:
        options = {"id": "job", "args": ["job"], "replace_existing": True}
        paused.scheduler.add_job(note, "interval", hours=1, timezone="UTC", **options)
        before = row_of(connection, "job")
        paused.scheduler.add_job(note, "interval", hours=1, timezone="Asia/Tokyo", **options)
        assert row_of(connection, "job") == before

    @pytest.mark.parametrize("zone", ["Europe/Athens", "America/New_York", "Etc/GMT-1"])
    def test_another_zone_is_another_schedule(
        self, paused: StoreReplica, connection: Connection, zone: str
    ) -> None:
        options = {"id": "job", "args": ["job"], "replace_existing": True}
        paused.scheduler.add_job(note, "cron", hour=3, timezone="Europe/Chisinau", **options)
        before = row_of(connection, "job")
        paused.scheduler.add_job(note, "cron", hour=3, timezone=zone, **options)
        after = row_of(connection, "job")
        assert after["trigger"] != before["trigger"]


class Summertime(tzinfo):
    """A zone as one finds it in the documentation of Python, whose rules nobody else knows."""

    def utcoffset(self, moment: datetime | None) -> timedelta:
        return timedelta(hours=1) + self.dst(moment)

    def dst(self, moment: datetime | None) -> timedelta:
        return timedelta(hours=moment is not None and 4 <= moment.month <= 10)

    def tzname(self, _moment: datetime | None) -> str:
        return "Summertime"


class Speechless(tzinfo):
    """A zone that has no answers."""


def from_file(key: str | None = None) -> ZoneInfo:
    with Path("/usr/share/zoneinfo/Europe/Berlin").open("rb") as file:
        return ZoneInfo.from_file(file, key=key)


UNKNOWN: dict[str, Callable[[], tzinfo]] = {
    "a file": from_file,
    "the machine's file": lambda: from_file("local"),  # as tzlocal makes it, if it has no name
    "a file with another name": lambda: from_file("Asia/Tokyo"),
    "rules": lambda: tz.tzstr("CET-1CEST,M3.5.0,M10.4.0/3"),
    "a range": lambda: tz.tzrange("EST", -18000, "EDT"),
    "a class": Summertime,
}


@pytest.mark.parametrize("make_zone", UNKNOWN.values(), ids=UNKNOWN)
class TestZonesThatNobodyElseKnows:
    def test_a_trigger_is_rejected_and_says_what_to_pass(
        self, paused: StoreReplica, make_zone: Callable[[], tzinfo]
    ) -> None:
        for name, trigger in triggers_in(make_zone()).items():
            if "date" in name or name == "now":
                continue
            with pytest.raises(TaskLockOptionError) as raised:
                paused.scheduler.add_job(note, trigger, args=["key"], id="job")
            assert "job 'job': the trigger cannot be stored: its time zone " in str(raised.value)
            assert "pass timezone='Europe/Berlin', or another name, to the" in str(raised.value)
        assert paused.scheduler.get_jobs() == []

    def test_an_argument_is_rejected_and_says_what_to_pass(
        self, paused: StoreReplica, make_zone: Callable[[], tzinfo]
    ) -> None:
        at = datetime(2027, 7, 1, 12, tzinfo=make_zone())
        for value in (at, at.timetz()):
            with pytest.raises(TaskLockOptionError) as raised:
                paused.scheduler.add_job(note, args=["key", {"at": [value]}], id="job")
            assert "args[1]['at'][0] cannot be stored: its time zone " in str(raised.value)
            assert "pass one of zoneinfo.ZoneInfo by its name, or of datetime.timezone" in str(
                raised.value
            )
        assert paused.scheduler.get_jobs() == []

    def test_a_date_is_a_moment_all_the_same(
        self, paused: StoreReplica, make_zone: Callable[[], tzinfo]
    ) -> None:
        at = datetime(2027, 7, 1, 12, tzinfo=make_zone())
        job = stored(paused, "date", run_date=at)
        assert job.next_run_time == job.trigger.run_date == at
        assert job.trigger.run_date.isoformat() == at.isoformat()


def test_a_zone_that_has_no_answers_is_rejected(paused: StoreReplica) -> None:
    at = datetime(2027, 7, 1, 12, tzinfo=Speechless())
    with pytest.raises(TaskLockOptionError, match="args\\[1\\] cannot be stored: its time zone"):
        paused.scheduler.add_job(note, "date", run_date=TIMES[0], args=["key", at])


def test_an_offset_of_a_fraction_of_a_second_is_rejected_among_the_arguments(
    paused: StoreReplica,
) -> None:
    """Python's own ``fromisoformat`` loses it."""
    zone = timezone(timedelta(microseconds=-1))
    with pytest.raises(TaskLockOptionError, match="pass one of whole seconds"):
        stored(paused, "date", datetime(2027, 7, 1, tzinfo=zone))
    cron = CronTrigger(hour=3, timezone=zone)
    assert run_times(stored(paused, cron).trigger) == run_times(cron)


def test_an_end_that_is_no_time_in_utc_is_rejected(paused: StoreReplica) -> None:
    end = datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))
    with pytest.raises(TaskLockOptionError, match="before the year 1 or after"):
        paused.scheduler.add_job(note, "interval", hours=1, end_date=end, args=["key"])


@pytest.mark.parametrize("never", [datetime.max, datetime(9999, 12, 31)])
def test_a_run_date_at_the_end_of_time_is_the_last_one_that_the_tables_take(
    paused: StoreReplica, never: datetime
) -> None:
    job = stored(paused, "date", run_date=never.replace(tzinfo=timezone.utc))
    assert job.next_run_time == LATEST


def test_an_offset_of_an_applications_own_class_is_an_offset(paused: StoreReplica) -> None:
    class Offset(tzinfo):
        def utcoffset(self, _moment: datetime | None) -> timedelta:
            return timedelta(hours=2)

        def dst(self, _moment: datetime | None) -> timedelta:
            return timedelta(0)

        def tzname(self, _moment: datetime | None) -> str:
            return "Offset"

    at = datetime(2027, 7, 1, 12, tzinfo=Offset())
    job = stored(paused, CronTrigger(hour=3, timezone=Offset()), at)
    assert run_times(job.trigger) == run_times(CronTrigger(hour=1, timezone="UTC"))
    assert job.args[1].isoformat() == at.isoformat()


PYTZ = pytz.timezone("Europe/Berlin")
MOMENTS = {
    "the first of two hours": PYTZ.localize(datetime(2027, 10, 31, 2, 30), is_dst=True),
    "the second of two hours": PYTZ.localize(datetime(2027, 10, 31, 2, 30), is_dst=False),
    "reckoned over a clock change": PYTZ.localize(datetime(2027, 3, 1)) + timedelta(days=60),
    "without localize": datetime(2027, 3, 1, tzinfo=PYTZ),
    "dateutil's first": datetime(2027, 10, 31, 2, 30, tzinfo=tz.gettz("Europe/Berlin")),
    "dateutil's second": datetime(2027, 10, 31, 2, 30, tzinfo=tz.gettz("Europe/Berlin"), fold=1),
    "a fold of UTC": datetime(2027, 10, 31, 2, 30, tzinfo=tz.UTC, fold=1),
    "that is skipped": datetime(2027, 3, 28, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")),
    "that is skipped, of dateutil": datetime(2027, 3, 28, 2, 30, tzinfo=tz.gettz("Europe/Berlin")),
    "the first moment": datetime.min.replace(tzinfo=ZoneInfo("Asia/Tokyo")),
    "the last moment": datetime.max.replace(tzinfo=pytz.timezone("Europe/Berlin")),
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_a_moment_that_a_clock_shows_twice_or_never_comes_back(
    paused: StoreReplica, moment: datetime
) -> None:
    again = stored(paused, "date", moment, run_date=TIMES[0]).args[1]
    assert again.isoformat() == moment.isoformat()
    assert again.utcoffset() == moment.utcoffset()
    if timedelta(days=2) < moment.replace(tzinfo=None) - datetime.min < timedelta(days=3_000_000):
        job = stored(paused, "date", run_date=moment)
        assert job.next_run_time.timestamp() == moment.timestamp()
        assert job.trigger.run_date.timestamp() == moment.timestamp()


TIMES_OF_DAY = {
    "ZoneInfo": time(3, 30, tzinfo=ZoneInfo("Europe/Berlin")),
    "pytz": time(3, 30, tzinfo=pytz.timezone("Europe/Berlin")),
    "dateutil": time(3, 30, tzinfo=tz.gettz("Europe/Berlin")),
}


@pytest.mark.parametrize("value", TIMES_OF_DAY.values(), ids=TIMES_OF_DAY)
def test_a_time_of_day_keeps_its_zone(paused: StoreReplica, value: time) -> None:
    again = stored(paused, "date", value, run_date=TIMES[0]).args[1]
    day = datetime(2027, 7, 1)
    assert again.replace(tzinfo=None) == value.replace(tzinfo=None)
    assert datetime.combine(day, again).utcoffset() == timedelta(hours=2)


@pytest.mark.nightly
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
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_next_run_times_are_those_before(
    paused: StoreReplica,
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
        again = stored(paused, trigger).trigger
        for now in (moment, moment + timedelta(days=100)):
            before = after = None
            for _ in range(10):
                before = trigger.get_next_fire_time(before, before or now)
                after = again.get_next_fire_time(after, after or now)
                assert before.timestamp() == after.timestamp()


HOSTILE = [
    "Europe",
    "x" * 300,
    "../etc/passwd",
    "/etc/localtime",
    "a\\u0001",
    "",
    "9" * 30,
    "\u00b2",
]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", ["trigger", "part", "argument"])
def test_a_row_with_no_zone_is_unreadable_and_nothing_else(
    database_url: str, connection: Connection, name: str, place: str
) -> None:
    replica, key = StoreReplica(database_url), uuid4().hex
    replica.scheduler.start(paused=True)
    at = datetime(2026, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo"))
    cron = CronTrigger(hour=3, timezone="Asia/Tokyo")
    trigger = OrTrigger([cron]) if place == "part" else cron
    options = {"args": [key, at], "next_run_time": datetime.now(timezone.utc)}
    replica.scheduler.add_job(note, trigger, id="bad", **options)
    column = "arguments" if place == "argument" else "trigger"
    connection.execute(
        f"UPDATE task_lock_job SET {column} = replace({column}::text, 'Asia/Tokyo', %s)::jsonb",
        [name],
    )
    try:
        [job] = replica.scheduler.get_jobs()
        assert (job.id, str(job.trigger)[:12]) == ("bad", "unreadable: ")
        assert replica.scheduler.pause_job("bad").next_run_time is None
        replica.scheduler.modify_job("bad", next_run_time=datetime.now(timezone.utc))
        replica.run_at(note, key)
        replica.scheduler.resume()
        assert replica.runs(key)
        assert replica.scheduler.add_job(note, cron, id="bad", args=[key], replace_existing=True)
        assert str(replica.scheduler.get_job("bad").trigger) == str(cron)
    finally:
        replica.shutdown()


PROGRAM = """
import json, os
from datetime import datetime, timedelta
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger
from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore
from tests.support.polling import eventually
from tests.support.stored_jobs import note, ran
import dateutil.tz, pytz, zoneinfo

url = os.environ["TASKLOCK_DATABASE_URL"]
name = os.environ["TZ"]
# By the library that has made it.
zones = {
    "default": None,
    "name": name,
    "zoneinfo": zoneinfo.ZoneInfo(name),
    "pytz": pytz.timezone(name),
    "dateutil": dateutil.tz.gettz(name),
}

"""
RUNS = """
def add_jobs(name, zone):
    timezone = {} if zone is None else {"timezone": zone}

    def add(kind, *trigger, **options):
        keys.append(f"{kind} {name}")
        scheduler.add_job(note, *trigger, args=[keys[-1]], id=keys[-1], **options)

    now = datetime.now()
    here = datetime.now(scheduler.timezone)
    add("now")
    add("date", "date", run_date=now + timedelta(seconds=0.1), **timezone)
    add("date here", "date", run_date=here)
    add("interval", "interval", seconds=0.3, **timezone)
    add("start", "interval", seconds=0.3, start_date=now, **timezone)
    add("cron", "cron", second="*", **timezone)
    add("tab", CronTrigger.from_crontab("* * * * *", **timezone), next_run_time=here)
    every_second = CronTrigger(second="*", **timezone)
    add("and", AndTrigger([every_second, every_second]))
    add("or", OrTrigger([every_second, IntervalTrigger(hours=1, **timezone)], jitter=1))
    add("late", "cron", hour=3, next_run_time=None, **timezone)
    scheduler.modify_job(keys[-1], next_run_time=here)
    try:
        add("days", "calendarinterval", days=1, next_run_time=here, **timezone)
    except LookupError:  # APScheduler 3.10 has none
        keys.pop()

keys = []
scheduler = BackgroundScheduler(
    jobstores={"default": TaskLockJobStore(url, functions=["tests."])},
    executors={"default": TaskLockExecutor(url)},
    job_defaults={"misfire_grace_time": None},  # of a busy machine, all of them are due at once
)
scheduler.start()
scheduler.add_job(note, args=["without an id"])
for at in (datetime.now(dateutil.tz.tzlocal()), datetime.now(dateutil.tz.gettz())):
    keys.append(f"argument {len(keys)}")
    scheduler.add_job(note, "date", run_date=at, args=[keys[-1], {"at": at}])
for each in zones.items():
    add_jobs(*each)
eventually(lambda: all(ran[key] for key in [*keys, "without an id"]))
scheduler.shutdown()
print(len(keys))
"""
OLD = """
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore

def add_jobs(name, zone):
    timezone = {} if zone is None else {"timezone": zone}

    def add(kind, *trigger, **options):
        job_id = f"{kind} {name}"
        scheduler.add_job(note, *trigger, id=job_id, **{"args": [job_id], **options})

    later = datetime(2100, 1, 1)
    options = {"next_run_time": here + timedelta(days=300)}
    add("date", "date", run_date=later, **timezone)
    add("interval", "interval", hours=1, **options, **timezone)
    add("cron", "cron", hour=3, **options, **timezone)
    add("start", "interval", weeks=1, start_date=later, **timezone)
    add("argument", "date", run_date=later, args=[[here]], **timezone)
    add("and", AndTrigger([CronTrigger(hour=hour, **timezone) for hour in (3, "*")]), **options)

store = SQLAlchemyJobStore(url.replace("postgresql://", "postgresql+psycopg://"))
scheduler = BackgroundScheduler(jobstores={"default": store})
scheduler.start(paused=True)
here = datetime.now(scheduler.timezone)
for each in zones.items():
    add_jobs(*each)
times = {job.id: job.next_run_time.timestamp() for job in scheduler.get_jobs()}
scheduler.shutdown()
print(json.dumps(times))
"""


def run_in(zone: str, program: str, url: str) -> str:
    """Run a program on a machine that is in a time zone, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM + program],
        env=environment(url, TZ=zone),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_jobs_of_each_kind_run_on_a_machine_in_a_zone(database_url: str, zone: str) -> None:
    assert int(run_in(zone, RUNS, database_url)) >= 50


@pytest.mark.nightly
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_jobs_of_another_store_are_taken_over_on_a_machine_in_a_zone(
    direct_url: str, connection: Connection, zone: str
) -> None:
    times = json.loads(run_in(zone, OLD, direct_url))
    done = subprocess.run(
        [*COMMAND, "import-jobs", "--functions", "tests."],
        env=environment(direct_url, TZ=zone),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert sorted(done.stdout.splitlines()) == [f"{job_id}: added" for job_id in sorted(times)]
    assert done.returncode == 0
    read = "SELECT id, extract(epoch FROM next_run_time)::float FROM task_lock_job"
    assert dict(connection.execute(read).fetchall()) == pytest.approx(times, abs=1e-5)
