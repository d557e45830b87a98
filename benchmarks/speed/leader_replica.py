"""A process of replicas with the same jobs, with and without leader mode."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def fleet(url: str, processes: int, schedulers: int, *, leader: bool) -> Iterator[None]:
    """Run so many processes with so many replicas each."""
    command = [sys.executable, "-m", "benchmarks.speed.leader_replica"]
    arguments = [url, str(schedulers), str(int(leader))]
    started = [
        subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", "a replica did not start"
        yield
    finally:
        for process in started:
            process.communicate(timeout=60)


def main() -> None:
    """Run jobs until standard input ends."""
    url, count, leader = sys.argv[1:]
    run_until_input_ends([make_scheduler(url, leader=leader == "1") for _ in range(int(count))])


if __name__ == "__main__":
    main()
