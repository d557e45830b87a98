"""A replica on a simulated clock: an APScheduler scheduler and a ``TaskLockExecutor`` of its own.

What decides is the library's own: the executor, its looks, one ``RunAttempt`` for
each run time, and the rule in memory. What stands in for others are their surroundings: the clock,
the scheduler's main loop, and the workers, of which there are as many as are asked for.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from math import inf
from typing import Any, Protocol, TypeVar
from uuid import UUID

from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_MAX_INSTANCES,
    EVENT_JOB_SUBMITTED,
    JobSubmissionEvent,
)
from apscheduler.executors.base import BaseExecutor, MaxInstancesReachedError, run_job
from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED, BaseScheduler
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._database.session import NoCursor
from apscheduler_tasklock._lock.claim import AnyAttempt, AnyRequest
from apscheduler_tasklock._lock.client import LockClient, Released
from apscheduler_tasklock._lock.heartbeat import last_renewal
from apscheduler_tasklock._lock.messages import (
    NOT_BEGUN,
    ClaimAnswer,
    ClaimRequest,
    ReadTimes,
    Refusal,
    ReleaseRequest,
    Renewal,
    RunEnd,
    TakeoverRequest,
)
from apscheduler_tasklock._scheduler.attempt import RunAttempt
from apscheduler_tasklock._scheduler.notify import Notifier
from apscheduler_tasklock._scheduler.submission import JobView, RunResult, Submission
from apscheduler_tasklock.errors import TaskLockStateError
from apscheduler_tasklock.executor import TaskLockExecutor
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.testing.in_memory import MemoryTaskLocks

try:
    from apscheduler.executors.base import run_coroutine_job
except ImportError:  # APScheduler 3.10
    from apscheduler.executors.base_py3 import run_coroutine_job

Answer = TypeVar("Answer")

# Never connected to.
NO_DATABASE = "postgresql://nobody@simulated.invalid/simulated"


class Clock(Protocol):
    """The simulation, as a replica needs it."""

    @property
    def now(self) -> datetime:
        """The time, by a clock that is right."""

    def plan(self, after: float, action: Callable[[], None]) -> None:
        """Call something so many seconds later."""

    def latency(self) -> float:
        """Return the seconds until a worker begins what it was given."""

    def run(self, run: ReplicaRun) -> float:
        """Let a run's function be called; return the seconds for which the run goes on then."""

    def changed(self) -> None:
        """Note that rows have changed."""


class SimulatedLock(HeldLock):
    """A held lock on a simulated clock.

    :ivar clock: returns the seconds that have passed
    """

    clock: Callable[[], float]

    def __init__(self, clock: Callable[[], float], **claim: Any) -> None:
        self.clock = clock
        super().__init__(**claim)

    @property
    def seconds_left(self) -> float:
        """Seconds until ``run_until``; never below 0."""
        return max(0.0, self._ends_at - self.clock())

    @property
    def lease_left(self) -> float:
        """Seconds until the lease ends if it is not renewed; 0 or more."""
        return max(0.0, self._lease_ends_at - self.clock())

    def _call(self, tell: Callable[[], None]) -> None:
        tell()


