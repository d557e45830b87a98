"""Check-ins: report the beginning and the end of each granted run to a monitoring service.

The service raises an alarm if a check-in does not arrive in time. Check-ins go to Sentry Crons, and
to services that take pings at a URL as healthchecks.io does.
"""

from __future__ import annotations

import contextvars
import hashlib
import logging
import os
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache, cached_property
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit, urlunsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)
from uuid import NAMESPACE_URL, uuid5
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_SCHEDULER_SHUTDOWN,
    JobExecutionEvent,
)
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._runs.trigger_times import nominal_time
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockOptionError, raised_at_the_call
from apscheduler_tasklock.events import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockEvent,
)

logger = logger_of(__name__)

# Limits how many check-ins wait to be sent.
LONGEST_QUEUE = 1000
# Limits the seconds until a service is reached, and until it has answered.
REQUEST_TIMEOUT = 5.0
# Limits the seconds for which a shutdown waits for check-ins to be sent.
CLOSING_TIMEOUT = 2.0
# Limits how many runs are remembered until their end is reported, because the end of a run whose
# worker died is never reported.
MOST_RUNS = 1000
# Limits the length of a slug at Sentry.
LONGEST_SLUG = 50

_Status = Literal["start", "ok", "fail"]
_RunKey = tuple[str, str, datetime]  # job, job store, run time


_UNKNOWN = object()


@dataclass
class _GrantedRun:
    """A granted run, whose beginning and end are reported.

    :ivar run_time: the run time that was claimed
    :ivar is_manual: whether an operator has asked for the run
    :ivar job: the job; ``None`` if its store does not have it any more
    :ivar is_failed: whether the job has raised an exception
    :ivar is_retried: whether the failed run is run again; ``None``: its release has not arrived
    """

    task_name: str
    job_id: str
    jobstore: str
    run_time: datetime
    is_manual: bool = False
    job: Any = _UNKNOWN
    is_failed: bool = False
    is_retried: bool | None = None

    @cached_property
    def run_id(self) -> str:
        """An id that is the same for a run time on all replicas.

        It is made of task and run time, so that a replica that runs the window again has the same
        id, and the service counts the check-ins of both replicas as one run. Without jitter,
        because the second run has the window's time. In seconds, because run times that replicas do
        not share differ by milliseconds.
        """
        run_time = self.run_time
        if self.job is not None and not self.is_manual:
            run_time = nominal_time(self.job.trigger, run_time)
        window = run_time.astimezone(timezone.utc).isoformat(timespec="seconds")
        return uuid5(NAMESPACE_URL, f"tasklock:{self.task_name}:{window}").hex


@dataclass(frozen=True)
class _CheckIn:
    """A report of a run's beginning or end."""

    run: _GrantedRun
    status: _Status


