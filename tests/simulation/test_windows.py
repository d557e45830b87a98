"""Which run times run on which replica, how late they may be, and what is told of each."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_SUBMITTED

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ALL,
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockDatabaseError,
    TaskLockOptionError,
    task_lock,
)
from tests.simulation.replicas import SimulatedReplicas, at, simulated

# The workers of a simulated replica.
WORKERS = 10
RUN = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]


def job() -> None:
    pass


def every_minutes(minutes: int, function: Any = job, **options: Any) -> Any:
    def add_jobs(scheduler: Any) -> None:
        given = {"misfire_grace_time": None, "id": "job", **options}
        scheduler.add_job(function, "cron", minute=f"*/{minutes}", **given)

    return add_jobs


def codes(simulation: SimulatedReplicas, job_id: str = "job") -> dict[str, list[int]]:
    """Return the codes of a job's lock events on each replica."""
    return {
        replica.name: [event.code for event in replica.events if event.job_id == job_id]
        for replica in simulation
    }


def busy(lasts: float) -> dict[str, float]:
    """Return the durations of jobs that keep all workers of a replica busy."""
    return {f"busy {number}": lasts for number in range(WORKERS)}


async def _coroutine() -> None: ...


def _generator() -> Iterator[int]:
    yield 1


class _Awaitable:
    def __await__(self) -> Iterator[None]:
        yield


