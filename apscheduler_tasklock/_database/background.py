"""Threads for what nobody waits for in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class BackgroundThreads:
    """A few threads, which start when there is something to do.

    An interpreter that ends waits for what they have begun, and for what is queued.

    :param count: how many, at most
    :param name: what their names begin with
    """

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, name)

    def run(self, function: Callable[[], object]) -> None:
        """Run a function in a thread, or here if they are closed or the interpreter ends.

        Where threads are limited, a pool that cannot start another one says so after it has queued
        the function, and one of its other threads runs it as well. So it is made to run once.
        """
        once = _Once(function)
        try:
            self._pool.submit(once)
        except RuntimeError:
            once()

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Call a function in a thread, and return the future of its result.

        :raises RuntimeError: they are closed, or the interpreter ends
        """
        return self._pool.submit(function)

    def close(self) -> None:
        """End the threads when they have done what is queued."""
        self._pool.shutdown(wait=False)


class _Once:
    """Calls a function the first time that it is called."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._called = False

    def __call__(self) -> None:
        with self._lock:
            called, self._called = self._called, True
        if not called:
            self._function()
