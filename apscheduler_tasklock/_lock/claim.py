"""One claim on its way to the database: decided on clocks that can be trusted, and never lost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Generic, TypeAlias, TypeVar
from uuid import UUID, uuid4

from apscheduler_tasklock._database.encoding import unstorable
from apscheduler_tasklock._database.errors import ConflictError, RowLockedError, is_rolled_back
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.requests import Request
from apscheduler_tasklock._lock.clock import DatabaseClock, later
from apscheduler_tasklock._lock.messages import (
    ClaimAnswer,
    ClaimRequest,
    Ending,
    ManualRequest,
    ReadTimes,
    ReleaseRequest,
    RunEnd,
    TakeoverRequest,
)
from apscheduler_tasklock._lock.stand_in import LockProtocol
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

Asked = TypeVar("Asked", bound=ClaimRequest | TakeoverRequest | ManualRequest)
# What is claimed.
AnyRequest: TypeAlias = ClaimRequest | TakeoverRequest | ManualRequest

# How often one is asked for whose answer cannot be used, as on a clock bound that turns out to be
# broken. The first answer mends the bound; a clock that jumps each time is beyond help.
MOST_ANSWERS = 3

CLOCK_JUMPS = (
    "its clock, or this machine's, jumps back and forth, or it answers too late for a lease"
)
TOO_LATE = "it answers too late for a lease"
CAME_LATE = "the claim came when nobody waited for it any more"


class BeyondLimitError(ConflictError):
    """As many claims were granted as were to be, before this one."""

    def __init__(self) -> None:
        super().__init__("as many claims were granted as there are workers")


@dataclass(frozen=True)
class ClaimContext:
    """What all claims of a replica are made with.

    :ivar claim_timeout: seconds for which somebody waits for a claim's answer, at most
    """

    protocol: LockProtocol
    clock: DatabaseClock
    outage: Outage
    claim_timeout: float

    def read_times(self, sent: float, lag: float = 0.0) -> ReadTimes:
        """Return what a claim that is sent now is decided on.

        :param sent: now, on the monotonic clock
        """
        latest = self.clock.latest(sent)
        not_after = None if latest is None else later(latest, self.claim_timeout)
        return ReadTimes(lag, latest, self.outage.stable, not_after)

    def learn(self, answers: Iterable[ClaimAnswer], sent: float, bound: datetime | None) -> bool:
        """Learn the time from answers that came together; tell whether the bound was right.

        :param sent: when they were asked for, on the monotonic clock
        :param bound: the latest time that the database's clock could have had then
        """
        for answer in answers:  # all of them later than `sent`
            return self.clock.learn(
                sent=sent,
                answered=time.monotonic(),
                database_time=answer.database_time,
                bound=bound,
            )
        return True


@dataclass(frozen=True)
class Decision:
    """What became of a claim.

    :ivar answer: the task's row after it; ``None`` if a run that is to be taken over has none
    :ivar sent: when it was asked for, on the monotonic clock
    """

    answer: ClaimAnswer | None
    sent: float


class _Attempt(Request[Decision], Generic[Asked]):
    """A claim or a takeover, asked for until it is answered.

    :ivar request: what is asked for; it gets another id if a grant could not be used
    :ivar in_doubt: whether the database may have granted it without an answer having come
    :ivar wanted_at: since when it has been asked for, on the monotonic clock; ``None``: it is not
        asked for now, as while no worker is free
    """

    def __init__(self, request: Asked, context: ClaimContext) -> None:
        self.task_name = request.task_name
        self.request = request
        self.in_doubt = False
        self.wanted_at: float | None = None
        self.sender = self._context = context

    def note_failure(self, error: BaseException) -> None:
        """Note whether it may have been granted all the same."""
        self.in_doubt = self.in_doubt or not is_rolled_back(error)


class ClaimAttempt(_Attempt[ClaimRequest]):
    """A claim, asked for until it is answered. Claims travel together."""

    def __init__(self, request: ClaimRequest, context: ClaimContext) -> None:
        super().__init__(request, context)
        self.kind = ClaimAttempt
        run_time = request.run_time
        self._due = _local_time() if run_time is None else run_time.timestamp()
        self._to_take_back: Ending | None = None

    @property
    def goes_alone(self) -> bool:
        """Whether something has to be sent for the task first, on the same cursor."""
        return self._to_take_back is not None

    def send(self, cursor: Any) -> Decision | TaskLockError:
        """Ask, again if the answer cannot be used. A name that cannot be stored is not asked for.

        :raises TaskLockDatabaseError: the clocks jump from one answer to the next, or answers take
            longer than the lease that they grant
        """
        context = self._context
        if problem := unstorable(cursor.connection, self.task_name):
            return problem
        for _ in range(MOST_ANSWERS):
            self._take_back(cursor)
            # Both clocks are read as late as can be, on a connection that stands.
            sent, lag = time.monotonic(), self._lag()
            times = context.read_times(sent, lag)
            answer = context.protocol.claim(cursor, self.request, times)
            is_bound = context.learn([answer], sent, times.latest)
            if self._is_usable(answer, sent, is_bound=is_bound):
                if error := self._why_again(answer, times):
                    raise error
                return Decision(answer, sent)
        raise TaskLockDatabaseError(CLOCK_JUMPS)

    @classmethod
    def send_together(
        cls, cursor: Any, requests: Sequence[ClaimAttempt], most: int | None = None
    ) -> list[Decision | TaskLockError]:
        """Ask for several claims in one statement; those of tasks without a row in a second one.

        Each is committed by itself. One whose name cannot be stored is not asked for.

        :param most: how many are granted at most, those that are asked for first; the others are
            told by a :class:`BeyondLimitError`
        """
        problems = [unstorable(cursor.connection, each.task_name) for each in requests]
        stored = [each for each, problem in zip(requests, problems, strict=True) if not problem]
        decided = iter(cls._send_stored(cursor, stored, most) if stored else ())
        return [problem or next(decided) for problem in problems]

    @classmethod
    def _send_stored(
        cls, cursor: Any, requests: Sequence[ClaimAttempt], most: int | None
    ) -> list[Decision | TaskLockDatabaseError]:
        context = requests[0]._context
        for attempt in requests:
            attempt._take_back(cursor)
        sent, lags = time.monotonic(), [attempt._lag() for attempt in requests]
        times = context.read_times(sent)
        asked = [attempt.request for attempt in requests]
        protocol = context.protocol
        answers = protocol.claim_many(cursor, asked, lags, times, most)
        found = [answers.get(each.claim_id) for each in asked]
        new = [n for n, answer in enumerate(found) if answer is None]
        # More may have been granted when they were sent before, to more workers.
        left = None if most is None else max(0, most - _granted(answers))
        if new and left != 0:
            for attempt, answer in zip(requests, found, strict=True):
                # What is granted so far stands, whatever becomes of the next statement.
                attempt.in_doubt = attempt.in_doubt or (answer is not None and answer.granted)
            those, their_lags = [asked[n] for n in new], [lags[n] for n in new]
            answers |= protocol.first_claim_many(cursor, those, their_lags, times, left)
        is_bound = context.learn(answers.values(), sent, times.latest)
        is_limited = most is not None and _granted(answers) >= most
        decided = (
            attempt._decided(answers.get(attempt.request.claim_id), sent, times, is_bound=is_bound)
            for attempt in requests
        )
        # A row that is locked is asked for again by those who have a worker for it.
        return [
            BeyondLimitError() if is_limited and isinstance(each, RowLockedError) else each
            for each in decided
        ]

    @classmethod
    def find_taken(cls, cursor: Any, requests: Sequence[ClaimAttempt]) -> dict[UUID, Decision]:
        """Tell which claims would be refused, since their windows are taken, without sending them.

        :return: what would become of them, by their ids
        """
        context = requests[0]._context
        sent, lags = time.monotonic(), [attempt._lag() for attempt in requests]
        times = context.read_times(sent)
        asked = [attempt.request for attempt in requests]
        answers = context.protocol.find_taken(cursor, asked, lags, times)
        is_bound = context.learn(answers.values(), sent, times.latest)
        if not is_bound:
            return {}
        return {claim_id: Decision(answer, sent) for claim_id, answer in answers.items()}

    def _lag(self) -> float:
        return max(0.0, _local_time() - self._due)

    def _decided(
        self, answer: ClaimAnswer | None, sent: float, times: ReadTimes, *, is_bound: bool
    ) -> Decision | TaskLockDatabaseError:
        if answer is None:
            return _locked()
        if error := self._why_again(answer, times):
            return error
        if not self._is_usable(answer, sent, is_bound=is_bound):
            return ConflictError(CLOCK_JUMPS)
        return Decision(answer, sent)

    def _why_again(self, answer: ClaimAnswer, times: ReadTimes) -> ConflictError | None:
        """Return why a claim that nothing stands against is asked for again, if it is."""
        if not answer.looks_free or answer.claim_id == self.request.claim_id:
            return None
        if answer.stays_refused(self.request, times):
            return ConflictError(CAME_LATE)
        return _locked()

    def _is_usable(self, answer: ClaimAnswer, sent: float, *, is_bound: bool) -> bool:
        """Tell whether an answer can be relied on; if not, what was granted is to be undone.

        If its window was reckoned on a broken bound, nobody is to run that window. If its lease was
        over when its answer came, others may have been refused because of it: they are to know
        that it did not run.
        """
        if is_bound and not (answer.granted and is_over(answer, sent)):
            return True
        if answer.granted:
            right_window = is_bound and bool(self.request.runs)
            self._to_take_back = Ending.HAND_OVER if right_window else Ending.OPEN
            self.in_doubt = True
        return False

    def _take_back(self, cursor: Any) -> None:
        """Undo a grant that cannot be used."""
        if self._to_take_back is not None:
            granted = ReleaseRequest(
                self.task_name, self.request.claim_id, RunEnd(self._to_take_back)
            )
            self._context.protocol.release(cursor, granted)
            self.request = replace(self.request, claim_id=uuid4())
            self._to_take_back = None


class TakeoverAttempt(_Attempt[TakeoverRequest]):
    """A takeover, asked for until it is answered. Takeovers travel together."""

    def __init__(self, request: TakeoverRequest, context: ClaimContext) -> None:
        super().__init__(request, context)
        self.kind = TakeoverAttempt
        self._is_over = False  # whether the lease is that was granted

    def send(self, cursor: Any) -> Decision:
        """Ask; the answer is ``None`` if the row is gone.

        :raises TaskLockDatabaseError: its row is locked, the answer took longer than the lease
            that it grants, or it came when nobody waited for it any more; it is to be asked again
        """
        [decided] = self.send_together(cursor, [self])
        if isinstance(decided, TaskLockDatabaseError):
            raise decided
        return decided

    @classmethod
    def send_together(
        cls, cursor: Any, requests: Sequence[TakeoverAttempt]
    ) -> list[Decision | TaskLockDatabaseError]:
        """Ask for several takeovers in one statement."""
        for each in requests:
            each._follow_own()
        context, sent = requests[0]._context, time.monotonic()
        times = context.read_times(sent)
        asked = [each.request for each in requests]
        answers = context.protocol.take_over_many(cursor, asked, times)
        context.learn(answers.values(), sent, times.latest)
        return [each._decided(answers.get(each.request.claim_id), sent, times) for each in requests]

    def _decided(
        self, answer: ClaimAnswer | None, sent: float, times: ReadTimes
    ) -> Decision | TaskLockDatabaseError:
        if answer is not None and answer.looks_dead(self.request.dead_claim_id):
            return _locked() if answer.is_in_time(times.not_after) else ConflictError(CAME_LATE)
        return Decision(answer, sent) if self._is_usable(answer, sent) else ConflictError(TOO_LATE)

    def _is_usable(self, answer: ClaimAnswer | None, sent: float) -> bool:
        """Tell whether an answer can be relied on; if not, what was granted is to be undone."""
        if answer is None or not (answer.granted and is_over(answer, sent)):
            return True
        self._is_over = self.in_doubt = True
        return False

    def _follow_own(self) -> None:
        """Take over what was granted and is dead by now, in its turn, under another id.

        Not before it is asked again: if it is not, what was granted is handed over.
        """
        if self._is_over:
            dead = self.request.claim_id
            self.request = replace(self.request, dead_claim_id=dead, claim_id=uuid4())
            self._is_over = False


class _LoneAttempt(_Attempt[Asked]):
    """A claim that travels alone, and cannot be asked for anew once it was granted."""

    @property
    def goes_alone(self) -> bool:
        """Whether it does: always."""
        return True

    def send(self, cursor: Any) -> Decision:
        """Ask; the answer is ``None`` if there is nothing to claim any more.

        :raises TaskLockDatabaseError: answers take longer than the lease that they grant; or it
            came when nobody waited for it any more, and is to be asked again
        """
        context, sent = self._context, time.monotonic()
        times = context.read_times(sent)
        answer = self._ask(cursor, times)
        if answer is not None:
            context.learn([answer], sent, times.latest)
            if answer.granted and is_over(answer, sent):
                self.in_doubt = True
                raise TaskLockDatabaseError(TOO_LATE)
            if not (answer.granted or answer.is_in_time(times.not_after)):
                raise ConflictError(CAME_LATE)
        return Decision(answer, sent)

    def _ask(self, cursor: Any, times: ReadTimes) -> ClaimAnswer | None:
        raise NotImplementedError


class ManualAttempt(_LoneAttempt[ManualRequest]):
    """A claim of a run that was asked for by hand, asked for until it is answered.

    One that is granted too late counts as dead. Its request is used up: an operator sees that.
    """

    def __init__(self, request: ManualRequest, context: ClaimContext) -> None:
        super().__init__(request, context)
        self.kind = ManualAttempt

    def _ask(self, cursor: Any, times: ReadTimes) -> ClaimAnswer | None:
        return self._context.protocol.claim_requested(
            cursor, self.request, stable=times.stable, not_after=times.not_after
        )


class HandOutAttempt(_LoneAttempt[ClaimRequest]):
    """A claim of a run time that was handed out, asked for until it is answered.

    One that is granted too late is handed over: its job has moved on.
    """

    def __init__(self, request: ClaimRequest, context: ClaimContext) -> None:
        super().__init__(request, context)
        self.kind = HandOutAttempt

    def _ask(self, cursor: Any, times: ReadTimes) -> ClaimAnswer | None:
        return self._context.protocol.claim_handed_out(cursor, self.request, stable=times.stable)


# A claim that can be sent.
AnyAttempt: TypeAlias = ClaimAttempt | TakeoverAttempt | ManualAttempt | HandOutAttempt


def _granted(answers: Mapping[UUID, ClaimAnswer]) -> int:
    return sum(answer.granted for answer in answers.values())


def _locked() -> RowLockedError:
    return RowLockedError("another session has the task's row locked")


def is_over(answer: ClaimAnswer, sent: float) -> bool:
    """Tell whether the lease that was granted has ended by now."""
    lasts = (answer.locked_until - answer.database_time).total_seconds()
    return time.monotonic() > sent + lasts


def _local_time() -> float:
    """Return the replica's own clock, which APScheduler's run times are on too."""
    return time.time()
