"""The jobs of an executor that a replica knows, and their tasks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from math import inf

from apscheduler_tasklock._runs.run import JobKey


class KnownTasks:
    """The jobs of an executor, and the task of each job. Safe to share between threads.

    Also finds a job whose trigger or job store, which may be the application's code, hangs when it
    is called.

    :param lease: the executor's own lease if the executor has failover by default, or the lease of
        a leader, if that is shorter
    :ivar shortest_lease: the shortest lease of a job with failover or of a leader, within which a
        dead holder is to be found
    """

    def __init__(self, lease: float | None = None) -> None:
        self.shortest_lease = inf if lease is None else lease
        self._tasks: dict[JobKey, str] = {}  # each operation on it is atomic
        # The job whose code is called at this moment, and since when, on the monotonic clock.
        self._asked: tuple[JobKey, float] | None = None
        self._hanging: set[JobKey] = set()  # jobs whose code has not returned

    def has(self, task_name: str, key: JobKey) -> bool:
        """Return whether a job is known, and has this task."""
        return self._tasks.get(key) == task_name

    def add(self, task_name: str, key: JobKey, lease: float | None) -> bool:
        """Add a job; return whether its lease is shorter than all leases before.

        :param lease: the job's lease if the job has failover
        """
        self._tasks[key] = task_name
        if lease is None or lease >= self.shortest_lease:
            return False
        self.shortest_lease = lease
        return True

    def forget(self, key: JobKey) -> None:
        """Remove a job, because it was removed or has changed."""
        self._tasks.pop(key, None)

    def job_keys(self) -> list[JobKey]:
        """Return all jobs."""
        return list(self._tasks)

    def names(self) -> list[str]:
        """Return the tasks of all jobs."""
        return sorted(set(self._tasks.values()))

    def name_of(self, key: JobKey) -> str | None:
        """Return the task of a job; ``None`` if the job is not known."""
        return self._tasks.get(key)

    def keys_of(self, task_name: str) -> list[JobKey]:
        """Return the jobs that have this task."""
        # Of a copy, because `items()` makes an object for each job, so that the garbage collector
        # may run other code meanwhile, and another thread may add a job.
        return [key for key, name in self._tasks.copy().items() if name == task_name]

    def asking(self, keys: Iterable[JobKey]) -> Iterator[JobKey]:
        """Yield the jobs whose code does not hang.

        While the caller handles a job, it may call the job's code, such as its trigger or its
        store. The time until it takes the next job is measured, so that :meth:`leave_out` finds
        calls that take too long.
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
        """The ids of the jobs that :meth:`asking` skips, because their code has not returned."""
        return tuple(sorted(job_id for job_id, _ in tuple(self._hanging)))

    def leave_out(self, seconds: float) -> JobKey | None:
        """Find a job whose code hangs, and let :meth:`asking` skip it until its code returns.

        :param seconds: for how long the code has been called
        :return: the job; ``None`` if no job's code has been called for so long
        """
        if self._asked is None or time.monotonic() < self._asked[1] + seconds:
            return None
        (key, _), self._asked = self._asked, None
        self._hanging.add(key)
        return key
