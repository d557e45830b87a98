"""Notifications: a channel that the database's thread listens on, on the connection that it has.

Through a pooler such as pgbouncer in transaction mode a session's LISTEN is another client's. A
pooler shows by the process id that it gives at the login; then nothing is listened for.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any

import psycopg

from apscheduler_tasklock._database.connection import wait_for_input
from apscheduler_tasklock._database.deadline import Closing, Deadline
from apscheduler_tasklock._database.errors import as_unavailable, one_line
from apscheduler_tasklock._database.rejections import NOTIFICATIONS, Rejections
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock._database.session import Session
from apscheduler_tasklock._database.side import Ticket
from apscheduler_tasklock._database.timings import Timings, jittered
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

logger = logger_of(__name__)

# Limits the seconds from above after which a connection is opened again that the database rejects,
# because the server's own log tells it each time.
_LONGEST_BACKOFF = 60.0
# How often that pause is doubled: enough to come to the limit from the default.
_DOUBLINGS = 5


class Listening:
    """What the database's thread listens for, and how it waits for that.

    All is called in that thread, but for :meth:`wake` and :meth:`stop`.

    :param session: the thread's connection
    :param channel: what to listen on
    :param heard: called when something was notified, or may have been missed; must not wait
    :param closing: says when claiming was stopped, from when on listening is not begun any more
    :param rejections: is told if the database rejects it
    :param timings: has the pause after which a connection that broke is opened again
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
        self._is_asked = False  # whether a ticket is under way
        self._waits = False
        # Something that is put into the thread's inbox does not wake a wait for a socket.
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        self._woken.setblocking(False)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody wants to hear, and can."""
        return self._is_wanted and not self._closing.stopped

    def stop(self) -> None:
        """Begin to listen no more. Does not wait."""
        self._is_wanted = False

    def close(self) -> None:
        """Stop, and leave nothing open. Called when the connection is closed."""
        self.stop()
        self._waking.close()
        self._woken.close()

    def ticket(self, now: float) -> Ticket[Any] | None:
        """Return what begins to listen, if the connection does not and nothing is under way.

        After a connection that broke, it opens the next one, so there is a pause: the server may
        have ended those of all replicas in one moment.
        """
        if self._session.listens or self._is_asked or not self.is_wanted:
            return None
        ticket = _Listen(self, self._session, self._channel, self._closing, self._timings, now)
        if self._has_begun:
            ticket.not_before = now + jittered(self._timings.listen_again)
        self._has_begun = self._is_asked = True
        return ticket

    def tell(self) -> None:
        """Tell whoever listens of what was notified since the last time."""
        if self._session.notified:
            self._session.notified = False
            self._heard()

    def wait(self, seconds: float, has_come: Callable[[], bool]) -> None:
        """Wait for a notification, for the end of the connection, or until it is woken.

        :param seconds: for how long at most
        :param has_come: tells whether there is something else to do by now
        """
        self._session.hear()  # what came with the last answer
        if self._session.notified or not self._session.listens:
            return
        self._waits = True
        try:
            # Whoever puts something in after this finds that it is waited for.
            if not has_come():
                wait_for_input([self._session.fileno(), self._woken.fileno()], seconds)
        finally:
            self._waits = False
        with suppress(OSError):  # there is nothing more to be read
            while self._woken.recv(4096):
                pass
        self._session.hear()

    def wake(self) -> None:
        """End a wait, if there is one. From a signal handler, too."""
        if self._waits:
            with suppress(OSError):  # it is full, and wakes the thread in any case; or closed
                self._waking.send(b"\0")

    def note_answer(self, outcome: Outcome[bool]) -> None:
        """Note how an attempt to listen has ended."""
        self._is_asked = False
        if outcome.answer:
            self._rejections.end(NOTIFICATIONS)
        elif outcome.answer is not None:
            self.stop()
            self._rejections.end(NOTIFICATIONS)
            logger.info(
                "A pooler is before the database, so that changes of jobs on other "
                "replicas are not told at once, but found by polling"
            )

    def note_rejection(self, error: Exception) -> None:
        """Note that the database rejects it, or the connection. It is tried again."""
        self._rejections.begin(NOTIFICATIONS, error)


class _Request(Request[bool]):
    """Begins to listen.

    :param session: whose connection listens
    :param channel: what to listen on
    """

    def __init__(self, session: Session, channel: str) -> None:
        self._session = session
        self._channel = channel

    def send(self, cursor: Any) -> bool:
        """Listen, and return ``True``; or ``False`` where nothing can be heard."""
        try:
            return self._session.listen(cursor, self._channel)
        except psycopg.Error as error:
            if as_unavailable(error) is not None:
                raise
            raise TaskLockError(
                "changes of jobs on other replicas are not told at once, but found by polling, "
                f"since listening for them failed: {one_line(error)}"
            ) from error


class _Listen(Ticket[bool]):
    """The ticket that begins to listen. It is sent again until it has succeeded."""

    def __init__(
        self,
        listening: Listening,
        session: Session,
        channel: str,
        closing: Closing,
        timings: Timings,
        now: float,
    ) -> None:
        super().__init__(_Request(session, channel), Deadline(closing), came=now, tried_until=inf)
        self._listening = listening
        again = timings.listen_again
        self._pauses = [min(_LONGEST_BACKOFF, again * 2**n) for n in range(_DOUBLINGS + 1)]

    @property
    def rejected_backoff(self) -> Sequence[float]:  # type: ignore[override]  # a class's is fixed
        """The pauses after which it is sent again that was rejected."""
        return self._pauses

    @property
    def is_unwanted(self) -> bool:
        """Whether nobody wants to hear any more."""
        return not self._listening.is_wanted

    def fail(self, outcome: Outcome[bool]) -> None:
        """Note a rejection. An outage is known already."""
        error = outcome.error
        if error is not None and not isinstance(error, TaskLockDatabaseError):
            self._listening.note_rejection(error)

    def finish(self, outcome: Outcome[bool]) -> None:
        """Note how it ended."""
        self._listening.note_answer(outcome)
