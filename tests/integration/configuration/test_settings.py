"""Databases, roles and engines whose settings differ from PostgreSQL's and psycopg's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.datetime import TimestamptzBinaryLoader
from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from apscheduler_tasklock import (
    TaskLockExecutor,
    TaskLockOptionError,
    TaskLocks,
    TaskLockSchemaError,
    upgrade,
)
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock.status import RunningRun
from tests.support.claims import claim, held
from tests.support.polling import eventually
from tests.support.roles import PASSWORD, role
from tests.support.waist import LockClient, Refusal, Renewal, Replica, Stop

pytestmark = pytest.mark.direct("it creates roles and databases, which the pooler does not know")

Connection = psycopg.Connection[Any]
MakeLocks = Callable[..., LockClient]


@pytest.fixture(params=["URL", "engine"])
def database(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str | Engine]]:
    """Make what is given to the library of a URL: itself, or an engine."""
    engines: list[Engine] = []

    def make(url: str) -> str | Engine:
        if request.param == "URL":
            return url
        engines.append(create_engine(make_url(url).set(drivername="postgresql+psycopg")))
        return engines[-1]

    yield make
    for engine in engines:
        engine.dispose()


def claim_twice(one: LockClient, another: LockClient, name: str = "task") -> Refusal:
    """Let one claim a task, another be refused it, and return what that one was told."""
    lock = held(one, name, lease=60)
    refused = claim(another, name)
    assert isinstance(refused, Refusal)
    one.release(lock)
    return refused


@pytest.mark.parametrize("style", ["SQL, DMY", "German", "Postgres, MDY"])
def test_dates_may_be_written_in_any_style(
    make_locks: MakeLocks,
    database: Callable[[str], str | Engine],
    database_url: str,
    connection: Connection,
    style: str,
) -> None:
    with role(database_url, f"SUPERUSER LOGIN PASSWORD '{PASSWORD}'") as (name, url):
        connection.execute(
            sql.SQL("ALTER ROLE {} SET DateStyle = {}").format(sql.Identifier(name), style)
        )
        locks = [make_locks(database(url), replica_id=f"replica {n}") for n in range(2)]
        for one in locks:
            one.check()
        refused = claim_twice(*locks)
        for one in locks:
            one.close()
    assert abs((refused.locked_until - datetime.now(timezone.utc)).total_seconds()) < 3600


@contextmanager
def encoded(database_url: str, encoding: str) -> Iterator[str]:
    """Create a database whose text is written in this encoding."""
    name = f"tasklock_encoded_{uuid4().hex[:12]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'"
        )
        try:
            yield make_url(database_url).set(database=name).render_as_string(hide_password=False)
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_database_in_sql_ascii_keeps_names_as_they_are(
    make_locks: MakeLocks, database_url: str
) -> None:
    """An engine for one has to be given a ``client_encoding``, or SQLAlchemy itself fails."""
    with encoded(database_url, "SQL_ASCII") as url:  # which does not know what it is written in
        upgrade(url)
        locks = [make_locks(url, replica_id=f"büro {n}") for n in range(2)]
        for one in locks:
            one.check()
        refused = claim_twice(*locks, name="prüfung ✓")
        for one in locks:
            one.close()
    assert refused.holder == "büro 0"


def test_renewals_without_a_lease_arrive_where_arrays_have_no_nulls(connection: Connection) -> None:
    """A setting for applications of PostgreSQL 8.1, with which the text ``NULL`` is no null."""
    connection.execute("SET array_nulls = off")
    replica = Replica("one", connection)
    claims = {task: replica.claim(task)[0] for task in ("one", "two")}
    renewals = [Renewal("one", claims["one"], None), Renewal("two", claims["two"], 5.0)]
    assert replica.renew(*renewals).keys() == set(claims.values())


def test_a_replica_in_sql_ascii_tells_its_runs_in_its_sign_of_life_and_at_its_stop(
    database_url: str,
) -> None:
    """Such a database takes no escapes, as JSON has them, for other characters than ASCII."""
    run = RunningRun("prüfung ✓", 1, "büro", datetime.now(timezone.utc))
    with encoded(database_url, "SQL_ASCII") as url:
        upgrade(url)
        with psycopg.connect(url, client_encoding="UTF8", autocommit=True) as connection:
            replica = Replica("büro", connection)
            replica.alive(["prüfung ✓"], running=[run])
            assert replica.ask(Stop([run])) == 1
            found = connection.execute("SELECT running FROM task_lock_replica").fetchone()
    assert found == ([run.reported],)


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1"])
def test_a_schema_and_a_table_may_have_names_of_other_characters_than_ascii(
    make_locks: MakeLocks,
    database: Callable[[str], str | Engine],
    database_url: str,
    encoding: str,
) -> None:
    names = {"schema": "büro", "table": 'Sperre "für" 100%'}
    with encoded(database_url, encoding) as url:
        upgrade(url, **names)
        locks = [make_locks(database(url), replica_id=f"büro {n}", **names) for n in range(2)]
        for one in locks:
            one.check()
        refused = claim_twice(*locks, name="prüfung")
        for one in locks:
            one.close()
    assert refused.holder == "büro 0"


@pytest.mark.parametrize("policies", [["SELECT"], ["SELECT", "INSERT"], []])
def test_row_level_security_without_a_policy_is_an_error_at_start_that_names_it(
    make_locks: MakeLocks, database_url: str, connection: Connection, policies: list[str]
) -> None:
    """Not a task that is refused for ever."""
    with role(database_url) as (name, url):
        user = sql.Identifier(name)
        connection.execute("ALTER TABLE task_lock ENABLE ROW LEVEL SECURITY")
        tables = "task_lock, task_lock_run, task_lock_replica"
        grant = sql.SQL(f"GRANT SELECT, INSERT, UPDATE ON {tables} TO {{}}")
        connection.execute(grant.format(user))
        for command in policies:
            connection.execute(
                f"CREATE POLICY own_{command} ON task_lock FOR {command} "
                + ("WITH CHECK (true)" if command == "INSERT" else "USING (true)")
            )
        locks = make_locks(url)
        missing = [c for c in ("SELECT", "INSERT", "UPDATE") if c not in policies]
        with pytest.raises(TaskLockSchemaError, match="row-level security") as refused:
            locks.check()
        says = str(refused.value)
        assert f"no policy for {', '.join(missing)};" in says
        connection.execute(says.partition("let its owner run: ")[2])
        locks.check()
        assert isinstance(claim_twice(locks, make_locks(url)), Refusal)


def test_a_policy_that_rejects_the_rows_is_told_in_postgresqls_words(
    make_locks: MakeLocks, database_url: str, connection: Connection
) -> None:
    """No GRANT would help."""
    with role(database_url) as (name, url):
        user = sql.Identifier(name)
        connection.execute("ALTER TABLE task_lock ENABLE ROW LEVEL SECURITY")
        for statement in (
            "GRANT SELECT, INSERT, UPDATE ON task_lock TO {}",
            "CREATE POLICY none ON task_lock TO {} USING (true) WITH CHECK (false)",
        ):
            connection.execute(sql.SQL(statement).format(user))
        locks = make_locks(url)
        with pytest.raises(TaskLockSchemaError, match="violates row-level security policy"):
            claim(locks)
        locks.close()


@pytest.mark.nightly
def test_a_short_idle_session_timeout_leaves_the_rows_believed(
    make_locks: MakeLocks, database_url: str, connection: Connection
) -> None:
    """Doubted again and again, a dead run would stand against its task for ever."""
    with role(database_url) as (name, url):
        user = sql.Identifier(name)
        grant = sql.SQL("GRANT SELECT, INSERT, UPDATE ON task_lock TO {}")
        connection.execute(grant.format(user))
        setting = sql.SQL("ALTER ROLE {} SET idle_session_timeout = '1s'")
        connection.execute(setting.format(user))
        locks = make_locks(url, claim_timeout=1)
        locks.release(held(locks, "first"))
        eventually(lambda: locks.stable)
        theirs = "SELECT FROM pg_stat_activity WHERE usename = %s"
        for task in ("second", "third"):
            eventually(lambda: connection.execute(theirs, [name]).rowcount == 0)
            locks.release(held(locks, task))
            assert locks.stable
        locks.close()


def test_a_window_that_somebody_has_set_to_end_at_last_can_be_opened_again(
    make_locks: MakeLocks, connection: Connection
) -> None:
    locks = make_locks()
    lock = held(locks)
    connection.execute("UPDATE task_lock SET window_until = '9999-12-30Z'")
    locks.release(lock, RunOutcome(WindowAfter.OPEN))
    opened = connection.execute("SELECT window_start - window_until FROM task_lock").fetchone()
    assert opened == (timedelta(seconds=1),)


def test_a_window_that_somebody_has_set_to_end_at_last_is_refused_and_released(
    make_locks: MakeLocks,
    database: Callable[[str], str | Engine],
    database_url: str,
    connection: Connection,
) -> None:
    locks = make_locks(database(database_url))
    lock = held(locks)
    connection.execute("UPDATE task_lock SET window_until = '9999-12-30Z'")
    released = locks.release(lock)
    assert released is not None
    assert released.locked_until.year == 9999
    refused = claim(locks)
    assert isinstance(refused, Refusal)
    assert refused.locked_until.year == 9999


def test_whatever_an_engine_makes_of_rows_ours_are_our_own(
    engine: Engine, make_locks: MakeLocks, database_url: str
) -> None:
    class Loud(psycopg.Cursor[Any]):
        def fetchone(self) -> Any:
            raise AssertionError("the application's cursor was used")

    # After the dialect's own first look, which could not read such rows either.
    @event.listens_for(engine, "checkout")
    def set_up(driver: Any, *_: Any) -> None:
        driver.row_factory = dict_row
        driver.cursor_factory = Loud

    locks = make_locks(engine)
    locks.check()
    assert isinstance(claim_twice(locks, make_locks(database_url)), Refusal)


class OwnTimes(TimestamptzBinaryLoader):
    """Makes something else of times, as an application may that has a class of its own for them."""

    def load(self, data: Any) -> Any:
        return f"a time of {len(data)} bytes"


@pytest.fixture
def _own_times() -> Iterator[None]:
    """Let psycopg give such times on all connections of this process that are yet to be opened."""
    times = psycopg.adapters.types["timestamptz"].oid
    usual = psycopg.adapters.get_loader(times, psycopg.pq.Format.BINARY)
    assert usual is not None
    psycopg.adapters.register_loader(times, OwnTimes)
    try:
        yield
    finally:
        psycopg.adapters.register_loader(times, usual)


@pytest.mark.usefixtures("_own_times")
@pytest.mark.parametrize("by_engine", [False, True], ids=["own connection", "an engine's"])
def test_whatever_psycopg_makes_of_times_ours_are_our_own(
    database_url: str, *, by_engine: bool
) -> None:
    engine = create_engine(make_url(database_url).set(drivername="postgresql+psycopg"))
    locks = TaskLocks(engine if by_engine else database_url)
    try:
        with locks.hold("task", min_lock=0, max_lock=60) as held:
            assert held.locked_until > datetime.now(timezone.utc)
    finally:
        locks.close()
        engine.dispose()


def test_the_synchronous_side_of_an_async_engine_is_refused(database_url: str) -> None:
    engine = create_async_engine(make_url(database_url).set(drivername="postgresql+psycopg"))
    with pytest.raises(TaskLockOptionError, match="synchronous side of an AsyncEngine"):
        TaskLockExecutor(engine.sync_engine)
