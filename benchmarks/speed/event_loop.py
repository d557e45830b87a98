"""How long an application's event loop is held up while many coroutine jobs are due."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta, timezone
from typing import Any

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from apscheduler_tasklock import TaskLockExecutor, upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.effort import Effort
from benchmarks.speed.report import Section, median, milliseconds, p99, table

JOBS = 200
TICK = 0.001


def run(effort: Effort) -> Section:
    """Measure the loop's delay with plain APScheduler and with the lock, in turn."""
    rounds = effort.of(7, 2)
    section = Section(
        "Delay of the event loop",
        f"An `AsyncIOScheduler` with {JOBS} coroutine jobs due within one second, on the loop of a "
        f"ticker that sleeps {TICK * 1e3:g} ms and measures by how much longer it slept; {rounds} "
        "rounds in a shuffled order. *All at once* has them due at the same moment.",
    )
    rows = []
    with EmbeddedServer(loopback=True) as server:
        upgrade(server.url)
        for what, spread in (("over a second", 1.0), ("all at once", 0.0)):
            delays: dict[str, list[list[float]]] = {"APScheduler alone": [], "with the lock": []}
            rng = effort.rng()
            for _ in range(rounds):
                for name in rng.sample(list(delays), len(delays)):
                    executor = (
                        TaskLockExecutor(server.url)
                        if name == "with the lock"
                        else AsyncIOExecutor()
                    )
                    delays[name].append(asyncio.run(_measure(executor, spread)))
            rows += [
                [
                    f"{name}, {what}",
                    milliseconds(median([median(each) for each in several])),
                    milliseconds(median([p99(each) for each in several])),
                    milliseconds(median([max(each) for each in several])),
                ]
                for name, several in delays.items()
            ]
    section.tables.append(table(["", "median", "p99", "longest, in the median round"], rows))
    return section


async def _measure(executor: Any, spread: float) -> list[float]:
    ran = 0
    all_ran = asyncio.Event()

    async def job() -> None:
        nonlocal ran
        ran += 1
        if ran == JOBS:
            all_ran.set()

    begin = datetime.now(timezone.utc) + timedelta(seconds=0.5)
    scheduler = AsyncIOScheduler(executors={"default": executor})
    for number in range(JOBS):
        at = begin + timedelta(seconds=spread * number / JOBS)
        scheduler.add_job(job, "date", run_date=at, id=f"{begin} {number}", misfire_grace_time=None)
    scheduler.start()
    await asyncio.sleep((begin - datetime.now(timezone.utc)).total_seconds() - 0.05)
    delays: list[float] = []
    while not all_ran.is_set():
        before = time.perf_counter()
        await asyncio.sleep(TICK)
        delays.append(time.perf_counter() - before - TICK)
    scheduler.shutdown(wait=False)
    return delays
