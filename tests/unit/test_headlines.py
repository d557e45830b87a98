"""A task in one sentence: its state, since when, where, why, and what to do."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from apscheduler_tasklock.dashboard.formats import Formats
from apscheduler_tasklock.status import JobState, Pause, ReplicaState, Run, RunningRun, TaskState
from tests.support.rows import (
    NOW,
    READ,
    job_status,
    miss_read,
    replica_status,
    run_read,
    seconds,
    task_status,
)
from tests.support.waist import WatchedRows, findings_of, headline_of, open_runs

FORMATS = Formats(timezone.utc, NOW)
ANN = Pause("ann", NOW - seconds(600), None, "move")
ERROR = run_read(
    task="sync", replica="web-1", outcome="error", error_type="ValueError", error="no price"
)


def said(
    entries: list[Run] | None = None,
    usual: float | None = None,
    alive: list[str] | None = None,
    jobs: Any = (),
    stopping_since: datetime | None = None,
    holder_state: ReplicaState | None = None,
    **columns: Any,
) -> tuple[str, str]:
    """Return the sentence, and what to do."""
    task = task_status(**columns)
    replicas = None
    if alive is not None:
        replicas = [replica_status(name, stopping_since=stopping_since) for name in alive]
    if holder_state is not None:
        replicas = [
            replica_status(columns["holder"], state=holder_state, seen_at=seconds(-90)),
            *(replicas or []),
        ]
    found = findings_of(WatchedRows(NOW, [task], jobs=dict(jobs)))
    finding = next((each for each in found if each.task == task.name), None)
    headline = headline_of(task, entries or [], FORMATS, usual, replicas, finding, NOW)
    return headline.says, headline.remedy


STUCK = RunningRun("sync", 6, "web-3", NOW - seconds(900), lost=True)
SENTENCES: dict[str, tuple[dict[str, Any], str]] = {
    "ok": (
        READ["ok"],
        "Well: its last run, at 11:59:00 on one, ended well after 2 s; due next at 12:04:00.",
    ),
    "freed": (
        READ["freed"],
        "Its last run, at 11:59:00 on one, was freed by an operator after 2 s; due next at "
        "12:04:00.",
    ),
    "new": (READ["new"], "New: it has never run; due next at 12:04:00."),
    "running": (
        {**READ["running"], "usual": 35.0},
        "Running since 11:59:00 on one, for 1 min (usually 35 s).",
    ),
    "running, and failing": (
        READ["failing, running"],
        "Running since 11:59:00 on one, for 1 min; failing: 3 times, the last with ValueError.",
    ),
    "stuck": (
        {**READ["too long"], "stuck": (STUCK,)},
        "Running too long: since 11:45:00 on web-3, for 15 min, although its lock is lost; other "
        "replicas may run the task meanwhile.",
    ),
    "stuck, and others have it": (
        {**READ["too long"], "stuck": (STUCK,), "alive": ["web-1", "web-3", "web-4"]},
        "Running too long: since 11:45:00 on web-3, for 15 min, although its lock is lost; web-1, "
        "web-4 can run the task meanwhile.",
    ),
    "stuck, and no other has it": (
        {**READ["too long"], "stuck": (STUCK,), "alive": ["web-3"]},
        "Running too long: since 11:45:00 on web-3, for 15 min, although its lock is lost; no "
        "other live replica can run the task until that run ends.",
    ),
    "its holder has died": (
        {**READ["holder silent"], "holder_state": ReplicaState.DIED, "usual": 35.0},
        "Two has died, and nobody knows whether its run goes on: since 11:59:00 on two, for at "
        "most 1 min (usually 35 s); no other replica runs the task before its lease has ended, at "
        "12:01:00.",
    ),
    "its holder is silent": (
        {**READ["holder silent"], "holder_state": ReplicaState.SILENT},
        "Two has been silent since 11:58:30, and nobody knows whether its run goes on: since "
        "11:59:00 on two, for at most 1 min; no other replica runs the task before its lease has "
        "ended, at 12:01:00.",
    ),
    "its holder is silent, and the replicas are not known": (
        READ["holder silent"],
        "Two has died or is silent, and nobody knows whether its run goes on: since 11:59:00 on "
        "two, for at most 1 min; no other replica runs the task before its lease has ended, at "
        "12:01:00.",
    ),
    "too long, and its holder has died": (
        {**READ["too long"], "holder": "one", "holder_state": ReplicaState.DIED},
        "Running too long: since 11:59:00 on one, for at most 1 min; one has died.",
    ),
    "too long, paused": (
        {**READ["too long"], "paused": True, "pauses": (ANN,)},
        "Running too long: since 11:59:00 on one, for 1 min; paused by ann since 11:50:00 until "
        "resumed (move).",
    ),
    "paused": (
        {**READ["paused"], "pauses": (ANN,)},
        "Paused by ann since 11:50:00 until resumed (move).",
    ),
    "job paused by an application": (
        {"state": TaskState.PAUSED, "pauses": (Pause("", NOW, None, None, job="a"),)},
        "Its stored job 'a' paused until resumed, by whom is not known, changed last at 12:00:00.",
    ),
    "dead": (
        READ["dead"],
        "Dead since 11:59:02: its run, begun at 11:59:00 on one, has not renewed its lease; nobody "
        "runs it again before its next run time, which is due at 12:04:00.",
    ),
    "dead, and a run time has come meanwhile": (
        {**READ["dead"], "due_at": seconds(-59), "zone": "UTC"},
        "Dead since 11:59:02: its run, begun at 11:59:00 on one, has not renewed its lease; nobody "
        "runs it again before its next run time, which is due at 12:04:01.",
    ),
    "dead, with failover": (
        {**READ["just dead"], "failover": True},
        "Dead since 11:59:59: its run, begun at 11:59:00 on one, has not renewed its lease; "
        "failover runs it again on a replica that has the task.",
    ),
    "overdue": (
        {**READ["overdue"], "alive": ["web-1", "web-2"]},
        "Overdue since 11:58:25, for 1 min 35 s: no replica has begun it, although web-1, web-2 "
        "have the task.",
    ),
    "overdue, alone": (
        {**READ["overdue"], "alive": []},
        "Overdue since 11:58:25, for 1 min 35 s: no replica has begun it, and no live replica has "
        "it.",
    ),
    "overdue, and the only replica stops": (
        {**READ["overdue"], "alive": ["web-1"], "stopping_since": NOW},
        "Overdue since 11:58:25, for 1 min 35 s: no replica has begun it, and each live replica "
        "that has it is stopping.",
    ),
    "dead, with failover, and the only replica stops": (
        {**READ["just dead"], "failover": True, "alive": ["web-1"], "stopping_since": NOW},
        "Dead since 11:59:59: its run, begun at 11:59:00 on one, has not renewed its lease; "
        "failover cannot run it again, because each live replica that has it is stopping.",
    ),
    "late": (READ["late"], "Late since 11:59:10, for 50 s: no replica has begun it."),
    "missed": (
        {**READ["missed"], "entries": [miss_read(reason="it came late")]},
        "Missed: no replica ran 11:00:00: it came late.",
    ),
    "cut": (
        READ["cut"],
        "Cut at 11:59:02: a stop of one ended its last run, and nobody has run its window again.",
    ),
    "retrying": (
        READ["retrying"],
        "Failed at 11:59:02 on one with ValueError (attempt 2); a retry is due at 12:02:00.",
    ),
    "failing": (
        {**READ["failing"], "entries": [ERROR]},
        "Failed at 12:00:00 on web-1, 3 times in a row: ValueError: no price.",
    ),
    "died": (READ["died"], "Failed at 12:00:00, 2 times in a row: the last died with its holder."),
    "unreadable": (
        READ["unreadable"],
        "Unreadable: its row has values that no replica writes, in schedule.",
    ),
    "gone": (
        {"state": TaskState.GONE, "gone": True},
        "Gone: no live replica has it any more, not counting those that stop; its last run, at "
        "11:59:00 on one, ended well after 2 s.",
    ),
    "asked for": (
        {**READ["new"], "requested_by": "ann", "requested_at": seconds(-30)},
        "New: it has never run; due next at 12:04:00; a run was asked for by ann at 11:59:30.",
    ),
    "a stored job that nobody claims": (
        {"jobs": {"sync": job_status("a", state=JobState.OVERDUE, next_run_time=seconds(-400))}},
        "Its last run, at 11:59:00 on one, ended well after 2 s; due next at 12:04:00; overdue: by "
        "400 s, the stored job 'a' that no replica claims: none is alive.",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_a_task_in_one_sentence(case: str) -> None:
    columns, says = SENTENCES[case]
    assert said(**columns)[0] == says


@pytest.mark.parametrize("state", TaskState)
def test_each_state_has_a_sentence(state: TaskState) -> None:
    assert said(state=state)[0].endswith(".")


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ("ok", ""),
        ("too long", "if it hangs, restart the replica"),
        ("paused", "resume it if the pause was forgotten"),
        ("failing", "see its error; acknowledge the failure if it can wait"),
        ("retrying", ""),
        ("overdue", "if no live replica has the task, start one; `why` tells more"),
    ],
)
def test_what_to_do_is_that_of_the_finding(row: str, remedy: str) -> None:
    assert said(**READ[row])[1] == remedy


def test_a_paused_job_is_resumed_by_itself() -> None:
    job = Pause("ann", NOW, None, None, job="a")
    remedy = "resume its job if the pause was forgotten"
    assert said(state=TaskState.PAUSED, pauses=(job,))[1] == remedy


def test_runs_that_are_not_over() -> None:
    def found(**columns: Any) -> list[tuple[str, float, str]]:
        runs = open_runs(task_status(**columns), NOW)
        return [(each.run.replica, each.took, each.state.value) for each in runs]

    assert found() == []
    assert found(**READ["running"]) == [("one", 60.0, "running")]
    assert found(**READ["holder silent"]) == [("two", 60.0, "holder silent")]
    assert found(**READ["dead"]) == [("one", 2.0, "dead")]
    assert found(**READ["handed over"]) == []
    # The task runs elsewhere, while a run that has lost its lock goes on.
    both = found(**{**READ["running"], "state": TaskState.TOO_LONG, "stuck": (STUCK,)})
    assert both == [("one", 60.0, "running"), ("web-3", 900.0, "too long")]
    # One may have begun after the time of the overview.
    begun = RunningRun("sync", 6, "web-3", NOW + seconds(0.026), lost=True)
    assert found(**{**READ["ok"], "stuck": (begun,)}) == [("web-3", 0.0, "too long")]
    own = RunningRun("sync", 7, "one", NOW - seconds(60), lost=True)
    assert found(**{**READ["overruns"], "stuck": (own,)}) == [("one", 60.0, "too long")]
