"""The job store that all replicas share, with schedulers in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest

from tests.support.stored_jobs import StoreReplica, note

Make = Callable[..., StoreReplica]


@pytest.fixture
def key() -> str:
    """An id that no other test uses."""
    return f"job-{uuid4().hex[:8]}"


@pytest.fixture
def make(database_url: str) -> Iterator[Make]:
    """Make and start a replica with the job store; it is shut down after the test."""
    with ExitStack() as closing:

        def make(*, start: bool = True, **options: Any) -> StoreReplica:
            replica = StoreReplica(database_url, **options)
            if start:
                replica.start()
            closing.callback(replica.shutdown)
            return replica

        yield make


def test_a_job_runs_once_wherever_it_was_added(make: Make, key: str) -> None:
    replicas = [make(replica_id=f"replica {number}") for number in range(3)]
    replicas[0].run_at(note, key)
    assert len(replicas[0].runs(key)) == 1
