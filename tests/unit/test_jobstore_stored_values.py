"""Values and triggers as JSON: what is stored comes back as it was, or is rejected with its place.

PostgreSQL's jsonb rewrites what it is given, so the values go through it.
"""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import psycopg
import pytest
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apscheduler_tasklock._runs.trigger_times import first_run_time, following_run_time
from apscheduler_tasklock.jobstore.stored_triggers import (
    declared_schedule,
    decode_trigger,
    encode_trigger,
)
from apscheduler_tasklock.jobstore.stored_values import (
    UnreadableError,
    UnstorableError,
    decode,
    encode,
)

ZONES = [ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York"), ZoneInfo("UTC")]
zones = st.sampled_from([*ZONES, timezone.utc, timezone(timedelta(hours=-3, minutes=-30))])
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
moments = st.datetimes(timezones=st.none() | zones, allow_imaginary=False)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | texts
    | moments
    | st.dates()
    | st.times(timezones=st.none() | zones)
    | st.timedeltas()
    | st.uuids()
    | st.decimals(allow_nan=False),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(texts, parts, max_size=4),
    max_leaves=12,
)


class Level(IntEnum):
    HIGH = 3


class Text(str):
    __slots__ = ()


@pytest.fixture
def cursor(connection: psycopg.Connection[Any]) -> Iterator[psycopg.Cursor[Any]]:
    with connection.cursor() as cursor:
        yield cursor


def through_jsonb(cursor: psycopg.Cursor[Any], data: Any) -> Any:
    """Return data as it comes back from PostgreSQL."""
    found = cursor.execute("SELECT %s::jsonb", [json.dumps(data)]).fetchone()
    assert found is not None
    return found[0]


