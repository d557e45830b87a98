"""Imports jobs from the table of an APScheduler ``SQLAlchemyJobStore`` (the *old table*).

That store pickles its jobs, and reading a pickle can run any code. So the caller has to trust the
old table. The import does not change the old table.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from apscheduler.job import Job
from apscheduler.jobstores.base import ConflictingIdError
from sqlalchemy import LargeBinary, NullPool, column, create_engine, func, select, table
from sqlalchemy.engine import URL
from sqlalchemy.exc import ProgrammingError

from apscheduler_tasklock._database.sqlstates import one_line
from apscheduler_tasklock._database.url import as_url
from apscheduler_tasklock._runs.trigger_times import following_run_time
from apscheduler_tasklock.decorator import function_options
from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError
from apscheduler_tasklock.jobstore.store import TaskLockJobStore
from apscheduler_tasklock.options import RESERVED_KEY, check_stored_options, resolve


@dataclass(frozen=True)
class ImportedJob:
    """A job of the old table, and the outcome of its import.

    :ivar id: the job's id
    :ivar outcome: ``"added"``; ``"there already"``: the job store has a job of this id, which the
        import did not change; ``"not taken over"``: the job could not be imported
    :ivar reason: why the job could not be imported, or ``None``
    """

    id: str
    outcome: Literal["added", "there already", "not taken over"]
    reason: str | None = None


@dataclass(frozen=True)
class _OldJobs:
    """The ids and pickles of the old table, and the database's time."""

    rows: list[tuple[str, bytes]]
    read_at: datetime


def import_jobs(
    store: TaskLockJobStore, source: str, *, late: bool = False
) -> Iterator[ImportedJob]:
    """Add the jobs of an old table to a job store, unless it has them; yield each job's outcome.

    Jobs keep their next run times, and paused jobs stay paused. The store need not be started.

    :param source: the old table, in the job store's database; ``schema.table`` if its schema is not
        on the ``search_path``
    :param late: whether to add jobs whose last run time has passed. Such a job runs at once. A
        second import would run it again, because the job store removes a job after its last run.
    :raises TaskLockSchemaError: the job store's tables are missing, old or not permitted
    :raises TaskLockDatabaseError: the database is unavailable
    :raises TaskLockError: the old table cannot be read
    """
    store.user.rights.check(jobs=True)
    old = _read(as_url(store.user.settings.database), source)
    for job_id, pickled in old.rows:
        try:
            job = _unpickled(pickled)
            if not late and _is_over(job, old.read_at):
                reason = (
                    f"its last run time, {job.next_run_time}, has passed; with --late it is "
                    "imported and runs at once"
                )
                yield ImportedJob(job_id, "not taken over", reason)
                continue
            _check_options(job)
            store.add_job(job)
        except ConflictingIdError:
            yield ImportedJob(job_id, "there already")
        except TaskLockOptionError as error:
            reason = str(error).removeprefix(f"job {job_id!r}: ")
            yield ImportedJob(job_id, "not taken over", reason)
        except TaskLockError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  # unpickling can raise anything
            reason = f"{type(error).__name__}: {error}"
            yield ImportedJob(job_id, "not taken over", reason)
        else:
            yield ImportedJob(job_id, "added")


def _read(url: URL, source: str) -> _OldJobs:
    schema, _, name = source.rpartition(".")
    old = table(
        name,
        column("id"),
        column("next_run_time"),
        column("job_state", LargeBinary()),
        schema=schema or None,
    )
    wanted = select(old.c.id, old.c.job_state).order_by(old.c.next_run_time, old.c.id)
    engine = create_engine(url, poolclass=NullPool)
    try:
        with engine.connect() as connection:
            found = connection.execute(wanted).all()
            read_at = connection.execute(select(func.now())).scalar_one()
    except ProgrammingError as error:
        raise TaskLockError(
            f"the table {source} cannot be read as one of SQLAlchemyJobStore: "
            f"{one_line(error.orig or error)}"
        ) from None
    return _OldJobs([(job_id, bytes(state)) for job_id, state in found], read_at)


def _unpickled(pickled: bytes) -> Any:
    job = Job.__new__(Job)
    job.__setstate__(pickle.loads(pickled))  # noqa: S301  # the caller trusts the old table
    return job


def _check_options(job: Any) -> None:
    """Check a job's own lock options. The options of its executor are not known here.

    :raises TaskLockOptionError: an option is invalid, or makes no sense in the job store
    """
    where = f"job {job.id!r}"
    options = resolve(job.kwargs.get(RESERVED_KEY), function_options(job.func), where=where)
    if options is not False:
        check_stored_options(options, where)


def _is_over(job: Any, now: datetime) -> bool:
    """Return whether a job's next run time has passed, and no other run time follows."""
    due = job.next_run_time
    if due is None or due.timestamp() > now.timestamp():
        return False
    local = now.astimezone(due.tzinfo)
    return following_run_time(job.trigger, local, local) is None
