"""The adapter: all private attributes of APScheduler 3.10 and 3.11 that the task lock uses.

Public names of APScheduler are used directly, in any module.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, thread
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from contextvars import Context, copy_context
from datetime import datetime, timedelta, timezone
from functools import partial
from inspect import iscoroutine
from math import inf
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, JobExecutionEvent
from apscheduler.executors.base import BaseExecutor
from apscheduler.executors.debug import DebugExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED, BaseScheduler
from apscheduler.util import maybe_ref

from apscheduler_tasklock._application import call_where_allowed
from apscheduler_tasklock._lock.job_rows import StoredTask
from apscheduler_tasklock._lock.words import printable
from apscheduler_tasklock._runs.reports import Dispatch
from apscheduler_tasklock._runs.run import JobKey
from apscheduler_tasklock.errors import TaskLockOptionError

# Limits the seconds for which a job of a memory job store may have been due. A scheduler that
# leaves a job due for longer is treated as stuck.
LATEST_WAKEUP = 60.0

# An event loop that has not made its calls is woken again after so many seconds, at the next call.
WAKE_AGAIN = 1.0

# The modules of APScheduler whose executors call a job's function, and do not await the coroutine
# that it may return.
_AWAIT_NOTHING = {
    f"apscheduler.executors.{name}" for name in ("debug", "gevent", "pool", "twisted")
}

# APScheduler's modules whose executors have no limit of workers.
_BEGIN_ALL = {"apscheduler.executors.debug", "apscheduler.executors.gevent"}
# Limits the runs that an executor has at a time if the number of its workers is not known.
UNKNOWN_WORKERS = 10

# The name of an attribute that wrapped executors have from their start until their shutdown. The
# attribute refers to the executor that wraps them.
_WRAPPED_BY = "_tasklock_executor"

# The lock that a pool of threads has while it starts a thread.
_starts_of_threads = getattr(thread, "_global_shutdown_lock", None)

# APScheduler's own dispatch of events to listeners. A subclass of the scheduler may override it.
_DISPATCH_EVENT = BaseScheduler._dispatch_event


class SchedulerAdapter:
    """The parts of an executor's scheduler that the task lock uses.

    :param executor: the executor. Methods that return jobs return the jobs on this executor only.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    @property
    def _scheduler(self) -> Any:
        return self._executor._scheduler

    @property
    def state(self) -> int:
        """The scheduler's state: one of APScheduler's ``STATE_*``, also before a start."""
        return STATE_STOPPED if self._scheduler is None else int(self._scheduler.state)

    @property
    def is_alive(self) -> bool:
        """Whether the scheduler is alive. Reads no job store that does I/O.

        ``scheduler.running`` is not enough, because it stays true after the scheduler's thread has
        died. So this property checks the thread, and whether jobs in memory have been due for too
        long.
        """
        scheduler = self._scheduler
        if scheduler is None or scheduler.state == STATE_STOPPED:
            return False
        thread = getattr(scheduler, "_thread", None)
        if isinstance(thread, threading.Thread) and not thread.is_alive():
            return False
        if scheduler.state != STATE_RUNNING:
            return True
        stores = [s for s in list(self.jobstores.values()) if isinstance(s, MemoryJobStore)]
        try:
            next_times = [store.get_next_run_time() for store in stores]
        except IndexError:  # a store's last job was removed at this moment
            return True
        latest = datetime.now(timezone.utc) - timedelta(seconds=LATEST_WAKEUP)
        return all(next_time is None or next_time > latest for next_time in next_times)

    def remove_listeners(self, *listeners: Callable[[Any], None]) -> None:
        """Remove listeners from the scheduler, if there is one."""
        if self._scheduler is not None:
            for listener in listeners:
                self._scheduler.remove_listener(listener)

    def is_of_another(self, scheduler: Any) -> bool:
        """Return whether the executor was started by another scheduler than the given one."""
        return self._scheduler is not scheduler

    @property
    def timezone(self) -> Any:
        """The scheduler's time zone."""
        return self._scheduler.timezone

    @property
    def jobstores(self) -> Mapping[str, Any]:
        """The scheduler's job stores, by alias."""
        jobstores: Mapping[str, Any] = self._scheduler._jobstores
        return jobstores

    @property
    def awaits_nothing(self) -> str | None:
        """The name of the wrapped executor's class, if the executor does not await coroutines.

        ``None`` if it awaits them, before the start, and for an executor that is not APScheduler's.
        """
        inner = self._executor.inner
        submits = getattr(type(inner), "_do_submit_job", None)
        has_none = getattr(submits, "__module__", None) in _AWAIT_NOTHING
        return type(inner).__name__ if has_none else None

    def has_listener(self, code: int) -> bool:
        """Return whether a listener wants events with a given code."""
        scheduler = self._scheduler
        if getattr(scheduler._dispatch_event, "__func__", None) is not _DISPATCH_EVENT:
            return True  # because an overriding method, such as a tracer's, may use all events
        wanted = 0
        for _, mask in tuple(scheduler._listeners):
            wanted |= mask
        return bool(wanted & code)

    def dispatch(self, event: Any) -> None:
        """Dispatch an event to the listeners."""
        self._scheduler._dispatch_event(event)

    def log_not_submitted(self, job: Any, error: BaseException) -> None:
        """Log that an executor did not take a job, in the same words as APScheduler itself."""
        self._scheduler._logger.error(
            'Error submitting job "%s" to executor "%s"', job, job.executor, exc_info=error
        )

    def is_shared(self, jobstore: str) -> bool:
        """Return whether a job store is one that all replicas share."""
        return is_shared_store(self.jobstores.get(jobstore))

    def _shared_stores(self) -> dict[str, Any]:
        """Return the ``SharedJobs`` of the stores that all replicas share, by alias."""
        stores = list(self.jobstores.items())
        return {alias: each.shared_jobs for alias, each in stores if self.is_shared(alias)}

    def has_store_beside(self, user: Any) -> bool:
        """Return whether a shared job store uses the database and table of a replica's user."""
        return any(store.is_beside(user) for store in self._shared_stores().values())

    def rejected_by_stores(self) -> list[str]:
        """Return which requests of the shared job stores the database rejects. Does not wait."""
        if self._scheduler is None:  # the executor was not started
            return []
        return [each for store in self._shared_stores().values() for each in store.rejected()]

    @property
    def stores_are_live(self) -> bool:
        """Whether the replica's thread of each shared job store is live. Does not wait."""
        if self._scheduler is None:  # the executor was not started
            return True
        return all(store.is_live for store in self._shared_stores().values())

    def jobs(self) -> list[Any]:
        """Return the jobs on this executor. Reads all job stores."""
        return [job for alias in list(self.jobstores) for job in self.jobs_of(alias)]

    def jobs_of(self, alias: str) -> list[Any]:
        """Return the jobs on this executor of one job store. Reads the job store."""
        # A shared store is read directly, so that the scheduler's lock is not held during the read.
        if self.is_shared(alias):
            found = self.jobstores[alias].get_all_jobs()
        else:
            found = self._scheduler.get_jobs(alias)
        return [job for job in found if self.is_ours(job)]

    def stored_tasks(self) -> dict[str, Callable[[], dict[JobKey, StoredTask]]]:
        """Return, by the alias of each shared job store, a function that reads the store's tasks.

        Each function returns the tasks of the jobs on this executor, by job.
        """
        return {
            alias: partial(self._tasks_of, alias, store)
            for alias, store in self._shared_stores().items()
        }

    def _tasks_of(self, alias: str, store: Any) -> dict[JobKey, StoredTask]:
        return {
            (task.job_id, alias): task
            for task in store.recurring_tasks()
            if self._scheduler._executors.get(task.executor) is self._executor
        }

    def pending_jobs(self, alias: str) -> list[tuple[Any, str]]:
        """Return the jobs that were added before the start, and the aliases of their stores.

        :param alias: this executor's alias, by which the jobs are found, because the scheduler may
            not have registered the executor yet
        """
        pending = self._scheduler._pending_jobs
        return [(job, jobstore) for job, jobstore, _ in pending if job.executor == alias]

    def job(self, job_id: str, jobstore: str) -> Any:
        """Return a job on this executor; ``None`` if there is no such job. Reads the job store."""
        job = self._lookup(job_id, jobstore)
        return job if job is not None and self.is_ours(job) else None

    def find(self, job_id: str, jobstore: str | None) -> list[tuple[Any, str]]:
        """Return the jobs with an id, on any executor, each with the alias of its job store.

        :param jobstore: the alias of the job store that is read; ``None``: all are read
        """
        aliases = list(self.jobstores) if jobstore is None else [jobstore]
        found = [(self._lookup(job_id, alias), alias) for alias in aliases]
        return [(job, alias) for job, alias in found if job is not None]

    def jobstore_of(self, job: Any) -> str:
        """Return the alias of a job's store.

        Reads the job stores if a custom store has not given its alias to the job.
        """
        alias = jobstore_of(job)
        if alias is None:
            found = self.find(job.id, None)
            alias = next((alias for job, alias in found if jobstore_of(job) is None), "default")
        return alias

    def _lookup(self, job_id: str, jobstore: str) -> Any:
        if self.is_shared(jobstore):  # read directly, as in `jobs_of`
            return self.jobstores[jobstore].lookup_job(job_id)
        return self._scheduler.get_job(job_id, jobstore)

    def ended_job(self, job_id: str, jobstore: str) -> Any:
        """Return a job whose last run time was claimed, and whose last run may still go on.

        ``None`` if there is no such job. Only a shared job store keeps such jobs, until their runs
        end. Reads the job store.
        """
        if not self.is_shared(jobstore):
            return None
        job = self.jobstores[jobstore].shared_jobs.lookup_ended_job(job_id)
        return job if job is not None and self.is_ours(job) else None

    def is_ours(self, job: Any) -> bool:
        """Return whether a job is on this executor, and can be read."""
        # A shared store returns unreadable jobs, so that users can list and remove them.
        if not getattr(job, "is_readable", True):
            return False
        return self._scheduler._executors.get(job.executor) is self._executor


