"""The runs of an executor: each is claimed when a worker is free, and given to that worker.

The queue decides, and this module carries out the decisions. The module claims runs, and gives
granted runs to the wrapped executor, whose own ``run_job`` runs each run once. A run ends in two
steps. When the job's function ends, the release is sent to the replica's thread. When the wrapped
executor has reported the run, the run's worker is free.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any, cast

from apscheduler.events import EVENT_JOB_ERROR

from apscheduler_tasklock._application import ApplicationThread, call_application
from apscheduler_tasklock._database.jitter import jittered
from apscheduler_tasklock._database.plain_future import PlainFuture
from apscheduler_tasklock._database.thread import ReplicaThread
from apscheduler_tasklock._lock.claim_attempts import AnyAttempt
from apscheduler_tasklock._lock.claims import Claimed
from apscheduler_tasklock._lock.held_locks import HeldLocks
from apscheduler_tasklock._lock.outcomes import ClaimOutcome
from apscheduler_tasklock._lock.protocol_messages import ClaimRequest, Refusal
from apscheduler_tasklock._lock.releases import Release
from apscheduler_tasklock._returned import check_returned
from apscheduler_tasklock._runs import missed_runs
from apscheduler_tasklock._runs.active_submissions import ActiveSubmissions
from apscheduler_tasklock._runs.adapter import (
    JobIdWithRun,
    SchedulerAdapter,
    call_on_its_loop,
    event_loop_of,
    give,
    interpreter_is_ending,
    is_of_apscheduler,
    never_awaited,
    runs_inside_submit_job,
    takes_at_once,
    worker_count,
)
from apscheduler_tasklock._runs.deferred_runs import DeferredRuns, InTheWay, Outlook, WhyDeferred
from apscheduler_tasklock._runs.driven_queue import DrivenQueue
from apscheduler_tasklock._runs.executor_jobs import ExecutorJobs
from apscheduler_tasklock._runs.executor_run import ExecutorRun, may_be_cancelled
from apscheduler_tasklock._runs.given_job import GivenJob, RunTimes
from apscheduler_tasklock._runs.known_tasks import KnownTasks
from apscheduler_tasklock._runs.leadership import FollowerRun, Leadership
from apscheduler_tasklock._runs.misfires import ALWAYS_MISSED
from apscheduler_tasklock._runs.missed_runs import MissedRuns
from apscheduler_tasklock._runs.presence import Presence
from apscheduler_tasklock._runs.queue import AllBusy, Ask, RunQueue
from apscheduler_tasklock._runs.reports import (
    Notifier,
    report_closed,
    report_missed,
    report_submitted,
)
from apscheduler_tasklock._runs.run import SCHEDULED, JobKey, RunKind, State
from apscheduler_tasklock._runs.submission import (
    FAILED,
    DueRun,
    Submission,
    new_claim_ids,
)
from apscheduler_tasklock._runs.trigger_times import is_single
from apscheduler_tasklock._runs.watch import Watch
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import (
    TaskLockError,
    TaskLockOptionError,
    TaskLockSchemaError,
)
from apscheduler_tasklock.status import MissCause

logger = logger_of(__name__)

# Limits the wait of a given run for its begin, as a share of the time that is left of its maximum
# lock. The rest of that time is for the hand-over.
WAITS_AT_MOST = 0.9
# The interval, in seconds, at which a thread that waits inside `submit_job` for a decision of the
# replica's thread checks that this thread is alive.
CHECK_INTERVAL = 1.0
# The thread that gives runs to an executor that may let it wait.
GIVER = "tasklock-giving"
# Limits how many jobs are named in the log line that all workers are busy.
MOST_NAMED = 5
# BUSY_FOR limits the seconds before a misfire in which all workers must have been busy so that this
# is told as the reason. FULL_SHARE is the share of these seconds, because workers wait for claims
# between their runs.
BUSY_FOR, FULL_SHARE = 10.0, 0.8
# Limits how many ended runs are remembered, to tell which jobs kept all workers busy.
MOST_WORKED = 1000
# Errors with which an executor reports a run that may not have begun. Such a run is not released as
# failed, so that another replica can run its window.
NOT_BEGUN = (asyncio.CancelledError, CancelledError, BrokenExecutor)


@dataclass(frozen=True)
class ExecutorParts:
    """The parts of a ``TaskLockExecutor`` that its runs use.

    :ivar active: the submissions that count as instances of their jobs
    :ivar adapter: what is used of the scheduler
    :ivar jobs: the scheduler's jobs on this executor
    :ivar known: the tasks of this replica
    :ivar deferred: the deferred runs
    :ivar missed: the run times that this replica has missed
    :ivar presence: sends the signs of life
    :ivar watch: makes the looks
    :ivar leadership: who asks first; ``None``: there is no leader mode
    :ivar wrap_function: returns the callable that is called in place of a job's function
    """

    active: ActiveSubmissions
    adapter: SchedulerAdapter
    jobs: ExecutorJobs
    known: KnownTasks
    deferred: DeferredRuns
    missed: MissedRuns
    presence: Presence
    watch: Watch
    leadership: Leadership | None
    wrap_function: Callable[[Callable[..., Any]], Callable[..., Any]]

    def note_over(self, submission: Submission) -> None:
        """Note that all runs of a submission are over."""
        if not self.active.forget(submission):
            return
        if submission.one_off and self.adapter.is_shared(submission.jobstore):
            self.forget_job(submission.key)
        self.watch.ended(submission)
        if submission.due is not None:
            submission.due.reader.note_over(submission.due)

    def forget_job(self, key: JobKey) -> None:
        """Forget a job that was removed."""
        self.known.forget(key)
        self.jobs.forget(key)


class ExecutorRuns:
    """The runs of one executor, from their submission until their workers are free.

    :param inner: the wrapped executor
    :param parts: what these runs use of the ``TaskLockExecutor``
    :param thread: the replica's thread, which steps the queues
    :ivar coroutines: the coroutines that run under a lock
    """

    def __init__(self, inner: Any, parts: ExecutorParts, thread: ReplicaThread) -> None:
        self._inner = inner
        self._parts = parts
        self._is_closed = False
        self._is_inline = runs_inside_submit_job(inner)
        # Whether the executor is APScheduler's own. Any other executor may begin a run in a child
        # process that it forks, and the parent process does not notice that the run has begun.
        self._is_known = is_of_apscheduler(inner)
        self._thread = thread
        self.coroutines: set[ExecutorRun] = set()
        # Two queues, because functions need a worker each, and coroutines need none.
        functions, coroutines = RunQueue(jittered), RunQueue(jittered)
        self._functions = DrivenQueue(thread, functions, partial(worker_count, inner), self)
        self._coroutines = DrivenQueue(thread, coroutines, lambda: None, self)
        self._giver = ApplicationThread(GIVER, keeps_out=True)
        self._left_to_giver: set[ExecutorRun] = set()  # what it has not given yet
        # The runs that were given to the wrapped executor, or are about to be given.
        self._given: dict[ExecutorRun, None] = {}
        self._may_be_late = False  # whether a given run that has not begun may begin too late
        # Tasks and tokens of runs that have ended on this replica, until their releases arrive.
        self._being_released: set[tuple[str, int]] = set()
        # The workers' last runs that have ended: the job, the begin and the end of each.
        self._worked: deque[tuple[str, float, float]] = deque(maxlen=MOST_WORKED)
        # The id of the process that a job has forked from its worker. No run begins in that
        # process.
        self._copied_in: int | None = None

    @property
    def is_ending(self) -> bool:
        """Whether the interpreter has begun to end, so that no run begins any more."""
        return interpreter_is_ending()

    @property
    def room(self) -> float:
        """How many more runs can get a worker now; ``inf`` if coroutines run on an event loop."""
        has_loop = event_loop_of(self._inner) is not None
        return inf if has_loop else self._functions.room

    def is_running(self, job_id: str) -> bool:
        """Return whether a run of a job goes on here. A run that waits for its lock does not."""
        return any(self._goes_on(run) for run in list(self._given) if _job_of(run) == job_id)

    def waits_for_worker(self, job_id: str) -> bool:
        """Return whether a run of a job waits here for a worker, and not for the database."""
        given = list(self._given)
        # The queue may take the message that a run has begun later, so that `state` is not asked.
        begun = [run.began_at < inf for run in given if _job_of(run) == job_id]
        if begun:
            return not all(begun)
        workers = worker_count(self._inner)
        return workers is not None and sum(map(self._goes_on, given)) >= workers

    def _goes_on(self, run: ExecutorRun) -> bool:
        # An executor that is not APScheduler's may have begun the run in another process.
        return bool(run.runs_job) or (run.began_at < inf and not self._is_known)

    def call_if_there_is_room(self, note_room: Callable[[], object]) -> None:
        """Call a function whenever the room has become larger. The function must not wait."""
        self._functions.note_room = note_room

    # ---- in the thread in which the scheduler submits jobs ---------------------------------------

    def submit(self, submission: Submission, locks: HeldLocks, notifier: Notifier) -> None:
        """Put the runs of a submission at the end of the queue.

        If the wrapped executor runs jobs inside ``submit_job``, the runs are over on return.

        :raises RuntimeError: the scheduler is shut down, the interpreter ends, or no thread can be
            started
        """
        if self._is_closed or interpreter_is_ending():
            raise RuntimeError("no job is begun any more: the scheduler or the interpreter ends")
        submission = self._only_locked_if_follower(submission)
        queue = self._coroutines if submission.awaited else self._functions
        times = zip(submission.run_times, submission.claim_ids, strict=True)
        runs = [
            ExecutorRun(submission, *each, locks, notifier, queue, is_inline=self._is_inline)
            for each in times
        ]
        for run, following in pairwise(runs):
            run.following = following
        self._thread.start()
        if submission.options is not None and not is_single(submission.trigger):
            # A custom trigger is the application's code, and the walk through a combination may
            # take seconds. So these triggers are asked here, where the scheduler asks them, and not
            # in the replica's thread.
            for run in runs:
                run.failure = _why_not_claimed(run)
        if self._is_to_follow(submission):
            queue.call(self._follow, runs[0])
        else:
            queue.came(runs[0])
        if self._is_inline:
            self._run_inline(runs[0])

    def _only_locked_if_follower(self, submission: Submission) -> Submission:
        """Return a submission that is not run without a lock, unless this replica has led.

        Otherwise all replicas would run it in an outage.
        """
        leadership = self._parts.leadership
        if leadership is None or leadership.leads or not submission.run_unlocked:
            return submission
        return replace(submission, run_unlocked=False)

    def _is_to_follow(self, submission: Submission) -> bool:
        """Return whether another replica asks first for the run times of a submission."""
        leadership = self._parts.leadership
        is_scheduled = submission.kind is RunKind.SCHEDULE and submission.options is not None
        follows = leadership is not None and leadership.follows
        # The scheduler has dropped the job of a last run time, so that nothing would know of this
        # run time any more if this replica stopped, or if the leader died in its run.
        return is_scheduled and follows and not submission.is_last

    def _run_inline(self, first: ExecutorRun) -> None:
        """Wait for the decision on each run of a submission, and give granted runs in this thread.

        The ``submit_job`` of the wrapped executor runs the job before it returns.
        """
        for run in first.backlog:
            try:
                while not (run.decided is None or run.decided.wait(CHECK_INTERVAL)):
                    if not self._thread.is_live:
                        self._abandon_wait(run)
                        return
                if run.is_to_be_given:
                    self._give_once(run)
                elif run.deferred_by is not None or run.follower is not None:
                    return  # because the run is deferred
            except BaseException:  # for example a Ctrl-C, which the application may catch
                self._abandon_wait(run)
                raise

    def _abandon_wait(self, first: ExecutorRun) -> None:
        """Let the application's thread give the runs of a submission, instead of this thread."""
        for run in first.backlog:
            run.note_decided()
            if run.is_to_be_given:
                call_application(partial(self._give_once, run))

    def _give_once(self, run: ExecutorRun) -> None:
        if run.give_once.take():
            self._give_to_inner(run)

    def stop(self, seconds: float, *, closes: bool = False) -> None:
        """Let no run begin any more, and withdraw the runs that have not begun.

        :param seconds: limits the wait until the runs are withdrawn
        :param closes: whether :meth:`submit` rejects further submissions
        """
        self._is_closed = closes
        until = time.monotonic() + seconds
        queues = (self._functions, self._coroutines)
        for queue in queues:
            queue.call(self._withdraw_given, queue)
        for is_done in [queue.stop() for queue in queues]:
            self._thread.wait_for(is_done, until)
        # Runs that need no lock were given, perhaps to the giving thread. They are to reach the
        # wrapped executor before it is shut down.
        self._giver.flush(until)

    # ---- in the replica's thread -----------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        """Ask the database for the claims of runs."""
        runs = cast("list[ExecutorRun]", ask.runs)
        locks = runs[0].locks
        asked: dict[AnyAttempt, ExecutorRun] = {}
        for run in runs:
            claim = _claim_of(run) if run.locks is locks else ClaimOutcome.BEYOND
            if isinstance(claim, (ClaimOutcome, Exception)):
                self._take_answer(run, claim)
            else:
                asked[claim] = run

        def report(decided: Sequence[tuple[AnyAttempt, Claimed]]) -> None:
            for attempt, claimed in decided:
                self._take_answer(asked[attempt], claimed)

        most = ask.most if runs[0].kind.has_limit else None
        try:
            if asked:
                locks.begin_claims(list(asked), most, report)
        except Exception as error:  # noqa: BLE001  # so that each run has an answer
            for run in asked.values():
                self._take_answer(run, error)

    def _take_answer(self, run: ExecutorRun, claimed: Claimed | Exception) -> None:
        due = run.submission.due
        if due is not None and isinstance(claimed, TaskLockSchemaError):
            due.rejected = claimed
        try:
            outcome = self._claim_outcome(run, claimed)
        except Exception:  # so that no other answer is lost
            logger.exception("The task lock's thread failed, and goes on")
            outcome = ClaimOutcome.FAILED
            if run.held is not None:
                self._hand_over(run)
        run.queue.answered(run, outcome)

    def _claim_outcome(self, run: ExecutorRun, claimed: Claimed | Exception) -> ClaimOutcome:
        """Note the result of a run's claim, and return its outcome for the queue."""
        if isinstance(claimed, ClaimOutcome):
            return claimed
        if isinstance(claimed, Exception) and not isinstance(claimed, TaskLockError):
            run.report_job_error(claimed)
            return ClaimOutcome.FAILED
        wanted_at = None if run.claim is None else run.claim.wanted_at
        if run.take_in(claimed, wanted_at or time.monotonic()):
            self._note_granted(run)
            return ClaimOutcome.UNLOCKED if run.held is None else ClaimOutcome.GRANTED
        refusal = run.refusal
        failed = isinstance(claimed, TaskLockError)
        outcome = ClaimOutcome.FAILED if failed else ClaimOutcome.REFUSED
        self._note_unclaimed(run, claimed, refusal)
        if refusal is not None and refusal.blocked:
            outcome = self._defer_refused(run, refusal)
        if refusal is not None and (refusal.unfinished or run.submission.may_be_retried):
            # The last run may be dead. Or it is a run of this replica, which may have ended while
            # the claim was on its way.
            may_be_over = refusal.waits or refusal.holder == run.locks.settings.replica_id
            self._note_unfinished(run, refusal.unfinished and may_be_over)
        return outcome

    def _note_unfinished(self, run: ExecutorRun, may_be_over: bool) -> None:
        submission = replace(run.submission, run_times=(run.run_time,), claim_ids=())
        # Called in the application's thread, because `note_unfinished` calls the job's trigger.
        call_application(partial(self._parts.watch.note_unfinished, submission, may_be_over))

    def _note_granted(self, run: ExecutorRun) -> None:
        """Note the run times before this granted one, if no replica has asked for them.

        Also note the job for the run's retry, because the scheduler drops it if this run time is
        its last.
        """
        if run.kind is RunKind.STORED and run.submission.due is not None:
            passed = run.submission.due.passed
            if passed is not None:
                note = partial(self._parts.missed.note_stored, _request_of(run), passed)
                call_application(note)
            return
        # A look that has found the job of another run finds it again. A stored job's row stays in
        # its store for as long as it may be run again.
        is_first = run.submission.cause is None
        if is_first and run.submission.may_be_retried and run.held is not None:
            self._note_unfinished(run, False)
        due_at = None if run.held is None else run.held.was_due_at
        if run.kind is not RunKind.SCHEDULE or due_at is None:
            return
        request = run.request()
        assert isinstance(request, ClaimRequest)
        assert request.run_time is not None
        if request.exact and due_at < request.run_time:
            # Called in the application's thread, because `_note_unasked` calls the job's trigger.
            until = request.run_time
            call_application(partial(self._note_unasked, run.submission, due_at, until))

    def _note_unasked(self, submission: Submission, due_at: datetime, until: datetime) -> None:
        """Note the run times from ``due_at`` to ``until`` that no replica has asked for."""
        with suppress(Exception):  # a custom trigger's own code may raise anything
            jobs, name = self._parts.jobs, submission.task_name
            found = jobs.unasked(submission.key, name, due_at, until)
            if found is not None:
                self._parts.missed.note_unasked(*found, datetime.now(timezone.utc))

    def _note_unclaimed(self, run: ExecutorRun, claimed: object, refusal: Refusal | None) -> None:
        """Note that this replica has missed a run time, if an error or a pause is the cause.

        A stored job is left out, because its store reads it again.
        """
        if run.kind is RunKind.STORED or run.locks.closed:
            return
        if isinstance(claimed, TaskLockError):
            asked_at = time.monotonic() if run.claim is None else run.claim.wanted_at
            reason = missed_runs.not_claimed(claimed, asked_at)
            self._note_missed(run, MissCause.DATABASE, reason)
        elif refusal is not None and refusal.reason == "paused":
            self._note_missed(run, MissCause.PAUSED, missed_runs.IN_PAUSE)

    def _defer_refused(self, run: ExecutorRun, refusal: Refusal) -> ClaimOutcome:
        """Defer a run, and its backlog, until the run in its way is over.

        :param refusal: names the run in the way
        :return: ``DEFERRED``, or ``REFUSED`` if later runs of the job are deferred instead
        """
        # The run in the way may have ended on this replica, although its release has not arrived.
        is_over = (run.task_name, refusal.token) in self._being_released
        came_first = refusal.came_first and not is_over
        in_the_way = InTheWay(refusal.token, came_first, run.run_time)
        if self._defer(run, in_the_way, refusal):
            return ClaimOutcome.DEFERRED
        run.deferred_by = refusal  # so that `end_refused` reports this refusal
        return ClaimOutcome.REFUSED

    def _follow(self, run: ExecutorRun) -> None:
        """Defer a run, and its backlog, until a look tells whether the leader has run it."""
        assert self._parts.leadership is not None
        run.follower = FollowerRun(self._parts.leadership, run, lambda: _request_of(run))
        if self._defer(run, run.follower):
            run.state, run.deferred_at = State.DEFERRED, time.monotonic()
            run.queue.runs.came(run)
        else:
            for each in run.backlog:
                self._note_over(each)

    def _defer(self, run: ExecutorRun, reason: WhyDeferred, refusal: Refusal | None = None) -> bool:
        """Defer a run, and its backlog; return ``False`` if later runs are deferred instead.

        :param reason: why the run is deferred
        :param refusal: the refusal of the run's claim, if the run was claimed
        """
        deferred = self._parts.deferred
        left_out = deferred.take_for(run, coalesce=run.submission.job.coalesce)
        for other in left_out:
            if other is not run:
                other.queue.found(other, Outlook.DROPPED, 0.0)
                if run.follower is not None and other.follower is not None:
                    run.follower.replace(other.follower)
        if run in left_out:
            return False
        run.claim = None
        for each in run.backlog:
            each.deferred_by = refusal
            each.note_decided()
        self._parts.active.forget(run.submission)
        deferred.add(run, reason, partial(self._decide, run, reason))
        return True

    def _decide(
        self, run: ExecutorRun, reason: WhyDeferred, outlook: Outlook, as_of: float
    ) -> None:
        """Let a deferred run be claimed again, with its job as the job is now, or drop the run.

        Called in the application's thread, because this method calls the job's store and trigger.
        If the store or the trigger raises, the run stays deferred, and the next look decides.
        """
        again = list(run.backlog)[outlook is Outlook.REFUSED :]
        try:
            if outlook is not Outlook.WAITS and again and not self._renew(again):
                outlook = Outlook.DROPPED
        except BaseException:
            self._parts.deferred.add(run, reason, partial(self._decide, run, reason))
            raise
        run.queue.found(run, outlook, as_of)

    def _renew(self, runs: Sequence[ExecutorRun]) -> bool:
        """Prepare deferred runs of one submission for new claims, with their job as the job is now.

        :return: whether the job is still to run
        """
        was: Submission = runs[0].submission
        run_times = tuple(run.run_time for run in runs)
        renewed = self._parts.jobs.renewed(replace(was, run_times=run_times))
        if renewed is None:
            return False
        renewed = replace(renewed, claim_ids=new_claim_ids(run_times), is_standby=was.is_standby)
        renewed = self._only_locked_if_follower(renewed)
        for run, claim_id in zip(runs, renewed.claim_ids, strict=True):
            run.renew(renewed, claim_id)
            run.failure = _why_not_claimed(run)
        return True

    def give(self, run: ExecutorRun) -> None:
        """Give a run to the wrapped executor."""
        self._given[run] = None
        try:
            self._give(run)
        except Exception as error:  # noqa: BLE001  # such as that the scheduler's loop is closed
            if run.token.take():
                self._not_given(run, error)

    def _give(self, run: ExecutorRun) -> None:
        if run.held is not None and self._is_known:
            left = run.held.seconds_left * WAITS_AT_MOST
            run.begins_until = time.monotonic() + left
            self._may_be_late = True
        self._parts.active.count(run.submission)
        if run.is_missed:
            run.telemetry.skipped("misfire")  # which APScheduler's own code reports
            self._note_missed(run, MissCause.MISFIRE, self._why_late(run))
            if run.submission.due is not None:
                self._move_on(run, run.submission.due)
                return
        self._begin_to_give(run)

    def _begin_to_give(self, run: ExecutorRun) -> None:
        if self._is_inline:
            run.is_to_be_given = True
            if run.decided is None or run.decided.is_set():  # so no thread waits to give it
                call_application(partial(self._give_once, run))
            run.note_decided()
            return
        # Runs are given in their order.
        if self._left_to_giver or not (self._is_known and takes_at_once(self._inner)):
            self._left_to_giver.add(run)
            self._giver.call_also_here(partial(self._give_by_giver, run))
            return
        call_on_its_loop(self._inner, partial(self._give_to_inner, run))

    def _give_by_giver(self, run: ExecutorRun) -> None:
        try:
            self._give_once(run)
        finally:
            self._left_to_giver.discard(run)

    def _give_to_inner(self, run: ExecutorRun) -> None:
        if run not in self._given:
            return  # because the run was withdrawn before the event loop called this method
        try:
            run.context.run(give, self._inner, *self._for_inner(run))
        except BaseException as error:  # noqa: BLE001  # whatever the wrapped executor raises
            # The pool may have queued the run before the error, and a worker may have begun it.
            # Then the token is taken, and the run goes on.
            if run.token.take():
                self._not_given(run, error)
            return
        if not self._is_known:
            run.queue.begun(run)
            self._parts.active.note_begun(run.submission)

    def _for_inner(self, run: ExecutorRun) -> tuple[GivenJob, RunTimes]:
        """Return the job and the run times that the wrapped executor gets."""
        job = GivenJob(
            run.submission,
            JobIdWithRun(run.submission.job.id, run),
            partial(self._run_coroutine, run)
            if run.submission.awaited
            else partial(self._run, run),
            ALWAYS_MISSED if run.is_missed else None,
        )
        return job, RunTimes(run.run_time, partial(self._begin, run))

    def _not_given(self, run: ExecutorRun, error: BaseException) -> None:
        if self._given.pop(run, self) is self:
            return
        self._hand_over(run)
        is_closing = run.locks.closed or interpreter_is_ending()
        if is_closing and isinstance(error, RuntimeError):
            run.report_not_begun()
        else:
            call_application(
                partial(self._parts.adapter.log_not_submitted, run.submission.job, error)
            )
        run.queue.not_given(run)
        self._note_over(run)

    def _move_on(self, run: ExecutorRun, due: DueRun) -> None:
        """Move a stored job on to its next run time, and then report the run as missed."""
        asked = run.locks.database.begin(partial(run.locks.database.jobs.move_on, moves=[due.move]))
        asked.future.add_done_callback(lambda future: run.queue.call(self._take_moved, run, future))

    def _take_moved(self, run: ExecutorRun, future: PlainFuture[set[str]]) -> None:
        try:
            if future.result():
                call_application(partial(report_missed, run.submission, run.notifier))
        except BaseException as error:  # noqa: BLE001  # whatever the replica's thread sets
            # Logged at DEBUG, because the job is still due, so that its store reads it again.
            logger.debug("Task %r: not moved on: %s", run.task_name, error)
        if self._given.pop(run, self) is None:
            run.queue.runs.freed(run, 0.0)
            self._note_over(run)

    def end_refused(self, run: ExecutorRun, outcome: ClaimOutcome) -> None:
        """End a run that was refused, or could not be claimed."""
        due = run.submission.due
        if due is not None and outcome is ClaimOutcome.FAILED:
            due.refused = FAILED
        try:
            if run.follower is not None and run.follower.refusal is not None:
                run.report_run_by_another(run.follower.refusal)
            elif run.deferred_by is not None:
                run.report_refused(run.deferred_by)
                reason = missed_runs.still_running(run.deferred_by)
                self._note_missed(run, MissCause.RUNNING, reason)
        finally:
            self._note_over(run)

    def _note_missed(self, run: ExecutorRun, cause: MissCause, reason: str) -> None:
        """Note that this replica has missed a run time.

        Takeovers, retries, manual runs and standby runs are left out, because their run time is no
        scheduled one, or was claimed or missed before.
        """
        is_scheduled = run.kind in SCHEDULED and run.claims
        if not is_scheduled or run.failure is not None or _why_not_claimed(run) is not None:
            return
        request = _request_of(run)
        if run.submission.due is None:
            self._parts.missed.note_missed(request, cause, reason)
            return
        missed = partial(run.submission.due.missed, cause, lambda _first: reason)
        call_application(partial(self._parts.missed.note_stored, request, missed))

    def _why_late(self, run: ExecutorRun) -> str:
        """Return why a run is a misfire."""
        assert run.grace is not None
        words = missed_runs.late(run.late_by, run.grace)
        due_at, workers = run.due_at + run.excused, worker_count(self._inner)
        if run.came - due_at > run.grace:
            came_after = missed_runs.in_seconds(run.came - due_at)
            return f"{words}: its scheduler came to it {came_after} after it was due"
        if run.earliest - due_at > run.grace:
            return f"{words}: its earlier run times ran until then"
        due = run.submission.due
        # The moment at which the run became a misfire.
        at = due_at + run.grace
        since = max(due_at, run.came, run.earliest, at - BUSY_FOR)
        if due is not None:
            since -= (due.move.run_time - due.misfires_from).total_seconds()
        if workers is not None and not run.submission.awaited:
            worked = self._worked_between(since, at)
            seconds = sum(ended_at - began_at for _job, began_at, ended_at in worked)
            if since < at and seconds >= FULL_SHARE * workers * (at - since):
                busy = [job for job, _began_at, ended_at in worked if ended_at == at]
                return f"{words}: {missed_runs.all_busy(workers, busy)}"
        if due is None:
            return words
        now = datetime.now(timezone.utc)
        return f"{words}: {missed_runs.unclaimed(due.misfires_from, now)}"

    def _worked_between(self, since: float, until: float) -> list[tuple[str, float, float]]:
        """Return the job, the begin and the end of each run that a worker ran between two times.

        Only the parts between the two times count. Of very many runs, the first are forgotten.
        """
        worked = list(self._worked)
        worked += [
            (_job_of(run), run.began_at, inf)
            for run in list(self._given)
            if run.state is State.BEGUN and not run.submission.awaited
        ]
        return [
            (job, max(began_at, since), min(ended_at, until))
            for job, began_at, ended_at in worked
            if began_at <= until and ended_at > since
        ]

    def withdraw(self, run: ExecutorRun) -> None:
        """End a run that has not begun, and hand over its window if it was granted."""
        try:
            if run.held is not None:
                self._hand_over(run)
                run.report_not_begun()
            elif run.deferred_by is not None:
                run.report_refused(run.deferred_by)
            elif run.follower is None or run.claim is not None:
                # A run that a follower has never asked for is left out, because the leader runs it.
                run.report_not_claimed()
            if run.claim is not None and run.held is None:
                run.locks.withdraw(run.claim)
        finally:
            self._note_over(run)

    def check_given(self) -> float:
        """Hand over the runs that have not begun although their maximum lock is about to end.

        Such a run waits in a blocked event loop, or in a pool behind other work. Its worker counts
        as busy until the executor reports the run. Runs of an executor that is not APScheduler's
        are left out, as in :meth:`_withdraw_given`.

        :return: seconds after which to check again; ``inf``: no check is needed
        """
        if not self._may_be_late:
            return inf
        now, look_at = time.monotonic(), inf
        for run in list(self._given):
            if run.state is State.BEGUN:
                continue
            if now < run.begins_until:
                look_at = min(look_at, run.begins_until)
            elif run.token.take():
                self._report_release(run, run.begin_hand_over_late())
        self._may_be_late = look_at < inf
        return look_at - now

    def wake_look(self) -> None:
        """Bring the next look forward, so that deferred runs are decided on."""
        self._parts.watch.looks.wake()

    def report_all_busy(self, all_busy: AllBusy) -> None:
        """Log that all workers have been busy for long."""
        now = time.monotonic()
        busy = sorted(
            (
                run
                for run in list(self._given)
                if run.state is State.BEGUN and not run.submission.awaited
            ),
            key=lambda run: run.began_at,
        )
        named = [
            f"{run.submission.job.id!r} ({now - run.began_at:.0f} s)" for run in busy[:MOST_NAMED]
        ]
        named += [f"{len(busy) - MOST_NAMED} more"] * (len(busy) > MOST_NAMED)
        logger.warning(
            "All %d workers of the %s are busy, and %d run times wait, the first for %.0f sec. The "
            "workers run: %s. More workers (max_workers) or shorter jobs would help",
            all_busy.workers,
            type(self._inner).__name__,
            all_busy.waiting,
            all_busy.longest,
            ", ".join(named) or "nothing of this scheduler",
        )

    def _withdraw_given(self, queue: DrivenQueue) -> None:
        """Withdraw the runs that have a lock and were given, unless a worker has begun them.

        Runs that were given to an executor that is not APScheduler's are not withdrawn, because
        such an executor may have begun them without taking their tokens.
        """
        for run in list(self._given):
            if run.queue is not queue or run.held is None:
                continue
            if not (self._is_known or run.give_once.take()) or not run.token.take():
                continue
            if self._given.pop(run, self) is None:
                queue.runs.freed(run, 0.0)
                self.withdraw(run)

    def _hand_over(self, run: ExecutorRun) -> None:
        self._report_release(run, run.begin_hand_over())

    def _report_release(self, run: ExecutorRun, release: Release | None) -> None:
        """Report a release after it has arrived, or failed."""
        if release is None:
            return
        assert run.held is not None
        released = run.submission.task_name, run.held.token
        self._being_released.add(released)

        def report() -> None:
            self._being_released.discard(released)
            run.report_release(release)

        # The callback takes `report` out of a list, so that after the call the callback does not
        # refer to `report`. Otherwise the callback, `report` and the release would be a reference
        # cycle.
        reports = [report]
        release.future.add_done_callback(lambda _future: call_application(reports.pop()))

    def _note_over(self, run: ExecutorRun) -> None:
        """Note that a run is over. With the last run, its submission is over, too."""
        run.note_decided()
        run.follower = None  # which refers to the run
        self._parts.deferred.take(run)
        if run.following is None:
            self._parts.note_over(run.submission)

    # ---- in a worker -----------------------------------------------------------------------------

    def _begin(self, run: ExecutorRun) -> bool:
        """Begin a run, in its worker; return ``False`` if the job must not run.

        The job must not run if the run was withdrawn, if its lock is lost, or in a forked copy of a
        worker.
        """
        if run.runs_job is None:
            is_here = self._copied_in != os.getpid()
            run.runs_job = is_here and run.token.take() and self._may_begin(run)
        return run.runs_job

    def _may_begin(self, run: ExecutorRun) -> bool:
        run.queue.begun(run)
        self._parts.active.note_begun(run.submission)
        self._report_granted(run)
        if run.held is not None and run.locks.closed:  # a listener has shut the scheduler down
            run.report_not_begun()
            run.begin_hand_over()
            return False
        # The lock is checked again, because much time may have passed since the grant: in the
        # listeners, or while the process was suspended. `stands` may wait for a renewal, which an
        # event loop must not. So for a coroutine, `_run_coroutine` renews the lease.
        if run.lost if run.submission.awaited else not run.stands():
            run.begin_hand_over_lost()
            return False
        return True

    def _report_granted(self, run: ExecutorRun) -> None:
        if run.submission.due is not None:  # because the scheduler does not report stored jobs
            report_submitted(run.submission, run.notifier)
        run.report_granted()

    def _run(self, run: ExecutorRun, *arguments: Any, **named: Any) -> Any:
        """Run the job's function under its lock, and begin to release the lock."""
        # `RunTimes` has called `_begin` already, unless the executor ignores `RunTimes`.
        if not self._begin(run):
            return None
        began_at, process = time.monotonic(), os.getpid()
        raised: BaseException | None = None
        try:
            function = self._parts.wrap_function(run.submission.job.func)
            with run.holding():
                returned = function(*arguments, **named)
            return check_returned(returned, f"task {run.task_name!r}: its function")
        except BaseException as error:
            raised = error
            raise
        finally:
            if os.getpid() != process:
                # The job has forked, and this is the child, a copy of the worker. The child begins
                # no waiting runs, because the parent's worker runs them.
                self._copied_in = os.getpid()
            run.took = time.monotonic() - began_at
            run.begin_release(raised)
            # In a shutdown, an event loop's executor reports a function before the function ends.
            # `ended` was then called before there was a release to report.
            if run.is_reported:
                self._report_release(run, run.release)
            # The exception's traceback refers to this frame, so `raised` would make a cycle.
            del raised

    async def _run_coroutine(self, run: ExecutorRun, *arguments: Any, **named: Any) -> Any:
        """Run the job's coroutine function under its lock, and begin to release the lock."""
        run.was_awaited = True
        if not await run.stands_async():
            run.runs_job = False
            run.begin_hand_over_lost()
            return None
        began_at = time.monotonic()
        raised: BaseException | None = None
        asyncio_task = asyncio.current_task()
        run.runs_in(asyncio.get_running_loop(), asyncio_task)
        self.coroutines.add(run)
        try:
            function = self._parts.wrap_function(run.submission.job.func)
            with run.holding():
                returned = await function(*arguments, **named)
            return check_returned(returned, f"task {run.submission.task_name!r}: its function")
        except BaseException as error:
            raised = error
            raise
        finally:
            self.coroutines.discard(run)
            run.took = time.monotonic() - began_at
            is_cut = run.is_cut(raised, asyncio_task)
            run.is_cancelled = is_cut or may_be_cancelled(raised)
            run.begin_release(raised, cut=is_cut)
            del raised

    def events_of(self, run: ExecutorRun, events: list[Any]) -> list[Any]:
        """Return the events to report for a run, from APScheduler's own events of that run."""
        if run.runs_job is None and run.token.take():
            # The executor has run the job in a process that it has forked, so the run has not begun
            # in this process.
            run.runs_job = True
            self._report_granted(run)
            raised = (event.exception for event in events if event.code == EVENT_JOB_ERROR)
            run.begin_release(next(raised, None))
        if run.runs_job is False:
            return []
        if run.submission.awaited and not run.was_awaited:
            logger_name = run.submission.logger_name
            events = [never_awaited(event, self._inner, logger_name) or event for event in events]
        return events

    def failed(self, run: ExecutorRun, error: BaseException) -> None:
        """Note the error with which the wrapped executor has reported a run, instead of events."""
        if run.runs_job is None and not isinstance(error, NOT_BEGUN) and run.token.take():
            # The claim is released and the window not handed over, because another replica would
            # fail in the same way, for example with a job that cannot be pickled.
            run.runs_job = True
            self._report_granted(run)
            run.begin_release(error)

    def ended(self, run: ExecutorRun) -> None:
        """Note that the wrapped executor has reported a run, so that its worker is free."""
        if run.token.take():  # so the run was cancelled before a worker began it
            run.runs_job = False
            run.report_not_begun()
            self._hand_over(run)
        elif run.submission.awaited and not run.was_awaited:
            # The executor has called the coroutine function, and has not awaited the coroutine.
            run.begin_release(TaskLockOptionError("was never awaited"))
        run.is_reported = True
        self._report_release(run, run.release)
        if run.is_cancelled:
            # The rest of the backlog is dropped, because the event loop most likely ends.
            run.following = None
        if self._given.pop(run, self) is None:
            if not run.submission.awaited:
                now = time.monotonic()
                self._worked.append((run.submission.job.id, now - run.took, now))
            self._note_over(run)
            run.queue.freed(run, run.took)