class CheckIns:
    """Sends check-ins for the runs that this replica is granted. No job waits for a check-in.

    >>> CheckIns(ping={"report": "https://hc-ping.com/0b7c..."}).attach(scheduler)  # doctest: +SKIP

    One background thread sends the check-ins in their order. If a service does not answer,
    check-ins wait. If 1,000 check-ins wait, further ones are dropped, and a WARNING says so. A
    shutdown of the scheduler sends the waiting check-ins, for 2 seconds at most.

    A run that fails, that loses its lock, or that is cancelled for good is reported as failed. The
    end of a run that is handed over, or retried, is reported by the replica that runs it again. So
    a failure is reported when its release has arrived, which says whether there is a retry. If the
    release finds that another replica has claimed the task meanwhile, the failure is not reported.

    :param ping: URLs by task name; or one URL for all tasks, in which ``{task}`` stands for the
        task's name and ``{slug}`` for its form in lower case, digits, ``-`` and ``_``. A run's
        beginning is reported to the URL with ``/start`` added to its path, success to the URL
        itself, failure to the URL with ``/fail``. Redirects are not followed.
    :param sentry: whether check-ins go to Sentry Crons; or the names of the tasks whose check-ins
        go there. The application calls ``sentry_sdk.init()``. A monitor gets the slug of its task,
        and its schedule comes from the job's trigger, if Sentry can express that trigger.
    :param sentry_config: further entries of the monitors' configurations, such as
        ``{"max_runtime": 120}``, in minutes; by Sentry's default a run may take 30 minutes
    :param timeout: limits the seconds until a ping reaches its service, and until the answer comes
    :raises TaskLockOptionError: a URL of ``ping`` cannot be used; neither ``ping`` nor ``sentry``
        is given; or ``sentry-sdk`` is not installed
    """

    @raised_at_the_call
    def __init__(
        self,
        *,
        ping: str | Mapping[str, str] | None = None,
        sentry: bool | Collection[str] = False,
        sentry_config: Mapping[str, Any] | None = None,
        timeout: float = REQUEST_TIMEOUT,
    ) -> None:
        if isinstance(sentry, str):
            raise TaskLockOptionError("CheckIns: sentry takes a list of task names, not one name")
        if not ping and not sentry:
            raise TaskLockOptionError("CheckIns: give ping, sentry or both; one is needed")
        for url in [ping] if isinstance(ping, str) else (ping or {}).values():
            _check_url(url)
        self._ping = ping or {}
        self._sentry = sentry
        self._capture = _sentry_capture() if sentry else None
        self._sentry_config = sentry_config or {}
        self._timeout = timeout
        self._scheduler: Any = None
        self._runs: OrderedDict[_RunKey, _GrantedRun] = OrderedDict()
        self._changing = threading.Lock()
        self._sender: _Sender | None = None
        self._is_shut_down = False

    def attach(self, scheduler: Any) -> CheckIns:
        """Listen to a scheduler with a ``TaskLockExecutor``; return this object.

        :raises TaskLockOptionError: this object is attached to a scheduler already
        """
        if self._scheduler is not None:
            raise TaskLockOptionError("CheckIns: attached already; make one for each scheduler")
        self._scheduler = scheduler
        scheduler.add_listener(self._granted, EVENT_TASK_LOCK_GRANTED)
        scheduler.add_listener(self._released, EVENT_TASK_LOCK_RELEASED)
        scheduler.add_listener(self._lost, EVENT_TASK_LOCK_LOST | EVENT_TASK_LOCK_ERROR)
        scheduler.add_listener(self._ended, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
        scheduler.add_listener(self._shut_down, EVENT_SCHEDULER_SHUTDOWN)
        return self

    def close(self) -> None:
        """Send the waiting check-ins, for 2 seconds at most, and end the background thread."""
        with self._changing:
            sender, self._sender = self._sender, None
        if sender is not None:
            sender.close(CLOSING_TIMEOUT)

    def _granted(self, event: TaskLockEvent) -> None:
        is_manual = event.reason == "manual"
        run = _GrantedRun(
            event.task_name, event.job_id, event.jobstore, event.scheduled_run_time, is_manual
        )
        with self._changing:
            self._is_shut_down = False
            self._runs[_key(event)] = run
            if len(self._runs) > MOST_RUNS:
                self._runs.popitem(last=False)
            self._tell(_CheckIn(run, "start"))

    def _released(self, event: TaskLockEvent) -> None:
        is_over_elsewhere = event.reason == "handed over"
        with self._changing:
            run = self._runs.get(_key(event))
            if run is not None and not is_over_elsewhere:
                run.is_retried = event.retry_at is not None
                is_over_elsewhere = run.is_failed and run.is_retried
            if is_over_elsewhere:
                self._runs.pop(_key(event), None)
                return
        if run is not None and run.is_failed:
            self._tell_end(event, "fail")

    def _lost(self, event: TaskLockEvent) -> None:
        """Note a lost lock, or a release that failed."""
        run, is_lost = self._runs.get(_key(event)), event.code == EVENT_TASK_LOCK_LOST
        is_failed = run is not None and run.is_failed
        if is_lost and is_failed:
            # The run had ended, and its release has found another claim. The replica of that claim
            # reports how the window ends.
            with self._changing:
                self._runs.pop(_key(event), None)
        elif is_lost or is_failed:
            self._tell_end(event, "fail")

    def _ended(self, event: JobExecutionEvent) -> None:
        if event.code == EVENT_JOB_EXECUTED:
            self._tell_end(event, "ok")
            return
        with self._changing:
            run = self._runs.get(_key(event))
            if run is None:
                return
            run.is_failed = True
            if run.is_retried is None:
                return  # because only the release tells whether the run is retried
            if run.is_retried:
                self._runs.pop(_key(event), None)
                return
        self._tell_end(event, "fail")

    def _tell_end(self, event: Any, status: _Status) -> None:
        with self._changing:
            run = self._runs.pop(_key(event), None)
            if run is None:  # the run had no lock, its end was reported before, or it was dropped
                return
            self._tell(_CheckIn(run, status))
        # After a shutdown, the process may end before the sender's thread has sent this check-in.
        # `close` waits until it is sent.
        if self._is_shut_down:
            self.close()

    def _shut_down(self, _event: Any) -> None:
        self._is_shut_down = True
        self.close()

    def _tell(self, check_in: _CheckIn) -> None:
        # A forked child makes its own sender, because the parent's thread does not run there.
        if self._sender is None or self._sender.pid != os.getpid():
            self._sender = _Sender(self._send)
        self._sender.put(check_in)

    def _send(self, check_in: _CheckIn) -> None:
        """Send a check-in, and wait for the answer. Called in the background thread."""
        run = check_in.run
        if run.job is _UNKNOWN:
            run.job = self._scheduler.get_job(run.job_id, run.jobstore)  # reads the job store
        # The check-ins of one-off jobs are not sent unless their task is named in the options,
        # because each of these jobs would get a monitor of its own.
        is_one_off = run.job is None or isinstance(run.job.trigger, DateTrigger)
        if self._capture is not None and self._is_for_sentry(run.task_name, is_one_off):
            self._capture(
                monitor_slug=slug_of(run.task_name),
                check_in_id=run.run_id,
                status=_SENTRY_STATUS[check_in.status],
                monitor_config=self._monitor_config(run.job),
            )
        url = self._url(run.task_name, is_one_off)
        if url is not None:
            _ping(url, check_in.status, self._timeout)

    def _is_for_sentry(self, task_name: str, is_one_off: bool) -> bool:
        if isinstance(self._sentry, bool):
            return self._sentry and not is_one_off
        return task_name in self._sentry

    def _monitor_config(self, job: Any) -> dict[str, Any] | None:
        config = None if job is None else monitor_config(job.trigger)
        return None if config is None else {**config, **self._sentry_config}

    def _url(self, task_name: str, is_one_off: bool) -> str | None:
        if not isinstance(self._ping, str):
            return self._ping.get(task_name)
        if is_one_off:
            return None
        named = self._ping.replace("{task}", quote(task_name, safe=""))
        return named.replace("{slug}", slug_of(task_name))


def _key(event: Any) -> _RunKey:
    return event.job_id, event.jobstore, event.scheduled_run_time


def _check_url(url: str) -> None:
    """Check that a URL can be used for pings.

    :raises TaskLockOptionError: the URL cannot be used. The message has no part of the URL,
        because the URL is a secret: everybody who has the URL can check in.
    """
    wrong = None
    try:
        parts = urlsplit(url)
        is_complete = bool(parts.hostname and (parts.port is None or parts.port))
    except ValueError:
        is_complete = False
    if not is_complete:
        wrong = "has no host, or a port that is no number"
    elif parts.scheme not in ("http", "https"):
        wrong = "begins with neither http: nor https:"
    elif "@" in parts.netloc:
        wrong = "has a user or a password, which a ping does not send"
    elif not url.isprintable() or " " in url:
        wrong = "has a space or a control character"
    if wrong is not None:
        raise TaskLockOptionError(f"CheckIns: a URL of ping {wrong}")


def slug_of(task_name: str) -> str:
    """Return a slug for a task's name: lower case, digits, ``-`` and ``_``; 50 characters at most.

    If the name is longer or has none of these characters, the slug ends with a hash of the name.
    """
    slug = re.sub(r"[^a-z0-9_-]+", "-", task_name.lower()).strip("-")
    if slug and len(slug) <= LONGEST_SLUG:
        return slug
    digest = hashlib.sha256(task_name.encode()).hexdigest()[:8]
    return f"{slug[: LONGEST_SLUG - 9]}-{digest}".strip("-")


_SENTRY_STATUS = {"start": "in_progress", "ok": "ok", "fail": "error"}


def _sentry_capture() -> Callable[..., Any]:
    try:
        from sentry_sdk.crons import capture_checkin
    except ImportError:
        raise TaskLockOptionError(
            "CheckIns: sentry needs its SDK: pip install sentry-sdk"
        ) from None
    return capture_checkin


def monitor_config(trigger: Any) -> dict[str, Any] | None:
    """Return Sentry's configuration of a monitor; ``None`` if Sentry cannot express the trigger.

    Sentry can express crontabs of five fields, and intervals of whole minutes.
    """
    if type(trigger) is CronTrigger:
        crontab = _crontab(trigger)
        if crontab is None or not _is_time_zone(str(trigger.timezone)):
            return None
        config: dict[str, Any] = {"schedule": {"type": "crontab", "value": crontab}}
        return {**config, "timezone": str(trigger.timezone)}
    if type(trigger) is IntervalTrigger:
        minutes, rest = divmod(trigger.interval.total_seconds(), 60)
        if minutes >= 1 and rest == 0:
            value, unit = _largest_unit(int(minutes))
            return {"schedule": {"type": "interval", "value": value, "unit": unit}}
    return None


def _is_time_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ValueError, OSError, ZoneInfoNotFoundError):  # such as a fixed offset
        return False
    return True


