"""Failover: a dead holder's window is run again by a replica that it refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_MISSED

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    HeldLock,
    TaskLockDatabaseError,
    TaskLocks,
    current_lock,
    fire,
    watching,
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


def token_and_takeover(**_: Any) -> tuple[int, bool]:
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


def until_its_lease_ends(connection: Connection) -> None:
    """Wait for it by the database's clock; the holder reckons that it ends a little earlier."""
    eventually(
        lambda: connection.execute("SELECT FROM task_lock WHERE locked_until <= now()").rowcount
    )


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
    assert "since its holder dead neither renewed nor released its lock (token 2)" in caplog.text


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


def test_a_dead_window_is_run_again_before_the_claimers_own(
    make_replica: MakeReplica, holder: Callable[..., HeldLock], connection: Connection
) -> None:
    """Else the claim would put its own window in the place of the one that died."""
    holder(min_lock=0.001)
    until_its_lease_ends(connection)
    replica = make_replica(failover=2)
    ran: list[tuple[int, bool, datetime]] = []

    def job() -> None:
        lock = current_lock()
        assert lock is not None
        assert lock.run_time is not None
        ran.append((lock.token, lock.is_takeover, lock.run_time))

    own = replica.run_once(job).next_run_time
    eventually(lambda: len(ran) == 2)
    replica.idle()
    (first, is_takeover, dead_run_time), second = ran
    assert (first, is_takeover) == (2, True)
    assert second == (3, False, own)
    assert timedelta(seconds=1) < own - dead_run_time < timedelta(seconds=60)
    executed = [e.scheduled_run_time for e in replica.of() if e.code == EVENT_JOB_EXECUTED]
    assert executed == [dead_run_time, own]


