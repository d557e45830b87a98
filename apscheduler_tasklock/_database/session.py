"""The one connection to the database: opened when it is needed, and kept open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, TypeVar, cast

import psycopg
from psycopg import sql
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.abandoned_call import call_within, never
from apscheduler_tasklock._database.connection import SHORTEST_ATTEMPT, connector, set_up
from apscheduler_tasklock._database.outage import as_unavailable
from apscheduler_tasklock._database.sqlstates import (
    LOST_STATEMENT_STATES,
    UNCONFIRMED,
    WAITS_FOR_STANDBY,
    ConflictError,
    SlowReadError,
    TableLockedError,
    UnconfirmedError,
    one_line,
)
from apscheduler_tasklock._database.url import as_url, check_engine
from apscheduler_tasklock._database.wire import NoAnswerError, Wait, Wire, wait_for
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
)

Answer = TypeVar("Answer")

IDLE_TOO_LONG = psycopg.errors.IdleSessionTimeout.sqlstate
# The last messages of a server that shuts down or has crashed.
SERVER_ENDS = (
    psycopg.errors.AdminShutdown.sqlstate,
    psycopg.errors.CrashShutdown.sqlstate,
    psycopg.errors.CannotConnectNow.sqlstate,
)

# Limits the attempts to connect that hang at a time, each in a thread that cannot be ended.
MOST_CONNECTING = 2

# A write that changes nothing, and whose commit waits for the standbys that other commits wait for.
PROBE = b"SELECT pg_catalog.pg_logical_emit_message(true, 'tasklock', '')"
# Whether a session still waits for a standby that has to confirm its commit.
_STILL_WAITS = "SELECT FROM pg_catalog.pg_stat_activity WHERE pid = $1 AND wait_event = 'SyncRep'"

# A function that is called when the server, or a proxy before it, has ended the idle connection.
# Its argument is whether the server has said that it shuts down or has crashed.
Ended = Callable[[bool], None]


class Session:
    """A connection that is opened when it is needed. One thread uses it.

    :param connect: opens a connection; its arguments are as in :func:`connector`
    :param attempt: limits the wait for each answer, in seconds
    :param ended: called if the idle connection was ended, unless the server's
        ``idle_session_timeout`` is the reason
    :param lock_query: the query that returns which session has the tables locked; sent after a
        statement was cancelled
    :param hosts: how many hosts libpq tries, one after the other
    :param probe: a statement that writes nothing, but fails if the tables take no writes
    :ivar listens: whether the open connection listens on a channel
    :ivar notified: whether a notification has come, or may have been missed
    """

    def __init__(
        self,
        connect: Callable[[int, float], Wire],
        attempt: float,
        ended: Ended = lambda _by_server: None,
        lock_query: bytes | None = None,
        hosts: int = 1,
        probe: bytes = PROBE,
    ) -> None:
        self._connect = connect
        self._first_host = 0
        self._probe = probe
        # The server process of a connection that was closed before its statement was answered.
        self._left: int | None = None
        self._connect_limit = connect_limit(hosts, attempt)
        self._connecting: list[threading.Thread] = []
        self.attempt = attempt
        self._ended = ended
        self._lock_query = lock_query
        self._prepares = True
        self._wire: Wire | None = None  # of the open connection
        self.listens = False
        self.notified = False
        self._wait: Wait | None = None  # None: whoever uses the session has no other work
        self._wake: Callable[[], object] = lambda: None
        self._over_at = never

    def wait_with(
        self, wait: Wait, wake: Callable[[], object], over_at: Callable[[], float]
    ) -> None:
        """Let a thread that has other work wait for answers, and for new connections.

        :param wait: waits, and may do other work meanwhile
        :param wake: ends such a wait; called in another thread
        :param over_at: returns when the waits of the attempt under way end, on the monotonic clock.
            That time may change meanwhile.
        """
        self._wait, self._wake, self._over_at = wait, wake, over_at

    def wait_alone(self) -> None:
        """Wait for answers, and do nothing meanwhile."""
        self._wait, self._wake, self._over_at = None, lambda: None, never
        if self._wire is not None:  # so that the wire does not refer to the thread
            self._wire.wait, self._wire.over_at = wait_for, never

    @property
    def is_open(self) -> bool:
        """Whether there is a connection. Its end may not have been noticed yet."""
        return self._wire is not None

    @property
    def limit(self) -> float:
        """The seconds that a connect and one answer take at most."""
        return self._connect_limit + self.attempt

    def open(self) -> None:
        """Open a connection, unless there is one.

        :raises TaskLockDatabaseError: the database is unavailable; another attempt may succeed
        :raises psycopg.Error: the connection failed, and would fail again
        """
        self.hear()
        if self._wire is not None:
            return
        try:
            wire = self._connected()
        except TaskLockError:
            raise
        except Exception as error:
            original = getattr(error, "orig", error)
            unavailable = as_unavailable(error)
            if unavailable is None and isinstance(original, psycopg.Error):
                raise original from None
            # Any other error comes from the application's own code, such as a hook that fetches a
            # password. Another attempt may succeed, so the database counts as unavailable.
            raise unavailable or TaskLockDatabaseError(f"no connection: {error!r}") from error
        wire.is_direct = wire.is_direct and self._prepares
        self._wire = wire

    def hear(self) -> None:
        """Note a notification, or the connection's end, that came while no statement was sent."""
        wire = self._wire
        if wire is None:
            return
        ended = wire.ended()
        if ended is None:
            self.notified = self.notified or (self.listens and wire.heard())
            return
        self.close()
        if ended != IDLE_TOO_LONG:
            self._ended(ended in SERVER_ENDS)

    def listen(self, cursor: Any, channel: str) -> bool:
        """Listen on a channel, on the open connection; return whether the connection can listen.

        A connection through a pooler cannot listen, because a pooler gives the session to one
        client after the other.

        :param cursor: a cursor on the open connection
        """
        assert self._wire is not None
        if not self._wire.is_direct:
            return False
        listen = sql.SQL("LISTEN {}").format(sql.Identifier(channel))
        cursor.execute(listen.as_bytes(cursor.connection))
        self.listens = self.notified = True
        return True

    def heard_on(self) -> tuple[int] | None:
        """Return the socket of a connection that listens; ``None``: something was heard already.

        A notification may have come with an answer, and the connection may have ended.
        """
        self.hear()
        if self.notified or self._wire is None:
            return None
        return (self._wire.connection.fileno(),)

    def _connected(self) -> Wire:
        """Return the wire of a new connection.

        :raises TaskLockDatabaseError: no connection came in time
        """
        self._connecting = [thread for thread in self._connecting if thread.is_alive()]
        if len(self._connecting) >= MOST_CONNECTING:
            raise TaskLockDatabaseError(
                f"{MOST_CONNECTING} earlier attempts to connect still hang (in a look-up of the "
                "host's name, or in a listener of the engine)"
            )
        left = self._over_at() - time.monotonic()
        return call_within(
            self._connect_limit,
            partial(self._connect, self._first_host, left),
            lambda late: late.close(),
            self._over_at,
            started=self._connecting.append,
            wait=None if self._wait is None else partial(self._wait, ()),
            ended=self._wake,
        )

    def run(self, send: Callable[[Any], Answer], seconds: float | None = None) -> Answer:
        """Call a function that sends statements on the open connection; return what it returns.

        A connection on which a statement failed is closed, because an answer may be left unread.

        :param send: called with a cursor
        :param seconds: limits the wait for an answer; by default the limit of an attempt
        :raises TaskLockDatabaseError: the database is unavailable; another attempt may succeed
        :raises psycopg.Error: the statement failed, and would fail again
        """
        wire = self._wire
        assert wire is not None
        wire.seconds, wire.over_at = seconds or self.attempt, self._over_at
        wire.wait = self._wait or wait_for
        reusable = False
        try:
            answer = send(wire.cursor())
            reusable = True
        except TaskLockError as error:
            # Most of these errors were made from an answer, so the connection is usable. Close it
            # after two kinds of errors:
            # - an outage, because a server that has become read-only in a failover stays read-only
            #   for this session
            # - an error whose cause is an error of psycopg, because that cause may last as long as
            #   the session
            is_outage = isinstance(error, TaskLockDatabaseError)
            is_outage = is_outage and not isinstance(error, ConflictError)
            reusable = not (is_outage or isinstance(error.__cause__, psycopg.Error))
            raise
        except psycopg.Error as error:
            if error.sqlstate in LOST_STATEMENT_STATES:
                self._prepares = False  # because a pooler was not recognized by `is_direct`
            unavailable = self._locked(wire, error)
            if unavailable is None and isinstance(error, SlowReadError):
                raise TaskLockError(str(error)) from None
            unavailable = unavailable or as_unavailable(error)
            if unavailable is None:
                raise
            # Only of a direct connection the pid is the server's.
            if wire.is_direct and isinstance(error, NoAnswerError) and wire.is_unanswered:
                self._left = wire.connection.info.backend_pid
            raise unavailable from error
        finally:
            if not reusable:
                self.close()
        return answer

    def prove(self, seconds: float) -> None:
        """Send the probe on the open connection, to find out whether writes are confirmed.

        If it fails, the next connection begins with the next host: an old primary may go on to take
        connections after another server was promoted. While a session that this replica has left
        waits for a standby, no further one is sent to wait: each would be left, too, if cancels do
        not arrive. A probe that the database rejects counts as confirmed, because the next request
        then says what is missing.

        :param seconds: limits the wait for an answer
        :raises TaskLockDatabaseError: the database takes no writes, or no standby confirms them
        """
        self._first_host += 1
        self.run(self._send_probe, seconds)
        self._first_host -= 1

    def _send_probe(self, cursor: Any) -> None:
        try:
            if self._left is not None:
                if cursor.execute(_STILL_WAITS, [self._left]).fetchone() is not None:
                    raise UnconfirmedError(UNCONFIRMED)
                self._left = None
            cursor.execute(self._probe)
        except psycopg.Error as error:
            if as_unavailable(error) is not None:
                raise

    def _locked(self, wire: Wire, error: psycopg.Error) -> TaskLockDatabaseError | None:
        """Return an error if a statement was cancelled while a session had a table locked.

        A session that has a table locked because its commit waits for a standby is not to blame.
        """
        if self._lock_query is None or not isinstance(
            error, (NoAnswerError, psycopg.errors.QueryCanceled)
        ):
            return None
        session = wire.ask_soon(self._lock_query)
        if session == WAITS_FOR_STANDBY:
            return UnconfirmedError(UNCONFIRMED)
        return None if session is None else TableLockedError(f"{one_line(error)}, since {session}")

    def close(self) -> None:
        """Close the connection, if it is open. The next request opens another one."""
        wire, self._wire = self._wire, None
        self.listens = False
        if wire is not None:
            wire.close()


