"""What psycopg makes of the statements."""

from __future__ import annotations

from psycopg._queries import MAX_CACHED_STATEMENT_LENGTH

from apscheduler_tasklock._lock.protocol import TaskLockProtocol
from apscheduler_tasklock.schema.table import task_lock_table


def test_psycopg_does_not_take_them_apart_each_time_that_they_are_sent() -> None:
    """It does that with longer ones, which costs as much as the round trip."""
    lengths = TaskLockProtocol(task_lock_table()).statement_lengths()
    assert len(lengths) >= 15
    assert max(lengths.values()) <= MAX_CACHED_STATEMENT_LENGTH, lengths
