"""The same rows give the same findings to whoever asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock.metrics import prometheus_text
from tests.support.commands import Command
from tests.support.pages import Reader
from tests.support.rows import (
    CUT,
    DEAD,
    FAILING,
    MISSED,
    OVERDUE,
    STAYS_ALIVE,
    STAYS_OK,
    STAYS_TOO_LONG,
    add_job,
    add_miss,
    add_replica,
    add_task,
)

Connection = psycopg.Connection[Any]

LATE_FOR_LONG = {
    "due_at": "now() - interval '3 h'",
    "overdue_at": "now() + interval '2 h'",
    "window_start": "now() - interval '4 h'",
}
LONG_AGO = {"window_start": "now() - interval '9 h'", "missed_at": "now() - interval '1 h'"}
TASKS = {
    "overdue": OVERDUE,
    "dead": DEAD,
    "hangs": STAYS_TOO_LONG,
    "late": LATE_FOR_LONG,
    "once": MISSED,
    "misses": {**STAYS_OK, **LONG_AGO},
    "cut": CUT,
    "fails": {**STAYS_OK, **FAILING},
    "unreadable": {**STAYS_OK, "schedule": "'no JSON'"},
    "well": STAYS_OK,
}


def add_rows(connection: Connection) -> None:
    """Add rows of which each kind of finding is told that one table can have."""
    for name, columns in TASKS.items():
        add_task(connection, name, **columns)
    add_miss(connection, "misses", 1, cause="'misfire'", run_times="4")
    add_replica(connection, "web-1", ["well"], **STAYS_ALIVE, release="'1'")
    add_replica(connection, "web-2", ["well"], **STAYS_ALIVE, release="'2'", version="'1.1'")
    add_replica(connection, "gone", ["well"], seen_at="now() - interval '1 h'")
    due = {"next_run_time": "now() - interval '1 h'", "changed_at": "now() - interval '2 h'"}
    add_job(connection, "mail", **due)


def test_check_the_overview_its_page_and_the_gauge_tell_the_same_findings(
    connection: Connection,
    make_task_locks: Callable[..., TaskLocks],
    database_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_rows(connection)
    locks = make_task_locks()
    told = [(each.what, each.level, each.task, each.replica) for each in locks.overview().findings]
    assert told == [
        ("overdue", "critical", "mail", None),
        ("overdue", "critical", "overdue", None),
        ("dead", "critical", "dead", None),
        ("too long", "critical", "hangs", None),
        ("unreadable", "warning", "unreadable", None),
        ("late", "warning", "late", None),
        ("missed", "warning", "misses", None),
        ("missed", "warning", "once", None),
        ("cut", "warning", "cut", None),
        ("failing", "warning", "fails", None),
        ("versions", "note", None, None),
        ("releases", "note", None, None),
        ("silent", "note", None, "gone"),
    ]

    def of(findings: Any) -> list[tuple[Any, ...]]:
        return [(each["what"], each["level"], each["task"], each["replica"]) for each in findings]

    checked = Command(database_url, capsys)("check", "--json")
    assert of(checked.json["findings"]) == told
    assert checked.status == 2
    assert of(Reader(locks).twin("/")["overview"]["findings"]) == told
    [family] = [
        family
        for family in text_string_to_metric_families(prometheus_text(locks))
        if family.name == "tasklock_finding"
    ]
    counted: Counter[tuple[str, str, str]] = Counter()
    for sample in family.samples:
        label = sample.labels
        key = label["tasklock_finding_kind"], label["tasklock_finding_level"]
        counted[(*key, label.get("tasklock_task_name", ""))] += int(sample.value)
    # Neither a stored job that nobody has claimed nor a one-off job has a series of its own.
    series = TASKS.keys() - {"once"}
    named = [(what, level, task if task in series else "") for what, level, task, _ in told]
    assert counted == Counter(named)
