"""Claims on a database that may be unavailable: made, ended, and never left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from math import inf
from typing import Any
from uuid import UUID

from apscheduler_tasklock._database.connection import wait_at_most
from apscheduler_tasklock._database.deadline import RELEASE_LIMIT, SHUTDOWN_LIMIT, Closing
from apscheduler_tasklock._database.errors import is_full
from apscheduler_tasklock._database.retry import Attempts, Result
from apscheduler_tasklock._lock.claim import Asking, AskingToTakeOver, WantedClaim, WantedTakeover
from apscheduler_tasklock._lock.clock import DatabaseClock
from apscheduler_tasklock._lock.heartbeat import RENEWALS_PER_LEASE, Leases
from apscheduler_tasklock._lock.protocol import (
    ClaimAnswer,
    LockTimes,
    Refusal,
    ReleaseAnswer,
    Renewal,
    TaskLockProtocol,
)
from apscheduler_tasklock._lock.releases import Ending, OwedReleases, send_ending
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.lock import HeldLock

# Seconds for which a release is tried by the job's own worker, before it is left to the
# background.
RELEASE_PATIENCE = 0.2
# Seconds for a renewal on the connections of claims and releases, which others may have used up.
FALLBACK_LIMIT = 1.5


class Claims:
    """Makes and ends the claims of one replica.

    :param attempts: runs the statements
    :param renewing: runs those that renew, which must not wait for the others
    :param protocol: has them
    :param clock: the database's clock
    :param replica_id: who claims, shown in logs
    :param timeout: seconds for which a claim is tried while the database is unavailable
    :param stop: ends these attempts when claiming is stopped
    :ivar owed: the releases that have not arrived yet
    """

    def __init__(
        self,
        attempts: Attempts,
        renewing: Attempts,
        protocol: TaskLockProtocol,
        clock: DatabaseClock,
        *,
        replica_id: str,
        timeout: float,
        stop: Closing,
    ) -> None:
        self._attempts = attempts
        self._renewing = renewing
        self._protocol = protocol
        self._clock = clock
        self._replica_id = replica_id
        self._timeout = timeout
        self._stop = stop
        self.owed = OwedReleases(attempts, protocol)
        self._released_at = 0.0
        self._leases = Leases(self._renew, rest=renewing.rest)

    def claim(self, wanted: WantedClaim, since: float | None = None) -> HeldLock | Refusal:
        """Claim a task. See :meth:`TaskLocks.claim`."""
        asking = Asking(self._protocol, self._clock, wanted, self._replica_id)
        if wanted.keep_window_if_in_doubt:
            in_doubt = Ending.KEEP
        else:
            # Nobody takes a hold over: there is no job to run.
            in_doubt = Ending.HAND_OVER if wanted.runs else Ending.OPEN
        answer, sent = self._ask(asking, in_doubt, wanted.max_lock, since)
        assert answer is not None
        if not answer.granted:
            return _refusal(answer)
        return self._hold(answer, sent, wanted, run_time=wanted.run_time)

    def take_over(
        self, wanted: WantedTakeover, since: float | None = None
    ) -> HeldLock | Refusal | None:
        """Take over the run of a dead holder. See :meth:`TaskLocks.take_over`."""
        asking = AskingToTakeOver(self._protocol, self._clock, wanted, self._replica_id)
        answer, sent = self._ask(asking, Ending.HAND_OVER, self._timeout * 10, since)
        if answer is None or not answer.granted:
            return None if answer is None else _refusal(answer)
        run_time = datetime.now(timezone.utc) - (answer.database_time - answer.window_start)
        return self._hold(answer, sent, wanted, run_time=run_time, dead_holder=wanted.dead_holder)

    def release(self, held: HeldLock, ending: Ending) -> ReleaseAnswer | None:
        """End a claim. See :meth:`TaskLocks.release`."""
        self._leases.remove(held)
        self._released_at = time.monotonic()
        reason = self._attempts.outage.reason
        if reason is not None and self._stop.is_over(RELEASE_LIMIT):
            # Many releases one after the other, each with a limit of its own, would keep the
            # process from ending.
            self.owed.add(held.name, held.claim_id, ending, seconds=held.seconds_left)
            raise TaskLockDatabaseError(reason)
        try:
            # Twice at least: an idle connection may have died while the job ran.
            return self._attempts.until(
                RELEASE_PATIENCE,
                lambda cursor: send_ending(
                    self._protocol, cursor, held.name, held.claim_id, ending
                ),
                limit=RELEASE_LIMIT,
            )
        except TaskLockError:
            # Also when it is refused, as while a role lacks a right, and beyond the end of a lease:
            # until somebody takes the run over, it can still be told that it ended.
            self.owed.add(held.name, held.claim_id, ending, seconds=held.seconds_left)
            raise

    def close(self) -> None:
        """Send what is owed, again for a little while if need be."""
        # From the stop on, or from when the last job ended that was waited for.
        self.owed.close(self._stop.over_at(self._released_at, SHUTDOWN_LIMIT))

    def _ask(
        self,
        asking: Asking | AskingToTakeOver,
        in_doubt: Ending,
        seconds: float,
        since: float | None,
    ) -> tuple[ClaimAnswer | None, float]:
        """Ask until there is an answer; see to it that a claim without one is ended.

        :param in_doubt: how a claim is ended that was sent, and never answered
        :param seconds: for how long that is worth sending
        """
        task_name = asking.wanted.task_name

        def statement(cursor: Any) -> tuple[ClaimAnswer | None, float]:
            # Otherwise the claim could be refused on account of this replica's own last run.
            self.owed.send_for(task_name, cursor)
            return asking.ask(cursor, stable=self._attempts.outage.stable)

        try:
            return self._attempts.until(self._timeout, statement, stop=self._stop, since=since)
        except BaseException:
            if asking.unsure:
                self.owed.add(task_name, asking.claim_id, in_doubt, seconds=seconds)
            raise

    def _hold(
        self,
        answer: ClaimAnswer,
        sent: float,
        wanted: WantedClaim | WantedTakeover,
        *,
        run_time: datetime | None,
        dead_holder: str | None = None,
    ) -> HeldLock:
        held = HeldLock(
            name=wanted.task_name,
            token=answer.token,
            claim_id=answer.claim_id,
            run_time=run_time,
            window_start=answer.window_start,
            locked_until=answer.locked_until,
            run_until=answer.run_until,
            ends_at=sent + (answer.run_until - answer.database_time).total_seconds(),
            lease=wanted.lease,
            dead_holder=dead_holder,
            extender=self._extend,
        )
        if held.lease is not None:
            try:
                self._leases.add(held)
            except BaseException:  # threads are limited, and the lease could not be renewed
                is_hold = isinstance(wanted, WantedClaim) and not wanted.runs
                ending = Ending.OPEN if is_hold else Ending.HAND_OVER
                self.owed.add(held.name, held.claim_id, ending, seconds=held.seconds_left)
                raise
        return held

    def _extend(self, held: HeldLock, by: float) -> bool:
        sent = time.monotonic()
        # On the renewals' own connection: the job may have the only one of its application's pool.
        times = self._once_beside_others(
            lambda cursor: self._protocol.extend(cursor, held.name, held.claim_id, by, held.lease),
            until=sent + 2 * self._timeout,
        )
        self._leases.rest()
        if times is None:
            return False
        _note(held, times, sent)
        return True

    def _renew(self, held: Sequence[HeldLock]) -> dict[UUID, bool]:
        """Renew claims with one statement; return which stand, and whether each was renewed."""

        def statement(cursor: Any) -> dict[UUID, LockTimes]:
            wait_at_most(cursor.connection, min(c.lease or inf for c in held) / RENEWALS_PER_LEASE)
            return self._protocol.renew(cursor, [_renewal(c) for c in held])

        sent = time.monotonic()
        lease = min(c.lease or inf for c in held)
        times = self._once_beside_others(statement, sent + max(1.0, lease / RENEWALS_PER_LEASE))
        for claim in held:
            if claim.claim_id in times:
                _note(claim, times[claim.claim_id], sent)
        return {claim_id: end.locked_until is not None for claim_id, end in times.items()}

    def _once_beside_others(self, statement: Callable[[Any], Result], until: float) -> Result:
        """Run a statement on the connection that claims and releases do not wait for."""
        try:
            return self._renewing.once(statement, until)
        except TaskLockDatabaseError as error:
            if not is_full(error.__cause__):
                raise
            # The server has no connection left, but this replica may.
            return self._attempts.once(statement, min(until, time.monotonic() + FALLBACK_LIMIT))


def _note(held: HeldLock, times: LockTimes, sent: float) -> None:
    """Note until when a claim stands."""
    ends_at = sent + (times.run_until - times.database_time).total_seconds()
    held.renewed(times.locked_until or held.locked_until, times.run_until, ends_at)


def _renewal(held: HeldLock) -> Renewal:
    assert held.lease is not None
    return Renewal(held.name, held.claim_id, held.lease)


def _refusal(answer: ClaimAnswer) -> Refusal:
    standing = answer.running or answer.waits
    return Refusal(
        holder=answer.holder,
        token=answer.token,
        locked_until=answer.locked_until,
        reason="running" if standing else "window",
        renewed=answer.running and answer.locked_until < answer.run_until,
        blocked=standing and answer.new_window,
        unfinished=answer.unfinished,
        waits=answer.waits,
        window_start=answer.window_start,
    )
