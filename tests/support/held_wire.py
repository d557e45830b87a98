"""A connection without a server: a test says when it opens, and when a statement has its answer."""

from __future__ import annotations

import socket
import threading
from math import inf
from typing import Any

from apscheduler_tasklock._database.wire import wait_for

PATIENCE = 60.0


class HeldWire:
    """Stands in for a `Wire`. Each statement on it waits until the test answers it.

    It waits as the real one does: with ``wait``, which the thread sets.

    :ivar opening: set when a connection is asked for; it is there when ``opened`` is set
    :ivar begun: set when a statement waits for its answer
    """

    is_direct = is_unanswered = False
    wait: Any = staticmethod(wait_for)

    def __init__(self) -> None:
        self.opening, self.opened, self.begun = (threading.Event() for _ in range(3))
        self.opened.set()
        self._here, self._server = socket.socketpair()

    def connect(self, *_: object) -> Any:
        self.opening.set()
        assert self.opened.wait(PATIENCE)
        return self

    def cursor(self) -> HeldWire:
        return self

    def execute(self, *_: object) -> bytes:
        self.begun.set()
        while not self.wait([self._here.fileno()], inf):
            pass
        return self._here.recv(1)

    def answer(self) -> None:
        """Answer the statement that waits, or the next one."""
        self._server.send(b"\0")

    def ended(self) -> None:
        """Return why the connection has ended: it has not."""

    def heard(self) -> bool:
        return False

    def close(self) -> None: ...

    def close_sockets(self) -> None:
        self._here.close()
        self._server.close()
