"""Check-ins of granted runs: pings of a real HTTP server, and Sentry's own SDK."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psycopg
import pytest
import sentry_sdk
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    TaskLockOptionError,
    TaskLocks,
    checkins,
)
from apscheduler_tasklock.checkins import LONGEST_QUEUE, CheckIns, monitor_config, slug_of
from apscheduler_tasklock.testing import in_memory_locks
from tests.support import pool_jobs
from tests.support.claims import RENEWS_OFTEN
from tests.support.hosts import AsyncIO
from tests.support.outages import Job
from tests.support.polling import eventually
from tests.support.schedulers import NO_DATABASE, Replica

MakeReplica = Callable[..., Replica]


class Service(ThreadingHTTPServer):
    """Takes pings; can answer with an error, or not at all.

    :ivar paths: that were asked for
    :ivar reason: the words of an answer's first line
    :ivar location: where an answer redirects to
    :ivar endless: whether an answer has no end
    """

    daemon_threads = True

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.status = 200
        self.reason: str | None = None
        self.location = ""
        self.endless = False
        self.answers = threading.Event()
        self.answers.set()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        assert self.server.answers.wait(60)
        self.send_response(self.server.status, self.server.reason)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        with suppress(OSError):  # until the other side has enough of it
            while self.server.endless:
                self.wfile.write(b"x" * 65536)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        yield service
        service.answers.set()
        service.shutdown()
        thread.join()


@pytest.fixture
def unhurried_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shutdown wait until each check-in is sent, however slowly a busy machine sends it."""
    monkeypatch.setattr(checkins, "CLOSING_TIMEOUT", 60.0)


@pytest.fixture
def attach() -> Iterator[Callable[..., CheckIns]]:
    """Attach check-ins to a replica; they are closed after the test."""
    with ExitStack() as closing_all:

        def make(replica: Replica, **options: Any) -> CheckIns:
            # A service on a slow machine may answer later than the default of 5 s.
            check_ins = CheckIns(**{"timeout": 600, **options}).attach(replica.scheduler)
            closing_all.callback(check_ins.close)
            return check_ins

        yield make


def fail() -> None:
    raise ValueError


def work(**_: Any) -> None: ...


async def coroutine() -> None: ...


@pytest.mark.parametrize(("function", "end"), [(print, "/ping/job"), (fail, "/ping/job/fail")])
def test_a_granted_run_is_told_when_it_begins_and_ends_and_a_refused_one_is_not(
    make_replica: MakeReplica,
    attach: Callable[..., CheckIns],
    service: Service,
    function: Callable[..., Any],
    end: str,
) -> None:
    one, other = make_replica(), make_replica()
    for replica in (one, other):
        attach(replica, ping={"job": f"{service.url}/ping/job"})
    one.run_once(function)
    one.run_once(print, job_id="another job")
    eventually(lambda: len(service.paths) == 2)
    other.run_once(function)
    other.one(EVENT_TASK_LOCK_REFUSED)
    for replica in (one, other):
        replica.shutdown()  # which sends what waits
    assert service.paths == ["/ping/job/start", end]


def test_a_template_pings_every_task_but_those_of_one_off_jobs(
    make_replica_in_memory: MakeReplica, attach: Callable[..., CheckIns], service: Service
) -> None:
    replica = make_replica_in_memory()
    attach(replica, ping=f"{service.url}/key/{{slug}}/{{task}}?create=1")
    replica.scheduler.add_job(print, id="once", misfire_grace_time=None)
    replica.one(EVENT_JOB_EXECUTED, "once")
    replica.run_once(print, job_id="Clean up")
    replica.one(EVENT_JOB_EXECUTED, "Clean up")
    eventually(lambda: len(service.paths) >= 2)
    replica.shutdown()
    path = "/key/clean-up/Clean%20up"
    assert service.paths == [f"{path}/start?create=1", f"{path}?create=1"]


def test_coroutines_and_worker_processes_check_in(
    make_replica_in_memory: MakeReplica,
    attach: Callable[..., CheckIns],
    service: Service,
) -> None:
    host = AsyncIO()
    loop = Replica(NO_DATABASE, host=host, **host.executor)
    loop.start()
    pool = make_replica_in_memory(executor="processpool", max_workers=1)
    for replica in (loop, pool):
        attach(replica, ping=f"{service.url}/{{task}}")
    loop.run_once(coroutine, job_id="coroutine")
    eventually(lambda: len(service.paths) == 2)
    pool.run_once(pool_jobs.fail, job_id="pooled")
    eventually(lambda: len(service.paths) == 4)
    loop.shutdown()
    host.close()
    assert service.paths == ["/coroutine/start", "/coroutine", "/pooled/start", "/pooled/fail"]


