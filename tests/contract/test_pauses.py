"""Pauses of a task: whom they keep from a run time, and which of them last."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from apscheduler_tasklock.status import Pause
from tests.contract.conftest import ON_BOTH, database_now, row
from tests.support.waist import Pauser, Replica, Rows

Travel = Callable[[float], None]

# A job every 10 s.
JOB: dict[str, Any] = {"schedule": "s", "next_in": 10, "grace": 20, "max_lock": 300, "lease": 30}


@pytest.fixture
def pauser(connection: Rows) -> Pauser:
    return Pauser(connection)


@pytest.fixture
def task(one: Replica) -> str:
    """A task that has run once."""
    one.end(one.claim("task", **JOB)[0], "task", outcome="ok")
    return "task"


pytestmark = pytest.mark.usefixtures("task")


def test_nobody_is_granted_a_paused_task_until_it_is_resumed(
    one: Replica, pauser: Pauser, travel: Travel, connection: Rows
) -> None:
    pauser.pause(None, "me", "an outage of the other side")
    now = database_now(connection)
    assert pauser.shown() == ((Pause("me", now, None, "an outage of the other side"),), None)
    travel(1000)
    answer = one.claim(**JOB)[1]
    assert (answer.granted, answer.paused, answer.looks_free) == (False, True, False)
    assert pauser.resume("me")
    assert pauser.shown() == ((), None)
    assert not one.granted(lag=1, **JOB)  # due in the pause
    assert one.granted(**JOB)


def test_a_pause_ends_by_itself(one: Replica, pauser: Pauser, travel: Travel) -> None:
    pauser.pause(60.0)
    travel(59)
    assert not one.granted(**JOB)
    travel(1)
    assert one.granted(**JOB)


def test_a_run_time_before_it_may_be_run_after_it(
    one: Replica, pauser: Pauser, travel: Travel
) -> None:
    travel(10)
    pauser.pause(5.0)
    assert not one.granted(lag=0.5, **JOB)
    travel(6)
    assert not one.granted(lag=6, **JOB)  # due when the pause began
    assert one.granted(lag=6.5, **JOB)


@ON_BOTH
def test_one_without_an_end_outlasts_the_others(pauser: Pauser, travel: Travel) -> None:
    pauser.pause(None, "ann")
    pauser.pause(60.0, "bob")
    pauser.pause(60.0, "ann", "another reason")
    assert pauser.shown()[1] is None
    travel(61)
    [left], _ = pauser.shown()
    assert (left.by, left.until, left.reason) == ("ann", None, None)
    assert pauser.resume("ann")


@ON_BOTH
def test_the_same_one_becomes_longer_and_never_shorter(
    pauser: Pauser, travel: Travel, connection: Rows
) -> None:
    began = database_now(connection)
    for seconds, until in ((60.0, 60), (10.0, 60), (100.0, 120)):
        pauser.pause(seconds, "me", "why")
        end = began + timedelta(seconds=until)
        assert pauser.shown() == ((Pause("me", began, end, "why"),), end)
        travel(10)
    pauser.pause(None, "me", "why")
    pauser.pause(10.0, "me", "why")
    assert pauser.shown() == ((Pause("me", began, None, "why"),), None)


def test_to_resume_what_is_not_paused_changes_nothing(pauser: Pauser, connection: Rows) -> None:
    before = row(connection)
    assert not pauser.resume()
    assert row(connection) == before
