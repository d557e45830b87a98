"""A replica with the job store, as its statements see one."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg

from apscheduler_tasklock._lock.job_rows import DueRow, DueRows, JobRows
from apscheduler_tasklock.schema.table import task_lock_table
from tests.contract.conftest import database_now
from tests.support.job_rows import change_job
from tests.support.waist import (
    ClaimAnswer,
    ClaimRequest,
    ClaimTimes,
    JobMove,
    Replica,
    StoredClaims,
)

Connection = psycopg.Connection[Any]
PERIOD = timedelta(seconds=60)


class StoreReplica(Replica):
    """A replica that has the job store as well."""

    def __init__(self, name: str, connection: Connection, lock_timeout: float = 10.0) -> None:
        super().__init__(name, connection, lock_timeout)
        self.jobs = JobRows(task_lock_table(), name)

    @property
    def now(self) -> datetime:
        return database_now(self.connection)

    def add(self, job_id: str = "job", *, due_in: float | None = 0.0, **change: Any) -> None:
        assert self.jobs.add(self.cursor, job_id, change_job(self.now, due_in, **change), uuid4())

    def change(self, job_id: str = "job", *, due_in: float | None = 0.0, **change: Any) -> None:
        """Change a job as a user does who has just read it."""
        found = self.jobs.read(self.cursor, job_id)
        assert found is not None
        asked = change_job(self.now, due_in, **change)
        assert self.jobs.change(self.cursor, job_id, found.version, asked, uuid4(), moves=True)

    def look(self, most: int = 9, **options: Any) -> DueRows:
        return self.jobs.read_due(self.cursor, {"default": most}, **options)

    def due(self, **options: Any) -> list[DueRow]:
        return list(self.look(**options).jobs)

    def ids(self, **options: Any) -> list[str]:
        return [found.row.id for found in self.due(**options)]

    def one(self, **options: Any) -> DueRow:
        [found] = self.due(**options)
        return found

    def claim_jobs(
        self, requests: Iterable[ClaimRequest], most: int = 9, *, stable: bool = True
    ) -> dict[UUID, ClaimAnswer]:
        times = ClaimTimes(stable=stable)
        return self.ask(StoredClaims(list(requests), times, most))

    def claim_job(self, found: DueRow, *, stable: bool = True, **asked: Any) -> ClaimAnswer:
        request = requested(found, **asked)
        return self.claim_jobs([request], stable=stable)[request.claim_id]

    def claims_job(self, found: DueRow, **asked: Any) -> bool:
        return self.claim_job(found, **asked).granted

    def pause_task(self, task: str) -> None:
        self.connection.execute(
            "UPDATE task_lock SET paused_at = now(), paused_until = NULL WHERE task_name = %s",
            [task],
        )


def step(found: DueRow, period: timedelta | None = PERIOD) -> JobMove:
    run_time = found.row.next_run_time
    assert run_time is not None
    following = None if period is None else run_time + period
    return JobMove(found.row.id, found.change_id, run_time, run_time, following)


def requested(
    found: DueRow, *, period: timedelta | None = PERIOD, task: str | None = None, **asked: Any
) -> ClaimRequest:
    move = step(found, period)
    given = {"runs": found.row.func, "lease": 10.0, "next_in": 60.0, "max_lock": 50.0, **asked}
    return ClaimRequest(
        task or f"task of {found.row.id}",
        min_lock=0.0,
        run_time=move.run_time,
        exact=True,
        move=move,
        **given,
    )
