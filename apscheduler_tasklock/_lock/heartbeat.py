"""The heartbeat: claims stand for a lease, and are renewed for as long as their holder lives."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any
from uuid import UUID

from apscheduler_tasklock._database.deadline import Deadline
from apscheduler_tasklock._database.rejections import RENEWALS, Rejections
from apscheduler_tasklock._database.requests import Call, Outcome
from apscheduler_tasklock._database.side import Ticket
from apscheduler_tasklock._database.timings import Timings, jittered
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError
from apscheduler_tasklock.lock import HeldLock

logger = logger_of(__name__)

# Seconds after which a renewal that failed is tried again, or sooner if the lease is short.
RETRY_INTERVAL = 0.5
# Seconds before the end of a maximum lock at which it is renewed for the last time, or a fifth of
# what is left of it when it begins.
LAST_RENEWAL = 1.0
LAST_RENEWAL_SHARE = 0.2
# Seconds after its time at which a renewal that nobody has heard of counts as lost.
LOST_AFTER = 2.0
# Seconds that stand for the lease of a claim without one, for the time that its renewal may take.
UNLEASED_RENEWAL = 3.0

# Sends the renewals of claims on a cursor; gets the ids of those that are renewed for the last
# time, notes their new ends, and returns which stand, by id, and whether each was renewed.
Renew = Callable[[Any, Sequence[HeldLock], "frozenset[UUID]"], "dict[UUID, bool]"]


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

    The database's thread alone uses it. The workers and event loops that the jobs run on have no
    part in it, and may be as busy as they like.

    :param renew: sends renewals
    :param attempt: seconds within which an answer has to come
    :param timings: has the number of renewals in a lease
    :param rejections: is told if the database rejects a renewal
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
        self._sent_until = -inf  # until when a renewal is under way

    @property
    def due_at(self) -> float:
        """When something is due to be renewed, on the monotonic clock; ``inf``: nothing is.

        Nothing is while a renewal is under way. One that nobody hears of any more, because the
        thread has failed on the way, keeps no other from being sent.
        """
        return max(self._due_at, self._sent_until)

    @property
    def urgent_at(self) -> float:
        """When a renewal has to be sent at the latest: two answers before the first lease ends.

        On the monotonic clock.
        """
        left = [
            each.held.lease_left
            for each in self._leases.values()
            # A shorter one leaves no time for two.
            if each.held.lease is not None and each.held.lease > 2 * self._attempt
        ]
        # Those that have ended, as in an outage, are urgent no more.
        shortest = min((seconds for seconds in left if seconds > 0), default=inf)
        return time.monotonic() + shortest - 2 * self._attempt

    def add(self, held: HeldLock) -> None:
        """Renew a claim from now on, until it is removed or lost."""
        lease = self._leases[held.claim_id] = self._lease_of(held)
        self._due_at = min(self._due_at, lease.due)

    def remove(self, held: HeldLock) -> None:
        """Renew a claim no longer."""
        if self._leases.pop(held.claim_id, None) is not None and not self._leases:
            self._due_at = inf
            self._rejections.end(RENEWALS)  # there is none to be rejected

    def close(self, own: Container[UUID]) -> None:
        """Renew no more what has no lease: nobody is left who would tell of an overrun.

        :param own: the ids of the claims of whoever closes
        """
        for lease in list(self._leases.values()):
            if lease.held.lease is None and lease.held.claim_id in own:
                self.remove(lease.held)

    def ticket(self, now: float) -> Ticket[Any] | None:
        """Return the renewal of what is due. What is lost is told, whatever becomes of it."""
        standing = []
        for lease in [each for each in self._leases.values() if self._is_nearly_due(each, now)]:
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
        self._look_again()
        if not standing:
            return None
        until = self._until(standing, now)
        self._sent_until = until + LOST_AFTER
        return _RenewalTicket(self, standing, now, until)

    def _until(self, leases: Sequence[_Lease], now: float) -> float:
        shortest = min(lease.held.lease or UNLEASED_RENEWAL for lease in leases)
        return now + max(1.0, shortest / self._per_lease)

    def send(self, leases: Sequence[_Lease], cursor: Any) -> dict[UUID, bool]:
        """Renew what stands by now; return which do, and whether each was renewed."""
        wanted = [each for each in leases if each.held.claim_id in self._leases]
        last = frozenset(each.held.claim_id for each in wanted if each.is_last)
        if not wanted:
            return {}
        renewed = self._renew(cursor, [each.held for each in wanted], last)
        now = time.monotonic()
        for lease in wanted:
            claim_id = lease.held.claim_id
            # It is not, if a worker process has extended it since: it is renewed once more, soon.
            is_last = claim_id in last and lease.is_last
            lease.due = self._due(lease, now, is_last=is_last)
            if claim_id in last and not is_last:
                lease.due = now
            is_over = lease.held.lease is None and is_last and renewed.get(claim_id)
            if claim_id not in renewed or is_over:
                self._lose(lease)
        # Somebody has their rows locked, maybe for a moment only.
        _put_off([lease for lease in wanted if renewed.get(lease.held.claim_id) is False])
        return renewed

    def sent(self, leases: Sequence[_Lease], error: Exception | None) -> None:
        """Note what became of a renewal."""
        self._sent_until = -inf
        if error is None:
            self._rejections.end(RENEWALS)
        else:
            _put_off(leases)
            if not isinstance(error, TaskLockDatabaseError):  # which is logged as an outage
                self._rejections.begin(RENEWALS, error)
        self._look_again()

    def _look_again(self) -> None:
        self._due_at = min((lease.due for lease in self._leases.values()), default=inf)

    def _lose(self, lost: _Lease) -> None:
        is_held = self._leases.pop(lost.held.claim_id, None) is not None
        if is_held and lost.held.lease is not None:
            lost.held.lose()

    def _is_nearly_due(self, lease: _Lease, now: float) -> bool:
        """Tell whether a lease is renewed together with those that are due, in one statement."""
        early = 0.0 if lease.held.lease is None else lease.held.lease / self._per_lease / 2
        return lease.due <= now + early

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


class _RenewalTicket(Ticket["dict[UUID, bool]"]):
    """A renewal on its way. It goes before all else."""

    def __init__(
        self, heartbeat: Heartbeat, leases: Sequence[_Lease], now: float, until: float
    ) -> None:
        super().__init__(
            # What goes on after a shutdown has begun has the time that it always has.
            Call(partial(heartbeat.send, leases)),
            Deadline(None, until),
            came=now,
        )
        self.by = -inf
        self._heartbeat = heartbeat
        self._leases = leases

    def finish(self, outcome: Outcome[dict[UUID, bool]]) -> None:
        """Note what became of it."""
        self._heartbeat.sent(self._leases, outcome.error)


def last_renewal(held: HeldLock) -> float:
    """Return the seconds before the end of a new claim's maximum lock of its last renewal."""
    return min(LAST_RENEWAL, held.seconds_left * LAST_RENEWAL_SHARE)


def _put_off(leases: Sequence[_Lease]) -> None:
    now = time.monotonic()
    for lease in leases:
        interval = lease.last if lease.held.lease is None else lease.held.lease / 10
        lease.due = now + jittered(min(RETRY_INTERVAL, interval))
