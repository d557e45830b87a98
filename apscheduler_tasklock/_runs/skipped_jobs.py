"""Log lines about single jobs that are skipped on this replica.

The number of these lines is limited, so that a user who can write rows of jobs cannot fill a disk
with the log.
"""

from __future__ import annotations

import logging
import threading
import time

from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# Limit the log lines about single jobs: `MOST_LINES` in each period of `LINES_PERIOD` seconds.
# Further jobs in a period are only counted.
MOST_LINES, LINES_PERIOD = 10, 600.0
# Limits how many jobs are remembered as logged. At the limit all of them are forgotten.
MOST_REMEMBERED = 100_000


class SkippedJobsLog:
    """Logs skipped jobs: a line for each of the first jobs in a period, and the number of the rest.

    Each job is logged once. Safe to share between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[int] = set()  # hashes, because names can be long
        self._began = float("-inf")
        self._lines = self._others = 0
        self._has_summed_up = False

    def log(
        self,
        name: str,
        logger: logging.Logger,
        level: int,
        message: str,
        *values: object,
        error: BaseException | None = None,
    ) -> None:
        """Log a job, or a function, unless it was logged before.

        :param name: the job's id, or the function's reference
        :param error: an error whose traceback is logged, too
        """
        with self._lock:
            if hash(name) in self._logged:
                return
            if len(self._logged) == MOST_REMEMBERED:
                self._logged.clear()
            self._logged.add(hash(name))
            self._begin_period()
            if self._lines == MOST_LINES:
                self._others += 1
                return
            self._lines += 1
        logger.log(level, message, *values, exc_info=error)

    def forget(self, name: str) -> None:
        """Forget a job or a function, so that it is logged again if it is skipped again."""
        with self._lock:
            self._logged.discard(hash(name))

    def sum_up(self) -> None:
        """Log how many jobs have got no log line of their own, at most once in each period."""
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
