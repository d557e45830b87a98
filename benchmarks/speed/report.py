"""The results of a part of the benchmark, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Goal:
    """One of the project's goals, beside what was measured."""

    what: str
    goal: str
    measured: str
    met: bool | None  # None if there is nothing to compare with


@dataclass
class Section:
    """The results of one part.

    :ivar notes: how they were measured
    :ivar tables: tables in Markdown
    """

    title: str
    notes: str
    tables: list[str] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the section as Markdown."""
        parts = [f"## {self.title}", self.notes, *self.tables]
        if self.goals:
            parts.append(goal_table(self.goals))
        return "\n\n".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns line up, the first to the left, the others right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines.insert(1, rule)
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    )


def goal_table(goals: Sequence[Goal]) -> str:
    """Return goals and what was measured, as Markdown."""
    said = {True: "yes", False: "**no**", None: "-"}
    rows = [[goal.what, goal.goal, goal.measured, said[goal.met]] for goal in goals]
    return table(["goal of", "goal", "measured", "met"], rows)


def median(samples: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(samples)


def p99(samples: Sequence[float]) -> float:
    """Return the 99th percentile."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def microseconds(seconds: float) -> str:
    """Return seconds as microseconds, for a table."""
    return f"{seconds * 1e6:,.0f} us"


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds, for a table."""
    return f"{seconds * 1e3:,.2f} ms"
