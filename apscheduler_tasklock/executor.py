"""The lock-aware executor: what a scheduler sees."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from math import inf
from typing import Any, ClassVar, Literal
from uuid import UUID

from apscheduler.events import (
    EVENT_ALL_JOBS_REMOVED,
    EVENT_JOB_ADDED,
    EVENT_JOB_MODIFIED,
    EVENT_JOB_REMOVED,
    EVENT_SCHEDULER_STARTED,
)
from apscheduler.executors.base import BaseExecutor, MaxInstancesReachedError
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.deadline import SHUTDOWN_LIMIT
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.client import (
    LockClient,
    client_at_start,
    client_now,
)
from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock._lock.messages import RunState
from apscheduler_tasklock._scheduler.adapter import (
    SchedulerAdapter,
    call_as_scheduler,
    cancels_coroutines,
    check_gevent,
    check_importable,
    dispatcher,
    has_own_threads,
    interpreter_is_ending,
    is_wrapped_by_another,
    jobstore_of,
    make_inner,
    report_jobs,
    unwrap,
    worker_processes,
    wrap,
)
from apscheduler_tasklock._scheduler.attempt import RunAttempt
from apscheduler_tasklock._scheduler.jobs import ExecutorJobs
from apscheduler_tasklock._scheduler.known import KnownTasks
from apscheduler_tasklock._scheduler.lateness import SchedulerPasses, WorkerQueue
from apscheduler_tasklock._scheduler.notices import JobNotices
from apscheduler_tasklock._scheduler.notify import BlockedTasks, Notifier, Reports
from apscheduler_tasklock._scheduler.presence import Presence
from apscheduler_tasklock._scheduler.queued import QueuedRuns
from apscheduler_tasklock._scheduler.registration import Registrar
from apscheduler_tasklock._scheduler.stops import saying
from apscheduler_tasklock._scheduler.submission import (
    Blocked,
    JobKey,
    RunResult,
    Submission,
    as_handed_out,
    hand_out_of,
)
from apscheduler_tasklock._scheduler.tasks import ResolvedTask, Tasks
from apscheduler_tasklock._scheduler.watch import Watch
from apscheduler_tasklock._scheduler.workers import LostWorkers, shutting_down
from apscheduler_tasklock._scheduler.wrapper import JobWrapper, RunContext
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
)
from apscheduler_tasklock.events import (
    EVENT_TASK_LOCK_ERROR,
    TaskLockEvent,
)
from apscheduler_tasklock.locks import lock_settings
from apscheduler_tasklock.options import (
    DEFAULT,
    DEFAULTS,
    Default,
    LockOptions,
    check_stored_options,
    parse_positive_seconds,
    parse_seconds,
    parse_switch,
)
from apscheduler_tasklock.schema.table import DEFAULT_TABLE
from apscheduler_tasklock.status import Health

logger = logger_of(__name__)

# Seconds that a shutdown waits for claims under way to be given up, or made and handed over, and
# for those of coroutines that it cuts. A claim without an answer is given up a second before.
CLOSING_TIMEOUT = 2.5
# So many jobs are named that a stop waits for.
MOST_TOLD = 5


class TaskLockExecutor(BaseExecutor):  # type: ignore[misc]  # APScheduler has no types
    """Runs each job on one replica per window, with a task lock in PostgreSQL.

    Every replica schedules its jobs normally. Right before a job runs, in the worker of the
    executor that this one wraps, its task is claimed; only where the claim is granted it runs.

    Plugin alias: ``tasklock``

    :param database: PostgreSQL URL, or an SQLAlchemy ``Engine`` with the psycopg driver: a
        connection is opened as the engine opens its own, and its pool is not used
    :param executor: executor to wrap: an instance, a plugin alias such as ``"processpool"``, or a
        mapping as in a scheduler's configuration, ``{"type": "processpool", "max_workers": 2}``;
        by default the scheduler's own default executor
    :param min_factor: minimum lock, as a multiple of the job's period; 0 or more. By default 0.9;
        of one-off jobs, 60 s are the minimum lock instead.
    :param max_factor: maximum lock, as a multiple of the job's period; above 0
    :param lease: how long after its last sign of life a holder counts as dead; a ``timedelta`` or
        seconds, 1 or more. By default 60 s, or a third of the maximum lock if that is shorter; none
        where that is below 15 s and there is no failover;
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
    :param on_database_error: what becomes of a job when the database stays unavailable: ``"skip"``
        it, or ``"run"`` it without a lock
    :param claim_timeout: seconds for which a claim is tried while the database is unavailable
    :param schema: schema of the task lock table; by default up to the ``search_path``
    :param table: name of the task lock table
    :param history: how many runs of each task the run history keeps, up to 10,000; 0: none
    :param redact: returns what the run history keeps of an exception's message, or ``None``; it
        must be importable where jobs run in worker processes
    :param replica_id: who holds a lock, shown in logs; by default host, process and a random part
    :param enabled: ``False`` runs every job here, without a lock and without a database, as in
        development and tests
    :param executor_options: passed on to the wrapped executor, as ``max_workers=20``
    :raises TaskLockOptionError: an option is unknown or impossible
    """

    timings: ClassVar[Timings] = Timings()

    def __init__(
        self,
        database: str | URL | Engine,
        executor: str | Mapping[str, Any] | BaseExecutor | None = None,
        *,
        min_factor: float | str | Default = DEFAULT,
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
        history: int | str = 100,
        redact: Callable[[BaseException], str | None] | None = None,
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
        self._defaults = LockOptions.parse(options, where).over(DEFAULTS, where)
        self._defaults.check_default_minimum(where)
        tasks = Tasks(self._defaults, jobs or {}, namespace, where)
        if on_database_error not in ("skip", "run"):
            raise TaskLockOptionError(
                f"{where}: on_database_error must be 'skip' or 'run', not {on_database_error!r}"
            )
        if isinstance(executor, BaseExecutor) and executor_options:
            raise TaskLockOptionError(
                f"{where}: unknown options {', '.join(executor_options)}; the executor to wrap is "
                "an instance already, and takes none"
            )
        self._executor = executor
        self._executor_options = executor_options
        self._run_unlocked = on_database_error == "run"
        self._inner: Any = None
        self._started_in: int | None = None  # the process
        settings = lock_settings(
            database,
            replica_id=replica_id,
            claim_timeout=parse_positive_seconds(claim_timeout, "claim_timeout", where),
            schema=schema or None,  # a configuration file says '' for none
            table=table,
            history=history,
            redact=redact,
        )
        self._enabled = parse_switch(enabled, "enabled", where)
        self._poll_interval = parse_positive_seconds(poll_interval, "poll_interval", where)
        self._adapter = SchedulerAdapter(self)
        self._jobs = ExecutorJobs(
            self._adapter,
            tasks if self._enabled else None,
            run_unlocked=self._run_unlocked,
            logger_name=lambda: self._logger.name,
            submit=self._submit_again,
            notices=lambda: self._notices,
            clock=self._clock,
        )
        self._blocked = BlockedTasks()
        self._begin(LockClient(replace(settings, timings=self.timings)))
        replace_in_each_child(self)

    def _begin(self, locks: LockClient) -> None:
        """Make what lives until the next shutdown, or until this process forks."""
        self.locks = locks
        self._workers = WorkerQueue()
        self._passes = SchedulerPasses()
        self._coroutines: set[RunAttempt] = set()
        self._queued = QueuedRuns(self.timings)
        self._contexts: dict[bool, RunContext] = {}  # of coroutines, and of functions
        self._active: dict[UUID, _Active] = {}
        self._idle = threading.Condition()  # told when one of these is over
        self._lost_workers = LostWorkers(locks)
        self._known = KnownTasks(self._defaults.lease if self._defaults.failover else None)
        self._notices = JobNotices()  # of jobs that are left alone
        self._registrar = Registrar(
            locks,
            self._known,
            self._jobs.registration,
            self._jobs.has_next_run,
            self._adapter.hands_out,
            self._adapter.stored_tasks,
            self.timings,
            self._notices,
        )
        self._presence = Presence(locks, self._known, self._rejected, self.timings)
        self._watch = Watch(
            locks,
            self._known,
            self._jobs,
            self._registrar,
            lambda: self._adapter.state,
            self._poll_interval,
            self._given_up,
            looked=self._note_look,
            timings=self.timings,
        )

    def _note_look(self, has_listed: bool) -> None:
        self._presence.note_look(has_listed=has_listed)
        self._notices.sum_up()

    def replace_in_child(self) -> None:
        """Leave the parent's locks alone. Called in a forked child, where no scheduler runs."""
        self._begin(self.locks.for_child())

    def start(self, scheduler: Any, alias: str) -> None:
        """Start the wrapped executor. Called by the scheduler.

        :raises TaskLockSchemaError: tables are missing, old or not permitted; the message names all
            that is missing
        :raises TaskLockOptionError: options of a job that was added already are impossible, or
            another scheduler runs with this executor, or its ``redact`` cannot go to the worker
            processes that it has
        """
        self._check_scheduler(scheduler)
        is_again = self._leave_failed_start()
        super().start(scheduler, alias)
        inner = make_inner(self._executor, self._executor_options, scheduler)
        if isinstance(inner, TaskLockExecutor):
            raise TaskLockOptionError(
                f"{type(self).__name__}: the executor to wrap is a TaskLockExecutor itself; one "
                "claims the lock, two would wait for each other"
            )
        if is_wrapped_by_another(self, inner):
            raise TaskLockOptionError(
                f"{type(self).__name__}: the executor to wrap is wrapped by another one already, "
                "which would no longer hear of its own jobs; give each an executor of its own"
            )
        check_importable(self.locks.settings.redact, inner)
        self._inner = inner
        for job, jobstore in self._adapter.pending_jobs(alias):
            self._jobs.resolve(job, jobstore)
        self._contexts = {}  # which are of the last one, if this start follows one that failed
        locks = client_at_start(self.locks, scheduler if self._enabled else None)
        if locks is not self.locks:
            self._begin(locks)
        try:
            if self._enabled:
                check_gevent(inner, scheduler)
                self._check_database()
            self._inner.start(scheduler, alias)
            self._log_start(alias)  # a handler of the application's may raise
        except BaseException:
            self.locks.close()  # the check has left a connection
            self._started_in = None  # its looks, if it had been started, end with the connection
            raise
        wrap(self, self._inner)
        report_jobs(self._inner, self._ended, self._failed)
        self._add_listeners(scheduler)
        if self._enabled and not is_again:
            self._presence.start()
            self._watch.start()
        self._started_in = os.getpid()

    def _clock(self) -> float:
        """Return the wall clock's time, in seconds since 1970."""
        return time.time()

    def _leave_failed_start(self) -> bool:
        """Undo a start after which the scheduler's own has failed; tell whether there was one."""
        is_again = self._started_in == os.getpid()
        if is_again:
            unwrap(self._inner)
            self._remove_listeners()
        return is_again

    def _check_scheduler(self, scheduler: Any) -> None:
        # In a forked child nothing of the parent's runs.
        if self._started_in == os.getpid() and self._adapter.is_of_another(scheduler):
            raise TaskLockOptionError(
                f"{type(self).__name__}: it is the executor of another running scheduler, which "
                "would no longer hear of its own jobs; give each scheduler an executor of its own"
            )

    def _log_start(self, alias: str) -> None:
        if not self._enabled:
            logger.info("Task locks are off for the executor %r: every job runs here", alias)
            return
        if self.locks.settings.stand_in is not None:
            logger.info("Task locks of the executor %r need no database, as in a test", alias)
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
        over_at = time.monotonic() + SHUTDOWN_LIMIT
        self.locks.stop_claiming()
        self._watch.looks.close()
        self._presence.close(self.locks.what_runs() if wait else ())
        if self._inner is not None:
            begun = time.monotonic()
            with shutting_down(self._inner), self._saying_waiting(wait):
                self._inner.shutdown(wait)
            unwrap(self._inner)
            over_at += time.monotonic() - begun
        if wait:  # an operator sees what runs until then
            self._presence.close(())
        # What is left then is for releases that have to be sent once more.
        deadline = min(time.monotonic() + CLOSING_TIMEOUT, over_at - 1.0)
        runs = list(self._coroutines) if cancels_coroutines(self._inner) else []
        # Coroutines that the wrapped executor has cancelled, and that have not noticed.
        cut = [(run, ticket) for run in runs if (ticket := run.begin_cut()) is not None]
        self.locks.claiming.wait(max(0.0, deadline - time.monotonic()))
        for run, ticket in cut:
            run.report_end(ticket, max(0.0, deadline - time.monotonic()))
        for run in runs:
            if run.is_being_released:
                run.report_at_stop(max(0.0, deadline - time.monotonic()))
        self._remove_listeners()
        self.locks.close(blocking=True, until=over_at)
        self._started_in = None

    def _saying_waiting(self, wait: bool = True) -> AbstractContextManager[None]:
        if not wait:
            return nullcontext()
        return saying(self._tell_waiting, self.timings.waiting_interval)

    def _tell_waiting(self) -> None:
        self._say_waiting()
        self._presence.close(self.locks.what_runs())

    def _say_waiting(self) -> None:
        """Say which jobs a stop waits for."""
        # What waits in a pool of threads is not begun any more; a process pool does not tell.
        may_wait = not has_own_threads(self._inner)
        running = [active for active in list(self._active.values()) if active.begun_at or may_wait]
        if running:
            more = len(running) - MOST_TOLD
            logger.warning(
                "The stop waits for jobs to end: %s",
                ", ".join(
                    [active.in_words() for active in running[:MOST_TOLD]]
                    + [f"{more} more"] * (more > 0)
                ),
            )

    def _note_begun(self, submission: Submission) -> None:
        active = self._active.get(submission.claim_ids[0])
        if active is not None:
            active.begun_at = time.monotonic()

    def _add_listeners(self, scheduler: Any) -> None:
        scheduler.add_listener(self._check_job, EVENT_JOB_ADDED | EVENT_JOB_MODIFIED)
        scheduler.add_listener(self._forget_job, EVENT_JOB_REMOVED)
        scheduler.add_listener(self._forget_all_jobs, EVENT_ALL_JOBS_REMOVED)
        scheduler.add_listener(self._tell_of_unknown_jobs, EVENT_SCHEDULER_STARTED)

    def _remove_listeners(self) -> None:
        self._adapter.remove_listeners(
            self._check_job,
            self._forget_job,
            self._forget_all_jobs,
            self._tell_of_unknown_jobs,
        )

    def health(self) -> Health:
        """Return how this executor fares, for a container's probes. Asks nobody.

        A database that is unavailable makes it ``degraded``, and neither not live nor not ready: it
        must not restart every replica.
        """
        degraded = []
        if self.locks.outage.reason is not None:
            degraded.append(f"the database is unavailable: {self.locks.outage.reason}")
        degraded += [f"rejected by the database: {each}" for each in self._rejected()]
        if self._watch.overdue:
            degraded.append(f"overdue tasks: {', '.join(sorted(self._watch.overdue))}")
        if self._known.left_out:
            degraded.append(f"jobs whose own code hangs: {', '.join(self._known.left_out)}")
        if self._watch.looks.hangs:
            degraded.append(
                "the look at the tasks has not come back, as from a job store that hangs"
            )
        started = self._started_in == os.getpid()
        goes_on = self.locks.is_live and self._adapter.stores_are_live and self._adapter.is_alive
        return Health(
            live=started and goes_on,
            ready=started and (self._watch.has_looked or not self._enabled),
            degraded=tuple(degraded),
        )

    def _rejected(self) -> tuple[str, ...]:
        """Return what the database rejects of this replica's work, its job store's too."""
        return tuple(sorted({*self.locks.rejections.told(), *self._adapter.rejected_by_stores()}))

    def drain(self, timeout: float | timedelta | None = None, *, coroutines: bool = True) -> bool:
        """Claim nothing more, and wait until what runs here has ended; then shut down as usual.

        Other replicas run what is due meanwhile. It is for a container that is about to be stopped.
        Do not call it on the scheduler's own event loop, where the jobs end: use
        ``await asyncio.to_thread(executor.drain, 50)`` there.

        :param timeout: seconds or ``timedelta``; ``None``: for as long as it takes
        :param coroutines: whether to wait for coroutines, too, which a shutdown would cancel
        :return: whether nothing runs any more of what it has waited for
        """
        seconds = None
        if timeout is not None:
            seconds = parse_seconds(timeout, "timeout", f"{type(self).__name__}.drain()")
        self.locks.stop_claiming()
        self._watch.looks.close()
        with self._saying_waiting(), self._idle:
            return self._idle.wait_for(lambda: self._is_idle(coroutines), seconds)

    def _is_idle(self, coroutines: bool) -> bool:
        return not any(
            coroutines or not active.submission.awaited for active in list(self._active.values())
        )

    def wrap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called in place of a job's function, where the job runs.

        Here it is the function itself. A subclass may return another callable, which sets something
        up around it; for a coroutine function, one that returns an awaitable. It is called for each
        run, under the lock, but not in worker processes.
        """
        return function

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.wrap_function(function)  # as it is now

    def submit_job(self, job: Any, run_times: list[datetime]) -> None:
        """Hand a job to the wrapped executor; its worker will claim it. No database work here.

        :raises MaxInstancesReachedError: as many instances as allowed are running
        :raises TaskLockOptionError: the job's options are impossible, or its function never runs
        """
        scheduler_pass = self._passes.submitting(run_times[-1])
        job = as_handed_out(job)
        jobstore = jobstore_of(job)
        try:
            task = self._jobs.resolve(job, jobstore)
        except TaskLockError as error:
            for run_time in run_times:
                self._adapter.dispatch(
                    TaskLockEvent(
                        EVENT_TASK_LOCK_ERROR, job.id, jobstore, "", run_time, exception=error
                    )
                )
            raise
        if task.own_because is not None:
            logger.debug(
                "Job %s: run here, without a lock: it is a one-off job without an id, and %s",
                job.id,
                task.own_because,
            )
        submission = self._jobs.submission(job, jobstore, task, run_times, scheduler_pass)
        self._know(job, jobstore, task)
        try:
            self._submit(submission)
        except MaxInstancesReachedError:
            if not self._waits_for_its_own_run(submission):
                raise
        except RuntimeError:
            if not self.locks.closed and not interpreter_is_ending():
                raise
            # It came due in the very moment of the shutdown; or the interpreter is ending, which
            # shuts pools down and waits for their jobs before the application's `atexit` functions.
            self._tell_not_begun(submission)

    def _waits_for_its_own_run(self, submission: Submission) -> bool:
        """Tell whether a job that runs here already is run after that, and see to it."""
        if submission.hand_out is not None:
            submission.job.not_taken()  # it is handed out again then
            return True
        running = self._extra_run(submission.job.id)
        if running is None:
            return False
        # That run is not the schedule's own, and must not cost it one. A standby's has the
        # window of this run time.
        if running.is_manual:
            self._watch.add(Blocked(submission, 0, is_new=True, waits=False, follows=True))
        return True

    def _extra_run(self, job_id: str) -> Submission | None:
        """Return what runs a job here that was asked for by hand, or in a replica's place."""
        for active in list(self._active.values()):
            submission = active.submission
            is_extra = submission.is_manual or submission.is_standby
            if submission.job.id == job_id and is_extra:
                return submission
        return None

    def _tell_not_begun(self, submission: Submission) -> None:
        notifier = Notifier(self._adapter.dispatch, self._blocked)
        for run_time in submission.run_times:
            Reports(submission, run_time, self.locks, notifier).not_begun()

    def _know(self, job: Any, jobstore: str, task: ResolvedTask) -> None:
        key = (job.id, jobstore)
        hand_out = hand_out_of(job)
        if hand_out is not None and hand_out.following is None:
            return  # its store finds out if its last run dies
        # A stored job was listed without its lease.
        is_known = hand_out is None and self._known.has(task.name, key)
        if task.options is not None and not is_known:
            self._know_as(task.name, key, self._jobs.lease(job, jobstore, task))

    def _know_as(self, task_name: str, key: JobKey, lease: float | None) -> None:
        if self._known.add(task_name, key, lease):
            self._watch.looks.wake()  # the pause that goes on may be longer than this lease

    def _submit(self, submission: Submission) -> None:
        key = submission.claim_ids[0]
        self._active[key] = _Active(submission)
        try:
            self._hand_to_worker(submission)
        except BaseException:
            self._active.pop(key, None)
            self._queued.take(submission)
            with self._idle:
                self._idle.notify_all()
            raise
        active = self._active.get(key)  # it may be over by now
        if active is not None:
            active.processes = worker_processes(self._inner)

    def _hand_to_worker(self, submission: Submission) -> None:
        """Submit what claims and runs to the wrapped executor."""
        context = self._context(awaited=submission.awaited)
        if has_own_threads(self._inner):
            self._queued.add(submission)
        self._inner.submit_job(JobWrapper(submission, context), list(submission.run_times[-1:]))

    def _context(self, *, awaited: bool) -> RunContext:
        """Return what the submissions share that are made now, of coroutines or of functions."""
        locks, context = client_now(self.locks), self._contexts.get(awaited)
        if context is None or context.locks is not locks:
            dispatch = dispatcher(self._inner, self._adapter.dispatch, awaited=awaited)
            context = self._contexts[awaited] = RunContext(
                locks,
                Notifier(dispatch, self._blocked, self._adapter.has_listener),
                self._workers,
                self._coroutines,
                self._queued,
                self._wrap,
                self._note_begun,
            )
        return context

    def _submit_again(self, submission: Submission, not_now: Callable[[], None]) -> None:
        """Submit what runs again, where the scheduler submits."""

        def submit() -> None:
            try:
                self._submit(submission.anew(self._passes.alone()))
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

    def _ended(self, job_id: str, result: RunResult | None) -> None:
        """Note what became of a submission. Called where the wrapped executor reports it."""
        if result is None:
            active = self._oldest_active(job_id)
        else:
            active = self._active.pop(result.claim_ids[0], None)
            self.locks.adopt_pending(result.pending)
        if active is not None:
            self._over(active.submission)
        for blocked in result.blocked if result is not None else ():
            self._watch.add(blocked)

    def _failed(self, job_id: str, error: BaseException) -> None:
        """Note that a submission was not run to its end: its worker has died, or was cancelled."""
        active = self._oldest_active(job_id)
        if active is None:
            return
        self._over(active.submission)
        if isinstance(error, futures.BrokenExecutor) and active.submission.options is not None:
            self._lost_workers.add(active.processes, active.submission)

    def _over(self, submission: Submission) -> None:
        self._queued.take(submission)  # if no worker has: it was cancelled
        if submission.one_off and self._adapter.hands_out(submission.jobstore):
            self._forget(submission.key)
        self._watch.ended(submission)
        with self._idle:
            self._idle.notify_all()

    def _oldest_active(self, job_id: str) -> _Active | None:
        for key, active in list(self._active.items()):
            if active.submission.job.id == job_id:
                return self._active.pop(key, None)
        return None

    def _given_up(self, dead: RunState, key: JobKey, reason: str) -> None:
        """Tell of a dead run that is not run again any more."""
        job_id, jobstore = key
        what, run_time = f"the window of {dead.window_start}", dead.window_start
        if dead.manual:
            what, run_time = "the run that was asked for by hand", dead.database_time
        error = TaskLockError(
            f"task {dead.task_name!r}: {what} is given up: {reason}. "
            f"Its last holder was {dead.holder!r} (token {dead.token})"
        )
        logger.error("%s", error)
        dispatcher(self._inner, self._adapter.dispatch, awaited=False)(
            TaskLockEvent(
                EVENT_TASK_LOCK_ERROR,
                job_id,
                jobstore,
                dead.task_name,
                run_time,
                holder=dead.holder,
                token=dead.token,
                reason="given up",
                exception=error,
            )
        )

    def _check_database(self) -> None:
        """Check the tables."""
        # Logged as an outage. An application should start while its database restarts; the first
        # look finds out what this check could not.
        with suppress(TaskLockDatabaseError):
            self.locks.check(jobs=self._adapter.has_store_beside(self.locks))

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        raise NotImplementedError("the wrapped executor does this")

    def _check_job(self, event: Any) -> None:
        """Say at once what is wrong with a job that was added or changed at run time."""
        if self._adapter.hands_out(event.jobstore):
            return  # that store has checked it, and told of it
        job = self._adapter.job(event.job_id, event.jobstore)
        if job is None:
            return
        try:
            task = self._jobs.resolve(job, event.jobstore)
        except TaskLockError as error:
            logger.error("Job %r will not run: %s", job.id, error)
            return
        if task.options is not None:
            moved = event.code == EVENT_JOB_MODIFIED
            self._note_job(job, event.jobstore, task, moved=moved)
            if event.code == EVENT_JOB_ADDED:
                self._jobs.tell_what_the_lock_limits(job, event.jobstore, task)

    def _note_job(self, job: Any, jobstore: str, task: ResolvedTask, *, moved: bool = True) -> None:
        key = (job.id, jobstore)
        self._know_as(task.name, key, self._jobs.lease(job, jobstore, task))
        self._registrar.note(key, moved=moved)

    @property
    def inner(self) -> Any:
        """The wrapped executor; ``None`` before the first start."""
        return self._inner

    @property
    def takes_hand_outs(self) -> bool:
        """Whether a ``TaskLockJobStore`` may leave it to this executor to claim what it hands out.

        Not with ``enabled=False``: then its jobs run at most once, without a lock.
        """
        return self._enabled

    def check_stored_job(self, job: Any, jobstore: str) -> str | None:
        """Return the task of a job of a ``TaskLockJobStore``; ``None`` if it has no lock.

        :raises TaskLockOptionError: its options are impossible, or make no sense for such a job
        """
        task = self._jobs.resolve(job, jobstore)
        if task.options is None:
            return None
        where = f"job {job.id!r}"
        check_stored_options(task.options, where)
        if self._run_unlocked:
            raise TaskLockOptionError(
                f"{where}: its executor has on_database_error='run', which makes no sense in a "
                "TaskLockJobStore: without the database nobody knows what is due"
            )
        return task.name

    def note_stored_job(self, job: Any, jobstore: str) -> None:
        """Note a recurring job that was added to a ``TaskLockJobStore`` here, or changed."""
        task = self._jobs.resolve(job, jobstore)
        if task.options is not None:
            self._note_job(job, jobstore, task)

    def look_after(self, task_name: str, job_id: str, jobstore: str) -> None:
        """See to the dead run of a job of a ``TaskLockJobStore``, as to those of other jobs."""
        self._known.add(task_name, (job_id, jobstore), None)
        self._watch.looks.wake()

    def _tell_of_unknown_jobs(self, _event: Any) -> None:
        """Name the jobs that ``jobs`` has options for and that do not run here."""
        if unknown := self._jobs.unknown_ids():
            # No warning: an application may well add them after the start.
            logger.info(
                "%s has options for jobs that it does not have so far: %s",
                type(self).__name__,
                ", ".join(map(repr, sorted(unknown))),
            )

    def _forget_job(self, event: Any) -> None:
        self._forget((event.job_id, event.jobstore))

    def _forget_all_jobs(self, event: Any) -> None:
        for key in self._known.job_keys():
            if event.alias in (None, key[1]):
                self._forget(key)

    def _forget(self, key: JobKey) -> None:
        self._known.forget(key)
        self._jobs.forget(key)


class _Active:
    """A submission that is not over.

    :ivar processes: of the pool that runs it, by their ids
    :ivar begun_at: when a worker of this process began it, on the monotonic clock
    """

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.processes: Mapping[int, Any] = {}
        self.begun_at: float | None = None

    def in_words(self) -> str:
        """Return which job it is, and for how long it has run."""
        told = f"{self.submission.job.id!r} (task {self.submission.task_name!r}"
        if self.begun_at is not None:
            told += f", has run for {time.monotonic() - self.begun_at:.0f} s"
        return f"{told})"
