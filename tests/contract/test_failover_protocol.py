"""The contract of leases and takeovers, against the statements that ship, in travelled time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock.messages import DeadRun, Renewal
from tests.contract.conftest import Replica

Travel = Callable[[float], None]
Connection = psycopg.Connection[Any]

LEASED: dict[str, Any] = {"min_lock": 54, "max_lock": 300, "lease": 30, "dead_run": "take over"}


def renew(replica: Replica, *renewals: Renewal) -> dict[Any, Any]:
    return replica.protocol.renew(replica.connection.cursor(), renewals)


class TestLease:
    def test_a_claim_stands_for_its_lease(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        _, answer = one.claim(**LEASED)
        assert answer.locked_until - answer.database_time == timedelta(seconds=30)
        travel(29.9)
        assert not other.granted(**LEASED)
        travel(0.2)
        assert other.granted(**LEASED)

    def test_a_maximum_lock_below_it_counts(self, one: Replica) -> None:
        _, answer = one.claim(lease=30, max_lock=10)
        assert answer.locked_until - answer.database_time == timedelta(seconds=10)

    def test_all_that_is_held_is_renewed_at_most_to_the_maximum_lock(
        self, one: Replica, travel: Travel
    ) -> None:
        first, answer = one.claim("first", **LEASED)
        second, _ = one.claim("second", **LEASED)
        travel(20)
        renewed = renew(
            one, Renewal("first", first, 30, 300), Renewal("second", second, 30, max_lock=40)
        )
        now = answer.database_time + timedelta(seconds=20)
        assert renewed == {
            first: (now + timedelta(seconds=30), now),
            second: (now + timedelta(seconds=20), now),
        }

    def test_a_renewal_never_shortens_a_claim(self, one: Replica, travel: Travel) -> None:
        claim_id, answer = one.claim(**LEASED)
        travel(1)
        ((until, _),) = renew(one, Renewal("task", claim_id, 5, 300)).values()
        assert until == answer.locked_until

    def test_times_may_be_integers_and_fractions(self, one: Replica) -> None:
        leases = {f"task {lease}": lease for lease in (5, 5.5)}
        renewals = [
            Renewal(task, one.claim(task, lease=5)[0], lease, 60) for task, lease in leases.items()
        ]
        assert len(renew(one, *renewals)) == 2

    def test_what_has_ended_is_not_renewed(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        over, _ = one.claim("over", **LEASED)
        taken, _ = one.claim("taken", **LEASED)
        travel(31)
        released, _ = one.claim("released", **LEASED)
        one.release(released, "released")
        other.claim("taken", **LEASED)
        rows = "SELECT * FROM task_lock ORDER BY task_name"
        before = connection.execute(rows).fetchall()
        renewals = [
            Renewal(task, claim_id, 30, 300)
            for task, claim_id in (("over", over), ("taken", taken), ("released", released))
        ]
        assert renew(one, *renewals) == {}
        assert connection.execute(rows).fetchall() == before


class TestTakeover:
    def test_the_window_of_a_dead_holder_is_claimed_again_and_kept(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        one.claim(lag=2, **LEASED)
        window = "SELECT window_start, window_until FROM task_lock"
        before = connection.execute(window).fetchone()
        travel(31)
        _, answer = other.claim(lag=33, **LEASED)
        assert (answer.granted, answer.dead_holder, answer.token) == (True, "one", 2)
        assert not answer.new_window
        assert connection.execute(window).fetchone() == before

    def test_it_comes_before_a_new_window_which_is_left_to_claim(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        one.claim(**LEASED)
        travel(60)
        claim_id, answer = other.claim(**LEASED)
        assert (answer.granted, answer.dead_holder, answer.new_window) == (True, "one", True)
        assert answer.database_time - answer.window_start == timedelta(seconds=60)
        other.release(claim_id)
        _, answer = other.claim(**LEASED)
        assert (answer.granted, answer.dead_holder, answer.new_window) == (True, None, False)
        assert answer.window_start == answer.database_time

    def test_nobody_takes_over_what_ended(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        travel(31)
        one.release(claim_id)  # after the lease, but before anybody else came
        assert not other.granted(lag=31, **LEASED)

    def test_a_second_taker_is_refused(self, one: Replica, other: Replica, travel: Travel) -> None:
        one.claim(**LEASED)
        travel(31)
        claim_id, _ = other.claim(lag=31, **LEASED)
        assert not one.granted(lag=31, **LEASED)
        other.release(claim_id)
        assert not one.granted(lag=31, **LEASED)

    def test_the_lost_holder_frees_nothing(
        self, one: Replica, other: Replica, travel: Travel
    ) -> None:
        lost, _ = one.claim(**LEASED)
        travel(31)
        other.claim(lag=31, **LEASED)
        assert one.release(lost) is None
        assert not one.granted(**LEASED)

    @pytest.mark.parametrize(("dead_run", "granted"), [("forget", True), ("leave", False)])
    def test_a_dead_run_is_forgotten_or_left_as_asked(
        self,
        one: Replica,
        other: Replica,
        travel: Travel,
        dead_run: DeadRun,
        granted: bool,
    ) -> None:
        one.claim(**LEASED)
        travel(60)
        _, answer = other.claim(**{**LEASED, "dead_run": dead_run})
        assert (answer.granted, answer.dead_holder) == (granted, None)
        assert answer.unfinished

    def test_a_reader_sees_how_a_run_stands(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        def states() -> list[tuple[str, bool, bool]]:
            read = one.protocol.read(one.connection.cursor(), ["running", "dead", "ended", "no"])
            return sorted((state.task_name, state.finished, state.dead) for state in read)

        one.claim("dead", **LEASED)
        travel(31)
        ended, _ = one.claim("ended", **LEASED)
        one.release(ended, "ended")
        one.claim("running", **LEASED)
        assert states() == [
            ("dead", False, True),
            ("ended", True, False),
            ("running", False, False),
        ]
