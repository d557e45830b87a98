"""Weeks of three replicas in seconds: real triggers, the shipped statements, a travelling clock."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from itertools import count, pairwise
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._runs.trigger_times import is_shared, nominal_time
from apscheduler_tasklock.options import DEFAULTS
from tests.support.waist import Memory, Replica, Rows

BERLIN = ZoneInfo("Europe/Berlin")


@dataclass
class SimulatedScheduler:
    """A replica's scheduler: a trigger, and a clock that is off by ``skew``."""

    replica: Replica
    trigger: Any
    skew: timedelta = timedelta()
    options: dict[str, Any] = field(default_factory=dict)

    def run_times(self, start: datetime, end: datetime) -> Iterator[datetime]:
        """Yield run times as APScheduler's main loop makes them, on this replica's clock."""
        run_time = self.trigger.get_next_fire_time(None, start)
        while run_time is not None and run_time.timestamp() < end.timestamp():
            yield run_time
            run_time = self.trigger.get_next_fire_time(run_time, run_time)

    def lock_times(self, nominal: datetime) -> tuple[float, float]:
        options = replace(DEFAULTS, **self.options)
        submission = Submission(None, "default", self.trigger, (), "task", options, False, "")
        return submission.lock_times(submission.period(nominal))


@dataclass
class Simulation:
    """Lets schedulers live through time. Records the nominal run time of each granted claim."""

    set_clock: Callable[[datetime], None]
    rng: random.Random
    duration: float
    most_late: float
    runs: list[datetime] = field(default_factory=list)

    def live(self, schedulers: list[SimulatedScheduler], start: datetime, end: datetime) -> None:
        order = count()
        agenda: list[tuple[datetime, int, Callable[[datetime], None]]] = []

        def plan(at: datetime, action: Callable[[datetime], None]) -> None:
            heapq.heappush(agenda, (at, next(order), action))

        def fire(scheduler: SimulatedScheduler, run_time: datetime) -> Callable[[datetime], None]:
            def action(now: datetime) -> None:
                claim_id = self.claim(scheduler, run_time, now)
                if claim_id is not None:
                    ends = now + timedelta(seconds=self.rng.uniform(0, self.duration))
                    plan(ends, lambda _: self.released(scheduler, claim_id))

            return action

        for scheduler in schedulers:
            for run_time in scheduler.run_times(start, end):
                late = timedelta(seconds=self.rng.uniform(0, self.most_late))
                due = run_time.astimezone(timezone.utc) - scheduler.skew + late
                plan(due, fire(scheduler, run_time))
        while agenda:
            now, _, action = heapq.heappop(agenda)
            self.set_clock(now)
            action(now)

    def claim(
        self, scheduler: SimulatedScheduler, run_time: datetime, now: datetime
    ) -> UUID | None:
        nominal = nominal_time(scheduler.trigger, run_time)
        min_lock, max_lock = scheduler.lock_times(nominal)
        lag = (now + scheduler.skew).timestamp() - nominal.timestamp()
        claim_id, answer = scheduler.replica.claim(
            lag=max(0.0, lag),
            min_lock=min_lock,
            max_lock=max_lock,
            run_time=nominal if is_shared(scheduler.trigger, nominal) else None,
        )
        if not answer.granted:
            return None
        self.runs.append(nominal)
        return claim_id

    @staticmethod
    def released(scheduler: SimulatedScheduler, claim_id: UUID) -> None:
        assert scheduler.replica.release(claim_id) is not None


@pytest.fixture
def simulation(connection: Rows, travel: object, rng: random.Random) -> Simulation:
    def set_clock(moment: datetime) -> None:
        if isinstance(connection, Memory):
            connection.time = moment
            return
        connection.execute("UPDATE travel.clock SET time = %s", [moment])

    return Simulation(set_clock, rng, duration=0.5, most_late=0.2)


@pytest.fixture
def replicas(replicas_connection: Rows) -> list[Replica]:
    return [Replica(f"replica {number}", replicas_connection) for number in (1, 2, 3)]


