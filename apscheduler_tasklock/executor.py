"""The lock-aware executor: what a scheduler sees."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from math import inf
from typing import Any, Literal
from uuid import UUID, uuid4

from apscheduler.events import (
    EVENT_JOB_ADDED,
    EVENT_JOB_MODIFIED,
    EVENT_JOB_REMOVED,
    EVENT_SCHEDULER_STARTED,
)
from apscheduler.executors.base import BaseExecutor, MaxInstancesReachedError
from apscheduler.triggers.date import DateTrigger
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._lock.protocol import RunState
from apscheduler_tasklock._scheduler.adapter import (
    call_as_scheduler,
    check_gevent,
    dispatcher,
    make_inner,
    report_jobs,
)
from apscheduler_tasklock._scheduler.attempt import Fire
from apscheduler_tasklock._scheduler.failover import Failover, JobKey
from apscheduler_tasklock._scheduler.lateness import SchedulerPasses, WorkerQueue
from apscheduler_tasklock._scheduler.names import function_reference
from apscheduler_tasklock._scheduler.notify import BlockedTasks, Notifier, Reports
from apscheduler_tasklock._scheduler.submission import Submission
from apscheduler_tasklock._scheduler.tasks import ResolvedTask, Tasks
from apscheduler_tasklock._scheduler.workers import LostWorkers, pool_processes, shutting_down
from apscheduler_tasklock._scheduler.wrapper import Carrier, JobEvents
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
)
from apscheduler_tasklock.events import EVENT_TASK_LOCK_ERROR, TaskLockEvent
from apscheduler_tasklock.locks import TaskLocks, make_replica_id
from apscheduler_tasklock.options import (
    DEFAULT,
    DEFAULTS,
    Default,
    LockOptions,
    parse_positive_seconds,
    parse_switch,
)
from apscheduler_tasklock.schema.table import DEFAULT_TABLE

logger = logging.getLogger(__name__)

# Seconds that a shutdown waits for claims under way to be given up, or made and handed over, and
# for those of coroutines that it cuts. A claim without an answer is given up a second before.
CLOSING_TIMEOUT = 2.5

# Attribute of a wrapped executor, from its start until its shutdown: who wraps it.
_WRAPPED_BY = "_tasklock_executor"


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
    :param lease: how long after its last sign of life a holder counts as dead; a ``timedelta`` or
        seconds, 1 or more. By default 60 s, or a third of the maximum lock if that is shorter;
        ``None``: when its maximum lock ends. A living holder renews its claim every third of it.
    :param failover: whether another replica runs the window of a dead holder again. Without, it is
        not run again; with it, it may be run twice. It is given up after ``max_takeovers``, or when
        its maximum lock ends.
    :param max_takeovers: how often in a row a task's dead runs are taken over, until the next one
        that dies is given up
    :param poll_interval: longest time between two looks for dead holders, a ``timedelta`` or
        seconds; it is also looked three times in a lease of a job with failover
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
    :param replica_id: who holds a lock, shown in logs; by default host, process and a random part
    :param enabled: ``False`` runs every job here, without a lock and without a database, as in
        development and tests
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
        lease: timedelta | float | str | Default | None = DEFAULT,
        failover: bool | str = False,
        max_takeovers: int | str = 3,
        poll_interval: timedelta | float | str = 5,
        period: timedelta | float | str = timedelta(hours=1),
        jobs: Mapping[str, Any] | None = None,
        namespace: str = "",
        on_database_error: Literal["skip", "run"] = "skip",
        claim_timeout: timedelta | float | str = 10,
        schema: str | None = None,
        table: str = DEFAULT_TABLE,
        replica_id: str | None = None,
        enabled: bool | str = True,
        **executor_options: Any,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        if not isinstance(namespace, str):
            raise TaskLockOptionError(f"{where}: namespace must be a text, not {namespace!r}")
        options = {
            "min_factor": min_factor,
            "max_factor": max_factor,
            "lease": lease,
            "failover": failover,
            "max_takeovers": max_takeovers,
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
        self._started_in: int | None = None  # the process
        self.locks = TaskLocks(
            database,
            replica_id=replica_id or make_replica_id(),
            claim_timeout=parse_positive_seconds(claim_timeout, "claim_timeout", where),
            schema=schema or None,  # a configuration file says '' for none
            table=table,
        )
        self._enabled = parse_switch(enabled, "enabled", where)
        self._poll_interval = parse_positive_seconds(poll_interval, "poll_interval", where)
        self._defaults = defaults
        self._workers = WorkerQueue()
        self._blocked = BlockedTasks()
        self._passes = SchedulerPasses()
        self._coroutines: set[Fire] = set()
        self._active: dict[UUID, _Active] = {}
        self._lost_workers = LostWorkers(self.locks)
        self._failover = Failover(
            self.locks, self, lambda: self._scheduler.state, self._poll_interval, self._given_up
        )

    def start(self, scheduler: Any, alias: str) -> None:
        """Start the wrapped executor. Called by the scheduler.

        :raises TaskLockSchemaError: the task lock table is missing, old or not permitted
        :raises TaskLockOptionError: options of a job that was added already are impossible, or
            another scheduler runs with this executor
        """
        self._check_scheduler(scheduler)
        super().start(scheduler, alias)
        for job, jobstore, _ in scheduler._pending_jobs:
            if job.executor == alias:
                self._resolve(job, jobstore)
        inner = make_inner(self._executor, self._executor_options, scheduler)
        if isinstance(inner, TaskLockExecutor):
            raise TaskLockOptionError(
                f"{type(self).__name__}: the executor to wrap is a TaskLockExecutor itself; one "
                "claims the lock, two would wait for each other"
            )
        if getattr(inner, _WRAPPED_BY, self) is not self:
            raise TaskLockOptionError(
                f"{type(self).__name__}: the executor to wrap is wrapped by another one already, "
                "which would no longer hear of its own jobs; give each an executor of its own"
            )
        self._inner = inner
        if self._enabled:
            check_gevent(inner)
            self._check_database()
        self.locks.open()
        try:
            self._inner.start(scheduler, alias)
        except BaseException:
            self.locks.close()  # the check has left a connection
            raise
        self._instances = self._inner._instances
        setattr(self._inner, _WRAPPED_BY, self)
        report_jobs(self._inner, self._ended, self._failed)
        scheduler.add_listener(self._check_job, EVENT_JOB_ADDED | EVENT_JOB_MODIFIED)
        scheduler.add_listener(self._forget_job, EVENT_JOB_REMOVED)
        scheduler.add_listener(self._tell_of_unknown_jobs, EVENT_SCHEDULER_STARTED)
        if self._enabled:
            self._failover.open()
        self._started_in = os.getpid()
        self._log_start(alias)

    def _check_scheduler(self, scheduler: Any) -> None:
        # In a forked child nothing of the parent's runs.
        if self._started_in == os.getpid() and self._scheduler is not scheduler:
            raise TaskLockOptionError(
                f"{type(self).__name__}: it is the executor of another running scheduler, which "
                "would no longer hear of its own jobs; give each scheduler an executor of its own"
            )

    def _log_start(self, alias: str) -> None:
        if not self._enabled:
            logger.info("Task locks are off for the executor %r: every job runs here", alias)
            return
        lease = self._defaults.lease
        logger.info(
            "Task locks are on for the executor %r: database %s, table %r, replica %r, lease %s, "
            "failover %s",
            alias,
            self.locks.where,
            self.locks.table.fullname,
            self.locks.replica_id,
            "by default" if lease is None else "none" if lease == inf else f"{lease:g} s",
            "on" if self._defaults.failover else "off",
        )

    def shutdown(self, wait: bool = True) -> None:
        """Shut the wrapped executor down. From now on nothing is claimed.

        What runs in threads and processes goes on until it ends, and is released then. Coroutines
        that an event loop's executor cancels are cut: their claims are ended here, since the loop
        may be over before they notice. With failover another replica runs their windows again.
        A claim whose job has not begun is handed over.

        It takes 5 seconds at most beyond the jobs that it waits for.

        :param wait: whether to let running jobs end first
        """
        self.locks.stop_claiming()
        self._failover.close()
        if self._inner is not None:
            with shutting_down(self._inner):
                self._inner.shutdown(wait)
            vars(self._inner).pop(_WRAPPED_BY, None)
        cuts = self._cut_coroutines()
        deadline = time.monotonic() + CLOSING_TIMEOUT
        self.locks.claiming.wait(CLOSING_TIMEOUT)
        futures.wait(cuts, timeout=max(0.0, deadline - time.monotonic()))
        if self._scheduler is not None:
            self._scheduler.remove_listener(self._check_job)
            self._scheduler.remove_listener(self._forget_job)
            self._scheduler.remove_listener(self._tell_of_unknown_jobs)
        self.locks.close(blocking=True)
        self._started_in = None

    def _cut_coroutines(self) -> list[futures.Future[None]]:
        """Begin to end the claims of coroutine jobs that the wrapped executor has cancelled."""
        if not hasattr(self._inner, "_pending_futures"):
            return []  # as tornado's, which lets them go on
        return [self.locks.offload.call(fire.cut_by_shutdown) for fire in list(self._coroutines)]

    def submit_job(self, job: Any, run_times: list[datetime]) -> None:
        """Hand a job to the wrapped executor; its worker will claim it. No database work here.

        :raises MaxInstancesReachedError: as many instances as allowed are running
        :raises TaskLockOptionError: the job's options are impossible
        """
        scheduler_pass = self._passes.submitting(run_times[-1])
        jobstore = job._jobstore_alias
        try:
            task = self._resolve(job, jobstore)
        except TaskLockError as error:
            for run_time in run_times:
                self._scheduler._dispatch_event(
                    TaskLockEvent(
                        EVENT_TASK_LOCK_ERROR, job.id, jobstore, "", run_time, exception=error
                    )
                )
            raise
        submission = self._submission(job, jobstore, task, run_times)
        try:
            self._submit(replace(submission, scheduler_pass=scheduler_pass))
        except RuntimeError:
            if not self.locks.closed:
                raise
            # Its pool is shut down. It came due in the very moment of the shutdown.
            for run_time in run_times:
                notifier = Notifier(self._scheduler._dispatch_event, self._blocked)
                Reports(submission, run_time, self.locks, notifier).not_begun()

    def _resolve(self, job: Any, jobstore: str) -> ResolvedTask:
        if not self._enabled:
            return ResolvedTask(job.id, None)
        return self._tasks.resolve(job, jobstore, self._scheduler._jobstores)

    def _submission(
        self, job: Any, jobstore: str, task: ResolvedTask, run_times: Sequence[datetime]
    ) -> Submission:
        key = (job.id, jobstore)
        if task.options is not None and not self._failover.knows(task.name, key):
            self._failover.know(task.name, key, self._lease(job, jobstore, task))
        return self._make_submission(job, jobstore, task, run_times)

    def _make_submission(
        self, job: Any, jobstore: str, task: ResolvedTask, run_times: Sequence[datetime]
    ) -> Submission:
        return Submission(
            job=job,
            jobstore=jobstore,
            trigger=job.trigger,
            run_times=tuple(run_times),
            task_name=task.name,
            options=task.options,
            run_unlocked=self._run_unlocked,
            logger_name=self._logger.name,
            runs=what_runs(job),
            one_off=isinstance(job.trigger, DateTrigger),
        )

    def _lease(self, job: Any, jobstore: str, task: ResolvedTask) -> float | None:
        """Return the lease of a job with failover, within which its dead holders are found."""
        run_time = job.next_run_time or datetime.now(timezone.utc)  # none while it is paused
        submission = self._make_submission(job, jobstore, task, [run_time])
        if not submission.failover or submission.options is None:
            return None
        _, max_lock = submission.lock_times(run_time)
        return submission.options.lease_within(max_lock)

    def _submit(self, submission: Submission) -> None:
        submission = replace(submission, claim_ids=tuple(uuid4() for _ in submission.run_times))
        dispatch = dispatcher(
            self._inner, self._scheduler._dispatch_event, awaited=submission.awaited
        )
        notifier = Notifier(dispatch, self._blocked)
        carrier = Carrier(submission, self.locks, notifier, self._workers, self._coroutines)
        key = submission.claim_ids[0]
        self._active[key] = _Active(submission)
        try:
            self._inner.submit_job(carrier, list(submission.run_times[-1:]))
        except BaseException:
            self._active.pop(key, None)
            raise
        active = self._active.get(key)  # it may be over by now
        if active is not None:
            active.processes = pool_processes(self._inner)

    def _ended(self, job_id: str, events: JobEvents | None) -> None:
        """Note what became of a submission. Called where the wrapped executor reports it."""
        if events is None:
            active = self._oldest_active(job_id)
        else:
            active = self._active.pop(events.claim_ids[0], None)
            self.locks.adopt_pending(events.owed)
        if active is not None:
            self._failover.ended(active.submission)
        for blocked in events.blocked if events is not None else ():
            self._failover.add(blocked)

    def _failed(self, job_id: str, error: BaseException) -> None:
        """Note that a submission was not run to its end: its worker has died, or was cancelled."""
        active = self._oldest_active(job_id)
        if active is None:
            return
        self._failover.ended(active.submission)
        if isinstance(error, futures.BrokenExecutor) and active.submission.options is not None:
            self._lost_workers.add(active.processes, active.submission)

    def _oldest_active(self, job_id: str) -> _Active | None:
        for key, active in list(self._active.items()):
            if active.submission.job.id == job_id:
                return self._active.pop(key, None)
        return None

    def _given_up(self, dead: RunState, key: JobKey, reason: str) -> None:
        """Tell of a dead run that is not run again any more."""
        job_id, jobstore = key
        error = TaskLockError(
            f"task {dead.task_name!r}: the window of {dead.window_start} is given up: {reason}. "
            f"Its last holder was {dead.holder!r} (token {dead.token})"
        )
        logger.error("%s", error)
        dispatch = dispatcher(self._inner, self._scheduler._dispatch_event, awaited=False)
        dispatch(
            TaskLockEvent(
                EVENT_TASK_LOCK_ERROR,
                job_id,
                jobstore,
                dead.task_name,
                dead.window_start,
                holder=dead.holder,
                token=dead.token,
                reason="given up",
                exception=error,
            )
        )

    # What the failover needs to know of the scheduler's jobs.

    def list_tasks(self) -> list[tuple[str, JobKey, float | None]]:
        """Return all jobs on this executor: their tasks, keys and leases. Asks the job stores."""
        found = []
        for job in self._scheduler.get_jobs():
            if self._scheduler._executors.get(job.executor) is not self:
                continue
            jobstore = job._jobstore_alias
            try:
                task = self._resolve(job, jobstore)
            except TaskLockError:  # told when it was added, or will be when it is submitted
                continue
            if task.options is not None:
                found.append((task.name, (job.id, jobstore), self._lease(job, jobstore, task)))
        return found

    def submission_for(self, key: JobKey, dead: RunState) -> Submission | None:
        """Return what runs a dead run's window again, if the job is there and is still the same."""
        found = self._find(key, dead.task_name, dead.runs)
        if found is None:
            return None
        job, task = found
        run_time = dead.window_start.astimezone(self._scheduler.timezone)
        submission = self._submission(job, key[1], task, [run_time])
        return replace(submission, dead_run=dead, exempt_from_misfire=True)

    def renewed(self, submission: Submission) -> Submission | None:
        """Return a refused submission with the job as it is now, if it is still to run."""
        if submission.is_last:
            return submission
        key = (submission.job.id, submission.jobstore)
        found = self._find(key, submission.task_name, submission.runs)
        if found is None:
            return None
        job, task = found
        return self._submission(job, submission.jobstore, task, submission.run_times)

    def submit(self, submission: Submission, not_now: Callable[[], None]) -> None:
        """Submit it, where the scheduler does. ``not_now`` is called if that cannot be now."""

        def submit() -> None:
            try:
                self._submit(replace(submission, scheduler_pass=self._passes.alone()))
            except MaxInstancesReachedError:
                not_now()
            except Exception as error:  # noqa: BLE001  # whatever the wrapped executor raises
                # Its pool is closed or broken, or threads are limited. It is tried again.
                logger.debug("Task %r: not run again: %r", submission.task_name, error)
                not_now()

        try:
            call_as_scheduler(self._inner, submit)
        except RuntimeError as error:  # the loop is closed
            logger.debug("Task %r: not run again: %s", submission.task_name, error)
            not_now()

    def _find(self, key: JobKey, task_name: str, runs: str) -> tuple[Any, ResolvedTask] | None:
        """Return a job as it is now, if it is not paused and still is this task."""
        job = self._scheduler.get_job(*key)
        if job is None or job.next_run_time is None:
            return None
        if self._scheduler._executors.get(job.executor) is not self:
            return None
        try:
            task = self._resolve(job, key[1])
        except TaskLockOptionError:  # told when the job was changed
            return None
        if task.options is None or task.name != task_name or what_runs(job) != runs:
            return None
        return job, task

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
        """Say at once what is wrong with a job that was added or changed at run time."""
        job = self._scheduler.get_job(event.job_id, event.jobstore)
        if job is None or self._scheduler._executors.get(job.executor) is not self:
            return
        try:
            task = self._resolve(job, event.jobstore)
        except TaskLockError as error:
            logger.error("Job %r will not run: %s", job.id, error)
            return
        if task.options is not None:
            lease = self._lease(job, event.jobstore, task)
            self._failover.know(task.name, (job.id, event.jobstore), lease)
            if event.code == EVENT_JOB_ADDED:
                self._tell_what_the_lock_limits(job, event.jobstore, task)

    def _tell_what_the_lock_limits(self, job: Any, jobstore: str, task: ResolvedTask) -> None:
        assert task.options is not None
        if job.max_instances > 1:
            logger.info(
                "Job %r: of its max_instances=%d one run goes on at a time, on all replicas "
                "together, while the task lock stands",
                job.id,
                job.max_instances,
            )
        lease, run_time = task.options.lease, job.next_run_time or datetime.now(timezone.utc)
        if lease is None or lease == inf:
            return
        _, max_lock = self._make_submission(job, jobstore, task, [run_time]).lock_times(run_time)
        if lease > max_lock:
            logger.warning(
                "Job %r: its lease of %g s is above its maximum lock of %g s, which ends its "
                "claims first; they are not renewed",
                job.id,
                lease,
                max_lock,
            )

    def _tell_of_unknown_jobs(self, _event: Any) -> None:
        """Name the jobs that ``jobs`` has options for and that do not run here."""
        if not (unknown := self._tasks.job_ids):
            return  # and the job stores need not be asked
        executors = self._scheduler._executors
        unknown -= {j.id for j in self._scheduler.get_jobs() if executors.get(j.executor) is self}
        if unknown:
            # No warning: an application may well add them after the start.
            logger.info(
                "%s has options for jobs that it does not have so far: %s",
                type(self).__name__,
                ", ".join(map(repr, sorted(unknown))),
            )

    def _forget_job(self, event: Any) -> None:
        self._failover.forget((event.job_id, event.jobstore))


class _Active:
    """A submission that is not over.

    :ivar processes: of the pool that runs it, by their ids
    """

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.processes: Mapping[int, Any] = {}


def what_runs(job: Any) -> str:
    """Return what a job runs, as of ``ClaimRequest``."""
    reference = function_reference(job)
    if isinstance(job.trigger, DateTrigger):
        return f"{reference} at {job.trigger.run_date.astimezone(timezone.utc).isoformat()}"
    return reference
