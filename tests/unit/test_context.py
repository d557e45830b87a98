"""What a running job may know of its lock."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest

from apscheduler_tasklock import HeldLock, TaskLockError, TaskLockOptionError, current_lock
from apscheduler_tasklock.errors import TaskLockDatabaseError
from apscheduler_tasklock.lock import holding

UNTIL = datetime(2025, 6, 6, 10, tzinfo=timezone.utc)


class Extender:
    """Stands in for the extending statement, which tests/integration runs on a real server.

    A plain function is enough here: a held lock knows only what the statement came to, a new
    ``locked_until``, none because the claim was gone, or an error.
    """

    def __init__(self, answer: datetime | Exception | None = None) -> None:
        self.answer = answer
        self.asked: list[tuple[HeldLock, float]] = []

    def __call__(self, held: HeldLock, seconds: float) -> bool:
        self.asked.append((held, seconds))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            return False
        ends_at = time.monotonic() + held.seconds_left + seconds
        held.note_renewal(self.answer, held.run_until + timedelta(seconds=seconds), ends_at)
        return True


def held_lock(
    *,
    seconds_left: float = 1000.0,
    lease: float | None = None,
    lease_ends_before: float = 0.0,
    extender: Extender | None = None,
) -> HeldLock:
    """Return a lock whose maximum lock ends in so many seconds, and its lease some before."""
    return HeldLock(
        window_start=datetime(2026, 1, 1, tzinfo=timezone.utc),
        name="sync",
        token=7,
        claim_id=uuid4(),
        run_time=UNTIL - timedelta(hours=1),
        locked_until=UNTIL,
        run_until=UNTIL + timedelta(seconds=lease_ends_before),
        lease=lease,
        ends_at=time.monotonic() + seconds_left,
        extender=extender or Extender(),
    )


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, stopped: its one item is what it says."""
    now = [time.monotonic()]
    monkeypatch.setattr("apscheduler_tasklock.lock.time.monotonic", lambda: now[0])
    return now


# The current lock


def test_there_is_no_lock_outside_a_job() -> None:
    assert current_lock() is None


def test_lock_is_current_while_it_is_held() -> None:
    lock = held_lock()
    with holding(lock):
        assert current_lock() is lock
    assert current_lock() is None


def test_lock_is_not_current_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), holding(held_lock()):
        _ = 1 / 0
    assert current_lock() is None


def test_outer_lock_is_current_again_after_an_inner_one() -> None:
    outer, inner = held_lock(), held_lock()
    with holding(outer):
        with holding(inner):
            assert current_lock() is inner
        assert current_lock() is outer


def test_lock_is_of_one_thread_only() -> None:
    seen: list[HeldLock | None] = []
    mine, other = held_lock(), held_lock()

    def in_thread() -> None:
        seen.append(current_lock())
        with holding(other):
            seen.append(current_lock())

    with holding(mine):
        # With an empty context: from Python 3.14 a thread may start with its parent's.
        thread = threading.Thread(target=contextvars.Context().run, args=(in_thread,))
        thread.start()
        thread.join()
        assert current_lock() is mine
    assert seen == [None, other]


def test_lock_follows_a_copied_context() -> None:
    lock = held_lock()
    with holding(lock):
        context = contextvars.copy_context()
    assert current_lock() is None
    assert context.run(current_lock) is lock


def test_each_coroutine_has_its_own_lock() -> None:
    async def in_task(lock: HeldLock, barrier: list[asyncio.Future[None]]) -> HeldLock | None:
        with holding(lock):
            barrier.pop().set_result(None)
            await asyncio.gather(*waiting)
            return current_lock()

    async def both() -> list[HeldLock | None]:
        loop = asyncio.get_running_loop()
        waiting.extend(loop.create_future() for _ in range(2))
        entering = list(waiting)
        return list(await asyncio.gather(*(in_task(lock, entering) for lock in locks)))

    waiting: list[asyncio.Future[None]] = []
    locks = [held_lock(), held_lock()]
    assert asyncio.run(both()) == locks


# Time left


