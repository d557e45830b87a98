"""Scenarios of replicas that claim, hold, renew, release and take over, as executors do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import inf
from typing import Any
from uuid import uuid4

import pytest

from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock._lock.statements import LEADER
from apscheduler_tasklock._runs import executor_run
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.testing import rule
from tests.simulation.faults import FAULTS, PAUSE, SLOW, STEPS, Plan, Planned
from tests.simulation.ledger import Ledger, Promise, Question, Run, Wanted, violations
from tests.simulation.side import Database, make_client
from tests.simulation.world import BEGIN, CLOCK, START, Process, World
from tests.support.internals import waiting_in
from tests.support.waist import ClaimRequest, GiveUp, Refusal, Registration, TaskRow, takeover_of

LEASE = 15.0
MAX_LOCK = 1_000.0
POLL_INTERVAL = 5.0
# The seconds between two checks whether a story is over.
SLICE = 5.0
MOST_TAKEOVERS = 3
# Limits the failed stories that are printed in full.
MOST_TOLD = 3
# Faults that may cost a window without failover: its holder is gone, or the database accepts
# nothing for as long as a claim is tried.
COSTLY = (
    "kill",
    "pause",
    "short pause",
    "cut off",
    "outage",
    "long outage",
    "rejected",
    "always",
    "late",
    "slow database",
)
# Faults that a claim survives, because it is sent again.
TRIFLES = (
    "lost before",
    "lost after",
    "hung",
    "no answer",
    "held up 1 s",
    "held up beyond the claim",
    "slow",
    "step ahead",
    "step back",
    "locked",
    "kill before",
    "kill after",
)
# The statements of looks.
OF_LOOKS = ("read", "lead")
# Faults that delay a release for longer than anybody waits for it.
KEEPS_RELEASES = ("always", "cut off", "outage", "long outage", "rejected", "pause", "short pause")


@dataclass(frozen=True)
class Task:
    """A job that all replicas have.

    :ivar windows: the run times, in seconds from the beginning
    :ivar takes: the length of a run
    """

    name: str
    windows: Sequence[float]
    period: float = 10.0
    takes: float = 2.0
    lease: float | None = LEASE
    failover: bool = False

    def claim_of(self, window: float) -> ClaimRequest:
        """Return the claim of a run time."""
        return ClaimRequest(
            self.name,
            min_lock=0.9 * self.period,
            max_lock=MAX_LOCK,
            run_time=START + timedelta(seconds=window),
            exact=True,
            lease=self.lease,
            failover=self.failover,
            runs=f"job of {self.name}",
            next_in=self.period,
        )


class Replica:
    """A replica, without APScheduler."""

    def __init__(self, story: Story, process: Process, poll_from: float) -> None:
        self.world = story.world
        self.process = process
        self._story = story
        self._client = make_client(story.world, story.database, process)
        self._kept: dict[str, list[float]] = {}
        self.looked_from = 0.0
        self._taking: set[object] = set()
        self._asked: dict[object, float] = {}  # when each granted claim was asked for
        # The replica asks once, because an executor has checked its tables at its start.
        self.world.start(process, self._ask, 0.5, daemon=True)
        if poll_from < inf:
            self.world.start(self.process, self._poll, poll_from, daemon=True)

    def start(self, function: Callable[[], object], at: float) -> None:
        """Start a thread, at a time in seconds from the beginning."""
        self.world.start(self.process, function, at - (self.world.now - BEGIN))

    @property
    def is_idle(self) -> bool:
        """Whether the replica has nothing left to do."""
        waits = waiting_in(self._client.thread) or self._kept or self._taking
        return self.process.is_dead or not waits

    def run_windows(self, task: Task, windows: Sequence[float]) -> None:
        """Run the windows of one submission, one after the other."""
        for window in windows:
            self._run_window(task, window)

    def _run_window(self, task: Task, window: float) -> None:
        request = task.claim_of(window)
        claimed = self._claim(request, f"window {window:g}", window)
        if isinstance(claimed, Refusal) and claimed.blocked:
            self._kept.setdefault(task.name, []).append(window)
        elif isinstance(claimed, HeldLock):
            self._run(task, window, claimed)

    def _claim(self, request: Any, what: str, window: object = None) -> HeldLock | Refusal | None:
        question = Question(request.task_name, what, self.process, self.world.now, window)
        self._story.ledger.questions.append(question)
        claimed: HeldLock | Refusal | None = None
        try:
            claimed = self._client.claim(request)
        except TaskLockError as error:
            question.answer = f"failed: {error}"
        else:
            if isinstance(claimed, Refusal):
                question.answer, question.holder = claimed.reason, claimed.holder
            else:
                question.answer = "nothing" if claimed is None else "granted"
            if isinstance(claimed, HeldLock):
                self._asked[claimed.claim_id] = question.asked
        question.answered = self.world.now
        self.world.note(self.process.name, f"   {what} of {request.task_name}: {question.answer}")
        return claimed

    def _run(self, task: Task, window: object, held: HeldLock) -> None:
        self._story.database.step(self.process, f"begin {task.name}", "begin")
        if not self._stands(held):
            is_hold = isinstance(window, str)
            self._release(held, RunOutcome(WindowAfter.OPEN if is_hold else WindowAfter.HAND_OVER))
            return
        run = Run(task.name, self.process.name, window, self.world.now)
        run.asked = self._asked[held.claim_id]
        self._story.ledger.runs.append(run)
        self.world.note(self.process.name, f"   {task.name} {window} begins")
        self.world.sleep(task.takes)
        run.lost = held.lost
        run.ended = self.world.now
        self.world.note(self.process.name, f"   {task.name} {window} ends")
        self._story.database.step(self.process, f"end {task.name}", "end")
        self._release(held, RunOutcome(WindowAfter.KEEP, "ok"))

    def _stands(self, held: HeldLock) -> bool:
        """Return whether a claim's job may begin, as in ``Attempt``."""
        if held.lost or not _is_aged(held):
            return not held.lost
        return self._client.renew_now(held) and not _is_aged(held)

    def _release(self, held: HeldLock, end: RunOutcome) -> None:
        question = Question(held.name, "release", self.process, self.world.now)
        self._story.ledger.questions.append(question)
        try:
            released = self._client.release(held, end)
        except TaskLockError as error:
            question.answer = f"failed: {error}"
        else:
            question.answer = "nothing" if released is None else "released"
        question.answered = self.world.now
        self.world.note(self.process.name, f"   release of {held.name}: {question.answer}")

    def hold(self, task: Task, times: int = 1, attempts: int = 40) -> None:
        """Hold a task several times in a row. A refused hold is asked for again."""
        for number in range(times):
            who = f"{self.process.name}/{number}"
            for _ in range(attempts):
                request = ClaimRequest(task.name, min_lock=0.0, max_lock=MAX_LOCK, lease=task.lease)
                claimed = self._claim(request, f"hold {who}")
                if isinstance(claimed, HeldLock):
                    before = len(self._story.ledger.runs)
                    self._run(task, who, claimed)
                    if len(self._story.ledger.runs) > before:
                        break
                self.world.sleep(2.0)

    def ask_often(self, times: int) -> None:
        """Ask for many requests at once, as in a burst."""
        for _ in range(times):
            self.world.start(self.process, self._ask)

    def _ask(self) -> None:
        question = Question("", "look", self.process, self.world.now)
        self._story.ledger.questions.append(question)
        try:
            self._client.ask(self._client.reading(["none"]))
        except TaskLockError as error:
            question.answer = f"failed: {error}"
        else:
            question.answer = "read"

    def _poll(self) -> None:
        tasks = {task.name: task for task in self._story.scenario.tasks if task.windows}
        while True:
            try:
                self.looked_from = self.world.now
                states = self._client.ask(self._client.reading(list(tasks), self._watched))
            except TaskLockError as error:
                self.world.note(self.process.name, f"   look: {error}")
                states = []
            for state in states:
                self._act_on(state, tasks[state.task_name])
            self.world.sleep(POLL_INTERVAL)

    @property
    def _watched(self) -> Sequence[str]:
        """The tasks whose states a look returns in any case."""
        return list(self._kept)

    def _act_on(self, state: TaskRow, task: Task) -> None:
        """Handle the state of a row, as in ``Watch``."""
        if state.finished:
            self._run_kept(task)
            return
        if not state.dead or not (state.handed_over or self._client.stable):
            return
        if not state.is_run_again(failover=task.failover):
            self._run_kept(task)
        elif state.reason_to_give_up(MOST_TAKEOVERS) is not None:
            self._give_up(state)
        elif state.claim_id not in self._taking:
            self._taking.add(state.claim_id)
            self.world.start(self.process, partial(self._take_over, task, state))

    def _give_up(self, state: TaskRow) -> None:
        try:
            self._client.ask(self._client.carrying_out(GiveUp(state.task_name, state.claim_id)))
        except TaskLockError as error:
            self.world.note(self.process.name, f"   giving up: {error}")

    def _take_over(self, task: Task, state: TaskRow) -> None:
        request = takeover_of(task.name, state.claim_id, state.holder, task.lease, task.failover)
        claimed = self._claim(request, "takeover")
        self._taking.discard(state.claim_id)
        if isinstance(claimed, HeldLock):
            start = (claimed.window_start - START).total_seconds()
            window = min(task.windows, key=lambda each: abs(each - start))
            self._run(task, window, claimed)

    def _run_kept(self, task: Task) -> None:
        kept = self._kept.pop(task.name, [])
        if kept:
            self.world.start(self.process, partial(self.run_windows, task, kept))