def test_a_run_that_loses_its_lock_has_failed_once(
    make_replica: MakeReplica,
    make_task_locks: Callable[..., TaskLocks],
    attach: Callable[..., CheckIns],
    service: Service,
    job: Job,
) -> None:
    replica = make_replica(jobs={"job": {"lease": 600}}, timings=RENEWS_OFTEN)
    attach(replica, ping={"job": f"{service.url}/job"})
    replica.run_once(job.run)
    assert job.begun.wait(60)
    token = replica.one(EVENT_TASK_LOCK_GRANTED).token
    make_task_locks().free("job", token, force=True)
    replica.one(EVENT_TASK_LOCK_LOST)
    eventually(lambda: len(service.paths) == 2)
    job.go_on.set()
    replica.one(EVENT_JOB_EXECUTED)
    replica.shutdown()
    assert service.paths == ["/job/start", "/job/fail"]


@pytest.mark.usefixtures("unhurried_close")
def test_a_failure_whose_release_finds_another_claim_is_left_to_that_claims_replica(
    make_replica: MakeReplica,
    attach: Callable[..., CheckIns],
    service: Service,
    connection: psycopg.Connection[Any],
) -> None:
    replica = make_replica(jobs={"job": {"lease": 600}})
    attach(replica, ping={"job": f"{service.url}/job"})

    def be_overtaken() -> None:
        connection.execute("UPDATE task_lock SET claim_id = gen_random_uuid(), token = token + 7")
        raise ValueError

    replica.run_once(be_overtaken)
    replica.one(EVENT_TASK_LOCK_LOST)
    replica.shutdown()
    assert service.paths == ["/job/start"]


@in_memory_locks()
def test_a_run_that_is_handed_over_has_no_end_here(
    attach: Callable[..., CheckIns], service: Service
) -> None:
    host = AsyncIO()
    replica = Replica(NO_DATABASE, host=host, **{**host.executor, "failover": True})
    replica.start()
    attach(replica, ping={"job": f"{service.url}/job"})
    begun = threading.Event()

    async def endless() -> None:
        begun.set()
        await wait_for_ever()

    replica.run_once(endless)
    assert begun.wait(60)
    eventually(lambda: service.paths)
    replica.shutdown()
    host.close()
    assert service.paths == ["/job/start"]


async def wait_for_ever() -> None:
    import asyncio

    await asyncio.Event().wait()


