"""Stories: what is known of a task around a moment, such as why it did not run, and its words.

A story is put together from the task's row, its entries in the run history, and the replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from apscheduler_tasklock._lock.outcomes import CORRECTED, outcome_named
from apscheduler_tasklock._lock.statements.misses import MISSES
from apscheduler_tasklock._words.due_times import (
    SCHEDULED,
    Known,
    absent_in_words,
    due_times,
    ends_pause,
)
from apscheduler_tasklock._words.formats import Formats, for_reader
from apscheduler_tasklock._words.replicas import none_begins
from apscheduler_tasklock._words.runs import (
    action_in_words,
    did_in_words,
    error_in_words,
    miss_in_words,
    took_in_words,
)
from apscheduler_tasklock._words.tasks import pause_in_words
from apscheduler_tasklock.status import (
    DueTimes,
    MissCause,
    Pause,
    ReplicaStatus,
    Run,
    RunningRun,
    Story,
    TaskState,
    TaskStatus,
    Verdict,
)

# What became of a run that nobody has closed, by its outcome. After an outage, one whose lease has
# ended may go on, or may have ended: its replica could report neither.
_OPEN = {None: "goes on", "cut": outcome_named("cut").ended}
_SILENT = "may be dead, because its replica has died or is silent"
_SECOND, _INSTANT = timedelta(seconds=1), timedelta(microseconds=1)

# A run whose lease has ended may have ended, too: after an outage its release may still wait.
_LEASE_ENDED = "has not renewed its lease"
_DEAD = f"{_LEASE_ENDED} (it died, or its end has not been written yet)"

_NOT_NOTED = "no reason is noted so far"
_NO_LONGER_KEPT = "the reasons of that time are no longer kept"

# The runs that have no run time, by their kinds.
_WITHOUT_RUN_TIME = {"manual": "a manual run", "hold": "a hold"}


def story_of(
    task: TaskStatus,
    entries: Sequence[Run],
    replicas: Sequence[ReplicaStatus],
    at: datetime,
    now: datetime | None = None,
    kept_since: datetime | None = None,
) -> Story:
    """Return what is known of a task around a moment.

    :param entries: the task's entries in the run history, in any order
    :param replicas: all replicas
    :param now: the time of the read; ``None``: it is the moment
    :param kept_since: the run time since which all of its runs are kept; ``None``: none was
        overwritten
    """
    now = now or at
    # Moments are written in seconds, and a run time may be later by what a statement took.
    until = max(at, min(now, at.replace(microsecond=0) + _SECOND - _INSTANT))
    actions = _in_order(each for each in entries if each.kind == "operator")
    misses = _in_order(each for each in entries if each.outcome == "missed")
    runs = _in_order(
        each for each in entries if each.kind != "operator" and each.outcome != "missed"
    )
    having = tuple(each for each in replicas if task.name in each.tasks)
    complete_since = (kept_since or min(map(time_of, runs))) if runs else None
    due, not_known_after = due_times(
        Known(task, runs, misses, actions, having, until, now, complete_since)
    )
    miss = _miss_until(misses, until)
    run = _last_until(runs, until)
    known = [(time_of(run), Verdict.RAN)] if run is not None else []
    if miss is not None:
        known.append((min(until, miss.last_scheduled_at or time_of(miss)), Verdict.MISSED))
    begun_at = _begun_at(task)
    if begun_at is not None:
        known.append((begun_at, Verdict.RUNNING))
    # A dead run in the history may have the same run time as the current run, which has taken it
    # over. Then the story is about the current run.
    order = list(Verdict)
    known = [(time, verdict) for time, verdict in known if time <= until]
    when, verdict = max(
        known, key=lambda each: (each[0], -order.index(each[1])), default=(at, Verdict.UNKNOWN)
    )
    if due:  # also if a manual run or a hold came after it, because neither is its run
        when, verdict = due[-1].last, Verdict.DUE
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
        replicas=having,
        history_begins_at=complete_since or min(map(time_of, misses), default=None),
        read_at=now,
        running=tuple(_running_at(task, runs, replicas, until)),
        due=due,
        not_known_after=not_known_after,
        misses_begin_at=min(map(time_of, misses)) if len(misses) >= MISSES else None,
    )


_WITH_RUNS = (Verdict.RAN, Verdict.RUNNING)


def _running_at(
    task: TaskStatus, runs: Sequence[Run], replicas: Sequence[ReplicaStatus], at: datetime
) -> list[RunningRun]:
    """Return the runs that had begun at a moment and go on, also those whose lock is lost."""
    found = {each.token: each for each in task.stuck}
    for replica in replicas:
        if replica.alive:
            found.update(
                {run.token: run for run in replica.running if run.task == task.name and run.lost}
            )
    # The outcome of a run that goes on is not known. The state may tell of a pause instead.
    is_over = task.finished_at is not None or task.outcome is not None
    # The history is read after the row.
    is_over |= any(run.token == task.token and run.outcome != "overtaken" for run in runs)
    if task.started_at is not None and not is_over:
        found[task.token] = RunningRun(task.name, task.token, task.holder, task.started_at)
    begun = [run for run in found.values() if run.since <= at]
    return sorted(begun, key=lambda run: run.since)


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
    has_run_time = task.kind in SCHEDULED
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
        and not any(ends_pause(later, each) for later in earlier)
    ]
    later = [each for each in actions if each.started_at >= begin]
    return in_force + [each for each in later if end is None or each.started_at < end]


@dataclass(frozen=True)
class StoryLines:
    """A story in words.

    :ivar headline: the task, the moment and the verdict
    :ivar verdict: what became of the run time that the story is about, a line for each fact
    :ivar sections: what else is known, by what the lines are about, without empty sections:
        ``"before"``, ``"after"``, ``"operators"``, ``"replicas"`` and ``"history"``
    """

    headline: str
    verdict: Sequence[str]
    sections: Mapping[str, Sequence[str]]


def story_lines(story: Story, formats: Formats) -> StoryLines:
    """Return a story in words."""
    sections = {
        "before": _runs([story.before], formats),
        "after": _runs([story.after], formats),
        "operators": [_action(each, story.task, formats) for each in story.actions],
        "replicas": [
            f"{each.replica_id} {each.state_in_words}, started {formats.moment(each.started_at)}"
            for each in story.replicas
        ],
        "history": _history(story, formats),
    }
    return StoryLines(
        f"{story.task.name} at {formats.moment(story.at)}: {_headline(story, formats)}",
        _verdict(story, formats),
        {name: lines for name, lines in sections.items() if lines},
    )


def _headline(story: Story, formats: Formats) -> str:
    """Return a sentence on what goes on, and on the last run time until the moment."""
    others = [run for run in story.running if not _is_told(run, story)]
    words = [_goes_on(run, story.task, formats) for run in others]
    if _is_dead_before(story):
        became = _became_of_open(story.task, _DEAD)
        words.append(f"{_its_run(story.task, formats)} {became}")
    last = _last_run_time(story, formats)
    if story.verdict is Verdict.RUNNING:
        words, last = [last, *words], ""
    if (waits := _waiting_run(story, formats)) is not None:
        words.insert(0, waits)
    if _pauses_now(story):
        words.append("it is paused now")
    if story.after is None and story.replicas and (none := none_begins(story.replicas)):
        words.append(f"{none} now")
    elif story.after is None and story.task.gone:
        words.append("no live replica has it now")
    return ", and ".join(filter(None, [*words, last]))


def _waiting_run(story: Story, formats: Formats) -> str | None:
    """Return that a manual run which was asked for by the moment has not begun."""
    task = story.task
    if task.requested_by is None or task.requested_at is None:
        return None
    if task.requested_at >= story.at + _SECOND:
        return None
    asked_at = formats.moment(task.requested_at)
    return f"the run that {task.requested_by} asked for at {asked_at} still waits"


def _is_told(run: RunningRun, story: Story) -> bool:
    """Return whether a run is the one that the story is about."""
    return story.verdict is Verdict.RUNNING and run.token == story.task.token


def _is_dead_before(story: Story) -> bool:
    """Return whether the story is about a run time that nobody ran after a run that is dead."""
    task = story.task
    if task.started_at is None or task.finished_at is not None:
        return False
    is_later = story.verdict in (Verdict.DUE, Verdict.MISSED)
    has_begun = task.started_at < story.at + _SECOND
    # The history is read after the row, and may have its entry.
    tokens = [run.token for run in (*story.running, story.before, story.after) if run]
    return is_later and has_begun and task.token not in tokens


def _its_run(task: TaskStatus, formats: Formats) -> str:
    return _WITHOUT_RUN_TIME.get(task.kind or "", f"its run of {formats.moment(task.scheduled_at)}")


def _became_of_open(task: TaskStatus, otherwise: str) -> str:
    """Return what became of a run that nobody has closed.

    :param otherwise: what is said of one whose lease has ended
    """
    if task.state is TaskState.HOLDER_SILENT:
        return _SILENT
    return _OPEN.get(task.outcome, otherwise)


def _goes_on(run: RunningRun, task: TaskStatus, formats: Formats) -> str:
    if run.lost:
        return (
            f"a run that began at {formats.moment(run.since)} on {run.replica} goes on although "
            "its lock is lost"
        )
    began = f"begun at {formats.moment(run.since)} on {run.replica}"
    return f"{_its_run(task, formats)} {_became_of_open(task, _DEAD)}, {began}"


def _last_run_time(story: Story, formats: Formats) -> str:
    """Return which one was the last run time until the moment, and what became of it."""
    task, miss, verdict = story.task, story.miss, story.verdict
    if verdict is Verdict.UNKNOWN:
        is_new = task.started_at is None
        return "it has never run" if is_new else "the history has no run time before that"
    if verdict is Verdict.DUE:
        return _last_due_in_words(story, formats)
    missed = "refused" if miss is not None and _is_refused(miss) else "missed"
    if miss is not None and story.scheduled_at != miss.last_scheduled_at:
        return f"its run times around then were {missed}"
    last = "its last known run" if _may_have_later(story) else "its last run"
    was = f"{last} time until then was {formats.moment(story.scheduled_at)}"
    if verdict is Verdict.MISSED:
        return f"{was}, which was {missed}"
    if verdict is Verdict.RAN:
        kind = story.runs[-1].kind
        became = _became(story.runs, story.at)
    else:
        kind = task.kind or ""
        became = _became_of_open(task, _DEAD)
    if kind in _WITHOUT_RUN_TIME:
        return f"{last} until then was {_WITHOUT_RUN_TIME[kind]}, which {became}"
    return f"{was}, whose run {became}"


def _may_have_later(story: Story) -> bool:
    """Return whether the task may have had run times of which nothing is known."""
    begins_at = story.history_begins_at
    return story.not_known_after is not None or (begins_at is not None and story.at < begins_at)


def _last_due_in_words(story: Story, formats: Formats) -> str:
    """Return what became of the last run time, which nobody has begun."""
    last = story.due[-1]
    about = "" if last.is_exact else "about "
    if last.run_times is None:
        since = formats.moment(last.first)
        return f"nobody has begun its run times since {about}{since}, which are many"
    known = "known " if _may_have_later(story) else ""
    at = formats.moment(last.last)
    return f"its last {known}run time until then was {about}{at}, which nobody has begun"


def _is_refused(miss: Run) -> bool:
    """Return whether a missed run time was one of the application, inside a window."""
    return miss.cause == MissCause.REFUSED.value


def _became(runs: Sequence[Run], at: datetime) -> str:
    """Return how far the runs of a run time had come at a moment."""
    # Moments are shown in seconds, so a run that began in the second of the moment has begun.
    begun = [run for run in runs if run.started_at < at + _SECOND]
    if not begun:
        return "began later"
    last = begun[-1]
    if last.ended_at < at:
        return outcome_named(last.outcome).ended
    # The entry of a run whose holder has not told its end has the end of its lease.
    is_known = last.outcome not in CORRECTED
    return "was still going on" if is_known else "was not known to be over"


def _pauses_now(story: Story) -> list[Pause]:
    """Return the task's pauses that have not ended and had begun at the moment of the story."""
    return [pause for pause in story.task.pauses if pause.since <= story.at]