def is_in_listener() -> bool:
    """Return whether a scheduler is calling a listener in this thread, which has called this."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _DISPATCH_EVENT.__code__:
        frame = frame.f_back
    return frame is not None


def executors_of(scheduler: Any) -> list[Any]:
    """Return the executors of a scheduler. Its default executor exists only after its start."""
    return list(scheduler._executors.values())


def shut_down_with(part: Any) -> list[Any]:
    """Return the executors and job stores that are shut down together.

    If the scheduler itself is shut down, all of its executors and job stores are returned.
    Otherwise the given part was removed from the scheduler, and is shut down alone.

    :param part: an executor or a job store that is shut down
    """
    scheduler = part._scheduler
    if getattr(scheduler, "state", None) != STATE_STOPPED:
        return [part]
    return [*executors_of(scheduler), *scheduler._jobstores.values()]


def is_shared_store(store: Any) -> bool:
    """Return whether a job store is one that all replicas share."""
    return getattr(store, "shared_jobs", None) is not None


def jobstore_of(job: Any) -> str | None:
    """Return the alias of a job's store; ``None`` if a custom store has not given it to the job."""
    return getattr(job, "_jobstore_alias", None)


def worker_processes(inner: Any) -> Mapping[int, Any]:
    """Return the worker processes of a wrapped executor's pool, by their ids; empty if none."""
    return getattr(getattr(inner, "_pool", None), "_processes", None) or {}


