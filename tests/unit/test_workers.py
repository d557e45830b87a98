"""Worker processes and their signals, in real processes; pools while the interpreter ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.executors.pool import ProcessPoolExecutor, ThreadPoolExecutor

from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock._scheduler import workers
from apscheduler_tasklock._scheduler.adapter import accepts_nothing_more
from apscheduler_tasklock._scheduler.workers import LostWorkers, deferred_signals
from tests.support.polling import eventually

WORKER = """
import os, signal, sys, threading, time
from apscheduler_tasklock._scheduler import workers

def say(word):
    print(word, flush=True)

workers.DELAY = 0.0
setup, body = sys.argv[1:]
exec(setup)
with workers.deferred_signals():
    say("begun")
    sys.stdin.readline()
    exec(body)
    say("ended")
say("free")
sys.stdin.readline()
say("over")
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(checkout: Path) -> Iterator[Start]:
    """Start a worker, and wait until its job has begun."""
    with ExitStack() as ending:

        def begin(setup: str = "", body: str = "") -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", WORKER, setup, body],
                cwd=checkout,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ending.enter_context(process)
            ending.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            return process

        yield begin


def ended(worker: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Let the job end, and wait for the process's end."""
    output, _ = worker.communicate("\n", timeout=60)
    return worker.returncode, output.split()


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_does_not_end_the_job_that_runs(start: Start, which: signal.Signals) -> None:
    worker = start()
    worker.send_signal(which)
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ended\n"


def test_sigterm_ends_the_worker_after_its_job(start: Start) -> None:
    worker = start()
    worker.send_signal(signal.SIGTERM)
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    assert worker.wait(60) == -signal.SIGTERM


def test_sigint_which_a_terminal_sends_to_all_does_not_end_it(start: Start) -> None:
    worker = start()
    worker.send_signal(signal.SIGINT)
    assert ended(worker) == (0, ["ended", "free", "over"])


def test_without_a_signal_nothing_follows(start: Start) -> None:
    assert ended(start()) == (0, ["ended", "free", "over"])


def test_handlers_are_the_processs_own_again_after_the_job() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with deferred_signals():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_handler_that_somebody_has_set_is_left_alone(start: Start) -> None:
    # Not by print(), in which the signal may find the process still.
    handler = "lambda *_: os.write(1, b'handled\\n')"
    worker = start(f"signal.signal(signal.SIGTERM, {handler})")
    worker.send_signal(signal.SIGTERM)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "handled\n"
    assert ended(worker) == (0, ["ended", "free", "over"])


def test_a_job_in_another_thread_leaves_the_signals_alone() -> None:
    from threading import Thread

    seen: list[object] = []

    def job() -> None:
        with deferred_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = Thread(target=job)
    thread.start()
    thread.join()
    assert seen == [before]


def test_the_delay_leaves_the_pool_time_to_end_its_workers() -> None:
    assert workers.DELAY > 0


class Process:
    """A worker process, alive or dead."""

    def __init__(self, sentinel: int, *, alive: bool) -> None:
        self.sentinel = sentinel
        self.alive = alive

    def is_alive(self) -> bool:
        return self.alive


class Locks:
    """Task locks that note whose leases were ended. No database: what counts is how often."""

    def __init__(self) -> None:
        self.settings = LockSettings("postgresql://", "replica")
        self.ended: list[list[str]] = []
        self.over = threading.Event()

    @property
    def closed(self) -> bool:
        return self.over.is_set()

    def wait(self, seconds: float) -> bool:
        return self.over.wait(seconds)

    def end_lease(self, _task_name: str, _claim_id: UUID, holders: list[str]) -> bool:
        self.ended.append(holders)
        return True


def nobody_looks() -> bool:
    return "tasklock-workers" not in [thread.name for thread in threading.enumerate()]


def test_a_dead_workers_task_is_freed_once_while_the_others_live_on() -> None:
    locks: Any = Locks()
    lost = LostWorkers(locks)
    submission: Any = SimpleNamespace(task_name="task", claim_ids=(uuid4(),))
    reading, writing = os.pipe()
    for _ in range(2):  # also after its thread has ended
        lost.add({7: Process(reading, alive=False), 8: Process(reading, alive=True)}, submission)
        eventually(nobody_looks)
    assert locks.ended == [["replica worker 7"]] * 2
    os.close(reading)
    os.close(writing)


def test_after_a_shutdown_and_a_restart_dead_workers_are_freed_again() -> None:
    before: Any = Locks()
    submission: Any = SimpleNamespace(task_name="task", claim_ids=(uuid4(),))
    reading, writing = os.pipe()
    LostWorkers(before).add({8: Process(reading, alive=True)}, submission)
    before.over.set()
    eventually(nobody_looks)
    after: Any = Locks()  # as a restart makes new ones
    LostWorkers(after).add({7: Process(reading, alive=False)}, submission)
    eventually(lambda: after.ended == [["replica worker 7"]])
    assert not before.ended
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("executor", "refuses"),
    [(ThreadPoolExecutor, True), (ProcessPoolExecutor, True), (AsyncIOExecutor, False)],
)
def test_while_the_interpreter_ends_pools_accept_nothing_and_an_event_loop_may_go_on(
    executor: type[Any], refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in a thread that the interpreter waits for."""
    inner = executor()
    assert not accepts_nothing_more(inner)
    monkeypatch.setattr(threading, "_SHUTTING_DOWN", True)
    assert accepts_nothing_more(inner) == refuses
