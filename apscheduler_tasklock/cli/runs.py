"""The command ``runs``: the run history."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from apscheduler_tasklock._lock.outcomes import outcome_named
from apscheduler_tasklock._lock.patterns import is_pattern
from apscheduler_tasklock._lock.statements import ACTIONS, MISSES
from apscheduler_tasklock._lock.words import rfc3339
from apscheduler_tasklock._words.json_text import as_json
from apscheduler_tasklock._words.runs import error_in_words, run_notes, took_in_words, when_of
from apscheduler_tasklock.cli.exits import OK, message_of, say
from apscheduler_tasklock.cli.output import (
    Cell,
    Output,
    Table,
    column_widths,
    output,
    plain_lines,
    print_json,
)
from apscheduler_tasklock.cli.target import check_names, patterns_of, task_locks
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockOptionError
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import Run

# Limits the seconds between two reads of the history with `--follow`.
_INTERVAL = 1.0

# Limits the time from the start of a run, as its row has it, until other sessions can read the row.
_MARGIN = timedelta(seconds=60)

# Limits the time from a missed run time until it is noted, with `--follow`.
_NOTED_WITHIN = timedelta(days=1)

# Limits the runs of one read. The limit is far above the number of runs that end between two reads.
_MOST_NEW = 100_000

_COLUMNS = ("task", "when", "took", "outcome", "kind", "replica", "token", "error", "notes")


def runs(options: argparse.Namespace) -> int:
    """Show the run history, the newest run first; with ``--follow``, show runs when they end."""
    _check_times(options)
    with task_locks(options) as locks:
        if options.follow:
            return _follow(options, locks)
        # One run more than is shown is read, to find out whether there are more.
        found = _find(options, locks, options.limit + 1)
    runs, has_more = found[: options.limit], len(found) > options.limit
    shown = output()
    if options.json:
        print_json(runs)
    else:
        shown.print_table(run_rows(runs, shown))
    if not runs:
        say(f"no runs{_between(options)}")
    elif has_more:
        say(
            f"there are more runs{_between(options)}: these are the newest {options.limit}; "
            "--limit shows more, and --until earlier ones"
        )
    return OK


def _check_times(options: argparse.Namespace) -> None:
    """Make sure that runs can be between the times of the options.

    :raises TaskLockOptionError: ``--since`` is not before ``--until``, or ``--until`` is given
        with ``--follow``
    """
    if options.follow and options.until:
        raise TaskLockOptionError("--follow goes on until Ctrl-C, and goes without --until")
    if options.since and options.until and options.since >= options.until:
        since, until = (rfc3339(moment) for moment in (options.since, options.until))
        raise TaskLockOptionError(f"--since ({since}) must be before --until ({until})")


def _between(options: argparse.Namespace) -> str:
    """Return the times of the options in words, with their zone."""
    given = (("since", options.since), ("before", options.until))
    told = (f" {word} {moment:%Y-%m-%d %H:%M:%S %Z}" for word, moment in given if moment)
    return "".join(told)


def runs_of(locks: TaskLocks, task: str, limit: int) -> list[Run]:
    """Return the newest runs of the task of exactly this name.

    The entries of what operators did and of missed run times are left out.
    """
    found = _entries_of(locks, task, limit + ACTIONS + MISSES)
    return [run for run in found if run.kind != "operator" and run.outcome != "missed"][:limit]


def actions_of(locks: TaskLocks, task: str) -> list[Run]:
    """Return what operators did with the task of exactly this name, the newest first."""
    return _entries_of(locks, task, ACTIONS, kind="operator")


def misses_of(locks: TaskLocks, task: str) -> list[Run]:
    """Return the missed run times of the task of exactly this name, the newest first."""
    return _entries_of(locks, task, MISSES, outcome="missed")


def _entries_of(
    locks: TaskLocks,
    task: str,
    limit: int,
    *,
    kind: str | None = None,
    outcome: str | None = None,
) -> list[Run]:
    limit = 1000 if is_pattern(task) else limit
    found = locks.runs(task, kind=kind, outcome=outcome, limit=limit)
    return [run for run in found if run.task == task]


def run_rows(runs: Sequence[Run], shown: Output) -> Table:
    """Return a table of runs."""
    return Table(
        _COLUMNS,
        [_row(run, shown) for run in runs],
        numbers=frozenset({"took", "token"}),
        dispensable=frozenset({"error", "notes"}),
        dropped=("token", "kind", "took"),
        dropped_last=("when", "replica", "error", "notes"),
    )


def _row(run: Run, shown: Output) -> list[Cell | str]:
    is_action, is_miss = run.kind == "operator", run.outcome == "missed"
    return [
        run.task,
        shown.cell(when_of(run)),
        "" if is_action or is_miss else took_in_words(run, shown),
        Cell(run.outcome, outcome_named(run.outcome).style),
        run.kind,
        run.replica,
        "" if run.token is None else str(run.token),
        error_in_words(run),
        run_notes(run, shown),
    ]


def _find(options: argparse.Namespace, locks: TaskLocks, limit: int) -> list[Run]:
    patterns = patterns_of(options, options.patterns)
    times = {"since": options.since, "until": options.until}
    found = locks.runs(*patterns, **_filters(options), **times, limit=limit)
    if not found and patterns:
        check_names(patterns, [task.name for task in locks.tasks(*patterns)])
    return found


def _filters(options: argparse.Namespace) -> dict[str, Any]:
    """Return which entries are wanted, besides their times."""
    return {name: getattr(options, name) for name in ("outcome", "kind", "replica", "error")}


def _follow(options: argparse.Namespace, locks: TaskLocks) -> int:
    """Print runs when they end, until Ctrl-C."""
    printer = _Printer(options.json)
    try:
        for found in _new_runs(options, locks):
            printer.print(found)
    except KeyboardInterrupt:
        return OK
    return OK


def _new_runs(options: argparse.Namespace, locks: TaskLocks) -> Iterator[list[Run]]:
    """Yield the last runs, and after that, once a second, the runs that have ended meanwhile."""
    tail = _Tail(options, locks)
    is_unavailable = False
    while True:
        try:
            found = tail.read()
            is_unavailable = False
        except TaskLockDatabaseError as error:
            if not is_unavailable:
                say(f"{message_of(error)}; trying again")
            is_unavailable = True
        else:
            yield found[::-1]
        time.sleep(_INTERVAL)


class _Tail:
    """Reads the run history again and again, each time the runs that ended since the last read."""

    def __init__(self, options: argparse.Namespace, locks: TaskLocks) -> None:
        self._options = options
        self._locks = locks
        self._patterns = patterns_of(options, options.patterns)
        self._since: datetime | None = None
        self._known: set[_Key] | None = None

    def read(self) -> list[Run]:
        """Return the runs that have ended since the last read, the newest first."""
        # `since` is read before the runs, so that a run that ends between the two reads is not left
        # out. If this read finds such a run already, the next read finds it again and skips it.
        since = self._earliest_to_end()
        if self._known is None:
            known = {_key(run) for run in self._ended(since)}
            found = _find(self._options, self._locks, self._options.limit)
        else:
            known = self._known
            found = [run for run in self._ended(self._since) if _key(run) not in known]
        self._known = known | {_key(run) for run in found}
        self._since = since
        return found

    def _ended(self, since: datetime | None) -> list[Run]:
        filters = _filters(self._options)
        found = [run for run in self._read(since, filters) if run.outcome != "missed"]
        if "missed" in (filters["outcome"] or ("missed",)):
            since = None if since is None else since - _NOTED_WITHIN
            found += self._read(since, {**filters, "outcome": "missed"})
        return found

    def _read(self, since: datetime | None, filters: dict[str, Any]) -> list[Run]:
        if since is not None and self._options.since is not None:
            since = max(since, self._options.since)
        return self._locks.runs(*self._patterns, **filters, since=since, limit=_MOST_NEW)

    def _earliest_to_end(self) -> datetime | None:
        """Return the earliest begin of a run that may still end; ``None`` if no task has ever run.

        The margin is subtracted, because a run that others cannot read yet may have begun earlier.
        """
        begun = [
            (task.started_at, task.finished_at is None)
            for task in self._locks.tasks(*self._patterns)
            if task.started_at is not None
        ]
        if not begun:
            return None
        newest = max(started_at for started_at, _ in begun)
        running = (started_at for started_at, is_running in begun if is_running)
        return min([newest, *running]) - _MARGIN


_Key = tuple[str, int | None, datetime, str]


def _key(run: Run) -> _Key:
    # The outcome is in the key, because a dead run is printed, and printed again if it ends later.
    return run.task, run.token, run.started_at, run.outcome


class _Printer:
    """Prints runs as they end, in columns that get wider, but never narrower."""

    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json
        self._shown = output()
        self._widths: list[int] = []

    def print(self, runs: Sequence[Run]) -> None:
        """Print runs. The first time, print the names of the columns above them."""
        if self._is_json:
            for run in runs:
                print(as_json(run), flush=True)
            return
        table = run_rows(runs, self._shown)
        is_first = not self._widths
        self._widths = column_widths(table, self._widths)
        names, *lines = plain_lines(table, self._widths)
        if is_first:
            self._shown.print(names)
        for run, line in zip(runs, lines, strict=True):
            is_well = run.outcome == "ok" or run.kind == "operator"
            self._shown.print(line, "" if is_well else outcome_named("error").style)
