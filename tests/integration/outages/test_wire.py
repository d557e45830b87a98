"""The wire alone: what it sends, what it reads, and what it makes of an error."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from tests.support.proxy import Last, Proxy
from tests.support.waist import NoAnswerError, Wire, class_row, dict_row, limit, wait_for, wire_to

# More than the buffers of all sockets between here and the server.
LARGE = 8 * 2**20
PATIENCE = 60.0


@pytest.fixture
def open_wire() -> Iterator[Callable[[str], Wire]]:
    opened: list[Wire] = []

    def connect(url: str) -> Wire:
        opened.append(wire_to(url, PATIENCE))
        return opened[-1]

    yield connect
    for wire in opened:
        wire.close()


@pytest.fixture
def wire(open_wire: Callable[[str], Wire], database_url: str) -> Wire:
    return open_wire(database_url)


class TestSending:
    def test_a_large_statement_goes_past_a_proxy_that_stops_reading(
        self, open_wire: Callable[[str], Wire], proxy: Proxy
    ) -> None:
        waits_to_write = threading.Event()

        def wait(sockets: Any, seconds: float, *, writes: bool = False) -> bool:
            if writes:
                waits_to_write.set()
                return wait_for(sockets, seconds, writes=writes)
            # Until there is an answer: libpq sends a further part whenever it is to look for one.
            assert wait_for(sockets, PATIENCE)
            return True

        def read_later(data: bytes) -> bytes:
            assert waits_to_write.wait(PATIENCE)
            return data

        wire = open_wire(proxy.url)
        wire.wait = wait
        proxy.to_server = read_later
        [length] = wire.cursor().execute("SELECT length($1)", ["x" * LARGE]).fetchone()
        assert length == LARGE

    def test_answers_are_read_while_the_next_statement_is_sent(self, wire: Wire) -> None:
        """The server reads no further statement before its answer is read."""
        results = wire.together([("SELECT $1::text", ["x" * LARGE])] * 3)
        assert [len(result.get_value(0, 0) or b"") for result in results] == [LARGE] * 3

    @pytest.mark.direct("a temporary table is of a session")
    def test_nothing_is_executed_after_a_statement_that_fails(self, wire: Wire) -> None:
        wire.script("CREATE TEMPORARY TABLE seen (number int)")
        add = "INSERT INTO seen VALUES ($1)"
        with pytest.raises(psycopg.errors.DivisionByZero):
            wire.together([("BEGIN", ()), (add, [1]), ("SELECT 1 / 0", ()), ("COMMIT", ())])
        wire.undo()
        assert wire.is_idle
        assert wire.cursor().execute("SELECT number FROM seen").fetchall() == []

    def test_nothing_is_sent_if_one_of_several_cannot_be(self, wire: Wire) -> None:
        with pytest.raises(psycopg.DataError):
            wire.together([("BEGIN", ()), ("SELECT $1::text", ["\0"]), ("COMMIT", ())])
        assert wire.is_idle
        assert wire.cursor().execute("SELECT 1").fetchone() == (1,)

    @pytest.mark.direct("nothing is prepared through a pooler")
    def test_a_statement_that_could_not_be_prepared_is_prepared_later(self, wire: Wire) -> None:
        def count() -> int:
            [number] = wire.cursor().execute("SELECT count(*) FROM seen").fetchone()
            return int(number)

        wire.script("CREATE TEMPORARY TABLE seen (number int)")
        assert count() == 0
        wire.script("DROP TABLE seen")
        with pytest.raises(psycopg.errors.UndefinedTable):
            count()
        wire.script("CREATE TEMPORARY TABLE seen (number int)")
        assert (count(), count()) == (0, 0)
        prepared = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%FROM seen'"
        assert wire.cursor().execute(prepared).fetchone() == (1,)


class TestTransactions:
    @pytest.mark.direct("a temporary table is of a session")
    def test_an_error_in_a_part_leaves_the_transaction_usable(self, wire: Wire) -> None:
        wire.script("CREATE TEMPORARY TABLE seen (number int)")
        with wire.transaction():
            wire.script("INSERT INTO seen VALUES (1)")
            with pytest.raises(psycopg.errors.DivisionByZero), wire.transaction():
                wire.script("INSERT INTO seen VALUES (2); SELECT 1 / 0")
            with wire.transaction():
                wire.script("INSERT INTO seen VALUES (3)")
        assert wire.is_idle
        assert wire.cursor().execute("SELECT number FROM seen").fetchall() == [(1,), (3,)]

    @pytest.mark.direct("a temporary table is of a session")
    def test_one_that_is_undone_leaves_nothing(self, wire: Wire) -> None:
        wire.script("CREATE TEMPORARY TABLE seen (number int)")
        with wire.transaction(undone=True):
            wire.script("INSERT INTO seen VALUES (1)")
        assert wire.is_idle
        assert wire.cursor().execute("SELECT number FROM seen").fetchall() == []


class TestAnswers:
    def test_rows_come_one_by_one_or_all_that_are_left(self, wire: Wire) -> None:
        cursor = wire.cursor().execute("SELECT generate_series(1, 4)")
        assert (cursor.fetchone(), cursor.fetchone()) == ((1,), (2,))
        assert list(cursor) == [(3,), (4,)]
        assert cursor.fetchone() is None
        assert cursor.rowcount == 4

    def test_rows_are_made_as_it_is_asked_for(self, wire: Wire) -> None:
        @dataclass
        class Pair:
            one: int
            other: str | None

        cursor = wire.cursor()
        cursor.row_factory = dict_row
        query = "SELECT 1 AS one, NULL::text AS other"
        assert cursor.execute(query).fetchone() == {"one": 1, "other": None}
        cursor.row_factory = class_row(Pair)
        assert cursor.execute(query).fetchall() == [Pair(1, None)]
        assert cursor.columns == ["one", "other"]

    @pytest.mark.direct("a temporary table is of a session")
    def test_changed_rows_are_counted(self, wire: Wire) -> None:
        wire.script("CREATE TEMPORARY TABLE seen AS SELECT generate_series(1, 3) AS number")
        assert wire.cursor().execute("UPDATE seen SET number = 0").rowcount == 3
        assert wire.cursor().execute("UPDATE seen SET number = 0 WHERE number = 1").rowcount == 0

    def test_two_cursors_have_rows_of_their_own(self, wire: Wire) -> None:
        first = wire.cursor().execute("SELECT 1")
        second = wire.cursor().execute("SELECT 2, 3")
        assert (first.fetchone(), second.fetchone()) == ((1,), (2, 3))

    def test_the_servers_last_words_are_the_error(self, wire: Wire) -> None:
        with pytest.raises(psycopg.errors.AdminShutdown):
            wire.cursor().execute("SELECT pg_terminate_backend(pg_backend_pid())")

    def test_a_cut_connection_is_an_error(
        self, open_wire: Callable[[str], Wire], proxy: Proxy
    ) -> None:
        wire = open_wire(proxy.url)
        proxy.to_client = lambda data: Last(data[:3])
        with pytest.raises(psycopg.OperationalError):
            wire.cursor().execute("SELECT 1")

    @pytest.mark.direct("no pooler passes notifications on")
    def test_a_notification_in_the_packet_of_an_answer_is_heard(self, wire: Wire) -> None:
        wire.script("LISTEN here")
        assert not wire.heard()
        wire.script("NOTIFY here")
        assert wire.ended() is None
        assert wire.heard()
        assert not wire.heard()

    @pytest.mark.direct("a pooler has last words of its own")
    def test_last_words_in_the_packet_of_an_answer_are_heard(
        self, open_wire: Callable[[str], Wire], proxy: Proxy, connection: psycopg.Connection[Any]
    ) -> None:
        wire, held = open_wire(proxy.url), bytearray()

        def join(data: bytes) -> bytes:
            if not held:  # the answer; now the session is idle
                end = "SELECT pg_terminate_backend(%s)"
                connection.execute(end, [wire.connection.info.backend_pid])
            held.extend(data)
            return bytes(held) if b"FATAL" in held else b""

        proxy.to_client = join
        assert wire.cursor().execute("SELECT 1").fetchone() == (1,)
        assert wire.ended() == psycopg.errors.AdminShutdown.sqlstate

    def test_the_last_words_of_a_server_that_crashes_are_heard(
        self, open_wire: Callable[[str], Wire], proxy: Proxy
    ) -> None:
        """They are a warning. A server that ends at once does not always come to say them."""
        fields = b"SWARNING\0VWARNING\0C57P02\0Mterminating\0Fpostgres.c\0L1\0Rquickdie\0\0"
        said = b"N" + (len(fields) + 4).to_bytes(4, "big") + fields
        wire = open_wire(proxy.url)
        proxy.to_client = lambda data: Last(data + said)
        assert wire.cursor().execute("SELECT 1").fetchone() == (1,)
        assert wire.ended() == psycopg.errors.CrashShutdown.sqlstate

    def test_what_tls_has_read_ahead_is_found(
        self, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """libpq's buffer may take a part of a TLS record. The socket does not show the rest."""

        def wait(sockets: Any, seconds: float, **_: Any) -> bool:
            assert wait_for(sockets, PATIENCE)
            wire.connection.pgconn.consume_input()  # stands in for what TLS reads
            return wait_for(sockets, 0)

        wire.wait = wait
        assert wire.cursor().execute("SELECT 1").fetchone() == (1,)


