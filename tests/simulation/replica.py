"""A replica on a simulated clock: an APScheduler scheduler with its own ``TaskLockExecutor``.

The library's own code decides: the executor, its looks, its ``ExecutorRuns`` with their queue, and
the rule in memory. Stand-ins replace the surroundings: the clock, the threads, the scheduler's main
loop, and the workers and the event loop of the wrapped executor.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import greenlet
from apscheduler.events import EVENT_JOB_MAX_INSTANCES, EVENT_JOB_SUBMITTED, JobSubmissionEvent
from apscheduler.executors.base import BaseExecutor, MaxInstancesReachedError, run_job
from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED, BaseScheduler
from apscheduler.triggers.interval import IntervalTrigger
from apscheduler.util import iscoroutinefunction_partial

from apscheduler_tasklock import executor, lock
from apscheduler_tasklock._database import thread
from apscheduler_tasklock._database.sequences import ask_here
from apscheduler_tasklock._database.session import NoCursor
from apscheduler_tasklock._lock import claim_attempts
from apscheduler_tasklock._lock.claims import Claimed, Report
from apscheduler_tasklock._lock.heartbeat import seconds_from_last_renewal_to_end
from apscheduler_tasklock._lock.outcomes import NOT_BEGUN, RunOutcome
from apscheduler_tasklock._runs import (
    driven_queue,
    executor_run,
    executor_runs,
    leadership,
    misfires,
    missed_runs,
    watch,
)
from apscheduler_tasklock._runs.adapter import UNKNOWN_WORKERS, intercept_reports, jobstore_of, wrap
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockSchemaError,
    TaskLockStateError,
)
from apscheduler_tasklock.executor import TaskLockExecutor
from apscheduler_tasklock.lock import HeldLock, current_lock
from tests.simulation.stepping import SteppingThread
from tests.simulation.workers import Pool
from tests.simulation.world import (
    BEGIN,
    CLOCK,
    Giver,
    Process,
    VirtualDatetime,
    World,
    call_application,
    replaced,
)
from tests.support.internals import has_notes, safe_look
from tests.support.waist import (
    AnyAttempt,
    Claim,
    ClaimAnswer,
    ClaimOutcome,
    ClaimRequest,
    ClaimTimes,
    Closing,
    Database,
    ExecutorParts,
    ExecutorRuns,
    Extend,
    HeldLocks,
    LockClient,
    MemoryTaskLocks,
    MissNote,
    MissNotes,
    Outage,
    Refusal,
    Released,
    ReleaseRequest,
    Renewal,
    Renewals,
    RerunRequest,
    ScheduleNote,
    ScheduleNotes,
    Statements,
    Stop,
    held_locks,
)

try:
    from apscheduler.executors.base import run_coroutine_job
except ImportError:  # APScheduler 3.10
    from apscheduler.executors.base_py3 import run_coroutine_job

Answer = TypeVar("Answer")

# A URL to which nothing connects.
NO_DATABASE = "postgresql://nobody@simulated.invalid/simulated"

ASKS_THE_TIME = (
    executor_run,
    claim_attempts,
    executor,
    driven_queue,
    leadership,
    misfires,
    missed_runs,
    lock,
    executor_runs,
    thread,
    watch,
)
ASKS_THE_DATE = (held_locks, executor_runs, missed_runs)
CALLS_THE_APPLICATION = (lock, executor_runs)


@contextmanager
def simulating(world: World) -> Iterator[None]:
    """Replace the clock and the threads of the library's modules by a world's."""
    CLOCK.world = world
    # The running event loop of a test that is a coroutine is hidden from the world.
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        with replaced(
            *((module, "time", CLOCK) for module in ASKS_THE_TIME),
            *((module, "datetime", VirtualDatetime) for module in ASKS_THE_DATE),
            *((module, "call_application", call_application) for module in CALLS_THE_APPLICATION),
            (executor_runs, "jittered", CLOCK.jittered),
            (executor_runs, "ApplicationThread", Giver),
        ):
            yield
    finally:
        asyncio._set_running_loop(running)


class Simulation(Protocol):
    """The simulation, as a replica needs it."""

    def latency(self) -> float:
        """Return the seconds that a claim takes to the database."""

    def begin(self, run: ReplicaRun) -> None:
        """Note the call of a run's function."""

    def duration(self, run: ReplicaRun) -> float:
        """Return the seconds for which a run goes on after its function has returned."""

    def end(self, run: ReplicaRun, outcome: str) -> None:
        """Note that a run is over."""

    def changed(self) -> None:
        """Note that rows have changed."""

    def miss(self, replica: str, notes: Sequence[MissNote]) -> None:
        """Note the run times that a replica's look has noted as missed."""

    def reschedule(self, replica: str, notes: Sequence[ScheduleNote]) -> None:
        """Note the changes of schedules that a replica's look has noted."""

    def look_latency(self) -> float:
        """Return the seconds that each answer of a look takes."""


