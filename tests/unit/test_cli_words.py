"""What is made of what users write on the command line, and what they read there."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._lock.schedules import schedule_in_words, stored_trigger_in_words
from apscheduler_tasklock._lock.words import printable, rfc3339, seconds_in_words
from apscheduler_tasklock._runs.task_names import canonical_schedule
from apscheduler_tasklock.cli.output import PlainOutput
from apscheduler_tasklock.cli.text import (
    local_time,
    one_cell,
    plain_seconds,
    time_in_cell,
    zone_now,
)
from apscheduler_tasklock.cli.values import duration, moment, moment_ahead
from apscheduler_tasklock.jobstore.stored_triggers import encode_trigger
from apscheduler_tasklock.schema.table import LONGEST_TEXT

UTC = timezone.utc


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5", 1.5), ("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400)],
)
def test_a_duration_is_seconds_or_has_a_unit(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "0", "0s", "-5", "5w", "1h30m", "inf", "nan", "1e3", " 5", "\u0665s", "9" * 12 + "d"],
)
def test_what_is_no_duration_is_an_error_that_repeats_it(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        duration(text)
    assert repr(text) in str(error.value)


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], datetime]]:
    """A reader in Berlin, who writes a time at a time of his, as ``2026-01-31 09:30``."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    zone = ZoneInfo("Europe/Berlin")
    yield lambda now, text: moment(text, datetime.fromisoformat(now).replace(tzinfo=zone))
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        # With a zone.
        ("2026-01-31T03:00:00Z", "2026-01-31T03:00:00"),
        ("2026-01-31T03:00:00.5z", "2026-01-31T03:00:00.500000"),
        ("2026-01-31T03:00:00+02:00", "2026-01-31T01:00:00"),
        ("2026-01-31 03:00 +0200", "2026-01-31T01:00:00"),
        ("2026-01-31 03:00-03", "2026-01-31T06:00:00"),
        ("2026-01-31 03:00 UTC", "2026-01-31T03:00:00"),
        ("03:00Z", "2026-01-31T03:00:00"),
        # Without: the reader's.
        ("2026-01-31T03:00:00", "2026-01-31T02:00:00"),
        ("2026-01-31 03:00", "2026-01-31T02:00:00"),
        ("2026-07-31 03:00", "2026-07-31T01:00:00"),
        ("2026-01-31", "2026-01-30T23:00:00"),
        ("02:00", "2026-01-31T01:00:00"),
        ("9:30", "2026-01-31T08:30:00"),
        ("02:00:30", "2026-01-31T01:00:30"),
        # The last one that there was: it is half past nine.
        ("23:00", "2026-01-30T22:00:00"),
        ("09:31", "2026-01-30T08:31:00"),
        ("today", "2026-01-30T23:00:00"),
        ("Yesterday", "2026-01-29T23:00:00"),
        ("yesterday 22:00", "2026-01-30T21:00:00"),
        ("today 12:00", "2026-01-31T11:00:00"),
        ("now", "2026-01-31T08:30:00"),
        # A duration ago.
        ("2h", "2026-01-31T06:30:00"),
        ("2h ago", "2026-01-31T06:30:00"),
        ("15 m ago", "2026-01-31T08:15:00"),
        ("90s", "2026-01-31T08:28:30"),
        ("1.5h", "2026-01-31T07:00:00"),
        ("1d", "2026-01-30T08:30:00"),
        (" 2h ", "2026-01-31T06:30:00"),
    ],
)
def test_a_time_is_what_people_write(
    berlin: Callable[[str, str], datetime], text: str, utc: str
) -> None:
    assert berlin("2026-01-31 09:30", text).astimezone(UTC).isoformat() == f"{utc}+00:00"


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("now", "2026-01-31T08:30:00"),
        # The next one: it is half past nine.
        ("09:31", "2026-01-31T08:31:00"),
        ("09:30", "2026-02-01T08:30:00"),
        ("02:00", "2026-02-01T01:00:00"),
        ("03:00 UTC", "2026-02-01T03:00:00"),
        ("today 22:00", "2026-01-31T21:00:00"),
        ("Tomorrow", "2026-01-31T23:00:00"),
        ("tomorrow 04:00", "2026-02-01T03:00:00"),
        ("2026-02-28 03:00", "2026-02-28T02:00:00"),
        ("2026-02-28T03:00:00Z", "2026-02-28T03:00:00"),
        ("2h", "2026-01-31T10:30:00"),
        ("in 2h", "2026-01-31T10:30:00"),
        ("In 15 m", "2026-01-31T08:45:00"),
    ],
)
def test_a_time_ahead_is_the_next_one(
    berlin: Callable[[str, str], datetime], text: str, utc: str
) -> None:
    now = datetime(2026, 1, 31, 8, 30, tzinfo=UTC)
    assert moment_ahead(text, now).astimezone(UTC).isoformat() == f"{utc}+00:00"


