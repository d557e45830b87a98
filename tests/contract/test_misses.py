"""Missed run times: what a replica's note of them becomes in the run history."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock.options import KEEP_ONE_OFFS
from apscheduler_tasklock.schema.table import LONGEST_TEXT, task_lock_table
from apscheduler_tasklock.status import TaskState, TaskStatus
from tests.contract.conftest import database_now, row
from tests.support.waist import MissNote, MissNotes, Replica, ShortenHistory

pytestmark = pytest.mark.postgresql

Travel = Callable[[float], None]
Connection = psycopg.Connection[Any]

# A job every 10 s, with a minimum lock of 9 s.
EVERY: dict[str, Any] = {"schedule": "every 10 s", "next_in": 10.0, "min_lock": 9.0}


def note(*run_times: datetime, **changes: Any) -> MissNote:
    values = {
        "task_name": "task",
        "schedule": "every 10 s",
        "exact": True,
        "min_lock": 9.0,
        "covers": 0.0,
        "cause": "misfire",
        "reason": "late",
    }
    return MissNote(run_times=run_times, **{**values, **changes})


def tell(replica: Replica, *run_times: datetime, **changes: Any) -> set[str]:
    now = database_now(replica.connection)
    told = [note(*run_times, **changes)]
    return replica.ask(MissNotes(told, now))


def told(connection: Connection) -> list[tuple[Any, ...]]:
    return connection.execute(
        "SELECT scheduled_at, last_scheduled_at, run_times, cause, reason, replica"
        " FROM task_lock_run WHERE outcome = 'missed' ORDER BY slot"
    ).fetchall()


PAUSED = {"cause": "paused", "reason": "the task was paused"}


def pause(
    connection: Connection,
    since: datetime,
    by: str = "ann",
    until: datetime | None = None,
    resumed_at: datetime | None = None,
) -> None:
    """Write the entries of an operator's pause, and of its end."""
    for outcome, at, end, reason in (
        ("paused", since, until, "move"),
        ("resumed", resumed_at, None, None),
    ):
        if at is not None:
            connection.execute(
                "INSERT INTO task_lock_run (task_name, ring, slot, started_at, ended_at, replica,"
                " kind, outcome, by, until, reason) SELECT 'task', 'actions', count(*), %s, %s, '',"
                " 'operator', %s, %s, %s, %s FROM task_lock_run WHERE ring = 'actions'",
                [at, at, outcome, by, end, reason],
            )


@pytest.fixture
def started(one: Replica, connection: Connection, travel: Travel) -> datetime:
    """The run time of a run that has ended; its next run times pass while nobody runs them."""
    start = database_now(connection)
    claim_id, _ = one.claim(run_time=start, **EVERY)
    one.end(claim_id, outcome="ok")
    travel(60)
    return start


def after(start: datetime, seconds: float) -> datetime:
    return start + timedelta(seconds=seconds)


def test_a_note_is_an_entry_without_a_token_and_leaves_the_run_alone(
    one: Replica, connection: Connection, started: datetime
) -> None:
    before = row(connection)
    run_time = after(started, 10)
    assert tell(one, run_time) == set()
    assert told(connection) == [(run_time, run_time, 1, "misfire", "late", "one")]
    changed = {"recorded_misses": 1, "missed_at": run_time}
    assert row(connection) == {**before, **changed}
    entry = connection.execute(
        "SELECT token, kind, ring, slot FROM task_lock_run WHERE outcome = 'missed'"
    ).fetchone()
    assert entry == (None, "schedule", "misses", 0)


def test_a_note_that_is_sent_twice_is_one_entry(
    one: Replica, connection: Connection, started: datetime
) -> None:
    for _ in range(2):
        assert tell(one, after(started, 10), after(started, 20)) == set()
    assert [entry[2] for entry in told(connection)] == [2]


def test_of_two_replicas_that_miss_a_run_time_one_tells_it_and_the_other_writes_nothing(
    one: Replica, other: Replica, connection: Connection, started: datetime
) -> None:
    assert tell(one, after(started, 10)) == set()
    version = "SELECT xmin::text FROM task_lock"
    before = connection.execute(version).fetchone()
    assert tell(other, after(started, 10), cause="database", reason="no answer") == set()
    assert [entry[5] for entry in told(connection)] == ["one"]
    assert connection.execute(version).fetchone() == before


