"""How the time that a burst takes grows with the replicas, and with the jobs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.speed.burst import HOW, Burst, bursts_table, measure, typical
from benchmarks.speed.effort import Effort
from benchmarks.speed.report import Goal, Section

# A line through the points explains so much of how they differ, or it is no line.
LINEAR = 0.97

Size = tuple[int, int]


def run(effort: Effort) -> Section:
    """Measure bursts of more and more replicas, and of more and more jobs."""
    rounds = effort.of(3, 1)
    by_replicas = [(replicas, 50) for replicas in effort.of((8, 16, 32, 64), (4, 8, 16))]
    by_jobs = [(16, jobs) for jobs in effort.of((25, 50, 100, 200, 400), (25, 50, 100))]
    bursts = _measure(dict.fromkeys([*by_replicas, *by_jobs]), rounds, effort)
    section = Section(
        "How a burst grows",
        f"{HOW} The time of each size is the median of {rounds}, whose sizes came in a shuffled "
        "order; all else is the worst of them. The line is fitted to these medians. The columns "
        "are those of *A burst*.",
    )
    for what, sizes in (("replicas", by_replicas), ("jobs", by_jobs)):
        series = [bursts[size] for size in sizes]
        section.tables.append(bursts_table(series))
        section.goals.append(_linear(what, series))
    return section


def _measure(sizes: Iterable[Size], rounds: int, effort: Effort) -> dict[Size, Burst]:
    rng = effort.rng()
    found: dict[Size, list[Burst]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in rng.sample(list(found), len(found)):
            found[size].append(measure(*size))
    return {size: typical(bursts) for size, bursts in found.items()}


def _linear(what: str, series: Sequence[Burst]) -> Goal:
    """Fit a line through the times, over the replicas or over the jobs."""
    numbers = [burst.replicas if what == "replicas" else burst.jobs for burst in series]
    seconds = [burst.seconds for burst in series]
    slope, start = statistics.linear_regression(numbers, seconds)
    share = statistics.correlation(numbers, seconds) ** 2
    return Goal(
        f"how long a burst takes with more {what}",
        f"grows linearly, R2 {LINEAR:g} or more",
        f"{slope * 1e3:.2f} ms for each {start:+.2f} s, R2 {share:.3f}",
        share >= LINEAR,
    )
