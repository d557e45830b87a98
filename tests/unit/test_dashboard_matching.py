"""What an operator does with all tasks that match a filter, and what if others match meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest

from apscheduler_tasklock.dashboard import Access
from tests.support.asgi_client import TestClient
from tests.support.markup import Markup
from tests.support.pages import Known, app
from tests.support.rows import READ, task_status

SAME = {"sec-fetch-site": "same-origin"}
FILTER = {"q": "shop:", "state": ["failing", "overdue"]}


def tasks(**kinds: str) -> list[Any]:
    return [task_status(f"shop:{name}", **READ[kind]) for name, kind in kinds.items()]


@pytest.fixture
def known() -> Known:
    others = [task_status("mail", **READ["failing"])]
    return Known([*tasks(a="failing", b="overdue", c="ok"), *others])


@pytest.fixture
def operator(known: Known) -> Iterator[TestClient]:
    access = Access("operate", "ann")
    options = {"raise_server_exceptions": False, "follow_redirects": False}
    with TestClient(app(known, authorize=lambda _request: access), **options) as client:
        yield client


def form_of(page: str) -> dict[str, str]:
    """Return the hidden fields of a page's form."""
    found = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', page)
    return {name: unescape(value) for name, value in found}


def confirm(operator: TestClient, action: str = "pause", **wanted: Any) -> Any:
    asked = {"action": action, "all": "matching", **(wanted or FILTER)}
    return operator.get("/confirm", params=asked)


def test_the_list_leads_to_all_that_match_its_filter(operator: TestClient, known: Known) -> None:
    listed = operator.get("/tasks", params={**FILTER, "order": "name", "page": "1"})
    links = Markup(listed.text).links
    [link] = [each for each in links if "all=matching&action=pause" in each]
    page = operator.get(f"/{link}").text
    assert "Pause shop:a, shop:b?" in page
    assert "name=" not in form_of(page)
    sent = {**form_of(page), "duration": "3600", "reason": "a move"}
    answer = operator.post("/act", data=sent, headers=SAME)
    assert (answer.status_code, answer.headers["location"]) == (
        303,
        "tasks?done=pause&counts=paused%2A2&q=shop%3A&state=overdue%2Cfailing",
    )
    asked = {"duration": 3600.0, "by": "ann", "reason": "a move"}
    assert known.changes == [("pause", ("shop:a", "shop:b"), asked)]


@pytest.mark.parametrize(
    ("now", "numbers"),
    [
        ({"a": "failing", "b": "overdue", "d": "failing"}, "2 before, 3 now"),
        ({"a": "failing", "b": "ok"}, "2 before, 1 now"),
        ({"a": "failing", "d": "failing"}, "2 before, 2 now"),
    ],
)
def test_it_asks_again_if_others_match_when_it_is_done(
    operator: TestClient, known: Known, now: dict[str, str], numbers: str
) -> None:
    sent = {**form_of(confirm(operator).text), "duration": "900", "reason": "a <move>"}
    known.tasks_ = tasks(**now)
    again = operator.post("/act", data=sent, headers=SAME)
    assert again.status_code == 409
    assert f"because other tasks match now: {numbers}. Look again." in again.text
    assert known.changes == []
    # What was written stays, and the second form is about what is shown now.
    assert 'value="a &lt;move&gt;"' in again.text
    assert '<option value="900" selected>' in again.text
    assert operator.post("/act", data=sent | form_of(again.text), headers=SAME).status_code == 303
    [(_, names, _)] = known.changes
    assert names == tuple(f"shop:{name}" for name, kind in now.items() if kind != "ok")


def test_the_order_of_tasks_and_other_changes_of_them_ask_nothing(
    operator: TestClient, known: Known
) -> None:
    sent = form_of(confirm(operator).text)
    known.tasks_ = tasks(b="failing", a="overdue", c="late")
    assert operator.post("/act", data=sent, headers=SAME).status_code == 303


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"digest": ""}, 409),
        ({"number": "3"}, 409),
        ({"number": "x"}, 400),
        ({"q": "nothing"}, 400),
        ({"state": ""}, 409),
        ({"action": "run"}, 400),
        ({"action": "job-remove", "q": "shop:a"}, 400),
    ],
)
def test_a_form_that_does_not_fit_does_nothing(
    operator: TestClient, known: Known, changes: dict[str, str], status: int
) -> None:
    sent = {**form_of(confirm(operator).text), **changes}
    assert operator.post("/act", data=sent, headers=SAME).status_code == status
    assert known.changes == []


def test_only_tasks_of_the_namespace_match(known: Known) -> None:
    operator = app(known, namespace="shop:", authorize=lambda _request: Access("operate"))
    page = TestClient(operator).get("/confirm?action=pause&all=matching&state=failing").text
    assert "Pause shop:a?" in page


def test_too_many_are_not_changed_at_once(operator: TestClient, known: Known) -> None:
    known.tasks_ = [task_status(f"t{number}") for number in range(2_000)]
    page = confirm(operator, q="t")
    assert page.status_code == 200
    assert "Pause 2000 tasks?" in page.text
    assert page.text.count("<li>t") == 2_000
    known.tasks_ = [*known.tasks_, task_status("t")]
    assert "more than 2,000 tasks match the filter" in confirm(operator, q="t").text


def test_without_a_filter_or_the_right_to_operate_there_is_nothing_to_do_with_all_that_match(
    operator: TestClient, known: Known
) -> None:
    reader = TestClient(app(known))
    assert "all=matching" not in operator.get("/tasks").text
    assert "all=matching" not in reader.get("/tasks", params=FILTER).text
    assert confirm(reader).status_code == 403
