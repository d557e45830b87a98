"""A job that runs once a period, however many copies of this script are running.

pip install "..[binary]"
export TASKLOCK_DATABASE_URL=postgresql://app:secret@localhost/app
apscheduler-tasklock upgrade
python threads.py &  python threads.py &  python threads.py
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


def main() -> None:
    """Schedule the job, as without the lock; only the executor is another."""
    scheduler = BlockingScheduler(
        executors={"default": TaskLockExecutor(os.environ["TASKLOCK_DATABASE_URL"])}
    )
    scheduler.add_job(sync_prices, "interval", seconds=2, start_date="2026-01-01", id="sync-prices")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        scheduler.start()
    except (KeyboardInterrupt, SystemExit):
        if scheduler.running:  # not if the signal came while it was started
            scheduler.shutdown()  # lets a running job end, and releases its lock


if __name__ == "__main__":
    main()
