"""Rules of runs, on replicas with the library's own executor and a clock that the test moves."""

from __future__ import annotations

import gc
import logging
import traceback
import weakref
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_MAX_INSTANCES
from apscheduler.jobstores.memory import MemoryJobStore

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockOptionError,
    TaskLockSchemaError,
    current_lock,
    task_lock,
)
from apscheduler_tasklock.options import DEFAULT_LEASE
from tests.simulation.fleets import MINUTE, WORKERS, AddJobs, every, job
from tests.simulation.replicas import MIDNIGHT, SimulatedReplicas, at, simulated
from tests.support.internals import deferred_runs


class TestStandby:
    def dead_at(
        self, due: str, jitter: int | None, **options: Any
    ) -> tuple[SimulatedReplicas, datetime]:
        """Return two replicas, of which the first one dies before its run time, and that time."""

        def add_jobs(scheduler: Any) -> None:
            scheduler.add_job(job, "interval", hours=1, jitter=jitter, id="job")

        simulation = simulated(add_jobs, min_factor=0.1, **options)
        simulation.advance(minutes=30)
        second = simulation.start_replica()
        simulation.advance(minutes=10)
        run_time: datetime = simulation[due].scheduler.get_job("job").next_run_time
        simulation.kill(due)
        assert second.scheduler.get_job("job").next_run_time > run_time + 11 * MINUTE
        return simulation, run_time

    @pytest.mark.parametrize(("jitter", "waits"), [(None, 2), (600, 602)])
    def test_a_stand_in_waits_for_2_s_and_the_triggers_jitter(
        self, jitter: int | None, waits: int
    ) -> None:
        simulation, due = self.dead_at("replica-1", jitter)
        run, *_ = simulation.advance(hours=1)
        late_by = (run.began_at - due).total_seconds()
        assert run.replica == "replica-2"
        assert waits <= late_by <= waits + 6  # a look

    def test_a_replica_whose_job_was_put_off_does_not_stand_in(self) -> None:
        # So far apart that no look comes between the run time and the change.
        simulation, due = self.dead_at("replica-1", None, poll_interval=60)
        simulation.advance(due - simulation.now + timedelta(seconds=1))
        [replica] = simulation
        put_off_to = simulation.now + timedelta(hours=9)
        replica.scheduler.modify_job("job", next_run_time=put_off_to)
        [run] = simulation.advance(hours=10)
        assert run.run_time == put_off_to

    def test_a_run_time_that_nobody_was_there_for_is_no_reason_after_a_period(self) -> None:
        """The fleet was away on purpose, as at night, and its jobs begin anew."""
        simulation, _ = self.dead_at("replica-1", None)
        simulation.kill("replica-2")
        simulation.advance(hours=3)
        third = simulation.start_replica()
        run, *_ = simulation.advance(hours=2)
        assert run.began_at - third.started_at > timedelta(minutes=59)


class TestOneOffs:
    @pytest.mark.parametrize("killed", ["replica-1", "replica-2"])
    def test_one_that_came_after_a_look_had_read_the_rows_is_taken_over(self, killed: str) -> None:
        """Its scheduler has dropped the job, so that only the note of its refusal knows of it."""

        def add_jobs(scheduler: Any) -> None:
            for number in range(5):
                named = task_lock(name=f"task {number}", min_lock=0)(lambda: None)
                first = at(10) + timedelta(seconds=number)
                for when, run_date in (("first", first), ("then", first + timedelta(seconds=103))):
                    scheduler.add_job(named, "date", run_date=run_date, id=f"{when} {number}")

        lasts = {"first": 100, "then": 600}
        simulation = simulated(
            add_jobs,
            2,
            durations={f"{when} {n}": lasts[when] for when in lasts for n in range(5)},
            look_latency=4,  # so that some looks have read a row before a job came, and end later
            failover=True,
            lease=30,
        )
        simulation.advance(minutes=13)
        simulation.kill(killed)
        simulation.advance(minutes=2)
        outcomes = Counter((run.kind, run.outcome) for run in simulation.runs)
        died = outcomes["schedule", "died"]
        assert died
        assert outcomes["takeover", ""] == died


