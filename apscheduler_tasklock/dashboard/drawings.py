"""Drawings: runs as shapes, in numbers that the pages' SVG elements need.

A page may have 200 KB, so shapes that a reader cannot tell apart are drawn as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from statistics import quantiles

from apscheduler_tasklock._values import cut
from apscheduler_tasklock.status import Run

# The classes of shapes, by which the style sheet colours them. The worse class is drawn over the
# other, and names shapes that are drawn as one.
_SEVERITY = ("ok", "again", "other", "bad", "missed")
_CLASSES = {"ok": "ok", "error": "bad", "died": "bad", "overran": "bad", "missed": "missed"}

# A strip's bars: their width, their distance, and the height of the highest.
BAR, STEP, STRIP_HEIGHT = 2, 3, 20
_LOWEST_BAR = 3

# A chart's width and height, in the units of its SVG element.
CHART_WIDTH, CHART_HEIGHT = 720, 160

# How many shapes all lanes may have, and how many rows a lane with runs at the same time.
_MOST_SHAPES = 900
_MOST_ROWS = 4

# How many lanes a page may have.
_MOST_LANES = 60

# The narrowest shape, in percent of a lane: a pixel and a half of a wide screen.
_NARROWEST = 0.15

# The distances of an axis's marks, in seconds.
_STEPS = (60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
_MOST_MARKS = 12


def class_of(run: Run) -> str:
    """Return the class of a run's shape."""
    if run.outcome == "ok" and run.kind in ("takeover", "retry"):
        return "again"
    return _CLASSES.get(run.outcome, "other")


@dataclass(frozen=True)
class Strip:
    """The last runs of a task as bars, the newest at the right.

    :ivar width: the width of the drawing
    :ivar paths: the bars of each class, as an SVG path
    :ivar summary: the bars in words
    """

    width: int
    paths: dict[str, str]
    summary: str


def strip_of(runs: Sequence[Run], room: int = 60) -> Strip:
    """Return the strip of a task's last runs.

    :param runs: the runs and missed run times, the newest first
    :param room: how many bars a strip has room for
    """
    shown = list(runs[:room])[::-1]
    longest = _longest(shown)
    paths: dict[str, list[str]] = {}
    for place, run in enumerate(shown, room - len(shown)):
        height = STRIP_HEIGHT if run.outcome == "missed" else _bar_height(run.took, longest)
        path = paths.setdefault(class_of(run), [])
        path.append(f"M{place * STEP} {STRIP_HEIGHT}v-{height}h{BAR}v{height}z")
    return Strip(
        room * STEP,
        {name: "".join(parts) for name, parts in paths.items()},
        _summary([class_of(run) for run in shown]) or "no runs",
    )


def _bar_height(took: float, longest: float) -> int:
    share = math.sqrt(min(1.0, max(0.0, took) / longest)) if longest > 0 else 0.0
    return max(_LOWEST_BAR, round(share * STRIP_HEIGHT))


def _longest(runs: Sequence[Run]) -> float:
    """Return the longest duration that is known, in seconds; 0 if there is none.

    Of a run that died only the end of its lease is known, and of one that overran only that it took
    longer than its maximum lock. Their bars must not make those of the others too low to be read.
    """
    known = [run.took for run in runs if run.outcome not in ("died", "overran", "missed")]
    return max(known or [run.took for run in runs if run.outcome != "missed"], default=0.0)


def _summary(names: Sequence[str]) -> str:
    """Return how many runs there are, and how many of them failed; and missed run times.

    :param names: the classes of their shapes
    """
    bad, missed = names.count("bad"), names.count("missed")
    runs = len(names) - missed
    words = []
    if runs:
        words.append("1 run" if runs == 1 else f"{runs} runs")
    if bad:
        words.append(f"{bad} failed")
    if missed:
        words.append(f"{missed} missed")
    return ", ".join(words)


@dataclass(frozen=True)
class Bar:
    """A run in the chart of durations.

    :ivar run: the run
    :ivar name: the class of its bar
    """

    run: Run
    name: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Chart:
    """The durations of a task's last runs, the newest at the right.

    :ivar longest: the seconds at the chart's upper edge
    :ivar usual: the range in which eight of ten runs lie that ended well, in seconds; ``None``:
        fewer than five ended well
    :ivar band: where that range is drawn: its upper edge and its height
    """

    bars: tuple[Bar, ...]
    longest: float
    usual: tuple[float, float] | None
    band: tuple[float, float] | None


