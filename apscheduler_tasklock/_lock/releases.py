"""Releases of claims, which are sent until the database answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Any, TypeAlias

from apscheduler_tasklock._database.awaited_request import AwaitedRequest
from apscheduler_tasklock._database.requests import Outcome
from apscheduler_tasklock._database.sqlstates import is_rolled_back, row_locked_error
from apscheduler_tasklock._lock.protocol_messages import (
    EndLease,
    LockProtocol,
    ReleaseAnswer,
    ReleaseRequest,
    Releases,
)
from apscheduler_tasklock._lock.replica import Replica
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockSchemaError
from apscheduler_tasklock.lock import HeldLock

logger = logger_of(__name__)

# Limits the pause before a failed release is sent again at a shutdown, in seconds.
CLOSING_INTERVAL = 0.2

_NOTHING_FOUND: Outcome[ReleaseAnswer | None] = Outcome(None)


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


ArrivedLate: TypeAlias = Callable[[Released | None], object]


class Release(AwaitedRequest[ReleaseAnswer | None, Released | None]):
    """A release of a claim, which is sent before the next claim of its task.

    The answer is ``None`` if the claim no longer stood. The result is ``None`` if another claim
    stands in the row.

    The end of the maximum lock does not end the release of a run. Otherwise a run that ended well
    in an outage would count as dead for ever, and would be run again if the server's clock has gone
    back meanwhile. A locked row is no answer, because a session that waits for a synchronous
    standby may have the row locked for a whole outage.

    :param replica: says when a close abandons the release, has its waits, notes a rejection, and
        renews the lock until the release is on its way
    :param message: the claim, and its run's outcome; or the end of a dead run's lease, which always
        has a statement of its own
    :param run_until: when the maximum lock ends, on the monotonic clock. A release that the
        database rejects after that time is not sent again.
    :param held: the lock; ``None`` for a claim that was not granted, as far as is known
    :param stays_until: for a claim in doubt: the time at which the release is sent once more if it
        has found no claim. The claim may have been delayed on its way, and granted after the
        release.
    :param arrived_late: called with the result if the release has arrived after the future had got
        an error; ``None``: nobody wants to know
    :param answer_within: limits the wait for an answer, in seconds
    :ivar in_doubt: whether the claim may have been released although no answer came
    :ivar took: seconds from the run's grant to its end
    """

    is_release = True
    limit = 0.0  # because a close itself says when it abandons its releases

    def __init__(
        self,
        replica: Replica,
        protocol: LockProtocol,
        message: ReleaseRequest | EndLease,
        run_until: float,
        *,
        held: HeldLock | None = None,
        stays_until: float = -inf,
        answer_within: float = inf,
        arrived_late: ArrivedLate | None = None,
    ) -> None:
        self._timings = replica.settings.timings
        super().__init__(
            replica.releasing,
            patience=self._timings.release_timeout,
            came=time.monotonic(),
            tried_until=inf,
            answer_within=answer_within,
        )
        self.kind = Release if isinstance(message, ReleaseRequest) else None
        self.task_name = message.task_name
        self.sender = self._protocol = protocol
        self.message = message
        self._replica = replica
        self._held = held
        self._run_until = run_until
        self._stays_until = stays_until
        self._arrived_late = arrived_late
        self.took = 0.0

    def note_failure(self, error: BaseException) -> None:
        """Note whether the claim may have been released although the statement failed."""
        self.in_doubt = self.in_doubt or not is_rolled_back(error)

    def send(self, cursor: Any) -> ReleaseAnswer | None:
        """Release the claim."""
        return self._protocol.execute(cursor, self.message)

    @classmethod
    def send_together(
        cls, cursor: Any, requests: Sequence[Release]
    ) -> list[ReleaseAnswer | TaskLockDatabaseError | None]:
        """Release several claims in one statement."""
        asked = [each.message for each in requests if isinstance(each.message, ReleaseRequest)]
        answers = requests[0]._protocol.execute(cursor, Releases(asked))
        locked = row_locked_error()
        return [
            (answers[each.claim_id] or locked) if each.claim_id in answers else None
            for each in asked
        ]

    def taken(self) -> None:
        """Stop the renewals of a held lock."""
        if self._held is not None:
            self._replica.heartbeat.remove(self._held)

    def stays(self, outcome: Outcome[ReleaseAnswer | None], now: float) -> bool:
        """Return whether to send this release again, because the claim may be granted after it.

        The time when the release was sent decides, and not the time of its answer, because this
        process may have been paused before it got the answer.
        """
        is_last = self.closing.stopped or self.sent_at >= self._stays_until
        if is_last or outcome != _NOTHING_FOUND:
            return False
        self.not_before = max(now, self._stays_until)
        return True

    @property
    def backoff(self) -> Sequence[float]:  # type: ignore[override]  # not a constant here
        """The pauses while the database is unavailable, in seconds.

        The first two pauses together are shorter than the ``patience`` of the waiter.
        """
        if self.closing.stopped:
            return (CLOSING_INTERVAL,)
        return (0.05, 0.1, self._timings.release_interval)

    @property
    def rejected_backoff(self) -> Sequence[float]:  # type: ignore[override]  # not a constant here
        """The pause before a rejected release is sent again.

        None at a shutdown, and none if the rejection is the first answer after the maximum lock.
        """
        is_last = self.closing.stopped or self.sent_at >= self._run_until
        return () if is_last else (self._timings.rejected_interval,)

    def conclude(self, outcome: Outcome[ReleaseAnswer | None]) -> Released | None:
        """Make the result of the release."""
        answer = outcome.result()
        held = self._held
        if answer is None and self.in_doubt and held is not None and held.lease_left > 0:
            # An earlier try has released the claim, and another claim was granted since then.
            return Released(took=self.took)
        if answer is None or (answer.is_late and not self.in_doubt):
            return None
        return Released(answer.locked_until, answer.retry_at, self.took)

    def _dispose(self, result: Released | None) -> None:
        is_late = self.future.cancelled() or self.future.exception() is not None
        if self._arrived_late is not None and is_late:
            self._arrived_late(result)

    def finish(self, outcome: Outcome[ReleaseAnswer | None]) -> None:
        """Report the outcome, and log a release that has not arrived."""
        if outcome.error is not None:
            logger.warning(
                "The lock of task %r was not released, or the answer was lost: the lock stands "
                "until its lease or its maximum lock ends",
                self.task_name,
            )
            if isinstance(outcome.error, TaskLockSchemaError):
                self._replica.rejections.suspected = True
        super().finish(outcome)
        self._arrived_late = None  # so that a run and its release do not refer to each other
