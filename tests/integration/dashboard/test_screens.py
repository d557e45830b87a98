"""Pages and their JSON twins from rows as replicas write them, by way of the server.

What a page shows of which rows is a table in ``tests/unit/test_dashboard_pages.py``.
"""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest

from tests.integration.dashboard.conftest import Open
from tests.support.asgi_client import TestClient
from tests.support.pages import words
from tests.support.polling import eventually
from tests.support.rows import (
    FAILING,
    OVERDUE,
    PAUSED,
    RUNNING,
    add_action,
    add_job,
    add_miss,
    add_replica,
    add_run,
    add_task,
)

Connection = psycopg.Connection[Any]


def page(client: TestClient, path: str) -> str:
    """Return the words of a page."""
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return words(answer.text)


@pytest.fixture
def fleet(connection: Connection, make_task_locks: Any) -> None:
    """A task of each kind, with entries of the history, replicas and jobs."""
    for name, columns in (("fails", FAILING), ("late", OVERDUE), ("paused", PAUSED)):
        add_task(connection, name, **columns)
    add_task(connection, "a/b ?#", **{**RUNNING, "locked_by": "'web-1'"})
    add_replica(connection, "web-1", ["a/b ?#", "fails"])
    past = "now() - interval '3000 min'"
    add_replica(connection, "gone", started_at=past, seen_at=past)
    ended = "now() - interval '5 min'"
    for name in ("a/b ?#", "fails"):
        add_run(connection, name, 1, started_at=f"{ended} - interval '1 min'", ended_at=ended)
    failed = {"outcome": "'error'", "error": "'no price'", "traceback": "'File \"a.py\"'"}
    add_run(connection, "fails", 2, **failed)
    add_miss(connection, "fails", 1, cause="'misfire'", reason="'it came late'")
    add_action(connection, "fails", 1)
    add_job(connection, "job-1", arguments="""'{"args": ["x<y"], "kwargs": {"k": 7}}'""")
    due = "now() - interval '1 h'"
    add_job(connection, "job-2", task_name="'other'", next_run_time=due, changed_at=due)
    make_task_locks().pause_all(duration=None, namespace="paused", by="ann")


PAGES: dict[str, tuple[str, ...]] = {
    "/": (
        "tasks are overdue",
        "1 task is failing",
        "paused by ann since",
        "web-1",
        "no price",
        "it came late",
    ),
    "/tasks": ("fails failing", "a/b ?# running", "every 5 min"),
    "/tasks?state=running": ("a/b ?# running",),
    "/tasks?q=nothing": ("No task matches.",),
    "/task?name=a%2Fb%20%3F%23": ("a/b ?# running", "replicas web-1", "The last 2 runs"),
    "/task?name=fails": ("traceback File &#34;a.py&#34;", "paused by ann@ops", "it came late"),
    "/why?name=fails": ("fails", "failed"),
    "/runs?outcome=bad&kind=schedule&q=fail": ("no price", "it came late"),
    "/timeline?by=task": ("fails", "a/b ?#", "nobody ran"),
    "/replica?id=web-1": (
        "Alive since",
        "if the replica is killed now",
        "no other live replica has the task",
        "No other live replica has these 2 tasks: a/b ?# fails",
    ),
    "/replica?id=none": ("No replica of this name",),
    "/replicas": ("web-1", "alive", "a/b ?# since", "1 older replica has given no sign"),
    "/jobs": ("job-1", "args[0], k", "overdue"),
    "/job?id=job-1": ("args[0], k", "The values are for operators."),
    "/setup": ("connection to ",),
}


@pytest.mark.usefixtures("fleet")
def test_each_page_shows_what_the_database_has(reader: TestClient) -> None:
    missing = []
    for path, expected in PAGES.items():
        found = page(reader, path)
        missing += [(path, text) for text in expected if text not in found]
        name, _, query = path.removeprefix("/").partition("?")
        twin = reader.get(f"/{name or 'overview'}.json?{query}")
        assert (twin.status_code, twin.json()["outage"]) == (200, None)
    assert not missing


@pytest.mark.usefixtures("fleet")
def test_an_operator_sees_the_values_of_arguments(operator: TestClient) -> None:
    assert "args[0] &#34;x&lt;y&#34; k 7" in page(operator, "/job?id=job-1")
    found = operator.get("/job.json?id=job-1").json()
    assert found["arguments"] == {"args[0]": "x<y", "k": 7}


def test_many_runs_that_began_together_come_in_parts(
    reader: TestClient, connection: Connection
) -> None:
    for number in range(120):
        add_run(connection, f"t{number}", 1, started_at="'2026-01-01'")
    parts = [reader.get(f"/runs.json?page={part}").json() for part in (1, 2, 3)]
    names = [run["task"] for part in parts for run in part["runs"]]
    assert len(names) == len(set(names)) == 120
    assert [part["more"] for part in parts] == [True, True, False]


def test_an_unknown_task_job_or_page_is_404(reader: TestClient) -> None:
    answer = reader.get("/task?name=none")
    assert answer.status_code == 404
    assert "none" in answer.text
    for path in ("/task.json?name=none", "/job?id=none", "/job"):
        assert reader.get(path).status_code == 404
    assert "The dashboard has no such page." in reader.get("/tusk").text


def test_the_replica_that_leads_is_told(reader: TestClient, make_replica: Any) -> None:
    replica = make_replica(replica_id="web-1", leader=True)
    replica.scheduler.add_job(print, "interval", hours=1, id="a")
    eventually(lambda: replica.executor.is_leader)
    # It may lead before its row of signs of life is written.
    eventually(lambda: re.search(r"web-1 .*alive leads", page(reader, "/replicas")))


def test_a_task_of_another_namespace_is_404(open_dashboard: Open, connection: Connection) -> None:
    add_task(connection, "shop:a", **FAILING)
    add_task(connection, "other:b", **OVERDUE)
    for name in ("shop:a", "other:b"):
        add_run(connection, name, 1, outcome="'error'")
    browser = open_dashboard(namespace="shop:")
    for path in ("/", "/tasks", "/runs", "/timeline?by=task", "/tasks?q=b"):
        assert "other:b" not in browser.get(path).text
    assert "shop:a" in page(browser, "/tasks?q=a")
    assert browser.get("/task?name=other:b").status_code == 404
    assert browser.get("/why?name=other:b").status_code == 404