def chart_of(runs: Sequence[Run], room: int = 100) -> Chart | None:
    """Return the chart of a task's last runs; ``None`` without runs.

    :param runs: the runs, the newest first
    :param room: how many bars a chart has room for
    """
    shown = list(runs[:room])[::-1]
    if not shown:
        return None
    longest = _longest(shown) or 1.0
    width = CHART_WIDTH / room
    bars = []
    for place, run in enumerate(shown, room - len(shown)):
        height = min(CHART_HEIGHT, max(2.0, run.took / longest * CHART_HEIGHT))
        x, y = place * width, CHART_HEIGHT - height
        bars.append(Bar(run, class_of(run), _short(x), _short(y), _short(width * 0.8), height))
    usual = _usual_range([run.took for run in shown if run.outcome == "ok"])
    band = None
    if usual is not None:
        upper, lower = (CHART_HEIGHT * (1 - seconds / longest) for seconds in usual[::-1])
        band = _short(upper), _short(max(1.0, lower - upper))
    return Chart(tuple(bars), longest, usual, band)


def _usual_range(seconds: Sequence[float]) -> tuple[float, float] | None:
    if len(seconds) < 5:
        return None
    tenths = quantiles(seconds, n=10, method="inclusive")
    return tenths[0], tenths[-1]


@dataclass(frozen=True)
class Shape:
    """One run on a lane, or several that lie too close to be told apart.

    :ivar x: its left edge, in percent of the lane
    :ivar width: its width, in percent of the lane
    :ivar row: its row in the lane, from 0
    :ivar name: its class
    :ivar title: what it is, in words
    :ivar task: the task's name, if it is of one task
    """

    x: float
    width: float
    row: int
    name: str
    title: str
    task: str | None


@dataclass(frozen=True)
class Shade:
    """A pause or an outage behind lanes.

    :ivar lane: the one lane that it is behind; ``None``: it is behind several
    :ivar prefix: what the names of these begin with
    """

    shape: Shape
    lane: str | None = None
    prefix: str = ""

    def is_behind(self, lane: str) -> bool:
        """Return whether the shade is behind a lane."""
        return lane.startswith(self.prefix) if self.lane is None else lane == self.lane


@dataclass(frozen=True)
class Lane:
    """The runs of one replica or one task.

    :ivar name: the name of the replica or the task; ``""``: run times that no replica has run
    :ivar rows: how many rows it has, since runs at the same time lie in rows of their own
    :ivar shades: pauses and outages behind the shapes
    :ivar summary: the lane in words
    """

    name: str
    rows: int
    shapes: tuple[Shape, ...]
    shades: tuple[Shape, ...]
    summary: str


@dataclass(frozen=True)
class Mark:
    """A mark of the axis.

    :ivar x: its place, in percent
    """

    x: float
    text: str


@dataclass(frozen=True)
class Block:
    """What a lane shows: a run, a missed run time, or a run that goes on.

    :ivar lane: the lane's name
    :ivar until: its end; ``None``: it goes on
    :ivar name: the class of its shape
    :ivar title: what it is, in words
    """

    lane: str
    task: str
    since: datetime
    until: datetime | None
    name: str
    title: str


def lanes_of(
    blocks: Iterable[Block],
    since: datetime,
    until: datetime,
    shades: Sequence[Shade] = (),
) -> list[Lane]:
    """Return the lanes of a span, in the order of their names.

    If there are too many, those in which something failed or was missed are kept first.

    :param shades: pauses and outages
    """
    by_lane: dict[str, list[Block]] = {}
    for block in sorted(blocks, key=lambda block: block.since):
        by_lane.setdefault(block.lane, []).append(block)
    kept = sorted(by_lane, key=lambda lane: (-_worst(by_lane[lane]), lane))[:_MOST_LANES]
    names = sorted(kept, key=lambda lane: (lane == "", lane))
    narrowest = _NARROWEST
    drawn = {name: _shapes(by_lane[name], since, until, narrowest) for name in names}
    while sum(map(len, drawn.values())) > _MOST_SHAPES:
        narrowest *= 2
        drawn = {name: _shapes(by_lane[name], since, until, narrowest) for name in names}
    return [
        Lane(
            name,
            1 + max(shape.row for shape in drawn[name]),
            tuple(drawn[name]),
            tuple(shade.shape for shade in shades if shade.is_behind(name)),
            _summary([block.name for block in by_lane[name]]),
        )
        for name in names
    ]


