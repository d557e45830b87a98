"""What a trigger says about its run times, without any scheduler."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._runs.trigger_times import (
    MOST_STEPS,
    MOST_WALKED,
    count_until,
    following_run_time,
    has_next_run,
    is_shared,
    may_give,
    nominal_time,
    period_after,
    run_times_between,
)

try:
    import pytz
except ImportError:
    pytz = None
try:
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
except ImportError:
    CalendarIntervalTrigger = None

HOUR = 3600.0
DAY = 24 * HOUR
BERLIN = ZoneInfo("Europe/Berlin")

needs_calendar = pytest.mark.skipif(
    CalendarIntervalTrigger is None, reason="APScheduler 3.10 has no calendar interval trigger"
)
needs_both_hours = pytest.mark.skipif(
    CalendarIntervalTrigger is None,
    reason="APScheduler 3.10 answers in the hour that comes twice with times of the first one",
)
zones = pytest.mark.parametrize(
    "zone_of",
    [
        pytest.param(ZoneInfo, id="zoneinfo"),
        pytest.param(
            pytz and pytz.timezone,
            id="pytz",
            marks=pytest.mark.skipif(pytz is None, reason="pytz is not installed"),
        ),
    ],
)


def at(text: str, zone: Any = BERLIN) -> datetime:
    """Return a local time in a zone of either library."""
    naive = datetime.fromisoformat(text)
    localize = getattr(zone, "localize", None)
    moment: datetime = localize(naive) if localize else naive.replace(tzinfo=zone)
    return moment


def cron(**fields: Any) -> Any:
    return CronTrigger(**{"timezone": BERLIN, **fields})


def interval(**fields: Any) -> Any:
    return IntervalTrigger(**{"start_date": at("2025-06-01 00:00"), "timezone": BERLIN, **fields})


def calendar(**fields: Any) -> Any:
    return CalendarIntervalTrigger(**{"start_date": "2025-01-01", "timezone": BERLIN, **fields})


@pytest.fixture
def calendar_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return how often a calendar interval was asked for its next time."""
    steps = 0
    plain = CalendarIntervalTrigger.get_next_fire_time

    def counted(self: Any, previous: datetime | None, now: datetime) -> Any:
        nonlocal steps
        steps += 1
        return plain(self, previous, now)

    monkeypatch.setattr(CalendarIntervalTrigger, "get_next_fire_time", counted)
    return lambda: steps


class CountingCron(CronTrigger):
    """Counts how often it or a copy of it is asked."""

    asked = 0

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> Any:
        CountingCron.asked += 1
        return super().get_next_fire_time(previous, now)


