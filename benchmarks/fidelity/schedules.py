"""Jobs with APScheduler's own triggers, on replicas that deployments replace.

Two things are looked at, and what is counted is another thing than in the other traces:

- Deployments change the schedule. Old and new replicas live side by side for a while, and some
  deployments are taken back half-way. No run time of a schedule that all replicas have may be lost.
- Interval jobs count from the start of their replica, and replicas come and go. No more than 1.1
  periods and a poll may lie between two runs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._runs.trigger_times import has_shared_times, is_shared, period_after
from benchmarks.fidelity.clock import BEGINNING, moment, seconds
from benchmarks.fidelity.simulation import History, Run
from benchmarks.fidelity.trace import (
    HANDOVER,
    PERIODS,
    REPLICAS,
    ROLLOUT_KILLS,
    USUAL_LATENCY,
    USUAL_STAY,
    Conditions,
    Fire,
    Job,
    Life,
    Trace,
)

# Two runs serve one window if their run times are less than so many periods apart: the first limit
# is for runs of one schedule, the second for runs of any two.
SAME_WINDOW = 0.8
LEAST_GAP = 0.1
# The most periods between two runs of an interval job; and seconds beside them: the poll, and the
# wait of a fire for its worker.
LONGEST_GAP = 1.1
POLL = 5.0 + USUAL_LATENCY
# How long a job takes, in seconds.
DURATION = (5.0, 50.0)
# Periods from one deployment to the next; from one replica's turn to the next one's, in a quick
# deployment and in one whose versions live side by side; the share of the latter; and the share of
# deployments that are taken back half-way.
BETWEEN_DEPLOYMENTS = (3.0, 12.0)
QUICK_TURN = (0.0, 0.1)
LONG_TURN = (0.2, 1.5)
LONG_DEPLOYMENTS = 0.5
TAKEN_BACK = 0.3
# The share of deployments whose last replica is replaced a moment after a run time of the old
# schedule, so that its old version may still run that; and the seconds of that moment.
AT_A_RUN_TIME = 0.5
JUST_AFTER = 10.0
# Seconds after the last new replica's start until a deployment counts as complete.
SETTLING = 10.0


@dataclass(frozen=True)
class Move:
    """A job whose schedule deployments change.

    :ivar schedules: the schedules: fields of a cron trigger, or a period in seconds
    """

    name: str
    schedules: Sequence[Any] = field(hash=False)
    period: float


DAY = 86400.0
MOVES = (
    Move(
        "a daily cron job is moved earlier and later",
        [{"hour": hour} for hour in (6, 10, 11, 16, 22)],
        DAY,
    ),
    Move(
        "a cron job becomes more frequent and less",
        [{"hour": "*"}, {"hour": "*", "minute": "*/10"}, {"hour": 6}, {"hour": "*/6"}],
        DAY / 12,
    ),
    Move("an interval becomes shorter and longer", PERIODS, PERIODS[0]),
)


@dataclass(frozen=True)
class Step:
    """A deployment, or its taking back: replicas get another version, one after the other.

    :ivar turns: the time, the replica's number, and the number of its new version
    :ivar complete: whether all replicas have one version after the last turn
    """

    turns: Sequence[tuple[float, int, int]]
    complete: bool


class MovedSchedule(Trace):
    """Deployments that change a job's schedule."""

    def __init__(self, move: Move, windows: int, seed: int) -> None:
        super().__init__(Conditions(move.name), windows, seed)
        self.move = move
        self.steps = list(self._steps())
        self.end = self.steps[-1].turns[0][0]

    def window(self, time: float) -> int:
        """Return the number of the window that a time is in, for draws."""
        return math.floor(time)

    def fires(self, life: Life) -> Iterator[Fire]:
        """Yield the run times of a replica, also past its end: its scheduler plans them."""
        return fires_of(life)

    def lives(self) -> Iterator[Life]:
        """Yield every replica that is started."""
        turns = [turn for step in self.steps for turn in step.turns]
        for number in range(REPLICAS):
            own = [(at, version) for at, which, version in turns if which == number]
            draw = self._draw("lives", number)
            joined = 0.0
            for (_, version), (left, _) in pairwise(own):
                killed = draw.random() < ROLLOUT_KILLS
                yield self._version(number, version, joined, min(left, self.end), killed=killed)
                joined = max(joined + 1.0, left + draw.uniform(*HANDOVER))

    def job(self, window: int, attempt: int, period: float) -> Job:
        """Return what becomes of a run."""
        return Job(self._draw("job", window, attempt).uniform(*DURATION), None)

    def stretches(self) -> Iterator[tuple[float, float, Any]]:
        """Yield from when until when all replicas had one schedule, and a trigger that has it."""
        for step, following in pairwise(self.steps):
            if step.complete:
                last, _, version = step.turns[-1]
                begin = last + HANDOVER[1] + SETTLING
                end = following.turns[0][0] + HANDOVER[0]
                yield begin, end, self._trigger(version, begin)

    def _version(
        self, number: int, version: int, joined: float, left: float, *, killed: bool
    ) -> Life:
        trigger = self._trigger(version, joined)
        name = f"replica {number} of {joined:.0f} s"
        return Life(name, joined, left, self._period(version), None, 0.0, killed, trigger)

    def _trigger(self, version: int, joined: float) -> Any:
        return trigger_of(self.move.schedules[version], joined)

    def _period(self, version: int) -> float:
        schedule = self.move.schedules[version]
        return self.move.period if isinstance(schedule, dict) else schedule

    def _until_run(self, version: int, last: float) -> float:
        """Return the seconds from a replica's turn until a moment after the version's next run."""
        trigger = self._trigger(version, 0.0)
        run_time = trigger.get_next_fire_time(None, moment(last))
        return seconds(run_time) + JUST_AFTER - last

    def _steps(self) -> Iterator[Step]:
        draw = self._draw("steps")
        time, version = 0.0, 0
        yield Step([(time, number, version) for number in range(REPLICAS)], complete=True)
        while time < self.windows * self.move.period:
            others = [v for v in range(len(self.move.schedules)) if v != version]
            following = draw.choice(others)
            period = max(self._period(version), self._period(following))
            time += draw.uniform(*BETWEEN_DEPLOYMENTS) * period
            order = draw.sample(range(REPLICAS), REPLICAS)
            turn = LONG_TURN if draw.random() < LONG_DEPLOYMENTS else QUICK_TURN
            taken_back = draw.random() < TAKEN_BACK
            replaced = order[: draw.randint(1, REPLICAS - 1)] if taken_back else order
            for numbers, to in ((replaced, following), (replaced[::-1], version)):
                pauses = [61.0 + draw.uniform(*turn) * period for _ in numbers]
                if draw.random() < AT_A_RUN_TIME:
                    last = time + sum(pauses[:-1])
                    time += self._until_run(following if to == version else version, last)
                turns = [
                    (time + sum(pauses[:place]), number, to) for place, number in enumerate(numbers)
                ]
                time += sum(pauses)
                yield Step(turns, complete=to == version or not taken_back)
                if not taken_back:
                    version = following
                    break
        yield Step([(time, number, version) for number in range(REPLICAS)], complete=True)


