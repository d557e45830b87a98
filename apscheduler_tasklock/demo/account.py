"""The ledger's runs, set off against each other: what died, what was run again, what is whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Seconds within which a run that has ended is released. A replica that is killed in between leaves
# a whole run that nobody can know of but by this ledger; it is rightly run again.
RELEASE_TIME = 1.0


class Scheduled(Protocol):
    """What the verdict needs to know of a task."""

    @property
    def name(self) -> str:
        """Name of the task."""

    @property
    def period(self) -> float:
        """Seconds from one run time to the next."""

    @property
    def on_grid(self) -> bool:
        """Whether all replicas have the same run times."""


@dataclass(frozen=True)
class Run:
    """A row of the ledger. Times are in seconds since 1970.

    :ivar task: the task's name
    :ivar replica: number of the replica that ran it
    :ivar token: fencing token of its claim
    :ivar run_time: when it was scheduled to run. Not when it started: a busy machine starts late.
    :ivar takeover: whether it was told that it runs a dead holder's window again
    :ivar started: when it started
    :ivar ended: when it ended, raising or not; ``None`` if it did not
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
    """A window that was run again since its holder was killed.

    :ivar task: the task's name
    :ivar run_time: when the window was scheduled to run, in seconds since 1970
    :ivar died: number of the replica that was killed; ``None`` if that came between its claim and
        its run, of which the ledger knows nothing then
    :ivar replica: number of the replica that ran the window again
    """

    task: str
    run_time: float
    died: int | None
    replica: int


@dataclass(frozen=True)
class Window:
    """Where a whole run belongs.

    :ivar time: its run time; of a takeover that of the run that died
    :ivar holder: number of the replica that began it first; ``None`` if the ledger cannot tell
    :ivar holder_died: whether that one was killed, then or later
    """

    time: float
    holder: int | None
    holder_died: bool


class Account:
    """Sorts out a task's runs.

    :ivar complete: the runs that came to their end, but for those that were rightly run again
    :ivar windows: where these belong, in their order
    :ivar takeovers: the windows that were run again since their holder was killed
    :ivar unfounded: how many runs were takeovers although nobody had been killed
    """

    def __init__(self, runs: Sequence[Run], deaths: Mapping[int, float], task: Scheduled) -> None:
        self.takeovers: list[Takeover] = []
        self.unfounded = 0
        self._deaths = deaths
        self._task = task
        self._claims = {run.token: run for run in runs}
        self._windows: dict[int, Window] = {}
        replaced: set[int] = set()
        placed: list[tuple[Run, Window]] = []
        for run in sorted(runs, key=lambda run: run.token):
            if run.takeover and self._is_founded(run):
                replaced.add(run.token - 1)
                window = self._take_over(run)
            else:
                self.unfounded += run.takeover
                window = Window(run.run_time, run.replica, holder_died=run.replica in deaths)
            self._windows[run.token] = window
            placed.append((run, window))
        whole = [
            (run, window)
            for run, window in placed
            if run.ended is not None and run.token not in replaced
        ]
        self.complete = [run for run, _ in whole]
        self.windows = [window for _, window in whole]

    def _is_founded(self, run: Run) -> bool:
        """Tell whether the claim before was that of a replica that had been killed in its run."""
        died = self._claims.get(run.token - 1)
        if died is None:
            return any(death <= run.started for death in self._deaths.values())
        death = self._deaths.get(died.replica)
        if death is None or death > run.started:
            return False
        return died.ended is None or death - died.ended < RELEASE_TIME

    def _take_over(self, run: Run) -> Window:
        """Note a takeover, and return the window that was taken over."""
        died = self._claims.get(run.token - 1)
        if died is not None:
            window = self._windows[died.token]
        else:
            window = Window(self._first_time_after(run), None, holder_died=True)
        replica = died.replica if died is not None else None
        self.takeovers.append(Takeover(run.task, window.time, replica, run.replica))
        return window

    def _first_time_after(self, run: Run) -> float:
        """Return when the window began of which the ledger has nothing but its takeover.

        A takeover has the run time of its own replica, which on a shared grid is the same.
        """
        before = [window.time for token, window in self._windows.items() if token < run.token]
        if self._task.on_grid or not before:
            return run.run_time
        return before[-1] + self._task.period
