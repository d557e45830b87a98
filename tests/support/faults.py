"""Faults at one point of one statement of the library, made by the proxy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from tests.support.proxy import Last, Proxy

# Texts that mark the library's statements. A statement's text goes over the wire until it is
# prepared, so in its first two executions on a connection.
CLAIM = b"), claimed AS ("
RERUN = b"cause uuid"
FIRST_CLAIM = b"FROM asked LEFT JOIN first ON first.claim_id = asked.claim_id"
RELEASE = b"finished_at = COALESCE("
RENEWAL = b"asked.is_last AS overruns"
READ = b"AS read_only) AS server"

Point = Literal["before", "after", "halfway"]
Kind = Literal["cut", "swallowed", "terminated"]


class Fault:
    """A fault at the first statement with a text, once. All other statements pass.

    The points are ``"before"``: the statement does not reach the server; ``"after"``: the server
    has carried it out, and no byte of the answer arrives; ``"halfway"``: half of the answer
    arrives.

    The kinds are ``"cut"``: the connection is closed; ``"swallowed"``: the connection stays open,
    and nothing passes any more; ``"terminated"``: the server ends the connection, and its last
    message arrives in place of what the proxy keeps back. A server does not end a connection within
    an answer, so a connection that is terminated halfway delivers the whole answer and the last
    message.

    :param terminate: makes the server end the connection
    :param passing: the number of statements with this text that pass before
    :ivar met: set when the fault has occurred
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
                # After a termination, data of the server is its last message, which passes.
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
