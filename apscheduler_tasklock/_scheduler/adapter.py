"""APScheduler's private attributes: all that is used of them here, and of its executors'.

Those of 3.10 and 3.11. What is public of APScheduler is used where it is needed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from datetime import datetime, timedelta, timezone
from functools import partial
from inspect import iscoroutine
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, JobExecutionEvent
from apscheduler.executors.base import BaseExecutor
from apscheduler.executors.debug import DebugExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED, BaseScheduler
from apscheduler.util import maybe_ref

from apscheduler_tasklock._lock.jobs import StoredTask
from apscheduler_tasklock._scheduler.notify import Dispatch
from apscheduler_tasklock._scheduler.submission import JobKey
from apscheduler_tasklock.errors import TaskLockOptionError

# Seconds for which a job may be due until its scheduler counts as standing still.
LATEST_WAKEUP = 60.0

# APScheduler's modules whose executors call a job's function, and await nothing.
_AWAIT_NOTHING = {
    f"apscheduler.executors.{name}" for name in ("debug", "gevent", "pool", "twisted")
}

# Those whose executors begin whatever they are given.
_BEGIN_ALL = {"apscheduler.executors.debug", "apscheduler.executors.gevent"}
# How many jobs an executor is taken to run at a time of which that is not known.
UNKNOWN_WORKERS = 10

# Attribute of a wrapped executor, from its start until its shutdown: who wraps it.
_WRAPPED_BY = "_tasklock_executor"

# How APScheduler gives events to listeners, unless somebody has overridden it.
_DISPATCH_EVENT = BaseScheduler._dispatch_event


class SchedulerAdapter:
    """What the task lock needs to know of the scheduler of an executor, which has been started.

    :param executor: the executor, whose jobs are looked at
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    @property
    def _scheduler(self) -> Any:
        return self._executor._scheduler

    @property
    def state(self) -> int:
        """One of APScheduler's ``STATE_*``."""
        return int(self._scheduler.state)

    @property
    def is_alive(self) -> bool:
        """Whether the scheduler goes on, as far as this process can tell without a job store's I/O.

        ``scheduler.running`` stays true when its thread has died.
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
        except IndexError:  # its last job was removed in this moment
            return True
        latest = datetime.now(timezone.utc) - timedelta(seconds=LATEST_WAKEUP)
        return all(next_time is None or next_time > latest for next_time in next_times)

    def remove_listeners(self, *listeners: Callable[[Any], None]) -> None:
        """Remove listeners of a scheduler, if there is one."""
        if self._scheduler is not None:
            for listener in listeners:
                self._scheduler.remove_listener(listener)

    def is_of_another(self, scheduler: Any) -> bool:
        """Tell whether the executor was started by another scheduler than this one."""
        return self._scheduler is not scheduler

    @property
    def timezone(self) -> Any:
        """Its time zone."""
        return self._scheduler.timezone

    @property
    def jobstores(self) -> Mapping[str, Any]:
        """Its job stores, by alias."""
        jobstores: Mapping[str, Any] = self._scheduler._jobstores
        return jobstores

    @property
    def awaits_nothing(self) -> str | None:
        """The name of the wrapped executor's class, if that one awaits no coroutines.

        ``None`` also before the start, and of one that APScheduler does not have.
        """
        inner = self._executor.inner
        submits = getattr(type(inner), "_do_submit_job", None)
        has_none = getattr(submits, "__module__", None) in _AWAIT_NOTHING
        return type(inner).__name__ if has_none else None

    def has_listener(self, code: int) -> bool:
        """Tell whether somebody listens to events of this kind."""
        scheduler = self._scheduler
        if getattr(scheduler._dispatch_event, "__func__", None) is not _DISPATCH_EVENT:
            return True  # as instrumentation overrides it
        return any(mask & code for _, mask in tuple(scheduler._listeners))

    def dispatch(self, event: Any) -> None:
        """Give an event to the listeners."""
        self._scheduler._dispatch_event(event)

    def log_not_submitted(self, job: Any, error: BaseException) -> None:
        """Log, in APScheduler's own words, that an executor did not take a job."""
        self._scheduler._logger.error(
            'Error submitting job "%s" to executor "%s"', job, job.executor, exc_info=error
        )

    def hands_out(self, jobstore: str) -> bool:
        """Tell whether a job store is the one that all replicas share, and hands its jobs out."""
        return getattr(self.jobstores.get(jobstore), "hands_out", False) is True

    def _shared_stores(self) -> dict[str, Any]:
        """Return the stores that all replicas share, by alias."""
        return {alias: s for alias, s in list(self.jobstores.items()) if self.hands_out(alias)}

    def has_store_beside(self, locks: Any) -> bool:
        """Tell whether the scheduler has a shared job store beside these task locks."""
        return any(store.is_beside(locks) for store in self._shared_stores().values())

    def rejected_by_stores(self) -> list[str]:
        """Return what the database rejects of what the shared job stores ask. Asks nobody."""
        if self._scheduler is None:  # not started
            return []
        return [each for store in self._shared_stores().values() for each in store.rejected()]

    @property
    def stores_are_live(self) -> bool:
        """Whether the shared job stores' threads for the database go on. Asks nobody."""
        if self._scheduler is None:  # not started
            return True
        return all(store.is_live for store in self._shared_stores().values())

    def jobs(self) -> list[Any]:
        """Return the jobs on this executor. Asks the job stores."""
        return [job for alias in list(self.jobstores) for job in self.jobs_of(alias)]

    def jobs_of(self, alias: str) -> list[Any]:
        """Return the jobs on this executor of one job store. Asks it."""
        # Not under the scheduler's lock if that would keep it waiting for the database.
        if self.hands_out(alias):
            found = self.jobstores[alias].get_all_jobs()
        else:
            found = self._scheduler.get_jobs(alias)
        return [job for job in found if self._is_ours(job)]

    def stored_tasks(self) -> dict[str, Callable[[], dict[JobKey, StoredTask]]]:
        """Return what returns the tasks on this executor of each store that all replicas share.

        By the stores' aliases. To call it asks the store.
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

        :param alias: of this executor, which the scheduler may not know yet
        """
        pending = self._scheduler._pending_jobs
        return [(job, jobstore) for job, jobstore, _ in pending if job.executor == alias]

    def job(self, job_id: str, jobstore: str) -> Any:
        """Return a job on this executor, or ``None``. Asks the job store."""
        if self.hands_out(jobstore):  # as in `jobs`
            job = self.jobstores[jobstore].lookup_job(job_id)
        else:
            job = self._scheduler.get_job(job_id, jobstore)
        return job if job is not None and self._is_ours(job) else None

    def ended_job(self, job_id: str, jobstore: str) -> Any:
        """Return a job whose last run time was claimed, if its store keeps it until that is over.

        Asks the job store.
        """
        if not self.hands_out(jobstore):
            return None
        job = self.jobstores[jobstore].lookup_ended_job(job_id)
        return job if job is not None and self._is_ours(job) else None

    def _is_ours(self, job: Any) -> bool:
        if not getattr(job, "is_readable", True):  # which only users' calls are to see
            return False
        return self._scheduler._executors.get(job.executor) is self._executor


