"""The heartbeat: claims stand for a lease, and are renewed for as long as their holder lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from uuid import UUID

from apscheduler_tasklock._database.rejections import RENEWALS, Rejections
from apscheduler_tasklock._database.retry import jittered
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.lock import HeldLock

logger = logger_of(__name__)

# Seconds for which the thread waits for a claim while there is nothing to renew.
LINGER = 5.0
# Seconds after which a renewal that failed is tried again, or sooner if the lease is short.
RETRY_INTERVAL = 0.5
# Seconds before the end of a maximum lock at which it is renewed for the last time, or a fifth of
# what is left of it when it begins.
LAST_RENEWAL = 1.0
LAST_RENEWAL_SHARE = 0.2

Renew = Callable[[Sequence[HeldLock], "frozenset[UUID]"], "dict[UUID, bool]"]


@dataclass(eq=False)
class _Lease:
    held: HeldLock
    due: float  # when to renew it, on the monotonic clock
    last: float  # seconds before the end of the maximum lock of the last renewal

    @property
    def is_last(self) -> bool:
        """Whether a renewal that is sent now is the last one."""
        # It is due at `last`; a batch of others may take it along a little sooner.
        return self.held.seconds_left <= self.last * 1.5


class Heartbeat:
    """Renews what a replica holds, all of it with one statement.

    The last renewal, right before the maximum lock ends, says that the run is about to overrun it
    while its holder lives. A claim without a lease has that one only.

    One thread, which starts with the first lease and is gone some time after the last. The workers
    and event loops that the jobs run on have no part in it, and may be as busy as they like.

    :param renew: gets claims, and the ids of those that are renewed for the last time; renews them,
        notes their new ends, and returns which stand, by id, and whether each was renewed; raises
        ``TaskLockDatabaseError`` if the database is unavailable, and ``TaskLockError`` if it
        rejects that
    :param on_idle: called when there is nothing to renew any more, after a renewal
    :param timings: has the number of renewals in a lease
    :param rejections: is told if the database rejects a renewal
    """

    def __init__(
        self,
        renew: Renew,
        on_idle: Callable[[], None],
        timings: Timings,
        rejections: Rejections | None = None,
    ) -> None:
        self._rejections = rejections or Rejections()
        self._renew = renew
        self._on_idle = on_idle
        self._per_lease = timings.renewals_per_lease
        self._changed = threading.Condition()
        self._leases: dict[UUID, _Lease] = {}  # by the claim's id
        self._looks_at = 0.0  # when the thread looks at them again, on the monotonic clock
        self._idle_since: float | None = None
        self._has_renewed = False
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
            lease = self._leases[held.claim_id] = self._lease_of(held)
            # Else the thread looks early enough. To wake it for each claim costs as much as one.
            if lease.due < self._looks_at:
                self._changed.notify_all()

    def remove(self, held: HeldLock) -> None:
        """Renew a claim no longer."""
        with self._changed:
            self._leases.pop(held.claim_id, None)
            if not self._leases and (self._has_renewed or self._closed):
                self._changed.notify_all()

    def close(self) -> None:
        """Let the thread end as soon as there is nothing to renew."""
        with self._changed:
            self._closed = True
            for lease in [each for each in self._leases.values() if each.held.lease is None]:
                del self._leases[lease.held.claim_id]
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to renew."""
        return not self._leases

    def _work(self) -> None:
        while (batch := self._wait()) is not None:
            try:
                self._renew_all(batch)
            except Exception:  # nothing may end this thread unseen
                logger.exception("Locks could not be renewed; trying again")
                _put_off(batch)

    def _wait(self) -> list[_Lease] | None:
        """Wait for leases to renew; ``None`` if there has been none for a while."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._leases:
                    self._idle_since = None
                    leases = self._leases.values()
                    due = min(lease.due for lease in leases)
                    if due <= now:
                        return [lease for lease in leases if self._is_nearly_due(lease)]
                    # Not as late as a long lease is due: what ends meanwhile does not wake it.
                    self._looks_at = min(due, now + LINGER)
                else:
                    self._looks_at = self._note_idle(now) + LINGER
                    if self._closed or self._looks_at <= now:
                        self._thread = None
                        return None
                self._changed.wait(self._looks_at - now)

    def _note_idle(self, now: float) -> float:
        """Note that there is nothing to renew; return since when, on the monotonic clock."""
        if self._idle_since is None:
            self._idle_since = now
        if self._has_renewed:
            self._has_renewed = False
            self._rejections.end(RENEWALS)  # there is none to be rejected
            self._on_idle()
        return self._idle_since

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
                self._lose(lease)  # without a lease its job is told when it ends
            else:
                standing.append(lease)
        if not standing:
            return
        now = time.monotonic()
        self._has_renewed = True
        try:
            last = frozenset(lease.held.claim_id for lease in standing if lease.is_last)
            renewed = self._renew([lease.held for lease in standing], last)
        except TaskLockError as error:
            self._note_rejected(error)
            _put_off(standing)
            return
        self._rejections.end(RENEWALS)
        for lease in standing:
            is_last = lease.held.claim_id in last
            lease.due = self._due(lease, now, is_last=is_last)
            is_over = lease.held.lease is None and is_last and renewed.get(lease.held.claim_id)
            if lease.held.claim_id not in renewed or is_over:
                self._lose(lease)
        # Somebody has their rows locked, maybe for a moment only.
        _put_off([lease for lease in standing if renewed.get(lease.held.claim_id) is False])

    def _note_rejected(self, error: TaskLockError) -> None:
        if not isinstance(error, TaskLockDatabaseError):  # which is logged as an outage
            self._rejections.begin(RENEWALS, error)

    def _lose(self, lost: _Lease) -> None:
        with self._changed:
            released = self._leases.pop(lost.held.claim_id, None) is None
        if not released and lost.held.lease is not None:
            lost.held.lose()

    def _is_nearly_due(self, lease: _Lease) -> bool:
        """Tell whether a lease is renewed together with those that are due, in one statement."""
        early = 0.0 if lease.held.lease is None else lease.held.lease / self._per_lease / 2
        return lease.due <= time.monotonic() + early

    def _lease_of(self, held: HeldLock) -> _Lease:
        last = last_renewal(held)
        wait = held.seconds_left - last
        if held.lease is not None:
            # The claim's answer may have taken most of the first lease.
            wait = min(wait, min(held.lease, held.lease_left) / self._per_lease)
        return _Lease(held, time.monotonic() + wait, last)

    def _due(self, lease: _Lease, now: float, *, is_last: bool) -> float:
        """Return when it is due after a renewal.

        :param is_last: whether that was the last one. Then the next look tells that it is lost.
        """
        left = lease.held.seconds_left - (0.0 if is_last else lease.last)
        interval = inf if lease.held.lease is None else lease.held.lease / self._per_lease
        return now + max(0.0, min(interval, left))


def last_renewal(held: HeldLock) -> float:
    """Return the seconds before the end of a new claim's maximum lock of its last renewal."""
    return min(LAST_RENEWAL, held.seconds_left * LAST_RENEWAL_SHARE)


def _put_off(leases: Sequence[_Lease]) -> None:
    now = time.monotonic()
    for lease in leases:
        interval = lease.last if lease.held.lease is None else lease.held.lease / 10
        lease.due = now + jittered(min(RETRY_INTERVAL, interval))