def test_the_claimers_own_window_is_not_missed_because_the_dead_one_ran_first(
    make_replica: MakeReplica,
    holder: Callable[..., HeldLock],
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder(min_lock=0.001)
    until_its_lease_ends(connection)
    replica = make_replica(failover=2)
    runs: list[bool] = []
    # As if the run that was taken over outlived the grace time.
    monkeypatch.setattr(fire, "misfired", lambda *_: bool(runs))

    def job() -> None:
        lock = current_lock()
        assert lock is not None
        runs.append(lock.is_takeover)

    replica.run_once(job)
    eventually(lambda: len(runs) == 2 or EVENT_JOB_MISSED in replica.codes())
    assert runs == [True, False]


def test_of_several_that_watch_one_runs_it_again(
    make_replica: MakeReplica, holder: Callable[..., HeldLock]
) -> None:
    holder()
    replicas = [make_replica(failover=2, replica_id=f"replica {n}") for n in range(3)]
    for replica in replicas:
        replica.run_once(token_and_takeover)
    eventually(lambda: any(EVENT_JOB_EXECUTED in replica.codes() for replica in replicas))
    eventually(lambda: all(r.executor._watcher._thread is None for r in replicas))
    executed = [e.retval for r in replicas for e in r.of() if e.code == EVENT_JOB_EXECUTED]
    assert executed == [(2, True)]


def test_the_next_fire_after_a_takeover_runs_on_time(
    make_replica: MakeReplica, holder: Callable[..., HeldLock]
) -> None:
    holder(min_lock=3.6)
    replica = make_replica(failover=1, min_factor=0.9)
    replica.run_once(token_and_takeover, hours=0, seconds=4)
    executed = eventually(
        lambda: [e for e in replica.of() if e.code == EVENT_JOB_EXECUTED][1:] and replica.of()
    )
    first, second = [e for e in executed if e.code == EVENT_JOB_EXECUTED][:2]
    assert (first.retval, second.retval) == ((2, True), (3, False))
    assert second.scheduled_run_time - first.scheduled_run_time == timedelta(seconds=4)


def test_a_one_off_job_that_the_memory_store_has_dropped_is_taken_over(
    make_replica: MakeReplica, holder: Callable[..., HeldLock]
) -> None:
    holder()
    replica = make_replica(failover=2)
    now = datetime.now(timezone.utc)
    replica.scheduler.add_job(
        token_and_takeover, "date", run_date=now, id="job", misfire_grace_time=None
    )
    replica.one(EVENT_TASK_LOCK_REFUSED)
    assert replica.scheduler.get_job("job") is None
    assert replica.one(EVENT_JOB_EXECUTED).retval == (2, True)


def test_a_job_whose_last_run_time_passed_meanwhile_is_taken_over(
    make_replica: MakeReplica, holder: Callable[..., HeldLock]
) -> None:
    held = holder(renewed=True)
    replica = make_replica(failover=2)
    now = datetime.now(timezone.utc)
    end = now + timedelta(seconds=1.5)
    replica.run_once(token_and_takeover, hours=0, seconds=1, start_date=now, end_date=end)
    eventually(lambda: replica.scheduler.get_job("job") is None)
    eventually(replica.of)
    replica.idle()
    held._extender.__self__.abandon(held)  # type: ignore[attr-defined]  # its claims
    eventually(lambda: replica.executor._watcher._thread is None)
    replica.idle()
    assert EVENT_JOB_EXECUTED in replica.codes()


@pytest.mark.parametrize("meanwhile", ["pause_job", "remove_job", "pause"])
def test_a_job_that_was_paused_or_removed_meanwhile_is_not_run(
    make_replica: MakeReplica, holder: Callable[..., HeldLock], meanwhile: str
) -> None:
    holder()
    replica = make_replica(failover=2)
    replica.run_once(token_and_takeover)
    replica.one(EVENT_TASK_LOCK_REFUSED)
    eventually(lambda: replica.executor._watcher._thread is not None)
    getattr(replica.scheduler, meanwhile)(*([] if meanwhile == "pause" else ["job"]))
    eventually(lambda: replica.executor._watcher._thread is None)
    replica.idle()
    assert replica.codes() == [EVENT_TASK_LOCK_REFUSED]


def test_a_takeover_waits_for_a_worker_to_be_free(
    make_replica: MakeReplica, holder: Callable[..., HeldLock]
) -> None:
    died = holder()
    go_on, busy = threading.Event(), threading.Event()

    def occupy() -> None:
        busy.set()
        assert go_on.wait(60)

    replica = make_replica(failover=2, max_workers=1)
    replica.run_once(token_and_takeover, misfire_grace_time=1)
    replica.one(EVENT_TASK_LOCK_REFUSED)
    eventually(lambda: replica.executor._watcher._thread is not None)
    replica.run_once(occupy, job_id="busy")
    eventually(busy.is_set)
    eventually(lambda: died.seconds_left == 0 and replica.executor._watcher._thread is None)
    assert replica.executor._instances["job"] == 1
    go_on.set()
    assert replica.one(EVENT_JOB_EXECUTED).retval == (2, True)


def test_a_takeover_waits_while_the_job_may_not_have_another_instance(
    make_replica: MakeReplica, holder: Callable[..., HeldLock], make_locks: MakeLocks
) -> None:
    """As when the job runs here for a window that it was granted under another name."""
    holder()
    replica = make_replica(failover=2)
    replica.run_once(token_and_takeover)
    replica.one(EVENT_TASK_LOCK_REFUSED)
    eventually(lambda: replica.executor._watcher._thread is not None)
    with replica.executor._inner._lock:
        replica.executor._instances["job"] += 1
    tried = eventually(lambda: replica.executor._watcher._watched[0].watch.submission.taken_over)
    assert tried.holder == "dead"
    with replica.executor._inner._lock:
        del replica.executor._instances["job"]
    assert replica.one(EVENT_JOB_EXECUTED).retval == (2, True)


def test_a_replica_reads_about_once_per_lease_whatever_it_watches(
    make_replica: MakeReplica,
    holder: Callable[..., HeldLock],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = [f"job {number}" for number in range(5)]
    held = [holder(task, failover=3, renewed=True) for task in tasks]
    reads: list[list[str]] = []
    replica = make_replica(failover=3)
    read = replica.executor._watcher._read
    monkeypatch.setattr(
        replica.executor._watcher, "_read", lambda names: reads.append(list(names)) or read(names)
    )
    for task in tasks:
        replica.run_once(token_and_takeover, job_id=task)
    eventually(lambda: len(replica.executor._watcher._watched) == 5)
    begun = min(lock.locked_until for lock in held)
    reads.clear()
    eventually(lambda: min(lock.locked_until for lock in held) > begun + timedelta(seconds=9))
    leases = (max(lock.locked_until for lock in held) - begun) / timedelta(seconds=3)
    assert 1 <= len(reads) <= leases + 2
    assert all(names == tasks for names in reads)
    for lock in held:
        lock._extender.__self__.release(lock, keep_window=True)  # type: ignore[attr-defined]  # its claims
    eventually(lambda: replica.executor._watcher._thread is None)


@pytest.mark.parametrize("way", ["skip", "run"])
def test_a_takeover_that_meets_an_outage_is_made_later_unless_it_runs_without_a_lock(
    make_replica: MakeReplica,
    holder: Callable[..., HeldLock],
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    holder()
    replica = make_replica(failover=2, on_database_error=way)
    claim, answers = replica.executor.locks.claim, ["refused", "away", "granted"]

    def claim_with_an_outage(*arguments: Any, **times: Any) -> Any:
        if answers.pop(0) == "away":
            raise TaskLockDatabaseError("away")
        return claim(*arguments, **times)

    monkeypatch.setattr(replica.executor.locks, "claim", claim_with_an_outage)
    replica.run_once(token_and_takeover if way == "skip" else current_lock)
    executed = replica.one(EVENT_JOB_EXECUTED)
    eventually(lambda: replica.executor._watcher._thread is None)
    replica.idle()
    assert executed.retval == ((2, True) if way == "skip" else None)
    assert replica.one(EVENT_JOB_EXECUTED) is executed


def test_that_watching_is_refused_is_told_once_and_it_goes_on(
    make_replica: MakeReplica,
    holder: Callable[..., HeldLock],
    connection: Connection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a grant is revoked for a while."""
    monkeypatch.setattr(watching, "RETRY_INTERVAL", 0.05)
    holder(renewed=False)
    replica = make_replica(failover=2)
    reads, read = [], replica.executor._watcher._read
    monkeypatch.setattr(
        replica.executor._watcher, "_read", lambda names: reads.append(names) or read(names)
    )
    replica.run_once(token_and_takeover)
    replica.one(EVENT_TASK_LOCK_REFUSED)
    connection.execute("ALTER TABLE task_lock RENAME TO elsewhere")
    eventually(lambda: len(reads) >= 3)
    connection.execute("ALTER TABLE elsewhere RENAME TO task_lock")
    assert replica.one(EVENT_JOB_EXECUTED).retval == (2, True)
    [refusal] = [r for r in caplog.records if r.name == watching.logger.name]
    assert refusal.getMessage().startswith("Runs of other replicas could not be watched; trying")
    assert refusal.exc_info is None


def test_without_failover_nothing_is_watched_or_taken_over(
    make_replica: MakeReplica, holder: Callable[..., HeldLock], connection: Connection
) -> None:
    holder()
    replica = make_replica(failover=2)
    replica.run_once(token_and_takeover, kwargs={"task_lock": {"failover": 0}})
    replica.one(EVENT_TASK_LOCK_REFUSED)
    replica.idle()
    assert replica.executor._watcher._thread is None
    until_its_lease_ends(connection)
    replica.run_once(
        token_and_takeover, replace_existing=True, kwargs={"task_lock": {"failover": 0}}
    )
    eventually(lambda: len(replica.of()) == 2)
    assert [event.reason for event in replica.of()] == ["running", "window"]


def test_what_is_refused_while_the_shutdown_waits_for_it_is_not_watched(
    make_replica: MakeReplica, holder: Callable[..., HeldLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder(failover=600)
    replica = make_replica(failover=600)
    refuse, refused = replica.executor.locks.claim, threading.Event()

    def claim(*arguments: Any, **times: Any) -> Any:
        refusal = refuse(*arguments, **times)
        refused.set()
        eventually(lambda: replica.executor.locks.closed)
        return refusal

    monkeypatch.setattr(replica.executor.locks, "claim", claim)
    replica.run_once(token_and_takeover)
    assert refused.wait(60)
    replica.shutdown()
    assert replica.executor._watcher._thread is None

    monkeypatch.undo()
    replica.start()
    replica.run_once(token_and_takeover)
    eventually(lambda: replica.executor._watcher._thread is not None)
