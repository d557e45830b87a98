"""A model of plain APScheduler with one pool of workers: what it runs when, and what it misses."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Submitted:
    """What a scheduler gives its executor: the run times of a job that are due in one pass.

    :ivar at: when it does
    :ivar takes: how long each of them runs
    :ivar grace: ``misfire_grace_time``
    """

    job: str
    at: float
    run_times: Sequence[float]
    takes: float
    grace: float | None


def missed_by_plain(
    submitted: Sequence[Submitted], workers: int | None
) -> dict[tuple[str, float], float]:
    """Return the run times that are missed, each with when that is found out.

    A worker begins what came first, and goes through its run times one after the other, as
    ``run_job`` does: each is missed that is later by then than the grace time allows.
    """
    free_at = [0.0] * (len(submitted) if workers is None else workers)
    missed = {}
    for each in sorted(submitted, key=lambda each: each.at):
        at = max(each.at, heapq.heappop(free_at))
        for run_time in each.run_times:
            if each.grace is not None and at - run_time > each.grace:
                missed[each.job, run_time] = at
            else:
                at += each.takes
        heapq.heappush(free_at, at)
    return missed
