"""A process that is one replica, with jobs that are due at one moment, again and again.

It is run as a script with the folder of the library's version in ``PYTHONPATH``, and so imports
nothing of the benchmarks. It first prints the library's folder. Then it reads lines, each with
seconds. For each it adds the jobs, so that they are due after these seconds, waits until the last
lock is released, and prints what it measured, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

import apscheduler_tasklock
from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockExecutor,
    upgrade,
)

# Seconds for a burst to end. What has not been released by then is missing in the answer.
PATIENCE = 60.0


def nothing() -> None:
    """Be the job."""


async def nothing_on_the_loop() -> None:
    """Be the job that is a coroutine."""


KINDS = {
    "thread pool": (BackgroundScheduler, nothing),
    "asyncio": (AsyncIOScheduler, nothing_on_the_loop),
}


class Tally:
    """Counts the releases of one burst.

    :ivar released: how many locks have been released
    :ivar ended: when the last one was, in seconds since 1970
    :ivar over: set when each job's lock was released, or something else became of it
    """

    def __init__(self, jobs: int) -> None:
        self.released = 0
        self.ended = math.inf
        self.over = threading.Event()
        self._left = jobs
        self._lock = threading.Lock()

    def note(self, event: Any) -> None:
        """Note what became of a job's lock."""
        now = time.time()
        with self._lock:
            self._left -= 1
            if event.code == EVENT_TASK_LOCK_RELEASED:
                self.released += 1
                self.ended = now
            if self._left == 0:
                self.over.set()


async def burst(scheduler: Any, job: Any, jobs: int, lead: float) -> dict[str, float]:
    """Let the jobs come due at one moment, a whole second, and wait for all to be over."""
    due = math.ceil(time.time() + lead)
    at = datetime.fromtimestamp(due, timezone.utc)
    tally = Tally(jobs)
    scheduler.add_listener(
        tally.note,
        EVENT_TASK_LOCK_RELEASED
        | EVENT_TASK_LOCK_REFUSED
        | EVENT_TASK_LOCK_LOST
        | EVENT_TASK_LOCK_ERROR,
    )
    for number in range(jobs):
        scheduler.add_job(
            job,
            "interval",
            hours=1,
            start_date=at,
            id=f"job {number}",
            misfire_grace_time=None,
        )
    late = time.time() - due
    await asyncio.to_thread(tally.over.wait, PATIENCE)
    scheduler.remove_listener(tally.note)
    scheduler.remove_all_jobs()
    return {"seconds": tally.ended - due, "released": tally.released, "late": max(0.0, late)}


async def main(kind: str, url: str, name: str, jobs: str) -> None:
    """Be a replica of this name, on a table of its own, until the input ends."""
    schedulers, job = KINDS[kind]
    upgrade(url, schema=name)
    # Without a minimum lock each burst is a new window of the same tasks.
    executor = TaskLockExecutor(url, schema=name, replica_id=name, min_factor=0)
    scheduler = schedulers(executors={"default": executor})
    scheduler.start()
    print(Path(apscheduler_tasklock.__file__).parent.parent, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await burst(scheduler, job, int(jobs), float(line))), flush=True)
    scheduler.shutdown()
    await asyncio.sleep(0)  # on a loop it is a callback that shuts it down


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
