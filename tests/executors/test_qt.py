"""QtScheduler, offscreen, in a process of its own: Qt's event loop wants the main thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.programs import need_qt

SCRIPT = """
import os
from datetime import datetime, timezone
from PySide6.QtCore import QCoreApplication
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.schedulers.qt import QtScheduler
from apscheduler_tasklock import EVENT_TASK_LOCK_REFUSED, TaskLockExecutor, current_lock

application = QCoreApplication([])
schedulers, seen = [], []

def job():
    return "granted" if current_lock() else "unlocked"

def note(event):
    seen.append(getattr(event, "retval", "refused"))
    if len(seen) == 2:
        application.quit()

now = datetime.now(timezone.utc)
for _ in range(2):
    executor = TaskLockExecutor(os.environ["DATABASE_URL"])
    scheduler = QtScheduler(executors={"default": executor}, timezone="UTC")
    scheduler.add_job(
        job, "interval", hours=1, id="job", next_run_time=now, misfire_grace_time=None
    )
    scheduler.add_listener(note, EVENT_JOB_EXECUTED | EVENT_TASK_LOCK_REFUSED)
    scheduler.start()
    schedulers.append(scheduler)
application.exec()
for scheduler in schedulers:
    scheduler.shutdown()
print(sorted(seen))
"""


def test_of_two_qt_schedulers_one_runs_the_job(database_url: str, checkout: Path) -> None:
    need_qt()
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=checkout,
        env={**os.environ, "DATABASE_URL": database_url, "QT_QPA_PLATFORM": "offscreen"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == "['granted', 'refused']"
