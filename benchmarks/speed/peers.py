"""The other lock libraries for PostgreSQL, each used as its own documentation recommends.

They are in ``benchmarks/requirements.txt``; one that is not installed is named in the report.
"""

from __future__ import annotations

import logging
import signal
from datetime import datetime, timedelta, timezone
from importlib import import_module
from typing import Any

import psycopg
from sqlalchemy import create_engine

from benchmarks.speed.contenders import Contender


def installed_peers() -> tuple[list[type[Contender]], list[str]]:
    """Return the peers that there are, and the names of those that are missing."""
    found: list[type[Contender]] = []
    missing: list[str] = []
    for module, contenders in _BY_MODULE.items():
        try:
            import_module(module)
        except ImportError:
            missing.append(module.replace("_", "-"))
        else:
            logging.getLogger(module).setLevel(logging.CRITICAL)
            found.extend(contenders)
    return found, missing


class Dislock(Contender):
    """dislock's lease: a connection a claim, one for its renewals, and one for its release."""

    name = "dislock, lease"
    TABLE = """
        CREATE TABLE IF NOT EXISTS key_value (key text PRIMARY KEY, value text NOT NULL,
                                              expire_at timestamptz NOT NULL)
    """

    def __init__(self, url: str) -> None:
        self._url = url

    @classmethod
    def prepare(cls, url: str) -> None:
        with psycopg.connect(url) as connection:
            connection.execute(cls.TABLE)

    def claim(self, task: str) -> Any:
        import dislock

        try:
            return self._lock(task).__enter__()
        except dislock.LockNotAcquiredError:
            return None

    def release(self, held: Any) -> None:
        held.__exit__(None, None, None)

    def close(self) -> None:
        pass  # it keeps none

    def _lock(self, task: str) -> Any:
        import dislock

        return dislock.LeaseLock(
            dislock.LockContext(
                url=self._url,
                table_parts=["key_value"],
                lock_key=task,
                owner="bench",
                run_ttl_seconds=60.0,
                lease_interval_seconds=10.0,
            )
        )


class DislockSchedule(Dislock):
    """dislock's schedule lock: held until the next run time, whatever the job does."""

    name = "dislock, schedule"
    releases = False

    def release(self, held: Any) -> None:
        held.__exit__(None, None, None)
        with psycopg.connect(self._url) as connection:
            connection.execute(
                "UPDATE key_value SET expire_at = now() WHERE key = %s", [held.context.schedule_key]
            )

    def _lock(self, task: str) -> Any:
        import dislock

        return dislock.ScheduleLock(
            dislock.LockContext(
                url=self._url,
                table_parts=["key_value"],
                lock_key=task,
                owner="bench",
                next_run_time=datetime.now(timezone.utc) + timedelta(seconds=60),
            )
        )


class PGLease(Contender):
    """pglease with its standard backend, which keeps one connection.

    It grants a lock again to the replica that holds it, so a second replica asks for refusals.
    """

    name = "pglease"

    def __init__(self, url: str) -> None:
        import pglease

        self._url = url
        self._first = pglease.PGLease(url, owner_id="first")
        self._second: Any = None

    def claim(self, task: str) -> Any:
        return task if self._first.try_acquire(task, ttl=60) else None

    def claim_second(self, task: str) -> Any:
        if self._second is None:
            import pglease

            self._second = pglease.PGLease(self._url, owner_id="second")
        return task if self._second.try_acquire(task, ttl=60) else None

    def release(self, held: str) -> None:
        assert self._first.release(held)

    def close(self) -> None:
        self._first.close()
        if self._second is not None:
            self._second.close()


class DistributedPGLock(Contender):
    """distributed-pg-lock, on the one pool that it has for a process."""

    name = "distributed-pg-lock"

    def __init__(self, url: str) -> None:
        import distributed_pg_lock

        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._manager = distributed_pg_lock.DistributedLockManager(lock_timeout_minutes=1)
        for number, handler in handlers.items():  # because the library replaces them
            signal.signal(number, handler)

    @classmethod
    def prepare(cls, url: str) -> None:
        from distributed_pg_lock import db

        db.reset()
        db.initialize(db_url=url.replace("postgresql://", "postgresql+psycopg2://"))
        db.create_tables()

    def claim(self, task: str) -> Any:
        lock = self._manager.get_lock(task)
        return lock if lock.acquire() else None

    def release(self, held: Any) -> None:
        held.release()

    def close(self) -> None:
        from distributed_pg_lock import db

        db.engine.dispose()


class PostgresMutex(Contender):
    """postgres-mutex as its README shows it: a connection for each lock, a thread for each held."""

    name = "postgres-mutex"

    def __init__(self, url: str) -> None:
        self._url = url
        self._first: dict[str, Any] = {}
        self._second: dict[str, Any] = {}

    @classmethod
    def prepare(cls, url: str) -> None:
        mutex = _postgres_mutex(url, "any")
        mutex.create_schema()
        mutex.close()

    def claim(self, task: str) -> Any:
        return self._acquired(self._first, task)

    def claim_second(self, task: str) -> Any:
        return self._acquired(self._second, task)

    def release(self, held: Any) -> None:
        held.__exit__(None, None, None)

    def close(self) -> None:
        for mutex in (*self._first.values(), *self._second.values()):
            mutex.close()

    def _acquired(self, replica: dict[str, Any], task: str) -> Any:
        if task not in replica:
            replica[task] = _postgres_mutex(self._url, task)
        held = replica[task].acquire(blocking=False)
        return held if held.__enter__() else None


def _postgres_mutex(url: str, task: str) -> Any:
    return import_module("postgres_mutex").Mutex(dsn=url, lock_name=task)


class SQLAlchemyDLock(Contender):
    """sqlalchemy-dlock on PostgreSQL: an advisory lock, on a connection for each that is held."""

    name = "sqlalchemy-dlock"

    def __init__(self, url: str) -> None:
        self._create_lock = import_module("sqlalchemy_dlock").create_sadlock
        self._engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))

    def claim(self, task: str) -> Any:
        connection = self._engine.connect()
        lock = self._create_lock(connection, task)
        if lock.acquire(block=False):
            return lock, connection
        connection.close()
        return None

    def release(self, held: Any) -> None:
        lock, connection = held
        lock.release()
        connection.close()

    def close(self) -> None:
        self._engine.dispose()


_BY_MODULE: dict[str, list[type[Contender]]] = {
    "dislock": [Dislock, DislockSchedule],
    "pglease": [PGLease],
    "distributed_pg_lock": [DistributedPGLock],
    "postgres_mutex": [PostgresMutex],
    "sqlalchemy_dlock": [SQLAlchemyDLock],
}
