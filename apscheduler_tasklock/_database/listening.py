"""Notifications: the replica's thread listens on a channel, on its one connection.

Through a pooler, such as pgbouncer in transaction mode, the thread does not listen, because the
pooler gives the listening session to other clients.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import psycopg

from apscheduler_tasklock._database.jitter import jittered
from apscheduler_tasklock._database.outage import as_unavailable
from apscheduler_tasklock._database.rejections import NOTIFICATIONS, Rejections
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock._database.session import Session
from apscheduler_tasklock._database.sqlstates import one_line
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._shutdown import Closing
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

logger = logger_of(__name__)

# Limits the seconds between two attempts to listen while the database rejects them. The limit is
# high, so that the server, which logs each rejected login, does not get many log lines.
_LONGEST_BACKOFF = 60.0
# Limits how often the pause is doubled. The default pause of 2 s, doubled 5 times, is above
# `_LONGEST_BACKOFF`.
_DOUBLINGS = 5


class Listening:
    """Listens on one channel for the replica's thread.

    Only the thread calls the methods, except :meth:`stop`.

    :param session: the thread's connection
    :param channel: the channel
    :param heard: called when a notification came, or may have been missed; must not wait
    :param closing: once claiming is stopped, listening does not begin any more
    :param rejections: notes a rejected LISTEN
    :param timings: has the pause after which a broken connection is opened again
    """

    def __init__(
        self,
        session: Session,
        channel: str,
        heard: Callable[[], object],
        closing: Closing,
        rejections: Rejections,
        timings: Timings,
    ) -> None:
        self._session = session
        self._channel = channel
        self._heard = heard
        self._closing = closing
        self._rejections = rejections
        self._timings = timings
        self._is_wanted = True
        self._has_begun = False
        self._is_asked = False  # whether a request that begins to listen is under way

    @property
    def is_wanted(self) -> bool:
        """Whether to listen: neither listening nor claiming was stopped."""
        return self._is_wanted and not self._closing.stopped

    def stop(self) -> None:
        """Do not begin to listen again. Does not wait."""
        self._is_wanted = False

    def request(self, now: float) -> Request[Any] | None:
        """Return a request that begins to listen; ``None``: no request is needed.

        Each request except the first opens a connection in place of a broken one, and is sent after
        a pause with jitter. Without jitter, all replicas would connect at the same moment if the
        server has ended all connections at the same moment.
        """
        if self._session.listens or self._is_asked or not self.is_wanted:
            return None
        asked = _ListenRequest(self, now)
        if self._has_begun:
            asked.not_before = now + jittered(self._timings.listen_again)
        self._has_begun = self._is_asked = True
        return asked

    def tell(self) -> None:
        """Call ``heard`` if a notification came since the last call."""
        if self._session.notified:
            self._session.notified = False
            self._heard()

    def note_answer(self, outcome: Outcome[bool]) -> None:
        """Note how an attempt to listen has ended."""
        self._is_asked = False
        if outcome.answer:
            self._rejections.end(NOTIFICATIONS)
        elif outcome.answer is not None:
            self.stop()
            self._rejections.end(NOTIFICATIONS)
            logger.info(
                "There is a pooler before the database, so changes of jobs on other replicas are "
                "found by polling, not at once"
            )


class _ListenRequest(Request[bool]):
    """The request that begins to listen. It is sent again until it has succeeded."""

    def __init__(self, listening: Listening, now: float) -> None:
        super().__init__(listening._closing, came=now, tried_until=inf)
        self._listening = listening
        again = listening._timings.listen_again
        self.rejected_backoff = [min(_LONGEST_BACKOFF, again * 2**n) for n in range(_DOUBLINGS + 1)]

    def send(self, cursor: Any) -> bool:
        """Listen, and return ``True``; ``False`` if the connection cannot listen."""
        try:
            return self._listening._session.listen(cursor, self._listening._channel)
        except psycopg.Error as error:
            if as_unavailable(error) is not None:
                raise
            raise TaskLockError(
                "changes of jobs on other replicas are found by polling, not at once, because "
                f"listening for them failed: {one_line(error)}"
            ) from error

    @property
    def is_unwanted(self) -> bool:
        """Whether listening is stopped."""
        return not self._listening.is_wanted

    def fail(self, outcome: Outcome[bool]) -> None:
        """Note the error if it is a rejection. An outage was noted by the replica's thread."""
        error = outcome.error
        if error is not None and not isinstance(error, TaskLockDatabaseError):
            self._listening._rejections.begin(NOTIFICATIONS, error)

    def finish(self, outcome: Outcome[bool]) -> None:
        """Note how the attempt to listen has ended."""
        self._listening.note_answer(outcome)
