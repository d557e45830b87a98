"""What ``check`` tells a monitor."""

from __future__ import annotations

import re
import socket
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock.cli import main
from tests.support.commands import Command
from tests.support.roles import role
from tests.support.rows import (
    BARELY_LATE,
    CUT,
    DEAD,
    FAILING,
    HANDED_OVER,
    LATE,
    NEW,
    OVERDUE,
    OVERRUNS,
    PAUSED,
    RUNNING,
    TOO_LONG,
    add_replica,
    add_task,
)

Connection = psycopg.Connection[Any]

WORDS = ["OK", "WARNING", "CRITICAL", "UNKNOWN"]

# Its lease ended when a failover would have had no time to see it.
JUST_DEAD = {**DEAD, "locked_until": "now() - interval '1 s'"}


@pytest.fixture
def command(database_url: str, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(database_url, capsys)


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({}, 0, ""),
        (NEW, 0, ""),
        (RUNNING, 0, ""),
        (BARELY_LATE, 0, ""),
        (LATE, 1, r"1 late \(sync by 5\d s\); "),
        (FAILING, 1, r"1 failing \(sync 3 times\); "),
        ({**FAILING, **RUNNING}, 1, r"1 failing \(sync 3 times\); "),
        ({**FAILING, **BARELY_LATE}, 1, r"1 failing \(sync 3 times\); "),
        (OVERDUE, 2, r"1 overdue \(sync by \d+ s\); "),
        (DEAD, 2, r"1 dead \(sync on one\); "),
        (JUST_DEAD, 0, ""),
        (TOO_LONG, 2, r"1 too long \(sync for 6\d s on one\); "),
        (OVERRUNS, 2, r"1 too long \(sync for 6\d s on one\); "),
        (CUT, 1, r"1 cut \(sync [5-9]\d s ago\); "),
        ({**CUT, "finished_at": "now() - interval '40 s'"}, 0, ""),
        (HANDED_OVER, 1, r"1 cut \(sync [5-9]\d s ago\); "),
        ({**HANDED_OVER, "locked_until": "now() - interval '9 s'"}, 0, ""),
        ({**CUT, **RUNNING}, 0, ""),
        ({**CUT, **PAUSED}, 0, ""),
        ({**CUT, **FAILING, "last_outcome": "'cancelled'"}, 1, r"1 failing \(sync 3 times\); "),
        ({**OVERDUE, **PAUSED}, 0, ""),
        ({**FAILING, **PAUSED}, 0, ""),
        ({**TOO_LONG, **PAUSED}, 0, ""),
    ],
)
def test_a_task_that_somebody_has_to_look_at_is_told(
    command: Command, connection: Connection, changes: dict[str, str], status: int, says: str
) -> None:
    add_task(connection, "sync", **changes)
    answer = command("check")
    assert answer.status == status
    assert re.fullmatch(
        rf"TASKLOCK {WORDS[status]} - {says}1 task \| tasks=1( [a-z_]+=[0-9.]+s?)+\n", answer.out
    )


def test_a_task_that_is_gone_never_alarms(command: Command, connection: Connection) -> None:
    """One that no replica has, of those that live, and that was removed: it is not due."""
    add_task(connection, "sync", **OVERDUE)
    add_replica(connection, "one", ["another"])
    assert command("check").status == 2
    connection.execute("UPDATE task_lock SET due_at = NULL, overdue_at = NULL")
    answer = command("check")
    assert answer.status == 0
    assert " gone=1 " in answer.out


def test_the_worst_task_decides_and_each_kind_is_told(
    command: Command, connection: Connection
) -> None:
    for number in range(7):
        add_task(connection, f"overdue {number}", **OVERDUE)
    add_task(connection, "late", **LATE)
    answer = command("check")
    assert answer.status == 2
    assert re.search(r"7 overdue \(overdue 0 .*, 2 more\); 1 late \(", answer.out)
    told = command("check", "--json")
    assert (told.status, told.json["status"], told.json["exit_status"]) == (2, "CRITICAL", 2)
    assert len(told.json["problems"]) == 8
    assert told.json["metrics"]["overdue"] == 7


