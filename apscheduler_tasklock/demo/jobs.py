"""The demo's three jobs, scheduled as any application would schedule its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from apscheduler_tasklock.context import current_lock
from apscheduler_tasklock.decorator import task_lock
from apscheduler_tasklock.demo.ledger import Ledger


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


TASKS = (
    DemoTask("tick-2s", 2, on_grid=False, about="interval, every 2 s, takes 0.4 s"),
    DemoTask("report-3s", 3, on_grid=True, about="cron, every 3 s"),
    DemoTask("flaky-2s", 2, on_grid=True, about="cron, every 2 s, raises now and then"),
)


class ExpectedError(Exception):
    """What the flaky job raises."""


@task_lock
def tick(ledger: Ledger) -> None:
    """Do something that takes a while."""
    record_run(ledger)
    time.sleep(0.4)


def report(ledger: Ledger) -> None:
    """Do something short."""
    record_run(ledger)
    time.sleep(0.2)


def flaky(ledger: Ledger) -> None:
    """Raise in one of three runs."""
    if record_run(ledger) % 3 == 0:
        raise ExpectedError("every third run raises")


def record_run(ledger: Ledger) -> int:
    """Enter the current run into the ledger; return its fencing token."""
    lock = current_lock()
    assert lock is not None
    assert lock.run_time is not None
    ledger.add_run(lock.name, lock.token, lock.run_time)
    return lock.token


def schedule(scheduler: Any, ledger: Ledger) -> None:
    """Add the jobs; the same on every replica."""
    scheduler.add_job(
        tick,
        "interval",
        seconds=2,
        id="tick-2s",
        args=[ledger],
        # Should its replica die in mid-run, the task is free again after 4 x 2 s.
        kwargs={"task_lock": {"max_factor": 4}},
    )
    scheduler.add_job(report, "cron", second="*/3", id="report-3s", args=[ledger])
    scheduler.add_job(flaky, "cron", second="*/2", id="flaky-2s", args=[ledger])
