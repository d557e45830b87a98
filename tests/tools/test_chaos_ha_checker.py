"""What the chaos of failovers finds, on ledgers, logs and doctors' words made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from apscheduler_tasklock.demo.history import Event
from tests.chaos_ha.cases import CASES
from tests.chaos_ha.checker import LATEST, SLOW, Told, check
from tests.chaos_ha.replica import TASKS

# The slowest plain write, and when the event began and when a plain client could write again.
SLOWEST, BEGAN, POSSIBLE = 0.5, 10.0, 14.0
UNAVAILABLE = "WARNING The task lock database is unavailable (..): .. (each run ..)"
BACK = "INFO The task lock database is back (..), 3.9 sec after this replica noticed"
BLAME = "wrong  transactions  blocked: pid 7 (tasklock r1), role postgres, has RowExclusiveLock"


def run(task: str, due: float, token: int = 0, at: float = 0.0) -> Event:
    """Return the begin of a run. Tokens grow with run times."""
    return Event(at or due + 0.1, "begin", "r1", task, token or round(due * 10), due)


# A history in which nothing is amiss: all tasks run before the event and after it.
RIGHT = [
    *(run(task.name, due) for task in TASKS for due in (6.0, 9.0, 15.0, 18.0)),
    Event(BEGAN, "event"),
    Event(POSSIBLE, "possible", until=SLOWEST),
    Event(20.0, "end", "r1", TASKS[0].name, 180, 18.0),
]
ONE = TASKS[0]
# The latest moment at which ONE has to have begun a run.
LAST = POSSIBLE + ONE.period + LATEST + SLOW * SLOWEST


def later(seconds: float) -> list[Event]:
    """Return the right history, but for ONE, which runs next so long after its last moment."""
    others = [e for e in RIGHT if e.task != ONE.name or e.at < BEGAN]
    return [*others, run(ONE.name, 18.0, at=LAST + seconds)]


def faults(events: Sequence[Event] = RIGHT, log: str = "", **told: Any) -> list[str]:
    in_order = sorted(events, key=lambda event: event.at)
    base = Told(in_order, {"r1": log})
    return [finding.fault for finding in check(replace(base, **told))]


def test_nothing_is_found_where_nothing_is_amiss() -> None:
    log = "\n".join([UNAVAILABLE, BACK])
    assert faults(log=log, doctors=["ok    transactions  no long transaction"]) == []


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([*RIGHT, run(ONE.name, 18.0, 181, 18.5)], ["run time begun twice"]),
        ([*RIGHT, run(ONE.name, 19.0, 150)], ["token went back"]),
        ([*RIGHT, run(ONE.name, 19.0, 180)], ["token went back"]),
        (later(-0.1), []),
        (later(0.1), ["ran too late"]),
        ([e for e in RIGHT if e.task != ONE.name], ["ran too late"]),
        ([*RIGHT, Event(19.0, "died", "r2")], ["replica died"]),
    ],
)
def test_what_the_ledger_shows_is_found(events: list[Event], found: list[str]) -> None:
    assert faults(events) == found


def test_a_task_that_waits_for_something_documented_may_be_late() -> None:
    assert faults(later(9.0), waiting=frozenset({ONE.name})) == []


def test_where_commits_were_lost_a_run_time_may_be_begun_again() -> None:
    assert faults([*RIGHT, run(ONE.name, 18.0, 181, 18.5)], loses_commits=True) == []


def test_more_than_three_lines_of_an_outage_are_found() -> None:
    three = [UNAVAILABLE, BACK, UNAVAILABLE]
    assert faults(log="\n".join(three)) == []
    assert faults(log="\n".join([*three, BACK])) == ["too many outage lines"]
    assert faults([*RIGHT, Event(16.0, "event")], "\n".join([*three, BACK])) == []


def test_a_doctor_that_names_a_session_as_the_culprit_is_found() -> None:
    assert faults(doctors=[BLAME]) == ["doctor blames the fleet"]
    assert faults(doctors=["SELECT pg_terminate_backend(7)"]) == ["doctor blames the fleet"]


def test_a_traceback_is_found() -> None:
    assert faults(log="Traceback (most recent call last):") == ["error logged"]


def test_confirmed_commits_are_lost_by_a_restore_alone() -> None:
    assert [name for name, case in CASES.items() if case.loses_commits] == ["restored"]
