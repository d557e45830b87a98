"""Operators' changes of stored jobs. They are users' changes, made without a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from apscheduler_tasklock._database.sqlstates import RowLockedError
from apscheduler_tasklock._lock.database import Database
from apscheduler_tasklock._lock.job_rows import (
    LOCKED_JOB,
    MOST_CHANGES,
    JobAction,
    JobChange,
    JobRow,
    JobRows,
    unsaved,
)
from apscheduler_tasklock._lock.statements import probe
from apscheduler_tasklock.errors import TaskLockNotFoundError, TaskLockStateError
from apscheduler_tasklock.status import JobMoved

Answer = TypeVar("Answer")

# What may have been done, in words.
_WHETHER = {
    "job-paused": "the job was paused",
    "job-resumed": "the job was resumed",
    "job-moved": "the job was moved",
    "job-removed": "the job was removed",
    "run": "the job was made due",
}


class JobChanges:
    """Changes of single jobs of the job store.

    The methods change next run times and remove rows, and neither read nor sign definitions. So
    they also work for jobs whose rows cannot be read or verified.

    Each change leaves an entry in the run history of the job's task, if the task has a row.

    :param database: sends the statements
    :param by: the operator's name
    """

    def __init__(self, database: Database, by: str) -> None:
        self._database = database
        self._by = by

    def pause(self, job_id: str) -> JobMoved:
        """Remove a job's next run time."""
        return self._move(job_id, "job-paused", lambda _row: None)

    def resume(
        self, job_id: str, first_run_time: Callable[[JobRow, datetime], datetime]
    ) -> JobMoved:
        """Give a paused job its first run time from now on.

        A job that is not paused is not changed.

        :param first_run_time: returns the job's first run time from a moment on
        """

        def resumed(row: JobRow) -> datetime:
            return row.next_run_time or first_run_time(row, self._ask(self._database.jobs.now))

        return self._move(job_id, "job-resumed", resumed)

    def move(self, job_id: str, to: datetime) -> JobMoved:
        """Set a job's next run time."""
        return self._move(job_id, "job-moved", lambda _row: to)

    def make_due(self, job_id: str) -> JobMoved:
        """Set a job's next run time to the database's time."""
        return self._move(job_id, "run", lambda _row: self._ask(self._database.jobs.now))

    def remove(self, job_id: str) -> bool:
        """Remove a job.

        :return: whether this call has removed the job. Otherwise the answer of its first statement
            was lost, the job is not there any more, and nothing tells who has removed it.
        """
        row = self._read(job_id)
        action = JobAction("job-removed", self._by, uuid4())

        def remove(cursor: Any, *, in_doubt: bool) -> bool | None:
            task_name = None if row is None else row.task_name
            if self._database.jobs.remove(cursor, job_id, action, task_name):
                return True
            if not in_doubt:
                return None
            cursor.execute(probe(self._database.table))
            return False

        is_done = None if row is None and "\0" in job_id else self._act(remove, action)
        if not is_done and (is_done is None or self._read(job_id, ended=True) is not None):
            raise self._why_not(job_id)
        return is_done

    def _move(
        self, job_id: str, outcome: str, next_run_time: Callable[[JobRow], datetime | None]
    ) -> JobMoved:
        """Set a job's next run time to what a function returns for its row.

        The change is made if the row still has its version, also if a claim has moved the job on
        since the read. Only :meth:`resume` computes a time from the row, and it changes only paused
        jobs, which no claim moves on.

        :param outcome: what the operator does, for the run history
        :raises TaskLockNotFoundError: there is no such job
        :raises TaskLockStateError: the job has ended
        """
        action_id = uuid4()
        for _ in range(MOST_CHANGES):
            row = self._read(job_id)
            if row is None:
                raise self._why_not(job_id)
            wanted = next_run_time(row)
            was_paused = row.next_run_time is None
            if wanted == row.next_run_time:
                return JobMoved(job_id, wanted, was_paused, is_changed=False)
            reason = None
            if wanted is not None and outcome != "run":
                utc = wanted.astimezone(timezone.utc)
                reason = f"next run time {utc:%Y-%m-%d %H:%M:%S UTC}"
            action = JobAction(outcome, self._by, action_id, reason)
            change = partial(
                _changed,
                self._database.jobs,
                job_id=job_id,
                version=row.version,
                change=JobChange({}, wanted, task_name=None, defines=False),
                changed_id=action_id,
                moves=True,
                action=action,
            )
            if self._act(change, action):
                return JobMoved(job_id, wanted, was_paused, is_changed=True)
        raise unsaved(job_id)

    def _read(self, job_id: str, *, ended: bool = False) -> JobRow | None:
        if "\0" in job_id:  # because PostgreSQL's texts have no NUL
            return None
        return self._ask(partial(self._database.jobs.read, job_id=job_id, ended=ended))

    def _why_not(self, job_id: str) -> TaskLockNotFoundError | TaskLockStateError:
        """Return the error that says why there is no job to change."""
        if self._read(job_id, ended=True) is None:
            return TaskLockNotFoundError([job_id], "job")
        return TaskLockStateError(
            f"job {job_id!r} has ended: its last run time was claimed, and it is removed when that "
            "run and its retries are over"
        )

    def _act(self, statement: Callable[..., Answer], action: JobAction) -> Answer:
        with _naming_the_table():
            return self._database.act(statement, _WHETHER[action.outcome])

    def _ask(self, statement: Callable[[Any], Answer]) -> Answer:
        with _naming_the_table():
            return self._database.ask(statement)


def _changed(jobs: JobRows, cursor: Any, *, in_doubt: bool, **wanted: Any) -> bool:
    """Change a job; return whether it is changed. Also a doubt is ended by the ids of the call."""
    del in_doubt
    return jobs.change(cursor, **wanted)


@contextmanager
def _naming_the_table() -> Iterator[None]:
    """Let the error of a locked row name the table."""
    try:
        yield
    except RowLockedError as error:
        raise RowLockedError(LOCKED_JOB) from error
