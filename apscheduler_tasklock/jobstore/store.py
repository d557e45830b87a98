"""The job store that all replicas share."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from math import floor
from typing import Any, ClassVar, Literal, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_JOB_MISSED,
)
from apscheduler.jobstores.base import BaseJobStore, ConflictingIdError, JobLookupError
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.client import LockClient, client_at_start
from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock._lock.jobs import MOST_RECURRING, JobChange, JobRow, StoredTask
from apscheduler_tasklock._lock.stand_in import current_standing
from apscheduler_tasklock._scheduler.functions import check_runs
from apscheduler_tasklock._scheduler.notices import JobNotices
from apscheduler_tasklock._scheduler.submission import as_handed_out
from apscheduler_tasklock._scheduler.triggers import EndlessTriggerError, first_run_time
from apscheduler_tasklock._values import logger_of, shown
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
    TaskLockStateError,
)
from apscheduler_tasklock.events import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
)
from apscheduler_tasklock.executor import TaskLockExecutor
from apscheduler_tasklock.jobstore.bad_rows import Backoff
from apscheduler_tasklock.jobstore.definition import (
    Definition,
    JobCodec,
    MissingFunction,
    check_names,
)
from apscheduler_tasklock.jobstore.due import NO_LOCK, DueJobs
from apscheduler_tasklock.jobstore.inside import HandedOutJob, SchedulerInside, StoredJob
from apscheduler_tasklock.jobstore.triggers import starts_from_now
from apscheduler_tasklock.jobstore.trust import AllowedFunctions, Signer, UntrustedError
from apscheduler_tasklock.jobstore.values import UnreadableError
from apscheduler_tasklock.locks import lock_settings
from apscheduler_tasklock.options import parse_positive_seconds
from apscheduler_tasklock.schema.table import DEFAULT_TABLE, job_table

logger = logger_of(__name__)

Answer = TypeVar("Answer")

# Seconds for which a user's call is tried.
CALL_TIMEOUT = 2.0
# The same as a claim's: each attempt of a call is to end within a second.
_TIMEOUT = 3.0
# How often a change is tried whose job somebody else changes at the same time.
MOST_CHANGES = 20
# As far as clocks are no further off, an interval starts when its application says so: the question
# for the database's time takes a while, too.
_ON_THE_WAY = timedelta(seconds=1)
# APScheduler's default, which is meant for jobs that come again.
_DEFAULT_GRACE_TIME = 1

# Events after which a hand-out is no more: when its run has begun, and when it is over.
_BEGUN = EVENT_TASK_LOCK_GRANTED | EVENT_TASK_LOCK_REFUSED | EVENT_TASK_LOCK_ERROR
_OVER = EVENT_JOB_EXECUTED | EVENT_JOB_ERROR | EVENT_JOB_MISSED


class TaskLockJobStore(BaseJobStore):  # type: ignore[misc]  # APScheduler has no types
    """Jobs that all replicas share: added, changed, paused and removed on any, run on one.

    They are kept in PostgreSQL. What is due is handed out to one replica at a time, and moved to
    its next run time by the statement that claims its task lock. Use it with a
    :class:`TaskLockExecutor` on the same database; on any other executor its jobs are errors.

    Plugin alias: ``tasklock``

    :param database: PostgreSQL URL, or an SQLAlchemy ``Engine`` with psycopg: connections are
        opened as the engine opens its own, and its pool is not used
    :param functions: which functions jobs may call: packages, modules or functions by their dotted
        names, as ``["myapp."]``
    :param secret: signs the rows: a text or bytes of 16 bytes or more, or a list, of which the
        first signs and any verifies. ``functions`` or this has to be given, or both.
    :param serializer: ``"json"``, or ``"pickle"`` for triggers and arguments that JSON cannot hold,
        which needs a ``secret``
    :param schema: schema of the task lock table; by default up to the ``search_path``
    :param table: name of the task lock table, beside which the jobs' table lies
    :param poll_interval: longest time between two looks for due jobs, a ``timedelta`` or seconds
    :param replica_id: to whom jobs are handed out, shown to operators
    :raises TaskLockOptionError: an option is impossible, or neither ``functions`` nor ``secret`` is
        given
    """

    #: Tells a ``TaskLockExecutor`` that the jobs of this store are handed out.
    hands_out = True

    timings: ClassVar[Timings] = Timings()

    def __init__(
        self,
        database: str | URL | Engine,
        *,
        functions: Sequence[str] | str | None = None,
        secret: str | bytes | Sequence[str | bytes] | None = None,
        serializer: Literal["json", "pickle"] = "json",
        schema: str | None = None,
        table: str = DEFAULT_TABLE,
        poll_interval: timedelta | float | str = 1,
        replica_id: str | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        if not functions and secret is None:
            raise TaskLockOptionError(
                f"{where} needs functions=['myapp.'], the functions that jobs may call, or "
                "secret='...', which signs the rows: else whoever can write the table could run "
                "any code"
            )
        if serializer not in ("json", "pickle"):
            raise TaskLockOptionError(
                f"{where}: serializer must be 'json' or 'pickle', not {serializer!r}"
            )
        self._interval = parse_positive_seconds(poll_interval, "poll_interval", where)
        settings = lock_settings(
            database,
            replica_id=replica_id,
            claim_timeout=_TIMEOUT,
            schema=schema or None,  # a configuration file says '' for none
            table=table,
        )
        self.locks = LockClient(replace(settings, timings=self.timings))
        signer = None if secret is None else Signer(secret)
        pickles = serializer == "pickle"
        self._codec = JobCodec(AllowedFunctions(functions or None), signer, pickles=pickles)
        if pickles:
            logger.warning(
                "%s: what jobs are called with is pickled; who has the secret can run any code",
                where,
            )
        self._missing = Backoff()  # modules
        self._notices = JobNotices()  # of jobs that are left alone
        self._has_told_of_most = False
        self._has_told_of_instances = False
        self._told: WeakKeyDictionary[Any, object] = WeakKeyDictionary()  # executors
        self._inside: SchedulerInside | None = None
        self._due: DueJobs | None = None
        self._fails_until = 0.0  # on the monotonic clock: users' calls, while an outage lasts
        replace_in_each_child(self)

    def replace_in_child(self) -> None:
        """Leave the parent's connection alone. Called in a forked child, without a scheduler."""
        self.locks = self.locks.for_child()
        self._due = None
        self._notices = JobNotices()

    # ---- the scheduler's calls -----------------------------------------------------------------

    def start(self, scheduler: Any, alias: str) -> None:
        """Begin to look for due jobs. Called by the scheduler.

        :raises TaskLockSchemaError: a table is missing, old or not permitted
        :raises TaskLockOptionError: the scheduler has the same jobs under another alias, or an
            executor whose task locks are in another place
        :raises TaskLockStateError: a test has no database
        """
        if current_standing() is not None:
            raise TaskLockStateError(
                f"{type(self).__name__}: the jobs are in the database, and there is none: "
                "apscheduler_tasklock.testing stands in for it, without jobs. Give the scheduler "
                "APScheduler's memory store in this test, or test it on PostgreSQL"
            )
        super().start(scheduler, alias)
        if self._due is not None:  # the scheduler's last start failed after this one's
            self.shutdown()
        self.locks = client_at_start(self.locks, scheduler)
        inside = SchedulerInside(scheduler, alias)
        try:
            self._check_scheduler(inside)
            with suppress(TaskLockDatabaseError):  # logged as an outage
                self.locks.check(jobs=True)
        except BaseException:
            inside.leave()
            self.locks.close()
            raise
        self._inside = inside
        self._due = DueJobs(self.locks, inside, alias, self._codec, self._interval, self._notices)
        inside.add_listener(self._note_event, _BEGUN | _OVER)
        self._due.start()
        self.locks.listen(self._due.wake)
        logger.info(
            "The job store %r is shared by all replicas: database %s, table %r, replica %r",
            alias,
            self.locks.where,
            job_table(self.locks.table).fullname,
            self.locks.replica_id,
        )

    def _check_scheduler(self, inside: SchedulerInside) -> None:
        place = _place(self.locks)
        for store in inside.other_stores:
            if isinstance(store, TaskLockJobStore) and _place(store.locks) == place:
                raise TaskLockOptionError(
                    f"{type(self).__name__}: another job store of this scheduler has the same table"
                )
        for alias, executor in inside.executors.items():
            if self._is_misplaced(executor):
                raise TaskLockOptionError(self._say_misplaced(alias, executor))
        inside.accepts = self._accepts  # others may be added later
        inside.first_run_time = _first_of

    def is_beside(self, locks: LockClient) -> bool:
        """Tell whether the jobs are in the database, schema and table of these task locks."""
        return _place(locks) == _place(self.locks)

    @property
    def is_live(self) -> bool:
        """Whether its thread for the database goes on, or is not needed now. Asks nobody."""
        return self.locks.is_live

    def rejected(self) -> tuple[str, ...]:
        """Return what the database rejects of what this job store asks. Asks nobody."""
        return self.locks.rejections.told()

    def _is_misplaced(self, executor: Any) -> bool:
        """Tell whether an executor has task locks, and not beside the jobs."""
        return (
            isinstance(executor, TaskLockExecutor)
            and executor.takes_hand_outs
            and not self.is_beside(executor.locks)
        )

    def _say_misplaced(self, alias: str, executor: TaskLockExecutor) -> str:
        return (
            f"{type(self).__name__}: the executor {alias!r} has its task locks in "
            f"{' '.join(_place(executor.locks))}, and this job store is in "
            f"{' '.join(_place(self.locks))}; a run time is claimed in one statement, so both need "
            "the same database and table. Give both the same URL, schema and table: what is "
            "written is compared, also if two addresses lead to one server, as with pgbouncer"
        )

    def _accepts(self, alias: str, executor: Any) -> bool:
        """Tell whether an executor, which may be newer than the start, runs this store's jobs."""
        if not isinstance(executor, TaskLockExecutor):
            return False
        if not executor.takes_hand_outs:
            if self._is_news_of(executor):
                logger.warning(
                    "The executor %r has enabled=False: jobs of the job store that are due run "
                    "here without a lock, and are done for all replicas",
                    alias,
                )
            return True
        if not self._is_misplaced(executor):
            return True
        if self._is_news_of(executor):
            logger.error("%s. Its jobs are left alone", self._say_misplaced(alias, executor))
        return False

    def _is_news_of(self, executor: Any) -> bool:
        """Tell whether nothing was said of an executor so far, and remember that it is now."""
        first = object()
        return self._told.setdefault(executor, first) is first

    def shutdown(self) -> None:
        """Look no more, and give back what has not begun. Called by the scheduler."""
        if self._inside is not None:
            self._inside.remove_listener(self._note_event)
            self._inside.leave()
        if self._due is not None:
            self._due.close()
        self.locks.close(blocking=True)
        self._inside = self._due = None

    def get_due_jobs(self, now: datetime) -> list[Any]:
        """Return what was handed out to this replica and has not been taken. Asks nobody."""
        return [] if self._due is None else self._due.take()

    def get_next_run_time(self) -> datetime | None:
        """Return when the scheduler is to look again by itself. Asks nobody."""
        if self._inside is None or self._due is None:
            return None
        return self._inside.next_look(has_ready=self._due.has_ready)

    def _note_event(self, event: Any) -> None:
        if self._due is None or event.jobstore != self._alias:
            return
        if event.code & _OVER:
            self._due.job_ended(event.job_id)
        else:
            self._due.job_begun(event.job_id)

    def recurring_tasks(self) -> Sequence[StoredTask]:
        """Return the tasks of the jobs that come again, whichever replica has added them.

        They are those of the 10,000 that are due next.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        found = self._ask(self.locks.jobs.recurring)
        if len(found) > MOST_RECURRING and not self._has_told_of_most:
            self._has_told_of_most = True
            logger.warning(
                "The job store has more than %s recurring jobs: those due later than that many are "
                "run, but nobody is told when they are overdue",
                MOST_RECURRING,
            )
        return found[:MOST_RECURRING]

    # ---- users' calls --------------------------------------------------------------------------

    def lookup_job(self, job_id: str) -> Any:
        """Return a job, or ``None``.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        if "\0" in job_id:  # which PostgreSQL's texts do not have
            return None
        row = self._ask(partial(self.locks.jobs.read, job_id=job_id))
        return None if row is None else self._shown(row)

    def lookup_ended_job(self, job_id: str) -> Any:
        """Return a job whose last run time was claimed and whose run is not over, or ``None``.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        row = self._ask(partial(self.locks.jobs.read, job_id=job_id, ended=True))
        return None if row is None else self._shown(row)

    def get_all_jobs(self) -> list[Any]:
        """Return all jobs, also those that cannot run here; by their run times, paused ones last.

        One whose row cannot be read has its id, next run time and executor only.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        found = [self._shown(row) for row in self._ask(self.locks.jobs.read_all)]
        if self._due is None:  # which does so in a moment
            self._notices.sum_up()
        return found

    def add_job(self, job: Any) -> None:
        """Add a job.

        :raises ConflictingIdError: there is one with its id
        :raises TaskLockOptionError: it cannot be stored, or would come back different, or its
            options make no sense here
        :raises TaskLockDatabaseError: the database is unavailable
        """
        self._count_as_one(job)
        if isinstance(job.trigger, DateTrigger) and job.misfire_grace_time == _DEFAULT_GRACE_TIME:
            job.misfire_grace_time = None
        if self._is_computed(job):
            now = self._database_now()
            self._set_start(job, now)
            job.next_run_time = _first_of(job, now)
        if not self._add(job, self._codec.encode(job)):
            raise ConflictingIdError(job.id)
        self._changed(job)

    def update_job(self, job: Any) -> None:
        """Save what a user has changed of a job; of one that a scheduler runs, nothing.

        A job that is declared with ``replace_existing=True`` is added if it is gone by now. One
        that was made anew otherwise is saved as it is.

        :raises JobLookupError: there is no such job
        :raises TaskLockOptionError: as :meth:`add_job`
        :raises TaskLockDatabaseError: the database is unavailable
        """
        if isinstance(as_handed_out(job), HandedOutJob):
            return  # its claim moves it on
        self._count_as_one(job)
        next_run_time = job.next_run_time
        if isinstance(job, StoredJob):
            self._check_change(job)
            save = partial(self._save, job)
        else:
            save = partial(self._declare, job, self._codec.encode(job))
        for _ in range(MOST_CHANGES):
            job.next_run_time = next_run_time  # not that of a row which has changed since
            row = self._ask(partial(self.locks.jobs.read, job_id=job.id))
            if save(row):
                self._changed(job)
                return
        raise TaskLockError(f"job {job.id!r} is changed by others all the time; nothing was saved")

    def remove_job(self, job_id: str) -> None:
        """Remove a job. Once this has returned, no run time of it is claimed.

        :raises JobLookupError: there is no such job
        :raises TaskLockDatabaseError: the database is unavailable
        """
        attempts = 0

        def remove(cursor: Any) -> bool:
            nonlocal attempts
            attempts += 1
            return self.locks.jobs.remove(cursor, job_id)

        # If an attempt's answer was lost, it may have removed it. PostgreSQL's texts have no NUL.
        if "\0" in job_id or (not self._ask(remove) and attempts == 1):
            raise JobLookupError(job_id)

    def remove_all_jobs(self) -> None:
        """Remove all jobs, those of all replicas.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        count = self._ask(self.locks.jobs.remove_all)
        logger.warning("All jobs of the job store are removed, for all replicas: %d", count)

    # ---- how they are done ---------------------------------------------------------------------

    def _ask(self, statement: Callable[[Any], Answer]) -> Answer:
        """Ask the database; not right after a call that has failed, unless it is back.

        APScheduler holds a lock meanwhile that its own loop needs: several calls that wait one
        after the other would hold that up, and an event loop with it.
        """
        reason = self.locks.outage.reason
        if reason is not None and time.monotonic() < self._fails_until:
            raise TaskLockDatabaseError(reason)
        try:
            return self.locks.ask_for(CALL_TIMEOUT, statement)
        except TaskLockDatabaseError:
            self._fails_until = time.monotonic() + CALL_TIMEOUT
            raise

    def _count_as_one(self, job: Any) -> None:
        """Let a ``max_instances`` above 1 that is the scheduler's default count as 1."""
        inside = self._inside
        if inside is None or job.max_instances <= 1 or not inside.has_default_instances(job):
            return
        if not self._has_told_of_instances:
            self._has_told_of_instances = True
            logger.warning(
                "max_instances=%d of the scheduler's job defaults counts as 1 for the jobs of a "
                "%s: one run of a job goes on at a time",
                job.max_instances,
                type(self).__name__,
            )
        job.max_instances = 1

    def _check_change(self, job: StoredJob) -> None:
        """Make sure that a job which a user has changed could be read, and set its new start.

        What they change may rest on what they have seen of it.

        :raises TaskLockOptionError: it could not
        """
        if job.changed and not job.is_readable:
            raise TaskLockOptionError(f"{_unchangeable(job)}: its row is {job.trigger}")
        if "trigger" in job.changed and self._is_computed(job):
            self._set_start(job, self._database_now())

    def _changed(self, job: Any) -> None:
        """Look for what may be due now, and tell the executor of a job that comes again."""
        if self._due is not None:
            self._due.wake()
        if isinstance(job, StoredJob) and not job.is_readable:
            return
        executor = self._executor_of(job)
        comes_again = not isinstance(job.trigger, DateTrigger)
        if executor is not None and comes_again and not isinstance(job.func, MissingFunction):
            with suppress(TaskLockOptionError):  # of an option that was changed, and is told then
                executor.note_stored_job(job, self._alias)

    def _executor_of(self, job: Any) -> TaskLockExecutor | None:
        """Return the executor that claims a job's run times, if it is here."""
        executor = None if self._inside is None else self._inside.executors.get(job.executor)
        claims = isinstance(executor, TaskLockExecutor) and executor.takes_hand_outs
        return executor if claims else None

    def _is_computed(self, job: Any) -> bool:
        """Tell whether a job's next run time was computed by this machine's clock."""
        is_computed = self._inside is not None and self._inside.has_computed_time(job)
        return is_computed and not isinstance(job.trigger, DateTrigger)

    def _first_time(self, job: Any) -> datetime | None:
        """Return the first run time of a job from now on, by the database's clock.

        A machine whose clock is ahead would leave out what is due until then, and one whose clock
        is behind would have run again what has been run.
        """
        return _first_of(job, self._database_now())

    def _database_now(self) -> datetime:
        assert self._inside is not None
        return self._ask(self.locks.jobs.now).astimezone(self._inside.timezone)

    def _set_start(self, job: Any, now: datetime) -> None:
        """Let an interval that starts from now do so by the database's clock.

        :param now: the database's time, which was asked for a moment ago
        """
        if type(job.trigger) is not IntervalTrigger or not starts_from_now(job.trigger):
            return
        ahead = now - datetime.now(timezone.utc)
        if abs(ahead) > _ON_THE_WAY:
            job.trigger = copy(job.trigger)  # which may be another job's, too
            job.trigger.start_date += ahead

    def _change_to(
        self, job: Any, definition: Definition, next_run_time: datetime | None, place: str
    ) -> JobChange:
        """Return what is written of a job, signed. Its options are checked.

        :param definition: what is signed: nothing of it may be from a row that was not verified
        :param place: where the row lies; it is not needed if rows are not signed
        :raises TaskLockOptionError: they make no sense here
        """
        if job.max_instances > 1:
            raise TaskLockOptionError(
                f"job {job.id!r}: max_instances={job.max_instances} makes no sense in a "
                f"{type(self).__name__}, where one run of a job goes on at a time; leave it at 1"
            )
        executor, task_name = self._executor_of(job), None
        runs_jobs = self._inside is not None and self._inside.runs_jobs
        if runs_jobs:
            self._check_executor(job)
        if not isinstance(job.func, MissingFunction):
            check_runs(job.func, f"job {job.id!r}")
        if executor is not None and not isinstance(job.func, MissingFunction):
            task_name = executor.check_stored_job(job, self._alias)
            if task_name is None and runs_jobs:
                raise TaskLockOptionError(f"job {job.id!r}: {NO_LOCK}")
        made_for_this = uuid4()
        columns = {
            **definition.columns,
            "definition_id": made_for_this,
            "signature": self._codec.sign(job.id, definition, made_for_this, place),
        }
        return JobChange(columns, next_run_time, task_name)

    def _check_executor(self, job: Any) -> None:
        """Make sure that a job's executor claims its run times, if it is on this replica.

        Not while the scheduler is paused, as in a web process that only adds jobs.

        :raises TaskLockOptionError: it does not
        """
        assert self._inside is not None
        executor = self._inside.executor(job.executor)
        if executor is not None and not isinstance(executor, TaskLockExecutor):
            raise TaskLockOptionError(
                f"job {job.id!r}: its executor {job.executor!r} is a {type(executor).__name__}. "
                f"Jobs of a {type(self).__name__} need a TaskLockExecutor, which claims their run "
                f"times: give the scheduler executors={{{job.executor!r}: TaskLockExecutor(url)}}, "
                "or start it with paused=True if it is to add jobs only"
            )

    def _add(self, job: Any, definition: Definition) -> bool:
        """Add a job; tell whether its id was free."""
        place = self._ask(self.locks.jobs.place) if self._codec.signs else ""
        change = self._change_to(job, definition, job.next_run_time, place)
        add = partial(self.locks.jobs.add, job_id=job.id, change=change, added_id=uuid4())
        return self._ask(add)

    def _save(self, job: StoredJob, row: JobRow | None) -> bool:
        """Write what a user has changed of a job since it was read; tell whether that succeeded.

        :param row: as it is now
        :raises JobLookupError: there is none
        :raises TaskLockOptionError: it is not as we have signed it
        """
        if row is None:
            raise JobLookupError(job.id)
        is_computed = self._is_computed(job)
        if is_computed:
            job.next_run_time = self._first_time(job)
        moves = not _is_same_moment(job.next_run_time, job.row.next_run_time)
        change = JobChange({}, job.next_run_time, task_name=None, defines=False)
        if job.changed:
            try:
                now = self._codec.verified(row)
            except UntrustedError as error:
                raise TaskLockOptionError(f"{_unchangeable(job)}: {error}") from None
            definition = self._codec.change(now, job, job.changed)
            change = self._change_to(job, definition, job.next_run_time, row.place)
        if not (change.defines or moves):
            return True
        return self._write(row, change, moves=moves, is_computed=is_computed)

    def _declare(self, job: Any, definition: Definition, row: JobRow | None) -> bool:
        """Write a job that an application declares, as when it starts; tell whether that succeeded.

        A pause stays, and with an unchanged schedule the next run time, unless one is given.

        :raises JobLookupError: there is no such job, and it is not being added
        """
        assert self._inside is not None
        is_adding = self._inside.is_adding(job)
        if row is None:
            if not is_adding:
                raise JobLookupError(job.id)
            return self._add(
                job, definition
            )  # it has ended, or was removed, since its id was taken
        now = Definition.of(row)
        is_explicit = self._inside.has_explicit_time(job) or not is_adding
        next_run_time = job.next_run_time
        moves = is_explicit
        if self._has_schedule(row, definition):
            definition = replace(definition, trigger=now.trigger)
            if not is_explicit:
                next_run_time = row.next_run_time
        elif not is_explicit:
            moves = True
            database_now = self._database_now()
            paused = self._is_paused(row, database_now)
            next_run_time = None if paused else _first_run_time(job, row, database_now)
        job.next_run_time = next_run_time and next_run_time.astimezone(self._inside.timezone)
        stays = _is_same_moment(next_run_time, row.next_run_time)
        if definition.is_same(now) and stays and self._is_up_to_date(row):
            return True
        change = self._change_to(job, definition, next_run_time, row.place)
        return self._write(row, change, moves=moves, is_computed=moves and not is_explicit)

    def _is_paused(self, row: JobRow, now: datetime) -> bool:
        """Tell whether a job has no next run time, although its trigger has one."""
        if row.next_run_time is not None:
            return False
        if not self._is_ours(row):
            return True
        try:
            trigger = self._codec.decode_trigger(Definition.of(row))
            return first_run_time(trigger, now) is not None
        except Exception:  # noqa: BLE001  # whatever a custom trigger raises
            return True

    def _has_schedule(self, row: JobRow, definition: Definition) -> bool:
        """Tell whether a row has the declared schedule, and its trigger may therefore stay.

        One that cannot be read, or that somebody else wrote, has another one: to keep its trigger
        would be to sign it.
        """
        if not self._is_ours(row):
            return False
        now = Definition.of(row)
        try:
            self._codec.decode_trigger(now)
        except UnreadableError:
            return False
        return bool(now.schedule == definition.schedule)

    def _write(self, row: JobRow, change: JobChange, *, moves: bool, is_computed: bool) -> bool:
        """Write what a user has made of a job; tell whether the row was still as it was read.

        :param is_computed: whether the next run time depends on the one that was read
        """
        write = partial(
            self.locks.jobs.change,
            job_id=row.id,
            version=row.version,
            change=change,
            changed_id=uuid4(),
            moves=moves,
            found=row if is_computed else None,
        )
        return self._ask(write)

    def _is_ours(self, row: JobRow) -> bool:
        try:
            self._codec.verified(row)
        except UntrustedError:
            return False
        return True

    def _is_up_to_date(self, row: JobRow) -> bool:
        return self._is_ours(row) and self._codec.is_up_to_date(row)

    def _shown(self, row: JobRow) -> StoredJob:
        """Return a job for users; its function may be one that is missing here."""
        assert self._inside is not None
        definition, is_readable = Definition.of(row), True
        try:
            check_names({"id": row.id})
            attributes = self._codec.decode(self._codec.verified(row))
        except (UnreadableError, UntrustedError) as error:
            # Nothing is shown that is not ours: a user's change may rest on what they have seen.
            attributes, is_readable = self._codec.placeholder(row.id, definition, error), False
            self._notices.tell(
                row.id,
                logger,
                logging.ERROR,
                "Job %s cannot be read, only paused and removed: %s",
                shown(row.id),
                error,
            )
        function = self._function(definition) if is_readable else None
        next_run_time = row.next_run_time and row.next_run_time.astimezone(self._inside.timezone)
        return self._inside.make_stored(
            {
                "id": row.id,
                "func": MissingFunction(row.func) if function is None else function,
                "func_ref": row.func,
                "next_run_time": next_run_time,
                **attributes,
            },
            row,
            has_function=function is not None,
            is_readable=is_readable,
        )

    def _function(self, definition: Definition) -> Any:
        """Return a job's function; ``None`` if it cannot be imported here, or is not allowed.

        A module whose import fails is imported anew each time, which may take long. So it is tried
        again ever later, and not for each job, nor each time that somebody lists the jobs.
        """
        module = definition.func.partition(":")[0]
        if module in self._missing.names():
            return None
        try:
            function = self._codec.load_function(definition)
        except Exception as error:  # noqa: BLE001  # whatever an import raises; who runs it tells of it
            if not isinstance(error, UntrustedError) and sys.modules.get(module) is None:
                self._missing.add(module)
            return None
        self._missing.clear(module)
        return function

    def __repr__(self) -> str:
        return f"<{type(self).__name__} ({self.locks.where})>"


