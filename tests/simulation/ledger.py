"""What the jobs themselves saw, and what must not be in it whatever happened on the way.

Nothing here knows how a claim is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

from tests.simulation.world import BEGIN, Process

# Seconds of the recovery grace in which a replica can be sure to have renewed what it holds.
GRACE = 2.0


@dataclass(eq=False)
class Run:
    """A run of a job, or a stretch of code under a hold.

    :ivar window: the run time, in seconds from the beginning; of a hold: who holds
    :ivar asked: when its claim was asked for, on the virtual clock
    :ivar began: likewise, as `ended`, which is ``None`` of one that never came to it
    :ivar lost: whether its lock was told to be lost when it ended
    """

    task: str
    window: Any
    process: Process
    asked: float
    began: float
    ended: float | None = None
    lost: bool = False

    @property
    def gone(self) -> float:
        """When it went on no longer."""
        killed_at = self.process.killed_at
        if self.ended is not None:
            return self.ended
        return inf if killed_at is None else killed_at

    def is_killed_by(self, at: float) -> bool:
        """Tell whether its replica was killed by then, so that nobody may know that it ended."""
        killed_at = self.process.killed_at
        return killed_at is not None and killed_at <= at

    def __str__(self) -> str:
        end = "" if self.ended is None else f"{self.ended - BEGIN:.1f}"
        lost = " (lost)" if self.lost else ""
        return (
            f"{self.task} {self.window} on {self.process.name} "
            f"{self.began - BEGIN:.1f}..{end}{lost}"
        )


@dataclass(eq=False)
class Question:
    """What somebody waits for.

    :ivar window: which it asks for, if it is a claim of one
    :ivar answer: ``None`` while there is none
    :ivar holder: of a refusal: who has it
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
    """A window that is to be run.

    :ivar processes: who would have run it
    """

    task: str
    window: Any
    processes: Sequence[Process]


@dataclass
class Ledger:
    """What was run, and what was asked."""

    runs: list[Run] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)


@dataclass(frozen=True)
class Promise:
    """What is promised of a scenario's tasks.

    :ivar lease: of their claims
    :ivar failover: the tasks whose windows are run again
    :ivar holds: the tasks that are held, and have no windows
    :ivar costly: whether what went wrong may cost a window that is not run again
    :ivar needless: whether nothing went wrong for which a claim has to fail
    :ivar hopeless: whether the database answered later than a lease for long
    :ivar own_in_the_way: whether a release could not arrive for long
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
    """Tell whether a run's replica could not know at that time that its lease had ended.

    It renews three times in a lease, so two thirds of it have to pass without a word. A step of the
    clock ends the lease, and then only the recovery grace is left to renew it in.
    """
    enough = promise.lease * 2 / 3 - 0.5
    if any(run.asked < step <= at for step in promise.steps_ahead):
        enough = min(enough, GRACE)
    return any(
        run.began < until
        and since + enough <= min(until, at)
        # In an outage nobody else is told that it may take over.
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
    found = []
    for window in {run.window for run in runs if run.task not in promise.holds}:
        of_window = [run for run in runs if run.window == window]
        if runs[0].task not in promise.failover and len(of_window) > 1:
            found.append(f"started twice: {of_window[0]} and {of_window[1]}")
        complete = [run for run in of_window if run.ended is not None]
        found += [
            f"run twice: {first} and {second}"
            for first, second in pairwise(complete)
            if not (first.is_killed_by(second.began) or out_of_touch(first, second.began, promise))
        ]
    return found


def _not_told(runs: Sequence[Run], promise: Promise) -> list[str]:
    """Return the runs that went on long after another one began, and did not hear of it."""
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
    """Tell whether each replica that is there was told in the end that its claim failed.

    If one was that ran a later window then, the others come too late with this one, also if that
    one was killed after it.
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
    """Return the refusals on account of a run of the same replica that had ended.

    Where the clock was set ahead while a claim was asked for, what it was granted first, without an
    answer, has ended by that. It is handed over, and in the way until somebody takes it over.
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
