"""A claim on its way to the database: asked until it is answered, on clocks that can be trusted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg

from apscheduler_tasklock._database.errors import surely_undone
from apscheduler_tasklock._lock.clock import DatabaseClock
from apscheduler_tasklock._lock.protocol import (
    ClaimAnswer,
    ClaimRequest,
    TakeoverRequest,
    TaskLockProtocol,
)
from apscheduler_tasklock._lock.releases import Ending, send_ending
from apscheduler_tasklock.errors import TaskLockDatabaseError

# How often a claim is asked on a clock bound that turns out to be broken. The first answer mends
# the bound; a clock that jumps each time is beyond help.
ROUNDS = 3


@dataclass(frozen=True)
class WantedClaim:
    """What is claimed, as a job or ``hold`` wants it.

    :ivar task_name: the task's name
    :ivar run_time: the nominal run time, with a time zone; ``None`` for now
    :ivar min_lock: seconds from the run time until which its window lasts
    :ivar max_lock: seconds after which the run has to have ended
    :ivar lease: seconds after which a holder that does not renew counts as dead, which a thread
        does for as long as it is held; ``None``: the maximum lock
    :ivar failover: whether the window is to be run again if its holder dies
    :ivar exact: whether every replica computes the same run time
    :ivar runs: what is run, as of ``ClaimRequest``; ``""`` for ``hold``
    :ivar one_off: whether no other run time follows
    :ivar claim_id: the claim's id, if somebody else has to know it before
    :ivar keep_window_if_in_doubt: whether the window stays taken if the claim was sent and never
        answered, although the database may have granted it
    """

    task_name: str
    min_lock: float
    max_lock: float
    run_time: datetime | None = None
    lease: float | None = None
    failover: bool = False
    exact: bool = False
    runs: str = ""
    one_off: bool = False
    claim_id: UUID | None = None
    keep_window_if_in_doubt: bool = False


class Asking:
    """One claim: what it asks for, and what is known of it.

    :ivar wanted: what is claimed
    :ivar claim_id: what a release of it has to match on
    :ivar unsure: whether the database may have granted it without an answer having come
    """

    def __init__(
        self, protocol: TaskLockProtocol, clock: DatabaseClock, wanted: WantedClaim, replica_id: str
    ) -> None:
        self._protocol = protocol
        self._clock = clock
        self.wanted = wanted
        self._due = _local_time() if wanted.run_time is None else wanted.run_time.timestamp()
        self._replica_id = replica_id
        self.claim_id: UUID = wanted.claim_id or uuid4()
        self.unsure = False
        self._to_take_back: Ending | None = None

    def ask(self, cursor: Any, *, stable: bool) -> tuple[ClaimAnswer, float]:
        """Ask, and return the answer, and when it was sent, on the monotonic clock.

        :param stable: whether the rows can be believed
        :raises TaskLockDatabaseError: the clocks jump from one answer to the next, or answers take
            longer than the lease that they grant
        """
        for _ in range(ROUNDS):
            self._take_back(cursor)
            # Both clocks are read as late as can be, on a connection that stands.
            sent, lag = time.monotonic(), max(0.0, _local_time() - self._due)
            bound = self._clock.latest(sent)
            answer = self._send(cursor, lag, bound, stable)
            held = self._clock.learn(
                sent=sent,
                answered=time.monotonic(),
                database_time=answer.database_time,
                bound=bound,
            )
            late = answer.granted and is_over(answer, sent)
            if held and not late:
                return answer, sent
            if answer.granted:
                right_window = held and bool(self.wanted.runs)
                self._to_take_back = Ending.HAND_OVER if right_window else Ending.OPEN
                self.unsure = True
        raise TaskLockDatabaseError(
            "its clock, or this machine's, jumps back and forth, or it answers too late for a lease"
        )

    def _send(self, cursor: Any, lag: float, bound: datetime | None, stable: bool) -> ClaimAnswer:
        wanted = self.wanted
        request = ClaimRequest(
            task_name=wanted.task_name,
            lag=lag,
            latest=bound,
            min_lock=wanted.min_lock,
            max_lock=wanted.max_lock,
            replica_id=self._replica_id,
            claim_id=self.claim_id,
            lease=wanted.lease,
            run_time=wanted.run_time if wanted.exact else None,
            runs=wanted.runs,
            one_off=wanted.one_off,
            failover=wanted.failover,
            stable=stable,
        )
        try:
            return self._protocol.claim(cursor, request)
        except psycopg.Error as error:
            self.unsure = self.unsure or not surely_undone(error)
            raise
        except BaseException:  # Ctrl-C, while the answer is under way
            self.unsure = True
            raise

    def _take_back(self, cursor: Any) -> None:
        """Undo a grant that cannot be used.

        If its window was reckoned on a broken bound, nobody is to run that window. If its lease was
        over when its answer came, others may have been refused because of it: they are to know
        that it did not run.
        """
        if self._to_take_back is not None:
            send_ending(
                self._protocol, cursor, self.wanted.task_name, self.claim_id, self._to_take_back
            )
            self.claim_id = uuid4()
            self._to_take_back = None


@dataclass(frozen=True)
class WantedTakeover:
    """A dead holder's run that is to be run again.

    :ivar task_name: the task's name
    :ivar dead_claim_id: the claim of the dead holder
    :ivar dead_holder: shown in logs
    :ivar lease: seconds after which a holder that does not renew counts as dead; ``None``: the
        maximum lock
    :ivar failover: whether the window is to be run again if this holder dies as well
    :ivar claim_id: the claim's id, if somebody else has to know it before
    """

    task_name: str
    dead_claim_id: UUID
    dead_holder: str
    lease: float | None
    failover: bool
    claim_id: UUID | None = None


class AskingToTakeOver:
    """One takeover: what it asks for, and what is known of it. See :class:`Asking`."""

    def __init__(
        self,
        protocol: TaskLockProtocol,
        clock: DatabaseClock,
        wanted: WantedTakeover,
        replica_id: str,
    ) -> None:
        self._protocol = protocol
        self._clock = clock
        self.wanted = wanted
        self._replica_id = replica_id
        self._dead_claim_id = wanted.dead_claim_id
        self.claim_id: UUID = wanted.claim_id or uuid4()
        self.unsure = False

    def ask(self, cursor: Any, *, stable: bool) -> tuple[ClaimAnswer | None, float]:
        """Ask, and return the answer, and when it was sent; ``None`` if the row is gone.

        :raises TaskLockDatabaseError: answers take longer than the lease that they grant
        """
        del stable  # that the run is dead was found out before
        for _ in range(ROUNDS):
            sent = time.monotonic()
            answer = self._send(cursor)
            if answer is not None:
                bound = self._clock.latest(sent)
                now = time.monotonic()
                self._clock.learn(
                    sent=sent, answered=now, database_time=answer.database_time, bound=bound
                )
            if answer is None or not (answer.granted and is_over(answer, sent)):
                return answer, sent
            # That claim is dead by now, and is taken over in its turn.
            self._dead_claim_id, self.claim_id = self.claim_id, uuid4()
        raise TaskLockDatabaseError("it answers too late for a lease")

    def _send(self, cursor: Any) -> ClaimAnswer | None:
        wanted = self.wanted
        request = TakeoverRequest(
            wanted.task_name,
            self._dead_claim_id,
            self._replica_id,
            self.claim_id,
            wanted.lease,
            wanted.failover,
        )
        try:
            return self._protocol.take_over(cursor, request)
        except psycopg.Error as error:
            self.unsure = self.unsure or not surely_undone(error)
            raise
        except BaseException:  # Ctrl-C, while the answer is under way
            self.unsure = True
            raise


def is_over(answer: ClaimAnswer, sent: float) -> bool:
    """Tell whether the lease that was granted has ended by now."""
    lasts = (answer.locked_until - answer.database_time).total_seconds()
    return time.monotonic() > sent + lasts


def _local_time() -> float:
    """Return the replica's own clock, which APScheduler's run times are on too."""
    return time.time()
