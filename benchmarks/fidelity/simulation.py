"""Replicas that live through a trace under one rule.

What is simulated is APScheduler: a job with ``max_instances=1`` and no grace time on replicas
whose fires wait for a worker. The rule decides by its statements on the real database. For this
library, its executor is simulated as well: renewals at a third of the lease, the poll, the run
times that wait for a run to end, and what a stop cuts.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Literal

from apscheduler_tasklock._lock.protocol import RunState
from benchmarks.fidelity.clock import TravellingDatabase
from benchmarks.fidelity.rules import Granted, Rule, TaskLockRule
from benchmarks.fidelity.trace import Fire, Life, Trace

Outcome = Literal["ended", "killed", "stopped"]


@dataclass
class Run:
    """A run of the job, in seconds since the beginning.

    :ivar run_time: of the window that it is for
    :ivar period: of the job, in the version that ran
    :ivar end: when it ended, or was cut short
    :ivar outcome: whether it ended, or its replica was killed before, or stopped
    """

    run_time: float
    period: float
    start: float
    end: float
    outcome: Outcome = "ended"

    @property
    def ended(self) -> bool:
        """Whether it came to its end."""
        return self.outcome == "ended"


@dataclass
class History:
    """What came of a trace under a rule.

    :ivar runs: all of them, as they started
    :ivar asked: the run times that a worker asked for, and when it did
    """

    runs: list[Run] = field(default_factory=list)
    asked: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Current:
    """What a replica runs.

    :ivar taken_over: whether it is the window of a dead holder
    """

    run: Run
    granted: Granted
    taken_over: bool


@dataclass
class Blocked:
    """A run time that was refused because of an unfinished run.

    :ivar token: of that run
    """

    fire: Fire
    token: int


@dataclass
class Replica:
    """A running scheduler process.

    :ivar busy: whether an instance of the job is running, or waits for a worker
    :ivar current: what it runs
    :ivar blocked: the last run time that waits for an unfinished run, which may be dead
    :ivar polls: whether its next poll is planned
    """

    life: Life
    fires: Iterator[Fire]
    alive: bool = True
    leaving: bool = False
    busy: bool = False
    current: Current | None = None
    blocked: Blocked | None = None
    polls: bool = False


class Simulation:
    """One trace under one rule.

    :param every_poll: whether polls that cannot find anything are sent as well
    """

    def __init__(
        self, trace: Trace, rule: Rule, database: TravellingDatabase, *, every_poll: bool = False
    ) -> None:
        self._trace = trace
        self._rule = rule
        self._database = database
        self._every_poll = every_poll
        self._history = History()
        self._replicas: list[Replica] = []
        self._dead = False  # whether a run was cut short that the table still has as unfinished
        self._attempts: Counter[int] = Counter()
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []

    def live(self) -> History:
        """Live through the whole trace."""
        self._rule.prepare()
        for life in self._trace.lives():
            self._plan(life.joined, partial(self._join, life))
        while self._agenda:
            time, _, action = heapq.heappop(self._agenda)
            self._database.travel(time, self._trace.clock_ahead(time))
            action()
        return self._history

    @property
    def _now(self) -> float:
        return self._database.now

    def _plan(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), action))

    def _join(self, life: Life) -> None:
        replica = Replica(life, self._trace.fires(life))
        self._replicas = [other for other in self._replicas if other.alive]
        self._replicas.append(replica)
        self._plan(life.left, partial(self._leave, replica))
        self._plan_fire(replica)
        if isinstance(self._rule, TaskLockRule) and (self._dead or self._every_poll):
            self._poll(self._rule, replica)

    def _leave(self, replica: Replica) -> None:
        """Stop or kill a replica whose time is over.

        At a stop, what runs in a thread ends, a coroutine is cut, and nothing new is claimed.
        """
        if not replica.alive:
            return
        if replica.life.killed:
            self._kill(replica)
            return
        replica.leaving = True
        if replica.current is not None and self._trace.conditions.coroutines:
            granted = self._cut(replica, "stopped")
            self._rule.cut(granted)
            self._look_soon()

    def _kill(self, replica: Replica) -> None:
        replica.alive = False
        if replica.current is not None:
            self._cut(replica, "killed")
            self._look_soon()

    def _cut(self, replica: Replica, outcome: Outcome) -> Granted:
        current = replica.current
        assert current is not None
        current.run.end, current.run.outcome = self._now, outcome
        replica.current = None
        self._dead = True
        return current.granted

    def _plan_fire(self, replica: Replica) -> None:
        fire = next(replica.fires, None)
        if fire is not None:
            self._plan(fire.time, partial(self._fire, replica, fire))

    def _fire(self, replica: Replica, fire: Fire) -> None:
        if not replica.alive or replica.leaving:
            return
        self._plan_fire(replica)
        if not replica.busy:  # else max_instances skips it
            self._submit(replica, partial(self._work, replica, fire))

    def _submit(self, replica: Replica, work: Callable[[], None]) -> None:
        replica.busy = True
        self._plan(self._now + self._trace.latency(replica.life, self._now), work)

    def _work(self, replica: Replica, fire: Fire) -> None:
        """Let a worker claim a run time, and run it if it gets it."""
        if not replica.alive:
            return
        replica.busy = False
        if replica.leaving:
            return
        self._history.asked.append((fire.run_time, self._now))
        claim = self._rule.claim(replica.life.name, fire, stable=self._stable(replica))
        if isinstance(claim, Granted):
            self._run(replica, claim)
        elif claim.blocked_by is not None:
            # As APScheduler coalesces: the last one counts.
            replica.blocked = Blocked(fire, claim.blocked_by)
            self._look_soon()
            if claim.waits:
                self._plan_look_now(replica)

    def _run(self, replica: Replica, granted: Granted, *, taken_over: bool = False) -> None:
        window = self._trace.window(granted.run_time)
        self._attempts[window] += 1
        job = self._trace.job(window, self._attempts[window], granted.period)
        dies = job.dies_after is not None
        end = self._now + (job.duration if job.dies_after is None else job.dies_after)
        run = Run(granted.run_time, granted.period, self._now, end)
        replica.busy = True
        current = replica.current = Current(run, granted, taken_over)
        self._dead = False
        self._history.runs.append(run)
        self._plan(end, partial(self._die if dies else self._end, replica, current))
        if isinstance(self._rule, TaskLockRule):
            self._renew_after(self._rule, replica, current)

    def _end(self, replica: Replica, current: Current) -> None:
        if replica.current is not current:
            return
        self._rule.release(current.granted)
        replica.current = None
        replica.busy = False
        self._look_soon()
        if current.taken_over and replica.blocked is not None:
            self._plan_look_now(replica)

    def _die(self, replica: Replica, current: Current) -> None:
        if replica.current is current:
            self._kill(replica)
            life = self._trace.restarted(replica.life, self._now)
            if life.joined < life.left:
                self._plan(life.joined, partial(self._join, life))

    def _renew_after(self, rule: TaskLockRule, replica: Replica, current: Current) -> None:
        at = self._now + rule.renewal_interval(current.granted)
        if at < current.run.end:
            self._plan(at, partial(self._renew, rule, replica, current))

    def _renew(self, rule: TaskLockRule, replica: Replica, current: Current) -> None:
        if replica.current is current and rule.renew(current.granted):
            self._renew_after(rule, replica, current)

    def _stable(self, replica: Replica) -> bool:
        """Tell whether a replica has been there long enough to believe that a run is dead."""
        if not isinstance(self._rule, TaskLockRule):
            return True
        return self._now >= replica.life.joined + self._rule.recovery_grace

    def _look_soon(self) -> None:
        """Plan the next polls, where the last run's state is another one.

        All others would find a run that its holder renews, or a finished one.
        """
        if isinstance(self._rule, TaskLockRule):
            for replica in self._replicas:
                if self._dead or replica.blocked is not None:
                    self._plan_poll(self._rule, replica)

    def _plan_poll(self, rule: TaskLockRule, replica: Replica) -> None:
        if replica.alive and not replica.leaving and not replica.polls:
            replica.polls = True
            # The last one may have been planned for now, and come a rounding error later.
            polls = math.floor((self._now - replica.life.joined) / rule.poll_interval + 0.001) + 1
            at = replica.life.joined + polls * rule.poll_interval
            self._plan(at, partial(self._poll, rule, replica))

    def _plan_look_now(self, replica: Replica) -> None:
        assert isinstance(self._rule, TaskLockRule)
        self._plan(self._now, partial(self._look, self._rule, replica))

    def _poll(self, rule: TaskLockRule, replica: Replica) -> None:
        replica.polls = False
        self._look(rule, replica)
        if self._every_poll or self._dead or replica.blocked is not None:
            self._plan_poll(rule, replica)

    def _look(self, rule: TaskLockRule, replica: Replica) -> None:
        """See what became of the last run; run again what is dead, and what waited for it."""
        if not replica.alive or replica.leaving:
            return
        state = rule.read()
        if state is None:
            return
        if state.finished:
            self._dead = False
            # A run that ended stood rightly against what was due meanwhile; one that was given up
            # did not.
            blocked = replica.blocked
            if blocked is not None and blocked.token == state.token and not state.deaths:
                replica.blocked = None
            self._submit_blocked(replica)
        elif not (state.dead and (state.handed_over or self._stable(replica))):
            return
        elif not rule.runs_again(state) or rule.gives_up(state):
            self._submit_blocked(replica)
        elif not replica.busy:  # as max_instances has it
            self._submit(replica, partial(self._take_over, rule, replica, state))

    def _submit_blocked(self, replica: Replica) -> None:
        if replica.blocked is not None and not replica.busy:
            fire, replica.blocked = replica.blocked.fire, None
            self._submit(replica, partial(self._work, replica, fire))

    def _take_over(self, rule: TaskLockRule, replica: Replica, dead: RunState) -> None:
        """Let a worker run a dead holder's window again."""
        if not replica.alive:
            return
        replica.busy = False
        if replica.leaving:
            return
        granted = rule.take_over(replica.life.name, dead, replica.life.period)
        if granted is not None:
            # The window stays that of the version which died.
            period = self._history.runs[-1].period
            self._run(replica, replace(granted, period=period), taken_over=True)
        elif replica.blocked is not None:
            self._plan_look_now(replica)
