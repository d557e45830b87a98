"""Helpers for the tests of applications that use task locks: no database, no waits.

``held_lock`` gives a job a lock. ``unlocked`` grants every claim. ``in_memory_locks`` decides on
claims as PostgreSQL would.

To import this package, only APScheduler has to be installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from apscheduler_tasklock.testing.held import held_lock

if TYPE_CHECKING:
    from apscheduler_tasklock.testing.standing_in import in_memory_locks, unlocked

__all__ = ["held_lock", "in_memory_locks", "unlocked"]

# These names are imported at their first use, because they need the library's other dependencies.
_LATE = ("in_memory_locks", "unlocked")


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.standing_in"), name)
