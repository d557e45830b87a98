"""Rows of the job store, for tests of its statements."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import psycopg

from apscheduler_tasklock._lock.job_rows import JobChange

Connection = psycopg.Connection[Any]


def change_job(now: datetime, due_in: float | None = 0.0, **change: Any) -> JobChange:
    """Return a user's change of a job that is then due in so many seconds, or paused."""
    columns = {
        "func": "jobs:job",
        "trigger": {"type": "interval"},
        "options": {},
        "arguments": {"args": []},
        "executor": "default",
        "signature": None,
    }
    task_name = change.pop("task_name", None)
    run_time = None if due_in is None else now + timedelta(seconds=due_in)
    return JobChange({**columns, **change}, run_time, task_name)


def job_row(connection: Connection, job_id: str = "job") -> dict[str, Any]:
    """Return the row of a job, by column."""
    cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
    found = cursor.execute("SELECT * FROM task_lock_job WHERE id = %s", [job_id]).fetchone()
    assert found is not None
    return found


def wal_bytes(connection: Connection, do: Callable[[], object]) -> int:
    """Return the bytes of WAL that a call has written."""
    position = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
    before = connection.execute(position).fetchone()
    do()
    after = connection.execute(position).fetchone()
    assert before is not None
    assert after is not None
    return int(after[0] - before[0])
