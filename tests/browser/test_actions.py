"""Each action, as an operator clicks it, on replicas that run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from playwright.sync_api import Page, expect

from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock.status import JobState, Run, TaskState, TaskStatus
from tests.browser.conftest import Fleet
from tests.support.chromium import Complaints
from tests.support.dashboards import DashboardProcess
from tests.support.polling import eventually
from tests.support.rows import DEAD, FAILING, add_replica, add_task

pytestmark = pytest.mark.nightly  # because of the browser

Connection = psycopg.Connection[Any]
Start = Callable[..., DashboardProcess]
NewPage = Callable[..., Page]

HOURLY = {"trigger": "interval", "hours": 1}
ANN = "ann"
PASSWORD = "correct horse"


@pytest.fixture
def page(start_dashboard: Start, new_page: NewPage) -> Page:
    """A browser of the operator Ann, who has logged in, on the overview."""
    dashboard = start_dashboard("--operate", TASKLOCK_DASHBOARD_PASSWORD=PASSWORD)
    login = {"username": ANN, "password": PASSWORD}
    page = new_page(dashboard.url, http_credentials=login)
    page.goto("./")
    return page


def task_of(locks: TaskLocks, name: str) -> TaskStatus:
    [found] = [task for task in locks.tasks(name) if task.name == name]
    return found


def done_to(locks: TaskLocks, name: str) -> list[Run]:
    """Return what operators did with a task, the newest first."""
    return [run for run in locks.runs(name) if run.kind == "operator"]


def press(page: Page, name: str) -> None:
    page.get_by_role("main").get_by_role("button", name=name, exact=True).click()


def follow(page: Page, name: str) -> None:
    page.get_by_role("main").get_by_role("link", name=name, exact=True).click()


def open_task(page: Page, name: str) -> None:
    page.goto(f"task?name={quote(name)}")


def expect_entry(page: Page, name: str, *words: str) -> None:
    """Expect that the task's page has what was done, and who did it."""
    open_task(page, name)
    section = page.get_by_role("heading", name="What operators did").locator("..")
    for each in words:
        expect(section).to_contain_text(each)


def test_one_task_is_paused_for_a_time_with_a_reason_and_resumed(
    page: Page, locks: TaskLocks, connection: Connection
) -> None:
    add_task(connection, "sync")
    add_task(connection, "other")
    open_task(page, "sync")
    follow(page, "Pause")
    page.get_by_label("For how long").select_option("4 hours")
    page.get_by_label("Why").fill("the shop is <closed>")
    press(page, "Pause")
    expect(page.get_by_role("status")).to_contain_text("Paused")
    [pause] = task_of(locks, "sync").pauses
    assert (pause.by, pause.reason) == (ANN, "the shop is <closed>")
    assert pause.until is not None
    assert pause.until - pause.since == timedelta(hours=4)
    assert not task_of(locks, "other").paused
    expect_entry(page, "sync", "paused", ANN, "the shop is <closed>")
    follow(page, "Resume")
    press(page, "Resume")
    expect(page.get_by_role("status")).to_contain_text("Resumed")
    assert not task_of(locks, "sync").paused
    assert [run.outcome for run in done_to(locks, "sync")] == ["resumed", "paused"]
    expect_entry(page, "sync", "resumed", ANN)


def test_some_tasks_that_are_chosen_are_paused_and_resumed(
    page: Page, locks: TaskLocks, connection: Connection
) -> None:
    for name in ("one", "two", "a*", "all-others"):
        add_task(connection, name)
    for action in ("Pause", "Resume"):
        page.goto("tasks")
        for name in ("one", "a*"):
            page.get_by_role("checkbox", name=f"choose {name}").check()
        press(page, action)
        press(page, action)
        expect(page.get_by_role("status")).to_be_visible()
        paused = {task.name for task in locks.tasks() if task.paused}
        assert paused == ({"one", "a*"} if action == "Pause" else set())


