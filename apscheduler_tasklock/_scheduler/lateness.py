"""How late a run time is, but for the time that the lock itself has taken.

APScheduler calls a run time a misfire if it reaches its worker too late. A worker that waits for
a claim or a release is not free for the next run time; so while the database stalls, or when
hundreds of jobs are due at once, run times would be misfires on account of the lock. Hence a run
time is as late as it would be if claims and releases took no time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from math import inf

# Seconds that one pass of the scheduler over its jobs takes at most, when hundreds are due.
LONGEST_PASS = 30.0


@dataclass
class SchedulerPass:
    """One pass of the scheduler over its jobs, in which it submits all that are due.

    The last of hundreds is submitted, and begun, while others claim already.

    :ivar wall: when it began, on the wall clock
    :ivar began_at: the same on the monotonic clock
    :ivar submitted_at: when the last job was submitted in it so far
    :ivar begun_at: when the first coroutine of it began; ``None``: not yet
    """

    wall: float
    began_at: float
    submitted_at: float
    begun_at: float | None = None

    def begin_coroutine(self) -> float:
        """Let a coroutine begin; return when it would have if the lock took no time.

        Those of one pass begin together, after it. What lies between is the event loop's doing.
        """
        if self.begun_at is None:
            self.begun_at = time.monotonic()
        return self.began_at + max(0.0, self.begun_at - self.submitted_at)


class SchedulerPasses:
    """Knows in which pass of the scheduler a job is submitted."""

    @staticmethod
    def alone() -> SchedulerPass:
        """Return a pass for what is submitted now, by itself."""
        now = time.monotonic()
        return SchedulerPass(time.time(), now, now)

    def __init__(self) -> None:
        self._latest = SchedulerPass(0.0, 0.0, 0.0)

    def submitting(self, run_time: datetime) -> SchedulerPass:
        """Return the pass in which this run time is submitted now."""
        now = time.monotonic()
        was_due = run_time.timestamp() <= self._latest.wall
        if not was_due or now > self._latest.began_at + LONGEST_PASS:
            self._latest = self.alone()
        self._latest.submitted_at = now
        return self._latest


class _Worker:
    """A worker as it would be if claims and releases took no time.

    :ivar free_at: since when it is free, or when it would be
    :ivar turns: how many run times it has that are not over
    :ivar jobs: how many of their jobs run
    """

    def __init__(self, free_at: float) -> None:
        self.free_at = free_at
        self.turns = 0
        self.jobs = 0


class WorkerQueue:
    """Reckons when each run time would have begun if claims and releases took no time.

    Run times are begun in the order of their submissions, each by the worker that is free first. A
    worker that waits for a claim or a release would be free, so another one's run time may be
    reckoned as its own.

    :param clock: the monotonic clock
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changing = threading.Lock()
        self._workers: list[_Worker] = []
        self._turns = 0

    def begin(self, submitted_at: float) -> Turn:
        """Let a worker begin a run time.

        :param submitted_at: when the run time was submitted, on the monotonic clock
        """
        with self._changing:
            if self._turns >= len(self._workers):
                self._workers.append(_Worker(submitted_at))
            worker, earliest = self._workers[0], (inf, 0)
            for other in self._workers:
                if not other.jobs:
                    at = other.free_at if other.free_at > submitted_at else submitted_at
                    if (at, other.turns) < earliest:
                        worker, earliest = other, (at, other.turns)
            worker.turns += 1
            self._turns += 1
            began_at = min(max(submitted_at, worker.free_at), self._clock())
        return Turn(self, worker, began_at)

    def _begin_job(self, worker: _Worker) -> float:
        """Note that a worker's job begins, and return when, on the monotonic clock."""
        with self._changing:
            worker.jobs += 1
        return self._clock()

    def _end_job(self, worker: _Worker, turn_at: float, started: float) -> float:
        """Note that it has ended, and return the seconds that it took."""
        with self._changing:
            worker.jobs -= 1
            took = self._clock() - started
            worker.free_at = max(worker.free_at, turn_at) + took
        return took

    def _end(self, worker: _Worker) -> None:
        with self._changing:
            worker.turns -= 1
            self._turns -= 1


class Turn:
    """A run time's turn on a worker, from before its claim until after its release.

    :ivar at: when its next job would begin if the lock took no time, on the monotonic clock
    """

    def __init__(self, queue: WorkerQueue, worker: _Worker, began_at: float) -> None:
        self._queue = queue
        self._worker = worker
        self.at = began_at

    @contextmanager
    def job(self) -> Iterator[None]:
        """Count the time within as the job's own."""
        started = self._queue._begin_job(self._worker)
        try:
            yield
        finally:
            self.at += self._queue._end_job(self._worker, self.at, started)

    def end(self) -> None:
        """Let the worker be free again."""
        self._queue._end(self._worker)


def is_later_than(due_at: float, grace: float | None, at: float) -> bool:
    """Tell whether a run time that was due by the database's clock is missed.

    :param due_at: when it was due, on the monotonic clock
    :param grace: seconds for which it may be late, or ``None``
    :param at: when it began, or would have begun, on the monotonic clock
    """
    return grace is not None and at - due_at > grace


def is_late(run_time: datetime, grace: float | None, at: float) -> bool:
    """Tell whether APScheduler would call a run time missed.

    :param grace: seconds for which it may be late, or ``None``
    :param at: when it began, or would have begun, on the monotonic clock
    """
    if grace is None:
        return False
    ago = time.monotonic() - at
    return time.time() - ago - run_time.timestamp() > grace
