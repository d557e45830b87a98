"""The ledger that the jobs write, and what is promised of it.

The judge is the demo's, and knows nothing of the rule by which claims are decided. Here is what
excuses a fault in the simulation, and what is judged of the requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from apscheduler_tasklock.demo import history
from apscheduler_tasklock.demo.judge import overlaps, repeats, unreported
from tests.simulation.world import BEGIN, Process

# Limits the seconds of the recovery grace within which a replica has renewed its claims for sure.
GRACE = 2.0


class Run(history.JudgedRun):
    """A run of a job, or a stretch of code under a hold. Times are on the virtual clock."""

    def __str__(self) -> str:
        end = "" if self.ended is None else f"{self.ended - BEGIN:.1f}"
        lost = " (lost)" if self.lost else ""
        attempt = "" if self.attempt == 1 else f" attempt {self.attempt}"
        began = f"{self.begun - BEGIN:.1f}"
        return f"{self.task} {self.due}{attempt} on {self.replica} {began}..{end}{lost}"


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

    def of(self, task: str) -> list[Run]:
        """Return the runs of a task, in the order in which they began."""
        return sorted((run for run in self.runs if run.task == task), key=lambda run: run.begun)


@dataclass(frozen=True)
class Promise:
    """The promises of a scenario's tasks.

    :ivar processes: the replicas, by their names
    :ivar lease: the lease of their claims
    :ivar failover: the tasks with failover
    :ivar holds: the tasks of holds, which have no windows
    :ivar costly: whether the faults may cost a window without failover
    :ivar needless: whether no fault is a reason for a claim to fail
    :ivar hopeless: whether the database answered later than a lease for a long time
    :ivar own_in_the_way: whether a release could not arrive for a long time
    :ivar steps_ahead: when the database's clock was set ahead by more than a lease
    """

    processes: Mapping[str, Process]
    lease: float
    failover: frozenset[str]
    holds: frozenset[str]
    costly: bool
    needless: bool
    hopeless: bool
    own_in_the_way: bool
    steps_ahead: Sequence[float] = ()


def violations(ledger: Ledger, wanted: Sequence[Wanted], promise: Promise) -> list[str]:
    """Return what is wrong with a ledger."""
    for run in ledger.runs:
        run.died = promise.processes[run.replica].killed_at
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
        found += _wrong_runs(task, ledger.of(task), promise)
    found += _never_run(ledger, wanted, promise)
    found += _own_in_the_way(ledger, promise)
    return found


def _wrong_runs(task: str, runs: Sequence[Run], promise: Promise) -> Iterator[str]:
    """Yield what is wrong with the runs of a task."""
    excuses = _Excuses(runs, promise)
    complete = [run for run in runs if run.ended is not None]
    pairs = {"overlap": overlaps(runs, excuses.out_of_touch)}
    if task not in promise.holds:
        pairs["run twice"] = repeats(complete, _is_same_attempt, excuses.ended_unknown)
        if task not in promise.failover:
            pairs["started twice"] = repeats(runs, _is_same_attempt, excuses.opened)
    for fault, found in pairs.items():
        for first, second in found:
            yield f"{fault}: {first} and {second}"
    yield from (
        f"not told that it was lost: {run}" for run in unreported(runs, excuses.reported_by)
    )
    yield from (f"never ended: {run}" for run in runs if run.over == inf)


def _is_same_attempt(first: Run, second: Run) -> bool:
    return (first.due, first.attempt) == (second.due, second.attempt)


@dataclass(frozen=True)
class _Excuses:
    """What excuses a run of a task, after an earlier one."""

    runs: Sequence[Run]
    promise: Promise

    def out_of_touch(self, first: Run, second: Run) -> bool:
        return out_of_touch(first, second.begun, self.promise)

    def opened(self, _first: Run, second: Run) -> bool:
        """Return whether the window was opened by then."""
        return any(
            each.opens and each.due == second.due and each.over <= second.begun
            for each in self.runs
        )

    def ended_unknown(self, first: Run, second: Run) -> bool:
        """Return whether the end of the first run may be unknown, or opened the window."""
        is_dead = first.is_dead(second.begun)
        return is_dead or self.out_of_touch(first, second) or self.opened(first, second)

    def reported_by(self, run: Run, other_begun: float) -> float:
        """Return by when a run knows that it was lost, because another one had begun."""
        process = self.promise.processes[run.replica]
        back = max((until for _, until in process.silent), default=-inf)
        return max(other_begun, back) + self.promise.lease / 2 + 4


def out_of_touch(run: Run, at: float, promise: Promise) -> bool:
    """Return whether a run's replica could not know at that time that its lease had ended.

    A replica renews three times in a lease, so it must have had no answer for two thirds of the
    lease. After a step of the clock only the recovery grace is left for a renewal.
    """
    process = promise.processes[run.replica]
    enough = promise.lease * 2 / 3 - 0.5
    if any(run.asked < step <= at for step in promise.steps_ahead):
        enough = min(enough, GRACE)
    return any(
        run.begun < until
        and since + enough <= min(until, at)
        # In an outage no other replica is granted a takeover.
        and any(first < until and since < last for first, last in process.out_of_touch)
        for since, until in process.silences
    )


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
    later = [run.replica for run in ledger.of(wanted.task) if run.due > wanted.window]
    has_failed_on = {process.name for process, has_failed in last.items() if has_failed}
    is_overtaken = any(failed) and bool(later)
    return all(failed) or is_overtaken or not has_failed_on.isdisjoint(later)


def _never_run(ledger: Ledger, wanted: Sequence[Wanted], promise: Promise) -> list[str]:
    found: list[str] = []
    for each in () if promise.hopeless else wanted:
        if all(process.is_dead for process in each.processes) or _has_failed(ledger, each):
            continue
        of_window = [run for run in ledger.of(each.task) if run.due == each.window]
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
        own = [run for run in ledger.of(each.task) if run.replica == each.process.name]
        if own and all(run.over < each.asked for run in own):
            found.append(
                f"its own run in the way: {each.what} {each.task} of {each.process.name} at "
                f"{each.asked - BEGIN:.1f}"
            )
    return found