class SimulatedClient(LockClient):
    """The task locks of a replica, asked for in memory and decided at once, in this thread."""

    def __init__(self, locks: MemoryTaskLocks, name: str, template: LockClient) -> None:
        super().__init__(replace(template.settings, replica_id=name, stand_in=locks))
        self._rows = locks
        self.lag_of: Callable[[datetime | None], float] = lambda _run_time: 0.0
        self.is_stable: Callable[[], bool] = lambda: True
        self.changed: Callable[[], None] = lambda: None

    @property
    def stable(self) -> bool:
        """Whether rows are believed, which they are some seconds after the replica's start."""
        return self.is_stable()

    def ask(self, statement: Callable[[Any], Answer]) -> Answer:
        """Ask at once."""
        return statement(NoCursor())

    def _learn(self, sent: float, database_time: datetime) -> None:
        """Leave it: the clock of the rows is the simulation's."""

    def claim(
        self,
        wanted: AnyRequest | AnyAttempt,
        since: float | None = None,
        known: Any = None,
    ) -> HeldLock | Refusal | None:
        """Claim a task, or take a dead holder's run over."""
        assert isinstance(wanted, (ClaimRequest, TakeoverRequest))
        answer = self._decide(wanted)
        if answer is None or not answer.granted:
            return None if answer is None else Refusal.of(answer)
        self.changed()
        return self._held(wanted, answer)

    def _decide(self, request: ClaimRequest | TakeoverRequest) -> ClaimAnswer | None:
        cursor = NoCursor()
        if isinstance(request, TakeoverRequest):
            return self._protocol.take_over_many(cursor, [request]).get(request.claim_id)
        times = ReadTimes(self.lag_of(request.run_time), None, self.stable)
        return self._protocol.claim(cursor, request, times)

    def _held(self, request: ClaimRequest | TakeoverRequest, answer: ClaimAnswer) -> HeldLock:
        run_time = request.run_time if isinstance(request, ClaimRequest) else None
        dead_holder = None
        if isinstance(request, TakeoverRequest):
            run_time, dead_holder = answer.window_start, request.dead_holder
        return SimulatedLock(
            lambda: seconds(self._rows.now()),
            name=request.task_name,
            token=answer.token,
            claim_id=answer.claim_id,
            run_time=run_time,
            window_start=answer.window_start,
            locked_until=answer.locked_until,
            run_until=answer.run_until,
            ends_at=seconds(answer.run_until),
            lease=request.lease,
            dead_holder=dead_holder,
            extender=self._extend,
        )

    def begin_release(self, held: HeldLock, end: RunEnd = NOT_BEGUN) -> Any:
        """End a claim; return what ``released`` answers."""
        request = ReleaseRequest(held.name, held.claim_id, end, held.token)
        answer = self._protocol.release(NoCursor(), request)
        held.end()
        self.changed()
        return None if answer is None else Released(answer.locked_until)

    def released(
        self, held: HeldLock, ticket: Any, seconds: float | None = None
    ) -> Released | None:
        """Return what became of a release."""
        released: Released | None = ticket
        return released

    def renew(self, held: HeldLock, *, is_last: bool) -> bool:
        """Renew a claim, as the heartbeat does; tell whether it stands."""
        renewal = Renewal(held.name, held.claim_id, held.lease, is_last)
        times = self._protocol.renew(NoCursor(), [renewal]).get(held.claim_id)
        if times is None or times.locked_until is None:
            return False
        held.note_renewal(times.locked_until, times.run_until, seconds(times.run_until))
        return True

    def _extend(self, held: HeldLock, by: float) -> bool:
        times = self._protocol.extend(NoCursor(), held.name, held.claim_id, by, held.lease)
        if times is None or times.locked_until is None:
            return False
        held.note_renewal(times.locked_until, times.run_until, seconds(times.run_until))
        self.changed()
        return True


