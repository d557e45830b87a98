"""Runs each APScheduler job once, however many processes run the scheduler."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from apscheduler_tasklock.decorator import task_lock
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockGiveUp,
    TaskLockNotFoundError,
    TaskLockOptionError,
    TaskLockRefusedError,
    TaskLockRetry,
    TaskLockSchemaError,
    TaskLockStateError,
    TaskLockUnknownError,
)
from apscheduler_tasklock.lock import HeldLock, current_lock
from apscheduler_tasklock.status import (
    DueTimes,
    Durations,
    Finding,
    Freed,
    Health,
    JobMoved,
    JobState,
    JobStatus,
    Lane,
    LaneEntry,
    Lanes,
    MissCause,
    OptionSource,
    Overview,
    Pause,
    PauseChange,
    ReplicaState,
    ReplicaStatus,
    Run,
    RunningRun,
    RunRequest,
    Spread,
    Story,
    TaskState,
    TaskStatus,
    Verdict,
)

if TYPE_CHECKING:
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
    from apscheduler_tasklock.jobstore.store import TaskLockJobStore
    from apscheduler_tasklock.locks import TaskLocks
    from apscheduler_tasklock.schema.migrations import downgrade, include_name, migrate, upgrade

__all__ = [
    "EVENT_TASK_LOCK_ALL",
    "EVENT_TASK_LOCK_ERROR",
    "EVENT_TASK_LOCK_GRANTED",
    "EVENT_TASK_LOCK_LOST",
    "EVENT_TASK_LOCK_REFUSED",
    "EVENT_TASK_LOCK_RELEASED",
    "DueTimes",
    "Durations",
    "Finding",
    "Freed",
    "Health",
    "HeldLock",
    "JobMoved",
    "JobState",
    "JobStatus",
    "Lane",
    "LaneEntry",
    "Lanes",
    "MissCause",
    "OptionSource",
    "Overview",
    "Pause",
    "PauseChange",
    "ReplicaState",
    "ReplicaStatus",
    "Run",
    "RunRequest",
    "RunningRun",
    "Spread",
    "Story",
    "TaskLockDatabaseError",
    "TaskLockError",
    "TaskLockEvent",
    "TaskLockExecutor",
    "TaskLockGiveUp",
    "TaskLockJobStore",
    "TaskLockNotFoundError",
    "TaskLockOptionError",
    "TaskLockRefusedError",
    "TaskLockRetry",
    "TaskLockSchemaError",
    "TaskLockStateError",
    "TaskLockUnknownError",
    "TaskLocks",
    "TaskState",
    "TaskStatus",
    "Verdict",
    "current_lock",
    "downgrade",
    "include_name",
    "migrate",
    "task_lock",
    "upgrade",
]

# These names are imported when they are asked for, because `TaskLocks` works without APScheduler, a
# replica that only runs jobs does not need Alembic, and a test of job functions needs no driver.
_LATE = {
    "events": ("TaskLockEvent", *(name for name in __all__ if name.startswith("EVENT_"))),
    "executor": ("TaskLockExecutor",),
    "jobstore.store": ("TaskLockJobStore",),
    "locks": ("TaskLocks",),
    "schema.migrations": ("downgrade", "include_name", "migrate", "upgrade"),
}
_MODULE_OF = {name: module for module, names in _LATE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
