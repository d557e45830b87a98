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
from benchmarks.fidelity.clock import TravellingDatabase, moment, seconds

TASK = "task"
MIN_FACTOR, MAX_FACTOR = 0.9, 5.0


@dataclass(frozen=True)
class Refused:
    """A claim that was refused.

    :ivar window_start: start of the window of the run that stands against it, if that can be
        watched
    :ivar seconds_left: until that run's lease ends
    """

    window_start: float | None = None
    seconds_left: float = 0.0


@dataclass(frozen=True)
class Granted:
    """A claim that was granted.

    :ivar run_time: of the window that is to be run
    :ivar taken_over: whether that is the window of a dead holder
    :ivar window_left: whether the window that was asked for is still to be claimed
    :ivar holding: what the rule releases by
    """

    run_time: float
    holding: Any
    taken_over: bool = False
    window_left: bool = False


class Rule(ABC):
    """How replicas agree on who runs a job.

    :ivar failover: seconds of a lease that is renewed, or ``None``
    """

    name: str
    failover: float | None = None

    def __init__(self, database: TravellingDatabase) -> None:
        self.database = database
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Make the rule's table, or empty it."""

    @abstractmethod
    def claim(self, replica: str, run_time: float, period: float) -> Granted | Refused:
        """Ask for a run time, now."""

    @abstractmethod
    def release(self, granted: Granted) -> None:
        """End a run."""

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

    def claim(self, replica: str, run_time: float, period: float) -> Granted | Refused:
        granted = self.execute(
            """
            INSERT INTO plain_lock VALUES (%(name)s, now(), now() + %(most)s * interval '1 s')
            ON CONFLICT (name) DO UPDATE
            SET started_at = excluded.started_at, locked_until = excluded.locked_until
            WHERE plain_lock.locked_until <= now()""",
            name=TASK,
            most=MAX_FACTOR * period,
        )
        return Granted(run_time, MIN_FACTOR * period) if granted else Refused()

    def release(self, granted: Granted) -> None:
        self.execute(
            """
            UPDATE plain_lock
            SET locked_until = GREATEST(now(), started_at + %(least)s * interval '1 s')
            WHERE name = %(name)s""",
            name=TASK,
            least=granted.holding,
        )


class ShedLock(Rule):
    """ShedLock's rule: at least and at most for so long since the claim, released by owner."""

    name = "ShedLock's rule"

    def prepare(self) -> None:
        self.execute("DROP TABLE IF EXISTS shedlock")
        self.execute("""
            CREATE TABLE shedlock (name text PRIMARY KEY, lock_until timestamptz,
                                   locked_at timestamptz, locked_by text)""")

    def claim(self, replica: str, run_time: float, period: float) -> Granted | Refused:
        lock = {"name": TASK, "by": replica, "most": MAX_FACTOR * period}
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
        return Granted(run_time, (replica, MIN_FACTOR * period)) if granted else Refused()

    def release(self, granted: Granted) -> None:
        replica, least = granted.holding
        self.execute(
            """
            UPDATE shedlock
            SET lock_until = GREATEST(now(), locked_at + %(least)s * interval '1 s')
            WHERE name = %(name)s AND locked_by = %(by)s AND lock_until > now()""",
            name=TASK,
            by=replica,
            least=least,
        )


class SlotLock(Rule):
    """One row per slot of the schedule: held until the next boundary, never released."""

    name = "slot lock until the next boundary"

    def prepare(self) -> None:
        self.execute("DROP TABLE IF EXISTS slot_lock")
        self.execute("CREATE TABLE slot_lock (name text PRIMARY KEY, locked_until timestamptz)")

    def claim(self, replica: str, run_time: float, period: float) -> Granted | Refused:
        boundary = (floor(self.database.now / period) + 1) * period
        granted = self.execute(
            """
            INSERT INTO slot_lock VALUES (%(name)s, %(until)s)
            ON CONFLICT (name) DO UPDATE SET locked_until = excluded.locked_until
            WHERE slot_lock.locked_until <= now()""",
            name=TASK,
            until=moment(boundary),
        )
        return Granted(run_time, None) if granted else Refused()

    def release(self, granted: Granted) -> None:
        pass


class TaskLockRule(Rule):
    """This library: its own statements, with its default factors, and without failover."""

    name = "apscheduler-tasklock"

    def prepare(self) -> None:
        self.execute("TRUNCATE task_lock")
        self._protocol = TaskLockProtocol(task_lock_table())

    def claim(self, replica: str, run_time: float, period: float) -> Granted | Refused:
        min_lock, max_lock = DEFAULTS.lock_times(period)
        dead_run: DeadRun = "take over" if self.failover else "forget"
        lag = max(0.0, self.database.now - run_time)
        request = ClaimRequest(
            TASK, lag, None, min_lock, max_lock, replica, uuid4(), self.failover, dead_run
        )
        answer = self._protocol.claim(self.database.connection.cursor(), request)
        window_start = seconds(answer.window_start)
        if answer.granted:
            taken_over = answer.dead_holder is not None
            holding = (answer.claim_id, max_lock)
            return Granted(
                window_start if taken_over else run_time, holding, taken_over, answer.new_window
            )
        if not (answer.unfinished and self.failover):
            return Refused()
        return Refused(window_start, seconds(answer.locked_until) - self.database.now)

    def release(self, granted: Granted) -> None:
        claim_id, _ = granted.holding
        cursor = self.database.connection.cursor()
        self._protocol.release(cursor, TASK, claim_id, keep_window=True)

    def renew(self, granted: Granted) -> bool:
        """Let a claim stand for another lease; tell whether it stands."""
        assert self.failover is not None
        claim_id, max_lock = granted.holding
        cursor = self.database.connection.cursor()
        renewal = Renewal(TASK, claim_id, self.failover, max_lock)
        return claim_id in self._protocol.renew(cursor, [renewal])

    def read(self) -> RunState:
        """Return the last run, as one that watches it reads it."""
        return self._protocol.read(self.database.connection.cursor(), [TASK])[0]


class TaskLockWithFailover(TaskLockRule):
    """The same with ``failover=30``."""

    name = "apscheduler-tasklock, failover=30"
    failover = 30.0


RULES = (TaskLockTable, ShedLock, SlotLock, TaskLockRule, TaskLockWithFailover)
