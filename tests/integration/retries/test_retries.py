"""Retries on a real server, and what is read of them. The rest is in ``tests/simulation``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import TaskLocks, TaskLockStateError, TaskState, current_lock
from tests.support.claims import ended_runs
from tests.support.polling import eventually
from tests.support.schedulers import Replica

MakeReplica = Callable[..., Replica]
Connection = psycopg.Connection[Any]

AT_ONCE: dict[str, Any] = {"retry_delay": 0, "poll_interval": 0.2}


def now() -> datetime:
    return datetime.now(timezone.utc)


class Flaky:
    """A job that fails a few times, and then succeeds.

    :ivar attempts: the attempts that it was run as, in order
    """

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.attempts: list[int] = []

    def __call__(self) -> str:
        lock = current_lock()
        assert lock is not None
        self.attempts.append(lock.attempt)
        if len(self.attempts) <= self.failures:
            raise ValueError
        return "done"


def add_hourly(replica: Replica, job: Callable[..., Any]) -> None:
    """Add a job as a user does, due now."""
    run_time = now().replace(microsecond=0)
    replica.scheduler.add_job(
        job,
        "interval",
        hours=1,
        start_date=run_time,
        next_run_time=run_time,
        id="job",
        misfire_grace_time=600,
    )


def finished(connection: Connection, attempt: int) -> bool:
    found = connection.execute("SELECT attempt, finished_at FROM task_lock").fetchone()
    return found is not None and found[0] == attempt and found[1] is not None


def test_a_job_that_fails_twice_runs_three_times_and_its_failure_is_forgotten(
    make_replica: MakeReplica, connection: Connection, database_url: str
) -> None:
    replica, job = make_replica(retries=3, **AT_ONCE), Flaky(2)
    add_hourly(replica, job)

    replica.one(EVENT_JOB_EXECUTED)
    eventually(lambda: finished(connection, 3))

    assert job.attempts == [1, 2, 3]
    with TaskLocks(database_url) as locks:
        runs = ended_runs(locks)
        assert [(run.outcome, run.kind, run.attempt) for run in runs] == [
            ("ok", "retry", 3),
            ("error", "retry", 2),
            ("error", "schedule", 1),
        ]
        assert len({run.scheduled_at for run in runs}) == 1
        assert [run.retry_at is not None for run in runs] == [False, True, True]
        [task] = locks.tasks()
    assert (task.state, task.failures, task.attempt, task.retry_at) == (TaskState.OK, 0, 3, None)


def test_while_a_retry_is_to_come_the_task_does_not_count_as_failing(
    make_replica: MakeReplica, connection: Connection, database_url: str
) -> None:
    add_hourly(make_replica(retries=1, retry_delay=600), Flaky(9))

    eventually(lambda: finished(connection, 1))

    with TaskLocks(database_url) as locks:
        [task] = locks.tasks()
        assert (task.state, task.failures) == (TaskState.RETRYING, 0)
        assert task.retry_at is not None
        assert task.finished_at is not None
        pause = (task.retry_at - task.finished_at).total_seconds()
        assert 599 < pause < 661  # up to a tenth is added
        connection.execute("UPDATE task_lock SET retry_at = now() - interval '1 hour'")
        [task] = locks.tasks()  # long after the task's grace time, so nobody retries it
    assert (task.state, task.failures) == (TaskState.FAILING, 1)


def test_after_an_operator_has_freed_the_task_there_is_no_retry(
    make_replica: MakeReplica, connection: Connection, database_url: str
) -> None:
    add_hourly(make_replica(retries=1, retry_delay=600), Flaky(9))
    eventually(lambda: finished(connection, 1))

    with TaskLocks(database_url) as locks:
        [task] = locks.tasks()
        locks.free("job", task.token, by="me")

        [task] = locks.tasks()
        assert (task.state, task.retry_at) == (TaskState.FAILING, None)
        assert [run.outcome for run in locks.runs("job")] == ["freed", "error"]
        with pytest.raises(TaskLockStateError, match="its run has ended"):
            locks.free("job", task.token, by="me")
