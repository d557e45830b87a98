"""The history of a fleet: what happened, as events, and the runs that these make up.

A history is kept as lines of JSON, an event each. The judge reads it, see ``judge.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Of a run: ``begin``, ``holds``, ``end``, and ``cut`` in place of the end of a coroutine that was
    cancelled. Of its claim: ``claimed``, ``renewed``, ``released``, ``handed over``, ``given up``,
    ``lease ended``. Of a replica: ``killed``. Who writes a history may have further kinds.

    :ivar at: the time, in seconds; all events of a history are by one clock
    :ivar replica: the replica's name; ``""`` if the event concerns all of them
    :ivar token: fencing token of the run or claim
    :ivar due: the run time, or the start of the claim's window; ``None`` for neither
    :ivar until: the end of a claim's lease, or of what the event began; ``None`` for neither
    :ivar lost: whether the run's lock was lost, as ``current_lock()`` said
    :ivar takeover: whether the run was a takeover, as ``current_lock()`` said
    :ivar kept: whether the window stayed taken when the claim was released
    :ivar run_until: when the claim's maximum lock ends
    :ivar worker: id of the worker process that the event concerns; 0 for none. Its replica's own
        process claims for it
    :ivar error: why a change failed
    :ivar detail: shown in logs
    """

    at: float
    kind: str
    replica: str = ""
    task: str = ""
    token: int = 0
    due: Any = None
    until: Any = None
    lost: bool = False
    takeover: bool = False
    kept: bool = True
    run_until: float | None = None
    worker: int = 0
    error: str = ""
    detail: str = ""

    @property
    def line(self) -> str:
        """The event as a line of JSON, without the fields that have their defaults."""
        told = {name: value for name, value in asdict(self).items() if value != _USUAL.get(name)}
        return json.dumps(told) + "\n"


_USUAL = asdict(Event(0.0, ""))
del _USUAL["at"]


def write(events: Iterable[Event], path: Path) -> None:
    """Write a history to a file."""
    path.write_text("".join(event.line for event in events))


def read(path: Path) -> list[Event]:
    """Read the history that :func:`write` wrote, or that processes appended to."""
    return [Event(**json.loads(line)) for line in path.read_text().splitlines()]


@dataclass(eq=False)
class JudgedRun:
    """A run of a job, or a stretch of code under a hold.

    :ivar due: the run time; for a hold: its holder
    :ivar begun: when it began
    :ivar ended: when it ended; ``None`` if it did not
    :ivar died: when its replica was killed; ``None`` if it was not
    :ivar asked: when its claim was asked for
    :ivar lost: whether its lock was reported as lost when it ended
    :ivar attempt: which attempt at its run time it is
    :ivar failed: whether its job raised an exception
    :ivar opens: whether its end opens its window, so that its run time may be run again
    """

    task: str
    replica: str
    due: Any
    begun: float
    ended: float | None = None
    died: float | None = None
    token: int = 0
    takeover: bool = False
    asked: float = 0.0
    lost: bool = False
    attempt: int = 1
    failed: bool = False
    opens: bool = False

    @property
    def over(self) -> float:
        """When it ended, or else when its replica was killed; ``inf`` for neither."""
        if self.ended is not None:
            return self.ended
        return inf if self.died is None else self.died

    def is_dead(self, at: float, release: float = inf) -> bool:
        """Return whether its replica was killed by a time, before the run was released.

        :param release: the longest time from the end of a run to its release, in seconds
        """
        if self.died is None or self.died > at:
            return False
        return self.ended is None or self.died - self.ended < release


def deaths(events: Iterable[Event]) -> dict[str, float]:
    """Return when each killed replica was killed, by its name."""
    return {event.replica: event.at for event in events if event.kind == "killed"}


def runs(events: Sequence[Event], task: str) -> list[JudgedRun]:
    """Return the runs of a task, in the order in which they began."""
    killed = deaths(events)
    found: list[JudgedRun] = []
    open_runs: dict[tuple[str, int], JudgedRun] = {}
    for event in sorted(events, key=lambda event: event.at):
        if event.task != task:
            continue
        key = event.replica, event.token
        if event.kind == "begin":
            died = killed.get(event.replica)
            open_runs[key] = JudgedRun(task, event.replica, event.due, event.at, None, died)
            open_runs[key].token, open_runs[key].takeover = event.token, event.takeover
            found.append(open_runs[key])
        elif event.kind == "end":
            open_runs[key].ended, open_runs[key].lost = event.at, event.lost
    return found
