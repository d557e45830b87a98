"""Registration: what a replica tells of its tasks, and what that does to a window."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.contract.conftest import ON_BOTH, database_now, row
from tests.support.waist import (
    Memory,
    Registered,
    Registration,
    Registrations,
    Replica,
    ScheduleNote,
    ScheduleNotes,
    Stop,
)

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
    [registered] = replica.ask(Registrations([task]))
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


def test_the_row_of_a_one_off_job_becomes_that_of_a_recurring_job(
    one: Replica, connection: Connection, travel: Travel
) -> None:
    """Its row would be deleted after some days, and its pause with it."""
    run(one, "once", HOUR, one_off=True)
    register(one, "monthly", 30 * 24 * HOUR)
    assert row(connection)["one_off"] is False
    travel(8 * 24 * HOUR)
    assert one.prune(7 * 24 * HOUR) == 0


def test_other_details_change_nothing_else(one: Replica, connection: Connection) -> None:
    register(one, "daily", HOUR, details='{"zone": "UTC"}')
    before = row(connection)
    assert before["details"] == '{"zone": "UTC"}'
    for details, kept in (('{"zone": "CET"}', '{"zone": "CET"}'), (None, '{"zone": "CET"}')):
        register(one, "daily", 2 * HOUR, details=details)
        assert row(connection) == {**before, "details": kept}
    register(one, "weekly", HOUR, details="{}")
    assert (row(connection)["schedule"], row(connection)["details"]) == ("weekly", "{}")


def test_one_that_is_paused_in_its_scheduler_is_due_at_no_time(
    one: Replica, connection: Connection
) -> None:
    register(one, "daily", None)
    assert row(connection)["due_at"] is None
    register(one, "daily", HOUR)
    assert row(connection)["due_at"] == database_now(connection) + timedelta(hours=1)


@ON_BOTH
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


def test_another_schedule_changes_no_window_and_says_whose_it_is(
    one: Replica, other: Replica, connection: Connection
) -> None:
    run(one, "old", HOUR)
    before = row(connection)
    for replica, schedule, of_window in ((other, "new", "old"), (other, "newer", "old")):
        register(replica, schedule, 1.0)
        found = row(connection)
        assert (found["schedule"], found["window_schedule"]) == (schedule, of_window)
        assert found["window_until"] == before["window_until"]
    register(one, "old", 1.0)
    assert (row(connection)["schedule"], row(connection)["window_schedule"]) == ("old", None)


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


@ON_BOTH
@pytest.mark.parametrize("had_row", [False, True])
def test_a_claim_since_the_job_was_read_keeps_its_due_time(
    one: Replica, connection: Connection, had_row: bool
) -> None:
    """As of a stored job that is added to run at once, and claimed before it is registered."""
    if had_row:
        run(one, "daily", 0.0)
    before = row(connection)["token"] if had_row else 0
    run(one, "daily", HOUR)
    claimed = row(connection)
    read_before: dict[str, Any] = {"next_in": 0.0, "moved": True, "token": before, "details": "{}"}
    for schedule in ("daily", "weekly"):
        assert register(one, schedule, **read_before) == Registered("task", again=True)
    assert row(connection) == claimed
    # The next look has read the row of the claim, and then the job, which the claim has moved on.
    assert not register(one, "daily", HOUR, moved=True, token=claimed["token"]).again
    assert row(connection)["due_at"] == claimed["due_at"]


@ON_BOTH
def test_a_row_without_a_claim_is_registered_whatever_was_read(
    one: Replica, connection: Connection
) -> None:
    """As if another replica has registered the task meanwhile."""
    register(one, "daily", 2 * HOUR)
    assert not register(one, "daily", HOUR, moved=True, token=0).again
    assert row(connection)["due_at"] == database_now(connection) + timedelta(hours=1)


@pytest.mark.postgresql
def test_a_row_that_somebody_has_locked_is_passed_over_and_told_again(
    one: Replica, connection: Connection, direct_url: str
) -> None:
    run(one, "old", HOUR)
    with psycopg.connect(direct_url) as session:
        session.execute("SELECT FROM task_lock FOR UPDATE")
        assert register(one, "new", HOUR) == Registered("task", again=True)
    assert row(connection)["schedule"] == "old"
    assert not register(one, "new", HOUR).again
    assert row(connection)["schedule"] == "new"
    with psycopg.connect(direct_url) as session:
        session.execute("SELECT FROM task_lock FOR UPDATE")
        assert register(one, "new", HOUR, details="{}").again
    assert not register(one, "new", HOUR, details="{}").again
    assert row(connection)["details"] == "{}"
    with psycopg.connect(direct_url) as session:
        session.execute("SELECT FROM task_lock FOR UPDATE")
        assert register(one, "new", 2 * HOUR, moved=True).again
        assert not register(one, "new", HOUR).again
    assert not register(one, "new", 2 * HOUR, moved=True).again
    assert row(connection)["due_at"] == database_now(connection) + timedelta(hours=2)


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


def test_a_changed_schedule_is_told_with_the_old_due_time(
    one: Replica, other: Replica, connection: Connection, travel: Travel
) -> None:
    assert register(one, "old", HOUR) == Registered("task")
    was_due_at = database_now(connection) + timedelta(hours=1)
    assert register(other, "old", 2 * HOUR, moved=True).was_schedule is None
    register(one, "old", HOUR, moved=True)
    travel(60)
    due_at = database_now(connection) + timedelta(hours=2)
    assert register(other, "new", 2 * HOUR) == Registered(
        "task", was_schedule="old", was_due_at=was_due_at, due_at=due_at
    )
    assert register(other, "new", 2 * HOUR) == Registered("task")


@pytest.mark.postgresql
def test_a_due_time_in_a_pause_is_not_told(one: Replica, connection: Connection) -> None:
    register(one, "old", HOUR)
    connection.execute("UPDATE task_lock SET paused_at = now()")
    answer = register(one, "new", 2 * HOUR)
    assert (answer.was_schedule, answer.was_due_at) == ("old", None)


@pytest.mark.postgresql
@pytest.mark.parametrize("due_at", ["infinity", "-infinity", "20000-01-01"])
def test_a_due_time_that_python_does_not_have_is_not_told(
    one: Replica, connection: Connection, due_at: str
) -> None:
    register(one, "old", HOUR)
    connection.execute("ALTER TABLE task_lock DROP CONSTRAINT IF EXISTS task_lock_times")
    connection.execute("UPDATE task_lock SET due_at = %s", [due_at])
    answer = register(one, "new", 2 * HOUR)
    assert (answer.was_schedule, answer.was_due_at) == ("old", None)


def note(replica: Replica, schedule: str, reason: str) -> set[str]:
    notes = [ScheduleNote("task", schedule, reason)]
    return replica.ask(ScheduleNotes(notes))


def noted(connection: Connection) -> list[tuple[Any, ...]]:
    return connection.execute(
        "SELECT kind, outcome, by, reason, token FROM task_lock_run ORDER BY slot"
    ).fetchall()


@pytest.mark.postgresql
def test_a_job_that_changes_its_schedule_often_leaves_room_for_what_operators_did(
    one: Replica, connection: Connection, travel: Travel
) -> None:
    register(one, "new", HOUR)
    for number in range(9):
        assert note(one, "new", f"from {number} to new") == set()
    assert len(noted(connection)) == 5
    travel(25 * HOUR)
    assert note(one, "new", "from 9 to new") == set()
    assert len(noted(connection)) == 6


@pytest.mark.postgresql
def test_versions_that_change_a_schedule_back_and_forth_are_two_entries_a_day(
    one: Replica, other: Replica, connection: Connection, travel: Travel
) -> None:
    register(one, "old", HOUR)
    expected = [
        ("operator", "rescheduled", "other", "from old to new", None),
        ("operator", "rescheduled", "one", "from new to old", None),
    ]
    for _ in range(3):
        for _ in range(15):
            register(other, "new", HOUR)
            assert note(other, "new", "from old to new") == set()
            register(one, "old", HOUR)
            assert note(one, "old", "from new to old") == set()
            travel(60)
        assert noted(connection) == expected
        expected += expected[:2]
        travel(24 * HOUR)


@pytest.mark.postgresql
def test_a_schedule_that_was_changed_once_more_is_not_noted(
    one: Replica, connection: Connection
) -> None:
    register(one, "old", HOUR)
    assert note(one, "new", "from old to new") == set()
    assert noted(connection) == []
    assert row(connection)["recorded_actions"] == 0


@pytest.mark.postgresql
def test_a_changed_schedule_whose_row_another_session_has_locked_is_noted_later(
    one: Replica, connection: Connection, direct_url: str
) -> None:
    register(one, "new", HOUR)
    with psycopg.connect(direct_url) as blocker:
        blocker.execute("SELECT FROM task_lock FOR UPDATE")
        assert note(one, "new", "from old to new") == {"task"}
    assert note(one, "new", "from \0 to \ud800") == set()
    assert [entry[3] for entry in noted(connection)] == ["from ? to ?"]


@pytest.mark.postgresql
def test_a_sign_of_life_that_its_replicas_stop_has_overtaken_does_not_undo_the_stop(
    one: Replica, other: Replica
) -> None:
    started_at, _ = one.alive(["task"])
    one.ask(Stop())
    one.alive(["task"], started_at)
    since, live = other.alive(["task"])
    assert live == 0
    one.alive(["task"])  # another process of that name
    assert other.alive(["task"], since)[1] == 2