def _verdict(story: Story, formats: Formats) -> list[str]:
    """Return what became of the run time that the story is about."""
    task = story.task
    lines = []
    is_running = story.verdict is Verdict.RUNNING or any(not run.lost for run in story.running)
    if is_running or _is_dead_before(story):
        lines.append(_running(task, formats))
    lines += [
        f"{_goes_on(run, task, formats)} (token {run.token})" for run in story.running if run.lost
    ]
    lines += _runs(story.runs, formats)
    if story.miss is not None:
        refused = "refused" if _is_refused(story.miss) else "no replica ran"
        told = _told_in_words(story.miss, formats)
        lines.append(
            f"{refused} {miss_in_words(story.miss, formats)}{_absent(story, formats)} ({told})"
        )
    lines += [_due_in_words(each, story, formats) for each in story.due]
    if story.not_known_after is not None:
        lines.append(_not_known_in_words(story, formats))
    lines += [pause_in_words(each, formats, with_since=True) for each in _pauses_now(story)]
    if story.after is None and task.due_at is not None and task.due_at > story.at:
        lines.append(f"due next at {formats.moment(task.due_at)}")
    return lines


def _absent(story: Story, formats: Formats) -> str:
    """Return that no replica could ask for the missed run times that nobody asked for."""
    miss = story.miss
    if miss is None or miss.cause != MissCause.UNASKED.value:
        return ""
    first = time_of(miss)
    now = story.read_at or story.at
    absent = absent_in_words(story.replicas, first, miss.last_scheduled_at or first, now)
    return f"; {for_reader(absent, formats)}" if absent else ""


