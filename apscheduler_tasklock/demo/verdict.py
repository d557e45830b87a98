"""The verdict: from what ran and what was due, which windows ran twice, and which did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# A task whose replicas are offset may run again this share of its period after its last run: the
# library's default min_factor.
MIN_FACTOR = 0.9

# The database learns a run time as "now, minus so many seconds", so that a window begins late by
# as long as the statement was under way, in seconds. Two runs may look closer by that.
TOLERANCE = 0.02


class Scheduled(Protocol):
    """What the verdict needs to know of a task."""

    @property
    def name(self) -> str:
        """Name of the task."""

    @property
    def period(self) -> float:
        """Seconds from one run time to the next."""

    @property
    def on_grid(self) -> bool:
        """Whether all replicas have the same run times."""


@dataclass(frozen=True)
class Run:
    """A row of the ledger.

    :ivar task: the task's name
    :ivar replica: number of the replica that ran it
    :ivar run_time: when it was scheduled to run, in seconds since 1970. Not when it started: a
        busy machine starts late.
    """

    task: str
    replica: int
    run_time: float


@dataclass(frozen=True)
class Verdict:
    """What became of a task's windows.

    :ivar task: the task's name
    :ivar runs: how often it ran
    :ivar doubled: how many of these runs were in a window that had been run
    :ivar missed: how many windows nobody ran
    :ivar by_replica: how often it ran on each replica
    """

    task: str
    runs: int
    doubled: int
    missed: int
    by_replica: Counter[int]

    @property
    def windows(self) -> int:
        """How many windows there were."""
        return self.runs - self.doubled + self.missed


def verdict(runs: Sequence[Run], fires: Sequence[float], task: Scheduled) -> Verdict:
    """Judge one task.

    :param runs: the task's rows of the ledger
    :param fires: the run times that any replica asked the lock for, granted or refused
    :param task: the task
    """
    times = sorted(run.run_time for run in runs)
    seen = sorted([*fires, *times])
    judge = _judge_grid if task.on_grid else _judge_spacing
    doubled, missed = judge(times, seen, task.period) if seen else (0, 0)
    by_replica = Counter(run.replica for run in runs)
    return Verdict(task.name, len(runs), doubled, missed, by_replica)


def _judge_grid(times: list[float], seen: list[float], period: float) -> tuple[int, int]:
    """Count doubled and missed times of a grid that all replicas share."""
    ran = Counter(round((time - seen[0]) / period) for time in times)
    due = round((seen[-1] - seen[0]) / period) + 1
    return len(times) - len(ran), due - len(ran)


def _judge_spacing(times: list[float], seen: list[float], period: float) -> tuple[int, int]:
    """Count doubled and missed windows where each replica has run times of its own.

    A run opens a window, and the next window belongs to whoever fires first after it. That is at
    the latest the same replica, one period on.
    """
    if not times:
        return 0, 1 + _whole_periods(seen[-1] - seen[0], period)
    doubled = 0
    last = times[0]
    missed = _whole_periods(last - seen[0], period)
    for time in times[1:]:
        gap = time - last
        if gap < MIN_FACTOR * period - TOLERANCE:
            doubled += 1
            continue
        if gap > 1.5 * period:
            missed += round(gap / period) - 1
        last = time
    return doubled, missed + _whole_periods(seen[-1] - last, period)


def _whole_periods(gap: float, period: float) -> int:
    """Return how many windows found no run between an edge and a run.

    Within one period of a run, other replicas are rightly refused; a fire one period away is not.
    """
    return int((gap + TOLERANCE) // period)
