"""Connections to the database: one that is kept, or those of an application's engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import psycopg
from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.pool import PoolProxiedConnection

from apscheduler_tasklock._database.connection import (
    NoAnswerError,
    attempt_limit,
    bounded_waits,
    connector,
    ended_by,
    raw_cursor,
    who_locks,
)
from apscheduler_tasklock._database.deadline import Closing, Deadline
from apscheduler_tasklock._database.errors import (
    LOST_STATEMENT_STATES,
    TableLockedError,
    as_unavailable,
    one_line,
)
from apscheduler_tasklock._database.url import as_url, check_engine
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
)

# How many that have ended an application's pool may give out one after the other.
MOST_REPLACED = 100

IDLE_TOO_LONG = psycopg.errors.IdleSessionTimeout.sqlstate
# A server says so when it shuts down, or has crashed.
SERVER_ENDS = (
    psycopg.errors.AdminShutdown.sqlstate,
    psycopg.errors.CrashShutdown.sqlstate,
    psycopg.errors.CannotConnectNow.sqlstate,
)

# Gets whether the server has said that it ends an idle connection.
Ended = Callable[[bool], None]


@dataclass(eq=False)
class PooledConnection:
    """A connection in use.

    :ivar connection: psycopg's
    :ivar opened_at: when it was opened, or given out for the first time, on the monotonic clock
    :ivar proxy: by which an application's pool takes it back
    """

    connection: psycopg.Connection[Any]
    opened_at: float = field(default_factory=time.monotonic)
    proxy: PoolProxiedConnection | None = None


class Source(Protocol):
    """Where connections come from, each for a short statement."""

    def acquire(self, deadline: Deadline) -> PooledConnection:
        """Return a connection. Raises what psycopg, SQLAlchemy, and an engine's hooks raise.

        :param deadline: when it is too late for one
        :raises TaskLockDatabaseError: none came in time
        """

    def release(self, pooled: PooledConnection, *, reusable: bool) -> None:
        """Take a connection back. One that is not reusable is closed."""

    def close_idle(self) -> None:
        """Close what is idle."""

    def close(self) -> None:
        """Keep none from now on: each is closed after its use."""


class OwnConnection:
    """One connection that nobody else uses, kept while nothing is asked.

    :param connect: opens it
    :param ended: called when it turns out to have been ended by the other side while it was idle,
        and not since it was idle for too long
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], ended: Ended) -> None:
        self._connect = connect
        self._ended = ended
        self._lock = threading.Lock()
        self._idle: PooledConnection | None = None
        self._closed = False

    def acquire(self, deadline: Deadline) -> PooledConnection:
        """Return the idle connection, or a new one."""
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None:
            ended = ended_by(idle.connection)
            if ended is None:
                return idle
            idle.connection.close()
            if ended != IDLE_TOO_LONG:
                self._ended(ended in SERVER_ENDS)
        return PooledConnection(deadline.call(self._connect, lambda late: late.close()))

    def release(self, pooled: PooledConnection, *, reusable: bool) -> None:
        """Keep the connection, unless there is one already."""
        with self._lock:
            if reusable and not self._closed and self._idle is None:
                self._idle = pooled
                return
        pooled.connection.close()

    def close_idle(self) -> None:
        """Close the connection, if it is not in use."""
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None:
            idle.connection.close()

    def close(self) -> None:
        """Keep none from now on."""
        self._closed = True
        self.close_idle()


class EngineConnections:
    """The connections of an application's engine, which keeps them as it likes.

    :param ended: called when an idle one turns out to have been ended by the other side, and not
        since it was idle for too long
    """

    def __init__(self, engine: Engine, ended: Ended) -> None:
        self._engine = engine
        self._ended = ended
        self._closed = False

    def acquire(self, deadline: Deadline) -> PooledConnection:
        """Check a connection out."""
        proxy = deadline.call(self._engine.raw_connection, _close_for_good)
        for _ in range(MOST_REPLACED):
            ended = ended_by(_driver_connection(proxy))
            if ended is None:
                break
            _close_for_good(proxy)
            if ended != IDLE_TOO_LONG:
                self._ended(ended in SERVER_ENDS)
            proxy = deadline.call(self._engine.raw_connection, _close_for_good)
        opened_at = proxy.info.setdefault("tasklock_opened_at", time.monotonic())
        return PooledConnection(_driver_connection(proxy), opened_at, proxy)

    def release(self, pooled: PooledConnection, *, reusable: bool) -> None:
        """Check a connection in."""
        assert pooled.proxy is not None
        if reusable and not self._closed:
            pooled.proxy.close()
        else:
            _close_for_good(pooled.proxy)

    def close_idle(self) -> None:
        """Do nothing: what is idle is the application's."""

    def close(self) -> None:
        """Close what is in use once it is used no more. What is idle is the application's.

        The application may dispose of its engine after a shutdown, and what is checked in later
        would stay open in a pool that nobody has any more.
        """
        self._closed = True


