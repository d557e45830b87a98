"""A failover of the database itself: the primary is killed, and its standby is promoted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import HeldLock, TaskLockDatabaseError, downgrade, upgrade
from apscheduler_tasklock._lock.replica import LockSettings
from tests.support import claims
from tests.support.polling import eventually
from tests.support.schedulers import Replica
from tests.support.standby import Pair
from tests.support.waist import LockClient

pytestmark = pytest.mark.nightly


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A primary with the table, and its standby."""
    with Pair() as pair:
        upgrade(pair.primary.url)
        yield pair


@pytest.fixture(params=["any", "read-write"])
def url(pair: Pair, request: pytest.FixtureRequest) -> str:
    """URL of whichever of the two it is, without and with the wish for one that takes writes."""
    return pair.url(target_session_attrs=request.param)


def claimed(locks: LockClient) -> HeldLock:
    return claims.held(locks, min_lock=0.0, max_lock=600.0)


def finished_at(url: str) -> datetime | None:
    with psycopg.connect(url) as connection:
        row: Any = connection.execute("SELECT finished_at FROM task_lock").fetchone()
    return row[0]  # type: ignore[no-any-return]  # the cursor's rows are untyped


def test_a_claim_of_the_killed_primary_is_released_on_the_promoted_standby(
    pair: Pair, url: str
) -> None:
    with closing(LockClient(LockSettings(url, "replica"))) as locks:
        held = claimed(locks)
        pair.kill_primary()
        with pytest.raises(TaskLockDatabaseError):
            locks.release(held)
        assert finished_at(pair.standby.url) is None
        pair.standby.promote()
        eventually(lambda: finished_at(pair.standby.url) is not None)
        again = claimed(locks)
        assert again.token > held.token
        locks.release(again)


def test_a_claim_waits_no_longer_than_its_timeout_for_the_promotion(pair: Pair, url: str) -> None:
    with closing(LockClient(LockSettings(url, "replica", claim_timeout=1.0))) as locks:
        locks.release(claimed(locks))
        pair.kill_primary()
        with pytest.raises(TaskLockDatabaseError, match=r"could not be used for .*read-only"):
            claimed(locks)


def test_a_scheduler_goes_on_through_a_failover(pair: Pair, url: str) -> None:
    replica = Replica(url)

    def executed() -> int:
        return replica.codes().count(EVENT_JOB_EXECUTED)

    replica.scheduler.add_job(lambda: None, "interval", seconds=1, id="job")
    replica.start()
    try:
        eventually(lambda: executed() >= 2)
        pair.kill_primary()
        before = executed()
        pair.standby.promote()
        eventually(lambda: executed() >= before + 3)
    finally:
        replica.shutdown()  # which also waits until no instance is counted any more
    assert finished_at(pair.standby.url) is not None


def test_the_primary_is_found_behind_a_standby_that_is_named_first(pair: Pair) -> None:
    """Else each connection would lead to the standby, where nothing can be claimed."""
    hosts = [f"host=127.0.0.1:{server.port}" for server in (pair.standby, pair.primary)]
    url = f"postgresql://postgres@/postgres?{'&'.join(hosts)}"
    assert downgrade(url)
    assert upgrade(url)
    with closing(LockClient(LockSettings(url, "replica", claim_timeout=5.0))) as locks:
        locks.check()
        locks.release(claimed(locks))


def test_a_claim_that_no_standby_has_confirmed_is_not_granted(pair: Pair) -> None:
    """Else the replica would work on a window which the promoted standby grants to another one."""
    with closing(LockClient(LockSettings(pair.url(), "one", claim_timeout=5.0))) as one:
        one.release(claims.held(one, "warm-up"))
        pair.standby.stop()
        with pytest.raises(TaskLockDatabaseError):
            claimed(one)
        pair.kill_primary()
        pair.standby.start()
        pair.standby.promote()
        with closing(LockClient(LockSettings(pair.url(), "other"))) as other:
            other.release(claimed(other))
