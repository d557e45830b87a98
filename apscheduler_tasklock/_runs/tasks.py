"""Tasks: the task name and the lock options of each job, from all places that give options."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from apscheduler.triggers.date import DateTrigger
from apscheduler.util import iscoroutinefunction_partial

from apscheduler_tasklock._runs.adapter import is_shared_store
from apscheduler_tasklock._runs.job_functions import function_reference
from apscheduler_tasklock._runs.task_names import UnnamedTask, is_unnamed, reject_duplicate_unnamed
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.decorator import function_options
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.options import (
    DEFAULTS,
    RESERVED_KEY,
    LockOptions,
    check_name,
    parse_choice,
    parse_job_options,
    resolve,
)

logger = logger_of(__name__)


@dataclass(frozen=True)
class ResolvedTask:
    """The task of a job.

    :ivar name: the task's name; for a job without a lock, the job's id
    :ivar options: the job's lock options, or ``None`` if the job has no lock
    :ivar own_because: for a one-off job that no other replica can have, the reason. Such a job has
        no lock. ``None`` for any other job.
    """

    name: str
    options: LockOptions | None
    own_because: str | None = None


class Tasks:
    """Finds the task name and the lock options of a scheduler's jobs.

    :param defaults: options of the executor, each used if no other place gives that option
    :param jobs: options by job id
    :param namespace: put before every task name
    :param where: names the owner of the options in messages
    :param lock: ``"all"``: every job has a lock, unless a place gives ``False``; ``"marked"``: only
        jobs for which a place gives options have one, and stored jobs
    :raises TaskLockOptionError: ``lock`` is something else, or options of ``jobs`` are unknown or
        impossible
    """

    def __init__(
        self,
        defaults: LockOptions,
        jobs: Mapping[str, Any],
        namespace: str,
        where: str,
        lock: str = "all",
    ) -> None:
        self._only_marked = parse_choice(lock, "lock", where, ("all", "marked")) == "marked"
        self._defaults = defaults
        self._jobs = {
            job_id: parse_job_options(options, f"{where}, jobs[{job_id!r}]")
            for job_id, options in jobs.items()
        }
        self.namespace = namespace
        self._unnamed = _UnnamedJobs()
        self._logged_without_effect: set[str] = set()  # references of functions

    @property
    def job_ids(self) -> set[str]:
        """The ids of the jobs that have options here."""
        return set(self._jobs)

    def resolve(self, job: Any, jobstore: str, jobstores: Mapping[str, Any]) -> ResolvedTask:
        """Return a job's task: its name and its lock options.

        :param jobstore: alias of the job's store
        :param jobstores: the scheduler's stores, by alias
        :raises TaskLockOptionError: the job's options or its task's name are impossible
        """
        store = jobstores.get(jobstore)
        options = self._options(job, store)
        if options is False:
            return ResolvedTask(job.id, None)
        if options.cancel_on_lost and not iscoroutinefunction_partial(job.func):
            raise TaskLockOptionError(
                f"job {job.id!r}: cancel_on_lost is for coroutine functions, and its function is "
                "none; let the function check current_lock().lost instead"
            )
        where = f"job {job.id!r}"
        if options.name:
            return ResolvedTask(check_name(self.namespace + options.name, where), options)
        prefix = self._prefix(jobstore)
        if not is_unnamed(job, store):
            return ResolvedTask(check_name(f"{prefix}{job.id}", where), options)
        unnamed = self._unnamed.named(job, store)
        if unnamed.task.own_because is not None:
            self._warn_without_effect(job, unnamed.task.own_because)
            return ResolvedTask(job.id, None, unnamed.task.own_because)
        name = check_name(f"{prefix}{unnamed.task.name}", where)
        unnamed.warn_once(job, name)
        return ResolvedTask(name, options)

    def name_without_job(self, job_id: str, jobstore: str) -> str:
        """Return the task name of a job with an id that this replica does not have.

        :raises TaskLockOptionError: the name is impossible
        """
        where, options = f"job {job_id!r}", self._jobs.get(job_id)
        if options and options.name:
            return check_name(self.namespace + options.name, where)
        return check_name(f"{self._prefix(jobstore)}{check_name(job_id, where)}", where)

    def _prefix(self, jobstore: str) -> str:
        # The name has the store's alias, because two job stores may have jobs with the same id.
        return self.namespace if jobstore == "default" else f"{self.namespace}{jobstore}:"

    def _options(self, job: Any, store: Any) -> LockOptions | Literal[False]:
        own, where = self._own_options(job), f"job {job.id!r}"
        if own == (None, None, None):
            # A stored job always has a lock, because all replicas read its one row, and only the
            # replica that is granted the lock moves that row to the next run time.
            if self._only_marked and not is_shared_store(store):
                return False
            return self._defaults
        options = resolve(*own, self._defaults, where=where)
        if options is not False and not isinstance(job.trigger, DateTrigger):
            options.check_default_minimum(where)
        return options

    def places(self, job: Any) -> dict[str, str]:
        """Return where each option that a job has is set: the name of the place, by option."""
        where = f"job {job.id!r}"
        own = zip(("job", "jobs", "function"), self._own_options(job), strict=True)
        places = {
            name: "default"
            if getattr(self._defaults, name) == getattr(DEFAULTS, name)
            else "executor"
            for name in self._defaults.given
        }
        for place, options in reversed(list(own)):
            parsed = parse_job_options(options, where) if options else None
            if parsed:
                places |= dict.fromkeys(parsed.given, place)
        return places

    def _own_options(self, job: Any) -> tuple[Any, Any, Any]:
        """Return the options that each place gives for a job, from the strongest to the weakest.

        The places are the job's kwargs, the option ``jobs`` and the function's decorator.
        """
        return job.kwargs.get(RESERVED_KEY), self._jobs.get(job.id), function_options(job.func)

    def _warn_without_effect(self, job: Any, own_because: str) -> None:
        """Warn, once for each function, if a job that runs without a lock has lock options.

        :raises TaskLockOptionError: the job's own options have retries
        """
        reference, where = function_reference(job), f"job {job.id!r}"
        given = [parse_job_options(each, where) for each in self._own_options(job) if each]
        options = sorted({name for each in given if each for name in each.given})
        # The function's options are for all of its jobs, so that retries there are no mistake in
        # this job.
        own = parse_job_options(job.kwargs.get(RESERVED_KEY) or {}, where)
        if own and own.retries:
            raise TaskLockOptionError(
                f"{where}: its retries need a lock, and it has none: it is a one-off job that was "
                f"added without an id (32 hexadecimal digits count as none), and {own_because}. "
                "Give it an id in add_job(..., id=...), or the option 'name'"
            )
        if not options or reference in self._logged_without_effect:
            return
        self._logged_without_effect.add(reference)
        logger.warning(
            "Job %s: its lock options (%s) have no effect, because it runs here without a lock. It "
            "is a one-off job that was added without an id (32 hexadecimal digits count as none), "
            "and %s. Give it an id in add_job(..., id=...), or the option 'name'",
            job.id,
            ", ".join(options),
            own_because,
        )


class _UnnamedJob:
    """A job that was added without an id, with the parts that it had when its task was named.

    :ivar identity: ``id()`` of the job
    :ivar task: the task's name, and how it was made
    """

    def __init__(self, job: Any, on_dropped: Callable[[_UnnamedJob], None]) -> None:
        self._parts = _parts(job)

        def drop(_: Any) -> None:
            self._parts = ()
            on_dropped(self)

        # Weak, so that a job and its arguments are not kept alive after its store has dropped it.
        self._job = weakref.ref(job, drop)
        self._is_warned = False
        self.identity = id(job)
        self.task = UnnamedTask.of(job)

    def is_current(self, job: Any) -> bool:
        """Return whether the job still has the same parts.

        Parts are compared by identity, because APScheduler changes a job by replacing its parts.
        """
        return all(part is now for part, now in zip(self._parts, _parts(job), strict=True))

    def job_in(self, store: Any) -> Any:
        """Return the job; ``None`` if it has changed, or is not in this store any more."""
        job = self._job()
        if job is None or not self.is_current(job) or store.lookup_job(job.id) is not job:
            return None
        return job

    def warn_once(self, job: Any, name: str) -> None:
        """Warn, once, that a recurring job's task gets another name if the job's parts change."""
        if self._is_warned or self.task.is_one_off:
            return
        self._is_warned = True
        made_of = ", trigger and arguments" if self.task.has_arguments else " and trigger"
        logger.warning(
            "Job %s was added without an id (32 hexadecimal digits count as none), so its task is "
            "named after its function%s: %s. Give it an id in add_job(..., id=...), or the option "
            "'name', to keep the name when these change",
            job.id,
            made_of,
            name,
        )

    def warn_of_twin(self, job: Any, twin: tuple[_UnnamedJob, Any]) -> None:
        """Warn, once, that a one-off job is the same as another one-off job.

        :param twin: the other job: as it is noted here, and the job itself
        """
        other, other_job = twin
        if self._is_warned or other._is_warned:
            return
        self._is_warned = other._is_warned = True
        logger.warning(
            "Jobs %s and %s were added without an id (32 hexadecimal digits count as none) and are "
            "the same one-off job: both call %s at %s with the same arguments, so that one of them "
            "runs, on one replica. Give each an id in add_job(..., id=...) if both are to run",
            job.id,
            other_job.id,
            function_reference(job),
            job.trigger.run_date,
        )


class _UnnamedJobs:
    """The jobs without an id, whose tasks are named after function, trigger and arguments.

    A job is noted here when it is added or modified, and at each of its run times. So jobs whose
    tasks get the same name are found without reading the job stores.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[int, _UnnamedJob] = {}  # by `id()` of the job
        self._sharing: dict[str, set[_UnnamedJob]] = {}  # by the task's name
        # A job may be dropped in any thread, even in the thread that holds `_lock`. So a dropped
        # job is only added to this queue, and `named` removes the job.
        self._dropped: deque[_UnnamedJob] = deque()

    def named(self, job: Any, store: Any) -> _UnnamedJob:
        """Return the job with its task's name. The name is computed anew only after a change.

        :param store: the job's store, in which another job with the same name is searched for
        :raises TaskLockOptionError: another recurring job in the store has a task of this name
        """
        with self._lock:
            while self._dropped:
                self._remove(self._dropped.popleft())
            unnamed = self._jobs.get(id(job))
            if unnamed is None or not unnamed.is_current(job):
                if unnamed is not None:
                    self._remove(unnamed)
                unnamed = _UnnamedJob(job, self._dropped.append)
                self._jobs[unnamed.identity] = unnamed
                self._sharing.setdefault(unnamed.task.name, set()).add(unnamed)
            if unnamed.task.own_because is None:
                self._look_for_duplicate(job, unnamed, store)
        return unnamed

    def _remove(self, unnamed: _UnnamedJob) -> None:
        if self._jobs.get(unnamed.identity) is unnamed:
            del self._jobs[unnamed.identity]
        sharing = self._sharing.get(unnamed.task.name, set())
        sharing.discard(unnamed)
        if not sharing:
            self._sharing.pop(unnamed.task.name, None)

    def _look_for_duplicate(self, job: Any, unnamed: _UnnamedJob, store: Any) -> None:
        sharing = self._sharing[unnamed.task.name]
        others = ((other, other.job_in(store)) for other in sharing if other is not unnamed)
        found = next((pair for pair in others if pair[1] is not None), None)
        if found is None:
            return
        if not unnamed.task.is_one_off:
            reject_duplicate_unnamed(job, found[1], unnamed.task)
        unnamed.warn_of_twin(job, found)


def _parts(job: Any) -> tuple[Any, ...]:
    """Return the parts of a job that make up its task's name, and the job's executor."""
    return job.func, job.trigger, job.args, job.kwargs, job.executor
