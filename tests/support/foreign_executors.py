"""Executors as third parties write them, on the base classes of APScheduler."""

from __future__ import annotations

import multiprocessing
from datetime import datetime
from typing import Any

from apscheduler.executors.base import run_job
from apscheduler.executors.pool import ThreadPoolExecutor as PoolExecutor


class ForkingExecutor(PoolExecutor):  # type: ignore[misc]  # APScheduler has no types
    """Forks a process for each job."""

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        self._pool.submit(self._fork, job, run_times)

    def _fork(self, job: Any, run_times: list[datetime]) -> None:
        receives, sends = multiprocessing.Pipe(duplex=False)

        def work() -> None:
            sends.send(run_job(job, job._jobstore_alias, run_times, self._logger.name))

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        events = receives.recv()
        process.join()
        self._run_job_success(job.id, events)


class DirectExecutor(PoolExecutor):  # type: ignore[misc]  # APScheduler has no types
    """Calls a job's function itself."""

    def _do_submit_job(self, job: Any, _run_times: list[datetime]) -> None:
        def work() -> None:
            job.func(*job.args, **job.kwargs)
            self._run_job_success(job.id, [])

        self._pool.submit(work)
