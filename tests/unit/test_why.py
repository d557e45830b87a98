"""Why a task did not run, or what became of its run: the story of rows around a moment."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from apscheduler_tasklock._words.json_text import as_json
from apscheduler_tasklock._words.stories import story_of
from apscheduler_tasklock.cli.output import PlainOutput
from apscheduler_tasklock.cli.why import print_story
from apscheduler_tasklock.status import Run, Story, TaskStatus, Verdict
from tests.support.rows import (
    NOW,
    READ,
    action_read,
    miss_read,
    replica_status,
    run_read,
    seconds,
    task_status,
)


def minutes(number: float) -> timedelta:
    """Return so many minutes before now."""
    return timedelta(minutes=-number)


def ago(number: float) -> datetime:
    return NOW + minutes(number)


def ran(number: float, token: int, **changes: Any) -> Run:
    """Return a run that began for its run time so many minutes ago."""
    ended_at = minutes(number) + seconds(2)
    times = {"scheduled_at": minutes(number), "started_at": minutes(number), "ended_at": ended_at}
    return run_read(**{"task": "job", "token": token, **times, **changes})


def did(number: float, **changes: Any) -> Run:
    """Return what an operator did so many minutes ago: a pause without an end."""
    return action_read(
        **{"task": "job", "started_at": minutes(number), "until": None, "reason": None, **changes}
    )


PAUSED = did(35, reason="the shop is closed")
RESUMED = did(15, outcome="resumed")
# A task with four run times: run, failed over, missed twice in a pause, and run.
# Its schedule is not known here, so nothing is computed; see test_due_times.py.
TASK = task_status("job", scheduled_at=minutes(10), schedule=None)
TAKEN_OVER = {"kind": "takeover", "replica": "two", "outcome": "error", "error_type": "ValueError"}
RUNS = (
    ran(60, 1),
    ran(50, 2, outcome="died", ended_at=seconds(0)),
    ran(50, 3, **TAKEN_OVER, started_at=minutes(48), ended_at=minutes(47)),
    miss_read(task="job", scheduled_at=minutes(30), last_scheduled_at=minutes(20), run_times=2),
    ran(10, 4),
)
ACTIONS = (PAUSED, RESUMED, did(70, outcome="run"))
REPLICAS = (
    replica_status("one", tasks=("another", "job")),
    replica_status("two", tasks=("another",)),
)


def why(
    number: float = 0,
    *more: Run,
    task: TaskStatus = TASK,
    runs: Sequence[Run] = RUNS,
    actions: Sequence[Run] = ACTIONS,
) -> Story:
    """Return the story around the moment of so many minutes ago."""
    return story_of(task, [*actions, *runs, *more], REPLICAS, ago(number))


def words(story: Story, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that the command prints of a story."""
    print_story(story, PlainOutput())
    return capsys.readouterr().out.splitlines()


def tokens(story: Story) -> list[int | None]:
    return [run.token for run in story.runs]


