"""A PostgreSQL whose clock travels: functions of a schema before ``pg_catalog`` win."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer

BEGINNING = datetime(2026, 1, 1, tzinfo=timezone.utc)

TRAVEL = """
    CREATE SCHEMA travel;
    CREATE FUNCTION travel.now() RETURNS timestamptz STABLE LANGUAGE sql
        AS $$ SELECT current_setting('travel.time')::timestamptz $$;
"""


class TravellingDatabase:
    """A connection to a server on which ``now()`` is what it was set to.

    :ivar now: seconds since the beginning, by a clock that is right
    :ivar clock: its own clock's time, in such seconds
    :ivar in_python: whether this library's rule decides in Python, and asks no database
    """

    in_python = False

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._shown: float | None = None
        connection.execute(TRAVEL)
        connection.execute("SET search_path = travel, pg_catalog, public")
        self.travel(0.0)

    def travel(self, to: float, ahead: float = 0.0) -> None:
        """Set the time, and the database's clock to so many seconds ahead of it."""
        self.now, self.clock = to, to + ahead

    def execute(self, statement: str, parameters: dict[str, Any]) -> int:
        """Run a statement; return how many rows it touched."""
        return self.connection.execute(statement, parameters).rowcount

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The connection, for a statement that sees the time as it is now."""
        if self._shown != self.clock:
            self._shown = self.clock
            self._connection.execute(
                "SELECT set_config('travel.time', %s, false)", [moment(self.clock).isoformat()]
            )
        return self._connection


def moment(seconds: float) -> datetime:
    """Return a time as the database knows it."""
    return BEGINNING + timedelta(seconds=seconds)


def seconds(moment: datetime) -> float:
    """Return a time of the database in seconds since the beginning."""
    return (moment - BEGINNING).total_seconds()


@contextmanager
def travelling_database() -> Iterator[TravellingDatabase]:
    """Yield a database with the task lock table, on a server of its own."""
    with EmbeddedServer({"fsync": "off", "synchronous_commit": "off"}) as server:
        upgrade(server.url)
        with psycopg.connect(server.url, autocommit=True) as connection:
            yield TravellingDatabase(connection)
