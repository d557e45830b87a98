"""Connections that break under a statement: each of them, at each point of its way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    current_lock,
)
from apscheduler_tasklock._database.timings import Timings
from tests.support.claims import LaterThan, die, held, row
from tests.support.faults import (
    CLAIM,
    FIRST_CLAIM,
    READ,
    RELEASE,
    RENEWAL,
    RERUN,
    Fault,
    Kind,
    Point,
)
from tests.support.outages import BACK, UNAVAILABLE
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.schedulers import Replica
from tests.support.waist import LockClient

pytestmark = pytest.mark.direct("it terminates the backends behind the proxy")

MakeReplica = Callable[..., Replica]
MakeLocks = Callable[..., LockClient]
Hit = tuple[Point, Kind]
MakeFault = Callable[..., Fault]
Connection = psycopg.Connection[Any]

CLAIM_TIMEOUT = 60
# What a swallowed statement costs, and longer than a slow machine stops.
SENT_AGAIN = Timings(longest_answer=4.0)
# Above all that a test may take: a lease that stands through the fault.
LONG_LEASE = 60

KINDS: list[Kind] = ["cut", "swallowed", "terminated"]


@pytest.fixture(
    params=[
        *(pytest.param(("after", kind), id=f"{kind} after") for kind in KINDS),
        # Most can go wrong when the server has carried the statement out. `make test-nightly` runs
        # the others.
        *(
            pytest.param((point, kind), id=f"{kind} {point}", marks=pytest.mark.nightly)
            for point in ("before", "halfway")
            for kind in KINDS
        ),
    ]
)
def hit(request: pytest.FixtureRequest) -> Hit:
    """At which point of its way a statement is hit, and how."""
    found: Hit = request.param
    return found


@pytest.fixture(params=[CLAIM, FIRST_CLAIM], ids=["known task", "new task"])
def granting(request: pytest.FixtureRequest, known_task: Callable[[str], None]) -> bytes:
    """The statement that grants a claim: one for a task that has run, another for its first run."""
    if request.param == CLAIM:
        known_task("job")
    statement: bytes = request.param
    return statement


@pytest.fixture
def make_hit_replica(proxy: Proxy, make_replica: MakeReplica) -> MakeReplica:
    """Make a replica behind the proxy. With failover, its claims are renewed all the time."""
    return partial(
        make_replica,
        proxy.url,
        replica_id="hit",
        claim_timeout=CLAIM_TIMEOUT,
        lease=LONG_LEASE,
        failover=True,
        timings=SENT_AGAIN,
    )


@pytest.fixture
def replica(make_hit_replica: MakeReplica) -> Replica:
    return make_hit_replica()


@pytest.fixture
def make_fault(proxy: Proxy, connection: Connection) -> MakeFault:
    def terminate() -> None:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE application_name = 'tasklock hit'"
        )

    def make(statement: bytes, hit: Hit, **options: Any) -> Fault:
        return Fault(proxy, statement, *hit, terminate, **options)

    return make


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Whatever breaks, it is one outage, and nothing worse is logged than that."""
    caplog.set_level(logging.INFO, "apscheduler_tasklock")
    yield caplog
    assert outages(caplog) in ([], [UNAVAILABLE, BACK])


