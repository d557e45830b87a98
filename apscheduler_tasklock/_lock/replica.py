"""Replicas: what a scheduler's executors and job store share, above all the connection.

An executor, a job store or a ``TaskLocks`` is a *user* of its replica.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.connection import attempt_limit, host_count
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.rejections import Rejections
from apscheduler_tasklock._database.session import NoSession, Session, opener
from apscheduler_tasklock._database.thread import ReplicaThread
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.url import as_url, describe
from apscheduler_tasklock._lock.command_lines import command_line
from apscheduler_tasklock._lock.database_clock import DatabaseClock
from apscheduler_tasklock._lock.heartbeat import Heartbeat
from apscheduler_tasklock._lock.protocol import HISTORY, TaskLockStatements
from apscheduler_tasklock._lock.protocol_messages import LockEnds, LockProtocol, Renewal, Renewals
from apscheduler_tasklock._lock.statements import probe
from apscheduler_tasklock._lock.test_doubles import StandIn
from apscheduler_tasklock._shutdown import Closing
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.options import KEEP_ONE_OFFS
from apscheduler_tasklock.schema.check import explain_rejection, lock_query
from apscheduler_tasklock.schema.table import DEFAULT_TABLE, task_lock_table


@dataclass(frozen=True)
class LockSettings:
    """The settings of a user of a replica: checked parameters of ``TaskLockExecutor``.

    Times are in seconds.

    :ivar database: a URL, which may have a password, or an application's engine
    :ivar stand_in: stands in for the database in an application's tests
    :ivar is_named: whether the application has given the replica's id
    """

    database: str | URL | Engine = field(repr=False)
    replica_id: str
    claim_timeout: float = 10.0
    schema: str | None = None
    table: str = DEFAULT_TABLE
    history: int = HISTORY
    redact: Callable[[BaseException], str | None] = str
    tracebacks: bool = False
    release: str | None = None
    keep_one_offs: float = KEEP_ONE_OFFS
    timings: Timings = field(default_factory=Timings)
    stand_in: StandIn | None = None
    is_named: bool = True

    def for_process(self) -> LockSettings:
        """Return settings that can be pickled, with which a worker process extends locks."""
        return replace(self, database=as_url(self.database), redact=str)


class Replica:
    """A replica: the connection, the thread that owns it, and the state of the database.

    The executors and the job store of one scheduler share a replica if they use the same database,
    table and replica id. A replica is ready when it is made, and is closed once, by its last user.
    A forked child makes a replica of its own.

    :param settings: the settings of the first user
    :raises TaskLockOptionError: the task lock cannot use the database
    :ivar closing: says whether all users have stopped claiming
    :ivar releasing: says when a close abandons the releases that begin now
    :ivar thread: the replica's thread
    :ivar clock: the bound of the database's time
    :ivar outage: whether the database is available, and its rows are believed
    :ivar rejections: the work of this replica that the database rejects now
    :ivar heartbeat: the renewals, used in the replica's thread only
    """

    def __init__(self, settings: LockSettings) -> None:
        self.settings = settings
        self.table = task_lock_table(settings.table, settings.schema)
        self._url = as_url(settings.database)
        self.where = describe(self._url)
        self.pid = os.getpid()
        self.closing = Closing()
        self._users: list[Closing] = []
        self.releasing = Closing()
        self.attempt = attempt_limit(settings.claim_timeout, settings.timings.longest_answer)
        self.outage = Outage(self.where, self.attempt, settings.timings)
        self.rejections = Rejections(settings.timings.rejected_interval)
        self.clock = DatabaseClock(self.outage.clock_stepped)
        self._protocol = self.protocol(settings)
        session = self._make_session()
        # These hold nothing of the replica itself, so that the connection goes with the last
        # reference to it, and not with the next garbage collection.
        renewing = partial(renew, self._protocol)
        explain = partial(
            explain_rejection, table=self.table, user=self._url.username, where=self.where
        )
        self.heartbeat = Heartbeat(renewing, session.attempt, settings.timings, self.rejections)
        self.thread = ReplicaThread(
            session,
            self.outage,
            explain,
            self.closing,
            self.heartbeat,
            settings.timings,
        )

    def _make_session(self) -> Session:
        """Return the session: the one connection, or a stand-in's session without a connection."""
        settings = self.settings
        if settings.stand_in is not None:
            return NoSession(self.attempt)
        connect = opener(
            settings.database,
            attempt=self.attempt,
            application_name=f"tasklock {settings.replica_id}"[:63],
        )
        return Session(
            connect,
            self.attempt,
            self.outage.idle_connection_ended,
            lock_query(list(self.table.metadata.tables.values())),
            host_count(self._url),
            probe(self.table),
        )

    def protocol(self, settings: LockSettings) -> LockProtocol:
        """Return the protocol of one user."""
        if settings.stand_in is not None:
            return settings.stand_in.protocol(settings.replica_id)
        return TaskLockStatements(
            self.table,
            settings.replica_id,
            history=settings.history,
            rejections=self.rejections,
            release=settings.release,
            keep_one_offs=settings.keep_one_offs,
        )

    def command_line(self, command: str, *options: str, task: str) -> str:
        """Return the command line of an operator's command for a task."""
        schema, table = self.table.schema, self.table.name
        return command_line(command, *options, task=task, schema=schema, table=table)

    def join(self, closing: Closing) -> None:
        """Add a user, which counts until its claiming is stopped, and somebody else joins."""
        for stopped in [user for user in self._users if user.stopped]:
            self.leave(stopped)
        self._users.append(closing)

    def leave(self, closing: Closing) -> bool:
        """Remove a user, which is closed; return whether it was the last one."""
        # Other users may join and leave meanwhile, so the list is changed by atomic calls only.
        with suppress(ValueError):  # it was removed before
            self._users.remove(closing)
        return not self._users

    def close(self, until: float) -> None:
        """Send the pending releases of all users, and close the connection.

        :param until: when releases are not sent any more, on the monotonic clock
        """
        self.releasing.stop(until)
        try:
            self.thread.hurry_releases()
            self.thread.close(until)
        finally:
            # Releases that begin after this have no end. Earlier releases keep theirs, so that the
            # thread still drops those that it has not dropped yet.
            self.releasing = Closing()

    @property
    def is_over(self) -> bool:
        """Whether all users have stopped claiming, or this is a forked child's copy."""
        return self.closing.stopped or self.pid != os.getpid()

    def note_stopped(self) -> None:
        """Stop the claiming of the replica, if all users have stopped theirs."""
        if all(user.stopped for user in list(self._users)):  # also true if there are no users
            self.closing.stop()

    def is_shared_by(self, settings: LockSettings) -> bool:
        """Return whether a user with these settings can share this replica.

        :raises TaskLockOptionError: the user has the same database, but connects in another way
        """
        own = self.settings
        if own.stand_in is not None or settings.stand_in is not None:
            return False
        if (own.schema, own.table, own.is_named) != (
            settings.schema,
            settings.table,
            settings.is_named,
        ):
            return False
        if own.is_named and own.replica_id != settings.replica_id:
            return False
        if isinstance(own.database, Engine) or isinstance(settings.database, Engine):
            return own.database is settings.database
        mine, others = _without_password(own.database), _without_password(settings.database)
        if mine.set(query={}) != others.set(query={}):
            return False
        if mine != others:
            raise TaskLockOptionError(
                "an executor or job store of this scheduler connects to the same database with "
                f"{mine.render_as_string()!r}, and another one with "
                f"{others.render_as_string()!r}; the two share one connection, so give both the "
                "same URL, or give one of them a replica_id of its own"
            )
        return True


