"""Lock events as a listener sees them."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import apscheduler.events
import pytest
from apscheduler.events import EVENT_ALL, JobEvent
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ALL,
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockEvent,
)

CODES = {
    "granted": EVENT_TASK_LOCK_GRANTED,
    "refused": EVENT_TASK_LOCK_REFUSED,
    "released": EVENT_TASK_LOCK_RELEASED,
    "lost": EVENT_TASK_LOCK_LOST,
    "error": EVENT_TASK_LOCK_ERROR,
}
RUN_TIME = datetime(2025, 6, 6, 10, tzinfo=timezone.utc)


def event(code: int = EVENT_TASK_LOCK_GRANTED, **details: Any) -> TaskLockEvent:
    return TaskLockEvent(code, "job", "default", "task", RUN_TIME, **details)


def test_each_code_is_one_bit_of_its_own() -> None:
    assert sorted(code.bit_count() for code in CODES.values()) == [1] * 5
    assert sum(CODES.values()) == EVENT_TASK_LOCK_ALL


def test_codes_are_far_above_those_of_apscheduler() -> None:
    theirs = [
        value for name, value in vars(apscheduler.events).items() if name.startswith("EVENT_")
    ]
    assert min(CODES.values()) > 1000 * max(theirs)
    assert EVENT_TASK_LOCK_ALL & EVENT_ALL == 0


@pytest.mark.parametrize(
    ("mask", "heard"),
    [
        (EVENT_ALL, []),
        (EVENT_TASK_LOCK_ALL, list(CODES.values())),
        (EVENT_TASK_LOCK_LOST | EVENT_ALL, [EVENT_TASK_LOCK_LOST]),
    ],
)
def test_listener_gets_the_codes_that_it_asks_for(mask: int, heard: list[int]) -> None:
    scheduler = BackgroundScheduler(timezone="UTC")
    got: list[int] = []
    scheduler.add_listener(lambda event: got.append(event.code), mask)
    for code in CODES.values():
        scheduler._dispatch_event(event(code))
    assert got == heard


def test_event_is_a_job_event_with_the_details_of_the_lock() -> None:
    error = ValueError("unavailable")
    full = event(
        holder="host:1:ab",
        locked_until=RUN_TIME,
        token=7,
        reason="window",
        exception=error,
        attempt=2,
        retry_at=RUN_TIME,
        outcome="error",
        error="ValueError: unavailable",
        took=1.5,
    )
    assert isinstance(full, JobEvent)
    assert vars(full) == {
        "code": EVENT_TASK_LOCK_GRANTED,
        "alias": None,
        "job_id": "job",
        "jobstore": "default",
        "task_name": "task",
        "scheduled_run_time": RUN_TIME,
        "holder": "host:1:ab",
        "locked_until": RUN_TIME,
        "token": 7,
        "reason": "window",
        "exception": error,
        "attempt": 2,
        "retry_at": RUN_TIME,
        "outcome": "error",
        "error": "ValueError: unavailable",
        "took": 1.5,
    }


def test_details_that_are_not_known_are_none() -> None:
    bare = event()
    assert [bare.holder, bare.locked_until, bare.token, bare.reason, bare.exception] == [None] * 5
    assert (bare.attempt, bare.retry_at) == (None, None)
    assert [bare.outcome, bare.error, bare.took] == [None] * 3


@pytest.mark.parametrize("name", CODES)
def test_repr_names_what_happened_to_which_task(name: str) -> None:
    text = repr(event(CODES[name], holder="host:1:ab", token=7, reason="window"))
    assert text.startswith(f"<TaskLockEvent {name} task='task' run_time=2025-06-06T10:00:00+00:00")
    assert "holder='host:1:ab' token=7 reason='window'" in text
