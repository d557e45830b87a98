"""Metrics of the tasks, as OpenTelemetry's gauges and as text for Prometheus.

The metrics are read from the tasks' rows, so that they are right even while every replica is down.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Literal

from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError, TaskLockSchemaError
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import TaskState, TaskStatus

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

logger = logger_of(__name__)

TASK_NAME = "tasklock.task.name"
NAMESPACE = "tasklock.namespace"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds for which all gauges of a collection use the same rows.
SHARED_FOR = 1.0
# Limits the seconds until a client has sent its request, and until it has read the answer.
CLIENT_TIMEOUT = 5.0


@dataclass(frozen=True)
class _Instrument:
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
class _Gauge(_Instrument):
    """A gauge with a value for each task.

    :ivar value: returns a task's value; ``None``: the task has no value
    """

    value: Callable[[TaskStatus], float | None]


def _overdue(task: TaskStatus) -> float:
    """Return 1 for an overdue task, else 0.

    A task whose last run is dead or takes too long has the state ``DEAD`` or ``TOO_LONG``, even if
    its next run is overdue. So in these states ``overdue_at`` is compared with the time now.
    """
    if task.gone:  # no alarm, because no live replica has the task any more
        return 0.0
    # `now` comes from this machine's clock, because a task's status does not say what time it is in
    # the database. The two clocks differ by far less than a grace time.
    now = datetime.now(timezone.utc)
    is_over = task.state is TaskState.TOO_LONG and task.locked_until < now
    if (task.state is TaskState.DEAD or is_over) and task.overdue_at is not None:
        return float(task.overdue_at < now)
    return float(task.state is TaskState.OVERDUE)


def _cut(task: TaskStatus) -> float:
    """Return 1 for a task whose last run was cut, unless the task is paused or gone; else 0.

    A cut that an operator has acknowledged is 0, too.
    """
    is_known = task.paused or task.gone or task.acknowledged
    return float(task.cut_for is not None and not is_known)


def _last_duration(task: TaskStatus) -> float | None:
    return None if task.finished_at is None else task.took


def _next_due(task: TaskStatus) -> float | None:
    return None if task.due_at is None else task.due_at.timestamp()


def _last_success(task: TaskStatus) -> float | None:
    return None if task.succeeded_at is None else task.succeeded_at.timestamp()


GAUGES = (
    _Gauge("tasklock.task.overdue", "", "1 if nobody has run the task when it was due", _overdue),
    _Gauge(
        "tasklock.task.last_success",
        "s",
        "When a run last ended well, since 1970",
        _last_success,
    ),
    _Gauge(
        "tasklock.task.failures",
        "",
        "Runs that failed since the last that ended well; 0 if they are acknowledged",
        lambda task: 0.0 if task.acknowledged else float(task.failures),
    ),
    _Gauge(
        "tasklock.task.cut", "", "1 if a stop has cut the last run, and nobody ran its window", _cut
    ),
    _Gauge(
        "tasklock.task.unreadable",
        "",
        "1 if the task's row has values that cannot be read",
        lambda task: float(bool(task.unreadable)),
    ),
    _Gauge(
        "tasklock.task.last_duration",
        "s",
        "How long the last run took, unless it goes on",
        _last_duration,
    ),
    _Gauge("tasklock.task.next_due", "s", "When the next run is due, since 1970", _next_due),
    _Gauge("tasklock.task.paused", "", "1 if the task is paused", lambda task: float(task.paused)),
)
_REPLICAS_ALIVE = _Instrument("tasklock.replica.alive", "", "Replicas that are alive")
_LEADER = _Instrument("tasklock.leader", "", "1 if a replica leads the namespace, in leader mode")


@dataclass(frozen=True)
class _Rows:
    """The rows that the metrics are read from.

    :ivar tasks: the tasks that have metrics
    :ivar alive: how many replicas are alive; ``None``: the replicas cannot be read
    :ivar leaders: for each namespace with live replicas in leader mode, 1 if one of them leads
    """

    tasks: Sequence[TaskStatus] = ()
    alive: int | None = None
    leaders: Mapping[str, float] = field(default_factory=dict)


def _read(locks: TaskLocks) -> _Rows:
    """Read the rows. One-off jobs have no metrics, because there may be many."""
    tasks = [task for task in locks.tasks() if not _is_one_off(task)]
    try:
        alive = [replica for replica in locks.replicas() if replica.alive]
    except TaskLockSchemaError:  # so that the tasks' metrics do not depend on another table's right
        return _Rows(tasks)
    leaders: dict[str, float] = {}
    for replica in alive:
        if replica.leader_namespace is not None:
            led = leaders.get(replica.leader_namespace, 0.0)
            # By the namespace, because a scheduler's executors lead under the id of one of them.
            leads = float(replica.leaderless_for is None)
            leaders[replica.leader_namespace] = max(led, leads)
    return _Rows(tasks, len(alive), leaders)


def _is_one_off(task: TaskStatus) -> bool:
    return isinstance(task.schedule, Mapping) and task.schedule.get("type") == "date"


def prometheus_text(locks: TaskLocks) -> str:
    """Return the metrics of the tasks in Prometheus' text format, version 0.0.4.

    :raises TaskLockError: the database is unavailable, or rejects the read
    """
    rows = _read(locks)
    lines = []
    for gauge in GAUGES:
        lines += gauge.head
        for task, value in _values(gauge, rows).items():
            label = f'tasklock_task_name="{_escaped(task)}"'
            lines.append(f"{gauge.prometheus_name}{{{label}}} {value!r}")
    if rows.alive is not None:
        lines += [*_REPLICAS_ALIVE.head, f"{_REPLICAS_ALIVE.prometheus_name} {float(rows.alive)!r}"]
    if rows.leaders:
        lines += _LEADER.head
    for namespace, value in rows.leaders.items():
        label = f'tasklock_namespace="{_escaped(namespace)}"'
        lines.append(f"{_LEADER.prometheus_name}{{{label}}} {value!r}")
    return "\n".join(lines) + "\n"


def metric_values(locks: TaskLocks) -> dict[str, dict[str, float] | float]:
    """Return the metrics' values: by the metric's name in Prometheus, then by the task's name.

    The number of replicas that are alive is by the metric's name alone. Whether a replica leads is
    by the namespace, if there are replicas in leader mode.

    :raises TaskLockError: the database is unavailable, or rejects the read
    """
    rows = _read(locks)
    values: dict[str, dict[str, float] | float] = {
        gauge.prometheus_name: _values(gauge, rows) for gauge in GAUGES
    }
    if rows.alive is not None:
        values[_REPLICAS_ALIVE.prometheus_name] = float(rows.alive)
    if rows.leaders:
        values[_LEADER.prometheus_name] = dict(rows.leaders)
    return values


def _values(gauge: _Gauge, rows: _Rows) -> dict[str, float]:
    """Return a gauge's values, by the tasks' names."""
    return {task.name: value for task in rows.tasks if (value := gauge.value(task)) is not None}


def _escaped(value: str) -> str:
    """Return a label's value, escaped so that it can stand between double quotes."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def observe_tasks(locks: TaskLocks, meter_provider: MeterProvider | None = None) -> None:
    """Register OpenTelemetry's gauges of the tasks. Each collection reads the rows once.

    Call this function in one process only, because each process that calls it reports the same
    tasks. While the database is unavailable, nothing is reported, and a WARNING says so.

    :param meter_provider: by default the global one
    :raises TaskLockOptionError: ``opentelemetry-api`` is not installed
    """
    try:
        from opentelemetry.metrics import get_meter
    except ImportError:
        raise TaskLockOptionError(
            "observe_tasks() needs OpenTelemetry: pip install 'apscheduler-tasklock[otel]'"
        ) from None
    meter = get_meter("apscheduler_tasklock", meter_provider=meter_provider)
    reader = _SharedReader(locks)
    for gauge in GAUGES:
        meter.create_observable_gauge(
            gauge.name, [partial(_observe, reader, gauge)], gauge.unit, gauge.description
        )
    meter.create_observable_gauge(
        _REPLICAS_ALIVE.name,
        [partial(_observe_replicas, reader)],
        _REPLICAS_ALIVE.unit,
        _REPLICAS_ALIVE.description,
    )
    meter.create_observable_gauge(
        _LEADER.name, [partial(_observe_leaders, reader)], _LEADER.unit, _LEADER.description
    )


