"""Drawings: runs as shapes, in numbers that the pages' SVG elements need.

Shapes that a reader cannot tell apart are drawn as one, so that pages are not too large.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone, tzinfo

from apscheduler_tasklock._lock.outcomes import FAILED, UNTIMED
from apscheduler_tasklock._words.runs import longest_of, missed_in_words
from apscheduler_tasklock.status import Lane, LaneEntry, Run

# The classes of shapes, by which the style sheet draws them, each with a form of its own. The worse
# one is drawn over the other, and names shapes that are drawn as one.
SEVERITY = ("ok", "again", "other", "missed", "bad", "running", "stuck")
_CLASSES = {"ok": "ok", "missed": "missed", **dict.fromkeys(FAILED, "bad")}

# A strip's bars: their width, their distance, and the height of the highest.
BAR, STEP, STRIP_HEIGHT = 2, 3, 20
_LOWEST_BAR = 3

# A chart's height in pixels, and the seconds that its upper edge may stand for: round ones, whose
# halves are round, too.
CHART_HEIGHT = 160
_ROUND = (
    *(1, 2, 4, 6, 10, 20, 30, 60, 120, 240, 360, 600, 1200, 1800, 3600),
    *(7200, 14400, 21600, 43200, 86400),
)

# Where the first bar's time begins at the latest, in percent, so that it is not over the last one.
_LAST_PLACE_OF_A_TIME = 65

# How many rows a lane with runs at the same time may have.
_MOST_ROWS = 4

# The height of a row. Where the shape of each class begins in it, and how high it is, in pixels, so
# that classes are told apart without colours, also where a shape is two pixels wide.
ROW = 13
_FORMS = {
    "ok": (4, 7),
    "again": (0, 7),
    "other": (8, 5),
    "missed": (1, 11),
    "bad": (0, 13),
    "running": (3, 9),
    "stuck": (0, 13),
}
# The legend of the lanes: each class of shapes and shades, its form, and what it says.
LEGEND = [
    (name, *_FORMS[name], words)
    for name, words in (
        ("ok", "ended well"),
        ("again", "takeover or retry"),
        ("bad", "failed, died or freed"),
        ("other", "otherwise ended, or end not known"),
        ("missed", "nobody ran it"),
        ("running", "goes on"),
        ("stuck", "goes on for too long"),
    )
] + [
    ("pause", 0, ROW, "paused"),
    ("outage", 0, ROW, "outage"),
    ("unknown", 0, ROW, "not kept, or not read"),
]

# Into how many parts a lane is divided, and how wide a part is, in percent: two pixels where the
# style sheet makes lanes as wide as they may be.
PARTS = 500
NARROWEST = 100 / PARTS
# How much two shapes may overlap in a row, in percent: a narrow shape is drawn wider than it is.
_SLACK = NARROWEST / 2

# The distances of an axis's marks, in seconds.
_STEPS = (60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
_MOST_MARKS = 12


def css_class_of(run: Run) -> str:
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
    highest = longest_of(shown)
    longest = highest.took if highest is not None else 0.0
    paths: dict[str, list[str]] = {}
    for place, run in enumerate(shown, room - len(shown)):
        height = STRIP_HEIGHT if run.outcome == "missed" else _bar_height(run.took, longest)
        path = paths.setdefault(css_class_of(run), [])
        path.append(f"M{place * STEP} {STRIP_HEIGHT}v-{height}h{BAR}v{height}z")
    return Strip(
        room * STEP,
        {name: "".join(parts) for name, parts in paths.items()},
        _summary(shown) or "no runs",
    )


def _bar_height(took: float, longest: float) -> int:
    share = math.sqrt(min(1.0, max(0.0, took) / longest)) if longest > 0 else 0.0
    return max(_LOWEST_BAR, round(share * STRIP_HEIGHT))


def _summary(entries: Sequence[Run]) -> str:
    """Return how many runs there are, and how many of them failed; and missed run times."""
    names = [css_class_of(each) for each in entries]
    bad, runs = names.count("bad"), len(names) - names.count("missed")
    missed = sum(each.run_times or 1 for each in entries if each.outcome == "missed")
    words = []
    if runs:
        words.append("1 run" if runs == 1 else f"{runs} runs")
    if bad:
        words.append(f"{bad} failed")
    if missed:
        words.append(missed_in_words(missed))
    return ", ".join(words)


@dataclass(frozen=True)
class Column:
    """What the chart of durations shows of a run.

    :ivar took: its duration in seconds; so far, if it goes on
    :ivar name: the class of its bar
    :ivar title: what it is, in words
    :ivar is_known: whether it took so long. Of a run that died only the end of its lease is known,
        and of one that overran only that it took longer than its maximum lock.
    """

    since: datetime
    took: float
    name: str
    title: str
    is_known: bool = True


@dataclass(frozen=True)
class Bar:
    """A run in the chart of durations.

    :ivar x: its left edge, in percent of the chart's width, as ``width``
    :ivar height: its height, in pixels
    :ivar is_cut: whether it would be higher than the chart
    """

    column: Column
    x: float
    width: float
    height: float
    is_cut: bool


@dataclass(frozen=True)
class Change:
    """Where the schedule or the release of a task has changed, between two bars.

    :ivar x: its place, in percent of the chart's width
    """

    x: float
    title: str


@dataclass(frozen=True)
class Chart:
    """The durations of a task's last runs, the newest at the right.

    :ivar top: the seconds at the chart's upper edge
    :ivar times: when the first, the middle and the last of the bars began, each with its place in
        percent of the chart's width; of few bars, the last and, if there is room, the first
    :ivar levels: the usual durations: the class of each line, and its height in pixels
    """

    bars: tuple[Bar, ...]
    top: float
    times: tuple[tuple[float, datetime], ...]
    levels: tuple[tuple[str, float], ...]
    changes: tuple[Change, ...]


def chart_of(
    columns: Sequence[Column],
    levels: Mapping[str, float],
    changes: Sequence[tuple[datetime, str]],
    room: int = 100,
) -> Chart | None:
    """Return the chart of a task's last runs; ``None`` without runs.

    :param columns: the runs, the newest first
    :param levels: usual durations in seconds, by the classes of their lines
    :param changes: when the schedule or the release has changed, and how, in words
    :param room: how many bars a chart has room for
    """
    shown = list(columns[:room])[::-1]
    if not shown:
        return None
    top = _top([*(each.took for each in _scaling(shown)), *levels.values()])
    # Few runs are not drawn in a corner of a chart that has room for many.
    room = min(room, max(len(shown), 20))
    width = 100 / room
    bars = []
    for place, column in enumerate(shown, room - len(shown)):
        height = max(2.0, column.took / top * CHART_HEIGHT)
        is_cut = height > CHART_HEIGHT
        height = min(height, CHART_HEIGHT)
        bars.append(Bar(column, _short(place * width), _short(width * 0.8), height, is_cut))
    times = [(100.0, shown[-1].since)]
    if len(shown) > 9:
        times.insert(0, (bars[len(shown) // 2].x, shown[len(shown) // 2].since))
    if bars[0].x <= _LAST_PLACE_OF_A_TIME:
        times.insert(0, (bars[0].x, shown[0].since))
    marks = []
    for at, title in changes:
        later = next((bar for bar in bars if bar.column.since >= at), None)
        if at >= shown[0].since:
            x = 100.0 if later is None else later.x
            marks.append(Change(_short(max(0.0, x - width * 0.1)), title))
    return Chart(
        tuple(bars),
        top,
        tuple(times),
        tuple((name, seconds / top * CHART_HEIGHT) for name, seconds in levels.items()),
        tuple(marks),
    )


def _scaling(columns: Sequence[Column]) -> list[Column]:
    """Return the runs that decide how many seconds a chart is high.

    A run that hangs, or whose end is not known, must not make the others too low to be read.
    """
    known = [each for each in columns if each.is_known]
    return known or list(columns)


def _top(seconds: Sequence[float]) -> float:
    """Return a round number of seconds that is not below any of these."""
    longest = max(seconds, default=0.0)
    if longest > _ROUND[-1]:
        return _ROUND[-1] * math.ceil(longest / _ROUND[-1])
    if longest >= 1:
        return next(each for each in _ROUND if each >= longest)
    size = 10.0 ** math.floor(math.log10(max(longest, 0.001)))
    return next(each * size for each in (1, 2, 4, 6, 10) if each * size >= longest)


@dataclass(frozen=True)
class Shape:
    """One entry of a lane, or several that are too short to be told apart.

    :ivar x: its left edge, in percent of the lane
    :ivar width: its width, in percent of the lane
    :ivar row: its row in the lane, from 0
    :ivar name: its class, that of the worst entry
    :ivar entries: what it stands for, the first one first
    :ivar bars: its bars, one below the other: the class, the upper edge and the height of each, in
        pixels
    """

    x: float
    width: float
    row: int
    name: str
    entries: tuple[LaneEntry, ...]
    bars: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Shade:
    """What lies behind shapes: a pause, an outage, or a time of which not everything is known.

    :ivar x: its left edge, in percent of the lane
    :ivar width: its width, in percent of the lane
    :ivar name: its class
    :ivar title: what it is, in words
    """

    x: float
    width: float
    name: str
    title: str


@dataclass(frozen=True)
class DrawnLane:
    """The shapes of one lane.

    :ivar lane: what is drawn
    :ivar rows: how many rows it has, since runs at the same time lie in rows of their own
    :ivar shapes: in the order in which they are drawn, so that the worst is over the others
    :ivar shades: what is behind them
    """

    lane: Lane
    rows: int
    shapes: tuple[Shape, ...]
    shades: tuple[Shade, ...]

    def is_taken(self, x: float, width: float) -> bool:
        """Return whether a shape of the first row lies where a word would be written."""
        return any(
            shape.row == 0 and shape.x < x + width and shape.x + shape.width > x
            for shape in self.shapes
        )


@dataclass(frozen=True)
class Mark:
    """A mark of the axis.

    :ivar x: its place, in percent
    """

    x: float
    text: str


@dataclass(frozen=True)
class Span:
    """A span of time that lanes show.

    :ivar since: its beginning, at the left edge
    :ivar until: its end, at the right edge
    :ivar now: when it was read, until which runs that go on are drawn
    """

    since: datetime
    until: datetime
    now: datetime

    def percent(self, moment: datetime | None) -> float:
        """Return where a time lies; a time outside of the span is at its edge.

        :param moment: ``None``: the present
        """
        share = ((moment or self.now) - self.since).total_seconds() / self.seconds
        return min(100.0, max(0.0, 100 * share))

    @property
    def seconds(self) -> float:
        """How long it is."""
        return max(1e-6, (self.until - self.since).total_seconds())

    def shade(self, begin: datetime, end: datetime | None, name: str, title: str) -> Shade:
        """Return what lies behind the shapes from one time to another.

        :param end: ``None``: it has no end
        """
        left = self.percent(begin)
        right = 100.0 if end is None else self.percent(end)
        x = min(left, 100 - NARROWEST)
        return Shade(_short(x), _short(max(NARROWEST, right - left)), name, title)


def drawn_lane(lane: Lane, span: Span, shades: Sequence[Shade] = ()) -> DrawnLane:
    """Return the shapes of a lane.

    Each entry has its own place, width and class. Only entries that are narrower than
    :data:`NARROWEST`, and begin in the same part of the span, are one shape, which is that part, so
    that no edge is moved by more. A run that goes on is never one of them. If more entries lie at
    one place than a lane has rows, they are drawn over others.

    :param shades: what lies behind them
    """
    alone: list[Shape] = []
    short: dict[int, list[LaneEntry]] = {}
    for entry in lane.entries:
        left, right = span.percent(entry.since), span.percent(entry.until)
        is_over = entry.until is not None
        if is_over and right <= left and (entry.until or span.now) < span.since:
            continue  # the span has moved on since it was read
        is_several = entry.count > 1 and entry.run is None
        if is_over and (is_several or right - left < NARROWEST):
            short.setdefault(int(left / NARROWEST), []).append(entry)
        else:
            alone.append(_shape(left, max(right, left + NARROWEST), [entry]))
    for part, entries in short.items():
        left = part * NARROWEST
        alone.append(_shape(left, left + NARROWEST, entries))
    shapes = _in_rows(sorted(alone, key=lambda shape: shape.x))
    return DrawnLane(
        lane,
        1 + max((shape.row for shape in shapes), default=0),
        tuple(sorted(shapes, key=lambda shape: SEVERITY.index(shape.name))),
        tuple(shades),
    )


def _shape(left: float, right: float, entries: list[LaneEntry]) -> Shape:
    x = min(left, 100 - NARROWEST)  # so that what begins at the right edge is seen
    counts: Counter[str] = Counter()
    for entry in entries:
        counts[_class_of_entry(entry)] += entry.count
    name, *others = sorted(counts, key=SEVERITY.index, reverse=True)
    bars: tuple[tuple[str, int, int], ...] = ((name, *_FORMS[name]),)
    if others:
        # A few failures must not look like nothing but failures, nor like none.
        upper = max(4, min(9, round(ROW * counts[name] / sum(counts.values()))))
        below = max(others, key=lambda other: counts[other])
        bars = (name, 0, upper), (below, upper, ROW - upper)
    return Shape(_short(x), _short(min(100.0, right) - x), 0, name, tuple(entries), bars)


def _class_of_entry(entry: LaneEntry) -> str:
    if entry.until is None:
        return {"too long": "stuck", "holder silent": "other"}.get(entry.outcome, "running")
    if entry.outcome == "ok" and entry.kind in ("takeover", "retry"):
        return "again"
    if entry.run is None and entry.count == 1 and entry.outcome in UNTIMED:
        return "other"  # its lease has ended, and nobody knows whether the run has
    return _CLASSES.get(entry.outcome, "other")


def _in_rows(shapes: Sequence[Shape]) -> list[Shape]:
    """Return shapes in rows, so that as few as possible lie over each other.

    :param shapes: by their left edges
    """
    ends: list[float] = []
    placed = []
    for shape in shapes:
        row = next((row for row, end in enumerate(ends) if end <= shape.x + _SLACK), len(ends))
        if row == _MOST_ROWS:
            row = min(range(_MOST_ROWS), key=lambda row: ends[row])
        if row == len(ends):
            ends.append(0.0)
        ends[row] = max(ends[row], shape.x + shape.width)
        placed.append(replace(shape, row=row))
    return placed


def marks_of(since: datetime, until: datetime, zone: tzinfo | None) -> list[Mark]:
    """Return the marks of an axis, at round times of a zone."""
    # Computed in UTC, because a day on which the zone changes its offset has 23 or 25 hours.
    since, until = since.astimezone(timezone.utc), until.astimezone(timezone.utc)
    span = Span(since, until, until)
    days = 86400 * math.ceil(span.seconds / 86400 / _MOST_MARKS)
    step = next((each for each in _STEPS if span.seconds / each <= _MOST_MARKS), days)
    moment = since - timedelta(seconds=_past_round(since, step, zone))
    marks = []
    while moment < until:
        x = span.percent(moment)
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


def _short(number: float) -> float:
    return round(number, 2)