def test_a_service_that_hangs_delays_neither_jobs_nor_the_shutdown_for_long(
    make_replica_in_memory: MakeReplica,
    attach: Callable[..., CheckIns],
    service: Service,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would take minutes to send what waits."""
    service.answers.clear()
    replica = make_replica_in_memory()
    attach(replica, ping=f"{service.url}/{{task}}")
    for number in range(10):
        replica.run_once(print, job_id=f"job-{number}")
    for number in range(10):
        replica.one(EVENT_JOB_EXECUTED, f"job-{number}")
    eventually(lambda: service.paths)  # the first one was sent, and hangs
    replica.shutdown()
    assert len(service.paths) == 1
    assert [r.levelname for r in told(caplog)] == ["WARNING"]
    assert "not sent" in caplog.text
    service.answers.set()  # so that its thread ends, and sends nothing more
    eventually(lambda: not sending())
    assert len(service.paths) == 1


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_too_many_check_ins_are_dropped_with_one_warning(
    make_replica_in_memory: MakeReplica,
    attach: Callable[..., CheckIns],
    service: Service,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.answers.clear()
    replica = make_replica_in_memory()
    attach(replica, ping=f"{service.url}/{{task}}", timeout=60)
    now = datetime.now(timezone.utc)
    trigger = IntervalTrigger(seconds=1, start_date=now - timedelta(seconds=LONGEST_QUEUE))
    replica.run_once(print, job_id="first")
    eventually(lambda: service.paths)
    job = replica.scheduler.add_job(
        work, trigger, id="many", kwargs={"task_lock": {"min_lock": 0}}, misfire_grace_time=None
    )
    run_times = [now - timedelta(seconds=s) for s in range(LONGEST_QUEUE, 0, -1)]
    replica.executor.submit_job(job, run_times)
    eventually(lambda: "are dropped" in caplog.text)
    eventually(
        lambda: len([e for e in replica.of("many") if e.code == EVENT_JOB_EXECUTED]) > 900, 240
    )
    replica.scheduler.remove_job("many")
    replica.shutdown()
    assert [r.levelname for r in told(caplog) if "are dropped" in r.message] == ["WARNING"]


def sending() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tasklock-check-ins"]


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [r for r in caplog.records if r.name == "apscheduler_tasklock.checkins"]


@pytest.mark.usefixtures("unhurried_close")
def test_a_ping_that_is_answered_with_an_error_is_sent_once_more_and_told_once(
    make_replica_in_memory: MakeReplica,
    attach: Callable[..., CheckIns],
    service: Service,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.status = 500
    replica = make_replica_in_memory()
    attach(replica, ping={"job": f"{service.url}/secret"})
    replica.run_once(print)
    replica.one(EVENT_JOB_EXECUTED)
    replica.shutdown()
    assert service.paths == ["/secret/start"] * 2 + ["/secret"] * 2
    assert [r.levelname for r in told(caplog) if r.levelno > logging.DEBUG] == ["WARNING"]
    assert "500" in caplog.text
    assert "secret" not in "".join(r.getMessage() for r in told(caplog))


@pytest.mark.usefixtures("unhurried_close")
@pytest.mark.parametrize("to", ["{service}/elsewhere", "file:///etc/secret", "ftp://secret/"])
def test_a_redirect_is_not_followed(
    make_replica_in_memory: MakeReplica,
    attach: Callable[..., CheckIns],
    service: Service,
    caplog: pytest.LogCaptureFixture,
    to: str,
) -> None:
    """It could lead into a network that only the replica reaches; and its text has no limit."""
    service.status, service.location = 302, to.format(service=service.url)
    service.endless = True
    replica = make_replica_in_memory()
    attach(replica, ping={"job": f"{service.url}/secret"})
    replica.run_once(print)
    replica.one(EVENT_JOB_EXECUTED)
    replica.shutdown()
    assert service.paths == ["/secret/start"] * 2 + ["/secret"] * 2
    [line] = [r.getMessage() for r in told(caplog) if r.levelno > logging.DEBUG]
    assert line == (
        "A check-in of 'job' failed: HTTP 302, a redirect, which is not followed: give `ping` the "
        "URL that it leads to"
    )


def test_an_answer_without_an_end_is_not_read(
    make_replica_in_memory: MakeReplica, attach: Callable[..., CheckIns], service: Service
) -> None:
    service.endless = True
    replica = make_replica_in_memory()
    attach(replica, ping={"job": f"{service.url}/ping"})
    replica.run_once(print)
    replica.one(EVENT_JOB_EXECUTED)
    eventually(lambda: service.paths == ["/ping/start", "/ping"])


@pytest.mark.usefixtures("unhurried_close")
def test_of_an_answer_with_an_error_its_number_is_told_alone(
    make_replica_in_memory: MakeReplica,
    attach: Callable[..., CheckIns],
    service: Service,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.status, service.reason = 403, "\x1b[2J no such key: secret" + "x" * 60000
    replica = make_replica_in_memory()
    attach(replica, ping={"job": f"{service.url}/secret"})
    replica.run_once(print)
    replica.one(EVENT_JOB_EXECUTED)
    replica.shutdown()
    for record in told(caplog):
        assert record.getMessage() == "A check-in of 'job' failed: HTTP 403"


@pytest.mark.usefixtures("unhurried_close")
def test_a_service_that_refuses_connections_fails_no_job(
    make_replica_in_memory: MakeReplica,
    attach: Callable[..., CheckIns],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        replica = make_replica_in_memory()
        attach(replica, ping={"job": f"http://127.0.0.1:{taken.getsockname()[1]}/"})
        replica.run_once(print)
        replica.one(EVENT_JOB_EXECUTED)
        replica.shutdown()
    assert "A check-in of 'job' failed" in caplog.text


@pytest.mark.usefixtures("unhurried_close")
def test_the_end_of_a_run_that_a_shutdown_did_not_wait_for_is_told(
    make_replica_in_memory: MakeReplica, attach: Callable[..., CheckIns], service: Service, job: Job
) -> None:
    replica = make_replica_in_memory()
    attach(replica, ping={"job": f"{service.url}/job"})
    replica.run_once(job.run)
    assert job.begun.wait(60)
    replica.finish_pass()
    replica.scheduler.shutdown(wait=False)
    job.go_on.set()
    eventually(lambda: service.paths == ["/job/start", "/job"])
    eventually(lambda: not sending())


class Collected(Transport):
    """Sentry's transport that keeps what it gets."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        super().__init__(options)
        self.check_ins: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            if item.type == "check_in":
                self.check_ins.append(json.loads(item.get_bytes()))


@pytest.fixture
def sentry() -> Iterator[Collected]:
    collected = Collected()
    sentry_sdk.init(
        "https://key@sentry.invalid/1",
        transport=collected,
        default_integrations=False,
        auto_enabling_integrations=False,
    )
    yield collected
    sentry_sdk.get_client().close(timeout=0)
    sentry_sdk.Scope.get_global_scope().set_client(None)


def test_sentry_gets_the_status_and_the_schedule_of_each_granted_run(
    make_replica_in_memory: MakeReplica, attach: Callable[..., CheckIns], sentry: Collected
) -> None:
    replica = make_replica_in_memory()
    attach(replica, sentry=True, sentry_config={"max_runtime": 120})
    replica.run_once(print, job_id="Clean up")
    replica.run_once(fail, job_id="failing")
    replica.one(EVENT_JOB_EXECUTED, "Clean up")
    replica.one(EVENT_JOB_ERROR, "failing")
    # A shutdown empties the job store, and a trigger that was not read before has no monitor.
    eventually(lambda: len(sentry.check_ins) >= 4)
    replica.shutdown()
    config = {"schedule": {"type": "interval", "value": 1, "unit": "hour"}, "max_runtime": 120}
    found: dict[str, list[str]] = {}
    for check_in in sentry.check_ins:
        assert check_in["monitor_config"] == config
        found.setdefault(check_in["monitor_slug"], []).append(check_in["status"])
    assert found == {"clean-up": ["in_progress", "ok"], "failing": ["in_progress", "error"]}
    ids = {(c["monitor_slug"], c["check_in_id"]) for c in sentry.check_ins}
    assert len(ids) == 2  # a run's check-ins have one id


@pytest.mark.nightly
def test_a_window_that_is_run_again_continues_its_check_in(
    make_replica: MakeReplica,
    make_task_locks: Callable[..., TaskLocks],
    attach: Callable[..., CheckIns],
    sentry: Collected,
    job: Job,
) -> None:
    """A run time has one id on all replicas, so that the run of a dead one does not stay open."""
    replicas = [make_replica(jobs={"job": {"lease": 1}}) for _ in range(2)]
    for replica, function in zip(replicas, (job.run, print), strict=True):
        attach(replica, sentry=["job"])
        at = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
        replica.scheduler.add_job(
            function,
            CronTrigger(hour=0, timezone=timezone.utc),
            id="job",
            next_run_time=at,
            misfire_grace_time=None,
        )
        if function == job.run:
            assert job.begun.wait(60)
            token = replica.one(EVENT_TASK_LOCK_GRANTED).token
            make_task_locks().free("job", token, force=True, run_again=True)
        else:
            replica.one(EVENT_JOB_EXECUTED)
    job.go_on.set()
    eventually(lambda: len(sentry.check_ins) >= 4)
    for replica in replicas:
        replica.shutdown()
    assert len(sentry.check_ins) == 4
    assert len({c["check_in_id"] for c in sentry.check_ins}) == 1


def test_sentry_is_told_of_the_tasks_that_are_named_alone(
    make_replica_in_memory: MakeReplica, attach: Callable[..., CheckIns], sentry: Collected
) -> None:
    replica = make_replica_in_memory()
    attach(replica, sentry={"one"})
    for job_id in ("other", "one"):
        replica.run_once(print, job_id=job_id)
        replica.one(EVENT_JOB_EXECUTED, job_id)
    eventually(lambda: len(sentry.check_ins) >= 2)
    replica.shutdown()
    assert {c["monitor_slug"] for c in sentry.check_ins} == {"one"}


UTC = timezone.utc
CONFIGS = [
    (CronTrigger.from_crontab("*/5 6-18 * * *", UTC), "*/5 6-18 * * *"),
    (CronTrigger(hour=3, timezone=UTC), "0 3 * * *"),
    (CronTrigger.from_crontab("0 4 * * mon-fri", UTC), "0 4 * * 1,2,3,4,5"),
    (CronTrigger(day_of_week="sun", timezone=UTC), "0 0 * * 0"),
    (CronTrigger(day_of_week=6, timezone=UTC), "0 0 * * 0"),
    (CronTrigger(day="last", timezone=UTC), None),
    (CronTrigger(day=1, day_of_week="mon", timezone=UTC), None),
    (CronTrigger(second="*/10", timezone=UTC), None),
    (CronTrigger(hour=3, timezone=timezone(timedelta(hours=2))), None),
    (IntervalTrigger(minutes=90), (90, "minute")),
    (IntervalTrigger(hours=48), (2, "day")),
    (IntervalTrigger(seconds=90), None),
    (DateTrigger(), None),
]


@pytest.mark.parametrize(("trigger", "expected"), CONFIGS)
def test_a_monitor_has_the_triggers_schedule_if_sentry_can_express_it(
    trigger: Any, expected: Any
) -> None:
    config = monitor_config(trigger)
    if expected is None:
        assert config is None
    elif isinstance(expected, str):
        schedule = {"type": "crontab", "value": expected}
        assert config == {"schedule": schedule, "timezone": "UTC"}
    else:
        value, unit = expected
        assert config == {"schedule": {"type": "interval", "value": value, "unit": unit}}


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Clean up", "clean-up"),
        ("a_b-c", "a_b-c"),
        ("x" * 50, "x" * 50),
        ("x" * 51, "x" * 41 + "-6a2d4b1c"),
        ("Ünï", "n"),
    ],
)
def test_a_slug_has_the_characters_that_services_take(name: str, slug: str) -> None:
    found = slug_of(name)
    if len(name) > 50:  # shortened, with a hash, so that no two tasks share a monitor
        assert found[:42] == slug[:42]
        assert found != slug_of(name + "y")
        assert len(found) == 50
    else:
        assert found == slug


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ping": "file:///etc/passwd"},
        {"ping": {"job": "ftp://host/"}},
        {"ping": "https:///secret"},
        {"ping": "https://me:secret@host/"},
        {"ping": "https://host:secret/"},
        {"ping": "https://host/se cret"},
        {"ping": "https://host/secret\r\nHost: other"},
        {"sentry": "job"},
    ],
)
def test_what_cannot_be_told_is_an_error_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(TaskLockOptionError) as raised:
        CheckIns(**options)
    assert "cret" not in str(raised.value)


