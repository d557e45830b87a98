"""The conductor: kills a replica in the middle of a run, and later starts a new one."""

from __future__ import annotations

from apscheduler_tasklock.demo.fleet import Event, Fleet
from apscheduler_tasklock.demo.jobs import LONG_TASK
from apscheduler_tasklock.demo.ledger import Ledger

# What the whole story takes, in seconds: the first long run, its death, the end of its lease, the
# run that takes over, and a new replica that has started and runs something.
SHORTEST_STORY = 12.0

# Somebody has to be left to take over.
FEWEST_REPLICAS = 2

# The kill is so long before the middle, in seconds, that the takeover is in it.
_BEFORE_THE_MIDDLE = 6.0

# Seconds from the kill to the end of the run that takes over, and a little.
_TAKEOVER = 5.5

# Seconds for which the demo goes on if the story is not told when its time is up.
_PATIENCE = 20.0

# Seconds from one look at the ledger to the next.
_LOOK = 0.2


class Conductor:
    """Conducts what happens to the replicas while they run.

    :param seconds: how long the demo is
    """

    def __init__(self, ledger: Ledger, fleet: Fleet, seconds: float) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._seconds = seconds
        self._to_kill = kills(len(fleet), seconds)
        self._next_look = max(0.0, seconds / 2 - _BEFORE_THE_MIDDLE)
        self._new_replica_at: float | None = None
        self._newest: int | None = None
        self._awaited: set[str] = set()  # "takeover", "new replica"

    def busy(self, elapsed: float) -> bool:
        """Tell whether something is under way that the demo should wait for."""
        return bool(self._awaited) and elapsed < self._seconds + _PATIENCE

    def act(self, elapsed: float) -> None:
        """Do what is due, so many seconds after the start."""
        if self._to_kill and self._next_look <= elapsed < self._seconds - _TAKEOVER:
            self._next_look = elapsed + _LOOK
            if self._ledger.kill_in_mid_run(LONG_TASK, self._fleet.kill_in):
                self._to_kill = False
                self._new_replica_at = elapsed + _TAKEOVER
                self._awaited = {"takeover", "new replica"}
        if self._new_replica_at is not None and elapsed >= self._new_replica_at:
            self._start_replica()

    def take_in(self, event: Event) -> None:
        """Take in what a replica told."""
        if event.kind == "ready":
            self._fleet.go_too(event.replica)
        elif event.replica == self._newest:
            self._awaited.discard("new replica")  # it has asked for a lock, or failed
        if event.reason == "takeover" and event.task == LONG_TASK:
            self._awaited.discard("takeover")
            if self._new_replica_at is not None:
                self._start_replica()

    def fault(self) -> str | None:
        """Return what should have happened and did not."""
        return "no replica could be killed in the middle of a run" if self._to_kill else None

    def _start_replica(self) -> None:
        self._new_replica_at = None
        self._fleet.start_replica()
        self._newest = len(self._fleet)


def kills(replicas: int, seconds: float) -> bool:
    """Tell whether such a demo is one in which a replica is killed."""
    return replicas >= FEWEST_REPLICAS and seconds >= SHORTEST_STORY


def describe_plan(replicas: int, seconds: float) -> str:
    """Return whether a replica will be killed, and if not, what that would take."""
    if kills(replicas, seconds):
        return f"One of them will be killed in the middle of {LONG_TASK}, and a new one started"
    return (
        f"None of them will be killed; that takes {FEWEST_REPLICAS} replicas and "
        f"{SHORTEST_STORY:.0f} seconds, or more"
    )
