"""``enabled=False``: every job runs here, and there need be no database."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import current_lock, task_lock
from tests.support.schedulers import Replica

# Nothing listens there, and the name has no address.
NO_DATABASE = "postgresql://app@nowhere.invalid:1/app"

Make = Callable[..., Replica]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as closing:

        def start(**options: Any) -> Replica:
            replica = Replica(NO_DATABASE, **{"enabled": False, **options})
            replica.start()
            closing.callback(replica.shutdown)
            return replica

        yield start


def report(**kwargs: Any) -> tuple[Any, dict[str, Any]]:
    return current_lock(), kwargs


@task_lock(failover=True, lease=5)
def decorated(first: int) -> int:
    return first


@pytest.mark.parametrize("enabled", [False, "false", "False"])
def test_a_job_runs_on_every_replica_without_a_database(make: Make, enabled: Any) -> None:
    for _ in range(2):
        replica = make(enabled=enabled)
        replica.run_once(report, kwargs={"a": 1})
        assert replica.one(EVENT_JOB_EXECUTED).retval == (None, {"a": 1})
        assert replica.codes() == [EVENT_JOB_EXECUTED]


def test_options_are_taken_out_of_the_kwargs_all_the_same(make: Make) -> None:
    replica = make(failover=True, jobs={"jobs": {"max_factor": 2}})
    options = {"task_lock": {"max_factor": 2, "failover": True}}
    replica.run_once(report, job_id="kwargs", kwargs={"a": 1, **options})
    replica.run_once(decorated, job_id="decorated", kwargs={"first": 7, **options})
    replica.run_once(report, job_id="jobs")
    replica.run_once(report, job_id="off", kwargs={"task_lock": False})
    results = {
        job_id: replica.one(EVENT_JOB_EXECUTED, job_id).retval
        for job_id in ("kwargs", "decorated", "jobs", "off")
    }
    assert results == {
        "kwargs": (None, {"a": 1}),
        "decorated": 7,
        "jobs": (None, {}),
        "off": (None, {}),
    }


def test_it_runs_in_a_pool_of_processes(make: Make) -> None:
    replica = make(executor="processpool", max_workers=1)
    replica.run_once(report, kwargs={"a": 1, "task_lock": {"max_factor": 2}})
    assert replica.one(EVENT_JOB_EXECUTED).retval == (None, {"a": 1})


def test_nothing_looks_for_dead_runs(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "apscheduler_tasklock")
    replica = make(failover=True)
    replica.run_once(report)
    replica.one(EVENT_JOB_EXECUTED)
    assert not [t for t in threading.enumerate() if t.name.startswith("tasklock")]
    replica.shutdown()
    assert [record.getMessage() for record in caplog.records] == [
        "Task locks are off for the executor 'default': every job runs here"
    ]