@dataclass(eq=False)
class ReplicaRun:
    """A run in a worker of the wrapped executor, or on its event loop.

    :ivar held: the lock under which its function was called
    """

    job_id: str
    run_time: datetime
    replica: str
    held: HeldLock | None = None


# The run whose function is running.
_run: ContextVar[ReplicaRun | None] = ContextVar("simulated_run", default=None)


def is_in_a_job() -> bool:
    """Return whether the caller is a job of a simulation."""
    return _run.get() is not None


def sleep(world: World, seconds: float) -> None:
    """Let a job take longer, and block its event loop meanwhile."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        world.sleep(seconds)
    finally:
        asyncio._set_running_loop(running)


@dataclass(frozen=True)
class _Release:
    """A release that has arrived."""

    released: Released | None
    future: Future[None]


class SimulatedOutage(Outage):
    """Whether the database is there, and the rows are believed: some time after a start."""

    is_stable: Callable[[], bool] = staticmethod(lambda: True)

    @property
    def stable(self) -> bool:
        """Whether rows are believed."""
        return self.is_stable()


class Lines:
    """What a replica's statements meet on their way to the rows in memory.

    :ivar cut_until: until when claims and looks have no answer, on the virtual clock. Renewals and
        releases go on.
    :ivar rejected_until: until when the database rejects claims and looks, on the virtual clock
    :ivar answers_take: seconds that the answers of claims take
    """

    def __init__(self, world: World, outage: Any) -> None:
        self.cut_until = self.rejected_until = -inf
        self.answers_take = 0.0
        self._world = world
        self._outage = outage

    def is_cut(self) -> bool:
        """Return whether there are no answers now; the replica then knows of an outage."""
        is_cut = self._world.now < self.cut_until
        self._outage.reason = "no answer" if is_cut else None
        return is_cut

    @property
    def rejects(self) -> bool:
        """Whether the database rejects what it is asked now."""
        return self._world.now < self.rejected_until


class SimulatedDatabase(Database):
    """The database of a replica, which answers at once."""

    def __init__(self, client: SimulatedClient, simulation: Simulation) -> None:
        super().__init__(client.replica, client.settings, Closing())
        self.thread = client.stepping
        self._clock = SimpleNamespace(note=lambda *_: None)  # the rows have the simulation's clock
        self._lines = client.lines
        self._name = client.replica_id
        self._simulation = simulation

    def ask(
        self, statement: Callable[[Any], Answer], _until: float = inf, *, goes_first: bool = False
    ) -> Answer:
        """Ask at once."""
        del goes_first
        if self._lines.is_cut():
            raise TaskLockDatabaseError("no answer")
        if self._lines.rejects:
            raise TaskLockSchemaError("a right is missing")
        return statement(NoCursor())

    def carrying_out(self, message: Any) -> Callable[[Any], Any]:
        """Tell the simulation what is noted in the history, because there is none in memory."""
        send = super().carrying_out(message)

        def carry_out(cursor: Any) -> Any:
            if isinstance(message, MissNotes):
                self._simulation.miss(self._name, message.notes)
            if isinstance(message, ScheduleNotes):
                self._simulation.reschedule(self._name, message.notes)
            return send(cursor)

        return carry_out

    def begin_despite_stop(self, message: Any) -> None:
        """Send a message at once."""
        self.protocol.execute(NoCursor(), message)


class SimulatedLocks(HeldLocks):
    """The locks of a replica. A claim is decided when it arrives, everything else at once."""

    def __init__(
        self, client: SimulatedClient, world: World, process: Process, simulation: Simulation
    ) -> None:
        super().__init__(client.replica, client.settings, client.database, client.closing)
        self._client = client
        self._lines = client.lines
        self._world = world
        self._process = process
        self._simulation = simulation
        self._statements = Statements(client.database.protocol)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call a function later, unless the replica is killed before."""

        def act() -> None:
            if not self._process.is_dead:
                with self._world.acting(self._process):
                    action()

        self._world.call_at(self._world.now + seconds, act)

    def begin_claims(self, attempts: Sequence[Any], most: int | None, tell: Report) -> None:
        """Begin claims, of which at most so many are granted."""
        if self._lines.is_cut():
            error = TaskLockDatabaseError("no answer")
            self._later(self.settings.claim_timeout, lambda: tell([(a, error) for a in attempts]))
            return

        def decide() -> None:
            if self._lines.rejects:
                rejected = TaskLockSchemaError("a right is missing")
                tell([(attempt, rejected) for attempt in attempts])
                return
            decided = list(self._decide_all(attempts, most))
            if self._lines.answers_take:
                self._later(self._lines.answers_take, lambda: self._take_in(decided, tell))
            else:
                self._take_in(decided, tell)

        self._later(self._simulation.latency(), decide)

    def _take_in(self, decided: Sequence[tuple[AnyAttempt, Claimed]], tell: Report) -> None:
        for _, claimed in decided:
            if isinstance(claimed, HeldLock):
                self._renew_later(claimed, seconds_from_last_renewal_to_end(claimed))
        tell(decided)

    def _decide_all(
        self, attempts: Sequence[AnyAttempt], most: int | None
    ) -> Iterator[tuple[AnyAttempt, Claimed]]:
        left = inf if most is None else most
        for each in attempts:
            claimed = self._decide(each) if left > 0 else ClaimOutcome.BEYOND
            left -= isinstance(claimed, HeldLock)
            yield each, claimed

    def _decide(self, attempt: AnyAttempt) -> Claimed:
        request = attempt.request
        if self.closed:
            return TaskLockError(f"task {request.task_name!r} is not claimed: the replica stops")
        answer = self._answer(request)
        if answer is None or not answer.granted:
            return None if answer is None else Refusal.of(answer)
        claim_attempts.report_closed_runs([attempt], {request.claim_id: answer})
        self._simulation.changed()
        return self._held(request, answer)

    def _answer(self, request: Any) -> ClaimAnswer | None:
        if not isinstance(request, ClaimRequest):
            return self._statements.rerun(request, ClaimTimes(stable=self.replica.outage.stable))
        times = ClaimTimes(self._client.lag_of(request.run_time), None, self.replica.outage.stable)
        return self._statements.ask(Claim(request, times))

    def _held(self, request: ClaimRequest | RerunRequest, answer: ClaimAnswer) -> HeldLock:
        run_time: datetime | None = None if answer.manual else answer.window_start
        was_due_at = None
        if isinstance(request, ClaimRequest):
            run_time, was_due_at = request.run_time, answer.due_at
        dead_holder = getattr(request, "dead_holder", None)
        held = HeldLock(
            name=request.task_name,
            token=answer.token,
            claim_id=answer.claim_id,
            run_time=run_time,
            window_start=answer.window_start,
            locked_until=answer.locked_until,
            run_until=answer.run_until,
            ends_at=self._monotonic(answer.run_until),
            lease=request.lease,
            dead_holder=dead_holder,
            was_due_at=was_due_at,
            attempt=answer.attempt,
            extender=self._extend,
        )
        self._running[held.claim_id] = held, answer.database_time
        return held

    def _monotonic(self, moment: datetime) -> float:
        return BEGIN + (moment - self._world.start_time).total_seconds()

    def withdraw(self, attempt: AnyAttempt) -> None:
        """Do nothing, because a claim that is under way at a stop is not granted."""

    def begin_release(
        self, held: HeldLock, end: RunOutcome = NOT_BEGUN, arrived_late: object = None
    ) -> Any:
        """Release a claim, or hand its window over."""
        request = ReleaseRequest(held.name, held.claim_id, end, held.token)
        answer = None
        if not self._process.is_dead:
            answer = self._statements.ask(request)
        self._running.pop(held.claim_id, None)
        held.end()
        self._simulation.changed()
        future: Future[None] = Future()
        future.set_result(None)
        released = None if answer is None else Released(answer.locked_until, answer.retry_at)
        return _Release(released, future)

    def wait_for_release(self, release: Any, seconds: float | None = None) -> Released | None:
        """Return the result of a release."""
        del seconds
        released: Released | None = release.released
        return released

    def renew_now(self, held: HeldLock) -> bool:
        """Renew a claim; return whether it stands."""
        return self._renew(held, is_last=False)

    async def renew_now_async(self, held: HeldLock) -> bool:
        """Do the same in a coroutine."""
        return self._renew(held, is_last=False)

    def _renew(self, held: HeldLock, *, is_last: bool) -> bool:
        renewal = Renewal(held.name, held.claim_id, held.lease, is_last)
        times = self._statements.ask(Renewals([renewal])).get(held.claim_id)
        if times is None or times.locked_until is None:
            return False
        held.note_renewal(times.locked_until, times.run_until, self._monotonic(times.run_until))
        return True

    def _renew_later(self, held: HeldLock, last: float) -> None:
        """Renew a claim as the heartbeat does.

        :param last: the seconds from the last renewal to the end of the maximum lock; 0 after it
        """
        interval = inf if held.lease is None else held.lease / 3
        wait = min(interval, held.seconds_left - last)
        self._later(max(0.0, wait), partial(self._renew_once, held, last))

    def _renew_once(self, held: HeldLock, last: float) -> None:
        is_last = held.seconds_left <= last * 1.5
        if held.lost or not self._renew(held, is_last=is_last):
            if held.lease is not None:
                held.lose()
        elif held.lease is not None or not is_last:
            self._renew_later(held, 0.0 if is_last else last)

    def _extend(self, held: HeldLock, by: float) -> bool:
        times = self._statements.ask(Extend(held.name, held.claim_id, by, held.lease))
        if times is None or times.locked_until is None:
            return False
        held.note_renewal(times.locked_until, times.run_until, self._monotonic(times.run_until))
        self._simulation.changed()
        return True


