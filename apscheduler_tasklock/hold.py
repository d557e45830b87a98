"""``TaskLocks.hold``: the same lock around any code, outside APScheduler."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from inspect import (
    isasyncgenfunction,
    isclass,
    iscoroutine,
    iscoroutinefunction,
    isgeneratorfunction,
)
from typing import TYPE_CHECKING, Any, TypeVar

from apscheduler_tasklock.asking import WantedClaim
from apscheduler_tasklock.context import HeldLock, Refusal, holding
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
    TaskLockRefusedError,
)
from apscheduler_tasklock.releases import Ending

if TYPE_CHECKING:
    from apscheduler_tasklock.locks import TaskLocks

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# Seconds after which it is looked again whether a run that seems dead is.
PAUSE = 0.3

LOST = (
    "Task %r: its lock is lost (token %s), and another replica may hold it. Either it could not be "
    "renewed in time, or what held it outlived max_lock; if so, raise that above what it takes"
)


class Hold:
    """A task lock to hold once: a context manager, sync or async. As a decorator, once per call.

    Made by ``TaskLocks.hold``.

    :param wanted: what is claimed each time
    """

    def __init__(self, locks: TaskLocks, wanted: WantedClaim) -> None:
        self._locks = locks
        self._name = wanted.task_name
        self._wanted = wanted
        self._entered = False
        self._held: HeldLock | None = None
        self._context = ExitStack()

    def __enter__(self) -> HeldLock:
        with self._entering():
            return self._make_current(self._claim())

    def __exit__(self, *_: object) -> None:
        self._release(self._leave())

    async def __aenter__(self) -> HeldLock:
        with self._entering():
            if self._locks.closed:
                self._claim()  # raises
            with self._locks.in_use:
                held = await self._locks.offload.claim(
                    self._claim, partial(self._release, ending=Ending.OPEN)
                )
            held.runs_on(asyncio.get_running_loop())
            return self._make_current(held)

    async def __aexit__(self, *_: object) -> None:
        # In a thread that goes on when this is cancelled.
        await self._locks.offload.release(partial(self._release, self._leave()))()

    def __call__(self, function: Function) -> Function:
        """Hold the lock around each call of a function or coroutine function.

        :raises TaskLockOptionError: a call of it only makes something that runs later, unlocked
        """
        if isclass(function) or isgeneratorfunction(function) or isasyncgenfunction(function):
            raise self._runs_later(function)
        if iscoroutinefunction(function) or iscoroutinefunction(_call_of(function)):

            @functools.wraps(function)
            async def held_coroutine(*args: Any, **kwargs: Any) -> Any:
                async with self._anew():
                    return await function(*args, **kwargs)

            return held_coroutine  # type: ignore[return-value]  # it has the same signature

        @functools.wraps(function)
        def held(*args: Any, **kwargs: Any) -> Any:
            with self._anew():
                result = function(*args, **kwargs)
                if iscoroutine(result):
                    result.close()
                    raise self._runs_later(function)
                return result

        return held  # type: ignore[return-value]  # it has the same signature

    def _runs_later(self, function: Callable[..., Any]) -> TaskLockOptionError:
        name = getattr(function, "__qualname__", repr(function))
        return TaskLockOptionError(
            f"hold({self._name!r}) cannot decorate {name}, whose body runs after the call; hold "
            "the lock inside it"
        )

    def _anew(self) -> Hold:
        return Hold(self._locks, self._wanted)

    def _entering(self) -> ExitStack:
        """Return a context in which this is entered; it is not if an exception leaves it."""
        if self._entered:
            raise TaskLockError(f"this hold of task {self._name!r} is entered already")
        self._entered = True
        entering = ExitStack()
        entering.push(self._not_entered)
        return entering

    def _not_entered(self, _type: object, exception: object, _traceback: object) -> None:
        self._entered = exception is None

    def _claim(self) -> HeldLock:
        claimed = self._locks.claim(self._wanted)
        # A run whose lease has ended counts as dead only after a while, in which it may be renewed
        # or released: right after an outage, and in a process that has just started.
        while isinstance(claimed, Refusal) and claimed.waits and not self._locks.wait(PAUSE):
            claimed = self._locks.claim(self._wanted)
        if not isinstance(claimed, HeldLock):
            raise TaskLockRefusedError(
                self._name, claimed.holder, claimed.locked_until, claimed.reason
            )
        return claimed

    def _make_current(self, held: HeldLock) -> HeldLock:
        self._held = held
        held.when_lost(partial(logger.warning, LOST, held.name, held.token))
        self._context.enter_context(holding(held))
        return held

    def _leave(self) -> HeldLock:
        held, self._held = self._held, None
        assert held is not None
        self._entered = False
        self._context.close()
        return held

    def _release(self, held: HeldLock, ending: Ending = Ending.KEEP) -> None:
        if held.inherited:
            return
        untold = held.untold
        try:
            released = self._locks.release(held, ending)
        except TaskLockDatabaseError:
            return  # logged as an outage; the release is owed
        except TaskLockError as error:
            logger.error(
                "Task %r: its lock could not be released, and is tried again until it ends by "
                "itself: %s",
                held.name,
                error,
            )
            return
        if released is None and untold:
            logger.warning(LOST, held.name, held.token)


def _call_of(function: Callable[..., Any]) -> Any:
    """Return what a call of an object runs."""
    return getattr(function, "__call__", None)  # noqa: B004  # what it is, not whether there is one
