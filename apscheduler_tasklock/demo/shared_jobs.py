"""The jobs of the demo of the shared store, and what a replica does to them."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

from apscheduler_tasklock.demo.jobs import recorded_run
from apscheduler_tasklock.demo.judgement import DemoTask
from apscheduler_tasklock.demo.ledger import Ledger

# The demo has a recurring job, and two jobs that run once. A replica has one worker, so at least
# one report begins on another replica than the one that adds the jobs.
TICK = DemoTask("tick-2s", 2, about="interval, every 2 s, takes 0.3 s")
REPORTS = (
    DemoTask("report-1", 3600, about="once, takes 3 s"),
    DemoTask("report-2", 3600, about="once, takes 3 s"),
)
TASKS = (TICK, *REPORTS)

# Workers of a replica.
WORKERS = 1

# Seconds from when the jobs are added until they are due.
_DUE_IN = 1.0

# This process's ledger. The jobs do not get it as an argument, because all replicas share the
# arguments.
_ledgers: list[Ledger] = []


def use_ledger(ledger: Ledger) -> None:
    """Let the jobs that run in this process write into a ledger."""
    _ledgers[:] = [ledger]


def work(seconds: float) -> None:
    """Run for so many seconds, and record the run in the ledger."""
    with recorded_run(_ledgers[0]):
        time.sleep(seconds)


def add(scheduler: Any) -> list[Any]:
    """Add all jobs; return them."""
    due = datetime.now(timezone.utc) + timedelta(seconds=_DUE_IN)
    tick = scheduler.add_job(
        work, "interval", seconds=TICK.period, start_date=due, id=TICK.name, args=[0.3]
    )
    reports = [
        scheduler.add_job(work, "date", run_date=due, id=report.name, args=[3.0])
        for report in REPORTS
    ]
    return [tick, *reports]