def same(one: Any, other: Any) -> bool:
    """Tell whether two values are equal, also in their types, time zones and signs."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float):
        is_nan = math.isnan(one) and math.isnan(other)
        return is_nan or (one == other and math.copysign(1, one) == math.copysign(1, other))
    if isinstance(one, (datetime, time)):
        return repr(one) == repr(other)
    return bool(one == other)


@given(value=values)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_stored_comes_back_as_it_was(cursor: psycopg.Cursor[Any], value: Any) -> None:
    encoded = encode(value, "args[0]")
    stored = through_jsonb(cursor, encoded)
    assert same(stored, encoded), "a signature of it would not hold"
    assert same(decode(stored), value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ((1, 2), "args[0] cannot be stored: a tuple would come back as a list; pass a list"),
        ([{"a": (1,)}], "args[0][0]['a'] cannot be stored: a tuple"),
        ({1: "one"}, "its key 1 would come back as a text"),
        ({None: 1}, "its key None would come back as a text"),
        (Level.HIGH, "Level would come back as a plain int; pass int(...)"),
        (Text("x"), "Text would come back as a plain str"),
        (OrderedDict(a=1), "OrderedDict would come back as a plain dict"),
        ({1, 2}, "JSON has no sets"),
        (b"bytes", "JSON has no bytes"),
        (object(), "it is a builtins.object. What can be stored: None, bool"),
        ("a\0b", "no text with a NUL"),
        ({"a\0": 1}, "no text with a NUL"),
        ("\ud800", "a lone surrogate"),
        (10**4000, "more than 4000 digits"),
    ],
)
def test_what_would_come_back_different_is_rejected_with_its_place(value: Any, says: str) -> None:
    with pytest.raises(UnstorableError) as raised:
        encode(value, "args[0]")
    assert says in str(raised.value)


def test_a_list_in_itself_is_rejected() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnstorableError, match="in itself"):
        encode(value, "args[0]")


def test_a_dict_with_the_key_that_marks_types_comes_back() -> None:
    value = {"$": "datetime", "value": {"$": 1}}
    assert decode(encode(value, "kwargs")) == value


@pytest.mark.parametrize(
    "data",
    [
        {"$": "os.system", "value": "x"},
        {"$": ["datetime"]},
        {"$": "datetime"},
        {"$": "datetime", "value": "yesterday"},
        {"$": "datetime", "value": "2026-01-01T00:00:00", "zone": "No/Where"},
        {"$": "timedelta", "value": "1"},
        {"$": "UUID", "value": "1"},
        {"$": "Decimal", "value": "x"},
        {"$": "dict", "value": 3},
    ],
)
def test_what_somebody_else_has_written_is_unreadable(data: Any) -> None:
    with pytest.raises(UnreadableError):
        decode([data])


BERLIN = ZoneInfo("Europe/Berlin")
SOME_TIME = datetime(2026, 3, 28, 3, 0, tzinfo=BERLIN)
TRIGGERS = {
    "cron": CronTrigger(hour="3", timezone=BERLIN),
    "cron with all": CronTrigger(
        year="2026-2030",
        month="jan,mar",
        day="last",
        day_of_week="mon-fri",
        hour="*/2",
        minute="1-59/7",
        second="5",
        start_date=SOME_TIME,
        end_date=SOME_TIME + timedelta(900),
        timezone="Europe/Berlin",
        jitter=3,
    ),
    "crontab": CronTrigger.from_crontab("*/5 9-17 * * mon-fri", "America/New_York"),
    "interval": IntervalTrigger(minutes=5, start_date=SOME_TIME, timezone=BERLIN),
    "interval of a fraction": IntervalTrigger(
        seconds=0.1, start_date=SOME_TIME, end_date=SOME_TIME + timedelta(1), timezone="UTC"
    ),
    "interval of weeks": IntervalTrigger(weeks=3, hours=1, timezone="UTC", jitter=60),
    "interval with a default start": IntervalTrigger(hours=1, timezone=timezone.utc),
    "interval of an offset": IntervalTrigger(days=1, timezone=timezone(timedelta(hours=-3))),
    "date": DateTrigger(SOME_TIME),
    "date now": DateTrigger(timezone="Asia/Tokyo"),
    "and": AndTrigger([CronTrigger(hour=0, timezone="UTC"), CronTrigger(day=1, timezone="UTC")]),
    "or": OrTrigger(
        [AndTrigger([IntervalTrigger(days=1, timezone="UTC")]), DateTrigger(SOME_TIME)], jitter=5
    ),
}


def run_times(trigger: Any) -> list[datetime]:
    """Return some run times. APScheduler's own AndTrigger, asked for a second one, may hang."""
    moment = first_run_time(trigger, SOME_TIME)
    found = []
    while moment is not None and len(found) < 5:
        found.append(moment)
        moment = following_run_time(trigger, moment, moment)
    return found


@pytest.mark.parametrize("trigger", TRIGGERS.values(), ids=TRIGGERS)
def test_a_trigger_comes_back_with_its_run_times(
    trigger: Any, connection: psycopg.Connection[Any]
) -> None:
    stored = through_jsonb(connection.cursor(), encode_trigger(trigger))
    again = decode_trigger(stored)
    assert type(again) is type(trigger)
    assert encode_trigger(again) == stored == encode_trigger(trigger)
    assert str(again) == str(trigger)
    if not (getattr(trigger, "jitter", None) or isinstance(trigger, OrTrigger)):
        assert run_times(again) == run_times(trigger) != []


@given(
    data=st.fixed_dictionaries(
        {
            "minute": st.sampled_from(["*", "*/7", "0,30", "5-55/10"]),
            "hour": st.sampled_from(["*", "3", "9-17"]),
            "day_of_week": st.sampled_from(["*", "mon", "mon-fri", "6"]),
            "timezone": st.sampled_from(["UTC", "Europe/Berlin", "America/New_York"]),
        }
    ),
    now=st.datetimes(datetime(2025, 1, 1), datetime(2027, 1, 1), timezones=st.sampled_from(ZONES)),
)
def test_a_cron_trigger_comes_back_with_its_run_times(data: dict[str, str], now: datetime) -> None:
    trigger = CronTrigger(**data)
    again = decode_trigger(json.loads(json.dumps(encode_trigger(trigger))))
    assert again.get_next_fire_time(None, now) == trigger.get_next_fire_time(None, now)
    assert again.get_next_fire_time(now, now) == trigger.get_next_fire_time(now, now)


