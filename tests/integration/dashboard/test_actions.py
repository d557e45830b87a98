"""What a page says of an action that is not carried out, and of a state that needs one."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import TaskLockError, TaskLockStateError
from tests.support import rows
from tests.support.asgi_client import TestClient
from tests.support.commands import PatientTaskLocks

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
        ({"action": "job-run", "name": "recurring"}, "no live replica has it, or can import"),
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
    with PatientTaskLocks(database_url) as locks, pytest.raises(TaskLockError) as raised:
        locks.free("alive", 7)
    assert str(raised.value).endswith("; if its run hangs, use --force (`force=True`)")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dead", "if it cannot wait for its next run time: run it now."),
        ("missed", "add the job again, or acknowledge it."),
    ],
)
def test_a_state_names_no_commands(operator: TestClient, name: str, says: str) -> None:
    text = operator.get(f"/task?name={name}").text
    assert says in text
    assert "apscheduler-tasklock free" not in text
    assert "apscheduler-tasklock ack" not in text


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


ONE_OFF = (
    """'{"type": "date", "run_date": "2026-01-01T00:00:00+00:00", "timezone": "UTC"}'::jsonb"""
)
OVERDUE = {"next_run_time": "now() - interval '1 h'", "changed_at": "now() - interval '1 h'"}


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"trigger": ONE_OFF, **OVERDUE}, "it is due, and no live replica takes it"),
        ({"task_name": "'dead'"}, "no live replica has it, or can import its function"),
        ({"task_name": "NULL"}, "no replica has registered its task"),
    ],
    ids=["an overdue one-off job", "of no live replica", "of no replica"],
)
def test_a_job_that_nobody_can_run_is_not_offered_to_be_run_and_not_changed(
    operator: TestClient,
    connection: psycopg.Connection[Any],
    database_url: str,
    job: dict[str, str],
    why: str,
) -> None:
    """To make it due once more would set its alarm back."""
    rows.add_job(connection, "job", **job)
    version = "SELECT xmin::text FROM task_lock_job WHERE id = 'job'"
    before = connection.execute(version).fetchall()
    page = operator.get("/job", params={"id": "job"}).text
    assert f"It cannot be run now: {why}" in html.unescape(page)
    assert "action=job-run" not in page
    with PatientTaskLocks(database_url) as locks, pytest.raises(TaskLockStateError, match=why):
        locks.run_job("job")
    assert connection.execute(version).fetchall() == before


def test_a_job_of_a_live_replica_is_offered_to_be_run(
    operator: TestClient, connection: psycopg.Connection[Any]
) -> None:
    rows.add_replica(connection, "one", ["dead"])
    rows.add_job(connection, "job", task_name="'dead'")
    assert "action=job-run" in operator.get("/job", params={"id": "job"}).text


STOPS = {
    "stopped_at": "now()",
    "running": """'[{"task": "a", "token": 1, "since": 0, "lost": false}]'""",
}


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ([("one", ["dead"], {})], None),
        ([("one", [], {})], "no live replica has it."),
        ([], "no live replica has it."),
        ([("one", ["dead"], STOPS)], "each live replica that has it is stopping."),
        ([("one", ["dead"], STOPS), ("two", ["dead"], {})], None),
    ],
)
def test_a_task_is_offered_to_be_run_if_a_live_replica_has_it(
    operator: TestClient,
    connection: psycopg.Connection[Any],
    known: list[tuple[str, list[str], dict[str, str]]],
    why: str | None,
) -> None:
    for name, listed, columns in known:
        rows.add_replica(connection, name, listed, **columns)
    page = operator.get("/task", params={"name": "dead"}).text
    assert ("action=run&amp;" in page) is (why is None)
    assert (f"It cannot be run now: {why}" in page) is (why is not None)


def test_the_task_of_a_job_that_was_removed_is_not_run_until_a_replica_has_it_again(
    operator: TestClient, connection: psycopg.Connection[Any], database_url: str
) -> None:
    """The row of a replica has the removed job's task until the replica lists the jobs again."""
    rows.add_replica(connection, "one", ["dead"])
    rows.add_job(connection, "job", task_name="'dead'")
    with PatientTaskLocks(database_url) as locks:
        locks.remove_job("job", by="ann")
        page = operator.get("/task", params={"name": "dead"}).text
        assert "It cannot be run now: no live replica has it." in page
        with pytest.raises(TaskLockStateError, match="no live replica has it"):
            locks.request_run("dead")
        connection.execute("UPDATE task_lock_replica SET seen_at = clock_timestamp()")
        assert locks.request_run("dead").is_new


@pytest.mark.parametrize(
    ("row", "form", "says"),
    [
        ({}, {"action": "pause", "duration": ""}, "Paused."),
        (rows.paused("'ann'"), {"action": "resume"}, "Resumed."),
        (rows.paused("'bob'"), {"action": "resume"}, "You have no pause of it now."),
        (rows.paused("'bob'"), {"action": "resume", "force": "on"}, "Resumed."),
        ({}, {"action": "resume"}, "It was not paused."),
        ({}, {"action": "run"}, "The run is asked for."),
        (
            {
                "request_id": "gen_random_uuid()",
                "requested_by": "'bob'",
                "requested_at": "now()",
                "request_until": "now() + interval '1 h'",
            },
            {"action": "run"},
            "A run was asked for before",
        ),
        (rows.DEAD, {"action": "free", "token": "7"}, "The run's window stays"),
        (
            rows.DEAD,
            {"action": "free", "token": "7", "run_again": "on"},
            "The run's window is open again.",
        ),
        (rows.FAILING, {"action": "ack", "token": "7"}, "Acknowledged."),
        (
            {**rows.FAILING, "acknowledged_at": "now() + interval '1 h'"},
            {"action": "ack", "token": "7"},
            "It was acknowledged before.",
        ),
    ],
)
def test_the_page_after_an_action_says_what_it_has_done(
    operator: TestClient,
    connection: psycopg.Connection[Any],
    row: Mapping[str, str],
    form: Mapping[str, str],
    says: str,
) -> None:
    rows.add_task(connection, "task", **row)
    rows.add_replica(connection, "one", ["task"])
    answer = operator.post("/act", data={"name": "task", **form}, headers=SAME)
    assert answer.status_code == 303, answer.text
    assert says in html.unescape(notice(operator.get(f"/{answer.headers['location']}").text))


def notice(page: str) -> str:
    """Return what a page says of the action before it."""
    return "".join(re.findall(r'<p class="notice \w+" role="status">(.*)</p>', page))


def test_what_an_address_says_of_an_action_is_no_text_of_the_addresss_own(
    operator: TestClient,
) -> None:
    """Else a link could make a page say anything."""
    for counts in ("<b>hello*1", "hello", "paused*x", "paused*1,hello*1"):
        page = operator.get("/tasks", params={"done": "pause", "counts": counts}).text
        assert "hello" not in notice(page)
    assert notice(page) == "Paused."
