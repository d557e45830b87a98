"""The contenders: bare psycopg, ShedLock's statements, our statements, and the library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar
from uuid import UUID, uuid4

import psycopg

from apscheduler_tasklock import upgrade
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock.lock import HeldLock
from tests.support.waist import (
    Claim,
    ClaimRequest,
    LockClient,
    ReleaseRequest,
    protocol_of,
    raw_cursor,
)

MAX_LOCK = 50.0


class Contender(ABC):
    """One way to claim tasks and release them.

    :cvar name: for the tables
    :cvar releases: whether a release is a statement of its own; if not, it is not timed
    """

    name: ClassVar[str]
    releases: ClassVar[bool] = True

    @abstractmethod
    def __init__(self, url: str) -> None: ...

    @classmethod  # noqa: B027  # not every one needs something
    def prepare(cls, url: str) -> None:
        """Create what it needs in the database."""

    @abstractmethod
    def claim(self, task: str) -> Any:
        """Claim a task; return the argument of its release, or ``None`` if it was refused."""

    def claim_second(self, task: str) -> Any:
        """Claim as another replica does, for whom the task is taken."""
        return self.claim(task)

    @abstractmethod
    def release(self, held: Any) -> None:
        """Let the next claim of the task through."""

    @abstractmethod
    def close(self) -> None:
        """Close its connections."""


class OnPsycopg(Contender):
    """On a psycopg connection of its own, in autocommit mode, prepared after the fifth time."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)

    def row(self, query: str, parameters: dict[str, Any]) -> tuple[Any, ...] | None:
        """Run a statement and return its first row."""
        return self.connection.execute(query, parameters).fetchone()

    def close(self) -> None:
        self.connection.close()


class Bare(OnPsycopg):
    """The simplest lock in a row: an UPDATE with a condition."""

    name = "bare psycopg"

    CLAIM = """
        UPDATE task_lock SET started_at = now(), locked_until = now() + interval '50 s',
            window_start = now(), window_until = now(), locked_by = 'bench',
            claim_id = %(claim_id)s, token = token + 1, finished_at = NULL
        WHERE task_name = %(task)s AND (finished_at IS NOT NULL OR locked_until <= now())
        RETURNING token, locked_until
    """
    RELEASE = """
        UPDATE task_lock SET finished_at = now(), locked_until = now()
        WHERE task_name = %(task)s AND claim_id = %(claim_id)s RETURNING locked_until
    """
    NEW = """
        INSERT INTO task_lock (task_name, started_at, locked_until, window_start, window_until,
                               locked_by, claim_id, token, finished_at, run_until, failover,
                               deaths, handovers, handed_over, runs, one_off)
        VALUES (%(task)s, now(), now(), now(), now(), 'bench', %(claim_id)s, 1, now(), now(),
                false, 0, 0, false, '', false)
        ON CONFLICT DO NOTHING
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._known: set[str] = set()

    @classmethod
    def prepare(cls, url: str) -> None:
        upgrade(url)

    def claim(self, task: str) -> Any:
        task, claim_id = f"bare {task}", uuid4()
        if task not in self._known:
            self.connection.execute(self.NEW, {"task": task, "claim_id": claim_id})
            self._known.add(task)
        claim = {"task": task, "claim_id": claim_id}
        return None if self.row(self.CLAIM, claim) is None else claim

    def release(self, held: dict[str, Any]) -> None:
        assert self.row(self.RELEASE, held) is not None

    def select_one(self) -> None:
        """Make a round trip that does nothing."""
        self.row("SELECT 1", {})


class ShedLock(OnPsycopg):
    """ShedLock's statements with the database's time, for a name that the process knows."""

    name = "ShedLock's UPDATE"
    TABLE = """
        CREATE TABLE IF NOT EXISTS shedlock (name varchar(64) PRIMARY KEY,
            lock_until timestamp NOT NULL, locked_at timestamp NOT NULL,
            locked_by varchar(255) NOT NULL)
    """
    _NOW = "timezone('utc', CURRENT_TIMESTAMP)"
    _SET = f"""
        SET lock_until = {_NOW} + make_interval(secs => 50), locked_at = {_NOW},
            locked_by = %(owner)s
        WHERE shedlock.name = %(task)s AND shedlock.lock_until <= {_NOW}
        RETURNING name
    """
    INSERT = f"""
        INSERT INTO shedlock (name, lock_until, locked_at, locked_by)
        VALUES (%(task)s, {_NOW} + make_interval(secs => 50), {_NOW}, %(owner)s)
        ON CONFLICT (name) DO UPDATE {_SET}
    """
    CLAIM = f"UPDATE shedlock {_SET}"
    UNLOCK = f"""
        UPDATE shedlock SET lock_until = {_NOW} WHERE name = %(task)s AND locked_by = %(owner)s
        RETURNING name
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._known: set[str] = set()

    @classmethod
    def prepare(cls, url: str) -> None:
        with psycopg.connect(url) as connection:
            connection.execute(cls.TABLE)

    def claim(self, task: str) -> Any:
        claim = {"task": f"update {task}", "owner": "bench"}
        if task not in self._known:
            self._known.add(task)
            return None if self.row(self.INSERT, claim) is None else claim
        return None if self.row(self.CLAIM, claim) is None else claim

    def release(self, held: dict[str, Any]) -> None:
        assert self.row(self.UNLOCK, held) is not None


class ShedLockInsert(ShedLock):
    """ShedLock's statements for a name that is new to the process, as after each deployment."""

    name = "ShedLock's INSERT"

    def claim(self, task: str) -> Any:
        claim = {"task": f"insert {task}", "owner": "bench"}
        return None if self.row(self.INSERT, claim) is None else claim


class Protocol(OnPsycopg):
    """The statements that ship, on a plain psycopg connection."""

    name = "our statements"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._protocol = protocol_of("bench")

    @classmethod
    def prepare(cls, url: str) -> None:
        upgrade(url)

    def claim(self, task: str) -> Any:
        task = f"protocol {task}"
        request = ClaimRequest(task, min_lock=0.0, max_lock=MAX_LOCK)
        answer = self._protocol.execute(raw_cursor(self.connection), Claim(request))
        return (task, answer.claim_id) if answer.granted else None

    def release(self, held: tuple[str, UUID]) -> None:
        cursor = raw_cursor(self.connection)
        assert self._protocol.execute(cursor, ReleaseRequest(*held)) is not None


class Library(Contender):
    """The library: its statements with the replica's thread, clock bound and error handling."""

    name = "apscheduler-tasklock"

    def __init__(self, url: str) -> None:
        self.locks = LockClient(LockSettings(url, "bench"))

    @classmethod
    def prepare(cls, url: str) -> None:
        upgrade(url)

    def claim(self, task: str) -> Any:
        request = ClaimRequest(f"library {task}", min_lock=0.0, max_lock=MAX_LOCK)
        claimed = self.locks.claim(request)
        return claimed if isinstance(claimed, HeldLock) else None

    def release(self, held: HeldLock) -> None:
        assert self.locks.release(held) is not None

    def close(self) -> None:
        self.locks.close()
