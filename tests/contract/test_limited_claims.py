"""Claims of which as many are granted as there are workers for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock._database.sqlstates import RowLockedError
from tests.support.waist import (
    ClaimRequest,
    GrantLimitError,
    Replica,
    TimedAnswer,
    attempt,
    believing,
    send_together,
)

Travel = Callable[[float], None]

# Not in the order of the names, in which rows are locked otherwise.
TASKS = ("m", "z", "a")


def request(task: str, **more: Any) -> ClaimRequest:
    return ClaimRequest(task, 9.0, 50.0, runs="job", **more)


class Claims:
    """The claims of these tasks, as a replica sends them."""

    def __init__(self, replica: Replica, tasks: Sequence[str] = TASKS) -> None:
        context = believing(replica.protocol)
        self._replica = replica
        self._attempts = [attempt(request(task), context) for task in tasks]

    def send(self, most: int) -> dict[str, str]:
        """Return what became of each."""
        decided = send_together(self._replica.cursor, self._attempts, most=most)
        return {
            attempt.task_name: told(each)
            for attempt, each in zip(self._attempts, decided, strict=True)
        }


def told(decided: Any) -> str:
    if isinstance(decided, TimedAnswer):
        assert decided.answer is not None
        return "granted" if decided.answer.granted else "refused"
    return {GrantLimitError: "beyond", RowLockedError: "locked"}[type(decided)]


def make_rows(replica: Replica, travel: Travel) -> None:
    """Let each task have a row of a window that is over."""
    for task in TASKS:
        replica.release(replica.claim(task)[0], task)
    travel(10)


@pytest.fixture(params=["rows", "no rows"])
def have_rows(request: pytest.FixtureRequest, one: Replica, travel: Travel) -> bool:
    if request.param == "rows":
        make_rows(one, travel)
    return bool(request.param == "rows")


@pytest.mark.usefixtures("have_rows")
class TestOrder:
    @pytest.mark.parametrize("most", [1, 2, 3, 9])
    def test_those_that_are_asked_for_first_are_granted(self, one: Replica, most: int) -> None:
        expected = ["granted"] * most + ["beyond"] * 3
        assert Claims(one).send(most) == dict(zip(TASKS, expected, strict=False))

    def test_what_is_refused_takes_no_place(self, one: Replica, other: Replica) -> None:
        other.claim("m")
        assert Claims(one).send(1) == {"m": "refused", "z": "granted", "a": "beyond"}

    def test_what_is_beyond_the_limit_can_be_claimed(self, one: Replica, other: Replica) -> None:
        Claims(one).send(1)
        assert Claims(other).send(3) == {"m": "refused", "z": "granted", "a": "granted"}

    @pytest.mark.parametrize("most", [1, 2])
    def test_sent_again_no_more_are_granted(self, one: Replica, most: int) -> None:
        """The answer was lost, and what it granted is in the rows."""
        claims = Claims(one)
        first = claims.send(most)
        assert claims.send(most) == first

    def test_sent_again_with_fewer_workers_what_was_granted_stands(self, one: Replica) -> None:
        claims = Claims(one)
        first = claims.send(2)
        assert claims.send(1) == first


def test_tasks_with_a_row_and_without_share_the_limit(one: Replica, travel: Travel) -> None:
    one.release(one.claim("a")[0], "a")
    travel(10)
    claims = Claims(one)
    # Those that have a row are asked for first.
    assert claims.send(2) == {"a": "granted", "m": "granted", "z": "beyond"}
    assert claims.send(2) == {"a": "granted", "m": "granted", "z": "beyond"}


@pytest.mark.postgresql
@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, {"m": "beyond", "z": "granted", "a": "beyond"}),
        (2, {"m": "beyond", "z": "granted", "a": "granted"}),
        (3, {"m": "locked", "z": "granted", "a": "granted"}),
    ],
)
def test_a_locked_row_takes_no_place(
    one: Replica, travel: Travel, direct_url: str, most: int, expected: dict[str, str]
) -> None:
    make_rows(one, travel)
    with psycopg.connect(direct_url) as blocker:
        blocker.execute("SELECT FROM task_lock WHERE task_name = 'm' FOR UPDATE")
        assert Claims(one).send(most) == expected
