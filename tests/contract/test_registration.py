"""Registration: what a replica tells of its tasks, and what that does to a window."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock._lock.messages import Registered, Registration
from tests.contract.conftest import Memory, Replica, database_now, row

Travel = Callable[[float], None]
Connection = psycopg.Connection[Any]
HOUR = 3600.0


def register(replica: Replica, schedule: str, next_in: float | None, **more: Any) -> Registered:
    task = Registration(
        **{
            "task_name": "task",
            "schedule": schedule,
            "next_in": next_in,
            "grace": 60.0,
            "least_gap": 0.0,
            "runs": "jobs:job",
            **more,
        }
    )
    [registered] = replica.protocol.register(replica.cursor, [task])
    return registered


def run(replica: Replica, schedule: str, period: float, **request: Any) -> None:
    """Run a window now, with the minimum lock that a schedule has by default."""
    claim_id, answer = replica.claim(
        schedule=schedule, next_in=period, min_lock=0.9 * period, max_lock=5 * period, **request
    )
    assert answer.granted
    replica.end(claim_id, outcome="ok")


def test_a_task_that_has_never_run_gets_a_row_whose_claim_is_granted(
    one: Replica, connection: Connection, travel: Travel
) -> None:
    register(one, "daily", HOUR)
    now = database_now(connection)
    found = row(connection)
    assert (found["kind"], found["schedule"]) == (None, "daily")
    assert found["due_at"] == now + timedelta(hours=1)
    assert found["overdue_at"] == now + timedelta(hours=1, seconds=60)
    travel(HOUR)
    assert one.granted(run_time=database_now(connection))


def test_what_is_the_same_is_left_alone(one: Replica, connection: Connection) -> None:
    register(one, "daily", HOUR)
    before = row(connection), versions(connection)
    register(one, "daily", 2 * HOUR)
    assert (row(connection), versions(connection)) == before


def test_one_that_is_paused_in_its_scheduler_is_due_at_no_time(
    one: Replica, connection: Connection
) -> None:
    register(one, "daily", None)
    assert row(connection)["due_at"] is None
    register(one, "daily", HOUR)
    assert row(connection)["due_at"] == database_now(connection) + timedelta(hours=1)


@pytest.mark.parametrize("hours", [18, 4], ids=["from 10:00 to 6:00", "from 10:00 to 16:00"])
def test_a_daily_job_that_is_moved_at_noon_runs_at_its_next_new_time(
    one: Replica, travel: Travel, hours: int
) -> None:
    run(one, "at 10", 24 * HOUR)
    travel(2 * HOUR)
    register(one, "moved", hours * HOUR, least_gap=0.1 * 24 * HOUR)
    # The registration took a moment on its way, so that it came out later by that.
    travel(hours * HOUR - 0.5)
    assert one.granted(schedule="moved", min_lock=0.9 * 24 * HOUR, max_lock=5 * 24 * HOUR)


def test_two_versions_side_by_side_run_nothing_twice(
    one: Replica, other: Replica, connection: Connection, travel: Travel
) -> None:
    """As in a rolling deployment: the new one would be due a moment after the old one has run."""
    run(one, "old", HOUR)
    travel(60)
    register(other, "new", 60.0, least_gap=0.1 * HOUR)
    travel(60)
    assert not other.granted(schedule="new", min_lock=0.9 * HOUR, max_lock=5 * HOUR, runs="new")
    travel(240)
    assert other.granted(schedule="new", min_lock=0.9 * HOUR, max_lock=5 * HOUR, runs="new")


@pytest.mark.parametrize("period", [24 * HOUR, None], ids=["known", "unknown"])
def test_a_run_time_too_close_to_the_last_run_is_not_the_one_that_is_due(
    one: Replica, connection: Connection, travel: Travel, period: float | None
) -> None:
    """A daily job is moved from 10:00 to 11:00 at 10:30: it has run today, and is not overdue."""
    run(one, "at 10", 24 * HOUR)
    ran_at = database_now(connection)
    travel(0.5 * HOUR)
    register(one, "at 11", 0.5 * HOUR, least_gap=2.4 * HOUR, period=period)
    due_at = ran_at + timedelta(hours=25 if period else 2.4)
    found = row(connection)
    assert (found["due_at"], found["overdue_at"]) == (due_at, due_at + timedelta(seconds=60))


def test_what_nobody_has_told_before_is_no_change(one: Replica, connection: Connection) -> None:
    """As in a row whose claims told no schedule."""
    claim_id, _ = one.claim(min_lock=HOUR)
    one.release(claim_id)
    before = row(connection)["window_until"]
    register(one, "new", 1.0)
    assert row(connection)["schedule"] == "new"
    assert row(connection)["window_until"] == before


def test_a_running_task_keeps_running(one: Replica, other: Replica, connection: Connection) -> None:
    claim_id, _ = one.claim(schedule="old", min_lock=0.9 * HOUR, max_lock=5 * HOUR)
    register(other, "new", 1.0)
    assert not other.granted(lag=-1)
    assert one.end(claim_id, outcome="ok") is not None


@pytest.mark.postgresql
def test_a_row_that_somebody_has_locked_is_passed_over_and_told_again(
    one: Replica, connection: Connection, direct_url: str
) -> None:
    run(one, "old", HOUR)
    with psycopg.connect(direct_url) as session:
        session.execute("SELECT FROM task_lock FOR UPDATE")
        assert register(one, "new", HOUR) == Registered("task", None, again=True)
    assert row(connection)["schedule"] == "old"
    assert not register(one, "new", HOUR).again
    assert row(connection)["schedule"] == "new"
    with psycopg.connect(direct_url) as session:
        session.execute("SELECT FROM task_lock FOR UPDATE")
        assert register(one, "new", 2 * HOUR, moved=True).again
        assert not register(one, "new", HOUR).again
        assert not register(one, "old", HOUR, moved=True, repeated=True).again
    assert not register(one, "new", 2 * HOUR, moved=True).again
    assert row(connection)["due_at"] == database_now(connection) + timedelta(hours=2)


def test_a_registration_tells_the_last_runs_token(one: Replica, connection: Connection) -> None:
    for schedule in ("first", "first", "second"):
        registered = register(one, schedule, HOUR)
        assert registered == Registered("task", row(connection)["token"])
    run(one, "second", HOUR)
    assert register(one, "second", HOUR) == Registered("task", row(connection)["token"])


def test_what_an_older_version_repeats_leaves_a_newer_ones_schedule(
    one: Replica, connection: Connection
) -> None:
    """Its job was moved to another run time, under the schedule that it had registered."""
    register(one, "old", HOUR)
    register(one, "old", 2 * HOUR, moved=True, repeated=True)
    assert row(connection)["due_at"] == database_now(connection) + timedelta(hours=2)
    register(one, "new", HOUR)
    before = row(connection)
    assert register(one, "old", 1.0, moved=True, repeated=True) == Registered("task", None)
    assert row(connection) == before


def versions(connection: Connection) -> list[Any]:
    if isinstance(connection, Memory):
        return []
    return connection.execute("SELECT xmin::text, ctid::text FROM task_lock").fetchall()


@pytest.mark.parametrize(
    ("request_", "is_due"),
    [({}, True), ({"failover": True}, False)],
    ids=["its window is lost", "its window is run again first"],
)
def test_a_run_whose_holder_died_stands_against_no_later_run_time(
    one: Replica, travel: Travel, request_: dict[str, Any], is_due: bool
) -> None:
    """So that a replica which fires later in the period runs it in the dead one's place."""
    one.claim(schedule="hourly", next_in=HOUR, max_lock=5 * HOUR, lease=60, **request_)
    travel(HOUR - 1)
    assert one.read("task")["task"].due_at is None
    travel(2)
    assert (one.read("task")["task"].due_at is not None) is is_due


def test_a_run_that_goes_on_is_not_due_again(one: Replica, travel: Travel) -> None:
    one.claim(schedule="hourly", next_in=HOUR, max_lock=5 * HOUR, lease=2 * HOUR)
    travel(HOUR + 1)
    assert one.read("task", always=("task",))["task"].due_at is None
