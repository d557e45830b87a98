"""Running a window again whose holder died, on the scheduler that was refused it."""

from __future__ import annotations

import logging
from typing import Any

from apscheduler.schedulers.base import STATE_RUNNING

from apscheduler_tasklock.submission import Submission

logger = logging.getLogger(__name__)


def job_to_run_again(scheduler: Any, submission: Submission) -> Any:
    """Return the job as it is now, or ``None`` if it is not to run: removed, or paused.

    A job without another run time has been dropped by the scheduler, and runs as it was.
    """
    if scheduler.state != STATE_RUNNING:
        return None
    if submission.last:
        return submission.job
    job = scheduler.get_job(submission.job.id, submission.jobstore)
    if job is None or job.next_run_time is None:
        logger.debug(
            "Task %r: its holder died; not run again, since the job is paused or removed",
            submission.task_name,
        )
        return None
    return job
