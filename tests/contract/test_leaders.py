"""Who leads: one replica of a namespace at a time, for as long as it renews."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.statements import LEADER
from apscheduler_tasklock.schema.table import task_lock_table
from apscheduler_tasklock.status import ReplicaState, ReplicaStatus
from tests.contract.conftest import database_now, row
from tests.support.waist import Lead, Memory, Replica, Resign, TaskRow, raw_cursor

Travel = Callable[[float], None]

ROW = LEADER + "shop:"


def leads(replica: Replica, lease: float = 15.0, name: str = ROW) -> bool:
    return bool(replica.ask(Lead(name, replica.name, lease)))


def resign(replica: Replica) -> None:
    replica.ask(Resign(ROW, replica.name))


def seen(replica: Replica) -> TaskRow | None:
    return replica.read(ROW, always=(ROW,)).get(ROW)


def test_the_first_one_leads_until_its_lease_ends(
    one: Replica, other: Replica, travel: Travel
) -> None:
    assert leads(one)
    assert not leads(other)
    travel(14)
    assert not leads(other)
    travel(1)
    assert leads(other)
    assert not leads(one)


def test_who_renews_leads_on_and_its_time_counts_from_the_beginning(
    one: Replica, other: Replica, travel: Travel, connection: Any
) -> None:
    began = database_now(connection)
    leads(one)
    for _ in range(3):
        travel(10)
        assert leads(one)
        assert not leads(other)
    assert row(connection, ROW)["started_at"] == began
    travel(16)  # so that anybody could have led meanwhile
    assert leads(one)
    assert row(connection, ROW)["started_at"] == database_now(connection)


def test_who_resigns_is_followed_at_once(one: Replica, other: Replica) -> None:
    leads(one)
    resign(other)
    assert not leads(other)
    resign(one)
    assert leads(other)
    resign(one)
    assert leads(other)


@pytest.mark.postgresql
def test_a_lease_that_no_replica_writes_is_none(
    one: Replica, other: Replica, connection: psycopg.Connection[Any]
) -> None:
    leads(one)
    for until, is_led in (("now() + interval '3600 s'", True), ("'9999-12-30Z'", False)):
        connection.execute(f"UPDATE task_lock SET locked_until = {until}".encode())
        assert leads(other) is not is_led


def test_namespaces_have_leaders_of_their_own(one: Replica, other: Replica) -> None:
    assert leads(one)
    assert leads(other, name=LEADER)


def test_a_look_sees_who_leads(one: Replica, other: Replica, travel: Travel) -> None:
    assert seen(other) is None
    leads(one)
    found = seen(other)
    assert found is not None
    assert (found.holder, found.finished, found.dead) == ("one", False, False)
    travel(15)
    found = seen(other)
    assert found is not None
    assert found.dead
    leads(one)
    resign(one)
    found = seen(other)
    assert found is not None
    assert found.finished


def test_random_histories_are_the_same_in_sql_and_in_the_rule(
    one: Replica, other: Replica, travel: Travel, connection: Any, rng: random.Random
) -> None:
    memory = Memory(database_now(connection))
    twins = {each: Replica(each.name, memory) for each in (one, other)}
    for _ in range(200):
        replica = rng.choice([one, other])
        what = rng.randrange(3)
        if what == 0:
            seconds = rng.choice([1, 5, 15, 20])
            travel(seconds)
            if connection is not memory:
                memory.time = database_now(connection)
        elif what == 1:
            lease = rng.choice([10.0, 15.0])
            assert leads(replica, lease) == leads(twins[replica], lease)
        else:
            resign(replica)
            resign(twins[replica])
        if ROW in memory.locks.rows:
            columns = ("locked_by", "started_at", "locked_until", "run_until", "finished_at")
            ours, theirs = row(connection, ROW), row(memory, ROW)
            assert {name: ours[name] for name in columns} == {
                name: theirs[name] for name in columns
            }


@pytest.mark.postgresql
class TestOperators:
    """What operators see of it."""

    @pytest.fixture
    def replicas(self, connection: psycopg.Connection[Any]) -> Callable[[], list[ReplicaStatus]]:
        operations = Operations(task_lock_table())
        return lambda: operations.replicas(raw_cursor(connection))

    @pytest.fixture(autouse=True)
    def reported(self, one: Replica, other: Replica) -> None:
        for replica in (one, other):
            replica.alive(["shop:job"], leader_namespace="shop:")

    def test_the_leader_is_told_and_nobody_where_its_lease_has_ended(
        self, one: Replica, travel: Travel, replicas: Callable[[], list[ReplicaStatus]]
    ) -> None:
        leads(one)
        told = {each.replica_id: (each.leads, each.leaderless_for) for each in replicas()}
        assert told == {"one": (True, None), "other": (False, None)}
        travel(20)
        told = {each.replica_id: (each.leads, each.leaderless_for) for each in replicas()}
        assert told == {"one": (False, 5.0), "other": (False, 5.0)}

    def test_a_lease_until_the_year_9999_is_told_as_none(
        self, one: Replica, connection: Any, replicas: Callable[[], list[ReplicaStatus]]
    ) -> None:
        leads(one)
        connection.execute("UPDATE task_lock SET locked_until = '9999-12-30Z'")
        assert [(each.leads, each.leaderless_for) for each in replicas()] == [(False, 0.0)] * 2

    def test_nobody_may_ever_have_led(
        self, travel: Travel, replicas: Callable[[], list[ReplicaStatus]]
    ) -> None:
        """As where the row is rejected."""
        travel(20)
        assert [each.leaderless_for for each in replicas()] == [20.0, 20.0]

    def test_an_ended_leadership_is_no_death_of_a_run(
        self, one: Replica, travel: Travel, replicas: Callable[[], list[ReplicaStatus]]
    ) -> None:
        leads(one)
        travel(40)  # silent for less than 45 s, and its lease has ended after it was last seen
        assert [each.state for each in replicas()] == [ReplicaState.ALIVE] * 2
        assert [each.running for each in replicas()] == [(), ()]

    def test_the_row_is_no_task(self, one: Replica, connection: psycopg.Connection[Any]) -> None:
        leads(one)
        operations = Operations(task_lock_table())
        assert operations.tasks(raw_cursor(connection)) == []
