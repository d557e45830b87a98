"""Tasks in words: the state, the pauses, the last run, the options, and what comes next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from itertools import pairwise

from apscheduler_tasklock._lock.command_lines import command_line
from apscheduler_tasklock._lock.outcomes import UNTIMED, outcome_named
from apscheduler_tasklock._lock.schedules import schedule_of, shown_zone
from apscheduler_tasklock._lock.words import unreadable_in_words
from apscheduler_tasklock._words.formats import Formats
from apscheduler_tasklock._words.next_run_times import due_of, end_of, next_run_times
from apscheduler_tasklock._words.replicas import none_begins, who_runs_meanwhile, why_silent
from apscheduler_tasklock.status import (
    OptionSource,
    Pause,
    ReplicaState,
    ReplicaStatus,
    Run,
    RunningRun,
    TaskState,
    TaskStatus,
)

# Limits the seconds by which a run may begin late without a note. A run that began later has, as a
# rule, waited for a worker.
_LONG_DELAY = 1.0

# Limits the replicas that are named, because a fleet may have hundreds.
_MOST_REPLICAS = 5

# The places where options are set, in words.
_PLACES = {
    "job": "in the job",
    "jobs": "in the executor's jobs",
    "function": "in the function's decorator",
    "executor": "in the executor",
}


@dataclass(frozen=True)
class OpenRun:
    """A run that is not over, or that is dead and has not been followed.

    :ivar took: for how many seconds it has run so far
    :ivar state: running, holder silent, too long or dead
    """

    run: RunningRun
    took: float
    state: TaskState


def notes_of(task: TaskStatus, formats: Formats, *, with_pauses: bool = True) -> str:
    """Return notes on a task: pauses, requests, and whether it is gone."""
    notes = [unreadable_in_words(task.unreadable)] if task.unreadable else []
    if with_pauses:
        notes += pauses_of(task, formats)
    if task.delay is not None and task.delay > _LONG_DELAY:
        notes.append(f"its last run began {formats.seconds(task.delay)} after its run time")
    if task.silent_until is not None or task.acknowledged:
        notes.append(_silence_of(task, formats))
    if task.gone:
        notes.append("gone: no live replica has it, not counting those that stop")
    if task.requested_by is not None:
        notes.append(f"run asked for by {task.requested_by}")
    return "; ".join(notes)


def _silence_of(task: TaskStatus, formats: Formats) -> str:
    """Return what of a task alarms no more."""
    if task.silent_until is not None:
        until = formats.moment(task.silent_until)
        return f"its failures and misses alarm no more until {until}"
    if task.missed_at is not None:
        return "its miss alarms no more"
    return "its failure alarms no more" if task.failures else "its cut alarms no more"


def open_runs(task: TaskStatus, now: datetime) -> list[OpenRun]:
    """Return the runs of a task that are not over, the one that began last first.

    There may be several, because a run that has lost its lock may go on while another replica runs
    the task.

    :param now: the database's time
    """
    found = [
        OpenRun(run, max(0.0, (now - run.since).total_seconds()), TaskState.TOO_LONG)
        for run in task.stuck
    ]
    # By the outcome, because the state may tell of a pause, or of a run that has lost its lock.
    is_dead = task.outcome in UNTIMED
    is_open = task.outcome is None or is_dead
    is_told = task.token in [run.token for run in task.stuck]
    if task.started_at is not None and task.finished_at is None and is_open and not is_told:
        run = RunningRun(task.name, task.token, task.holder, task.started_at)
        states = (TaskState.TOO_LONG, TaskState.HOLDER_SILENT)
        state = task.state if task.state in states and not found else TaskState.RUNNING
        found.append(OpenRun(run, task.took or 0.0, TaskState.DEAD if is_dead else state))
    return sorted(found, key=lambda each: each.run.since, reverse=True)


def as_listed(task: TaskStatus, now: datetime) -> TaskStatus:
    """Return a task with the run and the due time that a list shows.

    A run that hangs comes before newer ones.

    :param now: the database's time
    """
    listed = _as_run(task, task.stuck[0], now) if task.stuck else task
    return replace(listed, due_at=due_of(task, now))


def runs_now(tasks: Iterable[TaskStatus], now: datetime) -> list[TaskStatus]:
    """Return tasks as their runs that are not over: one that has several is there several times.

    :param tasks: tasks that run
    :param now: the database's time
    """
    return [
        _as_run(task, each.run, now) if each.run.lost else replace(task, state=each.state, stuck=())
        for task in tasks
        for each in reversed(open_runs(task, now))
    ]


def _as_run(task: TaskStatus, run: RunningRun, now: datetime) -> TaskStatus:
    """Return a task with the values of a run that still goes on although its lock is lost."""
    took = max(0.0, (now - run.since).total_seconds())
    listed = replace(task, token=run.token, holder=run.replica, started_at=run.since, took=took)
    listed = replace(listed, kind=None, scheduled_at=None, window_until=None, attempt=1)
    return replace(listed, finished_at=None, outcome=None)


def task_took_in_words(task: TaskStatus, formats: Formats) -> str:
    """Return how long the last run took, or has taken so far, as far as it is known."""
    how = "died" if task.state is TaskState.HOLDER_SILENT else task.outcome
    took = formats.seconds(task.took)
    return outcome_named(how or "").took.format(took) if took else ""


def why_not_run(task: TaskStatus, replicas: Sequence[ReplicaStatus] | None) -> str | None:
    """Return why a task cannot be run now; ``None``: it can, as far as is known.

    :param replicas: the replicas that have the task; ``None``: not known
    """
    if task.function is None:
        return "only `hold` uses it, so no replica can begin a run"
    # A silent replica may be alive, and a request waits for it.
    may_live = (ReplicaState.SILENT, ReplicaState.UNREADABLE)
    if replicas is None or any(each.state in may_live for each in replicas):
        return None
    return none_begins(replicas) or None


def pauses_of(task: TaskStatus, formats: Formats) -> list[str]:
    """Return the pauses of a task in words: by whom, since when, until when and why."""
    pauses = [pause_in_words(pause, formats, with_since=True) for pause in task.pauses]
    if task.paused and not pauses:
        pauses.append(f"paused until {formats.moment(task.paused_until) or 'resumed'}")
    return pauses


def pause_in_words(pause: Pause, formats: Formats, *, with_since: bool = False) -> str:
    """Return a pause in words: by whom, until when, and why; also since when if asked."""
    if pause.job is not None or not pause.by:  # of stored jobs, which their application may pause
        what = "" if pause.job is None else f"its stored job {pause.job!r} "
        return f"{what}{pauser_in_words(pause.by, pause.since, formats)}"
    what = "" if pause.namespace is None else f" with {paused_tasks_in_words(pause.namespace)}"
    why = f" ({pause.reason})" if pause.reason else ""
    since = f" since {formats.moment(pause.since)}" if with_since else ""
    until = formats.moment(pause.until) or "resumed"
    return f"paused{what} by {pause.by}{since} until {until}{why}"


def pauser_in_words(by: str | None, since: datetime, formats: Formats) -> str:
    """Return who has paused a stored job, and when, as far as it is known.

    :param since: when the job was changed last
    """
    if by:
        return f"paused by {by} since {formats.moment(since)} until resumed"
    return f"paused until resumed, by whom is not known, changed last at {formats.moment(since)}"


def paused_tasks_in_words(namespace: str) -> str:
    """Return in words which tasks a pause of all tasks is for."""
    return f"all tasks of the namespace {namespace!r}" if namespace else "all tasks"


def pauses_of_all_in_words(tasks: Iterable[TaskStatus], formats: Formats) -> list[str]:
    """Return in words the pauses of all tasks that apply to some of these tasks."""
    found = dict.fromkeys(
        pause for task in tasks for pause in task.pauses if pause.namespace is not None
    )
    return [pause_of_all_in_words(pause, formats, with_since=True) for pause in found]


def pause_of_all_in_words(
    pause: Pause, formats: Formats, before: str = "", *, with_since: bool = False
) -> str:
    """Return a pause of all tasks in words, with the tasks first.

    :param before: what comes before the words of the pause, such as ``"still "``
    """
    own = pause_in_words(replace(pause, namespace=None), formats, with_since=with_since)
    return f"{paused_tasks_in_words(pause.namespace or '')}: {before}{own}"


def facts_of(
    task: TaskStatus,
    runs: Sequence[Run],
    formats: Formats,
    usual: float | None,
    replicas: Sequence[ReplicaStatus] | None,
    now: datetime,
    schema: str | None = None,
    table: str | None = None,
    *,
    is_removed: bool = False,
) -> dict[str, str]:
    """Return what is known of a task, in words: the facts by their names, without empty ones.

    :param runs: the task's last runs, the newest first
    :param usual: how long the task usually runs, in seconds; ``None``: not known
    :param replicas: the replicas that have the task; ``None``: not known
    :param now: the time by the database's clock
    :param schema: the schema of the task lock table, for the command lines in the words
    :param table: the name of the task lock table, for the same; ``None``: the words are for a page,
        which has buttons in place of commands
    :param is_removed: whether an operator has removed its stored job
    """
    facts = {
        "task": task.name,
        "state": _state_in_words(task, formats, replicas, schema, table),
        "paused": "; ".join(pauses_of(task, formats)),
        "function": task.function or "",
        "schedule": schedule_of(task),
        "replicas": _replicas_in_words(task, replicas, is_removed=is_removed),
        "last run": _last_run_in_words(task, formats),
        "usual": formats.seconds(usual),
        "lock times": _lock_times_in_words(task, formats),
        "options": _options_in_words(task, formats),
        "due": _due_in_words(task, formats, now),
        "next runs": _next_runs_in_words(task, formats, now, is_page=table is None),
        "last success": formats.moment(task.succeeded_at),
        "last failure": formats.moment(task.failed_at),
        "failures": _failures_in_words(task, runs),
        "notes": notes_of(task, formats, with_pauses=False),
    }
    return {name: text for name, text in facts.items() if text}


def _state_in_words(
    task: TaskStatus,
    formats: Formats,
    replicas: Sequence[ReplicaStatus] | None,
    schema: str | None,
    table: str | None,
) -> str:
    free, ends_alarm = "free it", "to acknowledge it ends the alarm"
    if table is not None:
        free_command, ack_command = (
            command_line(
                command, "--token", str(task.token), task=task.name, schema=schema, table=table
            )
            for command in ("free", "ack")
        )
        free = f"free it: {free_command}"
        ends_alarm = f"`why` tells the reason, and {ack_command} ends the alarm"
    silent = why_silent(task.holder, replicas, formats) or f"{task.holder} has died or is silent"
    explained = {
        TaskState.HOLDER_SILENT: f"{silent}, and nobody knows whether its run goes on; locked "
        f"until {formats.moment(task.locked_until)}",
        TaskState.RUNNING: f"on {task.holder}, locked until {formats.moment(task.locked_until)}",
        TaskState.TOO_LONG: _too_long_in_words(task, replicas, formats),
        TaskState.DEAD: f"its holder {task.holder} has not renewed its lease, which ended at "
        f"{formats.moment(task.locked_until)}; if no replica takes the run over, {free}",
        TaskState.LATE: f"by {formats.seconds(task.late_by)}",
        TaskState.OVERDUE: f"by {formats.seconds(task.late_by)}",
        # "due", because the time may have passed while no replica has begun the retry.
        TaskState.RETRYING: f"attempt {task.attempt} failed ({task.error_type}); its retry is due "
        f"at {formats.moment(task.retry_at)}",
        TaskState.CUT: f"a stop of {task.holder} has cut its last run, and nobody has run "
        "its window",
        TaskState.MISSED: f"no replica has run it at {formats.moment(task.missed_at)}, and it is "
        f"not run again; {ends_alarm}",
        TaskState.NEW: "a replica has the task, and the task has never run",
        TaskState.UNREADABLE: "its row has a value that no replica writes; its next run may mend "
        "the row, or else an UPDATE",
    }.get(task.state)
    return f"{task.state.value}: {explained}" if explained else task.state.value


def _replicas_in_words(
    task: TaskStatus, replicas: Sequence[ReplicaStatus] | None, *, is_removed: bool
) -> str:
    """Return which replicas have the task; ``""`` if only ``hold`` uses the task."""
    if replicas is None:
        return ""
    if not replicas and is_removed:
        return "none since its job was removed"
    if not replicas:
        return "none has reported this task" if task.function else ""
    told = [
        f"{each.replica_id}{' (stopping)' if each.stopping_since else ''}"
        for each in replicas
        if each.alive
    ]
    told += [f"{each.replica_id} ({each.state.value})" for each in replicas if not each.alive]
    more = len(told) - _MOST_REPLICAS
    return ", ".join(told[:_MOST_REPLICAS]) + (f" and {more} more" if more > 0 else "")


def _last_run_in_words(task: TaskStatus, formats: Formats) -> str:
    if task.started_at is None:
        return "never"
    words = f"{formats.moment(task.started_at)} on {task.holder}"
    if task.kind:
        words += f", {task.kind}"
    if task.attempt > 1:
        words += f", attempt {task.attempt}"
    if task.scheduled_at and task.kind in ("schedule", "takeover", "retry"):
        words += f", for {formats.moment(task.scheduled_at)}"
    return f"{words}, {_end_in_words(task, formats)}, token {task.token}"


def _end_in_words(task: TaskStatus, formats: Formats) -> str:
    """Return how the last run ended, and for how long it ran."""
    took = formats.seconds(task.took)
    if task.outcome is None and task.finished_at is None:
        return f"so far {task_took_in_words(task, formats)}"
    if task.outcome == "died" and task.finished_at is None:
        # After an outage it may go on: its replica could not renew the lease.
        return f"its lease ended after {took}, and it has not reported its end"
    return outcome_named(task.outcome or "").after.format(took)


def _too_long_in_words(
    task: TaskStatus, replicas: Sequence[ReplicaStatus] | None, formats: Formats
) -> str:
    if not task.stuck:
        silent = why_silent(task.holder, replicas, formats)
        if silent:
            return f"its run has taken at most {formats.seconds(task.took)}, and {silent}"
        return f"it runs on {task.holder} for {formats.seconds(task.took)}"
    stuck = [
        f"on {run.replica} since {formats.moment(run.since)} (token {run.token})"
        for run in task.stuck
    ]
    return (
        f"a run still goes on although its lock is lost: {', '.join(stuck)}; "
        f"{who_runs_meanwhile(task, replicas)}. If it hangs, restart that replica"
    )


def _failures_in_words(task: TaskStatus, runs: Sequence[Run]) -> str:
    if not task.failures:
        return ""
    return f"{task.failures} in a row, {last_failure_in_words(task, runs)}"


def last_failure_in_words(task: TaskStatus, runs: Sequence[Run]) -> str:
    """Return how the last run failed. One that has not raised has no exception."""
    if task.error_type:
        return f"the last with {task.error_type}"
    outcomes = [task.failure, task.outcome, *(run.outcome for run in runs)]
    return next(
        filter(None, (outcome_named(each or "").failure for each in outcomes)),
        "the last died, overran its maximum lock or was freed",
    )


def _lock_times_in_words(task: TaskStatus, formats: Formats) -> str:
    """Return the last run's lock times. The release may have shortened the minimum lock."""
    if task.started_at is None:
        return ""
    most = formats.seconds((task.run_until - task.started_at).total_seconds())
    if task.scheduled_at is None or task.window_until is None:  # the task had manual runs only
        return f"maximum {most}"
    least = formats.seconds((task.window_until - task.scheduled_at).total_seconds())
    return (
        f"minimum {least}, for the window until {formats.moment(task.window_until)}; maximum {most}"
    )


