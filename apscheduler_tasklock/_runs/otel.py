"""Metrics and traces of runs, by OpenTelemetry's API. Imported only where the API is installed.

The application sets up an SDK, before or after it imports this module. Without an SDK, the API does
nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Token
from math import inf
from typing import Any

from opentelemetry import context, metrics, trace
from opentelemetry.trace import Span, Status, StatusCode

from apscheduler_tasklock._lock.command_lines import library_version
from apscheduler_tasklock._lock.outcomes import RunOutcome
from apscheduler_tasklock._lock.protocol_messages import Refusal
from apscheduler_tasklock._runs.job_functions import function_reference
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._runs.telemetry import RunTelemetry
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.lock import HeldLock

logger = logger_of(__name__)

NAME = "apscheduler_tasklock"

# The modules of the API's own providers, which do nothing until an SDK replaces them.
_API = ("opentelemetry.metrics", "opentelemetry.trace")
# Seconds between two checks whether there is an SDK. In each check the API reads the process's
# environment. In a burst of jobs, a check for each run would take a tenth of the time that the
# jobs' locks take.
CHECK_INTERVAL = 0.1

TASK_NAME = "tasklock.task.name"
CLAIM_RESULT = "tasklock.claim.result"
REFUSAL_REASON = "tasklock.refusal.reason"
RUN_KIND = "tasklock.run.kind"
RUN_OUTCOME = "tasklock.run.outcome"
RUN_TIME = "tasklock.run.time"
RUN_TOKEN = "tasklock.run.token"  # noqa: S105  # the name of an attribute
SKIP_REASON = "tasklock.skip.reason"
ERROR_TYPE = "error.type"

# Limits of the histograms' buckets, in seconds.
CLAIM_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
DELAY_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
RUN_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
    *(3600.0, 7200.0, 14400.0, 28800.0, 86400.0),
)


class _Instruments:
    """The instruments and the tracer. They are made once in each process."""

    def __init__(self) -> None:
        meter = metrics.get_meter(NAME, library_version())
        self.tracer = trace.get_tracer(NAME, library_version())
        self.claim_duration = _histogram(
            meter,
            "tasklock.claim.duration",
            "Time from wanting a claim to its answer",
            CLAIM_BUCKETS,
        )
        self.run_duration = _histogram(
            meter, "tasklock.run.duration", "Time that the job took", RUN_BUCKETS
        )
        self.run_delay = _histogram(
            meter, "tasklock.run.delay", "Time from the run time to the job's start", DELAY_BUCKETS
        )
        self.run_active = meter.create_up_down_counter(
            "tasklock.run.active", "{run}", "Runs that go on"
        )
        self.lock_lost = meter.create_counter(
            "tasklock.lock.lost", "{lock}", "Locks that were lost before their run ended"
        )
        self.fire_skipped = meter.create_counter(
            "tasklock.fire.skipped", "{fire}", "Run times that nobody refused and that did not run"
        )


def _histogram(
    meter: metrics.Meter, name: str, description: str, buckets: Sequence[float]
) -> metrics.Histogram:
    return meter.create_histogram(
        name, "s", description, explicit_bucket_boundaries_advisory=buckets
    )


_made: _Instruments | None = None
_making = threading.Lock()


def _instruments() -> _Instruments:
    global _made  # noqa: PLW0603  # one per process
    if _made is None:
        with _making:
            if _made is None:
                _made = _Instruments()
    return _made


class Sdk:
    """Finds out whether the application has set up an SDK, which it may do at any time."""

    def __init__(self) -> None:
        self._is_set = False
        self._checked_at = -inf  # on the monotonic clock
        # The id of the process of the last check, because a forked child may set up its own SDK.
        self._checked_in: int | None = None

    def is_set(self) -> bool:
        """Return whether there is an SDK, as of the last check."""
        if self._is_set:
            return True
        process = os.getpid()
        if self._checked_in != process or time.monotonic() > self._checked_at + CHECK_INTERVAL:
            with _contained():
                providers = (metrics.get_meter_provider(), trace.get_tracer_provider())
                self._is_set = any(
                    not type(provider).__module__.startswith(_API) for provider in providers
                )
            # Set only after the check, because the API may set up an SDK during the check. If this
            # were set before, other threads would meanwhile take the SDK for missing.
            self._checked_at, self._checked_in = time.monotonic(), process
        return self._is_set


sdk = Sdk()
_NOTHING = RunTelemetry()


def telemetry_of(submission: Submission) -> RunTelemetry:
    """Return the telemetry of a run of a submission. Without an SDK it measures nothing."""
    return OpenTelemetryRun(submission) if sdk.is_set() else _NOTHING


class OpenTelemetryRun(RunTelemetry):
    """Measures one run, and traces it if its claim is granted.

    The application's SDK may raise any error. Each call of the SDK is contained by itself, so that
    for example the span is ended although a measurement has failed.
    """

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._task_name = _task_name(submission)
        self._claim: tuple[int, int] | None = None  # begin and end, in ns since 1970
        self._kind = ""
        self._delay = 0.0
        self._span: Span | None = None
        self._started_at: float | None = None  # the job's start, on the monotonic clock
        self._stopped_at: int | None = None  # the job's end, in ns since 1970
        self._took = 0.0
        self._changing = threading.Lock()

    def claimed(self, wanted_at: float, claimed: HeldLock | Refusal | None) -> None:
        """Note the outcome of a claim."""
        if isinstance(claimed, HeldLock):
            ended = time.time_ns()
            self._claim = ended - int((time.monotonic() - wanted_at) * 1e9), ended
            result = {CLAIM_RESULT: "takeover" if claimed.is_takeover else "granted"}
        else:
            reason = "gone" if claimed is None else claimed.reason
            result = {CLAIM_RESULT: "refused", REFUSAL_REASON: reason}
        self._record_claim(wanted_at, result)

    def claim_failed(self, wanted_at: float) -> None:
        """Note that a claim was neither granted nor refused."""
        self._record_claim(wanted_at, {CLAIM_RESULT: "error"})

    def _record_claim(self, wanted_at: float, result: dict[str, str]) -> None:
        with _contained():
            attributes = {TASK_NAME: self._task_name, **result}
            _instruments().claim_duration.record(time.monotonic() - wanted_at, attributes)

    @contextmanager
    def running(self, held: HeldLock, run_time: float) -> Iterator[None]:
        """Measure the job that runs during the block, and make its span the current span."""
        self._kind = self._kind_of(held)
        token = None
        with _contained():
            self._span = self._start_span(held)
            token = context.attach(trace.set_span_in_context(self._span))
        with _contained():
            _instruments().run_active.add(1, {TASK_NAME: self._task_name})
        failed = self._submission.failed_run
        late_by = time.time() - run_time
        if failed is not None and failed.retry_at is not None:
            late_by = (held.database_time() - failed.retry_at).total_seconds()
        self._delay = max(0.0, late_by)
        self._started_at = time.monotonic()
        try:
            yield
        finally:
            self._stop()
            if token is not None:
                with _contained():
                    _detach(token)

    def _kind_of(self, held: HeldLock) -> str:
        if held.is_takeover:
            return "takeover"
        if self._submission.failed_run is not None:
            return "retry"
        return "schedule" if self._submission.request_id is None else "manual"

    def _start_span(self, held: HeldLock) -> Span:
        """Return the run's span, which begins with the claim and contains the claim's own span."""
        assert self._claim is not None
        tracer, (began, ended) = _instruments().tracer, self._claim
        attributes: dict[str, Any] = {
            TASK_NAME: held.name,
            RUN_TOKEN: held.token,
            RUN_KIND: self._kind,
        }
        if held.run_time is not None:
            attributes[RUN_TIME] = held.run_time.isoformat()
        span = tracer.start_span(
            f"run {self._task_name}", context.Context(), attributes=attributes, start_time=began
        )
        with _contained():
            tracer.start_span(
                f"claim {self._task_name}", trace.set_span_in_context(span), start_time=began
            ).end(ended)
        return span

    def _stop(self) -> None:
        """Note when the job has ended or was cut. Only the first call has an effect."""
        with self._changing:
            if self._started_at is None or self._stopped_at is not None:
                return
            self._took = time.monotonic() - self._started_at
            self._stopped_at = time.time_ns()
        with _contained():
            _instruments().run_active.add(-1, {TASK_NAME: self._task_name})

    def raised(self, exception: BaseException) -> None:
        """Note the exception that the job has raised."""
        if self._span is not None:
            with _contained():
                self._span.record_exception(exception)

    def ended(self, end: RunOutcome) -> None:
        """Note how the run has ended."""
        if self._started_at is None:  # the job has not begun
            return
        self._stop()
        how = {RUN_KIND: self._kind, RUN_OUTCOME: end.outcome}
        if end.error_type is not None:
            how[ERROR_TYPE] = end.error_type
        attributes = {TASK_NAME: self._task_name, **how}
        with _contained():
            _instruments().run_duration.record(self._took, attributes)
        with _contained():
            _instruments().run_delay.record(self._delay, attributes)
        span, self._span = self._span, None
        if span is None:
            return
        with _contained():
            span.set_attributes(how)
            if end.outcome == "error":
                span.set_status(Status(StatusCode.ERROR, end.error_type))
        with _contained():
            span.end(self._stopped_at)

    def lost(self) -> None:
        """Count a lock that was lost."""
        with _contained():
            _instruments().lock_lost.add(1, {TASK_NAME: self._task_name})

    def skipped(self, reason: str) -> None:
        """Count a run time that is not run here for another reason than a refused claim."""
        with _contained():
            _instruments().fire_skipped.add(1, {TASK_NAME: self._task_name, SKIP_REASON: reason})


def _task_name(submission: Submission) -> str:
    """Return a task's name for attributes.

    For a one-off job without the option ``name`` the name is the function's reference, because
    there may be very many such jobs, each with its own id.
    """
    is_named = submission.options is not None and submission.options.name is not None
    if submission.one_off and not is_named:
        return function_reference(submission.job)
    return submission.task_name


def _detach(token: object) -> None:
    # A coroutine may be closed in another context than the one in which it began. In that other
    # context nothing has to be restored, but `detach` would log an error. So the token is reset
    # here.
    if isinstance(token, Token):
        with suppress(ValueError):
            token.var.reset(token)
    else:
        context.detach(token)  # type: ignore[arg-type]  # of a context that is not Python's own


_is_logged = False


@contextmanager
def _contained() -> Iterator[None]:
    """Contain the errors of the application's SDK, so that no error fails a job or keeps its lock.

    Even a ``SystemExit`` is contained, because the SDK calls ``str`` of a job's exception, and so
    runs application code.
    """
    global _is_logged  # noqa: PLW0603  # one per process
    try:
        yield
    except BaseException:
        level = logging.DEBUG if _is_logged else logging.WARNING
        _is_logged = True
        logger.log(level, "OpenTelemetry failed; jobs run all the same", exc_info=True)
