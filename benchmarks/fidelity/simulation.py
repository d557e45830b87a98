"""Replicas that live through a trace under one rule.

What is simulated is APScheduler: a job with ``max_instances=1`` and no grace time on replicas
whose fires wait for a worker. The rule decides by its statements on the real database. For the
leases of this library, its threads are simulated as well: renewals at a third of the lease, and a
look at a watched run when its lease has ended.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from apscheduler_tasklock.leases import RENEWALS_PER_LEASE
from apscheduler_tasklock.watching import MARGIN, RETRY_INTERVAL
from benchmarks.fidelity.clock import TravellingDatabase, seconds
from benchmarks.fidelity.rules import Granted, Refused, Rule, TaskLockRule
from benchmarks.fidelity.trace import Life, Trace


@dataclass
class Run:
    """A run of the job, in seconds since the beginning.

    :ivar run_time: of the window that it is for
    :ivar period: of the job, in the version that ran
    :ivar end: when it ended, or its replica was killed
    :ivar died: whether its replica was killed before it had ended
    """

    run_time: float
    period: float
    start: float
    end: float
    died: bool


@dataclass
class History:
    """What came of a trace under a rule.

    :ivar runs: all of them, as they started
    :ivar asked: the run times that a worker asked for, and when it did
    """

    runs: list[Run] = field(default_factory=list)
    asked: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Replica:
    """A running scheduler process.

    :ivar busy: whether an instance of the job is running, or waits for a worker
    :ivar watched: the run times that wait for a run to end, by the start of its window
    """

    life: Life
    run_times: Iterator[float]
    alive: bool = True
    leaving: bool = False
    busy: bool = False
    watched: dict[float, list[float]] = field(default_factory=dict)


class Simulation:
    """One trace under one rule."""

    def __init__(self, trace: Trace, rule: Rule, database: TravellingDatabase) -> None:
        self._trace = trace
        self._rule = rule
        self._database = database
        self._history = History()
        self._attempts: Counter[int] = Counter()
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []

    def live(self) -> History:
        """Live through the whole trace."""
        self._rule.prepare()
        for life in self._trace.lives():
            self._join(life)
        while self._agenda:
            time, _, action = heapq.heappop(self._agenda)
            self._database.travel(time)
            action()
        return self._history

    @property
    def _now(self) -> float:
        return self._database.now

    def _plan(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), action))

    def _join(self, life: Life) -> None:
        replica = Replica(life, life.run_times())
        self._plan(life.left, partial(self._leave, replica))
        self._plan_fire(replica)

    def _leave(self, replica: Replica) -> None:
        """Shut a replica down: what runs ends, and nothing new is claimed."""
        replica.leaving = True

    def _plan_fire(self, replica: Replica) -> None:
        run_time = next(replica.run_times, None)
        if run_time is not None:
            self._plan(run_time, partial(self._fire, replica, run_time))

    def _fire(self, replica: Replica, run_time: float) -> None:
        if not replica.alive:
            return
        self._plan_fire(replica)
        if not replica.busy:  # else max_instances skips it
            replica.busy = True
            latency = self._trace.latency(replica.life, run_time)
            self._plan(run_time + latency, partial(self._work, replica, [run_time]))

    def _work(self, replica: Replica, run_times: list[float]) -> None:
        """Let a worker claim run times one after the other, and run those that it gets."""
        if not replica.alive:
            return
        while run_times and not replica.leaving:
            run_time, *run_times = run_times
            self._history.asked.append((run_time, self._now))
            claim = self._rule.claim(replica.life.name, run_time, replica.life.period)
            if isinstance(claim, Granted):
                again = [run_time] if claim.window_left else []
                self._run(replica, claim, [*again, *run_times])
                return
            self._watch(replica, run_time, claim)
        replica.busy = False

    def _run(self, replica: Replica, granted: Granted, then: list[float]) -> None:
        period = replica.life.period
        window = self._trace.window(granted.run_time)
        self._attempts[window] += 1
        job = self._trace.job(window, self._attempts[window], period)
        dies = job.dies_after is not None
        end = self._now + (job.duration if job.dies_after is None else job.dies_after)
        self._history.runs.append(Run(granted.run_time, period, self._now, end, dies))
        finish = (
            partial(self._kill, replica) if dies else partial(self._end, replica, granted, then)
        )
        self._plan(end, finish)
        if isinstance(self._rule, TaskLockRule) and self._rule.failover:
            self._renew_after(self._rule, granted, end)

    def _end(self, replica: Replica, granted: Granted, then: list[float]) -> None:
        self._rule.release(granted)
        self._work(replica, then)

    def _kill(self, replica: Replica) -> None:
        replica.alive = False
        life = self._trace.restarted(replica.life, self._now)
        if life.joined < life.left:
            self._join(life)

    def _renew_after(self, rule: TaskLockRule, granted: Granted, end: float) -> None:
        assert rule.failover is not None
        at = self._now + rule.failover / RENEWALS_PER_LEASE
        if at < end:
            self._plan(at, partial(self._renew, rule, granted, end))

    def _renew(self, rule: TaskLockRule, granted: Granted, end: float) -> None:
        if rule.renew(granted):
            self._renew_after(rule, granted, end)

    def _watch(self, replica: Replica, run_time: float, refused: Refused) -> None:
        """Wait for the end of the lease that stands against a run time."""
        if refused.window_start is None:
            return
        waiting = replica.watched.get(refused.window_start)
        if waiting is not None:
            # As APScheduler coalesces: the first, whose window it may be, and the last.
            waiting[1:] = [run_time]
            return
        replica.watched[refused.window_start] = [run_time]
        look = partial(self._look, replica, refused.window_start)
        self._plan(self._now + max(0.0, refused.seconds_left) + MARGIN, look)

    def _look(self, replica: Replica, window_start: float) -> None:
        """See whether a watched run was renewed, has ended, or has died."""
        assert isinstance(self._rule, TaskLockRule)
        if not replica.alive or replica.leaving:
            return
        state = self._rule.read()
        look = partial(self._look, replica, window_start)
        if state.finished or seconds(state.window_start) != window_start:
            del replica.watched[window_start]
        elif not state.dead:
            self._plan(seconds(state.locked_until) + MARGIN, look)
        elif replica.busy:  # as max_instances has it
            self._plan(self._now + RETRY_INTERVAL, look)
        else:
            replica.busy = True
            self._work(replica, replica.watched.pop(window_start))
