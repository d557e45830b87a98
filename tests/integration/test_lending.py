"""How many connections are open: few in a burst, and one when it is over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier, Event
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event

from apscheduler_tasklock import TaskLockDatabaseError, TaskLocks
from apscheduler_tasklock._database.database import Database
from apscheduler_tasklock._database.deadline import Closing
from apscheduler_tasklock._database.pool import MOST_CONNECTIONS
from tests.support.claims import held
from tests.support.polling import eventually

pytestmark = pytest.mark.direct("it counts the library's connections in the server")

Connection = psycopg.Connection[Any]
MakeDatabase = Callable[..., Database]


@pytest.fixture
def make_database(database_url: str, request: pytest.FixtureRequest) -> MakeDatabase:
    def make(timeout: float = 60) -> Database:
        database = Database(database_url, timeout=timeout, application_name="lent")
        request.addfinalizer(database.close)
        return database

    return make


def pids(connection: Connection, application: str = "lent") -> set[int]:
    """Return the server processes of the open connections."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
    return {pid for (pid,) in connection.execute(query, [application])}


def pid_of(cursor: Any) -> int:
    pid: int = cursor.connection.info.backend_pid
    return pid


def test_at_most_five_are_open_and_the_next_waits_for_one_of_them(
    make_database: MakeDatabase, connection: Connection
) -> None:
    database = make_database(timeout=0.1)
    with ExitStack() as burst:
        for _ in range(MOST_CONNECTIONS):
            burst.enter_context(database.cursor())
        with pytest.raises(TaskLockDatabaseError, match="all are in use"):
            burst.enter_context(database.cursor())
        assert len(pids(connection)) == MOST_CONNECTIONS == 5


def test_one_that_waits_gets_what_another_gives_back(make_database: MakeDatabase) -> None:
    database = make_database()
    with ThreadPoolExecutor() as pool, ExitStack() as burst:
        first = ExitStack()
        used = pid_of(first.enter_context(database.cursor()))
        for _ in range(MOST_CONNECTIONS - 1):
            burst.enter_context(database.cursor())

        def waits() -> int:
            with database.cursor() as cursor:
                return pid_of(cursor)

        waiting = pool.submit(waits)
        assert not waiting.done()
        first.close()
        assert waiting.result(60) == used


def test_what_a_burst_opened_is_kept_until_it_is_over(
    make_database: MakeDatabase, connection: Connection
) -> None:
    database = make_database()
    with database.cursor() as first:
        with database.cursor() as second, database.cursor() as third:
            opened = {pid_of(first), pid_of(second), pid_of(third)}
        assert pids(connection) == opened
        with database.cursor() as second, database.cursor() as third:
            assert {pid_of(first), pid_of(second), pid_of(third)} == opened
    eventually(lambda: len(pids(connection)) == 1)
    assert pids(connection) < opened


def test_one_whose_statement_failed_is_not_lent_again(make_database: MakeDatabase) -> None:
    database = make_database()

    def fail() -> None:
        with database.cursor() as cursor:
            failed.append(pid_of(cursor))
            cursor.execute("SELECT 1 / 0")

    failed: list[int] = []
    with pytest.raises(psycopg.errors.DivisionByZero):
        fail()
    with database.cursor() as cursor:
        assert pid_of(cursor) not in failed


def test_what_broke_one_closes_those_that_are_idle(
    make_database: MakeDatabase, connection: Connection
) -> None:
    """Each of them may cost an attempt, of which a release has few."""
    database = make_database()
    idle: set[int] = set()

    def fail() -> None:
        with database.cursor() as first:
            with database.cursor() as second, database.cursor() as third:
                idle.update({pid_of(second), pid_of(third)})
            assert idle <= pids(connection)
            connection.execute("SELECT pg_terminate_backend(%s)", [pid_of(first)])
            first.execute("SELECT 1")

    with pytest.raises(TaskLockDatabaseError):
        fail()
    eventually(lambda: not idle & pids(connection))


def test_what_could_not_be_opened_leaves_its_place_to_others(make_database: MakeDatabase) -> None:
    database = make_database(timeout=0.1)
    lender: Any = database._lender
    connect = lender._connect

    def fail() -> Any:
        raise psycopg.OperationalError("no connection today")

    lender._connect = fail
    for _ in range(MOST_CONNECTIONS + 1):
        with pytest.raises(TaskLockDatabaseError, match="today"), database.cursor():
            pass
    lender._connect = connect
    with database.cursor() as cursor:
        assert cursor.execute("SELECT 1").fetchone() == (1,)


def test_none_is_kept_after_closing_and_one_again_after_opening(
    make_database: MakeDatabase, connection: Connection
) -> None:
    database = make_database()
    with database.cursor():
        database.close()
    eventually(lambda: not pids(connection))
    database.open()
    with database.cursor() as cursor:
        pid = pid_of(cursor)
    with database.cursor() as cursor:
        assert pid_of(cursor) == pid


def test_many_claims_at_once_end_with_one_connection(
    make_locks: Callable[..., TaskLocks], connection: Connection
) -> None:
    locks = make_locks()
    together = Barrier(20)

    def claim(number: int) -> None:
        together.wait(60)
        locks.release(held(locks, f"task {number}", min_lock=0, max_lock=60))

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(claim, range(20)))
    eventually(lambda: len(pids(connection, "tasklock replica")) == 1)


@pytest.mark.parametrize("given", ["a URL", "an engine"])
def test_an_idle_connection_that_was_ended_is_replaced_in_silence(
    engine: Engine,
    make_locks: Callable[..., TaskLocks],
    database_url: str,
    connection: psycopg.Connection[Any],
    caplog: pytest.LogCaptureFixture,
    given: str,
) -> None:
    """As by ``idle_session_timeout``, every few minutes. A crash looks alike: rows are doubted."""
    locks = make_locks(database_url if given == "a URL" else engine, claim_timeout=1)
    locks.release(held(locks, "first"))
    eventually(lambda: locks.stable)
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    connection.execute(f"SELECT pg_terminate_backend(pid) {others}")
    eventually(lambda: connection.execute(f"SELECT {others}").rowcount == 0)
    locks.release(held(locks, "second"))
    assert not locks.stable
    assert [r for r in caplog.records if r.levelno >= logging.INFO] == []


class TestAnApplicationsEngine:
    """It may be disposed of right after a shutdown; what is checked in later would stay open."""

    def test_what_is_in_use_at_the_closing_is_closed_after_its_use(self, engine: Engine) -> None:
        database = Database(engine, timeout=60, application_name="unused")
        with database.cursor() as cursor:
            driver = cursor.connection
            database.close()
            engine.dispose()
        assert driver.closed
        database.open()
        with database.cursor() as cursor:
            driver = cursor.connection
        assert not driver.closed

    def test_what_comes_too_late_is_closed(self, engine: Engine) -> None:
        opened: list[Any] = []
        may_open = Event()

        @event.listens_for(engine, "do_connect")
        def wait(_dialect: Any, _record: Any, arguments: Any, parameters: Any) -> Any:
            assert may_open.wait(60)
            opened.append(psycopg.connect(*arguments, **parameters))
            return opened[-1]

        closing = Closing()
        closing.stop()
        database = Database(engine, timeout=60, application_name="unused", closing=closing)
        with pytest.raises(TaskLockDatabaseError, match="in the time that a shutdown leaves"):
            database.cursor().__enter__()
        may_open.set()
        eventually(lambda: opened and opened[0].closed)
