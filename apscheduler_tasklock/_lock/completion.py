"""What becomes of something that a thread does, for whoever waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from apscheduler_tasklock._lock.loops import wake_on
from apscheduler_tasklock._values import logger_of

Result = TypeVar("Result")

logger = logger_of(__name__)


class Completion(Generic[Result]):
    """The result of what a thread does, or its error, once it is done.

    It is a future with little besides its lock. One of ``concurrent.futures`` has a condition with
    five bound methods, a queue and two lists, and hundreds of coroutines may wait at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_done = False
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []

    @property
    def has_succeeded(self) -> bool:
        """Whether there is a result."""
        return self._is_done and self._error is None

    def succeed(self, result: Result) -> None:
        """Note the result, unless it is done, and call who wants to know."""
        with self._lock:
            self._note(result, None)
        self._call_back()

    def fail(self, error: BaseException) -> None:
        """Note what is raised where the result is waited for, unless it is done."""
        with self._lock:
            self._note(None, error)
        self._call_back()

    def _note(self, result: Result | None, error: BaseException | None) -> None:
        if not self._is_done:
            self._result, self._error, self._is_done = result, error, True

    def _call_back(self) -> None:
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # the others are to be called all the same
                logger.exception("Who waits for a task lock's thread could not be told")

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call this once it is done, in the thread that did it; or here, if it is done.

        :param callback: must neither wait nor raise
        """
        with self._lock:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        callback()

    def result(self) -> Result:
        """Return the result, or raise the error; it must be done."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # it may be None

    def wait(self, seconds: float) -> bool:
        """Wait until it is done, for so long at most; tell whether it is."""
        done = threading.Event()
        self.when_done(done.set)
        return done.wait(seconds)


async def result_of(completion: Completion[Result]) -> Result:
    """Wait for what a thread does, which goes on if the one who waits is cancelled."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    completion.when_done(partial(_wake, loop, waiter))
    await waiter
    return completion.result()


def _wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        wake_on(loop, waiter)
