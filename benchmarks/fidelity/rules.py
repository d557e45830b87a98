"""The rules that are compared: each decides with its own statements on the same database.

This library's can also decide in Python, by ``apscheduler_tasklock.testing.rule``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import floor
from typing import Any
from uuid import UUID

from psycopg.rows import namedtuple_row

from apscheduler_tasklock._database.connection import attempt_limit
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock._runs.standby import STANDBY_AFTER
from apscheduler_tasklock.options import DEFAULTS
from benchmarks.fidelity.clock import TravellingDatabase, moment, seconds
from benchmarks.fidelity.executor import request_of
from benchmarks.fidelity.trace import PERIODS, Fire
from tests.support.waist import (
    Claim,
    ClaimRequest,
    ClaimTimes,
    GiveUp,
    LockProtocol,
    MemoryTaskLocks,
    ReadTasks,
    Refusal,
    ReleaseRequest,
    Renewal,
    Renewals,
    Statements,
    TaskRow,
    protocol_of,
    raw_cursor,
    takeover_of,
)

TASK = "task"
MIN_FACTOR, MAX_FACTOR = 0.9, 5.0
# The job's function, as the row has it.
RUNS = "jobs:job"
# Seconds after the due time for which a standby may run: the longest period of a trace.
LONGEST_STANDBY = max(PERIODS)
# The executor's own defaults.
CLAIM_TIMEOUT = 10.0
TIMINGS = Timings()


@dataclass(frozen=True)
class Refused:
    """A claim that was refused.

    :ivar blocked_by: token of the unfinished run because of which a new window was refused
    :ivar waits: whether that run's lease has ended, so that its holder may be dead
    """

    blocked_by: int | None = None
    waits: bool = False


@dataclass(frozen=True)
class Granted:
    """A claim that was granted.

    :ivar run_time: run time of the window
    :ivar period: the job's period, in the version that claimed
    :ivar holding: what the rule needs for the release
    """

    run_time: float
    period: float
    holding: Any = None


class Rule(ABC):
    """How replicas agree on who runs a job."""

    name: str

    def __init__(self, database: TravellingDatabase) -> None:
        self.database = database
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Make the rule's table, or empty it."""

    @abstractmethod
    def claim(self, replica: str, fire: Fire, *, stable: bool) -> Granted | Refused:
        """Ask for a run time, now.

        :param stable: whether the replica has been there long enough to believe that a run is
            dead; for this library's rule only
        """

    @abstractmethod
    def release(self, granted: Granted) -> None:
        """End a run."""

    def cut(self, granted: Granted) -> None:
        """End a run that a graceful stop cut short."""
        self.release(granted)

    def execute(self, statement: str, **parameters: Any) -> bool:
        """Run a statement; tell whether it touched a row."""
        return self.database.execute(statement, parameters) > 0


class TaskLockTable(Rule):
    """The plain task lock table: locked from the start of a run, released by name."""

    name = "plain task lock table"

    def prepare(self) -> None:
        self.execute("DROP TABLE IF EXISTS plain_lock")
        self.execute("""
            CREATE TABLE plain_lock (name text PRIMARY KEY, started_at timestamptz,
                                     locked_until timestamptz)""")

    def claim(self, replica: str, fire: Fire, *, stable: bool) -> Granted | Refused:
        granted = self.execute(
            """
            INSERT INTO plain_lock VALUES (%(name)s, now(), now() + %(most)s * interval '1 s')
            ON CONFLICT (name) DO UPDATE
            SET started_at = excluded.started_at, locked_until = excluded.locked_until
            WHERE plain_lock.locked_until <= now()""",
            name=TASK,
            most=MAX_FACTOR * fire.period,
        )
        return Granted(fire.run_time, fire.period) if granted else Refused()

    def release(self, granted: Granted) -> None:
        self.execute(
            """
            UPDATE plain_lock
            SET locked_until = GREATEST(now(), started_at + %(least)s * interval '1 s')
            WHERE name = %(name)s""",
            name=TASK,
            least=MIN_FACTOR * granted.period,
        )


