"""Judges what the replicas did, with the demo's judge: see ``README.md`` for what is held."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from apscheduler_tasklock.demo.history import Event, JudgedRun, runs
from apscheduler_tasklock.demo.judge import Breach, repeats, went_back
from tests.chaos_ha.replica import TASKS, HaTask

# Seconds within which a task has to begin a run that is due, once a plain client can write.
LATEST = 5.0
# By how many times the slowest write of a plain client a run may be later, on a slow machine: a
# connect, a claim that fails, a probe, a claim.
SLOW = 4
# Seconds by which two entries of one run time differ at most.
SAME = 0.3
# How many lines about an outage a replica may log for an event.
LINES = 3

_OUTAGE = re.compile(
    r"task lock database is (unavailable|back)|task lock tables? (is|are no longer) locked"
)
# What a doctor says that takes a session of the library for the culprit. There is no other one.
_BLAMES = re.compile(r"pg_terminate_backend|blocked: pid")


@dataclass(frozen=True)
class Told:
    """What a case left behind.

    :ivar events: the ledger, in order
    :ivar logs: the logs, by the replica's name
    :ivar doctors: what the doctors said
    :ivar loses_commits: whether confirmed commits were lost
    :ivar waiting: the tasks that waited for something that is documented
    """

    events: Sequence[Event]
    logs: Mapping[str, str]
    doctors: Sequence[str] = ()
    loses_commits: bool = False
    waiting: frozenset[str] = frozenset()


def check(told: Told) -> list[Breach]:
    """Return what must not have happened, in the order in which it did."""
    found = [*_said(told), *(finding for task in TASKS for finding in _of_task(told, task))]
    return sorted(found, key=lambda finding: finding.at)


def _of_task(told: Told, task: HaTask) -> Iterator[Breach]:
    begun = runs(told.events, task.name)
    if not told.loses_commits:
        for earlier, later in repeats(begun, lambda one, other: other.due - one.due < SAME):
            text = f"{_shown(earlier)}, and again {_shown(later)}"
            yield Breach("run time begun twice", task.name, later.begun, text)
    # Also where commits were lost, because a token is no less than the time of the server's clock.
    for before, run in went_back((run.token, run) for run in begun):
        text = f"after {_shown(before)} came {_shown(run)}"
        yield Breach("token went back", task.name, run.begun, text)
    if task.name not in told.waiting:
        yield from _late(told.events, task, begun)


def latest(task: HaTask, possible: Event) -> float:
    """Return by when a task has to begin a run.

    :param possible: when a plain client could write again; its ``until`` is the slowest write since
    """
    assert possible.until is not None
    return possible.at + task.period + LATEST + SLOW * float(possible.until)


def _late(events: Sequence[Event], task: HaTask, begun: Sequence[JudgedRun]) -> Iterator[Breach]:
    for possible in (event for event in events if event.kind == "possible"):
        first = min((run.begun for run in begun if run.begun > possible.at), default=None)
        if first is None or first > latest(task, possible):
            when = "never" if first is None else f"{first - possible.at:.1f} s later"
            text = f"writes were possible at {possible.at:.3f}, the next run began {when}"
            yield Breach("ran too late", task.name, possible.at, text)


def _said(told: Told) -> Iterator[Breach]:
    """Find what replicas and doctors must not have said, and replicas that ended by themselves."""
    at = told.events[-1].at
    for name, log in told.logs.items():
        yield from _logged(told, name, log.splitlines())
    for line in (line for said in told.doctors for line in said.splitlines()):
        if _BLAMES.search(line):
            yield Breach("doctor blames the fleet", "", at, line)
    for event in told.events:
        if event.kind == "died":
            yield Breach("replica died", "", event.at, f"{event.replica}: {event.detail}")


def _logged(told: Told, name: str, lines: Sequence[str]) -> Iterator[Breach]:
    at = told.events[-1].at
    happened = sum(event.kind == "event" for event in told.events)
    outages = [line for line in lines if _OUTAGE.search(line)]
    if len(outages) > LINES * happened:
        text = f"{name} logged {len(outages)} in {happened} events: {outages}"
        yield Breach("too many outage lines", "", at, text)
    for line in lines:
        if "Traceback" in line:
            yield Breach("error logged", "", at, f"{name}: {line}")


def _shown(run: JudgedRun) -> str:
    return f"{run.due:.0f} on {run.replica} at {run.begun:.3f} (token {run.token})"
