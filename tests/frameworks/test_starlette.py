"""The lifespan in this process: which schedulers it takes, and what a stop does to jobs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from typing import Any

import psycopg
import pytest
import starlette
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import BaseScheduler
from apscheduler.schedulers.blocking import BlockingScheduler
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from apscheduler_tasklock import TaskLockExecutor, TaskLockOptionError, TaskLockSchemaError
from apscheduler_tasklock.starlette import scheduler_lifespan
from tests.frameworks.servers import unfinished, windows
from tests.support.internals import finish_pass
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxy_to

KINDS = [AsyncIOScheduler, BackgroundScheduler]

Make = Callable[..., BaseScheduler]


@pytest.fixture
def make(database_url: str) -> Make:
    """Make a scheduler with jobs that are due at once."""

    def make(kind: type[BaseScheduler], *functions: Any, **options: Any) -> BaseScheduler:
        options = {"database": database_url, **options}
        scheduler = kind(executors={"default": TaskLockExecutor(**options)})
        for function in functions:
            # No one-off job, because APScheduler's thread fails if the stop comes before the pass
            # that has submitted the job removes it.
            now = datetime.now(timezone.utc)
            hourly = {"trigger": "interval", "hours": 1, "next_run_time": now}
            scheduler.add_job(function, id=function.__name__, misfire_grace_time=None, **hourly)
        return scheduler

    return make


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    with proxy_to(database_url) as proxy:
        yield proxy


async def until(condition: Callable[[], Any]) -> None:
    await asyncio.to_thread(eventually, condition)


def running(lifespan: Any) -> Any:
    return lifespan(Starlette())


@pytest.mark.parametrize("kind", KINDS)
def test_the_scheduler_runs_while_the_application_does(
    kind: type[BaseScheduler], make: Make, connection: psycopg.Connection[Any]
) -> None:
    app, ran = Starlette(), threading.Event()

    def job() -> None:
        ran.set()

    async def main() -> None:
        async with scheduler_lifespan(lambda: make(kind, job))(app) as state:
            assert state == {"scheduler": app.state.scheduler}
            assert app.state.scheduler.running
            await until(ran.is_set)
        assert not app.state.scheduler.running

    asyncio.run(main())
    assert len(windows(connection, "job")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_makes_a_scheduler_for_each_start(kind: type[BaseScheduler], make: Make) -> None:
    def job() -> None: ...

    lifespan = scheduler_lifespan(lambda: make(kind, job))
    app = Starlette()

    async def main() -> None:
        async with lifespan(app):
            assert app.state.scheduler.running

    for _ in range(2):  # each on an event loop of its own
        asyncio.run(main())
        assert not app.state.scheduler.running


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_itself_is_started_once(kind: type[BaseScheduler], make: Make) -> None:
    scheduler = make(kind)
    lifespan = scheduler_lifespan(scheduler)

    async def main() -> None:
        async with running(lifespan):
            assert scheduler.running

    asyncio.run(main())
    with pytest.raises(TaskLockOptionError, match="give a function that makes the scheduler"):
        asyncio.run(main())


def test_a_scheduler_that_runs_already_is_an_error(make: Make) -> None:
    scheduler = make(BackgroundScheduler)
    scheduler.start()
    try:
        with pytest.raises(TaskLockOptionError, match="Do not start it yourself"):
            asyncio.run(running(scheduler_lifespan(scheduler)).__aenter__())
    finally:
        scheduler.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_that_returns_its_scheduler_of_before_is_an_error(
    kind: type[BaseScheduler], make: Make
) -> None:
    scheduler = make(kind)
    lifespan = scheduler_lifespan(lambda: scheduler)

    async def main() -> None:
        async with running(lifespan):
            assert scheduler.running

    asyncio.run(main())
    with pytest.raises(TaskLockOptionError, match="make a scheduler and add its jobs each time"):
        asyncio.run(main())


def test_a_function_that_starts_its_scheduler_is_an_error(make: Make) -> None:
    scheduler = make(BackgroundScheduler)
    scheduler.start()
    try:
        with pytest.raises(TaskLockOptionError, match="not start it"):
            asyncio.run(running(scheduler_lifespan(lambda: scheduler)).__aenter__())
    finally:
        scheduler.shutdown()


def test_a_scheduler_of_another_kind_is_an_error(make: Make) -> None:
    with pytest.raises(TaskLockOptionError, match="AsyncIOScheduler or a BackgroundScheduler"):
        asyncio.run(running(scheduler_lifespan(lambda: make(BlockingScheduler))).__aenter__())
    with pytest.raises(TaskLockOptionError, match="not 3"):
        scheduler_lifespan(3)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(TaskLockOptionError, match="drain_timeout"):
        scheduler_lifespan(lambda: make(AsyncIOScheduler), drain_timeout="soon")  # type: ignore[arg-type]  # refused


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_table_the_application_does_not_start(
    kind: type[BaseScheduler], make: Make, empty_database_url: str
) -> None:
    lifespan = scheduler_lifespan(lambda: make(kind, database=empty_database_url))
    with pytest.raises(TaskLockSchemaError):
        asyncio.run(running(lifespan).__aenter__())


@pytest.mark.parametrize("kind", KINDS)
def test_the_applications_own_lifespan_is_around_the_scheduler(
    kind: type[BaseScheduler], make: Make
) -> None:
    app = Starlette()
    seen: list[Any] = []

    @asynccontextmanager
    async def own(app: Starlette) -> AsyncIterator[Mapping[str, Any]]:
        seen.append(hasattr(app.state, "scheduler"))
        yield {"name": "shop"}
        seen.append(app.state.scheduler.running)

    async def main() -> None:
        async with scheduler_lifespan(lambda: make(kind), own)(app) as state:
            assert state == {"name": "shop", "scheduler": app.state.scheduler}

    asyncio.run(main())
    assert seen == [False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_the_event_loop_goes_on_while_a_thread_is_waited_for(
    kind: type[BaseScheduler], make: Make, connection: psycopg.Connection[Any]
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        assert may_end.wait(60)

    async def main() -> None:
        lifespan = running(scheduler_lifespan(lambda: make(kind, job)))
        await lifespan.__aenter__()
        await until(begun.is_set)
        stop = asyncio.create_task(lifespan.__aexit__(None, None, None))
        _, pending = await asyncio.wait([stop], timeout=0.2)  # in which it does not end
        assert pending
        assert unfinished(connection) == 1
        may_end.set()  # which this loop only comes to if it is not blocked
        await stop

    asyncio.run(main())
    assert unfinished(connection) == 0
    assert len(windows(connection, "job")) == 1


def stop_in_the_middle(
    coroutine: Callable[[], Awaitable[None]], seen: list[str], make: Make, **options: Any
) -> None:
    """Stop an application as soon as a coroutine has written down that it has begun."""

    async def main() -> None:
        lifespan = scheduler_lifespan(
            lambda: make(AsyncIOScheduler, coroutine, failover=True), **options
        )
        async with running(lifespan):
            await until(lambda: bool(seen))
        seen.append("stopped")

    asyncio.run(main())


def test_a_coroutine_is_cancelled_handed_over_and_cleans_up_before_the_end(
    make: Make, connection: psycopg.Connection[Any]
) -> None:
    seen: list[str] = []

    async def job() -> None:
        seen.append("begins")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("cleans up")

    stop_in_the_middle(job, seen, make)
    assert seen == ["begins", "cleans up", "stopped"]
    row = connection.execute("SELECT handed_over, locked_until <= now() FROM task_lock").fetchone()
    assert row == (True, True)


def test_a_coroutine_ends_by_itself_within_the_drain_timeout(
    make: Make, connection: psycopg.Connection[Any]
) -> None:
    seen: list[str] = []

    async def job() -> None:
        seen.append("begins")
        await asyncio.sleep(0.5)  # while the application stops
        seen.append("ends")

    stop_in_the_middle(job, seen, make, drain_timeout=60)
    assert seen == ["begins", "ends", "stopped"]
    assert len(windows(connection, "job")) == 1


def test_the_event_loop_goes_on_while_a_thread_without_locks_is_waited_for() -> None:
    begun, may_end = threading.Event(), threading.Event()
    seen: list[bool] = []
    scheduler = BackgroundScheduler()

    @scheduler.scheduled_job("date", misfire_grace_time=None)
    def job() -> None:
        begun.set()
        seen.append(may_end.wait(20))

    async def main() -> None:
        async with running(scheduler_lifespan(scheduler)):
            await until(begun.is_set)
            finish_pass(scheduler)
            asyncio.get_running_loop().call_later(0.2, may_end.set)  # while the application stops

    asyncio.run(main())
    assert seen == [True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("awaited", [True, False])
def test_a_stop_ends_while_the_database_is_unavailable(
    kind: type[BaseScheduler], awaited: bool, make: Make, proxy: Proxy
) -> None:
    if awaited and kind is BackgroundScheduler:
        pytest.skip("its jobs are no coroutines")
    begun, may_end = threading.Event(), threading.Event()

    def thread() -> None:
        begun.set()
        assert may_end.wait(60)

    async def coroutine() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        job = coroutine if awaited else thread
        lifespan = scheduler_lifespan(lambda: make(kind, job, database=proxy.url))
        async with running(lifespan):
            await until(begun.is_set)
            proxy.close()
            may_end.set()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_job_that_waits_for_a_thread_does_not_begin_any_more(
    make: Make, connection: psycopg.Connection[Any]
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    seen: list[str] = []

    def first() -> None:
        begun.set()
        assert may_end.wait(60)

    def second() -> None:
        seen.append("second")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        async with running(scheduler_lifespan(lambda: make(AsyncIOScheduler, first, second))):
            while not begun.is_set():
                await asyncio.sleep(0.01)
            loop.call_later(0.3, may_end.set)  # while the application stops

    asyncio.run(main())
    assert seen == []
    assert len(windows(connection, "first")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_that_somebody_has_shut_down_is_left_alone(
    kind: type[BaseScheduler], make: Make
) -> None:
    app = Starlette()

    async def main() -> None:
        async with scheduler_lifespan(lambda: make(kind))(app):
            # The event loop does so a moment later with an AsyncIOScheduler of APScheduler 3.11.
            app.state.scheduler.shutdown(wait=False)

    asyncio.run(main())
    assert not app.state.scheduler.running


def test_an_error_of_the_application_stops_the_scheduler_and_is_raised(make: Make) -> None:
    app = Starlette()

    async def main() -> None:
        async with scheduler_lifespan(lambda: make(AsyncIOScheduler))(app):
            raise ValueError("of the application")

    with pytest.raises(ValueError, match="of the application"):
        asyncio.run(main())
    assert not app.state.scheduler.running


def test_no_job_without_a_lock_begins_while_the_application_stops(make: Make) -> None:
    begun, may_end = threading.Event(), threading.Event()
    seen: list[str] = []

    def job() -> None:
        begun.set()
        assert may_end.wait(60)

    async def main() -> None:
        scheduler = make(AsyncIOScheduler, job, enabled=False)
        lifespan = running(scheduler_lifespan(scheduler))
        await lifespan.__aenter__()
        await until(begun.is_set)
        stop = asyncio.create_task(lifespan.__aexit__(None, None, None))
        await asyncio.sleep(0)  # in which it begins
        scheduler.add_job(seen.append, args=["late"], id="late", misfire_grace_time=None)
        await asyncio.wait([stop], timeout=0.3)  # in which the job would begin
        may_end.set()
        await stop

    asyncio.run(main())
    assert seen == []


def test_jobs_without_a_lock_are_waited_for_as_well(make: Make) -> None:
    begun, ended = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        ended.wait(0.3)  # while the application stops
        ended.set()

    async def main() -> None:
        scheduler = make(AsyncIOScheduler, job, enabled=False)
        async with running(scheduler_lifespan(scheduler)):
            await until(begun.is_set)
        assert ended.is_set()

    asyncio.run(main())


@pytest.mark.skipif(
    starlette.__version__.startswith("0."),
    reason="its test client warns by itself; test_starlette_page.py uses it in another process",
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_test_client_starts_and_stops_the_application_twice(
    kind: type[BaseScheduler], make: Make
) -> None:
    from starlette.testclient import TestClient

    async def jobs(request: Request) -> JSONResponse:
        assert request.state.scheduler is request.app.state.scheduler
        return JSONResponse([job.id for job in request.state.scheduler.get_jobs()])

    def make_scheduler() -> BaseScheduler:
        scheduler = make(kind)
        scheduler.add_job(print, "interval", hours=1, id="print")
        return scheduler

    lifespan = scheduler_lifespan(make_scheduler)
    app = Starlette(routes=[Route("/", jobs)], lifespan=lifespan)
    for _ in range(2):
        with TestClient(app) as client:
            assert client.get("/").json() == ["print"]
            assert app.state.scheduler.running
        assert not app.state.scheduler.running
