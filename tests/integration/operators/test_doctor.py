"""What ``TaskLocks.doctor`` finds, on connections of a URL and of an application's engine.

What each check finds wrong is in test_operate_doctor.py.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.engine import URL

from apscheduler_tasklock import Finding, TaskLockOptionError, TaskLocks
from tests.support.commands import PatientTaskLocks
from tests.support.polling import eventually
from tests.support.rows import add_replica
from tests.support.schedulers import NO_DATABASE

Connection = psycopg.Connection[Any]
Database = Callable[[str], "URL | Engine"]

TABLES = ("task_lock", "task_lock_run", "task_lock_replica", "task_lock_job")


def url_of(url: str) -> URL:
    return make_url(url).set(drivername="postgresql+psycopg")


def engine_of(url: str) -> Engine:
    return create_engine(url_of(url))


@pytest.fixture(params=[url_of, engine_of], ids=["URL", "engine"])
def database(request: pytest.FixtureRequest) -> Database:
    """What a database's URL is given as: the URL itself, or an engine that was made of it."""
    made: Database = request.param
    return made


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    made = engine_of(database_url)
    yield made
    made.dispose()


def examined(database: Any, **options: Any) -> list[Finding]:
    """Return what is found; none of it has the password."""
    with PatientTaskLocks(database, **options) as locks:
        found = locks.doctor()
    assert "hunter2" not in str(found)
    return found


def wrong(found: list[Finding]) -> list[Finding]:
    bad = [finding for finding in found if finding.level == "wrong"]
    assert all(finding.remedy for finding in bad), bad
    return bad


def test_a_set_up_as_it_should_be(
    database: Database, database_url: str, connection: Connection
) -> None:
    add_replica(connection, "one")
    found = examined(database(database_url))
    assert wrong(found) == []
    what = {finding.what for finding in found}
    assert {"versions", "connection", "server", "clock", "revision", "replicas"} <= what
    assert {f"writing to {table}" for table in TABLES} <= what
    for table in TABLES[:2]:
        assert connection.execute(f"SELECT FROM {table}").rowcount == 0


@pytest.mark.direct("the pooler keeps connections to the server open")
def test_its_connection_is_closed(
    database: Database, database_url: str, connection: Connection
) -> None:
    others = """SELECT count(*) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid()"""

    def count() -> int:
        [number] = connection.execute(others).fetchone() or (0,)
        return int(number)

    with PatientTaskLocks(database(database_url)) as locks:
        locks.doctor()
        eventually(lambda: count() == 0)


def test_the_tables_are_those_of_the_task_locks(database: Database, database_url: str) -> None:
    found = wrong(examined(database(database_url), table="elsewhere"))
    assert {finding.what for finding in found} >= {"table elsewhere", "table elsewhere_run"}


def test_a_database_that_is_not_there_is_a_finding(database: Database) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    [found] = wrong(examined(database(f"postgresql://app:hunter2@127.0.0.1:{port}/db")))
    assert found.what == "connection"
    assert found.says.startswith(f"to 127.0.0.1:{port}, database 'db': ")
    assert "check the host and the port" in found.remedy


@pytest.mark.parametrize("namespace", ["shop\0", "\x01all", 7])
def test_an_invalid_namespace_is_an_error(namespace: Any) -> None:
    with TaskLocks(NO_DATABASE) as locks, pytest.raises(TaskLockOptionError, match="doctor"):
        locks.doctor(namespace=namespace)


class TestAnEngine:
    """Whose listeners and creator are the application's code."""

    def test_whose_listener_raises_tells_the_errors_class_alone(self, engine: Engine) -> None:
        @event.listens_for(engine, "do_connect")
        def fetch_password(*_: Any) -> None:
            raise RuntimeError("the vault has no hunter2")

        [found] = wrong(examined(engine))
        assert (found.what, found.says.endswith("raises RuntimeError")) == ("connection", True)

    def test_whose_listener_leaves_a_transaction_open(self, engine: Engine) -> None:
        @event.listens_for(engine, "connect")
        def greet(connection: Any, _record: Any) -> None:
            connection.autocommit = False
            connection.execute("SELECT 1")

        [found] = wrong(examined(engine))
        assert "transaction is open" in found.says
        assert found.remedy == "give the URL instead of the engine"

    def test_whose_url_has_a_password_with_a_question_mark(self) -> None:
        """SQLAlchemy takes what follows for a parameter, whose name libpq would repeat."""
        url = "postgresql+psycopg://app@127.0.0.1/db?hunter2=x"
        [found] = wrong(examined(create_engine(url)))
        assert "a parameter that libpq does not have" in found.says

    @pytest.mark.nightly
    def test_whose_listener_hangs(self, engine: Engine) -> None:
        go_on = threading.Event()

        @event.listens_for(engine, "do_connect")
        def hang(*_: Any) -> None:
            go_on.wait(60)

        try:
            [found] = wrong(examined(engine, claim_timeout=10.0))
        finally:
            go_on.set()
        assert "no connection came within" in found.says
