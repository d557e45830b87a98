"""A few threads that do what has no thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias
from weakref import WeakKeyDictionary

from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# What a thread takes from its queue; ``None`` ends it.
_Work: TypeAlias = "queue.SimpleQueue[Callable[[], object] | None]"


class BackgroundThreads:
    """A few threads, which start when there is something to do.

    An interpreter that ends waits for what they have begun, and for what is queued.

    They are no pool of ``concurrent.futures``, since the garbage collector may close a coroutine
    anywhere, also in the middle of ``submit()`` of any pool of the process, and its lock is to be
    released then. There, ``submit()`` would wait for itself; to put into a ``SimpleQueue`` waits
    for nothing.

    :param count: how many, at most
    :param name: what their names begin with
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._work: _Work = queue.SimpleQueue()
        self._idle: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each thread that waits
        self._threads: list[threading.Thread] = []
        self._starting = threading.RLock()
        self._closed = False

    def run(self, function: Callable[[], object]) -> None:
        """Run a function in a thread, or here if none can be started.

        As when they are closed, or the interpreter ends, or threads are limited.
        """
        if self.is_ending or not self._has_thread():
            _call(function)
            return
        self._work.put(function)
        if self.is_ending:  # since just now, so that the threads may have ended before
            self._do_what_is_queued()

    def close(self) -> None:
        """End the threads when they have done what is queued."""
        # Without a lock: the garbage collector may do it, or a forked child, of its parent's.
        self._closed = True
        for _ in range(self._count):
            self._work.put(None)

    def __del__(self) -> None:
        with suppress(AttributeError):  # it was not made to its end
            self.close()

    @property
    def is_ending(self) -> bool:
        """Whether functions run where they are handed over: closed, or the interpreter ends."""
        return self._closed or _interpreter_ends.is_set()

    def _has_thread(self) -> bool:
        """Tell whether there is a thread for one more function; start one if all are busy."""
        with suppress(queue.Empty):
            self._idle.get_nowait()
            return True
        if len(self._threads) < self._count:
            with self._starting:
                if len(self._threads) < self._count and not self.is_ending:
                    with suppress(RuntimeError):  # threads are limited, or the interpreter ends
                        self._start()
        return bool(self._threads)

    def _start(self) -> None:
        thread = threading.Thread(
            # It does not refer to this object, which may be thrown away without having been closed.
            target=_work,
            args=(self._work, self._idle),
            name=f"{self._name}_{len(self._threads)}",
            daemon=True,  # else it would be waited for before it is closed
        )
        thread.start()
        self._threads.append(thread)
        _queues[thread] = self._work

    def _do_what_is_queued(self) -> None:
        ends = 0
        with suppress(queue.Empty):
            while True:
                if (function := self._work.get_nowait()) is None:
                    ends += 1
                else:
                    _call(function)
        for _ in range(ends):
            self._work.put(None)


def _work(work: _Work, idle: queue.SimpleQueue[None]) -> None:
    """Do what is queued, in a thread, until it is closed."""
    while True:
        try:
            function = work.get_nowait()
        except queue.Empty:
            idle.put(None)
            function = work.get()
        if function is None:
            return
        try:
            _call(function)
        except BaseException:  # nothing may end a background thread unseen
            logger.exception("A task lock's background thread failed")
        function = None  # what it refers to is not kept while the thread waits


def _call(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:  # nothing may fail in a background thread unseen
        logger.exception("A task lock's background thread failed")


# Of all threads that go on.
_queues: WeakKeyDictionary[threading.Thread, _Work] = WeakKeyDictionary()
_interpreter_ends = threading.Event()


def _end_all() -> None:
    """Let all threads do what is queued, and wait for that."""
    _interpreter_ends.set()
    ending = list(_queues.items())
    for _, work in ending:
        work.put(None)
    for thread, _ in ending:
        thread.join()


# Before the interpreter waits for threads, as `concurrent.futures` does it; `atexit` comes after
# that, and not in processes of `multiprocessing`.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]  # Python has no public one
