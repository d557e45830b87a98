"""A claim on its way to the database: asked until it is answered, on clocks that can be trusted."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg

from apscheduler_tasklock.clock import DatabaseClock
from apscheduler_tasklock.errors import TaskLockDatabaseError
from apscheduler_tasklock.failures import surely_undone
from apscheduler_tasklock.messages import ClaimAnswer, ClaimRequest, DeadRun
from apscheduler_tasklock.protocol import TaskLockProtocol

# How often a claim is asked on a clock bound that turns out to be broken. The first answer mends
# the bound; a clock that jumps each time is beyond help.
ROUNDS = 3


class Asking:
    """One claim: what it asks for, and what is known of it.

    :param due: the run time on the replica's own clock, in seconds since 1970; ``None`` for now
    :ivar task_name: the task that is claimed
    :ivar max_lock: seconds after which the claim counts as dead
    :ivar lease: seconds after which it does without a renewal, or ``None``
    :ivar claim_id: what a release of it has to match on, unless it took a dead holder's window
        over: such a claim is never released without an answer. Its lease ends, and the window is
        run again.
    :ivar unsure: whether the database may have granted it without an answer having come
    """

    def __init__(
        self,
        protocol: TaskLockProtocol,
        clock: DatabaseClock,
        task_name: str,
        due: float | None,
        *,
        min_lock: float,
        max_lock: float,
        lease: float | None,
        replica_id: str,
    ) -> None:
        self._protocol = protocol
        self._clock = clock
        self.task_name = task_name
        self._due = _local_time() if due is None else due
        self._min_lock = min_lock
        self.max_lock = max_lock
        self.lease = None if lease is None else min(lease, max_lock)
        self._replica_id = replica_id
        self.claim_id: UUID = uuid4()
        self.unsure = False
        self._misplaced = False

    def ask(self, cursor: Any, *, dead_run: DeadRun = "forget") -> tuple[ClaimAnswer, float]:
        """Ask, and return the answer, and the claim's end on this process's monotonic clock.

        :param dead_run: what is to become of a run whose holder died
        :raises TaskLockDatabaseError: the clocks jump from one answer to the next, or answers take
            longer than the lease that they grant
        """
        for _ in range(ROUNDS):
            self._take_back_misplaced(cursor)
            # Both clocks are read as late as can be, on a connection that stands.
            sent, lag = time.monotonic(), max(0.0, _local_time() - self._due)
            bound = self._clock.latest(sent)
            answer = self._send(cursor, lag, bound, dead_run)
            took_over = answer.granted and answer.dead_holder is not None
            held = self._clock.learn(
                sent=sent,
                answered=time.monotonic(),
                database_time=answer.database_time,
                bound=bound,
            )
            ends_at = sent + (answer.locked_until - answer.database_time).total_seconds()
            too_late = self.lease is not None and answer.granted and time.monotonic() > ends_at
            if (held or took_over) and not too_late:
                return answer, ends_at
            if took_over:
                self.claim_id = uuid4()  # that one is dead, and is taken over in its turn
                continue
            self._misplaced = answer.granted
            self.unsure = self.unsure or answer.granted
        raise TaskLockDatabaseError(
            "its clock, or this machine's, jumps back and forth, or it answers too late for a lease"
        )

    def _send(
        self, cursor: Any, lag: float, bound: datetime | None, dead_run: DeadRun
    ) -> ClaimAnswer:
        request = ClaimRequest(
            self.task_name,
            lag,
            bound,
            self._min_lock,
            self.max_lock,
            self._replica_id,
            self.claim_id,
            self.lease,
            dead_run,
        )
        try:
            return self._protocol.claim(cursor, request)
        except psycopg.Error as error:
            self.unsure = self.unsure or not surely_undone(error)
            raise
        except BaseException:  # Ctrl-C, while the answer is under way
            self.unsure = True
            raise

    def _take_back_misplaced(self, cursor: Any) -> None:
        """Undo a grant whose window was reckoned on a broken bound, or whose lease is over."""
        if self._misplaced:
            self._protocol.release(cursor, self.task_name, self.claim_id, keep_window=False)
            self.claim_id = uuid4()
            self._misplaced = False


def _local_time() -> float:
    """Return the replica's own clock, which APScheduler's run times are on too."""
    return time.time()
