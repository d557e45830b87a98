"""One run of the chaos, from the first replica to the history."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.demo.history import Event
from apscheduler_tasklock.demo.run import Interrupts
from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.chaos.application import create_tables, monotonic_offset, read_events
from tests.chaos.fleet import Fleet
from tests.chaos.monkey import Monkey
from tests.chaos.plan import Plan
from tests.chaos.settings import ONE_OFFS

_TICK = 0.02

# Seconds from one status line to the next.
_STATUS_EVERY = 15.0

# Seconds by which the machine's clock may have been set against its monotonic one.
_CLOCK_TOLERANCE = 0.02


class ClockSetError(Exception):
    """The machine's clock was set, so that the history's times do not fit together."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    :ivar started: when it did, on the machine's monotonic clock
    :ivar events: the history
    :ivar done: how often the monkey did each kind of action
    """

    started: float
    events: Sequence[Event]
    done: Counter[str]


def unleash(plan: Plan, seconds: float, folder: Path) -> Outcome:
    """Carry the plan out, and return what happened. Nothing is left behind.

    :param folder: gets the replicas' logs
    :raises InterruptedDemo: on SIGINT or SIGTERM
    """
    events: list[Event] = []
    with ExitStack() as stack:
        interrupts = Interrupts()
        stack.enter_context(interrupts.listening())
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
            interrupts.check()
            time.sleep(_TICK)
        started = time.monotonic()
        _write_one_offs(plan, started, folder, events)
        monkey.begin(started)
        told_at = started
        while (now := time.monotonic()) < started + seconds:
            interrupts.check()
            monkey.act()
            if now >= told_at:
                told_at = now + _STATUS_EVERY
                runs = sum(event.kind == "begin" for event in list(events))
                faults = monkey.done.total()
                line = f"{now - started:4.0f} of {seconds:.0f} s: {runs} runs, {faults} faults"
                print(line, flush=True)
            time.sleep(_TICK)
        events.append(Event(time.monotonic(), "closing"))
        fleet.close()
        interrupts.check()
        if abs(monotonic_offset() - offset) > _CLOCK_TOLERANCE:
            raise ClockSetError
        events += read_events(server.url, offset)
    return Outcome(started, events, monkey.done)


def _write_one_offs(plan: Plan, started: float, folder: Path, events: list[Event]) -> None:
    """Let the replicas and the checker know of the one-off jobs, on the monotonic clock."""
    jobs = [replace(job, at=started + job.at) for job in plan.one_offs]
    (folder / ONE_OFFS).write_text(json.dumps([asdict(job) for job in jobs]))
    events += [Event(started, "planned", detail=json.dumps(asdict(job))) for job in jobs]
