"""The workers of an executor: how many are free, and when each would be, if claims took no time.

:func:`apscheduler_tasklock._runs.adapter.worker_count` finds how many workers an executor has.
"""

from __future__ import annotations

import heapq
from math import inf

from apscheduler_tasklock._runs.run import QueuedRun


class WorkerModel:
    """The workers of one executor, and their virtual twins, for which claims take no time.

    A run that waits for its claim keeps a worker idle, so that runs are later than they would be
    without the lock. In an overload, or while the database stalls, they would become misfires
    because of the lock. So the lateness of a run is computed on the virtual workers. A virtual
    worker runs all run times of a submission before the next submission, as APScheduler's
    ``run_job`` does.

    :ivar given: the runs that were given to the executor, until their workers are free
    :ivar count: how many workers there are; ``None``: there is no limit of workers
    """

    def __init__(self) -> None:
        self.given: set[QueuedRun] = set()
        self.count: int | None = None
        # For each free virtual worker, since when it is free, as a heap; `None`: there is no limit
        # of workers.
        self._free_at: list[float] | None = None
        self._busy: set[QueuedRun] = set()  # the runs that have a virtual worker

    @property
    def free(self) -> float:
        """How many workers have no run; ``inf``: there is no limit of workers."""
        return inf if self.count is None else self.count - len(self.given)

    def note_count(self, workers: int | None) -> None:
        """Note how many workers there are; ``None``: there is no limit of workers."""
        self.count = workers
        if workers is None:
            self._free_at = None
            return
        free_at = [] if self._free_at is None else self._free_at
        while len(free_at) + len(self._busy) < workers:
            heapq.heappush(free_at, -inf)
        while free_at and len(free_at) + len(self._busy) > workers:
            free_at.remove(max(free_at))
            heapq.heapify(free_at)
        self._free_at = free_at

    def begins_at(self, run: QueuedRun, now: float) -> float:
        """Return when a run would begin at the earliest, on the virtual workers."""
        free_at = -inf
        if self._free_at and not run.goes_on:
            free_at = self._free_from(now)
        return max(run.came, run.earliest, free_at)

    def _free_from(self, now: float) -> float:
        """Return since when, or from when on at the earliest, a virtual worker is free."""
        # A busy virtual worker may be free earlier than the others, because its run has begun
        # later on the real worker, where it had to wait for its claim.
        over_at = [busy.at + max(0.0, now - busy.began_at) for busy in self._busy]
        return min([*(self._free_at or ())[:1], *over_at], default=-inf)

    def wait_for_one(self, run: QueuedRun, now: float) -> float:
        """Return the seconds for which a waiting run waits because all workers are busy.

        The wait for the database does not count, such as the wait for claims in an outage. So the
        wait is that for a virtual worker. But the virtual workers do not know of work that is not
        the scheduler's, behind which given runs may wait. So the time counts, too, for which all
        workers have had the same runs. It does not count if one of these runs is missed, because
        the missed run of a stored job waits for the database.
        """
        since = max(run.came, run.earliest)
        given_at = [inf if each.is_missed else each.given_at for each in self.given]
        taken_since = max(given_at, default=-inf)
        return max(self._free_from(now) - since, now - max(since, taken_since))

    def give(self, run: QueuedRun, now: float) -> None:
        """Note that a run has a worker, because it is given to the executor.

        The run gets the virtual worker of the run before it in its submission, or else the virtual
        worker that is free first. A run that is missed, or overtakes, gets no virtual worker,
        because it is given before runs that came earlier, and must not make these runs late.
        """
        self.given.add(run)
        run.given_at = now
        free_at = -inf
        if run.is_missed or run.overtakes:
            run.at = max(run.came, run.earliest)
            return
        if self._free_at and run.goes_on:
            # While this run waited for its claim, another run may have got the virtual worker of
            # the run before. Then this run gets the one that is free first.
            own = run.earliest if run.earliest in self._free_at else self._free_at[0]
            self._free_at.remove(own)
            heapq.heapify(self._free_at)
        elif self._free_at:
            free_at = heapq.heappop(self._free_at)
        # The run was judged to be in time when it was asked for. It does not begin later than that,
        # because another virtual worker may have been free for it by now.
        run.at = min(max(run.came, run.earliest, free_at), run.due_at + run.excused + run.late_by)
        self._busy.add(run)

    def leave(self, run: QueuedRun, took: float) -> float:
        """Note that the worker of a run is free again.

        :param took: seconds that the run took
        :return: when the run would have been over if claims took no time, on the monotonic clock
        """
        self.given.discard(run)
        at = run.at + took
        if run in self._busy:
            self._busy.remove(run)
            if self._free_at is not None:
                heapq.heappush(self._free_at, at)
        return at
