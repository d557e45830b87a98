"""What the dashboard answers to probes, to monitors and to Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from apscheduler_tasklock import TaskLockDatabaseError, TaskLockSchemaError
from apscheduler_tasklock.dashboard import Access
from apscheduler_tasklock.errors import TaskLockError
from tests.support.asgi_client import TestClient
from tests.support.pages import Known, app
from tests.support.rows import READ, replica_status, task_status

ALIVE = [replica_status("one", tasks=("mail",))]


def nobody(_request: Request) -> Access | None:
    return None


def reader(_request: Request) -> Access | None:
    return Access("read")


def fleet(kind: str) -> Known:
    return Known([task_status("mail", **READ[kind])], replicas_=ALIVE)


class Failing(Known):
    """Rows of which something cannot be asked."""

    def __init__(self, what: str, error: TaskLockError) -> None:
        super().__init__([task_status("mail")], replicas_=ALIVE)

        def fail(*_: Any, **__: Any) -> Any:
            raise error

        setattr(self, what, fail)


def away(what: str = "overview") -> Known:
    return Failing(what, TaskLockDatabaseError("no connection to mail"))


@pytest.mark.parametrize("make", [lambda: fleet("ok"), lambda: fleet("overdue"), away])
def test_a_probe_is_answered_whatever_is_wrong_and_sees_no_name(make: Callable[[], Known]) -> None:
    """Otherwise a liveness probe would restart the pods in an outage."""
    answer = TestClient(app(make(), authorize=nobody)).get("/health")
    assert (answer.status_code, answer.text) == (200, "ok\n")


@pytest.mark.parametrize(
    ("make", "status", "severity", "what"),
    [
        (lambda: fleet("ok"), 200, 0, []),
        (lambda: fleet("failing"), 200, 1, ["failing"]),
        (lambda: fleet("overdue"), 503, 2, ["overdue"]),
        (Known, 503, 3, ["empty"]),
        (away, 503, 3, ["not read"]),
        (lambda: away("check_writes"), 503, 3, ["not read"]),
        (lambda: Failing("overview", TaskLockSchemaError("no table")), 503, 3, ["not read"]),
    ],
)
def test_the_verdict_is_that_of_check(
    make: Callable[[], Known], status: int, severity: int, what: list[str]
) -> None:
    answer = TestClient(app(make(), authorize=reader)).get("/health?verdict")
    told = answer.json()
    found = [each["what"] for each in told["findings"]]
    assert (answer.status_code, told["exit_status"], found) == (status, severity, what)


@pytest.mark.parametrize("path", ["/health?verdict", "/health?verdict=1", "/metrics"])
def test_names_need_the_right_to_read(path: str) -> None:
    answer = TestClient(app(fleet("overdue"), authorize=nobody)).get(path)
    assert answer.status_code == 403
    assert "mail" not in answer.text


def test_the_metrics_are_those_of_the_command_within_the_namespace() -> None:
    known = Known([task_status("mail"), task_status("shop:sync")], replicas_=ALIVE)
    answer = TestClient(app(known, namespace="shop:", authorize=reader)).get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'tasklock_task_paused{tasklock_task_name="shop:sync"} 0.0' in answer.text
    assert '"mail"' not in answer.text


def test_metrics_of_an_outage_are_no_old_values() -> None:
    answer = TestClient(app(away("tasks"), authorize=reader)).get("/metrics")
    assert (answer.status_code, answer.text) == (503, "no connection to mail\n")
