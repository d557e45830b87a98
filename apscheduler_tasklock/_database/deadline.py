"""Deadlines: when the waits of one attempt end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, TypeVar

from apscheduler_tasklock._database.plain_future import PlainFuture
from apscheduler_tasklock._shutdown import ATTEMPT_LIMIT, CANCEL_LIMIT, Closing
from apscheduler_tasklock.errors import TaskLockDatabaseError

Result = TypeVar("Result")

# Limits the seconds that a wait sleeps before it checks its deadline again.
WAKE_INTERVAL = 0.1


@dataclass
class ReleaseLimit:
    """Says when waiting releases expire.

    :ivar over_at: that time, on the monotonic clock; ``inf``: no close has begun, so no release
        expires
    """

    over_at: float = inf


class Deadline:
    """Says when the waits of one attempt end. A stop of claiming can move that time closer.

    :param closing: says whether claiming is stopped; ``None``: the attempt does not depend on that
    :param until: the time on the monotonic clock at which the attempt is over in any case
    :param limit: limits the attempt once claiming is stopped, in seconds
    :param release_limit: limits a release
    """

    def __init__(
        self,
        closing: Closing | None,
        until: float = inf,
        limit: float = ATTEMPT_LIMIT,
        release_limit: ReleaseLimit | None = None,
    ) -> None:
        self._closing = closing
        self._limit = limit
        self._since = time.monotonic()
        self._until = until
        self._release_limit = release_limit

    @property
    def stopped(self) -> bool:
        """Whether claiming is stopped."""
        return self._closing is not None and self._closing.stopped

    @property
    def over_at(self) -> float:
        """When the attempt's waits end, on the monotonic clock.

        The waits end ``CANCEL_LIMIT`` seconds before the attempt is over, so that there is time to
        cancel the statement.
        """
        over_at = self._until
        if self._release_limit is not None:
            over_at = min(over_at, self._release_limit.over_at)
        if self._closing is not None and self._closing.stopped:
            over_at = min(over_at, self._closing.over_at(self._since, self._limit))
        return over_at - CANCEL_LIMIT

    @property
    def seconds_left(self) -> float:
        """Seconds for which the attempt may wait from now on."""
        return self.over_at - time.monotonic()

    def of_attempt(self, closing: Closing, limit: float) -> Deadline:
        """Return the deadline of one attempt that begins now, and is over when this one is.

        :param limit: limits the attempt once claiming is stopped, in seconds
        """
        return Deadline(closing, self._until, limit, self._release_limit)

    @classmethod
    def latest(cls, deadlines: Sequence[Deadline]) -> Deadline:
        """Return the latest of several deadlines, for requests in one statement."""
        if len(deadlines) == 1:
            return deadlines[0]
        return max(deadlines, key=lambda each: (each.over_at, each._limit, each._since))

    def call(
        self,
        function: Callable[[], Result],
        discard: Callable[[Result], Any],
        within: float = inf,
        started: Callable[[threading.Thread], object] = lambda _thread: None,
        wait: Callable[[float], object] | None = None,
        ended: Callable[[], object] = lambda: None,
    ) -> Result:
        """Call a function that opens a connection, and abandon the call at the deadline.

        A new thread makes the call, because the call may have to be abandoned: nothing can
        interrupt libpq's look-up of a host's name, or a listener of an application's engine. The
        new thread ends when the abandoned call returns.

        :param discard: called with the connection of an abandoned call
        :param within: limits the wait in seconds, also if the deadline is later
        :param started: called with the new thread
        :param wait: waits for ``ended``, for so many seconds at most; by default this thread only
            waits for the call's end
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
            while (left := min(self.seconds_left, abandoned_at - time.monotonic())) > 0:
                wait(min(left, WAKE_INTERVAL))
                if future.done():
                    break
        except BaseException:
            if not future.cancel() and future.exception() is None:
                discard(future.result())
            raise
        if future.cancel():
            if self.seconds_left > 0:
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
