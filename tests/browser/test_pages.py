"""Every page, with no task, a few and many: shown without complaints, to every reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from playwright.sync_api import Page

from tests.night.recording import show_pictured
from tests.support.chromium import Complaints, scrolls_sideways, violations
from tests.support.dashboards import DashboardProcess
from tests.support.postgres import Server
from tests.support.rows import (
    FAILING,
    OVERDUE,
    RUNNING,
    add_action,
    add_job,
    add_miss,
    add_replica,
    add_run,
    add_task,
    paused,
)

pytestmark = pytest.mark.nightly  # because of the browser

Connection = psycopg.Connection[Any]

# What a page may have, however many tasks and runs there are. One with lanes has an element for
# each run that a reader can tell apart.
MOST_BYTES, MOST_BYTES_OF_LANES = 200_000, 1_000_000

# A name that breaks a page if it is not escaped, or if nothing breaks its line.
HOSTILE = "<script>alert(1)</script>" + "x" * 120


def add_nothing(connection: Connection) -> None:
    """Leave the tables empty."""


def add_a_few(connection: Connection) -> None:
    add_task(connection, "sync-prices", **FAILING, **paused())
    add_task(connection, "remind", **RUNNING)
    add_task(connection, HOSTILE, **OVERDUE)
    for task in ("sync-prices", HOSTILE):
        error = {"error_type": "'ValueError'", "error": "'<b>none</b>'", "traceback": "'line 1'"}
        add_run(connection, task, 5)
        add_run(connection, task, 6, outcome="'error'", **error)
        add_miss(connection, task, 1)
        add_action(connection, task, 1)
    add_replica(connection, "one", ["sync-prices", "remind", HOSTILE])
    add_job(connection, "newsletter")
    add_job(connection, HOSTILE)


def add_many(connection: Connection) -> None:
    """Add 10,000 tasks; a hundred of them have a full ring of runs."""
    add_task(connection, "task-0")
    columns = [
        column.name
        for column in connection.execute("SELECT * FROM task_lock LIMIT 0").description or ()
        if column.name not in {"task_name", "claim_id"}
    ]
    listed = ", ".join(columns)
    connection.execute(
        f"INSERT INTO task_lock (task_name, claim_id, {listed})"
        f" SELECT 'task-' || number, gen_random_uuid(), {listed}"
        " FROM task_lock, generate_series(1, 9999) AS number"
    )
    connection.execute(
        "INSERT INTO task_lock_run (task_name, ring, slot, token, scheduled_at, started_at,"
        " ended_at, replica, kind, outcome)"
        " SELECT 'task-' || task, 'runs', run, run, at, at, at + run % 40 * interval '1 s',"
        " 'one', 'schedule', 'ok' FROM generate_series(0, 99) AS task,"
        " generate_series(1, 60) AS run, LATERAL (SELECT now() - run * interval '1 min' AS at)"
    )
    add_replica(connection, "one", ["task-0"])
    connection.execute("ANALYZE")


TABLES: dict[str, tuple[Callable[[Connection], object], str]] = {
    "no tasks": (add_nothing, ""),
    "3 tasks": (add_a_few, HOSTILE),
    "10,000 tasks": (add_many, "task-7"),
    "a night": (show_pictured, "sync-prices"),
}

# The pages, with what their address needs of a task.
PAGES = {
    "overview": "./",
    "overview by task": "./?by=task",
    "tasks": "tasks",
    "task": "task?name={task}",
    "task after a pause": "task?name={task}&done=pause",
    "why": "why?name={task}",
    "runs": "runs",
    "timeline": "timeline?hours=12&by=task",
    "replicas": "replicas",
    "replica": "replica?id=one",
    "jobs": "jobs",
    "setup": "setup",
    "confirm a pause": "confirm?action=pause&name={task}",
    "confirm a free": "confirm?action=free&name={task}&token=1",
    "confirm a move": "confirm?action=job-move&name=newsletter",
    "an error": "no-such-page",
}
CASES = [
    *(("no tasks", page) for page, address in PAGES.items() if "name=" not in address),
    *(("3 tasks", page) for page in PAGES),
    *(("10,000 tasks", page) for page in ("overview", "overview by task", "tasks", "runs")),
    *(("a night", page) for page in ("overview", "overview by task", "tasks", "task", "runs")),
    ("a night", "timeline"),
]


@pytest.fixture(scope="module")
def site(
    request: pytest.FixtureRequest,
    server: Server,
    template: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[DashboardProcess, str]]:
    """A dashboard whose readers may operate, with one of the tables, and the name of a task."""
    fill, task = TABLES[request.param]
    log: Path = tmp_path_factory.mktemp("site") / "log"
    with server.database(template) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            fill(connection)
        with DashboardProcess(log, url, "--operate") as dashboard:
            yield dashboard, task


def visit(page: Page, complaints: Complaints, address: str, task: str) -> None:
    """Open a page, and wait for its script."""
    answer = page.goto(address.format(task=quote(task)))
    assert answer is not None
    if address == "no-such-page":
        assert answer.status == 404
        complaints.expected(page, "404")
    else:
        assert answer.status == 200, page.inner_text("body")
        has_lanes = page.locator(".lanes").count() > 0
        assert len(answer.body()) < (MOST_BYTES_OF_LANES if has_lanes else MOST_BYTES)


@pytest.mark.parametrize(("site", "name"), CASES, indirect=["site"])
def test_it_is_for_every_reader_in_light_and_dark_on_a_phone_and_a_screen(
    site: tuple[DashboardProcess, str],
    new_page: Callable[..., Page],
    axe: str,
    name: str,
    complaints: Complaints,
) -> None:
    """No complaints of the browser, nothing that axe finds, and no scrolling sideways."""
    dashboard, task = site
    page = new_page(dashboard.url)
    visit(page, complaints, PAGES[name], task)
    page.evaluate("document.querySelectorAll('details').forEach(it => { it.open = true; })")
    found: dict[str, list[str]] = {}
    for scheme, width in (("light", 1240), ("dark", 390)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]  # one of the two
        page.set_viewport_size({"width": width, "height": 900})
        found[f"{scheme}, {width} px"] = violations(page, axe) + scrolls_sideways(page)
    assert {where: what for where, what in found.items() if what} == {}
