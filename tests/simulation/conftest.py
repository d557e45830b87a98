"""The fixture of the simulation's tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.simulation.jobs_side import SimulatedRun
from tests.simulation.side import simulating
from tests.simulation.world import replaced
from tests.support.waist import executor_runs


@pytest.fixture
def simulation() -> Iterator[None]:
    """Replace the real clock by the virtual one."""
    # Log lines are off, because there are many, and none is about a real database.
    logging.disable(logging.CRITICAL)
    try:
        with simulating(), replaced((executor_runs, "ExecutorRun", SimulatedRun)):
            yield
    finally:
        logging.disable(logging.NOTSET)
