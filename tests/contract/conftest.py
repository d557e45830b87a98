"""What the contract is tested with: one protocol on one connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from apscheduler_tasklock.messages import ClaimAnswer, ClaimRequest, DeadRun, ReleaseAnswer
from apscheduler_tasklock.protocol import TaskLockProtocol
from apscheduler_tasklock.table import task_lock_table
from tests.pgbouncer import PgBouncer


class Replica:
    """A replica as the protocol sees one: an id, and a connection with a clock."""

    def __init__(self, name: str, connection: psycopg.Connection[Any]) -> None:
        self.name = name
        self.connection = connection
        self.protocol = TaskLockProtocol(task_lock_table())

    def claim(
        self,
        task: str = "task",
        *,
        lag: float = 0.0,
        min_lock: float = 9.0,
        max_lock: float = 50.0,
        claim_id: UUID | None = None,
        latest: Any = None,
        lease: float | None = None,
        dead_run: DeadRun = "forget",
    ) -> tuple[UUID, ClaimAnswer]:
        """Claim as for a job every 10 s, whose run time was ``lag`` seconds ago."""
        claim_id = claim_id or uuid4()
        request = ClaimRequest(
            task, lag, latest, min_lock, max_lock, self.name, claim_id, lease, dead_run
        )
        answer = self.protocol.claim(self.connection.cursor(), request)
        return answer.claim_id if answer.granted else claim_id, answer

    def release(
        self, claim_id: UUID, task: str = "task", *, keep_window: bool = True
    ) -> ReleaseAnswer | None:
        return self.protocol.release(
            self.connection.cursor(), task, claim_id, keep_window=keep_window
        )

    def granted(self, task: str = "task", **request: Any) -> bool:
        return self.claim(task, **request)[1].granted


@pytest.fixture
def clock(direct_url: str) -> None:
    """Give the test's database a clock that stands still until it is set.

    A schema before ``pg_catalog`` in the search path wins, so the ``now()`` of the shipped
    statements is this one. The path is the database's and the time is in a table: what is set in
    a session would not follow it through a pooler.
    """
    with psycopg.connect(direct_url, autocommit=True) as connection:
        connection.execute("""
            CREATE SCHEMA travel;
            CREATE TABLE travel.clock AS SELECT timestamptz '2026-01-01 00:00:00+00' AS time;
            CREATE FUNCTION travel.now() RETURNS timestamptz STABLE LANGUAGE sql
                AS 'SELECT time FROM travel.clock';
        """)
        database = sql.Identifier(connection.info.dbname)
        path = "ALTER DATABASE {} SET search_path = travel, pg_catalog, public"
        connection.execute(sql.SQL(path).format(database))


@pytest.fixture
def connection(clock: None, direct_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A plain connection to the test's database, which sees its clock."""
    with psycopg.connect(direct_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def travel(connection: psycopg.Connection[Any]) -> Callable[[float], None]:
    """Move the database's clock by so many seconds."""

    def move(seconds: float) -> None:
        connection.execute(
            "UPDATE travel.clock SET time = time + %s * interval '1 second'", [seconds]
        )

    return move


@pytest.fixture
def replicas_connection(
    clock: None, database_url: str, pooler: PgBouncer | None
) -> Iterator[psycopg.Connection[Any]]:
    """The connection that all replicas share, which the statements under test go through."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        if pooler is not None and not pooler.max_prepared_statements:
            connection.prepare_threshold = None
        yield connection


@pytest.fixture
def one(replicas_connection: psycopg.Connection[Any]) -> Replica:
    return Replica("one", replicas_connection)


@pytest.fixture
def other(replicas_connection: psycopg.Connection[Any]) -> Replica:
    return Replica("other", replicas_connection)
