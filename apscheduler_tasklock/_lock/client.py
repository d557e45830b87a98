"""The client of one replica's task locks: it claims, renews and releases them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from math import inf
from typing import Any, TypeVar
from uuid import UUID

from psycopg.errors import InsufficientPrivilege, InvalidSchemaName, UndefinedTable
from sqlalchemy import Engine

from apscheduler_tasklock._application import flush_application
from apscheduler_tasklock._database.actions import ActionRequest
from apscheduler_tasklock._database.awaited_request import AwaitedCall
from apscheduler_tasklock._database.connection import attempt_limit, turn_limit
from apscheduler_tasklock._database.jitter import BACKOFF
from apscheduler_tasklock._database.plain_future import PlainFuture
from apscheduler_tasklock._database.rejections import (
    CLAIMS,
    RUN_HISTORY,
)
from apscheduler_tasklock._database.requests import Call, Outcome
from apscheduler_tasklock._database.sequences import (
    SequenceRequest,
    Statement,
    Statements,
    ask_here,
    next_statement,
)
from apscheduler_tasklock._database.sqlstates import ConflictError, NoThreadError, RowLockedError
from apscheduler_tasklock._database.thread import ReplicaThread
from apscheduler_tasklock._database.url import as_url
from apscheduler_tasklock._lock.claim_attempts import (
    AnyAttempt,
    AnyRequest,
    ClaimAttempt,
    ClaimContext,
    GrantLimitError,
    RerunClaimAttempt,
    StoredClaimAttempt,
    TimedAnswer,
)
from apscheduler_tasklock._lock.claims import (
    AwaitedClaim,
    Claimed,
    QueueClaims,
    Report,
)
from apscheduler_tasklock._lock.command_lines import command_line
from apscheduler_tasklock._lock.job_rows import JobRows
from apscheduler_tasklock._lock.outcomes import NOT_BEGUN, ClaimOutcome, RunOutcome, WindowAfter
from apscheduler_tasklock._lock.protocol_messages import (
    ClaimAnswer,
    ClaimRequest,
    EndLease,
    Extend,
    JobMove,
    LockEnds,
    Message,
    ReadTasks,
    Refusal,
    ReleaseAnswer,
    ReleaseRequest,
    RerunRequest,
    Resign,
    TaskRow,
)
from apscheduler_tasklock._lock.releases import ArrivedLate, Release
from apscheduler_tasklock._lock.replica import (
    LockSettings,
    Replica,
    note_times,
    shared_replica,
)
from apscheduler_tasklock._lock.test_doubles import active_stand_in
from apscheduler_tasklock._shutdown import (
    CANCEL_LIMIT,
    NO_STOP,
    SHORTEST_CLOSING,
    SHORTEST_FLUSH,
    SHUTDOWN_LIMIT,
    Closing,
    Shutdown,
    off_the_loop,
)
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockNotFoundError,
    TaskLockSchemaError,
    TaskLockStateError,
    TaskLockUnknownError,
)
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.schema.check import (
    check_tables,
    explain_missing_rights,
    explain_missing_table,
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

CLOSED = "these locks are closed"
# Limits how long one ask of a queue is sent again while the database is unavailable, in seconds.
# The queue has one ask on its way, and the next one has the claims that have come meanwhile.
LONGEST_ASK = 1.5
# Limits how long extending a lock is tried while the database is unavailable, in seconds.
EXTEND_TIMEOUT = 2.0


@dataclass(frozen=True)
class Released:
    """A released claim.

    :ivar locked_until: the database time until which the claim's window is taken; ``None`` if the
        answer with that time was lost
    :ivar retry_at: the database time at which the failed run is run again; ``None``: it is not
    :ivar took: seconds from the run's grant to its end
    """

    locked_until: datetime | None = None
    retry_at: datetime | None = None
    took: float = 0.0


class LockClient:
    """The client of one replica's task locks in one database. Safe to share between threads.

    A client is ready when it is made, and is closed once. A forked child makes a client of its own.

    :raises TaskLockOptionError: the task lock cannot use the database
    :param replica: the replica, which the executors and the job store of a scheduler share; by
        default a new one
    :ivar replica: the replica that the client uses
    :ivar clock: the bound of the database's time
    :ivar outage: whether the database is available, and its rows are believed
    :ivar rejections: the work of this replica that the database rejects now
    :ivar jobs: the statements of the job store, for :meth:`ask`
    """

    def __init__(self, settings: LockSettings, replica: Replica | None = None) -> None:
        self.settings = settings
        self.replica_id = settings.replica_id
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
        # Cancelled by a stop. It is no `threading.Event`, because that has a lock, which the thread
        # that a signal handler interrupts may have taken.
        self._pause: PlainFuture[None] = PlainFuture()
        self._released_at = 0.0
        self.outage = self.replica.outage
        self.rejections = self.replica.rejections
        self._rights_at = 0.0  # when the rights are checked next, on the monotonic clock
        self._protocol = self.replica.protocol(settings)
        # The heartbeat is used in the replica's thread only.
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
        # The locks of this client's runs that go on, by claim id, each with the run's start.
        self._running: dict[UUID, tuple[HeldLock, datetime]] = {}
        self._listens = False
        self.replica.join(self._closing)

    def for_child(self) -> LockClient:
        """Return a client for a forked child, which uses nothing of the parent's.

        The child's client keeps a reference to the parent's client. Otherwise the garbage collector
        of the child would close the inherited connection, which would end the connection in the
        parent, too. The child's client is another replica, because several children of one parent
        may run schedulers.
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
        """Whether claiming is stopped."""
        return self._closing.stopped

    @property
    def thread(self) -> ReplicaThread:
        """The replica's thread."""
        return self._database

    @property
    def stable(self) -> bool:
        """Whether the database is available, and the rows are believed."""
        return self.outage.stable

    def check(self, *, jobs: bool = False) -> None:
        """Check that the tables exist, are new enough, and may be used.

        :param jobs: whether to check the job store's table, too
        :raises TaskLockSchemaError: a table or a right is missing, or a table is too old; the
            message names all that is missing
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

    def look_at_rights(self) -> Statements[None]:
        """Check whether claims and the run history are still permitted.

        Claims alone would not show a missing right in time, because a task may be claimed once a
        night. So the rights are checked as often as a replica sends a sign of life. While work is
        rejected, the rights are checked at each look at the tasks' rows.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: the database rejects the statement
        """
        rejections, now = self.rejections, time.monotonic()
        is_urgent = rejections.suspected or rejections.reported()
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
            rejections.suspected = True
            raise
        for what, problem in found.items():
            if problem is None:
                rejections.permitted(what)
            else:
                rejections.begin(what, problem)
        self._rights_at = now + self._timings.report_interval

    def ask_for(self, seconds: float, statement: Callable[[Any], Answer]) -> Answer:
        """Run a short statement. While the database is unavailable, try for some seconds.

        :param seconds: limits the call; the last try begins after four fifths of it at the latest
        :param statement: called with a cursor of the connection. It may be called again
            although the server has carried it out.
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: the database rejects the statement; the message names the remedy
        """
        # The last try needs time for its answer.
        times = self._times(0.8 * seconds, time.monotonic() + seconds)
        asked: AwaitedCall[Answer] = AwaitedCall(statement, self._closing, **times)
        return self._database.get(asked)

    def _asked(self, statement: Callable[[Any], Answer], until: float = inf) -> AwaitedCall[Answer]:
        """Return the request of a statement that is sent once."""
        return AwaitedCall(statement, self._closing, **self._times(until=until))

    def _times(self, tried_for: float = -1.0, until: float = inf) -> dict[str, float]:
        """Return the times of a request that comes now.

        :param tried_for: seconds for which it is sent again while the database is unavailable; by
            default it is sent once
        :param until: when it is over in any case, on the monotonic clock
        """
        now = time.monotonic()
        return {
            "came": now,
            "until": until,
            "turn_until": now + self._turn_limit,
            "tried_until": now + tried_for,
            "answer_within": self._attempt,
        }

    def listen(self, heard: Callable[[], object]) -> None:
        """Listen for other replicas' changes of jobs, if the connection can listen.

        :param heard: called in the replica's thread when a job was changed, or may have been; must
            not wait
        """
        self._listens = True
        self._database.listen(self.jobs.channel, heard, self.rejections)

    def attempt(self, request: AnyRequest) -> AnyAttempt:
        """Return an attempt at a claim, for :meth:`claim` and the other methods that send attempts.

        :raises TaskLockError: the client is closed
        """
        if self.closed or self._pid != os.getpid():
            raise TaskLockError(f"task {request.task_name!r} is not claimed: {CLOSED}")
        if isinstance(request, RerunRequest):
            return RerunClaimAttempt(request, self._context)
        if request.move is not None:
            return StoredClaimAttempt(request, self._context)
        return ClaimAttempt(request, self._context)

    def claim(self, wanted: AnyRequest | AnyAttempt) -> HeldLock | Refusal | None:
        """Claim a task for one run time, take over a dead run, or claim a manual run.

        The claim is sent again while the database is unavailable.

        :param wanted: a request, or an attempt
        :return: the held lock, which must be released; or why the claim was refused; or ``None`` if
            there is nothing to claim any more
        :raises TaskLockDatabaseError: the database stayed unavailable for ``claim_timeout``. A
            claim in doubt is released in the background.
        :raises TaskLockError: the database rejects the statement, and the message names the
            remedy; or the client is closed
        """
        if isinstance(wanted, (ClaimRequest, RerunRequest)):
            wanted = self.attempt(wanted)
        return self._database.get(self._awaited(wanted))

    def begin_claim(self, wanted: AnyRequest) -> AwaitedClaim:
        """Begin a claim in a coroutine, which awaits its ``result``; see :meth:`claim`.

        If the coroutine is cancelled, the claim is withdrawn.
        """
        asked = self._awaited(self.attempt(wanted))
        self._database.submit(asked)
        return asked

    def _awaited(self, attempt: AnyAttempt) -> AwaitedClaim:
        """Return the request of a claim that somebody waits for."""
        times = self._times(self._timeout)
        return AwaitedClaim(attempt, self._closing, self._conclude, self._hand_over, **times)

    def _conclude(
        self, attempt: AnyAttempt, begun: float, outcome: Outcome[TimedAnswer]
    ) -> HeldLock | Refusal | None:
        """Make the result of a claim from its outcome, in the replica's thread."""
        self.outage.note_lease(attempt.request.lease)
        error = outcome.error
        if error is None:
            claimed = self._claimed(attempt.request, outcome.result())
            if self.closed and isinstance(claimed, HeldLock):
                # Claiming was stopped, so the waiter may have gone meanwhile.
                self._hand_over(attempt.request, claimed)
                raise TaskLockError(f"task {claimed.name!r} is not claimed: {CLOSED}")
            if not isinstance(claimed, HeldLock):
                # Release a claim in doubt, because an earlier try of the claim may still be on its
                # way, and be granted when nobody waits for the claim any more.
                self.withdraw(attempt)
            return claimed
        if isinstance(error, TaskLockSchemaError):
            self.rejections.suspected = True
        self.withdraw(attempt)
        if isinstance(error, TaskLockDatabaseError):
            raise type(error)(self._timed_out(begun, str(error))) from error.__cause__
        raise error

    def begin_claims(
        self, attempts: Sequence[AnyAttempt], most: int | None, report: Report
    ) -> None:
        """Begin claims, of which a limited number is granted. Does not wait.

        While the database is unavailable, the claims are sent again for ``LONGEST_ASK``. Then each
        claim without a usable answer that has been wanted for longer than ``claim_timeout`` fails;
        one that had an answer, such as that its row is locked, if it was sent after that time. If
        it is in doubt, it is released in the background. The result of a younger claim is
        :attr:`ClaimOutcome.UNANSWERED`.

        :param attempts: the claims in the order in which they are to be granted, each for another
            task, and all of one kind. An attempt whose result is a :class:`ClaimOutcome` has to be
            passed to this method again, or to :meth:`withdraw`.
        :param most: limits how many claims are granted; ``None``: no limit, as always for
            takeovers, retries and manual runs
        :param report: called in the replica's thread with the result of each claim. It has to make
            sure that granted locks are released.
        """
        wanted_at = min(map(self._want, attempts))
        claims = QueueClaims(
            attempts,
            most,
            self._closing,
            self._conclude_queued,
            report,
            **self._times(min(wanted_at + self._timeout - time.monotonic(), LONGEST_ASK)),
        )
        if self.outage.reason is not None:
            claims.failures = len(BACKOFF)  # so that each ask begins with the longest pause
        self._database.submit(claims)

    @staticmethod
    def _want(attempt: AnyAttempt) -> float:
        """Return since when a claim has been wanted; since now, if it was not wanted before."""
        if attempt.wanted_at is None:
            attempt.wanted_at = time.monotonic()
        return attempt.wanted_at

    def _conclude_queued(
        self, attempt: AnyAttempt, outcome: Outcome[TimedAnswer], sent_at: float
    ) -> Claimed:
        """Make the result of a queue's claim from its outcome, in the replica's thread."""
        error, wanted_at = outcome.error, attempt.wanted_at
        assert wanted_at is not None
        if isinstance(error, GrantLimitError):
            attempt.wanted_at = None  # because no worker is free
            return ClaimOutcome.BEYOND
        if isinstance(error, RowLockedError):
            self.outage.note_locked(wanted_at)
        is_conflict = isinstance(error, ConflictError)
        # Judge a conflict by when the claim was sent, because this process may have been stopped
        # since then.
        tried_at = sent_at if is_conflict and sent_at > -inf else time.monotonic()
        is_tried = tried_at < wanted_at + self._timeout and not self.closed
        if isinstance(error, TaskLockDatabaseError) and is_tried:
            return ClaimOutcome.LOCKED if is_conflict else ClaimOutcome.UNANSWERED
        try:
            return self._conclude(attempt, wanted_at, outcome)
        except TaskLockError as failed:
            return failed

    def _hand_over(self, request: AnyRequest, claimed: HeldLock | Refusal | None) -> None:
        """Release a granted claim that nobody waits for, so that another replica can claim."""
        if isinstance(claimed, HeldLock):
            is_hold = isinstance(request, ClaimRequest) and not request.runs
            self.begin_release(
                claimed, RunOutcome(WindowAfter.OPEN if is_hold else WindowAfter.HAND_OVER)
            )

    def _timed_out(self, since: float, reason: str) -> str:
        return (
            f"the task lock database ({self.where}) could not be used for "
            f"{time.monotonic() - since:.1f} sec: {reason}"
        )

    def withdraw(self, attempt: AnyAttempt) -> None:
        """Withdraw a claim. If it is in doubt, it is released in the background."""
        request = attempt.request
        if not attempt.in_doubt:
            return
        end = RunOutcome(request.window_in_doubt)
        in_doubt = ReleaseRequest(request.task_name, request.claim_id, end)
        # Send the release again until no earlier try of the claim can be granted any more: until
        # the claim's `not_after` and the longest wait for an answer have passed.
        until = time.monotonic() + self.longest_doubt
        self._database.submit(self._release_of(in_doubt, until, stays_until=until))

    def _claimed(self, request: AnyRequest, decision: TimedAnswer) -> HeldLock | Refusal | None:
        answer, sent = decision.answer, decision.sent
        if answer is None or not answer.granted:
            return None if answer is None else Refusal.of(answer)
        run_time, dead_holder, was_due_at = None, None, None
        if isinstance(request, ClaimRequest):
            run_time, was_due_at = request.run_time, answer.due_at
        else:
            dead_holder = request.dead_holder
            if not answer.manual:  # a manual run has no run time
                run_time = _run_time_here(answer)
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
            was_due_at=was_due_at,
            attempt=answer.attempt,
            extender=self.extend,
        )
        if held.lease is not None and not self._database.has_thread:
            # Nothing would renew the lease, because no thread could be started.
            self._hand_over(request, held)
            raise NoThreadError(
                f"task {held.name!r} is not claimed: no thread can be started that would renew "
                "its lease"
            )
        self._heartbeat.add(held)
        self._running[held.claim_id] = (held, answer.database_time)
        return held

    def what_runs(self) -> list[RunningRun]:
        """Return this client's runs that go on, also the runs whose locks are lost."""
        return [
            RunningRun(held.name, held.token, self.replica_id, since, lost=held.lost)
            for held, since in list(self._running.values())
        ]

    def release(self, held: HeldLock, end: RunOutcome = NOT_BEGUN) -> Released | None:
        """Release a claim, and wait for the answer.

        :param held: the lock to release
        :param end: the outcome of the run
        :return: until when the window is taken; ``None`` if another claim stands in the row
        :raises TaskLockDatabaseError: the database is unavailable. The release is pending: it is
            sent again in the background until the database answers.
        :raises TaskLockError: the database rejects the statement. The release is pending, too.
        """
        return self.released(held, self.begin_release(held, end))

    def begin_release(
        self, held: HeldLock, end: RunOutcome = NOT_BEGUN, arrived_late: ArrivedLate | None = None
    ) -> Release:
        """Begin the release of a claim; see :meth:`released`. Never waits, not even for a lock.

        :param arrived_late: called in the replica's thread with the release and the answer if the
            release has arrived after its future had got an error. Must not wait.
        """
        release = self._release_held(held, _message_of(held, end))
        release.arrived_late = arrived_late
        self._database.submit(release)
        return release

    def released(
        self, held: HeldLock, release: Release, seconds: float | None = None
    ) -> Released | None:
        """Wait for the answer of a release that was begun; see :meth:`release`.

        :param seconds: limits the wait; ``None``: no limit
        """
        return self.made_of(held, release, self._database.result(release, seconds))

    async def released_async(self, held: HeldLock, release: Release) -> Released | None:
        """Do the same as :meth:`released` in a coroutine.

        If the coroutine is cancelled, the release is still sent.
        """
        return self.made_of(held, release, await release.result())

    def made_of(
        self, held: HeldLock, release: Release, answer: ReleaseAnswer | None
    ) -> Released | None:
        """Make the result of a release from its answer."""
        if answer is None and release.in_doubt and held.lease_left > 0:
            # An earlier try has released the claim, and another claim was granted since then.
            return Released(took=release.took)
        if answer is None or (answer.is_late and not release.in_doubt):
            return None
        return Released(answer.locked_until, answer.retry_at, release.took)

    def _release_held(self, held: HeldLock, message: ReleaseRequest | EndLease) -> Release:
        self._released_at, ended_at = time.monotonic(), held.database_time()
        _, began_at = self._running.pop(held.claim_id, (held, ended_at))
        held.end()
        # The release is tried until the database answers. After the end of the lease, the release
        # still finishes the run, unless another replica has taken the run over.
        release = self._release_of(
            message, time.monotonic() + held.seconds_left, partial(self._heartbeat.remove, held)
        )
        release.took = max(0.0, (ended_at - began_at).total_seconds())
        return release

    def _release_of(
        self,
        message: ReleaseRequest | EndLease,
        run_until: float,
        on_taken: Callable[[], object] = lambda: None,
        stays_until: float = -inf,
    ) -> Release:
        return Release(
            self._protocol,
            message,
            self.replica.releasing,
            run_until,
            self._timings,
            self.rejections,
            on_taken,
            stays_until=stays_until,
            answer_within=self._attempt,
        )

    def carrying_out(self, message: Message[Answer]) -> Callable[[Any], Answer]:
        """Return a statement that carries out a message."""
        return lambda cursor: self._protocol.execute(cursor, message)

    def reading(self, task_names: Sequence[str], always: Sequence[str] = ()) -> Statement:
        """Return a statement that reads the rows of tasks that need an action, such as a takeover.

        :param always: the tasks whose rows are read in any case
        """

        def read(cursor: Any) -> list[TaskRow]:
            sent = time.monotonic()
            asked = ReadTasks(task_names, always)
            states, database_time = self._protocol.execute(cursor, asked)
            self._learn(sent, database_time)
            return states

        return read

    def begin_resign(self, row: str, leader_id: str) -> None:
        """Give the leadership up, if this replica leads. Does not wait, and is tried once."""
        resign = self.carrying_out(Resign(row, leader_id))
        times = self._times(until=time.monotonic() + self._attempt)
        self._database.submit(Call(resign, NO_STOP, **times))

    def begin_move_on(self, move: JobMove) -> AwaitedCall[set[str]]:
        """Begin to move a stored job on, because its run time was missed. Does not wait."""
        asked = self._asked(partial(self.jobs.move_on, moves=[move]))
        self._database.submit(asked)
        return asked

    @property
    def longest_doubt(self) -> float:
        """The seconds after which a claim without an answer cannot be granted any more."""
        return self._timeout + self._attempt

    def begin_lease_end(self, held: HeldLock) -> Release:
        """Begin to end the lease of a claim whose run is known to be dead. Does not wait.

        If the task has failover, another replica can then take the run over.
        """
        end = EndLease(held.name, held.claim_id, [self.replica_id])
        release = self._release_held(held, end)
        self._database.submit(release)
        return release

    def command_line(self, command: str, *options: str, task: str) -> str:
        """Return the command line of an operator's command for a task."""
        schema, table = self.table.schema, self.table.name
        return command_line(command, *options, task=task, schema=schema, table=table)

    def wait(self, seconds: float) -> bool:
        """Wait for so many seconds, or until claiming is stopped; return whether it is stopped."""
        return self._pause.wait(seconds)

    def stop_claiming(self) -> None:
        """Stop claiming. Each claim under way ends within 1.5 seconds. Releases are still sent.

        May be called from a signal handler.
        """
        self._closing.stop()
        self._pause.cancel()
        self.replica.note_stopped()
        self._database.wake()

    def close(self, *, blocking: bool = False, shutdown: Shutdown | None = None) -> None:
        """Stop claiming, send the pending releases, and close the connection.

        While the database is unavailable, the releases are tried for 3 seconds. A lock that is
        still held after this call can be released, on a new connection that is closed after the
        release. If others use the connection, it stays open, and what has not been released in this
        time is released later.

        :param blocking: whether this thread waits for the releases even if an event loop runs in
            it. Otherwise a new thread waits in place of an event loop's thread, and the process
            waits for the new thread before it ends.
        :param shutdown: the scheduler's shutdown, after whose end releases are not tried any more.
            If executors or job stores that share the connection are shut down after this client,
            the last of them waits for all releases.
        """
        self.stop_claiming()
        now = time.monotonic()
        if shutdown is not None:
            limit = shutdown.over_at
        else:  # the limit counts from the stop, or from the last release after the stop
            limit = self._closing.over_at(self._released_at, SHUTDOWN_LIMIT)
        latest = min(now + self._timings.closing_timeout, limit)
        waits = shutdown is None or not shutdown.has_others
        close = partial(self._close, max(now + SHORTEST_CLOSING, latest), waits=waits)
        if blocking:
            close()
        else:
            off_the_loop(close)

    def _close(self, abandon_at: float, *, waits: bool) -> None:
        own = frozenset(self._running)
        self._database.call(lambda: self._heartbeat.close(own))
        if self.replica.leave(self._closing):
            self.replica.close(abandon_at)
        elif waits or not self.replica.closing.stopped:
            self._wait_for_releases(abandon_at)
        else:
            return  # because the last user of the connection waits for all releases
        flush_application(max(abandon_at, time.monotonic() + SHORTEST_FLUSH))

    def _wait_for_releases(self, until: float) -> None:
        """Wait for this client's releases.

        The other users go on with the connection, so a release that has not arrived by then is
        still sent.
        """
        if self._listens:
            self._database.stop_listening()
        self._database.hurry_releases()
        mine = self._protocol
        self._database.wait_for_requests(
            lambda request: (
                request.is_release and request.sender is mine and request.not_before < until
            ),
            until,
        )

    def wait_for_claims(self, seconds: float) -> bool:
        """Wait until no claim of this client is under way; return ``False`` if it takes too long.

        :param seconds: limits the wait
        """
        mine = self._context
        return self._database.wait_for_requests(
            lambda request: request.follows_releases and request.sender is mine,
            time.monotonic() + seconds,
        )

    def ask(
        self,
        statement: Callable[[Any], Answer],
        until: float = inf,
        *,
        goes_first: bool = False,
    ) -> Answer:
        """Run a short statement on this replica's connection, and wait for its result.

        :param statement: called with a cursor of the connection
        :param until: limits the wait, on the monotonic clock
        :param goes_first: whether the statement is sent in an outage, too, so that operators can
            read while nothing can be written
        :return: the statement's result
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: the database rejects the statement; the message names the remedy
        """
        if time.monotonic() > until - CANCEL_LIMIT:
            raise TaskLockDatabaseError("no time was left to send the statement")
        asked = self._asked(self._explaining(statement), until)
        asked.goes_first = goes_first
        return self._database.get(asked)

    def act(self, action: Callable[..., Answer], whether: str) -> Answer:
        """Carry out an operator's action. After a doubt, send it again for ``claim_timeout``.

        :param action: called with a cursor, and with whether it may have been done before
        :param whether: what may have been done, in words
        :raises TaskLockUnknownError: it is not known whether the action was done
        :raises TaskLockDatabaseError: the database is unavailable, and nothing was done
        :raises TaskLockError: nothing was done; the message says why
        """
        request = ActionRequest(
            lambda cursor, in_doubt: self._explaining(partial(action, in_doubt=in_doubt))(cursor),
            self._closing,
            **self._times(self._timeout),
        )
        try:
            return self._database.get(request)
        except (TaskLockStateError, TaskLockNotFoundError):
            raise  # the answer of an action that was sent again, too
        except TaskLockError as error:
            if not request.may_be_done:
                raise
            why = f"it is not known whether {whether}: {error}"
            raise TaskLockUnknownError(why) from (error.__cause__ or error)

    def _explaining(self, statement: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
        """Return the statement in a form whose errors name missing rights, or where tables are."""

        def run(cursor: Any) -> Answer:
            try:
                return statement(cursor)
            except InsufficientPrivilege as error:
                raise explain_missing_rights(
                    cursor, error, self.table, self._url.username
                ) from error
            except (UndefinedTable, InvalidSchemaName) as error:
                raise explain_missing_table(cursor, error, self.table) from error

        return run

    def ask_all(self, statements: Statements[Answer], *, goes_first: bool = False) -> Answer:
        """Send a sequence's statements one after the other, and wait for each.

        :param goes_first: as in :meth:`ask`
        :raises TaskLockError: a statement failed
        """
        return ask_here(statements, partial(self.ask, goes_first=goes_first))

    def begin_all(
        self,
        statements: Statements[object],
        call: Callable[[Callable[[], object]], object],
        done: Callable[[], object],
    ) -> None:
        """Send a sequence's statements one after the other. Does not wait.

        :param call: called with a function that runs the sequence's code up to its next statement.
            ``call`` has to call that function, in this thread or in another one. The database's
            thread makes most of the calls of ``call``, so in that thread ``call`` must not wait.
        :param done: called at the end, in the thread that has run the sequence's last code
        """

        def proceed(outcome: Outcome[Any] | None) -> None:
            statement = None
            try:
                statement = next_statement(statements, outcome)
            finally:
                if statement is None:
                    done()
            if statement is not None:
                self._database.submit(request_of(statement))

        def request_of(statement: Statement) -> SequenceRequest:
            return SequenceRequest(
                self._explaining(statement),
                self._closing,
                lambda outcome: call(partial(proceed, outcome)),
                **self._times(),
            )

        call(partial(proceed, None))

    def _learn(self, sent: float, database_time: datetime) -> None:
        bound = self.clock.latest(sent)
        now = time.monotonic()
        self.clock.learn(sent=sent, answered=now, database_time=database_time, bound=bound)

    def extend(self, held: HeldLock, by: float) -> bool:
        """Move the end of a maximum lock by so many seconds; return whether the claim stood.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: the database rejects the statement
        """
        sent, asked = 0.0, Extend(held.name, held.claim_id, by, held.lease)

        def extend(cursor: Any) -> LockEnds | None:
            nonlocal sent
            sent = time.monotonic()
            return self._protocol.execute(cursor, asked)

        limits = self._times(EXTEND_TIMEOUT, time.monotonic() + 2 * self._timeout)
        times = self._database.get(AwaitedCall(extend, NO_STOP, **limits))
        if times is not None:
            note_times(held, times, sent)
        return times is not None

    def renew_now(self, held: HeldLock) -> bool:
        """Renew a claim at once; return whether the claim is known to be renewed."""
        try:
            return self._database.get(self._renewal_of(held))
        except TaskLockError as error:
            return _not_renewed(held, error)

    async def renew_now_async(self, held: HeldLock) -> bool:
        """Do the same as :meth:`renew_now` in a coroutine."""
        asked = self._renewal_of(held)
        self._database.submit(asked)
        try:
            return await asked.result()
        except TaskLockError as error:
            return _not_renewed(held, error)

    def _renewal_of(self, held: HeldLock) -> AwaitedCall[bool]:
        return self._asked(
            lambda cursor: bool(self.replica.renew(cursor, [held], frozenset()).get(held.claim_id))
        )


def _run_time_here(answer: ClaimAnswer) -> datetime:
    """Return the run time of the row's window by this replica's clock."""
    return datetime.now(timezone.utc) - (answer.database_time - answer.window_start)


def _not_renewed(held: HeldLock, error: TaskLockError) -> bool:
    logger.debug("Task %r: its lease could not be renewed before its run: %s", held.name, error)
    return False


def _message_of(held: HeldLock, end: RunOutcome) -> ReleaseRequest:
    # The release may arrive long after the run's end, so it says when the run ended. Otherwise run
    # times that became due in between would seem to have become due during the run.
    ended = time.monotonic()
    return ReleaseRequest(
        held.name,
        held.claim_id,
        end,
        held.token,
        held.database_time(),
        lambda: time.monotonic() - ended,
    )


def client_or_stand_in(client: LockClient) -> LockClient:
    """Return the client to claim with now: this one, or in a test the client of a stand-in."""
    active, settings = active_stand_in(), client.settings
    if active is None or settings.stand_in is not None:
        return client
    return active.client(settings, lambda: LockClient(replace(settings, stand_in=active.stand_in)))


def client_at_start(client: LockClient, scheduler: Any) -> LockClient:
    """Return the client with which an executor or job store starts: the given or a new client.

    The returned client uses the stand-in that is set now, or the database if no stand-in is set. It
    shares the replica of the scheduler's other executors and job store, if they use the same
    database and table.

    :param scheduler: the scheduler; ``None`` for an executor that uses no database
    :raises TaskLockOptionError: another executor or job store of the scheduler connects to the same
        database in another way
    """
    active = active_stand_in()
    stand_in = None if active is None else active.stand_in
    is_usable = not client.closed and client.settings.stand_in is stand_in
    settings = replace(client.settings, stand_in=stand_in)
    if stand_in is not None or scheduler is None:
        return client if is_usable else LockClient(settings)
    shared = shared_replica(scheduler, settings, client.replica if is_usable else None)
    if is_usable and client.replica is shared:
        return client
    if is_usable:
        client.close(blocking=True)  # because it may have opened a connection before the start
    return LockClient(settings, shared)
