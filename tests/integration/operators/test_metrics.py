"""Metrics of the tasks' rows: their values, and how they are served."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import psycopg
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

from apscheduler_tasklock import TaskLocks, TaskStatus
from apscheduler_tasklock.metrics import (
    MetricsServer,
    metric_values,
    observe_tasks,
    prometheus_text,
)
from tests.support.commands import PatientTaskLocks
from tests.support.outages import refuse, restore
from tests.support.pages import Known
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.rows import OVERDUE, STAYS_ALIVE, add_replica, add_task, task_status

MakeTaskLocks = Callable[..., TaskLocks]
KnownTask = Callable[[str], None]
Connection = psycopg.Connection[Any]


def values(text: str) -> dict[str, dict[str, float]]:
    """Return the values of each task, by metric."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if task := sample.labels.get("tasklock_task_name"):
                found.setdefault(task, {})[sample.name] = sample.value
    return found


def scrape(url: str) -> Any:
    return urlopen(url)  # noqa: S310  # the test's own server


def is_served(url: str) -> bool:
    """Return whether the metrics are served, and not the text of an outage."""
    try:
        with scrape(url) as answer:
            return bool(answer.status == 200)
    except HTTPError as error:
        error.close()
        if error.status != 503:
            raise
        return False


def test_the_metrics_of_rows_are_read_and_one_off_jobs_and_missing_replicas_left_out(
    make_task_locks: MakeTaskLocks, connection: Connection
) -> None:
    add_task(connection, "overdue", **OVERDUE, failures="2")
    once = """'{"type": "date", "run": null}'"""
    add_task(connection, "once", schedule=once)
    for name, seen in (("one", STAYS_ALIVE["seen_at"]), ("silent", "now() - interval '1 h'")):
        add_replica(connection, name, ["overdue"], seen_at=seen)
    locks = make_task_locks()
    [(name, of_the_task)] = values(prometheus_text(locks)).items()
    assert name == "overdue"
    assert of_the_task["tasklock_task_overdue"] == 1
    assert of_the_task["tasklock_task_failures"] == 2
    assert "\ntasklock_replica_alive 1.0\n" in prometheus_text(locks)
    assert metric_values(locks)["tasklock_replica_alive"] == 1
    assert metric_values(locks)["tasklock_task_overdue"] == {"overdue": 1.0}
    connection.execute("DROP TABLE task_lock_replica")
    assert "tasklock_replica_alive" not in prometheus_text(locks)
    assert "tasklock_replica_alive" not in metric_values(locks)
    assert values(prometheus_text(locks)).keys() == {"overdue"}


@pytest.fixture
def serve() -> Iterator[Callable[..., MetricsServer]]:
    """Start a server of metrics; it is closed after the test."""
    with ExitStack() as closing:

        def start(locks: Any, **options: Any) -> MetricsServer:
            server = closing.enter_context(MetricsServer(locks, port=0, **options))
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            closing.callback(thread.join)
            closing.callback(server.shutdown)
            return server

        yield start


def test_the_metrics_are_served_at_their_path_alone(serve: Callable[..., MetricsServer]) -> None:
    server = serve(Known([task_status('a "task"')]))
    assert server.server_address[0] == "127.0.0.1"
    with scrape(server.url) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert 'a "task"' in values(answer.read().decode())
    with pytest.raises(HTTPError) as raised:
        scrape(server.url.replace("/metrics", "/"))
    with raised.value as answer:
        assert answer.status == 404


def test_an_outage_is_one_line_without_the_password_and_the_next_scrape_finds_it_over(
    make_task_locks: MakeTaskLocks, proxy: Proxy, serve: Callable[..., MetricsServer]
) -> None:
    server = serve(make_task_locks(proxy.url, claim_timeout=0.5))
    refuse(proxy)
    with pytest.raises(HTTPError) as raised:
        scrape(server.url)
    with raised.value as answer:
        assert answer.status == 503
        [line] = answer.read().decode().splitlines()
    assert "connection" in line
    assert "@" not in line
    restore(proxy)
    eventually(lambda: is_served(server.url))  # a slow machine does not answer each scrape in time


@pytest.mark.nightly
def test_a_client_that_sends_nothing_keeps_nobody_waiting(
    serve: Callable[..., MetricsServer],
) -> None:
    server = serve(Known())
    host, port = server.server_address[:2]
    with socket.create_connection((str(host), int(port))) as silent:
        with scrape(server.url) as answer:
            assert answer.status == 200
        assert silent.recv(1) == b""  # the server has closed it, by its time limit


class CountingLocks(PatientTaskLocks):
    """Counts how often the tasks are read."""

    reads = 0

    def tasks(self, *patterns: str, **options: Any) -> list[TaskStatus]:
        self.reads += 1
        return super().tasks(*patterns, **options)


def test_gauges_read_the_rows_once_and_report_nothing_in_an_outage(
    known_task: KnownTask,
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0  # the gauges share a read for a second, which a slow machine may take
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("apscheduler_tasklock.metrics.time", clock)
    known_task("task")
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    locks = CountingLocks(proxy.url, claim_timeout=0.5)
    observe_tasks(locks, provider)

    def names() -> set[str]:
        data = reader.get_metrics_data()
        return {
            metric.name
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.data.data_points
        }

    refuse(proxy)
    assert names() == set()
    assert locks.reads == 1
    now += 2
    assert names() == set()
    assert locks.reads == 2
    told = [r for r in caplog.records if r.name == "apscheduler_tasklock.metrics"]
    assert [record.levelno for record in told] == [logging.WARNING]
    provider.shutdown()
    locks.close()

    restore(proxy)
    locks = CountingLocks(proxy.url)
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    observe_tasks(locks, provider)
    assert names() == {
        "tasklock.task.overdue",
        "tasklock.task.failures",
        "tasklock.task.last_duration",
        "tasklock.task.paused",
        "tasklock.replica.alive",
    }
    provider.shutdown()
    assert locks.reads == 1
    locks.close()
