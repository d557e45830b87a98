"""Attempts at claims: a claim is sent until its answer can be used.

A grant that cannot be used, for example because it came too late, is undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar
from uuid import UUID, uuid4

from apscheduler_tasklock._database.encoding import unstorable
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.sqlstates import (
    ConflictError,
    RowLockedError,
    is_rolled_back,
    row_locked_error,
)
from apscheduler_tasklock._lock.database_clock import DatabaseClock, later
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock._lock.protocol_messages import (
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Claims,
    ClaimTimes,
    ClosedDeadRun,
    LockProtocol,
    ReleaseRequest,
    Renewal,
    Renewals,
    RerunRequest,
    Reruns,
    StoredClaims,
)
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

# A request for a claim of any kind.
AnyRequest: TypeAlias = ClaimRequest | RerunRequest
Wanted = TypeVar("Wanted", bound=AnyRequest)

# Limits how often a claim is sent while its answers cannot be used, for example because the bound
# of the database's time was wrong. The first answer corrects the bound. But a clock may jump before
# each answer.
MOST_ANSWERS = 3

CLOCK_JUMPS = (
    "its clock, or this machine's, jumps back and forth, or each answer comes after the end of the "
    "lease that it grants"
)
TOO_LATE = "the answer came after the end of the lease that it grants"
# The seconds that a takeover may wait for its answer. While it waited for a standby to confirm it,
# the holder could not renew, so the holder may be alive.
LONGEST_TAKEOVER = 1.0
CAME_LATE = "the claim reached the database when nobody waited for it any more"


class GrantLimitError(ConflictError):
    """The claim was not granted, because other claims had reached the limit of grants before."""

    def __init__(self) -> None:
        super().__init__("as many claims were granted as there are workers")


@dataclass(frozen=True)
class ClaimContext:
    """The protocol, clock, outage and timeout that all claims of a replica share.

    :ivar claim_timeout: limits how long a claim's answer is waited for, in seconds
    """

    protocol: LockProtocol
    clock: DatabaseClock
    outage: Outage
    claim_timeout: float

    def read_times(self, sent: float, lag: float = 0.0) -> ClaimTimes:
        """Return the times on which the database decides a claim that is sent now.

        :param sent: now, on the monotonic clock
        :param lag: how late the claim is, in seconds
        """
        latest = self.clock.latest(sent)
        not_after = None if latest is None else later(latest, self.claim_timeout)
        return ClaimTimes(lag, latest, self.outage.stable, not_after)

    def learn(self, answers: Iterable[ClaimAnswer], sent: float, bound: datetime | None) -> bool:
        """Learn the database's time from one statement's answers; return whether the bound held.

        :param sent: when the statement was sent, on the monotonic clock
        :param bound: the latest time that the database's clock could have had at that moment
        """
        for answer in answers:  # the first answer is enough, because all have the same time
            return self.clock.learn(
                sent=sent,
                answered=time.monotonic(),
                database_time=answer.database_time,
                bound=bound,
            )
        return True

    def confirmed(
        self, cursor: Any, doubted: Sequence[Attempt[Any]], answers: dict[UUID, ClaimAnswer]
    ) -> dict[UUID, ClaimAnswer]:
        """Return the answers to claims after the grants in doubt were written once more.

        An earlier try of such a claim may have been committed by this server alone, so that a
        failover to a standby would lose it. That this try finds the grant proves nothing. A standby
        confirms commits in their order, so a later write that is confirmed proves the grant. It
        also begins the lease anew.

        :param doubted: the attempts that were in doubt before this try
        :return: the answers, without the grants that could not be written now
        """
        granted = {claim_id for claim_id, answer in answers.items() if answer.granted}
        written = [each.request for each in doubted if each.request.claim_id in granted]
        if not written:
            return answers
        renewals = [Renewal(each.task_name, each.claim_id, each.lease) for each in written]
        times = self.protocol.execute(cursor, Renewals(renewals))
        confirmed = dict(answers)
        for each in written:
            answer, end = confirmed.pop(each.claim_id), times.get(each.claim_id)
            if end is not None and end.locked_until is not None:
                confirmed[each.claim_id] = answer._replace(
                    locked_until=end.locked_until,
                    run_until=end.run_until,
                    database_time=end.database_time,
                )
        return confirmed


@dataclass(frozen=True)
class TimedAnswer:
    """The decision on a claim: its answer, and when the claim was sent.

    :ivar answer: the task's row after the claim; ``None`` if there was nothing to claim
    :ivar sent: when the claim was sent, on the monotonic clock
    """

    answer: ClaimAnswer | None
    sent: float


class Attempt(Generic[Wanted]):
    """A claim of any kind, which is sent until its answer can be used.

    One attempt may live through several requests to the database, because a queue asks again.

    :ivar kind: claims of one kind can be sent in one statement
    :ivar sender: what all claims of a user share; one statement has claims of one user only
    :ivar request: the request; it gets another claim id if a grant could not be used
    :ivar in_doubt: whether the database may have granted the claim although no answer came
    :ivar wanted_at: since when the claim has been wanted, on the monotonic clock; ``None``: the
        claim is not wanted now, for example because no worker is free
    :ivar report_closed: called in the replica's thread with the dead run that the claim has
        closed. Must not wait.
    """

    kind: type[Any] | str
    # Sends several claims of this kind; returns a decision or an error for each.
    send_together: ClassVar[Callable[..., list[TimedAnswer | TaskLockError]]]
    # Whether the claim needs a statement of its own now.
    goes_alone = False

    def __init__(self, request: Wanted, context: ClaimContext) -> None:
        self.task_name = request.task_name
        self.request = request
        self.in_doubt = False
        self.wanted_at: float | None = None
        self.report_closed: Callable[[ClosedDeadRun], object] = lambda _closed: None
        self.sender = self._context = context
        self.kind = type(self)

    def note_failure(self, error: BaseException) -> None:
        """Note whether the claim may have been granted although its statement failed."""
        self.in_doubt = self.in_doubt or not is_rolled_back(error)

    def send(self, cursor: Any) -> TimedAnswer | TaskLockError:
        """Send this claim alone."""
        [decided] = self.send_together(cursor, [self])
        return decided

    @staticmethod
    def _all_confirmed(
        cursor: Any, attempts: Sequence[Attempt[Any]], answers: dict[UUID, ClaimAnswer]
    ) -> dict[UUID, ClaimAnswer]:
        """Return the answers to claims that were sent together.

        A grant that is in doubt and cannot be written now has no answer.
        """
        report_closed_runs(attempts, answers)
        doubted = [each for each in attempts if each.in_doubt]
        if not doubted:
            return answers
        for each in attempts:
            # If the next statement fails, nobody gets the answer to a grant of this one.
            answer = answers.get(each.request.claim_id)
            each.in_doubt = each.in_doubt or (answer is not None and answer.granted)
        return attempts[0]._context.confirmed(cursor, doubted, answers)


class ClaimAttempt(Attempt[ClaimRequest]):
    """A claim of a run time. One statement can have several claims of run times."""

    def __init__(self, request: ClaimRequest, context: ClaimContext) -> None:
        super().__init__(request, context)
        run_time = request.run_time
        # By the replica's own clock, as run times are.
        self._due = time.time() if run_time is None else run_time.timestamp()
        # What becomes of the window of a grant that is to be undone; None: there is no such grant.
        self._to_undo: WindowAfter | None = None

    @property
    def goes_alone(self) -> bool:  # type: ignore[override]  # fixed in the base
        """Whether an earlier grant has to be undone first, on the same cursor."""
        return self._to_undo is not None

    def send(self, cursor: Any) -> TimedAnswer | TaskLockError:
        """Send the claim, and send it again if its answer cannot be used.

        :return: the decision; or an error if the task's name cannot be stored, in which case
            nothing was sent, or if a grant in doubt cannot be written now
        :raises TaskLockDatabaseError: the clocks jump from one answer to the next, or answers take
            longer than the lease that they grant
        """
        context = self._context
        if problem := unstorable(cursor.connection, self.task_name):
            return problem
        for _ in range(MOST_ANSWERS):
            self._undo(cursor)
            # Read both clocks right before the statement, so that the claim is decided on fresh
            # times.
            sent, lag = time.monotonic(), self._lag()
            times = context.read_times(sent, lag)
            answer = context.protocol.execute(cursor, Claim(self.request, times))
            if answer.closed is not None:
                self.report_closed(ClosedDeadRun(**answer.closed))
            if self.in_doubt:
                answers = context.confirmed(cursor, [self], {self.request.claim_id: answer})
                if not answers:
                    return row_locked_error()
                [answer] = answers.values()
            is_bound = context.learn([answer], sent, times.latest)
            if self._is_usable(answer, sent, is_bound=is_bound):
                if error := self._why_again(answer, times):
                    raise error
                return TimedAnswer(answer, sent)
        raise TaskLockDatabaseError(CLOCK_JUMPS)

    @classmethod
    def send_together(
        cls, cursor: Any, attempts: Sequence[ClaimAttempt], most: int | None = None
    ) -> list[TimedAnswer | TaskLockError]:
        """Send several claims in one statement. A second statement claims the tasks without a row.

        Each of the two statements is a transaction of its own. A claim whose task's name cannot be
        stored is not sent.

        :param most: limits how many claims are granted, in the order of ``attempts``; each claim
            beyond the limit gets a :class:`GrantLimitError`
        """
        problems = [unstorable(cursor.connection, each.task_name) for each in attempts]
        stored = [each for each, problem in zip(attempts, problems, strict=True) if not problem]
        decided = iter(cls._send_stored(cursor, stored, most) if stored else ())
        return [problem or next(decided) for problem in problems]

    @classmethod
    def _send_stored(
        cls, cursor: Any, attempts: Sequence[ClaimAttempt], most: int | None
    ) -> list[TimedAnswer | TaskLockDatabaseError]:
        context = attempts[0]._context
        for attempt in attempts:
            attempt._undo(cursor)
        doubted = [each for each in attempts if each.in_doubt]
        sent, lags = time.monotonic(), [attempt._lag() for attempt in attempts]
        times = context.read_times(sent)
        asked = [attempt.request for attempt in attempts]
        protocol = context.protocol
        answers = protocol.execute(cursor, Claims(asked, lags, times, most))
        report_closed_runs(attempts, answers)
        found = [answers.get(each.claim_id) for each in asked]
        new = [n for n, answer in enumerate(found) if answer is None]
        # At least 0, because an earlier try with a higher limit may have granted more than `most`.
        left = None if most is None else max(0, most - _granted(answers))
        if doubted or (new and left != 0):
            for attempt, answer in zip(attempts, found, strict=True):
                # If the next statement fails, nobody gets the answers to these grants, so note that
                # they are in doubt.
                attempt.in_doubt = attempt.in_doubt or (answer is not None and answer.granted)
        if new and left != 0:
            those, their_lags = [asked[n] for n in new], [lags[n] for n in new]
            first = Claims(those, their_lags, times, left, are_first=True)
            answers_to_first = protocol.execute(cursor, first)
            answers |= answers_to_first
        answers = context.confirmed(cursor, doubted, answers)
        is_bound = context.learn(answers.values(), sent, times.latest)
        is_limited = most is not None and _granted(answers) >= most
        decided = (
            attempt._decided(answers.get(attempt.request.claim_id), sent, times, is_bound=is_bound)
            for attempt in attempts
        )
        # If the limit is reached, no worker is free any more. A claim whose row is locked then
        # gets the same error as a claim beyond the limit, so that the claim is sent again only
        # when a worker is free.
        return [
            GrantLimitError() if is_limited and isinstance(each, RowLockedError) else each
            for each in decided
        ]

    def _lag(self) -> float:
        return max(0.0, time.time() - self._due)

    def _decided(
        self, answer: ClaimAnswer | None, sent: float, times: ClaimTimes, *, is_bound: bool
    ) -> TimedAnswer | TaskLockDatabaseError:
        if answer is None:
            return row_locked_error()
        if error := self._why_again(answer, times):
            return error
        if not self._is_usable(answer, sent, is_bound=is_bound):
            return ConflictError(CLOCK_JUMPS)
        return TimedAnswer(answer, sent)

    def _why_again(self, answer: ClaimAnswer, times: ClaimTimes) -> ConflictError | None:
        """Return the error of a claim that was not granted although the row looks free.

        After this error the claim is sent again. ``None`` if the claim was granted or refused. See
        :attr:`ClaimAnswer.looks_free`.
        """
        if not answer.looks_free or answer.claim_id == self.request.claim_id:
            return None
        if answer.stays_refused(self.request, times):
            return ConflictError(CAME_LATE)
        return row_locked_error()

    def _is_usable(self, answer: ClaimAnswer, sent: float, *, is_bound: bool) -> bool:
        """Return whether an answer can be used; if not, note that its grant is to be undone.

        If the bound was wrong, the granted window is the wrong one, and is opened again. If the
        lease was over when the answer came, a job's window is handed over, so that it is run also
        if this grant has blocked all other replicas' claims. A hold's window is opened again.
        """
        if is_bound and not (answer.granted and is_lease_over(answer, sent)):
            return True
        if answer.granted:
            right_window = is_bound and bool(self.request.runs)
            self._to_undo = WindowAfter.HAND_OVER if right_window else WindowAfter.OPEN
            self.in_doubt = True
        return False

    def _undo(self, cursor: Any) -> None:
        """Undo a grant that cannot be used. The next try has a new claim id."""
        if self._to_undo is not None:
            end = RunOutcome(self._to_undo)
            granted = ReleaseRequest(self.task_name, self.request.claim_id, end)
            self._context.protocol.execute(cursor, granted)
            self.request = replace(self.request, claim_id=uuid4())
            self._to_undo, self.in_doubt = None, False


class RerunClaimAttempt(Attempt[RerunRequest]):
    """A claim of a takeover, a retry or a manual run. One statement can have several of a kind.

    A grant that came too late is sent again, so that its lease begins anew. If that fails, it ends
    as any claim in doubt.
    """

    def __init__(self, request: RerunRequest, context: ClaimContext) -> None:
        super().__init__(request, context)
        self.kind = request.kind

    @classmethod
    def send_together(
        cls, cursor: Any, attempts: Sequence[RerunClaimAttempt]
    ) -> list[TimedAnswer | TaskLockError]:
        """Send several claims in one statement; the answer is ``None`` if a row is gone."""
        context, sent = attempts[0]._context, time.monotonic()
        times = context.read_times(sent)
        asked = [each.request for each in attempts]
        answers = context.protocol.execute(cursor, Reruns(asked, times))
        answers = cls._all_confirmed(cursor, attempts, answers)
        context.learn(answers.values(), sent, times.latest)
        return [each._decided(answers.get(each.request.claim_id), sent, times) for each in attempts]

    def _decided(
        self, answer: ClaimAnswer | None, sent: float, times: ClaimTimes
    ) -> TimedAnswer | TaskLockError:
        if answer is None:
            return row_locked_error() if self.in_doubt else TimedAnswer(None, sent)
        if not answer.granted:
            if not answer.looks_free:
                return TimedAnswer(answer, sent)
            is_in_time = answer.is_in_time(times.not_after)
            return row_locked_error() if is_in_time else ConflictError(CAME_LATE)
        if is_lease_over(answer, sent):
            self.in_doubt = True
            return ConflictError(TOO_LATE)
        is_late = time.monotonic() > sent + LONGEST_TAKEOVER
        if is_late and self.request.kind == "takeover" and not self.request.handed_over:
            # It ends as refused, and is handed over, since it is in doubt.
            self.in_doubt = True
            self._context.outage.doubt()
            return TimedAnswer(answer._replace(granted=False), sent)
        return TimedAnswer(answer, sent)


class StoredClaimAttempt(Attempt[ClaimRequest]):
    """A claim of a stored job's run time, which also moves the job to its next run time.

    One statement can have several of these claims. A grant that came too late is asked for again
    under its id, because the job has moved on, so that no other claim would run this run time. If
    no answer is in time, the run time is handed over.
    """

    @classmethod
    def send_together(
        cls, cursor: Any, attempts: Sequence[StoredClaimAttempt], most: int | None = None
    ) -> list[TimedAnswer | TaskLockError]:
        """Send several claims in one statement.

        A claim whose task's name cannot be stored is not sent.

        :param most: limits how many claims are granted, in the order of ``attempts``; each claim
            beyond the limit gets a :class:`GrantLimitError`
        """
        problems = [unstorable(cursor.connection, each.task_name) for each in attempts]
        asked = [each.request for each, no in zip(attempts, problems, strict=True) if not no]
        if not asked:
            return [problem for problem in problems if problem]
        most = len(asked) if most is None else most
        context, sent = attempts[0]._context, time.monotonic()
        times = context.read_times(sent)
        answers = context.protocol.execute(cursor, StoredClaims(asked, times, most))
        answers = cls._all_confirmed(cursor, attempts, answers)
        context.learn(answers.values(), sent, times.latest)
        is_limited = _granted(answers) >= most
        return [
            problem or each._decided(answers.get(each.request.claim_id), sent, times, is_limited)
            for each, problem in zip(attempts, problems, strict=True)
        ]

    def _decided(
        self, answer: ClaimAnswer | None, sent: float, times: ClaimTimes, is_limited: bool
    ) -> TimedAnswer | TaskLockDatabaseError:
        if answer is None:
            return row_locked_error()
        if answer.granted and is_lease_over(answer, sent):
            self.in_doubt = True
            return TaskLockDatabaseError(TOO_LATE)
        if not answer.looks_free:
            return TimedAnswer(answer, sent)
        if not answer.is_in_time(times.not_after):
            return ConflictError(CAME_LATE)
        return GrantLimitError() if is_limited else row_locked_error()


# An attempt at a claim of any kind.
AnyAttempt: TypeAlias = ClaimAttempt | RerunClaimAttempt | StoredClaimAttempt


def report_closed_runs(
    attempts: Sequence[Attempt[Any]], answers: Mapping[UUID, ClaimAnswer]
) -> None:
    """Report the dead runs that claims have closed, whatever becomes of these claims."""
    for attempt in attempts:
        answer = answers.get(attempt.request.claim_id)
        if answer is not None and answer.closed is not None:
            attempt.report_closed(ClosedDeadRun(**answer.closed))


def _granted(answers: Mapping[UUID, ClaimAnswer]) -> int:
    return sum(answer.granted for answer in answers.values())


def is_lease_over(answer: ClaimAnswer, sent: float) -> bool:
    """Return whether the granted lease has ended by now."""
    lasts = (answer.locked_until - answer.database_time).total_seconds()
    return time.monotonic() > sent + lasts
