"""Draining a scheduler before its shutdown: no run begins any more, and running jobs end.

Before that, SIGTERM has to end the process in the usual way: see ``end_on_sigterm``.

The extensions for web frameworks drain a scheduler before they shut it down, because APScheduler's
own shutdown holds the scheduler's locks while it waits for jobs. A job or a listener that calls the
scheduler waits for these locks. So the job never ends, and the shutdown waits for ever.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from apscheduler_tasklock._runs.adapter import executors_of
from apscheduler_tasklock.executor import TaskLockExecutor


def end_on_sigterm() -> None:
    """Let SIGTERM end the interpreter in the usual way, with the exit status 0.

    So running jobs end and are released. By default SIGTERM kills a process, and the first process
    of a container ignores it. A handler of the application stays.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def task_lock_executors(scheduler: Any) -> list[TaskLockExecutor]:
    """Return the executors of a scheduler that are a ``TaskLockExecutor``."""
    return [e for e in executors_of(scheduler) if isinstance(e, TaskLockExecutor)]


def stop_claiming(scheduler: Any) -> None:
    """Let no run begin any more on a scheduler."""
    if scheduler.running:
        scheduler.pause()  # because `user.stop_claiming` does not stop runs without a lock
    for executor in task_lock_executors(scheduler):
        executor.user.stop_claiming()


def drain(scheduler: Any) -> None:
    """Let no run begin any more on a scheduler, and wait until running jobs have ended."""
    stop_claiming(scheduler)
    for executor in task_lock_executors(scheduler):
        executor.drain()
