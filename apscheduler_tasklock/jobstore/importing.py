"""Takes over the jobs that APScheduler's ``SQLAlchemyJobStore`` has kept in a table.

That store pickles its jobs. Reading a pickle runs what it says, so only a table is read that the
caller trusts. Nothing in it is changed.
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

from apscheduler_tasklock._database.errors import one_line
from apscheduler_tasklock._database.url import as_url
from apscheduler_tasklock._scheduler.triggers import following_run_time
from apscheduler_tasklock.decorator import function_options
from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError
from apscheduler_tasklock.jobstore.store import TaskLockJobStore
from apscheduler_tasklock.options import RESERVED_KEY, check_stored_options, resolve


@dataclass(frozen=True)
class ImportedJob:
    """What became of a job of the old table.

    :ivar id: the job's id
    :ivar outcome: ``"there already"``: the job store has a job of this id, and was not changed
    :ivar reason: why it could not be taken over; ``None`` if it was, or was there
    """

    id: str
    outcome: Literal["added", "there already", "not taken over"]
    reason: str | None = None


@dataclass(frozen=True)
class _OldJobs:
    """The rows of the old table: ids and pickles; and the database's time."""

    rows: list[tuple[str, bytes]]
    read_at: datetime


def import_jobs(
    store: TaskLockJobStore, source: str, *, late: bool = False
) -> Iterator[ImportedJob]:
    """Add the jobs of an old table that a job store does not have yet; tell of each of them.

    They keep their next run times, and stay paused if they are. The store need not be started.

    :param source: the old table, in the job store's database; ``schema.table`` if it is in a schema
        that the ``search_path`` does not have
    :param late: whether a job is added whose last run time has passed. It runs at once, also if it
        was taken over before, has run, and is therefore gone from the job store.
    :raises TaskLockSchemaError: the job store's tables are missing, old or not permitted
    :raises TaskLockDatabaseError: the database is unavailable
    :raises TaskLockError: the old table cannot be read
    """
    store.locks.check(jobs=True)
    old = _read(as_url(store.locks.settings.database), source)
    for job_id, pickled in old.rows:
        try:
            job = _unpickled(pickled)
            if not late and _is_over(job, old.read_at):
                reason = (
                    f"its last run time, {job.next_run_time}, has passed; with --late it is taken "
                    "over, and runs at once"
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
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever unpickling and imports raise
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
    job.__setstate__(pickle.loads(pickled))  # noqa: S301  # whoever calls this trusts the table
    return job


def _check_options(job: Any) -> None:
    """Check a job's own lock options. Those of its executor are not known here.

    :raises TaskLockOptionError: they are invalid, or make no sense in the job store
    """
    where = f"job {job.id!r}"
    options = resolve(job.kwargs.get(RESERVED_KEY), function_options(job.func), where=where)
    if options is not False:
        check_stored_options(options, where)


def _is_over(job: Any, now: datetime) -> bool:
    """Tell whether a job's run time has passed, and no other follows."""
    due = job.next_run_time
    if due is None or due.timestamp() > now.timestamp():
        return False
    local = now.astimezone(due.tzinfo)
    return following_run_time(job.trigger, local, local) is None
