"""The one thread that owns the connection: what goes through it, and what becomes of each."""

from __future__ import annotations

import asyncio
import gc
import linecache
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from types import FrameType
from typing import Any, ClassVar

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import NullPool

from apscheduler_tasklock import TaskLockDatabaseError, TaskLockError, TaskLocks
from apscheduler_tasklock._database import awaited_request
from apscheduler_tasklock._database import thread as module
from apscheduler_tasklock._database.awaited_request import AwaitedCall, AwaitedRequest
from apscheduler_tasklock._database.jitter import BACKOFF, jittered
from apscheduler_tasklock._database.outbox import MOST_TOGETHER
from apscheduler_tasklock._database.requests import Call, Outcome, Request
from apscheduler_tasklock._database.sqlstates import NotSentError, RowLockedError
from apscheduler_tasklock._database.timings import Timings
from tests.support.event_loops import abandoned_loop
from tests.support.exchanges import NAME, InThread, Setup, Wanted, timed
from tests.support.interrupting import press_ctrl_c
from tests.support.polling import eventually
from tests.support.proxy import Gate, Proxy
from tests.support.waist import Closing, wait_for

Connection = psycopg.Connection[Any]
PATIENCE = 60.0
# A request that is sent once waits so long for a connection, and for its answer.
PATIENT = Timings(longest_answer=PATIENCE)


class Numbers(AwaitedRequest[int, int]):
    """Asks the server for a number that it has.

    :cvar sent: the numbers of each statement, in the order in which they went
    """

    sent: ClassVar[list[list[int]]] = []

    def __init__(self, number: int, task_name: str = "", query: str = "$1") -> None:
        super().__init__(Closing(), came=time.monotonic())
        self.kind = Numbers
        self.number = number
        self.task_name = task_name or f"task {number}"
        self.query = query
        self.errors: list[BaseException] = []

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
        self.errors.append(error)


class Held:
    """A statement that goes on until it is let go, and then answers."""

    def __init__(self, answer: str = "answer") -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.answer = answer

    def statement(self, _cursor: Any) -> str:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        return self.answer


class Renewal:
    """What is renewed, as the heartbeat's claims are."""

    due_at = urgent_at = inf

    def request(self, now: float) -> Request[Any]:
        self.due_at = inf
        renewal = Call(self.send, Closing(), came=now)
        renewal.by = -inf
        return renewal

    def send(self, _cursor: Any) -> None:
        Numbers.sent.append([-1])


@pytest.fixture
def timings() -> Timings:
    return PATIENT


@pytest.fixture
def setup(database_url: str, make_setup: Callable[..., Setup], timings: Timings) -> Setup:
    Numbers.sent = []
    return make_setup(database_url, timings=timings)


def lingers(seconds: float) -> pytest.MarkDecorator:
    """The thread waits for so long without work before it ends."""
    given = [replace(PATIENT, linger=seconds)]
    return pytest.mark.parametrize("timings", given, ids=[f"lingers {seconds:g} s"])


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library start none, as where they are limited."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("tasklock"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == module.NAME]


def this_thread(_cursor: Any) -> threading.Thread:
    return threading.current_thread()


