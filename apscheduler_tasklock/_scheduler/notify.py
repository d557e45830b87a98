"""What is told of a run time's lock: log lines and events, each outcome in its own words.

The log line comes first: listeners are code of the application, which may take long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from apscheduler_tasklock._database.errors import RowLockedError
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.messages import ClaimRequest, Ending, Refusal
from apscheduler_tasklock._scheduler.submission import Submission
from apscheduler_tasklock._scheduler.telemetry import RunTelemetry
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.events import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockEvent,
)
from apscheduler_tasklock.lock import HeldLock

logger = logger_of(__name__)

_NOTHING = RunTelemetry()


def _measure_nothing(_submission: Submission) -> RunTelemetry:
    return _NOTHING


# Returns what measures a run time of a submission. It is chosen once.
telemetry_of: Callable[[Submission], RunTelemetry] = _measure_nothing
with suppress(ImportError):  # the extra `otel` is not installed
    from apscheduler_tasklock._scheduler import otel

    telemetry_of = otel.telemetry_of

Dispatch = Callable[[Any], None]

LOCKED_ROW = (
    ". Some session has locked the task's row and has not ended its transaction by then; "
    "pg_stat_activity and pg_blocking_pids() tell which"
)


# Seconds within which replicas add the same one-off job together.
TOGETHER = 5.0


@dataclass(frozen=True)
class Notifier:
    """Where the events of an executor's jobs go, and what its log lines have told already.

    :ivar dispatch: gets the events
    :ivar blocked: what was told of blocked tasks
    :ivar has_listener: whether somebody listens to events of this kind
    """

    dispatch: Dispatch
    blocked: BlockedTasks
    has_listener: Callable[[int], bool] = lambda _code: True


class Reports:
    """Tells what becomes of one run time's lock.

    :param notifier: gets the events
    :ivar run_time: the run time that is told of
    :ivar telemetry: measures it
    """

    def __init__(
        self, submission: Submission, run_time: datetime, locks: LockClient, notifier: Notifier
    ) -> None:
        self.run_time = run_time
        self.telemetry = telemetry_of(submission)
        self._submission = submission
        self._locks = locks
        self._notifier = notifier
        self._told_lost = False
        self._telling = threading.Lock()

    @property
    def what(self) -> str:
        """What is run, in words."""
        if self._submission.is_manual:
            return "the run that was asked for by hand"
        return f"the window of {self.run_time}"

    def granted(self, held: HeldLock) -> None:
        """Tell of a claim that was granted, and if so, whose run it takes over."""
        dead_run = self._submission.dead_run
        if dead_run is not None:
            why = (
                "handed it over"
                if dead_run.handed_over
                else "neither renewed nor released its lock"
            )
            logger.info(
                "Task %r: runs %s again (token %s), since its holder %r (token %s) %s",
                held.name,
                self.what,
                held.token,
                held.dead_holder,
                dead_run.token,
                why,
            )
        reason = "takeover" if held.is_takeover else None
        if self._submission.request_id is not None:
            reason = "manual"
            logger.info("Task %r: run by hand (token %s)", held.name, held.token)
        self._tell_of(held, EVENT_TASK_LOCK_GRANTED, locked_until=held.locked_until, reason=reason)

    def refused(self, request: ClaimRequest, refusal: Refusal) -> None:
        """Tell of a claim that was refused, and warn if an earlier run blocks the task."""
        logger.debug(
            "Task %r: refused for the run time %s (%s, held by %r until %s)",
            self._submission.task_name,
            self.run_time,
            refusal.reason,
            refusal.holder,
            refusal.locked_until,
        )
        self._warn_if_nobody_runs_it(request, refusal)
        self._warn_of_another_function(request, refusal)
        self._warn_if_blocked(refusal)
        self._tell(
            EVENT_TASK_LOCK_REFUSED,
            holder=refusal.holder,
            token=refusal.token,
            locked_until=refusal.locked_until,
            reason=refusal.reason,
        )

    def _warn_if_blocked(self, refusal: Refusal) -> None:
        """Warn if an earlier run blocks the task, and tell how to free it."""
        task_name = self._submission.task_name
        if not refusal.blocked or (self._submission.failover and refusal.waits):
            return  # nothing blocks it, or what does is run again
        # A one-off job has no next run time that may find the task free.
        renewed = refusal.renewed and not self._submission.one_off
        if self._notifier.blocked.first_seen(task_name, refusal.token, renewed=renewed):
            logger.warning(
                "Task %r: the run time %s is not run, because %r %s the task (token %s), locked "
                "until %s unless that is renewed. If that run hangs or is dead, free the task: %s",
                task_name,
                self.run_time,
                refusal.holder,
                "has not released" if refusal.waits else "still runs",
                refusal.token,
                refusal.locked_until,
                self._locks.command_line(
                    "free",
                    "--token",
                    str(refusal.token),
                    # Its lease has ended, or else the holder may be alive.
                    *([] if refusal.waits else ["--force"]),
                    task=task_name,
                ),
            )

    def _warn_if_nobody_runs_it(self, request: ClaimRequest, refusal: Refusal) -> None:
        """Warn if a run time falls into the window of an earlier one."""
        assert request.run_time is not None
        if refusal.reason != "window" or refusal.window_start >= request.run_time:
            return
        if not request.exact:
            return
        level = logging.WARNING
        if self._submission.one_off and not self._is_own(refusal):
            if (request.run_time - refusal.window_start).total_seconds() <= TOGETHER:
                return  # another replica has added the same one, a moment before
            level = logging.INFO
        if self._notifier.blocked.is_first("window", self._submission.task_name):
            logger.log(
                level,
                "Task %r: skipped the run time %s, because it falls into the window of the run "
                "time %s, which ends at %s. %s. To run a job now, whatever its windows: %s",
                self._submission.task_name,
                self.run_time,
                refusal.window_start,
                refusal.locked_until,
                self._remedy,
                self._locks.command_line("run", task=self._submission.task_name),
            )

    def _warn_of_another_function(self, request: ClaimRequest, refusal: Refusal) -> None:
        """Warn if a task is refused again because of a run of another function.

        Once is no reason: a function may have been renamed, and a deployment be under way.
        """
        other, own = _function(refusal.runs), _function(request.runs)
        task_name, blocked = self._submission.task_name, self._notifier.blocked
        if not other or other == own or blocked.is_first("another function", task_name):
            return
        if blocked.is_first("another function, again", task_name):
            logger.warning(
                "Task %r: it runs %s here, and is refused because of runs of %s, on %r. They have "
                "one name, and so one lock. Give one of the jobs another id or name, or the "
                "executors of each application a namespace of their own",
                task_name,
                own,
                other,
                refusal.holder,
            )

    def _is_own(self, refusal: Refusal) -> bool:
        """Tell whether this replica holds what stood against a claim, or has held it."""
        return self._locks.replica_id == refusal.holder

    @property
    def _remedy(self) -> str:
        """What lets a run time run that falls into an earlier window."""
        submission = self._submission
        assert submission.options is not None
        if not submission.one_off:
            return "Give a job that was modified or rescheduled a shorter minimum lock"
        if submission.options.name:
            return "Give it another name, or a shorter min_lock"
        has_id = submission.task_name.endswith(submission.job.id)
        return f"Give it {'another id' if has_id else 'an id'}, or a shorter min_lock"

    def failed(self, error: TaskLockError, *, runs: bool) -> None:
        """Tell of a claim that was not decided.

        :param runs: whether the job runs all the same
        """
        # A run that an outage costs is a warning; a wrong set-up is an error.
        is_outage = isinstance(error, TaskLockDatabaseError) and not isinstance(
            error, RowLockedError
        )
        logger.log(
            logging.WARNING if is_outage else logging.ERROR,
            "Task %r: %s for the run time %s: %s%s",
            self._submission.task_name,
            "run without its lock" if runs else "not run",
            self.run_time,
            error,
            LOCKED_ROW if isinstance(error, RowLockedError) else "",
        )
        if not runs:
            self.telemetry.skipped("error")
        self._tell(EVENT_TASK_LOCK_ERROR, exception=error)

    def not_begun(self) -> None:
        """Tell of a run time that a shutdown came before."""
        self.telemetry.skipped("shutdown")
        logger.info(
            "Task %r: the run time %s is not run here, since this replica is shutting down",
            self._submission.task_name,
            self.run_time,
        )

    def not_taken_over(self, error: TaskLockError) -> None:
        """Tell, once for a dead run, that its window could not be run again yet."""
        dead_run = self._submission.dead_run
        assert dead_run is not None
        if self._notifier.blocked.is_first(f"takeover of {dead_run.token}", dead_run.task_name):
            logger.warning(
                "Task %r: %s, whose holder died, could not be run again; trying again: %s",
                self._submission.task_name,
                self.what,
                error,
            )
        self._tell(EVENT_TASK_LOCK_ERROR, exception=error)

    def released(self, held: HeldLock, locked_until: datetime | None, ending: Ending) -> None:
        """Tell of a release that arrived."""
        handed_over = ending is Ending.HAND_OVER
        if handed_over:
            logger.info(
                "Task %r: %s is handed over to another replica (token %s)",
                held.name,
                self.what,
                held.token,
            )
        reason = "handed over" if handed_over else None
        self._tell_of(held, EVENT_TASK_LOCK_RELEASED, locked_until=locked_until, reason=reason)

    def not_released(self, held: HeldLock, error: TaskLockError) -> None:
        """Tell of a release that failed."""
        if not isinstance(error, TaskLockDatabaseError):
            logger.error(
                "Task %r: its lock could not be released, and is tried again until it ends by "
                "itself: %s",
                held.name,
                error,
            )
        self._tell_of(held, EVENT_TASK_LOCK_ERROR, exception=error)

    def died(self, held: HeldLock) -> None:
        """Tell that a worker process died which ran the job."""
        logger.warning(
            "Task %r: the worker process that ran it is dead; its lock is free", held.name
        )
        self._tell_of(held, EVENT_TASK_LOCK_LOST, reason="died")

    def lost(self, held: HeldLock) -> None:
        """Tell, once, that the claim ended before the run did."""
        with self._telling:  # the renewing thread and the worker may notice at the same time
            if self._told_lost:
                return
            self._told_lost = True
        logger.warning(
            "Task %r: the lock of the run scheduled at %s is lost (token %s), and another replica "
            "may run the task. It was not renewed for longer than its lease, or somebody freed the "
            "task, or the run outlived its maximum lock; if so, raise max_factor or max_lock above "
            "what it takes",
            held.name,
            self.run_time,
            held.token,
        )
        self.telemetry.lost()
        self._tell_of(held, EVENT_TASK_LOCK_LOST)

    def _tell_of(self, held: HeldLock, code: int, **details: Any) -> None:
        self._tell(code, holder=self._locks.replica_id, token=held.token, **details)

    def _tell(self, code: int, **details: Any) -> None:
        if not self._notifier.has_listener(code):
            return
        submission = self._submission
        self._notifier.dispatch(
            TaskLockEvent(
                code,
                submission.job.id,
                submission.jobstore,
                submission.task_name,
                self.run_time,
                **details,
            )
        )


# How many run times a run may cost that is renewed, until a warning: it may merely take long.
RUN_TIMES_UNTIL_WARNING = 3


class BlockedTasks:
    """Which warnings a replica has logged of the runs and windows that cost run times."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[int, int, bool]] = {}
        self._warned: set[tuple[str, str]] = set()

    def first_seen(self, task_name: str, token: int, *, renewed: bool) -> bool:
        """Count a run time that a run costs, and return whether it is time to warn of that run."""
        known, count, is_warned = self._runs.get(task_name, (token, 0, False))
        if known != token:
            count, is_warned = 0, False
        is_time = not is_warned and count + 1 >= (RUN_TIMES_UNTIL_WARNING if renewed else 1)
        self._runs[task_name] = (token, count + 1, is_warned or is_time)
        return is_time

    def is_first(self, what: str, task_name: str) -> bool:
        """Return whether this is met here for the first time of this task."""
        is_first = (what, task_name) not in self._warned
        self._warned.add((what, task_name))
        return is_first


def _function(runs: str) -> str:
    """Return the function of what a run runs, without the date of a one-off job."""
    return runs.partition(" at ")[0]
