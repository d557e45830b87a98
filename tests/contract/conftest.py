"""What the contract is tested with: one protocol on one connection, or on rows in memory.

The tests of the rule run on both. What is about SQL, transactions or tables has the marker
``postgresql``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.support.databases import KeptDatabase
from tests.support.pgbouncer import PgBouncer
from tests.support.postgres import Server
from tests.support.waist import Memory, Replica, Rows

# For examples of the rule that no history comes across.
ON_BOTH = pytest.mark.parametrize("rows", ["postgresql", "memory"], indirect=True)


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


def token_at(moment: datetime) -> int:
    """Return the token of a claim at a time, if it is not the second one of its millisecond."""
    return int(moment.timestamp() * 1000)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let what is about the rule run in memory, and nightly by the statements.

    Random histories hold the statements to the rule: ``test_row_histories.py`` and
    ``test_claim_histories.py``. What they do not come across is ``ON_BOTH``.
    """
    test = metafunc.definition
    is_given = any("rows" in mark.args[0] for mark in test.iter_markers("parametrize"))
    if "rows" in metafunc.fixturenames and not is_given:
        is_sql = test.get_closest_marker("postgresql") is not None
        nightly = pytest.param("postgresql", marks=pytest.mark.nightly)
        kinds = ["postgresql"] if is_sql else ["memory", nightly]
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
    url = request.getfixturevalue("direct_url")
    with request.getfixturevalue("kept_database").session(url) as connection:
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
    url = request.getfixturevalue("database_url")
    kept: KeptDatabase = request.getfixturevalue("kept_database")
    with kept.session(url) as connection:
        if pooler is not None and not pooler.max_prepared_statements:
            connection.prepare_threshold = None
        yield connection


@pytest.fixture
def one(replicas_connection: Rows) -> Replica:
    return Replica("one", replicas_connection)


@pytest.fixture
def other(replicas_connection: Rows) -> Replica:
    return Replica("other", replicas_connection)
