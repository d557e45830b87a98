"""Since when a run time waits for a worker, and whether that is too long.

APScheduler calls a run time a misfire if it reaches its worker too late. The last of hundreds that
are due at once is submitted while others are claimed already, and that is no lateness of its own.
Hence all that one pass of the scheduler submits has waited since that began.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

# Seconds that one pass of the scheduler over its jobs takes at most, when hundreds are due.
LONGEST_PASS = 30.0


@dataclass
class SchedulerPass:
    """One pass of the scheduler over its jobs, in which it submits all that are due.

    The last of hundreds is submitted, and begun, while others claim already.

    :ivar wall: when it began, on the wall clock
    :ivar began_at: the same on the monotonic clock
    """

    wall: float
    began_at: float


class SchedulerPasses:
    """Knows in which pass of the scheduler a job is submitted."""

    @staticmethod
    def alone() -> SchedulerPass:
        """Return a pass for what is submitted now, by itself."""
        return SchedulerPass(time.time(), time.monotonic())

    def __init__(self) -> None:
        self._latest = SchedulerPass(0.0, 0.0)

    def submitting(self, run_time: datetime) -> SchedulerPass:
        """Return the pass in which this run time is submitted now."""
        now = time.monotonic()
        was_due = run_time.timestamp() <= self._latest.wall
        if not was_due or now > self._latest.began_at + LONGEST_PASS:
            self._latest = self.alone()
        return self._latest


def is_later_than(due_at: float, grace: float | None, at: float) -> bool:
    """Tell whether a run time that was due by the database's clock is missed.

    :param due_at: when it was due, on the monotonic clock
    :param grace: seconds for which it may be late, or ``None``
    :param at: when it began, or would have begun, on the monotonic clock
    """
    return grace is not None and at - due_at > grace
