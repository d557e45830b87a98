"""The dashboard gives away and changes nothing that it must not, whatever it is sent or shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from apscheduler_tasklock import TaskLockOptionError, TaskLocks
from apscheduler_tasklock.dashboard import Access
from tests.integration.dashboard.conftest import Open
from tests.support import hostile, rows
from tests.support.asgi_client import TestClient
from tests.support.markup import Markup, check_markup

SAME = {"sec-fetch-site": "same-origin"}
PAUSE = {"action": "pause", "name": "price sync", "duration": "3600", "reason": "closed"}

PAGES = ("/", "/tasks", "/runs", "/timeline", "/timeline?by=task", "/replicas", "/jobs", "/setup")
TWINS = tuple(f"/{page}.json" for page in ("overview", "tasks", "runs", "timeline", "jobs"))

# Texts that are HTML, and that end an attribute.
HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "' onmouseover='alert(1)' x='&amp;&lt;",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}</title></textarea>",
)


def is_paused(connection: psycopg.Connection[Any], task: str = "price sync") -> bool:
    found = connection.execute(
        "SELECT paused_at IS NOT NULL AS paused FROM task_lock WHERE task_name = %s", [task]
    ).fetchone()
    assert found is not None
    return bool(found[0])


@pytest.fixture(autouse=True)
def task(connection: psycopg.Connection[Any]) -> str:
    rows.add_task(connection, "price sync", **rows.FAILING)
    rows.add_replica(connection, "replica", ["price sync"])
    rows.add_job(connection, "a job")
    return "price sync"


def test_without_authorize_nothing_can_be_changed(
    reader: TestClient, connection: psycopg.Connection[Any]
) -> None:
    assert reader.post("/act", data=PAUSE, headers=SAME).status_code == 403
    assert reader.get("/confirm", params=PAUSE).status_code == 403
    assert not is_paused(connection)


@pytest.mark.parametrize("page", [*PAGES, "/task?name=price+sync", "/why?name=price+sync"])
def test_pages_of_readers_have_no_actions(page: str, reader: TestClient) -> None:
    seen = reader.get(page)
    assert seen.status_code == 200
    assert not [link for link in Markup(seen.text).links if link.startswith(("confirm", "act"))]
    assert 'method="post"' not in seen.text


def test_operators_act_and_are_named(
    operator: TestClient, database_url: str, connection: psycopg.Connection[Any]
) -> None:
    assert "confirm?" in operator.get("/task?name=price+sync").text
    asked = operator.get("/confirm", params={"action": "pause", "name": "price sync"})
    assert asked.status_code == 200
    check_markup(asked.text)
    done = operator.post("/act", data=PAUSE, headers=SAME)
    assert done.status_code == 303
    assert done.headers["location"] == "task?done=pause&name=price+sync"
    with TaskLocks(database_url) as locks:
        [pause] = locks.tasks("price sync")[0].pauses
    assert (pause.by, pause.reason) == ("ann", "closed")
    assert "ann" in operator.get("/task?name=price+sync&done=pause").text


def test_a_resumed_task_that_stays_paused_is_not_told_as_resumed(
    operator: TestClient, database_url: str
) -> None:
    with TaskLocks(database_url) as locks:
        locks.pause("price sync", by="bob")
    form = {"action": "resume", "name": "price sync"}
    done = operator.post("/act", data=form, headers=SAME)
    text = operator.get(f"/{done.headers['location']}").text
    assert "still paused has a pause of somebody else" in text
    assert "bob" in text


def test_what_was_done_shows_also_if_another_process_answers_next(open_dashboard: Open) -> None:
    one, other = (
        open_dashboard(authorize=lambda _request: Access("operate", "ann")) for _ in range(2)
    )
    assert "closed" not in other.get("/task?name=price+sync").text
    done = one.post("/act", data=PAUSE, headers=SAME)
    assert "closed" in other.get(f"/{done.headers['location']}").text


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": ""},
        {"sec-fetch-site": "cross-site", "origin": "http://testserver"},
        {"origin": "http://evil.example"},
        {"origin": "http://testserver.evil.example"},
        {"origin": "http://testserver:81"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": ""},
        {"origin": "null", "host": ""},
        {"origin": "http://", "host": ""},
        {"origin": "", "host": ""},
    ],
    ids=str,
)
def test_forms_of_other_sites_are_rejected(
    headers: dict[str, str], operator: TestClient, connection: psycopg.Connection[Any]
) -> None:
    answer = operator.post("/act", data=PAUSE, headers=headers)
    assert answer.status_code == 403
    assert not is_paused(connection)


@pytest.mark.parametrize("headers", [SAME, {"origin": "http://testserver"}], ids=str)
def test_forms_of_own_pages_are_accepted(
    headers: dict[str, str], operator: TestClient, connection: psycopg.Connection[Any]
) -> None:
    assert operator.post("/act", data=PAUSE, headers=headers).status_code == 303
    assert is_paused(connection)


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/tasks", "/overview.json", "/static/dashboard.css", "/static/dashboard.js"),
        *("/nothing", "/nothing/here", "/static/nothing", "/task?name=nothing", "/tasks?page=x"),
        *("/act", "/confirm", "/tasks.json?page=x"),
    ],
)
def test_each_answer_limits_what_a_browser_does_with_it(path: str, reader: TestClient) -> None:
    answer = reader.get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "same-origin"
    is_file = path.startswith("/static/")
    assert ("cache-control" in answer.headers) is not is_file


def test_an_authorize_that_fails_lets_nobody_in(open_dashboard: Open) -> None:
    def fail(_request: Request) -> Access:
        raise RuntimeError("secret reason")

    no_access = SimpleNamespace(may_operate=True, by=None)
    for authorize in (fail, lambda _request: "operate", lambda _request: no_access):
        browser = open_dashboard(authorize=authorize)
        for answer in (browser.get("/tasks"), browser.post("/act", data=PAUSE, headers=SAME)):
            assert answer.status_code == 500
            assert "price sync" not in answer.text
            assert "secret reason" not in answer.text
            assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("status", [401, 440])
def test_an_authorize_may_answer_by_itself(open_dashboard: Open, status: int) -> None:
    def log_in_first(_request: Request) -> Access:
        raise HTTPException(status, "log in first", {"x-login": "/login"})

    answer = open_dashboard(authorize=log_in_first).get("/tasks")
    assert (answer.status_code, answer.headers["x-login"]) == (status, "/login")
    assert "log in first" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_an_access_has_one_of_two_rights() -> None:
    with pytest.raises(TaskLockOptionError, match="'read' or 'operate', not 'Operate'"):
        Access("Operate")  # type: ignore[arg-type]  # which is tested


@pytest.mark.parametrize("by", ["a\0b", "\udcff", 5])
def test_an_operators_name_is_a_text_that_can_be_stored(by: Any) -> None:
    with pytest.raises(TaskLockOptionError, match="by must be a text"):
        Access("operate", by)


def test_a_request_that_authorize_refuses_sees_nothing(open_dashboard: Open) -> None:
    async def nobody(_request: Request) -> Access | None:
        return None

    class Nobody:
        async def __call__(self, _request: Request) -> Access | None:
            return None

    for authorize in (lambda _request: None, nobody, Nobody()):
        browser = open_dashboard(authorize=authorize)
        for path in (*PAGES, *TWINS, "/task?name=price+sync", "/confirm?action=pause-all"):
            answer = browser.get(path)
            assert answer.status_code == 403
            assert "price sync" not in answer.text


def test_authorize_may_be_a_coroutine_function(open_dashboard: Open) -> None:
    async def authorize(request: Request) -> Access | None:
        return Access("operate", request.headers["x-user"])

    browser = open_dashboard(authorize=authorize)
    answer = browser.get("/task?name=price+sync", headers={"x-user": "bob"})
    assert answer.status_code == 200
    assert "confirm?" in answer.text


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_that_are_html_are_shown_as_texts(
    text: str, operator: TestClient, connection: psycopg.Connection[Any]
) -> None:
    quoted = hostile.literal(text)
    replica = hostile.literal(f"replica {text}")
    failed = {"locked_by": replica, "error_type": quoted, **rows.paused(by=quoted, reason=quoted)}
    rows.add_task(connection, text, **{**rows.FAILING, **failed})
    rows.add_run(
        connection,
        text,
        1,
        replica=replica,
        outcome="'error'",
        error_type=quoted,
        error=quoted,
        traceback=quoted,
    )
    rows.add_action(connection, text, 1, by=quoted, reason=quoted)
    rows.add_miss(connection, text, 1, reason=quoted, replica=replica)
    rows.add_replica(connection, f"replica {text}", [text], host=quoted, version=quoted)
    rows.add_job(connection, text, func=quoted)
    asked = [("name", text), ("action", "pause"), ("token", text), ("q", text), ("at", "0")]
    for page in (*PAGES, "/task", "/why", "/confirm"):
        path, _, by = page.partition("?")
        own = [*asked, ("by", by.removeprefix("by="))]
        if path in ("/tasks", "/runs", "/jobs", "/timeline"):
            shown = operator.get(page)
            assert shown.status_code == 200, page
            check_markup(shown.text)
        answer = operator.get(path, params=own)
        assert answer.status_code == 200, (page, answer.text)
        check_markup(answer.text)


@pytest.mark.parametrize("text", HOSTILE)
def test_errors_show_what_was_sent_as_a_text(text: str, operator: TestClient) -> None:
    for path, parameters in (
        ("/task", {"name": text}),
        ("/tasks", {"page": text}),
        ("/runs", {"since": text}),
        ("/confirm", {"action": text}),
        ("/tasks", {"q": text, "state": text, "order": text, "done": text}),
    ):
        check_markup(operator.get(path, params=parameters).text)


BAD_QUERIES = (
    *("/tasks?page=-1", "/tasks?page=x", "/tasks?page=1.5", "/jobs?page=%d9%a3"),
    *("/why?name=price+sync&at=abc", "/runs?since=9999-12-31T23:59:59", "/runs?since=1e999"),
    *("/runs?until=0001-01-01T00:00", "/runs?since=99999999999999999999", "/timeline?night=x"),
    *("/timeline?night=9999-12-31", "/timeline?until=0001-01-01", "/timeline?hours=-5"),
    *("/tasks?q=%00", "/task?name=a%00b", "/runs?replica=%00", f"/tasks?q={'x' * 4001}"),
    *("/tasks?q=%ff", "/tasks?q=%ed%a0%80", "/overview.json?by=%c3%28", "/task?name=%f0%9f%92"),
    "/tasks?" + "&".join(f"a{number}=1" for number in range(1_200)),
)


@pytest.mark.parametrize("path", BAD_QUERIES, ids=lambda path: path[:40])
def test_invalid_parameters_are_rejected(path: str, reader: TestClient) -> None:
    answer = reader.get(path)
    assert answer.status_code == 400, answer.text
    if ".json" not in path:
        check_markup(answer.text)


@pytest.mark.parametrize(
    "path",
    [
        "/timeline?since=1970-01-02&until=2499-12-30",
        "/timeline?until=1970-01-02&hours=168",
        "/timeline?since=2026-01-02&until=2026-01-01",
        "/timeline?night=2026-03-29",
        "/tasks?page=99999999999999999999",
        "/runs?page=999999",
        "/tasks?q=%25_%5C&state=no+state&order=no+order",
        "/runs?outcome=none&kind=none",
    ],
)
def test_odd_parameters_are_answered(path: str, reader: TestClient) -> None:
    answer = reader.get(path)
    assert answer.status_code == 200
    assert len(answer.content) < 200_000
    for link in Markup(answer.text).links:
        if link.startswith("timeline?"):
            assert reader.get(f"/{link}").status_code == 200, link


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({}, 400),
        ({"action": "drop tables", "name": "price sync"}, 400),
        ({"action": "pause"}, 400),
        ({"action": "pause", "name": "nothing"}, 404),
        ({"action": "pause", "name": "*"}, 404),
        ({"action": "run", "name": ["price sync", "other"]}, 400),
        ({"action": "free", "name": "price sync"}, 400),
        ({"action": "free", "name": "price sync", "token": "x"}, 400),
        ({"action": "free", "name": "price sync", "token": "99"}, 409),
        ({"action": "ack", "name": "price sync"}, 400),
        ({"action": "ack", "name": "price sync", "token": "99"}, 409),
        ({"action": "ack", "name": "price sync", "token": "9" * 40}, 400),
        ({"action": "pause", "name": "a\0b"}, 400),
        ({"action": "pause", "name": "price sync", "reason": "x" * 4001}, 400),
        ({"action": "pause", "name": ["price sync"] * 1_200}, 400),
        *(
            ({"action": action, "name": "price sync", "duration": duration}, 400)
            for action in ("pause", "pause-all")
            for duration in ("600", "-900", "1e9", "inf", "900.0", "1 hour")
        ),
        ({"action": "job-remove", "name": "nothing"}, 404),
        ({"action": "job-move", "name": "a job"}, 400),
        ({"action": "job-move", "name": "a job", "to": "soon"}, 400),
        ({"action": "job-move", "name": "a job", "to": "9999-12-31T00:00"}, 400),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_forms_change_nothing(
    form: dict[str, Any], status: int, operator: TestClient, connection: psycopg.Connection[Any]
) -> None:
    before = connection.execute("SELECT task_lock FROM task_lock").fetchall()
    answer = operator.post("/act", data=form, headers=SAME)
    assert answer.status_code == status, answer.text
    check_markup(answer.text)
    assert connection.execute("SELECT task_lock FROM task_lock").fetchall() == before


@pytest.mark.parametrize(
    "body", [b"action=pause&name=%ff", b"action=pause&name=\xff", b"name=%ed%b0%80&action=pause"]
)
def test_forms_that_are_not_utf_8_are_rejected(body: bytes, operator: TestClient) -> None:
    assert operator.post("/act", content=body, headers=SAME).status_code == 400


def test_a_form_that_is_too_large_is_rejected(operator: TestClient) -> None:
    answer = operator.post("/act", content=b"a" * 300_000, headers=SAME)
    assert answer.status_code == 413
    check_markup(answer.text)


def test_tasks_of_another_namespace_are_neither_shown_nor_changed(
    open_dashboard: Open, connection: psycopg.Connection[Any]
) -> None:
    rows.add_task(connection, "shop:mail", **rows.FAILING)
    rows.add_run(connection, "price sync", 1, outcome="'error'")
    browser = open_dashboard(namespace="shop:", authorize=lambda _request: Access("operate"))
    for path in ("/", "/tasks", "/runs", "/timeline", "/tasks?q=*price*", "/runs?q=price"):
        answer = browser.get(path)
        assert answer.status_code == 200
        assert "price sync<" not in answer.text, path
    for path in ("/task?name=price+sync", "/why?name=price+sync", "/task.json?name=price+sync"):
        assert browser.get(path).status_code == 404
    for action in ("pause", "run", "free", "ack"):
        asked = {"action": action, "name": "price sync", "token": "7"}
        assert browser.get("/confirm", params=asked).status_code == 404
        assert browser.post("/act", data=asked, headers=SAME).status_code == 404
    assert browser.post("/act", data={"action": "pause-all"}, headers=SAME).status_code == 303
    assert not is_paused(connection)
    assert "shop:mail" in browser.get("/tasks").text


def test_rows_that_no_replica_writes_are_shown(
    operator: TestClient, connection: psycopg.Connection[Any]
) -> None:
    hostile.insert_good(connection)
    names = {case: case.insert(connection) for case in hostile.CASES}
    for path in (*PAGES, *TWINS, "/replicas.json", "/tasks?order=due", "/jobs?page=2"):
        answer = operator.get(path)
        assert answer.status_code == 200, (path, answer.text[:500])
        if ".json" not in path:
            check_markup(answer.text)
    for case in hostile.of(hostile.TASKS):
        if len(names[case]) <= 4_000:
            for page in ("/task", "/task.json", "/why"):
                answer = operator.get(page, params={"name": names[case]})
                assert answer.status_code in (200, 404), (page, case, answer.text[:500])
