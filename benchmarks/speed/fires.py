"""APScheduler 3 with jobs that are due at known moments, plain and with the task lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler


class TooLateError(Exception):
    """The jobs were due before all of them were set up."""


class Clock:
    """Jobs call it with the moment at which they are due."""

    def __init__(self, jobs: int) -> None:
        self.began: list[tuple[float, float]] = []
        self._jobs = jobs
        self._lock = threading.Lock()
        self._all = threading.Event()

    def note(self, due: float) -> None:
        """Be the job."""
        now = time.time()
        with self._lock:
            self.began.append((due, now))
            if len(self.began) == self._jobs:
                self._all.set()

    def wait(self) -> list[tuple[float, float]]:
        """Return when each job was due and when it began."""
        assert self._all.wait(60), f"{len(self.began)} of {self._jobs} jobs began"
        return self.began


def fire(executor: Any, dues: Sequence[float]) -> list[tuple[float, float]]:
    """Run one job for each moment on an executor; return when each was due and when it began."""
    clock = Clock(len(dues))
    scheduler = BackgroundScheduler(executors={"default": executor or ThreadPoolExecutor(10)})
    scheduler.start()
    try:
        for number, due in enumerate(dues):
            at = datetime.fromtimestamp(due, timezone.utc)
            scheduler.add_job(
                clock.note,
                "date",
                run_date=at,
                args=[due],
                id=f"{dues[0]} {number}",
                misfire_grace_time=None,
            )
        late = time.time() - dues[0]
        fires = clock.wait()
        if late > 0:
            raise TooLateError(f"{late:.1f}")
        return fires
    finally:
        scheduler.shutdown()
