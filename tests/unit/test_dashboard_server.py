"""The command ``dashboard``: who may open it, and under which name."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from apscheduler_tasklock.cli import main
from apscheduler_tasklock.dashboard.server import Gate, Login
from tests.support.asgi_client import TestClient
from tests.support.pages import Known, app
from tests.support.rows import replica_status, task_status

# Where nothing listens.
URL = "postgresql://127.0.0.1:1/nothing"
SAME = {"sec-fetch-site": "same-origin"}
PAUSE = {"action": "pause", "name": "mail"}


@contextmanager
def browsing(known: Known, login: Login, *, on_loopback: bool) -> Iterator[TestClient]:
    gate = Gate(app(known, authorize=login.authorize), login, on_loopback=on_loopback)
    with TestClient(gate, base_url="http://127.0.0.1:8765", follow_redirects=False) as browser:
        yield browser


def basic(user: str, password: str) -> dict[str, str]:
    encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"authorization": f"Basic {encoded}"}


@pytest.fixture
def known() -> Known:
    return Known([task_status("mail")], replicas_=[replica_status("one", tasks=("mail",))])


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
def test_on_loopback_another_name_is_refused(host: str, known: Known) -> None:
    with browsing(known, Login(None, may_operate=True), on_loopback=True) as browser:
        for answer in (
            browser.get("/", headers={"host": host}),
            browser.post("/act", data=PAUSE, headers={"host": host, **SAME}),
        ):
            assert answer.status_code == 421
            assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8765", "127.0.0.1:1", "[::1]:8765"])
def test_on_loopback_its_own_names_are_served(host: str, known: Known) -> None:
    with browsing(known, Login(None, may_operate=False), on_loopback=True) as browser:
        assert browser.get("/", headers={"host": host}).status_code == 200


def test_without_operate_the_command_is_read_only(known: Known) -> None:
    with browsing(known, Login(None, may_operate=False), on_loopback=True) as browser:
        assert browser.post("/act", data=PAUSE, headers=SAME).status_code == 403
    with browsing(known, Login(None, may_operate=True), on_loopback=True) as browser:
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
def test_the_password_is_asked_for(headers: dict[str, str], known: Known) -> None:
    with browsing(known, Login("pässword", may_operate=True), on_loopback=False) as browser:
        for path in ("/", "/tasks.json", "/static/dashboard.css", "/nothing"):
            answer = browser.get(path, headers={k: v.encode() for k, v in headers.items()})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Basic ")
            assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_a_probe_needs_no_password(known: Known) -> None:
    with browsing(known, Login("pässword", may_operate=True), on_loopback=False) as browser:
        asked = ("/health", "/health?verdict", "/metrics", "/health/", "/x/health")
        statuses = [browser.get(path).status_code for path in asked]
    assert statuses == [200, 401, 401, 401, 401]


def test_a_name_that_cannot_be_stored_is_rejected(known: Known) -> None:
    headers = {**basic("a\0b", "pässword"), **SAME}
    with browsing(known, Login("pässword", may_operate=True), on_loopback=False) as browser:
        assert browser.post("/act", data=PAUSE, headers=headers).status_code == 400
    assert known.changes == []


def test_a_password_that_is_not_utf_8_is_rejected_at_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKLOCK_DASHBOARD_PASSWORD", os.fsdecode(b"secret\xff"))
    assert main(["dashboard", "--database", URL]) == 2
    said = capsys.readouterr().err
    assert "is not UTF-8" in said
    assert "secret" not in said


def test_another_host_demands_a_password(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKLOCK_DASHBOARD_PASSWORD", "")
    for host in ("0.0.0.0", "::", "example.com", "192.0.2.1", ""):  # noqa: S104  # refused
        assert main(["dashboard", "--host", host, "--database", URL]) == 2
        assert "set TASKLOCK_DASHBOARD_PASSWORD" in capsys.readouterr().err
