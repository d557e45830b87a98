"""The ledger: a row for every run, in a schema of the demo's own that goes when the demo ends."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql
from sqlalchemy.engine import URL

from apscheduler_tasklock.demo.verdict import Run

_CONNECT_TIMEOUT = 10


@dataclass(frozen=True)
class Ledger:
    """The ledger as one process uses it.

    :ivar url: the database
    :ivar schema: the demo's own schema, which holds the task lock table too
    :ivar replica: number of the replica that writes; 0 for the demo itself
    """

    url: URL
    schema: str
    replica: int = 0

    def add_run(self, task: str, token: int, run_time: datetime) -> None:
        """Enter a run that starts now."""
        self._execute(
            "INSERT INTO {table} (task, replica, token, run_time, started_at)"
            " VALUES (%s, %s, %s, %s, clock_timestamp())",
            [task, self.replica, token, run_time],
        )

    def read_runs(self) -> list[Run]:
        """Return all runs, in the order in which they started."""
        rows = self._execute("SELECT task, replica, run_time FROM {table} ORDER BY started_at")
        return [Run(task, replica, run_time.timestamp()) for task, replica, run_time in rows]

    def create_table(self) -> None:
        """Create the ledger's table."""
        self._execute(
            "CREATE TABLE {table} (task text NOT NULL, replica integer NOT NULL,"
            " token bigint NOT NULL, run_time timestamptz NOT NULL,"
            " started_at timestamptz NOT NULL)"
        )

    def __enter__(self) -> Ledger:
        self._execute("CREATE SCHEMA {schema}")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._execute("DROP SCHEMA {schema} CASCADE")
        except psycopg.Error as error:
            print(
                f"The demo's schema {self.schema} could not be dropped and is still there: {error}",
                file=sys.stderr,
            )

    def _execute(self, statement: str, parameters: Any = None) -> list[Any]:
        """Run one statement on a connection of its own, in autocommit mode."""
        query = sql.SQL(statement).format(
            table=sql.Identifier(self.schema, "ledger"), schema=sql.Identifier(self.schema)
        )
        conninfo = self.url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(
            conninfo, autocommit=True, connect_timeout=_CONNECT_TIMEOUT
        ) as connection:
            cursor = connection.execute(query, parameters)
            return cursor.fetchall() if cursor.description else []


def new_schema_name() -> str:
    """Return a name that no schema has yet."""
    return f"tasklock_demo_{uuid4().hex[:12]}"
