"""The contract of claim and release, against the statements that ship, in travelled time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from itertools import chain
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from apscheduler_tasklock import TaskLockError, upgrade
from apscheduler_tasklock._lock.statements import RecordingStatement, Statement
from apscheduler_tasklock.options import LONGEST_SECONDS
from tests.contract.conftest import database_now, row, token_at
from tests.support.rows import add_replica
from tests.support.waist import (
    ClaimAnswer,
    ClaimRequest,
    Claims,
    ClaimTimes,
    Replica,
    Reruns,
    manual_run_of,
    protocol_of,
    takeover_of,
)

Travel = Callable[[float], None]

# What a row tells that nobody has said anything else of.
NOTHING_ELSE = {
    "schedule": None,
    "due_at": None,
    "overdue_at": None,
    "overrun_at": None,
    "recorded": 0,
    "recorded_failures": 0,
    "recorded_actions": 0,
    "recorded_misses": 0,
    "missed_at": None,
    "succeeded_at": None,
    "failed_at": None,
    "failures": 0,
    "error_type": None,
    "paused_at": None,
    "paused_until": None,
    "pauses": None,
    "request_id": None,
    "requested_by": None,
    "requested_at": None,
    "request_until": None,
    "acknowledged_at": None,
    "last_outcome": None,
    "overran": False,
    "is_last": False,
    "window_schedule": None,
    "schedule_since": None,
    "details": None,
    "attempt": 1,
    "retry_at": None,
    "retry_of": None,
}


class TestClaim:
    def test_an_unknown_task_is_granted(
        self, one: Replica, connection: psycopg.Connection[Any]
    ) -> None:
        claim_id, answer = one.claim(
            lag=2,
            min_lock=9,
            max_lock=50,
            schedule="every 10 s",
            next_in=10,
            grace=20,
            max_runtime=40,
        )
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
            "token": token_at(now),
            "finished_at": None,
            "run_until": now + timedelta(seconds=50),
            "failover": False,
            "deaths": 0,
            "handovers": 0,
            "handed_over": False,
            "runs": "jobs:job",
            "one_off": False,
            **NOTHING_ELSE,
            "kind": "schedule",
            "schedule": "every 10 s",
            "due_at": now + timedelta(seconds=8),
            "overdue_at": now + timedelta(seconds=28),
            "overrun_at": now + timedelta(seconds=40),
        }
        assert (answer.holder, answer.token) == ("one", token_at(now))
        assert answer.locked_until == answer.run_until == now + timedelta(seconds=50)

    def test_a_later_claim_sets_every_column_anew(
        self, one: Replica, other: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        first, _ = one.claim(schedule="every 10 s", next_in=10)
        one.end(first, outcome="error", error_type="ValueError")
        failed_at = database_now(connection)
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
            "token": token_at(now),
            "finished_at": None,
            "run_until": now + timedelta(seconds=30),
            "failover": True,
            "deaths": 0,
            "handovers": 0,
            "handed_over": False,
            "runs": "jobs:new",
            "one_off": True,
            **NOTHING_ELSE,
            "kind": "schedule",
            "overdue_at": now + timedelta(seconds=59),
            "overrun_at": now + timedelta(seconds=30),
            "recorded_failures": 1,
            "failed_at": failed_at,
            "failures": 1,
            "error_type": "ValueError",
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

    def test_the_token_is_the_time_of_the_claim_and_a_refusal_leaves_it(
        self, one: Replica, other: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        for _ in range(3):
            claim_id, answer = one.claim()
            assert answer.token == token_at(database_now(connection))
            travel(1)
            assert not other.granted()
            assert row(connection)["token"] == answer.token
            one.release(claim_id)
            travel(9)

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


class TestExactRunTime:
    """Run times that every replica computes alike, as of a cron trigger."""

    def test_its_window_starts_at_the_run_time_itself(
        self, one: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        nominal = database_now(connection)
        travel(2)
        _, answer = one.claim(lag=4.5, run_time=nominal, min_lock=9)  # its clock is 2.5 s ahead
        assert answer.window_start == nominal
        assert row(connection)["window_until"] == nominal + timedelta(seconds=9)

    def test_its_time_zone_does_not_matter(
        self, one: Replica, connection: psycopg.Connection[Any]
    ) -> None:
        nominal = database_now(connection)
        _, answer = one.claim(run_time=nominal.astimezone(timezone(timedelta(hours=-7))))
        assert answer.window_start == nominal

    @pytest.mark.parametrize(
        ("off", "starts"), [(300, 300), (301, 300), (86400, 300), (-300, -300), (-301, -300)]
    )
    def test_more_than_five_minutes_from_the_databases_clock_it_is_not_believed(
        self, one: Replica, connection: psycopg.Connection[Any], off: float, starts: float
    ) -> None:
        reckoned = database_now(connection) - timedelta(seconds=2)
        _, answer = one.claim(lag=2, run_time=reckoned + timedelta(seconds=off))
        assert answer.window_start == reckoned + timedelta(seconds=starts)

    def test_a_claim_held_up_on_its_way_is_measured_from_when_it_was_sent(
        self, one: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        when_asked = database_now(connection)
        travel(3600)
        _, answer = one.claim(run_time=when_asked, latest=when_asked)
        assert answer.window_start == when_asked

    def test_two_run_times_closer_than_the_clocks_are_two_windows_and_each_runs_once(
        self, one: Replica, other: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        """As of ``second="0,1,30"``: the gap is 1 s and the clocks are 5 s apart."""
        start = database_now(connection)
        runs = []
        for seconds in (0, 1, 30, 60, 61, 90):
            nominal = start + timedelta(seconds=seconds)
            for replica, lag in ((one, 5.0), (other, 0.0)):  # one's clock is 5 s ahead
                claim_id, answer = replica.claim(lag=lag, run_time=nominal, min_lock=0.9)
                if answer.granted:
                    runs.append((seconds, replica.name))
                    replica.release(claim_id)
            travel({0: 1, 1: 29}.get(seconds % 60, 30))
        assert runs == [(seconds, "one") for seconds in (0, 1, 30, 60, 61, 90)]

    def test_without_a_minimum_lock_one_run_time_runs_once(
        self, one: Replica, other: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        nominal = database_now(connection)
        one.release(one.claim(run_time=nominal, min_lock=0)[0])
        travel(2)
        assert not other.granted(lag=2, run_time=nominal, min_lock=0)
        assert not other.granted(lag=0, run_time=nominal, min_lock=0)  # its clock is 2 s behind
        later = nominal + timedelta(seconds=1)
        assert other.granted(lag=1, run_time=later, min_lock=0)

    def test_without_a_minimum_lock_an_earlier_run_time_does_not_run(
        self, one: Replica, other: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        earlier = database_now(connection)
        travel(10)
        one.release(one.claim(run_time=earlier + timedelta(seconds=10), min_lock=0)[0])
        assert not other.granted(lag=10, run_time=earlier, min_lock=0)

    @pytest.mark.parametrize("min_lock", [0, 9])
    def test_a_run_time_whose_window_was_opened_again_runs_again(
        self,
        one: Replica,
        other: Replica,
        connection: psycopg.Connection[Any],
        travel: Travel,
        min_lock: float,
    ) -> None:
        nominal = database_now(connection)
        one.release(one.claim(run_time=nominal, min_lock=min_lock)[0], keep_window=False)
        travel(2)
        claim_id, answer = other.claim(lag=2, run_time=nominal, min_lock=min_lock)
        assert answer.granted
        other.release(claim_id)
        assert not one.granted(lag=2, run_time=nominal, min_lock=min_lock)

    def test_a_backward_step_of_the_databases_clock_loses_no_run_time(
        self, one: Replica, other: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        nominal = database_now(connection)
        one.release(one.claim(run_time=nominal)[0])
        travel(10 - 30)
        assert not other.granted(lag=10, run_time=nominal)
        assert other.granted(run_time=nominal + timedelta(seconds=10))


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
        assert other.granted(lag=0)

    @pytest.mark.parametrize("exact", [True, False])
    def test_that_opens_a_window_of_hours_does_not_open_an_hour_before_it(
        self,
        one: Replica,
        other: Replica,
        connection: psycopg.Connection[Any],
        travel: Travel,
        exact: bool,
    ) -> None:
        """As of ``hour="9,10"``: the window from 10:00 lasts until the next morning."""
        nine = database_now(connection)
        ten = nine + timedelta(hours=1)
        hours = {9: {"min_lock": 0.9 * 3600}, 10: {"min_lock": 0.9 * 23 * 3600}}
        if exact:
            hours[9]["run_time"], hours[10]["run_time"] = nine, ten
        one.release(one.claim(max_lock=5 * 3600, **hours[9])[0])
        travel(3600)
        one.release(one.claim(max_lock=5 * 3600, **hours[10])[0], keep_window=False)
        travel(60)
        assert not other.granted(lag=3660, **hours[9])  # starved for an hour
        assert other.granted(lag=60, **hours[10])

    @pytest.mark.parametrize(("min_lock", "before"), [(3600, 1), (9, 1), (1, 0.5), (0, 0.000001)])
    def test_that_opens_the_window_sets_its_end_just_before_its_start(
        self,
        one: Replica,
        connection: psycopg.Connection[Any],
        min_lock: float,
        before: float,
    ) -> None:
        claim_id, answer = one.claim(min_lock=min_lock)
        one.release(claim_id, keep_window=False)
        opened = answer.window_start - timedelta(seconds=before)
        assert row(connection)["window_until"] == opened


class TestHold:
    """Windows of ``hold()``, whose minimum lock was promised to it."""

    def test_a_hold_stands_against_a_hold_with_a_shorter_minimum_lock(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        one.release(one.hold(min_lock=60)[0])
        travel(59.9)
        _, answer = other.hold(min_lock=0)
        assert (answer.granted, answer.new_window) == (False, False)
        travel(0.1)
        assert other.hold(min_lock=0)[1].granted

    def test_a_hold_stands_against_a_job_with_a_shorter_minimum_lock(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        one.release(one.hold(min_lock=60)[0])
        travel(59.9)
        assert not other.granted(min_lock=9)
        travel(0.1)
        assert other.granted(min_lock=9)

    def test_a_jobs_window_stands_against_a_hold_with_a_shorter_minimum_lock(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        one.release(one.claim(min_lock=60)[0])
        travel(59.9)
        assert not other.hold(min_lock=0)[1].granted
        travel(0.1)
        assert other.hold(min_lock=0)[1].granted

    def test_a_hold_with_a_longer_minimum_lock_is_granted_when_the_window_has_ended(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        one.release(one.hold(min_lock=5)[0])
        travel(5)
        assert other.hold(min_lock=60)[1].granted

    def test_a_hold_whose_window_was_opened_again_is_granted(
        self, one: Replica, other: Replica
    ) -> None:
        one.release(one.hold(min_lock=60)[0], keep_window=False)
        assert other.hold(min_lock=60)[1].granted


class TestRetention:
    """The rows of one-off jobs, which are deleted some time after they were over."""

    AGE = 100.0

    def test_a_row_is_deleted_when_the_last_of_its_times_is_old_enough(
        self, one: Replica, travel: Travel
    ) -> None:
        one.release(
            one.claim("its window", one_off=True, min_lock=30, max_lock=20)[0], "its window"
        )
        one.release(
            one.claim("its maximum lock", one_off=True, min_lock=9, max_lock=30)[0],
            "its maximum lock",
        )
        late, _ = one.claim("its end", one_off=True, min_lock=9, max_lock=20)
        one.claim("never ended", one_off=True, min_lock=9, max_lock=30)
        travel(30)
        one.release(late, "its end")
        travel(self.AGE)
        assert one.prune(self.AGE) == 0
        travel(0.1)
        assert one.prune(self.AGE) == 4
        assert one.read("its window", "its maximum lock", "its end", "never ended") == {}

    def test_a_recurring_jobs_row_is_never_deleted(
        self, one: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        one.release(one.claim()[0])
        travel(10 * self.AGE)
        assert one.prune(self.AGE) == 0
        assert row(connection)

    def test_what_was_extended_is_not_deleted_earlier_than_that(
        self, one: Replica, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(one_off=True, max_lock=20)
        one.extend(claim_id, 1000)
        travel(self.AGE + 21)
        assert one.prune(self.AGE) == 0
        assert one.renewed(claim_id)

    @pytest.mark.postgresql
    def test_a_row_stays_for_its_maximum_lock_and_its_grace(
        self, one: Replica, travel: Travel
    ) -> None:
        """Until then, a replica that was suspended may still ask for its run time."""
        claim_id, _ = one.claim(one_off=True, is_last=True, max_lock=1000, grace=5000)
        travel(10)
        one.release(claim_id)
        travel(6000)
        assert one.prune(self.AGE) == 0
        travel(0.1)
        assert one.prune(self.AGE) == 1

    @pytest.mark.postgresql
    @pytest.mark.parametrize(
        ("others", "age"),
        [
            ([], 100),
            ([(99, "0 s")], 100),
            ([(5000, "0 s"), (3000, "0 s")], 5000),
            ([(5000, "2 minutes"), (3000, "0 s")], 3000),
            ([(None, "0 s"), (-1, "0 s")], 100),
            ([(2**63 - 1, "0 s")], LONGEST_SECONDS),
        ],
    )
    def test_the_longest_time_of_the_live_replicas_holds(
        self,
        one: Replica,
        connection: psycopg.Connection[Any],
        travel: Travel,
        others: list[tuple[int | None, str]],
        age: float,
    ) -> None:
        one.release(one.claim(one_off=True, max_lock=20)[0])
        for passed, is_over in ((20 + age, 0), (0.1, 1)):
            travel(passed)
            connection.execute("DELETE FROM task_lock_replica")
            for number, (kept, silent_for) in enumerate(others):
                add_replica(
                    connection,
                    f"web-{number}",
                    [],
                    keep_one_offs="NULL" if kept is None else f"{kept}",
                    seen_at=f"now() - interval '{silent_for}'",
                )
            assert one.prune(self.AGE) == is_over

    @pytest.mark.postgresql
    def test_a_row_that_somebody_has_locked_is_passed_over(
        self, one: Replica, direct_url: str, travel: Travel
    ) -> None:
        for task in ("locked", "free"):
            one.release(one.claim(task, one_off=True)[0], task)
        travel(10 * self.AGE)
        with psycopg.connect(direct_url) as blocker:
            blocker.execute("SELECT FROM task_lock WHERE task_name = 'locked' FOR UPDATE")
            assert one.prune(self.AGE) == 1
        assert one.prune(self.AGE) == 1

    @pytest.mark.postgresql
    @pytest.mark.parametrize("plan", ["hash", "nested loop", "merge"])
    def test_at_most_a_thousand_rows_are_deleted_at_once(
        self,
        one: Replica,
        connection: psycopg.Connection[Any],
        direct_url: str,
        travel: Travel,
        plan: str,
    ) -> None:
        one.release(one.claim("0", one_off=True)[0], "0")
        columns = ", ".join(column for column in row(connection, "0") if column != "task_name")
        connection.execute(
            f"INSERT INTO task_lock (task_name, {columns})"
            f" SELECT number::text, {columns} FROM task_lock, generate_series(1, 2500) AS number"
        )
        travel(10 * self.AGE)
        methods = {"hash": "hashjoin", "nested loop": "nestloop", "merge": "mergejoin"}
        forbidden = [method for name, method in methods.items() if name != plan]
        with psycopg.connect(direct_url, autocommit=True) as session:
            for method in forbidden:
                session.execute(f"SET enable_{method} = off")
            pruned = [Replica("one", session).prune(self.AGE) for _ in range(4)]
        assert pruned == [1000, 1000, 501, 0]

    def test_tokens_go_on_where_a_row_was_deleted(
        self, one: Replica, connection: psycopg.Connection[Any], travel: Travel
    ) -> None:
        tokens = []
        for _ in range(3):
            claim_id, answer = one.claim(one_off=True)
            tokens.append(answer.token)
            one.release(claim_id)
            travel(10)
        travel(10 * self.AGE)
        assert one.prune(self.AGE) == 1
        _, answer = one.claim(one_off=True)
        assert answer.token == token_at(database_now(connection))
        assert answer.token > max(tokens)


class TestWhenNobodyWaits:
    """It was held up on its way, by a network or a server that stood still."""

    @pytest.fixture
    def in_seconds(self, connection: psycopg.Connection[Any]) -> Callable[[float], datetime]:
        return lambda seconds: database_now(connection) + timedelta(seconds=seconds)

    @pytest.mark.parametrize("together", [False, True])
    @pytest.mark.parametrize("is_first", [False, True])
    def test_a_claim_is_not_granted(
        self,
        one: Replica,
        connection: psycopg.Connection[Any],
        in_seconds: Callable[[float], datetime],
        is_first: bool,
        together: bool,
    ) -> None:
        def answer(seconds: float) -> ClaimAnswer:
            request = ClaimRequest("task", 9.0, 50.0)
            times = ClaimTimes(not_after=in_seconds(seconds))
            if not together:
                return one.send(request, times)
            [found] = one.ask(Claims([request], [0.0], times, are_first=is_first)).values()
            return found

        if not is_first:
            claim_id, _ = one.claim(min_lock=0)
            one.release(claim_id, keep_window=False)
        late = answer(-0.001)
        assert (late.granted, late.looks_free) == (False, True)
        assert late.database_time == database_now(connection)
        assert answer(60).granted

    def test_a_takeover_is_not_granted(
        self, one: Replica, travel: Travel, in_seconds: Callable[[float], datetime]
    ) -> None:
        dead, _ = one.claim(lease=5, failover=True)
        travel(6)

        def answer(seconds: float) -> ClaimAnswer:
            request = takeover_of("task", dead, "dead")
            times = ClaimTimes(not_after=in_seconds(seconds))
            [found] = one.ask(Reruns([request], times)).values()
            return found

        late = answer(-0.001)
        assert (late.granted, late.looks_free) == (False, True)
        assert answer(60).granted

    @pytest.mark.postgresql
    def test_a_manual_run_is_not_granted(
        self,
        one: Replica,
        connection: psycopg.Connection[Any],
        in_seconds: Callable[[float], datetime],
    ) -> None:
        claim_id, _ = one.claim()
        one.release(claim_id)
        asked = manual_run_of("task", uuid4(), 50.0)
        connection.execute(
            "UPDATE task_lock SET request_id = %s, request_until = now() + interval '1 h'",
            [asked.cause],
        )

        def granted(seconds: float) -> bool:
            answer = one.rerun(asked, ClaimTimes(not_after=in_seconds(seconds)))
            assert answer is not None
            return answer.granted

        assert not granted(-0.001)
        assert granted(60)


@pytest.mark.parametrize("name", ["locks", 'My "locks"', "100% locks", "Größe"])
def test_any_schema_and_table_name_will_do(empty_database_url: str, name: str) -> None:
    upgrade(empty_database_url, schema=name, table=name)
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        replica = Replica("one", connection, table=name, schema=name)
        claim_id, answer = replica.claim()
        assert answer.granted
        assert not replica.granted()
        assert replica.release(claim_id) is not None


@pytest.mark.postgresql
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


@pytest.mark.postgresql
def test_each_row_has_the_columns_of_its_answer_with_and_without_history(
    connection: psycopg.Connection[Any],
) -> None:
    """The columns are looked up with the first row, of whichever of the two it is."""
    seen = 0
    parts = vars(protocol_of("one")).values()
    for statement in chain(parts, *(part.values() for part in parts if isinstance(part, dict))):
        if not isinstance(statement, Statement) or statement.answers is None:
            continue
        seen += 1
        forms = [statement.text]
        if isinstance(statement, RecordingStatement):
            assert statement.recording is not None
            forms.append(statement.recording.text)
        columns = [columns_of(connection, text) for text in forms]
        assert columns == [columns[0]] * len(forms)
        fields = statement.answers._fields
        assert set(columns[0]) - {"asked_claim_id", "claim_id"} <= set(fields)
        given = [name for name in fields if name in columns[0]]
        assert given == list(fields[: len(given)])
        assert set(fields[len(given) :]) <= set(statement.answers._field_defaults)
    assert seen == 16


def columns_of(connection: psycopg.Connection[Any], text: str) -> list[str]:
    connection.pgconn.prepare(b"", text.encode())
    described = connection.pgconn.describe_prepared(b"")
    assert described.status == psycopg.pq.ExecStatus.COMMAND_OK, described.error_message
    return [(described.fname(n) or b"").decode() for n in range(described.nfields)]