def test_an_entry_grows_while_its_cause_stays_the_same(
    one: Replica, other: Replica, connection: Connection, started: datetime
) -> None:
    tell(one, after(started, 10))
    tell(other, after(started, 10), after(started, 20), after(started, 30), reason="later")
    assert told(connection) == [
        (after(started, 10), after(started, 30), 3, "misfire", "later", "one")
    ]
    tell(one, after(started, 40), cause="database")
    assert [(entry[2], entry[3]) for entry in told(connection)] == [
        (3, "misfire"),
        (1, "database"),
    ]
    assert row(connection)["recorded_misses"] == 2


def test_an_entry_does_not_name_a_replica_that_started_after_its_first_run_time(
    one: Replica, other: Replica, connection: Connection, started: datetime
) -> None:
    tell(other, after(started, 10), is_witness=False)
    tell(one, after(started, 20))
    assert [(*entry[:3], entry[5]) for entry in told(connection)] == [
        (after(started, 10), after(started, 20), 2, "")
    ]


def test_a_refused_run_time_of_the_application_is_told_although_its_window_has_a_run(
    one: Replica, other: Replica, connection: Connection, started: datetime
) -> None:
    for seconds in (2, 5):
        tell(one, after(started, seconds), cause="refused", reason="set", exact=True)
    assert told(connection) == [(after(started, 2), after(started, 5), 2, "refused", "set", "one")]
    # It stands for nobody's run time: those that were missed before it are told, too.
    assert row(connection)["missed_at"] is None
    tell(other, after(started, 10))
    tell(one, after(started, 12), cause="refused", reason="set", exact=True)
    assert [(entry[0], entry[3]) for entry in told(connection)] == [
        (after(started, 2), "refused"),
        (after(started, 10), "misfire"),
    ]
    assert row(connection)["missed_at"] == after(started, 10)


@pytest.mark.parametrize(("reason", "entries"), [("from a to b", 1), ("from b to c", 2)])
def test_each_change_of_the_schedule_has_an_entry_of_its_own(
    one: Replica, connection: Connection, started: datetime, reason: str, entries: int
) -> None:
    tell(one, after(started, 10), cause="moved", reason="from a to b")
    tell(one, after(started, 20), cause="moved", reason=reason)
    assert len(told(connection)) == entries


def test_an_entry_does_not_grow_over_a_run(
    one: Replica, connection: Connection, started: datetime, travel: Travel
) -> None:
    tell(one, after(started, 10))
    claim_id, answer = one.claim(run_time=after(started, 60), **EVERY)
    assert answer.granted
    one.end(claim_id, outcome="ok")
    travel(60)
    tell(one, after(started, 70))
    assert [entry[0] for entry in told(connection)] == [after(started, 10), after(started, 70)]


@pytest.mark.parametrize("goes_on", [False, True])
def test_run_times_before_and_after_a_run_are_two_entries(
    one: Replica, connection: Connection, started: datetime, travel: Travel, goes_on: bool
) -> None:
    """Also if one note has them all, as after an outage."""
    claim_id, answer = one.claim(run_time=after(started, 60), **EVERY)
    assert answer.granted
    if not goes_on:
        one.end(claim_id, outcome="ok")
    travel(60)
    times = [after(started, seconds) for seconds in (10, 20, 70, 80)]
    assert tell(one, *times) == {"task"}
    assert tell(one, *times) == set()
    assert [entry[:3] for entry in told(connection)] == [
        (times[0], times[1], 2),
        (times[2], times[3], 2),
    ]
    assert row(connection)["recorded_misses"] == 2


def test_a_pause_whose_last_run_times_are_noted_after_a_later_run_is_one_entry(
    one: Replica, connection: Connection, started: datetime
) -> None:
    """A run time is noted when it is overdue, which may be after the pause."""
    pause(connection, after(started, 5))
    tell(one, after(started, 10), after(started, 20), **PAUSED)
    claim_id, answer = one.claim(run_time=after(started, 60), **EVERY)
    assert answer.granted
    one.end(claim_id, outcome="ok")
    tell(one, after(started, 30), after(started, 40), **PAUSED)
    assert [entry[:3] for entry in told(connection)] == [
        (after(started, 10), after(started, 40), 4)
    ]