class TestLimits:
    def test_an_answer_that_does_not_come_is_given_up_and_the_statement_cancelled(
        self, wire: Wire
    ) -> None:
        limit(wire, 0.05)
        with pytest.raises(NoAnswerError):
            wire.cursor().execute("SELECT pg_sleep(600)")
        limit(wire, PATIENCE)
        assert wire.is_idle  # the answer to the cancel was read
        assert wire.cursor().execute("SELECT 1").fetchone() == (1,)

    def test_a_statement_that_begins_when_the_time_is_over_has_some_time(self, wire: Wire) -> None:
        """It may be one of several of a request, such as the end of a transaction."""
        wire.script("BEGIN")
        limit(wire, PATIENCE, until=0.0)
        assert wire.cursor().execute("SELECT 1").fetchone() == (1,)
        wire.undo()
        assert wire.is_idle

    def test_all_answers_to_a_cancelled_pipeline_are_read(self, wire: Wire) -> None:
        limit(wire, 0.05)
        with pytest.raises(NoAnswerError):
            wire.together([("BEGIN", ()), ("SELECT pg_sleep(600)", ()), ("COMMIT", ())])
        limit(wire, PATIENCE)
        wire.undo()
        assert wire.cursor().execute("SELECT 1").fetchone() == (1,)


class TestClosing:
    @pytest.mark.filterwarnings("ignore:.*deleted while still open:ResourceWarning")
    def test_a_connection_that_nobody_has_is_freed_at_once(self, database_url: str) -> None:
        gc.collect()
        gc.disable()
        try:
            connection = weakref.ref(wire_to(database_url, PATIENCE).connection)
            assert connection() is None
        finally:
            gc.enable()
