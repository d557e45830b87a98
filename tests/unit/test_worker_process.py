"""Worker processes and their parents; pools while the interpreter ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.executors.pool import ProcessPoolExecutor, ThreadPoolExecutor

from apscheduler_tasklock._runs.adapter import accepts_nothing_more


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


# A parent that goes on to fork another process, which keeps the parent's end of the worker's
# sentinel open, and lives on.
PARENT = """
import multiprocessing, os, time
from apscheduler_tasklock._runs.worker_process import parent

def say(line):
    os.write(1, f"{line}\\n".encode())  # at once, because another process writes there, too

def work():
    say(f"works {os.getpid()}")
    while parent.is_watched():
        time.sleep(0.01)
    say("parent is dead")

multiprocessing.get_context("fork").Process(target=work).start()
if (other := os.fork()) == 0:
    time.sleep(600)
say(f"other {other}")
time.sleep(600)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_a_worker_hears_of_its_parents_death_although_another_process_keeps_its_sentinel_open(
    parent: subprocess.Popen[str],
) -> None:
    assert parent.stdout is not None
    pids: dict[str, int] = {}
    while len(pids) < 2:
        who, pid = parent.stdout.readline().split()
        pids[who] = int(pid)
    watchdog = threading.Timer(30, _kill, [*pids.values()])
    watchdog.start()
    try:
        parent.kill()
        assert parent.stdout.readline() == "parent is dead\n"
    finally:
        watchdog.cancel()
        _kill(*pids.values())


LOCK = """
import multiprocessing, os, time
from datetime import datetime, timezone
from uuid import uuid4
from apscheduler_tasklock._runs.worker_process import LockInWorker, RunTimesInWorker, parent

NOW = datetime.now(timezone.utc)

def lock(ends_in, failover=False):
    return LockInWorker(
        "task", 1, uuid4(), NOW, NOW, NOW, NOW, time.monotonic() + ends_in, 600, None, 1, failover,
        None,
    )

def say(line):
    os.write(1, f"{line}\\n".encode())
"""
RUNS = """
def work():
    held = lock(600).held()
    assert list(RunTimesInWorker(NOW, lock(600))) == [NOW]
    with parent.holding(held, failover=FAILOVER):
        say("runs")
        while not held.lost:
            time.sleep(0.01)
        say("its lock is lost")

multiprocessing.get_context("fork").Process(target=work).start()
time.sleep(600)
"""
BEGINS = """
say([bool(list(RunTimesInWorker(NOW, lock(left)))) for left in (600, 0)])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
@pytest.mark.parametrize(("failover", "tells"), [(True, ""), (False, "its lock is lost\n")])
def test_a_run_whose_parent_is_killed_loses_its_lock_and_with_failover_ends_at_once(
    failover: bool, tells: str
) -> None:
    """With failover another replica runs the window again, when the lease is over."""
    script = LOCK + f"FAILOVER = {failover}" + RUNS
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        try:
            assert run.stdout.readline() == "runs\n"
        finally:
            run.kill()
        assert run.stdout.read() == tells  # when the worker has ended, too


def test_a_worker_does_not_begin_a_run_whose_lock_has_ended() -> None:
    """As where its process was started too slowly. Another replica may run the window."""
    command = [sys.executable, "-c", LOCK + BEGINS]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"[True, False]\n"


def _kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