class Pool:
    """Gives out connections in autocommit mode, whose waits end.

    :param source: where they come from
    :param attempt: seconds within which each answer has to come
    :param own: whether nobody else uses them
    :param lock_query: what tells, after a statement that was cancelled, who has our tables locked
    """

    def __init__(
        self, source: Source, attempt: float, *, own: bool, lock_query: bytes | None = None
    ) -> None:
        self._lock_query = lock_query
        self._source = source
        self.attempt = attempt
        self._own = own
        self._prepares = own

    def acquire(self, deadline: Deadline) -> PooledConnection:
        """Return a connection, whatever keeps it from coming may be over at the next attempt.

        :param deadline: when nothing is waited for any more
        :raises TaskLockDatabaseError: the database is unavailable; another attempt may succeed
        :raises psycopg.Error: the connection failed, and would fail again
        """
        try:
            pooled = self._source.acquire(deadline)
        except TaskLockDatabaseError:
            raise
        except Exception as error:
            original = getattr(error, "orig", error)
            unavailable = as_unavailable(error)
            if unavailable is None and isinstance(original, psycopg.Error):
                raise original from None
            # Else it is as from an application's own hook that fetches a password.
            raise unavailable or TaskLockDatabaseError(f"no connection: {error!r}") from error
        idle = psycopg.pq.TransactionStatus.IDLE
        if not self._own and pooled.connection.info.transaction_status != idle:
            self._source.release(pooled, reusable=True)
            raise TaskLockOptionError(
                "the engine gives a connection whose transaction is open (by a listener that runs "
                "SQL and does not end it); give the URL instead of the engine"
            )
        return pooled

    @contextmanager
    def cursor(self, pooled: PooledConnection, deadline: Deadline) -> Iterator[Any]:
        """Give a cursor on a connection, and take the connection back.

        One that fails is never used again: whatever interrupted it may have left an answer unread.

        :raises TaskLockDatabaseError: the database is unavailable; another attempt may succeed
        :raises psycopg.Error: the statement failed, and would fail again
        """
        reusable = False
        try:
            deadline.check()  # rather than send what there is no time to have answered
            with (
                bounded_waits(pooled.connection, self.attempt, deadline),
                self._as_it_was(pooled.connection),
            ):
                yield raw_cursor(pooled.connection, guest=not self._own)
            reusable = True
        except psycopg.Error as error:
            if error.sqlstate in LOST_STATEMENT_STATES:
                self._prepares = False  # it is a pooler that was not recognized as one
            unavailable = self._locked(pooled.connection, error) or as_unavailable(error)
            if unavailable is None:
                raise
            raise unavailable from error
        finally:
            self._source.release(pooled, reusable=reusable)

    def _locked(
        self, connection: psycopg.Connection[Any], error: psycopg.Error
    ) -> TableLockedError | None:
        """Return the error if a statement was cancelled since somebody has a table locked."""
        if self._lock_query is None or not isinstance(
            error, (NoAnswerError, psycopg.errors.QueryCanceled)
        ):
            return None
        who = who_locks(connection, self._lock_query)
        return None if who is None else TableLockedError(f"{one_line(error)}, since {who}")

    def _as_it_was(self, connection: psycopg.Connection[Any]) -> AbstractContextManager[None]:
        """Prepare nothing where others use the connection, and where a pooler loses statements.

        Our own connections prepare only where they lead to the server itself (see
        ``connector``); of an application's it is not known where they lead.
        """
        return nullcontext() if self._prepares else _as_a_guest(connection)

    def close_idle(self) -> None:
        """Close the idle connection, unless it is an application's own."""
        self._source.close_idle()

    def close(self) -> None:
        """Keep no connection of our own from now on: each is closed after its use."""
        self._source.close()