class TestLateness:
    def test_the_time_that_its_claim_takes_makes_no_run_a_misfire(self) -> None:
        simulation = simulated(every_minutes(5, misfire_grace_time=1), 2, latency=60)
        simulation.advance(hours=2, minutes=2)
        assert [run.run_time for run in simulation.runs] == [at(5 * n) for n in range(1, 25)]
        assert max(run.began_at - run.run_time for run in simulation.runs).seconds > 10

    @pytest.mark.parametrize("failover", [False, True], ids=["", "failover"])
    def test_backlogs_on_three_replicas_at_once_run_each_window_once(self, failover: bool) -> None:
        """Whoever runs one is in the way of the others' next ones, which wait for that."""
        jobs, windows = range(5), range(-8, 0)

        def add_jobs(scheduler: Any) -> None:
            for number in jobs:
                first = {"start_date": at(-450), "next_run_time": at(-450)}
                late = {"misfire_grace_time": None, "coalesce": False}
                name = f"job {number}"
                scheduler.add_job(job, "interval", hours=1, id=name, **first, **late)

        durations = {f"job {number}": 20 * number for number in jobs}
        simulation = simulated(add_jobs, 3, durations=durations, failover=failover)
        simulation.advance(minutes=29)
        ran = Counter((run.job_id, run.run_time) for run in simulation.runs)
        assert ran == {(f"job {n}", at(30 + 60 * window)): 1 for n in jobs for window in windows}

    def test_a_starved_replica_neither_repeats_a_run_time_nor_loses_one(self) -> None:
        """Its workers are busy for several windows; what it submitted meanwhile comes late."""
        simulation = simulated(every_minutes(1, max_instances=100), 2, durations=busy(600))
        starved = simulation["replica-1"].scheduler
        for name in busy(600):
            starved.add_job(job, "date", run_date=at(0.5), id=name)
        simulation.advance(minutes=20, seconds=30)
        assert [run.run_time for run in simulation.runs_of("job")] == [
            at(minute) for minute in range(1, 21)
        ]
        assert codes(simulation)["replica-1"].count(EVENT_TASK_LOCK_REFUSED) >= 9

    def test_a_backlog_is_run_one_by_one_and_each_end_is_told_at_once(self) -> None:
        told: list[int] = []

        def add_jobs(scheduler: Any) -> None:
            wanted = EVENT_TASK_LOCK_GRANTED | EVENT_JOB_EXECUTED
            scheduler.add_listener(lambda event: told.append(event.code), wanted)
            late = {"misfire_grace_time": None, "coalesce": False, "next_run_time": at(-150)}
            scheduler.add_job(job, "interval", hours=1, start_date=at(-150), id="job", **late)

        simulated(add_jobs, durations={"job": 20}).advance(minutes=10)
        assert told == [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED] * 3

    def test_a_run_that_waits_for_a_worker_is_not_claimed_and_what_it_waits_for_is_told(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def add_jobs(scheduler: Any) -> None:
            for name in busy(60):
                scheduler.add_job(job, "date", run_date=at(1), id=name)
            late = {"misfire_grace_time": None}
            scheduler.add_job(job, "date", run_date=at(1.5), id="job", **late)

        simulation = simulated(add_jobs, durations=busy(60))
        simulation.advance(seconds=119)
        assert codes(simulation) == {"replica-1": []}
        [told] = [r.getMessage() for r in caplog.records if "workers of the" in r.getMessage()]
        assert told.startswith("All 10 workers of the SimulatedWorkers are busy, and 1 run times")
        assert "The workers run: 'busy 0' (" in told
        simulation.advance(seconds=3)
        assert codes(simulation) == {
            "replica-1": [EVENT_TASK_LOCK_GRANTED, EVENT_TASK_LOCK_RELEASED]
        }


class TestEnds:
    @pytest.mark.parametrize(("options", "runs"), [({}, 1), ({"on_failure": "release"}, 2)])
    def test_a_run_that_raises_keeps_its_window_or_opens_it_if_its_option_says_so(
        self, options: dict[str, Any], runs: int
    ) -> None:
        @task_lock(**options)
        def fail() -> None:
            raise ValueError("no")

        simulation = simulated(every_minutes(5, fail), 2, clock_offsets=[10, 0])
        simulation.advance(minutes=6)
        assert [run.outcome for run in simulation.runs] == ["error"] * runs
        assert {run.run_time for run in simulation.runs} == {at(5)}

    def test_a_run_that_outlives_its_maximum_lock_is_told_and_frees_nobody_elses(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        long = task_lock(min_lock=0, max_lock=600, lease=None)(lambda: None)
        simulation = simulated(every_minutes(1, long), 2, durations={"job": 720})
        simulation.advance(minutes=2)
        simulation.durations["job"] = 240
        simulation.advance(minutes=15)
        first, second, third, *_ = simulation.runs
        assert first.ended_at is not None
        assert second.ended_at is not None
        assert second.replica != first.replica
        assert second.began_at < first.ended_at < second.ended_at <= third.began_at
        lost = [name for name, told in codes(simulation).items() if EVENT_TASK_LOCK_LOST in told]
        assert lost == [first.replica]
        assert "the run outlived its maximum lock" in caplog.text

    # What a call of these returns is run by nobody.
    @pytest.mark.parametrize("options", [{}, {"jobs": {"job": False}}], ids=["lock", "no-lock"])
    @pytest.mark.parametrize(
        ("returned", "told"),
        [
            pytest.param(_coroutine, "a coroutine", id="coroutine"),
            pytest.param(lambda: (number for number in count()), "a generator", id="generator"),
            pytest.param(lambda: map(str, [1]), "a map object", id="map"),
            pytest.param(contextmanager(_generator), "a context manager", id="context-manager"),
            pytest.param(_Awaitable, "an awaitable _Awaitable", id="awaitable"),
        ],
    )
    def test_a_function_that_returns_what_nobody_runs_has_failed(
        self,
        caplog: pytest.LogCaptureFixture,
        options: dict[str, Any],
        returned: Any,
        told: str,
    ) -> None:
        errors: list[Any] = []

        def call() -> Any:
            return returned()

        def add_jobs(scheduler: Any) -> None:
            scheduler.add_listener(errors.append, EVENT_JOB_ERROR)
            every_minutes(5, call)(scheduler)

        simulated(add_jobs, **options).advance(minutes=6)
        [event] = errors
        assert f"'job': its function has returned {told}, which nobody" in str(event.exception)
        assert str(event.exception) in caplog.text
        assert isinstance(event.exception, TaskLockOptionError)  # which is not retried


class TestOutage:
    def in_an_outage(self, add_jobs: Any, **options: Any) -> SimulatedReplicas:
        """Return a replica after two run times, of which the first fell into an outage."""
        simulation = simulated(add_jobs, **options)
        simulation.advance(minutes=4.9)
        simulation.cut_off("replica-1", 30)
        simulation.advance(minutes=6)
        return simulation

    def test_a_job_is_skipped_with_one_event_and_the_scheduler_lives_on(self) -> None:
        simulation = self.in_an_outage(every_minutes(5))
        [replica] = simulation
        assert [run.run_time for run in simulation.runs] == [at(10)]
        assert codes(simulation)["replica-1"][0] == EVENT_TASK_LOCK_ERROR
        assert codes(simulation)["replica-1"][1:] == [RUN[0], RUN[2]]
        assert isinstance(replica.events[0].exception, TaskLockDatabaseError)

    def test_with_on_database_error_run_they_run_without_a_lock(self) -> None:
        def add_jobs(scheduler: Any) -> None:
            for name in ("a", "b"):
                every_minutes(5, id=name)(scheduler)

        simulation = self.in_an_outage(add_jobs, on_database_error="run")
        for name in ("a", "b"):
            runs = [(run.run_time, run.token is None) for run in simulation.runs_of(name)]
            assert runs == [(at(5), True), (at(10), False)]
            assert codes(simulation, name)["replica-1"] == [EVENT_TASK_LOCK_ERROR, RUN[0], RUN[2]]

    def test_a_job_without_a_lock_does_not_wait_for_the_database(self) -> None:
        def add_jobs(scheduler: Any) -> None:
            every_minutes(5)(scheduler)
            every_minutes(5, id="unlocked")(scheduler)

        simulation = self.in_an_outage(add_jobs, jobs={"unlocked": False})
        assert [run.began_at for run in simulation.runs_of("unlocked")] == [at(5), at(10)]
        assert len(simulation.runs_of("job")) == 1


class TestListeners:
    @pytest.mark.parametrize("listened", [EVENT_TASK_LOCK_ALL, EVENT_JOB_EXECUTED])
    def test_one_that_fails_changes_nothing(self, listened: int) -> None:
        told: list[int] = []

        def fail(event: Any) -> None:
            told.append(event.code)
            raise ZeroDivisionError

        def add_jobs(scheduler: Any) -> None:
            scheduler.add_listener(fail, listened)
            every_minutes(5)(scheduler)

        simulation = simulated(add_jobs, 2)
        simulation.advance(minutes=6)
        [run] = simulation.runs
        assert run.outcome == "ok"
        expected = Counter([*RUN, EVENT_TASK_LOCK_REFUSED])
        assert Counter(told) == {code: 1 for code in expected if code & listened}

    def test_one_is_told_from_when_it_was_added_until_it_is_removed(self) -> None:
        """No event is made that nobody listens to; who comes later is told all the same."""
        heard: list[str] = []

        def hear(event: Any) -> None:
            heard.append(event.job_id)

        simulation = simulated()
        [replica] = simulation
        replica.scheduler.remove_listener(replica.events.append)
        for job_id in ("before", "while", "after"):
            if job_id == "while":
                replica.scheduler.add_listener(hear, EVENT_TASK_LOCK_GRANTED)
            if job_id == "after":
                replica.scheduler.remove_listener(hear)
            replica.scheduler.add_job(job, id=job_id, misfire_grace_time=None)
            simulation.advance(minutes=2)
        assert len(simulation.runs) == 3
        assert heard == ["while"]

    def test_a_run_has_an_end_by_apschedulers_events_and_a_refused_run_time_has_none(self) -> None:
        """What docs/metrics.md says of metrics that take the time between these events."""
        told: list[tuple[str, Any]] = []

        def add_jobs(scheduler: Any) -> None:
            def hear(name: str, code: int, attribute: str = "scheduled_run_time") -> None:
                scheduler.add_listener(lambda e: told.append((name, getattr(e, attribute))), code)

            hear("submitted", EVENT_JOB_SUBMITTED, "scheduled_run_times")
            hear("granted", EVENT_TASK_LOCK_GRANTED)
            hear("refused", EVENT_TASK_LOCK_REFUSED)
            hear("ended", EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
            every_minutes(1)(scheduler)

        simulation = simulated(add_jobs)
        simulation.advance(seconds=30)
        simulation.hold("job", 50)
        simulation.advance(minutes=2)
        assert told == [
            ("submitted", [at(1)]),
            ("refused", at(1)),
            ("submitted", [at(2)]),
            ("granted", at(2)),
            ("ended", at(2)),
        ]

    def test_a_job_is_not_begun_whose_listener_of_the_grant_shuts_the_scheduler_down(self) -> None:
        """It is handed over, so that another replica runs its window."""

        def shut_down(event: Any) -> None:
            if len(simulation) == 2:
                simulation.stop(event.holder)

        def add_jobs(scheduler: Any) -> None:
            scheduler.add_listener(shut_down, EVENT_TASK_LOCK_GRANTED)
            every_minutes(5)(scheduler)

        simulation = simulated(add_jobs, 2)
        simulation.advance(minutes=6)
        [run] = simulation.runs
        assert (run.replica, run.kind) == (next(iter(simulation)).name, "takeover")


class TestLog:
    def test_it_has_what_apscheduler_logs_and_nothing_of_its_carrier(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "apscheduler.executors.default")
        simulated(every_minutes(5)).advance(minutes=6)
        told = [r for r in caplog.records if r.name == "apscheduler.executors.default"]
        assert [record.getMessage().split(" (")[0] for record in told] == [
            'Running job "job',
            'Job "job',
        ]
        assert told[1].getMessage().endswith("executed successfully")

    @pytest.mark.parametrize("failover", [False, True], ids=["", "failover"])
    @pytest.mark.parametrize(("lease", "patience"), [(None, 1), (60, 3)])
    def test_a_run_that_blocks_its_task_is_a_warning_once(
        self, lease: float | None, patience: int, failover: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A run that hangs would otherwise silence its task; one that is renewed may be long."""
        name = "the job's\n\x1b[31m"
        options: dict[str, Any] = {"min_lock": 0, "max_factor": 50, "name": name}
        simulation = simulated(
            every_minutes(5, task_lock(**options)(lambda: None)),
            2,
            durations={"job": 3600},
            lease=lease,
            failover=failover,
        )
        simulation.advance(minutes=6)
        [run] = simulation.runs
        for blocked in range(1, patience + 2):
            simulation.advance(minutes=5)
            warnings = [
                r.getMessage() for r in caplog.records if r.name.startswith("apscheduler_tasklock")
            ]
            assert len(warnings) == (blocked >= patience)
        [warning] = warnings
        assert f"because {run.replica!r} still runs the task (token {run.token})" in warning
        assert warning.isprintable()

    def test_two_functions_under_one_task_name_are_told(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As where two applications share a database, and each has a job with one id.

        Not at the first refusal, which may be due to a deployment that renames the function.
        """
        functions = iter((_one_application, _another_application))

        def add_jobs(scheduler: Any) -> None:
            every_minutes(5, next(functions))(scheduler)

        # The clock of the first replica is ahead, so that it runs all of them.
        simulation = simulated(add_jobs, 2, clock_offsets=[1, 0])
        for number in range(1, 4):
            simulation.advance(minutes=5.1)
            assert codes(simulation)["replica-2"] == [EVENT_TASK_LOCK_REFUSED] * number
            text = "Both jobs have this task's name, and so one lock"
            assert caplog.text.count(text) == (number > 1)
        told = f"it runs {__name__}:_another_application here, and is refused"
        assert told in caplog.text


def _one_application() -> None: ...


def _another_application() -> None: ...
