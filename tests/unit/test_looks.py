"""A look's code runs in the application's thread, and a call that hangs there is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

from apscheduler.schedulers.base import STATE_RUNNING

from apscheduler_tasklock._runs.looks import Looks
from tests.support.polling import eventually
from tests.support.waist import Timings


class Locks:
    """Stands in for the replica's client, and for its thread, whose work the test does.

    :ivar functions: what the thread is to call
    """

    outage = SimpleNamespace(live_replicas=1)
    settings = SimpleNamespace(timings=Timings())

    def __init__(self) -> None:
        self.functions: list[Callable[[], object]] = []
        self.thread = self.database = self

    def add_recurring(self, _looks: Looks) -> None: ...

    def call(self, function: Callable[[], object]) -> None:
        self.functions.append(function)

    def begin_all(self, _statements: Any, call: Callable[[Any], object], _done: Any) -> None:
        self.call_code = call


def test_a_call_that_returns_late_does_not_hide_that_the_next_one_hangs() -> None:
    """It sent a statement, which was answered before the thread heard that the call is over."""
    locks, go_on = Locks(), threading.Event()
    arguments: list[Any] = [locks, SimpleNamespace(shortest_lease=inf), lambda: iter(())]
    looks = Looks(*arguments, lambda: STATE_RUNNING, 5.0)
    looks.start()
    looks.begin(0.0)
    locks.call_code(lambda: None)
    eventually(lambda: locks.functions)
    locks.call_code(lambda: go_on.wait(60))
    assert looks.due_at < inf
    locks.functions.pop()()
    assert looks.due_at < inf
    go_on.set()
    eventually(lambda: locks.functions)
    locks.functions.pop()()
    assert looks.due_at == inf
    looks.close()
