"""Which task a job is, and under what options: what its kwargs, its function and others say."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.util import iscoroutinefunction_partial

from apscheduler_tasklock.decorator import function_options
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.names import (
    check_name,
    function_reference,
    is_anonymous,
    refuse_twins,
)
from apscheduler_tasklock.options import RESERVED_KEY, LockOptions, parse_job_options, resolve

logger = logging.getLogger(__name__)


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
        self._named_by_function: set[str] = set()

    def of(
        self, job: Any, jobstore: str, jobstores: Mapping[str, Any]
    ) -> tuple[str, LockOptions | None]:
        """Return a job's task name, and its lock options, or ``None`` if it has no lock.

        :param jobstore: alias of the job's store
        :param jobstores: the scheduler's stores, by alias
        :raises TaskLockOptionError: its options or its name are impossible
        """
        options = self._options(job)
        if options is False:
            return job.id, None
        if options.cancel_on_lost and not iscoroutinefunction_partial(job.func):
            raise TaskLockOptionError(
                f"job {job.id!r}: cancel_on_lost is for coroutines, and its function is none; let "
                "it look at current_lock().lost instead"
            )
        name = options.name or self._name_without_option(job, jobstore, jobstores)
        return check_name(self._namespace + name, f"job {job.id!r}"), options

    def _options(self, job: Any) -> LockOptions | Literal[False]:
        return resolve(
            job.kwargs.get(RESERVED_KEY),
            self._jobs.get(job.id),
            function_options(job.func),
            self._defaults,
            where=f"job {job.id!r}",
        )

    def _name_without_option(self, job: Any, jobstore: str, jobstores: Mapping[str, Any]) -> str:
        if not is_anonymous(job, jobstores.get(jobstore)):
            return str(job.id)
        refuse_twins(job, self._others_without_name(job, jobstores))
        name = function_reference(job)
        if name not in self._named_by_function:
            self._named_by_function.add(name)
            logger.warning(
                "Job %s was added without an id, so its task is named after its function, %s. "
                "Give it an id in add_job(..., id=...) to keep the name when the function moves",
                job.id,
                name,
            )
        return name

    def _others_without_name(self, job: Any, jobstores: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the other jobs whose tasks are named after their functions.

        Only memory job stores have any; others are not read, which can take long.
        """
        for jobstore in jobstores.values():
            if not isinstance(jobstore, MemoryJobStore):
                continue
            for other in jobstore.get_all_jobs():
                if is_anonymous(other, jobstore) and other.executor == job.executor:
                    options = self._options(other)
                    if options is not False and not options.name:
                        yield other
