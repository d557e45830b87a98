"""A job that runs once a period, however many replicas of this container there are."""

import logging
import os
import signal
import socket
import sys
import time

from apscheduler.schedulers.blocking import BlockingScheduler

from apscheduler_tasklock import TaskLockExecutor


def sync_prices() -> None:
    """Stand for the work that must not be done twice."""
    print(f"{socket.gethostname()} (process {os.getpid()}) syncs prices")
    time.sleep(2)


def main() -> None:
    """Schedule the job until SIGTERM, as without the lock; only the executor is another."""
    logging.basicConfig()
    logging.getLogger("apscheduler_tasklock").setLevel(logging.INFO)
    # With the default lease, the run of a killed replica would be taken over after a minute.
    executor = TaskLockExecutor(os.environ["TASKLOCK_DATABASE_URL"], lease=5, failover=True)
    scheduler = BlockingScheduler(executors={"default": executor})
    scheduler.add_job(sync_prices, "interval", seconds=5, start_date="2026-01-01", id="sync-prices")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        scheduler.start()
    except (KeyboardInterrupt, SystemExit):
        if scheduler.running:  # not if the signal came while it was started
            scheduler.shutdown()  # lets a running job end, and releases its lock


if __name__ == "__main__":
    main()
