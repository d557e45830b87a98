"""The dashboard gives away and changes nothing that it must not, whatever it is sent or shows.

The requests go through its application, over rows that are read of no database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from apscheduler_tasklock import TaskLockOptionError
from apscheduler_tasklock.dashboard import Access
from apscheduler_tasklock.status import Finding, Pause
from tests.support.asgi_client import TestClient
from tests.support.markup import Markup, check_markup
from tests.support.pages import Known, app
from tests.support.rows import (
    NOW,
    READ,
    action_read,
    job_status,
    miss_read,
    replica_status,
    run_read,
    task_status,
)

Open = Callable[..., TestClient]

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


@pytest.fixture
def known() -> Known:
    return Known(
        [task_status("price sync", **READ["failing"])],
        replicas_=[replica_status("replica", tasks=("price sync",))],
        jobs_=[job_status("a job")],
    )


@pytest.fixture
def open_dashboard(known: Known) -> Iterator[Open]:
    """Open a dashboard as a browser that follows no redirects; by default anybody may read."""
    with ExitStack() as stack:

        def open_(**options: Any) -> TestClient:
            return stack.enter_context(
                TestClient(
                    app(known, **options), raise_server_exceptions=False, follow_redirects=False
                )
            )

        yield open_


@pytest.fixture
def reader(open_dashboard: Open) -> TestClient:
    return open_dashboard()


@pytest.fixture
def operator(open_dashboard: Open) -> TestClient:
    return open_dashboard(authorize=lambda _request: Access("operate", "ann"))


def test_without_authorize_nothing_can_be_changed(reader: TestClient, known: Known) -> None:
    assert reader.post("/act", data=PAUSE, headers=SAME).status_code == 403
    assert reader.get("/confirm", params=PAUSE).status_code == 403
    assert known.changes == []


@pytest.mark.parametrize("page", [*PAGES, "/task?name=price+sync", "/why?name=price+sync"])
def test_pages_of_readers_have_no_actions(page: str, reader: TestClient) -> None:
    seen = reader.get(page)
    assert seen.status_code == 200
    assert not [link for link in Markup(seen.text).links if link.startswith(("confirm", "act"))]
    assert 'method="post"' not in seen.text


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
    headers: dict[str, str], operator: TestClient, known: Known
) -> None:
    answer = operator.post("/act", data=PAUSE, headers=headers)
    assert answer.status_code == 403
    assert known.changes == []


@pytest.mark.parametrize("headers", [SAME, {"origin": "http://testserver"}], ids=str)
def test_forms_of_own_pages_are_accepted(
    headers: dict[str, str], operator: TestClient, known: Known
) -> None:
    assert operator.post("/act", data=PAUSE, headers=headers).status_code == 303
    asked = {"duration": 3600.0, "by": "ann", "reason": "closed"}
    assert known.changes == [("pause", ("price sync",), asked)]


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
    text: str, operator: TestClient, known: Known
) -> None:
    replica = f"replica {text}"
    failed = {"holder": replica, "error_type": text}
    pause = Pause(text, NOW, None, text)
    known.tasks_ = [
        *known.tasks_,
        task_status(text, **{**READ["failing, paused"], **failed, "pauses": (pause,)}),
    ]
    error = {"outcome": "error", "error_type": text, "error": text, "traceback": text}
    known.runs_ = [
        run_read(task=text, replica=replica, **error),
        action_read(task=text, by=text, reason=text),
        miss_read(task=text, reason=text, replica=replica),
    ]
    known.replicas_ = [
        *known.replicas_,
        replica_status(replica, tasks=(text,), host=text, version=text, rejected=(text,)),
    ]
    known.jobs_ = [*known.jobs_, job_status(text, name=text, function=text, executor=text)]
    known.findings = [Finding(text, "wrong", text, text)]
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
        ({"action": "pause", "name": "*"}, 404),
        ({"action": "run", "name": ["price sync", "other"]}, 400),
        ({"action": "free", "name": "price sync"}, 400),
        ({"action": "ack", "name": "price sync"}, 400),
        ({"action": "pause", "name": "a\0b"}, 400),
        ({"action": "pause", "name": "price sync", "reason": "x" * 4001}, 400),
        ({"action": "pause", "name": ["price sync"] * 1_200}, 400),
        *(
            ({"action": action, "name": "price sync", "duration": duration}, 400)
            for action in ("pause", "pause-all")
            for duration in ("600", "-900", "1e9", "inf", "900.0", "1 hour")
        ),
        ({"action": "job-move", "name": "a job"}, 400),
        ({"action": "job-move", "name": "a job", "to": "soon"}, 400),
        ({"action": "job-move", "name": "a job", "to": "9999-12-31T00:00"}, 400),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_forms_change_nothing(
    form: dict[str, Any], status: int, operator: TestClient, known: Known
) -> None:
    answer = operator.post("/act", data=form, headers=SAME)
    assert answer.status_code == status, answer.text
    check_markup(answer.text)
    assert known.changes == []


@pytest.mark.parametrize(
    "body", [b"action=pause&name=%ff", b"action=pause&name=\xff", b"name=%ed%b0%80&action=pause"]
)
def test_forms_that_are_not_utf_8_are_rejected(body: bytes, operator: TestClient) -> None:
    assert operator.post("/act", content=body, headers=SAME).status_code == 400


def test_a_form_that_is_too_large_is_rejected(operator: TestClient) -> None:
    answer = operator.post("/act", content=b"a" * 300_000, headers=SAME)
    assert answer.status_code == 413
    check_markup(answer.text)
