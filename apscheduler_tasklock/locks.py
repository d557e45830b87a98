"""Task locks on a database: the protocol with retries, outages, and releases that are owed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock.attempts import Attempts
from apscheduler_tasklock.blockers import Blockers
from apscheduler_tasklock.check import check_table
from apscheduler_tasklock.claims import Claims
from apscheduler_tasklock.clock import DatabaseClock
from apscheduler_tasklock.closing import Closing
from apscheduler_tasklock.connection import attempt_limit
from apscheduler_tasklock.context import HeldLock, Refusal
from apscheduler_tasklock.database import Database
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.hold import Hold
from apscheduler_tasklock.lifetime import Lifetime, off_the_loop
from apscheduler_tasklock.messages import ReleaseAnswer, RunState
from apscheduler_tasklock.names import check_name, make_replica_id
from apscheduler_tasklock.offload import Offload
from apscheduler_tasklock.options import LockOptions
from apscheduler_tasklock.outage import Outage
from apscheduler_tasklock.protocol import TaskLockProtocol
from apscheduler_tasklock.settings import LockSettings, as_url
from apscheduler_tasklock.table import DEFAULT_TABLE, task_lock_table


class TaskLocks:
    """The task locks of one database, as one replica uses them. Safe to share between threads.

    :param database: a URL, or an SQLAlchemy engine with the psycopg driver
    :param schema: schema of the task lock table; ``None`` leaves it to the ``search_path``
    :param table: name of the task lock table
    :param replica_id: who claims, for people; by default host, process and a random part
    :param claim_timeout: seconds for which an unreachable database is tried again
    :raises TaskLockOptionError: ``database`` is not one that the task lock can use
    :ivar blockers: knows which blocking runs were told of
    :ivar offload: makes claims and releases for coroutines
    :ivar in_use: counts who still needs the threads after :meth:`close`
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
        self._closing = Closing()
        self._database = Database(
            database,
            timeout=claim_timeout,
            application_name=f"tasklock {replica_id}"[:63],
            closing=self._closing,
        )
        self._clock = DatabaseClock()
        self._protocol = TaskLockProtocol(self.table)
        self.blockers = Blockers()
        outage = Outage(self._database.where, attempt_limit(claim_timeout))
        self._attempts = Attempts(self._database, self.table, outage)
        self._claims = Claims(
            self._attempts,
            Attempts(self._database.separate(), self.table, outage),
            self._protocol,
            self._clock,
            replica_id=replica_id,
            timeout=claim_timeout,
            stop=self._closing,
        )
        self.offload = Offload()
        self.in_use = Lifetime(self.offload.close)

    @classmethod
    def from_settings(cls, settings: LockSettings) -> TaskLocks:
        """Return the same task locks in another process, on an engine of its own."""
        return cls(**vars(settings))

    @property
    def closed(self) -> bool:
        """Whether nothing new is claimed any more."""
        return self._closing.stopped

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
        failover: float | None = None,
        takes_over: bool = False,
        keep_unanswered: bool = False,
        since: float | None = None,
    ) -> HeldLock | Refusal:
        """Claim a task for one run time, and try again while the database is away.

        :param task_name: the task's name
        :param run_time: the nominal run time, with a time zone; ``None`` for now
        :param min_lock: seconds from the run time until which its window lasts
        :param max_lock: seconds after which the claim counts as dead
        :param failover: seconds after which it does so without a renewal, which a thread makes
            for as long as it is held
        :param takes_over: whether the window of a holder that died is claimed in place of this
            one, to be run again
        :param keep_unanswered: whether the window stays taken if the claim was sent and never
            answered, although the database may have granted it
        :param since: when the claim was wanted, from :func:`time.monotonic`, if that was not now
        :return: the held lock, which must be released, or why it was refused
        :raises TaskLockDatabaseError: the database stayed away for ``claim_timeout``. A claim
            that it may have granted all the same is released in the background.
        :raises TaskLockError: the database refused the statement, and the message names the
            remedy; or these task locks are closed
        """
        self.in_use.begin_use()
        claimed = None
        try:
            if self.closed:
                raise TaskLockError(f"task {task_name!r} is not claimed: these locks are closed")
            claimed = self._claims.claim(
                task_name,
                run_time,
                min_lock=min_lock,
                max_lock=max_lock,
                failover=failover,
                takes_over=takes_over,
                keep_unanswered=keep_unanswered,
                since=since,
            )
        finally:
            if not isinstance(claimed, HeldLock):
                self.in_use.end_use()
        return claimed

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
            return self._claims.release(held, keep_window=keep_window)
        finally:
            if held.end():
                self.in_use.end_use()

    def abandon(self, held: HeldLock) -> None:
        """Give up a claim that is lost, and leave its row to who takes it over."""
        self._claims.abandon(held)
        if held.end():
            self.in_use.end_use()

    @property
    def settled(self) -> bool:
        """Whether the database has been there for long enough to believe that a holder died."""
        return self._attempts.settled

    def read_runs(self, task_names: Sequence[str]) -> list[RunState]:
        """Return the last run of each of these tasks.

        :raises TaskLockDatabaseError: the database is away
        :raises TaskLockError: it refuses
        """
        return self._attempts.once(lambda cursor: self._protocol.read(cursor, task_names))

    def hold(
        self,
        name: str,
        *,
        min_lock: float | timedelta,
        max_lock: float | timedelta,
        failover: float | timedelta | None = None,
    ) -> Hold:
        """Return a context manager, sync or async, and decorator that holds a task's lock.

        Entered, it gives the :class:`HeldLock`, which is also ``current_lock()``.

        :param name: the task's name
        :param min_lock: seconds or ``timedelta``, 0 or more, from the claim on, during which the
            task is refused to others even after it was released
        :param max_lock: seconds or ``timedelta``, above 0, after which the holder counts as dead
        :param failover: seconds or ``timedelta``, 1 or more, after which a holder that does not
            renew its claim counts as dead; ``None`` leaves it at ``max_lock``
        :raises TaskLockOptionError: one of them is impossible
        :raises TaskLockRefusedError: when entered: the task runs elsewhere, or was just run
        :raises TaskLockError: when entered: the database is away, or refuses
        """
        where = f"hold({name!r})"
        given = {"min_lock": min_lock, "max_lock": max_lock, "failover": failover}
        options = LockOptions.parse(given, where)
        least, most = options.lock_times(period=0)
        times = {"min_lock": least, "max_lock": most, "failover": options.failover or None}
        return Hold(self, check_name(name, where), times)

    def open(self) -> None:
        """Let claims through again after :meth:`close`."""
        self._database.open()
        self.in_use.open()
        self.offload.open()
        self._closing.reopen()

    def stop_claiming(self) -> None:
        """End what claims under way wait for. Releases still go through.

        From now on each attempt at a statement ends within 1.5 seconds.
        """
        self._closing.stop()

    def close(self) -> None:
        """Claim nothing more, send what releases are owed, and close idle connections.

        While the database is away, these are tried for 3 seconds.
        What is held can still be released, on a connection that is closed after it.
        """
        self._closing.stop()
        off_the_loop(self._claims.close)
        self._database.close()
        self.in_use.close()
