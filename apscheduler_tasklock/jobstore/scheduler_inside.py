"""The parts of APScheduler's inside that the job store relies on, all in one module.

``tests/integration/store/test_jobstore_inside.py`` fails if a version of APScheduler changes them:

- ``_process_jobs`` calls ``get_due_jobs``, and at its end ``get_next_run_time``. It gets no jobs
  and changes none, because a thread of the job store reads due jobs.
- ``_real_add_job`` is called for each job, also for jobs that were added before the start. It gives
  the job a ``next_run_time`` if the job has none.
- ``resume_job`` and ``reschedule_job`` compute a ``next_run_time`` and call ``update_job``, under
  ``_jobstores_lock``, which is reentrant. This module replaces ``resume_job`` for jobs of the job
  store, because APScheduler could loop for ever on their triggers.
- ``modify_job``, which these two methods use, calls ``job._modify`` with the changed attributes.
- ``start()`` calls the job stores' ``start``, adds the jobs that users have added before the start,
  and only after that sets the scheduler's state. Its parameter is called ``paused``.
- ``scheduler._executors``.
- the attributes ``_scheduler`` and ``_jobstore_alias`` of a ``Job``, which can be set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from types import FrameType
from typing import Any

from apscheduler.job import Job
from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED, BaseScheduler

from apscheduler_tasklock._lock.job_rows import JobRow
from apscheduler_tasklock._runs.adapter import event_loop_of
from apscheduler_tasklock._values import cut


class StoredJob(Job):  # type: ignore[misc]  # APScheduler has no types
    """A job as it was read for a user.

    :ivar row: the row that was read
    :ivar has_function: whether its function was loaded, so that this replica can run the job
    :ivar is_readable: whether its row was verified and read. If not, the attributes are
        placeholders.
    :ivar changed: the names of the attributes that a user has changed since the read, without the
        next run time. Names are recorded, because one value can be encoded in several ways.
    """

    # This class has no __slots__, because users read a job's attributes from Job.__slots__.
    row: JobRow
    has_function: bool
    is_readable: bool
    changed: frozenset[str]

    def __str__(self) -> str:
        """Return APScheduler's text of the job, cut."""
        return cut(super().__str__())

    @property
    def has_ended(self) -> bool:
        """Whether the job's last run time was claimed."""
        return self.row.ended

    def token_of(self, task_name: str) -> int | None:
        """Return the token in the row of its task when it was read; see ``Registration.token``."""
        return self.row.token if self.row.task_name == task_name else None

    def _modify(self, **changes: Any) -> None:
        super()._modify(**changes)
        self.changed |= changes.keys() - {"next_run_time"}


class DueJob(Job):  # type: ignore[misc]  # APScheduler has no types
    """A due job, as executors get it for one run time."""

    def __str__(self) -> str:
        """Return APScheduler's text of the job, cut, for its log lines."""
        return cut(super().__str__())


