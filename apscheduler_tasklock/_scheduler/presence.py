"""Signs of life: a replica tells that it is there, which tasks it has, and what it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import inf

from apscheduler_tasklock._database.rejections import (
    OLD_HISTORY,
    OLD_REPLICAS,
    REMOVED_TASKS,
    SIGN_OF_LIFE,
)
from apscheduler_tasklock._database.steps import Statement, Steps
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._scheduler.known import KnownTasks
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.status import RunningRun

logger = logger_of(__name__)

# Limits the seconds that the first sign of life waits for the first look, so that it has all tasks.
FIRST_WAIT = 10.0
# Seconds after which it is tried again in an outage.
RETRY_INTERVAL = 5.0
# Seconds for which a replica tells which tasks were removed from it, so that the last one that had
# them knows.
DROPPED_FOR = 600.0
# Seconds after which a replica that nobody has seen is removed.
REPLICA_RETENTION = 3600.0


class Presence:
    """Tells that a replica is alive, every 30 s, and at once if what it tells has changed.

    The database's thread does that by itself, so that no code of the application holds it up.

    :param locks: the task locks of this replica
    :param known: its tasks
    :param rejected: returns what the database rejects of its work, for operators; by default what
        these locks know
    :param timings: has the interval
    """

    def __init__(
        self,
        locks: LockClient,
        known: KnownTasks,
        rejected: Callable[[], Sequence[str]] | None = None,
        timings: Timings | None = None,
    ) -> None:
        self._locks = locks
        self._known = known
        self._rejected = rejected or locks.rejections.told
        self._interval = (timings or Timings()).report_interval
        self._closed = False
        self._is_told_stopped = False  # with nothing that still runs
        # On the monotonic clock.
        self._due_at = inf
        self._report_at = 0.0
        self._has_all_at = 0.0  # 0: unknown yet. Jobs are added after the start, one by one
        self._is_telling = False
        self._is_known = False  # whether a sign of life has come to the database
        self._reported: tuple[Sequence[str], Sequence[str]] = ([], ())  # tasks, what is rejected
        self._retires = False  # whether tasks may have been removed that somebody waits for
        self._is_clean = False  # whether what is left of old replicas and histories was deleted
        self._reported_lost: frozenset[int] = frozenset()  # the tokens of what ran without its lock
        # The tasks that this replica had, and until when it says so.
        self._dropped: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def due_at(self) -> float:
        """When the next sign of life is due, on the monotonic clock."""
        return inf if self._closed else self._due_at

    def start(self) -> None:
        """Begin to give signs of life, the first of them after the first look."""
        self._due_at = time.monotonic() + FIRST_WAIT
        self._locks.add_recurring(self)

    def note_look(self, *, has_listed: bool) -> None:
        """Tell at once what has changed. Called after each look; does not wait.

        :param has_listed: whether all jobs that the scheduler started with are known
        """
        if has_listed and not self._has_all_at:
            self._has_all_at = time.monotonic() + self._interval
        is_started = self.due_at < inf or self._is_telling
        if is_started and self._is_wanted():
            self._locks.call(self._hurry)

    def tell_alive(self) -> None:
        """Tell at once that this replica lives: a run of its was found dead. Does not wait."""
        self._locks.call(self._be_due)

    def _be_due(self) -> None:
        self._report_at = 0.0
        self._hurry()

    def _hurry(self) -> None:
        if not self._is_telling:
            self._due_at = time.monotonic()

    def begin(self, _now: float) -> None:
        """Give a sign of life. Called in the database's thread."""
        self._due_at, self._is_telling = inf, True
        self._locks.run_steps(self.tell(), _here, self._end)

    def _end(self) -> None:
        self._is_telling = False
        retry_at = time.monotonic() + min(RETRY_INTERVAL, self._interval)
        self._due_at = max(self._report_at, retry_at)

    def _is_wanted(self) -> bool:
        """Whether there is something to tell."""
        return self._retires or self._is_sign_due()

    def _is_sign_due(self) -> bool:
        is_due = time.monotonic() >= self._report_at
        return is_due or self._told() != self._reported or self._lost() != self._reported_lost

    def _told(self) -> tuple[Sequence[str], Sequence[str]]:
        # What tells that it is rejected is the sign of life itself.
        rejected = [each for each in self._rejected() if not each.startswith(f"{SIGN_OF_LIFE}: ")]
        return self._known.names(), tuple(rejected)

    def _lost(self) -> frozenset[int]:
        return frozenset(run.token for run in self._locks.what_runs() if run.lost)

    def tell(self) -> Steps[None]:
        """Tell what there is to tell."""
        try:
            yield from self._tell()
        except TaskLockDatabaseError:
            pass  # logged as an outage
        except Exception:  # nothing may end this unseen
            logger.exception("No sign of life could be given; trying again")

    def _tell(self) -> Steps[None]:
        if self._closed or not self._is_wanted():
            return
        names, rejected = self._told()
        if self._is_sign_due():
            running, lost = self._locks.what_runs(), self._lost()
            self._note_dropped(names)
            sign = self._locks.sign_of_life(_version(), names, rejected, running)
            if not (yield from self._try(SIGN_OF_LIFE, self._unless_closed(sign))):
                return
            # Not before it has succeeded: after an outage nobody waits for the next one.
            self._report_at, self._is_known = time.monotonic() + self._interval, True
            self._reported, self._reported_lost = (names, rejected), lost
        yield from self._retire(names)
        if not self._is_clean:
            yield from self._clean_up()

    def _unless_closed(self, statement: Statement) -> Statement:
        """Return what asks, unless this replica has told meanwhile that it stops."""
        return lambda cursor: None if self._closed else statement(cursor)

    def _try(self, what: str, statement: Statement, *, quiet: bool = False) -> Steps[bool]:
        """Do something; note whether the database takes it, and tell.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        try:
            yield statement
        except TaskLockDatabaseError:
            raise
        except TaskLockError as error:
            self._locks.rejections.begin(what, error, quiet=quiet)
            return False
        self._locks.rejections.end(what)
        return True

    def _note_dropped(self, names: Sequence[str]) -> None:
        now = time.monotonic()
        dropped = {**self._dropped, **dict.fromkeys(self._reported[0], now + DROPPED_FOR)}
        for name in names:
            dropped.pop(name, None)
        self._dropped = {name: until for name, until in dropped.items() if now < until}

    def _retire(self, names: Sequence[str]) -> Steps[None]:
        """Let nobody wait for tasks that were removed. Rejected, it is done at the next look."""
        self._retires = True
        # Only what has all of its jobs by now knows what a replica before it had, and it has not.
        has_all = 0.0 < self._has_all_at <= time.monotonic()
        successor_of = names if has_all else []
        retiring = self._locks.retiring(successor_of, list(self._dropped))
        if (yield from self._try(REMOVED_TASKS, retiring)):
            self._retires = False

    def close(self, running: Sequence[RunningRun]) -> None:
        """Tell that this replica stops, and what it still runs, unless it cannot be told."""
        self._closed = True
        if self._is_told_stopped and not running:
            return
        if self._is_known and self._locks.outage.reason is None:
            try:
                self._locks.stop_replica(running)
                self._is_told_stopped = not running
            except TaskLockError as error:
                logger.debug("This replica counts as alive for a while: %s", error)

    def _clean_up(self) -> Steps[None]:
        """Remove replicas that nobody has seen for long, and old history, if this role may."""
        remove = self._locks.removing_replicas(REPLICA_RETENTION)
        shorten = self._locks.shortening_history(self._known.names())
        removed = yield from self._try(OLD_REPLICAS, remove, quiet=True)
        shortened = yield from self._try(OLD_HISTORY, shorten, quiet=True)
        self._is_clean = removed and shortened


def _here(function: Callable[[], object]) -> None:
    function()


def _version() -> str:
    try:
        return version("apscheduler-tasklock")
    except PackageNotFoundError:  # run from a folder where it is not installed
        return "(not installed)"
