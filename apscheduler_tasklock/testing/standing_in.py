"""Context managers for tests, in which claims need no database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from apscheduler_tasklock._lock.always_granted import Unlocked
from apscheduler_tasklock._lock.test_doubles import use_stand_in
from apscheduler_tasklock.testing.in_memory import MemoryTaskLocks


@contextmanager
def unlocked() -> Iterator[None]:
    """Grant every claim of each ``TaskLockExecutor`` and ``TaskLocks`` in this process.

    Nothing connects to a database, and no table is checked. Everything else works as usual: options
    are taken out of the jobs' kwargs and checked, a job has its ``current_lock()`` and can extend
    it, and grants and releases have their events and log lines. Several schedulers can run the same
    task at the same time.

    An executor that is started inside needs no database until it is shut down. The claims of an
    executor that was started before are granted, too, but this executor still reads its rows in the
    database every few seconds. Calls that need a database raise a ``TaskLockError``, such as
    ``TaskLocks.tasks()`` and the start of a ``TaskLockJobStore``.

    Use ``unlocked`` as a context manager, as a decorator of functions (not of coroutines), or in a
    fixture.
    """
    with use_stand_in(Unlocked()):
        yield


@contextmanager
def in_memory_locks() -> Iterator[None]:
    """Decide on the claims of this process in memory, by the same rule as in PostgreSQL.

    A window is run once, however many schedulers of this process have the job. A claim is refused
    while another run of the task goes on. A hold is refused until the minimum lock of the task's
    last claim has ended. Locks last as long in the test as they would on PostgreSQL. In a worker
    process a job can extend only its own copy of the lock. For executors, for calls that need a
    database, and for everything that works as usual, see :func:`unlocked`.

    At the start no task has a row, and at the end all rows are dropped. Use ``in_memory_locks`` as
    a context manager, as a decorator of functions (not of coroutines), or in a fixture.
    """
    with use_stand_in(MemoryTaskLocks()):
        yield
