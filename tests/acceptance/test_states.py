"""What operators are told of replicas that are killed or stopped, and of what ran on them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import TaskLocks, TaskState, TaskStatus
from apscheduler_tasklock.status import ReplicaState
from tests.acceptance.conftest import ReplicaProcess
from tests.acceptance.test_graceful_stop import daily
from tests.support.commands import Command
from tests.support.polling import eventually

StartReplica = Callable[..., ReplicaProcess]
Connection = psycopg.Connection[Any]


@pytest.fixture
def operator(database_url: str) -> Iterator[TaskLocks]:
    operator = TaskLocks(database_url)
    yield operator
    operator.close()


@pytest.fixture
def command(database_url: str, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(database_url, capsys)


def task(operator: TaskLocks) -> TaskStatus:
    [found] = operator.tasks("job")
    return found


def replica_states(operator: TaskLocks) -> list[ReplicaState]:
    return [replica.state for replica in operator.replicas()]


@pytest.mark.nightly
def test_a_replica_that_was_killed_has_died_once_another_is_heard_after_its_lease(
    start_replica: StartReplica, operator: TaskLocks, command: Command, tmp_path: Path
) -> None:
    job = daily(tmp_path, lease=2)
    killed = start_replica(**{**job, "executor": "threadpool", "function": "work"})
    killed.says("runs")
    eventually(lambda: replica_states(operator) == [ReplicaState.ALIVE])
    killed.signal(signal.SIGKILL)
    eventually(lambda: task(operator).state is TaskState.DEAD)
    start_replica(**job)
    eventually(lambda: replica_states(operator) == [ReplicaState.DIED, ReplicaState.ALIVE])
    told = command("show", "job").out
    assert "its lease ended after " in told
    assert "so far" not in told


@pytest.mark.parametrize("failover", [False, True])
def test_a_coroutine_that_a_deployment_cuts_is_told_until_somebody_runs_its_window(
    start_replica: StartReplica,
    operator: TaskLocks,
    command: Command,
    connection: Connection,
    tmp_path: Path,
    failover: bool,
) -> None:
    job = daily(tmp_path, failover=failover)
    stopped = start_replica(**job)
    stopped.says("runs")
    eventually(lambda: replica_states(operator) == [ReplicaState.ALIVE])
    stopped.stop()
    assert replica_states(operator) == [ReplicaState.STOPPED]
    assert task(operator).outcome == "cut"
    assert [run.outcome for run in operator.runs("job")] == ["cancelled"]
    told = command("show", "job").out
    assert ", cut by a stop after " in told
    assert "so far" not in told
    ago(connection, 200)  # less than half of its grace time of ten minutes
    assert task(operator).state is TaskState.CUT
    assert command("check").status == 0
    ago(connection, 110)
    assert (command("check").status, "1 cut (job " in command("check").out) == (1, True)
    if failover:
        other = start_replica(**job)
        other.says("runs")
        Path(tmp_path, str(other.runs[0].token)).touch()
        eventually(lambda: task(operator).state is TaskState.OK)
        assert command("check").status == 0


def ago(connection: Connection, seconds: float) -> None:
    """Let the last run have ended so many seconds sooner."""
    connection.execute(
        "UPDATE task_lock SET finished_at = finished_at - %(s)s * interval '1 second',"
        " started_at = started_at - %(s)s * interval '1 second',"
        " locked_until = locked_until - %(s)s * interval '1 second' * handed_over::int",
        {"s": seconds},
    )
