"""How the demo shows itself: a line per event, or on a terminal a live timeline."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from apscheduler_tasklock.demo.fleet import Event
from apscheduler_tasklock.demo.jobs import TASKS
from apscheduler_tasklock.demo.verdict import Verdict

# With more replicas than that, the table's columns have short names to stay within 80.
_REPLICAS_WITH_NAMES = 2

# What is counted of each task, and of all.
_COUNTS = ("windows", "runs", "doubled", "missed")


class View(Protocol):
    """What the demo asks of either way to show it. Entered while the replicas run."""

    def __enter__(self) -> View: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event, elapsed: float) -> None:
        """Show what a replica told, so many seconds after the start."""

    def tick(self, elapsed: float, *, stopping: bool = False) -> None:
        """Show that time passes, or that the replicas are ending."""

    def show_verdicts(self, verdicts: Sequence[Verdict], replicas: int) -> None:
        """Show the table."""


def choose_view(replicas: int, seconds: float) -> View:
    """Return the live timeline if standard output can show it, else plain lines."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        from apscheduler_tasklock.demo.timeline import LiveView

        console = Console(highlight=False)
        if not (console.is_dumb_terminal or console.options.ascii_only):
            return LiveView(console, replicas, seconds)
    return PlainView()


class PlainView:
    """Prints a line per event, at once."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event, elapsed: float) -> None:
        """Print the event's line."""
        print(f"{elapsed:7.3f}s  replica {event.replica}  {describe_event(event)}", flush=True)

    def tick(self, elapsed: float, *, stopping: bool = False) -> None:
        """Print nothing; the lines carry the time."""

    def show_verdicts(self, verdicts: Sequence[Verdict], replicas: int) -> None:
        """Print the table, its columns lined up with spaces."""
        rows = table_rows(verdicts, replicas)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print()
        for row in rows:
            name, *numbers = zip(row, widths, strict=True)
            cells = [f"{name[0]:<{name[1]}}", *(f"{cell:>{width}}" for cell, width in numbers)]
            print("  ".join(cells))
        print()
        if told := describe_takeovers(verdicts):
            print(*told, "", sep="\n")


def describe_event(event: Event) -> str:
    """Return what happened, in a few words."""
    if event.kind == "ready":
        return "started, a new one"
    return f"{event.task:9}  {event.kind:8}  {_details(event)}" if event.task else event.kind


def _details(event: Event) -> str:
    when = f"scheduled {_clock_time(event.run_time, digits=2)}"
    if event.kind == "refused":
        has = "is running" if event.reason == "running" else "has run"
        return f"({when}, {event.holder} {has} it)"
    if event.kind == "killed":
        return f"({when}, token {event.token}, SIGKILL)"
    if event.reason == "takeover":
        return f"({when}, token {event.token}, takeover)"
    return f"({when}, {event.detail or f'token {event.token}'})"


def describe_tasks() -> str:
    """Return what the three jobs do, a line each."""
    return "\n".join(f"  {task.name:9}  {task.about}" for task in TASKS)


def table_rows(verdicts: Sequence[Verdict], replicas: int) -> list[list[str]]:
    """Return the table's cells: a heading, and a row for each task."""
    numbers = range(1, replicas + 1)
    name = "replica {}" if replicas <= _REPLICAS_WITH_NAMES else "#{}"
    heading = ["task", *_COUNTS, "takeovers", *map(name.format, numbers)]
    rows = []
    for verdict in verdicts:
        counts = [getattr(verdict, name) for name in _COUNTS]
        by_replica = [verdict.by_replica[number] for number in numbers]
        rows.append([verdict.task, *map(str, [*counts, len(verdict.takeovers), *by_replica])])
    return [heading, *rows]


def describe_takeovers(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line for each window that was run again."""
    lines = []
    for verdict in verdicts:
        for again in verdict.takeovers:
            died = "its holder died before it began"
            if again.died is not None:
                died = f"replica {again.died} was killed in mid-run"
            window = f"{again.task} of {_clock_time(again.run_time)}"
            lines.append(f"{window}: {died}, replica {again.replica} ran it again")
    return lines


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the last line: all windows together, and which of them were run again."""
    counts = [f"{name}={sum(getattr(found, name) for found in verdicts)}" for name in _COUNTS]
    takeovers = [takeover for found in verdicts for takeover in found.takeovers]
    counts.append(f"takeovers={len(takeovers)}")
    if takeovers:
        windows = [f"{again.task}@{_clock_time(again.run_time)}" for again in takeovers]
        counts.append(f"run_again={','.join(windows)}")
    return " ".join(counts)


def _clock_time(moment: float, digits: int = 0) -> str:
    text = datetime.fromtimestamp(moment).strftime("%H:%M:%S.%f")
    return text[: len("HH:MM:SS.") + digits] if digits else text[: len("HH:MM:SS")]
