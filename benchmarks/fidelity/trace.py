"""Traces: the events and faults of replicas, the same for every rule, and repeated by a seed.

Times are seconds since the beginning, by the database's clock. A draw belongs to what it is about
(this fire of that replica, that run of this window) and not to when it is asked for, so that two
rules that run different jobs still meet the same luck.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from apscheduler_tasklock._runs.submission import Submission

PERIODS = (300.0, 120.0, 600.0)
REPLICAS = 3

# Seconds until a fire reaches its worker; and periods, if the pool is starved.
USUAL_LATENCY = 2.0
MOST_PERIODS_LATE = 3.0
# Periods that a job takes, at least and at most.
USUAL_DURATION = (0.02, 0.5)
LONG_DURATION = (1.1, 2.5)
# Seconds until a killed replica is there again, and until a deployed one is.
RESTART = (20.0, 180.0)
DEPLOYED_WITHIN = 60.0
# Periods for which a replica stays, if replicas join and leave; and if stops are frequent.
USUAL_STAY = (5.0, 60.0)
SHORT_STAY = (1.0, 10.0)
# Rolling deployments: periods between two of them, seconds from one replica's turn to the next
# one's, seconds from the end of an old replica to the start of the new one, which is also there
# before it, and the share of the old ones that are killed rather than stopped.
BETWEEN_ROLLOUTS = (3.0, 20.0)
TURN = (15.0, 90.0)
HANDOVER = (-30.0, 30.0)
ROLLOUT_KILLS = 0.3


@dataclass(frozen=True)
class Conditions:
    """What goes wrong in a trace.

    :ivar offsets: replicas count the interval from their own starts, rather than sharing the
        run times of a cron expression
    :ivar skew: seconds by which their clocks are off, at most
    :ivar starved: share of the fires that reach a worker up to three periods late
    :ivar killed: share of the runs whose replica is killed in the middle
    :ivar long: share of the runs that take longer than a period
    :ivar stay: for how many periods replicas stay, at least and at most; ``None``: for ever
    :ivar rolling: whether replicas are replaced in turn, every so often
    :ivar coroutines: whether jobs are coroutines, which a graceful stop cuts, rather than threads,
        which it waits for
    :ivar deployments: whether deployments change the period
    """

    name: str
    offsets: bool = False
    skew: float = 0.0
    starved: float = 0.0
    killed: float = 0.0
    long: float = 0.0
    stay: tuple[float, float] | None = None
    rolling: bool = False
    coroutines: bool = False
    deployments: bool = False


TRACES = (
    Conditions("replicas at an offset", offsets=True),
    Conditions("clocks off by up to 3 minutes", skew=180),
    Conditions("starved pools", starved=0.05),
    Conditions("holders killed", killed=0.02),
    Conditions("starved and killed", starved=0.05, killed=0.02),
    Conditions("runs longer than a period", long=0.05),
    Conditions("replicas join and leave", stay=USUAL_STAY),
    Conditions("rolling deployments", rolling=True),
    Conditions("rolling deployments at an offset", offsets=True, rolling=True, killed=0.02),
    Conditions("graceful stops", coroutines=True, stay=SHORT_STAY),
    Conditions("periods changed", deployments=True),
    Conditions(
        "all of this, run times shared",
        skew=180,
        starved=0.05,
        killed=0.02,
        long=0.05,
        stay=USUAL_STAY,
        rolling=True,
        deployments=True,
    ),
    Conditions(
        "all of this, at an offset",
        offsets=True,
        starved=0.05,
        killed=0.02,
        long=0.05,
        stay=USUAL_STAY,
        rolling=True,
        coroutines=True,
        deployments=True,
    ),
)


@dataclass(frozen=True)
class Fire:
    """One run time of the job on one replica.

    :ivar time: when it is due there, by a clock that is right
    :ivar run_time: what it stands for: where replicas share their run times, the time that all of
        them mean by it; else the same as ``time``
    :ivar period: seconds until the next one
    :ivar exact: whether all replicas compute the same run times
    :ivar submission: its submission, if the executor is the library's own
    """

    time: float
    run_time: float
    period: float
    exact: bool
    submission: Submission | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Life:
    """A replica from its start to its end.

    :ivar joined: when it started
    :ivar left: when it is shut down
    :ivar period: the job's period, in the version that it runs
    :ivar phase: seconds from its start to the first run time, if it counts from there
    :ivar skew: seconds by which its clock is ahead
    :ivar killed: whether it is killed when its time is over, rather than stopped
    :ivar trigger: the job's, where it is APScheduler's own
    """

    name: str
    joined: float
    left: float
    period: float
    phase: float | None
    skew: float
    killed: bool = False
    trigger: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Job:
    """One run of the job.

    :ivar duration: seconds that it takes
    :ivar dies_after: seconds after which its replica is killed, or ``None``
    """

    duration: float
    dies_after: float | None


@dataclass(frozen=True)
class _Turn:
    """One replica's turn in a rolling deployment.

    :ivar pause: seconds until the new one starts; below 0, it has started before
    :ivar kills: whether the old one is killed
    """

    time: float
    pause: float
    kills: bool


class Trace:
    """The luck of the replicas during so many windows."""

    def __init__(self, conditions: Conditions, windows: int, seed: int) -> None:
        self.conditions = conditions
        self.windows = windows
        self._seed = seed
        self._stretches = list(self._deployments())
        self._begins = [begin for begin, _ in self._stretches]
        lengths = zip(self._begins, [*self._begins[1:], math.inf], strict=True)
        counts = [
            (end - begin) / period
            for (begin, end), (_, period) in zip(lengths, self._stretches, strict=True)
        ]
        self._windows_before = [0.0, *accumulate(counts)]
        last, period = self._stretches[-1]
        self.end = last + (windows - self._windows_before[len(counts) - 1]) * period

    def clock_ahead(self, time: float) -> float:
        """Return the seconds by which the database's clock is ahead at a time."""
        return 0.0

    def period(self, time: float) -> float:
        """Return the job's period at a time."""
        return self._stretches[max(0, bisect_right(self._begins, time) - 1)][1]

    def window(self, time: float) -> int:
        """Return the number of the period that a time is in."""
        stretch = max(0, bisect_right(self._begins, time) - 1)
        begin, period = self._stretches[stretch]
        return math.floor(self._windows_before[stretch] + (time - begin) / period)

    def fires(self, life: Life) -> Iterator[Fire]:
        """Yield the run times of a replica."""
        if life.phase is not None:
            time = life.joined + life.phase
        else:
            # The next full period by its own clock, as a cron expression has it.
            local = math.ceil((life.joined + life.skew) / life.period) * life.period
            time = local - life.skew
        while time < life.left:
            shared = life.phase is None
            run_time = time + life.skew if shared else time
            yield Fire(time, run_time, life.period, exact=shared)
            time += life.period

    def lives(self) -> Iterator[Life]:
        """Yield every replica that is started, but for those that follow on one that died."""
        rollouts = list(self._rollouts())
        for number in range(REPLICAS):
            draw = self._draw("lives", number)
            skew = draw.uniform(-self.conditions.skew, self.conditions.skew)
            for version, (begin, period) in enumerate(self._stretches):
                joined = begin + (draw.uniform(0, DEPLOYED_WITHIN) if version else 0.0)
                ends = [*self._begins[version + 1 :], self.end][0]
                left = ends + (draw.uniform(0, DEPLOYED_WITHIN) if ends < self.end else 0.0)
                while joined < left:
                    leaves = min(left, joined + self._stay(draw) * period)
                    turn = self._turn(rollouts, number, joined)
                    name = f"replica {number} of {joined:.0f} s"
                    life = Life(name, joined, min(leaves, turn.time), period, None, skew)
                    if turn.time <= leaves:
                        yield self._life(replace(life, killed=turn.kills))
                        joined = max(joined + 1.0, turn.time + turn.pause)
                    else:
                        yield self._life(life)
                        # One stays, so that there is always somebody to run the job.
                        joined = leaves + (draw.uniform(0.1, 2.0) * period if number else 5.0)

    def restarted(self, life: Life, died: float) -> Life:
        """Return the life that follows on that of a replica that was killed."""
        joined = died + self._draw("restart", life.name, round(died)).uniform(*RESTART)
        return self._life(replace(life, name=f"{life.name}, again", joined=joined))

    def latency(self, life: Life, time: float) -> float:
        """Return the seconds from a submission until a worker has it."""
        draw = self._draw("fire", life.name, round(time))
        if draw.random() < self.conditions.starved:
            return draw.uniform(0, MOST_PERIODS_LATE) * life.period
        return draw.uniform(0, USUAL_LATENCY)

    def job(self, window: int, attempt: int, period: float) -> Job:
        """Return the job of a run, which is the first, second, ... of its window."""
        draw = self._draw("job", window, attempt)
        long = draw.random() < self.conditions.long
        duration = draw.uniform(*(LONG_DURATION if long else USUAL_DURATION)) * period
        dies = draw.random() < self.conditions.killed
        return Job(duration, draw.random() * duration if dies else None)

    def _deployments(self) -> Iterator[tuple[float, float]]:
        """Yield when each version is deployed, and its period."""
        draw = self._draw("deployments")
        time, period, left = 0.0, PERIODS[0], float(self.windows)
        while left > 0:
            yield time, period
            stays = draw.randint(60, 120) if self.conditions.deployments else left
            time += stays * period
            left -= stays
            period = draw.choice([other for other in PERIODS if other != period])

    def _rollouts(self) -> Iterator[list[_Turn]]:
        """Yield when the replicas are replaced, in turn."""
        draw = self._draw("rollouts")
        time = 0.0
        while self.conditions.rolling and time < self.end:
            time += draw.uniform(*BETWEEN_ROLLOUTS) * self.period(time)
            turns = []
            for _ in range(REPLICAS):
                turns.append(_Turn(time, draw.uniform(*HANDOVER), draw.random() < ROLLOUT_KILLS))
                time += draw.uniform(*TURN)
            yield turns

    def _turn(self, rollouts: list[list[_Turn]], number: int, joined: float) -> _Turn:
        """Return when a replica that joined at a time is replaced."""
        # One that has only just been put in the place of another is not replaced at once.
        turns = (turns[number] for turns in rollouts)
        after = joined + HANDOVER[1] - HANDOVER[0]
        return next((turn for turn in turns if turn.time > after), _Turn(math.inf, 0.0, False))

    def _stay(self, draw: random.Random) -> float:
        """Return for how many periods a replica stays."""
        return math.inf if self.conditions.stay is None else draw.uniform(*self.conditions.stay)

    def _life(self, life: Life) -> Life:
        if not self.conditions.offsets:
            return life
        return replace(life, phase=self._draw("phase", life.name).uniform(0, life.period))

    def _draw(self, *what: object) -> random.Random:
        return random.Random(f"{self._seed} {what}")  # noqa: S311  # repeatable, not secret