@pytest.mark.parametrize(("cause", "entries"), [("paused", 1), ("database", 1), ("running", 2)])
def test_an_entry_of_a_pause_or_an_outage_grows_over_what_another_replica_has_told(
    one: Replica,
    other: Replica,
    connection: Connection,
    started: datetime,
    cause: str,
    entries: int,
) -> None:
    tell(one, after(started, 10), cause=cause)
    tell(other, after(started, 20))
    tell(one, after(started, 30), cause=cause)
    found = [entry for entry in told(connection) if entry[3] == cause]
    assert len(found) == entries
    assert [entry[:3] for entry in told(connection) if entry[3] == "misfire"] == [
        (after(started, 20), after(started, 20), 1)
    ]
    assert row(connection)["recorded_misses"] == 1 + entries
    [*_, last] = found
    assert last[1] == row(connection)["missed_at"] == after(started, 30)


def test_run_times_that_were_run_are_left_out(
    one: Replica, other: Replica, connection: Connection, started: datetime, travel: Travel
) -> None:
    """Also if the entry of the run is in the ring of failures, and if the run goes on."""
    for outcome in ("ok", "error"):
        now = database_now(connection)
        claim_id, answer = other.claim(run_time=now, **EVERY)
        assert answer.granted
        other.end(claim_id, outcome=outcome)
        travel(10)
    _, answer = other.claim(run_time=after(started, 80), **EVERY)
    assert answer.granted
    travel(20)
    times = [after(started, seconds) for seconds in (0, 60, 70, 80, 90)]
    assert tell(one, *times) == set()
    assert [entry[:3] for entry in told(connection)] == [(times[-1], times[-1], 1)]


def test_a_run_without_a_window_that_goes_on_has_its_run_time_too(
    one: Replica, other: Replica, connection: Connection, started: datetime
) -> None:
    """As of a stored job, whose minimum lock is 0."""
    run_time = after(started, 60)
    _, answer = other.claim(run_time=run_time, **{**EVERY, "min_lock": 0.0})
    assert answer.granted
    tell(one, run_time, min_lock=0.0)
    assert told(connection) == []


@pytest.mark.parametrize("changes", [{"schedule": "every 20 s"}, {"task_name": "unknown"}])
def test_of_a_task_that_was_rescheduled_or_is_gone_nothing_is_told(
    one: Replica, connection: Connection, started: datetime, changes: dict[str, str]
) -> None:
    assert tell(one, after(started, 10), **changes) == set()
    assert told(connection) == []
    assert row(connection)["missed_at"] is None


def test_a_run_time_in_the_window_of_the_run_before_it_was_not_missed(
    one: Replica, connection: Connection, started: datetime
) -> None:
    """With a minimum lock above the period, every second run time falls into a window."""
    assert tell(one, after(started, 5)) == set()
    assert told(connection) == []


def test_nor_is_one_that_a_long_minimum_lock_of_an_earlier_run_covers(
    one: Replica, connection: Connection, travel: Travel
) -> None:
    long = {**EVERY, "min_lock": 15.0}
    start = database_now(connection)
    for seconds in (0, 20):
        claim_id, answer = one.claim(run_time=after(start, seconds), **long)
        assert answer.granted
        one.end(claim_id, outcome="ok")
        travel(20)
    tell(one, after(start, 10), after(start, 30), min_lock=15.0, covers=15.0)
    assert told(connection) == []


def test_a_run_time_that_each_replica_computes_differently_is_run_by_any_run_near_it(
    one: Replica, connection: Connection, started: datetime
) -> None:
    near, far = after(started, 8), after(started, 30)
    tell(one, near, far, exact=False, covers=9.0)
    assert [entry[0] for entry in told(connection)] == [far]
    # Another replica's run time of the same window.
    tell(one, after(started, 36), exact=False, covers=9.0)
    assert [entry[2] for entry in told(connection)] == [1]


@pytest.mark.parametrize("outcome", ["ok", "error"])
def test_nothing_is_told_of_times_before_a_full_history_begins(
    one: Replica, connection: Connection, travel: Travel, outcome: str
) -> None:
    one = Replica("one", one.connection, history=2)
    start = database_now(connection)
    for number in range(3):
        claim_id, answer = one.claim(run_time=after(start, 10 * number), **EVERY)
        assert answer.granted
        one.end(claim_id, outcome=outcome)
        travel(10)
    travel(60)
    tell(one, after(start, 0), after(start, 9.5), after(start, 40))
    assert [entry[:3] for entry in told(connection)] == [(after(start, 40), after(start, 40), 1)]


