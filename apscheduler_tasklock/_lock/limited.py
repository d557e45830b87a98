"""Claims of which as many are granted as there are workers: one statement, one answer for each."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import psycopg

from apscheduler_tasklock._database.deadline import Deadline
from apscheduler_tasklock._database.errors import as_unavailable
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock._database.side import Ticket
from apscheduler_tasklock._lock.claim import BeyondLimitError, ClaimAttempt, Decision
from apscheduler_tasklock._lock.messages import Refusal
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.lock import HeldLock


class NotNow(enum.Enum):
    """Why a claim was neither granted nor refused, and can be asked for again."""

    LOCKED = "locked"  # somebody has locked its row, or there was no answer that could be used
    BEYOND = "beyond"  # as many were granted as there are workers


# What becomes of one of the claims. One that was refused or has failed is over: whoever wants the
# task all the same needs another claim.
Claimed: TypeAlias = HeldLock | Refusal | NotNow | TaskLockError
# Hears what became of each claim. It is called in the database's thread, once, and must not wait.
Tell: TypeAlias = Callable[[Sequence[tuple[ClaimAttempt, Claimed]]], object]


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


class LimitedTicket(Ticket[None]):
    """Limited claims on their way.

    :param conclude: makes of each claim's outcome what became of it
    :param tell: hears it
    :param ended: called when they are over, whatever happened
    """

    follows_releases = True

    def __init__(
        self,
        claims: LimitedClaims,
        deadline: Deadline,
        conclude: Callable[[ClaimAttempt, Outcome[Decision]], Claimed],
        tell: Tell,
        ended: Callable[[], object],
        **times: float,
    ) -> None:
        super().__init__(claims, deadline, **times)
        self._claims = claims
        self._conclude = conclude
        self._tell = tell
        self._ended = ended

    def stays(self, outcome: Outcome[None], now: float) -> bool:
        """Tell whether a part of them is still to be asked for."""
        if outcome.error is None:
            stays = not self._claims.is_over
        else:
            stays = self._claims.goes_on_after(outcome.error)
        if stays:
            self.not_before = now
        return stays

    def finish(self, outcome: Outcome[None]) -> None:
        """Tell what became of each."""
        try:
            decided = self._claims.outcomes(outcome)
            self._tell([(each, self._conclude(each, its)) for each, its in decided])
        finally:
            self._ended()