class SchedulerInside:
    """The scheduler, as the job store uses it.

    :param scheduler: APScheduler's scheduler
    :param alias: the alias of the job store
    :ivar accepts: returns whether the job store uses an executor; called with alias and executor
    :ivar first_run_time: returns a stored job's first run time from a moment on
    """

    def __init__(self, scheduler: Any, alias: str) -> None:
        self.accepts: Callable[[str, Any], bool] = lambda _alias, _executor: True
        self.first_run_time: Callable[[Any, datetime], datetime | None] = lambda job, now: (
            job.trigger.get_next_fire_time(None, now)
        )
        self._scheduler = scheduler
        self._alias = alias
        self._adds: Callable[..., Any] = scheduler._real_add_job
        self._added: Any = None  # the job that is being added
        # Which of `next_run_time` and `max_instances` the added job had, before the scheduler
        # added its defaults.
        self._given: frozenset[str] = frozenset()
        self._computes = False  # whether a job is being resumed or rescheduled
        self._resumes: Callable[..., Any] = scheduler.resume_job
        self._reschedules: Callable[..., Any] = scheduler.reschedule_job
        self._instead: Mapping[str, Callable[..., Any]] = {
            "_real_add_job": self._note_and_add,
            "resume_job": self._note_and_resume,
            "reschedule_job": self._note_and_reschedule,
        }
        for name, method in self._instead.items():
            setattr(scheduler, name, method)

    def leave(self) -> None:
        """Restore the scheduler's own methods."""
        for name, method in self._instead.items():
            if vars(self._scheduler).get(name) == method:
                delattr(self._scheduler, name)

    def _note_and_add(self, job: Any, *arguments: Any, **named: Any) -> Any:
        self._added = job
        self._given = frozenset(
            name for name in ("next_run_time", "max_instances") if hasattr(job, name)
        )
        try:
            return self._adds(job, *arguments, **named)
        finally:
            self._added = None

    def _note_and_resume(self, job_id: Any, jobstore: Any = None) -> Any:
        return self._note_and_compute(self._resume, job_id, jobstore)

    def _resume(self, job_id: Any, jobstore: Any) -> Any:
        """Resume a job as APScheduler does, but limit the steps of a stored job's trigger."""
        job = self._scheduler.get_job(job_id, jobstore)
        if not isinstance(job, StoredJob) or job._jobstore_alias != self._alias:
            return self._resumes(job_id, jobstore)
        next_run_time = self.first_run_time(job, datetime.now(self.timezone))
        if next_run_time is None:
            return self._scheduler.remove_job(job_id, self._alias)
        return self._scheduler.modify_job(job_id, self._alias, next_run_time=next_run_time)

    def _note_and_reschedule(self, *arguments: Any, **named: Any) -> Any:
        return self._note_and_compute(self._reschedules, *arguments, **named)

    def _note_and_compute(self, change: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self._scheduler._jobstores_lock:
            self._computes = True
            try:
                return change(*arguments, **named)
            finally:
                self._computes = False

    def is_adding(self, job: Any) -> bool:
        """Return whether the scheduler is adding a job: by ``add_job``, or at its start."""
        return self._added is job

    def has_explicit_time(self, job: Any) -> bool:
        """Return whether a job that is being added was given a next run time, also ``None``."""
        return self._added is job and "next_run_time" in self._given

    def has_computed_time(self, job: Any) -> bool:
        """Return whether the scheduler has computed a job's next run time, by this machine's clock.

        It computes the time for a job that is added without a next run time, is resumed, or gets
        another trigger.
        """
        return (self._added is job and "next_run_time" not in self._given) or self._computes

    def has_default_instances(self, job: Any) -> bool:
        """Return whether a job that is being added has the default ``max_instances``."""
        return self._added is job and "max_instances" not in self._given

    @property
    def is_running(self) -> bool:
        """Whether the scheduler runs and is not paused."""
        return bool(self._scheduler.state == STATE_RUNNING)

    @property
    def runs_jobs(self) -> bool:
        """Whether the scheduler runs jobs, or will run jobs when its start is complete.

        While a scheduler starts, its state is still that of a stopped scheduler. Only its
        ``start()`` knows whether it starts paused. So the argument ``paused`` is read from the
        frame of ``start()``, which is among the callers of the job store.
        """
        if self._scheduler.state != STATE_STOPPED:
            return self.is_running
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is BaseScheduler.start.__code__:
                return not frame.f_locals["paused"]
            frame = frame.f_back
        return True

    @property
    def is_abandoned(self) -> bool:
        """Whether the scheduler's event loop was closed, so that it never runs a job again."""
        loop = event_loop_of(self._scheduler)
        return loop is not None and bool(loop.is_closed())

    @property
    def timezone(self) -> Any:
        """The scheduler's time zone."""
        return self._scheduler.timezone

    @property
    def executors(self) -> Mapping[str, Any]:
        """The executors that the job store uses, by alias."""
        executors = dict(self._scheduler._executors)
        return {alias: each for alias, each in executors.items() if self.accepts(alias, each)}

    @property
    def stored_runs(self) -> Mapping[str, Any]:
        """What begins this store's runs on these executors, by their aliases."""
        return {alias: each.stored for alias, each in self.executors.items()}

    def executor(self, alias: str) -> Any:
        """Return the scheduler's executor of an alias, also one that the job store does not use."""
        return self._scheduler._executors.get(alias)

    @property
    def other_stores(self) -> list[Any]:
        """The scheduler's job stores under other aliases."""
        stores = list(self._scheduler._jobstores.items())
        return [store for alias, store in stores if alias != self._alias]

    def add_listener(self, listener: Callable[[Any], None], codes: int) -> None:
        """Add a listener for events."""
        self._scheduler.add_listener(listener, codes)

    def remove_listener(self, listener: Callable[[Any], None]) -> None:
        """Remove a listener."""
        self._scheduler.remove_listener(listener)

    def make_stored(
        self, attributes: Mapping[str, Any], row: JobRow, *, has_function: bool, is_readable: bool
    ) -> StoredJob:
        """Return a job for users."""
        job: StoredJob = self._make(StoredJob, attributes)
        job.row, job.has_function, job.is_readable = row, has_function, is_readable
        job.changed = frozenset()
        return job

    def make_due(self, attributes: Mapping[str, Any], run_time: datetime) -> DueJob:
        """Return a job for one due run time."""
        job: DueJob = self._make(DueJob, {**attributes, "next_run_time": run_time})
        return job

    def _make(self, kind: Any, attributes: Mapping[str, Any]) -> Any:
        job = object.__new__(kind)
        for name, value in attributes.items():
            setattr(job, name, value)
        job._scheduler, job._jobstore_alias = self._scheduler, self._alias
        return job
