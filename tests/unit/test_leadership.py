"""What becomes of a follower's run, by the row of its task."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest

from apscheduler_tasklock._runs.deferred_runs import LastRun, Outlook
from apscheduler_tasklock._runs.leadership import FollowerRun
from apscheduler_tasklock._runs.run import QueuedRun, RunKind
from tests.support.waist import ClaimRequest, TaskRow

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
# On the monotonic clock: when the run was due, and when the look begins.
DUE, LOOK = 1000.0, 1003.0


class Led:
    """Stands in for the leadership, which says whether the leader still has its head start."""

    def __init__(self, *, is_early: bool = False) -> None:
        self._is_early = is_early

    def is_early(self, _due_at: float, _as_of: float) -> bool:
        return self._is_early


def ran_at(run_time: datetime, **changes: Any) -> TaskRow:
    """Return the row of a task that runs each minute, and that has run at this time."""
    state = TaskRow(
        task_name="job",
        claim_id=uuid4(),
        token=1,
        finished=True,
        dead=False,
        expired=False,
        failover=False,
        deaths=0,
        handovers=0,
        handed_over=False,
        runs="jobs:job",
        window_start=run_time,
        holder="leader",
        database_time=NOON + timedelta(seconds=LOOK - DUE),
        window_until=run_time + timedelta(seconds=54),
        window_schedule="each minute",
        locked_until=run_time + timedelta(seconds=54),
    )
    return replace(state, **changes)


def outlook_at_noon(row: TaskRow | None, *, is_early: bool = False, **request: Any) -> Outlook:
    """Return the outlook of the follower's run of noon."""
    asked = {"run_time": NOON, "exact": True, "schedule": "each minute", "runs": "jobs:job"}
    claim = ClaimRequest("job", 54, 300, **{**asked, **request})
    run = QueuedRun(RunKind.SCHEDULE, "job", ("job", "default"), due_at=DUE, came=DUE)
    following = FollowerRun(Led(is_early=is_early), run, lambda: claim)  # type: ignore[arg-type]  # a stand-in
    last = LastRun(1, finished=True, dead=False, deaths=0, as_of=LOOK, row=row)
    return following.outlook(last)


@pytest.mark.parametrize(
    ("row", "outlook"),
    [
        pytest.param(ran_at(NOON), Outlook.REFUSED, id="it was run"),
        pytest.param(ran_at(NOON, finished=False), Outlook.REFUSED, id="it runs"),
        pytest.param(ran_at(NOON + MINUTE), Outlook.REFUSED, id="a later one was run"),
        pytest.param(ran_at(NOON - MINUTE), Outlook.ASKED_AGAIN, id="the one before was run"),
        pytest.param(
            ran_at(NOON - MINUTE, finished=False), Outlook.ASKED_AGAIN, id="the one before runs"
        ),
        pytest.param(None, Outlook.ASKED_AGAIN, id="the task has no row"),
        pytest.param(
            ran_at(NOON, window_until=NOON - timedelta(seconds=1)),
            Outlook.REFUSED,
            id="it has failed, and opened its window",
        ),
        pytest.param(
            ran_at(NOON, window_schedule="each hour"),
            Outlook.ASKED_AGAIN,
            id="the window is of another schedule",
        ),
    ],
)
def test_a_run_time_that_was_run_is_refused_and_any_other_is_asked_for(
    row: TaskRow | None, outlook: Outlook
) -> None:
    assert outlook_at_noon(row) is outlook


def test_nothing_is_asked_for_while_the_leader_has_its_head_start() -> None:
    assert outlook_at_noon(ran_at(NOON), is_early=True) is Outlook.WAITS
    assert outlook_at_noon(None, is_early=True) is Outlook.WAITS


@pytest.mark.parametrize(
    ("seconds", "outlook"),
    [(-53, Outlook.REFUSED), (-55, Outlook.ASKED_AGAIN), (5, Outlook.REFUSED)],
)
def test_of_intervals_without_a_common_start_the_window_decides(
    seconds: float, outlook: Outlook
) -> None:
    """Each replica has run times of its own, and the leader's run covers those around it."""
    row = ran_at(NOON + timedelta(seconds=seconds))
    assert outlook_at_noon(row, exact=False) is outlook


def test_a_window_that_was_opened_again_covers_no_interval_without_a_common_start() -> None:
    row = ran_at(NOON, window_until=NOON - timedelta(seconds=1))
    assert outlook_at_noon(row, exact=False) is Outlook.ASKED_AGAIN


def test_a_shorter_minimum_lock_of_ones_own_decides() -> None:
    """As the claim decides, while options are deployed."""
    row = ran_at(NOON - timedelta(seconds=30))
    assert outlook_at_noon(row) is Outlook.REFUSED
    shorter = replace(row, window_schedule="each minute")
    run = QueuedRun(RunKind.SCHEDULE, "job", ("job", "default"), due_at=DUE, came=DUE)
    claim = ClaimRequest("job", 27, 300, run_time=NOON, exact=True, schedule="each minute")
    following = FollowerRun(Led(), run, lambda: claim)  # type: ignore[arg-type]  # a stand-in
    last = LastRun(1, finished=True, dead=False, deaths=0, as_of=LOOK, row=shorter)
    assert following.outlook(last) is Outlook.ASKED_AGAIN


def test_a_trigger_that_raises_is_left_to_the_claim_which_reports_it() -> None:
    def fail() -> ClaimRequest:
        raise ValueError("on purpose")

    run = QueuedRun(RunKind.SCHEDULE, "job", ("job", "default"), due_at=DUE, came=DUE)
    following = FollowerRun(Led(), run, fail)  # type: ignore[arg-type]  # a stand-in
    last = LastRun(1, finished=True, dead=False, deaths=0, as_of=LOOK, row=ran_at(NOON))
    assert following.outlook(last) is Outlook.ASKED_AGAIN


def test_in_the_hour_that_clocks_repeat_the_moments_are_compared() -> None:
    """Python compares two times of one time zone by their wall clocks."""
    berlin = ZoneInfo("Europe/Berlin")
    summer = datetime(2026, 10, 25, 2, 50, tzinfo=berlin)
    winter = datetime(2026, 10, 25, 2, 10, fold=1, tzinfo=berlin)
    assert winter.timestamp() > summer.timestamp() + 60
    row = ran_at(summer, window_until=summer + timedelta(seconds=54))
    assert outlook_at_noon(row, run_time=winter) is Outlook.ASKED_AGAIN
    assert outlook_at_noon(ran_at(winter), run_time=winter) is Outlook.REFUSED
