"""The checker: reads a history, and finds what must not have happened.

A pure function of the history and of what the tasks are; the rules are in the modules beside it:

- ``exclusion.py``: two claims stand at a time; two runs overlap that both believed that they held
  the lock, the first for longer than it takes to learn better; a token goes back; a write with an
  old token is accepted
- ``repeats.py``: a window is run twice without a dead holder, or a holder is believed dead by a
  replica that has just come, or just come back
- ``misses.py``: a window is missed while a replica lived
- ``stops.py``: a replica that ended as it was told to left a lock behind, or took too long

Nor may a replica end on its own, log an error, or run a job that is not due for long. Of the runs
in a pool of which a worker process was killed, APScheduler logs errors until the pool is replaced;
and where SIGTERM ended the worker processes, or what starts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from tests.chaos import exclusion, misses, repeats, stops
from tests.chaos.bounds import POOL_BACK
from tests.chaos.finding import Finding
from tests.chaos.history import POOL, Event
from tests.chaos.records import PROCESS, Records
from tests.chaos.tasks import ChaosTask

# How APScheduler tells of runs in such a pool, and of one whose workers cannot be started any more.
BROKEN, UNSTARTED = "BrokenProcessPool", "EOFError"


def check(events: Sequence[Event], tasks: Sequence[ChaosTask]) -> list[Finding]:
    """Return what must not have happened, in the order in which it did."""
    records = Records(events)
    return sorted(_all(records, tasks), key=lambda finding: finding.at)


def _all(records: Records, tasks: Sequence[ChaosTask]) -> Iterator[Finding]:
    for event in records.died:
        yield Finding("replica died", "", event.at, f"{event.replica} ended: {event.detail}")
    for event in records.errors:
        if _was_broken(records, event):
            continue
        yield Finding("error logged", "", event.at, f"{event.replica}: {event.detail}")
    for event in records.early:
        text = f"{event.replica} ran a job that was due much later"
        yield Finding("ran too early", event.task, event.at, text)
    yield from stops.check_replicas(records)
    for task in [*tasks, *(one_off.task for one_off in records.one_offs.values())]:
        yield from exclusion.check(records, task)
        yield from repeats.check(records, task)
        yield from misses.check(records, task)
        yield from stops.check(records, task)


def _was_broken(records: Records, event: Event) -> bool:
    """Tell whether an error is one of a pool of which a worker was killed, or the group ended.

    A pool of which a worker was killed is replaced soon, and then runs jobs again.
    """
    ended = records.ended_groups.get(event.replica, inf) < event.at
    if UNSTARTED in event.detail:
        return ended
    return BROKEN in event.detail and (
        ended
        or any(
            replica == event.replica + POOL and at < event.at <= _replaced_by(records, replica, at)
            for replica, at in records.killed_workers.values()
        )
    )


def _replaced_by(records: Records, pool: str, killed: float) -> float:
    """Return by when a replica that runs has replaced a pool of which a worker was killed."""
    takes = POOL_BACK + records.reaction(killed)
    return records.able_by(pool.removesuffix(POOL), killed, takes, PROCESS)
