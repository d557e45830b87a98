"""Manual runs that the application asks for on a replica, by ``TaskLockExecutor.run_now``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED
from apscheduler.triggers.date import DateTrigger

from apscheduler_tasklock._application import call_application
from apscheduler_tasklock._database.sequences import Statement, Statements
from apscheduler_tasklock._lock.operations import Operations, check_lengths, operator_here
from apscheduler_tasklock._lock.user import ReplicaUser, user_or_stand_in
from apscheduler_tasklock._runs.adapter import SchedulerAdapter, is_in_listener
from apscheduler_tasklock._runs.executor_jobs import ExecutorJobs
from apscheduler_tasklock._runs.job_functions import function_reference
from apscheduler_tasklock._runs.known_tasks import KnownTasks
from apscheduler_tasklock._runs.registration import send_registrations
from apscheduler_tasklock._runs.run import JobKey
from apscheduler_tasklock._runs.tasks import ResolvedTask
from apscheduler_tasklock._runs.watch import Watch
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import (
    TaskLockError,
    TaskLockNotFoundError,
    TaskLockOptionError,
    TaskLockStateError,
)
from apscheduler_tasklock.status import RunRequest

logger = logger_of(__name__)

# The seconds after which a manual run is not begun any more.
EXPIRES = 3600.0


@dataclass(frozen=True)
class _ManualRun:
    """What a caller asks for.

    :ivar by: who asks, shown to operators
    :ivar request_id: the id of the request, unless another request is open
    """

    job_id: str
    jobstore: str | None
    by: str
    request_id: UUID


class ManualRuns:
    """Asks for manual runs of this replica's jobs, and begins them here. Any thread may call it.

    :param user: the executor as a user of its replica
    :param scheduler: the scheduler of the jobs
    :param jobs: the jobs of the executor
    :param known: the tasks of this replica
    :param watch: begins manual runs
    :param know: notes that this replica has a job, so that looks read its task's row
    """

    def __init__(
        self,
        user: ReplicaUser,
        scheduler: SchedulerAdapter,
        jobs: ExecutorJobs,
        known: KnownTasks,
        watch: Watch,
        know: Callable[[Any, str, ResolvedTask], None],
    ) -> None:
        self._user = user
        self._scheduler = scheduler
        self._jobs = jobs
        self._known = known
        self._watch = watch
        self._know = know

    def ask(self, job_id: str, jobstore: str | None, by: str | None) -> RunRequest:
        """Ask for a manual run, and wait for the answer; see ``TaskLockExecutor.run_now``."""
        if not _has_loop():
            asked = self._asked(job_id, jobstore, by)
            return user_or_stand_in(self._user).database.ask_all(
                self._statements(asked), goes_first=True
            )
        if not is_in_listener():
            raise TaskLockStateError(
                f"run_now({job_id!r}) would block the event loop that runs in this thread",
                remedy=f"use `await executor.run_now_async({job_id!r})`",
            )
        # A listener cannot wait, and its errors would only be in APScheduler's log.
        asked = _ManualRun(job_id, jobstore, by or operator_here(), uuid4())
        self._begin(lambda: self._asked(job_id, jobstore, by, asked.request_id)).add_done_callback(
            partial(_warn_of_error, job_id)
        )
        return self._expected(asked)

    async def ask_async(self, job_id: str, jobstore: str | None, by: str | None) -> RunRequest:
        """Do the same as :meth:`ask` in a coroutine."""
        return await asyncio.wrap_future(self._begin(lambda: self._asked(job_id, jobstore, by)))

    def _begin(self, asked: Callable[[], _ManualRun]) -> Future[RunRequest]:
        """Ask for a manual run. Does not wait: the application's thread calls the job store."""
        future: Future[RunRequest] = Future()
        future.set_running_or_notify_cancel()  # so that a cancelled coroutine does not cancel it

        def statements() -> Statements[None]:
            try:
                request = yield from self._statements(asked())
            except BaseException as error:  # noqa: BLE001  # the waiter gets any error
                future.set_exception(error)
            else:
                future.set_result(request)

        user_or_stand_in(self._user).database.begin_all(
            statements(), call_application, lambda: None
        )
        return future

    def _asked(
        self, job_id: str, jobstore: str | None, by: str | None, request_id: UUID | None = None
    ) -> _ManualRun:
        check_lengths("run_now()", by=by)
        return _ManualRun(job_id, jobstore, by or operator_here(), request_id or uuid4())

    def _expected(self, asked: _ManualRun) -> RunRequest:
        """Return the request as it will be written, unless another request is open."""
        names = [
            self._known.name_of(key)
            for key in self._known.job_keys()
            if key[0] == asked.job_id and asked.jobstore in (None, key[1])
        ]
        name = next(filter(None, names), asked.job_id)
        now = datetime.now(timezone.utc)
        until = now + timedelta(seconds=EXPIRES)
        return RunRequest(asked.request_id, name, 0, asked.by, now, until)

    def _statements(self, asked: _ManualRun) -> Statements[RunRequest]:
        """Register the job's task if it has no row, write the request, and begin the run here.

        :raises TaskLockError: the job cannot have a manual run
        """
        found = self._find(asked)
        if found is None:  # another replica may have the job
            name = self._jobs.name_without_job(asked.job_id, asked.jobstore or "default")
            request: RunRequest = yield self._requesting(asked, name, is_here=False)
            return request
        key, task, is_here = found
        # Noted before the request is written, so that no end of a run is overlooked after which the
        # manual run can begin.
        self._watch.expect_manual(task.name)
        requesting = self._requesting(asked, task.name, is_here=is_here)
        try:
            request = yield requesting
        except (TaskLockNotFoundError, TaskLockStateError):
            registration = self._jobs.registration(key)
            if registration is None:
                raise
            yield from send_registrations(self._user, [registration])
            request = yield requesting
        # If the begin fails, the next look begins the run.
        with suppress(TaskLockError):
            yield from self._begin_here(key, task.name)
        return request

    def _requesting(self, asked: _ManualRun, task_name: str, *, is_here: bool) -> Statement:
        user = self._user
        operations = Operations(user.table, user.rejections, user.settings.history)
        return lambda cursor: operations.request_run(
            cursor, task_name, asked.by, EXPIRES, action_id=asked.request_id, is_here=is_here
        )

    def _begin_here(self, key: JobKey, task_name: str) -> Statements[None]:
        if self._scheduler.state != STATE_RUNNING:
            self._watch.looks.wake()  # a look that is due in a pause is made right after it
            return
        for state in (yield self._user.database.reading([task_name])):
            self._watch.run_manual(state, [key])

    def _find(self, asked: _ManualRun) -> tuple[JobKey, ResolvedTask, bool] | None:
        """Return a job, its task, and whether its function is available here.

        :return: ``None`` if this replica does not have the job
        :raises TaskLockError: the job cannot have a manual run
        """
        if self._scheduler.state == STATE_STOPPED:
            raise TaskLockStateError(
                f"run_now({asked.job_id!r}) needs the scheduler, which does not run",
                remedy="start it, or use TaskLocks.request_run",
            )
        found = self._scheduler.find(asked.job_id, asked.jobstore)
        if not found:
            return None
        if len(found) > 1:
            stores = " and ".join(repr(alias) for _, alias in found)
            raise TaskLockOptionError(
                f"run_now({asked.job_id!r}): the job stores {stores} have a job with this id; "
                "choose one of them with jobstore=..."
            )
        [(job, jobstore)] = found
        task = self._checked(job, jobstore)
        self._know(job, jobstore, task)
        return (job.id, jobstore), task, getattr(job, "has_function", True)

    def _checked(self, job: Any, jobstore: str) -> ResolvedTask:
        """Return the task of a job that can have a manual run.

        :raises TaskLockError: the job cannot have one
        """
        if not getattr(job, "is_readable", True):
            raise _not_run(job.id, "its row cannot be read")
        what = f"job.func is {function_reference(job)}"
        if not self._scheduler.is_ours(job):
            why = f"it is on the executor {job.executor!r}, and not on this one ({what})"
            raise _not_run(job.id, why, "if that is a TaskLockExecutor, call its run_now")
        task = self._jobs.resolve(job, jobstore)
        if task.options is None:
            why = f"it has no task lock ({what})"
            if task.own_because is not None:
                why = f"it is a one-off job without an id, and {task.own_because} ({what})"
            raise _not_run(job.id, why, "call job.func, which runs the function here")
        if isinstance(job.trigger, DateTrigger):
            why = f"it is a one-off job ({what})"
            raise _not_run(
                job.id, why, "scheduler.modify_job(id, next_run_time=now) moves its only run"
            )
        return task


def _not_run(job_id: str, why: str, remedy: str = "") -> TaskLockStateError:
    return TaskLockStateError(f"job {job_id!r} cannot have a manual run: {why}", remedy=remedy)


def _has_loop() -> bool:
    """Return whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _warn_of_error(job_id: str, future: Future[RunRequest]) -> None:
    error = future.exception()
    if error is not None:
        logger.warning("Job %r: a listener's run_now has failed: %s", job_id, error)
