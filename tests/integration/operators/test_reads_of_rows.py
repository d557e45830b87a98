"""What is read of rows as replicas write them: the dataclasses that tests of words begin with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock.schema.table import task_lock_table
from apscheduler_tasklock.status import JobState
from tests.support.rows import (
    DEAD,
    PAUSED,
    READ,
    RETRYING,
    ROWS,
    RUNNING,
    action_read,
    add_action,
    add_job,
    add_miss,
    add_replica,
    add_run,
    add_task,
    job_status,
    miss_read,
    replica_status,
    run_read,
    task_status,
)
from tests.support.waist import raw_cursor

Connection = psycopg.Connection[Any]

OPERATIONS = Operations(task_lock_table())


@pytest.fixture
def now(connection: Connection) -> Iterator[datetime]:
    """The database's time, at which rows are added and read: that of one transaction."""
    with connection.transaction():
        found = connection.execute("SELECT now()").fetchone()
        assert found is not None
        yield found[0]


def test_each_task_is_read_as_the_tests_of_words_have_it(
    connection: Connection, now: datetime
) -> None:
    for name, columns in ROWS.items():
        add_task(connection, name, **columns)
    add_replica(connection, "two", seen_at="now() - interval '2 days'")
    found = {task.name: task for task in OPERATIONS.tasks(raw_cursor(connection))}
    assert found.keys() == READ.keys()
    for name, columns in READ.items():
        assert found[name] == task_status(name, now, **columns), name


@pytest.mark.parametrize("details", ["[]", "{", '{"options": {"a": 1}}', '{"zone": 1}'])
def test_details_that_no_replica_writes_are_left_out(
    connection: Connection, now: datetime, details: str
) -> None:
    add_task(connection, "sync", details=f"'{details}'")
    assert OPERATIONS.tasks(raw_cursor(connection)) == [task_status("sync", now)]


def test_a_run_a_miss_and_what_an_operator_did_are_read_as_the_tests_of_words_have_them(
    connection: Connection, now: datetime
) -> None:
    add_run(connection, "sync", 1)
    add_miss(connection, "sync", 1)
    add_action(connection, "sync", 1)
    found = OPERATIONS.runs(raw_cursor(connection), "sync")
    assert found == [run_read(now), action_read(now), miss_read(now)]


def test_a_replica_is_read_as_the_tests_of_words_have_it(
    connection: Connection, now: datetime
) -> None:
    add_replica(connection, "one", ["sync"])
    found = OPERATIONS.replicas(raw_cursor(connection))
    assert found == [replica_status("one", now, tasks=("sync",))]


def test_a_stored_job_is_read_as_the_tests_of_words_have_it(
    connection: Connection, now: datetime
) -> None:
    add_job(connection, "job")
    assert OPERATIONS.jobs(raw_cursor(connection)) == [job_status("job", now, has_replica=False)]