def shape_of_span(
    since: datetime, until: datetime, begin: datetime, end: datetime | None, name: str, title: str
) -> Shape:
    """Return the shape of a pause or an outage in a span."""
    left = _percent(begin, since, until)
    right = 100.0 if end is None else _percent(end, since, until)
    return Shape(_short(left), _short(max(_NARROWEST, right - left)), 0, name, title, None)


def _shapes(
    blocks: Sequence[Block], since: datetime, until: datetime, narrowest: float
) -> list[Shape]:
    rows: list[list[_Drawn]] = [[] for _ in range(_MOST_ROWS)]
    for block in blocks:
        left = _percent(block.since, since, until)
        right = 100.0 if block.until is None else _percent(block.until, since, until)
        new = _Drawn(left, right, block.name, block.title, block.task, [block.name])
        row = next((row for row in rows if not row or row[-1].end <= new.left), None)
        if row is None:
            # All rows are taken at this place, so draw the run together with another one.
            min(rows, key=lambda row: (row[-1].name != new.name, row[-1].end))[-1].add(new)
        elif row and row[-1].is_close(new, narrowest):
            row[-1].add(new)
        else:
            row.append(new)
    return [each.on_row(place) for place, row in enumerate(rows) for each in row]


@dataclass
class _Drawn:
    """A shape while it is drawn: one run, or several."""

    left: float
    end: float
    name: str
    title: str
    task: str | None
    names: list[str]

    def is_close(self, other: _Drawn, narrowest: float) -> bool:
        """Return whether both are so short and so close that a reader cannot tell them apart."""
        return other.end - self.left <= narrowest or (
            self.name == other.name and other.left - self.end <= narrowest / 3
        )

    def add(self, other: _Drawn) -> None:
        """Let the shape stand for another run, too."""
        self.end = max(self.end, other.end)
        self.names += other.names
        if self.task != other.task:
            self.task = None
        if _severity(other.name) > _severity(self.name):
            self.name, self.title = other.name, other.title

    def on_row(self, row: int) -> Shape:
        """Return the shape."""
        title = self.title
        if len(self.names) > 1:
            whose = f"{cut(self.task, 120)}: " if self.task else ""
            title = f"{whose}{_summary(self.names)}"
            if _severity(self.name):
                title += f"; the worst: {self.title}"
        width = max(_NARROWEST, self.end - self.left)
        return Shape(_short(self.left), _short(width), row, self.name, title, self.task)


def _severity(name: str) -> int:
    return _SEVERITY.index(name) if name in _SEVERITY else 0


def _worst(blocks: Sequence[Block]) -> int:
    return max(_severity(block.name) for block in blocks)


def marks_of(since: datetime, until: datetime, zone: tzinfo | None) -> list[Mark]:
    """Return the marks of an axis, at round times of a zone."""
    # Computed in UTC, because a day on which the zone changes its offset has 23 or 25 hours.
    since, until = since.astimezone(timezone.utc), until.astimezone(timezone.utc)
    span = (until - since).total_seconds()
    days = 86400 * math.ceil(span / 86400 / _MOST_MARKS)
    step = next((each for each in _STEPS if span / each <= _MOST_MARKS), days)
    moment = since - timedelta(seconds=_past_round(since, step, zone))
    marks = []
    while moment < until:
        x = _percent(moment, since, until)
        if 3 < x < 98:
            local = moment.astimezone(zone)
            marks.append(Mark(_short(x), f"{local:%H:%M}" if step < 86400 else f"{local:%m-%d}"))
        moment += timedelta(seconds=step)
        moment = _nearest_round(moment, step, zone)
    return marks


def _nearest_round(moment: datetime, step: float, zone: tzinfo | None) -> datetime:
    """Return the round time that a time is nearest to, which it is unless the offset has changed.

    Where a zone skips the round time, the time itself is returned.
    """
    past = _past_round(moment, step, zone)
    ahead = min(step, 86400) - past
    nearest = moment + timedelta(seconds=-past if past < ahead else ahead)
    return moment if _past_round(nearest, step, zone) else nearest


def _past_round(moment: datetime, step: float, zone: tzinfo | None) -> float:
    """Return how many seconds a time is after the last round time of a zone."""
    local = moment.astimezone(zone)
    of_day = timedelta(
        hours=local.hour,
        minutes=local.minute,
        seconds=local.second,
        microseconds=local.microsecond,
    )
    return of_day.total_seconds() % min(step, 86400)


def _percent(moment: datetime, since: datetime, until: datetime) -> float:
    share = (moment - since).total_seconds() / max(1e-6, (until - since).total_seconds())
    return min(100.0, max(0.0, 100 * share))


def _short(number: float) -> float:
    return round(number, 2)