@pytest.fixture
def asked() -> Iterator[Callable[[], int]]:
    CountingCron.asked = 0
    yield lambda: CountingCron.asked
    CountingCron.asked = 0


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have every trigger draw this share of its jitter."""

    def choose(share: float) -> None:
        monkeypatch.setattr("random.uniform", lambda low, high: low + share * (high - low))

    return choose


# Periods


@pytest.mark.parametrize(
    ("trigger", "run_time", "period"),
    [
        pytest.param(interval(minutes=5), "2025-06-06 10:00", 300.0, id="interval"),
        pytest.param(
            interval(seconds=10, jitter=60),
            "2025-06-06 10:00:03.500000",
            10.0,
            id="interval-jitter",
        ),
        pytest.param(
            interval(hours=1, end_date=at("2025-06-06 10:00")),
            "2025-06-06 10:00",
            HOUR,
            id="interval-last-before-end",
        ),
        pytest.param(cron(minute=0), "2025-06-06 10:00", HOUR, id="cron-hourly"),
        pytest.param(
            cron(day_of_week="mon-fri", hour=3), "2025-06-06 03:00", 72 * HOUR, id="weekday-friday"
        ),
        pytest.param(
            cron(day_of_week="mon-fri", hour=3), "2025-06-05 03:00", DAY, id="weekday-thursday"
        ),
        pytest.param(
            cron(month=2, day=29, hour=3), "2024-02-29 03:00", 1461 * DAY, id="leap-years"
        ),
        pytest.param(
            cron(hour=3, end_date=at("2025-06-06 03:00")),
            "2025-06-06 03:00",
            DAY,
            id="cron-last-before-end",
        ),
        pytest.param(
            cron(hour=3, jitter=7200, end_date=at("2025-06-07 02:00")),
            "2025-06-06 03:00",
            DAY,
            id="cron-jitter-and-end",
        ),
        pytest.param(cron(year=2025, hour=3), "2025-12-31 03:00", None, id="cron-past-its-years"),
        pytest.param(DateTrigger(at("2025-06-06 10:00")), "2025-06-06 10:00", None, id="date"),
        pytest.param(
            DateTrigger(at("2025-06-06 10:00")), "2025-06-05 10:00", None, id="date-modified"
        ),
        pytest.param(
            OrTrigger([cron(hour=3), cron(hour=15, minute=30)]),
            "2025-06-06 03:00",
            12.5 * HOUR,
            id="or",
        ),
        pytest.param(
            OrTrigger([cron(hour=3, end_date=at("2025-06-06 03:00")), cron(hour=5)]),
            "2025-06-06 05:00",
            22 * HOUR,
            id="or-part-ended",
        ),
        pytest.param(
            OrTrigger([cron(hour=3, jitter=600), cron(hour=15)], jitter=900),
            "2025-06-06 03:00",
            12 * HOUR,
            id="or-jitter",
        ),
        pytest.param(
            OrTrigger([DateTrigger(at("2025-06-06 10:00")), cron(hour=12)]),
            "2025-06-06 10:00",
            2 * HOUR,
            id="or-date",
        ),
        pytest.param(
            AndTrigger([cron(day_of_week="fri"), cron(day=13)]),
            "2025-06-13 00:00",
            245 * DAY + HOUR,  # until 13 February, in winter time
            id="and",
        ),
        pytest.param(
            AndTrigger([cron(day_of_week="fri", jitter=600), cron(day=13, jitter=900)], jitter=60),
            "2025-06-13 00:00",
            245 * DAY + HOUR,
            id="and-jitter",
        ),
        pytest.param(
            AndTrigger([cron(hour=3, end_date=at("2025-06-06 03:00")), cron(minute=0)]),
            "2025-06-06 03:00",
            DAY,
            id="and-part-ended",
        ),
        pytest.param(
            AndTrigger([interval(hours=2), cron(hour="*/3")]),
            "2025-06-06 06:00",
            6 * HOUR,
            id="and-interval",
        ),
        pytest.param(
            AndTrigger([cron(hour=3), cron(year=2025)]), "2025-12-31 03:00", None, id="and-ended"
        ),
        pytest.param(
            OrTrigger([AndTrigger([cron(day_of_week="fri"), cron(day=13)]), cron(day=1)]),
            "2026-02-01 00:00",
            12 * DAY,
            id="nested-and-in-or",
        ),
        pytest.param(
            AndTrigger(
                [OrTrigger([cron(hour=3), cron(hour=5)]), cron(day_of_week="mon", hour="*")]
            ),
            "2025-06-09 05:00",
            7 * DAY - 2 * HOUR,
            id="nested-or-in-and",
        ),
        pytest.param(
            AndTrigger([AndTrigger([cron(hour="*/2"), cron(hour="*/3")]), cron(hour="*/4")]),
            "2025-06-06 00:00",
            12 * HOUR,
            id="nested-and-in-and",
        ),
    ],
)
def test_period_is_the_time_to_the_next_run(
    trigger: Any, run_time: str, period: float | None
) -> None:
    assert period_after(trigger, at(run_time)) == period


@needs_calendar
@pytest.mark.parametrize(
    ("make", "run_time", "period"),
    [
        pytest.param(lambda: calendar(months=1, hour=3), "2025-02-01 03:00", 28 * DAY, id="months"),
        pytest.param(
            lambda: calendar(days=1, hour=3), "2025-03-29 03:00", 23 * HOUR, id="clock-change"
        ),
        pytest.param(
            lambda: calendar(weeks=1, hour=3, end_date="2025-01-08", jitter=600),
            "2025-01-08 03:00",
            7 * DAY,
            id="last-before-end",
        ),
        pytest.param(
            lambda: AndTrigger([calendar(days=2, hour=3), cron(day_of_week="mon", hour=3)]),
            "2025-01-13 03:00",
            14 * DAY,
            id="and-cron",
        ),
        pytest.param(
            lambda: OrTrigger([calendar(months=1, hour=3), cron(day=2, hour=3)]),
            "2025-02-01 03:00",
            DAY,
            id="or-cron",
        ),
    ],
)
def test_calendar_interval_has_the_period_to_its_next_date(
    make: Callable[[], Any], run_time: str, period: float
) -> None:
    assert period_after(make(), at(run_time)) == period


@zones
@pytest.mark.parametrize(
    ("zone_name", "run_time", "hours"),
    [
        ("Europe/Berlin", "2025-03-29 12:00", 23),
        ("Europe/Berlin", "2025-03-30 12:00", 24),
        ("Europe/Berlin", "2025-10-25 12:00", 25),
        ("America/New_York", "2025-03-08 12:00", 23),
        ("America/New_York", "2025-11-01 12:00", 25),
        ("America/New_York", "2025-11-02 12:00", 24),
    ],
)
def test_daily_job_has_23_or_25_hours_across_a_clock_change(
    zone_of: Callable[[str], tzinfo], zone_name: str, run_time: str, hours: int
) -> None:
    zone = zone_of(zone_name)
    trigger = CronTrigger(hour=12, timezone=zone)
    assert period_after(trigger, at(run_time, zone)) == hours * HOUR
    assert period_after(OrTrigger([trigger]), at(run_time, zone)) == hours * HOUR
    assert period_after(AndTrigger([trigger, trigger]), at(run_time, zone)) == hours * HOUR


@zones
def test_period_is_that_between_the_consecutive_runs_of_random_cron_triggers(
    rng: random.Random, zone_of: Callable[[str], tzinfo]
) -> None:
    for _ in range(400):
        fields = {
            "second": rng.choice(["0", "*/15", "30"]),
            "minute": rng.choice(["*", "0", "*/7", "5,50"]),
            "hour": rng.choice(["*", "0", "1", "2", "3", "*/5", "9-17"]),
            "day": rng.choice(["*", "*", "1", "13,31", "last"]),
            "day_of_week": rng.choice(["*", "*", "mon-fri", "sun"]),
        }
        name = rng.choice(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
        zone = zone_of(name)
        plain = CronTrigger(timezone=zone, **fields)
        # Most of them within a month of spring's or autumn's clock changes.
        start, days = rng.choice([("2020-01-01", 3650), ("2025-03-06", 32), ("2025-10-04", 32)])
        moment = at(start, timezone.utc) + timedelta(seconds=rng.randrange(days * 86400))
        run_time = plain.get_next_fire_time(None, moment.astimezone(zone))
        following = plain.get_next_fire_time(run_time, run_time + timedelta(days=1))
        ending = CronTrigger(timezone=zone, jitter=40, end_date=run_time, **fields)
        assert period_after(ending, run_time) == following.timestamp() - run_time.timestamp(), (
            f"{plain!r} at {run_time}"
        )


@pytest.mark.parametrize(
    "trigger",
    [
        pytest.param(OrTrigger([interval(hours=2), cron(hour=3)]), id="interval-and-cron"),
        pytest.param(OrTrigger([interval(hours=5), interval(hours=3)]), id="intervals"),
        pytest.param(
            OrTrigger([interval(days=1), cron(day_of_week="mon-fri", hour="9-17")]), id="office"
        ),
        pytest.param(
            OrTrigger([OrTrigger([interval(hours=7), cron(hour=3)]), cron(minute=30, hour=4)]),
            id="nested",
        ),
    ],
)
def test_period_of_an_or_trigger_is_what_apscheduler_schedules_next(trigger: Any) -> None:
    run_time = trigger.get_next_fire_time(None, at("2025-10-20 00:30"))
    for _ in range(100):
        following = trigger.get_next_fire_time(run_time, run_time)
        elapsed = following.timestamp() - run_time.timestamp()
        assert period_after(trigger, run_time) == elapsed, f"at {run_time}"
        run_time = following


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: cron(hour=4), id="cron"),
        pytest.param(lambda: interval(hours=1, start_date=at("2025-06-01 00:07")), id="interval"),
        pytest.param(lambda: interval(weeks=300, start_date=at("2025-06-01 00:07")), id="years"),
        pytest.param(lambda: calendar(days=1, hour=4), id="calendar-days", marks=needs_calendar),
        pytest.param(lambda: calendar(months=1, hour=4), id="calendar", marks=needs_calendar),
        # Asked for a time after the year 9999, this one never answers.
        pytest.param(lambda: calendar(years=10, hour=4), id="decades", marks=needs_calendar),
        pytest.param(
            lambda: AndTrigger([cron(hour=4), cron(minute="0,15")]), id="and-that-agrees-at-4"
        ),
    ],
)
def test_and_trigger_whose_parts_never_agree_has_no_period(
    other: Callable[[], Any], asked: Callable[[], int]
) -> None:
    trigger = AndTrigger([CountingCron(hour=3, timezone=BERLIN), other()])
    assert period_after(trigger, at("2025-06-06 03:00")) is None
    assert 0 < asked() <= 2000


@needs_calendar
def test_calendar_interval_that_never_agrees_is_not_walked_from_its_start_again(
    calendar_steps: Callable[[], int],
) -> None:
    trigger = AndTrigger([calendar(days=1, hour=3, start_date="2015-06-06"), cron(hour=4)])
    assert period_after(trigger, at("2025-06-06 03:00")) is None
    assert 2000 < calendar_steps() < 6_300  # few for each of up to 2,000 rounds


@needs_both_hours
@zones
def test_parts_that_meet_in_the_hour_that_comes_twice_meet_later_next(
    zone_of: Callable[[str], Any],
) -> None:
    zone = zone_of("Europe/Berlin")
    start = at("2025-10-25 14:06", zone)
    minutes = CronTrigger(hour=2, minute="30,59", timezone=zone)
    both = AndTrigger([IntervalTrigger(minutes=7, start_date=start, timezone=zone), minutes])
    met = datetime(2025, 10, 26, 1, 59, tzinfo=timezone.utc).astimezone(zone)
    assert (met.timestamp() - start.timestamp()) % 420 == 0
    following = datetime(2025, 10, 29, 1, 30, tzinfo=timezone.utc)
    assert period_after(both, met) == following.timestamp() - met.timestamp()


@needs_both_hours
@pytest.mark.parametrize("combine", [None, AndTrigger, OrTrigger])
def test_jitter_leads_forward_in_the_hour_that_comes_twice(
    combine: Any, draw: Callable[[float], None]
) -> None:
    """Not back into the first one, where the trigger would seem to stand still."""
    draw(0.5)
    trigger = cron(minute="*", jitter=30)
    if combine:
        trigger = combine([cron(minute="*"), cron(second=0)], jitter=30)
    now = datetime(2025, 10, 26, 1, 10, 30, tzinfo=timezone.utc).astimezone(BERLIN)
    following = following_run_time(trigger, now, now)
    assert following is not None
    assert following.timestamp() - now.timestamp() == 30 + 15


@needs_calendar
@pytest.mark.parametrize("every", [{"days": 1}, {"days": 3}, {"weeks": 1, "days": 2}])
def test_a_calendar_interval_of_a_hundred_years_ago_agrees_with_others(
    every: dict[str, int],
) -> None:
    """It is asked at each of its dates, and the trigger may take no more than so many steps."""
    days = every.get("days", 0) + 7 * every.get("weeks", 0)
    start = date(2025, 6, 6) - timedelta(days=days * (45_000 // days))
    trigger = AndTrigger([calendar(**every, hour=3, start_date=start), cron(hour=3)])
    run_time = at("2025-06-06 03:00")
    for start_date in (start, date(2025, 6, 6)):
        trigger.triggers[0].start_date = start_date
        assert period_after(trigger, run_time) == days * 24 * HOUR


def every_stock_trigger() -> list[Any]:
    parts = [cron(hour=3, jitter=60, end_date=at("2025-07-01 00:00")), interval(hours=2, jitter=60)]
    triggers = [
        *parts,
        cron(hour=3),
        interval(hours=2, end_date=at("2025-07-01 00:00")),
        DateTrigger(at("2025-06-06 03:00")),
        OrTrigger(parts, jitter=60),
        AndTrigger([cron(hour=3, jitter=60), cron(minute=0, end_date=at("2025-07-01 00:00"))]),
        OrTrigger([AndTrigger(parts, jitter=60), *parts]),
    ]
    if CalendarIntervalTrigger is not None:
        ending = calendar(days=1, hour=3, jitter=60, end_date="2025-07-01")
        triggers += [ending, OrTrigger([ending, cron(hour=3)]), AndTrigger([ending, parts[0]])]
    return triggers


@pytest.mark.parametrize("trigger", every_stock_trigger(), ids=str)
@pytest.mark.parametrize("ask", [period_after, nominal_time])
def test_asking_leaves_the_trigger_as_it_was(trigger: Any, ask: Callable[..., Any]) -> None:
    before = pickle.dumps(trigger.__getstate__())
    ask(trigger, at("2025-06-06 03:00:20"))
    assert pickle.dumps(trigger.__getstate__()) == before


# Nominal times


JITTERED: list[Any] = [
    pytest.param(cron(hour=3, jitter=3600), "2025-06-06 03:00", id="cron"),
    pytest.param(cron(minute="*", jitter=59), "2025-06-06 00:01", id="cron-nearly-its-period"),
    pytest.param(cron(hour=3, jitter=0.25), "2025-06-06 03:00", id="cron-below-a-second"),
    pytest.param(
        OrTrigger([cron(hour=3, jitter=600), cron(hour=15)], jitter=900),
        "2025-06-06 03:00",
        id="or-jitter-on-jitter",
    ),
    pytest.param(
        AndTrigger([cron(day_of_week="fri"), cron(day=13)], jitter=7200),
        "2025-06-13 00:00",
        id="and",
    ),
    pytest.param(
        OrTrigger([AndTrigger([cron(hour=3), cron(minute=0)], jitter=60), cron(hour=5)]),
        "2025-06-06 03:00",
        id="nested",
    ),
]


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.999, 1])
@pytest.mark.parametrize(("trigger", "nominal"), JITTERED)
def test_jitter_below_the_period_is_taken_back_on_every_replica(
    trigger: Any, nominal: str, share: float, draw: Callable[[float], None]
) -> None:
    draw(share)
    run_time = trigger.get_next_fire_time(None, at("2025-06-06 00:00:30"))
    assert nominal_time(trigger, run_time) == at(nominal)


@pytest.mark.parametrize(("trigger", "nominal"), JITTERED)
def test_random_jitter_comes_back_to_one_nominal_time(
    trigger: Any, nominal: str, rng: random.Random
) -> None:
    random.seed(rng.random())
    run_times = {trigger.get_next_fire_time(None, at("2025-06-06 00:00:30")) for _ in range(30)}
    assert len(run_times) > 1
    assert {nominal_time(trigger, run_time) for run_time in run_times} == {at(nominal)}


@needs_calendar
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_jitter_of_a_calendar_interval_is_taken_back(
    share: float, draw: Callable[[float], None]
) -> None:
    draw(share)
    trigger = calendar(months=1, hour=3, jitter=3600)
    run_time = trigger.get_next_fire_time(at("2025-05-01 03:00"), at("2025-05-01 03:00"))
    assert nominal_time(trigger, run_time) == at("2025-06-01 03:00")


def test_of_very_many_run_times_the_first_ones_are_returned() -> None:
    trigger, start = interval(seconds=1), at("2025-06-01 00:00")
    for most, found in ((2_000, 2_000), (10**6, MOST_STEPS)):
        times = run_times_between(trigger, start, start + timedelta(days=30), most)
        assert 0 < len(times) <= found
        assert times[0] == start
        assert times[-1] - start == timedelta(seconds=len(times) - 1)


@needs_calendar
def test_jitter_of_an_old_calendar_interval_does_not_walk_from_its_start(
    calendar_steps: Callable[[], int],
) -> None:
    trigger = calendar(days=1, hour=3, jitter=3600, start_date="2015-06-06")
    assert nominal_time(trigger, at("2025-06-06 03:59:30")) == at("2025-06-06 03:00")
    assert 0 < calendar_steps() < 100  # not each of the days of ten years


@pytest.mark.parametrize("share", [0, 0.3, 0.7, 1])
@pytest.mark.parametrize("jitter", [90, 600, 7200])
def test_jitter_above_the_period_gives_the_last_time_before_the_run(
    share: float, jitter: int, draw: Callable[[float], None]
) -> None:
    draw(share)
    trigger = cron(minute="*", second=20, jitter=jitter)
    run_time = trigger.get_next_fire_time(None, at("2025-06-06 10:00"))
    nominal = nominal_time(trigger, run_time)
    assert nominal <= run_time < nominal + timedelta(minutes=1)
    assert (nominal.second, nominal.microsecond) == (20, 0)


@pytest.mark.parametrize("hour", [3, "*"])
def test_jitter_above_the_period_skips_the_pauses_of_an_uneven_trigger(hour: Any) -> None:
    trigger = cron(hour=hour, minute="0-4", jitter=7200)
    assert nominal_time(trigger, at("2025-06-06 03:50")) == at("2025-06-06 03:04")
    assert nominal_time(trigger, at("2025-06-06 03:02:59")) == at("2025-06-06 03:02")


def test_huge_jitter_of_a_trigger_that_fires_every_second_costs_few_steps(
    asked: Callable[[], int],
) -> None:
    trigger = CountingCron(second="*", timezone=BERLIN, jitter=1_000_000)
    run_time = at("2025-06-06 10:00:07.250000")
    assert nominal_time(trigger, run_time) == at("2025-06-06 10:00:07")
    assert 0 < asked() <= 10


@pytest.mark.parametrize(
    "trigger",
    [
        pytest.param(interval(hours=1, jitter=600), id="interval-with-jitter"),
        pytest.param(cron(minute=0), id="cron-without-jitter"),
        pytest.param(cron(minute=0, jitter=0), id="cron-jitter-0"),
        pytest.param(OrTrigger([cron(minute=0), interval(hours=1)]), id="or-without-jitter"),
        pytest.param(DateTrigger(at("2025-06-06 10:03:20")), id="date"),
        pytest.param(cron(minute=0, jitter=60), id="moved-by-modify-job"),
        pytest.param(cron(minute=0, jitter=600, start_date=at("2030-01-01")), id="before-start"),
    ],
)
def test_run_time_without_a_common_nominal_time_stays(trigger: Any) -> None:
    run_time = at("2025-06-06 10:03:20")
    assert nominal_time(trigger, run_time) == run_time


def test_nominal_time_outlives_the_end_date() -> None:
    end = at("2025-06-06 03:10")
    trigger = cron(hour=3, jitter=3600, end_date=end)
    assert nominal_time(trigger, end) == at("2025-06-06 03:00")


@zones
@pytest.mark.parametrize("share", [0, 0.2, 0.5, 0.8, 1])
@pytest.mark.parametrize(
    ("zone_name", "nominal"),
    [
        ("Europe/Berlin", "2025-03-30 01:30"),
        ("Europe/Berlin", "2025-10-26 01:30"),
        ("America/New_York", "2025-03-09 01:30"),
        ("America/New_York", "2025-11-02 00:30"),
    ],
)
def test_jitter_across_a_clock_change_is_taken_back(
    zone_of: Callable[[str], tzinfo],
    zone_name: str,
    nominal: str,
    share: float,
    draw: Callable[[float], None],
) -> None:
    draw(share)
    zone = zone_of(zone_name)
    expected = at(nominal, zone)
    trigger = CronTrigger(hour=expected.hour, minute=30, timezone=zone, jitter=6000)
    run_time = trigger.get_next_fire_time(None, expected - timedelta(minutes=25))
    # As drawn, which may be a local time that does not exist, and as a job store gives it back.
    for same in (run_time, run_time.astimezone(timezone.utc).astimezone(run_time.tzinfo)):
        assert nominal_time(trigger, same).timestamp() == expected.timestamp(), f"ran {same}"


# Custom triggers


class Custom(BaseTrigger):
    """Answers with what a function says, and remembers how often it was asked."""

    def __init__(self, answer: Callable[[datetime | None, datetime], datetime | None]) -> None:
        self.answer = answer
        self.asked = 0

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime | None:
        self.asked += 1
        return self.answer(previous, now)


class Queue(BaseTrigger):
    """Gives each of its run times once: asking changes it."""

    def __init__(self, *run_times: datetime) -> None:
        self.run_times = list(run_times)

    def get_next_fire_time(self, _previous: datetime | None, _now: datetime) -> datetime | None:
        return self.run_times.pop(0) if self.run_times else None


class Uncopyable(Custom):
    jitter = 60

    def __init__(self) -> None:
        super().__init__(lambda previous, now: (previous or now) + timedelta(hours=1))
        self.guard = threading.Lock()


class Slotted(BaseTrigger):
    __slots__ = ("end_date", "every", "jitter")

    def __init__(self, every: timedelta, end_date: datetime, jitter: float) -> None:
        self.every = every
        self.end_date: datetime | None = end_date
        self.jitter: float | None = jitter

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime | None:
        following = (previous or now) + self.every + timedelta(seconds=self.jitter or 0)
        return None if self.end_date and following > self.end_date else following


NOW = at("2025-06-06 10:00")


@pytest.mark.parametrize(
    ("answer", "period"),
    [
        pytest.param(lambda previous, _: previous + timedelta(hours=2), 7200.0, id="steps"),
        pytest.param(lambda _, now: now + timedelta(seconds=5), 5.0, id="counts-from-now"),
        pytest.param(lambda *_: None, None, id="ended"),
        pytest.param(lambda previous, _: previous, None, id="stands-still"),
        pytest.param(lambda previous, _: previous - timedelta(days=1), None, id="goes-back"),
        pytest.param(
            # `now` must have passed a run time for the next one to come.
            lambda _, now: NOW if now <= NOW else NOW + timedelta(minutes=1),
            60.0,
            id="moves-with-now",
        ),
    ],
)
def test_custom_trigger_has_the_period_that_it_says(
    answer: Callable[..., Any], period: float | None
) -> None:
    trigger = Custom(answer)
    assert period_after(trigger, NOW) == period
    assert trigger.asked == 0


def test_stateful_trigger_is_asked_on_a_copy() -> None:
    trigger = Queue(NOW + timedelta(minutes=3), NOW + timedelta(minutes=10))
    combined = OrTrigger([trigger, cron(minute=0)])
    assert [period_after(trigger, NOW) for _ in range(3)] == [180.0] * 3
    assert [period_after(combined, NOW) for _ in range(3)] == [180.0] * 3
    assert [has_next_run(trigger, NOW) for _ in range(3)] == [True] * 3
    assert [has_next_run(combined, NOW) for _ in range(3)] == [True] * 3
    assert not has_next_run(Queue(), NOW)
    assert len(trigger.run_times) == 2


def test_trigger_that_cannot_be_copied_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    trigger = Uncopyable()
    with pytest.raises(TypeError, match="pickle"):
        period_after(trigger, NOW)
    assert nominal_time(trigger, NOW) == NOW
    assert "without jitter" in caplog.text
    assert has_next_run(trigger, NOW)
    assert trigger.asked == 0


def test_slotted_trigger_is_asked_without_its_jitter_and_end() -> None:
    trigger = Slotted(timedelta(minutes=7), end_date=NOW, jitter=5)
    assert period_after(trigger, NOW) == 420.0
    assert (trigger.end_date, trigger.jitter) == (NOW, 5)


@pytest.mark.parametrize(("combine", "period"), [(OrTrigger, 60.0), (AndTrigger, 3600.0)])
def test_custom_trigger_without_pickle_support_may_be_combined(
    combine: Callable[..., Any], period: float
) -> None:
    def minutely(previous: datetime | None, now: datetime) -> datetime:
        return previous + timedelta(minutes=1) if previous else now.replace(second=0, microsecond=0)

    trigger = combine([Custom(minutely), cron(minute=0)], jitter=5)
    assert period_after(trigger, NOW) == period
    assert nominal_time(trigger, NOW + timedelta(seconds=3)) == NOW


def test_custom_trigger_that_always_starts_long_ago_is_not_followed_for_ever() -> None:
    steps = []

    def secondly(previous: datetime | None, _: datetime) -> datetime:
        steps.append(previous)
        return previous + timedelta(seconds=1) if previous else at("1970-01-01")

    trigger = Custom(secondly)
    trigger.jitter = 60
    assert nominal_time(trigger, NOW) == NOW
    assert 1 < len(steps) < 100_000


# Run times that every replica computes alike

TEN = datetime(2025, 6, 6, 10, tzinfo=timezone.utc)  # 12:00 in Berlin
EVERY_5 = IntervalTrigger(minutes=5, start_date=TEN, timezone=timezone.utc)


@pytest.mark.parametrize(
    ("trigger", "nominal"),
    [
        (cron(minute="*/5"), TEN),
        (cron(minute="*/5", jitter=60), TEN),
        (cron(minute="*/5", end_date=TEN), TEN),  # the last one
        (cron(hour="11,12"), TEN),
        (DateTrigger(TEN, timezone.utc), TEN),
        (DateTrigger(TEN.replace(microsecond=5), timezone.utc), TEN.replace(microsecond=5)),
        (EVERY_5, TEN),
        (EVERY_5, TEN + timedelta(minutes=35)),
        (OrTrigger([cron(hour=12), EVERY_5]), TEN + timedelta(minutes=5)),
        (AndTrigger([cron(hour=12), cron(minute=0)]), TEN),
    ],
)
def test_a_run_time_of_the_schedule_itself_is_shared(trigger: Any, nominal: datetime) -> None:
    assert is_shared(trigger, nominal)


@pytest.mark.parametrize(
    ("trigger", "nominal"),
    [
        # A user has set it, as by modify_job(next_run_time=...).
        (cron(minute="*/5"), TEN + timedelta(seconds=1)),
        (cron(minute="*/5"), TEN.replace(microsecond=1)),
        (DateTrigger(TEN, timezone.utc), TEN + timedelta(seconds=1)),
        (EVERY_5, TEN + timedelta(minutes=1)),
        # Each replica has its own start, or its own code.
        (
            IntervalTrigger(minutes=5, start_date=TEN.replace(microsecond=1), timezone="UTC"),
            TEN.replace(microsecond=1),
        ),
        (Custom(lambda _previous, now: now), TEN),
        (OrTrigger([cron(hour=12), Custom(lambda _previous, now: now)]), TEN),
        (
            AndTrigger(
                [
                    cron(hour=12),
                    IntervalTrigger(
                        minutes=5, start_date=TEN.replace(microsecond=1), timezone="UTC"
                    ),
                ]
            ),
            TEN,
        ),
    ],
)
def test_another_run_time_is_not_shared(trigger: Any, nominal: datetime) -> None:
    assert not is_shared(trigger, nominal)


ITS_OWN = IntervalTrigger(minutes=5, start_date=TEN.replace(microsecond=1), timezone="UTC")
WITH_JITTER = IntervalTrigger(minutes=5, start_date=TEN, timezone="UTC", jitter=30)
SET = TEN + timedelta(minutes=6, seconds=1)


@pytest.mark.parametrize(
    ("trigger", "seconds", "previous", "expected"),
    [
        (cron(minute="*/5"), 0, None, True),
        (cron(minute="*/5"), 61, None, False),
        (DateTrigger(TEN, timezone.utc), 0, None, True),
        (DateTrigger(TEN, timezone.utc), 1, None, False),
        # From its start, as after `resume_job` and `reschedule_job`, also a start of its own.
        (EVERY_5, 600, None, True),
        (EVERY_5, 601, None, False),
        (EVERY_5, -300, None, False),
        (ITS_OWN, 300, None, True),
        (ITS_OWN, 361, None, False),
        # On from its last run time, which was set; some run times may have been left out.
        (EVERY_5, 661, SET, True),
        (EVERY_5, 1261, SET, True),
        (EVERY_5, 600, SET, True),
        (EVERY_5, 400, SET, False),
        (EVERY_5, 61, SET, False),
        # Jitter makes it at most so much later.
        (WITH_JITTER, 329, None, True),
        (WITH_JITTER, 331, None, False),
        (WITH_JITTER, 690, SET, True),
        (WITH_JITTER, 595, SET, False),
        # One part of either kind, or all parts.
        (OrTrigger([cron(minute=0), EVERY_5]), 661, SET, True),
        (OrTrigger([cron(minute=0), EVERY_5]), 400, SET, False),
        (AndTrigger([cron(minute="*/10"), EVERY_5]), 600, None, True),
        (AndTrigger([cron(minute="*/10"), EVERY_5]), 300, None, False),
        # Of an application's own trigger nobody knows.
        (Custom(lambda _previous, now: now), 61, None, True),
    ],
)
def test_whether_a_trigger_may_have_given_a_run_time_itself(
    trigger: Any, seconds: float, previous: datetime | None, expected: bool
) -> None:
    assert may_give(trigger, TEN + timedelta(seconds=seconds), previous) is expected


def test_a_default_start_of_an_interval_is_not_shared() -> None:
    trigger = IntervalTrigger(minutes=5, timezone=timezone.utc)
    assert trigger.start_date.microsecond != 0
    assert not is_shared(trigger, trigger.start_date)


@needs_calendar
def test_a_calendars_run_times_are_shared_though_their_replicas_began_on_other_days() -> None:
    daily = [
        CalendarIntervalTrigger(days=1, hour=10, start_date=f"2025-06-0{day}", timezone="UTC")
        for day in (1, 5)
    ]
    assert [is_shared(trigger, TEN) for trigger in daily] == [True, True]
    assert not is_shared(daily[0], TEN + timedelta(seconds=1))


def test_a_run_time_in_another_zone_is_the_same_one() -> None:
    assert is_shared(cron(minute="*/5"), TEN.astimezone(BERLIN))
    berlin = CronTrigger(hour=12, timezone=BERLIN)
    assert is_shared(berlin, TEN)


class EachSecond(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """A trigger of the application's, which counts the questions that its copies get, too."""

    asked = 0

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime:
        type(self).asked += 1
        return now if previous is None else previous + timedelta(seconds=1)


def test_run_times_of_the_applications_trigger_are_counted_in_limited_steps() -> None:
    """Its run times can only be walked, and other jobs wait for that."""
    until = datetime(2026, 3, 1, tzinfo=timezone.utc)
    count, _, _ = count_until(EachSecond(), until - timedelta(days=15), until)
    assert count == 10_001
    assert EachSecond.asked <= 10_000 + MOST_WALKED + 3
