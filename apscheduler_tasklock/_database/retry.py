"""Requests on a database that may be unavailable: tried again until a time limit."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from apscheduler_tasklock._database.deadline import ATTEMPT_LIMIT, Closing, Deadline
from apscheduler_tasklock._database.errors import RowLockedError
from apscheduler_tasklock._database.exchange import Exchange, Outcome, Request
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock.errors import TaskLockDatabaseError

Answer = TypeVar("Answer")

# Pauses between attempts, in seconds; the last one repeats: while the database is unavailable, and
# while a row is locked, as a rule by another replica's claim that is being committed.
BACKOFF = (0.05, 0.1, 0.25, 0.5, 1.0)
LOCKED_BACKOFF = (0.01, 0.02, 0.04, 0.1, 0.25)


def jittered(seconds: float) -> float:
    """Return a pause near this one: replicas must not all come back at the same moment."""
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311  # no secret


class Retrier:
    """Sends requests again while the database is unavailable.

    :param exchange: sends them
    :param outage: knows whether the database is unavailable
    :param closing: ends the attempts when claiming is stopped
    :param where: the database, for messages
    """

    def __init__(self, exchange: Exchange, outage: Outage, closing: Closing, where: str) -> None:
        self._exchange = exchange
        self._outage = outage
        self._closing = closing
        self._where = where

    def run_until(
        self,
        seconds: float,
        request: Request[Answer],
        *,
        limit: float = ATTEMPT_LIMIT,
        since: float | None = None,
        wait: Callable[[float], bool] | None = None,
        first: Outcome[Answer] | None = None,
    ) -> Answer:
        """Send a request; if it fails, again until so many seconds are over.

        :param limit: the seconds that an attempt may take once claiming is stopped
        :param since: when the seconds began, from :func:`time.monotonic`, if that was not now. If
            they are over already, there is one attempt all the same, unless the database is known
            to be unavailable.
        :param wait: pauses between attempts, and returns whether to give up; by default
            it goes on
        :param first: what became of the first attempt, if that was made before
        :raises TaskLockDatabaseError: the database stayed unavailable, or the row locked
        :raises TaskLockError: the database rejects the request; the message names the remedy
        """
        begun = time.monotonic() if since is None else since
        reason = self._outage.reason
        if first is None and reason is not None and time.monotonic() > begun + seconds:
            raise TaskLockDatabaseError(self._gave_up(begun, reason))
        attempt = 0
        while True:
            try:
                if first is not None:
                    return first.result()
                return self._exchange.ask(request, Deadline(self._closing, limit=limit))
            except TaskLockDatabaseError as error:
                first = None
                backoff = LOCKED_BACKOFF if isinstance(error, RowLockedError) else BACKOFF
                pause = jittered(backoff[min(attempt, len(backoff) - 1)])
                is_over = time.monotonic() + pause > begun + seconds
                if is_over or (wait or _sleep)(pause):
                    raise type(error)(self._gave_up(begun, str(error))) from error.__cause__
                attempt += 1

    def _gave_up(self, begun: float, reason: str) -> str:
        return (
            f"the task lock database ({self._where}) could not be used for "
            f"{time.monotonic() - begun:.1f} sec: {reason}"
        )


def _sleep(seconds: float) -> bool:
    # time.sleep() raises "Invalid argument" now and then where libfaketime moves the clocks.
    threading.Event().wait(seconds)
    return False
