"""The command ``replicas``: who runs the tasks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime

from apscheduler_tasklock._lock.words import unreadable_in_words
from apscheduler_tasklock._words.replicas import last_sign_of
from apscheduler_tasklock.cli.exits import OK, say
from apscheduler_tasklock.cli.output import Cell, Output, Table, output, print_json
from apscheduler_tasklock.cli.target import task_locks
from apscheduler_tasklock.status import ReplicaState, ReplicaStatus, RunningRun

_COLUMNS = (
    *("replica", "host", "version", "release"),
    *("started", "seen", "state", "tasks", "running"),
)

_STYLES = {
    ReplicaState.UNREADABLE: "bold red",
    ReplicaState.ALIVE: "green",
    ReplicaState.SILENT: "yellow",
    ReplicaState.DIED: "bold red",
    ReplicaState.STOPPED: "",
}

# A narrow terminal leaves these columns out, in this order.
_DROPPED = ("host", "version", "started", "release", "tasks", "running", "seen")


def replicas(options: argparse.Namespace) -> int:
    """Show the replicas."""
    with task_locks(options) as locks:
        found, now = locks.replicas(), locks.database_time()
    if options.json:
        print_json(found)
        return OK
    print_replicas(found, now, output())
    return OK


def print_replicas(found: Sequence[ReplicaStatus], now: datetime, shown: Output) -> None:
    """Print a table of replicas, and what the database rejects of their work.

    :param now: the time by the database's clock
    """
    shown.print_table(replica_table(found, now, shown))
    for replica in found:
        for entry in replica.rejected if replica.alive else ():
            what, _, why = entry.partition(": ")
            shown.print(f"{what} rejected on {replica.replica_id}: {why}", "bold red")
        if replica.unreadable:
            told = unreadable_in_words(replica.unreadable)
            shown.print(f"the row of {replica.replica_id} {told}", "bold red")
    if not found:
        say("no replica has reported itself")


def replica_table(found: Sequence[ReplicaStatus], now: datetime, shown: Output) -> Table:
    """Return a table of replicas.

    :param now: the time by the database's clock
    """
    rows = [_row(replica, now, shown) for replica in found]
    return Table(
        _COLUMNS,
        rows,
        numbers=frozenset({"tasks"}),
        dispensable=frozenset({"release"}),
        dropped=_DROPPED,
    )


def _row(replica: ReplicaStatus, now: datetime, shown: Output) -> list[Cell | str]:
    return [
        replica.replica_id,
        replica.host,
        replica.version,
        replica.release or "",
        shown.cell(replica.started_at),
        shown.cell(last_sign_of(replica)),
        Cell(replica.state_in_words, _STYLES[replica.state]),
        str(len(replica.tasks)),
        ", ".join(
            [_run(run, now, shown, at_most=not replica.alive) for run in replica.running]
            + [f"{_run(run, now, shown, at_most=True)} (lease ended)" for run in replica.unfinished]
        ),
    ]


def _run(run: RunningRun, now: datetime, shown: Output, *, at_most: bool) -> str:
    """Return a run of a replica in words: its task, for how long, and whether its lock is lost.

    :param at_most: whether nobody knows if it goes on
    """
    took = max(0.0, (now - run.since).total_seconds())
    text = f"{run.task} for {'at most ' if at_most else ''}{shown.seconds(round(took))}"
    return f"{text} (lock lost, token {run.token})" if run.lost else text