def let_notice_deaths(inner: Any) -> None:
    """Give work to a wrapped executor's pool, so that it notices which processes are dead."""
    # The pool is shut down, or has noticed that it is broken. While it breaks, it raises any error.
    with suppress(Exception):
        inner._pool.submit(int)


def has_processes(inner: Any) -> bool:
    """Return whether a wrapped executor runs jobs in worker processes of a pool."""
    return isinstance(getattr(inner, "_pool", None), ProcessPoolExecutor)


def runs_inside_submit_job(inner: Any) -> bool:
    """Return whether a wrapped executor runs a job before its ``submit_job`` returns."""
    return getattr(type(inner), "_do_submit_job", None) is DebugExecutor._do_submit_job


def is_of_apscheduler(inner: Any) -> bool:
    """Return whether an executor's ``submit_job`` is APScheduler's own, which never waits."""
    kind = type(inner)
    takes = (kind.submit_job, kind._do_submit_job)
    return all(each.__module__.startswith("apscheduler.executors.") for each in takes)


def takes_at_once(inner: Any) -> bool:
    """Return whether a wrapped executor would take a job now without a wait.

    A pool of threads that has to start a thread waits for it, which takes long beside threads that
    use the CPU, and so does a pool of processes.

    :param inner: an executor of APScheduler's; any other may wait for anything
    """
    pool = getattr(inner, "_pool", None)
    if not isinstance(pool, Executor):
        return True  # the job goes to an event loop, a reactor or a greenlet
    if type(pool) is not ThreadPoolExecutor:  # the application's own one may wait
        return False
    # A pool that starts a thread has a lock that all pools of the process share.
    if _starts_of_threads is not None and _starts_of_threads.locked():
        return False
    has_idle = pool._idle_semaphore._value > 0
    return has_idle or len(pool._threads) >= pool._max_workers


