"""A lifespan for FastAPI and Starlette that starts and stops a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import BaseScheduler

from apscheduler_tasklock.draining import stop_claiming, task_lock_executors
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.executor import TaskLockExecutor
from apscheduler_tasklock.options import parse_seconds

__all__ = ["scheduler_lifespan"]

Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]

# Seconds that coroutines have for their clean-up when they are cancelled.
_CLEAN_UP_TIMEOUT = 5.0


def scheduler_lifespan(
    scheduler: Callable[[], BaseScheduler] | BaseScheduler,
    lifespan: Lifespan | None = None,
    *,
    drain_timeout: float | timedelta = 0,
) -> Lifespan:
    """Return a lifespan that runs a scheduler while the application runs.

    The scheduler is ``request.state.scheduler`` and ``app.state.scheduler``. When the application
    stops, nothing more is claimed; what runs in threads and processes is waited for, while the
    event loop goes on; coroutines are cancelled, as APScheduler does, and handed over if they have
    ``failover``.

    :param scheduler: a function that makes an ``AsyncIOScheduler`` or a ``BackgroundScheduler``
        with its jobs, called at each start; or such a scheduler, which can be started once
    :param lifespan: the application's own. It is entered before the scheduler starts, and left
        after it has stopped.
    :param drain_timeout: how long coroutines may go on until they are cancelled, a ``timedelta`` or
        seconds
    :return: what ``FastAPI(lifespan=...)`` and ``Starlette(lifespan=...)`` take
    :raises TaskLockOptionError: the scheduler is of another kind, or ``drain_timeout`` is no time;
        at the start: it has been started before
    """
    where = "scheduler_lifespan"
    drains = parse_seconds(drain_timeout, "drain_timeout", where)
    make = _checked(scheduler) if isinstance(scheduler, BaseScheduler) else scheduler
    if not callable(make):
        raise TaskLockOptionError(
            f"{where}: give it a scheduler, or a function that makes one, not {scheduler!r}"
        )

    last: list[BaseScheduler] = []

    @asynccontextmanager
    async def run(app: Any) -> AsyncIterator[Mapping[str, Any]]:
        async with _entered(lifespan, app) as state:
            made = make()
            if not isinstance(made, (AsyncIOScheduler, BackgroundScheduler)):
                raise TaskLockOptionError(
                    f"{where}: it runs an AsyncIOScheduler or a BackgroundScheduler, not {made!r}"
                )
            _check_new(made, last)
            await _start(made)
            last[:] = [made]
            app.state.scheduler = made
            try:
                yield {**(state or {}), "scheduler": made}
            finally:
                await _stop(made, drains)

    return run


def _check_new(made: BaseScheduler, last: list[BaseScheduler]) -> None:
    """Make sure that a scheduler is not the one of an earlier start, whose jobs are gone.

    :raises TaskLockOptionError: it is, or it runs already
    """
    if made.running or made in last:
        raise TaskLockOptionError(
            "scheduler_lifespan: the function returned a scheduler that has been started before. "
            "It has to make a scheduler and add its jobs each time that it is called, and not "
            "start it"
        )


def _checked(scheduler: BaseScheduler) -> Callable[[], BaseScheduler]:
    """Return what gives a scheduler out once: its jobs are gone after it was shut down."""
    given: list[BaseScheduler] = []

    def give() -> BaseScheduler:
        if given or scheduler.running:
            raise TaskLockOptionError(
                "scheduler_lifespan: the scheduler has been started before. Do not start it "
                "yourself; and if the application is started several times, as by tests, give a "
                "function that makes the scheduler and adds its jobs"
            )
        given.append(scheduler)
        return scheduler

    return give


@asynccontextmanager
async def _entered(lifespan: Lifespan | None, app: Any) -> AsyncIterator[Mapping[str, Any] | None]:
    if lifespan is None:
        yield None
    else:
        async with lifespan(app) as state:
            yield state


async def _start(scheduler: BaseScheduler) -> None:
    if isinstance(scheduler, BackgroundScheduler):
        await asyncio.to_thread(scheduler.start)
    else:
        scheduler.start()  # it takes the running loop


async def _stop(scheduler: BaseScheduler, drain_timeout: float) -> None:
    if not scheduler.running:
        return  # somebody has shut it down
    executors = task_lock_executors(scheduler)
    stop_claiming(scheduler)  # at once: a thread may have to wait for jobs to end
    try:
        if drain_timeout:
            await _drain(executors, drain_timeout)
        await _drain(executors, None, coroutines=False)
    finally:
        if not scheduler.running:
            pass  # somebody has shut it down meanwhile, as a call that the event loop makes later
        elif isinstance(scheduler, BackgroundScheduler):
            await asyncio.to_thread(scheduler.shutdown)
        else:
            await _shut_down_on_loop(scheduler)
            await _drain(executors, _CLEAN_UP_TIMEOUT)


async def _drain(
    executors: list[TaskLockExecutor], timeout: float | None, *, coroutines: bool = True
) -> None:
    await asyncio.gather(
        *(asyncio.to_thread(e.drain, timeout, coroutines=coroutines) for e in executors)
    )


async def _shut_down_on_loop(scheduler: AsyncIOScheduler) -> None:
    """Shut it down, and wait until that is done: it is called by the loop, a moment later."""
    scheduler.shutdown(wait=False)
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon_threadsafe(done.set)
    await done.wait()
