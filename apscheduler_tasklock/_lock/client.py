"""The task locks of one replica: claimed, renewed, released, and never left behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from math import inf
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

from psycopg.errors import InsufficientPrivilege
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.background import BackgroundThreads
from apscheduler_tasklock._database.connection import attempt_limit
from apscheduler_tasklock._database.deadline import (
    RELEASE_LIMIT,
    SHUTDOWN_LIMIT,
    Closing,
    Deadline,
)
from apscheduler_tasklock._database.errors import NotSentError, RowLockedError, ServerFullError
from apscheduler_tasklock._database.exchange import MOST_TOGETHER, Call, Exchange, Outcome
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.pool import NoDatabase, Pool, make_pool, make_second_pool
from apscheduler_tasklock._database.rejections import (
    CLAIMS,
    REGISTRATIONS,
    RUN_HISTORY,
    Rejections,
)
from apscheduler_tasklock._database.retry import BACKOFF, LOCKED_BACKOFF, Retrier, jittered
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.url import as_url, describe
from apscheduler_tasklock._lock.claim import (
    AnyRequest,
    ClaimAttempt,
    ClaimContext,
    Decision,
    HandOutAttempt,
    ManualAttempt,
    TakeoverAttempt,
)
from apscheduler_tasklock._lock.clock import DatabaseClock
from apscheduler_tasklock._lock.commands import command_line
from apscheduler_tasklock._lock.heartbeat import Heartbeat
from apscheduler_tasklock._lock.jobs import JobRows
from apscheduler_tasklock._lock.lifetime import InProgress, Lifetime, off_the_loop
from apscheduler_tasklock._lock.messages import (
    NOT_BEGUN,
    ClaimRequest,
    Ending,
    HandOut,
    LockTimes,
    ManualRequest,
    Refusal,
    Registered,
    Registration,
    ReleaseAnswer,
    ReleaseRequest,
    Renewal,
    RunEnd,
    RunState,
    TakeoverRequest,
)
from apscheduler_tasklock._lock.offload import ThreadOffload
from apscheduler_tasklock._lock.protocol import HISTORY, TaskLockProtocol
from apscheduler_tasklock._lock.releases import PendingRelease, PendingReleases, Release
from apscheduler_tasklock._lock.stand_in import LockProtocol, StandIn, current_standing
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockSchemaError
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.schema.check import (
    check_tables,
    explain_refusal,
    explain_rejection,
    find_problem,
    lock_query,
)
from apscheduler_tasklock.schema.table import (
    DEFAULT_TABLE,
    job_table,
    replica_table,
    run_table,
    task_lock_table,
)
from apscheduler_tasklock.status import RunningRun

logger = logger_of(__name__)

Answer = TypeVar("Answer")
AnyAttempt: TypeAlias = ClaimAttempt | TakeoverAttempt | ManualAttempt | HandOutAttempt

# The share of a lease in which a renewal must have been sent; else it gets a connection of its own.
RENEWAL_TURN = 1 / 6
# Seconds that stand for the lease of a claim without one, for the time that its renewal may take.
UNLEASED_RENEWAL = 3.0
# Seconds for which extending a lock is tried.
EXTEND_TIMEOUT = 2.0


@dataclass(frozen=True)
class LockSettings:
    """What a replica's task locks are made with.

    :ivar database: a URL, which holds the password, or an application's engine
    :ivar replica_id: who claims, shown in logs
    :ivar claim_timeout: seconds for which a claim is tried while the database is unavailable
    :ivar schema: schema of the task lock table; ``None`` leaves it to the ``search_path``
    :ivar table: name of the task lock table
    :ivar history: how many runs of each task the run history keeps; 0: none
    :ivar redact: returns what the run history keeps of an exception. Not compared: a worker
        process gets a copy with each run, and has one connection for all that are alike.
    :ivar stand_in: what decides in place of the database, in an application's tests
    """

    database: str | URL | Engine = field(repr=False)
    replica_id: str
    claim_timeout: float = 10.0
    schema: str | None = None
    table: str = DEFAULT_TABLE
    history: int = HISTORY
    redact: Callable[[BaseException], str | None] = field(default=str, compare=False)
    timings: Timings = field(default_factory=Timings)
    stand_in: StandIn | None = None

    def for_process(self) -> LockSettings:
        """Return the settings of a worker process, which can be pickled."""
        return replace(self, database=as_url(self.database))


@dataclass(frozen=True)
class Released:
    """A claim that was ended.

    :ivar locked_until: database time until which its window is taken; ``None`` if the answer that
        said so was lost
    """

    locked_until: datetime | None = None


class LockClient:
    """The task locks of one database, as one replica uses them. Safe to share between threads.

    It is ready when it is made, and is closed once. A forked child makes one of its own.

    :raises TaskLockOptionError: the task lock cannot use the database
    :ivar offload: does what coroutines want of the database
    :ivar clock: what is known of the database's clock
    :ivar outage: what is known of its outages
    :ivar rejections: what it rejects of this replica's work now
    :ivar jobs: the statements of the job store, for :meth:`ask`
    :ivar claiming: counts the claims that are being made, and given back if nobody wants them
    :ivar in_use: counts who still needs the threads after :meth:`close`
    """

    def __init__(self, settings: LockSettings) -> None:
        self.settings = settings
        self.replica_id = settings.replica_id
        self._started_at: datetime | None = None  # as it was reported first
        self.table = task_lock_table(settings.table, settings.schema)
        self._url = as_url(settings.database)
        self.where = describe(self._url)
        self._pid = os.getpid()
        self._parent: LockClient | None = None
        self._timeout = settings.claim_timeout
        self._timings = settings.timings
        self._closing = Closing()
        self._released_at = 0.0
        self.claiming = InProgress()
        background = BackgroundThreads(1, "tasklock-background")
        finishing = BackgroundThreads(1, "tasklock-finishing")
        self.outage = Outage(self.where, attempt_limit(settings.claim_timeout), settings.timings)
        self.rejections = Rejections(settings.timings.rejected_interval)
        self._rights_at = 0.0  # when they are looked at, on the monotonic clock
        self._pool, self._second_pool = self._make_pools()
        self._exchange = Exchange(self._pool, self.outage, self._explain, background, finishing)
        self.offload = ThreadOffload(
            self._exchange, background, finishing, self._closing, self.claiming, self._timeout
        )
        self._second = Exchange(
            self._second_pool, self.outage, self._explain, background, finishing
        )
        self._retrier = Retrier(self._exchange, self.outage, self._closing, self.where)
        self._protocol = self._make_protocol()
        self.jobs = JobRows(
            self.table,
            settings.replica_id,
            settings.history,
            settings.timings,
            self.rejections,
        )
        self.clock = DatabaseClock(self.outage.clock_stepped)
        self._pending = PendingReleases(
            self._exchange, self._protocol, self._closing, settings.timings
        )
        self._context = ClaimContext(
            self._protocol, self.clock, self.outage, self._pending, settings.claim_timeout
        )
        self._running: dict[UUID, tuple[HeldLock, datetime]] = {}  # and since when
        self._heartbeat = Heartbeat(
            self._renew, self._second_pool.close_idle, settings.timings, self.rejections
        )
        self.in_use = Lifetime(self.offload.close)

    def _make_pools(self) -> tuple[Pool, Pool]:
        """Return the connections of the database, and one beside them."""
        settings = self.settings
        if settings.stand_in is not None:
            nothing = NoDatabase(attempt_limit(settings.claim_timeout))
            return nothing, nothing
        first = make_pool(
            settings.database,
            timeout=settings.claim_timeout,
            application_name=self._application_name,
            closing=self._closing,
            ended=self.outage.idle_connection_ended,
            lock_query=lock_query(list(self.table.metadata.tables.values())),
        )
        second = make_second_pool(
            settings.database,
            timeout=settings.claim_timeout,
            application_name=self._application_name,
            ended=self.outage.idle_connection_ended,
        )
        return first, second

    def _make_protocol(self) -> LockProtocol:
        settings = self.settings
        if settings.stand_in is not None:
            return settings.stand_in.protocol(settings.replica_id)
        return TaskLockProtocol(
            self.table,
            settings.replica_id,
            history=settings.history,
            rejections=self.rejections,
        )

    def for_child(self) -> LockClient:
        """Return the same task locks in a forked child, with nothing of its parent's.

        They keep these: closed or collected here, the connections would end in the parent. They are
        another replica: several children of one parent may run schedulers.
        """
        replica_id = f"{self.settings.replica_id} child {os.getpid()}"
        child = LockClient(replace(self.settings, replica_id=replica_id))
        child._parent = self
        if isinstance(self.settings.database, Engine):
            self.settings.database.dispose(close=False)
        if self.closed:
            child.close()
        return child

    @property
    def _application_name(self) -> str:
        return f"tasklock {self.replica_id}"[:63]

    @property
    def closed(self) -> bool:
        """Whether nothing new is claimed any more."""
        return self._closing.stopped

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn on the connection."""
        return self._exchange.waiting

    @property
    def stable(self) -> bool:
        """Whether the database has been there for long enough to believe that a holder died."""
        return self.outage.stable

    def check(self, *, jobs: bool = False) -> None:
        """Make sure that the tables are there, new enough, and permitted.

        :param jobs: whether that of the job store is needed, too
        :raises TaskLockSchemaError: they are not; the message names all that is missing
        :raises TaskLockDatabaseError: the database is unavailable
        """
        if self.settings.stand_in is not None:
            return
        tables = [self.table]
        if self.settings.history:
            tables.append(run_table(self.table))
        tables.append(replica_table(self.table))
        if jobs:
            tables.append(job_table(self.table))

        def check(cursor: Any) -> None:
            sent = time.monotonic()
            self._learn(sent, check_tables(cursor, self.table, tables, self._url.username))

        self.ask(check)
        self._rights_at = time.monotonic() + self._timings.report_interval

    def look_at_rights(self) -> None:
        """Find out whether claims and the run history are still permitted.

        Others find that out by what they do every few seconds. A task may run once a night.

        It asks as often as a replica gives a sign of life; each time while something is rejected.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that
        """
        rejections, now = self.rejections, time.monotonic()
        is_urgent = rejections.suspected or rejections.told()
        if self.settings.stand_in is not None or not (is_urgent or now > self._rights_at):
            return
        rejections.suspected = False
        needed = {CLAIMS: self.table}
        if self.settings.history:
            needed[RUN_HISTORY] = run_table(self.table)

        def find(cursor: Any) -> dict[str, TaskLockSchemaError | None]:
            user = self._url.username
            return {
                what: find_problem(cursor, self.table, table, user)
                for what, table in needed.items()
            }

        try:
            found = self.ask(find)
        except TaskLockError:
            rejections.suspect()
            raise
        for what, problem in found.items():
            if problem is None:
                rejections.permitted(what)
            else:
                rejections.begin(what, problem)
        self._rights_at = now + self._timings.report_interval

    def ask_for(self, seconds: float, statement: Callable[[Any], Answer]) -> Answer:
        """Run a short statement, again if the database is unavailable, for so many seconds.

        :param statement: gets a psycopg cursor in autocommit mode; the server may have carried it
            out although it is called again
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects the statement; the message names the remedy
        """
        until, attempt = time.monotonic() + seconds, 0
        told: TaskLockDatabaseError | None = None
        while True:
            try:
                return self._exchange.ask(Call(statement), Deadline(self._closing, until), seconds)
            except TaskLockDatabaseError as error:
                # The last attempt may have had no time left; the one before it says why.
                if told is None or not isinstance(error, NotSentError):
                    told = error
                pause = jittered(BACKOFF[min(attempt, len(BACKOFF) - 1)])
                if time.monotonic() + pause > until or self._closing.wait(pause):
                    raise told from None
                attempt += 1

    def attempt(self, request: AnyRequest) -> AnyAttempt:
        """Return a claim that can be sent, and then :meth:`claim` be called with its outcome.

        :raises TaskLockError: these task locks are closed
        """
        if self.closed or self._pid != os.getpid():
            raise TaskLockError(
                f"task {request.task_name!r} is not claimed: these locks are closed"
            )
        if isinstance(request, TakeoverRequest):
            return TakeoverAttempt(request, self._context)
        if isinstance(request, ManualRequest):
            return ManualAttempt(request, self._context)
        if request.hand_out is not None:
            return HandOutAttempt(request, self._context)
        return ClaimAttempt(request, self._context)

    def claim(
        self,
        wanted: AnyRequest | AnyAttempt,
        since: float | None = None,
        first: Outcome[Decision] | None = None,
    ) -> HeldLock | Refusal | None:
        """Claim a task for one run time, or take a dead holder's run over.

        It is tried again while the database is unavailable.

        :param wanted: a request; or the attempt that was made of one, if it was sent already
        :param since: when the claim was wanted, from :func:`time.monotonic`, if that was not now
        :param first: what became of the attempt that was sent already
        :return: the held lock, which must be released; or why it was refused; or ``None`` if the
            row of what was to be taken over is gone
        :raises TaskLockDatabaseError: the database stayed unavailable for ``claim_timeout``. A
            claim that it may have granted all the same is ended in the background.
        :raises TaskLockError: the database rejects the statement, and the message names the
            remedy; or these task locks are closed
        """
        claimed = None
        self.in_use.begin_use()
        try:
            if isinstance(wanted, (ClaimRequest, TakeoverRequest, ManualRequest)):
                wanted = self.attempt(wanted)
            try:
                decision = self._retrier.run_until(
                    self._timeout, wanted, since=since, wait=self._closing.wait, first=first
                )
            except BaseException as error:
                if isinstance(error, TaskLockSchemaError):
                    self.rejections.suspect()
                self._end_in_doubt(wanted)
                raise
            claimed = self._claimed(wanted.request, decision)
            return claimed
        finally:
            if not isinstance(claimed, HeldLock):
                self.in_use.end_use()

    def find_taken(self, requests: Sequence[ClaimRequest]) -> dict[UUID, Decision]:
        """Tell which claims would be refused, since their windows are taken, without sending them.

        A window that is taken stays so, unless its run fails, or somebody opens it again.

        :return: what would become of them, by their ids; of at most so many as travel together. One
            that is missing may be granted, or not.
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects the statement
        """
        attempts = [
            ClaimAttempt(request, self._context)
            for request in requests[:MOST_TOGETHER]
            # Else it could be refused on account of this replica's own last run.
            if not self._pending.has(request.task_name)
        ]
        if not attempts:
            return {}
        find = Call(partial(ClaimAttempt.find_taken, requests=attempts))
        # The claims of those who wait for this would only come later, if it has no turn for long.
        return self._exchange.ask(find, Deadline(self._closing), self._pool.attempt)

    def _end_in_doubt(self, attempt: AnyAttempt) -> None:
        """See to it that a claim that was sent and not answered is ended."""
        request = attempt.request
        if not attempt.in_doubt:
            return
        if isinstance(request, TakeoverRequest):
            ending, seconds = Ending.HAND_OVER, self._timeout * 10
        elif isinstance(request, ManualRequest):
            ending, seconds = Ending.KEEP, request.max_lock
        else:
            ending, seconds = request.ending_in_doubt, request.max_lock
        in_doubt = ReleaseRequest(request.task_name, request.claim_id, RunEnd(ending))
        self._pending.add(in_doubt, seconds=seconds)

    def _claimed(self, request: AnyRequest, decision: Decision) -> HeldLock | Refusal | None:
        answer, sent = decision.answer, decision.sent
        if answer is None or not answer.granted:
            return None if answer is None else Refusal.of(answer)
        run_time, dead_holder = None, None
        if isinstance(request, TakeoverRequest):
            if not answer.manual:  # which has none but the time at which it begins
                run_time = datetime.now(timezone.utc) - (answer.database_time - answer.window_start)
            dead_holder = request.dead_holder
        elif isinstance(request, ClaimRequest):
            run_time = request.run_time
        held = HeldLock(
            name=request.task_name,
            token=answer.token,
            claim_id=answer.claim_id,
            run_time=run_time,
            window_start=answer.window_start,
            locked_until=answer.locked_until,
            run_until=answer.run_until,
            ends_at=sent + (answer.run_until - answer.database_time).total_seconds(),
            lease=request.lease,
            dead_holder=dead_holder,
            extender=self._extend,
        )
        try:
            self._heartbeat.add(held)
        except BaseException:  # threads are limited, and the lease could not be renewed
            if held.lease is not None:
                is_hold = isinstance(request, ClaimRequest) and not request.runs
                ending = Ending.OPEN if is_hold else Ending.HAND_OVER
                self._pending.add(_release_of(held, RunEnd(ending)), seconds=held.seconds_left)
                raise
        self._running[held.claim_id] = (held, answer.database_time)
        return held

    def what_runs(self) -> list[RunningRun]:
        """Return what runs here under a lock, or went on when that was lost."""
        return [
            RunningRun(held.name, held.token, self.replica_id, since, lost=held.lost)
            for held, since in list(self._running.values())
        ]

    def prepare_release(self, held: HeldLock, end: RunEnd) -> Release | None:
        """Return a release that can be sent, and then :meth:`release` be called with it.

        ``None``: there is no time to send it, and :meth:`release` says so.
        """
        if self.outage.reason is not None and self._closing.is_over(RELEASE_LIMIT):
            return None
        self._heartbeat.remove(held)
        self._released_at = time.monotonic()
        return Release(self._protocol, _release_of(held, end))

    def release(
        self,
        held: HeldLock,
        end: RunEnd = NOT_BEGUN,
        sent: Release | None = None,
        first: Outcome[ReleaseAnswer | None] | None = None,
    ) -> Released | None:
        """End a claim, now or in the background.

        :param held: the lock to release
        :param end: how its run ended
        :param sent: its release, if it was sent already
        :param first: what became of that
        :return: until when its window is taken, or ``None`` if the claim had expired and was
            somebody else's
        :raises TaskLockDatabaseError: the database is unavailable. The release is pending: it is
            sent again in the background until the claim's end.
        :raises TaskLockError: the database rejects the statement. The release is pending as well.
        """
        self._heartbeat.remove(held)
        request = sent or Release(self._protocol, _release_of(held, end))
        self._released_at = max(self._released_at, request.made_at)
        try:
            self._check_time_to_release(first)
            answer = self._retrier.run_until(
                self._timings.release_timeout,
                request,
                limit=RELEASE_LIMIT,
                # In an outage many are tried one after the other, and each would take that long.
                since=None if self.outage.reason is None else request.made_at,
                first=first,
            )
            if answer is None and request.in_doubt and held.lease_left > 0:
                # It stood when it was released; somebody has claimed the task since then.
                return Released()
            return None if answer is None else Released(answer.locked_until)
        except BaseException as error:
            if isinstance(error, TaskLockSchemaError):
                self.rejections.suspect()
            # Also when it is rejected, as while a role lacks a right, or interrupted, and beyond
            # the end of a lease: until somebody takes the run over, the row can be told its end.
            self._pending.add(_release_of(held, end), seconds=held.seconds_left)
            raise
        finally:
            self._running.pop(held.claim_id, None)
            if held.end():
                self.in_use.end_use()

    def _check_time_to_release(self, first: Outcome[ReleaseAnswer | None] | None) -> None:
        """Raise an error in an outage if the time for releases is over, after a stop.

        Many releases one after the other, each with a limit of its own, would keep the process from
        ending.
        """
        reason = self.outage.reason
        has_failed = first is None or first.error is not None
        if reason is not None and has_failed and self._closing.is_over(RELEASE_LIMIT):
            raise TaskLockDatabaseError(reason)

    def abandon(self, held: HeldLock) -> None:
        """Renew a claim no more, and never release it, as if its process were killed."""
        self._heartbeat.remove(held)
        self._running.pop(held.claim_id, None)
        if held.end():
            self.in_use.end_use()

    def believe(self) -> None:
        """Believe that holders died whose leases have ended, unless an outage is known here.

        A worker process is as sure as its parent, which has seen the database for longer.
        """
        self.outage.believe()

    def doubt(self) -> None:
        """Believe no such thing for a while: the parent process has seen an outage."""
        self.outage.doubt()

    def read_runs(self, task_names: Sequence[str], always: Sequence[str] = ()) -> list[RunState]:
        """Return which of these tasks have a run whose holder died.

        :param always: tasks whose last run is returned whatever its state
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that
        """

        def read(cursor: Any) -> list[RunState]:
            sent = time.monotonic()
            states, database_time = self._protocol.read(cursor, task_names, always)
            self._learn(sent, database_time)
            return states

        return self.ask(read)

    def register(self, tasks: Sequence[Registration]) -> list[Registered]:
        """Tell of the tasks that this replica has, and how they are scheduled.

        :return: what became of each. One that the database rejects is to be told again; one whose
            name it cannot store is missing.
        :raises TaskLockDatabaseError: the database is unavailable
        """
        registered, rejected = self._register(tasks)
        if rejected is None:
            self.rejections.end(REGISTRATIONS)
        else:
            self.rejections.begin(REGISTRATIONS, rejected)
        return registered

    def _register(
        self, tasks: Sequence[Registration]
    ) -> tuple[list[Registered], TaskLockError | None]:
        """Do so; return what became of each, and why the last was rejected that was."""
        registered: list[Registered] = []
        rejected: TaskLockError | None = None
        for begin in range(0, len(tasks), MOST_TOGETHER):
            some = tasks[begin : begin + MOST_TOGETHER]
            try:
                registered += self.ask(partial(self._protocol.register, tasks=some))
            except TaskLockDatabaseError:
                raise
            except TaskLockError as error:
                if isinstance(error, TaskLockSchemaError):
                    rejected = error
                    registered += [Registered(task.task_name, None, again=True) for task in some]
                elif len(some) > 1:  # one task's mistake is its own
                    for task in some:
                        one, why = self._register([task])
                        registered, rejected = registered + one, why or rejected
                else:
                    rejected = error
                    registered.append(Registered(some[0].task_name, None, again=True))
        return registered, rejected

    def report_replica(
        self,
        version: str,
        tasks: Sequence[str],
        rejected: Sequence[str] = (),
        running: Sequence[RunningRun] = (),
    ) -> None:
        """Say that this replica is alive, which tasks it has, what is rejected, and what runs.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that, as for a role without the right
        """
        started_at = self.ask(
            partial(
                self._protocol.report_replica,
                host=socket.gethostname(),
                version=version,
                tasks=tasks,
                rejected=rejected,
                running=running,
                started_at=self._started_at,
            )
        )
        if self._started_at is None:
            self._started_at = started_at

    def retire(self, successor_of: Sequence[str], dropped: Sequence[str]) -> None:
        """Let nobody wait any more for tasks that no replica has, if they were removed.

        :param successor_of: the tasks that it has, once it has had the time to get all of its jobs:
            what a replica before it had, and it has not, was removed then
        :param dropped: the tasks that it had, and that were removed here
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that, as for a role without the right
        """
        self.ask(partial(self._protocol.retire, successor_of=successor_of, dropped=dropped))

    def stop_replica(self, running: Sequence[RunningRun] = ()) -> None:
        """Say that this replica stops, so that nobody counts on it, and what it still runs.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that
        """
        self.ask(partial(self._protocol.stop_replica, running=running))

    def remove_replicas(self, age: float) -> None:
        """Delete the replicas that were last seen so many seconds ago.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that, as for a role that may not delete
        """
        self.ask(partial(self._protocol.remove_replicas, age=age))

    def shorten_history(self, task_names: Sequence[str]) -> None:
        """Delete what is left of these tasks' history from when it was longer than now.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that, as for a role that may not delete
        """
        self.ask(partial(self._protocol.shorten_history, task_names=task_names))

    def settle_missed(self, hand_out: HandOut, task_name: str) -> bool:
        """Move a job on whose run time was missed; tell whether it was still handed out.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that
        """
        return self.ask(partial(self.jobs.settle_missed, hand_out=hand_out, task_name=task_name))

    def give_back(self, hand_out: HandOut) -> None:
        """End a hand-out whose task is running; its run time is handed out again after that.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that
        """
        self.ask(partial(self.jobs.give_back, handed_ids=[hand_out.handed_id], waits=True))

    def give_up(self, dead: RunState) -> bool:
        """Finish a dead run that is not to be run again; tell whether this replica did.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that
        """
        return self.ask(
            lambda cursor: self._protocol.give_up(cursor, dead.task_name, dead.claim_id)
        )

    def end_lease(self, task_name: str, claim_id: UUID, holders: Sequence[str]) -> bool:
        """End the lease of a claim whose holder, one of these, is known to be dead.

        :return: whether there was such a claim
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that
        """
        ended = self.ask(
            lambda cursor: self._protocol.end_lease(cursor, task_name, claim_id, holders)
        )
        return ended is not None

    def prune(self, age: float) -> int:
        """Delete the rows of one-off jobs that were over so many seconds ago; return how many.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that, as for a role that may not delete
        """
        return self.ask(lambda cursor: self._protocol.prune(cursor, age))

    def take_pending(self) -> list[PendingRelease]:
        """Return the releases that could not be sent, for another process to send them."""
        return self._pending.take()

    def adopt_pending(self, releases: Sequence[PendingRelease]) -> None:
        """Send releases that another process could not send."""
        for release in releases:
            self._pending.adopt(release)

    def command_line(self, command: str, *options: str, task: str) -> str:
        """Return the command line by which an operator does something to a task."""
        schema, table = self.table.schema, self.table.name
        return command_line(command, *options, task=task, schema=schema, table=table)

    def wait(self, seconds: float) -> bool:
        """Wait for so long, or until these task locks are closed; tell whether they are."""
        return self._closing.wait(seconds)

    def stop_claiming(self) -> None:
        """End what claims under way wait for. Releases still go through.

        From now on each attempt at a claim ends within 1.5 seconds, and at a release within 3.
        """
        self._closing.stop()

    def stop_claiming_in_a_signal_handler(self) -> None:
        """Do the same where the interrupted code may hold any lock."""
        self._closing.stop_in_a_signal_handler()

    def close(self, *, blocking: bool = False, until: float = inf) -> None:
        """Claim nothing more, send pending releases, and close idle connections.

        While the database is unavailable, these are tried for 3 seconds. On an event loop a thread
        does that, which the process waits for when it ends, unless ``blocking``. What is held can
        still be released, on a connection that is closed after it.

        :param until: when they are not tried any more in any case, on the monotonic clock
        """
        self._closing.stop()
        send_pending = partial(self._send_pending, until)
        if blocking:
            send_pending()
        else:
            off_the_loop(send_pending)
        self._heartbeat.close()
        self._pool.close()
        self._second_pool.close()
        self.in_use.close()

    def _send_pending(self, until: float) -> None:
        # From the stop on, or from when the last job ended that was waited for.
        limit = self._closing.over_at(self._released_at, SHUTDOWN_LIMIT)
        self._pending.close(min(until, limit))

    def ask(self, statement: Callable[[Any], Answer]) -> Answer:
        """Run a short statement on this replica's connection, when it is its turn.

        :param statement: gets a psycopg cursor in autocommit mode
        :return: what it returns
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects the statement; the message names the remedy
        """

        def run(cursor: Any) -> Answer:
            try:
                return statement(cursor)
            except InsufficientPrivilege as error:
                raise explain_refusal(cursor, error, self.table, self._url.username) from error

        return self._exchange.ask(Call(run), Deadline(self._closing))

    def _explain(self, error: Any) -> TaskLockError:
        return explain_rejection(error, self.table, self._url.username, self.where)

    def _learn(self, sent: float, database_time: datetime) -> None:
        bound = self.clock.latest(sent)
        now = time.monotonic()
        self.clock.learn(sent=sent, answered=now, database_time=database_time, bound=bound)

    def _extend(self, held: HeldLock, by: float) -> bool:
        begun = time.monotonic()
        while True:
            sent = time.monotonic()
            try:
                times = self._ask_beside(
                    lambda cursor: self._protocol.extend(
                        cursor, held.name, held.claim_id, by, held.lease
                    ),
                    turn_within=EXTEND_TIMEOUT / 2,
                    until=sent + 2 * self._timeout,
                )
            except RowLockedError:
                if time.monotonic() > begun + EXTEND_TIMEOUT:
                    raise
                time.sleep(jittered(LOCKED_BACKOFF[-1]))
                continue
            if times is not None:
                _note(held, times, sent)
            return times is not None

    def _renew(self, held: Sequence[HeldLock], last: frozenset[UUID]) -> dict[UUID, bool]:
        """Renew claims with one statement; return which stand, and whether each was renewed.

        :param last: the ids of those that are renewed for the last time
        """
        sent = time.monotonic()
        lease = min(claim.lease or UNLEASED_RENEWAL for claim in held)
        renewals = [
            Renewal(claim.name, claim.claim_id, claim.lease, is_last=claim.claim_id in last)
            for claim in held
        ]
        times = self._ask_beside(
            lambda cursor: self._protocol.renew(cursor, renewals),
            turn_within=lease * RENEWAL_TURN,
            until=sent + max(1.0, lease / self._timings.renewals_per_lease),
        )
        for claim in held:
            if claim.claim_id in times:
                _note(claim, times[claim.claim_id], sent)
        return {claim_id: end.locked_until is not None for claim_id, end in times.items()}

    def _ask_beside(
        self, statement: Callable[[Any], Answer], turn_within: float, until: float
    ) -> Answer:
        """Send what must not wait long for others: on a second connection, if it would.

        :param turn_within: seconds within which it must be its turn on the one connection
        :param until: when nothing is waited for any more, on the monotonic clock
        """
        # What goes on after a shutdown has begun has the time that it always has.
        deadline = Deadline(None, until)
        # The running job may have the only connection of its application's pool.
        if not isinstance(self.settings.database, Engine):
            with suppress(NotSentError):
                answer = self._exchange.ask(Call(statement), deadline, turn_within)
                self._second_pool.close_idle()
                return answer
        try:
            return self._second.ask(Call(statement), deadline)
        except ServerFullError:
            # The server has no connection left, but this replica may have one.
            return self._exchange.ask(Call(statement), deadline)
        finally:
            if self._heartbeat.is_idle:
                self._second_pool.close_idle()