@dataclass(frozen=True)
class Wander:
    """An interval job without a common start, and how its replicas come and go."""

    name: str
    conditions: Conditions


WANDERS = (
    Wander("rolling deployments", Conditions("rolling", offsets=True, rolling=True)),
    Wander("replicas come and go", Conditions("stay", offsets=True, stay=USUAL_STAY)),
    Wander(
        "deployments, killed holders, replicas that come and go",
        Conditions("all", offsets=True, rolling=True, stay=USUAL_STAY, killed=0.02),
    ),
)


class WanderingInterval(Trace):
    """An interval job that moves between replicas."""

    def __init__(self, wander: Wander, windows: int, seed: int) -> None:
        super().__init__(wander.conditions, windows, seed)

    def lives(self) -> Iterator[Life]:
        """Yield every replica that is started."""
        return map(self._scheduled, super().lives())

    def restarted(self, life: Life, died: float) -> Life:
        """Return the life that follows on that of a replica that was killed."""
        return self._scheduled(super().restarted(life, died))

    def fires(self, life: Life) -> Iterator[Fire]:
        """Yield the run times of a replica, also past its end: its scheduler plans them."""
        return fires_of(life)

    @staticmethod
    def _scheduled(life: Life) -> Life:
        return replace(life, trigger=trigger_of(life.period, life.joined))


def trigger_of(schedule: Any, joined: float) -> Any:
    """Return a job's trigger, as it is made on a replica that joins then."""
    if isinstance(schedule, dict):
        return CronTrigger(timezone=BEGINNING.tzinfo, **schedule)
    # One period after the replica's start, with microseconds as APScheduler's own default has.
    start = moment(math.floor(joined + schedule) + 0.123456)
    return IntervalTrigger(seconds=int(schedule), start_date=start, timezone=BEGINNING.tzinfo)


def fires_of(life: Life) -> Iterator[Fire]:
    """Yield the run times of a replica's trigger."""
    run_time = life.trigger.get_next_fire_time(None, moment(life.joined))
    while True:
        time, period = seconds(run_time), period_after(life.trigger, run_time)
        assert period is not None
        yield Fire(time, time, period, is_shared(life.trigger, run_time))
        run_time = life.trigger.get_next_fire_time(run_time, run_time)


