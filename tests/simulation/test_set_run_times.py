"""A run time that the application sets inside a window is refused, and the application is told.

Such run times are a button's ``modify_job(next_run_time=now)``, a listener that retries by it, and
``add_job(next_run_time=now)`` at the start of each replica.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_ERROR
from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock import EVENT_TASK_LOCK_REFUSED
from tests.simulation.replicas import SimulatedReplicas, simulated

SET = ", which modify_job or add_job has set: "
HOURLY: dict[str, Any] = {"trigger": "interval", "hours": 1}

Told = Callable[[], list[tuple[str, str]]]


def job(**_task_lock: Any) -> None:
    pass


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """Return the levels and the messages of refused run times of the application."""
    caplog.set_level(logging.INFO)
    return lambda: [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if SET in record.getMessage()
    ]


def add_due(scheduler: Any, function: Any = job, **options: Any) -> None:
    """Add a job that is due in a moment, which is no run time of its trigger."""
    moment = scheduler.local_now() + timedelta(seconds=0.3)
    now = {"next_run_time": moment, "misfire_grace_time": None}
    given = options if "trigger" in options else {**HOURLY, **options}
    scheduler.add_job(function, id="job", replace_existing=True, **{**now, **given})


def with_a_run(function: Any = job, **options: Any) -> SimulatedReplicas:
    """Return a replica that has run its job at its start."""
    simulation = simulated(lambda scheduler: add_due(scheduler, function, **options))
    simulation.advance(seconds=30.5)
    return simulation


def set_now(simulation: SimulatedReplicas) -> None:
    simulation["replica-1"].scheduler.modify_job("job", next_run_time=simulation.now)
    simulation.advance(seconds=5.3)


def refusals(simulation: SimulatedReplicas) -> int:
    codes = [event.code for replica in simulation for event in replica.events]
    return codes.count(EVENT_TASK_LOCK_REFUSED)


@pytest.mark.parametrize("trigger", [HOURLY, {"trigger": "cron", "hour": 9}])
def test_a_button_is_told_at_info_then_at_warning_then_no_more(
    told: Told, trigger: dict[str, Any]
) -> None:
    simulation = with_a_run(**trigger)
    for _ in range(3):
        set_now(simulation)
    assert refusals(simulation) == 3
    assert [level for level, _ in told()] == ["INFO", "WARNING"]
    message = told()[0][1]
    assert ", which ends at " in message
    assert "executor.run_now('job')" in message
    assert "the option retries" in message


def test_a_listener_that_retries_by_it_is_told(told: Told) -> None:
    def add_jobs(scheduler: Any) -> None:
        def retry(event: Any) -> None:
            later = scheduler.local_now() + timedelta(seconds=0.1)
            scheduler.modify_job(event.job_id, next_run_time=later)

        scheduler.add_listener(retry, EVENT_JOB_ERROR)
        add_due(scheduler, lambda: 1 / 0)

    simulation = simulated(add_jobs)
    simulation.advance(minutes=1)
    assert refusals(simulation) == 1
    [(level, message)] = told()
    assert level == "INFO"
    assert "the option retries" in message


def test_a_run_that_still_goes_on_in_its_window_is_told_of(told: Told) -> None:
    simulation = simulated(
        lambda scheduler: add_due(scheduler, max_instances=2), durations={"job": 600}
    )
    simulation.advance(seconds=30.5)
    set_now(simulation)
    assert refusals(simulation) == 1
    [(_, message)] = told()
    assert f"and the run on replica-1 (token {simulation.runs[0].token}) is not over" in message


@pytest.mark.parametrize("change", ["none", "resume", "reschedule", "trigger", "name"])
def test_a_run_time_that_the_trigger_gives_is_an_ordinary_refusal(told: Told, change: str) -> None:
    # The first run takes the window of the next ten minutes. The run times count on from its own,
    # and not from the trigger's start.
    lock = {"task_lock": {"min_lock": 600}}
    simulation = with_a_run(kwargs=lock, max_instances=9, hours=0, seconds=1)
    scheduler = simulation["replica-1"].scheduler
    if change == "resume":
        scheduler.pause_job("job")
        scheduler.resume_job("job")
    elif change == "reschedule":
        scheduler.reschedule_job("job", trigger="interval", seconds=1)
    elif change == "trigger":  # which leaves the next run time of the interval
        scheduler.modify_job("job", trigger=CronTrigger(second="*"))
    elif change == "name":
        scheduler.modify_job("job", name="other")
    before = refusals(simulation)
    simulation.advance(seconds=30)
    assert refusals(simulation) > before + 20
    assert len(simulation.runs) == 1
    assert told() == []


class TestRunAtStart:
    def test_on_three_replicas_nothing_is_told(self, told: Told) -> None:
        simulation = simulated(add_due, 3)
        simulation.advance(minutes=1)
        assert (len(simulation.runs), refusals(simulation)) == (1, 2)
        assert told() == []

    def test_jobs_that_all_replicas_add_again_later_are_not_told_either(self, told: Told) -> None:
        simulation = simulated(add_due, 2)
        simulation.advance(minutes=59)  # longer than the window
        for replica in simulation:
            add_due(replica.scheduler)
        simulation.advance(minutes=30)
        assert (len(simulation.runs), refusals(simulation)) == (2, 2)
        assert told() == []

    def test_a_later_start_within_the_window_is_told(self, told: Told) -> None:
        simulation = with_a_run()
        simulation.advance(minutes=2)
        simulation.start_replica()
        simulation.advance(minutes=1)
        assert [level for level, _ in told()] == ["INFO"]

    def test_a_job_that_is_added_again_on_the_replica_that_ran_it_is_told(self, told: Told) -> None:
        simulation = with_a_run()
        add_due(simulation["replica-1"].scheduler)
        simulation.advance(minutes=1)
        assert [level for level, _ in told()] == ["INFO"]
