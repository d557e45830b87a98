"""Fixtures for pytest: ``pytest_plugins = ["apscheduler_tasklock.testing.fixtures"]``.

The fixtures have no entry point, because pytest would then load them in each project that has the
library installed, and would import the library and rewrite its assertions there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.testing.held import held_lock


@pytest.fixture
def held_task_lock(request: pytest.FixtureRequest) -> Iterator[HeldLock]:
    """Yield a held lock, which is ``current_lock()``. Its name is the test's name."""
    with held_lock(request.node.name) as lock:
        yield lock


@pytest.fixture
def task_lock_unlocked() -> Iterator[None]:
    """Grant every claim in this process, without a database."""
    from apscheduler_tasklock.testing.standing_in import unlocked

    with unlocked():
        yield


@pytest.fixture
def task_lock_in_memory() -> Iterator[None]:
    """Decide on the claims of this process in memory, by the rule of the database."""
    from apscheduler_tasklock.testing.standing_in import in_memory_locks

    with in_memory_locks():
        yield
