"""The commands ``status`` and ``show``: all tasks, and one task with its last runs."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING

from apscheduler_tasklock._lock.patterns import is_pattern
from apscheduler_tasklock._lock.schedules import schedule_of
from apscheduler_tasklock._lock.tracebacks import LONGEST_TRACEBACK
from apscheduler_tasklock._values import cut
from apscheduler_tasklock._words.next_run_times import next_run_times
from apscheduler_tasklock._words.replicas import is_removed, that_have
from apscheduler_tasklock._words.runs import (
    action_in_words,
    did_in_words,
    longest_of,
    miss_in_words,
    took_in_words,
)
from apscheduler_tasklock._words.tasks import (
    as_listed,
    facts_of,
    notes_of,
    pauses_of_all_in_words,
    task_took_in_words,
)
from apscheduler_tasklock.cli.exits import OK, say
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
    actions_of,
    misses_of,
    run_rows,
    runs_of,
)
from apscheduler_tasklock.cli.target import (
    check_names,
    name_of,
    patterns_of,
    task_locks,
)
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
    TaskLockSchemaError,
)
from apscheduler_tasklock.locks import TaskLocks, find_task
from apscheduler_tasklock.status import (
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

# Limits the tasks that are listed, unless `--limit` says otherwise.
MOST_LISTED = 1_000
_WELL = (TaskState.OK, TaskState.PAUSED)

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


def status(options: argparse.Namespace) -> int:
    """Show the tasks."""
    shown = output()
    if options.watch and (options.json or not isinstance(shown, TerminalOutput)):
        raise TaskLockOptionError(
            "--watch draws on a terminal, with rich (pip install rich), and goes without --json"
        )
    with task_locks(options) as locks:
        if options.watch:
            assert isinstance(shown, TerminalOutput)
            return _watch(options, locks, shown)
        tasks = _tasks(options, locks)
        usual = _usual_durations(options, locks, tasks)
        left_out = _left_out(options, locks, tasks)
        now = locks.database_time()
    if left_out:
        say(left_out)
    if options.json:
        print_json([{**asdict(task), "usual": usual.get(task.name)} for task in tasks])
        return OK
    for line in pauses_of_all_in_words(tasks, shown):
        say(line)  # on standard error, because standard output has the table alone
    shown.print_table(task_table(tasks, usual, now, shown))
    if not tasks:
        say("no tasks")
    return OK


def show(options: argparse.Namespace) -> int:
    """Show one task, and how its last runs went."""
    with task_locks(options) as locks:
        task = find_task(locks, name_of(options, options.task))
        history = _history_of(locks, task.name)
        replicas, now = _replicas_with(locks, task, history.actions), locks.database_time()
    if options.json:
        print_json(
            {
                "task": task,
                "usual": history.usual,
                "next_run_times": next_run_times(task, now),
                "replicas": replicas,
                "runs": history.runs,
                "actions": history.actions,
                "misses": history.misses,
            }
        )
        return OK
    print_task(task, history, replicas, now, output(), options.schema, options.table)
    return OK


def print_task(
    task: TaskStatus,
    history: TaskHistory,
    replicas: Sequence[ReplicaStatus] | None,
    now: datetime,
    shown: Output,
    schema: str | None,
    table: str | None,
) -> None:
    """Print what is known of a task, and how its last runs went.

    :param replicas: the replicas that have the task; ``None``: not known
    :param now: the time by the database's clock
    :param schema: the schema of the task lock table, for the command lines in the words
    :param table: the name of the task lock table, for the same
    """
    facts = facts_of(
        *(task, history.runs, shown, history.usual, replicas, now, schema, table),
        is_removed=is_removed(history.actions),
    )
    for name, text in facts.items():
        style = STATE_STYLES[task.state] if name == "state" else ""
        shown.print_beside(f"{name:<13}", text, style)
    shown.print()
    _print_history(history, shown)


@dataclass(frozen=True)
class TaskHistory:
    """What the run history tells of a task.

    :ivar usual: how long the task usually runs, in seconds
    :ivar is_read: whether the history could be read
    """

    runs: Sequence[Run] = ()
    actions: Sequence[Run] = ()
    misses: Sequence[Run] = ()
    usual: float | None = None
    is_read: bool = True


def _history_of(locks: TaskLocks, task: str) -> TaskHistory:
    try:
        return TaskHistory(
            runs_of(locks, task, _SHOWN_RUNS),
            actions_of(locks, task),
            misses_of(locks, task),
            locks.usual_durations(task).get(task),
        )
    except TaskLockSchemaError as error:  # because the rest can still be shown
        say(f"the run history cannot be read: {error}")
        return TaskHistory(is_read=False)


def _print_history(history: TaskHistory, shown: Output) -> None:
    runs, actions, misses = history.runs, history.actions, history.misses
    if runs:
        shown.print_bars(runs[::-1])
        highest = longest_of(runs)
        longest = "" if highest is None else took_in_words(highest, shown)
        told = f"the last {len(runs)} runs, the newest at the right; the highest took {longest}"
        shown.print(told if len(runs) > 1 else f"the only run in the history, which took {longest}")
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
            shown.print_beside(f"{shown.moment(action.started_at)}  ", words)
    if misses:
        shown.print()
        shown.print("missed run times:")
        for miss in misses:
            shown.print_beside("", miss_in_words(miss, shown))


def _print_traceback(runs: Sequence[Run], shown: Output) -> None:
    """Print the traceback of the last failed run that has one."""
    failed = next((run for run in runs if run.traceback), None)
    if failed is None or failed.traceback is None:
        return
    shown.print()
    shown.print(
        f"traceback of the last failure ({shown.moment(failed.started_at)}, token {failed.token}):"
    )
    # A mark at each line, because a traceback has messages, whose lines could pass for those of
    # this command.
    for line in cut(failed.traceback, LONGEST_TRACEBACK).splitlines():
        shown.print_beside("  | ", line)


def task_table(
    tasks: Sequence[TaskStatus], usual: Mapping[str, float], now: datetime, shown: Output
) -> Table:
    """Return a table of tasks.

    :param usual: how long each task usually runs, in seconds
    :param now: the time by the database's clock
    """
    return Table(
        _COLUMNS,
        [_row(task, usual.get(task.name), now, shown) for task in tasks],
        numbers=frozenset({"took", "usual", "late by", "failures"}),
        dispensable=frozenset({"usual", "late by", "notes", "failures"}),
        dropped=_DROPPED,
    )


def _row(task: TaskStatus, usual: float | None, now: datetime, shown: Output) -> list[Cell | str]:
    listed = as_listed(task, now)
    return [
        task.name,
        Cell(task.state.value, STATE_STYLES[task.state]),
        schedule_of(task),
        shown.cell(listed.started_at),
        task_took_in_words(listed, shown),
        shown.seconds(usual),
        shown.cell(listed.due_at),
        Cell(shown.seconds(task.late_by), "yellow"),
        listed.holder if task.started_at else "",
        Cell(str(task.failures), "red" if task.failures else ""),
        notes_of(task, shown),
    ]


def _tasks(options: argparse.Namespace, locks: TaskLocks) -> list[TaskStatus]:
    patterns = patterns_of(options, options.patterns)
    states = () if options.state is None else [options.state]
    order = options.order or ("urgency" if options.watch else "name")
    limit = options.limit or MOST_LISTED
    tasks = locks.tasks(*patterns, states=states, order=order, limit=limit)
    if len(tasks) == MOST_LISTED and options.limit is None and order == "name":
        # Only tasks that are well are left out, unless too many are not.
        bad = [state for state in states or TaskState if state not in _WELL]
        worst = locks.tasks(*patterns, states=bad, order="urgency", limit=limit) if bad else []
        named = {task.name for task in worst}
        more = (task for task in tasks if task.name not in named)
        tasks = [*worst, *islice(more, limit - len(worst))]
    found = tasks
    if options.state is not None or len(tasks) >= limit:
        # A task that exists may be left out.
        exact = [pattern for pattern in patterns if not is_pattern(pattern)]
        found = locks.tasks(*exact) if exact else []
    check_names(patterns, [task.name for task in found])
    return tasks


def _left_out(
    options: argparse.Namespace, locks: TaskLocks, tasks: Sequence[TaskStatus]
) -> str | None:
    """Return how many tasks are left out because there are too many, by their states."""
    if options.limit is not None or len(tasks) < MOST_LISTED:
        return None
    counts = Counter(locks.overview(*patterns_of(options, options.patterns), limit=0).counts)
    counts.subtract(task.state for task in tasks)
    more = {
        state.value: number
        for state, number in counts.items()
        if number > 0 and options.state in (None, state)
    }
    if not more:
        return None
    told = ", ".join(f"{number:,} {state}" for state, number in more.items())
    return f"{sum(more.values()):,} more tasks are left out: {told} (--limit N shows more)"


def _usual_durations(
    options: argparse.Namespace, locks: TaskLocks, tasks: Sequence[TaskStatus]
) -> dict[str, float]:
    """Return how long the tasks usually run; nothing if the history cannot be read in time."""
    if not tasks:
        return {}
    patterns = patterns_of(options, options.patterns)
    # So that not the whole history is read for a few tasks.
    if options.limit is not None or len(tasks) >= MOST_LISTED:
        patterns = [task.name for task in tasks]
    try:
        return locks.usual_durations(*patterns)
    except TaskLockError:
        return {}  # because the states, which need no history, can still be shown


def _watch(options: argparse.Namespace, locks: TaskLocks, shown: TerminalOutput) -> int:
    """Show the tasks until Ctrl-C."""
    from rich.live import Live

    view = _LastRead(options, locks, shown)
    try:
        # auto_refresh would start a thread, and there is something new to draw only after a look.
        with Live(console=shown.console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(view.look(), refresh=True)
                time.sleep(_INTERVAL)
    except KeyboardInterrupt:
        return OK


class _LastRead:
    """The tasks, as the last successful read has returned them."""

    def __init__(
        self, options: argparse.Namespace, locks: TaskLocks, shown: TerminalOutput
    ) -> None:
        self._options = options
        self._locks = locks
        self._shown = shown
        self._tasks: list[TaskStatus] = []
        # Read once without a limit, because this reads the whole history, and a median hardly
        # changes.
        self._usual: dict[str, float] = {}
        self._table = Table(_COLUMNS, ())

    def look(self) -> RenderableType:
        """Read the tasks; return them as a table, with a line that says how old the table is."""
        from rich.console import Group
        from rich.text import Text

        from apscheduler_tasklock._lock.words import printable

        line = Text(f"{time.strftime('%H:%M:%S')}, every {_INTERVAL:g} s; Ctrl-C ends it")
        try:
            self._tasks = _tasks(self._options, self._locks)
            if not self._usual or self._options.limit is not None:
                self._usual = _usual_durations(self._options, self._locks, self._tasks)
            now = self._locks.database_time()
            self._table = task_table(self._tasks, self._usual, now, self._shown)
        except TaskLockDatabaseError as error:
            message = f"the database is unavailable, these are the tasks of the last read: {error}"
            line = Text(printable(message), style="bold red")
        paused = [
            Text(printable(each), style="bold yellow")
            for each in pauses_of_all_in_words(self._tasks, self._shown)
        ]
        return Group(line, *paused, self._shown.drawn(self._table))


def _replicas_with(
    locks: TaskLocks, task: TaskStatus, actions: Sequence[Run]
) -> list[ReplicaStatus] | None:
    """Return the replicas that have the task; ``None`` if the replicas cannot be read."""
    try:
        return that_have(task.name, locks.replicas(), actions)
    except TaskLockSchemaError:  # the read of the task has reported this already
        return None
