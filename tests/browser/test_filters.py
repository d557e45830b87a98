"""What a reader asks for in a form is what the page shows, and what the form keeps."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from playwright.sync_api import Page, expect

from tests.night.recording import pictured
from tests.support.dashboards import DashboardProcess

pytestmark = pytest.mark.nightly  # because of the browser

NewPage = Callable[..., Page]


def rows_of(page: Page) -> list[str]:
    return page.get_by_role("main").locator("table tbody tr").all_inner_texts()


def show(page: Page) -> None:
    """Send the form, and wait until its answer is there."""
    with page.expect_navigation():
        page.get_by_role("main").get_by_role("button", name="Show").click()


def choose(page: Page, field: str, *values: str) -> None:
    """Choose these values of a field that can have several, and no others."""
    page.get_by_role("main").locator("summary", has_text=field).click()
    for box in page.get_by_role("group", name=field).get_by_role("checkbox").all():
        box.set_checked(box.get_attribute("value") in values)


def count(**wanted: str) -> int:
    """Return how many entries of the recorded history there are with these values."""
    return sum(
        all(row[name] in values.split() for name, values in wanted.items())
        for row in pictured().rows["task_lock_run"]
    )


def test_runs_are_filtered_by_all_that_the_form_has(
    night: DashboardProcess, new_page: NewPage
) -> None:
    page = new_page(night.url)
    page.goto("runs")
    page.get_by_role("link", name="failed or missed").click()
    expect(page.get_by_text("Outcome: error, died, overran, missed")).to_be_visible()
    page.get_by_role("searchbox", name="Task").fill("sync")
    show(page)
    bad = count(task_name="sync-prices", outcome="error died overran missed")
    assert len(rows_of(page)) == bad
    choose(page, "Outcome", "error", "freed")
    show(page)
    rows = rows_of(page)
    assert len(rows) == count(task_name="sync-prices", outcome="error freed")
    assert all("sync-prices" in row and "UpstreamError" in row for row in rows)
    page.get_by_role("searchbox", name="Error").fill("upstreamerror")
    show(page)
    assert rows_of(page) == rows
    page.get_by_role("searchbox", name="Error").fill("")
    choose(page, "Outcome")
    page.get_by_label("Kind").select_option("retry")
    show(page)
    assert len(rows_of(page)) == count(task_name="sync-prices", kind="retry")
    page.goto("runs")
    [replica] = {
        row["replica"]
        for row in pictured().rows["task_lock_run"]
        if row["task_name"] == "daily-report" and row["outcome"] == "died"
    }
    page.get_by_label("Replica").fill(replica)
    choose(page, "Outcome", "died")
    show(page)
    rows = rows_of(page)
    assert len(rows) == count(replica=replica, outcome="died")
    assert any("daily-report" in row for row in rows)


@pytest.mark.parametrize(
    ("label", "later", "expected"),
    [("Since", -1, 1), ("Since", 1, 0), ("Until", -1, 0), ("Until", 1, 1)],
)
def test_runs_are_filtered_by_times_of_the_zone_that_the_page_has(
    night: DashboardProcess, new_page: NewPage, label: str, later: int, expected: int
) -> None:
    """The stored one-off ran once."""
    page = new_page(night.url)
    [run] = [r for r in pictured().rows["task_lock_run"] if r["task_name"] == "shared:newsletter"]
    limit = datetime.fromisoformat(run["started_at"]) + timedelta(hours=later)
    page.goto("runs?q=newsletter")
    assert len(rows_of(page)) == 1
    page.get_by_label(label).fill(f"{limit:%Y-%m-%dT%H:%M}")
    show(page)
    assert len(rows_of(page)) == expected
    expect(page.get_by_label(label)).to_have_value(f"{limit:%Y-%m-%dT%H:%M}")


def test_a_night_is_chosen_by_its_date_and_looked_at_closer(
    night: DashboardProcess, new_page: NewPage
) -> None:
    page = new_page(night.url)
    evening = (pictured().now - timedelta(days=1)).date()
    page.goto("timeline")
    page.get_by_label("Night of").fill(f"{evening}")
    page.get_by_label("A lane for each").select_option("task")
    show(page)
    span = page.get_by_role("heading", level=2)
    expect(span).to_have_text(re.compile(f"{evening} 20:00:00 to .*08:00:00"))
    newsletter = page.get_by_role("group", name=re.compile("^shared:newsletter: 1 run$"))
    expect(newsletter).to_be_visible()
    page.get_by_role("link", name="closer").click()
    expect(span).to_have_text(re.compile(f"{evening} 23:00:00 to .*05:00:00"))
    page.get_by_role("link", name="later").click()
    expect(span).to_have_text(re.compile("02:00:00 to .*08:00:00"))
    # A lane for each task is kept.
    expect(newsletter).to_be_visible()
