"""A replica process whose jobs the dashboard shows: in memory, and in the shared job store.

``SETTINGS`` has, as JSON, the arguments of ``add_job`` for the jobs in memory (``jobs``), each with
the name of a function of this module, and for the jobs in the store (``stored``).
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from apscheduler.schedulers.blocking import BlockingScheduler

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, task_lock

MODULE = "tests.browser.replica"


@task_lock
def work() -> None:
    """End at once."""


@task_lock(min_factor=0, max_lock=600)
def hang() -> None:
    """Work until the process is killed."""
    while True:
        time.sleep(0.05)  # the work


def work_for(name: str) -> None:
    """End at once; the name is the job's."""


def main() -> None:
    """Run the scheduler until it is killed."""
    settings: dict[str, Any] = json.loads(os.environ["SETTINGS"])
    url = os.environ["DATABASE_URL"]
    scheduler = BlockingScheduler(timezone="UTC")
    scheduler.configure(
        executors={"default": TaskLockExecutor(url)},
        jobstores={"shared": TaskLockJobStore(url, functions=["tests."])},
    )
    for job in settings.get("jobs", []):
        function = job.pop("function", "work")
        scheduler.add_job(globals()[function], **{"misfire_grace_time": None, **job})
    for job in settings.get("stored", []):
        given = {"misfire_grace_time": None, "replace_existing": True, **job}
        scheduler.add_job(f"{MODULE}:work_for", jobstore="shared", args=[given["id"]], **given)
    scheduler.start()
