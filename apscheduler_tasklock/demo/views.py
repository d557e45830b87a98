"""How the demo shows itself: a line per event, or on a terminal a live timeline."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from apscheduler_tasklock.demo.fleet import ReplicaEvent
from apscheduler_tasklock.demo.judgement import DemoTask, Judgement

# Limits the replicas whose columns have long names, so that the table stays within 80 characters.
_REPLICAS_WITH_NAMES = 2

# The counts of each task, and of all tasks together.
_COUNTS = ("windows", "runs", "doubled", "missed")

# The meanings of the fields of the last line.
_MEANINGS = {
    "windows": "how often the jobs were due; each window should run once",
    "runs": "how often the jobs ran to their end, on whichever replica",
    "doubled": "runs of a window that had run already",
    "missed": "windows that no replica ran to their end",
    "takeovers": "how often a window was run again, because its replica was killed",
    "run_again": "the windows of these takeovers, as task@run time",
}

# Limits the characters of a line, so that a terminal of 80 columns breaks no word.
_TEXT_WIDTH = 79


class View(Protocol):
    """A way to show the demo, entered while the replicas run."""

    def __enter__(self) -> View: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: ReplicaEvent, elapsed: float) -> None:
        """Show an event of a replica.

        :param elapsed: seconds since the start
        """

    def tick(self, elapsed: float, *, stopping: bool = False) -> None:
        """Show that time passes, or that the replicas are ending."""

    def show_judgements(self, judgements: Sequence[Judgement], replicas: int) -> None:
        """Show the table of the judgements."""


class PlainView:
    """Prints a line per event, at once."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: ReplicaEvent, elapsed: float) -> None:
        """Print the event's line."""
        print(f"{elapsed:7.3f}s  replica {event.replica}  {describe_event(event)}", flush=True)

    def tick(self, elapsed: float, *, stopping: bool = False) -> None:
        """Print nothing, because each line has its time."""

    def show_judgements(self, judgements: Sequence[Judgement], replicas: int) -> None:
        """Print the table of the judgements, with spaces between its columns, and the takeovers."""
        rows = table_rows(judgements, replicas)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print()
        for row in rows:
            name, *numbers = zip(row, widths, strict=True)
            cells = [f"{name[0]:<{name[1]}}", *(f"{cell:>{width}}" for cell, width in numbers)]
            print("  ".join(cells))
        print()
        if told := describe_takeovers(judgements):
            print(*told, "", sep="\n")


def describe_event(event: ReplicaEvent) -> str:
    """Return what happened, in a few words."""
    if event.kind == "ready":
        return "started, a new one"
    if event.kind == "follows":
        return "no longer leads"
    return f"{event.task:9}  {event.kind:8}  {_details(event)}" if event.task else event.kind


def _details(event: ReplicaEvent) -> str:
    when = f"scheduled {_clock_time(event.run_time, digits=2)}"
    if event.kind in ("added", "removed"):
        return f"({when})" if event.run_time else "(nobody runs it any more)"
    if event.kind == "refused":
        has = "is running" if event.reason == "running" else "has run"
        return f"({when}, {event.holder} {has} it)"
    if event.kind == "killed":
        return f"({when}, token {event.token}, SIGKILL)"
    if event.reason in ("takeover", "handed over"):
        return f"({when}, token {event.token}, {event.reason})"
    return f"({when}, {event.detail or f'token {event.token}'})"


def describe_tasks(tasks: Sequence[DemoTask]) -> str:
    """Return what the jobs do, a line each."""
    return "\n".join(f"  {task.name:9}  {task.about}" for task in tasks)


def table_rows(judgements: Sequence[Judgement], replicas: int) -> list[list[str]]:
    """Return the table's cells: a heading, and a row for each task."""
    numbers = range(1, replicas + 1)
    name = "replica {}" if replicas <= _REPLICAS_WITH_NAMES else "#{}"
    heading = ["task", *_COUNTS, "takeovers", *map(name.format, numbers)]
    rows = []
    for judgement in judgements:
        counts = [getattr(judgement, name) for name in _COUNTS]
        by_replica = [judgement.by_replica[number] for number in numbers]
        rows.append([judgement.task, *map(str, [*counts, len(judgement.takeovers), *by_replica])])
    return [heading, *rows]


