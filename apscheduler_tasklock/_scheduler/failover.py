"""Failover: finding the runs of this scheduler's tasks whose holders died, and what follows."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol
from uuid import UUID

from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED

from apscheduler_tasklock._database.errors import ConflictError
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.protocol import RunState
from apscheduler_tasklock._scheduler.submission import Blocked, JobKey, Submission
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

logger = logging.getLogger(__name__)

# How often dead runs are looked for during one lease, at least.
LOOKS_PER_LEASE = 3
# Seconds between two looks, at least.
SHORTEST_INTERVAL = 0.2
# Seconds after which it is tried again whether the scheduler runs by now.
STARTING_INTERVAL = 0.2
# How often a window is handed over until it is given up: a fleet that keeps on stopping would hand
# it round for ever.
MOST_HANDOVERS = 10
# Seconds for which rows of one-off jobs are kept after they are over; and from one deletion of such
# rows to the next.
RETENTION = 7 * 24 * 3600.0
PRUNE_INTERVAL = 3600.0


class Jobs(Protocol):
    """The scheduler's jobs on one executor, as the failover needs them."""

    def list_tasks(self) -> Sequence[tuple[str, JobKey, float | None]]:
        """Return all jobs as of :meth:`Failover.know`. Asks the job stores."""

    def submission_for(self, key: JobKey, dead: RunState) -> Submission | None:
        """Return what runs a dead run's window again, if the job is there and is still the same."""

    def renewed(self, submission: Submission) -> Submission | None:
        """Return a refused submission with the job as it is now, if it is still to run."""

    def submit(self, submission: Submission, not_now: Callable[[], None]) -> None:
        """Submit it, where the scheduler does. ``not_now`` is called if that cannot be now."""