def _unchangeable(job: StoredJob) -> str:
    return (
        f"job {job.id!r} can be paused, removed, or replaced by add_job(..., "
        "replace_existing=True), and not changed"
    )


def _place(locks: LockClient) -> tuple[str, str]:
    return locks.where, locks.table.fullname


def _is_same_moment(one: datetime | None, other: datetime | None) -> bool:
    """Compare by timestamps: Python calls times of an hour that comes twice unequal."""
    if one is None or other is None:
        return one is other
    return one.timestamp() == other.timestamp()


def _first_of(job: Any, now: datetime) -> datetime | None:
    """Return the first run time of a job from now on; ``None`` if there is none.

    :raises TaskLockOptionError: it cannot be found within bounds
    """
    try:
        return first_run_time(job.trigger, now)
    except EndlessTriggerError as error:
        raise TaskLockOptionError(f"job {job.id!r} has no next run time: {error}") from None


def _first_run_time(job: Any, row: JobRow, now: datetime) -> datetime | None:
    """Return the first run time under a schedule that was changed; ``None`` if there is none.

    An interval without a start counts from the last run: else replicas of an old and a new version
    that restart over and over would push the job ahead of themselves for ever.

    :param now: the database's time
    """
    trigger = job.trigger
    computed = _first_of(job, now)
    now = now.astimezone(timezone.utc)  # in which time elapses evenly
    if type(trigger) is not IntervalTrigger or not starts_from_now(trigger):
        return computed
    times = [time for time in (computed, row.next_run_time) if time is not None]
    if row.last_run_time is not None:
        last = row.last_run_time.astimezone(timezone.utc)
        passed = 1
        if row.next_run_time is not None and row.next_run_time > now:
            # Under a shorter interval, several run times may have passed. Only the last is due.
            passed = max(1, floor((now - last).total_seconds() / trigger.interval_length))
        times = [last + passed * trigger.interval]
    first, end = min(times, default=None), trigger.end_date
    return None if first is None or (end is not None and max(first, now) > end) else first
