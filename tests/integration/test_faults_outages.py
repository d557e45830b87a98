"""Outages while a job runs under a lease: what it survives, and who runs the window in the end.

An outage is as long as it takes to outlive what has a time limit: the lease, and `claim_timeout`.
One of half a minute would show no more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLocks,
)
from apscheduler_tasklock._database import outage
from apscheduler_tasklock._lock import heartbeat as leases
from tests.support.claims import die, held, row
from tests.support.polling import eventually
from tests.support.proxy import Proxy, pass_on, proxy_to
from tests.support.schedulers import Replica

pytestmark = pytest.mark.direct("the pooler would answer in the server's place")

MakeReplica = Callable[..., Replica]
MakeLocks = Callable[..., TaskLocks]
Connection = psycopg.Connection[Any]

AWAY, BACK = "The task lock database is away", "The task lock database is back"


# What a job of an hour's interval claims.
HOURLY = {"min_lock": 3240, "max_lock": 18000}
# What `Job.run` is to a claim that another replica may take over.
RUNS = f"{__name__}:Job.run"


class Job:
    """Runs until it is let go, and counts how often."""

    def __init__(self) -> None:
        self.runs = 0
        self.begun, self.go_on = threading.Event(), threading.Event()

    def run(self) -> None:
        self.runs += 1
        self.begun.set()
        assert self.go_on.wait(60)


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.go_on.set()


def refuse(proxy: Proxy) -> None:
    """As a server that is down."""
    proxy.accepting = False
    proxy.cut_all()


def swallow(proxy: Proxy) -> None:
    """As a network that loses all packets."""
    proxy.to_client = proxy.to_server = lambda _data: b""


def restore(proxy: Proxy) -> None:
    proxy.to_client = proxy.to_server = pass_on
    proxy.accepting = True


def away(replica: Replica) -> bool:
    return replica.executor.locks._attempts.outage.reason is not None


def count_looks(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that grows with each look of a replica for dead runs that is answered."""
    looks: list[list[str]] = []
    read = replica.executor.locks.read_runs

    def count(names: list[str], always: Any = ()) -> Any:
        found = read(names, always)
        looks.append(names)
        return found

    monkeypatch.setattr(replica.executor.locks, "read_runs", count)
    return looks


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was told of the database."""
    told = [record.getMessage().split(" (")[0] for record in caplog.records]
    return [message for message in told if message in (AWAY, BACK)]


def said_by_its_end(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the same when the outage's end is told, which may be after what it made possible."""
    eventually(lambda: BACK in said(caplog))
    return said(caplog)


def refused(make_replica: MakeReplica, job: Job, *urls: str, lease: float) -> list[Replica]:
    """Return a replica that runs the job, and one that was refused, and would take it over."""
    replicas = []
    for url, name in zip(urls, ("holder", "other"), strict=True):
        replica = make_replica(url, replica_id=name, claim_timeout=3, lease=lease, failover=True)
        replica.run_once(job.run)
        assert job.begun.wait(60)
        replicas.append(replica)
    replicas[1].one(EVENT_TASK_LOCK_REFUSED)
    return replicas


