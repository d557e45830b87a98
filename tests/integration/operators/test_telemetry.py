"""Metrics and traces of run times, as OpenTelemetry's own SDK gets them."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MISSED
from opentelemetry import metrics, trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLocks,
)
from apscheduler_tasklock._runs import otel
from apscheduler_tasklock.testing import in_memory_locks
from tests.support import claims, pool_jobs
from tests.support.claims import RENEWS_OFTEN
from tests.support.hosts import AsyncIO
from tests.support.outages import Job, refuse
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.schedulers import NO_DATABASE, Replica
from tests.support.telemetry import Telemetry, telemetry

MakeReplica = Callable[..., Replica]

RUN = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]
OK = {"tasklock.run.kind": "schedule", "tasklock.run.outcome": "ok"}
FAILED = {
    "tasklock.run.kind": "schedule",
    "tasklock.run.outcome": "error",
    "error.type": "ValueError",
}


@pytest.fixture
def sdk() -> Telemetry:
    sdk = telemetry()
    sdk.forget()
    eventually(otel.sdk.is_set)  # the test before this one may have seen that there is none
    return sdk


def one_span(sdk: Telemetry, name: str) -> ReadableSpan:
    """Wait for a span to end; it does so after the run's events."""
    eventually(lambda: sdk.spans(name))
    [span] = sdk.spans(name)
    return span


def work(**_: Any) -> str:
    """Return the name of the span that is the current one."""
    with trace.get_tracer("application").start_as_current_span("the job's own") as span:
        assert isinstance(span, ReadableSpan)
        parent = span.parent
    assert parent is not None
    return trace.format_span_id(parent.span_id)


def fail() -> None:
    raise ValueError("what it says")


def test_a_run_that_is_granted_is_measured_and_traced(
    make_replica: MakeReplica, sdk: Telemetry
) -> None:
    replica = make_replica()
    told: list[int] = []
    replica.scheduler.add_listener(lambda _: told.append(time.time_ns()), EVENT_TASK_LOCK_GRANTED)
    job = replica.run_once(work, job_id="granted")
    of_the_job = replica.one(EVENT_JOB_EXECUTED, "granted").retval
    token = replica.one(EVENT_TASK_LOCK_GRANTED, "granted").token

    run, claim = one_span(sdk, "run granted"), one_span(sdk, "claim granted")
    assert run.parent is None
    assert trace.format_span_id(run.context.span_id) == of_the_job
    event = replica.one(EVENT_JOB_EXECUTED, "granted")
    assert run.attributes == {
        "tasklock.task.name": "granted",
        "tasklock.run.time": event.scheduled_run_time.isoformat(),
        "tasklock.run.token": token,
        **OK,
    }
    assert claim.parent is not None
    assert claim.parent.span_id == run.context.span_id
    assert run.start_time == claim.start_time
    assert claim.start_time is not None
    assert claim.end_time is not None
    assert run.end_time is not None
    assert claim.start_time < claim.end_time <= told[0] <= run.end_time
    assert run.status.is_unset
    assert run.instrumentation_scope is not None
    assert run.instrumentation_scope.name == "apscheduler_tasklock"

    granted = {"tasklock.claim.result": "granted"}
    assert sdk.attributes("tasklock.claim.duration", "granted") == [granted]
    for instrument in ("tasklock.run.duration", "tasklock.run.delay"):
        [point] = sdk.points(instrument, "granted")
        assert (point.count, point.attributes) == (1, {"tasklock.task.name": "granted", **OK})
        assert point.min >= 0
    [active] = sdk.points("tasklock.run.active", "granted")
    assert active.value == 0
    assert job.id == "granted"


def test_the_instruments_have_the_units_and_buckets_that_are_documented(
    make_replica_in_memory: MakeReplica, sdk: Telemetry
) -> None:
    replica = make_replica_in_memory()
    replica.run_once(print, job_id="units")
    one_span(sdk, "run units")
    units = sdk.units()
    for instrument in ("tasklock.claim.duration", "tasklock.run.duration", "tasklock.run.delay"):
        assert units[instrument] == "s"
    assert units["tasklock.run.active"] == "{run}"
    [point] = sdk.points("tasklock.run.duration", "units")
    assert point.explicit_bounds[-1] == timedelta(days=1).total_seconds()
    [point] = sdk.points("tasklock.claim.duration", "units")
    assert point.explicit_bounds[0] == 0.001


def test_a_run_that_goes_on_is_active(
    make_replica_in_memory: MakeReplica, sdk: Telemetry, job: Job
) -> None:
    replica = make_replica_in_memory()
    replica.run_once(job.run, job_id="active")
    assert job.begun.wait(60)
    assert [p.value for p in sdk.points("tasklock.run.active", "active")] == [1]
    job.go_on.set()
    one_span(sdk, "run active")
    assert [p.value for p in sdk.points("tasklock.run.active", "active")] == [0]


