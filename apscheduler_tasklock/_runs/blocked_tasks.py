"""Blocked tasks: warnings that a run or a window blocks later run times of its task."""

from __future__ import annotations

import logging
from datetime import datetime

from apscheduler_tasklock._lock.held_locks import HeldLocks
from apscheduler_tasklock._lock.protocol_messages import ClaimRequest, Refusal
from apscheduler_tasklock._lock.statements.misses import TOGETHER
from apscheduler_tasklock._runs.missed_runs import inside_window
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._runs.trigger_times import EndlessTriggerError, may_give
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# A run whose lease is renewed may just take long. So a WARNING is logged only when the run has
# blocked this many run times. Any other run is logged when it has blocked one.
RUN_TIMES_UNTIL_WARNING = 3
# Limits the seconds between the starts of replicas that add one job with `next_run_time=now`, each
# at its start. One of these run times is run, and the others need no log line.
AT_START = 60.0
# The advice if the application has set a run time inside a window.
RUN_NOW = (
    "To run the job now, whatever its windows: executor.run_now(%r). To run it again after a "
    "failure: the option retries, in place of a listener"
)


class BlockedTasks:
    """Remembers which warnings of blocked tasks a replica has logged."""

    def __init__(self) -> None:
        # By task: the token of the blocking run, how many run times that run has blocked, and
        # whether a WARNING of that run was logged.
        self._runs: dict[str, tuple[int, int, bool]] = {}
        self._warned: set[tuple[str, str]] = set()  # kinds of warnings, and tasks

    def first_seen(self, task_name: str, token: int, *, renewed: bool) -> bool:
        """Count a run time that a run has blocked; return whether to warn of that run now.

        :param token: the fencing token of the run that blocks the task
        :param renewed: whether that run's lease is renewed
        """
        known, count, is_warned = self._runs.get(task_name, (token, 0, False))
        if known != token:
            count, is_warned = 0, False
        is_time = not is_warned and count + 1 >= (RUN_TIMES_UNTIL_WARNING if renewed else 1)
        self._runs[task_name] = (token, count + 1, is_warned or is_time)
        return is_time

    def is_first(self, what: str, task_name: str) -> bool:
        """Note a kind of warning for a task; return whether it was not noted before."""
        is_first = (what, task_name) not in self._warned
        self._warned.add((what, task_name))
        return is_first


