"""What the contract is tested with: one protocol on one connection, or on rows in memory.

The tests of the rule run on both. What is about SQL, transactions or tables has the marker
``postgresql``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from apscheduler_tasklock._database.connection import raw_cursor
from apscheduler_tasklock._database.session import NoCursor
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock._lock.protocol import TaskLockProtocol
from apscheduler_tasklock._lock.protocol_messages import (
    ClaimAnswer,
    ClaimRequest,
    LockTimes,
    ManualRequest,
    ReadTimes,
    ReleaseAnswer,
    ReleaseRequest,
    Renewal,
    RunState,
    TakeoverRequest,
)
from apscheduler_tasklock.schema.table import task_lock_table
from apscheduler_tasklock.testing.in_memory import MemoryTaskLocks
from tests.support.databases import KeptDatabase
from tests.support.pgbouncer import PgBouncer
from tests.support.postgres import Server


@dataclass
class Memory:
    """Rows in memory, with a clock that stands still until it is set."""

    time: datetime = datetime(2026, 1, 1, tzinfo=timezone.utc)
    locks: MemoryTaskLocks = field(init=False)

    def __post_init__(self) -> None:
        self.locks = MemoryTaskLocks(lambda: self.time)


# Where the rows are.
Rows = psycopg.Connection[Any] | Memory


class Replica:
    """A replica as the protocol sees one: an id, and a connection with a clock."""

    def __init__(self, name: str, connection: Any, lock_timeout: float = 10.0) -> None:
        self.name = name
        self.connection = connection
        if isinstance(connection, Memory):
            self.protocol: Any = connection.locks.protocol(name)
        else:
            self.protocol = TaskLockProtocol(task_lock_table(), name, lock_timeout)

    @property
    def cursor(self) -> Any:
        return NoCursor() if isinstance(self.connection, Memory) else raw_cursor(self.connection)

    def claim(
        self,
        task: str = "task",
        *,
        lag: float = 0.0,
        latest: datetime | None = None,
        stable: bool = True,
        run_time: datetime | None = None,
        min_lock: float = 9.0,
        max_lock: float = 50.0,
        claim_id: UUID | None = None,
        runs: str = "jobs:job",
        **request: Any,
    ) -> tuple[UUID, ClaimAnswer]:
        """Claim as for a job every 10 s, whose run time was ``lag`` seconds ago."""
        claim_id = claim_id or uuid4()
        asked = ClaimRequest(
            task,
            min_lock,
            max_lock,
            run_time=run_time,
            exact=run_time is not None,
            runs=runs,
            claim_id=claim_id,
            **request,
        )
        return claim_id, self.send(asked, ReadTimes(lag, latest, stable))

    def send(self, request: ClaimRequest, times: ReadTimes) -> ClaimAnswer:
        return self.protocol.claim(self.cursor, request, times)

    def granted(self, task: str = "task", **request: Any) -> bool:
        return self.claim(task, **request)[1].granted

    def hold(self, task: str = "task", **request: Any) -> tuple[UUID, ClaimAnswer]:
        """Claim as ``hold()`` does, which runs no job that somebody else could run."""
        return self.claim(task, runs="", **request)

    def take_over(
        self,
        dead_claim_id: UUID,
        task: str = "task",
        *,
        claim_id: UUID | None = None,
        lease: float | None = None,
        failover: bool = True,
        stable: bool = True,
    ) -> tuple[UUID, ClaimAnswer | None]:
        claim_id = claim_id or uuid4()
        request = TakeoverRequest(task, dead_claim_id, "dead", lease, failover, claim_id)
        answers = self.protocol.take_over_many(self.cursor, [request], ReadTimes(stable=stable))
        return claim_id, answers.get(claim_id)

    def takes_over(self, dead_claim_id: UUID, task: str = "task", **request: Any) -> bool:
        _, answer = self.take_over(dead_claim_id, task, **request)
        return answer is not None and answer.granted

    def run_by_hand(
        self,
        request_id: UUID,
        task: str = "task",
        *,
        stable: bool = True,
        max_lock: float = 300.0,
        **request: Any,
    ) -> tuple[UUID, ClaimAnswer | None]:
        """Claim a run that was asked for by hand."""
        asked = ManualRequest(task, request_id, max_lock, **{"runs": "jobs:job", **request})
        cursor = self.cursor
        return asked.claim_id, self.protocol.claim_manual(cursor, asked, stable=stable)

    def release(
        self, claim_id: UUID, task: str = "task", *, keep_window: bool = True
    ) -> ReleaseAnswer | None:
        return self.end(
            claim_id, task, window=WindowAfter.KEEP if keep_window else WindowAfter.OPEN
        )

    def end(
        self, claim_id: UUID, task: str = "task", *, token: int | None = None, **end: Any
    ) -> ReleaseAnswer | None:
        """Release, and say how the run ended."""
        request = ReleaseRequest(task, claim_id, RunOutcome(**end), token)
        return self.protocol.release(self.cursor, request)

    def claim_many(
        self, *requests: ClaimRequest, most: int | None = None
    ) -> dict[UUID, ClaimAnswer]:
        cursor, lags = self.cursor, [0.0 for _ in requests]
        return self.protocol.claim_many(cursor, requests, lags, ReadTimes(), most)

    def take_over_many(self, *requests: TakeoverRequest) -> dict[UUID, ClaimAnswer]:
        return self.protocol.take_over_many(self.cursor, requests)

    def release_many(self, requests: Sequence[ReleaseRequest]) -> dict[UUID, ReleaseAnswer | None]:
        return self.protocol.release_many(self.cursor, requests)

    def end_lease(
        self, claim_id: UUID, task: str = "task", *, holders: list[str]
    ) -> ReleaseAnswer | None:
        return self.protocol.end_lease(self.cursor, task, claim_id, holders)

    def hand_over(
        self, claim_id: UUID, task: str = "task", *, begun: bool = False
    ) -> ReleaseAnswer | None:
        end = {"outcome": "cancelled", "cut": True} if begun else {}
        return self.end(claim_id, task, window=WindowAfter.HAND_OVER, **end)

    def give_up(self, claim_id: UUID, task: str = "task") -> bool:
        return self.protocol.give_up(self.cursor, task, claim_id)

    def extend(
        self, claim_id: UUID, by: float, *, lease: float | None = None, task: str = "task"
    ) -> LockTimes | None:
        return self.protocol.extend(self.cursor, task, claim_id, by, lease)

    def renew(self, *renewals: Renewal) -> dict[UUID, LockTimes]:
        return self.protocol.renew(self.cursor, renewals)

    def renewed(
        self, claim_id: UUID, task: str = "task", *, lease: float = 30, is_last: bool = False
    ) -> bool:
        return claim_id in self.renew(Renewal(task, claim_id, lease, is_last))

    def read(self, *tasks: str, always: tuple[str, ...] = ()) -> dict[str, RunState]:
        states, _ = self.protocol.read(self.cursor, tasks, always)
        return {state.task_name: state for state in states}

    def prune(self, age: float) -> int:
        return self.protocol.prune(self.cursor, age)


def row(connection: Rows, task: str = "task") -> dict[str, Any]:
    """Return the row of a task, by column."""
    if isinstance(connection, Memory):
        return dict(vars(connection.locks.rows[task]))
    cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
    found = cursor.execute("SELECT * FROM task_lock WHERE task_name = %s", [task]).fetchone()
    assert found is not None
    return found


def database_now(connection: Rows) -> datetime:
    if isinstance(connection, Memory):
        return connection.time
    found = connection.execute("SELECT now()").fetchone()
    assert found is not None
    return found[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let what is about the rule run in memory as well."""
    if "rows" in metafunc.fixturenames:
        is_sql = metafunc.definition.get_closest_marker("postgresql") is not None
        kinds = ["postgresql"] if is_sql else ["postgresql", "memory"]
        metafunc.parametrize("rows", kinds, indirect=True)


