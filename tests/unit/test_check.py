"""The verdict of ``check`` on rows at a time, and its line for a monitor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from apscheduler_tasklock.cli import main
from apscheduler_tasklock.cli.check import CRITICAL, OK, WARNING, judge, line_of
from apscheduler_tasklock.status import TaskState
from tests.support.rows import NOW, READ, seconds, task_status

WORDS = ["OK", "WARNING", "CRITICAL", "UNKNOWN"]


@pytest.mark.parametrize(
    ("row", "status", "says"),
    [
        ("ok", OK, ""),
        ("new", OK, ""),
        ("running", OK, ""),
        ("barely late", OK, ""),
        ("late", WARNING, "1 late (sync by 50 s); "),
        ("failing", WARNING, "1 failing (sync 3 times); "),
        ("failing, running", WARNING, "1 failing (sync 3 times); "),
        ("failing, barely late", WARNING, "1 failing (sync 3 times); "),
        ("overdue", CRITICAL, "1 overdue (sync by 95 s); "),
        ("dead", CRITICAL, "1 dead (sync on one); "),
        ("just dead", OK, ""),
        ("too long", CRITICAL, "1 too long (sync for 60 s on one); "),
        ("overruns", CRITICAL, "1 too long (sync for 60 s on one); "),
        ("cut", WARNING, "1 cut (sync 58 s ago); "),
        ("just cut", OK, ""),
        ("handed over", WARNING, "1 cut (sync 58 s ago); "),
        ("just handed over", OK, ""),
        ("cut, running", OK, ""),
        ("cut, paused", OK, ""),
        ("failing, cancelled", WARNING, "1 failing (sync 3 times); "),
        ("overdue, paused", OK, ""),
        ("failing, paused", OK, ""),
        ("too long, paused", OK, ""),
    ],
)
def test_a_task_that_somebody_has_to_look_at_is_told(row: str, status: int, says: str) -> None:
    verdict = judge([task_status("sync", **READ[row])], [], NOW)
    assert (verdict.exit_status, verdict.message) == (status, f"{says}1 task")
    expected = (
        rf"TASKLOCK {WORDS[status]} - {re.escape(says)}1 task \| tasks=1( [a-z_]+=[0-9.]+s?)+"
    )
    assert re.fullmatch(expected, line_of(verdict))


# What is later than the limits by a moment is told, and what is just within them is not.
@pytest.mark.parametrize(
    ("columns", "status"),
    [
        ({**READ["dead"], "locked_until": seconds(-9.9)}, OK),
        ({**READ["dead"], "locked_until": seconds(-10)}, CRITICAL),
        ({**READ["dead"], "locked_until": seconds(0)}, OK),
        ({**READ["dead"], "locked_until": seconds(0.1)}, CRITICAL),  # this machine's clock is wrong
        ({**READ["late"], "late_by": 30.0}, OK),
        ({**READ["late"], "late_by": 30.1}, WARNING),
        ({**READ["cut"], "cut_for": 55.0}, OK),  # half of the grace time
        ({**READ["cut"], "cut_for": 55.1}, WARNING),
        ({**READ["the last, cut"], "cut_for": 30.0}, OK),  # half of the shortest
        ({**READ["the last, cut"], "cut_for": 30.1}, WARNING),
    ],
)
def test_the_limits_are_kept_to_the_moment(columns: Mapping[str, Any], status: int) -> None:
    assert judge([task_status("sync", **columns)], [], NOW).exit_status == status


def test_a_task_that_is_gone_never_alarms() -> None:
    """A task that no live replica has, and that was removed, has no due time."""
    verdict = judge([task_status("sync", **READ["dead"], gone=True)], [], NOW)
    assert verdict.exit_status == OK
    assert " gone=1 " in line_of(verdict)


def test_the_worst_task_decides_and_each_kind_is_told() -> None:
    tasks = [task_status(f"overdue {number}", **READ["overdue"]) for number in range(7)]
    verdict = judge([*tasks, task_status("late", **READ["late"])], [], NOW)
    assert verdict.exit_status == CRITICAL
    assert re.search(r"7 overdue \(overdue 0 .*, 2 more\); 1 late \(", verdict.message)
    assert len(verdict.problems) == 8
    assert verdict.metrics is not None
    assert verdict.metrics["overdue"] == 7


def test_names_cannot_end_the_line_nor_begin_the_numbers() -> None:
    task = task_status("a|b=1\nTASKLOCK OK\x1b[2J", **READ["overdue"])
    [line] = line_of(judge([task], [], NOW)).splitlines()
    assert line.count("|") == 1
    assert "\x1b" not in line


def test_what_is_unknown_is_no_relief_from_what_is_known() -> None:
    unknown = ["no task matches 'tusk'"]
    assert judge([task_status("fine")], unknown, NOW).exit_status == 3
    for row, status in (("late", 3), ("overdue", CRITICAL)):
        verdict = judge([task_status(row, **READ[row])], unknown, NOW)
        assert verdict.exit_status == status
        assert "no task matches 'tusk'; 1 task" in verdict.message


def test_2000_tasks_are_one_line() -> None:
    tasks = [
        task_status(f"task {number}", **READ["late" if number % 2 else "ok"])
        for number in range(2000)
    ]
    verdict = judge(tasks, [], NOW)
    assert verdict.exit_status == WARNING
    assert "1000 late" in verdict.message
    assert len(line_of(verdict)) < 1000


def test_each_state_is_counted() -> None:
    rows = {"too long", "dead", "overdue", "failing", "missed", "cut", "late", "unreadable"}
    tasks = [task_status(row, **READ[row]) for row in (*sorted(rows), "running", "paused")]
    metrics = judge(tasks, [], NOW).metrics
    assert metrics is not None
    counted = {row.replace(" ", "_") for row in rows} | {"running", "paused"}
    assert {name: metrics[name] for name in counted} == dict.fromkeys(counted, 1)
    assert (metrics["tasks"], metrics["gone"], metrics["late_by_seconds"]) == (10, 0, 95.0)


def test_a_miss_alarms_until_it_is_acknowledged() -> None:
    missed = task_status("sync", **READ["missed"])
    assert missed.state is TaskState.MISSED
    verdict = judge([missed], [], NOW)
    assert verdict.message == "1 missed (sync at 2026-01-31T11:59:50Z); 1 task"
    assert verdict.exit_status == WARNING
    known = task_status("sync", **READ["missed"], acknowledged=True)
    assert judge([known], [], NOW).exit_status == OK


@pytest.mark.parametrize("row", ["failing", "cut"])
def test_what_is_acknowledged_alarms_no_more(row: str) -> None:
    assert judge([task_status("sync", **READ[row])], [], NOW).exit_status == WARNING
    known = task_status("sync", **READ[row], acknowledged=True)
    assert judge([known], [], NOW).exit_status == OK


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
