"""What a run of the chaos leaves: events, in lines of JSON, which the checker reads.

All times are seconds on the machine's monotonic clock, which the replicas, the database server and
the monkey share, and which nobody sets: ``faketime`` is told to leave it alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Event:
    """Something that happened.

    What a replica tells: ``ready``; ``fire``, APScheduler handed a run time to the executor;
    ``skipped``, which then could not claim it;
    ``begin``, ``holds`` and ``end`` of a run, with what ``current_lock().lost`` was; ``stalled``;
    ``erred``, something was logged as an error.
    What the task lock table shows: ``claimed``, ``renewed``, ``released``.
    What the application's table shows: ``written``, an accepted write.
    What the monkey does: ``killed``, ``stopped``, ``continued``, ``hung``, ``freed``, ``cut``,
    ``terminated``, ``leaving``; to all replicas at once ``down`` and ``up``, the server.
    What the fleet sees: ``died``, a replica that nobody told to; ``closing``, all are to end.

    :ivar at: when; of a belief, right before it was asked
    :ivar replica: whose; ``""`` if it concerns all of them
    :ivar token: fencing token of the run or claim
    :ivar due: the run time, or the start of the claim's window
    :ivar until: of a claim when it ends; of a stall when it was over
    :ivar lost: what the run was told of its lock
    :ivar takeover: whether the run was told that it runs a dead holder's window again
    :ivar kept: whether the window stayed taken when the claim was released
    :ivar detail: for people
    """

    at: float
    kind: str
    replica: str = ""
    task: str = ""
    token: int = 0
    due: float | None = None
    until: float | None = None
    lost: bool = False
    takeover: bool = False
    kept: bool = True
    detail: str = ""


def write(events: Iterable[Event], path: Path) -> None:
    """Write events as lines of JSON, without what is as usual."""
    usual = asdict(Event(0.0, ""))
    with path.open("w") as file:
        for event in events:
            told = {name: value for name, value in asdict(event).items() if value != usual[name]}
            file.write(json.dumps({"at": event.at, **told}) + "\n")


def read(path: Path) -> Sequence[Event]:
    """Read what :func:`write` wrote."""
    return [Event(**json.loads(line)) for line in path.read_text().splitlines()]
