"""The queue of runs: which are asked for, which are given to a worker, which are missed.

A run waits here until a worker is free for it, is claimed, and only then given to the executor. The
queue only decides. Time, answers and chance come in as arguments, so that it can be driven on a
clock of any kind.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from apscheduler_tasklock._runs.run import JobKey, Kind, Run, State, Verdict

# How many runs one statement asks for at least, and for each free worker: most of them are refused,
# since other replicas ask for the same.
FEWEST_ASKED = 16
ASKED_PER_WORKER = 4
# How many at most.
MOST_ASKED = 256
# Seconds after which a run is asked for again whose row was locked, by the claim of another replica
# as a rule; the last one repeats.
LOCKED_PAUSES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.25)
# Seconds for which nothing is asked for after the executor did not take a run.
PAUSE_AFTER_FAILURE = 1.0
# Seconds for which a run waits for a worker until it is told that all are busy; and from then until
# that is told again.
FULL_AFTER = 10.0
FULL_INTERVAL = 600.0
# Seconds for which a run without a lock leaves a worker to those that the database is asked for.
PATIENCE = 0.1


@dataclass
class Inputs:
    """What has happened since the last step.

    :ivar came: runs that were submitted
    :ivar answers: what the database has said of each run of an ask, all of them at once
    :ivar begun: runs that a worker has begun
    :ivar freed: runs after which a worker is free, and how many seconds each took
    :ivar failed: runs that the executor did not take
    :ivar finished: tasks whose last run has ended or is dead, so that what was kept is asked for
    :ivar changed: jobs that were paused, removed or rescheduled
    :ivar workers: how many workers the executor has; ``None``: as many as there are runs
    :ivar stopped: whether nothing is to be begun any more
    """

    came: list[Run] = field(default_factory=list)
    answers: list[tuple[Run, Verdict]] = field(default_factory=list)
    begun: list[Run] = field(default_factory=list)
    freed: list[tuple[Run, float]] = field(default_factory=list)
    failed: list[Run] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    changed: list[JobKey] = field(default_factory=list)
    workers: int | None = None
    stopped: bool = False


@dataclass
class Ask:
    """Runs of one kind of statement to ask the database for.

    :ivar runs: in the order in which they are to be granted
    :ivar most: how many may be granted; ``None``: all of them
    """

    runs: list[Run]
    most: int | None


@dataclass(frozen=True)
class Full:
    """Workers that have been busy for long while run times wait for one.

    :ivar workers: how many there are
    :ivar waiting: how many run times wait
    :ivar longest: seconds for which the first of them has waited
    """

    workers: int
    waiting: int
    longest: float


@dataclass
class Step:
    """What is to be done now.

    :ivar asks: what to ask the database for, each with a statement of its own
    :ivar given: what to give to the executor
    :ivar refused: what was refused for good, or could not be asked for
    :ivar dropped: what was kept, and is not run
    :ivar withdrawn: what is not begun since all is stopped; what it has got of the database is to
        be handed over
    :ivar full: that the workers have been busy for long, which is to be told
    :ivar wakes_at: when to step again, if nothing happens before; on the monotonic clock
    """

    asks: list[Ask] = field(default_factory=list)
    given: list[Run] = field(default_factory=list)
    refused: list[tuple[Run, Verdict]] = field(default_factory=list)
    dropped: list[Run] = field(default_factory=list)
    withdrawn: list[Run] = field(default_factory=list)
    full: Full | None = None
    wakes_at: float = inf


class RunQueue:
    """The runs of one executor that are not over, in the order in which they came.

    :param jitter: returns a pause near the one that it is given
    """

    def __init__(self, jitter: Callable[[float], float]) -> None:
        self._jitter = jitter
        self._waiting: list[Run] = []  # also those that are kept
        self._numbers = count()
        self._asked: set[Run] = set()
        self._asked_at = inf
        self._reserved = 0  # workers, for what the database is asked for
        self._given: set[Run] = set()  # until their workers are free
        self._unbegun: set[Run] = set()
        self._growth = 1  # of an ask, while all are refused
        self._not_before = -inf
        self._full_told_at = -inf
        self._stopped = False
        self._workers: int | None = None
        self._virtual = VirtualWorkers()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or is asked for, so that nothing can be done until more happens."""
        return not (self._waiting or self._asked)

    def step(self, now: float, inputs: Inputs) -> Step:
        """Take in what has happened, and return what to do.

        :param now: on the monotonic clock
        """
        step = Step()
        self._stopped = self._stopped or inputs.stopped
        self._workers = inputs.workers
        self._virtual.count(inputs.workers)
        for run in inputs.came:
            run.number = next(self._numbers)
            insort(self._waiting, run, key=_place)
        for run in inputs.begun:
            run.state, run.began_at = State.BEGUN, now
            self._unbegun.discard(run)
        for run, took in inputs.freed:
            self._leave(run, took)
        for run in inputs.failed:
            self._leave(run, 0.0)
            self._not_before = now + self._jitter(PAUSE_AFTER_FAILURE)
        self._drop(step, set(inputs.changed))
        self._ask_again(now, set(inputs.finished))
        self._take_answers(step, now, inputs.answers)
        if self._stopped:
            self._withdraw_all(step)
        elif now >= self._not_before:
            self._deal(step, now)
            self._tell_full(step, now)
        step.wakes_at = self._wakes_at(now)
        return step

    def _take_answers(self, step: Step, now: float, answers: Sequence[tuple[Run, Verdict]]) -> None:
        """Take in what the database has said of the runs that it was asked for."""
        for run, verdict in answers:
            self._asked.discard(run)
            if verdict is Verdict.GRANTED:
                if self._stopped:
                    step.withdrawn.append(run)
                    self._end(run, run.earliest)
                else:
                    # Also if a run without a lock has its worker by now: it is the next one.
                    self._give(step, run)
            elif verdict in (Verdict.REFUSED, Verdict.FAILED):
                step.refused.append((run, verdict))
                self._end(run, run.earliest)
            else:
                self._take_back(run, now, verdict)
        verdicts = {verdict for _run, verdict in answers}
        if verdicts:
            is_in_vain = verdicts <= {Verdict.REFUSED, Verdict.KEPT}
            self._growth = min(MOST_ASKED, self._growth * 2) if is_in_vain else 1
        if not self._asked:
            self._reserved, self._asked_at = 0, inf

    def _take_back(self, run: Run, now: float, verdict: Verdict) -> None:
        """Let a run wait again, at its place."""
        run.state = State.WAITING
        if verdict is Verdict.KEPT:
            run.state, run.kept_at = State.KEPT, now
        elif verdict is Verdict.UNLOCKED:
            run.claims = False
        elif verdict is Verdict.LOCKED:
            pause = LOCKED_PAUSES[min(run.locked, len(LOCKED_PAUSES) - 1)]
            run.not_before = now + self._jitter(pause)
            run.locked += 1
            # A worker was free for it in time. Those that go meanwhile may have it since.
            run.grace = None
        insort(self._waiting, run, key=_place)

    def _drop(self, step: Step, changed: set[JobKey]) -> None:
        """Drop what is kept of these jobs, and what goes after it."""
        dropped = [run for run in self._waiting if run.state is State.KEPT and run.job in changed]
        for run in dropped:
            for each in run.backlog:
                each.state = State.OVER
                step.dropped.append(each)
        self._waiting = [run for run in self._waiting if run.state is not State.OVER]

    def _ask_again(self, now: float, finished: set[str]) -> None:
        """Let what was kept on account of these tasks' last runs be asked for again."""
        for run in self._waiting:
            if run.state is State.KEPT and run.task_name in finished:
                run.state = State.WAITING
                for each in run.backlog:
                    each.excused += now - run.kept_at

    def _withdraw_all(self, step: Step) -> None:
        """Begin nothing that claims. The rest goes to the executor, as it would have without us."""
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            if run.claims:
                for each in run.backlog:
                    each.state = State.OVER
                    step.withdrawn.append(each)
            else:
                self._give(step, run)

    def _deal(self, step: Step, now: float) -> None:
        """Deal the free workers out, in one decision."""
        free = self._idle_workers
        if now < self._asked_at + PATIENCE:
            free -= self._reserved
        # No run of a task overtakes one whose row was locked.
        pausing = {run.task_name for run in self._waiting if run.not_before > now}
        ready = [r for r in self._waiting if r.may_go(now) and r.task_name not in pausing]
        first = [run for run in ready if run.kind.goes_first]
        others = [run for run in ready if not run.kind.goes_first]
        # Neither those that somebody waits for nor the schedule is to wait for all of the others.
        share = max(1.0, free // 2) if first and others else free
        taken = self._deal_to(first, min(free, share), step, now)
        self._deal_to(others, free - taken, step, now)
        for ask in step.asks:
            self._asked_at = now
            self._asked.update(ask.runs)
            self._reserved += ask.most or 0
        stay = (State.WAITING, State.KEPT)
        self._waiting = [run for run in self._waiting if run.state in stay]

    def _tell_full(self, step: Step, now: float) -> None:
        """Tell that the workers are busy for long, now and then."""
        if self._workers is None or self._idle_workers >= 1:
            return
        since = [max(r.came, r.earliest) for r in self._waiting if r.state is State.WAITING]
        longest = now - min(since, default=now)
        if longest > FULL_AFTER and now > self._full_told_at + FULL_INTERVAL:
            self._full_told_at = now
            step.full = Full(self._workers, len(since), longest)

    def _deal_to(self, ready: Sequence[Run], free: float, step: Step, now: float) -> int:
        """Deal so many workers out to these runs, at most; return how many these have."""
        # What was given and has not begun waits behind work that somebody else gave the executor.
        asks = not (self._asked or (self._workers is not None and self._unbegun))
        asking = _Asking(free, self._growth) if asks else _Asking(0, 0)
        taken = 0
        for run in ready:
            has_worker = taken + 1 <= free
            if not (has_worker or asking.has_room):
                break
            run.is_missed = run.is_late(self._virtual.begins_at(run, now))
            if run.claims and not run.is_missed:
                taken += asking.add(run, has_worker=has_worker)
            elif has_worker:
                self._give(step, run)
                taken += 1
        step.asks += asking.asks()
        return taken

    def _give(self, step: Step, run: Run) -> None:
        """Give a run to the executor."""
        self._virtual.begin(run)
        run.state = State.GIVEN
        self._given.add(run)
        self._unbegun.add(run)
        step.given.append(run)

    def _leave(self, run: Run, took: float) -> None:
        """Note that a worker is free again."""
        self._given.discard(run)
        self._unbegun.discard(run)
        if run.following is not None:
            # One that was missed was given before its turn, since it needs no claim.
            run.following.goes_on = not run.is_missed
        self._end(run, self._virtual.end(run, took))

    def _end(self, run: Run, at: float) -> None:
        """Let the next run of the same submission go, if there is one."""
        run.state = State.OVER
        if run.following is not None:
            run.following.earliest = at
            run.following.number = run.number
            insort(self._waiting, run.following, key=_place)

    @property
    def _idle_workers(self) -> float:
        return inf if self._workers is None else self._workers - len(self._given)

    def _wakes_at(self, now: float) -> float:
        """Return when something can be done, if nothing happens before."""
        times = [self._asked_at + PATIENCE, self._not_before]
        times += [run.not_before for run in self._waiting if run.state is State.WAITING]
        return min((time for time in times if time > now), default=inf)


class _Asking:
    """What the database is to be asked for, by the statement that does it.

    :param free: how many workers are free for it
    :param growth: by how much more than that many runs are asked for
    """

    def __init__(self, free: float, growth: int) -> None:
        self._has_limit = free < inf
        size = max(FEWEST_ASKED, ASKED_PER_WORKER * free) * growth if free >= 1 else 0
        self._size = min(MOST_ASKED, size)
        self._asks: dict[Kind, Ask] = {}
        self._tasks: set[str] = set()

    @property
    def has_room(self) -> bool:
        """Whether more can be asked for."""
        return len(self._tasks) < self._size

    def add(self, run: Run, *, has_worker: bool) -> bool:
        """Ask for a run, too, if there is room; tell whether it takes a worker."""
        if run.task_name in self._tasks or not self.has_room:
            return False
        self._tasks.add(run.task_name)
        ask = self._asks.setdefault(run.kind, Ask([], 0 if self._has_limit else None))
        ask.runs.append(run)
        if ask.most is None:
            return False
        ask.most += has_worker
        return has_worker

    def asks(self) -> list[Ask]:
        """Return what is asked for: nothing where others come before it for all workers."""
        asks = [ask for ask in self._asks.values() if ask.most != 0]
        for run in (run for ask in asks for run in ask.runs):
            run.state = State.ASKED
        return asks


class VirtualWorkers:
    """The workers as they would be if claims took no time: since when each is free.

    A run that waits for its claim keeps a worker idle. So in an overload, or while the database
    stalls, APScheduler would call runs missed on account of the lock. Hence a run is as late as it
    would be on workers that wait for nothing. There a worker goes through all run times of a
    submission before it takes another one, as APScheduler's ``run_job`` does.
    """

    def __init__(self) -> None:
        self._free_at: list[float] | None = None  # a heap; ``None``: there is no limit
        self._busy: set[Run] = set()

    def count(self, workers: int | None) -> None:
        """Note how many there are; ``None``: as many as there are runs."""
        if workers is None:
            self._free_at = None
            return
        free_at = [] if self._free_at is None else self._free_at
        while len(free_at) + len(self._busy) < workers:
            heapq.heappush(free_at, -inf)
        while free_at and len(free_at) + len(self._busy) > workers:
            free_at.remove(max(free_at))
            heapq.heapify(free_at)
        self._free_at = free_at

    def begins_at(self, run: Run, now: float) -> float:
        """Return when a run would begin, at the earliest."""
        free_at = -inf
        if self._free_at and not run.goes_on:
            # One that began late, since it waited for its claim, may be over before another one.
            over_at = [busy.at + max(0.0, now - busy.began_at) for busy in self._busy]
            free_at = min([self._free_at[0], *over_at])
        return max(run.came, run.earliest, free_at)

    def begin(self, run: Run) -> None:
        """Let a run have the worker of the run before it, or the one that is free first.

        One that is missed has none: it takes no time, and is given before its turn, so that those
        before it are not to find its worker busy until it came.
        """
        free_at = -inf
        if run.is_missed:
            run.at = max(run.came, run.earliest)
            return
        if self._free_at and run.goes_on:
            # Another run may have it, since this one had to wait for its claim.
            own = run.earliest if run.earliest in self._free_at else self._free_at[0]
            self._free_at.remove(own)
            heapq.heapify(self._free_at)
        elif self._free_at:
            free_at = heapq.heappop(self._free_at)
        run.at = max(run.came, run.earliest, free_at)
        self._busy.add(run)

    def end(self, run: Run, took: float) -> float:
        """Note that a run is over, which took so many seconds; return when it would have been."""
        at = run.at + took
        if run in self._busy:
            self._busy.remove(run)
            if self._free_at is not None:
                heapq.heappush(self._free_at, at)
        return at


def _place(run: Run) -> tuple[float, int]:
    return run.came, run.number
