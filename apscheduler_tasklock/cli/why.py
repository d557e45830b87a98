"""The command ``why``: what is known of a task around a moment, such as why it did not run."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from datetime import datetime

from apscheduler_tasklock.cli.exits import OK
from apscheduler_tasklock.cli.output import Output, output, print_json
from apscheduler_tasklock.cli.runs import action_in_words, did_in_words, miss_in_words
from apscheduler_tasklock.cli.status import pause_in_words
from apscheduler_tasklock.cli.target import name_of, task_locks
from apscheduler_tasklock.status import Pause, Run, Story, TaskStatus, Verdict

_STYLES = {
    Verdict.RAN: "",
    Verdict.RUNNING: "bold blue",
    Verdict.MISSED: "bold red",
    Verdict.DUE: "yellow",
    Verdict.UNKNOWN: "magenta",
}
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


def why(options: argparse.Namespace) -> int:
    """Tell what is known of a task around a moment."""
    with task_locks(options) as locks:
        story = locks.why(name_of(options, options.task), options.at)
    if options.json:
        print_json(story)
        return OK
    shown = output()
    shown.print(f"{story.task.name} at {shown.moment(story.at)}: {_headline(story)}")
    for line in _verdict(story, shown):
        shown.print(f"  {line}", _STYLES[story.verdict])
    for name, lines in {
        "before": _runs([story.before], shown),
        "after": _runs([story.after], shown),
        "operators": [_action(each, story.task, shown) for each in story.actions],
        "replicas": [
            f"{each.replica_id} {each.state.value}, started {shown.moment(each.started_at)}"
            for each in story.replicas
        ],
        "history": [_history(story, shown)],
    }.items():
        for place, line in enumerate(lines):
            shown.print(f"{'' if place else name:<11}{line}")
    return OK


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


def _verdict(story: Story, shown: Output) -> list[str]:
    """Return what became of the run time that the story is about."""
    task = story.task
    lines = _runs(story.runs, shown)
    if story.verdict is Verdict.RUNNING:
        lines.append(_running(task, shown))
    elif story.miss is not None:
        told = f"(told by {story.miss.replica} at {shown.moment(story.miss.started_at)})"
        lines.append(f"no replica ran {miss_in_words(story.miss, shown)} {told}")
    elif story.verdict is Verdict.DUE:
        late = shown.seconds(task.late_by)
        lines.append(
            f"due at {shown.moment(task.due_at)}, {late} ago, and no replica has run it so far"
        )
    elif story.verdict is Verdict.UNKNOWN:
        lines.append("the history tells of no run time until then")
    lines += [pause_in_words(each, shown, with_since=True) for each in _pauses_now(story)]
    if story.after is None and task.due_at is not None and task.due_at > story.at:
        lines.append(f"due next at {shown.moment(task.due_at)}")
    return lines


def _running(task: TaskStatus, shown: Output) -> str:
    words = f"{_what(task.kind, task.scheduled_at, shown)} began at "
    words += f"{shown.moment(task.started_at)} on {task.holder}, and goes on (token {task.token}"
    return f"{words}, {task.state.value})"


def _what(kind: str | None, scheduled_at: datetime | None, shown: Output) -> str:
    """Return which run it was: its run time, or its kind if it has no run time."""
    if kind in ("manual", "hold"):
        return {"manual": "a manual run", "hold": "a hold"}[kind]
    again = {"takeover": "run again: ", "retry": "retried: "}.get(kind or "", "")
    return f"{again}{shown.moment(scheduled_at)}"


def _runs(runs: Iterable[Run | None], shown: Output) -> list[str]:
    return [_run(run, shown) for run in runs if run is not None]


def _run(run: Run, shown: Output) -> str:
    error = ": ".join(part for part in (run.error_type, run.error) if part)
    began = f"began at {shown.moment(run.started_at)} on {run.replica}"
    ended = f"{_ENDED.get(run.outcome, run.outcome)} after {shown.seconds(run.took)}"
    words = f"{_what(run.kind, run.scheduled_at, shown)} {began}, {ended} (token {run.token})"
    if run.retry_at is not None:
        words += f", to be retried at {shown.moment(run.retry_at)}"
    return f"{words}: {error}" if error else words


def _action(action: Run, task: TaskStatus, shown: Output) -> str:
    what = did_in_words(action)
    if action.task != task.name:
        what += f" all tasks ({action.task})"
    return f"{shown.moment(action.started_at)} {what} {action_in_words(action, shown)}"


def _history(story: Story, shown: Output) -> str:
    begins_at = story.history_begins_at
    if begins_at is None:
        return "there is no history of this task"
    words = f"begins at {shown.moment(begins_at)}"
    if story.at < begins_at:
        words += "; before it nothing is known"
    return words