class ShedLock(Rule):
    """ShedLock's rule: at least and at most for so long since the claim, released by owner."""

    name = "ShedLock's rule"

    def prepare(self) -> None:
        self.execute("DROP TABLE IF EXISTS shedlock")
        self.execute("""
            CREATE TABLE shedlock (name text PRIMARY KEY, lock_until timestamptz,
                                   locked_at timestamptz, locked_by text)""")

    def claim(self, replica: str, fire: Fire, *, stable: bool) -> Granted | Refused:
        lock = {"name": TASK, "by": replica, "most": MAX_FACTOR * fire.period}
        granted = self.execute(
            """
            INSERT INTO shedlock
            VALUES (%(name)s, now() + %(most)s * interval '1 s', now(), %(by)s)
            ON CONFLICT DO NOTHING""",
            **lock,
        ) or self.execute(
            """
            UPDATE shedlock SET lock_until = now() + %(most)s * interval '1 s',
                                locked_at = now(), locked_by = %(by)s
            WHERE name = %(name)s AND lock_until <= now()""",
            **lock,
        )
        return Granted(fire.run_time, fire.period, replica) if granted else Refused()

    def release(self, granted: Granted) -> None:
        self.execute(
            """
            UPDATE shedlock
            SET lock_until = GREATEST(now(), locked_at + %(least)s * interval '1 s')
            WHERE name = %(name)s AND locked_by = %(by)s AND lock_until > now()""",
            name=TASK,
            by=granted.holding,
            least=MIN_FACTOR * granted.period,
        )


class SlotLock(Rule):
    """One row per slot of the schedule: held until the next boundary, never released."""

    name = "slot lock until the next boundary"

    def prepare(self) -> None:
        self.execute("DROP TABLE IF EXISTS slot_lock")
        self.execute("CREATE TABLE slot_lock (name text PRIMARY KEY, locked_until timestamptz)")

    def claim(self, replica: str, fire: Fire, *, stable: bool) -> Granted | Refused:
        boundary = (floor(self.database.clock / fire.period) + 1) * fire.period
        granted = self.execute(
            """
            INSERT INTO slot_lock VALUES (%(name)s, %(until)s)
            ON CONFLICT (name) DO UPDATE SET locked_until = excluded.locked_until
            WHERE slot_lock.locked_until <= now()""",
            name=TASK,
            until=moment(boundary),
        )
        return Granted(fire.run_time, fire.period) if granted else Refused()

    def release(self, granted: Granted) -> None:
        pass


@dataclass(frozen=True)
class _Holding:
    """A claim of this library, for its release and renewals.

    :ivar lease: seconds
    """

    claim_id: UUID
    lease: float


@dataclass(frozen=True)
class Due:
    """When the job is due, as its row has it.

    :ivar may_run: whether the last run does not stand against the next one
    """

    may_run: bool
    due_at: float
    overdue_at: float

    def next_look(self, now: float, *, standby: bool) -> float | None:
        """Return the earliest time at which a look may find something to do, if any.

        :param standby: whether other replicas may run the job as standbys
        """
        if self.may_run and standby and now < self.due_at + LONGEST_STANDBY:
            return self.due_at + STANDBY_AFTER
        return None if now > self.overdue_at else self.overdue_at


