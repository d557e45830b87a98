"""The dashboard while its database is away, silent, locked, without tables or without rights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from apscheduler_tasklock.dashboard import Access
from tests.integration.dashboard.conftest import Open
from tests.support import rows
from tests.support.asgi_client import TestClient
from tests.support.outages import refuse, restore, swallow
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.roles import role

PAGES = ("/", "/tasks", "/runs", "/timeline", "/replicas", "/jobs", "/task?name=mail")
SAME = {"sec-fetch-site": "same-origin"}


@pytest.fixture(autouse=True)
def task(connection: psycopg.Connection[Any]) -> None:
    rows.add_task(connection, "mail")
    rows.add_run(connection, "mail", 1)
    rows.add_replica(connection, "one", ["mail"])


def says_outage(answer: Any) -> bool:
    return "The database is unavailable" in answer.text


def is_read(answer: Any) -> bool:
    """Return whether a page has all that it shows: on a slow machine a read may be too slow."""
    return not (says_outage(answer) or "could not be read" in answer.text)


@pytest.mark.parametrize("fail", [refuse, pytest.param(swallow, marks=pytest.mark.nightly)])
def test_an_outage_shows_what_was_read_before_and_passes(
    fail: Callable[[Proxy], None], proxy: Proxy, open_dashboard: Open
) -> None:
    browser = open_dashboard(proxy.url, hurry=True)
    for page in PAGES[:-3]:
        eventually(lambda page=page: is_read(browser.get(page)))
    fail(proxy)
    shown = eventually(lambda: (found := browser.get("/tasks")) and says_outage(found) and found)
    assert shown.status_code == 200
    assert "mail" in shown.text
    assert "This page shows what was read" in shown.text
    twin = browser.get("/tasks.json")
    assert twin.json()["outage"]
    assert [each["name"] for each in twin.json()["tasks"]] == ["mail"]
    # What nobody has looked at before cannot be shown, and nothing untrue is told of it.
    unknown = browser.get("/jobs")
    assert says_outage(unknown)
    assert "has not been read before" in unknown.text
    assert "The job store has no jobs" not in unknown.text
    restore(proxy)
    eventually(lambda: not says_outage(browser.get("/tasks")))
    eventually(lambda: browser.get("/jobs").status_code == 200)  # the first read may be too slow


def test_each_page_says_that_the_database_was_never_there(
    proxy: Proxy, open_dashboard: Open
) -> None:
    refuse(proxy)
    operate = Access("operate", "ann")
    browser = open_dashboard(proxy.url, hurry=True, authorize=lambda _request: operate)
    for page in PAGES:
        answer = browser.get(page)
        assert answer.status_code == 503
        assert says_outage(answer)
        assert "No replica has registered" not in answer.text
        assert "Nothing " not in answer.text
    assert browser.get("/overview.json").status_code == 503
    assert "connection" in browser.get("/setup").text  # what the doctor finds of it
    assert browser.get("/setup.json").json()["findings"][-1]["level"] == "wrong"
    form = {"action": "pause", "name": "mail"}
    assert browser.post("/act", data=form, headers=SAME).status_code == 503


@pytest.mark.nightly
@pytest.mark.direct("a statement that waits for a lock holds one of pgbouncer's connections")
def test_a_statement_that_waits_for_a_locked_table_is_cancelled(
    reader: TestClient, connection: psycopg.Connection[Any], direct_url: str
) -> None:
    assert reader.get("/tasks").status_code == 200
    with psycopg.connect(direct_url) as other:
        other.execute("LOCK TABLE task_lock IN ACCESS EXCLUSIVE MODE")
        shown = eventually(lambda: (found := reader.get("/tasks")) and says_outage(found) and found)
        assert "mail" in shown.text
        waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        eventually(lambda: connection.execute(waiting).rowcount == 0)
    eventually(lambda: not says_outage(reader.get("/tasks")))


def test_missing_tables_are_told_with_what_to_do(
    empty_database_url: str, open_dashboard: Open
) -> None:
    browser = open_dashboard(empty_database_url)
    for page in PAGES[:-3]:
        answer = browser.get(page)
        assert answer.status_code == 503
        assert "apscheduler-tasklock upgrade" in answer.text
    found = browser.get("/setup")
    assert found.status_code == 200
    assert "apscheduler-tasklock upgrade" in found.text


def test_a_missing_right_is_told_with_what_to_do(
    database_url: str, connection: psycopg.Connection[Any], open_dashboard: Open
) -> None:
    with role(database_url) as (name, url):
        browser = open_dashboard(url)
        answer = browser.get("/tasks")
        assert answer.status_code == 503
        assert "GRANT" in answer.text
        assert name in answer.text
        grant = sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA public TO {}")
        connection.execute(grant.format(sql.Identifier(name)))
        eventually(lambda: "mail" in browser.get("/tasks").text)


@pytest.mark.direct("roles log in by themselves")
def test_replicas_that_cannot_be_read_are_not_taken_for_dead_ones(
    database_url: str, connection: psycopg.Connection[Any], open_dashboard: Open
) -> None:
    with role(database_url) as (name, url):
        grant = sql.SQL("GRANT SELECT ON task_lock, task_lock_run TO {}")
        connection.execute(grant.format(sql.Identifier(name)))
        browser = open_dashboard(url)
        text = browser.get("/").text
        assert "the replicas cannot be read" in text
        assert "no replica is alive" not in text
        assert "All is well" not in text
        assert "replicas alive" not in text
        assert browser.get("/overview.json").json()["overview"]["alive"] is None
        assert "GRANT" in browser.get("/replicas").text


def test_no_page_has_the_password(database_url: str, open_dashboard: Open) -> None:
    url = make_url(database_url).set(username="nobody", password="hunter2-secret")
    browser = open_dashboard(url.render_as_string(hide_password=False))
    twins = ("/overview.json", "/tasks.json", "/setup.json", "/replicas.json")
    for page in (*PAGES, *twins, "/setup", "/nothing"):
        assert "hunter2" not in browser.get(page).text


def test_no_page_has_the_message_of_an_engines_own_error(open_dashboard: Open) -> None:
    def creator() -> Any:
        raise RuntimeError("the vault refuses the token hunter2-secret")

    engine = create_engine("postgresql+psycopg://", creator=creator)
    browser = open_dashboard(engine, authorize=lambda _request: Access("operate", "ann"))
    for page in (*PAGES, "/setup", "/overview.json", "/setup.json"):
        text = browser.get(page).text
        assert "RuntimeError" in text
        assert "hunter2" not in text
    answer = browser.post("/act", data={"action": "pause", "name": "mail"}, headers=SAME)
    assert answer.status_code == 503
    assert "RuntimeError" in answer.text
    assert "hunter2" not in answer.text