# Its row is older than its run time.
DUE = {"next_run_time": "now() - interval '5 min'", "changed_at": "now() - interval '1 h'"}
# When pauses began: a minute after the run time, but for a second.
LONG_AGO = {"finished_at": "now() - interval '1 h'"}
PAUSED_BEFORE = {**LONG_AGO, "paused_at": "now() - interval '4 min' - interval '1 s'"}
PAUSED_AFTER = {**LONG_AGO, "paused_at": "now() - interval '4 min' + interval '1 s'"}
# What keeps a job that is due from being claimed makes it not overdue.
TASKS_OF_DUE_JOBS: tuple[tuple[dict[str, str], JobState], ...] = (
    ({}, JobState.OVERDUE),
    (RUNNING, JobState.DUE),
    (PAUSED, JobState.DUE),
    (RETRYING, JobState.DUE),
    # It is to be taken over.
    (
        {
            **DEAD,
            "locked_until": "now() - interval '80 s'",
            "failover": "true",
            "kind": "'manual'",
            "runs": "'tests.support.stored_jobs:note'",
        },
        JobState.DUE,
    ),
    ({**DEAD, "locked_until": "now() - interval '59 s'"}, JobState.DUE),
    ({**DEAD, "locked_until": "now() - interval '61 s'"}, JobState.OVERDUE),
    # Before the end of the last run, or of the last pause, it could not be claimed.
    ({"finished_at": "now() - interval '59 s'"}, JobState.DUE),
    ({"finished_at": "now() - interval '61 s'"}, JobState.OVERDUE),
    ({**PAUSED_BEFORE, "paused_until": "now() - interval '59 s'"}, JobState.DUE),
    ({**PAUSED_BEFORE, "paused_until": "now() - interval '61 s'"}, JobState.OVERDUE),
    # It was overdue when the pause began.
    ({**PAUSED_AFTER, "paused_until": "now() - interval '59 s'"}, JobState.OVERDUE),
    # The grace time of the task is longer.
    ({"overdue_at": "now() + interval '4 min' + interval '79 s'"}, JobState.OVERDUE),
    ({"overdue_at": "now() + interval '4 min' + interval '81 s'"}, JobState.DUE),
)


def test_what_keeps_a_job_from_being_claimed_makes_it_not_overdue(
    connection: Connection, now: datetime
) -> None:
    ended = {"finished_at": "now() - interval '80 s'"}
    for number, (columns, _) in enumerate(TASKS_OF_DUE_JOBS):
        add_task(connection, f"task {number}", **{**ended, **columns})
        add_job(connection, f"job {number}", task_name=f"'task {number}'", **DUE)
    found = {job.id: job.state for job in OPERATIONS.jobs(raw_cursor(connection))}
    for number, (columns, state) in enumerate(TASKS_OF_DUE_JOBS):
        assert found[f"job {number}"] is state, columns
    overdue = [job.id for job in OPERATIONS.jobs(raw_cursor(connection), overdue=True)]
    assert sorted(overdue) == sorted(each for each, is_ in found.items() if is_ is JobState.OVERDUE)


def test_a_due_jobs_own_grace_time_counts(connection: Connection, now: datetime) -> None:
    """Also before its first claim, so that 600 reminders at midnight alarm nobody."""
    graces = {
        "600": JobState.DUE,
        "1e400": JobState.DUE,
        "300": JobState.DUE,
        "299.9": JobState.OVERDUE,
        "100": JobState.OVERDUE,
        "null": JobState.OVERDUE,
        '"never"': JobState.OVERDUE,
    }
    for grace in graces:
        options = f"""'{{"misfire_grace_time": {grace}}}'::jsonb"""
        add_job(connection, grace, options=options, **DUE)
    found = {job.id: job.state for job in OPERATIONS.jobs(raw_cursor(connection))}
    assert found == graces


def minutes_ago(minutes: float) -> str:
    return f"now() - interval '{minutes} min'"


# Run times of a task, one each five minutes, the newest first: "." was run, "x" was missed, "p" was
# missed in a pause, "d" was noted as missed and run afterwards, and a number says that one entry
# has so many missed run times.
@pytest.mark.parametrize(
    ("run_times", "expected"),
    [
        ("xxx.......", (3, 3)),
        ("xx.x......", (2, 3)),
        ("xx........", None),
        (".x.x.x.x.x", (0, 5)),
        ("..........xxxxx", None),
        (".....xxxxxxx", (0, 5)),
        ("pxpxx......", (3, 3)),  # a pause explains its own
        ("ppp.......", None),
        ("ddx.......", None),
        ("x7........", (8, 8)),
        (".60", (0, 9)),  # an hour without a replica, and one run since
    ],
)
def test_the_misses_of_the_last_ten_run_times_are_counted(
    connection: Connection, now: datetime, run_times: str, expected: tuple[int, int] | None
) -> None:
    add_history(connection, "sync", run_times)
    add_history(connection, "other", "xxx")
    found = {each.task: each for each in OPERATIONS.misses(raw_cursor(connection), None)}
    assert "other" in found
    if expected is None:
        assert "sync" not in found
        return
    each = found["sync"]
    assert (each.in_a_row, each.of_ten) == expected
    assert each.since <= each.last_at <= now