def executors_of(scheduler: Any) -> list[Any]:
    """Return the executors of a scheduler: those that it was given, and once started, all."""
    return list(scheduler._executors.values())


def jobstore_of(job: Any) -> str:
    """Return the alias of a job's store."""
    return str(job._jobstore_alias)


def worker_processes(inner: Any) -> Mapping[int, Any]:
    """Return the worker processes of a wrapped executor's pool, by their ids; empty without any."""
    return getattr(getattr(inner, "_pool", None), "_processes", None) or {}


def has_processes(inner: Any) -> bool:
    """Tell whether a wrapped executor runs jobs in worker processes of a pool."""
    return isinstance(getattr(inner, "_pool", None), ProcessPoolExecutor)


def runs_inside_submit_job(inner: Any) -> bool:
    """Tell whether a wrapped executor runs a job before its ``submit_job`` returns."""
    return getattr(type(inner), "_do_submit_job", None) is DebugExecutor._do_submit_job


def is_of_apscheduler(inner: Any) -> bool:
    """Tell whether APScheduler's own code takes a wrapped executor's jobs, which never waits."""
    kind = type(inner)
    takes = (kind.submit_job, kind._do_submit_job)
    return all(each.__module__.startswith("apscheduler.executors.") for each in takes)


def worker_count(inner: Any) -> int | None:
    """Return how many workers a wrapped executor has now for functions.

    An event loop has a pool of threads for them. ``None``: there is no limit.
    """
    if hasattr(inner, "_reactor"):
        return int(inner._reactor.getThreadPool().max)
    pool = getattr(inner, "_pool", None) or getattr(inner, "executor", None)
    if pool is None and hasattr(inner, "_eventloop"):
        pool = getattr(inner._eventloop, "_default_executor", None)
        if pool is None:  # it is made for the first function
            return min(32, (os.cpu_count() or 1) + 4)
    count = getattr(pool, "_max_workers", None)
    if count is not None:
        return int(count)
    return None if _has_no_limit(inner) else UNKNOWN_WORKERS


