"""Calls on an event loop from threads: those that come together share one wake-up of the loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias
from weakref import WeakKeyDictionary, ref

# A function to call, or a future to end, for which a coroutine waits.
Call: TypeAlias = "Callable[[], object] | asyncio.Future[None]"


class _Inbox:
    """What is to be called on one loop.

    A wake-up of its own for each call costs a system call, in which the thread lets go of the
    interpreter and then waits for it while the loop is busy: with hundreds of jobs due at once,
    most of the time that the lock takes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak, as the loop has them: one that is closed drops them, and what they refer to.
        self._calls: ref[deque[Call]] | None = None

    def put(self, loop: asyncio.AbstractEventLoop, call: Call) -> None:
        with self._lock:
            if loop.is_closed():
                raise RuntimeError("the event loop is closed")
            calls = None if self._calls is None else self._calls()
            if calls is not None:  # the loop has been woken
                calls.append(call)
                return
            calls = deque([call])
            loop.call_soon_threadsafe(self._call_all, loop, calls)
            self._calls = ref(calls)

    def _call_all(self, loop: asyncio.AbstractEventLoop, calls: deque[Call]) -> None:
        with self._lock:
            self._calls = None
        for call in calls:
            if asyncio.isfuture(call):
                if not call.done():  # else who waited was cancelled
                    call.set_result(None)
            else:  # an application's code, which may set context variables, or exit
                loop.call_soon(call)


_inboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Inbox] = WeakKeyDictionary()


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Call a function on a loop, from any thread.

    :raises RuntimeError: the loop is closed
    """
    _inboxes.setdefault(loop, _Inbox()).put(loop, function)


def wake_on(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    """End the future of a loop for which a coroutine waits there, from any thread.

    :raises RuntimeError: the loop is closed
    """
    _inboxes.setdefault(loop, _Inbox()).put(loop, waiter)
