"""Draining a scheduler before its shutdown: no run begins any more, and running jobs end.

The extensions for web frameworks drain a scheduler before they shut it down, because APScheduler's
own shutdown holds the scheduler's locks while it waits for jobs. A job or a listener that calls the
scheduler waits for these locks. So the job never ends, and the shutdown waits for ever.
"""

from __future__ import annotations

from typing import Any

from apscheduler_tasklock._runs.adapter import executors_of
from apscheduler_tasklock.executor import TaskLockExecutor


def task_lock_executors(scheduler: Any) -> list[TaskLockExecutor]:
    """Return the executors of a scheduler that are a ``TaskLockExecutor``."""
    return [e for e in executors_of(scheduler) if isinstance(e, TaskLockExecutor)]


def stop_claiming(scheduler: Any) -> None:
    """Let no run begin any more on a scheduler."""
    if scheduler.running:
        scheduler.pause()  # because `locks.stop_claiming` does not stop runs without a lock
    for executor in task_lock_executors(scheduler):
        executor.locks.stop_claiming()


def drain(scheduler: Any) -> None:
    """Let no run begin any more on a scheduler, and wait until running jobs have ended."""
    stop_claiming(scheduler)
    for executor in task_lock_executors(scheduler):
        executor.drain()
