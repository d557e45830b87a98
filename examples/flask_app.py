"""Flask with Flask-APScheduler under gunicorn: one setting is all that changes.

pip install "..[binary]" flask flask-apscheduler gunicorn
export TASKLOCK_DATABASE_URL=postgresql://user:password@localhost:5432/app
apscheduler-tasklock upgrade
gunicorn flask_app:app --workers 4
"""

import atexit
import os

from flask import Flask
from flask_apscheduler import APScheduler

from apscheduler_tasklock import current_lock

app = Flask(__name__)
app.config["SCHEDULER_EXECUTORS"] = {
    "default": {"type": "tasklock", "database": os.environ["TASKLOCK_DATABASE_URL"]}
}

scheduler = APScheduler()
scheduler.init_app(app)


@scheduler.task("interval", seconds=2, id="sync-prices")
def sync_prices() -> None:
    """Stand for the work that must not be done twice."""
    lock = current_lock()
    which = lock.run_time if lock is not None else "a run without a lock"  # where locks are off
    print(f"worker {os.getpid()} syncs prices for {which}\n", end="", flush=True)


scheduler.start()
atexit.register(scheduler.shutdown)  # what runs has ended by then; nothing is left behind