@pytest.fixture(scope="session")
def kept_database(server: Server, template: str) -> Iterator[KeptDatabase]:
    """A database with a clock that stands still until it is set.

    A schema before ``pg_catalog`` in the search path wins, so the ``now()`` of the shipped
    statements is this one. The path is the database's and the time is in a table: what is set in
    a session would not follow it through a pooler.
    """
    kept = KeptDatabase(server, template, _with_a_clock, _back_at_the_start)
    yield kept
    kept.drop()


def _with_a_clock(connection: psycopg.Connection[Any]) -> None:
    connection.execute("""
        CREATE SCHEMA travel;
        CREATE TABLE travel.clock (time timestamptz);
        CREATE FUNCTION travel.now() RETURNS timestamptz STABLE LANGUAGE sql
            AS 'SELECT time FROM travel.clock';
    """)
    database = sql.Identifier(connection.info.dbname)
    path = "ALTER DATABASE {} SET search_path = travel, pg_catalog, public"
    connection.execute(sql.SQL(path).format(database))


def _back_at_the_start(connection: psycopg.Connection[Any]) -> None:
    connection.execute("INSERT INTO travel.clock VALUES ('2026-01-01 00:00:00+00')")


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> Memory | None:
    """Rows in memory; ``None``: they are in the test's database."""
    return Memory() if getattr(request, "param", "postgresql") == "memory" else None


@pytest.fixture
def connection(rows: Memory | None, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A plain connection to the test's database, which sees its clock; or the rows in memory."""
    if rows is not None:
        yield rows
        return
    with psycopg.connect(request.getfixturevalue("direct_url"), autocommit=True) as connection:
        yield connection


@pytest.fixture
def travel(connection: Rows) -> Callable[[float], None]:
    """Move the clock of the rows by so many seconds."""

    def move(seconds: float) -> None:
        if isinstance(connection, Memory):
            connection.time += timedelta(seconds=seconds)
            return
        connection.execute(
            "UPDATE travel.clock SET time = time + %s * interval '1 second'", [seconds]
        )

    return move


@pytest.fixture
def replicas_connection(
    rows: Memory | None, request: pytest.FixtureRequest, pooler: PgBouncer | None
) -> Iterator[Any]:
    """The connection that all replicas share, which the statements under test go through."""
    if rows is not None:
        yield rows
        return
    with psycopg.connect(request.getfixturevalue("database_url"), autocommit=True) as connection:
        if pooler is not None and not pooler.max_prepared_statements:
            connection.prepare_threshold = None
        yield connection


@pytest.fixture
def one(replicas_connection: Rows) -> Replica:
    return Replica("one", replicas_connection)


@pytest.fixture
def other(replicas_connection: Rows) -> Replica:
    return Replica("other", replicas_connection)
