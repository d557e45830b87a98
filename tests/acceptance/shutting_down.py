"""A process with a scheduler that does what lines on standard input say.

``SCHEDULER`` has, as JSON: ``options`` of the executor; ``asyncio``, whether it is an event loop's;
``own_engine``, whether the library gets an engine that the process has made; ``jobs``, how many
there are on each executor; ``executors``, how many of these; ``own_replicas``, whether each is a
replica of its own, with a connection of its own; and ``store``, whether there is a job store too.

It prints "ready", "submitted" for each job that was, and "runs" in each job. The lines are "run
jobs"; "end jobs"; "shut down", which ends the jobs, too, and makes it print how many seconds
``scheduler.shutdown()`` took; and "leave", after which it ends without a shutdown.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from datetime import datetime, timezone
from typing import Any

from apscheduler.events import EVENT_JOB_SUBMITTED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from sqlalchemy import create_engine

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore
from apscheduler_tasklock._database.url import parse_url
from tests.acceptance.jobs import say

ending = threading.Event()


def work() -> None:
    say("runs")
    ending.wait()


async def work_async() -> None:
    say("runs")
    while not ending.is_set():
        await asyncio.sleep(0.01)


def configured(scheduler: Any, job: Any, wanted: dict[str, Any]) -> Any:
    database: Any = os.environ["DATABASE_URL"]
    if wanted["own_engine"]:
        database = create_engine(parse_url(database), pool_size=1, max_overflow=0)
    executors = {
        f"executor {number}": TaskLockExecutor(
            database,
            **wanted["options"],
            **({"replica_id": f"replica {number}"} if wanted["own_replicas"] else {}),
        )
        for number in range(wanted["executors"])
    }
    scheduler.configure(executors=executors, timezone="UTC")
    if wanted["store"]:
        scheduler.add_jobstore(TaskLockJobStore(database, functions=["tests."]), "shared")
    scheduler.add_listener(lambda _event: say("submitted"), EVENT_JOB_SUBMITTED)
    scheduler.start()
    for number in range(wanted["jobs"] * wanted["executors"]):
        scheduler.add_job(
            job,
            "interval",
            hours=1,
            id=f"job {number}",
            executor=f"executor {number % wanted['executors']}",
            misfire_grace_time=None,
        )
    say("ready")
    return scheduler


def obey(scheduler: Any) -> bool:
    """Do what the lines say, until it is to end; return whether it is to shut down."""
    while (line := sys.stdin.readline()) not in ("shut down\n", "leave\n"):
        if line == "end jobs\n":
            ending.set()
        else:
            for job in scheduler.get_jobs("default"):
                job.modify(next_run_time=datetime.now(timezone.utc))
    return line == "shut down\n"


def shut_down(scheduler: Any) -> None:
    ending.set()
    begun = time.monotonic()
    scheduler.shutdown(wait=True)
    say("shut down", time.monotonic() - begun)


async def shut_down_on_the_loop(scheduler: Any) -> None:
    ending.set()
    begun = time.monotonic()
    scheduler.shutdown(wait=True)
    await asyncio.sleep(0)  # on a loop it is a callback that shuts it down
    say("shut down", time.monotonic() - begun)


async def run_async(wanted: dict[str, Any]) -> None:
    scheduler = configured(AsyncIOScheduler(), work_async, wanted)
    if await asyncio.get_running_loop().run_in_executor(None, obey, scheduler):
        await shut_down_on_the_loop(scheduler)


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    wanted = json.loads(os.environ["SCHEDULER"])
    if wanted["asyncio"]:
        asyncio.run(run_async(wanted))
    else:
        scheduler = configured(BackgroundScheduler(), work, wanted)
        if obey(scheduler):
            shut_down(scheduler)


if __name__ == "__main__":
    main()