class SimulatedClient(LockClient):
    """The lock client of a replica, whose rows are in memory."""

    def __init__(
        self,
        locks: MemoryTaskLocks,
        name: str,
        template: Any,
        world: World,
        process: Process,
        simulation: Simulation,
    ) -> None:
        super().__init__(replace(template.settings, replica_id=name, stand_in=locks))
        self.lag_of: Callable[[datetime | None], float] = lambda _run_time: 0.0
        self.outage = self.replica.outage = SimulatedOutage(self.where)
        self.lines = Lines(world, self.outage)
        self.thread = self.stepping = SteppingThread(world, process)
        self.database = SimulatedDatabase(self, simulation)
        self.locks = SimulatedLocks(self, world, process, simulation)
        self.note_methods()

    @property
    def closing(self) -> Closing:
        """The stop of this client."""
        return self._closing


class SimulatedScheduler(BaseScheduler):  # type: ignore[misc]  # APScheduler has no types
    """A scheduler whose main loop the simulation runs, on the replica's own clock.

    :ivar local_now: returns the time by the replica's clock
    """

    local_now: Callable[[], datetime]

    def __init__(self, local_now: Callable[[], datetime], **options: Any) -> None:
        self.local_now = local_now
        self.on_shutdown: Callable[[], None] = lambda: None
        self._due_at: datetime | None = None
        self._is_known = False
        super().__init__(**options)

    def start(self, paused: bool = False) -> None:
        """Start, unless it runs already, because an application's set-up may start it, too."""
        if self.state == STATE_STOPPED:
            super().start(paused)

    def shutdown(self, wait: bool = True) -> None:
        """Stop the replica: it claims nothing any more, and its runs go on to their ends."""
        super().shutdown(wait)
        self.on_shutdown()

    def wakeup(self) -> None:
        """Do what a wake-up needs: the next run time may have changed."""
        self._is_known = False

    @property
    def due_at(self) -> datetime | None:
        """When the next job is due, by the replica's clock, in UTC; ``None``: never."""
        if self.state != STATE_RUNNING:
            return None
        if not self._is_known:
            times = [store.get_next_run_time() for store in self._jobstores.values()]
            # In UTC, because Python ignores clock changes when it compares times of one zone.
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
        except Exception:  # as in APScheduler, the other jobs are submitted all the same
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
        """Resume a paused job, from the simulated time on."""
        job = self.get_job(job_id, jobstore)
        following = job.trigger.get_next_fire_time(None, self.local_now()) if job else None
        if following is None:
            self.remove_job(job_id, jobstore)
            return None
        return self.modify_job(job_id, jobstore, next_run_time=following)

    def _create_trigger(self, trigger: Any, trigger_args: dict[str, Any]) -> Any:
        """Make a trigger. A default start is in simulated time."""
        now = self.local_now()
        if trigger in (None, "date"):
            trigger_args = {"run_date": now, **trigger_args}
        elif trigger == "calendarinterval" and not trigger_args.get("start_date"):
            trigger_args = {**trigger_args, "start_date": now.date()}
        made = super()._create_trigger(trigger, trigger_args)
        if trigger == "interval":
            has_start = bool(trigger_args.get("start_date"))
        else:
            # A default start has microseconds, because it is the moment of the trigger's making.
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
    """Return the due run times of a job, and the following one.

    :raises TaskLockStateError: the trigger makes no progress
    """
    run_times, run_time = [], job.next_run_time
    # In seconds, because Python compares two times of one zone without their offsets.
    while run_time is not None and seconds(run_time) <= seconds(now):
        run_times.append(run_time)
        run_time = job.trigger.get_next_fire_time(run_time, now)
        if run_time is not None and seconds(run_time) <= seconds(run_times[-1]):
            raise TaskLockStateError(
                f"job {job.id!r}: after the run time {run_times[-1]} its trigger {job.trigger} "
                f"gives {run_time}, which is not later. A scheduler of APScheduler would hang there"
            )
    return run_times, run_time


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on a virtual thread, with timers and without files and sockets."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._selector = self
        self._world = world
        self._wakes: list[Callable[[], None]] = []

    def __del__(self) -> None:
        """Do nothing, because the loop has no open files and lives as long as its simulation."""

    def time(self) -> float:
        """Return the virtual time."""
        return self._world.now

    def select(self, timeout: float | None) -> list[Any]:
        """Wait for the next timer, in place of a selector."""
        if timeout is None or timeout > 0:
            # Other threads run meanwhile, which are not on this loop.
            asyncio._set_running_loop(None)
            until = inf if timeout is None else self._world.now + timeout
            self._world.wait(until, self._wakes.append)
            asyncio._set_running_loop(self)
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()


