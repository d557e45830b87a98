"""The metrics of rows at a time: their values, and their text for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from apscheduler_tasklock._words.gauges import MetricRows, rows_of, text_of, values_of
from apscheduler_tasklock.status import ReplicaState, ReplicaStatus, TaskStatus
from tests.support.rows import NOW, READ, replica_status, seconds, task_status
from tests.support.waist import WatchedRows, findings_of


def read(tasks: Sequence[TaskStatus], replicas: Sequence[ReplicaStatus] | None = ()) -> MetricRows:
    return rows_of(tasks, findings_of(WatchedRows(NOW, tasks, replicas=replicas)), replicas)


def values(*tasks: TaskStatus) -> dict[str, dict[str, float]]:
    """Return the values of each task, by metric, as Prometheus reads the text."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text_of(read(tasks))):
        for sample in family.samples:
            if task := sample.labels.get("tasklock_task_name"):
                found.setdefault(task, {})[sample.name] = sample.value
    return found


def value(metric: str, **columns: Any) -> float | None:
    return values(task_status("sync", **columns))["sync"].get(f"tasklock_task_{metric}")


@pytest.mark.parametrize(
    ("row", "overdue"),
    [
        *(("overdue", 1), ("new", 0), ("late", 0), ("overdue, running", 0), ("overdue, paused", 0)),
        # A task has one finding, the worst: it is dead, or runs for too long.
        *(("overdue, dead", 0), ("overdue, overruns", 0)),
    ],
)
def test_a_task_is_overdue_if_that_is_its_finding(row: str, overdue: int) -> None:
    assert value("overdue", **READ[row]) == overdue


def test_each_finding_has_its_kind_level_and_task() -> None:
    tasks = [
        task_status("a", **READ["overdue, dead"]),
        task_status("b", **READ["failing"]),
        *(
            task_status(name, **READ["missed"], schedule={"type": "date", "run": None})
            for name in ("one-off 1", "one-off 2")
        ),
    ]
    rows = read(tasks, [replica_status("web-1", state=ReplicaState.SILENT)])

    def series(**labels: str) -> dict[str, str]:
        return {f"tasklock_{name}": text for name, text in labels.items()}

    expected = [
        (series(finding_kind="dead", finding_level="critical", task_name="a"), 1.0),
        # Names of one-off jobs are without number.
        (series(finding_kind="missed", finding_level="warning"), 2.0),
        (series(finding_kind="failing", finding_level="warning", task_name="b"), 1.0),
        (series(finding_kind="silent", finding_level="note"), 1.0),
    ]
    told = [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(text_of(rows))
        for sample in family.samples
        if sample.name == "tasklock_finding"
    ]
    assert told == expected
    assert values_of(rows)["tasklock_finding"] == [
        {**labels, "value": value} for labels, value in expected
    ]


def test_failures_and_the_last_success_are_told_and_one_off_jobs_are_not() -> None:
    well = {"overdue": 0, "failures": 0}
    told = {
        "failing": (READ["failing"], {**well, "failures": 3}),
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


def test_failures_that_are_acknowledged_are_0() -> None:
    assert value("failures", **{**READ["failing"], "acknowledged": True}) == 0


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
    found = read([task_status()], replicas)
    assert "\ntasklock_replica_alive 2.0\n" in text_of(found)
    assert values_of(found)["tasklock_replica_alive"] == 2
    unknown = read([task_status()], None)
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
    found = read([], replicas)
    assert values_of(found)["tasklock_leader"] == {"shop:": 1.0, '"x"': 0.0}
    assert 'tasklock_leader{tasklock_namespace="\\"x\\""} 0.0' in text_of(found)
    assert "tasklock_leader" not in values_of(read([], replicas[-1:]))


def test_names_are_escaped() -> None:
    name = 'a "task" \\ of\nmany words'
    assert values(task_status(name))[name]["tasklock_task_failures"] == 0
    found = values_of(read([task_status(name)]))
    assert found["tasklock_task_paused"] == {name: 0.0}


def test_names_that_differ_in_control_characters_alone_are_one_sample() -> None:
    """Prometheus rejects an answer that has a sample twice."""
    text = text_of(rows_of([task_status("a\x1b"), task_status("a\\x1b")], [], ()))
    assert text.count('tasklock_task_overdue{tasklock_task_name="a\\\\x1b"} 0.0') == 1
    assert text.replace("\n", "").isprintable()
