"""In a worker process of a pool: the job there, and what is known of the lock that it runs under.

The parent process claims, renews and releases. A worker process has no connection, but for a moment
where a job extends its lock.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock._scheduler.functions import why_never_run
from apscheduler_tasklock._scheduler.submission import JobView
from apscheduler_tasklock.lock import HeldLock, holding

# Seconds after which a worker looks whether its parent is dead. The parent's sentinel tells that at
# once, unless the parent has forked another process since, which keeps it open.
INTERVAL = 0.5


@dataclass(frozen=True)
class LockInWorker:
    """What a worker process is told of the lock that its parent holds.

    :ivar ends_at: the end of the maximum lock, on the monotonic clock, which the processes of a
        machine share
    :ivar failover: whether another replica runs the window again if the parent is dead
    :ivar settings: with which the lock can be extended; ``None`` where no database is asked
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
    failover: bool
    settings: LockSettings | None

    @classmethod
    def of(cls, held: HeldLock, settings: LockSettings, *, failover: bool) -> LockInWorker:
        """Return what is told of a held lock."""
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
        )


def _extend(settings: LockSettings, held: HeldLock, by: float) -> bool:
    """Extend a lock on a connection that is closed after it. The parent's renewals notice that."""
    locks = LockClient(settings)
    try:
        return locks.extend(held, by)
    finally:
        locks.close(blocking=True)


def _extend_here(held: HeldLock, by: float) -> bool:
    """Extend a lock where something stands in for the database, which only the parent has."""
    until = held.run_until + timedelta(seconds=by)
    held.note_renewal(held.locked_until, until, time.monotonic() + held.seconds_left + by)
    return True


class TimedId(str):
    """A job's id, as of the event of its run, which has brought along how long the run took.

    :ivar took: seconds
    """

    __slots__ = ("took",)
    took: float

    def __new__(cls, job_id: str, took: float) -> TimedId:
        """Make one of a run that is over."""
        made = super().__new__(cls, job_id)
        made.took = took
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return TimedId, (str(self), self.took)


class JobInWorker(JobView):
    """The job as APScheduler's ``run_job`` gets it in a worker process.

    :param lock: that it runs under, if it has one
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
        try:
            with _under(self._lock):
                returned = self._function(*arguments, **named)
            if error := why_never_run(returned, self.id):
                raise error
            return returned
        finally:
            # Its event, which has the id, is made after this. So the time that the process has
            # taken to start makes no run time late that waits for a worker.
            if self._lock is not None:
                self.id = TimedId(self.id, time.monotonic() - began_at)


class RunTimesInWorker(list[datetime]):
    """The run time of a job with a lock, which its worker goes through when it begins."""

    def __init__(self, run_time: datetime, lock: LockInWorker) -> None:
        super().__init__([run_time])
        self._lock = lock

    def __iter__(self) -> Iterator[datetime]:
        """Begin the run, unless its lock cannot stand any more."""
        may_begin = parent.is_watched() and time.monotonic() < self._lock.ends_at
        return super().__iter__() if may_begin else iter(())

    def __reduce__(self) -> tuple[Any, ...]:
        return RunTimesInWorker, (self[0], self._lock)


def _under(lock: LockInWorker | None) -> AbstractContextManager[None]:
    return nullcontext() if lock is None else _running(lock)


@contextmanager
def _running(lock: LockInWorker) -> Iterator[None]:
    """Make a lock the current one, which is lost if the parent dies meanwhile."""
    held = lock.held()
    with parent.holding(held, failover=lock.failover), holding(held):
        yield


class Parent:
    """The parent process, whose death a worker process has to know: its locks are renewed no more.

    A thread waits for it, from the worker's first job with a lock on.
    """

    def __init__(self) -> None:
        self._watched_in: int | None = None  # the process
        self._is_dead = False
        self._looks_dead: Callable[[], bool] = bool
        self._running: tuple[HeldLock, bool] | None = None

    def is_watched(self) -> bool:
        """Watch it from now on; tell whether it lives."""
        process = multiprocessing.parent_process()
        if process is None:  # this is nobody's worker
            return True
        if self._watched_in != os.getpid():
            self._watched_in, self._is_dead = os.getpid(), False
            # Else it was a forkserver that has forked this.
            is_direct = (_forked_by or os.getppid()) == process.pid
            self._looks_dead = partial(_is_dead, process, is_direct=is_direct)
            threading.Thread(
                target=self._wait, args=(process,), name="tasklock-parent", daemon=True
            ).start()
        self._is_dead = self._is_dead or self._looks_dead()
        return not self._is_dead

    @contextmanager
    def holding(self, held: HeldLock, *, failover: bool) -> Iterator[None]:
        """Let a lock be lost if the parent dies meanwhile.

        :param failover: whether another replica runs its window then
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
        # In this order: who begins a job meanwhile looks after that.
        self._is_dead = True
        self._lose()

    def _lose(self) -> None:
        running = self._running
        if running is None:
            return
        held, failover = running
        if failover:
            os._exit(1)  # so that its window is not run twice at once
        held.lose()


parent = Parent()


def _is_dead(process: Any, *, is_direct: bool) -> bool:
    return (is_direct and os.getppid() != process.pid) or not process.is_alive()


_forked_by: int | None = None  # the process that this one was forked by, with this module in it


def _note_fork() -> None:
    global _forked_by  # noqa: PLW0603  # one per process
    _forked_by = os.getppid()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_note_fork)
