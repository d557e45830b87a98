"""The judge: finds in a history what must not have happened.

It asks the same questions of every history: did two runs of a task overlap, was a window run twice,
was a window lost, was a run believed dead that was not, did a token go back. It knows nothing of
the rule by which claims are decided. What excuses a fault differs between histories, so it is an
argument: a function of the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TypeVar

from apscheduler_tasklock.demo.history import JudgedRun

T = TypeVar("T")
AnyRun = TypeVar("AnyRun", bound=JudgedRun)

# Tells of a run, and of a later one, whether the later one is excused.
Excuse = Callable[[AnyRun, AnyRun], bool]


@dataclass(frozen=True)
class Breach:
    """Something that must not have happened.

    :ivar fault: the kind of fault
    :ivar at: when, by the clock of the history
    :ivar text: which runs, and when
    """

    fault: str
    task: str
    at: float
    text: str

    def __str__(self) -> str:
        where = f"{self.task}: " if self.task else ""
        return f"{self.fault} at {self.at:.3f}: {where}{self.text}"


def never(_earlier: JudgedRun, _later: JudgedRun) -> bool:
    """Excuse nothing."""
    return False


# ---- did runs overlap? ---------------------------------------------------------------------------


def overlaps(
    runs: Iterable[AnyRun],
    excuse: Excuse[AnyRun] = never,
    until: Callable[[AnyRun], float] = lambda run: run.over,
) -> Iterator[tuple[AnyRun, AnyRun]]:
    """Yield each run that began while another one went on, after the other one.

    :param runs: the runs, in the order in which they began
    :param until: returns until when a run went on, or believed that it did
    """
    going_on: list[AnyRun] = []
    for later in runs:
        going_on = [run for run in going_on if until(run) > later.begun]
        for earlier in going_on:
            if not excuse(earlier, later):
                yield earlier, later
                break
        going_on.append(later)


def unreported(
    runs: Sequence[AnyRun], reported_by: Callable[[AnyRun, float], float]
) -> Iterator[AnyRun]:
    """Yield each run that ended long after another run began, and did not know that it was lost.

    :param reported_by: returns by when a run has to know it, if another one began at a time
    """
    for run in runs:
        if run.ended is None or run.lost:
            continue
        others = [other.begun for other in runs if run.begun < other.begun < run.ended]
        if others and run.ended > reported_by(run, min(others)):
            yield run


# ---- was a window run twice? ---------------------------------------------------------------------


def windows(runs: Iterable[AnyRun], same: Callable[[AnyRun, AnyRun], bool]) -> list[list[AnyRun]]:
    """Return the runs of each window, in the order of their tokens; the windows in their order.

    :param same: tells whether two runs, in the order of their run times, serve one window
    """
    found: list[list[AnyRun]] = []
    for run in sorted(runs, key=lambda run: (run.due, run.attempt, run.begun)):
        if found and same(found[-1][-1], run):
            found[-1].append(run)
        else:
            found.append([run])
    return [sorted(window, key=lambda run: (run.token, run.begun)) for window in found]


def repeats(
    runs: Iterable[AnyRun],
    same: Callable[[AnyRun, AnyRun], bool],
    excuse: Excuse[AnyRun] = never,
) -> Iterator[tuple[AnyRun, AnyRun]]:
    """Yield each run of a window that another run had served, after the other one.

    :param runs: the runs that count: those that ended, or all where each may begin only once
    """
    for window in windows(runs, same):
        for earlier, later in pairwise(window):
            if not excuse(earlier, later):
                yield earlier, later


@dataclass(frozen=True)
class TakeoverOf:
    """A run that said that it takes a dead run over.

    :ivar run: the takeover
    :ivar dead: the run before it; ``None`` if its holder died between its claim and its run
    :ivar is_founded: whether the holder of the run before it had been killed
    """

    run: JudgedRun
    dead: JudgedRun | None
    is_founded: bool


def takeovers(
    runs: Sequence[JudgedRun],
    same: Callable[[JudgedRun, JudgedRun], bool],
    killed: Iterable[float],
    release: float = inf,
) -> list[TakeoverOf]:
    """Return a task's takeovers, in the order of their tokens.

    A takeover follows the run before it. If no run before it is of its window, the claim that it
    follows has no run, because its holder died in between.

    :param same: as in :func:`windows`
    :param killed: when replicas were killed
    :param release: the longest time from the end of a run to its release, in seconds. If a replica
        is killed in between, its run has ended, and the task's row does not show this: another
        replica rightly runs the window again.
    """
    found = []
    before: list[JudgedRun] = []
    for run in sorted(runs, key=lambda run: run.token):
        dead = before[-1] if any(same(earlier, run) for earlier in before) else None
        before.append(run)
        if not run.takeover:
            continue
        if dead is None:
            is_founded = any(at <= run.begun for at in killed)
        else:
            is_founded = dead.is_dead(run.begun, release)
        found.append(TakeoverOf(run, dead, is_founded))
    return found


# ---- did a token go back? ------------------------------------------------------------------------


def went_back(tokens: Iterable[tuple[int, T]]) -> Iterator[tuple[T, T]]:
    """Yield who came with a token that does not grow, after who had the newest one before."""
    newest: tuple[int, T] | None = None
    for token, who in tokens:
        if newest is None or token > newest[0]:
            newest = token, who
        else:
            yield newest[1], who


# ---- was a window lost? --------------------------------------------------------------------------


def gaps(
    served: Iterable[float],
    since: float,
    until: float,
    period: Callable[[float], float],
    share: float = 0.9,
) -> Iterator[float]:
    """Yield when the windows were due that nobody ran.

    :param served: the run times that ran
    :param since: a run time before the first window
    :param until: a run time after the last window
    :param period: returns the time from a run time to the next
    :param share: the least part of a period from one window to the next
    """
    for last, following in pairwise([since, *sorted(served), until]):
        due = last + period(last)
        while due + share * period(due) <= following:
            yield due
            due += period(due)
