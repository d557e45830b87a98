"""Claims on a database that may be away: made, ended, and never left behind."""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

from apscheduler_tasklock.asking import Asking
from apscheduler_tasklock.attempts import Attempts
from apscheduler_tasklock.clock import DatabaseClock
from apscheduler_tasklock.context import HeldLock, Refusal
from apscheduler_tasklock.errors import TaskLockDatabaseError
from apscheduler_tasklock.protocol import ClaimAnswer, ReleaseAnswer, TaskLockProtocol
from apscheduler_tasklock.releases import OwedReleases

# Seconds for which a release is tried by the job's own worker, before it is left to the
# background.
RELEASE_PATIENCE = 0.2


class Claims:
    """Makes and ends the claims of one replica.

    :param attempts: runs the statements
    :param protocol: has them
    :param clock: the database's clock
    :param replica_id: who claims, for people
    :param timeout: seconds for which a claim is tried while the database is away
    :param stop: ends these attempts when it is set
    """

    def __init__(
        self,
        attempts: Attempts,
        protocol: TaskLockProtocol,
        clock: DatabaseClock,
        *,
        replica_id: str,
        timeout: float,
        stop: threading.Event,
    ) -> None:
        self._attempts = attempts
        self._protocol = protocol
        self._clock = clock
        self._replica_id = replica_id
        self._timeout = timeout
        self._stop = stop
        self._owed = OwedReleases(attempts, protocol)

    def claim(
        self,
        task_name: str,
        run_time: datetime | None,
        *,
        min_lock: float,
        max_lock: float,
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
            replica_id=self._replica_id,
        )
        answer, ends_at = self._ask(asking, keep_unanswered, since)
        if not answer.granted:
            return _refusal(answer)
        return HeldLock(
            name=task_name,
            token=answer.token,
            claim_id=asking.claim_id,
            run_time=run_time,
            locked_until=answer.locked_until,
            ends_at=ends_at,
            extender=self._extend,
        )

    def release(self, held: HeldLock, *, keep_window: bool) -> ReleaseAnswer | None:
        """End a claim. See :meth:`TaskLocks.release`."""
        try:
            # Twice at least: the idle connection may have died while the job ran.
            return self._attempts.until(
                RELEASE_PATIENCE,
                lambda cursor: self._protocol.release(
                    cursor, held.name, held.claim_id, keep_window=keep_window
                ),
            )
        except TaskLockDatabaseError:
            self._owed.add(
                held.name, held.claim_id, keep_window=keep_window, seconds=held.seconds_left
            )
            raise

    def close(self) -> None:
        """Try what is owed a last time."""
        self._owed.close()

    def _ask(
        self, asking: Asking, keep_unanswered: bool, since: float | None
    ) -> tuple[ClaimAnswer, float]:
        """Ask until there is an answer; see to it that a claim without one is released."""

        def statement(cursor: Any) -> tuple[ClaimAnswer, float]:
            # Otherwise the claim could be refused on account of this replica's own last run.
            self._owed.send_for(asking.task_name, cursor)
            return asking.ask(cursor)

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

    def _extend(self, held: HeldLock, by: float) -> datetime | None:
        return self._attempts.once(
            lambda cursor: self._protocol.extend(cursor, held.name, held.claim_id, by)
        )


def _refusal(answer: ClaimAnswer) -> Refusal:
    reason = "running" if answer.running else "window"
    blocked = answer.running and answer.new_window
    return Refusal(answer.holder, answer.token, answer.locked_until, reason, blocked)