@dataclass(frozen=True)
class ScheduleAccount:
    """How a rule did in a trace.

    :ivar windows: run times of stretches in which all replicas had one schedule; of an interval
        job, its periods in them
    :ivar runs: runs that were begun
    :ivar doubled: runs whose window another run has served
    :ivar missed: windows that nobody ran
    :ivar alarms: how often the job was reported as overdue
    :ivar longest: the most periods from the start of a run to that of the next
    """

    windows: int
    runs: int
    doubled: int
    missed: int
    alarms: int
    longest: float


def account_of_moves(trace: MovedSchedule, history: History) -> ScheduleAccount:
    """Count what went wrong while schedules changed."""
    runs = _begun(history.runs, trace.end)
    windows = missed = 0
    stretches = list(trace.stretches())
    for begin, end, trigger in stretches:
        if has_shared_times(trigger):
            due = list(_run_times(trigger, begin, end - SETTLING))
            windows += len(due)
            missed += sum(not _is_served(time, trigger, runs) for time in due)
        else:
            period = trigger.interval.total_seconds()
            windows += int((end - begin) / period)
            missed += sum(_lost(gap, period) for gap in _gaps(runs, begin, end))
    return ScheduleAccount(
        windows=windows,
        runs=len(runs),
        doubled=_doubled_by_moves([begin for begin, _, _ in stretches], trace.steps, runs),
        missed=missed,
        alarms=len(history.alarms),
        longest=_longest(runs),
    )


def account_of_wandering(trace: WanderingInterval, history: History) -> ScheduleAccount:
    """Count what went wrong while an interval job moved between replicas."""
    runs = _begun(history.runs, trace.end)
    [period] = {run.period for run in runs}
    return ScheduleAccount(
        windows=trace.windows,
        runs=len(runs),
        doubled=sum(_gap(*pair) < SAME_WINDOW * period for pair in pairwise(runs)),
        missed=sum(_lost(gap, period) for gap in _gaps(runs, 0.0, trace.end)),
        alarms=len(history.alarms),
        longest=_longest(runs),
    )


def _begun(runs: Sequence[Run], end: float) -> list[Run]:
    """Return the first run of each window."""
    first: list[Run] = []
    cut: set[float] = set()
    for run in runs:
        if run.due not in cut and run.begun < end:
            first.append(run)
        if run.ended is None:
            cut.add(run.due)
    return first


def _run_times(trigger: Any, begin: float, end: float) -> Iterator[float]:
    run_time = trigger.get_next_fire_time(None, moment(begin))
    while seconds(run_time) < end:
        yield seconds(run_time)
        run_time = trigger.get_next_fire_time(run_time, run_time)


def _is_served(time: float, trigger: Any, runs: Sequence[Run]) -> bool:
    """Tell whether a run time ran, or was too close to the run before."""
    period = period_after(trigger, moment(time))
    assert period is not None
    before = bisect_right(runs, time, key=lambda run: run.due)
    return before > 0 and time - runs[before - 1].due <= LEAST_GAP * period


def _gaps(runs: Sequence[Run], begin: float, end: float) -> list[float]:
    """Return the times without the start of a run."""
    inside = [run.begun for run in runs if begin < run.begun < end]
    return [later - earlier for earlier, later in pairwise([begin, *inside, end])]


def _lost(gap: float, period: float) -> int:
    """Return how many windows were lost in a time without the start of a run."""
    return max(0, math.ceil((gap - LONGEST_GAP * period - POLL) / period))


def _doubled_by_moves(stable: Sequence[float], steps: Sequence[Step], runs: Sequence[Run]) -> int:
    """Count runs that are too close to the one before.

    Each step may bring one run time of another schedule into a window of the one before.
    """
    begins = [step.turns[0][0] for step in steps]
    allowed = dict.fromkeys(range(len(steps)), 1)
    doubled = 0
    for earlier, later in pairwise(runs):
        period, gap = min(earlier.period, later.period), _gap(earlier, later)
        if gap >= SAME_WINDOW * period:
            continue
        step = bisect_right(begins, later.begun) - 1
        is_stable = bisect_right(stable, earlier.begun) == bisect_right(stable, later.begun)
        in_stretch = is_stable and bisect_right(stable, earlier.begun) == 1 + _of(step, steps)
        if gap < 0.9 * LEAST_GAP * period or in_stretch or not allowed[step]:
            doubled += 1
        else:
            allowed[step] -= 1
    return doubled


def _of(step: int, steps: Sequence[Step]) -> int:
    """Return the number of the stretch that begins with this step, or -2 if none does."""
    if not steps[step].complete:
        return -2
    return sum(one.complete for one in steps[:step])


def _gap(earlier: Run, later: Run) -> float:
    return float(later.due - earlier.due)


def _longest(runs: Sequence[Run]) -> float:
    return max(
        (later.begun - earlier.begun) / max(earlier.period, later.period)
        for earlier, later in pairwise(runs)
    )
