"""The drawings of the pages, as shapes: what is red, how wide it is, and what goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from typing import Any

from tests.night.checks import Finding, check, clock, seconds, true_of
from tests.night.said import Said
from tests.night.truth import Truth

# Limits the percent of a lane that are too narrow to be told apart: two pixels of a wide screen.
NARROW = 0.35

_LANE = re.compile(r'<svg[^>]*aria-label="([^"]*?): ([^"]*)"[^>]*>(.*?)</svg>', re.DOTALL)
_SHAPE = re.compile(
    r'<rect class="([^"]*)" x="([\d.]+)%" width="([\d.]+)%"[^>]*>\s*<title>(.*?)</title>', re.DOTALL
)


@dataclass(frozen=True)
class Shape:
    """A shape of a lane, in percent of the lane."""

    names: frozenset[str]
    left: float
    right: float
    title: str


def lanes_of(html: str) -> dict[str, list[Shape]]:
    """Return the shapes of each lane of a page."""
    return {
        unescape(name): [
            Shape(frozenset(names.split()), float(x), float(x) + float(width), unescape(title))
            for names, x, width, title in _SHAPE.findall(svg)
        ]
        for name, _, svg in _LANE.findall(html)
    }


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
        for name, shapes in span.lanes.items():
            entries = [each for each in said.entries if each[by] == name]
            bad = [span.of(e) for e in entries if e["outcome"] not in ("ok", "cancelled")]
            for shape in shapes:
                if "bad" not in shape.names:
                    continue
                wrong = shape.right - shape.left - _covered(shape, bad)
                if wrong > 2 * NARROW:
                    yield (
                        f"lane of {name}: red from {shape.left:.2f} to {shape.right:.2f} %: "
                        f"{shape.title}",
                        f"{wrong:.2f} % of it are no failed run",
                    )


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
            if right - left < 4 * NARROW or left <= 0:
                continue
            shapes = span.lanes.get(entry[by], [])
            if not any(
                abs(shape.left - left) < NARROW and abs(shape.right - right) < NARROW
                for shape in shapes
            ):
                yield (
                    f"lane of {entry[by]}: no shape from {left:.2f} to {right:.2f} %",
                    f"{entry['task']} token {entry['token']} {entry['outcome']}",
                )


@check
def what_goes_on_is_drawn_to_the_right_edge(said: Said, truth: Truth) -> Iterator[Finding]:
    for by, span in _spans(said, truth):
        for run in truth.runs.values():
            task = said.tasks.get(run.task)
            if task is None or not run.goes_on(said.at) or task["token"] != run.token:
                continue
            if task["state"] not in ("running", "too long", "paused"):
                continue
            shapes = span.lanes.get(run.task if by == "task" else run.replica, [])
            left = span.percent(run.claimed or run.begun or 0)
            if not any(
                "running" in shape.names and shape.right > 99 and abs(shape.left - left) < 1
                for shape in shapes
            ):
                yield f"lane of {run.task if by == 'task' else run.replica}", true_of(run)


@check
def what_is_not_kept_is_not_drawn_as_nothing(said: Said, truth: Truth) -> Iterator[Finding]:
    for by, span in _spans(said, truth):
        if by == "replica":
            continue
        for name in span.lanes:
            kept = [
                seconds(each["started_at"]) or 0 for each in said.entries if each["task"] == name
            ]
            before = [
                run
                for run in truth.of_task(name)
                if kept and run.over < min(kept) - 3 and run.begun and run.released
            ]
            if len(before) > 2 and "not kept" not in span.html:
                yield (
                    f"lane of {name}: nothing before {clock(min(kept))}",
                    f"{len(before)} runs since {true_of(before[0])}",
                )
