"""Claims of a queue. The number of free workers limits how many claims are granted."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import psycopg

from apscheduler_tasklock._database.deadline import Deadline
from apscheduler_tasklock._database.outage import as_unavailable
from apscheduler_tasklock._database.outbox import Ticket
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock._lock.claim_attempts import (
    AnyAttempt,
    ClaimAttempt,
    GrantLimitError,
    RerunClaimAttempt,
    StoredClaimAttempt,
    TimedAnswer,
)
from apscheduler_tasklock._lock.protocol_messages import Refusal
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.lock import HeldLock

logger = logger_of(__name__)


class NotNow(enum.Enum):
    """Why a claim was neither granted nor refused, and can be asked for again."""

    LOCKED = "locked"  # another session has the task's row locked
    UNANSWERED = "unanswered"  # no answer could be used, so that the claim may be granted
    BEYOND = "beyond"  # other claims have got all free workers


# The result of a claim; None: there is nothing to claim any more. A claim with a Refusal or an
# error is over. Only after a NotNow the same attempt can be sent again.
Claimed: TypeAlias = HeldLock | Refusal | NotNow | TaskLockError | None
# Called with the result of each claim, once, in the replica's thread. Must not wait.
Report: TypeAlias = Callable[[Sequence[tuple[AnyAttempt, Claimed]]], object]


# An attempt at one of several claims, of which a limited number is granted.
LimitedAttempt: TypeAlias = ClaimAttempt | StoredClaimAttempt


class LimitedClaims(Request[None]):
    """The request for several claims, of which a limited number is granted.

    The request has a statement of its own. All tries of the request together grant no more than the
    limit. If the database rejects the claims, they are sent again in halves, so that in the end one
    claim fails alone.

    :param attempts: the claims in the order in which they are to be granted, each for another task,
        and all of one kind
    :param most: limits how many claims are granted; ``None``: no limit
    """

    def __init__(self, attempts: Sequence[LimitedAttempt], most: int | None) -> None:
        self.attempts = attempts
        self.sender = attempts[0].sender
        self._send_together: Callable[..., list[Any]] = type(attempts[0]).send_together
        self._left = most
        self._parts = [list(attempts)]
        self._decided: dict[LimitedAttempt, Outcome[TimedAnswer]] = {}
        self._is_rejected = False

    @property
    def task_names(self) -> Sequence[str]:
        """The tasks that are claimed."""
        return [attempt.task_name for attempt in self.attempts]

    @property
    def is_over(self) -> bool:
        """Whether all claims have an answer."""
        return not self._parts

    def send(self, cursor: Any) -> None:
        """Send the next part of the claims. The first part has all claims."""
        self._is_rejected = False
        part = self._parts[0]
        decisions = self._send_together(cursor, part, self._left)
        for attempt, decided in zip(part, decisions, strict=True):
            self._note(attempt, decided)
        del self._parts[0]
        if self._left == 0:
            parts, self._parts = self._parts, []
            for attempt in (attempt for part in parts for attempt in part):
                self._note(attempt, GrantLimitError())

    def _note(self, attempt: LimitedAttempt, decided: TimedAnswer | Exception) -> None:
        if isinstance(decided, Exception):
            self._decided[attempt] = Outcome(error=decided)
            return
        self._decided[attempt] = Outcome(decided)
        if self._left is not None and decided.answer is not None and decided.answer.granted:
            self._left -= 1

    def note_failure(self, error: BaseException) -> None:
        """Note the error for the claims that were sent, and whether it is a rejection."""
        for attempt in self._parts[0]:
            attempt.note_failure(error)
        is_of_statement = isinstance(error, (psycopg.Error, UnicodeError))
        self._is_rejected = is_of_statement and as_unavailable(error) is None

    def goes_on_after(self, error: Exception) -> bool:
        """Return whether to send smaller parts, because the database rejected the claims."""
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

    def outcomes(self, outcome: Outcome[None]) -> list[tuple[LimitedAttempt, Outcome[TimedAnswer]]]:
        """Return the outcome of each claim.

        :param outcome: the outcome of the last statement, for the claims without a decision
        """
        failed: Outcome[TimedAnswer] = Outcome(error=outcome.error)
        return [(each, self._decided.get(each, failed)) for each in self.attempts]


class _QueueTicket(Ticket[Any]):
    """The ticket of a queue's claims.

    :param conclude: makes the result of a claim from its outcome
    :param report: called with the result of each claim
    """

    follows_releases = True

    def __init__(
        self,
        request: Request[Any],
        deadline: Deadline,
        conclude: Callable[[AnyAttempt, Outcome[TimedAnswer]], Claimed],
        report: Report,
        **times: float,
    ) -> None:
        super().__init__(request, deadline, **times)
        self._conclude = conclude
        self._report = report

    def _outcomes(self, outcome: Outcome[Any]) -> Sequence[tuple[AnyAttempt, Outcome[TimedAnswer]]]:
        """Return the outcome of each claim."""
        raise NotImplementedError

    def finish(self, outcome: Outcome[Any]) -> None:
        """Report the result of each claim, also if the result of another claim cannot be made."""
        outcomes = self._outcomes(outcome)
        self._report([(each, self._claimed(each, its)) for each, its in outcomes])

    def _claimed(self, attempt: AnyAttempt, outcome: Outcome[TimedAnswer]) -> Claimed:
        try:
            return self._conclude(attempt, outcome)
        except Exception as error:
            logger.exception("Task %r: the outcome of its claim is not known", attempt.task_name)
            failed = TaskLockError(f"the outcome of its claim is not known: {error!r}")
            failed.__cause__ = error
            return failed


class LimitedTicket(_QueueTicket):
    """The ticket of :class:`LimitedClaims`."""

    def stays(self, outcome: Outcome[Any], now: float) -> bool:
        """Return whether a part of the claims is still to be sent."""
        claims = self.request
        assert isinstance(claims, LimitedClaims)
        error = outcome.error
        stays = not claims.is_over if error is None else claims.goes_on_after(error)
        if stays:
            self.not_before = now
        return stays

    def _outcomes(self, outcome: Outcome[Any]) -> Sequence[tuple[AnyAttempt, Outcome[TimedAnswer]]]:
        assert isinstance(self.request, LimitedClaims)
        return self.request.outcomes(outcome)


class SingleClaimTicket(_QueueTicket):
    """The ticket of one claim that has a statement of its own, such as a takeover.

    The ticket is not sent again while the row is locked. Instead the queue begins the claim anew,
    so that it can send other claims meanwhile.
    """

    locked_backoff = ()

    def _outcomes(self, outcome: Outcome[Any]) -> Sequence[tuple[AnyAttempt, Outcome[TimedAnswer]]]:
        assert isinstance(self.request, (ClaimAttempt, RerunClaimAttempt, StoredClaimAttempt))
        return [(self.request, outcome)]