def add_history(connection: Connection, task: str, run_times: str) -> None:
    """Add a task, and its runs and misses."""
    add_task(connection, task, missed_at=minutes_ago(1), window_start=minutes_ago(999))
    minutes = 0
    for slot, told in enumerate(re.findall(r"\d+|.", run_times)):
        minutes += 5
        scheduled_at = minutes_ago(minutes)
        if told in ".d":
            add_run(connection, task, slot, scheduled_at=scheduled_at)
        if told != ".":
            count = int(told) if told.isdigit() else 1
            minutes += 5 * (count - 1)
            add_miss(
                connection,
                task,
                slot,
                scheduled_at=minutes_ago(minutes),
                last_scheduled_at=scheduled_at,
                run_times=str(count),
                cause="'paused'" if told == "p" else "'misfire'",
            )


@pytest.mark.parametrize(
    ("columns", "is_told"),
    [
        ({}, True),
        ({"one_off": "true"}, False),
        ({"due_at": "NULL"}, False),  # it was removed
        ({"missed_at": minutes_ago(47 * 60), "window_start": minutes_ago(6)}, True),
        ({"missed_at": minutes_ago(49 * 60), "window_start": minutes_ago(6)}, False),  # long ago
        ({"missed_at": "NULL"}, False),
        ({"acknowledged_at": "now()"}, False),
        ({"acknowledged_at": minutes_ago(6)}, True),  # one was missed since
        ({"acknowledged_at": minutes_ago(4)}, False),  # since then, only in a pause
        (PAUSED, False),
        ({"window_start": minutes_ago(3), "kind": "'schedule'"}, False),  # it runs again
    ],
)
def test_misses_are_told_of_a_recurring_task_unless_an_operator_knows_them(
    connection: Connection, now: datetime, columns: dict[str, str], is_told: bool
) -> None:
    add_history(connection, "sync", "xxx.......")
    sets = ", ".join(f"{name} = {value}" for name, value in columns.items())
    if sets:
        connection.execute(f"UPDATE task_lock SET {sets}")
    found = OPERATIONS.misses(raw_cursor(connection), None)
    told = [each.task for each in found if each.in_a_row]
    assert told == (["sync"] if is_told else [])
    assert not OPERATIONS.misses(raw_cursor(connection), ["other"])


def test_the_live_replicas_that_list_a_task_are_returned(connection: Connection) -> None:
    """Those that can run its stored job: neither silent nor stopping."""
    add_replica(connection, "two", ["sent", "other"])
    add_replica(connection, "one", ["sent"])
    add_replica(connection, "silent", ["sent", "lost"], seen_at="now() - interval '1 min'")
    add_replica(connection, "stopped", ["lost"], stopped_at="now()")
    stops = {
        "stopped_at": "now()",
        "running": """'[{"task": "a", "token": 1, "since": 0, "lost": false}]'""",
    }
    add_replica(connection, "stops", ["sent", "lost"], **stops)
    found = OPERATIONS.having(raw_cursor(connection), ["sent", "lost"])
    assert found == {"sent": ["one", "two"], "lost": []}
    for name in found:
        add_job(connection, name, task_name=f"'{name}'")
    jobs = OPERATIONS.jobs(raw_cursor(connection))
    assert {job.id: job.has_replica for job in jobs} == {"sent": True, "lost": False}


def test_a_run_that_began_after_the_time_of_the_read_has_taken_no_time(
    connection: Connection, now: datetime
) -> None:
    add_task(connection, "begun", **{**RUNNING, "started_at": "now() + interval '4 h'"})
    [task] = OPERATIONS.tasks(raw_cursor(connection))
    assert task.started_at is not None
    assert task.started_at > now
    assert task.took == 0.0
