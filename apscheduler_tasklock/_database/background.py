"""A few threads that do what has no thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

logger = logging.getLogger(__name__)


class BackgroundThreads:
    """A few threads, which start when there is something to do.

    An interpreter that ends waits for what they have begun, and for what is queued.

    :param count: how many, at most
    :param name: what their names begin with
    """

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, name)

    def run(self, function: Callable[[], object]) -> None:
        """Run a function in a thread, or here if none can be started.

        As when they are closed, or the interpreter ends. Where threads are limited, the pool says
        so after it has queued the function, and a thread that it has may run it as well. So it is
        made to run once.
        """
        once = _Once(function)
        try:
            self._pool.submit(once)
        except RuntimeError:
            once()

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
        if called:
            return
        try:
            self._function()
        except Exception:  # nothing may fail in a background thread unseen
            logger.exception("A task lock's background thread failed")
