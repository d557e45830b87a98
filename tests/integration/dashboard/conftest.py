"""Fixtures of the dashboard's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from apscheduler_tasklock.dashboard import Access, dashboard
from tests.support.asgi_client import TestClient
from tests.support.dashboards import patient_dashboard

Open = Callable[..., TestClient]


@pytest.fixture
def open_dashboard(database_url: str) -> Iterator[Open]:
    """Open a dashboard as a browser that follows no redirects; by default anybody may read.

    Unless it is told to hurry, for a database that the test breaks, it waits with patience.
    """
    with ExitStack() as stack:

        def open_(url: str = database_url, *, hurry: bool = False, **options: Any) -> TestClient:
            app = (dashboard if hurry else patient_dashboard)(url, **options)
            return stack.enter_context(
                TestClient(app, raise_server_exceptions=False, follow_redirects=False)
            )

        yield open_


@pytest.fixture
def reader(open_dashboard: Open) -> TestClient:
    return open_dashboard()


@pytest.fixture
def operator(open_dashboard: Open) -> TestClient:
    return open_dashboard(authorize=lambda _request: Access("operate", "ann"))
