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


class SchedulerPasses:
    """Finds the pass of the scheduler to which a submission belongs."""

    def __init__(self) -> None:
        # When the latest pass began, on the wall clock and on the monotonic clock.
        self._wall = self._began_at = 0.0

    def submitting(self, run_time: datetime) -> float:
        """Return when the pass began in which the scheduler submits this run time now.

        It is the latest pass if that began in the last 30 s and the run time was due at its begin.
        Otherwise a new pass begins.

        :return: that time, on the monotonic clock
        """
        now = time.monotonic()
        was_due = run_time.timestamp() <= self._wall
        if not was_due or now > self._began_at + LONGEST_PASS:
            self._wall, self._began_at = time.time(), now
        return self._began_at
