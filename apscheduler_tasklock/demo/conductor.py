"""The conductor: kills a replica in the middle of a run, and starts one after the takeover."""

from __future__ import annotations

from collections.abc import Sequence

from apscheduler_tasklock.demo.fleet import Fleet, ReplicaEvent
from apscheduler_tasklock.demo.jobs import LONG_TASK
from apscheduler_tasklock.demo.ledger import Ledger

# Seconds that the whole story takes: the first long run, its death, the end of its lease, the run
# that takes over, and a new replica that has started and runs something.
SHORTEST_STORY = 12.0

# One replica is killed, and one has to be left to take over.
FEWEST_REPLICAS = 2

# Seconds from the first try to kill a replica to the middle of the demo, so that the takeover comes
# about in the middle.
_BEFORE_THE_MIDDLE = 6.0

# Seconds from the kill to the end of the run that takes over, and a little more.
_TAKEOVER = 5.5

# Limits the seconds for which the demo goes on after its time, until the whole story has happened.
PATIENCE = 20.0

# Seconds from one look at the ledger to the next.
LOOK = 0.2


class Conductor:
    """Conducts what happens to the replicas while they run.

    :param seconds: how long the demo is
    :param has_leader: whether the replicas are in leader mode, so that the leader is killed
    """

    def __init__(
        self, ledger: Ledger, fleet: Fleet, seconds: float, *, has_leader: bool = False
    ) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._seconds = seconds
        self._to_kill = kills(len(fleet), seconds)
        self._next_look = max(0.0, seconds / 2 - _BEFORE_THE_MIDDLE)
        self._new_replica_at: float | None = None
        self._newest: int | None = None
        self._has_leader = has_leader
        self._leader: int | None = None
        # What must still happen: "takeover", "new replica", "new leader".
        self._awaited: set[str] = set()

    def busy(self, elapsed: float) -> bool:
        """Return whether something is under way that the demo should wait for."""
        return bool(self._awaited) and elapsed < self._seconds + PATIENCE

    def act(self, elapsed: float) -> None:
        """Kill or start a replica, if this is due.

        :param elapsed: seconds since the start
        """
        if self._to_kill and self._next_look <= elapsed < self._seconds - _TAKEOVER:
            self._next_look = elapsed + LOOK
            if self._ledger.kill_in_mid_run(LONG_TASK, self._fleet.kill_in, self._may_be_killed):
                self._to_kill = False
                self._new_replica_at = elapsed + _TAKEOVER
                self._awaited = {"takeover", "new replica"}
                if self._has_leader:
                    self._awaited.add("new leader")
        if self._new_replica_at is not None and elapsed >= self._new_replica_at:
            self._start_replica()

    def take_in(self, event: ReplicaEvent) -> None:
        """React to an event of a replica."""
        if event.kind == "ready":
            self._fleet.go_too(event.replica)
        elif event.kind in ("leads", "follows"):
            self._take_in_leadership(event)
        elif event.replica == self._newest:
            self._awaited.discard("new replica")  # it has asked for a lock, or has failed
        if event.reason == "takeover" and event.task == LONG_TASK:
            self._awaited.discard("takeover")
            if self._new_replica_at is not None:
                self._start_replica()

    def fault(self) -> str | None:
        """Return what should have happened and did not, or ``None``."""
        if self._to_kill:
            return "no replica could be killed in the middle of a run"
        if "new leader" in self._awaited:
            return f"nobody led after replica {self._leader} was killed"
        return None

    @property
    def _may_be_killed(self) -> Sequence[int]:
        """The replicas of which one may be killed."""
        if not self._has_leader:
            return self._fleet.numbers
        return [] if self._leader is None else [self._leader]

    def _take_in_leadership(self, event: ReplicaEvent) -> None:
        if event.kind == "leads":
            if event.replica != self._leader:
                self._awaited.discard("new leader")
            self._leader = event.replica
        elif event.replica == self._leader:
            self._leader = None

    def _start_replica(self) -> None:
        self._new_replica_at = None
        self._fleet.start_replica()
        self._newest = len(self._fleet)


def kills(replicas: int, seconds: float) -> bool:
    """Return whether a replica is killed in a demo of so many replicas and seconds."""
    return replicas >= FEWEST_REPLICAS and seconds >= SHORTEST_STORY


def describe_plan(replicas: int, seconds: float, *, has_leader: bool = False) -> str:
    """Return whether a replica will be killed; if not, which demo would be large enough.

    :param has_leader: whether the replicas are in leader mode, so that the leader is killed
    """
    if kills(replicas, seconds):
        if has_leader:
            return (
                f"The leader will be killed in the middle of {LONG_TASK}, and a new replica "
                "started.\nUntil another one leads, jobs run two or three seconds late"
            )
        return f"One of them will be killed in the middle of {LONG_TASK}, and a new one started"
    return (
        f"None of them will be killed; that takes {FEWEST_REPLICAS} replicas and "
        f"{SHORTEST_STORY:.0f} seconds, or more"
    )