class SimulatedScheduler(BaseScheduler):  # type: ignore[misc]  # APScheduler has no types
    """A scheduler whose main loop the simulation runs, on the replica's own clock.

    :ivar local_now: returns the time by that clock
    """

    local_now: Callable[[], datetime]

    def __init__(self, local_now: Callable[[], datetime], **options: Any) -> None:
        self.local_now = local_now
        self.on_shutdown: Callable[[], None] = lambda: None
        self._due_at: datetime | None = None
        self._is_known = False
        super().__init__(**options)

    def start(self, paused: bool = False) -> None:
        """Start, unless it runs: an application's own set-up may start it as well."""
        if self.state == STATE_STOPPED:
            super().start(paused)

    def shutdown(self, wait: bool = True) -> None:
        """Stop the replica: nothing is claimed any more; what runs goes on to its end."""
        super().shutdown(wait)
        self.on_shutdown()

    def wakeup(self) -> None:
        """Note that the next run time may be another one."""
        self._is_known = False

    @property
    def due_at(self) -> datetime | None:
        """When the next job is due, by the replica's clock, in UTC; ``None`` if none is."""
        if self.state != STATE_RUNNING:
            return None
        if not self._is_known:
            times = [store.get_next_run_time() for store in self._jobstores.values()]
            # In UTC: within a zone, times are compared and added to without a change of the clocks.
            in_utc = [time.astimezone(timezone.utc) for time in times if time is not None]
            self._due_at = min(in_utc, default=None)
            self._is_known = True
        return self._due_at

    def process_jobs(self) -> None:
        """Submit all jobs that are due, as APScheduler's main loop does."""
        now = self.local_now()
        self._is_known = False
        for alias, store in self._jobstores.items():
            for job in store.get_due_jobs(now):
                run_times, following = _run_times(job, now)
                self._submit(job, alias, run_times[-1:] if job.coalesce else run_times)
                if following is None:
                    self.remove_job(job.id, alias)
                else:
                    job.next_run_time = following
                    store.update_job(job)

    def _submit(self, job: Any, alias: str, run_times: list[datetime]) -> None:
        code = EVENT_JOB_SUBMITTED
        try:
            self._lookup_executor(job.executor).submit_job(job, run_times)
        except MaxInstancesReachedError:
            self._logger.warning(
                "Execution of job %r skipped: maximum number of running instances reached", job.id
            )
            code = EVENT_JOB_MAX_INSTANCES
        except Exception:  # as APScheduler does, whose other jobs go on
            self._logger.exception("Job %r could not be submitted", job.id)
            return
        self._dispatch_event(JobSubmissionEvent(code, job.id, alias, run_times))

    def reschedule_job(
        self, job_id: str, jobstore: str | None = None, trigger: Any = None, **trigger_args: Any
    ) -> Any:
        """Give a job another trigger, from the simulated time on."""
        made = self._create_trigger(trigger, trigger_args)
        following = made.get_next_fire_time(None, self.local_now())
        return self.modify_job(job_id, jobstore, trigger=made, next_run_time=following)

    def resume_job(self, job_id: str, jobstore: str | None = None) -> Any:
        """Let a paused job go on, from the simulated time on."""
        job = self.get_job(job_id, jobstore)
        following = job.trigger.get_next_fire_time(None, self.local_now()) if job else None
        if following is None:
            self.remove_job(job_id, jobstore)
            return None
        return self.modify_job(job_id, jobstore, next_run_time=following)

    def _create_trigger(self, trigger: Any, trigger_args: dict[str, Any]) -> Any:
        """Make a trigger that begins in simulated time where it says nothing of its beginning."""
        now = self.local_now()
        if trigger in (None, "date"):
            trigger_args = {"run_date": now, **trigger_args}
        elif trigger == "calendarinterval" and not trigger_args.get("start_date"):
            trigger_args = {**trigger_args, "start_date": now.date()}
        made = super()._create_trigger(trigger, trigger_args)
        if trigger == "interval":
            has_start = bool(trigger_args.get("start_date"))
        else:
            # The default start is when it was made, which is hardly ever on a whole second.
            has_start = not isinstance(made, IntervalTrigger) or not made.start_date.microsecond
        if not has_start:
            start = now + made.interval
            made = IntervalTrigger(
                seconds=made.interval_length,
                start_date=start.astimezone(made.timezone),
                end_date=made.end_date,
                timezone=made.timezone,
                jitter=made.jitter,
            )
        return made

    def _real_add_job(self, job: Any, jobstore_alias: str, replace_existing: bool) -> None:
        if not hasattr(job, "next_run_time"):
            job.next_run_time = job.trigger.get_next_fire_time(None, self.local_now())
        super()._real_add_job(job, jobstore_alias, replace_existing)


def _run_times(job: Any, now: datetime) -> tuple[list[datetime], datetime | None]:
    """Return the run times of a job that are due, and the one after them.

    :raises TaskLockStateError: its trigger does not get on
    """
    run_times, run_time = [], job.next_run_time
    # In seconds: two times of one zone are compared without their offsets from UTC.
    while run_time is not None and seconds(run_time) <= seconds(now):
        run_times.append(run_time)
        run_time = job.trigger.get_next_fire_time(run_time, now)
        if run_time is not None and seconds(run_time) <= seconds(run_times[-1]):
            raise TaskLockStateError(
                f"job {job.id!r}: after the run time {run_times[-1]} its trigger {job.trigger} "
                f"gives {run_time}, which is not later. A scheduler of APScheduler would hang there"
            )
    return run_times, run_time


