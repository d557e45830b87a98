"""The runs of an executor that are claimed first, and given to it when a worker is free.

What is known of them belongs to the jobs' side, whose queue decides. Here that is carried out:
claims are asked for, and what is granted is given to the wrapped executor, whose own ``run_job``
runs it once. A run has two ends: when the job's function ends, its release goes to the database's
side; when the wrapped executor has reported it, its worker is free.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

from apscheduler_tasklock._application import ApplicationThread, call_application
from apscheduler_tasklock._database.timings import jittered
from apscheduler_tasklock._lock.claim import AnyAttempt
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.limited import Claimed, NotNow
from apscheduler_tasklock._lock.messages import HandOut
from apscheduler_tasklock._lock.releases import ReleaseTicket
from apscheduler_tasklock._runs.jobs import JobsThread, Line
from apscheduler_tasklock._runs.queue import Ask, Full, Inputs, RunQueue
from apscheduler_tasklock._runs.run import Kind, Run, Verdict
from apscheduler_tasklock._scheduler.adapter import (
    RunId,
    call_as_scheduler,
    give,
    interpreter_is_ending,
    is_of_apscheduler,
    never_awaited,
    runs_inside_submit_job,
    worker_count,
)
from apscheduler_tasklock._scheduler.attempt import RunAttempt
from apscheduler_tasklock._scheduler.functions import events_of_what_ran, why_never_run
from apscheduler_tasklock._scheduler.notify import Notifier
from apscheduler_tasklock._scheduler.submission import (
    ALWAYS_MISSED,
    Blocked,
    GivenJob,
    RunTimes,
    Submission,
)
from apscheduler_tasklock._scheduler.triggers import is_stock
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError

logger = logger_of(__name__)

# Seconds after which whoever runs a job inside of `submit_job` looks whether its decision may still
# come.
LOOK_INTERVAL = 1.0
# Seconds that an executor may take to take a job. Meanwhile nothing else is decided.
LONGEST_GIVE = 1.0
# So many jobs are named that keep all workers busy.
MOST_TOLD = 5
# The thread for one that takes longer.
GIVER = "tasklock-giving"


@dataclass(frozen=True)
class Owner:
    """What the executor that has the runs is asked and told.

    :ivar coroutines: the coroutines that run under a lock
    :ivar wrap_function: returns what is called in place of a job's function
    :ivar note_begun: called in a worker that has begun a submission
    :ivar note_blocked: gets what was refused because of a run that had not ended
    :ivar note_over: called when a submission is over
    :ivar note_worker_died: called when the lease of a run was ended whose worker process had died
    :ivar log_not_submitted: logs that the wrapped executor did not take a job, and why
    :ivar tell_failed: tells of a run time that could not be claimed since its trigger has failed
    """

    coroutines: set[RunAttempt]
    wrap_function: Callable[[Callable[..., Any]], Callable[..., Any]]
    note_begun: Callable[[Submission], object]
    note_blocked: Callable[[Blocked], object]
    note_over: Callable[[Submission], object]
    note_worker_died: Callable[[], object]
    log_not_submitted: Callable[[Any, BaseException], object]
    tell_failed: Callable[[Submission, datetime, Exception], object]


@dataclass(eq=False)
class _Work:
    """What is known of a run beside what the queue has to know.

    :ivar submission: that it is of
    :ivar attempt: has its claim, and tells of it
    :ivar locks: that it is claimed with
    :ivar context: the context variables of whoever submitted it
    :ivar line: the queue that it is in
    :ivar claim: its claim, while it is asked for
    :ivar failure: why its trigger, which may be the application's own, could not tell what to claim
    :ivar is_decided: set when it is to be given, or over; for whoever runs it inside ``submit_job``
    :ivar is_to_be_given: whether it is to be given
    :ivar goes_on: whether its worker went on with it; ``None``: it has not begun
    :ivar took: seconds that its job took
    :ivar release: its release
    :ivar was_awaited: whether its coroutine was begun, which an executor may only have made
    :ivar is_cut: whether somebody else than its coroutine has ended that
    :ivar is_reported: whether the wrapped executor has told what became of it
    :ivar giving: what else is known of it that was given to a pool of processes
    """

    submission: Submission
    attempt: RunAttempt
    locks: LockClient
    context: Context
    line: Line
    claim: AnyAttempt | None = None
    failure: Exception | None = None
    is_decided: threading.Event = field(default_factory=threading.Event)
    is_to_be_given: bool = False
    goes_on: bool | None = None
    took: float = 0.0
    release: ReleaseTicket | None = None
    was_awaited: bool = False
    is_cut: bool = False
    is_reported: bool = False
    giving: Any = None


class Runs:
    """The runs of one executor, from their submission until their workers are free.

    :param inner: the wrapped executor
    :param owner: the executor
    """

    def __init__(self, inner: Any, owner: Owner) -> None:
        self._inner = inner
        self._owner = owner
        self._is_closed = False
        self._is_inline = runs_inside_submit_job(inner)
        self._thread = JobsThread()
        # Those of functions, which have a worker each, and those of coroutines, which need none.
        self._functions = self._thread.add(RunQueue(jittered), partial(worker_count, inner), self)
        self._coroutines = self._thread.add(RunQueue(jittered), _without_limit, self)
        # Gives to an executor that has let this side wait.
        self._giver: ApplicationThread | None = None
        # Those that the wrapped executor has, or that are about to be given to it.
        self._given: dict[Run, None] = {}

    @property
    def is_live(self) -> bool:
        """Whether its thread goes on. Asks nobody."""
        return self._thread.is_live

    @property
    def is_ending(self) -> bool:
        """Whether the interpreter has begun to end, so that nothing more is begun."""
        return interpreter_is_ending()

    # ---- where the scheduler submits -------------------------------------------------------------

    def submit(self, submission: Submission, locks: LockClient, notifier: Notifier) -> None:
        """Put the runs of a submission at the end of the queue.

        An executor that runs jobs inside of ``submit_job`` has run them when this returns.

        :raises RuntimeError: the scheduler is shut down, the interpreter ends, or no thread can be
            started
        """
        if self._is_closed or interpreter_is_ending():
            raise RuntimeError("nothing is begun any more: the scheduler or the interpreter ends")
        context = copy_context()
        line = self._coroutines if submission.awaited else self._functions
        runs = [
            _run_of(submission, _Work(submission, attempt, locks, context.copy(), line))
            for attempt in _attempts(submission, locks, notifier)
        ]
        for run, following in pairwise(runs):
            run.following = following
        self._thread.start()
        if submission.options is None or (is_stock(submission.trigger) and not self._is_inline):
            self._come(runs[0])
        elif self._is_inline:  # else whoever waits here might wait for a listener
            self._prepare(runs[0])
        else:
            call_application(partial(self._prepare, runs[0]))
        if self._is_inline:
            self._run_inline(runs[0])

    def _prepare(self, first: Run) -> None:
        """Ask a trigger that may be the application's own, and put its runs into the queue."""
        for run in first.backlog:
            run.what.failure = _why_not_asked_for(run.what)
        self._come(first)

    def _come(self, run: Run) -> None:
        run.what.line.post(lambda inputs: inputs.came.append(run))

    def _run_inline(self, first: Run) -> None:
        """Run in this thread what is granted."""
        for run in first.backlog:
            work: _Work = run.what
            while not work.is_decided.wait(LOOK_INTERVAL):
                if not self._thread.is_live:
                    return
            if work.is_to_be_given:
                self._give_to_inner(run)

    def stop(self, seconds: float, *, closes: bool = False) -> None:
        """Let nothing be begun any more; wait until that is so, for so long at most.

        :param closes: whether nothing is to be submitted any more either
        """
        self._is_closed = closes
        for line in (self._functions, self._coroutines):
            line.post(partial(self._withdraw_given, line))
        self._thread.stop(seconds)

    # ---- in the thread ---------------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        """Ask the database for runs."""
        first: _Work = ask.runs[0].what
        locks, line = first.locks, first.line
        together = ask.runs[0].kind in (Kind.SCHEDULE, Kind.STANDBY)
        most = len(ask.runs) if together or ask.most is None else ask.most
        asked: dict[AnyAttempt, Run] = {}
        answers: list[tuple[Run, Claimed | Exception]] = []
        for run in ask.runs:
            if run.what.locks is not locks or len(asked) == most:
                answers.append((run, NotNow.BEYOND))
                continue
            claim = _claim_of(run.what)
            if isinstance(claim, Exception):
                answers.append((run, claim))
            else:
                asked[claim] = run

        def tell(decided: Sequence[tuple[AnyAttempt, Claimed]]) -> None:
            self._answer(line, [(asked[attempt], claimed) for attempt, claimed in decided])

        self._answer(line, answers)
        if asked and together:
            locks.begin_claims(list(asked), ask.most, tell)  # type: ignore[arg-type]  # of one kind
            return
        for attempt in asked:
            locks.begin_lone_claim(attempt, tell)

    def _answer(self, line: Line, answers: Sequence[tuple[Run, Claimed | Exception]]) -> None:
        def take_in(inputs: Inputs) -> None:
            inputs.answers += [(run, self._verdict(run, claimed)) for run, claimed in answers]

        line.post(take_in)

    def _verdict(self, run: Run, claimed: Claimed | Exception) -> Verdict:
        """Note what became of a run's claim, and return what that means for the queue."""
        work: _Work = run.what
        if isinstance(claimed, NotNow):
            return Verdict.BEYOND if claimed is NotNow.BEYOND else Verdict.LOCKED
        if isinstance(claimed, Exception) and not isinstance(claimed, TaskLockError):
            self._owner.tell_failed(work.submission, work.attempt.run_time, claimed)
            return Verdict.FAILED
        wanted_at = None if work.claim is None else work.claim.wanted_at
        try:
            may_run = work.attempt.take_in(claimed, wanted_at or time.monotonic())
        except Exception:
            logger.exception("The task lock's jobs thread failed, and goes on")
            may_run = False
        if may_run:
            return Verdict.UNLOCKED if work.attempt.held is None else Verdict.GRANTED
        if work.attempt.held is not None:
            self._hand_over(work)
        if work.attempt.blocked is not None:
            # It asks the job's trigger, which may be the application's own.
            call_application(partial(self._owner.note_blocked, work.attempt.blocked))
        return Verdict.FAILED if isinstance(claimed, TaskLockError) else Verdict.REFUSED

    def give(self, run: Run) -> None:
        """Give a run to the wrapped executor."""
        work: _Work = run.what
        self._given[run] = None
        hand_out = work.submission.hand_out
        if run.is_missed:
            work.attempt.tell_missed()
            if hand_out is not None:
                self._settle(run, hand_out)
                return
        self._begin_to_give(run)

    def _begin_to_give(self, run: Run) -> None:
        if self._is_inline:
            run.what.is_to_be_given = True
            run.what.is_decided.set()
            return
        if self._giver is not None:
            self._giver.call(partial(self._give_to_inner, run))
            return
        began_at = time.monotonic()
        try:
            call_as_scheduler(self._inner, partial(self._give_to_inner, run))
        except RuntimeError as error:  # its event loop is closed
            if run.token.take():
                self._not_given(run, error)
        took = time.monotonic() - began_at
        if took > LONGEST_GIVE and not is_of_apscheduler(self._inner):
            self._giver = ApplicationThread(GIVER)
            logger.warning(
                "The executor %s took %.1f sec to take a job. From now on it gets its jobs in a "
                "thread of its own, one after the other",
                type(self._inner).__name__,
                took,
            )

    def _give_to_inner(self, run: Run) -> None:
        if run not in self._given:
            return  # it was withdrawn while its event loop did something else
        work: _Work = run.what
        try:
            work.context.run(give, self._inner, *self._for_inner(run))
        except BaseException as error:  # noqa: BLE001  # whatever the wrapped executor raises
            # A pool may have queued it all the same, and a worker may have begun it by now.
            if run.token.take():
                self._not_given(run, error)

    def _for_inner(self, run: Run) -> tuple[GivenJob, RunTimes]:
        """Return what the wrapped executor is to get."""
        work: _Work = run.what
        job = GivenJob(
            work.submission,
            RunId(work.submission.job.id, run),
            partial(self._run_coroutine if work.submission.awaited else self._run, work),
            ALWAYS_MISSED if run.is_missed else None,
        )
        return job, RunTimes(work.attempt.run_time, partial(self._begin, run))

    def _not_given(self, run: Run, error: BaseException) -> None:
        work: _Work = run.what
        if self._given.pop(run, self) is self:
            return
        self._hand_over(work)
        is_closing = work.locks.closed or interpreter_is_ending()
        if is_closing and isinstance(error, RuntimeError):
            work.attempt.tell_not_begun()
        else:
            call_application(partial(self._owner.log_not_submitted, work.submission.job, error))
        work.line.post(lambda inputs: inputs.failed.append(run))
        self._note_over(run)

    def _settle(self, run: Run, hand_out: HandOut) -> None:
        """Move a job past a run time that is missed, before that is told."""
        work: _Work = run.what
        asked = work.locks.begin_settle_missed(hand_out, run.task_name)
        asked.future.add_done_callback(
            lambda future: work.line.post(partial(self._take_settled, run, future))
        )

    def _take_settled(self, run: Run, future: Future[bool], inputs: Inputs) -> None:
        work: _Work = run.what
        try:
            outcome: bool | TaskLockError = future.result()
        except BaseException as error:  # noqa: BLE001  # of the database's thread, whatever it is
            outcome = error if isinstance(error, TaskLockError) else TaskLockError(repr(error))
        if work.attempt.settled(outcome):
            self._begin_to_give(run)
        elif self._given.pop(run, self) is None:
            inputs.freed.append((run, 0.0))
            self._note_over(run)

    def end_refused(self, run: Run, _verdict: Verdict) -> None:
        """End a run that was refused, or could not be asked for."""
        self._note_over(run)

    def withdraw(self, run: Run) -> None:
        """End a run that is not begun, and hand over what it has got."""
        work: _Work = run.what
        if work.attempt.held is not None:
            work.attempt.tell_not_begun()
            self._hand_over(work)
        else:
            work.attempt.tell_not_claimed()
            if work.claim is not None:
                work.locks.withdraw(work.claim)
        self._note_over(run)

    def look(self) -> float:
        """Look for what nobody tells: here for nothing."""
        return inf

    def tell_full(self, full: Full) -> None:
        """Tell that all workers have been busy for long."""
        now = time.monotonic()
        busy = sorted(
            (run for run in list(self._given) if run.what.line is self._functions), key=_begun
        )
        told = [
            f"{run.what.submission.job.id!r} ({now - run.began_at:.0f} s)"
            for run in busy[:MOST_TOLD]
        ]
        told += [f"{len(busy) - MOST_TOLD} more"] * (len(busy) > MOST_TOLD)
        logger.warning(
            "All %d workers of the %s are busy, and %d run times wait, the first for %.0f sec. The "
            "workers run: %s. More workers (max_workers) or shorter jobs would help",
            full.workers,
            type(self._inner).__name__,
            full.waiting,
            full.longest,
            ", ".join(told) or "nothing of this scheduler",
        )

    def _withdraw_given(self, line: Line, inputs: Inputs) -> None:
        """Withdraw what was given, and has not begun, under a lock."""
        for run in list(self._given):
            work: _Work = run.what
            if work.line is not line or work.attempt.held is None or not run.token.take():
                continue
            if self._given.pop(run, self) is None:
                inputs.freed.append((run, 0.0))
                self.withdraw(run)

    def _hand_over(self, work: _Work) -> None:
        self._report_release(work, work.attempt.begin_give_back())

    def _report_release(self, work: _Work, release: ReleaseTicket | None) -> None:
        """Tell of a release when it has arrived, or failed."""
        if release is not None:
            # Called once, so that no callback keeps what refers to it.
            reports = [partial(work.attempt.report_end, release)]
            release.future.add_done_callback(lambda _future: call_application(reports.pop()))

    def _note_over(self, run: Run) -> None:
        """Note that a run is over: it was the last of its submission, or the next one goes."""
        run.what.is_decided.set()
        if run.following is None:
            self._owner.note_over(run.what.submission)

    # ---- in a worker -----------------------------------------------------------------------------

    def _begin(self, run: Run) -> bool:
        """Begin a run; tell whether it goes on: unless it was withdrawn, or its lock is lost."""
        work: _Work = run.what
        if work.goes_on is None:
            work.goes_on = run.token.take() and self._may_begin(run)
        return work.goes_on

    def _may_begin(self, run: Run) -> bool:
        work: _Work = run.what
        work.line.post(lambda inputs: inputs.begun.append(run))
        self._owner.note_begun(work.submission)
        attempt = work.attempt
        self._tell_granted(run)
        if attempt.held is not None and work.locks.closed:  # a listener has shut the scheduler down
            attempt.tell_not_begun()
            work.release = attempt.begin_give_back()
            return False
        # Its listeners may have taken long, or this process been stopped. An event loop does not
        # wait: the coroutine asks for itself.
        if attempt.lost if work.submission.awaited else not attempt.stands():
            work.release = attempt.begin_give_up_lost()
            return False
        return True

    def _tell_granted(self, run: Run) -> None:
        run.what.attempt.tell_granted()

    def _run(self, work: _Work, *arguments: Any, **named: Any) -> Any:
        """Run the job's function under its lock, and begin to release that."""
        began_at = time.monotonic()
        raised: BaseException | None = None
        try:
            function = self._owner.wrap_function(work.submission.job.func)
            with work.attempt.holding():
                returned = function(*arguments, **named)
            raised = why_never_run(returned, work.submission.job.id)
        except BaseException as error:
            raised = error
            raise
        else:
            return returned
        finally:
            work.took = time.monotonic() - began_at
            work.release = work.attempt.begin_end_of(raised)
            if work.is_reported:  # as that of an event loop's thread, which its shutdown cancels
                self._report_release(work, work.release)
            # Its traceback refers to this frame, and so, in a circle, to it.
            del raised

    async def _run_coroutine(self, work: _Work, *arguments: Any, **named: Any) -> Any:
        """Do the same for a coroutine."""
        work.was_awaited = True
        attempt = work.attempt
        if not await attempt.stands_async():
            work.goes_on = False
            work.release = attempt.begin_give_up_lost()
            return None
        began_at = time.monotonic()
        raised: BaseException | None = None
        asyncio_task = asyncio.current_task()
        attempt.runs_in(asyncio.get_running_loop(), asyncio_task)
        self._owner.coroutines.add(attempt)
        try:
            function = self._owner.wrap_function(work.submission.job.func)
            with attempt.holding():
                returned = await function(*arguments, **named)
            raised = why_never_run(returned, work.submission.job.id)
        except BaseException as error:
            raised = error
            raise
        else:
            return returned
        finally:
            self._owner.coroutines.discard(attempt)
            work.took = time.monotonic() - began_at
            work.is_cut = attempt.is_cut(raised, asyncio_task)
            work.release = attempt.begin_end_of(raised, cut=work.is_cut)
            del raised

    def events_of(self, run: Run, events: list[Any]) -> list[Any]:
        """Return what is to be told of a run that has these events of APScheduler's."""
        work: _Work = run.what
        if work.goes_on is False:
            return []
        if work.submission.awaited and not work.was_awaited:
            logger_name = work.submission.logger_name
            events = [never_awaited(event, self._inner, logger_name) or event for event in events]
        return events_of_what_ran(events, work.submission.logger_name)

    def failed(self, run: Run, error: BaseException) -> None:
        """Note why the wrapped executor has not run a run to its end."""

    def ended(self, run: Run) -> None:
        """Note that the wrapped executor has reported a run, so that its worker is free."""
        work: _Work = run.what
        if run.token.take():  # an event loop was cancelled before it had begun it
            work.goes_on = False
            work.attempt.tell_not_begun()
            self._hand_over(work)
        elif work.submission.awaited and not work.was_awaited:
            # The executor has called it, and awaits nothing.
            work.release = work.attempt.begin_end_of(TaskLockOptionError("was never awaited"))
        work.is_reported = True
        self._report_release(work, work.release)
        if work.is_cut:
            run.following = None  # it is cancelled, too: as a rule its event loop ends
        if self._given.pop(run, self) is None:
            self._note_over(run)
            work.line.post(lambda inputs: inputs.freed.append((run, work.took)))


