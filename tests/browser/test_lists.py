"""Lists have one line a row, and use the width of the window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Page, expect

from tests.support.dashboards import DashboardProcess
from tests.support.rows import (
    FAILING,
    add_action,
    add_job,
    add_miss,
    add_replica,
    add_run,
    add_task,
    paused,
)

pytestmark = pytest.mark.nightly  # because of the browser

TASK = "billing.reports:generate_the_customer_statements_of_last_month"
POD = "billing-worker-7d9f8bc6c4-x2x9k:1:3f9a"
# The pages, each with the name that is cut there.
LISTS = {"tasks": TASK, "runs": POD, "replicas": POD, "jobs": TASK}

# Limits the height of a row of one line, in pixels.
ONE_LINE = 36

_IS_CUT = "cut => cut.firstElementChild.scrollWidth > cut.firstElementChild.clientWidth"
_COPIED = "cut => (getSelection().selectAllChildren(cut), getSelection().toString())"


@pytest.fixture
def pods(connection: psycopg.Connection[Any]) -> None:
    error = {"error_type": "'ValueError'", "error": "repeat('no price ', 50)"}
    add_task(connection, TASK, **FAILING, **paused(reason="'the shop is closed for a while'"))
    add_run(connection, TASK, 1, replica=f"'{POD}'")
    add_run(connection, TASK, 2, replica=f"'{POD}'", outcome="'error'", **error)
    add_miss(connection, TASK, 1, replica=f"'{POD}'", reason="repeat('all workers busy ', 9)")
    add_action(connection, TASK, 1)
    add_replica(connection, POD, [TASK])
    add_job(connection, TASK, func="'billing.jobs.reminders:remind_each_customer'")


@pytest.mark.usefixtures("pods")
def test_what_is_long_is_cut_in_the_middle_where_the_window_is_too_narrow(
    start_dashboard: Callable[..., DashboardProcess], new_page: Callable[..., Page]
) -> None:
    page = new_page(start_dashboard("--operate").url)
    for address, name in LISTS.items():
        for width, is_cut in ((1280, True), (2560, False), (390, False)):
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(address)
            cut = page.get_by_title(name, exact=True).first
            expect(cut).to_be_visible()
            assert cut.evaluate(_IS_CUT) is is_cut, (address, width)
            assert cut.evaluate(_COPIED) == name, (address, width)
            if width > 390:
                rows = page.locator("tbody tr").all()
                heights = [round((row.bounding_box() or {"height": 0})["height"]) for row in rows]
                assert rows
                assert max(heights) <= ONE_LINE, (address, width, heights)