def worker_count(inner: Any) -> int | None:
    """Return how many functions a wrapped executor can run at once, as of now; ``None``: no limit.

    An executor on an event loop runs functions in a pool of threads.
    """
    if hasattr(inner, "_reactor"):
        return int(inner._reactor.getThreadPool().max)
    pool = getattr(inner, "_pool", None) or getattr(inner, "executor", None)
    if pool is None and hasattr(inner, "_eventloop"):
        pool = getattr(inner._eventloop, "_default_executor", None)
        if pool is None:  # the loop makes its pool for the first function, with this size
            return min(32, (os.cpu_count() or 1) + 4)
    count = getattr(pool, "_max_workers", None)
    if count is not None:
        return int(count)
    return None if _has_no_limit(inner) else UNKNOWN_WORKERS


def _has_no_limit(inner: Any) -> bool:
    """Return whether an executor begins every job at once, in its own thread or in a greenlet."""
    submits = getattr(type(inner), "_do_submit_job", None)
    return getattr(submits, "__module__", None) in _BEGIN_ALL


def interpreter_is_ending() -> bool:
    """Return whether the interpreter has begun to end, so that no pool accepts jobs any more.

    Python has no public name for this state: ``sys.is_finalizing()`` is true only later, after the
    pools' jobs have ended.
    """
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


def accepts_nothing_more(inner: Any) -> bool:
    """Return whether an executor's pool accepts no more jobs, because the interpreter is ending.

    ``False`` for an executor without a pool, because the executor may go on, for example on an
    event loop in a thread for which the interpreter waits.
    """
    return interpreter_is_ending() and isinstance(getattr(inner, "_pool", None), Executor)


def cancels_coroutines(inner: Any) -> bool:
    """Return whether a wrapped executor cancels its coroutines when it is shut down.

    Tornado's executor lets them go on.
    """
    return hasattr(inner, "_pending_futures")


def wrap(executor: Any, inner: Any) -> None:
    """Mark a wrapped executor with the executor that wraps it."""
    setattr(inner, _WRAPPED_BY, executor)


def unwrap(inner: Any) -> None:
    """Remove the mark of a wrapped executor, so that another executor may wrap it."""
    vars(inner).pop(_WRAPPED_BY, None)


