"""Draining a scheduler: running jobs end before it is shut down, and nothing begins meanwhile.

The extensions for web frameworks do this first. APScheduler's own shutdown waits for jobs with the
scheduler's locks held, and so for ever if a job or a listener calls the scheduler.
"""

from __future__ import annotations

from typing import Any

from apscheduler_tasklock._scheduler.adapter import executors_of
from apscheduler_tasklock.executor import TaskLockExecutor


def task_lock_executors(scheduler: Any) -> list[TaskLockExecutor]:
    """Return a scheduler's executors that have the task lock."""
    return [e for e in executors_of(scheduler) if isinstance(e, TaskLockExecutor)]


def stop_claiming(scheduler: Any) -> None:
    """Let nothing begin any more on a scheduler that runs, on none of its executors."""
    if scheduler.running:
        scheduler.pause()  # what needs no claim would still begin
    for executor in task_lock_executors(scheduler):
        executor.locks.stop_claiming()


def drain(scheduler: Any) -> None:
    """Let nothing begin any more, and wait until running jobs have ended."""
    stop_claiming(scheduler)
    for executor in task_lock_executors(scheduler):
        executor.drain()
