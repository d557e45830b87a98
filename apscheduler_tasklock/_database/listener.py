"""A connection that listens for notifications, where a session can: not through a pooler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.connection import (
    bounded_waits,
    connector,
    is_direct,
    raw_cursor,
)
from apscheduler_tasklock._database.deadline import CANCEL_LIMIT, Closing, Deadline
from apscheduler_tasklock._database.errors import as_unavailable, one_line
from apscheduler_tasklock._database.rejections import NOTIFICATIONS, Rejections
from apscheduler_tasklock._database.session import open_apart
from apscheduler_tasklock._database.timings import jittered
from apscheduler_tasklock._database.url import as_url
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# Seconds after which it is looked whether to go on.
_LOOK_INTERVAL = 0.5
# Seconds after which a connection that broke is replaced.
_RECONNECT_AFTER = 2.0
# The same at most for one that the database rejects, which its own log tells each time.
_LONGEST_BACKOFF = 60.0


class Listener:
    """Listens on a channel in a thread of its own, on a connection of its own.

    Through a pooler such as pgbouncer in transaction mode a session's LISTEN is another client's. A
    pooler shows by the process id that it gives at the login; then nothing is listened for.

    :param database: a URL; or an application's engine, in whose way it is connected to then
    :param channel: what to listen on
    :param heard: called in the thread when something was notified, or may have been missed
    :param application_name: of the connection, unless an engine is given
    :param attempt: seconds within which each wait for the server ends
    :param rejections: is told if the database rejects it
    :param reconnect_after: seconds after which a connection that broke is replaced; one that is
        rejected again and again, ever later
    """

    def __init__(
        self,
        database: str | URL | Engine,
        channel: str,
        heard: Callable[[], None],
        *,
        application_name: str,
        attempt: float,
        rejections: Rejections | None = None,
        reconnect_after: float = _RECONNECT_AFTER,
    ) -> None:
        self._closing = Closing()
        self._connect: Callable[[], psycopg.Connection[Any]] = (
            partial(open_apart, database, attempt)
            if isinstance(database, Engine)
            else connector(as_url(database), attempt, application_name, self._closing)
        )
        self._attempt = attempt
        self._rejections = rejections or Rejections()
        self._reconnect_after = reconnect_after
        self._channel = channel
        self._heard = heard
        self._backoff = 0.0  # seconds of the last pause after a rejection
        self._thread = threading.Thread(target=self._work, name="tasklock-listen", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """Listen no more. Does not wait for the thread, which ends soon."""
        self._closing.stop()

    def _work(self) -> None:
        goes_on = True
        while goes_on and not self._closing.stopped:
            try:
                goes_on = self._listen()
            except Exception as error:  # noqa: BLE001  # what hooks of an engine raise, too
                self._closing.wait(jittered(self._pause_after(error)))

    def _pause_after(self, error: Exception) -> float:
        """Return for how long to wait after an error. Polling goes on meanwhile."""
        unavailable = as_unavailable(error)
        if unavailable is not None:  # who polls logs the outage
            logger.debug("Changes of jobs are not told for now: %s", unavailable)
            return self._reconnect_after
        self._backoff = min(_LONGEST_BACKOFF, self._backoff * 2 or self._reconnect_after)
        why = one_line(error) or type(error).__name__
        self._rejections.begin(
            NOTIFICATIONS,
            "changes of jobs on other replicas are not told at once, but found by polling, since "
            f"listening for them failed: {why}",
        )
        logger.debug(
            "Listening for changes of jobs is tried again in some %.1f sec: %s", self._backoff, why
        )
        return self._backoff

    def _listen(self) -> bool:
        """Listen until it is closed, or fails; return ``False`` where nothing can be heard."""
        # Nobody wants the rest of an attempt once it is closed.
        deadline = Deadline(self._closing, limit=CANCEL_LIMIT)
        connection = deadline.call(self._connect, lambda late: late.close())
        try:
            with bounded_waits(connection, self._attempt, deadline):
                if not is_direct(connection):
                    logger.info(
                        "A pooler is before the database, so that changes of jobs on other "
                        "replicas are not told at once, but found by polling"
                    )
                    return False
                listen = sql.SQL("LISTEN {}").format(sql.Identifier(self._channel))
                raw_cursor(connection).execute(listen)
            self._backoff = 0.0
            self._rejections.end(NOTIFICATIONS)
            self._heard()  # what was told before
            while not self._closing.stopped:
                for _ in connection.notifies(timeout=_LOOK_INTERVAL, stop_after=1):
                    self._heard()
            return True
        finally:
            # It is not asked for anything more: a server that is stopped would not answer.
            connection.close()
