"""What the runs of one executor share, and when it is given up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from apscheduler_tasklock.database import MOST_CONNECTIONS
from apscheduler_tasklock.locks import TaskLocks


class ActiveRuns:
    """Counts the runs under way. After a shutdown, the last one closes what they shared.

    A context manager around each run.

    :ivar claims: threads for the claims of coroutine jobs, whose event loop must not wait for the
        database itself. As many as there are connections; more could only queue for them.
    :ivar releases: the same for their releases, which must not queue behind claims
    """

    def __init__(self, locks: TaskLocks) -> None:
        self._locks = locks
        self._lock = threading.Lock()
        self._count = 0
        self._closing = False
        self._open_threads()

    def open(self) -> None:
        """Take up work, again if it was closed before."""
        with self._lock:
            if self._closing:
                self._open_threads()
            self._closing = False
            self._locks.open()

    def close(self) -> None:
        """Close what is shared: at once, or when the last run under way has ended."""
        with self._lock:
            self._closing = True
            self._close_if_idle()

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _exception: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._count -= 1
            self._close_if_idle()

    def _open_threads(self) -> None:
        self.claims = ThreadPoolExecutor(MOST_CONNECTIONS, thread_name_prefix="tasklock-claims")
        self.releases = ThreadPoolExecutor(MOST_CONNECTIONS, thread_name_prefix="tasklock-ends")

    def _close_if_idle(self) -> None:
        # Under the lock, so that the end of an old run cannot close what a restart has opened.
        if self._closing and self._count == 0:
            self.claims.shutdown(wait=False)
            self.releases.shutdown(wait=False)
            self._locks.close()
