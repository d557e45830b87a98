"""Metrics of the tasks, as OpenTelemetry's gauges and as text for Prometheus.

The metrics are read from the tasks' rows, so that they are right even while every replica is down.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock._words.gauges import (
    FINDING,
    GAUGES,
    LEADER,
    NAMESPACE,
    REPLICAS_ALIVE,
    TASK_NAME,
    Gauge,
    MetricRows,
    finding_values,
    rows_of,
    task_values,
    text_of,
    values_of,
)
from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError, TaskLockSchemaError
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import ReplicaStatus

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

logger = logger_of(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds for which all gauges of a collection use the same rows.
SHARED_FOR = 1.0
# Limits the seconds until a client has sent its request, and until it has read the answer.
CLIENT_TIMEOUT = 5.0


def _read(locks: TaskLocks, namespace: str = "") -> MetricRows:
    """Read the rows of the tasks whose names begin with a namespace."""
    patterns = (f"{namespace}*",) if namespace else ()
    tasks = locks.tasks(*patterns, one_offs=False)
    findings = locks.overview(*patterns, limit=0, namespace=namespace).findings
    replicas: Sequence[ReplicaStatus] | None
    try:
        replicas = locks.replicas()
    except TaskLockSchemaError:  # so that the tasks' metrics do not depend on another table's right
        replicas = None
    return rows_of(tasks, findings, replicas)


def prometheus_text(locks: TaskLocks, namespace: str = "") -> str:
    """Return the metrics of the tasks in Prometheus' text format, version 0.0.4.

    :param namespace: what the names of the tasks begin with
    :raises TaskLockError: the database is unavailable, or rejects the read
    """
    return text_of(_read(locks, namespace))


def metric_values(locks: TaskLocks) -> dict[str, Any]:
    """Return the metrics' values: by the metric's name in Prometheus, then by the task's name.

    Findings are a list, each with its attributes and how many there are of them. The number of
    replicas that are alive is by the metric's name alone. Whether a replica leads is
    by the namespace, if there are replicas in leader mode.

    :raises TaskLockError: the database is unavailable, or rejects the read
    """
    return values_of(_read(locks))


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
            "observe_tasks() needs OpenTelemetry: pip install opentelemetry-api"
        ) from None
    meter = get_meter("apscheduler_tasklock", meter_provider=meter_provider)
    reader = _SharedReader(locks)
    for gauge in GAUGES:
        meter.create_observable_gauge(
            gauge.name, [partial(_observe, reader, gauge)], gauge.unit, gauge.description
        )
    meter.create_observable_gauge(
        FINDING.name, [partial(_observe_findings, reader)], FINDING.unit, FINDING.description
    )
    meter.create_observable_gauge(
        REPLICAS_ALIVE.name,
        [partial(_observe_replicas, reader)],
        REPLICAS_ALIVE.unit,
        REPLICAS_ALIVE.description,
    )
    meter.create_observable_gauge(
        LEADER.name, [partial(_observe_leaders, reader)], LEADER.unit, LEADER.description
    )


def _observe(
    reader: _SharedReader, gauge: Gauge, _options: CallbackOptions
) -> Iterable[Observation]:
    from opentelemetry.metrics import Observation

    for task, value in task_values(gauge, reader.read()).items():
        yield Observation(value, {TASK_NAME: task})


def _observe_findings(reader: _SharedReader, _options: CallbackOptions) -> Iterable[Observation]:
    from opentelemetry.metrics import Observation

    for attributes, value in finding_values(reader.read()):
        yield Observation(value, attributes)


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
        self._rows = MetricRows()
        self._read_at: float | None = None
        self._fails = False

    def read(self) -> MetricRows:
        """Return the rows; no tasks if they cannot be read."""
        with self._reading:
            if self._read_at is None or time.monotonic() > self._read_at + SHARED_FOR:
                try:
                    self._rows = _read(self._locks)
                    self._fails = False
                except TaskLockError as error:
                    self._rows = MetricRows()
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
