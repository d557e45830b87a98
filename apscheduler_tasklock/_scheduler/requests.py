"""Runs that were asked for by hand: found by the poll, and claimed in a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol
from uuid import UUID

from apscheduler_tasklock._lock.messages import RunState
from apscheduler_tasklock._scheduler.poll import Poll
from apscheduler_tasklock._scheduler.submission import JobKey, Submission
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)


class RequestedJobs(Protocol):
    """The scheduler's jobs, as requests need them."""

    def requested(self, key: JobKey, task_name: str, request_id: UUID) -> Submission | None:
        """Return what runs a job by hand, if it is there."""

    def submit(self, submission: Submission, not_now: Callable[[], None]) -> None:
        """Submit it, where the scheduler does. ``not_now`` is called if that cannot be now."""


class RequestedRuns:
    """Submits the runs that operators have asked for.

    Each replica that has the task does; the claim is granted to one of them.

    :param poll: finds the requests
    :param jobs: the scheduler's jobs
    """

    def __init__(self, poll: Poll, jobs: RequestedJobs) -> None:
        self._poll = poll
        self._jobs = jobs
        self._lock = threading.Lock()
        self._submitted: set[UUID] = set()
        poll.add(self)

    def waiting(self) -> Collection[str]:
        """Return no tasks: those with a request are found anyhow."""
        return ()

    def look(self, states: Sequence[RunState], _waiting: Collection[str]) -> None:
        """Submit what was asked for of tasks that do not run."""
        for state in states:
            if state.request_id is None or not (state.finished or state.dead):
                continue
            for key in self._poll.keys_of(state.task_name):
                if self._poll.closed or not self._is_new(state.request_id):
                    break
                try:
                    submission = self._jobs.requested(key, state.task_name, state.request_id)
                except Exception:  # of one task, as of its job store; the others are seen to
                    logger.exception("Task %r: its run by hand is not begun", state.task_name)
                    submission = None
                if submission is not None:
                    self._jobs.submit(submission, partial(self._not_submitted, state.request_id))
                    break
                self._not_submitted(state.request_id)

    def ended(self, submission: Submission) -> None:
        """Note that a submission is over. If it was not granted, it is tried again."""
        if submission.request_id is not None:
            self._not_submitted(submission.request_id)

    def _is_new(self, request_id: UUID) -> bool:
        with self._lock:
            is_new = request_id not in self._submitted
            self._submitted.add(request_id)
        return is_new

    def _not_submitted(self, request_id: UUID) -> None:
        with self._lock:
            self._submitted.discard(request_id)
