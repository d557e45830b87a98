"""Stories: what is known of a task around a moment, put together from its row and its history."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from apscheduler_tasklock.status import (
    ReplicaStatus,
    Run,
    Story,
    TaskState,
    TaskStatus,
    Verdict,
)


def story_of(
    task: TaskStatus,
    entries: Sequence[Run],
    replicas: Sequence[ReplicaStatus],
    at: datetime,
) -> Story:
    """Return what is known of a task around a moment.

    :param entries: the task's entries in the run history, in any order
    :param replicas: all replicas
    """
    actions = _in_order(each for each in entries if each.kind == "operator")
    misses = _in_order(each for each in entries if each.outcome == "missed")
    runs = _in_order(
        each for each in entries if each.kind != "operator" and each.outcome != "missed"
    )
    miss = _miss_until(misses, at)
    run = _last_until(runs, at)
    known = [(time_of(run), Verdict.RAN)] if run is not None else []
    if miss is not None:
        known.append((min(at, miss.last_scheduled_at or time_of(miss)), Verdict.MISSED))
    is_due = task.state in (TaskState.LATE, TaskState.OVERDUE)
    if is_due and task.due_at is not None and not _is_of(miss, task.due_at):
        known.append((task.due_at, Verdict.DUE))
    begun_at = _begun_at(task)
    if begun_at is not None:
        known.append((begun_at, Verdict.RUNNING))
    # A dead run in the history may have the same run time as the current run, which has taken it
    # over. Then the story is about the current run.
    order = list(Verdict)
    known = [(time, verdict) for time, verdict in known if time <= at]
    when, verdict = max(
        known, key=lambda each: (each[0], -order.index(each[1])), default=(at, Verdict.UNKNOWN)
    )
    its_runs = [each for each in runs if verdict in _WITH_RUNS and time_of(each) == when]
    others = [each for each in runs if each not in its_runs]
    before, after = _last_until(others, when), _first_after(others, when)
    begin = None if before is None else min(when, time_of(before))
    return Story(
        task=task,
        at=at,
        verdict=verdict,
        scheduled_at=_scheduled_at(verdict, when, miss),
        runs=tuple(its_runs),
        miss=miss if verdict is Verdict.MISSED else None,
        before=before,
        after=after,
        actions=tuple(_around(actions, begin, None if after is None else time_of(after))),
        replicas=tuple(each for each in replicas if task.name in each.tasks),
        history_begins_at=_begins_at(runs, misses),
    )


_WITH_RUNS = (Verdict.RAN, Verdict.RUNNING)
# Limits the seconds by which a due time that a replica has registered is later than its run time,
# because the statement took some time to arrive.
_SLACK = 1.0


def _is_of(miss: Run | None, due_at: datetime) -> bool:
    """Return whether a due time is that of a missed run time, whose entry tells the reason."""
    if miss is None:
        return False
    missed_at = miss.last_scheduled_at or time_of(miss)
    return abs(due_at.timestamp() - missed_at.timestamp()) < _SLACK


def _scheduled_at(verdict: Verdict, when: datetime, miss: Run | None) -> datetime | None:
    """Return the run time that a story is about.

    Of several missed run times the first and the last one are known, and not those between them.
    """
    if verdict is Verdict.UNKNOWN:
        return None
    if verdict is Verdict.MISSED and miss is not None and when != miss.last_scheduled_at:
        return miss.scheduled_at
    return when


def time_of(entry: Run) -> datetime:
    """Return the run time of an entry; if it has none, such as a hold, when it began."""
    if entry.kind == "operator":
        return entry.started_at
    return entry.scheduled_at or entry.started_at


def _in_order(entries: Iterable[Run]) -> list[Run]:
    return sorted(entries, key=lambda each: (time_of(each), each.started_at))


def _last_until(entries: Sequence[Run], moment: datetime) -> Run | None:
    return next((each for each in reversed(entries) if time_of(each) <= moment), None)


def _miss_until(misses: Sequence[Run], moment: datetime) -> Run | None:
    """Return the missed run times of which one is the last before a moment, or may be.

    The entry of a pause may enclose a run time for which another replica has told another cause.
    """
    earlier = [each for each in misses if time_of(each) <= moment]
    return max(
        earlier,
        key=lambda each: (min(moment, each.last_scheduled_at or time_of(each)), time_of(each)),
        default=None,
    )


def _first_after(entries: Sequence[Run], moment: datetime) -> Run | None:
    return next((each for each in entries if time_of(each) > moment), None)


def _begun_at(task: TaskStatus) -> datetime | None:
    """Return the run time of the run that goes on or is dead; ``None`` if the last run is over."""
    if task.started_at is None or task.finished_at is not None:
        return None
    has_run_time = task.kind in ("schedule", "takeover", "retry")
    return task.scheduled_at if has_run_time and task.scheduled_at else task.started_at


def _around(actions: Sequence[Run], begin: datetime | None, end: datetime | None) -> list[Run]:
    """Return the actions between two times, and the pauses that were in force at the first one.

    :param begin: the first time; ``None``: all earlier actions are returned
    """
    if begin is None:
        return [each for each in actions if end is None or each.started_at < end]
    earlier = [each for each in actions if each.started_at < begin]
    in_force = [
        each
        for each in earlier
        if each.outcome in ("paused", "job-paused")
        and (each.until is None or each.until > begin)
        and not any(_ends(later, each) for later in earlier)
    ]
    later = [each for each in actions if each.started_at >= begin]
    return in_force + [each for each in later if end is None or each.started_at < end]


def _ends(action: Run, pause: Run) -> bool:
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


def _begins_at(runs: Sequence[Run], misses: Sequence[Run]) -> datetime | None:
    """Return the time from which the history is complete, as far as it shows.

    Most entries are of runs that ended well. So these are overwritten sooner than the others, and
    the history is complete from the oldest of these on.
    """
    well = [each for each in runs if each.outcome == "ok"]
    return min((time_of(each) for each in (well or [*runs, *misses])), default=None)
