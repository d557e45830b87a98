"""Fixtures of the browser tests: a browser, pages whose complaints are judged, and dashboards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Browser, Page, expect

from apscheduler_tasklock import TaskLocks
from tests.night.recording import show_pictured
from tests.support.chromium import PATIENCE, Complaints, axe_script, chromium
from tests.support.commands import ROOT
from tests.support.dashboards import DashboardProcess
from tests.support.postgres import Server
from tests.support.programs import UnavailableError, skip_or_fail

expect.set_options(timeout=PATIENCE)


# Of each module, because no other test can use asyncio in this thread while the driver runs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with ExitStack() as closing:
        try:
            browser = closing.enter_context(chromium())
        except UnavailableError as unavailable:
            skip_or_fail(unavailable)
        yield browser


@pytest.fixture(scope="session")
def axe() -> str:
    try:
        return axe_script()
    except UnavailableError as unavailable:
        skip_or_fail(unavailable)


@pytest.fixture
def complaints() -> Iterator[Complaints]:
    """What the browser complains about, which must be nothing.

    What a test provokes it takes out with ``complaints.expected(...)``.
    """
    complaints = Complaints()
    yield complaints
    assert complaints.all == []


@pytest.fixture
def new_page(browser: Browser, complaints: Complaints) -> Iterator[Callable[..., Page]]:
    """Open a page in a browser profile of its own."""
    with ExitStack() as closing:

        def new(base_url: str, **options: Any) -> Page:
            settings = {"viewport": {"width": 1240, "height": 900}, **options}
            context = closing.enter_context(browser.new_context(base_url=base_url, **settings))
            context.set_default_timeout(PATIENCE)
            page = context.new_page()
            complaints.hear(page)
            return page

        yield new


@pytest.fixture
def start_dashboard(tmp_path: Path, database_url: str) -> Iterator[Callable[..., DashboardProcess]]:
    """Start a dashboard of the test's database; it is ended after the test."""
    with ExitStack() as closing:
        number = iter(range(100))

        def start(*arguments: str, database: str = database_url, **env: str) -> DashboardProcess:
            log = tmp_path / f"dashboard {next(number)}.log"
            return closing.enter_context(DashboardProcess(log, database, *arguments, **env))

        yield start


class Fleet:
    """Replica processes of tests/browser/replica.py."""

    def __init__(self, folder: Path, database_url: str, closing: ExitStack) -> None:
        self._folder = folder
        self._database_url = database_url
        self._closing = closing
        self._count = 0

    def start(self, **settings: Any) -> subprocess.Popen[bytes]:
        """Start a replica with jobs; it is killed after the test."""
        self._count += 1
        with (self._folder / f"replica {self._count}.log").open("wb") as output:
            replica = subprocess.Popen(
                # Stored jobs find their function under the module's name.
                [sys.executable, "-c", "from tests.browser.replica import main; main()"],
                cwd=ROOT,
                env={
                    **os.environ,
                    "DATABASE_URL": self._database_url,
                    "SETTINGS": json.dumps(settings),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._closing.callback(replica.wait)
        self._closing.callback(replica.kill)
        return replica


@pytest.fixture
def fleet(tmp_path: Path, database_url: str) -> Iterator[Fleet]:
    with ExitStack() as closing:
        yield Fleet(tmp_path, database_url, closing)


@pytest.fixture
def locks(database_url: str) -> Iterator[TaskLocks]:
    """What the database has, beside the dashboard."""
    with TaskLocks(database_url) as locks:
        yield locks


@pytest.fixture(scope="module")
def night(
    server: Server, template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DashboardProcess]:
    """A dashboard of the recorded night, whose clock stands still shortly after six, in UTC."""
    log: Path = tmp_path_factory.mktemp("night") / "log"
    with server.database(template) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            show_pictured(connection)
        with DashboardProcess(log, url) as dashboard:
            yield dashboard
