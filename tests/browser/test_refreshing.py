"""An open page refreshes itself, and takes nothing away from its reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Page, Request, expect

from apscheduler_tasklock import TaskLocks
from tests.browser.conftest import Fleet
from tests.support.chromium import Complaints
from tests.support.dashboards import DashboardProcess
from tests.support.polling import eventually
from tests.support.rows import RUNNING, add_job, add_run, add_task

pytestmark = pytest.mark.nightly  # because of the browser

Connection = psycopg.Connection[Any]
Start = Callable[..., DashboardProcess]
NewPage = Callable[..., Page]


def wait_for_refresh(page: Page, count: int = 1) -> None:
    """Wait until the page has asked the server again, and has shown the answer."""
    for _ in range(count):
        with page.expect_response(lambda answer: answer.request.resource_type == "fetch") as asked:
            pass
        asked.value.finished()
    # The script replaces what has changed before the browser draws the second frame from now.
    page.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")


def test_a_job_that_begins_on_a_replica_appears_without_a_reload(
    start_dashboard: Start, new_page: NewPage, fleet: Fleet, locks: TaskLocks
) -> None:
    page = new_page(start_dashboard().url)
    page.goto("./")
    page.evaluate("window.isTheSamePage = true")
    expect(page.get_by_role("main")).to_contain_text("Nothing runs.")
    fleet.start(jobs=[{"function": "hang", "trigger": "date", "id": "long"}])
    eventually(lambda: any(task.finished_at is None for task in locks.tasks("*long")))
    [task] = locks.tasks("*long")
    running = page.get_by_role("heading", name="Runs now").locator("..")
    expect(running.get_by_role("link", name=task.name)).to_be_visible()
    expect(page.locator(".lane a rect.running")).to_have_count(1)
    assert page.evaluate("window.isTheSamePage")


def test_what_the_reader_does_stays(
    start_dashboard: Start, new_page: NewPage, connection: Connection
) -> None:
    """The scroll, typed text, chosen tasks and an open traceback."""
    for number in range(45):
        add_task(connection, f"task-{number:02}")
    for number in range(1, 4):
        failed = {"outcome": "'error'", "error": "'boom'", "traceback": "'line 1'"}
        add_run(connection, "task-00", number, **failed)
    dashboard = start_dashboard("--operate")
    page = new_page(dashboard.url)
    page.goto("tasks?order=name")
    page.get_by_role("checkbox", name="choose task-03").check()
    page.get_by_role("searchbox", name="Name").fill("half a na")
    page.get_by_role("searchbox", name="Name").evaluate("it => it.blur()")
    page.evaluate("scrollTo(0, 400)")
    add_task(connection, "a-new-task", **RUNNING)
    wait_for_refresh(page, 2)
    assert page.evaluate("scrollY") == 400
    expect(page.get_by_role("searchbox", name="Name")).to_have_value("half a na")
    expect(page.get_by_role("checkbox", name="choose task-03")).to_be_checked()
    # The list would have thrown the choice away, so it waits until nothing is chosen, and says so.
    expect(page.get_by_role("link", name="a-new-task")).to_have_count(0)
    still = page.get_by_text("Not refreshed since")
    expect(still).to_have_count(1)
    expect(still).to_be_in_viewport()
    page.get_by_role("checkbox", name="choose task-03").uncheck()
    page.evaluate("document.activeElement.blur(); scrollTo(0, 400)")
    expect(page.get_by_role("link", name="a-new-task")).to_be_visible()
    expect(still).to_have_count(0)
    assert page.evaluate("scrollY") == 400

    page.goto("task?name=task-00")
    page.get_by_text("traceback").first.click()
    page.evaluate("document.activeElement.blur()")
    connection.execute("UPDATE task_lock SET failures = 3, failed_at = now(), error_type = 'Late'")
    add_run(connection, "task-00", 4, started_at="now()", ended_at="now()")
    expect(page.get_by_role("heading", level=1)).to_contain_text("failing")
    expect(page.get_by_text("line 1").first).to_be_visible()
    runs = page.locator("#runs")
    expect(runs.locator("tbody tr")).to_have_count(3)
    expect(still).to_be_in_viewport()
    page.get_by_text("traceback").first.click()
    page.evaluate("document.activeElement.blur()")
    expect(runs.locator("tbody tr")).to_have_count(4)
    expect(still).to_have_count(0)


def test_a_server_that_is_away_is_told_and_found_again(
    start_dashboard: Start, new_page: NewPage, connection: Connection, complaints: Complaints
) -> None:
    add_task(connection, "sync")
    dashboard = start_dashboard()
    page = new_page(dashboard.url)
    page.goto("./")
    dashboard.stop()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("has not answered since")
    expect(page.get_by_role("main")).to_contain_text("sync")
    since = alert.text_content()
    complaints.expected(page, "ERR_CONNECTION_REFUSED")
    complaints.expected(page, "ERR_CONNECTION_REFUSED")
    assert alert.text_content() == since
    dashboard.start_again()
    expect(alert).to_have_count(0)
    complaints.all.clear()  # those of later tries


def test_a_database_that_is_away_is_told_with_what_was_last_read(
    start_dashboard: Start, new_page: NewPage, direct_url: str, server: Any
) -> None:
    with psycopg.connect(direct_url, autocommit=True) as connection:
        add_task(connection, "sync")
    dashboard = start_dashboard()
    page = new_page(dashboard.url)
    page.goto("./")
    expect(page.get_by_role("main")).to_contain_text("sync")
    name = psycopg.conninfo.conninfo_to_dict(direct_url)["dbname"]
    with server.connect() as other:
        other.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
        )
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("The database is unavailable")
        expect(alert).to_contain_text("This page shows what was read")
        expect(page.get_by_role("main")).to_contain_text("sync")
        other.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    expect(alert).to_have_count(0)


def test_an_answer_that_has_only_an_error_is_told_on_the_page_as_it_was(
    start_dashboard: Start, new_page: NewPage, connection: Connection, complaints: Complaints
) -> None:
    add_task(connection, "sync")
    add_job(connection, "a job")
    dashboard = start_dashboard()
    page = new_page(dashboard.url)
    page.goto("./")
    expect(page.get_by_role("main")).to_contain_text("sync")
    connection.execute("ALTER TABLE task_lock RENAME TO gone")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("cannot be read anew: the table task_lock does not exist")
    expect(page.get_by_role("main")).to_contain_text("sync")
    connection.execute("ALTER TABLE gone RENAME TO task_lock")
    expect(alert).to_have_count(0)
    page.goto("job?id=a+job")
    connection.execute("DELETE FROM task_lock_job")
    expect(alert).to_contain_text("cannot be read anew: no such job")
    complaints.all.clear()  # of the statuses 503 and 404


@pytest.mark.parametrize("is_hidden", [True, False])
def test_only_a_tab_that_is_seen_asks(
    start_dashboard: Start, new_page: NewPage, is_hidden: bool
) -> None:
    page = new_page(start_dashboard().url)
    page.clock.install()
    page.goto("./")
    page.evaluate(
        "is => Object.defineProperty(document, 'hidden', {get: () => is, configurable: true})",
        is_hidden,
    )
    asked: list[Request] = []

    def note(request: Request) -> None:  # the driver takes no method of a list
        asked.append(request)

    page.on("request", note)
    for _ in range(6):
        page.clock.run_for(5_000)
        page.evaluate("new Promise(r => requestAnimationFrame(r))")
    if is_hidden:
        assert asked == []
        page.evaluate("delete document.hidden")

    def fetches() -> int:
        page.clock.run_for(5_000)
        page.wait_for_timeout(20)  # the driver reports requests while it waits
        return [request.resource_type for request in asked].count("fetch")

    eventually(lambda: fetches() > 1)
