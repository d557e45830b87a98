"""The held lock, and ``current_lock()``, which returns the lock of the running job."""

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
    """The held lock of a task: a granted claim, until its release.

    :ivar name: the task's name
    :ivar token: the fencing token, which grows with each granted claim of the task. A resource that
        remembers the highest token can reject a write with an older token.
    :ivar run_time: the run time of the claim, as scheduled; ``None`` outside a scheduler. It is
        without jitter if all replicas have the job's run times in common. For a takeover it is the
        run time of the run that was taken over; for a manual run it is the time at which that run
        was started.
    :ivar is_takeover: whether the claim took over a dead run, or a run that was handed over
    :ivar dead_holder: the holder of the run that was taken over; ``None`` if this is no takeover
    :ivar window_start: the start of the window, in database time
    :ivar claim_id: the claim's id
    :ivar was_due_at: the database time at which the task was due before this claim, which may be an
        earlier run time that nobody has asked for; ``None`` if that was not known
    :ivar lease: seconds for which the claim stands after each renewal; ``None``: the claim stands
        until the maximum lock's end
    :ivar attempt: which attempt at its run time the run is: 1, or more if the job has failed before
        and is run again; see the option ``retries``
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
        was_due_at: datetime | None = None,
        attempt: int = 1,
    ) -> None:
        self.name = name
        self.token = token
        self.claim_id = claim_id
        self.run_time = run_time
        self.window_start = window_start
        self.is_takeover = dead_holder is not None
        self.dead_holder = dead_holder
        self.lease = lease
        self.was_due_at = was_due_at
        self.attempt = attempt
        self.note_renewal(locked_until, run_until, ends_at)
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
        """Whether the event loop of the run is closed, so that the lock is never released."""
        return self._loop is not None and self._loop.is_closed()

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child's copy of a lock that the parent will release."""
        return self._pid != os.getpid()

    @property
    def locked_until(self) -> datetime:
        """The database time at which the lease ends, unless the claim is renewed or released."""
        return self._locked_until

    @property
    def run_until(self) -> datetime:
        """The database time at which the maximum lock ends. No renewal goes beyond it."""
        return self._run_until

    @property
    def seconds_left(self) -> float:
        """Seconds until ``run_until``, by this replica's monotonic clock; never below 0."""
        return max(0.0, self._ends_at - time.monotonic())

    def database_time(self) -> datetime:
        """Return the database's time now, computed from its last answer about the claim."""
        return self._run_until - timedelta(seconds=self._ends_at - time.monotonic())

    @property
    def lease_left(self) -> float:
        """Seconds until the lease ends without a renewal, by the monotonic clock; never below 0."""
        return max(0.0, self._lease_ends_at - time.monotonic())

    @property
    def lost(self) -> bool:
        """Whether the claim does not stand any more, so that another replica may run the task.

        A lock is lost when one of these things has happened:

        - A renewal has found that another claim was granted, or that an operator freed the task.
        - The maximum lock has ended, by this replica's own monotonic clock.
        - The run was cut, for example by a shutdown.
        - The lock was released.

        A lost lock stays lost. An outage in which the lease cannot be renewed does not make
        ``lost`` true. So if only this replica is cut off from the database, another replica may run
        the task before ``lost`` is true here.
        """
        if self.seconds_left == 0:
            self._lost = True
        return self._ended or self._lost

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in another thread if a lock with a lease is lost before its release."""
        self._on_lost = callback
        if self._lost:
            self.lose()

    @property
    def has_lost_callback(self) -> bool:
        """Whether there is a callback for the loss that has not been called."""
        return self._on_lost is not None

    def lose(self) -> None:
        """Note that the claim does not stand any more, and call the callback."""
        self._lost = True
        callback, self._on_lost = self._on_lost, None
        if callback is not None and not self._ended:
            # In another thread, because listeners may take long, and renewals must not wait.
            call_application(callback)

    def cut(self) -> None:
        """Note that the run is cut. Its claim is released, so the callback is not called."""
        self._lost = True
        self._on_lost = None

    def note_renewal(self, locked_until: datetime, run_until: datetime, ends_at: float) -> None:
        """Note that the claim was renewed, and until when it stands now.

        :param ends_at: ``run_until`` on the monotonic clock
        """
        self._locked_until = locked_until
        self._run_until = run_until
        self._ends_at = ends_at
        self._lease_ends_at = ends_at - (run_until - locked_until).total_seconds()

    def end(self) -> bool:
        """Note that the claim is released; return whether this is its first release."""
        is_first, self._ended = not self._ended, True
        self._on_lost = None  # because the callback may refer to this lock, in a reference cycle
        return is_first

    def extend(self, by: float | timedelta) -> None:
        """Move the end of the maximum lock to a later time. Renewals go on until that time.

        The call waits for the database; in a coroutine, await :meth:`extend_async` instead.

        :param by: seconds or a ``timedelta``, above 0
        :raises TaskLockError: the claim does not stand any more; nothing was changed
        :raises TaskLockDatabaseError: the database is unavailable; try again
        """
        seconds = parse_positive_seconds(by, "by", f"extend() of task {self.name!r}")
        if self.inherited:
            raise TaskLockError(
                f"the lock of task {self.name!r} belongs to the parent process, and cannot be "
                "extended in a forked child"
            )
        if self.lost or not self._extender(self, seconds):
            self.lose()
            raise TaskLockError(
                f"the lock of task {self.name!r} (token {self.token}) has ended and cannot be "
                "extended; another replica may be running it"
            )

    async def extend_async(self, by: float | timedelta) -> None:
        """Do the same as :meth:`extend`, in another thread, so that the event loop goes on."""
        await asyncio.get_running_loop().run_in_executor(None, self.extend, by)

    def __repr__(self) -> str:
        return (
            f"<HeldLock {self.name!r} token={self.token} "
            f"locked_until={self._locked_until.isoformat()}{' lost' if self.lost else ''}>"
        )


def current_lock() -> HeldLock | None:
    """Return the lock under which the calling code runs, or ``None`` if there is none."""
    return _current.get()


@contextmanager
def holding(lock: HeldLock) -> Iterator[None]:
    """Make ``lock`` the current lock of this thread or coroutine while the context lasts."""
    before = _current.set(lock)
    try:
        yield
    finally:
        # A generator may be closed in another context than the one in which it began. In that other
        # context the lock was never current, so nothing has to be reset.
        with suppress(ValueError):
            _current.reset(before)
