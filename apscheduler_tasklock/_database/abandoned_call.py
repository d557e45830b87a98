"""A call that can be abandoned, because a thread of its own makes it: it opens a connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, TypeVar

from apscheduler_tasklock._database.plain_future import PlainFuture
from apscheduler_tasklock.errors import TaskLockDatabaseError

Result = TypeVar("Result")

# Limits the seconds that a wait sleeps before it checks its end again, which a stop moves closer.
WAKE_INTERVAL = 0.1


def never() -> float:
    """Return when waits end that nothing ends, on the monotonic clock: ``inf``."""
    return inf


def call_within(
    within: float,
    function: Callable[[], Result],
    discard: Callable[[Result], Any],
    over_at: Callable[[], float] = never,
    started: Callable[[threading.Thread], object] = lambda _thread: None,
    wait: Callable[[float], object] | None = None,
    ended: Callable[[], object] = lambda: None,
) -> Result:
    """Call a function that opens a connection, and abandon the call after some time.

    A new thread makes the call, because the call may have to be abandoned: nothing can interrupt
    libpq's look-up of a host's name, or a listener of an application's engine. The new thread ends
    when the abandoned call returns.

    :param within: limits the wait, in seconds
    :param discard: called with the connection of an abandoned call
    :param over_at: returns when the wait ends in any case, on the monotonic clock. That time may
        change meanwhile.
    :param started: called with the new thread
    :param wait: waits for ``ended``, for so many seconds at most; by default this thread only waits
        for the call's end
    :param ended: called when the call has ended, in the thread that has made it, or when it is
        abandoned
    :raises TaskLockDatabaseError: no connection came in time
    """
    future: PlainFuture[Result] = PlainFuture()
    future.add_done_callback(lambda _future: ended())
    wait = wait or future.wait
    target = partial(_call, function, discard, future)
    thread = threading.Thread(target=target, name="tasklock-connect", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started: threads are limited, or Python ends
        return function()
    started(thread)
    abandoned_at = time.monotonic() + within
    try:
        while (left := min(over_at(), abandoned_at) - time.monotonic()) > 0:
            wait(min(left, WAKE_INTERVAL))
            if future.done():
                break
    except BaseException:
        if not future.cancel() and future.exception() is None:
            discard(future.result())
        raise
    if future.cancel():
        if over_at() > time.monotonic():
            raise TaskLockDatabaseError(f"no connection came within {within:.1f} sec")
        raise TaskLockDatabaseError("the database did not answer in time")
    try:
        return future.result()
    finally:
        # The error's traceback refers to this frame, so the frame must not refer to the error.
        del future, wait, target


def _call(
    function: Callable[[], Result],
    discard: Callable[[Result], Any],
    future: PlainFuture[Result],
) -> None:
    """Call a function, and discard its result if the call was abandoned meanwhile."""
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001  # the waiter gets any error
        with suppress(InvalidStateError):
            future.set_exception(error)
        del future  # because the error's traceback refers to this frame
        return
    try:
        future.set_result(result)
    except InvalidStateError:
        discard(result)