# In Berlin the clocks go forward on 2027-03-28 at 02:00, and back on 2026-10-25 at 03:00.
@pytest.mark.parametrize(
    ("read", "now", "text", "utc"),
    [
        (moment_ahead, "2026-10-24T12:00", "2026-10-25 02:30", "2026-10-25T00:30"),
        (moment_ahead, "2026-10-25T00:29", "02:30", "2026-10-25T00:30"),
        (moment_ahead, "2026-10-25T00:31", "02:30", "2026-10-25T01:30"),
        (moment_ahead, "2026-10-25T00:31", "2026-10-25 02:30", "2026-10-25T01:30"),
        (moment, "2026-10-26T12:00", "2026-10-25 02:30", "2026-10-25T01:30"),
        (moment, "2026-10-25T01:31", "02:30", "2026-10-25T01:30"),
        (moment, "2026-10-25T01:29", "02:30", "2026-10-25T00:30"),
        (moment_ahead, "2027-03-27T12:00", "2027-03-28", "2027-03-27T23:00"),
        (moment_ahead, "2027-03-27T12:00", "2027-03-28 03:00", "2027-03-28T01:00"),
        (moment_ahead, "2027-03-27T12:00", "2027-03-28 02:30 +01:00", "2027-03-28T01:30"),
    ],
)
@pytest.mark.usefixtures("berlin")
def test_of_a_time_that_the_clocks_show_twice_the_nearest_one_is_meant(
    read: Callable[[str, datetime], datetime], now: str, text: str, utc: str
) -> None:
    told = read(text, datetime.fromisoformat(f"{now}+00:00"))
    assert told.astimezone(UTC).isoformat() == f"{utc}:00+00:00"


@pytest.mark.parametrize("read", [moment, moment_ahead])
@pytest.mark.parametrize(
    "text",
    ["2027-03-28 02:30", "02:30", "today 02:00", "2027-03-28 02:30 CET", "2027-03-28 02:30 CEST"],
)
@pytest.mark.usefixtures("berlin")
def test_a_time_over_which_the_clocks_go_forward_is_an_error(
    read: Callable[[str, datetime], datetime], text: str
) -> None:
    """It would become one that nobody has written."""
    now = datetime(2027, 3, 28, 0, 0 if read is moment_ahead else 59, tzinfo=UTC)
    with pytest.raises(argparse.ArgumentTypeError) as error:
        read(text, now)
    assert "from 01:59:59 CET to 03:00:00 CEST" in str(error.value)


@pytest.mark.usefixtures("berlin")
def test_a_day_begins_after_midnight_where_the_clocks_go_forward_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "America/Santiago")
    time.tzset()
    told = moment("2026-09-06", datetime(2026, 9, 7, tzinfo=UTC))
    assert told.isoformat() == "2026-09-06T01:00:00-03:00"


