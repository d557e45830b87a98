"""Flask under gunicorn, with a scheduler in each worker.

pip install "..[binary,flask]" gunicorn
export TASKLOCK_DATABASE_URL=postgresql://app:secret@localhost/app
flask --app flask_app tasklock upgrade
gunicorn flask_app:app --workers 4
"""

import os

from flask import Flask

from apscheduler_tasklock import current_lock
from apscheduler_tasklock.flask import TaskLockScheduler

app = Flask(__name__)
app.config["TASKLOCK_DATABASE_URL"] = os.environ["TASKLOCK_DATABASE_URL"]
scheduler = TaskLockScheduler(app)


@scheduler.task("interval", seconds=2, id="sync-prices")
def sync_prices() -> None:
    """Stand for the work that must not be done twice."""
    lock = current_lock()
    which = lock.run_time if lock is not None else "a run without a lock"  # where locks are off
    print(f"worker {os.getpid()} syncs prices for {which}\n", end="", flush=True)
