"""One run of the chaos, from the first replica to the history."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.chaos.application import create_tables, monotonic_offset, read_events
from tests.chaos.fleet import Fleet
from tests.chaos.history import Event
from tests.chaos.monkey import Monkey
from tests.chaos.plan import Plan
from tests.chaos.settings import ONE_OFFS

_TICK = 0.02

# Seconds from one status line to the next, where it cannot be written over.
_PLAIN_PAUSE = 15.0

# Seconds by which the machine's clock may have been set against its monotonic one.
_CLOCK_TOLERANCE = 0.02


class InterruptedChaosError(Exception):
    """Somebody wants it to end."""


class ClockSetError(Exception):
    """The machine's clock was set, so that the history's times do not fit together."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    :ivar started: when it did, on the machine's monotonic clock
    :ivar events: the history
    :ivar done: how often the monkey did what
    """

    started: float
    events: Sequence[Event]
    done: Counter[str]


def unleash(plan: Plan, seconds: float, folder: Path) -> Outcome:
    """Carry the plan out, and return what happened. Nothing is left behind.

    :param folder: gets the replicas' logs
    :raises InterruptedChaosError: on SIGINT or SIGTERM
    """
    events: list[Event] = []
    with ExitStack() as stack:
        check_interrupt = stack.enter_context(_interrupts())
        server = stack.enter_context(EmbeddedServer(loopback=True))
        upgrade(server.url)
        create_tables(server.url)
        offset = monotonic_offset()
        fleet = stack.enter_context(
            Fleet(server.url, folder, offset, events.append).running(len(plan.first))
        )
        monkey = Monkey(plan, fleet, server, events)
        monkey.prepare()
        while sum(event.kind == "loaded" for event in list(events)) < len(plan.first):
            check_interrupt()
            time.sleep(_TICK)
        started = time.monotonic()
        _write_one_offs(plan, started, folder, events)
        monkey.begin(started)
        status = _Status(seconds)
        while time.monotonic() < started + seconds:
            check_interrupt()
            monkey.act()
            status.show(time.monotonic() - started, events, monkey.done)
            time.sleep(_TICK)
        status.clear()
        events.append(Event(time.monotonic(), "closing"))
        fleet.close()
        check_interrupt()
        if abs(monotonic_offset() - offset) > _CLOCK_TOLERANCE:
            raise ClockSetError
        events += read_events(server.url, offset)
    return Outcome(started, events, monkey.done)


def _write_one_offs(plan: Plan, started: float, folder: Path, events: list[Event]) -> None:
    """Let the replicas and the checker know of the one-off jobs, on the monotonic clock."""
    jobs = [replace(job, at=started + job.at) for job in plan.one_offs]
    (folder / ONE_OFFS).write_text(json.dumps([asdict(job) for job in jobs]))
    events += [Event(started, "planned", detail=json.dumps(asdict(job))) for job in jobs]


@contextmanager
def _interrupts() -> Iterator[Callable[[], None]]:
    """Note signals that end it. An exception out of a handler could come at any place."""
    noted: list[int] = []

    def check() -> None:
        if noted:
            raise InterruptedChaosError

    before = {
        number: signal.signal(number, lambda number, _frame: noted.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Status:
    """A line that says how far it is; written over on a terminal."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._over = sys.stdout.isatty()
        self._due = 0.0

    def show(self, elapsed: float, events: Sequence[Event], done: Counter[str]) -> None:
        if elapsed < self._due:
            return
        self._due = elapsed + (0.2 if self._over else _PLAIN_PAUSE)
        runs = sum(event.kind == "begin" for event in list(events))
        line = f"{elapsed:4.0f} of {self._seconds:.0f} s: {runs} runs, {done.total()} faults"
        print(f"\r{line}" if self._over else line, end="" if self._over else "\n", flush=True)

    def clear(self) -> None:
        if self._over:
            print("\r\033[K", end="", flush=True)
