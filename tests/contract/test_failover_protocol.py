"""The contract of leases, dead runs and takeovers, with the statements that ship."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from apscheduler_tasklock._lock.outcomes import RunOutcome
from apscheduler_tasklock.errors import TaskLockDatabaseError
from apscheduler_tasklock.testing import rule as the_rule
from tests.contract.conftest import ON_BOTH, database_now, row, token_at
from tests.support.waist import (
    LockEnds,
    Memory,
    ReleaseRequest,
    Renewal,
    Replica,
    Reruns,
    retry_of,
)

Travel = Callable[[float], None]
Connection = psycopg.Connection[Any]

LEASED: dict[str, Any] = {"min_lock": 54, "max_lock": 300, "lease": 30, "failover": True}

# What a takeover leaves as it was.
KEPT = ("window_start", "window_until", "run_until", "runs", "one_off")


class TestLease:
    def test_a_claim_stands_for_its_lease(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        dead, answer = one.claim(**LEASED)
        assert answer.locked_until - answer.database_time == timedelta(seconds=30)
        assert answer.run_until - answer.database_time == timedelta(seconds=300)
        travel(29.9)
        assert not other.takes_over(dead)
        travel(0.1)
        assert other.takes_over(dead)

    def test_a_maximum_lock_below_it_counts(self, one: Replica) -> None:
        _, answer = one.claim(lease=30, max_lock=10)
        assert answer.locked_until - answer.database_time == timedelta(seconds=10)

    def test_all_that_is_held_is_renewed_at_most_to_the_maximum_lock(
        self, one: Replica, travel: Travel
    ) -> None:
        first, answer = one.claim("first", **LEASED)
        second, _ = one.claim("second", **{**LEASED, "max_lock": 40})
        travel(20)
        renewed = one.renew(Renewal("first", first, 30), Renewal("second", second, 30))
        start, now = answer.database_time, answer.database_time + timedelta(seconds=20)
        ends = start + timedelta(seconds=40)
        assert renewed == {
            first: LockEnds(now + timedelta(seconds=30), start + timedelta(seconds=300), now),
            second: LockEnds(ends, ends, now),
        }

    @ON_BOTH
    def test_a_renewal_never_shortens_a_claim(self, one: Replica, travel: Travel) -> None:
        claim_id, answer = one.claim(**LEASED)
        travel(1)
        (times,) = one.renew(Renewal("task", claim_id, 5)).values()
        assert times.locked_until == answer.locked_until

    def test_times_may_be_integers_and_fractions(self, one: Replica) -> None:
        leases = {f"task {lease}": lease for lease in (5, 5.5)}
        renewals = [
            Renewal(task, one.claim(task, lease=5)[0], lease) for task, lease in leases.items()
        ]
        assert len(one.renew(*renewals)) == 2

    def test_a_renewal_revives_a_lease_that_ended_until_the_maximum_lock_ends(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        claim_id, answer = one.claim(**LEASED)
        travel(200)  # as in an outage, in which nobody could renew
        (times,) = one.renew(Renewal("task", claim_id, 30)).values()
        assert times.locked_until == answer.database_time + timedelta(seconds=230)
        assert not other.takes_over(claim_id)
        _, refused = other.claim(**LEASED)
        assert (refused.granted, refused.running) == (False, True)
        travel(99.9)
        assert one.renewed(claim_id)
        travel(0.1)
        assert not one.renewed(claim_id)

    def test_a_renewal_of_a_lease_that_ended_counts_no_death(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        before = row(connection)
        travel(31)
        assert one.renewed(claim_id)
        after = row(connection)
        assert {**after, "locked_until": None} == {**before, "locked_until": None}

    @pytest.mark.parametrize(
        "end",
        [
            pytest.param(lambda one, _other, claim_id: one.release(claim_id), id="released"),
            pytest.param(lambda one, _other, claim_id: one.hand_over(claim_id), id="handed over"),
            pytest.param(lambda _one, other, claim_id: other.take_over(claim_id), id="taken over"),
            pytest.param(lambda _one, other, _claim_id: other.claim(), id="overtaken"),
            pytest.param(lambda _one, other, claim_id: other.give_up(claim_id), id="given up"),
        ],
    )
    def test_what_somebody_ended_is_neither_renewed_nor_extended(
        self,
        one: Replica,
        other: Replica,
        travel: Travel,
        connection: Connection,
        end: Callable[[Replica, Replica, Any], Any],
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        travel(60)
        end(one, other, claim_id)
        before = row(connection)
        assert not one.renewed(claim_id)
        assert one.extend(claim_id, 10, lease=30) is None
        assert row(connection) == before

    @pytest.mark.postgresql
    def test_a_row_that_somebody_has_locked_is_passed_over_and_told_without_an_end(
        self, one: Replica, connection: Connection, direct_url: str
    ) -> None:
        locked, _ = one.claim("locked", **LEASED)
        free, answer = one.claim("free", **LEASED)
        with psycopg.connect(direct_url) as blocker:
            blocker.execute("SELECT FROM task_lock WHERE task_name = 'locked' FOR UPDATE")
            times = one.renew(Renewal("locked", locked, 40), Renewal("free", free, 40))
        assert times[locked].locked_until is None
        assert times[locked].run_until == answer.run_until
        assert times[free].locked_until == answer.database_time + timedelta(seconds=40)


class TestExtension:
    def test_it_moves_the_end_of_the_maximum_lock(self, one: Replica, travel: Travel) -> None:
        claim_id, answer = one.claim(max_lock=50)
        later = answer.locked_until + timedelta(seconds=10)
        times = one.extend(claim_id, 10)
        assert times is not None
        assert (times.locked_until, times.run_until) == (later, later)
        travel(59.999)
        assert one.extend(claim_id, 1) is not None
        travel(10)
        assert one.extend(claim_id, 10) is None
        assert one.extend(uuid4(), 10) is None

    def test_with_a_lease_the_end_of_the_lease_stays_within_it(
        self, one: Replica, travel: Travel
    ) -> None:
        claim_id, answer = one.claim(**LEASED)
        travel(20)
        times = one.extend(claim_id, 100, lease=30)
        assert times is not None
        assert times.run_until == answer.run_until + timedelta(seconds=100)
        assert times.locked_until == times.database_time + timedelta(seconds=30)
        assert times.database_time == answer.database_time + timedelta(seconds=20)

    def test_it_lets_the_lease_go_on_that_the_maximum_lock_had_cut_short(
        self, one: Replica, travel: Travel
    ) -> None:
        claim_id, answer = one.claim(lease=30, max_lock=40)
        travel(35)
        times = one.extend(claim_id, 10, lease=30)
        assert times is not None
        assert times.locked_until == answer.run_until + timedelta(seconds=10)

    def test_a_lease_that_ended_is_revived(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        travel(100)
        assert one.extend(claim_id, 1, lease=30) is not None
        assert not other.takes_over(claim_id)

    def test_a_takeover_keeps_the_extended_end(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        claim_id, answer = one.claim(**LEASED)
        one.extend(claim_id, 100, lease=30)
        travel(350)
        _, taken = other.take_over(claim_id, lease=30)
        assert taken is not None
        assert taken.granted
        assert taken.run_until == answer.run_until + timedelta(seconds=100)


class TestTakeover:
    def test_a_dead_holders_window_is_claimed_again_and_kept(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead, first = one.claim(lag=2, one_off=True, **LEASED)
        before = row(connection)
        travel(31)
        claim_id, answer = other.take_over(dead, lease=20, failover=False)
        now = database_now(connection)
        assert answer is not None
        assert (answer.granted, answer.running, answer.holder) == (True, True, "other")
        assert (answer.claim_id, answer.token) == (claim_id, token_at(now))
        assert (answer.window_start, answer.run_until) == (first.window_start, first.run_until)
        assert (answer.database_time, answer.new_window, answer.waits) == (now, False, False)
        assert row(connection) == {
            **before,
            "started_at": now,
            "locked_until": now + timedelta(seconds=20),
            "locked_by": "other",
            "claim_id": claim_id,
            "token": token_at(now),
            "deaths": 1,
            "failover": False,
            "kind": "takeover",
            "last_outcome": "died",
            "recorded_failures": 1,
            "failures": 1,
            "failed_at": before["locked_until"],
        }

    @pytest.mark.parametrize(
        ("lease", "travelled", "stands"), [(30, 290, 10), (None, 31, 269), (30, 31, 30)]
    )
    def test_it_stands_for_its_lease_and_at_most_until_the_end_of_the_maximum_lock(
        self,
        one: Replica,
        other: Replica,
        travel: Travel,
        lease: float | None,
        travelled: float,
        stands: float,
    ) -> None:
        dead, _ = one.claim(**LEASED)
        travel(travelled)
        _, answer = other.take_over(dead, lease=lease)
        assert answer is not None
        assert answer.granted
        assert answer.locked_until == answer.database_time + timedelta(seconds=stands)

    def test_past_the_end_of_the_maximum_lock_nobody_takes_over(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        dead, _ = one.claim(**LEASED)
        travel(299.9)
        assert other.takes_over(dead, lease=1)
        dead, _ = one.claim("second", **LEASED)
        travel(300)
        assert not other.takes_over(dead, "second")

    def test_asked_twice_with_the_same_id_it_is_granted_once(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead, _ = one.claim(**LEASED)
        travel(31)
        claim_id, first = other.take_over(dead, lease=30)
        before = row(connection)
        travel(1)
        _, again = other.take_over(dead, lease=30, claim_id=claim_id)
        assert again is not None
        assert first is not None
        assert again.granted
        assert (again.token, again.locked_until) == (first.token, first.locked_until)
        assert row(connection) == before

    def test_asked_again_after_its_release_it_is_not_granted(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        dead, _ = one.claim(**LEASED)
        travel(31)
        claim_id, _ = other.take_over(dead)
        other.release(claim_id)
        assert not other.takes_over(dead, claim_id=claim_id)

    def test_exactly_the_dead_claim_is_taken_over_not_one_that_came_between(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead, _ = one.claim(**LEASED)
        travel(60)
        between, _ = one.claim(**{**LEASED, "failover": False})  # a new window, of one without it
        travel(60)  # and it is dead as well
        before = row(connection)
        _, answer = other.take_over(dead)
        assert answer is not None
        assert (answer.granted, answer.claim_id) == (False, between)
        assert row(connection) == before

    def test_nobody_takes_over_what_ended(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        travel(31)
        one.release(claim_id)  # after the lease, but before anybody else came
        for _ in range(2):
            _, answer = other.take_over(claim_id)
            assert answer is not None
            assert (answer.granted, answer.unfinished) == (False, False)
            travel(60)  # the window is over, too

    def test_a_task_without_a_row_is_not_taken_over(self, one: Replica) -> None:
        _, answer = one.take_over(uuid4())
        assert answer is None

    def test_a_second_taker_is_told_who_runs_it(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        dead, _ = one.claim(**LEASED)
        travel(31)
        claim_id, first = other.take_over(dead)
        _, second = one.take_over(dead)
        assert first is not None
        assert second is not None
        assert (second.granted, second.running) == (False, True)
        assert (second.holder, second.token) == ("other", first.token)
        other.release(claim_id)
        assert not one.takes_over(dead)

    def test_the_lost_holder_frees_nothing(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        lost, _ = one.claim(**LEASED)
        travel(31)
        other.take_over(lost, lease=30)
        before = row(connection)
        assert one.release(lost) is None
        assert one.hand_over(lost) is None
        assert not one.give_up(lost)
        assert row(connection) == before

    def test_a_taken_over_window_is_old_to_others_and_the_next_one_is_not(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        dead, _ = one.claim(**LEASED)
        travel(31)
        claim_id, _ = other.take_over(dead)
        other.release(claim_id)
        assert not one.granted(lag=31, **LEASED)
        travel(29)
        assert one.granted(**LEASED)

    def test_a_taken_over_window_that_is_opened_again_is_new(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        dead, _ = one.claim(**LEASED)
        travel(31)
        claim_id, _ = other.take_over(dead)
        other.release(claim_id, keep_window=False)
        assert one.granted(lag=31, **LEASED)


class TestDeaths:
    def test_each_takeover_counts_one_and_a_release_none(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        for deaths in range(3):
            assert row(connection)["deaths"] == deaths
            travel(31)
            claim_id, _ = other.take_over(claim_id, lease=30)
        other.release(claim_id)
        assert row(connection)["deaths"] == 0

    def test_a_new_window_after_a_death_counts_it_and_keeps_the_others(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        without = {**LEASED, "failover": False}
        dead, _ = one.claim(**without)
        travel(31)
        other.take_over(dead, lease=30)
        travel(31)
        assert one.granted(**without)
        assert row(connection)["deaths"] == 2

    def test_they_outlast_a_window_that_was_given_up(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead, _ = one.claim(**LEASED)
        travel(31)
        claim_id, _ = other.take_over(dead, lease=20)
        travel(31)
        assert one.give_up(claim_id)
        assert row(connection)["deaths"] == 2
        assert other.granted(**LEASED)
        assert row(connection)["deaths"] == 2

    def test_a_hand_over_counts_apart_and_for_its_window_only(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        for handovers in range(3):
            assert row(connection)["handovers"] == handovers
            one.hand_over(claim_id, begun=True)
            claim_id, _ = one.take_over(claim_id, lease=30)
        assert row(connection)["deaths"] == 0
        one.hand_over(claim_id)  # which never began
        claim_id, _ = one.take_over(claim_id, lease=30)
        assert row(connection)["handovers"] == 3
        one.hand_over(claim_id)
        travel(60)
        assert other.granted(**{**LEASED, "runs": "jobs:new"})
        assert (row(connection)["handovers"], row(connection)["deaths"]) == (0, 0)

    def test_a_release_forgets_hand_overs_too(self, one: Replica, connection: Connection) -> None:
        claim_id, _ = one.claim(**LEASED)
        one.hand_over(claim_id, begun=True)
        claim_id, _ = one.take_over(claim_id)
        assert row(connection)["handovers"] == 1
        one.release(claim_id)
        assert row(connection)["handovers"] == 0


class TestHandOver:
    @ON_BOTH
    def test_of_a_run_that_never_began_it_gives_the_whole_maximum_lock_again(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        """It may have waited for a worker for longer than that."""
        claim_id, _ = one.claim(**LEASED)
        travel(400)
        one.hand_over(claim_id)
        assert row(connection)["run_until"] == database_now(connection) + timedelta(seconds=300)

    def test_it_ends_the_lease_at_once_and_leaves_the_run_unfinished(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        travel(5)
        before, now = row(connection), database_now(connection)
        answer = one.hand_over(claim_id)
        assert answer is not None
        assert (answer.locked_until, answer.database_time) == (now, now)
        max_lock = before["run_until"] - before["started_at"]
        changes = {"locked_until": now, "run_until": now + max_lock, "handed_over": True}
        assert row(connection) == {**before, **changes}

    def test_others_take_the_window_over_without_a_wait(
        self, one: Replica, other: Replica, connection: Connection
    ) -> None:
        claim_id, first = one.claim(**LEASED)
        before = row(connection)
        one.hand_over(claim_id)
        _, answer = other.take_over(claim_id)
        assert answer is not None
        assert answer.granted
        assert answer.token > first.token
        after = row(connection)
        assert {key: after[key] for key in KEPT} == {key: before[key] for key in KEPT}
        assert (after["handovers"], after["deaths"], after["handed_over"]) == (0, 0, False)

    def test_it_never_prolongs_a_lease_that_had_ended(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        claim_id, answer = one.claim(**LEASED)
        travel(40)
        one.hand_over(claim_id)
        assert row(connection)["locked_until"] == answer.locked_until

    def test_the_same_claim_is_not_granted_again_after_it(self, one: Replica) -> None:
        claim_id, _ = one.claim(**LEASED)
        one.hand_over(claim_id)
        assert not one.granted(claim_id=claim_id, **LEASED)

    def test_a_finished_run_is_not_handed_over(self, one: Replica, connection: Connection) -> None:
        claim_id, _ = one.claim(**LEASED)
        one.release(claim_id)
        before = row(connection)
        assert one.hand_over(claim_id) is None
        assert row(connection) == before

    def test_a_run_that_ended_after_all_is_finished(
        self, one: Replica, other: Replica, connection: Connection
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        one.hand_over(claim_id)
        assert one.release(claim_id) is not None
        assert not row(connection)["handed_over"]
        assert not other.takes_over(claim_id)

    def test_it_stays_one_when_the_holder_is_then_found_dead(
        self, one: Replica, other: Replica, connection: Connection
    ) -> None:
        """A pool's worker hands over and ends, and its parent ends the lease of a dead worker."""
        claim_id, _ = one.claim(**LEASED)
        one.hand_over(claim_id)
        assert other.end_lease(claim_id, holders=["one"]) is not None
        assert row(connection)["handed_over"]


