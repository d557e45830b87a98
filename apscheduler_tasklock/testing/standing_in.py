"""What stands in for the database while a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from apscheduler_tasklock._lock.stand_in import standing_in
from apscheduler_tasklock._lock.unlocked import Unlocked
from apscheduler_tasklock.testing.in_memory import MemoryTaskLocks


@contextmanager
def unlocked() -> Iterator[None]:
    """Grant every claim of each ``TaskLockExecutor`` and ``TaskLocks`` in this process.

    There is no database: nothing is connected to, and no table is checked. All else is as usual.
    Options are taken out of the jobs' kwargs and checked, a job has its ``current_lock()``, which
    it can extend, and events and log lines tell of what was granted and released. Any number of
    schedulers may run one task at once.

    An executor that is started within stays like that until it is shut down. One that runs already
    is granted its claims too, but goes on looking at its database every few seconds. What only
    a database has raises a ``TaskLockError``: ``TaskLocks.tasks()`` and the like, and the start of
    a ``TaskLockJobStore``.

    A context manager, a decorator of functions (not of coroutines), and so the body of a fixture.
    """
    with standing_in(Unlocked()):
        yield


@contextmanager
def in_memory_locks() -> Iterator[None]:
    """Decide on the claims of this process in memory, by the rule that PostgreSQL decides by.

    One window is run once, however many schedulers of this process have the job; a run is refused
    while another goes on; a hold is refused in its minimum lock. Time is real. All that
    :func:`unlocked` says of what there is without a database holds here too. A job in a worker
    process can extend what it sees of its lock, but not the lock.

    The locks are empty at the beginning, and gone with the block. A context manager, a decorator of
    functions (not of coroutines), and so the body of a fixture.
    """
    with standing_in(MemoryTaskLocks()):
        yield
