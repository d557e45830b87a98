"""The contract of claim and release, against the statements that ship, in travelled time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from apscheduler_tasklock import TaskLockError, upgrade
from apscheduler_tasklock.protocol import TaskLockProtocol
from apscheduler_tasklock.table import task_lock_table
from tests.contract.conftest import Replica, database_now, row

Travel = Callable[[float], None]


class TestClaim:
    def test_an_unknown_task_is_granted(
        self, one: Replica, connection: psycopg.Connection[Any]
    ) -> None:
        claim_id, answer = one.claim(lag=2, min_lock=9, max_lock=50)
        now = database_now(connection)

        assert answer.granted
        assert row(connection) == {
            "task_name": "task",
            "started_at": now,
            "locked_until": now + timedelta(seconds=50),
            "window_start": now - timedelta(seconds=2),
            "window_until": now + timedelta(seconds=7),
            "locked_by": "one",
            "claim_id": claim_id,
            "token": int(now.timestamp() * 1000),
            "finished_at": None,
            "run_until": now + timedelta(seconds=50),
            "failover": False,
            "deaths": 0,
            "handovers": 0,
            "handed_over": False,
            "runs": "jobs:job",
            "one_off": False,
        }
        assert (answer.holder, answer.token) == ("one", int(now.timestamp() * 1000))
        assert answer.locked_until == answer.run_until == now + timedelta(seconds=50)

    def test_a_later_claim_sets_every_column_anew(
        self, one: Replica, other: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        first, before = one.claim()
        one.release(first)
        travel(20)
        claim_id, answer = other.claim(
            lag=1, min_lock=5, max_lock=30, lease=7, runs="jobs:new", one_off=True, failover=True
        )
        now = database_now(connection)

        assert answer.granted
        assert row(connection) == {
            "task_name": "task",
            "started_at": now,
            "locked_until": now + timedelta(seconds=7),
            "window_start": now - timedelta(seconds=1),
            "window_until": now + timedelta(seconds=4),
            "locked_by": "other",
            "claim_id": claim_id,
            "token": before.token + 1,
            "finished_at": None,
            "run_until": now + timedelta(seconds=30),
            "failover": True,
            "deaths": 0,
            "handovers": 0,
            "handed_over": False,
            "runs": "jobs:new",
            "one_off": True,
        }

    def test_it_is_refused_while_the_task_runs(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        _, first = one.claim()
        travel(20)  # two windows later: only the run stands against it
        _, answer = other.claim()

        assert not answer.granted
        assert answer.running
        assert (answer.holder, answer.token) == ("one", first.token)
        assert answer.locked_until == first.locked_until

    def test_it_is_granted_after_the_maximum_lock(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        one.claim(max_lock=50)
        travel(49.999)
        assert not other.granted()
        travel(0.001)
        assert other.granted()

    def test_it_is_refused_after_an_early_release_until_the_window_ends(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(min_lock=9)
        travel(2)
        one.release(claim_id)
        travel(6.999)
        _, answer = other.claim(min_lock=9)
        assert not answer.granted
        assert not answer.running
        travel(0.001)
        assert other.granted(min_lock=9)

    def test_it_is_granted_right_after_a_late_release(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(min_lock=9)
        travel(25)
        assert not other.granted()
        one.release(claim_id)
        assert other.granted()

    def test_without_a_minimum_lock_it_is_granted_right_after_each_release(
        self, one: Replica, other: Replica
    ) -> None:
        for _ in range(10):
            claim_id, answer = one.claim(min_lock=0)
            assert answer.granted
            assert not other.granted(min_lock=0)
            one.release(claim_id)

    def test_two_tasks_are_independent(self, one: Replica, other: Replica) -> None:
        assert one.granted("first")
        assert other.granted("second")
        assert not other.granted("first")

    def test_the_token_grows_by_one_with_each_claim_and_not_with_a_refusal(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        tokens = []
        for _ in range(3):
            claim_id, answer = one.claim()
            tokens.append(answer.token)
            assert not other.granted()
            one.release(claim_id)
            travel(10)
        assert tokens == [tokens[0], tokens[0] + 1, tokens[0] + 2]

    def test_the_same_claim_asked_twice_is_granted_once(
        self, one: Replica, other: Replica, connection: psycopg.Connection[Any]
    ) -> None:
        claim_id, first = one.claim()
        before = row(connection)
        _, again = one.claim(claim_id=claim_id)

        assert again.granted
        assert again.token == first.token
        assert row(connection) == before
        assert not other.granted()

    @pytest.mark.parametrize("keep_window", [True, False])
    def test_a_claim_held_up_until_after_its_release_is_not_granted_again(
        self, one: Replica, travel: Travel, keep_window: bool
    ) -> None:
        claim_id, _ = one.claim()
        one.release(claim_id, keep_window=keep_window)
        travel(20)
        assert not one.granted(claim_id=claim_id)
        assert one.granted()

    def test_a_refused_claim_leaves_the_row_as_it_is(
        self, one: Replica, other: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        one.claim()
        before = row(connection)
        travel(1)
        assert not other.granted()
        assert row(connection) == before

    @pytest.mark.parametrize(
        "task", ['"; DROP TABLE task_lock; --', "job's", "任務 🔒", "%s %(x)s", "x" * 1000]
    )
    def test_any_name_that_postgresql_can_store_is_a_task(
        self, one: Replica, other: Replica, task: str, connection: psycopg.Connection[Any]
    ) -> None:
        assert one.granted(task)
        assert not other.granted(task)
        assert row(connection, task)["locked_by"] == "one"


class TestWindow:
    def test_a_late_claim_owns_the_window_of_its_run_time_not_of_its_claim(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        travel(8)
        claim_id, _ = one.claim(lag=8, min_lock=9)  # for the run time 0, claimed at 8
        one.release(claim_id)
        travel(2)
        assert other.granted(min_lock=9)  # for the run time 10

    def test_a_starved_claim_does_not_repeat_a_window(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        one.release(one.claim()[0])  # the run time 0
        travel(3600)
        assert not other.granted(lag=3600)  # the run time 0 again, an hour late
        assert other.granted(lag=0)

    def test_a_starved_claim_does_not_repeat_a_window_before_the_last(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        for _ in range(3):
            one.release(one.claim()[0])
            travel(10)
        assert not other.granted(lag=20)
        assert not other.granted(lag=10)

    def test_a_backlog_runs_each_of_its_windows_once(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        travel(30)
        runs = []
        for lag in (30, 20, 10, 0):
            for replica in (one, other):
                claim_id, answer = replica.claim(lag=lag)
                if answer.granted:
                    runs.append(lag)
                    replica.release(claim_id)
        assert runs == [30, 20, 10, 0]

    def test_a_shortened_interval_takes_effect_at_once(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(min_lock=0.9 * 3600, max_lock=5 * 3600)
        one.release(claim_id)
        travel(60)
        assert not one.granted(min_lock=0.9 * 3600)  # a replica with the old interval
        assert other.granted(min_lock=0.9 * 60)  # one with the new

    def test_a_lengthened_interval_takes_effect_with_the_next_claim(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        one.release(one.claim(min_lock=9)[0])
        travel(10)
        other.release(other.claim(min_lock=54)[0])
        travel(50)
        assert not other.granted(min_lock=54)
        travel(10)
        assert other.granted(min_lock=54)

    def test_a_claim_held_up_on_its_way_does_not_look_newer_than_it_is(
        self, one: Replica, other: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        one.release(one.claim()[0])  # the run time 0
        when_asked = database_now(connection)  # what the other replica's clock bound says
        travel(30)  # its statement arrives 30 s later, and still says that it is not late
        assert not other.granted(lag=0, latest=when_asked)
        assert other.granted(lag=0, latest=database_now(connection))


class TestRelease:
    def test_it_keeps_the_row_until_the_windows_end(
        self, one: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        claim_id, _ = one.claim(min_lock=9)
        travel(2)
        answer = one.release(claim_id)
        now = database_now(connection)

        assert answer is not None
        assert answer.locked_until == now + timedelta(seconds=7)
        assert row(connection)["locked_until"] == answer.locked_until
        assert row(connection)["finished_at"] == now

    def test_a_late_one_ends_the_lock_now(
        self, one: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        claim_id, _ = one.claim(min_lock=9)
        travel(20)
        answer = one.release(claim_id)
        assert answer is not None
        assert answer.locked_until == database_now(connection)

    def test_a_former_holders_changes_nothing(
        self, one: Replica, other: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        claim_id, _ = one.claim(max_lock=50)
        travel(60)
        assert other.granted()
        before = row(connection)

        assert one.release(claim_id) is None
        assert row(connection) == before

    def test_an_expired_claim_that_nobody_took_is_still_released(
        self, one: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        claim_id, _ = one.claim(max_lock=50)
        travel(60)
        assert one.release(claim_id) is not None
        assert row(connection)["finished_at"] == database_now(connection)

    def test_an_unknown_claim_changes_nothing(
        self, one: Replica, connection: psycopg.Connection[Any]
    ) -> None:
        one.claim()
        before = row(connection)
        assert one.release(uuid4()) is None
        assert one.release(uuid4(), "unknown") is None
        assert row(connection) == before

    @pytest.mark.parametrize("keep_window", [True, False])
    def test_sent_twice_it_releases_once(
        self,
        one: Replica,
        connection: psycopg.Connection[Any],
        keep_window: bool,
        travel: Travel,
    ) -> None:
        claim_id, _ = one.claim()
        travel(1)
        one.release(claim_id, keep_window=keep_window)
        before = row(connection)
        travel(1)
        assert one.release(claim_id, keep_window=keep_window) is not None
        after = row(connection)
        assert {**after, "locked_until": None} == {**before, "locked_until": None}

    def test_that_opens_the_window_lets_the_same_run_time_run_again(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        claim_id, _ = one.claim()
        travel(2)
        answer = one.release(claim_id, keep_window=False)
        assert answer is not None
        assert answer.locked_until == answer.database_time
        assert other.granted(lag=2.1)  # the same run time, a little earlier by its clock

    def test_that_opens_the_window_does_not_open_the_one_before(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        one.release(one.claim()[0])
        travel(10)
        one.release(one.claim()[0], keep_window=False)
        assert not other.granted(lag=10)


@pytest.mark.parametrize("name", ["locks", 'My "locks"', "100% locks", "Größe"])
def test_any_schema_and_table_name_will_do(empty_database_url: str, name: str) -> None:
    upgrade(empty_database_url, schema=name, table=name)
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        replica = Replica("one", connection)
        replica.protocol = TaskLockProtocol(task_lock_table(name, name))
        claim_id, answer = replica.claim()
        assert answer.granted
        assert not replica.granted()
        assert replica.release(claim_id) is not None


def test_a_row_that_can_be_neither_read_nor_inserted_is_told(
    one: Replica, connection: psycopg.Connection[Any]
) -> None:
    connection.execute(
        "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TRIGGER swallow BEFORE INSERT ON task_lock"
        " FOR EACH ROW EXECUTE FUNCTION nothing()"
    )
    with pytest.raises(TaskLockError, match="'task': its row can be neither read nor inserted"):
        one.claim()
