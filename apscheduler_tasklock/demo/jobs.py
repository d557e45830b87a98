"""The demo's three jobs, scheduled as any application would schedule its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from apscheduler_tasklock.decorator import task_lock
from apscheduler_tasklock.demo.judgement import DemoTask
from apscheduler_tasklock.demo.ledger import Ledger
from apscheduler_tasklock.lock import current_lock

# Seconds without a renewal after which a run is dead.
LEASE = 2.0

# The task in whose run a replica is killed. Its period has room for the dead run, the rest of its
# lease, and the run that takes over.
LONG_TASK = "report-8s"

# Seconds from one run time of the two other tasks to the next.
PERIOD = 2
# The same in leader mode. While nobody leads, a run begins up to 3 seconds late. It has to end
# before the next one is due, because a run time is skipped that is due during a run.
LEADER_PERIOD = 4


def tasks(period: int) -> tuple[DemoTask, DemoTask, DemoTask]:
    """Return the tasks, of which two have this period."""
    return (
        DemoTask(f"tick-{period}s", period, about=f"interval, every {period} s, takes 0.4 s"),
        DemoTask(LONG_TASK, 8, about="interval, every 8 s, takes 2.5 s"),
        DemoTask(f"flaky-{period}s", period, about=f"cron, every {period} s, raises now and then"),
    )


TASKS = tasks(PERIOD)


class ExpectedError(Exception):
    """The error that the flaky job raises on purpose."""


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


def schedule(scheduler: Any, ledger: Ledger, start: datetime, period: int) -> None:
    """Add the jobs, which are the same on every replica.

    :param start: the first run time of the intervals
    :param period: as for ``tasks``
    """
    scheduler.add_job(
        tick,
        "interval",
        seconds=period,
        start_date=start,
        id=f"tick-{period}s",
        args=[ledger],
        # The maximum lock: 4 periods.
        kwargs={"task_lock": {"max_factor": 4}},
    )
    scheduler.add_job(report, "interval", seconds=8, start_date=start, id=LONG_TASK, args=[ledger])
    scheduler.add_job(flaky, "cron", second=f"*/{period}", id=f"flaky-{period}s", args=[ledger])
