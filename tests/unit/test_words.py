"""Tasks, runs and stories in words, with times and durations in a reader's own formats."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from apscheduler_tasklock import DueTimes, Pause, Run, Story, TaskState, TaskStatus, Verdict
from apscheduler_tasklock._words.runs import ending_in_words, run_notes
from apscheduler_tasklock._words.stories import story_lines
from apscheduler_tasklock._words.tasks import facts_of
from apscheduler_tasklock.dashboard.formats import Formats
from apscheduler_tasklock.status import ReplicaState, ReplicaStatus, RunningRun
from tests.support.rows import task_status

AT = datetime(2026, 1, 31, 3, tzinfo=timezone.utc)
TASK = TaskStatus(
    name="report",
    state=TaskState.DEAD,
    schedule=None,
    kind="schedule",
    token=7,
    holder="web-2",
    scheduled_at=AT,
    started_at=AT,
    finished_at=None,
    window_until=AT + timedelta(hours=1),
    locked_until=AT + timedelta(minutes=1),
    run_until=AT + timedelta(hours=1),
    due_at=None,
    overdue_at=None,
    late_by=None,
    took=60.0,
    outcome="died",
    cut_for=None,
    acknowledged=False,
    stuck=(),
    succeeded_at=None,
    failed_at=None,
    failures=0,
    error_type=None,
    paused=False,
    paused_until=None,
    pauses=(),
    requested_by=None,
    requested_at=None,
    gone=False,
    failover=False,
)
OVER = replace(TASK, state=TaskState.OK, finished_at=AT + timedelta(minutes=1), outcome=None)
FAILED = Run(
    task="report",
    token=6,
    scheduled_at=AT,
    started_at=AT,
    ended_at=AT + timedelta(minutes=2),
    replica="web-1",
    kind="retry",
    outcome="error",
    error_type="ValueError",
    error="no rows",
    attempt=2,
    retry_at=AT + timedelta(minutes=5),
)


class Page:
    """Writes times and durations as a page might, which is neither way of the command line."""

    def moment(self, moment: datetime | None) -> str:
        return f"[{moment:%H:%M}]" if moment else ""

    def seconds(self, seconds: float | None) -> str:
        return "" if seconds is None else f"[{seconds:g}]"


def test_facts_are_in_the_readers_formats_and_empty_ones_are_left_out() -> None:
    paused = replace(TASK, paused=True, pauses=(Pause("ann", AT, AT + timedelta(hours=9), "move"),))
    assert facts_of(paused, [], Page(), 42.0, None, AT, "jobs", "locks") == {
        "task": "report",
        "state": "dead: its holder web-2 has not renewed its lease, which ended at [03:01]; if no "
        "replica takes the run over, free it: apscheduler-tasklock free --schema jobs --table "
        "locks --token 7 report",
        "schedule": "-",
        "last run": "[03:00] on web-2, schedule, for [03:00], its lease ended after [60], and it "
        "has not reported its end, token 7",
        "usual": "[42]",
        "lock times": "minimum [3600], for the window until [04:00]; maximum [3600]",
        "paused": "paused by ann since [03:00] until [12:00] (move)",
    }


@pytest.mark.parametrize(
    ("zone", "due_at", "words"),
    [
        ("Asia/Tokyo", "2099-03-28T18:00+00:00", "2099-03-29 03:00:00, .* 2099-03-29 07:00:00"),
        # Clocks are put back in the page's zone, so that two would read the same.
        (
            "Europe/Berlin",
            "2099-10-25T00:00+00:00",
            "2099-10-25 00:00:00, .* 2099-10-25 04:00:00 UTC",
        ),
    ],
)
def test_a_page_has_next_runs_in_the_zone_of_its_other_times(
    zone: str, due_at: str, words: str
) -> None:
    schedule = {"type": "interval", "length": [0, 3600, 0], "end": None, "jitter": 0.0}
    task = task_status(schedule=schedule, zone="UTC", due_at=datetime.fromisoformat(due_at))
    facts = facts_of(task, [], Formats(ZoneInfo(zone), AT), None, [], AT)
    assert re.fullmatch(words, facts["next runs"])


def test_a_story_is_in_the_readers_formats_and_empty_sections_are_left_out() -> None:
    story = Story(
        task=OVER,
        at=AT + timedelta(hours=2),
        verdict=Verdict.RAN,
        scheduled_at=AT,
        runs=(FAILED,),
        miss=None,
        before=None,
        after=None,
        actions=(),
        replicas=(),
        history_begins_at=AT,
    )
    lines = story_lines(story, Page())
    assert (
        lines.headline
        == "report at [05:00]: its last run time until then was [03:00], whose run failed"
    )
    assert lines.verdict == [
        "retried: [03:00] began at [03:00] on web-1, failed after [120] (token 6), to be retried "
        "at [03:05]: ValueError: no rows"
    ]
    assert lines.sections == {"history": ["begins at [03:00]"]}


WELL = replace(FAILED, kind="schedule", outcome="ok", error_type=None, error=None, retry_at=None)
MISSED = replace(WELL, token=None, outcome="missed", last_scheduled_at=AT, run_times=1)
SPAN = replace(MISSED, last_scheduled_at=AT + timedelta(hours=9), run_times=10)
HAS_RUN: dict[str, Any] = {"verdict": Verdict.RAN, "scheduled_at": AT, "runs": (WELL,)}
DUE = DueTimes(AT, AT, 1, True, True, None, None, None)
RUNS_ON = {"verdict": Verdict.RUNNING, "scheduled_at": AT}
OF_03 = "its last run time until then was [03:00]"
LIVE = ReplicaStatus("web-1", "host", "1.0", AT, AT, ReplicaState.ALIVE, ("report",), ())
SILENT = replace(LIVE, state=ReplicaState.SILENT)
PAUSE = Pause("ann", AT, None, "move")


@pytest.mark.parametrize(
    ("minutes", "task", "story", "words"),
    [
        (60, {}, HAS_RUN, f"{OF_03}, whose run ended well"),
        (1, {}, HAS_RUN, f"{OF_03}, whose run was still going on"),
        (
            0,
            {},
            HAS_RUN | {"runs": (replace(WELL, started_at=AT + timedelta(seconds=0.2)),)},
            f"{OF_03}, whose run was still going on",
        ),
        # Its holder has not told its end, so it may have died right after its begin.
        *(
            (
                1,
                {},
                HAS_RUN | {"runs": (replace(WELL, outcome=outcome),)},
                f"{OF_03}, whose run {how}",
            )
            for outcome, how in (
                ("died", "was not known to be over"),
                ("freed", "was not known to be over"),
                ("overran", "was still going on"),
            )
        ),
        (-1, {}, HAS_RUN, f"{OF_03}, whose run began later"),
        (60, {}, HAS_RUN | {"runs": (replace(WELL, outcome="died"), FAILED)}, ", whose run failed"),
        (
            60,
            {},
            HAS_RUN | {"runs": (replace(WELL, kind="manual"),)},
            "its last run until then was a manual run, which ended well",
        ),
        (60, {"state": TaskState.RUNNING, "outcome": None}, RUNS_ON, f"{OF_03}, whose run goes on"),
        (
            60,
            {"state": TaskState.HOLDER_SILENT, "outcome": None},
            RUNS_ON,
            f"{OF_03}, whose run may be dead, because its replica has died or is silent",
        ),
        (
            60,  # the state is that of a pause, or dead
            {"state": TaskState.PAUSED, "outcome": "died"},
            RUNS_ON,
            f"{OF_03}, whose run has not renewed its lease (it died, or its end has not been "
            "written yet)",
        ),
        (60, {"outcome": "cut"}, RUNS_ON, f"{OF_03}, whose run was cut by a stop"),
        (
            60,
            {"state": TaskState.RUNNING, "outcome": None, "kind": "hold"},
            RUNS_ON,
            "its last run until then was a hold, which goes on",
        ),
        (
            60,
            {},
            {"verdict": Verdict.DUE, "scheduled_at": AT, "due": (DUE,)},
            f"{OF_03}, which nobody has begun",
        ),
        (
            60,
            {},
            {"verdict": Verdict.DUE, "scheduled_at": AT, "due": (replace(DUE, is_exact=False),)},
            "its last run time until then was about [03:00], which nobody has begun",
        ),
        (
            60,
            {},
            {"verdict": Verdict.DUE, "scheduled_at": AT, "due": (replace(DUE, run_times=None),)},
            "nobody has begun its run times since [03:00], which are many",
        ),
        (60, {}, HAS_RUN | {"not_known_after": AT}, "its last known run time until then was"),
        (
            60,
            {},
            {"verdict": Verdict.MISSED, "scheduled_at": AT, "miss": MISSED},
            f"{OF_03}, which was missed",
        ),
        (
            60,
            {},
            {"verdict": Verdict.MISSED, "scheduled_at": AT, "miss": SPAN},
            "its run times around then were missed",
        ),
        (60, {}, {}, "the history has no run time before that"),
        (60, {"started_at": None}, {}, "it has never run"),
        (60, {"pauses": (PAUSE,)}, HAS_RUN, f"it is paused now, and {OF_03}, whose run ended well"),
        (60, {"gone": True}, HAS_RUN, f"no live replica has it now, and {OF_03}"),
        (60, {"gone": True}, HAS_RUN | {"after": FAILED}, OF_03),
        (60, {}, HAS_RUN | {"replicas": (SILENT,)}, f"no live replica has it now, and {OF_03}"),
        (60, {}, HAS_RUN | {"replicas": (SILENT, LIVE)}, OF_03),
    ],
)
def test_the_headline_of_a_story_is_a_sentence(
    minutes: float, task: dict[str, Any], story: dict[str, Any], words: str
) -> None:
    known: dict[str, Any] = {
        "verdict": Verdict.UNKNOWN,
        "scheduled_at": None,
        "runs": (),
        "miss": None,
        "before": None,
        "after": None,
        "replicas": (),
    }
    at = AT + timedelta(minutes=minutes)
    told = Story(
        task=replace(TASK if story is RUNS_ON else OVER, **task),
        at=at,
        actions=(),
        history_begins_at=AT - timedelta(hours=1),
        **{**known, **story},
    )
    headline = story_lines(told, Page()).headline.partition(": ")[2]
    assert headline.startswith(words) or (words.startswith(",") and headline.endswith(words))


@pytest.mark.parametrize(
    ("miss", "words"),
    [
        ({}, "told by web-1 at [03:05]"),
        (
            {"ended_at": AT + timedelta(hours=1)},
            "first told by web-1 at [03:05], and added to until [04:00]",
        ),
        ({"replica": ""}, "noted at [03:05] by a replica that started after it"),
    ],
)
def test_a_miss_is_told_by_a_replica_that_lived_then(miss: dict[str, Any], words: str) -> None:
    noted_at = AT + timedelta(minutes=5)
    told = replace(MISSED, started_at=noted_at, ended_at=noted_at, reason="late")
    story = Story(
        task=OVER,
        at=AT,
        verdict=Verdict.MISSED,
        scheduled_at=AT,
        runs=(),
        miss=replace(told, **miss),
        before=None,
        after=None,
        actions=(),
        replicas=(),
        history_begins_at=None,
    )
    assert story_lines(story, Page()).verdict == [f"no replica ran [03:00]: late ({words})"]


def test_the_notes_on_a_run_are_its_attempt_and_its_retry() -> None:
    assert run_notes(FAILED, Page()) == "attempt 2, to be retried at [03:05]"
    assert run_notes(replace(FAILED, attempt=1, retry_at=None), Page()) == ""


STUCK = RunningRun("report", 5, "web-1", AT, lost=True)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("died", "its replica died"),
        ("overran", "longer than its maximum lock"),
        ("freed", "an operator freed"),
        ("overtaken", "had lost its lock"),
    ],
)
def test_how_a_run_ended_that_has_no_exception(outcome: str, words: str) -> None:
    assert words in ending_in_words(replace(FAILED, outcome=outcome, error_type=None, error=None))
    assert ending_in_words(replace(FAILED, outcome="ok")) == ""
