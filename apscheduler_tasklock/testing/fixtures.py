"""Fixtures for pytest: ``pytest_plugins = ["apscheduler_tasklock.testing.fixtures"]``.

They are loaded by that line alone. A plugin that pytest finds by itself would import this library,
and rewrite its assertions, in the tests of all who have it installed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.testing.held import held_lock


@pytest.fixture
def held_task_lock(request: pytest.FixtureRequest) -> Iterator[HeldLock]:
    """Give the test a held lock that has its own name, which is ``current_lock()``."""
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
