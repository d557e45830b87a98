"""The demo's three jobs, scheduled as any application would schedule its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from apscheduler_tasklock.decorator import task_lock
from apscheduler_tasklock.demo.ledger import Ledger
from apscheduler_tasklock.lock import current_lock


@dataclass(frozen=True)
class DemoTask:
    """What the demo knows of one of its tasks.

    :ivar name: id of the job, and so the task's name
    :ivar period: seconds from one run time to the next
    :ivar on_grid: whether all replicas have the same run times, as with cron; an interval counts
        from each replica's own start
    :ivar about: for people
    """

    name: str
    period: float
    on_grid: bool
    about: str


# Seconds after its last sign of life that a replica counts as dead.
LEASE = 2.0

# The one in whose run a replica is killed. Its period has room for the run that dies, for the
# rest of its lease, and for the run that takes over.
LONG_TASK = "report-8s"

TASKS = (
    DemoTask("tick-2s", 2, on_grid=False, about="interval, every 2 s, takes 0.4 s"),
    DemoTask(LONG_TASK, 8, on_grid=True, about="interval from a common start, takes 2.5 s"),
    DemoTask("flaky-2s", 2, on_grid=True, about="cron, every 2 s, raises now and then"),
)


class ExpectedError(Exception):
    """What the flaky job raises."""


@task_lock
def tick(ledger: Ledger) -> None:
    """Do something that takes a while."""
    with recorded_run(ledger):
        time.sleep(0.4)


def report(ledger: Ledger) -> None:
    """Do something long, in the middle of which a replica can be killed."""
    with recorded_run(ledger):
        time.sleep(2.5)


def flaky(ledger: Ledger) -> None:
    """Raise in one of three runs."""
    with recorded_run(ledger) as token:
        if token % 3 == 0:
            raise ExpectedError("every third run raises")


@contextmanager
def recorded_run(ledger: Ledger) -> Iterator[int]:
    """Enter the start and the end of the current run into the ledger; yield its fencing token."""
    lock = current_lock()
    assert lock is not None
    assert lock.run_time is not None
    run = ledger.begin_run(lock.name, lock.token, lock.run_time, takeover=lock.is_takeover)
    try:
        yield lock.token
    finally:
        ledger.end_run(run)


def schedule(scheduler: Any, ledger: Ledger, start: datetime) -> None:
    """Add the jobs; the same on every replica.

    :param start: from when on the interval of the long one counts
    """
    scheduler.add_job(
        tick,
        "interval",
        seconds=2,
        id="tick-2s",
        args=[ledger],
        # A run that hangs is given up after 4 x 2 s.
        kwargs={"task_lock": {"max_factor": 4}},
    )
    scheduler.add_job(report, "interval", seconds=8, start_date=start, id=LONG_TASK, args=[ledger])
    scheduler.add_job(flaky, "cron", second="*/2", id="flaky-2s", args=[ledger])
