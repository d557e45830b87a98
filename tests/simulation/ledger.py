"""The ledger that the jobs write, and the check of it.

The check knows nothing of the rule by which claims are decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

from tests.simulation.world import BEGIN, Process

# Limits the seconds of the recovery grace within which a replica has renewed its claims for sure.
GRACE = 2.0


@dataclass(eq=False)
class Run:
    """A run of a job, or a stretch of code under a hold.

    :ivar window: the run time, in seconds from the beginning; for a hold: its holder
    :ivar asked: when its claim was asked for, on the virtual clock
    :ivar began: when the run began, on the virtual clock
    :ivar ended: when the run ended, on the virtual clock, or ``None``
    :ivar lost: whether its lock was reported as lost when it ended
    :ivar attempt: which attempt at its run time it is
    :ivar failed: whether its job has raised an exception
    :ivar opens: whether its end opens its window, so that its run time may be run anew
    """

    task: str
    window: Any
    process: Process
    asked: float
    began: float
    ended: float | None = None
    lost: bool = False
    attempt: int = 1
    failed: bool = False
    opens: bool = False

    @property
    def gone(self) -> float:
        """When the run ended or its replica was killed; ``inf``: neither."""
        killed_at = self.process.killed_at
        if self.ended is not None:
            return self.ended
        return inf if killed_at is None else killed_at

    def is_killed_by(self, at: float) -> bool:
        """Return whether the replica was killed by then, so that its release may be missing."""
        killed_at = self.process.killed_at
        return killed_at is not None and killed_at <= at

    def __str__(self) -> str:
        end = "" if self.ended is None else f"{self.ended - BEGIN:.1f}"
        lost = " (lost)" if self.lost else ""
        attempt = "" if self.attempt == 1 else f" attempt {self.attempt}"
        return (
            f"{self.task} {self.window}{attempt} on {self.process.name} "
            f"{self.began - BEGIN:.1f}..{end}{lost}"
        )


@dataclass(eq=False)
class Question:
    """A request of a replica, and its answer.

    :ivar window: the window that a claim asks for, or ``None``
    :ivar answer: the answer; ``None`` while there is none
    :ivar holder: the holder that a refusal names
    """

    task: str
    what: str
    process: Process
    asked: float
    window: object = None
    answer: str | None = None
    answered: float = inf
    holder: str | None = None


@dataclass(frozen=True)
class Wanted:
    """A window that must be run.

    :ivar processes: the replicas that would have run it
    """

    task: str
    window: Any
    processes: Sequence[Process]


@dataclass
class Ledger:
    """The runs and the requests."""

    runs: list[Run] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)


@dataclass(frozen=True)
class Promise:
    """The promises of a scenario's tasks.

    :ivar lease: the lease of their claims
    :ivar failover: the tasks with failover
    :ivar holds: the tasks of holds, which have no windows
    :ivar costly: whether the faults may cost a window without failover
    :ivar needless: whether no fault is a reason for a claim to fail
    :ivar hopeless: whether the database answered later than a lease for a long time
    :ivar own_in_the_way: whether a release could not arrive for a long time
    :ivar steps_ahead: when the database's clock was set ahead by more than a lease
    """

    lease: float
    failover: frozenset[str]
    holds: frozenset[str]
    costly: bool
    needless: bool
    hopeless: bool
    own_in_the_way: bool
    steps_ahead: Sequence[float] = ()


def violations(
    ledger: Ledger, wanted: Sequence[Wanted], promise: Promise, until: float
) -> list[str]:
    """Return what is wrong with a ledger."""
    found = [
        f"no answer to {each.what} {each.task} of {each.process.name}"
        for each in ledger.questions
        if each.answer is None and not each.process.is_dead
    ]
    if promise.needless:
        found += [
            f"needlessly {each.answer}: {each.what} {each.task} of {each.process.name}"
            for each in ledger.questions
            if each.what not in {"release", "look"} and str(each.answer)[:6] == "failed"
        ]
    for task in {run.task for run in ledger.runs}:
        runs = sorted((run for run in ledger.runs if run.task == task), key=lambda run: run.began)
        found += _overlaps(runs, promise)
        found += _doubles(runs, promise)
    found += _not_told(ledger.runs, promise)
    found += _never_run(ledger, wanted, promise)
    found += _own_in_the_way(ledger, promise)
    found += [
        f"never ended: {run}"
        for run in ledger.runs
        if run.ended is None and not run.process.is_dead
    ]
    return found


def out_of_touch(run: Run, at: float, promise: Promise) -> bool:
    """Return whether a run's replica could not know at that time that its lease had ended.

    A replica renews three times in a lease, so it must have had no answer for two thirds of the
    lease. After a step of the clock only the recovery grace is left for a renewal.
    """
    enough = promise.lease * 2 / 3 - 0.5
    if any(run.asked < step <= at for step in promise.steps_ahead):
        enough = min(enough, GRACE)
    return any(
        run.began < until
        and since + enough <= min(until, at)
        # In an outage no other replica is granted a takeover.
        and any(first < until and since < last for first, last in run.process.out_of_touch)
        for since, until in run.process.silences
    )


def _overlaps(runs: Sequence[Run], promise: Promise) -> list[str]:
    return [
        f"overlap: {first} and {second}"
        for n, first in enumerate(runs)
        for second in runs[n + 1 :]
        if second.began < first.gone and not out_of_touch(first, second.began, promise)
    ]


def _doubles(runs: Sequence[Run], promise: Promise) -> list[str]:
    """Return the attempts at a run time that were begun or ended twice."""
    found = []
    of_windows = [run for run in runs if run.task not in promise.holds]
    for window, attempt in {(run.window, run.attempt): None for run in of_windows}:
        of_window = [run for run in runs if (run.window, run.attempt) == (window, attempt)]
        anew = [run for run in of_window if _is_begun_anew(run, runs)]
        if runs[0].task not in promise.failover:
            found += [
                f"started twice: {first} and {second}"
                for first, second in pairwise(of_window)
                if second not in anew
            ]
        complete = [run for run in of_window if run.ended is not None]
        found += [
            f"run twice: {first} and {second}"
            for first, second in pairwise(complete)
            if second not in anew
            and not (first.is_killed_by(second.began) or out_of_touch(first, second.began, promise))
        ]
    return found


def _is_begun_anew(run: Run, runs: Sequence[Run]) -> bool:
    """Return whether the window of a run was opened before it."""
    return any(each.opens and each.window == run.window and each.gone <= run.began for each in runs)


def _not_told(runs: Sequence[Run], promise: Promise) -> list[str]:
    """Return the runs that went on long after another run began, and whose loss was unreported."""
    found = []
    for first in runs:
        later = [
            run.began
            for run in runs
            if run.task == first.task and run is not first and first.began < run.began < first.gone
        ]
        if not later or first.ended is None:
            continue
        back = max((until for _, until in first.process.silent), default=-inf)
        heard_by = max(min(later), back) + promise.lease / 2 + 4
        if first.ended > heard_by and not first.lost:
            found.append(f"not told that it was lost: {first}")
    return found


def _has_failed(ledger: Ledger, wanted: Wanted) -> bool:
    """Return whether failed claims explain that a window was not run.

    Either the last claim of each live replica failed. Or a claim failed and a later window was run,
    after which the other replicas' claims come too late.
    """
    last = {
        each.process: (each.answer or "").startswith("failed")
        for each in ledger.questions
        if (each.task, each.window) == (wanted.task, wanted.window)
        and each.process in wanted.processes
    }
    failed = [has_failed for process, has_failed in last.items() if not process.is_dead]
    later = [
        run.process for run in ledger.runs if run.task == wanted.task and run.window > wanted.window
    ]
    is_overtaken = any(failed) and bool(later)
    return all(failed) or is_overtaken or any(last.get(process) for process in later)


def _never_run(ledger: Ledger, wanted: Sequence[Wanted], promise: Promise) -> list[str]:
    found: list[str] = []
    for each in () if promise.hopeless else wanted:
        if all(process.is_dead for process in each.processes) or _has_failed(ledger, each):
            continue
        of_window = [
            run for run in ledger.runs if (run.task, run.window) == (each.task, each.window)
        ]
        is_complete = any(run.ended is not None for run in of_window)
        if each.task in promise.failover:
            is_missing = not is_complete
        else:
            is_missing = not of_window and not promise.costly
        if is_missing:
            found.append(f"never run: {each.task} {each.window}")
    return found


def _own_in_the_way(ledger: Ledger, promise: Promise) -> list[str]:
    """Return the refusals because of a run of the same replica that had ended.

    Exempt is a claim during which the clock was set ahead: its first grant, whose answer was lost,
    has expired by the step. It is handed over, and blocks the task until a takeover.
    """
    if promise.own_in_the_way:
        return []
    found = []
    for each in ledger.questions:
        if each.answer != "running" or each.holder != each.process.name:
            continue
        if any(each.asked <= step <= each.answered for step in promise.steps_ahead):
            continue
        own = [run for run in ledger.runs if (run.task, run.process) == (each.task, each.process)]
        if own and all(run.gone < each.asked for run in own):
            found.append(
                f"its own run in the way: {each.what} {each.task} of {each.process.name} at "
                f"{each.asked - BEGIN:.1f}"
            )
    return found
