"""Which task a job is, and under what options: what its kwargs, its function and others say."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from apscheduler.triggers.date import DateTrigger
from apscheduler.util import iscoroutinefunction_partial

from apscheduler_tasklock._scheduler.functions import function_reference
from apscheduler_tasklock._scheduler.names import UnnamedTask, is_unnamed, reject_duplicate_unnamed
from apscheduler_tasklock._scheduler.submission import trigger_of
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.decorator import function_options
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.options import (
    RESERVED_KEY,
    LockOptions,
    check_name,
    parse_job_options,
    resolve,
)

logger = logger_of(__name__)


@dataclass(frozen=True)
class ResolvedTask:
    """The task that a job is.

    :ivar name: the task's name; of a job without a lock, its id
    :ivar options: its lock options, or ``None`` if it has no lock
    :ivar own_because: why it is a one-off job of this replica alone, which has no lock
    """

    name: str
    options: LockOptions | None
    own_because: str | None = None


class Tasks:
    """Finds the task name and the lock options of a scheduler's jobs.

    :param defaults: options of the executor, the weakest
    :param jobs: options by job id
    :param namespace: put before every name
    :param where: whose options these are, for messages
    :raises TaskLockOptionError: options of ``jobs`` are unknown or impossible
    """

    def __init__(
        self, defaults: LockOptions, jobs: Mapping[str, Any], namespace: str, where: str
    ) -> None:
        self._defaults = defaults
        self._jobs = {
            job_id: parse_job_options(options, f"{where}, jobs[{job_id!r}]")
            for job_id, options in jobs.items()
        }
        self._namespace = namespace
        self._unnamed = _UnnamedJobs()
        self._told_without_effect: set[str] = set()  # references of functions

    @property
    def job_ids(self) -> set[str]:
        """The ids of the jobs that have options here."""
        return set(self._jobs)

    def resolve(self, job: Any, jobstore: str, jobstores: Mapping[str, Any]) -> ResolvedTask:
        """Return a job's task: its name and its lock options.

        :param jobstore: alias of the job's store
        :param jobstores: the scheduler's stores, by alias
        :raises TaskLockOptionError: its options or its name are impossible
        """
        options = self._options(job)
        if options is False:
            return ResolvedTask(job.id, None)
        if options.cancel_on_lost and not iscoroutinefunction_partial(job.func):
            raise TaskLockOptionError(
                f"job {job.id!r}: cancel_on_lost is for coroutines, and its function is none; let "
                "it look at current_lock().lost instead"
            )
        where = f"job {job.id!r}"
        if options.name:
            return ResolvedTask(check_name(self._namespace + options.name, where), options)
        # Two job stores may have jobs of one id.
        prefix = self._namespace if jobstore == "default" else f"{self._namespace}{jobstore}:"
        store = jobstores.get(jobstore)
        if not is_unnamed(job, store):
            return ResolvedTask(check_name(f"{prefix}{job.id}", where), options)
        unnamed = self._unnamed.named(job, store)
        if unnamed.task.own_because is not None:
            self._tell_without_effect(job, unnamed.task.own_because)
            return ResolvedTask(job.id, None, unnamed.task.own_because)
        name = check_name(f"{prefix}{unnamed.task.name}", where)
        unnamed.warn_once(job, name)
        return ResolvedTask(name, options)

    def _options(self, job: Any) -> LockOptions | Literal[False]:
        own, where = self._own_options(job), f"job {job.id!r}"
        if own == (None, None, None):
            return self._defaults
        options = resolve(*own, self._defaults, where=where)
        if options is not False and not isinstance(trigger_of(job), DateTrigger):
            options.check_default_minimum(where)
        return options

    def _own_options(self, job: Any) -> tuple[Any, Any, Any]:
        """Return what each place says of a job, from the strongest to the weakest."""
        return job.kwargs.get(RESERVED_KEY), self._jobs.get(job.id), function_options(job.func)

    def _tell_without_effect(self, job: Any, own_because: str) -> None:
        """Warn, once for a function, if a job without a lock was given options of a lock."""
        reference = function_reference(job)
        if reference in self._told_without_effect:
            return
        where = f"job {job.id!r}"
        given = [parse_job_options(each, where) for each in self._own_options(job) if each]
        options = sorted({name for each in given if each for name in each.given})
        if not options:
            return
        self._told_without_effect.add(reference)
        logger.warning(
            "Job %s: its lock options (%s) have no effect: it is a one-off job without an id (32 "
            "hexadecimal digits count as none), and %s, so that it runs here, without a lock. Give "
            "it an id in add_job(..., id=...), or the option 'name'",
            job.id,
            ", ".join(options),
            own_because,
        )


class _UnnamedJob:
    """A job without an id, as it was when its task was named.

    :ivar task: the task's name, and what it is made of
    """

    def __init__(self, job: Any, on_dropped: Callable[[_UnnamedJob], None]) -> None:
        self._parts = _parts(job)

        def drop(_: Any) -> None:
            self._parts = ()
            on_dropped(self)

        # A job that its store has dropped, and its arguments, are not kept alive here.
        self._job = weakref.ref(job, drop)
        self._is_warned = False
        self.identity = id(job)
        self.task = UnnamedTask.of(job)

    def is_current(self, job: Any) -> bool:
        """Tell whether the job has not changed since. APScheduler replaces what it changes."""
        return all(part is now for part, now in zip(self._parts, _parts(job), strict=True))

    def job_in(self, store: Any) -> Any:
        """Return the job, or ``None`` if it has changed since or left the store."""
        job = self._job()
        if job is None or not self.is_current(job) or store.lookup_job(job.id) is not job:
            return None
        return job

    def warn_once(self, job: Any, name: str) -> None:
        """Warn of a recurring job's name, which is another one after a change of its parts."""
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
        """Warn, once, of a one-off job that is the same as another one in everything."""
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
    """The jobs whose tasks are named after function, trigger and arguments.

    A job comes here when it is added or modified, and at each of its run times. So those that
    share a name are known without a search of the job stores.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[int, _UnnamedJob] = {}  # by the job's identity
        self._sharing: dict[str, set[_UnnamedJob]] = {}  # by name
        # A job may be dropped by any thread, also by one that holds the lock.
        self._dropped: deque[_UnnamedJob] = deque()

    def named(self, job: Any, store: Any) -> _UnnamedJob:
        """Return the job with its task's name. It is computed once, and anew after a change.

        :param store: the job's store; names are compared within a store
        :raises TaskLockOptionError: another job has this name, and they may not share it
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
    """Return what a job's name is made of, and who runs it."""
    return job.func, job.trigger, job.args, job.kwargs, job.executor
