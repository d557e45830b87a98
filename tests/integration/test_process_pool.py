"""TaskLockExecutor around the process pool: the claim is made in the worker process."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from sqlalchemy import Engine

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockExecutor,
    TaskLockOptionError,
    TaskLocks,
)
from tests.support import claims, pool_jobs
from tests.support.claims import row
from tests.support.internals import instances
from tests.support.polling import eventually
from tests.support.schedulers import Replica

MakeReplica = Callable[..., Replica]

RUN = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]
RAISED = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_ERROR, EVENT_TASK_LOCK_RELEASED]


@pytest.fixture(params=["spawn", "fork"])
def pool(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of a process pool; fork is the default of APScheduler 3.10, spawn of 3.11."""
    context = multiprocessing.get_context(request.param)
    return {"max_workers": 1, "pool_kwargs": {"mp_context": context}}


@pytest.fixture
def make_pooled(make_replica: MakeReplica, pool: dict[str, Any]) -> MakeReplica:
    def make(*arguments: Any, **options: Any) -> Replica:
        return make_replica(*arguments, executor="processpool", **pool, **options)

    return make


def test_a_run_is_claimed_in_the_worker_and_told_in_the_scheduler(
    make_pooled: MakeReplica, connection: psycopg.Connection[Any]
) -> None:
    one, other = make_pooled(replica_id="one"), make_pooled(replica_id="other")
    one.run_once(pool_jobs.lock_and_process, kwargs={"a": 1, "task_lock": {"max_factor": 2}})
    executed = one.one(EVENT_JOB_EXECUTED)
    one.idle()
    other.run_once(pool_jobs.lock_and_process)
    refused = other.one(EVENT_TASK_LOCK_REFUSED)
    other.idle()

    assert one.codes() == RUN
    granted = one.of()[0]
    *lock, pid, kwargs = executed.retval
    token, until = row(connection)["token"], granted.locked_until
    assert lock == ["job", token, executed.scheduled_run_time, until, False]
    assert pid != os.getpid()
    assert kwargs == {"a": 1}
    assert granted.holder == f"one worker {pid}"
    assert row(connection)["run_until"] - row(connection)["started_at"] == timedelta(hours=2)
    assert other.codes() == [EVENT_TASK_LOCK_REFUSED]
    assert (refused.holder, refused.reason) == (granted.holder, "window")


@pytest.mark.parametrize(
    ("function", "exception"), [(pool_jobs.fail, ValueError), (pool_jobs.leave, SystemExit)]
)
def test_a_run_that_raises_is_released(
    make_pooled: MakeReplica,
    connection: psycopg.Connection[Any],
    function: Callable[[], None],
    exception: type[BaseException],
) -> None:
    replica = make_pooled()
    replica.run_once(function)
    error = replica.one(EVENT_JOB_ERROR)
    replica.idle()
    assert replica.codes() == RAISED
    assert isinstance(error.exception, exception)
    assert f"in {function.__name__}" in error.traceback
    assert row(connection)["finished_at"] is not None


def test_a_decorated_function_has_its_options_in_the_worker(
    make_pooled: MakeReplica, connection: psycopg.Connection[Any]
) -> None:
    replica = make_pooled()
    replica.run_once(pool_jobs.decorated, args=[7])
    assert replica.one(EVENT_JOB_EXECUTED).retval == 7
    assert row(connection)["window_until"] - row(connection)["window_start"] == timedelta(
        minutes=30
    )


def test_the_lease_of_a_killed_worker_is_ended_by_its_parent_and_the_pool_goes_on(
    make_pooled: MakeReplica, connection: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_pooled()
    replica.run_once(pool_jobs.die)
    eventually(
        lambda: connection.execute("SELECT FROM task_lock WHERE kind IS NOT NULL").rowcount == 1
    )
    replica.idle()
    eventually(lambda: row(connection)["over"])
    assert row(connection)["finished_at"] is None
    assert not row(connection)["handed_over"]  # it may have run in part
    eventually(lambda: "the worker process that ran it is dead" in caplog.text)
    replica.run_once(pool_jobs.decorated, job_id="next", args=[1])
    assert replica.one(EVENT_JOB_EXECUTED, "next").retval == 1


@pytest.mark.direct("it counts the library's connections in the server")
def test_workers_leave_no_connection_behind(
    make_pooled: MakeReplica, connection: psycopg.Connection[Any]
) -> None:
    replica = make_pooled()
    replica.run_once(pool_jobs.decorated, args=[1])
    replica.one(EVENT_JOB_EXECUTED)
    replica.scheduler.shutdown()

    def connections() -> int:
        found = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'tasklock %'"
        ).fetchone()
        assert found is not None
        return int(found[0])

    assert eventually(lambda: connections() == 0)


def test_a_forked_child_does_not_use_its_parents_connection(
    make_pooled: MakeReplica, make_replica: MakeReplica
) -> None:
    """The parent has an idle connection when the pool forks its worker."""
    replica = make_replica()
    replica.run_once(lambda: None)
    replica.one(EVENT_JOB_EXECUTED)
    pooled = make_pooled(replica.executor.locks.settings.database)
    pooled.run_once(pool_jobs.decorated, job_id="pooled", args=[1])
    pooled.one(EVENT_JOB_EXECUTED, "pooled")
    replica.run_once(lambda: 2, job_id="after")
    assert replica.one(EVENT_JOB_EXECUTED, "after").retval == 2


