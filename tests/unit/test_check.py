"""The line of ``check`` for a monitor."""

from __future__ import annotations

import re
from typing import Any

import pytest

from apscheduler_tasklock.cli import main
from apscheduler_tasklock.cli.check import line_of, message_of_findings, numbers_of
from apscheduler_tasklock.status import JobState, Overview, ReplicaState, TaskStatus
from tests.support.pages import Known
from tests.support.rows import READ, job_status, replica_status, seconds, task_status
from tests.support.waist import severity_of

WORDS = ["OK", "WARNING", "CRITICAL", "UNKNOWN"]


def overview(*tasks: TaskStatus, **known: Any) -> Overview:
    return Known(tasks, **known).overview()


def message(*tasks: TaskStatus, **known: Any) -> str:
    found = overview(*tasks, **known)
    return message_of_findings(found.findings, found)


def line(*tasks: TaskStatus) -> str:
    found = overview(*tasks)
    return line_of(severity_of(found.findings), message(*tasks), numbers_of(found))


@pytest.mark.parametrize(
    ("row", "status", "says"),
    [
        ("ok", 0, ""),
        ("late", 1, "1 late (sync by 50 s); "),
        ("failing", 1, "1 failing (sync 3 times, the last with ValueError); "),
        ("overdue", 2, "1 overdue (sync by 95 s); "),
        ("dead", 2, "1 dead (sync on one); "),
        ("too long", 2, "1 too long (sync for 60 s on one); "),
        ("missed", 1, "1 missed (sync at 2026-01-31T11:59:50Z); "),
    ],
)
def test_the_line_has_the_finding_and_the_numbers(row: str, status: int, says: str) -> None:
    expected = (
        rf"TASKLOCK {WORDS[status]} - {re.escape(says)}1 task \| tasks=1( [a-z_]+=[0-9.]+s?)+"
    )
    assert re.fullmatch(expected, line(task_status("sync", **READ[row])))


def test_each_kind_is_told_and_few_are_named() -> None:
    tasks = [task_status(f"overdue {number}", **READ["overdue"]) for number in range(7)]
    told = message(*tasks, task_status("late", **READ["late"]))
    assert re.fullmatch(r"7 overdue \(overdue 0 .*, 2 more\); 1 late \(.*\); 8 tasks", told)
    due = {"state": JobState.OVERDUE, "next_run_time": seconds(-300)}
    jobs = [job_status(f"jöb-{number}", **due) for number in range(7)]
    assert re.match(r"7 overdue \(jöb-0 .*, jöb-4 .*, 2 more\)", message(jobs_=jobs))


def test_notes_are_not_in_the_line() -> None:
    silent = replica_status("web-1", state=ReplicaState.SILENT)
    assert message(task_status("sync"), replicas_=[silent]) == "1 task"


def test_names_cannot_end_the_line_nor_begin_the_numbers() -> None:
    [told] = line(task_status("a|b=1\nTASKLOCK OK\x1b[2J", **READ["overdue"])).splitlines()
    assert told.count("|") == 1
    assert "\x1b" not in told


def test_2000_tasks_are_one_line() -> None:
    tasks = [
        task_status(f"task {number}", **READ["late" if number % 2 else "ok"])
        for number in range(2000)
    ]
    told = line(*tasks)
    assert "WARNING - 1000 late" in told
    assert len(told) < 1000


def test_each_state_is_counted() -> None:
    rows = {"too long", "dead", "overdue", "failing", "missed", "cut", "late", "unreadable"}
    tasks = [task_status(row, **READ[row]) for row in (*sorted(rows), "running", "paused")]
    numbers = numbers_of(overview(*tasks, task_status("gone", gone=True)))
    counted = {row.replace(" ", "_") for row in rows} | {"running", "paused", "gone"}
    assert {name: numbers[name] for name in counted} == dict.fromkeys(counted, 1)
    assert (numbers["tasks"], numbers["late_by_seconds"]) == (11, 95.0)


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
    assert main([*arguments, *form]) == 3
    printed = capsys.readouterr().out
    assert "UNKNOWN" in printed
    assert "hunter2" not in printed
    assert form or printed.count("\n") == 1
