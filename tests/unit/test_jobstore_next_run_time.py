"""Which run time of a stored job is due, and which follows: as APScheduler has it, in bounds.

And how long it is remembered what cannot be run here.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import apscheduler
import pytest
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from hypothesis import given
from hypothesis import strategies as st
from psycopg.types.range import Range

from apscheduler_tasklock._lock.job_rows import DueRow
from apscheduler_tasklock._runs.trigger_times import MOST_WALKED, EndlessTriggerError
from apscheduler_tasklock.jobstore import bad_rows
from apscheduler_tasklock.jobstore.bad_rows import MOST_REMEMBERED, Backoff
from apscheduler_tasklock.jobstore.next_run_time import (
    due_run,
    due_run_time,
    passed_run_times,
)

BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2026, 3, 2, 12, 0, 30, tzinfo=timezone.utc)


def as_apscheduler_has_it(
    trigger: Any, first: datetime, now: datetime
) -> tuple[list[datetime], datetime | None]:
    """Return what ``Job._get_run_times`` does, and the run time that follows."""
    times, moment = [], first
    while moment is not None and moment.timestamp() <= now.timestamp():
        times.append(moment)
        moment = trigger.get_next_fire_time(moment, now)
    return times, moment


triggers = st.one_of(
    st.builds(
        CronTrigger,
        minute=st.sampled_from(["*", "*/7", "0,30"]),
        hour=st.sampled_from(["*", "3", "9-17"]),
        timezone=st.sampled_from([BERLIN, timezone.utc]),
    ),
    st.builds(
        IntervalTrigger,
        seconds=st.integers(30, 9000),
        start_date=st.just(NOW - timedelta(days=3)),
        end_date=st.sampled_from([None, NOW - timedelta(hours=1), NOW + timedelta(seconds=40)]),
        timezone=st.just(timezone.utc),
    ),
)


@given(trigger=triggers, late=st.integers(0, 3 * 86400))
def test_is_the_one_that_apscheduler_would_run(trigger: Any, late: int) -> None:
    first = trigger.get_next_fire_time(None, NOW - timedelta(seconds=late))
    if first is None or first > NOW:
        return
    times, following = as_apscheduler_has_it(trigger, first, NOW)
    assert due_run_time(trigger, first, NOW, NOW) == (times[-1], following)
    second = times[1] if len(times) > 1 else following
    assert due_run_time(trigger, first, NOW, first) == (first, second)


def test_of_a_one_off_job_has_none_that_follows() -> None:
    trigger = DateTrigger(NOW - timedelta(days=1))
    assert due_run_time(trigger, trigger.run_date, NOW, NOW) == (trigger.run_date, None)


def test_of_an_interval_that_was_due_for_years_is_found_without_a_walk() -> None:
    trigger = IntervalTrigger(seconds=1, timezone="UTC")
    first = NOW - timedelta(days=3650, microseconds=1)
    run_time, following = due_run_time(trigger, first, NOW, NOW)
    assert run_time is not None
    assert following is not None
    assert NOW - timedelta(seconds=1) < run_time <= NOW < following
    assert run_time.microsecond == first.microsecond


@pytest.mark.parametrize(
    "trigger",
    [IntervalTrigger(seconds=10, timezone="UTC"), CronTrigger(second="*/10", timezone="UTC")],
    ids=["interval", "cron"],
)
def test_of_a_backlog_that_is_missed_the_last_one_stands_for_all(trigger: Any) -> None:
    first, grace = NOW - timedelta(hours=1), timedelta(seconds=25)
    run_time, following = due_run_time(trigger, first, NOW, NOW - grace)
    assert (run_time, following) == (NOW - timedelta(seconds=30), NOW - timedelta(seconds=20))
    late = NOW - timedelta(seconds=20)
    assert due_run_time(trigger, late, NOW, NOW - grace) == (
        late,
        NOW - timedelta(seconds=10),
    )


LONG_AGO, HOUR = NOW - timedelta(days=15), timedelta(hours=1)


def cron(**fields: Any) -> CronTrigger:
    return CronTrigger(**{"timezone": "UTC", "second": "*", **fields})


def every(**length: Any) -> IntervalTrigger:
    return IntervalTrigger(**length, start_date=LONG_AGO, timezone="UTC")


@pytest.mark.parametrize(
    ("trigger", "last"),
    [
        (cron(), "2026-03-02 12:00:30"),
        (cron(second=0, jitter=30), "2026-03-02 12:00:00"),
        (cron(hour="9-10", timezone=BERLIN), "2026-03-02 09:59:59"),
        (cron(day=16), "2026-02-16 23:59:59"),
        (cron(end_date=NOW - timedelta(days=3)), "2026-02-27 12:00:30"),
        (every(seconds=50, jitter=10), "2026-03-02 12:00:30"),
        (AndTrigger([cron(second="*/5"), every(seconds=7)]), "2026-03-02 12:00:10"),
        (OrTrigger([cron(hour=3), cron(minute=7, second=0)]), "2026-03-02 11:07:00"),
        (OrTrigger([cron(hour=3), every(minutes=7)]), "2026-03-02 11:55:30"),
        (
            OrTrigger([cron(), DateTrigger(NOW + HOUR)], jitter=5),
            "2026-03-02 12:00:30",
        ),
        (OrTrigger([cron(second=n % 60) for n in range(100)]), "2026-03-02 12:00:30"),
    ],
    ids=str,
)
def test_of_a_backlog_of_two_weeks_is_the_last_one(trigger: Any, last: str) -> None:
    """It is found without a walk through a million run times."""
    run_time, following = due_run_time(trigger, LONG_AGO, NOW, NOW)
    assert run_time == datetime.fromisoformat(last).replace(tzinfo=timezone.utc)
    assert following is None or following > NOW


IN_BOTH_HOURS = pytest.mark.skipif(
    apscheduler.version_info < (3, 11),
    reason="APScheduler 3.10 walks in the hour that comes twice for ever",
)


@pytest.mark.parametrize(("month", "day"), [(3, 29), pytest.param(10, 25, marks=IN_BOTH_HOURS)])
def test_of_a_backlog_over_a_change_of_the_clocks_is_the_last_one(month: int, day: int) -> None:
    begin = datetime(2026, month, day, tzinfo=BERLIN)
    trigger = cron(hour="1-3", minute="*/20", second=0, timezone=BERLIN)
    first = begin - timedelta(days=2) + HOUR
    for hour in range(8):
        now = (begin.astimezone(timezone.utc) + hour * HOUR).astimezone(BERLIN)
        times, following = as_apscheduler_has_it(trigger, first, now)
        assert due_run_time(trigger, first, now, now) == (times[-1], following)


def test_of_an_interval_across_a_change_of_the_clocks_counts_elapsed_time() -> None:
    trigger = IntervalTrigger(hours=12, timezone=BERLIN)
    first = datetime(2026, 3, 28, 15, tzinfo=BERLIN)
    now = datetime(2026, 3, 29, 20, tzinfo=BERLIN)
    run_time, _ = due_run_time(trigger, first, now, now)
    assert run_time == datetime(2026, 3, 29, 16, tzinfo=BERLIN)


class TestCombinations:
    def test_that_agree_go_on(self) -> None:
        trigger = AndTrigger(
            [CronTrigger(hour=3, timezone="UTC"), CronTrigger(day_of_week="mon", timezone="UTC")]
        )
        # The second part is midnight on Mondays, the first three o'clock: never at the same time.
        with pytest.raises(EndlessTriggerError, match="do not agree"):
            due_run_time(trigger, NOW - timedelta(hours=1), NOW, NOW)
        agreeing = AndTrigger(
            [
                CronTrigger(hour=3, timezone="UTC"),
                CronTrigger(day_of_week="mon", hour="*", timezone="UTC"),
            ]
        )
        first = datetime(2026, 3, 2, 3, tzinfo=timezone.utc)
        assert due_run_time(agreeing, first, NOW, NOW) == (
            first,
            first + timedelta(days=7),
        )

    def test_of_which_a_part_has_ended_end(self) -> None:
        ended = CronTrigger(hour="*", end_date=NOW, timezone="UTC")
        trigger = AndTrigger([CronTrigger(hour="*", timezone="UTC"), ended])
        first = NOW.replace(minute=0, second=0)
        assert due_run_time(trigger, first, NOW, NOW) == (first, None)

    def test_take_the_first_of_several(self) -> None:
        trigger = OrTrigger(
            [CronTrigger(hour=3, timezone="UTC"), CronTrigger(hour=4, timezone="UTC")]
        )
        first = datetime(2026, 3, 2, 3, tzinfo=timezone.utc)
        assert due_run_time(trigger, first, first, first) == (
            first,
            first + timedelta(hours=1),
        )

    def test_within_another_that_never_agree_are_told(self) -> None:
        never = AndTrigger([CronTrigger(hour=hour, timezone="UTC") for hour in (3, 4)])
        for trigger in (AndTrigger([never, CronTrigger(hour=5, timezone="UTC")]), never):
            with pytest.raises(EndlessTriggerError):
                due_run_time(trigger, NOW, NOW, NOW)

    def test_have_their_jitter(self) -> None:
        trigger = OrTrigger([CronTrigger(hour=3, timezone="UTC")], jitter=60)
        first = datetime(2026, 3, 2, 3, tzinfo=timezone.utc)
        _, following = due_run_time(trigger, first, NOW, NOW)
        assert following is not None
        assert timedelta() <= following - first - timedelta(days=1) <= timedelta(seconds=60)


class StandsStill(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    def get_next_fire_time(self, previous_fire_time: Any, now: datetime) -> datetime:
        return NOW


def test_a_trigger_that_stands_still_is_told() -> None:
    with pytest.raises(EndlessTriggerError, match=r"gives .+ after "):
        due_run_time(StandsStill(), NOW, NOW, NOW)


def test_of_very_many_failures_the_first_ones_are_forgotten() -> None:
    backoff = Backoff()
    names = [f"job-{number}" for number in range(MOST_REMEMBERED + 1)]
    for name in names:
        backoff.add(name)
    assert backoff.names() == names[1:]
    assert not backoff.has(names[0])


def test_what_took_long_to_fail_is_left_alone_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(bad_rows, "time", SimpleNamespace(monotonic=lambda: clock.now))
    backoff = Backoff()
    backoff.add("soon")
    backoff.add("slow", took=2.0)
    clock.now += 19
    assert backoff.names() == ["slow"]
    clock.now += 2
    assert backoff.names() == []


T = NOW  # a run time
MINUTE = IntervalTrigger(minutes=1, start_date=T, timezone="UTC")


def at(seconds: float) -> datetime:
    return T + timedelta(seconds=seconds)


def row_due(**more: Any) -> DueRow:
    """Return a job that is due at ``T``, was added long before, and has never run."""
    row = SimpleNamespace(next_run_time=T)
    known: dict[str, Any] = {
        "changed_at": at(-9999),
        "pauses": (),
        "ran_since": None,
        "ran_until": None,
        "runs_again": False,
    }
    return DueRow(row, uuid4(), **{**known, **more})  # type: ignore[arg-type]  # what is read of it


def paused(since: float, until: float) -> Range[datetime]:
    return Range(at(since), at(until))


def late(
    now: float, found: DueRow, trigger: Any = MINUTE, *, since: float = -9999.0, **options: Any
) -> tuple[float, float, bool]:
    """Return which run time is due, how late it is, and whether it is missed, in seconds."""
    given = {"coalesce": True, "grace": 1, **options}
    due = due_run(found, trigger, at(now), running_since=at(since), **given)
    seconds = (due.came - due.due_at).total_seconds()
    return (due.run_time - T).total_seconds(), seconds, due.is_missed(given["grace"])


class TestLateness:
    """It is the time in which a run time could not have been run."""

    def test_none_is_the_time_until_it_is_read(self) -> None:
        """As of an outage, or of a look of a large fleet."""
        assert late(50, row_due()) == (0, 0, False)

    def test_it_is_the_time_before_the_scheduler_ran(self) -> None:
        assert late(50, row_due(), since=40) == (0, 40, True)
        assert late(50, row_due(), since=40, grace=None) == (0, 40, False)
        assert late(50, row_due(), since=1) == (0, 1, False)

    def test_it_is_the_time_before_the_job_was_added_or_changed(self) -> None:
        assert late(50, row_due(changed_at=at(30))) == (0, 30, True)

    def test_one_that_is_changed_in_the_future_is_no_later_than_now(self) -> None:
        assert late(50, row_due(changed_at=at(1e9))) == (0, 50, True)

    def test_one_that_came_while_its_task_ran_is_due_from_the_end_on(self) -> None:
        assert late(50, row_due(ran_since=at(-5), ran_until=at(30))) == (0, 0, False)

    def test_of_those_that_came_meanwhile_the_latest_is(self) -> None:
        found = row_due(ran_since=at(-5), ran_until=at(150))
        assert late(160, found) == (120, 0, False)
        assert late(160, found, coalesce=False) == (120, 0, False)

    def test_also_with_any_grace_time(self) -> None:
        found = row_due(ran_since=at(-5), ran_until=at(150))
        assert late(160, found, coalesce=False, grace=None) == (120, 0, False)

    def test_one_that_came_before_its_task_ran_is_late_by_that_run_too(self) -> None:
        """As of a backlog: it waits for the run time before it."""
        found = row_due(ran_since=at(5), ran_until=at(30))
        assert late(50, found, coalesce=False) == (0, 30, True)
        assert late(50, found, coalesce=False, grace=None) == (0, 30, False)

    def test_one_that_came_after_its_task_ran_is_not(self) -> None:
        assert late(50, row_due(ran_since=at(-30), ran_until=at(-5))) == (0, 0, False)

    def test_one_that_an_operator_has_run_again_is_due_from_then_on(self) -> None:
        found = row_due(ran_since=at(1), ran_until=at(3000), runs_again=True)
        assert late(3050, found, coalesce=False) == (0, 0, False)

    def test_one_that_came_in_a_pause_is_due_from_its_end_on(self) -> None:
        once, found = DateTrigger(T), row_due(pauses=[paused(-5, 40)])
        assert late(50, found, once) == (0, 0, False)
        assert late(50, found, once, since=41) == (0, 1, False)

    @pytest.mark.parametrize("coalesce", [True, False])
    @pytest.mark.parametrize(
        ("pauses", "now", "run_time", "in_pause"),
        [
            ([(-5, 40)], 50, 0, True),
            ([(0, 40)], 50, 0, True),
            ([(-40, 0)], 50, 0, False),
            ([(-5, 40)], 70, 60, False),
            ([(1, 40)], 50, 0, False),
            ([(60, 150)], 155, 0, False),  # it begins with the next run time
            ([(1, 150)], 155, 0, False),  # and not the one of the pause, after 120 s
            ([(-9, -5), (1, 150)], 155, 0, False),
            ([(-5, 150)], 155, 120, True),
            ([(0, 150)], 155, 120, True),
            ([(-5, 40), (55, 70)], 75, 0, True),
        ],
    )
    def test_one_that_came_in_a_pause_is_told_from_those_before_and_after_it(
        self,
        pauses: list[tuple[float, float]],
        now: float,
        run_time: float,
        in_pause: bool,
        coalesce: bool,
    ) -> None:
        found = row_due(pauses=[paused(*each) for each in pauses])
        if (now, coalesce) == (70, False):
            run_time, in_pause = 0, True  # the one in the pause is passed over first
        due = due_run(found, MINUTE, at(now), coalesce=coalesce, grace=1, running_since=at(-9999))
        assert (due.run_time, due.in_pause) == (at(run_time), in_pause)
        assert not due.is_missed(1)

    def test_one_that_came_while_its_task_ran_and_before_a_pause_is_not_one_with_those_in_it(
        self,
    ) -> None:
        found = row_due(ran_since=at(-5), ran_until=at(100), pauses=[paused(30, 150)])
        assert late(155, found, coalesce=False) == (0, 0, False)

    def test_those_that_are_late_by_more_than_the_grace_time_are_passed_over_at_once(self) -> None:
        assert late(299, row_due(), since=290, coalesce=False, grace=70) == (180, 110, True)
        assert late(299, row_due(), since=290, coalesce=False, grace=None) == (0, 290, False)


def passed(found: DueRow, run_time: float, trigger: Any = MINUTE) -> list[tuple[Any, ...]]:
    """Return the run times before a due one that nobody runs: first, last, count and cause."""
    told = passed_run_times(found, trigger, at(run_time), at(run_time + 5))
    seconds = [((each.first - T).total_seconds(), (each.last - T).total_seconds()) for each in told]
    return [(*ends, each.count, each.cause.value) for ends, each in zip(seconds, told, strict=True)]


CRON = CronTrigger(second="30", timezone="UTC")  # the same run times as of MINUTE


@pytest.mark.parametrize("trigger", [MINUTE, CRON], ids=["interval", "cron"])
class TestRunTimesThatNobodyRuns:
    def test_there_are_none_before_a_run_time_that_is_due_first(self, trigger: Any) -> None:
        assert passed(row_due(), 0, trigger) == []
        assert passed(row_due(pauses=[paused(-5, 500)]), 0, trigger) == []

    def test_they_are_all_before_the_one_that_is_run(self, trigger: Any) -> None:
        assert passed(row_due(), 60, trigger) == [(0, 0, 1, "unasked")]
        assert passed(row_due(), 3600, trigger) == [(0, 3540, 60, "unasked")]

    def test_those_in_a_pause_are_told_apart(self, trigger: Any) -> None:
        found = row_due(pauses=[paused(-5, 121)])
        assert passed(found, 120, trigger) == [(0, 60, 2, "paused")]
        assert passed(found, 180, trigger) == [(0, 120, 3, "paused")]
        assert passed(found, 300, trigger) == [(0, 120, 3, "paused"), (180, 240, 2, "unasked")]
        ended = row_due(pauses=[paused(-5, 0)])
        assert passed(ended, 60, trigger) == [(0, 0, 1, "unasked")]

    def test_those_that_came_while_the_task_ran_are_told_apart(self, trigger: Any) -> None:
        ran = row_due(ran_since=at(-60), ran_until=at(150))
        assert passed(ran, 120, trigger) == [(0, 60, 2, "running")]
        assert passed(ran, 240, trigger) == [(0, 180, 4, "unasked")]

    def test_jitter_adds_none(self, trigger: Any) -> None:
        jittered = copy.copy(trigger)
        jittered.jitter = 10
        late_one = row_due()
        assert passed(late_one, 69, jittered) == [(0, 0, 1, "unasked")]
        assert passed(late_one, 9, jittered) == []
        assert passed(row_due(pauses=[paused(-5, 500)]), 9, jittered) == []


def test_those_of_ten_years_are_counted_without_a_walk() -> None:
    every = IntervalTrigger(seconds=1, timezone="UTC")
    [(_, last, count, _)] = passed(row_due(), 3650 * 86400, every)
    assert (last, count) == (3650 * 86400 - 1, 3650 * 86400)


class Frozen(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """A trigger whose end cannot be changed."""

    @property
    def end_date(self) -> datetime:
        return at(9999)

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime:
        return (previous or now) + timedelta(seconds=60)


def test_a_trigger_that_cannot_be_counted_tells_none() -> None:
    """The job is run all the same."""
    assert passed(row_due(), 120, Frozen()) == []


def test_very_many_are_more_than_are_counted() -> None:
    [(first, last, count, _)] = passed(row_due(), 15 * 86400, cron())
    assert (first, last, count) == (0, 15 * 86400 - 1, 10_001)


class OfTheApplication(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """A trigger that can only be walked."""

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime:
        return (previous or now) + timedelta(seconds=60)


@pytest.mark.parametrize("coalesce", [True, False])
def test_a_trigger_of_the_application_is_walked_in_parts_of_which_the_last_one_is_run(
    coalesce: bool,
) -> None:
    """Other jobs do not wait long for a part."""
    found, ends = row_due(ran_since=at(-1), ran_until=at(30_030)), []
    while True:
        options: dict[str, Any] = {"coalesce": coalesce, "grace": None, "running_since": at(0)}
        due = due_run(found, OfTheApplication(), at(30_050), **options)
        ends.append((due.run_time - T).total_seconds())
        if not due.is_passed:
            break
        assert due.following is not None
        found = replace(found, row=SimpleNamespace(next_run_time=due.following))  # type: ignore[arg-type]  # what is read of it
    assert ends == [60 * MOST_WALKED, 60 * (2 * MOST_WALKED + 1), 30_000]


def test_a_trigger_that_is_hard_to_ask_is_run_in_its_backlog() -> None:
    """Its next search may get no further, so that it would never be run."""
    trigger = OrTrigger([cron(day=16, second=n % 60) for n in range(800)])
    found = replace(row_due(), row=SimpleNamespace(next_run_time=LONG_AGO))  # type: ignore[arg-type]  # what is read of it
    due = due_run(found, trigger, NOW, coalesce=True, grace=None, running_since=NOW)
    assert due.following is not None
    assert due.following < NOW
    assert not due.is_passed