def test_a_calendar_interval_comes_back_with_its_run_times() -> None:
    module = pytest.importorskip("apscheduler.triggers.calendarinterval")
    trigger = module.CalendarIntervalTrigger(
        months=1, days=2, hour=3, start_date=date(2026, 1, 31), timezone="Europe/Berlin"
    )
    again = decode_trigger(encode_trigger(trigger))
    assert encode_trigger(again) == encode_trigger(trigger)
    assert run_times(again) == run_times(trigger)


class Own(BaseTrigger):
    def get_next_fire_time(self, previous_fire_time: Any, now: Any) -> Any:
        return None


class OwnCron(CronTrigger):
    pass


@pytest.mark.parametrize(
    "trigger", [Own(), OwnCron(hour=3), AndTrigger([Own()])], ids=["own", "subclass", "part"]
)
def test_a_trigger_of_an_applications_own_is_rejected(trigger: Any) -> None:
    with pytest.raises(UnstorableError, match="only APScheduler's own triggers can be stored"):
        encode_trigger(trigger)


@pytest.mark.parametrize(
    "data", [None, {}, {"type": "os"}, {"type": "cron"}, {"type": "date", "run_date": 3}]
)
def test_a_trigger_that_somebody_else_has_written_is_unreadable(data: Any) -> None:
    with pytest.raises(UnreadableError):
        decode_trigger(data)


def test_an_interval_without_a_start_has_the_schedule_of_another_of_its_length() -> None:
    one, other = (encode_trigger(IntervalTrigger(hours=1, timezone="UTC")) for _ in range(2))
    assert one != other
    assert declared_schedule(one) == declared_schedule(other)
    combined = [encode_trigger(OrTrigger([decode_trigger(each)])) for each in (one, other)]
    assert declared_schedule(combined[0]) == declared_schedule(combined[1])


def test_a_start_that_was_chosen_belongs_to_the_schedule() -> None:
    one, other = (
        encode_trigger(IntervalTrigger(hours=1, start_date=start, timezone="UTC"))
        for start in (SOME_TIME, SOME_TIME + timedelta(minutes=1))
    )
    assert declared_schedule(one) != declared_schedule(other)


def test_the_time_zone_belongs_to_the_schedule() -> None:
    one, other = (
        encode_trigger(CronTrigger(hour=3, timezone=zone)) for zone in ("UTC", "Europe/Berlin")
    )
    assert declared_schedule(one) != declared_schedule(other)


@pytest.mark.parametrize("zone", ["UTC", "Etc/GMT+7", timezone(timedelta(hours=5, minutes=45))])
def test_a_zone_without_clock_changes_is_not_looked_at_hour_by_hour(zone: Any) -> None:
    """That would keep a replica from its start, for 15 ms and more for each zone and year."""
    encoded = encode_trigger(CronTrigger(hour=3, timezone=zone))
    moments = 0

    def count(_frame: Any, event: str, called: Any) -> None:
        nonlocal moments
        moments += event == "c_call" and getattr(called, "__name__", "") == "astimezone"

    sys.setprofile(count)
    try:
        declared_schedule(encoded)
    finally:
        sys.setprofile(None)
    assert moments < 10


def test_uuid_and_decimal_are_written_as_texts() -> None:
    """The form is what other programs read."""
    assert encode([UUID(int=1), Decimal("1.50"), date(2026, 1, 2)], "args") == [
        {"$": "UUID", "value": "00000000-0000-0000-0000-000000000001"},
        {"$": "Decimal", "value": "1.50"},
        {"$": "date", "value": "2026-01-02"},
    ]
