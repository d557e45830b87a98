"""The lanes of the timeline: what each replica ran, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from apscheduler_tasklock.demo.fleet import ReplicaEvent
from apscheduler_tasklock.demo.judgement import DemoTask

BAD = "bold red"
AGAIN = "bold yellow"
FAINT = "bright_black"
RUN, RAISING_RUN, TAKEOVER, DEATH = "█", "▒", "▓", "✗"
# The signs of events that take no time, by their kinds.
MARKS = {"refused": "·", "added": "+"}
_COLOURS = ("cyan", "green", "magenta")
_NOW, _GONE, _START = "│", "╌", "├"
# The lane of a replica while it leads, and the sign beside the name of the one that leads now.
LEADS = "─"
_LEADER = "★"

# Columns of a lane's two labels, the replica and the task, with their spaces.
REPLICA_WIDTH, TASK_WIDTH = 12, 10

# Lines that are not lanes: heading, axis, legend, progress, and the cursor's line.
_OTHER_LINES = 7


@dataclass
class Block:
    """A run on the timeline, in seconds since the start; ``end`` is ``None`` while it runs."""

    start: float
    end: float | None = None
    raised: bool = False
    takeover: bool = False
    died: bool = False


@dataclass(frozen=True)
class Scale:
    """The time axis.

    :ivar columns: number of its columns
    :ivar step: seconds of one column
    :ivar first: number of the leftmost visible column, counted from the start of the demo
    """

    columns: int
    step: float
    first: int

    @classmethod
    def at(cls, elapsed: float, span: float, columns: int) -> Scale:
        """Return the scale of the last ``span`` seconds, which scrolls by whole columns."""
        step = span / columns
        return cls(columns, step, max(0, int(elapsed / step) + 1 - columns))

    def column(self, moment: float) -> int:
        """Return the column of a moment, which may not be visible."""
        return int(moment / self.step) - self.first


def colours(tasks: Sequence[DemoTask]) -> dict[str, str]:
    """Return the colour of each task, by its name."""
    return {task.name: colour for task, colour in zip(tasks, _COLOURS, strict=True)}


class DemoLanes:
    """The events so far, and their drawing.

    :param span: seconds that the axis shows
    :param tasks: the three tasks that have lanes
    :param marked: the kind of event that is counted and marked: one of ``MARKS``
    """

    def __init__(
        self, replicas: int, span: float, tasks: Sequence[DemoTask], marked: str = "refused"
    ) -> None:
        self._tasks = tasks
        self._colours = colours(tasks)
        self._marked = marked
        self.counts: Counter[tuple[int, str]] = Counter()
        self._replicas = range(1, replicas + 1)
        self._starts: dict[int, float] = {}
        self._deaths: dict[int, float] = {}
        self._span = span
        self._blocks: dict[tuple[int, str, float], Block] = {}
        self._marks: list[tuple[int, str, float]] = []
        # From when until when each replica led; `None`: it leads now.
        self._led: dict[int, list[tuple[float, float | None]]] = {}

    def add(self, event: ReplicaEvent, elapsed: float) -> None:
        """Add an event to the lanes."""
        self.counts[event.replica, event.kind] += 1
        self._replicas = range(1, max(self._replicas[-1], event.replica) + 1)
        key = (event.replica, event.task, event.run_time)
        if event.kind == "ready":
            self._starts[event.replica] = elapsed
        elif event.kind == "leads":
            self._led.setdefault(event.replica, []).append((elapsed, None))
        elif event.kind == "follows":
            self._end_leadership(event.replica, elapsed)
        elif event.kind == self._marked:
            self._marks.append((event.replica, event.task, elapsed))
        elif event.kind == "granted":
            self._blocks[key] = Block(elapsed, takeover=event.reason == "takeover")
        elif event.kind in ("exited", "killed"):
            self._end_leadership(event.replica, elapsed)
            self._end_blocks(event.replica, elapsed, died=event.kind == "killed")
        elif key in self._blocks:
            block = self._blocks[key]
            block.end = block.end or elapsed
            block.raised = block.raised or event.kind == "raised"

    def total(self, kind: str) -> int:
        """Return how many events of a kind all replicas had."""
        return sum(self.counts[replica, kind] for replica in self._replicas)

    def draw(self, elapsed: float, width: int, height: int) -> Iterator[Text]:
        """Return the axis and the lanes: a line per task if there is room, else one per replica."""
        tasks = [[task.name] for task in self._tasks]
        if len(self._replicas) * len(tasks) + _OTHER_LINES > height:
            tasks = [[task.name for task in self._tasks]]
        columns = max(10, width - REPLICA_WIDTH - TASK_WIDTH - 1)
        scale = Scale.at(elapsed, self._span, columns)
        yield self._axis(scale)
        for replica in self._replicas:
            labels = self._labels(replica)
            for names, label in zip(tasks, labels, strict=False):
                shown = names[0] if len(names) == 1 else "all tasks"
                line = label + Text(f"{shown:{TASK_WIDTH}}", self._colours[names[0]])
                if len(names) > 1:
                    line.stylize(FAINT, REPLICA_WIDTH)
                yield line + self._lane(replica, names, scale, elapsed)

    def _labels(self, replica: int) -> list[Text]:
        runs, marked = self.counts[replica, "granted"], self.counts[replica, self._marked]
        name, style = f"replica {replica}", "bold"
        if self.counts[replica, "killed"]:
            name, style = f"{name} {DEATH}", BAD
        elif self.counts[replica, "exited"]:
            style = FAINT
        elif self._leads(replica):
            name = f"{name} {_LEADER}"
        return [
            Text(f"{name:{REPLICA_WIDTH}}", style),
            Text(f"{f'runs {runs}':{REPLICA_WIDTH}}", FAINT),
            Text(f"{f'{self._marked} {marked}':{REPLICA_WIDTH}}", FAINT),
        ]

    def _axis(self, scale: Scale) -> Text:
        # Seconds from one label to the next: as few as leave room between the labels.
        every = next((s for s in (1, 2, 5, 10, 15, 30) if s / scale.step >= 6), 60)
        cells = [" "] * (scale.columns + 1)
        for moment in range(0, int((scale.first + scale.columns) * scale.step) + 1, every):
            label, at = f"{moment}s", scale.column(moment)
            if 0 <= at <= len(cells) - len(label):
                cells[at : at + len(label)] = label
        return Text(" " * (REPLICA_WIDTH + TASK_WIDTH) + "".join(cells), FAINT)

    def _lane(self, replica: int, tasks: Sequence[str], scale: Scale, elapsed: float) -> Text:
        now = scale.column(elapsed)
        cells = self._background(replica, scale, now)
        for number, task, moment in self._marks:
            if number == replica and task in tasks:
                cells[scale.column(moment)] = (MARKS[self._marked], self._colours[task])
        for (number, task, _), block in self._blocks.items():
            if number == replica and task in tasks:
                end = elapsed if block.end is None else block.end
                start = scale.column(block.start)
                stop = start + max(1, round((end - block.start) / scale.step))
                cells.update(dict.fromkeys(range(start, stop), self._shade(block, task)))
                if block.died:
                    cells[stop] = (DEATH, BAD)
        blank = (" ", "")
        return Text.assemble(*(cells.get(column, blank) for column in range(scale.columns)))

    def _background(self, replica: int, scale: Scale, now: int) -> dict[int, tuple[str, str]]:
        """Return what a lane shows beneath the runs: when the replica led, was started, and died.

        :param now: the column of the present moment
        """
        cells: dict[int, tuple[str, str]] = {}
        for begin, until in self._led.get(replica, []):
            led = range(scale.column(begin), now if until is None else scale.column(until))
            cells.update(dict.fromkeys(led, (LEADS, AGAIN)))
        if replica in self._starts:
            cells[scale.column(self._starts[replica])] = (_START, FAINT)
        if replica in self._deaths:
            dead = range(scale.column(self._deaths[replica]), now)
            cells.update(dict.fromkeys(dead, (_GONE, FAINT)))
        cells[now] = (_NOW, FAINT)
        return cells

    def _leads(self, replica: int) -> bool:
        return any(until is None for _, until in self._led.get(replica, []))

    def _end_leadership(self, replica: int, elapsed: float) -> None:
        led = self._led.get(replica, [])
        self._led[replica] = [(begin, elapsed if until is None else until) for begin, until in led]

    def _end_blocks(self, replica: int, elapsed: float, *, died: bool) -> None:
        if died:
            self._deaths[replica] = elapsed
        for (number, _, _), block in self._blocks.items():
            if number == replica and block.end is None:
                block.end = elapsed
                block.died = died

    def _shade(self, block: Block, task: str) -> tuple[str, str]:
        if block.raised:
            return RAISING_RUN, BAD
        if block.takeover:
            return TAKEOVER, AGAIN
        return RUN, self._colours[task]
