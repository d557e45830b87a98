"""The lock protocol: what a replica asks of the database, and what it makes of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Table

from apscheduler_tasklock._lock import statements
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.schema.table import quoted_name

# How often a claim looks for its row, which others may insert and delete meanwhile.
ROUNDS = 10


class TaskLockProtocol:
    """The statements for one task lock table, run on a psycopg cursor in autocommit mode.

    :param lock_timeout: seconds that a claim waits in the server for a row that somebody has locked
    """

    def __init__(self, table: Table, lock_timeout: float = 10.0) -> None:
        # Quoted for PostgreSQL by SQLAlchemy. Its Core is not used to send the statements: that
        # adds about as much time again as a whole refused claim takes.
        self._table = table
        name = quoted_name(table).replace("%", "%%")  # psycopg's placeholders begin with it
        self._lock_timeout = f"{max(1, round(lock_timeout * 1000))}ms"
        self._claim = statements.claim(name)
        self._claim_first = statements.first_claim(name)
        self._look = statements.look(name)
        self._take_over = statements.take_over(name)
        self._look_after_takeover = statements.look_after_takeover(name)
        self._release = statements.release(name)
        self._end_lease = statements.end_lease(name)
        self._give_up = statements.give_up(name)
        self._extend = statements.extend(name)
        self._renew = statements.renew(name)
        self._read = statements.read(name)
        self._prune = statements.prune(name)

    def with_lock_timeout(self, seconds: float) -> TaskLockProtocol:
        """Return one that waits for so long in the server for a row that somebody has locked."""
        return TaskLockProtocol(self._table, seconds)

    def claim(self, cursor: Any, request: ClaimRequest) -> ClaimAnswer:
        """Try to take the task for one run time. A refused claim writes nothing.

        :raises TaskLockError: the task's row can be neither read nor inserted
        """
        parameters = {**vars(request), "lock_timeout": self._lock_timeout}
        for _ in range(ROUNDS):
            row = cursor.execute(self._claim, parameters).fetchone()
            if row is None:
                # There is no row yet; or there is one since, and the claim goes on with that.
                row = cursor.execute(self._claim_first, parameters).fetchone()
            elif _looks_free(ClaimAnswer(*row)):
                # Another claim won while this statement waited for it, and the row in this
                # statement's snapshot is the one from before. Look at what that claim made of it.
                row = cursor.execute(self._look, parameters).fetchone()
            if row is not None:
                return ClaimAnswer(*row)
        raise TaskLockError(
            f"task {request.task_name!r}: its row can be neither read nor inserted, although "
            "PostgreSQL reports no error; is there a policy or a trigger on the task lock table?"
        )

    def take_over(self, cursor: Any, request: TakeoverRequest) -> ClaimAnswer | None:
        """Try to take over the claim of a dead holder. ``None``: the task has no row any more."""
        parameters = {**vars(request), "lock_timeout": self._lock_timeout}
        row = cursor.execute(self._take_over, parameters).fetchone()
        if row is not None and not row[0]:
            # Maybe as it was before another replica took it over; see claim().
            row = cursor.execute(self._look_after_takeover, parameters).fetchone()
        return None if row is None else ClaimAnswer(*row)

    def release(
        self, cursor: Any, task_name: str, claim_id: UUID, *, keep_window: bool
    ) -> ReleaseAnswer | None:
        """End a claim. ``None`` means that it no longer stood, and that nothing was changed."""
        row = cursor.execute(
            self._release,
            {
                "task_name": task_name,
                "claim_id": claim_id,
                "keep_window": keep_window,
                "lock_timeout": self._lock_timeout,
            },
        ).fetchone()
        return None if row is None else ReleaseAnswer(*row)

    def end_lease(
        self,
        cursor: Any,
        task_name: str,
        claim_id: UUID,
        *,
        handed_over: bool,
        holders: Sequence[str] | None = None,
    ) -> ReleaseAnswer | None:
        """End the lease of a run that did not end, and will not.

        :param handed_over: whether its holder hands it over; else it counts as dead
        :param holders: only if one of these holds it
        :return: the task's row, or ``None`` if the claim no longer stood
        """
        row = cursor.execute(
            self._end_lease,
            {
                "task_name": task_name,
                "claim_id": claim_id,
                "handed_over": handed_over,
                "holders": None if holders is None else list(holders),
                "lock_timeout": self._lock_timeout,
            },
        ).fetchone()
        return None if row is None else ReleaseAnswer(*row)

    def give_up(self, cursor: Any, task_name: str, claim_id: UUID) -> bool:
        """Finish a dead run that is not to be run again; tell whether this replica did."""
        parameters = {
            "task_name": task_name,
            "claim_id": claim_id,
            "lock_timeout": self._lock_timeout,
        }
        return cursor.execute(self._give_up, parameters).fetchone() is not None

    def extend(
        self, cursor: Any, task_name: str, claim_id: UUID, by: float, lease: float | None
    ) -> LockTimes | None:
        """Move the end of a claim's maximum lock by seconds. ``None``: it stands no more."""
        row = cursor.execute(
            self._extend,
            {
                "task_name": task_name,
                "claim_id": claim_id,
                "by": by,
                "lease": lease,
                "lock_timeout": self._lock_timeout,
            },
        ).fetchone()
        return None if row is None else LockTimes(*row)

    def renew(self, cursor: Any, renewals: Sequence[Renewal]) -> dict[UUID, LockTimes]:
        """Let claims stand for another lease each.

        :return: when each of them ends now, by claim id. One that is missing stands no more.
        """
        rows = cursor.execute(
            self._renew,
            {
                "task_names": [renewal.task_name for renewal in renewals],
                "claim_ids": [renewal.claim_id for renewal in renewals],
                # psycopg refuses a list of integers and floats.
                "leases": [float(renewal.lease) for renewal in renewals],
            },
        ).fetchall()
        return {claim_id: LockTimes(*times) for claim_id, *times in rows}

    def read(
        self, cursor: Any, task_names: Sequence[str], always: Sequence[str] = ()
    ) -> tuple[list[RunState], datetime]:
        """Return which of these tasks have a dead run, and the database's time.

        :param always: tasks whose last run is returned whatever its state
        :raises TaskLockDatabaseError: the server is read-only. While nobody can renew or release,
            a run that looks dead need not be; and what a standby shows may be old.
        """
        rows = cursor.execute(
            self._read, {"task_names": list(task_names), "always": list(always)}
        ).fetchall()
        if any(read_only for *_, read_only in rows):
            raise TaskLockDatabaseError("the server is read-only")
        database_time = rows[0][-2]
        return [RunState(*row) for *row, _ in rows if row[0] is not None], database_time

    def prune(self, cursor: Any, age: float) -> int:
        """Delete rows of one-off jobs that were over so many seconds ago; return how many."""
        return int(cursor.execute(self._prune, {"age": age}).rowcount)


