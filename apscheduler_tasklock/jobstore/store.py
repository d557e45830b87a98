"""The job store that all replicas share."""

from __future__ import annotations

import logging
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

from apscheduler.events import EVENT_SCHEDULER_RESUMED, EVENT_SCHEDULER_STARTED
from apscheduler.jobstores.base import BaseJobStore, ConflictingIdError, JobLookupError
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.sqlstates import RowLockedError
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock._lock.job_rows import (
    LOCKED_JOB,
    MOST_CHANGES,
    MOST_RECURRING,
    JobChange,
    JobRow,
    JobRows,
    StoredTask,
    remove_job,
    unsaved,
)
from apscheduler_tasklock._lock.settings import lock_settings
from apscheduler_tasklock._lock.test_doubles import active_stand_in
from apscheduler_tasklock._lock.user import ReplicaUser, user_at_start
from apscheduler_tasklock._runs.job_functions import check_body_runs
from apscheduler_tasklock._runs.skipped_jobs import SkippedJobsLog
from apscheduler_tasklock._runs.stopping import ShutDownTogether
from apscheduler_tasklock._runs.trigger_times import EndlessTriggerError, first_run_time, tzinfo_of
from apscheduler_tasklock._shutdown import Shutdown
from apscheduler_tasklock._values import logger_of, shown
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockOptionError,
    TaskLockStateError,
    raised_at_the_call,
)
from apscheduler_tasklock.executor import TaskLockExecutor
from apscheduler_tasklock.jobstore.bad_rows import Backoff, load_function
from apscheduler_tasklock.jobstore.definition import (
    Definition,
    JobCodec,
    MissingFunction,
    check_names,
)
from apscheduler_tasklock.jobstore.due import NO_LOCK, DueJobs
from apscheduler_tasklock.jobstore.scheduler_inside import SchedulerInside, StoredJob
from apscheduler_tasklock.jobstore.stored_triggers import starts_from_now
from apscheduler_tasklock.jobstore.stored_values import UnreadableError
from apscheduler_tasklock.jobstore.trust import AllowedFunctions, Signer, UntrustedError
from apscheduler_tasklock.options import parse_choice, parse_positive_seconds
from apscheduler_tasklock.schema.table import DEFAULT_TABLE, job_table

logger = logger_of(__name__)

Answer = TypeVar("Answer")

# Limits the seconds of a claim. A third of this number limits each attempt of a user's call.
_TIMEOUT = 3.0
# An interval keeps its own start if this machine's clock and the database's clock seem to differ by
# no more than this. The time that the database's answer takes can make a difference of this size.
_ON_THE_WAY = timedelta(seconds=1)
# APScheduler's default grace time in seconds, which is meant for recurring jobs. A one-off job with
# this grace time gets no limit instead.
_DEFAULT_GRACE_TIME = 1


