"""Retries on a clock that the test moves: a job that raises is run again, on any replica."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockGiveUp,
    TaskLockRetry,
    current_lock,
    task_lock,
)
from tests.simulation.fleets import MINUTE, WORKERS, AddJobs, come_and_go, every, job, simulated
from tests.simulation.replicas import MIDNIGHT, SimulatedReplicas, at
from tests.support.retry_mutations import forgetting


def failing(failures: int) -> Callable[..., None]:
    """Return a function of which so many attempts at each run time fail."""

    def fail(**_: Any) -> None:
        lock = current_lock()
        assert lock is not None
        if lock.attempt <= failures:
            raise ValueError("no")

    return fail


def fleet(
    failures: int, *, minutes: int = 30, replicas: int = 3, **options: Any
) -> SimulatedReplicas:
    """Return replicas of which the first attempts at each run time fail."""
    return simulated(every(minutes, failing(failures)), replicas, **options)


def one_off(function: Callable[..., None]) -> AddJobs:
    return lambda scheduler: scheduler.add_job(function, "date", run_date=at(10), id="job")


def attempts(simulation: SimulatedReplicas) -> list[int]:
    return [run.attempt for run in simulation.runs]


def test_a_job_that_fails_twice_runs_three_times_with_one_run_time() -> None:
    simulation = fleet(2, retries=3)
    runs = simulation.advance(minutes=40)
    assert [(run.attempt, run.kind, run.outcome) for run in runs] == [
        (1, "schedule", "error"),
        (2, "retry", "error"),
        (3, "retry", "ok"),
    ]
    assert len({run.run_time for run in runs}) == 1
    first, second, third = (run.began_at for run in runs)
    limit = timedelta(seconds=9)  # a look, and the jitter
    assert timedelta(seconds=30) <= second - first <= timedelta(seconds=30) + limit
    assert timedelta(seconds=60) <= third - second <= timedelta(seconds=60) + limit


def test_the_events_and_the_log_tell_of_each_attempt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "apscheduler_tasklock")
    simulation = fleet(1, replicas=1, retries=1)
    simulation.advance(minutes=35)
    [replica] = simulation
    granted, failed, retried, released = replica.events
    assert [event.code for event in replica.events] == 2 * [
        EVENT_TASK_LOCK_GRANTED,
        EVENT_TASK_LOCK_RELEASED,
    ]
    assert (granted.attempt, granted.reason) == (1, None)
    assert (failed.attempt, failed.retry_at is not None) == (1, True)
    assert (retried.attempt, retried.reason) == (2, "retry")
    assert (released.attempt, released.retry_at) == (2, None)
    assert retried.scheduled_run_time == granted.scheduled_run_time
    told = [record.getMessage() for record in caplog.records if "attempt" in record.getMessage()]
    assert "attempt 1 at the run time" in told[0]
    assert "has failed (ValueError); it is run again at" in told[0]
    assert "again (attempt 2" in told[1]


class TooManyRequests(TaskLockRetry):
    """An application's own exception, which does not call the base class's ``__init__``."""

    def __init__(self) -> None:
        pass


class TryAgainAtOnce(TaskLockRetry):
    after = timedelta(0)


class TryAgainSoon(TaskLockRetry):
    after = float("nan")


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (KeyError, 600),
        (TooManyRequests, 600),
        (TryAgainAtOnce, 0),
        # An impossible delay must not keep the row locked; that of the options stands.
        (TryAgainSoon, 600),
        (lambda: TaskLockRetry("not yet", after=300), 300),
        (TaskLockGiveUp, None),
        (SystemExit, None),
    ],
    ids=["error", "no init", "of the class", "impossible", "retry", "give up", "exit"],
)
def test_what_the_job_raises_decides_whether_and_when_it_is_retried(
    error: Callable[[], BaseException], waits: int | None
) -> None:
    def fail() -> None:
        raise error()

    simulation = simulated(every(30, fail), retries=1, retry_delay=600)
    first, *retries = simulation.advance(minutes=50)
    waited = [(retry.began_at - first.began_at).total_seconds() for retry in retries]
    # Up to a tenth is added, and a look.
    assert [waits is not None and waits <= each < 1.1 * waits + 6 for each in waited] == (
        [True] if waits is not None else []
    )


def test_jobs_that_fail_together_are_not_retried_together() -> None:
    def add_jobs(scheduler: Any) -> None:
        for number in range(WORKERS):
            scheduler.add_job(failing(1), "cron", minute=30, id=f"job {number}")

    simulation = simulated(add_jobs, 1, retries=1, retry_delay=600)
    simulation.advance(minutes=45)
    began = [run.began_at for run in simulation.runs if run.kind == "retry"]
    assert len(began) == WORKERS
    assert max(began) - min(began) > timedelta(seconds=20)


def test_without_retries_or_with_too_long_a_delay_a_job_fails_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(fleet(9).advance(minutes=50)) == 1
    assert "retry_delay" not in caplog.text
    assert len(fleet(9, retries=3, retry_delay="7200").advance(minutes=59)) == 1
    told = "its retry_delay of 7200 s is not below its period of 1800 s, so that its runs are not"
    assert told in caplog.text


def test_one_job_has_options_of_its_own() -> None:
    options = {"retries": 1, "retry_delay": timedelta(minutes=5), "retry_backoff": 1}
    simulation = simulated(every(30, failing(1), kwargs={"task_lock": options}))
    first, second = simulation.advance(minutes=40)
    assert second.attempt == 2
    assert second.began_at - first.began_at >= 5 * MINUTE


class TestOneOffs:
    @pytest.mark.parametrize("replicas", [1, 3])
    def test_one_is_run_again_although_the_schedulers_have_dropped_it(self, replicas: int) -> None:
        simulation = simulated(one_off(failing(2)), replicas, retries=2)
        simulation.advance(hours=1)
        assert attempts(simulation) == [1, 2, 3]
        assert not any(replica.executor.is_watching for replica in simulation)

    def test_one_is_run_again_by_others_after_a_death(self) -> None:
        simulation = simulated(one_off(failing(1)), 3, retries=2)
        [first] = simulation.advance(minutes=10, seconds=20)
        simulation.kill(first.replica)
        [second] = simulation.advance(hours=1)
        assert (second.attempt, second.outcome) == (2, "ok")

    @pytest.mark.parametrize("replicas", [1, 3])
    def test_replicas_that_forget_theirs_are_found(self, replicas: int) -> None:
        with forgetting():
            simulation = simulated(one_off(failing(2)), replicas, retries=2)
            assert len(simulation.advance(hours=1)) < 3

    @pytest.mark.parametrize("is_of_the_job", [True, False])
    def test_those_without_an_id_need_none(
        self, is_of_the_job: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Retries of the job are a mistake; those of its function are for its other jobs."""
        function = job if is_of_the_job else task_lock(retries=1)(lambda: None)
        options = {"kwargs": {"task_lock": {"retries": 1}}} if is_of_the_job else {}
        run_date = at(10) + timedelta(microseconds=1)  # of this replica alone
        simulation = simulated(
            lambda scheduler: scheduler.add_job(function, "date", run_date=run_date, **options), 1
        )
        assert len(simulation.advance(hours=1)) == (0 if is_of_the_job else 1)
        told = (
            "its retries need a lock, and it has none"
            if is_of_the_job
            else "its lock options (retries) have no effect"
        )
        assert told in caplog.text


