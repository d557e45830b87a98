"""The rules and the dashboard that are shipped: they parse, and ask for metrics that there are."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import yaml
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from apscheduler_tasklock import HeldLock, TaskLocks
from apscheduler_tasklock._lock.outcomes import RunOutcome
from apscheduler_tasklock._runs.otel import OpenTelemetryRun
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock.metrics import observe_tasks, prometheus_text
from apscheduler_tasklock.status import Finding
from tests.support.rows import task_status
from tests.support.telemetry import telemetry
from tests.support.waist import SEVERITIES, Refusal, rows_of, text_of

TASK = 'a "task" \\ of\nmany words'
WORD = re.compile(r"\btasklock_\w+")


@pytest.fixture
def locks(database_url: str) -> Iterator[TaskLocks]:
    locks = TaskLocks(database_url)
    with locks.hold(TASK, min_lock=0, max_lock=60):
        pass
    with suppress(ValueError), locks.hold("fails", min_lock=0, max_lock=60):
        raise ValueError
    yield locks
    locks.close()


def measure_everything() -> None:
    """Let a run time's telemetry use all of its instruments and attributes."""
    now = datetime.now(timezone.utc)
    job = SimpleNamespace(func_ref="module:function")
    submission = Submission(job, "default", None, (), TASK, None, False, "logger")
    held = HeldLock(
        name=TASK,
        token=1,
        claim_id=uuid4(),
        run_time=now,
        window_start=now,
        locked_until=now + timedelta(minutes=1),
        run_until=now + timedelta(minutes=1),
        ends_at=time.monotonic() + 60,
        extender=lambda *_: True,
    )
    refusal = Refusal(
        holder="other",
        token=1,
        locked_until=now,
        reason="window",
        renewed=False,
        blocked=False,
        unfinished=False,
        waits=False,
        window_start=now,
    )
    run = OpenTelemetryRun(submission)
    run.claimed(time.monotonic(), refusal)
    run.claim_failed(time.monotonic())
    run.claimed(time.monotonic(), held)
    with run.running(held, now.timestamp()):
        pass
    run.ended(RunOutcome.of(ValueError()))
    run.lost()
    run.skipped("misfire")


def samples(families: Any) -> list[Any]:
    return [s for family in families for s in family.samples if s.name.startswith("tasklock_")]


@pytest.fixture
def words(locks: TaskLocks) -> Iterator[tuple[set[str], set[str]]]:
    """The names of all metrics and labels, as OpenTelemetry's exporter makes them."""
    telemetry()
    measure_everything()
    gauges = MeterProvider([PrometheusMetricReader()], shutdown_on_exit=False)
    observe_tasks(locks, gauges)
    found = samples(REGISTRY.collect())
    # Older exporters leave out labels that not all points of an instrument have.
    attributes = {name.replace(".", "_") for name in telemetry().attribute_names()}
    yield {s.name for s in found}, {label for s in found for label in s.labels} | attributes
    gauges.shutdown()


def check(expression: str, words: tuple[set[str], set[str]]) -> None:
    names, labels = words
    used = set(WORD.findall(expression))
    assert used & names, expression
    assert used <= names | labels, used - names - labels
    for label in re.findall(r"(\w+)\s*=~?\"", expression):
        assert label in labels, label
    for grouping in re.findall(r"by \(([^)]*)\)", expression):
        assert set(grouping.split(", ")) <= labels | {"le"}, grouping


