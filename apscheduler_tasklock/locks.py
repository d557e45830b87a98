"""Task locks on a database: the protocol with retries, outages, and releases that are owed."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from inspect import (
    isasyncgenfunction,
    isclass,
    iscoroutine,
    iscoroutinefunction,
    isgeneratorfunction,
)
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.connection import attempt_limit
from apscheduler_tasklock._database.database import Database, parse_url
from apscheduler_tasklock._database.deadline import Closing
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.retry import Attempts
from apscheduler_tasklock._lock.claim import WantedClaim, WantedTakeover
from apscheduler_tasklock._lock.client import Claims
from apscheduler_tasklock._lock.clock import DatabaseClock
from apscheduler_tasklock._lock.lifetime import InProgress, Lifetime, off_the_loop
from apscheduler_tasklock._lock.offload import Offload
from apscheduler_tasklock._lock.protocol import Refusal, ReleaseAnswer, RunState, TaskLockProtocol
from apscheduler_tasklock._lock.releases import Ending, OwedRelease
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
    TaskLockRefusedError,
)
from apscheduler_tasklock.lock import HeldLock, holding
from apscheduler_tasklock.options import DEFAULT, Default, LockOptions, check_name
from apscheduler_tasklock.schema.check import check_table
from apscheduler_tasklock.schema.table import DEFAULT_TABLE, task_lock_table

# Seconds for which a claim may be tried, at most. Whoever wants more has mistaken the unit.
LONGEST_CLAIM = 24 * 3600.0


class TaskLocks:
    """The task locks of one database, as one replica uses them. Safe to share between threads.

    :param database: a URL, or an SQLAlchemy engine with the psycopg driver
    :param schema: schema of the task lock table; ``None`` leaves it to the ``search_path``
    :param table: name of the task lock table
    :param replica_id: who claims, for people; by default host, process and a random part
    :param claim_timeout: seconds for which an unreachable database is tried again
    :raises TaskLockOptionError: ``database`` is not one that the task lock can use, or
        ``claim_timeout`` is not above 0 and at most a day
    :ivar offload: makes claims and releases for coroutines
    :ivar claiming: counts the claims that are being made, and given back if nobody wants them
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
        if not 0 < claim_timeout <= LONGEST_CLAIM:
            raise TaskLockOptionError(
                f"claim_timeout must be above 0 and at most a day, not {claim_timeout!r} seconds"
            )
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
        limit = attempt_limit(claim_timeout)
        outage = Outage(self._database.where, limit)
        self._clock = DatabaseClock(outage.clock_stepped)
        # Less than half of what an answer is waited for, so that the server says what it waits for.
        # It counts for each wait, and of several that ask for a locked row all but one wait twice:
        # for their turn, and then for who has locked it.
        self._protocol = TaskLockProtocol(self.table, lock_timeout=limit * 0.4)
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
        self.claiming = InProgress()
        self.in_use = Lifetime(self.offload.close)

    @classmethod
    def from_settings(cls, settings: LockSettings) -> TaskLocks:
        """Return the same task locks in another process, on an engine of its own."""
        return cls(**vars(settings))

    @property
    def where(self) -> str:
        """The database's host, port and name, shown in logs."""
        return self._database.where

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
            self._learn(sent, check_table(cursor, self.table, self._database.url.username))

        self._attempts.once(statement)

    def _learn(self, sent: float, database_time: datetime) -> None:
        bound = self._clock.latest(sent)
        now = time.monotonic()
        self._clock.learn(sent=sent, answered=now, database_time=database_time, bound=bound)

    def claim(self, wanted: WantedClaim, since: float | None = None) -> HeldLock | Refusal:
        """Claim a task for one run time, and try again while the database is unavailable.

        :param since: when the claim was wanted, from :func:`time.monotonic`, if that was not now
        :return: the held lock, which must be released, or why it was refused
        :raises TaskLockDatabaseError: the database stayed away for ``claim_timeout``. A claim
            that it may have granted all the same is ended in the background.
        :raises TaskLockError: the database refused the statement, and the message names the
            remedy; or these task locks are closed
        """
        claimed = None
        try:
            self._begin(wanted.task_name)
            claimed = self._claims.claim(wanted, since)
        finally:
            if not isinstance(claimed, HeldLock):
                self.in_use.end_use()
        return claimed

    def take_over(
        self, wanted: WantedTakeover, since: float | None = None
    ) -> HeldLock | Refusal | None:
        """Take over the run of a holder that died; see :meth:`claim`.

        :return: the held lock, which must be released; or who has the task instead; or ``None``
            if its row is gone
        :raises TaskLockError: as of :meth:`claim`
        """
        claimed = None
        try:
            self._begin(wanted.task_name)
            claimed = self._claims.take_over(wanted, since)
        finally:
            if not isinstance(claimed, HeldLock):
                self.in_use.end_use()
        return claimed

    def _begin(self, task_name: str) -> None:
        self.in_use.begin_use()
        if self.closed:
            raise TaskLockError(f"task {task_name!r} is not claimed: these locks are closed")

    def release(self, held: HeldLock, ending: Ending = Ending.KEEP) -> ReleaseAnswer | None:
        """End a claim, now or in the background.

        :param held: the lock to release
        :param ending: what becomes of its window
        :return: the task's row, or ``None`` if the claim had expired and was somebody else's
        :raises TaskLockDatabaseError: the database is away. The release is owed: it is sent again
            in the background until the claim's end.
        :raises TaskLockError: the database refused the statement. The release is owed as well.
        """
        try:
            return self._claims.release(held, ending)
        finally:
            if held.end():
                self.in_use.end_use()

    @property
    def stable(self) -> bool:
        """Whether the database has been there for long enough to believe that a holder died."""
        return self._attempts.outage.stable

    def believe(self) -> None:
        """Believe that holders died whose leases have ended, unless an outage is known here.

        A worker process is as sure as its parent, which has seen the database for longer.
        """
        self._attempts.outage.believe()

    def doubt(self) -> None:
        """Believe no such thing for a while: the parent process has seen an outage."""
        self._attempts.outage.doubt()

    def read_runs(self, task_names: Sequence[str], always: Sequence[str] = ()) -> list[RunState]:
        """Return which of these tasks have a run whose holder died.

        :param always: tasks whose last run is returned whatever its state
        :raises TaskLockDatabaseError: the database is away
        :raises TaskLockError: it refuses
        """

        def statement(cursor: Any) -> list[RunState]:
            sent = time.monotonic()
            states, database_time = self._protocol.read(cursor, task_names, always)
            self._learn(sent, database_time)
            return states

        return self._attempts.once(statement)

    def give_up(self, dead: RunState) -> bool:
        """Finish a dead run that is not to be run again; tell whether this replica did.

        :raises TaskLockDatabaseError: the database is away
        :raises TaskLockError: it refuses
        """
        return self._attempts.once(
            lambda cursor: self._protocol.give_up(cursor, dead.task_name, dead.claim_id)
        )

    def end_lease(self, task_name: str, claim_id: UUID, holders: Sequence[str]) -> bool:
        """End the lease of a claim whose holder, one of these, is known to be dead.

        :return: whether there was such a claim
        :raises TaskLockDatabaseError: the database is away
        :raises TaskLockError: it refuses
        """
        ended = self._attempts.once(
            lambda cursor: self._protocol.end_lease(
                cursor, task_name, claim_id, handed_over=False, holders=holders
            )
        )
        return ended is not None

    def prune(self, age: float) -> int:
        """Delete the rows of one-off jobs that were over so many seconds ago; return how many.

        :raises TaskLockDatabaseError: the database is away
        :raises TaskLockError: it refuses, as for a role that may not delete
        """
        return self._attempts.once(lambda cursor: self._protocol.prune(cursor, age))

    def take_pending(self) -> list[OwedRelease]:
        """Return the releases that could not be sent, for another process to send them."""
        return self._claims.owed.take()

    def adopt_pending(self, releases: Sequence[OwedRelease]) -> None:
        """Send releases that another process could not send."""
        for release in releases:
            self._claims.owed.adopt(release)

    def hold(
        self,
        name: str,
        *,
        min_lock: float | timedelta,
        max_lock: float | timedelta,
        lease: float | timedelta | Default | None = DEFAULT,
    ) -> Hold:
        """Return a context manager, sync or async, and decorator that holds a task's lock.

        Entered, it gives the :class:`HeldLock`, which is also ``current_lock()``.

        :param name: the task's name
        :param min_lock: seconds or ``timedelta``, 0 or more, from the claim on, during which the
            task is refused to everybody, also after it was released
        :param max_lock: seconds or ``timedelta``, above 0, after which the lock ends, whether or
            not its holder lives
        :param lease: seconds or ``timedelta``, 1 or more, after which a holder that does not
            renew its claim counts as dead; by default 60 s or a third of ``max_lock``, whichever is
            shorter, and ``max_lock`` itself if that third is below 1 s; ``None``: ``max_lock``
        :raises TaskLockOptionError: one of them is impossible
        :raises TaskLockRefusedError: when entered: the task runs elsewhere, or was just run
        :raises TaskLockError: when entered: the database is away, or refuses
        """
        where = f"hold({name!r})"
        given = {"min_lock": min_lock, "max_lock": max_lock, "lease": lease}
        options = LockOptions.parse(given, where)
        least, most = options.lock_times(period=0)
        wanted = WantedClaim(check_name(name, where), least, most, lease=options.lease_within(most))
        return Hold(self, wanted)

    def open(self) -> None:
        """Let claims through again after :meth:`close`."""
        self._database.open()
        self.in_use.open()
        self.offload.open()
        self._closing.reopen()

    def wait(self, seconds: float) -> bool:
        """Wait for so long, or until these task locks are closed; tell whether they are."""
        return self._closing.wait(seconds)

    def stop_claiming(self) -> None:
        """End what claims under way wait for. Releases still go through.

        From now on each attempt at a claim ends within 1.5 seconds, and at a release within 3.
        """
        self._closing.stop()

    def stop_claiming_in_a_signal_handler(self) -> None:
        """Do the same where the interrupted code may hold any lock."""
        self._closing.stop_in_a_signal_handler()

    def close(self, *, blocking: bool = False) -> None:
        """Claim nothing more, send pending releases, and close idle connections.

        While the database is unavailable, these are tried for 3 seconds. On an event loop a thread
        does that, which the process waits for when it ends, unless ``blocking``. What is held can
        still be released, on a connection that is closed after it.
        """
        self._closing.stop()
        if blocking:
            self._claims.close()
        else:
            off_the_loop(self._claims.close)
        self._database.close()
        self.in_use.close()


logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# Seconds after which it is looked again whether a run that seems dead is.
PAUSE = 0.3

LOST = (
    "Task %r: its lock is lost (token %s), and another replica may hold it. Either it could not be "
    "renewed in time, or what held it outlived max_lock; if so, raise that above what it takes"
)


class Hold:
    """A task lock to hold once: a context manager, sync or async. As a decorator, once per call.

    Made by ``TaskLocks.hold``.

    :param wanted: what is claimed each time
    """

    def __init__(self, locks: TaskLocks, wanted: WantedClaim) -> None:
        self._locks = locks
        self._name = wanted.task_name
        self._wanted = wanted
        self._entered = False
        self._held: HeldLock | None = None
        self._context = ExitStack()

    def __enter__(self) -> HeldLock:
        with self._entering():
            return self._make_current(self._claim())

    def __exit__(self, *_: object) -> None:
        self._release(self._leave())

    async def __aenter__(self) -> HeldLock:
        with self._entering():
            if self._locks.closed:
                self._claim()  # raises
            with self._locks.in_use:
                held = await self._locks.offload.claim(
                    self._claim, partial(self._release, ending=Ending.OPEN)
                )
            held.runs_on(asyncio.get_running_loop())
            return self._make_current(held)

    async def __aexit__(self, *_: object) -> None:
        # In a thread that goes on when this is cancelled.
        await self._locks.offload.release(partial(self._release, self._leave()))()

    def __call__(self, function: Function) -> Function:
        """Hold the lock around each call of a function or coroutine function.

        :raises TaskLockOptionError: a call of it only makes something that runs later, unlocked
        """
        if isclass(function) or isgeneratorfunction(function) or isasyncgenfunction(function):
            raise self._runs_later(function)
        if iscoroutinefunction(function) or iscoroutinefunction(_call_of(function)):

            @functools.wraps(function)
            async def held_coroutine(*args: Any, **kwargs: Any) -> Any:
                async with self._anew():
                    return await function(*args, **kwargs)

            return held_coroutine  # type: ignore[return-value]  # it has the same signature

        @functools.wraps(function)
        def held(*args: Any, **kwargs: Any) -> Any:
            with self._anew():
                result = function(*args, **kwargs)
                if iscoroutine(result):
                    result.close()
                    raise self._runs_later(function)
                return result

        return held  # type: ignore[return-value]  # it has the same signature

    def _runs_later(self, function: Callable[..., Any]) -> TaskLockOptionError:
        name = getattr(function, "__qualname__", repr(function))
        return TaskLockOptionError(
            f"hold({self._name!r}) cannot decorate {name}, whose body runs after the call; hold "
            "the lock inside it"
        )

    def _anew(self) -> Hold:
        return Hold(self._locks, self._wanted)

    def _entering(self) -> ExitStack:
        """Return a context in which this is entered; it is not if an exception leaves it."""
        if self._entered:
            raise TaskLockError(f"this hold of task {self._name!r} is entered already")
        self._entered = True
        entering = ExitStack()
        entering.push(self._not_entered)
        return entering

    def _not_entered(self, _type: object, exception: object, _traceback: object) -> None:
        self._entered = exception is None

    def _claim(self) -> HeldLock:
        claimed = self._locks.claim(self._wanted)
        # A run whose lease has ended counts as dead only after a while, in which it may be renewed
        # or released: right after an outage, and in a process that has just started.
        while isinstance(claimed, Refusal) and claimed.waits and not self._locks.wait(PAUSE):
            claimed = self._locks.claim(self._wanted)
        if not isinstance(claimed, HeldLock):
            raise TaskLockRefusedError(
                self._name, claimed.holder, claimed.locked_until, claimed.reason
            )
        return claimed

    def _make_current(self, held: HeldLock) -> HeldLock:
        self._held = held
        held.when_lost(partial(logger.warning, LOST, held.name, held.token))
        self._context.enter_context(holding(held))
        return held

    def _leave(self) -> HeldLock:
        held, self._held = self._held, None
        assert held is not None
        self._entered = False
        self._context.close()
        return held

    def _release(self, held: HeldLock, ending: Ending = Ending.KEEP) -> None:
        if held.inherited:
            return
        untold = held.untold
        try:
            released = self._locks.release(held, ending)
        except TaskLockDatabaseError:
            return  # logged as an outage; the release is owed
        except TaskLockError as error:
            logger.error(
                "Task %r: its lock could not be released, and is tried again until it ends by "
                "itself: %s",
                held.name,
                error,
            )
            return
        if released is None and untold:
            logger.warning(LOST, held.name, held.token)


def _call_of(function: Callable[..., Any]) -> Any:
    """Return what a call of an object runs."""
    return getattr(function, "__call__", None)  # noqa: B004  # what it is, not whether there is one


@dataclass(frozen=True)
class LockSettings:
    """The arguments of ``TaskLocks``, to be pickled. ``database`` holds the password."""

    database: URL = field(repr=False)
    replica_id: str
    claim_timeout: float
    schema: str | None
    table: str


def as_url(database: str | URL | Engine) -> URL:
    """Return the URL of what an application gave as its database."""
    return database.url if isinstance(database, Engine) else parse_url(database)


def make_replica_id() -> str:
    """Return an id for this replica: host, process, and a random part.

    Containers share host names and process ids more often than one would think.
    """
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
