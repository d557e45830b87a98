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

# Seconds of the recovery grace for each live replica of a fleet: as long as its renewals, releases
# and connects may take until the last replica has had its turn at a server that is back.
GRACE_OF_EACH = 0.01
# The share of a lease that a statement may take. One that takes longer has kept others from
# renewing such a lease in time.
SLOW_SHARE = 1 / 3


class Outage:
    """Logs that a database is unavailable once, and once that it is back.

    It also knows whether the rows can be believed: not right after a start or an outage, in which
    nobody could renew a lease.

    :param where: the database, shown in logs
    :param attempt: seconds that a single attempt may take
    :param timings: has the recovery grace
    :ivar reason: why it is unavailable, or ``None`` while it is there
    :ivar live_replicas: how many replicas were alive when this one looked last
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
        self._is_locked = False  # whether it is known to be that
        self._doubted_at = -inf
        self.live_replicas = 0
        self._shortest_lease = inf
        # When the grace began, on the monotonic clock. Nothing is known of the time before the
        # start: an outage may just have ended.
        self._grace_began: float | None = None

    def begin(self, error: TaskLockDatabaseError) -> None:
        """Note that the database did not answer."""
        with self._lock:
            self.reason = str(error)
            full = isinstance(error, ServerFullError)
            self._only_full = full and (self._since is None or self._only_full)
            is_new = self._since is None
            # Who has it locked may become known later: a busy server does not say so in time.
            is_found = isinstance(error, TableLockedError) and (is_new or not self._is_locked)
            if not (is_new or is_found):
                return
            if is_new:
                self._since = time.monotonic()
            self._is_locked = is_found
        if is_found:
            logger.warning(
                "A task lock table is locked (%s): %s (each run that is given up is logged)",
                self._where,
                error,
            )
            return
        logger.warning(
            "The task lock database is unavailable (%s): %s (each run that is given up is logged)",
            self._where,
            error,
        )

    @property
    def stable(self) -> bool:
        """Whether the database is there, and has been for long enough to believe its rows."""
        return self.reason is None and self._is_grace_over(time.monotonic())

    @property
    def grace(self) -> float:
        """Seconds from the first answer, after a start or an outage, until rows are believed.

        It is longer in a large fleet, whose replicas come back all at once.
        """
        of_fleet = self.live_replicas * GRACE_OF_EACH
        return self._attempt + max(self._timings.recovery_grace, of_fleet)

    def _is_grace_over(self, now: float) -> bool:
        return self._grace_began is not None and now >= self._grace_began + self.grace

    def note_lease(self, lease: float | None) -> None:
        """Note the lease of a claim: others have such a lease, too. Called in one thread."""
        if lease is not None and lease < self._shortest_lease:
            self._shortest_lease = lease

    def believe(self) -> None:
        """Believe the rows from now on, unless an outage is known: somebody else does already."""
        with self._lock:
            if self._over_at is None and self._since is None:
                self._grace_began = -inf

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

    def _doubt(self, now: float) -> bool:
        """Begin the grace, if rows are believed; tell whether that is so."""
        believed = self._is_grace_over(now)
        if believed:
            self._grace_began = now
        return believed

    def clock_stepped(self, seconds: float) -> None:
        """Note that the database's clock has stepped: leases may have ended by that alone."""
        with self._lock:
            self._grace_began = time.monotonic()
        logger.warning(
            "The clock of the task lock database (%s) has stepped by %+.1f sec. Holders whose "
            "leases ended by that are given %.1f sec to renew them",
            self._where,
            seconds,
            self.grace,
        )

    def end(self, begun: float, took: float = 0.0) -> None:
        """Note that it did.

        :param begun: when the statement was, on the monotonic clock; an answer that was on its way
            when the outage was noticed does not end it
        :param took: seconds that the statement took. For a third of a lease or longer, others had
            no answer to their renewals either.
        """
        is_slow = took > self._shortest_lease * SLOW_SHARE
        if self._since is None and self._grace_began is not None and not is_slow:
            return
        with self._lock:
            if self._since is None:
                if self._grace_began is None:
                    self._grace_began = time.monotonic()
                elif is_slow:
                    self._doubt(time.monotonic())
                return
            if begun < self._since:
                return
            since, self._since, self.reason = self._since, None, None
            self._over_at = time.monotonic()
            # A server that is full again and again must not be doubted without an end: a dead run
            # would stand against its task for as long.
            doubted = self._grace_began is not None and not self._is_grace_over(self._over_at)
            if not (self._only_full and doubted):
                self._grace_began = self._over_at
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