class TestEndOfLease:
    def test_a_run_whose_holder_is_known_to_be_dead_can_be_taken_over_at_once(
        self, one: Replica, other: Replica, connection: Connection
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        assert other.end_lease(claim_id, holders=["another", "one"]) is not None
        assert not row(connection)["handed_over"]
        assert other.takes_over(claim_id)
        assert row(connection)["deaths"] == 1

    def test_only_the_given_holders_lease_is_ended(
        self, one: Replica, other: Replica, connection: Connection
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        before = row(connection)
        assert other.end_lease(claim_id, holders=["another", "other"]) is None
        assert other.end_lease(claim_id, holders=[]) is None
        assert row(connection) == before


class TestGivingUp:
    def test_it_finishes_a_dead_run_and_counts_a_death(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        claim_id, answer = one.claim(**LEASED)
        before = row(connection)
        travel(31)
        assert other.give_up(claim_id)
        assert row(connection) == {
            **before,
            "locked_until": answer.database_time + timedelta(seconds=54),
            "finished_at": database_now(connection),
            "last_outcome": "died",
            "deaths": 1,
            "recorded_failures": 1,
            "failures": 1,
            "failed_at": before["locked_until"],
        }

    def test_one_replica_wins(self, one: Replica, other: Replica, travel: Travel) -> None:
        claim_id, _ = one.claim(**LEASED)
        travel(60)
        assert [replica.give_up(claim_id) for replica in (one, other, one)] == [True, False, False]

    def test_a_running_one_and_another_claim_are_not_given_up(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead, _ = one.claim(**LEASED)
        travel(29.9)
        assert not other.give_up(dead)
        travel(31)
        running, _ = one.take_over(dead, lease=30)
        assert not other.give_up(dead)
        assert not other.give_up(running)
        assert row(connection)["finished_at"] is None

    def test_the_window_stays_old_and_the_next_one_is_new(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        travel(31)
        other.give_up(claim_id)
        assert not other.takes_over(claim_id)
        assert not other.granted(lag=31, **LEASED)
        travel(29)
        assert other.granted(**LEASED)


class TestClaimAfterADeadRun:
    def test_a_new_window_waits_for_a_dead_run_of_the_same_job(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead, _ = one.claim(**LEASED)
        before = row(connection)
        travel(60)
        _, answer = other.claim(**LEASED)
        assert (answer.granted, answer.running, answer.unfinished) == (False, False, True)
        assert (answer.new_window, answer.waits) == (True, True)
        assert row(connection) == before
        claim_id, _ = other.take_over(dead)
        other.release(claim_id)
        assert one.granted(**LEASED)

    @pytest.mark.parametrize(
        ("holders", "claimers"),
        [
            pytest.param({}, {"runs": "jobs:new"}, id="another function"),
            pytest.param({}, {"failover": False}, id="the claimer without failover"),
            pytest.param({"failover": False}, {}, id="the holder without failover"),
            pytest.param({"runs": ""}, {"runs": ""}, id="holds"),
            pytest.param({"max_lock": 60}, {}, id="past the end of the maximum lock"),
        ],
    )
    def test_it_does_not_wait_for_a_dead_run_that_nobody_runs_again(
        self,
        one: Replica,
        other: Replica,
        travel: Travel,
        holders: dict[str, Any],
        claimers: dict[str, Any],
    ) -> None:
        one.claim(**{**LEASED, **holders})
        travel(60)
        _, answer = other.claim(**{**LEASED, **claimers})
        assert (answer.granted, answer.waits) == (True, False)

    def test_a_refused_window_of_the_dead_run_itself_waits_too(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        one.claim(**LEASED)
        travel(31)
        _, answer = other.claim(lag=31, **LEASED)
        assert (answer.granted, answer.new_window, answer.waits) == (False, False, True)

    def test_nothing_waits_for_a_run_that_is_going_on(self, one: Replica, other: Replica) -> None:
        one.claim(**LEASED)
        _, answer = other.claim(**LEASED)
        assert (answer.granted, answer.running, answer.waits) == (False, True, False)

    @pytest.mark.parametrize("failover", [True, False])
    def test_it_waits_for_a_run_that_was_handed_over_whatever_failover_says(
        self, one: Replica, other: Replica, travel: Travel, failover: bool
    ) -> None:
        claim_id, _ = one.claim(**{**LEASED, "failover": failover})
        one.hand_over(claim_id)
        travel(60)
        _, answer = other.claim(**{**LEASED, "failover": False})
        assert (answer.granted, answer.new_window, answer.waits) == (False, True, True)
        assert other.granted(**{**LEASED, "runs": "jobs:new"})

    def test_it_does_not_wait_for_a_hand_over_past_the_maximum_lock(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        one.hand_over(claim_id)
        travel(300)
        assert other.granted(**LEASED)

    @pytest.mark.parametrize("runs", ["jobs:job", "jobs:new", ""])
    def test_while_rows_are_not_believed_every_new_window_waits_for_a_dead_run(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection, runs: str
    ) -> None:
        request = {**LEASED, "failover": False, "runs": runs}
        one.claim(**{**LEASED, "failover": False})
        before = row(connection)
        travel(60)
        _, answer = other.claim(stable=False, **request)
        assert (answer.granted, answer.new_window, answer.waits) == (False, True, True)
        assert row(connection) == before
        assert other.granted(**request)

    @ON_BOTH
    def test_while_rows_are_not_believed_only_a_run_that_was_handed_over_is_taken_over(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        """An outage may have begun after a look at the rows, and before the takeover arrived."""
        silent, _ = one.claim(**LEASED)
        cut, _ = one.claim("cut", **LEASED)
        one.hand_over(cut, "cut")
        travel(60)
        before = row(connection)
        _, answer = other.take_over(silent, stable=False)
        assert answer is not None
        assert (answer.granted, answer.waits, answer.looks_free) == (False, True, False)
        assert row(connection) == before
        assert other.takes_over(cut, "cut", stable=False)
        assert other.takes_over(silent)

    def test_past_its_maximum_lock_a_dead_run_blocks_nobody_whether_rows_are_believed_or_not(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        times = {**LEASED, "failover": True}
        answer = one.claim(**times)[1]
        travel((answer.run_until - answer.database_time).total_seconds() - 1)
        assert not other.claim(stable=False, **times)[1].granted
        travel(1)
        assert other.granted(stable=False, **times)

    def test_while_rows_are_not_believed_finished_and_handed_over_runs_are(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        one.release(one.claim("finished", **LEASED)[0], "finished")
        one.hand_over(one.claim("handed over", **LEASED)[0], "handed over")
        travel(60)
        assert other.granted("finished", stable=False, **LEASED)
        assert other.granted("handed over", stable=False, **{**LEASED, "runs": "jobs:new"})
        assert other.granted("unknown", stable=False, **LEASED)


class TestReading:
    def test_a_reader_sees_the_dead_runs_and_how_they_stand(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead, answer = one.claim("dead", one_off=True, **{**LEASED, "max_lock": 80})
        travel(31)
        taken, _ = one.take_over(dead, "dead", lease=20)
        one.release(one.claim("ended", **LEASED)[0], "ended")
        handed, _ = one.claim("handed over", **{**LEASED, "failover": False, "runs": "jobs:new"})
        one.hand_over(handed, "handed over")
        travel(20)
        one.claim("running", **LEASED)

        states = one.read("running", "dead", "ended", "handed over", "unknown")
        assert sorted(states) == ["dead", "handed over"]
        assert vars(states["dead"]) == {
            "task_name": "dead",
            "claim_id": taken,
            "token": token_at(answer.database_time) + 31_000,
            "finished": False,
            "dead": True,
            "expired": False,
            "failover": True,
            "deaths": 1,
            "handovers": 0,
            "handed_over": False,
            "runs": "jobs:job",
            "window_start": answer.window_start,
            "holder": "one",
            "database_time": database_now(connection),
            "manual": False,
            "request_id": None,
            "schedule": None,
            "due_at": None,
            "overdue": False,
            "paused": False,
            "due_in_pause": False,
            "window_until": row(connection, "dead")["window_until"],
            "window_schedule": None,
            "locked_until": row(connection, "dead")["locked_until"],
            "finished_at": None,
            "attempt": 1,
            "retry_pending": False,
            "retry_at": None,
        }
        assert (states["handed over"].handed_over, states["handed over"].failover) == (True, False)
        assert states["handed over"].runs == "jobs:new"
        travel(29)
        assert one.read("dead")["dead"].expired

    def test_of_some_tasks_the_last_run_is_read_whatever_its_state(self, one: Replica) -> None:
        one.release(one.claim("ended", **LEASED)[0], "ended")
        one.claim("running", **LEASED)
        states = one.read("running", "ended", "unknown", always=("running", "ended", "unknown"))
        assert {name: (state.finished, state.dead) for name, state in states.items()} == {
            "ended": (True, False),
            "running": (False, False),
        }

    def test_a_read_only_server_is_not_believed(self, one: Replica, direct_url: str) -> None:
        """Nobody can renew or release there, and a standby may show what is old."""
        one.claim(**LEASED)
        with psycopg.connect(direct_url, autocommit=True) as session:
            session.execute("SET default_transaction_read_only = on")
            with pytest.raises(TaskLockDatabaseError, match="read-only"):
                Replica("other", session).read("task")
            with pytest.raises(TaskLockDatabaseError, match="read-only"):
                Replica("other", session).read("unknown")


class TestReleasesAndRetries:
    @ON_BOTH
    def test_a_run_time_that_came_during_a_retry_is_due_after_it_although_it_is_the_last(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        failing, _ = one.claim(**LEASED, next_in=20.0, grace=60.0)
        one.end(failing, outcome="error", retry_in=5.0)
        travel(6)
        retry = retry_of("task", failing, 60.0, 30.0, failover=True)
        answer = one.rerun(retry)
        assert answer is not None
        assert answer.granted
        travel(20)
        one.end(retry.claim_id, outcome="ok", is_last=True)
        found = row(connection)
        assert (found["due_at"], found["is_last"]) == (database_now(connection), False)

    @pytest.mark.parametrize("many", [False, True], ids=["alone", "together"])
    def test_a_release_that_is_sent_again_after_the_claim_of_the_retry_tells_of_the_retry(
        self, one: Replica, other: Replica, travel: Travel, many: bool
    ) -> None:
        failing, _ = one.claim(**LEASED)
        failed = RunOutcome(outcome="error", error_type="Error", retry_in=5.0)
        request = ReleaseRequest("task", failing, failed)
        first = one.released(request, together=many)
        assert first is not None
        travel(6)
        retry = retry_of("task", failing, 60.0, 30.0, failover=True)
        [answer] = other.ask(Reruns([retry])).values()
        assert answer.granted

        again = one.released(request, together=many)

        assert again is not None
        assert again.retry_at == first.retry_at is not None
        assert again.locked_until == first.locked_until
        assert one.read("task", always=["task"])["task"].claim_id == retry.claim_id

    @pytest.mark.parametrize("many", [False, True], ids=["alone", "together"])
    def test_a_release_that_finds_another_claim_tells_nothing(
        self, one: Replica, other: Replica, travel: Travel, many: bool
    ) -> None:
        dead, _ = one.claim(**LEASED)
        travel(30)
        other.take_over(dead, lease=30)
        failed = RunOutcome(outcome="error", error_type="Error", retry_in=5.0)
        assert one.released(ReleaseRequest("task", dead, failed), together=many) is None


@ON_BOTH
@pytest.mark.parametrize(
    ("when", "begins"),
    [
        ("at its time", True),
        ("too early", False),
        ("a day late", False),
        ("at the next run time", False),
        ("in a pause", False),
        ("of another run", False),
    ],
)
def test_a_retry_begins_from_its_time_until_the_next_run_time_and_in_no_pause(
    one: Replica, travel: Travel, connection: Any, when: str, begins: bool
) -> None:
    failing, _ = one.claim(**LEASED, next_in=100.0 if when == "at the next run time" else None)
    one.end(failing, outcome="error", retry_in=5.0)
    travel(
        {"too early": 4.5, "a day late": 24 * 3600 + 5, "at the next run time": 100}.get(when, 5)
    )
    if when == "in a pause":
        pause(connection)
    failed = uuid4() if when == "of another run" else failing
    retry = retry_of("task", failed, 60.0, 30.0, failover=True)
    answer = one.rerun(retry)
    assert answer is not None
    assert answer.granted == begins


def pause(connection: Any) -> None:
    if isinstance(connection, Memory):
        rows, now = connection.locks.rows, connection.time
        rows["task"] = the_rule.pause(rows["task"], None, now, "me")
    else:
        connection.execute("UPDATE task_lock SET paused_at = now()")


class TestRetriesAndDeaths:
    @ON_BOTH
    def test_a_failed_run_that_is_retried_does_not_end_the_count_of_deaths(
        self, one: Replica, other: Replica, travel: Travel, replicas_connection: Any
    ) -> None:
        """Also if the answer of its release is lost, so that the release is sent twice."""
        dead, _ = one.claim(**LEASED)
        travel(30)
        taken_over, _ = other.take_over(dead, lease=30)
        failed = RunOutcome(outcome="error", error_type="Error", retry_in=5.0)

        for _ in range(2):
            released = other.ask(ReleaseRequest("task", taken_over, failed))

            assert released is not None
            assert released.retry_at is not None
            assert row(replicas_connection)["deaths"] == 1
