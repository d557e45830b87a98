"""Tasks that are due and that nobody runs: told when they are overdue, run in a replica's place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Protocol

from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.messages import RunState
from apscheduler_tasklock._scheduler.poll import Poll, one_task
from apscheduler_tasklock._scheduler.registration import Registrar
from apscheduler_tasklock._scheduler.submission import JobKey, Submission
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# Seconds after an interval job's due time after which another replica runs it: longer than clocks
# and full workers make it late as a rule.
STANDBY_AFTER = 2.0


class OverdueTasks:
    """Tells of tasks that are overdue, each once until it runs.

    :param locks: the task locks of this replica
    :param poll: finds them
    :param registrar: registers the task again where the row has an old schedule
    :param tell: told of one
    :ivar names: those that are overdue, as of the last look
    """

    def __init__(
        self,
        locks: LockClient,
        poll: Poll,
        registrar: Registrar,
        tell: Callable[[RunState], None] | None = None,
    ) -> None:
        self._locks = locks
        self._poll = poll
        self._registrar = registrar
        self._tell = tell or _warn
        self._told: set[str] = set()
        self.names: tuple[str, ...] = ()
        poll.add(self)

    def waiting(self) -> Collection[str]:
        """Return no tasks: those that are due are found anyhow."""
        return ()

    def look(self, states: Sequence[RunState], _waiting: Collection[str]) -> None:
        """Tell of those that are overdue since this look."""
        overdue = [state for state in states if state.overdue]
        self.names = tuple(state.task_name for state in overdue)
        self._told.intersection_update(self.names)
        for state in overdue:
            if state.task_name in self._told or self._poll.closed:
                continue
            with one_task(state, self._locks, "it"):
                if self._registrar.has_due(state) and not self._registrar.differs(state):
                    self._told.add(state.task_name)
                    self._tell(state)


def _warn(state: RunState) -> None:
    logger.warning(
        "Task %r is overdue: it was due at %s, and no replica has run it since (the last was %r, "
        "token %s)",
        state.task_name,
        state.due_at,
        state.holder or "none",
        state.token,
    )


class StandbyJobs(Protocol):
    """The scheduler's jobs, as a standby needs them."""

    def standby_for(
        self, key: JobKey, state: RunState, due_at: datetime, late_by: float
    ) -> Submission | None:
        """Return what runs a task in another replica's place, if its job is there and due."""

    def submit(self, submission: Submission, not_now: Callable[[], None]) -> None:
        """Submit it, where the scheduler does. ``not_now`` is called if that cannot be now."""


class Standby:
    """Runs interval jobs that are due when the replica that ran them before does not.

    Such a job counts from the start of its replica. Without this, one that moves to another replica
    loses up to a whole period.

    :param locks: the task locks of this replica
    :param poll: finds them
    :param jobs: the scheduler's jobs
    """

    def __init__(self, locks: LockClient, poll: Poll, jobs: StandbyJobs) -> None:
        self._locks = locks
        self._poll = poll
        self._jobs = jobs
        self._begun: dict[str, datetime] = {}  # the due time that was last seen to, by task
        poll.add(self)

    def waiting(self) -> Collection[str]:
        """Return no tasks: those that are due are found anyhow."""
        return ()

    def look(self, states: Sequence[RunState], _waiting: Collection[str]) -> None:
        """Run what is due and waits for a replica that does not come."""
        if not self._locks.stable:  # right after an outage each replica is about to run its own
            return
        for state in states:
            if state.due_at is None or state.due_in_pause or self._poll.closed:
                continue
            late_by = (state.database_time - state.due_at).total_seconds()
            if late_by < STANDBY_AFTER or self._begun.get(state.task_name) == state.due_at:
                continue
            with one_task(state, self._locks, "it"):
                self._run(state, state.due_at, late_by)

    def _run(self, state: RunState, due_at: datetime, late_by: float) -> None:
        for key in self._poll.keys_of(state.task_name):
            submission = self._jobs.standby_for(key, state, due_at, late_by)
            if submission is not None:
                self._begun[state.task_name] = due_at
                logger.debug("Task %r: due since %.1f s, run here", state.task_name, late_by)
                self._jobs.submit(submission, lambda: None)
                return
