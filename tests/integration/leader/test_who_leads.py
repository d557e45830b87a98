"""Who leads, as operators see it: ``replicas``, ``check``, and the metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import TaskLockExecutor, TaskLockOptionError, TaskLocks
from apscheduler_tasklock.metrics import metric_values, prometheus_text
from tests.support.commands import Command
from tests.support.polling import eventually
from tests.support.rows import add_replica, add_task
from tests.support.schedulers import Replica

Connection = psycopg.Connection[Any]
MakeReplica = Callable[..., Replica]


@pytest.fixture
def leader(make_replica: MakeReplica) -> Replica:
    replica = make_replica(leader=True, namespace="shop:", replica_id="web-1")
    replica.scheduler.add_job(print, "interval", hours=1, id="sync")
    eventually(lambda: replica.executor.is_leader)
    return replica


@pytest.fixture
def reported(leader: Replica, make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    """Reads what operators see, once the leader has reported itself."""
    locks = make_task_locks()
    eventually(locks.replicas)
    return locks


def test_replicas_says_who_leads(
    command: Command, reported: TaskLocks, make_replica: MakeReplica
) -> None:
    follower = make_replica(leader=True, namespace="shop:", replica_id="web-2")
    follower.scheduler.add_job(print, "interval", hours=1, id="sync")
    make_replica(replica_id="plain")
    eventually(lambda: len([each for each in reported.replicas() if each.leader_namespace]) == 2)
    eventually(lambda: len(reported.replicas()) == 3)
    found = {each.replica_id: (each.leader_namespace, each.leads) for each in reported.replicas()}
    assert found == {"web-1": ("shop:", True), "web-2": ("shop:", False), "plain": (None, False)}
    shown = {line.split()[0]: line for line in command("replicas").out.splitlines()}
    assert "alive, leads" in shown["web-1"]
    assert "leads" not in shown["web-2"]
    told = {each["replica_id"]: each for each in json.loads(command("replicas", "--json").out)}
    assert (told["web-1"]["leads"], told["web-2"]["leads"]) == (True, False)


def test_the_row_of_the_leader_is_in_no_list_of_tasks(
    command: Command, leader: Replica, reported: TaskLocks, connection: Connection
) -> None:
    eventually(reported.tasks)
    assert [task.name for task in reported.tasks()] == ["shop:sync"]
    assert "leader" not in command("status").out
    overdue = metric_values(reported)["tasklock_task_overdue"]
    assert overdue == {"shop:sync": 0.0}
    assert command("forget", "\x01leader:shop:").status == 4


@pytest.mark.parametrize(
    ("ended", "status"), [("interval '5 s'", 0), ("interval '35 s'", 1)], ids=["just", "for long"]
)
def test_check_warns_if_replicas_follow_and_nobody_leads(
    command: Command, connection: Connection, ended: str, status: int
) -> None:
    add_task(connection, "shop:sync")
    add_replica(connection, "web-1", ["shop:sync"], leader_namespace="'shop:'")
    until = f"now() - {ended}"
    add_task(
        connection,
        "\x01leader:shop:",
        locked_by="'web-0'",
        locked_until=until,
        run_until=until,
        finished_at="NULL",
    )
    answer = command("check")
    assert answer.status == status
    # The check may come some seconds later.
    assert bool(re.search(r"nobody leads 'shop:' for (3[5-9]|[45]\d) s", answer.out)) == (
        status == 1
    )
    assert command("check", "other*").status == 3
    connection.execute("UPDATE task_lock_replica SET leader_namespace = NULL")
    assert command("check").status == 0


def test_check_waits_longer_for_a_leader_of_hundreds_of_replicas(
    command: Command, connection: Connection
) -> None:
    """Their looks come less often, so that it takes longer until one of them leads."""
    add_task(connection, "shop:sync")
    for number in range(300):
        add_replica(connection, f"web-{number}", ["shop:sync"], leader_namespace="'shop:'")
    # One of a few replicas would be missed after 30 s. The check may come some seconds later.
    for seconds, status in [(31, 0), (50, 1)]:
        started = f"now() - interval '{seconds} s'"
        connection.execute(f"UPDATE task_lock_replica SET started_at = {started}")
        assert command("check").status == status


def test_the_metric_is_1_while_somebody_leads(reported: TaskLocks, connection: Connection) -> None:
    assert metric_values(reported)["tasklock_leader"] == {"shop:": 1.0}
    assert 'tasklock_leader{tasklock_namespace="shop:"} 1.0' in prometheus_text(reported)
    connection.execute("UPDATE task_lock_replica SET leader_namespace = 'other:'")
    assert metric_values(reported)["tasklock_leader"] == {"other:": 0.0}


def test_without_leader_mode_nobody_leads(make_replica: MakeReplica) -> None:
    replica = make_replica()
    assert not replica.executor.is_leader
    off = make_replica(leader=True, enabled=False)
    assert not off.executor.is_leader


@pytest.mark.parametrize("lease", [0, 0.5, 3601, "no"])
def test_an_impossible_lease_of_a_leader_is_refused(lease: Any) -> None:
    with pytest.raises(TaskLockOptionError, match="leader_lease must be"):
        TaskLockExecutor("postgresql://nowhere/app", leader=True, leader_lease=lease)
    with pytest.raises(TaskLockOptionError, match="leader must be"):
        TaskLockExecutor("postgresql://nowhere/app", leader="perhaps")