def _due_in_words(due: DueTimes, story: Story, formats: Formats) -> str:
    """Return which run times nobody has begun, why as far as it is known, and what follows."""
    about = "" if due.is_exact else "about "
    first, last = formats.moment(due.first), formats.moment(due.last)
    if due.run_times is None:
        times = f"more run times than are counted here, since {about}{first}"
    elif due.run_times == 1:
        times = f"{about}{first}"
    else:
        times = f"{about}{due.run_times} run times from {first} to {last}"
    words = f"due {times}" if due.is_due else f"by its schedule {times}"
    reason = f": {for_reader(due.reason, formats)}" if due.reason else ""
    return f"{words}, begun by nobody{reason}{_noted_in_words(due, story, formats)}"


def _noted_in_words(due: DueTimes, story: Story, formats: Formats) -> str:
    """Return from when on the reason of due times is noted, or that none is and none is known."""
    kept_since, read_at = story.misses_begin_at, story.read_at or story.at
    is_kept = kept_since is None or due.last >= kept_since
    if is_kept and due.noted_from is not None and due.noted_from > read_at:
        return f"; a reason is noted from {formats.moment(due.noted_from)} on"
    if due.reason:
        return ""
    return f"; {_NOT_NOTED if is_kept else _NO_LONGER_KEPT}"


