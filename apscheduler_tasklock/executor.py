"""``TaskLockExecutor``: users give it to a scheduler, and it wraps another executor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from math import inf
from typing import Any, ClassVar, Literal
from uuid import uuid4

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

from apscheduler_tasklock._application import call_where_allowed
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.url import UNUSED
from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock._lock.protocol_messages import (
    ClaimRequest,
    ClosedDeadRun,
    MissedTimes,
    TaskRow,
)
from apscheduler_tasklock._lock.settings import lock_settings
from apscheduler_tasklock._lock.user import (
    ReplicaUser,
    user_at_start,
    user_or_stand_in,
)
from apscheduler_tasklock._runs.active_submissions import ActiveSubmissions
from apscheduler_tasklock._runs.adapter import (
    SchedulerAdapter,
    accepts_nothing_more,
    call_on_its_loop,
    cancels_coroutines,
    check_gevent,
    event_dispatcher,
    has_processes,
    intercept_reports,
    interpreter_is_ending,
    is_wrapped_by_another,
    make_inner,
    unwrap,
    wrap,
)
from apscheduler_tasklock._runs.blocked_tasks import BlockedTasks
from apscheduler_tasklock._runs.claim_request import request_of
from apscheduler_tasklock._runs.deferred_runs import DeferredRuns
from apscheduler_tasklock._runs.executor_jobs import ExecutorJobs
from apscheduler_tasklock._runs.executor_run import ExecutorRun
from apscheduler_tasklock._runs.executor_runs import ExecutorParts, ExecutorRuns
from apscheduler_tasklock._runs.known_tasks import KnownTasks
from apscheduler_tasklock._runs.leadership import Leadership
from apscheduler_tasklock._runs.manual_runs import ManualRuns
from apscheduler_tasklock._runs.misfires import SchedulerPasses
from apscheduler_tasklock._runs.missed_runs import (
    MissedRuns,
    too_many_instances,
)
from apscheduler_tasklock._runs.presence import Presence
from apscheduler_tasklock._runs.process_runs import ProcessRuns
from apscheduler_tasklock._runs.registration import Registrar
from apscheduler_tasklock._runs.reports import (
    Notifier,
    event_of_closed,
    report_missed,
    report_not_begun,
    report_submitted,
    telemetry_of,
)
from apscheduler_tasklock._runs.run import JobKey
from apscheduler_tasklock._runs.skipped_jobs import SkippedJobsLog
from apscheduler_tasklock._runs.stopping import ShutDownTogether, reporting
from apscheduler_tasklock._runs.submission import DueRun, Submission
from apscheduler_tasklock._runs.tasks import ResolvedTask, Tasks
from apscheduler_tasklock._runs.unlocked_runs import UnlockedRuns
from apscheduler_tasklock._runs.watch import Watch
from apscheduler_tasklock._shutdown import WITHDRAWING_LIMIT, Shutdown
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
    raised_at_the_call,
)
from apscheduler_tasklock.events import (
    EVENT_TASK_LOCK_ERROR,
    TaskLockEvent,
)
from apscheduler_tasklock.options import (
    DEFAULT,
    DEFAULTS,
    LONGEST_LEADER_LEASE,
    OF_EXECUTOR,
    SHORTEST_LEASE,
    Default,
    LockOptions,
    check_stored_options,
    parse_choice,
    parse_positive_seconds,
    parse_seconds,
    parse_switch,
)
from apscheduler_tasklock.schema.table import DEFAULT_TABLE
from apscheduler_tasklock.status import Health, RunRequest

logger = logger_of(__name__)


class TaskLockExecutor(BaseExecutor, ShutDownTogether):  # type: ignore[misc]  # the base has no types
    """Runs each job on one replica per window, with a task lock in PostgreSQL.

    Every replica schedules its jobs normally. When the wrapped executor has a free worker, the
    replica claims the job's task. If the claim is granted, the job is given to that worker. If the
    claim is refused, the job does not run on this replica.

    Plugin alias: ``tasklock``

    The parameters from ``min_factor`` to ``retry_backoff``, and ``period``, are lock options of all
    jobs; see :class:`~apscheduler_tasklock.options.LockOptions`. Times are seconds or a
    ``timedelta``.

    :param database: PostgreSQL URL with libpq's options, such as
        ``postgresql://app:secret@localhost/app?sslmode=require``, or an SQLAlchemy ``Engine`` of
        ``create_engine("postgresql+psycopg://...")``. A folder of a socket as the host is
        ``%2Fvar%2Frun%2Fpostgresql``, or ``?host=/var/run/postgresql`` without a host before it. Of
        several hosts in the URL, the one that takes writes is used. The lock opens a connection of
        its own as the engine would, and does not use the engine's pool. By default
        ``TASKLOCK_DATABASE_URL`` of the environment.
    :param executor: executor to wrap: an instance, a plugin alias such as ``"processpool"``, or a
        mapping as in a scheduler's configuration, ``{"type": "processpool", "max_workers": 2}``. By
        default the scheduler's own default.
    :param lock: which jobs have a lock: ``"all"`` of them, except those with ``False`` in place of
        options; or only those that are ``"marked"``, by ``@task_lock``, by options in their kwargs
        or in ``jobs``, and jobs of a ``TaskLockJobStore``. A job without a lock runs on every
        replica.
    :param poll_interval: longest time between two looks, which read the tasks' rows, and find dead
        holders, overdue tasks, retries and requests for a run. A job with ``failover`` causes three
        looks in each lease. In a fleet of more than 100 replicas it is longer, at least 50 ms for
        each live one.
    :param jobs: options of single jobs, such as ``{"job-id": {"max_factor": 2}}``, for jobs whose
        kwargs or function cannot carry options
    :param namespace: put before every task name as it is (``"shop:"``), for applications that share
        a database
    :param on_database_error: what becomes of a run time while the database stays unavailable:
        ``"skip"`` it, or ``"run"`` it without a lock, in leader mode by who led last
    :param claim_timeout: for how long a claim is tried while the database is unavailable, a day at
        most
    :param schema: schema of the task lock table. By default the ``search_path`` decides.
    :param table: name of the task lock table
    :param history: how many runs of each task the run history keeps of those that ended well, and
        of those that did not, up to 10,000 each; 0: none
    :param redact: gets a job's exception, and returns what the run history keeps of its message, or
        ``None`` to keep no message
    :param tracebacks: whether the run history keeps the tracebacks of failed runs: file, line and
        function of each frame, and what ``redact`` returns for each exception in the chain
    :param release: the application's release, such as a version or the hash of a commit, 100
        printable ASCII characters at most. It is shown with the replica and with each run, so that
        a change of release can be seen beside what changed with it. By default
        ``TASKLOCK_RELEASE`` of the environment.
    :param keep_one_offs: how long rows of ended one-off jobs are kept, an hour at least. The
        longest value of the live replicas holds, and a row stays at least for its maximum lock and
        the job's ``grace``. They are deleted once an hour, with their history. A short time is for
        an application with very many one-off jobs.
    :param leader: whether one replica, the leader, asks for each run time first, and the other
        replicas ask for it some seconds later if nobody has run it. So a run time costs one claim,
        however many replicas there are. All replicas of a namespace elect one leader.
    :param leader_lease: how long after its last look a leader is replaced, 1 s to an hour. At least
        three looks, which are further apart in a large fleet. A short one makes looks come more
        often, three in each lease.
    :param replica_id: this replica's id, as the holder of locks and in logs; another one on each
        replica, and on each executor of a scheduler. By default host, process and a random part.
    :param enabled: ``False`` runs every job here, without a lock and without a database, for
        development and tests
    :param executor_options: goes to the wrapped executor, such as ``max_workers=20``
    :raises TaskLockOptionError: an option is unknown or impossible
    """

    timings: ClassVar[Timings] = Timings()

    @raised_at_the_call
    def __init__(
        self,
        database: str | URL | Engine | None = None,
        executor: str | Mapping[str, Any] | BaseExecutor | None = None,
        *,
        lock: Literal["all", "marked"] = "all",
        min_factor: float | str | Default = DEFAULT,
        max_factor: float | str = 5.0,
        lease: timedelta | float | str | Default | None = DEFAULT,
        failover: bool | str = False,
        max_takeovers: int | str = 3,
        retries: int | str = 0,
        retry_delay: timedelta | float | str = 30.0,
        retry_backoff: float | str = 2.0,
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
        tracebacks: bool | str = False,
        release: str | None = None,
        keep_one_offs: timedelta | float | str = timedelta(days=7),
        leader: bool | str = False,
        leader_lease: timedelta | float | str = 15,
        replica_id: str | None = None,
        enabled: bool | str = True,
        **executor_options: Any,
    ) -> None:
        # The parameters that are lock options.
        options = {name: value for name, value in locals().items() if name in OF_EXECUTOR}
        super().__init__()
        where = type(self).__name__
        if not isinstance(namespace, str):
            raise TaskLockOptionError(f"{where}: namespace must be a text, not {namespace!r}")
        self._defaults = LockOptions.parse(options, where).over(DEFAULTS, where)
        self._defaults.check_default_minimum(where)
        tasks = Tasks(self._defaults, jobs or {}, namespace, where, lock)
        in_outage = parse_choice(on_database_error, "on_database_error", where, ("skip", "run"))
        if isinstance(executor, BaseExecutor) and executor_options:
            raise TaskLockOptionError(
                f"{where}: unknown options {', '.join(executor_options)}; the executor to wrap is "
                "an instance already, and takes none"
            )
        self._executor = executor
        self._executor_options = executor_options
        self._run_unlocked = in_outage == "run"
        self._inner: Any = None
        self._started_in: int | None = None  # the id of the process that started this executor
        self._enabled = parse_switch(enabled, "enabled", where)
        settings = lock_settings(
            database or (None if self._enabled else UNUSED),
            where,
            replica_id=replica_id,
            claim_timeout=claim_timeout,
            schema=schema or None,  # a configuration file has '' for no schema
            table=table,
            history=history,
            redact=redact,
            tracebacks=tracebacks,
            release=release,
            keep_one_offs=keep_one_offs,
        )
        self._namespace, self._leader = namespace, parse_switch(leader, "leader", where)
        self._leader_lease = parse_seconds(
            leader_lease,
            "leader_lease",
            where,
            SHORTEST_LEASE,
            LONGEST_LEADER_LEASE,
            allowed="from 1 s to an hour",
        )
        self._poll_interval = parse_positive_seconds(poll_interval, "poll_interval", where)
        self._adapter = SchedulerAdapter(self)
        self._jobs = ExecutorJobs(
            self._adapter,
            tasks if self._enabled else None,
            run_unlocked=self._run_unlocked,
            logger_name=lambda: self._logger.name,
            submit_again=self._submit_again,
            notices=lambda: self._notices,
            clock=self._clock,
        )
        self._blocked = BlockedTasks()
        self.stored = StoredRuns(self)
        self._begin(ReplicaUser(replace(settings, timings=self.timings)))
        replace_in_each_child(self)

    def _begin(self, user: ReplicaUser) -> None:
        """Make the parts that are replaced after a shutdown, and in a forked child."""
        self.user = user
        self._shutdown = None
        self._passes = SchedulerPasses()
        # The notifier of coroutine jobs under the key True, and that of all other jobs under False.
        self._notifiers: dict[bool, Notifier] = {}
        self._active = ActiveSubmissions()
        self._instances = self._active.instances  # where APScheduler's own executors have it
        leases = [self._leader_lease] if self._leader else []
        if self._defaults.failover and self._defaults.lease is not None:
            leases.append(self._defaults.lease)
        self._known = KnownTasks(min(leases, default=None))
        self._notices = SkippedJobsLog()  # log lines about jobs that are skipped here
        self._missed = MissedRuns(user, self._poll_interval)
        self._registrar = Registrar(
            user,
            self._known,
            self._jobs.registration,
            self._jobs.has_next_run,
            self._adapter.is_shared,
            self._adapter.stored_tasks,
            self._notices,
            self._missed.note_rescheduled,
            self._jobs.forget,
        )
        self._deferred = DeferredRuns()
        self._leadership = self._make_leadership(user)
        self._presence = Presence(
            user,
            self._known,
            self._rejected,
            lambda: self._namespace if self._leadership and self._has_own_jobs() else None,
        )
        self._watch = Watch(
            user,
            self._known,
            self._jobs,
            self._deferred,
            self._registrar,
            lambda: self._adapter.state,
            self._poll_interval,
            self._given_up,
            note_look=self._note_look,
            missed=self._missed,
            leadership=self._leadership,
        )
        self._manual_runs = ManualRuns(
            user, self._adapter, self._jobs, self._known, self._watch, self._know
        )
        self._parts = ExecutorParts(
            active=self._active,
            adapter=self._adapter,
            jobs=self._jobs,
            known=self._known,
            deferred=self._deferred,
            missed=self._missed,
            presence=self._presence,
            watch=self._watch,
            leadership=self._leadership,
            # So that an application can replace `wrap_function` at run time.
            wrap_function=lambda function: self.wrap_function(function),  # noqa: PLW0108  # looked up for each run
        )
        self._runs = self._make_runs()

    def _make_leadership(self, user: ReplicaUser) -> Leadership | None:
        if not (self._leader and self._enabled):
            return None
        return Leadership(
            user,
            self._namespace,
            self._leader_lease,
            lambda: self._watch.looks.interval,
            has_own_jobs=self._has_own_jobs,
        )

    def _has_own_jobs(self) -> bool:
        """Return whether this replica has jobs that are not in a shared job store.

        All replicas read the jobs of a shared store, and no leader asks for them first.
        """
        return any(not self._adapter.is_shared(alias) for _, alias in self._known.job_keys())

    @property
    def is_leader(self) -> bool:
        """Whether this replica leads the replicas of its namespace; see the option ``leader``.

        Another replica may lead already if this one was suspended. That does no harm, because the
        leader only asks first.
        """
        return self._leadership is not None and self._leadership.is_leader

    def _note_look(self, has_listed: bool) -> None:
        self._presence.note_look(has_listed=has_listed)
        self._notices.sum_up()

    def _make_runs(self) -> ExecutorRuns | UnlockedRuns | None:
        """Return the object that runs jobs on the wrapped executor; ``None`` before a start."""
        if self._inner is None:
            return None
        if not self._enabled:
            return UnlockedRuns(self._inner, self._parts)
        kind = ProcessRuns if has_processes(self._inner) else ExecutorRuns
        return kind(self._inner, self._parts, self.user.thread)

    def _replace_in_child(self) -> None:
        """Make new parts in a forked child, so that the child leaves the parent's locks alone.

        No scheduler runs in a child that was just forked.
        """
        self._begin(self.user.for_child())

    @raised_at_the_call
    def start(self, scheduler: Any, alias: str) -> None:
        """Start the wrapped executor. Called by the scheduler.

        :raises TaskLockSchemaError: tables are missing, old or not permitted; the message names
            everything that is missing
        :raises TaskLockOptionError: options of a job that was added before the start are
            impossible, the executor to wrap cannot be made or wrapped, or another scheduler runs
            with this executor
        """
        self._check_scheduler(scheduler)
        is_again = self._leave_failed_start()
        super().start(scheduler, alias)
        inner = make_inner(self._executor, self._executor_options, scheduler)
        if isinstance(inner, TaskLockExecutor):
            raise TaskLockOptionError(
                f"{type(self).__name__}: the executor to wrap is a TaskLockExecutor itself; two "
                "nested ones would wait for each other"
            )
        if is_wrapped_by_another(self, inner):
            raise TaskLockOptionError(
                f"{type(self).__name__}: the executor to wrap is wrapped by another executor "
                "already, which would no longer get the reports of its own jobs; give each an "
                "executor of its own"
            )
        self._inner = inner
        self._missed.started_at = datetime.now(timezone.utc)
        self._jobs.forget_store(None)  # because a shutdown drops jobs in memory without an event
        for job, jobstore in self._adapter.pending_jobs(alias):
            self._jobs.note(job, jobstore, self._jobs.resolve(job, jobstore))
        self._notifiers = {}  # the notifiers of a failed start belong to another wrapped executor
        self._runs = self._make_runs()
        self._join(scheduler)
        try:
            if self._enabled:
                check_gevent(inner, scheduler)
                self._check_database()
            self._inner.start(scheduler, alias)
            self._log_start(alias)  # may raise, because a log handler is the application's code
        except BaseException:
            self.user.close()  # because the check has opened a connection
            # Closing has also ended the looks of an earlier start. The next start begins new looks.
            self._started_in = None
            raise
        wrap(self, self._inner)
        runs = self._runs  # read now, because the locks of a test may have replaced it
        assert runs is not None
        intercept_reports(self._inner, runs)
        self._add_listeners(scheduler)
        if self._enabled and not is_again:
            self._presence.start()
            self._watch.start()
        self._started_in = os.getpid()

    def _clock(self) -> float:
        """Return the wall clock's time, in seconds since 1970."""
        return time.time()

    def _leave_failed_start(self) -> bool:
        """Undo this executor's start if the scheduler's own start failed after it.

        :return: whether the scheduler's start had failed
        """
        is_again = self._started_in == os.getpid()
        if is_again:
            unwrap(self._inner)
            self._remove_listeners()
        return is_again

    def _join(self, scheduler: Any) -> None:
        """Share the connection and the leadership with the scheduler's other executors."""
        user = user_at_start(self.user, scheduler if self._enabled else None)
        if user is not self.user:
            self._begin(user)
        if self._leadership is not None:
            self._leadership.share(scheduler)

    def _check_scheduler(self, scheduler: Any) -> None:
        # In a forked child another scheduler may start this executor, because the parent's
        # scheduler has no thread there.
        if self._started_in == os.getpid() and self._adapter.is_of_another(scheduler):
            raise TaskLockOptionError(
                f"{type(self).__name__}: it is the executor of another running scheduler, which "
                "would no longer get the reports of its own jobs; give each scheduler an executor "
                "of its own"
            )

    def _log_start(self, alias: str) -> None:
        if not self._enabled:
            logger.info("Task locks are off for the executor %r: every job runs here", alias)
            return
        if self.user.settings.stand_in is not None:
            logger.info(
                "Task locks of the executor %r use no database, because "
                "apscheduler_tasklock.testing replaces it",
                alias,
            )
            return
        lease = self._defaults.lease
        logger.info(
            "Task locks are on for the executor %r: database %s, table %r, replica %r, lease %s, "
            "failover %s; jobs so far: %d with a lock, %d without",
            alias,
            self.user.where,
            self.user.table.fullname,
            self.user.replica_id,
            "by default" if lease is None else "none" if lease == inf else f"{lease:g} s",
            "on" if self._defaults.failover else "off",
            *self._jobs.counted(),
        )

    def shutdown(self, wait: bool = True) -> None:
        """Shut the wrapped executor down. From now on nothing is claimed.

        Jobs in threads and processes go on until they end, and each claim is released when its job
        ends. Coroutines that an event loop's executor cancels are cut: this method releases their
        claims, because the loop may be closed before the coroutines notice the cancellation. With
        failover another replica runs their windows again. Windows that are claimed, and whose jobs
        have not begun, are handed over.

        Without the time in which it waits for jobs, a shutdown takes 5 seconds at most, for all
        executors and job stores of a scheduler together.

        :param wait: whether to wait until running jobs have ended
        """
        with self._shutting_down() as shutdown:
            self._stop_runs(shutdown)
            self._presence.close(self.user.locks.what_runs() if wait else (), shutdown.last_at)
            try:
                if self._inner is not None:
                    self._shut_down_inner(shutdown, wait=wait)
            finally:  # because a pool's `shutdown` raises if one of its own workers calls it
                self._end_shutdown(shutdown, wait=wait)

    def _begin_shutdown(self, shutdown: Shutdown) -> None:
        """Let no run begin any more. Does not wait. :meth:`shutdown` is called later."""
        super()._begin_shutdown(shutdown)
        self._stop_claiming(0.0, closes=True)

    def _stop_claiming(self, seconds: float, *, closes: bool) -> None:
        """Claim nothing more, and withdraw what has not begun; see ``ExecutorRuns.stop``."""
        if self._leadership is not None:
            self._leadership.close()
        self.user.stop_claiming()
        self._watch.looks.close()
        if self._runs is not None:
            self._runs.stop(seconds, closes=closes)

    def _stop_runs(self, shutdown: Shutdown) -> None:
        if self._runs is not None:
            self._runs.stop(min(WITHDRAWING_LIMIT, shutdown.seconds_left), closes=True)

    def _shut_down_inner(self, shutdown: Shutdown, *, wait: bool) -> None:
        with self._reporting_waits(wait):
            begun = time.monotonic()
            self._inner.shutdown(wait)
            shutdown.note_waited(time.monotonic() - begun)
        # Once more, so that the replica's thread ends the leases of runs whose worker processes
        # have died meanwhile.
        self._stop_runs(shutdown)

    def _end_shutdown(self, shutdown: Shutdown, *, wait: bool) -> None:
        if self._inner is not None:
            unwrap(self._inner)
        if wait:  # so the runs that the replica's row still shows have ended
            self._presence.close((), shutdown.last_at)
        runs: list[ExecutorRun] = []
        if self._runs is not None and cancels_coroutines(self._inner):
            runs = list(self._runs.coroutines)
        # The wrapped executor has cancelled these coroutines, and they have not noticed it yet.
        cut = [(run, release) for run in runs if (release := run.begin_cut()) is not None]
        self.user.locks.wait_for_claims(shutdown.seconds_left)
        for run, release in cut:
            run.report_release(release, shutdown.seconds_left)
        for run in runs:
            if run.has_job_ended:
                run.report_at_stop(shutdown.seconds_left)
        self._remove_listeners()
        self.user.close(blocking=True, shutdown=shutdown)
        self._started_in = None

    def _reporting_waits(self, wait: bool = True) -> AbstractContextManager[None]:
        if not wait:
            return nullcontext()
        return reporting(self._report_waiting, self.timings.waiting_interval)

    def _report_waiting(self) -> None:
        self._active.log_waiting()
        self._presence.close(self.user.locks.what_runs())

    def _add_listeners(self, scheduler: Any) -> None:
        scheduler.add_listener(self._check_job, EVENT_JOB_ADDED | EVENT_JOB_MODIFIED)
        scheduler.add_listener(self._forget_job, EVENT_JOB_REMOVED)
        scheduler.add_listener(self._forget_all_jobs, EVENT_ALL_JOBS_REMOVED)
        scheduler.add_listener(self._log_unknown_jobs, EVENT_SCHEDULER_STARTED)

    def _remove_listeners(self) -> None:
        self._adapter.remove_listeners(
            self._check_job,
            self._forget_job,
            self._forget_all_jobs,
            self._log_unknown_jobs,
        )

    def health(self) -> Health:
        """Return this executor's health, for a container's probes. Sends nothing to the database.

        An unavailable database makes the executor ``degraded``. The executor stays live and ready,
        so that an outage does not restart every replica.
        """
        degraded = []
        if self.user.outage.reason is not None:
            degraded.append(f"the database is unavailable: {self.user.outage.reason}")
        degraded += [f"rejected by the database: {each}" for each in self._rejected()]
        if self._watch.overdue:
            degraded.append(f"overdue tasks: {', '.join(sorted(self._watch.overdue))}")
        if self._known.left_out:
            degraded.append(f"jobs whose own code hangs: {', '.join(self._known.left_out)}")
        if self._watch.looks.hangs:
            degraded.append(
                "a look at the tasks waits for code of the application, such as a job store that "
                "hangs"
            )
        locked, unlocked = self._jobs.counted()
        started = self._started_in == os.getpid()
        goes_on = (
            self.user.thread.is_live and self._adapter.stores_are_live and self._adapter.is_alive
        )
        return Health(
            live=started and goes_on,
            ready=started and (self._watch.has_looked or not self._enabled),
            degraded=tuple(degraded),
            locked_jobs=locked,
            unlocked_jobs=unlocked,
        )

    def _rejected(self) -> tuple[str, ...]:
        """Return the work of this replica and of its job stores that the database rejects."""
        return tuple(
            sorted({*self.user.rejections.reported(), *self._adapter.rejected_by_stores()})
        )

    def drain(self, timeout: float | timedelta | None = None, *, coroutines: bool = True) -> bool:
        """Claim nothing more, and wait until the runs of this executor have ended.

        Call this method in a container that is about to be stopped, and then shut the scheduler
        down as usual. Other replicas run the jobs that come due meanwhile.

        Do not call this method on the scheduler's own event loop, because it would block the loop
        on which the jobs have to end. Use ``await asyncio.to_thread(executor.drain, 50)``.

        Give a ``timeout`` if a job, or a listener of a job's events, calls this method, because
        that job cannot end before this method returns.

        :param timeout: limits the wait; seconds or ``timedelta``; ``None``: no limit
        :param coroutines: whether to wait for coroutines, too, which a shutdown would cancel
        :return: whether all runs that this method has waited for have ended
        """
        seconds = None
        if timeout is not None:
            seconds = parse_seconds(timeout, "timeout", f"{type(self).__name__}.drain()")
        self._stop_claiming(WITHDRAWING_LIMIT, closes=False)
        with self._reporting_waits():
            return self._active.wait_until_none(seconds, coroutines=coroutines)

    def run_now(
        self, job_id: str, jobstore: str | None = None, by: str | None = None
    ) -> RunRequest:
        """Ask for a manual run of a job: one run, now, whatever its windows.

        If this replica has the job, it begins the run at once, unless its workers are busy, the
        task is running, or the scheduler is paused; then the run begins afterwards. Another replica
        begins the run if this one does not have the job. Another call before the run has begun does
        not ask for a second run. The schedule does not move. If nobody begins the run within an
        hour, the request expires.

        Any thread may call this, also in a job or a listener. In a thread whose event loop runs,
        use ``await executor.run_now_async(...)``. Only a listener may call this method there: it
        gets the request before it is written, with the token 0, and an error is a WARNING.

        :param job_id: the job's id
        :param jobstore: the alias of the job's store; by default all stores are searched
        :param by: who asks, shown to operators; by default this process's user and host
        :return: the request; if another request was open, that one
        :raises TaskLockOptionError: two job stores have a job with this id, ``by`` has more than
            4,000 characters, or an option of the job is impossible
        :raises TaskLockNotFoundError: neither this replica nor the task lock table has such a job
        :raises TaskLockStateError: the job has no task lock, or is a one-off job; no live replica
            has it; the scheduler does not run; or an event loop runs in this thread
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        return self._manual_runs.ask(job_id, jobstore, by)

    async def run_now_async(
        self, job_id: str, jobstore: str | None = None, by: str | None = None
    ) -> RunRequest:
        """Do the same as :meth:`run_now` in a coroutine, which does not block its event loop."""
        return await self._manual_runs.ask_async(job_id, jobstore, by)

    def wrap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable that is called in place of a job's function.

        This class returns the function itself. A subclass may return a callable that sets something
        up around the function; for a coroutine function, that callable returns an awaitable. The
        callable is called for each run, under the lock, but not in worker processes.
        """
        return function

    def submit_job(self, job: Any, run_times: list[datetime]) -> None:
        """Queue a job's run times, to be claimed and run. Sends nothing to the database.

        :raises MaxInstancesReachedError: as many instances as allowed are running
        :raises TaskLockOptionError: the job's options are impossible, or a call of its function
            would not run the function's body
        """
        submitted_at = self._passes.submitting(run_times[-1])
        jobstore = self._adapter.jobstore_of(job)
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
        self._jobs.log_own(job, task)
        submission = self._jobs.submission(job, jobstore, task, run_times, submitted_at)
        self._know(job, jobstore, task)
        try:
            self._submit(submission)
        except MaxInstancesReachedError:
            self._note_too_many_instances(submission)
            raise
        except RuntimeError:
            if not self.user.closed and not interpreter_is_ending():
                raise
            # Either the job came due at the moment of the shutdown. Or the interpreter ends, which
            # closes pools before the application's `atexit` functions shut the scheduler down.
            self._report_not_begun(submission)

    def _note_too_many_instances(self, submission: Submission) -> None:
        """Note that run times are missed, because their job has ``max_instances`` runs here."""
        job, runs = submission.job, self._runs
        if submission.options is None or not isinstance(runs, ExecutorRuns):
            return  # because without a lock nothing is noted
        cause, reason = too_many_instances(
            submission,
            self.user,
            is_running=runs.is_running(job.id),
            is_deferred=self._deferred.has(submission.task_name),
            waits_for_worker=runs.waits_for_worker(job.id),
        )
        for run_time in submission.run_times:
            with suppress(Exception):  # a custom trigger's own code may raise anything
                request = request_of(submission, run_time, uuid4())
                assert isinstance(request, ClaimRequest)
                self._missed.note_missed(request, cause, reason)

    def _report_not_begun(self, submission: Submission) -> None:
        for run_time in submission.run_times:
            report_not_begun(submission, run_time, telemetry_of(submission))

    def _know(self, job: Any, jobstore: str, task: ResolvedTask) -> None:
        key = (job.id, jobstore)
        if task.options is not None and not self._known.has(task.name, key):
            self._know_as(task.name, key, self._jobs.lease(job, jobstore, task))

    def _know_as(self, task_name: str, key: JobKey, lease: float | None) -> None:
        if self._known.add(task_name, key, lease):
            self._watch.looks.wake()  # because the next look may be due only after this lease

    def _submit(self, submission: Submission) -> None:
        """Put a submission into the queue."""
        job, runs = submission.job, self._runs
        assert runs is not None
        # A stored job has no limit here, because its lock lets one run go on at a time.
        most = job.max_instances if submission.due is None else None
        self._active.count(submission, most)
        try:
            runs.submit(
                submission, user_or_stand_in(self.user).locks, self._notifier(submission.awaited)
            )
        except BaseException:
            self._active.forget(submission)
            raise

    def _notifier(self, awaited: bool) -> Notifier:
        """Return the notifier of coroutines or of functions; it is made at the first call."""
        notifier = self._notifiers.get(awaited)
        if notifier is None:
            dispatch = event_dispatcher(self._inner, self._adapter.dispatch, awaited=awaited)
            notifier = self._notifiers[awaited] = Notifier(
                partial(call_where_allowed, dispatch),
                self._blocked,
                self._adapter.has_listener,
                self._missed.note_missed,
            )
        return notifier

    def _submit_again(self, submission: Submission, not_now: Callable[[], None]) -> None:
        """Submit a run that a look has found, in the thread where the scheduler submits.

        :param not_now: called if the run could not be submitted, so that a later look tries again
        """

        def submit() -> None:
            try:
                self._submit(submission.anew(time.monotonic()))
            except MaxInstancesReachedError:
                not_now()
            except Exception as error:  # noqa: BLE001  # whatever the wrapped executor raises
                # The pool is closed or broken, or no thread can be started.
                logger.debug("Task %r: not run again: %r", submission.task_name, error)
                not_now()

        try:
            call_on_its_loop(self._inner, submit)
        except RuntimeError as error:  # the loop is closed
            logger.debug("Task %r: not run again: %s", submission.task_name, error)
            not_now()

    def _given_up(self, dead: TaskRow, closed: ClosedDeadRun, key: JobKey, reason: str) -> None:
        """Report a dead run that is given up."""
        job_id, jobstore = key
        dispatch = event_dispatcher(self._inner, self._adapter.dispatch, awaited=False)
        if closed.outcome is not None:  # else its holder has reported that it was handed over
            dispatch(event_of_closed(closed, dead.task_name, key))
        what, run_time = f"the window of {dead.window_start}", dead.window_start
        if dead.manual:
            # A manual run has no window, so its event has the time of this decision.
            what, run_time = "the manual run", dead.database_time
        error = TaskLockError(
            f"task {dead.task_name!r}: {what} is given up: {reason}. "
            f"Its last holder was {dead.holder!r} (token {dead.token})"
        )
        logger.error("%s", error)
        dispatch(
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
        """Check the tables, unless the database is unavailable.

        :raises TaskLockSchemaError: tables are missing, old or not permitted
        """
        # An unavailable database is logged as an outage and is no error here, so that an
        # application can start while its database restarts. The first look after the outage finds
        # what is wrong with the tables.
        with suppress(TaskLockDatabaseError):
            self.user.rights.check(jobs=self._adapter.has_store_beside(self.user))

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        raise NotImplementedError("the wrapped executor does this")

    def _check_job(self, event: Any) -> None:
        """Log what is wrong with a job when it is added or changed, not only at its run time."""
        if self._adapter.is_shared(event.jobstore):
            return  # because a `TaskLockJobStore` itself checks its jobs, and raises errors
        job = self._adapter.job(event.job_id, event.jobstore)
        self._jobs.forget_counted((event.job_id, event.jobstore))  # it may have changed executors
        if job is None:
            return
        try:
            task = self._jobs.resolve(job, event.jobstore)
        except TaskLockError as error:
            logger.error("Job %r will not run: %s", job.id, error)
            return
        self._jobs.note(job, event.jobstore, task)
        if task.options is not None:
            moved = event.code == EVENT_JOB_MODIFIED
            self._note_job(job, event.jobstore, task, moved=moved)
            if event.code == EVENT_JOB_ADDED:
                self._jobs.forget_submitted((job.id, event.jobstore))
                self._jobs.log_limited_settings(job, event.jobstore, task)

    def _note_job(self, job: Any, jobstore: str, task: ResolvedTask, *, moved: bool = True) -> None:
        key = (job.id, jobstore)
        self._know_as(task.name, key, self._jobs.lease(job, jobstore, task))
        self._registrar.note(key, moved=moved)

    @property
    def inner(self) -> Any:
        """The wrapped executor; ``None`` before the first start."""
        return self._inner

    def _log_unknown_jobs(self, _event: Any) -> None:
        """Log the ids in the option ``jobs`` for which this executor has no job."""
        if unknown := self._jobs.unknown_ids():
            # At INFO, because an application may add these jobs after the start.
            logger.info(
                "%s has options for jobs that it does not have so far: %s",
                type(self).__name__,
                ", ".join(map(repr, sorted(unknown))),
            )

    def _forget_job(self, event: Any) -> None:
        self._parts.forget_job((event.job_id, event.jobstore))

    def _forget_all_jobs(self, event: Any) -> None:
        for key in self._known.job_keys():
            if event.alias in (None, key[1]):
                self._parts.forget_job(key)
        self._jobs.forget_store(event.alias)


class StoredRuns:
    """An executor's runs of jobs of a ``TaskLockJobStore``, as the job store begins them.

    :param executor: the executor
    :ivar claims: whether the executor claims its runs. An executor with ``enabled=False`` runs each
        run time of these jobs at most once, without a lock.
    """

    def __init__(self, executor: TaskLockExecutor) -> None:
        self._executor = executor
        self.claims = executor._enabled

    @property
    def room(self) -> float:
        """How many more runs of a ``TaskLockJobStore`` can get a worker now; ``inf``: no limit."""
        return 0 if self._executor._runs is None else self._executor._runs.room

    def call_if_there_is_room(self, note_room: Callable[[], object]) -> None:
        """Call a function whenever :attr:`room` has become larger. The function must not wait."""
        if self._executor._runs is not None:
            self._executor._runs.call_if_there_is_room(note_room)

    @property
    def begins_nothing(self) -> bool:
        """Whether no run begins any more: after a drain or a shutdown, and at the process's end."""
        return self._executor.user.closed or accepts_nothing_more(self._executor._inner)

    def submit_stored(self, job: Any, jobstore: str, due: DueRun) -> None:
        """Queue a due job of a ``TaskLockJobStore``, to be claimed and run.

        :raises RuntimeError: the scheduler is shut down, the interpreter ends, or no thread can be
            started
        """
        submission = self._submission(job, jobstore, due.move.run_time, due)
        if due.move.following is not None:
            # The job's lease is noted here, because `look_after` and the list of tasks add the job
            # without its lease. The last run time needs no note, because the job store calls
            # `look_after` if that run dies.
            lease = self._executor._jobs.lease_of(submission)
            self._executor._know_as(submission.task_name, submission.key, lease)
        self._executor._submit(submission)

    def run_stored(self, job: Any, jobstore: str, run_time: datetime) -> None:
        """Run a job of a ``TaskLockJobStore`` without a lock.

        The job's row was moved to the next run time before.

        :raises Exception: whatever the wrapped executor raises
        """
        submission = self._submission(job, jobstore, run_time)
        report_submitted(submission, self._executor._notifier(submission.awaited))
        self._executor._submit(submission)

    def report_missed(self, job: Any, jobstore: str, due: DueRun) -> None:
        """Report a missed run time of a job of a ``TaskLockJobStore``."""
        submission = self._submission(job, jobstore, due.move.run_time, due)
        telemetry_of(submission).skipped("misfire")
        report_missed(submission, self._executor._notifier(submission.awaited))

    def note_missed(
        self, job: Any, jobstore: str, due: DueRun, missed: Callable[[], Iterable[MissedTimes]]
    ) -> None:
        """Note run times of a job of a ``TaskLockJobStore`` that no replica runs."""
        submission = self._submission(job, jobstore, due.move.run_time, due)
        if submission.options is None:
            return
        with suppress(Exception):  # a custom trigger's own code may raise anything
            request = request_of(submission, due.move.run_time, uuid4())
            assert isinstance(request, ClaimRequest)
            self._executor._missed.note_stored(request, missed)

    def _submission(
        self, job: Any, jobstore: str, run_time: datetime, due: DueRun | None = None
    ) -> Submission:
        jobs, now = self._executor._jobs, time.monotonic()
        task = jobs.resolve(job, jobstore)
        return replace(jobs.submission(job, jobstore, task, [run_time], now), due=due)

    def check_stored_job(self, job: Any, jobstore: str) -> str | None:
        """Check a job of a ``TaskLockJobStore``, and return its task's name.

        :return: ``None`` if the job has no lock
        :raises TaskLockOptionError: its options are impossible, or make no sense for a stored job
        """
        task = self._executor._jobs.resolve(job, jobstore)
        if task.options is None:
            return None
        where = f"job {job.id!r}"
        check_stored_options(task.options, where)
        if self._executor._run_unlocked:
            raise TaskLockOptionError(
                f"{where}: its executor has on_database_error='run', which makes no sense in a "
                "TaskLockJobStore: without the database nobody knows which jobs are due"
            )
        return task.name

    def note_stored_job(self, job: Any, jobstore: str, *, is_declared: bool) -> None:
        """Note that this replica has added or changed a recurring job of a ``TaskLockJobStore``.

        The next look registers the job's task.

        :param is_declared: whether the application has added the job, also in the place of one that
            is there
        """
        task = self._executor._jobs.resolve(job, jobstore)
        if task.options is not None:
            self._executor._note_job(job, jobstore, task)
            if is_declared:
                self._executor._jobs.log_late_retries(job, jobstore, task)

    def look_after(self, task_name: str, job_id: str, jobstore: str) -> None:
        """Let the next look check a task, because the run of its job in a shared store is dead."""
        self._executor._known.add(task_name, (job_id, jobstore), None)
        self._executor._watch.looks.wake()
