"""A job and its lock, in a worker process of a pool.

The parent process claims, renews and releases the lock. A worker process opens a connection to the
database only to extend a lock, and then closes the connection.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock._lock.tracebacks import Section, sections_of
from apscheduler_tasklock._lock.user import ReplicaUser
from apscheduler_tasklock._returned import check_returned
from apscheduler_tasklock._runs.given_job import JobView
from apscheduler_tasklock.lock import HeldLock, holding

# Seconds between two checks of a worker whether its parent is dead. Usually the parent's sentinel
# wakes the worker at once, and no check is needed. But if the parent has forked another process
# that still lives, that process keeps the sentinel open.
INTERVAL = 0.5


@dataclass(frozen=True)
class LockInWorker:
    """The data of a lock that the parent holds, as its worker process gets them.

    :ivar ends_at: the end of the maximum lock, on the monotonic clock, which all processes of a
        machine share
    :ivar failover: whether another replica runs the window again if the parent is dead
    :ivar settings: the settings of a connection that extends the lock; ``None``: there is no
        database, because a stand-in replaces it in an application's tests
    """

    name: str
    token: int
    claim_id: UUID
    run_time: datetime | None
    window_start: datetime
    locked_until: datetime
    run_until: datetime
    ends_at: float
    lease: float | None
    dead_holder: str | None
    attempt: int
    failover: bool
    settings: LockSettings | None

    @classmethod
    def of(cls, held: HeldLock, settings: LockSettings, *, failover: bool) -> LockInWorker:
        """Return the data of a held lock."""
        return cls(
            held.name,
            held.token,
            held.claim_id,
            held.run_time,
            held.window_start,
            held.locked_until,
            held.run_until,
            time.monotonic() + held.seconds_left,
            held.lease,
            held.dead_holder,
            held.attempt,
            failover,
            None if settings.stand_in is not None else settings.for_process(),
        )

    def held(self) -> HeldLock:
        """Return the lock as ``current_lock()`` shows it."""
        return HeldLock(
            name=self.name,
            token=self.token,
            claim_id=self.claim_id,
            run_time=self.run_time,
            window_start=self.window_start,
            locked_until=self.locked_until,
            run_until=self.run_until,
            ends_at=self.ends_at,
            extender=_extend_here if self.settings is None else partial(_extend, self.settings),
            lease=self.lease,
            dead_holder=self.dead_holder,
            attempt=self.attempt,
        )


def _extend(settings: LockSettings, held: HeldLock, by: float) -> bool:
    """Extend a lock on a connection that is closed afterwards.

    The parent learns of the lock's new end with its next renewal.
    """
    user = ReplicaUser(settings)
    try:
        return user.locks.extend(held, by)
    finally:
        user.close(blocking=True)


def _extend_here(held: HeldLock, by: float) -> bool:
    """Extend a lock in this process alone, because only the parent has the database's stand-in."""
    until = held.run_until + timedelta(seconds=by)
    held.note_renewal(held.locked_until, until, time.monotonic() + held.seconds_left + by)
    return True


class TimedId(str):
    """A job's id that also tells how the run went, for the event of a worker process.

    :ivar took: seconds that the run took
    :ivar raised: the traceback of the exception that the job has raised; empty: it raised none
    """

    __slots__ = ("raised", "took")
    took: float
    raised: tuple[Section, ...]

    def __new__(cls, job_id: str, took: float, raised: tuple[Section, ...]) -> TimedId:
        """Make the id for a run that is over."""
        made = super().__new__(cls, job_id)
        made.took, made.raised = took, raised
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return TimedId, (str(self), self.took, self.raised)


class JobInWorker(JobView):
    """Stands in for a job when APScheduler's ``run_job`` runs it in a worker process.

    :param lock: the lock of the run, if it has one
    """

    def __init__(
        self, job: Any, misfire_grace_time: float | None, lock: LockInWorker | None
    ) -> None:
        super().__init__(job, misfire_grace_time)
        self._function: Callable[..., Any] = self.func
        self._lock = lock
        self.func = self._run

    def _run(self, *arguments: Any, **named: Any) -> Any:
        began_at = time.monotonic()
        raised: tuple[Section, ...] = ()
        try:
            with _under(self._lock):
                returned = self._function(*arguments, **named)
            named_by = f"job {self.id!r}" if self._lock is None else f"task {self._lock.name!r}"
            return check_returned(returned, f"{named_by}: its function")
        except Exception as error:
            with suppress(Exception):  # because the exception is the application's
                raised = sections_of(error)
            raise
        finally:
            # APScheduler makes the run's event after this line, with this id. So the parent learns
            # how long the job took without the start of the worker process, which must not make
            # other runs count as late.
            if self._lock is not None:
                self.id = TimedId(self.id, time.monotonic() - began_at, raised)


