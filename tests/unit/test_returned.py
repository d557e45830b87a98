"""What functions return: results, and objects whose work nobody would run.

The same table decides on jobs. What becomes of their runs is tested in `integration/windows`.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest

from apscheduler_tasklock import TaskLockOptionError, TaskLocks
from apscheduler_tasklock.testing import unlocked
from tests.support.schedulers import NO_DATABASE


@pytest.fixture(autouse=True)
def _no_database() -> Iterator[None]:
    with unlocked():
        yield


def call(function: Callable[[], Any]) -> Any:
    """Call a function that is decorated with a hold."""
    return TaskLocks(NO_DATABASE).hold("task", min_lock=0, max_lock=600)(function)()


async def coroutine() -> None: ...


def generator() -> Iterator[None]:
    yield


async def async_generator() -> AsyncIterator[None]:
    yield


class Awaitable:
    def __await__(self) -> Iterator[None]:
        yield


UNRUN: dict[str, tuple[Callable[[], Any], str]] = {
    "coroutine": (coroutine, "a coroutine, which nobody awaits; await it"),
    "mock": (AsyncMock(), "a coroutine, which nobody awaits; await it"),
    "awaitable": (Awaitable, "an awaitable Awaitable, which nobody awaits; await it"),
    "generator": (generator, "a generator, which nobody iterates over; iterate over it"),
    "async generator": (async_generator, "an async generator, which nobody iterates over; iter"),
    "map": (lambda: map(str, [1]), "a map object, which nobody iterates over; iterate over it"),
    "filter": (lambda: filter(None, [1]), "a filter object, which nobody iterates over; iterate"),
    "zip": (zip, "a zip object, which nobody iterates over; iterate over it"),
    "context manager": (contextmanager(generator), "a context manager, which nobody enters; enter"),
    "async context manager": (
        asynccontextmanager(async_generator),
        "an async context manager, which nobody enters; enter it",
    ),
}
RESULTS = {
    "none": None,
    "mock": MagicMock(),
    "async mock": AsyncMock(),
    "mock of a task": Mock(spec=asyncio.Task),
    "list iterator": iter([1]),
    "enumerate": enumerate([1]),
    "chain": itertools.chain([1]),
    "context manager": nullcontext(),
    "function": generator,
}


@pytest.mark.parametrize(("make", "told"), UNRUN.values(), ids=UNRUN)
def test_what_nobody_runs_is_an_error_that_says_what_to_do(
    make: Callable[[], Any], told: str
) -> None:
    def function() -> Any:
        return make()

    with pytest.raises(TaskLockOptionError, match=f"function has returned {told}"):
        call(function)


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_any_other_object_is_a_result(result: Any) -> None:
    assert call(lambda: result) is result


def test_an_open_cursor_is_a_result() -> None:
    with closing(sqlite3.connect(":memory:")) as database, closing(database.cursor()) as cursor:
        assert call(lambda: cursor.execute("SELECT 1")) is cursor


@pytest.mark.parametrize("name", ["generator", "async generator", "context manager"])
def test_a_function_that_shows_that_no_call_runs_it_is_not_decorated(name: str) -> None:
    function, _ = UNRUN[name]
    with pytest.raises(TaskLockOptionError, match="cannot decorate"):
        TaskLocks(NO_DATABASE).hold("task", min_lock=0, max_lock=600)(function)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["on its loop", "in a thread"])
def test_a_task_that_is_returned_is_cancelled(elsewhere: bool) -> None:
    """Else it would go on without the lock."""

    async def main() -> bool:
        task = asyncio.create_task(asyncio.sleep(600))
        returns = partial(call, lambda: task)
        with pytest.raises(TaskLockOptionError, match="an awaitable Task"):
            await asyncio.to_thread(returns) if elsewhere else returns()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(main())