def _is_aged(held: HeldLock) -> bool:
    """Return whether little of a claim's lease is left."""
    return held.lease is not None and held.lease_left < held.lease * executor_run.LEAST_OF_LEASE


@dataclass(frozen=True)
class Scenario:
    """The actions of replicas, and the time in which they must be over.

    :ivar act: starts the actions
    :ivar polls: whether the replicas look for dead runs
    :ivar lasts: the limit of the time, in seconds
    :ivar known: tasks that have a row at the beginning
    :ivar looks: the time in which looks are places, too. It is short because there are many looks.
    """

    name: str
    tasks: Sequence[Task]
    act: Callable[[Story], object]
    replicas: int = 2
    polls: bool = True
    lasts: float = 200.0
    holds: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    looks: tuple[float, float] = (0.0, 0.0)

    @property
    def lease(self) -> float:
        """The shortest lease of the scenario's claims."""
        return min(task.lease or LEASE for task in self.tasks)


@dataclass
class Story:
    """One execution of a scenario, with planned faults.

    :ivar found: the broken promises
    """

    scenario: Scenario
    planned: tuple[Planned, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    replicas: list[Replica] = field(default_factory=list)
    found: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.plan = Plan(self.planned)
        self.world = world = CLOCK.world = World(seed=len(scenario.name))
        self.database = Database(world, self.plan, scenario.lease)
        for name in scenario.known:
            self._let_be_known(name)
        names = "ABCDEF"[: scenario.replicas]
        world.processes += [Process(name, 0.2 * n) for n, name in enumerate(names)]
        for n, process in enumerate(world.processes):
            poll_from = 1.0 + 1.7 * n if scenario.polls else inf
            self.replicas.append(self._make_replica(process, poll_from))
        scenario.act(self)
        try:
            while not self._is_over:
                world.run(world.now + SLICE)
            self.found = self._judged()
        finally:
            world.close()

    def _make_replica(self, process: Process, poll_from: float) -> Any:
        return Replica(self, process, poll_from)

    def _let_be_known(self, name: str) -> None:
        task = Registration(name, "", None, 60.0, 0.0, "")
        now = self.world.database_time()
        decision = rule.register(None, task, uuid4(), now)
        assert decision.row is not None
        self.database.rows.rows[name] = decision.row

    @property
    def _is_over(self) -> bool:
        world = self.world
        # A clock that was set back delays the discovery of a dead holder by as much.
        lasts = self.scenario.lasts - min(0.0, world.database_ahead)
        lasts += PAUSE * max(0, len(self.planned) - 1)
        return world.now >= BEGIN + lasts or (
            world.is_idle
            and all(replica.is_idle for replica in self.replicas)
            and all(row.finished for row in self._rows)
        )

    def _judged(self) -> list[str]:
        found = violations(self.ledger, self._wanted, self._promise)
        return found + self._held_by_nobody()

    @property
    def _promise(self) -> Promise:
        scenario, injected = self.scenario, self.plan.injected
        return Promise(
            processes={process.name: process for process in self.world.processes},
            lease=scenario.lease,
            failover=frozenset(task.name for task in scenario.tasks if task.failover),
            holds=frozenset(scenario.holds),
            costly=any(each.startswith(COSTLY) for each in injected),
            needless=all(each in TRIFLES for each in injected),
            hopeless="slow database" in injected and scenario.lease < 2 * SLOW,
            own_in_the_way=any(each.startswith(KEEPS_RELEASES) for each in injected),
            steps_ahead=self.world.steps_ahead,
        )

    @property
    def _wanted(self) -> Sequence[Wanted]:
        return [
            Wanted(task.name, window, self.world.processes)
            for task in self.scenario.tasks
            for window in task.windows
        ]

    @property
    def _rows(self) -> Sequence[rule.Row]:
        """The rows of tasks. A leader's row is not one of them."""
        rows = self.database.rows.rows.values()
        return [row for row in rows if not row.task_name.startswith(LEADER)]

    def _held_by_nobody(self) -> list[str]:
        """Return the tasks that are claimed at the end by a replica that was not killed."""
        dead = {process.name for process in self.world.processes if process.is_dead}
        return [
            f"held by nobody: {row.task_name}, which {row.locked_by} claimed"
            for row in self._rows
            if not row.finished and row.locked_by not in dead
        ]

    @property
    def singles(self) -> list[Planned]:
        """Every fault at every place of this story. The story itself must have no faults."""
        since, until = self.scenario.looks
        return [
            Planned(place.number, fault)
            for place in self.plan.places
            if place.group not in OF_LOOKS or since <= place.at <= until
            for fault in (STEPS if place.carry_out is None else FAULTS)
        ]

    def __str__(self) -> str:
        planned = ", ".join(f"{each.fault!r} at #{each.at}" for each in self.planned)
        lines = [f"{self.scenario.name}: {planned or 'no fault'}", *self.found]
        lines += [f"{at:9.3f} {who:<9} {what}" for at, who, what in self.world.trace]
        return "\n".join(lines)


def check(stories: Sequence[Story], what: str) -> None:
    """Fail if there are stories that went wrong, and show some of them."""
    if stories:
        kinds = Counter(found.split(":")[0] for story in stories for found in story.found)
        full = "\n\n".join(str(story) for story in stories[:MOST_TOLD])
        pytest.fail(f"{len(stories)} of {what} went wrong: {dict(kinds)}\n\n{full}")


def _offset(story: Story, task: Task, *, apart: float = 0.3) -> None:
    """Let each replica run the windows of a task, a little later than the replica before it."""
    for n, replica in enumerate(story.replicas):
        for window in task.windows:
            replica.start(partial(replica.run_windows, task, [window]), window + apart * n)


def _all_tasks(story: Story) -> None:
    for task in story.scenario.tasks:
        _offset(story, task)


def _at_once(story: Story) -> None:
    for task in story.scenario.tasks:
        _offset(story, task, apart=0.0)


def _backlog(story: Story) -> None:
    [task] = story.scenario.tasks
    for n, replica in enumerate(story.replicas):
        replica.start(partial(replica.run_windows, task, task.windows), 25.0 + 0.3 * n)


def kill_at(story: Any, at: float) -> None:
    """Kill the first replica, unless a fault has killed it before."""
    process = story.replicas[0].process

    def kill() -> None:
        if process.killed_at is None:
            process.killed_at = story.world.now
            story.world.note(process.name, "   is killed")

    story.world.call_at(BEGIN + at, kill)


def _failover(story: Story) -> None:
    _all_tasks(story)
    kill_at(story, 18.0)


def _lost(story: Story) -> None:
    _all_tasks(story)
    process = story.replicas[0].process

    def pause() -> None:
        process.pause(story.world.now, 40.0)
        story.world.note(process.name, "   is stopped for 40 s")

    story.world.call_at(BEGIN + 17.0, pause)


def _holds(story: Story) -> None:
    task, another = story.scenario.tasks
    first, second = story.replicas
    first.start(partial(first.hold, task, 2), 10.0)
    second.start(partial(second.hold, task), 11.0)
    second.start(partial(second.hold, another, attempts=1), 14.0)


def _busy(story: Story) -> None:
    _all_tasks(story)
    holder = story.replicas[0]
    holder.start(partial(holder.ask_often, 9), 14.5)


SCENARIOS = (
    Scenario("windows", [Task("w", (10.0, 20.0, 30.0))], _all_tasks),
    Scenario("together", [Task(name, (10.0, 20.0)) for name in "klm"], _at_once),
    Scenario(
        "hold",
        [Task("h", (), takes=3.0, lease=None), Task("g", (), lease=None)],
        _holds,
        polls=False,
        holds=("g", "h"),
        known=("g", "h"),
    ),
    Scenario("backlog", [Task("b", (10.0, 20.0), takes=3.0, failover=True)], _backlog),
    Scenario(
        "failover",
        [Task("f", (10.0,), takes=20.0, failover=True)],
        _failover,
        replicas=3,
        looks=(25.0, 38.0),
    ),
    Scenario("lost lock", [Task("l", (10.0,), 100.0, takes=50.0, failover=True)], _lost),
    Scenario("renewals", [Task("r", (10.0, 40.0), 30.0, takes=20.0, failover=True)], _all_tasks),
    Scenario("overrun", [Task("o", (10.0, 30.0), 20.0, takes=25.0)], _all_tasks),
    Scenario("short lease", [Task("s", (10.0,), takes=3.0, lease=2.0, failover=True)], _all_tasks),
    Scenario("busy", [Task("y", (10.0,), 60.0, takes=30.0, failover=True)], _busy),
)
