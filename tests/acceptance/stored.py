"""A process with a scheduler on the job store; its jobs write into the table ``ledger``.

``SETTINGS`` has, as JSON, the options of the executor (``executor``) and of the store (``store``),
and the jobs to declare: the arguments of ``add_job``, whose function is ``work``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
from apscheduler.schedulers.blocking import BlockingScheduler

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, current_lock


def work(key: str, seconds: float = 0.0, **_task_lock: Any) -> None:
    """Write down that it begins, take so long, and write down that it ends."""
    held = current_lock()
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        found = connection.execute(
            "INSERT INTO ledger (key, pid, run_time, is_takeover) VALUES (%s, %s, %s, %s)"
            " RETURNING id",
            [key, os.getpid(), held and held.run_time, held and held.is_takeover],
        ).fetchone()
        time.sleep(seconds)
        connection.execute("UPDATE ledger SET ended_at = clock_timestamp() WHERE id = %s", found)


def main() -> None:
    """Run the scheduler until it is killed."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    settings = json.loads(os.environ["SETTINGS"])
    url = os.environ["DATABASE_URL"]
    scheduler = BlockingScheduler(
        jobstores={
            "default": TaskLockJobStore(url, functions=["tests."], **settings.get("store", {}))
        },
        executors={"default": TaskLockExecutor(url, **settings.get("executor", {}))},
    )
    for job in settings.get("jobs", []):
        if "in" in job:
            after = timedelta(seconds=job.pop("in"))
            job["run_date"] = datetime.now(timezone.utc) + after
        scheduler.add_job("tests.acceptance.stored:work", **job)
    scheduler.start()


if __name__ == "__main__":
    main()