@pytest.mark.nightly
@pytest.mark.timeout(400)  # thousands of statements, each of which a pooler may be slow to pass on
def test_an_interval_job_with_random_offsets_runs_once_a_period_for_a_month(
    simulation: Simulation, replicas: list[Replica], rng: random.Random
) -> None:
    start, period = datetime(2026, 3, 1, tzinfo=timezone.utc), timedelta(minutes=10)
    end = start + timedelta(days=31)
    offsets = [timedelta(seconds=rng.uniform(0, 600)) for _ in replicas]
    schedulers = [
        SimulatedScheduler(
            replica,
            IntervalTrigger(minutes=10, start_date=start + offset, timezone=timezone.utc),
        )
        for replica, offset in zip(replicas, offsets, strict=True)
    ]

    simulation.live(schedulers, start, end)

    gaps = [later - earlier for earlier, later in pairwise(simulation.runs)]
    # The first replica to fire in a window may change until one stands that fires first for good.
    assert min(gaps) >= 0.9 * period, offsets
    assert max(gaps) <= period, offsets
    assert gaps[10:] == [period] * (len(gaps) - 10), offsets
    assert simulation.runs[0] - start == min(offsets)
    assert end - simulation.runs[-1] <= period


def test_a_weekday_job_runs_once_each_weekday_for_a_month(
    simulation: Simulation, replicas: list[Replica], rng: random.Random
) -> None:
    start = datetime(2026, 5, 1, tzinfo=BERLIN)
    trigger = CronTrigger(day_of_week="mon-fri", hour="8,9,17", minute=30, timezone=BERLIN)
    # Within the shortest period, the replicas' clocks may differ by minutes.
    schedulers = [
        SimulatedScheduler(replica, trigger, timedelta(minutes=rng.uniform(-2, 2)))
        for replica in replicas
    ]

    simulation.live(schedulers, start, start + timedelta(days=31))

    expected = [
        datetime(2026, 5, day, hour, 30, tzinfo=BERLIN)
        for day in range(1, 32)
        if datetime(2026, 5, day).weekday() < 5
        for hour in (8, 9, 17)
    ]
    assert simulation.runs == expected, [scheduler.skew for scheduler in schedulers]


@pytest.mark.parametrize("jitter", [None, 3600])
@pytest.mark.parametrize(("month", "days"), [(3, 31), (10, 31)])
def test_a_daily_job_runs_once_a_day_across_a_clock_change(
    simulation: Simulation, replicas: list[Replica], month: int, days: int, jitter: int | None
) -> None:
    start = datetime(2026, month, 1, tzinfo=BERLIN)
    schedulers = [
        SimulatedScheduler(replica, CronTrigger(hour=4, timezone=BERLIN, jitter=jitter))
        for replica in replicas
    ]

    simulation.live(schedulers, start, datetime(2026, month, days, 12, tzinfo=BERLIN))

    expected = [datetime(2026, month, day, 4, tzinfo=BERLIN) for day in range(1, days + 1)]
    assert simulation.runs == expected


@pytest.mark.parametrize(
    ("cron", "most_skew"),
    [
        ({"second": "0,1,30"}, timedelta(seconds=5)),
        ({"second": "*/7"}, timedelta(seconds=10)),
        ({"hour": "9-17", "minute": "0,1"}, timedelta(minutes=3)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"min_lock": 0.0}])
def test_run_times_with_short_gaps_run_once_under_clocks_that_differ_by_more(
    simulation: Simulation,
    replicas: list[Replica],
    cron: dict[str, str],
    most_skew: timedelta,
    options: dict[str, Any],
) -> None:
    start = datetime(2026, 3, 1, 9, tzinfo=timezone.utc)
    trigger = CronTrigger(**cron, timezone=timezone.utc)
    skews = [timedelta(), most_skew / 2, most_skew]
    schedulers = [
        SimulatedScheduler(replica, trigger, skew, options)
        for replica, skew in zip(replicas, skews, strict=True)
    ]
    end = start + (timedelta(days=7) if "hour" in cron else timedelta(minutes=20))
    simulation.duration = 0.1

    simulation.live(schedulers, start, end)

    expected = list(schedulers[0].run_times(start, end))
    assert len(expected) >= 60
    assert simulation.runs == expected


def test_starved_replicas_run_no_window_twice_and_a_live_one_misses_none(
    simulation: Simulation, replicas: list[Replica], rng: random.Random
) -> None:
    """Two replicas get each fire up to three periods late; the third is on time."""
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    trigger = CronTrigger(minute="*", timezone=timezone.utc)
    punctual, *starved = [SimulatedScheduler(replica, trigger) for replica in replicas]
    run_times = list(punctual.run_times(start, start + timedelta(hours=12)))
    fires = [(run_time, run_time, punctual) for run_time in run_times] + [
        (run_time + timedelta(seconds=rng.uniform(0, 180)), run_time, scheduler)
        for run_time in run_times
        for scheduler in starved
    ]

    for now, run_time, scheduler in sorted(fires, key=lambda fire: fire[0]):
        simulation.set_clock(now)
        claim_id = simulation.claim(scheduler, run_time, now)
        if claim_id is not None:
            simulation.released(scheduler, claim_id)

    assert simulation.runs == run_times
