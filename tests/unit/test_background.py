"""Background threads: what becomes of what they are given, and when they end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import pytest

from apscheduler_tasklock._database.background import BackgroundThreads
from tests.support.internals import before_it_is_queued, pools_lock
from tests.support.polling import eventually

pytestmark = pytest.mark.inside

NAME = "tasklock-tested"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def name_of_this() -> str:
    return threading.current_thread().name


@pytest.fixture
def one() -> Iterator[BackgroundThreads]:
    with closing(BackgroundThreads(1, NAME)) as background:
        yield background


def test_all_is_done_in_the_order_in_which_it_came(one: BackgroundThreads) -> None:
    done: list[int] = []
    for number in range(100):
        one.run(partial(done.append, number))
    eventually(lambda: len(done) == 100)
    assert done == list(range(100))
    assert len(threads()) == 1


def test_there_are_so_many_threads_at_most_and_one_that_waits_is_taken_first() -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        begun.release()
        go_on.wait(60)

    with closing(BackgroundThreads(3, NAME)) as background:
        for _ in range(10):
            done = threading.Event()
            background.run(done.set)
            assert done.wait(60)
        assert len(threads()) <= 2  # the first may not wait again yet when the second comes
        for _ in range(5):
            background.run(wait)
        for _ in range(3):
            assert begun.acquire(timeout=60)
        assert len(threads()) == 3
        go_on.set()
        for _ in range(2):
            assert begun.acquire(timeout=60)
    eventually(lambda: not threads())


def test_what_raises_ends_no_thread(
    one: BackgroundThreads, caplog: pytest.LogCaptureFixture
) -> None:
    names: list[str] = []

    def leave() -> None:
        names.append(name_of_this())
        raise SystemExit(3)

    one.run(leave)
    one.run(lambda: names.append(name_of_this()))
    eventually(lambda: len(names) == 2)
    assert names[0] == names[1] != name_of_this()
    assert "SystemExit" in caplog.text


def test_closed_they_do_what_is_queued_and_end_and_the_rest_is_done_here() -> None:
    background, go_on, names = BackgroundThreads(2, NAME), threading.Event(), []
    for _ in range(4):
        background.run(lambda: (go_on.wait(60), names.append(name_of_this())))
    background.close()
    background.run(lambda: names.append(name_of_this()))
    assert names == [name_of_this()]
    go_on.set()
    eventually(lambda: not threads())
    assert len(names) == 5


def test_what_comes_while_they_are_closed_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is there when it comes, and has ended when it is queued."""
    background, names = BackgroundThreads(1, NAME), []
    background.run(lambda: None)

    def close() -> None:
        background.close()
        eventually(lambda: not threads())

    before_it_is_queued(background, close, monkeypatch)
    background.run(lambda: names.append(name_of_this()))
    assert names == [name_of_this()]


def test_without_a_thread_it_is_done_here(
    one: BackgroundThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    names: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        one.run(lambda: names.append(name_of_this()))
    assert names == [name_of_this()]
    one.run(lambda: names.append(name_of_this()))
    eventually(lambda: len(names) == 2)
    assert names[1].startswith(NAME)


def test_those_that_are_thrown_away_end() -> None:
    background = BackgroundThreads(1, NAME)
    done = threading.Event()
    background.run(done.set)
    assert done.wait(60)
    del background
    gc.collect()
    eventually(lambda: not threads())


def test_one_can_run_while_a_pool_of_the_process_is_given_something(
    one: BackgroundThreads,
) -> None:
    """As where the garbage collector closes a coroutine in there."""
    done = threading.Event()
    one.run(lambda: None)
    with pools_lock():
        one.run(done.set)
        assert done.wait(60)


def do(what: str) -> Callable[[], subprocess.CompletedProcess[str]]:
    return partial(
        subprocess.run,
        [sys.executable, "-c", what],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


QUEUED = """
import time
from apscheduler_tasklock._database.background import BackgroundThreads
background = BackgroundThreads(1, "tasklock")
for number in range(3):
    background.run(lambda: (time.sleep(0.2), print("done", flush=True)))
print("main ends", flush=True)
"""
IN_A_CHILD = f"""
import multiprocessing
def child():
{"".join(f"    {line}{chr(10)}" for line in QUEUED.splitlines())}
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
"""


@pytest.mark.parametrize("what", [QUEUED, IN_A_CHILD], ids=["an interpreter", "a child process"])
def test_what_ends_waits_for_what_is_queued(what: str) -> None:
    ended = do(what)()
    assert ended.stdout.splitlines() == ["main ends", "done", "done", "done"], ended.stderr
    assert ended.returncode == 0
