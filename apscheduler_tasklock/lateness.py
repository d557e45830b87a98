"""How late a fire is, but for the time that the lock itself has taken.

APScheduler calls a run time a misfire if it reaches its worker too late. A worker that waits for
a claim or a release is not free for the next fire; so while the database stalls, or when hundreds
of jobs are due at once, fires would be misfires on account of the lock. Hence a fire is as
late as it would be if claims and releases took no time.
"""

from __future__ import annotations

import threading
import time
from datetime import datetime
from heapq import heappop, heappush

from apscheduler_tasklock.forking import begins_anew_in_a_fork

# Seconds that one pass of the scheduler over its jobs takes at most, when hundreds are due.
LONGEST_PASS = 30.0


class SchedulerPass:
    """Knows when the scheduler began to submit the jobs that are due together.

    The last of hundreds is submitted while workers claim for the first ones already.
    """

    def __init__(self) -> None:
        self._began = (0.0, 0.0)  # on the wall clock, and on the monotonic one

    def began(self, run_time: datetime) -> float:
        """Return when the pass began that submits this run time now, on the monotonic clock."""
        wall, monotonic = time.time(), time.monotonic()
        due_before_it_began = run_time.timestamp() <= self._began[0]
        if not due_before_it_began or monotonic > self._began[1] + LONGEST_PASS:
            self._began = (wall, monotonic)
        return self._began[1]


class WorkerQueue:
    """Reckons when each fire would have begun if claims and releases took no time.

    Fires are begun in the order of their submissions, each by the worker that is free first. When
    a worker is free is reckoned, too: its last fire would have begun earlier as well.
    """

    def __init__(self) -> None:
        self.begin_anew()
        begins_anew_in_a_fork(self)

    def begin_anew(self) -> None:
        """Know of no worker. Those of the parent are not in a forked child."""
        self._changing = threading.Lock()
        self._free_since: list[float] = []

    def begin(self, submitted_at: float, new_worker_since: float | None = None) -> float:
        """Let a worker begin a fire; return when it would have, on the monotonic clock.

        :param submitted_at: when the fire was submitted
        :param new_worker_since: since when a worker is there that has not worked before, if that is
            not for long
        """
        with self._changing:
            if self._free_since:
                return max(submitted_at, heappop(self._free_since))
        return max(submitted_at, new_worker_since or submitted_at)

    def end(self, at: float) -> None:
        """Let a worker be free again.

        :param at: when it would have been: when it would have begun, and what its jobs took
        """
        with self._changing:
            heappush(self._free_since, at)


def is_late(run_time: datetime, grace: float | None, at: float) -> bool:
    """Tell whether APScheduler would call a run time missed.

    :param grace: seconds for which it may be late, or ``None``
    :param at: when it began, or would have begun, on the monotonic clock
    """
    if grace is None:
        return False
    ago = time.monotonic() - at
    return time.time() - ago - run_time.timestamp() > grace