def _has_no_limit(inner: Any) -> bool:
    """Tell whether an executor begins whatever it is given: at once, or in a greenlet."""
    submits = getattr(type(inner), "_do_submit_job", None)
    return getattr(submits, "__module__", None) in _BEGIN_ALL


def interpreter_is_ending() -> bool:
    """Tell whether the interpreter has begun to end, from when on its pools accept no more jobs.

    It has no public sign: ``sys.is_finalizing()`` is true only after the pools' jobs have ended.
    """
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


def accepts_nothing_more(inner: Any) -> bool:
    """Tell whether an executor's pool accepts no more jobs, since the interpreter is ending.

    An event loop may go on, in a thread that the interpreter waits for.
    """
    return interpreter_is_ending() and isinstance(getattr(inner, "_pool", None), Executor)


def cancels_coroutines(inner: Any) -> bool:
    """Tell whether a wrapped executor cancels its coroutines when it is shut down.

    That of tornado lets them go on.
    """
    return hasattr(inner, "_pending_futures")


def wrap(executor: Any, inner: Any) -> None:
    """Let an executor stand for the one that it wraps, which has been started.

    It counts the instances of jobs itself, by the time that they are submitted.
    """
    executor._instances = type(inner._instances)(int)
    setattr(inner, _WRAPPED_BY, executor)


def unwrap(inner: Any) -> None:
    """Let another executor wrap this one."""
    vars(inner).pop(_WRAPPED_BY, None)


def is_wrapped_by_another(executor: Any, inner: Any) -> bool:
    """Tell whether an executor is wrapped by another one than this, which has been started."""
    return getattr(inner, _WRAPPED_BY, executor) is not executor


def make_inner(
    executor: str | Mapping[str, Any] | BaseExecutor | None,
    options: Mapping[str, Any],
    scheduler: Any,
) -> Any:
    """Return the executor to wrap.

    :param executor: an instance, a plugin alias, a mapping as in a scheduler's configuration (with
        ``type`` or ``class``, and options), or ``None`` for the scheduler's own default
    :param options: passed to its constructor, unless it is an instance
    :param scheduler: the APScheduler scheduler
    :raises TaskLockOptionError: there is no such executor, or it does not take these options
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
    """Make sure that gevent has patched the process, if it runs the jobs or the scheduler.

    The threads that renew leases and look for dead holders submit to gevent's executor, and ask a
    GeventScheduler for its jobs under its lock. Only the thread of gevent's hub may do either,
    unless these threads are greenlets.

    :raises TaskLockOptionError: it has not
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
    """Return an executor from what a scheduler's configuration has for one."""
    alias, reference = options.pop("type", None), options.pop("class", None)
    if alias:
        return scheduler._create_plugin_instance("executor", alias, options)
    if reference:
        return maybe_ref(reference)(**options)
    raise ValueError("its configuration has neither 'type' nor 'class'")


