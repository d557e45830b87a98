"""Tokens grow by the database's clock, so that a resource can reject an older writer.

They do so also after a restore, and after a failover that lost the last commits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from tests.contract.conftest import ON_BOTH, database_now, row, token_at
from tests.contract.store_replica import StoreReplica
from tests.support.claims import AHEAD
from tests.support.waist import ClaimAnswer, ClaimRequest, Replica, Rows, retry_of

Connection = psycopg.Connection[Any]
Travel = Callable[[float], None]


class FencedReport:
    """A row of a table that is fenced as the page says. It is in no backup of the tasks' rows."""

    def __init__(self, connection: Connection, page: Path) -> None:
        self._connection = connection
        [self._write] = re.findall(r"```sql\n(INSERT .*?)```", page.read_text(), re.DOTALL)
        connection.execute(
            "CREATE TEMP TABLE report (name text PRIMARY KEY, body text, token int8)"
        )

    def accepts(self, token: int) -> bool:
        values = {"name": "report", "body": f"by {token}", "token": token}
        return self._connection.execute(self._write, values).rowcount == 1


@pytest.fixture
def report(connection: Connection, checkout: Path) -> FencedReport:
    return FencedReport(connection, checkout / "docs/how-to/fencing.md")


def restore(connection: Connection, earlier: dict[str, Any]) -> None:
    """Let the task's row be as it was, as after the restore of a backup."""
    names = [name for name in earlier if name != "task_name"]
    changes = sql.SQL(", ").join(
        sql.SQL("{} = {}").format(sql.Identifier(name), sql.Placeholder(name)) for name in names
    )
    connection.execute(sql.SQL("UPDATE task_lock SET {}").format(changes), earlier)


def run(replica: Replica) -> int:
    """Claim the task and release it; return the token."""
    claim_id, answer = replica.claim()
    assert answer.granted
    replica.end(claim_id, outcome="ok")
    return answer.token


@pytest.mark.postgresql
@pytest.mark.parametrize("lost", [1, 4])
def test_no_good_run_is_rejected_after_a_restore(
    lost: int, one: Replica, connection: Connection, travel: Travel, report: FencedReport
) -> None:
    """Also no run writes with the token of another one."""
    tokens, accepted = [], []
    for number in range(5 + lost + 6):
        if number == 5:
            earlier = row(connection)
        if number == 5 + lost:
            restore(connection, earlier)
        tokens.append(run(one))
        accepted.append(report.accepts(tokens[-1]))
        travel(10)
    assert accepted == [True] * len(tokens)
    assert tokens == sorted(set(tokens))
    assert not report.accepts(tokens[5]), "a writer that the restore has forgotten"


# ---- each statement that gives a token -----------------------------------------------------------

# Claims the task that was prepared, and returns the answer.
Ask = Callable[[], ClaimAnswer | None]


def claims(one: StoreReplica, travel: Travel, most: int | None = None) -> Ask:
    one.release(one.claim()[0])
    travel(20)
    request = ClaimRequest("task", 9.0, 50.0)
    return lambda: one.claim_many(request, most=most)[request.claim_id]


def claims_alone(one: StoreReplica, travel: Travel) -> Ask:
    claims(one, travel)
    return lambda: one.claim()[1]


def claims_some(one: StoreReplica, travel: Travel) -> Ask:
    return claims(one, travel, most=1)


def takes_over(one: StoreReplica, travel: Travel) -> Ask:
    dead, _ = one.claim(lease=2, failover=True, max_lock=300)
    travel(20)
    return lambda: one.take_over(dead)[1]


def retries(one: StoreReplica, travel: Travel) -> Ask:
    failed, _ = one.claim()
    one.end(failed, outcome="error", retry_in=5.0)
    travel(20)
    retry = retry_of("task", failed, 60.0, 30.0, failover=True)
    return lambda: one.rerun(retry)


def runs_by_hand(one: StoreReplica, travel: Travel) -> Ask:
    one.release(one.claim()[0])
    travel(20)
    request_id = uuid4()
    one.connection.execute(
        "UPDATE task_lock SET request_id = %s, request_until = now() + interval '1 h'", [request_id]
    )
    return lambda: one.run_by_hand(request_id)[1]


def runs_a_stored_job(one: StoreReplica, travel: Travel) -> Ask:
    one.add()
    one.release(one.claim_job(one.one()).claim_id, "task of job")
    travel(60)
    found = one.one()
    return lambda: one.claim_job(found)


@pytest.fixture(
    params=[
        *(claims_alone, claims, claims_some, takes_over, retries, runs_by_hand, runs_a_stored_job)
    ],
    ids=lambda way: way.__name__,
)
def ask(
    request: pytest.FixtureRequest, replicas_connection: Connection, travel: Travel
) -> Callable[[int], ClaimAnswer]:
    """Claim a task in each way that there is, whose row has a token by then."""
    one = StoreReplica("one", replicas_connection)
    send: Ask = request.param(one, travel)

    def claim(token: int) -> ClaimAnswer:
        one.connection.execute("UPDATE task_lock SET token = %s", [token])
        answer = send()
        assert answer is not None
        assert answer.granted
        assert answer.token == one.connection.execute("SELECT token FROM task_lock").fetchone()[0]
        return answer

    return claim


@pytest.mark.postgresql
@pytest.mark.parametrize("token", [-(2**63), 0, 5])
def test_each_claim_has_the_databases_time(
    ask: Callable[[int], ClaimAnswer], connection: Connection, token: int
) -> None:
    assert ask(token).token == token_at(database_now(connection))


@pytest.mark.postgresql
@pytest.mark.parametrize("token", [AHEAD, 2**63 - 3])
def test_a_claim_after_a_token_that_the_clock_has_not_reached_has_the_next_number(
    ask: Callable[[int], ClaimAnswer], token: int
) -> None:
    assert ask(token).token == token + 1


@pytest.mark.postgresql
@pytest.mark.parametrize("token", [2**63 - 2, 2**63 - 1])
def test_a_claim_after_the_largest_token_is_rejected(
    ask: Callable[[int], ClaimAnswer], connection: Connection, token: int
) -> None:
    with pytest.raises(psycopg.errors.NumericValueOutOfRange):
        ask(token)
    assert connection.execute("SELECT token FROM task_lock").fetchone() == (token,)


@ON_BOTH
def test_two_claims_of_one_millisecond_have_two_tokens(
    one: Replica, connection: Rows, travel: Travel
) -> None:
    """By one, until the clock has passed the last token."""
    first, tokens = token_at(database_now(connection)), []
    for seconds in (0, 0, 0, 0.001, 1):
        travel(seconds)
        claim_id, answer = one.claim(min_lock=0)
        assert answer.granted
        tokens.append(answer.token - first)
        one.release(claim_id)
    assert tokens == [0, 1, 2, 3, 1001]
