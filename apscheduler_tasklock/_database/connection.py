"""psycopg connections, and the limits of their waits."""

from __future__ import annotations

import json
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
from psycopg.types.json import set_json_loads
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.deadline import Deadline
from apscheduler_tasklock._database.sqlstates import UNCONFIRMED, UnconfirmedError
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._shutdown import CANCEL_LIMIT, Closing

# Limits the wait, in seconds, for each of the two answers after a statement was cancelled: the
# confirmation of the cancel, and the answer to the query that asks which session locks a table.
ASKING_LIMIT = 0.2
# The function of PostgreSQL that ends a wait for a synchronous standby before the standby has
# confirmed the commit, and gives a warning. Its text is translated.
_GIVES_UP_WAITING = "SyncRepWaitForLSN"

# The shortest limits of the wait for one answer, in seconds. A claim's limit is SHORTEST_ATTEMPT or
# more, even if its timeout is shorter. Any limit is SHORTEST_ANSWER or more, even if a renewal is
# more urgent.
SHORTEST_ATTEMPT, SHORTEST_ANSWER = 1.0, 0.3
# The shortest limit of a claim's wait for its turn on the connection, in seconds.
SHORTEST_TURN = 9.0

# Limits how often an idle connection is read to find out whether its other side has ended it.
_MOST_READS = 10


