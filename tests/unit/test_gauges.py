"""The metrics of rows at a time: their values, and their text for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from apscheduler_tasklock._words.gauges import rows_of, text_of, values_of
from apscheduler_tasklock.status import ReplicaState, TaskStatus
from tests.support.rows import NOW, READ, replica_status, seconds, task_status


def values(*tasks: TaskStatus) -> dict[str, dict[str, float]]:
    """Return the values of each task, by metric, as Prometheus reads the text."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text_of(rows_of(tasks, [], NOW))):
        for sample in family.samples:
            if task := sample.labels.get("tasklock_task_name"):
                found.setdefault(task, {})[sample.name] = sample.value
    return found


def value(metric: str, **columns: Any) -> float | None:
    return values(task_status("sync", **columns))["sync"].get(f"tasklock_task_{metric}")


# It is overdue from now on, and not before.
JUST = {"due_at": seconds(-60), "overdue_at": seconds(0)}
ROWS: dict[str, tuple[Mapping[str, Any], int]] = {
    "new": (READ["new"], 0),
    "overdue": (READ["overdue"], 1),
    "late": (READ["late"], 0),
    "dead": (READ["overdue, dead"], 1),
    "dead and not overdue": ({**READ["dead"], **JUST}, 0),
    "past its maximum lock": ({**READ["overdue, dead"], "run_until": seconds(-58)}, 1),
    "too long": (READ["overdue, too long"], 0),
    "overruns": (READ["overdue, overruns"], 1),
    "overruns and not overdue": ({**READ["overruns"], **JUST}, 0),
    "dead and not due": ({**READ["dead"], **READ["the last"]}, 0),
    "running": (READ["overdue, running"], 0),
    "paused": (READ["overdue, paused"], 0),
    "over": (READ["the last"], 0),
    "gone": ({**READ["overdue, dead"], "gone": True}, 0),
}


@pytest.mark.parametrize("task", ROWS)
def test_a_task_is_overdue_if_it_is_due_and_nobody_runs_it(task: str) -> None:
    columns, overdue = ROWS[task]
    assert value("overdue", **columns) == overdue


def test_failures_and_the_last_success_are_told_and_one_off_jobs_are_not() -> None:
    well = {"overdue": 0, "failures": 0, "cut": 0, "unreadable": 0}
    told = {
        "failing": (READ["failing"], {**well, "failures": 3}),
        "cut": (READ["cut"], {**well, "cut": 1}),
        "handed over": (READ["handed over"], {**well, "cut": 1}),
        "unreadable": (READ["unreadable"], {**well, "unreadable": 1}),
        "well": ({}, well),
    }
    tasks = [task_status(name, **columns) for name, (columns, _) in told.items()]
    once = task_status("once", schedule={"type": "date", "run": None})
    found = values(*tasks, once)
    assert found.keys() == told.keys()
    for name, (columns, expected) in told.items():
        kept = {metric: found[name][f"tasklock_task_{metric}"] for metric in well}
        assert kept == expected, name
        has_succeeded = columns.get("succeeded_at", NOW) is not None
        assert ("tasklock_task_last_success_seconds" in found[name]) == has_succeeded
    success = found["well"]["tasklock_task_last_success_seconds"]
    assert success == (NOW + seconds(-58)).timestamp()


@pytest.mark.parametrize("row", ["failing", "cut"])
def test_what_is_acknowledged_is_0(row: str) -> None:
    known = {**READ[row], "acknowledged": True}
    assert (value("failures", **known), value("cut", **known)) == (0, 0)


@pytest.mark.parametrize("change", [{"paused": True}, {"gone": True}])
def test_a_cut_of_a_task_that_is_paused_or_gone_is_0(change: Mapping[str, Any]) -> None:
    assert value("cut", **{**READ["cut"], **change}) == 0


def test_durations_due_times_and_pauses_are_told() -> None:
    over = {"finished_at": seconds(-30), "started_at": seconds(-90), "took": 60.0}
    assert value("last_duration_seconds", **over) == 60
    assert value("next_due_seconds", **over) == (NOW + seconds(240)).timestamp()
    assert value("paused", **over) == 0
    running = {**READ["running"], "paused": True}
    assert value("last_duration_seconds", **running) is None
    assert value("paused", **running) == 1
    assert value("next_due_seconds", **READ["paused"]) is None


def test_replicas_that_are_alive_are_counted_and_left_out_if_they_cannot_be_read() -> None:
    replicas = [
        replica_status("one"),
        replica_status("two"),
        replica_status("silent", state=ReplicaState.SILENT),
    ]
    found = rows_of([task_status()], replicas, NOW)
    assert "\ntasklock_replica_alive 2.0\n" in text_of(found)
    assert values_of(found)["tasklock_replica_alive"] == 2
    unknown = rows_of([task_status()], None, NOW)
    assert "tasklock_replica_alive" not in text_of(unknown)
    assert "tasklock_replica_alive" not in values_of(unknown)
    assert "tasklock_task_overdue" in text_of(unknown)


def test_each_namespace_has_its_leader() -> None:
    """By the namespace: the executors of one scheduler lead under the id of one of them."""
    replicas = [
        replica_status("a", leader_namespace="shop:", leads=True),
        replica_status("b", leader_namespace="shop:", leaderless_for=5.0),
        replica_status("c", leader_namespace='"x"', leaderless_for=5.0),
        replica_status("d", leader_namespace="dead:", state=ReplicaState.DIED),
        replica_status("e"),
    ]
    found = rows_of([], replicas, NOW)
    assert values_of(found)["tasklock_leader"] == {"shop:": 1.0, '"x"': 0.0}
    assert 'tasklock_leader{tasklock_namespace="\\"x\\""} 0.0' in text_of(found)
    assert "tasklock_leader" not in values_of(rows_of([], replicas[-1:], NOW))


def test_names_are_escaped() -> None:
    name = 'a "task" \\ of\nmany words'
    assert values(task_status(name))[name]["tasklock_task_failures"] == 0
    found = values_of(rows_of([task_status(name)], [], NOW))
    assert found["tasklock_task_paused"] == {name: 0.0}
