"""Stories in words: what is known of a task around a moment, such as why it did not run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from apscheduler_tasklock._words.formats import Formats
from apscheduler_tasklock._words.runs import (
    action_in_words,
    did_in_words,
    error_in_words,
    miss_in_words,
)
from apscheduler_tasklock._words.tasks import pause_in_words
from apscheduler_tasklock.status import MissCause, Pause, Run, Story, TaskState, TaskStatus, Verdict

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

# The runs that have no run time, by their kinds.
_WITHOUT_RUN_TIME = {"manual": "a manual run", "hold": "a hold"}


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
        f"{story.task.name} at {formats.moment(story.at)}: {_headline(story, formats)}",
        _verdict(story, formats),
        {name: lines for name, lines in sections.items() if lines},
    )


def _headline(story: Story, formats: Formats) -> str:
    """Return a sentence on the last run time until the moment.

    A missed run time is noted after its grace time. Until then the history has no entry, so the
    sentence names a pause and missing replicas itself.
    """
    words = []
    if _pauses_now(story):
        words.append("it is paused now")
    if story.after is None and _has_no_live_replica(story):
        words.append("no live replica has it now")
    return ", and ".join([*words, _last_run_time(story, formats)])


def _has_no_live_replica(story: Story) -> bool:
    """Return whether it is known that no live replica has the task."""
    return story.task.gone or (
        bool(story.replicas) and not any(each.alive for each in story.replicas)
    )


def _last_run_time(story: Story, formats: Formats) -> str:
    """Return which one was the last run time until the moment, and what became of it."""
    task, miss, verdict = story.task, story.miss, story.verdict
    if verdict is Verdict.UNKNOWN:
        is_new = task.started_at is None
        return "it has never run" if is_new else "the history has no run time before that"
    missed = "refused" if miss is not None and _is_refused(miss) else "missed"
    if miss is not None and story.scheduled_at != miss.last_scheduled_at:
        return f"its run times around then were {missed}"
    was = f"its last run time until then was {formats.moment(story.scheduled_at)}"
    if verdict is Verdict.MISSED:
        return f"{was}, which was {missed}"
    if verdict is Verdict.DUE:
        return f"{was}, which no replica has run so far"
    if verdict is Verdict.RAN:
        kind = story.runs[-1].kind
        became = _became(story.runs, story.at)
    else:
        kind = task.kind or ""
        became = "is dead" if task.state is TaskState.DEAD else "goes on"
    if kind in _WITHOUT_RUN_TIME:
        return f"its last run until then was {_WITHOUT_RUN_TIME[kind]}, which {became}"
    return f"{was}, whose run {became}"


def _is_refused(miss: Run) -> bool:
    """Return whether a missed run time was one of the application, inside a window."""
    return miss.cause == MissCause.REFUSED.value


def _became(runs: Sequence[Run], at: datetime) -> str:
    """Return how far the runs of a run time had come at a moment."""
    # Moments are shown in seconds, so a run that began in the second of the moment has begun.
    begun = [run for run in runs if run.started_at < at + timedelta(seconds=1)]
    if not begun:
        return "began later"
    last = begun[-1]
    return "was still going on" if last.ended_at >= at else _ENDED.get(last.outcome, last.outcome)


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
        refused = "refused" if _is_refused(story.miss) else "no replica ran"
        told = _told_in_words(story.miss, formats)
        lines.append(f"{refused} {miss_in_words(story.miss, formats)} ({told})")
    elif story.verdict is Verdict.DUE:
        late = formats.seconds(task.late_by)
        lines.append(
            f"due at {formats.moment(task.due_at)}, {late} ago, and no replica has run it so far"
        )
    lines += [pause_in_words(each, formats, with_since=True) for each in _pauses_now(story)]
    if story.after is None and task.due_at is not None and task.due_at > story.at:
        lines.append(f"due next at {formats.moment(task.due_at)}")
    return lines


def _told_in_words(miss: Run, formats: Formats) -> str:
    """Return who has told of missed run times, and when.

    An entry that has grown since names the replica that was the first to tell.
    """
    at = formats.moment(miss.started_at)
    if not miss.replica:
        return f"noted at {at} by a replica that started after it"
    if miss.ended_at == miss.started_at:
        return f"told by {miss.replica} at {at}"
    last = formats.moment(miss.ended_at)
    return f"first told by {miss.replica} at {at}, and added to until {last}"


def _running(task: TaskStatus, formats: Formats) -> str:
    words = f"{_what(task.kind, task.scheduled_at, formats)} began at "
    words += f"{formats.moment(task.started_at)} on {task.holder}, and goes on (token {task.token}"
    return f"{words}, {task.state.value})"


def _what(kind: str | None, scheduled_at: datetime | None, formats: Formats) -> str:
    """Return which run it was: its run time, or its kind if it has no run time."""
    if kind is not None and kind in _WITHOUT_RUN_TIME:
        return _WITHOUT_RUN_TIME[kind]
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