@pytest.mark.usefixtures("berlin")
def test_a_time_that_the_clock_shows_twice_is_told_with_its_zone() -> None:
    assert local_time(datetime(2026, 10, 25, 0, 30, tzinfo=UTC)) == "2026-10-25 02:30:00 CEST"
    assert local_time(datetime(2026, 10, 25, 1, 30, tzinfo=UTC)) == "2026-10-25 02:30:00 CET"
    assert local_time(datetime(2026, 10, 25, 2, 30, tzinfo=UTC)) == "2026-10-25 03:30:00 CET"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "90",
        "2h ago",
        "today",
        "today 09:29",
        "yesterday 22:00",
        "2026-01-30",
        "in 02:00",
        "9999-12-31 23:59 -10:00",
    ],
)
def test_what_is_no_time_ahead_is_an_error_that_repeats_it(
    berlin: Callable[[str, str], datetime], text: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        moment_ahead(text, datetime(2026, 1, 31, 8, 30, tzinfo=UTC))
    assert repr(text) in str(error.value)
    assert "'tomorrow 04:00'" in str(error.value)


def test_what_the_command_line_prints_can_be_given_to_it(
    berlin: Callable[[str, str], datetime],
) -> None:
    now = "2026-11-30 09:30"
    for when in (
        datetime(2026, 1, 29, 3, 0, 30, tzinfo=UTC),
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
        datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
    ):
        for text in (rfc3339(when), local_time(when), PlainOutput().moment(when)):
            assert berlin(now, text) == when
    for text in ("2026-07-25 03:30 CET", "2026-07-25 03:30 EST"):
        with pytest.raises(argparse.ArgumentTypeError):
            berlin(now, text)


@pytest.mark.usefixtures("berlin")
def test_programs_get_local_times_with_their_offset() -> None:
    when = datetime(2026, 7, 25, 3, 30, tzinfo=UTC)
    assert PlainOutput().moment(when) == "2026-07-25T05:30:00+02:00"


@pytest.mark.usefixtures("berlin")
def test_a_column_of_times_says_the_zone_of_now_in_its_head_alone() -> None:
    now = datetime.now(UTC)
    other = (
        datetime(2026, 7, 25, tzinfo=UTC)
        if zone_now() == "CET"
        else datetime(2026, 1, 25, tzinfo=UTC)
    )
    assert time_in_cell(now) == f"{now.astimezone():%H:%M:%S}"
    assert time_in_cell(other) == local_time(other)
    assert local_time(other).endswith(f"{other.astimezone():%Z}")


def test_a_time_of_a_day_that_the_clocks_change(berlin: Callable[[str, str], datetime]) -> None:
    now = "2026-03-29 12:00"
    assert berlin(now, "today").astimezone(UTC).isoformat() == "2026-03-28T23:00:00+00:00"
    assert berlin(now, "11:00").astimezone(UTC).isoformat() == "2026-03-29T09:00:00+00:00"


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "90", "0s", "-2h", "99999d", "2h later", "25:00", "\u0660\u0662:00"),
        *("2026-13-01", "2026-01-31T3", "20260131", "2026-01-31T03:00+99:00"),
        *("yesterday yesterday", "today Z"),
        *("9999-12-31 23:59 -10:00", "0001-01-01 00:00 +14:00"),
    ],
)
def test_what_is_no_time_is_an_error_that_repeats_it_and_says_what_is_one(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        moment(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("trigger", "words"),
    [
        (IntervalTrigger(minutes=5), "every 5 min"),
        (IntervalTrigger(hours=25, seconds=1), "every 1 d 1 h 1 s"),
        (IntervalTrigger(seconds=0.5, jitter=3), "every 0.5 s + up to 3 s"),
        (CronTrigger(hour=3, minute=0, timezone=UTC), "cron hour=3 minute=0"),
        (CronTrigger(hour=3, minute="*", timezone=UTC), "cron hour=3 minute=*"),
        (
            CronTrigger(day_of_week="mon-fri", hour="*/2", timezone=UTC),
            "cron day_of_week=mon-fri hour=*/2 minute=0",
        ),
        (CronTrigger(minute="*", timezone=UTC), "cron minute=*"),
        (CronTrigger(second="*", timezone=UTC), "cron second=*"),
        (CronTrigger(second="*/5", timezone=UTC), "cron second=*/5"),
        (
            CronTrigger(hour=3, end_date=datetime(2030, 1, 1, tzinfo=UTC), timezone=UTC),
            "cron hour=3 minute=0 until 2030-01-01T00:00:00Z",
        ),
        (DateTrigger(datetime(2030, 1, 1, 3, tzinfo=UTC)), "once at 2030-01-01T03:00:00Z"),
        (DateTrigger(datetime(2030, 1, 1, 3, 0, 0, 1, tzinfo=UTC)), "once"),
        (
            OrTrigger([IntervalTrigger(hours=1), IntervalTrigger(days=1)]),
            "(every 1 h) or (every 1 d)",
        ),
        (
            AndTrigger([IntervalTrigger(hours=1), CronTrigger(day=1, timezone=UTC)]),
            "(cron day=1 hour=0 minute=0) and (every 1 h)",
        ),
        (object(), "custom trigger object"),
    ],
)
def test_a_schedule_is_told_in_words(trigger: object, words: str) -> None:
    assert schedule_in_words(json.loads(canonical_schedule(trigger))) == words


def test_a_calendar_interval_is_told_in_words() -> None:
    module = pytest.importorskip("apscheduler.triggers.calendarinterval")
    trigger = module.CalendarIntervalTrigger(months=2, days=1, hour=3, minute=5)
    words = schedule_in_words(json.loads(canonical_schedule(trigger)))
    assert words == "every 2 months 1 day at 03:05"


def test_a_schedule_that_no_row_takes_is_told_by_its_class_and_a_digest() -> None:
    parts = [CronTrigger(minute=number % 60, timezone=UTC) for number in range(100)]
    assert len(canonical_schedule(OrTrigger(parts[:50]))) > LONGEST_TEXT // 2
    text = canonical_schedule(OrTrigger(parts))
    assert len(text) < 200
    assert schedule_in_words(json.loads(text)) == "custom trigger OrTrigger"
    assert canonical_schedule(OrTrigger(parts[::-1])) == text
    assert canonical_schedule(OrTrigger(parts[1:])) != text


@pytest.mark.parametrize("form", [{}, [], 1, {"type": "sundial"}, {"type": "cron"}, "\x1b"])
def test_a_schedule_of_another_version_comes_as_it_is(form: object) -> None:
    assert schedule_in_words(form) == json.dumps(form)


def test_control_characters_become_escapes() -> None:
    assert printable("\x1b[2J\x9b\u202e\u2028\ud800\xa0\t") == (
        "\\x1b[2J\\x9b\\u202e\\u2028\\ud800\\xa0\\t"
    )
    assert printable("über 報告 🎉 'a'") == "über 報告 🎉 'a'"


def test_a_cell_never_looks_like_two_or_none() -> None:
    assert [one_cell(text) for text in ("", "a b", "a  b", " a ", "   ")] == [
        "-",
        "a b",
        "a \\x20b",
        "\\x20a\\x20",
        "\\x20\\x20\\x20",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.1234, "0.123 s"),
        (0.0004, "0 s"),
        (0.9996, "1 s"),
        (1.234, "1.2 s"),
        (5.005, "5 s"),
        (9.96, "10 s"),
        (12.6, "13 s"),
        (59.6, "1 min"),
        (3600, "1 h"),
        (3725, "1 h 2 min"),
        (90061, "1 d 1 h"),
        (-5, "-5 s"),
        (3605, "1 h 5 s"),
    ],
)
def test_durations_are_told_in_two_units(seconds: float, words: str) -> None:
    assert seconds_in_words(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "exact"),
    [
        (0.1234, "0.123s"),
        (0.9996, "1s"),
        (1.234, "1.2s"),
        (5.005, "5s"),
        (90.5, "90s"),
        (4210.123, "4210s"),
        (5400, "5400s"),
        (1e9, "1000000000s"),
        (-0.25, "-0.25s"),
    ],
)
def test_durations_for_programs_have_milliseconds_below_a_second_only(
    seconds: float, exact: str
) -> None:
    assert plain_seconds(seconds) == exact


