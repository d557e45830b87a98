"""Outages of the database: which errors are an outage, and the grace in which holders can renew."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf

import psycopg
import sqlalchemy.exc

from apscheduler_tasklock._database.sqlstates import (
    CONFLICT_STATES,
    RESOURCE_STATES,
    TRANSIENT_STATES,
    ConflictError,
    ServerFullError,
    TableLockedError,
    UnconfirmedError,
    one_line,
    row_locked_error,
)
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError

logger = logger_of(__name__)

# The recovery grace lasts for at least so many seconds for each live replica, because all of them
# connect, renew and release at the same time when the server is back.
GRACE_OF_EACH = 0.01
# Limits the share of a lease that a statement may take. After a slower statement the recovery grace
# begins, because a database that was so slow may have kept other replicas from renewing in time.
SLOW_SHARE = 1 / 3

# The seconds for which a row is locked until the probe shows whether commits wait for a standby.
LOCKED_LONG = 1.0

# Parts of libpq's messages about rejected logins, because libpq has no error codes for them.
_REJECTIONS = (
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "not permitted",
    "no password supplied",
)
# Parts of libpq's messages about a server without a free connection.
_FULL = ("too many connections", "too many clients", "remaining connection slots")


class Outage:
    """Says whether the database is available, and whether a holder whose lease has ended is dead.

    One log line says when an outage begins, and one when it is over. A read ends no outage, because
    a database may answer reads while it takes no writes. What ends it depends on what has failed:

    - Of most outages the end is *proved*: a probe, which is a write, is sent until it is confirmed.
      No other request of the thread is sent before that.
    - An outage of some requests alone, for example because a table is locked or a disk is full,
      goes on in the log until no request has failed for some time.

    The recovery grace follows a start or an outage. During the grace a holder whose lease has ended
    does not count as dead, because it may only have been unable to renew its claim. In the words of
    other modules, the rows are not *believed* yet.

    :param where: the database, shown in logs
    :param attempt: limits a single attempt, in seconds
    :param timings: has the recovery grace
    :ivar reason: why the database is unavailable; ``None`` while it is available
    :ivar is_probed: whether the probe is to be sent before the next request
    :ivar live_replicas: how many replicas were alive at this replica's last look
    """

    def __init__(self, where: str, attempt: float = 0.0, timings: Timings | None = None) -> None:
        self._where = where
        self._attempt = attempt
        self._timings = timings or Timings()
        self._lock = threading.Lock()
        self.reason: str | None = None
        self.is_probed = False
        # Since when the outage that is logged goes on, and since when no request has failed in it;
        # both on the monotonic clock.
        self._since: float | None = None
        self._quiet_since: float | None = None
        # When the last outage that is over began and ended.
        self._last = inf, -inf
        self._told_kind, self._last_kind = "", ""
        self._is_locked = False  # whether a locked table is logged as the reason
        self._has_been = False  # whether there has been an outage
        self._only_full = False
        self._doubted_at = self._suspected_at = -inf
        self.live_replicas = 0
        self._shortest_lease = inf
        # When the grace began, on the monotonic clock; None: before the first answer. The grace
        # follows a start, too, because an outage may have ended right before the start.
        self._grace_began: float | None = None

    def begin(self, error: TaskLockDatabaseError) -> None:
        """Note that the database did not answer, or took no write."""
        with self._lock:
            full = isinstance(error, ServerFullError)
            self._only_full = full and (self.reason is None or self._only_full)
            self.reason = str(error)
            self._has_been = True
            self.is_probed = self.is_probed or not _is_of_some_requests(error)
            self._quiet_since = None
            self._last_kind = _kind_of(error)
            # If a locked table is the reason of the outage, this may be found out some time after
            # the outage began, because a busy server may answer too late which session has the
            # table locked.
            is_found = isinstance(error, TableLockedError) and not self._is_locked
            if self._since is not None and not is_found:
                return
            if self._since is None:
                self._since = time.monotonic()
            self._told_kind, self._is_locked = self._last_kind, is_found
        what = (
            "A task lock table is locked" if is_found else "The task lock database is unavailable"
        )
        logger.warning("%s (%s): %s (each run that is skipped is logged)", what, self._where, error)

    def note_locked(self, since: float) -> None:
        """Note that another session has a row locked. If it stays locked, send the probe.

        The row may be locked by a session whose commit waits for a standby, and that would be an
        outage. Other sessions commit sooner. In an outage that goes on the failed requests are the
        probe, or it is sent already.

        :param since: since when the row's request has been made, on the monotonic clock
        """
        now = time.monotonic()
        if self.reason is None and now > max(since, self._suspected_at) + LOCKED_LONG:
            self.is_probed, self._suspected_at = True, now

    @property
    def stable(self) -> bool:
        """Whether the database is available, and the recovery grace is over."""
        return self.reason is None and self._is_grace_over(time.monotonic())

    @property
    def grace(self) -> float:
        """The recovery grace, in seconds from the first answer."""
        of_fleet = self.live_replicas * GRACE_OF_EACH
        return self._attempt + max(self._timings.recovery_grace, of_fleet)

    def _is_grace_over(self, now: float) -> bool:
        return self._grace_began is not None and now >= self._grace_began + self.grace

    def note_lease(self, lease: float | None) -> None:
        """Note the lease of a claim. :meth:`end` compares slow statements with the shortest lease.

        Other replicas run the same tasks, so they have leases of the same length. Only one thread
        may call this method.
        """
        if lease is not None and lease < self._shortest_lease:
            self._shortest_lease = lease

    def believe(self) -> None:
        """End the recovery grace of the start, unless an outage has been noted since the start."""
        with self._lock:
            if not self._has_been:
                self._grace_began = -inf

    def idle_connection_ended(self, by_server: bool) -> None:
        """Note that an idle connection was ended, and begin the recovery grace.

        The server may have restarted. But a proxy may also end each idle connection after some
        time, without a message. So after a grace that began here, connections that end without a
        message begin no grace for a while. Otherwise one grace would follow the other, and in each
        of them a dead run would block its task.

        :param by_server: whether the server has said that it ends the connection
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
        """Begin the recovery grace: an answer took so long that holders may not have renewed."""
        with self._lock:
            self._doubt(time.monotonic())

    def _doubt(self, now: float) -> bool:
        """Begin a grace, unless the last one is not over; return whether one has begun."""
        believed = self._is_grace_over(now)
        if believed:
            self._grace_began = now
        return believed

    def clock_stepped(self, seconds: float) -> None:
        """Begin the recovery grace, because a step of the clock may have ended leases."""
        with self._lock:
            self._grace_began = time.monotonic()
        logger.warning(
            "The clock of the task lock database (%s) has stepped by %+.1f sec. Holders whose "
            "leases ended because of the step are given %.1f sec to renew them",
            self._where,
            seconds,
            self.grace,
        )

    def end(self, took: float = 0.0) -> None:
        """Note that the database answered a request.

        :param took: the seconds that the answer took. An answer that took more than a third of a
            lease begins the recovery grace.
        """
        if self.is_probed:
            return  # because a probe ends such an outage
        is_slow = took > self._shortest_lease * SLOW_SHARE
        if self._since is None and self._grace_began is not None and not is_slow:
            return
        with self._lock:
            now = time.monotonic()
            if self.reason is not None:
                self.reason = None
                self._quiet_since = now
                self._begin_grace(now)
            elif self._grace_began is None:
                self._grace_began = now
            elif is_slow:
                self._doubt(now)
            quiet_since = now if self._quiet_since is None else self._quiet_since
        if now >= quiet_since + self._timings.unlocked_after:
            self._report_end()

    def prove(self, took: float = 0.0) -> None:
        """Note that the database has confirmed the probe, so that there is no outage.

        :param took: as in :meth:`end`
        """
        self.is_probed = False
        if self.reason is None:  # the probe was sent because of a suspicion
            self.end(took)
            return
        with self._lock:
            self.reason = None
            self._quiet_since = time.monotonic()
            self._begin_grace(self._quiet_since)
        self._report_end()

    def _begin_grace(self, now: float) -> None:
        """Begin the recovery grace after an outage."""
        # If the server was only full, a grace that is not over goes on, and does not begin anew.
        # Otherwise a dead run would block its task while the server is often full.
        doubted = self._grace_began is not None and not self._is_grace_over(now)
        if not (self._only_full and doubted):
            self._grace_began = now

    def has_covered(self, first: float, last: float) -> bool:
        """Return whether the last outage went on from one time to another.

        It began up to an attempt before it was noticed.

        :param first: on the monotonic clock, as ``last``
        """
        with self._lock:
            goes_on = None if self._since is None else (self._since, self._quiet_since or inf)
            began, ended = goes_on or self._last
        return began - self._attempt <= first and last <= ended

    def _report_end(self) -> None:
        """Log that the outage is over."""
        with self._lock:
            since, until, is_locked = self._since, self._quiet_since, self._is_locked
            if since is None or until is None:
                return
            self._last = since, until
            self._since = self._quiet_since = None
            self._is_locked = False
            first, last = self._told_kind, self._last_kind
        changed = "" if first == last else f": first {first}, at last {last}"
        what = (
            "The task lock tables are no longer locked"
            if is_locked
            else "The task lock database is back"
        )
        logger.info(
            "%s (%s), %.1f sec after this replica noticed%s",
            what,
            self._where,
            until - since,
            changed,
        )


