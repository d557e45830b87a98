"""Use the installed library as an application does, on the database of TASKLOCK_DATABASE_URL.

It is run by the Python of an environment that has nothing but the wheel and what that needs.
"""

import json
import os
import queue
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from importlib.metadata import entry_points, version
from pathlib import Path

from apscheduler.schedulers.background import BackgroundScheduler

import apscheduler_tasklock
from apscheduler_tasklock import (
    EVENT_TASK_LOCK_RELEASED,
    TaskLockExecutor,
    TaskLockJobStore,
    current_lock,
)

URL = os.environ["TASKLOCK_DATABASE_URL"]
COMMAND = Path(sys.executable).with_name("apscheduler-tasklock")

ran: "queue.Queue[tuple[str, int]]" = queue.Queue()


def report() -> None:
    lock = current_lock()
    assert lock is not None
    ran.put((lock.name, lock.token))


def command(*arguments: str) -> str:
    finished = subprocess.run([COMMAND, *arguments], check=True, capture_output=True, text=True)
    assert finished.stderr == "", finished.stderr
    return finished.stdout


def main() -> None:
    assert Path(apscheduler_tasklock.__file__).is_relative_to(sys.prefix)
    assert {name.split(".")[0] for name in sys.modules} & {"tests", "pytest", "rich"} == set()
    assert command("--version").split()[-1] == version("apscheduler-tasklock")
    found = {
        point.load()
        for group in ("apscheduler.executors", "apscheduler.jobstores")
        for point in entry_points(group=group, name="tasklock")
    }
    assert found == {TaskLockExecutor, TaskLockJobStore}

    assert command("upgrade") == "task_lock is migrated\n"
    assert "nothing to migrate" in command("upgrade")

    released: queue.Queue[object] = queue.Queue()
    scheduler = BackgroundScheduler(executors={"default": {"type": "tasklock", "database": URL}})
    scheduler.add_listener(released.put, EVENT_TASK_LOCK_RELEASED)
    due = datetime.now(timezone.utc) + timedelta(seconds=1)
    scheduler.add_job(report, "date", run_date=due, id="report", misfire_grace_time=None)
    scheduler.start()
    name, token = ran.get(timeout=60)
    released.get(timeout=60)
    scheduler.shutdown()
    assert name == "report"
    assert ran.empty()

    [task] = json.loads(command("status", "--json"))
    assert (task["name"], task["state"]) == ("report", "ok"), task
    [run] = json.loads(command("runs", "--json"))
    assert (run["token"], run["outcome"]) == (token, "ok"), run

    assert command("downgrade", "--yes") == "task_lock is dropped\n"
    print("the wheel works: report ran once, under its lock")


main()
