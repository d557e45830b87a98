"""The judgement: which windows ran twice, did not run, or were run again after a death."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from apscheduler_tasklock.demo.history import Event, JudgedRun, deaths, runs
from apscheduler_tasklock.demo.judge import gaps, repeats, takeovers

# Limits the seconds from the end of a run to its release.
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


@dataclass(frozen=True)
class Judgement:
    """The judgement on a task.

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


def judged(history: Sequence[Event], fires: Sequence[float], task: DemoTask) -> Judgement:
    """Judge one task.

    :param history: the ledger's events
    :param fires: the run times for which any replica asked for the lock, granted or refused
    :param task: the task
    """

    # Windows are told apart by their run times, which are one period apart and the same on all
    # replicas.
    def same(one: JudgedRun, other: JudgedRun) -> bool:
        return bool(abs(other.due - one.due) < task.period / 2)

    begun = runs(history, task.name)
    claimed = takeovers(begun, same, deaths(history).values(), RELEASE_TIME)
    founded = [each for each in claimed if each.is_founded]
    replaced = [each.dead for each in founded]
    complete = [run for run in begun if run.ended is not None and run not in replaced]
    doubled = repeats(complete, same)
    missed: list[float] = []
    if seen := [*fires, *(run.due for run in begun)]:
        served = (run.due for run in complete)
        since, until = min(seen) - task.period, max(seen) + task.period
        missed += gaps(served, since, until, lambda _due: task.period)
    return Judgement(
        task.name,
        len(complete),
        len(list(doubled)),
        len(missed),
        Counter(int(run.replica) for run in complete),
        [
            Takeover(
                task.name,
                each.run.due,
                None if each.dead is None else int(each.dead.replica),
                int(each.run.replica),
            )
            for each in founded
        ],
        len(claimed) - len(founded),
    )
