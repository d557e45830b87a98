"""Requests whose result a thread or a coroutine waits for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from math import inf
from typing import Any, Generic, TypeVar

from apscheduler_tasklock._database.plain_future import PlainFuture
from apscheduler_tasklock._database.requests import Call, Outcome, Request
from apscheduler_tasklock._shutdown import CANCEL_LIMIT, Closing
from apscheduler_tasklock.errors import TaskLockDatabaseError

Answer = TypeVar("Answer")
Result = TypeVar("Result")

# Limits the seconds that a waiting thread sleeps before it checks its own limits again.
LOOK_INTERVAL = 0.5


class AwaitedRequest(Request[Answer], Generic[Answer, Result]):
    """A request whose result a thread or a coroutine waits for.

    :param patience: limits the wait while attempts fail, in seconds since the request came. If the
        next attempt is due after this limit, the waiter gets the error at once, and the request is
        sent again nevertheless. ``None``: the waiter waits as long as the request is sent again
    :ivar future: the result
    """

    def __init__(self, closing: Closing, *, patience: float | None = None, **times: float) -> None:
        super().__init__(closing, **times)
        self.future: PlainFuture[Result] = PlainFuture()
        self._patience = patience
        self._untaken = [True]
        # The event loop and the future of a waiting coroutine.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiter: asyncio.Future[None] | None = None

    def wait_on_this_loop(self) -> None:
        """Let a coroutine of this thread's event loop wait for the result, if a loop runs here."""
        with suppress(RuntimeError):  # no loop runs here
            self.loop = asyncio.get_running_loop()
            self.waiter = self.loop.create_future()

    @property
    def is_unwanted(self) -> bool:
        """Whether the request was withdrawn. Never true of a release, which is sent in any case."""
        return self.future.cancelled() and not self.is_release

    def conclude(self, outcome: Outcome[Answer]) -> Result:
        """Make the result from the request's outcome, or raise.

        The replica's thread calls this once, also for a withdrawn request. Must not wait.
        """
        return outcome.result()  # type: ignore[return-value]  # a subclass may have other results

    def discard(self, result: Result) -> None:
        """Take a result that nobody waits for any more. Must not wait."""

    def finish(self, outcome: Outcome[Answer]) -> None:
        """Make the result, and wake the waiter."""
        try:
            result = self.conclude(outcome)
        except BaseException as error:  # noqa: BLE001  # the waiter gets any error
            self.abandon(error)
            return
        try:
            self.future.set_result(result)
        except InvalidStateError:
            self._dispose(result)

    def fail(self, outcome: Outcome[Answer]) -> None:
        """End the waiter's wait with the error of an attempt, if the request has a ``patience``.

        The wait ends if the error is a rejection, or if the next attempt comes after the patience.
        """
        if self._patience is None:
            return
        assert outcome.error is not None
        is_rejected = not isinstance(outcome.error, TaskLockDatabaseError)
        if is_rejected or self.not_before > self.came + self._patience:
            self.abandon(outcome.error)

    def abandon(self, error: BaseException) -> None:
        """Give the waiter an error, also one that :meth:`finish` or :meth:`fail` has raised."""
        with suppress(InvalidStateError):  # withdrawn, or an earlier error was set
            self.future.set_exception(error)

    def withdraw(self) -> None:
        """Withdraw the request. Its result is discarded, also if it has come already."""
        if not self.future.cancel() and self.future.exception() is None:
            self._dispose(self.future.result())

    def _wake_on(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_wake_all, [self.waiter])

    def _dispose(self, result: Result) -> None:
        if self._take():
            self.discard(result)

    def _take(self) -> bool:
        """Take the result, to use it or to discard it; return whether nobody has taken it before.

        The method is atomic, so of two threads only one takes the result.
        """
        with suppress(IndexError):
            self._untaken.pop()
            return True
        return False

    def wait(self, seconds: float | None = None) -> Result:
        """Wait for the result, in a thread.

        :param seconds: limits the wait
        :raises TaskLockDatabaseError: no result came in that time
        :raises TaskLockError: the request failed
        """
        abandon_at = inf if seconds is None else time.monotonic() + seconds
        try:
            while not self._is_done(abandon_at):
                now = time.monotonic()
                if now >= abandon_at:
                    break
                is_over = now > self.over_at + CANCEL_LIMIT
                # Check once more after the request's end, because this process may have been paused
                # while the answer came.
                if is_over and not self._is_done(min(abandon_at, now + LOOK_INTERVAL)):
                    break
        except BaseException:  # Ctrl-C, or a greenlet that is killed
            self.withdraw()
            raise
        if not self.future.done():
            self.withdraw()
        if self.future.cancelled():
            waited = time.monotonic() - self.came
            raise TaskLockDatabaseError(f"no answer came within {waited:.1f} sec")
        try:
            return self.future.result()
        finally:
            # The error's traceback refers to this frame, so the frame must not refer to the error.
            del self

    def _is_done(self, until: float) -> bool:
        """Wait for the result, for ``LOOK_INTERVAL`` at most; return whether the future is done."""
        return self.future.wait(min(LOOK_INTERVAL, until - time.monotonic()))

    async def result(self) -> Result:
        """Wait for the result, in a coroutine. If the coroutine is cancelled, withdraw the request.

        :raises TaskLockError: the request failed
        """
        if self.waiter is None:  # the request was sent where no loop ran
            loop = asyncio.get_running_loop()
            self.waiter = loop.create_future()
            self.future.add_done_callback(lambda _future: self._wake_on(loop))
        try:
            await self.waiter
        except (asyncio.CancelledError, GeneratorExit):
            self.withdraw()
            raise
        return self._result()

    def _result(self) -> Result:
        try:
            result = self.future.result()
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError from None
        else:
            if not self._take():  # a withdrawal has discarded the result
                raise asyncio.CancelledError
            return result
        finally:
            # The error's traceback refers to this frame, so the frame must not refer to the error.
            del self


class AwaitedCall(Call[Answer], AwaitedRequest[Answer, Answer]):
    """A request whose statement a function sends, and whose answer somebody waits for."""


def wake_loops(finished: Iterable[Request[Any]]) -> None:
    """Wake the coroutines whose results have come.

    All coroutines of one event loop share one wake-up, because a wake-up is a system call.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[AwaitedRequest[Any, Any]]] = {}
    for each in finished:
        if isinstance(each, AwaitedRequest) and each.loop is not None and each.future.done():
            by_loop.setdefault(each.loop, []).append(each)
            each.loop = None
    for loop, asked in by_loop.items():
        waiters = [each.waiter for each in asked]
        try:
            loop.call_soon_threadsafe(_wake_all, waiters)
        except RuntimeError:  # the loop is closed
            for lost in asked:
                lost.withdraw()


def _wake_all(waiters: Sequence[asyncio.Future[None] | None]) -> None:
    for waiter in waiters:
        if waiter is not None and not waiter.done():  # done: the waiting coroutine was cancelled
            waiter.set_result(None)
