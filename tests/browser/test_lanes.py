"""The lanes show what happened in the recorded night, as a reader sees it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.night.recording import pictured
from tests.support.dashboards import DashboardProcess

pytestmark = pytest.mark.nightly  # because of the browser

NewPage = Callable[..., Page]

OUTAGE = "the database did not answer: run times from"

# The span that these tests look at.
HOURS = 4


@dataclass(frozen=True)
class Looks:
    """How a shape is drawn.

    :ivar left: its left edge, as a share of the lane's width
    :ivar height: its height in pixels
    """

    fill: str
    stroke: str
    back: str
    left: float
    right: float
    height: float
    is_whole_height: bool

    @property
    def is_hollow(self) -> bool:
        return self.fill == self.back and self.stroke not in ("none", self.back)

    @property
    def is_shade(self) -> bool:
        return self.is_whole_height and self.fill.startswith("url(")


def lane(page: Page, name: str) -> Locator:
    """Return the lane of a replica or a task."""
    return page.get_by_role("group", name=re.compile(f"^{re.escape(name)}: "))


def words(page: Page, lane_name: str) -> str:
    """Return what the shapes of a lane say."""
    return "\n".join(lane(page, lane_name).locator("title").all_text_contents())


def looks(page: Page, lane_name: str, text: str, name: str = "") -> Looks:
    """Return how the first shape or shade of a lane is drawn whose words have a text in them.

    :param name: the class of the shape
    """
    drawn = lane(page, lane_name).locator("a, rect:has(title)")
    if name:
        drawn = drawn.filter(has=page.locator(f"rect.{name}"))
    shape = drawn.filter(has_text=text).first
    found: dict[str, Any] = shape.evaluate(
        """it => {
            const drawn = it.querySelector("rect") || it;
            const style = getComputedStyle(drawn), box = drawn.getBoundingClientRect();
            const whole = it.ownerSVGElement.getBoundingClientRect();
            return {
                fill: style.fill, stroke: style.stroke, height: drawn.height.baseVal.value,
                back: getComputedStyle(it.ownerSVGElement).backgroundColor,
                is_whole_height: Math.abs(box.height - whole.height) < 1,
                left: (box.left - whole.left) / whole.width,
                right: (box.right - whole.left) / whole.width,
            };
        }"""
    )
    return Looks(**found)


def entries(task: str, outcome: str) -> list[dict[str, Any]]:
    """Return a task's entries of the recorded history that have an outcome, the oldest first."""
    found = [
        row
        for row in pictured().rows["task_lock_run"]
        if row["task_name"] == task and row["outcome"] == outcome
    ]
    return sorted(found, key=lambda row: str(row["started_at"]))


def share(time: str) -> float:
    """Return where a time of the recording is in the span, as a share of its width."""
    ago = pictured().now - datetime.fromisoformat(time)
    return 1 - ago / timedelta(hours=HOURS)


def clock(time: str) -> str:
    """Return a time of the recording as the page shows it."""
    return f"{datetime.fromisoformat(time):%H:%M:%S}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tasks_lanes_show_the_whole_night(
    night: DashboardProcess, new_page: NewPage, scheme: str
) -> None:
    page = new_page(night.url, color_scheme=scheme)
    page.goto(f"timeline?hours={HOURS}&by=task")
    died, taken_over = (looks(page, "daily-report", text) for text in ("died", "(takeover)"))
    well = looks(page, "import-orders", "", "ok")
    assert len({each.fill for each in (well, died, taken_over)}) == 3
    # The dead run is drawn until its lease ended, and the takeover after it.
    entry = entries("daily-report", "died")[0]
    assert died.left == pytest.approx(share(entry["started_at"]), abs=0.005)
    assert died.right == pytest.approx(share(entry["ended_at"]), abs=0.005)
    assert taken_over.left >= died.right - 0.005
    # A run time that nobody ran lies in the shade of its reason.
    missed = looks(page, "clean-up", "nobody ran")
    pause = looks(page, "clean-up", "(migration of orders)")
    assert missed.is_hollow
    assert pause.is_shade
    assert pause.left < missed.left
    assert missed.right < pause.right + 0.005
    assert "migration of orders" not in words(page, "thumbnails")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_replicas_lanes_show_shades_behind_them(
    night: DashboardProcess, new_page: NewPage, scheme: str
) -> None:
    page = new_page(night.url, color_scheme=scheme)
    page.goto(f"timeline?hours={HOURS}")
    pause, outage = (looks(page, "nobody", text) for text in ("deploy of 2.8", OUTAGE))
    assert pause.fill != outage.fill
    [replica] = {
        row["locked_by"]
        for row in pictured().rows["task_lock"]
        if row["task_name"] == "batch/big-copy" and row["finished_at"] is None
    }
    for text in ("deploy of 2.8", OUTAGE):
        assert looks(page, replica, text).is_shade
    assert looks(page, "nobody", "mail-queue: nobody ran").is_hollow
    goes_on = looks(page, replica, "goes on")
    assert goes_on.right == pytest.approx(1, abs=0.005)


def test_a_shape_says_what_it_is(night: DashboardProcess, new_page: NewPage) -> None:
    """Colours tell nothing that words do not."""
    page = new_page(night.url)
    page.goto(f"timeline?hours={HOURS}&by=task")
    assert "UpstreamError: HTTP 503" in words(page, "sync-prices")
    died = entries("daily-report", "died")[0]
    assert f"daily-report {clock(died['started_at'])}, died" in words(page, "daily-report")
    assert "daily-report (takeover)" in words(page, "daily-report")


def test_where_the_history_does_not_reach_a_lane_is_hatched(
    night: DashboardProcess, new_page: NewPage
) -> None:
    page = new_page(night.url)
    page.goto(f"timeline?hours={HOURS}&by=task")
    unknown = looks(page, "mail-queue", "not kept: runs of the task before", "")
    assert unknown.is_shade
    assert unknown.left == pytest.approx(0, abs=0.005)
    oldest = entries("mail-queue", "ok")[0]
    assert unknown.right == pytest.approx(share(oldest["ended_at"]), abs=0.01)
    expect(lane(page, "mail-queue").get_by_text("not kept", exact=True)).to_be_visible()
    assert "not kept" not in words(page, "thumbnails")


def test_the_keyboard_leads_through_a_lane_and_to_the_run_of_a_shape(
    night: DashboardProcess, new_page: NewPage
) -> None:
    """One stop for each lane, at its worst shape, and the arrow keys to those beside it."""
    page = new_page(night.url)
    page.goto(f"timeline?hours={HOURS}&by=task")
    page.get_by_role("link", name="daily-report", exact=True).focus()
    page.keyboard.press("Tab")
    focused = page.locator("a:focus")
    died = f"daily-report {clock(entries('daily-report', 'died')[0]['started_at'])}, died"
    expect(focused).to_contain_text(died)
    page.keyboard.press("ArrowRight")
    expect(focused).to_contain_text("daily-report (takeover)")
    page.keyboard.press("ArrowLeft")
    expect(focused).to_contain_text(died)
    page.keyboard.press("Tab")
    expect(focused).to_have_class("name")  # the task of the next lane
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
    [row] = page.locator("tbody tr").all()
    expect(row).to_contain_text("died")
