"""A TCP proxy in front of the server, which can delay, swallow or cut connections."""

from __future__ import annotations

import asyncio
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from sqlalchemy.engine import make_url

# Gets data; returns what to pass on, all at once or piece by piece, or `None`.
Rule = Callable[[bytes], "bytes | Iterator[bytes] | None"]
# Gets the number of the connection, whether a client sent the data, and the data.
Tap = Callable[[int, bool, bytes], "bytes | None"]


class Last(bytes):
    """Data that a rule returns to pass it on and then cut the connection."""


def pass_on(data: bytes) -> bytes | None:
    """Let everything through."""
    return data


# Where the server names its process at the login, after a type and a length; and another name.
_BACKEND_PID = re.compile(b"(?<=K\0\0\0\x0c)....", re.DOTALL)
_POOLERS_PID = b"\0\0\0\1"


def as_a_pooler(data: bytes) -> bytes:
    """Name a process of the proxy's own making at the login, as a pooler does."""
    return _BACKEND_PID.sub(_POOLERS_PID, data)


class Proxy:
    """Forwards connections to a server. Its two rules can be changed at any time.

    :ivar to_server: gets a client's data; returns the data to pass on, or ``None`` to cut the
        connection. It may block, which delays this connection only. An iterator's pieces are passed
        on one by one, as they come.
    :ivar to_client: the same for the server's data
    :ivar tap: the same for both directions, with the connection's number; it is called first
    :ivar accepting: with ``False`` new connections are closed at once
    :ivar accepted: the number of accepted connections
    :ivar refused: the number of connections that were closed at once
    """

    def __init__(self, database_url: str) -> None:
        self._target = make_url(database_url)
        self.to_server: Rule = pass_on
        self.to_client: Rule = pass_on
        self.tap: Tap | None = None
        self.accepting = True
        self.accepted = 0
        self.refused = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._closed = False
        self._cuts = 0
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    @property
    def url(self) -> str:
        port: int = self._listener.getsockname()[1]
        return self._target.set(host="127.0.0.1", port=port, query={}).render_as_string(False)

    def lead_to(self, database_url: str) -> None:
        """Forward further connections to another server."""
        self._target = make_url(database_url)

    @property
    def connected(self) -> bool:
        """Whether a connection is open."""
        return bool(self._open)

    def cut_all(self) -> None:
        """Cut all connections, also those that are being accepted."""
        self._cuts += 1
        _shut_down(*list(self._open))

    def close(self) -> None:
        self._closed = True
        self._threads[0].join(10)
        self._listener.close()
        self.cut_all()
        for thread in self._threads:
            thread.join(10)

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True, name="proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            cuts = self._cuts
            client, _ = self._listener.accept()
            if not self.accepting:
                self.refused += 1
                client.close()
                continue
            self.accepted += 1
            try:
                server = self._connect()
            except OSError:  # the server is not running
                client.close()
                continue
            self._open |= {client, server}
            if self._cuts != cuts:  # cut_all() was called meanwhile, and did not see this one
                _shut_down(client, server)
            self._spawn(self._forward, client, server, self.accepted, True)
            self._spawn(self._forward, server, client, self.accepted, False)

    def _connect(self) -> socket.socket:
        host = str(self._target.query.get("host") or self._target.host or "")
        port = self._target.port or 5432
        if host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{host}/.s.PGSQL.{port}")
            return server
        return socket.create_connection((host or "127.0.0.1", port))

    def _forward(
        self, source: socket.socket, sink: socket.socket, number: int, to_server: bool
    ) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                passed = self._ruled(number, to_server, data)
                if passed is None:
                    break
                for piece in [passed] if isinstance(passed, bytes) else passed:
                    sink.sendall(piece)
                if isinstance(passed, Last):
                    break
        _shut_down(source, sink)
        source.close()
        self._open.discard(source)

    def _ruled(self, number: int, to_server: bool, data: bytes) -> bytes | Iterator[bytes] | None:
        passed = data if self.tap is None else self.tap(number, to_server, data)
        if passed is None:
            return None
        if isinstance(passed, Last):
            return passed
        return self.to_server(passed) if to_server else self.to_client(passed)


def _shut_down(*sides: socket.socket) -> None:
    for side in sides:
        with suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)


class Gate:
    """Delays the server's answers from the time it is shut until it is opened."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self.reached, self._open = threading.Event(), threading.Event()

    def shut(self) -> None:
        self._proxy.to_client = self._hold_up

    def open(self) -> None:
        self._open.set()

    def _hold_up(self, data: bytes) -> bytes:
        self.reached.set()
        assert self._open.wait(60)
        return data

    async def until_reached(self) -> None:
        while not self.reached.is_set():
            await asyncio.sleep(0.01)


@contextmanager
def proxy_to(database_url: str) -> Iterator[Proxy]:
    """Run a proxy in front of a database."""
    with ExitStack() as stack:
        proxy = Proxy(database_url)
        stack.callback(proxy.close)
        yield proxy


# The last message of a statement.
SYNC = b"S\x00\x00\x00\x04"


def counted(proxy: Proxy) -> list[bytes]:
    """Return a list that grows with each statement that is sent from now on."""
    sent: list[bytes] = []
    pieces: list[bytes] = []  # the pieces of a statement

    def count(data: bytes) -> bytes:
        pieces.append(data)
        if data.endswith(SYNC):
            sent.append(b"".join(pieces))
            pieces.clear()
        return data

    proxy.to_server = count
    return sent