class TestWho:
    @pytest.mark.parametrize("how", ["kill", "stop"])
    def test_another_replica_if_the_first_one_is_gone(self, how: str) -> None:
        simulation = fleet(1, retries=1)
        [first] = simulation.advance(minutes=30, seconds=10)
        getattr(simulation, how)(first.replica)
        [second] = simulation.advance(minutes=1)
        assert second.replica != first.replica
        assert (second.kind, second.attempt, second.outcome) == ("retry", 2, "ok")

    def test_no_replica_without_retries(self) -> None:
        """As in the deployment that gives the job retries: each goes by its own options."""
        simulation = fleet(1, replicas=1, retries=2)
        simulation.advance(minutes=30, seconds=10)
        other = simulation.start_replica(retries=0)
        simulation.kill("replica-1")
        assert simulation.advance(minutes=5) == []
        third = simulation.start_replica()
        simulation.advance(minutes=5)
        assert [(run.replica, run.attempt) for run in simulation.runs] == [
            ("replica-1", 1),
            (third.name, 2),
        ]
        assert other.events == []


class TestWhen:
    def test_a_run_time_that_comes_in_a_retry_follows_it(self) -> None:
        simulation = fleet(1, minutes=5, retries=1, durations={"job": 140})
        runs = simulation.advance(minutes=16)
        told = [((run.run_time - MIDNIGHT) // MINUTE, run.attempt) for run in runs]
        assert told == [(5, 1), (5, 2), (10, 1), (10, 2), (15, 1)]
        assert runs[2].began_at > MIDNIGHT + 10.1 * MINUTE

    def test_before_the_next_run_time_or_never(self) -> None:
        simulation = fleet(9, minutes=1, retries=9, retry_delay=20)
        runs = simulation.advance(minutes=5, seconds=30)
        assert {run.attempt for run in runs} == {1, 2}
        for run in runs:
            assert run.began_at < run.run_time + MINUTE
        assert [run.run_time for run in runs if run.attempt == 1] == [
            MIDNIGHT + n * MINUTE for n in range(1, 6)
        ]

    def test_after_a_pause(self) -> None:
        simulation = simulated(
            lambda scheduler: scheduler.add_job(failing(1), "cron", hour=2, id="job"), retries=1
        )
        simulation.advance(hours=2, seconds=10)
        simulation.pause("job")  # for an hour
        assert simulation.advance(minutes=59) == []
        simulation.advance(minutes=2)
        assert attempts(simulation) == [1, 2]

    def test_never_if_the_next_run_time_fell_into_the_pause(self) -> None:
        simulation = fleet(1, minutes=20, retries=1, retry_delay=300)
        simulation.advance(minutes=21)
        simulation.pause("job")  # for an hour
        simulation.advance(minutes=78)
        assert attempts(simulation) == [1]
        simulation.advance(minutes=10)
        assert attempts(simulation) == [1, 1, 2]

    def test_by_the_run_time_that_the_trigger_has_given_before_its_jitter(self) -> None:
        run_times = []

        def fail() -> None:
            lock = current_lock()
            assert lock is not None
            run_times.append(lock.run_time)
            raise ValueError

        fleet = simulated(every(30, fail, jitter=600), 1, retries=1)
        fleet.advance(minutes=45)
        assert run_times == [at(30), at(30)]

    def test_before_a_run_that_was_due_after_it_if_workers_are_busy(self) -> None:
        def add_jobs(scheduler: Any) -> None:
            scheduler.add_job(failing(1), "date", run_date=at(10), id="job")
            for number in range(WORKERS):
                run_date = at(10) + timedelta(seconds=10)
                scheduler.add_job(job, "date", run_date=run_date, id=f"busy {number}")
            late = at(10) + timedelta(seconds=23)
            scheduler.add_job(job, "date", run_date=late, id="late", misfire_grace_time=None)

        # The retry can begin 20 to 22 seconds after the failure, and a look finds it 25 seconds
        # after it.
        lasting = {f"busy {number}": 60 + 60 * (number > 0) for number in range(WORKERS)}
        simulation = simulated(add_jobs, 1, retries=1, retry_delay=20, durations=lasting)
        runs = simulation.advance(minutes=15)
        assert [(run.job_id, run.attempt) for run in runs[-2:]] == [("job", 2), ("late", 1)]


@pytest.mark.parametrize("leader", [False, True])
def test_attempts_follow_each_other_whatever_dies_and_stops(
    leader: bool, rng: random.Random
) -> None:
    simulation = fleet(
        2,
        minutes=10,
        retries=2,
        durations={"job": 45},
        seed=rng.getrandbits(32),
        failover=True,
        lease=20,
        max_takeovers=50,
        leader=leader,
    )
    come_and_go(simulation, rng, 40, longest=400)

    runs = simulation.runs
    for earlier, later in pairwise(runs):
        assert earlier.ended_at is not None
        assert earlier.ended_at <= later.began_at
        if later.kind == "takeover":
            expected = earlier.attempt, earlier.run_time
        elif later.kind == "retry":
            assert earlier.outcome == "error"
            expected = earlier.attempt + 1, earlier.run_time
        else:
            expected = 1, later.run_time
        assert (later.attempt, later.run_time) == expected
    begun = Counter((run.run_time, run.attempt) for run in runs if run.kind != "takeover")
    assert set(begun.values()) == {1}
    firsts = [run.run_time for run in runs if run.kind == "schedule"]
    assert {later - earlier for earlier, later in pairwise(firsts)} == {10 * MINUTE}