def _note(held: HeldLock, times: LockTimes, sent: float) -> None:
    """Note until when a claim stands."""
    ends_at = sent + (times.run_until - times.database_time).total_seconds()
    held.note_renewal(times.locked_until or held.locked_until, times.run_until, ends_at)


def _release_of(held: HeldLock, end: RunEnd) -> ReleaseRequest:
    return ReleaseRequest(held.name, held.claim_id, end, held.token)


def client_now(client: LockClient) -> LockClient:
    """Return what claims for a client now: itself, or in a test the client of a stand-in."""
    standing, settings = current_standing(), client.settings
    if standing is None or settings.stand_in is not None:
        return client
    return standing.client(
        settings, lambda: LockClient(replace(settings, stand_in=standing.stand_in))
    )


def is_made_for_now(client: LockClient) -> bool:
    """Tell whether a client asks what stands in for the database now, or the database."""
    standing = current_standing()
    return client.settings.stand_in is (None if standing is None else standing.stand_in)


def remade_for_now(client: LockClient) -> LockClient:
    """Return a new client with the same settings, which asks what stands in for the database now.

    Where nothing does, it asks the database.
    """
    standing = current_standing()
    stand_in = None if standing is None else standing.stand_in
    return LockClient(replace(client.settings, stand_in=stand_in))
