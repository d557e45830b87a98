"""Signs of life: a replica reports in its row that it is alive, its tasks, and its running runs."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from math import inf
from typing import Any

from apscheduler_tasklock._database.rejections import (
    OLD_HISTORY,
    OLD_REPLICAS,
    REMOVED_TASKS,
    SIGN_OF_LIFE,
)
from apscheduler_tasklock._database.sequences import Statement, Statements
from apscheduler_tasklock._lock.command_lines import library_version
from apscheduler_tasklock._lock.protocol_messages import (
    RemoveReplicas,
    Retire,
    ShortenHistory,
    SignOfLife,
    Stop,
)
from apscheduler_tasklock._lock.statements.retention import REPLICA_RETENTION
from apscheduler_tasklock._lock.user import ReplicaUser
from apscheduler_tasklock._runs.known_tasks import KnownTasks
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.status import RunningRun

logger = logger_of(__name__)

# Limits the seconds for which the first sign of life waits for the first look, because that look
# finds the names of all tasks.
FIRST_WAIT = 10.0
# Seconds after which a sign of life that failed is tried again.
RETRY_INTERVAL = 5.0
# Seconds for which a replica tries to mark its removed tasks as not due any more. A task is not
# marked while other replicas still have the task.
DROPPED_FOR = 600.0


class Presence:
    """Sends the signs of life of a replica: every 30 s, and at once if their content has changed.

    The replica's thread sends the signs of life, so that no code of the application delays them.

    :param user: the executor as a user of its replica
    :param known: the tasks of this replica
    :param rejected: returns what the database rejects of the replica's work, for operators; by
        default the rejections of ``user``
    :param leader_namespace: returns the namespace in which the replica leads or follows; ``None``:
        it is not in leader mode, or has no jobs for it
    """

    def __init__(
        self,
        user: ReplicaUser,
        known: KnownTasks,
        rejected: Callable[[], Sequence[str]] | None = None,
        leader_namespace: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._user = user
        self._known = known
        self._leader_namespace = leader_namespace
        self._rejected = rejected or user.rejections.reported
        self._interval = user.settings.timings.report_interval
        self._closed = False
        self._is_stop_reported = False  # whether a stop without running runs was reported
        # Times on the monotonic clock.
        self._due_at = inf  # when to check whether there is something to send
        self._report_at = 0.0  # when to send the next sign of life, even if nothing has changed
        # When the replica is assumed to have all of its jobs: one interval after its first look,
        # because an application may add jobs one by one after the start. 0: not known yet.
        self._has_all_at = 0.0
        self._is_sending = False
        self._started_at: datetime | None = None  # from the answer to the first sign of life
        self._is_known = False  # whether a sign of life has arrived in the database
        self._reported: tuple[Sequence[str], Sequence[str]] = ([], ())  # tasks and rejections
        self._retires = False  # whether removed tasks are still to be marked in their rows
        self._is_clean = False  # whether old replicas and old history were deleted
        self._reported_lost: frozenset[int] = frozenset()  # tokens of runs whose lock is lost
        # Tasks that were removed from this replica, and until when it tries to mark their rows.
        self._dropped: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        """Whether :meth:`close` was called, so that no sign of life is sent any more."""
        return self._closed

    @property
    def due_at(self) -> float:
        """When to check next whether a sign of life is due, on the monotonic clock."""
        return inf if self._closed else self._due_at

    def start(self) -> None:
        """Begin to send signs of life, the first one after the first look."""
        self._due_at = time.monotonic() + FIRST_WAIT
        self._user.thread.add_recurring(self)

    def note_look(self, *, has_listed: bool) -> None:
        """Send a sign of life at once if its content has changed. Called after each look.

        :param has_listed: whether all jobs that the scheduler started with are known
        """
        if has_listed and not self._has_all_at:
            self._has_all_at = time.monotonic() + self._interval
        is_started = self.due_at < inf or self._is_sending
        if is_started and self._is_wanted():
            self._user.thread.call(self._hurry)

    def report_alive(self) -> None:
        """Send a sign of life at once, because the worker process of a run has died.

        Without the sign of life, operators would see the whole replica as dead.
        """
        self._user.thread.call(self._be_due)

    def _be_due(self) -> None:
        self._report_at = 0.0
        self._hurry()

    def _hurry(self) -> None:
        if not self._is_sending:
            self._due_at = time.monotonic()

    def begin(self, _now: float) -> None:
        """Begin to send a sign of life. Called in the replica's thread."""
        self._due_at, self._is_sending = inf, True
        self._user.database.begin_all(self.send(), lambda function: function(), self._end)

    def _end(self) -> None:
        self._is_sending = False
        retry_at = time.monotonic() + min(RETRY_INTERVAL, self._interval)
        self._due_at = max(self._report_at, retry_at)

    def _is_wanted(self) -> bool:
        """Return whether a sign of life is due, or rows of removed tasks are to be marked."""
        return self._retires or self._is_sign_due()

    def _is_sign_due(self) -> bool:
        is_due = time.monotonic() >= self._report_at
        return is_due or self._content() != self._reported or self._lost() != self._reported_lost

    def _content(self) -> tuple[Sequence[str], Sequence[str]]:
        # A rejection of the sign of life itself is left out, because a sign of life that the
        # database rejects cannot report it.
        rejected = [each for each in self._rejected() if not each.startswith(f"{SIGN_OF_LIFE}: ")]
        return self._known.names(), tuple(rejected)

    def _lost(self) -> frozenset[int]:
        return frozenset(run.token for run in self._user.locks.what_runs() if run.lost)

    def send(self) -> Statements[None]:
        """Send a sign of life if one is due, mark removed tasks, and delete old rows."""
        try:
            yield from self._send()
        except TaskLockDatabaseError:
            pass  # logged as an outage
        except Exception:  # so that an error is logged and does not end the signs of life
            logger.exception("A sign of life of this replica failed; trying again")

    def _send(self) -> Statements[None]:
        if self._closed or not self._is_wanted():
            return
        names, rejected = self._content()
        if self._is_sign_due():
            running, lost = self._user.locks.what_runs(), self._lost()
            self._note_dropped(names)
            sign = self._sign_of_life(names, rejected, running)
            if not (yield from self._try(SIGN_OF_LIFE, self._unless_closed(sign))):
                return
            # Set only after the sign of life has arrived, so that after an outage the next sign of
            # life is sent at once.
            self._report_at, self._is_known = time.monotonic() + self._interval, True
            self._reported, self._reported_lost = (names, rejected), lost
        yield from self._retire(names)
        if not self._is_clean:
            yield from self._clean_up()

    def _sign_of_life(
        self, names: Sequence[str], rejected: Sequence[str], running: Sequence[RunningRun]
    ) -> Statement:
        sign = SignOfLife(
            socket.gethostname(),
            library_version(),
            names,
            self._started_at,
            rejected,
            running,
            self._leader_namespace(),
        )

        def report(cursor: Any) -> None:
            answer = self._user.database.carrying_out(sign)(cursor)
            self._started_at, self._user.outage.live_replicas = answer

        return report

    def _unless_closed(self, statement: Statement) -> Statement:
        """Return a statement that does nothing if :meth:`close` was called before it is sent."""
        return lambda cursor: None if self._closed else statement(cursor)

    def _try(self, what: str, statement: Statement, *, quiet: bool = False) -> Statements[bool]:
        """Send a statement, and note whether the database rejects it.

        :param what: the name of the rejection, for operators
        :param quiet: whether a rejection is logged at INFO only, and not reported to operators
        :return: whether the statement was carried out
        :raises TaskLockDatabaseError: the database is unavailable
        """
        try:
            yield statement
        except TaskLockDatabaseError:
            raise
        except TaskLockError as error:
            self._user.rejections.begin(what, error, quiet=quiet)
            return False
        self._user.rejections.end(what)
        return True

    def _note_dropped(self, names: Sequence[str]) -> None:
        now = time.monotonic()
        dropped = {**self._dropped, **dict.fromkeys(self._reported[0], now + DROPPED_FOR)}
        for name in names:
            dropped.pop(name, None)
        self._dropped = {name: until for name, until in dropped.items() if now < until}

    def _retire(self, names: Sequence[str]) -> Statements[None]:
        """Mark removed tasks in their rows as not due any more.

        If the database rejects the statement, the statement is tried again after the next look.
        """
        self._retires = True
        # A task that a stopped replica had and this replica does not have was removed from the
        # application. Only a replica that has all of its jobs can tell this.
        has_all = 0.0 < self._has_all_at <= time.monotonic()
        successor_of = names if has_all else []
        retiring = self._user.database.carrying_out(Retire(successor_of, list(self._dropped)))
        if (yield from self._try(REMOVED_TASKS, retiring)):
            self._retires = False

    def close(self, running: Sequence[RunningRun], until: float = inf) -> None:
        """Report that this replica stops, and which runs go on, if the database is available.

        :param running: the runs that the stop waits for
        :param until: limits how long the report is tried; on the monotonic clock
        """
        self._closed = True
        if self._is_stop_reported and not running:
            return
        if self._is_known and self._user.outage.reason is None:
            try:
                self._user.database.ask(self._user.database.carrying_out(Stop(running)), until)
                self._is_stop_reported = not running
            except TaskLockError as error:
                logger.debug("The stop of this replica could not be reported: %s", error)

    def _clean_up(self) -> Statements[None]:
        """Delete the rows of old replicas and old history, if the database role has the rights."""
        remove = self._user.database.carrying_out(RemoveReplicas(REPLICA_RETENTION))
        shorten = self._user.database.carrying_out(ShortenHistory(self._known.names()))
        removed = yield from self._try(OLD_REPLICAS, remove, quiet=True)
        shortened = yield from self._try(OLD_HISTORY, shorten, quiet=True)
        self._is_clean = removed and shortened
