"""The live timeline, drawn with rich: a lane per replica, runs as blocks, refusals as dots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from apscheduler_tasklock.demo.fleet import Event
from apscheduler_tasklock.demo.jobs import TASKS
from apscheduler_tasklock.demo.verdict import Verdict
from apscheduler_tasklock.demo.views import describe, table_rows

_COLOURS = {
    task.name: colour for task, colour in zip(TASKS, ("cyan", "green", "magenta"), strict=True)
}
_RAISED = "bold red"
_FAINT = "bright_black"
_RUN, _RAISING_RUN, _REFUSAL, _NOW = "█", "▒", "·", "│"

# Seconds that the axis spans; a longer demo scrolls.
_SPAN = 30.0

# Seconds at its end for the runs that end after the time is up.
_LAST_RUNS = 1.0

_ANY_WIDTH = 1000

# Columns of a lane's two labels, the replica and the task, with their spaces.
_REPLICA_WIDTH, _TASK_WIDTH = 12, 10

# Lines that are not lanes: heading, axis, legend, progress, and the cursor's line.
_OTHER_LINES = 7


@dataclass
class Block:
    """A run on the timeline, in seconds since the start; ``end`` is ``None`` while it runs."""

    start: float
    end: float | None = None
    raised: bool = False


@dataclass(frozen=True)
class Scale:
    """Where a moment is on the axis.

    :ivar columns: how many there are
    :ivar step: seconds of one
    :ivar first: number, counted from the start, of the leftmost one in sight
    """

    columns: int
    step: float
    first: int

    @classmethod
    def at(cls, elapsed: float, span: float, columns: int) -> Scale:
        """Return the scale that shows the last ``span`` seconds; it scrolls by whole columns."""
        step = span / columns
        return cls(columns, step, max(0, int(elapsed / step) + 1 - columns))

    def column(self, moment: float) -> int:
        """Return the column of a moment, which may be out of sight."""
        return int(moment / self.step) - self.first


class Lanes:
    """What has happened so far, and its drawing."""

    def __init__(self, replicas: int, span: float) -> None:
        self.counts: Counter[tuple[int, str]] = Counter()
        self._replicas = range(1, replicas + 1)
        self._span = span
        self._blocks: dict[tuple[int, str, float], Block] = {}
        self._dots: list[tuple[int, str, float]] = []

    def add(self, event: Event, elapsed: float) -> None:
        """Take in an event."""
        self.counts[event.replica, event.kind] += 1
        key = (event.replica, event.task, event.run_time)
        if event.kind == "refused":
            self._dots.append((event.replica, event.task, elapsed))
        elif event.kind == "granted":
            self._blocks[key] = Block(elapsed)
        elif key in self._blocks:
            block = self._blocks[key]
            block.end = block.end or elapsed
            block.raised = block.raised or event.kind == "raised"
        elif event.kind == "exited":
            self._end_blocks(event.replica, elapsed)

    def total(self, kind: str) -> int:
        """Return how many events of a kind all replicas told."""
        return sum(self.counts[replica, kind] for replica in self._replicas)

    def draw(self, elapsed: float, width: int, height: int) -> Iterator[Text]:
        """Return the axis and the lanes: a line per task if there is room, else one per replica."""
        tasks = [[task.name] for task in TASKS]
        if len(self._replicas) * len(tasks) + _OTHER_LINES > height:
            tasks = [[task.name for task in TASKS]]
        columns = max(10, width - _REPLICA_WIDTH - _TASK_WIDTH - 1)
        scale = Scale.at(elapsed, self._span, columns)
        yield self._axis(scale)
        for replica in self._replicas:
            labels = self._labels(replica)
            for names, label in zip(tasks, labels, strict=False):
                shown = names[0] if len(names) == 1 else "all tasks"
                line = label + Text(f"{shown:{_TASK_WIDTH}}", _COLOURS[names[0]])
                if len(names) > 1:
                    line.stylize(_FAINT, _REPLICA_WIDTH)
                yield line + self._lane(replica, names, scale, elapsed)

    def _labels(self, replica: int) -> list[Text]:
        runs, refused = self.counts[replica, "granted"], self.counts[replica, "refused"]
        gone = self.counts[replica, "exited"]
        return [
            Text(f"{f'replica {replica}':{_REPLICA_WIDTH}}", _FAINT if gone else "bold"),
            Text(f"{f'runs {runs}':{_REPLICA_WIDTH}}", _FAINT),
            Text(f"{f'refused {refused}':{_REPLICA_WIDTH}}", _FAINT),
        ]

    def _axis(self, scale: Scale) -> Text:
        # The shortest distance of labels that leaves two columns between them.
        every = next((s for s in (1, 2, 5, 10, 15, 30) if s / scale.step >= 6), 60)
        cells = [" "] * (scale.columns + 1)
        for moment in range(0, int((scale.first + scale.columns) * scale.step) + 1, every):
            label, at = f"{moment}s", scale.column(moment)
            if 0 <= at <= len(cells) - len(label):
                cells[at : at + len(label)] = label
        return Text(" " * (_REPLICA_WIDTH + _TASK_WIDTH) + "".join(cells), _FAINT)

    def _lane(self, replica: int, tasks: Sequence[str], scale: Scale, elapsed: float) -> Text:
        cells: dict[int, tuple[str, str]] = {scale.column(elapsed): (_NOW, _FAINT)}
        for number, task, moment in self._dots:
            if number == replica and task in tasks:
                cells[scale.column(moment)] = (_REFUSAL, _COLOURS[task])
        for (number, task, _), block in self._blocks.items():
            if number == replica and task in tasks:
                shade = (_RAISING_RUN, _RAISED) if block.raised else (_RUN, _COLOURS[task])
                end = elapsed if block.end is None else block.end
                start = scale.column(block.start)
                length = max(1, round((end - block.start) / scale.step))
                cells.update(dict.fromkeys(range(start, start + length), shade))
        blank = (" ", "")
        return Text.assemble(*(cells.get(column, blank) for column in range(scale.columns)))

    def _end_blocks(self, replica: int, elapsed: float) -> None:
        for (number, _, _), block in self._blocks.items():
            if number == replica and block.end is None:
                block.end = elapsed


class LiveView:
    """Draws the lanes while the replicas run, and leaves the last picture on the terminal."""

    def __init__(self, console: Console, replicas: int, seconds: float) -> None:
        self._console = console
        self._seconds = seconds
        self._lanes = Lanes(replicas, min(seconds, _SPAN) + _LAST_RUNS)
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, event: Event, elapsed: float) -> None:
        """Take in the event; print it above the lanes if it is one that should not be."""
        self._lanes.add(event, elapsed)
        if event.kind in ("lost", "error"):
            text = f"{elapsed:.1f} s  replica {event.replica}  {event.task}  {event.kind}  "
            self._live.console.print(Text(text + describe(event), _RAISED))

    def tick(self, elapsed: float, *, stopping: bool = False) -> None:
        """Draw."""
        width, height = self._console.size
        lines: list[RenderableType] = [
            Text(""),
            *self._lanes.draw(elapsed, width, height),
            self._legend(),
            self._progress(elapsed, width, stopping=stopping),
        ]
        for line in lines:
            if isinstance(line, Text):
                line.no_wrap, line.overflow = True, "crop"
        self._live.update(Group(*lines), refresh=True)

    def show_verdicts(self, verdicts: Sequence[Verdict], replicas: int) -> None:
        """Print the table."""
        heading, *rows = table_rows(verdicts, replicas)
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for name in heading:
            table.add_column(name, justify="left" if name == "task" else "right", no_wrap=True)
        for verdict, row in zip(verdicts, rows, strict=True):
            cells = [Text(cell) for cell in row]
            cells[0].stylize(_COLOURS[verdict.task])
            for cell, count in zip(cells[3:5], (verdict.doubled, verdict.missed), strict=True):
                cell.stylize(_RAISED if count else "green")
            table.add_row(*cells)
        # Rather wrapped by a narrow terminal than with its numbers cut off.
        Console(width=_ANY_WIDTH).print("", table, "", sep="\n")

    def _legend(self) -> Text:
        indent = " " * (_REPLICA_WIDTH + _TASK_WIDTH)
        return Text.assemble(
            ("\n" + indent, ""),
            (_RUN, "bold"),
            (" run   ", _FAINT),
            (_RAISING_RUN, _RAISED),
            (" run that raised   ", _FAINT),
            (_REFUSAL, "bold"),
            (" refused", _FAINT),
        )

    def _progress(self, elapsed: float, width: int, *, stopping: bool) -> Text:
        done = min(1.0, elapsed / self._seconds)
        left = max(0.0, self._seconds - elapsed)
        told = "time is up" if stopping else f"{left:.0f} s left"
        counts = f"runs {self._lanes.total('granted')}, refused {self._lanes.total('refused')}"
        text = f"{elapsed:5.1f} s  {{}}  {told}, {counts}"
        columns = max(5, min(_REPLICA_WIDTH + _TASK_WIDTH, width - len(text) - 2))
        filled = round(done * columns)
        before, after = text.split("{}")
        bar = ("━" * filled, "cyan"), ("━" * (columns - filled), _FAINT)
        return Text.assemble(before, *bar, (after, _FAINT))
