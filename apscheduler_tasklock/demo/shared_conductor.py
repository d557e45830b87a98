"""The conductor of the shared store: has jobs added and removed, and kills a replica."""

from __future__ import annotations

from apscheduler_tasklock.demo.conductor import (
    FEWEST_REPLICAS,
    LOOK,
    PATIENCE,
    SHORTEST_STORY,
    kills,
)
from apscheduler_tasklock.demo.fleet import Fleet, ReplicaEvent
from apscheduler_tasklock.demo.history import JudgedRun
from apscheduler_tasklock.demo.ledger import Ledger
from apscheduler_tasklock.demo.shared_jobs import REPORTS, TICK
from apscheduler_tasklock.errors import TaskLockOptionError

# The replica that adds the jobs.
ADDS = 1

# Seconds after the start at which the jobs are added.
_ADD_AT = 1.0
# Seconds for which the demo goes on after a job was removed, to show that this job runs no more.
_AFTERWARDS = 2.5


def describe_plan(replicas: int, seconds: float) -> str:
    """Return which replica will be killed, in words.

    :raises TaskLockOptionError: the demo is too short to kill a replica, or has only one replica
    """
    if not kills(replicas, seconds):
        raise TaskLockOptionError(
            f"a demo of the shared store takes {FEWEST_REPLICAS} replicas and "
            f"{SHORTEST_STORY:.0f} seconds, or more"
        )
    return "Another replica that has begun one of the reports will be killed in the middle of it"


class SharedConductor:
    """Conducts what happens to the replicas and the jobs.

    :param seconds: how long the demo is
    """

    def __init__(self, ledger: Ledger, fleet: Fleet, seconds: float) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._seconds = seconds
        self._added = False
        self._next_look = _ADD_AT
        self._killed: tuple[str, int] | None = None  # the job and the replica
        self._again_on: int | None = None
        self._told = False  # whether the killed run was run again to its end
        self._to_remove = True
        self._removed = False
        self._over_at = seconds

    def busy(self, elapsed: float) -> bool:
        """Return whether something is under way that the demo should wait for."""
        if self._removed:
            return elapsed < self._over_at
        return elapsed < self._seconds + PATIENCE

    def act(self, elapsed: float) -> None:
        """Have jobs added or removed, or kill a replica, if this is due.

        :param elapsed: seconds since the start
        """
        if not self._added and elapsed >= _ADD_AT:
            self._added = True
            self._fleet.tell(ADDS, "add")
        if self._killed is None and elapsed >= self._next_look:
            self._next_look = elapsed + LOOK
            self._kill()
        if self._told and self._to_remove and elapsed >= self._seconds - _AFTERWARDS:
            self._to_remove = False
            self._over_at = elapsed + _AFTERWARDS
            self._fleet.tell(self._removes(), f"remove {TICK.name}")

    def take_in(self, event: ReplicaEvent) -> None:
        """Note an event of a replica."""
        if event.kind == "removed":
            self._removed = True
        if self._killed is None or event.task != self._killed[0]:
            return
        if event.reason == "takeover":
            self._again_on = event.replica
        elif event.kind == "released" and event.replica == self._again_on:
            self._told = True

    def fault(self) -> str | None:
        """Return what should have happened and did not, or ``None``."""
        if self._killed is None:
            return f"no report was begun by another replica than {ADDS}, and killed"
        job, replica = self._killed
        if not self._told:
            return f"{job}, in which replica {replica} was killed, was not run again"
        return None if self._removed else f"{TICK.name} was not removed"

    def _kill(self) -> None:
        others = [number for number in self._fleet.numbers if number != ADDS]
        for report in REPORTS:
            killed: list[int] = []

            def kill(run: JudgedRun, killed: list[int] = killed) -> None:
                self._fleet.kill_in(run)
                killed.append(int(run.replica))

            if self._ledger.kill_in_mid_run(report.name, kill, others):
                self._killed = report.name, killed[0]
                return

    def _removes(self) -> int:
        """Return the replica that removes the job: if possible, not the one that has added it."""
        assert self._killed is not None
        left = {*self._fleet.numbers} - {ADDS, self._killed[1]}
        return min(left, default=ADDS)
