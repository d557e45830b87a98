"""The command ``dashboard``: who may open it, and under which name."""

from __future__ import annotations

import base64
import os
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

from apscheduler_tasklock.cli import main
from apscheduler_tasklock.dashboard import dashboard
from apscheduler_tasklock.dashboard.server import Gate, Login
from tests.frameworks.servers import environment_of
from tests.support import rows
from tests.support.asgi_client import TestClient

SAME = {"sec-fetch-site": "same-origin"}
PAUSE = {"action": "pause", "name": "mail"}


@contextmanager
def browsing(url: str, login: Login, *, on_loopback: bool) -> Iterator[TestClient]:
    app = dashboard(url, authorize=login.authorize)
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


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8765",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[::2]",
        "[",
        "[::1]evil.example",
    ],
)
def test_on_loopback_another_name_is_refused(host: str, database_url: str) -> None:
    with browsing(database_url, Login(None, may_operate=True), on_loopback=True) as browser:
        for answer in (
            browser.get("/", headers={"host": host}),
            browser.post("/act", data=PAUSE, headers={"host": host, **SAME}),
        ):
            assert answer.status_code == 421
            assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8765", "127.0.0.1:1", "[::1]:8765"])
def test_on_loopback_its_own_names_are_served(host: str, database_url: str) -> None:
    with browsing(database_url, Login(None, may_operate=False), on_loopback=True) as browser:
        assert browser.get("/", headers={"host": host}).status_code == 200


def test_without_operate_the_command_is_read_only(database_url: str) -> None:
    with browsing(database_url, Login(None, may_operate=False), on_loopback=True) as browser:
        assert browser.post("/act", data=PAUSE, headers=SAME).status_code == 403
    with browsing(database_url, Login(None, may_operate=True), on_loopback=True) as browser:
        assert browser.post("/act", data=PAUSE, headers=SAME).status_code == 303


@pytest.mark.parametrize(
    "headers",
    [
        {},
        basic("ann", "wrong"),
        basic("ann", ""),
        {"authorization": "Basic !!!"},
        {"authorization": "Basic /w=="},
        {"authorization": "Bearer pässword"},
        basic("ann", "pässwordx"),
    ],
    ids=str,
)
def test_the_password_is_asked_for(headers: dict[str, str], database_url: str) -> None:
    with browsing(database_url, Login("pässword", may_operate=True), on_loopback=False) as browser:
        for path in ("/", "/tasks.json", "/static/dashboard.css", "/nothing"):
            answer = browser.get(path, headers={k: v.encode() for k, v in headers.items()})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Basic ")
            assert "default-src 'none'" in answer.headers["content-security-policy"]


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


def test_a_name_that_cannot_be_stored_is_rejected(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    headers = {**basic("a\0b", "pässword"), **SAME}
    with browsing(database_url, Login("pässword", may_operate=True), on_loopback=False) as browser:
        assert browser.post("/act", data=PAUSE, headers=headers).status_code == 400
    assert connection.execute("SELECT pauses FROM task_lock").fetchone() == (None,)


def test_a_password_that_is_not_utf_8_is_rejected_at_the_start(
    database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKLOCK_DASHBOARD_PASSWORD", os.fsdecode(b"secret\xff"))
    assert main(["dashboard", "--database", database_url]) == 2
    said = capsys.readouterr().err
    assert "is not UTF-8" in said
    assert "secret" not in said


def test_another_host_demands_a_password(
    database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKLOCK_DASHBOARD_PASSWORD", "")
    for host in ("0.0.0.0", "::", "example.com", "192.0.2.1", ""):  # noqa: S104  # refused
        assert main(["dashboard", "--host", host, "--database", database_url]) == 2
        assert "set TASKLOCK_DASHBOARD_PASSWORD" in capsys.readouterr().err


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
