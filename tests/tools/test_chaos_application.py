"""What the chaos notes of the task lock table: the end of a lease, and what looks like one."""

from __future__ import annotations

from typing import Any

import psycopg

from tests.chaos.application import create_tables, read_events
from tests.support.rows import RUNNING, add_task

LEASE_ENDED = "lease ended"
# As a worker process's parent ends the lease of a dead run.
END_LEASE = "UPDATE task_lock SET locked_until = LEAST(locked_until, now())"


def test_a_lease_ends_only_with_a_time_that_has_come(
    direct_url: str, connection: psycopg.Connection[Any]
) -> None:
    """A renewal near the end of the maximum lock writes the row as it is, with a later time."""
    create_tables(direct_url)
    add_task(connection, "job", **RUNNING)
    connection.execute("UPDATE task_lock SET locked_until = locked_until")
    assert [event.kind for event in read_events(direct_url, 0.0)] == ["claimed"]
    for _ in range(2):  # the second time it has ended before
        connection.execute(END_LEASE)
    assert [event.kind for event in read_events(direct_url, 0.0)] == [
        "claimed",
        LEASE_ENDED,
        LEASE_ENDED,
    ]


def test_a_run_that_overran_its_maximum_lock_is_given_up_without_a_death(
    direct_url: str, connection: psycopg.Connection[Any]
) -> None:
    create_tables(direct_url)
    add_task(connection, "job", **RUNNING)
    connection.execute("UPDATE task_lock SET finished_at = now(), last_outcome = 'overran'")
    assert [event.kind for event in read_events(direct_url, 0.0)] == ["claimed", "given up"]
