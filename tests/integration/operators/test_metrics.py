"""Metrics of the tasks' rows: their values, and how they are served."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
from tests.support.outages import refuse, restore
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.rows import add_replica

MakeTaskLocks = Callable[..., TaskLocks]
KnownTask = Callable[[str], None]
Connection = psycopg.Connection[Any]

PAST = "now() - interval '5 minutes'"


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


def change(connection: Connection, task: str, columns: str) -> None:
    changed = connection.execute(f"UPDATE task_lock SET {columns} WHERE task_name = %s", [task])
    assert changed.rowcount == 1


# What a row says, and whether its task is overdue.
DUE = f"due_at = {PAST}, overdue_at = {PAST}"
ROWS = {
    "new": ("", 0),
    "overdue": (DUE, 1),
    "late": (f"due_at = {PAST}, overdue_at = now() + interval '1 minute'", 0),
    "dead": (f"{DUE}, finished_at = NULL, run_until = now() + interval '1 hour'", 1),
    "past its maximum lock": (f"{DUE}, finished_at = NULL", 1),
    "too long": (
        f"{DUE}, finished_at = NULL, overrun_at = {PAST}, locked_until = now() + interval '1 hour'",
        0,
    ),
    "dead and not due": ("finished_at = NULL, due_at = NULL, overdue_at = NULL, is_last = true", 0),
    "running": (f"{DUE}, finished_at = NULL, locked_until = now() + interval '1 hour'", 0),
    "paused": (f"{DUE}, paused_at = now()", 0),
    "over": ("due_at = NULL, overdue_at = NULL, is_last = true", 0),
}


@pytest.mark.parametrize("task", ROWS)
def test_a_task_is_overdue_if_it_is_due_and_nobody_runs_it(
    make_task_locks: MakeTaskLocks, known_task: KnownTask, connection: Connection, task: str
) -> None:
    columns, overdue = ROWS[task]
    known_task(task)
    change(connection, task, columns or "failures = 0")
    [of_the_task] = values(prometheus_text(make_task_locks())).values()
    assert of_the_task["tasklock_task_overdue"] == overdue


def test_a_task_that_no_living_replica_has_is_overdue_unless_it_was_removed(
    make_task_locks: MakeTaskLocks, known_task: KnownTask, connection: Connection
) -> None:
    known_task("gone")
    change(connection, "gone", DUE)
    connection.execute(
        "INSERT INTO task_lock_replica (replica_id, host, version, started_at, seen_at, tasks)"
        " VALUES ('alive', 'host', '1', now(), now(), '{}')"
    )
    [of_the_task] = values(prometheus_text(make_task_locks())).values()
    assert of_the_task["tasklock_task_overdue"] == 1
    change(connection, "gone", "due_at = NULL, overdue_at = NULL")
    [of_the_task] = values(prometheus_text(make_task_locks())).values()
    assert of_the_task["tasklock_task_overdue"] == 0


def test_failures_and_the_last_success_are_told_and_one_off_jobs_are_not(
    make_task_locks: MakeTaskLocks, known_task: KnownTask, connection: Connection
) -> None:
    for task in ("failing", "cut", "well", "once"):
        known_task(task)
    change(connection, "failing", "failures = 3")
    change(connection, "cut", "last_outcome = 'cut'")
    change(connection, "well", "succeeded_at = to_timestamp(1700000000.5)")
    change(connection, "once", """schedule = '{"type": "date", "run": null}'""")
    found = values(prometheus_text(make_task_locks()))
    of_each = {"overdue", "failures", "cut", "unreadable", "last_success_seconds"}
    for each in found.values():
        for name in set(each) - {f"tasklock_task_{kept}" for kept in of_each}:
            del each[name]
    assert found == {
        "failing": {
            "tasklock_task_overdue": 0,
            "tasklock_task_failures": 3,
            "tasklock_task_cut": 0,
            "tasklock_task_unreadable": 0,
        },
        "cut": {
            "tasklock_task_overdue": 0,
            "tasklock_task_failures": 0,
            "tasklock_task_cut": 1,
            "tasklock_task_unreadable": 0,
        },
        "well": {
            "tasklock_task_overdue": 0,
            "tasklock_task_failures": 0,
            "tasklock_task_cut": 0,
            "tasklock_task_unreadable": 0,
            "tasklock_task_last_success_seconds": 1700000000.5,
        },
    }


def test_durations_due_times_and_pauses_are_told(
    make_task_locks: MakeTaskLocks, known_task: KnownTask, connection: Connection
) -> None:
    for task in ("over", "running"):
        known_task(task)
    begun = "started_at = now() - interval '90 s'"
    ended = "finished_at = now() - interval '30 s'"
    change(connection, "over", f"{begun}, {ended}, due_at = to_timestamp(1700000000)")
    lives = "finished_at = NULL, locked_until = now() + interval '1 hour'"
    change(connection, "running", f"{begun}, {lives}, paused_at = now()")
    found = values(prometheus_text(make_task_locks()))
    assert found["over"]["tasklock_task_last_duration_seconds"] == 60
    assert found["over"]["tasklock_task_next_due_seconds"] == 1700000000
    assert found["over"]["tasklock_task_paused"] == 0
    assert "tasklock_task_last_duration_seconds" not in found["running"]
    assert found["running"]["tasklock_task_paused"] == 1


def test_replicas_that_are_alive_are_counted_and_left_out_if_they_cannot_be_read(
    make_task_locks: MakeTaskLocks, connection: Connection
) -> None:
    for name, seen in (("one", "now()"), ("two", "now()"), ("silent", "now() - interval '1 h'")):
        add_replica(connection, name, seen_at=seen)
    locks = make_task_locks()
    assert "\ntasklock_replica_alive 2.0\n" in prometheus_text(locks)
    assert metric_values(locks)["tasklock_replica_alive"] == 2
    connection.execute("DROP TABLE task_lock_replica")
    assert "tasklock_replica_alive" not in prometheus_text(locks)
    assert "tasklock_task_overdue" in prometheus_text(locks)


@pytest.fixture
def serve() -> Iterator[Callable[..., MetricsServer]]:
    """Start a server of metrics; it is closed after the test."""
    with ExitStack() as closing:

        def start(locks: TaskLocks, **options: Any) -> MetricsServer:
            server = closing.enter_context(MetricsServer(locks, port=0, **options))
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            closing.callback(thread.join)
            closing.callback(server.shutdown)
            return server

        yield start


def test_the_metrics_are_served_at_their_path_alone(
    make_task_locks: MakeTaskLocks, known_task: KnownTask, serve: Callable[..., MetricsServer]
) -> None:
    known_task('a "task"')
    server = serve(make_task_locks())
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
    make_task_locks: MakeTaskLocks, serve: Callable[..., MetricsServer]
) -> None:
    server = serve(make_task_locks())
    host, port = server.server_address[:2]
    with socket.create_connection((str(host), int(port))) as silent:
        with scrape(server.url) as answer:
            assert answer.status == 200
        assert silent.recv(1) == b""  # the server has closed it, by its time limit


class CountingLocks(TaskLocks):
    """Counts how often the tasks are read."""

    reads = 0

    def tasks(self, *patterns: str, **options: Any) -> list[TaskStatus]:
        self.reads += 1
        return super().tasks(*patterns, **options)


def test_gauges_read_the_rows_once_and_report_nothing_in_an_outage(
    known_task: KnownTask,
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
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
    eventually(lambda: names() == set() and locks.reads == 2)
    told = [r for r in caplog.records if r.name == "apscheduler_tasklock.metrics"]
    assert [record.levelno for record in told] == [logging.WARNING]
    provider.shutdown()
    locks.close()

    restore(proxy)
    locks = CountingLocks(proxy.url)  # which waits for an answer, however slow the machine is
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    observe_tasks(locks, provider)
    assert names() == {
        "tasklock.task.overdue",
        "tasklock.task.failures",
        "tasklock.task.cut",
        "tasklock.task.unreadable",
        "tasklock.task.last_duration",
        "tasklock.task.paused",
        "tasklock.replica.alive",
    }
    provider.shutdown()
    assert locks.reads == 1
    locks.close()
