"""Runs that are deferred, and which of them are left out for others."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest

from apscheduler_tasklock._runs.deferred_runs import (
    MOST_DEFERRED,
    DeferredRuns,
    InTheWay,
    LastRun,
    Outlook,
)
from apscheduler_tasklock._runs.run import QueuedRun, RunKind
from tests.support.waist import TaskRow

JOB = ("job", "default")


def run_of(due_at: float, job: tuple[str, str] = JOB) -> QueuedRun:
    return QueuedRun(RunKind.SCHEDULE, "task", job, due_at, due_at)


@pytest.fixture
def deferred() -> DeferredRuns:
    return DeferredRuns()


def keep(deferred: DeferredRuns, *runs: QueuedRun) -> list[tuple[QueuedRun, Outlook]]:
    decided: list[tuple[QueuedRun, Outlook]] = []
    for run in runs:
        deferred.add(
            run, InTheWay(1, came_first=True), lambda o, _at, run=run: decided.append((run, o))
        )
    return decided


def test_of_a_job_that_coalesces_the_latest_one_is_deferred_in_whatever_order_they_come(
    deferred: DeferredRuns,
) -> None:
    earlier, later, another = run_of(1.0), run_of(2.0), run_of(0.0, ("another", "default"))
    keep(deferred, another)
    assert deferred.take_for(earlier, coalesce=True) == []
    keep(deferred, earlier)
    assert deferred.take_for(later, coalesce=True) == [earlier]
    keep(deferred, later)
    assert deferred.take_for(earlier, coalesce=True) == [earlier]
    assert [deferred.take(run) for run in (earlier, later, another)] == [False, True, True]


def test_of_another_job_so_many_are_deferred(deferred: DeferredRuns) -> None:
    runs = [run_of(float(number)) for number in range(MOST_DEFERRED)]
    keep(deferred, *runs)
    assert deferred.take_for(run_of(1000.0), coalesce=False) == runs[:1]


def test_each_is_decided_on_once_and_only_those_of_its_job(deferred: DeferredRuns) -> None:
    run, another = run_of(1.0), run_of(1.0, ("another", "default"))
    decided = keep(deferred, run, another)
    last = LastRun(1, finished=False, dead=False, deaths=0)
    deferred.decide("task", JOB, last)
    assert decided == [(run, Outlook.WAITS)]
    decided.clear()
    for _ in range(2):
        deferred.decide("task", JOB, LastRun(1, finished=True, dead=False, deaths=0))
    assert decided == [(run, Outlook.REFUSED)]
    assert deferred.jobs_of("task") == [("another", "default")]


def released(at: datetime, **state: Any) -> TaskRow:
    """Return the row of a run that was released."""
    run = (True, False, False, False, 0, 0, False, "jobs:job")
    return TaskRow("task", uuid4(), 1, *run, at, "other", at, **state)


@pytest.mark.parametrize(
    ("ended", "outlook"),
    [(-1, Outlook.ASKED_AGAIN), (0, Outlook.REFUSED), (1, Outlook.REFUSED)],
    ids=["before", "at", "after"],
)
def test_a_run_that_had_ended_before_the_deferred_one_was_due_is_not_in_its_way(
    ended: float, outlook: Outlook
) -> None:
    """Its release may come much later, as after an outage."""
    due = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
    row = released(due, finished_at=due + timedelta(seconds=ended))
    last = LastRun(1, finished=True, dead=False, deaths=0, row=row)
    assert InTheWay(1, came_first=True, run_time=due).outlook(last) is outlook
    assert InTheWay(1, came_first=True).outlook(last) is Outlook.REFUSED


@pytest.mark.parametrize(
    ("pending", "outlook"), [(True, Outlook.REFUSED), (False, Outlook.ASKED_AGAIN)]
)
def test_a_run_that_is_to_be_retried_was_released_although_its_deaths_still_count(
    pending: bool, outlook: Outlook
) -> None:
    row = released(datetime(2026, 3, 1, 12, tzinfo=timezone.utc), retry_pending=pending)
    last = LastRun(1, finished=True, dead=False, deaths=1, row=row)
    assert InTheWay(1, came_first=True).outlook(last) is outlook


def test_a_task_is_known_for_as_long_as_it_has_deferred_runs(deferred: DeferredRuns) -> None:
    run, later = run_of(1.0), run_of(2.0)
    other = QueuedRun(RunKind.SCHEDULE, "other", JOB, 1.0, 1.0)
    keep(deferred, run, later, other)
    assert deferred.take_for(run_of(3.0), coalesce=True) == [run, later]
    assert deferred.task_names == {"other"}
    assert (deferred.has("task"), deferred.has("other")) == (False, True)
    assert deferred.jobs_of("other") == [JOB]
