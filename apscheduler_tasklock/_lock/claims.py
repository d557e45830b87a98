"""The requests of claims: of a claim that somebody waits for, and of the claims of a queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import psycopg

from apscheduler_tasklock._database.awaited_request import AwaitedRequest
from apscheduler_tasklock._database.outage import as_unavailable
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock._lock.claim_attempts import (
    AnyAttempt,
    AnyRequest,
    Attempt,
    GrantLimitError,
    StoredClaimAttempt,
    TimedAnswer,
)
from apscheduler_tasklock._lock.outcomes import ClaimOutcome
from apscheduler_tasklock._lock.protocol_messages import Refusal
from apscheduler_tasklock._shutdown import Closing
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.lock import HeldLock

logger = logger_of(__name__)


# The result of a claim; None: there is nothing to claim any more. A claim with a Refusal or an
# error is over. Only after a ClaimOutcome, which is then LOCKED, UNANSWERED or BEYOND, the same
# attempt can be sent again.
Claimed: TypeAlias = HeldLock | Refusal | ClaimOutcome | TaskLockError | None
# Called with the result of each claim, once, in the replica's thread. Must not wait.
Report: TypeAlias = Callable[[Sequence[tuple[AnyAttempt, Claimed]]], object]


class AwaitedClaim(AwaitedRequest[TimedAnswer, "HeldLock | Refusal | None"]):
    """The request of one claim that a thread or a coroutine waits for.

    :param conclude: makes the result of a claim from its outcome, or raises. It gets the attempt,
        and when the claim began.
    :param hand_over: releases a granted claim that nobody waits for
    """

    follows_releases = True

    def __init__(
        self,
        attempt: AnyAttempt,
        closing: Closing,
        conclude: Callable[[AnyAttempt, float, Outcome[TimedAnswer]], HeldLock | Refusal | None],
        hand_over: Callable[[AnyRequest, HeldLock | Refusal | None], object],
        **times: float,
    ) -> None:
        super().__init__(closing, **times)
        self.attempt = attempt
        self.kind, self.sender, self.task_name = attempt.kind, attempt.sender, attempt.task_name
        self._make_result = conclude
        self._hand_over = hand_over

    @property
    def goes_alone(self) -> bool:
        """Whether the claim needs a statement of its own now."""
        return self.attempt.goes_alone

    def send(self, cursor: Any) -> TimedAnswer | TaskLockError:
        """Send this claim alone."""
        return self.attempt.send(cursor)

    @classmethod
    def send_together(
        cls, cursor: Any, requests: Sequence[AwaitedClaim]
    ) -> Sequence[TimedAnswer | TaskLockError]:
        """Send several claims of one kind."""
        attempts: Sequence[Attempt[Any]] = [each.attempt for each in requests]
        return attempts[0].send_together(cursor, attempts)

    def note_failure(self, error: BaseException) -> None:
        """Note whether the claim may have been granted although its statement failed."""
        self.attempt.note_failure(error)

    def conclude(self, outcome: Outcome[TimedAnswer]) -> HeldLock | Refusal | None:
        """Make the result of the claim."""
        claimed = self._make_result(self.attempt, self.came, outcome)
        if isinstance(claimed, HeldLock) and self.loop is not None:
            claimed.runs_on(self.loop)
        return claimed

    def discard(self, result: HeldLock | Refusal | None) -> None:
        """Release a granted claim."""
        self._hand_over(self.attempt.request, result)


class QueueClaims(Request[None]):
    """The request of a queue's claims, of which a limited number is granted.

    The request has a statement of its own. All tries of the request together grant no more than the
    limit. If the database rejects the claims, they are sent again in halves, so that in the end one
    claim fails alone. The outbox does not send the request again while a row is locked. Instead the
    queue begins the claim anew, so that it can send other claims meanwhile.

    :param attempts: the claims in the order in which they are to be granted, each for another task,
        and all of one kind
    :param most: limits how many claims are granted; ``None``: no limit
    :param conclude: makes the result of a claim from its outcome, and from when it was sent last
    :param report: called with the result of each claim
    """

    follows_releases = True
    locked_backoff = ()

    def __init__(
        self,
        attempts: Sequence[AnyAttempt],
        most: int | None,
        closing: Closing,
        conclude: Callable[[AnyAttempt, Outcome[TimedAnswer], float], Claimed],
        report: Report,
        **times: float,
    ) -> None:
        super().__init__(closing, **times)
        self.sender = attempts[0].sender
        self._attempts = attempts
        # A lone claim has a cheaper statement of its own, except that of a stored job.
        self._is_lone = len(attempts) == 1 and not isinstance(attempts[0], StoredClaimAttempt)
        self._send_together: Callable[..., list[Any]] = type(attempts[0]).send_together
        self._left = most
        self._parts = [list(attempts)]
        self._decided: dict[AnyAttempt, Outcome[TimedAnswer]] = {}
        self._is_rejected = False
        self._conclude = conclude
        self._report = report

    @property
    def task_names(self) -> Sequence[str]:
        """The tasks that are claimed."""
        return [attempt.task_name for attempt in self._attempts]

    def send(self, cursor: Any) -> TaskLockError | None:
        """Send the next part of the claims. The first part has all claims.

        :return: the error of a lone claim
        """
        self._is_rejected = False
        part = self._parts[0]
        if self._is_lone:
            decisions = [part[0].send(cursor)]
            if isinstance(decisions[0], TaskLockError):
                return decisions[0]
        else:
            limit = () if self._left is None else (self._left,)
            decisions = self._send_together(cursor, part, *limit)
        for attempt, decided in zip(part, decisions, strict=True):
            self._note(attempt, decided)
        del self._parts[0]
        if self._left == 0:
            parts, self._parts = self._parts, []
            for attempt in (attempt for part in parts for attempt in part):
                self._note(attempt, GrantLimitError())
        return None

    def _note(self, attempt: AnyAttempt, decided: TimedAnswer | Exception) -> None:
        if isinstance(decided, Exception):
            self._decided[attempt] = Outcome(error=decided)
            return
        self._decided[attempt] = Outcome(decided)
        if self._left is not None and decided.answer is not None and decided.answer.granted:
            self._left -= 1

    def note_failure(self, error: BaseException) -> None:
        """Note the error for the claims that were sent, and whether it is a rejection."""
        if not self._parts:  # the thread has failed after the last answer, which counts
            return
        for attempt in self._parts[0]:
            attempt.note_failure(error)
        is_of_statement = isinstance(error, (psycopg.Error, UnicodeError))
        self._is_rejected = is_of_statement and as_unavailable(error) is None

    def stays(self, outcome: Outcome[Any], now: float) -> bool:
        """Return whether a part of the claims is still to be sent."""
        stays = bool(self._parts) if outcome.error is None else self._goes_on_after(outcome.error)
        if stays:
            self.not_before = now
        return stays

    def _goes_on_after(self, error: Exception) -> bool:
        """Return whether to send smaller parts, because the database rejected the claims."""
        is_rejected, self._is_rejected = self._is_rejected, False
        if not is_rejected or len(self._parts) == len(self._parts[0]) == 1:
            return False
        part = self._parts[0]
        if len(part) == 1:
            self._note(part[0], error)
            del self._parts[0]
        else:
            half = len(part) // 2
            self._parts[:1] = [part[:half], part[half:]]
        return True

    def finish(self, outcome: Outcome[Any]) -> None:
        """Report the result of each claim, also if the result of another claim cannot be made."""
        # The outcome of the last statement is that of the claims without a decision.
        decided = [(each, self._decided.get(each, outcome)) for each in self._attempts]
        self._report([(each, self._claimed(each, its)) for each, its in decided])

    def _claimed(self, attempt: AnyAttempt, outcome: Outcome[TimedAnswer]) -> Claimed:
        try:
            return self._conclude(attempt, outcome, self.sent_at)
        except Exception as error:
            logger.exception("Task %r: the outcome of its claim is not known", attempt.task_name)
            failed = TaskLockError(f"the outcome of its claim is not known: {error!r}")
            failed.__cause__ = error
            return failed
