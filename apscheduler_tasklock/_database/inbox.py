"""The inbox of the replica's thread: it waits for messages, and for sockets beside them."""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Generic, TypeVar

Message = TypeVar("Message")


class Inbox(Generic[Message]):
    """Messages to one thread, in their order. Any thread, and a signal handler, may put one.

    :ivar messages: the messages, the oldest first
    """

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self._waits = self._is_woken = False
        # A byte in this pair of sockets wakes the waiting thread.
        self._waking: socket.socket | None = None
        self._woken: socket.socket | None = None
        self._pid = os.getpid()

    def put(self, message: Message, *, wakes: bool = True) -> None:
        """Put a message into the inbox. Never waits.

        :param wakes: whether to wake the thread if it waits
        """
        self.messages.append(message)
        if wakes and self._waits:
            self.wake()

    def wake(self) -> None:
        """End the wait of the thread, or its next one. Never waits."""
        self._is_woken = True
        waking = self._waking  # read once, because the thread may set it to None
        # A forked child has the parent's pair, and must not wake the parent.
        if self._waits and waking is not None and self._pid == os.getpid():
            with suppress(OSError):  # the pair was closed meanwhile
                waking.send(b"\0")

    def take_all(self, take: Callable[[Message], object]) -> None:
        """Call a function with each message. Only the thread calls this.

        After an error of the function the next messages are still there.
        """
        while self.messages:
            take(self.messages.popleft())

    def open(self) -> None:
        """Prepare for waits. The thread calls this before it waits for the first time."""
        self.close()  # if a caller that did the thread's work was interrupted before it closed
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        self._woken.setblocking(False)

    def close(self) -> None:
        """Leave nothing open. Messages can still be put and taken, and it can be opened anew."""
        pair, self._waking = (self._waking, self._woken), None
        for each in pair:
            if each is not None:
                each.close()

    def wait(self, sockets: Sequence[int], seconds: float, *, writes: bool = False) -> bool:
        """Wait for a message, or for a socket; return whether a socket is ready.

        :param seconds: limits the wait; ``inf``: no limit
        :param writes: whether to wait also until a socket can be written to
        """
        assert self._woken is not None
        woken = self._woken.fileno()
        self._waits = True
        # The inbox is checked after `_waits` is set, so that a message that comes after the check
        # wakes this wait.
        if self._is_woken or self.messages:
            seconds = 0.0
        ready = ready_of(sockets, seconds, woken, writes=writes)
        # In this order: a wake-up in between sends its byte.
        self._is_woken = False
        self._waits = False
        if woken not in ready:
            return bool(ready)
        try:
            while self._woken.recv(4096):
                pass
        except OSError:  # all bytes are read
            pass
        return len(ready) > 1


def ready_of(
    sockets: Sequence[int], seconds: float, *others: int, writes: bool = False
) -> dict[int, Any]:
    """Wait until one of several sockets is ready; return those that are, as keys.

    :param sockets: the sockets to read from, and perhaps to write to
    :param seconds: limits the wait; ``inf``: no limit
    :param others: sockets to read from only
    :param writes: whether ``sockets`` count as ready also if they can be written to
    """
    limit = None if seconds == inf else max(0.0, seconds)
    if not hasattr(select, "poll"):  # Windows
        reads, written = [*sockets, *others], sockets if writes else []
        readable, writable, _ = select.select(reads, written, [], limit)
        return dict.fromkeys([*readable, *writable])
    # Use `poll`, and not a selector, because a selector takes four times as long.
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN | select.POLLOUT if writes else select.POLLIN)
    for each in others:
        poll.register(each, select.POLLIN)
    return dict(poll.poll(None if limit is None else limit * 1000))
