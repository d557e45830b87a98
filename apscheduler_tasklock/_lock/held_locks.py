"""The locks of one user of a replica: how they are claimed, extended and released."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from math import inf
from typing import Any
from uuid import UUID

from apscheduler_tasklock._database.awaited_request import AwaitedCall
from apscheduler_tasklock._database.jitter import BACKOFF
from apscheduler_tasklock._database.requests import Outcome
from apscheduler_tasklock._database.sqlstates import ConflictError, NoThreadError, RowLockedError
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
from apscheduler_tasklock._lock.claims import AwaitedClaim, Claimed, QueueClaims, Report
from apscheduler_tasklock._lock.database import Database
from apscheduler_tasklock._lock.outcomes import NOT_BEGUN, ClaimOutcome, RunOutcome, WindowAfter
from apscheduler_tasklock._lock.protocol_messages import (
    ClaimAnswer,
    ClaimRequest,
    EndLease,
    Extend,
    LockEnds,
    Refusal,
    ReleaseRequest,
    RerunRequest,
)
from apscheduler_tasklock._lock.releases import ArrivedLate, Release, Released
from apscheduler_tasklock._lock.replica import LockSettings, Replica, note_times, renew
from apscheduler_tasklock._shutdown import NO_STOP, Closing
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockSchemaError,
)
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.status import RunningRun

logger = logger_of(__name__)

CLOSED = "these locks are closed"
# Limits how long one ask of a queue is sent again while the database is unavailable, in seconds.
# The queue has one ask on its way, and the next one has the claims that have come meanwhile.
LONGEST_ASK = 1.5
# Limits how long extending a lock is tried while the database is unavailable, in seconds.
EXTEND_TIMEOUT = 2.0


class HeldLocks:
    """Claims, extends and releases the locks of one user of a replica, and knows those it holds.

    Safe to share between threads.

    :param database: the database, as the user asks it
    :param closing: the user's stop, which ends claims
    :ivar settings: the user's settings
    :ivar replica: the replica that renews the locks
    :ivar released_at: when a release was begun last, on the monotonic clock
    """

    def __init__(
        self, replica: Replica, settings: LockSettings, database: Database, closing: Closing
    ) -> None:
        self.settings = settings
        self.replica = replica
        self.database = database
        self.released_at = 0.0
        self._closing = closing
        self._timeout = settings.claim_timeout
        self._context = ClaimContext(
            database.protocol, replica.clock, replica.outage, settings.claim_timeout
        )
        # The locks of the runs that go on, by claim id, each with the run's start.
        self._running: dict[UUID, tuple[HeldLock, datetime]] = {}

    @property
    def closed(self) -> bool:
        """Whether claiming is stopped."""
        return self._closing.stopped

    def attempt(self, request: AnyRequest) -> AnyAttempt:
        """Return an attempt at a claim, for :meth:`claim` and the other methods that send attempts.

        :raises TaskLockError: claiming is stopped
        """
        if self.closed or self.replica.pid != os.getpid():
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
            remedy; or claiming is stopped
        """
        if isinstance(wanted, (ClaimRequest, RerunRequest)):
            wanted = self.attempt(wanted)
        return self.database.thread.get(self._awaited(wanted))

    def begin_claim(self, wanted: AnyRequest) -> AwaitedClaim:
        """Begin a claim in a coroutine, which awaits its ``result``; see :meth:`claim`.

        If the coroutine is cancelled, the claim is withdrawn.
        """
        asked = self._awaited(self.attempt(wanted))
        self.database.thread.submit(asked)
        return asked

    def _awaited(self, attempt: AnyAttempt) -> AwaitedClaim:
        """Return the request of a claim that somebody waits for."""
        times = self.database.times(self._timeout)
        return AwaitedClaim(attempt, self._closing, self._conclude, self._hand_over, **times)

    def _conclude(
        self, attempt: AnyAttempt, begun: float, outcome: Outcome[TimedAnswer]
    ) -> HeldLock | Refusal | None:
        """Make the result of a claim from its outcome, in the replica's thread."""
        self.replica.outage.note_lease(attempt.request.lease)
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
            self.replica.rejections.suspected = True
        self.withdraw(attempt)
        if isinstance(error, TaskLockDatabaseError):
            took = time.monotonic() - begun
            raise type(error)(
                f"the task lock database ({self.replica.where}) could not be used for {took:.1f} "
                f"sec: {error}"
            ) from error.__cause__
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
            **self.database.times(min(wanted_at + self._timeout - time.monotonic(), LONGEST_ASK)),
        )
        if self.replica.outage.reason is not None:
            claims.failures = len(BACKOFF)  # so that each ask begins with the longest pause
        self.database.thread.submit(claims)

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
            self.replica.outage.note_locked(wanted_at)
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
        self.database.thread.submit(self._release_of(in_doubt, until, stays_until=until))

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
        if held.lease is not None and not self.database.thread.has_thread:
            # Nothing would renew the lease, because no thread could be started.
            self._hand_over(request, held)
            raise NoThreadError(
                f"task {held.name!r} is not claimed: no thread can be started that would renew "
                "its lease"
            )
        self.replica.heartbeat.add(held)
        self._running[held.claim_id] = (held, answer.database_time)
        return held

    def claim_ids(self) -> frozenset[UUID]:
        """Return the ids of the claims that are held."""
        return frozenset(self._running)

    def wait_for_claims(self, seconds: float) -> bool:
        """Wait until no claim is under way; return ``False`` if it takes too long.

        :param seconds: limits the wait
        """
        return self.database.thread.wait_for_requests(
            lambda request: request.follows_releases and request.sender is self._context,
            time.monotonic() + seconds,
        )

    def what_runs(self) -> list[RunningRun]:
        """Return this user's runs that go on, also the runs whose locks are lost."""
        return [
            RunningRun(held.name, held.token, self.settings.replica_id, since, lost=held.lost)
            for held, since in list(self._running.values())
        ]

    def release(self, held: HeldLock, end: RunOutcome = NOT_BEGUN) -> Released | None:
        """Release a claim, and wait for the answer; see :meth:`begin_release`.

        :param held: the lock to release
        :param end: the outcome of the run
        :return: until when the window is taken; ``None`` if another claim stands in the row
        :raises TaskLockDatabaseError: the database is unavailable. The release is pending: it is
            sent again in the background until the database answers.
        :raises TaskLockError: the database rejects the statement. The release is pending, too.
        """
        return self.wait_for_release(self.begin_release(held, end))

    def begin_release(
        self, held: HeldLock, end: RunOutcome = NOT_BEGUN, arrived_late: ArrivedLate | None = None
    ) -> Release:
        """Begin the release of a claim. Never waits, not even for a lock.

        :param arrived_late: called in the replica's thread with the result if the release has
            arrived after its future had got an error. Must not wait.
        """
        return self._begin_release(held, _message_of(held, end), arrived_late)

    def begin_lease_end(self, held: HeldLock) -> Release:
        """Begin to end the lease of a claim whose run is known to be dead. Does not wait.

        If the task has failover, another replica can then take the run over.
        """
        return self._begin_release(
            held, EndLease(held.name, held.claim_id, [self.settings.replica_id])
        )

    def _begin_release(
        self,
        held: HeldLock,
        message: ReleaseRequest | EndLease,
        arrived_late: ArrivedLate | None = None,
    ) -> Release:
        self.released_at, ended_at = time.monotonic(), held.database_time()
        _, began_at = self._running.pop(held.claim_id, (held, ended_at))
        held.end()
        # The release is tried until the database answers. After the end of the lease, the release
        # still finishes the run, unless another replica has taken the run over.
        release = self._release_of(
            message, time.monotonic() + held.seconds_left, held=held, arrived_late=arrived_late
        )
        release.took = max(0.0, (ended_at - began_at).total_seconds())
        self.database.thread.submit(release)
        return release

    def _release_of(
        self, message: ReleaseRequest | EndLease, run_until: float, **options: Any
    ) -> Release:
        return Release(
            self.replica,
            self.database.protocol,
            message,
            run_until,
            answer_within=self.database.attempt,
            **options,
        )

    def wait_for_release(self, release: Release, seconds: float | None = None) -> Released | None:
        """Wait for the result of a release that was begun.

        :param seconds: limits the wait; ``None``: no limit
        :raises TaskLockError: as :meth:`release`
        """
        return self.database.thread.result(release, seconds)

    @property
    def longest_doubt(self) -> float:
        """The seconds after which a claim without an answer cannot be granted any more."""
        return self._timeout + self.database.attempt

    def extend(self, held: HeldLock, by: float) -> bool:
        """Move the end of a maximum lock by so many seconds; return whether the claim stood.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: the database rejects the statement
        """
        sent, asked = 0.0, Extend(held.name, held.claim_id, by, held.lease)

        def extend(cursor: Any) -> LockEnds | None:
            nonlocal sent
            sent = time.monotonic()
            return self.database.protocol.execute(cursor, asked)

        limits = self.database.times(EXTEND_TIMEOUT, time.monotonic() + 2 * self._timeout)
        times = self.database.thread.get(AwaitedCall(extend, NO_STOP, **limits))
        if times is not None:
            note_times(held, times, sent)
        return times is not None

    def renew_now(self, held: HeldLock) -> bool:
        """Renew a claim at once; return whether the claim is known to be renewed."""
        try:
            return self.database.thread.get(self._renewal_of(held))
        except TaskLockError as error:
            return _not_renewed(held, error)

    async def renew_now_async(self, held: HeldLock) -> bool:
        """Do the same as :meth:`renew_now` in a coroutine."""
        asked = self._renewal_of(held)
        self.database.thread.submit(asked)
        try:
            return await asked.result()
        except TaskLockError as error:
            return _not_renewed(held, error)

    def _renewal_of(self, held: HeldLock) -> AwaitedCall[bool]:
        renewed = partial(renew, self.database.protocol, held=[held], last=frozenset())
        return self.database.asked(lambda cursor: bool(renewed(cursor).get(held.claim_id)))


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
