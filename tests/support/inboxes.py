"""An inbox of a thread of the library that notes how it is read."""

from __future__ import annotations

import queue
from typing import Any


class ReadInbox(queue.SimpleQueue[Any]):
    """Notes each wait on the empty inbox that comes before a read has found it empty.

    In Python 3.10 such a wait may never end, if its timeout is very short.

    :ivar waits: how many waits there were
    :ivar early: how many of them came too early
    """

    def __init__(self) -> None:
        self.waits = self.early = 0
        self._is_found_empty = False

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.waits += 1
        self.early += self.empty() and not self._is_found_empty
        return self._noted(lambda: super(ReadInbox, self).get(block, timeout))

    def get_nowait(self) -> Any:
        return self._noted(lambda: super(ReadInbox, self).get_nowait())

    def _noted(self, read: Any) -> Any:
        self._is_found_empty = True
        message = read()  # raises `Empty`
        self._is_found_empty = False
        return message


def noting_reads(thread: Any) -> ReadInbox:
    """Give a thread of the library, which has not begun yet, an inbox that notes how it is read."""
    thread._inbox = inbox = ReadInbox()
    return inbox
