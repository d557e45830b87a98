"""What the chaos notes of the task lock table: the end of a lease, and what looks like one."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.chaos.application import create_tables, read_events
from tests.support.rows import RUNNING, add_task
from tests.support.waist import ReleaseRequest, RunOutcome, WindowAfter, statements_of

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


@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_run_that_overran_its_maximum_lock_was_given_up_or_has_ended(
    direct_url: str, connection: psycopg.Connection[Any], is_given_up: bool
) -> None:
    create_tables(direct_url)
    add_task(connection, "job", **RUNNING, overran="true")
    connection.execute("UPDATE task_lock SET locked_until = now() - interval '1 s'")
    [(claim_id,)] = connection.execute("SELECT claim_id FROM task_lock")
    replica = statements_of("one", connection)
    if is_given_up:
        replica.give_up(claim_id, "job")
    else:
        overran = RunOutcome(WindowAfter.KEEP, "overran")
        replica.ask(ReleaseRequest("job", claim_id, overran, token=7))
    kinds = [event.kind for event in read_events(direct_url, 0.0)]
    assert kinds == ["claimed", LEASE_ENDED, "given up" if is_given_up else "released"]
