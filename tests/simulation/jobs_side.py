"""Replicas with both sides on a virtual clock: real queues of runs beside real lock clients.

A scheduler submits run times, the queue decides, the client claims, and a pool of workers runs the
granted runs. The code that carries out the queue's decisions is a short form of the executor's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any
from uuid import UUID

from apscheduler_tasklock._lock.claims import Claimed
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock._runs.deferred_runs import DeferredRuns, InTheWay, LastRun, Outlook
from apscheduler_tasklock._runs.queue import AllBusy, Ask, RunQueue
from apscheduler_tasklock._runs.run import RunKind, State
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.lock import HeldLock
from tests.simulation import ledger
from tests.simulation.ledger import Question
from tests.simulation.plain import Submitted
from tests.simulation.scenarios import MAX_LOCK, MOST_TAKEOVERS, Replica, Task
from tests.simulation.stepping import SimulatedQueue
from tests.simulation.workers import Pool, PoolError
from tests.simulation.world import BEGIN, CLOCK, START, Process
from tests.support.internals import waiting_in
from tests.support.waist import (
    AnyAttempt,
    ClaimOutcome,
    ClaimRequest,
    Refusal,
    RunOfTest,
    TaskRow,
    manual_run_of,
    takeover_of,
)


@dataclass(frozen=True)
class Job(Task):
    """A job of a scheduler.

    :ivar grace: ``misfire_grace_time``
    :ivar claims: whether the job needs its task's lock
    :ivar coalesce: whether only the last of the run times that a follower keeps is run
    :ivar is_manual: whether its windows are manual runs, which are asked for at these times
    """

    grace: float | None = None
    claims: bool = True
    coalesce: bool = False
    is_manual: bool = False


@dataclass(eq=False)
class Fate:
    """The fate of a run on a replica. Times are on the virtual clock.

    :ivar window: the run time, in seconds from the beginning; ``None`` for a takeover that was not
        granted yet
    :ivar ends: the ends of the run; there must be exactly one
    :ivar is_deferred: whether the run was deferred
    :ivar taken_at: when a worker took the run's token
    :ivar began_at: the times at which the job's function began
    """

    job: Job
    process: Process
    kind: RunKind
    window: float | None
    came: float
    run: RunOfTest | None = None
    given_at: float | None = None
    taken_at: float = -inf
    began_at: list[float] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    ended_at: float = inf
    is_deferred: bool = False

    def __str__(self) -> str:
        ends = ", ".join(self.ends) or "no end"
        return f"{self.kind.value} {self.job.name} {self.window} on {self.process.name}: {ends}"


@dataclass(eq=False)
class Work:
    """What the simulation knows of a run; the queue does not need it."""

    fate: Fate
    request: Any
    claim: AnyAttempt | None = None
    held: HeldLock | None = None
    question: Question | None = None
    over: Callable[[], object] = lambda: None


class JobsReplica(Replica):
    """A replica whose scheduler submits jobs to a pool of workers.

    :param workers: the number of workers; ``None``: no limit
    """

    def __init__(self, story: Any, process: Process, poll_from: float, workers: int | None) -> None:
        super().__init__(story, process, poll_from)
        self.pool = Pool(self.world, process, workers)
        self.fates: list[Fate] = []
        self.submitted: list[Submitted] = []
        self.stopped_at = inf
        self.asked = 0  # number of statements
        self._missed_at = -inf  # when a missed run was given last
        self._jobs_story: Any = story
        self._given: dict[RunOfTest, None] = {}
        self._requested: set[UUID] = set()
        self._deferred_runs = DeferredRuns()
        self._releasing = 0
        queue = RunQueue(CLOCK.jittered)
        self.queue = SimulatedQueue(self._client.thread, queue, lambda: self.pool.count, self)

    # ---- the scheduler ---------------------------------------------------------------------------

    def submit_at(self, at: float, job: Job, windows: Sequence[float]) -> None:
        """Submit run times together, at a time of the replica's own clock."""
        came = BEGIN + at - self.process.skew
        self.start(partial(self._submit, job, windows), came - BEGIN)

    def _submit(self, job: Job, windows: Sequence[float]) -> None:
        if self.stopped_at < inf:
            return
        now, skew = self.world.now, self.process.skew
        due = [BEGIN + window - skew for window in windows]
        self.submitted.append(Submitted(job.name, now, due, job.takes, job.grace))
        runs = [
            self._run_of(job, RunKind.SCHEDULE, window, due_at, job.claim_of(window))
            for window, due_at in zip(windows, due, strict=True)
        ]
        for run, following in pairwise(runs):
            run.following = following
        self._come(runs[0])

    def _run_of(
        self, job: Job, kind: RunKind, window: float | None, due_at: float, request: Any
    ) -> RunOfTest:
        now = self.world.now
        fate = Fate(job, self.process, kind, window, now)
        grace = job.grace if kind is RunKind.SCHEDULE else None
        work = Work(fate, request)
        run = RunOfTest(
            kind, job.name, (job.name, "default"), due_at, now, grace, claims=job.claims, work=work
        )
        fate.run = run
        self.fates.append(fate)
        return run

    def _come(self, run: RunOfTest) -> None:
        self.queue.came(run)

    def stop_at(self, at: float, *, closes: bool = True) -> None:
        """Stop gracefully at a time.

        :param closes: whether the client claims nothing any more; else only the queue stops
        """
        self.start(partial(self._stop, closes=closes), at)

    def _stop(self, *, closes: bool) -> None:
        """Begin a graceful stop: runs go on to their ends, and no run begins."""
        self.stopped_at = self.world.now
        self.world.note(self.process.name, "   stops")
        if closes:
            self._client.stop_claiming()
        self.queue.call(self._withdraw_given)
        self.queue.stop()

    @property
    def is_idle(self) -> bool:
        is_idle = self.queue.is_idle and self.pool.is_idle and not self._releasing
        waits = waiting_in(self._client.thread) or self._taking or self._deferred_runs.task_names
        return self.process.is_dead or (is_idle and not waits)

    # ---- the thread: the queue's decisions -------------------------------------------------------

    @property
    def is_ending(self) -> bool:
        return False

    def wake_look(self) -> None:
        """Do nothing, because the next look follows anyway."""

    def report_all_busy(self, all_busy: AllBusy) -> None:
        self.world.note(self.process.name, f"   has no worker free for {all_busy.longest:.0f} s")

    def look(self) -> float:
        return inf

    def ask(self, ask: Ask) -> None:
        """Ask the database for runs."""
        self.asked += 1
        self._check_ask(ask)
        names = ", ".join(run.task_name for run in ask.runs)
        self.world.note(self.process.name, f"   asks for {ask.most} of {names}")
        asked: dict[AnyAttempt, RunOfTest] = {}
        for run in ask.runs:
            claim = self._claim_for(run.work)
            if isinstance(claim, TaskLockError):
                self._take_answer(run, claim)
            else:
                asked[claim] = run

        def tell(decided: Sequence[tuple[AnyAttempt, Claimed]]) -> None:
            for claim, claimed in decided:
                self._take_answer(asked[claim], claimed)

        if asked:
            most = ask.most if ask.runs[0].kind.has_limit else None
            self._client.begin_claims(list(asked), most, tell)

    def _check_ask(self, ask: Ask) -> None:
        """Note what is wrong with an ask, before its answer."""
        wrong = self._jobs_story.wrong
        unbegun = [run for run in self._given if run.state is State.GIVEN]
        if unbegun and self.pool.count is not None:
            wrong.append(f"asked although {unbegun[0].work.fate} waits for a worker")
        if self.world.now > self.stopped_at:
            wrong.append(f"asked after the stop: {ask.runs[0].work.fate}")
        tasks = [run.task_name for run in ask.runs]
        if len(tasks) > len(set(tasks)):
            wrong.append(f"asked for two runs of a task at once: {tasks}")

    def _claim_for(self, work: Work) -> AnyAttempt | TaskLockError:
        """Return a run's claim, or the error of making it."""
        if work.question is None:
            fate = work.fate
            what = fate.kind.value if fate.window is None else f"window {fate.window:g}"
            name, now = fate.job.name, self.world.now
            work.question = Question(name, what, self.process, now, fate.window)
            self._story.ledger.questions.append(work.question)
        try:
            work.claim = work.claim or self._client.attempt(work.request)
        except TaskLockError as error:
            return error
        return work.claim

    def _take_answer(self, run: RunOfTest, claimed: Claimed) -> None:
        self.queue.answered(run, self._claim_outcome(run, claimed))

    def _claim_outcome(self, run: RunOfTest, claimed: Claimed) -> ClaimOutcome:
        work: Work = run.work
        if isinstance(claimed, ClaimOutcome):
            return claimed
        question = work.question
        assert question is not None
        question.answered = self.world.now
        if isinstance(claimed, Refusal):
            question.answer, question.holder = claimed.reason, claimed.holder
        elif isinstance(claimed, TaskLockError):
            question.answer = "withdrawn" if self.stopped_at < inf else f"failed: {claimed}"
        else:
            question.answer = "nothing" if claimed is None else "granted"
        self.world.note(self.process.name, f"   {work.fate}: {question.answer}")
        if isinstance(claimed, HeldLock):
            work.held = claimed
            self._asked[claimed.claim_id] = question.asked
            return ClaimOutcome.GRANTED
        if isinstance(claimed, TaskLockError):
            return ClaimOutcome.FAILED
        if isinstance(claimed, Refusal) and claimed.blocked and run.kind is RunKind.SCHEDULE:
            self._keep(run, claimed)
            return ClaimOutcome.DEFERRED
        return ClaimOutcome.REFUSED

    def _keep(self, run: RunOfTest, refusal: Refusal) -> None:
        work: Work = run.work
        work.fate.is_deferred = True
        # The next ask needs a new claim, because this one is over.
        work.claim = None
        assert work.fate.window is not None
        work.request = work.fate.job.claim_of(work.fate.window)
        work.question = None
        came_first = self._came_first(work.request, refusal)
        in_the_way = InTheWay(refusal.token, came_first, work.request.run_time)
        self._deferred_runs.add(run, in_the_way, partial(self._decide_deferred, run))

    def _came_first(self, request: ClaimRequest, refusal: Refusal) -> bool:
        """Return whether the run in the way began before the run that is deferred was due."""
        row = self._story.database.rows.rows[request.task_name]
        is_same, due = row.token == refusal.token, request.run_time
        assert due is not None
        return is_same and row.started_at < due and row.kind != "manual"

    def give(self, run: RunOfTest) -> None:
        """Give a run to the pool."""
        fate: Fate = run.work.fate
        self._given[run] = None
        fate.given_at = self.world.now
        try:
            self.pool.submit(partial(self._work_on, run))
        except PoolError:
            if run.token.take():
                self._not_given(run)
        claim = run.work.claim
        if run.is_missed:
            self._missed_at = self.world.now
        # A claim whose answer was lost may have been granted when more workers were free. And a
        # missed run may get the worker of a claim that has waited for its answer for long.
        is_known = claim is not None and not claim.in_doubt
        is_known = is_known and run.work.question.asked > self._missed_at
        if self.pool.queued and is_known and not self.is_shared:
            self._jobs_story.wrong.append(f"claimed, and no worker was free for it: {fate}")

    @property
    def is_shared(self) -> bool:
        """Whether the pool may have other work than the queue's, or unlocked runs before it."""
        return self._jobs_story.scenario.is_shared

    def _not_given(self, run: RunOfTest) -> None:
        if self._given.pop(run, self) is not None:
            return
        self._hand_over(run.work)
        self.queue.not_given(run)
        self._end(run, "not taken")

    def end_refused(self, run: RunOfTest, outcome: ClaimOutcome) -> None:
        self._end(run, outcome.value)

    def withdraw(self, run: RunOfTest) -> None:
        """Withdraw a run that has not begun, and hand its claim over."""
        work: Work = run.work
        if work.held is not None:
            self._hand_over(work)
        elif work.claim is not None:
            self._client.withdraw(work.claim)
        self._end(run, "withdrawn")

    def _withdraw_given(self) -> None:
        for run in list(self._given):
            if run.work.held is None or not run.token.take():
                continue
            if self._given.pop(run, self) is None:
                self.queue.runs.freed(run, 0.0)
                self.withdraw(run)

    def _hand_over(self, work: Work) -> None:
        held = work.held
        if held is not None:
            held.cut()
            self._begin_release(held, RunOutcome(WindowAfter.HAND_OVER))

    def _end(self, run: RunOfTest, how: str) -> None:
        work: Work = run.work
        fate = work.fate
        fate.ends.append(how)
        fate.ended_at = self.world.now
        self._deferred_runs.take(run)
        question = work.question
        if question is not None and question.answer is None:
            question.answer, question.answered = how, self.world.now
        self.world.note(self.process.name, f"   {fate}")
        work.over()

    # ---- a worker --------------------------------------------------------------------------------

    def _work_on(self, run: RunOfTest) -> None:
        work: Work = run.work
        if not run.token.take():
            return
        work.fate.taken_at = self.world.now
        self.queue.begun(run)
        took, how = 0.0, "missed"
        if not run.is_missed:
            how = "lost" if work.held is not None and not self._goes_on(work, work.held) else "ran"
            if how == "ran":
                took = self._run_job(run)
        if self._given.pop(run, self) is None:
            self._end(run, how)
            self.queue.freed(run, took)

    def _goes_on(self, work: Work, held: HeldLock) -> bool:
        self._story.database.step(self.process, f"begin {held.name}", "begin")
        stands = self._stands(held)
        if not stands:
            self._hand_over(work)
        return stands

    def _run_job(self, run: RunOfTest) -> float:
        """Run a job's function under its lock, and begin the release; return how long it took.

        ``freed`` is posted later, when the pool has reported the run.
        """
        work: Work = run.work
        fate, held, began = work.fate, work.held, self.world.now
        name = fate.job.name
        fate.began_at.append(began)
        asked = began if held is None else self._asked[held.claim_id]
        window = fate.window
        attempt = 1 if held is None else held.attempt
        entry = ledger.Run(name, self.process.name, window, began, asked=asked, attempt=attempt)
        if held is not None:
            self._story.ledger.runs.append(entry)
        self.world.note(self.process.name, f"   {name} {window} begins")
        self._call_function(fate)
        took = self.world.now - began
        entry.lost, entry.ended = held is not None and held.lost, self.world.now
        self.world.note(self.process.name, f"   {name} {window} ends")
        if held is not None:
            self._story.database.step(self.process, f"end {name}", "end")
            outcome = self._outcome_of(fate, held)
            entry.failed = outcome.outcome == "error"
            entry.opens = self._opens(fate, outcome)
            self._begin_release(held, outcome)
            self._note_ended(run, held)
        return took

    def _call_function(self, fate: Fate) -> None:
        self.world.sleep(fate.job.takes)

    def _outcome_of(self, fate: Fate, held: HeldLock) -> RunOutcome:
        """Return the outcome of a run that has ended."""
        return RunOutcome(WindowAfter.KEEP, "ok")

    def _opens(self, fate: Fate, outcome: RunOutcome) -> bool:
        """Return whether the end of a run opens its window."""
        return outcome.window is WindowAfter.OPEN

    def _note_ended(self, run: RunOfTest, held: HeldLock) -> None:
        """Note that a run has ended, so that the runs that are deferred because of it go on."""
        last = LastRun(held.token, finished=True, dead=False, deaths=0, as_of=self.world.now)
        self._deferred_runs.decide(run.task_name, run.job, last)

    def _begin_release(self, held: HeldLock, end: RunOutcome) -> None:
        question = Question(held.name, "release", self.process, self.world.now)
        self._story.ledger.questions.append(question)

        def tell(future: Future[Any]) -> None:
            self._releasing -= 1
            error = future.exception()
            question.answer = "released" if error is None else f"failed: {error}"
            question.answered = self.world.now

        self._releasing += 1
        self._client.begin_release(held, end).future.add_done_callback(tell)

    # ---- the look at the rows --------------------------------------------------------------------

    def _act_on(self, state: TaskRow, task: Task) -> None:
        """Handle the state of a row."""
        assert isinstance(task, Job)
        if self.stopped_at < inf:
            return
        if state.request_id is not None and state.request_id not in self._requested:
            self._ask_for_manual_run(task, state, state.request_id)
        is_dead = state.dead and (state.handed_over or self._client.stable)
        if is_dead and state.is_run_again(failover=task.failover):
            if state.reason_to_give_up(MOST_TAKEOVERS) is not None:
                self._give_up(state)
            elif state.claim_id not in self._taking:
                self._take_over(task, state)
            return
        last = LastRun(state.token, state.finished, is_dead, state.deaths, self.looked_from, state)
        for job in self._deferred_runs.jobs_of(task.name):
            self._deferred_runs.decide(task.name, job, last)

    def _ask_for_manual_run(self, job: Job, state: TaskRow, request_id: UUID) -> None:
        request = manual_run_of(
            job.name, request_id, MAX_LOCK, job.lease, job.failover, f"job of {job.name}"
        )
        window = max(each for each in job.windows if each <= self.world.now - BEGIN)
        self._come_extra(job, RunKind.MANUAL, window, request, self._requested, request_id)

    def _take_over(self, task: Task, state: TaskRow) -> None:
        assert isinstance(task, Job)
        window = window_of(task, state.window_start)
        request = takeover_of(task.name, state.claim_id, state.holder, task.lease, task.failover)
        self._come_extra(task, RunKind.TAKEOVER, window, request, self._taking, state.claim_id)

    def _come_extra(
        self, job: Job, kind: RunKind, window: float, request: Any, open_ones: set[Any], key: Any
    ) -> None:
        """Submit a run that a look has found, unless the same run is not over yet."""
        run = self._run_of(job, kind, window, self.world.now, request)
        open_ones.add(key)
        run.work.over = partial(open_ones.discard, key)
        self._come(run)

    def _decide_deferred(self, run: RunOfTest, outlook: Outlook, as_of: float) -> None:
        self.queue.found(run, outlook, as_of)

    @property
    def _watched(self) -> Sequence[str]:
        return sorted(self._deferred_runs.task_names)


def window_of(task: Task, start: datetime) -> float:
    """Return the run time of a window, by the window's start in a row."""
    at = (start - START).total_seconds()
    return min(task.windows, key=lambda each: abs(each - at))
