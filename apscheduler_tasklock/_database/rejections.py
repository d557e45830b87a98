"""Rejections: which work of a replica the database rejects, and when that work is tried again.

No work is switched off for good, because the reason may pass: for example, a right that was revoked
is granted again after some seconds. One WARNING says when a rejection begins, with the remedy, and
one INFO line says when it is over.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# The kinds of work that can be rejected, as log lines and operators' commands name them.
CLAIMS = "claims"
RENEWALS = "renewals"
LOOKS = "looks"
REGISTRATIONS = "registrations"
REMOVED_TASKS = "removed tasks"
SIGN_OF_LIFE = "sign of life"
RUN_HISTORY = "history"
JOB_STORE = "job store"
LIST_OF_JOBS = "list of the job store"
ENDED_JOBS = "ended jobs"
NOTIFICATIONS = "notifications"
# Rejections of the following kinds are logged at INFO, because a role may lack the rights for them
# on purpose.
OLD_ROWS = "old rows"
OLD_REPLICAS = "old replicas"
OLD_HISTORY = "old history"
REPLICAS = "list of replicas"


@dataclass
class _Cause:
    """A cause of rejections, such as a missing right.

    :ivar since: when the cause began, on the monotonic clock
    :ivar quiet: whether the cause is logged at the level INFO, and not reported to operators
    :ivar affects: the kinds of work that are rejected now
    :ivar affected: all kinds of work that were rejected since the cause began
    """

    since: float
    quiet: bool
    affects: set[str] = field(default_factory=set)
    affected: dict[str, None] = field(default_factory=dict)


@dataclass
class _Rejection:
    """The rejection of one kind of work.

    :ivar cause: the key of the rejection's cause
    :ivar message: the error, with the remedy
    :ivar retry_at: when the work is tried again, on the monotonic clock
    :ivar until_taken: whether only a success of the work ends the rejection. Otherwise a check that
        finds no right, table or column missing ends it, too
    """

    cause: str
    message: str
    retry_at: float
    until_taken: bool


class Rejections:
    """The work of one replica that the database rejects now. Safe to share between threads.

    :param retry_after: seconds for which rejected work is left out before it is tried again
    :param clock: a monotonic clock
    :ivar any: whether any work is rejected
    :ivar suspected: whether the next look at the tasks' rows also checks the rights, because a
        claim or a release was rejected
    """

    def __init__(
        self, retry_after: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._retry_after = retry_after
        self._clock = clock
        self._lock = threading.Lock()
        self._rejected: dict[str, _Rejection] = {}
        self._causes: dict[str, _Cause] = {}
        self.any = False
        self.suspected = False

    def begin(
        self,
        what: str,
        error: Exception | str,
        *,
        quiet: bool = False,
        until_taken: bool = False,
        leave_out: bool = True,
    ) -> None:
        """Note that the database has rejected a kind of work. Each cause is logged once.

        :param what: the kind of work, one of this module's names
        :param error: the error, with the remedy
        :param quiet: whether the cause is logged at the level INFO, and not reported to operators
        :param until_taken: whether only a success of the work ends the rejection
        :param leave_out: whether the work is left out for ``retry_after`` seconds
        """
        now, message, cause = self._clock(), str(error), _cause_of(error, quiet=quiet)
        with self._lock:
            before = self._rejected.get(what)
            if before is not None and before.cause != cause:
                self._leave(what, before.cause)
            retry_at = now + self._retry_after if leave_out else now
            self._rejected[what] = _Rejection(cause, message, retry_at, until_taken)
            is_new = cause not in self._causes
            known = self._causes.setdefault(cause, _Cause(now, quiet))
            known.affects.add(what)
            known.affected[what] = None
            self.any = True
        if is_new:
            logger.log(
                logging.INFO if quiet else logging.WARNING,
                "Rejected by the database, and tried again: %s: %s",
                what,
                message,
            )

    def end(self, what: str) -> None:
        """Note that the database takes a kind of work again."""
        if not self.any:
            return
        with self._lock:
            rejection = self._rejected.pop(what, None)
            over = None if rejection is None else self._leave(what, rejection.cause)
            self.any = bool(self._rejected)
        if over is not None:
            logger.info(
                "No longer rejected by the database, after %.1f sec: %s",
                self._clock() - over.since,
                ", ".join(over.affected),
            )

    def permitted(self, what: str) -> None:
        """Note that no right, table or column is missing for a kind of work.

        This ends the work's rejection. A rejection that only a success can end goes on, but the
        work is tried again now.
        """
        with self._lock:
            rejection = self._rejected.get(what)
            if rejection is None:
                return
            rejection.retry_at = self._clock()
        if not rejection.until_taken:
            self.end(what)

    def _leave(self, what: str, key: str) -> _Cause | None:
        """Remove a kind of work from a cause; return the cause if it rejects no other work."""
        cause = self._causes[key]
        cause.affects.discard(what)
        return None if cause.affects else self._causes.pop(key)

    def has(self, what: str) -> bool:
        """Return whether a kind of work is rejected."""
        return what in self._rejected

    def is_left_out(self, what: str) -> bool:
        """Return whether a kind of work is rejected, and not yet to be tried again."""
        if not self.any:
            return False
        rejection = self._rejected.get(what)
        return rejection is not None and self._clock() < rejection.retry_at

    def reported(self) -> tuple[str, ...]:
        """Return the rejections for operators, each as ``"history: <why, and what to do>"``."""
        if not self.any:
            return ()
        with self._lock:
            return tuple(
                sorted(
                    f"{what}: {rejection.message}"
                    for what, rejection in self._rejected.items()
                    if not self._causes[rejection.cause].quiet
                )
            )


def _cause_of(error: Exception | str, *, quiet: bool) -> str:
    """Return the key of an error's cause.

    The key is the message without PostgreSQL's own text and without the remedy, because both differ
    between errors of one cause. A quiet rejection has another key than a loud one with the same
    message, because the two are logged and reported differently.
    """
    cause, *_ = re.split(r"; | \(PostgreSQL: ", str(error), maxsplit=1)
    return f"quiet: {cause}" if quiet else cause
