"""TaskLockExecutor around the asyncio executor: coroutines and plain functions."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import apscheduler
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
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockEvent,
    TaskLockExecutor,
    current_lock,
    task_lock,
)
from tests.support.claims import RENEWS_OFTEN, end_maximum_lock, end_maximum_lock_here
from tests.support.event_loops import abandoned_loop
from tests.support.internals import abandon, coroutines, instances
from tests.support.polling import eventually
from tests.support.proxy import Gate, Proxy, counted
from tests.support.schedulers import executor_class
from tests.support.waist import LockClient, Timings

RUN = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]
RAISED = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_ERROR, EVENT_TASK_LOCK_RELEASED]


@pytest.fixture(
    autouse=True,
    params=[
        "asyncio",
        pytest.param(
            "uvloop",
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(sys.platform == "win32", reason="Windows has no uvloop"),
            ],
        ),
    ],
)
def _event_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the event loop of asyncio, or the one that uvicorn takes where it is installed."""
    if request.param == "uvloop":
        import uvloop

        monkeypatch.setattr(asyncio, "run", uvloop.run)
        monkeypatch.setattr(asyncio, "new_event_loop", uvloop.new_event_loop)


def number_handed_over(connection: psycopg.Connection[Any]) -> int:
    """Return how many runs have not ended, and are for others to take over at once."""
    handed_over = "handed_over AND finished_at IS NULL AND locked_until <= now()"
    return connection.execute(f"SELECT FROM task_lock WHERE {handed_over}").rowcount


def is_handed_over(connection: psycopg.Connection[Any]) -> bool:
    """Tell whether a run has not ended, and is for others to take over at once."""
    return number_handed_over(connection) == 1


def no_thread_is_left() -> bool:
    """Tell whether the library has ended its threads: once no coroutine needs them any more."""
    gc.collect()  # nothing else ends a coroutine that is thrown away with its loop
    return not [t for t in threading.enumerate() if t.name.startswith("tasklock")]


class Loop:
    """An AsyncIOScheduler on the running loop, and what its listeners were told on which thread."""

    def __init__(self, database: str, timings: Timings | None = None, **options: Any) -> None:
        self.executor = executor_class(timings)(database, **options)
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
            **{"misfire_grace_time": None, "next_run_time": now, **job},
        )

    def run_all(self, jobs: Sequence[Endless]) -> None:
        for number, job in enumerate(jobs):
            self.run_once(job.run, f"job {number}")

    async def shut_down(self) -> None:
        """Shut down as an application does whose loop ends right after."""
        self.scheduler.shutdown()
        await asyncio.sleep(0)  # in which the scheduler does it
        assert not self.scheduler.running

    def submit(self, function: Callable[..., Any]) -> None:
        """Submit a job in this turn of the loop, as the scheduler does in one of its own."""
        now = datetime.now(timezone.utc)
        self.run_once(function, next_run_time=now + timedelta(hours=1))
        self.executor.submit_job(self.scheduler.get_job("job"), [now])

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
        await loop.until(lambda: not any(instances(loop.executor).values()))
        await loop.until(lambda: not loop.scheduler.running)


async def coroutine_job(**kwargs: Any) -> Any:
    await asyncio.sleep(0)
    lock = current_lock()
    assert lock is not None
    return lock.token, kwargs


async def leaving_generator() -> None:
    raise GeneratorExit


def plain_job(**kwargs: Any) -> Any:
    lock = current_lock()
    assert lock is not None
    return lock.token, kwargs


@task_lock
async def failing_coroutine() -> None:
    raise ValueError("awaited")


def failing_function() -> None:
    raise ValueError("called")