def _largest_unit(minutes: int) -> tuple[int, str]:
    for unit, size in (("day", 1440), ("hour", 60)):
        if minutes % size == 0:
            return minutes // size, unit
    return minutes, "minute"


# The fields of a crontab, in their order. A cron trigger's other fields must have their defaults.
_CRONTAB_FIELDS = ("minute", "hour", "day", "month", "day_of_week")
_CRON_PART = re.compile(r"(\*|\d+(-\d+)?)(/\d+)?")
_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def _crontab(trigger: Any) -> str | None:
    """Return a cron trigger as a crontab; ``None`` if no crontab means the same."""
    fields = {field.name: str(field) for field in trigger.fields}
    if fields["second"] != "0" or fields["year"] != "*" or fields["week"] != "*":
        return None
    # If both fields are set, a crontab runs on days that match one of them, and APScheduler on days
    # that match both. So no crontab means the same.
    if fields["day"] != "*" and fields["day_of_week"] != "*":
        return None
    fields["day_of_week"] = _crontab_weekdays(fields["day_of_week"])
    parts = [part for name in _CRONTAB_FIELDS for part in fields[name].split(",")]
    if not all(_CRON_PART.fullmatch(part) for part in parts):  # a part such as `last` or `2nd mon`
        return None
    return " ".join(fields[name] for name in _CRONTAB_FIELDS)


