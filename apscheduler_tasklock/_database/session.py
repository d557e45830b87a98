"""The one connection to the database: opened when it is needed, and kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import psycopg
from psycopg import sql
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.connection import (
    NoAnswerError,
    bounded_waits,
    connector,
    ended_by,
    host_count,
    raw_cursor,
    set_up,
    who_locks,
)
from apscheduler_tasklock._database.deadline import Closing, Deadline
from apscheduler_tasklock._database.errors import (
    LOST_STATEMENT_STATES,
    ConflictError,
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

IDLE_TOO_LONG = psycopg.errors.IdleSessionTimeout.sqlstate
# A server says so when it shuts down, or has crashed.
SERVER_ENDS = (
    psycopg.errors.AdminShutdown.sqlstate,
    psycopg.errors.CrashShutdown.sqlstate,
    psycopg.errors.CannotConnectNow.sqlstate,
)

# How many attempts to connect may hang at a time, each in a thread that nobody can end.
MOST_CONNECTING = 2

# Gets whether the server has said that it ends an idle connection.
Ended = Callable[[bool], None]


class Session:
    """A connection in autocommit mode, whose waits end. One thread uses it.

    :param connect: opens it
    :param attempt: seconds within which each answer has to come
    :param ended: called when it turns out to have been ended by the other side while it was idle,
        and not since it was idle for too long
    :param lock_query: what tells, after a statement that was cancelled, who has our tables locked
    :param hosts: how many it tries to connect to, one after the other
    :ivar listens: whether the connection that there is listens on a channel
    :ivar notified: whether something was notified, or may have been missed before that
    """

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        attempt: float,
        ended: Ended = lambda _by_server: None,
        lock_query: bytes | None = None,
        hosts: int = 1,
    ) -> None:
        self._connect = connect
        # libpq takes as long for each host, and at least 2 seconds; there is one more to set it up.
        self._connect_limit = hosts * max(2.0, attempt) + 1.0
        self._connecting: list[threading.Thread] = []
        self.attempt = attempt
        self._ended = ended
        self._lock_query = lock_query
        self._prepares = True
        self._connection: psycopg.Connection[Any] | None = None
        self.listens = False
        self.notified = False

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None

    @property
    def limit(self) -> float:
        """Seconds within which a connection has come, and what is sent on it is answered."""
        return self._connect_limit + self.attempt

    def open(self, deadline: Deadline) -> None:
        """Make sure that there is a connection.

        Whatever keeps it from coming may be over at the next attempt.

        :param deadline: when nothing is waited for any more
        :raises TaskLockDatabaseError: the database is unavailable; another attempt may succeed
        :raises psycopg.Error: the connection failed, and would fail again
        """
        self.hear()
        if self._connection is not None:
            return
        try:
            connection = self._connected(deadline)
        except TaskLockError:
            raise
        except Exception as error:
            original = getattr(error, "orig", error)
            unavailable = as_unavailable(error)
            if unavailable is None and isinstance(original, psycopg.Error):
                raise original from None
            # Else it is as from an application's own hook that fetches a password.
            raise unavailable or TaskLockDatabaseError(f"no connection: {error!r}") from error
        if not self._prepares:
            connection.prepare_threshold = None
        self._connection = connection

    def hear(self) -> None:
        """Take in what came while nothing was asked: a notification, or the connection's end."""
        connection = self._connection
        if connection is None:
            return
        ended = ended_by(connection)
        if ended is None:
            # Also what has come together with the last answer, and is in libpq's buffer.
            while self.listens and connection.pgconn.notifies() is not None:
                self.notified = True
            return
        self.close()
        if ended != IDLE_TOO_LONG:
            self._ended(ended in SERVER_ENDS)

    def listen(self, cursor: Any, channel: str) -> bool:
        """Listen on a channel, on the connection that is open; tell whether that can be done.

        It cannot through a pooler, which gives the session to one client after the other.

        :param cursor: on the connection
        """
        connection = self._connection
        assert connection is not None
        if connection.prepare_threshold is None:  # it is not direct, by the same question
            return False
        if not self.listens:
            connection.add_notify_handler(self._note_notification)
        cursor.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        self.listens = self.notified = True
        return True

    def _note_notification(self, _notify: psycopg.Notify) -> None:
        self.notified = True

    def fileno(self) -> int:
        """Return the connection's socket."""
        assert self._connection is not None
        return self._connection.fileno()

    def _connected(self, deadline: Deadline) -> psycopg.Connection[Any]:
        """Return a new connection, unless it does not come in time."""
        self._connecting = [thread for thread in self._connecting if thread.is_alive()]
        if len(self._connecting) >= MOST_CONNECTING:
            raise TaskLockDatabaseError(
                f"{MOST_CONNECTING} attempts to connect have not come to an end yet, as where a "
                "name is looked up in vain"
            )
        return deadline.call(
            self._connect,
            lambda late: late.close(),
            within=self._connect_limit,
            started=self._connecting.append,
        )

    @contextmanager
    def cursor(self, deadline: Deadline, seconds: float | None = None) -> Iterator[Any]:
        """Give a cursor on the connection, which is open.

        One that fails is never used again: whatever interrupted it may have left an answer unread.

        :param seconds: how long an answer is waited for; by default the limit of an attempt
        :raises TaskLockDatabaseError: the database is unavailable; another attempt may succeed
        :raises psycopg.Error: the statement failed, and would fail again
        """
        connection = self._connection
        assert connection is not None
        reusable = False
        try:
            with bounded_waits(connection, seconds or self.attempt, deadline):
                yield raw_cursor(connection)
            reusable = True
        except TaskLockError as error:
            # What was made of an answer. But a server that has become read-only, as in a failover,
            # stays so for this session; and so may what made a statement fail.
            is_outage = isinstance(error, TaskLockDatabaseError)
            is_outage = is_outage and not isinstance(error, ConflictError)
            reusable = not (is_outage or isinstance(error.__cause__, psycopg.Error))
            raise
        except psycopg.Error as error:
            if error.sqlstate in LOST_STATEMENT_STATES:
                self._prepares = False  # it is a pooler that was not recognized as one
            unavailable = self._locked(connection, error) or as_unavailable(error)
            if unavailable is None:
                raise
            raise unavailable from error
        finally:
            if not reusable:
                self.close()

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

    def close(self) -> None:
        """Close the connection, if it is open. The next request opens another one."""
        connection, self._connection = self._connection, None
        self.listens = False
        if connection is not None:
            connection.close()


