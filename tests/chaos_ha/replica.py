"""One replica, whose database is ``DATABASE_URL``. SIGTERM ends it in order."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, current_lock
from tests.chaos_store.ledger import Ledger

# The begin of all intervals, so that all replicas have the same run times.
_START = datetime(2020, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class HaTask:
    """A job that every replica has.

    :ivar period: seconds between its run times
    :ivar takes: seconds for which it runs
    :ivar is_stored: whether it is in the job store that all replicas share
    """

    name: str
    period: int
    takes: float
    is_stored: bool = False


# `long-3s` runs for most of the time, so that it runs at the moment of each event.
TASKS = (
    HaTask("short-1s", 1, 0.1),
    HaTask("long-3s", 3, 2.0),
    HaTask("stored-2s", 2, 0.2, is_stored=True),
)

# The replica's name and the ledger are globals, because jobs are functions of a module.
_name = ""
_ledger: Ledger


def command(name: str, ledger: Path) -> list[str]:
    """Return the command that runs a replica; the module has its own name, as the rows have it."""
    return [sys.executable, "-c", f"from {__name__} import main; main()", name, str(ledger)]


def work(task: str, seconds: float) -> None:
    """Be a job: write down that it begins, take so long, write down that it ends."""
    held = current_lock()
    assert held is not None
    assert held.run_time is not None
    told: dict[str, Any] = {"replica": _name, "task": task, "token": held.token}
    told["due"] = held.run_time.timestamp()
    _ledger.write("begin", takeover=held.is_takeover, **told)
    threading.Event().wait(seconds)
    _ledger.write("end", lost=held.lost, **told)


def main() -> None:
    """Run the scheduler until SIGTERM."""
    global _ledger, _name  # jobs have nothing else
    _name, _ledger = sys.argv[1], Ledger(Path(sys.argv[2]))
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout
    )
    # A line for each submitted run is of no use.
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    logging.getLogger("apscheduler_tasklock").setLevel(logging.INFO)
    url = os.environ["DATABASE_URL"]
    store = TaskLockJobStore(url, functions=["tests."], replica_id=_name)
    scheduler = BackgroundScheduler(
        jobstores={"stored": store},
        executors={"default": TaskLockExecutor(url, replica_id=_name, max_workers=10)},
        job_defaults={"misfire_grace_time": None},
    )
    for task in TASKS:
        scheduler.add_job(
            work,
            "interval",
            args=[task.name, task.takes],
            id=task.name,
            seconds=task.period,
            start_date=_START,
            jobstore="stored" if task.is_stored else "default",
            replace_existing=True,
        )
    scheduler.start()
    over.wait()
    scheduler.shutdown(wait=True)
