"""Log lines about single jobs: whoever can write rows of jobs must not fill a disk with them."""

from __future__ import annotations

import logging
import threading
import time

from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# How many log lines tell of single jobs in a period of so many seconds; the others are counted.
MOST_LINES, LINES_PERIOD = 10, 600.0
# How many jobs are remembered as told of.
MOST_TOLD = 100_000


class JobNotices:
    """Tells of jobs that are left alone: of some in a line each, and of how many more there are.

    Each is told of once.

    Safe to share between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: set[int] = set()  # hashes, since names can be long
        self._began = float("-inf")
        self._lines = self._others = 0
        self._has_summed_up = False

    def tell(
        self,
        name: str,
        logger: logging.Logger,
        level: int,
        message: str,
        *values: object,
        error: BaseException | None = None,
    ) -> None:
        """Tell of a job, or of a function, unless that was told before.

        :param error: whose traceback the line gets
        """
        with self._lock:
            if hash(name) in self._told:
                return
            if len(self._told) == MOST_TOLD:
                self._told.clear()
            self._told.add(hash(name))
            self._begin_period()
            if self._lines == MOST_LINES:
                self._others += 1
                return
            self._lines += 1
        logger.log(level, message, *values, exc_info=error)

    def forget(self, name: str) -> None:
        """Tell of this again when it is left alone again."""
        with self._lock:
            self._told.discard(hash(name))

    def sum_up(self) -> None:
        """Tell how many were not told of, once in a period."""
        with self._lock:
            self._begin_period()
            others = 0 if self._has_summed_up else self._others
            if others:
                self._others, self._has_summed_up = 0, True
        if others:
            logger.error(
                "And %d more jobs are not run here, or cannot be read. `apscheduler-tasklock jobs` "
                "lists all jobs",
                others,
            )

    def _begin_period(self) -> None:
        if time.monotonic() - self._began > LINES_PERIOD:
            self._began = time.monotonic()
            self._lines, self._has_summed_up = 0, False
