"""The thread of the jobs' side carries out what the queue decides, and survives what fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

import pytest

from apscheduler_tasklock._runs.jobs_thread import NAME, DrivenQueue, JobsThread
from apscheduler_tasklock._runs.queue import AllBusy, Ask, QueueInputs, RunQueue
from apscheduler_tasklock._runs.run import ClaimOutcome, QueuedRun, RunKind, State
from tests.support.inboxes import noting_reads
from tests.support.polling import eventually


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
        self.fails: BaseException | None = None

    def ask(self, ask: Ask) -> None:
        self.threads.add(threading.current_thread().name)
        self.runs += ask.runs
        failure, self.fails = self.fails, None
        if failure is not None:
            raise failure
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

    def look(self) -> float:
        return inf


def run_of(name: str) -> QueuedRun:
    return QueuedRun(RunKind.SCHEDULE, name, (name, "default"), due_at=0.0, came=0.0)


@pytest.fixture
def carrier() -> Carrier:
    return Carrier()


@pytest.fixture
def queue(carrier: Carrier) -> Iterator[DrivenQueue]:
    queue = JobsThread().add(RunQueue(lambda pause: pause), lambda: 10, carrier)
    yield queue
    queue.thread.stop(60)
    for run in carrier.runs:
        if run.state is State.ASKED:
            queue.answered(run, ClaimOutcome.REFUSED)
        elif run.state is State.GIVEN:
            queue.freed(run, 0.0)
    eventually(lambda: not is_there())


def is_there() -> bool:
    return any(thread.name == NAME for thread in threading.enumerate())


def test_what_comes_is_asked_for_and_given_in_its_thread(
    queue: DrivenQueue, carrier: Carrier
) -> None:
    run, other = run_of("a"), run_of("b")
    queue.came(run)
    eventually(lambda: carrier.asked == ["a"])
    queue.came(other)
    queue.answered(run, ClaimOutcome.GRANTED)
    eventually(lambda: carrier.given == ["a"])
    assert carrier.threads == {NAME}


def test_its_inbox_is_found_empty_before_it_waits(queue: DrivenQueue) -> None:
    inbox = noting_reads(queue.thread)
    for number, name in enumerate("abc", 1):
        queue.came(run_of(name))
        eventually(lambda number=number: inbox.waits > number)
    assert inbox.early == 0


def test_a_pool_that_has_got_workers_is_seen_beside_a_busy_line(
    queue: DrivenQueue, carrier: Carrier
) -> None:
    workers = 0
    full = queue.thread.add(RunQueue(lambda pause: pause), lambda: workers, carrier)
    full.came(replace(run_of("waits"), came=time.monotonic()))
    eventually(lambda: not full.runs.is_idle)
    workers = 1

    def is_asked_for() -> bool:
        queue.call(lambda _inputs: None)  # so that the thread never waits for long
        return carrier.asked == ["waits"]

    eventually(is_asked_for)
    full.answered(carrier.runs[0], ClaimOutcome.REFUSED)


def test_a_stop_returns_when_what_waited_is_withdrawn(queue: DrivenQueue, carrier: Carrier) -> None:
    run, other = run_of("a"), run_of("b")
    queue.came(run)
    eventually(lambda: carrier.asked == ["a"])
    queue.came(other)  # which waits for the answer
    queue.thread.stop(60)
    assert carrier.withdrawn == ["b"]
    queue.answered(run, ClaimOutcome.REFUSED)
    eventually(lambda: carrier.refused == ["a"])
    eventually(lambda: not is_there())


def test_nothing_is_begun_when_the_interpreter_ends(queue: DrivenQueue, carrier: Carrier) -> None:
    carrier.is_ending = True
    queue.came(run_of("a"))
    eventually(lambda: carrier.withdrawn == ["a"])
    assert carrier.asked == []


def fail(_inputs: QueueInputs) -> None:
    raise ValueError("of a message")


def test_what_fails_in_it_ends_neither_it_nor_what_came_with_it(
    queue: DrivenQueue, carrier: Carrier, caplog: pytest.LogCaptureFixture
) -> None:
    queue.call(fail)
    queue.came(run_of("a"))
    eventually(lambda: carrier.asked == ["a"])
    assert "The task lock's jobs thread failed, and goes on" in caplog.text


# That the thread dies is what is tried here.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_has_died_is_started_again_by_the_next_message(
    queue: DrivenQueue, carrier: Carrier
) -> None:
    carrier.fails = SystemExit()
    queue.came(run_of("a"))
    eventually(lambda: carrier.fails is None and not is_there())
    assert queue.thread.is_live
    queue.thread.stop(60)
    assert carrier.withdrawn == []
    queue.came(run_of("b"))
    eventually(lambda: carrier.withdrawn == ["b"])


def test_it_is_not_live_while_a_step_is_stuck(
    queue: DrivenQueue, carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("apscheduler_tasklock._runs.jobs_thread.STUCK", 0.05)
    queue.call(lambda _inputs: go_on.wait(60))
    eventually(lambda: not queue.thread.is_live)
    go_on.set()
    eventually(lambda: queue.thread.is_live)


def where_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    return monkeypatch.undo


def test_where_none_can_be_started_a_stop_is_carried_out_by_whoever_stops(
    queue: DrivenQueue, carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    undo = where_no_thread_starts(monkeypatch)
    queue.came(run_of("a"))
    assert not queue.thread.is_live
    queue.thread.stop(60)
    undo()
    assert (carrier.asked, carrier.withdrawn) == ([], ["a"])


def test_one_thread_drives_several_queues_and_stops_them_all(
    queue: DrivenQueue, carrier: Carrier
) -> None:
    """Such as the coroutines of an event loop, and the functions of its threads."""
    other = Carrier()
    second = queue.thread.add(RunQueue(lambda pause: pause), lambda: 10, other)
    ours, theirs = run_of("a"), run_of("b")
    queue.came(ours)
    second.came(theirs)
    eventually(lambda: carrier.asked == ["a"] and other.asked == ["b"])
    assert carrier.threads == other.threads == {NAME}
    queue.came(run_of("c"))
    second.came(run_of("d"))
    queue.thread.stop(60)
    assert (carrier.withdrawn, other.withdrawn) == (["c"], ["d"])
    second.answered(theirs, ClaimOutcome.REFUSED)
    queue.answered(ours, ClaimOutcome.REFUSED)
    eventually(lambda: (carrier.refused, other.refused) == (["a"], ["b"]))
