"""Fixtures of the tests of the instruments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.fidelity.clock import TravellingDatabase, travelling_database


@pytest.fixture(scope="module")
def database() -> Iterator[TravellingDatabase]:
    """A database whose ``now()`` is set."""
    with travelling_database() as database:
        yield database
