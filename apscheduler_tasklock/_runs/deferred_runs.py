"""Deferred runs: they are claimed when a look has read the rows of their tasks.

A run is deferred if its claim was refused because another run of its task is unfinished, and the
window of the deferred run was not claimed before. In leader mode a follower defers each of its
runs, before it asks for the claim; see ``leadership``.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from apscheduler_tasklock._lock.protocol_messages import TaskRow
from apscheduler_tasklock._runs.run import AnyRun, JobKey, QueuedRun


class Outlook(enum.Enum):
    """What becomes of a deferred run after a look at its task's row."""

    WAITS = "waits"  # because a run of the task is unfinished
    ASKED_AGAIN = "asked again"
    REFUSED = "refused"  # for good
    DROPPED = "dropped"  # with its backlog: its job is gone, or a later run is deferred instead


@dataclass(frozen=True)
class LastRun:
    """The last run of a task, as a look at the task's row has found it.

    :ivar token: the run's fencing token
    :ivar finished: whether the run was released or given up
    :ivar dead: whether the run is unfinished although its lease has ended
    :ivar deaths: how many times in a row a run of the task has died; 0 after a release, unless the
        run is to be retried
    :ivar as_of: when the look began, on the monotonic clock
    :ivar row: the task's row; ``None``: the task has no row, or the row could not be read
    """

    token: int
    finished: bool
    dead: bool
    deaths: int
    as_of: float = 0.0
    row: TaskRow | None = None


class WhyDeferred(Protocol):
    """Why a run is deferred, and what a look at its task's row makes of it."""

    def outlook(self, last: LastRun) -> Outlook:
        """Return what becomes of the deferred run.

        :param last: the last run of the task, as a look has found it
        """


@dataclass(frozen=True)
class InTheWay:
    """The run because of which another run is deferred.

    :ivar token: the fencing token of the run in the way
    :ivar came_first: whether the run in the way began before the deferred run was due. If so, the
        deferred run is refused for good when the run in the way is released, as APScheduler skips a
        run time while an instance of the job is running. Always false if the run in the way is a
        manual run, or if it has ended on this replica and its release has not arrived.
    :ivar run_time: the run time of the deferred run. If the run in the way had ended before it, and
        only its release came late, as after an outage, the deferred run is asked for again.
    """

    token: int
    came_first: bool
    run_time: datetime | None = None

    def outlook(self, last: LastRun) -> Outlook:
        """Return what becomes of the deferred run.

        :param last: the last run of the task, as a look has found it
        """
        if not (last.finished or last.dead):
            return Outlook.WAITS
        # A release that notes a retry does not reset the count of deaths.
        is_retried = last.row is not None and last.row.retry_pending
        is_counted_anew = last.deaths == 0 or is_retried
        was_released = last.finished and is_counted_anew and last.token == self.token
        if self.came_first and was_released and not self._had_ended(last.row):
            return Outlook.REFUSED
        return Outlook.ASKED_AGAIN

    def _had_ended(self, row: TaskRow | None) -> bool:
        ended_at = None if row is None else row.finished_at
        if ended_at is None or self.run_time is None:
            return False
        # As seconds, because Python compares two times of one time zone by their wall clocks.
        return ended_at.timestamp() < self.run_time.timestamp()


# Limits how many runs of one job are deferred, each with its backlog. The oldest are dropped.
MOST_DEFERRED = 256
# Does what the outlook of a deferred run says. Gets the outlook, and when the look began, on the
# monotonic clock.
Decide = Callable[[Outlook, float], object]


class DeferredRuns:
    """The runs of one executor that are deferred until a look at their tasks' rows decides on them.

    The replica's thread adds and removes runs, and the look decides on them in another thread. Each
    operation on the runs is atomic, so that each run is decided on once.

    The runs are found by their tasks, because a follower in leader mode defers the run times of all
    its jobs, which may be thousands.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_task: dict[str, dict[Any, tuple[WhyDeferred, Decide]]] = {}

    def add(self, run: QueuedRun, reason: WhyDeferred, decide: Decide) -> None:
        """Defer a run.

        :param reason: decides what becomes of the run
        :param decide: called by the look, after it has read the task's row
        """
        with self._lock:
            self._by_task.setdefault(run.task_name, {})[run] = reason, decide

    def take(self, run: QueuedRun) -> bool:
        """Remove a run; return whether it was deferred until now."""
        with self._lock:
            of_task = self._by_task.get(run.task_name, {})
            found = of_task.pop(run, None)
            if found is not None and not of_task:
                del self._by_task[run.task_name]
            return found is not None

    def take_for(self, run: AnyRun, *, coalesce: bool) -> list[AnyRun]:
        """Make room for a run of a job; return the runs of the job that are not to be deferred.

        :param run: the run to defer. It is among the returned runs if later runs are deferred
            instead.
        :param coalesce: the job's option ``coalesce``: whether only the last of several run times
            is run
        """
        deferred = [each for each, _ in self._of(run.task_name)]
        of_job = sorted((r for r in [*deferred, run] if r.job == run.job), key=_due_at)
        left_out = of_job[: -1 if coalesce else -MOST_DEFERRED]
        return [each for each in left_out if each is run or self.take(each)]

    def _of(self, task_name: str) -> list[tuple[Any, tuple[WhyDeferred, Decide]]]:
        with self._lock:
            return list(self._by_task.get(task_name, {}).items())

    @property
    def task_names(self) -> set[str]:
        """The tasks that have deferred runs."""
        with self._lock:
            return set(self._by_task)

    def has(self, task_name: str) -> bool:
        """Return whether a task has deferred runs."""
        return task_name in self._by_task

    def jobs_of(self, task_name: str) -> list[JobKey]:
        """Return the jobs that have deferred runs of a task."""
        return list({run.job: None for run, _ in self._of(task_name)})

    def decide(self, task_name: str, job: JobKey, last: LastRun) -> None:
        """Decide on the deferred runs of a job, after a look at its task's last run.

        :raises Exception: whatever the job's store or trigger raises
        """
        for run, (reason, decide) in self._of(task_name):
            if run.job == job:
                outlook = reason.outlook(last)
                if outlook is Outlook.WAITS or self.take(run):
                    decide(outlook, last.as_of)


def _due_at(run: QueuedRun) -> float:
    return run.due_at
