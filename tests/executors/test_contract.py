"""What holds for every executor that the task lock executor wraps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_JOB_MAX_INSTANCES,
    EVENT_JOB_MISSED,
)
from apscheduler.util import obj_to_ref

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
)
from apscheduler_tasklock.errors import TaskLockOptionError
from tests.executors import jobs
from tests.support.claims import LaterThan, end_lease
from tests.support.hosts import Host
from tests.support.internals import instances
from tests.support.polling import eventually
from tests.support.schedulers import Replica
from tests.support.waist import IN_TIME, ClaimRequest, statements_of

MakeReplica = Callable[..., Replica]
Jobs = Callable[[str], Callable[..., Any]]
Connection = psycopg.Connection[Any]

RUN = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]
RAISED = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_ERROR, EVENT_TASK_LOCK_RELEASED]


def unreleased(connection: Connection) -> int:
    return connection.execute("SELECT FROM task_lock WHERE finished_at IS NULL").rowcount


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the executors' loggers said, without the job's description."""
    return [
        record.getMessage().split(' "')[0] + " " + record.getMessage().split(" ")[-1]
        for record in caplog.records
        if record.name.startswith("apscheduler.executors")
    ]


def test_a_job_is_granted_on_one_replica_and_refused_on_the_other(
    make_replica: MakeReplica, job: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one, other = make_replica(replica_id="one"), make_replica(replica_id="other")
    one.run_once(job("token"), kwargs={"a": 1, "task_lock": {"max_factor": 2}})
    executed = one.one(EVENT_JOB_EXECUTED)
    one.idle()
    caplog.clear()
    other.run_once(job("token"))
    refused = other.one(EVENT_TASK_LOCK_REFUSED)
    other.idle()

    assert one.codes() == RUN
    assert executed.retval == (one.of()[0].token, {"a": 1})
    assert executed.scheduled_run_time == one.of()[0].scheduled_run_time
    assert other.codes() == [EVENT_TASK_LOCK_REFUSED]
    assert refused.reason == "window"
    assert refused.holder == "one"
    assert logged(caplog) == []


def test_a_job_that_raises_is_released_and_its_exception_logged(
    make_replica: MakeReplica, job: Jobs, connection: Connection
) -> None:
    replica = make_replica()
    replica.run_once(job("fail"))
    error = replica.one(EVENT_JOB_ERROR)
    replica.idle()
    assert replica.codes() == RAISED
    assert isinstance(error.exception, ValueError)
    assert f"in {job('fail').__name__}" in error.traceback
    assert unreleased(connection) == 0


def test_a_job_that_raises_is_retried_and_may_give_up(make_replica: MakeReplica, job: Jobs) -> None:
    """Its exceptions come out of a worker process, where it knows which attempt it is."""
    replica = make_replica(retries=5, retry_delay=600, poll_interval=0.2)
    replica.run_once(job("succeed_at_the_third_attempt"))
    assert replica.one(EVENT_JOB_EXECUTED).retval == 3
    replica.run_once(job("give_up"), job_id="other")
    replica.one(EVENT_JOB_ERROR, "other")
    assert replica.one(EVENT_TASK_LOCK_RELEASED, "other").retry_at is None


def test_a_misfire_is_reported_and_claims_nothing(
    make_replica: MakeReplica, job: Jobs, connection: Connection
) -> None:
    replica = make_replica()
    late = datetime.now(timezone.utc) - timedelta(minutes=5)
    replica.run_once(job("token"), next_run_time=late, misfire_grace_time=60)
    replica.one(EVENT_JOB_MISSED)
    replica.idle()
    assert replica.codes() == [EVENT_JOB_MISSED]
    assert connection.execute("SELECT FROM task_lock WHERE kind IS NOT NULL").rowcount == 0


def test_several_run_times_at_once_run_each_window_once(
    make_replica: MakeReplica, job: Jobs, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    start = datetime.now(timezone.utc) - timedelta(seconds=45)
    for _ in range(2):
        replica = make_replica()
        replica.run_once(
            job("append_run_time"),
            args=[str(runs)],
            hours=0,
            seconds=10,
            start_date=start,
            next_run_time=start,
            coalesce=False,
        )
        eventually(lambda replica=replica: len(replica.of()) >= 5)
        replica.idle()
        replica.scheduler.pause()
    ran = [datetime.fromisoformat(line) for line in runs.read_text().splitlines()]
    expected = [start + timedelta(seconds=10 * number) for number in range(5)]
    assert ran[:5] == expected
    assert len(set(ran)) == len(ran)


def test_max_instances_means_what_it_did(
    host: Host, make_replica: MakeReplica, job: Jobs, tmp_path: Path
) -> None:
    if host.inline:
        pytest.skip("an executor that runs jobs inline never has two instances")
    go_on = tmp_path / "go on"
    # Of a period of 1 s, the maximum lock would be over before a slow machine has started a pool.
    replica = make_replica(jobs={"job": {"max_lock": 120}})
    replica.run_once(job("wait_for"), args=[str(go_on)], hours=0, seconds=1)
    eventually(lambda: [e for e in replica.events if e.code == EVENT_JOB_MAX_INSTANCES])
    replica.scheduler.remove_job("job")
    go_on.touch()
    replica.idle()
    assert replica.codes() == RUN


@pytest.mark.parametrize("wait", [True, False])
def test_shutdown_releases_what_runs_and_claims_nothing_new(
    host: Host,
    make_replica: MakeReplica,
    job: Jobs,
    connection: Connection,
    tmp_path: Path,
    wait: bool,
) -> None:
    if host.inline:
        pytest.skip("an executor that runs jobs inline is never shut down while one runs")
    go_on = tmp_path / "go on"
    replica = make_replica()
    late = replica.run_once(job("token"), job_id="late", next_run_time=None)
    replica.run_once(job("wait_for"), args=[str(go_on)])
    eventually((tmp_path / "go on begun").exists)
    assert unreleased(connection) == 1
    stopping = threading.Thread(target=lambda: host.shutdown(replica.scheduler, wait=wait))
    stopping.start()
    eventually(lambda: replica.executor.user.closed)
    host.submit_late(replica.executor, late)
    eventually(lambda: not instances(replica.executor).get("late"))
    go_on.touch()
    stopping.join(60)
    eventually(lambda: unreleased(connection) == 0)
    assert connection.execute(
        "SELECT task_name FROM task_lock WHERE kind IS NOT NULL"
    ).fetchall() == [("job",)]
    eventually(lambda: _connections(connection) == 0)


@pytest.mark.parametrize("value", ["x", jobs.async_callable], ids=["text", "object"])
def test_one_offs_without_an_id_run_each_time_without_a_lock(
    make_replica: MakeReplica, job: Jobs, connection: Connection, value: Any
) -> None:
    replica = make_replica()
    for _ in range(3):
        added = replica.scheduler.add_job(job("has_lock"), args=[value], misfire_grace_time=None)
        assert replica.one(EVENT_JOB_EXECUTED, added.id).retval is False
        replica.idle()
        assert replica.codes(added.id) == [EVENT_JOB_EXECUTED]
    assert connection.execute("SELECT FROM task_lock").rowcount == 0


def test_a_one_off_of_a_whole_second_without_an_id_runs_on_one_replica(
    make_replica: MakeReplica, job: Jobs
) -> None:
    date = datetime.now(timezone.utc).replace(microsecond=0)
    told = []
    for _ in range(2):
        replica = make_replica()
        added = replica.scheduler.add_job(
            job("has_lock"), "date", run_date=date, args=["x"], misfire_grace_time=None
        )
        eventually(lambda replica=replica, added=added: replica.of(added.id))
        replica.idle()
        told.append(replica.codes(added.id))
    assert told == [RUN, [EVENT_TASK_LOCK_REFUSED]]


NEVER_RUN = {
    "async-callable": jobs.async_callable,
    "partial-of-it": partial(jobs.async_callable),
    "async-generator": jobs.async_generator,
    "partial-of-generator": partial(jobs.generator),
}


@pytest.mark.parametrize("lock", [{}, False], ids=["lock", "no-lock"])
@pytest.mark.parametrize("function", NEVER_RUN.values(), ids=NEVER_RUN)
def test_a_job_whose_body_would_never_run_is_an_error(
    make_replica: MakeReplica,
    connection: Connection,
    caplog: pytest.LogCaptureFixture,
    function: Any,
    lock: Any,
) -> None:
    replica = make_replica(jobs={"job": lock})
    replica.run_once(function)
    error = replica.one(EVENT_TASK_LOCK_ERROR).exception
    assert isinstance(error, TaskLockOptionError)
    assert replica.codes() == [EVENT_TASK_LOCK_ERROR]
    assert f"Job 'job' will not run: {error}" in caplog.text
    assert connection.execute("SELECT FROM task_lock WHERE kind IS NOT NULL").rowcount == 0


def test_a_coroutine_runs_only_where_it_is_awaited(
    host: Host, make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica()
    replica.run_once(partial(jobs.Callable().method))
    if host.coroutines:
        assert replica.one(EVENT_JOB_EXECUTED).retval is True
        return
    eventually(lambda: replica.of() or "Error running job" in caplog.text)
    replica.idle()
    assert EVENT_JOB_EXECUTED not in replica.codes()
    assert "not await" in caplog.text


def test_a_function_that_has_only_made_a_coroutine_has_failed(
    make_replica: MakeReplica, job: Jobs, connection: Connection
) -> None:
    replica = make_replica()
    replica.run_once(job("makes_a_coroutine"))
    error = replica.one(EVENT_JOB_ERROR).exception
    assert "has returned a coroutine, which nobody awaits" in str(error)
    replica.idle()
    assert replica.codes() == RAISED
    [(error_type,)] = connection.execute("SELECT error_type FROM task_lock_run").fetchall()
    assert error_type.endswith("TaskLockOptionError")


def test_a_dead_holders_window_is_run_again(
    make_replica: MakeReplica, job: Jobs, connection: Connection
) -> None:
    replica = make_replica(lease=600, failover=True, poll_interval=0.3)
    replica.run_once(job("token"), job_id="first")  # what has to be started, is
    replica.one(EVENT_JOB_EXECUTED, "first")
    replica.executor.user.outage.believe()  # that it has seen the database for long enough
    # Nobody renews this claim, as that of a holder that was killed.
    died = statements_of("dead", connection).send(
        ClaimRequest(
            "job",
            min_lock=3240.0,
            max_lock=18000.0,
            lease=600.0,
            runs=obj_to_ref(job("token")),
            failover=True,
        ),
        IN_TIME,
    )
    assert died.granted
    replica.run_once(job("token"), kwargs={"a": 1})
    replica.one(EVENT_TASK_LOCK_REFUSED)
    end_lease(connection, "job")
    executed = replica.one(EVENT_JOB_EXECUTED)
    replica.idle()
    # Of the run that died it is told at no fixed place among these.
    [death] = [event for event in replica.of() if getattr(event, "outcome", None) == "died"]
    assert death.token == died.token
    told = [event for event in replica.of() if event is not death]
    assert [event.code for event in told] == [EVENT_TASK_LOCK_REFUSED, *RUN]
    assert executed.retval == (LaterThan(died.token), {"a": 1})
    assert told[1].reason == "takeover"
    assert unreleased(connection) == 0


def test_a_scheduler_can_be_started_again_after_shutdown(
    host: Host, make_replica: MakeReplica, job: Jobs
) -> None:
    replica = make_replica()
    replica.run_once(job("token"))
    replica.one(EVENT_JOB_EXECUTED)
    replica.idle()
    replica.shutdown()
    replica.start()
    replica.run_once(job("token"), job_id="again")
    replica.one(EVENT_JOB_EXECUTED, "again")


def _connections(connection: Connection) -> int:
    return connection.execute(
        "SELECT FROM pg_stat_activity WHERE application_name LIKE 'tasklock %'"
    ).rowcount