class TestStories:
    def test_of_a_run_that_ended_well(self) -> None:
        story = why()
        assert (story.verdict, tokens(story), story.miss) == (Verdict.RAN, [4], None)
        assert story.before is not None
        assert (story.before.token, story.after) == (3, None)
        assert [replica.replica_id for replica in story.replicas] == ["one"]

    def test_of_a_run_that_died_and_was_taken_over(self) -> None:
        story = why(40)
        assert (story.verdict, tokens(story)) == (Verdict.RAN, [2, 3])
        assert story.before is not None
        assert story.after is not None
        assert (story.before.token, story.after.token) == (1, 4)

    @pytest.mark.parametrize(("number", "token"), [(60, 1), (59.999, 1), (10, 4), (9.999, 4)])
    def test_a_run_time_is_the_last_one_from_its_moment_on(self, number: float, token: int) -> None:
        story = why(number)
        assert (story.verdict, tokens(story)) == (Verdict.RAN, [token])

    @pytest.mark.parametrize(
        ("number", "at"), [(30, 30), (29, 30), (25, 30), (20.001, 30), (20, 20), (19, 20), (11, 20)]
    )
    def test_of_missed_run_times_and_their_reason(self, number: float, at: float) -> None:
        story = why(number)
        assert (story.verdict, story.runs) == (Verdict.MISSED, ())
        assert story.miss is not None
        assert (story.miss.reason, story.miss.run_times) == ("the task was paused", 2)
        assert story.scheduled_at == ago(at)
        # What happened between the runs before and after; a request for a run came earlier.
        assert [action.outcome for action in story.actions] == ["paused", "resumed"]

    def test_of_missed_run_times_after_a_run_in_their_midst(self) -> None:
        midst = ran(25, 5)
        assert tokens(why(24, midst)) == []
        story = why(19, midst)
        assert (story.verdict, story.before and story.before.token) == (Verdict.MISSED, 5)
        assert story.miss is not None
        assert story.scheduled_at == story.miss.last_scheduled_at

    @pytest.mark.parametrize(("number", "told"), [(26, 0), (25, 1), (23, 0), (19, 0)])
    def test_of_a_run_time_in_a_pause_for_which_another_cause_is_told(
        self, number: float, told: int
    ) -> None:
        other = miss_read(task="job", scheduled_at=minutes(25), cause="misfire", reason="late")
        story = why(number, other)
        assert story.miss is not None
        assert story.miss.reason == ("the task was paused", "late")[told]

    @pytest.mark.parametrize(
        ("until", "is_told"), [(None, True), (minutes(75), False), (minutes(60), False)]
    )
    def test_a_pause_that_began_before_the_run_before_is_told_if_it_was_in_force(
        self, until: timedelta | None, is_told: bool
    ) -> None:
        story = why(40, actions=[did(80, until=until)])
        assert len(story.actions) == is_told

    @pytest.mark.parametrize(
        ("reason", "told"), [(None, ["ann@ops"]), ("with the pauses of others", [])]
    )
    def test_of_several_pauses_those_are_told_that_nobody_took_out(
        self, reason: str | None, told: list[str]
    ) -> None:
        resumed = did(78, outcome="resumed", by="bob", reason=reason)
        story = why(40, actions=[did(80), did(79, by="bob"), resumed])
        assert [action.by for action in story.actions] == told

    def test_of_a_time_before_the_history_begins(self, capsys: pytest.CaptureFixture[str]) -> None:
        story = why(90)
        assert (story.verdict, story.scheduled_at) == (Verdict.UNKNOWN, None)
        assert story.history_begins_at == ago(60)
        told = "\n".join(words(story, capsys))
        assert "before it nothing is known" in told
        assert "nobody" not in told
        assert "no replica" not in told

    @pytest.mark.parametrize(
        ("kept", "runs", "begins"), [(None, RUNS, 60), (10, RUNS, 10), (10, (), None)]
    )
    def test_it_begins_with_the_oldest_run_since_which_none_was_overwritten(
        self, kept: float | None, runs: Sequence[Run], begins: float | None
    ) -> None:
        kept_since = None if kept is None else ago(kept)
        story = story_of(TASK, runs, REPLICAS, NOW, NOW, kept_since)
        assert story.history_begins_at == (None if begins is None else ago(begins))

    def test_of_a_run_that_goes_on(self, capsys: pytest.CaptureFixture[str]) -> None:
        runs = task_status("job", **READ["running"] | {"scheduled_at": seconds(-61)})
        story = why(task=runs, runs=())
        assert story.verdict is Verdict.RUNNING
        assert why(5, task=runs, runs=()).verdict is Verdict.UNKNOWN
        assert "on one, and goes on (token 7)" in "\n".join(words(story, capsys))

    def test_of_a_run_that_goes_on_after_its_holder_died(self) -> None:
        begun = {"scheduled_at": seconds(-61), "kind": "takeover"}
        died = run_read(
            task="job",
            token=6,
            scheduled_at=seconds(-61),
            started_at=seconds(-61),
            ended_at=seconds(0),
            replica="gone",
            outcome="died",
        )
        story = why(task=task_status("job", **READ["running"] | begun), runs=[died])
        assert (story.verdict, [run.replica for run in story.runs]) == (Verdict.RUNNING, ["gone"])

    def test_of_a_run_time_that_is_due_and_not_told_yet(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        story = why(task=task_status("job", **READ["overdue"]), runs=())
        assert (story.verdict, story.scheduled_at) == (Verdict.DUE, NOW - timedelta(seconds=95))
        told = "\n".join(words(story, capsys))
        assert "due 2026-01-31T11:58:25Z, begun by nobody; no reason is noted so far" in told

    @pytest.mark.parametrize(
        ("earlier", "verdict"),
        [(0.02, Verdict.MISSED), (0.99, Verdict.MISSED), (1, Verdict.DUE), (5, Verdict.DUE)],
    )
    def test_of_a_due_time_whose_miss_is_told(self, earlier: float, verdict: Verdict) -> None:
        """A due time that a replica has registered is a little later than the run time."""
        miss = miss_read(task="job", scheduled_at=seconds(-95 - earlier))
        assert why(task=task_status("job", **READ["overdue"]), runs=[miss]).verdict is verdict


class TestWords:
    def test_tell_the_miss_with_what_operators_did(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = words(why(25), capsys)
        assert lines == [
            "job at 2026-01-31T11:35:00Z: its run times around then were missed",
            "  no replica ran 2 run times from 2026-01-31T11:30:00Z to 2026-01-31T11:40:00Z: the "
            "task was paused (told by one at 2026-01-31T11:10:00Z)",
            "before     run again: 2026-01-31T11:10:00Z began at 2026-01-31T11:12:00Z on two, "
            "failed after 60s (token 3): ValueError",
            "after      2026-01-31T11:50:00Z began at 2026-01-31T11:50:00Z on one, ended "
            "well after 2s (token 4)",
            "operators  2026-01-31T11:25:00Z paused by ann@ops until resumed (the shop is closed)",
            "           2026-01-31T11:45:00Z resumed by ann@ops",
            "replicas   one alive, started 2026-01-31T11:00:00Z",
            "history    begins at 2026-01-31T11:00:00Z",
        ]

    @pytest.mark.parametrize(
        ("number", "sentence"),
        [
            (0, "its last run time until then was 2026-01-31T11:50:00Z, whose run ended well"),
            (11, "its last run time until then was 2026-01-31T11:40:00Z, which was missed"),
            (40, "its last run time until then was 2026-01-31T11:10:00Z, whose run failed"),
            (90, "the history has no run time before that"),
        ],
    )
    def test_say_first_what_became_of_the_last_run_time(
        self, capsys: pytest.CaptureFixture[str], number: float, sentence: str
    ) -> None:
        assert words(why(number), capsys)[0].partition(": ")[2] == sentence

    def test_of_a_task_that_has_never_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        new = task_status("new", **READ["new"])
        out = "\n".join(words(story_of(new, [], [], NOW), capsys))
        assert "new at 2026-01-31T12:00:00Z: it has never run" in out
        assert "there is no history of this task" in out
        assert "due next at 2026-01-31T12:04:00Z" in out


def test_as_json_a_story_has_its_verdict_and_the_cause() -> None:
    told = as_json(why(25))
    for part in ('"verdict": "missed"', '"cause": "paused"', '"outcome": "resumed"'):
        assert part in told