def renew(
    protocol: LockProtocol, cursor: Any, held: Sequence[HeldLock], last: frozenset[UUID]
) -> dict[UUID, bool]:
    """Renew claims with one statement.

    Return the ids of the claims that stand, each with whether the claim was renewed.

    :param last: the ids of the claims that are renewed for the last time
    """
    sent = time.monotonic()
    renewals = [
        Renewal(claim.name, claim.claim_id, claim.lease, is_last=claim.claim_id in last)
        for claim in held
    ]
    times = protocol.execute(cursor, Renewals(renewals))
    for claim in held:
        if claim.claim_id in times:
            note_times(claim, times[claim.claim_id], sent)
    return {claim_id: end.locked_until is not None for claim_id, end in times.items()}


def note_times(held: HeldLock, times: LockEnds, sent: float) -> None:
    """Note in a held lock until when its claim stands.

    :param sent: when the statement was sent, on the monotonic clock
    """
    ends_at = sent + (times.run_until - times.database_time).total_seconds()
    held.note_renewal(times.locked_until or held.locked_until, times.run_until, ends_at)


def _without_password(database: str | URL | Engine) -> URL:
    url = as_url(database)
    secret = [name for name in url.query if "password" in name]
    return url.set(password="").difference_update_query(secret)


# The replicas of each scheduler. In a forked child the parent's replicas are over; see `is_over`.
_of_schedulers: WeakKeyDictionary[Any, list[Replica]] = WeakKeyDictionary()


def shared_replica(scheduler: Any, settings: LockSettings, own: Replica | None) -> Replica:
    """Return the replica of a scheduler that a user with these settings has from now on.

    :param own: the user's current replica; ``None`` if that cannot be used any more
    :raises TaskLockOptionError: another user connects to the same database in another way
    """
    replicas = [each for each in _of_schedulers.get(scheduler, ()) if not each.is_over]
    for each in replicas:
        if each is own or each.is_shared_by(settings):
            return each
    made = own or Replica(settings)
    _of_schedulers[scheduler] = [*replicas, made]
    return made
