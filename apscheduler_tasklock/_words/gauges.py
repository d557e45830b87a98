"""The gauges of the tasks, as functions of rows and a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from apscheduler_tasklock.status import ReplicaStatus, TaskState, TaskStatus


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

    :ivar value: returns a task's value at a time; ``None``: the task has no value
    """

    value: Callable[[TaskStatus, datetime], float | None]


def _overdue(task: TaskStatus, now: datetime) -> float:
    """Return 1 for an overdue task, else 0.

    A task whose last run is dead or takes too long has the state ``DEAD`` or ``TOO_LONG``, even if
    its next run is overdue. So in these states ``overdue_at`` is compared with the time now.
    """
    if task.gone:  # no alarm, because no live replica has the task any more
        return 0.0
    is_over = task.state is TaskState.TOO_LONG and task.locked_until < now
    if (task.state is TaskState.DEAD or is_over) and task.overdue_at is not None:
        return float(task.overdue_at < now)
    return float(task.state is TaskState.OVERDUE)


def _cut(task: TaskStatus, _now: datetime) -> float:
    """Return 1 for a task whose last run was cut, unless the task is paused or gone; else 0.

    A cut that an operator has acknowledged is 0, too.
    """
    is_known = task.paused or task.gone or task.acknowledged
    return float(task.cut_for is not None and not is_known)


def _last_duration(task: TaskStatus, _now: datetime) -> float | None:
    return None if task.finished_at is None else task.took


def _next_due(task: TaskStatus, _now: datetime) -> float | None:
    return None if task.due_at is None else task.due_at.timestamp()


def _last_success(task: TaskStatus, _now: datetime) -> float | None:
    return None if task.succeeded_at is None else task.succeeded_at.timestamp()


GAUGES = (
    Gauge("tasklock.task.overdue", "", "1 if nobody has run the task when it was due", _overdue),
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
        lambda task, _now: 0.0 if task.acknowledged else float(task.failures),
    ),
    Gauge(
        "tasklock.task.cut", "", "1 if a stop has cut the last run, and nobody ran its window", _cut
    ),
    Gauge(
        "tasklock.task.unreadable",
        "",
        "1 if the task's row has values that cannot be read",
        lambda task, _now: float(bool(task.unreadable)),
    ),
    Gauge(
        "tasklock.task.last_duration",
        "s",
        "How long the last run took, unless it goes on",
        _last_duration,
    ),
    Gauge("tasklock.task.next_due", "s", "When the next run is due, since 1970", _next_due),
    Gauge(
        "tasklock.task.paused", "", "1 if the task is paused", lambda task, _now: float(task.paused)
    ),
)
REPLICAS_ALIVE = Instrument("tasklock.replica.alive", "", "Replicas that are alive")
LEADER = Instrument("tasklock.leader", "", "1 if a replica leads the namespace, in leader mode")


@dataclass(frozen=True)
class MetricRows:
    """The rows that the metrics are read from.

    :ivar now: the time of the metrics
    :ivar tasks: the tasks that have metrics
    :ivar alive: how many replicas are alive; ``None``: the replicas cannot be read
    :ivar leaders: for each namespace with live replicas in leader mode, 1 if one of them leads
    """

    now: datetime
    tasks: Sequence[TaskStatus] = ()
    alive: int | None = None
    leaders: Mapping[str, float] = field(default_factory=dict)


def rows_of(
    tasks: Sequence[TaskStatus], replicas: Sequence[ReplicaStatus] | None, now: datetime
) -> MetricRows:
    """Return the rows of the metrics. One-off jobs have no metrics, because there may be many.

    :param replicas: all replicas; ``None``: they cannot be read
    :param now: this machine's time, because a task's status does not say what time it is in the
        database. The two clocks differ by far less than a grace time.
    """
    tasks = [task for task in tasks if not _is_one_off(task)]
    if replicas is None:
        return MetricRows(now, tasks)
    alive = [replica for replica in replicas if replica.alive]
    leaders: dict[str, float] = {}
    for replica in alive:
        if replica.leader_namespace is not None:
            led = leaders.get(replica.leader_namespace, 0.0)
            # By the namespace, because a scheduler's executors lead under the id of one of them.
            leads = float(replica.leaderless_for is None)
            leaders[replica.leader_namespace] = max(led, leads)
    return MetricRows(now, tasks, len(alive), leaders)


def _is_one_off(task: TaskStatus) -> bool:
    return isinstance(task.schedule, Mapping) and task.schedule.get("type") == "date"


def text_of(rows: MetricRows) -> str:
    """Return the metrics in Prometheus' text format, version 0.0.4."""
    lines = []
    for gauge in GAUGES:
        lines += gauge.head
        for task, value in task_values(gauge, rows).items():
            label = f'tasklock_task_name="{_escaped(task)}"'
            lines.append(f"{gauge.prometheus_name}{{{label}}} {value!r}")
    if rows.alive is not None:
        lines += [*REPLICAS_ALIVE.head, f"{REPLICAS_ALIVE.prometheus_name} {float(rows.alive)!r}"]
    if rows.leaders:
        lines += LEADER.head
    for namespace, value in rows.leaders.items():
        label = f'tasklock_namespace="{_escaped(namespace)}"'
        lines.append(f"{LEADER.prometheus_name}{{{label}}} {value!r}")
    return "\n".join(lines) + "\n"


def values_of(rows: MetricRows) -> dict[str, dict[str, float] | float]:
    """Return the metrics' values by the metrics' names in Prometheus."""
    values: dict[str, dict[str, float] | float] = {
        gauge.prometheus_name: task_values(gauge, rows) for gauge in GAUGES
    }
    if rows.alive is not None:
        values[REPLICAS_ALIVE.prometheus_name] = float(rows.alive)
    if rows.leaders:
        values[LEADER.prometheus_name] = dict(rows.leaders)
    return values


def task_values(gauge: Gauge, rows: MetricRows) -> dict[str, float]:
    """Return a gauge's values, by the tasks' names."""
    values = ((task.name, gauge.value(task, rows.now)) for task in rows.tasks)
    return {name: value for name, value in values if value is not None}


def _escaped(value: str) -> str:
    """Return a label's value, escaped so that it can stand between double quotes."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
