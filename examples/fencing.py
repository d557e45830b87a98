"""A table that refuses the writes of a replica that has been overtaken.

A lock tells its holder that it is lost, but not always in time: a process that was paused, or cut
off, may be just about to write. So each write brings the fencing token of the lock it was made
under, which grows with every claim; and the table, which remembers the highest token it has seen,
refuses an older one.

pip install "..[binary]"
export TASKLOCK_DATABASE_URL=postgresql://app:secret@localhost/app
apscheduler-tasklock upgrade
python fencing.py &  python fencing.py &  python fencing.py

Pause the one that works with `kill -STOP`, see another write, and let it go on with `kill -CONT`.
"""

import os
import signal
import sys
import time

import psycopg
from apscheduler.schedulers.blocking import BlockingScheduler

from apscheduler_tasklock import TaskLockExecutor, current_lock

DATABASE = os.environ["TASKLOCK_DATABASE_URL"]

CREATE = """
    CREATE TABLE IF NOT EXISTS report (name text PRIMARY KEY, body text, token bigint NOT NULL)
"""
WRITE = """
    INSERT INTO report AS known (name, body, token) VALUES (%(name)s, %(body)s, %(token)s)
    ON CONFLICT (name) DO UPDATE SET body = excluded.body, token = excluded.token
    WHERE known.token <= excluded.token
"""


def write_report() -> None:
    """Work for some seconds, and write what came of it."""
    lock = current_lock()
    assert lock is not None
    me = f"process {os.getpid()} (token {lock.token})"
    print(f"{me} works\n", end="", flush=True)
    time.sleep(2)
    with psycopg.connect(DATABASE) as connection:
        row = {"name": "prices", "body": f"by {me}", "token": lock.token}
        written = connection.execute(WRITE, row).rowcount
    print(f"{me} {'writes' if written else 'is refused'}\n", end="", flush=True)


def main() -> None:
    """Schedule the job: a holder that is not heard of for 2 seconds is taken over."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with psycopg.connect(DATABASE) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(hashtext('report'))")  # one at a time
        connection.execute(CREATE)
    executor = TaskLockExecutor(DATABASE, lease=2, failover=True)
    scheduler = BlockingScheduler(executors={"default": executor})
    scheduler.add_job(write_report, "interval", seconds=3, id="write-report")
    try:
        scheduler.start()
    except (KeyboardInterrupt, SystemExit):
        if scheduler.running:  # not if the signal came while it was started
            scheduler.shutdown()  # lets a running job end, and releases its lock


if __name__ == "__main__":
    main()