def test_a_run_that_fails_tells_the_class_of_its_exception(
    make_replica_in_memory: MakeReplica, sdk: Telemetry
) -> None:
    replica = make_replica_in_memory()
    replica.run_once(fail, job_id="failing")
    span = one_span(sdk, "run failing")
    assert sdk.attributes("tasklock.run.duration", "failing") == [FAILED]
    assert not span.status.is_ok
    assert span.status.description == "ValueError"
    [event] = span.events
    assert event.attributes is not None
    assert event.attributes["exception.message"] == "what it says"


def test_a_job_that_leaves_its_worker_ends_its_span(
    make_replica_in_memory: MakeReplica, sdk: Telemetry
) -> None:
    replica = make_replica_in_memory()
    replica.run_once(pool_jobs.leave, job_id="leaving")
    span = one_span(sdk, "run leaving")
    assert span.attributes is not None
    assert span.attributes["error.type"] == "SystemExit"
    assert [p.value for p in sdk.points("tasklock.run.active", "leaving")] == [0]


def test_a_refused_claim_is_measured_and_not_traced(
    make_replica_in_memory: MakeReplica, sdk: Telemetry
) -> None:
    one, other = make_replica_in_memory(), make_replica_in_memory()
    one.run_once(print, job_id="refused")
    one_span(sdk, "run refused")
    other.run_once(print, job_id="refused")
    assert other.one(EVENT_TASK_LOCK_REFUSED, "refused").reason == "window"
    other.idle()
    refused = {"tasklock.claim.result": "refused", "tasklock.refusal.reason": "window"}
    assert refused in sdk.attributes("tasklock.claim.duration", "refused")
    assert len(sdk.spans("claim refused")) == len(sdk.spans("run refused")) == 1


@pytest.mark.nightly
def test_a_window_that_is_taken_over_is_a_run_of_another_kind(
    make_replica: MakeReplica, make_locks: Callable[..., Any], sdk: Telemetry
) -> None:
    dead = make_locks(replica_id="dead")
    options = {"failover": True, "lease": 1}
    runs = f"{__name__}:work"
    held = claims.held(
        dead, "taken", min_lock=3000, max_lock=9000, lease=1.0, failover=True, runs=runs
    )
    claims.die(dead, held)
    replica = make_replica(poll_interval=0.2)
    replica.run_once(work, job_id="taken", kwargs={"task_lock": options})
    span = one_span(sdk, "run taken")
    assert span.attributes is not None
    assert span.attributes["tasklock.run.kind"] == "takeover"
    assert {"tasklock.claim.result": "takeover"} in sdk.attributes(
        "tasklock.claim.duration", "taken"
    )
    taken = {"tasklock.run.kind": "takeover", "tasklock.run.outcome": "ok"}
    assert sdk.attributes("tasklock.run.delay", "taken") == [taken]


def test_a_misfire_is_a_fire_that_was_skipped(
    make_replica_in_memory: MakeReplica, sdk: Telemetry
) -> None:
    replica = make_replica_in_memory()
    long_ago = datetime.now(timezone.utc) - timedelta(minutes=5)
    replica.run_once(print, job_id="late", next_run_time=long_ago, misfire_grace_time=60)
    replica.one(EVENT_JOB_MISSED, "late")
    assert sdk.attributes("tasklock.fire.skipped", "late") == [{"tasklock.skip.reason": "misfire"}]
    assert sdk.points("tasklock.claim.duration", "late") == []


def test_a_claim_that_fails_is_an_error_and_its_fire_is_skipped(
    make_replica: MakeReplica, proxy: Proxy, sdk: Telemetry
) -> None:
    replica = make_replica(proxy.url, claim_timeout=0.5)
    refuse(proxy)
    replica.run_once(print, job_id="away")
    replica.one(EVENT_TASK_LOCK_ERROR, "away")
    replica.idle()
    error = {"tasklock.claim.result": "error"}
    assert sdk.attributes("tasklock.claim.duration", "away") == [error]
    assert sdk.attributes("tasklock.fire.skipped", "away") == [{"tasklock.skip.reason": "error"}]
    assert sdk.spans("claim away") == []


def test_a_lock_that_is_lost_is_counted_once(
    make_replica: MakeReplica, make_task_locks: Callable[..., TaskLocks], sdk: Telemetry, job: Job
) -> None:
    replica = make_replica(jobs={"lost": {"lease": 600}}, timings=RENEWS_OFTEN)
    replica.run_once(job.run, job_id="lost")
    assert job.begun.wait(60)
    token = replica.one(EVENT_TASK_LOCK_GRANTED, "lost").token
    make_task_locks().free("lost", token, force=True)
    replica.one(EVENT_TASK_LOCK_LOST, "lost")
    job.go_on.set()
    one_span(sdk, "run lost")
    assert [point.value for point in sdk.points("tasklock.lock.lost", "lost")] == [1]