class TaskLockJobStore(BaseJobStore, ShutDownTogether):  # type: ignore[misc]  # it has no types
    """Jobs that all replicas share. Each replica can add and change jobs; one replica runs a job.

    The jobs are in PostgreSQL. Each replica that has free workers reads due jobs and claims their
    task locks. The statement that grants a claim also moves the job to its next run time. So a job
    store needs a :class:`TaskLockExecutor` on the same database. A job on any other executor is an
    error.

    Plugin alias: ``tasklock``

    :param database: PostgreSQL URL, or an SQLAlchemy ``Engine`` with psycopg; the same as the
        executor's. The job store opens its connections as the engine does, and does not use the
        engine's pool. By default ``TASKLOCK_DATABASE_URL`` of the environment.
    :param functions: which functions jobs may call: packages, modules or functions by their dotted
        names, such as ``["myapp."]``. Each goes by its own name only.
    :param secret: the key that signs the rows: a text or bytes of at least 16 bytes, or a list of
        keys. The first key signs, each key verifies. ``functions``, ``secret`` or both are needed.
    :param serializer: ``"json"``, or ``"pickle"`` for triggers and arguments that JSON cannot
        store, which needs a ``secret``
    :param schema: schema of the task lock table; the same as the executor's. By default the
        ``search_path`` decides.
    :param table: name of the task lock table; the same as the executor's
    :param poll_interval: longest time between two looks for due jobs. In a fleet of more than 20
        replicas it is longer, 50 ms for each live one.
    :param replica_id: who reads the jobs, shown to operators. By default host, process and a random
        part.
    :raises TaskLockOptionError: an option is invalid, or both ``functions`` and ``secret`` are
        missing
    """

    timings: ClassVar[Timings] = Timings()

    @raised_at_the_call
    def __init__(
        self,
        database: str | URL | Engine | None = None,
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
        # Tells a `TaskLockExecutor` that all replicas share the jobs of this job store.
        self.shared_jobs = SharedJobs(self)
        where = type(self).__name__
        if not functions and secret is None:
            raise TaskLockOptionError(
                f"{where} needs functions=['myapp.'], the functions that jobs may call, or "
                "secret='...', which signs the rows. Without either, anybody who can write the "
                "table could run any code"
            )
        pickles = parse_choice(serializer, "serializer", where, ("json", "pickle")) == "pickle"
        self._interval = parse_positive_seconds(poll_interval, "poll_interval", where)
        settings = lock_settings(
            database,
            where,
            replica_id=replica_id,
            claim_timeout=_TIMEOUT,
            schema=schema or None,  # because a configuration file can only say '' for None
            table=table,
        )
        self.user = ReplicaUser(replace(settings, timings=self.timings))
        signer = None if secret is None else Signer(secret)
        self._codec = JobCodec(AllowedFunctions(functions or None), signer, pickles=pickles)
        if pickles:
            logger.warning(
                "%s: arguments of jobs are pickled; anybody who has the secret can run any code",
                where,
            )
        self._missing = Backoff()  # modules whose import failed
        self._notices = SkippedJobsLog()  # about jobs that cannot run here
        self._has_warned_of_instances = False
        self._warned_of: WeakKeyDictionary[Any, object] = WeakKeyDictionary()  # by executor
        self._inside: SchedulerInside | None = None
        self._due: DueJobs | None = None
        # In an outage, users' calls fail at once until this time, on the monotonic clock.
        self._fails_until = 0.0
        replace_in_each_child(self)

    def _replace_in_child(self) -> None:
        """Replace the parent's connection, and drop its thread. Called in a forked child."""
        self.user = self.user.for_child()
        self._due = None
        self._notices = SkippedJobsLog()

    # ---- the scheduler's calls -----------------------------------------------------------------

    @raised_at_the_call
    def start(self, scheduler: Any, alias: str) -> None:
        """Begin to look for due jobs. Called by the scheduler.

        :raises TaskLockSchemaError: a table is missing, old or not permitted
        :raises TaskLockOptionError: the scheduler has the same jobs under another alias, or an
            executor whose task locks are in another database, schema or table
        :raises TaskLockStateError: :mod:`apscheduler_tasklock.testing` replaces the database
        """
        if active_stand_in() is not None:
            raise TaskLockStateError(
                f"{type(self).__name__}: there is no database to read the jobs from, because "
                "apscheduler_tasklock.testing stands in for it. Give the scheduler APScheduler's "
                "memory store in this test, or test it on PostgreSQL"
            )
        super().start(scheduler, alias)
        if self._due is not None:  # the scheduler's last start failed after this method had run
            self._end(Shutdown())
        self._shutdown = None  # because a shutdown may have begun without reaching this job store
        self.user = user_at_start(self.user, scheduler)
        inside = SchedulerInside(scheduler, alias)
        try:
            self._check_scheduler(inside)
            with suppress(TaskLockDatabaseError):  # logged as an outage
                self.user.rights.check(jobs=True)
        except BaseException:
            inside.leave()
            self.user.close()
            raise
        self._inside = inside
        self._due = DueJobs(self.user, inside, alias, self._codec, self._interval, self._notices)
        inside.add_listener(self._note_running, EVENT_SCHEDULER_STARTED | EVENT_SCHEDULER_RESUMED)
        self._due.start()
        self.user.listen(self._due.wake)
        logger.info(
            "The job store %r is shared by all replicas: database %s, table %r, replica %r",
            alias,
            self.user.where,
            job_table(self.user.table).fullname,
            self.user.replica_id,
        )

    def _check_scheduler(self, inside: SchedulerInside) -> None:
        place = _place(self.user)
        for store in inside.other_stores:
            if isinstance(store, TaskLockJobStore) and _place(store.user) == place:
                raise TaskLockOptionError(
                    f"{type(self).__name__}: another job store of this scheduler has the same table"
                )
        for alias, executor in inside.executors.items():
            if self._is_misplaced(executor):
                raise TaskLockOptionError(self._say_misplaced(alias, executor))
        inside.accepts = self._accepts  # also for executors that are added later
        inside.first_run_time = _first_of

    def _is_misplaced(self, executor: Any) -> bool:
        """Return whether an executor's task locks are not in the same place as the jobs."""
        return (
            isinstance(executor, TaskLockExecutor)
            and executor.stored.claims
            and _place(executor.user) != _place(self.user)
        )

    def _say_misplaced(self, alias: str, executor: TaskLockExecutor) -> str:
        return (
            f"{type(self).__name__}: the executor {alias!r} has its task locks in "
            f"{' '.join(_place(executor.user))}, and this job store is in "
            f"{' '.join(_place(self.user))}; one statement claims a run time in both, so both "
            "need the same database and table. Give both the same URL, schema and table. Two "
            "addresses of one server, with and without pgbouncer, count as different"
        )

    def _accepts(self, alias: str, executor: Any) -> bool:
        """Return whether an executor runs this store's jobs; log once why it does not."""
        if not isinstance(executor, TaskLockExecutor):
            return False
        if not executor.stored.claims:
            if self._is_first_warning(executor):
                logger.warning(
                    "The executor %r has enabled=False: due jobs of the job store run here without "
                    "a lock, and on no other replica",
                    alias,
                )
            return True
        if not self._is_misplaced(executor):
            return True
        if self._is_first_warning(executor):
            logger.error("%s. Its jobs are not run", self._say_misplaced(alias, executor))
        return False

    def _is_first_warning(self, executor: Any) -> bool:
        """Return whether this is the first warning about an executor, and remember the executor."""
        first = object()
        return self._warned_of.setdefault(executor, first) is first

    def shutdown(self) -> None:
        """Stop looking for due jobs. Called by the scheduler."""
        with self._shutting_down() as shutdown:
            self._end(shutdown)

    def _begin_shutdown(self, shutdown: Shutdown) -> None:
        """Stop claiming, without a wait. The scheduler calls ``shutdown`` afterwards."""
        super()._begin_shutdown(shutdown)
        self.user.stop_claiming()

    def _end(self, shutdown: Shutdown) -> None:
        if self._inside is not None:
            self._inside.remove_listener(self._note_running)
            self._inside.leave()
        if self._due is not None:
            self._due.close(shutdown)
        self.user.close(blocking=True, shutdown=shutdown)
        self._inside = self._due = None

    def get_due_jobs(self, now: datetime) -> list[Any]:
        """Return no jobs, because a thread of the job store reads due jobs. Sends nothing."""
        return []

    def get_next_run_time(self) -> datetime | None:
        """Return ``None``, so that the scheduler's loop does not wake up for the jobs."""

    def _note_running(self, _event: Any) -> None:
        if self._due is not None:
            self._due.wake()

    # ---- users' calls --------------------------------------------------------------------------

    def lookup_job(self, job_id: str) -> Any:
        """Return a job, or ``None``.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        if "\0" in job_id:  # because PostgreSQL's texts have no NUL
            return None
        row = self._ask(partial(self._rows.read, job_id=job_id))
        return None if row is None else self._shown(row)

    def get_all_jobs(self) -> list[Any]:
        """Return all jobs in the order of their run times, paused jobs last.

        Jobs that cannot run here are included. A job whose row cannot be read has only its id, next
        run time and executor.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        found = [self._shown(row) for row in self._ask(self._rows.read_all)]
        if self._due is None:  # otherwise a look of DueJobs sums the log lines up
            self._notices.sum_up()
        return found

    @raised_at_the_call
    def add_job(self, job: Any) -> None:
        """Add a job.

        :raises ConflictingIdError: there is a job with this id
        :raises TaskLockOptionError: the job cannot be stored, or would come back different, or its
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

    @raised_at_the_call
    def update_job(self, job: Any) -> None:
        """Save a user's changes of a job.

        Only the changed attributes are saved if the job was read from this job store. Otherwise the
        whole job is saved, and a job that is declared with ``replace_existing=True`` is added if
        its row is gone.

        :raises JobLookupError: there is no such job
        :raises TaskLockOptionError: as :meth:`add_job`
        :raises TaskLockDatabaseError: the database is unavailable
        """
        self._count_as_one(job)
        next_run_time = job.next_run_time
        if isinstance(job, StoredJob):
            self._check_change(job)
            save = partial(self._save, job)
        else:
            save = partial(self._declare, job, self._codec.encode(job))
        for _ in range(MOST_CHANGES):
            job.next_run_time = next_run_time  # because the last attempt may have changed it
            row = self._ask(partial(self._rows.read, job_id=job.id))
            if save(row):
                self._changed(job)
                return
        raise unsaved(job.id)

    def remove_job(self, job_id: str) -> None:
        """Remove a job. No run time of the job is claimed after this call has returned.

        :raises JobLookupError: there is no such job
        :raises TaskLockDatabaseError: the database is unavailable
        """
        if not remove_job(self._ask, self._rows, job_id):
            raise JobLookupError(job_id)

    def remove_all_jobs(self) -> None:
        """Remove all jobs, for all replicas.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        count = self._ask(self._rows.remove_all)
        logger.warning("All jobs of the job store are removed, for all replicas: %d", count)

    # ---- how users' calls are carried out ------------------------------------------------------

    @property
    def _rows(self) -> JobRows:
        """The statements of the job store."""
        return self.user.database.jobs

    def _ask(self, statement: Callable[[Any], Answer]) -> Answer:
        """Return the answer to a statement. In an outage, fail at once if a call has just failed.

        The caller holds a lock that APScheduler's own loop needs. So several calls that wait for
        the database one after the other would block this loop, and the event loop that it runs in.
        """
        reason = self.user.outage.reason
        if reason is not None and time.monotonic() < self._fails_until:
            raise TaskLockDatabaseError(reason)
        limit = self.timings.call_timeout
        try:
            # The last try needs time for its answer.
            until = time.monotonic() + limit
            return self.user.database.ask(statement, until, tried_for=0.8 * limit)
        except RowLockedError as error:
            raise RowLockedError(LOCKED_JOB) from error
        except TaskLockDatabaseError:
            self._fails_until = time.monotonic() + self.timings.call_timeout
            raise

    def _count_as_one(self, job: Any) -> None:
        """Set ``max_instances`` to 1 if only the scheduler's job defaults set it above 1."""
        inside = self._inside
        if inside is None or job.max_instances <= 1 or not inside.has_default_instances(job):
            return
        if not self._has_warned_of_instances:
            self._has_warned_of_instances = True
            logger.warning(
                "max_instances=%d of the scheduler's job defaults counts as 1 for the jobs of a "
                "%s, because one run of a job goes on at a time",
                job.max_instances,
                type(self).__name__,
            )
        job.max_instances = 1

    def _check_change(self, job: StoredJob) -> None:
        """Make sure that a changed job was readable, and set the start of a changed interval.

        A change of an unreadable job is an error, because the user has seen placeholders in place
        of its attributes.

        :raises TaskLockOptionError: the job was not readable
        """
        if job.changed and not job.is_readable:
            raise TaskLockOptionError(f"{_unchangeable(job)}: its row is {job.trigger}")
        if "trigger" in job.changed and self._is_computed(job):
            self._set_start(job, self._database_now())

    def _changed(self, job: Any) -> None:
        """Have due jobs read soon, and register a recurring job with its executor."""
        if self._due is not None:
            self._due.wake()
        is_declared = not isinstance(job, StoredJob)
        if not (is_declared or job.is_readable):
            return
        executor = self._executor_of(job)
        comes_again = not isinstance(job.trigger, DateTrigger)
        if executor is not None and comes_again and not isinstance(job.func, MissingFunction):
            with suppress(TaskLockOptionError):  # logged when the job is due
                executor.stored.note_stored_job(job, self._alias, is_declared=is_declared)

    def _executor_of(self, job: Any) -> TaskLockExecutor | None:
        """Return the executor here that claims a job's run times; ``None`` if there is none."""
        executor = None if self._inside is None else self._inside.executors.get(job.executor)
        claims = isinstance(executor, TaskLockExecutor) and executor.stored.claims
        return executor if claims else None

    def _is_computed(self, job: Any) -> bool:
        """Return whether this machine's clock decided on a job's next run time.

        The clock never decides on the run time of a ``DateTrigger``, which is fixed.
        """
        is_computed = self._inside is not None and self._inside.has_computed_time(job)
        return is_computed and not isinstance(job.trigger, DateTrigger)

    def _database_now(self) -> datetime:
        assert self._inside is not None
        return self._ask(self._rows.now).astimezone(self._inside.timezone)

    def _set_start(self, job: Any, now: datetime) -> None:
        """Shift an interval's default start from this machine's clock to the database's clock.

        :param now: the database's time of a moment ago
        """
        if type(job.trigger) is not IntervalTrigger or not starts_from_now(job.trigger):
            return
        ahead = now - datetime.now(timezone.utc)
        if abs(ahead) > _ON_THE_WAY:
            job.trigger = copy(job.trigger)  # because another job may have the same object
            job.trigger.start_date += ahead

    def _change_to(
        self, job: Any, definition: Definition, next_run_time: datetime | None, place: str
    ) -> JobChange:
        """Check a job's options, and return the change of its row, with its signature.

        :param definition: the definition to sign. No part of it may come from an unverified row.
        :param place: database, schema and table of the row; not needed if rows are not signed
        :raises TaskLockOptionError: an option makes no sense here
        """
        if job.max_instances > 1:
            raise TaskLockOptionError(
                f"job {job.id!r}: max_instances={job.max_instances} makes no sense in a "
                f"{type(self).__name__}, because one run of a job goes on at a time; leave it at 1"
            )
        executor, task_name = self._executor_of(job), None
        runs_jobs = self._inside is not None and self._inside.runs_jobs
        if runs_jobs:
            self._check_executor(job)
        if not isinstance(job.func, MissingFunction):
            check_body_runs(job.func, f"job {job.id!r}")
        if executor is not None and not isinstance(job.func, MissingFunction):
            task_name = executor.stored.check_stored_job(job, self._alias)
            if task_name is None and runs_jobs:
                raise TaskLockOptionError(f"job {job.id!r}: {NO_LOCK}")
        change_id = uuid4()
        columns = {
            **definition.columns,
            "definition_id": change_id,
            "signature": self._codec.sign(job.id, definition, change_id, place),
        }
        return JobChange(columns, next_run_time, task_name)

    def _check_executor(self, job: Any) -> None:
        """Make sure that a job's executor is a ``TaskLockExecutor``, if this replica has it.

        Called only if the scheduler runs jobs, because a paused scheduler may be there only to add
        jobs.

        :raises TaskLockOptionError: the executor is of another class
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
        """Add a job; return whether its id was free."""
        place = self._ask(self._rows.place) if self._codec.signs else ""
        change = self._change_to(job, definition, job.next_run_time, place)
        add = partial(self._rows.add, job_id=job.id, change=change, added_id=uuid4())
        return self._ask(add)

    def _save(self, job: StoredJob, row: JobRow | None) -> bool:
        """Write a user's changes of a job; return ``False`` if its row was changed meanwhile.

        :param row: the job's row as it was just read; ``None`` if there is none
        :raises JobLookupError: there is no row
        :raises TaskLockOptionError: the row cannot be verified
        """
        if row is None:
            raise JobLookupError(job.id)
        is_computed = self._is_computed(job)
        if is_computed:
            # By the database's clock, because a machine's clock that is ahead would skip run times,
            # and a clock that is behind would repeat them.
            job.next_run_time = _first_of(job, self._database_now())
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
        """Write a job that an application declares; return ``False`` if its row changed meanwhile.

        A paused job stays paused. A job with an unchanged schedule keeps its next run time. But an
        explicit ``next_run_time`` is always written, and ``None`` pauses the job.

        :raises JobLookupError: there is no such job, and it is not being added
        """
        assert self._inside is not None
        is_adding = self._inside.is_adding(job)
        if row is None:
            if not is_adding:
                raise JobLookupError(job.id)
            # The job has ended or was removed since its id was found to be taken.
            return self._add(job, definition)
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
        job.next_run_time = self._in_zone(next_run_time, job.trigger)
        stays = _is_same_moment(next_run_time, row.next_run_time)
        is_same = definition.is_same(now) and stays
        if is_same and self._is_ours(row) and self._codec.is_up_to_date(row):
            return True
        change = self._change_to(job, definition, next_run_time, row.place)
        return self._write(row, change, moves=moves, is_computed=moves and not is_explicit)

    def _is_paused(self, row: JobRow, now: datetime) -> bool:
        """Return whether a job has no next run time, although its trigger has one.

        The answer is ``True``, too, if the trigger cannot be verified, or raises an error.
        """
        if row.next_run_time is not None:
            return False
        if not self._is_ours(row):
            return True
        try:
            trigger = self._codec.decode_trigger(Definition.of(row))
            return first_run_time(trigger, now) is not None
        except Exception:  # noqa: BLE001  # a custom trigger can raise anything
            return True

    def _has_schedule(self, row: JobRow, definition: Definition) -> bool:
        """Return whether a row has the declared schedule, so that its trigger stays.

        The answer is ``False`` for a row that is unreadable or not verified, because otherwise a
        trigger that nobody checked would be signed.
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
        """Write a user's change of a job; return whether the row was still as it was read.

        :param is_computed: whether the next run time depends on the row that was read
        """
        write = partial(
            self._rows.change,
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

    def _shown(self, row: JobRow) -> StoredJob:
        """Return a job for users. A :class:`MissingFunction` replaces a missing function."""
        assert self._inside is not None
        definition, is_readable = Definition.of(row), True
        try:
            check_names({"id": row.id})
            attributes = self._codec.decode(self._codec.verified(row))
        except (UnreadableError, UntrustedError) as error:
            # Users get placeholders, so that they do not base a change on unverified values.
            attributes, is_readable = self._codec.placeholder(row.id, definition, error), False
            self._notices.log(
                row.id,
                logger,
                logging.ERROR,
                "Job %s can only be paused or removed, because its row cannot be read: %s",
                shown(row.id),
                error,
            )
        function = None
        if is_readable:
            with suppress(Exception):  # logged when the job is due
                function = load_function(self._codec, definition, self._missing)
        return self._inside.make_stored(
            {
                "id": row.id,
                "func": MissingFunction(row.func) if function is None else function,
                "func_ref": row.func,
                "next_run_time": self._in_zone(row.next_run_time, attributes["trigger"]),
                **attributes,
            },
            row,
            has_function=function is not None,
            is_readable=is_readable,
        )

    def _in_zone(self, moment: datetime | None, trigger: Any) -> datetime | None:
        """Return a run time in its trigger's zone, as the trigger itself returns it."""
        assert self._inside is not None
        return moment and moment.astimezone(tzinfo_of(trigger) or self._inside.timezone)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} ({self.user.where})>"


class SharedJobs:
    """A job store as the executors of its scheduler use it, beside APScheduler's own calls.

    :param store: the job store
    """

    def __init__(self, store: TaskLockJobStore) -> None:
        self._store = store
        self._has_warned_of_most = False

    def is_beside(self, user: ReplicaUser) -> bool:
        """Return whether the jobs are in the database, schema and table of a replica's user."""
        return _place(user) == _place(self._store.user)

    @property
    def is_live(self) -> bool:
        """Whether the replica's thread is alive, or not needed now. Sends nothing."""
        return self._store.user.thread.is_live

    def rejected(self) -> tuple[str, ...]:
        """Return the requests of this job store that the database rejects now. Sends nothing."""
        return self._store.user.rejections.reported()

    def recurring_tasks(self) -> Sequence[StoredTask]:
        """Return the tasks of recurring jobs, at most 10,000: the ones that are due first.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        found = self._store._ask(self._store._rows.recurring)
        if len(found) > MOST_RECURRING and not self._has_warned_of_most:
            self._has_warned_of_most = True
            logger.warning(
                "The job store has more than %s recurring jobs. Only that many, the ones that are "
                "due first, are reported when they are overdue. The other jobs are run, too",
                MOST_RECURRING,
            )
        return found[:MOST_RECURRING]

    def lookup_ended_job(self, job_id: str) -> Any:
        """Return a job that has no more run times, while its final run goes on, or ``None``.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        row = self._store._ask(partial(self._store._rows.read, job_id=job_id, ended=True))
        return None if row is None else self._store._shown(row)


def _unchangeable(job: StoredJob) -> str:
    return (
        f"job {job.id!r} can be paused, removed, or replaced by add_job(..., "
        "replace_existing=True), and not changed"
    )


def _place(user: ReplicaUser) -> tuple[str, str]:
    return user.where, user.table.fullname


def _is_same_moment(one: datetime | None, other: datetime | None) -> bool:
    """Return whether two times are the same moment, or both are ``None``.

    Timestamps are compared, because Python calls equal times in a repeated hour unequal.
    """
    if one is None or other is None:
        return one is other
    return one.timestamp() == other.timestamp()


def _first_of(job: Any, now: datetime) -> datetime | None:
    """Return the first run time of a job from now on; ``None`` if there is none.

    :raises TaskLockOptionError: the trigger does not find its first run time in a limited search
    """
    try:
        return first_run_time(job.trigger, now)
    except EndlessTriggerError as error:
        raise TaskLockOptionError(f"job {job.id!r} has no next run time: {error}") from None


def _first_run_time(job: Any, row: JobRow, now: datetime) -> datetime | None:
    """Return the first run time under a changed schedule; ``None`` if there is none.

    An interval without an explicit start counts from the last run. If it counted from now, replicas
    of an old and a new version that restart over and over would postpone the job for ever.

    :param now: the database's time
    """
    trigger = job.trigger
    computed = _first_of(job, now)
    now = now.astimezone(timezone.utc)  # because local times skip or repeat hours
    if type(trigger) is not IntervalTrigger or not starts_from_now(trigger):
        return computed
    times = [time for time in (computed, row.next_run_time) if time is not None]
    if row.last_run_time is not None:
        last = row.last_run_time.astimezone(timezone.utc)
        passed = 1
        if row.next_run_time is not None and row.next_run_time > now:
            # If the new interval is shorter, several of its run times may have passed since the
            # last run. Only the latest of them is due.
            passed = max(1, floor((now - last).total_seconds() / trigger.interval_length))
        times = [last + passed * trigger.interval]
    first, end = min(times, default=None), trigger.end_date
    return None if first is None or (end is not None and max(first, now) > end) else first
