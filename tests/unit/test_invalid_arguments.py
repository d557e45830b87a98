"""Arguments of operators' calls that are invalid, which no database is asked for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from apscheduler_tasklock import TaskLockOptionError, TaskLocks
from tests.support.rows import NOW


def ago(**times: float) -> datetime:
    return NOW - timedelta(**times)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda locks: locks.tasks(order="state"), "tasks: there is no order 'state'; give one of"),
        (lambda locks: locks.tasks(states=["lost"]), "no state 'lost'; give one of unreadable,"),
        (lambda locks: locks.tasks(limit=-1), "limit must be a whole number, 0 or more, not -1"),
        (lambda locks: locks.tasks(offset=True), "offset must be a whole number, 0 or more"),
        (lambda locks: locks.overview(limit=1.5), "overview: limit must be a whole number"),
        (lambda locks: locks.recent_runs("a", limit="1"), "recent_runs: limit must be a whole"),
        (lambda locks: locks.pause_all(duration=None, namespace="shop\xe9"), "pause_all("),
        (lambda locks: locks.pause_all(duration=None, namespace="\x01"), "pause_all("),
        (lambda locks: locks.pause_all(duration=None, namespace="\0"), "pause_all("),
        (lambda locks: locks.hold("\x01pauses", min_lock=0, max_lock=1), "begins with U+0001"),
        (
            lambda locks: locks.why("job", datetime(2026, 1, 1)),
            "why: at must be a time with a zone",
        ),
        (lambda locks: locks.recent_runs(["a"]), "a task's name must be a text"),
        (
            lambda locks: locks.runs(order="due"),
            "runs: there is no order 'due'; give one of newest",
        ),
        (lambda locks: locks.jobs(order="newest"), "jobs: there is no order 'newest'"),
        (lambda locks: locks.jobs(offset=-1), "jobs: offset must be a whole number, 0 or more"),
        (lambda locks: locks.runs(offset=-1), "runs: offset must be a whole number, 0 or more"),
        (lambda locks: locks.lanes(datetime(2026, 1, 1), ago()), "since must be a time with"),
        (lambda locks: locks.lanes(ago(), ago(hours=1)), "must be before until"),
        (lambda locks: locks.lanes(ago(hours=1), ago(), 5), "name must be a text, not 5"),
        (lambda locks: locks.lanes(ago(hours=1), ago(), by="job"), "give one of task, replica"),
        (lambda locks: locks.lanes(ago(hours=1), ago(), parts=0), "parts must be 1 to 10,000"),
    ],
)
def test_an_invalid_argument_is_an_error_that_says_what_to_do(
    call: Callable[[Any], Any], message: str
) -> None:
    with (
        TaskLocks("postgresql://localhost:1/none") as locks,
        pytest.raises(TaskLockOptionError) as error,
    ):
        call(locks)
    assert message in str(error.value)
