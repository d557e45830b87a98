"""Outages while a job runs under a lease: what it survives, and who runs the window in the end.

An outage is as long as it takes to outlive what has a time limit: the lease, and `claim_timeout`.
One of half a minute would show no more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
)
from apscheduler_tasklock._database.timings import Timings
from tests.support.claims import LaterThan, die, held, row
from tests.support.internals import deferred_run_times
from tests.support.outages import (
    BACK,
    HOURLY,
    RUNS,
    UNAVAILABLE,
    Job,
    count_looks,
    refuse,
    refused,
    restore,
    said_by_its_end,
    swallow,
    until_looked,
    why_unavailable,
)
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxy_to
from tests.support.schedulers import Replica
from tests.support.waist import LockClient

pytestmark = pytest.mark.direct("the pooler would answer in the server's place")

MakeReplica = Callable[..., Replica]
MakeLocks = Callable[..., LockClient]
Connection = psycopg.Connection[Any]

# Nobody counts as dead in what is left of the test.
DOUBTFUL = Timings(recovery_grace=60.0)


@pytest.mark.parametrize("fail", [refuse, pytest.param(swallow, marks=pytest.mark.nightly)])
def test_a_lease_survives_an_outage_that_is_shorter(
    proxy: Proxy,
    make_replica: MakeReplica,
    connection: Connection,
    caplog: pytest.LogCaptureFixture,
    job: Job,
    fail: Callable[[Proxy], None],
) -> None:
    caplog.set_level(logging.INFO)
    timings = Timings(renewals_per_lease=1200, longest_answer=1.0)
    holder = make_replica(proxy.url, claim_timeout=60, lease=600, timings=timings)
    holder.run_once(job.run)
    assert job.begun.wait(60)
    fail(proxy)
    eventually(lambda: why_unavailable(holder))
    before = row(connection)["locked_until"]
    restore(proxy)
    eventually(lambda: row(connection)["locked_until"] > before)
    job.go_on.set()
    holder.one(EVENT_TASK_LOCK_RELEASED)
    assert holder.codes() == [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]
    assert row(connection)["finished_at"] is not None
    assert said_by_its_end(caplog) == [UNAVAILABLE, BACK]


def test_the_end_of_a_run_in_an_outage_is_told_when_its_release_has_arrived(
    proxy: Proxy, make_replica: MakeReplica
) -> None:
    """Until then only that the release has failed is told, which is no end of the run."""

    def fail() -> None:
        refuse(proxy)
        raise ValueError("in the dark")

    holder = make_replica(proxy.url, claim_timeout=60, lease=600)
    holder.run_once(fail)
    assert holder.one(EVENT_TASK_LOCK_ERROR).token is not None
    restore(proxy)
    released = holder.one(EVENT_TASK_LOCK_RELEASED)
    assert (released.outcome, released.error) == ("error", "ValueError: in the dark")


@pytest.mark.nightly
@pytest.mark.parametrize("fail", [refuse, pytest.param(swallow, marks=pytest.mark.nightly)])
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
    options: dict[str, Any] = {"lease": 2, "failover": True, "timings": DOUBTFUL}
    with proxy_to(direct_url) as others:
        holder, other = refused(make_replica, job, proxy.url, others.url, **options)
        token = row(connection)["token"]
        for each in (proxy, others):
            fail(each)
        eventually(lambda: row(connection)["over"])
        job.go_on.set()
        holder.one(EVENT_JOB_EXECUTED)
        eventually(lambda: why_unavailable(other))
        restore(others)
        if joins:
            other.shutdown()
            other = make_replica(others.url, replica_id="restarted", **options)
            other.run_once(job.run)
            other.one(EVENT_TASK_LOCK_REFUSED)
        else:
            eventually(lambda: why_unavailable(other) is None)
        looks = count_looks(other, monkeypatch)
        until_looked(looks)
        restore(proxy)
        eventually(lambda: row(connection)["finished_at"])
        until_looked(looks)
        other.idle()
        assert other.codes() == [EVENT_TASK_LOCK_REFUSED]
        assert EVENT_TASK_LOCK_LOST not in holder.codes()
        assert (job.runs, row(connection)["token"]) == (1, token)
        other.shutdown()
        holder.shutdown()


@pytest.mark.nightly
def test_a_job_that_goes_on_through_an_outage_longer_than_its_lease_does_not_overlap(
    proxy: Proxy,
    make_replica: MakeReplica,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    job: Job,
) -> None:
    """Not even with its next run time, on a replica that was started right after the outage."""
    options: dict[str, Any] = {"lease": 2, "claim_timeout": 3, "min_factor": 0}
    options.update(timings=DOUBTFUL, poll_interval=0.5)
    holder = make_replica(proxy.url, replica_id="holder", **options)
    holder.run_once(job.run)
    assert job.begun.wait(60)
    token = row(connection)["token"]
    refuse(proxy)
    eventually(lambda: row(connection)["over"])
    restarted = make_replica(replica_id="restarted", **options)
    restarted.run_once(job.run)
    eventually(lambda: deferred_run_times(restarted.executor))
    looks = count_looks(restarted, monkeypatch)
    until_looked(looks)
    restore(proxy)
    eventually(lambda: not row(connection)["over"])
    job.go_on.set()
    holder.one(EVENT_JOB_EXECUTED)
    eventually(lambda: row(connection)["finished_at"])
    blocked = restarted.one(EVENT_TASK_LOCK_REFUSED)
    assert (blocked.reason, blocked.holder) == ("running", "holder")
    until_looked(looks)
    restarted.idle()
    assert restarted.codes() == [EVENT_TASK_LOCK_REFUSED]
    assert EVENT_TASK_LOCK_LOST not in holder.codes()
    assert (job.runs, row(connection)["token"]) == (1, token)


@pytest.mark.nightly
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
        eventually(lambda: why_unavailable(other))
        swallowed = threading.Event()
        proxy.to_server = lambda _data: b"" if swallowed.set() is None else None
        proxy.accepting = True
        assert swallowed.wait(60)
        restore(others)
        restore(proxy)
        eventually(lambda: row(connection)["finished_at"])
        eventually(lambda: other.executor.user.outage.stable)
        other.idle()
        assert (job.runs, row(connection)["token"]) == (1, token)
        other.shutdown()
        holder.shutdown()


@pytest.mark.nightly
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
    eventually(lambda: why_unavailable(replica) and row(connection)["over"])
    restore(proxy)
    replica.one(EVENT_JOB_EXECUTED)
    replica.idle()
    assert (job.runs, row(connection)["token"]) == (1, LaterThan(lock.token))
    assert row(connection)["finished_at"] is not None
    assert said_by_its_end(caplog) == [UNAVAILABLE, BACK]
