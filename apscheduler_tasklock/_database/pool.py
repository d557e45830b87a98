"""Lending connections: those of an application's engine, or few that are kept here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import psycopg
from sqlalchemy import Engine
from sqlalchemy.pool import PoolProxiedConnection

from apscheduler_tasklock._database.connection import ended_by
from apscheduler_tasklock._database.deadline import Deadline
from apscheduler_tasklock._database.forking import begins_anew_in_a_fork
from apscheduler_tasklock.errors import TaskLockDatabaseError

# How many are open at most, and while nothing is asked (see README, "What it costs").
MOST_CONNECTIONS = 5
IDLE_CONNECTIONS = 1
# How many that have ended an application's pool may lend one after the other.
MOST_REPLACED = 100

IDLE_TOO_LONG = psycopg.errors.IdleSessionTimeout.sqlstate
# A server says so when it shuts down, or has crashed.
SERVER_ENDS = (
    psycopg.errors.AdminShutdown.sqlstate,
    psycopg.errors.CrashShutdown.sqlstate,
    psycopg.errors.CannotConnectNow.sqlstate,
)


@dataclass(eq=False)
class Lent:
    """A connection in use.

    :ivar connection: psycopg's
    :ivar opened_at: when it was opened, or lent for the first time, on the monotonic clock
    :ivar proxy: by which an application's pool takes it back
    """

    connection: psycopg.Connection[Any]
    opened_at: float = field(default_factory=time.monotonic)
    proxy: PoolProxiedConnection | None = None


class Lender(Protocol):
    """Lends connections, each for a short statement."""

    def borrow(self, deadline: Deadline) -> Lent:
        """Return a connection. Raises what psycopg, SQLAlchemy, and an engine's hooks raise.

        :param deadline: when it is too late for one
        :raises TaskLockDatabaseError: none came in time
        """

    def give_back(self, lent: Lent, *, whole: bool) -> None:
        """Take a connection back. One that is not whole is never lent again."""

    def open(self) -> None:
        """Keep a connection for the next statement again."""

    def close(self) -> None:
        """Keep none from now on: each is closed after its use."""

    def rest(self) -> None:
        """Close what is idle."""


class KeptConnections:
    """Connections that nobody else uses: few, and only one while nothing is asked.

    Those that a burst has opened are kept until none is in use any more: to open one costs a
    server as much as to decide dozens of claims.

    :param connect: opens one
    :param patience: seconds that a borrower waits while all are in use
    :param ended: called when an idle one turns out to have been ended by the other side, and not
        since it was idle for too long
    """

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        patience: float,
        ended: Callable[[bool], None],
    ) -> None:
        self._connect = connect
        self._ended = ended
        self._patience = patience
        self._closed = False
        self._idle: list[Lent] = []
        self._parents: list[Lent] = []
        self.begin_anew()
        begins_anew_in_a_fork(self)

    def begin_anew(self) -> None:
        """Leave the parent's connections alone in a forked child: closed here, they end there."""
        # Not collected either, of which psycopg would warn.
        self._parents += self._idle
        self._idle = []
        self._in_use = 0
        self._changed = threading.Condition()

    def borrow(self, deadline: Deadline) -> Lent:
        """Return an idle connection, or a new one."""
        with self._changed:
            if not deadline.wait_for(
                self._changed, lambda: self._in_use < MOST_CONNECTIONS, self._patience
            ):
                raise TaskLockDatabaseError("no connection became free in time: all are in use")
            self._in_use += 1
        try:
            return self._take_idle() or Lent(
                deadline.call(self._connect, lambda late: late.close())
            )
        except BaseException:
            with self._changed:
                self._in_use -= 1
                self._changed.notify()
            raise

    def _take_idle(self) -> Lent | None:
        while True:
            with self._changed:
                if not self._idle:
                    return None
                lent = self._idle.pop()
            ended = ended_by(lent.connection)
            if ended is None:
                return lent
            lent.connection.close()
            if ended != IDLE_TOO_LONG:
                self._ended(ended in SERVER_ENDS)

    def give_back(self, lent: Lent, *, whole: bool) -> None:
        """Take a connection back, and close those that were only opened for a burst."""
        broken = lent.connection.broken
        if not whole:
            lent.connection.close()
        with self._changed:
            self._in_use -= 1
            self._changed.notify()
            if whole:
                self._idle.append(lent)
            surplus = [] if self._in_use else self._idle[:-IDLE_CONNECTIONS]
            if self._closed or broken:  # what broke one may have broken those that are idle, too
                surplus = self._idle
            self._idle = [idle for idle in self._idle if idle not in surplus]
        _close(surplus)

    def open(self) -> None:
        """Keep a connection for the next statement again."""
        self._closed = False

    def close(self) -> None:
        """Keep none from now on."""
        self._closed = True
        self.rest()

    def rest(self) -> None:
        """Close what is idle."""
        with self._changed:
            surplus, self._idle = self._idle, []
        _close(surplus)


class GuestConnections:
    """The connections of an application's engine, which keeps them as it likes.

    :param ended: called when an idle one turns out to have been ended by the other side, and not
        since it was idle for too long
    """

    def __init__(self, engine: Engine, ended: Callable[[bool], None]) -> None:
        self._engine = engine
        self._ended = ended
        self._closed = False
        begins_anew_in_a_fork(self)

    def begin_anew(self) -> None:
        """Leave the parent's connections alone in a forked child."""
        self._engine.dispose(close=False)

    def borrow(self, deadline: Deadline) -> Lent:
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
        return Lent(_driver_connection(proxy), opened_at, proxy)

    def give_back(self, lent: Lent, *, whole: bool) -> None:
        """Check a connection in."""
        assert lent.proxy is not None
        if whole and not self._closed:
            lent.proxy.close()
        else:
            _close_for_good(lent.proxy)

    def open(self) -> None:
        """Check connections in after their use again."""
        self._closed = False

    def close(self) -> None:
        """Close what is in use once it is used no more. What is idle is the application's.

        The application may dispose of its engine after a shutdown, and what is checked in later
        would stay open in a pool that nobody has any more.
        """
        self._closed = True

    def rest(self) -> None:
        """Do nothing: what is idle is the application's."""


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


def _close(surplus: Sequence[Lent]) -> None:
    for lent in surplus:
        lent.connection.close()