def _looks_free(answer: ClaimAnswer) -> bool:
    return answer.new_window and not (answer.running or answer.granted or answer.waits)


@dataclass(frozen=True)
class ClaimRequest:
    """What a replica asks for: one run time of one task.

    :ivar task_name: the task's name
    :ivar lag: seconds since the run time, by the replica's clock; never below 0
    :ivar latest: the latest time the database's clock can have had when ``lag`` was read
    :ivar min_lock: seconds from the run time until which its window lasts
    :ivar max_lock: seconds after which a run has to have ended
    :ivar replica_id: who asks, shown in logs
    :ivar claim_id: made for this request; asking twice with it claims once
    :ivar lease: seconds after which a holder that does not renew counts as dead; ``None``: the
        maximum lock
    :ivar run_time: the run time itself, where every replica computes the same one; else ``None``
    :ivar runs: what is run, so that nobody runs something else in its place: the function and, of
        a one-off job, its run date; ``""`` for ``hold``
    :ivar one_off: whether no other run time follows, so that the row can be deleted one day
    :ivar failover: whether the window is to be run again if its holder dies
    :ivar stable: whether the rows can be believed. If not, as after an outage, a run whose lease
        has ended may be going on, and stands against the claim.
    """

    task_name: str
    lag: float
    latest: datetime | None
    min_lock: float
    max_lock: float
    replica_id: str
    claim_id: UUID
    lease: float | None = None
    run_time: datetime | None = None
    runs: str = ""
    one_off: bool = False
    failover: bool = False
    stable: bool = True


