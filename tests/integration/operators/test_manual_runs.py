"""Runs that were asked for by hand, with real replicas.

Which run times they follow and precede is in ``tests/simulation/test_run_rules.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest

from apscheduler_tasklock import TaskLocks
from tests.integration.conftest import Job
from tests.support.claims import ended_runs
from tests.support.internals import wake_poll
from tests.support.polling import eventually
from tests.support.schedulers import Replica


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks(replica_id="operator")


def test_a_run_time_that_comes_meanwhile_begins_without_a_wait_on_the_same_replica(
    make_replica: Callable[..., Replica], operator: TaskLocks, job: Job
) -> None:
    replica = make_replica(start=False, poll_interval=3600)
    replica.scheduler.add_job(job.run, "interval", days=1, id="job", misfire_grace_time=60)
    replica.scheduler.start()
    eventually(lambda: [seen for seen in operator.replicas() if "job" in seen.tasks])
    operator.request_run("job")
    wake_poll(replica.executor)
    eventually(job.begun.is_set)
    now = datetime.now(timezone.utc)
    replica.scheduler.modify_job("job", next_run_time=now)
    later = now + timedelta(hours=1)
    eventually(lambda: replica.scheduler.get_job("job").next_run_time > later)
    job.go_on.set()
    eventually(lambda: [run.kind for run in ended_runs(operator)] == ["schedule", "manual"])
