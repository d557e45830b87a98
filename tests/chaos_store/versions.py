"""Judges the jobs whose interval is another one in each version of the application.

Old and new replicas declare them in turn. A gap between two run times is right if it is that of a
version that was in force between the two runs; else a run time was lost, or the job pushed ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf

from apscheduler_tasklock.demo.history import Event, Run, runs
from apscheduler_tasklock.demo.judge import windows
from tests.chaos_store.replica import FIXED, FLOATING, VERSIONS

# Seconds by which two entries of one run time may differ, because a takeover's is not exact. Run
# times of different versions are equal, or a second apart.
SAME = 0.3
# Seconds after a replica is gone, or gave up, in which the database may carry out its statements.
ON_ITS_WAY = 3.0


@dataclass(frozen=True)
class _Declaration:
    """The declaration of the jobs by a replica that started.

    :ivar until: when it was done, or could not be done any more
    :ivar is_certain: whether it was done
    """

    period: float
    since: float
    until: float
    is_certain: bool


def changing(events: Sequence[Event], offset: float) -> Iterator[str]:
    """Find run times that were lost, and that do not belong to a version in force.

    :param offset: what to add to a time of the ledger for one of the database's clock
    """
    declarations = _declarations(events)
    for key in (FIXED, FLOATING):
        run_times = windows(runs(events, key), serve_one_run_time)
        if not run_times:
            yield f"{key}: never ran"
        for of_one in run_times[:-1]:
            if not any(run.ended is not None for run in of_one):
                yield f"{key}: {of_one[0].due} did not run to its end: {of_one}"
        firsts = sorted((of_one[0] for of_one in run_times), key=lambda run: run.token)
        for before, after in pairwise(firsts):
            found = _lost_fixed if key == FIXED else _lost_floating
            yield from found(before, after, declarations, offset)


def serve_one_run_time(earlier: Run, later: Run) -> bool:
    """Return whether two runs of a job are of one run time. A one-off job has only one."""
    return earlier.task.startswith("once-") or bool(later.due - earlier.due < SAME)


def _lost_floating(
    before: Run, after: Run, declarations: Sequence[_Declaration], offset: float
) -> Iterator[str]:
    """Each run time is one interval after the last run, whoever declared what in between.

    Those that come while a run goes on, or before a late one ends, are coalesced into the last.
    """
    gap = after.due - before.due
    right = _in_force(declarations, before.begun, after.begun)
    came = max(0.0, before.over + offset - before.due)
    if not any(
        abs(gap - number * period) < SAME
        for period in right
        for number in range(1, 2 + int(min(came, gap) / period))
    ):
        yield (
            f"{before.task}: {gap:.2f} s lie between its run times {before.due:.3f} and "
            f"{after.due:.3f}, and {sorted(right)} are right: {[before, after]}"
        )


def _lost_fixed(
    before: Run, after: Run, declarations: Sequence[_Declaration], offset: float
) -> Iterator[str]:
    """Run times are multiples of the period; none may lack while one version alone is in force."""
    gap = after.due - before.due
    if gap <= 0:
        yield f"{before.task}: ran for {after.due:.3f} after {before.due:.3f}: {after}"
    # Both ends are known to a fraction of a second only.
    for period in VERSIONS:
        number = ceil((before.due + SAME) / period)
        while number * period < after.due - SAME:
            if _in_force(declarations, number * period - offset, after.begun) == {period}:
                yield f"{before.task}: {number * period} did not run: {[before, after]}"
            number += 1
    right = _in_force(declarations, before.begun, after.begun)
    if not any(_is_multiple(after.due, period) for period in right):
        yield f"{before.task}: {after.due:.3f} is no multiple of {sorted(right)} s: {after}"


def _is_multiple(moment: float, period: float) -> bool:
    return abs(moment - round(moment / period) * period) < SAME


def _in_force(declarations: Sequence[_Declaration], since: float, until: float) -> set[float]:
    """Return the versions that may have been in force at some time in between."""
    certain = [one.since for one in declarations if one.is_certain and one.until < since]
    last = max(certain, default=-inf)
    return {one.period for one in declarations if one.until >= last and one.since <= until}


def _declarations(events: Sequence[Event]) -> list[_Declaration]:
    """Return all declarations, also those of which nobody knows whether they were done."""
    found = []
    for number, event in enumerate(events):
        if event.kind != "declare":
            continue
        until, is_certain = inf, False
        for later in events[number + 1 :]:
            if later.replica == event.replica and later.kind in ("declared", "gone"):
                is_certain = later.kind == "declared" and not later.error
                until = later.at if is_certain else later.at + ON_ITS_WAY
                break
        found.append(_Declaration(event.period, event.at, until, is_certain))
    return found
