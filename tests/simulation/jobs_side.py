"""Replicas with both sides on a virtual clock: real runs of executors beside real lock clients.

A scheduler submits run times, and the library does the rest: its ``ExecutorRuns`` carry out what
their queues decide, the client claims, and APScheduler's own code runs the granted runs in a pool
of workers. What the tests add watches the runs, and keeps them as they go.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from apscheduler.events import EVENT_JOB_ERROR
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._lock.claims import Claimed
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock._runs.deferred_runs import DeferredRuns, LastRun
from apscheduler_tasklock._runs.queue import AllBusy, Ask
from apscheduler_tasklock._runs.run import RunKind, State
from apscheduler_tasklock.events import TaskLockEvent
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.options import LockOptions
from tests.simulation import ledger
from tests.simulation.ledger import Question
from tests.simulation.plain import Submitted
from tests.simulation.replica import SimulatedWorkers
from tests.simulation.scenarios import MAX_LOCK, MOST_TAKEOVERS, Replica, Task
from tests.simulation.workers import PoolError
from tests.simulation.world import BEGIN, START, Process
from tests.support.internals import waiting_in
from tests.support.waist import (
    ActiveSubmissions,
    BlockedTasks,
    ClaimOutcome,
    ExecutorParts,
    ExecutorRun,
    ExecutorRuns,
    KnownTasks,
    Leadership,
    Notifier,
    PlainFuture,
    Refusal,
    Release,
    Submission,
    TaskRow,
    intercept_reports,
    manual_run_of,
    new_claim_ids,
    retry_of,
    takeover_of,
)

JOBSTORE = "default"


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

    @property
    def trigger(self) -> Any:
        """The trigger, which gives the first run time, and one after each period."""
        first = START + timedelta(seconds=self.windows[0])
        return IntervalTrigger(seconds=self.period, start_date=first, timezone=timezone.utc)

    @property
    def one_off(self) -> bool:
        """Whether the job has one run time only."""
        return False

    def options_on(self, process: Process) -> LockOptions:
        """Return the options that a replica has."""
        return LockOptions(failover=self.failover)


@dataclass(eq=False)
class SchedulersJob:
    """A scenario's job, as APScheduler and the library see it on a replica."""

    job: Job
    replica: JobsReplica
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = self.name = self.job.name
        self.func_ref = f"simulated:{self.id}"
        self.misfire_grace_time = self.job.grace
        self.coalesce = self.job.coalesce

    def func(self) -> None:
        """Run the job."""
        run = _running.get()
        assert run is not None
        self.replica.run_job(run)


# The run whose function is running.
_running: ContextVar[SimulatedRun | None] = ContextVar("running", default=None)


class SimulatedRun(ExecutorRun):
    """The real run of an executor, which keeps what became of it. Times are on the virtual clock.

    :ivar scenario_job: the scenario's job
    :ivar window: the run time, in seconds from the beginning
    :ivar taken_at: when a worker took the run's token
    :ivar called_at: the times at which the job's function began
    :ivar how: the end to note when the library calls the run over
    :ivar ends: the ends of the run; there must be exactly one
    :ivar question: the run's claim
    :ivar entry: what the ledger has of the run
    """

    def __init__(self, submission: Submission, run_time: datetime, *args: Any, **more: Any) -> None:
        super().__init__(submission, run_time, *args, **more)
        self.replica: JobsReplica = submission.job.replica
        self.scenario_job: Job = submission.job.job
        self.window = (run_time - START).total_seconds()
        self.taken_at = -inf
        self.called_at: list[float] = []
        self.how = ""
        self.ends: list[str] = []
        self.ended_at = inf
        self.question: Question | None = None
        self.entry: ledger.Run | None = None
        self.replica.all_runs.append(self)

    def __str__(self) -> str:
        ends, where = ", ".join(self.ends) or "no end", self.replica.process.name
        return f"{self.kind.value} {self.task_name} {self.window} on {where}: {ends}"

    def request(self) -> Any:
        """Return the request of the claim: the scenario's, whose run times follow no trigger."""
        if self._asked is None:
            self._asked = replace(self.replica.claim_of(self), claim_id=self._claim_id)
        return self._asked

    def _send_release(self, outcome: RunOutcome) -> Release:
        release = super()._send_release(outcome)
        self.replica.note_release(self, outcome, release)
        return release


