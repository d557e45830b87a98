"""The wire: statements on one connection, sent by libpq's own calls, and the limits of their waits.

psycopg's cursors are not used. They take some 50 calls of Python more for each statement, and their
waits have no limits: TCP's own limits end a wait when the network path is dead, but not when the
server process is suspended or waits for a lock, or when a proxy swallows the answer. A
``statement_timeout`` does not help, because it belongs to the session, which pgbouncer in
transaction mode gives to the next client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from math import inf
from typing import Any, Final, Protocol, TypeVar
from uuid import uuid4

import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.pq.abc import PGresult

from apscheduler_tasklock._database.abandoned_call import WAKE_INTERVAL, never
from apscheduler_tasklock._database.inbox import ready_of
from apscheduler_tasklock._database.sqlstates import UNCONFIRMED, UnconfirmedError
from apscheduler_tasklock._shutdown import CANCEL_LIMIT

Row = TypeVar("Row")

# Limits the wait, in seconds, for each of the two answers after a statement was cancelled: the
# confirmation of the cancel, and the answer to the query that asks which session locks a table.
ASKING_LIMIT = 0.2
# The function of PostgreSQL that ends a wait for a synchronous standby before the standby has
# confirmed the commit, and gives a warning. Its text is translated.
_GIVES_UP_WAITING = "SyncRepWaitForLSN"
# The function of PostgreSQL that ends a session because another one has crashed, or at an immediate
# shutdown. Its last message is only a warning.
_ENDS_ALL_SESSIONS = "quickdie"
# Limits how often an idle connection is read to find out whether its other side has ended it.
_MOST_READS = 10
# Limits the statements that a connection prepares. Each stays in the server's memory, and values of
# other types, such as a NULL, make another one.
_MOST_PREPARED = 300

_ERROR: Final = int(ExecStatus.FATAL_ERROR)
_ROWS: Final = int(ExecStatus.TUPLES_OK)


class NoAnswerError(psycopg.OperationalError):
    """The server did not answer in time."""


# Makes a row from its values, for the names of the columns.
RowFactory = Callable[[Sequence[str]], Callable[[Sequence[Any]], Any]]


def tuple_row(_names: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """Let rows be tuples."""
    return tuple


def dict_row(names: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """Let rows be dictionaries, by the columns' names."""
    return lambda row: dict(zip(names, row, strict=True))


def class_row(made: Callable[..., Row]) -> RowFactory:
    """Let rows be objects of a class, whose parameters have the columns' names."""
    return lambda names: lambda row: made(**dict(zip(names, row, strict=True)))


class Wait(Protocol):
    """Waits until one of several sockets is ready; returns whether one is."""

    def __call__(self, sockets: Sequence[int], seconds: float, *, writes: bool = False) -> bool:
        """Wait for so many seconds at most; with ``writes``, also until one can be written to."""


def wait_for(sockets: Sequence[int], seconds: float, *, writes: bool = False) -> bool:
    """Wait until one of several sockets is ready, and do nothing else meanwhile; see `Wait`."""
    return bool(ready_of(sockets, seconds, writes=writes))