def is_wrapped_by_another(executor: Any, inner: Any) -> bool:
    """Return whether an executor other than ``executor`` was started, and wraps ``inner``."""
    return getattr(inner, _WRAPPED_BY, executor) is not executor


def make_inner(
    executor: str | Mapping[str, Any] | BaseExecutor | None,
    options: Mapping[str, Any],
    scheduler: Any,
) -> Any:
    """Return the executor to wrap.

    :param executor: an instance, a plugin alias, a mapping as in a scheduler's configuration (with
        ``type`` or ``class``, and options), or ``None`` for the scheduler's own default
    :param options: passed to the constructor of the executor to wrap, unless ``executor`` is an
        instance
    :param scheduler: the APScheduler scheduler
    :raises TaskLockOptionError: there is no such executor, or its class does not take these options
    """
    if isinstance(executor, BaseExecutor):
        return executor
    try:
        if isinstance(executor, Mapping):
            return _make_configured({**executor, **options}, scheduler)
        if executor is not None:
            return scheduler._create_plugin_instance("executor", executor, dict(options))
        default = scheduler._create_default_executor()
        return type(default)(**options) if options else default
    except (TypeError, ValueError, LookupError) as error:
        given = f". TaskLockExecutor does not know {', '.join(options)}, and passes it on"
        raise TaskLockOptionError(
            f"TaskLockExecutor: the executor to wrap cannot be made: {error}"
            f"{given if options else ''}"
        ) from None


def check_gevent(inner: Any, scheduler: Any) -> None:
    """Check that gevent has patched the process, if gevent runs the jobs or the scheduler.

    The library's threads give jobs to gevent's executor, and read the jobs of a GeventScheduler,
    for which they take the scheduler's lock. Only the thread of gevent's hub may do these two
    things. In a patched process the library's threads are greenlets of that hub, so they may.

    :raises TaskLockOptionError: gevent has not patched the process
    """
    gevents = [
        (name, used)
        for used, module, name in (
            (inner, "apscheduler.executors.gevent", "GeventExecutor"),
            (scheduler, "apscheduler.schedulers.gevent", "GeventScheduler"),
        )
        if module in sys.modules and isinstance(used, getattr(sys.modules[module], name))
    ]
    if not gevents:
        return
    from gevent.monkey import is_module_patched

    if not is_module_patched("threading"):
        raise TaskLockOptionError(
            f"TaskLockExecutor: its {gevents[0][0]} needs a process that gevent has patched; call "
            "gevent.monkey.patch_all() before all other imports"
        )


def _make_configured(options: dict[str, Any], scheduler: Any) -> Any:
    """Return the executor that a mapping describes, as in a scheduler's configuration."""
    alias, reference = options.pop("type", None), options.pop("class", None)
    if alias:
        return scheduler._create_plugin_instance("executor", alias, options)
    if reference:
        return maybe_ref(reference)(**options)
    raise ValueError("its configuration has neither 'type' nor 'class'")


