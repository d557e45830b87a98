"""Failover: running the windows of dead holders again, and what had to wait for them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol
from uuid import UUID

from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.messages import RunState
from apscheduler_tasklock._scheduler.poll import Poll, one_task
from apscheduler_tasklock._scheduler.submission import Blocked, JobKey, Submission
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)


class Jobs(Protocol):
    """The scheduler's jobs on one executor, as the failover needs them."""

    def submission_for(self, key: JobKey, dead: RunState) -> Submission | None:
        """Return what runs a dead run's window again, if the job is there and is still the same."""

    def renewed(self, submission: Submission) -> Submission | None:
        """Return a refused submission with the job as it is now, if it is still to run."""

    def submit(self, submission: Submission, not_now: Callable[[], None]) -> None:
        """Submit it, where the scheduler does. ``not_now`` is called if that cannot be now."""


class Failover:
    """Runs the windows of dead holders again, and what had to wait for their runs.

    A dead run whose window is to be run again is taken over, whether or not this replica was
    refused because of it. A run time that was refused because of it, and whose own window is new,
    is run after that, or at once where there is no failover.

    :param locks: the task locks of this replica
    :param jobs: the scheduler's jobs
    :param poll: finds the rows
    :param given_up: told of a dead run that is not run again any more, and why
    """

    def __init__(
        self,
        locks: LockClient,
        jobs: Jobs,
        poll: Poll,
        given_up: Callable[[RunState, JobKey, str], None],
    ) -> None:
        self._locks = locks
        self._jobs = jobs
        self._poll = poll
        self._given_up = given_up
        self._changed = threading.Lock()
        self._blocked: dict[str, list[Blocked]] = defaultdict(list)
        # Refused ones after which the scheduler has dropped the job, as it does with one-off jobs.
        self._last: dict[str, Submission] = {}
        self._submitted: set[UUID] = set()
        poll.add(self)

    def add(self, blocked: Blocked) -> None:
        """Keep a run time that was refused because of a run that had not ended."""
        submission = blocked.submission
        is_last = submission.is_last  # a custom trigger's own code, maybe
        if self._poll.closed:
            return
        with self._changed:
            if is_last:
                self._last[submission.task_name] = submission
            if blocked.is_new:
                waiting = self._blocked[submission.task_name]
                if submission.job.coalesce:
                    # As APScheduler has it, which runs the last one only.
                    waiting[:] = [b for b in waiting if b.submission.job.id != submission.job.id]
                waiting.append(blocked)
        if blocked.waits:
            self._poll.wake()

    def ended(self, submission: Submission) -> None:
        """Note that a submission is over, whatever became of it."""
        if submission.dead_run is None and not submission.is_manual:
            return
        with self._changed:
            if submission.dead_run is not None:
                self._submitted.discard(submission.dead_run.claim_id)
            is_waited_for = submission.task_name in self._blocked
        if is_waited_for:  # what had to wait for it is due now
            self._poll.wake()

    def waiting(self) -> set[str]:
        """Return the tasks whose rows are wanted whatever their state."""
        with self._changed:
            return {*self._blocked, *self._last}

    def look(self, states: Sequence[RunState], waiting: Collection[str]) -> None:
        """Do what the rows call for that were found.

        :param waiting: the tasks whose rows were asked for whatever their state
        """
        for state in states:
            if self._poll.closed:
                return
            with one_task(state, self._locks, "its dead run"):
                self._act_on(state)
        for name in set(waiting) - {state.task_name for state in states}:  # its row is gone
            self._last.pop(name, None)

    def _act_on(self, state: RunState) -> None:
        """Do what the last run of a task calls for."""
        if state.finished:
            self._last.pop(state.task_name, None)
            # A run that ended stood rightly against what was due meanwhile; one that was given up
            # did not, and counts as another death.
            gave_up = state.deaths > 0
            self._submit_blocked(state, lambda b: gave_up or b.follows or b.token != state.token)
            return
        if state.paused:  # what died waits for the end of the pause
            return
        believed = state.dead and (state.handed_over or self._locks.stable)
        if believed and not self._run_again(state):
            self._submit_blocked(state, lambda _blocked: True)

    def _submit_blocked(self, state: RunState, is_to_run: Callable[[Blocked], bool]) -> None:
        """Submit run times again that a task's last run no longer stands against."""
        with self._changed:
            waiting = self._blocked.pop(state.task_name, [])
        together: dict[JobKey, list[Blocked]] = defaultdict(list)
        for blocked in waiting:
            if is_to_run(blocked):
                together[blocked.submission.key].append(blocked)
        for blocked_ones in together.values():
            # In one submission, one after the other: side by side, they would refuse each other.
            run_times = sorted(time for b in blocked_ones for time in b.submission.run_times)
            submission = replace(blocked_ones[-1].submission, run_times=tuple(run_times))
            renewed = self._jobs.renewed(submission)
            if renewed is not None:
                again = replace(renewed, exempt_from_misfire=True)
                self._jobs.submit(again, partial(self._add_again, blocked_ones))

    def _add_again(self, blocked_ones: Sequence[Blocked]) -> None:
        for blocked in blocked_ones:
            self.add(replace(blocked, waits=False))

    def _run_again(self, state: RunState) -> bool:
        """See to a dead run's window; tell whether it comes before other windows of the task."""
        if not state.is_run_again(failover=True):
            return False
        found = self._find_job(state)
        if found is None:
            return False
        key, submission = found
        if not state.is_run_again(failover=submission.failover):
            return False
        assert submission.options is not None
        reason = state.reason_to_give_up(submission.options.max_takeovers)
        if reason is not None:
            if self._locks.give_up(state):
                self._given_up(state, key, reason)
            self._submit_blocked(state, lambda _blocked: True)
            return True
        with self._changed:
            if state.claim_id in self._submitted:
                return True
            self._submitted.add(state.claim_id)
        self._jobs.submit(submission, partial(self._not_submitted, state))
        return True

    def _not_submitted(self, state: RunState) -> None:
        with self._changed:
            self._submitted.discard(state.claim_id)

    def _find_job(self, state: RunState) -> tuple[JobKey, Submission] | None:
        """Return the job that runs the same as a dead run, and what runs its window again."""
        with self._changed:
            last = self._last.get(state.task_name)
        if last is not None and last.runs == state.runs:
            return last.key, last.for_dead_run(state)
        for key in self._poll.keys_of(state.task_name):
            found = self._jobs.submission_for(key, state)
            if found is not None:
                return key, found
        return None
