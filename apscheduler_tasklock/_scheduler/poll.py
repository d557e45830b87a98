"""The poll: one read of the rows of all tasks of a scheduler, every few seconds."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED

from apscheduler_tasklock._database.errors import ConflictError
from apscheduler_tasklock._database.rejections import LOOKS, OLD_ROWS
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.messages import RunState
from apscheduler_tasklock._scheduler.submission import JobKey
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockSchemaError

logger = logger_of(__name__)

# How often rows are looked at during one lease, at least.
LOOKS_PER_LEASE = 3
# Seconds between two looks, at least.
SHORTEST_INTERVAL = 0.2
# Seconds after which it is tried again whether the scheduler runs by now.
STARTING_INTERVAL = 0.2
# Seconds for which rows of one-off jobs are kept after they are over; and from one deletion of such
# rows to the next.
RETENTION = 7 * 24 * 3600.0
PRUNE_INTERVAL = 3600.0


class Watcher(Protocol):
    """What acts on the rows that a look has found."""

    def waiting(self) -> Collection[str]:
        """Return the tasks whose rows are wanted whatever their state."""

    def look(self, states: Sequence[RunState], waiting: Collection[str]) -> None:
        """Do what the rows call for that were found.

        :param waiting: the tasks whose rows were asked for whatever their state
        """


class Poll:
    """Reads the rows of all of a scheduler's tasks that call for something, with one statement.

    It does when it starts, and then at an interval, and lets others act on them.

    :param locks: the task locks of this replica
    :param list_tasks: gives all jobs: their tasks, keys and leases. Asks the job stores. If it
        raises, what it has given is looked at, and the next look asks it again.
    :param state: returns the scheduler's state
    :param interval: seconds between two looks, at most
    :param prune_interval: seconds between two deletions of rows that are over
    :param lease: of jobs with failover, unless they have another one
    :ivar has_looked: whether a look has succeeded
    """

    def __init__(
        self,
        locks: LockClient,
        list_tasks: Callable[[], Iterable[tuple[str, JobKey, float | None]]],
        state: Callable[[], int],
        interval: float,
        prune_interval: float = PRUNE_INTERVAL,
        lease: float | None = None,
    ) -> None:
        self._locks = locks
        self._list_tasks = list_tasks
        self._state = state
        self._interval = interval
        self._prune_interval = prune_interval
        self._watchers: list[Watcher] = []
        self._tellers: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._woken = False
        self._listed = False
        self._is_first = True  # the look when it starts, which waits for nothing
        self._tasks: dict[JobKey, str] = {}
        self._shortest_lease = float("inf") if lease is None else lease
        self._thread: threading.Thread | None = None
        self.has_looked = False

    @property
    def interval(self) -> float:
        """Seconds between two looks, but for their jitter."""
        return min(self._interval, self._shortest_lease / LOOKS_PER_LEASE)

    def add(self, watcher: Watcher) -> None:
        """Let this act on what is found, after those that were added before."""
        self._watchers.append(watcher)

    def add_teller(self, tell: Callable[[], None]) -> None:
        """Call this after each look, also after one that the database has rejected."""
        self._tellers.append(tell)

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._work, name="tasklock-poll", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            # It may be in the middle of a statement, which has a limit of its own.
            thread.join(timeout=STARTING_INTERVAL)

    @property
    def has_listed(self) -> bool:
        """Whether all job stores have told their jobs."""
        return self._listed

    @property
    def closed(self) -> bool:
        """Whether nothing is acted on any more."""
        return self._closed or self._state() == STATE_STOPPED

    def wake(self) -> None:
        """Look now."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def knows(self, task_name: str, key: JobKey) -> bool:
        """Tell whether a job's task is looked at already."""
        return self._tasks.get(key) == task_name

    def know(self, task_name: str, key: JobKey, lease: float | None) -> None:
        """Look at a job's task from now on.

        :param lease: of a job with failover: its row is looked at some times in a lease
        """
        with self._changed:
            self._tasks[key] = task_name
            if lease is not None and lease < self._shortest_lease:
                self._shortest_lease = lease
                self._woken = True  # the pause that goes on may be longer than this lease
                self._changed.notify_all()

    def forget(self, key: JobKey) -> None:
        """Look at a job's task no more: it was removed, or has changed."""
        with self._changed:
            self._tasks.pop(key, None)

    def job_keys(self) -> list[JobKey]:
        """Return all jobs that are known."""
        with self._changed:
            return list(self._tasks)

    def task_names(self) -> list[str]:
        """Return the tasks of all jobs that are known."""
        with self._changed:
            return list(self._tasks.values())

    def keys_of(self, task_name: str) -> list[JobKey]:
        """Return the jobs that are this task."""
        with self._changed:
            return [key for key, name in self._tasks.items() if name == task_name]

    def _work(self) -> None:
        first = min(60.0, self._prune_interval)
        prune_at = time.monotonic() + random.uniform(0, first)  # noqa: S311  # no secret
        while self._wait():
            try:
                self.look()
                if time.monotonic() > prune_at:
                    prune_at = time.monotonic() + self._prune_interval
                    self._prune()
            except TaskLockDatabaseError:
                pass  # logged as an outage
            except Exception:  # nothing may end this thread unseen
                logger.exception("The tasks could not be looked at; trying again")

    def _wait(self) -> bool:
        """Wait until it is time to look; return whether there is anything to look for."""
        with self._changed:
            if not self._is_first:
                self._changed.wait_for(lambda: self._closed or self._woken, self._pause())
            self._is_first = False
            while not self._closed and self._state() != STATE_RUNNING:
                # Paused, or not started yet. What died meanwhile is found afterwards.
                self._changed.wait(STARTING_INTERVAL)
            self._woken = False
            if self._closed:
                self._thread = None
            return not self._closed

    def _pause(self) -> float:
        # With jitter: all replicas of a deployment have started at the same moment.
        return max(SHORTEST_INTERVAL, self.interval * random.uniform(0.9, 1.0))  # noqa: S311  # no secret

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants to see a row whatever its state."""
        return any(watcher.waiting() for watcher in self._watchers)

    def look(self) -> None:
        """Look once. The thread does, at its interval.

        What the database rejects keeps nothing else from being done, and is tried again at the next
        look.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        rejected: list[TaskLockError] = []
        with _noting(rejected):
            self._locks.look_at_rights()
        with _noting(rejected):
            self._list_once()
        with _noting(rejected):
            self._look_at_rows(rejected)
        for tell in self._tellers:
            with _noting(rejected):
                tell()
        if rejected:
            self._locks.rejections.begin(LOOKS, rejected[0])
        else:
            self._locks.rejections.end(LOOKS)

    def _look_at_rows(self, rejected: list[TaskLockError]) -> None:
        waiting = set().union(*(watcher.waiting() for watcher in self._watchers))
        with self._changed:
            names = sorted({*self._tasks.values(), *waiting})
        states = self._locks.read_runs(names, sorted(waiting)) if names else []
        self.has_looked = True
        for watcher in self._watchers:
            with _noting(rejected):
                watcher.look(states, waiting)

    def _list_once(self) -> None:
        if not self._listed:
            for task_name, key, lease in self._list_tasks():
                self.know(task_name, key, lease)
            self._listed = True

    def _prune(self) -> None:
        """Delete rows of one-off jobs that are over, if this role may."""
        try:
            while self._locks.prune(RETENTION) and not self._closed:
                pass  # it deletes so many at a time
        except TaskLockDatabaseError:
            raise
        except TaskLockError as error:
            self._locks.rejections.begin(OLD_ROWS, error, quiet=True)
        else:
            self._locks.rejections.end(OLD_ROWS)


