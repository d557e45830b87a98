"""What becomes of a run that several replicas ask for at once, each on its own connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier
from typing import Any

import psycopg
import pytest

from tests.contract.conftest import database_now, row, token_at
from tests.support.polling import eventually
from tests.support.waist import ClaimAnswer, Replica

# What waits for a row, and sees it as it was before.
pytestmark = pytest.mark.postgresql

Travel = Callable[[float], None]
Connection = psycopg.Connection[Any]

LEASED: dict[str, Any] = {"min_lock": 9, "max_lock": 300, "lease": 2, "failover": True}

_WAITING = """
    SELECT FROM pg_stat_activity
    WHERE wait_event_type = 'Lock' AND query LIKE '%task_lock%' AND datname = current_database()
"""


@pytest.fixture
def watching(direct_url: str) -> Iterator[Connection]:
    with psycopg.connect(direct_url, autocommit=True) as watching:
        yield watching


@pytest.fixture
def crowd(direct_url: str) -> Iterator[list[Replica]]:
    """Eight replicas, each on a connection of its own."""
    with ExitStack() as closing:
        yield [
            Replica(
                f"replica {number}",
                closing.enter_context(psycopg.connect(direct_url, autocommit=True)),
            )
            for number in range(8)
        ]


def all_at_once(crowd: list[Replica], ask: Callable[[Replica], Any]) -> list[Any]:
    together = Barrier(len(crowd))

    def wait_and_ask(replica: Replica) -> Any:
        together.wait()
        return ask(replica)

    with ThreadPoolExecutor(len(crowd)) as pool:
        return list(pool.map(wait_and_ask, crowd))


def test_one_of_many_takes_over_and_the_others_are_told_who_runs_it(
    crowd: list[Replica], connection: Connection, travel: Travel
) -> None:
    dead, _ = Replica("dead", connection).claim(**LEASED)
    for turn in range(1, 21):
        travel(3)
        old = dead
        taken = all_at_once(crowd, lambda replica, old=old: replica.take_over(old, lease=2))
        answers: list[ClaimAnswer] = [answer for _, answer in taken]
        assert [answer.granted for answer in answers].count(True) == 1
        dead = next(claim_id for claim_id, answer in taken if answer.granted)
        token = token_at(database_now(connection))
        [closed] = [answer.closed for answer in answers if answer.closed]
        assert (closed["outcome"], closed["holder"] == "dead") == ("died", turn == 1)
        # Who met the winner at its work passed the row over, and asks again.
        answers = [crowd[0].take_over(old)[1] if a.looks_free else a for a in answers]
        assert {(a.claim_id, a.token, a.running, a.waits) for a in answers} == {
            (dead, token, True, False)
        }
        assert row(connection)["deaths"] == turn


def test_one_of_many_gives_up(crowd: list[Replica], connection: Connection, travel: Travel) -> None:
    for turn in range(20):
        dead, _ = Replica("dead", connection).claim(**{**LEASED, "failover": False})
        travel(3)
        gave_up = all_at_once(crowd, lambda replica, dead=dead: replica.give_up(dead))
        assert gave_up.count(True) == 1
        assert row(connection)["deaths"] == turn + 1
        travel(9)


def test_one_of_many_claims_and_the_others_are_told_who_runs_it(
    crowd: list[Replica], connection: Connection, travel: Travel
) -> None:
    for turn in range(20):
        claimed = all_at_once(crowd, lambda replica: replica.claim(**LEASED))
        answers = [answer for _, answer in claimed]
        assert [answer.granted for answer in answers].count(True) == 1
        winner = next(a for a in answers if a.granted)
        assert {(a.claim_id, a.token, a.running, a.new_window) for a in answers} == {
            (winner.claim_id, winner.token, True, False)
        }, turn
        crowd[0].release(winner.claim_id)
        travel(10)


def test_of_a_takeover_and_a_release_at_the_same_moment_one_comes_first(
    crowd: list[Replica], connection: Connection, travel: Travel
) -> None:
    late, *others = crowd
    for _ in range(20):
        claim_id, _ = late.claim(**LEASED)
        travel(3)

        def ask(replica: Replica, claim_id: Any = claim_id) -> bool:
            if replica is late:
                return late.release(claim_id) is not None
            return replica.takes_over(claim_id, lease=2)

        assert all_at_once(crowd, ask).count(True) == 1
        found = row(connection)
        others[0].release(found["claim_id"])
        travel(10)


def test_a_taker_passes_over_a_row_that_the_winner_has_and_is_told_who_runs_it_when_it_asks_again(
    other: Replica, connection: Connection, travel: Travel
) -> None:
    one = Replica("one", connection)
    dead, _ = Replica("dead", connection).claim(**LEASED)
    travel(3)
    with connection.transaction():
        _, won = one.take_over(dead, lease=2)
        _, passed_over = other.take_over(dead, lease=2)
    _, lost = other.take_over(dead, lease=2)

    assert won is not None
    assert passed_over is not None
    assert passed_over.looks_free
    assert lost is not None
    assert (won.granted, lost.granted) == (True, False)
    assert (lost.running, lost.holder, lost.token) == (True, "one", won.token)


def test_a_claim_that_waited_for_a_takeover_is_refused(
    other: Replica, connection: Connection, watching: Connection, travel: Travel
) -> None:
    """The next window, of a replica without failover, comes while the dead one is taken over."""
    one = Replica("one", connection)
    dead, _ = Replica("dead", connection).claim(**LEASED)
    travel(10)
    with ThreadPoolExecutor() as pool:
        with connection.transaction():
            _, won = one.take_over(dead, lease=2)
            losing = pool.submit(other.claim, **{**LEASED, "failover": False})
            eventually(lambda: watching.execute(_WAITING).rowcount == 1)
        _, lost = losing.result()

    assert won is not None
    assert won.granted
    assert (lost.granted, lost.running, lost.new_window) == (False, True, True)
    assert (lost.holder, lost.token) == ("one", won.token)


def test_a_claim_that_waited_for_a_late_release_is_granted(
    other: Replica, connection: Connection, watching: Connection, travel: Travel
) -> None:
    late = Replica("late", connection)
    claim_id, _ = late.claim(**{**LEASED, "failover": False})
    travel(10)
    with ThreadPoolExecutor() as pool:
        with connection.transaction():
            assert late.release(claim_id)
            claiming = pool.submit(other.claim, **{**LEASED, "failover": False})
            eventually(lambda: watching.execute(_WAITING).rowcount == 1)
        _, answer = claiming.result()

    assert (answer.granted, answer.token) == (True, token_at(database_now(connection)))
    assert row(connection)["deaths"] == 0  # which it would have been, had it not been released


def test_a_takeover_that_comes_while_the_claim_is_renewed_is_refused(
    other: Replica, connection: Connection, travel: Travel
) -> None:
    late = Replica("late", connection)
    claim_id, _ = late.claim(**LEASED)
    travel(10)
    with connection.transaction():
        assert late.renewed(claim_id)
        _, passed_over = other.take_over(claim_id, lease=2)
    _, answer = other.take_over(claim_id, lease=2)

    assert passed_over is not None
    assert passed_over.looks_free
    assert answer is not None
    assert (answer.granted, answer.running, answer.holder) == (False, True, "late")


@pytest.mark.parametrize(
    ("end", "outcomes"), [("died", ["died"]), ("ended", ["ok"]), ("handed over", [])]
)
def test_a_claim_that_waited_for_a_claim_whose_run_has_died_enters_no_other_run_as_dead(
    other: Replica,
    connection: Connection,
    watching: Connection,
    travel: Travel,
    end: str,
    outcomes: list[str],
) -> None:
    """Such a claim's commit has hung for longer than its lease, as where a standby is slow.

    The claim that waits knows only the run before it, which is over by then, and entered.
    """
    wanted = {**LEASED, "failover": False, "runs": "jobs:other"}
    first = Replica("first", connection)
    claim_id, _ = first.claim(**LEASED)
    if end == "ended":
        first.end(claim_id, outcome="ok")
    elif end == "handed over":
        first.hand_over(claim_id)
    travel(20)
    with ThreadPoolExecutor() as pool:
        with connection.transaction():
            assert Replica("hangs", connection).granted(**wanted)
            watching.execute("UPDATE travel.clock SET time = time + interval '20 s'")
            claiming = pool.submit(other.claim, **wanted)
            eventually(lambda: watching.execute(_WAITING).rowcount == 1)
        _, answer = claiming.result()
    assert answer.granted
    assert row(connection)["last_outcome"] == "died"
    entered = connection.execute("SELECT outcome FROM task_lock_run").fetchall()
    assert [outcome for (outcome,) in entered] == outcomes
