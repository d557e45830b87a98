"""What a reader asks for in a form is what the page shows, and what the form keeps."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, timedelta

import pytest
from playwright.sync_api import Page, expect

from tests.support.dashboards import DashboardProcess
from tests.support.night import WEB

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


def test_runs_are_filtered_by_all_that_the_form_has(
    night: DashboardProcess, new_page: NewPage
) -> None:
    page = new_page(night.url)
    page.goto("runs")
    page.get_by_role("link", name="failed or missed").click()
    expect(page.get_by_text("Outcome: error, died, overran, missed")).to_be_visible()
    assert len(rows_of(page)) == 16
    page.get_by_role("searchbox", name="Task").fill("sync")
    choose(page, "Outcome", "error", "freed")
    show(page)
    rows = rows_of(page)
    assert len(rows) == 2
    assert all("sync-prices" in row and "RatesUnavailable" in row for row in rows)
    page.get_by_role("searchbox", name="Task").fill("")
    page.get_by_role("searchbox", name="Error").fill("ratesunavailable")
    show(page)
    assert rows_of(page) == rows
    page.get_by_role("searchbox", name="Task").fill("sync")
    page.get_by_role("searchbox", name="Error").fill("")
    choose(page, "Outcome")
    page.get_by_label("Kind").select_option("retry")
    show(page)
    assert len(rows_of(page)) == 2
    page.goto("runs")
    page.get_by_label("Replica").fill(WEB[1])
    choose(page, "Outcome", "died")
    show(page)
    [row] = rows_of(page)
    assert "daily-report" in row


@pytest.mark.parametrize(
    ("label", "hour", "count"),
    [("Since", 0, 1), ("Since", 2, 0), ("Until", 0, 0), ("Until", 2, 1)],
)
def test_runs_are_filtered_by_times_of_the_zone_that_the_page_has(
    night: DashboardProcess, new_page: NewPage, label: str, hour: int, count: int
) -> None:
    """The backup began at 01:00 in that zone."""
    page = new_page(night.url)
    morning = evening_of(page) + timedelta(days=1)
    page.goto("runs?q=nightly-backup")
    assert len(rows_of(page)) == 1
    page.get_by_label(label).fill(f"{morning}T{hour:02}:00")
    show(page)
    assert len(rows_of(page)) == count
    expect(page.get_by_label(label)).to_have_value(f"{morning}T{hour:02}:00")


def evening_of(page: Page) -> date:
    """Return the day on which the night began."""
    page.goto("timeline?hours=10")
    shown = page.get_by_role("heading", level=2).inner_text()
    found = re.match(r"(\d{4}-\d\d-\d\d) 20:12", shown)
    assert found is not None, shown
    return date.fromisoformat(found[1])


def test_a_night_is_chosen_by_its_date_and_looked_at_closer(
    night: DashboardProcess, new_page: NewPage
) -> None:
    page = new_page(night.url)
    evening = evening_of(page)
    page.get_by_label("Night of").fill(f"{evening}")
    page.get_by_label("A lane for each").select_option("task")
    show(page)
    span = page.get_by_role("heading", level=2)
    expect(span).to_have_text(re.compile(f"{evening} 20:00:00 to .*08:00:00"))
    backup = page.get_by_role("img", name=re.compile("^nightly-backup: 1 run$"))
    expect(backup).to_be_visible()
    page.get_by_role("link", name="closer").click()
    expect(span).to_have_text(re.compile(f"{evening} 23:00:00 to .*05:00:00"))
    page.get_by_role("link", name="earlier").click()
    expect(span).to_have_text(re.compile(f"{evening} 20:00:00 to .*02:00:00"))
    # A lane for each task is kept.
    expect(backup).to_be_visible()
