"""What a request may see and change of the rows of a database.

What it may see and change at all is tested in ``tests/unit/test_dashboard_security.py``.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from apscheduler_tasklock.dashboard import Access
from tests.integration.dashboard.conftest import Open
from tests.support import hostile, rows
from tests.support.asgi_client import TestClient
from tests.support.commands import PatientTaskLocks
from tests.support.markup import check_markup

SAME = {"sec-fetch-site": "same-origin"}
PAUSE = {"action": "pause", "name": "price sync", "duration": "3600", "reason": "closed"}

PAGES = ("/", "/tasks", "/runs", "/timeline", "/timeline?by=task", "/replicas", "/jobs", "/setup")
TWINS = tuple(f"/{page}.json" for page in ("overview", "tasks", "runs", "timeline", "jobs"))


def is_paused(connection: psycopg.Connection[Any], task: str = "price sync") -> bool:
    found = connection.execute(
        "SELECT paused_at IS NOT NULL AS paused FROM task_lock WHERE task_name = %s", [task]
    ).fetchone()
    assert found is not None
    return bool(found[0])


@pytest.fixture(autouse=True)
def task(connection: psycopg.Connection[Any]) -> str:
    rows.add_task(connection, "price sync", **rows.FAILING)
    rows.add_replica(connection, "replica", ["price sync"])
    rows.add_job(connection, "a job")
    return "price sync"


def test_operators_act_and_are_named(
    operator: TestClient, database_url: str, connection: psycopg.Connection[Any]
) -> None:
    assert "confirm?" in operator.get("/task?name=price+sync").text
    asked = operator.get("/confirm", params={"action": "pause", "name": "price sync"})
    assert asked.status_code == 200
    check_markup(asked.text)
    done = operator.post("/act", data=PAUSE, headers=SAME)
    assert done.status_code == 303
    assert done.headers["location"] == "task?done=pause&counts=paused%2A1&name=price+sync"
    with PatientTaskLocks(database_url) as locks:
        [pause] = locks.tasks("price sync")[0].pauses
    assert (pause.by, pause.reason) == ("ann", "closed")
    assert "ann" in operator.get("/task?name=price+sync&done=pause").text


def test_a_resumed_task_that_stays_paused_is_not_told_as_resumed(
    operator: TestClient, database_url: str
) -> None:
    with PatientTaskLocks(database_url) as locks:
        locks.pause("price sync", by="bob")
    form = {"action": "resume", "name": "price sync"}
    done = operator.post("/act", data=form, headers=SAME)
    text = operator.get(f"/{done.headers['location']}").text
    assert "You have no pause of it now" in text
    assert "bob" in text


def test_what_was_done_shows_also_if_another_process_answers_next(open_dashboard: Open) -> None:
    one, other = (
        open_dashboard(authorize=lambda _request: Access("operate", "ann")) for _ in range(2)
    )
    assert "closed" not in other.get("/task?name=price+sync").text
    done = one.post("/act", data=PAUSE, headers=SAME)
    assert "closed" in other.get(f"/{done.headers['location']}").text


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"action": "pause", "name": "nothing"}, 404),
        ({"action": "free", "name": "price sync", "token": "x"}, 400),
        ({"action": "free", "name": "price sync", "token": "99"}, 409),
        ({"action": "ack", "name": "price sync", "token": "99"}, 409),
        ({"action": "ack", "name": "price sync", "token": "9" * 40}, 400),
        ({"action": "job-remove", "name": "nothing"}, 404),
    ],
    ids=str,
)
def test_forms_that_the_rows_do_not_allow_change_nothing(
    form: dict[str, Any], status: int, operator: TestClient, connection: psycopg.Connection[Any]
) -> None:
    before = connection.execute("SELECT task_lock FROM task_lock").fetchall()
    answer = operator.post("/act", data=form, headers=SAME)
    assert answer.status_code == status, answer.text
    check_markup(answer.text)
    assert connection.execute("SELECT task_lock FROM task_lock").fetchall() == before


def test_tasks_of_another_namespace_are_neither_shown_nor_changed(
    open_dashboard: Open, connection: psycopg.Connection[Any]
) -> None:
    rows.add_task(connection, "shop:mail", **rows.FAILING)
    rows.add_run(connection, "price sync", 1, outcome="'error'")
    browser = open_dashboard(namespace="shop:", authorize=lambda _request: Access("operate"))
    for path in ("/", "/tasks", "/runs", "/timeline", "/tasks?q=*price*", "/runs?q=price"):
        answer = browser.get(path)
        assert answer.status_code == 200
        assert "price sync<" not in answer.text, path
    for path in ("/task?name=price+sync", "/why?name=price+sync", "/task.json?name=price+sync"):
        assert browser.get(path).status_code == 404
    for action in ("pause", "run", "free", "ack"):
        asked = {"action": action, "name": "price sync", "token": "7"}
        assert browser.get("/confirm", params=asked).status_code == 404
        assert browser.post("/act", data=asked, headers=SAME).status_code == 404
    assert browser.post("/act", data={"action": "pause-all"}, headers=SAME).status_code == 303
    assert not is_paused(connection)
    assert "shop:mail" in browser.get("/tasks").text


def test_hostile_rows_are_shown(operator: TestClient, connection: psycopg.Connection[Any]) -> None:
    """Of each table one that is unreadable, if it has such rows, and one that is odd.

    What all of them become on pages is tested in ``configuration/test_hostile_rows.py``.
    """
    chosen = {(case.table, case.unreadable): case for case in hostile.CASES if case.named is None}
    hostile.insert_good(connection)
    names = {case: case.insert(connection) for case in chosen.values()}
    for path in (*PAGES, *TWINS, "/replicas.json", "/tasks?order=due", "/jobs?page=2"):
        answer = operator.get(path)
        assert answer.status_code == 200, (path, answer.text[:500])
        if ".json" not in path:
            check_markup(answer.text)
    for case, name in names.items():
        for page in ("/task", "/task.json", "/why") if case.table == hostile.TASKS else ():
            answer = operator.get(page, params={"name": name})
            assert answer.status_code == 200, (page, case, answer.text[:500])
