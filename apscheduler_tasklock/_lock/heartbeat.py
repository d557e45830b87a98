"""The heartbeat: claims stand for a lease, and are renewed for as long as their holder lives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from apscheduler_tasklock._database.retry import jittered
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.lock import HeldLock

logger = logging.getLogger(__name__)

# Seconds for which the thread waits for a claim while there is nothing to renew.
LINGER = 5.0
# Seconds after which a renewal that failed is tried again, or sooner if the lease is short.
RETRY_INTERVAL = 0.5

Renew = Callable[[Sequence[HeldLock]], "dict[UUID, bool]"]


@dataclass(eq=False)
class _Lease:
    held: HeldLock
    due: float  # when to renew it, on the monotonic clock


class Heartbeat:
    """Renews what a replica holds, all of it with one statement.

    One thread, which starts with the first lease and is gone some time after the last. The workers
    and event loops that the jobs run on have no part in it, and may be as busy as they like.

    :param renew: renews claims, notes their new ends, and returns which stand, by id, and whether
        each was renewed; raises ``TaskLockDatabaseError`` if the database is unavailable,
        and ``TaskLockError`` if it rejects that
    :param on_idle: called when there is nothing to renew any more
    :param timings: has the number of renewals in a lease
    """

    def __init__(self, renew: Renew, on_idle: Callable[[], None], timings: Timings) -> None:
        self._renew = renew
        self._on_idle = on_idle
        self._per_lease = timings.renewals_per_lease
        self._changed = threading.Condition()
        self._leases: list[_Lease] = []
        self._is_rejected = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, held: HeldLock) -> None:
        """Renew a claim from now on, until it is removed or lost."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="tasklock-renewals", daemon=True)
                # Before all else: where threads are limited, it fails, and nobody gets the lock.
                thread.start()
                self._thread = thread
            self._leases.append(_Lease(held, self._first_due(held)))
            self._changed.notify_all()

    def remove(self, held: HeldLock) -> None:
        """Renew a claim no longer."""
        with self._changed:
            self._leases = [lease for lease in self._leases if lease.held is not held]
            self._changed.notify_all()

    def close(self) -> None:
        """Let the thread end as soon as there is nothing to renew."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to renew."""
        return not self._leases

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._leases and (pause := self._next_due() - time.monotonic()) > 0:
                    self._changed.wait(pause)
                if not self._leases:
                    self._on_idle()
                    # The next job is not far, as a rule, and a thread costs as much as a claim.
                    self._changed.wait_for(lambda: self._leases or self._closed, LINGER)
                    if not self._leases:
                        self._thread = None
                        break
                    continue
                batch = [lease for lease in self._leases if self._is_nearly_due(lease)]
            try:
                self._renew_all(batch)
            except Exception:  # nothing may end this thread unseen
                logger.exception("Locks could not be renewed; trying again")
                _put_off(batch)

    def _next_due(self) -> float:
        return min(lease.due for lease in self._leases)

    def _renew_all(self, batch: Sequence[_Lease]) -> None:
        """Renew what stands, and tell of what is lost."""
        standing = []
        # First: what is lost is told, whatever becomes of the others' renewal.
        for lease in batch:
            if lease.held.abandoned:
                logger.warning(
                    "Task %r: its event loop was closed while it ran; its lock (token %s) is no "
                    "longer renewed",
                    lease.held.name,
                    lease.held.token,
                )
                self.remove(lease.held)
            elif lease.held.lost:
                self._lose(lease)
            else:
                standing.append(lease)
        if not standing:
            return
        now = time.monotonic()
        try:
            renewed = self._renew([lease.held for lease in standing])
        except TaskLockError as error:
            self._warn_once(error)
            _put_off(standing)
            return
        self._is_rejected = False
        for lease in standing:
            lease.due = self._due(lease.held, now)
            if lease.held.claim_id not in renewed:
                self._lose(lease)
        # Somebody has their rows locked, maybe for a moment only.
        _put_off([lease for lease in standing if renewed.get(lease.held.claim_id) is False])

    def _warn_once(self, error: TaskLockError) -> None:
        """Warn, once until a renewal succeeds. An unavailable database is logged as an outage."""
        if not isinstance(error, TaskLockDatabaseError) and not self._is_rejected:
            self._is_rejected = True
            logger.warning("Locks could not be renewed; trying again: %s", error)

    def _lose(self, lost: _Lease) -> None:
        with self._changed:
            released = lost not in self._leases
            self._leases = [lease for lease in self._leases if lease is not lost]
        if not released:
            lost.held.lose()

    def _is_nearly_due(self, lease: _Lease) -> bool:
        """Tell whether a lease is renewed together with those that are due, in one statement."""
        assert lease.held.lease is not None
        return lease.due <= time.monotonic() + lease.held.lease / self._per_lease / 2

    def _first_due(self, held: HeldLock) -> float:
        assert held.lease is not None
        # The claim's answer may have taken most of the first lease.
        return time.monotonic() + min(held.lease, held.lease_left) / self._per_lease

    def _due(self, held: HeldLock, now: float) -> float:
        assert held.lease is not None
        # Not after the maximum lock: that it is lost by then is told at once.
        return now + min(held.lease / self._per_lease, held.seconds_left)


def _put_off(leases: Sequence[_Lease]) -> None:
    now = time.monotonic()
    for lease in leases:
        assert lease.held.lease is not None
        lease.due = now + jittered(min(RETRY_INTERVAL, lease.held.lease / 10))
