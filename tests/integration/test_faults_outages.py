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
    HeldLock,
    TaskLocks,
    leases,
)
from tests.polling import eventually
from tests.proxy import Proxy, pass_on, proxy_to
from tests.schedulers import Replica

pytestmark = pytest.mark.direct("the pooler would answer in the server's place")

MakeReplica = Callable[..., Replica]
MakeLocks = Callable[..., TaskLocks]
Connection = psycopg.Connection[Any]

AWAY, BACK = "The task lock database is away", "The task lock database is back"


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


def row(connection: Connection) -> dict[str, Any]:
    cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
    found = cursor.execute("SELECT *, now() > locked_until AS over FROM task_lock").fetchone()
    assert found is not None
    return found


def away(replica: Replica) -> bool:
    return replica.executor.locks._attempts._outage.reason is not None


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was told of the database."""
    told = [record.getMessage().split(" (")[0] for record in caplog.records]
    return [message for message in told if message in (AWAY, BACK)]


def watched(make_replica: MakeReplica, job: Job, *urls: str, failover: float) -> list[Replica]:
    """Return a replica that runs the job, and one that was refused and watches it."""
    replicas = []
    for url, name in zip(urls, ("holder", "other"), strict=True):
        replica = make_replica(url, replica_id=name, claim_timeout=3, failover=failover)
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
    holder = make_replica(proxy.url, claim_timeout=3, failover=10)
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
    assert said(caplog) == [AWAY, BACK]


@pytest.mark.parametrize("fail", [refuse, pytest.param(swallow, marks=pytest.mark.faults)])
def test_a_job_that_ended_in_an_outage_longer_than_its_lease_is_not_run_again(
    proxy: Proxy,
    make_replica: MakeReplica,
    connection: Connection,
    job: Job,
    fail: Callable[[Proxy], None],
) -> None:
    holder, other = watched(make_replica, job, proxy.url, proxy.url, failover=2)
    fail(proxy)
    holder.one(EVENT_TASK_LOCK_LOST)
    eventually(lambda: row(connection)["over"])
    job.go_on.set()
    holder.one(EVENT_JOB_EXECUTED)
    eventually(lambda: away(other))
    restore(proxy)
    eventually(lambda: row(connection)["finished_at"])
    eventually(lambda: other.executor._watcher._thread is None)
    assert other.codes() == [EVENT_TASK_LOCK_REFUSED]
    assert holder.codes().count(EVENT_TASK_LOCK_LOST) == 1
    assert (job.runs, row(connection)["token"]) == (1, 1)


@pytest.mark.faults
def test_a_release_that_was_swallowed_at_the_end_of_an_outage_is_waited_for(
    proxy: Proxy, direct_url: str, make_replica: MakeReplica, connection: Connection, job: Job
) -> None:
    """The holder waits for an answer that got lost, while the other one is back already."""
    with proxy_to(direct_url) as others:
        holder = make_replica(proxy.url, replica_id="holder", claim_timeout=12, failover=2)
        other = make_replica(others.url, replica_id="other", claim_timeout=12, failover=2)
        for replica in (holder, other):
            replica.run_once(job.run)
            assert job.begun.wait(60)
        other.one(EVENT_TASK_LOCK_REFUSED)
        refuse(proxy)
        refuse(others)
        holder.one(EVENT_TASK_LOCK_LOST)
        job.go_on.set()
        holder.one(EVENT_JOB_EXECUTED)
        eventually(lambda: away(other) and row(connection)["over"])
        swallowed = threading.Event()
        proxy.to_server = lambda _data: b"" if swallowed.set() is None else None
        proxy.accepting = True
        assert swallowed.wait(60)
        restore(others)
        restore(proxy)
        eventually(lambda: row(connection)["finished_at"])
        eventually(lambda: other.executor._watcher._thread is None)
        assert (job.runs, row(connection)["token"]) == (1, 1)
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
    held = dying.claim("job", min_lock=3240, max_lock=18000, failover=2)
    assert isinstance(held, HeldLock)
    replica = make_replica(proxy.url, claim_timeout=3, failover=2)
    replica.run_once(job.run)
    replica.one(EVENT_TASK_LOCK_REFUSED)
    refuse(proxy)
    dying.abandon(held)
    eventually(lambda: away(replica) and row(connection)["over"])
    restore(proxy)
    replica.one(EVENT_JOB_EXECUTED)
    replica.idle()
    assert (job.runs, row(connection)["token"]) == (1, 2)
    assert row(connection)["finished_at"] is not None
    assert said(caplog) == [AWAY, BACK]