def test_the_last_moment_that_there_is_can_be_told() -> None:
    assert rfc3339(datetime.max.replace(tzinfo=UTC)) == "9999-12-31T23:59:59.999999Z"
    rfc3339(datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))))


@pytest.mark.parametrize(
    ("trigger", "words"),
    [
        (IntervalTrigger(minutes=5, timezone="Asia/Tokyo"), "every 5 min"),
        (IntervalTrigger(minutes=5, jitter=3, timezone=UTC), "every 5 min + up to 3 s"),
        (CronTrigger(hour=3, timezone=UTC), "cron hour=3 minute=0 UTC"),
        (CronTrigger(hour=3, minute="*", timezone=UTC), "cron hour=3 minute=* UTC"),
        (CronTrigger(day="last", timezone=UTC), "cron day=last hour=0 minute=0 UTC"),
        (CronTrigger(timezone=UTC), "cron second=* UTC"),
        (
            CronTrigger(hour=3, timezone="Europe/Berlin", end_date=datetime(2026, 1, 31)),
            "cron hour=3 minute=0 Europe/Berlin until 2026-01-30T23:00:00Z",
        ),
        (
            CronTrigger(hour=3, timezone=timezone(timedelta(hours=-3))),
            "cron hour=3 minute=0 UTC-03:00",
        ),
        (DateTrigger(datetime(2026, 1, 31, 3, tzinfo=UTC)), "once at 2026-01-31T03:00:00Z"),
        (
            DateTrigger(datetime(2026, 1, 31, 3, 0, 0, 123456, tzinfo=UTC)),
            "once at 2026-01-31T03:00:00Z",
        ),
        (
            OrTrigger([CronTrigger(hour=3, timezone=UTC), IntervalTrigger(days=1, timezone=UTC)]),
            "(cron hour=3 minute=0 UTC) or (every 1 d)",
        ),
    ],
)
def test_a_stored_trigger_has_words_with_its_time_zone(trigger: object, words: str) -> None:
    assert stored_trigger_in_words(encode_trigger(trigger)) == words


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [1],
        {"type": "moonrise"},
        {"type": "cron", "fields": {"moon": "1"}},
        {"type": "cron", "fields": 5},
        {"type": "cron", "fields": {}, "timezone": "9" * 30},
        {"type": "cron", "fields": {}, "timezone": 5},
        {"type": "interval", "length": [1, 2]},
        {"type": "date", "run_date": 5},
    ],
)
def test_a_stored_trigger_that_is_not_known_is_shown_as_json(stored: object) -> None:
    assert stored_trigger_in_words(stored) == json.dumps(stored)


def test_of_a_pickled_trigger_nothing_is_read() -> None:
    assert stored_trigger_in_words({"pickle": "gASVBAAAAAAAAABL"}) == "pickled"
