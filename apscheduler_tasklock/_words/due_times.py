"""Due times: run times that have come, that nobody has begun, and that no entry tells of.

A missed run time is noted when it is overdue, and not at all if the replica that knows the reason
dies before. Until then it is known from the schedule in the task's row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import groupby, islice

from apscheduler_tasklock._lock.schedules import NO_FORM
from apscheduler_tasklock._lock.statements.history import ACTIONS
from apscheduler_tasklock._words.next_run_times import run_times_between
from apscheduler_tasklock.status import (
    DueTimes,
    MissCause,
    Pause,
    ReplicaState,
    ReplicaStatus,
    Run,
    TaskStatus,
)

# Limits how many run times are computed. If there are more, they are not counted.
MOST_DUE = 1000
# The kinds of runs that have a run time.
SCHEDULED = ("schedule", "takeover", "retry")
# Limits the time by which a registered due time is later than its run time, because the statement
# took some time to arrive.
SLACK = timedelta(seconds=1)
# Replicas that have not been seen for this time are removed.
_REPLICAS_KEPT = timedelta(hours=1)
# Limits how many replicas are named in a reason.
_MOST_NAMED = 3
_INSTANT = timedelta(milliseconds=1)


@dataclass(frozen=True)
class Known:
    """What is known of a task, for its due times until a moment.

    :ivar runs: its runs that are over
    :ivar misses: its missed run times
    :ivar actions: what operators did, and changes of its schedule
    :ivar replicas: the replicas that have it
    :ivar at: the moment
    :ivar now: the time of the read
    :ivar complete_since: since when the entries of runs are complete; ``None``: there are none
    """

    task: TaskStatus
    runs: Sequence[Run]
    misses: Sequence[Run]
    actions: Sequence[Run]
    replicas: Sequence[ReplicaStatus]
    at: datetime
    now: datetime
    complete_since: datetime | None


def due_times(known: Known) -> tuple[tuple[DueTimes, ...], datetime | None]:
    """Return the due times after the last entry until a moment.

    :return: these, the earlier first, and the time after which the run times are not known;
        ``None``: they are known
    """
    try:
        return _due_times(known)
    except OverflowError:  # anybody may have written the row, with times that Python does not have
        return (), None


def _due_times(known: Known) -> tuple[tuple[DueTimes, ...], datetime | None]:
    task = known.task
    if task.schedule is None or task.kind == "hold":
        return (), None
    last, following = _neighbours(known)
    due_at = task.due_at if task.due_at is not None and task.due_at <= known.at else None
    changed_at = _changed_at(known.actions)
    if changed_at is not None and changed_at > known.at:  # the moment has an older schedule
        return (), last
    since = _since(known, last, changed_at)
    period, is_exact = _period(task), True
    times = _exact_times(known, since, due_at)
    if times is not None:
        times = _with_moved(task, times, last, due_at)
    else:
        is_exact = False
        times = _steps(since, following, due_at, task.due_at, known.at, period)
        # A registered due time is later than the missed run time whose entry tells the reason.
        times = [each for each in times if last is None or each - last >= SLACK]
    not_known_after = None
    if not is_exact and period is None:
        not_known_after = max(filter(None, (due_at, last)), default=None)
    elif since is None and due_at is None and (following or last != task.scheduled_at):
        not_known_after = last
    times = _begun_by_nobody(known, times, last)
    return tuple(_told(known, times, following, period, is_exact=is_exact)), not_known_after


def _neighbours(known: Known) -> tuple[datetime | None, datetime | None]:
    """Return the last run time until the moment that was run or missed, and the first one after."""
    task, at = known.task, known.at
    runs = [run.scheduled_at for run in known.runs if run.kind in SCHEDULED and run.scheduled_at]
    if task.kind in SCHEDULED and task.started_at is not None and task.scheduled_at is not None:
        runs.append(task.scheduled_at)
    spans = [(each, each) for each in runs]
    spans += [
        (miss.scheduled_at, miss.last_scheduled_at or miss.scheduled_at)
        for miss in known.misses
        if miss.scheduled_at is not None
    ]
    before = [min(at, last) for first, last in spans if first <= at]
    after = [first for first, _ in spans if first > at]
    return max(before, default=None), min(after, default=None)


def _since(known: Known, last: datetime | None, changed_at: datetime | None) -> datetime | None:
    """Return the last run time, if all later ones that were run or missed are known.

    ``None`` also if the task had another schedule or time zone then, or the application had set
    that run time.
    """
    task = known.task
    if last is None or (changed_at is not None and changed_at > last):
        return None
    is_of_row = last == task.scheduled_at
    if not is_of_row and (known.complete_since is None or last < known.complete_since):
        return None
    is_off = run_times_between(task, last - SLACK, last + SLACK, 1) == []
    return None if is_off else last


def _changed_at(actions: Sequence[Run]) -> datetime | None:
    """Return since when the task has the schedule and the next run time that its row has.

    Operators' actions and changes of the schedule overwrite each other, so before the oldest of
    many of them nothing is known of changes.
    """
    own = [each for each in actions if not each.task.endswith("*")]
    changes = [each.started_at for each in own if each.outcome in ("rescheduled", "job-moved")]
    if len(own) >= ACTIONS:
        changes.append(min(each.started_at for each in own))
    return max(changes, default=None)


def _exact_times(
    known: Known, since: datetime | None, due_at: datetime | None
) -> list[datetime] | None:
    """Return the schedule's own times; ``None`` if they are not exactly known.

    :param since: the run time after which they are wanted; ``None``: from ``due_at`` on
    """
    if since is not None:
        begin = since + _INSTANT
    elif due_at is not None:
        begin = due_at - SLACK - timedelta(seconds=_jitter(known.task))
    else:
        begin = known.at + _INSTANT  # none, if they are exactly known
    return run_times_between(known.task, begin, known.at, MOST_DUE)


def _with_moved(
    task: TaskStatus, times: list[datetime], last: datetime | None, due_at: datetime | None
) -> list[datetime]:
    """Return the schedule's times with the row's due time, if the application has set another."""
    if due_at is None or (last is not None and due_at - last < SLACK):
        return times
    earliest = due_at - SLACK - timedelta(seconds=_jitter(task))
    is_there = any(earliest <= each <= due_at + SLACK for each in times)
    return times if is_there or len(times) > MOST_DUE else sorted([*times, due_at])


def _steps(
    since: datetime | None,
    following: datetime | None,
    due_at: datetime | None,
    next_at: datetime | None,
    at: datetime,
    period: timedelta | None,
) -> list[datetime]:
    """Return times in steps of the period, near which a replica had a run time of its own.

    A time is left out if the run after it came within a period, because another replica may have
    run it later.

    :param next_at: when the next run is due
    """
    first = due_at
    if first is None and since is not None and period is not None:
        first = since + period
    if first is None or first > at:
        return []
    if period is None:
        return [first]
    count = int((at - first) / period) + 1
    times = [first + step * period for step in range(min(count, MOST_DUE + 1))]
    if due_at is not None:
        return times
    end = following or next_at
    return times if end is None else [each for each in times if each + period <= end + SLACK]


def _period(task: TaskStatus) -> timedelta | None:
    """Return the period of an interval; ``None`` for other schedules."""
    try:
        if task.schedule["type"] != "interval":
            return None
        days, seconds, microseconds = task.schedule["length"]
        period = timedelta(days=days, seconds=seconds, microseconds=microseconds)
    except NO_FORM:
        return None
    return period if period > timedelta(0) else None


def _jitter(task: TaskStatus) -> float:
    """Return by how many seconds jitter moves the task's run times at most."""
    try:
        return float(task.schedule["jitter"] or 0)
    except NO_FORM:
        return 0.0


