"""The held lock, and ``current_lock()``: what a job may know of the lock it runs under."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime, timedelta
from uuid import UUID

from apscheduler_tasklock._application import call_application
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.options import parse_positive_seconds

_current: ContextVar[HeldLock | None] = ContextVar("apscheduler_tasklock_current", default=None)


class HeldLock:
    """A granted claim.

    :ivar name: the task's name
    :ivar token: fencing token: larger with every granted claim of the task. A resource that
        remembers the highest token it has seen can refuse a write with an older one.
    :ivar run_time: the run time that the claim is for, as scheduled; ``None`` outside a scheduler.
        Of a window that was taken over, that of the run that died; of a run that was asked for by
        hand, when it was begun.
    :ivar is_takeover: whether this runs the window of a holder that died, or handed it over
    :ivar dead_holder: that holder, or ``None``
    :ivar window_start: start of its window, in database time
    :ivar claim_id: what releases match on
    :ivar lease: seconds for which the claim stands after each renewal, or ``None`` if it stands
        until the maximum lock
    """

    def __init__(
        self,
        *,
        name: str,
        token: int,
        claim_id: UUID,
        run_time: datetime | None,
        window_start: datetime,
        locked_until: datetime,
        run_until: datetime,
        ends_at: float,
        extender: Callable[[HeldLock, float], bool],
        lease: float | None = None,
        dead_holder: str | None = None,
    ) -> None:
        self.name = name
        self.token = token
        self.claim_id = claim_id
        self.run_time = run_time
        self.window_start = window_start
        self.is_takeover = dead_holder is not None
        self.dead_holder = dead_holder
        self.lease = lease
        self._locked_until = locked_until
        self._run_until = run_until
        self._ends_at = ends_at
        self._lease_ends_at = ends_at - (run_until - locked_until).total_seconds()
        self._extender = extender
        self._ended = False
        self._pid = os.getpid()
        self._lost = False
        self._on_lost: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def runs_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note that a coroutine on this event loop runs under the lock."""
        self._loop = loop

    @property
    def abandoned(self) -> bool:
        """Whether it was left to an event loop that is closed, so that nobody will release it."""
        return self._loop is not None and self._loop.is_closed()

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child's copy of what its parent holds, and will release."""
        return self._pid != os.getpid()

    @property
    def locked_until(self) -> datetime:
        """Database time until which the task is held if it is neither renewed nor released."""
        return self._locked_until

    @property
    def run_until(self) -> datetime:
        """Database time at which the maximum lock ends, beyond which no renewal goes."""
        return self._run_until

    @property
    def seconds_left(self) -> float:
        """Seconds until ``run_until``, by this replica's monotonic clock; never below 0."""
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def lease_left(self) -> float:
        """Seconds until the lease ends if it is not renewed, by the monotonic clock; 0 or more."""
        return max(0.0, self._lease_ends_at - time.monotonic())

    @property
    def lost(self) -> bool:
        """Whether the claim stands no more, so that another replica may run the task.

        That is so if another claim was granted or somebody freed the task, which the next renewal
        finds out; if the maximum lock has ended, by this replica's own monotonic clock; if a
        shutdown has cut the run; and after the release. It stays so. A lease that could not be
        renewed during an outage is not lost by that alone. If only this replica is cut off, another
        one may run the task before this says so.
        """
        if self.seconds_left == 0:
            self._lost = True
        return self._ended or self._lost

    def on_lost(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` in a thread when a lock with a lease is lost while it is held."""
        self._on_lost = tell
        if self._lost:
            self.lose()

    @property
    def has_lost_callback(self) -> bool:
        """Whether somebody is to be called when it is lost."""
        return self._on_lost is not None

    def lose(self) -> None:
        """Note that the claim does not stand any more, and tell who wants to know."""
        self._lost = True
        tell, self._on_lost = self._on_lost, None
        if tell is not None and not self._ended:
            # Listeners may take long; other claims have to be renewed meanwhile.
            call_application(tell)

    def cut(self) -> None:
        """Note that the run is cut short and its claim is ended; tell nobody."""
        self._lost = True
        self._on_lost = None

    def note_renewal(self, locked_until: datetime, run_until: datetime, ends_at: float) -> None:
        """Note until when the claim stands; ``ends_at`` is ``run_until`` on the monotonic clock."""
        self._locked_until = locked_until
        self._run_until = run_until
        self._ends_at = ends_at
        self._lease_ends_at = ends_at - (run_until - locked_until).total_seconds()

    def end(self) -> bool:
        """Note that the claim is released, and return whether it had not been."""
        is_first, self._ended = not self._ended, True
        self._on_lost = None  # which refers to this
        return is_first

    def extend(self, by: float | timedelta) -> None:
        """Move the end of the maximum lock to a later time.

        A lease goes on being renewed until then.

        Waits for the database; in a coroutine, await :meth:`extend_async` instead.

        :param by: seconds or a ``timedelta``, above 0
        :raises TaskLockError: the claim has ended already; nothing was changed
        :raises TaskLockDatabaseError: the database is unavailable; ask again
        """
        seconds = parse_positive_seconds(by, "by", f"extend() of task {self.name!r}")
        if self.inherited:
            raise TaskLockError(
                f"the lock of task {self.name!r} is its parent process's, and cannot be extended "
                "in a forked child"
            )
        if self.lost or not self._extender(self, seconds):
            self.lose()
            raise TaskLockError(
                f"the lock of task {self.name!r} (token {self.token}) has ended and cannot be "
                "extended; another replica may be running it"
            )

    async def extend_async(self, by: float | timedelta) -> None:
        """Do the same as :meth:`extend` in a thread, so that the event loop goes on."""
        await asyncio.get_running_loop().run_in_executor(None, self.extend, by)

    def __repr__(self) -> str:
        return (
            f"<HeldLock {self.name!r} token={self.token} "
            f"locked_until={self._locked_until.isoformat()}{' lost' if self.lost else ''}>"
        )


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
