"""A process of replicas with the same jobs, with and without leader mode."""

from __future__ import annotations

import sys

from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor
from benchmarks.speed.store_replica import run_until_input_ends

# A task is due every so many seconds, a second task in between, and so on. So tasks are never
# claimed together, and each claim is a statement.
PERIOD, TASKS = 8, 4


def job() -> None:
    """Do nothing."""


def make_scheduler(url: str, *, leader: bool) -> BackgroundScheduler:
    """Return a scheduler with the jobs."""
    executor = TaskLockExecutor(url, leader=leader)
    scheduler = BackgroundScheduler(executors={"default": executor}, timezone="UTC")
    for number in range(TASKS):
        second = f"{number * PERIOD // TASKS}-59/{PERIOD}"
        scheduler.add_job(job, "cron", second=second, id=f"job-{number}")
    return scheduler


def main() -> None:
    """Run jobs until standard input ends."""
    url, count, leader = sys.argv[1:]
    run_until_input_ends([make_scheduler(url, leader=leader == "1") for _ in range(int(count))])


if __name__ == "__main__":
    main()
