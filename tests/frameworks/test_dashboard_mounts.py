"""The dashboard mounted in FastAPI, Starlette, Flask and Django, and behind a proxy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from html.parser import HTMLParser
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import psycopg
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request

from apscheduler_tasklock.dashboard import Access
from apscheduler_tasklock.django.dashboard import access_of
from tests.frameworks.servers import environment_of, served
from tests.support import rows
from tests.support.asgi_client import TestClient
from tests.support.dashboards import patient_dashboard
from tests.support.django_project import DjangoProject
from tests.support.polling import eventually

SAME = {"sec-fetch-site": "same-origin"}
PAUSE = {"action": "pause", "name": "mail"}


class Links(HTMLParser):
    """The addresses in a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page)

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {link for name, link in attrs if name in ("href", "src") and link}


def answered(browser: TestClient, path: str) -> Any:
    """Return a page, which is asked for again if the database has not answered in time."""

    def page() -> Any:
        found = browser.get(path)
        return None if found.status_code == HTTPStatus.SERVICE_UNAVAILABLE else found

    return eventually(page)


@pytest.fixture(autouse=True)
def task(request: pytest.FixtureRequest) -> None:
    if "project" in request.fixturenames:
        return
    connection: psycopg.Connection[Any] = request.getfixturevalue("connection")
    rows.add_task(connection, "mail")
    rows.add_replica(connection, "one", ["mail"])


@pytest.mark.parametrize(
    ("make", "prefix", "root_path"),
    [
        (FastAPI, "/tasklock", "/proxy"),
        (FastAPI, "/static/ops/tasklock", ""),
        (Starlette, "/tasklock", ""),
        (Starlette, "/static/ops/tasklock", "/proxy"),
    ],
)
def test_each_link_of_a_mounted_dashboard_leads_to_a_page(
    make: Any, prefix: str, root_path: str, database_url: str
) -> None:
    async def authorize(_request: Request) -> Access:
        return Access("operate", "ann")

    mounted = patient_dashboard(database_url, authorize=authorize)
    app = make()
    app.mount(prefix, mounted)
    with (
        TestClient(mounted),  # which closes its connection at the end
        TestClient(app, root_path=root_path, follow_redirects=False) as browser,
    ):
        bare = browser.get(f"{root_path}{prefix}")
        assert bare.status_code == 307
        assert bare.headers["location"].endswith(f"{root_path}{prefix}/")
        first = f"{root_path}{prefix}/"
        seen, waiting = set(), [first]
        while waiting and len(seen) < 60:
            path = waiting.pop()
            page = answered(browser, path)
            assert page.status_code in (200, 400), path
            seen.add(path)
            if page.headers["content-type"].startswith("text/html"):
                assert page.headers["cache-control"] == "no-store"
                found = {urljoin(path, link) for link in Links(page.text).found if link[0] != "#"}
                assert all(link.startswith(first) for link in found)
                waiting += sorted(found - seen - set(waiting))
        assert len(seen) > 20
        # Pages lie one level deep, so links of a page at another level would lead nowhere.
        for path in ("nothing/here", "tasks/", "static/nothing"):
            missing = browser.get(f"{first}{path}")
            assert missing.status_code == 404
            assert missing.headers["content-type"].startswith("text/plain")
        done = browser.post(f"{first}act", data=PAUSE, headers=SAME)
        assert urljoin(f"{first}act", done.headers["location"]).startswith(f"{first}task?")


FLASK = """
import os
from flask import Flask, abort, request, session
from apscheduler_tasklock.dashboard import Access
from apscheduler_tasklock.flask import mount_dashboard

app = Flask(__name__)
app.secret_key = "secret"
app.config["TASKLOCK_DATABASE_URL"] = os.environ["TASKLOCK_DATABASE_URL"]

@app.before_request
def read_form():
    if "X-Read" in request.headers:
        request.form

@app.get("/login/<name>")
def login(name):
    session["name"] = name
    return "hello"

def authorize():
    name = session.get("name")
    if name is None:
        abort(401)
    return {"nobody": None, "reader": Access("read")}.get(name, Access("operate", name))

mount_dashboard(app, "/ops/tasklock", authorize=authorize)
"""

# No machine is so slow that an answer takes longer.
WITH_PATIENCE = """
import dataclasses
from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock.dashboard import app as pages
TaskLocks.timings = dataclasses.replace(TaskLocks.timings, longest_answer=60.0)
pages.TIMEOUT = 60.0
"""