class SimulatedRuns(ExecutorRuns):
    """The real runs of an executor, which tell their replica how they go."""

    def __init__(self, replica: JobsReplica, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._replica = replica

    @property
    def is_idle(self) -> bool:
        """Whether no run waits, is asked for, or goes on."""
        queues = (self._functions, self._coroutines)
        return all(queue.runs.is_idle and not queue.messages for queue in queues)

    @property
    def unbegun(self) -> list[Any]:
        """The runs that were given, and have not begun."""
        return [run for run in self._given if run.state is State.GIVEN]

    def ask(self, ask: Ask) -> None:
        self._replica.note_ask(ask)
        super().ask(ask)

    def _claim_outcome(self, run: Any, claimed: Claimed | Exception) -> ClaimOutcome:
        self._replica.note_answer(run, claimed)
        return super()._claim_outcome(run, claimed)

    def give(self, run: Any) -> None:
        super().give(run)
        self._replica.note_given(run)

    def end_refused(self, run: Any, outcome: ClaimOutcome) -> None:
        run.how = outcome.value
        super().end_refused(run, outcome)

    def withdraw(self, run: Any) -> None:
        run.how = "withdrawn"
        super().withdraw(run)

    def _not_given(self, run: Any, error: BaseException) -> None:
        run.how = "not taken"
        super()._not_given(run, error)

    def _take_moved(self, run: Any, future: PlainFuture[set[str]]) -> None:
        run.how = "missed"
        super()._take_moved(run, future)

    def ended(self, run: Any) -> None:
        how = "lost" if run.runs_job is False else "ran"
        run.how = "missed" if run.is_missed else how
        super().ended(run)

    def report_all_busy(self, all_busy: AllBusy) -> None:
        longest = f"   has no worker free for {all_busy.longest:.0f} s"
        self._replica.world.note(self._replica.process.name, longest)
        super().report_all_busy(all_busy)

    def _note_over(self, run: Any) -> None:
        self._replica.note_end(run)
        super()._note_over(run)

    def _may_begin(self, run: Any) -> bool:
        run.taken_at = run.replica.world.now
        return super()._may_begin(run)

    def _report_granted(self, run: Any) -> None:
        if run.held is not None:
            self._replica.step(f"begin {run.task_name}", "begin")
        super()._report_granted(run)

    def _run(self, run: Any, *arguments: Any, **named: Any) -> Any:
        _running.set(run)
        return super()._run(run, *arguments, **named)


class JobsReplica(Replica):
    """A replica whose scheduler submits jobs to a pool of workers.

    :param workers: the number of workers; ``None``: no limit
    :ivar all_runs: the runs that came to it
    :ivar events: the events of its runs
    :ivar active: the submissions that count as instances of their jobs
    """

    def __init__(self, story: Any, process: Process, poll_from: float, workers: int | None) -> None:
        super().__init__(story, process, poll_from)
        self.all_runs: list[SimulatedRun] = []
        self.events: list[TaskLockEvent] = []
        self.active = ActiveSubmissions()
        self.submitted: list[Submitted] = []
        self.stopped_at = inf
        self.asked = 0  # number of statements
        self._missed_at = -inf  # when a missed run was given last
        self._jobs_story: Any = story
        self._deferred_runs = DeferredRuns()
        self._releasing = 0
        self._jobs: dict[str, SchedulersJob] = {}
        scheduler = SimpleNamespace(
            _create_lock=threading.RLock, _dispatch_event=lambda _event: None
        )
        inner = SimulatedWorkers(self.world, process, workers)
        self.pool = inner.workers
        inner.start(scheduler, "default")
        self.leadership = self._make_leadership()
        self.runs = runs = SimulatedRuns(self, inner, self._parts(), self._client.thread)
        intercept_reports(inner, runs)
        self._notifier = Notifier(self._note_event, BlockedTasks(), lambda _code: True, _nothing)

    def _make_leadership(self) -> Leadership | None:
        return None

    def _note_event(self, event: Any) -> None:
        if isinstance(event, TaskLockEvent):
            self.events.append(event)
        elif event.code == EVENT_JOB_ERROR:  # no claim of a scenario raises an error
            self.world.failures.append(event.exception)

    def _parts(self) -> ExecutorParts:
        adapter = SimpleNamespace(
            dispatch=_nothing, log_not_submitted=self._note_not_taken, is_shared=_nothing
        )
        jobs = SimpleNamespace(renewed=lambda submission: submission, unasked=_nothing)
        missed = SimpleNamespace(
            note_missed=_nothing, note_stored=lambda _request, missed: list(missed())
        )
        watch = SimpleNamespace(
            note_unfinished=_nothing,  # the next look follows anyway
            ended=_nothing,
            looks=SimpleNamespace(wake=self.wake_look),
        )
        parts: Any = {
            "active": self.active,
            "adapter": adapter,
            "jobs": jobs,
            "known": KnownTasks(),
            "deferred": self._deferred_runs,
            "missed": missed,
            "presence": SimpleNamespace(report_alive=_nothing),
            "watch": watch,
            "leadership": self.leadership,
            "wrap_function": lambda function: function,
        }
        return ExecutorParts(**parts)

    # ---- the scheduler ---------------------------------------------------------------------------

    def submit_at(self, at: float, job: Job, windows: Sequence[float]) -> None:
        """Submit run times together, at a time of the replica's own clock."""
        came = BEGIN + at - self.process.skew
        self.start(partial(self._submit_windows, job, windows), came - BEGIN)

    def _submit_windows(self, job: Job, windows: Sequence[float]) -> None:
        if self.stopped_at < inf:
            return
        now, skew = self.world.now, self.process.skew
        due = [BEGIN + window - skew for window in windows]
        self.submitted.append(Submitted(job.name, now, due, job.takes, job.grace))
        self._submit(self._submission(job, windows))

    def _submission(self, job: Job, windows: Sequence[float], **more: Any) -> Submission:
        run_times = [START + timedelta(seconds=window) for window in windows]
        return Submission(
            self._jobs.setdefault(job.name, SchedulersJob(job, self)),
            JOBSTORE,
            job.trigger,
            run_times,
            job.name,
            job.options_on(self.process) if job.claims else None,
            run_unlocked=False,
            logger_name="apscheduler.executors.default",
            runs=f"job of {job.name}",
            one_off=job.one_off,
            claim_ids=new_claim_ids(run_times),
            submitted_at=self.world.now,
            **more,
        )

    def _submit(self, submission: Submission) -> None:
        self.active.count(submission)
        try:
            self.runs.submit(submission, self._client.locks, self._notifier)
        except RuntimeError:
            self.active.forget(submission)
            if self.stopped_at == inf:
                raise

    def _is_under_way(self, cause: UUID) -> bool:
        """Return whether a run that a look has found is not over yet."""
        return any(each.cause == cause for each in self.active.submissions)

    def _note_not_taken(self, _job: Any, error: BaseException) -> None:
        if not isinstance(error, PoolError) and self.stopped_at == inf:
            self.world.failures.append(error)

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
        self.runs.stop(0.0, closes=True)

    @property
    def is_idle(self) -> bool:
        is_idle = self.runs.is_idle and self.pool.is_idle and not self._releasing
        waits = waiting_in(self._client.thread) or self._deferred_runs.task_names
        waits = waits or any(each.cause is not None for each in self.active.submissions)
        return self.process.is_dead or (is_idle and not waits)

    # ---- what its runs tell ----------------------------------------------------------------------

    def claim_of(self, run: SimulatedRun) -> Any:
        """Return the claim of a run, as the scenario has it."""
        submission, job = run.submission, run.scenario_job
        dead, failed = submission.dead_run, submission.failed_run
        if dead is not None:
            return takeover_of(job.name, dead.claim_id, dead.holder, job.lease, job.failover)
        if failed is not None:
            return retry_of(job.name, failed.claim_id, MAX_LOCK, job.lease, job.failover)
        if submission.request_id is not None:
            name, asked = job.name, submission.request_id
            return manual_run_of(name, asked, MAX_LOCK, job.lease, job.failover, submission.runs)
        claim = job.claim_of(run.window)
        if submission.due is not None:
            claim = replace(claim, min_lock=0.0, move=submission.due.move)
        return claim

    def step(self, what: str, group: str) -> None:
        """Go through a step between two statements, which may meet a fault."""
        self._story.database.step(self.process, what, group)

    def wake_look(self) -> None:
        """Do nothing, because the next look follows anyway."""

    def note_ask(self, ask: Ask) -> None:
        """Note an ask, and what is wrong with it."""
        self.asked += 1
        wrong = self._jobs_story.wrong
        unbegun = self.runs.unbegun
        if unbegun and self.pool.count is not None:
            wrong.append(f"asked although {unbegun[0]} waits for a worker")
        if self.world.now > self.stopped_at:
            wrong.append(f"asked after the stop: {ask.runs[0]}")
        tasks = [run.task_name for run in ask.runs]
        if len(tasks) > len(set(tasks)):
            wrong.append(f"asked for two runs of a task at once: {tasks}")
        names = ", ".join(tasks)
        self.world.note(self.process.name, f"   asks for {ask.most} of {names}")
        for run in ask.runs:
            self.note_asked(run)

    def note_asked(self, run: Any) -> None:
        """Note that a run is asked for."""
        if run.question is not None and run.question.answer is None:
            return
        is_known = run.kind in (RunKind.SCHEDULE, RunKind.STORED)
        what = f"window {run.window:g}" if is_known else run.kind.value
        now = self.world.now
        run.question = Question(run.task_name, what, self.process, now, run.window)
        self._story.ledger.questions.append(run.question)

    def note_answer(self, run: Any, claimed: Claimed | Exception) -> None:
        """Note the answer to a run's claim."""
        question = run.question
        if isinstance(claimed, ClaimOutcome):
            return
        question.answered = self.world.now
        if isinstance(claimed, Refusal):
            question.answer, question.holder = claimed.reason, claimed.holder
        elif isinstance(claimed, Exception):
            question.answer = "withdrawn" if self.stopped_at < inf else f"failed: {claimed}"
        else:
            question.answer = "nothing" if claimed is None else "granted"
        self.world.note(self.process.name, f"   {run}: {question.answer}")
        if isinstance(claimed, HeldLock):
            self._asked[claimed.claim_id] = question.asked

    def note_given(self, run: Any) -> None:
        """Note that a run was given to the pool, and whether a worker is free for it."""
        if run.is_missed:
            self._missed_at = self.world.now
        # A claim whose answer was lost may have been granted when more workers were free. And a
        # missed run may get the worker of a claim that has waited for its answer for long.
        is_known = run.claim is not None and not run.claim.in_doubt
        is_known = is_known and run.question.asked > self._missed_at
        if self.pool.queued and is_known and not self.is_shared:
            self._jobs_story.wrong.append(f"claimed, and no worker was free for it: {run}")

    @property
    def is_shared(self) -> bool:
        """Whether the pool may have other work than the queue's, or unlocked runs before it."""
        return self._jobs_story.scenario.is_shared

    def note_end(self, run: Any) -> None:
        """Note that a run is over."""
        run.ends.append(run.how)
        run.ended_at = self.world.now
        question = run.question
        if question is not None and question.answer is None:
            question.answer, question.answered = run.how, self.world.now
        self.world.note(self.process.name, f"   {run}")

    def note_release(self, run: SimulatedRun, outcome: RunOutcome, release: Release) -> None:
        """Note a release that was sent."""
        held = run.held
        assert held is not None
        if run.entry is not None:
            run.entry.opens = self._opens(run, outcome)
        question = Question(held.name, "release", self.process, self.world.now)
        self._story.ledger.questions.append(question)

        def tell(future: PlainFuture[Any]) -> None:
            self._releasing -= 1
            error = future.exception()
            question.answer = "released" if error is None else f"failed: {error}"
            question.answered = self.world.now

        self._releasing += 1
        release.future.add_done_callback(tell)
        if run.entry is not None:
            self._note_ended(run, held)

    # ---- a worker --------------------------------------------------------------------------------

    def run_job(self, run: SimulatedRun) -> None:
        """Run a job's function under its lock."""
        held, began, name, window = run.held, self.world.now, run.task_name, run.window
        run.called_at.append(began)
        asked = began if held is None else self._asked[held.claim_id]
        attempt = 1 if held is None else held.attempt
        entry = ledger.Run(name, self.process.name, window, began, asked=asked, attempt=attempt)
        if held is not None:
            run.entry = entry
            self._story.ledger.runs.append(entry)
        self.world.note(self.process.name, f"   {name} {window} begins")
        self._call_function(run)
        entry.lost, entry.ended = held is not None and held.lost, self.world.now
        self.world.note(self.process.name, f"   {name} {window} ends")
        if held is not None:
            self.step(f"end {name}", "end")
            entry.failed = self._fails(run, held)
            if entry.failed:
                raise ValueError("no")

    def _call_function(self, run: SimulatedRun) -> None:
        self.world.sleep(run.scenario_job.takes)

    def _fails(self, run: SimulatedRun, held: HeldLock) -> bool:
        """Return whether the job raises an error."""
        return False

    def _opens(self, run: SimulatedRun, outcome: RunOutcome) -> bool:
        """Return whether the end of a run opens its window."""
        return outcome.window is WindowAfter.OPEN

    def _note_ended(self, run: Any, held: HeldLock) -> None:
        """Note that a run has ended, so that the runs that are deferred because of it go on."""
        last = LastRun(held.token, finished=True, dead=False, deaths=0, as_of=self.world.now)
        self._deferred_runs.decide(run.task_name, run.job, last)

    # ---- the look at the rows --------------------------------------------------------------------

    def _act_on(self, state: TaskRow, task: Task) -> None:
        """Handle the state of a row."""
        assert isinstance(task, Job)
        if self.stopped_at < inf:
            return
        if state.request_id is not None and not self._is_under_way(state.request_id):
            self._ask_for_manual_run(task, state.request_id)
        is_dead = state.dead and (state.handed_over or self._client.stable)
        if is_dead and state.is_run_again(failover=task.failover):
            if state.reason_to_give_up(MOST_TAKEOVERS) is not None:
                self._give_up(state)
            elif not self._is_under_way(state.claim_id):
                self._submit(replace(self._again(task, state), dead_run=state))
            return
        last = LastRun(state.token, state.finished, is_dead, state.deaths, self.looked_from, state)
        for job in self._deferred_runs.jobs_of(task.name):
            self._deferred_runs.decide(task.name, job, last)

    def _ask_for_manual_run(self, job: Job, request_id: UUID) -> None:
        window = max(each for each in job.windows if each <= self.world.now - BEGIN)
        self._submit(self._submission(job, [window], request_id=request_id))

    def _again(self, job: Job, state: TaskRow) -> Submission:
        """Return a submission of the window of a row."""
        return self._submission(job, [window_of(job, state.window_start)])

    @property
    def _watched(self) -> Sequence[str]:
        return sorted(self._deferred_runs.task_names)


def _nothing(*_arguments: object) -> None: ...


def window_of(task: Task, start: datetime) -> float:
    """Return the run time of a window, by the window's start in a row."""
    at = (start - START).total_seconds()
    return min(task.windows, key=lambda each: abs(each - at))
