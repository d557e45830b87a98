"""The gauges of the tasks, as functions of rows and of the findings on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from apscheduler_tasklock._lock.words import printable
from apscheduler_tasklock.status import Finding, ReplicaStatus, TaskState, TaskStatus


@dataclass(frozen=True)
class Instrument:
    """The name, the unit and the description of a gauge."""

    name: str
    unit: Literal["", "s"]
    description: str

    @property
    def prometheus_name(self) -> str:
        """The gauge's name in Prometheus, by OpenTelemetry's rules for the conversion of names."""
        return self.name.replace(".", "_") + ("_seconds" if self.unit == "s" else "")

    @property
    def head(self) -> list[str]:
        """The lines that introduce the gauge in Prometheus' text format."""
        name = self.prometheus_name
        return [f"# HELP {name} {self.description}", f"# TYPE {name} gauge"]


@dataclass(frozen=True)
class Gauge(Instrument):
    """A gauge with a value for each task.

    :ivar value: returns a task's value from the task and what the finding of it is about, which is
        ``None`` if there is none. A task without a value returns ``None``.
    """

    value: Callable[[TaskStatus, str | None], float | None]


def _last_duration(task: TaskStatus, _kind: str | None) -> float | None:
    return None if task.finished_at is None else task.took


def _next_due(task: TaskStatus, _kind: str | None) -> float | None:
    return None if task.due_at is None else task.due_at.timestamp()


def _last_success(task: TaskStatus, _kind: str | None) -> float | None:
    return None if task.succeeded_at is None else task.succeeded_at.timestamp()


GAUGES = (
    Gauge(
        "tasklock.task.overdue",
        "",
        "1 if nobody has run the task when it was due",
        lambda _task, kind: float(kind == TaskState.OVERDUE.value),
    ),
    Gauge(
        "tasklock.task.last_success",
        "s",
        "When a run last ended well, since 1970",
        _last_success,
    ),
    Gauge(
        "tasklock.task.failures",
        "",
        "Runs that failed since the last that ended well; 0 if they are acknowledged",
        lambda task, _kind: 0.0 if task.acknowledged else float(task.failures),
    ),
    Gauge(
        "tasklock.task.last_duration",
        "s",
        "How long the last run took, unless it goes on",
        _last_duration,
    ),
    Gauge("tasklock.task.next_due", "s", "When the next run is due, since 1970", _next_due),
    Gauge(
        "tasklock.task.paused",
        "",
        "1 if the task is paused",
        lambda task, _kind: float(task.paused),
    ),
)
FINDING = Instrument("tasklock.finding", "", "1 for each finding of `apscheduler-tasklock check`")
REPLICAS_ALIVE = Instrument("tasklock.replica.alive", "", "Replicas that are alive")
LEADER = Instrument("tasklock.leader", "", "1 if a replica leads the namespace, in leader mode")

# The attributes of the gauges.
TASK_NAME, NAMESPACE = "tasklock.task.name", "tasklock.namespace"
FINDING_KIND, FINDING_LEVEL = "tasklock.finding.kind", "tasklock.finding.level"


@dataclass(frozen=True)
class MetricRows:
    """The rows that the metrics are read from.

    :ivar tasks: the tasks that have metrics
    :ivar findings: the findings on all tasks and replicas
    :ivar alive: how many replicas are alive; ``None``: the replicas cannot be read
    :ivar leaders: for each namespace with live replicas in leader mode, 1 if one of them leads
    """

    tasks: Sequence[TaskStatus] = ()
    findings: Sequence[Finding] = ()
    alive: int | None = None
    leaders: Mapping[str, float] = field(default_factory=dict)


