"""What a replica process runs: one job, whose doings it prints line by line."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from apscheduler.schedulers.blocking import BlockingScheduler

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ALL,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    TaskLockExecutor,
    current_lock,
)

NAMES = {EVENT_TASK_LOCK_REFUSED: "refused", EVENT_TASK_LOCK_LOST: "lost"}


def say(*words: object) -> None:
    """Print a line with one call: other threads print, too."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def job(takes: float, **_: Any) -> None:
    lock = current_lock()
    assert lock is not None
    say("runs", lock.run_time, lock.token)
    time.sleep(takes)  # the work
    say("ends", lock.token, "lost" if lock.lost else "held")


def main() -> None:
    options = json.loads(os.environ["JOB"])
    scheduler = BlockingScheduler(
        executors={"default": TaskLockExecutor(os.environ["DATABASE_URL"])}, timezone="UTC"
    )
    scheduler.add_listener(
        lambda event: say(NAMES.get(event.code, "event"), event.task_name),
        EVENT_TASK_LOCK_ALL,
    )
    scheduler.add_job(
        job,
        "interval",
        seconds=options.pop("every"),
        kwargs={"takes": options.pop("takes"), "task_lock": options},
        id="job",
        misfire_grace_time=None,
    )
    scheduler.start()


if __name__ == "__main__":
    main()