def test_an_engines_url_serves_the_workers(engine: Engine, make_pooled: MakeReplica) -> None:
    replica = make_pooled(engine)
    replica.run_once(pool_jobs.decorated, args=[1])
    assert replica.one(EVENT_JOB_EXECUTED).retval == 1


def test_a_worker_doubts_what_its_parent_doubts(
    make_pooled: MakeReplica,
    known_task: Callable[[str], None],
    connection: psycopg.Connection[Any],
) -> None:
    """It may not have asked anything in an outage that its parent has seen."""
    replica = make_pooled()
    replica.run_once(pool_jobs.decorated, args=[1])
    replica.one(EVENT_JOB_EXECUTED)
    eventually(lambda: replica.executor.locks.stable)

    def first_told_of(task: str) -> int:
        """Run a task whose holder died, by the look of its row."""
        known_task(task)
        dies = "finished_at = NULL, run_until = now() + interval '1 hour'"
        connection.execute(f"UPDATE task_lock SET {dies} WHERE task_name = %s", [task])
        replica.run_once(pool_jobs.decorated, job_id=task, args=[1])
        code: int = eventually(lambda: replica.codes(task))[0]
        return code

    assert first_told_of("believed") == EVENT_TASK_LOCK_GRANTED
    replica.executor.locks.doubt()
    assert first_told_of("doubted") == EVENT_TASK_LOCK_REFUSED


def test_a_pool_can_be_given_as_an_instance(make_replica: MakeReplica, database_url: str) -> None:
    from apscheduler.executors.pool import ProcessPoolExecutor

    replica = make_replica(database_url, ProcessPoolExecutor(1))
    assert isinstance(replica.executor, TaskLockExecutor)
    replica.run_once(pool_jobs.decorated, args=[1])
    assert replica.one(EVENT_JOB_EXECUTED).retval == 1


def test_what_waits_for_a_worker_is_not_claimed_after_the_shutdown(
    make_pooled: MakeReplica, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """Up to two fires are on their way to the one worker by then; the pool keeps it busy."""
    go_on = tmp_path / "go on"
    replica = make_pooled()
    for number in range(6):
        replica.run_once(pool_jobs.wait_for, args=[str(go_on)], job_id=f"job {number}")
    eventually(lambda: len(instances(replica.executor)) == 6)
    eventually(
        lambda: connection.execute("SELECT FROM task_lock WHERE kind IS NOT NULL").rowcount == 1
    )
    stopping = threading.Thread(target=replica.scheduler.shutdown)
    stopping.start()
    eventually(lambda: replica.executor.locks.closed)
    go_on.touch()
    stopping.join(60)
    claimed = connection.execute(
        "SELECT task_name FROM task_lock WHERE kind IS NOT NULL"
    ).fetchall()
    assert {("job 0",)} <= set(claimed) <= {("job 0",), ("job 1",), ("job 2",)}
    assert not instances(replica.executor)


def test_a_worker_keeps_and_redacts_history_as_it_is_told_on_one_connection(
    make_pooled: MakeReplica, connection: psycopg.Connection[Any], database_url: str
) -> None:
    replica = make_pooled(redact=partial(pool_jobs.redacted, "redacted"))
    pids = set()
    for number in range(3):
        replica.run_once(pool_jobs.fail, job_id=f"job {number}")
        replica.one(EVENT_JOB_ERROR, f"job {number}")
        pids |= claims.pids(connection)
    replica.run_once(pool_jobs.lock_and_process, job_id="well")
    replica.one(EVENT_JOB_EXECUTED, "well")
    with closing(TaskLocks(database_url)) as operator:
        errors = [run.error for run in operator.runs() if run.task != "well"]
        assert errors == ["redacted ValueError"] * 3
    assert len(pids) == 2  # the scheduler's own, and the worker's


@pytest.mark.parametrize(
    "redact", [lambda error: "no", partial(pool_jobs.redacted, threading.Lock())]
)
def test_what_a_worker_cannot_have_is_refused_at_the_start(
    make_pooled: MakeReplica, redact: Any
) -> None:
    with pytest.raises(TaskLockOptionError, match="redact must be a function that worker"):
        make_pooled(redact=redact)


SLOW = """
import sys, time

class Slowly:
    def find_spec(self, name, path, target=None):
        if name == "sqlalchemy":
            time.sleep(8)

sys.meta_path.insert(0, Slowly())
"""


def test_that_a_new_worker_loads_the_library_makes_no_run_time_late(
    make_replica: MakeReplica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain APScheduler's does not, and has begun a job by then."""
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spawn = {"mp_context": multiprocessing.get_context("spawn")}
    one = make_replica(executor="processpool", max_workers=1, pool_kwargs=spawn)
    one.run_once(pool_jobs.lock_and_process, misfire_grace_time=7)
    eventually(one.codes)
    one.idle()
    assert one.codes() == RUN
