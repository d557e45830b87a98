"""The commands ``upgrade``, ``downgrade`` and ``demo``."""

from __future__ import annotations

import argparse

from apscheduler_tasklock.cli.target import database_of


def upgrade(options: argparse.Namespace) -> int:
    """Create the tables, or bring them up to date."""
    from apscheduler_tasklock.schema import migrations as schema

    if options.sql:
        schema.print_upgrade_sql(schema=options.schema, table=options.table)
        return 0
    migrated = schema.upgrade(database_of(options), schema=options.schema, table=options.table)
    name = _full_name(options)
    print(f"{name} is migrated" if migrated else f"nothing to migrate: {name} is up to date")
    return 0


def downgrade(options: argparse.Namespace) -> int:
    """Drop the tables."""
    from apscheduler_tasklock.schema import migrations as schema

    dropped = schema.downgrade(database_of(options), schema=options.schema, table=options.table)
    name = _full_name(options)
    print(
        f"{name} is dropped"
        if dropped
        else f"nothing to downgrade: no migration of {name} is applied"
    )
    return 0


def demo(options: argparse.Namespace) -> int:
    """Run the demo."""
    from apscheduler_tasklock.demo.run import run_demo

    return run_demo(options.database, options.replicas, options.seconds)


def _full_name(options: argparse.Namespace) -> str:
    return f"{options.schema}.{options.table}" if options.schema else str(options.table)
