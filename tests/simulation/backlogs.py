"""Enumerates all orders of events in which replicas can go through run times of one task.

Each replica has a real queue of runs, and the rule decides on the row. From each state every
possible event is tried: a scheduler submits, a claim is carried out, a run ends, a replica is
killed, the lease of a dead run ends, a replica looks at the row, a run time comes due. There are
no durations, so that a run may be of any length.
"""

from __future__ import annotations

import copy
import enum
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any
from uuid import UUID

from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock._runs.deferred_runs import InTheWay, LastRun, Outlook
from apscheduler_tasklock._runs.queue import Ask, RunQueue, ToDo
from apscheduler_tasklock._runs.run import RunKind, State
from apscheduler_tasklock.testing import rule
from tests.simulation.world import START
from tests.support.waist import (
    IN_TIME,
    ClaimAnswer,
    ClaimOutcome,
    ClaimRequest,
    ClaimTimes,
    EndLease,
    Refusal,
    ReleaseRequest,
    RunOfTest,
    TaskRow,
    manual_run_of,
    step_of,
    takeover_of,
)

# Seconds from one run time to the next.
PERIOD = 1_000.0
MAX_LOCK = 1_000_000.0
TASK = "b"
WORKERS = 2
REQUEST_ID = UUID(int=1)


class Rule(enum.Enum):
    """What happens to a run with a new window that was refused because of another run."""

    GO_ON = "it is refused, and the next one of its backlog is asked for"
    LEAVE = "it is refused, and the rest of its backlog is left to the other replica"
    DEFER_DUE = "it is deferred only if due before the run in its way began, or that is manual"
    DEFER = "it is deferred, and refused if a run ends well that stood rightly against it"
    ASK_AGAIN = "it is deferred, and asked for again whatever became of the run in its way"


@dataclass(frozen=True)
class Backlogs:
    """The run times of replicas, and what can happen to them.

    :ivar submitted: for each replica its submissions, each with the numbers of its run times
    :ivar late: the numbers of the run times that come due while other ones may run already
    :ivar kills: the limit of killed replicas
    :ivar is_manual: whether a manual run is asked for
    """

    submitted: Sequence[Sequence[Sequence[int]]]
    late: tuple[int, ...] = ()
    kills: int = 1
    failover: bool = False
    is_manual: bool = False

    @property
    def windows(self) -> Sequence[int]:
        """The numbers of all run times."""
        return sorted({n for replica in self.submitted for each in replica for n in each})


@dataclass(eq=False)
class Began:
    """A run that began.

    :ivar window: the number of its window; ``None``: a manual run
    :ivar ended: how it ended; ``""``: it goes on
    :ivar met: the late run times that came due while it went on
    """

    window: int | None
    token: int
    ended: str = ""
    met: frozenset[int] = frozenset()

    @property
    def key(self) -> Hashable:
        return self.window, self.ended, tuple(sorted(self.met))


@dataclass(eq=False)
class Work:
    """What the simulation knows of a run; the queue does not need it."""

    window: int | None
    request: Any
    began: Began | None = None
    in_the_way: InTheWay | None = None
    stood_first: int = 0  # the token of a run in its way that began before it was due


@dataclass(eq=False)
class Simulated:
    """A replica.

    :ivar submits: the submissions of its scheduler
    :ivar left: the submissions that are still to come
    :ivar skipped: the run times that were skipped because of a running instance, as in APScheduler
    :ivar submissions: the runs of each submission
    :ivar runs: all runs so far
    """

    name: str
    submits: Sequence[Sequence[int]]
    left: list[Sequence[int]]
    queue: RunQueue
    asks: list[Ask] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    submissions: list[list[RunOfTest]] = field(default_factory=list)
    runs: list[RunOfTest] = field(default_factory=list)
    is_dead: bool = False

    def of_state(self, *states: State) -> list[RunOfTest]:
        return [run for run in self.runs if run.state in states]

    @property
    def has_an_instance(self) -> bool:
        """Whether a submission is not over. A deferred one is no instance."""
        left = [[r for r in runs if r.state is not State.OVER] for runs in self.submissions]
        return any(runs[0].state is not State.DEFERRED for runs in left if runs)

    def is_going_to(self, kind: RunKind) -> bool:
        """Return whether a run of a kind is not over."""
        return any(run.kind is kind and run.state is not State.OVER for run in self.runs)

    def key(self, row: rule.Row | None) -> Hashable:
        """Return a key of the replica's state."""
        token = None if row is None else row.token
        runs = [
            (
                run.kind.value,
                run.state.value,
                run.work.window,
                run.is_held,
                run.work.in_the_way
                and (run.work.in_the_way.came_first, run.work.in_the_way.token == token),
                run.work.stood_first,
            )
            for run in self.runs
            if run.state is not State.OVER
        ]
        has_it = row is not None and row.locked_by == self.name
        submits = tuple(self.submits)
        skipped = tuple(sorted(self.skipped))
        return self.is_dead, has_it, submits, len(self.left), skipped, tuple(runs), len(self.asks)


