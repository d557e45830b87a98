"""One log line when the database goes away, and one when it is back."""

from __future__ import annotations

import logging
import threading
import time

from apscheduler_tasklock.errors import TaskLockDatabaseError
from apscheduler_tasklock.forking import begins_anew_in_a_fork

# Seconds for which the database has to be back until a holder that it did not hear of counts as
# dead, and one attempt more: enough for releases that are owed, which are sent every second, even
# if one that got lost on its way is still being waited for.
SETTLING = 2.5

logger = logging.getLogger(__name__)


class Outage:
    """Tells of a database that is away once when it goes, and once when it is back.

    :param where: the database, for people
    :param attempt: seconds that a single attempt may take
    :ivar reason: why it is away, or ``None`` while it is there
    """

    def __init__(self, where: str, attempt: float = 0.0) -> None:
        self._where = where
        self._attempt = attempt
        self.begin_anew()
        begins_anew_in_a_fork(self)
        self._since: float | None = None
        self.reason: str | None = None
        self._over_at: float | None = None

    def begin_anew(self) -> None:
        """Take a lock that nobody holds. What is known of the database holds in a fork, too."""
        self._lock = threading.Lock()

    def begin(self, error: TaskLockDatabaseError, opened_at: float) -> None:
        """Note that the database did not answer.

        :param opened_at: when the connection was opened, or tried to, on the monotonic clock. One
            that is older than the end of the last outage may have broken in it: it tells nothing
            new, and the next attempt has a connection of its own.
        """
        with self._lock:
            if self._over_at is not None and opened_at < self._over_at:
                return
            self.reason = str(error)
            if self._since is not None:
                return
            self._since = time.monotonic()
        logger.warning(
            "The task lock database is away (%s): %s (each run that it costs is logged at INFO)",
            self._where,
            error,
        )

    @property
    def settled(self) -> bool:
        """Whether the database is there, and has been for a little while."""
        if self.reason is not None:
            return False
        return self._over_at is None or time.monotonic() > self._over_at + self._attempt + SETTLING

    def end(self, begun: float) -> None:
        """Note that it did.

        :param begun: when the statement was, on the monotonic clock; an answer that was on its way
            when the outage was noticed does not end it
        """
        if self._since is None:
            return
        with self._lock:
            if self._since is None or begun < self._since:
                return
            since, self._since, self.reason = self._since, None, None
            self._over_at = time.monotonic()
        logger.info(
            "The task lock database is back (%s), %.1f sec after this replica noticed",
            self._where,
            time.monotonic() - since,
        )