def test_a_coroutine_that_raises_what_closes_one_has_run(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    """Taken for a closed one, it would be handed over, with failover, again and again."""

    async def main() -> None:
        async with running(database_url, failover=True) as loop:
            loop.run_once(leaving_generator)
            await loop.until(lambda: EVENT_TASK_LOCK_RELEASED in loop.codes())
            assert loop.codes() == RAISED

    asyncio.run(main())
    finished = "finished_at IS NOT NULL AND window_until > now()"
    assert connection.execute(f"SELECT FROM task_lock WHERE {finished}").rowcount == 1


@pytest.mark.parametrize("function", [coroutine_job, plain_job])
def test_a_job_runs_on_one_loop_and_is_refused_on_the_other(
    database_url: str, function: Callable[..., Any]
) -> None:
    async def main() -> None:
        async with running(database_url) as one, running(database_url) as other:
            one.run_once(function, kwargs={"a": 1, "task_lock": {"max_factor": 2}})
            await one.until(lambda: EVENT_TASK_LOCK_RELEASED in one.codes())
            other.run_once(function)
            await other.until(other.codes)
            assert one.codes() == RUN
            assert one.events[1].retval == (one.events[0].token, {"a": 1})
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
            assert loop.events[1].retval == "job"

    asyncio.run(main())
    assert current_lock() is None


@pytest.mark.parametrize("function", [failing_coroutine, failing_function])
def test_a_job_that_raises_is_released(
    database_url: str, function: Callable[..., Any], connection: psycopg.Connection[Any]
) -> None:
    async def main() -> None:
        async with running(database_url) as loop:
            loop.run_once(function)
            await loop.until(lambda: EVENT_TASK_LOCK_RELEASED in loop.codes())
            assert loop.codes() == RAISED
            assert isinstance(loop.events[1].exception, ValueError)
            assert f"in {function.__name__}" in loop.events[1].traceback

    asyncio.run(main())
    assert connection.execute("SELECT FROM task_lock WHERE finished_at IS NULL").rowcount == 0


@pytest.mark.nightly
def test_waiting_for_a_claim_does_not_make_a_coroutine_job_late(
    database_url: str, proxy: Proxy
) -> None:
    """Its misfire is decided when it fires, however long the claims before it take."""
    jobs, latency = 60, 0.6

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

    # The first claim of a new task has two answers; the others are made together after it, and so
    # after the grace time.
    assert latency * 2 > 1
    asyncio.run(main())


class Endless:
    """A coroutine job that does not end of its own, and notes in its clean-up whether it is cut."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.lost: list[bool] = []

    async def run(self) -> None:
        lock = current_lock()
        assert lock is not None
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.lost.append(lock.lost)


@pytest.mark.usefixtures("unhurried_stop")
@pytest.mark.parametrize("failover", [False, True])
@pytest.mark.parametrize("goes_on", [True, False], ids=["the loop goes on", "the loop ends"])
def test_a_coroutine_that_the_shutdown_cuts_is_released_or_with_failover_handed_over(
    proxy: Proxy, connection: psycopg.Connection[Any], failover: bool, goes_on: bool
) -> None:
    """At the latest when the shutdown is over: uvicorn ends the loop right after it."""
    event_loop = abandoned_loop()
    jobs = []

    def delay(data: bytes) -> bytes:
        time.sleep(0.2)  # is the latency
        return data

    async def main() -> Loop:
        job = Endless()
        jobs.append(job)
        loop = Loop(proxy.url, failover=failover)
        loop.scheduler.start()
        loop.run_once(job.run)
        await asyncio.wait_for(job.started.wait(), 60)
        proxy.to_client = delay
        await loop.shut_down()
        if goes_on:
            await loop.until(lambda: not any(instances(loop.executor).values()))
        return loop

    loop = event_loop.run_until_complete(main())
    event_loop.close()
    assert is_handed_over(connection) is failover
    released = "finished_at IS NOT NULL AND window_until > now()"
    kept = connection.execute(f"SELECT FROM task_lock WHERE {released}").rowcount == 1
    assert kept is not failover
    if goes_on:
        assert jobs[0].lost == [True]
        assert sorted(loop.codes()) == sorted(RAISED)
    del loop, jobs[:]
    eventually(no_thread_is_left)


@pytest.mark.usefixtures("unhurried_stop")
def test_many_coroutines_that_a_shutdown_cuts_are_handed_over_together(
    proxy: Proxy, connection: psycopg.Connection[Any]
) -> None:
    """One after the other, most would not be within the time of a shutdown."""
    jobs = [Endless() for _ in range(40)]

    async def main() -> None:
        loop = Loop(proxy.url, failover=True)
        loop.scheduler.start()
        loop.run_all(jobs)
        await asyncio.wait_for(asyncio.gather(*(job.started.wait() for job in jobs)), 60)
        sent = counted(proxy)
        await loop.shut_down()
        # The first may go alone, and the others come while it is under way.
        assert len(sent) < len(jobs) / 4

    asyncio.run(main())
    assert number_handed_over(connection) == len(jobs)


def test_they_are_handed_over_although_their_connection_is_dead(
    proxy: Proxy, connection: psycopg.Connection[Any]
) -> None:
    """As where a balancer has forgotten it: the shutdown has time to send it once more."""
    jobs = [Endless() for _ in range(5)]

    async def main() -> None:
        loop = Loop(proxy.url, failover=True)
        loop.scheduler.start()
        loop.run_all(jobs)
        await asyncio.wait_for(asyncio.gather(*(job.started.wait() for job in jobs)), 60)
        last = proxy.accepted
        proxy.tap = lambda number, _to_server, data: b"" if number <= last else data
        await loop.shut_down()

    asyncio.run(main())
    assert number_handed_over(connection) == len(jobs)


@pytest.mark.usefixtures("unhurried_stop")
def test_claims_of_coroutines_under_way_at_a_shutdown_are_handed_over_together(
    proxy: Proxy, connection: psycopg.Connection[Any]
) -> None:
    """One after the other, the process would take long to end."""
    jobs = [Endless() for _ in range(40)]

    def delay(data: bytes) -> bytes:
        time.sleep(0.2)  # is the latency
        return data

    async def main() -> None:
        loop = Loop(proxy.url, failover=True)
        loop.scheduler.start()
        proxy.to_client = delay
        loop.run_all(jobs)
        claimed = "SELECT FROM task_lock WHERE kind IS NOT NULL"
        await loop.until(lambda: connection.execute(claimed).rowcount > len(jobs) / 2)
        sent = counted(proxy)
        await loop.shut_down()
        assert len(sent) < len(jobs) / 4

    asyncio.run(main())
    claimed = connection.execute("SELECT FROM task_lock WHERE kind IS NOT NULL").rowcount
    assert number_handed_over(connection) == claimed


@pytest.mark.usefixtures("unhurried_stop")
def test_a_window_that_a_shutdown_has_cut_is_run_by_another_replica_at_once(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    """Also by one that has just started, and believes no dead run yet."""

    async def main() -> tuple[Loop, Loop]:
        job = Endless()
        async with running(database_url, failover=True) as one:
            one.run_once(job.run)
            await asyncio.wait_for(job.started.wait(), 60)
            async with running(database_url, failover=True, poll_interval=0.5) as other:
                other.run_once(other_run)
                await other.until(other.codes)
                one.scheduler.shutdown()
                await other.until(lambda: EVENT_TASK_LOCK_RELEASED in other.codes())
        return one, other

    async def other_run() -> int:
        lock = current_lock()
        assert lock is not None
        return lock.token

    # The same function to the lock, as on replicas of one application.
    other_run.__qualname__ = Endless.run.__qualname__
    one, other = asyncio.run(main())
    assert other.codes() == [EVENT_TASK_LOCK_REFUSED, *RUN]
    assert other.events[-2].retval > one.events[0].token


@pytest.mark.parametrize("failover", [False, True])
def test_a_coroutine_cancelled_at_its_maximum_lock_is_released_or_with_failover_given_up(
    database_url: str, connection: psycopg.Connection[Any], failover: bool
) -> None:
    """Nobody may run its window again by then, which is told."""

    async def main() -> None:
        async def endless(**_: Any) -> None:
            lock = current_lock()
            assert lock is not None
            try:
                while True:  # also after the answer of a renewal that was on its way
                    end_maximum_lock_here(lock)
                    await asyncio.sleep(0.01)
            finally:  # it is cancelled, and its claim is no longer renewed
                end_maximum_lock(connection, lock)

        options = {"cancel_on_lost": True, "max_lock": 1200, "lease": 600}
        async with running(
            database_url, failover=failover, poll_interval=0.5, timings=RENEWS_OFTEN
        ) as loop:
            loop.run_once(endless, kwargs={"task_lock": options})
            await loop.until(lambda: EVENT_TASK_LOCK_RELEASED in loop.codes())
            if failover:
                await loop.until(lambda: EVENT_TASK_LOCK_ERROR in loop.codes())
            told = {EVENT_TASK_LOCK_LOST, *RAISED, *([EVENT_TASK_LOCK_ERROR] * failover)}
            assert sorted(loop.codes()) == sorted(told)
            ended = [e.reason for e in loop.events if e.code == EVENT_TASK_LOCK_RELEASED]
            assert ended == ["handed over" if failover else None]

    asyncio.run(main())
    over = (
        "SELECT last_outcome, failures, deaths FROM task_lock"
        " WHERE finished_at IS NOT NULL AND window_until > now()"
    )
    assert connection.execute(over).fetchall() == [("overran", 1, 0)]
    runs = connection.execute("SELECT outcome FROM task_lock_run").fetchall()
    assert runs == [("overran",)]


@pytest.mark.usefixtures("unhurried_stop")
def test_a_release_on_its_way_when_the_scheduler_is_shut_down_arrives_before_the_loop_ends(
    proxy: Proxy, connection: psycopg.Connection[Any]
) -> None:
    sent = threading.Event()

    def delay(data: bytes) -> bytes:
        sent.set()
        time.sleep(0.5)  # is the latency
        return data

    async def main() -> None:
        loop = Loop(proxy.url)
        loop.scheduler.start()

        async def job() -> None:
            proxy.to_server = delay

        loop.run_once(job)
        await loop.until(sent.is_set)
        loop.scheduler.shutdown()
        await asyncio.sleep(0)  # in which the scheduler does it
        assert connection.execute("SELECT FROM task_lock WHERE finished_at IS NOT NULL").rowcount

    asyncio.run(main())


def open_when_it_stops(gate: Gate, executor: TaskLockExecutor) -> None:
    """Let the answers through once a shutdown has begun, which may wait for them."""
    eventually(lambda: executor.user.closed)
    gate.open()


@pytest.mark.usefixtures("unhurried_stop")
def test_a_claim_under_way_when_the_scheduler_is_shut_down_is_handed_over(
    proxy: Proxy,
    gate: Gate,
    connection: psycopg.Connection[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its job has not begun, so nothing is told of a run, and another replica runs the window."""

    async def main() -> Loop:
        async with running(proxy.url, claim_timeout=60) as loop:
            gate.shut()
            loop.run_once(coroutine_job)
            await gate.until_reached()
            # While the shutdown waits for it.
            opening = threading.Thread(target=open_when_it_stops, args=[gate, loop.executor])
            opening.start()
            loop.scheduler.shutdown()
            await loop.until(lambda: not loop.scheduler.running)
            return loop

    loop = asyncio.run(main())
    assert loop.codes() == []
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert is_handed_over(connection)


@pytest.mark.nightly
def test_a_loop_that_ends_without_another_turn_leaves_no_lock(
    proxy: Proxy, gate: Gate, connection: psycopg.Connection[Any]
) -> None:
    """Nothing is cancelled; the coroutine is thrown away where it waits for its claim."""
    event_loop = abandoned_loop()

    async def main() -> LockClient:
        loop = Loop(proxy.url, claim_timeout=60)
        loop.scheduler.start()
        gate.shut()
        loop.run_once(coroutine_job)
        await gate.until_reached()
        abandon(loop.executor)
        return loop.executor.user

    locks = event_loop.run_until_complete(main())
    event_loop.close()
    gate.open()
    eventually(lambda: is_handed_over(connection))
    del event_loop
    eventually(no_thread_is_left)
    assert locks.closed


@pytest.mark.usefixtures("unhurried_stop")
def test_a_run_whose_release_is_cut_short_by_shutdown_is_told_as_it_ended(
    proxy: Proxy, gate: Gate
) -> None:
    async def ends() -> int:
        gate.shut()
        return 7

    async def main() -> None:
        async with running(proxy.url) as loop:
            loop.run_once(ends)
            await gate.until_reached()
            # While the shutdown waits for the release.
            opening = threading.Thread(target=open_when_it_stops, args=[gate, loop.executor])
            opening.start()
            loop.scheduler.shutdown()
            await loop.until(lambda: EVENT_JOB_EXECUTED in loop.codes())
            await loop.until(lambda: EVENT_TASK_LOCK_RELEASED in loop.codes())
            assert EVENT_JOB_ERROR not in loop.codes()
            reasons = [getattr(event, "reason", None) for event in loop.events]
            assert "handed over" not in reasons

    asyncio.run(main())


def test_cancelled_in_the_first_of_several_run_times_it_claims_no_other(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def endless() -> None:
            started.set()
            await asyncio.Event().wait()

        async with running(database_url) as loop:
            start = datetime.now(timezone.utc) - timedelta(hours=2, minutes=1)
            loop.run_once(endless, next_run_time=start, start_date=start, coalesce=False)
            await asyncio.wait_for(started.wait(), 60)
            (run,) = coroutines(loop.executor)
            run.cancel()  # as asyncio.run does with every task there is, at its end
            await loop.until(lambda: not any(instances(loop.executor).values()))
            await loop.until(lambda: EVENT_TASK_LOCK_RELEASED in loop.codes())
            assert loop.codes() == RAISED
            claimed.append(loop.events[0].token)

    claimed: list[int] = []
    asyncio.run(main())
    assert connection.execute("SELECT token FROM task_lock").fetchone() == (claimed[0],)


@pytest.mark.usefixtures("unhurried_stop")
def test_a_coroutine_that_was_submitted_right_before_the_shutdown_is_not_begun(
    database_url: str, connection: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """In the same turn of the loop. It may have been claimed by then, and is handed over."""

    async def main() -> None:
        async with running(database_url, claim_timeout=180) as loop:
            # While a shutdown waits for it, a connection has a short limit.
            await asyncio.to_thread(loop.executor.user.rights.check)
            loop.submit(coroutine_job)
            coroutines(loop.executor).clear()  # tornado's executor cancels nothing
            loop.executor.shutdown()
            await loop.until(lambda: not any(instances(loop.executor).values()))
            assert loop.codes() == []

    asyncio.run(main())
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    claimed = connection.execute("SELECT FROM task_lock WHERE kind IS NOT NULL").rowcount
    assert number_handed_over(connection) == claimed


@pytest.mark.usefixtures("unhurried_stop")
def test_a_shutdown_sends_pending_releases_before_the_loop_may_end(
    proxy: Proxy, connection: psycopg.Connection[Any]
) -> None:
    async def ends() -> None:
        proxy.accepting = False
        proxy.cut_all()

    async def main() -> None:
        async with running(proxy.url) as loop:
            loop.run_once(ends)
            await loop.until(lambda: EVENT_TASK_LOCK_ERROR in loop.codes())
            await loop.until(lambda: not any(instances(loop.executor).values()))
            proxy.accepting = True
            loop.executor.shutdown()
            assert connection.execute(released).rowcount == 1

    released = "SELECT FROM task_lock WHERE finished_at IS NOT NULL"
    asyncio.run(main())


def test_a_thread_pool_tells_of_its_jobs_without_the_loop_of_its_scheduler(
    database_url: str,
) -> None:

    async def main() -> None:
        async with running(database_url, executor="threadpool") as loop:
            executed = threading.Event()
            loop.scheduler.add_listener(lambda _: executed.set(), EVENT_JOB_EXECUTED)
            loop.submit(plain_job)
            assert executed.wait(60)  # the loop does not turn meanwhile
            run = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]
            eventually(lambda: loop.codes() == run)

    asyncio.run(main())


@pytest.mark.skipif(
    apscheduler.version_info < (3, 11), reason="APScheduler 3.10 stays with its first event loop"
)
def test_started_again_on_another_loop_it_tells_its_events_there(database_url: str) -> None:
    loops: list[Loop] = []

    async def run_once(loop: Loop) -> None:
        loop.scheduler.start()
        loop.events.clear()
        loop.run_once(coroutine_job, replace_existing=True)
        await loop.until(lambda: loop.codes() == RUN)
        await loop.shut_down()
        loop.scheduler.remove_all_jobs()

    async def first() -> None:
        loops.append(Loop(database_url, min_factor=0))
        await run_once(loops[0])

    async def again() -> None:
        loops[0].threads.clear()
        await run_once(loops[0])

    asyncio.run(first())
    # As where each test of an application has a loop of its own.
    thread = threading.Thread(target=lambda: asyncio.run(again()), name="the other loop's")
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert loops[0].threads == {"the other loop's"}


def test_claims_do_not_block_the_event_loop(database_url: str, proxy: Proxy) -> None:
    """While 200 coroutine jobs are claimed, no answer comes before the event loop has gone on.

    Waited for on the loop, a single answer would stop it, and so its heartbeat.
    """
    beats = 0
    done = threading.Event()
    came_without: list[bytes] = []

    def wait_for_beats(data: bytes) -> bytes:
        before = beats
        deadline = time.monotonic() + 20
        while beats < before + 3 and not done.is_set():
            if time.monotonic() > deadline:
                came_without.append(data)
                break
            time.sleep(0.001)
        return data

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.01)

    async def main() -> None:
        async with running(proxy.url, claim_timeout=60) as loop:
            beating = asyncio.create_task(beat())
            proxy.to_client = wait_for_beats
            for number in range(200):
                loop.run_once(coroutine_job, f"job {number}")
            executed = EVENT_JOB_EXECUTED
            await loop.until(lambda: sum(event.code == executed for event in loop.events) == 200)
            done.set()
            beating.cancel()

    asyncio.run(main())
    assert beats > 3
    assert not came_without
