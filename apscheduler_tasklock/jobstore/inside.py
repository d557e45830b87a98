"""What the job store relies on of APScheduler's inside, all in one module.

``tests/integration/test_jobstore_inside.py`` fails if a version of APScheduler changes it:

- ``_process_jobs`` asks ``get_due_jobs``, then each job's ``_get_run_times``; submits it; asks
  ``job.trigger.get_next_fire_time``; calls ``job._modify(next_run_time=...)`` and ``update_job``;
  and asks ``get_next_run_time`` last. A job that was handed out answers for itself there, so that
  the scheduler changes nothing: the claim moves it on.
- ``_real_add_job`` is called for each job, also for those that were added before the start, and
  gives it a ``next_run_time`` if it has none.
- ``resume_job`` and ``reschedule_job`` compute a ``next_run_time`` and call ``update_job``, under
  ``_jobstores_lock``, which may be taken again by the thread that has it. Of a job of this store,
  ``resume_job`` is done here: its trigger may be one that APScheduler would ask without an end.
- ``modify_job``, which others go through, calls ``job._modify`` with what a user changes, by name.
- ``start()`` calls the stores' ``start``, adds the jobs that were added before, and sets its state
  then. Its parameter is called ``paused``.
- ``scheduler._executors``; an executor's ``_instances``, and ``_pool._max_workers`` if it has one.
- a ``Job``'s attributes, ``_scheduler`` and ``_jobstore_alias``, and that they can be set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from types import FrameType
from typing import Any

from apscheduler.job import Job
from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED, BaseScheduler
from apscheduler.triggers.base import BaseTrigger

from apscheduler_tasklock._lock.jobs import JobRow
from apscheduler_tasklock._lock.messages import HandOut
from apscheduler_tasklock._scheduler.adapter import event_loop_of
from apscheduler_tasklock._values import LONGEST_VALUE, cut

# How many jobs are handed out at a time to an executor without a pool, as that of an event loop.
UNLIMITED_WORKERS = 100
# Seconds after which a scheduler looks that cannot be woken by another thread.
CAPPED_SLEEP = 0.5

# Far from now, and from where Python's times end.
_SOME_DAY = timedelta(days=36500)


class _Handed(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """Stands for the trigger of a job that was handed out, as the scheduler asks it.

    It always has a next run time: else the scheduler would remove the job. A plugin may make the
    job anew of its state, as apscheduler-di does: so the trigger has the job that was handed out.

    :ivar handed_out: the job; ``None`` in a worker process, where nobody asks for it
    """

    __slots__ = ("handed_out",)

    def __init__(self, handed_out: HandedOutJob | None = None) -> None:
        self.handed_out = handed_out

    def __reduce__(self) -> tuple[type[_Handed], tuple[()]]:
        return _Handed, ()

    def get_next_fire_time(self, _previous_fire_time: Any, now: datetime) -> datetime:
        """Return a time that nobody uses."""
        return now + _SOME_DAY


class StoredJob(Job):  # type: ignore[misc]  # APScheduler has no types
    """A job as it was read for a user.

    :ivar row: what was read, with which changes are compared
    :ivar has_function: whether its function was loaded, so that this replica may run it
    :ivar is_readable: whether its row was verified and could be read; else its attributes are
        placeholders
    :ivar changed: the names of the attributes that a user has changed since, without the next run
        time. They are told, and not compared: what a row says can be written in several ways.
    """

    # No slots of its own: users read the names of a job's attributes from ``__slots__``.
    row: JobRow
    has_function: bool
    is_readable: bool
    changed: frozenset[str]

    def __str__(self) -> str:
        """Return what APScheduler shows of it, cut."""
        return cut(super().__str__())

    @property
    def has_ended(self) -> bool:
        """Whether its last run time was claimed."""
        return self.row.ended

    def _modify(self, **changes: Any) -> None:
        super()._modify(**changes)
        self.changed |= changes.keys() - {"next_run_time"}


class HandedOutJob(Job):  # type: ignore[misc]  # APScheduler has no types
    """A job that was handed out for one run time, as the scheduler gets it.

    :ivar run_time: the run time
    :ivar hand_out: what its claim has to match; ``None`` if it runs without a lock
    :ivar own_trigger: its trigger
    :ivar not_taken: called if its executor does not take it
    """

    # No slots of its own either.
    run_time: datetime
    hand_out: HandOut | None
    own_trigger: Any
    not_taken: Callable[[], None]

    def _get_run_times(self, _now: datetime) -> list[datetime]:
        """Return the run time, which is due by the database's clock."""
        return [self.run_time]

    def __str__(self) -> str:
        """Return what APScheduler's log lines call it."""
        if not hasattr(self, "own_trigger"):  # a copy in a worker process
            return str(self.name)
        trigger = cut(self.own_trigger, LONGEST_VALUE)  # a row's, with fields of any length
        return f"{self.name} (trigger: {trigger}, run time: {self.run_time})"