def _crontab_weekdays(field: str) -> str:
    """Convert a weekday field of APScheduler (Monday is 0) to that of a crontab (Sunday is 0)."""
    for number, name in enumerate(_WEEKDAYS):
        field = field.replace(name, str(number))
    if not all(re.fullmatch(r"\d(-\d)?", part) for part in field.split(",")):
        return field
    days: set[int] = set()
    for part in field.split(","):
        first, _, last = part.partition("-")
        days |= set(range(int(first), int(last or first) + 1))
    return ",".join(str(day) for day in sorted((day + 1) % 7 for day in days))


def _ping(url: str, status: _Status, timeout: float) -> None:
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    if status != "ok":
        path += f"/{status}"
    whole = urlunsplit((parts.scheme, parts.netloc, path or "/", parts.query, ""))
    try:
        _get_unnoticed(whole, timeout)
    except OSError:
        _get_unnoticed(whole, timeout)  # a second try, because a lost check-in raises an alarm


def _get_unnoticed(url: str, timeout: float) -> None:
    """Make a request in a context of its own.

    Sentry's SDK notes the URL of each request in the context, and sends it with the errors that are
    told in the same context, such as those of the jobs. But the URL is a secret.
    """
    contextvars.Context().run(_get, url, timeout)


def _get(url: str, timeout: float) -> None:
    # `_check_url` has checked the scheme.
    request = Request(url, headers={"User-Agent": "apscheduler-tasklock"})  # noqa: S310  # HTTP
    try:
        _service().open(request, timeout=timeout).close()
    except HTTPError as error:
        error.close()
        # The error has only the status, because the answer's text may contain the URL, a secret.
        status = f"HTTP {error.code}"
        if 300 <= error.code < 400:
            status += ", a redirect, which is not followed: give `ping` the URL that it leads to"
        raise OSError(status) from None


