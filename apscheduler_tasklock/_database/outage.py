"""Outages: one log line when the database becomes unavailable, and one when it is back."""

from __future__ import annotations

import threading
import time
from math import inf

from apscheduler_tasklock._database.errors import ServerFullError, TableLockedError
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError

logger = logger_of(__name__)


class Outage:
    """Logs that a database is unavailable once, and once that it is back.

    It also knows whether the rows can be believed: not right after a start or an outage, in which
    nobody could renew a lease.

    :param where: the database, shown in logs
    :param attempt: seconds that a single attempt may take
    :param timings: has the recovery grace
    :ivar reason: why it is unavailable, or ``None`` while it is there
    """

    def __init__(self, where: str, attempt: float = 0.0, timings: Timings | None = None) -> None:
        self._where = where
        self._attempt = attempt
        self._timings = timings or Timings()
        self._lock = threading.Lock()
        self._since: float | None = None
        self.reason: str | None = None
        self._over_at: float | None = None
        self._only_full = False
        self._is_locked = False  # whether it began as that
        self._doubted_at = -inf
        # Nothing is known of the time before the start: an outage may just have ended.
        self._stable_from: float | None = None

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
            full = isinstance(error, ServerFullError)
            self._only_full = full and (self._since is None or self._only_full)
            if self._since is not None:
                return
            self._since = time.monotonic()
            self._is_locked = isinstance(error, TableLockedError)
        if isinstance(error, TableLockedError):
            logger.warning(
                "A task lock table is locked (%s): %s (each run that it costs is logged)",
                self._where,
                error,
            )
            return
        logger.warning(
            "The task lock database is unavailable (%s): %s (each run that it costs is logged)",
            self._where,
            error,
        )

    @property
    def stable(self) -> bool:
        """Whether the database is there, and has been for long enough to believe its rows."""
        known = self.reason is None and self._stable_from is not None
        return known and time.monotonic() >= (self._stable_from or 0.0)

    @property
    def grace(self) -> float:
        """Seconds from the first answer, after a start or an outage, until rows are believed."""
        return self._attempt + self._timings.recovery_grace

    def believe(self) -> None:
        """Believe the rows from now on, unless an outage is known: somebody else does already."""
        with self._lock:
            if self._over_at is None and self._since is None:
                self._stable_from = 0.0

    def idle_connection_ended(self, by_server: bool) -> None:
        """Note that the other side has ended an idle connection: the server may have restarted.

        Or a proxy ends what is idle, without a word, and will do so again and again. A dead run
        must not stand against its task for as long: after one such end, further ones are believed
        to be a proxy's for a while. Those that are not are logged, at the level DEBUG.

        :param by_server: whether the server has said that it ends it
        """
        with self._lock:
            now = time.monotonic()
            silent_until = self._doubted_at + max(self._timings.doubt_interval, 3 * self.grace)
            if (not by_server and now < silent_until) or not self._doubt(now):
                return
            self._doubted_at = now
        logger.debug(
            "The task lock database (%s) has ended an idle connection. Holders whose leases have "
            "ended are given %.1f sec to renew them",
            self._where,
            self.grace,
        )

    def doubt(self) -> None:
        """Believe no row for the recovery grace: somebody else has seen an outage."""
        with self._lock:
            self._doubt(time.monotonic())

    def _doubt(self, now: float) -> bool:
        """Begin the grace, if rows are believed; tell whether that is so."""
        believed = self._stable_from is not None and now >= self._stable_from
        if believed:
            self._stable_from = now + self.grace
        return believed

    def clock_stepped(self, seconds: float) -> None:
        """Note that the database's clock has stepped: leases may have ended by that alone."""
        with self._lock:
            self._stable_from = time.monotonic() + self.grace
        logger.warning(
            "The clock of the task lock database (%s) has stepped by %+.1f sec. Holders whose "
            "leases ended by that are given %.1f sec to renew them",
            self._where,
            seconds,
            self.grace,
        )

    def end(self, begun: float) -> None:
        """Note that it did.

        :param begun: when the statement was, on the monotonic clock; an answer that was on its way
            when the outage was noticed does not end it
        """
        if self._since is None and self._stable_from is not None:
            return
        with self._lock:
            if self._since is None:
                if self._stable_from is None:
                    self._stable_from = time.monotonic() + self.grace
                return
            if begun < self._since:
                return
            since, self._since, self.reason = self._since, None, None
            self._over_at = time.monotonic()
            # A server that is full again and again must not be doubted without an end: a dead run
            # would stand against its task for as long.
            doubted = self._stable_from is not None and self._over_at < self._stable_from
            if not (self._only_full and doubted):
                self._stable_from = self._over_at + self.grace
        if self._is_locked:
            logger.info(
                "The task lock tables are no longer locked (%s), %.1f sec after this replica "
                "noticed",
                self._where,
                time.monotonic() - since,
            )
            return
        logger.info(
            "The task lock database is back (%s), %.1f sec after this replica noticed",
            self._where,
            time.monotonic() - since,
        )
