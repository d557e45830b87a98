"""The runs of an executor whose task locks are off: each is given at once, as without us."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._scheduler.adapter import RunId, give, never_awaited
from apscheduler_tasklock._scheduler.functions import events_of_what_ran
from apscheduler_tasklock._scheduler.notify import Notifier
from apscheduler_tasklock._scheduler.runs import Owner
from apscheduler_tasklock._scheduler.submission import GivenJob, Submission
from apscheduler_tasklock._scheduler.workers import JobInWorker


class UnlockedRuns:
    """What :class:`~apscheduler_tasklock._scheduler.runs.Runs` is where nothing is claimed.

    :param inner: the wrapped executor
    :param owner: the executor
    """

    is_live = True

    def __init__(self, inner: Any, owner: Owner) -> None:
        self._inner = inner
        self._owner = owner

    def submit(self, submission: Submission, _locks: LockClient, _notifier: Notifier) -> None:
        """Give a submission to the wrapped executor.

        :raises Exception: whatever that raises
        """
        job = _UnlockedJob(submission, self._owner.wrap_function)
        self._owner.note_begun(submission)
        give(self._inner, job, list(submission.run_times))

    def stop(self, _seconds: float, *, closes: bool = False) -> None:
        """Do nothing: what was given runs, and a pool that is shut down takes nothing more."""

    def events_of(self, submission: Submission, events: list[Any]) -> list[Any]:
        """Return what is to be told of a submission that has these events of APScheduler's."""
        logger_name = submission.logger_name
        if submission.awaited:
            events = [never_awaited(event, self._inner, logger_name) or event for event in events]
        return events_of_what_ran(events, logger_name)

    def failed(self, _submission: Submission, _error: BaseException) -> None:
        """Do nothing: the wrapped executor has told why a submission has failed."""

    def ended(self, submission: Submission) -> None:
        """Note that the wrapped executor has reported a submission."""
        self._owner.note_over(submission)


class _UnlockedJob(GivenJob):
    """The job as the wrapped executor gets it, with its own grace time."""

    def __init__(
        self, submission: Submission, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        job = submission.job
        call = partial(_await if submission.awaited else _call, wrap, job.func)
        super().__init__(submission, RunId(job.id, submission), call, job.misfire_grace_time)

    def __reduce__(self) -> tuple[Any, ...]:
        return JobInWorker, (self._job, self.misfire_grace_time, None)


def _call(wrap: Any, function: Any, *arguments: Any, **named: Any) -> Any:
    return wrap(function)(*arguments, **named)


async def _await(wrap: Any, function: Any, *arguments: Any, **named: Any) -> Any:
    return await wrap(function)(*arguments, **named)
