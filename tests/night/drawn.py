"""The drawings of the pages, as shapes: what is red, how wide it is, and what goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from typing import Any

from tests.night.checks import Finding, check, seconds, true_of
from tests.night.said import Said
from tests.night.truth import Truth

# Limits the percent of a lane that are too narrow to be told apart: two pixels of a wide screen.
NARROW = 0.35

_LANE = re.compile(r'<svg[^>]*aria-label="([^"]*?): ([^"]*)"[^>]*>(.*?)</svg>', re.DOTALL)
_RECT = r'<rect class="([^"]*)" x="([\d.]+)%" width="([\d.]+)%"'
# A shape is a link with a title and one bar or two; what lies behind shapes has its title inside.
_SHAPE = re.compile(rf"<a [^>]*><title>(.*?)</title>{_RECT}", re.DOTALL)
_SHADE = re.compile(rf"{_RECT}[^>]*><title>(.*?)</title>", re.DOTALL)


@dataclass(frozen=True)
class Shape:
    """A shape of a lane, or what lies behind shapes, in percent of the lane.

    :ivar name: its class; that of the worst entry, if it stands for several
    """

    name: str
    left: float
    right: float
    title: str


@dataclass(frozen=True)
class Drawn:
    """A lane as it is drawn.

    :ivar says: what lies on it, in words
    """

    says: str
    shapes: list[Shape]
    shades: list[Shape]

    def is_unknown(self, at: float) -> bool:
        """Return whether a place is hatched, because not all of its runs are kept."""
        return any(
            shade.name == "unknown" and shade.left - NARROW <= at <= shade.right + NARROW
            for shade in self.shades
        )


def lanes_of(html: str) -> dict[str, Drawn]:
    """Return the lanes of a page by their names."""
    return {
        unescape(name): Drawn(
            unescape(says),
            [_shape(*found[1:], found[0]) for found in _SHAPE.findall(svg)],
            [_shape(*found) for found in _SHADE.findall(svg)],
        )
        for name, says, svg in _LANE.findall(html)
    }


def _shape(name: str, x: str, width: str, title: str) -> Shape:
    return Shape(name, float(x), float(x) + float(width), unescape(title))


_NO_LANE = Drawn("", [], [])


class Span:
    """The whole night until a moment, as lanes."""

    def __init__(self, said: Said, truth: Truth, by: str) -> None:
        self.since, self.until = truth.begin, said.at
        path = f"/timeline?since={self.since:.0f}&until={self.until:.3f}&by={by}"
        self.html = said.html(path)
        self.lanes = lanes_of(self.html)

    def percent(self, at: float) -> float:
        """Return where a time is."""
        return min(100.0, max(0.0, 100 * (at - self.since) / (self.until - self.since)))

    def of(self, entry: dict[str, Any]) -> tuple[float, float]:
        """Return where a run of the history begins and ends."""
        times = (seconds(entry[name]) or 0 for name in ("started_at", "ended_at"))
        begin, end = map(self.percent, times)
        return begin, end


def _spans(said: Said, truth: Truth) -> Iterator[tuple[str, Span]]:
    for by in ("task", "replica") if truth.begin and said.at > truth.begin + 5 else ():
        yield by, Span(said, truth, by)


@check
def what_is_drawn_red_did_not_end_well(said: Said, truth: Truth) -> Iterator[Finding]:
    """A red shape has no more than its runs that did not end well."""
    for by, span in _spans(said, truth):
        for name, lane in span.lanes.items():
            entries = [each for each in said.entries if each[by] == name]
            bad = [span.of(e) for e in entries if e["outcome"] not in ("ok", "cancelled")]
            for shape in lane.shapes:
                if shape.name != "bad" or _is_open(shape, truth, said.at):
                    continue
                wrong = shape.right - shape.left - _covered(shape, bad)
                if wrong > 2 * NARROW:
                    yield (
                        f"lane of {name}: red from {shape.left:.2f} to {shape.right:.2f} %: "
                        f"{shape.title}",
                        f"{wrong:.2f} % of it are no failed run",
                    )


def _is_open(shape: Shape, truth: Truth, at: float) -> bool:
    """Return whether a shape is of a run whose end is said not to be reported, as is true."""
    runs = truth.of_task(shape.title.partition(" ")[0])
    is_open = any((run.released or at) > at - 1 for run in runs)
    return "has not reported its end" in shape.title and is_open


def _covered(shape: Shape, spans: list[tuple[float, float]]) -> float:
    """Return how much of a shape is in one of several spans."""
    covered, end = 0.0, shape.left
    for left, right in sorted(spans):
        begin = max(left, end)
        end = max(end, min(right, shape.right))
        covered += max(0.0, end - begin) if begin < shape.right else 0.0
    return covered


@check
def each_wide_run_is_drawn_as_wide_as_it_was(said: Said, truth: Truth) -> Iterator[Finding]:
    for by, span in _spans(said, truth):
        for entry in said.entries:
            left, right = span.of(entry)
            if _goes_on(entry, truth, said.at):
                right = 100.0
            if right - left < 4 * NARROW or left <= 0:
                continue
            lane = span.lanes.get(entry[by], _NO_LANE)
            is_drawn = any(
                abs(shape.left - left) < NARROW and abs(shape.right - right) < NARROW
                for shape in lane.shapes
            )
            if not is_drawn and not lane.is_unknown(left):
                yield (
                    f"lane of {entry[by]}: no shape from {left:.2f} to {right:.2f} %",
                    f"{entry['task']} token {entry['token']} {entry['outcome']}",
                )


def _goes_on(entry: dict[str, Any], truth: Truth, at: float) -> bool:
    """Return whether a run goes on whose lock is lost, so that it has an entry already."""
    runs = truth.of_task(entry["task"])
    return any(run.token == entry["token"] and run.goes_on(at) for run in runs)


@check
def what_goes_on_is_drawn_to_the_right_edge(said: Said, truth: Truth) -> Iterator[Finding]:
    for by, span in _spans(said, truth):
        for run in truth.runs.values():
            task = said.tasks.get(run.task)
            if task is None or not run.goes_on(said.at) or task["token"] != run.token:
                continue
            if task["state"] not in ("running", "too long", "paused"):
                continue
            lane = span.lanes.get(run.task if by == "task" else run.replica, _NO_LANE)
            left = span.percent(run.claimed or run.begun or 0)
            if not any(
                shape.name in ("running", "stuck")
                and shape.right > 99
                and abs(shape.left - left) < 1
                for shape in lane.shapes
            ):
                yield f"lane of {run.task if by == 'task' else run.replica}", true_of(run)


@check
def what_is_not_kept_is_not_drawn_as_nothing(said: Said, truth: Truth) -> Iterator[Finding]:
    for by, span in _spans(said, truth):
        for name, lane in span.lanes.items() if by == "task" else ():
            tokens = {each["token"] for each in said.entries if each["task"] == name}
            lost = [
                run
                for run in truth.of_task(name)
                if run.released and run.released < said.at - 3 and run.lost is None
                if run.token not in tokens and not lane.is_unknown(span.percent(run.over))
            ]
            if lost or ("not kept" in lane.says) != any(
                shade.name == "unknown" for shade in lane.shades
            ):
                yield f"lane of {name}: {lane.says}", f"not drawn: {'; '.join(map(true_of, lost))}"