def rows_of(
    tasks: Sequence[TaskStatus],
    findings: Sequence[Finding],
    replicas: Sequence[ReplicaStatus] | None,
) -> MetricRows:
    """Return the rows of the metrics. One-off jobs have no metrics, because there may be many.

    :param findings: the findings on all tasks and replicas
    :param replicas: all replicas; ``None``: they cannot be read
    """
    tasks = [task for task in tasks if not _is_one_off(task)]
    if replicas is None:
        return MetricRows(tasks, findings)
    alive = [replica for replica in replicas if replica.alive]
    leaders: dict[str, float] = {}
    for replica in alive:
        if replica.leader_namespace is not None:
            led = leaders.get(replica.leader_namespace, 0.0)
            # By the namespace, because a scheduler's executors lead under the id of one of them.
            leads = float(replica.leaderless_for is None)
            leaders[replica.leader_namespace] = max(led, leads)
    return MetricRows(tasks, findings, len(alive), leaders)


def _is_one_off(task: TaskStatus) -> bool:
    return isinstance(task.schedule, Mapping) and task.schedule.get("type") == "date"


def text_of(rows: MetricRows) -> str:
    """Return the metrics in Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    for gauge in GAUGES:
        values = task_values(gauge, rows).items()
        lines += _samples(gauge, [({TASK_NAME: task}, value) for task, value in values])
    lines += _samples(FINDING, finding_values(rows))
    if rows.alive is not None:
        lines += [*REPLICAS_ALIVE.head, f"{REPLICAS_ALIVE.prometheus_name} {float(rows.alive)!r}"]
    if rows.leaders:
        lines += _samples(LEADER, [({NAMESPACE: name}, n) for name, n in rows.leaders.items()])
    return "\n".join(lines) + "\n"


def values_of(rows: MetricRows) -> dict[str, Any]:
    """Return the metrics' values by the metrics' names in Prometheus."""
    values: dict[str, Any] = {gauge.prometheus_name: task_values(gauge, rows) for gauge in GAUGES}
    values[FINDING.prometheus_name] = [
        {**_prometheus(attributes), "value": value} for attributes, value in finding_values(rows)
    ]
    if rows.alive is not None:
        values[REPLICAS_ALIVE.prometheus_name] = float(rows.alive)
    if rows.leaders:
        values[LEADER.prometheus_name] = dict(rows.leaders)
    return values


def task_values(gauge: Gauge, rows: MetricRows) -> dict[str, float]:
    """Return a gauge's values, by the tasks' names."""
    kinds = {finding.task: finding.what for finding in rows.findings}
    values = ((task.name, gauge.value(task, kinds.get(task.name))) for task in rows.tasks)
    return {name: value for name, value in values if value is not None}


def finding_values(rows: MetricRows) -> list[tuple[dict[str, str], float]]:
    """Return the values of the gauge of findings, each with its attributes.

    A finding on a task that has no metrics, such as that of a one-off job, has no task's name,
    because there may be any number of names. Such findings are counted together.
    """
    names = {task.name for task in rows.tasks}
    counts = Counter(
        (each.what, each.level, each.task if each.task in names else None) for each in rows.findings
    )
    values = []
    for (kind, level, task), count in counts.items():
        attributes = {FINDING_KIND: kind, FINDING_LEVEL: level}
        values.append((attributes | ({TASK_NAME: task} if task else {}), float(count)))
    return values


def _samples(
    instrument: Instrument, values: Iterable[tuple[Mapping[str, str], float]]
) -> list[str]:
    """Return the lines of a gauge, each with other labels.

    Two names may be the same when their control characters are escapes. Prometheus rejects the
    answer if it has a sample twice, so the first one is told.
    """
    samples: dict[str, float] = {}
    for attributes, value in values:
        labels = (f'{name}="{_escaped(text)}"' for name, text in _prometheus(attributes).items())
        samples.setdefault(f"{instrument.prometheus_name}{{{','.join(labels)}}}", value)
    return [*instrument.head, *(f"{labels} {value!r}" for labels, value in samples.items())]


def _prometheus(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return attributes with their names in Prometheus."""
    return {name.replace(".", "_"): text for name, text in attributes.items()}


def _escaped(value: str) -> str:
    """Return a label's value, escaped so that it can stand between double quotes.

    Control characters but line breaks, which Prometheus escapes, are written as escapes before.
    """
    value = "\n".join(map(printable, value.split("\n")))
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
