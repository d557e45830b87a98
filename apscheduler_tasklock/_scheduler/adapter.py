"""The wrapped executor: how it is made, and how it comes to report jobs and not their carriers."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from inspect import iscoroutine
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, JobExecutionEvent
from apscheduler.executors.base import BaseExecutor
from apscheduler.util import maybe_ref

from apscheduler_tasklock._scheduler.notify import Dispatch
from apscheduler_tasklock._scheduler.wrapper import QUIET_LOGGER, JobEvents
from apscheduler_tasklock.errors import TaskLockOptionError


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


def check_gevent(inner: Any) -> None:
    """Make sure that gevent has patched the process, if its executor is wrapped.

    The threads that renew leases and look for dead holders submit to it, which only its own thread
    may do, unless they are greenlets.

    :raises TaskLockOptionError: it has not
    """
    module = sys.modules.get("apscheduler.executors.gevent")
    if module is None or not isinstance(inner, module.GeventExecutor):
        return
    from gevent.monkey import is_module_patched

    if not is_module_patched("threading"):
        raise TaskLockOptionError(
            "TaskLockExecutor: its GeventExecutor needs a process that gevent has patched; call "
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


def report_jobs(
    inner: Any,
    ended: Callable[[str, JobEvents | None], None],
    failed: Callable[[str, BaseException], None],
) -> None:
    """Let a started executor report the events of the jobs, not those of their carriers.

    :param ended: gets the job's id and what its carrier returned, if it did
    :param failed: gets the job's id and why its carrier was not run to its end
    """
    logger = inner._logger
    report, report_error = inner._run_job_success, inner._run_job_error
    if isinstance(report, _JobReport):  # of the last start
        report, report_error = report.report, report_error.report
    inner._run_job_success = _JobReport(report, inner, logger, ended)
    inner._run_job_error = _ErrorReport(report_error, failed)
    inner._logger = _InnerLogger(logger, {})


class _JobReport:
    """Stands in for ``_run_job_success`` of a wrapped executor.

    :ivar report: the executor's own
    """

    def __init__(
        self,
        report: Callable[..., Any],
        inner: Any,
        logger: logging.Logger,
        ended: Callable[[str, JobEvents | None], None],
    ) -> None:
        self.report = report
        self._inner = inner
        self._logger = logger
        self._ended = ended

    def __call__(self, job_id: str, events: list[Any], *more: Any, **named: Any) -> None:
        self.report(job_id, _carried(events, self._inner, self._logger), *more, **named)
        # Only now is the instance counted out that a takeover needs.
        results = [event.retval for event in events if event.code == EVENT_JOB_EXECUTED]
        self._ended(job_id, next((r for r in results if isinstance(r, JobEvents)), None))


class _ErrorReport:
    """Stands in for ``_run_job_error`` of a wrapped executor.

    :ivar report: the executor's own
    """

    def __init__(
        self, report: Callable[..., Any], failed: Callable[[str, BaseException], None]
    ) -> None:
        self.report = report
        self._failed = failed

    def __call__(self, job_id: str, exc: BaseException, *more: Any, **named: Any) -> None:
        self.report(job_id, exc, *more, **named)
        self._failed(job_id, exc)


def _carried(events: list[Any], inner: Any, logger: logging.Logger) -> list[Any]:
    carried: list[Any] = []
    for event in events:
        if event.code == EVENT_JOB_EXECUTED and isinstance(event.retval, JobEvents):
            carried.extend(event.retval)
        elif event.code == EVENT_JOB_EXECUTED and iscoroutine(event.retval):
            carried.append(_never_awaited(event, inner, logger))
        else:
            if event.code == EVENT_JOB_ERROR:
                # The carrier itself failed, and its own log line went to the quiet logger.
                logger.error("Error running job %s", event.job_id, exc_info=event.exception)
            carried.append(event)
    return carried


def _never_awaited(event: Any, inner: Any, logger: logging.Logger) -> Any:
    """Return the error event of a coroutine job that the wrapped executor did not await."""
    event.retval.close()
    error = TaskLockOptionError(
        f"job {event.job_id!r}: its function is a coroutine, which {type(inner).__name__} does not "
        "await; use an AsyncIOScheduler, or a plain function"
    )
    logger.error("%s", error)
    return JobExecutionEvent(
        EVENT_JOB_ERROR, event.job_id, event.jobstore, event.scheduled_run_time, exception=error
    )


class _InnerLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic from Python 3.11
    """The wrapped executor's logger, under the name that its workers log the carrier to."""

    @property
    def name(self) -> str:
        """Name of the logger that ``run_job`` gets."""
        return QUIET_LOGGER


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
    loop = getattr(inner, "_eventloop", None) or _tornado_loop(inner)
    reactor = getattr(inner, "_reactor", None)
    if loop is not None:
        loop.call_soon_threadsafe(function)
    elif reactor is not None:
        reactor.callFromThread(function)
    else:
        function()


def _tornado_loop(inner: Any) -> Any:
    return getattr(getattr(inner, "_ioloop", None), "asyncio_loop", None)


def _dispatch_on(loop: asyncio.AbstractEventLoop, dispatch: Dispatch, event: Any) -> None:
    try:
        loop.call_soon_threadsafe(dispatch, event)
    except RuntimeError:  # the loop is closed
        dispatch(event)