def test_a_miss_in_a_pause_tells_who_has_paused_the_task_and_why(
    one: Replica, connection: Connection, started: datetime
) -> None:
    connection.execute(
        "INSERT INTO task_lock_run (task_name, ring, slot, started_at, ended_at, replica, kind,"
        " outcome, by, reason) SELECT 'task', 'actions', n, now() - interval '55 s' + n * interval"
        " '30 s', now(), '', 'operator', 'paused', who, 'move' FROM (VALUES (0, 'ann'), (1, 'bob'))"
        " AS pauses (n, who)"
    )
    tell(one, after(started, 10), cause="paused", reason="paused")
    tell(one, after(started, 20), cause="paused", reason="paused")
    tell(one, after(started, 40), cause="paused", reason="paused")
    assert [(entry[2], entry[4].split(" since ")[0]) for entry in told(connection)] == [
        (2, "paused by ann"),
        (1, "paused by bob"),
    ]
    assert all(entry[4].endswith(" UTC: move") for entry in told(connection))


@pytest.mark.parametrize("cause", ["running", "misfire", "unasked"])
def test_a_pause_explains_its_run_times_for_all_whatever_one_replica_tells(
    one: Replica, other: Replica, connection: Connection, started: datetime, cause: str
) -> None:
    """For example a run that hangs on one replica, while the others are refused by the pause."""
    pause(connection, after(started, 15), resumed_at=after(started, 35))
    run_times = [after(started, n) for n in (10, 20, 30, 40)]
    for replica in (one, other, one, other):
        tell(replica, *run_times, cause=cause, reason="it hangs here")
    since = f"{after(started, 15):%Y-%m-%d %H:%M:%S} UTC"
    assert [entry[:5] for entry in told(connection)] == [
        (after(started, 10), after(started, 10), 1, cause, "it hangs here"),
        (
            after(started, 20),
            after(started, 30),
            2,
            "paused",
            f"paused by ann since {since}: move",
        ),
        (after(started, 40), after(started, 40), 1, cause, "it hangs here"),
    ]


def test_a_pause_of_all_tasks_explains_its_run_times_too_also_in_an_outage(
    one: Replica, connection: Connection, started: datetime
) -> None:
    operations = Operations(task_lock_table())
    operations.pause_all(one.cursor, "", None, "ann", "deploy", UUID(int=1), 1.0)
    later = database_now(connection) + timedelta(seconds=1)
    tell(one, later, cause="database", reason="no answer")
    [(_, _, _, cause, reason, _)] = told(connection)
    assert cause == "paused"
    assert reason.startswith("paused with all tasks by ann since ")


@pytest.mark.parametrize(
    "changes", [{"cause": "refused"}, {"cause": "running", "more": 3}, {"one_off": True}]
)
def test_a_pause_does_not_explain_a_refused_run_time_a_one_off_job_or_counted_ones(
    one: Replica, connection: Connection, started: datetime, changes: dict[str, Any]
) -> None:
    """A one-off job that is due in a pause is run after it."""
    if changes.get("one_off"):
        connection.execute("UPDATE task_lock SET one_off = true")
    pause(connection, after(started, 15))
    tell(one, after(started, 20), **changes)
    [entry] = told(connection)
    assert entry[3] == changes.get("cause", "misfire")


def test_run_times_over_which_no_single_pause_held_tell_of_each_pause(
    one: Replica, connection: Connection, started: datetime
) -> None:
    """As of a stored job, of which the first and the last run time are known."""
    ann, bob, cid = (after(started, seconds) for seconds in (5, 15, 45))
    pause(connection, ann, "ann", until=after(started, 20))
    pause(connection, bob, "bob")
    pause(connection, cid, "cid")
    tell(one, after(started, 10), after(started, 40), more=2, **PAUSED)
    named = [
        f"by {who} since {since:%Y-%m-%d %H:%M:%S} UTC: move"
        for who, since in (("ann", ann), ("bob", bob))
    ]
    assert [entry[4] for entry in told(connection)] == [f"paused {', then '.join(named)}"]


def test_what_is_told_of_many_long_pauses_is_cut(
    one: Replica, connection: Connection, started: datetime
) -> None:
    for second in range(11, 16):
        by = f"{second} {'x' * 3990}"
        pause(connection, after(started, second), by, until=after(started, second + 4))
    assert tell(one, after(started, 10), after(started, 40), **PAUSED) == set()
    [entry] = told(connection)
    assert len(entry[4]) == LONGEST_TEXT
    assert entry[4].startswith("paused by 11 xxx")
    # Also grows as one with shorter words does.
    assert tell(one, after(started, 50), **PAUSED) == set()


