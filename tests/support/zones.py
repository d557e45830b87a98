"""Time zones in every way that a user can write them, and triggers in them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytz
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from dateutil import tz
from tzlocal import get_localzone

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


# What no replica writes as a zone.
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
