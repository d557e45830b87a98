"""The command ``dashboard`` and its login, with the rows of a database."""

from __future__ import annotations

import base64
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock.dashboard.server import Gate, Login
from tests.frameworks.servers import environment_of
from tests.support import rows
from tests.support.asgi_client import TestClient
from tests.support.dashboards import patient_dashboard

SAME = {"sec-fetch-site": "same-origin"}
PAUSE = {"action": "pause", "name": "mail"}


@contextmanager
def browsing(url: str, login: Login, *, on_loopback: bool) -> Iterator[TestClient]:
    app = patient_dashboard(url, authorize=login.authorize)
    gate = Gate(app, login, on_loopback=on_loopback)
    with TestClient(gate, base_url="http://127.0.0.1:8765", follow_redirects=False) as browser:
        yield browser


def basic(user: str, password: str) -> dict[str, str]:
    encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"authorization": f"Basic {encoded}"}


@pytest.fixture(autouse=True)
def task(connection: psycopg.Connection[Any]) -> None:
    rows.add_task(connection, "mail")
    rows.add_replica(connection, "one", ["mail"])


def test_the_name_beside_the_password_is_the_operators(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    login = basic("ann", "pässword")
    with browsing(database_url, Login("pässword", may_operate=True), on_loopback=False) as browser:
        assert browser.get("/", headers={**login, "host": "ops.example"}).status_code == 200
        assert browser.post("/act", data=PAUSE, headers={**login, **SAME}).status_code == 303
        assert browser.post("/act", data=PAUSE, headers=login).status_code == 403
    found = connection.execute("SELECT pauses->0->>'by' FROM task_lock").fetchone()
    assert found == ("ann",)


@pytest.mark.nightly
def test_the_command_serves_until_it_is_stopped(database_url: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "apscheduler_tasklock", "dashboard", "--port", "0"],
        env={**environment_of(tmp_path), "TASKLOCK_DATABASE_URL": database_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        [url] = re.findall(r"http://127\.0\.0\.1:\d+/", said)
        with urllib.request.urlopen(f"{url}tasks", timeout=30) as answer:  # noqa: S310  # HTTP
            assert "mail" in answer.read().decode()
        request = urllib.request.Request(url, headers={"host": "evil.example"})  # noqa: S310  # HTTP
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(request, timeout=30)  # noqa: S310  # HTTP
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
