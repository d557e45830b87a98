"""Periods of random triggers, compared with a walk through time that knows nothing of triggers.

A cron trigger is here a set of allowed values for each field, and the walk looks at one moment
after the other, in UTC: whatever the clocks do, it skips none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger
from hypothesis import assume, given
from hypothesis import strategies as st

from apscheduler_tasklock._runs.trigger_times import (
    MOST_STEPS,
    StepBudget,
    nominal_time,
    period_after,
)

try:
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
except ImportError:
    CalendarIntervalTrigger = None

# Clocks that change at night, at midnight, by half an hour, and never; with odd offsets, too.
ZONES = [
    ZoneInfo(name)
    for name in (
        "Europe/Berlin",
        "America/New_York",
        "America/Santiago",
        "Australia/Lord_Howe",
        "Asia/Kathmandu",
        "UTC",
    )
]
# Shortly before their clock changes of 2025, and some day.
STARTS = [
    datetime(2025, month, day, tzinfo=timezone.utc)
    for month, day in [(3, 8), (3, 29), (4, 4), (9, 5), (10, 3), (10, 24), (10, 31), (6, 1)]
]
DAYS = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
FIELDS = {
    "second": range(60),
    "minute": range(60),
    "hour": range(24),
    "day_of_week": range(7),
    "day": range(1, 32),
}


@dataclass(frozen=True)
class Grain:
    """Which fields differ, how far apart the moments are, and how far to look for one."""

    fields: tuple[str, ...]
    step: timedelta
    horizon: timedelta

    def after(self, moment: datetime) -> Iterator[datetime]:
        for steps in range(1, self.horizon // self.step + 1):
            yield moment + steps * self.step


GRAINS = [
    Grain(("second", "minute"), timedelta(seconds=1), timedelta(hours=2)),
    Grain(("minute", "hour"), timedelta(minutes=1), timedelta(days=3)),
    # Not by the hour, since that is where neither all offsets nor all clock changes are.
    Grain(("hour", "day_of_week", "day"), timedelta(minutes=15), timedelta(days=40)),
]


@dataclass(frozen=True)
class Cron:
    zone: ZoneInfo
    grain: Grain
    allowed: dict[str, frozenset[int]]

    def allows(self, local: datetime) -> bool:
        return (
            local.second in self.allowed["second"]
            and local.minute in self.allowed["minute"]
            and local.hour in self.allowed["hour"]
            and local.weekday() in self.allowed["day_of_week"]
            and local.day in self.allowed["day"]
        )

    def fires_at(self, moment: datetime) -> bool:
        return self.allows(moment.astimezone(self.zone))

    def next_after(self, moment: datetime) -> datetime | None:
        return next((at for at in self.grain.after(moment) if self.fires_at(at)), None)

    def trigger(self, **options: Any) -> Any:
        fields = {
            name: ",".join(DAYS[value] if name == "day_of_week" else str(value) for value in values)
            for name, values in self.allowed.items()
        }
        return CronTrigger(timezone=self.zone, **fields, **options)


@dataclass(frozen=True)
class Interval:
    zone: ZoneInfo
    start: datetime
    length: timedelta

    def fires_at(self, moment: datetime) -> bool:
        return moment >= self.start and not (moment - self.start) % self.length

    def next_after(self, moment: datetime) -> datetime:
        return moment + self.length  # it counts from the job's last run, whoever caused that

    def trigger(self, **options: Any) -> Any:
        length = int(self.length.total_seconds())
        return IntervalTrigger(seconds=length, start_date=self.start, timezone=self.zone, **options)


@dataclass(frozen=True)
class Either:
    parts: list[Any]

    def fires_at(self, moment: datetime) -> bool:
        return any(part.fires_at(moment) for part in self.parts)

    def next_after(self, moment: datetime) -> datetime | None:
        times = [part.next_after(moment) for part in self.parts]
        return min((at for at in times if at is not None), default=None)

    def trigger(self, **options: Any) -> Any:
        return OrTrigger([part.trigger(**options) for part in self.parts])


@dataclass(frozen=True)
class Both:
    grain: Grain
    parts: list[Any]

    def fires_at(self, moment: datetime) -> bool:
        return all(part.fires_at(moment) for part in self.parts)

    def next_after(self, moment: datetime) -> datetime | None:
        return next((at for at in self.grain.after(moment) if self.fires_at(at)), None)

    def trigger(self, **options: Any) -> Any:
        return AndTrigger([part.trigger(**options) for part in self.parts])


def some_of(values: range) -> st.SearchStrategy[frozenset[int]]:
    """Return a field's values: a few, a stretch, every so many, or all."""
    ends = st.tuples(st.sampled_from(values), st.sampled_from(values)).map(sorted)
    return st.one_of(
        st.frozensets(st.sampled_from(values), min_size=1, max_size=4),
        ends.map(lambda both: frozenset(range(both[0], both[1] + 1))),
        st.integers(1, len(values) // 2).map(lambda every: frozenset(values[::every])),
    )


def crons(zone: ZoneInfo, grain: Grain) -> st.SearchStrategy[Cron]:
    zeros = {"second": frozenset({0}), "minute": frozenset({0})}
    every = {name: frozenset(values) for name, values in FIELDS.items()}
    drawn = st.fixed_dictionaries({name: some_of(FIELDS[name]) for name in grain.fields})
    finer = () if "second" in grain.fields else ("second",)
    finer += () if "minute" in grain.fields else ("minute",)
    fixed = {**every, **{name: zeros[name] for name in finer}}
    return drawn.map(lambda fields: Cron(zone, grain, {**fixed, **fields}))


@st.composite
def fires(draw: st.DrawFn, *, combined: bool = True) -> tuple[Any, datetime]:
    """Return a schedule, and a moment at which it fires."""
    zone, grain, start = (draw(st.sampled_from(many)) for many in (ZONES, GRAINS, STARTS))
    start += draw(st.integers(0, timedelta(days=3) // grain.step)) * grain.step
    schedule: st.SearchStrategy[Any] = crons(zone, grain)
    if combined:
        lengths = st.integers(1, 40).map(lambda steps: steps * grain.step)
        parts = schedule | st.builds(Interval, st.just(zone), st.just(start), lengths)
        several = st.lists(parts, min_size=2, max_size=3)
        pairs = several.map(Either) | several.map(lambda both: Both(grain, both))
        nested = st.lists(pairs | parts, min_size=2, max_size=2).map(Either)
        nested |= st.tuples(several.map(Either), parts).map(lambda both: Both(grain, list(both)))
        schedule = st.one_of(parts, pairs, nested)
    drawn = draw(schedule)
    moment = next((at for at in grain.after(start) if drawn.fires_at(at)), None)
    assume(moment is not None)
    return drawn, moment.astimezone(zone)


def clocks_go_forward(zone: ZoneInfo, start: datetime, end: datetime) -> bool:
    """Tell whether they do so between two moments."""
    return any(later > earlier for earlier, later in pairwise(offsets(zone, start, end)))


def clocks_go_back(zone: Any, start: datetime, end: datetime) -> bool:
    """Tell whether they do so between two moments."""
    return any(later < earlier for earlier, later in pairwise(offsets(zone, start, end)))


def offsets(zone: Any, start: datetime, end: datetime) -> list[timedelta]:
    """Return the offsets of a zone at the hours between two moments, and at both."""
    hours = (end - start) // timedelta(hours=1)
    moments = [start, *(start + timedelta(hours=n) for n in range(hours)), end]
    return [moment.astimezone(zone).utcoffset() or timedelta() for moment in moments]


@given(fires(), st.none() | st.integers(1, 7200), st.booleans())
def test_a_period_lasts_until_the_next_moment_that_the_fields_allow(
    fire: tuple[Any, datetime], jitter: int | None, ends: bool
) -> None:
    schedule, run_time = fire
    following = schedule.next_after(run_time.astimezone(timezone.utc))
    assume(following is not None)
    if CalendarIntervalTrigger is None:
        # In the hour that comes twice, APScheduler 3.10 puts times of the first one before those
        # of the second, so that an AND of triggers finds none in common.
        assume(not clocks_go_back(run_time.tzinfo, run_time - timedelta(hours=3), following))
    if clocks_go_forward(run_time.tzinfo, run_time.astimezone(timezone.utc), following):
        # There APScheduler goes its own ways: a cron job due at 00:00 skips the whole next day,
        # one due at 02:30 may run at 03:30. The period is what it makes of it.
        assume(isinstance(schedule, Cron))
        following = schedule.trigger().get_next_fire_time(run_time, run_time)
    trigger = schedule.trigger(jitter=jitter, end_date=run_time if ends else None)

    # Two long lists of seconds may have thousands of moments that they do not share.
    period = period_after(trigger, run_time, StepBudget(100 * MOST_STEPS))
    assert period == following.timestamp() - run_time.timestamp()


@given(fires(combined=False), st.integers(1, 7200), st.floats(0, 1))
def test_a_nominal_time_is_the_last_moment_that_the_fields_allow(
    fire: tuple[Cron, datetime], jitter: int, share: float
) -> None:
    schedule, due = fire
    nominal = due.astimezone(timezone.utc)
    run_time = nominal + timedelta(seconds=round(share * jitter, 3))
    assume(not clocks_go_forward(schedule.zone, nominal - timedelta(hours=3), run_time))
    if CalendarIntervalTrigger is None:
        # Asked in the hour that comes twice, APScheduler 3.10 answers with a time of the first one.
        assume(not clocks_go_back(schedule.zone, nominal - timedelta(hours=3), run_time))
    for at in schedule.grain.after(nominal):
        if at > run_time:
            break
        nominal = at if schedule.fires_at(at) else nominal

    trigger = schedule.trigger(jitter=jitter)
    answer = nominal_time(trigger, run_time.astimezone(schedule.zone))
    # Python takes moments of two zones for unequal if one is in an hour that comes twice.
    assert answer.timestamp() == nominal.timestamp()


@pytest.mark.skipif(CalendarIntervalTrigger is None, reason="APScheduler 3.10 has none")
@given(
    zone=st.sampled_from(ZONES),
    start=st.dates(date(2024, 1, 1), date(2026, 12, 28)),
    months=st.integers(0, 14),
    days=st.integers(0, 40),
    at=st.builds(time, st.integers(0, 23), st.sampled_from([0, 15, 30])),
    jitter=st.none() | st.integers(1, 7200),
    ends=st.booleans(),
)
def test_a_calendar_interval_lasts_until_the_same_time_of_a_later_date(
    zone: ZoneInfo,
    start: date,
    months: int,
    days: int,
    at: time,
    jitter: int | None,
    ends: bool,
) -> None:
    assume(months or days)
    run_time = datetime.combine(start, at, zone)
    assume(exists(run_time))
    following = datetime.combine(later(start, months, days), at, zone)
    while not exists(following):
        following = datetime.combine(later(following.date(), months, days), at, zone)
    trigger = CalendarIntervalTrigger(
        months=months,
        days=days,
        hour=at.hour,
        minute=at.minute,
        start_date=start,
        end_date=start if ends else None,
        timezone=zone,
        jitter=jitter,
    )
    assert period_after(trigger, run_time) == following.timestamp() - run_time.timestamp()


def exists(local: datetime) -> bool:
    """Tell whether the clocks ever show this time."""
    return local.astimezone(timezone.utc).astimezone(local.tzinfo).time() == local.time()


def later(day: date, months: int, days: int) -> date:
    """Return the date so many months later, over months that are too short, and then days."""
    index = day.year * 12 + day.month - 1
    while True:
        index += months
        try:
            return day.replace(year=index // 12, month=index % 12 + 1) + timedelta(days)
        except ValueError:
            continue
