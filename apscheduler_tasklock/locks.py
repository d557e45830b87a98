"""Task locks on a database: the protocol with retries, outages, and releases that are owed."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock.asking import Asking
from apscheduler_tasklock.attempts import Attempts
from apscheduler_tasklock.check import check_table
from apscheduler_tasklock.clock import DatabaseClock
from apscheduler_tasklock.context import HeldLock, Refusal
from apscheduler_tasklock.database import Database
from apscheduler_tasklock.errors import TaskLockDatabaseError
from apscheduler_tasklock.hold import Hold
from apscheduler_tasklock.names import check_name, make_replica_id
from apscheduler_tasklock.options import LockOptions
from apscheduler_tasklock.protocol import (
    ClaimAnswer,
    ReleaseAnswer,
    TaskLockProtocol,
)
from apscheduler_tasklock.releases import OwedRelease, OwedReleases
from apscheduler_tasklock.settings import LockSettings, as_url
from apscheduler_tasklock.table import DEFAULT_TABLE, task_lock_table

# Seconds for which a release is tried by the job's own worker, before it is left to the
# background.
RELEASE_PATIENCE = 0.2


class TaskLocks:
    """The task locks of one database, as one replica uses them. Safe to share between threads.

    :param database: a URL, or an SQLAlchemy engine with the psycopg driver
    :param schema: schema of the task lock table; ``None`` leaves it to the ``search_path``
    :param table: name of the task lock table
    :param replica_id: who claims, for people; by default host, process and a random part
    :param claim_timeout: seconds for which an unreachable database is tried again
    :raises TaskLockOptionError: ``database`` is not one that the task lock can use
    """

    def __init__(
        self,
        database: str | URL | Engine,
        *,
        replica_id: str | None = None,
        claim_timeout: float = 10.0,
        schema: str | None = None,
        table: str = DEFAULT_TABLE,
    ) -> None:
        replica_id = check_name(replica_id or make_replica_id(), "replica_id")
        self.settings = LockSettings(as_url(database), replica_id, claim_timeout, schema, table)
        self.replica_id = replica_id
        self.claim_timeout = claim_timeout
        self.table = task_lock_table(table, schema)
        self._database = Database(
            database, timeout=claim_timeout, application_name=f"tasklock {replica_id}"[:63]
        )
        self._protocol = TaskLockProtocol(self.table)
        self._clock = DatabaseClock()
        self._closed = threading.Event()
        self._blockers: dict[str, int] = {}
        self._attempts = Attempts(self._database, self.table)
        self._owed = OwedReleases(self._release_once)

    @classmethod
    def from_settings(cls, settings: LockSettings) -> TaskLocks:
        """Return the same task locks in another process, on an engine of its own."""
        return cls(**vars(settings))

    @property
    def closed(self) -> bool:
        """Whether nothing new is claimed any more."""
        return self._closed.is_set()

    def check(self) -> None:
        """Make sure that the table is there, new enough, and permitted.

        :raises TaskLockSchemaError: it is not; the message names the remedy
        :raises TaskLockDatabaseError: the database is away
        """

        def statement(cursor: Any) -> None:
            sent = time.monotonic()
            database_time = check_table(cursor, self.table, self._database.url.username)
            self._clock.learn(
                sent=sent,
                answered=time.monotonic(),
                database_time=database_time,
                bound=self._clock.latest(sent),
            )

        self._attempts.once(statement)

    def claim(
        self,
        task_name: str,
        run_time: datetime | None = None,
        *,
        min_lock: float,
        max_lock: float,
        keep_unanswered: bool = False,
    ) -> HeldLock | Refusal:
        """Claim a task for one run time, and try again while the database is away.

        :param task_name: the task's name
        :param run_time: the nominal run time, with a time zone; ``None`` for now
        :param min_lock: seconds from the run time until which its window lasts
        :param max_lock: seconds after which the claim counts as dead
        :param keep_unanswered: whether the window stays taken if the claim was sent and never
            answered, although the database may have granted it
        :return: the held lock, which must be released, or why it was refused
        :raises TaskLockDatabaseError: the database stayed away for ``claim_timeout``. A claim
            that it may have granted all the same is released in the background.
        :raises TaskLockError: the database refused the statement; the message names the remedy
        """
        asking = Asking(
            self._protocol,
            self._clock,
            task_name,
            None if run_time is None else run_time.timestamp(),
            min_lock=min_lock,
            max_lock=max_lock,
            replica_id=self.replica_id,
        )

        def statement(cursor: Any) -> tuple[ClaimAnswer, float]:
            # Otherwise the claim could be refused on account of this replica's own last run.
            self._release_owed(cursor, task_name)
            return asking.ask(cursor)

        try:
            answer, ends_at = self._attempts.until(self.claim_timeout, statement, stop=self._closed)
        except BaseException:
            if asking.unsure:
                self._owed.add(
                    task_name, asking.claim_id, keep_window=keep_unanswered, seconds=max_lock
                )
            raise
        if not answer.granted:
            return _refusal(answer)
        return HeldLock(
            name=task_name,
            token=answer.token,
            claim_id=asking.claim_id,
            run_time=run_time,
            locked_until=answer.locked_until,
            ends_at=ends_at,
            extender=self._extend,
        )

    def release(self, held: HeldLock, *, keep_window: bool = True) -> ReleaseAnswer | None:
        """End a claim, now or in the background.

        :param held: the lock to release
        :param keep_window: whether its window stays taken; ``False`` opens it at once
        :return: the task's row, or ``None`` if the claim had expired and was somebody else's
        :raises TaskLockDatabaseError: the database is away. The release is owed: it is sent again
            in the background until the claim's end.
        :raises TaskLockError: the database refused the statement
        """
        try:
            # Twice at least: the idle connection may have died while the job ran.
            return self._attempts.until(
                RELEASE_PATIENCE,
                lambda cursor: self._protocol.release(
                    cursor, held.name, held.claim_id, keep_window=keep_window
                ),
            )
        except TaskLockDatabaseError:
            self._owed.add(
                held.name, held.claim_id, keep_window=keep_window, seconds=held.seconds_left
            )
            raise

    def hold(self, name: str, *, min_lock: float | timedelta, max_lock: float | timedelta) -> Hold:
        """Return a context manager, sync or async, and decorator that holds a task's lock.

        Entered, it gives the :class:`HeldLock`, which is also ``current_lock()``.

        :param name: the task's name
        :param min_lock: seconds or ``timedelta``, 0 or more, from the claim on, during which the
            task is refused to others even after it was released
        :param max_lock: seconds or ``timedelta``, above 0, after which the holder counts as dead
        :raises TaskLockOptionError: one of them is impossible
        :raises TaskLockRefusedError: when entered: the task runs elsewhere, or was just run
        :raises TaskLockError: when entered: the database is away, or refuses
        """
        where = f"hold({name!r})"
        times = LockOptions.parse({"min_lock": min_lock, "max_lock": max_lock}, where)
        least, most = times.lock_times(period=0)
        return Hold(self, check_name(name, where), least, most)

    def is_news(self, task_name: str, token: int) -> bool:
        """Tell whether a run that blocks its task is met here for the first time."""
        known, self._blockers[task_name] = self._blockers.get(task_name), token
        return known != token

    def open(self) -> None:
        """Let claims through again after :meth:`close`."""
        self._closed.clear()

    def stop_claiming(self) -> None:
        """End the retries of claims under way. Releases still go through."""
        self._closed.set()

    def close(self) -> None:
        """Claim nothing more, try owed releases a last time, and close idle connections."""
        self._closed.set()
        self._owed.close()
        self._database.close()

    def _extend(self, held: HeldLock, by: float) -> datetime | None:
        return self._attempts.once(
            lambda cursor: self._protocol.extend(cursor, held.name, held.claim_id, by)
        )

    def _release_once(self, owed: OwedRelease) -> None:
        self._attempts.once(lambda cursor: self._send(cursor, owed))

    def _release_owed(self, cursor: Any, task_name: str) -> None:
        for owed in self._owed.of(task_name):
            self._send(cursor, owed)
            self._owed.forget(owed)

    def _send(self, cursor: Any, owed: OwedRelease) -> None:
        self._protocol.release(cursor, owed.task_name, owed.claim_id, keep_window=owed.keep_window)


def _refusal(answer: ClaimAnswer) -> Refusal:
    reason = "running" if answer.running else "window"
    blocked = answer.running and answer.new_window
    return Refusal(answer.holder, answer.token, answer.locked_until, reason, blocked)
