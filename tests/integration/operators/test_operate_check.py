"""What ``check`` tells a monitor."""

from __future__ import annotations

import re
import socket
from typing import Any

import psycopg
import pytest

from tests.support.commands import Command
from tests.support.roles import role
from tests.support.rows import (
    FAILING,
    OVERDUE,
    PAUSED,
    STAYS_ALIVE,
    STAYS_OK,
    STAYS_RUNNING,
    add_replica,
    add_task,
)

Connection = psycopg.Connection[Any]


def test_the_line_and_the_exit_status_tell_the_worst_task(
    command: Command, connection: Connection
) -> None:
    for name, columns, status, says in (
        ("well", STAYS_OK, 0, "OK - "),
        ("sync", {**STAYS_OK, **FAILING}, 1, r"WARNING - 1 failing \(sync 3 times, .*\); "),
        ("report", OVERDUE, 2, r"CRITICAL - 1 overdue \(report by \d+ s\); 1 failing \(.*\); "),
    ):
        add_task(connection, name, **columns)
        answer = command("check")
        numbers = r"\d tasks? \| tasks=\d( [a-z_]+=[0-9.]+s?)+\n"
        assert answer.status == status
        assert re.fullmatch(f"TASKLOCK {says}{numbers}", answer.out)
    told = command("check", "--json")
    assert (told.status, told.json["status"], told.json["exit_status"]) == (2, "CRITICAL", 2)
    assert told.json["message"].startswith("1 overdue (report by ")
    assert [(each["task"], each["what"]) for each in told.json["findings"]] == [
        ("report", "overdue"),
        ("sync", "failing"),
    ]
    assert (told.json["metrics"]["tasks"], told.json["metrics"]["overdue"]) == (3, 1)


def test_a_task_that_is_gone_never_alarms(command: Command, connection: Connection) -> None:
    """One that no replica has, of those that live, and that was removed: it is not due.

    Nor is it of interest any more that its last run has failed.
    """
    add_task(connection, "sync", **{**FAILING, **OVERDUE})
    add_replica(connection, "one", ["another"])
    assert command("check").status == 2
    connection.execute("UPDATE task_lock SET due_at = NULL, overdue_at = NULL")
    answer = command("check")
    assert answer.status == 0
    assert " gone=1 " in answer.out


SILENT = {"seen_at": "now() - interval '10 min'"}
STOPPED = {**SILENT, "stopped_at": "now() - interval '10 min'"}
STOPS_FOR = """'[{"task": "sync", "token": 7, "since": 0, "lost": false}]'"""
# The last run was long ago.
QUIET = {
    **STAYS_OK,
    "started_at": "now() - interval '20 min'",
    "finished_at": "now() - interval '20 min'",
}
SHOP = {**QUIET, "details": """'{"options": {}, "zone": "UTC", "namespace": "shop:"}'"""}


def renewed(lease: str, minutes_left: float) -> dict[str, str]:
    """Return a run that goes on, whose lease ends in so many minutes."""
    return {
        **QUIET,
        "finished_at": "NULL",
        "details": f"""'{{"options": {{"lease": [{lease}, "job"]}}, "zone": "UTC"}}'""",
        "locked_until": f"now() + interval '{minutes_left} min'",
        "run_until": "now() + interval '2 h'",
        "overrun_at": "now() + interval '2 h'",
    }


@pytest.mark.parametrize(
    ("task", "replicas", "status"),
    [
        (QUIET, {"one": SILENT}, 2),
        (QUIET, {"one": STAYS_ALIVE}, 0),
        (QUIET, {"one": SILENT, "two": STAYS_ALIVE}, 0),
        (QUIET, {"one": STOPPED}, 0),
        (QUIET, {"one": {**STOPPED, "running": STOPS_FOR}}, 2),  # it was killed while it stopped
        (QUIET, {}, 0),  # there never was one
        (STAYS_OK, {"one": SILENT}, 0),  # its last run was a minute ago
        ({**QUIET, **STAYS_RUNNING}, {"one": SILENT}, 0),
        (renewed("600.0", minutes_left=9.5), {"one": SILENT}, 0),  # 30 s ago
        (renewed("600.0", minutes_left=4.5), {"one": SILENT}, 2),  # 5.5 minutes ago
        (renewed("null", minutes_left=60), {"one": SILENT}, 2),  # nothing renews it
        (renewed("60.0", minutes_left=-6), {"one": SILENT}, 2),
        ({**QUIET, **PAUSED}, {"one": SILENT}, 0),
        ({**QUIET, "one_off": "true"}, {"one": SILENT}, 0),
        ({**QUIET, "runs": "''", "kind": "'hold'"}, {"one": SILENT}, 0),
        ({**QUIET, "due_at": "NULL", "overdue_at": "NULL"}, {"one": SILENT}, 0),  # removed
    ],
)
def test_no_live_replica_of_a_task_that_needs_one(
    command: Command,
    connection: Connection,
    task: dict[str, str],
    replicas: dict[str, dict[str, str]],
    status: int,
) -> None:
    add_task(connection, "sync", **task)
    for name, columns in replicas.items():
        add_replica(connection, name, ["sync"], **columns)
    answer = command("check")
    assert (answer.status, "no replica is alive for " in answer.out) == (status, status == 2)