class NoSession(Session):
    """Stands in for a session where there is no database.

    :param attempt: as in :class:`Session`
    """

    def __init__(self, attempt: float) -> None:
        super().__init__(_no_connection, attempt)

    def open(self) -> None:
        """Open nothing."""

    def prove(self, _seconds: float) -> None:
        """Send nothing."""

    def run(self, send: Callable[[Any], Answer], _seconds: float | None = None) -> Answer:
        """Call a function with a cursor that executes nothing; return what it returns."""
        return send(NoCursor())


def _no_connection(_first: int, _left: float) -> Wire:
    raise NotImplementedError


class NoCursor:
    """A cursor on which nothing can be executed, with the attributes of psycopg's cursors."""

    row_factory: Any = None
    connection: Any = None
    wire: Any = None

    def execute(self, *_: object) -> Any:
        """Raise an error.

        :raises TaskLockError: there is no database
        """
        raise TaskLockError(
            "this call needs the database, but apscheduler_tasklock.testing has replaced the "
            "database, and can only claim, renew and release locks. Test this call on PostgreSQL"
        )


def opener(
    database: str | URL | Engine,
    *,
    attempt: float,
    application_name: str,
) -> Callable[[int, float], Wire]:
    """Return a function that opens a connection from a URL, or as an application's engine does.

    :param attempt: limits the wait for each answer, in seconds
    :param application_name: shown by ``pg_stat_activity``, unless an engine is given
    :raises TaskLockOptionError: the task lock cannot use this database
    """
    if isinstance(database, Engine):
        check_engine(database)
        return partial(open_apart, database, attempt)
    return connector(as_url(database), attempt, application_name)


