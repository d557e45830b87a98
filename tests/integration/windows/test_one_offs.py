"""One-off jobs without an id: at the start and the end of a replica, and in job stores.

Which of them are one task of all replicas is in ``tests/simulation/test_one_offs.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from sqlalchemy import Engine

from apscheduler_tasklock import TaskLockJobStore, current_lock
from tests.support.commands import PATIENT
from tests.support.polling import eventually
from tests.support.pool_jobs import wait_for
from tests.support.schedulers import Replica

MakeReplica = Callable[..., Replica]


@pytest.fixture
def make_replica(make_replica: MakeReplica) -> MakeReplica:
    """Make and start a replica, which waits for its connection with patience."""

    def make(**options: Any) -> Replica:
        return make_replica(**{"claim_timeout": 180, "timings": PATIENT, **options})

    return make


def takes_one(_value: Any) -> str | None:
    """Return the name of the lock that this job holds."""
    lock = current_lock()
    return None if lock is None else lock.name


def ended(replica: Replica, *jobs: Any) -> list[Any]:
    """Wait until each job has run, and return what each has returned."""
    events = [replica.one(EVENT_JOB_EXECUTED, job.id) for job in jobs]
    replica.idle()
    return [event.retval for event in events]


def test_ones_that_are_added_before_the_start_run(make_replica: MakeReplica) -> None:
    replica = make_replica(start=False)
    jobs = [
        replica.scheduler.add_job(takes_one, args=["x"], misfire_grace_time=None) for _ in range(3)
    ]
    replica.scheduler.start()
    assert ended(replica, *jobs) == [None] * 3


@pytest.mark.parametrize("executor", ["threadpool", "processpool"])
def test_ones_that_wait_for_a_worker_at_a_shutdown_run(
    make_replica: MakeReplica, tmp_path: Path, executor: str
) -> None:
    """No other replica could run them."""
    go_on = tmp_path / "go on"
    replica = make_replica(executor=executor, max_workers=1)
    jobs = [
        replica.scheduler.add_job(function, args=[str(go_on)], misfire_grace_time=None)
        for function in (wait_for, *[takes_one] * 4)
    ]
    replica.finish_pass()
    eventually(lambda: replica.scheduler.get_jobs() == [])
    stopping = threading.Thread(target=replica.scheduler.shutdown)
    stopping.start()
    eventually(lambda: replica.executor.user.closed)
    go_on.touch()
    stopping.join(60)
    ended(replica, *jobs)


def test_in_a_persistent_store_it_is_a_task_of_its_id(
    engine: Engine, make_replica: MakeReplica
) -> None:
    replica = make_replica(start=False)
    replica.scheduler.add_jobstore(SQLAlchemyJobStore(engine=engine), "stored")
    replica.scheduler.start()
    jobs = [
        replica.scheduler.add_job(takes_one, args=["x"], jobstore="stored", misfire_grace_time=None)
        for _ in range(3)
    ]
    for job in jobs:
        eventually(lambda job=job: replica.of(job.id))
    assert ended(replica, *jobs) == [f"stored:{job.id}" for job in jobs]


def test_in_the_shared_store_each_runs_once_on_one_of_the_replicas(
    make_replica: MakeReplica, database_url: str
) -> None:
    replicas = []
    for _ in range(2):
        replica = make_replica(start=False)
        store = TaskLockJobStore(database_url, functions=[__name__], poll_interval=0.1)
        replica.scheduler.add_jobstore(store)
        replica.scheduler.start()
        replicas.append(replica)
    jobs = [replicas[0].scheduler.add_job(takes_one, args=["x"]) for _ in range(3)]

    def runs(job: Any) -> list[Any]:
        return [
            event.retval
            for replica in replicas
            for event in replica.of(job.id)
            if event.code == EVENT_JOB_EXECUTED
        ]

    for job in jobs:
        assert eventually(partial(runs, job)) == [job.id]


def test_with_locks_off_they_run(make_replica: MakeReplica) -> None:
    replica = make_replica(enabled=False)
    jobs = [
        replica.scheduler.add_job(takes_one, args=["x"], misfire_grace_time=None) for _ in range(3)
    ]
    assert ended(replica, *jobs) == [None] * 3