def test_of_two_pauses_the_one_that_held_over_all_run_times_is_told(
    one: Replica, connection: Connection, started: datetime
) -> None:
    """The shorter one has begun earlier, and was ended by its operator or by its limit."""
    pause(connection, after(started, 2), "ann", until=after(started, 20))
    pause(connection, after(started, 4), "bob", resumed_at=after(started, 15))
    pause(connection, after(started, 3), "cid", resumed_at=after(started, 45))
    tell(one, after(started, 10), after(started, 40), **PAUSED)
    assert [entry[4].split(" since ")[0] for entry in told(connection)] == ["paused by cid"]


def test_a_pause_that_its_operator_made_longer_is_one_pause(
    one: Replica, connection: Connection, started: datetime
) -> None:
    since = after(started, 5)
    pause(connection, since, until=after(started, 25))
    pause(connection, after(started, 15), until=after(started, 55))
    for seconds in (10, 20, 30):
        tell(one, after(started, seconds), **PAUSED)
    [entry] = told(connection)
    assert entry[2] == 3
    assert entry[4] == f"paused by ann since {since:%Y-%m-%d %H:%M:%S} UTC: move"


@pytest.mark.parametrize("more", [2, 10**10])
def test_more_run_times_than_a_note_lists_are_counted(
    one: Replica, connection: Connection, started: datetime, more: int
) -> None:
    """Up to the largest number of the column, which a job of each millisecond may exceed."""
    tell(one, after(started, 10), after(started, 40), more=more)
    assert [entry[2] for entry in told(connection)] == [min(more + 2, 2**31 - 1)]


def test_the_ring_of_misses_keeps_20_entries_and_outlives_a_shorter_history(
    one: Replica, connection: Connection, started: datetime, travel: Travel
) -> None:
    travel(300)
    for number in range(1, 23):
        tell(one, after(started, 10 * number), cause=("misfire", "running")[number % 2])
    assert len(told(connection)) == 20
    slots = "SELECT array_agg(slot ORDER BY slot) FROM task_lock_run WHERE ring = 'misses'"
    assert connection.execute(slots).fetchone() == (list(range(20)),)
    one.ask(ShortenHistory(["task"]))
    assert len(told(connection)) == 20


def test_a_note_whose_row_another_session_has_locked_is_sent_again(
    one: Replica, connection: Connection, started: datetime, direct_url: str
) -> None:
    with psycopg.connect(direct_url) as blocker:
        blocker.execute("SELECT FROM task_lock FOR UPDATE")
        assert tell(one, after(started, 10)) == {"task"}
    assert told(connection) == []
    assert tell(one, after(started, 10)) == set()
    assert len(told(connection)) == 1


@pytest.mark.parametrize("reason", ["a\0b", "\ud800", "\u202e"])
def test_a_reason_is_made_fit_for_the_table(
    one: Replica, connection: Connection, started: datetime, reason: str
) -> None:
    tell(one, after(started, 10), reason=reason)
    assert len(told(connection)) == 1


# A one-off job, whose schedule names its run date.
ONE_OFF: dict[str, Any] = {"one_off": True, "schedule": '"once"', "min_lock": 9.0}


def tell_one_off(replica: Replica, *run_times: datetime, **changes: Any) -> set[str]:
    return tell(replica, *run_times, any_later=True, runs="jobs:job at", **{**ONE_OFF, **changes})


def status(replica: Replica) -> TaskStatus:
    [task] = Operations(task_lock_table()).tasks(replica.cursor, ["task"])
    return task


def test_a_one_off_job_that_never_ran_gets_a_row_with_its_entry(
    one: Replica, other: Replica, connection: Connection
) -> None:
    run_time = database_now(connection) - timedelta(seconds=60)
    assert tell_one_off(one, run_time) == set()
    made = row(connection)
    assert tell_one_off(other, run_time) == set()
    assert row(connection) == made
    assert told(connection) == [(run_time, run_time, 1, "misfire", "late", "one")]
    task = status(one)
    assert (task.state, task.missed_at, task.acknowledged) == (TaskState.MISSED, run_time, False)
    assert (task.started_at, task.finished_at, task.scheduled_at) == (None, None, None)
    assert (task.schedule, task.function) == ("once", "jobs:job at")
    assert made["token"] > 0


