"""What is made of what users write on the command line, and what they read there."""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timedelta, timezone

import pytest
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._scheduler.names import canonical_schedule
from apscheduler_tasklock.cli.schedules import schedule_in_words, trigger_in_words
from apscheduler_tasklock.cli.text import one_cell, printable, rfc3339, seconds_in_words, width
from apscheduler_tasklock.cli.values import duration, since
from apscheduler_tasklock.jobstore.triggers import encode_trigger

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


def test_since_is_a_time_with_its_zone_or_a_duration_ago() -> None:
    assert since("2026-01-31T03:00:00Z") == datetime(2026, 1, 31, 3, tzinfo=UTC)
    assert since("2026-01-31T03:00:00+02:00") == datetime(2026, 1, 31, 1, tzinfo=UTC)
    ago = datetime.now(UTC) + timedelta(seconds=1) - since("2h")
    assert timedelta(hours=2) <= ago < timedelta(hours=3)
    for text in ("2026-01-31T03:00:00", "yesterday", "0", "99999d"):
        with pytest.raises(argparse.ArgumentTypeError):
            since(text)


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


def test_wide_characters_take_two_places() -> None:
    assert [width(text) for text in ("abc", "報告", "u\u0308")] == [3, 4, 1]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.1234, "0.12 s"),
        (9.996, "10 s"),
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


def test_the_last_moment_that_there_is_can_be_told() -> None:
    assert rfc3339(datetime.max.replace(tzinfo=UTC)) == "9999-12-31T23:59:59.999999Z"
    rfc3339(datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))))


@pytest.mark.parametrize(
    ("trigger", "words"),
    [
        (IntervalTrigger(minutes=5, timezone="Asia/Tokyo"), "every 5 min"),
        (IntervalTrigger(minutes=5, jitter=3, timezone=UTC), "every 5 min + up to 3 s"),
        (CronTrigger(hour=3, timezone=UTC), "cron hour=3 minute=0"),
        (CronTrigger(hour=3, minute="*", timezone=UTC), "cron hour=3 minute=*"),
        (CronTrigger(day="last", timezone=UTC), "cron day=last hour=0 minute=0"),
        (CronTrigger(timezone=UTC), "cron second=*"),
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
            OrTrigger([CronTrigger(hour=3, timezone=UTC), IntervalTrigger(days=1, timezone=UTC)]),
            "(cron hour=3 minute=0) or (every 1 d)",
        ),
    ],
)
def test_a_stored_trigger_has_words_with_its_time_zone(trigger: object, words: str) -> None:
    assert trigger_in_words(encode_trigger(trigger)) == words


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
    assert trigger_in_words(stored) == json.dumps(stored)


def test_of_a_pickled_trigger_nothing_is_read() -> None:
    assert trigger_in_words({"pickle": "gASVBAAAAAAAAABL"}) == "pickled"
