"""TLS before a server that has none, as of a server that has it."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy.engine import make_url

# A key that is nobody's secret, with its certificate, which no client of the tests verifies.
_KEY = Path(__file__).parent / "tls.pem"
# What a client of PostgreSQL sends first if it wants TLS.
_WANTS_TLS = struct.pack("!ii", 8, 80877103)


class _TlsServer:
    """Accepts connections with TLS, and forwards them to a server without TLS."""

    def __init__(self, host: str, port: int) -> None:
        self._server = host, port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(_KEY)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.port: int = self._listener.getsockname()[1]
        self._spawn(self._accept)

    def close(self) -> None:
        """End all connections, whose clients have gone."""
        self._is_closed.set()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True, name="tls")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            if select.select([self._listener], [], [], 0.05)[0]:
                self._spawn(self._serve, self._listener.accept()[0])

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:  # one side has gone
            if client.recv(len(_WANTS_TLS), socket.MSG_WAITALL) != _WANTS_TLS:
                return
            client.sendall(b"S")
            with (
                self._context.wrap_socket(client, server_side=True) as secured,
                socket.create_connection(self._server) as server,
            ):
                self._forward(secured, server)

    def _forward(self, secured: ssl.SSLSocket, server: socket.socket) -> None:
        """Forward in both directions in one thread, because two may not use one TLS connection."""
        while not self._is_closed.is_set():
            both = [secured, server]
            ready = [secured] if secured.pending() else select.select(both, [], [], 0.05)[0]
            for source in ready:
                data = source.recv(65536)
                if not data:
                    return
                (server if source is secured else secured).sendall(data)


@contextmanager
def with_tls(database_url: str) -> Iterator[str]:
    """Put TLS before a database, and yield the URL. Its clients have to be closed before it."""
    url = make_url(database_url)
    server = _TlsServer(url.host or "127.0.0.1", url.port or 5432)
    try:
        required = {"sslmode": "require"}
        secured = url.set(host="127.0.0.1", port=server.port, query=required)
        yield secured.render_as_string(False)
    finally:
        server.close()
