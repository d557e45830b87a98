"""Requests that travel together on one connection: which of them, and what becomes of each."""

from __future__ import annotations

import ctypes
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from threading import Event, Thread
from types import FrameType
from typing import Any

import psycopg
import pytest
from greenlet import getcurrent, greenlet
from sqlalchemy import Engine, event

from apscheduler_tasklock import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock._database import exchange
from apscheduler_tasklock._database.deadline import WAKE_INTERVAL, Deadline
from apscheduler_tasklock._database.errors import NoConnectionError, NotSentError, RowLockedError
from apscheduler_tasklock._database.exchange import MOST_TOGETHER, Call, Outcome, Request
from apscheduler_tasklock._database.retry import BACKOFF, Retrier
from tests.support.exchanges import NAME, Asked, LateConnection, Setup
from tests.support.polling import eventually
from tests.support.proxy import Proxy

pytestmark = pytest.mark.inside

Connection = psycopg.Connection[Any]


class Numbers(Request[int]):
    """Asks the server for a number that it has.

    :cvar sent: the numbers of each statement, in the order in which they went
    """

    sent: list[list[int]]

    def __init__(self, number: int, task_name: str = "", query: str = "$1") -> None:
        self.kind = Numbers
        self.number = number
        self.task_name = task_name or f"task {number}"
        self.query = query
        self.failures: list[BaseException] = []

    def send(self, cursor: Any) -> int:
        self.sent.append([self.number])
        found: int = cursor.execute(f"SELECT {self.query}::int", [self.number]).fetchone()[0]
        return found

    @classmethod
    def send_together(
        cls, cursor: Any, requests: Sequence[Numbers]
    ) -> list[int | TaskLockDatabaseError]:
        cls.sent.append([request.number for request in requests])
        return [
            RowLockedError("locked")
            if request.number < 0
            else cursor.execute(f"SELECT {request.query}::int", [request.number]).fetchone()[0]
            for request in requests
        ]

    def note_failure(self, error: BaseException) -> None:
        self.failures.append(error)


class Vanishing:
    """A greenlet that has the connection, is never gone on with, and whose thread ends."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.greenlets: list[greenlet] = []
        self.go_on = Event()

    def __enter__(self) -> None:
        self.thread = Thread(target=self.leave)
        self.thread.start()
        eventually(lambda: self.greenlets and self.setup.exchange.in_use)

    def leave(self) -> None:
        here = getcurrent()
        stuck = greenlet(lambda: self.setup.ask(Call(lambda _cursor: here.switch())))
        self.greenlets.append(stuck)
        stuck.switch()
        assert self.go_on.wait(60)

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


class Interrupted(Asked):
    """A request in a thread that is interrupted at a line of one function, and lives on.

    :param number: of the line, among those that it passes
    """

    def __init__(self, setup: Setup, request: Request[Any], function: str, number: int) -> None:
        self.function = function
        self.number = number
        self.passed: set[int] = set()
        self.is_over, self.may_end = Event(), Event()
        super().__init__(setup, request)

    def run(self) -> None:
        sys.settrace(self.trace)
        super().run()
        sys.settrace(None)
        self.is_over.set()
        assert self.may_end.wait(60)

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename != exchange.__file__ or code.co_name != self.function:
            return self.trace if code.co_filename == exchange.__file__ else None
        # The end of a `with` is its first line once more, where Python interrupts nobody.
        if event == "line" and frame.f_lineno not in self.passed:
            self.passed.add(frame.f_lineno)
            if len(self.passed) == self.number:
                raise KeyboardInterrupt
        return self.trace


def interrupt(thread: Thread) -> None:
    """Let a thread be interrupted, as the main one by Ctrl-C."""
    raised = ctypes.py_object(KeyboardInterrupt)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), raised)


@pytest.fixture
def setup(database_url: str, make_setup: Callable[..., Setup]) -> Setup:
    Numbers.sent = []
    return make_setup(database_url)


def pids(connection: Connection) -> set[int]:
    """Return the server processes of the open connections."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
    return {pid for (pid,) in connection.execute(query, [NAME])}


def pid(cursor: Any) -> int:
    found: int = cursor.connection.info.backend_pid
    return found


