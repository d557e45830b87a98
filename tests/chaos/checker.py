"""The checker: reads a history, and finds what must not have happened.

A pure function of the history and of what the tasks are; the rules are in the modules beside it:

- ``exclusion.py``: two claims stand at a time; two runs overlap that both believed that they held
  the lock, the first for longer than it takes to learn better; a run in a worker process outlives
  its lock, or its replica; a token goes back
- ``repeats.py``: a window is run twice without a dead holder
- ``misses.py``: a window is missed while a replica lived
- ``stops.py``: a replica that ended as it was told to left a lock behind, or took too long

Nor may a replica end on its own, log an error, or run a job that is not due for long. Of the runs
in a pool of which a worker process was killed, APScheduler logs errors until the pool is replaced;
and where SIGTERM ended the worker processes, or what starts them. The library logs an error where
so many holders of a task died in a row that it gives their window up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from apscheduler_tasklock.demo.history import Event
from apscheduler_tasklock.demo.judge import Breach
from tests.chaos import exclusion, misses, repeats, stops
from tests.chaos.bounds import POOL_BACK
from tests.chaos.history import END_GROUP, POOL
from tests.chaos.records import PROCESS, Records
from tests.chaos.tasks import ChaosTask

# What APScheduler logs of runs in a broken pool, and of a pool that cannot start workers any more.
BROKEN, UNSTARTED = "BrokenProcessPool", "EOFError"

# What the library logs of a window that it gives up.
GIVEN_UP = "is given up: "


def check(events: Sequence[Event], tasks: Sequence[ChaosTask]) -> list[Breach]:
    """Return what must not have happened, in the order in which it did."""
    records = Records(events)
    return sorted(_all(records, tasks), key=lambda finding: finding.at)


def _all(records: Records, tasks: Sequence[ChaosTask]) -> Iterator[Breach]:
    for event in records.told("died"):
        yield Breach("replica died", "", event.at, f"{event.replica} ended: {event.detail}")
    for event in records.told("erred"):
        if not (_was_broken(records, event) or _was_given_up(records, event)):
            yield Breach("error logged", "", event.at, f"{event.replica}: {event.detail}")
    for event in records.told("early"):
        text = f"{event.replica} ran a job that was due much later"
        yield Breach("ran too early", event.task, event.at, text)
    yield from stops.check_replicas(records)
    for task in [*tasks, *(one_off.task for one_off in records.one_offs.values())]:
        for rules in (exclusion, repeats, misses, stops):
            yield from rules.check(records, task)


def _was_broken(records: Records, event: Event) -> bool:
    """Tell whether an error is due to a killed worker process, or to a group that got SIGTERM.

    A pool of which a worker was killed is replaced soon, and then runs jobs again.
    """
    ended = records.when("leaving", END_GROUP).get(event.replica, inf) < event.at
    if ended or BROKEN not in event.detail:
        return ended and (BROKEN in event.detail or UNSTARTED in event.detail)
    kills = [e.at for e in records.told("worker killed") if e.replica == event.replica + POOL]
    return any(
        at < event.at <= records.able_by(event.replica, at, POOL_BACK, PROCESS) for at in kills
    )


def _was_given_up(records: Records, event: Event) -> bool:
    """Tell whether an error is about a window that was given up.

    Whether another replica could have run it again before that is checked in ``misses``.
    """
    return GIVEN_UP in event.detail and any(
        f"'{task}'" in event.detail and claim.given_up <= event.at
        for task, claims in records.claims.items()
        for claim in claims
    )