def _begun(run: Run) -> float:
    return run.began_at


def _without_limit() -> None:
    """Return that there are as many workers as there are coroutines."""


def _attempts(
    submission: Submission, locks: LockClient, notifier: Notifier
) -> Sequence[RunAttempt]:
    return [
        RunAttempt(submission, run_time, claim_id, locks, notifier)
        for run_time, claim_id in zip(submission.run_times, submission.claim_ids, strict=True)
    ]


def _run_of(submission: Submission, work: _Work) -> Run:
    """Return one run of a submission, as the queue is to know it."""
    hand_out, grace = submission.hand_out, submission.job.misfire_grace_time
    due_at = time.monotonic() - (time.time() - work.attempt.run_time.timestamp())
    if hand_out is not None:
        due_at, is_exempt = hand_out.due_at, hand_out.is_late_by_nature
    else:
        is_exempt = submission.exempt_from_misfire
    return Run(
        _kind_of(submission),
        submission.task_name,
        submission.key,
        due_at,
        submission.submitted_at,
        None if is_exempt else grace,
        claims=submission.options is not None,
        what=work,
    )


def _kind_of(submission: Submission) -> Kind:
    if submission.dead_run is not None:
        return Kind.TAKEOVER
    if submission.request_id is not None:
        return Kind.MANUAL
    if submission.hand_out is not None:
        return Kind.STORED
    return Kind.STANDBY if submission.is_standby else Kind.SCHEDULE


def _why_not_asked_for(work: _Work) -> Exception | None:
    """Ask a run's trigger; return why it cannot be asked for, if so."""
    try:
        work.attempt.request()
    except Exception as error:  # noqa: BLE001  # a custom trigger's own code may raise anything
        return error
    except BaseException as error:  # noqa: BLE001  # or exit
        return RuntimeError(f"the trigger {work.submission.trigger} raised {error!r}")
    return None


def _claim_of(work: _Work) -> AnyAttempt | Exception:
    """Return a run's claim, or why it cannot be asked for."""
    failure = work.failure or _why_not_asked_for(work)
    if failure is not None:
        return failure
    try:
        work.claim = work.claim or work.locks.attempt(work.attempt.request())
    except TaskLockError as error:
        return error
    return work.claim
