"""The faults at a statement, and at a step between two statements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import psycopg

from apscheduler_tasklock._database.timings import Timings
from tests.simulation.world import Process, World
from tests.support.waist import NoAnswerError

CLAIM_TIMEOUT = 10.0
# The seconds of a pause of a process.
PAUSE = 70.0
STEP = 300.0
# The seconds that an answer of a slow database takes.
SLOW = 2.0
# The seconds that a statement takes to the database, and its answer takes back.
LATENCY = 0.001
# Limits the seconds in which each repetition of a statement has the same fault.
STUBBORN = CLAIM_TIMEOUT + 2.0


@dataclass
class Place:
    """A statement on its way, or a step of a replica between two statements.

    :ivar number: the number of places before it
    :ivar what: its name in the trace
    :ivar group: the name that its repetitions share
    :ivar carry_out: makes the database carry it out; ``None`` for a step
    :ivar at: its begin, in seconds from the beginning
    :ivar limit: the limit of the wait for its answer, in seconds
    :ivar lease: the lease of the scenario's claims
    """

    world: World
    process: Process
    number: int
    what: str
    group: str
    carry_out: Callable[[], Any] | None
    limit: float
    lease: float
    at: float

    def send(self) -> Any:
        """Send the statement without a fault."""
        if self.carry_out is None:
            return None
        world, process = self.world, self.process
        slow = SLOW if world.now < world.slow_until else 0.0
        self.answer_in(LATENCY + slow / 2)
        if world.now < process.cut_until:
            raise psycopg.OperationalError("cut off")
        answer = self.carry_out()
        self.answer_in(LATENCY + slow / 2)
        return answer

    def answer_in(self, seconds: float) -> None:
        """Wait for so many seconds, or until the limit of the wait for an answer."""
        if seconds >= 1:
            self.process.lose_touch(self.world.now, min(seconds, self.limit))
        if seconds > self.limit:
            self.world.sleep(self.limit)
            raise NoAnswerError("no answer")
        self.world.sleep(seconds)

    def pause(self, seconds: float) -> None:
        """Pause the process for so many seconds."""
        self.process.pause(self.world.now, seconds)
        self.world.sleep(0.0)

    def kill(self) -> None:
        """Kill the process."""
        self.process.killed_at = self.world.now
        self.world.sleep(inf)

    def cut_off(self, seconds: float, *others: Process) -> None:
        """Cut the process and other processes off from the database."""
        now = self.world.now
        for process in (self.process, *others):
            # A longer outage that goes on already keeps its end.
            process.cut_until = max(process.cut_until, now + seconds)
            process.lose_touch(now, seconds, alone=not others)


def _carried_out(place: Place) -> Any:
    place.world.sleep(LATENCY)
    assert place.carry_out is not None
    return place.carry_out()


def _lost_before(place: Place) -> Any:
    place.world.sleep(LATENCY)
    raise psycopg.OperationalError("lost before")


def _lost_after(place: Place) -> Any:
    _carried_out(place)
    place.world.sleep(LATENCY)
    raise psycopg.OperationalError("lost after")


def _late(place: Place) -> Any:
    answer = _carried_out(place)
    place.answer_in(place.lease + 1)
    return answer


def _worse(place: Place) -> Any:
    """Answer late by most of a lease, and then cut the process off for half a lease."""
    answer = _carried_out(place)
    place.answer_in(place.lease * 0.8)
    place.cut_off(place.lease * 0.5)
    return answer


def _paused_and_cut(place: Place) -> Any:
    answer = _carried_out(place)
    place.pause(place.lease * 0.8)
    place.cut_off(place.lease * 0.5)
    return answer


def _hung(place: Place) -> Any:
    place.answer_in(inf)


def _no_answer(place: Place) -> Any:
    _carried_out(place)
    place.answer_in(inf)


def _held_up(seconds: float) -> Callable[[Place], Any]:
    def held_up(place: Place) -> Any:
        assert place.carry_out is not None
        place.world.sleep(LATENCY)
        carry_out, note = place.carry_out, place.world.note

        def arrive() -> None:
            note("database", f"carries out {place.what} of {place.process.name}, held up")
            carry_out()

        place.world.call_at(place.world.now + seconds, arrive)
        raise psycopg.OperationalError("held up")

    return held_up


def _kill_before(place: Place) -> Any:
    place.kill()


def _kill_after(place: Place) -> Any:
    _carried_out(place)
    place.kill()


def _pause_before(place: Place) -> Any:
    place.pause(PAUSE)
    return place.send()


def _pause_after(place: Place) -> Any:
    answer = _carried_out(place)
    place.pause(PAUSE)
    return answer


def _stepped(seconds: float) -> Callable[[Place], Any]:
    def stepped(place: Place) -> Any:
        place.world.step_database(seconds)
        return place.send()

    return stepped


def _slow(place: Place) -> Any:
    place.answer_in(1.0)
    assert place.carry_out is not None
    answer = place.carry_out()
    place.limit -= 1.0
    place.answer_in(1.0)
    return answer


def _locked(place: Place) -> Any:
    place.world.sleep(LATENCY)
    raise psycopg.errors.LockNotAvailable("the row is locked")


def _rejected(place: Place) -> Any:
    place.world.sleep(LATENCY)
    if place.group == "release":  # the lease may end before the release is sent again
        place.process.lose_touch(place.world.now, 1.2 * Timings().rejected_interval)
    raise psycopg.errors.InsufficientPrivilege("permission denied for table task_lock")


def _cut_off(place: Place) -> Any:
    place.cut_off(place.lease + 5)
    return place.send()


def _outage(seconds: float) -> Callable[[Place], Any]:
    def outage(place: Place) -> Any:
        place.cut_off(place.lease + seconds, *place.world.processes)
        return place.send()

    return outage


def _slow_database(place: Place) -> Any:
    place.world.slow_until = place.world.now + 30
    return place.send()


def _pause_between(place: Place) -> Any:
    place.pause(PAUSE)


def _short_pause_between(place: Place) -> Any:
    place.pause(place.lease * 0.8)
    place.cut_off(place.lease * 0.5)


# The faults at statements.
FAULTS: dict[str, Callable[[Place], Any]] = {
    "lost before": _lost_before,
    "lost after": _lost_after,
    "late": _late,
    "late, then worse": _worse,
    "hung": _hung,
    "no answer": _no_answer,
    "held up 1 s": _held_up(1.0),
    "held up beyond the claim": _held_up(CLAIM_TIMEOUT + 1),
    "kill before": _kill_before,
    "kill after": _kill_after,
    "pause before": _pause_before,
    "pause after": _pause_after,
    "short pause, then worse": _paused_and_cut,
    "step ahead": _stepped(STEP),
    "step back": _stepped(-STEP),
    "slow": _slow,
    "slow database": _slow_database,
    "locked": _locked,
    "rejected": _rejected,
    "cut off": _cut_off,
    "outage": _outage(5.0),
    "long outage": _outage(75.0),
    # At each repetition of the statement, too, as behind a pooler that keeps them back.
    "always lost before": _lost_before,
    "always lost after": _lost_after,
    "always held up 1 s": _held_up(1.0),
    "always held up to the end": _held_up(CLAIM_TIMEOUT - 0.1),
    "always held up beyond the claim": _held_up(3 * CLAIM_TIMEOUT),
    "always locked": _locked,
    "always hung": _hung,
}
# The faults at steps.
STEPS: dict[str, Callable[[Place], Any]] = {
    "kill": _kill_before,
    "pause": _pause_between,
    "short pause, then worse": _short_pause_between,
}


def is_stubborn(name: str) -> bool:
    """Return whether a fault also occurs at each repetition."""
    return name.startswith("always")


@dataclass(frozen=True)
class Planned:
    """A planned fault.

    :ivar at: the number of its place
    """

    at: int
    fault: str


class Plan:
    """Injects planned faults, and counts the places."""

    def __init__(self, planned: tuple[Planned, ...] = ()) -> None:
        self._planned = {each.at: each.fault for each in planned}
        self._stubborn: list[tuple[Process, str, float, str]] = []
        self.places: list[Place] = []
        self.injected: list[str] = []

    def pass_through(self, place: Place) -> Any:
        """Pass through a statement or step, with its planned fault if there is one."""
        is_statement = place.carry_out is not None
        self.places.append(place)
        fault = self._planned.get(place.number) or self._again(place)
        kinds = FAULTS if is_statement else STEPS
        if fault is None or fault not in kinds:
            if is_statement:
                place.world.note(place.process.name, place.what)
            return place.send()
        place.world.note(place.process.name, f"{place.what}   <- #{place.number} {fault}")
        self.injected.append(fault)
        if is_stubborn(fault) and place.number in self._planned:
            until = place.world.now + STUBBORN
            self._stubborn.append((place.process, place.group, until, fault))
            # Renewals and releases are sent only after a probe is answered.
            if place.group in ("renew", "release", "probe"):
                place.process.lose_touch(place.world.now, STUBBORN)
        return kinds[fault](place)

    def _again(self, place: Place) -> str | None:
        for process, group, until, fault in self._stubborn:
            if (process, group) == (place.process, place.group) and place.world.now < until:
                return fault
        return None
