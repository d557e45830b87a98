"""The embedded server of tests, demo and benchmarks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from apscheduler_tasklock.demo.server import EmbeddedServer

pytestmark = pytest.mark.own_server


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that each user may enter, as the one that the server runs as."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        yield Path(name)


def test_its_data_may_be_in_a_folder_of_ones_own_and_go_with_it(folder: Path) -> None:
    with EmbeddedServer(data_in=folder):
        [own] = folder.iterdir()
        assert (own / "data" / "PG_VERSION").exists()
    assert not list(folder.iterdir())
