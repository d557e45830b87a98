"""By how much an event loop is held up whose scheduler is on the shared store."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer

TICK = 0.001
# How many coroutine jobs there are, and seconds between the run times of each.
JOBS = 5
PERIOD = 1


async def job() -> None:
    """Be a job."""


def held_up(seconds: float) -> dict[str, list[float]]:
    """Return by how much a ticker slept too long, in seconds, in each phase.

    :param seconds: how long each phase is
    """
    with EmbeddedServer(loopback=True) as server:
        upgrade(server.url)
        return asyncio.run(_measure(server, seconds))


async def _measure(server: EmbeddedServer, seconds: float) -> dict[str, list[float]]:
    phases = {"no store": await _delays(seconds)}
    url = server.url
    scheduler = AsyncIOScheduler(
        jobstores={"default": TaskLockJobStore(url, functions=[__name__])},
        executors={"default": TaskLockExecutor(url)},
    )
    scheduler.start()
    for number in range(JOBS):
        scheduler.add_job(job, "interval", seconds=PERIOD, id=str(number))
    await asyncio.sleep(1)
    phases["server answers"] = await _delays(seconds)
    with _stopped(server):
        phases["server stopped"] = await _delays(seconds)
    phases["server goes on"] = await _delays(seconds)
    scheduler.shutdown(wait=False)
    return phases


async def _delays(seconds: float) -> list[float]:
    end = time.perf_counter() + seconds
    delays = []
    while (before := time.perf_counter()) < end:
        await asyncio.sleep(TICK)
        delays.append(time.perf_counter() - before - TICK)
    return delays


@contextmanager
def _stopped(server: EmbeddedServer) -> Iterator[None]:
    """Stop the server as a frozen machine does: its connections stay open and get no answer."""
    stopped = [server.pid]
    os.kill(server.pid, signal.SIGSTOP)  # first, so that it starts no more
    stopped += _children(server.pid)
    for pid in stopped[1:]:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if parent == pid:
            found.append(int(entry.parent.name))
    return found