def _is_due(task: TaskStatus, run_time: datetime) -> bool:
    """Return whether the row says that a run time is due. Its due time may have jitter."""
    latest = run_time + SLACK + timedelta(seconds=_jitter(task))
    return task.due_at is not None and task.due_at <= latest


def _begun_by_nobody(known: Known, times: list[datetime], last: datetime | None) -> list[datetime]:
    """Leave out times that the window of the last run takes in, and the one that is to come."""
    task, window_until = known.task, _window_until(known, last)
    if task.due_at is not None and task.due_at > known.at:  # it may be moved by its jitter
        next_from = task.due_at - SLACK - timedelta(seconds=_jitter(task))
        times = [each for each in times if each < next_from]
    if window_until is None:
        return times
    return [each for each in times if each >= window_until or _is_due(task, each)]


def _window_until(known: Known, last: datetime | None) -> datetime | None:
    """Return until when the window of the last run may have taken in further run times."""
    if last is None:
        return None
    if last == known.task.scheduled_at:
        return known.task.window_until
    option = known.task.options.get("min_lock")
    is_run = any(run.scheduled_at == last for run in known.runs)
    if is_run and option is not None and isinstance(option.value, (int, float)):
        return last + timedelta(seconds=option.value)
    return None


# ---- what is known of their causes ---------------------------------------------------------------


def _told(
    known: Known,
    times: Sequence[datetime],
    following: datetime | None,
    period: timedelta | None,
    *,
    is_exact: bool,
) -> Iterable[DueTimes]:
    """Yield due times with what is known of their causes; those of one cause together."""
    task, pauses = known.task, _pauses(known)
    has_more = len(times) > MOST_DUE
    grace = None
    if task.overdue_at is not None and task.due_at is not None:
        grace = task.overdue_at - task.due_at + (timedelta(0) if is_exact else period or SLACK)
    explained = [
        (each, _is_due(task, each), *_cause(known, pauses, each))
        for each in islice(times, MOST_DUE)
    ]
    for (is_due, cause, reason), group in groupby(explained, key=lambda each: each[1:]):
        of_group = [each for each, *_ in group]
        first, last = of_group[0], of_group[-1]
        is_known = cause in (MissCause.PAUSED, MissCause.RUNNING)
        if task.due_at is None and following is None and not is_known:
            continue  # nobody knows when it is due, as of a job that was removed
        is_last = has_more and last == explained[-1][0]
        yield DueTimes(
            first=first,
            last=last,
            run_times=None if is_last else len(of_group),
            is_exact=is_exact or last == task.due_at,
            is_due=is_due,
            cause=None if cause is None else cause.value,
            reason=reason,
            noted_from=first + grace
            if grace is not None and _is_to_be_noted(known, first)
            else None,
        )


