"""Calls on an event loop from threads: those that come together share one wake-up of the loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary, ref


class _Inbox:
    """What is to be called on one loop.

    A wake-up of its own for each call costs a system call, in which the thread lets go of the
    interpreter and then waits for it while the loop is busy: with hundreds of jobs due at once,
    most of the time that the lock takes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak, as the loop has them: one that is closed drops them, and what they refer to.
        self._calls: ref[deque[Callable[[], object]]] | None = None

    def put(self, loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
        with self._lock:
            if loop.is_closed():
                raise RuntimeError("the event loop is closed")
            calls = None if self._calls is None else self._calls()
            if calls is not None:  # the loop has been woken
                calls.append(function)
                return
            calls = deque([function])
            loop.call_soon_threadsafe(self._call_all, loop, calls)
            self._calls = ref(calls)

    def _call_all(
        self, loop: asyncio.AbstractEventLoop, calls: deque[Callable[[], object]]
    ) -> None:
        with self._lock:
            self._calls = None
        try:
            while calls:
                _call(loop, calls.popleft())
        finally:
            if calls:  # one has exited the program, and the loop may go on all the same
                loop.call_soon(self._call_all, loop, calls)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Call a function as the loop would: what it raises is the loop's exception handler's."""
    try:
        function()
    except Exception as error:  # noqa: BLE001  # whatever an application's listener raises
        message = f"Exception in {function!r}, which a task lock has called"
        loop.call_exception_handler({"message": message, "exception": error})


_inboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Inbox] = WeakKeyDictionary()


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Call a function on a loop, from any thread.

    :raises RuntimeError: the loop is closed
    """
    _inboxes.setdefault(loop, _Inbox()).put(loop, function)
