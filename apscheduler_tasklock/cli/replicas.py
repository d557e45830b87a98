"""The command ``replicas``: who runs the tasks."""

from __future__ import annotations

import argparse

from apscheduler_tasklock.cli.exits import OK, say
from apscheduler_tasklock.cli.output import Cell, Output, Table, output, print_json
from apscheduler_tasklock.cli.target import task_locks
from apscheduler_tasklock.status import ReplicaStatus

_COLUMNS = ("replica", "host", "version", "started", "seen", "alive", "tasks", "running")

# On a narrow terminal.
_DROPPED = ("host", "version", "started", "tasks", "running", "seen")


def replicas(options: argparse.Namespace) -> int:
    """Show the replicas."""
    with task_locks(options) as locks:
        found = locks.replicas()
    if options.json:
        print_json(found)
        return OK
    shown = output()
    rows = [_row(replica, shown) for replica in found]
    shown.print_table(Table(_COLUMNS, rows, numbers=frozenset({"tasks"}), dropped=_DROPPED))
    for replica in found:
        for entry in replica.rejected if replica.alive else ():
            what, _, why = entry.partition(": ")
            shown.print(f"{what} rejected on {replica.replica_id}: {why}", "bold red")
    if not found:
        say("no replica has told of itself")
    return OK


def _row(replica: ReplicaStatus, shown: Output) -> list[Cell | str]:
    return [
        replica.replica_id,
        replica.host,
        replica.version,
        shown.moment(replica.started_at),
        shown.moment(replica.seen_at),
        Cell("yes", "green") if replica.alive else Cell("no", "red"),
        str(len(replica.tasks)),
        ", ".join(replica.running),
    ]
