"""The verdict: which windows ran twice, and which did not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apscheduler_tasklock.demo.account import Account, DemoTask, Run, Takeover


@dataclass(frozen=True)
class Verdict:
    """The verdict on a task.

    :ivar task: the task's name
    :ivar runs: how often the task ran to the end. A dead run and its takeover count as one run.
    :ivar doubled: how many of these runs were in a window that had been run already
    :ivar missed: how many windows nobody ran to the end
    :ivar by_replica: how often the task ran to the end on each replica
    :ivar takeovers: the windows that were run again because their holder was killed
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
    runs: Sequence[Run], fires: Sequence[float], deaths: Mapping[int, float], task: DemoTask
) -> Verdict:
    """Judge one task.

    :param runs: the task's rows of the ledger
    :param fires: the run times for which any replica asked for the lock, granted or refused
    :param deaths: when each killed replica was killed, by its number
    :param task: the task
    """
    account = Account(runs, deaths)
    seen = sorted([*fires, *(run.run_time for run in runs)])
    # Windows are numbered by their run times, which are one period apart and the same on all
    # replicas.
    ran = Counter(round((run.run_time - seen[0]) / task.period) for run in account.complete)
    due = round((seen[-1] - seen[0]) / task.period) + 1 if seen else 0
    return Verdict(
        task.name,
        len(account.complete),
        len(account.complete) - len(ran),
        due - len(ran),
        Counter(run.replica for run in account.complete),
        account.takeovers,
        account.unfounded,
    )
