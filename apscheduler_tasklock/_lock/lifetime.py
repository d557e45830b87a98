"""What a shutdown waits for, and what it does beside an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


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
