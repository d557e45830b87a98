"""What is asked of the database for a run time: its claim."""

from __future__ import annotations

from datetime import datetime, timezone
from uuid import UUID

from apscheduler_tasklock._lock.claim import AnyRequest
from apscheduler_tasklock._lock.messages import (
    ClaimRequest,
    HandOut,
    ManualRequest,
    RunState,
    TakeoverRequest,
)
from apscheduler_tasklock._scheduler.submission import Submission
from apscheduler_tasklock._scheduler.triggers import has_shared_times, nominal_time
from apscheduler_tasklock.options import LONGEST_SECONDS


def request_of(submission: Submission, run_time: datetime, claim_id: UUID) -> AnyRequest:
    """Return what is claimed: the job's run time, a dead run's window, or a run by hand.

    It asks the job's trigger, which may be the application's own.
    """
    if submission.dead_run is not None:
        return _takeover(submission, submission.dead_run, run_time, claim_id)
    if submission.request_id is not None:
        return _run_by_hand(submission, submission.request_id, run_time, claim_id)
    if submission.hand_out is not None:
        return _handed_out(submission, submission.hand_out, run_time, claim_id)
    return _run_of_schedule(submission, run_time, claim_id)


def _takeover(
    submission: Submission, dead_run: RunState, run_time: datetime, claim_id: UUID
) -> TakeoverRequest:
    assert submission.options is not None
    # Only the lease depends on it: the maximum lock stays that of the dead run.
    _, max_lock = submission.lock_times(submission.period_of_moment(run_time))
    return TakeoverRequest(
        submission.task_name,
        dead_run.claim_id,
        dead_run.holder,
        lease=submission.options.lease_within(max_lock),
        failover=submission.failover,
        claim_id=claim_id,
    )


def _run_by_hand(
    submission: Submission, request_id: UUID, run_time: datetime, claim_id: UUID
) -> ManualRequest:
    assert submission.options is not None
    _, max_lock = submission.lock_times(submission.period_of_moment(run_time))
    return ManualRequest(
        submission.task_name,
        request_id,
        max_lock,
        lease=submission.options.lease_within(max_lock),
        failover=submission.failover,
        runs=submission.runs,
        max_runtime=submission.options.max_runtime,
        claim_id=claim_id,
    )


def _run_of_schedule(submission: Submission, run_time: datetime, claim_id: UUID) -> ClaimRequest:
    assert submission.options is not None
    nominal = nominal_time(submission.trigger, run_time)
    period = submission.period(nominal)
    min_lock, _ = submission.lock_times(period)
    exact = submission.run_time_is_shared(nominal)
    max_lock = _max_lock(submission, nominal, period, exact=exact)
    since = submission.schedule_since
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
        schedule=submission.schedule,
        schedule_for=None if since is None else nominal.timestamp() - since,
        least_gap=submission.least_gap(nominal, period),
        # Sooner than a longer minimum lock lets it, it cannot be run.
        next_in=None if period is None else max(period, min_lock),
        is_last=submission.is_last_run(nominal, period),
        grace=submission.grace(period),
        max_runtime=submission.options.max_runtime,
        claim_id=claim_id,
        # What may be run without its lock has been run.
        keep_window_if_in_doubt=submission.run_unlocked,
    )


def _handed_out(
    submission: Submission, hand_out: HandOut, run_time: datetime, claim_id: UUID
) -> ClaimRequest:
    """Return what is claimed of a job of the job store: the run time that was handed out.

    It is in one row, and so has no window that would keep it from others.
    """
    assert submission.options is not None
    following = hand_out.following
    nominal = nominal_time(submission.trigger, run_time)
    period = submission.period(nominal)
    exact = submission.run_time_is_shared(nominal)
    max_lock = _max_lock(submission, nominal, period, exact=exact)
    next_in = None
    if following is not None:
        # Exactly: as numbers, times of today are a microsecond off now and then.
        start = hand_out.run_time.astimezone(timezone.utc)
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
        schedule=submission.schedule,
        next_in=next_in,
        is_last=following is None,
        grace=submission.grace(period),
        max_runtime=submission.options.max_runtime,
        claim_id=claim_id,
        hand_out=hand_out,
    )


def _max_lock(
    submission: Submission, nominal: datetime, period: float | None, *, exact: bool
) -> float:
    """Return the maximum lock of a run of the schedule, in seconds.

    :param exact: whether the trigger gives this run time; else somebody may have set it
    """
    if not exact and has_shared_times(submission.trigger):
        period = submission.period_of_moment(nominal)
    return submission.lock_times(period)[1]