def _not_known_in_words(story: Story, formats: Formats) -> str:
    assert story.not_known_after is not None
    words = f"its run times after {formats.moment(story.not_known_after)} are not known"
    schedule, begins_at = story.task.schedule, story.history_begins_at
    if isinstance(schedule, Mapping) and "class" in schedule:
        return f"{words}, because its trigger is the application's own"
    if begins_at is not None and story.not_known_after < begins_at:
        return f"{words}, because its history begins later"
    return f"{words}, because its schedule is not that of then, or has no common times"


def _told_in_words(miss: Run, formats: Formats) -> str:
    """Return who has told of missed run times, and when.

    An entry that has grown since names the replica that was the first to tell.
    """
    at = formats.moment(miss.started_at)
    if not miss.replica:
        return f"noted at {at} by a replica that started after it"
    if miss.ended_at == miss.started_at:
        return f"told by {miss.replica} at {at}"
    last = formats.moment(miss.ended_at)
    return f"first told by {miss.replica} at {at}, and added to until {last}"


def _running(task: TaskStatus, formats: Formats) -> str:
    words = f"{_what(task.kind, task.scheduled_at, formats)} began at "
    until = formats.moment(task.locked_until)
    ended = f"{_LEASE_ENDED}, which ended at {until}: it died, or its end has not been written yet"
    became = _became_of_open(task, ended)
    words += f"{formats.moment(task.started_at)} on {task.holder}, and {became}"
    return f"{words} (token {task.token})"


def _what(kind: str | None, scheduled_at: datetime | None, formats: Formats) -> str:
    """Return which run it was: its run time, or its kind if it has no run time."""
    if kind is not None and kind in _WITHOUT_RUN_TIME:
        return _WITHOUT_RUN_TIME[kind]
    again = {"takeover": "run again: ", "retry": "retried: "}.get(kind or "", "")
    return f"{again}{formats.moment(scheduled_at)}"


def _runs(runs: Iterable[Run | None], formats: Formats) -> list[str]:
    return [_run(run, formats) for run in runs if run is not None]


def _run(run: Run, formats: Formats) -> str:
    error = error_in_words(run)
    began = f"began at {formats.moment(run.started_at)} on {run.replica}"
    ended = f"{outcome_named(run.outcome).ended} after {took_in_words(run, formats)}"
    words = f"{_what(run.kind, run.scheduled_at, formats)} {began}, {ended} (token {run.token})"
    if run.retry_at is not None:
        words += f", to be retried at {formats.moment(run.retry_at)}"
    return f"{words}: {error}" if error else words


def _action(action: Run, task: TaskStatus, formats: Formats) -> str:
    what = did_in_words(action)
    if action.task != task.name:
        what += f" all tasks ({action.task})"
    return f"{formats.moment(action.started_at)} {what} {action_in_words(action, formats)}"


def _history(story: Story, formats: Formats) -> list[str]:
    """Return since when runs and missed run times are kept."""
    begins_at, misses_at = story.history_begins_at, story.misses_begin_at
    if begins_at is None:
        return ["there is no history of this task"]
    words = f"begins at {formats.moment(begins_at)}"
    if story.at < begins_at:
        words += "; before it nothing is known"
    if misses_at is None:
        return [words]
    missed = f"missed run times are kept from {formats.moment(misses_at)} on"
    if story.at < misses_at:
        missed += "; which ones were missed before it is not known"
    return [words, missed]
