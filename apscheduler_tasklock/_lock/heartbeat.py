"""The heartbeat: the renewals of a replica's claims."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any
from uuid import UUID

from apscheduler_tasklock._database.jitter import jittered
from apscheduler_tasklock._database.rejections import RENEWALS, Rejections
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._shutdown import NO_STOP
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError
from apscheduler_tasklock.lock import HeldLock

logger = logger_of(__name__)

# Limits the pause before a failed renewal is sent again, in seconds.
RETRY_INTERVAL = 0.5
# Limits the time from the last renewal to the end of the maximum lock: in seconds, and as a share
# of the maximum lock.
LAST_RENEWAL = 1.0
LAST_RENEWAL_SHARE = 0.2
# Limits the wait for a renewal's outcome after the renewal's end, in seconds. After that the
# next renewals are sent, although the outcome is not known.
LOST_AFTER = 2.0
# Limits how long the renewal of a claim without a lease is tried, as if the claim had a lease of so
# many seconds.
UNLEASED_RENEWAL = 3.0

# A function that sends renewals, and notes the new ends of the claims. It gets a cursor, the
# claims, and the ids of the claims that are renewed for the last time. It returns the ids of the
# claims that stand, each with whether the claim was renewed.
Renew = Callable[[Any, Sequence[HeldLock], "frozenset[UUID]"], "dict[UUID, bool]"]


@dataclass(eq=False)
class _Lease:
    held: HeldLock
    due: float  # when to renew it, on the monotonic clock
    last: float  # seconds from the last renewal to the end of the maximum lock

    @property
    def is_last(self) -> bool:
        """Whether a renewal that is sent now is the last one."""
        # The factor 1.5 is for a last renewal that is sent a little early, together with others.
        return self.held.seconds_left <= self.last * 1.5


class Heartbeat:
    """Renews all claims of a replica, together in one statement.

    The last renewal, right before the maximum lock ends, notes in the row that the holder was alive
    then. So a run that is not finished when the maximum lock ends has overrun, and is not dead. A
    claim without a lease has only this renewal.

    Only the replica's thread uses the heartbeat, so that busy workers and event loops delay no
    renewal.

    :param renew: sends renewals
    :param attempt: limits the wait for an answer, in seconds
    :param timings: has the number of renewals in a lease
    :param rejections: notes rejected renewals
    """

    def __init__(
        self,
        renew: Renew,
        attempt: float,
        timings: Timings,
        rejections: Rejections | None = None,
    ) -> None:
        self._rejections = rejections or Rejections()
        self._renew = renew
        self._attempt = attempt
        self._per_lease = timings.renewals_per_lease
        self._leases: dict[UUID, _Lease] = {}  # by the claim's id
        self._due_at = inf
        self._sent_until = -inf  # until when a sent renewal keeps others from being sent

    @property
    def due_at(self) -> float:
        """When the next renewal is due, on the monotonic clock; ``inf``: no renewal is due.

        No renewal is due while an earlier one is under way. The wait for the earlier one has a
        limit, because its outcome is never reported if the thread has failed.
        """
        return max(self._due_at, self._sent_until)

    @property
    def urgent_at(self) -> float:
        """When a renewal has to be sent at the latest, on the monotonic clock.

        There has to be time for two answers before the first lease ends.
        """
        left = [
            each.held.lease_left
            for each in self._leases.values()
            # Short leases are left out, because they have no time for two answers.
            if each.held.lease is not None and each.held.lease > 2 * self._attempt
        ]
        # Leases that have ended, for example in an outage, are not urgent any more.
        shortest = min((seconds for seconds in left if seconds > 0), default=inf)
        return time.monotonic() + shortest - 2 * self._attempt

    def add(self, held: HeldLock) -> None:
        """Begin to renew a claim, until it is removed or lost."""
        lease = self._leases[held.claim_id] = self._lease_of(held)
        self._due_at = min(self._due_at, lease.due)

    def remove(self, held: HeldLock) -> None:
        """Stop renewing a claim."""
        if self._leases.pop(held.claim_id, None) is not None and not self._leases:
            self._due_at = inf
            self._rejections.end(RENEWALS)  # because no claim is left to renew

    def close(self, own: Container[UUID]) -> None:
        """Remove a user's claims without a lease, because nobody would report that they overran.

        :param own: the ids of the claims of the user that closes
        """
        for lease in list(self._leases.values()):
            if lease.held.lease is None and lease.held.claim_id in own:
                self.remove(lease.held)

    def request(self, now: float) -> Request[Any] | None:
        """Return the request of the due renewals; ``None``: no renewal is to be sent.

        Lost and abandoned locks are removed and reported.
        """
        standing = []
        for lease in [each for each in self._leases.values() if self._is_nearly_due(each, now)]:
            if lease.held.abandoned:
                logger.warning(
                    "Task %r: its event loop was closed while the task ran; its lock (token %s) is "
                    "no longer renewed",
                    lease.held.name,
                    lease.held.token,
                )
                self.remove(lease.held)
            elif lease.held.lost:
                self._lose(lease)  # without a lease, the loss is reported at the end of the run
            else:
                standing.append(lease)
        self._look_again()
        if not standing:
            return None
        until = self._until(standing, now)
        self._sent_until = until + LOST_AFTER
        return _RenewalRequest(self, standing, now, until)

    def _until(self, leases: Sequence[_Lease], now: float) -> float:
        shortest = min(lease.held.lease or UNLEASED_RENEWAL for lease in leases)
        return now + max(1.0, shortest / self._per_lease)

    def send(self, leases: Sequence[_Lease], cursor: Any) -> dict[UUID, bool]:
        """Renew claims; return the ids of the standing claims, each with whether it was renewed."""
        wanted = [each for each in leases if each.held.claim_id in self._leases]
        last = frozenset(each.held.claim_id for each in wanted if each.is_last)
        if not wanted:
            return {}
        renewed = self._renew(cursor, [each.held for each in wanted], last)
        now = time.monotonic()
        for lease in wanted:
            claim_id = lease.held.claim_id
            # If a worker process has extended the lock meanwhile, this was not the last renewal.
            # The claim is then renewed once more at once, because this renewal has noted an overrun
            # in the row, and the next one removes that note.
            is_last = claim_id in last and lease.is_last
            lease.due = self._due(lease, now, is_last=is_last)
            if claim_id in last and not is_last:
                lease.due = now
            is_over = lease.held.lease is None and is_last and renewed.get(claim_id)
            if claim_id not in renewed or is_over:
                self._lose(lease)
        # If another session had a row locked, the row's renewal is sent again soon.
        _put_off([lease for lease in wanted if renewed.get(lease.held.claim_id) is False])
        return renewed

    def sent(self, leases: Sequence[_Lease], error: Exception | None) -> None:
        """Note the outcome of a renewal."""
        self._sent_until = -inf
        if error is None:
            self._rejections.end(RENEWALS)
        else:
            _put_off(leases)
            if not isinstance(error, TaskLockDatabaseError):  # an outage is logged elsewhere
                self._rejections.begin(RENEWALS, error)
        self._look_again()

    def _look_again(self) -> None:
        self._due_at = min((lease.due for lease in self._leases.values()), default=inf)

    def _lose(self, lost: _Lease) -> None:
        is_held = self._leases.pop(lost.held.claim_id, None) is not None
        if is_held and lost.held.lease is not None:
            lost.held.lose()

    def _is_nearly_due(self, lease: _Lease, now: float) -> bool:
        """Return whether a lease is due, or is due so soon that it is renewed with the due ones."""
        early = 0.0 if lease.held.lease is None else lease.held.lease / self._per_lease / 2
        return lease.due <= now + early

    def _lease_of(self, held: HeldLock) -> _Lease:
        last = seconds_from_last_renewal_to_end(held)
        wait = held.seconds_left - last
        if held.lease is not None:
            # Count with the time that is left of the lease, because the claim's answer may have
            # taken most of it.
            wait = min(wait, min(held.lease, held.lease_left) / self._per_lease)
        return _Lease(held, time.monotonic() + wait, last)

    def _due(self, lease: _Lease, now: float, *, is_last: bool) -> float:
        """Return when a lease is due again after a renewal.

        :param is_last: whether that was the last renewal. If so, the lease is due at the end of the
            maximum lock, so that the loss of the lock is reported.
        """
        left = lease.held.seconds_left - (0.0 if is_last else lease.last)
        interval = inf if lease.held.lease is None else lease.held.lease / self._per_lease
        return now + max(0.0, min(interval, left))


class _RenewalRequest(Request["dict[UUID, bool]"]):
    """The request of renewals, which is sent before all other requests."""

    goes_first = True

    def __init__(
        self, heartbeat: Heartbeat, leases: Sequence[_Lease], now: float, until: float
    ) -> None:
        super().__init__(NO_STOP, came=now, until=until)
        self.by = -inf
        self._heartbeat = heartbeat
        self._leases = leases

    def send(self, cursor: Any) -> dict[UUID, bool]:
        """Renew the claims."""
        return self._heartbeat.send(self._leases, cursor)

    def finish(self, outcome: Outcome[dict[UUID, bool]]) -> None:
        """Note the outcome."""
        self._heartbeat.sent(self._leases, outcome.error)


def seconds_from_last_renewal_to_end(held: HeldLock) -> float:
    """Return the seconds from a new claim's last renewal to the end of its maximum lock."""
    return min(LAST_RENEWAL, held.seconds_left * LAST_RENEWAL_SHARE)


def _put_off(leases: Sequence[_Lease]) -> None:
    now = time.monotonic()
    for lease in leases:
        interval = lease.last if lease.held.lease is None else lease.held.lease / 10
        lease.due = now + jittered(min(RETRY_INTERVAL, interval))
