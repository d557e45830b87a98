"""Runs each APScheduler job once per window, however many replicas schedule it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from apscheduler_tasklock.context import HeldLock, current_lock
from apscheduler_tasklock.decorator import task_lock
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
    TaskLockRefusedError,
    TaskLockSchemaError,
)
from apscheduler_tasklock.events import (
    EVENT_TASK_LOCK_ALL,
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockEvent,
)
from apscheduler_tasklock.executor import TaskLockExecutor
from apscheduler_tasklock.locks import TaskLocks

if TYPE_CHECKING:
    from apscheduler_tasklock.schema import downgrade, include_name, migrate, upgrade

__all__ = [
    "EVENT_TASK_LOCK_ALL",
    "EVENT_TASK_LOCK_ERROR",
    "EVENT_TASK_LOCK_GRANTED",
    "EVENT_TASK_LOCK_LOST",
    "EVENT_TASK_LOCK_REFUSED",
    "EVENT_TASK_LOCK_RELEASED",
    "HeldLock",
    "TaskLockDatabaseError",
    "TaskLockError",
    "TaskLockEvent",
    "TaskLockExecutor",
    "TaskLockOptionError",
    "TaskLockRefusedError",
    "TaskLockSchemaError",
    "TaskLocks",
    "current_lock",
    "downgrade",
    "include_name",
    "migrate",
    "task_lock",
    "upgrade",
]


def __getattr__(name: str) -> Any:
    """Import what needs Alembic when it is asked for; a replica that only runs jobs never does."""
    if name in ("downgrade", "include_name", "migrate", "upgrade"):
        from apscheduler_tasklock import schema

        return getattr(schema, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
