"""Misfires: run times whose lateness is above the grace time of their job.

The lateness of a run is the time from its run time until a worker would begin it. The time that the
lock takes must not count as lateness. Two rules make sure of this:

- All run times that one pass of the scheduler submits have the pass's begin as the time of their
  submission. When hundreds of jobs are due at once, the scheduler submits the last job while the
  first jobs are being claimed. The time of these claims must not make the last job late.
- Lateness is computed on the virtual workers of
  :class:`~apscheduler_tasklock._runs.workers.WorkerModel`, for which claims take no time. On the
  real workers, a run that waits for its claim keeps a worker idle, so that other runs wait longer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from apscheduler_tasklock._runs.run import QueuedRun

# Limits the seconds from the begin of a pass of the scheduler to the submissions that belong to
# the pass.
LONGEST_PASS = 30.0
# A grace time that the lateness of every run exceeds.
ALWAYS_MISSED = -timedelta(days=36500).total_seconds()


def is_misfire(run: QueuedRun, begins_at: float) -> bool:
    """Return whether a run would be a misfire if it began at this time.

    :param begins_at: when the run would begin, on the monotonic clock
    """
    return run.grace is not None and lateness(run, begins_at) > run.grace


def lateness(run: QueuedRun, begins_at: float) -> float:
    """Return the lateness of a run that begins at this time, in seconds.

    The seconds for which the run was deferred do not count as lateness.
    """
    return begins_at - run.excused - run.due_at


@dataclass
class SchedulerPass:
    """One pass of the scheduler over its jobs, in which it submits all due jobs.

    :ivar wall: when the pass began, on the wall clock
    :ivar began_at: when the pass began, on the monotonic clock
    """

    wall: float
    began_at: float


class SchedulerPasses:
    """Finds the pass of the scheduler to which a submission belongs."""

    @staticmethod
    def alone() -> SchedulerPass:
        """Return a new pass, for a submission that this library makes and not the scheduler."""
        return SchedulerPass(time.time(), time.monotonic())

    def __init__(self) -> None:
        self._latest = SchedulerPass(0.0, 0.0)

    def submitting(self, run_time: datetime) -> SchedulerPass:
        """Return the pass in which the scheduler submits this run time now.

        The latest pass is returned if it began in the last 30 s and the run time was due at its
        begin. Otherwise a new pass is returned.
        """
        now = time.monotonic()
        was_due = run_time.timestamp() <= self._latest.wall
        if not was_due or now > self._latest.began_at + LONGEST_PASS:
            self._latest = self.alone()
        return self._latest
