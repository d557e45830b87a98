"""psycopg connections, and the limits of all that they wait for."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import Any

import psycopg
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import tuple_row
from psycopg.types.datetime import TimestamptzBinaryLoader
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.deadline import CANCEL_LIMIT, Closing, Deadline
from apscheduler_tasklock._database.timings import Timings

# Seconds in which a server that has cancelled a statement says so, and then why it took so long.
ASKING_LIMIT = 0.2

# Limits the seconds from below for which an answer is waited for, however short a claim's timeout
# is; and however urgent a renewal.
SHORTEST_ATTEMPT, SHORTEST_ANSWER = 1.0, 0.3
# Limits the seconds from below for which a claim waits for its turn.
SHORTEST_TURN = 9.0

# How often it is read from a connection at most, to see whether it has ended.
_MOST_READS = 10


class BoundedWait:
    """What a psycopg connection does in place of its ``wait`` while it is used here.

    TCP's own limits notice a dead path, but not a server that is stopped, waits for a lock, or
    a middleman that swallows the answer. A ``statement_timeout`` would be session state, which
    pgbouncer in transaction mode gives to somebody else.

    :param connection: the connection
    :param seconds: how long it waits for an answer at most
    :param deadline: ends the wait sooner
    :ivar seconds: how long it waits for the next answer at most
    """

    def __init__(
        self, connection: psycopg.Connection[Any], seconds: float, deadline: Deadline
    ) -> None:
        self._connection = connection
        self._wait = connection.wait
        self._deadline = deadline
        self.seconds = seconds

    def __call__(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        """Wait as psycopg does, within the limits."""
        try:
            return self._wait(_until(gen, self.seconds, self._deadline), *args, **kwargs)
        except NoAnswerError:
            # The statement should not be carried out later, when nobody waits for it. Where libpq
            # is too old to do this within a time limit, closing the connection has to do.
            if psycopg.capabilities.has_cancel_safe():
                with suppress(psycopg.Error):
                    self._connection.cancel_safe(timeout=CANCEL_LIMIT)
                    if self._deadline.seconds_left > 0:  # so that it can be asked why
                        _read_results(self._connection.pgconn, ASKING_LIMIT)
            raise


@contextmanager
def bounded_waits(
    connection: psycopg.Connection[Any], seconds: float, deadline: Deadline
) -> Iterator[None]:
    """Let a connection, which may be an application's, wait for each answer within limits.

    :param seconds: how long it waits for an answer at most
    :param deadline: ends the wait sooner
    """
    attributes = vars(connection)
    before = attributes.get("wait")
    attributes["wait"] = BoundedWait(connection, seconds, deadline)
    try:
        yield
    finally:
        del attributes["wait"]
        if before is not None:
            attributes["wait"] = before


def raw_cursor(connection: psycopg.Connection[Any]) -> psycopg.RawCursor[Any]:
    """Return a cursor for our statements, whatever the connection makes of an application's.

    It takes PostgreSQL's own numbered parameters, and gives tuples. Times come in binary form,
    which is the same under each ``DateStyle``.
    """
    cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
    cursor.format = psycopg.pq.Format.BINARY
    return cursor


def ended_by(connection: psycopg.Connection[Any]) -> str | None:
    """Tell whether the other side has ended an idle connection. Asks nobody.

    As ``idle_session_timeout`` does, a proxy, or a server that was restarted.

    :return: the SQLSTATE of PostgreSQL's last words, or ``""`` if there are none; ``None`` for a
        connection that goes on
    """
    if not _has_input(connection):
        return None
    last_words: list[str] = []

    def note(said: psycopg.errors.Diagnostic) -> None:
        if said.severity_nonlocalized in ("FATAL", "PANIC"):
            last_words.append(said.sqlstate or "")

    # For libpq whatever comes while nothing is asked is a notice.
    connection.add_notice_handler(note)
    try:
        for _ in range(_MOST_READS):  # there may be notices and notifications as well
            connection.pgconn.consume_input()
            connection.pgconn.is_busy()
            if last_words:  # the end itself may come a moment later
                return last_words[0]
            if not _has_input(connection):
                return None
    except (psycopg.Error, OSError, ValueError):
        return ""
    finally:
        connection.remove_notice_handler(note)
    return None


def who_locks(connection: psycopg.Connection[Any], query: bytes) -> str | None:
    """Return who has something locked, after a statement that was cancelled.

    :param query: a SELECT that returns a text, or no row
    :return: that text; ``None`` if there is no row, or no answer in a short time
    """
    pgconn = connection.pgconn
    try:
        if pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            return None  # the cancelled statement has not been answered
        pgconn.send_query(query)
        for result in _read_results(pgconn, ASKING_LIMIT):
            if result.ntuples:
                value = result.get_value(0, 0)
                return None if value is None else value.decode(errors="replace")
    except psycopg.Error:
        pass
    return None


def _read_results(pgconn: PGconn, seconds: float) -> list[PGresult]:
    """Return what is still to come of what was sent; nothing if it does not come in that time."""
    results: list[PGresult] = []
    until = time.monotonic() + seconds
    while True:
        while pgconn.is_busy():
            left = until - time.monotonic()
            if left <= 0 or not wait_for_input([pgconn.socket], left):
                return []
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:
            return results
        results.append(result)


def wait_for_input(sockets: Sequence[int], seconds: float) -> bool:
    """Wait until one of these has something to be read; tell whether that is so.

    :param seconds: for how long at most; ``inf``: without a limit
    """
    limit = None if seconds == inf else seconds
    if not hasattr(select, "poll"):  # Windows
        return bool(select.select(sockets, [], [], limit)[0])
    # A selector does the same in four times the time.
    poll = select.poll()
    for socket in sockets:
        poll.register(socket, select.POLLIN)
    return bool(poll.poll(None if limit is None else limit * 1000))


def _has_input(connection: psycopg.Connection[Any]) -> bool:
    """Tell whether there is something to be read, or the connection is broken."""
    try:
        return wait_for_input([connection.fileno()], 0)
    except (psycopg.Error, OSError, ValueError):
        return True


class NoAnswerError(psycopg.OperationalError):
    """The server did not answer in time."""


def _until(
    gen: Generator[Any, Any, Any], seconds: float, deadline: Deadline
) -> Generator[Any, Any, Any]:
    """Pass a psycopg wait on, and end it after so many seconds. psycopg wakes it every 0.1 s."""
    begun, over_at = time.monotonic(), inf
    ready = None
    while True:
        try:
            wanted = next(gen) if ready is None else gen.send(ready)
        except StopIteration as finished:
            return finished.value
        ready = yield wanted
        now = time.monotonic()
        if now - begun > seconds or deadline.seconds_left < 0:
            over_at = min(over_at, now)
            # What has come is read: the process may have been paused while the server answered. But
            # what goes on to come has a limit, too.
            if not ready or now > over_at + CANCEL_LIMIT:
                raise NoAnswerError(f"no answer from the server within {now - begun:.1f} sec")


def attempt_limit(timeout: float, longest: float = Timings.longest_answer) -> float:
    """Return for how many seconds of a claim's timeout one answer is waited for.

    However long a claim is tried, renewals wait for the same connection.

    :param longest: for how many at most
    """
    return min(longest, max(SHORTEST_ATTEMPT, timeout / 3))


def turn_limit(timeout: float) -> float:
    """Return for how many seconds a claim with such a timeout waits for its turn, at most.

    Longer than for the database: that others are sent is no sign of an outage. On a database that
    answers late, they take turns.
    """
    return max(SHORTEST_TURN, 3 * timeout)


def connector(
    url: URL, attempt: float, application_name: str, closing: Closing | None
) -> Callable[[], psycopg.Connection[Any]]:
    """Return what opens a connection in autocommit mode, whose waits end.

    :param attempt: seconds within which each of them does
    :param closing: when it says that claiming is stopped, they are as short as libpq can
    """
    parameters = {
        "application_name": application_name,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        # Not shorter, since a packet that is lost is sent again only after a while.
        "tcp_user_timeout": int(max(1.0, attempt) * 1000),
        **connect_parameters(url),
    }

    def connect() -> psycopg.Connection[Any]:
        hurried = closing is not None and closing.stopped
        # libpq takes whole seconds, and at least 2.
        timeout = 2 if hurried else max(2, int(attempt))
        connection = psycopg.connect(**{"connect_timeout": timeout, **parameters}, autocommit=True)
        try:
            set_up(connection, attempt, closing)
        except BaseException:
            connection.close()
            raise
        return connection

    return connect


def set_up(connection: psycopg.Connection[Any], attempt: float, closing: Closing | None) -> None:
    """Set a connection of ours up, in autocommit mode.

    :param attempt: seconds within which each answer has to come
    :param closing: when it says that claiming is stopped, waits are short
    """
    # An application may have put its own loader of times in psycopg's map.
    connection.adapters.register_loader("timestamptz", TimestamptzBinaryLoader)
    with bounded_waits(connection, attempt, Deadline(closing)):
        # In a burst a replica hardly sends more than ten statements of each kind, and PostgreSQL
        # parses each of them anew: that takes twice as long as the rest. To prepare one is a round
        # trip of its own, so that it waits until the second time.
        connection.prepare_threshold = 1 if is_direct(connection) else None


def connect_parameters(url: URL) -> dict[str, Any]:
    """Return a URL's parameters for psycopg, with what each connection of ours needs besides."""
    parameters = dict(url.get_dialect()().create_connect_args(url)[1])
    # A database in SQL_ASCII does not tell what its text is written in.
    parameters.setdefault("client_encoding", "UTF8")
    hosts = parameters.get("host") or parameters.get("hostaddr") or os.environ.get("PGHOST", "")
    if "," in hosts and "PGTARGETSESSIONATTRS" not in os.environ:
        # Not a standby that happens to be named first.
        parameters.setdefault("target_session_attrs", "read-write")
    return parameters


def host_count(url: URL) -> int:
    """Return how many hosts a connection is tried to, one after the other."""
    parameters = url.get_dialect()().create_connect_args(url)[1]
    hosts = parameters.get("host") or parameters.get("hostaddr") or os.environ.get("PGHOST", "")
    return str(hosts).count(",") + 1


def is_direct(connection: psycopg.Connection[Any]) -> bool:
    """Tell whether the server process is the one that was named at the login.

    A pooler answers the login by itself, and so with a process id of its own making. One that knows
    nothing of prepared statements gives the same server connection to one client after the other;
    and as every psycopg gives its statements the same names, a release of ours could there run what
    the application has prepared, or the other way round, without an error.
    """
    row = raw_cursor(connection).execute("SELECT pg_backend_pid()").fetchone()
    return row is not None and row[0] == connection.info.backend_pid
