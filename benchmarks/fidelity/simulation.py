"""Replicas that live through a trace under one rule.

What is simulated is APScheduler: a job with ``max_instances=1`` and no grace time on replicas
whose fires wait for a worker. The rule decides by its statements on the real database. For this
library, its executor is simulated as well: renewals at a third of the lease, the poll, the run
times that wait for a run to end, and what a stop cuts. In leader mode its own modules decide who
leads, and what becomes of a follower's run times.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import count

from apscheduler_tasklock._runs.deferred_runs import Outlook
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._runs.trigger_times import has_shared_times
from apscheduler_tasklock.demo import history
from benchmarks.fidelity.clock import TravellingDatabase, moment, seconds
from benchmarks.fidelity.executor import OneJob, ReplicaExecutor, TravellingClient
from benchmarks.fidelity.leader import Member
from benchmarks.fidelity.rules import TASK, TIMINGS, Granted, Rule, TaskLockRule, TaskLockWithLeader
from benchmarks.fidelity.trace import Fire, Life, Trace
from tests.support.waist import TaskRow


@dataclass
class Run(history.JudgedRun):
    """A run of the job, in seconds since the beginning.

    :ivar died: when it was cut short, since its replica was killed or stopped
    :ivar period: the job's period, in the version that ran
    """

    period: float = 0.0


@dataclass
class History:
    """The history of a trace under a rule.

    :ivar runs: all runs, in the order of their starts
    :ivar asked: the run times that workers asked for, and when
    :ivar alarms: when a replica reported the job as overdue
    """

    runs: list[Run] = field(default_factory=list)
    asked: list[tuple[float, float]] = field(default_factory=list)
    alarms: list[float] = field(default_factory=list)


@dataclass
class Current:
    """The present run of a replica.

    :ivar taken_over: whether it is a takeover
    """

    run: Run
    granted: Granted
    taken_over: bool


@dataclass
class Blocked:
    """A run time that was refused because of an unfinished run.

    :ivar token: token of that run
    """

    fire: Fire
    token: int


@dataclass
class Replica:
    """A running scheduler process.

    :ivar busy: whether an instance of the job is running, or waits for a worker
    :ivar current: its present run
    :ivar blocked: the last run time that waits for an unfinished run, which may be dead
    :ivar polls: the polls that are planned, counted from its start
    :ivar next_fire: the next run time of its scheduler
    :ivar executor: its looks at the rows, if they are the library's own
    :ivar member: its part in leader mode
    """

    life: Life
    fires: Iterator[Fire]
    alive: bool = True
    leaving: bool = False
    busy: bool = False
    current: Current | None = None
    blocked: Blocked | None = None
    polls: set[int] = field(default_factory=set)
    next_fire: Fire | None = None
    executor: ReplicaExecutor | None = None
    member: Member | None = None

    @property
    def leads(self) -> bool:
        """Whether it is there, and leads."""
        return self.alive and self.member is not None and self.member.leads


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
        self._dead = False  # whether a run that was cut short is unfinished in the table
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
        replica = self._started(life)
        self._replicas = [other for other in self._replicas if other.alive]
        self._replicas.append(replica)
        self._plan(life.left, partial(self._leave, replica))
        self._plan_fire(replica)
        looks = self._every_poll or self._calls_for_polls or replica.member is not None
        if isinstance(self._rule, TaskLockRule) and looks:
            self._poll(self._rule, replica)

    def _started(self, life: Life) -> Replica:
        rule = self._rule
        member = Member(rule, life.name) if isinstance(rule, TaskLockWithLeader) else None
        return Replica(life, self._trace.fires(life), member=member)

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
        if replica.member is not None:
            replica.member.resign()
            self._look_soon()
        if replica.current is not None and self._trace.conditions.coroutines:
            granted = self._cut(replica)
            self._rule.cut(granted)
            self._look_soon()

    def _kill(self, replica: Replica) -> None:
        self._renew_leadership()
        replica.alive = False
        if replica.current is not None:
            self._cut(replica)
        self._look_soon()

    def _cut(self, replica: Replica) -> Granted:
        current = replica.current
        assert current is not None
        current.run.ended, current.run.died = None, self._now
        replica.current = None
        self._dead = True
        return current.granted

    def _plan_fire(self, replica: Replica) -> None:
        fire = replica.next_fire = next(replica.fires, None)
        if fire is not None:
            self._plan(fire.time, partial(self._fire, replica, fire))

    def _fire(self, replica: Replica, fire: Fire) -> None:
        if not replica.alive or replica.leaving:
            return
        self._plan_fire(replica)
        if replica.busy:  # max_instances skips it
            return
        if replica.member is None or replica.member.leads:
            self._submit(replica, partial(self._work, replica, fire))
        else:
            assert isinstance(self._rule, TaskLockRule)
            # In place of any other, because APScheduler coalesces.
            replica.member.kept, replica.blocked = fire, None
            self._plan_poll(self._rule, replica, not_before=fire.time + TIMINGS.head_start)

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
            # The last one counts, because APScheduler coalesces.
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
        run = Run(TASK, replica.life.name, granted.run_time, self._now, end, period=granted.period)
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
        if at < current.run.over:
            self._plan(at, partial(self._renew, rule, replica, current))

    def _renew(self, rule: TaskLockRule, replica: Replica, current: Current) -> None:
        if replica.current is current and rule.renew(current.granted):
            self._renew_after(rule, replica, current)

    def _stable(self, replica: Replica) -> bool:
        """Tell whether a replica has been there long enough to believe that a run is dead."""
        if not isinstance(self._rule, TaskLockRule):
            return True
        return self._now >= replica.life.joined + self._rule.recovery_grace

    @property
    def _may_run_again(self) -> bool:
        """Whether a run was cut short that another replica may run again."""
        return self._dead and isinstance(self._rule, TaskLockRule) and self._rule.failover

    @property
    def _calls_for_polls(self) -> bool:
        """Whether the polls of any replica may find something to do."""
        return self._may_run_again or self._is_leaderless

    @property
    def _is_leaderless(self) -> bool:
        """Whether a replica that looks may become the leader."""
        in_leader_mode = isinstance(self._rule, TaskLockWithLeader)
        return in_leader_mode and not any(replica.leads for replica in self._replicas)

    def _renew_leadership(self) -> None:
        """Let the leader renew its lease, as its last poll did, which was left out."""
        now = self._now
        for replica in self._replicas:
            if replica.leads:
                assert isinstance(self._rule, TaskLockRule)
                assert replica.member is not None
                joined, interval = replica.life.joined, self._rule.poll_interval
                polled = joined + math.floor((now - joined) / interval + 0.001) * interval
                if polled > replica.member.looked_at:
                    self._database.travel(polled, self._trace.clock_ahead(polled))
                    replica.member.renew(polled)
        self._database.travel(now, self._trace.clock_ahead(now))

    def _look_soon(self) -> None:
        """Plan the next polls that can find a change of the last run.

        All others would find a run that its holder renews, or a finished one.
        """
        if isinstance(self._rule, TaskLockRule):
            for replica in self._replicas:
                if self._calls_for_polls or replica.blocked is not None:
                    self._plan_poll(self._rule, replica)

    def _plan_poll(
        self, rule: TaskLockRule, replica: Replica, not_before: float = -math.inf
    ) -> None:
        """Plan a replica's next poll.

        :param not_before: when there may be something for it to find
        """
        if not replica.alive or replica.leaving:
            return
        passed = max(self._now, not_before) - replica.life.joined
        # 0.001, because the last poll may be a rounding error later than it was planned for.
        polls = math.floor(passed / rule.poll_interval + 0.001) + 1
        if polls not in replica.polls:
            replica.polls.add(polls)
            at = replica.life.joined + polls * rule.poll_interval
            self._plan(at, partial(self._poll, rule, replica, polls))

    def _plan_look_now(self, replica: Replica) -> None:
        assert isinstance(self._rule, TaskLockRule)
        self._plan(self._now, partial(self._look, self._rule, replica))

    def _poll(self, rule: TaskLockRule, replica: Replica, number: int = 0) -> None:
        replica.polls.discard(number)
        self._look(rule, replica)
        member = replica.member
        looks = member is not None and (member.kept is not None or self._is_new(rule, replica))
        if self._every_poll or self._calls_for_polls or replica.blocked is not None or looks:
            self._plan_poll(rule, replica)

    def _is_new(self, rule: TaskLockRule, replica: Replica) -> bool:
        """Tell whether a replica may not lead yet, which it finds out with a look."""
        return self._now < replica.life.joined + TIMINGS.head_start + 3 * rule.poll_interval

    def _look(self, rule: TaskLockRule, replica: Replica) -> None:
        """Look at the rows, and do what they call for."""
        if not replica.alive or replica.leaving:
            return
        if replica.member is None:
            self._look_at_run(rule, replica)
            return
        self._renew_leadership()
        outlook = replica.member.look(self._now)
        self._look_at_run(rule, replica)
        fire = replica.member.kept
        if fire is not None and outlook is Outlook.REFUSED:
            replica.member.kept = None
            self._history.asked.append((fire.run_time, self._now))
        elif fire is not None and outlook is Outlook.ASKED_AGAIN and not replica.busy:
            replica.member.kept = None
            self._submit(replica, partial(self._work, replica, fire))

    def _look_at_run(self, rule: TaskLockRule, replica: Replica) -> None:
        """See what became of the last run; run again what is dead, and what waited for it."""
        state = rule.read()
        if state is None:
            return
        if state.finished:
            self._dead = False
            # A run that ended stood rightly against run times that were due meanwhile. A run that
            # was given up did not.
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

    def _take_over(self, rule: TaskLockRule, replica: Replica, dead: TaskRow) -> None:
        """Let a worker run a dead holder's window again."""
        if not replica.alive:
            return
        replica.busy = False
        if replica.leaving:
            return
        granted = rule.take_over(replica.life.name, dead, replica.life.period)
        if granted is not None:
            # The window keeps the period of the version that died.
            period = self._history.runs[-1].period
            self._run(replica, replace(granted, period=period), taken_over=True)
        elif replica.blocked is not None:
            self._plan_look_now(replica)


