"""What the database rejects of a replica's work, and when that is tried again.

A right may be revoked for some seconds, and a table be made anew with others. So nothing is
switched off for good: all that is rejected goes on being tried, and who looks after it tells it
here. One WARNING says when it begins, with the remedy, and one INFO line when it is over.
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

# What can be rejected, as log lines and operators' commands name it.
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
# Nobody needs these: a role may lack the right to delete on purpose.
OLD_ROWS = "old rows"
OLD_REPLICAS = "old replicas"
OLD_HISTORY = "old history"
REPLICAS = "list of replicas"


@dataclass
class _Cause:
    """Why something is rejected.

    :ivar since: on the monotonic clock
    :ivar quiet: whether it is told at the level INFO, and to no operator
    :ivar suffering: what it concerns now
    :ivar suffered: what it has concerned since it began
    """

    since: float
    quiet: bool
    suffering: set[str] = field(default_factory=set)
    suffered: dict[str, None] = field(default_factory=dict)


@dataclass
class _Rejection:
    """One kind of work that is rejected.

    :ivar cause: the key of its cause
    :ivar message: what is told of it, with the remedy
    :ivar retry_at: when it is tried again, on the monotonic clock
    :ivar until_taken: whether it is over only when the database has taken it: no missing right,
        table or column explains it
    """

    cause: str
    message: str
    retry_at: float
    until_taken: bool


class Rejections:
    """What the database rejects of one replica's work now. Safe to share between threads.

    :param retry_after: seconds after which work that somebody leaves out is tried again
    :param clock: a monotonic clock
    :ivar any: whether something is rejected
    :ivar suspected: whether a claim or a release was rejected, so that the rights are looked at
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
        """Note that the database has rejected something. It is logged once for each cause.

        :param what: one of this module's names
        :param error: why, with the remedy
        :param quiet: whether operators need not know
        :param until_taken: whether no missing right, table or column explains it
        :param leave_out: whether it is left out for a while; else the next is tried at once
        """
        now, message, cause = self._clock(), str(error), _cause_of(error, quiet=quiet)
        with self._lock:
            before = self._rejected.get(what)
            if before is not None and before.cause != cause:  # another one tells that it goes on
                self._leave(what, before.cause)
            retry_at = now + self._retry_after if leave_out else now
            self._rejected[what] = _Rejection(cause, message, retry_at, until_taken)
            is_new = cause not in self._causes
            known = self._causes.setdefault(cause, _Cause(now, quiet))
            known.suffering.add(what)
            known.suffered[what] = None
            self.any = True
        if is_new:
            logger.log(
                logging.INFO if quiet else logging.WARNING,
                "Rejected by the database, and tried again: %s: %s",
                what,
                message,
            )

    def end(self, what: str) -> None:
        """Note that the database takes something."""
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
                ", ".join(over.suffered),
            )

    def permitted(self, what: str) -> None:
        """Note that no right, table or column is missing for something.

        Was it rejected for another reason, it is tried again now.
        """
        with self._lock:
            rejection = self._rejected.get(what)
            if rejection is None:
                return
            rejection.retry_at = self._clock()
        if not rejection.until_taken:
            self.end(what)

    def _leave(self, what: str, key: str) -> _Cause | None:
        """Let a cause concern something no longer; return the cause if it is over."""
        cause = self._causes[key]
        cause.suffering.discard(what)
        return None if cause.suffering else self._causes.pop(key)

    def has(self, what: str) -> bool:
        """Tell whether something is rejected."""
        return what in self._rejected

    def is_left_out(self, what: str) -> bool:
        """Tell whether something is rejected, and not yet to be tried again."""
        if not self.any:
            return False
        rejection = self._rejected.get(what)
        return rejection is not None and self._clock() < rejection.retry_at

    def suspect(self) -> None:
        """Let the next look find out which rights there are."""
        self.suspected = True

    def told(self) -> tuple[str, ...]:
        """Return what operators are to know, each as ``"history: <why, and what to do>"``."""
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
    """Return what an error has in common with those of the same cause.

    That is what it says before PostgreSQL's own words, and before the remedy, which names as many
    rights as are known to be missing. The right to delete is another matter.
    """
    cause, *_ = re.split(r"; | \(PostgreSQL: ", str(error), maxsplit=1)
    return f"quiet: {cause}" if quiet else cause
