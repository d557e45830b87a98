"""Claims and releases for coroutines, made in threads, since no event loop may wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from apscheduler_tasklock._database.forking import begins_anew_in_a_fork
from apscheduler_tasklock._database.pool import MOST_CONNECTIONS

Result = TypeVar("Result")


class Offload:
    """Threads that claim and release for coroutines.

    What was begun here is brought to its end, also when the coroutine that waits for it is
    cancelled, or left behind on a loop that has ended. As many threads as there are connections;
    more could only queue for them.
    """

    def __init__(self) -> None:
        self.open()
        begins_anew_in_a_fork(self)

    def begin_anew(self) -> None:
        """Take other threads: a forked child has none of its parent's, only the count of them."""
        self.open()

    def open(self) -> None:
        """Take up work, again if it was closed before. Threads start when there is some."""
        self._claims = ThreadPoolExecutor(MOST_CONNECTIONS, "tasklock-claims")
        # Of their own, so that they do not queue behind claims.
        self._releases = ThreadPoolExecutor(MOST_CONNECTIONS, "tasklock-ends")

    def close(self) -> None:
        """End the threads."""
        self._claims.shutdown(wait=False)
        self._releases.shutdown(wait=False)

    async def claim(
        self, claim: Callable[[], Result], give_back: Callable[[Result], Any]
    ) -> Result:
        """Wait for ``claim`` to be called in a thread.

        :param give_back: called in a thread with what ``claim`` returned, if nobody waits for it
            any more by then
        """
        claiming = _Claiming(claim, give_back)
        call = self._claims.submit(claiming)
        try:
            return await _result_of(call)
        except (asyncio.CancelledError, GeneratorExit):
            if not call.cancel() and claiming.abandon():
                self._releases.submit(give_back, call.result())
            raise

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Call a function in a thread, where it does not queue behind claims."""
        return self._releases.submit(function)

    def release(self, release: Callable[[], Any]) -> Callable[[], Any]:
        """Call ``release`` in a thread.

        :return: to be called and awaited by who wants to wait for it
        """
        return partial(_result_of, self.call(release))


class _Claiming(Generic[Result]):
    """A claim under way in a thread, of which nobody may want to know any more when it is made."""

    def __init__(self, claim: Callable[[], Result], give_back: Callable[[Result], Any]) -> None:
        self._claim = claim
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._made = False
        self._abandoned = False

    def __call__(self) -> Result:
        """Claim, and give back what was claimed if it was abandoned meanwhile."""
        result = self._claim()
        with self._lock:
            self._made = True
            self._abandoned = self._abandoned or self._loop.is_closed()
        if self._abandoned:
            self._give_back(result)
        return result

    def abandon(self) -> bool:
        """Let the claim be given back; return whether the caller has to, since it was made."""
        with self._lock:
            late = self._made and not self._abandoned
            self._abandoned = True
            return late


async def _result_of(call: Future[Result]) -> Result:
    """Wait for a call in a thread, which goes on if the one who waits is cancelled."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_call: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    call.add_done_callback(wake)
    await done.wait()
    return call.result()
