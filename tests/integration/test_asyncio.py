"""TaskLockExecutor around the asyncio executor: coroutines and plain functions."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from apscheduler.events import (
    EVENT_ALL,
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    JobExecutionEvent,
)
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ALL,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockEvent,
    TaskLockExecutor,
    current_lock,
    task_lock,
)
from tests.polling import eventually
from tests.proxy import Proxy

RUN = [EVENT_TASK_LOCK_GRANTED, EVENT_TASK_LOCK_RELEASED, EVENT_JOB_EXECUTED]
RAISED = [EVENT_TASK_LOCK_GRANTED, EVENT_TASK_LOCK_RELEASED, EVENT_JOB_ERROR]


class Loop:
    """An AsyncIOScheduler on the running loop, and what its listeners were told on which thread."""

    def __init__(self, database: str, **options: Any) -> None:
        self.executor = TaskLockExecutor(database, **options)
        self.scheduler = AsyncIOScheduler(
            executors={"default": self.executor}, timezone=timezone.utc
        )
        self.events: list[Any] = []
        self.threads: set[str] = set()
        self.scheduler.add_listener(self._record, EVENT_ALL | EVENT_TASK_LOCK_ALL)

    def _record(self, event: Any) -> None:
        if isinstance(event, (JobExecutionEvent, TaskLockEvent)):
            self.events.append(event)
            self.threads.add(threading.current_thread().name)

    def codes(self, job_id: str = "job") -> list[int]:
        return [event.code for event in self.events if event.job_id == job_id]

    def run_once(self, function: Callable[..., Any], job_id: str = "job", **job: Any) -> None:
        now = datetime.now(timezone.utc)
        self.scheduler.add_job(
            function,
            "interval",
            hours=1,
            id=job_id,
            next_run_time=now,
            **{"misfire_grace_time": None, **job},
        )

    async def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 60
        while not (result := condition()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        return result


@asynccontextmanager
async def running(database: str, **options: Any) -> AsyncIterator[Loop]:
    loop = Loop(database, **options)
    loop.scheduler.start()
    try:
        yield loop
    finally:
        if loop.scheduler.running:
            loop.scheduler.shutdown()
        await loop.until(lambda: not any(loop.executor._instances.values()))
        await loop.until(lambda: not loop.scheduler.running)


async def coroutine_job(**kwargs: Any) -> Any:
    await asyncio.sleep(0)
    lock = current_lock()
    assert lock is not None
    return lock.token, kwargs


def plain_job(**kwargs: Any) -> Any:
    lock = current_lock()
    assert lock is not None
    return lock.token, kwargs


@task_lock
async def failing_coroutine() -> None:
    raise ValueError("awaited")


def failing_function() -> None:
    raise ValueError("called")


@pytest.mark.parametrize("function", [coroutine_job, plain_job])
def test_a_job_runs_on_one_loop_and_is_refused_on_the_other(
    database_url: str, function: Callable[..., Any]
) -> None:
    async def main() -> None:
        async with running(database_url) as one, running(database_url) as other:
            one.run_once(function, kwargs={"a": 1, "task_lock": {"max_factor": 2}})
            await one.until(lambda: EVENT_JOB_EXECUTED in one.codes())
            other.run_once(function)
            await other.until(other.codes)
            assert one.codes() == RUN
            assert one.events[-1].retval == (1, {"a": 1})
            assert other.codes() == [EVENT_TASK_LOCK_REFUSED]
            # Listeners of a scheduler on a loop may rely on being called there.
            assert one.threads == other.threads == {"MainThread"}

    asyncio.run(main())


def test_tasks_that_a_coroutine_starts_see_its_lock(database_url: str) -> None:
    async def child() -> str | None:
        lock = current_lock()
        return lock and lock.name

    async def parent() -> str | None:
        return await asyncio.create_task(child())

    async def main() -> None:
        async with running(database_url) as loop:
            loop.run_once(parent)
            await loop.until(lambda: EVENT_JOB_EXECUTED in loop.codes())
            assert loop.events[-1].retval == "job"

    asyncio.run(main())
    assert current_lock() is None


@pytest.mark.parametrize("function", [failing_coroutine, failing_function])
def test_a_job_that_raises_is_released(
    database_url: str, function: Callable[..., Any], connection: psycopg.Connection[Any]
) -> None:
    async def main() -> None:
        async with running(database_url) as loop:
            loop.run_once(function)
            await loop.until(lambda: EVENT_JOB_ERROR in loop.codes())
            assert loop.codes() == RAISED
            assert isinstance(loop.events[-1].exception, ValueError)
            assert f"in {function.__name__}" in loop.events[-1].traceback

    asyncio.run(main())
    assert connection.execute("SELECT FROM task_lock WHERE finished_at IS NULL").rowcount == 0


def test_waiting_for_a_claim_does_not_make_a_coroutine_job_late(
    database_url: str, proxy: Proxy
) -> None:
    """Its misfire is decided when it fires, however many claims are before it."""
    threads, jobs, latency = 5, 60, 0.15

    def delay(data: bytes) -> bytes:
        time.sleep(latency)  # is the latency
        return data

    async def main() -> None:
        async with running(proxy.url, claim_timeout=60) as loop:
            proxy.to_client = delay
            for number in range(jobs):
                loop.run_once(coroutine_job, f"job {number}", misfire_grace_time=1)
            await loop.until(lambda: len({e.job_id for e in executed(loop)}) == jobs)
            proxy.to_client = lambda data: data

    def executed(loop: Loop) -> list[Any]:
        return [event for event in loop.events if event.code == EVENT_JOB_EXECUTED]

    assert latency * jobs / threads > 1  # the last claim is made after the grace time
    asyncio.run(main())


def test_a_coroutine_cancelled_by_shutdown_is_released(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def endless() -> None:
            started.set()
            await asyncio.Event().wait()

        async with running(database_url) as loop:
            loop.run_once(endless)
            await asyncio.wait_for(started.wait(), 60)
            loop.scheduler.shutdown()
            await loop.until(lambda: EVENT_TASK_LOCK_RELEASED in loop.codes())

    asyncio.run(main())
    assert connection.execute("SELECT FROM task_lock WHERE finished_at IS NULL").rowcount == 0


def test_a_coroutine_cancelled_while_it_waits_for_its_claim_is_released(
    database_url: str, connection: psycopg.Connection[Any], proxy: Proxy
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def hold_up(data: bytes) -> bytes:
        asked.set()
        assert go_on.wait(60)
        return data

    async def main() -> None:
        async with running(proxy.url, claim_timeout=60) as loop:
            proxy.to_client = hold_up
            loop.run_once(coroutine_job)
            await loop.until(asked.is_set)
            loop.scheduler.shutdown()
            await loop.until(lambda: not loop.scheduler.running)
            go_on.set()

    asyncio.run(main())
    rows = eventually(lambda: connection.execute("SELECT finished_at FROM task_lock").fetchall())
    assert rows[0][0] is not None


def test_claims_do_not_block_the_event_loop(database_url: str, proxy: Proxy) -> None:
    """While 200 coroutine jobs are claimed with 50 ms of latency, a heartbeat goes on.

    Done on the loop, one claim after another would stop it for 10 s. What is asserted is not how
    fast a beat is, but that there was always one while the claims were under way.
    """
    latency = 0.05

    def delay(data: bytes) -> bytes:
        time.sleep(latency)  # is the latency
        return data

    async def main() -> None:
        beats: list[float] = []
        async with running(proxy.url, claim_timeout=60) as loop:
            proxy.to_client = delay

            async def heart() -> None:
                while True:
                    beats.append(time.monotonic())
                    await asyncio.sleep(0.01)

            beating = asyncio.create_task(heart())
            for number in range(200):
                loop.run_once(coroutine_job, f"job {number}")
            executed = EVENT_JOB_EXECUTED
            await loop.until(lambda: sum(event.code == executed for event in loop.events) == 200)
            took = time.monotonic() - beats[0]
            proxy.to_client = lambda data: data
            beating.cancel()
        longest = max(later - earlier for earlier, later in pairwise(beats))
        assert longest < took / 4, (longest, took)

    asyncio.run(main())
