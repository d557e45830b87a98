"""The way to the database: an engine of few connections, limits on every wait, named failures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import sqlalchemy.exc
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.failures import explain_away

# What an engine of ours may hold open (see README, "What it costs").
IDLE_CONNECTIONS = 1
MOST_CONNECTIONS = 5

DRIVER = "postgresql+psycopg"


class BoundedConnection(psycopg.Connection[Any]):
    """A psycopg connection that does not wait for an answer for ever.

    TCP's own limits notice a dead path, but not a server that is stopped, waits for a lock, or
    a middleman that swallows the answer. A ``statement_timeout`` would be session state, which
    pgbouncer in transaction mode gives to somebody else.
    """

    answer_timeout: float = 10.0

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        """Wait as psycopg does, at most ``answer_timeout`` seconds."""
        try:
            return super().wait(_until(gen, self.answer_timeout), *args, **kwargs)
        except _NoAnswerError:
            # The statement must not be carried out later, when nobody waits for it.
            with suppress(psycopg.Error):
                self.cancel_safe(timeout=1.0)
            raise


class _NoAnswerError(psycopg.OperationalError):
    """The server did not answer in time."""


def _until(gen: Generator[Any, Any, Any], seconds: float) -> Generator[Any, Any, Any]:
    """Pass a psycopg wait on, and end it after so many seconds. psycopg wakes it every 0.1 s."""
    deadline = time.monotonic() + seconds
    ready = None
    while True:
        try:
            wanted = next(gen) if ready is None else gen.send(ready)
        except StopIteration as finished:
            return finished.value
        ready = yield wanted
        if time.monotonic() > deadline:
            raise _NoAnswerError(f"no answer from the server within {seconds:.1f} sec")


class Database:
    """Cursors on the application's database, in autocommit mode, for one short statement each.

    :param database: a URL, or an SQLAlchemy engine that is used as it is, except for autocommit
    :param timeout: seconds within which a claim must have been decided. A single connection
        attempt or statement gets a third of it, so that there is time for another.
    :param application_name: shown by ``pg_stat_activity``, for an engine made here
    """

    def __init__(
        self, database: str | URL | Engine, *, timeout: float, application_name: str
    ) -> None:
        self._own = not isinstance(database, Engine)
        if isinstance(database, Engine):
            _check_engine(database)
            self._engine = database
        else:
            self._engine = _make_engine(parse_url(database), timeout, application_name)
        self._pid = os.getpid()

    @property
    def url(self) -> URL:
        """Where the database is. Its text hides the password."""
        return self._engine.url

    @property
    def where(self) -> str:
        """The database's host, port and name, for messages."""
        url = self._engine.url
        host = url.host or url.query.get("host") or "the default host"
        port = f":{url.port}" if url.port else ""
        return f"{host}{port}, database {url.database or url.username!r}"

    @contextmanager
    def cursor(self) -> Iterator[Any]:
        """Lend a cursor in autocommit mode. A connection that fails is never used again.

        :raises TaskLockDatabaseError: the database is away; another attempt may succeed
        :raises psycopg.Error: the statement failed, and would fail again
        """
        self._forget_parents_connections()
        with _away_as_one_error():
            borrowed = self._engine.raw_connection()
        connection = borrowed.driver_connection
        assert connection is not None
        try:
            with _away_as_one_error(), _autocommit(connection):
                yield connection.cursor()
        except BaseException:
            # Whatever interrupted it may have left an answer unread.
            borrowed.invalidate()
            raise
        finally:
            borrowed.close()

    def close(self) -> None:
        """Close the idle connection of an engine made here. It can be used again."""
        if self._own:
            self._engine.dispose()

    def _forget_parents_connections(self) -> None:
        """Leave the parent's sockets alone in a forked child."""
        if self._pid != os.getpid():
            self._engine.dispose(close=False)
            self._pid = os.getpid()


def parse_url(database: str | URL) -> URL:
    """Return the URL with psycopg 3 as its driver.

    :raises TaskLockOptionError: not a PostgreSQL URL. The message never repeats it, since it may
        hold a password.
    """
    if not isinstance(database, (str, URL)):
        raise TaskLockOptionError(
            "database must be a URL like postgresql://user@host/name or an SQLAlchemy Engine, "
            f"not {type(database).__name__}"
        )
    try:
        url = make_url(database)
    except (ArgumentError, ValueError):
        raise TaskLockOptionError(
            "database is not a URL; it should look like postgresql://user:password@host:5432/name"
        ) from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise TaskLockOptionError(
            f"database is a {url.get_backend_name()} URL; the task lock needs PostgreSQL, "
            "as in postgresql://user:password@host:5432/name"
        )
    return url.set(drivername=DRIVER)


@contextmanager
def _away_as_one_error() -> Iterator[None]:
    try:
        yield
    except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError) as error:
        away = explain_away(error)
        if away is not None:
            raise away from error
        original = getattr(error, "orig", None)
        if isinstance(original, psycopg.Error):
            raise original from None
        raise


@contextmanager
def _autocommit(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Make each statement a transaction of its own, also on an application's own engine."""
    if connection.autocommit:
        yield
        return
    connection.autocommit = True
    yield
    connection.autocommit = False


def _check_engine(engine: Engine) -> None:
    if engine.dialect.name != "postgresql" or engine.dialect.driver != "psycopg":
        raise TaskLockOptionError(
            f"the engine uses {engine.dialect.name}+{engine.dialect.driver}; the task lock needs "
            f"psycopg 3: create_engine('{DRIVER}://...'), or give the URL instead"
        )


def _make_engine(url: URL, timeout: float, application_name: str) -> Engine:
    attempt = max(1.0, timeout / 3)
    engine = create_engine(
        url,
        isolation_level="AUTOCOMMIT",
        pool_size=IDLE_CONNECTIONS,
        max_overflow=MOST_CONNECTIONS - IDLE_CONNECTIONS,
        pool_timeout=timeout,
        # In autocommit mode there is nothing to roll back between two statements.
        pool_reset_on_return=None,
    )
    event.listen(engine, "do_connect", _connector(attempt, application_name))
    return engine


def _connector(attempt: float, application_name: str) -> Callable[..., BoundedConnection]:
    """Return what opens a connection whose waits end within ``attempt`` seconds each."""
    defaults = {
        "application_name": application_name,
        "connect_timeout": max(2, int(attempt)),  # libpq takes whole seconds, and at least 2
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": int(attempt * 1000),
    }

    def connect(
        _dialect: Any, _record: Any, arguments: list[Any], parameters: dict[str, Any]
    ) -> BoundedConnection:
        connection: BoundedConnection = BoundedConnection.connect(
            *arguments, **{**defaults, **parameters}
        )
        connection.answer_timeout = attempt
        return connection

    return connect
