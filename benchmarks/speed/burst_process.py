"""A process that is one replica of a burst, whose jobs are all due at one moment.

It is run as a script with the folder of the library's version in ``PYTHONPATH``, and so imports
nothing of the benchmarks. It first prints the library's folder. Then it reads a line: ``upgrade``
creates the tables, anything else is the moment, in seconds since 1970. It answers each with a line,
and ends after the burst, with what it saw of it, as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_MISSED
from apscheduler.schedulers.background import BackgroundScheduler

import apscheduler_tasklock
from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    TaskLockExecutor,
    upgrade,
)

# Seconds for a burst to end. What has not been decided by then is missing in the answer.
PATIENCE = 300.0


class Outages(logging.Handler):
    """Counts the warnings that the database is away."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        self.count += record.name.endswith("outage")


class Replica:
    """A scheduler with the task lock around its thread pool, and jobs that are due at once."""

    def __init__(self, url: str, jobs: int, due: float, grace: int | None) -> None:
        self.granted: list[str] = []
        self.refused = 0
        self.errors = 0
        self.missed = 0
        self.run = 0
        self.ended = 0.0
        self._jobs = jobs
        self._lock = threading.Lock()
        self._all_decided = threading.Event()
        self.scheduler = BackgroundScheduler(executors={"default": TaskLockExecutor(url)})
        self.scheduler.add_listener(
            self._note,
            EVENT_TASK_LOCK_GRANTED
            | EVENT_TASK_LOCK_REFUSED
            | EVENT_TASK_LOCK_ERROR
            | EVENT_JOB_MISSED,
        )
        self.scheduler.add_listener(self._note_run, EVENT_JOB_EXECUTED)
        at = datetime.fromtimestamp(due, timezone.utc)
        for number in range(jobs):
            self.scheduler.add_job(
                nothing, "date", run_date=at, id=f"job {number}", misfire_grace_time=grace
            )
        self.scheduler.start()

    def wait(self, until: float) -> None:
        """Wait for all to be decided; shut down when the granted ones have run."""
        self._all_decided.wait(max(0.0, until - time.time()))
        self.scheduler.shutdown()

    def _note(self, event: Any) -> None:
        with self._lock:
            if event.code == EVENT_TASK_LOCK_GRANTED:
                self.granted.append(event.task_name)
            elif event.code == EVENT_TASK_LOCK_REFUSED:
                self.refused += 1
            elif event.code == EVENT_JOB_MISSED:
                self.missed += 1
            else:
                self.errors += 1
            self.ended = time.time()
            if len(self.granted) + self.refused + self.errors + self.missed == self._jobs:
                self._all_decided.set()

    def _note_run(self, _event: Any) -> None:
        with self._lock:
            self.run += 1


def burst(url: str, jobs: int, due: float, grace: int | None) -> dict[str, Any]:
    """Run a replica until it has decided all its jobs.

    :param grace: the jobs' ``misfire_grace_time``
    """
    outages = Outages()
    logging.getLogger("apscheduler").setLevel(logging.ERROR)  # misfires are counted
    logging.getLogger("apscheduler_tasklock").addHandler(outages)
    replica = Replica(url, jobs, due, grace)
    late = time.time() - due
    replica.wait(due + PATIENCE)
    return {
        "granted": replica.granted,
        "refused": replica.refused,
        "errors": replica.errors,
        "missed": replica.missed,
        "run": replica.run,
        "ended": replica.ended,
        "late": max(0.0, late),
        "outages": outages.count,
    }


def nothing() -> None:
    """Be the job."""


def main(url: str, jobs: str, grace: str) -> None:
    """Be a replica, until the input ends or the burst is over."""
    print(Path(apscheduler_tasklock.__file__).parent.parent, flush=True)
    for line in sys.stdin:
        if line.strip() == "upgrade":
            upgrade(url)
            print("upgraded", flush=True)
        else:
            seen = burst(url, int(jobs), float(line), int(grace) if grace else None)
            print(json.dumps(seen), flush=True)
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
