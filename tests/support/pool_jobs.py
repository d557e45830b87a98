"""Job functions that a worker process can import."""

from __future__ import annotations

import os
import signal
import sys
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


def redacted(text: str, error: BaseException) -> str:
    return f"{text} {type(error).__name__}"


def leave() -> None:
    sys.exit(3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(file: str, begun: str | None = None) -> None:
    """Work until somebody makes the file.

    :param begun: a file that is made first
    """
    if begun is not None:
        Path(begun).touch()
    while not Path(file).exists():
        time.sleep(0.01)