class TestTogether:
    def test_a_request_goes_at_once_and_in_its_own_thread(self, setup: Setup) -> None:
        assert setup.ask(Call(lambda _cursor: threading.current_thread())) is (
            threading.current_thread()
        )

    def test_what_waits_goes_in_one_statement_and_each_gets_its_own_answer(
        self, setup: Setup
    ) -> None:
        asked = setup.ask_all([Numbers(number) for number in range(5)])
        assert Numbers.sent == [[0, 1, 2, 3, 4]]
        assert [each.answer for each in asked] == [0, 1, 2, 3, 4]

    def test_the_oldest_go_first_and_only_so_many_together(self, setup: Setup) -> None:
        outcomes: list[Any] = []
        requests = [Numbers(number) for number in range(MOST_TOGETHER + 2)]
        with setup.in_use():
            setup.exchange.submit(
                requests, Deadline(setup.closing), [outcomes.append] * len(requests)
            )
        eventually(lambda: len(outcomes) == len(requests))
        numbers = list(range(MOST_TOGETHER + 2))
        assert Numbers.sent == [numbers[:MOST_TOGETHER], numbers[MOST_TOGETHER:]]

    def test_another_kind_goes_with_a_statement_of_its_own(self, setup: Setup) -> None:
        other = Call(lambda cursor: Numbers.sent.append([99]))
        setup.ask_all([Numbers(1), other, Numbers(2)])
        assert Numbers.sent == [[1, 2], [99]]

    def test_a_later_kind_does_not_overtake_an_earlier_one_of_its_task(self, setup: Setup) -> None:
        """As a claim that comes after the release of the same task, and before other claims."""
        sent: list[str] = []
        release: Call[None] = Call(lambda _cursor: sent.append("release"))
        release.task_name = "one"
        setup.ask_all([Numbers(0, "other"), release, Numbers(1, "one")])
        assert Numbers.sent == [[0], [1]]

    def test_two_for_one_task_are_decided_one_after_the_other(self, setup: Setup) -> None:
        setup.ask_all([Numbers(1, "one"), Numbers(2, "one"), Numbers(3, "other")])
        assert Numbers.sent == [[1, 3], [2]]

    def test_no_thread_need_wait(self, setup: Setup) -> None:
        outcomes: list[Outcome[int]] = []
        threads = threading.active_count()
        with setup.in_use():
            setup.exchange.submit(
                [Numbers(n) for n in range(50)], Deadline(setup.closing), [outcomes.append] * 50
            )
            assert threading.active_count() <= threads + 2  # who uses it, and the background's
        eventually(lambda: len(outcomes) == 50)
        assert {outcome.result() for outcome in outcomes} == set(range(50))
        assert Numbers.sent == [list(range(50))]

    def test_what_was_answered_is_told_while_the_next_is_sent(self, setup: Setup) -> None:
        told, waited = Event(), []
        first = Call(lambda _cursor: 1)
        second = Call(lambda _cursor: waited.append(told.wait(60)))
        setup.exchange.submit(
            [first, second], Deadline(setup.closing), [lambda _: told.set(), lambda _: None]
        )
        eventually(lambda: waited)
        assert waited == [True]

    def test_without_a_thread_it_goes_at_once_if_nothing_is_under_way(self, setup: Setup) -> None:
        outcomes: list[Outcome[int]] = []
        setup.exchange.submit([Numbers(7)], Deadline(setup.closing), [outcomes.append])
        eventually(lambda: outcomes)
        assert outcomes[0].result() == 7


