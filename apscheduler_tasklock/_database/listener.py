"""A connection that listens for notifications, where a session can: not through a pooler."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import psycopg
from psycopg import sql
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.connection import connector
from apscheduler_tasklock._database.retry import jittered

logger = logging.getLogger(__name__)

# Seconds after which it is looked whether to go on.
_LOOK_INTERVAL = 0.5
# Seconds after which a connection that broke is replaced.
_RECONNECT_AFTER = 2.0


class Listener:
    """Listens on a channel in a thread of its own, on a connection of its own.

    Through a pooler such as pgbouncer in transaction mode a session's LISTEN is another client's. A
    pooler shows by the process id that it gives at the login; then nothing is listened for.

    :param url: the database
    :param channel: what to listen on
    :param heard: called in the thread when something was notified, or may have been missed
    :param application_name: of the connection
    :param attempt: seconds within which each wait for the server ends
    """

    def __init__(
        self,
        url: URL,
        channel: str,
        heard: Callable[[], None],
        *,
        application_name: str,
        attempt: float,
    ) -> None:
        self._connect = connector(url, attempt, application_name, None)
        self._channel = channel
        self._heard = heard
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tasklock-listen", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """Listen no more. Does not wait for the thread, which ends soon."""
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                with self._connect() as connection:
                    if connection.prepare_threshold is None:
                        logger.info(
                            "A pooler is before the database, so that changes of jobs on other "
                            "replicas are not told at once, but found by polling"
                        )
                        return
                    self._listen(connection)
            except (psycopg.Error, OSError) as error:  # polling goes on meanwhile
                logger.debug("Changes of jobs are not told for now: %s", error)
                self._closed.wait(jittered(_RECONNECT_AFTER))

    def _listen(self, connection: psycopg.Connection) -> None:
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        self._heard()  # what was told before
        while not self._closed.is_set():
            for _ in connection.notifies(timeout=_LOOK_INTERVAL, stop_after=1):
                self._heard()
