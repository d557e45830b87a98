"""The tasks of the jobs that a scheduler has on one executor."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from math import inf

from apscheduler_tasklock._scheduler.submission import JobKey


class KnownTasks:
    """Which jobs there are, and which task each of them is. Safe to share between threads.

    :param lease: of jobs with failover, unless they have another one
    :ivar shortest_lease: of a job with failover; a dead holder is to be found within it
    """

    def __init__(self, lease: float | None = None) -> None:
        self.shortest_lease = inf if lease is None else lease
        self._tasks: dict[JobKey, str] = {}  # what is done to it is atomic
        self._asked: tuple[JobKey, float] | None = None  # and since when, on the monotonic clock
        self._hanging: set[JobKey] = set()

    def has(self, task_name: str, key: JobKey) -> bool:
        """Tell whether a job is known as this task."""
        return self._tasks.get(key) == task_name

    def add(self, task_name: str, key: JobKey, lease: float | None) -> bool:
        """Know a job from now on; tell whether its dead holders are to be found sooner.

        :param lease: of a job with failover
        """
        self._tasks[key] = task_name
        if lease is None or lease >= self.shortest_lease:
            return False
        self.shortest_lease = lease
        return True

    def forget(self, key: JobKey) -> None:
        """Know a job no more: it was removed, or has changed."""
        self._tasks.pop(key, None)

    def job_keys(self) -> list[JobKey]:
        """Return all jobs."""
        return list(self._tasks)

    def names(self) -> list[str]:
        """Return the tasks of all jobs."""
        return sorted(set(self._tasks.values()))

    def keys_of(self, task_name: str) -> list[JobKey]:
        """Return the jobs that are this task."""
        return [key for key, name in list(self._tasks.items()) if name == task_name]

    def asking(self, keys: Iterable[JobKey]) -> Iterator[JobKey]:
        """Give those of these jobs that can be asked for, one after the other.

        Whoever gets one calls code of the application's then, as of its trigger or its job store.
        """
        for key in keys:
            if key in self._hanging:
                continue
            asked = self._asked = (key, time.monotonic())
            try:
                yield key
            finally:
                if self._asked is asked:
                    self._asked = None
                self._hanging.discard(key)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The ids of the jobs that are left out, because their code has not come back."""
        return tuple(sorted(job_id for job_id, _ in tuple(self._hanging)))

    def leave_out(self, seconds: float) -> JobKey | None:
        """Return the job whose code has not come back for so long; it is left out until it has."""
        if self._asked is None or time.monotonic() < self._asked[1] + seconds:
            return None
        (key, _), self._asked = self._asked, None
        self._hanging.add(key)
        return key