class RunTimesInWorker(list[datetime]):
    """A list with the run time of a job with a lock. The worker begins the run by iterating.

    :param lock: the lock of the run
    """

    def __init__(self, run_time: datetime, lock: LockInWorker) -> None:
        super().__init__([run_time])
        self._lock = lock

    def __iter__(self) -> Iterator[datetime]:
        """Begin the run, unless its lock has ended or the parent is dead."""
        may_begin = parent.is_watched() and time.monotonic() < self._lock.ends_at
        return super().__iter__() if may_begin else iter(())

    def __reduce__(self) -> tuple[Any, ...]:
        return RunTimesInWorker, (self[0], self._lock)


def _under(lock: LockInWorker | None) -> AbstractContextManager[None]:
    return nullcontext() if lock is None else _running(lock)


@contextmanager
def _running(lock: LockInWorker) -> Iterator[None]:
    """Make a lock the current lock during the block; if the parent dies meanwhile, lose it."""
    held = lock.held()
    with parent.holding(held, failover=lock.failover), holding(held):
        yield


class Parent:
    """Watches the parent process, in a worker process.

    When the parent is dead, nobody renews the locks of its workers any more. So a thread of the
    worker waits for the parent's death. The thread starts with the worker's first job that has a
    lock.
    """

    def __init__(self) -> None:
        self._watched_in: int | None = None  # the id of the process whose thread watches
        self._is_dead = False
        self._looks_dead: Callable[[], bool] = bool
        self._running: tuple[HeldLock, bool] | None = None

    def is_watched(self) -> bool:
        """Watch the parent from now on; return whether it lives."""
        process = multiprocessing.parent_process()
        if process is None:  # so this is no worker process, and there is no parent to watch
            return True
        if self._watched_in != os.getpid():
            self._watched_in, self._is_dead = os.getpid(), False
            # Whether the parent itself has started this process, and not a forkserver.
            is_direct = (_forked_by or os.getppid()) == process.pid
            self._looks_dead = partial(_is_dead, process, is_direct=is_direct)
            threading.Thread(
                target=self._wait, args=(process,), name="tasklock-parent", daemon=True
            ).start()
        self._is_dead = self._is_dead or self._looks_dead()
        return not self._is_dead

    @contextmanager
    def holding(self, held: HeldLock, *, failover: bool) -> Iterator[None]:
        """Let a lock be lost if the parent dies during the block.

        :param failover: whether another replica then runs the lock's window again. If so, this
            process ends at once.
        """
        self._running = held, failover
        if self._is_dead:
            self._lose()
        try:
            yield
        finally:
            self._running = None
            held.end()

    def _wait(self, process: Any) -> None:
        while not self._looks_dead():
            process.join(INTERVAL)
        # `_is_dead` is set before `_running` is read, because `holding` sets `_running` before it
        # reads `_is_dead`. So at least one of the two threads sees that the lock is lost.
        self._is_dead = True
        self._lose()

    def _lose(self) -> None:
        running = self._running
        if running is None:
            return
        held, failover = running
        if failover:
            os._exit(1)  # so that the window is not run here while another replica runs it
        held.lose()


parent = Parent()


def _is_dead(process: Any, *, is_direct: bool) -> bool:
    return (is_direct and os.getppid() != process.pid) or not process.is_alive()


# The id of the process that has forked this one, if this module was imported before the fork.
_forked_by: int | None = None


def _note_fork() -> None:
    global _forked_by  # noqa: PLW0603  # one per process
    _forked_by = os.getppid()


if hasattr(os, "register_at_fork"):  # missing on Windows, which does not fork
    os.register_at_fork(after_in_child=_note_fork)
