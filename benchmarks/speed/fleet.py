"""Replicas for the burst, each a process with a scheduler."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing.synchronize import Barrier
from typing import Any

from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_MISSED
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    TaskLockExecutor,
)
from apscheduler_tasklock._database import outage

# Seconds for a burst to end; then what is missing is reported.
PATIENCE = 300.0


@dataclass(frozen=True)
class Decisions:
    """What one replica saw.

    :ivar granted: names of the tasks, one for each grant
    :ivar refused: how many claims were refused
    :ivar errors: how many failed
    :ivar missed: how many run times were misfires, and claimed nothing
    :ivar run: how often a job ran
    :ivar ended: when the last claim was decided, in seconds since 1970
    :ivar late: seconds by which the setting up ended after the jobs were due
    :ivar outages: how often it took the database to be away
    """

    granted: list[str]
    refused: int
    errors: int
    missed: int
    run: int
    ended: float
    late: float
    outages: int


class Outages(logging.Handler):
    """Counts the warnings that the database is away."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        self.count += 1


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


def gather(together: Barrier) -> None:
    """Wait for the other processes, which have all loaded this module when it returns."""
    together.wait(PATIENCE)


def run_replica(url: str, jobs: int, due: float, grace: int | None) -> Decisions:
    """Run a replica in this process, until it has decided all its jobs.

    :param grace: the jobs' ``misfire_grace_time``
    """
    outages = Outages()
    logging.getLogger("apscheduler").setLevel(logging.ERROR)  # misfires are counted
    logging.getLogger(outage.__name__).addHandler(outages)
    replica = Replica(url, jobs, due, grace)
    late = time.time() - due
    replica.wait(due + PATIENCE)
    return Decisions(
        granted=replica.granted,
        refused=replica.refused,
        errors=replica.errors,
        missed=replica.missed,
        run=replica.run,
        ended=replica.ended,
        late=max(0.0, late),
        outages=outages.count,
    )


def nothing() -> None:
    """Be the job."""
