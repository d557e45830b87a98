"""How long a window and a maximum lock are, by the options of a job and of its executor."""

from __future__ import annotations

from typing import Any

import pytest

from apscheduler_tasklock import EVENT_TASK_LOCK_RELEASED, current_lock, task_lock
from tests.simulation.replicas import at, simulated

HOURLY: dict[str, Any] = {"trigger": "interval", "hours": 1, "next_run_time": at(1)}
DAILY: dict[str, Any] = {"trigger": "cron", "hour": 0, "minute": 10}
ONCE: dict[str, Any] = {"trigger": "date", "run_date": at(1)}
HOUR, DAY = 3600.0, 86_400.0


@pytest.mark.parametrize(
    ("executor", "options", "trigger", "window", "longest"),
    [
        pytest.param({}, {}, HOURLY, 0.9 * HOUR, 5 * HOUR, id="hourly"),
        pytest.param({}, {"min_factor": 0.5, "max_factor": "2"}, HOURLY, HOUR / 2, 2 * HOUR),
        pytest.param({}, {"min_lock": 60, "max_lock": 90}, HOURLY, 60, 90),
        pytest.param({"jobs": {"job": {"min_factor": 0.5}}}, {}, HOURLY, HOUR / 2, 5 * HOUR),
        pytest.param(
            {"jobs": {"job": {"min_factor": 0.5}}}, {"min_factor": 0.25}, HOURLY, HOUR / 4, 5 * HOUR
        ),
        # Of a run that was set right before a run time, the window ends before that, but not the
        # lock: else a run of some minutes could overlap with the next one.
        pytest.param({}, {}, {**DAILY, "next_run_time": at(1)}, 0.9 * 540, 5 * DAY, id="daily"),
        pytest.param({}, {}, ONCE, 60, 5 * HOUR, id="one-off"),
        pytest.param({"period": 7200}, {}, ONCE, 60, 10 * HOUR),
        pytest.param({"max_factor": 2}, {"max_factor": 0.5}, ONCE, 60, HOUR / 2),
        pytest.param({}, {"max_lock": 30}, ONCE, 60, 30),
        pytest.param({"min_factor": 0.9}, {}, ONCE, 3240, 5 * HOUR),
        pytest.param({"min_factor": "0.9"}, {}, ONCE, 3240, 5 * HOUR),
        pytest.param({"jobs": {"job": {"min_lock": 5}}}, {}, ONCE, 5, 5 * HOUR),
        pytest.param({}, {"min_factor": 0.5}, ONCE, 1800, 5 * HOUR),
        pytest.param({"min_factor": 0.9}, {"min_lock": 7}, ONCE, 7, 5 * HOUR),
    ],
)
def test_they_come_from_the_options_that_are_nearest_to_the_job(
    executor: dict[str, Any],
    options: dict[str, Any],
    trigger: dict[str, Any],
    window: float,
    longest: float,
) -> None:
    given: list[dict[str, Any]] = []
    lefts: list[float] = []

    def see(**kwargs: Any) -> None:
        lock = current_lock()
        assert lock is not None
        given.append(kwargs)
        lefts.append(lock.seconds_left)

    simulation = simulated(**executor)
    [replica] = simulation
    kwargs = {"kwargs": {"a": 1, "task_lock": options}, "misfire_grace_time": None}
    replica.scheduler.add_job(see, id="job", **kwargs, **trigger)
    [run] = simulation.advance(minutes=2)
    [released] = [each for each in replica.events if each.code == EVENT_TASK_LOCK_RELEASED]
    assert given == [{"a": 1}]  # without the reserved key
    assert (released.locked_until - run.run_time).total_seconds() == pytest.approx(window)
    assert lefts == pytest.approx([longest], abs=0.2)  # a claim takes a moment


def test_those_of_a_decorated_function_are_weaker_than_those_of_its_job() -> None:
    lefts: list[float] = []

    @task_lock(min_lock=60, max_factor=3)
    def see() -> None:
        lock = current_lock()
        assert lock is not None
        lefts.append(lock.seconds_left)

    simulation = simulated()
    scheduler = simulation["replica-1"].scheduler
    scheduler.add_job(see, id="as decorated", **HOURLY)
    scheduler.add_job(see, id="shorter", kwargs={"task_lock": {"max_lock": 90}}, **HOURLY)
    simulation.advance(minutes=2)
    assert sorted(lefts) == pytest.approx([90, 3 * HOUR], abs=0.2)