def test_the_alert_rules_name_metrics_that_there_are(
    checkout: Path, words: tuple[set[str], set[str]]
) -> None:
    groups = yaml.safe_load((checkout / "observability/prometheus-rules.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 5
    for rule in rules:
        check(rule["expr"], words)
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        text = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= words[1]


SELECTOR = r'(?P<metric>\w+)(?:\{(?P<label>\w+)="(?P<value>\w+)"\})?'
# The forms of expressions that the rules have, each with which samples let a rule fire: those that
# are there now, those that have risen, and those that have appeared.
FORMS = {
    rf"max by \((?P<by>[^)]*)\) \({SELECTOR}\) > 0": lambda now, _: now > 0,
    rf"sum by \((?P<by>[^)]*)\) \(increase\({SELECTOR}\[\w+\]\)\) > 0": (
        lambda now, before: before is not None and now > before
    ),
    rf"sum by \((?P<by>[^)]*)\) \({SELECTOR} unless .* offset \w+\) > 0": (
        lambda now, before: before is None and now > 0
    ),
}


def fires(expression: str, before: list[Any], now: list[Any]) -> bool:
    """Return whether a rule fires, by the samples of a moment ago and of now."""
    if absent := re.fullmatch(r"absent\((\w+)\)", expression):
        return absent[1] not in {sample.name for sample in now}
    if " or " in expression:
        return any(fires(part, before, now) for part in expression.split(" or "))
    [(parts, is_met)] = [
        (matched, is_met)
        for form, is_met in FORMS.items()
        if (matched := re.fullmatch(form, expression))
    ]
    values = {(each.name, *sorted(each.labels.items())): each.value for each in before}
    return any(
        is_met(sample.value, values.get((sample.name, *sorted(sample.labels.items()))))
        for sample in now
        if sample.name == parts["metric"]
        and (parts["label"] is None or sample.labels.get(parts["label"]) == parts["value"])
        and set(parts["by"].split(", ")) <= set(sample.labels)
    )


def rows_with(level: str | None) -> list[Any]:
    """Return the samples of a task, with a finding of a level."""
    found = [Finding("overdue", level, "by 95 s", task="sync")] if level else []
    text = text_of(rows_of([task_status("sync")], found, ()))
    return samples(text_string_to_metric_families(text))


def measured() -> list[Any]:
    """Return what the replicas measure, after one more run whose lock is lost and claim fails."""
    telemetry()
    measure_everything()
    return samples(REGISTRY.collect())


def test_each_rule_fires_for_what_it_is_for(checkout: Path) -> None:
    """The findings are those of `check`, so that a rule decides nothing but the time to wait."""
    groups = yaml.safe_load((checkout / "observability/prometheus-rules.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert all("for" in rule for rule in rules)
    well, first, second = rows_with(None), measured(), measured()

    def only(found: list[Any], name: str) -> list[Any]:
        return [each for each in found if name in each.name]

    moments = {
        "all is well": ([*well, *second], [*well, *second], []),
        "nobody tells": ([*well, *second], second, ["TaskLockMetricsMissing"]),
        **{
            level: (well, rows_with(level), [] if level == "note" else [f"TaskLock{level.title()}"])
            for level in SEVERITIES
        },
        "a lock was lost": (
            [*well, *only(first, "lost")],
            [*well, *only(second, "lost")],
            ["TaskLockLockLost"],
        ),
        "the first lock was lost": (well, [*well, *only(first, "lost")], ["TaskLockLockLost"]),
        "a claim failed": (
            [*well, *only(first, "claim")],
            [*well, *only(second, "claim")],
            ["TaskLockClaimErrors"],
        ),
        "the first claim failed": (well, [*well, *only(first, "claim")], ["TaskLockClaimErrors"]),
    }
    fired = {
        moment: [rule["alert"] for rule in rules if fires(rule["expr"], before, now)]
        for moment, (before, now, _) in moments.items()
    }
    assert fired == {moment: expected for moment, (_, _, expected) in moments.items()}
    assert {rule["alert"] for rule in rules} == {name for names in fired.values() for name in names}


def test_the_dashboard_names_metrics_that_there_are(
    checkout: Path, words: tuple[set[str], set[str]]
) -> None:
    dashboard = json.loads((checkout / "observability/grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            check(target["expr"], words)
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= words[1]
    [query] = [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert set(WORD.findall(query)) <= words[0] | words[1]


def test_the_text_has_the_names_and_values_that_opentelemetry_has(
    locks: TaskLocks, words: tuple[set[str], set[str]]
) -> None:
    def of(families: Any) -> dict[str, float]:
        of_rows = ("tasklock_task_", "tasklock_replica_")
        found = [s for s in samples(families) if s.name.startswith(of_rows)]
        return {s.name: s.value for s in found if s.labels.get("tasklock_task_name", TASK) == TASK}

    as_text = of(text_string_to_metric_families(prometheus_text(locks)))
    assert as_text == of(REGISTRY.collect())
    assert len(as_text) == 6
    assert as_text["tasklock_replica_alive"] == 0
    assert as_text["tasklock_task_last_success_seconds"] == pytest.approx(time.time(), abs=3600)
