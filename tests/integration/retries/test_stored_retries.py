"""Retries of stored jobs, which stay in the job store while a retry is to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.jobstores.base import JobLookupError

from apscheduler_tasklock import JobState, TaskLocks, TaskLockStateError, TaskState, current_lock
from tests.integration.retries.test_retries import finished
from tests.support.claims import row
from tests.support.outages import count_looks, until_looked
from tests.support.polling import eventually
from tests.support.stored_jobs import StoreReplica, note, store_replicas

MakeStoreReplica = Callable[..., StoreReplica]
Connection = psycopg.Connection[Any]

failing: dict[str, int] = {}
attempts: dict[str, list[int]] = {}


def fail_at_first(key: str, **_task_lock: Any) -> None:
    """Fail as often as ``failing`` says, and note the attempts."""
    lock = current_lock()
    assert lock is not None
    noted = attempts.setdefault(key, [])
    noted.append(lock.attempt)
    if len(noted) <= failing.get(key, 0):
        raise ValueError(key)


@pytest.fixture
def make_store_replica(database_url: str) -> Iterator[MakeStoreReplica]:
    with store_replicas(database_url) as make:
        yield make


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)[:60]


def fail_once(replica: StoreReplica, key: str, connection: Connection, *, failures: int) -> None:
    """Add a one-off job that fails so often, and wait for its first failure."""
    failing[key] = failures
    replica.run_at(fail_at_first, key, misfire_grace_time=None)
    eventually(lambda: finished(connection, 1))


@pytest.mark.nightly
def test_a_stored_one_off_job_is_retried_and_then_removed(
    make_store_replica: MakeStoreReplica, key: str, connection: Connection
) -> None:
    replica = make_store_replica(retries=2, retry_delay=0, poll_interval=0.2)
    failing[key] = 2
    replica.run_at(fail_at_first, key, misfire_grace_time=None)

    eventually(lambda: finished(connection, 3))

    assert attempts[key] == [1, 2, 3]
    eventually(lambda: connection.execute("SELECT FROM task_lock_job").fetchone() is None)


def test_a_stored_job_whose_first_delay_does_not_fit_into_its_period_is_warned_of(
    make_store_replica: MakeStoreReplica, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_store_replica(retries=2, retry_delay=7200)
    told = f"Job {key!r}: its retry_delay of 7200 s is not below its period of 3600 s"

    def declare() -> None:
        replica.scheduler.add_job(
            note, "interval", hours=1, id=key, args=[key], replace_existing=True
        )

    declare()
    assert caplog.text.count(told) == 1
    declare()  # as at the start of the next replica
    assert caplog.text.count(told) == 2
    replica.scheduler.pause_job(key)
    replica.scheduler.resume_job(key)
    replica.scheduler.add_job(note, "interval", hours=3, id="other", args=["other"])
    assert caplog.text.count("its retry_delay") == 2


def test_a_retrying_job_is_shown_and_can_be_removed(
    make_store_replica: MakeStoreReplica,
    key: str,
    connection: Connection,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = make_store_replica(retries=2, retry_delay=600, poll_interval=0.2)
    fail_once(replica, key, connection, failures=9)

    with TaskLocks(database_url) as locks:
        [job] = locks.jobs()
        assert job.state is JobState.RETRYING
        with pytest.raises(TaskLockStateError, match="when that run and its retries are over"):
            locks.pause_job(key, by="me")
        locks.remove_job(key, by="me")
        assert locks.jobs() == []
    with pytest.raises(JobLookupError):
        replica.scheduler.remove_job(key)
    connection.execute("UPDATE task_lock SET retry_at = now() - interval '1 min'")
    replica.executor.stored.look_after(key, key, "default")
    # A task that is always looked at.
    replica.scheduler.add_job(note, "interval", hours=5, id="other", args=["other"])
    until_looked(count_looks(replica, monkeypatch))
    assert attempts[key] == [1]


@pytest.mark.nightly
def test_a_job_that_is_removed_after_a_retry_is_not_retried_any_more(
    make_store_replica: MakeStoreReplica,
    key: str,
    connection: Connection,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replica that has run the retry does not keep the job."""
    replica = make_store_replica(retries=4, retry_delay=600, poll_interval=0.2)
    fail_once(replica, key, connection, failures=9)
    connection.execute("UPDATE task_lock SET retry_at = now()")
    eventually(lambda: finished(connection, 2))

    with TaskLocks(database_url) as locks:
        locks.remove_job(key, by="me")
    connection.execute("UPDATE task_lock SET retry_at = now()")
    # A task that is always looked at.
    replica.scheduler.add_job(note, "interval", hours=5, id="other", args=["other"])
    until_looked(count_looks(replica, monkeypatch))
    assert attempts[key] == [1, 2]


