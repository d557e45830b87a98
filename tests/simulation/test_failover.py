"""Failover on a clock that the test moves: who runs a dead run again, what is run, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from apscheduler_tasklock import EVENT_TASK_LOCK_ERROR, TaskLockDatabaseError
from tests.simulation.fleets import AddJobs, every, job, simulated
from tests.simulation.replicas import SimulatedReplicas, SimulatedRun, at
from tests.support.waist import Ask, intercept_claims, is_takeover

RENAMED = {"task_lock": {"name": "renamed"}}


def something_else() -> None:
    pass


def in_a_run(
    replicas: int = 2, add_jobs: AddJobs | None = None, **options: Any
) -> tuple[SimulatedReplicas, SimulatedRun]:
    """Return a fleet a minute after its job's run of half past midnight began, and that run."""
    lasting = {"durations": {"job": 600}, "failover": True, "lease": 60}
    simulation = simulated(add_jobs or every(30), replicas, **{**lasting, **options})
    [run] = simulation.advance(minutes=31)
    return simulation, run


def told(simulation: SimulatedReplicas) -> list[tuple[str, str]]:
    return [(run.kind, run.outcome) for run in simulation.runs]


class TestWhoTakesOver:
    @pytest.mark.parametrize("joins", ["before the death", "after it"])
    def test_the_successor_of_the_replica_that_was_refused(self, joins: str) -> None:
        """As in a rolling deployment in mid-job, after which the holder is killed."""
        simulation, run = in_a_run()
        [other] = [replica for replica in simulation if replica.name != run.replica]
        simulation.stop(other)
        if joins == "before the death":
            simulation.start_replica()
            simulation.advance(minutes=1)
        simulation.kill(run.replica)
        if joins == "after it":
            simulation.start_replica()
        [takeover] = simulation.advance(minutes=20)
        assert (takeover.replica, takeover.run_time) == ("replica-3", at(30))
        assert told(simulation) == [("schedule", "died"), ("takeover", "ok")]


class TestWhatIsRun:
    @pytest.mark.parametrize(
        "trigger",
        [
            {"trigger": "date", "run_date": at(30)},
            {"trigger": "cron", "minute": 30, "end_date": at(40)},
        ],
    )
    def test_a_job_whose_last_run_time_has_passed(self, trigger: dict[str, Any]) -> None:
        """Its scheduler has dropped it."""
        simulation, run = in_a_run(2, lambda scheduler: scheduler.add_job(job, id="job", **trigger))
        simulation.kill(run.replica)
        [heir] = simulation
        assert heir.scheduler.get_jobs() == []
        simulation.advance(minutes=20)
        assert told(simulation) == [("schedule", "died"), ("takeover", "ok")]

    @pytest.mark.parametrize(
        "change",
        [
            lambda scheduler: scheduler.pause_job("job"),
            lambda scheduler: scheduler.remove_job("job"),
            lambda scheduler: scheduler.modify_job("job", func=something_else),
            lambda scheduler: scheduler.add_job(
                job, "date", run_date=at(900), id="job", replace_existing=True
            ),
            lambda scheduler: scheduler.modify_job("job", kwargs=RENAMED),
            # In a job store that schedulers share; nobody tells this one.
            lambda scheduler: setattr(scheduler.get_job("job"), "kwargs", RENAMED),
        ],
        ids=["paused", "removed", "function", "put in its place", "renamed", "renamed elsewhere"],
    )
    def test_not_a_job_that_was_changed_meanwhile(self, change: Callable[[Any], object]) -> None:
        simulation, run = in_a_run(1)
        heir = simulation.start_replica()
        simulation.advance(seconds=30)
        change(heir.scheduler)
        simulation.kill(run.replica)
        assert simulation.advance(minutes=20) == []

    def test_a_job_that_is_resumed(self) -> None:
        simulation, run = in_a_run(1)
        heir = simulation.start_replica()
        heir.scheduler.pause_job("job")
        simulation.kill(run.replica)
        simulation.advance(minutes=10)
        heir.scheduler.resume_job("job")
        simulation.advance(minutes=11)
        assert told(simulation) == [("schedule", "died"), ("takeover", "ok")]


class TestWhenItIsRun:
    def test_before_a_run_time_that_comes_before_a_look_finds_the_death(self) -> None:
        """Otherwise the claim of that run time would put its window in place of the dead one's."""
        first = {"clock_offsets": [0.5], "lease": 60}  # so that this replica is the first to claim
        simulation = simulated(every(5), 1, durations={"job": 30}, failover=True, **first)
        simulation.start_replica(lease=1800, poll_interval=600)
        simulation.advance(minutes=5, seconds=10)
        simulation.kill("replica-1")
        simulation.advance(minutes=6)
        assert [(run.run_time, run.kind) for run in simulation.runs] == [
            (at(5), "schedule"),
            (at(5), "takeover"),
            (at(10), "schedule"),
        ]

    def test_again_after_the_pool_did_not_take_it(self) -> None:
        """It was claimed by then, and is handed over."""
        simulation, run = in_a_run()
        simulation.kill(run.replica)
        [heir] = simulation
        simulation.break_pool(heir, 120)
        [takeover] = simulation.advance(minutes=5)
        assert at(33) < takeover.began_at < at(33.5)

    def test_when_the_job_may_have_another_instance(self) -> None:
        """Another one runs here for a window that it was granted under another name."""
        names = iter([{}, RENAMED])

        def add_jobs(scheduler: Any) -> None:
            every(30, kwargs=next(names))(scheduler)

        simulation = simulated(add_jobs, 2, durations={"job": 600}, failover=True, lease=60)
        _, own = simulation.advance(minutes=31)
        simulation["replica-2"].scheduler.modify_job("job", kwargs={})
        simulation.kill("replica-1")
        [takeover] = simulation.advance(minutes=20)
        assert (own.outcome, takeover.kind) == ("ok", "takeover")
        assert own.ended_at is not None
        assert own.ended_at <= takeover.began_at

    @pytest.mark.parametrize("way", ["skip", "run"])
    def test_after_an_outage_and_never_without_a_lock(self, way: str) -> None:
        simulation, run = in_a_run(on_database_error=way)
        simulation.kill(run.replica)
        [heir] = simulation
        failures = [TaskLockDatabaseError("unavailable")]

        def after_an_outage(send: Ask) -> Ask:
            def ask(attempts: Sequence[Any], most: int | None, tell: Any) -> None:
                if is_takeover(attempts[0]) and failures:
                    tell([(attempts[0], failures.pop())])
                else:
                    send(attempts, most, tell)

            return ask

        intercept_claims(heir.executor.client.locks, after_an_outage)
        simulation.advance(minutes=20)
        assert not failures
        assert EVENT_TASK_LOCK_ERROR in [event.code for event in heir.events]
        assert told(simulation) == [("schedule", "died"), ("takeover", "ok")]
        assert simulation.runs[-1].token is not None
