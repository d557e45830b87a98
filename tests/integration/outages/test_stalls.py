"""Renewals that stall, while the job goes on: as under a debugger, or on a dead network path."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_RELEASED,
    HeldLock,
    TaskLocks,
    current_lock,
)
from apscheduler_tasklock._database.timings import Timings
from tests.support.claims import end_lease, held, row
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.schedulers import Replica
from tests.support.waist import LockClient

MakeReplica = Callable[..., Replica]
Connection = psycopg.Connection[Any]

# A lease of 600 s is renewed each half second, and an answer may take a minute.
PATIENT = Timings(longest_answer=60.0, renewals_per_lease=1200)


@pytest.mark.parametrize("way", ["to_server", "to_client"])
def test_a_lock_whose_renewal_stalls_beyond_its_lease_is_kept(
    make_replica: MakeReplica, proxy: Proxy, connection: Connection, way: str
) -> None:
    """It stalls before the statement is sent, or after it was carried out, with nobody told."""
    replica = make_replica(proxy.url, lease=600, claim_timeout=180, timings=PATIENT)
    stalled, go_on = threading.Event(), threading.Event()

    def stall(data: bytes) -> bytes:
        stalled.set()
        assert go_on.wait(60)
        return data

    def job() -> bool:
        lock = current_lock()
        assert lock is not None
        setattr(proxy, way, stall)  # only renewals use the database now, and looks for dead runs
        assert stalled.wait(60)
        end_lease(connection)
        go_on.set()
        eventually(lambda: not row(connection)["over"])
        return lock.lost

    replica.run_once(job)
    assert replica.one(EVENT_JOB_EXECUTED).retval is False
    replica.idle()
    assert replica.codes() == [
        EVENT_TASK_LOCK_GRANTED,
        EVENT_JOB_EXECUTED,
        EVENT_TASK_LOCK_RELEASED,
    ]


def test_a_lock_that_was_overtaken_during_a_stall_is_lost_and_told_of_when_it_goes_on(
    make_replica: MakeReplica,
    make_locks: Callable[..., LockClient],
    proxy: Proxy,
    connection: Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"lease": 600, "min_factor": 0, "claim_timeout": 180, "timings": PATIENT}
    replica = make_replica(proxy.url, **options)
    stalled, go_on = threading.Event(), threading.Event()
    other = make_locks(replica_id="other", claim_timeout=180, timings=PATIENT)
    other.outage.believe()
    overtaken: list[HeldLock] = []

    def stall(data: bytes) -> bytes:
        stalled.set()
        assert go_on.wait(60)
        return data

    def job() -> tuple[bool, bool]:
        lock = current_lock()
        assert lock is not None
        proxy.to_server = stall
        assert stalled.wait(60)
        end_lease(connection)
        overtaken.append(held(other, "job"))
        before = lock.lost
        go_on.set()
        replica.one(EVENT_TASK_LOCK_LOST)
        return before, lock.lost

    replica.run_once(job)
    assert replica.one(EVENT_JOB_EXECUTED).retval == (False, True)
    replica.idle()
    assert replica.codes() == [EVENT_TASK_LOCK_GRANTED, EVENT_TASK_LOCK_LOST, EVENT_JOB_EXECUTED]
    assert row(connection)["claim_id"] == overtaken[0].claim_id
    assert row(connection)["finished_at"] is None
    assert caplog.text.count("is lost (token") == 1


@pytest.mark.nightly
def test_a_renewal_without_an_answer_is_sent_again_on_another_connection_within_the_lease(
    make_task_locks: Callable[..., TaskLocks], proxy: Proxy
) -> None:
    """As when one path through the network dies. An answer to a claim may take 3.3 s here."""
    locks = make_task_locks(proxy.url)
    hung, end = threading.Event(), threading.Event()

    def hang_once(data: bytes) -> bytes | None:
        if hung.is_set():
            return data
        hung.set()
        end.wait(60)
        return None

    with locks.hold("task", min_lock=0, max_lock=60, lease=4) as held:
        first = held.locked_until
        eventually(lambda: held.locked_until > first)  # on a connection that then hangs
        proxy.to_client = hang_once
        assert hung.wait(60)
        second = held.locked_until
        eventually(lambda: held.lost or held.locked_until > second)
        assert not held.lost
    end.set()