def _last(row: rule.Row, state: TaskRow) -> LastRun:
    return LastRun(row.token, state.finished, state.dead, row.deaths)


def _same(pause: float) -> float:
    return pause


# A possible event: its name, and the function that carries it out on a fleet.
Action = tuple[str, Callable[["Fleet"], None]]


class Fleet:
    """Replicas, and the row of their task.

    :ivar path: the names of the events so far
    """

    def __init__(self, backlogs: Backlogs, kept: Rule) -> None:
        self.backlogs = backlogs
        self.kept = kept
        self.row: rule.Row | None = None
        self.replicas = [
            Simulated("ABC"[n], submitted, list(submitted), RunQueue(_same))
            for n, submitted in enumerate(backlogs.submitted)
        ]
        self.not_due = list(backlogs.late)
        self.kills_left = backlogs.kills
        self.is_requested = not backlogs.is_manual
        self.began: list[Began] = []
        self.path: list[str] = []
        self._ids = 1
        last = max((n for n in backlogs.windows if n not in backlogs.late), default=0)
        self._now = last * PERIOD + PERIOD / 2

    @property
    def now(self) -> datetime:
        return START + timedelta(seconds=self._now)

    def after(self, action: Action) -> Fleet:
        """Return a copy of the fleet after an event."""
        backlogs, self.backlogs = self.backlogs, None  # type: ignore[assignment]  # not copied
        fleet = copy.deepcopy(self)
        self.backlogs = fleet.backlogs = backlogs
        what, do = action
        fleet.path.append(what)
        fleet._now += 1
        do(fleet)
        return fleet

    @property
    def key(self) -> Hashable:
        """A key of the fleet's state."""
        row = self.row
        of_row = row and (
            row.window_start,
            row.finished,
            row.is_dead(self.now),
            row.deaths,
            row.kind,
            row.is_requested(self.now),
        )
        # Sorted, because replicas with the same submissions are interchangeable.
        replicas = sorted((replica.key(row) for replica in self.replicas), key=repr)
        began = tuple(sorted(map(repr, (each.key for each in self.began))))
        return tuple(replicas), of_row, began, len(self.not_due), self.kills_left, self.is_requested

    def actions(self) -> list[Action]:
        """Return the possible events, without kills."""
        found: list[Action] = []
        if self.not_due:
            found.append((f"{self.not_due[0]} comes due", Fleet._come_due))
        row = self.row
        if not self.is_requested and row is not None and row.runs:
            found.append(("a manual run is asked for", Fleet._request))
        if row is not None and self._holder_is_dead and row.is_running(self.now):
            found.append(("the lease ends", Fleet._end_lease))
        for n, replica in enumerate(self.replicas):
            if not replica.is_dead:
                found += self._actions_of(n, replica)
        return found

    def _actions_of(self, n: int, replica: Simulated) -> list[Action]:
        """Return the possible events of a replica."""
        found: list[Action] = []
        name = replica.name
        if replica.left and not set(replica.left[0]) & set(self.not_due):
            found.append((f"{name} submits {replica.left[0]}", partial(Fleet._submit, n=n)))
        if replica.asks:
            windows = [run.work.window for run in replica.asks[0].runs]
            found.append((f"{name} claims {windows}", partial(Fleet._claim, n=n)))
        for run in replica.of_state(State.BEGUN):
            at = replica.runs.index(run)
            found.append((f"{name} ends {run.work.window}", partial(Fleet._end, n=n, at=at)))
        if self._sees_something(replica):
            found.append((f"{name} looks", partial(Fleet._look, n=n)))
        return found

    def kill_actions(self) -> list[Action]:
        """Return the possible kills."""
        return [
            (f"{replica.name} is killed", partial(Fleet._kill, n=n))
            for n, replica in enumerate(self.replicas)
            if self.kills_left and not replica.is_dead
        ]

    # ---- events ----------------------------------------------------------------------------------

    def _come_due(self) -> None:
        window = self.not_due.pop(0)
        self._now = max(self._now, window * PERIOD)
        for each in self.began:
            if not each.ended:
                each.met |= {window}

    def _request(self) -> None:
        assert self.row is not None
        self.is_requested = True
        self.row = rule.request_run(self.row, REQUEST_ID, "operator", MAX_LOCK, self.now)

    @property
    def _holder_is_dead(self) -> bool:
        row = self.row
        return row is not None and any(
            replica.is_dead and replica.name == row.locked_by for replica in self.replicas
        )

    def _end_lease(self) -> None:
        row = self.row
        assert row is not None
        dead = EndLease(TASK, row.claim_id, [row.locked_by])
        self.row = rule.end_lease(row, dead, self.now).row

    def _submit(self, n: int) -> None:
        replica = self.replicas[n]
        windows = replica.left.pop(0)
        if replica.has_an_instance:
            replica.skipped.update(windows)
            return
        runs = [self._run(RunKind.SCHEDULE, window, self._claim_of(window)) for window in windows]
        for run, following in pairwise(runs):
            run.following = following
        replica.runs += runs
        replica.submissions.append(runs)
        self._step(replica, came=[runs[0]])

    def _run(self, kind: RunKind, window: int | None, request: Any) -> RunOfTest:
        return RunOfTest(kind, TASK, (TASK, ""), self._now, self._now, work=Work(window, request))

    def _claim_of(self, window: int) -> ClaimRequest:
        return ClaimRequest(
            TASK,
            min_lock=0.9 * PERIOD,
            max_lock=MAX_LOCK,
            run_time=START + timedelta(seconds=window * PERIOD),
            exact=True,
            failover=self.backlogs.failover,
            runs="job",
            claim_id=self._new_id(),
        )

    def _new_id(self) -> UUID:
        self._ids += 1
        return UUID(int=self._ids)

    def _kill(self, n: int) -> None:
        replica = self.replicas[n]
        self.kills_left -= 1
        replica.is_dead = True
        for run in replica.of_state(State.BEGUN):
            run.work.began.ended = "killed"

    def _end(self, n: int, at: int) -> None:
        replica = self.replicas[n]
        run = replica.runs[at]
        work: Work = run.work
        assert self.row is not None
        assert work.began is not None
        token = self.row.token
        release = ReleaseRequest(TASK, work.request.claim_id, RunOutcome(WindowAfter.KEEP, "ok"))
        self.row = rule.release(self.row, release, self.now).row
        work.began.ended = "ok"
        deferred = self._decided_on(replica, LastRun(token, finished=True, dead=False, deaths=0))
        self._step(replica, freed=[(run, 1.0)], found=deferred)

    def _step(self, replica: Simulated, **inputs: Any) -> None:
        step: ToDo = step_of(replica.queue, self._now, WORKERS, **inputs)
        replica.asks += step.asks
        for run in step.given:
            assert run.token.take()
            assert self.row is not None
            run.work.began = Began(run.work.window, self.row.token)
            self.began.append(run.work.began)
        if step.given:
            self._step(replica, begun=step.given)

    # ---- claims ----------------------------------------------------------------------------------

    def _claim(self, n: int) -> None:
        replica = self.replicas[n]
        ask = replica.asks.pop(0)
        answers = [(run, self._claim_outcome(replica, run)) for run in ask.runs]
        self._step(replica, answered=answers)

    def _claim_outcome(self, replica: Simulated, run: RunOfTest) -> ClaimOutcome:
        work: Work = run.work
        answer = self._decided(replica, run)
        if answer is not None and answer.granted:
            return ClaimOutcome.GRANTED
        if answer is None or run.kind is not RunKind.SCHEDULE or not Refusal.of(answer).blocked:
            return ClaimOutcome.REFUSED
        assert self.row is not None
        run_time = work.request.run_time
        came_first = self.row.started_at < run_time and self.row.kind != "manual"
        is_final = self.kept is Rule.DEFER_DUE and came_first
        if self.kept is Rule.LEAVE:
            for each in list(run.backlog)[1:]:
                each.state = State.OVER
            run.following = None
        if self.kept in (Rule.LEAVE, Rule.GO_ON) or is_final:
            return ClaimOutcome.REFUSED
        work.stood_first = self.row.token if came_first else 0
        work.in_the_way = InTheWay(self.row.token, came_first and self.kept is Rule.DEFER)
        work.request = replace(work.request, claim_id=self._new_id())
        return ClaimOutcome.DEFERRED

    def _decided(self, replica: Simulated, run: RunOfTest) -> ClaimAnswer | None:
        request = run.work.request
        decision: rule.Ruling[Any]
        if run.kind in (RunKind.MANUAL, RunKind.TAKEOVER):
            decision = rule.rerun(self.row, request, IN_TIME, replica.name, self.now)
        else:
            times = ClaimTimes((self.now - request.run_time).total_seconds())
            decision = rule.claim(self.row, request, times, replica.name, self.now)
        self.row = decision.row
        answer: ClaimAnswer | None = decision.answer
        return answer

    # ---- the look at the row ---------------------------------------------------------------------

    def _sees_something(self, replica: Simulated) -> bool:
        row = self.row
        if row is None:
            return False
        state = rule.state_of(row, self.now)
        if state.request_id is not None and not replica.is_going_to(RunKind.MANUAL):
            # A claim would be refused while the task runs, so the replica looks when it is over.
            return state.finished or state.dead
        if state.dead and state.is_run_again(failover=self.backlogs.failover):
            return not replica.is_going_to(RunKind.TAKEOVER)
        if any(run.is_held for run in replica.of_state(State.WAITING)):
            return True
        decided = self._decided_on(replica, _last(row, state))
        return any(outlook is not Outlook.WAITS for _run, outlook, _as_of in decided)

    def _look(self, n: int) -> None:
        replica, row = self.replicas[n], self.row
        assert row is not None
        state = rule.state_of(row, self.now)
        if state.request_id is not None and not replica.is_going_to(RunKind.MANUAL):
            asked = manual_run_of(
                TASK, state.request_id, MAX_LOCK, runs="job", claim_id=self._new_id()
            )
            self._come_extra(replica, RunKind.MANUAL, None, asked)
        elif state.dead and state.is_run_again(failover=self.backlogs.failover):
            seconds = (state.window_start - START).total_seconds()
            window = None if state.manual else round(seconds / PERIOD)
            takeover = takeover_of(
                TASK, state.claim_id, state.holder, None, self.backlogs.failover, self._new_id()
            )
            self._come_extra(replica, RunKind.TAKEOVER, window, takeover)
        else:
            self._step(replica, found=self._decided_on(replica, _last(row, state)))

    def _come_extra(
        self, replica: Simulated, kind: RunKind, window: int | None, request: Any
    ) -> None:
        run = self._run(kind, window, request)
        replica.runs.append(run)
        self._step(replica, came=[run])

    def _decided_on(
        self, replica: Simulated, last: LastRun
    ) -> list[tuple[RunOfTest, Outlook, float]]:
        """Return the decisions on the deferred runs."""
        deferred = replica.of_state(State.DEFERRED)
        return [(run, run.work.in_the_way.outlook(last), self._now) for run in deferred]

    # ---- the check at the end --------------------------------------------------------------------

    def found(self) -> list[str]:
        """Return what is wrong in a state without possible events."""
        found = []
        for window in self.backlogs.windows:
            of_window = [each for each in self.began if each.window == window]
            well = [each for each in of_window if each.ended == "ok"]
            if len(well) > 1 or (len(of_window) > 1 and not self.backlogs.failover):
                found.append(f"run twice: {window}")
            has_run = well if self.backlogs.failover else of_window
            if not has_run and self._is_somebodys(window):
                found += self._why_lost(window)
        ended_well = {each.token for each in self.began if each.ended == "ok"}
        for replica in self.replicas:
            for run in replica.runs:
                if run.state is not State.OVER and not replica.is_dead:
                    found.append(f"never over: {run.work.window}")
                if run.work.began and run.work.stood_first in ended_well:
                    found.append(f"run after what stood rightly against it: {run.work.window}")
        return found

    def _is_somebodys(self, window: int) -> bool:
        """Return whether a live replica is to run the window."""
        return any(
            not replica.is_dead
            and window not in replica.skipped
            and any(window in each for each in submitted)
            for replica, submitted in zip(self.replicas, self.backlogs.submitted, strict=True)
        )

    def _is_stood_against(self, window: int) -> bool:
        """Return whether a scheduled run that reached its end went on when the window came due."""
        return any(
            window in each.met and each.ended == "ok" and each.window is not None
            for each in self.began
        )

    def _why_lost(self, window: int) -> list[str]:
        if self._is_stood_against(window):
            return []
        later = [each for each in self.began if each.window is not None and each.window > window]
        return [f"{'overtaken' if later else 'lost'}: {window}"]


@dataclass
class Enumeration:
    """The outcome of an enumeration.

    :ivar states: the number of states
    :ivar ends: the number of states without possible events
    :ivar found: the mistakes in these states with their numbers, and the first path to each
    """

    states: int = 0
    ends: int = 0
    found: Counter[str] = field(default_factory=Counter)
    ways: dict[str, Sequence[str]] = field(default_factory=dict)

    @property
    def kinds(self) -> Counter[str]:
        """The mistakes, without the numbers of run times."""
        kinds: Counter[str] = Counter()
        for found, count in self.found.items():
            kinds[found.split(":")[0]] += count
        return kinds


def enumerate_all(backlogs: Backlogs, kept: Rule) -> Enumeration:
    """Enumerate all states."""
    result = Enumeration()
    first = Fleet(backlogs, kept)
    seen, left = {first.key}, [first]
    while left:
        fleet = left.pop()
        result.states += 1
        actions = fleet.actions()
        if not actions:
            result.ends += 1
            for found in fleet.found():
                result.found[found] += 1
                result.ways.setdefault(found, fleet.path)
        for action in (*actions, *fleet.kill_actions()):
            after = fleet.after(action)
            if after.key not in seen:
                seen.add(after.key)
                left.append(after)
    return result
