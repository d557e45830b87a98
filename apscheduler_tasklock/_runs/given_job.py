"""The objects that APScheduler's own code gets from this library in place of a job to run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock.options import RESERVED_KEY


class JobView:
    """Stands in for a job when APScheduler's ``run_job`` runs it.

    The view has its own ``misfire_grace_time``, because this library decides before the claim
    whether a run is a misfire. Its kwargs lack the reserved key ``task_lock``.
    """

    def __init__(self, job: Any, misfire_grace_time: float | None) -> None:
        self._job = job
        self.id = job.id
        self.func = job.func
        self.args = job.args
        self.kwargs = {key: value for key, value in job.kwargs.items() if key != RESERVED_KEY}
        self.misfire_grace_time = misfire_grace_time

    def __str__(self) -> str:
        return str(self._job)


class GivenJob(JobView):
    """Stands in for a job when it is given to the wrapped executor, for one run.

    :param job_id: the job's id, as a text object that refers to the run
    :param function: the function that the executor is to call: as a rule one that calls the job's
        own function under the run's lock
    """

    max_instances = sys.maxsize  # because `TaskLockExecutor` has counted the instances

    def __init__(
        self,
        submission: Submission,
        job_id: str,
        function: Callable[..., Any],
        misfire_grace_time: float | None,
    ) -> None:
        super().__init__(submission.job, misfire_grace_time)
        self.id = job_id
        self.func = function
        self._jobstore_alias = submission.jobstore

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the job."""
        # `copy` looks for special methods, which must not be the job's, and for attributes of a new
        # object that has no `_job` yet.
        if name.startswith("__") or "_job" not in vars(self):
            raise AttributeError(name)
        return getattr(self._job, name)


class RunTimes(list[datetime]):
    """A list with a given job's run time. The worker begins the run by iterating over the list.

    :param begin: called when the worker iterates; returns whether the job is to run. If not, the
        list appears empty, so that ``run_job`` runs and reports nothing.
    """

    def __init__(self, run_time: datetime, begin: Callable[[], bool]) -> None:
        super().__init__([run_time])
        self._begin = begin

    def __iter__(self) -> Iterator[datetime]:
        """Begin the run, and yield its run time; yield nothing if the job is not to run."""
        return super().__iter__() if self._begin() else iter(())
