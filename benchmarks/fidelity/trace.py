"""What befalls the replicas in a simulation: the same for every rule, and repeated by its seed.

Times are seconds since the beginning, by the database's clock. A draw belongs to what it is about
(this fire of that replica, that run of this window) and not to when it is asked for, so that two
rules that run different jobs still meet the same luck.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

PERIODS = (300.0, 120.0, 600.0)
REPLICAS = 3

# How a fire reaches its worker: within moments, or where the pool is starved, periods later.
USUAL_LATENCY = 2.0
MOST_PERIODS_LATE = 3.0
# How long a job takes, in periods.
USUAL_DURATION = (0.02, 0.5)
LONG_DURATION = (1.1, 2.5)
# Seconds until a replica that was killed is there again, and until a deployed one is.
RESTART = (20.0, 180.0)
DEPLOYED_WITHIN = 60.0


@dataclass(frozen=True)
class Conditions:
    """What goes wrong in a trace.

    :ivar offsets: replicas count the interval from their own starts, rather than sharing the
        run times of a cron expression
    :ivar skew: seconds by which their clocks are off, at most
    :ivar starved: share of the fires that reach a worker up to three periods late
    :ivar killed: share of the runs whose replica is killed in the middle
    :ivar long: share of the runs that take longer than a period
    :ivar churn: whether replicas join and leave
    :ivar deployments: whether deployments change the period
    """

    name: str
    offsets: bool = False
    skew: float = 0.0
    starved: float = 0.0
    killed: float = 0.0
    long: float = 0.0
    churn: bool = False
    deployments: bool = False


TRACES = (
    Conditions("replicas at an offset", offsets=True),
    Conditions("clocks off by up to 3 minutes", skew=180),
    Conditions("starved pools", starved=0.05),
    Conditions("holders killed", killed=0.02),
    Conditions("starved and killed", starved=0.05, killed=0.02),
    Conditions("runs longer than a period", long=0.05),
    Conditions("replicas join and leave", churn=True),
    Conditions("periods changed", deployments=True),
    Conditions(
        "all of this, run times shared",
        skew=180,
        starved=0.05,
        killed=0.02,
        long=0.05,
        churn=True,
        deployments=True,
    ),
    Conditions(
        "all of this, at an offset",
        offsets=True,
        starved=0.05,
        killed=0.02,
        long=0.05,
        churn=True,
        deployments=True,
    ),
)


@dataclass(frozen=True)
class Life:
    """A replica from its start to its shutdown.

    :ivar joined: when it started
    :ivar left: when it is shut down
    :ivar period: of the job, in the version that it runs
    :ivar phase: seconds from its start to the first run time, if it counts from there
    :ivar skew: seconds by which its clock is ahead
    """

    name: str
    joined: float
    left: float
    period: float
    phase: float | None
    skew: float

    def run_times(self) -> Iterator[float]:
        """Yield the run times on its schedule, in the database's time."""
        if self.phase is not None:
            time = self.joined + self.phase
        else:
            # The next full period by its own clock, as a cron expression has it.
            time = math.ceil((self.joined + self.skew) / self.period) * self.period - self.skew
        while time < self.left:
            yield time
            time += self.period


@dataclass(frozen=True)
class Job:
    """One run of the job.

    :ivar duration: seconds that it takes
    :ivar dies_after: seconds after which its replica is killed, or ``None``
    """

    duration: float
    dies_after: float | None


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

    def period(self, time: float) -> float:
        """Return the job's period at a time."""
        return self._stretches[max(0, bisect_right(self._begins, time) - 1)][1]

    def window(self, time: float) -> int:
        """Return the number of the period that a time is in."""
        stretch = max(0, bisect_right(self._begins, time) - 1)
        begin, period = self._stretches[stretch]
        return math.floor(self._windows_before[stretch] + (time - begin) / period)

    def lives(self) -> Iterator[Life]:
        """Yield every replica that is started, but for those that were killed."""
        for number in range(REPLICAS):
            draw = self._draw("lives", number)
            skew = draw.uniform(-self.conditions.skew, self.conditions.skew)
            for version, (begin, period) in enumerate(self._stretches):
                joined = begin + (draw.uniform(0, DEPLOYED_WITHIN) if version else 0.0)
                ends = [*self._begins[version + 1 :], self.end][0]
                left = ends + (draw.uniform(0, DEPLOYED_WITHIN) if ends < self.end else 0.0)
                while joined < left:
                    leaves = min(left, joined + self._stay(number, draw) * period)
                    name = f"replica {number} of {joined:.0f} s"
                    yield self._life(Life(name, joined, leaves, period, None, skew))
                    # One stays, so that there is always somebody to run the job.
                    joined = leaves + (draw.uniform(0.1, 2.0) * period if number else 5.0)

    def restarted(self, life: Life, died: float) -> Life:
        """Return the life that follows on that of a replica that was killed."""
        joined = died + self._draw("restart", life.name, round(died)).uniform(*RESTART)
        return self._life(replace(life, name=f"{life.name}, again", joined=joined))

    def latency(self, life: Life, run_time: float) -> float:
        """Return after how long a fire reaches its worker."""
        draw = self._draw("fire", life.name, round(run_time))
        if draw.random() < self.conditions.starved:
            return draw.uniform(0, MOST_PERIODS_LATE) * life.period
        return draw.uniform(0, USUAL_LATENCY)

    def job(self, window: int, attempt: int, period: float) -> Job:
        """Return what becomes of a run: the first, second, ... of its window."""
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

    def _stay(self, number: int, draw: random.Random) -> float:
        """Return for how many periods a replica stays."""
        if not self.conditions.churn:
            return math.inf
        return draw.uniform(5, 60)

    def _life(self, life: Life) -> Life:
        if not self.conditions.offsets:
            return life
        return replace(life, phase=self._draw("phase", life.name).uniform(0, life.period))

    def _draw(self, *what: object) -> random.Random:
        return random.Random(f"{self._seed} {what}")  # noqa: S311  # repeatable, not secret
