"""A queue of runs in the replica's thread: it is stepped whatever that waits for, or fails in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import pytest

from apscheduler_tasklock._database import thread as module
from apscheduler_tasklock._database.requests import Call
from apscheduler_tasklock._database.session import NoSession, Session
from apscheduler_tasklock._database.thread import NAME, ReplicaThread
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._runs.driven_queue import DrivenQueue
from apscheduler_tasklock._runs.queue import AllBusy, Ask, RunQueue
from apscheduler_tasklock._runs.run import QueuedRun, RunKind, State
from tests.support.exchanges import InThread, Setup
from tests.support.held_wire import PATIENCE, HeldWire
from tests.support.internals import is_asleep, waiting_in
from tests.support.polling import eventually
from tests.support.socket_pairs import noting_pairs
from tests.support.waist import ClaimOutcome, Closing


class Carrier:
    """Notes what is to be done, and in which thread."""

    is_ending = False

    def __init__(self) -> None:
        self.runs: list[QueuedRun] = []  # that were asked for
        self.asked: list[str] = []
        self.given: list[str] = []
        self.refused: list[str] = []
        self.withdrawn: list[str] = []
        self.threads: set[str] = set()
        self.fails: BaseException | None = None  # the next step
        self.sends: Callable[[], object] = lambda: None  # called when a run is asked for

    def ask(self, ask: Ask) -> None:
        self.threads.add(threading.current_thread().name)
        self.runs += ask.runs
        self.sends()
        self.asked += [run.task_name for run in ask.runs]

    def give(self, run: QueuedRun) -> None:
        self.given.append(run.task_name)

    def end_refused(self, run: QueuedRun, _outcome: ClaimOutcome) -> None:
        self.refused.append(run.task_name)

    def wake_look(self) -> None: ...

    def report_all_busy(self, all_busy: AllBusy) -> None:
        raise AssertionError(all_busy)

    def withdraw(self, run: QueuedRun) -> None:
        self.withdrawn.append(run.task_name)

    def check_given(self) -> float:
        failure, self.fails = self.fails, None
        if failure is not None:
            raise failure
        return inf


def run_of(name: str) -> QueuedRun:
    return QueuedRun(RunKind.SCHEDULE, name, (name, "default"), due_at=0.0, came=0.0)


def thread_of(session: Session, linger: float = 600.0) -> ReplicaThread:
    return Setup(session, timings=Timings(linger=linger)).database


def queue_of(thread: ReplicaThread, carrier: Carrier) -> DrivenQueue:
    return DrivenQueue(thread, RunQueue(lambda pause: pause), lambda: 10, carrier)


def stop(*queues: DrivenQueue) -> None:
    """Stop queues, and wait until what waited in them is withdrawn."""
    for queue, is_done in [(queue, queue.stop()) for queue in queues]:
        queue.thread.wait_for(is_done, time.monotonic() + PATIENCE)


def end(queue: DrivenQueue, carrier: Carrier) -> None:
    """Stop a queue, end its runs, and wait for the end of its thread."""
    stop(queue)
    for run in carrier.runs:
        if run.state is State.ASKED:
            queue.call(queue.answered, run, ClaimOutcome.REFUSED)
        elif run.state is State.GIVEN:
            queue.freed(run, 0.0)
    queue.thread.close(time.monotonic() + PATIENCE)
    eventually(lambda: not is_there())


def is_there() -> bool:
    return any(thread.name == NAME for thread in threading.enumerate())


@pytest.fixture
def carrier() -> Carrier:
    return Carrier()


@pytest.fixture
def queue(carrier: Carrier) -> Iterator[DrivenQueue]:
    """A queue in the thread of a replica that sends nothing."""
    queue = queue_of(thread_of(NoSession(PATIENCE)), carrier)
    yield queue
    end(queue, carrier)


def test_what_comes_is_asked_for_and_given_in_its_thread(
    queue: DrivenQueue, carrier: Carrier
) -> None:
    run, other = run_of("a"), run_of("b")
    queue.came(run)
    eventually(lambda: carrier.asked == ["a"])
    queue.came(other)
    queue.call(queue.answered, run, ClaimOutcome.GRANTED)
    eventually(lambda: carrier.given == ["a"])
    assert carrier.threads == {"tasklock"}


def test_a_message_ends_the_wait_of_a_thread_that_has_no_work(
    queue: DrivenQueue, carrier: Carrier
) -> None:
    """Else it would wait for as long as it lingers, which is ten minutes here."""
    for number in range(50):
        stepped = threading.Event()
        queue.call(stepped.set)
        assert stepped.wait(PATIENCE), number


def test_a_pool_that_has_got_workers_is_seen_beside_a_busy_line(
    queue: DrivenQueue, carrier: Carrier
) -> None:
    workers = 0
    full = DrivenQueue(queue.thread, RunQueue(lambda pause: pause), lambda: workers, carrier)
    full.came(replace(run_of("waits"), came=time.monotonic()))
    eventually(lambda: not full.runs.is_idle)
    workers = 1

    def is_asked_for() -> bool:
        queue.call(lambda: None)  # so that the thread never waits for long
        return carrier.asked == ["waits"]

    eventually(is_asked_for)
    full.call(full.answered, carrier.runs[0], ClaimOutcome.REFUSED)
    eventually(lambda: carrier.refused == ["waits"])


def test_a_run_that_begins_lets_those_that_wait_be_asked_for(
    queue: DrivenQueue, carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apscheduler_tasklock._runs.driven_queue.LONGEST_WAIT", 3600.0)
    run = run_of("a")
    queue.came(run)
    eventually(lambda: carrier.asked == ["a"])
    queue.call(queue.answered, run, ClaimOutcome.GRANTED)
    eventually(lambda: carrier.given == ["a"])
    queue.came(run_of("b"))  # nothing is asked for while a run that was given has not begun
    stop_is_due = threading.Event()
    queue.call(stop_is_due.set)
    assert stop_is_due.wait(PATIENCE)
    assert carrier.asked == ["a"]
    eventually(lambda: is_asleep(queue.thread))  # so that it does not take the message anyway
    queue.begun(run)
    eventually(lambda: carrier.asked == ["a", "b"])


def without_due_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a queue that waits for an answer be stepped by nothing else."""
    monkeypatch.setattr("apscheduler_tasklock._runs.driven_queue.LONGEST_WAIT", 3600.0)
    monkeypatch.setattr("apscheduler_tasklock._runs.queue.PATIENCE", 3600.0)