def _request_of(run: ExecutorRun) -> ClaimRequest:
    request = run.request()
    assert isinstance(request, ClaimRequest)
    return request


def _job_of(run: ExecutorRun) -> Any:
    return run.submission.job.id


def _why_not_claimed(run: ExecutorRun) -> Exception | None:
    """Make the request of a run's claim; return the error if the job's trigger raises one."""
    try:
        run.request()
    except Exception as error:  # noqa: BLE001  # a custom trigger's own code may raise anything
        return error
    except BaseException as error:  # noqa: BLE001  # a trigger's code may even raise SystemExit
        return RuntimeError(f"the trigger {run.submission.trigger} raised {error!r}")
    return None


def _claim_of(run: ExecutorRun) -> AnyAttempt | ClaimOutcome | Exception:
    """Return a run's claim, or why there is none: it is refused, or cannot be made."""
    try:
        due = run.submission.due
        if due is not None and not due.reader.is_wanted(due):
            if run.claim is not None:
                run.locks.withdraw(run.claim)
            return ClaimOutcome.REFUSED
        failure = run.failure or _why_not_claimed(run)
        if failure is not None:
            return failure
        run.claim = run.claim or run.locks.attempt(run.request())
        run.claim.report_closed = partial(report_closed, run.submission, run.notifier)
    except Exception as error:  # noqa: BLE001  # such as that claiming is stopped
        return error
    return run.claim
