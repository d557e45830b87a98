"""The runs of an executor with ``enabled=False``, which are run at once, without a claim."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from apscheduler_tasklock._lock.held_locks import HeldLocks
from apscheduler_tasklock._returned import check_returned
from apscheduler_tasklock._runs.adapter import JobIdWithRun, give, never_awaited, worker_count
from apscheduler_tasklock._runs.executor_run import ExecutorRun
from apscheduler_tasklock._runs.executor_runs import ExecutorParts
from apscheduler_tasklock._runs.given_job import GivenJob
from apscheduler_tasklock._runs.reports import Notifier
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._runs.worker_process import JobInWorker


class UnlockedRuns:
    """Gives runs to the wrapped executor at once. Replaces ``ExecutorRuns`` if there are no locks.

    :param inner: the wrapped executor
    :param parts: what these runs use of the ``TaskLockExecutor``
    :ivar coroutines: the coroutines that run under a lock: none
    """

    coroutines: tuple[ExecutorRun, ...] = ()

    def __init__(self, inner: Any, parts: ExecutorParts) -> None:
        self._inner = inner
        self._parts = parts

    @property
    def room(self) -> float:
        """How many more runs can get a worker now; ``inf``: no limit."""
        workers = worker_count(self._inner)
        busy = sum(self._parts.active.instances.values())
        return inf if workers is None else max(0, workers - busy)

    def call_if_there_is_room(self, _note_room: Callable[[], object]) -> None:
        """Do nothing, because a store's next ordinary look asks for the room."""

    def submit(self, submission: Submission, _locks: HeldLocks, _notifier: Notifier) -> None:
        """Give a submission to the wrapped executor.

        :raises Exception: whatever the wrapped executor raises
        """
        job = _UnlockedJob(submission, self._parts.wrap_function)
        self._parts.active.note_begun(submission)
        give(self._inner, job, list(submission.run_times))

    def stop(self, _seconds: float, *, closes: bool = False) -> None:
        """Do nothing, because no run waits here: each was given to the wrapped executor."""

    def events_of(self, submission: Submission, events: list[Any]) -> list[Any]:
        """Return the events to report for a submission, from APScheduler's own events."""
        logger_name = submission.logger_name
        if submission.awaited:
            events = [never_awaited(event, self._inner, logger_name) or event for event in events]
        return events

    def failed(self, _submission: Submission, _error: BaseException) -> None:
        """Do nothing, because the wrapped executor itself logs why a submission has failed."""

    def ended(self, submission: Submission) -> None:
        """Note that the wrapped executor has reported a submission, so that it is over."""
        self._parts.note_over(submission)


class _UnlockedJob(GivenJob):
    """Stands in for a job that runs without a lock, with the job's own ``misfire_grace_time``."""

    def __init__(
        self, submission: Submission, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        job = submission.job
        where = f"job {job.id!r}: its function"
        call = partial(_await if submission.awaited else _call, where, wrap, job.func)
        super().__init__(submission, JobIdWithRun(job.id, submission), call, job.misfire_grace_time)

    def __reduce__(self) -> tuple[Any, ...]:
        return JobInWorker, (self._job, self.misfire_grace_time, None)


def _call(where: str, wrap: Any, function: Any, *arguments: Any, **named: Any) -> Any:
    return check_returned(wrap(function)(*arguments, **named), where)


async def _await(where: str, wrap: Any, function: Any, *arguments: Any, **named: Any) -> Any:
    return check_returned(await wrap(function)(*arguments, **named), where)
