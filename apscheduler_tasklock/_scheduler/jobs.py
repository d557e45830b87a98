"""The scheduler's jobs on one executor: which tasks they are, and what is submitted for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from math import inf
from typing import Any
from uuid import UUID

from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._lock.messages import Registration, RunState
from apscheduler_tasklock._scheduler.adapter import SchedulerAdapter, jobstore_of
from apscheduler_tasklock._scheduler.functions import check_runs, function_reference
from apscheduler_tasklock._scheduler.lateness import SchedulerPass
from apscheduler_tasklock._scheduler.names import canonical_schedule
from apscheduler_tasklock._scheduler.notices import JobNotices
from apscheduler_tasklock._scheduler.submission import (
    Gaps,
    JobKey,
    Submission,
    hand_out_of,
    new_claim_ids,
    trigger_of,
)
from apscheduler_tasklock._scheduler.tasks import ResolvedTask, Tasks
from apscheduler_tasklock._scheduler.triggers import has_shared_times, period_after
from apscheduler_tasklock._scheduler.watch import STANDBY_AFTER
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError
from apscheduler_tasklock.options import LONGEST_SECONDS, SHORT_LEASE

logger = logger_of(__name__)

# Seconds that a next run time is away at most, as it is registered: with all that is added to it,
# it is a time that the tables take.
LONGEST_WAIT = 50 * LONGEST_SECONDS


@dataclass(frozen=True)
class _Schedule:
    """The schedule of a job.

    :ivar trigger: which it was read from
    :ivar text: the trigger in canonical form
    :ivar since: since when this replica has it, by its clock; ``None`` of a single date
    :ivar gaps: how close its run times may be
    """

    trigger: Any
    text: str
    since: float | None
    gaps: Gaps = field(default_factory=Gaps)


class ExecutorJobs:
    """Finds the jobs of an executor, their tasks and options, and makes submissions of them.

    :param scheduler: whose jobs they are
    :param tasks: has their names and options; ``None`` if every job runs here, without a lock
    :param run_unlocked: whether they run all the same if the database stays unavailable
    :param logger_name: returns the name of the executor's logger
    :param submit: submits what runs again
    :param notices: returns what tells of jobs that are left alone
    :param clock: the wall clock, in seconds since 1970
    """

    def __init__(
        self,
        scheduler: SchedulerAdapter,
        tasks: Tasks | None,
        *,
        run_unlocked: bool,
        logger_name: Callable[[], str],
        submit: Callable[[Submission, Callable[[], None]], None],
        notices: Callable[[], JobNotices],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._tasks = tasks
        self._run_unlocked = run_unlocked
        self._logger_name = logger_name
        self._submit = submit
        self._clock = clock
        self._schedules: dict[JobKey, _Schedule] = {}
        self._notices = notices

    def resolve(self, job: Any, jobstore: str) -> ResolvedTask:
        """Return the task that a job is, and its lock options.

        :raises TaskLockOptionError: they are invalid, or the job's function would never run
        """
        check_runs(job.func, f"job {job.id!r}", awaiting=self._scheduler.awaits_nothing)
        if self._tasks is None:
            return ResolvedTask(job.id, None)
        return self._tasks.resolve(job, jobstore, self._scheduler.jobstores)

    def submission(
        self,
        job: Any,
        jobstore: str,
        task: ResolvedTask,
        run_times: Sequence[datetime],
        scheduler_pass: SchedulerPass | None = None,
    ) -> Submission:
        """Return what is submitted for a job and its run times.

        :param scheduler_pass: in which the scheduler submits it now; without one it gets no ids of
            claims, and has to be made ``anew`` to be submitted
        """
        schedule = self._schedule((job.id, jobstore), trigger_of(job))
        return Submission(
            job=job,
            jobstore=jobstore,
            trigger=trigger_of(job),
            run_times=tuple(run_times),
            task_name=task.name,
            options=task.options,
            run_unlocked=self._run_unlocked,
            logger_name=self._logger_name(),
            runs=what_runs(job),
            one_off=isinstance(trigger_of(job), DateTrigger),
            schedule=schedule.text,
            schedule_since=schedule.since,
            gaps=schedule.gaps,
            hand_out=hand_out_of(job),
            scheduler_pass=scheduler_pass,
            claim_ids=new_claim_ids(run_times) if scheduler_pass else (),
        )

    def _schedule(self, key: JobKey, trigger: Any) -> _Schedule:
        """Return a job's schedule. To write one takes about as long as a claim."""
        known = self._schedules.get(key)
        if known is not None and known.trigger is trigger:
            return known
        text = canonical_schedule(trigger)
        if isinstance(trigger, DateTrigger):  # whose ids may be without number
            return _Schedule(trigger, text, None)
        is_same = known is not None and known.text == text
        since = known.since if known is not None and is_same else self._clock()
        self._schedules[key] = _Schedule(trigger, text, since)
        return self._schedules[key]

    def forget(self, key: JobKey) -> None:
        """Forget what is known of a job that was removed."""
        self._schedules.pop(key, None)

    def lease(self, job: Any, jobstore: str, task: ResolvedTask) -> float | None:
        """Return the lease of a job with failover, within which its dead holders are found."""
        submission = self._next(job, jobstore, task)
        if not submission.failover or submission.options is None:
            return None
        _, max_lock = submission.lock_times(submission.period(submission.run_times[0]))
        return submission.options.lease_within(max_lock)

    def _next(self, job: Any, jobstore: str, task: ResolvedTask) -> Submission:
        run_time = job.next_run_time or self._now()  # none while it is paused
        return self.submission(job, jobstore, task, [run_time])

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), timezone.utc)

    def list_tasks(self) -> Iterator[tuple[str, JobKey, float | None]]:
        """Give the jobs of this replica's own stores: their tasks, keys and leases.

        Asks the job stores.

        :raises Exception: whatever a job store raises, after the jobs of the others
        """
        failed: Exception | None = None
        for alias in list(self._scheduler.jobstores):
            if self._scheduler.hands_out(alias):
                continue  # the registrar lists its tasks, and no trigger of a row is asked for that
            try:
                jobs = self._scheduler.jobs_of(alias)
            except Exception as error:  # noqa: BLE001  # raised at the end
                failed = failed or error
                continue
            yield from self._tasks_of(jobs)
        if failed is not None:
            raise failed

    def _tasks_of(self, jobs: Sequence[Any]) -> Iterator[tuple[str, JobKey, float | None]]:
        for job in jobs:
            jobstore = jobstore_of(job)
            try:
                task = self.resolve(job, jobstore)
                lease = None if task.options is None else self.lease(job, jobstore, task)
            except TaskLockError:  # told when it was added, or will be when it is submitted
                continue
            except Exception:  # of one job; the others are seen to
                logger.exception("Job %r: its task is not looked at", job.id)
                continue
            if task.options is not None:
                yield task.name, (job.id, jobstore), lease

    def submission_for(self, key: JobKey, dead: RunState) -> Submission | None:
        """Return what runs a dead run's window again, if the job is there and is still the same."""
        found = self._find(key, dead.task_name, dead.runs)
        if found is None:
            return None
        job, task = found
        # The window of the row is not that of a run that was asked for by hand.
        run_time = self._now() if dead.manual else dead.window_start
        run_time = run_time.astimezone(self._scheduler.timezone)
        submission = self.submission(job, key[1], task, [run_time])
        return submission.for_dead_run(dead, is_stored=self._scheduler.hands_out(key[1]))

    def requested(self, key: JobKey, task_name: str, request_id: UUID) -> Submission | None:
        """Return what runs a job by hand, if it is there and can run; also while it is paused."""
        job = self._scheduler.job(*key)
        if job is None or not self._can_run(job):
            return None
        task = self._resolved(job, key[1])
        if task is None or task.name != task_name:
            return None
        now = self._now().astimezone(self._scheduler.timezone)
        submission = self.submission(job, key[1], task, [now])
        return replace(submission, request_id=request_id, exempt_from_misfire=True)

    def standby_for(
        self, key: JobKey, state: RunState, due_at: datetime, late_by: float
    ) -> Submission | None:
        """Return what runs an interval job in another replica's place, as of its due time.

        Only where run times are each replica's own, so that no replica's own one is due; where the
        row has this job's schedule; and within one period.

        :param late_by: seconds since then
        """
        if self._scheduler.hands_out(key[1]):
            return None  # whoever is handed it out runs it
        found = self._find(key, state.task_name, state.runs)
        if found is None or not isinstance(found[0].trigger, IntervalTrigger):
            return None
        job, task = found
        trigger = job.trigger
        run_time = due_at.astimezone(self._scheduler.timezone)
        submission = self.submission(job, key[1], task, [run_time])
        now = self._now()
        longest = trigger.interval_length + (trigger.jitter or 0)
        if (
            job.next_run_time.timestamp() - now.timestamp() > longest  # put off, or not begun
            or has_shared_times(trigger)
            or state.schedule != submission.schedule
            or late_by > trigger.interval_length
            or late_by < (trigger.jitter or 0) + STANDBY_AFTER
            or (trigger.end_date is not None and now > trigger.end_date)
        ):
            return None
        # By this replica's clock, as APScheduler's own run times are.
        local = now - timedelta(seconds=late_by)
        return replace(
            submission,
            run_times=(local.astimezone(self._scheduler.timezone),),
            exempt_from_misfire=True,
            is_standby=True,
        )

    def has_next_run(self, key: JobKey) -> bool:
        """Tell whether a job that comes again is there, and not paused."""
        job = self._scheduler.job(*key)
        if job is None or isinstance(job.trigger, DateTrigger):
            return False
        return job.next_run_time is not None

    def registration(self, key: JobKey) -> Registration | None:
        """Return what a replica tells of a job's task.

        ``None`` of one-off jobs, and of those whose function is missing here: it may say what the
        task is.

        :raises Exception: of a stored job, whatever its trigger raises
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
        if self._scheduler.hands_out(key[1]):  # it has no windows
            period = self._stored_period(submission, run_time)
        else:
            period = submission.period(run_time)
            least_gap = submission.least_gap(run_time, period)
        next_in = None
        if job.next_run_time is not None:
            next_in = min(job.next_run_time.timestamp() - self._clock(), LONGEST_WAIT)
        return Registration(
            task.name,
            submission.schedule or "",
            next_in,
            submission.grace(period),
            least_gap,
            submission.runs,
            period=period,
        )

    def _stored_period(self, submission: Submission, run_time: datetime) -> float | None:
        """Return the period of a stored job; ``None``: that of its option ``period`` counts.

        :raises Exception: whatever its trigger raises, which leaves the job alone
        """
        try:
            return period_after(submission.trigger, run_time)
        except Exception:
            if submission.options is None or submission.options.period is None:
                raise
            return None

    def _resolved(self, job: Any, jobstore: str) -> ResolvedTask | None:
        """Return the task that a job is, if it has a lock and its options are valid."""
        try:
            task = self.resolve(job, jobstore)
        except TaskLockOptionError:  # told when it was added or changed
            return None
        return None if task.options is None else task

    def renewed(self, submission: Submission) -> Submission | None:
        """Return a refused submission with the job as it is now, if it is still to run."""
        if submission.is_last:
            return submission
        found = self._find(submission.key, submission.task_name, submission.runs)
        if found is None:
            return None
        job, task = found
        return self.submission(job, submission.jobstore, task, submission.run_times)

    def submit(self, submission: Submission, not_now: Callable[[], None]) -> None:
        """Submit it, where the scheduler does. ``not_now`` is called if that cannot be now."""
        self._submit(submission, not_now)

    def _find(self, key: JobKey, task_name: str, runs: str) -> tuple[Any, ResolvedTask] | None:
        """Return a job as it is now, if it is not paused, can run here, and still is this task.

        One of the job store that has ended is found until its run is over.
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
        """Tell whether a job's function is here. If not, a replica that has it runs the job."""
        if getattr(job, "has_function", True):
            return True
        reference = function_reference(job)
        self._notices().tell(  # for a function once, as of what is due
            reference,
            logger,
            logging.WARNING,
            "Job %r: a run that died, or was asked for by hand, is left to other replicas: "
            "its function %r is not available here",
            job.id,
            reference,
        )
        return False

    def tell_what_the_lock_limits(self, job: Any, jobstore: str, task: ResolvedTask) -> None:
        """Log what of a job's own settings the lock does not leave as it is."""
        assert task.options is not None
        if job.max_instances > 1:
            logger.info(
                "Job %r: of its max_instances=%d one run goes on at a time, on all replicas "
                "together, while the task lock stands",
                job.id,
                job.max_instances,
            )
        lease = task.options.lease
        if lease is None or lease == inf:
            return
        if lease < SHORT_LEASE:
            logger.warning(
                "Job %r: its lease of %g s is below %g s: a database or a process that stands "
                "still for a moment costs the lock",
                job.id,
                lease,
                SHORT_LEASE,
            )
        submission = self._next(job, jobstore, task)
        _, max_lock = submission.lock_times(submission.period(submission.run_times[0]))
        if lease > max_lock:
            logger.warning(
                "Job %r: its lease of %g s is above its maximum lock of %g s, which ends its "
                "claims first; they are not renewed",
                job.id,
                lease,
                max_lock,
            )

    def unknown_ids(self) -> set[str]:
        """Return the ids that ``jobs`` has options for and that do not run here."""
        if self._tasks is None or not self._tasks.job_ids:
            return set()  # and the job stores need not be asked
        return self._tasks.job_ids - {job.id for job in self._scheduler.jobs()}


def what_runs(job: Any) -> str:
    """Return what a job runs, as of ``ClaimRequest``."""
    reference = function_reference(job)
    trigger = trigger_of(job)
    if isinstance(trigger, DateTrigger):
        return f"{reference} at {trigger.run_date.astimezone(timezone.utc).isoformat()}"
    return reference
