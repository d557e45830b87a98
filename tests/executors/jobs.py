"""Jobs of the executor contract, each as a function and as a coroutine function."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from apscheduler_tasklock import TaskLockGiveUp, TaskLockRetry, current_lock


def token(**kwargs: Any) -> tuple[int, dict[str, Any]]:
    lock = current_lock()
    assert lock is not None
    return lock.token, kwargs


async def token_coroutine(**kwargs: Any) -> tuple[int, dict[str, Any]]:
    await asyncio.sleep(0)
    return token(**kwargs)


def has_lock(*_args: Any, **_kwargs: Any) -> bool:
    return current_lock() is not None


async def has_lock_coroutine(*_args: Any, **_kwargs: Any) -> bool:
    await asyncio.sleep(0)
    return has_lock()


class Callable:
    """A job whose object has the coroutine, so that APScheduler takes it for a function."""

    async def __call__(self) -> None: ...

    async def method(self) -> bool:
        return has_lock()


async_callable = Callable()


async def async_generator(**_: Any) -> AsyncIterator[int]:
    yield 1


def generator(**_: Any) -> Iterator[int]:
    yield 1


def makes_a_coroutine() -> Any:
    return token_coroutine()


async def makes_a_coroutine_coroutine() -> Any:
    return token_coroutine()


def fail() -> None:
    raise ValueError("on purpose")


async def fail_coroutine() -> None:
    await asyncio.sleep(0)
    raise ValueError("on purpose")


def append_run_time(file: str) -> None:
    lock = current_lock()
    assert lock is not None
    assert lock.run_time is not None
    with Path(file).open("a") as runs:
        runs.write(f"{lock.run_time.isoformat()}\n")


async def append_run_time_coroutine(file: str) -> None:
    append_run_time(file)


def wait_for(file: str) -> None:
    """Make a file when the job has begun, and work until somebody makes the other."""
    Path(f"{file} begun").touch()
    while not Path(file).exists():
        time.sleep(0.01)


async def wait_for_coroutine(file: str) -> None:
    Path(f"{file} begun").touch()
    while not Path(file).exists():
        await asyncio.sleep(0.01)


def succeed_at_the_third_attempt() -> int:
    lock = current_lock()
    assert lock is not None
    if lock.attempt < 3:
        raise TaskLockRetry("not yet", after=0)
    return lock.attempt


async def succeed_at_the_third_attempt_coroutine() -> int:
    await asyncio.sleep(0)
    return succeed_at_the_third_attempt()


def give_up() -> None:
    raise TaskLockGiveUp


async def give_up_coroutine() -> None:
    raise TaskLockGiveUp