def _observe(
    reader: _SharedReader, gauge: _Gauge, _options: CallbackOptions
) -> Iterable[Observation]:
    from opentelemetry.metrics import Observation

    for task, value in _values(gauge, reader.read()).items():
        yield Observation(value, {TASK_NAME: task})


def _observe_replicas(reader: _SharedReader, _options: CallbackOptions) -> Iterable[Observation]:
    from opentelemetry.metrics import Observation

    alive = reader.read().alive
    if alive is not None:
        yield Observation(alive)


def _observe_leaders(reader: _SharedReader, _options: CallbackOptions) -> Iterable[Observation]:
    from opentelemetry.metrics import Observation

    for namespace, value in reader.read().leaders.items():
        yield Observation(value, {NAMESPACE: namespace})


class _SharedReader:
    """Reads the tasks once for all gauges of a collection, although each gauge asks for them."""

    def __init__(self, locks: TaskLocks) -> None:
        self._locks = locks
        self._reading = threading.Lock()
        self._rows = _Rows()
        self._read_at: float | None = None
        self._fails = False

    def read(self) -> _Rows:
        """Return the rows; no tasks if they cannot be read."""
        with self._reading:
            if self._read_at is None or time.monotonic() > self._read_at + SHARED_FOR:
                try:
                    self._rows = _read(self._locks)
                    self._fails = False
                except TaskLockError as error:
                    self._rows = _Rows()
                    level = logging.DEBUG if self._fails else logging.WARNING
                    logger.log(level, "The metrics of the tasks cannot be read: %s", error)
                    self._fails = True
                self._read_at = time.monotonic()
            return self._rows


class MetricsServer(ThreadingHTTPServer):
    """An HTTP server that serves ``/metrics`` to Prometheus.

    Call ``serve_forever()``, in a ``with`` block that closes the server's socket. While the
    database is unavailable, the server answers 503 with one line that says why.

    :param locks: reads the rows. Its ``claim_timeout`` limits the seconds for which a read is
        tried. Choose a ``claim_timeout`` shorter than Prometheus' ``scrape_timeout``.
    :param host: address that the server listens on; by default only this machine reaches it
    :param port: port that the server listens on; 0: a free one
    :raises OSError: the server cannot listen on the address
    """

    daemon_threads = True  # so that a client that hangs does not keep the process from ending

    def __init__(self, locks: TaskLocks, host: str = "127.0.0.1", port: int = 9464) -> None:
        self.locks = locks
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _MetricsHandler)

    @property
    def url(self) -> str:
        """The URL of the metrics."""
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"http://{shown}:{port}/metrics"

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """Log an error of one client, such as a connection reset."""
        logger.debug("A client of the metrics failed", exc_info=True)


class _MetricsHandler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = CLIENT_TIMEOUT

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, "The metrics are at /metrics\n")
            return
        try:
            text = prometheus_text(self.server.locks)
        except TaskLockError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, " ".join(str(error).split()) + "\n")
        else:
            self._answer(HTTPStatus.OK, text)

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "apscheduler-tasklock"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base's name
        logger.debug(format, *args)
