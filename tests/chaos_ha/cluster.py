"""The database under test: a primary, its synchronous standby, and the route to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psycopg

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.chaos.fleet import skewed_clock
from tests.support.proxy import Proxy, pass_on
from tests.support.standby import Pair

# The routes: one address that leads to the primary, as HAProxy's; or both servers in one URL.
ONE, BOTH = "one address", "both hosts"

# Limits the connect of the plain writer, in seconds. Its table is no table of the library.
_CONNECT = 2
_PLAIN = "CREATE TABLE plain (at timestamptz NOT NULL DEFAULT clock_timestamp())"


class Cluster:
    """A primary and its synchronous standby, each behind a proxy. A context manager.

    :param route: ``ONE`` or ``BOTH``
    :param skew: seconds by which the standby's clock is ahead
    :ivar url: the application's URL
    """

    def __init__(self, route: str, skew: float = 0.0) -> None:
        self._route = route
        self._skew = skew
        self._closing = ExitStack()
        self._frozen: list[int] = []

    def __enter__(self) -> Cluster:
        with ExitStack() as closing:
            self.pair = closing.enter_context(Pair({"max_connections": "150"}))
            closing.callback(self.thaw)
            upgrade(self.primary.url)
            with psycopg.connect(self.primary.url, autocommit=True) as connection:
                connection.execute(_PLAIN)
            if self._skew:
                self.pair.standby.stop()
                with _environment(skewed_clock(self._skew)):
                    self.pair.standby.start()
            self._proxies = [Proxy(server.url) for server in (self.primary, self.standby)]
            for proxy in self._proxies:
                closing.callback(proxy.close)
            proxies = self._proxies[:1] if self._route == ONE else self._proxies
            hosts = "&".join(f"host={proxy.url.split('@')[1].split('/')[0]}" for proxy in proxies)
            self.url = f"postgresql://postgres@/postgres?{hosts}"
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @property
    def primary(self) -> EmbeddedServer:
        """The server that was the primary at the start."""
        return self.pair.primary

    @property
    def standby(self) -> EmbeddedServer:
        """The server that was the standby at the start."""
        return self.pair.standby

    def promote(self) -> None:
        """Promote the standby, and let the route lead to it."""
        self.pair.standby.promote()
        self.switch()

    def switch(self) -> None:
        """Let one address lead to the promoted standby, and cut its old connections."""
        if self._route == ONE:
            [proxy, _] = self._proxies
            proxy.accepting = False
            self.reconnect()
            proxy.lead_to(self.standby.url)
            proxy.cut_all()
            proxy.accepting = True

    def cut(self, *, silently: bool) -> None:
        """Let no client reach the primary.

        :param silently: whether what is sent is lost, in place of a connection that is refused
        """
        [proxy, *_] = self._proxies
        if silently:
            proxy.to_server = proxy.to_client = lambda _data: b""
        else:
            proxy.accepting = False
            proxy.cut_all()

    def reconnect(self) -> None:
        """Let clients reach the primary again. Connections that lost something are cut."""
        [proxy, *_] = self._proxies
        proxy.to_server = proxy.to_client = pass_on
        proxy.cut_all()
        proxy.accepting = True

    def freeze(self, server: EmbeddedServer) -> None:
        """Stop all processes of a server, as a machine that hangs."""
        # The main process comes first, because it would start others anew.
        os.kill(server.pid, signal.SIGSTOP)
        self._frozen.append(server.pid)
        for pid in _children(server.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
            self._frozen.append(pid)

    def thaw(self) -> None:
        """Let what was stopped go on."""
        for pid in reversed(self._frozen):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._frozen.clear()


def alter(server: EmbeddedServer, statement: bytes) -> None:
    """Change a setting of a server, also one that takes no writes."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(statement)
        connection.execute("SELECT pg_reload_conf()")


def write(url: str) -> tuple[float, float]:
    """Write a row as a plain client; return when it began and when the commit was confirmed.

    A commit that waits for a standby is waited for.

    :raises psycopg.Error: the server takes no writes
    """
    begun = time.monotonic()
    with psycopg.connect(url, autocommit=True, connect_timeout=_CONNECT) as connection:
        connection.execute("INSERT INTO plain DEFAULT VALUES")
    return begun, time.monotonic()


def first_write(url: str, within: float = 60.0) -> float:
    """Try until a plain client can write; return when the commit was confirmed."""
    until = time.monotonic() + within
    while True:
        try:
            return write(url)[1]
        except psycopg.Error:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in found.split()]


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Add variables to those of the processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
