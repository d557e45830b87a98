"""Job functions that a worker process can import."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from apscheduler_tasklock import current_lock, task_lock


def lock_and_process(**kwargs: Any) -> tuple[Any, ...]:
    lock = current_lock()
    assert lock is not None
    return lock.name, lock.token, lock.run_time, lock.locked_until, lock.lost, os.getpid(), kwargs


@task_lock(min_factor=0.5)
def decorated(number: int) -> int:
    return number


def fail() -> None:
    raise ValueError("in the pool")


def fail_after_a_secret() -> None:
    try:
        connect()
    except OSError as error:
        raise ValueError("in the pool") from error


def connect() -> None:
    raise OSError("password=hunter2")


def leave() -> None:
    sys.exit(3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_sigterm() -> None:
    """Let a broken pool not end this process. It initializes the process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def note_pid_and_hang(begun: str) -> None:
    """Write the process's id into a file, and wait for longer than what the test waits for."""
    unnoticed = Path(f"{begun}.new")
    unnoticed.write_text(str(os.getpid()))
    unnoticed.rename(begun)
    time.sleep(90)  # is the call of C that no handler of a signal interrupts


def return_a_generator() -> Any:
    return (number for number in range(3))


def return_a_lock() -> Any:
    return threading.Lock()


def extend(by: float, file: str) -> tuple[float, float, bool]:
    """Extend the lock and work until the file exists; return the time left before and after."""
    lock = current_lock()
    assert lock is not None
    left_before = lock.seconds_left
    lock.extend(by)
    left = lock.seconds_left
    wait_for(file)
    return left_before, left, lock.lost


def until_lost() -> str:
    """Work until the lock is lost."""
    lock = current_lock()
    assert lock is not None
    assert not lock.lost
    abandon_at = time.monotonic() + 30
    while not lock.lost and time.monotonic() < abandon_at:
        time.sleep(0.01)
    return "lost" if lock.lost else "held"


def wait_for(file: str, begun: str | None = None) -> None:
    """Work until the file exists.

    :param begun: a file that is made first
    """
    if begun is not None:
        Path(begun).touch()
    abandon_at = time.monotonic() + 90  # because the test may have failed
    while not Path(file).exists() and time.monotonic() < abandon_at:
        time.sleep(0.01)