IN_FLASK = f"""{WITH_PATIENCE}
import json, sys
from app import app
answers = []
for name, method, path, data, headers in json.loads(sys.argv[1]):
    client = app.test_client()
    if name:
        client.get("/login/" + name)
    data = "a" * data if isinstance(data, int) else data
    answer = getattr(client, method)(path, data=data, headers=headers)
    answers.append([answer.status_code, dict(answer.headers), answer.get_data(as_text=True)])
print("answers:" + json.dumps(answers))
"""


def ask_flask(folder: Path, database_url: str, *requests: Any, app: str = FLASK) -> list[Any]:
    (folder / "app.py").write_text(app)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IN_FLASK, json.dumps(requests)],
        cwd=folder,
        env={**environment_of(folder), "TASKLOCK_DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [answers] = re.findall(r"^answers:(.*)$", done.stdout, re.M)
    found: list[Any] = json.loads(answers)
    return found


def test_flask_asks_authorize_in_the_context_of_the_request(
    tmp_path: Path, database_url: str, connection: psycopg.Connection[Any]
) -> None:
    root = "/ops/tasklock"
    answers = ask_flask(
        tmp_path,
        database_url,
        ("", "get", f"{root}/", None, {}),
        ("nobody", "get", f"{root}/", None, {}),
        ("reader", "get", f"{root}/task?name=mail", None, {}),
        ("reader", "post", f"{root}/act", PAUSE, SAME),
        ("ann", "post", f"{root}/act", PAUSE, {"sec-fetch-site": "cross-site"}),
        ("ann", "get", root, None, {}),
        ("ann", "get", f"{root}/static/dashboard.css", None, {}),
        ("ann", "get", f"{root}/overview.json", None, {}),
        ("ann", "get", f"{root}/tasks?q=%ff", None, {}),
        ("ann", "post", f"{root}/act", 300_000, SAME),
        ("ann", "post", f"{root}/act", PAUSE, {**SAME, "X-Read": "1"}),
    )
    statuses = [status for status, _, _ in answers]
    assert statuses == [401, 403, 200, 403, 403, 302, 200, 200, 400, 413, 303]
    assert "mail" in answers[2][2]
    assert answers[5][1]["Location"] == "tasklock/"
    headers = {name.lower(): value for name, value in answers[2][1].items()}
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "confirm?" not in answers[2][2]
    found = connection.execute("SELECT pauses->0->>'by' FROM task_lock").fetchone()
    assert found == ("ann",)


IN_CHILD = f"""{WITH_PATIENCE}
import os
from app import app
path = "/ops/tasklock/tasks"
assert app.test_client().get(path).status_code == 200
child = os.fork()
if child == 0:
    os._exit(0 if "mail" in app.test_client().get(path).text else 1)
assert os.waitpid(child, 0)[1] == 0
assert app.test_client().get(path).status_code == 200
"""


def test_flask_serves_it_in_a_child_that_was_forked_after_a_request(
    tmp_path: Path, database_url: str
) -> None:
    (tmp_path / "app.py").write_text(FLASK.replace(", authorize=authorize)", ")"))
    done = subprocess.run(
        [sys.executable, "-c", IN_CHILD],
        cwd=tmp_path,
        env={**environment_of(tmp_path), "TASKLOCK_DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_flask_without_authorize_is_read_only(tmp_path: Path, database_url: str) -> None:
    app = FLASK.replace(", authorize=authorize)", ")")
    page, act = ask_flask(
        tmp_path,
        database_url,
        ("", "get", "/ops/tasklock/tasks", None, {}),
        ("", "post", "/ops/tasklock/act", PAUSE, SAME),
        app=app,
    )
    assert (page[0], act[0]) == (200, 403)


def test_flask_without_locks_has_no_dashboard(tmp_path: Path, database_url: str) -> None:
    app = FLASK.replace("\nmount_", "\napp.config['TASKLOCK_ENABLED'] = False\nmount_")
    [page] = ask_flask(tmp_path, database_url, ("ann", "get", "/ops/tasklock/", None, {}), app=app)
    assert page[0] == 404


@pytest.mark.nightly
def test_flask_serves_it_in_each_worker_of_a_preloaded_application(
    tmp_path: Path, database_url: str, connection: psycopg.Connection[Any]
) -> None:
    (tmp_path / "app.py").write_text(FLASK.replace(", authorize=authorize)", ")"))

    def connections() -> int:
        return connection.execute(
            "SELECT FROM pg_stat_activity WHERE application_name LIKE 'tasklock %'"
        ).rowcount

    environment = {"TASKLOCK_DATABASE_URL": database_url}
    command = "gunicorn app:app --preload --workers 2"
    with served(command, tmp_path, environment, tmp_path / "log") as server:

        def page() -> str:
            with suppress(urllib.error.URLError):
                url = f"http://127.0.0.1:{server.port}/ops/tasklock/tasks"
                with urllib.request.urlopen(url, timeout=30) as answer:
                    text: str = answer.read().decode()
                    return text
            return ""

        eventually(lambda: "mail" in page() and connections() == 2)
        said = server.stopped()
    assert "Traceback" not in said, said
    eventually(lambda: connections() == 0)


URLS = """
from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/tasklock/", include("apscheduler_tasklock.django.dashboard")),
    path("admin/", admin.site.urls),
]
"""

IN_DJANGO = """
import asyncio
from urllib.parse import urlencode
from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import AsyncClient, Client
kind, user, permissions, requests = json.loads(sys.argv[1])
if user:
    account, _ = get_user_model().objects.get_or_create(
        username=user, is_staff=True, is_superuser=permissions is None
    )
    account.user_permissions.set(Permission.objects.filter(codename__in=permissions or ()))
answers = []
given = {"enforce_csrf_checks": True, "raise_request_exception": False}
def form(method, data):
    if method == "get":
        return [data]
    return [urlencode(data), "application/x-www-form-urlencoded"]
def kept(page):
    answers.append([page.status_code, dict(page.headers), b"".join(page).decode()])
def ask():
    client = Client(**given)
    if user:
        client.force_login(account)
    for method, path, data, headers in requests:
        kept(getattr(client, method)(path, *form(method, data), headers=headers))
async def ask_async():
    client = AsyncClient(**given)
    await sync_to_async(client.force_login)(account)  # Django 4.2 has no aforce_login
    for method, path, data, headers in requests:
        kept(await getattr(client, method)(path, *form(method, data), headers=headers))
asyncio.run(ask_async()) if kind == "async" else ask()
answer(answers)
"""


def ask_django(
    project: DjangoProject,
    *requests: Any,
    kind: str = "sync",
    user: str = "ann",
    permissions: list[str] | None = None,
) -> list[Any]:
    found: list[Any] = project.ask(IN_DJANGO, [kind, user, permissions, requests])
    return found


@pytest.fixture
def site(project: DjangoProject, empty_database_url: str) -> DjangoProject:
    project.write("project/urls.py", URLS)
    project.configure('ALLOWED_HOSTS = ["testserver"]')
    project.manage("migrate")
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        rows.add_task(connection, "mail <b>")
        rows.add_replica(connection, "one", ["mail <b>"])
    return project


ROOT = "/admin/tasklock/dashboard"
IN_FRAME = {"action": "pause", "name": "mail <b>"}


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_django_shows_it_in_the_frame_of_the_admin(
    kind: str, site: DjangoProject, empty_database_url: str
) -> None:
    answers = ask_django(
        site,
        ("get", f"{ROOT}/", {}, {}),
        ("get", f"{ROOT}/task", {"name": "mail <b>"}, {}),
        ("get", f"{ROOT}/overview.json", {}, {}),
        ("get", f"{ROOT}/static/dashboard.css", {}, {}),
        ("get", f"{ROOT}/task", {"name": "<script>alert(1)</script>"}, {}),
        ("get", f"{ROOT}/tasks", {"page": "-1"}, {}),
        ("post", f"{ROOT}/act", IN_FRAME, {"sec-fetch-site": "cross-site"}),
        ("post", f"{ROOT}/act", IN_FRAME, {}),
        ("post", f"{ROOT}/act", IN_FRAME, SAME),
        ("get", ROOT, {}, {}),
        ("get", "/admin/apscheduler_tasklock/task/", {}, {}),
        kind=kind,
    )
    statuses = [status for status, _, _ in answers]
    assert statuses == [200, 200, 200, 200, 404, 400, 403, 403, 303, 302, 200]
    for _, given, text in answers[:2]:
        headers = {name.lower(): value for name, value in given.items()}
        assert "user-tools" in text
        assert 'class="breadcrumbs"' in text
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
    assert "mail &lt;b&gt;" in answers[1][2]
    assert "mail <b>" not in answers[1][2]
    assert "confirm?" in answers[1][2]
    assert "<script>alert" not in answers[4][2]
    assert "overview" in json.loads(answers[2][2])
    assert f'href="{ROOT}/"' in answers[10][2]
    with psycopg.connect(empty_database_url) as connection:
        found = connection.execute("SELECT pauses->0->>'by' FROM task_lock").fetchone()
    assert found == ("ann",)


class User:
    """A user of Django with these permissions of the app."""

    def __init__(self, *permissions: str) -> None:
        self._permissions = {f"apscheduler_tasklock.{each}" for each in permissions}

    def has_perm(self, permission: str) -> bool:
        return permission in self._permissions

    def get_username(self) -> str:
        return "bob"


VIEWS = ("view_task", "view_run", "view_replica", "view_job")


@pytest.mark.parametrize(
    ("permissions", "right"),
    [
        ((), None),
        (VIEWS[:3], None),
        (VIEWS[1:], None),
        (("view_task", "view_run", "view_job"), None),
        (("view_task", "view_replica", "view_job"), None),
        (VIEWS, "read"),
        ((*VIEWS, "change_task"), "read"),
        ((*VIEWS, "change_job"), "read"),
        ((*VIEWS, "change_run", "change_replica"), "read"),
        ((*VIEWS, "change_task", "change_job"), "operate"),
        (("view_run", "view_replica", "change_task", "change_job"), "operate"),
        (("change_task", "change_job"), None),
    ],
)
def test_a_user_of_django_needs_the_rights_to_all_lists_and_to_both_that_have_actions(
    permissions: tuple[str, ...], right: str | None
) -> None:
    access = access_of(User(*permissions))
    assert (access and access.right) == right
    assert access is None or access.by == "bob"


# Prints, for users with the right to view or to change each list, what the admin lets them do.
RIGHTS = """
import json
import django
from types import SimpleNamespace
from django.conf import settings
apps = ["admin", "auth", "contenttypes", "messages", "sessions"]
settings.configure(
    INSTALLED_APPS=[f"django.contrib.{app}" for app in apps] + ["apscheduler_tasklock.django"],
)
django.setup()
from django.contrib import admin
found = {}
for right in ("view", "change"):
    class User:
        def has_perm(self, permission):
            return permission.startswith(f"apscheduler_tasklock.{right}_")
    request = SimpleNamespace(user=User())
    for model, each in admin.site._registry.items():
        if model._meta.app_label == "apscheduler_tasklock":
            operates = getattr(each, "has_operate_permission", lambda _: None)(request)
            others = [each.has_add_permission(request), each.has_delete_permission(request)]
            others += [each.has_change_permission(request)]
            found[f"{right} {model._meta.model_name}"] = [operates, any(others)]
print(json.dumps(found))
"""


def test_who_may_view_djangos_lists_has_none_of_their_actions(checkout: Path) -> None:
    command = [sys.executable, "-c", RIGHTS]
    told = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True)
    assert json.loads(told.stdout) == {
        "view task": [False, False],
        "view run": [None, False],
        "view replica": [None, False],
        "view job": [False, False],
        "change task": [True, False],
        "change run": [None, False],
        "change replica": [None, False],
        "change job": [True, False],
    }


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_django_asks_for_the_permissions_of_the_admins_lists(site: DjangoProject) -> None:
    page, act = ("get", f"{ROOT}/tasks", {}, {}), ("post", f"{ROOT}/act", IN_FRAME, SAME)
    seen = ["view_task", "view_run", "view_replica", "view_job"]
    for permissions, statuses in (
        ([], [403, 403]),
        (seen[:3], [403, 403]),
        (seen, [200, 403]),
        ([*seen, "change_task"], [200, 403]),
        ([*seen, "change_task", "change_job"], [200, 303]),
    ):
        answers = ask_django(site, page, act, user="bob", permissions=permissions)
        assert [status for status, _, _ in answers] == statuses, permissions
        assert ("mail" in answers[0][2]) is (statuses[0] == 200)
    [[status, headers, _]] = ask_django(site, page, user="")
    assert status == 302
    assert "/admin/login/" in headers["Location"]