def _own_reports(inner: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return how a wrapped executor itself reports what became of a job."""
    report, report_error = inner._run_job_success, inner._run_job_error
    if isinstance(report, _RunReport):  # of the last start
        report, report_error = report.report, report_error.report
    return report, report_error


class RunId(str):
    """A job's id, as the wrapped executor has it, which knows the run that was given to it.

    :ivar run: the run
    """

    __slots__ = ("run",)
    run: Any

    def __new__(cls, job_id: str, run: Any) -> RunId:
        """Make one of a run."""
        made = super().__new__(cls, job_id)
        made.run = run
        return made


def report_runs(
    inner: Any,
    events_of: Callable[[Any, list[Any]], list[Any]],
    failed: Callable[[Any, BaseException], None],
    ended: Callable[[Any], None],
) -> None:
    """Let a started executor tell when it has reported what became of a run.

    Its own report comes first, from whose return on its worker is free.

    :param events_of: returns what is to be told of a run that has these events; nothing of one
        that was withdrawn
    :param failed: gets a run, and why it was not run to its end
    :param ended: gets the run
    """
    report, report_error = _own_reports(inner)
    inner._run_job_success = _RunReport(report, events_of, failed, ended)
    inner._run_job_error = _RunReport(report_error, events_of, failed, ended)


def give(inner: Any, job: Any, run_times: list[datetime]) -> None:
    """Give a job whose id is a :class:`RunId` to a wrapped executor.

    :raises Exception: whatever that raises
    """
    try:
        inner.submit_job(job, run_times)
    finally:
        _forget_instances(inner, job.id)


def _forget_instances(inner: Any, job_id: str) -> None:
    """Let a wrapped executor forget a job of which it counts none.

    It counts a run out before it has counted it in that ends in the middle of its submission.
    """
    with inner._lock:
        if inner._instances.get(job_id, 0) <= 0:
            inner._instances.pop(job_id, None)


class _RunReport:
    """Stands in for ``_run_job_success``, or ``_run_job_error``, of a wrapped executor.

    :ivar report: the executor's own
    """

    def __init__(
        self,
        report: Callable[..., Any],
        events_of: Callable[[Any, list[Any]], list[Any]],
        failed: Callable[[Any, BaseException], None],
        ended: Callable[[Any], None],
    ) -> None:
        self.report = report
        self._events_of = events_of
        self._failed = failed
        self._ended = ended

    def __call__(self, job_id: str, *what: Any, **named: Any) -> None:
        if not isinstance(job_id, RunId):  # which somebody else has given to it
            self.report(job_id, *what, **named)
            return
        plain = str(job_id)  # a listener that keeps it must not keep the run
        if what and isinstance(what[0], list):
            events = self._events_of(job_id.run, what[0])
            for event in events:
                event.job_id = plain
            what = (events, *what[1:])
        elif what and isinstance(what[0], BaseException):
            self._failed(job_id.run, what[0])
        try:
            self.report(plain, *what, **named)
        finally:
            self._ended(job_id.run)


def never_awaited(event: Any, inner: Any, logger_name: str) -> Any:
    """Return the error event of a coroutine that its executor did not await; ``None``: it did."""
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


def dispatcher(inner: Any, dispatch: Dispatch, *, awaited: bool) -> Dispatch:
    """Return what dispatches lock events where the executor dispatches the job's own.

    If that is an event loop, the listeners may rely on it.

    :param awaited: whether the job is a coroutine
    """
    loop = getattr(inner, "_eventloop", None)
    if loop is None and awaited:
        loop = _tornado_loop(inner)
    return dispatch if loop is None else partial(_dispatch_on, loop, dispatch)


def call_as_scheduler(inner: Any, function: Callable[[], None]) -> None:
    """Call a function where the scheduler submits jobs to this executor, from another thread.

    :raises RuntimeError: the event loop is closed
    """
    loop = event_loop_of(inner)
    reactor = getattr(inner, "_reactor", None)
    if loop is not None:
        loop.call_soon_threadsafe(function)
    elif reactor is not None:
        reactor.callFromThread(function)
    else:
        function()


def event_loop_of(owner: Any) -> Any:
    """Return the event loop of a scheduler or an executor of asyncio or tornado, else ``None``."""
    return getattr(owner, "_eventloop", None) or _tornado_loop(owner)


def _tornado_loop(inner: Any) -> Any:
    return getattr(getattr(inner, "_ioloop", None), "asyncio_loop", None)


def _dispatch_on(loop: asyncio.AbstractEventLoop, dispatch: Dispatch, event: Any) -> None:
    with suppress(RuntimeError):  # no loop runs
        if asyncio.get_running_loop() is loop:
            # At once, so that listeners hear of it before what comes after; in a context of its
            # own, since they may set variables.
            copy_context().run(dispatch, event)
            return
    try:
        loop.call_soon_threadsafe(dispatch, event)
    except RuntimeError:  # the loop is closed
        dispatch(event)
