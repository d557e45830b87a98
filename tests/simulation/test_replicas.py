"""Simulated replicas, which call the application's functions on a clock that the test moves."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MAX_INSTANCES
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockError,
    TaskLockOptionError,
    TaskLockStateError,
    current_lock,
    task_lock,
)
from tests.simulation.fleets import MINUTE, AddJobs, come_and_go, every, job
from tests.simulation.replicas import MIDNIGHT, SimulatedReplicas, SimulatedRun


@task_lock()
def anywhere() -> None:
    pass


def every_minutes(minutes: int, function: Any = job, **options: Any) -> AddJobs:
    def add_jobs(scheduler: Any) -> None:
        scheduler.add_job(function, "interval", minutes=minutes, id="job", **options)

    return add_jobs


def hourly(function: Any = job, **options: Any) -> AddJobs:
    def add_jobs(scheduler: Any) -> None:
        scheduler.add_job(function, "cron", minute=0, id="job", **options)

    return add_jobs


def simulated(add_jobs: Any, replicas: int = 3, **options: Any) -> SimulatedReplicas:
    return SimulatedReplicas(replicas, start=MIDNIGHT, add_jobs=add_jobs, **options)


def told(runs: list[SimulatedRun]) -> list[tuple[Any, ...]]:
    return [(run.run_time, run.replica, run.began_at, run.kind, run.outcome) for run in runs]


class TestRuns:
    def test_an_interval_job_of_three_replicas_runs_once_a_period(self) -> None:
        simulation = simulated(every_minutes(5))
        runs = simulation.advance(hours=5, minutes=1)
        assert runs == simulation.runs == simulation.runs_of("job")
        assert len(runs) == 60
        gaps = {later.began_at - earlier.began_at for earlier, later in pairwise(runs)}
        assert min(gaps) > 4.9 * MINUTE
        assert max(gaps) < 5.1 * MINUTE
        assert {run.outcome for run in runs} == {"ok"}
        assert [run.token for run in runs] == sorted({run.token for run in runs})

    def test_a_cron_job_runs_on_one_of_them_each_time(self) -> None:
        simulation = simulated(hourly())
        runs = simulation.advance(days=2, minutes=1)
        hours = [MIDNIGHT + timedelta(hours=number) for number in range(1, 49)]
        assert [run.run_time for run in runs] == hours
        assert {run.replica for run in runs} == {"replica-1", "replica-2", "replica-3"}

    def test_the_same_seed_gives_the_same_jitter_and_leaves_random_alone(self) -> None:
        def runs(seed: int) -> list[tuple[Any, ...]]:
            simulation = simulated(hourly(jitter=600), seed=seed)
            return told(simulation.advance(hours=12))

        before = random.getstate()
        assert runs(1) == runs(1) != runs(2)
        assert random.getstate() == before

    def test_the_same_seed_gives_the_same_runs_and_another_one_others(self) -> None:
        def runs(seed: int) -> list[tuple[Any, ...]]:
            simulation = simulated(hourly(), seed=seed, durations={"job": 600}, failover=True)
            simulation.advance(hours=5, minutes=3)
            simulation.kill("replica-2")
            simulation.start_replica()
            simulation.advance(hours=5)
            return told(simulation.runs)

        assert runs(1) == runs(1)
        assert runs(1) != runs(2)

    def test_functions_are_called_with_their_arguments_and_their_lock(self) -> None:
        seen = []

        def seeing(number: int) -> None:
            lock = current_lock()
            assert lock is not None
            until = lock.run_until
            lock.extend(3600)
            assert lock.run_until - until == timedelta(hours=1)
            seen.append((number, lock.name, lock.token, lock.run_time, lock.lost))

        simulation = simulated(hourly(seeing, args=[7]), namespace="shop/")
        [run] = simulation.advance(hours=1, minutes=1)
        assert seen == [(7, "shop/job", run.token, MIDNIGHT + timedelta(hours=1), False)]
        assert current_lock() is None

    def test_a_coroutine_is_awaited_also_in_a_test_that_is_one(self) -> None:
        names = []

        async def coroutine() -> None:
            await asyncio.sleep(0)
            lock = current_lock()
            names.append(lock and lock.name)

        async def test() -> list[SimulatedRun]:
            return simulated(hourly(coroutine)).advance(hours=2, minutes=1)

        runs = asyncio.run(test())
        assert names == ["job", "job"]
        assert [run.outcome for run in runs] == ["ok", "ok"]

    def test_what_a_function_raises_is_its_outcome(self) -> None:
        def fail() -> None:
            raise ValueError("no")

        simulation = simulated(hourly(fail))
        events: list[Any] = []
        for replica in simulation:
            replica.scheduler.add_listener(events.append, EVENT_JOB_ERROR | EVENT_JOB_EXECUTED)
        [run] = simulation.advance(hours=1, minutes=1)
        assert run.outcome == "error"
        assert [event.code for event in events] == [EVENT_JOB_ERROR]

    def test_a_job_without_a_lock_runs_on_every_replica(self) -> None:
        simulation = simulated(hourly(anywhere, kwargs={"task_lock": False}))
        runs = simulation.advance(hours=1, minutes=1)
        assert sorted(run.replica for run in runs) == ["replica-1", "replica-2", "replica-3"]
        assert {run.token for run in runs} == {None}

    def test_a_one_off_job_runs_once(self) -> None:
        def add_jobs(scheduler: Any) -> None:
            scheduler.add_job(job, "date", run_date=MIDNIGHT + 10 * MINUTE, id="job")

        assert len(simulated(add_jobs).advance(hours=1)) == 1

    def test_events_are_sent_as_usual(self) -> None:
        simulation = simulated(hourly())
        [run] = simulation.advance(hours=1, minutes=1)
        codes = Counter(event.code for replica in simulation for event in replica.events)
        assert codes[EVENT_TASK_LOCK_GRANTED] == 1
        assert codes[EVENT_TASK_LOCK_REFUSED] == 2
        [granted] = [e for e in simulation[run.replica].events if e.code == EVENT_TASK_LOCK_GRANTED]
        assert (granted.holder, granted.token) == (run.replica, run.token)


class TestTime:
    def test_it_passes_without_anything_to_do(self) -> None:
        simulation = SimulatedReplicas(2, start=MIDNIGHT)
        assert simulation.advance(timedelta(days=1)) == []
        assert simulation.now == MIDNIGHT + timedelta(days=1)

    def test_runs_take_as_long_as_is_said(self) -> None:
        simulation = simulated(hourly(), durations={"job": timedelta(minutes=10)})
        [run] = simulation.advance(hours=1, minutes=5)
        assert (run.ended_at, run.outcome) == (None, "")
        simulation.advance(minutes=10)
        assert run.ended_at == run.began_at + 10 * MINUTE
        simulation.durations["job"] = 60
        [run] = simulation.advance(hours=1)
        assert run.ended_at == run.began_at + MINUTE

    def test_a_job_can_sleep_and_see_the_time_pass(self) -> None:
        times = []

        def sleepy() -> None:
            times.append(simulation.now)
            simulation.sleep(30)
            times.append(simulation.now)

        simulation = simulated(hourly(sleepy))
        [run] = simulation.advance(hours=1, minutes=1)
        assert times == [run.began_at, run.began_at + timedelta(seconds=30)]
        assert run.ended_at == times[-1]

    def test_a_run_time_is_refused_while_the_run_before_it_goes_on(self) -> None:
        simulation = simulated(every_minutes(5), durations={"job": 420})
        runs = simulation.advance(hours=1)
        assert all(
            earlier.ended_at is not None and earlier.ended_at <= later.began_at
            for earlier, later in pairwise(runs)
        )
        assert len(runs) < 11

    def test_a_run_that_outlives_its_maximum_lock_has_lost_it(self) -> None:
        lost = []

        def endless() -> None:
            simulation.sleep(timedelta(hours=3))
            lock = current_lock()
            assert lock is not None
            lost.append(lock.lost)

        simulation = simulated(hourly(endless), max_factor=2)
        simulation.advance(hours=5)
        assert lost[0]
        codes = Counter(event.code for replica in simulation for event in replica.events)
        assert codes[EVENT_TASK_LOCK_LOST] >= 1

    def test_a_replicas_own_instance_is_counted(self) -> None:
        simulation = simulated(every_minutes(5), 1, durations={"job": 420})
        events: list[Any] = []
        for replica in simulation:
            replica.scheduler.add_listener(events.append, EVENT_JOB_MAX_INSTANCES)
        simulation.advance(minutes=11)
        assert len(events) == 1

    def test_intervals_begin_in_simulated_time_unless_they_say_when(self) -> None:
        def add_jobs(scheduler: Any) -> None:
            scheduler.add_job(job, IntervalTrigger(minutes=10), id="default")
            at = MIDNIGHT + timedelta(minutes=25)
            scheduler.add_job(job, "interval", minutes=10, start_date=at, id="given")
            scheduler.add_job(job, id="now")

        simulation = simulated(add_jobs, 1)
        simulation.advance(minutes=31)
        began = {
            job_id: [round((r.began_at - MIDNIGHT) / MINUTE) for r in simulation.runs_of(job_id)]
            for job_id in ("default", "given", "now")
        }
        assert began == {"default": [10, 20, 30], "given": [25], "now": [0]}

    def test_a_start_date_that_is_given_is_kept_to_the_microsecond(self) -> None:
        start = MIDNIGHT + timedelta(minutes=25, microseconds=1)
        [run] = simulated(every_minutes(60, start_date=start), 1).advance(hours=1)
        assert run.run_time == start

    def test_clocks_that_differ_run_a_shared_run_time_once(self) -> None:
        simulation = SimulatedReplicas(
            3,
            start=MIDNIGHT + 10 * MINUTE,
            add_jobs=hourly(),
            clock_offsets=[0, 40, timedelta(seconds=-40)],
        )
        runs = simulation.advance(days=1)
        assert len({run.run_time for run in runs}) == len(runs) == 24
        assert {run.replica for run in runs} == {"replica-2"}  # because its clock is ahead
        assert runs[0].began_at < MIDNIGHT + timedelta(minutes=59, seconds=21)

    def test_the_zone_of_the_start_is_that_of_the_schedulers(self) -> None:
        berlin = ZoneInfo("Europe/Berlin")
        simulation = SimulatedReplicas(
            2,
            start=datetime(2026, 3, 28, tzinfo=berlin),
            add_jobs=lambda scheduler: scheduler.add_job(job, "cron", hour=12, id="job"),
        )
        first, second = simulation.advance(days=2)
        assert [run.run_time.hour for run in (first, second)] == [12, 12]
        passed = second.began_at.timestamp() - first.began_at.timestamp()
        assert abs(passed - 23 * 3600) < 1  # because clocks change in between

    @pytest.mark.parametrize(
        ("day", "hour", "first"),
        [
            pytest.param("2026-10-25", 2, "00:30", id="an hour that comes twice"),
            pytest.param("2026-10-25", 3, "02:30", id="the hour after that"),
            pytest.param("2026-03-29", 3, "01:30", id="the hour after one that is left out"),
        ],
    )
    def test_run_times_at_a_change_of_the_clocks(self, day: str, hour: int, first: str) -> None:
        start = datetime.fromisoformat(day).replace(tzinfo=ZoneInfo("Europe/Berlin"))
        simulation = SimulatedReplicas(
            2,
            start=start,
            add_jobs=lambda s: s.add_job(job, "cron", hour=hour, minute=30, id="job"),
            clock_offsets=[0, 3600],
        )
        simulation.kill("replica-1")
        runs = simulation.advance(hours=20)
        assert f"{runs[0].run_time.astimezone(timezone.utc):%H:%M}" == first
        for run in runs:
            late_by = run.began_at.timestamp() + 3600 - run.run_time.timestamp()
            assert 0 <= late_by < 1

    def test_jobs_are_paused_resumed_and_rescheduled_in_simulated_time(self) -> None:
        simulation = simulated(hourly(), 1)
        [replica] = simulation
        replica.scheduler.pause_job("job")
        assert simulation.advance(hours=3, minutes=1) == []
        replica.scheduler.resume_job("job")
        assert len(simulation.advance(hours=1)) == 1
        replica.scheduler.reschedule_job("job", trigger="interval", minutes=30)
        assert len(simulation.advance(hours=1, minutes=1)) == 2
        replica.scheduler.remove_job("job")
        assert simulation.advance(hours=5) == []


class Stuck(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """A trigger without progress, like a cron trigger with jitter in a repeated hour."""

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime:
        return MIDNIGHT + 10 * MINUTE


class TestDeaths:
    def run_until_killed(self, **options: Any) -> tuple[SimulatedReplicas, SimulatedRun]:
        simulation = simulated(hourly(), durations={"job": 600}, **options)
        [run] = simulation.advance(hours=1, minutes=2)
        simulation.kill(run.replica)
        return simulation, run

    def test_with_failover_another_replica_runs_the_window_again(self) -> None:
        simulation, first = self.run_until_killed(failover=True, lease=30)
        [second] = simulation.advance(minutes=30)
        assert (first.outcome, second.kind, second.outcome) == ("died", "takeover", "ok")
        assert second.run_time == first.run_time
        assert second.replica != first.replica
        assert first.ended_at is not None
        # The sum of the lease and the poll interval limits the wait.
        waited = (second.began_at - first.ended_at).total_seconds()
        assert 20 < waited < 37
        [third] = simulation.advance(minutes=30)
        assert third.began_at - third.run_time < timedelta(seconds=1)

    def test_without_it_the_next_window_is_run_by_another(self) -> None:
        simulation, first = self.run_until_killed()
        [second] = simulation.advance(hours=1)
        assert second.kind == "schedule"
        assert second.run_time == first.run_time + timedelta(hours=1)
        assert second.replica != first.replica

    def test_a_run_time_that_came_meanwhile_is_run_after_the_takeover(self) -> None:
        simulation = simulated(every(5), durations={"job": 250}, failover=True, lease=120)
        [first] = simulation.advance(minutes=8, seconds=30)
        simulation.kill(first.replica)  # its lease ends after the next run time
        second, third = simulation.advance(minutes=6, seconds=25)
        assert (second.kind, third.kind) == ("takeover", "schedule")
        assert second.run_time == first.run_time
        assert third.run_time == first.run_time + 5 * MINUTE
        assert second.ended_at is not None
        assert second.ended_at <= third.began_at < second.ended_at + timedelta(seconds=10)

    def test_a_job_that_kills_its_replicas_is_given_up_until_its_next_window(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def poisonous() -> None:
            lock = current_lock()
            assert lock is not None
            holders.append(lock.token)

        holders: list[int] = []
        simulation = simulated(
            hourly(poisonous), 5, durations={"job": 600}, failover=True, lease=30, max_takeovers=2
        )
        simulation.advance(hours=1, minutes=1)
        for _ in range(3):
            simulation.kill(simulation.runs[-1].replica)
            simulation.advance(minutes=2)
        assert [run.kind for run in simulation.runs] == ["schedule", "takeover", "takeover"]
        [given_up] = [
            event
            for replica in simulation
            for event in replica.events
            if event.code == EVENT_TASK_LOCK_ERROR
        ]
        died = simulation.runs[-1]
        assert (given_up.reason, given_up.token) == ("given up", died.token)
        assert given_up.holder == died.replica
        said = "is given up: 3 runs of the task in a row have died with their holders"
        assert said in str(given_up.exception)
        assert [said in r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [True]
        [run] = simulation.advance(hours=1)
        assert (run.kind, run.run_time) == ("schedule", MIDNIGHT + timedelta(hours=2))

    def test_a_job_can_kill_its_own_replica(self) -> None:
        def poisonous() -> None:
            simulation.kill(simulation.runs[-1].replica)

        simulation = simulated(hourly(poisonous), 5, failover=True, lease=30, max_takeovers=2)
        runs = simulation.advance(hours=1, minutes=10)
        assert [run.kind for run in runs] == ["schedule", "takeover", "takeover"]
        assert {run.outcome for run in runs} == {"died"}
        assert len(simulation) == 2
        assert current_lock() is None

    def test_a_job_can_stop_its_own_replica(self) -> None:
        def stopping() -> None:
            simulation.stop(simulation.runs[-1].replica)

        async def stopping_async() -> None:
            if len(simulation) == 3:
                stopping()

        simulation = simulated(hourly(stopping), failover=True)
        assert [run.outcome for run in simulation.advance(hours=1, minutes=10)] == ["ok"]
        assert len(simulation) == 2
        simulation = simulated(hourly(stopping_async), failover=True)
        first, second = simulation.advance(hours=1, minutes=10)
        assert (first.outcome, second.kind, second.outcome) == ("cancelled", "takeover", "ok")
        assert len(simulation) == 2

    def test_a_stop_lets_a_run_go_on_to_its_end(self) -> None:
        simulation = simulated(hourly(), durations={"job": 600}, failover=True)
        [run] = simulation.advance(hours=1, minutes=2)
        simulation.stop(run.replica)
        assert len(simulation) == 2
        assert simulation.advance(minutes=30) == []
        assert run.outcome == "ok"
        assert run.ended_at == run.began_at + 10 * MINUTE

    def test_a_replica_that_is_stopping_can_be_killed(self) -> None:
        simulation = simulated(hourly(), durations={"job": 600}, failover=True, lease=30)
        [first] = simulation.advance(hours=1, minutes=2)
        simulation.stop(first.replica)
        simulation.advance(minutes=1)
        simulation.kill(first.replica)
        [second] = simulation.advance(minutes=30)
        assert (first.outcome, second.kind, second.outcome) == ("died", "takeover", "ok")
        with pytest.raises(TaskLockStateError, match="gone already"):
            simulation.kill(first.replica)

    def test_a_stop_cuts_a_coroutine_whose_window_is_run_again_at_once(self) -> None:
        async def coroutine() -> None:
            pass

        simulation = simulated(hourly(coroutine), durations={"job": 600}, failover=True)
        [first] = simulation.advance(hours=1, minutes=2)
        simulation.stop(simulation[first.replica])
        [second] = simulation.advance(minutes=30)
        assert (first.outcome, second.kind, second.outcome) == ("cancelled", "takeover", "ok")
        assert second.began_at - MIDNIGHT - timedelta(hours=1, minutes=2) < timedelta(seconds=10)

    def test_a_replica_that_starts_later_has_the_jobs(self) -> None:
        simulation = simulated(hourly(), 1)
        started = simulation.start_replica("new", clock_offset=1)
        simulation.kill("replica-1")
        runs = simulation.advance(hours=2, minutes=1)
        assert [run.replica for run in runs] == ["new", "new"]
        assert list(simulation) == [started]

    def test_an_interval_job_moves_to_another_replica_within_its_period(self) -> None:
        simulation = simulated(every_minutes(60), 2)
        [first] = simulation.advance(hours=1, minutes=1)
        simulation.kill(first.replica)
        [second] = simulation.advance(hours=1, minutes=1)
        assert second.began_at - first.began_at < timedelta(minutes=61)

    def test_an_interval_job_that_all_others_have_removed_is_run_by_the_last_that_has_it(
        self,
    ) -> None:
        simulation = simulated(every_minutes(60), 2)
        simulation.advance(minutes=30)
        late = simulation.start_replica()  # its own interval runs the job at half past
        [first] = simulation.advance(minutes=31)
        for replica in simulation:
            if replica is not late:
                replica.scheduler.remove_job("job")
        [second] = simulation.advance(hours=1)
        assert second.replica == late.name
        assert second.began_at - first.began_at < timedelta(minutes=61)

    @pytest.mark.parametrize("failover", [False, True])
    def test_runs_of_a_task_never_overlap_and_none_is_lost_with_failover(
        self, failover: bool, rng: random.Random
    ) -> None:
        simulation = simulated(
            every(10),
            durations={"job": 200},
            seed=rng.getrandbits(32),
            failover=failover,
            lease=20,
            max_takeovers=50,
        )
        come_and_go(simulation, rng, 60, longest=1800)

        runs = simulation.runs
        for earlier, later in pairwise(runs):
            assert earlier.ended_at is not None
            assert earlier.ended_at <= later.began_at
        begun = Counter(run.run_time for run in runs if run.kind == "schedule")
        assert set(begun.values()) == {1}
        if failover:
            ended = {run.run_time for run in runs if run.outcome == "ok"}
            assert ended >= {run.run_time for run in runs[:-1]}


class TestLeaderMode:
    """The same decisions with the library's own executor, in place of the short form."""

    def led(self, add_jobs: Any, replicas: int = 3, **options: Any) -> SimulatedReplicas:
        """Return a fleet of which replica-1 leads, and the others have been up for long enough."""
        simulation = simulated(add_jobs, 1, leader=True, **options)
        simulation.advance(seconds=3)
        for _ in range(replicas - 1):
            simulation.start_replica()
        simulation.advance(seconds=17)
        assert leaders(simulation) == ["replica-1"]
        return simulation

    def test_the_leader_runs_everything_and_the_others_drop_it(self) -> None:
        simulation = self.led(every_second_cron())
        runs = simulation.advance(minutes=2)
        assert {run.replica for run in runs} == {"replica-1"}
        check_each_second_once(runs)
        reasons = {event.reason for event in simulation["replica-2"].events}
        assert reasons == {"window"}

    def test_an_interval_of_which_each_replica_has_its_own_run_times_runs_once_a_period(
        self,
    ) -> None:
        simulation = self.led(every_minutes(5))
        runs = simulation.advance(hours=2)
        assert {run.replica for run in runs} == {"replica-1"}
        assert len(runs) == 24

    @pytest.mark.parametrize("how", ["kill", "stop", "cut_off"])
    @pytest.mark.parametrize("coalesce", [False, True])
    def test_after_the_leader_nothing_is_lost(self, how: str, coalesce: bool) -> None:
        simulation = self.led(every_second_cron(coalesce=coalesce, max_instances=9))
        simulation.advance(seconds=30)
        getattr(simulation, how)("replica-1", *([40] if how == "cut_off" else []))
        simulation.start_replica()
        simulation.advance(minutes=1)
        assert len(leaders(simulation)) == 1
        if coalesce:
            gaps = [later.began_at - run.began_at for run, later in pairwise(simulation.runs)]
            assert max(gaps) < timedelta(seconds=8)  # a head start, and a look
        else:
            check_each_second_once(simulation.runs)

    def test_a_job_that_the_leader_has_removed_is_run_by_the_others(self) -> None:
        simulation = self.led(every_second_cron(max_instances=9))
        leader = simulation["replica-1"].scheduler
        leader.add_job(job, "interval", hours=9, id="other")
        leader.remove_job("job")
        runs = simulation.advance(minutes=1)
        assert len(runs) > 50
        check_each_second_once(simulation.runs)
        assert leaders(simulation) == ["replica-1"]

    def test_a_leader_without_jobs_resigns_at_its_next_look(self) -> None:
        """Its run times would be nobody's, and those of the others would wait for looks."""
        simulation = self.led(every_second_cron(max_instances=9), leader_lease=60)
        simulation["replica-1"].scheduler.remove_job("job")
        simulation.advance(seconds=15)  # two looks of this replica, and one of another
        [leader] = leaders(simulation)
        assert leader != "replica-1"
        simulation.advance(minutes=2)  # longer than a lease
        assert leaders(simulation) == [leader]
        check_each_second_once(simulation.runs)

    def test_a_run_that_fails_and_opens_its_window_is_not_run_again_by_each_follower(self) -> None:
        """Without leader mode the others would have been refused while it was run."""

        @task_lock(on_failure="release")
        def fail() -> None:
            raise ValueError("no")

        simulation = self.led(every(1, fail), durations={"job": 1})
        runs = simulation.advance(minutes=3)
        assert [run.outcome for run in runs] == ["error"] * 3
        assert {run.replica for run in runs} == {"replica-1"}

    def test_a_rolling_deployment_loses_nothing(self) -> None:
        simulation = self.led(every_second_cron(max_instances=9), 6)
        for number in range(1, 7):
            simulation.start_replica()
            simulation.advance(seconds=9)
            simulation.stop(f"replica-{number}")
            simulation.advance(seconds=1)
        simulation.advance(minutes=1)
        check_each_second_once(simulation.runs)
        assert len(leaders(simulation)) == 1


