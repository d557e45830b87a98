"""A future that is cheap, and whose methods may be called anywhere.

``concurrent.futures.Future`` takes a lock in each of its methods, and makes a condition for each of
its waits. That is a good part of what a claim and a release cost. And a signal handler, or the
garbage collector, may call one of its methods while another one has the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, InvalidStateError
from contextlib import suppress
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class PlainFuture(Generic[Result]):
    """A result that comes later. Its methods are those of ``concurrent.futures.Future``.

    An error of a callback is not logged here, but raised by whoever has set the outcome.

    It has no lock: whoever comes first sets the outcome, because ``setdefault`` is atomic.
    """

    def __init__(self) -> None:
        # The result, the error, and whether the future was cancelled.
        self._outcome: dict[None, tuple[Any, BaseException | None, bool]] = {}
        self._waiters: list[threading.Lock] = []
        self._callbacks: list[Callable[[PlainFuture[Result]], object]] = []

    def done(self) -> bool:
        """Return whether there is a result or an error, or the future was cancelled."""
        return bool(self._outcome)

    def cancelled(self) -> bool:
        """Return whether the future was cancelled."""
        return bool(self._outcome) and self._outcome[None][2]

    def cancel(self) -> bool:
        """Cancel the future, unless it is done; return whether it is cancelled."""
        self._settle(None, None, is_cancelled=True)
        return self.cancelled()

    def set_result(self, result: Result) -> None:
        """Set the result.

        :raises InvalidStateError: the future is done
        """
        if not self._settle(result, None):
            raise InvalidStateError

    def set_exception(self, error: BaseException) -> None:
        """Set the error.

        :raises InvalidStateError: the future is done
        """
        if not self._settle(None, error):
            raise InvalidStateError

    def exception(self) -> BaseException | None:
        """Return the error of a future that is done; ``None``: it has a result.

        :raises CancelledError: the future was cancelled
        """
        _, error, is_cancelled = self._outcome[None]
        if is_cancelled:
            raise CancelledError
        return error

    def result(self) -> Result:
        """Return the result of a future that is done, or raise its error.

        :raises CancelledError: the future was cancelled
        """
        error = self.exception()
        if error is not None:
            try:
                raise error
            finally:
                # The error's traceback refers to this frame, so the frame must not refer to the
                # error.
                del self, error
        result: Result = self._outcome[None][0]
        return result

    def wait(self, seconds: float) -> bool:
        """Wait until the future is done, for so many seconds at most; return whether it is."""
        if self._outcome or seconds <= 0:
            return self.done()
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        # The outcome is checked after the waiter is there, so that a later one releases it.
        if not self._outcome:
            waiter.acquire(timeout=seconds)
        with suppress(ValueError):  # taken by whoever has set the outcome
            self._waiters.remove(waiter)
        return self.done()

    def add_done_callback(self, callback: Callable[[PlainFuture[Result]], object]) -> None:
        """Let a function be called with this future when it is done; now, if it is."""
        self._callbacks.append(callback)
        if self._outcome:
            self._call_back()

    def _settle(
        self, result: Any, error: BaseException | None, *, is_cancelled: bool = False
    ) -> bool:
        """Set the outcome, unless there is one; return whether it was set."""
        mine = (result, error, is_cancelled)
        if self._outcome.setdefault(None, mine) is not mine:
            return False
        while self._waiters:
            try:
                waiter = self._waiters.pop()
            except IndexError:  # the last waiter has gone meanwhile
                break
            waiter.release()
        if self._callbacks:
            self._call_back()
        return True

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread has taken the last one
                break
            callback(self)