class TestFailures:
    def test_one_tasks_mistake_is_its_own(self, setup: Setup) -> None:
        asked = setup.ask_all([Numbers(1), Numbers(2, query="1 / 0"), Numbers(3)])
        assert [each.answer for each in asked] == [1, None, 3]
        assert str(asked[1].error) == "rejected: 22012"
        assert Numbers.sent == [[1, 2, 3], [1], [2], [3]]

    def test_what_is_to_be_asked_again_is_told_so_and_the_others_are_answered(
        self, setup: Setup
    ) -> None:
        asked = setup.ask_all([Numbers(-1), Numbers(2)])
        assert isinstance(asked[0].error, RowLockedError)
        assert asked[1].answer == 2
        assert setup.outage.reason is None

    @pytest.mark.direct("it ends the connection in the server")
    def test_a_lost_connection_is_told_to_all_that_travelled_together(
        self, setup: Setup, connection: Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        end = "pg_terminate_backend(pg_backend_pid())"
        asked = setup.ask_all([Numbers(1), Numbers(2, query=f"CASE WHEN {end} THEN 1 END")])
        assert all(isinstance(each.error, TaskLockDatabaseError) for each in asked)
        assert asked[0].error is not asked[1].error  # each thread raises one of its own
        assert all(isinstance(each.request.failures[0], psycopg.Error) for each in asked)
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert setup.ask(Numbers(3)) == 3

    def test_who_is_interrupted_hands_the_connection_on(self, setup: Setup) -> None:
        def interrupt(_cursor: Any) -> None:
            raise KeyboardInterrupt

        first, second = setup.ask_all([Call(interrupt), Numbers(2)])
        assert isinstance(first.error, KeyboardInterrupt)
        assert second.answer == 2

    def test_what_travelled_with_who_was_interrupted_is_in_doubt(self, setup: Setup) -> None:
        class Interrupted(Numbers):
            @classmethod
            def send_together(cls, cursor: Any, requests: Any) -> Any:
                raise KeyboardInterrupt

        first, second = setup.ask_all([Interrupted(1), Interrupted(2)])
        assert isinstance(first.error, KeyboardInterrupt)
        assert isinstance(second.error, TaskLockDatabaseError)
        assert isinstance(second.request.failures[0], KeyboardInterrupt)

    def test_a_sender_that_has_vanished_is_replaced(self, setup: Setup) -> None:
        with Vanishing(setup):
            pass
        assert setup.ask(Numbers(1)) == 1

    def test_one_that_waits_replaces_a_sender_that_vanishes(self, setup: Setup) -> None:
        with Vanishing(setup):
            asked = Asked(setup, Numbers(1))
            eventually(lambda: setup.waiting() == 1)
        assert asked.ended().answer == 1

    def test_what_travelled_with_a_sender_that_vanished_is_told_so(self, setup: Setup) -> None:
        class Stuck(Numbers):
            @classmethod
            def send_together(cls, cursor: Any, requests: Any) -> Any:
                before.switch()

        outcomes: list[Outcome[int]] = []
        kept: list[greenlet] = []
        before: Any = None

        def vanish() -> None:
            nonlocal before
            before = getcurrent()
            kept.append(greenlet(lambda: setup.ask(Stuck(1))))
            kept[0].switch()

        with setup.in_use():
            thread = Thread(target=vanish)
            thread.start()
            eventually(lambda: setup.waiting() == 1)
            setup.exchange.submit([Stuck(2)], Deadline(setup.closing), [outcomes.append])
        thread.join(60)
        assert outcomes == []
        assert setup.ask(Numbers(3)) == 3
        eventually(lambda: outcomes)
        assert isinstance(outcomes[0].error, TaskLockDatabaseError)

    def test_a_turn_that_does_not_come_in_time_sends_nothing(self, setup: Setup) -> None:
        with setup.in_use(), pytest.raises(NotSentError, match="turn on the connection"):
            setup.ask(Numbers(1), turn_within=0.2)
        assert Numbers.sent == []
        assert setup.outage.reason is None
        assert setup.ask(Numbers(2)) == 2

    def test_it_says_so_too_if_the_sender_is_about_to_connect(self, setup: Setup) -> None:
        connecting = LateConnection(setup)
        sender = Asked(setup, Numbers(1))
        assert connecting.begun.wait(60)
        with pytest.raises(NotSentError, match="turn on the connection"):
            setup.ask(Numbers(2), turn_within=0.2)
        connecting.go_on.set()
        assert sender.ended().answer == 1

    def test_it_says_so_if_no_connection_comes(
        self, database_url: str, make_setup: Callable[..., Setup]
    ) -> None:
        """With a thread that waits, and without."""
        setup = make_setup(database_url)
        setup.pool.attempt = 0.3
        connecting = LateConnection(setup)
        sender = Asked(setup, Numbers(1))
        assert connecting.begun.wait(60)
        outcomes: list[Outcome[int]] = []
        setup.exchange.submit([Numbers(2)], Deadline(setup.closing), [outcomes.append])
        with pytest.raises(NoConnectionError, match="no connection came"):
            setup.ask(Numbers(3))
        connecting.go_on.set()
        assert sender.ended().answer == 1
        eventually(lambda: outcomes)
        assert isinstance(outcomes[0].error, NoConnectionError)

    def test_without_a_thread_it_gives_up_when_claiming_was_stopped_and_it_is_no_outage(
        self, setup: Setup
    ) -> None:
        outcomes: list[Outcome[int]] = []
        deadline = Deadline(setup.closing)
        with setup.in_use():
            setup.exchange.submit([Numbers(1)], deadline, [outcomes.append])
            setup.closing.stop()
            eventually(lambda: deadline.seconds_left <= 0)
        eventually(lambda: outcomes)
        assert isinstance(outcomes[0].error, NotSentError)
        assert Numbers.sent == []
        assert setup.outage.reason is None

    def test_what_is_given_up_is_not_sent_later(
        self, database_url: str, make_setup: Callable[..., Setup]
    ) -> None:
        """Its sender comes back after it was taken for vanished, as from a late name server."""
        Numbers.sent = []
        setup = make_setup(database_url, timeout=1)
        with setup.in_use():
            sender = Asked(setup, Numbers(1))
            eventually(lambda: setup.waiting() == 1)
            follower = Asked(setup, Numbers(2))
            eventually(lambda: setup.waiting() == 2)
            connecting = LateConnection(setup)
        assert connecting.begun.wait(60)
        assert isinstance(follower.ended().error, TaskLockDatabaseError)
        connecting.go_on.set()
        sender.ended()
        assert Numbers.sent == [[1]]
        assert follower.request.failures == []

    def test_who_looks_while_it_is_given_up_is_told_so(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As when hundreds wait for a sender, and a shutdown's limit passes as it is answered."""
        until = [inf]
        no_turn = exchange.no_turn

        def slowly(since: float) -> NotSentError:
            """Widen the gap between that it leaves the queue and that it is told why."""
            Event().wait(5 * WAKE_INTERVAL)
            return no_turn(since)

        with setup.in_use():
            asked = Asked(setup, Numbers(1), Deadline(None, lambda: until[0]))
            eventually(lambda: setup.waiting() == 1)
            monkeypatch.setattr(exchange, "no_turn", slowly)
            until[0] = 0.0
        assert isinstance(asked.ended().error, NotSentError)
        assert Numbers.sent == []

    def test_who_gives_up_may_ask_again_at_once_where_no_thread_can_be_started(
        self, setup: Setup
    ) -> None:
        """The next turn is begun before it is told so, in the thread that hands it on."""
        until, order = [inf], []

        def ask_again(_: Outcome[int]) -> None:
            order.append(setup.ask(Numbers(3)))

        with setup.in_use():
            late = Deadline(setup.closing, lambda: until[0])
            setup.exchange.submit([Numbers(1)], late, [ask_again])
            setup.exchange.submit(
                [Numbers(2)], Deadline(setup.closing), [lambda got: order.append(got.result())]
            )
            setup.background.close()
            until[0] = 0.0
        eventually(lambda: len(order) == 2)
        assert order == [2, 3]

    def test_what_has_the_turn_is_not_sent_if_the_background_comes_too_late(
        self, setup: Setup
    ) -> None:
        """As behind a custom trigger's code that takes long."""
        outcomes: list[Outcome[int]] = []
        go_on = Event()
        setup.background.run(partial(go_on.wait, 60))
        setup.exchange.submit([Numbers(1)], Deadline(setup.closing), [outcomes.append], 0.001)
        submitted = time.monotonic()  # its time began before
        eventually(lambda: time.monotonic() > submitted + 0.001)
        go_on.set()
        eventually(lambda: outcomes)
        assert isinstance(outcomes[0].error, NotSentError)
        assert setup.ask(Numbers(2)) == 2
        assert Numbers.sent == [[2]]

    @pytest.mark.parametrize("function", ["_give_turn", "_new_sender", "_gather", "_turn"])
    def test_who_is_interrupted_at_any_line_of_its_turn_hands_the_connection_on(
        self, setup: Setup, function: str
    ) -> None:
        """As by a signal handler that raises an error, in a process that goes on."""
        outcomes: list[Outcome[int]] = []
        for number in itertools.count(1):
            with setup.in_use():
                sender = Interrupted(setup, Numbers(1), function, number)
                eventually(lambda: setup.waiting() == 1)
                follower = Asked(setup, Numbers(2))
                setup.exchange.submit([Numbers(3)], Deadline(setup.closing), [outcomes.append])
                eventually(lambda: setup.waiting() == 3)
            assert sender.is_over.wait(60)
            is_interrupted = isinstance(sender.error, KeyboardInterrupt)
            assert setup.ask(Numbers(4), turn_within=20) == 4
            assert follower.ended().answer == 2 or follower.error
            eventually(lambda number=number: len(outcomes) == number)
            sender.may_end.set()
            sender.ended()
            if not is_interrupted:
                break
        assert number > 2

    def test_who_is_interrupted_while_its_sender_connects_is_not_sent(self, setup: Setup) -> None:
        with setup.in_use():
            sender = Asked(setup, Numbers(1))
            eventually(lambda: setup.waiting() == 1)
            follower = Asked(setup, Numbers(2))
            eventually(lambda: setup.waiting() == 2)
            connecting = LateConnection(setup)
        assert connecting.begun.wait(60)
        interrupt(follower)
        assert isinstance(follower.ended().error, KeyboardInterrupt)
        connecting.go_on.set()
        assert sender.ended().answer == 1
        assert Numbers.sent == [[1]]
        assert follower.request.failures == []

    def test_a_text_that_cannot_be_sent_is_its_own_tasks_mistake(self, setup: Setup) -> None:
        asked = setup.ask_all([Numbers(1), Numbers(2, query="'\ud800'"), Numbers(3)])
        assert [each.answer for each in asked] == [1, None, 3]
        assert "surrogates not allowed" in str(asked[1].error)

    def test_who_waits_gives_up_when_claiming_was_stopped(self, setup: Setup) -> None:
        with setup.in_use():
            asked = Asked(setup, Numbers(1))
            eventually(lambda: setup.waiting() == 1)
            setup.closing.stop()
            assert isinstance(asked.ended().error, NotSentError)
        assert Numbers.sent == []

    def test_replicas_that_lost_a_server_come_back_at_different_moments(
        self, make_setup: Callable[..., Setup], proxy: Proxy
    ) -> None:
        proxy.accepting = False
        first = []
        for _ in range(2):
            setup, pauses = make_setup(proxy.url), []
            retrier = Retrier(setup.exchange, setup.outage, setup.closing, "here")

            def wait(seconds: float, pauses: list[float] = pauses) -> bool:
                pauses.append(seconds)
                return True  # the first is enough

            with pytest.raises(TaskLockDatabaseError):
                retrier.run_until(60, Numbers(1), wait=wait)
            first.append(pauses[0])
        assert first[0] != first[1]
        assert all(0.8 * BACKOFF[0] <= pause <= 1.2 * BACKOFF[0] for pause in first)


@pytest.mark.direct("it counts the library's connections in the server")
class TestOneConnection:
    def test_is_kept_while_nothing_is_asked(self, setup: Setup, connection: Connection) -> None:
        assert pids(connection) == set()
        first = setup.ask(Call(pid))
        assert setup.ask(Call(pid)) == first
        assert pids(connection) == {first}

    def test_whose_statement_failed_is_not_used_again(self, setup: Setup) -> None:
        failed: list[int] = []

        def fail(cursor: Any) -> None:
            failed.append(pid(cursor))
            cursor.execute("SELECT 1 / 0")

        with pytest.raises(TaskLockError, match="22012"):
            setup.ask(Call(fail))
        assert setup.ask(Call(pid)) not in failed

    def test_none_is_kept_after_closing(self, setup: Setup, connection: Connection) -> None:
        setup.ask(Numbers(1))
        setup.pool.close()
        eventually(lambda: not pids(connection))
        setup.ask(Numbers(2))
        eventually(lambda: not pids(connection))

    @pytest.mark.parametrize("given", ["a URL", "an engine"])
    def test_that_was_ended_while_idle_is_replaced_in_silence(
        self,
        engine: Engine,
        make_setup: Callable[..., Setup],
        database_url: str,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
        given: str,
    ) -> None:
        """As by ``idle_session_timeout``. A crash looks alike: rows are doubted."""
        Numbers.sent = []
        setup = make_setup(database_url if given == "a URL" else engine, timeout=1)
        setup.ask(Numbers(1))
        eventually(lambda: setup.outage.stable)
        others = (
            "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        connection.execute(f"SELECT pg_terminate_backend(pid) {others}")
        eventually(lambda: connection.execute(f"SELECT {others}").rowcount == 0)
        assert setup.ask(Numbers(2)) == 2
        assert not setup.outage.stable
        assert [r for r in caplog.records if r.levelno >= logging.INFO] == []


class TestAnApplicationsEngine:
    """It may be disposed of right after a shutdown; what is checked in later would stay open."""

    def test_what_is_in_use_at_the_closing_is_closed_after_its_use(
        self, engine: Engine, make_setup: Callable[..., Setup]
    ) -> None:
        setup = make_setup(engine)

        def close(cursor: Any) -> Any:
            setup.pool.close()
            engine.dispose()
            return cursor.connection

        assert setup.ask(Call(close)).closed
        other = make_setup(engine)
        assert not other.ask(Call(lambda cursor: cursor.connection)).closed

    def test_what_comes_too_late_is_closed(
        self, engine: Engine, make_setup: Callable[..., Setup]
    ) -> None:
        opened: list[Any] = []
        may_open = Event()

        @event.listens_for(engine, "do_connect")
        def wait(_dialect: Any, _record: Any, arguments: Any, parameters: Any) -> Any:
            assert may_open.wait(60)
            opened.append(psycopg.connect(*arguments, **parameters))
            return opened[-1]

        setup = make_setup(engine)
        setup.closing.stop()
        with pytest.raises(TaskLockDatabaseError, match="in the time that a shutdown leaves"):
            setup.ask(Numbers(1))
        may_open.set()
        eventually(lambda: opened and opened[0].closed)