def every_second_cron(**options: Any) -> AddJobs:
    def add_jobs(scheduler: Any) -> None:
        job_options = {"coalesce": False, "misfire_grace_time": None, **options}
        scheduler.add_job(job, "cron", second="*", id="job", **job_options)

    return add_jobs


def leaders(simulation: SimulatedReplicas) -> list[str]:
    return [replica.name for replica in simulation if replica.executor.leads]


def check_each_second_once(runs: list[SimulatedRun]) -> None:
    gaps = {
        (later.run_time - earlier.run_time).total_seconds() for earlier, later in pairwise(runs)
    }
    assert gaps == {1.0}


class TestMistakes:
    def test_the_start_needs_a_time_zone(self) -> None:
        with pytest.raises(TaskLockOptionError, match="start must have a time zone"):
            SimulatedReplicas(2, start=datetime(2026, 3, 1))

    def test_a_name_is_that_of_one_living_replica(self) -> None:
        simulation = simulated(hourly(), 1)
        with pytest.raises(TaskLockOptionError, match="'replica-1' already"):
            simulation.start_replica("replica-1")
        simulation.kill("replica-1")
        again = simulation.start_replica("replica-1")
        assert simulation["replica-1"] is again

    def test_options_are_those_of_the_executor(self) -> None:
        with pytest.raises(TaskLockOptionError, match="min_factor"):
            simulated(hourly(), min_factor=-1)

    def test_a_job_cannot_advance_and_nobody_else_can_sleep(self) -> None:
        raised: list[BaseException] = []

        def advancing() -> None:
            try:
                simulation.advance(hours=1)
            except TaskLockError as error:
                raised.append(error)

        simulation = simulated(hourly(advancing))
        simulation.advance(hours=1, minutes=1)
        assert len(raised) == 1
        with pytest.raises(TaskLockStateError, match="is for a job"):
            simulation.sleep(1)
        with pytest.raises(TaskLockOptionError, match="duration"):
            simulation.advance(hours=-1)

    def test_a_trigger_that_does_not_get_on_is_an_error(self) -> None:
        simulation = simulated(lambda scheduler: scheduler.add_job(job, Stuck(), id="job"))
        with pytest.raises(TaskLockStateError, match=r"'job'.*not later"):
            simulation.advance(hours=1)

    def test_what_is_gone_cannot_be_killed(self) -> None:
        simulation = simulated(hourly())
        simulation.kill("replica-1")
        with pytest.raises(TaskLockStateError, match="gone already"):
            simulation.stop("replica-1")
        with pytest.raises(KeyError):
            simulation.kill("replica-9")

    def test_it_starts_no_thread(self) -> None:
        before = threading.active_count()
        simulation = simulated(hourly(), failover=True)
        simulation.advance(days=1)
        simulation.stop("replica-1")
        assert threading.active_count() == before


