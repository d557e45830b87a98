"""The way to the database: cursors in autocommit mode, and what their errors mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial
from math import inf
from typing import Any

import psycopg
from sqlalchemy import Engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import StaticPool

from apscheduler_tasklock._database.connection import (
    attempt_limit,
    bounded_waits,
    connector,
    plain_cursor,
)
from apscheduler_tasklock._database.deadline import ATTEMPT_LIMIT, Closing, Deadline, Until
from apscheduler_tasklock._database.errors import LOST_STATEMENT_STATES, explain_away
from apscheduler_tasklock._database.pool import (
    GuestConnections,
    KeptConnections,
    Lender,
    Lent,
    open_apart,
)
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockOptionError

DRIVER = "postgresql+psycopg"

# For how many times the timeout a worker waits for a connection that others use. That is no sign
# of an outage: in a burst on a database that answers late, they take turns.
QUEUEING = 3


class Database:
    """Cursors on the application's database, in autocommit mode, for one short statement each.

    :param database: a URL, or an SQLAlchemy engine that is used as it is, except for autocommit
    :param timeout: seconds within which a claim must have been decided. A single connection
        attempt or statement gets a third of it, so that there is time for another.
    :param application_name: shown by ``pg_stat_activity``, unless an engine is given
    :param closing: says when claiming is stopped, from when on nothing waits for long
    :ivar url: where the database is; its text hides the password
    :ivar ended: is called when an idle connection turns out to have been ended by the other side,
        as in an outage
    """

    def __init__(
        self,
        database: str | URL | Engine,
        *,
        timeout: float,
        application_name: str,
        closing: Closing | None = None,
    ) -> None:
        self._timeout = timeout
        self._application_name = application_name
        self._closing = closing
        self._prepares = True
        self.ended: Callable[[bool], None] | None = None
        self._engine: Engine | None = None
        self._lender: Lender
        if isinstance(database, Engine):
            _check_engine(database)
            self._engine, self.url = database, database.url
            self._lender = GuestConnections(database, self._note_ended)
        else:
            self.url = parse_url(database)
            self._lender = self._keep_connections()

    @property
    def _own(self) -> bool:
        return self._engine is None

    def _keep_connections(self) -> KeptConnections:
        connect: Callable[[], psycopg.Connection[Any]]
        if self._engine is not None:
            connect = partial(open_apart, self._engine)
        else:
            attempt = attempt_limit(self._timeout)
            connect = connector(self.url, attempt, self._application_name, self._closing)
        return KeptConnections(connect, self._timeout * QUEUEING, self._note_ended)

    def _note_ended(self, by_server: bool) -> None:
        if self.ended is not None:
            self.ended(by_server)

    @property
    def where(self) -> str:
        """The database's host, port and name, for messages."""
        url = self.url
        host = url.host or url.query.get("host") or "the default host"
        host = host if isinstance(host, str) else ", ".join(host)
        port = f":{url.port}" if url.port else ""
        return f"{host}{port}, database {url.database or url.username!r}"

    @contextmanager
    def cursor(self, until: Until = inf, limit: float = ATTEMPT_LIMIT) -> Iterator[Any]:
        """Lend a cursor in autocommit mode. A connection that fails is never used again.

        :param until: when nothing is waited for any more, as of :class:`Deadline`
        :param limit: the seconds that it may take once claiming is stopped
        :raises TaskLockDatabaseError: the database is away; another attempt may succeed
        :raises psycopg.Error: the statement failed, and would fail again
        """
        deadline = Deadline(self._closing, until, limit)
        lent = self._borrow(deadline)
        whole = False
        try:
            deadline.check()  # rather than send what there is no time to have answered
            with (
                bounded_waits(lent.connection, attempt_limit(self._timeout), deadline),
                self._manners(lent.connection),
            ):
                yield plain_cursor(lent.connection, guest=not self._own)
            whole = True
        except TaskLockDatabaseError as error:
            error._opened_at = lent.opened_at
            raise
        except BaseException as error:
            away = self._away(error)
            if away is None:
                raise
            away._opened_at = lent.opened_at
            raise away from error
        finally:
            # Whatever interrupted it may have left an answer unread.
            self._lender.give_back(lent, whole=whole)

    def _borrow(self, deadline: Deadline) -> Lent:
        """Take a connection. Whatever keeps it from coming may be over at the next attempt."""
        try:
            lent = self._lender.borrow(deadline)
        except TaskLockDatabaseError:
            raise
        except Exception as error:
            original = getattr(error, "orig", error)
            away = self._away(error)
            if away is None and isinstance(original, psycopg.Error):
                raise original from None
            # Else it is as from an application's own hook that fetches a password.
            raise away or TaskLockDatabaseError(f"no connection: {error!r}") from error
        idle = psycopg.pq.TransactionStatus.IDLE
        if not self._own and lent.connection.info.transaction_status != idle:
            self._lender.give_back(lent, whole=True)
            raise TaskLockOptionError(
                "the engine lends a connection whose transaction is open (by a listener that runs "
                "SQL and does not end it); give the URL instead of the engine"
            )
        return lent

    def _manners(self, connection: psycopg.Connection[Any]) -> AbstractContextManager[None]:
        """Prepare nothing where others use the connection, and where a pooler loses statements.

        Our own connections prepare only where they lead to the server itself (see
        ``connector``); of an application's it is not known where they lead.
        """
        return nullcontext() if self._own and self._prepares else _as_a_guest(connection)

    def _away(self, error: BaseException) -> TaskLockDatabaseError | None:
        """Return the error that says that the database is away, if this one means that."""
        if getattr(error, "sqlstate", None) in LOST_STATEMENT_STATES:
            self._prepares = False  # it is a pooler that was not recognized as one
        return explain_away(error)

    def separate(self) -> Database:
        """Return the same database by connections that nobody else can use up.

        They have the same limits, whether claiming is stopped or not.
        """
        separate = copy(self)
        separate._closing = None
        separate._lender = separate._keep_connections()
        return separate

    def open(self) -> None:
        """Keep a connection for the next statement again."""
        self._lender.open()

    def close(self) -> None:
        """Keep no connection of our own from now on: each is closed after its use."""
        self._lender.close()

    def rest(self) -> None:
        """Close the idle connections, unless they are an application's own."""
        self._lender.rest()


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
            "database is not a URL; it should look like postgresql://user:password@host:5432/name, "
            "or postgresql://user@/name?host=one:5432&host=two:5432 for several servers"
        ) from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise TaskLockOptionError(
            f"database is a {url.get_backend_name()} URL; the task lock needs PostgreSQL, "
            "as in postgresql://user:password@host:5432/name"
        )
    password = url.query.get("password")
    if isinstance(password, str):  # where its text would show it
        url = url.difference_update_query(["password"]).set(password=password)
    return url.set(drivername=DRIVER)


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


def _check_engine(engine: Engine) -> None:
    if engine.dialect.is_async:
        raise TaskLockOptionError(
            "the engine is the synchronous side of an AsyncEngine, which works on its event loop "
            "only; give the URL instead, or an engine of create_engine()"
        )
    if engine.dialect.name != "postgresql" or engine.dialect.driver != "psycopg":
        raise TaskLockOptionError(
            f"the engine uses {engine.dialect.name}+{engine.dialect.driver}; the task lock needs "
            f"psycopg 3: create_engine('{DRIVER}://...'), or give the URL instead"
        )
    if isinstance(engine.pool, StaticPool):
        raise TaskLockOptionError(
            "the engine's StaticPool has one connection, which the application may be using; "
            "give the URL instead of the engine"
        )