def test_one_off_jobs_are_told_under_their_function_unless_they_are_named(
    make_replica_in_memory: MakeReplica, sdk: Telemetry
) -> None:
    replica = make_replica_in_memory()
    soon = {"trigger": "date", "misfire_grace_time": None}
    replica.scheduler.add_job(print, id="order-4711", **soon)
    named = {"task_lock": {"name": "invoice"}}
    replica.scheduler.add_job(lambda **_: None, id="order-4712", kwargs=named, **soon)
    span = one_span(sdk, "run builtins:print")
    assert span.attributes is not None
    assert span.attributes["tasklock.task.name"] == "order-4711"
    assert sdk.attributes("tasklock.run.duration", "builtins:print") == [OK]
    assert sdk.points("tasklock.run.duration", "order-4711") == []
    one_span(sdk, "run invoice")


async def coroutine(**_: Any) -> str:
    await asyncio.sleep(0)
    return work()


async def endless(**_: Any) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def make_loop() -> Any:
    host = AsyncIO()
    replicas: list[Replica] = []

    def make(**options: Any) -> Replica:
        replicas.append(Replica(NO_DATABASE, host=host, **{**host.executor, **options}))
        replicas[-1].start()
        return replicas[-1]

    with in_memory_locks():
        yield make
        for replica in replicas:
            replica.shutdown()
    host.close()


def test_a_coroutine_has_its_span_while_it_is_awaited(
    make_loop: Callable[..., Replica], sdk: Telemetry
) -> None:
    replica = make_loop()
    # The event loop hands down what is current where a job is added. It is no parent of the runs.
    with trace.get_tracer("application").start_as_current_span("request"):
        for number in range(3):
            replica.run_once(coroutine, job_id=f"coroutine-{number}")
    for number in range(3):
        executed = replica.one(EVENT_JOB_EXECUTED, f"coroutine-{number}")
        span = one_span(sdk, f"run coroutine-{number}")
        assert executed.retval == trace.format_span_id(span.context.span_id)
        assert span.parent is None
        assert len(sdk.spans(f"claim coroutine-{number}")) == 1


def test_a_coroutine_that_a_shutdown_cuts_ends_its_span(
    make_loop: Callable[..., Replica], sdk: Telemetry
) -> None:
    replica = make_loop()
    replica.run_once(endless, job_id="cut")
    eventually(lambda: [p.value for p in sdk.points("tasklock.run.active", "cut")] == [1])
    replica.shutdown()
    span = one_span(sdk, "run cut")
    assert span.attributes is not None
    assert span.attributes["tasklock.run.outcome"] == "cancelled"
    assert [p.value for p in sdk.points("tasklock.run.active", "cut")] == [0]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_parent_measures_what_runs_in_a_worker_process(
    make_replica_in_memory: MakeReplica, sdk: Telemetry, method: str
) -> None:
    context = multiprocessing.get_context(method)
    pool = {"max_workers": 1, "pool_kwargs": {"mp_context": context}}
    replica = make_replica_in_memory(executor="processpool", **pool)
    replica.run_once(is_traced, job_id=f"pooled-{method}")
    assert replica.one(EVENT_JOB_EXECUTED, f"pooled-{method}").retval is False  # as in plain ones
    span = one_span(sdk, f"run pooled-{method}")
    assert span.attributes is not None
    assert span.attributes["tasklock.run.outcome"] == "ok"
    assert [p.value for p in sdk.points("tasklock.run.active", f"pooled-{method}")] == [0]


def is_traced() -> bool:
    return trace.get_current_span().is_recording()