class Failover:
    """Looks every few seconds whether holders of this scheduler's tasks have died.

    It reads the rows of all its tasks with one statement: when it starts, and then at an interval.
    A dead run whose window is to be run again is taken over, whether or not this replica was
    refused because of it. A run time that was refused because of it, and whose own window is new,
    is run after that, or at once where there is no failover.

    :param locks: the task locks of this replica
    :param jobs: the scheduler's jobs
    :param state: returns the scheduler's state
    :param interval: seconds between two looks, at most
    :param given_up: told of a dead run that is not run again any more, and why
    :param prune_interval: seconds between two deletions of rows that are over
    """

    def __init__(
        self,
        locks: LockClient,
        jobs: Jobs,
        state: Callable[[], int],
        interval: float,
        given_up: Callable[[RunState, JobKey, str], None],
        prune_interval: float = PRUNE_INTERVAL,
    ) -> None:
        self._locks = locks
        self._jobs = jobs
        self._state = state
        self._interval = interval
        self._given_up = given_up
        self._prune_interval = prune_interval
        self._may_prune = True
        self._changed = threading.Condition()
        self._closed = False
        self._woken = False
        self._rejected = False
        self._listed = False
        self._is_first = True  # the look when it starts, which waits for nothing
        self._tasks: dict[JobKey, str] = {}
        self._shortest_lease = float("inf")
        self._blocked: dict[str, list[Blocked]] = defaultdict(list)
        # Refused ones after which the scheduler has dropped the job, as it does with one-off jobs.
        self._last: dict[str, Submission] = {}
        self._submitted: set[UUID] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._work, name="tasklock-failover", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take nothing over any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            # It may be in the middle of a statement, which has a limit of its own.
            thread.join(timeout=STARTING_INTERVAL)

    def wake(self) -> None:
        """Look now."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def knows(self, task_name: str, key: JobKey) -> bool:
        """Tell whether a job's task is looked at already."""
        return self._tasks.get(key) == task_name

    def know(self, task_name: str, key: JobKey, lease: float | None) -> None:
        """Look for dead runs of a job's task from now on.

        :param lease: of a job with failover: it is looked for them some times in a lease
        """
        with self._changed:
            self._tasks[key] = task_name
            if lease is not None and lease < self._shortest_lease:
                self._shortest_lease = lease
                self._woken = True  # the pause that goes on may be longer than this lease
                self._changed.notify_all()

    def forget(self, key: JobKey) -> None:
        """Look for a job's no more: it was removed, or has changed."""
        with self._changed:
            self._tasks.pop(key, None)

    def add(self, blocked: Blocked) -> None:
        """Keep a run time that was refused because of a run that had not ended."""
        submission = blocked.submission
        is_last = submission.is_last  # a custom trigger's own code, maybe
        with self._changed:
            if self._closed:
                return
            if is_last:
                self._last[submission.task_name] = submission
            if blocked.is_new:
                waiting = self._blocked[submission.task_name]
                if submission.job.coalesce:
                    # As APScheduler has it, which runs the last one only.
                    waiting[:] = [b for b in waiting if b.submission.job.id != submission.job.id]
                waiting.append(blocked)
            if blocked.waits:
                self._woken = True
                self._changed.notify_all()

    def ended(self, submission: Submission) -> None:
        """Note that a submission is over, whatever became of it."""
        if submission.dead_run is not None:
            with self._changed:
                self._submitted.discard(submission.dead_run.claim_id)
                # What had to wait for it is due now.
                self._woken = self._woken or submission.task_name in self._blocked
                self._changed.notify_all()

    def _work(self) -> None:
        first = min(60.0, self._prune_interval)
        prune_at = time.monotonic() + random.uniform(0, first)  # noqa: S311  # no secret
        while self._wait():
            try:
                self._look()
                if time.monotonic() > prune_at:
                    prune_at = time.monotonic() + self._prune_interval
                    self._prune()
            except TaskLockDatabaseError:
                pass  # logged as an outage
            except TaskLockError as error:
                self._warn_once(error)
            except Exception:  # nothing may end this thread unseen
                logger.exception("Dead runs could not be looked for; trying again")

    def _wait(self) -> bool:
        """Wait until it is time to look; return whether there is anything to look for."""
        with self._changed:
            if not self._is_first:
                self._changed.wait_for(lambda: self._closed or self._woken, self._pause())
            self._is_first = False
            while not self._closed and self._state() != STATE_RUNNING:
                # Paused, or not started yet. What died meanwhile is found afterwards.
                self._changed.wait(STARTING_INTERVAL)
            self._woken = False
            if self._closed:
                self._thread = None
            return not self._closed

    def _pause(self) -> float:
        interval = min(self._interval, self._shortest_lease / LOOKS_PER_LEASE)
        # With jitter: all replicas of a deployment have started at the same moment.
        return max(SHORTEST_INTERVAL, interval * random.uniform(0.9, 1.0))  # noqa: S311  # no secret

    def _warn_once(self, error: TaskLockError) -> None:
        if not self._rejected:
            self._rejected = True
            logger.warning("Dead runs could not be looked for; trying again: %s", error)

    def _look(self) -> None:
        self._list_once()
        with self._changed:
            waiting = sorted({*self._blocked, *self._last})
            names = sorted({*self._tasks.values(), *waiting})
        if not names:
            return
        states = self._locks.read_runs(names, waiting)
        self._rejected = False
        for state in states:
            if self._closed or self._state() == STATE_STOPPED:
                return
            self._act_safely_on(state)
        for name in set(waiting) - {state.task_name for state in states}:  # its row is gone
            self._last.pop(name, None)

    def _list_once(self) -> None:
        if not self._listed:
            for task_name, key, lease in self._jobs.list_tasks():
                self.know(task_name, key, lease)
            self._listed = True

    def _act_safely_on(self, state: RunState) -> None:
        try:
            self._act_on(state)
        except ConflictError as error:
            # Somebody has locked this task's row. The others are seen to.
            logger.debug("Task %r: its dead run could not be seen to: %s", state.task_name, error)
        except TaskLockDatabaseError:
            raise
        except Exception:  # of one task, as of its job store; the others are seen to
            logger.exception("Task %r: its dead run could not be seen to", state.task_name)

    def _act_on(self, state: RunState) -> None:
        """Do what the last run of a task calls for."""
        if state.finished:
            self._last.pop(state.task_name, None)
            # A run that ended stood rightly against what was due meanwhile; one that was given up
            # did not, and counts as another death.
            gave_up = state.deaths > 0
            self._submit_blocked(state, lambda b: gave_up or b.token != state.token)
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
        if not (state.failover or state.handed_over) or not state.runs:
            return False
        found = self._find_job(state)
        if found is None:
            return False
        key, submission = found
        if not (submission.failover or state.handed_over):
            return False
        reason = self._reason_to_give_up(state, submission)
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
            keys = [key for key, name in self._tasks.items() if name == state.task_name]
        if last is not None and last.runs == state.runs:
            return last.key, last.for_dead_run(state)
        for key in keys:
            found = self._jobs.submission_for(key, state)
            if found is not None:
                return key, found
        return None

    def _reason_to_give_up(self, state: RunState, submission: Submission) -> str | None:
        if state.expired:
            return "its maximum lock has ended"
        if state.handed_over:
            if state.handovers < MOST_HANDOVERS:
                return None
            return f"it was handed over {state.handovers} times"
        assert submission.options is not None
        most = submission.options.max_takeovers
        if most is None or state.deaths < most:
            return None
        return f"{state.deaths + 1} runs of the task in a row have died with their holders"

    def _prune(self) -> None:
        """Delete rows of one-off jobs that are over, if this role may."""
        if not self._may_prune:
            return
        try:
            while self._locks.prune(RETENTION) and not self._closed:
                pass  # it deletes so many at a time
        except TaskLockDatabaseError:
            raise
        except TaskLockError:
            self._may_prune = False
            logger.info(
                "Rows of one-off jobs are not deleted, since this role may not: "
                "GRANT DELETE ON the task lock table, if they are to be"
            )