@pytest.mark.parametrize(("later", "run_times"), [(0.5, 1), (30.0, 2)])
def test_a_one_off_job_that_each_replica_gives_a_date_of_its_own_is_missed_once(
    one: Replica, other: Replica, connection: Connection, later: float, run_times: int
) -> None:
    """A job of a date much later is another one."""
    run_time = database_now(connection) - timedelta(seconds=60)
    tell_one_off(one, run_time)
    tell_one_off(other, after(run_time, later), schedule='"once, a little later"')
    assert [entry[2] for entry in told(connection)] == [run_times]


def test_a_recurring_job_gets_no_row_in_the_same_statement(
    one: Replica, connection: Connection
) -> None:
    now = database_now(connection)
    notes = [note(now, task_name="other"), note(now, runs="jobs:job at", **ONE_OFF)]
    one.ask(MissNotes(notes, now))
    assert connection.execute("SELECT task_name FROM task_lock").fetchall() == [("task",)]


@pytest.mark.parametrize("min_lock", [9.0, 0.0])
def test_a_replica_can_run_it_later(
    one: Replica, other: Replica, connection: Connection, min_lock: float
) -> None:
    run_time = database_now(connection) - timedelta(seconds=60)
    tell_one_off(one, run_time)
    token = row(connection)["token"]
    claim_id, answer = other.claim(run_time=run_time, **{**ONE_OFF, "min_lock": min_lock})
    assert answer.granted
    assert answer.token > token
    assert status(one).state is TaskState.RUNNING
    other.end(claim_id, outcome="ok")
    assert (status(one).state, status(one).missed_at) == (TaskState.OK, None)
    found = Operations(task_lock_table()).runs(one.cursor, "task")
    assert [run.outcome for run in found] == ["ok"]


def test_a_one_off_job_of_a_later_date_has_the_row_of_the_earlier_one(
    one: Replica, connection: Connection, travel: Travel
) -> None:
    start = database_now(connection)
    claim_id, _ = one.claim(run_time=start, **ONE_OFF)
    one.end(claim_id, outcome="ok")
    travel(60)
    tell_one_off(one, start, after(start, 30), schedule='"once more"')
    assert [entry[:3] for entry in told(connection)] == [(after(start, 30), after(start, 30), 1)]
    assert status(one).state is TaskState.MISSED


@pytest.mark.parametrize("later", [5.0, 30.0])
def test_a_later_run_of_a_one_off_job_counts(
    one: Replica, connection: Connection, travel: Travel, later: float
) -> None:
    """As where each replica has computed a run date of its own."""
    start = database_now(connection)
    travel(later)
    claim_id, _ = one.claim(run_time=after(start, later), **ONE_OFF)
    one.end(claim_id, outcome="ok")
    tell_one_off(one, start)
    assert told(connection) == []


def test_the_row_of_a_recurring_job_tells_nothing_of_a_one_off_job(
    one: Replica, connection: Connection, started: datetime
) -> None:
    tell_one_off(one, after(started, 30))
    assert told(connection) == []


def test_a_miss_of_a_recurring_job_does_not_alarm(
    one: Replica, connection: Connection, started: datetime
) -> None:
    tell(one, after(started, 30))
    assert len(told(connection)) == 1
    assert status(one).missed_at is None
    assert status(one).state is not TaskState.MISSED


def test_the_row_of_a_missed_one_off_job_is_deleted_some_days_after_it_was_noted(
    one: Replica, connection: Connection, travel: Travel
) -> None:
    tell_one_off(one, database_now(connection) - timedelta(days=2))
    travel(23 * 3600)
    assert not status(one).acknowledged
    travel(2 * 3600)
    assert status(one).acknowledged
    assert (status(one).state, one.prune(KEEP_ONE_OFFS)) == (TaskState.MISSED, 0)
    travel(KEEP_ONE_OFFS)
    assert one.prune(KEEP_ONE_OFFS) == 1
    assert told(connection) == []


def test_an_earlier_run_of_a_missed_one_off_job_does_not_let_its_row_be_deleted_early(
    one: Replica, connection: Connection, travel: Travel
) -> None:
    start = database_now(connection)
    claim_id, _ = one.claim(run_time=start, **ONE_OFF)
    one.end(claim_id, outcome="ok")
    travel(KEEP_ONE_OFFS - 60)
    missed = database_now(connection) - timedelta(seconds=30)
    tell_one_off(one, missed, schedule='"once more"')
    travel(120)
    assert one.prune(KEEP_ONE_OFFS) == 0
    assert status(one).missed_at == missed
    travel(KEEP_ONE_OFFS)
    assert one.prune(KEEP_ONE_OFFS) == 1
