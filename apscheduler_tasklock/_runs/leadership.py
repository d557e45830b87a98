"""Leader mode: which replica asks for claims first.

The leader asks for its run times at once. The other replicas are followers. A follower defers its
run times until a look has read the rows of their tasks. It drops the run times that were run, and
asks for the others. Leadership decides nothing else. So no run time is lost if the leader fails, or
does not have a job that a follower has, and the locks alone keep a run time from being run twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

from apscheduler_tasklock._database.sequences import Statements
from apscheduler_tasklock._lock.protocol_messages import (
    ClaimRequest,
    Lead,
    Refusal,
    Resign,
    TaskRow,
)
from apscheduler_tasklock._lock.statements import LEADER
from apscheduler_tasklock._lock.user import ReplicaUser
from apscheduler_tasklock._runs.deferred_runs import LastRun, Outlook
from apscheduler_tasklock._runs.run import QueuedRun
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.options import LONGEST_LEADER_LEASE

logger = logger_of(__name__)

# The least lease of a leader, as a multiple of the interval between its looks, because it renews
# the lease with each look.
LEAST_LOOKS = 3


# The ids with which schedulers lead, by the leader's row with its database and table, and the
# processes that have set them. A forked child, which may start its copy of a scheduler, leads under
# an id of its own.
_leader_ids: WeakKeyDictionary[Any, dict[tuple[str, ...], tuple[int, str]]] = WeakKeyDictionary()


class Leadership:
    """A replica's part in the leadership of its namespace. Each look takes or renews it.

    :param user: the executor as a user of its replica
    :param namespace: the namespace whose replicas share a leader
    :param lease: seconds after which another replica may lead, if the leader does not renew
    :param interval: returns the seconds between two looks
    :param clock: returns the time on the monotonic clock
    :param has_own_jobs: returns whether this replica has jobs for whose run times a leader asks
        first. Without one it does not lead, because it would ask for nothing, and the others would
        ask for everything later than they could.
    :ivar row: the name of the leader's row
    :ivar leader_id: the id with which this replica leads
    :ivar leads: whether this replica leads, as its last look has found it. In an outage it stays
        true for the one that led last, and for one that was cut off or suspended before.
    """

    def __init__(
        self,
        user: ReplicaUser,
        namespace: str,
        lease: float,
        interval: Callable[[], float],
        clock: Callable[[], float] | None = None,
        has_own_jobs: Callable[[], bool] = lambda: True,
    ) -> None:
        self._clock = clock or _monotonic
        self._user = user
        self._lease = lease
        self._interval = interval
        self._has_own_jobs = has_own_jobs
        self._head_start = user.settings.timings.head_start
        self._closed = False
        self._until = -inf  # when the lease ends, on the monotonic clock
        self._first_look_at = inf  # on the monotonic clock
        # When the database began to reject the looks at the rows, on the monotonic clock.
        self._rejected_since = inf
        self._may_lead = False  # whether the row may name this replica, as far as is known
        self.row = LEADER + namespace
        self.leader_id = user.replica_id
        self.leads = False

    def share(self, scheduler: Any) -> None:
        """Lead together with the scheduler's other executors, under the id of the first of them.

        If only one of them led, the jobs of the others would always wait for a look. Called when
        the executor starts.
        """
        ids = _leader_ids.setdefault(scheduler, {})
        row = self._user.where, self._user.table.fullname, self.row
        process, leader_id = ids.get(row, (None, ""))
        if process == os.getpid():
            self.leader_id = leader_id
        else:
            ids[row] = os.getpid(), self.leader_id

    @property
    def is_leader(self) -> bool:
        """Whether this replica leads, and its lease has not ended."""
        return self.leads and self._clock() < self._until

    @property
    def follows(self) -> bool:
        """Whether this replica defers its run times until a look.

        While the database is unavailable no look can tell whether a run time was run, so the
        replica asks for each run time at once, as without leader mode. It does so too if the
        database has rejected the looks for a lease, as for a missing right. Otherwise all run times
        would wait for the right, and then be run late, whatever their grace time.
        """
        if self._clock() >= self._rejected_since + self._lease:
            return False
        return not (self.is_leader or self._closed) and self._user.outage.reason is None

    def note_rejected(self) -> None:
        """Note that the database has rejected a look at the rows."""
        self._rejected_since = min(self._rejected_since, self._clock())

    def _is_new(self, at: float) -> bool:
        """Return whether another replica may still defer run times that this replica never had.

        If this replica ran a later run time first, those run times would be lost, because their
        windows come before the window of the task's last run.
        """
        return at < self._first_look_at + self._head_start + self._interval()

    def is_early(self, due_at: float, as_of: float) -> bool:
        """Return whether this replica does not ask yet, because another replica asks first.

        :param due_at: when the run was due, on the monotonic clock
        :param as_of: when the look began, on the monotonic clock
        """
        return self.follows and (as_of < due_at + self._head_start or self._is_new(as_of))

    def take_or_renew(self, row: TaskRow | None) -> Statements[None]:
        """Take or renew the leadership, unless another replica leads.

        :param row: the leader's row as the look has found it; ``None``: there is no row
        """
        now = self._clock()
        self._first_look_at, self._rejected_since = min(self._first_look_at, now), inf
        if row is not None:
            is_own = row.holder == self.leader_id
            is_led_by_another = not (is_own or row.finished or row.dead or _is_forged(row))
            if is_led_by_another or (self._is_new(now) and not self.leads):
                self._may_lead = is_own
                self._note(leads=False)
                return
        if not self._has_own_jobs():
            if self.leads:
                self._resign()
            self._note(leads=False)
            return
        lease = min(max(self._lease, LEAST_LOOKS * self._interval()), LONGEST_LEADER_LEASE)
        sent = self._clock()
        self._may_lead = True
        lead = self._user.database.carrying_out(Lead(self.row, self.leader_id, lease))
        leads = yield self._unless_closed(lead)
        self._until, self._may_lead = sent + lease, bool(leads)
        self._note(leads=bool(leads))

    def _resign(self) -> None:
        """Give the leadership up, if this replica leads. Does not wait."""
        self._user.database.begin_despite_stop(Resign(self.row, self.leader_id))

    def _unless_closed(self, statement: Callable[[Any], object]) -> Callable[[Any], bool]:
        return lambda cursor: not self._closed and bool(statement(cursor))

    def _note(self, *, leads: bool) -> None:
        if leads != self.leads:
            logger.info(
                "This replica (%r) %s the replicas of the namespace %r",
                self.leader_id,
                "leads" if leads else "no longer leads",
                self.row.removeprefix(LEADER),
            )
        self.leads = leads

    def close(self) -> None:
        """Give the leadership up, so that another replica can lead. Does not wait."""
        if not self._closed:
            self._closed = True
            if self._may_lead and self._user.outage.reason is None:
                self._resign()
            self.leads = False


def _monotonic() -> float:
    return time.monotonic()  # looked up at each call, because simulations replace the clock


@dataclass
class FollowerRun:
    """Says what becomes of a follower's run, when a look has read the row of its task.

    :ivar leadership: the replica's part in the leadership
    :ivar run: the run
    :ivar request: returns the request of the run's claim. Calls the trigger, which may be the
        application's own code.
    :ivar due_at: when the run was due, or an earlier run that was dropped because this run is
        deferred instead, on the monotonic clock. The head start of the leader begins then.
    :ivar refusal: set when the run time was run, so that the run is refused
    """

    leadership: Leadership
    run: QueuedRun
    request: Callable[[], ClaimRequest]
    due_at: float = field(init=False)
    refusal: Refusal | None = field(default=None)

    def __post_init__(self) -> None:
        self.due_at = self.run.due_at

    def replace(self, other: FollowerRun) -> None:
        """Take the place of an earlier run of the job, because only the last run time is run.

        If each run time had a head start of its own, a job with a short period would never be asked
        for, because its last run time is always a new one.
        """
        self.due_at = min(self.due_at, other.due_at)

    def outlook(self, last: LastRun) -> Outlook:
        """Return what becomes of the run.

        The run is asked for if there is a doubt, because its claim decides in any case.
        """
        self.refusal = None
        if self.leadership.is_early(self.due_at, last.as_of):
            return Outlook.WAITS
        if last.row is not None and self._was_run(last.row, last.as_of):
            self.refusal = _refusal_by(last.row)
            return Outlook.REFUSED
        return Outlook.ASKED_AGAIN

    def _was_run(self, row: TaskRow, as_of: float) -> bool:
        """Return whether a claim of the run would find its window taken.

        :param as_of: when the look began, on the monotonic clock
        """
        try:
            request = self.request()
        except Exception:  # noqa: BLE001  # a custom trigger's own code; the claim reports the error
            return False
        if row.window_until is None:
            return False
        if row.window_schedule != request.schedule:
            return False  # because the window is of another schedule, and may end earlier
        # As seconds, because Python compares two times of one time zone by their wall clocks, which
        # repeat an hour when summer time ends.
        begun, until = row.window_start.timestamp(), row.window_until.timestamp()
        exact = request.run_time if request.exact else None
        if exact is not None and exact.timestamp() <= begun:
            # Also if the run has failed, and its window was opened again. Without leader mode the
            # claim would have been refused while that run went on.
            return True
        if until < begun:
            return False  # because the window was opened again
        # As late as it can be, because the answer has come some time after the look has begun.
        reckoned = row.database_time.timestamp() - max(0.0, as_of - self.run.due_at)
        run_time = reckoned if exact is None else exact.timestamp()
        return run_time < min(until, begun + request.min_lock)


def _refusal_by(row: TaskRow) -> Refusal:
    """Return the refusal of a run time whose window another claim has taken."""
    taken_until: datetime = row.locked_until or row.database_time
    return Refusal(
        holder=row.holder,
        token=row.token,
        locked_until=taken_until,
        reason="window",
        renewed=False,
        blocked=False,
        unfinished=not row.finished,
        waits=False,
        window_start=row.window_start,
        runs=row.runs,
        is_manual=row.manual,
    )


def _is_forged(row: TaskRow) -> bool:
    """Return whether a leader's lease ends later than that of any replica."""
    until = row.locked_until or row.database_time
    return (until - row.database_time).total_seconds() > LONGEST_LEADER_LEASE
