"""For tests of applications that use task locks: without a database, and without waiting.

``held_lock`` gives a job a lock. ``unlocked`` grants every claim. ``in_memory_locks`` decides on
claims as PostgreSQL would. ``SimulatedReplicas`` runs an application's jobs on several replicas, on
a clock that is moved by hand.

To import this takes APScheduler alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from apscheduler_tasklock.testing.held import held_lock

if TYPE_CHECKING:
    from apscheduler_tasklock.testing.simulation import (
        SimulatedReplica,
        SimulatedReplicas,
        SimulatedRun,
    )
    from apscheduler_tasklock.testing.standing_in import in_memory_locks, unlocked

__all__ = [
    "SimulatedReplica",
    "SimulatedReplicas",
    "SimulatedRun",
    "held_lock",
    "in_memory_locks",
    "unlocked",
]

# Imported when they are asked for: they need the library's own dependencies, as a scheduler does.
_LATE = {
    "simulation": ("SimulatedReplica", "SimulatedReplicas", "SimulatedRun"),
    "standing_in": ("in_memory_locks", "unlocked"),
}
_MODULE_OF = {name: module for module, names in _LATE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
