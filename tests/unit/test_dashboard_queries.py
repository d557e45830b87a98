"""The parameters of the dashboard's addresses: anybody may have written them."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from apscheduler_tasklock import TaskLockOptionError
from apscheduler_tasklock.dashboard.queries import Query

BERLIN = ZoneInfo("Europe/Berlin")
MOMENT = datetime(2026, 1, 31, 2, 0, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("0", 1), ("1000", 100), ("9" * 30, 100), ("", 5)]
)
def test_a_number_is_within_its_limits(text: str, number: int) -> None:
    assert Query({"page": text}).number("page", 5, 1, 100) == number


@pytest.mark.parametrize("text", ["-1", "x", "1.5", "٣"])
def test_what_is_no_number_is_an_error(text: str) -> None:
    with pytest.raises(TaskLockOptionError, match="page must be a whole number, not "):
        Query({"page": text}).number("page", 5, 1, 100)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-01-31T03:00", MOMENT),
        ("2026-01-31 03:00:00", MOMENT),
        ("2026-01-31T02:00Z", MOMENT),
        ("2026-01-31T02:00:00+00:00", MOMENT),
        ("2026-01-31", MOMENT - timedelta(hours=3)),
        (str(MOMENT.timestamp()), MOMENT),
        ("", None),
    ],
)
def test_a_time(text: str, moment: datetime | None) -> None:
    assert Query({"at": text}).moment("at", BERLIN) == moment


@pytest.mark.parametrize("text", ["abc", "2026-13-01", "9" * 30, "1e400", "0001-01-01T00:00+14:00"])
def test_what_is_no_time_is_an_error_that_shows_one(text: str) -> None:
    with pytest.raises(TaskLockOptionError, match="at must be a time such as 2026-01-31T03:00"):
        Query({"at": text}).moment("at", BERLIN)


def test_a_date() -> None:
    assert Query({"night": "2026-01-31"}).date("night") == date(2026, 1, 31)
    assert Query({}).date("night") is None
    with pytest.raises(TaskLockOptionError, match="night must be a date such as 2026-01-31"):
        Query({"night": "yesterday"}).date("night")


def test_a_choice_is_one_of_those_that_there_are() -> None:
    assert Query({"by": "task"}).choice("by", ("replica", "task")) == "task"
    assert Query({"by": "<script>"}).choice("by", ("replica", "task")) is None
    assert Query({}).choice("by", ("replica", "task")) is None


@pytest.mark.parametrize("text", ["a" * 4001, "a\0b"])
def test_a_text_that_no_task_can_have_is_an_error(text: str) -> None:
    with pytest.raises(TaskLockOptionError, match="name is invalid"):
        Query({"name": text}).text("name")
