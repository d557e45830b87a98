"""One replica of the demo of the shared store.

It is started like :mod:`~apscheduler_tasklock.demo.replica`, and writes the same kind of events.
The lines on its standard input that follow the first one are commands: ``add``, and ``remove ID``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any

from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock.demo import shared_jobs
from apscheduler_tasklock.demo.ledger import Ledger
from apscheduler_tasklock.demo.replica import (
    DATABASE_VARIABLE,
    make_executor,
    make_scheduler,
    stop,
    tell,
)
from apscheduler_tasklock.jobstore.store import TaskLockJobStore


def main(number: int, schema: str) -> None:
    """Run the replica until it is told to stop."""
    signal.signal(signal.SIGTERM, stop)
    ledger = Ledger(parse_url(os.environ[DATABASE_VARIABLE]), schema, number)
    shared_jobs.use_ledger(ledger)
    executor = make_executor(ledger, max_workers=shared_jobs.WORKERS)
    scheduler = make_scheduler(executor, max_instances=1)
    scheduler.add_jobstore(
        TaskLockJobStore(
            ledger.url,
            functions=[shared_jobs.__name__],
            schema=schema,
            replica_id=f"replica {number}",
        )
    )
    tell("ready")
    try:
        if sys.stdin.readline():
            scheduler.start()
            for line in sys.stdin:
                do(scheduler, *line.split())
    finally:
        if scheduler.running:
            scheduler.shutdown(wait=True)


def do(scheduler: Any, command: str, job_id: str = "") -> None:
    """Carry out a command of the demo, and tell the demo of it."""
    if command == "add":
        for job in shared_jobs.add(scheduler):
            tell("added", task=job.id, run_time=job.next_run_time.timestamp())
    else:
        scheduler.remove_job(job_id)
        tell("removed", task=job_id)


if __name__ == "__main__":
    logging.getLogger("apscheduler").setLevel(logging.CRITICAL + 1)
    main(int(sys.argv[1]), sys.argv[2])