class NoDatabase(Pool):
    """In place of connections where no database is asked: nothing is opened.

    :param attempt: seconds within which each answer has to come
    """

    def __init__(self, attempt: float) -> None:
        super().__init__(_NoConnections(), attempt, own=True)

    def acquire(self, deadline: Deadline) -> PooledConnection:
        """Return what stands for a connection."""
        return self._source.acquire(deadline)

    @contextmanager
    def cursor(self, _pooled: PooledConnection, deadline: Deadline) -> Iterator[Any]:
        """Give a cursor that executes nothing."""
        deadline.check()
        yield NoCursor()


class _NoConnections:
    """A source that has nothing to open, and nothing to close."""

    def acquire(self, _deadline: Deadline) -> PooledConnection:
        nothing: Any = None
        return PooledConnection(nothing)

    def release(self, pooled: PooledConnection, *, reusable: bool) -> None:
        """Take it back, which is nothing."""

    def close_idle(self) -> None:
        """Close nothing."""

    def close(self) -> None:
        """Close nothing."""


class NoCursor:
    """A cursor on which nothing can be executed.

    :ivar row_factory: as psycopg's cursors have it
    :ivar connection: none
    """

    row_factory: Any = None
    connection: Any = None

    def execute(self, *_: object) -> Any:
        """Raise an error.

        :raises TaskLockError: there is no database
        """
        raise TaskLockError(
            "this needs the database, and there is none: apscheduler_tasklock.testing stands in "
            "for it, which only claims, renews and releases locks. Test this on PostgreSQL"
        )


def make_pool(
    database: str | URL | Engine,
    *,
    timeout: float,
    application_name: str,
    closing: Closing | None,
    ended: Ended,
    lock_query: bytes | None = None,
) -> Pool:
    """Return the connections of a URL, or those of an application's engine.

    :param timeout: seconds within which a claim must have been decided. A single connection
        attempt or statement gets a third of it, so that there is time for another.
    :param application_name: shown by ``pg_stat_activity``, unless an engine is given
    :param closing: says when claiming is stopped, from when on connecting is short
    :param ended: called when an idle connection turns out to have been ended by the other side
    :param lock_query: as of :class:`Pool`
    :raises TaskLockOptionError: the task lock cannot use this database
    """
    attempt = attempt_limit(timeout)
    if isinstance(database, Engine):
        check_engine(database)
        source = EngineConnections(database, ended)
        return Pool(source, attempt, own=False, lock_query=lock_query)
    connect = connector(as_url(database), attempt, application_name, closing)
    return Pool(OwnConnection(connect, ended), attempt, own=True, lock_query=lock_query)


def make_second_pool(
    database: str | URL | Engine, *, timeout: float, application_name: str, ended: Ended
) -> Pool:
    """Return the same database by a connection that nobody else can use up."""
    attempt = attempt_limit(timeout)
    if isinstance(database, Engine):
        engine = database
        return Pool(OwnConnection(lambda: open_apart(engine), ended), attempt, own=False)
    connect = connector(as_url(database), attempt, application_name, None)
    return Pool(OwnConnection(connect, ended), attempt, own=True)


def open_apart(engine: Engine) -> psycopg.Connection[Any]:
    """Open a connection as an application's engine does, of which its pool knows nothing."""
    # By a pool for this one: the engine's may be used up, or locked for ever in a forked child.
    proxy = engine.pool.recreate().connect()
    connection = _driver_connection(proxy)
    proxy.detach()
    return connection


def _close_for_good(proxy: PoolProxiedConnection) -> None:
    """Close a connection instead of checking it in."""
    proxy.invalidate()
    proxy.close()


def _driver_connection(proxy: PoolProxiedConnection) -> psycopg.Connection[Any]:
    connection: Any = proxy.driver_connection
    return connection  # type: ignore[no-any-return]  # psycopg's, as the engine was checked for


@contextmanager
def _as_a_guest(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Make each statement a transaction of its own, and leave no trace on the connection."""
    threshold, connection.prepare_threshold = connection.prepare_threshold, None
    autocommit = connection.autocommit
    if not autocommit:
        connection.autocommit = True
    yield
    if not autocommit:
        connection.autocommit = False
    connection.prepare_threshold = threshold
