"""One replica: ``python -m tests.chaos.replica NAME OFFSET``.

It starts its scheduler ``OFFSET`` seconds late, and ends when its standard input does. What happens
goes to standard output, a line of JSON per event: it is not lost when the replica is killed.
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from apscheduler.events import EVENT_JOB_SUBMITTED
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    HeldLock,
    TaskLockEvent,
    TaskLockExecutor,
    current_lock,
    task_lock,
)
from tests.chaos.application import Application
from tests.chaos.tasks import CLAIM_TIMEOUT, TASKS, ChaosTask

# Where the lock is claimed, through a proxy, and where the application writes.
LOCKS_VARIABLE, APPLICATION_VARIABLE = "CHAOS_LOCKS", "CHAOS_APPLICATION"

# Seconds from one sign of life of the main thread to the next, and by how much one may be late.
_BEAT, _STALL = 0.1, 0.3

# A line longer than what a pipe takes at once could be mixed with another thread's.
_LONGEST_DETAIL = 500


class ExpectedError(Exception):
    """What a job raises now and then."""


class Errors(logging.Handler):
    """Tells of lines that are logged as errors. No fault here should lead to one."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__(logging.ERROR)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.name}: {record.getMessage()}"
        if record.exc_info:
            text += f": {record.exc_info[1]!r}"
        self._tell("erred", detail=text[:_LONGEST_DETAIL])


def unexpected(record: logging.LogRecord) -> bool:
    """Tell whether a line in the log is about something else than a job that raised on purpose."""
    return not (record.exc_info and isinstance(record.exc_info[1], ExpectedError))


class Replica:
    """The scheduler and its jobs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._application = Application(os.environ[APPLICATION_VARIABLE], name)

    def live(self, offset: float) -> None:
        """Run the scheduler until standard input ends."""
        executor = TaskLockExecutor(
            os.environ[LOCKS_VARIABLE],
            claim_timeout=CLAIM_TIMEOUT,
            replica_id=self._name,
            max_workers=20,
        )
        scheduler = BackgroundScheduler(
            executors={"default": executor},
            job_defaults={"misfire_grace_time": None},
            timezone="UTC",
        )
        scheduler.add_listener(self._tell_fire, EVENT_JOB_SUBMITTED)
        scheduler.add_listener(self._tell_skip, EVENT_TASK_LOCK_ERROR)
        logging.getLogger().addHandler(Errors(self._tell))
        _pause(offset)
        for task in TASKS:
            self._add(scheduler, task)
        scheduler.start()
        self._tell("ready")
        self._wait_for_the_end()
        scheduler.shutdown(wait=True)

    def _add(self, scheduler: Any, task: ChaosTask) -> None:
        if task.cron:
            when: dict[str, Any] = {"trigger": "cron", "second": f"*/{task.period:.0f}"}
        else:
            start = datetime.now(timezone.utc) + timedelta(seconds=0.5)
            when = {"trigger": "interval", "seconds": task.period, "start_date": start}
        kwargs = {"task": task, "task_lock": task.options}
        scheduler.add_job(self.run, id=task.name, kwargs=kwargs, **when, **task.job)

    @task_lock
    def run(self, task: ChaosTask) -> None:
        """Work, tell whether the lock still is held, and write with its token."""
        lock = current_lock()
        assert lock is not None
        assert lock.run_time is not None
        due = _on_monotonic_clock(lock.run_time)
        dice = random.Random(f"{task.name} {lock.token}")  # noqa: S311  # repeatable, not secret
        end = time.monotonic() + dice.uniform(*task.takes)
        self._tell_belief("begin", task, lock, due=due, takeover=lock.is_takeover)
        try:
            while time.monotonic() < end:
                self._application.write(task.name, lock.token)
                self._tell_belief("holds", task, lock)
                _pause(0.1)
            if task.raises and dice.random() < 1 / 3:
                raise ExpectedError
        finally:
            self._tell_belief("end", task, lock)

    def _tell_belief(self, kind: str, task: ChaosTask, lock: HeldLock, **details: Any) -> None:
        # The clock first. A lock that is lost stays so: one that is not lost afterwards was held at
        # that moment, however long this process is stopped in between.
        at = time.monotonic()
        self._tell(kind, at, task=task.name, token=lock.token, lost=lock.lost, **details)

    def _tell_fire(self, event: Any) -> None:
        if len(event.scheduled_run_times) == 1:  # of a backlog, most are rightly refused
            due = _on_monotonic_clock(event.scheduled_run_times[0])
            self._tell("fire", task=event.job_id, due=due)

    def _tell_skip(self, event: TaskLockEvent) -> None:
        if event.token is not None:  # a release that failed, and is owed
            return
        due = _on_monotonic_clock(event.scheduled_run_time)
        self._tell("skipped", task=event.job_id, due=due, detail=str(event.exception)[:100])

    def _tell(self, kind: str, at: float | None = None, **details: Any) -> None:
        at = time.monotonic() if at is None else at
        line = json.dumps({"at": at, "kind": kind, "replica": self._name, **details}) + "\n"
        os.write(1, line.encode())  # in a single call: jobs run in several threads

    def _wait_for_the_end(self) -> None:
        before = time.monotonic()
        while not select.select([0], [], [], _BEAT)[0]:
            now = time.monotonic()
            if now - before > _BEAT + _STALL:
                self._tell("stalled", before, until=now)
            before = now


def _on_monotonic_clock(run_time: datetime) -> float:
    # Both by the replica's own clock, so that its skew cancels out.
    return run_time.timestamp() - time.time() + time.monotonic()


def _pause(seconds: float) -> None:
    # Not time.sleep(): libfaketime takes its absolute time for one of the wall clock.
    threading.Event().wait(seconds)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    logging.getLogger("apscheduler.executors.default").addFilter(unexpected)
    Replica(sys.argv[1]).live(float(sys.argv[2]))
