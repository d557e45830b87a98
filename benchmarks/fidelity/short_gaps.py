"""Schedules whose run times come in short gaps, on replicas whose clocks differ.

Each run time of the schedule is a window: what counts is whether each of them ran once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise

from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock._runs.trigger_times import is_shared, period_after
from benchmarks.fidelity.clock import BEGINNING, moment, seconds
from benchmarks.fidelity.trace import REPLICAS, Conditions, Fire, Job, Life, Trace

# The longest wait of a fire for its worker, and the duration of a job, in shortest gaps.
LATENCY = 0.1
DURATION = (0.1, 0.5)
# Run times from one step of the database's clock to the next, which goes the other way.
STEADY = 120
# Run times for which a replica stays, and for which it is gone then.
STAYS = (20, 120)
GONE = (3, 30)


@dataclass(frozen=True)
class Schedule:
    """A cron schedule, and what goes wrong.

    :ivar fields: fields of the cron trigger
    :ivar skew: seconds by which the first replica's clock is ahead, and the last one's behind
    :ivar step: seconds by which the database's clock steps back, and later forward again
    """

    name: str
    fields: dict[str, str] = field(hash=False)
    skew: float = 0.0
    step: float = 0.0


SCHEDULES = (
    Schedule('second="0,1,30", clocks 5 s off', {"second": "0,1,30"}, skew=5),
    Schedule('second="*/7", clocks 10 s off', {"second": "*/7"}, skew=10),
    Schedule(
        'hour="9-17", minute="0,1", clocks 3 min off', {"hour": "9-17", "minute": "0,1"}, skew=180
    ),
    Schedule('second="*/5", the database\'s clock steps back by 30 s', {"second": "*/5"}, step=30),
)


class ShortGaps(Trace):
    """Replicas that share a schedule, and whose clocks differ."""

    def __init__(self, schedule: Schedule, windows: int, seed: int) -> None:
        super().__init__(Conditions(schedule.name, skew=schedule.skew), windows, seed)
        self.schedule = schedule
        self.trigger = CronTrigger(timezone=BEGINNING.tzinfo, **schedule.fields)
        self.run_times = list(islice(self._run_times(), windows))
        self._shortest = min(later - earlier for earlier, later in pairwise(self.run_times))
        self.end = self.run_times[-1] + self._shortest

    def window(self, time: float) -> int:
        """Return the number of a run time."""
        return bisect_left(self.run_times, time - self._shortest / 2)

    def clock_ahead(self, time: float) -> float:
        """Return the seconds by which the database's clock is ahead at a time."""
        return -self.schedule.step * (self.window(time) // STEADY % 2)

    def lives(self) -> Iterator[Life]:
        """Yield every replica that is started. The last one stays all the time."""
        for number in range(REPLICAS):
            draw = self._draw("lives", number)
            skew = self.schedule.skew * (1 - 2 * number / (REPLICAS - 1))
            first = 0
            while first < self.windows:
                stays = self.windows if number == REPLICAS - 1 else draw.randint(*STAYS)
                last = min(self.windows, first + stays) - 1
                joined, left = self.run_times[first] - 0.5 * self._shortest, self.run_times[last]
                name = f"replica {number} of {joined:.0f} s"
                yield Life(name, joined - skew, left + 0.6 * self._shortest - skew, 0.0, None, skew)
                first = last + draw.randint(*GONE)

    def fires(self, life: Life) -> Iterator[Fire]:
        """Yield the run times of a replica."""
        for number in range(bisect_left(self.run_times, life.joined + life.skew), self.windows):
            run_time = self.run_times[number]
            if run_time - life.skew >= life.left:
                break
            period = period_after(self.trigger, moment(run_time))
            assert period is not None
            exact = is_shared(self.trigger, moment(run_time))
            yield Fire(run_time - life.skew, run_time, period, exact)

    def latency(self, life: Life, time: float) -> float:
        """Return the seconds from a submission until a worker has it."""
        draw = self._draw("fire", life.name, round(time, 1))
        return draw.uniform(0, LATENCY) * self._shortest

    def job(self, window: int, attempt: int, period: float) -> Job:
        """Return the job of a run, which takes a part of the shortest gap."""
        draw = self._draw("job", window, attempt)
        return Job(draw.uniform(*DURATION) * self._shortest, None)

    def _run_times(self) -> Iterator[float]:
        """Yield the schedule's run times, in seconds since the beginning."""
        # The first ones come after the beginning by every clock.
        last = moment(math.ceil(2 * self.schedule.skew))
        while True:
            last = self.trigger.get_next_fire_time(last, last)
            yield seconds(last)
