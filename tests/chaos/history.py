"""The history of a run of the chaos: events, which the checker reads.

All times are seconds on the machine's monotonic clock, which the replicas, the database server and
the monkey share, and which nobody sets: ``faketime`` is told to leave it alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Detail of the event `ready` of a replica whose clock is far off.
FAR = "far"

# The suffix of a replica's name that stands for its pool of processes, or of threads beside a loop.
POOL = " pool"

# Detail of a kill of the replica's own process alone. Its workers live on.
ALONE = "alone"

# Detail of a replica that is told to end by a signal to its worker processes as well.
END_GROUP = "end group"


@dataclass(frozen=True)
class Event:
    """Something that happened.

    What is planned: ``planned``, a one-off job, as JSON in ``detail``.
    What a replica tells: ``loaded``, it is about to start; ``starting``, its scheduler does;
    ``ready``, it has its jobs and its worker processes, with ``far`` for a clock that is far off;
    ``fire``, APScheduler handed a run time to the executor; ``skipped``, which then
    could not claim it; ``misfired``; ``begin``, ``holds`` and ``end`` of a run, with what
    ``current_lock().lost`` was, and ``cut`` in place of the end of a coroutine that is cancelled;
    ``early``, a job ran that was not due; ``worker started``, a process of a pool; ``stalled``;
    ``erred``, something was logged as an error.
    A replica that runs some tasks in a pool beside the others is ``starting`` and ``ready`` twice,
    as itself and as its pool, with `` pool`` after its name. What concerns these tasks is told of
    the pool.
    What the task lock table shows: ``claimed``, ``renewed``, ``released``, ``handed over``,
    ``given up``; ``lease ended``, by the replica that has it, of a dead worker process.
    What the application's table shows: ``written``, an accepted write.
    What the monkey does: ``killed``, with ``alone`` if the worker processes live on, ``stopped``,
    ``continued``, ``hung``, ``freed``, ``cut off``, ``terminated``, ``leaving``; to a worker of a
    pool ``worker killed``, ``worker stopped`` and ``worker continued``; to all replicas at once
    ``down`` and ``up``, the server, and ``slowed`` and ``quick``, its answers.
    What the fleet sees: ``died``, a replica that nobody told to; ``gone``, one that was told to
    end; ``closing``, all are to end.

    :ivar at: its time; a run reads the clock right before it asks whether its lock is lost
    :ivar replica: the replica's name; ``""`` if the event concerns all of them
    :ivar token: fencing token of the run or claim
    :ivar due: the run time, or the start of the claim's window
    :ivar until: the end of a claim's lease, or of a stall
    :ivar lost: whether the run's lock was lost, as ``current_lock()`` said
    :ivar takeover: whether the run was a takeover, as ``current_lock()`` said
    :ivar kept: whether the window stayed taken when the claim was released
    :ivar run_until: of a claim when its maximum lock ends
    :ivar deaths: how many holders of the task have died in a row
    :ivar worker: the worker process that the event is of; 0 for none. Its replica's own process
        claims for it
    :ivar detail: shown in logs
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
    run_until: float | None = None
    deaths: int = 0
    worker: int = 0
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
