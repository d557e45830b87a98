"""The lock-aware executor: what a scheduler sees."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal

from apscheduler.events import EVENT_JOB_ADDED, EVENT_JOB_MODIFIED
from apscheduler.executors.base import BaseExecutor, MaxInstancesReachedError
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock.carrier import Carrier
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
)
from apscheduler_tasklock.events import EVENT_TASK_LOCK_ERROR, TaskLockEvent
from apscheduler_tasklock.inner import make_inner, report_jobs
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.loops import call_as_scheduler, dispatcher
from apscheduler_tasklock.names import make_replica_id
from apscheduler_tasklock.options import DEFAULTS, LockOptions, parse_positive_seconds
from apscheduler_tasklock.period import follows
from apscheduler_tasklock.submission import Submission, Watch
from apscheduler_tasklock.table import DEFAULT_TABLE
from apscheduler_tasklock.takeover import job_to_run_again
from apscheduler_tasklock.tasks import Tasks
from apscheduler_tasklock.watching import RETRY_INTERVAL, Watcher

logger = logging.getLogger(__name__)


class TaskLockExecutor(BaseExecutor):  # type: ignore[misc]  # APScheduler has no types
    """Runs each job on one replica per window, with a task lock in PostgreSQL.

    Every replica schedules its jobs normally. Right before a job fires, in the worker of the
    executor that this one wraps, its task is claimed; only where the claim is granted it runs.

    Plugin alias: ``tasklock``

    :param database: PostgreSQL URL, or an SQLAlchemy ``Engine`` with the psycopg driver, which is
        used as it is, except for autocommit
    :param executor: executor to wrap: an instance, a plugin alias such as ``"processpool"``, or a
        mapping as in a scheduler's configuration, ``{"type": "processpool", "max_workers": 2}``;
        by default the scheduler's own default executor
    :param min_factor: minimum lock, as a multiple of the job's period; 0 or more
    :param max_factor: maximum lock, as a multiple of the job's period; above 0
    :param failover: how long after its last sign of life a holder counts as dead, and another
        replica runs its window again; a ``timedelta`` or seconds, 1 or more. ``None``: when its
        maximum lock ends, and nobody runs the window again.
    :param period: what stands for the period of a run time that no other follows, as of a date
        trigger; a ``timedelta`` or seconds
    :param jobs: options of single jobs, as ``{"job-id": {"max_factor": 2}}``, for those whose
        kwargs or function cannot carry them
    :param namespace: put before every task name, for applications that share a database
    :param on_database_error: what becomes of a job when the database stays away: ``"skip"`` it,
        or ``"run"`` it without a lock
    :param claim_timeout: seconds for which a claim is tried while the database is away
    :param schema: schema of the task lock table; by default up to the ``search_path``
    :param table: name of the task lock table
    :param replica_id: who holds a lock, for people; by default host, process and a random part
    :param executor_options: passed on to the wrapped executor, as ``max_workers=20``
    :raises TaskLockOptionError: an option is unknown or impossible
    """

    def __init__(
        self,
        database: str | URL | Engine,
        executor: str | Mapping[str, Any] | BaseExecutor | None = None,
        *,
        min_factor: float | str = 0.9,
        max_factor: float | str = 5.0,
        failover: timedelta | float | str | None = None,
        period: timedelta | float | str = timedelta(hours=1),
        jobs: Mapping[str, Any] | None = None,
        namespace: str = "",
        on_database_error: Literal["skip", "run"] = "skip",
        claim_timeout: timedelta | float | str = 10,
        schema: str | None = None,
        table: str = DEFAULT_TABLE,
        replica_id: str | None = None,
        **executor_options: Any,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        if not isinstance(namespace, str):
            raise TaskLockOptionError(f"{where}: namespace must be a text, not {namespace!r}")
        options = {
            "min_factor": min_factor,
            "max_factor": max_factor,
            "failover": failover,
            "period": period,
        }
        defaults = LockOptions.parse(options, where).over(DEFAULTS, where)
        self._tasks = Tasks(defaults, jobs or {}, namespace, where)
        if on_database_error not in ("skip", "run"):
            raise TaskLockOptionError(
                f"{where}: on_database_error must be 'skip' or 'run', not {on_database_error!r}"
            )
        self._run_unlocked = on_database_error == "run"
        if isinstance(executor, BaseExecutor) and executor_options:
            raise TaskLockOptionError(
                f"{where}: unknown options {', '.join(executor_options)}; the executor to wrap is "
                "an instance already, and takes none"
            )
        self._executor = executor
        self._executor_options = executor_options
        self._inner: Any = None
        self.locks = TaskLocks(
            database,
            replica_id=replica_id or make_replica_id(),
            claim_timeout=parse_positive_seconds(claim_timeout, "claim_timeout", where),
            schema=schema or None,  # a configuration file says '' for none
            table=table,
        )
        self._watcher = Watcher(self.locks.read_runs, lambda: self.locks.settled, self._run_again)

    def start(self, scheduler: Any, alias: str) -> None:
        """Start the wrapped executor. Called by the scheduler.

        :raises TaskLockSchemaError: the task lock table is missing, old or not permitted
        :raises TaskLockOptionError: options of a job that was added already are impossible
        """
        super().start(scheduler, alias)
        for job, jobstore, _ in scheduler._pending_jobs:
            if job.executor == alias:
                self._tasks.resolve(job, jobstore, self._scheduler._jobstores)
        self._inner = make_inner(self._executor, self._executor_options, scheduler)
        if isinstance(self._inner, TaskLockExecutor):
            raise TaskLockOptionError(
                f"{type(self).__name__}: the executor to wrap is a TaskLockExecutor itself; one "
                "claims the lock, two would wait for each other"
            )
        self._check_database()
        self.locks.open()
        self._watcher.open()
        self._inner.start(scheduler, alias)
        self._instances = self._inner._instances
        report_jobs(self._inner, self._watcher.add)
        scheduler.add_listener(self._check_job, EVENT_JOB_ADDED | EVENT_JOB_MODIFIED)

    def shutdown(self, wait: bool = True) -> None:
        """Shut the wrapped executor down. From now on nothing is claimed.

        :param wait: whether to let running jobs end first; their locks are released either way
        """
        self.locks.stop_claiming()
        self._watcher.close()
        if self._inner is not None:
            self._inner.shutdown(wait)
        if self._scheduler is not None:
            self._scheduler.remove_listener(self._check_job)
        self.locks.close()

    def submit_job(self, job: Any, run_times: list[datetime]) -> None:
        """Hand a job to the wrapped executor; its worker will claim it. No database work here.

        :raises MaxInstancesReachedError: as many instances as allowed are running
        :raises TaskLockOptionError: the job's options are impossible
        """
        jobstore = job._jobstore_alias
        try:
            task = self._tasks.resolve(job, jobstore, self._scheduler._jobstores)
        except TaskLockError as error:
            for run_time in run_times:
                self._scheduler._dispatch_event(
                    TaskLockEvent(
                        EVENT_TASK_LOCK_ERROR, job.id, jobstore, "", run_time, exception=error
                    )
                )
            raise
        submission = Submission(
            job=job,
            jobstore=jobstore,
            trigger=job.trigger,
            run_times=tuple(run_times),
            task_name=task.name,
            options=task.options,
            run_unlocked=self._run_unlocked,
            logger_name=self._logger.name,
        )
        if submission.failover is not None:
            submission = replace(submission, last=not follows(job.trigger, run_times[-1]))
        self._submit(submission)

    def _submit(self, submission: Submission) -> None:
        dispatch = dispatcher(
            self._inner, self._scheduler._dispatch_event, awaited=submission.awaited
        )
        carrier = Carrier(submission, self.locks, dispatch)
        self._inner.submit_job(carrier, list(submission.run_times[-1:]))

    def _run_again(self, watch: Watch) -> None:
        """Submit run times again whose holder died. Called by the watching thread."""
        try:
            job = job_to_run_again(self._scheduler, watch.submission)
        except Exception:
            logger.exception("The job store could not be asked for job %r", watch.submission.job.id)
            self._watcher.add(replace(watch, seconds_left=RETRY_INTERVAL))
            return
        if job is None:
            return
        submission = replace(watch.submission, job=job)

        def submit() -> None:
            try:
                self._submit(submission)
            except MaxInstancesReachedError:
                self._watcher.add(replace(watch, seconds_left=RETRY_INTERVAL))

        try:
            call_as_scheduler(self._inner, submit)
        except RuntimeError as error:
            # The loop or the pool is closed; nothing runs here any more.
            logger.debug("Task %r: not run again: %s", submission.task_name, error)

    def _check_database(self) -> None:
        """Check the task lock table; leave no connection behind if it cannot be used."""
        try:
            self.locks.check()
        except TaskLockDatabaseError:
            # Logged as an outage. An application should start while its database restarts; the
            # first claim finds out what this check could not.
            pass
        except TaskLockError:
            self.locks.close()
            raise

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        raise NotImplementedError("the wrapped executor does this")

    def _check_job(self, event: Any) -> None:
        """Say at once what is wrong with a job that was added or modified."""
        job = self._scheduler.get_job(event.job_id, event.jobstore)
        if job is None or self._scheduler._executors.get(job.executor) is not self:
            return
        try:
            self._tasks.resolve(job, event.jobstore, self._scheduler._jobstores)
        except TaskLockError as error:
            logger.error("Job %r will not run: %s", job.id, error)