class TestWorkers:
    def test_takeovers_leave_half_of_the_free_workers_to_the_schedule(self) -> None:
        """Both wait until all workers are free, because other runs have them until then."""
        lasts = {"busy": 600, "dead": 900, "waits": 900}

        def add_jobs(scheduler: Any) -> None:
            for n in range(WORKERS):
                scheduler.add_job(job, "cron", hour=0, minute=10, id=f"dead {n}")

        simulation = simulated(
            add_jobs,
            durations={f"{kind} {n}": lasts[kind] for kind in lasts for n in range(WORKERS)},
            failover=True,
            lease=30,
        )
        simulation.advance(minutes=11)
        second = simulation.start_replica().scheduler
        for n in range(WORKERS):
            second.add_job(job, "cron", hour=0, minute=12, id=f"busy {n}")
            waits = {"id": f"waits {n}", "misfire_grace_time": None}
            second.add_job(job, "cron", hour=0, minute=15, **waits)
        simulation.advance(minutes=2)
        simulation.kill("replica-1")
        runs = simulation.advance(minutes=12)
        kinds = Counter(run.job_id.split()[0] for run in runs)
        assert kinds == {"dead": WORKERS // 2, "waits": WORKERS // 2}


class TestLeases:
    @pytest.mark.parametrize(
        ("options", "lease"),
        [
            ({"max_lock": 600, "lease": 599}, 599.0),
            ({"max_lock": 600, "lease": 600}, None),
            ({"max_lock": 600, "lease": None}, None),
            ({"max_lock": 1500}, DEFAULT_LEASE),
            ({}, DEFAULT_LEASE),  # although its maximum lock is five days
            ({"max_lock": 45}, 15.0),
            ({"max_lock": 44}, None),
            ({"max_lock": 44, "failover": True}, 44 / 3),
        ],
    )
    def test_a_claim_has_a_lease_below_its_maximum_lock_or_none(
        self, options: dict[str, Any], lease: float | None
    ) -> None:
        """Without a lease, nothing is renewed."""
        leases = []

        @task_lock(**options)
        def see() -> None:
            lock = current_lock()
            assert lock is not None
            leases.append(lock.lease)

        simulated(lambda scheduler: scheduler.add_job(see, "cron", hour=0, minute=1)).advance(
            minutes=2
        )
        assert leases == [lease]


def test_a_maximum_below_the_default_minimum_is_refused() -> None:
    """Otherwise a window would outlast the lock of its run."""
    with pytest.raises(TaskLockOptionError, match=r"min_factor \(0.9\) must not be above"):
        simulated(lambda _scheduler: None, max_factor=0.5)
    simulated(lambda _scheduler: None, max_factor=0.5, min_factor=0.5)


async def coroutine(**_: Any) -> None:
    pass


def every_five_minutes(function: Any = job, **options: Any) -> AddJobs:
    return every(5, function, **options)


def told(simulation: SimulatedReplicas) -> list[tuple[float, str, str]]:
    """Return the run times in minutes from midnight, with their kinds and outcomes."""
    return [((r.run_time - MIDNIGHT) / MINUTE, r.kind, r.outcome) for r in simulation.runs]


def test_by_default_a_run_time_may_come_a_little_early() -> None:
    """The minimum lock is 0.9 of the period, and not the whole."""

    def add_jobs(scheduler: Any) -> None:
        scheduler.add_job(job, "interval", minutes=5, id="job")

    simulation = simulated(add_jobs)
    simulation.advance(seconds=285)
    simulation.start_replica()
    first, second = simulation.advance(minutes=6)
    assert (first.replica, second.replica) == ("replica-1", "replica-2")
    assert 0.93 * 5 * MINUTE < second.began_at - first.began_at < 0.97 * 5 * MINUTE


class TestDeferredRuns:
    def dead(
        self,
        minutes: float,
        lease: float = 480,
        executor: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SimulatedReplicas:
        """Return replicas after so many minutes, of which one was killed in the run of minute 5."""
        job_options = {"coalesce": False, "misfire_grace_time": 1, **options}
        of_executor = {"failover": True, "lease": lease, **(executor or {})}
        simulation = simulated(
            every_five_minutes(**job_options), 2, durations={"job": 30}, **of_executor
        )
        simulation.advance(minutes=5, seconds=10)
        simulation.kill(simulation.runs[0].replica)
        simulation.advance(minutes=minutes - 5)
        return simulation

    @pytest.mark.parametrize("busy", [0, WORKERS])
    def test_a_run_time_that_came_while_a_dead_run_stood_is_run_after_its_takeover(
        self, busy: int
    ) -> None:
        """The time of its deferral is no lateness, also if the workers are busy meanwhile."""
        simulation = self.dead(7, misfire_grace_time=60)
        [replica] = simulation
        for number in range(busy):
            name = f"busy {number}"
            simulation.durations[name] = 100
            replica.scheduler.add_job(job, "cron", hour=0, minute=12, id=name)
        simulation.advance(minutes=8)
        deferred = [(r.run_time, r.kind, r.outcome) for r in simulation.runs_of("job")]
        assert deferred[:3] == [
            (at(5), "schedule", "died"),
            (at(5), "takeover", "ok"),
            (at(10), "schedule", "ok"),
        ]

    @pytest.mark.parametrize(
        ("coalesce", "run_times"), [(False, [5, 5, 10, 15]), (True, [5, 5, 15])]
    )
    def test_of_several_deferred_ones_each_is_run_or_with_coalesce_the_last_one(
        self, coalesce: bool, run_times: list[int]
    ) -> None:
        simulation = self.dead(19.5, lease=780, coalesce=coalesce)
        assert [run_time for run_time, _, _ in told(simulation)] == run_times

    def test_without_failover_only_the_dead_runs_own_window_is_lost(self) -> None:
        simulation = self.dead(14, executor={"failover": False})
        assert told(simulation) == [(5, "schedule", "died"), (10, "schedule", "ok")]

    def test_they_go_before_a_later_one_that_comes_before_a_look_finds_the_death(self) -> None:
        """The later one lets one be made."""
        simulation = self.dead(24, lease=780, executor={"failover": False, "poll_interval": 3600})
        assert [run_time for run_time, _, _ in told(simulation)] == [5, 10, 15, 20]

    def test_they_are_dropped_when_the_run_in_their_way_ends(self) -> None:
        """As in plain APScheduler, with one instance at a time."""
        simulation = simulated(every_five_minutes(), 2, durations={"job": 400})
        simulation.advance(minutes=31)
        assert [run_time for run_time, _, _ in told(simulation)] == [5, 15, 25]

    def test_they_are_kept_while_the_job_cannot_be_looked_up(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As in a job store on a server that was restarted."""
        failures = [ConnectionError("its connection is stale")]

        class FailingStore(MemoryJobStore):  # type: ignore[misc]  # APScheduler has no types
            def lookup_job(self, job_id: str) -> Any:
                if failures and any(f.name == "renewed" for f in traceback.extract_stack()):
                    raise failures.pop()
                return super().lookup_job(job_id)

        def add_jobs(scheduler: Any) -> None:
            scheduler.add_jobstore(FailingStore(), "failing")
            every_five_minutes(jobstore="failing", kwargs={"task_lock": {"name": "job"}})(scheduler)

        simulation = simulated(add_jobs, 2, durations={"job": 30}, lease=480)
        simulation.advance(minutes=5, seconds=10)
        simulation.kill(simulation.runs[0].replica)
        simulation.advance(minutes=9)
        assert told(simulation) == [(5, "schedule", "died"), (10, "schedule", "ok")]
        assert "its connection is stale" in caplog.text

    @pytest.mark.parametrize("change", ["pause", "remove", "reschedule"])
    def test_a_change_of_the_job_drops_what_is_kept(self, change: str) -> None:
        simulation = self.dead(12)
        [replica] = simulation
        if change == "pause":
            replica.scheduler.pause_job("job")
        elif change == "remove":
            replica.scheduler.remove_job("job")
        else:
            replica.scheduler.reschedule_job("job", trigger="cron", hour=9)
        simulation.advance(minutes=30)
        assert 10 not in [run_time for run_time, _, _ in told(simulation)]


class TestDeadRuns:
    def test_a_dead_run_is_not_taken_over_in_a_pause(self) -> None:
        simulation = simulated(
            every_five_minutes(), 2, durations={"job": 30}, failover=True, lease=60, max_factor=50
        )
        simulation.advance(minutes=5, seconds=10)
        simulation.pause("job")
        simulation.kill(simulation.runs[0].replica)
        simulation.advance(minutes=55)
        assert told(simulation) == [(5, "schedule", "died")]
        simulation.advance(minutes=6)
        assert told(simulation)[1] == (5, "takeover", "ok")

    def test_a_replica_that_has_just_started_believes_no_death(self) -> None:
        """The holder may be about to renew its lease, after an outage that ended a moment ago."""
        simulation = simulated(
            every_five_minutes(), 1, durations={"job": 30}, failover=True, lease=60
        )
        simulation.advance(minutes=5, seconds=10)
        simulation.kill("replica-1")
        simulation.advance(minutes=3)
        second = simulation.start_replica()
        simulation.advance(minutes=1)
        [_, takeover] = simulation.runs
        assert takeover.kind == "takeover"
        assert takeover.began_at - second.started_at > timedelta(seconds=5)

    @pytest.mark.parametrize(("delay", "kinds"), [(25, ["schedule"]), (45, ["takeover"])])
    def test_a_run_whose_claim_was_answered_late_begins_only_if_its_lease_can_be_renewed(
        self, delay: float, kinds: list[str]
    ) -> None:
        """Another replica may have taken it over meanwhile."""
        simulation = simulated(
            every_five_minutes(),
            2,
            clock_offsets=[0.5, 0],  # so that this replica is the first to claim
            durations={"job": 60},
            failover=True,
            lease=30,
        )
        simulation.advance(minutes=4)
        simulation.delay_answers("replica-1", delay)
        runs = simulation.advance(minutes=5)
        assert [run.kind for run in runs] == kinds

    @pytest.mark.parametrize("function", [job, coroutine])
    def test_a_run_whose_maximum_lock_ended_before_it_began_is_handed_over_and_begins_later(
        self, function: Any
    ) -> None:
        short = {"task_lock": {"max_lock": 60}}
        simulation = simulated(every_five_minutes(function, kwargs=short))
        simulation.advance(minutes=4)
        simulation.delay_answers("replica-1", 90)
        simulation.advance(minutes=2)
        simulation.delay_answers("replica-1", 0)
        [replica] = simulation
        replica.scheduler.modify_job("job", kwargs={"task_lock": {"max_lock": 600}})
        [run] = simulation.advance(minutes=2)
        assert (run.run_time, run.outcome) == (at(5), "ok")
        assert [event.code for event in replica.events] == [
            *(EVENT_TASK_LOCK_GRANTED, EVENT_TASK_LOCK_LOST, EVENT_TASK_LOCK_RELEASED),
            *(EVENT_TASK_LOCK_GRANTED, EVENT_TASK_LOCK_RELEASED),
        ]
        assert replica.events[2].reason == "handed over"

    def test_hand_overs_are_no_deaths(self) -> None:
        simulation = simulated(
            every_five_minutes(coroutine),
            6,
            durations={"job": 3600},
            failover=True,
            max_takeovers=1,
        )
        simulation.advance(minutes=6)
        for _ in range(4):
            simulation.stop(simulation.runs[-1].replica)
            simulation.advance(seconds=30)
        assert [run.kind for run in simulation.runs] == ["schedule"] + 4 * ["takeover"]

    def test_a_run_that_the_pool_does_not_take_is_handed_over(self) -> None:
        simulation = simulated(every_five_minutes(), 2, failover=True, lease=120)
        simulation.advance(minutes=4)
        for replica in simulation:
            simulation.break_pool(replica, 61)
        simulation.advance(minutes=1, seconds=30)
        [run] = simulation.runs
        assert run.run_time == at(5)
        assert run.began_at < at(5.2)

    def test_a_pool_that_rejects_runs_is_given_no_further_ones_for_a_moment(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Each of them would be handed over at once, and the pool stays broken."""

        def add_jobs(scheduler: Any) -> None:
            for number in range(3 * WORKERS):
                scheduler.add_job(job, "date", run_date=at(5), id=f"job {number}")

        simulation = simulated(add_jobs, 1)
        simulation.advance(minutes=4, seconds=59)
        simulation.break_pool("replica-1", 60)
        rejected = []
        for seconds in (1.5, 1.3):
            simulation.advance(seconds=seconds)
            rejected.append(sum(r.message.startswith("Error submitting") for r in caplog.records))
        assert rejected == [WORKERS, 2 * WORKERS]


class TestManualRuns:
    def test_one_waits_for_the_run_that_goes_on(self) -> None:
        simulation = simulated(every_five_minutes(), 2, durations={"job": 60})
        simulation.advance(minutes=5, seconds=10)
        simulation.request_run("job")
        simulation.advance(minutes=2)
        first, manual = simulation.runs
        assert first.ended_at is not None
        assert first.ended_at <= manual.began_at < first.ended_at + timedelta(seconds=7)
        events = Counter(event.code for replica in simulation for event in replica.events)
        assert events[EVENT_TASK_LOCK_REFUSED] == 1  # of the scheduled run, by the other replica

    def test_one_is_no_instance_of_its_job_and_the_run_time_that_comes_is_run_after_it(
        self,
    ) -> None:
        simulation = simulated(every_five_minutes(max_instances=1), 1, durations={"job": 60})
        simulation.advance(minutes=1)
        refused: list[Any] = []
        [replica] = simulation
        replica.scheduler.add_listener(refused.append, EVENT_JOB_MAX_INSTANCES)
        simulation.advance(minutes=3, seconds=30)
        simulation.request_run("job")
        simulation.advance(minutes=2)
        manual, scheduled = simulation.runs
        assert manual.began_at < at(5) < scheduled.began_at
        assert scheduled.run_time == at(5)
        assert refused == []

    def test_its_maximum_lock_is_that_of_other_runs_however_soon_the_next_one_is(self) -> None:
        lefts = []

        def see() -> None:
            lock = current_lock()
            assert lock is not None
            lefts.append(lock.seconds_left)

        simulation = simulated(every_five_minutes(see), 1, max_factor=2)
        simulation.advance(minutes=4, seconds=50)
        simulation.request_run("job")
        simulation.advance(minutes=1)
        assert lefts == pytest.approx([600, 600], abs=6)

    @pytest.mark.parametrize(("why", "within"), [("paused", 7), ("renamed", 120)])
    def test_one_over_a_dead_run_that_nobody_takes_over_is_begun(
        self, why: str, within: float
    ) -> None:
        simulation = simulated(
            every_five_minutes(), 2, durations={"job": 30}, failover=True, lease=60, max_factor=50
        )
        simulation.advance(minutes=5, seconds=10)
        if why == "paused":
            simulation.pause("job")
        else:  # so that the dead run is one of another function
            simulation.add_jobs = every_five_minutes(take)
            for replica in [each for each in simulation if each.name != simulation.runs[0].replica]:
                simulation.stop(replica)
            simulation.start_replica()
        simulation.kill(simulation.runs[0].replica)
        simulation.advance(minutes=2)
        simulation.request_run("job")
        simulation.advance(seconds=within)
        assert [run.kind for run in simulation.runs] == ["schedule", "manual"]

    def dying_in_a_manual_run(self, at_minute: float, **options: Any) -> SimulatedReplicas:
        """Return replicas of which one dies in a manual run."""
        simulation = simulated(durations={"job": 30}, failover=True, lease=30, **options)
        simulation.advance(minutes=at_minute)
        simulation.request_run("job")
        simulation.advance(seconds=20)
        simulation.kill(simulation.runs[-1].replica)
        return simulation

    @pytest.mark.parametrize("minute", [2, 7], ids=["never ran", "ran before"])
    def test_one_of_a_replica_that_dies_is_run_again_and_leaves_the_windows_of_the_schedule_alone(
        self, minute: float, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        run_times: list[Any] = []

        @task_lock(on_failure="release")
        def fail() -> None:
            lock = current_lock()
            assert lock is not None
            run_times.append(lock.run_time)
            raise ValueError("no")

        simulation = self.dying_in_a_manual_run(
            minute, add_jobs=every_five_minutes(fail), replicas=2
        )
        simulation.advance(minutes=3.5)
        told = [(run.kind, run.outcome) for run in simulation.runs[-3:]]
        assert told == [("manual", "died"), ("takeover", "error"), ("schedule", "error")]
        assert "runs the manual run again" in caplog.text
        # A manual run has the time at which it was begun.
        assert [at(minute) < each < at(minute + 2) for each in run_times[-3:-1]] == [True, True]
        assert run_times[-1] == at(minute + 3)

    def test_one_that_is_given_up_names_no_window(self) -> None:
        simulation = self.dying_in_a_manual_run(
            2, add_jobs=every_five_minutes(), replicas=3, max_takeovers=1
        )
        simulation.advance(seconds=45)
        simulation.kill(simulation.runs[-1].replica)
        simulation.advance(minutes=1.5)
        [given_up] = [
            event
            for replica in simulation
            for event in replica.events
            if event.code == EVENT_TASK_LOCK_ERROR
        ]
        assert "the manual run is given up" in str(given_up.exception)
        assert at(2) < given_up.scheduled_run_time < simulation.now


class TestLeaders:
    def led(self, add_jobs: Any, **options: Any) -> SimulatedReplicas:
        simulation = simulated(add_jobs, 1, leader=True, **options)
        simulation.advance(seconds=3)
        simulation.start_replica()
        simulation.advance(seconds=57)
        assert [replica.name for replica in simulation if replica.executor.leads] == ["replica-1"]
        return simulation

    def test_a_leader_leads_on_between_looks_that_are_further_apart_than_its_lease(self) -> None:
        """Its lease is as long as three looks at least."""

        def add_jobs(scheduler: Any) -> None:
            scheduler.add_job(job, "cron", second="*/10", id="job")

        simulation = self.led(add_jobs, leader_lease=15)
        for replica in simulation:  # of a fleet in which each of them looks every 20 s
            replica.executor.client.outage.live_replicas = 400
        runs = simulation.advance(minutes=5)
        assert {run.replica for run in runs} == {"replica-1"}
        assert max(run.began_at - run.run_time for run in runs) < timedelta(seconds=1)

    def test_the_last_run_time_of_a_job_does_not_wait_for_the_leader(self) -> None:
        """Nothing would know of it any more if the follower stopped, since its job is dropped."""

        def add_jobs(scheduler: Any) -> None:
            scheduler.add_job(job, "date", run_date=at(2), id="once")
            scheduler.add_job(job, "cron", hour=9, id="job")

        simulation = self.led(add_jobs)
        simulation.advance(seconds=58)
        simulation.kill("replica-1")
        [run] = simulation.advance(minutes=1)
        assert run.began_at - run.run_time < timedelta(seconds=1)

    def test_in_an_outage_only_the_leader_runs_jobs_without_their_lock(self) -> None:
        """With ``on_database_error="run"`` all would run them otherwise."""
        simulation = self.led(every_five_minutes(), on_database_error="run")
        simulation.advance(minutes=3, seconds=50)
        for replica in simulation:
            simulation.cut_off(replica, 60)
        runs = simulation.advance(minutes=1)
        assert [run.replica for run in runs] == ["replica-1"]

    def test_what_a_follower_keeps_is_skipped_in_an_outage_and_not_run_late_after_it(self) -> None:
        """As without leader mode: it is asked for, and skipped if the database does not answer."""
        simulation = self.led(every_five_minutes(), claim_timeout=20)
        simulation.advance(minutes=3, seconds=59)
        simulation.kill("replica-1")
        simulation.advance(seconds=1.5)
        [follower] = simulation
        simulation.cut_off(follower, 60)
        assert simulation.advance(minutes=4) == []
        failed = [e.code for e in follower.events if e.code == EVENT_TASK_LOCK_ERROR]
        assert failed == [EVENT_TASK_LOCK_ERROR]

    def test_what_a_follower_keeps_does_not_wait_for_a_missing_right_for_longer_than_a_lease(
        self,
    ) -> None:
        """Otherwise it would be run when the right is there again, whatever its grace time."""
        simulation = self.led(every_five_minutes(misfire_grace_time=None), leader_lease=60)
        simulation.advance(minutes=3, seconds=59)
        simulation.kill("replica-1")
        simulation.advance(seconds=1.5)
        [follower] = simulation
        simulation.reject(follower, 120)
        assert simulation.advance(minutes=4) == []
        [failed] = [e for e in follower.events if e.code == EVENT_TASK_LOCK_ERROR]
        assert isinstance(failed.exception, TaskLockSchemaError)

    def test_a_manual_run_is_begun_by_a_follower_at_once(self) -> None:
        simulation = self.led(every_five_minutes())
        leader = simulation["replica-1"].scheduler
        leader.add_job(job, "cron", hour=9, id="other")  # so that it leads on
        leader.remove_job("job")
        simulation.request_run("job")
        asked_at = simulation.now
        [run] = simulation.advance(minutes=1)
        assert run.began_at - asked_at < timedelta(seconds=5.5)  # at the first look

    def test_a_run_that_a_follower_has_left_to_the_leader_needs_no_garbage_collector(self) -> None:
        simulation = self.led(every_five_minutes())
        gc.disable()
        try:
            simulation.advance(minutes=4, seconds=1)
            [kept] = [weakref.ref(run) for run in deferred_runs(simulation["replica-2"].executor)]
            simulation.advance(seconds=20)
            assert kept() is None
        finally:
            gc.enable()

    def test_what_waits_for_a_worker_of_the_leader_is_run_by_a_follower(self) -> None:
        simulation = self.led(every_five_minutes())
        for number in range(WORKERS):
            name = f"busy {number}"
            simulation.durations[name] = 600
            leader = simulation["replica-1"].scheduler
            leader.add_job(job, "date", run_date=at(4), id=name)
        simulation.advance(minutes=5)
        [run] = simulation.runs_of("job")
        assert run.replica == "replica-2"
        assert run.began_at - run.run_time < timedelta(seconds=7)  # the head start, and a look

    def test_a_replica_without_leader_mode_asks_at_once_beside_a_leader(self) -> None:
        """As while leader mode is deployed."""
        simulation = self.led(every_five_minutes())
        simulation.start_replica("plain", leader=False)
        runs = simulation.advance(hours=1)
        assert {run.replica for run in runs} == {"replica-1", "plain"}
        assert [run.run_time for run in runs] == [at(minute) for minute in range(5, 61, 5)]

    def test_a_leader_that_is_drained_gives_the_leadership_up(self) -> None:
        simulation = self.led(every_five_minutes())
        drained = simulation["replica-1"].executor
        drained.drain()
        simulation.advance(seconds=10)
        assert [replica.executor.leads for replica in simulation] == [False, True]

    def test_two_functions_under_one_task_name_are_told_by_a_follower(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It never asks for what the leader has run, and so no claim of its own is refused."""
        functions = iter([job, take])

        def add_jobs(scheduler: Any) -> None:
            every_five_minutes(next(functions))(scheduler)

        simulation = self.led(add_jobs)
        simulation.advance(minutes=10)
        assert f"it runs {__name__}:take here, and is refused" in caplog.text

    def test_each_replica_tells_when_it_begins_to_lead_and_when_another_one_does(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "apscheduler_tasklock")
        simulation = self.led(every_five_minutes())
        simulation.cut_off("replica-1", 60)
        simulation.advance(minutes=2)
        told = [line for line in caplog.messages if " leads the replicas of" in line]
        assert told == [
            "This replica ('replica-1') leads the replicas of the namespace ''",
            "This replica ('replica-2') leads the replicas of the namespace ''",
            "This replica ('replica-1') no longer leads the replicas of the namespace ''",
        ]


class TestNames:
    @pytest.mark.parametrize(
        ("trigger", "arguments", "is_shared"),
        [
            ({"run_date": at(10)}, (), True),
            ({"run_date": at(10)}, ("text", 1), True),
            ({"run_date": at(10) + timedelta(microseconds=1)}, (), False),
            ({"run_date": at(10)}, (object(),), False),
        ],
    )
    def test_a_one_off_without_an_id_is_shared_if_its_date_and_its_arguments_can_be_compared(
        self, trigger: dict[str, Any], arguments: tuple[Any, ...], is_shared: bool
    ) -> None:
        """Otherwise it is this replica's own, and always runs here."""

        def add_jobs(scheduler: Any) -> None:
            scheduler.add_job(take, "date", args=arguments, **trigger)

        runs = simulated(add_jobs, 3).advance(minutes=20)
        assert len({run.replica for run in runs}) == (1 if is_shared else 3)
        assert all((run.token is not None) is is_shared for run in runs)

    def test_recurring_jobs_without_an_id_are_told_apart_by_their_arguments(self) -> None:
        def add_jobs(scheduler: Any) -> None:
            for number in (1, 2):
                scheduler.add_job(take, "interval", minutes=10, args=[number])

        runs = simulated(add_jobs, 3).advance(minutes=10, seconds=10)
        assert len(runs) == 2

    @pytest.mark.parametrize(("apart", "runs"), [(50, 1), (70, 2)])
    def test_replicas_that_add_a_one_off_within_a_minute_run_it_once(
        self, apart: float, runs: int
    ) -> None:
        def add_jobs(scheduler: Any) -> None:
            scheduler.add_job(job, id="set up")

        simulation = simulated(add_jobs, 1)
        simulation.advance(seconds=apart)
        simulation.start_replica()
        simulation.advance(minutes=5)
        assert len(simulation.runs) == runs


def take(*_arguments: Any) -> None:
    pass
