"""Claims that are sent again in doubt: a grant that is found is written once more.

The server may have committed it alone, so that a failover to a standby would lose it. What a read
finds proves nothing, and a write that is confirmed does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from tests.contract.conftest import row
from tests.support.waist import (
    AnyAttempt,
    ClaimContext,
    ClaimRequest,
    Replica,
    RowLockedError,
    TimedAnswer,
    attempt,
    believing,
    manual_run_of,
    retry_of,
    send_together,
    takeover_of,
)

# The versions of rows and the locks of sessions are PostgreSQL's.
pytestmark = pytest.mark.postgresql

Connection = psycopg.Connection[Any]

LEASE = 30.0


def claim(_one: Replica) -> Any:
    return ClaimRequest("task", 9.0, 600.0, runs="jobs:job", lease=LEASE)


def takeover(one: Replica) -> Any:
    dead, _ = one.claim(failover=True, lease=0.0, max_lock=600.0)
    return takeover_of("task", dead, "one", LEASE)


def retry(one: Replica) -> Any:
    failed, _ = one.claim(max_lock=600.0)
    one.end(failed, outcome="failed", retry_in=0.0)
    return retry_of("task", failed, 600.0, LEASE)


def manual(one: Replica) -> Any:
    one.release(one.claim(max_lock=600.0)[0])
    asked = uuid4()
    one.connection.execute(
        "UPDATE task_lock SET request_id = %s, request_until = now() + interval '1 hour'", [asked]
    )
    return manual_run_of("task", asked, 600.0, LEASE, runs="jobs:job")


KINDS = pytest.mark.parametrize("kind", [claim, takeover, retry, manual])


def sent(one: Replica, wanted: AnyAttempt) -> TimedAnswer:
    """Send an attempt; return the decision, or raise the error."""
    decided: Any = wanted.send(one.cursor)
    if isinstance(decided, Exception):
        raise decided
    assert isinstance(decided, TimedAnswer)
    assert decided.answer is not None
    return decided


def version(connection: Connection) -> Any:
    """Return what tells the version of the row from each other one."""
    return connection.execute("SELECT ctid, xmin FROM task_lock").fetchone()


@KINDS
def test_a_grant_that_is_found_is_written_again_with_a_new_lease(
    one: Replica, connection: Connection, kind: Callable[[Replica], Any]
) -> None:
    wanted = attempt(kind(one), believing(one.protocol))
    first = sent(one, wanted).answer
    assert first is not None
    assert first.granted
    connection.execute("UPDATE task_lock SET locked_until = now() + interval '1 second'")
    before = version(connection)
    wanted.note_failure(psycopg.OperationalError("the answer was lost"))
    second = sent(one, wanted).answer
    assert second is not None
    assert (second.granted, second.claim_id) == (True, first.claim_id)
    assert version(connection) != before
    found = row(connection)
    assert found["locked_until"] == second.locked_until
    assert (second.locked_until - second.database_time).total_seconds() == LEASE
    assert second.run_until == first.run_until


@KINDS
def test_a_claim_whose_grant_cannot_be_written_again_is_sent_again(
    one: Replica, connection: Connection, direct_url: str, kind: Callable[[Replica], Any]
) -> None:
    wanted = attempt(kind(one), believing(one.protocol))
    sent(one, wanted)
    wanted.note_failure(psycopg.OperationalError("the answer was lost"))
    with psycopg.connect(direct_url) as blocker:
        blocker.execute("SELECT FROM task_lock FOR UPDATE")
        assert isinstance(wanted.send(one.cursor), RowLockedError)
    assert wanted.in_doubt


@pytest.mark.parametrize("kind", [takeover, retry, manual])
def test_a_rerun_whose_lease_is_over_when_its_answer_comes_gets_a_new_one(
    one: Replica,
    monkeypatch: pytest.MonkeyPatch,
    travel: Callable[[float], None],
    kind: Callable[[Replica], Any],
) -> None:
    wanted = attempt(kind(one), believing(one.protocol))
    began = time.monotonic()
    see_times(monkeypatch, [began, began + LEASE + 1])
    assert isinstance(wanted.send(one.cursor), Exception)
    assert wanted.in_doubt
    granted = row(one.connection)
    travel(LEASE + 1)
    answer = sent(one, wanted).answer
    assert answer is not None
    assert (answer.granted, answer.claim_id) == (True, granted["claim_id"])
    assert row(one.connection)["locked_until"] > granted["locked_until"]


def test_of_claims_that_are_sent_together_those_in_doubt_are_written_again(
    one: Replica, connection: Connection
) -> None:
    context = believing(one.protocol)
    attempts = [
        attempt(ClaimRequest(task, 9.0, 600.0, runs="jobs:job", lease=LEASE), context)
        for task in ("doubted", "sure", "new")
    ]
    versions = "SELECT task_name, ctid FROM task_lock"
    send_together(one.cursor, attempts[:2])
    before = dict(connection.execute(versions).fetchall())
    attempts[0].note_failure(psycopg.OperationalError("the answer was lost"))
    decided = send_together(one.cursor, attempts)
    assert [each.answer.granted for each in decided] == [True, True, True]
    after = dict(connection.execute(versions).fetchall())
    assert {task for task in before if after[task] != before[task]} == {"doubted"}


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_takeover_that_waited_for_long_is_begun_only_of_what_was_handed_over(
    one: Replica, monkeypatch: pytest.MonkeyPatch, handed_over: bool
) -> None:
    """Its commit may have waited for a standby, and the holder could not renew meanwhile."""
    context = believing(one.protocol)
    wanted = attempt(replace(takeover(one), handed_over=handed_over), context)
    began = time.monotonic()
    see_times(monkeypatch, [began, began + 1.5])
    decided: Any = wanted.send(one.cursor)
    assert decided.answer.granted is handed_over
    assert wanted.in_doubt is not handed_over  # so it is handed over
    assert context.outage.stable is handed_over


def see_times(monkeypatch: pytest.MonkeyPatch, times: list[float]) -> None:
    """Let attempts at claims see the first of these times once, and then the second one.

    The connection goes by the real clock, so that the limits of its waits stay what they are.
    """
    clock = SimpleNamespace(monotonic=Clock(times), time=time.time)
    monkeypatch.setattr(f"{ClaimContext.__module__}.time", clock)


class Clock:
    """A clock that shows the first of these times once, and then the second one."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def __call__(self) -> float:
        return self._times.pop(0) if len(self._times) > 1 else self._times[0]
