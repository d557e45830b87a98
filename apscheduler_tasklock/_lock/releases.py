"""Releases: sent until they have arrived, or until the claim has ended by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from apscheduler_tasklock._database.asked import Asked
from apscheduler_tasklock._database.deadline import Deadline
from apscheduler_tasklock._database.errors import RowLockedError, is_rolled_back
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.messages import ReleaseAnswer, ReleaseRequest
from apscheduler_tasklock._lock.stand_in import LockProtocol
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError

logger = logger_of(__name__)

# Seconds after which a release that could not be sent is sent again at a shutdown.
CLOSING_INTERVAL = 0.2

_NOTHING_FOUND: Outcome[ReleaseAnswer | None] = Outcome(None)


class Release(Request[ReleaseAnswer | None]):
    """A claim that is to be ended. The answer is ``None`` if it no longer stood.

    :param request: the claim, and how it is to be ended
    :ivar in_doubt: whether it may have ended the claim without an answer having come
    """

    def __init__(self, protocol: LockProtocol, request: ReleaseRequest) -> None:
        self.kind = Release
        self.task_name = request.task_name
        self.request = request
        self.sender = self._protocol = protocol
        self.in_doubt = False

    def note_failure(self, error: BaseException) -> None:
        """Note whether it may have ended the claim all the same."""
        self.in_doubt = self.in_doubt or not is_rolled_back(error)

    def send(self, cursor: Any) -> ReleaseAnswer | None:
        """End the claim."""
        return self._protocol.release(cursor, self.request)

    @classmethod
    def send_together(
        cls, cursor: Any, requests: Sequence[Release]
    ) -> list[ReleaseAnswer | TaskLockDatabaseError | None]:
        """End several claims in one statement."""
        asked = [each.request for each in requests]
        answers = requests[0]._protocol.release_many(cursor, asked)
        locked = RowLockedError("another session has the task's row locked")
        return [
            (answers[each.claim_id] or locked) if each.claim_id in answers else None
            for each in asked
        ]


class LeaseEnd(Release):
    """The end of the lease of a run that is known to be dead. It travels alone.

    :param holder: who has claimed it
    """

    def __init__(self, protocol: LockProtocol, request: ReleaseRequest, holder: str) -> None:
        super().__init__(protocol, request)
        self.kind = None
        self._holder = holder

    def send(self, cursor: Any) -> ReleaseAnswer | None:
        """End the lease. The answer is ``None`` if the claim stood no more."""
        request = self.request
        return self._protocol.end_lease(cursor, request.task_name, request.claim_id, [self._holder])


def _nothing() -> None:
    pass


class ReleaseTicket(Asked[ReleaseAnswer | None, "ReleaseAnswer | None"]):
    """A release on its way, which goes before a later claim of its task.

    :param until: when it need not be sent any more, on the monotonic clock
    :param is_hurried: tells whether somebody waits for all that is pending, as at a shutdown
    :param on_taken: called when the database's thread has it
    :param stays_until: when it is sent once more if it finds nothing: a claim in doubt may be held
        up on its way, and granted after the release that is to end it
    """

    ends_with_claiming = False
    is_release = True

    def __init__(
        self,
        release: Release,
        deadline: Deadline,
        until: float,
        timings: Timings,
        is_hurried: Callable[[], bool],
        conclude: Callable[[Outcome[ReleaseAnswer | None]], ReleaseAnswer | None] | None = None,
        on_taken: Callable[[], object] = _nothing,
        *,
        stays_until: float = -inf,
        answer_within: float = inf,
    ) -> None:
        super().__init__(
            release,
            deadline,
            conclude or Outcome.result,
            patience=timings.release_timeout,
            came=time.monotonic(),
            tried_until=until,
            answer_within=answer_within,
        )
        self.release = release
        self._timings = timings
        self._is_hurried = is_hurried
        self._on_taken = on_taken
        self._stays_until = stays_until

    def taken(self) -> None:
        """Renew the claim no longer."""
        self._on_taken()

    def stays(self, outcome: Outcome[ReleaseAnswer | None], now: float) -> bool:
        """Tell whether the claim may still have been on its way to the database when this was sent.

        Not whether it is now: this process may have been stopped before it saw the answer.
        """
        is_last = self._is_hurried() or self.sent_at >= self._stays_until
        if is_last or outcome != _NOTHING_FOUND:
            return False
        self.not_before = max(now, self._stays_until)
        return True

    @property
    def backoff(self) -> Sequence[float]:  # type: ignore[override]  # a class's is fixed
        """The pauses while the database is unavailable: the first is within ``patience``."""
        if self._is_hurried():
            return (CLOSING_INTERVAL,)
        return (0.05, 0.1, self._timings.release_interval)

    @property
    def rejected_backoff(self) -> Sequence[float]:  # type: ignore[override]  # a class's is fixed
        """The pause after which it is sent again that was rejected; at a shutdown it is not."""
        return () if self._is_hurried() else (self._timings.rejected_interval,)

    def finish(self, outcome: Outcome[ReleaseAnswer | None]) -> None:
        """Tell whoever waits, or that it has not arrived."""
        if outcome.error is not None:
            if time.monotonic() >= self.tried_until - CLOSING_INTERVAL:
                logger.warning(
                    "The lock of task %r was not released before its maximum lock ended",
                    self.request.task_name,
                )
            else:
                logger.warning(
                    "The lock of task %r was not released, or no answer said so: it stands until "
                    "its lease ends, or its maximum lock",
                    self.request.task_name,
                )
        super().finish(outcome)