@contextmanager
def _noting(rejected: list[TaskLockError]) -> Iterator[None]:
    """Add to these what the database rejects. Whatever else is raised is logged.

    It ends nothing but its own part of a look, unless the database is unavailable. The next look
    tries again, also what another session was in the way of.
    """
    try:
        yield
    except ConflictError as error:
        logger.debug("Part of a look was not done, because of another session: %s", error)
    except TaskLockDatabaseError:
        raise
    except TaskLockError as error:
        rejected.append(error)
    except Exception:
        logger.exception("The tasks could not be looked at; trying again")


@contextmanager
def one_task(state: RunState, locks: LockClient, what: str) -> Iterator[None]:
    """Let what goes wrong with one task, as in its job store, concern no other.

    :param what: that could not be seen to, for the log line
    """
    try:
        yield
    except ConflictError as error:  # somebody has locked its row
        logger.debug("Task %r: %s could not be seen to: %s", state.task_name, what, error)
    except TaskLockDatabaseError:
        raise
    except TaskLockSchemaError as error:  # the next look tells which right is missing
        locks.rejections.suspect()
        logger.debug("Task %r: %s could not be seen to: %s", state.task_name, what, error)
    except Exception:
        logger.exception("Task %r: %s could not be seen to", state.task_name, what)
