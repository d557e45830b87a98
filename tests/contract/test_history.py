"""The run history: what closes a run writes its entry, once, in its own statement."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from tests.contract.conftest import ON_BOTH, database_now, row
from tests.support.polling import eventually
from tests.support.waist import (
    ClaimAnswer,
    ClaimRequest,
    Memory,
    ReleaseAnswer,
    ReleaseRequest,
    Releases,
    Replica,
    protocol_of,
)

Travel = Callable[[float], None]
Connection = psycopg.Connection[Any]

LEASED: dict[str, Any] = {"max_lock": 300.0, "lease": 30.0, "failover": True}


def entries(connection: Connection, task: str = "task") -> list[dict[str, Any]]:
    """Return the entries of a task, the oldest first."""
    if isinstance(connection, Memory):
        return [vars(run) for run in connection.locks.runs(task)]
    cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
    query = "SELECT * FROM task_lock_run WHERE task_name = %s ORDER BY token"
    return cursor.execute(query, [task]).fetchall()


def said(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what an entry says of its run, without where it is."""
    place = {"task", "task_name", "ring", "slot"}
    return {name: it for name, it in entry.items() if name not in place and it is not None}


def outcomes(connection: Connection, task: str = "task") -> list[str]:
    return [entry["outcome"] for entry in entries(connection, task)]


def run(replica: Replica, travel: Travel, **end: Any) -> int:
    """Run a window, and move on to the next; return the run's token."""
    claim_id, answer = replica.claim()
    assert answer.granted
    replica.end(claim_id, **{"outcome": "ok", **end})
    travel(10)
    return answer.token


def keeping(replica: Replica, runs: int) -> Replica:
    if isinstance(replica.connection, Memory):
        replica.connection.locks.history = runs
    else:
        replica.protocol = protocol_of(
            replica.name, replica.connection, lock_timeout=10, history=runs
        )
    return replica


@pytest.mark.postgresql
def test_a_run_that_failed_fills_each_column_of_runs(one: Replica, connection: Connection) -> None:
    """A column that is forgotten where entries are written is null in all of them."""
    one.protocol = protocol_of(one.name, release="1.2")
    failed = {"outcome": "error", "error_type": "E", "error": "why", "traceback": "frames"}
    one.end(one.claim()[0], **failed, retry_in=60.0)
    [entry] = entries(connection)
    # These columns tell of actions and of missed run times.
    of_others = {"action_id", "by", "cause", "last_scheduled_at", "reason", "run_times", "until"}
    assert {name for name, value in entry.items() if value is None} == of_others