@pytest.mark.parametrize("fail", [refuse, pytest.param(swallow, marks=pytest.mark.faults)])
def test_a_lease_survives_an_outage_that_is_shorter(
    proxy: Proxy,
    make_replica: MakeReplica,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    job: Job,
    fail: Callable[[Proxy], None],
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(leases, "RENEWALS_PER_LEASE", 20)
    holder = make_replica(proxy.url, claim_timeout=3, lease=10)
    holder.run_once(job.run)
    assert job.begun.wait(60)
    fail(proxy)
    eventually(lambda: away(holder))
    before = row(connection)["locked_until"]
    restore(proxy)
    eventually(lambda: row(connection)["locked_until"] > before)
    job.go_on.set()
    holder.one(EVENT_JOB_EXECUTED)
    assert holder.codes() == [EVENT_TASK_LOCK_GRANTED, EVENT_TASK_LOCK_RELEASED, EVENT_JOB_EXECUTED]
    assert row(connection)["finished_at"] is not None
    assert said_by_its_end(caplog) == [AWAY, BACK]


@pytest.mark.parametrize("fail", [refuse, pytest.param(swallow, marks=pytest.mark.faults)])
@pytest.mark.parametrize("joins", [False, True], ids=["it was there", "it starts afterwards"])
def test_a_job_that_ended_in_an_outage_longer_than_its_lease_is_not_run_again(
    proxy: Proxy,
    direct_url: str,
    make_replica: MakeReplica,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    job: Job,
    fail: Callable[[Proxy], None],
    joins: bool,
) -> None:
    """The other replica has the database back a while before the holder does."""
    monkeypatch.setattr(outage, "RECOVERY_GRACE", 60.0)
    with proxy_to(direct_url) as others:
        holder, other = refused(make_replica, job, proxy.url, others.url, lease=2)
        token = row(connection)["token"]
        for each in (proxy, others):
            fail(each)
        eventually(lambda: row(connection)["over"])
        job.go_on.set()
        holder.one(EVENT_JOB_EXECUTED)
        eventually(lambda: away(other))
        restore(others)
        if joins:
            other.shutdown()
            other = make_replica(others.url, replica_id="restarted", lease=2, failover=True)
            other.run_once(job.run)
            other.one(EVENT_TASK_LOCK_REFUSED)
        else:
            eventually(lambda: not away(other))
        looks = count_looks(other, monkeypatch)
        eventually(lambda: len(looks) > 2)
        restore(proxy)
        eventually(lambda: row(connection)["finished_at"])
        eventually(lambda: len(looks) > 4)
        other.idle()
        assert other.codes() == [EVENT_TASK_LOCK_REFUSED]
        assert EVENT_TASK_LOCK_LOST not in holder.codes()
        assert (job.runs, row(connection)["token"]) == (1, token)
        other.shutdown()
        holder.shutdown()


def test_a_job_that_goes_on_through_an_outage_longer_than_its_lease_does_not_overlap(
    proxy: Proxy,
    make_replica: MakeReplica,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    job: Job,
) -> None:
    """Not even with its next run time, on a replica that was started right after the outage."""
    monkeypatch.setattr(outage, "RECOVERY_GRACE", 60.0)
    options: dict[str, Any] = {"lease": 2, "claim_timeout": 3, "min_factor": 0}
    holder = make_replica(proxy.url, replica_id="holder", **options)
    holder.run_once(job.run)
    assert job.begun.wait(60)
    token = row(connection)["token"]
    refuse(proxy)
    eventually(lambda: row(connection)["over"])
    restarted = make_replica(replica_id="restarted", **options)
    restarted.run_once(job.run)
    blocked = restarted.one(EVENT_TASK_LOCK_REFUSED)
    assert (blocked.reason, blocked.holder) == ("running", "holder")
    looks = count_looks(restarted, monkeypatch)
    eventually(lambda: len(looks) > 2)
    restore(proxy)
    eventually(lambda: not row(connection)["over"])
    job.go_on.set()
    holder.one(EVENT_JOB_EXECUTED)
    eventually(lambda: not restarted.executor._failover._blocked)
    restarted.idle()
    assert restarted.codes() == [EVENT_TASK_LOCK_REFUSED]
    assert EVENT_TASK_LOCK_LOST not in holder.codes()
    assert (job.runs, row(connection)["token"]) == (1, token)


@pytest.mark.faults
def test_a_release_that_was_swallowed_at_the_end_of_an_outage_is_waited_for(
    proxy: Proxy, direct_url: str, make_replica: MakeReplica, connection: Connection, job: Job
) -> None:
    """The holder waits for an answer that got lost, while the other one is back already."""
    options: dict[str, Any] = {"claim_timeout": 12, "lease": 2, "failover": True}
    with proxy_to(direct_url) as others:
        holder = make_replica(proxy.url, replica_id="holder", **options)
        other = make_replica(others.url, replica_id="other", **options)
        for replica in (holder, other):
            replica.run_once(job.run)
            assert job.begun.wait(60)
        other.one(EVENT_TASK_LOCK_REFUSED)
        token = row(connection)["token"]
        refuse(proxy)
        refuse(others)
        eventually(lambda: row(connection)["over"])
        job.go_on.set()
        holder.one(EVENT_JOB_EXECUTED)
        eventually(lambda: away(other))
        swallowed = threading.Event()
        proxy.to_server = lambda _data: b"" if swallowed.set() is None else None
        proxy.accepting = True
        assert swallowed.wait(60)
        restore(others)
        restore(proxy)
        eventually(lambda: row(connection)["finished_at"])
        eventually(lambda: other.executor.locks.stable)
        other.idle()
        assert (job.runs, row(connection)["token"]) == (1, token)
        other.shutdown()
        holder.shutdown()


def test_a_holder_that_died_in_an_outage_is_taken_over(
    proxy: Proxy,
    make_replica: MakeReplica,
    make_locks: MakeLocks,
    connection: Connection,
    caplog: pytest.LogCaptureFixture,
    job: Job,
) -> None:
    caplog.set_level(logging.INFO)
    job.go_on.set()
    dying = make_locks(replica_id="dying")
    lock = held(dying, "job", **HOURLY, lease=2, failover=True, runs=RUNS)
    replica = make_replica(proxy.url, claim_timeout=3, lease=2, failover=True)
    replica.run_once(job.run)
    replica.one(EVENT_TASK_LOCK_REFUSED)
    refuse(proxy)
    die(dying, lock)
    eventually(lambda: away(replica) and row(connection)["over"])
    restore(proxy)
    replica.one(EVENT_JOB_EXECUTED)
    replica.idle()
    assert (job.runs, row(connection)["token"]) == (1, lock.token + 1)
    assert row(connection)["finished_at"] is not None
    assert said_by_its_end(caplog) == [AWAY, BACK]
