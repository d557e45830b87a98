"""An application with an Alembic history of its own, which creates the task lock table, too.

pip install "../..[binary]"
export TASKLOCK_DATABASE_URL=postgresql://app:secret@localhost/app
alembic upgrade head
python app.py &  python app.py &  python app.py
"""

import os
import signal
import sys

from apscheduler.schedulers.blocking import BlockingScheduler

from apscheduler_tasklock import TaskLockExecutor, current_lock


def sync_prices() -> None:
    """Stand for the work that must not be done twice."""
    lock = current_lock()
    which = lock.run_time if lock is not None else "a run without a lock"  # where locks are off
    print(f"process {os.getpid()} syncs prices for {which}\n", end="", flush=True)


if __name__ == "__main__":
    scheduler = BlockingScheduler(
        executors={"default": TaskLockExecutor(os.environ["TASKLOCK_DATABASE_URL"])}
    )
    scheduler.add_job(sync_prices, "interval", seconds=2, id="sync-prices")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        scheduler.start()
    except (KeyboardInterrupt, SystemExit):
        if scheduler.running:  # not if the signal came while it was started
            scheduler.shutdown()  # lets a running job end, and releases its lock
