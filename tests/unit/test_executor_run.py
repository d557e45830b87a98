"""Whether a run may begin, and who has cancelled it: a shutdown, or its own code."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta, timezone
from unittest.mock import AsyncMock, MagicMock
from uuid import uuid4

import pytest

from apscheduler_tasklock._runs.executor_run import ExecutorRun, is_being_cancelled
from apscheduler_tasklock.lock import HeldLock
from tests.support.internals import fail_to_measure


def test_a_coroutine_that_is_cancelled_is_distinguished_from_one_that_gives_up_by_itself() -> None:
    seen: list[bool] = []

    async def job(*, by_itself: bool) -> None:
        try:
            if by_itself:
                raise asyncio.CancelledError
            await asyncio.Event().wait()
        finally:
            # Python 3.10 does not tell.
            seen.append(is_being_cancelled(if_unknown=not by_itself))

    async def main() -> None:
        for by_itself in (True, False):
            task = asyncio.ensure_future(job(by_itself=by_itself))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(main())
    assert seen == [False, True]


@pytest.mark.parametrize("if_unknown", [True, False])
def test_where_python_does_not_tell_it_is_as_the_caller_says(
    monkeypatch: pytest.MonkeyPatch, if_unknown: bool
) -> None:
    """A task of Python 3.10, which has no ``cancelling``; here there may be none of those."""
    monkeypatch.setattr(asyncio, "current_task", object)
    assert is_being_cancelled(if_unknown=if_unknown) is if_unknown


LEASE = 15.0
NOW = datetime(2026, 3, 1, tzinfo=timezone.utc)


def held_lock(*, lease: float, lease_left: float, max_lock_left: float) -> HeldLock:
    """Return a lock that was claimed at ``NOW``. The times are in seconds."""
    return HeldLock(
        name="a",
        token=1,
        claim_id=uuid4(),
        run_time=NOW,
        window_start=NOW,
        locked_until=NOW + timedelta(seconds=lease_left),
        run_until=NOW + timedelta(seconds=max_lock_left),
        ends_at=time.monotonic() + max_lock_left,
        extender=MagicMock(),
        lease=lease,
    )


def test_a_lock_is_held_although_the_telemetry_of_its_claim_fails() -> None:
    """So that its window can be handed over."""
    held = MagicMock(spec=HeldLock)
    run = ExecutorRun(MagicMock(), NOW, uuid4(), MagicMock(), MagicMock(), MagicMock())
    fail_to_measure(run)
    with pytest.raises(LookupError):
        run.take_in(held, time.monotonic())
    assert run.held is held


@pytest.mark.parametrize("in_coroutine", [False, True], ids=["thread", "coroutine"])
@pytest.mark.parametrize("left", [LEASE, 0.0], ids=["in time", "seen too late"])
def test_a_run_begins_while_its_lease_stands_when_the_renewal_is_answered(
    left: float, *, in_coroutine: bool
) -> None:
    """The process may have been stopped before it saw the answer."""
    held = held_lock(lease=LEASE, lease_left=0.0, max_lock_left=100.0)

    def renew(_held: HeldLock) -> bool:
        until = NOW + timedelta(seconds=left)
        held.note_renewal(until, held.run_until, time.monotonic() + 100)
        return True

    locks = MagicMock(closed=False, renew_now=renew, renew_now_async=AsyncMock(side_effect=renew))
    run = ExecutorRun(MagicMock(), NOW, held.claim_id, locks, MagicMock(), MagicMock())
    assert run.take_in(held, time.monotonic())
    assert run.held is held
    stands = asyncio.run(run.stands_async()) if in_coroutine else run.stands()
    assert stands == (left > 0)


def test_a_run_begins_although_its_maximum_lock_ends_within_a_third_of_its_lease() -> None:
    """As a takeover, which keeps the dead run's maximum lock. Nobody else could do better."""
    held = held_lock(lease=6000.0, lease_left=600.0, max_lock_left=600.0)
    locks = MagicMock(closed=False)
    run = ExecutorRun(MagicMock(), NOW, held.claim_id, locks, MagicMock(), MagicMock())
    assert run.take_in(held, time.monotonic())
    assert run.stands()
    locks.renew_now.assert_not_called()
