"""Stops: a scheduler's executors and job stores begin their shutdowns together.

Also logs, again and again, which jobs a stop waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from apscheduler_tasklock._runs.adapter import shut_down_with
from apscheduler_tasklock._shutdown import LAST_LINE_LIMIT, Shutdown
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)


class ShutDownTogether:
    """The base class of this library's executor and job store, for their common shutdown.

    APScheduler shuts the executors and job stores of a scheduler down one after the other, and may
    wait for running jobs at each of them. The first one that is shut down begins the shutdown of
    all, so that no run begins anywhere during these waits.
    """

    _shutdown: Shutdown | None = None

    def _begin_shutdown(self, shutdown: Shutdown) -> None:
        """Let no run begin any more. Does not wait. The shutdown of this object comes later."""
        self._shutdown = shutdown

    @contextmanager
    def _shutting_down(self) -> Iterator[Shutdown]:
        """Begin the common shutdown, unless another object has begun it.

        After the block, this object's part of the common shutdown is over.
        """
        shutdown = self._shutdown
        if shutdown is None:
            together = {
                id(each): each
                for each in (*shut_down_with(self), self)
                if isinstance(each, ShutDownTogether)
            }
            shutdown = Shutdown(len(together))
            for each in together.values():
                each._begin_shutdown(shutdown)
        try:
            yield shutdown
        finally:
            shutdown.leave()
            self._shutdown = None


@contextmanager
def reporting(report: Callable[[], None], interval: float) -> Iterator[None]:
    """Call ``report`` every ``interval`` seconds while the block goes on.

    A thread of its own makes the calls, because a scheduler that shuts down holds its locks, and
    every other thread of the library may wait for one of these locks.
    """
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(interval):
            try:
                report()
            except Exception:  # so that an error is logged and does not end this thread
                logger.exception("Could not log which jobs the stop waits for")

    thread = threading.Thread(target=work, name="tasklock-stop", daemon=True)
    with suppress(RuntimeError):  # because no thread can be started while the interpreter ends
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join(LAST_LINE_LIMIT)