class SchedulerInside:
    """A scheduler, as the job store needs it.

    :param scheduler: APScheduler's
    :param alias: of the job store
    :ivar accepts: tells of an executor, by its alias, whether the job store uses it; else it is as
        if the scheduler did not have it
    :ivar first_run_time: returns the first run time of a job of the job store from a time on
    """

    def __init__(self, scheduler: Any, alias: str) -> None:
        self.accepts: Callable[[str, Any], bool] = lambda _alias, _executor: True
        self.first_run_time: Callable[[Any, datetime], datetime | None] = lambda job, now: (
            job.trigger.get_next_fire_time(None, now)
        )
        self._scheduler = scheduler
        self._alias = alias
        # Its timers can be set by their own thread only, so another thread cannot wake it.
        self._is_qt = any(kind.__name__ == "QtScheduler" for kind in type(scheduler).__mro__)
        self._adds: Callable[..., Any] = scheduler._real_add_job
        self._added: Any = None  # the job that is being added
        self._given: frozenset[str] = frozenset()  # which of these attributes it came with
        self._computes = False  # whether a job gets a next run time, as it is resumed
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
        """Leave the scheduler as it was."""
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
        """Do what APScheduler's ``resume_job`` does, but ask the trigger of our jobs in bounds."""
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
        """Tell whether the scheduler is adding a job: by ``add_job``, or at its start."""
        return self._added is job

    def has_explicit_time(self, job: Any) -> bool:
        """Tell whether a job that is being added came with a next run time, ``None`` too."""
        return self._added is job and "next_run_time" in self._given

    def has_computed_time(self, job: Any) -> bool:
        """Tell whether the scheduler has computed a job's next run time, by this machine's clock.

        It does so for a job that is added without one, is resumed, or gets another trigger.
        """
        return (self._added is job and "next_run_time" not in self._given) or self._computes

    def has_default_instances(self, job: Any) -> bool:
        """Tell whether a job that is being added has the scheduler's default ``max_instances``."""
        return self._added is job and "max_instances" not in self._given

    @property
    def is_running(self) -> bool:
        """Whether it looks for jobs; not while it is paused."""
        return bool(self._scheduler.state == STATE_RUNNING)

    @property
    def runs_jobs(self) -> bool:
        """Whether it looks for jobs, or will do so when it has started.

        While it starts its state is that of a stopped one. Whether it is to start paused, only its
        ``start()`` knows, which calls the job store.
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
        """Whether its event loop was closed without a shutdown: it will never run a job again."""
        loop = event_loop_of(self._scheduler)
        return loop is not None and bool(loop.is_closed())

    @property
    def timezone(self) -> Any:
        """Its time zone."""
        return self._scheduler.timezone

    @property
    def executors(self) -> Mapping[str, Any]:
        """Its executors that are accepted, by alias."""
        executors = dict(self._scheduler._executors)
        return {alias: each for alias, each in executors.items() if self.accepts(alias, each)}

    def executor(self, alias: str) -> Any:
        """Return an executor, whether it is accepted or not; ``None`` if it is not here."""
        return self._scheduler._executors.get(alias)

    @property
    def other_stores(self) -> list[Any]:
        """Its job stores under other aliases."""
        stores = list(self._scheduler._jobstores.items())
        return [store for alias, store in stores if alias != self._alias]

    def wake(self) -> None:
        """Let it look for jobs now, unless it does so by itself."""
        if self._is_qt:
            return
        try:
            self._scheduler.wakeup()
        except RuntimeError:
            if not self.is_abandoned:  # its loop was closed in this moment
                raise

    def next_look(self, *, has_ready: bool) -> datetime | None:
        """Return when it is to look again by itself; ``None``: when it is woken."""
        now = datetime.now(timezone.utc)
        if has_ready:
            return now
        return now + timedelta(seconds=CAPPED_SLEEP) if self._is_qt else None

    def add_listener(self, listener: Callable[[Any], None], codes: int) -> None:
        """Let this be called on events."""
        self._scheduler.add_listener(listener, codes)

    def remove_listener(self, listener: Callable[[Any], None]) -> None:
        """Let it be called no more."""
        self._scheduler.remove_listener(listener)

    def make_stored(
        self, attributes: Mapping[str, Any], row: JobRow, *, has_function: bool, is_readable: bool
    ) -> StoredJob:
        """Return a job as it is shown to users."""
        job: StoredJob = self._make(StoredJob, attributes)
        job.row, job.has_function, job.is_readable = row, has_function, is_readable
        job.changed = frozenset()
        return job

    def make_handed_out(
        self,
        attributes: Mapping[str, Any],
        run_time: datetime,
        hand_out: HandOut | None,
        not_taken: Callable[[], None],
    ) -> HandedOutJob:
        """Return a job as the scheduler gets it to run it."""
        job: HandedOutJob = self._make(HandedOutJob, {**attributes, "next_run_time": run_time})
        job.trigger = _Handed(job)
        job.own_trigger = attributes["trigger"]
        job.run_time, job.hand_out, job.not_taken = run_time, hand_out, not_taken
        return job

    def _make(self, kind: Any, attributes: Mapping[str, Any]) -> Any:
        job = object.__new__(kind)
        for name, value in attributes.items():
            setattr(job, name, value)
        job._scheduler, job._jobstore_alias = self._scheduler, self._alias
        return job


def running_jobs(executor: Any) -> set[str]:
    """Return the ids of the jobs that an executor runs, or has queued."""
    return {job_id for job_id, count in list(executor._instances.items()) if count > 0}


def free_workers(executor: Any) -> int:
    """Return how many workers of an executor neither run anything nor have anything queued."""
    inner = getattr(executor, "inner", executor)
    workers = getattr(getattr(inner, "_pool", None), "_max_workers", UNLIMITED_WORKERS)
    return int(workers) - int(sum(executor._instances.values()))
