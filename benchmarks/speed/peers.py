"""The other lock libraries for PostgreSQL, each used as its own documentation recommends.

They are in ``benchmarks/requirements.txt``; one that is not installed is named in the report.
"""

from __future__ import annotations

import importlib
import logging
import signal
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg

from benchmarks.speed.contenders import Contender


def installed_peers() -> tuple[list[type[Contender]], list[str]]:
    """Return the peers that there are, and the names of those that are missing."""
    found: list[type[Contender]] = []
    missing: list[str] = []
    for module, contenders in _BY_MODULE.items():
        try:
            importlib.import_module(module)
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


_BY_MODULE: dict[str, list[type[Contender]]] = {
    "dislock": [Dislock, DislockSchedule],
    "pglease": [PGLease],
    "distributed_pg_lock": [DistributedPGLock],
}