def test_it_is_drawn_as_a_timeline() -> None:
    simulation = SimulatedReplicas(
        2, start=MIDNIGHT, add_jobs=hourly(), durations={"job": 600}, failover=True, lease=30
    )
    simulation.advance(hours=1, minutes=2)
    [first] = simulation.runs
    simulation.kill(first.replica)
    simulation.advance(hours=1, minutes=58)
    killed, other = ("1", "2") if first.replica == "replica-1" else ("2", "1")
    lanes = {
        killed: "." * 20 + "D" + " " * 39 + " 1",
        other: "." * 20 + "T::::.........." + "." * 5 + "#:::::" + "." * 14 + " 2",
    }
    lines = str(simulation).splitlines()
    assert lines[0].startswith("2026-03-01 00:00:00 to 2026-03-01 03:00:00 UTC")
    assert lines[2] == "job: 3 runs, 1 taken over, 1 died"
    drawn = {line.split()[0][-1]: line for line in lines[3:]}
    assert drawn[killed].endswith(lanes[killed])
    assert drawn[other].count("T") == 1
    assert drawn[other].endswith("2")


def test_without_runs_the_timeline_says_so() -> None:
    assert str(SimulatedReplicas(1, start=MIDNIGHT)).endswith("nothing was run")


class TestEndsOfDeadRuns:
    @pytest.mark.parametrize(
        "options",
        [{"failover": True}, {"failover": True, "max_takeovers": 0}, {"failover": False}],
        ids=["taken over", "given up", "followed by the next run time"],
    )
    def test_each_is_told_once_by_the_replica_that_has_closed_it(
        self, options: dict[str, Any]
    ) -> None:
        simulation = simulated(hourly(), durations={"job": 1800}, **options)
        replicas, died = list(simulation), []
        for _ in range(3):
            simulation.advance(minutes=65)
            while simulation.runs[-1].outcome:
                simulation.advance(minutes=5)
            died.append(simulation.runs[-1].token)
            simulation.kill(simulation.runs[-1].replica)
            replicas.append(simulation.start_replica())
        simulation.advance(hours=3)
        told = [
            (replica.name, event)
            for replica in replicas
            for event in replica.events
            if event.code == EVENT_TASK_LOCK_RELEASED and event.outcome == "died"
        ]
        assert sorted(event.token for _, event in told) == sorted(died)
        assert all(teller != event.holder for teller, event in told)
        assert all(event.took > 0 for _, event in told)
