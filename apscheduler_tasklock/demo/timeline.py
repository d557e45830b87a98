"""The live timeline, drawn with rich: a lane per replica, runs as blocks, refusals as dots."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from apscheduler_tasklock.demo.fleet import ReplicaEvent
from apscheduler_tasklock.demo.judgement import DemoTask, Judgement
from apscheduler_tasklock.demo.lanes import (
    AGAIN,
    BAD,
    DEATH,
    FAINT,
    LEADS,
    MARKS,
    RAISING_RUN,
    REPLICA_WIDTH,
    RUN,
    TAKEOVER,
    TASK_WIDTH,
    DemoLanes,
    colours,
)
from apscheduler_tasklock.demo.views import describe_event, describe_takeovers, table_rows

# Seconds that the axis spans. A longer demo scrolls.
_SPAN = 30.0

# Seconds at the end of the axis for runs that end after the time is up.
_LAST_RUNS = 3.0

_ANY_WIDTH = 1000


class LiveView:
    """Draws the lanes while the replicas run, and leaves the last picture on the terminal.

    :param seconds: how long the demo is
    :param tasks: the tasks that have lanes
    :param marked: the kind of event that is counted and marked
    :param has_leader: whether the replicas are in leader mode
    """

    def __init__(
        self,
        console: Console,
        replicas: int,
        seconds: float,
        tasks: Sequence[DemoTask],
        marked: str = "refused",
        *,
        has_leader: bool = False,
    ) -> None:
        self._colours = colours(tasks)
        self._marked = marked
        self._has_leader = has_leader
        self._console = console
        self._seconds = seconds
        self._lanes = DemoLanes(replicas, min(seconds, _SPAN) + _LAST_RUNS, tasks, marked)
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._elapsed = 0.0

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, event: ReplicaEvent, elapsed: float) -> None:
        """Add an event to the lanes; print it above them if it is worth a line."""
        self._lanes.add(event, elapsed)
        style = _told_style(event)
        if style:
            text = f"{elapsed:.1f}s  replica {event.replica}  {describe_event(event)}"
            self._live.console.print(Text(text, style))

    def tick(self, elapsed: float, *, stopping: bool = False) -> None:
        """Draw the lanes and the progress."""
        self._elapsed = elapsed
        width, height = self._console.size
        progress = self._progress(elapsed, width, stopping=stopping)
        lines = [Text(""), *self._lanes.draw(elapsed, width, height), self._legend(), progress]
        self._live.update(_cropped(lines), refresh=True)

    def print_timeline(self, console: Console) -> None:
        """Print the lanes once more, as they were drawn last."""
        lanes = self._lanes.draw(self._elapsed, *console.size)
        console.print(_cropped([*lanes, self._legend()]))

    def show_judgements(self, judgements: Sequence[Judgement], replicas: int) -> None:
        """Print the table of the judgements, and the takeovers."""
        heading, *rows = table_rows(judgements, replicas)
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for name in heading:
            table.add_column(name, justify="left" if name == "task" else "right", no_wrap=True)
        for judgement, row in zip(judgements, rows, strict=True):
            cells = [Text(cell) for cell in row]
            cells[0].stylize(self._colours[judgement.task])
            for cell, count in zip(cells[3:5], (judgement.doubled, judgement.missed), strict=True):
                cell.stylize(BAD if count else "green")
            table.add_row(*cells)
        # The console is wider than the terminal, so that rich cuts off no numbers. A narrow
        # terminal wraps the lines.
        told = describe_takeovers(judgements)
        Console(width=_ANY_WIDTH, highlight=False).print(
            "", table, "", *told, *[""][: len(told)], sep="\n"
        )

    def _legend(self) -> Text:
        signs = [
            (RUN, "bold", "run"),
            (RAISING_RUN, BAD, "raised"),
            (DEATH, BAD, "killed"),
            (TAKEOVER, AGAIN, "takeover"),
            (MARKS[self._marked], "bold", self._marked),
        ]
        if self._has_leader:
            signs.append((LEADS, AGAIN, "leads"))
        legend = Text("\n" + " " * (REPLICA_WIDTH + TASK_WIDTH))
        for sign, style, meaning in signs:
            legend.append(sign, style).append(f" {meaning}  ", FAINT)
        return legend

    def _progress(self, elapsed: float, width: int, *, stopping: bool) -> Text:
        done = min(1.0, elapsed / self._seconds)
        left = max(0.0, self._seconds - elapsed)
        told = "time is up" if stopping else f"{left:.0f} s left"
        marked = f"{self._marked} {self._lanes.total(self._marked)}"
        counts = f"runs {self._lanes.total('granted')}, {marked}"
        text = f"{elapsed:5.1f} s  {{}}  {told}, {counts}"
        columns = max(5, min(REPLICA_WIDTH + TASK_WIDTH, width - len(text) - 2))
        filled = round(done * columns)
        before, after = text.split("{}")
        bar = ("━" * filled, "cyan"), ("━" * (columns - filled), FAINT)
        return Text.assemble(before, *bar, (after, FAINT))


def _cropped(lines: Sequence[Text]) -> Group:
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    return Group(*lines)


def _told_style(event: ReplicaEvent) -> str | None:
    """Return the style in which to print an event; ``None`` if only the lanes show the event."""
    if event.kind in ("lost", "error", "killed"):
        return BAD
    told = ("ready", "added", "removed", "leads", "follows")
    return AGAIN if event.kind in told or event.reason == "takeover" else None
