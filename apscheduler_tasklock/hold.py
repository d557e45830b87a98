"""``TaskLocks.hold``: the same lock around any code, outside APScheduler."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from inspect import isasyncgenfunction, isclass, iscoroutinefunction, isgeneratorfunction
from typing import TYPE_CHECKING, Any, TypeVar

from apscheduler_tasklock.context import HeldLock, holding
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
    TaskLockRefusedError,
)

if TYPE_CHECKING:
    from apscheduler_tasklock.locks import TaskLocks

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


class Hold:
    """A task lock to hold once: a context manager, sync or async. As a decorator, once per call.

    Made by ``TaskLocks.hold``.
    """

    def __init__(self, locks: TaskLocks, name: str, min_lock: float, max_lock: float) -> None:
        self._locks = locks
        self._name = name
        self._min_lock = min_lock
        self._max_lock = max_lock
        self._held: HeldLock | None = None
        self._context = ExitStack()

    def __enter__(self) -> HeldLock:
        self._claim()
        return self._make_current()

    def __exit__(self, *_: object) -> None:
        try:
            self._context.close()
        finally:
            self._release()

    async def __aenter__(self) -> HeldLock:
        claiming = asyncio.ensure_future(asyncio.to_thread(self._claim))
        try:
            await asyncio.shield(claiming)
        except asyncio.CancelledError:
            # The claim goes on in its thread; give back what it gets.
            claiming.add_done_callback(self._release_cancelled)
            raise
        return self._make_current()

    async def __aexit__(self, *_: object) -> None:
        try:
            self._context.close()
        finally:
            await asyncio.shield(asyncio.to_thread(self._release))

    def __call__(self, function: Function) -> Function:
        """Hold the lock around each call of a function or coroutine function.

        :raises TaskLockOptionError: a call of it only makes something that runs later, unlocked
        """
        if isclass(function) or isgeneratorfunction(function) or isasyncgenfunction(function):
            raise TaskLockOptionError(
                f"hold({self._name!r}) cannot decorate {function.__qualname__}, whose body runs "
                "after the call; hold the lock inside it"
            )
        if iscoroutinefunction(function):

            @functools.wraps(function)
            async def held_coroutine(*args: Any, **kwargs: Any) -> Any:
                async with self._anew():
                    return await function(*args, **kwargs)

            return held_coroutine  # type: ignore[return-value]  # it has the same signature

        @functools.wraps(function)
        def held(*args: Any, **kwargs: Any) -> Any:
            with self._anew():
                return function(*args, **kwargs)

        return held  # type: ignore[return-value]  # it has the same signature

    def _anew(self) -> Hold:
        return Hold(self._locks, self._name, self._min_lock, self._max_lock)

    def _claim(self) -> None:
        if self._held is not None:
            raise TaskLockError(f"this hold of task {self._name!r} is entered already")
        claimed = self._locks.claim(self._name, min_lock=self._min_lock, max_lock=self._max_lock)
        if not isinstance(claimed, HeldLock):
            raise TaskLockRefusedError(
                self._name, claimed.holder, claimed.locked_until, claimed.reason
            )
        self._held = claimed

    def _make_current(self) -> HeldLock:
        assert self._held is not None
        self._context.enter_context(holding(self._held))
        return self._held

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        try:
            released = self._locks.release(held)
        except TaskLockDatabaseError:
            return  # logged as an outage; the release is owed
        except TaskLockError:
            logger.exception("Task %r: its lock could not be released", held.name)
            return
        if released is None:
            logger.warning(
                "Task %r: what held it outlived its lock, and another replica has claimed it "
                "since; raise max_lock above what it takes",
                held.name,
            )

    def _release_cancelled(self, _claimed: object) -> None:
        asyncio.get_running_loop().run_in_executor(None, self._release)
