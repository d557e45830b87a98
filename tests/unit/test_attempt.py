"""Who has cancelled a coroutine: a shutdown, or its own code."""

from __future__ import annotations

import asyncio

import pytest

from apscheduler_tasklock._scheduler.attempt import is_being_cancelled

pytestmark = pytest.mark.inside


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
