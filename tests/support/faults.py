"""A fault that meets one statement of the library at one point of its way, through the proxy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from tests.support.proxy import Last, Proxy

# What a statement of the library has that no other has. The text of a statement goes over the wire
# for as long as psycopg does not prepare it, which is the first five times on a connection.
CLAIM = b"), claimed AS ("
TAKEOVER = b"dead_claim_id uuid"
FIRST_CLAIM = b"FROM asked LEFT JOIN first ON first.claim_id = asked.claim_id"
RELEASE = b"finished_at = COALESCE("
RENEWAL = b"AS renewal ("
READ = b"AS read_only) AS server"

Point = Literal["before", "after", "halfway"]
Kind = Literal["cut", "swallowed", "terminated"]


class Fault:
    """Meets the first statement with this text, once. Everything else passes.

    The points are ``"before"`` the statement has reached the server; ``"after"`` the server has
    carried it out, and nothing of the answer arrives; ``"halfway"`` half of the answer arrives.

    The kinds are ``"cut"``, the connection is closed; ``"swallowed"``, it stays open, and nothing
    goes through it any more; ``"terminated"``, the server is told to end the connection, and its
    last words arrive in place of what was held back. A server does not end a connection in the
    middle of an answer, so that terminated halfway is: the whole answer, and then the last words.

    :param terminate: makes the server end the connection
    :param passing: how many statements with this text pass before
    :ivar met: set when a statement has met it
    """

    def __init__(
        self,
        proxy: Proxy,
        statement: bytes,
        point: Point,
        kind: Kind,
        terminate: Callable[[], None],
        *,
        passing: int = 0,
    ) -> None:
        self.met = threading.Event()
        self._statement = statement
        self._point = point
        self._kind = kind
        self._terminate = terminate
        self._passing = passing
        self._lock = threading.Lock()
        self._sent_on: int | None = None
        self._broken = False
        proxy.tap = self._tap

    def _tap(self, number: int, to_server: bool, data: bytes) -> bytes | None:
        with self._lock:
            if self._sent_on is None and to_server and self._statement in data:
                self._passing -= 1
                if self._passing < 0:
                    self._sent_on = number
                    return self._break(data) if self._point == "before" else data
            if number != self._sent_on:
                return data
            if self._broken:
                # Of a terminated connection, what arrives now are the server's last words.
                return b"" if self._kind == "swallowed" else data
            return data if to_server else self._break(data)

    def _break(self, data: bytes) -> bytes | None:
        self._broken = True
        self.met.set()
        if self._kind == "terminated":
            self._terminate()
            return data if self._point == "halfway" else b""
        if self._point == "halfway":
            half = data[: len(data) // 2]
            return Last(half) if self._kind == "cut" else half
        return None if self._kind == "cut" else b""
