"""Rules of runs, on replicas with the library's own executor and a clock that the test moves."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from apscheduler_tasklock import current_lock, task_lock
from tests.simulation.replicas import SimulatedReplicas

MIDNIGHT = datetime(2026, 3, 1, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
# The workers of a simulated replica.
WORKERS = 10


def job() -> None:
    pass


def simulated(add_jobs: Any, replicas: int = 1, **options: Any) -> SimulatedReplicas:
    return SimulatedReplicas(replicas, start=MIDNIGHT, add_jobs=add_jobs, **options)


def at(minutes: float) -> datetime:
    return MIDNIGHT + minutes * MINUTE


class TestStandby:
    def dead_at(self, due: str, jitter: int | None) -> tuple[SimulatedReplicas, datetime]:
        """Return two replicas, of which the first one dies before its run time, and that time."""

        def add_jobs(scheduler: Any) -> None:
            scheduler.add_job(job, "interval", hours=1, jitter=jitter, id="job")

        simulation = simulated(add_jobs, min_factor=0.1)
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
            ({"max_lock": 180}, 60.0),
            ({"max_lock": 1500}, 60.0),
            ({"max_lock": 90}, 30.0),
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


class TestMisses:
    def missed_by(self, add_jobs: Any, minutes: float, **options: Any) -> list[tuple[float, str]]:
        """Return when a look has noted which miss, in seconds from midnight."""
        simulation = simulated(add_jobs, 1, **options)
        simulation.advance(minutes=minutes)
        return [((m.noted_at - MIDNIGHT).total_seconds(), m.cause) for m in simulation.misses]

    def test_a_miss_is_noted_when_its_claim_cannot_be_granted_any_more(self) -> None:
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
        # The claim was tried for 60 s, and a last try may be on its way for 60 s more.
        assert timedelta(seconds=120) < miss.noted_at - miss.run_time < timedelta(seconds=150)
