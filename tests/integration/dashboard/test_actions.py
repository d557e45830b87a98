"""What a page says of an action that is not carried out, and of a state that needs one."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import TaskLockError, TaskLocks
from tests.support import rows
from tests.support.asgi_client import TestClient

SAME = {"sec-fetch-site": "same-origin"}


@pytest.fixture(autouse=True)
def tasks(connection: psycopg.Connection[Any]) -> None:
    rows.add_task(connection, "alive", **rows.RUNNING)
    rows.add_task(connection, "manual", kind="'manual'", **rows.DEAD)
    rows.add_task(connection, "dead", **rows.DEAD)
    missed = {"one_off": "true", "missed_at": "now() - interval '30 s'", "due_at": "NULL"}
    past = {"window_until": "now() - interval '40 s'", "overdue_at": "NULL"}
    rows.add_task(connection, "missed", **missed, **past)
    rows.add_job(connection, "recurring", task_name="'unknown'")
    over = rows.TRIGGER.replace('"end_date": null', '"end_date": "2026-01-02T00:00:00+00:00"')
    rows.add_job(connection, "over", trigger=f"'{over}'::jsonb", next_run_time="NULL")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"action": "free", "name": "alive", "token": "7"}, 'tick the box "also if the holder may'),
        (
            {"action": "free", "name": "manual", "token": "7", "run_again": "on"},
            "free the task without opening the window, and then run it now",
        ),
        ({"action": "run", "name": "dead"}, "the page Replicas has those that are alive"),
        ({"action": "run", "name": "gone"}, "no such task: 'gone'"),
        ({"action": "job-run", "name": "recurring"}, "move the job to make it due"),
        (
            {"action": "job-resume", "name": "over"},
            "move the job to give it a run time, or remove it",
        ),
        ({"action": "job-run", "name": "gone"}, "no such job: 'gone'"),
    ],
)
def test_an_error_names_boxes_and_no_commands(
    operator: TestClient, form: Mapping[str, str], says: str
) -> None:
    answer = operator.post("/act", data=form, headers=SAME)
    assert answer.status_code in (404, 409)
    text = html.unescape(answer.text.partition('id="error"')[2].partition("</p>")[0])
    assert says in text
    assert "--" not in text
    assert "apscheduler-tasklock" not in text
    assert "=True" not in text


def test_the_box_that_an_error_names_is_on_the_page(operator: TestClient) -> None:
    asked = operator.get("/confirm", params={"action": "free", "name": "alive", "token": "7"})
    assert "also if the holder may be alive" in asked.text


def test_outside_a_page_an_error_names_commands(database_url: str) -> None:
    with TaskLocks(database_url) as locks, pytest.raises(TaskLockError) as raised:
        locks.free("alive", 7)
    assert str(raised.value).endswith("; if its run hangs, use --force (`force=True`)")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dead", "if no replica takes the run over, free it</dd>"),
        ("missed", "to acknowledge it ends the alarm</dd>"),
    ],
)
def test_a_state_names_no_commands(operator: TestClient, name: str, says: str) -> None:
    assert says in operator.get(f"/task?name={name}").text


def test_all_that_match_are_paused_and_no_others(
    operator: TestClient, connection: psycopg.Connection[Any]
) -> None:
    """Also one whose name would be a pattern that matches another."""
    rows.add_task(connection, "dea*", **rows.DEAD)
    asked = {"action": "pause", "all": "matching", "q": "dea", "state": "dead"}
    page = operator.get("/confirm", params=asked).text
    shown = dict(re.findall(r'name="(number|digest)" value="([^"]*)"', page))
    answer = operator.post("/act", data=asked | shown | {"duration": ""}, headers=SAME)
    assert answer.status_code == 303
    paused = connection.execute("SELECT task_name FROM task_lock WHERE pauses IS NOT NULL")
    assert sorted(name for (name,) in paused) == ["dea*", "dead"]
