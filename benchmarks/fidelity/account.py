"""Counts of a history: windows run twice, windows lost, runs that overlap, and silence."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf, nextafter
from typing import Any

from apscheduler_tasklock.demo.judge import gaps, overlaps, repeats
from benchmarks.fidelity.simulation import History, Run
from benchmarks.fidelity.trace import Trace

# Two runs serve one window if their run times are less than so many periods apart. A rule may move
# the job from a replica to one that fires a little earlier, but not twice in a period.
SAME_WINDOW = 0.8
# The fewest periods from one run time to the next, by the minimum lock. No window is lost within
# 1.9 periods, because if a replica leaves that fires late in the period, one that fires early may
# have its next run time only then.
NEXT_WINDOW = 0.9


@dataclass(frozen=True)
class Account:
    """How a rule did in a trace.

    :ivar windows: number of windows
    :ivar runs: runs that came to their end
    :ivar doubled: runs of a window that another run had served, whose holder did not die
    :ivar lost_with_holder: windows whose run was cut short, since its replica was killed or
        stopped, and that nobody ran again
    :ivar missed: other windows that nobody ran, although a worker asked for them before the next
        one was due, while no run was going on
    :ivar overtaken: windows that nobody asked for until a later one ran, as on a replica whose
        clock is ahead
    :ivar skipped: windows that were due or asked for only while a run was going on, as
        ``max_instances`` skips them on one replica
    :ivar unattended: windows that no worker asked for in time, on any replica
    :ivar overlapping: runs that began while another one was going on
    :ivar silence: longest time from the end of a run to the start of the next, in periods
    :ivar latest: longest time from a window's run time to its first run, in seconds
    """

    windows: int
    runs: int
    doubled: int
    lost_with_holder: int
    missed: int
    skipped: int
    unattended: int
    overlapping: int
    silence: float
    latest: float
    overtaken: int = 0


def account(trace: Trace, history: History) -> Account:
    """Count what went wrong."""
    ended = sorted((run for run in history.runs if run.ended is not None), key=_due)
    lost = list(_lost_with_holder(history, ended))
    served = [run.due for run in [*ended, *lost]]
    going = _Going(history.runs)
    fates = Counter(
        _fate(
            _asked_in_time(trace, history, due), going, due + NEXT_WINDOW * trace.period(due), due
        )
        for due in gaps(served, 0.0, trace.end, trace.period, NEXT_WINDOW)
    )
    # Without a run that is cut short at the very end, because no replica is left to repeat it.
    fates["lost"] = sum(run.over + run.period < trace.end for run in lost)
    doubled = list(repeats(ended, _serve_one_window))
    return _account(trace.windows, history, ended, len(doubled), fates)


def account_by_run_time(history: History, run_times: Sequence[float]) -> Account:
    """Count what went wrong with a schedule whose run times each are a window."""
    ended = [run for run in history.runs if run.ended is not None]
    begun, served = {run.due for run in history.runs}, {run.due for run in ended}
    asked: dict[float, list[float]] = {due: [] for due in run_times}
    for due, at in history.asked:
        asked[due].append(at)
    going = _Going(history.runs)
    fates = Counter(
        "lost" if due in begun else _fate(asked[due], going, following=nextafter(due, inf))
        for due in run_times
        if due not in served
    )
    return _account(len(run_times), history, ended, len(ended) - len(served), fates)


class _Going:
    """The times at which a task's runs went on.

    :param runs: the runs, in the order in which they began
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._begun = [run.begun for run in runs]
        self._over = list(accumulate((run.over for run in runs), max))
        self._latest: list[Any] = list(accumulate((run.due for run in runs), max))

    def on_at(self, time: float) -> bool:
        """Return whether a run went on that had begun before."""
        number = bisect_left(self._begun, time)
        return number > 0 and self._over[number - 1] > time

    def latest_at(self, time: float) -> float:
        """Return the latest run time of the runs that had begun before."""
        number = bisect_left(self._begun, time)
        return float(self._latest[number - 1]) if number else -inf


def _fate(asked: Sequence[float], going: _Going, following: float, due: float | None = None) -> str:
    """Return why nobody ran a window.

    - ``missed``: a replica asked for it in time while no run went on
    - ``skipped``: replicas asked for it in time, or it was due, only while a run went on
    - ``overtaken``: nobody asked for it until a later window ran
    - ``unattended``: nobody asked for it

    :param asked: when replicas asked for it
    :param following: the earliest run time of a later window
    :param due: when it was due; ``None`` if that is no reason
    """
    was_going_on = [going.on_at(at) for at in asked if going.latest_at(at) < following]
    if not all(was_going_on):
        return "missed"
    if was_going_on or (due is not None and going.on_at(due)):
        return "skipped"
    return "overtaken" if asked else "unattended"


def _account(
    windows: int, history: History, ended: Sequence[Run], doubled: int, fates: Counter[str]
) -> Account:
    return Account(
        windows=windows,
        runs=len(ended),
        doubled=doubled,
        lost_with_holder=fates["lost"],
        missed=fates["missed"],
        skipped=fates["skipped"],
        unattended=fates["unattended"],
        overlapping=len(list(overlaps(history.runs))),
        silence=_silence(ended),
        latest=_latest(history.runs),
        overtaken=fates["overtaken"],
    )


def _due(run: Run) -> float:
    return float(run.due)


def _serve_one_window(earlier: Run, later: Run) -> bool:
    period = min(earlier.period, later.period)
    return bool(later.due - earlier.due < SAME_WINDOW * period)


def _lost_with_holder(history: History, ended: Sequence[Run]) -> Iterator[Run]:
    """Yield the first run of each window whose runs were all cut short."""
    last: Run | None = None
    for run in sorted((run for run in history.runs if run.ended is None), key=_due):
        place = bisect_left(ended, run.due, key=_due)
        before, after = ended[max(0, place - 1) : place], ended[place : place + 1]
        served = [(other, run) for other in before] + [(run, other) for other in after]
        if last is not None:
            served.append((last, run))
        if not any(_serve_one_window(*pair) for pair in served):
            last = run
            yield run


def _asked_in_time(trace: Trace, history: History, due: float) -> list[float]:
    """Return when workers asked for a window before the next one was due."""
    period = trace.period(due)
    earliest = due - (1 - NEXT_WINDOW) * period
    return [
        at
        for run_time, at in history.asked
        # Where clocks are behind, the run times that all share come later.
        if earliest <= run_time < due + NEXT_WINDOW * period
        and at < due + period + trace.conditions.skew
    ]


def _silence(ended: Sequence[Run]) -> float:
    runs = sorted(ended, key=lambda run: run.begun)
    ends = accumulate((run.over for run in runs), max)
    return max(
        (later.begun - end) / max(earlier.period, later.period)
        for end, (earlier, later) in zip(ends, pairwise(runs), strict=False)
    )


def _latest(runs: Sequence[Run]) -> float:
    begun: dict[float, float] = {}
    for run in runs:  # in the order of their starts, so that takeovers do not count
        # Rounded, because a replica whose clock is off computes a rounding error along.
        begun.setdefault(round(run.due, 3), run.begun)
    return max(start - run_time for run_time, start in begun.items())