def test_the_pause_of_somebody_else_ends_only_if_the_operator_says_so(
    page: Page, locks: TaskLocks, connection: Connection
) -> None:
    add_task(connection, "sync")
    locks.pause("sync", by="bob")
    open_task(page, "sync")
    follow(page, "Resume")
    press(page, "Resume")
    expect(page.get_by_role("heading", level=1)).to_contain_text("sync")
    assert task_of(locks, "sync").paused
    open_task(page, "sync")
    follow(page, "Resume")
    page.get_by_label("end also the pauses of others").check()
    press(page, "Resume")
    expect(page.get_by_role("status")).to_be_visible()
    assert not task_of(locks, "sync").paused


def test_all_tasks_are_paused_which_replicas_obey_and_resumed(
    page: Page, locks: TaskLocks, fleet: Fleet
) -> None:
    fleet.start(jobs=[{"trigger": "interval", "seconds": 1, "id": "tick"}])
    eventually(lambda: locks.runs("*tick"))
    page.goto("tasks")
    follow(page, "Pause all")
    page.get_by_label("Why").fill("a deploy")
    press(page, "Pause all tasks")
    expect(page.get_by_role("status")).to_contain_text("All tasks are paused")
    [pause] = locks.pauses_of_all()
    assert (pause.by, pause.reason) == (ANN, "a deploy")
    page.goto("./")
    expect(page.get_by_role("region", name="State")).to_contain_text("a deploy")
    page.goto("tasks")
    follow(page, "Resume all")
    press(page, "Resume all tasks")
    expect(page.get_by_role("status")).to_be_visible()
    assert locks.pauses_of_all() == []
    resumed = next(run for run in locks.runs() if run.outcome == "resumed")
    assert resumed.by == ANN
    eventually(
        lambda: any(
            run.kind == "schedule" and run.started_at > resumed.started_at
            for run in locks.runs("*tick")
        )
    )


def test_a_run_that_is_asked_for_is_begun_by_a_replica(
    page: Page, locks: TaskLocks, fleet: Fleet
) -> None:
    fleet.start(jobs=[{**HOURLY, "id": "sync"}])
    eventually(lambda: locks.tasks("*sync"))
    [task] = locks.tasks("*sync")
    open_task(page, task.name)
    follow(page, "Run now")
    press(page, "Run now")
    expect(page.get_by_role("status")).to_contain_text("The run is asked for")
    run = eventually(lambda: next((r for r in locks.runs(task.name) if r.kind == "manual"), None))
    assert run.outcome == "ok"
    expect_entry(page, task.name, ANN)
    runs = page.get_by_role("heading", name="Runs", exact=True).locator("..")
    expect(runs).to_contain_text("manual")
    assert [entry.by for entry in done_to(locks, task.name)] == [ANN]


def test_a_dead_run_is_freed_by_its_token(
    page: Page, locks: TaskLocks, connection: Connection
) -> None:
    add_task(connection, "sync", **DEAD)
    open_task(page, "sync")
    follow(page, "Free")
    press(page, "Free")
    expect(page.get_by_role("status")).to_contain_text("Freed")
    assert task_of(locks, "sync").finished_at is not None
    expect_entry(page, "sync", "freed", ANN)


def test_a_failure_is_acknowledged_until_the_next_one(
    page: Page, locks: TaskLocks, connection: Connection
) -> None:
    add_task(connection, "sync", **FAILING)
    open_task(page, "sync")
    follow(page, "Acknowledge")
    press(page, "Acknowledge")
    expect(page.get_by_role("status")).to_contain_text("Acknowledged")
    assert task_of(locks, "sync").acknowledged
    expect_entry(page, "sync", "acknowledged", ANN)
    expect(page.get_by_role("link", name="Acknowledge")).to_have_count(0)


@pytest.mark.parametrize(
    ("action", "row", "change"),
    [
        ("Free", DEAD, "token = token + 1"),
        ("Acknowledge", FAILING, "token = token + 1, failed_at = now()"),
        ("Pause", {}, ""),
    ],
)
def test_what_has_changed_meanwhile_is_told_and_nothing_is_done(
    page: Page,
    locks: TaskLocks,
    connection: Connection,
    action: str,
    row: dict[str, str],
    change: str,
    complaints: Complaints,
) -> None:
    """The task has run again, or is forgotten, while the operator was asked to confirm."""
    add_task(connection, "sync", **row)
    open_task(page, "sync")
    follow(page, action)
    query = f"UPDATE task_lock SET {change}" if change else "DELETE FROM task_lock"
    connection.execute(query)
    before = connection.execute("SELECT * FROM task_lock").fetchall()
    with page.expect_response(re.compile("/act$")) as answered:
        press(page, action)
    status = 409 if change else 404
    assert answered.value.status == status
    complaints.expected(page, str(status))
    expect(page.get_by_role("main")).to_contain_text("sync")
    assert connection.execute("SELECT * FROM task_lock").fetchall() == before
    assert done_to(locks, "sync") == []


