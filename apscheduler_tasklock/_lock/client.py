"""The task locks of one replica: claimed, renewed, released, and never left behind."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from math import inf
from typing import Any, TypeVar
from uuid import UUID

from psycopg.errors import InsufficientPrivilege
from sqlalchemy import Engine

from apscheduler_tasklock._application import flush_application
from apscheduler_tasklock._database.asked import Asked
from apscheduler_tasklock._database.connection import attempt_limit, turn_limit
from apscheduler_tasklock._database.deadline import (
    SHUTDOWN_LIMIT,
    Closing,
    Deadline,
)
from apscheduler_tasklock._database.errors import NoThreadError
from apscheduler_tasklock._database.rejections import (
    CLAIMS,
    REGISTRATIONS,
    RUN_HISTORY,
)
from apscheduler_tasklock._database.requests import Call, Outcome, Request
from apscheduler_tasklock._database.side import MOST_TOGETHER
from apscheduler_tasklock._database.steps import Statement, Steps, StepTicket, ask_here, go_on
from apscheduler_tasklock._database.thread import Recurring
from apscheduler_tasklock._database.url import as_url
from apscheduler_tasklock._lock.claim import (
    AnyAttempt,
    AnyRequest,
    BeyondLimitError,
    ClaimAttempt,
    ClaimContext,
    Decision,
    HandOutAttempt,
    ManualAttempt,
    TakeoverAttempt,
)
from apscheduler_tasklock._lock.commands import command_line
from apscheduler_tasklock._lock.jobs import JobRows
from apscheduler_tasklock._lock.lifetime import InProgress, off_the_loop
from apscheduler_tasklock._lock.limited import (
    Claimed,
    LimitedClaims,
    LimitedTicket,
    LoneTicket,
    NotNow,
    Tell,
)
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
    RunEnd,
    RunState,
    TakeoverRequest,
)
from apscheduler_tasklock._lock.releases import LeaseEnd, Release, ReleaseTicket
from apscheduler_tasklock._lock.replica import LockSettings, Replica, note_times, shared_replica
from apscheduler_tasklock._lock.stand_in import LockProtocol, current_standing
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockSchemaError
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.schema.check import (
    check_tables,
    explain_refusal,
    find_problem,
)
from apscheduler_tasklock.schema.table import (
    job_table,
    replica_table,
    run_table,
)
from apscheduler_tasklock.status import RunningRun

logger = logger_of(__name__)

Answer = TypeVar("Answer")

# Seconds that pending releases have at a shutdown in any case, whatever else of it took long.
SHORTEST_CLOSING = 0.7
CLOSED = "these locks are closed"
# Seconds for which extending a lock is tried.
EXTEND_TIMEOUT = 2.0


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
    :param replica: what it shares with others of its scheduler; by default its own
    :ivar replica: the same
    :ivar clock: what is known of the database's clock
    :ivar outage: what is known of its outages
    :ivar rejections: what it rejects of this replica's work now
    :ivar jobs: the statements of the job store, for :meth:`ask`
    :ivar claiming: counts the claims that are being made, and given back if nobody wants them
    """

    def __init__(self, settings: LockSettings, replica: Replica | None = None) -> None:
        self.settings = settings
        self.replica_id = settings.replica_id
        self._started_at: datetime | None = None  # as it was reported first
        self.replica = replica or Replica(settings)
        self.table, self.where = self.replica.table, self.replica.where
        self._url = as_url(settings.database)
        self._pid = os.getpid()
        self._parent: LockClient | None = None
        self._timeout = settings.claim_timeout
        self._attempt = attempt_limit(settings.claim_timeout, settings.timings.longest_answer)
        self._turn_limit = turn_limit(settings.claim_timeout)
        self._timings = settings.timings
        self._closing = Closing()
        self._released_at = 0.0
        self.claiming = InProgress()
        self._give_up_at = inf  # when pending releases are given up, on the monotonic clock
        self.outage = self.replica.outage
        self.rejections = self.replica.rejections
        self._rights_at = 0.0  # when they are looked at, on the monotonic clock
        self._protocol = self.replica.protocol(settings)
        # The database's thread has it.
        self._heartbeat = self.replica.heartbeat
        self._database = self.replica.database
        self.jobs = JobRows(
            self.table,
            settings.replica_id,
            settings.history,
            settings.timings,
            self.rejections,
        )
        self.clock = self.replica.clock
        self._context = ClaimContext(
            self._protocol, self.clock, self.outage, settings.claim_timeout
        )
        self._running: dict[UUID, tuple[HeldLock, datetime]] = {}  # and since when
        self._listens = False
        self.replica.join(self._closing)

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
    def closed(self) -> bool:
        """Whether nothing new is claimed any more."""
        return self._closing.stopped

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn on the connection."""
        return self._database.waiting

    @property
    def is_live(self) -> bool:
        """Whether the database's thread goes on, or is not needed now. Asks nobody."""
        return self._database.is_live

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

    def look_at_rights(self) -> Steps[None]:
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
            found = yield find
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
        deadline = Deadline(self._closing, time.monotonic() + seconds)
        return self._ask(Call(statement), deadline, turn_within=seconds, tried_for=seconds)

    def _ask(
        self,
        request: Request[Answer],
        deadline: Deadline,
        turn_within: float | None = None,
        tried_for: float | None = None,
    ) -> Answer:
        return self._database.ask(
            request,
            deadline,
            turn_within=turn_within or self._turn_limit,
            tried_for=tried_for,
            answer_within=self._attempt,
        )

    def listen(self, heard: Callable[[], object]) -> None:
        """Listen for other replicas' changes of jobs, where the connection can.

        :param heard: called in the database's thread when something was changed, or may have been
            before this; must not wait
        """
        self._listens = True
        self._database.listen(self.jobs.channel, heard, self.rejections, self._timings)

    def attempt(self, request: AnyRequest) -> AnyAttempt:
        """Return a claim that can be sent, and then :meth:`claim` be called with its outcome.

        :raises TaskLockError: these task locks are closed
        """
        if self.closed or self._pid != os.getpid():
            raise TaskLockError(f"task {request.task_name!r} is not claimed: {CLOSED}")
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
    ) -> HeldLock | Refusal | None:
        """Claim a task for one run time, or take a dead holder's run over.

        It is tried again while the database is unavailable.

        :param wanted: a request, or the attempt that was made of one
        :param since: when the claim was wanted, from :func:`time.monotonic`, if that was not now
        :return: the held lock, which must be released; or why it was refused; or ``None`` if the
            row of what was to be taken over is gone
        :raises TaskLockDatabaseError: the database stayed unavailable for ``claim_timeout``. A
            claim that it may have granted all the same is ended in the background.
        :raises TaskLockError: the database rejects the statement, and the message names the
            remedy; or these task locks are closed
        """
        if isinstance(wanted, (ClaimRequest, TakeoverRequest, ManualRequest)):
            wanted = self.attempt(wanted)
        return self._database.get(self._asked(wanted, since))

    def begin_claim(self, wanted: AnyRequest) -> Asked[Decision, HeldLock | Refusal | None]:
        """Begin a claim in a coroutine, which awaits its ``result``: see :meth:`claim`.

        What is granted to one that is cancelled is given back.
        """
        asked = self._asked(self.attempt(wanted), None, asyncio.get_running_loop())
        self.claiming.begin()
        self._database.submit(asked)
        return asked

    def _asked(
        self,
        attempt: AnyAttempt,
        since: float | None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Asked[Decision, HeldLock | Refusal | None]:
        """Return a claim that can be sent.

        :param loop: on which a coroutine waits for it
        """
        now = time.monotonic()
        begun = now if since is None else since
        reason = self.outage.reason
        if reason is not None and now > begun + self._timeout:
            raise TaskLockDatabaseError(self._gave_up(begun, reason))

        asked = Asked(
            attempt,
            Deadline(self._closing),
            partial(self._conclude, attempt, begun)
            if loop is None
            else partial(self._conclude_on, loop, attempt, begun),
            partial(self._hand_over, attempt.request),
            came=now,
            turn_until=now + self._turn_limit,
            answer_within=self._attempt,
            tried_until=begun + self._timeout,
        )
        asked.follows_releases = True
        return asked

    def _conclude(
        self, attempt: AnyAttempt, begun: float, outcome: Outcome[Decision]
    ) -> HeldLock | Refusal | None:
        """Make what was claimed of a claim's outcome, in the database's thread."""
        self.outage.note_lease(attempt.request.lease)
        error = outcome.error
        if error is None:
            claimed = self._claimed(attempt.request, outcome.result())
            if self.closed and isinstance(claimed, HeldLock):
                # Whoever waits for this may not be there any more.
                self._hand_over(attempt.request, claimed)
                raise TaskLockError(f"task {claimed.name!r} is not claimed: {CLOSED}")
            if not isinstance(claimed, HeldLock):
                # It was refused when it was sent again. The first time it may have been held up on
                # its way, and be granted yet, when nobody waits for it any more.
                self._end_in_doubt(attempt)
            return claimed
        if isinstance(error, TaskLockSchemaError):
            self.rejections.suspect()
        self._end_in_doubt(attempt)
        if isinstance(error, TaskLockDatabaseError):
            raise type(error)(self._gave_up(begun, str(error))) from error.__cause__
        raise error

    def _conclude_on(
        self,
        loop: asyncio.AbstractEventLoop,
        attempt: AnyAttempt,
        begun: float,
        outcome: Outcome[Decision],
    ) -> HeldLock | Refusal | None:
        """Do the same for a coroutine."""
        try:
            claimed = self._conclude(attempt, begun, outcome)
            if isinstance(claimed, HeldLock):
                claimed.runs_on(loop)
            return claimed
        finally:
            self.claiming.end()

    def begin_claims(self, attempts: Sequence[ClaimAttempt], most: int | None, tell: Tell) -> None:
        """Begin to claim as many of these as may be granted, and do not wait.

        While the database is unavailable, they are asked for again, until one of them has been
        asked for longer than ``claim_timeout``. A claim without a usable answer by then has failed,
        and is ended in the background if it may have been granted all the same.

        :param attempts: in the order in which they are to be granted, each for another task. One of
            which ``tell`` hears :class:`NotNow` can be asked for again, or is given to
            :meth:`withdraw`.
        :param most: how many are granted at most; ``None``: all of them
        :param tell: hears what became of each, in the database's thread; what is granted is its to
            release
        """
        wanted_at = min(self._want(attempt) for attempt in attempts)
        self._begin(LimitedTicket, LimitedClaims(attempts, most), wanted_at, tell)

    def begin_lone_claim(self, attempt: AnyAttempt, tell: Tell) -> None:
        """Begin a claim of any kind, and do not wait; see :meth:`begin_claims`."""
        self._begin(LoneTicket, attempt, self._want(attempt), tell)

    @staticmethod
    def _want(attempt: AnyAttempt) -> float:
        """Return since when a claim is asked for, which it is from now on."""
        if attempt.wanted_at is None:
            attempt.wanted_at = time.monotonic()
        return attempt.wanted_at

    def _begin(
        self,
        kind: type[LimitedTicket] | type[LoneTicket],
        claims: Any,
        wanted_at: float,
        tell: Tell,
    ) -> None:
        now = time.monotonic()
        ticket = kind(
            claims,
            Deadline(self._closing),
            self._conclude_queued,
            tell,
            self.claiming.end,
            came=now,
            turn_until=now + self._turn_limit,
            answer_within=self._attempt,
            tried_until=wanted_at + self._timeout,
        )
        self.claiming.begin()
        self._database.submit(ticket)

    def _conclude_queued(self, attempt: AnyAttempt, outcome: Outcome[Decision]) -> Claimed:
        """Make what was claimed of the outcome of one in a queue, in the database's thread."""
        error, wanted_at = outcome.error, attempt.wanted_at
        assert wanted_at is not None
        if isinstance(error, TaskLockDatabaseError) and not self.closed:
            if isinstance(error, BeyondLimitError):
                attempt.wanted_at = None  # no worker is free for it
                return NotNow.BEYOND
            if time.monotonic() < wanted_at + self._timeout:
                return NotNow.LOCKED
        try:
            return self._conclude(attempt, wanted_at, outcome)
        except TaskLockError as failed:
            return failed

    def withdraw(self, attempt: AnyAttempt) -> None:
        """End a claim that is not asked for again, in the background, if it may be granted yet."""
        self._end_in_doubt(attempt)

    def _hand_over(self, request: AnyRequest, claimed: HeldLock | Refusal | None) -> None:
        """Give back what was claimed, and nobody wants any more."""
        if isinstance(claimed, HeldLock):
            is_hold = isinstance(request, ClaimRequest) and not request.runs
            self.begin_release(claimed, RunEnd(Ending.OPEN if is_hold else Ending.HAND_OVER))

    def _gave_up(self, since: float, reason: str) -> str:
        return (
            f"the task lock database ({self.where}) could not be used for "
            f"{time.monotonic() - since:.1f} sec: {reason}"
        )

    def find_taken(self, requests: Sequence[ClaimRequest]) -> dict[UUID, Decision]:
        """Tell which claims would be refused, since their windows are taken, without sending them.

        A window that is taken stays so, unless its run fails, or somebody opens it again.

        :return: what would become of them, by their ids; of at most so many as travel together. One
            that is missing may be granted, or not.
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects the statement
        """
        attempts = [ClaimAttempt(request, self._context) for request in requests[:MOST_TOGETHER]]

        def find(cursor: Any) -> dict[UUID, Decision]:
            # Else it could be refused on account of this replica's own last run.
            releasing = self._database.releasing
            wanted = [each for each in attempts if each.task_name not in releasing]
            return ClaimAttempt.find_taken(cursor, wanted) if wanted else {}

        # The claims of those who wait for this would only come later, if it has no turn for long.
        return self._ask(Call(find), Deadline(self._closing), turn_within=self._attempt)

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
        now = time.monotonic()
        # No claim is granted later than its `not_after`, and an answer takes no longer than this.
        granted_until = now + self._timeout + self._attempt
        self._database.submit(self._ticket_of(in_doubt, now + seconds, stays_until=granted_until))

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
            extender=self.extend,
        )
        if held.lease is not None and not self._database.has_thread:
            # Threads are limited, and the lease could not be renewed.
            self._hand_over(request, held)
            raise NoThreadError(
                f"task {held.name!r} is not claimed: no thread can be started that would renew "
                "its lease"
            )
        self._heartbeat.add(held)
        self._running[held.claim_id] = (held, answer.database_time)
        return held

    def what_runs(self) -> list[RunningRun]:
        """Return what runs here under a lock, or went on when that was lost."""
        return [
            RunningRun(held.name, held.token, self.replica_id, since, lost=held.lost)
            for held, since in list(self._running.values())
        ]

    def release(self, held: HeldLock, end: RunEnd = NOT_BEGUN) -> Released | None:
        """End a claim, now or in the background.

        :param held: the lock to release
        :param end: how its run ended
        :return: until when its window is taken, or ``None`` if the claim had expired and was
            somebody else's
        :raises TaskLockDatabaseError: the database is unavailable. The release is pending: it is
            sent again in the background until the claim's end.
        :raises TaskLockError: the database rejects the statement. The release is pending as well.
        """
        return self.released(held, self.begin_release(held, end))

    def begin_release(self, held: HeldLock, end: RunEnd = NOT_BEGUN) -> ReleaseTicket:
        """Begin to end a claim, and do not wait; see :meth:`released`. Never waits for a lock."""
        ticket = self._release_ticket(held, end)
        self._database.submit(ticket)
        return ticket

    def released(
        self, held: HeldLock, ticket: ReleaseTicket, seconds: float | None = None
    ) -> Released | None:
        """Wait for what becomes of a release that was begun; see :meth:`release`.

        :param seconds: for how long at most; ``None``: without a limit of its own
        """
        return self._made_of(held, ticket, self._database.result(ticket, seconds))

    async def released_async(self, held: HeldLock, ticket: ReleaseTicket) -> Released | None:
        """Do the same in a coroutine. The release goes on when that is cancelled."""
        return self._made_of(held, ticket, await ticket.result())

    def _made_of(
        self, held: HeldLock, ticket: ReleaseTicket, answer: ReleaseAnswer | None
    ) -> Released | None:
        if answer is None and ticket.release.in_doubt and held.lease_left > 0:
            # It stood when it was released; somebody has claimed the task since then.
            return Released()
        return None if answer is None else Released(answer.locked_until)

    def _release_ticket(
        self,
        held: HeldLock,
        end: RunEnd,
        make: Callable[[LockProtocol, ReleaseRequest], Release] = Release,
    ) -> ReleaseTicket:
        self._released_at = time.monotonic()
        self._running.pop(held.claim_id, None)
        held.end()
        # Also beyond the end of a lease: until somebody takes the run over, the row can be told its
        # end.
        return self._ticket_of(
            _release_of(held, end),
            time.monotonic() + held.seconds_left,
            partial(self._heartbeat.remove, held),
            make=make,
        )

    def _ticket_of(
        self,
        request: ReleaseRequest,
        until: float,
        on_taken: Callable[[], object] = lambda: None,
        stays_until: float = -inf,
        make: Callable[[LockProtocol, ReleaseRequest], Release] = Release,
    ) -> ReleaseTicket:
        return ReleaseTicket(
            make(self._protocol, request),
            Deadline(None, lambda: self._give_up_at),
            until,
            self._timings,
            lambda: self._give_up_at < inf,
            self._suspecting,
            on_taken,
            stays_until=stays_until,
            answer_within=self._attempt,
        )

    def _suspecting(self, outcome: Outcome[ReleaseAnswer | None]) -> ReleaseAnswer | None:
        if isinstance(outcome.error, TaskLockSchemaError):
            self.rejections.suspect()
        return outcome.result()

    def abandon(self, held: HeldLock) -> None:
        """Renew a claim no more, and never release it, as if its process were killed."""
        self._database.call(lambda: self._heartbeat.remove(held))
        self._running.pop(held.claim_id, None)
        held.end()

    def believe(self) -> None:
        """Believe that holders died whose leases have ended, unless an outage is known here."""
        self.outage.believe()

    def reading(self, task_names: Sequence[str], always: Sequence[str] = ()) -> Statement:
        """Return what asks which of these tasks call for something, and for their rows.

        :param always: tasks whose last run is returned whatever its state
        """

        def read(cursor: Any) -> list[RunState]:
            sent = time.monotonic()
            states, database_time = self._protocol.read(cursor, task_names, always)
            self._learn(sent, database_time)
            return states

        return read

    def register(self, tasks: Sequence[Registration]) -> Steps[list[Registered]]:
        """Tell of the tasks that this replica has, and how they are scheduled.

        :return: what became of each. One that the database rejects is to be told again; one whose
            name it cannot store is missing.
        :raises TaskLockDatabaseError: the database is unavailable
        """
        registered, rejected = yield from self._register(tasks)
        if rejected is None:
            self.rejections.end(REGISTRATIONS)
        else:
            self.rejections.begin(REGISTRATIONS, rejected)
        return registered

    def _register(
        self, tasks: Sequence[Registration]
    ) -> Steps[tuple[list[Registered], TaskLockError | None]]:
        """Do so; return what became of each, and why the last was rejected that was."""
        registered: list[Registered] = []
        rejected: TaskLockError | None = None
        for begin in range(0, len(tasks), MOST_TOGETHER):
            some = tasks[begin : begin + MOST_TOGETHER]
            try:
                registered += yield partial(self._protocol.register, tasks=some)
            except TaskLockDatabaseError:
                raise
            except TaskLockError as error:
                if isinstance(error, TaskLockSchemaError):
                    rejected = error
                    registered += [Registered(task.task_name, again=True) for task in some]
                elif len(some) > 1:  # one task's mistake is its own
                    for task in some:
                        one, why = yield from self._register([task])
                        registered, rejected = registered + one, why or rejected
                else:
                    rejected = error
                    registered.append(Registered(some[0].task_name, again=True))
        return registered, rejected

    def sign_of_life(
        self,
        version: str,
        tasks: Sequence[str],
        rejected: Sequence[str] = (),
        running: Sequence[RunningRun] = (),
    ) -> Statement:
        """Return what tells that this replica is alive, its tasks, what is rejected and runs."""

        def report(cursor: Any) -> None:
            started_at, self.outage.live_replicas = self._protocol.report_replica(
                cursor,
                host=socket.gethostname(),
                version=version,
                tasks=tasks,
                rejected=rejected,
                running=running,
                started_at=self._started_at,
            )
            if self._started_at is None:
                self._started_at = started_at

        return report

    def retiring(self, successor_of: Sequence[str], dropped: Sequence[str]) -> Statement:
        """Return what lets nobody wait any more for tasks that no replica has.

        :param successor_of: the tasks that it has, once it has had the time to get all of its jobs:
            what a replica before it had, and it has not, was removed then
        :param dropped: the tasks that it had, and that were removed here
        """
        return partial(self._protocol.retire, successor_of=successor_of, dropped=dropped)

    def stop_replica(self, running: Sequence[RunningRun] = ()) -> None:
        """Say that this replica stops, so that nobody counts on it, and what it still runs.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that
        """
        self.ask(partial(self._protocol.stop_replica, running=running))

    def removing_replicas(self, age: float) -> Statement:
        """Return what deletes the replicas that were last seen so many seconds ago."""
        return partial(self._protocol.remove_replicas, age=age)

    def shortening_history(self, task_names: Sequence[str]) -> Statement:
        """Return what deletes what is left of tasks' history from when it was longer than now."""
        return partial(self._protocol.shorten_history, task_names=task_names)

    def begin_settle_missed(self, hand_out: HandOut, task_name: str) -> Asked[bool, bool]:
        """Begin to do the same, and do not wait."""
        asked = self._asked_once(
            partial(self.jobs.settle_missed, hand_out=hand_out, task_name=task_name)
        )
        self._database.submit(asked)
        return asked

    def _asked_once(self, statement: Callable[[Any], Answer]) -> Asked[Answer, Answer]:
        """Return a statement that is sent once, if its turn comes in time."""
        now = time.monotonic()
        return Asked(
            Call(statement),
            Deadline(self._closing),
            Outcome.result,
            came=now,
            turn_until=now + self._turn_limit,
            answer_within=self._attempt,
        )

    def give_back(self, hand_out: HandOut) -> None:
        """End a hand-out whose task is running; its run time is handed out again after that.

        Does not wait for that.
        """
        give_back = partial(self.jobs.give_back, handed_ids=[hand_out.handed_id], waits=True)
        self._database.submit(self._asked_once(give_back))

    def giving_up(self, dead: RunState) -> Statement:
        """Return what finishes a dead run that is not to be run again, and tells whether it has."""
        return lambda cursor: self._protocol.give_up(cursor, dead.task_name, dead.claim_id)

    def begin_end_of_lease(self, held: HeldLock) -> ReleaseTicket:
        """Begin to end the lease of a claim whose run is known to be dead, and do not wait.

        With failover another replica runs its window then.
        """
        ticket = self._release_ticket(held, NOT_BEGUN, partial(LeaseEnd, holder=self.replica_id))
        self._database.submit(ticket)
        return ticket

    def pruning(self, age: float) -> Statement:
        """Return what deletes rows of one-off jobs that were over so many seconds ago.

        It returns how many it has deleted.
        """
        return partial(self._protocol.prune, age=age)

    def command_line(self, command: str, *options: str, task: str) -> str:
        """Return the command line by which an operator does something to a task."""
        schema, table = self.table.schema, self.table.name
        return command_line(command, *options, task=task, schema=schema, table=table)

    def wait(self, seconds: float) -> bool:
        """Wait for so long, or until these task locks are closed; tell whether they are."""
        return self._closing.wait(seconds)

    def stop_claiming(self) -> None:
        """End what claims under way wait for. Releases still go through.

        From now on each attempt at a claim ends within 1.5 seconds.
        """
        self._closing.stop()
        self.replica.note_stopped()
        self._database.wake()

    def close(self, *, blocking: bool = False, until: float = inf) -> None:
        """Claim nothing more, send pending releases, and close idle connections.

        While the database is unavailable, these are tried for 3 seconds. On an event loop a thread
        does that, which the process waits for when it ends, unless ``blocking``. What is held can
        still be released, on a connection that is closed after it.

        :param until: when they are not tried any more in any case, on the monotonic clock
        """
        self._closing.stop()
        self.replica.note_stopped()
        now = time.monotonic()
        # From the stop on, or from when the last job ended that was waited for.
        limit = self._closing.over_at(self._released_at, SHUTDOWN_LIMIT)
        latest = min(now + self._timings.closing_timeout, until, limit)
        close = partial(self._close, max(now + SHORTEST_CLOSING, latest))
        if blocking:
            close()
        else:
            off_the_loop(close)

    def _close(self, give_up_at: float) -> None:
        self._give_up_at = min(self._give_up_at, give_up_at)
        try:
            own = frozenset(self._running)
            self._database.call(lambda: self._heartbeat.close(own))
            self._database.hurry_releases()
            if self.replica.closing.stopped:
                self._database.close(give_up_at)
            else:
                self._leave(give_up_at)
            flush_application(give_up_at)
        finally:
            self._give_up_at = inf

    def _leave(self, give_up_at: float) -> None:
        """Let the others who use the connection go on with it."""
        if self._listens:
            self._database.stop_listening()
        self._database.wait_for_releases(self._protocol, give_up_at)

    def ask(self, statement: Callable[[Any], Answer]) -> Answer:
        """Run a short statement on this replica's connection, when it is its turn.

        :param statement: gets a psycopg cursor in autocommit mode
        :return: what it returns
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects the statement; the message names the remedy
        """
        return self._ask(Call(self._explaining(statement)), Deadline(self._closing))

    def _explaining(self, statement: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
        """Return a statement that says which rights are missing, if some are."""

        def run(cursor: Any) -> Answer:
            try:
                return statement(cursor)
            except InsufficientPrivilege as error:
                raise explain_refusal(cursor, error, self.table, self._url.username) from error

        return run

    def ask_all(self, steps: Steps[Answer]) -> Answer:
        """Ask several statements, one after the other, and wait for each.

        :raises TaskLockError: why one of them was not answered
        """
        return ask_here(steps, self.ask)

    def run_steps(
        self,
        steps: Steps[object],
        call: Callable[[Callable[[], object]], object],
        done: Callable[[], object],
    ) -> None:
        """Ask several statements, one after the other, and wait for none.

        :param call: calls what comes between two of them, or before the first, or lets it be called
            elsewhere. Must not wait in the database's thread.
        :param done: called at the end, where the rest was
        """

        def proceed(outcome: Outcome[Any] | None) -> None:
            statement = None
            try:
                statement = go_on(steps, outcome)
            finally:
                if statement is None:
                    done()
            if statement is not None:
                self._database.submit(ticket_of(statement))

        def ticket_of(statement: Statement) -> StepTicket:
            now = time.monotonic()
            return StepTicket(
                self._explaining(statement),
                Deadline(self._closing),
                lambda outcome: call(partial(proceed, outcome)),
                came=now,
                turn_until=now + self._turn_limit,
                answer_within=self._attempt,
            )

        call(partial(proceed, None))

    def add_recurring(self, recurring: Recurring) -> None:
        """Do something in the database's thread whenever it is due, until it is over."""
        self._database.add_recurring(recurring)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the database's thread. It must not wait."""
        self._database.call(function)

    def _learn(self, sent: float, database_time: datetime) -> None:
        bound = self.clock.latest(sent)
        now = time.monotonic()
        self.clock.learn(sent=sent, answered=now, database_time=database_time, bound=bound)

    def extend(self, held: HeldLock, by: float) -> bool:
        """Move the end of a lock's maximum lock by seconds; tell whether the claim stood.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects that
        """
        sent = 0.0

        def extend(cursor: Any) -> LockTimes | None:
            nonlocal sent
            sent = time.monotonic()
            return self._protocol.extend(cursor, held.name, held.claim_id, by, held.lease)

        # What goes on after a shutdown has begun has the time that it always has.
        deadline = Deadline(None, time.monotonic() + 2 * self._timeout)
        times = self._ask(
            Call(extend), deadline, turn_within=self._timeout, tried_for=EXTEND_TIMEOUT
        )
        if times is not None:
            note_times(held, times, sent)
        return times is not None

    def renew_now(self, held: HeldLock) -> bool:
        """Renew a claim at once; tell whether it stands. ``False`` too if that is not known."""
        try:
            return self._database.get(self._renewal_of(held))
        except TaskLockError as error:
            return _not_renewed(held, error)

    async def renew_now_async(self, held: HeldLock) -> bool:
        """Do the same in a coroutine."""
        asked = self._renewal_of(held)
        self._database.submit(asked)
        try:
            return await asked.result()
        except TaskLockError as error:
            return _not_renewed(held, error)

    def _renewal_of(self, held: HeldLock) -> Asked[bool, bool]:
        return self._asked_once(
            lambda cursor: bool(self.replica.renew(cursor, [held], frozenset()).get(held.claim_id))
        )


def _not_renewed(held: HeldLock, error: TaskLockError) -> bool:
    logger.debug("Task %r: its lease could not be renewed before its run: %s", held.name, error)
    return False


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


def client_at_start(client: LockClient, scheduler: Any) -> LockClient:
    """Return the client with which a user of a scheduler starts, itself if it can be used.

    It asks what stands in for the database now, or the database, and then on the connection that
    others of the scheduler have, if they name the same place.

    :param scheduler: ``None`` for a user that asks no database
    :raises TaskLockOptionError: they connect to it in another way
    """
    is_usable = not client.closed and is_made_for_now(client)
    standing = current_standing()
    stand_in = None if standing is None else standing.stand_in
    settings = replace(client.settings, stand_in=stand_in)
    if stand_in is not None or scheduler is None:
        return client if is_usable else LockClient(settings)
    shared = shared_replica(scheduler, settings, client.replica if is_usable else None)
    if is_usable and client.replica is shared:
        return client
    if is_usable:
        client.close(blocking=True)  # it may have been used before the start
    return LockClient(settings, shared)
