"""The rules that are compared: each decides with its own statements on the same database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import floor
from typing import Any
from uuid import uuid4

from apscheduler_tasklock.messages import ClaimRequest, DeadRun, Renewal, RunState
from apscheduler_tasklock.options import DEFAULTS
from apscheduler_tasklock.protocol import TaskLockProtocol
from apscheduler_tasklock.table import task_lock_table
from apscheduler_tasklock.leases import RENEWALS_PER_LEASE
from benchmarks.fidelity.clock import TravellingDatabase, moment, seconds
from benchmarks.fidelity.trace import Fire

TASK = "task"
MIN_FACTOR, MAX_FACTOR = 0.9, 5.0


@dataclass(frozen=True)
class Refused:
    """A claim that was refused.

    :ivar pending: whether the run time waits for the run that stands against it, which may be dead
    """

    pending: bool = False


@dataclass(frozen=True)
class Granted:
    """A claim that was granted.

    :ivar run_time: of the window that is to be run
    :ivar period: of the job, in the version that claimed
    :ivar holding: what the rule releases by
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
    def claim(self, replica: str, fire: Fire, *, believes: bool) -> Granted | Refused:
        """Ask for a run time, now.

        :param believes: whether the replica has been there long enough to believe that a run is
            dead; only this library asks itself that
        """

    @abstractmethod
    def release(self, granted: Granted) -> None:
        """End a run."""

    def cut(self, granted: Granted) -> None:
        """End a run that a graceful stop cut short, as the job's own cancellation does."""
        self.release(granted)

    def execute(self, statement: str, **parameters: Any) -> bool:
        """Run a statement; tell whether it touched a row."""
        return self.database.connection.execute(statement, parameters).rowcount > 0


class TaskLockTable(Rule):
    """The plain task lock table: locked from the start of a run, released by name."""

    name = "plain task lock table"

    def prepare(self) -> None:
        self.execute("DROP TABLE IF EXISTS plain_lock")
        self.execute("""
            CREATE TABLE plain_lock (name text PRIMARY KEY, started_at timestamptz,
                                     locked_until timestamptz)""")

    def claim(self, replica: str, fire: Fire, *, believes: bool) -> Granted | Refused:
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

    def claim(self, replica: str, fire: Fire, *, believes: bool) -> Granted | Refused:
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

    def claim(self, replica: str, fire: Fire, *, believes: bool) -> Granted | Refused:
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


class TaskLockRule(Rule):
    """This library with its defaults: its own statements, and what its executor does with them.

    :ivar failover: whether a dead holder's window is run again
    :ivar poll_interval: seconds from one look at dead runs to the next
    :ivar recovery_grace: seconds for which a replica that has just started believes no dead run
    """

    name = "apscheduler-tasklock"
    failover = False
    lease: float | None = None
    poll_interval = 5.0
    recovery_grace = 2.5

    def prepare(self) -> None:
        self.execute("TRUNCATE task_lock")
        self._protocol = TaskLockProtocol(task_lock_table())

    def claim(self, replica: str, fire: Fire, *, believes: bool) -> Granted | Refused:
        lag = max(0.0, self.database.now - fire.time)
        answer = self._ask(replica, lag, fire.period, "forget" if believes else "leave")
        if answer.granted:
            return Granted(fire.run_time, fire.period, (answer.claim_id, 5 * fire.period))
        return Refused(pending=answer.unfinished and answer.new_window)

    def _ask(self, replica: str, lag: float, period: float, dead_run: DeadRun):
        min_lock, max_lock = DEFAULTS.lock_times(period)
        lease = self.lease or min(60.0, max_lock / 3)
        if self.failover and dead_run == "forget":
            dead_run = "leave"
        request = ClaimRequest(
            TASK, lag, None, min_lock, max_lock, replica, uuid4(), lease, dead_run
        )
        return self._protocol.claim(self.database.connection.cursor(), request)

    def release(self, granted: Granted) -> None:
        claim_id, _ = granted.holding
        cursor = self.database.connection.cursor()
        self._protocol.release(cursor, TASK, claim_id, keep_window=True)

    def cut(self, granted: Granted) -> None:
        if not self.failover:
            self.release(granted)
            return
        self.execute("UPDATE task_lock SET locked_until = now() WHERE claim_id = %(id)s", id=granted.holding[0])

    def renewal_interval(self, granted: Granted) -> float:
        return (self.lease or min(60.0, 5 * granted.period / 3)) / RENEWALS_PER_LEASE

    def renew(self, granted: Granted) -> bool:
        """Let a claim stand for another lease; tell whether it stands."""
        claim_id, max_lock = granted.holding
        cursor = self.database.connection.cursor()
        renewal = Renewal(TASK, claim_id, self.renewal_interval(granted) * 3, max_lock)
        return claim_id in self._protocol.renew(cursor, [renewal])

    def read(self) -> RunState:
        """Return the last run, as a poll reads it."""
        return self._protocol.read(self.database.connection.cursor(), [TASK])[0]

    def take_over(self, replica: str, period: float) -> Granted | None:
        answer = self._ask(replica, 1e6, period, "take over")
        if not answer.granted or answer.dead_holder is None:
            return None
        # for now: the run time of the window that died
        return Granted(seconds(answer.window_start), period, (answer.claim_id, 5 * period))


class TaskLockWithFailover(TaskLockRule):
    """The same with ``lease=30, failover=True``."""

    name = "apscheduler-tasklock, failover"
    failover = True
    lease = 30.0


RULES = (TaskLockTable, ShedLock, SlotLock, TaskLockRule, TaskLockWithFailover)

# The slot lock is left out: the slots of an irregular schedule are no multiples of a period.
SHORT_GAP_RULES = (TaskLockTable, ShedLock, TaskLockRule, TaskLockWithFailover)
