"""A model of plain APScheduler with one pool of workers: which run times it misses."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Submitted:
    """A submission: the run times of a job that are due in one pass of the scheduler.

    :ivar at: the time of the submission
    :ivar takes: the length of each run
    :ivar grace: ``misfire_grace_time``
    """

    job: str
    at: float
    run_times: Sequence[float]
    takes: float
    grace: float | None


def missed_by_plain(
    submitted: Sequence[Submitted],
    workers: int | None,
    pauses: Sequence[tuple[float, float]] = (),
) -> dict[tuple[str, float], float]:
    """Return the missed run times, each with the time at which it was found to be missed.

    A free worker begins the oldest submission, and goes through its run times one after the other,
    as ``run_job`` does. A run time is missed if it is later by then than the grace time allows.

    :param pauses: the times in which the process is paused, so that no run is noticed to be over
    """
    free_at = [0.0] * (len(submitted) if workers is None else workers)
    missed = {}
    for each in sorted(submitted, key=lambda each: each.at):
        at = max(each.at, heapq.heappop(free_at))
        for run_time in each.run_times:
            if each.grace is not None and at - run_time > each.grace:
                missed[each.job, run_time] = at
            else:
                at = _noticed(at + each.takes, pauses)
        heapq.heappush(free_at, at)
    return missed


def _noticed(at: float, pauses: Sequence[tuple[float, float]]) -> float:
    """Return when the end of a run is noticed."""
    return max([at, *(until for since, until in pauses if since <= at < until)])
