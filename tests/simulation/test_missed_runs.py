"""What replicas note of run times that nobody has run, and of changed schedules, and when.

What becomes of a note in the history is a matter of statements: ``tests/contract/test_misses.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_MISSED
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock import task_lock
from tests.simulation.replicas import SimulatedReplicas, at, simulated

# The workers of a simulated replica.
WORKERS = 10
HOURLY_TO_2_HOURS = "from every 1 h to every 2 h"


def job() -> None:
    pass


def add(scheduler: Any, start: datetime, **changes: Any) -> None:
    """Add an hourly job."""
    every = {"id": "job", "hours": 1, "start_date": start, "misfire_grace_time": None}
    scheduler.add_job(job, "interval", **{**every, **changes})


def every_minute(**options: Any) -> Callable[[Any], None]:
    def add_jobs(scheduler: Any) -> None:
        job_options = {"misfire_grace_time": None, "coalesce": False, **options}
        scheduler.add_job(job, "cron", minute="*", id="job", **job_options)

    return add_jobs


def causes(simulation: SimulatedReplicas) -> set[tuple[str, str]]:
    return {(miss.cause, miss.reason) for miss in simulation.misses}


class TestReasons:
    def test_all_workers_were_busy(self) -> None:
        busy = {f"import-{number}": 300 + 60 * number for number in range(WORKERS)}

        def add_jobs(scheduler: Any) -> None:
            for name in busy:
                named = task_lock(name=name, min_lock=0)(lambda: None)
                scheduler.add_job(named, "date", run_date=at(1), id=name)
            late = task_lock(grace=0, min_lock=0)(lambda: None)
            scheduler.add_job(late, "cron", hour=0, minute=2, id="job", misfire_grace_time=60)

        simulation = simulated(add_jobs, durations=busy)
        simulation.advance(minutes=20)
        [miss] = simulation.misses
        assert (miss.run_time, miss.cause) == (at(2), "misfire")
        named = ", ".join(f"`import-{number}` 1" for number in range(5))
        why = f"all 10 workers were busy ({named}, others 5)"
        assert miss.reason == f"late by 240 s, over its grace time of 60 s: {why}"

    def test_the_scheduler_came_too_late(self) -> None:
        simulation = simulated()
        simulation.advance(minutes=10)
        late = {"next_run_time": at(5), "misfire_grace_time": 60}
        add(simulation["replica-1"].scheduler, at(5), **late)
        simulation.advance(minutes=10)
        [miss] = simulation.misses
        assert (miss.run_time, miss.cause) == (at(5), "misfire")
        why = "its scheduler came to it 300 s after it was due"
        assert miss.reason == f"late by 300 s, over its grace time of 60 s: {why}"

    def test_the_database_did_not_answer_and_no_try_of_the_claim_can_be_granted_any_more(
        self,
    ) -> None:
        """Until then, a try of the claim that had no answer may still run the window."""
        named = task_lock(grace=0, min_lock=0)(lambda: None)
        simulation = simulated(
            lambda scheduler: scheduler.add_job(named, "cron", hour=0, minute=1, id="job"),
            claim_timeout=60,
        )
        simulation.advance(seconds=50)
        simulation.cut_off("replica-1", 20)
        simulation.advance(minutes=10)
        [miss] = simulation.misses
        assert (miss.run_time, miss.cause) == (at(1), "database")
        assert miss.reason.startswith("the database did not answer for ")
        # The claim was tried for 60 s, and a last try may be on its way for 60 s more.
        assert timedelta(seconds=120) < miss.noted_at - miss.run_time < timedelta(seconds=150)

    def test_a_one_off_came_due_in_an_outage(self) -> None:
        simulation = simulated(
            lambda scheduler: scheduler.add_job(job, "date", run_date=at(1), id="job")
        )
        simulation.advance(seconds=50)
        simulation.cut_off("replica-1", 20)
        simulation.advance(hours=1)
        assert [(miss.run_time, miss.cause) for miss in simulation.misses] == [(at(1), "database")]

    def test_an_operator_had_paused_the_task(self) -> None:
        simulation = simulated(every_minute(), 3)
        simulation.advance(seconds=30)
        simulation.pause("job")
        simulation.advance(minutes=5)
        assert causes(simulation) == {("paused", "the task was paused")}
        assert {miss.run_time for miss in simulation.misses} >= {at(1), at(2), at(3)}

    @pytest.mark.parametrize("fault", ["cut_off", "delay_answers"])
    def test_runs_that_wait_for_the_database_do_not_count_as_busy_workers(self, fault: str) -> None:
        simulation = simulated(every_minute(max_instances=1), claim_timeout=300)
        simulation.advance(seconds=50)
        getattr(simulation, fault)("replica-1", 150)
        simulation.advance(minutes=20)
        assert {miss.run_time for miss in simulation.misses} >= {at(2), at(3)}
        assert {miss.cause for miss in simulation.misses} == {"database"}

    def test_a_run_that_waits_for_another_run_does_not_wait_for_the_database(self) -> None:
        simulation = simulated(
            every_minute(max_instances=1), 2, durations={"job": 130}, look_latency=45
        )
        simulation.advance(minutes=12)
        reasons = " ".join(miss.reason for miss in simulation.misses)
        assert "was still waiting for another run (max_instances 1)" in reasons
        assert {miss.cause for miss in simulation.misses} == {"running"}

    def test_another_run_was_still_going_on_here_or_on_another_replica(self) -> None:
        simulation = simulated(every_minute(max_instances=1), 2, durations={"job": 200})
        simulation.advance(minutes=10)
        first = simulation.runs[0]
        noted = {
            (miss.replica == first.replica, miss.cause, miss.reason)
            for miss in simulation.misses
            if miss.run_time < at(3.5)
        }
        run = f"on {first.replica} (token {first.token})"
        assert noted == {
            (
                True,
                "running",
                f"its run that began at 2026-03-01 00:01:00 UTC {run} was still going on",
            ),
            (
                False,
                "running",
                f"its run of 2026-03-01 00:01:00 UTC {run} was not known to be over",
            ),
        }

    def test_a_hold_of_the_lock_was_still_going_on(self) -> None:
        simulation = simulated(every_minute())
        simulation.advance(seconds=30)
        token = simulation.hold("job", 60)
        simulation.advance(minutes=5)
        [miss] = simulation.misses
        reason = f"a hold of its lock on holder (token {token}) was not known to be over"
        assert (miss.run_time, miss.cause, miss.reason) == (at(1), "running", reason)

    def test_its_last_run_still_waited_for_a_worker(self) -> None:
        busy = {f"busy {number}": 600 for number in range(WORKERS)}

        def add_jobs(scheduler: Any) -> None:
            for name in busy:
                scheduler.add_job(job, "date", run_date=at(0.5), id=name)
            every_minute(max_instances=1)(scheduler)

        simulation = simulated(add_jobs, durations=busy)
        simulation.advance(minutes=9)
        told = "its last run on replica-1 was still waiting for a worker (max_instances 1)"
        assert causes(simulation) == {("running", told)}

    def test_nobody_asked_for_it_while_the_fleet_was_away(self) -> None:
        """Each of the replicas that come back finds it."""
        simulation = simulated(lambda scheduler: add(scheduler, at(60)), 2)
        simulation.advance(minutes=61)
        for replica in simulation:
            simulation.stop(replica)
        simulation.advance(minutes=240)
        back = {simulation.start_replica().name for _ in range(3)}
        simulation.advance(minutes=50)
        noted = {(miss.replica, miss.run_time, miss.cause) for miss in simulation.misses}
        assert noted == {(name, at(60 * n), "unasked") for name in back for n in (2, 3, 4, 5)}
        began = "nobody asked for it between 2026-03-01 02:00:00 UTC and 2026-03-01 05:01:0"
        assert {miss.reason[: len(began)] for miss in simulation.misses} == {began}

    @pytest.mark.parametrize(("minute", "hours"), [(0, [2, 3, 4]), (30, [])])
    def test_nobody_asked_for_those_before_a_claim_whose_schedule_has_them(
        self, minute: int, hours: list[int]
    ) -> None:
        """The claim finds the due time that the row still has. No look has come before it."""
        simulation = simulated(lambda scheduler: add(scheduler, at(60)), poll_interval=3600)
        simulation.advance(minutes=61)
        simulation.stop("replica-1")
        simulation.advance(minutes=210)
        simulation.add_jobs = None
        late = simulation.start_replica()
        simulation.advance(minutes=1)
        add(late.scheduler, at(60 + minute))
        simulation.advance(hours=3)
        unasked = [miss for miss in simulation.misses if miss.cause == "unasked"]
        assert [miss.run_time for miss in unasked] == [at(60 * hour) for hour in hours]


class TestNothingIsNoted:
    def test_without_a_history(self) -> None:
        simulation = simulated(history=0)
        missed: list[Any] = []
        [replica] = simulation
        replica.scheduler.add_listener(missed.append, EVENT_JOB_MISSED)
        simulation.advance(minutes=10)
        add(replica.scheduler, at(5), next_run_time=at(5), misfire_grace_time=60)
        simulation.advance(minutes=1)
        assert missed
        assert not replica.executor.has_notes

    @pytest.mark.parametrize(("days", "misses"), [(5, 1), (6.1, 0)])
    def test_of_a_one_off_whose_run_date_is_long_past(self, days: float, misses: int) -> None:
        """The row of its run may have been deleted."""
        simulation = simulated()
        missed: list[Any] = []
        [replica] = simulation
        replica.scheduler.add_listener(missed.append, EVENT_JOB_MISSED)
        past = {"run_date": at(-days * 24 * 60), "misfire_grace_time": 60}
        replica.scheduler.add_job(job, "date", id="job", **past)
        simulation.advance(hours=1)
        assert missed
        assert len(simulation.misses) == misses


class TestMovedSchedules:
    def hourly(self, **options: Any) -> SimulatedReplicas:
        """Return a replica whose hourly job is due in half an hour."""
        simulation = simulated(lambda scheduler: add(scheduler, at(60)), **options)
        simulation.advance(minutes=30)
        return simulation

    def reschedule(self, simulation: SimulatedReplicas, first: float, hours: int = 2) -> None:
        every = {"trigger": "interval", "hours": hours, "start_date": at(first)}
        simulation["replica-1"].scheduler.reschedule_job("job", **every)
        simulation.advance(minutes=1)

    @pytest.mark.parametrize("how", ["reschedule_job", "modify_job", "a new version"])
    def test_the_new_schedule_moved_past_the_run_time(self, how: str) -> None:
        simulation, by, later = self.hourly(), "replica-1", at(120)
        [replica] = simulation
        if how == "reschedule_job":
            self.reschedule(simulation, 120)
        elif how == "modify_job":
            trigger = IntervalTrigger(hours=2, start_date=later)
            replica.scheduler.modify_job("job", trigger=trigger, next_run_time=later)
        else:
            simulation.stop(replica)
            simulation.add_jobs = lambda scheduler: add(scheduler, later, hours=2)
            by = simulation.start_replica().name
        simulation.advance(minutes=60)
        reason = f"the schedule was moved {HOURLY_TO_2_HOURS} by {by}"
        noted = [(miss.run_time, miss.cause, miss.reason) for miss in simulation.misses]
        assert noted == [(at(60), "moved", reason)]
        assert simulation.reschedulings == [(by, HOURLY_TO_2_HOURS)]

    @pytest.mark.parametrize("first", [45, 60], ids=["before it", "at it"])
    def test_the_new_schedule_has_a_run_time(self, first: float) -> None:
        simulation = self.hourly()
        self.reschedule(simulation, first)
        simulation.advance(minutes=60)
        assert simulation.reschedulings == [("replica-1", HOURLY_TO_2_HOURS)]
        assert simulation.misses == []

    def test_the_same_schedule_is_no_change(self) -> None:
        """Nor is one that differs in its start alone, as where each process has its own."""
        simulation = self.hourly()
        for first in (60, 65):
            self.reschedule(simulation, first, hours=1)
        simulation.advance(minutes=20)
        assert simulation.reschedulings == []
        assert simulation.misses == []

    def test_two_jobs_of_one_task_do_not_change_each_others_schedule(self) -> None:
        """The row has the schedule of the job that has written it last."""
        simulation = simulated(jobs={job_id: {"name": "job"} for job_id in ("one", "two")})
        [replica] = simulation
        every = {"one": 1, "two": 2}
        for job_id, hours in every.items():
            add(replica.scheduler, at(120), id=job_id, hours=hours)
        for job_id, later in (("one", 125), ("two", 130), ("one", 135)):
            simulation.advance(minutes=1)
            start = {"hours": every[job_id], "start_date": at(later)}
            replica.scheduler.reschedule_job(job_id, trigger="interval", **start)
        simulation.advance(minutes=10)
        assert simulation.reschedulings == []

    def test_a_run_time_in_a_pause_was_not_moved(self) -> None:
        simulation = self.hourly()
        simulation.pause("job")
        self.reschedule(simulation, 120)
        simulation.advance(minutes=50)
        assert simulation.reschedulings == [("replica-1", HOURLY_TO_2_HOURS)]
        assert simulation.misses == []
