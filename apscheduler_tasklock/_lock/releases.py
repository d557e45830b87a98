"""Releases, and those that are pending: the database failed when a job ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import psycopg

from apscheduler_tasklock._database.deadline import CANCEL_LIMIT, RELEASE_LIMIT, Closing, Deadline
from apscheduler_tasklock._database.errors import ConflictError, RowLockedError, is_rolled_back
from apscheduler_tasklock._database.exchange import MOST_TOGETHER, Call, Exchange, Request
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.messages import ReleaseAnswer, ReleaseRequest
from apscheduler_tasklock._lock.stand_in import LockProtocol
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

logger = logger_of(__name__)

CLOSING_INTERVAL = 0.2
# Seconds that pending releases have at a shutdown in any case, whatever else of it took long.
SHORTEST_CLOSING = 0.7


class Release(Request[ReleaseAnswer | None]):
    """A claim that is to be ended. The answer is ``None`` if it no longer stood.

    :param request: the claim, and how it is to be ended
    :param alone: whether it never travels with others, whose time limits differ
    :ivar made_at: when it was made, on the monotonic clock
    :ivar in_doubt: whether it may have ended the claim without an answer having come
    """

    def __init__(
        self,
        protocol: LockProtocol,
        request: ReleaseRequest,
        *,
        alone: bool = False,
    ) -> None:
        self.kind = Release
        self.task_name = request.task_name
        self._protocol = protocol
        self._request = request
        self._alone = alone
        self.made_at = time.monotonic()
        self.in_doubt = False

    @property
    def goes_alone(self) -> bool:
        """Whether it was asked to."""
        return self._alone

    def note_failure(self, error: BaseException) -> None:
        """Note whether it may have ended the claim all the same."""
        self.in_doubt = self.in_doubt or not is_rolled_back(error)

    def send(self, cursor: Any) -> ReleaseAnswer | None:
        """End the claim."""
        return self._protocol.release(cursor, self._request)

    @classmethod
    def send_together(
        cls, cursor: Any, requests: Sequence[Release]
    ) -> list[ReleaseAnswer | TaskLockDatabaseError | None]:
        """End several claims in one statement."""
        asked = [each._request for each in requests]
        answers = requests[0]._protocol.release_many(cursor, asked)
        locked = RowLockedError("another session has the task's row locked")
        return [
            (answers[each.claim_id] or locked) if each.claim_id in answers else None
            for each in asked
        ]


@dataclass(frozen=True)
class PendingRelease:
    """A release that has not arrived yet, or of which no answer came. Can be pickled.

    :ivar request: the claim, and how it is to be ended
    :ivar until: when it need not be sent any more, on the monotonic clock, which the processes of a
        machine share
    """

    request: ReleaseRequest
    until: float

    @property
    def task_name(self) -> str:
        """The task's name."""
        return self.request.task_name