def _kind_of(error: TaskLockDatabaseError) -> str:
    """Return the kind of an outage in a few words."""
    if isinstance(error, UnconfirmedError):
        return "commits were not confirmed"
    if isinstance(error, TableLockedError):
        return "a table was locked"
    is_refused = isinstance(error.__cause__, psycopg.errors.ReadOnlySqlTransaction)
    if is_refused or "read-only" in str(error):
        return "the server was read-only"
    return "requests failed" if _is_of_some_requests(error) else "the server did not answer"


def _is_of_some_requests(error: TaskLockDatabaseError) -> bool:
    """Return whether other requests, such as a probe, may succeed while this one fails."""
    cause = error.__cause__
    state = (cause.sqlstate or "") if isinstance(cause, psycopg.Error) else ""
    return isinstance(error, TableLockedError) or (
        state.startswith(RESOURCE_STATES) and not isinstance(error, ServerFullError)
    )


def as_unavailable(error: BaseException) -> TaskLockDatabaseError | None:
    """Return the error to raise if another attempt may succeed, else ``None``."""
    if isinstance(error, TaskLockDatabaseError):
        return error
    if isinstance(error, sqlalchemy.exc.TimeoutError):
        return TaskLockDatabaseError("no connection became free in time: all are in use")
    cause = getattr(error, "orig", None) or error
    if not isinstance(cause, psycopg.Error):
        return None
    state = cause.sqlstate
    if state is not None:
        if not state.startswith(TRANSIENT_STATES):
            return None
    elif not isinstance(
        cause, (psycopg.OperationalError, psycopg.InterfaceError)
    ) or _is_rejected_login(str(cause)):
        return None
    return _kind(cause)(one_line(cause))


def _kind(error: psycopg.Error) -> Callable[[str], TaskLockDatabaseError]:
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return row_locked_error
    if (error.sqlstate or "").startswith(CONFLICT_STATES):
        return ConflictError
    if _is_full(error):
        return ServerFullError
    return TaskLockDatabaseError


def _is_full(error: psycopg.Error) -> bool:
    if error.sqlstate is not None:
        return isinstance(error, psycopg.errors.TooManyConnections)
    # A message about several hosts does not count, because another host may be unavailable for
    # another reason.
    said = str(error)
    return "Multiple connection attempts" not in said and any(sign in said for sign in _FULL)


def _is_rejected_login(message: str) -> bool:
    """Return whether a login was rejected for a reason that will last, so that it is no outage."""
    return any(sign in message for sign in _REJECTIONS)