def _options_in_words(task: TaskStatus, formats: Formats) -> str:
    """Return the task's options, each with the place where it is set."""
    options = sorted(task.options.items())
    return ", ".join(_option_in_words(name, option, formats) for name, option in options)


def _option_in_words(name: str, option: OptionSource, formats: Formats) -> str:
    value, place = option.value, _PLACES.get(option.place, option.place)
    if value is None:
        words = "none"
    elif isinstance(value, bool):
        words = "on" if value else "off"
    elif isinstance(value, float) and not name.endswith(("factor", "backoff")):
        words = formats.seconds(value)
    else:
        words = f"{value:g}" if isinstance(value, (int, float)) else str(value)
    return f"{name} {words} ({place})"


def _next_runs_in_words(task: TaskStatus, formats: Formats, now: datetime, *, is_page: bool) -> str:
    """Return the next run times, or that there are none.

    A page has one zone for all of its times. Elsewhere they have the name of the task's zone, as
    they have where two of them would read the same.
    """
    found = next_run_times(task, now)
    if not found:
        return _ended_in_words(task, formats, now)
    on_page = [formats.moment(each) for each in found]
    if is_page and len(set(on_page)) == len(found):
        return ", ".join(on_page)
    gaps = (later.timestamp() - earlier.timestamp() for earlier, later in pairwise(found))
    if all(gap >= 1 for gap in gaps):  # without fractions, as the due time is shown
        found = [each.replace(microsecond=0) for each in found]
    times = [each.replace(tzinfo=None).isoformat(sep=" ") for each in found]
    if len(set(times)) < len(times):  # clocks are put back, and repeat an hour
        times = [each.isoformat(sep=" ") for each in found]
    return f"{', '.join(times)} {shown_zone(task.zone or 'UTC')}"


def _ended_in_words(task: TaskStatus, formats: Formats, now: datetime) -> str:
    """Return that a task's schedule has ended; ``""`` if it has not, or that is not known."""
    end = end_of(task.schedule)
    if isinstance(end, datetime):
        has_ended = end < now
        return f"none: the schedule ended at {formats.moment(end)}" if has_ended else ""
    if end is None or end >= now.astimezone(timezone.utc).date() - timedelta(days=1):
        return ""  # also if that day may go on in the schedule's time zone
    return f"none: the schedule ended with {end.isoformat()}"


def _due_in_words(task: TaskStatus, formats: Formats, now: datetime) -> str:
    due_at = due_of(task, now)
    is_its = due_at == task.due_at and task.overdue_at is not None
    overdue = f", overdue from {formats.moment(task.overdue_at)}" if is_its else ""
    return formats.moment(due_at) + overdue