def describe_takeovers(judgements: Sequence[Judgement]) -> list[str]:
    """Return a line for each window that was run again."""
    lines = []
    for judgement in judgements:
        for again in judgement.takeovers:
            died = "its holder died before it began"
            if again.died is not None:
                died = f"replica {again.died} was killed in mid-run"
            window = f"{again.task} of {_clock_time(again.run_time)}"
            lines.append(f"{window}: {died}, replica {again.replica} ran it again")
    return lines


def explain_summary(judgements: Sequence[Judgement]) -> str:
    """Return what the last line's fields mean, a line each, and an empty line."""
    fields = [field.partition("=")[0] for field in summary(judgements).split()]
    width = max(map(len, fields))
    lines = [f"  {field:<{width}}  {_MEANINGS[field]}" for field in fields]
    return "\n".join(["What the last line counts:", *lines, ""])


def compare_with_no_lock(
    judgements: Sequence[Judgement], fires: int, *, has_leader: bool = False
) -> str:
    """Return how often the jobs would have run without the lock, and how often they did run.

    :param fires: how many fires there were, of all replicas
    :param has_leader: whether the replicas are in leader mode. At the end of the demo a follower
        has fires that no event has told of, because it was to ask for them later.
    """
    count = f"{fires} runs or more" if has_leader else f"{fires} runs"
    without = f"Without the lock, every replica would have run every job: {count}."
    return "\n".join([without, *_wrapped(f"With it, {describe_outcome(judgements)}.")])


def describe_shared(judgements: Sequence[Judgement], _fires: int) -> str:
    """Return how often the jobs of a shared store ran."""
    told = f"All jobs were added on replica 1: {describe_outcome(judgements)}."
    return "\n".join(_wrapped(told))


def describe_outcome(judgements: Sequence[Judgement]) -> str:
    """Return how often the jobs ran, and which windows began more than once."""
    windows, runs, doubled, missed = (_total(judgements, name) for name in _COUNTS)
    outcome = f"there were {runs} runs for {windows} windows: {doubled} doubled, {missed} missed"
    if not doubled and not missed:
        outcome = f"each of the {windows} windows ran once"
        if begun_again := _describe_begun_again(judgements):
            outcome += f" ({begun_again})"
    return outcome


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _TEXT_WIDTH, break_on_hyphens=False)


def _describe_begun_again(judgements: Sequence[Judgement]) -> str:
    """Return which windows began more than once, in the order of their run times."""
    again = Counter(
        (takeover.task, takeover.run_time)
        for judgement in judgements
        for takeover in judgement.takeovers
        if takeover.died is not None  # `None`: the dead run had not begun
    )
    told = [
        f"{task} of {_clock_time(run_time)} began {_times(count + 1)}"
        for (task, run_time), count in sorted(again.items(), key=lambda item: item[0][1])
    ]
    if not told:
        return ""
    died = "its holder was killed" if len(told) == 1 else "their holders were killed"
    return f"{', '.join(told)}, because {died}"


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _total(judgements: Sequence[Judgement], count: str) -> int:
    return sum(getattr(judgement, count) for judgement in judgements)


def summary(judgements: Sequence[Judgement]) -> str:
    """Return the last line: all windows together, and which of them were run again."""
    counts = [f"{name}={_total(judgements, name)}" for name in _COUNTS]
    takeovers = [takeover for found in judgements for takeover in found.takeovers]
    counts.append(f"takeovers={len(takeovers)}")
    if takeovers:
        windows = [f"{again.task}@{_clock_time(again.run_time)}" for again in takeovers]
        counts.append(f"run_again={','.join(windows)}")
    return " ".join(counts)


def _clock_time(moment: float, digits: int = 0) -> str:
    text = datetime.fromtimestamp(moment).strftime("%H:%M:%S.%f")
    return text[: len("HH:MM:SS.") + digits] if digits else text[: len("HH:MM:SS")]