class NoSession(Session):
    """In place of a connection where no database is asked: nothing is opened.

    :param attempt: seconds within which each answer has to come
    """

    def __init__(self, attempt: float) -> None:
        super().__init__(_no_connection, attempt)

    def open(self, _deadline: Deadline) -> None:
        """Open nothing."""

    @contextmanager
    def cursor(self, _deadline: Deadline, _seconds: float | None = None) -> Iterator[Any]:
        """Give a cursor that executes nothing."""
        yield NoCursor()


def _no_connection() -> psycopg.Connection[Any]:
    raise NotImplementedError


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


def make_session(
    database: str | URL | Engine,
    *,
    attempt: float,
    application_name: str,
    closing: Closing | None,
    ended: Ended,
    lock_query: bytes | None = None,
) -> Session:
    """Return a session of a URL, or one that is opened as an application's engine opens its own.

    :param attempt: seconds within which each answer has to come
    :param application_name: shown by ``pg_stat_activity``, unless an engine is given
    :param closing: says when claiming is stopped, from when on connecting is short
    :param ended: called when an idle connection turns out to have been ended by the other side
    :param lock_query: as of :class:`Session`
    :raises TaskLockOptionError: the task lock cannot use this database
    """
    hosts = host_count(as_url(database))
    if isinstance(database, Engine):
        engine = database
        check_engine(engine)
        return Session(lambda: open_apart(engine, attempt), attempt, ended, lock_query, hosts)
    connect = connector(as_url(database), attempt, application_name, closing)
    return Session(connect, attempt, ended, lock_query, hosts)


def open_apart(engine: Engine, attempt: float) -> psycopg.Connection[Any]:
    """Open a connection as an application's engine does, of which its pool knows nothing.

    :param attempt: seconds within which each answer has to come
    :raises TaskLockOptionError: a listener of the engine leaves a transaction open
    """
    # By a pool for this one: the engine's may be used up, or locked for ever in a forked child.
    proxy = engine.pool.recreate().connect()
    # Psycopg's, as the engine was checked for.
    connection = cast("psycopg.Connection[Any]", proxy.driver_connection)
    proxy.detach()
    try:
        _check_idle(connection)
        connection.autocommit = True
        set_up(connection, attempt, None)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_idle(connection: psycopg.Connection[Any]) -> None:
    if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        raise TaskLockOptionError(
            "the engine gives a connection whose transaction is open (by a listener that runs "
            "SQL and does not end it); give the URL instead of the engine"
        )
