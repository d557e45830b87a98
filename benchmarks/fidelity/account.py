"""Counts of a history: windows run twice, windows lost, runs that overlap, and silence."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

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
    ended = sorted((run for run in history.runs if run.ended), key=_run_time)
    lost = list(_lost_with_holder(history, ended))
    fates = Counter(_fates(trace, history, sorted([*ended, *lost], key=_run_time)))
    return Account(
        windows=trace.windows,
        runs=len(ended),
        doubled=sum(_serve_one_window(*pair) for pair in pairwise(ended)),
        # Without a run that is cut short at the very end, because no replica is left to repeat it.
        lost_with_holder=sum(run.end + run.period < trace.end for run in lost),
        missed=fates["missed"],
        skipped=fates["skipped"],
        unattended=fates["unattended"],
        overlapping=_overlapping(history.runs),
        silence=_silence(ended),
        latest=_latest(history.runs),
        overtaken=fates["overtaken"],
    )


def account_by_run_time(history: History, run_times: Sequence[float]) -> Account:
    """Count what went wrong with a schedule whose run times each are a window."""
    ended = [run for run in history.runs if run.ended]
    served = Counter(run.run_time for run in ended)
    cut = {run.run_time for run in history.runs if not run.ended}
    busy = _Busy(history.runs)
    asked: dict[float, list[float]] = {time: [] for time in run_times}
    for run_time, at in history.asked:
        asked[run_time].append(at)
    fates: Counter[str] = Counter()
    for run_time in run_times:
        if run_time in served:
            continue
        if run_time in cut:
            fates["lost"] += 1
        else:
            in_time = [busy.at(at) for at in asked[run_time] if busy.latest_at(at) <= run_time]
            if not all(in_time):
                fates["missed"] += 1
            elif in_time:
                fates["skipped"] += 1
            else:
                fates["overtaken" if asked[run_time] else "unattended"] += 1
    return Account(
        windows=len(run_times),
        runs=len(ended),
        doubled=len(ended) - len(served),
        lost_with_holder=fates["lost"],
        missed=fates["missed"],
        skipped=fates["skipped"],
        unattended=fates["unattended"],
        overlapping=_overlapping(history.runs),
        silence=_silence(ended),
        latest=_latest(history.runs),
        overtaken=fates["overtaken"],
    )


def _run_time(run: Run) -> float:
    return run.run_time


def _serve_one_window(earlier: Run, later: Run) -> bool:
    period = min(earlier.period, later.period)
    return later.run_time - earlier.run_time < SAME_WINDOW * period


def _lost_with_holder(history: History, ended: Sequence[Run]) -> Iterator[Run]:
    """Yield the first run of each window whose runs were all cut short."""
    last: Run | None = None
    for run in sorted((run for run in history.runs if not run.ended), key=_run_time):
        place = bisect_left(ended, run.run_time, key=_run_time)
        before, after = ended[max(0, place - 1) : place], ended[place : place + 1]
        served = [(other, run) for other in before] + [(run, other) for other in after]
        if last is not None:
            served.append((last, run))
        if not any(_serve_one_window(*pair) for pair in served):
            last = run
            yield run


def _fates(trace: Trace, history: History, started: Sequence[Run]) -> Iterator[str]:
    """Yield the fate of each window that nobody ran."""
    busy = _Busy(history.runs)
    for due in _not_run(trace, started):
        asked = _asked_in_time(trace, history, due)
        next_run = due + NEXT_WINDOW * trace.period(due)
        in_time = [busy.at(at) for at in asked if busy.latest_at(at) < next_run]
        if not all(in_time):
            yield "missed"
        elif in_time or busy.at(due):
            yield "skipped"
        else:
            yield "overtaken" if asked else "unattended"


def _not_run(trace: Trace, started: Sequence[Run]) -> Iterator[float]:
    """Yield when the windows were due that nobody ran."""
    bounds = [0.0, *(run.run_time for run in started), trace.end]
    for last, following in pairwise(bounds):
        due = last + trace.period(last)
        while due + NEXT_WINDOW * trace.period(due) <= following:
            yield due
            due += trace.period(due)


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


class _Busy:
    """The times at which the job ran somewhere."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._starts = [run.start for run in runs]
        self._ends = list(accumulate((run.end for run in runs), max))
        self._latest = list(accumulate((run.run_time for run in runs), max))

    def at(self, time: float) -> bool:
        """Tell whether a run was going on that had started before."""
        begun = bisect_left(self._starts, time)
        return begun > 0 and self._ends[begun - 1] > time

    def latest_at(self, time: float) -> float:
        """Return the latest run time of the runs that had started before."""
        begun = bisect_left(self._starts, time)
        return self._latest[begun - 1] if begun else -inf


def _overlapping(runs: Sequence[Run]) -> int:
    ends = accumulate((run.end for run in runs), max)
    return sum(later.start < end for end, (_, later) in zip(ends, pairwise(runs), strict=False))


def _silence(ended: Sequence[Run]) -> float:
    runs = sorted(ended, key=lambda run: run.start)
    ends = accumulate((run.end for run in runs), max)
    return max(
        (later.start - end) / max(earlier.period, later.period)
        for end, (earlier, later) in zip(ends, pairwise(runs), strict=False)
    )


def _latest(runs: Sequence[Run]) -> float:
    begun: dict[float, float] = {}
    for run in runs:  # in the order of their starts, so that takeovers do not count
        # Rounded, because a replica whose clock is off computes a rounding error along.
        begun.setdefault(round(run.run_time, 3), run.start)
    return max(start - run_time for run_time, start in begun.items())
