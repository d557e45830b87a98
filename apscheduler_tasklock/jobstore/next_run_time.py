"""Which run time of a stored job is due, since when it is late, and which run time follows.

Also the first run time of a job that an operator resumes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._lock.job_rows import DueRow, JobRow
from apscheduler_tasklock._lock.protocol_messages import MissedTimes
from apscheduler_tasklock._runs.missed_runs import IN_PAUSE, unclaimed, went_on
from apscheduler_tasklock._runs.trigger_times import (
    EndlessTriggerError,
    count_until,
    first_run_time,
    following_run_time,
    is_stock,
    last_run_time_until,
    nominal_time,
)
from apscheduler_tasklock.errors import TaskLockStateError
from apscheduler_tasklock.jobstore.definition import Definition, JobCodec
from apscheduler_tasklock.jobstore.stored_values import UnreadableError
from apscheduler_tasklock.jobstore.trust import AllowedFunctions
from apscheduler_tasklock.status import MissCause

_INSTANT = timedelta(microseconds=1)


@dataclass(frozen=True)
class Due:
    """A run time that is due.

    :ivar run_time: the run time
    :ivar following: the following run time; ``None`` if there is none
    :ivar due_at: the moment from which the lateness counts
    :ivar came: the earliest moment at which a free worker could have begun the run
    :ivar in_pause: whether the run time fell into a pause of its task
    :ivar is_passed: whether the run time is not run, because later ones that are due, too, could
        not be reached by one walk
    """

    run_time: datetime
    following: datetime | None
    due_at: datetime
    came: datetime
    in_pause: bool
    is_passed: bool = False

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
    before_pauses = [each - _INSTANT for each in pauses]
    until = min([now, *before_pauses], key=datetime.timestamp)
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
    if not coalesce:  # all but the last one up to this moment are missed
        until = min(until, _latest(over_at), key=datetime.timestamp)
    until = until.astimezone(now.tzinfo)
    run_time, following = due_run_time(trigger, first, now, until)
    # A trigger of APScheduler's own that takes too many steps is run, because its next search might
    # get no further.
    is_passed = not is_stock(trigger) and following is not None and not _is_before(until, following)
    due_from = [run_time]
    if found.ran_until is not None and (found.runs_again or _came_meanwhile(found, run_time)):
        due_from.append(found.ran_until)
    paused_until = _paused_until(found, run_time)
    if paused_until is not None:
        due_from.append(paused_until)
    due_at = _latest(due_from)
    came, in_pause = _latest([begin, due_at]), paused_until is not None
    return Due(run_time, following, due_at, came, in_pause, is_passed)


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
    trigger: Any, first: datetime, now: datetime, until: datetime
) -> tuple[datetime, datetime | None]:
    """Return the last run time up to a moment, and the following run time or ``None``.

    :param first: the job's next run time, which is due; it is returned if none follows it up to the
        moment
    :param now: the database's time
    :param until: the moment
    :raises EndlessTriggerError: the trigger does not find the next run time in a limited search
    :raises Exception: a custom trigger can raise anything
    """
    run_time = last_run_time_until(trigger, first, until)
    return run_time, following_run_time(trigger, run_time, now)


def misfires_from(found: DueRow, trigger: Any, run_time: datetime) -> datetime:
    """Return the first of the run times that are misfires if the due one is one.

    Run times before it are misfires, too, if they neither fell into a pause of the task nor came
    while it ran.

    :param run_time: the run time that is due
    :raises Exception: a custom trigger can raise anything
    """
    assert found.row.next_run_time is not None
    first = found.row.next_run_time.astimezone(run_time.tzinfo)
    paused_until = _paused_until(found, first)
    if paused_until is not None:
        until = min(paused_until, run_time, key=datetime.timestamp) - _INSTANT
        last = last_run_time_until(trigger, first, until.astimezone(run_time.tzinfo))
        first = following_run_time(trigger, last, run_time) or run_time
    if _came_meanwhile(found, first) and _came_meanwhile(
        found, last_run_time_until(trigger, first, run_time - _INSTANT)
    ):
        return run_time
    return min(first, run_time, key=datetime.timestamp)


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