class PendingReleases:
    """Sends releases again until they arrive, or until the claim has ended by itself.

    One thread, which starts with the first pending release and is gone after the last.

    :param exchange: sends them
    :param protocol: has the statements
    :param closing: says when claiming is stopped
    :param timings: has the intervals
    """

    def __init__(
        self, exchange: Exchange, protocol: LockProtocol, closing: Closing, timings: Timings
    ) -> None:
        self._exchange = exchange
        self._protocol = protocol
        self._closing = closing
        self._timings = timings
        self._give_up_at = 0.0  # on the monotonic clock, once somebody closes
        self._changed = threading.Condition()
        self._pending: list[PendingRelease] = []
        self._thread: threading.Thread | None = None
        self._closers = 0
        self._has_news = False

    def has(self, task_name: str) -> bool:
        """Tell whether a release of this task is pending."""
        return any(pending.task_name == task_name for pending in self._pending)

    def add(self, request: ReleaseRequest, *, seconds: float) -> None:
        """Send a release in the background.

        :param seconds: how long it is worth sending: until the claim ends by itself
        """
        self.adopt(PendingRelease(request, time.monotonic() + seconds))

    def take(self) -> list[PendingRelease]:
        """Return what is pending, and send it no more: somebody else will."""
        with self._changed:
            taken, self._pending = self._pending, []
            self._changed.notify_all()
            return taken

    def adopt(self, pending: PendingRelease) -> None:
        """Send a release in the background, maybe one that another process could not send."""
        with self._changed:
            self._pending.append(pending)
            self._has_news = True
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="tasklock-releases", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    # Threads are limited, or the interpreter ends, which from Python 3.12 on starts
                    # none. The next pending release tries again, or close() sends it.
                    return
                self._thread = thread

    def send_for(self, task_name: str, cursor: Any) -> None:
        """Send what is pending for a task. To release twice does no harm."""
        if not self._pending:
            return
        with self._changed:
            batch = [pending for pending in self._pending if pending.task_name == task_name]
        for pending in batch:
            # Rejected, it is no reason to reject the claim as well.
            with suppress(psycopg.errors.InsufficientPrivilege):
                self._protocol.release(cursor, pending.request)
                self._forget(pending)

    def close(self, until: float = inf) -> None:
        """Send what is pending, again for a little while if need be; the thread ends.

        :param until: when that should be over, on the monotonic clock
        """
        with self._changed:
            if not self._closers:  # a further one does not make the first wait longer
                now = time.monotonic()
                latest = min(now + self._timings.closing_timeout, until)
                self._give_up_at = max(now + SHORTEST_CLOSING, latest)
            self._closers += 1
            self._changed.notify_all()
        try:
            # More than one, if a release comes to be pending while the first is at its end.
            while (thread := self._thread) is not None and thread.is_alive():
                thread.join()
            if self._pending:  # and no thread could be started for it
                self._work()
        finally:
            with self._changed:
                self._closers -= 1

    def _until(self) -> float:
        """Return when all has to be over, on the monotonic clock, once somebody closes."""
        return self._give_up_at if self._closers else inf

    def _work(self) -> None:
        closing = rejected = False
        while True:
            with self._changed:
                if closing:
                    self._changed.wait(CLOSING_INTERVAL)
                elif rejected:  # which is no reason to keep others waiting
                    self._changed.wait_for(
                        lambda: self._closers or not self._pending or self._has_news,
                        self._timings.rejected_interval,
                    )
                else:
                    self._changed.wait_for(
                        lambda: self._closers or not self._pending, self._timings.release_interval
                    )
                self._has_news = False
                closing, batch = self._closers > 0, list(self._pending)
            arrived, rejected = self._send_all(batch)
            with self._changed:
                last = closing and (_is_too_late(self._until()) or rejected)
                # What came to be pending during a last batch that arrived gets one of its own.
                if not self._pending or (last and not arrived):
                    given_up, self._pending, self._thread = self._pending, [], None
                    break
        for pending in given_up:
            logger.warning(
                "The lock of task %r was not released, or no answer said so: it stands until its "
                "lease ends, or its maximum lock",
                pending.task_name,
            )

    def _send_all(self, batch: Sequence[PendingRelease]) -> tuple[bool, bool]:
        """Send releases; return whether none has to be sent again, and whether any was rejected."""
        try:
            batch = self._send_together(batch)
        except TaskLockDatabaseError:
            return False, False
        rejected = locked = False
        for pending in batch:
            if _is_too_late(self._until()):
                return False, rejected
            try:
                rejected = not self._sent(pending) or rejected
            except ConflictError:
                locked = True
            except TaskLockDatabaseError:
                return False, False  # the others would fail alike, one by one
        return not (rejected or locked), rejected and not locked

    def _send_together(self, batch: Sequence[PendingRelease]) -> Sequence[PendingRelease]:
        """Send many in one statement; return those that are still to be sent, one by one.

        After an outage there may be hundreds, and they have to arrive before others take their
        claims for those of dead holders.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        now = time.monotonic()
        several = {  # of two for one task, the second is sent later
            pending.task_name: pending for pending in reversed(batch) if now < pending.until
        }
        if len(several) < 2:
            return batch
        for begin in range(0, len(several), MOST_TOGETHER):
            group = list(several.values())[begin : begin + MOST_TOGETHER]
            asked = [each.request for each in group]
            release = Call(partial(self._protocol.release_many, requests=asked))
            try:
                answers = self._exchange.ask(
                    release, Deadline(self._closing, self._until, RELEASE_LIMIT)
                )
            except ConflictError:
                continue
            except TaskLockDatabaseError:
                raise
            except TaskLockError:
                break  # one of them is rejected; each by itself says which
            for pending in group:
                # One that somebody has locked has no answer; one that stands no more is missing.
                if answers.get(pending.request.claim_id, pending) is not None:
                    self._forget(pending)
        with self._changed:
            left = {id(pending) for pending in self._pending}
        return [pending for pending in batch if id(pending) in left]

    def _sent(self, pending: PendingRelease) -> bool:
        """Send one release. False if it was rejected; else it is pending no longer.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        try:
            if time.monotonic() < pending.until:
                # One that is under way when somebody closes must not make that take long.
                release = Release(self._protocol, pending.request, alone=True)
                self._exchange.ask(release, Deadline(self._closing, self._until, RELEASE_LIMIT))
            else:
                logger.warning(
                    "The lock of task %r was not released before its maximum lock ended",
                    pending.task_name,
                )
        except TaskLockDatabaseError:
            raise
        except TaskLockError:  # rejected, which its worker has logged; the next may not be
            return False
        except Exception:  # nothing may end this thread unseen
            logger.exception("The lock of task %r could not be released", pending.task_name)
        self._forget(pending)
        return True

    def _forget(self, pending: PendingRelease) -> None:
        with self._changed:
            self._pending = [other for other in self._pending if other is not pending]
            self._changed.notify_all()


def _is_too_late(until: float) -> bool:
    """Tell whether an attempt that has to be over by then would have no time to wait."""
    return time.monotonic() > until - CANCEL_LIMIT
