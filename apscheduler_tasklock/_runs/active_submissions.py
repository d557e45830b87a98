"""The submissions of an executor with a run that is not over, and the instances they count as."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from uuid import UUID

from apscheduler.executors.base import MaxInstancesReachedError

from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# Limits how many jobs are named in the WARNING of a stop that waits for jobs.
MOST_NAMED = 5


class ActiveSubmissions:
    """Counts the active submissions of an executor: those with a run that is not over.

    A submission whose run is deferred does not count, until its run is given to the wrapped
    executor.

    :ivar instances: how many instances of each job count, by job id, as APScheduler counts them
    """

    def __init__(self) -> None:
        self.instances: dict[str, int] = defaultdict(int)
        self._active: dict[UUID, _Active] = {}
        # Held to change both, so that a limit is checked and counted at once. Notified when a
        # submission is not active any more.
        self._changing = threading.Condition()

    @property
    def submissions(self) -> list[Submission]:
        """The active submissions."""
        return [active.submission for active in list(self._active.values())]

    def count(self, submission: Submission, most: int | None = None) -> None:
        """Count a submission as active, and as an instance of its job, unless it is counted.

        :param most: limits the instances of the job; ``None``: no limit
        :raises MaxInstancesReachedError: so many instances are running
        """
        job = submission.job
        with self._changing:
            if most is not None and self.instances[job.id] >= most:
                raise MaxInstancesReachedError(job)
            if submission.claim_ids[0] not in self._active:
                self._active[submission.claim_ids[0]] = _Active(submission)
                self.instances[job.id] += submission.is_instance

    def forget(self, submission: Submission) -> bool:
        """Stop counting a submission; return whether it was counted."""
        with self._changing:
            if self._active.pop(submission.claim_ids[0], None) is None:
                return False
            self.instances[submission.job.id] -= submission.is_instance
            if not self.instances[submission.job.id]:
                del self.instances[submission.job.id]
            self._changing.notify_all()
        return True

    def note_begun(self, submission: Submission) -> None:
        """Note that a worker has begun a run of a submission."""
        active = self._active.get(submission.claim_ids[0])
        if active is not None:
            active.begun_at = time.monotonic()

    def wait_until_none(self, seconds: float | None, *, coroutines: bool) -> bool:
        """Wait until no submission is active; return ``False`` if it takes too long.

        :param seconds: limits the wait; ``None``: no limit
        :param coroutines: whether to wait for coroutines, too
        """

        def is_none() -> bool:
            return not any(coroutines or not each.awaited for each in self.submissions)

        with self._changing:
            return self._changing.wait_for(is_none, seconds)

    def log_waiting(self) -> None:
        """Log the jobs that a stop waits for."""
        # Runs that wait in the queue are not named, because a stop lets none of them begin.
        running = [active for active in list(self._active.values()) if active.begun_at]
        if running:
            more = len(running) - MOST_NAMED
            logger.warning(
                "The stop waits for jobs to end: %s",
                ", ".join(
                    [active.in_words() for active in running[:MOST_NAMED]]
                    + [f"{more} more"] * (more > 0)
                ),
            )


@dataclass(eq=False)
class _Active:
    """An active submission.

    :ivar begun_at: when a worker last began a run of the submission, on the monotonic clock;
        ``None``: no run has begun
    """

    submission: Submission
    begun_at: float | None = None

    def in_words(self) -> str:
        """Return the job, and for how long it has run."""
        assert self.begun_at is not None
        seconds = time.monotonic() - self.begun_at
        name = self.submission.task_name
        return f"{self.submission.job.id!r} (task {name!r}, has run for {seconds:.0f} s)"
