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
_REPLICAS_WITH_NAMES = 3


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
        what = f"{event.task:9}  {event.kind:8}  {describe(event)}" if event.task else event.kind
        print(f"{elapsed:7.3f}s  replica {event.replica}  {what}".rstrip(), flush=True)

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


def describe(event: Event) -> str:
    """Return an event's details in a few words."""
    scheduled = datetime.fromtimestamp(event.run_time).strftime("%H:%M:%S.%f")[:-4]
    if event.kind == "refused":
        if event.reason == "running":
            return f"(scheduled {scheduled}, {event.holder} is running it)"
        return f"(scheduled {scheduled}, {event.holder} has run it)"
    if event.detail:
        return f"(scheduled {scheduled}, {event.detail})"
    return f"(scheduled {scheduled}, token {event.token})"


def describe_tasks() -> str:
    """Return what the three jobs do, a line each."""
    return "\n".join(f"  {task.name:9}  {task.about}" for task in TASKS)


def table_rows(verdicts: Sequence[Verdict], replicas: int) -> list[list[str]]:
    """Return the table's cells: a heading, and a row for each task."""
    numbers = range(1, replicas + 1)
    name = "replica {}" if replicas <= _REPLICAS_WITH_NAMES else "#{}"
    heading = ["task", "windows", "runs", "doubled", "missed", *map(name.format, numbers)]
    rows = [
        [verdict.task, *map(str, (verdict.windows, verdict.runs, verdict.doubled, verdict.missed))]
        + [str(verdict.by_replica[number]) for number in numbers]
        for verdict in verdicts
    ]
    return [heading, *rows]