class Wire:
    """Sends statements on a connection, and reads their answers.

    Each statement is a transaction of its own, also if psycopg would begin one.

    :param connection: the connection
    :param seconds: limits the wait for each answer
    :ivar seconds: that limit; it may be set before each statement
    :ivar over_at: returns when all waits end, on the monotonic clock; may be set likewise
    :ivar is_direct: whether the connection leads to a server process, and not to a pooler. Nothing
        is prepared through a pooler: some poolers do not know prepared statements, and let several
        clients use one server connection.
    :ivar encoding: the encoding of texts, as Python names it
    :ivar wait: waits for the socket; a thread that has other work may do it meanwhile
    """

    wait: Wait = staticmethod(wait_for)
    over_at: Callable[[], float] = staticmethod(never)

    def __init__(self, connection: psycopg.Connection[Any], seconds: float) -> None:
        self.connection = connection
        self.is_direct = False
        self.encoding = connection.info.encoding
        self._pgconn = connection.pgconn
        self._transformer = Transformer(connection)
        self.seconds = seconds
        self._begun = 0.0  # when the statement was begun, on the monotonic clock
        self._ended_at = inf  # when it was seen that the wait for its answer is over
        self._said = _Said()
        # The names of prepared statements, by their texts and the types of their values. An empty
        # name is that of a statement that was sent once.
        self._prepared: dict[tuple[bytes, object], bytes] = {}
        # The names are this wire's alone. A pooler that was not recognized may lend the session to
        # others, and one of them would run its statements under the same names.
        self._mark, self._numbers = uuid4().hex[:8], count()
        connection.add_notice_handler(self._said.hear)

    def cursor(self) -> Cursor:
        """Return a cursor."""
        return Cursor(self)

    @property
    def is_idle(self) -> bool:
        """Whether no transaction is open, and no answer is to be read."""
        return self._pgconn.transaction_status == TransactionStatus.IDLE

    @property
    def is_unanswered(self) -> bool:
        """Whether the last statement was not answered, not even after it was cancelled."""
        return self._pgconn.transaction_status == TransactionStatus.ACTIVE

    def send(self, query: bytes | str, parameters: Sequence[object]) -> PGresult:
        """Send a statement, and return its result.

        :raises psycopg.Error: the statement failed
        :raises NoAnswerError: the answer did not come in time
        :raises UnconfirmedError: the server has committed, without a synchronous standby
        """
        query, values, types, formats = self._dumped(query, parameters)
        pgconn = self._pgconn
        self._begin()
        name = b""
        if self.is_direct:
            name = self._name((query, types), query, types)
        if name:
            pgconn.send_query_prepared(name, values, formats, Format.BINARY)
        else:
            pgconn.send_query_params(query, values, types, formats, Format.BINARY)
        return self._answered()[-1]

    def script(self, text: str) -> None:
        """Send statements without values, together. They are one transaction, or parts of one.

        :raises psycopg.Error: a statement failed
        :raises NoAnswerError: the answer did not come in time
        :raises UnconfirmedError: the server has committed, without a synchronous standby
        """
        self._begin()
        self._pgconn.send_query(text.encode(self.encoding))
        self._answered()

    def together(
        self, statements: Sequence[tuple[bytes | str, Sequence[object]]]
    ) -> list[PGresult]:
        """Send several statements at once. After one that fails, none is executed.

        :return: their results
        :raises psycopg.Error: one of them failed
        :raises NoAnswerError: the answers did not come in time
        :raises UnconfirmedError: the server has committed, without a synchronous standby
        """
        if not psycopg.Pipeline.is_supported():  # libpq before version 14
            return [self.send(query, parameters) for query, parameters in statements]
        # Dump all values first: one that cannot be dumped must leave nothing sent in part.
        dumped = [self._dumped(query, parameters) for query, parameters in statements]
        pgconn = self._pgconn
        self._begin()
        pgconn.enter_pipeline_mode()
        try:
            for query, values, types, formats in dumped:
                pgconn.send_query_params(query, values, types, formats, Format.BINARY)
            pgconn.pipeline_sync()
            return self._answered()[:-1]
        finally:
            with suppress(psycopg.Error):  # answers are left, so the connection cannot be used
                pgconn.exit_pipeline_mode()

    @contextmanager
    def transaction(self, *, undone: bool = False) -> Iterator[None]:
        """Open a transaction, or a part of one that is open already.

        :param undone: whether what was done in the context is rolled back in any case
        """
        begin, end, undo = "BEGIN", "COMMIT", "ROLLBACK"
        if not self.is_idle:
            begin, end = "SAVEPOINT tasklock", "RELEASE SAVEPOINT tasklock"
            undo = f"ROLLBACK TO SAVEPOINT tasklock; {end}"
        self.script(begin)
        try:
            yield
        except BaseException:
            with suppress(psycopg.Error, UnconfirmedError):  # the first error counts
                self.undo(undo)
            raise
        if undone:
            self.undo(undo)
        else:
            self.script(end)

    def undo(self, text: str = "ROLLBACK") -> None:
        """Roll back the open transaction, if there is one and all of it was answered."""
        status = self._pgconn.transaction_status
        if status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            self.script(text)

    def _dumped(
        self, query: bytes | str, parameters: Sequence[object]
    ) -> tuple[bytes, Any, Any, Any]:
        """Return a query and its values as they are sent, and the values' types and formats."""
        if isinstance(query, str):
            query = query.encode(self.encoding)
        transformer = self._transformer
        values = transformer.dump_sequence(parameters, [PyFormat.AUTO] * len(parameters))
        return query, values, transformer.types, transformer.formats

    def _name(self, key: tuple[bytes, object], query: bytes, types: Any) -> bytes:
        """Return the name of a prepared statement; empty: it is not prepared.

        A statement is prepared when it is sent for the second time. Preparing at the first time
        would cost a second round trip, also for a statement that is sent only once. Preparing later
        would slow bursts down: in a burst a replica sends about ten statements of each kind,
        PostgreSQL parses an unprepared statement each time, and parsing takes twice as long as
        everything else.
        """
        name = self._prepared.get(key)
        if name is None and len(self._prepared) < _MOST_PREPARED:
            self._prepared[key] = b""
        elif name == b"":
            name = f"tasklock_{self._mark}_{next(self._numbers)}".encode()
            self._pgconn.send_prepare(name, query, types)
            self._answered()
            self._prepared[key] = name
        return name or b""

    def _begin(self) -> None:
        self._begun, self._ended_at = time.monotonic(), inf
        self._said.is_unconfirmed = False

    def _answered(self) -> list[PGresult]:
        """Return the results of what was sent, or raise the first error among them."""
        try:
            results = self._read()
        except NoAnswerError:
            self._cancel()
            if self._said.is_unconfirmed:
                raise UnconfirmedError(UNCONFIRMED) from None
            raise
        if self._said.is_unconfirmed:
            raise UnconfirmedError(UNCONFIRMED)
        for result in results:
            if result.status == _ERROR:
                raise error_from_result(result, self.encoding)
        return results

    def _read(self) -> list[PGresult]:
        """Send what libpq has not sent yet, and return all results."""
        pgconn = self._pgconn
        while pgconn.flush():
            self._wait(writes=True)
            # As libpq's manual has it. The server may wait until its own answer is read.
            pgconn.consume_input()
        results: list[PGresult] = []
        last: object = pgconn
        try:
            while True:
                while pgconn.is_busy():
                    self._wait()
                    pgconn.consume_input()
                result = pgconn.get_result()
                if result is not None:
                    results.append(result)
                elif last is None:  # one None follows the results of each statement
                    return results
                last = result
        except psycopg.DatabaseError:
            # The connection may have ended after the server has said why.
            if not any(result.status == _ERROR for result in results):
                raise
            return results

    def _wait(self, *, writes: bool = False) -> None:
        """Wait until the socket can be read, or written to; at most WAKE_INTERVAL.

        The end of the waits may move closer meanwhile. And TLS may have read more than libpq has
        taken, which the socket does not show.

        :raises NoAnswerError: the limits are over
        """
        now = time.monotonic()
        left = min(self._begun + self.seconds, self.over_at()) - now
        # A statement has some time also if the one before has used all of it up, and so has the
        # next part of an answer.
        seconds = min(left, WAKE_INTERVAL) if left > 0 else WAKE_INTERVAL
        is_ready = self.wait([self._pgconn.socket], seconds, writes=writes)
        if left <= 0:
            # If an answer has come already, read it: it may have come in time, while this process
            # was paused. An answer that arrives in parts has CANCEL_LIMIT more seconds.
            self._ended_at = min(self._ended_at, now)
            if not is_ready or now > self._ended_at + CANCEL_LIMIT:
                waited = now - self._begun
                raise NoAnswerError(f"no answer from the server within {waited:.1f} sec")

    def _cancel(self) -> None:
        """Cancel the statement, so that the server does not carry it out when nobody waits for it.

        An old libpq cannot limit the time of a cancel request, so with an old libpq the connection
        is only closed.
        """
        if not psycopg.capabilities.has_cancel_safe():
            return
        with suppress(psycopg.Error):
            self.connection.cancel_safe(timeout=CANCEL_LIMIT)
            # Read the server's answer, so that `ask_soon` can send its query. The answer may also
            # be that the commit was not confirmed.
            if self.over_at() > time.monotonic():
                self._read_soon()

    def _read_soon(self) -> list[PGresult]:
        """Return the results that come in ASKING_LIMIT; none if they do not all come then."""
        limits = self.seconds, self.over_at
        self.seconds, self.over_at = ASKING_LIMIT, never
        self._begun, self._ended_at = time.monotonic(), -inf
        try:
            return self._read()
        except NoAnswerError:
            return []
        finally:
            self.seconds, self.over_at = limits

    def ask_soon(self, query: bytes) -> str | None:
        """Return the text that a SELECT returns; ``None``: no row, or no answer in ASKING_LIMIT."""
        if not self.is_idle:
            return None  # the statement before has not been answered
        with suppress(psycopg.Error):
            self._pgconn.send_query(query)
            for result in self._read_soon():
                if result.ntuples:
                    value = result.get_value(0, 0)
                    return None if value is None else bytes(value).decode(errors="replace")
        return None

    def ended(self) -> str | None:
        """Return why the other side has ended the idle connection. Sends nothing.

        The other side is a proxy, or a server that was restarted or has an
        ``idle_session_timeout``.

        :return: the SQLSTATE of PostgreSQL's last message, or ``""`` without such a message;
            ``None`` for a connection that has not ended
        """
        try:
            for _ in range(_MOST_READS):  # notices may come before the last message
                # libpq treats the server's last message as a notice, because no statement is under
                # way. It may have come in the packet of an answer.
                self._pgconn.is_busy()
                if self._said.last_words is not None:  # the socket is closed a moment later
                    return self._said.last_words
                if not wait_for([self._pgconn.socket], 0):
                    return None
                self._pgconn.consume_input()
        except (psycopg.Error, OSError, ValueError):
            return ""
        return None

    def heard(self) -> bool:
        """Return whether a notification has come, also one that came with an answer."""
        heard = False
        while self._pgconn.notifies() is not None:
            heard = True
        return heard

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def names(self, result: PGresult) -> list[str]:
        """Return the names of a result's columns."""
        return [(result.fname(n) or b"").decode(self.encoding) for n in range(result.nfields)]

    def rows(self, result: PGresult, first: int, last: int, factory: RowFactory) -> list[Any]:
        """Return rows of a result.

        :param first: the place of the first one
        :param last: the place after the last one
        """
        self._transformer.set_pgresult(result)
        make = tuple if factory is tuple_row else factory(self.names(result))
        return self._transformer.load_rows(first, last, make)