class BoundedWait:
    """A ``wait`` with limits, which takes the place of a psycopg connection's own ``wait``.

    TCP's own limits end a wait when the network path is dead. They do not end it when the server
    process is suspended or waits for a lock, or when a proxy swallows the answer. A
    ``statement_timeout`` does not help, because it belongs to the session, which pgbouncer in
    transaction mode gives to the next client.

    :param connection: the connection
    :param seconds: limits the wait for an answer
    :param deadline: ends the wait sooner
    :ivar seconds: limits the wait for the next answer
    """

    def __init__(
        self, connection: psycopg.Connection[Any], seconds: float, deadline: Deadline
    ) -> None:
        self._connection = connection
        self._wait = connection.wait
        self._deadline = deadline
        self._is_unconfirmed = False
        self.seconds = seconds

    def hear(self, said: psycopg.errors.Diagnostic) -> None:
        """Note a notice that a commit was not confirmed by a synchronous standby."""
        if said.source_function == _GIVES_UP_WAITING:
            self._is_unconfirmed = True

    def __call__(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        """Wait as psycopg does, within the limits.

        :raises UnconfirmedError: the server has committed, without a synchronous standby
        """
        try:
            answer = self._wait_within_limits(gen, *args, **kwargs)
        except NoAnswerError:
            if self._is_unconfirmed:
                raise UnconfirmedError(UNCONFIRMED) from None
            raise
        if self._is_unconfirmed:
            raise UnconfirmedError(UNCONFIRMED)
        return answer

    def _wait_within_limits(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return self._wait(_until(gen, self.seconds, self._deadline), *args, **kwargs)
        except NoAnswerError:
            # Cancel the statement, so that the server does not carry it out when nobody waits for
            # it any more. An old libpq cannot limit the time of a cancel request, so with an old
            # libpq the connection is only closed.
            if psycopg.capabilities.has_cancel_safe():
                with suppress(psycopg.Error):
                    self._connection.cancel_safe(timeout=CANCEL_LIMIT)
                    # Read the server's answer, so that `locking_session` can send its query. The
                    # answer may also be that the commit was not confirmed.
                    if self._deadline.seconds_left > 0:
                        _read_results(self._connection.pgconn, ASKING_LIMIT)
            raise


@contextmanager
def bounded_waits(
    connection: psycopg.Connection[Any], seconds: float, deadline: Deadline
) -> Iterator[None]:
    """Limit the waits of a connection, which may be an application's, while the context lasts.

    :param seconds: limits the wait for each answer
    :param deadline: ends the wait sooner
    """
    attributes = vars(connection)
    before = attributes.get("wait")
    attributes["wait"] = wait = BoundedWait(connection, seconds, deadline)
    connection.add_notice_handler(wait.hear)
    try:
        yield
    finally:
        connection.remove_notice_handler(wait.hear)
        del attributes["wait"]
        if before is not None:
            attributes["wait"] = before


def raw_cursor(connection: psycopg.Connection[Any]) -> psycopg.RawCursor[Any]:
    """Return a cursor for the library's statements, whatever cursor factory the connection has.

    The cursor takes PostgreSQL's own numbered parameters and returns tuples. Times come in binary
    form, because that form is the same under each ``DateStyle``.
    """
    cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
    cursor.format = psycopg.pq.Format.BINARY
    return cursor


def ended_by(connection: psycopg.Connection[Any]) -> str | None:
    """Return why the other side has ended an idle connection. Sends nothing.

    The other side is a proxy, or a server that was restarted or has an ``idle_session_timeout``.

    :return: the SQLSTATE of PostgreSQL's last message, or ``""`` without such a message; ``None``
        for a connection that has not ended
    """
    if not _has_input(connection):
        return None
    last_words: list[str] = []

    def note(said: psycopg.errors.Diagnostic) -> None:
        if said.severity_nonlocalized in ("FATAL", "PANIC"):
            last_words.append(said.sqlstate or "")

    # libpq treats the server's last message as a notice, because no statement is under way.
    connection.add_notice_handler(note)
    try:
        for _ in range(_MOST_READS):  # notices and notifications may come before the last message
            connection.pgconn.consume_input()
            connection.pgconn.is_busy()
            if last_words:  # do not wait until the socket is closed, a moment later
                return last_words[0]
            if not _has_input(connection):
                return None
    except (psycopg.Error, OSError, ValueError):
        return ""
    finally:
        connection.remove_notice_handler(note)
    return None


def locking_session(connection: psycopg.Connection[Any], query: bytes) -> str | None:
    """Return which session has a table locked, after a statement was cancelled.

    :param query: a SELECT that returns a text, or no row
    :return: the text; ``None`` if there is no row, or no answer within a short time
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


def is_unanswered(connection: psycopg.Connection[Any]) -> bool:
    """Return whether the last statement was not answered, not even after it was cancelled."""
    return connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE


def _read_results(pgconn: PGconn, seconds: float) -> list[PGresult]:
    """Return the results that are still to come; none if they do not all come in time.

    :param seconds: limits the wait for all results
    """
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
    """Wait until one of the sockets can be read; return whether one can.

    :param seconds: limits the wait; ``inf``: no limit
    """
    limit = None if seconds == inf else seconds
    if not hasattr(select, "poll"):  # Windows
        return bool(select.select(sockets, [], [], limit)[0])
    # Use `poll`, and not a selector, because a selector takes four times as long.
    poll = select.poll()
    for socket in sockets:
        poll.register(socket, select.POLLIN)
    return bool(poll.poll(None if limit is None else limit * 1000))


def _has_input(connection: psycopg.Connection[Any]) -> bool:
    """Return whether the connection can be read, or is broken."""
    try:
        return wait_for_input([connection.fileno()], 0)
    except (psycopg.Error, OSError, ValueError):
        return True


class NoAnswerError(psycopg.OperationalError):
    """The server did not answer in time."""


def _until(
    gen: Generator[Any, Any, Any], seconds: float, deadline: Deadline
) -> Generator[Any, Any, Any]:
    """Run a psycopg wait, and end it at its limits.

    psycopg resumes this generator at least every 0.1 s, so the limits are checked that often.
    """
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
            # If an answer has come already, read it: it may have come in time, while this process
            # was paused. An answer that arrives in parts has CANCEL_LIMIT more seconds.
            if not ready or now > over_at + CANCEL_LIMIT:
                raise NoAnswerError(f"no answer from the server within {now - begun:.1f} sec")


def attempt_limit(timeout: float, longest: float = Timings.longest_answer) -> float:
    """Return how long a claim waits for one answer, in seconds.

    A long timeout does not make this wait long, because renewals wait for the same connection.

    :param timeout: the claim's timeout, in seconds
    :param longest: limits the returned seconds
    """
    return min(longest, max(SHORTEST_ATTEMPT, timeout / 3))


def turn_limit(timeout: float) -> float:
    """Return how long a claim may wait for its turn on the connection, in seconds.

    The returned time is longer than the claim's timeout, because that timeout is for outages. If
    the database only answers slowly, the claim waits for other requests, which is no outage.

    :param timeout: the claim's timeout, in seconds
    """
    return max(SHORTEST_TURN, 3 * timeout)


def connector(
    url: URL, attempt: float, application_name: str, closing: Closing | None
) -> Callable[[int], psycopg.Connection[Any]]:
    """Return a function that opens a connection in autocommit mode.

    Its argument is the place of the host with which libpq begins, among the URL's hosts.

    :param attempt: limits each wait of the connection, in seconds
    :param closing: once claiming is stopped, the connect has the shortest timeout that libpq allows
    """
    parameters = {
        "application_name": application_name,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        # At least 1 s, because TCP sends a lost packet again only after a while.
        "tcp_user_timeout": int(max(1.0, attempt) * 1000),
        **connect_parameters(url),
    }

    def connect(first: int = 0) -> psycopg.Connection[Any]:
        hurried = closing is not None and closing.stopped
        # libpq takes whole seconds, and at least 2.
        timeout = 2 if hurried else max(2, int(attempt))
        chosen = {"connect_timeout": timeout, **_beginning_with(first, parameters)}
        connection = psycopg.connect(**chosen, autocommit=True)
        try:
            set_up(connection, attempt, closing)
        except BaseException:
            connection.close()
            raise
        return connection

    return connect


def set_up(connection: psycopg.Connection[Any], attempt: float, closing: Closing | None) -> None:
    """Set up a connection of the library, in autocommit mode.

    :param attempt: limits the wait for each answer, in seconds
    :param closing: once claiming is stopped, the waits are short
    """
    # Register the loader here, because the application may have registered another one in psycopg's
    # global map.
    connection.adapters.register_loader("timestamptz", TimestamptzBinaryLoader)
    set_json_loads(json.loads, connection)  # because an application may have set its own for all
    with bounded_waits(connection, attempt, Deadline(closing)):
        # Prepare a statement when it is sent for the second time. Preparing at the first time would
        # cost a second round trip, also for a statement that is sent only once. Preparing later
        # would slow bursts down: in a burst a replica sends about ten statements of each kind,
        # PostgreSQL parses an unprepared statement each time, and parsing takes twice as long as
        # everything else.
        connection.prepare_threshold = 1 if is_direct(connection) else None


def connect_parameters(url: URL) -> dict[str, Any]:
    """Return a URL's parameters for psycopg, and defaults that the library's connections need."""
    parameters = dict(url.get_dialect()().create_connect_args(url)[1])
    # Name the encoding, because a database in SQL_ASCII does not say which one its texts have.
    parameters.setdefault("client_encoding", "UTF8")
    hosts = parameters.get("host") or parameters.get("hostaddr") or os.environ.get("PGHOST", "")
    if "," in hosts and "PGTARGETSESSIONATTRS" not in os.environ:
        # Skip a standby that the URL names before the primary.
        parameters.setdefault("target_session_attrs", "read-write")
    return parameters


def _beginning_with(first: int, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with the hosts in another order, from the given one on."""
    turned = dict(parameters)
    for name in ("host", "hostaddr", "port"):
        values = str(parameters.get(name, "")).split(",")
        if len(values) > 1:
            begin = first % len(values)
            turned[name] = ",".join(values[begin:] + values[:begin])
    return turned


def host_count(url: URL) -> int:
    """Return how many hosts libpq tries, one after the other."""
    parameters = url.get_dialect()().create_connect_args(url)[1]
    hosts = parameters.get("host") or parameters.get("hostaddr") or os.environ.get("PGHOST", "")
    return str(hosts).count(",") + 1


def is_direct(connection: psycopg.Connection[Any]) -> bool:
    """Return whether the connection goes to a server process directly, and not to a pooler.

    A pooler answers the login itself, with a process id that is not the server's.

    A connection through a pooler prepares nothing. Some poolers do not know prepared statements,
    and let several clients use one server connection. All psycopg clients give their prepared
    statements the same names, so the library could run a statement of the application without an
    error, or the application a statement of the library.
    """
    row = raw_cursor(connection).execute("SELECT pg_backend_pid()").fetchone()
    return row is not None and row[0] == connection.info.backend_pid