class ReplicaRun:
    """A submission in a worker: its run times, one after the other.

    :ivar attempt: at its present run time
    :ivar held: the lock that it holds
    :ivar is_over: whether nothing of it is left to do
    """

    def __init__(self, executor: SimulatedExecutor, submission: Submission) -> None:
        self.submission = submission
        self.attempt: RunAttempt | None = None
        self.held: HeldLock | None = None
        self.is_over = False
        self._executor = executor
        self._clock = executor.clock
        self._job: JobView | None = None
        self._result = RunResult(submission.claim_ids)
        self._left = self._attempts()
        self._context = contextvars.copy_context()
        self._holding = ExitStack()
        self._is_called = False
        self._events: list[Any] = []

    @property
    def replica(self) -> str:
        """The replica's name."""
        return self._executor.client.replica_id

    @property
    def job_id(self) -> str:
        """The job's id."""
        return str(self.submission.job.id)

    @property
    def run_time(self) -> datetime:
        """The run time that it is for."""
        assert self.attempt is not None
        return self.attempt.run_time

    @property
    def error(self) -> BaseException | None:
        """What its function raised."""
        raised = [event.exception for event in self._events if event.code == EVENT_JOB_ERROR]
        return raised[0] if raised else None

    def _attempts(self) -> Iterator[RunAttempt]:
        submission = self.submission
        for run_time, claim_id in zip(submission.run_times, submission.claim_ids, strict=True):
            yield self._executor.attempt(submission, run_time, claim_id)

    def work(self) -> None:
        """Claim run times until one is granted, and begin to run it; or be over."""
        if not self._executor.is_alive:
            return
        for attempt in self._left:
            self.attempt = attempt
            job = attempt.begin()
            if attempt.blocked is not None:
                self._result.blocked.append(attempt.blocked)
            if job is not None:
                self._begin(job)
                return
        self._end_submission()

    def _begin(self, job: JobView) -> None:
        attempt = self.attempt
        assert attempt is not None
        self._context = contextvars.copy_context()
        # What is current within a run is so in its own context, and nowhere else.
        self._context.run(self._holding.enter_context, attempt.holding())
        self.held = attempt.held
        self._executor.running.append(self)
        if self.held is not None:
            self._renew_later(self.held, last_renewal(self.held))
        self._job = job
        self._clock.plan(self._clock.run(self), self._end)

    def call(self) -> None:
        """Call the job's function, and keep what APScheduler says of it."""
        self._is_called = True
        try:
            self._call()
        finally:
            self._is_called = False
        if self.is_over:  # it has stopped or killed its own replica
            self._leave()

    def _call(self) -> None:
        submission, run_times = self.submission, [self.run_time]
        arguments: Any = (self._job, submission.jobstore, run_times, submission.logger_name)
        if not submission.awaited:
            self._events = self._context.run(run_job, *arguments)
            return

        def work() -> None:
            self._events = self._context.run(asyncio.run, run_coroutine_job(*arguments))

        # In a thread: an event loop may be running in this one, as in a test that is a coroutine.
        thread = threading.Thread(target=work, name="simulated-coroutine")
        thread.start()
        thread.join()

    def _renew_later(self, held: HeldLock, last: float) -> None:
        """Renew a claim as the heartbeat does.

        :param last: seconds before the end of its maximum lock of its last renewal; 0 after that
        """
        interval = inf if held.lease is None else held.lease / 3
        wait = min(interval, held.seconds_left - last)

        def renew() -> None:
            if self.held is not held or not self._executor.is_alive:
                return
            is_last = held.seconds_left <= last * 1.5
            if held.lost or not self._executor.client.renew(held, is_last=is_last):
                if held.lease is not None:
                    held.lose()
            elif held.lease is not None or not is_last:
                self._renew_later(held, 0.0 if is_last else last)

        self._clock.plan(max(0.0, wait), renew)

    def _end(self) -> None:
        """End a run whose time is over, unless it was cut short; go on with the next run time."""
        if self.is_over or not self._executor.is_alive:
            return
        attempt = self.attempt
        assert attempt is not None
        self._leave()
        attempt.end(self._events)
        self._executor.ended(self)
        self._result.extend(self._events)
        self.work()

    def cut(self) -> None:
        """Cut the run of a coroutine short, as a shutdown does."""
        attempt = self.attempt
        assert attempt is not None
        ticket = attempt.begin_cut()
        if ticket is not None:
            attempt.report_end(ticket)
        self._leave()
        self._executor.ended(self, "cancelled")
        self._end_submission()

    def die(self) -> None:
        """Be gone with the replica, which releases nothing."""
        self._leave()
        self.is_over = True
        self._executor.ended(self, "died")

    def _leave(self) -> None:
        self.held = None
        if not self._is_called:  # or else its context is in use until the function returns
            self._context.run(self._holding.close)

    def _end_submission(self) -> None:
        self.is_over = True
        self._executor.report(self.job_id, self._result)


