"""Which run time of a stored job is due, since when it is late, and which run time follows.

Also the first run time of a job that an operator resumes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from math import floor
from typing import Any

from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._lock.job_rows import DueRow, JobRow
from apscheduler_tasklock._lock.protocol_messages import MissedTimes
from apscheduler_tasklock._runs.missed_runs import IN_PAUSE, unclaimed, went_on
from apscheduler_tasklock._runs.trigger_times import (
    EndlessTriggerError,
    OutOfStepsError,
    Steps,
    count_until,
    first_run_time,
    following_run_time,
    nominal_time,
)
from apscheduler_tasklock.errors import TaskLockStateError
from apscheduler_tasklock.jobstore.definition import Definition, JobCodec
from apscheduler_tasklock.jobstore.stored_values import UnreadableError
from apscheduler_tasklock.jobstore.trust import AllowedFunctions
from apscheduler_tasklock.status import MissCause

# Limits the steps of one walk from a job's next run time to the last one that is due. If the walk
# reaches this limit, the next look for due jobs continues it.
MOST_STEPS = 10_000


@dataclass(frozen=True)
class Due:
    """A run time that is due.

    :ivar run_time: the run time
    :ivar following: the following run time; ``None`` if there is none
    :ivar due_at: the moment from which the lateness counts
    :ivar came: the earliest moment at which a free worker could have begun the run
    :ivar in_pause: whether the run time fell into a pause of its task
    """

    run_time: datetime
    following: datetime | None
    due_at: datetime
    came: datetime
    in_pause: bool

    def is_missed(self, grace: float | None) -> bool:
        """Return whether the run time is late by more than the grace time in seconds."""
        return grace is not None and self.came.timestamp() - self.due_at.timestamp() > grace


def due_run(
    found: DueRow,
    trigger: Any,
    now: datetime,
    *,
    coalesce: bool,
    grace: float | None,
    running_since: datetime,
) -> Due:
    """Return which run time of a job is due, and since when it is late.

    The lateness of a run time is the time from ``due_at`` until its run could have begun here. A
    run can begin when the scheduler runs, the job's last change was made, and the last run of its
    task is over. The wait for a free worker does not count.

    For example, a task runs from 10:00 to 10:17, and its job is due every 5 minutes. Then 10:15 is
    due from 10:17 on, and 10:05 and 10:10 are missed. Run times in a pause of the task are treated
    in the same way, with ``in_pause`` set. Run times that were due before a pause are treated as if
    the pause had not ended yet, so that they do not become one with those in it.

    :param now: the database's time, in the zone of the trigger
    :param grace: the seconds by which a run time may be late, or ``None`` for no limit
    :param running_since: when the scheduler began to run here, by the database's clock
    :raises EndlessTriggerError: the trigger does not find the next run time in a limited search
    :raises Exception: a custom trigger can raise anything
    """
    assert found.row.next_run_time is not None
    first = found.row.next_run_time.astimezone(now.tzinfo)
    begins = [first, running_since, found.changed_at]
    over_at = [first]
    first_in_pause = _paused_until(found, first)
    pauses = [pause.lower for pause in found.pauses if pause.lower and first < pause.lower]
    # A run time at the begin of a pause is in the pause.
    before_pauses = [each - timedelta(microseconds=1) for each in pauses]
    until = min([now, *before_pauses], key=datetime.timestamp).astimezone(now.tzinfo)
    if found.ran_until is not None:
        begins.append(found.ran_until)
        if _came_meanwhile(found, first):
            over_at.append(found.ran_until)
    if first_in_pause is not None:
        over_at.append(first_in_pause)
    begin = min(now, _latest(begins), key=datetime.timestamp)
    # A run time that is late by more than the grace time is missed. A run time that is run again is
    # not missed, because it is due only from the end of the last run on.
    if grace is not None and not found.runs_again:
        over_at.append(begin - timedelta(seconds=grace))
    missed_before = min(until, _latest(over_at), key=datetime.timestamp)
    run_time, following = due_run_time(
        trigger, first, until, coalesce=coalesce, missed_before=missed_before.astimezone(now.tzinfo)
    )
    due_from = [run_time]
    if found.ran_until is not None and (found.runs_again or _came_meanwhile(found, run_time)):
        due_from.append(found.ran_until)
    paused_until = _paused_until(found, run_time)
    if paused_until is not None:
        due_from.append(paused_until)
    due_at = _latest(due_from)
    return Due(run_time, following, due_at, _latest([begin, due_at]), paused_until is not None)


def _paused_until(found: DueRow, moment: datetime) -> datetime | None:
    """Return the end of the pauses in which the moment was; ``None`` if it was in none."""
    ends = [pause.upper for pause in found.pauses if moment in pause and pause.upper]
    return _latest(ends) if ends else None


def _came_meanwhile(found: DueRow, run_time: datetime) -> bool:
    """Return whether a run time came while its task ran."""
    if found.ran_since is None or found.ran_until is None:
        return False
    return found.ran_since <= run_time <= found.ran_until


def _latest(moments: list[datetime]) -> datetime:
    # Timestamps are used, because Python compares two datetimes of one zone by their local times.
    return max(moments, key=datetime.timestamp)


def due_run_time(
    trigger: Any,
    first: datetime,
    now: datetime,
    *,
    coalesce: bool,
    missed_before: datetime | None = None,
) -> tuple[datetime, datetime | None]:
    """Return the run time that is to be run, and the following run time or ``None``.

    :param first: the job's next run time, which is due
    :param now: the database's time
    :param coalesce: whether to return the last due run time in place of all due run times.
        Otherwise the first one is returned, and the following one may be due, too.
    :param missed_before: of the run times up to this moment, all but the last are missed, and are
        not returned. Not used with ``coalesce``.
    :raises EndlessTriggerError: the trigger does not find the next run time in a limited search
    :raises Exception: a custom trigger can raise anything
    """
    latest = now if coalesce else missed_before
    if latest is None or latest.timestamp() <= first.timestamp():
        return first, following_run_time(trigger, first, now)
    run_time = first
    if type(trigger) is IntervalTrigger and not trigger.jitter:
        run_time = _last_of_interval(trigger, first, latest)
    following, steps = following_run_time(trigger, run_time, now), Steps(MOST_STEPS)
    while following is not None and following.timestamp() <= latest.timestamp():
        try:
            later = following_run_time(trigger, following, now, steps)
        except OutOfStepsError:  # the next look for due jobs continues from this run time
            break
        run_time, following = following, later
    return run_time, following


def _last_of_interval(trigger: Any, first: datetime, latest: datetime) -> datetime:
    """Return the last run time of an interval up to a moment, by one division."""
    if trigger.end_date is not None and trigger.end_date.timestamp() < latest.timestamp():
        latest = trigger.end_date
    passed = floor((latest.timestamp() - first.timestamp()) / trigger.interval_length)
    if passed < 1:
        return first
    # In UTC, because local times skip or repeat an hour when clocks change.
    last: datetime = first.astimezone(timezone.utc) + passed * trigger.interval
    return last.astimezone(first.tzinfo)


def passed_run_times(
    found: DueRow, trigger: Any, run_time: datetime, now: datetime
) -> tuple[MissedTimes, ...]:
    """Return the run times before a due one that nobody runs, because the job moves past them.

    Those in a pause of the task come first. If the walk takes too long, or a custom trigger raises
    an error, fewer are returned, because they are only told.

    :param run_time: the run time that is due
    :param now: the database's time
    """
    assert found.row.next_run_time is not None
    first = found.row.next_run_time.astimezone(run_time.tzinfo)
    if not _is_before(first, run_time):
        return ()
    passed: list[MissedTimes] = []
    following: datetime | None = first
    with suppress(Exception):
        until = nominal_time(trigger, run_time)
        if type(trigger) is IntervalTrigger and trigger.jitter:
            until -= trigger.interval / 2  # because the run time itself may come late by its jitter
        paused_until = _paused_until(found, first)
        if paused_until is not None and _is_before(first, until):
            count, last, following = count_until(trigger, first, min(paused_until, until))
            passed.append(MissedTimes(first, last, count, MissCause.PAUSED, IN_PAUSE))
        if following is not None and _is_before(following, until):
            first = following
            count, last, _ = count_until(trigger, first, until)
            cause, reason = MissCause.UNASKED, unclaimed(first, now)
            if _came_meanwhile(found, first) and _came_meanwhile(found, last):
                assert found.ran_since is not None
                cause, reason = MissCause.RUNNING, went_on(found.ran_since)
            passed.append(MissedTimes(first, last, count, cause, reason))
    return tuple(passed)


def _is_before(one: datetime, other: datetime) -> bool:
    return one.timestamp() < other.timestamp()


def resumed_run_time(row: JobRow, now: datetime) -> datetime:
    """Return the first run time of a job from now on, by the trigger in its row.

    The row's signature is not verified, because an operator has no secret. A row that somebody has
    forged gets a next run time, but is not run.

    :param now: the database's time
    :raises TaskLockStateError: the trigger cannot be read here, or has no run time from now on
    """
    try:
        trigger = JobCodec(AllowedFunctions(None)).decode_trigger(Definition.of(row))
        run_time = first_run_time(trigger, now.astimezone(timezone.utc))
    except (UnreadableError, EndlessTriggerError) as error:
        reason = f"its run times are unknown: {error}"
    else:
        if run_time is not None:
            return run_time
        reason = "its trigger has no run time from now on"
    raise TaskLockStateError(
        f"job {row.id!r} is not resumed: {reason}",
        remedy="`apscheduler-tasklock jobs move` gives it a run time, and `jobs remove` removes it",
        on_page="move the job to give it a run time, or remove it",
    )
