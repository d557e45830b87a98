"""Calls in an event loop's thread: many wake the loop once, and no signal is lost in them."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.polling import eventually
from tests.support.waist import call_on_its_loop

# More than a pipe of asyncio takes wake-ups.
MANY = 2000


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop.

    :ivar wake_ups: how many times another thread has woken it
    """

    wake_ups = 0

    def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> asyncio.Handle:
        self.wake_ups += 1
        return super().call_soon_threadsafe(*arguments, **options)


@pytest.fixture
def loop() -> Iterator[CountingLoop]:
    made = CountingLoop()
    yield made
    made.close()


def call(loop: CountingLoop, function: Callable[[], object]) -> None:
    call_on_its_loop(SimpleNamespace(_eventloop=loop), function)


def test_many_calls_wake_the_loop_once_and_are_made_in_their_order(loop: CountingLoop) -> None:
    made: list[int] = []
    for number in range(MANY):
        call(loop, lambda number=number: made.append(number))
    call(loop, loop.stop)
    loop.run_forever()
    assert made == list(range(MANY))
    assert loop.wake_ups == 1


def test_a_call_that_comes_after_the_loop_has_taken_the_others_wakes_it_again(
    loop: CountingLoop,
) -> None:
    for _ in range(2):
        call(loop, loop.stop)
        loop.run_forever()
    assert loop.wake_ups == 2


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
    eventually(lambda: len(made) == 4 * MANY)
    loop.call_soon_threadsafe(loop.stop)
    runs.join()


def test_each_call_has_the_context_in_which_it_was_asked_for(loop: CountingLoop) -> None:
    variable: ContextVar[int] = ContextVar("variable")
    seen: list[int] = []
    for number in range(2):
        variable.set(number)
        call(loop, lambda: seen.append(variable.get()))
    call(loop, loop.stop)
    loop.run_forever()
    assert seen == [0, 1]


def test_an_error_of_a_call_is_the_loops_and_the_next_ones_are_made(loop: CountingLoop) -> None:
    told: list[Any] = []
    loop.set_exception_handler(lambda _loop, context: told.append(context["exception"]))
    error = ValueError("no")

    def fail() -> None:
        raise error

    call(loop, fail)
    call(loop, loop.stop)
    loop.run_forever()
    assert told == [error]


def test_a_closed_loop_is_told_at_each_call() -> None:
    closed = CountingLoop()
    call(closed, lambda: None)  # which it has not taken
    closed.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            call(closed, lambda: None)
