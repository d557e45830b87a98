"""What a run of the chaos leaves: events, in lines of JSON, which the checker reads.

All times are seconds on the machine's monotonic clock, which the replicas, the database server and
the monkey share, and which nobody sets: ``faketime`` is told to leave it alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Detail of a replica that is ready.
FAR = "far"

# What follows a replica's name where its pool of worker processes is meant.
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
    ``early``, a job ran that was not due; ``stalled``; ``erred``, something was logged as an error.
    A replica that runs some tasks in worker processes tells the first two twice, as itself and as
    its pool, with `` pool`` after its name. What concerns these tasks is told of the pool.
    What the task lock table shows: ``claimed``, ``renewed``, ``released``, ``handed over``,
    ``given up``.
    What the application's table shows: ``written``, an accepted write.
    What the monkey does: ``killed``, with ``alone`` if the worker processes live on, ``stopped``,
    ``continued``, ``hung``, ``freed``, ``cut off``, ``terminated``, ``leaving``; to a worker of a
    pool ``worker killed``, ``worker stopped`` and ``worker continued``; to all replicas at once
    ``down`` and ``up``, the server, and ``slowed`` and ``quick``, its answers.
    What the fleet sees: ``died``, a replica that nobody told to; ``gone``, one that was told to
    end; ``closing``, all are to end.

    :ivar at: when; of a belief, right before it was asked
    :ivar replica: whose; ``""`` if it concerns all of them
    :ivar token: fencing token of the run or claim
    :ivar due: the run time, or the start of the claim's window
    :ivar until: of a claim when it ends; of a stall when it was over
    :ivar lost: what the run was told of its lock
    :ivar takeover: whether the run was told that it runs a dead holder's window again
    :ivar kept: whether the window stayed taken when the claim was released
    :ivar run_until: of a claim when its maximum lock ends
    :ivar deaths: how many holders of the task have died in a row
    :ivar worker: the worker process that claims or runs, or to which it was done; 0 for none
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
