"""A request whose result somebody waits for: a thread, or a coroutine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from math import inf
from typing import Any, Generic, TypeVar

from apscheduler_tasklock._database.deadline import CANCEL_LIMIT, Deadline
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock._database.side import Ticket
from apscheduler_tasklock.errors import TaskLockDatabaseError

Answer = TypeVar("Answer")
Result = TypeVar("Result")

# Seconds after which whoever waits in a thread looks whether their time is over.
LOOK_INTERVAL = 0.5


class Asked(Ticket[Answer], Generic[Answer, Result]):
    """A request whose result somebody waits for: a thread, or a coroutine.

    :param conclude: makes the result of what became of the request, or raises. Called in the
        database's thread, once, also if nobody waits any more. Must not wait.
    :param discard: is given a result that nobody waits for any more. Must not wait.
    :param patience: seconds after which whoever waits is told that it failed, although it is sent
        again; ``None``: they wait to its end
    :ivar future: the result
    """

    def __init__(
        self,
        request: Request[Answer],
        deadline: Deadline,
        conclude: Callable[[Outcome[Answer]], Result],
        discard: Callable[[Result], object] | None = None,
        *,
        patience: float | None = None,
        **times: float,
    ) -> None:
        super().__init__(request, deadline, **times)
        self.future: Future[Result] = Future()
        self._conclude = conclude
        self._discard = discard or _ignore
        self._patience = patience
        self._untaken = [True]
        # Of a coroutine that waits.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiter: asyncio.Future[None] | None = None

    def wait_on_this_loop(self) -> None:
        """Let a coroutine of the event loop that runs here wait for it, if one runs."""
        with suppress(RuntimeError):  # none does
            self.loop = asyncio.get_running_loop()
            self.waiter = self.loop.create_future()

    @property
    def is_stopped(self) -> bool:
        """Whether whoever has sent it has stopped claiming."""
        return isinstance(self.deadline, Deadline) and self.deadline.stopped

    @property
    def is_unwanted(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.future.cancelled() and not self.is_release

    def finish(self, outcome: Outcome[Answer]) -> None:
        """Make the result, and tell whoever waits."""
        try:
            result = self._conclude(outcome)
        except BaseException as error:  # noqa: BLE001  # for who waits, whatever it is
            self._tell_error(error)
            return
        try:
            self.future.set_result(result)
        except InvalidStateError:
            self._give_back(result)

    def fail(self, outcome: Outcome[Answer]) -> None:
        """Tell whoever waits, if they would have to wait for too long."""
        if self._patience is None:
            return
        assert outcome.error is not None
        is_rejected = not isinstance(outcome.error, TaskLockDatabaseError)
        if is_rejected or self.not_before > self.came + self._patience:
            self._tell_error(outcome.error)

    def _tell_error(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # nobody waits any more, or they were told before
            self.future.set_exception(error)

    def give_up(self, error: Exception) -> None:
        """Tell whoever waits that its own end has failed."""
        self._tell_error(error)

    def withdraw(self) -> None:
        """Want the result no more: what was got is given back."""
        if not self.future.cancel() and self.future.exception() is None:
            self._give_back(self.future.result())

    def _wake_on(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_wake_all, [self.waiter])

    def _give_back(self, result: Result) -> None:
        if self._take():
            self._discard(result)

    def _take(self) -> bool:
        """Take the result, to use it or to give it back; tell whether nobody has. Is atomic."""
        with suppress(IndexError):
            self._untaken.pop()
            return True
        return False

    def wait(self, seconds: float | None = None) -> Result:
        """Wait for the result, in a thread.

        :param seconds: for how long at most
        :raises TaskLockDatabaseError: there was none in that time
        :raises TaskLockError: why there is none
        """
        give_up_at = inf if seconds is None else time.monotonic() + seconds
        try:
            while not self._is_done(give_up_at):
                is_over = time.monotonic() > min(give_up_at, self.deadline.over_at + CANCEL_LIMIT)
                # This process may have been stopped, and the answer may come any moment now.
                if is_over and not self._is_done(time.monotonic() + LOOK_INTERVAL):
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
            # An error's traceback refers to this frame, and so, in a circle, to the error.
            del self

    def _is_done(self, until: float) -> bool:
        """Wait until it is done, until it is time to look at most; tell whether it is."""
        try:
            self.future.exception(max(0.0, min(LOOK_INTERVAL, until - time.monotonic())))
        except concurrent.futures.TimeoutError:
            return False
        except concurrent.futures.CancelledError:
            pass
        return True

    async def result(self) -> Result:
        """Wait for the result, in a coroutine. If that is cancelled, what is got is given back.

        :raises TaskLockError: why there is none
        """
        if self.waiter is None:  # it was sent from where no loop runs, or before this was known
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
            if not self._take():  # it was given back
                raise asyncio.CancelledError
            return result
        finally:
            # An error's traceback refers to this frame, and so, in a circle, to the error.
            del self


def wake_loops(told: Iterable[Ticket[Any]]) -> None:
    """Wake the coroutines whose results have come.

    Those of one event loop share a wake-up, which is a system call.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[Asked[Any, Any]]] = {}
    for ticket in told:
        if isinstance(ticket, Asked) and ticket.loop is not None and ticket.future.done():
            by_loop.setdefault(ticket.loop, []).append(ticket)
            ticket.loop = None
    for loop, asked in by_loop.items():
        waiters = [each.waiter for each in asked]
        try:
            loop.call_soon_threadsafe(_wake_all, waiters)
        except RuntimeError:  # the loop is closed
            for each in asked:
                each.withdraw()


def _wake_all(waiters: Sequence[asyncio.Future[None] | None]) -> None:
    for waiter in waiters:
        if waiter is not None and not waiter.done():  # else who waited was cancelled
            waiter.set_result(None)


def _ignore(_result: object) -> None:
    pass
