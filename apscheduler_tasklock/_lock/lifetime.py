"""When something that is shared is given up: with its last user, after it was closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType


class Lifetime:
    """Counts the users of something shared. Once it is closed, the last of them gives it up.

    A context manager around each use.

    :param give_up: ends what is shared
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self._closing = False
        # A coroutine may be closed by the garbage collector wherever the lock is held.
        self._lock = threading.RLock()
        self._users = 0

    @property
    def count(self) -> int:
        """How many users there are."""
        return self._users

    def close(self) -> None:
        """Give up what is shared: at once, or when its last user has ended."""
        with self._lock:
            self._closing = True
            idle = self._users == 0
        if idle:
            self._end()

    def begin_use(self) -> None:
        """Count one more user."""
        with self._lock:
            self._users += 1

    def end_use(self) -> None:
        """Count one user less, and give up what is shared if it was the last one of all."""
        with self._lock:
            self._users -= 1
            last = self._closing and self._users == 0
        if last:
            self._end()

    def __enter__(self) -> None:
        self.begin_use()

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _exception: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.end_use()

    def _end(self) -> None:
        self._give_up()


class InProgress:
    """Counts what is going on, for whoever has to wait until nothing is. A context manager."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def begin(self) -> None:
        """Count one more."""
        with self._changed:
            self._count += 1

    def end(self) -> None:
        """Count one less."""
        with self._changed:
            self._count -= 1
            if self._count == 0:
                self._changed.notify_all()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait(self, seconds: float) -> bool:
        """Wait until nothing goes on, for so long at most; tell whether nothing does."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, seconds)


def off_the_loop(function: Callable[[], None]) -> None:
    """Call a function that waits: here, or in a thread where an event loop would wait with it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        function()
    else:
        threading.Thread(target=function, name="tasklock-close").start()