def outages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return all warnings and errors, and that outages were over, without their details."""
    return [
        record.getMessage().split(" (")[0]
        for record in caplog.get_records("call")
        if record.levelno >= logging.WARNING or "is back" in record.getMessage()
    ]


def still_works(replica: Replica, connection: Connection, token: int) -> None:
    """Check that nothing is stranded, and that the scheduler goes on."""
    eventually(lambda: row(connection)["finished_at"])
    assert row(connection)["token"] == token
    replica.run_once(lambda: None, job_id="next")
    replica.one(EVENT_JOB_EXECUTED, "next")
    eventually(lambda: row(connection, "next")["finished_at"])
    replica.idle()


class Job:
    """Notes the tokens that it ran under, and whether as a takeover."""

    def __init__(self, until: Callable[[], Any] = bool) -> None:
        self.ran: list[tuple[int, bool]] = []
        self._until = until

    def run(self) -> None:
        lock = current_lock()
        assert lock is not None
        self.ran.append((lock.token, lock.is_takeover))
        if self._until is not bool:
            eventually(self._until)


def fire(replica: Replica, granting: bytes, function: Callable[..., Any], **job: Any) -> None:
    """Add a job that fires now, whose claim is this statement.

    A replica tells of jobs that come again, which makes the row before the claim if it is slow. So
    the job of a new task is a one-off job.
    """
    if granting == FIRST_CLAIM:
        replica.scheduler.add_job(function, "date", id="job", misfire_grace_time=None, **job)
    else:
        replica.run_once(function, **job)


class TestEachStatement:
    # A window without a minimum lock is over when its claim is asked for again.
    @pytest.mark.parametrize("options", [{}, {"min_lock": 0}], ids=["", "no minimum lock"])
    def test_a_claim_that_is_granted(
        self,
        replica: Replica,
        make_fault: MakeFault,
        connection: Connection,
        hit: Hit,
        granting: bytes,
        options: dict[str, Any],
    ) -> None:
        fault = make_fault(granting, hit)
        job = Job()
        kwargs = {"task_lock": options}
        fire(replica, granting, lambda task_lock=None: job.run(), kwargs=kwargs)
        replica.one(EVENT_JOB_EXECUTED)
        assert fault.met.wait(60)  # the worker does not wait for it
        [(token, is_takeover)] = job.ran
        still_works(replica, connection, token)
        assert not is_takeover

    def test_a_claim_that_is_refused(
        self,
        proxy: Proxy,
        make_replica: MakeReplica,
        make_locks: MakeLocks,
        make_fault: MakeFault,
        connection: Connection,
        hit: Hit,
    ) -> None:
        given = {"claim_timeout": CLAIM_TIMEOUT, "timings": SENT_AGAIN}
        replica = make_replica(proxy.url, replica_id="hit", **given)
        other = make_locks(replica_id="other")
        lock = held(other, "job", min_lock=3240, max_lock=18000)
        fault = make_fault(CLAIM, hit)
        job = Job()
        replica.run_once(job.run)
        refused = replica.one(EVENT_TASK_LOCK_REFUSED)
        assert fault.met.is_set()
        assert (refused.holder, refused.reason) == ("other", "running")
        assert row(connection)["finished_at"] is None
        other.release(lock)
        still_works(replica, connection, lock.token)
        assert job.ran == []

    def test_a_release(
        self, replica: Replica, make_fault: MakeFault, connection: Connection, hit: Hit
    ) -> None:
        fault = make_fault(RELEASE, hit)
        job = Job()
        replica.run_once(job.run)
        replica.one(EVENT_JOB_EXECUTED)
        assert fault.met.wait(60)  # the worker does not wait for it
        [(token, is_takeover)] = job.ran
        still_works(replica, connection, token)
        assert not is_takeover

    def test_a_renewal(
        self,
        make_hit_replica: MakeReplica,
        make_fault: MakeFault,
        connection: Connection,
        hit: Hit,
    ) -> None:
        # Soon, and then not again before the job has ended of its own.
        replica = make_hit_replica(timings=replace(SENT_AGAIN, renewals_per_lease=4 * LONG_LEASE))
        fault = make_fault(RENEWAL, hit)
        renewed: list[Any] = []

        def renewed_after_the_fault() -> bool:
            until = row(connection)["locked_until"]
            if fault.met.is_set() and until not in renewed:
                renewed.append(until)
            return len(renewed) > 2

        job = Job(renewed_after_the_fault)
        replica.run_once(job.run)
        replica.one(EVENT_JOB_EXECUTED)
        [(token, is_takeover)] = job.ran
        still_works(replica, connection, token)
        assert not is_takeover

    @pytest.mark.nightly
    @pytest.mark.parametrize("statement", [RELEASE, READ, RERUN], ids=["release", "read", "retry"])
    def test_a_retry(
        self,
        make_hit_replica: MakeReplica,
        make_fault: MakeFault,
        connection: Connection,
        hit: Hit,
        log: pytest.LogCaptureFixture,
        statement: bytes,
    ) -> None:
        """What notes a retry, what finds it, and what claims it: each attempt begins once."""
        log.set_level(logging.CRITICAL, "apscheduler.executors.default")  # the job's own error
        attempts: list[int] = []

        def job() -> None:
            lock = current_lock()
            assert lock is not None
            attempts.append(lock.attempt)
            if lock.attempt == 1:
                raise ValueError

        grace = replace(SENT_AGAIN, recovery_grace=0.2)
        replica = make_hit_replica(retries=3, retry_delay=0, poll_interval=0.5, timings=grace)
        fault = make_fault(statement, hit)
        replica.run_once(job)
        replica.one(EVENT_JOB_EXECUTED)
        assert fault.met.is_set()
        eventually(lambda: row(connection)["finished_at"])
        assert (attempts, row(connection)["attempt"]) == ([1, 2], 2)

    @pytest.mark.nightly
    @pytest.mark.parametrize("statement", [READ, RERUN], ids=["read", "takeover"])
    def test_a_takeover(
        self,
        make_hit_replica: MakeReplica,
        make_locks: MakeLocks,
        make_fault: MakeFault,
        connection: Connection,
        hit: Hit,
        statement: bytes,
    ) -> None:
        """What reads whether a run is dead, and what takes it over then."""
        replica = make_hit_replica(timings=replace(SENT_AGAIN, recovery_grace=0.2))
        dead = make_locks(replica_id="dead")
        runs = f"{__name__}:Job.run"
        times = {"min_lock": 3240, "max_lock": 18000, "lease": 1}
        lock = held(dead, "job", failover=True, runs=runs, **times)
        die(dead, lock)
        fault = make_fault(statement, hit)
        job = Job()
        replica.run_once(job.run)
        replica.one(EVENT_JOB_EXECUTED)
        assert fault.met.is_set()
        assert job.ran == [(LaterThan(lock.token), True)]
        still_works(replica, connection, job.ran[0][0])
        assert replica.one(EVENT_TASK_LOCK_GRANTED).reason == "takeover"
