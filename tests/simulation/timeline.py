"""The runs of simulated replicas as a timeline of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

WIDTH = 60

LEGEND = "# began   D died   T taken over   : running   . idle"


class Entry(Protocol):
    """A run, as ``SimulatedRun`` has it."""

    job_id: str
    replica: str
    began_at: datetime
    ended_at: datetime | None
    kind: str
    outcome: str


# A replica's name, its start, and its end or ``None``.
Life = tuple[str, datetime, "datetime | None"]


def timeline(runs: Sequence[Entry], lives: Sequence[Life], start: datetime, end: datetime) -> str:
    """Return a lane for each job and replica, in which equal parts stand for equal times."""
    lines = [f"{start:%Y-%m-%d %H:%M:%S} to {end:%Y-%m-%d %H:%M:%S %Z}, {LEGEND}"]
    width = max((len(name) for name, *_ in lives), default=0)
    for job_id in sorted({run.job_id for run in runs}):
        of_job = [run for run in runs if run.job_id == job_id]
        taken_over = sum(run.kind == "takeover" for run in of_job)
        died = sum(run.outcome == "died" for run in of_job)
        lines += ["", f"{job_id}: {len(of_job)} runs, {taken_over} taken over, {died} died"]
        for name, began, gone in lives:
            lane = _Lane(start, end, began, gone)
            for run in of_job:
                if run.replica == name:
                    lane.add(run)
            count = sum(run.replica == name for run in of_job)
            lines.append(f"  {name:<{width}} {lane} {count}")
    if not runs:
        lines += ["", "nothing was run"]
    return "\n".join(lines)


class _Lane:
    """The runs of one job on one replica."""

    def __init__(
        self, start: datetime, end: datetime, began: datetime, gone: datetime | None
    ) -> None:
        self._start = start
        self._span = max((end - start).total_seconds(), 1e-6)
        self._end = end
        first, last = self._part(began), self._part(gone or end)
        self._parts = [" "] * WIDTH
        self._parts[first : last + 1] = ["."] * (last + 1 - first)

    def _part(self, moment: datetime) -> int:
        share = (moment - self._start).total_seconds() / self._span
        return min(WIDTH - 1, max(0, int(share * WIDTH)))

    def add(self, run: Entry) -> None:
        """Draw a run. If a part has several runs, the mark of the most important one stays."""
        first, last = self._part(run.began_at), self._part(run.ended_at or self._end)
        for part in range(first + 1, last + 1):
            if self._parts[part] == ".":
                self._parts[part] = ":"
        self._draw(first, "T" if run.kind == "takeover" else "#")
        if run.outcome == "died":
            self._draw(last, "D")

    def _draw(self, part: int, mark: str) -> None:
        if " .:#TD".index(mark) > " .:#TD".index(self._parts[part]):
            self._parts[part] = mark

    def __str__(self) -> str:
        return "".join(self._parts).rstrip().ljust(WIDTH)
