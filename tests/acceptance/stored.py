"""A process with a scheduler on the job store; its jobs write into the table ``ledger``.

``SETTINGS`` has, as JSON, the options of the executor (``executor``) and of the store (``store``);
the jobs to declare: the arguments of ``add_job``, whose function is ``work``; the modules that
this version of the application lacks (``lacks``); and further executors (``executors``): their
options by their aliases. With ``leaves`` the main thread ends with the standard input, and
``atexit`` shuts the scheduler down, as in many a web application.

Each line of the standard input is a call of one of the scheduler's methods, its name and its named
arguments: ``["pause_job", {"job_id": "job"}]``. What became of it is printed.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import psycopg
from apscheduler.schedulers.blocking import BlockingScheduler

from apscheduler_tasklock import (
    TaskLockDatabaseError,
    TaskLockExecutor,
    TaskLockJobStore,
    current_lock,
)
from tests.support.internals import when_the_interpreter_ends

MODULE = "tests.acceptance.stored"

scheduler = BlockingScheduler()


def work(key: str, seconds: float = 0.0, **_task_lock: Any) -> None:
    """Write down that it begins, take so long, and write down that it ends."""
    held = current_lock()
    with psycopg.connect(os.environ["LEDGER_URL"], autocommit=True) as connection:
        found = connection.execute(
            "INSERT INTO ledger (key, pid, run_time, is_takeover) VALUES (%s, %s, %s, %s)"
            " RETURNING id",
            [key, os.getpid(), held and held.run_time, held and held.is_takeover],
        ).fetchone()
        time.sleep(seconds)
        connection.execute("UPDATE ledger SET ended_at = clock_timestamp() WHERE id = %s", found)


def work_until_killed(key: str) -> None:
    """Do the same until the process is killed; where the run is taken over, it ends at once."""
    held = current_lock()
    work(key, 0.0 if held and held.is_takeover else 600.0)


def work_and_add_itself(key: str, times: int) -> None:
    """Remove and add the own job, so that it runs so many times more."""
    work(key)
    if times:
        job: dict[str, Any] = {"args": [key, times - 1], "id": key, "in": 0.2}
        add_job(func=f"{MODULE}:work_and_add_itself", trigger="date", **job)
        if times % 2:  # and once more
            scheduler.remove_job(key)
            add_job(func=f"{MODULE}:work_and_add_itself", trigger="date", **job)


def add_job(func: str = "", **job: Any) -> None:
    """Add a job; ``in`` says in how many seconds it is due."""
    if "in" in job:
        job["run_date"] = datetime.now(timezone.utc) + timedelta(seconds=job.pop("in"))
    scheduler.add_job(func or f"{MODULE}:work", **job)


def obey() -> None:
    """Call what the standard input says, and print a line after each call."""
    # Unbuffered, as the interpreter could not end with a thread in a buffered read.
    with open(0, "rb", buffering=0, closefd=False) as commands:
        for line in commands:
            method, named = json.loads(line)
            try:
                (add_job if method == "add_job" else getattr(scheduler, method))(**named)
            except TaskLockDatabaseError:
                print(f"called {method}: unavailable", flush=True)
            except Exception as error:  # noqa: BLE001  # the test judges it
                print(f"called {method}: {type(error).__name__}", flush=True)
            else:
                print(f"called {method}: done", flush=True)


def main() -> None:
    """Run the scheduler until it is killed."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    settings = json.loads(os.environ["SETTINGS"])
    url = os.environ["DATABASE_URL"]
    for module in settings.get("lacks", []):
        sys.modules[module] = None  # type: ignore[assignment]  # which makes an import fail
    further = {
        alias: TaskLockExecutor(url, **options)
        for alias, options in settings.get("executors", {}).items()
    }
    scheduler.configure(
        jobstores={
            "default": TaskLockJobStore(url, functions=["tests."], **settings.get("store", {}))
        },
        executors={"default": TaskLockExecutor(url, **settings.get("executor", {})), **further},
    )
    for job in settings.get("jobs", []):
        add_job(**job)
    if settings.get("leaves", False):
        threading.Thread(target=scheduler.start, daemon=True).start()
        atexit.register(scheduler.shutdown)
        obey()
        when_the_interpreter_ends(partial(print, "the interpreter ends", flush=True))
        return
    threading.Thread(target=obey, daemon=True).start()
    scheduler.start()
