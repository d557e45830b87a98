"""The request of a claim: what a replica sends to the database to claim a run."""

from __future__ import annotations

from datetime import datetime, timezone
from uuid import UUID

from apscheduler_tasklock._lock.claim_attempts import AnyRequest
from apscheduler_tasklock._lock.protocol_messages import (
    ClaimRequest,
    JobMove,
    RerunRequest,
)
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._runs.trigger_times import has_shared_times, nominal_time
from apscheduler_tasklock.options import LONGEST_SECONDS


def request_of(submission: Submission, run_time: datetime, claim_id: UUID) -> AnyRequest:
    """Return the request that claims a run time, a dead run's window, a retry, or a manual run.

    Calls the job's trigger, which may be the application's own code.
    """
    if submission.dead_run or submission.failed_run or submission.request_id:
        return _rerun(submission, run_time, claim_id)
    if submission.due is not None:
        return _run_of_store(submission, submission.due.move, run_time, claim_id)
    return _run_of_schedule(submission, run_time, claim_id)


def _rerun(submission: Submission, run_time: datetime, claim_id: UUID) -> RerunRequest:
    assert submission.options is not None
    assert submission.cause is not None
    _, max_lock = submission.lock_times(submission.period_of_moment(run_time))
    dead_run = submission.dead_run
    return RerunRequest(
        submission.kind.value,
        submission.task_name,
        submission.cause,
        max_lock,
        lease=submission.options.lease_within(max_lock),
        failover=submission.failover,
        runs=submission.runs,
        max_runtime=submission.options.max_runtime,
        claim_id=claim_id,
        dead_holder=None if dead_run is None else dead_run.holder,
        handed_over=dead_run is not None and dead_run.handed_over,
    )


def _run_of_schedule(submission: Submission, run_time: datetime, claim_id: UUID) -> ClaimRequest:
    assert submission.options is not None
    nominal = nominal_time(submission.trigger, run_time)
    period = submission.period(nominal)
    min_lock, _ = submission.lock_times(period)
    exact = submission.run_time_is_shared(nominal)
    max_lock = _max_lock(submission, nominal, period, exact=exact)
    since = submission.schedule.since
    return ClaimRequest(
        submission.task_name,
        min_lock,
        max_lock,
        run_time=nominal,
        exact=exact,
        lease=submission.options.lease_within(max_lock),
        failover=submission.failover,
        runs=submission.runs,
        one_off=submission.one_off,
        schedule=submission.schedule.text,
        schedule_for=None if since is None else nominal.timestamp() - since,
        least_gap=submission.least_gap(nominal, period),
        # A minimum lock above the period puts the next run off, because run times inside the
        # window are skipped.
        next_in=None if period is None else max(period, min_lock),
        is_last=submission.is_last_run(nominal, period),
        grace=submission.grace(period),
        max_runtime=submission.options.max_runtime,
        claim_id=claim_id,
        # With `run_unlocked`, the job runs without its lock if no answer to the claim comes. The
        # claim may have been granted all the same. Then its window stays taken, and is not handed
        # over, because the job runs here.
        keep_window_if_in_doubt=submission.run_unlocked,
    )


def _run_of_store(
    submission: Submission, move: JobMove, run_time: datetime, claim_id: UUID
) -> ClaimRequest:
    """Return the request that claims the run time of a stored job.

    The minimum lock is 0, because no window is needed: the claim moves the job's next run time on
    in the job's row, so that no other replica finds this run time.
    """
    assert submission.options is not None
    following = move.following
    nominal = nominal_time(submission.trigger, run_time)
    period = submission.period(nominal)
    exact = submission.run_time_is_shared(nominal)
    max_lock = _max_lock(submission, nominal, period, exact=exact)
    next_in = None
    if following is not None:
        # Subtracted as `datetime`, because differences of float timestamps may be a microsecond
        # off.
        start = move.run_time.astimezone(timezone.utc)
        next_in = (following.astimezone(timezone.utc) - start).total_seconds()
        next_in = min(next_in, LONGEST_SECONDS)
    return ClaimRequest(
        submission.task_name,
        min_lock=0.0,
        max_lock=max_lock,
        run_time=run_time,
        exact=True,
        lease=submission.options.lease_within(max_lock),
        failover=submission.failover,
        runs=submission.runs,
        one_off=submission.one_off,
        schedule=submission.schedule.text,
        next_in=next_in,
        is_last=following is None,
        grace=submission.grace(period),
        max_runtime=submission.options.max_runtime,
        claim_id=claim_id,
        move=move,
    )


def _max_lock(
    submission: Submission, nominal: datetime, period: float | None, *, exact: bool
) -> float:
    """Return the maximum lock of a scheduled run, in seconds.

    :param exact: whether every replica computes this run time. If not, a user may have set it,
        perhaps shortly before the next run time. The maximum lock then comes from the longer of two
        periods: that of this run time, and that of the next one.
    """
    if not exact and has_shared_times(submission.trigger):
        period = submission.period_of_moment(nominal)
    return submission.lock_times(period)[1]
