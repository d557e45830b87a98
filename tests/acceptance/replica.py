"""What a replica process runs: jobs, whose doings it prints line by line.

``JOB`` has, as JSON, the arguments of ``add_job``. In place of the function it has the name of one
of tests/acceptance/jobs.py. Three more are for the process: ``executor`` is the one to wrap,
``options`` are those of the ``TaskLockExecutor``, and ``jobs`` are further jobs. With ``leaves``
the main thread only obeys the standard input, and ends with that; the scheduler, which has a thread
of its own, is shut down by ``atexit``, as in many a web application.

SIGTERM shuts the scheduler down, as in an application. Each line of the standard input is a call of
one of the scheduler's methods: ``["pause_job", "job"]``.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_REMOVED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.blocking import BlockingScheduler

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ALL,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockExecutor,
)
from tests.acceptance import jobs
from tests.acceptance.jobs import say

NAMES = {
    EVENT_JOB_EXECUTED: "executed",
    EVENT_JOB_REMOVED: "removed",
    EVENT_TASK_LOCK_GRANTED: "granted",
    EVENT_TASK_LOCK_LOST: "lost",
    EVENT_TASK_LOCK_REFUSED: "refused",
}


def listen(event: Any) -> None:
    if event.code == EVENT_TASK_LOCK_RELEASED:
        say("released", event.job_id, event.outcome, event.holder)
        return
    say(NAMES.get(event.code, "event"), event.job_id, getattr(event, "reason", None))


def job_of_environment() -> dict[str, Any]:
    """Read ``JOB``, and let the log's lines be printed among the others."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    job: dict[str, Any] = json.loads(os.environ["JOB"])
    return job


def make_executor(executor: str | None, options: dict[str, Any]) -> TaskLockExecutor:
    if executor == "processpool":
        options = {"max_workers": 1, **options}
        pool = dict(options.pop("pool_kwargs", {}))
        if "mp_context" in pool:
            pool["mp_context"] = multiprocessing.get_context(pool["mp_context"])
        options["pool_kwargs"] = pool
    return TaskLockExecutor(os.environ["DATABASE_URL"], executor, **options)


def add_job(scheduler: Any, function: str, **job: Any) -> None:
    defaults = {"id": "job", "misfire_grace_time": None}
    scheduler.add_job(getattr(jobs, function), **{**defaults, **job})


def configured(scheduler: Any, job: dict[str, Any]) -> Any:
    job = dict(job)
    locked = make_executor(job.pop("executor", None), job.pop("options", {}))
    scheduler.configure(executors={"default": locked}, timezone="UTC")
    scheduler.add_listener(listen, EVENT_TASK_LOCK_ALL | EVENT_JOB_EXECUTED | EVENT_JOB_REMOVED)
    for one in [*job.pop("jobs", []), *([job] if job else [])]:
        add_job(scheduler, **one)
    return scheduler


def obey(scheduler: Any) -> None:
    """Call what the standard input says, and print a line after each call."""
    # Unbuffered, as the interpreter could not end with a thread in a buffered read.
    with open(0, "rb", buffering=0, closefd=False) as commands:
        for line in commands:
            method, *arguments = json.loads(line)
            if method == "add_job":
                add_job(scheduler, **arguments[0])
            else:
                getattr(scheduler, method)(*arguments)
            say("did", method)


async def run_async(job: dict[str, Any]) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    scheduler = configured(AsyncIOScheduler(), job)
    scheduler.start()
    await stopped.wait()
    say("stopping")
    scheduler.shutdown()


def run_blocking(job: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # What a shell starts in the background ignores it, and all that is started by that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    scheduler = configured(BlockingScheduler(), job)
    threading.Thread(target=obey, args=(scheduler,), daemon=True).start()
    with suppress(KeyboardInterrupt, SystemExit):
        scheduler.start()
    say("stopping")
    scheduler.shutdown()


def run_in_background(job: dict[str, Any]) -> None:
    scheduler = configured(BackgroundScheduler(), job)
    scheduler.start()
    atexit.register(scheduler.shutdown)
    obey(scheduler)
    say("stopping")


def main() -> None:
    job = job_of_environment()
    if job.get("executor") == "asyncio":
        asyncio.run(run_async(job))
    elif job.pop("leaves", False):
        run_in_background(job)
    else:
        run_blocking(job)


if __name__ == "__main__":
    main()
