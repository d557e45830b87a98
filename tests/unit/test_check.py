"""The verdict of ``check`` on rows at a time, and its line for a monitor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from apscheduler_tasklock.cli import main
from apscheduler_tasklock.cli.check import CRITICAL, OK, WARNING, judge, line_of
from apscheduler_tasklock.status import JobState, Pause, ReplicaState, ReplicaStatus, TaskState
from tests.support.rows import NOW, READ, job_status, replica_status, seconds, task_status

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


def test_an_overdue_stored_job_is_told_with_its_id_unless_that_ends_its_tasks_name() -> None:
    due = {"state": JobState.OVERDUE, "next_run_time": seconds(-300)}
    jobs = {"sent": job_status("sent", **due), "imports": job_status("one", **due)}
    verdict = judge([], [], NOW, jobs=jobs)
    assert verdict.exit_status == CRITICAL
    assert verdict.message == (
        "2 overdue (sent by 300 s, a stored job that no replica claims, imports by 300 s, the "
        "stored job 'one' that no replica claims); 0 tasks"
    )


def test_a_task_with_another_problem_is_named_once() -> None:
    due = {"state": JobState.OVERDUE, "next_run_time": seconds(-300)}
    jobs = {"both": job_status("one", **due), "worse": job_status("two", **due)}
    tasks = [task_status("both", **READ["overdue"]), task_status("worse", **READ["failing"])]
    problems = judge(tasks, [], NOW, jobs=jobs).problems
    assert [(each.task, each.problem) for each in problems] == [
        ("both", "overdue"),
        ("worse", "overdue"),
    ]
    assert problems[0].detail == "by 95 s"  # and not of the stored job


def test_many_stored_jobs_are_named_up_to_a_limit() -> None:
    due = {"state": JobState.OVERDUE, "next_run_time": seconds(-300)}
    jobs = {f"jöb-{number}": job_status(f"jöb-{number}", **due) for number in range(7)}
    assert re.search(
        r"7 overdue \(jöb-0 .*, jöb-4 .*, 2 more\)", judge([], [], NOW, jobs=jobs).message
    )


def pause_of_all(since: float, namespace: str = "") -> dict[str, Any]:
    pause: Any = Pause("ann", seconds(since), None, None, namespace)
    return {**READ["paused"], "pauses": (pause,)}


@pytest.mark.parametrize(
    ("since", "namespace", "says"),
    [
        (-86_400, "", ""),
        (-86_401, "", "all tasks paused by ann since 2026-01-30T11:59:59Z; "),
        (-86_401, "web:", "all tasks of 'web:' paused by ann since 2026-01-30T11:59:59Z; "),
    ],
)
def test_a_pause_of_all_tasks_for_more_than_a_day_may_be_forgotten(
    since: float, namespace: str, says: str
) -> None:
    tasks = [task_status(name, **pause_of_all(since, namespace)) for name in ("web:a", "web:b")]
    verdict = judge(tasks, [], NOW)
    assert verdict.message == f"{says}2 tasks"
    assert verdict.exit_status == (WARNING if says else OK)


def test_a_pause_of_one_task_is_never_forgotten() -> None:
    pause: Any = Pause("ann", seconds(-864_000), None, None)
    assert (
        judge([task_status("sync", **{**READ["paused"], "pauses": (pause,)})], [], NOW).message
        == "1 task"
    )


@pytest.mark.parametrize(
    ("replica", "says"),
    [
        ({"leaderless_for": 30.0}, ""),
        ({"leaderless_for": 30.1}, "nobody leads 'shop:' for 30 s; "),
        ({"leaderless_for": None, "leads": True}, ""),
        ({"leaderless_for": 99.0, "state": ReplicaState.SILENT}, ""),
        ({"leaderless_for": 99.0, "tasks": ()}, ""),
        ({"leaderless_for": 99.0, "leader_namespace": "other:"}, ""),
    ],
)
def test_replicas_that_follow_nobody_are_told(replica: Mapping[str, Any], says: str) -> None:
    columns = {"leader_namespace": "shop:", "tasks": ("shop:sync",), **replica}
    verdict = judge([task_status("shop:sync")], [], NOW, [replica_status("web-1", **columns)])
    assert verdict.message == f"{says}1 task"
    assert verdict.exit_status == (WARNING if says else OK)


def test_a_large_fleet_may_be_without_a_leader_for_longer() -> None:
    def fleet(leaderless_for: float) -> list[ReplicaStatus]:
        columns = {"leader_namespace": "", "tasks": ("sync",), "leaderless_for": leaderless_for}
        return [replica_status(f"web-{number}", **columns) for number in range(400)]

    assert judge([task_status()], [], NOW, fleet(60.0)).exit_status == OK
    assert judge([task_status()], [], NOW, fleet(60.1)).exit_status == WARNING


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
