"""Operators' changes of stored jobs. They are users' changes, made without a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from apscheduler_tasklock._database.sqlstates import RowLockedError
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.job_rows import (
    LOCKED_JOB,
    MOST_CHANGES,
    JobAction,
    JobChange,
    JobRow,
    is_removed,
    unsaved,
)
from apscheduler_tasklock.errors import TaskLockNotFoundError, TaskLockStateError

Answer = TypeVar("Answer")
Moment = TypeVar("Moment", bound="datetime | None")


class JobChanges:
    """Changes of single jobs of the job store.

    The methods change next run times and remove rows, and neither read nor sign definitions. So
    they also work for jobs whose rows cannot be read or verified.

    Each change leaves an entry in the run history of the job's task, if the task has a row.

    :param client: sends the statements
    :param by: the operator's name
    """

    def __init__(self, client: LockClient, by: str) -> None:
        self._client = client
        self._by = by

    def pause(self, job_id: str) -> None:
        """Remove a job's next run time."""
        self._move(job_id, "job-paused", lambda _row: None)

    def resume(
        self, job_id: str, first_run_time: Callable[[JobRow, datetime], datetime]
    ) -> datetime:
        """Give a paused job its first run time from now on; return the job's next run time.

        A job that is not paused is not changed.

        :param first_run_time: returns the job's first run time from a moment on
        """

        def resumed(row: JobRow) -> datetime:
            return row.next_run_time or first_run_time(row, self._ask(self._client.jobs.now))

        return self._move(job_id, "job-resumed", resumed)

    def move(self, job_id: str, to: datetime) -> None:
        """Set a job's next run time."""
        self._move(job_id, "job-moved", lambda _row: to)

    def make_due(self, job_id: str) -> None:
        """Set a job's next run time to the database's time."""
        self._move(job_id, "run", lambda _row: self._ask(self._client.jobs.now))

    def remove(self, job_id: str) -> None:
        """Remove a job."""
        action = JobAction("job-removed", self._by)
        if not is_removed(self._ask, self._client.jobs, job_id, action):
            raise self._why_not(job_id)

    def _move(self, job_id: str, outcome: str, next_run_time: Callable[[JobRow], Moment]) -> Moment:
        """Set a job's next run time to what a function returns for its row, and return the time.

        The change is made if the row still has its version, also if a claim has moved the job on
        since the read. Only :meth:`resume` computes a time from the row, and it changes only paused
        jobs, which no claim moves on.

        :param outcome: what the operator does, for the run history
        :raises TaskLockNotFoundError: there is no such job
        :raises TaskLockStateError: the job has ended
        """
        for _ in range(MOST_CHANGES):
            row = self._read(job_id)
            if row is None:
                raise self._why_not(job_id)
            wanted = next_run_time(row)
            if wanted == row.next_run_time:
                return wanted
            reason = None
            if wanted is not None and outcome != "run":
                utc = wanted.astimezone(timezone.utc)
                reason = f"next run time {utc:%Y-%m-%d %H:%M:%S UTC}"
            change = partial(
                self._client.jobs.change,
                job_id=job_id,
                version=row.version,
                change=JobChange({}, wanted, task_name=None, defines=False),
                changed_id=uuid4(),
                moves=True,
                action=JobAction(outcome, self._by, reason),
            )
            if self._ask(change):
                return wanted
        raise unsaved(job_id)

    def _read(self, job_id: str, *, ended: bool = False) -> JobRow | None:
        if "\0" in job_id:  # because PostgreSQL's texts have no NUL
            return None
        return self._ask(partial(self._client.jobs.read, job_id=job_id, ended=ended))

    def _why_not(self, job_id: str) -> TaskLockNotFoundError | TaskLockStateError:
        """Return the error that says why there is no job to change."""
        if self._read(job_id, ended=True) is None:
            return TaskLockNotFoundError([job_id], "job")
        return TaskLockStateError(
            f"job {job_id!r} has ended: its last run time was claimed, and it is removed when that "
            "run and its retries are over"
        )

    def _ask(self, statement: Callable[[Any], Answer]) -> Answer:
        try:
            return self._client.ask(statement)
        except RowLockedError as error:
            raise RowLockedError(LOCKED_JOB) from error
