"""The lanes show what happened in a night, as a reader sees it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import Locator, Page

from tests.support.dashboards import DashboardProcess
from tests.support.night import CLEAN_UP, RESTARTED, WEB

pytestmark = pytest.mark.nightly  # because of the browser

NewPage = Callable[..., Page]

OUTAGE = "the database did not answer from"


@dataclass(frozen=True)
class Looks:
    """How a shape is drawn.

    :ivar left: its left edge, as a share of the lane's width
    :ivar alpha: how opaque it is
    """

    fill: str
    stroke: str
    alpha: float
    left: float
    right: float
    is_whole_height: bool

    @property
    def is_hollow(self) -> bool:
        return self.fill == "none" and self.stroke != "none"

    @property
    def is_shade(self) -> bool:
        return self.is_whole_height and 0 < self.alpha < 0.5


def lane(page: Page, name: str) -> Locator:
    """Return the lane of a replica or a task."""
    return page.get_by_role("img", name=re.compile(f"^{re.escape(name)}: "))


def words(page: Page, lane_name: str) -> str:
    """Return what the shapes of a lane say."""
    return "\n".join(lane(page, lane_name).locator("rect title").all_text_contents())


def looks(page: Page, lane_name: str, text: str, among: str = "rect") -> Looks:
    """Return how the first shape of a lane is drawn whose words have a text in them.

    :param among: a selector of the shapes
    """
    shape = lane(page, lane_name).locator(among).filter(has_text=text).first
    found: dict[str, Any] = shape.evaluate(
        """it => {
            const style = getComputedStyle(it), box = it.getBoundingClientRect();
            const whole = it.ownerSVGElement.getBoundingClientRect();
            return {
                fill: style.fill, stroke: style.stroke,
                alpha: Number((/rgba\\([^)]*, ([\\d.]+)\\)/.exec(style.fill) || [0, "1"])[1]),
                is_whole_height: Math.abs(box.height - whole.height) < 1,
                left: (box.left - whole.left) / whole.width,
                right: (box.right - whole.left) / whole.width,
            };
        }"""
    )
    return Looks(**found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_replicas_lanes_show_the_last_hour(
    night: DashboardProcess, new_page: NewPage, scheme: str
) -> None:
    page = new_page(night.url, color_scheme=scheme)
    page.goto("./")
    well = looks(page, WEB[2], "", "rect.ok")
    goes_on = looks(page, WEB[2], "thumbnails since 06:06:00, goes on")
    died = looks(page, WEB[1], "daily-report 05:30:00, died")
    taken_over = looks(page, WEB[0], "daily-report (takeover)")
    assert len({each.fill for each in (well, goes_on, died, taken_over)}) == 4
    # One of these runs on each of two replicas, which chance has drawn.
    page.goto("./?by=task")
    assert looks(page, "sync-prices", "RatesUnavailable").fill == died.fill
    assert looks(page, "sync-prices", "sync-prices (retry)").fill == taken_over.fill
    page.goto("./")
    # The dead run is drawn until the replica died, 7.5 of 60 minutes, and the takeover after it.
    assert died.right - died.left == pytest.approx(7.5 / 60, abs=0.005)
    assert taken_over.left == pytest.approx(died.right + 0.9 / 60, abs=0.005)
    assert taken_over.right - taken_over.left == pytest.approx(760 / 3600, abs=0.005)
    assert goes_on.right == pytest.approx(1, abs=0.005)
    # The process that was started in place of the killed one has runs since then.
    assert looks(page, RESTARTED, "", "rect.ok").left > died.right
    # A run time that nobody ran lies in the shade of its reason.
    pause, outage = (looks(page, "nobody", text) for text in ("deploy of 2.8", OUTAGE))
    for missed, reason in (("all tasks were paused", pause), ("mail-queue: nobody ran", outage)):
        drawn = looks(page, "nobody", missed)
        assert drawn.is_hollow
        assert reason.left <= drawn.left + 0.005
        assert drawn.right <= reason.right + 0.02
    assert pause.fill != outage.fill
    for each in (*WEB, RESTARTED, "nobody"):
        assert looks(page, each, "deploy of 2.8").is_shade
        assert looks(page, each, OUTAGE).is_shade


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tasks_lanes_show_the_whole_night(
    night: DashboardProcess, new_page: NewPage, scheme: str
) -> None:
    page = new_page(night.url, color_scheme=scheme)
    page.goto("timeline?hours=10&by=task")
    missed = looks(page, CLEAN_UP, "ann@ops had paused the task")
    pause = looks(page, CLEAN_UP, "paused by ann@ops at 02:22:00 (migration of orders)")
    assert missed.is_hollow
    assert pause.is_shade
    # The pause ended when it was resumed, not when it would have ended. The night is some minutes
    # past, as long as the tests before took.
    assert pause.left == pytest.approx(1 - 230 / 600, abs=0.03)
    assert pause.right - pause.left == pytest.approx(80 / 600, abs=0.005)
    assert pause.left < missed.left < pause.right
    assert "migration of orders" not in words(page, "thumbnails")
    died, taken_over = (looks(page, "daily-report", text) for text in ("died", "(takeover)"))
    assert died.fill != taken_over.fill
    backup = looks(page, "nightly-backup", "nightly-backup 01:00:00, ok")
    assert backup.right - backup.left == pytest.approx(3100 / 36000, abs=0.005)


def test_a_shape_says_what_it_is_and_a_lane_how_many(
    night: DashboardProcess, new_page: NewPage
) -> None:
    """Colours tell nothing that words do not."""
    page = new_page(night.url)
    page.goto("timeline?hours=10&by=task")
    # Of 120 run times in ten hours three were missed, and two runs were retried.
    assert lane(page, "sync-prices").get_attribute("aria-label") == (
        "sync-prices: 119 runs, 2 failed, 3 missed"
    )
    assert "RatesUnavailable: HTTP 503" in words(page, "sync-prices")
    assert "daily-report 05:30:00, died after 7 min 30 s" in words(page, "daily-report")
    assert "daily-report (takeover)" in words(page, "daily-report")