def test_the_name_of_a_forgotten_task_is_not_taken_for_a_pattern(
    page: Page, locks: TaskLocks, connection: Connection, complaints: Complaints
) -> None:
    add_task(connection, "a*")
    add_task(connection, "all-others")
    open_task(page, "a*")
    follow(page, "Pause")
    locks.forget("a*")
    press(page, "Pause")
    complaints.expected(page, "404")
    expect(page.get_by_role("main")).to_contain_text("a*")
    assert not task_of(locks, "all-others").paused


def jobs_of(locks: TaskLocks) -> dict[str, Any]:
    return {job.id: job for job in locks.jobs()}


def act_on_job(page: Page, action: str, button: str, **fields: str) -> None:
    page.goto("jobs")
    page.get_by_role("link", name=f"{action}: newsletter", exact=True).click()
    for label, value in fields.items():
        page.get_by_label(label, exact=True).fill(value)
    press(page, button)
    expect(page.get_by_role("status")).to_be_visible()


def test_stored_jobs_are_paused_resumed_run_moved_and_removed(
    page: Page, locks: TaskLocks, fleet: Fleet
) -> None:
    fleet.start(stored=[{**HOURLY, "id": "newsletter"}, {**HOURLY, "id": "other"}])
    eventually(lambda: len(locks.jobs()) == 2)
    act_on_job(page, "Pause", "Pause job")
    assert jobs_of(locks)["newsletter"].state is JobState.PAUSED
    act_on_job(page, "Resume", "Resume job")
    assert jobs_of(locks)["newsletter"].state is not JobState.PAUSED
    moved_to = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(days=3)
    act_on_job(page, "Move", "Move job", To=f"{moved_to:%Y-%m-%dT%H:%M:%S}")
    assert jobs_of(locks)["newsletter"].next_run_time == moved_to
    act_on_job(page, "Run now", "Run job now")
    run = eventually(
        lambda: next((r for r in locks.runs() if r.kind != "operator" and "newsl" in r.task), None)
    )
    assert run.outcome == "ok"
    act_on_job(page, "Remove", "Remove job")
    assert set(jobs_of(locks)) == {"other"}
    done = {run.outcome: run.by for run in locks.runs() if run.kind == "operator"}
    assert {"job-paused", "job-resumed", "job-moved", "job-removed"} <= set(done)
    assert set(done.values()) == {ANN}


def test_who_may_only_read_is_offered_no_action(
    start_dashboard: Start, new_page: NewPage, connection: Connection, complaints: Complaints
) -> None:
    add_task(connection, "sync", **{**DEAD, **FAILING})
    add_replica(connection, "one", ["sync"])
    page = new_page(start_dashboard().url)
    for address in ("./", "tasks", "task?name=sync", "jobs", "runs", "replicas", "setup"):
        page.goto(address)
        main = page.get_by_role("main")
        expect(main.locator("form[method=post], td input[type=checkbox]")).to_have_count(0)
        expect(main.locator("a[href*='confirm'], form[action*='confirm']")).to_have_count(0)
    answer = page.goto("confirm?action=pause&name=sync")
    assert answer is not None
    assert answer.status == 403
    complaints.expected(page, "403")
    expect(page.get_by_role("main")).to_contain_text("change nothing")


def test_without_a_login_the_entry_has_the_user_of_the_command(
    start_dashboard: Start, new_page: NewPage, locks: TaskLocks, connection: Connection
) -> None:
    add_task(connection, "sync")
    page = new_page(start_dashboard("--operate").url)
    page.goto("task?name=sync")
    follow(page, "Pause")
    press(page, "Pause")
    expect(page.get_by_role("status")).to_be_visible()
    [pause] = task_of(locks, "sync").pauses
    assert f"@{os.uname().nodename}" in pause.by
    assert task_of(locks, "sync").state is TaskState.PAUSED
