"""Claims on a database that may be away: made, ended, and never left behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from math import inf
from typing import Any
from uuid import UUID

from apscheduler_tasklock.asking import Asking
from apscheduler_tasklock.attempts import Attempts
from apscheduler_tasklock.clock import DatabaseClock
from apscheduler_tasklock.closing import Closing
from apscheduler_tasklock.connection import wait_at_most
from apscheduler_tasklock.context import HeldLock, Refusal
from apscheduler_tasklock.errors import TaskLockDatabaseError
from apscheduler_tasklock.leases import RENEWALS_PER_LEASE, Leases
from apscheduler_tasklock.messages import ClaimAnswer, DeadRun, ReleaseAnswer, Renewal
from apscheduler_tasklock.protocol import TaskLockProtocol
from apscheduler_tasklock.releases import OwedReleases

# Seconds for which a release is tried by the job's own worker, before it is left to the
# background.
RELEASE_PATIENCE = 0.2


class Claims:
    """Makes and ends the claims of one replica.

    :param attempts: runs the statements
    :param renewing: runs those that renew, which must not wait for the others
    :param protocol: has them
    :param clock: the database's clock
    :param replica_id: who claims, for people
    :param timeout: seconds for which a claim is tried while the database is away
    :param stop: ends these attempts when claiming is stopped
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
        self._owed = OwedReleases(attempts, protocol)
        self._leases = Leases(self._renew, rest=renewing.rest)

    def claim(
        self,
        task_name: str,
        run_time: datetime | None,
        *,
        min_lock: float,
        max_lock: float,
        failover: float | None,
        takes_over: bool,
        keep_unanswered: bool,
        since: float | None,
    ) -> HeldLock | Refusal:
        """Claim a task. See :meth:`TaskLocks.claim`."""
        asking = Asking(
            self._protocol,
            self._clock,
            task_name,
            None if run_time is None else run_time.timestamp(),
            min_lock=min_lock,
            max_lock=max_lock,
            lease=failover,
            replica_id=self._replica_id,
        )
        answer, ends_at = self._ask(asking, takes_over, keep_unanswered, since)
        if not answer.granted:
            return _refusal(answer)
        held = HeldLock(
            name=task_name,
            token=answer.token,
            claim_id=answer.claim_id,
            run_time=_dead_run_time(answer) if answer.new_window else run_time,
            window_start=answer.window_start,
            window_left=answer.new_window,
            locked_until=answer.locked_until,
            ends_at=ends_at,
            max_lock=max_lock,
            lease=asking.lease,
            dead_holder=answer.dead_holder,
            extender=self._extend,
        )
        if held.lease is not None:
            self._leases.add(held)
        return held

    def release(self, held: HeldLock, *, keep_window: bool) -> ReleaseAnswer | None:
        """End a claim. See :meth:`TaskLocks.release`."""
        self._leases.remove(held)
        try:
            # Twice at least: an idle connection may have died while the job ran.
            return self._attempts.until(
                RELEASE_PATIENCE,
                lambda cursor: self._protocol.release(
                    cursor, held.name, held.claim_id, keep_window=keep_window
                ),
            )
        except TaskLockDatabaseError:
            # Also beyond the end of a lease: until somebody takes the run over, it can still be
            # told that it ended.
            seconds = held.seconds_left if held.lease is None else held.max_lock
            self._owed.add(held.name, held.claim_id, keep_window=keep_window, seconds=seconds)
            raise

    def abandon(self, held: HeldLock) -> None:
        """Leave a claim that is lost as it is."""
        self._leases.remove(held)

    def close(self) -> None:
        """Send what is owed, again for a little while if need be."""
        self._owed.close()

    def _ask(
        self, asking: Asking, takes_over: bool, keep_unanswered: bool, since: float | None
    ) -> tuple[ClaimAnswer, float]:
        """Ask until there is an answer; see to it that a claim without one is released."""

        def statement(cursor: Any) -> tuple[ClaimAnswer, float]:
            # Otherwise the claim could be refused on account of this replica's own last run.
            self._owed.send_for(asking.task_name, cursor)
            dead_run: DeadRun = "forget"
            if takes_over:
                # After an outage, one that looks dead may have a release under way.
                dead_run = "take over" if self._attempts.settled else "leave"
            return asking.ask(cursor, dead_run=dead_run)

        try:
            return self._attempts.until(self._timeout, statement, stop=self._stop, since=since)
        except BaseException:
            if asking.unsure:
                self._owed.add(
                    asking.task_name,
                    asking.claim_id,
                    keep_window=keep_unanswered,
                    seconds=asking.max_lock,
                )
            raise

    def _extend(self, held: HeldLock, by: float) -> bool:
        if held.lease is not None:
            held.max_lock += by
            try:
                return self._renew([held], waits=True).get(held.claim_id, False)
            except BaseException:
                held.max_lock -= by  # asked again, it is to be extended once
                raise
        until = self._attempts.once(
            lambda cursor: self._protocol.extend(cursor, held.name, held.claim_id, by)
        )
        if until is None:
            return False
        held.renewed(until, time.monotonic() + held.seconds_left + by)
        return True

    def _renew(self, held: Sequence[HeldLock], *, waits: bool = False) -> dict[UUID, bool]:
        """Renew claims with one statement; return which stand, and whether each was renewed.

        :param waits: whether it waits for rows that somebody has locked, rather than passing over
        """

        def statement(cursor: Any) -> dict[UUID, tuple[datetime | None, datetime]]:
            wait_at_most(cursor.connection, min(c.lease or inf for c in held) / RENEWALS_PER_LEASE)
            return self._protocol.renew(cursor, [_renewal(c) for c in held], waits=waits)

        sent = time.monotonic()
        ends = self._renewing.once(statement)
        for claim in held:
            locked_until, now = ends.get(claim.claim_id, (None, None))
            if locked_until is not None and now is not None:
                claim.renewed(locked_until, sent + (locked_until - now).total_seconds())
        return {claim_id: until is not None for claim_id, (until, _) in ends.items()}


def _renewal(held: HeldLock) -> Renewal:
    assert held.lease is not None
    return Renewal(held.name, held.claim_id, held.lease, held.max_lock)


def _dead_run_time(answer: ClaimAnswer) -> datetime:
    """Return the run time of the window that was taken over, on this replica's clock."""
    return datetime.now(timezone.utc) - (answer.database_time - answer.window_start)


def _refusal(answer: ClaimAnswer) -> Refusal:
    reason = "running" if answer.running else "window"
    blocked = answer.running and answer.new_window
    return Refusal(
        answer.holder,
        answer.token,
        answer.locked_until,
        reason,
        blocked,
        answer.unfinished,
        answer.window_start,
        (answer.locked_until - answer.database_time).total_seconds(),
    )
