"""Stories in words: what is known of a task around a moment, such as why it did not run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from apscheduler_tasklock._words.formats import Formats
from apscheduler_tasklock._words.runs import (
    action_in_words,
    did_in_words,
    error_in_words,
    miss_in_words,
)
from apscheduler_tasklock._words.tasks import pause_in_words
from apscheduler_tasklock.status import Pause, Run, Story, TaskStatus, Verdict

# The words for the outcomes of runs. Other outcomes are shown by their own names.
_ENDED = {
    "ok": "ended well",
    "error": "failed",
    "cancelled": "was cancelled",
    "died": "died with its holder",
    "overran": "overran its maximum lock",
    "freed": "was freed by an operator",
    "overtaken": "was taken for dead, and ended later",
}


@dataclass(frozen=True)
class StoryLines:
    """A story in words.

    :ivar headline: the task, the moment and the verdict
    :ivar verdict: what became of the run time that the story is about, a line for each fact
    :ivar sections: what else is known, by what the lines are about, without empty sections:
        ``"before"``, ``"after"``, ``"operators"``, ``"replicas"`` and ``"history"``
    """

    headline: str
    verdict: Sequence[str]
    sections: Mapping[str, Sequence[str]]


def story_lines(story: Story, formats: Formats) -> StoryLines:
    """Return a story in words."""
    sections = {
        "before": _runs([story.before], formats),
        "after": _runs([story.after], formats),
        "operators": [_action(each, story.task, formats) for each in story.actions],
        "replicas": [
            f"{each.replica_id} {each.state.value}, started {formats.moment(each.started_at)}"
            for each in story.replicas
        ],
        "history": [_history(story, formats)],
    }
    return StoryLines(
        f"{story.task.name} at {formats.moment(story.at)}: {_headline(story)}",
        _verdict(story, formats),
        {name: lines for name, lines in sections.items() if lines},
    )


def _headline(story: Story) -> str:
    """Return the verdict. If the run ended before the moment, say that no later one is known.

    A missed run time is noted after its grace time, so of a pause that has just begun the verdict
    tells by itself.
    """
    words = story.verdict.value
    if story.verdict is Verdict.RAN and all(run.ended_at < story.at for run in story.runs):
        words = "no later run time is known than that of this run"
    return f"paused now; {words}" if _pauses_now(story) else words


def _pauses_now(story: Story) -> list[Pause]:
    """Return the task's pauses that have not ended and had begun at the moment of the story."""
    return [pause for pause in story.task.pauses if pause.since <= story.at]


def _verdict(story: Story, formats: Formats) -> list[str]:
    """Return what became of the run time that the story is about."""
    task = story.task
    lines = _runs(story.runs, formats)
    if story.verdict is Verdict.RUNNING:
        lines.append(_running(task, formats))
    elif story.miss is not None:
        told = f"(told by {story.miss.replica} at {formats.moment(story.miss.started_at)})"
        lines.append(f"no replica ran {miss_in_words(story.miss, formats)} {told}")
    elif story.verdict is Verdict.DUE:
        late = formats.seconds(task.late_by)
        lines.append(
            f"due at {formats.moment(task.due_at)}, {late} ago, and no replica has run it so far"
        )
    elif story.verdict is Verdict.UNKNOWN:
        lines.append("the history tells of no run time until then")
    lines += [pause_in_words(each, formats, with_since=True) for each in _pauses_now(story)]
    if story.after is None and task.due_at is not None and task.due_at > story.at:
        lines.append(f"due next at {formats.moment(task.due_at)}")
    return lines


def _running(task: TaskStatus, formats: Formats) -> str:
    words = f"{_what(task.kind, task.scheduled_at, formats)} began at "
    words += f"{formats.moment(task.started_at)} on {task.holder}, and goes on (token {task.token}"
    return f"{words}, {task.state.value})"


def _what(kind: str | None, scheduled_at: datetime | None, formats: Formats) -> str:
    """Return which run it was: its run time, or its kind if it has no run time."""
    if kind in ("manual", "hold"):
        return {"manual": "a manual run", "hold": "a hold"}[kind]
    again = {"takeover": "run again: ", "retry": "retried: "}.get(kind or "", "")
    return f"{again}{formats.moment(scheduled_at)}"


def _runs(runs: Iterable[Run | None], formats: Formats) -> list[str]:
    return [_run(run, formats) for run in runs if run is not None]


def _run(run: Run, formats: Formats) -> str:
    error = error_in_words(run)
    began = f"began at {formats.moment(run.started_at)} on {run.replica}"
    ended = f"{_ENDED.get(run.outcome, run.outcome)} after {formats.seconds(run.took)}"
    words = f"{_what(run.kind, run.scheduled_at, formats)} {began}, {ended} (token {run.token})"
    if run.retry_at is not None:
        words += f", to be retried at {formats.moment(run.retry_at)}"
    return f"{words}: {error}" if error else words


def _action(action: Run, task: TaskStatus, formats: Formats) -> str:
    what = did_in_words(action)
    if action.task != task.name:
        what += f" all tasks ({action.task})"
    return f"{formats.moment(action.started_at)} {what} {action_in_words(action, formats)}"


def _history(story: Story, formats: Formats) -> str:
    begins_at = story.history_begins_at
    if begins_at is None:
        return "there is no history of this task"
    words = f"begins at {formats.moment(begins_at)}"
    if story.at < begins_at:
        words += "; before it nothing is known"
    return words
