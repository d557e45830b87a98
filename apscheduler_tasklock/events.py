"""Events of the task lock, for ``scheduler.add_listener``."""

from __future__ import annotations

from datetime import datetime

from apscheduler.events import JobEvent

# APScheduler 3 uses the bits from 0 to 16. These bits are far above, so that later versions of
# APScheduler 3 can use more. They are outside APScheduler's EVENT_ALL, so that a listener gets
# these events only if it asks for them.
EVENT_TASK_LOCK_GRANTED = 2**40
EVENT_TASK_LOCK_REFUSED = 2**41
EVENT_TASK_LOCK_RELEASED = 2**42
EVENT_TASK_LOCK_LOST = 2**43
EVENT_TASK_LOCK_ERROR = 2**44
EVENT_TASK_LOCK_ALL = (
    EVENT_TASK_LOCK_GRANTED
    | EVENT_TASK_LOCK_REFUSED
    | EVENT_TASK_LOCK_RELEASED
    | EVENT_TASK_LOCK_LOST
    | EVENT_TASK_LOCK_ERROR
)

_NAMES = {
    EVENT_TASK_LOCK_GRANTED: "granted",
    EVENT_TASK_LOCK_REFUSED: "refused",
    EVENT_TASK_LOCK_RELEASED: "released",
    EVENT_TASK_LOCK_LOST: "lost",
    EVENT_TASK_LOCK_ERROR: "error",
}


class TaskLockEvent(JobEvent):  # type: ignore[misc]  # APScheduler has no types
    """An event about the task lock, for one run time of one job.

    :ivar code: one of the ``EVENT_TASK_LOCK_*`` codes
    :ivar job_id: id of the job
    :ivar jobstore: alias of the job store that holds the job
    :ivar task_name: the task's name, the same on every replica; empty if the job's options are
        impossible
    :ivar scheduled_run_time: the run time that was claimed; for a run that died and for a window
        that is given up, the window's start in database time; for a manual run, the time at which
        the run was begun or given up
    :ivar holder: the replica that made the last claim of the task; for ``RELEASED``, the replica
        that ran the job; ``None`` if not known
    :ivar locked_until: database time until which the task is locked; for ``RELEASED``, database
        time at which the window of the run ends; ``None`` if not known
    :ivar token: the fencing token of the holder's claim; ``None`` if not known
    :ivar reason: for ``REFUSED`` ``"running"`` (the last run is unfinished: it still runs, or it
        died and may be taken over), ``"window"`` (the run time's window, or a later one, was run
        before) or ``"paused"``; for ``GRANTED`` ``"takeover"`` if the run repeats the window of a
        dead or handed-over run, ``"manual"`` if an operator has asked for the run, ``"retry"`` if
        the run has failed before; for ``RELEASED`` ``"handed over"`` if another replica is to run
        the window; for ``LOST`` ``"died"`` if the worker process died; for ``ERROR`` ``"given up"``
        if no replica takes a dead run over any more; else ``None``
    :ivar exception: the error, for ``EVENT_TASK_LOCK_ERROR``
    :ivar attempt: for ``GRANTED`` and ``RELEASED``, which attempt at the run time it is: 1, or more
        for a retry; else ``None``
    :ivar retry_at: for ``RELEASED`` of a run that has failed, the database time at which it is run
        again; ``None`` if it is not
    :ivar outcome: for ``RELEASED``, the outcome of the run in the run history: ``"ok"``,
        ``"error"``, ``"cancelled"``, ``"overran"`` or ``"died"``; ``None`` if the run never began
    :ivar error: for ``RELEASED`` of a run that has raised an exception, the class and the message
        of the exception as in the run history, such as ``"ValueError: no such file"``; else
        ``None``
    :ivar took: for ``RELEASED``, seconds from the run's claim to its end, and of a run that died to
        the end of its lease; ``None`` if the run never began
    """

    def __init__(
        self,
        code: int,
        job_id: str,
        jobstore: str,
        task_name: str,
        scheduled_run_time: datetime,
        *,
        holder: str | None = None,
        locked_until: datetime | None = None,
        token: int | None = None,
        reason: str | None = None,
        exception: BaseException | None = None,
        attempt: int | None = None,
        retry_at: datetime | None = None,
        outcome: str | None = None,
        error: str | None = None,
        took: float | None = None,
    ) -> None:
        super().__init__(code, job_id, jobstore)
        self.task_name = task_name
        self.scheduled_run_time = scheduled_run_time
        self.holder = holder
        self.locked_until = locked_until
        self.token = token
        self.reason = reason
        self.exception = exception
        self.attempt = attempt
        self.retry_at = retry_at
        self.outcome = outcome
        self.error = error
        self.took = took

    def __repr__(self) -> str:
        return (
            f"<TaskLockEvent {_NAMES.get(self.code, self.code)} task={self.task_name!r} "
            f"run_time={self.scheduled_run_time.isoformat()} holder={self.holder!r} "
            f"token={self.token} reason={self.reason!r} outcome={self.outcome!r} "
            f"exception={self.exception!r}>"
        )