def _own_reports(inner: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a wrapped executor's own methods that report a job's success or error."""
    report, report_error = inner._run_job_success, inner._run_job_error
    if isinstance(report, _RunReport):  # `intercept_reports` was called at an earlier start
        report, report_error = report.report, report_error.report
    return report, report_error


class JobIdWithRun(str):
    """A job's id that also refers to a run, because executors report a run by its job's id only.

    :ivar run: the run
    """

    __slots__ = ("run",)
    run: Any

    def __new__(cls, job_id: str, run: Any) -> JobIdWithRun:
        """Make the id for a run."""
        made = super().__new__(cls, job_id)
        made.run = run
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the id as a plain ``str``, because another process has no use for the run."""
        return str, (str(self),)


class _ShownId(str):
    """A job's id that executors log with its control characters written as escapes."""

    __slots__ = ()

    def __str__(self) -> str:
        return printable(self)


def intercept_reports(inner: Any, runs: Any) -> None:
    """Let a started executor tell its runs when it reports one of them.

    ``runs.events_of`` is called before the executor reports the events of a run, and returns the
    events to report, ``runs.failed`` before it reports an error in their place. ``runs.ended`` is
    called after the executor's own report, because then the run's worker is free.
    """
    report, report_error = _own_reports(inner)
    inner._run_job_success = _RunReport(report, runs)
    inner._run_job_error = _RunReport(report_error, runs)


def give(inner: Any, job: Any, run_times: list[datetime]) -> None:
    """Give a job whose id is a :class:`JobIdWithRun` to a wrapped executor.

    :raises Exception: whatever the wrapped executor raises
    """
    try:
        inner.submit_job(job, run_times)
    except Exception as error:
        if not (has_processes(inner) and inner._pool._broken):
            raise
        # The pool broke while it took the job. It may have pickled the job for a worker process,
        # and reports nothing more. So the job is reported like the pool's other jobs.
        broken = BrokenProcessPool(inner._pool._broken)
        broken.__cause__ = error
        inner._run_job_error(job.id, broken)
    finally:
        _forget_instances(inner, job.id)


def _forget_instances(inner: Any, job_id: str) -> None:
    """Delete a wrapped executor's count of a job's instances if the count is 0 or less.

    The count is below 0 if the run has ended before the executor's ``submit_job`` counted it.
    """
    with inner._lock:
        if inner._instances.get(job_id, 0) <= 0:
            inner._instances.pop(job_id, None)


class _RunReport:
    """Replaces ``_run_job_success``, or ``_run_job_error``, of a wrapped executor.

    :ivar report: the executor's own method that is replaced
    """

    def __init__(self, report: Callable[..., Any], runs: Any) -> None:
        self.report = report
        self._runs = runs

    def __call__(self, job_id: str, *what: Any, **named: Any) -> None:
        if not isinstance(job_id, JobIdWithRun):  # because the library has not given this job
            self.report(job_id, *what, **named)
            return
        # If a job ends very soon, a pool calls this in the thread that has submitted the job, which
        # may be the replica's thread. Listeners may take long, so they are not called there.
        call_where_allowed(partial(self._report, job_id, *what, **named))

    def _report(self, job_id: JobIdWithRun, *what: Any, **named: Any) -> None:
        plain = str(job_id)  # without the run, because a listener may keep the event for long
        if what and isinstance(what[0], list):
            events = self._runs.events_of(job_id.run, what[0])
            for event in events:
                event.job_id = plain
            what = (events, *what[1:])
        elif what and isinstance(what[0], BaseException):
            self._runs.failed(job_id.run, what[0])
        try:
            self.report(plain if plain.isprintable() else _ShownId(plain), *what, **named)
        finally:
            self._runs.ended(job_id.run)


def never_awaited(event: Any, inner: Any, logger_name: str) -> Any:
    """Return an error event in place of an event whose job only returned a coroutine.

    Nobody awaited that coroutine, so it is closed here. ``None`` for any other event.
    """
    if event.code != EVENT_JOB_EXECUTED or not iscoroutine(event.retval):
        return None
    event.retval.close()
    error = TaskLockOptionError(
        f"job {event.job_id!r}: its function is a coroutine, which {type(inner).__name__} does not "
        "await; use an AsyncIOScheduler, or a plain function"
    )
    logging.getLogger(logger_name).error("%s", error)
    return JobExecutionEvent(
        EVENT_JOB_ERROR, event.job_id, event.jobstore, event.scheduled_run_time, exception=error
    )


def event_dispatcher(inner: Any, dispatch: Dispatch, *, awaited: bool) -> Dispatch:
    """Return a function that dispatches lock events where the executor dispatches its own events.

    If the executor dispatches them on an event loop, listeners may rely on being called there.

    :param dispatch: dispatches an event to the listeners, in the thread that calls it
    :param awaited: whether the job's function is a coroutine function
    """
    loop = getattr(inner, "_eventloop", None)
    if loop is None and awaited:
        loop = _tornado_loop(inner)
    return dispatch if loop is None else partial(_dispatch_on, loop, dispatch)


def call_on_its_loop(inner: Any, function: Callable[[], None]) -> None:
    """Call a function in the thread of an executor's event loop or reactor.

    If the executor has neither, the function is called in the calling thread. May be called from
    any thread.

    :raises RuntimeError: the event loop is closed
    """
    loop = event_loop_of(inner)
    reactor = getattr(inner, "_reactor", None)
    if loop is not None:
        _call_soon(loop, function)
    elif reactor is not None:
        reactor.callFromThread(function)
    else:
        function()


class _LoopCalls:
    """The calls that an event loop has not made yet."""

    def __init__(self) -> None:
        # Held only while a call is added or taken, so the loop waits for no more than that. It is
        # reentrant, because a signal handler or the garbage collector may add a call meanwhile.
        self._lock = threading.RLock()
        self._calls: deque[tuple[Callable[[], object], Context]] = deque()
        self._woken_at = -inf  # `-inf`: the loop has taken all calls since it was woken

    def add(self, loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
        """Let the loop make one call more.

        :raises RuntimeError: the loop is closed
        """
        context = copy_context()
        with self._lock:
            self._calls.append((function, context))
            # A wake-up is lost if Ctrl-C comes before its first line, so another one follows.
            if loop.is_closed() or time.monotonic() > self._woken_at + WAKE_AGAIN:
                self._wake(loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(self._make, loop)
        except RuntimeError:
            self._calls.clear()
            raise
        self._woken_at = time.monotonic()

    def _make(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the calls that there are, in the loop's thread. Each further one wakes it again."""
        with self._lock:
            self._woken_at = -inf
            calls, self._calls = self._calls, deque()
        try:
            while calls:
                function, context = calls.popleft()
                try:
                    context.run(function)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001  # as the loop does with callbacks
                    # Not in a variable: the error's traceback refers to this frame.
                    loop.call_exception_handler(
                        {"message": f"Exception in {function!r}", "exception": error}
                    )
        finally:
            if calls and not loop.is_closed():  # such as after Ctrl-C in one of them
                with self._lock:
                    self._calls.extendleft(reversed(calls))
                    self._wake(loop)


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopCalls] = WeakKeyDictionary()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Call a function in an event loop's thread. Many calls wake the loop once.

    Each wake-up is a byte in a pipe, which a few hundred fill while a callback holds up the loop.
    Asyncio then loses the signals that come.

    :raises RuntimeError: the event loop is closed
    """
    calls = _of_loops.get(loop)
    if calls is None:
        # Calls that were not made before their loop was closed refer to it, and so keep it.
        for known in [known for each in _of_loops.keyrefs() if (known := each()) is not None]:
            if known.is_closed():
                _of_loops.pop(known, None)
        calls = _of_loops.setdefault(loop, _LoopCalls())
    calls.add(loop, function)


def event_loop_of(owner: Any) -> Any:
    """Return the event loop of a scheduler or an executor of asyncio or tornado, else ``None``."""
    return getattr(owner, "_eventloop", None) or _tornado_loop(owner)


def _tornado_loop(inner: Any) -> Any:
    return getattr(getattr(inner, "_ioloop", None), "asyncio_loop", None)


def _dispatch_on(loop: asyncio.AbstractEventLoop, dispatch: Dispatch, event: Any) -> None:
    with suppress(RuntimeError):  # no loop runs in this thread
        if asyncio.get_running_loop() is loop:
            # The event is dispatched at once, so that listeners get the events in order. They get
            # it in a copy of the context, because they may set context variables.
            copy_context().run(dispatch, event)
            return
    try:
        _call_soon(loop, partial(dispatch, event))
    except RuntimeError:  # the loop is closed
        dispatch(event)
