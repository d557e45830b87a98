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
from apscheduler_tasklock.errors import TaskLockOptionError, raised_at_the_call
from apscheduler_tasklock.executor import TaskLockExecutor
from apscheduler_tasklock.options import parse_seconds

__all__ = ["scheduler_lifespan"]

Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]

# Limits the wait for cancelled coroutines to clean up, in seconds.
_CLEAN_UP_TIMEOUT = 5.0


@raised_at_the_call
def scheduler_lifespan(
    scheduler: Callable[[], BaseScheduler] | BaseScheduler,
    lifespan: Lifespan | None = None,
    *,
    drain_timeout: float | timedelta = 0,
) -> Lifespan:
    """Return a lifespan that runs a scheduler while the application runs.

    The application finds the scheduler as ``request.state.scheduler`` and ``app.state.scheduler``.
    When the application stops, nothing more is claimed. The lifespan waits for jobs in threads and
    processes, while the event loop goes on. Coroutine jobs are cancelled, as in APScheduler's own
    shutdown, and their windows are handed over if the jobs have ``failover``.

    :param scheduler: a function that makes an ``AsyncIOScheduler`` or a ``BackgroundScheduler`` and
        adds its jobs, called at each start of the application; or the scheduler itself, with which
        the application can be started once
    :param lifespan: the application's own lifespan. It is entered before the scheduler starts, and
        left after the scheduler has stopped.
    :param drain_timeout: limits how long coroutines go on until they are cancelled; a ``timedelta``
        or seconds
    :return: the lifespan, for ``FastAPI(lifespan=...)`` or ``Starlette(lifespan=...)``
    :raises TaskLockOptionError: ``scheduler`` is neither a scheduler nor a function, or
        ``drain_timeout`` is no time. The lifespan raises this error if the scheduler is neither an
        ``AsyncIOScheduler`` nor a ``BackgroundScheduler``, or was started before.
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
    """Check that a scheduler is new, because a scheduler has lost its jobs after a shutdown.

    :raises TaskLockOptionError: the scheduler was started before, or runs
    """
    if made.running or made in last:
        raise TaskLockOptionError(
            "scheduler_lifespan: the function returned a scheduler that has been started before. "
            "It has to make a scheduler and add its jobs each time that it is called, and not "
            "start it"
        )


def _checked(scheduler: BaseScheduler) -> Callable[[], BaseScheduler]:
    """Return a function that returns this scheduler once, and raises when it is called again.

    A scheduler cannot be started a second time, because it loses its jobs in its shutdown.
    """
    started: list[BaseScheduler] = []

    def make() -> BaseScheduler:
        if started or scheduler.running:
            raise TaskLockOptionError(
                "scheduler_lifespan: the scheduler has been started before. Do not start it "
                "yourself; and if the application is started several times, for example by tests, "
                "give a function that makes the scheduler and adds its jobs"
            )
        started.append(scheduler)
        return scheduler

    return make


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
        scheduler.start()  # here, because it uses the event loop of this thread


async def _stop(scheduler: BaseScheduler, drain_timeout: float) -> None:
    if not scheduler.running:
        return  # because the application has shut it down
    executors = task_lock_executors(scheduler)
    # Claiming is stopped at once, because `drain` needs a thread of the loop's pool, which may have
    # no free thread until jobs end.
    stop_claiming(scheduler)
    try:
        if drain_timeout:
            await _drain(executors, drain_timeout)
        await _drain(executors, None, coroutines=False)
    finally:
        if not scheduler.running:
            pass  # the application has shut it down meanwhile
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
    """Shut a scheduler down, and wait until the event loop has carried out the shutdown."""
    scheduler.shutdown(wait=False)
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon_threadsafe(done.set)
    await done.wait()
