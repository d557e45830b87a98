"""Fixtures of the tests of the recorded night: a database whose clock stands still."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.night.judge import moments_shown
from tests.night.recording import Moment, Night, stop_clock
from tests.night.said import Said
from tests.night.truth import Truth
from tests.support.databases import KeptDatabase
from tests.support.postgres import Server


@pytest.fixture(scope="session")
def kept_database(server: Server, template: str) -> Iterator[KeptDatabase]:
    kept = KeptDatabase(server, template, stop_clock)
    yield kept
    kept.drop()


@pytest.fixture(scope="session")
def recorded() -> Night:
    """The recorded night."""
    return Night.load()


@pytest.fixture(scope="session")
def truth(recorded: Night) -> Truth:
    """What its ledger tells."""
    return Truth(recorded.events)


@pytest.fixture
def shown(direct_url: str) -> Iterator[Callable[[Moment], Said]]:
    """Show a moment in the test's database, and return what is told of it."""
    with moments_shown(direct_url) as shown:
        yield shown
