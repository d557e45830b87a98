"""The delays of retries, and the exceptions with which a job asks for one or for none."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest

from apscheduler_tasklock import TaskLockGiveUp, TaskLockOptionError, TaskLockRetry
from apscheduler_tasklock.options import DEFAULTS, LockOptions


def delays(**options: Any) -> list[float | None]:
    parsed = LockOptions.parse(options, "here").over(DEFAULTS, "here")
    return [parsed.delay_after(attempt) for attempt in range(1, 6)]


def test_each_delay_is_the_one_before_times_the_backoff() -> None:
    assert delays(retries=3) == [30, 60, 120, None, None]
    assert delays(retries="4", retry_delay="5", retry_backoff="1") == [5, 5, 5, 5, None]
    assert delays(retries=2, retry_delay=timedelta(minutes=1), retry_backoff=3) == [
        *(60, 180),
        *[None] * 3,
    ]


def test_no_delay_is_longer_than_a_day() -> None:
    """Without a bound the time would overflow in the database, and the row stay locked."""
    assert delays(retries=20, retry_backoff=100)[4] == 86_400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # A mistyped number would keep a job busy for days.
        ({"retries": 21}, "retries must be a whole number from 0 to 20, not 21"),
        ({"retries": -1}, "retries must be a whole number from 0 to 20, not -1"),
        ({"retries": True}, "retries must be a whole number"),
        ({"retry_delay": timedelta(days=2)}, "retry_delay must be .* from 0 to a day"),
        ({"retry_backoff": 0.5}, "retry_backoff must be a number from 1 to 100, not 0.5"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    assert LockOptions.parse({"retries": 20}, "here").retries == 20
    with pytest.raises(TaskLockOptionError, match=message):
        LockOptions.parse(options, "here")


def test_without_retries_there_is_no_delay() -> None:
    assert delays() == delays(retries=0) == [None] * 5


class TooManyRequests(TaskLockRetry):
    def __init__(self, url: str, seconds: float) -> None:
        super().__init__(f"{url} was asked too often", after=seconds)
        self.url = url


class NoRates(TaskLockGiveUp):
    def __init__(self, *, day: str) -> None:
        self.day = day


@pytest.mark.parametrize(
    "error",
    [
        TaskLockRetry("busy", after=5),
        TaskLockGiveUp("no", "way"),
        TooManyRequests("https://bank.example", 7),
        NoRates(day="Sunday"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_exceptions_survive_the_way_out_of_a_worker_process(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # of this test
    assert (type(again), again.args, vars(again)) == (type(error), error.args, vars(error))


@pytest.mark.parametrize("after", [-1, 86_401, float("nan"), True, "5", timedelta(days=2)])
def test_an_impossible_delay_is_refused(after: Any) -> None:
    with pytest.raises(TaskLockOptionError, match="after must be seconds or a timedelta, from 0"):
        TaskLockRetry(after=after)


def test_a_delay_may_be_a_timedelta_or_missing() -> None:
    assert TaskLockRetry(after=timedelta(minutes=2)).after == 120
    assert TaskLockRetry("later").after is None
