"""The scheduler's jobs on one executor: their tasks, and the submissions of their runs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from math import inf
from typing import Any
from uuid import UUID, uuid4

from apscheduler.triggers.date import DateTrigger

from apscheduler_tasklock._lock.protocol_messages import ClaimRequest, Registration, TaskRow
from apscheduler_tasklock._runs.adapter import SchedulerAdapter
from apscheduler_tasklock._runs.claim_request import request_of
from apscheduler_tasklock._runs.job_functions import check_body_runs, function_reference
from apscheduler_tasklock._runs.missed_runs import MOST_RUN_TIMES
from apscheduler_tasklock._runs.run import JobKey
from apscheduler_tasklock._runs.skipped_jobs import SkippedJobsLog
from apscheduler_tasklock._runs.standby import may_stand_in
from apscheduler_tasklock._runs.submission import (
    Schedule,
    Submission,
    new_claim_ids,
)
from apscheduler_tasklock._runs.task_names import canonical_schedule, exact_schedule
from apscheduler_tasklock._runs.tasks import ResolvedTask, Tasks
from apscheduler_tasklock._runs.trigger_times import (
    count_until,
    period_after,
    run_times_between,
    zone_of,
)
from apscheduler_tasklock._values import LONGEST_NAME, logger_of
from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError
from apscheduler_tasklock.options import DEFAULT_MIN_FACTOR, LONGEST_SECONDS, SHORT_LEASE

logger = logger_of(__name__)

# Limits the seconds until a registered next run time, so that PostgreSQL can store this time.
LONGEST_WAIT = 50 * LONGEST_SECONDS


class ExecutorJobs:
    """Finds the jobs of an executor, their tasks and options, and makes submissions of them.

    :param scheduler: the scheduler of the jobs
    :param tasks: finds the jobs' task names and options; ``None`` if every job runs on this
        replica, without a lock
    :param run_unlocked: whether jobs run without a lock if the database stays unavailable
    :param logger_name: returns the name of the executor's logger
    :param submit_again: submits a takeover, a manual run or a standby in the thread in which the
        scheduler submits jobs; gets what to call if the run could not be submitted
    :param notices: returns the object that logs jobs that are skipped here
    :param clock: the wall clock, in seconds since 1970
    :ivar submit: ``submit_again``
    """

    def __init__(
        self,
        scheduler: SchedulerAdapter,
        tasks: Tasks | None,
        *,
        run_unlocked: bool,
        logger_name: Callable[[], str],
        submit_again: Callable[[Submission, Callable[[], None]], None],
        notices: Callable[[], SkippedJobsLog],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._tasks = tasks
        self._run_unlocked = run_unlocked
        self._logger_name = logger_name
        self.submit = submit_again
        self._clock = clock
        self._schedules: dict[JobKey, Schedule] = {}
        # The trigger and the last run time of the jobs that the scheduler has submitted here.
        self._submitted: dict[JobKey, tuple[Any, datetime]] = {}
        self._has_lock: dict[JobKey, bool] = {}  # of the jobs that `counted` counts
        self._notices = notices
        self._logged_own: set[str] = set()  # functions

    def resolve(self, job: Any, jobstore: str) -> ResolvedTask:
        """Return a job's task and its lock options.

        :raises TaskLockOptionError: the options are impossible, or a call of the job's function
            would not run the function's body
        """
        check_body_runs(job.func, f"job {job.id!r}", awaiting=self._scheduler.awaits_nothing)
        if self._tasks is None:
            return ResolvedTask(job.id, None)
        return self._tasks.resolve(job, jobstore, self._scheduler.jobstores)

    def name_without_job(self, job_id: str, jobstore: str) -> str:
        """Return the task name of a job that this replica does not have.

        :raises TaskLockOptionError: the name is impossible, or no job has a lock here
        """
        if self._tasks is None:
            raise TaskLockOptionError(
                f"job {job_id!r} is not here, and its executor has enabled=False, with which there "
                "are no manual runs; call job.func"
            )
        return self._tasks.name_without_job(job_id, jobstore)

    def submission(
        self,
        job: Any,
        jobstore: str,
        task: ResolvedTask,
        run_times: Sequence[datetime],
        submitted_at: float | None = None,
    ) -> Submission:
        """Return a submission of a job and its run times.

        :param submitted_at: as in ``Submission``; ``None``: the submission gets no claim ids, so
            that only a copy made by :meth:`Submission.anew` can be submitted
        """
        key, one_off = (job.id, jobstore), isinstance(job.trigger, DateTrigger)
        previous = self._submitted.get(key)
        is_submitted = submitted_at is not None
        if is_submitted and not one_off:
            self._submitted[key] = job.trigger, run_times[-1]
        return Submission(
            job=job,
            jobstore=jobstore,
            trigger=job.trigger,
            run_times=tuple(run_times),
            task_name=task.name,
            options=task.options,
            run_unlocked=self._run_unlocked,
            logger_name=self._logger_name(),
            runs=what_runs(job),
            one_off=one_off,
            schedule=self._schedule(key, job.trigger),
            previous=previous,
            submitted_at=submitted_at or 0.0,
            claim_ids=new_claim_ids(run_times) if is_submitted else (),
        )

    def _schedule(self, key: JobKey, trigger: Any) -> Schedule:
        """Return a job's schedule, remembered because making one takes as long as a claim."""
        known = self._schedules.get(key)
        if known is not None and known.trigger is trigger:
            return known
        text = canonical_schedule(trigger)
        if isinstance(trigger, DateTrigger):  # not remembered, because there may be many such jobs
            return Schedule(trigger, text, None)
        is_same = known is not None and known.text == text
        since = known.since if known is not None and is_same else self._clock()
        self._schedules[key] = Schedule(trigger, text, since)
        return self._schedules[key]

    def forget(self, key: JobKey) -> None:
        """Forget the schedule of a job that was removed, and count the job no more."""
        self._schedules.pop(key, None)
        self.forget_submitted(key)
        self.forget_counted(key)

    def forget_submitted(self, key: JobKey) -> None:
        """Forget the run times of a job that was added, maybe in the place of another one."""
        self._submitted.pop(key, None)

    def note(self, job: Any, jobstore: str, task: ResolvedTask) -> None:
        """Count a job as one with a lock or without, unless it is in a shared job store.

        Jobs of a shared store are not counted, because other replicas change them without an event
        here.
        """
        if not self._scheduler.is_shared(jobstore):
            self._has_lock[job.id, jobstore] = task.options is not None

    def forget_counted(self, key: JobKey) -> None:
        """Count a job no more."""
        self._has_lock.pop(key, None)

    def forget_store(self, alias: str | None) -> None:
        """Count the jobs of a job store no more; ``None``: those of all job stores."""
        for key in list(self._has_lock):
            if alias in (None, key[1]):
                self.forget_counted(key)

    def counted(self) -> tuple[int, int]:
        """Return how many jobs have a lock, and how many have none. Reads no job store."""
        has_lock = list(self._has_lock.values())
        return sum(has_lock), len(has_lock) - sum(has_lock)

    def lease(self, job: Any, jobstore: str, task: ResolvedTask) -> float | None:
        """Return the lease of a job with failover, within which dead runs of the job are found.

        ``None`` if the job has no failover, or no lease.
        """
        return self.lease_of(self._next(job, jobstore, task))

    def lease_of(self, submission: Submission) -> float | None:
        """Return what :meth:`lease` does, of the submission of a run time."""
        if not submission.failover or submission.options is None:
            return None
        _, max_lock = submission.lock_times(submission.period(submission.run_times[0]))
        return submission.options.lease_within(max_lock)

    def _next(self, job: Any, jobstore: str, task: ResolvedTask) -> Submission:
        run_time = job.next_run_time or self._now()  # a paused job has no next run time
        return self.submission(job, jobstore, task, [run_time])

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), timezone.utc)

    def list_tasks(self) -> Iterator[tuple[str, JobKey, float | None]]:
        """Yield the tasks, keys and leases of the jobs in job stores that replicas do not share.

        Reads these job stores.

        :raises Exception: whatever a job store raises. It is raised after the jobs of the other
            stores were yielded.
        """
        failed: Exception | None = None
        for alias in list(self._scheduler.jobstores):
            if self._scheduler.is_shared(alias):
                continue  # because the registrar lists the store's tasks, without calling triggers
            try:
                jobs = self._scheduler.jobs_of(alias)
            except Exception as error:  # noqa: BLE001  # raised at the end
                failed = failed or error
                continue
            yield from self._tasks_of(jobs, alias)
        if failed is not None:
            raise failed

    def _tasks_of(
        self, jobs: Sequence[Any], jobstore: str
    ) -> Iterator[tuple[str, JobKey, float | None]]:
        for job in jobs:
            try:
                task = self.resolve(job, jobstore)
                self.note(job, jobstore, task)
                lease = None if task.options is None else self.lease(job, jobstore, task)
            except TaskLockError:  # logged when the job was added, and when it is submitted
                continue
            except Exception:  # logged, so that the other jobs are listed
                logger.exception(
                    "Job %r: its task could not be found, so that its dead runs are not checked "
                    "before its next run time",
                    job.id,
                )
                continue
            if task.options is not None:
                yield task.name, (job.id, jobstore), lease

    def submission_for(self, key: JobKey, dead: TaskRow) -> Submission | None:
        """Return the takeover of a dead run by a job.

        ``None`` if the job is gone, is paused, or does not run the same function as the dead run.
        """
        found = self._find(key, dead.task_name, dead.runs)
        if found is None:
            return None
        job, task = found
        # A manual run has no window. So the window in the row belongs to another run, and the run
        # time of the takeover is now.
        run_time = self._now() if dead.manual else dead.window_start
        run_time = run_time.astimezone(self._scheduler.timezone)
        submission = self.submission(job, key[1], task, [run_time])
        return replace(submission, dead_run=dead, is_stored=self._scheduler.is_shared(key[1]))

    def retry_of(self, key: JobKey, failed: TaskRow) -> Submission | None:
        """Return the retry of a failed run by a job.

        ``None`` if the job is gone, is paused, or does not run the same function as the failed run.
        """
        found = self._find(key, failed.task_name, failed.runs)
        if found is None:
            return None
        job, task = found
        run_time = failed.window_start.astimezone(self._scheduler.timezone)
        submission = self.submission(job, key[1], task, [run_time])
        return replace(submission, failed_run=failed, is_stored=self._scheduler.is_shared(key[1]))

    def requested(self, key: JobKey, task_name: str, request_id: UUID) -> Submission | None:
        """Return a manual run of a job; ``None`` if the job is gone or cannot run here.

        A paused job can have manual runs.
        """
        job = self._scheduler.job(*key)
        if job is None or not self._can_run(job):
            return None
        task = self._resolved(job, key[1])
        if task is None or task.name != task_name:
            return None
        now = self._now().astimezone(self._scheduler.timezone)
        submission = self.submission(job, key[1], task, [now])
        return replace(submission, request_id=request_id)

    def standby_for(
        self, key: JobKey, state: TaskRow, due_at: datetime, late_by: float
    ) -> Submission | None:
        """Return a standby run of a job; ``None`` if the job may not have one, see ``standby.py``.

        :param due_at: the run time that another replica has missed
        :param late_by: seconds since that run time
        """
        if self._scheduler.is_shared(key[1]):
            return None  # because every replica reads a stored job when it is due
        found = self._find(key, state.task_name, state.runs)
        if found is None:
            return None
        job, task = found
        zone = self._scheduler.timezone
        submission = self.submission(job, key[1], task, [due_at.astimezone(zone)])
        now = self._now()
        if not may_stand_in(job, submission.schedule.text, state, late_by, now):
            return None
        # The run time is the due time by this replica's clock, because APScheduler's own run times
        # are times of this clock, too.
        local = now - timedelta(seconds=late_by)
        return replace(submission, run_times=(local.astimezone(zone),), is_standby=True)

    def unasked(
        self, key: JobKey, task_name: str, due_at: datetime, until: datetime
    ) -> tuple[ClaimRequest, Sequence[datetime], int] | None:
        """Return the run times that nobody has asked for since a task's due time.

        ``None`` if there are none, if each replica computes its own run times, or if the due time
        is no run time of the job, as after a change of its schedule. A stored job is left out,
        because each replica reads the run times that are due.

        :param due_at: the due time in the task's row
        :param until: the run times before this time are returned
        :return: the request of a claim of the first run time, the first run times and the last one,
            and how many are between these
        """
        job = self._scheduler.job(*key)
        if job is None or job.next_run_time is None or self._scheduler.is_shared(key[1]):
            return None
        task = self._resolved(job, key[1])
        if task is None or task.name != task_name:
            return None
        period = period_after(job.trigger, due_at.astimezone(self._scheduler.timezone)) or 0.0
        # A registered due time is not exact, because its statement took some time to arrive.
        slack = timedelta(seconds=min(1.0, period / 2))
        since = due_at.astimezone(self._scheduler.timezone) - slack
        until = min(until, job.next_run_time, key=datetime.timestamp)
        run_times, more = run_times_between(job.trigger, since, until, MOST_RUN_TIMES), 0
        if not run_times or run_times[0] - due_at > slack:
            return None
        if len(run_times) == MOST_RUN_TIMES:
            count, last, _ = count_until(job.trigger, run_times[-1], until)
            run_times, more = [*run_times[:-1], last], count - 1
        submission = self.submission(job, key[1], task, run_times)
        request = request_of(submission, run_times[0], uuid4())
        assert isinstance(request, ClaimRequest)
        return (request, run_times, more) if request.exact else None

    def has_next_run(self, key: JobKey) -> bool:
        """Return whether a job exists, is a recurring job, and is not paused."""
        job = self._scheduler.job(*key)
        if job is None or isinstance(job.trigger, DateTrigger):
            return False
        return job.next_run_time is not None

    def registration(self, key: JobKey) -> Registration | None:
        """Return the registration of a job's task.

        ``None`` for a one-off job, and for a job without a lock or with impossible options. Also
        ``None`` if the job's function is missing here, because that function's decorator may set
        the task's name.

        :raises Exception: whatever the trigger of a stored job raises
        """
        job = self._scheduler.job(*key)
        if not getattr(job, "has_function", True):
            return None
        task = None if job is None else self._resolved(job, key[1])
        if job is None or task is None or isinstance(job.trigger, DateTrigger):
            return None
        submission = self._next(job, key[1], task)
        [run_time] = submission.run_times
        least_gap = 0.0
        if self._scheduler.is_shared(key[1]):  # a stored job has no windows, and so no least gap
            period = self._stored_period(submission, run_time)
        else:
            period = submission.period(run_time)
            least_gap = submission.least_gap(run_time, period)
        next_in = None
        if job.next_run_time is not None:
            next_in = min(job.next_run_time.timestamp() - self._clock(), LONGEST_WAIT)
        return Registration(
            task.name,
            submission.schedule.text or "",
            next_in,
            submission.grace(period),
            least_gap,
            submission.runs,
            period=period,
            details=self._details(job, key[1], task),
            token=job.token_of(task.name) if self._scheduler.is_shared(key[1]) else None,
        )

    def _details(self, job: Any, jobstore: str, task: ResolvedTask) -> str:
        """Return what operators see of a job, as JSON.

        These are its options, each with the place where it is set, its trigger's time zone, its
        namespace, and what else the trigger's canonical form leaves out.
        """
        assert self._tasks is not None
        assert task.options is not None
        places, options = self._tasks.places(job), dict[str, tuple[Any, str]]()
        given = [name for name in task.options.given if name != "name"]
        if not task.options.retries:
            given = [name for name in given if name not in ("retry_delay", "retry_backoff")]
        if self._scheduler.is_shared(jobstore):  # a stored job has no windows
            given = [name for name in given if name not in ("min_factor", "min_lock")]
        elif task.options.min_factor is None and task.options.min_lock is None:
            options["min_factor"] = (DEFAULT_MIN_FACTOR, "default")
        for name in given:
            value = getattr(task.options, name)
            options[name] = (None if value == inf else value, places[name])
        zone, namespace = zone_of(job.trigger), self._tasks.namespace
        details = {"options": options, "zone": zone, "namespace": namespace}
        exact = exact_schedule(job.trigger)
        return json.dumps(details if exact is None else {**details, "schedule": exact})

    def _stored_period(self, submission: Submission, run_time: datetime) -> float | None:
        """Return the period of a stored job; ``None``: the job's option ``period`` is used.

        :raises Exception: whatever the job's trigger raises, if the options have no period. The job
            is then not registered.
        """
        try:
            return period_after(submission.trigger, run_time)
        except Exception:
            if submission.options is None or submission.options.period is None:
                raise
            return None

    def _resolved(self, job: Any, jobstore: str) -> ResolvedTask | None:
        """Return a job's task; ``None`` if the job has no lock, or its options are impossible."""
        try:
            task = self.resolve(job, jobstore)
        except TaskLockOptionError:  # logged when the job was added or changed
            return None
        return None if task.options is None else task

    def renewed(self, submission: Submission) -> Submission | None:
        """Return a submission of the same run times, with the job as it is now.

        ``None`` if the job was paused, removed or rescheduled meanwhile. If no run time follows,
        the scheduler has dropped the job, so the same submission is returned.
        """
        if submission.is_last:
            return submission
        found = self._find(submission.key, submission.task_name, submission.runs)
        if found is None:
            return None
        job, task = found
        renewed = self.submission(job, submission.jobstore, task, submission.run_times)
        renewed = replace(renewed, previous=submission.previous)
        return renewed if renewed.schedule.text == submission.schedule.text else None

    def _find(self, key: JobKey, task_name: str, runs: str) -> tuple[Any, ResolvedTask] | None:
        """Return a job as it is now, and its task.

        ``None`` if the job is gone or paused, cannot run here, or does not have this task or this
        function any more. A stored job whose last run time was claimed is found until that run is
        over.

        :param runs: the function, in the form that ``what_runs`` returns
        """
        job = self._scheduler.job(*key) or self._scheduler.ended_job(*key)
        if job is None or (job.next_run_time is None and not getattr(job, "has_ended", False)):
            return None
        if not self._can_run(job):
            return None
        task = self._resolved(job, key[1])
        if task is None or task.name != task_name or what_runs(job) != runs:
            return None
        return job, task

    def _can_run(self, job: Any) -> bool:
        """Return whether a job's function is available here; log a job whose function is not."""
        if getattr(job, "has_function", True):
            return True
        reference = function_reference(job)
        self._notices().log(  # once for each function
            reference,
            logger,
            logging.WARNING,
            "Job %r: its dead or manual run is left to other replicas, because its function %r is "
            "not available here",
            job.id,
            reference,
        )
        return False

    def log_own(self, job: Any, task: ResolvedTask) -> None:
        """Log that a one-off job without an id runs on each replica that adds it, if this is one.

        At INFO once for each function, and at DEBUG otherwise.
        """
        if task.own_because is None:
            return
        function = function_reference(job)
        level = logging.DEBUG if function in self._logged_own else logging.INFO
        self._logged_own.add(function)
        logger.log(
            level,
            "Job %s (%s): run here, without a lock, as on each replica that adds it: it is a "
            "one-off job without an id, and %s. To run it on one replica, give it an id in "
            "add_job(..., id=...)",
            job.id,
            function,
            task.own_because,
        )

    def log_limited_settings(self, job: Any, jobstore: str, task: ResolvedTask) -> None:
        """Log the settings of a job that have less effect under its lock."""
        assert task.options is not None
        if job.max_instances > 1:
            logger.info(
                "Job %r: its max_instances=%d has less effect: as long as its task lock is held, "
                "one run goes on at a time, on all replicas together",
                job.id,
                job.max_instances,
            )
        self.log_late_retries(job, jobstore, task)
        lease = task.options.lease
        if lease is None or lease == inf:
            return
        if lease < SHORT_LEASE:
            logger.warning(
                "Job %r: its lease of %g s is below %g s, so a short stall of the database or of "
                "this process can make a run lose its lock",
                job.id,
                lease,
                SHORT_LEASE,
            )
        submission = self._next(job, jobstore, task)
        _, max_lock = submission.lock_times(submission.period(submission.run_times[0]))
        if lease > max_lock:
            logger.warning(
                "Job %r: its lease of %g s is above its maximum lock of %g s, so its claims end "
                "with the maximum lock and are not renewed",
                job.id,
                lease,
                max_lock,
            )

    def log_late_retries(self, job: Any, jobstore: str, task: ResolvedTask) -> None:
        """Log that the delay of a job's first retry does not fit into its period."""
        assert task.options is not None
        delay = task.options.delay_after(1)
        if delay is None or isinstance(job.trigger, DateTrigger):
            return
        submission = self._next(job, jobstore, task)
        period = submission.period_of_moment(submission.run_times[0])
        if period is not None and delay >= period:
            logger.warning(
                "Job %r: its retry_delay of %g s is not below its period of %g s, so that its runs "
                "are not retried: a retry begins before the next run time is due, or never",
                job.id,
                delay,
                period,
            )

    def unknown_ids(self) -> set[str]:
        """Return the ids in the option ``jobs`` for which this executor has no job."""
        if self._tasks is None or not self._tasks.job_ids:
            return set()  # so that the job stores are not read for nothing
        return self._tasks.job_ids - {job.id for job in self._scheduler.jobs()}


def what_runs(job: Any) -> str:
    """Return a job's function, and for a one-off job its date; see ``ClaimRequest.runs``."""
    reference = function_reference(job)[:LONGEST_NAME]
    if isinstance(job.trigger, DateTrigger):
        return f"{reference} at {job.trigger.run_date.astimezone(timezone.utc).isoformat()}"
    return reference
