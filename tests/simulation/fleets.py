"""Jobs, and fleets of simulated replicas that have them, for the tests of single promises."""

from __future__ import annotations

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


def simulated(add_jobs: AddJobs, replicas: int = 2, **options: Any) -> SimulatedReplicas:
    return SimulatedReplicas(replicas, start=MIDNIGHT, add_jobs=add_jobs, **options)