def test_a_task_that_is_freed_to_run_again_runs_its_stored_job_anew(
    make_store_replica: MakeStoreReplica, key: str, connection: Connection, database_url: str
) -> None:
    replica = make_store_replica(retries=2, retry_delay=600, poll_interval=0.2)
    fail_once(replica, key, connection, failures=1)

    with TaskLocks(database_url) as locks:
        [task] = locks.tasks()
        locks.free(task.name, task.token, run_again=True, by="me")

    eventually(lambda: attempts[key] == [1, 1])


def test_the_same_id_added_again_voids_the_retry(
    make_store_replica: MakeStoreReplica, key: str, connection: Connection
) -> None:
    replica = make_store_replica(retries=2, retry_delay=600)
    fail_once(replica, key, connection, failures=1)

    replica.run_at(fail_at_first, key, after=0.2, misfire_grace_time=None)

    eventually(lambda: len(attempts[key]) == 2 and finished(connection, 1))
    assert attempts[key] == [1, 1]
    assert row(connection, key)["retry_of"] != row(connection, key)["claim_id"]


def test_a_stored_recurring_job_is_retried_before_its_next_run_time(
    make_store_replica: MakeStoreReplica, key: str, connection: Connection
) -> None:
    replica = make_store_replica(retries=2, retry_delay=0, poll_interval=0.2)
    failing[key] = 1
    replica.scheduler.add_job(
        fail_at_first, "interval", hours=1, id=key, args=[key], next_run_time=None
    )
    replica.scheduler.resume_job(key)
    job = replica.scheduler.get_job(key)
    replica.scheduler.modify_job(key, next_run_time=job.next_run_time.replace(year=2020))

    eventually(lambda: finished(connection, 2))

    assert attempts[key] == [1, 2]


def test_a_job_that_is_paused_is_not_retried_after_its_next_run_time(
    make_store_replica: MakeStoreReplica,
    key: str,
    connection: Connection,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pause of the job takes the due time out of the row, which has made the retry void."""
    replica = make_store_replica(retries=2, retry_delay=1500, poll_interval=0.2)
    failing[key] = 1
    at = datetime.now(timezone.utc).replace(microsecond=0)
    replica.scheduler.add_job(
        fail_at_first,
        "interval",
        hours=1,
        start_date=at,
        next_run_time=at,
        id=key,
        args=[key],
        misfire_grace_time=None,
    )
    with TaskLocks(database_url) as locks:
        eventually(lambda: [task.state for task in locks.tasks()] == [TaskState.RETRYING])
        connection.execute("UPDATE task_lock SET due_at = now()")
        locks.pause_job(key, by="me")
        connection.execute("UPDATE task_lock SET retry_at = now() - interval '1 min'")
        [task] = locks.tasks()
        assert (task.state, task.failures, task.retry_at) == (TaskState.PAUSED, 1, None)
        locks.resume_job(key, by="me")
    until_looked(count_looks(replica, monkeypatch))
    eventually(lambda: row(connection, key)["due_at"] is not None)
    assert attempts[key] == [1]
