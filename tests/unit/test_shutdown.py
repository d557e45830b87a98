"""The time of a shutdown, which executors and job stores share."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import pytest

from apscheduler_tasklock._shutdown import LAST_SECONDS, SHUTDOWN_LIMIT, Shutdown
from tests.support.waist import Closing, LockClient, LockReplica, LockSettings

PATIENCE = 60.0


def test_only_the_wait_for_running_jobs_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("apscheduler_tasklock._shutdown.time.monotonic", lambda: now[0])
    shutdown = Shutdown()
    now[0] += 1.0  # to withdraw what has not begun
    now[0] += 60.0
    shutdown.note_waited(60.0)
    assert shutdown.seconds_left == pytest.approx(SHUTDOWN_LIMIT - LAST_SECONDS - 1.0)


def test_a_signal_handler_may_stop_at_any_line_of_a_wait() -> None:
    for number in count():
        interrupted = Interrupted(number)
        interrupted.start()
        interrupted.join(PATIENCE)
        assert not interrupted.is_alive()
        if interrupted.lines <= number:  # the wait has no further line
            break
        assert interrupted.is_stopped
    assert number > 5


@pytest.mark.parametrize("does", ["join", "leave"])
def test_a_user_may_join_at_any_moment_while_another_one_joins_or_leaves(does: str) -> None:
    for number in count():
        replica: Any = LockReplica(LockSettings("postgresql://app@nowhere/app", "replica"))
        one, other = Closing(), Closing()
        if does == "leave":
            replica.join(one)
        if not interrupt(
            number, partial(getattr(replica, does), one), partial(replica.join, other)
        ):
            break
        replica.leave(one)
        assert not replica.leave(Closing()), f"the other user is lost at step {number}"
        assert replica.leave(other)
    assert number > 5


def interrupt(number: int, function: Callable[[], object], then: Callable[[], object]) -> bool:
    """Call a function, and another one at a step of it; return whether it has so many steps."""
    left = [number]

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            if left[0] == 0:
                sys.settrace(None)
                then()
            left[0] -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return left[0] < 0


class Interrupted(threading.Thread):
    """A thread that waits for a stop, which comes at one of the lines of the wait.

    :param number: of the line, among those that the wait passes
    :ivar lines: how many lines it has passed
    :ivar is_stopped: whether the wait has seen the stop
    """

    def __init__(self, number: int) -> None:
        super().__init__(daemon=True)
        self._number = number
        self._locks = LockClient(LockSettings("postgresql://app@nowhere/app", "replica"))
        self.lines = 0
        self.is_stopped = False

    def run(self) -> None:
        sys.settrace(self._trace)
        self.is_stopped = self._locks.wait(0.001)
        sys.settrace(None)

    def _trace(self, _frame: FrameType, event: str, _argument: Any) -> Any:
        """Stop as a signal handler would, between two lines."""
        if event == "line":
            self.lines += 1
            if self.lines == self._number + 1:
                self._locks.stop_claiming()
        return self._trace