def pids(connection: Connection) -> set[int]:
    """Return the server processes of the open connections."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
    return {pid for (pid,) in connection.execute(query, [NAME])}


def pid(cursor: Any) -> int:
    found: int = cursor.connection.info.backend_pid
    return found


def asked_of(
    setup: Setup, wanted: Wanted, discarded: list[Any] | None = None, **options: Any
) -> AwaitedRequest[Any, Any]:
    """Return a request that can be sent, with what is done with an answer that nobody wants."""
    asked = timed(wanted, setup.closing, **options)
    if discarded is not None:
        asked.discard = discarded.append  # type: ignore[method-assign]  # of this request only
    return asked


def submit(setup: Setup, *wanted: Wanted, **options: Any) -> list[AwaitedRequest[Any, Any]]:
    """Send requests, and wait for none."""
    asked = [asked_of(setup, each, **options) for each in wanted]
    for each in asked:
        setup.database.submit(each)
    return asked


class TestTheThread:
    def test_is_one_that_the_first_request_starts(self, setup: Setup) -> None:
        assert threads() == []
        asked = setup.ask_all([this_thread, this_thread, this_thread])
        assert {each.answer for each in asked} == set(threads())
        assert len(threads()) == 1

    @lingers(0.05)
    def test_ends_some_time_after_the_last_and_the_next_starts_another(self, setup: Setup) -> None:
        first = setup.ask(this_thread)
        eventually(lambda: not first.is_alive())
        assert setup.ask(this_thread) is not first
        eventually(lambda: threads() == [])

    @lingers(0.0)
    def test_does_not_end_while_something_waits_to_be_sent_again(self, setup: Setup) -> None:
        tried: list[threading.Thread] = []

        def fail(_cursor: Any) -> None:
            tried.append(threading.current_thread())
            if len(tried) < 4:
                raise TaskLockDatabaseError("not yet")

        until = time.monotonic() + PATIENCE
        setup.database.get(setup.request(fail, tried_until=until))
        assert len(set(tried)) == 1
        assert len(tried) == 4

    def test_nobody_need_wait_in_a_thread(self, setup: Setup) -> None:
        with setup.in_use():
            before = set(threading.enumerate())
            asked = submit(setup, *[Numbers(n) for n in range(50)])
            assert set(threading.enumerate()) <= before  # what has connected may just end
        assert [each.wait(PATIENCE) for each in asked] == list(range(50))
        assert Numbers.sent == [list(range(50))]

    @lingers(0.0)
    def test_does_whatever_it_is_asked_from_many_threads_and_ends_each_time(
        self, setup: Setup
    ) -> None:
        """It ends as the next comes, again and again."""
        answers: list[int] = []

        def ask(first: int) -> None:
            answers.extend(setup.ask(Numbers(n)) for n in range(first, first + 25))

        asking = [threading.Thread(target=ask, args=[n * 100]) for n in range(4)]
        for each in asking:
            each.start()
        for each in asking:
            each.join(PATIENCE)
        assert sorted(answers) == [n * 100 + m for n in range(4) for m in range(25)]
        eventually(lambda: threads() == [])

    @lingers(0.0)
    def test_that_is_just_ending_does_not_miss_what_comes(self, setup: Setup) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for number in range(500):
                [asked] = submit(setup, this_thread)
                assert isinstance(asked.wait(PATIENCE), threading.Thread), number
        finally:
            sys.setswitchinterval(interval)

    def test_that_cannot_be_started_once_is_started_later(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            start = threading.Thread.start

            def interrupted(thread: threading.Thread) -> None:
                if thread.name == module.NAME:
                    raise KeyboardInterrupt
                start(thread)

            patched.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                setup.ask(Numbers(1))
        assert setup.ask(Numbers(2), turn_within=PATIENCE) == 2
        assert Numbers.sent == [[2]]

    def test_works_for_whoever_interrupts_its_start(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a signal handler, or the garbage collector, in the thread that starts it."""
        start, answers = threading.Thread.start, list[Any]()

        def interrupted(thread: threading.Thread) -> None:
            start(thread)
            if thread.name == module.NAME and not answers:
                answers.append(None)
                asked = asked_of(setup, Numbers(1))
                setup.database.submit(asked)
                answers.append(setup.database.result(asked, PATIENCE))

        monkeypatch.setattr(threading.Thread, "start", interrupted)
        assert setup.ask(Numbers(2)) == 2
        assert answers == [None, 1]

    def test_is_the_only_one_although_it_seems_to_have_ended(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As to Python up to 3.12, if a signal handler raises in ``Thread.is_alive``."""
        first = setup.ask(this_thread)
        monkeypatch.setattr(threading.Thread, "is_alive", lambda _thread: False)
        assert setup.ask(this_thread) is first
        assert threads() == [first]


class Driven:
    """What the thread steps, as it steps a queue of runs."""

    wakes_at = inf

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.taken: list[str] = []

    def step(self) -> None:
        messages, self.messages = self.messages, []
        self.taken += messages


class TestWhileItWaits:
    def test_for_an_answer_it_steps_what_it_drives(
        self, proxy: Proxy, gate: Gate, make_setup: Callable[..., Setup]
    ) -> None:
        Numbers.sent = []
        setup, driven = make_setup(proxy.url, 180.0, timings=PATIENT), Driven()
        setup.ask(Numbers(0))
        gate.shut()
        [asked] = submit(setup, Numbers(1))
        assert gate.reached.wait(PATIENCE)
        for number in range(1, 4):
            setup.database.post(driven, "message")
            eventually(lambda number=number: driven.taken == ["message"] * number)
        assert not asked.future.done()
        gate.open()
        assert asked.wait(PATIENCE) == 1

    def test_for_a_connection_it_steps_what_it_drives(
        self, database_url: str, make_setup: Callable[..., Setup]
    ) -> None:
        begun, go_on, driven = threading.Event(), threading.Event(), Driven()

        def connect() -> Connection:
            begun.set()
            assert go_on.wait(PATIENCE)
            return psycopg.connect(database_url)

        engine = create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool)
        setup = make_setup(engine, 180.0, timings=PATIENT)
        [asked] = submit(setup, this_thread)
        assert begun.wait(PATIENCE)
        setup.database.post(driven, "message")
        eventually(lambda: driven.taken == ["message"])
        assert not asked.future.done()
        go_on.set()
        assert [asked.wait(PATIENCE)] == threads()


class TestTogether:
    def test_what_waits_goes_in_one_statement_and_each_gets_its_own_answer(
        self, setup: Setup
    ) -> None:
        asked = setup.ask_all([Numbers(number) for number in range(5)])
        assert Numbers.sent == [[0, 1, 2, 3, 4]]
        assert [each.answer for each in asked] == [0, 1, 2, 3, 4]

    def test_a_renewal_goes_before_all_that_wait(
        self, database_url: str, make_setup: Callable[..., Setup]
    ) -> None:
        Numbers.sent = []
        renewal = Renewal()
        setup = make_setup(database_url, renewing=renewal)
        with setup.in_use():
            asked = submit(setup, *[Numbers(number) for number in range(300)])
            # Only the thread itself changes that time.
            setup.database.call(lambda: setattr(renewal, "due_at", 0.0))
        assert [each.wait(PATIENCE) for each in asked] == list(range(300))
        assert [len(numbers) for numbers in Numbers.sent] == [1, MOST_TOGETHER, 44]
        assert Numbers.sent[0] == [-1]

    def test_what_is_due_to_be_renewed_wakes_it(
        self, database_url: str, make_setup: Callable[..., Setup]
    ) -> None:
        Numbers.sent = []
        renewal = Renewal()
        setup = make_setup(database_url, renewing=renewal)
        renewal.due_at = time.monotonic() + 0.3
        setup.ask(this_thread)
        eventually(lambda: Numbers.sent == [[-1]])


class TestFailures:
    def test_one_tasks_mistake_is_its_own(self, setup: Setup) -> None:
        asked = setup.ask_all([Numbers(1), Numbers(2, query="1 / 0"), Numbers(3)])
        assert [each.answer for each in asked] == [1, None, 3]
        assert str(asked[1].error) == "rejected: 22012"
        assert Numbers.sent == [[1, 2, 3], [1], [2, 3], [2], [3]]

    def test_a_text_that_cannot_be_sent_is_its_own_tasks_mistake(self, setup: Setup) -> None:
        asked = setup.ask_all([Numbers(1), Numbers(2, query="'\ud800'"), Numbers(3)])
        assert [each.answer for each in asked] == [1, None, 3]
        assert "surrogates not allowed" in str(asked[1].error)

    def test_what_is_to_be_asked_again_is_told_so_and_the_others_are_answered(
        self, setup: Setup
    ) -> None:
        asked = setup.ask_all([Numbers(-1), Numbers(2)])
        assert isinstance(asked[0].error, RowLockedError)
        assert asked[1].answer == 2
        assert setup.outage.reason is None

    @pytest.mark.direct("it ends the connection in the server")
    def test_a_lost_connection_is_told_to_all_that_travelled_together_as_in_doubt(
        self, setup: Setup, caplog: pytest.LogCaptureFixture
    ) -> None:
        end = "pg_terminate_backend(pg_backend_pid())"
        asked = setup.ask_all([Numbers(1), Numbers(2, query=f"CASE WHEN {end} THEN 1 END")])
        assert all(isinstance(each.error, TaskLockDatabaseError) for each in asked)
        assert asked[0].error is not asked[1].error  # each thread raises one of its own
        assert all(isinstance(each.request.errors[0], psycopg.Error) for each in asked)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert setup.ask(Numbers(3)) == 3

    def test_a_connection_whose_statement_failed_is_not_used_again(self, setup: Setup) -> None:
        failed: list[int] = []

        def fail(cursor: Any) -> None:
            failed.append(pid(cursor))
            cursor.execute("SELECT 1 / 0")

        with pytest.raises(TaskLockError, match="22012"):
            setup.ask(fail)
        assert setup.ask(pid) not in failed

    def test_where_no_connection_comes_all_that_wait_are_told(
        self, proxy: Proxy, make_setup: Callable[..., Setup]
    ) -> None:
        Numbers.sent = []
        setup = make_setup(proxy.url)
        with setup.in_use():
            asked = submit(setup, Numbers(1), this_thread, Numbers(2))
            proxy.accepting = False
            proxy.cut_all()
        for each in asked:
            with pytest.raises(TaskLockDatabaseError):
                each.wait(PATIENCE)
        assert Numbers.sent == []
        proxy.accepting = True

        def is_answered() -> bool:
            with suppress(TaskLockDatabaseError):  # while the attempts to connect still hang
                return bool(setup.ask(Numbers(3)) == 3)
            return False

        eventually(is_answered)

    def test_a_turn_that_does_not_come_in_time_sends_nothing(self, setup: Setup) -> None:
        held = Held()
        [first] = submit(setup, held.statement)
        assert held.begun.wait(PATIENCE)
        late = InThread(setup, Numbers(1))
        late.setup = setup
        [asked] = submit(setup, Numbers(2), turn_until=0.0)
        eventually(lambda: setup.waiting() == 2)
        held.go_on.set()
        with pytest.raises(NotSentError, match="turn on the connection"):
            asked.wait(PATIENCE)
        assert late.ended().answer == 1
        assert first.wait(PATIENCE) == "answer"
        assert Numbers.sent == [[1]]
        assert setup.outage.reason is None

    def test_who_waits_gives_up_when_claiming_was_stopped(self, setup: Setup) -> None:
        closing, wanted = Closing(), Numbers(1)
        wanted.limit = 0.0
        with setup.in_use():
            asked = InThread(setup, wanted, closing)
            eventually(lambda: setup.waiting() == 1)
            closing.stop()
        assert isinstance(asked.ended().error, NotSentError)
        assert Numbers.sent == []
        assert setup.outage.reason is None

    def test_replicas_that_lost_a_server_come_back_at_different_moments(self) -> None:
        pauses = [jittered(BACKOFF[0]) for _ in range(10)]
        assert len(set(pauses)) > 1
        assert all(0.8 * BACKOFF[0] <= pause <= 1.2 * BACKOFF[0] for pause in pauses)


class TestAMistakeOfItsOwn:
    """Whatever is wrong in the thread's own code, nothing that it knows of is lost by it."""

    def test_is_logged_and_fails_what_was_sent_as_in_doubt(
        self, setup: Setup, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Miscounted(Numbers):
            @classmethod
            def send_together(cls, cursor: Any, requests: Sequence[Numbers]) -> list[Any]:
                return []

        first, second = setup.ask_all([Miscounted(1), Miscounted(2)])
        for each in (first, second):
            assert "the task lock's thread failed" in str(each.error)
            assert len(each.request.errors) == 1
        assert first.error is not second.error
        assert "The task lock's thread failed" in caplog.text
        assert setup.ask(Numbers(3)) == 3
        assert len(threads()) == 1

    @pytest.mark.parametrize("where", ["taken", "finish", "fail"])
    def test_costs_nobody_else_an_answer(
        self, setup: Setup, caplog: pytest.LogCaptureFixture, where: str
    ) -> None:
        class Broken(Numbers):
            pass

        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        setattr(Broken, where, fail)
        number = -1 if where == "fail" else 1
        broken = asked_of(setup, Broken(number), tried_until=time.monotonic() + PATIENCE)
        with setup.in_use():
            setup.database.submit(broken)
            asked = submit(setup, Numbers(2), Numbers(3))
        assert [each.wait(PATIENCE) for each in asked] == [2, 3]
        assert "ZeroDivisionError" in caplog.text
        broken.withdraw()

    def test_that_cannot_even_be_logged_does_not_end_it(self, setup: Setup) -> None:
        def refuse(_record: logging.LogRecord) -> bool:
            raise ZeroDivisionError

        def fail() -> None:
            raise ValueError

        module.logger.addFilter(refuse)
        try:
            setup.database.call(fail)
            assert setup.ask(Numbers(1)) == 1
        finally:
            module.logger.removeFilter(refuse)


class TestIsLive:
    """For a probe that has the process restarted if it is not."""

    @pytest.fixture(autouse=True)
    def no_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "STUCK", 0.0)

    def test_not_when_it_is_stuck_in_a_request(self, setup: Setup) -> None:
        assert setup.database.is_live
        with setup.in_use():
            assert not setup.database.is_live
        eventually(lambda: setup.database.is_live)

    def test_before_that_has_taken_far_longer_than_its_limits(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "STUCK", 10)
        with setup.in_use():
            assert setup.database.is_live

    def test_while_something_waits_to_be_sent_again(self, setup: Setup) -> None:
        """As while the database is unavailable."""

        def fail(_cursor: Any) -> None:
            raise TaskLockDatabaseError("never")

        [asked] = submit(setup, fail, tried_until=time.monotonic() + PATIENCE)
        eventually(lambda: setup.database.is_live and asked.failures > 3)
        asked.withdraw()

    @lingers(0.0)
    def test_when_it_has_ended_for_want_of_work(self, setup: Setup) -> None:
        assert setup.ask(Numbers(1)) == 1
        eventually(lambda: threads() == [])
        assert setup.database.is_live

    def test_not_where_something_is_due_and_it_does_not_run(
        self, setup: Setup, no_threads: None
    ) -> None:
        def fail(_cursor: Any) -> None:
            raise TaskLockDatabaseError("never")

        [asked] = submit(setup, fail, tried_until=time.monotonic() + PATIENCE)
        eventually(lambda: not setup.database.is_live)
        asked.withdraw()

    def test_after_an_interrupt_where_no_thread_can_be_started(
        self, setup: Setup, no_threads: None
    ) -> None:
        def interrupt(_cursor: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            setup.ask(interrupt)
        asked = setup.database
        eventually(lambda: asked.is_live)


class TestWhoIsInterrupted:
    @pytest.mark.usefixtures("ctrl_c")
    def test_in_the_main_thread_gives_back_what_comes(self, setup: Setup) -> None:
        held, discarded = Held(), list[Any]()

        def interrupt() -> None:
            assert held.begun.wait(PATIENCE)
            press_ctrl_c()

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            setup.database.get(asked_of(setup, held.statement, discarded))
        interrupting.join(PATIENCE)
        assert discarded == []
        held.go_on.set()
        eventually(lambda: discarded == ["answer"])

    @pytest.mark.usefixtures("ctrl_c")
    def test_before_it_is_sent_never_is(self, setup: Setup) -> None:
        discarded: list[Any] = []
        with setup.in_use():
            asked = asked_of(setup, Numbers(1), discarded)

            def interrupt() -> None:
                eventually(lambda: setup.waiting() == 1)
                press_ctrl_c()

            interrupting = threading.Thread(target=interrupt)
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                setup.database.get(asked)
            interrupting.join(PATIENCE)
        assert setup.ask(Numbers(2)) == 2
        assert Numbers.sent == [[2]]
        assert discarded == []

    @lingers(0.0)
    def test_at_any_line_leaves_nothing_behind(self, setup: Setup) -> None:
        """As by a signal handler that raises an error, in a process that goes on."""
        number = 0
        while True:
            number += 1
            eventually(lambda: threads() == [])
            Numbers.sent, discarded = [], list[Any]()
            interrupted = Interrupted(setup, asked_of(setup, Numbers(1), discarded), number)
            interrupted.ended()
            if interrupted.error is None:
                assert (interrupted.answer, discarded) == (1, [])
                break
            assert isinstance(interrupted.error, KeyboardInterrupt)
            assert setup.ask(Numbers(2), turn_within=PATIENCE) == 2
            sent = [each for numbers in Numbers.sent for each in numbers]
            assert discarded == [1] * sent.count(1), interrupted.where
        assert number > 15

    def test_at_any_line_where_no_thread_can_be_started_keeps_nobody_waiting(
        self, setup: Setup, no_threads: None
    ) -> None:
        number = 0
        while True:
            number += 1
            interrupted = Interrupted(setup, asked_of(setup, Numbers(1), []), number)
            interrupted.ended()
            if interrupted.error is None:
                break
            assert isinstance(interrupted.error, KeyboardInterrupt)
            assert setup.ask(Numbers(2), turn_within=PATIENCE) == 2, interrupted.where
        assert number > 15

    @pytest.mark.usefixtures("ctrl_c")
    def test_where_no_thread_can_be_started_is_told_and_what_is_sent_is_in_doubt(
        self, setup: Setup, no_threads: None
    ) -> None:
        class Stuck(Numbers):
            def send(self, cursor: Any) -> int:
                press_ctrl_c()
                raise AssertionError(time.sleep(PATIENCE))

        request = Stuck(1)
        with pytest.raises(KeyboardInterrupt):
            setup.ask(request)
        assert setup.ask(Numbers(2)) == 2
        assert [type(error) for error in request.errors] == [KeyboardInterrupt]


class Interrupted(InThread):
    """A request in a thread that is interrupted at a line of the modules, and lives on.

    :param number: of the line, among those that it passes
    """

    def __init__(self, setup: Setup, asked: AwaitedRequest[Any, Any], number: int) -> None:
        self.asked = asked
        self.number = number
        self.passed: set[tuple[str, int]] = set()
        self.where = ""
        super().__init__(setup, asked)

    def run(self) -> None:
        sys.settrace(self.trace)
        try:
            self.answer = self.setup.database.get(self.asked)
        except BaseException as error:  # noqa: BLE001  # for the test to look at
            self.error = error
        finally:
            sys.settrace(None)

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        is_ours = code.co_filename in {module.__file__, awaited_request.__file__}
        if not is_ours or code.co_name == "withdraw":
            return None
        # Python interrupts nobody at the end of a `with`, which is its first line once more, nor
        # where a `try` begins.
        where = (code.co_name, frame.f_lineno)
        is_try = linecache.getline(code.co_filename, frame.f_lineno).strip() == "try:"
        if event == "line" and where not in self.passed and not is_try:
            self.passed.add(where)
            if len(self.passed) == self.number:
                self.where = str(where)
                raise KeyboardInterrupt
        return self.trace


class TestWithoutAThread:
    """Where none can be started, whoever asks sends."""

    def test_a_request_goes_on_in_the_thread_that_asks(
        self, setup: Setup, no_threads: None
    ) -> None:
        assert setup.ask(this_thread) is threading.current_thread()
        assert threads() == []

    def test_it_waits_for_no_renewal_when_it_is_answered(
        self, database_url: str, make_setup: Callable[..., Setup], no_threads: None
    ) -> None:
        """As of a lock without a lease, which is renewed when its maximum lock ends."""

        class Later:
            due_at = urgent_at = time.monotonic() + 10 * PATIENCE

            def request(self, _now: float) -> None:
                return None

        setup = make_setup(database_url, renewing=Later())
        asked = InThread(setup, this_thread)
        assert asked.ended().answer is not None
        Later.due_at = inf

    def test_several_take_turns(self, setup: Setup, no_threads: None) -> None:
        asked = [InThread(setup, Numbers(number)) for number in range(20)]
        assert [each.ended().answer for each in asked] == list(range(20))

    def test_it_is_sent_again(
        self, setup: Setup, no_threads: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And whoever asks sleeps in between."""
        again, waits, wait = Again(setup), list[float](), module.Inbox.wait

        def count(inbox: Any, sockets: Any, seconds: float, **options: Any) -> bool:
            waits.append(seconds)
            return wait(inbox, sockets, seconds, **options)

        monkeypatch.setattr(module.Inbox, "wait", count)
        assert setup.database.get(again) == "sent"
        assert len(waits) < 50

    def test_a_coroutine_gets_its_answer(self, setup: Setup, no_threads: None) -> None:
        async def ask() -> int:
            [asked] = submit(setup, Numbers(1))
            return int(await asyncio.wait_for(asked.result(), PATIENCE))

        assert asyncio.run(ask()) == 1

    def test_what_is_asked_for_by_what_was_answered_goes_too(
        self, setup: Setup, no_threads: None
    ) -> None:
        """As the release of a claim that may have been granted."""
        then = asked_of(setup, Numbers(2))

        class First(Numbers):
            def conclude(self, outcome: Outcome[int]) -> int:
                setup.database.submit(then)
                return outcome.result()

        assert setup.database.get(asked_of(setup, First(1))) == 1
        assert then.wait(PATIENCE) == 2

    def test_the_next_has_a_thread_again(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            assert setup.ask(Numbers(1)) == 1
        assert [setup.ask(this_thread)] == threads()

    def test_closing_sends_what_waits_to_be_sent_again(
        self, setup: Setup, no_threads: None
    ) -> None:
        again = Again(setup)
        setup.database.submit(again)
        setup.database.close(time.monotonic() + PATIENCE)
        assert again.wait(0) == "sent"
        assert not setup.session.is_open

    def test_closing_gives_up_in_time(self, setup: Setup, no_threads: None) -> None:
        def fail(_cursor: Any) -> None:
            raise TaskLockDatabaseError("never")

        [asked] = submit(setup, fail, tried_until=time.monotonic() + PATIENCE)
        setup.database.close(time.monotonic() + 0.1)
        assert not asked.future.done()
        asked.withdraw()


class Again(AwaitedCall[str]):
    """What fails twice, and is sent again after a long pause."""

    backoff = (0.7,)

    def __init__(self, setup: Setup) -> None:
        now = time.monotonic()
        times = {"came": now, "tried_until": now + PATIENCE}
        super().__init__(self._try, setup.closing, **times)
        self._tried = 0

    def _try(self, _cursor: Any) -> str:
        self._tried += 1
        if self._tried < 3:
            raise TaskLockDatabaseError("not yet")
        return "sent"


def no_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


class TestACoroutine:
    def test_gets_its_answer_while_its_loop_goes_on(self, setup: Setup) -> None:
        held = Held()

        async def ask() -> str:
            [asked] = submit(setup, held.statement)
            waiting = asyncio.ensure_future(asked.result())
            while not held.begun.is_set():
                await asyncio.sleep(0.01)
            held.go_on.set()
            return str(await asyncio.wait_for(waiting, PATIENCE))

        assert asyncio.run(ask()) == "answer"

    def test_gets_what_was_answered_before_it_waits(self, setup: Setup) -> None:
        async def ask() -> int:
            [asked] = submit(setup, Numbers(1))
            eventually(asked.future.done)  # blocks the loop
            return int(await asyncio.wait_for(asked.result(), PATIENCE))

        assert asyncio.run(ask()) == 1

    def test_gets_what_was_sent_from_elsewhere(self, setup: Setup) -> None:
        [asked] = submit(setup, Numbers(1))

        async def wait() -> int:
            return int(await asyncio.wait_for(asked.result(), PATIENCE))

        assert asyncio.run(wait()) == 1

    def test_gets_the_error(self, setup: Setup) -> None:
        async def ask() -> None:
            [asked] = submit(setup, Numbers(1, query="1 / 0"))
            await asyncio.wait_for(asked.result(), PATIENCE)

        with pytest.raises(TaskLockError, match="22012"):
            asyncio.run(ask())

    def test_that_is_cancelled_before_it_is_sent_never_is(self, setup: Setup) -> None:
        discarded: list[Any] = []

        async def ask() -> None:
            [asked] = submit(setup, Numbers(1), discarded=discarded)
            await cancelled(asyncio.ensure_future(asked.result()))

        with setup.in_use():
            asyncio.run(ask())
        assert setup.ask(Numbers(2)) == 2
        assert Numbers.sent == [[2]]
        assert discarded == []

    def test_that_is_cancelled_while_it_is_under_way_gives_back_what_comes(
        self, setup: Setup
    ) -> None:
        held, discarded = Held(), list[Any]()

        async def ask() -> None:
            [asked] = submit(setup, held.statement, discarded=discarded)
            waiting = asyncio.ensure_future(asked.result())
            while not held.begun.is_set():
                await asyncio.sleep(0.01)
            await cancelled(waiting)

        asyncio.run(ask())
        assert discarded == []
        held.go_on.set()
        eventually(lambda: discarded == ["answer"])

    def test_that_is_cancelled_as_its_answer_comes_gives_it_back(self, setup: Setup) -> None:
        held, discarded = Held(), list[Any]()

        async def ask() -> None:
            [asked] = submit(setup, held.statement, discarded=discarded)
            waiting = asyncio.ensure_future(asked.result())
            await asyncio.sleep(0)  # it waits from now on
            held.go_on.set()
            eventually(asked.future.done)  # blocks the loop
            assert asked.waiter is not None
            while not asked.waiter.done():
                await asyncio.sleep(0)
            assert not waiting.done()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        asyncio.run(ask())
        assert discarded == ["answer"]

    def test_whose_loop_is_closed_while_it_waits_gives_back_what_comes(self, setup: Setup) -> None:
        held, discarded = Held(), list[Any]()
        loop = abandoned_loop()

        async def ask() -> Any:
            [asked] = submit(setup, held.statement, discarded=discarded)
            return await asked.result()

        coroutine = ask()
        task = loop.create_task(coroutine)
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        held.go_on.set()
        eventually(lambda: discarded == ["answer"])
        coroutine.close()
        del task
        gc.collect()
        assert setup.ask(Numbers(2)) == 2
        assert discarded == ["answer"]

    def test_that_is_thrown_away_while_it_waits_gives_back_what_comes(self, setup: Setup) -> None:
        """As by the garbage collector, while its loop stands still."""
        held, discarded = Held(), list[Any]()
        loop = asyncio.new_event_loop()

        async def ask() -> Any:
            [asked] = submit(setup, held.statement, discarded=discarded)
            return await asked.result()

        coroutine = ask()

        async def begin() -> None:
            coroutine.send(None)

        loop.run_until_complete(begin())
        assert held.begun.wait(PATIENCE)
        coroutine.close()
        held.go_on.set()
        eventually(lambda: discarded == ["answer"])
        loop.close()

    def test_those_of_a_loop_share_a_call(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[Any] = []

        async def ask() -> list[int]:
            loop = asyncio.get_running_loop()
            call_soon = loop.call_soon_threadsafe

            def count(*arguments: Any, **options: Any) -> Any:
                calls.append(arguments)
                return call_soon(*arguments, **options)

            monkeypatch.setattr(loop, "call_soon_threadsafe", count)
            with setup.in_use():
                asked = submit(setup, *[Numbers(n) for n in range(50)])
                answers = asyncio.gather(*[each.result() for each in asked])
                await asyncio.sleep(0)  # all wait from now on
            return list(await answers)

        assert asyncio.run(ask()) == list(range(50))
        assert Numbers.sent == [list(range(50))]
        assert len(calls) == 1


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel it, after it has begun to wait."""
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class TestHangs:
    @pytest.fixture
    def hanging(self, engine: Engine) -> Iterator[HangingEngine]:
        hanging = HangingEngine(engine)
        yield hanging
        hanging.go_on.set()

    @pytest.fixture
    def setup_of_engine(self, engine: Engine, make_setup: Callable[..., Setup]) -> Setup:
        Numbers.sent = []
        return make_setup(engine)

    def test_an_engine_that_hangs_is_given_up_and_others_are_told(
        self, hanging: HangingEngine, setup_of_engine: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        setup = setup_of_engine
        with monkeypatch.context() as patched:
            patched.setattr("apscheduler_tasklock._database.abandoned_call.time", HurryingClock())
            asked = submit(setup, this_thread, this_thread, this_thread)
            for each in asked:
                with pytest.raises(TaskLockDatabaseError, match="no connection came within"):
                    each.wait(PATIENCE)
        assert setup.outage.reason is not None
        hanging.go_on.set()
        eventually(lambda: hanging.opened and all(each.closed for each in hanging.opened))
        assert eventually(lambda: answered(setup, Numbers(1))) == 1
        assert setup.outage.reason is None

    def test_while_two_attempts_hang_no_third_is_begun(
        self, hanging: HangingEngine, setup_of_engine: Setup
    ) -> None:
        setup = setup_of_engine
        setup.session.wait_with(wait_for, lambda: None, lambda: 0.0)
        for _ in range(2):
            with pytest.raises(TaskLockDatabaseError, match="did not answer in time"):
                setup.session.open()
        with pytest.raises(TaskLockDatabaseError, match="2 earlier attempts to connect still hang"):
            setup.ask(Numbers(1))
        hanging.go_on.set()
        eventually(lambda: len([each for each in hanging.opened if each.closed]) == 2)
        assert eventually(lambda: answered(setup, Numbers(1))) == 1

    def test_an_engine_that_hangs_does_not_hold_a_stop_up(
        self, engine: Engine, hanging: HangingEngine, make_setup: Callable[..., Setup]
    ) -> None:
        setup = make_setup(engine)
        setup.closing.stop()
        with pytest.raises(TaskLockDatabaseError, match="did not answer in time"):
            setup.ask(Numbers(1))
        hanging.go_on.set()
        eventually(lambda: hanging.opened and hanging.opened[0].closed)

    @pytest.mark.nightly
    def test_a_name_that_is_looked_up_for_ever_holds_up_neither_a_hold_nor_a_close(
        self, make_task_locks: Callable[..., TaskLocks], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connect, go_on, opened = psycopg.connect, threading.Event(), []

        def look_up(*arguments: Any, **parameters: Any) -> Any:  # no limit of libpq's ends that
            assert go_on.wait(PATIENCE)
            opened.append(connect(*arguments, **parameters))
            return opened[-1]

        monkeypatch.setattr(psycopg, "connect", look_up)
        locks = make_task_locks(claim_timeout=1)
        with (
            pytest.raises(TaskLockDatabaseError, match="no connection came within"),
            locks.hold("task", min_lock=0, max_lock=60),
        ):
            pytest.fail("it is not held")
        locks.close()
        assert not opened  # all of this went on beside the look-up
        go_on.set()
        eventually(lambda: opened and all(each.closed for each in opened))

    @pytest.mark.direct("it looks at the library's statements in the server")
    def test_a_statement_that_hangs_is_given_up_and_cancelled(
        self, setup: Setup, connection: Connection
    ) -> None:
        setup.ask(this_thread)  # the limit is not that of a connect
        usual, setup.session.attempt = setup.session.attempt, 0.2
        with pytest.raises(TaskLockDatabaseError, match="no answer from the server"):
            setup.ask(Numbers(1, query="(pg_sleep(3600) IS NULL)::int + $1"))
        setup.session.attempt = usual
        sleeping = "SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
        eventually(lambda: connection.execute(sleeping).rowcount == 0)
        assert setup.ask(Numbers(2)) == 2

    def test_a_renewal_that_is_urgent_shortens_that_wait(
        self, database_url: str, make_setup: Callable[..., Setup]
    ) -> None:
        Numbers.sent = []
        renewal = Renewal()
        setup = make_setup(database_url, renewing=renewal, timings=PATIENT)
        setup.ask(this_thread)  # the limit is not that of a connect
        setup.session.attempt = 6.0
        renewal.urgent_at = time.monotonic() + 0.5
        with pytest.raises(TaskLockDatabaseError) as failed:
            setup.ask(Numbers(1, query="(pg_sleep(3600) IS NULL)::int + $1"))
        [waited] = re.findall(r"no answer from the server within ([\d.]+) sec", str(failed.value))
        assert 0.3 <= float(waited) < 6.0

    def test_but_an_answer_has_a_shortest_time(
        self, database_url: str, make_setup: Callable[..., Setup]
    ) -> None:
        Numbers.sent = []
        renewal = Renewal()
        # The limit is far longer than a machine stops during the shortest time.
        setup = make_setup(database_url, renewing=renewal, timings=PATIENT)
        setup.ask(this_thread)  # the shortest time is not that of a connect
        renewal.urgent_at = 0.0
        with pytest.raises(TaskLockDatabaseError) as failed:
            setup.ask(Numbers(1, query="(pg_sleep(3600) IS NULL)::int + $1"))
        [waited] = re.findall(r"no answer from the server within ([\d.]+) sec", str(failed.value))
        assert 0.3 <= float(waited) < setup.session.attempt


class HurryingClock:
    """In place of the module ``time``: each reading of the clock is 2 seconds after the last."""

    def __init__(self) -> None:
        self._now = time.monotonic()

    def monotonic(self) -> float:
        self._now += 2.0
        return self._now


class HangingEngine:
    """Lets an engine open no connection until it is let go."""

    def __init__(self, engine: Engine) -> None:
        self.begun = 0
        self.opened: list[Any] = []
        self.go_on = threading.Event()

        @event.listens_for(engine, "do_connect")
        def wait(_dialect: Any, _record: Any, arguments: Any, parameters: Any) -> Any:
            self.begun += 1
            assert self.go_on.wait(PATIENCE)
            self.opened.append(psycopg.connect(*arguments, **parameters))
            return self.opened[-1]


def answered(setup: Setup, wanted: Wanted) -> Any:
    with suppress(TaskLockDatabaseError):
        return setup.ask(wanted)


@pytest.mark.direct("it counts the library's connections in the server")
class TestOneConnection:
    def test_is_kept_while_nothing_is_asked(self, setup: Setup, connection: Connection) -> None:
        assert pids(connection) == set()
        first = setup.ask(pid)
        assert setup.ask(pid) == first
        assert pids(connection) == {first}

    @lingers(0.0)
    def test_is_kept_when_the_thread_ends(self, setup: Setup, connection: Connection) -> None:
        first = setup.ask(pid)
        eventually(lambda: threads() == [])
        assert setup.ask(pid) == first

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
        setup = make_setup(database_url if given == "a URL" else engine)
        setup.outage.believe()
        setup.ask(Numbers(1))
        assert setup.outage.stable
        others = (
            "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        connection.execute(f"SELECT pg_terminate_backend(pid) {others}")
        eventually(lambda: connection.execute(f"SELECT {others}").rowcount == 0)
        assert setup.ask(Numbers(2)) == 2
        assert not setup.outage.stable
        assert [record for record in caplog.records if record.levelno >= logging.INFO] == []

    def test_none_is_left_after_closing(self, setup: Setup, connection: Connection) -> None:
        thread = setup.ask(this_thread)
        setup.database.close(time.monotonic() + PATIENCE)
        eventually(lambda: not thread.is_alive())
        eventually(lambda: not pids(connection))

    @lingers(0.0)
    def test_of_an_ended_thread_is_closed_too(self, setup: Setup, connection: Connection) -> None:
        setup.ask(Numbers(1))
        eventually(lambda: threads() == [])
        setup.database.close(time.monotonic() + PATIENCE)
        eventually(lambda: not pids(connection))
        eventually(lambda: threads() == [])

    def test_what_comes_after_closing_is_sent_and_none_is_left(
        self, setup: Setup, connection: Connection
    ) -> None:
        setup.database.close(time.monotonic() + PATIENCE)
        assert setup.ask(Numbers(1)) == 1
        eventually(lambda: not pids(connection))
        eventually(lambda: threads() == [])


class TestClosing:
    def test_waits_for_what_is_pending(self, setup: Setup) -> None:
        held = Held()
        first, second = submit(setup, held.statement, Numbers(1))
        assert held.begun.wait(PATIENCE)
        closing = threading.Thread(target=setup.database.close, args=[time.monotonic() + PATIENCE])
        closing.start()
        eventually(lambda: setup.waiting() == 2)  # it and what it waits for
        assert closing.is_alive()
        held.go_on.set()
        closing.join(PATIENCE)
        assert first.future.done()
        assert second.wait(0) == 1

    def test_waits_for_what_is_sent_again(self, setup: Setup) -> None:
        tried: list[int] = []

        def fail(_cursor: Any) -> str:
            tried.append(1)
            if len(tried) < 4:
                raise TaskLockDatabaseError("not yet")
            return "sent"

        [asked] = submit(setup, fail, tried_until=time.monotonic() + PATIENCE)
        setup.database.close(time.monotonic() + PATIENCE)
        assert asked.wait(0) == "sent"

    def test_gives_up_in_time(self, setup: Setup) -> None:
        held = Held()
        [asked] = submit(setup, held.statement)
        assert held.begun.wait(PATIENCE)
        setup.database.close(time.monotonic() + 0.1)
        assert not asked.future.done()
        held.go_on.set()
        assert asked.wait(PATIENCE) == "answer"

    def test_at_the_interpreters_end_waits_for_what_the_thread_is_just_taking_in(
        self, setup: Setup
    ) -> None:
        """At no moment does it seem to be idle that it is not."""
        looked, go_on = threading.Event(), threading.Event()

        class Slow(Again):
            @property
            def backoff(self) -> Sequence[float]:  # type: ignore[override]  # a class's is fixed
                looked.set()
                assert go_on.wait(PATIENCE)
                return BACKOFF

        asked = Slow(setup)
        setup.database.submit(asked)
        assert looked.wait(PATIENCE)
        ending = threading.Thread(target=setup.database.end, args=[time.monotonic() + PATIENCE])
        ending.start()
        eventually(lambda: setup.waiting() or not ending.is_alive())
        go_on.set()
        ending.join(PATIENCE)
        assert asked.future.done()

    def test_an_engine_may_be_disposed_of_by_what_is_under_way(
        self, engine: Engine, make_setup: Callable[..., Setup]
    ) -> None:
        setup = make_setup(engine)

        def dispose(cursor: Any) -> Any:
            engine.dispose()
            return cursor.connection

        used = setup.ask(dispose)
        setup.database.close(time.monotonic() + PATIENCE)
        eventually(lambda: used.closed)
