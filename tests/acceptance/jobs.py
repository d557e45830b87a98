"""The jobs of replica processes, which worker processes can import, too."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from apscheduler_tasklock import HeldLock, current_lock, task_lock


def say(*words: object) -> None:
    """Print a line with one call: other threads print, too."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def begin() -> HeldLock:
    lock = current_lock()
    assert lock is not None
    time_of_day = lock.run_time.time() if lock.run_time is not None else None
    how = "again" if lock.is_takeover else "first"
    say("begins", lock.name, os.getpid())
    say("runs", time_of_day, lock.token, how, os.getpid())
    return lock


def end(lock: HeldLock) -> None:
    say("ends", lock.token, "lost" if lock.lost else "held")


@task_lock
def sleep(takes: float) -> None:
    lock = begin()
    time.sleep(takes)  # the work
    end(lock)


@task_lock
def work(folder: str) -> None:
    """Work until there is a file that is called like the claim's token."""
    lock = begin()
    while not Path(folder, str(lock.token)).exists():
        time.sleep(0.01)
    end(lock)


@task_lock
def until_lost() -> None:
    """Work until the lock is lost, and for long after that."""
    lock = begin()
    while not lock.lost:
        time.sleep(0.01)
    end(lock)
    time.sleep(60)


@task_lock
async def work_async(folder: str) -> None:
    lock = begin()
    try:
        while not Path(folder, str(lock.token)).exists():
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        say("cancelled", lock.token, "lost" if lock.lost else "held")
        raise
    end(lock)


@task_lock
def hang(label: str) -> None:
    """Work until the process is killed."""
    begin()
    say("label", label)
    while True:
        time.sleep(0.01)


@task_lock
def hang_too(label: str) -> None:
    """Do the same, as another function."""
    hang(label)


@task_lock
def kill_own_process() -> None:
    begin()
    os.kill(os.getpid(), signal.SIGKILL)


def touch(path: str) -> None:
    """Leave a file."""
    Path(path).touch()


@task_lock
async def block(seconds: float) -> None:
    """Block the event loop."""
    say("begins block")
    time.sleep(seconds)  # the mistake that is tested


@task_lock
def fail_until(attempt: int, folder: str) -> None:
    """Fail until it is this attempt, which works until there is a file called like its token."""
    lock = begin()
    say("attempt", lock.attempt)
    if lock.attempt < attempt:
        raise ValueError(lock.attempt)
    while not Path(folder, str(lock.token)).exists():
        time.sleep(0.01)
    end(lock)
