"""Standby: when a replica runs an interval job in the place of another replica.

The run times of an interval job without a start date count from the start of each replica, so that
they differ between replicas. If the replica with the next run time is gone, the job would run up to
a whole period late. So another replica *stands in*: it runs the job in place of that run time.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._lock.protocol_messages import TaskRow
from apscheduler_tasklock._runs.trigger_times import has_shared_times

# Seconds from a task's due time until another replica stands in. It waits so long because the claim
# of the replica that has this run time often comes late: clocks differ, and workers are busy.
STANDBY_AFTER = 2.0


def seconds_late(state: TaskRow, *, stable: bool) -> float | None:
    """Return how late a task's due run time is, if a replica may stand in.

    :param stable: whether the database is available, and has been so for some time. Right after an
        outage, the replicas are about to claim the run times that came due in the outage.
    :return: seconds; ``None`` if no replica is to stand in
    """
    if state.due_at is None or state.due_in_pause or not stable:
        return None
    late_by = (state.database_time - state.due_at).total_seconds()
    return late_by if late_by >= STANDBY_AFTER else None


def may_stand_in(
    job: Any, schedule: str | None, state: TaskRow, late_by: float, now: datetime
) -> bool:
    """Return whether a job here may be run for a due time that another replica has missed.

    The job may be run if all of these conditions hold. The job's run times differ between replicas.
    The task's row has the schedule of this job. The due time is at most one period ago, and longer
    ago than the trigger's jitter and ``STANDBY_AFTER``. The job here is not put off, and its end
    date has not passed.

    :param job: the job as it is on this replica
    :param schedule: the job's schedule in canonical form
    :param late_by: seconds since the due time
    """
    trigger = job.trigger
    if not isinstance(trigger, IntervalTrigger) or has_shared_times(trigger):
        return False
    jitter = trigger.jitter or 0
    until_next = job.next_run_time.timestamp() - now.timestamp()
    is_put_off = until_next > trigger.interval_length + jitter  # as before its start date
    is_ended = trigger.end_date is not None and now > trigger.end_date
    is_in_time = jitter + STANDBY_AFTER <= late_by <= trigger.interval_length
    return is_in_time and state.schedule == schedule and not (is_put_off or is_ended)