@dataclass(frozen=True)
class TakeoverRequest:
    """What a replica asks for that runs the window of a dead holder again.

    :ivar task_name: the task's name
    :ivar dead_claim_id: the claim of the dead holder; no other is taken over
    :ivar replica_id: who asks, shown in logs
    :ivar claim_id: made for this request; asking twice with it claims once
    :ivar lease: seconds after which a holder that does not renew counts as dead; ``None``: the end
        of the maximum lock of the run that died, which a takeover keeps
    :ivar failover: whether the window is to be run again if this holder dies as well
    """

    task_name: str
    dead_claim_id: UUID
    replica_id: str
    claim_id: UUID
    lease: float | None = None
    failover: bool = True


@dataclass(frozen=True)
class ClaimAnswer:
    """The task's row after a claim.

    :ivar granted: whether the claim stands and the job may run
    :ivar running: whether a run is going on, granted or not
    :ivar new_window: whether the window asked for was new, and was not granted
    :ivar unfinished: whether the last claim was never released: it is running, or its holder died
    :ivar waits: whether a dead run stands against the claim: its window is run again first, or the
        rows cannot be believed yet
    :ivar window_start: start of the last claim's window
    :ivar holder: replica of the last claim
    :ivar token: fencing token of the last claim
    :ivar locked_until: database time until which the last claim holds the task
    :ivar run_until: database time at which its maximum lock ends
    :ivar database_time: when this was decided
    :ivar claim_id: what a release of the last claim has to match on
    """

    granted: bool
    running: bool
    new_window: bool
    unfinished: bool
    waits: bool
    window_start: datetime
    holder: str
    token: int
    locked_until: datetime
    run_until: datetime
    database_time: datetime
    claim_id: UUID


@dataclass(frozen=True)
class ReleaseAnswer:
    """The task's row after a release that found its claim.

    :ivar locked_until: database time at which the task's window ends
    :ivar database_time: when it was released
    """

    locked_until: datetime
    database_time: datetime


@dataclass(frozen=True)
class Renewal:
    """A claim that is to stand for another lease.

    :ivar lease: seconds, from the renewal on
    """

    task_name: str
    claim_id: UUID
    lease: float


@dataclass(frozen=True)
class LockTimes:
    """When a claim ends, after it was renewed or extended.

    :ivar locked_until: database time at which its lease ends; ``None`` if it could not be renewed,
        since somebody has locked the row
    :ivar run_until: database time at which its maximum lock ends
    :ivar database_time: when this was decided
    """

    locked_until: datetime | None
    run_until: datetime
    database_time: datetime


@dataclass(frozen=True)
class RunState:
    """The last run of a task, as its row tells of it.

    :ivar finished: whether it was released
    :ivar dead: whether it was not, and its lease has ended
    :ivar expired: whether its maximum lock has ended
    :ivar failover: whether its holder wanted it to be run again
    :ivar deaths: how many holders died since a run of the task ended
    :ivar handovers: how many holders handed this window over
    :ivar handed_over: whether its holder has handed it over, so that nobody need wait
    :ivar runs: what it runs, as of :class:`ClaimRequest`
    :ivar window_start: start of its window
    :ivar holder: who runs it, or ran it
    :ivar database_time: when this was read
    """

    task_name: str
    claim_id: UUID
    token: int
    finished: bool
    dead: bool
    expired: bool
    failover: bool
    deaths: int
    handovers: int
    handed_over: bool
    runs: str
    window_start: datetime
    holder: str
    database_time: datetime


@dataclass(frozen=True)
class Refusal:
    """A claim that another replica's claim, or an earlier run of the window, stood against.

    :ivar holder: replica of the last claim
    :ivar token: its fencing token
    :ivar locked_until: database time until which the task is held
    :ivar reason: ``"running"`` or ``"window"``
    :ivar renewed: whether its holder renews the claim, and so was alive less than a lease ago
    :ivar blocked: whether a run that is still going on, or whose holder died, stands against a
        window that is new
    :ivar unfinished: whether the last run was not released: it is going on, or its holder died
    :ivar waits: whether it is a run whose lease has ended: its window is run again first, or it
        is not yet sure that its holder died
    :ivar window_start: start of that run's window, in database time
    """

    holder: str
    token: int
    locked_until: datetime
    reason: str
    renewed: bool
    blocked: bool
    unfinished: bool
    waits: bool
    window_start: datetime