@cache
def _service() -> OpenerDirector:
    """Return an opener that makes HTTP requests through the environment's proxy.

    The opener follows no redirects, because a redirect could lead to a server that only this
    machine can reach, and because the standard library reads the whole body of a redirect.
    """
    service = OpenerDirector()
    for handler in (
        ProxyHandler,
        HTTPHandler,
        HTTPSHandler,
        HTTPDefaultErrorHandler,
        HTTPErrorProcessor,
    ):
        service.add_handler(handler())
    return service


class _Sender:
    """Sends check-ins in a background thread, one after the other.

    :param send: sends one check-in
    :ivar pid: the id of the thread's process
    """

    def __init__(self, send: Callable[[_CheckIn], None]) -> None:
        self.pid = os.getpid()
        self._send = send
        self._queue: queue.Queue[_CheckIn | None] = queue.Queue(LONGEST_QUEUE)
        self._abandoned = threading.Event()
        self._drops = False
        self._fails = False
        # A daemon thread, so that a service that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="tasklock-check-ins", daemon=True)
        self._thread.start()

    def put(self, check_in: _CheckIn) -> None:
        """Queue a check-in, or drop it if too many wait."""
        try:
            self._queue.put_nowait(check_in)
        except queue.Full:
            if not self._drops:
                self._drops = True
                logger.warning(
                    "Check-ins are dropped, since %d wait to be sent: their service answers too "
                    "slowly, or not at all",
                    LONGEST_QUEUE,
                )

    def close(self, timeout: float) -> None:
        """Send the waiting check-ins, and end the thread.

        :param timeout: limits the wait, in seconds
        """
        deadline = time.monotonic() + timeout
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._abandoned.set()
        if self._thread.is_alive():
            logger.warning("Check-ins are not sent: their service has not answered in time")

    def _run(self) -> None:
        while (check_in := self._queue.get()) is not None and not self._abandoned.is_set():
            try:
                self._send(check_in)
                self._fails = False
            except Exception as error:  # noqa: BLE001  # whatever an SDK or a job store raises
                level = logging.DEBUG if self._fails else logging.WARNING
                self._fails = True
                # The text of an error other than `OSError` may contain the URL, which is a secret.
                # So its type is logged.
                why = error if isinstance(error, OSError) else type(error).__name__
                logger.log(level, "A check-in of %r failed: %s", check_in.run.task_name, why)
            if self._queue.empty():
                self._drops = False