class ScheduledSimulation(Simulation):
    """One trace whose replicas have triggers of APScheduler.

    For this library, what its executor registers, tells of and runs in another replica's place is
    decided by its own modules. They look when its poll would, but for looks at which no row calls
    for anything.
    """

    def _started(self, life: Life) -> Replica:
        replica, rule = super()._started(life), self._rule
        if not isinstance(rule, TaskLockRule):
            return replica
        scheduler = OneJob(TASK, life.trigger, partial(_next_run_time, replica))
        replica.executor = ReplicaExecutor(
            rule.options,
            scheduler,
            TravellingClient(
                rule.cursor, rule.protocol_of(life.name), partial(self._stable, replica)
            ),
            partial(self._stand_by, replica),
            lambda: self._history.alarms.append(self._now),
            lambda: moment(self._now).timestamp(),
        )
        return replica

    def _join(self, life: Life) -> None:
        super()._join(life)
        if isinstance(self._rule, TaskLockRule):
            self._poll(self._rule, self._replicas[-1])
            self._plan_poll(self._rule, self._replicas[-1])  # so that it knows the row

    def _work(self, replica: Replica, fire: Fire) -> None:
        if replica.executor is not None and fire.submission is None:
            submission = replica.executor.submission(moment(fire.run_time))
            fire = replace(fire, submission=submission)
        super()._work(replica, fire)
        self._look_when_due()

    def _end(self, replica: Replica, current: Current) -> None:
        super()._end(replica, current)
        self._look_when_due()

    def _poll(self, rule: TaskLockRule, replica: Replica, number: int = 0) -> None:
        if replica.alive and not replica.leaving:
            assert replica.executor is not None
            replica.executor.look()
        super()._poll(rule, replica, number)
        self._look_when_due()

    def _look_when_due(self) -> None:
        """Plan the polls that may find the job due, or overdue."""
        if not isinstance(self._rule, TaskLockRule):
            return
        due = self._rule.due()
        if due is None:
            return
        standby = not all(has_shared_times(replica.life.trigger) for replica in self._replicas)
        at = due.next_look(self._now, standby=standby)
        for replica in self._replicas:
            if at is not None:
                self._plan_poll(self._rule, replica, not_before=at)

    def _stand_by(
        self, replica: Replica, submission: Submission, not_now: Callable[[], None]
    ) -> None:
        """Let a worker make a standby run, unless one runs the job here."""
        if replica.busy:
            not_now()
            return
        [run_time] = submission.run_times
        period = submission.period(run_time)
        assert period is not None
        time = seconds(run_time)
        fire = Fire(time, time, period, exact=False, submission=submission)
        self._submit(replica, partial(self._work, replica, fire))


def _next_run_time(replica: Replica) -> datetime:
    assert replica.next_fire is not None
    return moment(replica.next_fire.run_time)