class SimulatedWorkers(BaseExecutor):  # type: ignore[misc]  # APScheduler has no types
    """The wrapped executor: a pool of workers for functions, and an event loop for coroutines.

    :param count: the number of workers; ``None``: no limit. By default that of the library for
        unknown executors.
    """

    def __init__(self, world: World, process: Process, count: int | None = UNKNOWN_WORKERS) -> None:
        super().__init__()
        self._world = world
        self._process = process
        self.workers = Pool(world, process, count)
        self._loop: VirtualLoop | None = None
        self._pending_futures: set[Any] = set()  # named as in an event loop's executor

    def shutdown(self, wait: bool = True) -> None:
        """Cancel coroutines, as an event loop's executor does; functions go on."""
        for future in self._pending_futures:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(future.cancel)

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        arguments = (job, jobstore_of(job), run_times, self._logger.name)
        run = ReplicaRun(str(job.id), run_times[0], self._process.name)
        if not iscoroutinefunction_partial(job.func):
            self.workers.submit(partial(self._work, run, job.id, arguments))
            return
        if self._loop is None:
            self._loop = VirtualLoop(self._world)
            self._world.start(self._process, self._loop.run_forever, daemon=True)
        self._loop.call_soon_threadsafe(self._await, run, job.id, arguments)

    def _work(self, run: ReplicaRun, job_id: str, arguments: Sequence[Any]) -> None:
        before = _run.set(run)
        try:
            self._report(job_id, partial(run_job, *arguments))
        finally:
            _run.reset(before)

    def _await(self, run: ReplicaRun, job_id: str, arguments: Sequence[Any]) -> None:
        assert self._loop is not None
        _run.set(run)
        task = self._loop.create_task(run_coroutine_job(*arguments))
        self._pending_futures.add(task)

        def done(_task: Any) -> None:
            self._pending_futures.discard(task)
            self._report(job_id, task.result)

        task.add_done_callback(done)

    def _report(self, job_id: str, result: Callable[[], Any]) -> None:
        try:
            events = result()
        except greenlet.GreenletExit:  # the world is over
            raise
        except BaseException:  # noqa: BLE001  # as in APScheduler's pools
            self._run_job_error(job_id, *sys.exc_info()[1:])
        else:
            self._run_job_success(job_id, events)


