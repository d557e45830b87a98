"""Users of a replica: an executor, a job store, or a ``TaskLocks``, from its start to its close."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Engine

from apscheduler_tasklock._application import flush_application
from apscheduler_tasklock._database.plain_future import PlainFuture
from apscheduler_tasklock._lock.database import Database
from apscheduler_tasklock._lock.held_locks import HeldLocks
from apscheduler_tasklock._lock.replica import LockSettings, Replica, shared_replica
from apscheduler_tasklock._lock.rights import Rights
from apscheduler_tasklock._lock.test_doubles import active_stand_in
from apscheduler_tasklock._shutdown import (
    SHORTEST_CLOSING,
    SHORTEST_FLUSH,
    SHUTDOWN_LIMIT,
    Closing,
    Shutdown,
    off_the_loop,
)


class ReplicaUser:
    """A user of a replica, ready when it is made, and closed once. Safe to share between threads.

    A forked child makes a user of its own.

    :raises TaskLockOptionError: the task lock cannot use the database
    :param replica: the replica, which the executors and the job store of a scheduler share; by
        default a new one
    :ivar replica: the replica
    :ivar database: the database, as this user asks it
    :ivar locks: the locks that this user claims, extends and releases
    :ivar rights: checks the tables and the rights that this user needs
    :ivar outage: whether the database is available, and its rows are believed
    :ivar rejections: the work of the replica that the database rejects now
    :ivar thread: the replica's thread
    """

    def __init__(self, settings: LockSettings, replica: Replica | None = None) -> None:
        self.settings = settings
        self.replica_id = settings.replica_id
        self.replica = replica or Replica(settings)
        self.table, self.where = self.replica.table, self.replica.where
        self.outage = self.replica.outage
        self.rejections = self.replica.rejections
        self.thread = self.replica.thread
        self._closing = Closing()
        self.database = Database(self.replica, settings, self._closing)
        self.locks = HeldLocks(self.replica, settings, self.database, self._closing)
        self.rights = Rights(self.replica, settings, self.database)
        # Cancelled by a stop. It is no `threading.Event`, because that has a lock, which the thread
        # that a signal handler interrupts may have taken.
        self._pause: PlainFuture[None] = PlainFuture()
        self._listens = False
        self._parent: ReplicaUser | None = None
        self.replica.join(self._closing)

    def for_child(self) -> ReplicaUser:
        """Return a user for a forked child, which uses nothing of the parent's.

        The child's user keeps a reference to the parent's. Otherwise the garbage collector of the
        child would close the inherited connection, which would end the connection in the parent,
        too. The child's user is that of another replica, because several children of one parent may
        run schedulers.
        """
        replica_id = f"{self.settings.replica_id} child {os.getpid()}"
        child = ReplicaUser(replace(self.settings, replica_id=replica_id))
        child._parent = self
        if isinstance(self.settings.database, Engine):
            self.settings.database.dispose(close=False)
        if self.closed:
            child.close()
        return child

    @property
    def closed(self) -> bool:
        """Whether claiming is stopped."""
        return self._closing.stopped

    def listen(self, heard: Callable[[], object]) -> None:
        """Listen for other replicas' changes of jobs, if the connection can listen.

        :param heard: called in the replica's thread when a job was changed, or may have been; must
            not wait
        """
        self._listens = True
        self.thread.listen(self.database.jobs.channel, heard, self.rejections)

    def wait(self, seconds: float) -> bool:
        """Wait for so many seconds, or until claiming is stopped; return whether it is stopped."""
        return self._pause.wait(seconds)

    def stop_claiming(self) -> None:
        """Stop claiming. Each claim under way ends within 1.5 seconds. Releases are still sent.

        May be called from a signal handler.
        """
        self._closing.stop()
        self._pause.cancel()
        self.replica.note_stopped()
        self.thread.wake()

    def close(self, *, blocking: bool = False, shutdown: Shutdown | None = None) -> None:
        """Stop claiming, send the pending releases, and close the connection.

        While the database is unavailable, the releases are tried for 3 seconds. A lock that is
        still held after this call can be released, on a new connection that is closed after the
        release. If others use the connection, it stays open, and what has not been released in this
        time is released later.

        :param blocking: whether this thread waits for the releases even if an event loop runs in
            it. Otherwise a new thread waits in place of an event loop's thread, and the process
            waits for the new thread before it ends.
        :param shutdown: the scheduler's shutdown, after whose end releases are not tried any more.
            If executors or job stores that share the connection are shut down after this user, the
            last of them waits for all releases.
        """
        self.stop_claiming()
        now = time.monotonic()
        if shutdown is not None:
            limit = shutdown.over_at
        else:  # the limit counts from the stop, or from the last release after the stop
            limit = self._closing.over_at(self.locks.released_at, SHUTDOWN_LIMIT)
        latest = min(now + self.settings.timings.closing_timeout, limit)
        waits = shutdown is None or not shutdown.has_others
        close = partial(self._close, max(now + SHORTEST_CLOSING, latest), waits=waits)
        if blocking:
            close()
        else:
            off_the_loop(close)

    def _close(self, abandon_at: float, *, waits: bool) -> None:
        own = self.locks.claim_ids()
        self.thread.call(lambda: self.replica.heartbeat.close(own))
        if self.replica.leave(self._closing):
            self.replica.close(abandon_at)
        elif waits or not self.replica.closing.stopped:
            self._wait_for_releases(abandon_at)
        else:
            return  # because the last user of the connection waits for all releases
        flush_application(max(abandon_at, time.monotonic() + SHORTEST_FLUSH))

    def _wait_for_releases(self, until: float) -> None:
        """Wait for this user's releases.

        The other users go on with the connection, so a release that has not arrived by then is
        still sent.
        """
        if self._listens:
            self.thread.stop_listening()
        self.thread.hurry_releases()
        mine = self.database.protocol
        self.thread.wait_for_requests(
            lambda request: (
                request.is_release and request.sender is mine and request.not_before < until
            ),
            until,
        )


def user_or_stand_in(user: ReplicaUser) -> ReplicaUser:
    """Return whom to ask now: this user, or in a test that of a stand-in."""
    active, settings = active_stand_in(), user.settings
    if active is None or settings.stand_in is not None:
        return user
    return active.user(settings, lambda: ReplicaUser(replace(settings, stand_in=active.stand_in)))


def user_at_start(user: ReplicaUser, scheduler: Any) -> ReplicaUser:
    """Return the user with which an executor or job store starts: the given or a new one.

    The returned user uses the stand-in that is set now, or the database if no stand-in is set. It
    shares the replica of the scheduler's other executors and job store, if they use the same
    database and table.

    :param scheduler: the scheduler; ``None`` for an executor that uses no database
    :raises TaskLockOptionError: another executor or job store of the scheduler connects to the same
        database in another way
    """
    active = active_stand_in()
    stand_in = None if active is None else active.stand_in
    is_usable = not user.closed and user.settings.stand_in is stand_in
    settings = replace(user.settings, stand_in=stand_in)
    if stand_in is not None or scheduler is None:
        return user if is_usable else ReplicaUser(settings)
    shared = shared_replica(scheduler, settings, user.replica if is_usable else None)
    if is_usable and user.replica is shared:
        return user
    if is_usable:
        user.close(blocking=True)  # because it may have opened a connection before the start
    return ReplicaUser(settings, shared)
