"""A replica of an ordinary application: 20 jobs, each of which is due once a minute."""

from __future__ import annotations

import sys

from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor
from benchmarks.speed.store_replica import run_until_input_ends

JOBS = 20


def job() -> None:
    """Do nothing."""


def main() -> None:
    """Run the jobs until standard input ends."""
    url, locked = sys.argv[1:]
    executors = {"default": TaskLockExecutor(url)} if locked == "1" else {}
    scheduler = BackgroundScheduler(executors=executors, timezone="UTC")
    for number in range(JOBS):
        scheduler.add_job(job, "cron", second=number * 60 // JOBS, id=f"job-{number}")
    run_until_input_ends([scheduler])


if __name__ == "__main__":
    main()