class Threads(SpanProcessor):
    """Notes in which threads the spans of dead runs end."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_end(self, span: ReadableSpan) -> None:
        if (span.attributes or {}).get("tasklock.run.outcome") == "died":
            self.names.append(threading.current_thread().name)


def test_the_span_of_a_dead_worker_process_ends_in_the_applications_thread(
    make_replica: MakeReplica, sdk: Telemetry
) -> None:
    """An SDK may send a span where it ends, which must not hold up renewals."""
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    threads = Threads()
    provider.add_span_processor(threads)
    replica = make_replica(executor="processpool", max_workers=1)
    replica.run_once(pool_jobs.die, job_id="dies")
    one_span(sdk, "run dies")
    eventually(lambda: threads.names)
    assert threads.names == ["tasklock-application"]


@pytest.mark.parametrize("function", [print, fail])
def test_an_sdk_that_raises_changes_nothing_for_a_job(
    make_replica: MakeReplica,
    make_task_locks: Callable[..., TaskLocks],
    sdk: Telemetry,
    function: Callable[..., Any],
) -> None:
    one, other = make_replica(), make_replica()
    sdk.fault.is_on, sdk.fault.raised = True, 0
    try:
        one.run_once(function, job_id="broken")
        ended = EVENT_JOB_EXECUTED if function is print else EVENT_JOB_ERROR
        one.one(ended, "broken")
        one.idle()
        other.run_once(function, job_id="broken")
        other.one(EVENT_TASK_LOCK_REFUSED, "broken")
        other.idle()
    finally:
        sdk.fault.is_on = False
    assert one.codes("broken") == [RUN[0], ended, RUN[2]]
    assert other.codes("broken") == [EVENT_TASK_LOCK_REFUSED]
    assert sdk.fault.raised >= 6  # the claim, the span, the run's beginning and its end
    [task] = make_task_locks().tasks("broken")
    assert task.finished_at is not None


def test_an_sdk_that_raises_is_told_of_once(
    make_replica_in_memory: MakeReplica, sdk: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica_in_memory()
    sdk.fault.is_on = True
    try:
        for number in range(2):
            replica.run_once(print, job_id=f"told-{number}")
            replica.one(EVENT_JOB_EXECUTED, f"told-{number}")
        replica.idle()
    finally:
        sdk.fault.is_on = False
    told = [r for r in caplog.records if "OpenTelemetry failed" in r.message]
    assert len([r for r in told if r.levelname == "WARNING"]) <= 1  # an earlier test may have


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None  # as where it is not installed
from apscheduler_tasklock._runs import reports as notify
assert not [name for name in sys.modules if name.startswith("opentelemetry.")]
one, other = notify.telemetry_of(None), notify.telemetry_of(None)
assert one is other
with one.running(None, 0.0):
    print("measures nothing")
"""


def test_without_opentelemetry_one_object_measures_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "measures nothing\n"


LATE = """
import sys
from datetime import datetime, timezone
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler_tasklock import EVENT_TASK_LOCK_RELEASED, TaskLockExecutor
import threading
ran = threading.Event()
from apscheduler_tasklock.testing import in_memory_locks
in_memory = in_memory_locks()
in_memory.__enter__()
scheduler = BackgroundScheduler(executors={"default": TaskLockExecutor(sys.argv[1])})
scheduler.add_listener(lambda _: ran.set(), EVENT_TASK_LOCK_RELEASED)
scheduler.start()
job = {"trigger": "interval", "hours": 1, "misfire_grace_time": None}
scheduler.add_job(int, id="early", next_run_time=datetime.now(timezone.utc), **job)
assert ran.wait(60)
from tests.support.telemetry import telemetry
from apscheduler_tasklock._runs import otel
from tests.support.polling import eventually
sdk = telemetry()
eventually(otel.sdk.is_set)  # which looks now and then
ran.clear()
scheduler.add_job(int, id="late", next_run_time=datetime.now(timezone.utc), **job)
assert ran.wait(60)
scheduler.shutdown()
print(len(sdk.spans("run early")), len(sdk.spans("run late")))
print(len(sdk.points("tasklock.run.duration", "late")))
"""


def test_an_sdk_that_is_installed_after_the_first_run_gets_the_next(checkout: Any) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LATE, NO_DATABASE],
        capture_output=True,
        text=True,
        check=False,
        cwd=checkout,
    )
    assert ran.stdout.split() == ["0", "1", "1"], ran.stderr


@pytest.fixture
def _no_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be none, as in a process that has just started."""
    monkeypatch.setattr(otel.trace, "get_tracer_provider", trace.NoOpTracerProvider)
    monkeypatch.setattr(otel.metrics, "get_meter_provider", metrics.NoOpMeterProvider)


@pytest.mark.usefixtures("_no_sdk")
def test_who_asks_while_the_api_sets_up_an_sdk_looks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the API does at the first look, if the environment names one; it may take seconds."""
    both_look = threading.Barrier(2, timeout=60)

    def set_up() -> TracerProvider:
        both_look.wait()
        return TracerProvider()

    monkeypatch.setattr(otel.trace, "get_tracer_provider", set_up)
    sdk = otel.Sdk()
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda _: sdk.is_set(), range(2)))


@pytest.mark.usefixtures("_no_sdk")
def test_a_forked_worker_that_sets_up_its_own_sdk_finds_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process id stands for the fork: right after its parent has looked is too short to hit."""
    sdk = otel.Sdk()
    assert not sdk.is_set()  # in the parent, a moment ago
    monkeypatch.setattr(otel.trace, "get_tracer_provider", TracerProvider)  # a pool's initializer
    monkeypatch.setattr(otel.os, "getpid", lambda: 0)
    assert sdk.is_set()
