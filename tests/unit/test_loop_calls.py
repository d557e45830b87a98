"""Calls in an event loop's thread: many wake the loop once, and no signal is lost in them."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest

from tests.support.polling import eventually
from tests.support.waist import call_on_its_loop

# More than a pipe of asyncio takes wake-ups.
MANY = 2000


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop.

    :ivar wake_ups: how many times another thread has woken it
    :ivar is_interrupted: whether Ctrl-C comes when it is to be woken
    :ivar is_deaf: whether wake-ups are lost, as by Ctrl-C right before the first line of a callback
    :ivar meanwhile: what happens at the next wake-up, before it
    """

    wake_ups = 0
    is_interrupted = False
    is_deaf = False
    meanwhile: Callable[[], object] | None = None

    def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> asyncio.Handle:
        if self.is_interrupted:
            raise KeyboardInterrupt
        if self.is_deaf:
            return super().call_later(3600.0, lambda: None)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        self.wake_ups += 1
        return super().call_soon_threadsafe(*arguments, **options)


@pytest.fixture
def loop() -> Iterator[CountingLoop]:
    made = CountingLoop()
    yield made
    made.close()


def call(loop: CountingLoop, function: Callable[[], object]) -> None:
    call_on_its_loop(SimpleNamespace(_eventloop=loop), function)


def run(loop: CountingLoop) -> None:
    """Run the loop until it has nothing more to do at once."""
    for _ in range(5):
        loop.run_until_complete(asyncio.sleep(0))


def test_many_calls_wake_the_loop_once_and_are_made_in_their_order(loop: CountingLoop) -> None:
    made: list[int] = []
    for number in range(MANY):
        call(loop, lambda number=number: made.append(number))
    run(loop)
    assert made == list(range(MANY))
    assert loop.wake_ups == 1


def test_a_call_that_comes_after_the_others_were_made_wakes_the_loop_again(
    loop: CountingLoop,
) -> None:
    made: list[int] = []
    for number in range(2):
        call(loop, lambda number=number: made.append(number))
        run(loop)
    assert made == [0, 1]
    assert loop.wake_ups == 2


def test_a_call_that_comes_while_others_are_made_wakes_the_loop_again(loop: CountingLoop) -> None:
    made: list[str] = []
    call(loop, lambda: call(loop, lambda: made.append("another")))
    run(loop)
    assert made == ["another"]


def test_a_call_is_made_before_the_loops_later_callbacks(loop: CountingLoop) -> None:
    made: list[str] = []
    call(loop, lambda: made.append("call"))
    loop.call_soon_threadsafe(made.append, "callback")
    run(loop)
    assert made == ["call", "callback"]


def test_what_is_left_by_an_interrupted_call_is_made_later(loop: CountingLoop) -> None:
    made: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    call(loop, interrupt)
    call(loop, lambda: made.append("the next one"))
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    run(loop)
    assert made == ["the next one"]


def test_a_call_that_could_not_wake_the_loop_is_made_with_the_next_one(loop: CountingLoop) -> None:
    made: list[int] = []
    loop.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        call(loop, lambda: made.append(0))
    loop.is_interrupted = False
    call(loop, lambda: made.append(1))
    run(loop)
    assert made == [0, 1]


@pytest.mark.skipif(sys.platform == "win32", reason="asyncio hears no signals there")
def test_no_signal_is_lost_in_the_calls(loop: CountingLoop) -> None:
    heard: list[str] = []

    def hear() -> None:
        heard.append("it")
        loop.stop()

    loop.add_signal_handler(signal.SIGUSR1, hear)
    for _ in range(MANY):
        call(loop, lambda: None)
    signal.raise_signal(signal.SIGUSR1)
    loop.call_later(5.0, loop.stop)
    loop.run_forever()
    assert heard == ["it"]


def test_no_call_is_left_while_threads_make_them_and_the_loop_takes_them(
    loop: CountingLoop,
) -> None:
    made: list[None] = []
    runs = threading.Thread(target=loop.run_forever)
    runs.start()

    def make() -> None:
        for _ in range(MANY):
            call(loop, lambda: made.append(None))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    try:
        eventually(lambda: len(made) == 4 * MANY)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        runs.join()


def test_a_call_follows_one_whose_wake_up_was_lost(
    loop: CountingLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apscheduler_tasklock._runs.adapter.WAKE_AGAIN", 0.0)
    made: list[int] = []
    loop.is_deaf = True
    call(loop, lambda: made.append(0))
    loop.is_deaf = False
    call(loop, lambda: made.append(1))
    run(loop)
    assert made == [0, 1]


def test_a_call_of_another_thread_is_not_passed_by_what_that_thread_does_next(
    loop: CountingLoop,
) -> None:
    """The thread whose call wakes the loop is slower than the other one."""
    made: list[str] = []
    is_done = threading.Event()

    def act() -> None:
        call(loop, lambda: made.append("call"))
        loop.call_soon_threadsafe(made.append, "callback")
        is_done.set()

    other = threading.Thread(target=act)

    def let_it_act() -> None:
        other.start()
        is_done.wait(0.05)  # it waits for the wake-up, which is not made yet

    loop.meanwhile = let_it_act
    call(loop, lambda: None)
    other.join()
    run(loop)
    assert made == ["call", "callback"]


def test_each_call_has_the_context_in_which_it_was_asked_for(loop: CountingLoop) -> None:
    variable: ContextVar[int] = ContextVar("variable")
    seen: list[int] = []
    for number in range(2):
        variable.set(number)
        call(loop, lambda: seen.append(variable.get()))
    run(loop)
    assert seen == [0, 1]


def test_an_error_of_a_call_is_the_loops_and_the_next_ones_are_made(loop: CountingLoop) -> None:
    told: list[Any] = []
    loop.set_exception_handler(lambda _loop, context: told.append(context["exception"]))
    error = ValueError("no")

    def fail() -> None:
        raise error

    call(loop, fail)
    call(loop, lambda: told.append("the next one"))
    run(loop)
    assert told == [error, "the next one"]


def test_an_error_of_a_call_leaves_no_cycle(loop: CountingLoop) -> None:
    class OurError(Exception): ...

    gone: list[ref[OurError]] = []

    def fail() -> None:
        error = OurError()
        gone.append(ref(error))
        try:
            raise error
        finally:
            del error

    loop.set_exception_handler(lambda _loop, _context: None)
    gc.disable()
    try:
        call(loop, fail)
        run(loop)
        assert gone[0]() is None
    finally:
        gc.enable()


def test_each_call_on_a_closed_loop_is_an_error_and_none_keeps_the_loop() -> None:
    closed = CountingLoop()
    call(closed, partial(setattr, closed, "made", True))  # which it has not made
    closed.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            call(closed, partial(setattr, closed, "made", True))
    gone = ref(closed)
    del closed
    gc.collect()
    assert gone() is None


def test_a_loop_that_is_closed_with_calls_that_it_has_not_made_goes_when_another_one_comes(
    loop: CountingLoop,
) -> None:
    closed = CountingLoop()
    call(closed, partial(setattr, closed, "made", True))
    closed.close()
    gone = ref(closed)
    del closed
    call(loop, lambda: None)
    gc.collect()
    assert gone() is None