class TestReleases:
    def test_a_run_that_ended_well(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        claim_id, answer = one.claim(lag=2)
        began = database_now(connection)
        assert entries(connection) == []
        travel(3)
        one.end(claim_id, outcome="ok")
        assert [said(entry) for entry in entries(connection)] == [
            {
                "token": answer.token,
                "scheduled_at": began - timedelta(seconds=2),
                "started_at": began,
                "ended_at": began + timedelta(seconds=3),
                "replica": "one",
                "kind": "schedule",
                "outcome": "ok",
                "attempt": 1,
            }
        ]
        told = row(connection)
        assert told["succeeded_at"] == began + timedelta(seconds=3)
        assert (told["failures"], told["failed_at"]) == (0, None)

    def test_a_run_that_raised(self, one: Replica, travel: Travel, connection: Connection) -> None:
        for _ in range(2):
            run(one, travel, outcome="error", error_type="ValueError", error="no number")
        entry = entries(connection)[-1]
        assert (entry["outcome"], entry["error_type"]) == ("error", "ValueError")
        assert entry["error"] == "no number"
        told = row(connection)
        assert (told["failures"], told["error_type"]) == (2, "ValueError")
        assert told["succeeded_at"] is None
        run(one, travel)
        assert (row(connection)["failures"], row(connection)["error_type"]) == (0, None)

    def test_a_hold_has_no_run_time(self, one: Replica, connection: Connection) -> None:
        claim_id, _ = one.hold()
        one.end(claim_id, outcome="ok")
        [entry] = entries(connection)
        assert (entry["kind"], entry["scheduled_at"]) == ("hold", None)

    def test_a_claim_whose_run_never_began_has_no_entry(
        self, one: Replica, connection: Connection
    ) -> None:
        one.release(one.claim()[0], keep_window=False)
        one.hand_over(one.claim()[0])
        assert entries(connection) == []

    def test_a_release_that_is_sent_twice_writes_once(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        run(one, travel)
        claim_id, _ = one.claim()
        one.end(claim_id, outcome="ok")
        travel(1)
        before = entries(connection), row(connection)["recorded"]
        one.end(claim_id, outcome="error", error="another end")
        assert (entries(connection), row(connection)["recorded"]) == before

    @pytest.mark.parametrize("twice", [False, True])
    def test_a_run_that_is_cut_short_and_handed_over(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection, twice: bool
    ) -> None:
        run(one, travel)
        claim_id, _ = one.claim(**LEASED)
        for _ in range(1 + twice):
            one.end(claim_id, window=WindowAfter.HAND_OVER, outcome="cancelled")
        again, _ = other.take_over(claim_id)
        other.end(again, outcome="ok")
        assert outcomes(connection) == ["ok", "cancelled", "ok"]
        assert entries(connection)[-1]["kind"] == "takeover"
        assert row(connection)["failures"] == 0

    def test_many_together_write_what_each_would(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        ends = {
            "ok": RunOutcome(outcome="ok"),
            "error": RunOutcome(outcome="error", error_type="E", error="e", traceback="t"),
            "handed over": RunOutcome(WindowAfter.HAND_OVER, "cancelled"),
            "never begun": RunOutcome(WindowAfter.HAND_OVER),
        }
        requests = []
        for task, end in ends.items():
            claim_id, answer = one.claim(task)
            requests.append(ReleaseRequest(task, claim_id, end, answer.token))
        travel(1)
        for _ in range(2):
            one.ask(Releases(requests))
        assert {task: outcomes(connection, task) for task in ends} == {
            "ok": ["ok"],
            "error": ["error"],
            "handed over": ["cancelled"],
            "never begun": [],
        }
        [entry] = entries(connection, "error")
        assert (entry["error"], entry["traceback"]) == ("e", "t")
        assert row(connection, "error")["failures"] == 1


def of_release(replica: Replica, release: str) -> Replica:
    replica.protocol = protocol_of(
        replica.name, replica.connection, lock_timeout=10, release=release
    )
    return replica


@pytest.mark.postgresql
class TestReleasesOfTheApplication:
    """An entry has the release of the replica that ran it, if that writes the entry."""

    def test_of_a_run_that_its_replica_releases_alone_and_with_others(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        run(of_release(one, "1.4"), travel)
        claim_id, answer = one.claim()
        request = ReleaseRequest("task", claim_id, RunOutcome(outcome="ok"), answer.token)
        one.ask(Releases([request]))
        travel(10)
        claim_id, _ = of_release(one, "1.5").claim()
        one.end(claim_id, window=WindowAfter.HAND_OVER, outcome="cancelled")
        assert [entry["release"] for entry in entries(connection)] == ["1.4", "1.4", "1.5"]

    def test_of_a_run_that_another_replica_closes_it_is_not_known(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead, _ = of_release(one, "1.4").claim(**LEASED)
        travel(100)
        assert of_release(other, "1.6").takes_over(dead)
        [entry] = entries(connection)
        assert (entry["outcome"], entry["release"]) == ("died", None)


class TestDeaths:
    @pytest.mark.parametrize("by", ["claim", "claim of many", "takeover"])
    def test_what_follows_a_dead_run_writes_its_entry(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection, by: str
    ) -> None:
        run(one, travel)
        failover = by == "takeover"
        dead, first = one.claim(**{**LEASED, "failover": failover})
        began = database_now(connection)
        travel(100)
        if by == "claim":
            assert other.granted()
        elif by == "claim of many":
            assert other.claim_many(ClaimRequest("task", 9.0, 50.0, runs="jobs:job"))
        else:
            assert other.takes_over(dead)
        assert said(entries(connection)[-1]) == {
            "token": first.token,
            "scheduled_at": began,
            "started_at": began,
            "ended_at": began + timedelta(seconds=30),
            "replica": "one",
            "kind": "schedule",
            "outcome": "died",
            "attempt": 1,
        }
        assert (row(connection)["failures"], row(connection)["deaths"]) == (1, 1)

    def test_a_death_and_the_error_of_its_takeover_are_one_failure(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        run(one, travel, outcome="error")
        dead, _ = one.claim(**LEASED)
        travel(31)
        again, _ = other.take_over(dead, lease=30)
        assert row(connection)["failures"] == 2
        travel(31)
        third, _ = one.take_over(again)
        assert row(connection)["failures"] == 2
        one.end(third, outcome="error")
        assert (row(connection)["failures"], row(connection)["deaths"]) == (2, 0)
        run(one, travel, outcome="error")
        assert row(connection)["failures"] == 3

    def test_the_error_of_a_run_that_was_handed_over_is_a_failure(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        run(one, travel, outcome="error")
        claim_id, _ = one.claim(**LEASED)
        one.end(claim_id, window=WindowAfter.HAND_OVER, outcome="cancelled")
        again, _ = other.take_over(claim_id)
        other.end(again, outcome="error")
        assert row(connection)["failures"] == 2

    def test_a_batch_notes_the_deaths_of_those_of_its_tasks_that_have_one(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        ended, _ = one.claim("ended")
        one.end(ended, "ended", outcome="ok")
        one.claim("dead", lease=30.0, max_lock=500.0)
        one.claim("running", lease=200.0, max_lock=500.0)
        travel(100)
        tasks = ["dead", "ended", "running"]
        answers = other.claim_many(*(ClaimRequest(task, 9.0, 50.0, runs="r") for task in tasks))
        assert [answer.granted for answer in answers.values()] == [True, True, False]
        assert {task: outcomes(connection, task) for task in tasks} == {
            "dead": ["died"],
            "ended": ["ok"],
            "running": [],
        }
        deaths = {task: row(connection, task)["deaths"] for task in tasks}
        assert deaths == {"dead": 1, "ended": 0, "running": 0}

    def test_one_that_is_given_up_has_died(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead, _ = one.claim(**LEASED)
        began = database_now(connection)
        travel(100)
        assert other.give_up(dead)
        [entry] = entries(connection)
        assert (entry["outcome"], entry["ended_at"]) == ("died", began + timedelta(seconds=30))

    def test_one_that_was_handed_over_and_is_given_up_has_not(
        self, one: Replica, other: Replica, connection: Connection
    ) -> None:
        claim_id, _ = one.claim(**LEASED)
        one.end(claim_id, window=WindowAfter.HAND_OVER, outcome="cancelled")
        assert other.give_up(claim_id)
        assert outcomes(connection) == ["cancelled"]
        assert row(connection)["failures"] == 0

    @pytest.mark.postgresql
    def test_a_run_that_was_released_while_a_claim_waited_for_its_row_has_not_died(
        self, one: Replica, travel: Travel, connection: Connection, direct_url: str
    ) -> None:
        claim_id, _ = one.claim(**{**LEASED, "failover": False})
        travel(100)
        waiting = "SELECT FROM pg_locks WHERE NOT granted"
        with psycopg.connect(direct_url) as releasing, ThreadPoolExecutor(1) as pool:
            releasing.execute("SELECT 1")  # begins a transaction
            Replica("one", releasing).end(claim_id, outcome="ok")  # and not committed yet
            with psycopg.connect(direct_url, autocommit=True) as claiming:
                claimed = pool.submit(Replica("other", claiming).granted)
                eventually(lambda: connection.execute(waiting).rowcount == 1)
                releasing.commit()
                assert claimed.result(60)
        assert outcomes(connection) == ["ok"]
        assert row(connection)["failures"] == 0


ONE_OR_MANY = pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])


def release_late(
    replica: Replica,
    claim: tuple[UUID, ClaimAnswer],
    ended_at: datetime | None = None,
    *,
    together: bool = False,
    **end: Any,
) -> ReleaseAnswer | None:
    """Release a claim that was taken for dead.

    :param ended_at: when its run ended; by default when the release is sent
    :param together: whether another release travels with it, which finds nothing
    """
    claim_id, answer = claim
    request = ReleaseRequest("task", claim_id, RunOutcome(**end), answer.token, ended_at)
    return replica.released(request, together=together)


class TestLateReleases:
    """A run that ended is not told as ``died`` once its replica has told."""

    @ON_BOTH
    @ONE_OR_MANY
    def test_a_run_that_ended_before_the_other_claim_began_has_its_own_outcome(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection, together: bool
    ) -> None:
        dead = one.claim(**LEASED)
        ended_at = database_now(connection) + timedelta(seconds=20)
        travel(100)
        assert other.takes_over(dead[0])
        before = row(connection)
        assert outcomes(connection) == ["died"]
        travel(1)
        for _ in range(2):
            assert release_late(one, dead, ended_at, together=together, outcome="ok") is None
        [entry] = entries(connection)
        assert (entry["token"], entry["outcome"]) == (dead[1].token, "ok")
        assert entry["ended_at"] == ended_at
        assert row(connection) == before

    @ON_BOTH
    @ONE_OR_MANY
    def test_an_error_is_told_with_what_it_said_and_its_retry_is_void(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection, together: bool
    ) -> None:
        dead = one.claim(**LEASED)
        ended_at = database_now(connection) + timedelta(seconds=20)
        travel(100)
        assert other.takes_over(dead[0])
        before = row(connection)
        failed = {"outcome": "error", "error_type": "E", "error": "why", "traceback": "frames"}
        release_late(one, dead, ended_at, together=together, **failed, retry_in=1.0)
        [entry] = entries(connection)
        assert {name: entry[name] for name in failed} == failed
        assert entry["retry_at"] is None
        assert row(connection) == before

    @ON_BOTH
    @ONE_OR_MANY
    def test_a_run_that_ended_after_the_other_claim_began_was_overtaken(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection, together: bool
    ) -> None:
        dead = one.claim(**LEASED)
        travel(100)
        again, second = other.take_over(dead[0])
        assert second is not None
        ended_at = database_now(connection)
        for _ in range(2):
            travel(1)
            error = {"outcome": "error", "error_type": "E", "error": "why"}
            assert release_late(one, dead, together=together, **error) is None
        [entry] = entries(connection)
        assert (entry["token"], entry["outcome"]) == (dead[1].token, "overtaken")
        assert (entry["error_type"], entry["error"]) == (None, None)
        assert entry["ended_at"] == ended_at + timedelta(seconds=1)
        other.end(again, outcome="ok", token=second.token)
        assert outcomes(connection) == ["overtaken", "ok"]

    @ON_BOTH
    def test_a_run_that_ended_before_the_clock_went_back_is_placed_by_how_long_ago_that_was(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        claim_id, answer = one.claim(**LEASED)
        travel(50)
        ended_at = database_now(connection)
        travel(20 - 30)  # the new server's clock is 30 s behind
        assert other.takes_over(claim_id)
        travel(1)
        end = RunOutcome(outcome="ok")
        late = ReleaseRequest("task", claim_id, end, answer.token, ended_at, lambda: 21.0)
        one.ask(late)
        [entry] = entries(connection)
        assert entry["outcome"] == "ok"
        assert entry["ended_at"] == ended_at - timedelta(seconds=30)

    @ON_BOTH
    def test_the_first_claim_after_it_decides_and_not_the_last(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead = one.claim(**LEASED)
        travel(100)
        again, _ = other.take_over(dead[0])
        travel(1)
        ended_at = database_now(connection)
        travel(1)
        other.end(again, outcome="ok")
        travel(100)
        assert other.granted(**LEASED)
        release_late(one, dead, ended_at, outcome="ok")
        assert outcomes(connection) == ["overtaken", "ok"]

    @ON_BOTH
    @ONE_OR_MANY
    def test_a_run_that_was_given_up_has_its_own_outcome_in_the_row_too(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection, together: bool
    ) -> None:
        dead = one.claim(**LEASED)
        ended_at = database_now(connection) + timedelta(seconds=20)
        travel(400)
        assert other.give_up(dead[0])
        before = row(connection)
        travel(1)
        assert release_late(one, dead, ended_at, together=together, outcome="ok") is not None
        [entry] = entries(connection)
        assert (entry["outcome"], entry["ended_at"]) == ("ok", ended_at)
        told = row(connection)
        assert told["last_outcome"] == "ok"
        for kept in ("failures", "failed_at", "error_type", "recorded", "recorded_failures"):
            assert told[kept] == before[kept]

    @ON_BOTH
    @ONE_OR_MANY
    def test_a_claim_that_never_began_has_not_died(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection, together: bool
    ) -> None:
        dead = one.claim(**LEASED)
        travel(100)
        assert other.takes_over(dead[0])
        before = row(connection)
        travel(1)
        window = WindowAfter.HAND_OVER
        assert release_late(one, dead, together=together, window=window) is None
        assert outcomes(connection) == ["cancelled"]
        assert row(connection) == before

    @ON_BOTH
    @ONE_OR_MANY
    def test_a_run_that_was_cut_has_its_own_outcome(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection, together: bool
    ) -> None:
        dead = one.claim(**LEASED)
        ended_at = database_now(connection) + timedelta(seconds=20)
        travel(100)
        assert other.takes_over(dead[0])
        cut = {"window": WindowAfter.HAND_OVER, "outcome": "cancelled", "cut": True}
        release_late(one, dead, ended_at, together=together, **cut)
        assert outcomes(connection) == ["cancelled"]

    @ON_BOTH
    @ONE_OR_MANY
    def test_without_its_entry_nothing_is_written_and_no_count_moves(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection, together: bool
    ) -> None:
        keeping(one, 1)
        keeping(other, 1)
        dead = one.claim(**LEASED)
        travel(100)
        again, _ = other.take_over(dead[0])
        other.end(again, outcome="error")  # which overwrites the entry of the dead run
        before, told = row(connection), entries(connection)
        assert [entry["outcome"] for entry in told] == ["error"]
        travel(1)
        assert release_late(one, dead, together=together, outcome="ok") is None
        assert row(connection) == before
        assert entries(connection) == told

    @ON_BOTH
    def test_a_release_after_the_maximum_lock_finishes_the_run_if_the_clock_went_back(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        claim = one.claim(**LEASED)
        began = database_now(connection)
        travel(10)
        ended_at = database_now(connection)
        travel(-40)
        assert release_late(one, claim, ended_at, outcome="ok") is not None
        assert row(connection)["finished_at"] == began
        assert outcomes(connection) == ["ok"]

    @pytest.mark.postgresql
    @pytest.mark.parametrize("follows", ["takeover", "giving up"])
    def test_an_entry_that_is_committed_while_the_release_waits_is_corrected(
        self, one: Replica, travel: Travel, connection: Connection, direct_url: str, follows: str
    ) -> None:
        dead = one.claim(**LEASED)
        ended_at = database_now(connection) + timedelta(seconds=20)
        travel(400 if follows == "giving up" else 100)
        waiting = "SELECT FROM pg_locks WHERE NOT granted"
        with psycopg.connect(direct_url) as following, ThreadPoolExecutor(1) as pool:
            other = Replica("other", following)
            did = other.give_up if follows == "giving up" else other.takes_over
            following.execute("SELECT 1")  # begins a transaction
            assert did(dead[0])  # and not committed yet
            with psycopg.connect(direct_url, autocommit=True) as releasing:
                late = Replica("one", releasing)
                released = pool.submit(release_late, late, dead, ended_at, outcome="ok")
                eventually(lambda: connection.execute(waiting).rowcount == 1)
                following.commit()
                released.result(60)
        assert outcomes(connection) == ["ok"]

    @pytest.mark.postgresql
    def test_a_release_has_arrived_when_its_correction_is_confirmed(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection, direct_url: str
    ) -> None:
        dead = one.claim(**LEASED)
        ended_at = database_now(connection) + timedelta(seconds=20)
        travel(100)
        assert other.takes_over(dead[0])
        with psycopg.connect(direct_url) as holding:
            holding.execute("SELECT FROM task_lock_run FOR UPDATE")
            impatient = Replica("one", one.connection, lock_timeout=0.01)
            with pytest.raises(psycopg.errors.LockNotAvailable):
                release_late(impatient, dead, ended_at, outcome="ok")
        assert outcomes(connection) == ["died"]
        release_late(one, dead, ended_at, outcome="ok")
        assert outcomes(connection) == ["ok"]


class TestRetention:
    def test_the_history_of_a_one_off_job_goes_with_its_row(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        one.end(one.claim("once", one_off=True)[0], "once", outcome="ok")
        one.end(one.claim("daily")[0], "daily", outcome="ok")
        travel(1000)
        assert one.prune(100) == 1
        assert (outcomes(connection, "once"), outcomes(connection, "daily")) == ([], ["ok"])

    def test_the_newest_runs_are_kept(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        keeping(one, 3)
        tokens = [run(one, travel) for _ in range(8)]
        assert [entry["token"] for entry in entries(connection)] == tokens[-3:]

    def test_what_did_not_end_well_outlasts_the_runs_after_it(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        keeping(one, 3)
        ends = ["error", *["ok"] * 5, "cancelled", *["ok"] * 4, "error", "error", "ok"]
        for outcome in ends:
            run(one, travel, outcome=outcome)
        assert outcomes(connection) == ["cancelled", "ok", "ok", "error", "error", "ok"]

    def test_deaths_outlast_the_runs_after_them(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        keeping(one, 2)
        one.claim(**{**LEASED, "failover": False})
        travel(31)
        for _ in range(4):
            run(one, travel)
        assert outcomes(connection) == ["died", "ok", "ok"]

    def test_each_task_has_its_own(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        keeping(one, 3)
        one.end(one.claim("other")[0], "other", outcome="ok")
        for _ in range(5):
            run(one, travel)
        assert outcomes(connection, "other") == ["ok"]

    def test_none_at_all(self, one: Replica, travel: Travel, connection: Connection) -> None:
        keeping(one, 0)
        run(one, travel)
        one.claim(**LEASED)
        travel(400)
        assert one.granted()
        assert entries(connection) == []
        assert row(connection)["failures"] == 1

    @pytest.mark.postgresql
    def test_the_table_keeps_its_size_without_a_vacuum(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        keeping(one, 20)
        connection.execute("ALTER TABLE task_lock_run SET (autovacuum_enabled = false)")
        connection.execute("TRUNCATE task_lock_run")  # else it has room of earlier tests' rows

        def size() -> int:
            found = connection.execute("SELECT pg_relation_size('task_lock_run')").fetchone()
            assert found is not None
            return int(found[0])

        for _ in range(60):
            run(one, travel)
        before = size()
        for _ in range(300):
            run(one, travel)
        assert size() == before


@pytest.mark.postgresql
class TestMissingGrants:
    def test_a_text_that_the_database_cannot_store_is_stored_without_what_it_lacks(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        """As in a database of another encoding; a NUL stands for what it lacks."""
        run(one, travel, outcome="error", error_type="E", error="a\0b")
        told = row(connection)
        assert told["finished_at"] is not None
        assert (told["failures"], told["error_type"]) == (1, "E")
        assert [entry["error"] for entry in entries(connection)] == ["a?b"]

    @pytest.fixture
    def denied(self, one: Replica, connection: Connection) -> Replica:
        """Take the history away, as where its grant is missing."""
        connection.execute("ALTER TABLE task_lock_run RENAME TO elsewhere")
        return one

    def test_the_lock_works_on_without_it_and_says_so_once(
        self, denied: Replica, travel: Travel, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, logger="apscheduler_tasklock"):
            for _ in range(3):
                run(denied, travel)
            denied.ask(Releases([ReleaseRequest("task", denied.claim()[0])]))
        [said] = [record.getMessage() for record in caplog.records]
        assert said.startswith("Rejected by the database, and tried again: history: the table")
        assert "task_lock_run does not exist" in said

    def test_a_late_release_arrives_without_it(
        self, denied: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead = denied.claim(**LEASED)
        travel(100)
        assert other.takes_over(dead[0])
        before = row(connection)
        for together in (False, True):
            assert release_late(denied, dead, together=together, outcome="ok") is None
        assert row(connection) == before

    def test_a_late_release_says_what_the_database_can_store(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead = one.claim(**LEASED)
        ended_at = database_now(connection)
        travel(100)
        assert other.takes_over(dead[0])
        release_late(one, dead, ended_at, outcome="error", error_type="E", error="a\0b")
        [entry] = entries(connection)
        assert (entry["outcome"], entry["error"]) == ("error", "a?b")

    def test_a_release_that_fails_by_its_entry_alone_is_sent_without_it(
        self, one: Replica, travel: Travel, connection: Connection
    ) -> None:
        connection.execute("ALTER TABLE task_lock_run ADD CHECK (error <> 'odd')")
        run(one, travel, outcome="error", error="odd")
        run(one, travel, outcome="error", error="even")
        assert [entry["error"] for entry in entries(connection)] == ["even"]
        assert row(connection)["failures"] == 2


@pytest.mark.parametrize(
    ("says", "kept"),
    [
        ("plain", "plain"),
        ("a\0b", "a\ufffdb"),
        ("lone \ud800 surrogate", "lone ? surrogate"),
        ("x" * 1000, "x" * 500),
    ],
)
def test_what_an_exception_says_is_made_fit_first(
    one: Replica, travel: Travel, connection: Connection, says: str, kept: str
) -> None:
    claim_id, _ = one.claim()
    end = RunOutcome.of(ValueError(says))
    one.end(claim_id, **vars(end))
    [entry] = entries(connection)
    assert (entry["error_type"], entry["error"]) == ("ValueError", kept)


@pytest.mark.parametrize("raised", [RuntimeError("mute"), SystemExit("mute")])
def test_what_cannot_say_anything_keeps_its_type(
    caplog: pytest.LogCaptureFixture, raised: BaseException
) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise raised

    end = RunOutcome.of(MuteError())
    assert (end.outcome, end.error) == ("error", None)
    assert str(end.error_type).endswith("MuteError")
    assert "is not in the run history" in caplog.text
