"""The application's thread: runs application code that must not delay the library's own threads.

Application code is the application's log handlers, listeners and callbacks of a lost lock, and its
job stores and triggers. Such code may block. In the replica's thread it would delay renewals.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf

NAME = "tasklock-application"
# Limits the seconds that the thread waits without a call before it ends.
LINGER = 5.0
# Limits how many threads may hang at one time in calls that do not return.
MOST_HANGING = 10


class ApplicationThread:
    """Calls functions one after the other, in a thread that the first call starts.

    :param name: the thread's name
    :param keeps_out: whether application code that may be called elsewhere is kept out of it
    """

    def __init__(self, name: str = NAME, *, keeps_out: bool = False) -> None:
        self._name, self._keeps_out = name, keeps_out
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # Reentrant, because the garbage collector may run at any line of `start`, and close an
        # object that logs, which calls `start` again.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._hanging: set[threading.Thread] = set()
        self._called_at = inf  # on the monotonic clock; `inf`: no call is under way

    def relieve(self, seconds: float) -> None:
        """Make further calls in a new thread, if the running call has lasted so many seconds."""
        with self._starting:
            is_late = time.monotonic() > self._called_at + seconds
            if self._thread is None or not is_late or len(self._hanging) == MOST_HANGING:
                return
            self._hanging.add(self._thread)
            self._thread, self._called_at = None, inf
            self.start()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread, after all earlier calls. Does not wait for the call."""
        self._calls.put(function)
        self.start()

    def call_also_here(self, function: Callable[[], object]) -> None:
        """Call a function in the thread; in this one if no thread can be started."""
        self.call(function)
        if self._thread is None:
            self._call_all()

    def flush(self, until: float) -> None:
        """Wait until all earlier calls have returned.

        :param until: limits the wait, on the monotonic clock
        """
        if self._thread is threading.current_thread():
            return
        if self._thread is None and self._calls.empty():
            return
        is_over = threading.Event()
        self.call(is_over.set)
        if self._thread is None:  # no thread can be started
            self._call_all()
        is_over.wait(max(0.0, until - time.monotonic()))

    def start(self) -> None:
        """Start the thread, unless there is one. If the start fails, the next call tries again.

        Of use only if a call waits for a thread that could not be started before.
        """
        with self._starting:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                self._thread.start()
            except BaseException as error:
                self._thread = None
                # If Ctrl-C interrupts `start()`, the thread may run all the same. Then `_work` sets
                # `self._thread` to it again, unless another thread was started meanwhile.
                if not isinstance(error, RuntimeError):
                    raise

    def _work(self) -> None:
        if self._keeps_out:
            keep_application_out()
        with self._starting:
            self._thread = self._thread or threading.current_thread()
            if self._thread is not threading.current_thread():
                return
        while self._is_mine():
            try:
                call = self._calls.get(timeout=LINGER)
            except queue.Empty:
                with self._starting:
                    if self._calls.empty():
                        self._thread = None
                        return
            else:
                self._called_at = time.monotonic()
                _call_safely(call)
                del call  # because it may refer to objects of a run that is over

    def _is_mine(self) -> bool:
        """Return whether no other thread has replaced this thread, so that it goes on."""
        me = threading.current_thread()
        with self._starting:
            if self._thread is me:
                self._called_at = inf
                return True
            self._hanging.discard(me)
            return False

    def _call_all(self) -> None:
        with suppress(queue.Empty):
            while True:
                _call_safely(self._calls.get_nowait())


class _Here(threading.local):
    """Whether application code is kept out of this thread."""

    is_kept_out = False


_here = _Here()
_thread = ApplicationThread()


def keep_application_out() -> None:
    """From now on, call application code in the application's thread instead of this thread.

    :func:`call_where_allowed` and :func:`may_log_here` check this setting of the thread.
    """
    _here.is_kept_out = True


def call_application(function: Callable[[], object]) -> None:
    """Call a function in the application's thread. Never waits."""
    _thread.call(function)


def relieve_application(seconds: float) -> None:
    """Make further calls in a new thread if a call hangs; see :meth:`ApplicationThread.relieve`."""
    _thread.relieve(seconds)


def call_where_allowed(function: Callable[..., object], *arguments: object) -> None:
    """Call a function in this thread, unless application code is kept out of this thread.

    In that case the application's thread calls the function.
    """
    if _here.is_kept_out:
        _thread.call(partial(function, *arguments))
    else:
        function(*arguments)


def flush_application(until: float) -> None:
    """Wait until all earlier calls have returned; see :meth:`ApplicationThread.flush`."""
    _thread.flush(until)


def may_log_here(record: logging.LogRecord) -> bool:
    """Return whether this thread may handle a log record; if not, the application's thread does.

    Loggers use this function as a filter. The record keeps its time and the name of its thread.
    """
    if not _here.is_kept_out:
        return True
    _thread.call(partial(_log, record))
    return False


def _log(record: logging.LogRecord) -> None:
    try:
        logging.getLogger(record.name).handle(record)
    except Exception:  # noqa: BLE001  # an application's filter failed; no caller gets the error
        if logging.raiseExceptions and sys.stderr is not None:  # as logging does for handlers
            traceback.print_exc()


def _call_safely(function: Callable[[], object]) -> None:
    """Call a function. Report its error as a thread's uncaught error, but do not end the thread."""
    try:
        function()
    except BaseException as error:  # noqa: BLE001  # also SystemExit, because further calls wait
        threading.excepthook(
            threading.ExceptHookArgs(
                (type(error), error, error.__traceback__, threading.current_thread())
            )
        )


def _renew_in_child() -> None:
    """Begin anew in a forked child, which has neither the parent's thread nor its waiting calls."""
    global _thread  # noqa: PLW0603  # one for each process
    _thread = ApplicationThread()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_in_child)