@dataclass(frozen=True)
class NotingParts(ExecutorParts):
    """The parts of a simulated executor, which notes that a submission is over.

    :ivar noted: called when a submission is over
    """

    noted: Callable[[], object]

    def note_over(self, submission: Submission) -> None:
        """Note that all runs of a submission are over."""
        super().note_over(submission)
        self.noted()


class SimulatedExecutor(TaskLockExecutor):
    """The lock-aware executor of a simulated replica.

    :param simulation: the simulation, which notes the runs
    :param world: the clock and the threads
    :param process: the replica's process
    :param locks: the rows
    :param local_now: returns the time by the replica's clock
    :ivar client: the lock client
    :ivar running: the runs that go on
    :ivar is_woken: whether the next look is to come at once
    """

    def __init__(
        self,
        simulation: Simulation,
        world: World,
        process: Process,
        locks: MemoryTaskLocks,
        local_now: Callable[[], datetime],
        **options: Any,
    ) -> None:
        self.local_now = local_now
        self.running: list[ReplicaRun] = []
        self.is_woken = False
        self._is_looking = False
        self._simulation = simulation
        self._world = world
        self._process = process
        super().__init__(NO_DATABASE, replica_id=process.name, **options)
        self.client = SimulatedClient(locks, process.name, self.user, world, process, simulation)
        self.client.lag_of = self._lag
        self._begin(self.client)

    def _begin(self, user: Any) -> None:
        super()._begin(user)
        self._parts = NotingParts(**vars(self._parts), noted=self._simulation.changed)
        setattr(self._watch.looks, "wake", self._wake_looks)  # noqa: B010  # in place of a method

    def _clock(self) -> float:
        return self.local_now().timestamp()

    def _lag(self, run_time: datetime | None) -> float:
        return 0.0 if run_time is None else max(0.0, self._clock() - run_time.timestamp())

    def start(self, scheduler: Any, alias: str) -> None:
        """Start, without a database and without threads."""
        BaseExecutor.start(self, scheduler, alias)
        self._inner = SimulatedWorkers(self._world, self._process)
        for job, jobstore in self._adapter.pending_jobs(alias):
            self._jobs.resolve(job, jobstore)
        with replaced((executor_runs, "jittered", CLOCK.jittered)):
            self._runs = made = self._make_runs()
        assert made is not None
        self._inner.start(scheduler, alias)
        wrap(self, self._inner)
        intercept_reports(self._inner, made)
        self._add_listeners(scheduler)

    def shutdown(self, wait: bool = True) -> None:
        """Claim nothing more. Functions go on to their ends; coroutines are cut."""
        self._stop_claiming(0.0, closes=True)
        self.client.ask(self.client.carrying_out(Stop()))
        self._inner.shutdown(wait)
        for run in list(self._runs.coroutines) if isinstance(self._runs, ExecutorRuns) else ():
            release = run.begin_cut()
            if release is not None:
                run.report_release(release)

    @property
    def pool(self) -> Pool:
        """The workers of the wrapped executor."""
        return self._inner.workers  # type: ignore[no-any-return]  # of any executor

    @property
    def looks(self) -> bool:
        """Whether the executor still looks at the rows of its tasks."""
        return not (self._process.is_dead or self._watch.looks.closed)

    @property
    def is_watching(self) -> bool:
        """Whether the executor needs the states of some rows in any case."""
        return self._watch.is_watching

    @property
    def has_notes(self) -> bool:
        """Whether the next look has something to tell, whatever the rows are like."""
        return has_notes(self)

    @property
    def leads(self) -> bool:
        """Whether the replica has led when it looked last."""
        return self._leadership is not None and self._leadership.leads

    @property
    def is_in_leader_mode(self) -> bool:
        """Whether each look may take or renew the leadership, and so must be made."""
        return self._leadership is not None

    @property
    def poll_interval(self) -> float:
        """Seconds between two looks at the rows."""
        return self._watch.looks.interval

    def _wake_looks(self) -> None:
        self.is_woken = True

    def look(self) -> None:
        """Look at the rows, and report the replica if its report has changed."""
        self.is_woken = False
        seconds = self._simulation.look_latency()
        if not seconds:
            self._look(0.0)
        elif not self._is_looking:
            self._is_looking = True
            self._world.start(self._process, partial(self._look, seconds), daemon=True)

    def _look(self, seconds: float) -> None:
        def ask(statement: Callable[[Any], Any]) -> Any:
            answer = self.client.ask(statement)
            if seconds:
                self._world.sleep(seconds)
            return answer

        is_cut = self._world.now < self.client.lines.cut_until
        # Other errors are raised, because they are mistakes.
        ask_here(safe_look(self._watch) if is_cut else self._watch.look(), ask)
        if not is_cut:
            ask_here(self._presence.send(), ask)
        self._is_looking = False

    def wrap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls a job's function and takes the simulated time."""
        if iscoroutinefunction_partial(function):

            async def call_async(*arguments: Any, **named: Any) -> Any:
                with self._running() as run:
                    try:
                        returned = await function(*arguments, **named)
                    except Exception:
                        await asyncio.sleep(self._simulation.duration(run))
                        raise
                    await asyncio.sleep(self._simulation.duration(run))
                    return returned

            return call_async

        def call(*arguments: Any, **named: Any) -> Any:
            with self._running() as run:
                try:
                    returned = function(*arguments, **named)
                except Exception:
                    self._world.sleep(self._simulation.duration(run))
                    raise
                self._world.sleep(self._simulation.duration(run))
                return returned

        return call

    @contextmanager
    def _running(self) -> Iterator[ReplicaRun]:
        run = _run.get()
        assert run is not None
        run.held = current_lock()
        self.running.append(run)
        self._simulation.begin(run)
        outcome = "ok"
        try:
            yield run
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except BaseException:
            outcome = "error"
            raise
        finally:
            self.running.remove(run)
            self._simulation.end(run, outcome)


def seconds(moment: datetime) -> float:
    """Return a time in seconds since 1970."""
    return (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) / timedelta(seconds=1)
