"""Runs that outlive their maximum lock, and stops that wait for one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import TaskLocks, TaskLockStateError, TaskState, TaskStatus
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.status import ReplicaState, RunningRun
from tests.integration.conftest import Job
from tests.support.claims import die, end_maximum_lock
from tests.support.internals import instances
from tests.support.polling import eventually
from tests.support.pool_jobs import wait_for
from tests.support.schedulers import Replica
from tests.support.waist import ClaimRequest, LockClient

MakeReplica = Callable[..., Replica]
Connection = psycopg.Connection[Any]

FAST: dict[str, Any] = {"poll_interval": 0.2}
SOON_TOLD = Timings(waiting_interval=0.1)


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks(replica_id="operator")


def task(operator: TaskLocks) -> TaskStatus:
    [found] = operator.tasks("job")
    return found


def running(operator: TaskLocks, replica_id: str) -> list[RunningRun]:
    [found] = [each for each in operator.replicas() if each.replica_id == replica_id]
    return list(found.running)


def begin(replica: Replica, job: Job) -> None:
    """Let the job begin, whose maximum lock may end before that on a busy machine.

    Its run is handed over then, and due again.
    """
    replica.run_once(job.run)
    while not job.begun.wait(3.0):
        replica.run_once(job.run, replace_existing=True)


@pytest.mark.nightly
@pytest.mark.parametrize("lease", [None, 1])
def test_a_thread_that_never_ends_has_overrun_and_is_seen_where_it_hangs(
    make_replica: MakeReplica,
    operator: TaskLocks,
    connection: Connection,
    job: Job,
    lease: float | None,
) -> None:
    lock = {"min_lock": 0.1, "max_lock": 4.0, "lease": lease, "failover": False}
    # What has changed is told with the next look, and not with the next sign of life.
    options = {**FAST, "jobs": {"job": lock}, "timings": Timings(report_interval=600)}
    hanging = make_replica(replica_id="hanging", **options)
    begin(hanging, job)
    eventually(lambda: task(operator).state is TaskState.TOO_LONG)
    token = task(operator).token
    assert task(operator).outcome is None
    [seen] = eventually(lambda: [run for run in running(operator, "hanging") if run.lost])
    assert (seen.task, seen.token) == ("job", token)
    eventually(lambda: task(operator).stuck)  # its replica has told of it

    other = make_replica(replica_id="other", **options)
    other.run_once(lambda: None)
    eventually(lambda: task(operator).token > token and task(operator).finished_at)
    found = task(operator)
    assert (found.state, found.holder, found.failures) == (TaskState.TOO_LONG, "other", 0)
    assert [(run.replica, run.token) for run in found.stuck] == [("hanging", token)]
    assert [run.outcome for run in operator.runs("job")] == ["ok", "overran"]
    deaths = connection.execute("SELECT deaths FROM task_lock").fetchone()
    assert deaths == (0,)

    job.go_on.set()
    eventually(lambda: task(operator).state is TaskState.OK)
    assert running(operator, "hanging") == []
    assert [run.outcome for run in operator.runs("job")] == ["ok", "overran"]


@pytest.mark.parametrize("lease", [None, 60.0])
def test_a_run_that_ends_before_its_maximum_lock_does_not_overrun(
    make_locks: Callable[..., LockClient], connection: Connection, lease: float | None
) -> None:
    """It is renewed for the last time a while before, and it may be extended."""
    locks = make_locks()
    held = locks.claim(ClaimRequest("job", 0.0, 60.0, lease=lease, runs="job"))
    assert isinstance(held, HeldLock)
    held.extend(timedelta(hours=1))
    eventually(lambda: held.lease is None or held.lease_left > 0)
    die(locks, held)
    assert connection.execute("SELECT overran FROM task_lock").fetchone() == (False,)


@pytest.mark.parametrize("lease", [None, 600])
def test_a_run_that_ends_after_its_maximum_lock_has_overrun_though_nobody_ran_the_task_since(
    make_replica: MakeReplica,
    operator: TaskLocks,
    connection: Connection,
    job: Job,
    lease: float | None,
) -> None:
    lock = {"min_lock": 0.1, "max_lock": 1200, "lease": lease, "failover": False}
    replica = make_replica(**FAST, jobs={"job": lock})
    replica.run_once(job.run)
    eventually(job.begun.is_set)
    assert job.lock is not None
    end_maximum_lock(connection, job.lock)
    eventually(lambda: task(operator).state is TaskState.TOO_LONG)
    job.go_on.set()
    eventually(lambda: task(operator).state is TaskState.FAILING)
    assert (task(operator).outcome, task(operator).failures) == ("overran", 1)
    assert [run.outcome for run in operator.runs("job")] == ["overran"]


def test_a_hold_that_ends_after_its_maximum_lock_has_overrun(
    operator: TaskLocks, connection: Connection
) -> None:
    with operator.hold("job", min_lock=0, max_lock=600, lease=None) as lock:
        end_maximum_lock(connection, lock)
    assert [run.outcome for run in operator.runs("job")] == ["overran"]


@pytest.mark.usefixtures("unhurried_stop")
def test_a_stop_that_waits_for_an_overrun_shows_it_until_it_ends(
    make_replica: MakeReplica, operator: TaskLocks, connection: Connection, job: Job
) -> None:
    lock = {"min_lock": 0.1, "max_lock": 1200, "lease": 600, "failover": False}
    replica = make_replica(replica_id="one", **FAST, jobs={"job": lock})
    replica.run_once(job.run)
    eventually(job.begun.is_set)
    eventually(operator.replicas)
    stopping = threading.Thread(target=replica.scheduler.shutdown)
    stopping.start()
    assert job.lock is not None
    end_maximum_lock(connection, job.lock)
    eventually(lambda: [run for run in running(operator, "one") if run.lost])
    assert task(operator).state is TaskState.TOO_LONG
    assert operator.replicas()[0].state is ReplicaState.ALIVE
    with pytest.raises(TaskLockStateError):  # nobody would begin it
        operator.request_run("job")
    job.go_on.set()
    stopping.join()
    assert operator.replicas()[0].state is ReplicaState.STOPPED


def test_a_shutdown_says_again_and_again_which_job_it_waits_for(
    make_replica: MakeReplica, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica(timings=SOON_TOLD, max_workers=1, **FAST)
    replica.run_once(job.run)
    eventually(job.begun.is_set)
    replica.run_once(lambda: None, job_id="queued")
    eventually(lambda: sum(instances(replica.executor).values()) == 2)
    with caplog.at_level(logging.INFO):
        stopping = threading.Thread(target=replica.scheduler.shutdown)
        stopping.start()
        eventually(lambda: len(told(caplog)) >= 2)
        assert stopping.is_alive()
        job.go_on.set()
        stopping.join()
    assert "'job' (task 'job', has run for " in told(caplog)[0]
    assert "queued" not in told(caplog)[0]


def test_a_shutdown_says_which_job_of_a_process_pool_it_waits_for(
    make_replica: MakeReplica,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = make_replica(executor="processpool", timings=SOON_TOLD, max_workers=1, **FAST)
    go_on = tmp_path / "go on"
    begun = tmp_path / "begun"
    replica.run_once(wait_for, args=[str(go_on), str(begun)])
    eventually(begun.exists)  # what is claimed and has not begun is handed over by the shutdown
    stopping = threading.Thread(target=replica.scheduler.shutdown)
    stopping.start()
    eventually(lambda: told(caplog))
    go_on.touch()
    stopping.join()
    assert "'job' (task 'job', has run for " in told(caplog)[0]


def test_a_drain_says_which_job_it_waits_for(
    make_replica: MakeReplica, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica(timings=SOON_TOLD, jobs={"job": False}, **FAST)
    replica.run_once(job.run)
    eventually(job.begun.is_set)
    draining = threading.Thread(target=replica.executor.drain)
    draining.start()
    eventually(lambda: told(caplog))
    job.go_on.set()
    draining.join()
    assert "'job' (task 'job', has run for " in told(caplog)[0]


def test_a_shutdown_that_waits_for_nothing_says_nothing(
    make_replica: MakeReplica, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica(timings=Timings(waiting_interval=0.0), **FAST)
    replica.run_once(job.run)
    eventually(job.begun.is_set)
    replica.scheduler.shutdown(wait=False)
    before = len(told(caplog))
    job.go_on.set()
    replica.idle()
    assert len(told(caplog)) == before


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("The stop waits for jobs to end: ")
    ]
