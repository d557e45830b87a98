"""Releases that are owed: the database failed when a job ended, or when a claim was given up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any
from uuid import UUID

import psycopg

from apscheduler_tasklock._database.deadline import CANCEL_LIMIT, RELEASE_LIMIT
from apscheduler_tasklock._database.errors import is_conflict
from apscheduler_tasklock._database.forking import begins_anew_in_a_fork
from apscheduler_tasklock._database.retry import Attempts
from apscheduler_tasklock._lock.protocol import ReleaseAnswer, TaskLockProtocol
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

logger = logging.getLogger(__name__)

# Seconds after which what could not be sent is sent again; sooner if somebody waits for it.
RETRY_INTERVAL = 1.0
# If the database refuses it, as until somebody gives a right back.
REFUSED_INTERVAL = 10.0
CLOSING_INTERVAL = 0.2
# Seconds that an owed release waits for a row that somebody has locked.
LOCK_TIMEOUT = 0.25
# Seconds for which :meth:`OwedReleases.close` sends them while the database is away, as when a
# server restarts under a deployment. All attempts are over by then.
CLOSING_PATIENCE = 3.0
# Seconds that it has in any case, whatever else of the shutdown took long.
SHORTEST_CLOSING = 0.7


class Ending(Enum):
    """How a claim is ended."""

    KEEP = "released, its window taken"
    OPEN = "released, its window open again"
    HAND_OVER = "handed over: its window is run again by another replica"


def send_ending(
    protocol: TaskLockProtocol, cursor: Any, task_name: str, claim_id: UUID, ending: Ending
) -> ReleaseAnswer | None:
    """End a claim. ``None`` means that it no longer stood, and that nothing was changed."""
    if ending is Ending.HAND_OVER:
        return protocol.end_lease(cursor, task_name, claim_id, handed_over=True)
    return protocol.release(cursor, task_name, claim_id, keep_window=ending is Ending.KEEP)


@dataclass(frozen=True)
class OwedRelease:
    """A release that has not arrived yet, or of which no answer came. Can be pickled.

    :ivar until: when it need not be sent any more, on the monotonic clock, which the processes of a
        machine share
    """

    task_name: str
    claim_id: UUID
    ending: Ending
    until: float


class OwedReleases:
    """Sends releases again until they arrive, or until the claim has ended by itself.

    One thread, which starts with the first owed release and is gone after the last.

    :param attempts: runs the statements
    :param protocol: has them
    """

    def __init__(self, attempts: Attempts, protocol: TaskLockProtocol) -> None:
        self._attempts = attempts
        # What has to wait for a row is sent again anyway, and must not keep the others waiting.
        self._protocol = protocol.with_lock_timeout(LOCK_TIMEOUT)
        self._give_up_at = 0.0  # on the monotonic clock, once somebody closes
        self.begin_anew()
        begins_anew_in_a_fork(self)

    def _until(self) -> float:
        """Return when all has to be over, on the monotonic clock, once somebody closes."""
        return self._give_up_at if self._closers else inf

    def begin_anew(self) -> None:
        """Owe nothing. A forked child leaves it to its parent what that owes."""
        self._changed = threading.Condition()
        self._owed: list[OwedRelease] = []
        self._thread: threading.Thread | None = None
        self._closers = 0
        self._news = False

    def add(self, task_name: str, claim_id: UUID, ending: Ending, *, seconds: float) -> None:
        """Owe a release.

        :param seconds: how long it is worth sending: until the claim ends by itself
        """
        self.adopt(OwedRelease(task_name, claim_id, ending, time.monotonic() + seconds))

    def take(self) -> list[OwedRelease]:
        """Return what is owed, and owe it no more: somebody else will send it."""
        with self._changed:
            taken, self._owed = self._owed, []
            self._changed.notify_all()
            return taken

    def adopt(self, owed: OwedRelease) -> None:
        """Owe a release, maybe one that another process could not send."""
        with self._changed:
            self._owed.append(owed)
            self._news = True
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="tasklock-releases", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    # Threads are limited, or the interpreter ends, which from Python 3.12 on starts
                    # none. The next release that is owed tries again, or close() sends it.
                    return
                self._thread = thread

    def send_for(self, task_name: str, cursor: Any) -> None:
        """Send what is owed for a task. To release twice does no harm."""
        if not self._owed:
            return
        with self._changed:
            batch = [owed for owed in self._owed if owed.task_name == task_name]
        for owed in batch:
            # Refused, it is no reason to refuse the claim as well.
            with suppress(psycopg.errors.InsufficientPrivilege):
                self._send(cursor, owed)
                self._forget(owed)

    def close(self, until: float = inf) -> None:
        """Send what is owed, again for a little while if need be; the thread ends.

        :param until: when that should be over, on the monotonic clock
        """
        with self._changed:
            if not self._closers:  # a further one does not make the first wait longer
                now = time.monotonic()
                self._give_up_at = max(now + SHORTEST_CLOSING, min(now + CLOSING_PATIENCE, until))
            self._closers += 1
            self._changed.notify_all()
        try:
            # More than one, if a release comes to be owed while the first is at its end.
            while (thread := self._thread) is not None and thread.is_alive():
                thread.join()
            if self._owed:  # and no thread could be started for it
                self._work()
        finally:
            with self._changed:
                self._closers -= 1

    def _work(self) -> None:
        closing = refused = False
        while True:
            with self._changed:
                if closing:
                    self._changed.wait(CLOSING_INTERVAL)
                elif refused:  # which is no reason to keep others waiting
                    self._changed.wait_for(
                        lambda: self._closers or not self._owed or self._news, REFUSED_INTERVAL
                    )
                else:
                    self._changed.wait_for(lambda: self._closers or not self._owed, RETRY_INTERVAL)
                self._news = False
                closing, batch = self._closers > 0, list(self._owed)
            arrived, refused = self._send_all(batch)
            with self._changed:
                last = closing and (_is_too_late(self._until()) or refused)
                # What came to be owed during a last batch that arrived gets a batch of its own.
                if not self._owed or (last and not arrived):
                    given_up, self._owed, self._thread = self._owed, [], None
                    break
        for owed in given_up:
            logger.warning(
                "The lock of task %r was not released: it stands until its lease ends, or its "
                "maximum lock",
                owed.task_name,
            )

    def _send_all(self, batch: Sequence[OwedRelease]) -> tuple[bool, bool]:
        """Send releases; tell whether none has to be sent again, and whether any was refused."""
        refused = locked = False
        for owed in batch:
            if _is_too_late(self._until()):
                return False, refused
            try:
                refused = not self._sent(owed) or refused
            except TaskLockDatabaseError as error:
                if not is_conflict(error.__cause__):
                    return False, False  # the others would fail alike, one by one
                locked = True
        return not (refused or locked), refused and not locked

    def _sent(self, owed: OwedRelease) -> bool:
        """Send one release. False if it was refused; else it is owed no longer.

        :raises TaskLockDatabaseError: the database is away
        """
        try:
            if time.monotonic() < owed.until:
                # One that is under way when somebody closes must not make that take long.
                self._attempts.once(
                    lambda cursor: self._send(cursor, owed), self._until, RELEASE_LIMIT
                )
            else:
                logger.warning(
                    "The lock of task %r was not released before its maximum lock ended",
                    owed.task_name,
                )
        except TaskLockDatabaseError:
            raise
        except TaskLockError:  # refused, which its worker has told of; the next may not be
            return False
        except Exception:  # nothing may end this thread unseen
            logger.exception("The lock of task %r could not be released", owed.task_name)
        self._forget(owed)
        return True

    def _send(self, cursor: Any, owed: OwedRelease) -> None:
        send_ending(self._protocol, cursor, owed.task_name, owed.claim_id, owed.ending)

    def _forget(self, owed: OwedRelease) -> None:
        with self._changed:
            self._owed = [other for other in self._owed if other is not owed]


def _is_too_late(until: float) -> bool:
    """Tell whether an attempt that has to be over by then would have no time to wait."""
    return time.monotonic() > until - CANCEL_LIMIT