@pytest.mark.parametrize(
    ("seconds_left", "expected"), [(60.0, 60.0), (0.5, 0.5), (0.0, 0.0), (-5.0, 0.0)]
)
def test_seconds_left_are_by_the_monotonic_clock_and_never_negative(
    seconds_left: float, expected: float, stopped_clock: list[float]
) -> None:
    lock = held_lock(seconds_left=seconds_left)
    assert lock.seconds_left == pytest.approx(expected)
    assert lock.lost == (expected == 0)
    assert ("lost" in repr(lock)) == (expected == 0)


def test_lock_is_lost_when_its_time_is_over(stopped_clock: list[float]) -> None:
    lock = held_lock(seconds_left=60)
    stopped_clock[0] += 59
    assert not lock.lost
    stopped_clock[0] += 2
    assert lock.lost


def test_lock_that_was_lost_stays_so(stopped_clock: list[float]) -> None:
    lock = held_lock(seconds_left=60)
    stopped_clock[0] += 61
    assert lock.lost
    lock.note_renewal(UNTIL, UNTIL, stopped_clock[0] + 60)
    assert lock.lost


def test_a_lock_whose_lease_alone_has_ended_is_not_lost(stopped_clock: list[float]) -> None:
    lock = held_lock(seconds_left=60, lease=20, lease_ends_before=40)
    assert lock.lease_left == pytest.approx(20)
    stopped_clock[0] += 30
    assert (lock.lease_left, lock.lost) == (0, False)
    stopped_clock[0] += 31
    assert lock.lost


def test_a_lock_whose_run_is_cut_is_lost_and_nobody_is_called() -> None:
    lock, calls = held_lock(lease=20), []
    lock.on_lost(lambda: calls.append("lost"))
    lock.cut()
    assert lock.lost
    assert not lock.has_lost_callback
    lock.lose()
    assert not calls


def test_lock_that_was_released_is_lost_and_that_is_news_once() -> None:
    lock = held_lock()
    assert [lock.end(), lock.end()] == [True, False]
    assert lock.lost


def test_wall_clock_does_not_lose_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = held_lock()
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert not lock.lost  # although `locked_until` is long past by the wall clock, too


def test_repr_names_task_token_and_end() -> None:
    assert repr(held_lock()) == "<HeldLock 'sync' token=7 locked_until=2025-06-06T10:00:00+00:00>"


# Extending


@pytest.mark.parametrize("by", [90, 90.0, timedelta(seconds=90)])
def test_extend_moves_the_end(by: Any, stopped_clock: list[float]) -> None:
    extender = Extender(UNTIL + timedelta(seconds=90))
    lock = held_lock(seconds_left=30, extender=extender)
    lock.extend(by)
    assert extender.asked == [(lock, 90.0)]
    assert lock.locked_until == lock.run_until == UNTIL + timedelta(seconds=90)
    assert lock.seconds_left == pytest.approx(120)


def test_extend_of_a_claim_that_has_ended_says_so_and_loses_the_lock() -> None:
    lock = held_lock(extender=Extender(None))
    with pytest.raises(TaskLockError, match=r"task 'sync' \(token 7\) has ended"):
        lock.extend(90)
    assert lock.lost
    assert lock.locked_until == UNTIL


def test_extend_while_the_database_is_unavailable_changes_nothing(
    stopped_clock: list[float],
) -> None:
    lock = held_lock(seconds_left=30, extender=Extender(TaskLockDatabaseError("no route")))
    with pytest.raises(TaskLockDatabaseError, match="no route"):
        lock.extend(90)
    assert lock.seconds_left == pytest.approx(30)
    assert lock.locked_until == UNTIL


@pytest.mark.parametrize("by", [0, -1, float("nan"), "soon", True, None, timedelta(0)])
def test_impossible_extension_is_refused_unasked(by: Any) -> None:
    extender = Extender(UNTIL)
    with pytest.raises(TaskLockOptionError, match=r"extend\(\) of task 'sync': by must be "):
        held_lock(extender=extender).extend(by)
    assert not extender.asked
