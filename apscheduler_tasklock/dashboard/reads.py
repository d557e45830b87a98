"""Reads of the database: shared by all viewers, and kept to be shown during an outage."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import psycopg
import sqlalchemy.exc

from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import Lanes

Value = TypeVar("Value")

# The seconds for which a value is shown to all viewers without another read.
SHARED_FOR = 5.0

# Limits the share of time that the repeated reads of one value take. A read of a large history may
# take 200 ms, and is repeated every 10 s at most. A page that is older than half a minute helps
# nobody, and one slow answer must not hide an outage for minutes.
_SHARE, _LONGEST_SHARED = 0.02, 30.0

# Limit the values that are kept to be shared, and to be shown during an outage, and their rows.
# The drawing of one span has up to 8,000 rows, which take 8 MB.
_MOST_VALUES = 64
_MOST_ROWS = 30_000


@dataclass(frozen=True)
class Reading(Generic[Value]):
    """A value that was read, perhaps a while ago.

    :ivar value: the value; ``None``: it could not be read so far
    :ivar age: seconds since it was read
    :ivar took: seconds that the read took
    :ivar error: why it could not be read again; ``None``: it could
    :ivar is_known: whether it was ever read
    """

    value: Value | None
    age: float
    took: float
    error: str | None
    is_known: bool = True


@dataclass
class _Kept:
    """A value and when it was read. Its lock lets one viewer at a time read it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    value: Any = None
    read_at: float | None = None
    took: float = 0.0
    is_current: bool = False
    rows: int = 0
    failed_at: float = float("-inf")
    failure: str | None = None


class SharedReads:
    """The reads of one dashboard. Safe to share between threads.

    :param locks: what is read from
    :param clock: returns the seconds of a clock that is never put back
    :param shared_for: the seconds for which a value is not read again
    :param page_limit: limits the seconds after which a page begins no more reads; each of them may
        take as long
    """

    def __init__(
        self,
        locks: TaskLocks,
        clock: Callable[[], float] = time.monotonic,
        shared_for: float = SHARED_FOR,
        page_limit: float = 3.0,
    ) -> None:
        self._locks = locks
        self._shared_for = shared_for
        self.clock = clock
        self.page_limit = page_limit
        self._lock = threading.Lock()
        self._changes = 0
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def read(
        self,
        key: Hashable,
        read: Callable[[TaskLocks], Value],
        *,
        from_before: bool = False,
        not_before: float = float("-inf"),
    ) -> Reading[Value]:
        """Return a value, which is read again if the last read is too old.

        If the database does not answer, the last value is returned. Five seconds later the next
        viewer's page tries the read again.

        :param key: what tells the value from all others
        :param read: reads the value
        :param from_before: whether the last value is returned at once, although it is old or there
            is none
        :param not_before: by the clock, the time from which on the value has to be read, unless its
            read takes long
        :raises TaskLockError: the database rejects the read, for example because a right is missing
        """
        kept = self._slot(key)
        # While another viewer reads the value anew, the last one is shown. Otherwise a database
        # that is silent would keep a thread waiting for each viewer, and the threads are those of
        # the application that the dashboard is mounted in.
        if not kept.lock.acquire(blocking=not kept.is_current):
            return self._reading(kept, kept.failure)
        try:
            now = self.clock()
            lasts = max(self._shared_for, min(kept.took / _SHARE, _LONGEST_SHARED))
            error = None
            is_old = kept.read_at is None or now - kept.read_at >= lasts
            if kept.read_at is not None and lasts <= self._shared_for:
                is_old |= kept.read_at < not_before
            if not kept.is_current or is_old:
                if now - kept.failed_at < self._shared_for:
                    error = kept.failure
                elif not from_before:
                    error = self._read_anew(kept, read)
            return self._reading(kept, error)
        finally:
            kept.lock.release()

    def _reading(self, kept: _Kept, error: str | None) -> Reading[Any]:
        age = 0.0 if kept.read_at is None else self.clock() - kept.read_at
        return Reading(kept.value, age, kept.took, error, kept.read_at is not None)

    def forget(self) -> None:
        """Read all values again when they are asked for, because something was changed."""
        with self._lock:
            self._changes += 1
            for kept in self._kept.values():
                kept.is_current = False

    def _slot(self, key: Hashable) -> _Kept:
        with self._lock:
            kept = self._kept.setdefault(key, _Kept())
            self._kept.move_to_end(key)
            rows = sum(each.rows for each in self._kept.values())
            while len(self._kept) > _MOST_VALUES or (rows > _MOST_ROWS and len(self._kept) > 1):
                _, oldest = self._kept.popitem(last=False)
                rows -= oldest.rows
            return kept

    def _read_anew(self, kept: _Kept, read: Callable[[TaskLocks], Any]) -> str | None:
        began, changes = self.clock(), self._changes
        try:
            kept.value = read(self._locks)
        except TaskLockDatabaseError as error:
            kept.failed_at, kept.failure = self.clock(), in_words_of_a_page(error)
            return kept.failure
        kept.read_at = self.clock()
        kept.took = kept.read_at - began
        with self._lock:
            # A read that began before a change may have missed it.
            kept.is_current = changes == self._changes
        kept.failure = None
        kept.rows = _rows_of(kept.value)
        return None


def in_words_of_a_page(error: TaskLockError) -> str:
    """Return an error's message for a page, without secrets.

    The message of an error of an engine's creator or listener is left out, because it is the
    application's, and may have a secret in it.
    """
    cause = error.__cause__
    if not isinstance(error, TaskLockDatabaseError) or cause is None:
        return error.for_page()
    if isinstance(cause, (psycopg.Error, sqlalchemy.exc.SQLAlchemyError, TaskLockError)):
        return error.for_page()
    return (
        f"no connection: the application's engine has raised {type(cause).__name__}; the log of "
        "this server has the whole error"
    )


def _rows_of(value: object) -> int:
    """Return how many rows are in a value: a list, lists by name, or lanes."""
    if isinstance(value, Lanes):
        return sum(len(lane.entries) for lane in value.lanes)
    if isinstance(value, dict):
        return sum(map(_rows_of, value.values()))
    return len(value) if isinstance(value, list) else 1