class SimulatedExecutor(TaskLockExecutor):
    """The lock-aware executor of a simulated replica. It has workers without number.

    :param clock: the simulation
    :param locks: the rows
    :param name: the replica's
    :param local_now: returns the time by the replica's clock
    :ivar client: asks for claims
    :ivar running: the runs that go on
    :ivar is_alive: whether the replica was not killed
    """

    def __init__(
        self,
        clock: Clock,
        locks: MemoryTaskLocks,
        name: str,
        local_now: Callable[[], datetime],
        **options: Any,
    ) -> None:
        self.clock = clock
        self.local_now = local_now
        self.running: list[ReplicaRun] = []
        self.is_alive = True
        self.on_ended: Callable[[ReplicaRun, str], None] = lambda _run, _outcome: None
        super().__init__(NO_DATABASE, replica_id=name, **options)
        self.client = SimulatedClient(locks, name, self.locks)
        self.client.lag_of = self._lag
        self.client.changed = clock.changed
        self._begin(self.client)

    def _clock(self) -> float:
        return self.local_now().timestamp()

    def _lag(self, run_time: datetime | None) -> float:
        return 0.0 if run_time is None else max(0.0, self._clock() - run_time.timestamp())

    def start(self, scheduler: Any, alias: str) -> None:
        """Start, without a database and without threads."""
        BaseExecutor.start(self, scheduler, alias)
        for job, jobstore in self._adapter.pending_jobs(alias):
            self._jobs.resolve(job, jobstore)
        self._add_listeners(scheduler)

    def shutdown(self, wait: bool = True) -> None:
        """Claim nothing more; what runs goes on, but for coroutines, which are cut."""
        self.locks.stop_claiming()
        self._watch.looks.close()
        self.client.stop_replica()
        for run in list(self.running):
            if run.submission.awaited:
                run.cut()

    @property
    def looks(self) -> bool:
        """Whether it still looks at the rows of its tasks."""
        return self.is_alive and not self._watch.closed

    @property
    def is_watching(self) -> bool:
        """Whether it wants to see a row whatever its state."""
        return self._watch.is_watching

    @property
    def poll_interval(self) -> float:
        """Seconds between two looks at the rows."""
        return self._watch.looks.interval

    def look(self) -> None:
        """Look at the rows, and give a sign of life if there is something to tell."""
        self.client.ask_all(self._watch.look())
        self.client.ask_all(self._presence.tell())

    def attempt(self, submission: Submission, run_time: datetime, claim_id: UUID) -> RunAttempt:
        """Return an attempt at a run time."""
        notifier = Notifier(self._adapter.dispatch, self._blocked)
        return RunAttempt(submission, run_time, claim_id, self.client, notifier, clock=self._clock)

    def _hand_to_worker(self, submission: Submission) -> None:
        job = submission.job
        if self._instances[job.id] >= job.max_instances:
            raise MaxInstancesReachedError(job)
        self._instances[job.id] += 1
        self.clock.plan(self.clock.latency(), ReplicaRun(self, submission).work)

    def ended(self, run: ReplicaRun, outcome: str | None = None) -> None:
        """Note that a run is over."""
        self.running.remove(run)
        if outcome is None:
            outcome = "ok" if run.error is None else "error"
        self.on_ended(run, outcome)

    def report(self, job_id: str, result: RunResult) -> None:
        """Tell the listeners of a submission that is over, as an executor does."""
        self._instances[job_id] -= 1
        for event in result:
            self._adapter.dispatch(event)
        self._ended(job_id, result)
        self.clock.changed()


def seconds(moment: datetime) -> float:
    """Return a time in seconds since 1970."""
    return (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) / timedelta(seconds=1)