class TaskLockRule(Rule):
    """This library with its defaults: its statements, and the decisions of its executor.

    :ivar options: the executor's options
    :ivar poll_interval: seconds from one look at dead runs to the next
    :ivar recovery_grace: seconds for which a replica that has just started believes no dead run
    :ivar exact: whether claims say that all replicas share their run times
    """

    name = "apscheduler-tasklock"
    options = DEFAULTS
    poll_interval = 5.0
    recovery_grace = Outage("", attempt_limit(CLAIM_TIMEOUT), TIMINGS).grace
    exact = True

    def prepare(self) -> None:
        self.execute("TRUNCATE task_lock")
        self._rows: MemoryTaskLocks | None = None
        if self.database.in_python:
            self._rows = MemoryTaskLocks(lambda: moment(self.database.clock))
        self._replicas: dict[str, LockProtocol] = {}
        # For statements that do not name the replica.
        self._protocol = self.protocol_of("")

    def claim(self, replica: str, fire: Fire, *, stable: bool) -> Granted | Refused:
        lease = self._lease(fire.period)
        request = self.request(fire)
        # By the replica's own clock, so that an error of the clock cancels out.
        times = ClaimTimes(lag=max(0.0, self.database.now - fire.time), stable=stable)
        answer = self.protocol_of(replica).execute(self.cursor(), Claim(request, times))
        if answer.granted:
            return Granted(fire.run_time, fire.period, _Holding(answer.claim_id, lease))
        refusal = Refusal.of(answer)
        return Refused(refusal.token if refusal.blocked else None, refusal.waits)

    def request(self, fire: Fire) -> ClaimRequest:
        """Return the request of a claim."""
        if fire.submission is not None:
            return request_of(fire)
        min_lock, max_lock = self.options.lock_times(fire.period)
        return ClaimRequest(
            TASK,
            min_lock,
            max_lock,
            run_time=moment(fire.run_time),
            exact=self.exact and fire.exact,
            lease=self._lease(fire.period),
            failover=self.failover,
            runs=RUNS,
        )

    def due(self) -> Due | None:
        """Return when the job is due, if it has a row."""
        row: Any = self._row()
        if row is None:
            return None
        # A dead run that is not run again stands against no later one.
        may_run = row.finished_at is not None or not (row.failover or row.handed_over)
        return Due(may_run, seconds(row.due_at), seconds(row.overdue_at))

    def _row(self) -> Any:
        if self._rows is not None:
            return self._rows.rows.get(TASK)
        cursor = self.database.connection.cursor(row_factory=namedtuple_row)
        return cursor.execute("SELECT * FROM task_lock").fetchone()

    def release(self, granted: Granted) -> None:
        self._release(granted, WindowAfter.KEEP)

    def cut(self, granted: Granted) -> None:
        window = WindowAfter.HAND_OVER if self.failover else WindowAfter.KEEP
        self._release(granted, window)

    def _release(self, granted: Granted, window: WindowAfter) -> None:
        request = ReleaseRequest(TASK, granted.holding.claim_id, RunOutcome(window))
        self._protocol.execute(self.cursor(), request)

    def renewal_interval(self, granted: Granted) -> float:
        """Return the seconds from one renewal of a claim to the next."""
        return float(granted.holding.lease / TIMINGS.renewals_per_lease)

    def renew(self, granted: Granted) -> bool:
        """Let a claim stand for another lease; tell whether it stands."""
        holding = granted.holding
        renewal = Renewal(TASK, holding.claim_id, holding.lease)
        return holding.claim_id in self._protocol.execute(self.cursor(), Renewals([renewal]))

    def read(self) -> TaskRow | None:
        """Return the last run, as a look reads it for a run time that waits."""
        states, _ = self._protocol.execute(self.cursor(), ReadTasks([TASK], [TASK]))
        return states[0] if states else None

    def runs_again(self, dead: TaskRow) -> bool:
        """Tell whether a dead run's window is run again before other windows of the task."""
        return dead.is_run_again(failover=self.failover)

    def gives_up(self, dead: TaskRow) -> bool:
        """Tell whether a dead run's window is not run again any more; if so, finish the run."""
        if dead.reason_to_give_up(self.options.max_takeovers) is None:
            return False
        self._protocol.execute(self.cursor(), GiveUp(TASK, dead.claim_id))
        return True

    def take_over(self, replica: str, dead: TaskRow, period: float) -> Granted | None:
        """Run the window of a dead holder again, unless somebody else does."""
        lease = self._lease(period)
        request = takeover_of(TASK, dead.claim_id, dead.holder, lease, self.failover)
        answer = Statements(self.protocol_of(replica), self.cursor).rerun(request)
        if answer is None or not answer.granted:
            return None
        run_time = seconds(answer.window_start)
        return Granted(run_time, period, _Holding(answer.claim_id, lease))

    @property
    def failover(self) -> bool:
        """Whether the windows of dead holders are run again."""
        return bool(self.options.failover)

    def _lease(self, period: float) -> float:
        _, max_lock = self.options.lock_times(period)
        return self.options.lease_within(max_lock) or max_lock

    def protocol_of(self, replica: str) -> LockProtocol:
        """Return a replica's protocol: the statements, or the rule in Python."""
        if replica not in self._replicas:
            self._replicas[replica] = (
                protocol_of(replica) if self._rows is None else self._rows.protocol(replica)
            )
        return self._replicas[replica]

    def cursor(self) -> Any:
        """Return a cursor for its statements; ``None`` for the rule in Python."""
        return None if self._rows is not None else raw_cursor(self.database.connection)


class TaskLockWithFailover(TaskLockRule):
    """The same with failover and a shorter lease."""

    name = "apscheduler-tasklock, failover=True, lease=30"
    options = replace(DEFAULTS, failover=True, lease=30.0)


class TaskLockWithLeader(TaskLockWithFailover):
    """The same with failover, in leader mode.

    :ivar leader_lease: seconds after its last look for which a leader is not replaced
    """

    name = "apscheduler-tasklock, failover=True, lease=30, leader=True"
    leader_lease = 15.0


class TaskLockInDatabaseTime(TaskLockRule):
    """The same as the default, as if replicas did not share their run times."""

    name = "apscheduler-tasklock, run times not shared"
    exact = False


RULES = (TaskLockTable, ShedLock, SlotLock, TaskLockRule, TaskLockWithFailover)
# The rules of the traces whose replicas have no triggers of APScheduler.
TRACE_RULES = (*RULES, TaskLockWithLeader)
# Without the slot lock, because slots of an irregular schedule are no multiples of a period.
SHORT_GAP_RULES = (
    TaskLockTable,
    ShedLock,
    TaskLockInDatabaseTime,
    TaskLockRule,
    TaskLockWithFailover,
)
