"""What a claim came to, and ``current_lock()``: what a job may know of the lock it runs under."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.options import parse_positive_seconds

_current: ContextVar[HeldLock | None] = ContextVar("apscheduler_tasklock_current", default=None)


class HeldLock:
    """A granted claim.

    :ivar name: the task's name
    :ivar token: fencing token: grows by one with every claim of the task. A resource that
        remembers the highest token it has seen can refuse a write with an older one.
    :ivar run_time: the run time that the claim is for, as scheduled; ``None`` outside a scheduler
    :ivar claim_id: what releases match on
    """

    def __init__(
        self,
        *,
        name: str,
        token: int,
        claim_id: UUID,
        run_time: datetime | None,
        locked_until: datetime,
        ends_at: float,
        extender: Callable[[HeldLock, float], datetime | None],
    ) -> None:
        self.name = name
        self.token = token
        self.claim_id = claim_id
        self.run_time = run_time
        self._locked_until = locked_until
        self._ends_at = ends_at
        self._extender = extender
        self._ended = False

    @property
    def locked_until(self) -> datetime:
        """Database time until which the task is held if the job neither ends nor extends it."""
        return self._locked_until

    @property
    def seconds_left(self) -> float:
        """Seconds until ``locked_until``, by this replica's monotonic clock; never below 0."""
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def lost(self) -> bool:
        """Whether the claim has ended, so that another replica may run the task."""
        return self._ended or self.seconds_left == 0

    def end(self) -> bool:
        """Note that the claim is released, and return whether that is news."""
        news, self._ended = not self._ended, True
        return news

    def extend(self, by: float | timedelta) -> None:
        """Move ``locked_until`` further away.

        :param by: seconds or a ``timedelta``, above 0
        :raises TaskLockError: the claim has ended already; nothing was changed
        :raises TaskLockDatabaseError: the database is away; ask again
        """
        seconds = parse_positive_seconds(by, "by", f"extend() of task {self.name!r}")
        until = self._extender(self, seconds)
        if until is None:
            self._ends_at = 0.0
            raise TaskLockError(
                f"the lock of task {self.name!r} (token {self.token}) has ended and cannot be "
                "extended; another replica may be running it"
            )
        self._locked_until = until
        self._ends_at += seconds

    def __repr__(self) -> str:
        return (
            f"<HeldLock {self.name!r} token={self.token} "
            f"locked_until={self._locked_until.isoformat()}{' lost' if self.lost else ''}>"
        )


@dataclass(frozen=True)
class Refusal:
    """A claim that another replica's claim, or an earlier run of the window, stood against.

    :ivar holder: replica of the last claim
    :ivar token: its fencing token
    :ivar locked_until: database time until which the task is held
    :ivar reason: ``"running"`` or ``"window"``
    :ivar blocked: whether a run that is still going on, or whose holder died, stands against a
        window that is new
    """

    holder: str
    token: int
    locked_until: datetime
    reason: str
    blocked: bool


def current_lock() -> HeldLock | None:
    """Return the lock that the running job holds, or ``None`` outside such a job."""
    return _current.get()


@contextmanager
def holding(lock: HeldLock) -> Iterator[None]:
    """Make ``lock`` the current one for this thread or coroutine."""
    before = _current.set(lock)
    try:
        yield
    finally:
        # A generator may be closed in another context than it was begun in; nothing is current
        # there that had to be put back.
        with suppress(ValueError):
            _current.reset(before)
