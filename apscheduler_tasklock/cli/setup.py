"""The commands ``upgrade``, ``downgrade`` and ``demo``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from apscheduler_tasklock.cli.exits import FAILED, OK, confirms, is_asked, say
from apscheduler_tasklock.cli.output import print_json
from apscheduler_tasklock.cli.target import database_of, task_locks
from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError


def upgrade(options: argparse.Namespace) -> int:
    """Create the tables, or bring them up to date."""
    from apscheduler_tasklock.schema import migrations as schema

    if options.sql:
        if options.json:
            raise TaskLockOptionError("--sql prints statements, and goes without --json")
        schema.print_upgrade_sql(schema=options.schema, table=options.table)
        return OK
    migrated = schema.upgrade_tables(
        database_of(options), schema=options.schema, table=options.table
    )
    name = _full_name(options)
    if options.json:
        print_json({"table": name, "migrated": migrated.changed, "notes": migrated.notes})
    else:
        print(_told_of_upgrade(name, migrated.changed, migrated.notes))
    return OK


def _told_of_upgrade(name: str, changed: bool, notes: Sequence[str]) -> str:
    says = "; ".join(notes)
    if changed:
        return f"{name} is migrated{f': {says}' if says else ''}"
    return f"nothing to migrate: {says or f'{name} is up to date'}"


def downgrade(options: argparse.Namespace) -> int:
    """Drop the tables."""
    from apscheduler_tasklock.schema import migrations as schema

    database, name = database_of(options), _full_name(options)
    if not options.yes and is_asked() and not _is_confirmed(options, name):
        say(f"{name} is not dropped")
        return FAILED
    dropped = schema.downgrade(database, schema=options.schema, table=options.table)
    if options.json:
        print_json({"table": name, "dropped": dropped})
    elif dropped:
        print(f"{name} is dropped")
    else:
        print(f"nothing to downgrade: no migration of {name} is applied")
    return OK


def _is_confirmed(options: argparse.Namespace, name: str) -> bool:
    """Ask whether to drop the tables."""
    say(
        f"this drops {name} and the tables beside it, with all tasks, runs and stored jobs in "
        f"them; {_alive(options)}"
    )
    return confirms("Drop them?")


def _alive(options: argparse.Namespace) -> str:
    """Return how many replicas would lose the tables, in words."""
    try:
        with task_locks(options) as locks:
            count = sum(replica.alive for replica in locks.replicas())
    except TaskLockError:  # for example because there are no tables
        return "whether replicas use them is not known"
    if not count:
        return "no replica is known to be alive"
    return f"{count} replica{'s are' if count > 1 else ' is'} alive, whose claims would fail"


def demo(options: argparse.Namespace) -> int:
    """Run the demo."""
    from apscheduler_tasklock.demo.run import run_demo

    return run_demo(
        options.database,
        options.replicas,
        options.seconds,
        shared_store=options.shared_store,
        leader=options.leader,
    )


def _full_name(options: argparse.Namespace) -> str:
    return f"{options.schema}.{options.table}" if options.schema else str(options.table)
