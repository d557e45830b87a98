"""What a replica process runs: one job, whose doings it prints line by line.

``JOB`` has, as JSON, the arguments of ``add_job``. In place of the function it has the name of one
of tests/acceptance/jobs.py, and ``executor`` is the one to wrap.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from typing import Any

from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_REMOVED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.blocking import BlockingScheduler

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ALL,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
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
    say(NAMES.get(event.code, "event"), event.job_id, getattr(event, "reason", None))


def configured(scheduler: Any, executor: str | None, function: str, job: dict[str, Any]) -> Any:
    options = {"max_workers": 1} if executor == "processpool" else {}
    locked = TaskLockExecutor(os.environ["DATABASE_URL"], executor, **options)
    scheduler.configure(executors={"default": locked}, timezone="UTC")
    scheduler.add_listener(listen, EVENT_TASK_LOCK_ALL | EVENT_JOB_EXECUTED | EVENT_JOB_REMOVED)
    scheduler.add_job(getattr(jobs, function), id="job", misfire_grace_time=None, **job)
    return scheduler


async def run_async(executor: str, function: str, job: dict[str, Any]) -> None:
    configured(AsyncIOScheduler(), executor, function, job).start()
    await asyncio.Event().wait()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    job = json.loads(os.environ["JOB"])
    executor, function = job.pop("executor", None), job.pop("function")
    if executor == "asyncio":
        asyncio.run(run_async(executor, function, job))
    else:
        configured(BlockingScheduler(), executor, function, job).start()


if __name__ == "__main__":
    main()
