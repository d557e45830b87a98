"""What the README shows, and statements that the documentation gives, are run as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import HeldLock
from apscheduler_tasklock._lock.replica import LockSettings
from tests.support import claims
from tests.support.polling import eventually
from tests.support.waist import LockClient, Refusal


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def locks(database_url: str) -> Iterator[LockClient]:
    locks = LockClient(LockSettings(database_url, "replica"))
    yield locks
    locks.close()


def test_the_first_example_runs(
    checkout: Path, database_url: str, connection: psycopg.Connection[Any]
) -> None:
    example = blocks(checkout / "README.md", "python")[0]
    assert "postgresql://app:secret@localhost/app" in example
    example = example.replace("postgresql://app:secret@localhost/app", database_url)
    example = example.replace("minutes=5", "seconds=1")
    claimed = "SELECT FROM task_lock WHERE kind IS NOT NULL"
    names: dict[str, Any] = {}
    exec(example, names)  # noqa: S102  # the README's own code
    try:
        eventually(lambda: connection.execute(claimed).rowcount == 1)
        assert {job.id for job in names["scheduler"].get_jobs()} == {"sync-prices"}
    finally:
        names["scheduler"].shutdown()


def test_a_stuck_task_is_found_and_freed_by_the_statements_given(
    checkout: Path, locks: LockClient, connection: psycopg.Connection[Any]
) -> None:
    find, free = blocks(checkout / "docs/how-to/stuck-task.md", "sql")
    times = {"min_lock": 0.0, "max_lock": 3600.0}
    held = claims.held(locks, "clean-up", **times)
    [(name, holder, token, *_)] = connection.execute(find).fetchall()
    assert (name, holder, token) == ("clean-up", "replica", held.token)

    connection.execute(free)
    assert isinstance(claims.claim(locks, "clean-up", **times), Refusal)
    connection.execute(re.sub(r"token = \d+", f"token = {held.token}", free))
    assert connection.execute(find).fetchall() == []
    # The holder, should it still live, finds out.
    assert locks.release(held) is None
    assert isinstance(claims.claim(locks, "clean-up", **times), HeldLock)
