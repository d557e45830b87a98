"""Jobs, and fleets of simulated replicas that have them, for the tests of single promises."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.simulation.replicas import MIDNIGHT, SimulatedReplicas

AddJobs = Callable[[Any], None]

MINUTE = timedelta(minutes=1)
# The workers of a simulated replica.
WORKERS = 10


def job(**_: Any) -> None:
    pass


def every(minutes: int, function: Callable[..., Any] = job, **options: Any) -> AddJobs:
    """Return what adds a job whose run times all replicas share."""

    def add_jobs(scheduler: Any) -> None:
        scheduler.add_job(function, "cron", minute=f"*/{minutes}", id="job", **options)

    return add_jobs


def come_and_go(
    simulation: SimulatedReplicas, rng: random.Random, times: int, longest: float
) -> None:
    """Kill, stop and start replicas so many times, at most so many seconds apart."""
    for _ in range(times):
        simulation.advance(seconds=rng.uniform(30, longest))
        victim = rng.choice(list(simulation))
        if len(simulation) > 2:
            rng.choice([simulation.kill, simulation.stop])(victim)
        else:
            simulation.start_replica(clock_offset=rng.uniform(-1, 1))
    simulation.advance(minutes=30)


def simulated(add_jobs: AddJobs, replicas: int = 2, **options: Any) -> SimulatedReplicas:
    return SimulatedReplicas(replicas, start=MIDNIGHT, add_jobs=add_jobs, **options)
