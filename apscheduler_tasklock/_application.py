"""The application's own code that is not waited for: one thread of a process runs it, in order.

That is what the database's thread has to say: log records, whose handlers may block, and that a
lock is lost, of which listeners are told. Renewals would wait for them. So would they for what a
look at the rows calls for, since job stores and triggers are asked for that.
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
# Seconds for which the thread waits for something to run before it ends.
LINGER = 5.0
# Seconds for which a shutdown waits for what is to be run, also if its own time is over.
SHORTEST_FLUSH = 0.2
# Limits how many threads may hang at a time in what does not come back.
MOST_HANGING = 10


class ApplicationThread:
    """Runs functions one after the other, in a thread that the first of them starts.

    :param name: of the thread
    """

    def __init__(self, name: str = NAME) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # Reentrant: the garbage collector may close anything anywhere, and what is closed may log.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._hanging: set[threading.Thread] = set()
        self._called_at = inf  # on the monotonic clock; ``inf`` while nothing is being called

    def relieve(self, seconds: float) -> None:
        """Go on in another thread, if what is being called has not come back for so long."""
        with self._starting:
            is_late = time.monotonic() > self._called_at + seconds
            if self._thread is None or not is_late or len(self._hanging) == MOST_HANGING:
                return
            self._hanging.add(self._thread)
            self._thread, self._called_at = None, inf
            self._start()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread, after those that came before it."""
        self._calls.put(function)
        self._start()

    def flush(self, until: float) -> None:
        """Wait until what has come so far was called.

        :param until: when it waits no longer, on the monotonic clock; but a moment in any case
        """
        if self._thread is threading.current_thread():
            return
        if self._thread is None and self._calls.empty():
            return
        is_over = threading.Event()
        self.call(is_over.set)
        if self._thread is None:  # none can be started
            self._call_all()
        is_over.wait(max(SHORTEST_FLUSH, until - time.monotonic()))

    def _start(self) -> None:
        """Start the thread, unless there is one. If none can be started, the next call tries to."""
        with self._starting:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                self._thread.start()
            except BaseException as error:
                self._thread = None
                # By Ctrl-C it may have been started all the same, and then finds that out.
                if not isinstance(error, RuntimeError):
                    raise

    def _work(self) -> None:
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
                del call  # which may refer to what has ended

    def _is_mine(self) -> bool:
        """Tell whether this thread is to go on, and no other one goes on in its place."""
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
    """Whether the application's code may run in this thread."""

    is_kept_out = False


_here = _Here()
_thread = ApplicationThread()


def keep_application_out() -> None:
    """Let none of the application's code run in this thread, from now on, that can be put off."""
    _here.is_kept_out = True


def call_application(function: Callable[[], object]) -> None:
    """Call a function of the application in the thread for them. Never waits."""
    _thread.call(function)


def relieve_application(seconds: float) -> None:
    """Let what has not come back for so long hold up nothing else.

    See :meth:`ApplicationThread.relieve`.
    """
    _thread.relieve(seconds)


def call_where_allowed(function: Callable[[], object]) -> None:
    """Call a function of the application: here, or in the thread for them from where it may not."""
    if _here.is_kept_out:
        _thread.call(function)
    else:
        function()


def flush_application(until: float) -> None:
    """Wait until what has come so far was called; see :meth:`ApplicationThread.flush`."""
    _thread.flush(until)


def may_log_here(record: logging.LogRecord) -> bool:
    """Tell whether a log record is handled here and now; else the thread does it.

    A filter of loggers. The record keeps its time and the name of its thread.
    """
    if not _here.is_kept_out:
        return True
    _thread.call(partial(_log, record))
    return False


def _log(record: logging.LogRecord) -> None:
    try:
        logging.getLogger(record.name).handle(record)
    except Exception:  # noqa: BLE001  # of an application's filter; nobody called us
        if logging.raiseExceptions and sys.stderr is not None:  # as of a handler
            traceback.print_exc()


def _call_safely(function: Callable[[], object]) -> None:
    """Call a function; what it raises is reported as that of any thread, and ends none."""
    try:
        function()
    except BaseException as error:  # noqa: BLE001  # also what ends a thread: the others wait
        threading.excepthook(
            threading.ExceptHookArgs(
                (type(error), error, error.__traceback__, threading.current_thread())
            )
        )


def _renew_in_child() -> None:
    """Leave to the parent what it has to run: the child has no such thread."""
    global _thread  # noqa: PLW0603  # the one of this process
    _thread = ApplicationThread()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_in_child)
