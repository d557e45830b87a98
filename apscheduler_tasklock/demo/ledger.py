"""The ledger: a row for each run, in a schema that the demo creates and drops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import sql
from sqlalchemy.engine import URL

from apscheduler_tasklock.demo.history import Event, JudgedRun, runs

_CONNECT_TIMEOUT = 10

# The columns of a run.
_RUN = (
    "run.task, run.replica, run.token, run.run_time, run.takeover,"
    " run.started_at, run.ended_at, run.died_at"
)

# Seconds from the start of a run until its replica may be killed.
_MID_RUN_SECONDS = 0.5

_ALL_RUNS = f"SELECT {_RUN} FROM {{table}} AS run ORDER BY started_at"  # noqa: S608  # the columns are those above
_MID_RUN = f"""
    SELECT {_RUN} FROM {{table}} AS run
    WHERE task = %s AND run.replica = ANY(%s) AND ended_at IS NULL
      AND started_at < clock_timestamp() - %s * interval '1 second'
      AND NOT EXISTS (SELECT FROM {{table}} AS other WHERE other.replica = run.replica
                      AND other.id <> run.id AND other.ended_at IS NULL)
    LIMIT 1 FOR UPDATE
"""  # noqa: S608  # the columns are those above


@dataclass(frozen=True)
class Ledger:
    """The ledger as one process uses it.

    :ivar url: the database
    :ivar schema: the demo's own schema, in which the task lock table is, too
    :ivar replica: number of the replica that writes; 0 for the demo
    """

    url: URL
    schema: str
    replica: int = 0

    def begin_run(self, task: str, token: int, run_time: datetime, *, takeover: bool) -> UUID:
        """Enter a run that starts now; return its id for ``end_run``."""
        run = uuid4()
        self._execute(
            "INSERT INTO {table} (id, task, replica, token, run_time, takeover, started_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, clock_timestamp())",
            [run, task, self.replica, token, run_time, takeover],
        )
        return run

    def end_run(self, run: UUID) -> None:
        """Enter that a run ends now."""
        # A statement of a replica that has been killed meanwhile changes nothing.
        self._execute(
            "UPDATE {table} SET ended_at = clock_timestamp() WHERE id = %s AND died_at IS NULL",
            [run],
        )

    def kill_in_mid_run(
        self, task: str, kill: Callable[[JudgedRun], None], among: Sequence[int]
    ) -> bool:
        """Kill a replica that is in the middle of a run of this task, and of no other run.

        The run's row is locked until the replica is dead, so that the run's end cannot be entered.

        :param kill: kills the run's replica, and returns when the replica is gone
        :param among: numbers of the replicas of which one may be killed
        :return: whether there was such a replica
        """
        with self._connect() as connection, connection.transaction():
            wanted = [task, list(among), _MID_RUN_SECONDS]
            rows = connection.execute(self._named(_MID_RUN), wanted).fetchall()
            if not rows:
                return False
            [run] = runs(_events(rows[0]), task)
            kill(run)
            connection.execute(
                self._named("UPDATE {table} SET died_at = clock_timestamp() WHERE replica = %s"),
                [int(run.replica)],
            )
        return True

    def read_history(self) -> list[Event]:
        """Return the begins and ends of all runs, and the deaths of the replicas."""
        return [event for row in self._execute(_ALL_RUNS) for event in _events(row)]

    def create_table(self) -> None:
        """Create the ledger's table."""
        self._execute(
            "CREATE TABLE {table} (id uuid NOT NULL, task text NOT NULL, replica integer NOT NULL,"
            " token bigint NOT NULL, run_time timestamptz NOT NULL, takeover boolean NOT NULL,"
            " started_at timestamptz NOT NULL, ended_at timestamptz, died_at timestamptz)"
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
        with self._connect() as connection:
            cursor = connection.execute(self._named(statement), parameters)
            return cursor.fetchall() if cursor.description else []

    def _connect(self) -> psycopg.Connection[Any]:
        conninfo = self.url.set(drivername="postgresql").render_as_string(hide_password=False)
        return psycopg.connect(conninfo, autocommit=True, connect_timeout=_CONNECT_TIMEOUT)

    def _named(self, statement: str) -> sql.Composed:
        """Put the ledger's names into a statement."""
        return sql.SQL(statement).format(
            table=sql.Identifier(self.schema, "ledger"), schema=sql.Identifier(self.schema)
        )


def _events(row: Sequence[Any]) -> list[Event]:
    """Return the events of a row of the ledger. Times are in seconds since 1970."""
    task, replica, token, run_time, takeover, started, ended, died = row
    told = [("begin", started), ("end", ended), ("killed", died)]
    due = run_time.timestamp()
    return [
        Event(at.timestamp(), kind, str(replica), task, token, due, takeover=takeover)
        for kind, at in told
        if at is not None
    ]


def new_schema_name() -> str:
    """Return a name that no schema has yet."""
    return f"tasklock_demo_{uuid4().hex[:12]}"
