"""Answers that never come, and answers that come late, in an outage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_REFUSED,
)
from tests.support.claims import LaterThan, die, held, row
from tests.support.faults import RERUN
from tests.support.outages import (
    HOURLY,
    RUNS,
    Job,
)
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.schedulers import Replica
from tests.support.waist import LockClient

pytestmark = pytest.mark.direct("the pooler would answer in the server's place")

MakeReplica = Callable[..., Replica]
MakeLocks = Callable[..., LockClient]
Connection = psycopg.Connection[Any]


@pytest.mark.nightly
def test_a_takeover_that_was_granted_and_never_answered_is_made_again(
    proxy: Proxy,
    make_replica: MakeReplica,
    make_locks: MakeLocks,
    connection: Connection,
    job: Job,
) -> None:
    """It is not released as other such claims are, since the dead holder's window would be lost."""
    job.go_on.set()
    dead = make_locks(replica_id="dead")
    lock = held(dead, "job", **HOURLY, lease=1, failover=True, runs=RUNS)
    die(dead, lock)
    claimed = threading.Event()

    def cut_from_the_claim_on(_number: int, to_server: bool, data: bytes) -> bytes | None:
        if to_server and RERUN in data:
            claimed.set()
        return None if claimed.is_set() and not to_server else data

    proxy.tap = cut_from_the_claim_on
    replica = make_replica(proxy.url, claim_timeout=0.5, lease=1, failover=True)
    replica.run_once(job.run)
    replica.one(EVENT_TASK_LOCK_REFUSED)
    eventually(lambda: EVENT_TASK_LOCK_ERROR in replica.codes())
    unanswered = row(connection)["token"]
    assert unanswered > lock.token
    proxy.tap = None
    replica.one(EVENT_JOB_EXECUTED)
    replica.idle()
    assert (job.runs, row(connection)["token"]) == (1, LaterThan(unanswered))
    assert row(connection)["finished_at"] is not None