def test_an_answer_is_acted_on_without_a_message(
    queue: DrivenQueue, carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_due_times(monkeypatch)
    run = run_of("a")
    queue.came(run)
    eventually(lambda: carrier.asked == ["a"])
    queue.thread.call(partial(queue.answered, run, ClaimOutcome.GRANTED))
    eventually(lambda: carrier.given == ["a"])


def test_an_answer_in_the_middle_of_a_step_is_acted_on(
    queue: DrivenQueue, carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of a claim that cannot be made, because the job's trigger fails."""
    without_due_times(monkeypatch)
    carrier.sends = lambda: queue.answered(carrier.runs[-1], ClaimOutcome.REFUSED)
    queue.came(run_of("a"))
    eventually(lambda: carrier.refused == ["a"])


def test_a_stop_returns_when_what_waited_is_withdrawn(queue: DrivenQueue, carrier: Carrier) -> None:
    run, other = run_of("a"), run_of("b")
    queue.came(run)
    eventually(lambda: carrier.asked == ["a"])
    queue.came(other)  # which waits for the answer
    stop(queue)
    assert carrier.withdrawn == ["b"]
    queue.call(queue.answered, run, ClaimOutcome.REFUSED)
    eventually(lambda: carrier.refused == ["a"])


def test_nothing_is_begun_when_the_interpreter_ends(queue: DrivenQueue, carrier: Carrier) -> None:
    carrier.is_ending = True
    queue.came(run_of("a"))
    eventually(lambda: carrier.withdrawn == ["a"])
    assert carrier.asked == []


def fail() -> None:
    raise ValueError("of a message")


def test_a_message_that_fails_ends_neither_the_thread_nor_what_came_with_it(
    queue: DrivenQueue, carrier: Carrier, caplog: pytest.LogCaptureFixture
) -> None:
    queue.call(fail)
    queue.came(run_of("a"))
    eventually(lambda: carrier.asked == ["a"])
    assert "The task lock's thread failed, and goes on" in caplog.text


@pytest.mark.parametrize("error", [ValueError("of a step"), SystemExit(), KeyboardInterrupt()])
def test_a_step_that_fails_ends_neither_the_thread_nor_what_came_with_it(
    queue: DrivenQueue,
    carrier: Carrier,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    beside = Carrier()
    second = queue_of(queue.thread, beside)
    went_on, done = threading.Event(), threading.Event()
    carrier.fails = error

    def hold_up() -> None:
        assert went_on.wait(PATIENCE)

    queue.call(hold_up)  # so that both runs are there when the step fails
    queue.came(run_of("a"))
    second.came(run_of("b"))
    queue.thread.call(done.set)
    went_on.set()
    eventually(lambda: beside.asked == ["b"])
    assert done.wait(PATIENCE)
    assert carrier.fails is None
    assert "The task lock's thread failed, and goes on" in caplog.text
    stop(queue)
    queue.came(run_of("c"))
    eventually(lambda: carrier.withdrawn == ["c"])
    assert queue.thread.is_live
    second.call(second.answered, beside.runs[0], ClaimOutcome.REFUSED)
    eventually(lambda: beside.refused == ["b"])


def test_an_error_while_a_run_is_given_costs_no_other_run(
    queue: DrivenQueue, carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run_of(name) for name in "abc"]
    asked, refused = run_of("asked"), run_of("refused")
    went_on = threading.Event()
    queue.call(went_on.wait, PATIENCE)  # so that all runs are in one ask
    for run in [*runs, refused]:
        queue.came(run)
    went_on.set()
    eventually(lambda: carrier.asked == ["a", "b", "c", "refused"])
    give = carrier.give

    def fail_once(run: QueuedRun) -> None:
        if run is runs[0]:
            raise LookupError("of a give")
        give(run)

    monkeypatch.setattr(carrier, "give", fail_once)
    queue.call(lambda: [queue.answered(run, ClaimOutcome.GRANTED) for run in runs])
    queue.call(queue.answered, refused, ClaimOutcome.REFUSED)
    eventually(lambda: (carrier.given, carrier.refused) == (["b", "c"], ["refused"]))
    for run in runs:
        queue.freed(run, 0.0)
    queue.came(asked)
    eventually(lambda: carrier.asked[-1] == "asked")


def test_it_is_not_live_while_a_step_is_stuck(
    queue: DrivenQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(module, "STUCK", 0.0)
    queue.call(go_on.wait, PATIENCE)
    eventually(lambda: not queue.thread.is_live)
    go_on.set()
    eventually(lambda: queue.thread.is_live)


def where_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    return monkeypatch.undo


def test_where_none_can_be_started_a_message_is_carried_out_by_whoever_sends_it(
    queue: DrivenQueue, carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    undo = where_no_thread_starts(monkeypatch)
    queue.came(run_of("a"))
    assert carrier.threads == {threading.current_thread().name}
    with pytest.raises(RuntimeError, match="no thread can be started"):
        queue.thread.start()
    undo()
    assert carrier.asked == ["a"]


def test_where_none_can_be_started_a_stop_is_carried_out_by_whoever_stops(
    queue: DrivenQueue, carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = run_of("a"), run_of("b")
    undo = where_no_thread_starts(monkeypatch)
    queue.came(run)
    queue.came(other)  # which waits for the answer
    stop(queue)
    undo()
    assert (carrier.asked, carrier.withdrawn) == (["a"], ["b"])


def test_one_thread_drives_several_queues_and_stops_them_all(
    queue: DrivenQueue, carrier: Carrier
) -> None:
    """Such as the coroutines of an event loop, and the functions of its threads."""
    other = Carrier()
    second = queue_of(queue.thread, other)
    ours, theirs = run_of("a"), run_of("b")
    queue.came(ours)
    second.came(theirs)
    eventually(lambda: carrier.asked == ["a"] and other.asked == ["b"])
    assert carrier.threads == other.threads == {NAME}
    queue.came(run_of("c"))
    second.came(run_of("d"))
    stop(queue, second)
    assert (carrier.withdrawn, other.withdrawn) == (["c"], ["d"])
    second.call(second.answered, theirs, ClaimOutcome.REFUSED)
    queue.call(queue.answered, ours, ClaimOutcome.REFUSED)
    eventually(lambda: (carrier.refused, other.refused) == (["a"], ["b"]))


def test_a_thread_that_has_ended_has_no_socket_open_and_the_next_message_starts_another(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = noting_pairs(monkeypatch)
    queue = queue_of(thread_of(NoSession(PATIENCE), linger=0.0), carrier)
    for count, name in enumerate("ab", 1):
        queue.came(run_of(name))
        eventually(lambda name=name: carrier.asked[-1:] == [name])
        queue.call(queue.answered, carrier.runs[-1], ClaimOutcome.REFUSED)
        eventually(lambda count=count: len(carrier.refused) == count)
        eventually(lambda: not is_there())
        assert len(opened) >= 2 * count
        assert {each.fileno() for each in opened} == {-1}
    end(queue, carrier)


class TestInAWait:
    """While its thread waits for the server, a queue is stepped, and nothing else is done."""

    @pytest.fixture
    def wire(self) -> Iterator[HeldWire]:
        wire = HeldWire()
        yield wire
        wire.close_sockets()

    @pytest.fixture
    def setup(self, wire: HeldWire) -> Setup:
        return Setup(Session(wire.connect, PATIENCE), timings=Timings(linger=600.0))

    @pytest.fixture
    def queue(self, setup: Setup, carrier: Carrier, wire: HeldWire) -> Iterator[DrivenQueue]:
        """A queue in the thread of a replica whose server answers when the test says so."""
        queue = queue_of(setup.database, carrier)
        yield queue
        wire.opened.set()
        wire.answer()
        end(queue, carrier)

    def request(self, name: str, done: list[str]) -> Call[Any]:
        """Return a request of a statement that is noted when it is answered."""

        def send(cursor: Any) -> None:
            cursor.execute()
            done.append(name)

        return Call(send, Closing(), came=time.monotonic())

    def test_a_queue_is_stepped_while_a_statement_waits_for_its_answer(
        self, queue: DrivenQueue, carrier: Carrier, wire: HeldWire
    ) -> None:
        done: list[str] = []
        queue.thread.submit(self.request("statement", done))
        assert wire.begun.wait(PATIENCE)
        queue.came(run_of("a"))
        eventually(lambda: carrier.asked == ["a"])
        queue.call(queue.answered, carrier.runs[0], ClaimOutcome.GRANTED)
        eventually(lambda: carrier.given == ["a"])
        stop(queue)
        assert done == []
        wire.answer()
        eventually(lambda: done == ["statement"])

    def test_a_queue_that_is_due_is_stepped_in_a_wait_without_a_message(
        self, queue: DrivenQueue, carrier: Carrier, wire: HeldWire
    ) -> None:
        """As for a pool that has got workers."""
        workers = 0
        full = DrivenQueue(queue.thread, RunQueue(lambda pause: pause), lambda: workers, carrier)
        queue.thread.submit(self.request("statement", []))
        assert wire.begun.wait(PATIENCE)
        full.came(replace(run_of("waits"), came=time.monotonic()))
        eventually(lambda: not full.runs.is_idle)
        workers = 1
        eventually(lambda: carrier.asked == ["waits"])
        full.call(full.answered, carrier.runs[0], ClaimOutcome.REFUSED)
        eventually(lambda: carrier.refused == ["waits"])

    def test_a_queue_is_stepped_while_a_connection_is_opened(
        self, queue: DrivenQueue, carrier: Carrier, wire: HeldWire
    ) -> None:
        wire.opened.clear()
        done: list[str] = []
        queue.thread.submit(self.request("statement", done))
        assert wire.opening.wait(PATIENCE)
        queue.came(run_of("a"))
        eventually(lambda: carrier.asked == ["a"])
        stop(queue)
        assert not wire.begun.is_set()
        wire.opened.set()
        assert wire.begun.wait(PATIENCE)
        wire.answer()
        eventually(lambda: done == ["statement"])

    def test_what_a_queue_asks_for_in_a_wait_goes_after_that_statement(
        self, queue: DrivenQueue, carrier: Carrier, wire: HeldWire
    ) -> None:
        done: list[str] = []
        carrier.sends = lambda: queue.thread.submit(self.request("claim", done))
        queue.thread.submit(self.request("statement", done))
        assert wire.begun.wait(PATIENCE)
        wire.begun.clear()
        queue.came(run_of("a"))
        eventually(lambda: carrier.asked == ["a"])
        stop(queue)  # so that the request was taken
        assert not wire.begun.is_set()
        wire.answer()
        assert wire.begun.wait(PATIENCE)
        assert done == ["statement"]
        wire.answer()
        eventually(lambda: done == ["statement", "claim"])

    def test_a_function_is_called_after_the_statement_that_is_under_way(
        self, queue: DrivenQueue, carrier: Carrier, wire: HeldWire
    ) -> None:
        """Because it may close the connection."""
        done: list[str] = []
        queue.thread.submit(self.request("statement", done))
        assert wire.begun.wait(PATIENCE)
        queue.thread.call(lambda: done.append("function"))
        queue.came(run_of("a"))
        eventually(lambda: carrier.asked == ["a"])
        stop(queue)
        assert done == []
        wire.answer()
        eventually(lambda: done == ["statement", "function"])

    @pytest.mark.parametrize("error", [ValueError("of a step"), KeyboardInterrupt()])
    def test_a_step_that_fails_in_a_wait_costs_no_other_run(
        self,
        setup: Setup,
        queue: DrivenQueue,
        carrier: Carrier,
        wire: HeldWire,
        error: BaseException,
    ) -> None:
        """What ends a thread as a rule costs the statement its answer, and nothing else does."""
        asked = InThread(setup, lambda cursor: cursor.execute())
        assert wire.begun.wait(PATIENCE)
        beside = Carrier()
        second = queue_of(queue.thread, beside)
        carrier.fails = error
        queue.came(run_of("a"))
        second.came(run_of("b"))
        eventually(lambda: beside.asked == ["b"] and carrier.fails is None)
        second.call(second.answered, beside.runs[0], ClaimOutcome.REFUSED)
        eventually(lambda: beside.refused == ["b"])
        wire.answer()
        if isinstance(error, ValueError):
            assert asked.ended().answer == b"\0"
        else:
            assert str(asked.ended().error) == f"the task lock's thread failed: {error!r}"

    def test_a_request_that_fails_as_it_is_taken_costs_the_statement_nothing(
        self,
        setup: Setup,
        queue: DrivenQueue,
        wire: HeldWire,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        class Broken(Call[Any]):
            def taken(self) -> None:
                raise ValueError("of a request")

        done: list[str] = []
        asked = InThread(setup, lambda cursor: cursor.execute())
        assert wire.begun.wait(PATIENCE)
        queue.thread.submit(Broken(lambda _: done.append("it"), Closing(), came=time.monotonic()))
        stop(queue)  # so that it was taken
        wire.answer()
        assert asked.ended().answer == b"\0"
        eventually(lambda: done == ["it"])
        assert "of a request" in caplog.text

    def test_what_came_while_a_connection_was_opened_waits_and_nothing_else(
        self, queue: DrivenQueue, wire: HeldWire
    ) -> None:
        wire.opened.clear()
        waiting: list[int] = []

        def count(_cursor: Any) -> None:
            waiting.append(waiting_in(queue.thread))

        queue.thread.submit(Call(count, Closing(), came=time.monotonic()))
        assert wire.opening.wait(PATIENCE)
        queue.thread.submit(self.request("next", []))
        stop(queue)  # so that the next one was taken
        assert waiting_in(queue.thread) == 1
        wire.opened.set()
        assert wire.begun.wait(PATIENCE)
        assert waiting == [1]
