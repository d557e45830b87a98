"""Sorts the ledger's runs of a task into whole runs, runs that died, and takeovers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Limits the seconds from the end of a run to its release. If a replica is killed in between, its
# run has ended, but the task's row does not show this. Another replica then rightly runs the
# window again.
RELEASE_TIME = 1.0


@dataclass(frozen=True)
class DemoTask:
    """One of the demo's tasks.

    :ivar name: id of the job, and so the task's name
    :ivar period: seconds from one run time to the next
    :ivar about: the description that is printed
    """

    name: str
    period: float
    about: str


@dataclass(frozen=True)
class Run:
    """A row of the ledger. Times are in seconds since 1970.

    :ivar task: the task's name
    :ivar replica: number of the replica that ran it
    :ivar token: fencing token of its claim
    :ivar run_time: when it was scheduled to run, which on a busy machine is before it started
    :ivar takeover: whether its lock said that it takes over a dead run
    :ivar started: when it started
    :ivar ended: when it returned or raised; ``None`` if it did neither
    """

    task: str
    replica: int
    token: int
    run_time: float
    takeover: bool
    started: float
    ended: float | None


@dataclass(frozen=True)
class Takeover:
    """A window that was run again because its holder was killed.

    :ivar task: the task's name
    :ivar run_time: when the window was scheduled to run, in seconds since 1970
    :ivar died: number of the replica that was killed; ``None`` if it was killed between its claim
        and its run, because the ledger then has no entry of it
    :ivar replica: number of the replica that ran the window again
    """

    task: str
    run_time: float
    died: int | None
    replica: int


class Account:
    """A task's runs, sorted into complete runs, takeovers and unfounded takeovers.

    :ivar complete: the runs that ended, without those that were rightly run again
    :ivar takeovers: the windows that were run again because their holder was killed
    :ivar unfounded: how many runs were takeovers although nobody had been killed
    """

    def __init__(self, runs: Sequence[Run], deaths: Mapping[int, float]) -> None:
        self.takeovers: list[Takeover] = []
        self.unfounded = 0
        self._deaths = deaths
        self._claims = {run.token: run for run in runs}
        replaced: set[int] = set()
        ordered = sorted(runs, key=lambda run: run.token)
        for run in ordered:
            if run.takeover and self._is_founded(run):
                replaced.add(run.token - 1)
                died = self._claims.get(run.token - 1)
                holder = None if died is None else died.replica
                self.takeovers.append(Takeover(run.task, run.run_time, holder, run.replica))
            else:
                self.unfounded += run.takeover
        self.complete = [
            run for run in ordered if run.ended is not None and run.token not in replaced
        ]

    def _is_founded(self, run: Run) -> bool:
        """Return whether the claim before a takeover was that of a replica killed in its run."""
        died = self._claims.get(run.token - 1)
        if died is None:
            return any(death <= run.started for death in self._deaths.values())
        death = self._deaths.get(died.replica)
        if death is None or death > run.started:
            return False
        return died.ended is None or death - died.ended < RELEASE_TIME
