"""One replica of the demo: ``python -m apscheduler_tasklock.demo.replica NUMBER SCHEMA``.

With ``--leader`` as the last argument, the replica is in leader mode.

The replica writes ``ready``, and waits for a line on standard input: the moment from which on
intervals count. Then the replica schedules the jobs. It ends on SIGTERM, or when standard input
ends, for example because the demo was killed. It writes events to standard output, a line of JSON
each.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import time
from datetime import datetime, timezone
from typing import Any, NoReturn

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock.demo.jobs import LEADER_PERIOD, LEASE, PERIOD, ExpectedError, schedule
from apscheduler_tasklock.demo.ledger import Ledger
from apscheduler_tasklock.events import (
    EVENT_TASK_LOCK_ALL,
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockEvent,
)
from apscheduler_tasklock.executor import TaskLockExecutor

# The URL may have a password, so it is passed in the environment, and not in the arguments, which
# everybody can read.
DATABASE_VARIABLE = "TASKLOCK_DEMO_DATABASE"

# The argument that puts the replica into leader mode.
LEADER_MODE = "--leader"

# Seconds from one look of the replica at the rows of its tasks to the next.
_POLL_INTERVAL = 1.0
# Seconds after the last look of a killed leader until another replica may lead: the shortest for
# looks so far apart.
_LEADER_LEASE = 3.0
# Seconds from one question whether the replica leads to the next.
_LEADERSHIP = 0.1

_KINDS = {
    EVENT_TASK_LOCK_GRANTED: "granted",
    EVENT_TASK_LOCK_REFUSED: "refused",
    EVENT_TASK_LOCK_RELEASED: "released",
    EVENT_TASK_LOCK_LOST: "lost",
    EVENT_TASK_LOCK_ERROR: "error",
}

# Limits the characters of a detail, so that a pipe takes each line at once. A longer line could be
# mixed with the line of another thread.
_LONGEST_DETAIL = 500


def main(number: int, schema: str, *options: str) -> None:
    """Run the replica until it is told to stop."""
    leader = LEADER_MODE in options
    signal.signal(signal.SIGTERM, stop)
    ledger = Ledger(parse_url(os.environ[DATABASE_VARIABLE]), schema, number)
    executor = make_executor(ledger, leader=leader)
    scheduler = make_scheduler(executor)
    tell("ready")
    try:
        if start := sys.stdin.readline():
            first = datetime.fromtimestamp(float(start), timezone.utc)
            schedule(scheduler, ledger, first, LEADER_PERIOD if leader else PERIOD)
            scheduler.start()
            if leader:
                tell_leadership(executor)
            sys.stdin.read()
    finally:
        if scheduler.running:
            scheduler.shutdown(wait=True)


def make_executor(
    ledger: Ledger, *, max_workers: int = 10, leader: bool = False
) -> TaskLockExecutor:
    """Return an executor that takes the task lock before each run.

    :param max_workers: how many jobs it runs at a time
    :param leader: whether the replica is in leader mode
    """
    return TaskLockExecutor(
        ledger.url,
        max_workers=max_workers,
        schema=ledger.schema,
        replica_id=f"replica {ledger.replica}",
        lease=LEASE,
        failover=True,
        poll_interval=_POLL_INTERVAL,
        leader=leader,
        leader_lease=_LEADER_LEASE,
    )


def make_scheduler(executor: TaskLockExecutor, *, max_instances: int = 5) -> BackgroundScheduler:
    """Return a scheduler that reports events to the demo.

    :param executor: its executor
    :param max_instances: how many runs of one job the scheduler has at a time
    """
    scheduler = BackgroundScheduler(
        executors={"default": executor},
        # Late runs are no misfires, because the demo counts runs, and a busy machine is late.
        job_defaults={
            "misfire_grace_time": None,
            "coalesce": False,
            "max_instances": max_instances,
        },
        timezone="UTC",
    )
    scheduler.add_listener(tell_lock_event, EVENT_TASK_LOCK_ALL)
    scheduler.add_listener(tell_job_error, EVENT_JOB_ERROR)
    scheduler.add_listener(tell_crowded, EVENT_JOB_MAX_INSTANCES)
    return scheduler


def tell_leadership(executor: TaskLockExecutor) -> None:
    """Tell the demo when the replica begins to lead, or no longer leads, until standard input ends.

    :param executor: the executor of the replica
    """
    led = False
    while not select.select([sys.stdin], [], [], _LEADERSHIP)[0]:
        leads = executor.is_leader
        if leads != led:
            tell("leads" if leads else "follows")
        led = leads


def tell_lock_event(event: TaskLockEvent) -> None:
    """Tell the demo what became of a claim."""
    tell(
        _KINDS[event.code],
        task=event.task_name,
        run_time=event.scheduled_run_time.timestamp(),
        token=event.token,
        holder=event.holder,
        reason=event.reason,
        detail=_short(event.exception),
    )


def tell_job_error(event: Any) -> None:
    """Tell the demo that a job raised, and whether on purpose."""
    expected = isinstance(event.exception, ExpectedError)
    tell(
        "raised" if expected else "error",
        task=event.job_id,
        run_time=event.scheduled_run_time.timestamp(),
        detail=_short(event.exception),
    )


def tell_crowded(event: Any) -> None:
    """Tell the demo that APScheduler left a run out."""
    tell(
        "error",
        task=event.job_id,
        run_time=event.scheduled_run_times[0].timestamp(),
        detail="left out: too many runs of it are still going on",
    )


def tell(kind: str, **details: Any) -> None:
    """Write one event as a line, in a single call, because jobs end in several threads."""
    line = json.dumps({"kind": kind, "at": time.time(), **details}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())


def _short(exception: BaseException | None) -> str:
    if exception is None:
        return ""
    return f"{type(exception).__name__}: {exception}"[:_LONGEST_DETAIL]


def stop(_number: int, _frame: object) -> NoReturn:
    """End the replica, on a signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    # No tracebacks of the flaky job are printed, because events report its failures.
    logging.getLogger("apscheduler").addFilter(lambda _record: False)
    logging.getLogger("apscheduler").setLevel(logging.CRITICAL + 1)
    # No warnings of short leases are printed, because the demo's leases are short on purpose.
    logging.getLogger("apscheduler_tasklock._runs.executor_jobs").setLevel(logging.ERROR)
    main(int(sys.argv[1]), *sys.argv[2:])
