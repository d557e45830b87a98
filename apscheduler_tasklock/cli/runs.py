"""The command ``runs``: the run history."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from apscheduler_tasklock.cli.exits import OK, message_of, say
from apscheduler_tasklock.cli.output import (
    FAILED_STYLE,
    OUTCOME_STYLES,
    Cell,
    Output,
    Table,
    as_json,
    column_widths,
    output,
    plain_lines,
    print_json,
)
from apscheduler_tasklock.cli.target import check_names, patterns_of, task_locks
from apscheduler_tasklock.cli.text import rfc3339
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockOptionError
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import Run

# Seconds between two looks.
_INTERVAL = 1.0

# Claims are granted in this time, at most, after the time that stands in their rows.
_MARGIN = timedelta(seconds=60)

# More runs than that do not end between two looks.
_MOST_NEW = 100_000

_COLUMNS = ("task", "started", "took", "outcome", "kind", "replica", "token", "error")


def runs(options: argparse.Namespace) -> int:
    """Show runs, the newest first; or as they end, the newest last."""
    if options.until:
        options.until = options.until.after(options.since)
    _check_times(options)
    with task_locks(options) as locks:
        if options.follow:
            return _follow(options, locks)
        # One more than is shown, which tells whether there is one.
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
    """Make sure that there can be runs between the times that were given.

    :raises TaskLockOptionError: there cannot
    """
    if options.follow and options.until:
        raise TaskLockOptionError("--follow goes on until Ctrl-C, and goes without --until")
    if options.since and options.until and options.since >= options.until:
        since, until = (rfc3339(moment) for moment in (options.since, options.until))
        raise TaskLockOptionError(f"--since ({since}) must be before --until ({until})")


def _between(options: argparse.Namespace) -> str:
    """Return between which times runs were looked for, with the zone that they were taken in."""
    given = (("since", options.since), ("before", options.until))
    told = (f" {word} {moment:%Y-%m-%d %H:%M:%S %Z}" for word, moment in given if moment)
    return "".join(told)


def runs_of(locks: TaskLocks, task: str, limit: int) -> list[Run]:
    """Return the newest runs of the task of exactly this name."""
    is_pattern = set("*?") & set(task)
    found = locks.runs(task, limit=1000 if is_pattern else limit)
    return [run for run in found if run.task == task][:limit]


def run_rows(runs: Sequence[Run], shown: Output) -> Table:
    """Return a table of runs."""
    return Table(
        _COLUMNS,
        [_row(run, shown) for run in runs],
        numbers=frozenset({"took", "token"}),
        dispensable=frozenset({"error"}),
        dropped=("token", "kind", "took"),
        dropped_last=("started", "replica", "error"),
    )


def _row(run: Run, shown: Output) -> list[Cell | str]:
    error = ": ".join(part for part in (run.error_type, run.error) if part)
    return [
        run.task,
        shown.moment(run.started_at),
        shown.seconds(run.took),
        Cell(run.outcome, OUTCOME_STYLES.get(run.outcome, FAILED_STYLE)),
        run.kind,
        run.replica,
        str(run.token),
        error,
    ]


def _find(options: argparse.Namespace, locks: TaskLocks, limit: int) -> list[Run]:
    patterns = patterns_of(options, options.patterns)
    wanted = {
        "outcome": options.outcome,
        "since": options.since,
        "until": options.until,
        "limit": limit,
    }
    found = locks.runs(*patterns, **wanted)
    if not found and patterns:
        check_names(patterns, [task.name for task in locks.tasks(*patterns)])
    return found


def _follow(options: argparse.Namespace, locks: TaskLocks) -> int:
    """Print runs when they end, until somebody ends it."""
    printer = _Printer(options.json)
    try:
        for found in _new_runs(options, locks):
            printer.print(found)
    except KeyboardInterrupt:
        return OK
    return OK


def _new_runs(options: argparse.Namespace, locks: TaskLocks) -> Iterator[list[Run]]:
    """Yield the last runs, and then again and again those that have ended meanwhile."""
    looks = _Looks(options, locks)
    is_unavailable = False
    while True:
        try:
            found = looks.look()
            is_unavailable = False
        except TaskLockDatabaseError as error:
            if not is_unavailable:
                say(f"{message_of(error)}; it is asked again")
            is_unavailable = True
        else:
            yield found[::-1]
        time.sleep(_INTERVAL)


class _Looks:
    """Looks at the run history, each of which finds what the ones before have not."""

    def __init__(self, options: argparse.Namespace, locks: TaskLocks) -> None:
        self._options = options
        self._locks = locks
        self._patterns = patterns_of(options, options.patterns)
        self._since: datetime | None = None
        self._known: set[_Key] | None = None

    def look(self) -> list[Run]:
        """Return the runs that have ended since the last look, the newest first."""
        # Before the runs: one that ends between the two is found by this look and by the next.
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
        if since is not None and self._options.since is not None:
            since = max(since, self._options.since)
        outcome = self._options.outcome
        return self._locks.runs(*self._patterns, outcome=outcome, since=since, limit=_MOST_NEW)

    def _earliest_to_end(self) -> datetime | None:
        """Return when the earliest run began that may end from now on; ``None`` if nobody runs."""
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


_Key = tuple[str, int, str]


def _key(run: Run) -> _Key:
    # A run that was taken for dead is told again when it has ended.
    return run.task, run.token, run.outcome


class _Printer:
    """Prints runs one after the other, in columns at least as wide as those before."""

    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json
        self._shown = output()
        self._widths: list[int] = []

    def print(self, runs: Sequence[Run]) -> None:
        """Print runs; the first time after the names of the columns."""
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
            self._shown.print(line, "" if run.outcome == "ok" else FAILED_STYLE)