def test_each_namespace_needs_a_replica_of_its_own(
    command: Command, connection: Connection
) -> None:
    add_task(connection, "shop:sync", **SHOP)
    add_task(connection, "web:sync", **{**SHOP, "details": SHOP["details"].replace("shop", "web")})
    add_replica(connection, "shop-1", ["shop:sync"], **SILENT)
    add_replica(connection, "web-1", ["web:sync"], **STAYS_ALIVE)
    answer = command("check")
    assert answer.status == 2
    assert re.search(r"no replica of 'shop:' is alive for 6\d\d s; last seen: shop-1; ", answer.out)
    assert command("check", "--namespace", "web:").status == 0
    assert command("check", "--no-replica-after", "1h").status == 1
    assert command("check", "--no-replica-after", "never").status == 1
    assert command("check", "--namespace", "web:", "--expect-replicas", "2").status == 1
    # A registration that nobody can read is that of no namespace.
    connection.execute("UPDATE task_lock SET details = replace(details, '\"shop', '\"\\\"x')")
    assert "no replica is alive" in command("check").out


def test_forgotten_replicas_are_expected_no_more(command: Command, connection: Connection) -> None:
    """As in a copy of a database, in which no replica will ever run."""
    add_task(connection, "sync", **QUIET)
    for name in ("web-1", "web-2", "job%1"):
        add_replica(connection, name, ["sync"], **SILENT)
    assert command("check").status == 2
    told = command("forget", "--replica", "web-*")
    assert told.out.splitlines() == [
        "web-1: forgotten, as a replica",
        "web-2: forgotten, as a replica",
    ]
    assert command("check").status == 2
    assert command("forget", "--replica", "job%1", "--json").json == {
        "forgotten_replicas": ["job%1"]
    }
    assert command("check").status == 0
    missing = command("forget", "--replica", "web-*")
    assert "no such replica: 'web-*'; `apscheduler-tasklock replicas` lists all" in missing.err


def test_a_live_replica_is_not_forgotten(command: Command, connection: Connection) -> None:
    add_replica(connection, "web-1", **STAYS_ALIVE)
    told = command("forget", "--replica", "web-1")
    assert told.status == 4
    says = "replica 'web-1' is not forgotten: it has given a sign of life in the last 90 s"
    assert says in told.err
    add_replica(connection, "web-2", **SILENT)
    stops = {**STAYS_ALIVE, "stopped_at": "now()", "running": STOPS_FOR}
    add_replica(connection, "web-3", **stops)
    assert command("forget", "--replica", "*").out == "web-2: forgotten, as a replica\n"
    assert [each["replica_id"] for each in command("replicas", "--json").json] == ["web-1", "web-3"]


@pytest.mark.parametrize("given", [(), ("sync", "--replica", "web-1"), ("sync", "other")])
def test_forget_takes_one_task_or_replicas(command: Command, given: tuple[str, ...]) -> None:
    told = command("forget", *given)
    assert told.status == 2
    assert "give one task's name, or --replica" in told.err


def test_that_all_is_paused_is_in_the_line(command: Command, connection: Connection) -> None:
    for name in ("a", "b"):
        add_task(connection, name, **{**QUIET, **PAUSED})
    answer = command("check")
    assert answer.status == 0
    says = r"TASKLOCK OK - all tasks paused by me@here since \S+ until resumed \(closed\); 2 tasks"
    assert re.match(says, answer.out)
    add_task(connection, "c", **STAYS_OK)
    assert command("check").out.startswith("TASKLOCK OK - 3 tasks")
    command("pause", "--all", "--until-resumed", "--as", "ann")
    says = r"TASKLOCK OK - all tasks paused by ann since \S+ until resumed; 3 tasks"
    assert re.match(says, command("check").out)


def test_failures_are_silenced_until_a_time_and_nothing_else_is(
    command: Command, connection: Connection
) -> None:
    add_task(connection, "sync", **STAYS_OK)
    assert command("ack", "sync", "--until", "2h").status == 0
    assert "its failures and misses alarm no more until" in command("show", "sync").out
    connection.execute("UPDATE task_lock SET failures = 1, failed_at = now(), token = token + 1")
    assert command("check").status == 0
    connection.execute("UPDATE task_lock SET failed_at = now() + interval '3 h'")
    assert command("check").status == 1
    overdue = "due_at = now() - interval '1 h', overdue_at = now() - interval '50 min'"
    connection.execute(f"UPDATE task_lock SET {overdue}, window_start = now() - interval '2 h'")
    assert command("check").status == 2
    [entry] = command("runs", "--kind", "operator", "--json").json
    assert (entry["outcome"], entry["until"] is not None) == ("acknowledged", True)


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
