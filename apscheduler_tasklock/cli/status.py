"""The commands ``status`` and ``show``: all tasks, and one task with its last runs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import TYPE_CHECKING

from apscheduler_tasklock._lock.command_lines import command_line
from apscheduler_tasklock._lock.schedules import schedule_of, shown_zone
from apscheduler_tasklock._lock.tracebacks import LONGEST_TRACEBACK
from apscheduler_tasklock._values import cut
from apscheduler_tasklock.cli.exits import OK, say
from apscheduler_tasklock.cli.next_run_times import end_of, next_run_times
from apscheduler_tasklock.cli.output import (
    STATE_STYLES,
    Cell,
    Output,
    Table,
    TerminalOutput,
    output,
    print_json,
)
from apscheduler_tasklock.cli.runs import (
    action_in_words,
    actions_of,
    did_in_words,
    miss_in_words,
    misses_of,
    run_rows,
    runs_of,
)
from apscheduler_tasklock.cli.target import (
    check_names,
    find_task,
    name_of,
    patterns_of,
    task_locks,
)
from apscheduler_tasklock.cli.text import unreadable_in_words
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockOptionError,
    TaskLockSchemaError,
)
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import (
    OptionSource,
    Pause,
    ReplicaStatus,
    Run,
    TaskState,
    TaskStatus,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

# Limits the seconds between two reads of the tasks with `--watch`.
_INTERVAL = 2.0

_SHOWN_RUNS = 20

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

_COLUMNS = (
    "task",
    "state",
    "schedule",
    "last run",
    "took",
    "usual",
    "due",
    "late by",
    "holder",
    "failures",
    "notes",
)

# A narrow terminal leaves these columns out, and shows a task's name and state.
_DROPPED = (
    "notes",
    "holder",
    "failures",
    "usual",
    "took",
    "last run",
    "due",
    "schedule",
    "late by",
)

# The order of a live view: the worst state comes first.
_SEVERITY = {state: place for place, state in enumerate(STATE_STYLES)}


def status(options: argparse.Namespace) -> int:
    """Show the tasks."""
    shown = output()
    if options.watch and (options.json or not isinstance(shown, TerminalOutput)):
        raise TaskLockOptionError(
            "--watch draws on a terminal, with rich (pip install 'apscheduler-tasklock[cli]'), "
            "and goes without --json"
        )
    with task_locks(options) as locks:
        if options.watch:
            assert isinstance(shown, TerminalOutput)
            return _watch(options, locks, shown)
        tasks, usual = _tasks(options, locks), _usual_durations(options, locks)
    if options.json:
        print_json([{**asdict(task), "usual": usual.get(task.name)} for task in tasks])
        return OK
    for line in paused_with_all(tasks, shown):
        say(line)  # on standard error, because standard output has the table alone
    shown.print_table(task_table(tasks, usual, shown))
    if not tasks:
        say("no tasks")
    return OK


def show(options: argparse.Namespace) -> int:
    """Show one task, and how its last runs went."""
    with task_locks(options) as locks:
        task = find_task(locks, name_of(options, options.task))
        replicas = _replicas_with(locks, task)
        history = _history_of(locks, task.name)
    if options.json:
        print_json(
            {
                "task": task,
                "usual": history.usual,
                "next_run_times": next_run_times(task),
                "replicas": replicas,
                "runs": history.runs,
                "actions": history.actions,
                "misses": history.misses,
            }
        )
        return OK
    shown = output()
    _print_facts(options, task, history.runs, shown, history.usual, replicas)
    shown.print()
    _print_history(history, shown)
    return OK


@dataclass(frozen=True)
class _History:
    """What the run history tells of a task.

    :ivar usual: how long the task usually runs, in seconds
    :ivar is_read: whether the history could be read
    """

    runs: Sequence[Run] = ()
    actions: Sequence[Run] = ()
    misses: Sequence[Run] = ()
    usual: float | None = None
    is_read: bool = True


def _history_of(locks: TaskLocks, task: str) -> _History:
    try:
        return _History(
            runs_of(locks, task, _SHOWN_RUNS),
            actions_of(locks, task),
            misses_of(locks, task),
            locks.usual_durations(task).get(task),
        )
    except TaskLockSchemaError as error:  # because the rest can still be shown
        say(f"the run history cannot be read: {error}")
        return _History(is_read=False)


def _print_history(history: _History, shown: Output) -> None:
    runs, actions, misses = history.runs, history.actions, history.misses
    if runs:
        shown.print_bars(runs[::-1])
        longest = shown.seconds(max(run.took for run in runs))
        shown.print(
            f"the last {len(runs)} runs, the newest at the right; the highest took {longest}"
        )
        shown.print()
        shown.print_table(run_rows(runs, shown))
    elif history.is_read:
        shown.print("no runs in the history")
    _print_traceback(runs, shown)
    if actions:
        shown.print()
        shown.print("what operators did:")
        for action in actions:
            words = f"{did_in_words(action)} {action_in_words(action, shown)}"
            shown.print(f"{shown.moment(action.started_at)}  {words}")
    if misses:
        shown.print()
        shown.print("missed run times:")
        for miss in misses:
            shown.print(miss_in_words(miss, shown))


def _print_traceback(runs: Sequence[Run], shown: Output) -> None:
    """Print the traceback of the last failed run that has one."""
    failed = next((run for run in runs if run.traceback), None)
    if failed is None or failed.traceback is None:
        return
    shown.print()
    shown.print(
        f"traceback of the last failure ({shown.moment(failed.started_at)}, token {failed.token}):"
    )
    for line in cut(failed.traceback, LONGEST_TRACEBACK).splitlines():
        shown.print(line)


def task_table(tasks: Sequence[TaskStatus], usual: Mapping[str, float], shown: Output) -> Table:
    """Return a table of tasks.

    :param usual: how long each task usually runs, in seconds
    """
    return Table(
        _COLUMNS,
        [_row(task, usual.get(task.name), shown) for task in tasks],
        numbers=frozenset({"took", "usual", "late by", "failures"}),
        dispensable=frozenset({"usual", "late by", "notes", "failures"}),
        dropped=_DROPPED,
    )


def notes_of(task: TaskStatus, shown: Output) -> str:
    """Return notes on a task: pauses, requests, and whether it is gone."""
    notes = [unreadable_in_words(task.unreadable)] if task.unreadable else []
    if task.paused:
        notes += pauses_of(task, shown)
    if task.delay is not None and task.delay > _LONG_DELAY:
        notes.append(f"its last run began {shown.seconds(task.delay)} after its run time")
    if task.acknowledged and task.missed_at is not None:
        notes.append("its miss alarms no more")
    elif task.acknowledged and task.failures:
        notes.append("its failure alarms no more")
    elif task.acknowledged:
        notes.append("its cut alarms no more")
    if task.gone:
        notes.append("gone: no live replica has it")
    if task.requested_by is not None:
        notes.append(f"run asked for by {task.requested_by}")
    return "; ".join(notes)


def pauses_of(task: TaskStatus, shown: Output) -> list[str]:
    """Return the pauses of a paused task, in words."""
    pauses = [pause_in_words(pause, shown) for pause in task.pauses]
    return pauses or [f"paused until {shown.moment(task.paused_until) or 'resumed'}"]


def pause_in_words(pause: Pause, shown: Output, *, with_since: bool = False) -> str:
    """Return a pause in words: by whom, until when, and why; also since when if asked."""
    what = "" if pause.namespace is None else f" with {of_all_in_words(pause.namespace)}"
    why = f" ({pause.reason})" if pause.reason else ""
    since = f" since {shown.moment(pause.since)}" if with_since else ""
    until = shown.moment(pause.until) or "resumed"
    return f"paused{what} by {pause.by}{since} until {until}{why}"


def of_all_in_words(namespace: str) -> str:
    """Return in words which tasks a pause of all tasks is for."""
    return f"all tasks of the namespace {namespace!r}" if namespace else "all tasks"


def paused_with_all(tasks: Iterable[TaskStatus], shown: Output) -> list[str]:
    """Return in words the pauses of all tasks that apply to some of these tasks."""
    found = dict.fromkeys(
        pause for task in tasks for pause in task.pauses if pause.namespace is not None
    )
    return [of_all_and_pause_in_words(pause, shown) for pause in found]


def of_all_and_pause_in_words(pause: Pause, shown: Output, before: str = "") -> str:
    """Return a pause of all tasks in words, with the tasks first.

    :param before: what comes before the words of the pause, such as ``"still "``
    """
    own = pause_in_words(replace(pause, namespace=None), shown)
    return f"{of_all_in_words(pause.namespace or '')}: {before}{own}"


def _row(task: TaskStatus, usual: float | None, shown: Output) -> list[Cell | str]:
    return [
        task.name,
        Cell(task.state.value, STATE_STYLES[task.state]),
        schedule_of(task),
        shown.moment(task.started_at),
        shown.seconds(task.took),
        shown.seconds(usual),
        shown.moment(task.due_at),
        Cell(shown.seconds(task.late_by), "yellow"),
        task.holder if task.started_at else "",
        Cell(str(task.failures), "red" if task.failures else ""),
        notes_of(task, shown),
    ]


def _tasks(options: argparse.Namespace, locks: TaskLocks) -> list[TaskStatus]:
    patterns = patterns_of(options, options.patterns)
    tasks = locks.tasks(*patterns)
    check_names(patterns, [task.name for task in tasks])
    return [task for task in tasks if options.state in (None, task.state)]


def _usual_durations(options: argparse.Namespace, locks: TaskLocks) -> dict[str, float]:
    """Return how long the tasks usually run; nothing if the history cannot be read in time."""
    try:
        return locks.usual_durations(*patterns_of(options, options.patterns))
    except (TaskLockSchemaError, TaskLockDatabaseError):
        return {}  # because the states, which need no history, can still be shown


def _watch(options: argparse.Namespace, locks: TaskLocks, shown: TerminalOutput) -> int:
    """Show the tasks until Ctrl-C."""
    from rich.live import Live

    view = _View(options, locks, shown)
    try:
        # auto_refresh would start a thread, and there is something new to draw only after a look.
        with Live(console=shown.console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(view.look(), refresh=True)
                time.sleep(_INTERVAL)
    except KeyboardInterrupt:
        return OK


class _View:
    """The tasks, as the last successful read has returned them."""

    def __init__(
        self, options: argparse.Namespace, locks: TaskLocks, shown: TerminalOutput
    ) -> None:
        self._options = options
        self._locks = locks
        self._shown = shown
        self._tasks: list[TaskStatus] = []
        # Read once, because this reads the whole history, and a median hardly changes.
        self._usual: dict[str, float] | None = None

    def look(self) -> RenderableType:
        """Read the tasks; return them as a table, with a line that says how old the table is."""
        from rich.console import Group
        from rich.text import Text

        from apscheduler_tasklock._lock.words import printable

        line = Text(f"{time.strftime('%H:%M:%S')}, every {_INTERVAL:g} s; Ctrl-C ends it")
        try:
            self._tasks = sorted(
                _tasks(self._options, self._locks),
                key=lambda task: (-_SEVERITY[task.state], task.name),
            )
            if self._usual is None:
                self._usual = _usual_durations(self._options, self._locks)
        except TaskLockDatabaseError as error:
            message = f"the database is unavailable, these are the tasks of the last read: {error}"
            line = Text(printable(message), style="bold red")
        paused = [
            Text(printable(each), style="bold yellow")
            for each in paused_with_all(self._tasks, self._shown)
        ]
        return Group(line, *paused, self._shown.drawn(self._table()))

    def _table(self) -> Table:
        return task_table(self._tasks, self._usual or {}, self._shown)


def _print_facts(
    options: argparse.Namespace,
    task: TaskStatus,
    runs: Sequence[Run],
    shown: Output,
    usual: float | None,
    replicas: Sequence[ReplicaStatus] | None,
) -> None:
    facts = {"task": task.name, "state": _state_in_words(options, task, shown)}
    facts["function"] = task.function or ""
    facts["schedule"] = schedule_of(task)
    facts["replicas"] = _replicas_in_words(task, replicas)
    facts["last run"] = _last_run_in_words(task, shown)
    facts["usual"] = shown.seconds(usual)
    facts["lock times"] = _lock_times_in_words(task, shown)
    facts["options"] = _options_in_words(task, shown)
    facts["due"] = _due_in_words(task, shown)
    facts["next runs"] = _next_runs_in_words(task, shown)
    facts["last success"] = shown.moment(task.succeeded_at)
    facts["last failure"] = shown.moment(task.failed_at)
    if task.failures:
        facts["failures"] = f"{task.failures} in a row, {_last_failure_in_words(task, runs)}"
    facts["notes"] = notes_of(task, shown)
    for name, text in facts.items():
        if text:
            shown.print(f"{name:<13}{text}", STATE_STYLES[task.state] if name == "state" else "")


def _state_in_words(options: argparse.Namespace, task: TaskStatus, shown: Output) -> str:
    free, ack = (
        command_line(
            command,
            "--token",
            str(task.token),
            task=task.name,
            schema=options.schema,
            table=options.table,
        )
        for command in ("free", "ack")
    )
    explained = {
        TaskState.RUNNING: f"on {task.holder}, locked until {shown.moment(task.locked_until)}",
        TaskState.TOO_LONG: _too_long_in_words(task, shown),
        TaskState.DEAD: f"its holder {task.holder} has not renewed its lease, which ended at "
        f"{shown.moment(task.locked_until)}; if no replica takes the run over, free it: {free}",
        TaskState.LATE: f"by {shown.seconds(task.late_by)}",
        TaskState.OVERDUE: f"by {shown.seconds(task.late_by)}",
        TaskState.RETRYING: f"attempt {task.attempt} failed ({task.error_type}); it is run again "
        f"at {shown.moment(task.retry_at)}",
        TaskState.CUT: f"a stop of {task.holder} has cut its last run, and nobody has run "
        "its window",
        TaskState.MISSED: f"no replica has run it at {shown.moment(task.missed_at)}, and it is not "
        f"run again; `why` tells the reason, and {ack} ends the alarm",
        TaskState.NEW: "a replica has the task, and the task has never run",
        TaskState.UNREADABLE: "its row has a value that no replica writes; its next run may mend "
        "the row, or else an UPDATE",
    }.get(task.state)
    return f"{task.state.value}: {explained}" if explained else task.state.value


def _replicas_with(locks: TaskLocks, task: TaskStatus) -> list[ReplicaStatus] | None:
    """Return the replicas that have the task; ``None`` if the replicas cannot be read."""
    try:
        return [each for each in locks.replicas() if task.name in each.tasks]
    except TaskLockSchemaError:  # the read of the task has reported this already
        return None


def _replicas_in_words(task: TaskStatus, replicas: Sequence[ReplicaStatus] | None) -> str:
    """Return which replicas have the task; ``""`` if only ``hold`` uses the task."""
    if replicas is None:
        return ""
    if not replicas:
        return "none has reported this task" if task.function else ""
    told = [each.replica_id for each in replicas if each.alive]
    told += [f"{each.replica_id} ({each.state.value})" for each in replicas if not each.alive]
    more = len(told) - _MOST_REPLICAS
    return ", ".join(told[:_MOST_REPLICAS]) + (f" and {more} more" if more > 0 else "")


def _last_run_in_words(task: TaskStatus, shown: Output) -> str:
    if task.started_at is None:
        return "never"
    words = f"{shown.moment(task.started_at)} on {task.holder}"
    if task.kind:
        words += f", {task.kind}"
    if task.attempt > 1:
        words += f", attempt {task.attempt}"
    if task.scheduled_at and task.kind in ("schedule", "takeover", "retry"):
        words += f", for {shown.moment(task.scheduled_at)}"
    return f"{words}, {_end_in_words(task, shown)}, token {task.token}"


def _end_in_words(task: TaskStatus, shown: Output) -> str:
    """Return how the last run ended, and for how long it ran."""
    took = shown.seconds(task.took)
    ended = {
        "cut": f"cut by a stop after {took}",
        "freed": f"freed after {took}",
        "cancelled": f"cancelled after {took}",
        # The moment of the death is not known, only the end of the lease.
        "died": f"died with its holder, whose lease ended after {took}",
        "overran": f"overran its maximum lock after {took}",
    }
    if task.outcome is None and task.finished_at is None:
        return f"so far {took}"
    return ended.get(task.outcome or "", f"took {took}")


def _too_long_in_words(task: TaskStatus, shown: Output) -> str:
    if not task.stuck:
        return f"it runs on {task.holder} for {shown.seconds(task.took)}"
    stuck = [
        f"on {run.replica} since {shown.moment(run.since)} (token {run.token})"
        for run in task.stuck
    ]
    return (
        f"a run that has outlived its maximum lock still goes on: {', '.join(stuck)}; other "
        "replicas run the task meanwhile. If it hangs, restart that replica"
    )


def _last_failure_in_words(task: TaskStatus, runs: Sequence[Run]) -> str:
    """Return how the last run failed. A run that died or overran has no exception."""
    if task.error_type:
        return f"the last with {task.error_type}"
    outcomes = [task.outcome, *(run.outcome for run in runs)]
    last = next((outcome for outcome in outcomes if outcome in ("died", "overran")), None)
    if last == "overran":
        return "the last has overrun its maximum lock"
    return "the last died with its holder" if last else "the last died or overran its maximum lock"


def _lock_times_in_words(task: TaskStatus, shown: Output) -> str:
    """Return the last run's lock times. The release may have shortened the minimum lock."""
    if task.started_at is None:
        return ""
    most = shown.seconds((task.run_until - task.started_at).total_seconds())
    if task.scheduled_at is None or task.window_until is None:  # the task had manual runs only
        return f"maximum {most}"
    least = shown.seconds((task.window_until - task.scheduled_at).total_seconds())
    return (
        f"minimum {least}, for the window until {shown.moment(task.window_until)}; maximum {most}"
    )