def _is_to_be_noted(known: Known, run_time: datetime) -> bool:
    """Return whether there is a history, and a live replica may know why nobody has begun it."""
    has_history = known.runs or known.misses or known.task.finished_at is None
    lived = (each.alive and each.started_at <= run_time for each in known.replicas)
    return bool(has_history) and any(lived)


def _cause(
    known: Known, pauses: Sequence[Pause], run_time: datetime
) -> tuple[MissCause | None, str | None]:
    for pause in pauses:
        if pause.since <= run_time and (pause.until is None or run_time < pause.until):
            why = f": {pause.reason}" if pause.reason else ""
            if not pause.by:  # of a stored job, such as one that its application has paused
                says = f"its stored job is paused, changed last at {_moment(pause.since)}"
                return MissCause.PAUSED, says
            return MissCause.PAUSED, f"paused by {pause.by} since {_moment(pause.since)}{why}"
    in_the_way = _run_in_the_way(known, run_time)
    if in_the_way is not None:
        return MissCause.RUNNING, in_the_way
    absent = absent_in_words(known.replicas, run_time, run_time, known.now)
    return (MissCause.UNASKED, absent) if absent else (None, None)


def absent_in_words(
    having: Sequence[ReplicaStatus], first: datetime, last: datetime, now: datetime
) -> str:
    """Return that no replica could begin runs of a task between two times; ``""`` if one could.

    :param having: the replicas that have the task; those that died long ago have no row
    """
    if first <= now - _REPLICAS_KEPT:
        return ""
    began = [each for each in having if each.started_at <= last]
    lived = [each for each in began if each.alive or first <= each.seen_at]
    if not having or any(not _stopped_by(each, first) for each in lived):
        return ""
    if lived:
        return f"each live replica that had it was stopping ({_named(lived)})"
    return f"no live replica had it ({_named(began or having)})"


def _stopped_by(replica: ReplicaStatus, moment: datetime) -> bool:
    return replica.stopping_since is not None and replica.stopping_since <= moment


def _run_in_the_way(known: Known, run_time: datetime) -> str | None:
    task = known.task
    # Also of a run that still goes on, because a lock that has ended is in nobody's way.
    is_open = task.finished_at is None and run_time < task.locked_until
    if task.started_at is not None and is_open and task.started_at <= run_time:
        what = _what(task.kind, task.scheduled_at)
        return f"{what} on {task.holder} (token {task.token}) is in the way"
    for run in known.runs:
        if run.started_at <= run_time < run.ended_at:
            what = _what(run.kind, run.scheduled_at)
            return f"{what} on {run.replica} (token {run.token}) was in the way"
    return None


def _what(kind: str | None, scheduled_at: datetime | None) -> str:
    named = {"manual": "its manual run", "hold": "a hold of its lock"}
    if kind in named or scheduled_at is None:
        return named.get(kind or "", "its run")
    return f"its run of {_moment(scheduled_at)}"


def _pauses(known: Known) -> list[Pause]:
    """Return the pauses of the task and of its job, also those that have ended."""
    found = list(known.task.pauses)
    for each in known.actions:
        if each.outcome in ("paused", "job-paused"):
            ends = [later.started_at for later in known.actions if ends_pause(later, each)]
            until = min((*ends, *filter(None, [each.until])), default=None)
            found.append(Pause(each.by or "nobody", each.started_at, until, each.reason))
    return found


def ends_pause(action: Run, pause: Run) -> bool:
    """Return whether an action took a pause out.

    A resumption has a reason only if it took out the pauses of others, too. A job has one pause,
    which anybody ends.
    """
    if pause.outcome == "job-paused":
        is_end = action.outcome in ("job-resumed", "job-moved", "job-removed")
        return is_end and action.started_at >= pause.started_at
    is_later = action.outcome == "resumed" and action.started_at >= pause.started_at
    takes_it = action.by == pause.by or action.reason is not None
    return is_later and takes_it and action.task == pause.task


_HOW = {ReplicaState.DIED: "has died", ReplicaState.STOPPED: "has stopped"}


def _named(replicas: Sequence[ReplicaStatus]) -> str:
    newest = sorted(replicas, key=lambda each: each.seen_at, reverse=True)
    more = len(newest) - _MOST_NAMED
    words = ", ".join(map(_named_one, newest[:_MOST_NAMED]))
    return words + (f" and {more} more" if more > 0 else "")


def _named_one(replica: ReplicaStatus) -> str:
    name, since = replica.replica_id, replica.stopping_since
    stops = "" if since is None else f", stopping since {_moment(since)}"
    if replica.alive:
        return f"{name} started at {_moment(replica.started_at)}{stops}"
    how = _HOW.get(replica.state, "is silent")
    return f"{name} {how}{stops}, last seen at {_moment(replica.seen_at)}"


def _moment(moment: datetime) -> str:
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S UTC}"
