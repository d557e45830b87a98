"""Claims of a queue: as many are granted as there are workers, and each has its own answer."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import psycopg

from apscheduler_tasklock._database.deadline import Deadline
from apscheduler_tasklock._database.errors import as_unavailable
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock._database.side import Ticket
from apscheduler_tasklock._lock.claim import (
    AnyAttempt,
    BeyondLimitError,
    ClaimAttempt,
    Decision,
    HandOutAttempt,
    ManualAttempt,
    TakeoverAttempt,
)
from apscheduler_tasklock._lock.messages import Refusal
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.lock import HeldLock

logger = logger_of(__name__)


class NotNow(enum.Enum):
    """Why a claim was neither granted nor refused, and can be asked for again."""

    LOCKED = "locked"  # somebody has locked its row, or there was no answer that could be used
    BEYOND = "beyond"  # as many were granted as there are workers


# What becomes of one of the claims; ``None``: there is nothing to claim any more. One that was
# refused or has failed is over: whoever wants the task all the same needs another claim.
Claimed: TypeAlias = HeldLock | Refusal | NotNow | TaskLockError | None
# Hears what became of each claim. It is called in the database's thread, once, and must not wait.
Tell: TypeAlias = Callable[[Sequence[tuple[AnyAttempt, Claimed]]], object]


class LimitedClaims(Request[None]):
    """Claims that are asked for together, and go alone. Sent again, no more are granted.

    If the database rejects them, they go in halves: one task's mistake is its own.

    :param attempts: in the order in which they are to be granted, each for another task
    :param most: how many are granted at most; ``None``: all of them
    """

    def __init__(self, attempts: Sequence[ClaimAttempt], most: int | None) -> None:
        self.attempts = attempts
        self._left = most
        self._parts = [list(attempts)]
        self._decided: dict[ClaimAttempt, Outcome[Decision]] = {}
        self._is_rejected = False

    @property
    def task_names(self) -> Sequence[str]:
        """The tasks that are claimed."""
        return [attempt.task_name for attempt in self.attempts]

    @property
    def is_over(self) -> bool:
        """Whether all were asked for."""
        return not self._parts

    def send(self, cursor: Any) -> None:
        """Ask for them, or for the next part of them."""
        self._is_rejected = False
        part = self._parts[0]
        for attempt, decided in zip(
            part, ClaimAttempt.send_together(cursor, part, self._left), strict=True
        ):
            self._note(attempt, decided)
        del self._parts[0]
        if self._left == 0:
            parts, self._parts = self._parts, []
            for attempt in (attempt for part in parts for attempt in part):
                self._note(attempt, BeyondLimitError())

    def _note(self, attempt: ClaimAttempt, decided: Decision | Exception) -> None:
        if isinstance(decided, Exception):
            self._decided[attempt] = Outcome(error=decided)
            return
        self._decided[attempt] = Outcome(decided)
        if self._left is not None and decided.answer is not None and decided.answer.granted:
            self._left -= 1

    def note_failure(self, error: BaseException) -> None:
        """Note which may have been granted all the same, and whether they were rejected."""
        for attempt in self._parts[0]:
            attempt.note_failure(error)
        is_of_statement = isinstance(error, (psycopg.Error, UnicodeError))
        self._is_rejected = is_of_statement and as_unavailable(error) is None

    def goes_on_after(self, error: Exception) -> bool:
        """Tell whether they go on after a failure, since they were rejected, and in parts."""
        is_rejected, self._is_rejected = self._is_rejected, False
        part = self._parts[0]
        if not is_rejected or len(self._parts) == len(part) == 1:
            return False
        if len(part) == 1:
            self._note(part[0], error)
            del self._parts[0]
        else:
            half = len(part) // 2
            self._parts[:1] = [part[:half], part[half:]]
        return True

    def outcomes(self, outcome: Outcome[None]) -> list[tuple[ClaimAttempt, Outcome[Decision]]]:
        """Return what became of each.

        :param outcome: of the last statement, which is that of all that were not decided
        """
        failed: Outcome[Decision] = Outcome(error=outcome.error)
        return [(each, self._decided.get(each, failed)) for each in self.attempts]


class _QueueTicket(Ticket[Any]):
    """Claims of a queue on their way.

    :param conclude: makes of each claim's outcome what became of it
    :param tell: hears it
    :param ended: called when they are over, whatever happened
    """

    follows_releases = True

    def __init__(
        self,
        request: Request[Any],
        deadline: Deadline,
        conclude: Callable[[AnyAttempt, Outcome[Decision]], Claimed],
        tell: Tell,
        ended: Callable[[], object],
        **times: float,
    ) -> None:
        super().__init__(request, deadline, **times)
        self._conclude = conclude
        self._tell = tell
        self._ended = ended

    def _outcomes(self, outcome: Outcome[Any]) -> Sequence[tuple[AnyAttempt, Outcome[Decision]]]:
        """Return what became of each."""
        raise NotImplementedError

    def finish(self, outcome: Outcome[Any]) -> None:
        """Tell what became of each. Whatever fails, each is told of."""
        try:
            self._tell([(each, self._claimed(each, its)) for each, its in self._outcomes(outcome)])
        finally:
            self._ended()

    def _claimed(self, attempt: AnyAttempt, outcome: Outcome[Decision]) -> Claimed:
        try:
            return self._conclude(attempt, outcome)
        except Exception as error:
            logger.exception("Task %r: what became of its claim is not known", attempt.task_name)
            failed = TaskLockError(f"what became of its claim is not known: {error!r}")
            failed.__cause__ = error
            return failed


class LimitedTicket(_QueueTicket):
    """Limited claims on their way; its request is :class:`LimitedClaims`."""

    def stays(self, outcome: Outcome[Any], now: float) -> bool:
        """Tell whether a part of them is still to be asked for."""
        claims = self.request
        assert isinstance(claims, LimitedClaims)
        error = outcome.error
        stays = not claims.is_over if error is None else claims.goes_on_after(error)
        if stays:
            self.not_before = now
        return stays

    def _outcomes(self, outcome: Outcome[Any]) -> Sequence[tuple[AnyAttempt, Outcome[Decision]]]:
        assert isinstance(self.request, LimitedClaims)
        return self.request.outcomes(outcome)


class LoneTicket(_QueueTicket):
    """A claim of another kind on its way, as of a dead run's window.

    It is not asked for again while its row is locked: the queue does that, and asks for others
    meanwhile.
    """

    locked_backoff = ()

    def _outcomes(self, outcome: Outcome[Any]) -> Sequence[tuple[AnyAttempt, Outcome[Decision]]]:
        assert isinstance(
            self.request, (ClaimAttempt, TakeoverAttempt, ManualAttempt, HandOutAttempt)
        )
        return [(self.request, outcome)]
