"""From the moment at which a job is due until it begins, on one replica."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor, upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.report import Section, median, milliseconds, p99, table

AT_ONCE = 200
LONE = 20
# Seconds from one of the lone jobs to the next.
APART = 0.1
# Seconds to set up the jobs in, and for all of them to begin.
LEAD, PATIENCE = 2.0, 60.0

# When each job was due, and when it began.
Fires = list[tuple[float, float]]


def run(effort: Effort) -> Section:
    """Fire without and with the lock in turn."""
    rounds = effort.of(5, 1)
    section = Section(
        "From due to begun",
        f"One replica, a pool of 10 threads: {LONE} jobs due {APART} s apart, and {AT_ONCE} due at "
        f"once, each a task's first claim; {rounds} rounds in a shuffled order. Jobs a second are "
        f"those of the {AT_ONCE}, from when they were due until the last one began, in the median "
        "round.",
    )
    with EmbeddedServer({"max_connections": "100"}, loopback=True) as server:
        upgrade(server.url)
        executors: dict[str, Callable[[], Any]] = {
            "APScheduler, no lock": lambda: ThreadPoolExecutor(10),
            "with the task lock": lambda: TaskLockExecutor(server.url),
        }
        lone: dict[str, list[Fires]] = {name: [] for name in executors}
        burst: dict[str, list[Fires]] = {name: [] for name in executors}
        rng = effort.rng()
        for number in range(rounds):
            progress(f"round {number + 1}")
            for name in rng.sample(list(executors), len(executors)):
                lone[name].append(_fire(executors[name](), [each * APART for each in range(LONE)]))
                burst[name].append(_fire(executors[name](), [0.0] * AT_ONCE))
    rows = [_row(name, lone[name], burst[name]) for name in executors]
    section.tables.append(
        table(["", "alone", "p99", f"{AT_ONCE} at once", "last one", "jobs a second"], rows)
    )
    return section


def _fire(executor: Any, delays: Sequence[float]) -> Fires:
    """Run one job for each delay; return when each was due and when it began."""
    begin = time.time() + LEAD
    fires: Fires = []
    all_began = threading.Event()

    def job(due: float) -> None:
        fires.append((due, time.time()))
        if len(fires) == len(delays):
            all_began.set()

    scheduler = BackgroundScheduler(executors={"default": executor})
    scheduler.start()
    try:
        for number, delay in enumerate(delays):
            due = begin + delay
            scheduler.add_job(
                job,
                "date",
                run_date=datetime.fromtimestamp(due, timezone.utc),
                args=[due],
                id=f"{begin} {number}",
                misfire_grace_time=None,
            )
        if time.time() > begin:
            raise RuntimeError(f"{LEAD} s are not enough to set up the jobs")
        assert all_began.wait(PATIENCE), f"{len(fires)} of {len(delays)} jobs began"
        return fires
    finally:
        scheduler.shutdown()


def _row(name: str, lone: list[Fires], burst: list[Fires]) -> list[str]:
    alone = [began - due for fires in lone for due, began in fires]
    together = [began - due for fires in burst for due, began in fires]
    last = median([max(began - due for due, began in fires) for fires in burst])
    return [
        name,
        *(milliseconds(value) for value in (median(alone), p99(alone), median(together), last)),
        f"{AT_ONCE / last:,.0f}",
    ]
