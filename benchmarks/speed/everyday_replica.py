"""A replica of an ordinary application: 20 jobs, each of which is due once a minute."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor
from benchmarks.speed.store_replica import run_until_input_ends

JOBS = 20


def job() -> None:
    """Do nothing."""


@contextmanager
def replicas(url: str, count: int, *, locked: bool) -> Iterator[list[int]]:
    """Run so many replicas, with the lock or without; yield their process ids."""
    command = [sys.executable, "-m", "benchmarks.speed.everyday_replica", url, str(int(locked))]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", "a replica did not start"
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.communicate(timeout=60)


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