def _options_in_words(task: TaskStatus, shown: Output) -> str:
    """Return the task's options, each with the place where it is set."""
    options = sorted(task.options.items())
    return ", ".join(_option_in_words(name, option, shown) for name, option in options)


def _option_in_words(name: str, option: OptionSource, shown: Output) -> str:
    value, place = option.value, _PLACES.get(option.place, option.place)
    if value is None:
        words = "none"
    elif isinstance(value, bool):
        words = "on" if value else "off"
    elif isinstance(value, float) and not name.endswith(("factor", "backoff")):
        words = shown.seconds(value)
    else:
        words = f"{value:g}" if isinstance(value, (int, float)) else str(value)
    return f"{name} {words} ({place})"


def _next_runs_in_words(task: TaskStatus, shown: Output) -> str:
    """Return the next run times, with the name of their time zone, or that there are none."""
    found = next_run_times(task)
    if not found:
        return _ended_in_words(task, shown)
    gaps = (later.timestamp() - earlier.timestamp() for earlier, later in pairwise(found))
    if all(gap >= 1 for gap in gaps):  # without fractions, as the due time is shown
        found = [each.replace(microsecond=0) for each in found]
    times = [each.replace(tzinfo=None).isoformat(sep=" ") for each in found]
    if len(set(times)) < len(times):  # clocks are put back, and repeat an hour
        times = [each.isoformat(sep=" ") for each in found]
    return f"{', '.join(times)} {shown_zone(task.zone or 'UTC')}"


def _ended_in_words(task: TaskStatus, shown: Output) -> str:
    """Return that a task's schedule has ended; ``""`` if it has not, or that is not known."""
    end = end_of(task.schedule)
    if isinstance(end, datetime):
        has_ended = end.timestamp() < time.time()
        return f"none: the schedule ended at {shown.moment(end)}" if has_ended else ""
    if end is None or end >= datetime.now(timezone.utc).date() - timedelta(days=1):
        return ""  # also if that day may go on in the schedule's time zone
    return f"none: the schedule ended with {end.isoformat()}"


def _due_in_words(task: TaskStatus, shown: Output) -> str:
    if task.due_at is None:
        return ""
    overdue = f", overdue from {shown.moment(task.overdue_at)}" if task.overdue_at else ""
    return shown.moment(task.due_at) + overdue