def test_names_cannot_end_the_line_nor_begin_the_numbers(
    command: Command, connection: Connection
) -> None:
    add_task(connection, "a|b=1\nTASKLOCK OK\x1b[2J", **OVERDUE)
    [line] = command("check").out.splitlines()
    assert line.count("|") == 1
    assert "\x1b" not in line


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ([], 0, "0 tasks"),
        (["x*"], 3, "no task matches 'x*'"),
        (["x"], 3, "no task matches 'x'"),
        (["--namespace", "x:"], 3, "no task matches 'x:*'"),
    ],
)
def test_no_tasks_at_all_are_unknown_if_some_were_expected(
    command: Command, arguments: list[str], status: int, says: str
) -> None:
    answer = command("check", *arguments)
    assert (answer.status, says in answer.out) == (status, True)


def test_a_pattern_without_a_task_is_unknown_but_no_relief(
    command: Command, connection: Connection
) -> None:
    add_task(connection, "fine")
    assert command("check", "fine", "tusk").status == 3
    add_task(connection, "overdue", **OVERDUE)
    answer = command("check", "overdue", "tusk")
    assert (answer.status, "no task matches 'tusk'" in answer.out) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--bogus"],
        ["--bogus", "check"],
        ["check", "--namespace", "a*"],
        ["check", "--database"],
        ["check", "--database", "mysql://app:hunter2@host/db"],
        ["check", "--database", "postgresql://localhost/x", "--table", ""],
        ["check"],
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["plain", "JSON"])
def test_wrong_usage_is_unknown(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    form: list[str],
) -> None:
    monkeypatch.delenv("TASKLOCK_DATABASE_URL", raising=False)
    assert main([*form[:0], *arguments, *form]) == 3
    printed = capsys.readouterr().out
    assert "UNKNOWN" in printed
    assert "hunter2" not in printed
    assert form or printed.count("\n") == 1


def test_a_missing_or_an_old_table_is_unknown(
    command: Command, empty_database_url: str, connection: Connection
) -> None:
    answer = command("check", database=empty_database_url)
    assert (answer.status, "apscheduler-tasklock upgrade" in answer.out) == (3, True)
    connection.execute("ALTER TABLE task_lock DROP COLUMN due_at")
    answer = command("check")
    assert (answer.status, "lack a column that this version" in answer.out) == (3, True)


def test_an_unavailable_database_is_unknown(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    answer = command("check", database=f"postgresql://app:hunter2@127.0.0.1:{port}/db")
    assert answer.status == 3
    assert answer.out.startswith("TASKLOCK UNKNOWN - the database is unavailable: ")
    assert answer.out.count("\n") == 1
    assert "hunter2" not in answer.out


@pytest.mark.direct("pgbouncer does not know the role")
def test_rows_that_a_policy_hides_are_not_taken_for_no_tasks(
    command: Command, database_url: str, connection: Connection
) -> None:
    add_task(connection, "sync", **OVERDUE)
    with role(database_url) as (name, url):
        for table in ("task_lock", "task_lock_replica"):
            connection.execute(f'GRANT SELECT, INSERT, UPDATE ON {table} TO "{name}"')
        connection.execute("ALTER TABLE task_lock ENABLE ROW LEVEL SECURITY")
        answer = command("check", database=url)
    assert (answer.status, "row-level security" in answer.out) == (3, True)


def test_2000_tasks_are_one_line(command: Command, connection: Connection) -> None:
    connection.execute("BEGIN")
    for number in range(2000):
        add_task(connection, f"task {number}", **(LATE if number % 2 else {}))
    connection.execute("COMMIT")
    # On a busy machine that takes long enough to make what is late overdue.
    late = ", ".join(f"{column} = {value}" for column, value in LATE.items())
    connection.execute(f"UPDATE task_lock SET {late} WHERE due_at < now()")
    answer = command("check")
    assert answer.status == 1
    assert "1000 late" in answer.out
    assert len(answer.out) < 1000
