"""Jobs of the executor contract, each as a function and as a coroutine function."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from apscheduler_tasklock import current_lock


def token(**kwargs: Any) -> tuple[int, dict[str, Any]]:
    lock = current_lock()
    assert lock is not None
    return lock.token, kwargs


async def token_coroutine(**kwargs: Any) -> tuple[int, dict[str, Any]]:
    await asyncio.sleep(0)
    return token(**kwargs)


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