def test_one_scheduler_is_listened_to() -> None:
    from apscheduler.schedulers.background import BackgroundScheduler

    check_ins = CheckIns(ping={"job": "http://localhost/"}).attach(BackgroundScheduler())
    with pytest.raises(TaskLockOptionError):
        check_ins.attach(BackgroundScheduler())


WITHOUT = """
import sys
sys.modules["sentry_sdk"] = None  # as where it is not installed
from apscheduler_tasklock import TaskLockOptionError
from apscheduler_tasklock.checkins import CheckIns
CheckIns(ping={"job": "http://localhost/"})
try:
    CheckIns(sentry=True)
except TaskLockOptionError as error:
    print(error)
"""


def test_without_sentrys_sdk_the_extra_is_named() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True
    )
    assert "pip install sentry-sdk" in ran.stdout


WITH_ALL_OF_SENTRY = """
import logging, sys, threading
from datetime import datetime, timezone
import sentry_sdk
from apscheduler.schedulers.background import BackgroundScheduler
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport
from apscheduler_tasklock import TaskLockExecutor
from apscheduler_tasklock.checkins import CheckIns
from apscheduler_tasklock.testing import in_memory_locks

told = []
has_pinged, is_told = threading.Event(), threading.Event()

class Collected(Transport):
    def capture_envelope(self, envelope):
        told.append(envelope.serialize())
        if b"an application's own" in told[-1]:
            is_told.set()

class Pinged(logging.Handler):
    def emit(self, record):
        has_pinged.set()

def fail():
    assert has_pinged.wait(60)
    raise ValueError("an application's own")

database, service = sys.argv[1:]
in_memory = in_memory_locks()
in_memory.__enter__()
sentry_sdk.init(
    "https://key@sentry.invalid/1",
    transport=Collected(),
    traces_sample_rate=1.0,
    integrations=[LoggingIntegration(event_level=logging.WARNING)],
)
logging.getLogger("apscheduler_tasklock.checkins").addHandler(Pinged())
scheduler = BackgroundScheduler(timezone="UTC")
scheduler.add_executor(TaskLockExecutor(database))
CheckIns(ping=f"{service}/0ur-key/{{slug}}", sentry=True).attach(scheduler)
now = datetime.now(timezone.utc)
scheduler.add_job(fail, "interval", hours=1, id="job", next_run_time=now, misfire_grace_time=60)
scheduler.start()
assert is_told.wait(60)
scheduler.shutdown()
sentry_sdk.flush(2)
text = b"".join(told)
assert b"A check-in of" in text, text
assert b"0ur-key" not in text, text
"""


def test_sentry_is_told_no_url_of_a_ping(service: Service) -> None:
    """Its SDK notes each request over HTTP, and sends what it has noted with an error."""
    service.status = 500
    subprocess.run(
        [sys.executable, "-c", WITH_ALL_OF_SENTRY, NO_DATABASE, service.url],
        check=True,
        timeout=100,
    )
    assert "/0ur-key/job/start" in service.paths