class _Said:
    """What the server has said beside its answers.

    It has no reference to the wire, because the connection refers to it: a connection that nobody
    closes, and nobody has any more, is closed at once, and not by the garbage collector.

    :ivar is_unconfirmed: whether a commit was not confirmed by a synchronous standby
    :ivar last_words: the SQLSTATE with which the server has ended
    """

    is_unconfirmed = False
    last_words: str | None = None

    def hear(self, said: psycopg.errors.Diagnostic) -> None:
        """Note a notice."""
        if said.source_function == _GIVES_UP_WAITING:
            self.is_unconfirmed = True
        is_fatal = said.severity_nonlocalized in ("FATAL", "PANIC")
        if is_fatal or said.source_function == _ENDS_ALL_SESSIONS:
            self.last_words = said.sqlstate or ""


class Cursor:
    """Sends statements on a wire, and has the rows of the last one.

    Placeholders are numbered. Times come in binary form, because that form is the same under each
    ``DateStyle``.

    :ivar row_factory: how rows are made
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.row_factory: RowFactory = tuple_row
        self._result: PGresult | None = None
        self._next = 0  # the row that `fetchone` returns next

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The connection."""
        return self.wire.connection

    def execute(self, query: bytes | str, parameters: Sequence[object] = ()) -> Cursor:
        """Send a statement, and return this cursor. See :meth:`Wire.send` for what is raised."""
        self._result = None
        self.read(self.wire.send(query, parameters))
        return self

    def read(self, result: PGresult) -> None:
        """Read this result's rows from now on."""
        self._result, self._next = result, 0

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        assert self._result is not None
        return self.wire.names(self._result)

    @property
    def rowcount(self) -> int:
        """How many rows were returned, or changed."""
        assert self._result is not None
        result = self._result
        return result.ntuples if result.status == _ROWS else result.command_tuples or 0

    def fetchone(self) -> Any:
        """Return the next row; ``None``: there is none."""
        rows = self._fetch(self._next + 1)
        return rows[0] if rows else None

    def fetchall(self) -> list[Any]:
        """Return all rows that are left."""
        return self._fetch(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())

    def _fetch(self, last: int | None) -> list[Any]:
        assert self._result is not None
        count = self._result.ntuples
        first, self._next = self._next, count if last is None else min(last, count)
        return self.wire.rows(self._result, first, self._next, self.row_factory)
