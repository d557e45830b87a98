"""Readers with a keyboard, without JavaScript, and on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Page, expect

from apscheduler_tasklock import TaskLocks
from tests.support.chromium import violations
from tests.support.dashboards import DashboardProcess
from tests.support.rows import FAILING, STAYS_RUNNING, add_job, add_replica, add_run, add_task

pytestmark = pytest.mark.nightly  # because of the browser

Connection = psycopg.Connection[Any]
Start = Callable[..., DashboardProcess]
NewPage = Callable[..., Page]

PAGES = ("./", "tasks", "task?name=sync", "why?name=sync", "runs", "timeline", "replicas", "jobs")


@pytest.fixture
def dashboard(start_dashboard: Start, connection: Connection) -> DashboardProcess:
    """A dashboard to operate two tasks and a job."""
    add_task(connection, "sync", **FAILING)
    add_task(connection, "other")
    add_run(connection, "sync", 1, outcome="'error'", error="'no rates'")
    add_replica(connection, "one", ["sync", "other"])
    add_job(connection, "newsletter")
    return start_dashboard("--operate")


def tab_stops(page: Page, most: int = 80) -> list[str]:
    """Press the tabulator to the end of the page; return the focused elements' names.

    Each of them has to be in sight, with an outline that its neighbours lack.
    """
    stops: list[str] = []
    for _ in range(most):
        page.keyboard.press("Tab")
        stop = page.evaluate(
            """() => {
                const it = document.activeElement;
                if (it === document.body) return null;
                const box = it.getBoundingClientRect(), style = getComputedStyle(it);
                const name = it.getAttribute("aria-label") || it.labels?.[0]?.textContent
                    || it.textContent;
                return {
                    name: name.trim().split("\\n")[0],
                    isSeen: box.width > 0 && box.height > 0 && box.right > 0 && box.bottom > 0
                        && box.left < innerWidth && box.top < innerHeight,
                    isMarked: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
                };
            }"""
        )
        if stop is None:
            break
        assert stop["isSeen"], stop
        assert stop["isMarked"], stop
        stops.append(stop["name"])
    return stops


def in_order(wanted: list[str], stops: list[str]) -> list[str]:
    """Return the wanted names that do not follow each other among the stops."""
    rest = iter(stops)
    return [name for name in wanted if not any(stop.startswith(name) for stop in rest)]


def test_the_keyboard_reaches_all_in_the_order_of_the_page(
    dashboard: DashboardProcess, new_page: NewPage
) -> None:
    page = new_page(dashboard.url)
    page.goto("tasks")
    stops = tab_stops(page)
    wanted = ["Skip to the content", "task lock", "Overview", "Tasks", "Runs", "Set-up"]
    wanted += ["Name", "State", "Order", "Show", "choose sync", "sync", "Pause", "Resume"]
    wanted += ["Pause all", "as JSON"]
    assert in_order(wanted, stops) == []


def test_the_skip_link_leads_past_the_navigation(
    dashboard: DashboardProcess, new_page: NewPage
) -> None:
    page = new_page(dashboard.url)
    page.goto("tasks")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("searchbox", name="Name")).to_be_focused()


def test_an_action_needs_no_mouse(
    dashboard: DashboardProcess, new_page: NewPage, locks: TaskLocks
) -> None:
    page = new_page(dashboard.url)
    page.goto("task?name=sync")
    main = page.get_by_role("main")
    main.get_by_role("link", name="Pause", exact=True).press("Enter")
    page.get_by_label("Why").fill("by keyboard")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_contain_text("Paused")
    assert [task.name for task in locks.tasks() if task.paused] == ["sync"]


def test_headings_and_the_navigation_tell_where_one_is(
    dashboard: DashboardProcess, new_page: NewPage
) -> None:
    page = new_page(dashboard.url)
    for address in PAGES:
        page.goto(address)
        expect(page.get_by_role("heading", level=1)).to_have_count(1)
        current = page.get_by_role("navigation", name="Pages").locator("[aria-current=page]")
        is_listed = not address.startswith(("task?", "why?"))
        expect(current).to_have_count(1 if is_listed else 0)


def test_all_works_without_javascript(
    dashboard: DashboardProcess, new_page: NewPage, locks: TaskLocks
) -> None:
    page = new_page(dashboard.url, java_script_enabled=False)
    page.goto("./")
    for title in ("Tasks", "Runs", "Timeline", "Replicas", "Jobs", "Set-up", "Overview"):
        page.get_by_role("navigation", name="Pages").get_by_role("link", name=title).click()
        expect(page.get_by_role("heading", level=1)).to_have_count(1)
    page.goto("tasks")
    page.get_by_role("searchbox", name="Name").fill("oth")
    page.get_by_role("button", name="Show").click()
    main = page.get_by_role("main")
    expect(main.get_by_role("link", name="other")).to_be_visible()
    expect(main.get_by_role("link", name="sync")).to_have_count(0)
    page.goto("tasks")
    page.locator("summary", has_text="State").click()
    page.get_by_role("checkbox", name="failing").check()
    page.get_by_role("button", name="Show").click()
    expect(main.get_by_role("link", name="sync")).to_be_visible()
    expect(main.get_by_role("link", name="other")).to_have_count(0)
    main.get_by_role("link", name="sync").click()
    main.get_by_role("link", name="Pause", exact=True).click()
    main.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("status")).to_contain_text("Paused")
    assert [task.name for task in locks.tasks() if task.paused] == ["sync"]


def test_remedies_are_copied_by_a_button_that_there_is_only_with_javascript(
    start_dashboard: Start, empty_database_url: str, new_page: NewPage
) -> None:
    """The tables are missing, which the page about the set-up tells, and how to create them."""
    dashboard = start_dashboard(database=empty_database_url)
    page = new_page(dashboard.url, java_script_enabled=False)
    page.goto("setup")
    main = page.get_by_role("main")
    expect(main).to_contain_text("create it with: apscheduler-tasklock upgrade")
    expect(page.get_by_role("button", name="Copy")).to_have_count(0)
    page = new_page(dashboard.url, permissions=["clipboard-read", "clipboard-write"])
    page.goto("setup")
    page.get_by_role("button", name="Copy").last.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "create it with: apscheduler-tasklock upgrade"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_has_what_was_read_and_nothing_to_click(
    dashboard: DashboardProcess, new_page: NewPage, axe: str, scheme: str
) -> None:
    """Ink on white paper, also of a reader whose screen is dark."""
    page = new_page(dashboard.url, color_scheme=scheme)
    page.emulate_media(media="print")
    for address in PAGES:
        page.goto(address)
        expect(page.get_by_role("navigation")).to_have_count(0)
        expect(page.get_by_role("button")).to_have_count(0)
        expect(page.get_by_role("heading", level=1)).to_be_attached()
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == "rgb(255, 255, 255)"
        assert violations(page, axe) == []


def test_the_run_that_goes_on_is_painted_in_the_chart(
    start_dashboard: Start, connection: Connection, new_page: NewPage
) -> None:
    """A pattern that the page does not have would paint nothing."""
    add_task(connection, "sync", **STAYS_RUNNING)
    page = new_page(start_dashboard().url)
    page.goto("task?name=sync")
    bar = page.locator(".chart rect.running")
    expect(bar).to_have_count(1)
    fill = bar.evaluate("bar => getComputedStyle(bar).fill")
    assert fill.startswith("rgb("), fill