class BlockedTaskWarnings:
    """Logs warnings about a refused claim, so that an operator can remove the refusal's cause.

    :param submission: the submission of the claim
    :param run_time: the run time that was refused
    :param locks: has sent the claim
    :param logged: the warnings that this replica has logged
    """

    def __init__(
        self, submission: Submission, run_time: datetime, locks: HeldLocks, logged: BlockedTasks
    ) -> None:
        self.run_time = run_time
        self._submission = submission
        self._locks = locks
        self._logged = logged

    def warn(self, request: ClaimRequest, refusal: Refusal) -> None:
        """Log the warnings that this refusal gives rise to, unless they were logged before."""
        self._warn_if_nobody_runs_it(request, refusal)
        self._warn_of_another_function(request, refusal)
        self._warn_if_blocked(refusal)

    def _warn_if_blocked(self, refusal: Refusal) -> None:
        """Warn if an earlier run blocks the task, and say how to free it."""
        task_name = self._submission.task_name
        if not refusal.blocked or (self._submission.failover and refusal.waits):
            return  # because no run blocks the task, or the run that blocks it will be taken over
        # For a one-off job the WARNING comes at the first run time, because the job has no other.
        renewed = refusal.renewed and not self._submission.one_off
        if self._logged.first_seen(task_name, refusal.token, renewed=renewed):
            logger.warning(
                "Task %r: the run time %s is not run, because %r %s the task (token %s). The task "
                "is locked until %s, and longer if the lock is renewed. What is known of it: %s. "
                "If that run hangs or is dead, free the task: %s",
                task_name,
                self.run_time,
                refusal.holder,
                "has not released" if refusal.waits else "still runs",
                refusal.token,
                refusal.locked_until,
                self._locks.replica.command_line("why", task=task_name),
                self._locks.replica.command_line(
                    "free",
                    "--token",
                    str(refusal.token),
                    # Without `--force`, only a run whose lease has ended can be freed.
                    *([] if refusal.waits else ["--force"]),
                    task=task_name,
                ),
            )

    def warn_of_set_time(self, request: ClaimRequest, refusal: Refusal) -> str | None:
        """Log that the window has refused a run time that the application has set.

        The first one of a job is logged at INFO, the second one at WARNING.

        :return: why it was refused; ``None``: it is no such run time
        """
        if not self._is_of_application(request, refusal):
            return None
        submission, why = self._submission, inside_window(refusal)
        remedy = RUN_NOW % (submission.job.id,) if not submission.one_off else self._remedy
        for level in (logging.INFO, logging.WARNING):
            if self._logged.is_first(f"set, {level}", submission.task_name):
                logger.log(
                    level,
                    "Task %r: refused the run time %s, which modify_job or add_job has set: %s. %s",
                    submission.task_name,
                    self.run_time,
                    why,
                    remedy,
                )
                break
        return f"modify_job or add_job has set it, and {why}"

    def _is_of_application(self, request: ClaimRequest, refusal: Refusal) -> bool:
        """Return whether the window has refused a run time that the application has set.

        Such a run time is no run time of the job's trigger. The application has given it to
        ``modify_job`` or ``add_job`` as ``next_run_time``, and nothing runs for it.
        """
        submission = self._submission
        is_of_window = refusal.reason in ("window", "running") and not refusal.blocked
        if not is_of_window or request.exact or submission.is_standby:
            return False
        assert request.run_time is not None
        previous = submission.previous
        if previous is None and not self._is_own(refusal):
            after = abs((request.run_time - refusal.window_start).total_seconds())
            if after <= AT_START:
                return False  # because each replica adds the job with this run time at its start
        # A new trigger leaves the next run time of the trigger before it.
        triggers = [submission.trigger, *(previous or ())[:1]]
        last = None if previous is None else previous[1]
        try:
            return not any(may_give(trigger, request.run_time, last) for trigger in triggers)
        except EndlessTriggerError:
            return False

    def _warn_if_nobody_runs_it(self, request: ClaimRequest, refusal: Refusal) -> None:
        """Warn if a run time is not run because it falls into the window of an earlier run time."""
        assert request.run_time is not None
        if refusal.reason != "window" or refusal.window_start >= request.run_time:
            return
        if not request.exact:
            return
        level = logging.WARNING
        if self._submission.one_off and not self._is_own(refusal):
            if (request.run_time - refusal.window_start).total_seconds() <= TOGETHER:
                return  # because another replica has most likely added the same job
            level = logging.INFO
        if self._logged.is_first("window", self._submission.task_name):
            logger.log(
                level,
                "Task %r: skipped the run time %s, because it falls into the window of the run "
                "time %s, which ends at %s. %s",
                self._submission.task_name,
                self.run_time,
                refusal.window_start,
                refusal.locked_until,
                self._remedy,
            )

    def _warn_of_another_function(self, request: ClaimRequest, refusal: Refusal) -> None:
        """Warn at the second refusal because of a run of another function.

        The first such refusal may be due to a deployment that renames the function.
        """
        other, own = _function(refusal.runs), _function(request.runs)
        task_name, blocked = self._submission.task_name, self._logged
        if not other or other == own or blocked.is_first("another function", task_name):
            return
        if blocked.is_first("another function, again", task_name):
            logger.warning(
                "Task %r: it runs %s here, and is refused because of runs of %s, on %r. Both jobs "
                "have this task's name, and so one lock. Give one of the jobs another id or name, "
                "or give the executors of each application a namespace of their own",
                task_name,
                own,
                other,
                refusal.holder,
            )

    def _is_own(self, refusal: Refusal) -> bool:
        """Return whether this replica has claimed the run because of which a claim was refused."""
        return self._locks.settings.replica_id == refusal.holder

    @property
    def _remedy(self) -> str:
        """The advice, for a log line, if a run time falls into an earlier window."""
        submission = self._submission
        assert submission.options is not None
        if not submission.one_off:
            run = self._locks.replica.command_line("run", task=submission.task_name)
            return (
                "Give a job that was modified or rescheduled a shorter minimum lock. To run the "
                f"job now in spite of that window: {run}"
            )
        # No manual run is offered, because no replica has the job any more.
        if submission.options.name:
            return "Give the job another name, or a shorter min_lock"
        has_id = submission.task_name.endswith(submission.job.id)
        return f"Give the job {'another id' if has_id else 'an id'}, or a shorter min_lock"


def _function(runs: str) -> str:
    """Return the function in a row's ``runs``, without the date of a one-off job."""
    return runs.partition(" at ")[0]
