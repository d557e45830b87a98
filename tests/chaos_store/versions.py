"""Judges the jobs whose interval is another one in each version of the application.

Old and new replicas declare them in turn. A gap between two run times is right if it is that of a
version that was in force between the two runs; else a run time was lost, or the job pushed ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf

from tests.chaos_store.ledger import Entry
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


def changing(entries: Sequence[Entry], offset: float) -> Iterator[str]:
    """Find run times that were lost, and that do not belong to a version in force.

    :param offset: what to add to a time of the ledger for one of the database's clock
    """
    declarations = _declarations(entries)
    for key in (FIXED, FLOATING):
        runs = run_times(entries, key)
        if not runs:
            yield f"{key}: never ran"
        firsts = sorted((min(run, key=lambda entry: entry.token) for run in runs), key=_token)
        ended = {entry.token for entry in entries if entry.kind == "end" and entry.key == key}
        for run in runs[:-1]:
            if not any(entry.token in ended for entry in run):
                yield f"{key}: {run[0].run_time} did not run to its end: {run}"
        for before, after in pairwise(firsts):
            found = _lost_fixed if key == FIXED else _lost_floating
            yield from found(before, after, declarations, offset)


def run_times(entries: Sequence[Entry], key: str) -> list[list[Entry]]:
    """Return the runs of a job that began: a list for each run time, in their order."""
    groups: list[list[Entry]] = []
    begun = [entry for entry in entries if entry.kind == "begin" and entry.key == key]
    for entry in sorted(begun, key=lambda entry: entry.run_time):
        is_one_off = key.startswith("once-")
        if groups and (is_one_off or entry.run_time - groups[-1][0].run_time < SAME):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


def _token(entry: Entry) -> int:
    return entry.token


def _lost_floating(
    before: Entry, after: Entry, declarations: Sequence[_Declaration], _offset: float
) -> Iterator[str]:
    """Each run time is one interval after the last run, whoever declared what in between."""
    gap = after.run_time - before.run_time
    right = _in_force(declarations, before.at, after.at)
    if not any(abs(gap - period) < SAME for period in right):
        yield (
            f"{before.key}: {gap:.2f} s lie between its run times {before.run_time:.3f} and "
            f"{after.run_time:.3f}, and {sorted(right)} are right: {[before, after]}"
        )


def _lost_fixed(
    before: Entry, after: Entry, declarations: Sequence[_Declaration], offset: float
) -> Iterator[str]:
    """Run times are multiples of the period; none may lack while one version alone is in force."""
    gap = after.run_time - before.run_time
    if gap <= 0:
        yield f"{before.key}: ran for {after.run_time:.3f} after {before.run_time:.3f}: {after}"
    # Both ends are known to a fraction of a second only.
    for period in VERSIONS:
        number = ceil((before.run_time + SAME) / period)
        while number * period < after.run_time - SAME:
            if _in_force(declarations, number * period - offset, after.at) == {period}:
                yield f"{before.key}: {number * period} did not run: {[before, after]}"
            number += 1
    right = _in_force(declarations, before.at, after.at)
    if not any(_is_multiple(after.run_time, period) for period in right):
        yield f"{before.key}: {after.run_time:.3f} is no multiple of {sorted(right)} s: {after}"


def _is_multiple(moment: float, period: float) -> bool:
    return abs(moment - round(moment / period) * period) < SAME


def _in_force(declarations: Sequence[_Declaration], since: float, until: float) -> set[float]:
    """Return the versions that may have been in force at some time in between."""
    certain = [one.since for one in declarations if one.is_certain and one.until < since]
    last = max(certain, default=-inf)
    return {one.period for one in declarations if one.until >= last and one.since <= until}


def _declarations(entries: Sequence[Entry]) -> list[_Declaration]:
    """Return all declarations, also those of which nobody knows whether they were done."""
    found = []
    for number, entry in enumerate(entries):
        if entry.kind != "declare":
            continue
        until, is_certain = inf, False
        for later in entries[number + 1 :]:
            if later.replica == entry.replica and later.kind in ("declared", "gone"):
                is_certain = later.kind == "declared" and not later.error
                until = later.at if is_certain else later.at + ON_ITS_WAY
                break
        found.append(_Declaration(entry.period, entry.at, until, is_certain))
    return found
