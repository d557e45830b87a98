"""The verdict: from what ran and what was due, which windows ran twice, and which did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apscheduler_tasklock.demo.account import Account, Run, Scheduled, Takeover, Window

# A task whose replicas are offset may run again this share of its period after its last run: the
# library's default min_factor.
MIN_FACTOR = 0.9

# The database learns a run time as "now, minus so many seconds", so that a window begins late by
# as long as the statement was under way, in seconds. Two runs may look closer by that.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Verdict:
    """What became of a task's windows.

    :ivar task: the task's name
    :ivar runs: how often it ran to the end. A run that died and the one that took it over are one.
    :ivar doubled: how many of these runs were in a window that had been run
    :ivar missed: how many windows nobody ran to the end
    :ivar by_replica: how often it ran to the end on each replica
    :ivar takeovers: the windows that were run again since their holder was killed
    :ivar unfounded: how many runs were takeovers although nobody had been killed
    """

    task: str
    runs: int
    doubled: int
    missed: int
    by_replica: Counter[int]
    takeovers: Sequence[Takeover]
    unfounded: int

    @property
    def windows(self) -> int:
        """How many windows there were."""
        return self.runs - self.doubled + self.missed


def verdict(
    runs: Sequence[Run], fires: Sequence[float], deaths: Mapping[int, float], task: Scheduled
) -> Verdict:
    """Judge one task.

    :param runs: the task's rows of the ledger
    :param fires: the run times that any replica asked the lock for, granted or refused
    :param deaths: when which replica was killed
    :param task: the task
    """
    account = Account(runs, deaths, task)
    windows = sorted(account.windows, key=lambda window: window.time)
    seen = sorted([*fires, *(run.run_time for run in runs)])
    judge = _judge_grid if task.on_grid else _judge_spacing
    doubled, missed = judge(windows, seen, task.period) if seen else (0, 0)
    return Verdict(
        task.name,
        len(account.complete),
        doubled,
        missed,
        Counter(run.replica for run in account.complete),
        account.takeovers,
        account.unfounded,
    )


def _judge_grid(windows: list[Window], seen: list[float], period: float) -> tuple[int, int]:
    """Count doubled and missed times of a grid that all replicas share."""
    ran = Counter(round((window.time - seen[0]) / period) for window in windows)
    due = round((seen[-1] - seen[0]) / period) + 1
    return len(windows) - len(ran), due - len(ran)


def _judge_spacing(windows: list[Window], seen: list[float], period: float) -> tuple[int, int]:
    """Count doubled and missed windows where each replica has run times of its own.

    A run opens a window, and the next window belongs to whoever fires first after it. That is at
    the latest the same replica, one period on; or if that has been killed, another one, whose last
    fire was refused within the window, less than two periods on.
    """
    if not windows:
        return 0, 1 + _whole_periods(seen[-1] - seen[0], period)
    doubled = 0
    last = windows[0]
    missed = _whole_periods(last.time - seen[0], period)
    for window in windows[1:]:
        gap = window.time - last.time
        if gap < MIN_FACTOR * period - TOLERANCE:
            doubled += 1
            continue
        if last.holder_died and window.holder != last.holder:
            missed += max(0, _whole_periods(gap, period) - 1)
        elif gap > 1.5 * period:
            missed += round(gap / period) - 1
        last = window
    return doubled, missed + _whole_periods(seen[-1] - last.time, period)


def _whole_periods(gap: float, period: float) -> int:
    """Return how many windows found no run between an edge and a run.

    Within one period of a run, other replicas are rightly refused; a fire one period away is not.
    """
    return int((gap + TOLERANCE) // period)