def connect_limit(hosts: int, attempt: float) -> float:
    """Return how long connecting may take, in seconds.

    libpq's timeout counts for each host and is at least 2 s. One more second is for setting up the
    connection.

    :param hosts: how many hosts libpq tries, one after the other
    :param attempt: limits the wait for each answer, in seconds
    """
    return hosts * max(2.0, attempt) + 1.0


def open_apart(engine: Engine, attempt: float, _first: int = 0, left: float = inf) -> Wire:
    """Open a connection as an application's engine does, outside its pool.

    The engine decides with which host it begins, and how long it tries.

    :param attempt: limits the wait for each answer, in seconds
    :param left: the seconds that are left to connect
    :raises TaskLockOptionError: a listener of the engine leaves a transaction open
    """
    # Make a new pool for this one connection, because the engine's own pool may be used up, or may
    # be locked for ever in a forked child.
    proxy = engine.pool.recreate().connect()
    # The driver is psycopg, because `check_engine` has checked that.
    connection = cast("psycopg.Connection[Any]", proxy.driver_connection)
    proxy.detach()
    try:
        _check_idle(connection)
        return set_up(connection, max(SHORTEST_ATTEMPT, min(attempt, left)))
    except BaseException:
        connection.close()
        raise


def _check_idle(connection: psycopg.Connection[Any]) -> None:
    if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        raise TaskLockOptionError(
            "the engine gives a connection whose transaction is open (a listener of the engine "
            "runs SQL, and does not end the transaction); give the URL instead of the engine"
        )
