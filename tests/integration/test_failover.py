"""Failover: a dead holder's window is run again by a replica that it refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    HeldLock,
    TaskLocks,
    current_lock,
)
from tests.polling import eventually
from tests.schedulers import Replica

MakeReplica = Callable[..., Replica]
MakeLocks = Callable[..., TaskLocks]
Connection = psycopg.Connection[Any]

REFUSED_THEN_RUN = [
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_RELEASED,
    EVENT_JOB_EXECUTED,
]


def token_and_takeover() -> tuple[int, bool]:
    lock = current_lock()
    assert lock is not None
    return lock.token, lock.is_takeover


@pytest.fixture
def holder(make_locks: MakeLocks) -> Iterator[Callable[..., HeldLock]]:
    """Let a replica called "dead" claim a task and not be heard of again, as after SIGKILL.

    That the real thing leaves the same behind is shown by tests/acceptance.
    """
    locks = make_locks(replica_id="dead")

    def claim(task: str = "job", *, renewed: bool = False, **options: Any) -> HeldLock:
        times: dict[str, Any] = {"min_lock": 3240, "max_lock": 18000, "failover": 2}
        held = locks.claim(task, **{**times, **options})
        assert isinstance(held, HeldLock)
        if not renewed:
            locks.abandon(held)
        return held

    return claim


def test_a_replica_that_was_refused_runs_the_window_of_a_dead_holder_again(
    make_replica: MakeReplica,
    holder: Callable[..., HeldLock],
    connection: Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    window = "SELECT window_start, window_until FROM task_lock"
    died = holder()
    before = connection.execute(window).fetchone()
    replica = make_replica(failover=2, replica_id="heir")
    replica.run_once(token_and_takeover)
    executed = replica.one(EVENT_JOB_EXECUTED)
    replica.idle()

    assert replica.codes() == REFUSED_THEN_RUN
    assert executed.retval == (2, True)
    refused, granted = replica.of()[:2]
    assert (refused.reason, refused.holder) == ("running", "dead")
    assert (granted.reason, granted.holder) == ("takeover", "heir")
    assert executed.scheduled_run_time == refused.scheduled_run_time
    assert granted.locked_until > died.locked_until
    assert connection.execute(window).fetchone() == before
    assert "Task 'job': runs the window of" in caplog.text
    assert "since its holder dead died (token 2)" in caplog.text


def test_a_holder_that_ends_late_is_not_taken_over(
    make_replica: MakeReplica, holder: Callable[..., HeldLock]
) -> None:
    held = holder(failover=1, renewed=True)
    replica = make_replica(failover=1)
    replica.run_once(token_and_takeover)
    replica.one(EVENT_TASK_LOCK_REFUSED)
    first = held.locked_until
    eventually(lambda: held.locked_until > first + timedelta(seconds=3))
    assert not held.lost
    assert replica.executor._watcher._thread is not None
    held._extender.__self__.release(held, keep_window=True)  # type: ignore[attr-defined]  # its claims
    eventually(lambda: replica.executor._watcher._thread is None)
    assert replica.codes() == [EVENT_TASK_LOCK_REFUSED]
