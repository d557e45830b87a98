"""Counters: the server's log, a proxy before it, and what the server counts itself."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.support.proxy import Proxy

STATEMENT = re.compile(r"LOG:  (?:statement|execute [^:]+): ")
CONNECTED = re.compile(r"LOG:  connection authorized")

# Seconds until statements that a contender sends in the background are in the log.
SETTLE = 0.1


@dataclass
class Count:
    """The counted costs of an operation."""

    statements: float = 0
    connections: float = 0
    round_trips: float = 0
    wal: float = 0
    transactions: float = 0


class RoundTrips:
    """Counts round trips: how often a client sends something after an answer of the server."""

    def __init__(self, proxy: Proxy) -> None:
        self.count = 0
        self._client_spoke: dict[int, bool] = {}
        proxy.tap = self._tap

    def _tap(self, connection: int, from_client: bool, data: bytes) -> bytes:
        farewell = data[:1] == b"X"
        if from_client and not farewell and not self._client_spoke.get(connection, False):
            self.count += 1
        self._client_spoke[connection] = from_client
        return data


def in_log(server: EmbeddedServer, trips: RoundTrips, count: Count) -> Callable[[], None]:
    """Begin to count in the log and the proxy; return a function that ends the count."""
    before, log = trips.count, len(server.log)

    def end() -> None:
        time.sleep(SETTLE)
        added = server.log[log:]
        count.statements += len(STATEMENT.findall(added))
        count.connections += len(CONNECTED.findall(added))
        count.round_trips += trips.count - before

    return end


def in_server(own: psycopg.Connection[Any], count: Count) -> Callable[[], None]:
    """Begin to count by the server's own counters; return a function that ends the count."""

    def read() -> tuple[int, int]:
        row = own.execute(
            "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn,"
            " pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        ).fetchone()
        assert row is not None
        return int(row[0]), int(row[1])

    wal, transactions = read()

    def end() -> None:
        now = read()
        count.wal += now[0] - wal
        count.transactions += now[1] - transactions

    return end
